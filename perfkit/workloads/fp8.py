"""Recipes of fp8: what of an operand of a product has a scale of its own, and what that costs."""

from typing import NamedTuple

from perfkit.workloads.operations import Tensor

#: Operation that finds the scales of an operand of a product and casts it to fp8.
CAST_SCALED = "cast_scaled"
#: Kernels of casts that are not merged with what is around them: a scale needs more of the operand
#: than a number or its next ones.
LONE_CASTS = frozenset(["fp8_tensor", "fp8_row", "fp8_block"])


class Fp8Cast(NamedTuple):
    """How an operand is cast to fp8.

    Parameters
    ----------
    variant : str
        Its kernel, one of `perfkit.platform.kernels.COMPILED_CASTS`; empty for a cast with a known
        scale.
    kernels : int
        Kernels, each of which reads the operand; all but the last one find its scale [-].
    copies : int
        Copies that the last one writes: one, or another one whose scales lie along the other axis
        [-].
    block : int
        Numbers that have a scale of their own; 0 where so many share one that scales do not count
        [-].
    scale_itemsize : int
        Bytes of a scale [B].
    """

    variant: str
    kernels: int = 1
    copies: int = 1
    block: int = 0
    scale_itemsize: int = 0


class Fp8Recipe(NamedTuple):
    """A recipe by which products run in fp8.

    Parameters
    ----------
    cast : Fp8Cast
        How an operand is cast.
    casts_again : bool
        Whether the backward pass casts operand, weight and gradient once more, with scales along the
        other axis.
    product : str
        Kernel of a product and of the gradient of its operand, one of
        `perfkit.platform.kernels.SCALED_PRODUCTS`; empty for one with a scale for each matrix.
    weight_product : str
        The same of the gradient of its weight.
    is_priced : bool
        Whether its products are known.
    """

    cast: Fp8Cast
    casts_again: bool = False
    product: str = ""
    weight_product: str = ""
    is_priced: bool = True

    @property
    def bytes_kept(self) -> float:
        """Bytes of all copies of a number in fp8, with their scales [B]."""
        copies = 2 if self.casts_again else self.cast.copies
        scale = self.cast.scale_itemsize / self.cast.block if self.cast.block else 0.0
        return copies * (1.0 + scale)


class Fp8Operand(NamedTuple):
    """An operand of products in fp8.

    Parameters
    ----------
    source : Tensor
        What was cast.
    along : Tensor
        Its copy for products that sum over its columns.
    across : Tensor or None
        That for products that sum over its rows; None if it is not cast yet.
    """

    source: Tensor
    along: Tensor
    across: Tensor | None


_KNOWN = Fp8Cast("")
#: Recipes by name; docs/formulas.md, table 2.4. The empty one is that of software that says nothing:
#: scales are known, as with ``delayed``, whose casts note the largest number for later ones.
RECIPES = {
    "": Fp8Recipe(_KNOWN),
    "delayed": Fp8Recipe(_KNOWN),
    "tensorwise": Fp8Recipe(Fp8Cast("fp8_tensor", kernels=2)),
    "rowwise": Fp8Recipe(
        Fp8Cast("fp8_row"),
        casts_again=True,
        product="rowwise",
        weight_product="rowwise",
    ),
    "blockwise": Fp8Recipe(
        Fp8Cast("fp8_block", copies=2, block=128, scale_itemsize=4),
        product="blocks_by_squares",
        weight_product="blocks_by_blocks",
    ),
    "mxfp8": Fp8Recipe(
        Fp8Cast("fp8_mx", copies=2, block=32, scale_itemsize=1),
        product="mx",
        weight_product="mx",
    ),
    "nvfp4": Fp8Recipe(_KNOWN, is_priced=False),
}


def name_product(recipe: str, layout: str) -> str:
    """Name the variant of a product in fp8.

    Parameters
    ----------
    recipe : str
        One of `RECIPES`.
    layout : str
        Its layout, such as ``nt``, perhaps behind ``grouped.``; ``tn`` is the gradient of a weight.

    Returns
    -------
    variant : str
        The layout, behind the kernel if that is not one with a scale for each matrix.

    Examples
    --------
    >>> name_product("rowwise", "nt"), name_product("delayed", "tn")
    ('rowwise.nt', 'tn')
    """
    kernel = RECIPES[recipe].product
    if find_layout(layout) == "tn":
        kernel = RECIPES[recipe].weight_product
    return f"{kernel}.{layout}" if kernel else layout


def find_layout(variant: str) -> str:
    """Find the layout of a product.

    Parameters
    ----------
    variant : str
        Variant of the product.

    Returns
    -------
    layout : str
        Such as ``tn``.

    Examples
    --------
    >>> find_layout("blocks_by_blocks.tn"), find_layout("nn")
    ('tn', 'nn')
    """
    return variant.rpartition(".")[2]
