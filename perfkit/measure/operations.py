"""Time isolated kernels: one table says how to call each operation in the way of a training
step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from perfkit.measure.kernels import INDEX_BATCHES, Case
from perfkit.measure.rare_operations import (
    NAMED_ARGUMENTS,
    RARE_OPERATIONS,
    list_bag_calls,
    list_bag_gradients,
    name_joined,
)
from perfkit.measure.records import KernelTiming
from perfkit.measure.timing import Reference, find_disagreement, round_times, time_calls
from perfkit.recording.modules import draw_rows
from perfkit.workloads.measured_functions import FUNCTIONS
from perfkit.workloads.vocabulary import find_entry

#: Arguments of one call, in their order.
_Arguments: TypeAlias = tuple[Any, ...]

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
#: Gradients of a layer: of its input, of its weight and of its bias.
_ALL_GRADIENTS = [True, True, True]
#: Words of the table of an embedding of words [-].
_WORDS = 14000


# -- operands
# ----------------------------------------------------------------------------------------------------


class _Operands:
    """Makes the operands of one case on a device, in one number format."""

    def __init__(
        self, case: Case, device: str, seed: int, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.dtype = torch.complex64 if case.variant.startswith("complex.") else dtype
        self.rng = np.random.default_rng(seed)
        self.table: torch.Tensor | None = None
        self.case_sizes = case.sizes
        self.causal = case.variant.endswith("_causal")
        self.has_channels_last = "_last" in case.variant

    def size(self, name: str) -> int:
        """A size of the case [-]."""
        return int(self.case_sizes[name])

    def rand(self, *sizes: str | int) -> torch.Tensor:
        """A tensor of random numbers above 0. A side is a number, or the name of a size of the
        case."""
        sides = [self.size(side) if isinstance(side, str) else side for side in sizes]
        return torch.rand(sides, device=self.device, dtype=self.dtype).add_(0.1)

    def indices(self, count: int, *sizes: str) -> torch.Tensor:
        """Random positions below a count; each side is a size of the case."""
        sides = [self.size(name) for name in sizes]
        return torch.randint(0, count, sides, device=self.device)

    def mask(self) -> torch.Tensor:
        """Triangles, like masks of attention. A random mask is slower, because a CPU cannot predict
        its branches."""
        position = torch.arange(self.size("elements"), device=self.device)
        return position % 64 > position // 64 % 64

    def pictures(self, side: int) -> torch.Tensor:
        """Pictures of a side, as many as the case has of its side."""
        channels = self.size("channels")
        count = self.size("elements") // channels // self.size("image") ** 2
        return self.rand(count, channels, side, side)

    def heads(self) -> list[torch.Tensor]:
        """Query, key and value of attention."""
        heads = []
        for _ in range(3):
            heads.append(self.rand(1, "m", "batch", "k").transpose(1, 2))
        return heads

    def triangle(self) -> list[Any]:
        """Positions below the diagonal of each matrix, as DLRMs take them from the interaction of
        their vectors."""
        side = self.size("n")
        rows, columns = torch.tril_indices(side, side, -1, device=self.device)
        return [None, rows, columns]

    def draw_lookups(self, table_rows: int) -> "list[_Lookups]":
        """Lookups of several calls that rotate; the rows follow a Zipf law, with popular rows
        scattered."""
        exponent = self.case_sizes["exponent"]
        count, bags = self.size("lookups"), self.size("bags")
        draws = []
        for _ in range(INDEX_BATCHES):
            draws.append(draw_rows(self.rng, table_rows, exponent, count))
        offsets = torch.arange(bags, device=self.device) * (count // bags)
        return [_Lookups(torch.from_numpy(rows).to(self.device), offsets) for rows in draws]


class _Lookups(NamedTuple):
    """Lookups of one call: the rows, and where each bag begins."""

    rows: torch.Tensor
    offsets: torch.Tensor


# -- arguments of operations
# ----------------------------------------------------------------------------------------------------


def _multiply_nt(operands: _Operands) -> _Arguments:
    """Bias, input and weight, whose rows are outputs."""
    return operands.rand("n"), operands.rand("m", "k"), operands.rand("n", "k").t()


def _multiply_nn(operands: _Operands) -> _Arguments:
    return operands.rand("m", "k"), operands.rand("k", "n")


def _multiply_tn(operands: _Operands) -> _Arguments:
    return operands.rand("k", "m").t(), operands.rand("k", "n")


def _multiply_batch_nt(operands: _Operands) -> _Arguments:
    return operands.rand("batch", "m", "k"), operands.rand("batch", "n", "k").transpose(1, 2)


def _multiply_batch_nn(operands: _Operands) -> _Arguments:
    if "elements" in operands.case_sizes:
        # batches are the innermost dimension
        left, right = operands.rand("m", "k", "batch"), operands.rand("k", "n", "batch")
        return left.permute(2, 0, 1), right.permute(2, 0, 1)
    return operands.rand("batch", "m", "k"), operands.rand("batch", "k", "n")


def _multiply_batch_tn(operands: _Operands) -> _Arguments:
    return operands.rand("batch", "k", "m").transpose(1, 2), operands.rand("batch", "k", "n")


def _attend(operands: _Operands) -> _Arguments:
    """Query, key, value, share of dropout, and whether attention is causal."""
    return *operands.heads(), 0.0, operands.causal


def _convolve(operands: _Operands) -> _Arguments:
    groups, image = operands.size("batch"), operands.size("image")
    height, width = operands.size("height"), operands.size("width")
    channels_in_group = operands.size("k") // (height * width)
    channels_out = operands.size("n") * groups
    pictures = operands.rand("rows", channels_in_group * groups, image, image)
    weight = operands.rand(channels_out, channels_in_group, height, width)
    if operands.has_channels_last:
        pictures = pictures.to(memory_format=torch.channels_last)
    bias = None
    stride = [operands.size("stride")] * 2
    padding = [(height - 1) // 2, (width - 1) // 2]
    dilation = [1, 1]
    transposed = False
    output_padding = [0, 0]
    return (
        pictures,
        weight,
        bias,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
    )


def _softmax(operands: _Operands) -> _Arguments:
    """Input, dimension, and whether fp16 becomes fp32."""
    return operands.rand("rows", "n"), 1, False


def _normalize_layer(operands: _Operands) -> _Arguments:
    """Input, shape, weight, bias and epsilon."""
    inputs = operands.rand("rows", "n")
    return inputs, [operands.size("n")], operands.rand("n"), operands.rand("n"), 1e-5


def _normalize_batch(operands: _Operands) -> _Arguments:
    """Input, weight, bias, running mean and variance, training, momentum and epsilon."""
    pictures = operands.pictures(operands.size("image"))
    of_channels = [operands.rand("channels") for _ in range(4)]
    return pictures, *of_channels, True, 0.1, 1e-5


def _normalize_groups(operands: _Operands) -> _Arguments:
    """Input, weight, bias, pictures, channels, pixels, groups and epsilon."""
    pictures = operands.pictures(operands.size("image"))
    weight, bias = operands.rand("channels"), operands.rand("channels")
    channels = operands.size("channels")
    count = operands.size("rows") // channels
    return pictures, weight, bias, count, channels, operands.size("n"), 8, 1e-5


def _sum_columns(operands: _Operands) -> _Arguments:
    """Input, dimensions, and whether the result keeps them."""
    return operands.rand("rows", "n"), [0], True


def _reduce_rows(operands: _Operands) -> _Arguments:
    """Input and dimensions."""
    return operands.rand("rows", "n"), [1]


def _scan_rows(operands: _Operands) -> _Arguments:
    """Input and dimension."""
    return operands.rand("rows", "n"), 1


def _compare_targets(operands: _Operands) -> _Arguments:
    """Input, targets, weight, mean of all rows, and the target that is ignored."""
    inputs = operands.rand("rows", "n")
    return inputs, operands.indices(operands.size("n"), "rows"), None, 1, -100


def _look_up_words(operands: _Operands) -> _Arguments:
    return operands.rand(_WORDS, "n"), operands.indices(_WORDS, "rows")


def _clone(operands: _Operands) -> _Arguments:
    """Transposed heads, as many as divide the rows."""
    rows = operands.size("rows")
    heads = max(count for count in (1, 2, 4) if rows % count == 0)
    width = operands.size("elements") // rows
    return (operands.rand(rows // heads, heads, width).transpose(0, 1),)


def _make_zeros(operands: _Operands) -> _Arguments:
    """A tensor of the same type, and a shape."""
    return operands.rand(1), [operands.size("elements")]


def _concatenate(operands: _Operands) -> _Arguments:
    """Parts and dimension."""
    parts, rows = operands.size("n"), operands.size("rows")
    width = operands.size("elements") // rows
    return [operands.rand(rows // parts, width) for _ in range(parts)], 1


def _take_triangle(operands: _Operands) -> _Arguments:
    return operands.rand("rows", "n", "n"), operands.triangle()


def _put_triangle(operands: _Operands) -> _Arguments:
    """Zeros, positions, values, and whether values are added."""
    side = operands.size("n")
    zeros, positions = operands.rand("rows", "n", "n"), operands.triangle()
    return zeros, positions, operands.rand("rows", side * (side - 1) // 2), True


def _return_slice(operands: _Operands) -> _Arguments:
    """The gradient of all columns but the first: gradient, shape of the input, dimension, start,
    end and step."""
    columns = operands.size("n") + 1
    gradient = operands.rand("rows", "n")
    return gradient, [operands.size("rows"), columns], 1, 1, columns, 1


def _copy(operands: _Operands) -> _Arguments:
    return operands.rand("rows", "n"), operands.rand("rows", "n")


def _gather(operands: _Operands) -> _Arguments:
    inputs = operands.rand("rows", "n")
    return inputs, 1, operands.indices(operands.size("n"), "rows", "n")


def _scatter(operands: _Operands) -> _Arguments:
    inputs = operands.rand("rows", "n")
    positions = operands.indices(operands.size("n"), "rows", "n")
    return inputs, 1, positions, operands.rand("rows", "n")


def _upsample_nearest(operands: _Operands) -> _Arguments:
    """Pictures, size of the result, and scales."""
    side = operands.size("image")
    return operands.pictures(side // 2), [side, side], 2.0, 2.0


def _upsample_bilinear(operands: _Operands) -> _Arguments:
    """Pictures, size of the result, whether corners are aligned, and scales."""
    side = operands.size("image")
    return operands.pictures(side // 2), [side, side], False, 2.0, 2.0


def _pool(operands: _Operands) -> _Arguments:
    """Pictures, window, stride and padding."""
    window, stride = operands.size("window"), operands.size("stride")
    pictures = operands.pictures(operands.size("image"))
    return pictures, [window, window], [stride, stride], [window // 3, window // 3]


def _pool_to_half(operands: _Operands) -> _Arguments:
    """Pictures, and the size of the result, rounded up."""
    side = operands.size("image")
    half = (side + 1) // 2
    return operands.pictures(side), [half, half]


# -- arguments of lookups, whose calls rotate
# ----------------------------------------------------------------------------------------------------


def _sum_bags(operands: _Operands) -> list[_Arguments]:
    """Table, rows, bags, scaling by frequency, mode of a sum, and whether gradients are sparse."""
    table = operands.rand("table_rows", "dim")
    lookups = operands.draw_lookups(len(table))
    return [(table, call.rows, call.offsets, False, 0, True) for call in lookups]


def _return_bags(operands: _Operands, sparse: bool) -> list[_Arguments]:
    """Gradient of the bags, what the forward call says of them, rows of the table, scaling, mode,
    whether the result is sparse, and weights."""
    gradient = operands.rand("bags", "dim")
    rows = operands.size("table_rows")
    table = torch.empty(rows, operands.size("dim"), device=operands.device)
    calls = []
    for call in operands.draw_lookups(rows):
        bags = torch.ops.aten._embedding_bag(table, call.rows, call.offsets, False, 0, sparse)
        about_bags = (call.rows, call.offsets, *bags[1:])
        calls.append((gradient, *about_bags, rows, False, 0, sparse, None))
    return calls


def _return_bags_sparse(operands: _Operands) -> list[_Arguments]:
    return _return_bags(operands, sparse=True)


def _return_bags_dense(operands: _Operands) -> list[_Arguments]:
    return _return_bags(operands, sparse=False)


def _return_words(operands: _Operands) -> list[_Arguments]:
    """Gradient, words, rows of the table, no padding, and no scaling by frequency."""
    gradient, rows = operands.rand("bags", "dim"), operands.size("table_rows")
    return [(gradient, call.rows, rows, -1, False) for call in operands.draw_lookups(rows)]


def _update_rows(operands: _Operands) -> list[_Arguments]:
    """A table, and a sparse gradient."""
    values = operands.rand("lookups", "dim")
    table = operands.rand("table_rows", "dim")
    calls = []
    for call in operands.draw_lookups(len(table)):
        gradient = torch.sparse_coo_tensor(
            call.rows[None], values, size=table.shape, check_invariants=False
        )
        calls.append((table, gradient))
    return calls


# -- arguments of gradients: from the gradient of an operation's result, its result and its arguments
# ----------------------------------------------------------------------------------------------------


def _return_attention(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    query_key_value, options = arguments[:3], arguments[3:]
    return gradient, *query_key_value, *result, *options


def _return_convolution(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    of_input, of_weight, of_bias = True, True, False
    return gradient, *arguments, [of_input, of_weight, of_bias]


def _return_softmax(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    inputs, dimension, _ = arguments
    return gradient, result, dimension, inputs.dtype


def _return_layer(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    inputs, shape, weight, bias, _ = arguments
    _, mean, deviation = result
    return gradient, inputs, shape, mean, deviation, weight, bias, _ALL_GRADIENTS


def _return_batch(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    inputs, weight, _, running_mean, running_variance, training, _, epsilon = arguments
    _, mean, deviation = result
    running = (running_mean, running_variance)
    return gradient, inputs, weight, *running, mean, deviation, training, epsilon, _ALL_GRADIENTS


def _return_groups(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    inputs, weight, _, count, channels, pixels, groups, _ = arguments
    _, mean, deviation = result
    shape = (count, channels, pixels, groups)
    return gradient, inputs, mean, deviation, weight, *shape, _ALL_GRADIENTS


def _return_targets(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    _, total_weight = result
    return gradient, *arguments, total_weight


def _return_nearest(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    inputs, size, *scales = arguments
    return gradient, size, list(inputs.shape), *scales


def _return_maxima(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    dilation, round_up = [1, 1], False
    _, positions = result
    return gradient, *arguments, dilation, round_up, positions


def _return_averages(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    round_up, count_padding, divisor = False, True, None
    return gradient, *arguments, round_up, count_padding, divisor


def _return_half(gradient: Any, result: Any, arguments: _Arguments) -> _Arguments:
    inputs, _ = arguments
    return gradient, inputs


# -- tables
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    """How to call an operation: its name in PyTorch, with the overload after a dot, its arguments,
    and those with a name."""

    name: str
    arguments: Callable[[_Operands], _Arguments]
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _RotatingOperation:
    """How to call an operation whose time depends on its indices: the arguments of several calls
    that rotate."""

    name: str
    arguments: Callable[[_Operands], list[_Arguments]]
    named: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Gradient:
    """How to call the gradient of an operation: the key of that operation, and the arguments from
    the gradient of its result, its result and its arguments."""

    name: str
    forward: str
    arguments: Callable[[Any, Any, _Arguments], _Arguments]


#: Every operation except elementwise ones, by class and variant or by variant alone.
_OPERATIONS = {
    "gemm.nt": _Operation("addmm", _multiply_nt),
    "gemm.nn": _Operation("mm", _multiply_nn),
    "gemm.tn": _Operation("mm", _multiply_tn),
    "bmm.nt": _Operation("bmm", _multiply_batch_nt),
    "bmm.nn": _Operation("bmm", _multiply_batch_nn),
    "bmm.tn": _Operation("bmm", _multiply_batch_tn),
    "attention.forward": _Operation(_FLASH, _attend),
    "convolution.forward": _Operation("convolution", _convolve),
    "_softmax": _Operation("_softmax", _softmax),
    "_log_softmax": _Operation("_log_softmax", _softmax),
    "native_layer_norm": _Operation("native_layer_norm", _normalize_layer),
    "native_batch_norm": _Operation("native_batch_norm", _normalize_batch),
    "native_group_norm": _Operation("native_group_norm", _normalize_groups),
    "sum": _Operation("sum.dim_IntList", _sum_columns),
    "mean": _Operation("mean.dim", _reduce_rows),
    "amax": _Operation("amax", _reduce_rows),
    "argmax": _Operation("argmax", _scan_rows),
    "cumsum": _Operation("cumsum", _scan_rows),
    "nll_loss_forward": _Operation("nll_loss_forward", _compare_targets),
    "embedding": _Operation("embedding", _look_up_words),
    "clone": _Operation("clone", _clone, {"memory_format": torch.contiguous_format}),
    "new_zeros": _Operation("new_zeros", _make_zeros),
    "cat": _Operation("cat", _concatenate),
    "index": _Operation("index.Tensor", _take_triangle),
    "index_put": _Operation("index_put", _put_triangle),
    "slice_backward": _Operation("slice_backward", _return_slice),
    "copy_": _Operation("copy_", _copy),
    "gather": _Operation("gather", _gather),
    "scatter_add": _Operation("scatter_add", _scatter),
    "upsample_nearest2d": _Operation("upsample_nearest2d", _upsample_nearest),
    "upsample_bilinear2d": _Operation("upsample_bilinear2d", _upsample_bilinear),
    "max_pool2d_with_indices": _Operation("max_pool2d_with_indices", _pool),
    "avg_pool2d": _Operation("avg_pool2d", _pool),
    "_adaptive_avg_pool2d": _Operation("_adaptive_avg_pool2d", _pool_to_half),
}
_ROTATING = {
    "_embedding_bag": _RotatingOperation("_embedding_bag", _sum_bags),
    "embedding_backward.sparse": _RotatingOperation("_embedding_bag_backward", _return_bags_sparse),
    "embedding_backward.dense": _RotatingOperation("_embedding_bag_backward", _return_bags_dense),
    "embedding_backward.dense_rows": _RotatingOperation("embedding_dense_backward", _return_words),
    "embedding_update.sparse": _RotatingOperation("add_.Tensor", _update_rows, {"alpha": -1e-9}),
}
_GRADIENTS = {
    "attention.backward": _Gradient(f"{_FLASH}_backward", "attention.forward", _return_attention),
    "convolution.backward": _Gradient(
        "convolution_backward", "convolution.forward", _return_convolution
    ),
    "_softmax_backward_data": _Gradient("_softmax_backward_data", "_softmax", _return_softmax),
    "_log_softmax_backward_data": _Gradient(
        "_log_softmax_backward_data", "_log_softmax", _return_softmax
    ),
    "native_layer_norm_backward": _Gradient(
        "native_layer_norm_backward", "native_layer_norm", _return_layer
    ),
    "native_batch_norm_backward": _Gradient(
        "native_batch_norm_backward", "native_batch_norm", _return_batch
    ),
    "native_group_norm_backward": _Gradient(
        "native_group_norm_backward", "native_group_norm", _return_groups
    ),
    "nll_loss_backward": _Gradient("nll_loss_backward", "nll_loss_forward", _return_targets),
    "upsample_nearest2d_backward": _Gradient(
        "upsample_nearest2d_backward", "upsample_nearest2d", _return_nearest
    ),
    "max_pool2d_with_indices_backward": _Gradient(
        "max_pool2d_with_indices_backward", "max_pool2d_with_indices", _return_maxima
    ),
    "avg_pool2d_backward": _Gradient("avg_pool2d_backward", "avg_pool2d", _return_averages),
    "_adaptive_avg_pool2d_backward": _Gradient(
        "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool2d", _return_half
    ),
}


# -- calls
# ----------------------------------------------------------------------------------------------------


def count_operands(tree: Any) -> float:
    """Count the bytes of tensors, each once; a sparse tensor counts with its values.

    Parameters
    ----------
    tree : any
        Arguments or results of an operation.

    Returns
    -------
    nbytes : float
        Sum over the tensors [B].
    """
    nbytes = {}
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        tensor = leaf._values() if leaf.layout is torch.sparse_coo else leaf
        nbytes[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
    return float(sum(nbytes.values()))


def _find_function(name: str) -> Any:
    """PyTorch's function of a name, with the overload after a dot."""
    name, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


def _find_key(case: Case) -> str:
    """The key of a case in the tables: of its class and variant, of its variant alone, or, because
    one call covers all groups of convolutions, and attention with and without mask, of its phase."""
    phase = case.variant.partition("_")[0]
    plain = case.variant.removeprefix("complex.")
    for key in (f"{case.kind}.{plain}", case.variant, f"{case.kind}.{phase}"):
        if key in _OPERATIONS or key in _ROTATING or key in _GRADIENTS or key in RARE_OPERATIONS:
            return key
    return case.variant


def _list_calls(operands: _Operands, key: str) -> "list[partial[Any]]":
    """One call of an operation, or several that rotate."""
    if key in RARE_OPERATIONS:
        rare = RARE_OPERATIONS[key]
        named = NAMED_ARGUMENTS.get(key, {})
        function = _find_function(rare.name)
        count = INDEX_BATCHES if rare.rotates else 1
        return [partial(function, *rare.arguments(operands), **named) for _ in range(count)]
    if key in _GRADIENTS:
        return [_call_gradient(operands, _GRADIENTS[key])]
    if key in _ROTATING:
        rotating = _ROTATING[key]
        function = _find_function(rotating.name)
        all_arguments = rotating.arguments(operands)
        return [partial(function, *arguments, **rotating.named) for arguments in all_arguments]
    if key in _OPERATIONS:
        return [_call_operation(operands, _OPERATIONS[key])]
    return [_call_elementwise(operands, key)]


def _list_bags(operands: _Operands, case: Case) -> "list[partial[Any]]":
    """Calls of bags that are no sums, which rotate, or of their gradients."""
    aten = torch.ops.aten
    if case.kind == "embedding_forward":
        lookups = list_bag_calls(operands, case.variant)
        return [partial(aten._embedding_bag.default, *arguments) for arguments in lookups]
    gradients = list_bag_gradients(operands, case.variant)
    return [partial(aten._embedding_bag_backward.default, *arguments) for arguments in gradients]


def _call_operation(operands: _Operands, operation: _Operation) -> "partial[Any]":
    function = _find_function(operation.name)
    return partial(function, *operation.arguments(operands), **operation.named)


def _call_gradient(operands: _Operands, gradient: _Gradient) -> "partial[Any]":
    """The call of a gradient, after the operation itself has run once."""
    forward = _call_operation(operands, _OPERATIONS[gradient.forward])
    result = forward()
    output = result[0] if isinstance(result, tuple) else result
    gradient_of_output = operands.rand(*output.shape)
    if operands.has_channels_last:
        gradient_of_output = gradient_of_output.to(memory_format=torch.channels_last)
    arguments = gradient.arguments(gradient_of_output, result, forward.args)
    return partial(_find_function(gradient.name), *arguments)


def _call_elementwise(operands: _Operands, variant: str) -> "partial[Any]":
    """The call of a function of `perfkit.workloads.measured_functions.FUNCTIONS`: letters there are
    tensors, ``mask`` is a tensor of truth values, and named arguments are in a dictionary."""
    name, *listed = FUNCTIONS[variant]
    tensors = dict[str, torch.Tensor]()
    arguments = list[Any]()
    named = dict[str, Any]()
    for operand in listed:
        if isinstance(operand, dict):
            named = operand
        elif isinstance(operand, str):
            if operand not in tensors:
                tensors[operand] = _make_operand(operands, operand)
            arguments.append(tensors[operand])
        else:
            arguments.append(operand)
    return partial(_find_function(name), *arguments, **named)


def _make_operand(operands: _Operands, letter: str) -> torch.Tensor:
    """A tensor of an elementwise function. In a case with rows ``y`` has one number for each of them."""
    if letter == "mask":
        return operands.mask()
    rows = int(operands.case_sizes.get("rows", 0))
    if not rows:
        return operands.rand("elements")
    if letter == "y":
        return operands.rand(rows, 1)
    return operands.rand(rows, operands.size("elements") // rows)


def _attend_on_gpu(operands: _Operands, phase: str) -> "partial[Any]":
    """Attention with the kernel that PyTorch chooses."""
    attend: Any = partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=operands.causal
    )
    if phase == "forward":
        return partial(attend, *operands.heads())
    leaves = [leaf.detach().requires_grad_() for leaf in operands.heads()]
    result = attend(*leaves)
    gradient = operands.rand(*result.shape)
    return partial(torch.autograd.grad, result, leaves, gradient, retain_graph=True)


def prepare(
    case: Case, *, device: str = "cpu", seed: int = 0, dtype: torch.dtype = torch.float32
) -> "tuple[list[partial[Any]], float]":
    """Allocate the operands of one case and return the calls that run it.

    Parameters
    ----------
    case : Case
        What to time.
    device : str
        Torch device.
    seed : int
        Seed of the operands [-].
    dtype : torch.dtype, optional
        Number format.

    Returns
    -------
    calls : list of callables
        Run in rotation; several where new indices decide the time (embeddings).
    nbytes : float
        Bytes of all operands that are read or written, each once. Operands that are not read in
        full do not count, see `perfkit.workloads.vocabulary`: tables of embeddings, and tensors
        that only give a shape [B].
    """
    operands = _Operands(case, device, seed, dtype)
    if case.kind == "attention" and device != "cpu":
        phase = case.variant.partition("_")[0]
        calls = [_attend_on_gpu(operands, phase)]
    elif case.kind.startswith("embedding") and name_joined(case.variant):
        calls = _list_bags(operands, case)
    else:
        calls = _list_calls(operands, _find_key(case))
    call = calls[0]
    written = call()
    unread = find_entry(call.func.__name__.partition(".")[0]).unread
    if case.kind == "embedding_update":
        # only the rows of the gradient change in the table
        unread, written = (0,), ()
    elif case.variant in ("index.rows", "gather.rows") and written.numel() < call.args[0].numel():
        # as many rows are read as are written
        unread = (0,)
    elif case.kind == "embedding_forward":
        # the sums; what else comes back describes the bags
        written = written[0]
    read = [operand for place, operand in enumerate(call.args) if place not in unread]
    return calls, count_operands([read, written])


def time_kernels(*, cases: Sequence[Sequence[Any]], seconds: float) -> list[KernelTiming]:
    """Time isolated kernels.

    Parameters
    ----------
    cases : sequence of sequence
        Kind, variant and sizes of each `Case`.
    seconds : float
        Time for each case [s].

    Returns
    -------
    timings : list of KernelTiming
        Of each case.
    """
    timings, reference = [], Reference()
    before = reference()
    for number, case in enumerate(cases):
        calls, nbytes = prepare(Case(*case), seed=number)
        timing = time_calls(calls, seconds=seconds)
        if find_disagreement(timing) > 0.1:
            timing = min(timing, time_calls(calls, seconds=seconds), key=find_disagreement)
        after = reference()
        timings.append(
            KernelTiming(
                nbytes=nbytes,
                **timing.summary,
                reference=round_times(np.sqrt(before * after)),
            )
        )
        before = after
    return timings
