"""Tensors, weights and layouts of products: what layers of workloads are described with."""

from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from perfkit.workloads.columns import OperationSizes
from perfkit.workloads.frozen_formats import FrozenFormat
from perfkit.workloads.tables import EmbeddingTable

#: Kernels that a GPU starts to sort by key [-].
SORT = 10
#: Names of fused kernels of attention: FlashAttention-3 (also cuDNN's), FlashAttention-2,
#: FlashAttention in Triton, and memory-efficient attention.
ATTENTION = ("flash3", "flash2", "triton", "efficient")


#: Operation that casts a weight to fp8 for all micro-batches of an iteration.
CAST_ONCE = "cast_weight_once"


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
    needs_gradient : bool
        Whether the backward pass computes its gradient.
    layer : int, optional
        Number of its layer; None for no layer [-].
    root : Tensor, optional
        The tensor of which it is a view.
    gradient : Tensor, optional
        The gradient that has arrived in this micro-batch; views have that of their root.
    gradient_sum : Tensor, optional
        Sum of the gradients of earlier micro-batches, of what is trained.
    """

    storage: int
    shape: tuple[Any, ...]
    itemsize: int
    needs_gradient: bool = False
    layer: int | None = None
    root: Any = None
    gradient: "Tensor | None" = None
    gradient_sum: "Tensor | None" = None
    numel: Any = field(init=False)
    nbytes: Any = field(init=False)

    def __post_init__(self) -> None:
        self.root, self.numel = self.root or self, prod(self.shape)
        self.nbytes = self.numel * self.itemsize

    def view(self, *shape: Any) -> "Tensor":
        """A view with another shape, or of a part."""
        return Tensor(
            self.storage, shape, self.itemsize, self.needs_gradient, self.layer, self.root
        )


@dataclass(slots=True, eq=False)
class Weight(Tensor):
    """A weight, trained if it needs a gradient or else frozen, and what is known of it.

    Parameters
    ----------
    module : str
        Part of the model.
    table : EmbeddingTable, optional
        The embedding table that it holds.
    table_number : int, optional
        Number of this table among those of the rank [-].
    shard : Tensor, optional
        The part that this rank stores, if ranks share the weight.
    group : int, optional
        Number of the group of ranks that average its gradient; None if no ranks do [-].
    bucket : int, optional
        Number of the module in whose buckets its gradient is reduced; None for no buckets [-].
    row_update : OperationSizes, optional
        Sizes of an update of its looked-up rows alone; None if all of it is updated.
    narrow : Tensor, optional
        The copy that autocast has made for products of this micro-batch.
    fp8 : Fp8Operand, optional
        The copies in fp8 for products of all micro-batches, see `perfkit.workloads.fp8`.
    in_fp8 : bool
        Whether ranks gather it in fp8, for products that take it so.
    due : int
        Gradients that are still to arrive in this micro-batch [-].
    frozen_format : FrozenFormat, optional
        How it is stored if it is frozen and products do not take it as it is.
    """

    module: str = ""
    table: EmbeddingTable | None = None
    table_number: int | None = None
    shard: Tensor | None = None
    group: int | None = 0
    bucket: int | None = None
    row_update: OperationSizes | None = None
    narrow: Tensor | None = None
    fp8: Any = None
    in_fp8: bool = False
    due: int = 0
    frozen_format: FrozenFormat | None = None

    def freeze_as(self, frozen_format: FrozenFormat) -> None:
        """Store its numbers in a format that products do not take.

        Parameters
        ----------
        frozen_format : FrozenFormat
            The format.
        """
        self.frozen_format = frozen_format
        self.nbytes = frozen_format.count_bytes(self.numel)

    @property
    def stored(self) -> Tensor:
        """What this rank stores of it, and updates."""
        return self if self.shard is None else self.shard


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
#: Variants of products of groups of rows begin with it, such as ``grouped.nn``.
GROUPED = "grouped"
#: Products whose operands are fp8.
FP8_PRODUCTS = ("_scaled_mm", "_scaled_grouped_mm")
