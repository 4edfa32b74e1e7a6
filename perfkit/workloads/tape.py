"""A tape: records the operations that PyTorch would dispatch, forward and backward, without
computing anything."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple

from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import check_type
from perfkit.workloads.columns import HostCalls, Kind, OperationSizes, Size
from perfkit.workloads.fp8 import CAST_SCALED, RECIPES, Fp8Operand, name_product
from perfkit.workloads.graph import Label
from perfkit.workloads.operations import CAST_ONCE, FP8_PRODUCTS, GROUPED, Layout, Tensor, Weight
from perfkit.workloads.tables import EmbeddingTable

#: Bytes of one number by data type [B].
ITEMSIZE = {name: int(DTYPES[name]) for name in ("fp64", "fp32", "tf32", "bf16", "fp16")}
#: Sizes of an operation that is timed by its bytes alone.
_NO_SIZES = OperationSizes()


def check_switches(dtype: str, *, mixed: bool, **others: bool) -> None:
    """Check the settings of a workload that are on or off.

    Parameters
    ----------
    dtype : str
        Data type of products.
    mixed : bool
        Whether weights stay fp32.
    **others : bool
        Further settings.

    Raises
    ------
    ValueError
        For values that are not True or False, and for mixed precision without a narrower data type.
    """
    for name, value in {**others, "mixed": mixed}.items():
        check_type(name, value, bool)
    if mixed and ITEMSIZE.get(dtype, 2) != 2:
        fault = f"mixed is True with dtype {dtype!r}; weights are fp32 already"
        raise ValueError(f"{fault}; take bf16 or fp16, or leave it")


class Calls(Enum):
    """Which operations are calls of the framework; the others are further kernels of the last
    call."""

    EACH = "each operation"
    NEXT = "the next operation, and those after it belong to its call"
    NONE = "no operation"


class RecordedAccess(NamedTuple):
    """A tensor that an operation reads or writes.

    Parameters
    ----------
    storage : int
        Number of its storage [-].
    nbytes : int or array
        Bytes [B].
    is_write : bool
        Whether it is written.
    layer : int, optional
        Number of the layer for which it is touched; None for no layer [-].
    """

    storage: int
    nbytes: Any
    is_write: bool
    layer: int | None


@dataclass(slots=True, eq=False)
class RecordedOperation:
    """An operation on a tape.

    Parameters
    ----------
    label : Label
        Name, kind, variant, phase and module.
    sizes : OperationSizes
        How much it computes, copies or sends.
    host_calls : HostCalls
        What the host does for it.
    layer : int, optional
        Number of its layer; None for no layer [-].
    accesses : list of RecordedAccess
        What it reads, and then what it writes.
    bucket : int, optional
        If it reduces one gradient of a bucket: number of the module in whose buckets that is [-].
    parts : tuple of str
        Parts of a layer that it belongs to, of `perfkit.models.checkpoints.CHECKPOINT_PARTS`.
    """

    label: Label
    sizes: OperationSizes
    host_calls: HostCalls
    layer: int | None
    accesses: list[RecordedAccess]
    bucket: int | None = None
    parts: tuple[str, ...] = ()


class Node(NamedTuple):
    """A step of the backward pass, with its module and layer."""

    module: str
    layer: int | None
    run: Callable[[], Any]


class Piece(NamedTuple):
    """A gradient, and the part of a bucket to which it was copied.

    Parameters
    ----------
    bucket : int
        Number of the module in whose buckets it is reduced [-].
    gradient, part : Tensor
        The gradient, and its copy.
    layer : int, optional
        Layer of the weight; None for no layer [-].
    """

    bucket: int
    gradient: Tensor
    part: Tensor
    layer: int | None


class LaunchWait(NamedTuple):
    """An operation that waits for a collective, both by their positions in the recording [-].

    `of_previous_iteration` says that it is the one that the iteration before has launched.
    """

    operation: int
    launch: int
    of_previous_iteration: bool = False


class Tape:
    """Records operations in the order in which PyTorch's eager mode and its autograd engine
    dispatch them.

    Backward nodes run in the reverse order of their creation, as in the engine. A second gradient
    that arrives at a tensor is added to the first. Views start no kernel: they are counted as calls
    without one.

    Parameters
    ----------
    itemsize : int
        Bytes of one element in products [B].
    mixed : bool
        Whether weights, and all that is not a product, stay fp32 (autocast).
    overlap : bool
        Whether collectives run until a later operation waits for them; else each is waited for at
        once.
    """

    def __init__(self, itemsize: int = 4, *, mixed: bool = False, overlap: bool = False) -> None:
        self.itemsize, self.wide = itemsize, 4 if mixed else itemsize
        self.overlap = overlap
        # whether all gradients of a group of ranks are reduced at once, in the format of products
        self.grouped = False
        # whether products of weight gradients wait until all other gradients are computed, and those
        # that wait
        self.delays_weights = False
        self.delayed: list[Node] = []
        self.index = 8  # bytes of an index
        self.phase, self.module = "forward", ""
        self.layer: int | None = None  # of what is recorded now
        self.parts: tuple[str, ...] = ()  # of the layer that is recorded now
        # results that were saved, by the storages to which a layer that runs again would write them
        self.saved: dict[int, int] = {}
        self.weights: list[Weight] = []  # in the order of their first use
        #: What updates a weight as soon as its gradient is complete; None if all are updated behind
        #: the backward pass.
        self.update_weight: Callable[[Weight], None] | None = None
        #: Whether adapters alone are trained, and all other weights are frozen.
        self.trains_adapters_alone = False
        self._next_weight = 0  # position of the weight that the next call of `parameter` returns
        self.tables: list[EmbeddingTable] = []
        self.operations: list[RecordedOperation] = []
        self.storage_layers: list[int | None] = []  # layer of every storage
        # module of each weight and state that is updated in lists, by its storage
        self.owners: dict[int, str] = {}
        self.middle, self.repeats = 0, 1  # the layer that represents several ones, and how many
        self.waits: list[LaunchWait] = []
        self.bare = 0  # calls without a kernel before the next operation
        self.calls = Calls.EACH
        # Gradients.
        self.nodes: list[Node] = []
        self.is_first_micro_batch = self.is_last_micro_batch = True
        # weights whose last gradient the running node has computed
        self.complete: list[Weight] = []
        self.strided: set[int] = set()  # storages of gradients whose elements are permuted
        #: Whether products of weight gradients add to the sums of earlier micro-batches.
        self.fuses_sums = False
        #: Whether weights are cast to fp8 for all micro-batches at once.
        self.keeps_fp8 = False
        #: What of an operand in fp8 has a scale of its own, one of `perfkit.workloads.fp8.RECIPES`.
        self.fp8_recipe = ""
        #: Whether products of updates are bf16, whatever the format of the weights.
        self.updates_in_bf16 = False
        #: Whether ranks gather the weights of products in fp8 in this format.
        self.gathers_fp8 = False
        self.pieces: list[Piece] = []
        #: Angles of positions as complex numbers in fp32, which all layers and micro-batches share.
        self.angles: Tensor | None = None
        #: Mask of causal attention whose scores are in memory, which they share, too.
        self.mask: Tensor | None = None

    def tensor(self, *shape: Any, itemsize: Any = None, needs_gradient: bool = False) -> Tensor:
        """A tensor with a storage of its own."""
        storage = self._add_storage()
        size = self.itemsize if itemsize is None else itemsize
        return Tensor(storage, shape, size, needs_gradient, self.layer)

    def share_angles(self, rows: Any, numbers: Any) -> Tensor:
        """Angles of positions, `numbers` of each of `rows`: those of the first layer that asks, as
        models keep one table of them for all layers."""
        if self.angles is None:
            self.angles = self._make_shared(rows, numbers, itemsize=8)
        return self.angles

    def share_mask(self, sequence: Any) -> Tensor:
        """Mask of `sequence` queries and as many keys: that of the first layer that asks, as models
        make one for all layers."""
        if self.mask is None:
            self.mask = self._make_shared(sequence, sequence)
        return self.mask

    def _make_shared(self, *shape: Any, itemsize: Any = None) -> Tensor:
        """A tensor of no layer."""
        layer, self.layer = self.layer, None
        shared = self.tensor(*shape, itemsize=itemsize)
        self.layer = layer
        return shared

    def _align_first_layer(self) -> None:
        """Give the first layer as many storages as the second one, if its backward pass was shorter:
        a storage has the same number in each of the layers that are repeated."""
        missing = self.storage_layers.count(1) - self.storage_layers.count(0)
        if self.trains_adapters_alone and self.repeats > 1:
            self.storage_layers += [0] * max(missing, 0)

    def _add_storage(self) -> int:
        """The number of a new storage."""
        self.storage_layers.append(self.layer)
        return len(self.storage_layers) - 1

    @property
    def trained(self) -> list[Weight]:
        """The weights that are trained; frozen ones have no gradient."""
        return [weight for weight in self.weights if weight.needs_gradient]

    def parameter(self, *shape: Any, itemsize: Any = None, is_adapter: bool = False) -> Weight:
        """A weight: a new one, or the known one if layers are recorded again, see
        `reuse_weights`. It is trained, unless adapters alone are and it is none."""
        position = self._next_weight
        self._next_weight += 1
        if position == len(self.weights):
            trained = is_adapter or not self.trains_adapters_alone
            size = self.wide if itemsize is None else itemsize
            weight = self._make_weight(shape, size, self.layer, trained=trained)
            weight.module = self.module
            self.weights.append(weight)
            return weight
        known = self.weights[position]
        if (known.module, len(known.shape)) != (self.module, len(shape)):
            raise RuntimeError(
                f"weight {position} is recorded again as one of {self.module!r} with "
                f"{len(shape)} dimensions, and was one of {known.module!r} with "
                f"{len(known.shape)}; record the same layers in the same order, and sort weights "
                "only when nothing is recorded again"
            )
        return known

    def mark_weights(self) -> int:
        """The position of the next weight, for `reuse_weights` and `list_weights_since` [-]."""
        return self._next_weight

    def list_weights_since(self, mark: int) -> list[Weight]:
        """The weights that layers have used since the mark."""
        return self.weights[mark : self._next_weight]

    def reuse_weights(self, mark: int = 0) -> None:
        """Let the layers that are recorded next be those recorded since the mark: they get the same
        weights, in the same order.

        Parameters
        ----------
        mark : int, optional
            What `mark_weights` returned ahead of the first of these layers; by default the first
            layer of the model [-].
        """
        self._next_weight = mark

    def adopt(self, weights: Sequence[Weight]) -> None:
        """Take the weights that another tape has found, in the order of their first use. Their
        storages are new here, and only their places in the model are known."""
        for weight in weights:
            adopted = self._make_weight(
                weight.shape, weight.itemsize, weight.layer, trained=weight.needs_gradient
            )
            adopted.module = weight.module
            adopted.in_fp8 = weight.in_fp8
            if weight.frozen_format is not None:
                adopted.freeze_as(weight.frozen_format)
            self.weights.append(adopted)

    def _make_weight(
        self, shape: tuple[Any, ...], itemsize: int, layer: int | None, *, trained: bool
    ) -> Weight:
        """A weight with a storage of its own."""
        return Weight(self._add_storage(), shape, itemsize, trained, layer)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape and data type, with a storage of its own."""
        return self.tensor(*tensor.shape, itemsize=tensor.itemsize)

    def apply(self, layer: "Layer", *operands: Tensor) -> Tensor:
        """Run a layer forward, and note its backward pass if an operand needs a gradient.

        Parameters
        ----------
        layer : Layer
            The layer; it is run once.
        *operands : Tensor
            What its `forward` takes.

        Returns
        -------
        y : Tensor
            Its result.
        """
        y = layer.forward(self, *operands)
        y.needs_gradient = any(operand.needs_gradient for operand in operands)
        for operand in operands:
            if isinstance(operand, Weight):
                operand.due += 1
        if y.needs_gradient:
            self.node(partial(self._run_backward, layer, y))
        return y

    def _run_backward(self, layer: "Layer", y: Tensor) -> None:
        """Run a layer backward, from the gradient of its result."""
        self.bare += layer.backward_views
        dy = self.gradient(y)
        if dy.storage in self.strided:
            dy = contiguous(self, dy)
        layer.backward(self, dy)

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Record operations of a part of a layer, one of
        `perfkit.models.checkpoints.CHECKPOINT_PARTS`."""
        before = self.parts
        self.parts = (*before, part)
        yield
        self.parts = before

    def node(self, backward: Callable[[], Any]) -> None:
        """Append a step of the backward pass; it runs before all earlier ones."""
        self.nodes.append(Node(self.module, self.layer, backward))

    def emit(
        self,
        name: str,
        kind: Kind,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        sizes: OperationSizes = _NO_SIZES,
        *,
        variant: str = "",
        launches: int = 1,
        is_call: bool = True,
    ) -> int:
        """Append one operation.

        Parameters
        ----------
        name : str
            Name in the framework.
        kind : str
            Class of operations, one of `perfkit.workloads.columns.Kind`.
        reads, writes : sequence of Tensor
            Tensors that it reads and writes.
        sizes : OperationSizes, optional
            How much it computes, copies or sends.
        variant : str, optional
            Finer class within the kind; by default the name.
        launches : int, optional
            Kernels that a GPU starts for it [-].
        is_call : bool, optional
            Whether the framework is called for it; else it belongs to an earlier call.

        Returns
        -------
        position : int
            Its position on the tape [-].
        """
        layer = self.layer
        label = Label(name, kind, variant or name, self.phase, self.module)
        opens_call = is_call and self.calls is not Calls.NONE
        host_calls = HostCalls(launches, opens_call, self.bare)
        accesses = []
        for is_write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                storage = self.saved.get(tensor.storage, tensor.storage)
                of_layer = tensor.layer if layer is None else layer
                accesses.append(RecordedAccess(storage, tensor.nbytes, is_write, of_layer))
        self.operations.append(
            RecordedOperation(label, sizes, host_calls, layer, accesses, parts=self.parts)
        )
        self.bare = 0
        if self.calls is Calls.NEXT:
            self.calls = Calls.NONE
        return len(self.operations) - 1

    def wait_for(self, launch: int) -> None:
        """Let the next operation wait for the collective at this position."""
        self.waits.append(LaunchWait(len(self.operations), launch))

    def wait_for_previous(self, operation: int, launch: int) -> None:
        """Let the operation at a position wait for the collective at another one, which the iteration
        before has launched."""
        self.waits.append(LaunchWait(operation, launch, of_previous_iteration=True))

    @property
    def looks_back(self) -> bool:
        """Whether an operation waits for a collective of the iteration before."""
        return any(wait.of_previous_iteration for wait in self.waits)

    def elementwise(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], function: str = ""
    ) -> None:
        """Append an operation on each element of the first tensor that it reads.

        Parameters
        ----------
        name : str
            Name in the framework.
        reads, writes : sequence of Tensor
            Tensors that it reads and writes.
        function : str, optional
            What it computes, where several functions have one name.
        """
        sizes = OperationSizes(elements=reads[0].numel)
        self.emit(name, "elementwise", reads, writes, sizes, variant=function)

    def rowwise(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], function: str = ""
    ) -> None:
        """Append an operation on the rows of the first tensor that it writes: norms, sums,
        softmax.

        Parameters
        ----------
        name : str
            Name in the framework.
        reads, writes : sequence of Tensor
            Tensors that it reads and writes.
        function : str, optional
            What it computes, where that is not its name.
        """
        *leading, n = writes[0].shape
        sizes = OperationSizes(elements=writes[0].numel, rows=prod(leading), n=n)
        self.emit(name, "rowwise", reads, writes, sizes, variant=function)

    def copy(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        function: str = "",
        *,
        rows: Size = 0,
    ) -> None:
        """Append a copy; as many numbers as the first tensor that it writes has.

        Parameters
        ----------
        name : str
            Name in the framework.
        reads, writes : sequence of Tensor
            Tensors that it reads and writes.
        function : str, optional
            What it computes, where that is not its name.
        rows : Size, optional
            Pieces that are copied in one go each; 0 for a copy of whole tensors [-].
        """
        sizes = OperationSizes(elements=writes[0].numel, rows=rows)
        self.emit(name, "copy", reads, writes, sizes, variant=function)

    def collective(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        nbytes: Size,
        group: int = 0,
    ) -> int:
        """Append a collective.

        Parameters
        ----------
        name : str
            One of `perfkit.workloads.graph.COLLECTIVES`.
        reads, writes : sequence of Tensor
            Tensors that it sends and receives.
        nbytes : Size
            Its message, in the convention of nccl-tests [B].
        group : int, optional
            Number of its communicator [-].

        Returns
        -------
        position : int
            Its position on the tape [-].
        """
        sizes = OperationSizes(nbytes=nbytes, group=group)
        return self.emit(name, "collective", reads, writes, sizes)

    def product(
        self,
        name: str,
        layout: Layout,
        left: Tensor,
        right: Tensor,
        result: Tensor,
        *,
        bias: Tensor | None = None,
        adds: bool = False,
        column_sums: Tensor | None = None,
    ) -> None:
        """Append a product of matrices; all dimensions of `left` but the last are its rows.

        Parameters
        ----------
        name : str
            Name in the framework.
        layout : Layout
            Which operand is transposed.
        left, right, result : Tensor
            Operands and result.
        bias : Tensor, optional
            What is added to each row.
        adds : bool, optional
            Whether it is added to what the result holds.
        column_sums : Tensor, optional
            Sums of the columns of the result, which the kernel writes too.
        """
        *leading, columns = left.shape
        rows = prod(leading)
        m, k = (columns, rows) if layout.left_is_transposed else (rows, columns)
        n = right.shape[-2] if layout.right_is_transposed else right.shape[-1]
        reads = [left, right] if bias is None else [bias, left, right]
        if adds:
            reads.append(result)
        writes = [result] if column_sums is None else [result, column_sums]
        sizes = OperationSizes.of_product(m, n, k)
        variant = layout.name
        if name in FP8_PRODUCTS:
            variant = name_product(self.fp8_recipe, variant)
        self.emit(name, "gemm", reads, writes, sizes, variant=variant)

    def batched_product(
        self,
        name: str,
        layout: Layout,
        left: Tensor,
        right: Tensor,
        result: Tensor,
        *,
        adds: bool = False,
        is_grouped: bool = False,
    ) -> None:
        """Append one product for each matrix of a batch.

        Parameters
        ----------
        name : str
            Name in the framework.
        layout : Layout
            Which operand is transposed.
        left, right, result : Tensor
            Operands and result, with the batch as first of three dimensions.
        adds : bool, optional
            Whether it is added to what the result holds.
        is_grouped : bool, optional
            Whether the kernel takes products of unlike many rows, as those of experts.
        """
        batch, rows, columns = left.shape
        m, k = (columns, rows) if layout.left_is_transposed else (rows, columns)
        n = right.shape[-2] if layout.right_is_transposed else right.shape[-1]
        sizes = OperationSizes.of_product(m, n, k, batch=batch)
        reads = [left, right, result] if adds else [left, right]
        variant = f"{GROUPED}.{layout.name}" if is_grouped else layout.name
        if name in FP8_PRODUCTS:
            variant = name_product(self.fp8_recipe, variant)
        self.emit(name, "bmm", reads, [result], sizes, variant=variant)

    def cast_to_fp8(self, tensor: Tensor) -> Fp8Operand:
        """Cast an operand of products in fp8; what a weight becomes may be kept for all
        micro-batches.

        Parameters
        ----------
        tensor : Tensor
            The operand.

        Returns
        -------
        operand : Fp8Operand
            Its copies.
        """
        if not (self.keeps_fp8 and isinstance(tensor, Weight)):
            return self._cast_operand(tensor, once=False)
        if tensor.fp8 is None:
            operand = self._cast_operand(tensor, once=True)
            if operand.across is None:
                [across] = self._emit_cast(tensor, 1, once=True)
                operand = operand._replace(across=across)
            tensor.fp8 = operand
        operand = tensor.fp8
        return operand

    def view_in_fp8(self, weight: Weight) -> Tensor:
        """The numbers of a weight that ranks have gathered in fp8.

        Parameters
        ----------
        weight : Weight
            The weight.

        Returns
        -------
        numbers : Tensor
            What is stored of it now, of 1 B each.
        """
        return Tensor(weight.storage, weight.shape, 1, layer=weight.layer)

    def cast_across(self, operand: Fp8Operand) -> Tensor:
        """The copy of an operand in fp8 for products that sum over its rows; it is cast once more if
        the recipe needs that.

        Parameters
        ----------
        operand : Fp8Operand
            What `cast_to_fp8` returned.

        Returns
        -------
        narrow : Tensor
            The copy.
        """
        if operand.across is not None:
            return operand.across
        [across] = self._emit_cast(operand.source, 1, once=False)
        return across

    def _cast_operand(self, tensor: Tensor, *, once: bool) -> Fp8Operand:
        """Cast an operand, with the copy for products that sum over its rows if one kernel makes
        both, or if it is the same one."""
        recipe = RECIPES[self.fp8_recipe]
        narrow = self._emit_cast(tensor, recipe.cast.copies, once=once)
        across = None if recipe.casts_again else narrow[-1]
        return Fp8Operand(tensor, narrow[0], across)

    def _emit_cast(self, tensor: Tensor, copies: int, *, once: bool) -> list[Tensor]:
        """Append a cast to fp8 that writes so many copies, `once` for all micro-batches."""
        cast = RECIPES[self.fp8_recipe].cast
        narrow = [self.tensor(*tensor.shape, itemsize=1) for _ in range(copies)]
        writes = list(narrow)
        if cast.block:
            for _ in range(copies):
                count = tensor.numel // cast.block
                writes.append(self.tensor(count, itemsize=cast.scale_itemsize))
        name = CAST_ONCE if once else CAST_SCALED
        variant = cast.variant
        if not variant:
            variant = "_to_copy"
            name = CAST_ONCE if once else "_to_copy"
        self.emit(
            name,
            "elementwise",
            [tensor] * cast.kernels,
            writes,
            OperationSizes(elements=tensor.numel),
            variant=variant,
            launches=cast.kernels,
        )
        return narrow

    def find_sum(self, operand: Tensor) -> Tensor | None:
        """The sum of gradients to which a product adds that of its operand, a weight; None if it
        does not."""
        if self.fuses_sums and isinstance(operand, Weight):
            return operand.gradient_sum
        return None

    def gradient(self, tensor: Tensor) -> Tensor:
        """The gradient that has arrived at a tensor, as a view in the shape of the tensor."""
        return self.find_gradient(tensor).view(*tensor.shape)

    def find_gradient(self, tensor: Tensor) -> Tensor:
        """The gradient that has arrived at a tensor, as it is: one that is sparse has fewer rows.

        Parameters
        ----------
        tensor : Tensor
            Result of a layer, or a weight.

        Returns
        -------
        gradient : Tensor
            Its gradient.

        Raises
        ------
        ValueError
            If none has arrived.
        """
        gradient = tensor.root.gradient
        if gradient is None:
            raise ValueError(
                f"no gradient has arrived at a tensor of {self.module!r}; a layer that reads it must "
                "hand one on in its backward, by Tape.pass_on or Tape.pass_through"
            )
        return gradient

    def pass_on(self, tensor: Tensor, gradient: Tensor) -> None:
        """Hand the gradient of an operand on: it is the first one, or is added to those that have
        arrived.

        Parameters
        ----------
        tensor : Tensor
            Operand of a layer; nothing happens if it needs no gradient.
        gradient : Tensor
            Its gradient.
        """
        if not tensor.needs_gradient:
            return
        root = tensor.root
        fused = self.find_sum(root)
        if fused is not None and root.gradient is fused:
            # a product has added the first gradient to the sum
            self.elementwise("add_", [fused, gradient], [fused])
            gradient = fused
        elif root.gradient is not None:
            total = self.like(root.gradient)
            self.elementwise("add", [root.gradient, gradient], [total])
            gradient = total
        root.gradient = gradient
        if isinstance(root, Weight):
            root.due -= 1
            if root.due <= 0:
                self.complete.append(root)

    def pass_through(self, tensor: Tensor, dy: Tensor) -> None:
        """Hand the gradient of a result on as that of an operand, as sums and casts do.

        It is summed up over rows if the operand has fewer dimensions than the result, and cast if
        the operand has another data type.

        Parameters
        ----------
        tensor : Tensor
            Operand of a layer; nothing happens if it needs no gradient.
        dy : Tensor
            Gradient of the result.
        """
        if not tensor.needs_gradient:
            return
        if len(dy.shape) > len(tensor.shape):
            rows, n = dy.numel // tensor.numel, tensor.numel
            total = self.tensor(*tensor.shape, itemsize=dy.itemsize)
            sizes = OperationSizes(elements=dy.numel, rows=rows, n=n)
            self.emit("sum", "rowwise", [dy], [total], sizes)
            dy = total
        if dy.itemsize != tensor.itemsize:
            cast = self.tensor(*dy.shape, itemsize=tensor.itemsize)
            self.elementwise("_to_copy", [dy], [cast])
            dy = cast
        self.pass_on(tensor, dy)

    def backward(self) -> None:
        """Run the backward nodes, each as one call of the framework, and after each keep the
        gradients of weights.

        Gradients that are reduced in buckets are copied back from these at the end.
        """
        self.phase = "backward"
        while self.nodes:
            self._run(self.nodes.pop())
        self.run_delayed()
        self.module = ""  # buckets belong to no module
        for piece in sorted(self.pieces, key=lambda piece: piece.bucket):
            self.layer = piece.layer
            empty_bucket(self, piece.part, piece.gradient)
        self.phase, self.layer = "update", None

    def delay(self, run: Callable[[], Any]) -> None:
        """Let the products of a weight gradient wait for `run_delayed`."""
        self.delayed.append(Node(self.module, self.layer, run))

    def run_delayed(self) -> None:
        """Compute the weight gradients that wait, each as one call of the framework."""
        module, layer = self.module, self.layer
        waiting, self.delayed = self.delayed, []
        for node in waiting:
            self._run(node)
        self.module, self.layer = module, layer

    def _run(self, node: Node) -> None:
        """Run a backward node as one call of the framework, and keep the gradients of weights."""
        self.module, self.layer = node.module, node.layer
        self.calls = Calls.NEXT
        node.run()
        if self.calls is Calls.NEXT:  # a call without a kernel
            self.bare += 1
        self.calls = Calls.EACH
        if self.grouped:
            self._narrow_gradients()
        for weight in self.complete:
            self.keep(weight)
        self.complete.clear()

    def keep(self, weight: Weight) -> None:
        """Keep the gradient of a weight, and copy it to a bucket if it is reduced in one.

        Each copy is followed by its reduction. Which gradients form a bucket, and are reduced by
        one collective, follows when all are known.
        """
        self.bare += 1
        accumulate(self, weight)
        if self.update_weight is not None:
            self.update_weight(weight)
        if weight.bucket is None:
            return
        gradient = self.find_gradient(weight)
        part = gradient if self.grouped else fill_bucket(self, gradient)
        group = weight.group or 0
        reduction = self.collective("all_reduce", [part], [part], nbytes=part.nbytes, group=group)
        self.operations[reduction].bucket = weight.bucket
        if not self.grouped:
            self.pieces.append(Piece(weight.bucket, gradient, part, weight.layer))

    def _narrow_gradients(self) -> None:
        """Copy the gradients that the running node has computed and that are reduced all at once to
        the format of products, in one kernel; updates read the copies."""
        wide = []
        for weight in self.complete:
            if weight.bucket is not None and self.find_gradient(weight).itemsize > self.itemsize:
                wide.append(weight)
        if not wide:
            return
        gradients = [self.find_gradient(weight) for weight in wide]
        narrow = [self.tensor(*weight.shape) for weight in wide]
        sizes = OperationSizes(elements=sum(gradient.numel for gradient in gradients))
        self.emit(
            "mul", "elementwise", gradients, narrow, sizes, variant="mul_scalar", is_call=False
        )
        for weight, gradient in zip(wide, narrow, strict=True):
            weight.gradient = gradient

    def start_micro_batch(self) -> None:
        """Go on with the next micro-batch: gradients become sums of earlier ones, and weights are
        cast once more."""
        self.is_first_micro_batch = False
        self._align_first_layer()
        self.phase = "forward"
        for weight in self.weights:
            weight.narrow = None
            weight.gradient_sum, weight.gradient = weight.gradient, None
            shard = weight.shard
            if shard is not None:
                shard.gradient_sum, shard.gradient = shard.gradient, None


def fill_bucket(tape: Tape, gradient: Tensor) -> Tensor:
    """Copy a gradient to its part of a bucket, over the number of ranks, as the reducer of
    DistributedDataParallel does."""
    itemsize = gradient.itemsize
    if tape.grouped:
        itemsize = min(itemsize, tape.itemsize)
    part = tape.tensor(*gradient.shape, itemsize=itemsize)
    sizes = OperationSizes(elements=part.numel)
    tape.emit("mul", "elementwise", [gradient], [part], sizes, variant="mul_scalar", is_call=False)
    return part


def empty_bucket(tape: Tape, part: Tensor, gradient: Tensor) -> None:
    """Copy a reduced gradient back from its part of a bucket."""
    sizes = OperationSizes(elements=part.numel, rows=part.numel // part.shape[-1])
    tape.emit("copy_", "copy", [part], [gradient], sizes, is_call=False)


def accumulate(tape: Tape, weight: Tensor) -> None:
    """Add the gradient of a weight to the sum of earlier micro-batches, if there were some."""
    total = weight.gradient_sum
    if total is not None and weight.gradient is not total:
        tape.elementwise("add_", [total, tape.find_gradient(weight)], [total])
        weight.gradient = total


def contiguous(tape: Tape, x: Tensor, run: Any = None) -> Tensor:
    """A copy of a permuted view with its elements in order, `run` at a time; a gradient passes
    through."""
    out = tape.tensor(*x.shape, itemsize=x.itemsize, needs_gradient=x.needs_gradient)
    out.root = x.root
    if run is None:
        run = x.shape[-1]
    tape.copy("clone", [x], [out], rows=x.numel // run)
    return out


class Layer:
    """What a model is built of: `Tape.apply` runs it forward, and the backward pass in reverse.

    A layer is run once. `forward` appends its operations to the tape and keeps the tensors that
    `backward` reads. `backward` gets the gradient of the result, computes those of the operands that
    need one, and hands them on by `Tape.pass_on` or `Tape.pass_through`.
    """

    #: Views that the backward pass makes first: calls without a kernel [-].
    backward_views: ClassVar[int] = 0

    #: Takes the tape and the operands, and returns the result.
    forward: Callable[..., Tensor]

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the operations of the backward pass.

        Parameters
        ----------
        tape : Tape
            The tape that has recorded the forward pass.
        dy : Tensor
            Gradient of the result.
        """
        raise NotImplementedError
