"""Tensors, and the sizes of products of them: what layers of workloads are described with."""

from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from perfkit.models.roofline import gemm_flops

#: Kernels that a GPU starts to sort by key [-].
SORT = 10
#: Names of fused kernels of attention: FlashAttention-3 (also cuDNN's), FlashAttention-2,
#: FlashAttention in Triton, and memory-efficient attention.
ATTENTION = ("flash3", "flash2", "triton", "efficient")


@dataclass(slots=True, eq=False)
class Tensor:
    """A shape with a storage; views share both storage and gradient.

    Parameters
    ----------
    storage : int
        Number of the storage [-].
    shape : tuple of int or array
        Sizes: numbers, or arrays over configurations [-].
    itemsize : int
        Bytes of one element [B].
    grad : bool
        Whether it has a gradient.
    layer : int
        Number of its layer, -1 for none [-].
    root : Tensor, optional
        The tensor of which it is a view.
    """

    storage: int
    shape: tuple[Any, ...]
    itemsize: int
    grad: bool = False
    layer: int = -1
    root: Any = None
    numel: Any = field(init=False)
    nbytes: Any = field(init=False)

    def __post_init__(self) -> None:
        self.root, self.numel = self.root or self, prod(self.shape)
        self.nbytes = self.numel * self.itemsize

    def view(self, *shape: Any) -> "Tensor":
        """A view with another shape, or of a part."""
        return Tensor(self.storage, shape, self.itemsize, self.grad, self.layer, self.root)


class Layout(NamedTuple):
    """How the operands of a product of matrices are stored.

    Parameters
    ----------
    name : str
        Variant of the operation, for which a platform may hold a model of its own.
    left_is_transposed, right_is_transposed : bool
        Whether an operand is stored with its rows and columns exchanged.
    """

    name: str
    left_is_transposed: bool = False
    right_is_transposed: bool = False


#: Both operands as they are; the right one transposed, as weights are; the left one transposed, as
#: in the gradient of a weight.
NN = Layout("nn")
NT = Layout("nt", right_is_transposed=True)
TN = Layout("tn", left_is_transposed=True)


def size_product(
    m: float, n: float, k: float, *, batch: float = 1, passes: float = 1.0
) -> dict[str, float]:
    """Features of a product of matrices.

    Parameters
    ----------
    m, n, k, batch : float
        Rows, columns, inner dimension and number of products [-].
    passes : float, optional
        How often the arithmetic of one product is done [-].

    Returns
    -------
    sizes : dict
        ``flops`` [FLOP] and the dimensions [-].
    """
    return {
        "flops": passes * gemm_flops(m, n, k, batch=batch),
        "batch": batch,
        "m": m,
        "n": n,
        "k": k,
    }
