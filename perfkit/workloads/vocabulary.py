"""The operations that PyTorch dispatches, their classes and their sizes: one table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from math import prod
from typing import Any

from perfkit.models.roofline import attention_flops
from perfkit.workloads.columns import Kind, OperationSizes
from perfkit.workloads.linear_algebra import (
    FACTORIZATIONS,
    VARIED_ATTENTION,
    name_factorization,
    name_fourier,
    name_varied_attention,
    size_distances,
    size_factorization,
    size_fourier,
    size_unknown,
    size_varied_attention,
)
from perfkit.workloads.operations import GROUPED, SORT, TN
from perfkit.workloads.recurrent_layers import read_recurrent, size_recurrent
from perfkit.workloads.row_operations import (
    count_runs,
    name_bags,
    name_gradient_of_bags,
    name_indexed,
    name_scattered,
    name_selected,
    size_indexed,
    size_selected,
)

#: Operations without work: views, bookkeeping, and copies that only a dispatch mode makes.
VIEWS = frozenset(
    [
        "view",
        "t",
        "detach",
        "transpose",
        "expand",
        "_unsafe_view",
        "split",
        "slice",
        "unsqueeze",
        "as_strided",
        "alias",
        "select",
        "squeeze",
        "permute",
        "unbind",
        "_indices",
        "_values",
        "_local_scalar_dense",
        "_record_function_enter_new",
        "_record_function_exit",
        "set_",
        "resize_",
        "empty",
        "new_empty",
        "lift_fresh",
        "is_same_size",
        "split_with_sizes",
        "zeros",
        "_reshape_alias",
        "diagonal",
        "unfold",
        "view_as_real",
        "view_as_complex",
        "real",
        "imag",
        "_conj",
        "_neg_view",
        "detach_",
        "squeeze_",
        "unsqueeze_",
        "t_",
        "transpose_",
        "empty_strided",
        "empty_like",
        "new_empty_strided",
        "is_coalesced",
        "_coalesced_",
        "_nnz",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "_assert_async",
        "_assert_scalar",
        "lift",
        "is_pinned",
    ]
)


def walk_tensors(tree: Any) -> Iterator[Any]:
    """The tensors among arguments or results, in order, also those in lists and mappings.

    Parameters
    ----------
    tree : tensor, sequence, mapping or anything
        Arguments or results of an operation.

    Yields
    ------
    tensor : torch.Tensor
        One tensor after the other.
    """
    if hasattr(tree, "untyped_storage"):
        yield tree
    elif isinstance(tree, list | tuple | dict):
        items = tree.values() if isinstance(tree, dict) else tree
        for item in items:
            yield from walk_tensors(item)


def count_bytes(tensor: Any) -> float:
    """Bytes that one pass over a tensor moves; elements repeated by a stride of zero count once,
    absent rows never.

    Parameters
    ----------
    tensor : torch.Tensor
        Dense or sparse.

    Returns
    -------
    nbytes : float
        Distinct bytes [B].
    """
    if tensor.is_sparse:
        return float(tensor._nnz() * prod(tensor.shape[1:]) * tensor.element_size())
    strides = tensor.stride()
    if all(strides):
        return float(tensor.numel() * tensor.element_size())
    if not tensor.numel():
        return 0.0
    sizes = (size for size, stride in zip(tensor.shape, strides, strict=True) if stride)
    return float(prod(sizes) * tensor.element_size())


# -- sizes: (arguments, results) -> features. Arguments are complete, defaults included, in the
# order of the schema. ---


def _factors(args: Sequence[Any]) -> list[Any]:
    """The two factors of a product; a tensor that is added to it comes before them."""
    return [argument for argument in args[:3] if hasattr(argument, "shape")][-2:]


def _count_real_products(factor: Any) -> float:
    """Products of real numbers in a product of two numbers of this type: four if they are
    complex."""
    return 4.0 if "complex" in str(getattr(factor, "dtype", "")) else 1.0


def _count_scattered(factors: Sequence[Any]) -> int:
    """Numbers of those factors whose rows and columns both lie apart in memory: libraries copy them
    first."""
    numbers = 0
    for factor in factors:
        (rows, columns), (down, along) = factor.shape[-2:], factor.stride()[-2:]
        if min(rows, columns) > 1 and min(down, along) > 1:
            numbers += factor.numel()
    return numbers


def _product(args: Sequence[Any], out: Any) -> OperationSizes:
    """A product; ``elements`` are numbers that are copied first."""
    a, b = _factors(args)
    sizes = OperationSizes.of_product(
        a.shape[-2],
        b.shape[-1],
        a.shape[-1],
        batch=a.shape[0] if a.dim() == 3 else 1,
        passes=_count_real_products(a),
    )
    return sizes._replace(elements=_count_scattered((a, b)))


def _groups(args: Sequence[Any], out: Any) -> OperationSizes:
    """Products of groups of rows, such as those of experts; one dimension is split over the
    groups."""
    a, b, ends = args[:3]
    if ends is None:
        return _product(args, out)
    parts, shares = (
        ends.shape[0],
        {(2, 3): (1, 0, 0), (3, 2): (0, 1, 0), (2, 2): (0, 0, 1)}[a.dim(), b.dim()],
    )
    sizes = (
        n / parts**split
        for n, split in zip((a.shape[-2], b.shape[-1], a.shape[-1]), shares, strict=True)
    )
    return OperationSizes.of_product(*sizes, batch=parts)


def _product_of_first_two(args: Sequence[Any], out: Any) -> OperationSizes:
    """Scales of both factors come after them."""
    return _product(args[:2], out)


def _scaled_groups(args: Sequence[Any], out: Any) -> OperationSizes:
    """Arguments: two factors, their scales, and where groups end."""
    left, right, _, _, ends = args[:5]
    return _groups([left, right, ends], out)


def _scaled_groups_v2(args: Sequence[Any], out: Any) -> OperationSizes:
    """Arguments: two factors, for each of them scales, a recipe and a layout, and where groups
    end."""
    return _groups([args[0], args[1], args[8]], out)


def _recurrent_layer(args: Sequence[Any], out: Any) -> OperationSizes:
    """An LSTM: inputs and states times weights, in as many steps as it has rows. Its forward pass has
    four results, its backward pass, of two products, seven."""
    steps_and_samples, input_weights, state_weights = args[:3]
    steps, samples = steps_and_samples.shape[:2]
    depth = input_weights.shape[1] + state_weights.shape[1]
    sizes = OperationSizes.of_product(
        steps * samples, len(input_weights), depth, passes=len(out) // 3
    )
    return sizes._replace(rows=steps)


def _name_recurrent_layer(name: str, args: Sequence[Any]) -> str:
    """Pass of a recurrent layer of oneDNN; without a fit of its own it counts as the product that it
    holds."""
    return "recurrent_backward.nt" if name.endswith("_backward") else "recurrent.nt"


def _recurrent_forward(args: Sequence[Any], out: Any) -> OperationSizes:
    return size_recurrent(args, backward=False)


def _recurrent_backward(args: Sequence[Any], out: Any) -> OperationSizes:
    return size_recurrent(args, backward=True)


def _name_recurrent(name: str, args: Sequence[Any]) -> str:
    """Pass and kernel of recurrent layers on a GPU."""
    if name.endswith("_backward"):
        return read_recurrent(args, backward=True).name_algorithm("backward")
    return read_recurrent(args, backward=False).name_algorithm("forward")


def _vectors(args: Sequence[Any], out: Any) -> OperationSizes:
    a, _ = _factors(args)
    rows = a.numel() // max(a.shape[-1], 1)
    return OperationSizes.of_product(rows, 1, a.shape[-1], passes=_count_real_products(a))


def _windows(
    x: Any, weight: Any, y: Any, transposed: bool, groups: int, passes: float = 1.0
) -> OperationSizes:
    """A convolution as a product: output places × output channels × window."""
    if transposed:  # a transposed convolution is the gradient of one from y to x
        x, y = y, x
    places, window = y.shape[0] * prod(y.shape[2:]), prod(weight.shape[2:])
    sizes = OperationSizes.of_product(
        places, y.shape[1] // groups, x.shape[1] // groups * window, batch=groups, passes=passes
    )
    return sizes._replace(elements=y.numel(), rows=y.shape[0])


def _convolution(args: Sequence[Any], out: Any) -> OperationSizes:
    x, weight, transposed, groups = args[0], args[1], args[6], args[8]
    return _windows(x, weight, next(walk_tensors(out)), transposed, groups)


def _convolution_backward(args: Sequence[Any], out: Any) -> OperationSizes:
    """As many products as gradients are wanted, of input and weight."""
    dy, x, weight, transposed, groups, wanted = *args[:3], args[7], args[9], args[10]
    products = float(wanted[0]) + float(wanted[1])
    return _windows(x, weight, dy, transposed, groups, products)


def _attention(q: Any, k: Any, v: Any, causal: bool, *, backward: bool = False) -> OperationSizes:
    """One pass; heads of values may be wider or narrower than those of queries and keys."""
    (batch, heads, sequence, width), keys = q.shape, k.shape[2]
    flops = attention_flops(
        batch,
        heads,
        sequence,
        width,
        causal=causal,
        keys=keys,
        value_dim=v.shape[3],
        backward=backward,
    )
    return OperationSizes(flops=flops, batch=batch * heads, m=sequence, n=keys, k=width)


def _attention_forward(args: Sequence[Any], out: Any) -> OperationSizes:
    q, k, v = args[:3]
    return _attention(q, k, v, _is_causal(args))


def _attention_backward(args: Sequence[Any], out: Any) -> OperationSizes:
    """The gradient of the result comes first."""
    _, q, k, v = args[:4]
    return _attention(q, k, v, _is_causal(args), backward=True)


def pick_attention(width: float, deep: float, *, half: bool, capability: float = 0.0) -> list[str]:
    """Fused kernels of attention that can run heads of these sizes, in the order of PyTorch.

    Parameters
    ----------
    width, deep : float
        Sizes of a head of queries and keys, and of values [-].
    half : bool
        Whether they are in bf16 or fp16.
    capability : float, optional
        Compute capability of the GPU; 0 for other vendors than NVIDIA [-].

    Returns
    -------
    kernels : list of str
        Some of ``flash3`` (cuDNN's), ``flash2`` and ``efficient``; none if attention runs as plain
        products.

    References
    ----------
    .. [1] PyTorch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:
       check_prefer_cudnn_attention, check_flash_attention_hardware_support,
       check_head_dim_size_flash, check_head_dim_size_mem_efficient
    """
    apart = not any(size % (8 if half else 4) for size in (width, deep))
    fits = {
        "flash3": half and apart and max(width, deep) <= 128 and capability in (9.0, 10.0),
        "flash2": half and width == deep <= 256 and (capability >= 8 or not capability),
        "efficient": apart,
    }
    return [name for name, fit in fits.items() if fit]


def _name_attention(name: str, args: Sequence[Any], phase: str) -> str:
    """Phase, causality and kernel of attention; flash attention has no name, as its version depends
    on the device."""
    kernels = {"cudnn": ".flash3", "efficient": ".efficient"}
    kernel = next((kernel for word, kernel in kernels.items() if f"_product_{word}_" in name), "")
    causal = "_causal" if _is_causal(args) else ""
    return f"{phase}{causal}{kernel}"


def _name_attention_forward(name: str, args: Sequence[Any]) -> str:
    return _name_attention(name, args, "forward")


def _name_attention_backward(name: str, args: Sequence[Any]) -> str:
    return _name_attention(name, args, "backward")


def _is_causal(args: Sequence[Any]) -> bool:
    """Whether attention is causal; in all kernels this flag is the next one after the share of
    dropout."""
    share_was_seen = False
    for argument in args:
        if isinstance(argument, float):
            share_was_seen = True
        elif share_was_seen and isinstance(argument, bool):
            return argument
    return False


def _elements(args: Sequence[Any], out: Any) -> OperationSizes:
    """The elements of the results, or of what is changed in place."""
    written = [t.numel() for t in walk_tensors(out)] or [t.numel() for t in walk_tensors(args[0])]
    lists = isinstance(args[0] if args else None, list | tuple)
    return OperationSizes(elements=sum(written) if lists else max(written, default=0))


def _elements_in_runs(args: Sequence[Any], out: Any) -> OperationSizes:
    """The elements, in rows where a tensor is broadcast."""
    return _elements(args, out)._replace(rows=count_runs(out, args))


def _split(x: Any, rows: float, n: float | None = None) -> OperationSizes:
    """All elements, in rows of `n`, or of equal length."""
    if n is None:
        n = x.numel() // max(rows, 1)
    return OperationSizes(elements=x.numel(), rows=rows, n=n)


def _rows(x: Any, n: float | None = None) -> OperationSizes:
    return _split(x, x.numel() // max(x.shape[-1], 1) if x.dim() else 1, n)


def _elements_of_first(args: Sequence[Any], out: Any) -> OperationSizes:
    return OperationSizes(elements=args[0].numel())


def _rows_of_first(args: Sequence[Any], out: Any) -> OperationSizes:
    """In a backward pass the first argument is the gradient of the result, as large as the
    input."""
    return _rows(args[0])


def _rows_of_second(args: Sequence[Any], out: Any) -> OperationSizes:
    return _rows(args[1])


def _channels(args: Sequence[Any], out: Any) -> OperationSizes:
    """A row is a channel of all samples."""
    x = args[0]
    return _split(x, x.shape[1])


def _groups_of_channels(args: Sequence[Any], out: Any) -> OperationSizes:
    """A row is a channel of one sample."""
    x = args[0]
    return _split(x, prod(x.shape[:2]), 0)


def _labels(args: Sequence[Any], out: Any) -> OperationSizes:
    labels = args[1]
    return _split(labels, labels.numel(), 0)


def _reduced(args: Sequence[Any], out: Any) -> OperationSizes:
    """Each row is summed up, or, if the first dimension is reduced, the rows are added to one
    another."""
    elements = sum(t.numel() for t in walk_tensors(args[0]))
    results = max([1, *(t.numel() for t in walk_tensors(out))])
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    leading = any(d % max(args[0].dim(), 1) == 0 for d in dims)
    if leading:
        return OperationSizes(elements=elements, rows=elements // results, n=results)
    return OperationSizes(elements=elements, rows=results, n=elements // results)


def _pooled(x: Any, y: Any, window: Sequence[int] = ()) -> OperationSizes:
    """Output places, ``m``, and the window of each, ``k``; an adaptive window follows from both
    sizes. What of a window lies beyond the image holds nothing."""
    k: float = x.numel() / max(y.numel(), 1)
    if window:
        sides = x.shape[2:] if x.dim() > 2 else x.shape[-1:]
        windows = [*window] * len(sides) if len(window) == 1 else [*window]
        k = prod(min(length, side) for length, side in zip(windows, sides, strict=False))
    return OperationSizes(elements=x.numel(), rows=prod(x.shape[:2]), m=y.numel(), k=k)


def _pooling(args: Sequence[Any], out: Any) -> OperationSizes:
    x, window = args[:2]
    return _pooled(x, next(walk_tensors(out)), window)


def _pooling_backward(args: Sequence[Any], out: Any) -> OperationSizes:
    dy, x, window = args[:3]
    return _pooled(x, dy, window)


def _adaptive_pooling(args: Sequence[Any], out: Any) -> OperationSizes:
    return _pooled(args[0], next(walk_tensors(out)))


def _adaptive_pooling_backward(args: Sequence[Any], out: Any) -> OperationSizes:
    dy, x = args[:2]
    return _pooled(x, dy)


def _moved_to_results(args: Sequence[Any], out: Any) -> OperationSizes:
    return _moved(out, out)


def _chunks_to_buffer(args: Sequence[Any], out: Any) -> OperationSizes:
    """Arguments: tensors, the dimension, chunks of each tensor, and the buffer."""
    tensors, _, chunks, buffer = args[:4]
    return OperationSizes(elements=buffer.numel(), rows=chunks * len(tensors))


def _parts_of_buffer(args: Sequence[Any], out: Any) -> OperationSizes:
    """Arguments: the buffer, widths of the parts, and the dimension along which they lie."""
    buffer, widths, dimension = args[:3]
    rows = prod(buffer.shape[:dimension]) * len(widths)
    return OperationSizes(elements=buffer.numel(), rows=rows)


def _moved(args: Sequence[Any], out: Any) -> OperationSizes:
    return _rows(next(walk_tensors([out, args])), 0)


def _concatenated(args: Sequence[Any], out: Any) -> OperationSizes:
    inner = prod(out.shape[args[1] % max(out.dim(), 1) :])
    parts = sum(1 for tensor in args[0] if tensor.numel() > 0)
    return OperationSizes(elements=out.numel(), rows=out.numel() // max(inner, 1) * parts)


def _looked_up(lookups: float, bags: float, dim: float, rows: float) -> OperationSizes:
    return OperationSizes(lookups=lookups, bags=bags, dim=dim, elements=rows * dim, rows=rows)


def _sparse_update(args: Sequence[Any], out: Any) -> OperationSizes:
    """A sparse gradient is added to a table."""
    table, gradient = args[:2]
    rows = gradient._nnz()
    return _looked_up(rows, rows, prod(table.shape[1:]), rows)


def _rows_of_sparse_result(args: Sequence[Any], out: Any) -> OperationSizes:
    return OperationSizes(elements=out._nnz() * prod(out.shape[1:]), rows=out._nnz())


def _rows_of_sparse_operand(args: Sequence[Any], out: Any) -> OperationSizes:
    rows = args[-1]._nnz()
    return OperationSizes(elements=rows * prod(out.shape[1:]), rows=rows)


def _bags(args: Sequence[Any], out: Any) -> OperationSizes:
    """Rows are priced by lookups, not by bytes."""
    table, indices = args[:2]
    lookups = indices.numel()
    sizes = _looked_up(lookups, out[0].shape[0], table.shape[1], lookups)
    return sizes._replace(rows=0)


def _bags_backward(args: Sequence[Any], out: Any) -> OperationSizes:
    """A gradient has one row for each lookup, or is as large as the table."""
    dy, indices, rows_of_table, is_sparse = args[0], args[1], args[6], args[9]
    lookups = indices.numel()
    rows = lookups if is_sparse else rows_of_table
    return _looked_up(lookups, dy.shape[0], dy.shape[1], rows)


def _rows_of_a_table(args: Sequence[Any], out: Any) -> OperationSizes:
    table, indices = args[:2]
    return _split(out, indices.numel(), table.shape[1])


def _dense_gradient_of_rows(args: Sequence[Any], out: Any) -> OperationSizes:
    lookups = args[1].numel()
    return _looked_up(lookups, lookups, out.shape[1], out.shape[0])


# -- variants
# ----------------------------------------------------------------------------------------------------------


def _layout(name: str, args: Sequence[Any]) -> str:
    """Which factors are stored transposed, one letter each; both at once is too rare in training to
    be measured."""
    letters = ""
    for factor in _factors(args):
        (rows, columns), (down, along) = factor.shape[-2:], factor.stride()[-2:]
        letters += "t" if 0 < down < along or (down == along == 1 and rows == 1 < columns) else "n"
    layout = letters.replace("tt", "nt")
    is_complex = _count_real_products(_factors(args)[0]) > 1
    return f"complex.{layout}" if is_complex else layout


def _layout_of_first_two(name: str, args: Sequence[Any]) -> str:
    return _layout(name, args[:2])


def _layout_of_groups(name: str, args: Sequence[Any]) -> str:
    """That of the factors. Gradients of weights, whose inner side is split over groups, count as
    products whose first factor is transposed."""
    layout = _layout(name, args[:2])
    if args[0].dim() == args[1].dim() == 2:
        layout = TN.name
    return f"{GROUPED}.{layout}"


def _name_softmax(name: str, args: Sequence[Any]) -> str:
    return name.replace("_safe", "")


def _name_norm_of_rows(name: str, args: Sequence[Any]) -> str:
    if name.startswith("_fused_rms"):
        return f"{name.replace('_fused_rms', 'native_layer')}.rms"
    return name


def _name_batch_norm(name: str, args: Sequence[Any]) -> str:
    return "native_batch_norm_backward" if name.endswith("_backward") else "native_batch_norm"


def _name_without_lists(name: str, args: Sequence[Any]) -> str:
    """Most are sums of columns, as gradients of biases are."""
    return name.removeprefix("_foreach_")


def _has_channels_last(tensor: Any) -> bool:
    """Whether the channels of a place are neighbours in memory."""
    has_places = prod(tensor.shape[2:]) > 1
    return tensor.shape[1] > 1 and has_places and tensor.stride()[1] == 1


def _windowed(name: str, args: Sequence[Any]) -> str:
    """Pass and kind of a convolution; libraries run pointwise, grouped and depthwise ones with
    other code.

    ``_last`` says that the channels of a place are neighbours in memory (channels_last), which
    tensor cores need.
    """
    if name.endswith("backward"):
        phase, forward_args = "backward", args[1:]  # the gradient comes first
    else:
        phase, forward_args = "forward", args
    x, weight, _, stride = forward_args[:4]
    groups = forward_args[8]
    if _has_channels_last(x) or _has_channels_last(weight):
        phase += "_last"
    if groups > 1:
        return phase + ("_depthwise" if groups == x.shape[1] else "_grouped")
    return phase + ("_pointwise" if prod(weight.shape[2:]) * max(stride) == 1 else "")


def _function(name: str, args: Sequence[Any]) -> str:
    """Name of an element-wise function; with a number instead of a second tensor it is another
    kernel."""
    name = name.removeprefix("_foreach_")
    if name in ("gelu", "gelu_backward"):
        return name + ("_tanh" if args[-1] == "tanh" else "")
    number = (
        len(args) > 1 and not hasattr(args[1], "shape") and not isinstance(args[1], list | tuple)
    )
    if number and name in (
        "mul",
        "add",
        "sub",
        "div",
        "pow",
        "rsub",
        "lt",
        "gt",
        "le",
        "ge",
        "eq",
        "ne",
    ):
        return name + "_scalar"
    return "add_scalar_" if number and name in ("add_", "sub_") else name


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Parameters
    ----------
    names : tuple of str
        Names of operations, with wildcards.
    kind : str
        Operation class, see `perfkit.workloads.graph.Operation`.
    variant : str or callable
        Finer class: fixed, found from name and arguments, or empty for the name itself.
    sizes : callable
        Features from arguments and results: FLOP, dimensions and elements [-].
    unread : tuple of int
        Positions of arguments of which only the shape is used, or in which rows are looked up.
    launches : int
        Kernels that a GPU starts [-].
    pointwise : bool
        Whether all functions of single elements belong here, whatever their names.
    """

    names: tuple[str, ...]
    kind: Kind
    variant: str | Callable[[str, Sequence[Any]], str]
    sizes: Callable[[Sequence[Any], Any], OperationSizes]
    unread: tuple[int, ...] = ()
    launches: int = 1
    pointwise: bool = False

    def matches(self, name: str, *, pointwise: bool) -> bool:
        """Whether an operation of this name belongs here; `pointwise` says whether the framework
        tags it as a function of single elements."""
        return (pointwise and self.pointwise) or _matches(name, self.names)

    def name_variant(self, name: str, args: Sequence[Any]) -> str:
        """The finer class of an operation with these arguments; the name itself if there is
        none."""
        variant = self.variant if isinstance(self.variant, str) else self.variant(name, args)
        return variant or name


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name fits one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


#: Products in which a GPU computes an exponential of matrices: five of the longest series (Bader,
#: Blanes, Casas 2019, doi:10.3390/math7121174, as PyTorch has it), and as many squarings as a norm of
#: up to 9 needs; the norm is not known.
EXPONENTIAL_PRODUCTS = 8
#: Kernels of distances of all pairs beside the product: squares, sums and ones of both sides, two
#: tensors joined, limits and roots; aten/src/ATen/native/Distance.cpp, _euclidean_dist.
DISTANCE_KERNELS = 12


def _exponential(args: Sequence[Any], out: Any) -> OperationSizes:
    matrix = args[0]
    side = matrix.shape[-1]
    passes = EXPONENTIAL_PRODUCTS * _count_real_products(matrix)
    return OperationSizes.of_product(side, side, side, batch=prod(matrix.shape[:-2]), passes=passes)


def _list_factorizations() -> list[Entry]:
    """A line for each factorization of matrices."""
    return [
        Entry((name,), "factorization", name_factorization, partial(size_factorization, name))
        for name in FACTORIZATIONS
    ]


def _list_varied_attention() -> list[Entry]:
    """A line for each operation of attention over samples of unlike lengths."""
    return [
        Entry((name,), "attention", name_varied_attention, partial(size_varied_attention, name))
        for name in VARIED_ATTENTION
    ]


def _list_fourier() -> list[Entry]:
    """A line for each Fourier transform."""
    return [
        Entry((name,), "fourier", name_fourier, partial(size_fourier, name))
        for name in ("_fft_r2c", "_fft_c2r", "_fft_c2c")
    ]


#: Operations whose work is not proportional to the bytes they move, and which have no model:
#: linear algebra, Fourier transforms, distances of all pairs, products that no line of the table
#: describes.
UNPRICED = (
    "linalg_*",
    "_linalg_*",
    "orgqr",
    "ormqr",
    "lu_*",
    "lstsq",
    "_cdist_*",
    "_pdist_*",
    "_efficient_attention_*",
    "_cudnn_attention_*",
    "_weight_int*",
    "_trilinear",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "_sparse_mm*",
    "_sparse_addmm*",
    "_sparse_semi_structured_*",
    "_cslt_sparse_mm",
    "miopen_*",
    "conv_tbc*",
    "flex_attention*",
    "cudnn_convolution*",
    "mkldnn_convolution*",
    "slow_conv*",
    "_slow_conv2d*",
    "_conv_depthwise2d",
    "conv_depthwise3d",
    "addbmm",
    "addbmm_",
    "_compute_linear_combination",
)
#: Those of them whose work is proportional to their bytes.
_PRICED = (
    "linalg_vector_norm*",
    "linalg_cross",
    "linalg_diagonal",
    "_linalg_check_errors",
    "linalg_vecdot",
)


#: A sparse gradient that is added to its weight.
SPARSE_UPDATE = Entry(("add_",), "embedding_update", "sparse", _sparse_update)
#: Two sparse gradients that are added: the rows of both in one list.
SPARSE_SUM = Entry(("add", "add_", "sub", "sub_"), "copy", "cat", _rows_of_sparse_result)
#: The first match counts. Bytes are those of all operands that are read and written, see
#: `count_bytes`.
TABLE: tuple[Entry, ...] = (
    Entry(("mm", "addmm", "addmm_", "_addmm_activation"), "gemm", _layout, _product),
    Entry(
        ("_scaled_mm", "_scaled_mm_v2", "_int_mm"),
        "gemm",
        _layout_of_first_two,
        _product_of_first_two,
    ),
    Entry(
        ("_scaled_grouped_mm",),
        "bmm",
        _layout_of_groups,
        _scaled_groups,
    ),
    Entry(
        ("_scaled_grouped_mm_v2",),
        "bmm",
        _layout_of_groups,
        _scaled_groups_v2,
    ),
    Entry(
        ("mv", "dot", "vdot", "addmv", "addmv_"), "gemm", "nn", _vectors
    ),  # a product with one column
    Entry(
        ("mkldnn_rnn_layer*",),
        "gemm",
        _name_recurrent_layer,
        _recurrent_layer,
    ),
    Entry(("_cudnn_rnn",), "recurrent", _name_recurrent, _recurrent_forward),
    Entry(("_cudnn_rnn_backward",), "recurrent", _name_recurrent, _recurrent_backward),
    *_list_factorizations(),
    *_list_varied_attention(),
    *_list_fourier(),
    Entry(("linalg_matrix_exp",), "bmm", "nn", _exponential, launches=EXPONENTIAL_PRODUCTS),
    Entry(("_euclidean_dist",), "bmm", "nt", size_distances, launches=DISTANCE_KERNELS),
    Entry(("bmm", "baddbmm", "baddbmm_"), "bmm", _layout, _product),
    Entry(("_grouped_mm",), "bmm", _layout_of_groups, _groups),
    Entry(
        ("_scaled_dot_product_*_backward",),
        "attention",
        _name_attention_backward,
        _attention_backward,
    ),
    Entry(
        ("_scaled_dot_product_*",),
        "attention",
        _name_attention_forward,
        _attention_forward,
    ),
    Entry(
        ("convolution",),
        "convolution",
        _windowed,
        _convolution,
    ),
    Entry(
        ("convolution_backward",),
        "convolution",
        _windowed,
        _convolution_backward,
    ),
    Entry(("*adaptive*pool?d*_backward",), "pooling", "", _adaptive_pooling_backward),
    Entry(("*adaptive*pool?d*",), "pooling", "", _adaptive_pooling),
    Entry(("*pool?d*_backward",), "pooling", "", _pooling_backward),
    Entry(("*pool?d*",), "pooling", "", _pooling),
    Entry(
        ("_embedding_bag",),
        "embedding_forward",
        name_bags,
        _bags,
        (0,),
    ),
    Entry(
        ("_embedding_bag_backward",),
        "embedding_backward",
        name_gradient_of_bags,
        _bags_backward,
        (3, 4, 5),
    ),
    Entry(("embedding",), "rowwise", "", _rows_of_a_table, (0,)),
    Entry(
        ("embedding_dense_backward",),
        "embedding_backward",
        "dense_rows",
        _dense_gradient_of_rows,
    ),
    Entry(
        ("nll_loss*_forward",),
        "rowwise",
        "nll_loss_forward",
        _labels,
        (0,),
    ),
    Entry(("nll_loss*_backward",), "rowwise", "nll_loss_backward", _rows_of_second, (1,)),
    Entry(("binary_cross_entropy*", "*_loss"), "elementwise", "", _elements_of_first),
    Entry(
        (
            "_softmax",
            "_safe_softmax",
            "_log_softmax",
            "cumsum",
            "sort",
            "topk",
            "logcumsumexp",
            "cumprod",
            "_softmax_backward_data",
            "_log_softmax_backward_data",
        ),
        "rowwise",
        _name_softmax,
        _rows_of_first,
    ),
    Entry(
        ("native_layer_norm*", "_fused_rms_norm*"),
        "rowwise",
        _name_norm_of_rows,
        _rows_of_first,
    ),
    Entry(
        (
            "native_batch_norm*",
            "_native_batch_norm_legit*",
            "_batch_norm_with_update*",
            "cudnn_batch_norm*",
            "batch_norm_backward",
        ),
        "rowwise",
        _name_batch_norm,
        _channels,
    ),
    Entry(("_weight_norm_interface*",), "rowwise", "norm", _rows_of_first),
    Entry(("native_group_norm*",), "rowwise", "", _groups_of_channels),
    Entry(
        (
            "sum",
            "mean",
            "var",
            "std",
            "var_mean",
            "amax",
            "amin",
            "max",
            "min",
            "argmax",
            "argmin",
            "any",
            "all",
            "prod",
            "norm",
            "logsumexp",
            "linalg_vector_norm",
            "_foreach_norm",
            "_amp_foreach_non_finite_check_and_unscale_",
            "count_nonzero",
            "median",
            "aminmax",
        ),
        "rowwise",
        _name_without_lists,
        _reduced,
    ),
    Entry(("cat", "stack"), "copy", "cat", _concatenated),
    # a fully sharded module gathers its weights in one buffer, and shards its gradients from one
    Entry(("all_gather_copy_in",), "copy", "copy_", _moved_to_results, (1,)),
    Entry(
        ("chunk_cat",),
        "copy",
        "cat",
        _chunks_to_buffer,
    ),
    Entry(
        ("split_with_sizes_copy",),
        "copy",
        "cat",
        _parts_of_buffer,
    ),
    Entry(("clone", "contiguous"), "copy", "clone", _moved),
    Entry(("_pack_padded_sequence",), "copy", "cat", _moved),
    Entry(("index", "masked_select"), "copy", name_indexed, size_indexed),
    # a GPU sorts the indices to add without conflicts
    Entry(
        ("index_put", "index_put_", "_index_put_impl_"),
        "copy",
        name_indexed,
        size_indexed,
        launches=SORT,
    ),
    Entry(("ones_like",), "copy", "new_zeros", _elements),
    Entry(
        (
            "new_zeros",
            "new_ones",
            "new_full",
            "zeros_like",
            "full_like",
            "full",
            "ones",
            "scalar_tensor",
            "arange",
            "eye",
            "tril_indices",
            "linspace",
            "triu_indices",
            "rand",
            "rand_like",
            "randn",
            "randn_like",
            "randint",
            "randperm",
        ),
        "copy",
        "new_zeros",
        _elements,
        (0,),
    ),
    # written, not read
    Entry(("zero_", "fill_", "normal_", "uniform_", "random_"), "elementwise", "", _elements, (0,)),
    Entry(("index_select",), "copy", name_selected, size_selected),
    Entry(("gather", "take_along_dim"), "copy", "gather", _moved),
    # rows of a sparse gradient are sorted and added, and rows of a table are read at their places
    Entry(("_coalesce",), "copy", "scatter_add.coalesce", _rows_of_sparse_operand),
    Entry(("sparse_mask",), "copy", "scatter_add.sparse_mask", _rows_of_sparse_operand, (0,)),
    Entry(("index_add", "index_add_", "index_copy*"), "copy", name_scattered, size_selected),
    Entry(
        (
            "scatter",
            "scatter_",
            "scatter_add",
            "scatter_add_",
            "scatter_reduce",
        ),
        "copy",
        "scatter_add",
        _moved,
    ),
    Entry(
        ("copy_", "_foreach_copy_"), "copy", "copy_", _moved, (0,)
    ),  # the target is written, not read
    Entry(
        (
            "repeat",
            "roll",
            "flip",
            "constant_pad_nd",
            "reflection_pad*",
            "replication_pad*",
            "slice_backward",
            "select_backward",
            "slice_scatter",
            "select_scatter",
            "tril",
            "triu",
            "upsample*",
            "repeat_interleave",
            "unfold_backward",
            "diag_embed",
            "as_strided_*",
            "nonzero",
            "pixel_shuffle",
            "pixel_unshuffle",
            "im2col",
            "col2im",
            "channel_shuffle",
            "*_copy",
        ),
        "copy",
        "",
        _moved,
    ),
    Entry(("_fused_*_",), "elementwise", "", _elements),  # one kernel for all weights
    # one kernel for a list of tensors
    Entry(("_foreach_*_", "_foreach_*"), "elementwise", _function, _elements),
    Entry(
        (
            "hardswish",
            "glu",
            "log_sigmoid_forward",
            "_prelu_kernel",
            "native_dropout*",
            "bernoulli*",
            "_fused_dropout",
            "masked_fill*",
            "where",
            "*_backward",
            "*_",
        ),
        "elementwise",
        _function,
        _elements_in_runs,
        pointwise=True,
    ),
    Entry(UNPRICED, "other", "", size_unknown),
    Entry(("*",), "other", "", _elements),  # timed by its traffic, and listed as unmodelled
)


@lru_cache(maxsize=4096)
def is_unpriced(name: str) -> bool:
    """Whether the work of an operation is not proportional to its bytes, and has no model.

    Parameters
    ----------
    name : str
        Name without namespace and overload.

    Returns
    -------
    unpriced : bool
        True for linear algebra, Fourier transforms and the like.
    """
    if not _matches(name, UNPRICED) or _matches(name, _PRICED):
        return False
    return find_entry(name).kind in ("other", "elementwise")  # others have a line of their own


@lru_cache(maxsize=4096)
def find_entry(name: str, *, pointwise: bool = False) -> Entry:
    """The line of the table for an operation.

    Parameters
    ----------
    name : str
        Name without namespace and overload.
    pointwise : bool
        Whether the framework tags it as a function of single elements.

    Returns
    -------
    entry : Entry
        Its line; that of ``other`` if no other matches.
    """
    return next(entry for entry in TABLE if entry.matches(name, pointwise=pointwise))
