"""The operations that PyTorch dispatches, their classes and their sizes: one table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import dropwhile
from math import prod
from typing import Any

from perfkit.workloads.operations import SORT, size_product

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

_Sizes = dict[str, float]


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
        for item in tree.values() if isinstance(tree, dict) else tree:
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
    if all(strides := tensor.stride()):
        return float(tensor.numel() * tensor.element_size())
    sizes = (size for size, stride in zip(tensor.shape, strides, strict=True) if stride)
    return float(prod(sizes) * tensor.element_size()) if tensor.numel() else 0.0


# -- sizes: (arguments, results) -> features. Arguments are complete, defaults included, in the
# order of the schema. ---


def _factors(args: Sequence[Any]) -> list[Any]:
    """The two factors of a product; a tensor that is added to it comes before them."""
    return [each for each in args[:3] if hasattr(each, "shape")][-2:]


def _count_real_products(factor: Any) -> float:
    """Products of real numbers in a product of two numbers of this type: four if they are
    complex."""
    return 4.0 if "complex" in str(getattr(factor, "dtype", "")) else 1.0


def _product(args: Sequence[Any], out: Any) -> _Sizes:
    a, b = _factors(args)
    return size_product(
        a.shape[-2],
        b.shape[-1],
        a.shape[-1],
        batch=a.shape[0] if a.dim() == 3 else 1,
        passes=_count_real_products(a),
    )


def _groups(args: Sequence[Any], out: Any) -> _Sizes:
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
    return size_product(*sizes, batch=parts)


def _vectors(args: Sequence[Any], out: Any) -> _Sizes:
    a, _ = _factors(args)
    rows = a.numel() // max(a.shape[-1], 1)
    return size_product(rows, 1, a.shape[-1], passes=_count_real_products(a))


def _windows(
    x: Any, weight: Any, y: Any, transposed: bool, groups: int, passes: float = 1.0
) -> _Sizes:
    """A convolution as a product: output places × output channels × window."""
    if transposed:  # a transposed convolution is the gradient of one from y to x
        x, y = y, x
    places, window = y.shape[0] * prod(y.shape[2:]), prod(weight.shape[2:])
    sizes = size_product(
        places, y.shape[1] // groups, x.shape[1] // groups * window, batch=groups, passes=passes
    )
    return sizes | {"elements": y.numel(), "rows": y.shape[0]}


def _attention(q: Any, k: Any, v: Any, causal: bool, factor: float) -> _Sizes:
    (b, h, m, d), n = q.shape, k.shape[2]
    share = factor * (0.5 if causal else 1.0) * (d + v.shape[3]) / d
    return size_product(m, n, d, batch=b * h, passes=share)


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
    return phase + "_causal" * _is_causal(args) + kernel


def _is_causal(args: Sequence[Any]) -> bool:
    """Whether attention is causal; in all kernels this flag is the next one after the share of
    dropout."""
    flags = [a for a in dropwhile(lambda a: not isinstance(a, float), args) if isinstance(a, bool)]
    return bool(flags and flags[0])


def _elements(args: Sequence[Any], out: Any) -> _Sizes:
    """The elements of the results, or of what is changed in place."""
    written = [t.numel() for t in walk_tensors(out)] or [t.numel() for t in walk_tensors(args[0])]
    lists = isinstance(args[0] if args else None, list | tuple)
    return {"elements": sum(written) if lists else max(written, default=0)}


def _split(x: Any, rows: float, n: float | None = None) -> _Sizes:
    """All elements, in rows of `n`, or of equal length."""
    return {"elements": x.numel(), "rows": rows, "n": x.numel() // max(rows, 1) if n is None else n}


def _rows(x: Any, n: float | None = None) -> _Sizes:
    return _split(x, x.numel() // max(x.shape[-1], 1) if x.dim() else 1, n)


def _reduced(args: Sequence[Any], out: Any) -> _Sizes:
    """Each row is summed up, or, if the first dimension is reduced, the rows are added to one
    another."""
    elements = sum(t.numel() for t in walk_tensors(args[0]))
    kept = max([1, *(t.numel() for t in walk_tensors(out))])
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    leading = any(d % max(args[0].dim(), 1) == 0 for d in dims)
    rows, n = (elements // kept, kept) if leading else (kept, elements // kept)
    return {"elements": elements, "rows": rows, "n": n}


def _pooled(x: Any, y: Any, window: Sequence[int] = ()) -> _Sizes:
    """Output places, ``m``, and the window of each, ``k``; an adaptive window follows from both
    sizes."""
    k: float = prod(window) if window else x.numel() / max(y.numel(), 1)
    if len(window) == 1:
        k **= max(x.dim() - 2, 1)
    return {"elements": x.numel(), "rows": prod(x.shape[:2]), "m": y.numel(), "k": k}


def _moved(args: Sequence[Any], out: Any) -> _Sizes:
    return _rows(next(walk_tensors([out, args])), 0)


def _concatenated(args: Sequence[Any], out: Any) -> _Sizes:
    inner = prod(out.shape[args[1] % max(out.dim(), 1) :])
    return {
        "elements": out.numel(),
        "rows": out.numel() // max(inner, 1) * sum(t.numel() > 0 for t in args[0]),
    }


def _indexed(args: Sequence[Any], out: Any) -> _Sizes:
    values = args[2] if len(args) > 2 and hasattr(args[2], "shape") else out
    return {"elements": values.numel(), "rows": values.shape[0] if values.dim() else 1}


def _looked_up(lookups: float, bags: float, dim: float, rows: float) -> _Sizes:
    return {"lookups": lookups, "bags": bags, "dim": dim, "elements": rows * dim, "rows": rows}


# -- variants
# ----------------------------------------------------------------------------------------------------------


def _layout(name: str, args: Sequence[Any]) -> str:
    """Which factors are stored transposed, one letter each; both at once is too rare in training to
    be measured."""
    letters = ""
    for factor in _factors(args):
        (rows, columns), (down, along) = factor.shape[-2:], factor.stride()[-2:]
        letters += "t" if 0 < down < along or (down == along == 1 and rows == 1 < columns) else "n"
    return letters.replace("tt", "nt")


def _windowed(name: str, args: Sequence[Any]) -> str:
    """Pass and kind of a convolution; libraries run pointwise, grouped and depthwise ones with
    other code.

    ``_last`` says that the channels of a place are neighbours in memory (channels_last), which
    tensor cores need.
    """
    backward = name.endswith("backward")  # the gradient comes first
    x, weight, stride, groups = (args[i + backward] for i in (0, 1, 3, 8))
    last = any(t.shape[1] > 1 and t.stride()[1] == 1 < prod(t.shape[2:]) for t in (x, weight))
    phase = ("backward" if backward else "forward") + "_last" * last
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
    names : str
        Names of operations, with wildcards, separated by spaces.
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
    """

    names: str
    kind: str
    variant: str | Callable[[str, Sequence[Any]], str]
    sizes: Callable[[Sequence[Any], Any], _Sizes]
    unread: tuple[int, ...] = ()
    launches: int = 1


#: The first match counts. Bytes are those of all operands that are read and written, see
#: `count_bytes`.
TABLE: tuple[Entry, ...] = (
    Entry(
        "<sparse>",
        "embedding_update",
        "sparse",  # a sparse gradient added to a table
        lambda a, o: _looked_up(a[1]._nnz(), a[1]._nnz(), prod(a[0].shape[1:]), a[1]._nnz()),
    ),
    # the rows of two sparse gradients in one list
    Entry(
        "<rows>",
        "copy",
        "cat",
        lambda a, o: {"elements": o._nnz() * prod(o.shape[1:]), "rows": o._nnz()},
    ),
    Entry("mm addmm _addmm_activation", "gemm", _layout, _product),
    # products in FP8 and INT8; after the two factors come their scales
    Entry(
        "_scaled_mm _scaled_mm_v2 _int_mm",
        "gemm",
        lambda n, a: _layout(n, a[:2]),
        lambda a, o: _product(a[:2], o),
    ),
    Entry(
        "_scaled_grouped_mm",
        "bmm",
        lambda n, a: _layout(n, a[:2]),
        lambda a, o: _groups([a[0], a[1], a[4]], o),
    ),
    Entry(
        "_scaled_grouped_mm_v2",
        "bmm",
        lambda n, a: _layout(n, a[:2]),
        lambda a, o: _groups([a[0], a[1], a[8]], o),
    ),
    Entry("mv dot vdot addmv", "gemm", "nn", _vectors),  # a product with one column
    # an LSTM: inputs and states times weights; its forward pass has four results, its backward pass
    # seven
    Entry(
        "mkldnn_rnn_layer*",
        "gemm",
        "nt",
        lambda a, o: size_product(
            len(a[0]) * a[0].shape[1], len(a[1]), a[1].shape[1] + a[2].shape[1], passes=len(o) // 3
        ),
    ),
    Entry("bmm baddbmm", "bmm", _layout, _product),
    Entry("_grouped_mm", "bmm", lambda n, a: _layout(n, a[:2]), _groups),
    # scores are computed again: 2.5 times the forward (Dao 2023, arXiv:2307.08691, 4.1)
    Entry(
        "_scaled_dot_product_*_backward",
        "attention",
        lambda n, a: _name_attention(n, a, "backward"),
        lambda a, o: _attention(a[1], a[2], a[3], _is_causal(a), 2.5),
    ),
    Entry(
        "_scaled_dot_product_*",
        "attention",
        lambda n, a: _name_attention(n, a, "forward"),
        # half the work where causal
        lambda a, o: _attention(a[0], a[1], a[2], _is_causal(a), 1.0),
    ),
    Entry(
        "convolution",
        "convolution",
        _windowed,
        lambda a, o: _windows(a[0], a[1], next(walk_tensors(o)), a[6], a[8]),
    ),
    # as many products as gradients are wanted
    Entry(
        "convolution_backward",
        "convolution",
        _windowed,
        lambda a, o: _windows(a[1], a[2], a[0], a[7], a[9], float(a[10][0]) + float(a[10][1])),
    ),
    Entry("*adaptive*pool?d*_backward", "pooling", "", lambda a, o: _pooled(a[1], a[0])),
    Entry("*adaptive*pool?d*", "pooling", "", lambda a, o: _pooled(a[0], next(walk_tensors(o)))),
    Entry("*pool?d*_backward", "pooling", "", lambda a, o: _pooled(a[1], a[0], a[2])),
    Entry("*pool?d*", "pooling", "", lambda a, o: _pooled(a[0], next(walk_tensors(o)), a[1])),
    # rows are priced by lookups, not by bytes; a gradient has one row per lookup, or is as large as
    # the table
    Entry(
        "_embedding_bag",
        "embedding_forward",
        "",
        lambda a, o: (
            _looked_up(a[1].numel(), o[0].shape[0], a[0].shape[1], a[1].numel()) | {"rows": 0}
        ),
        (0,),
    ),
    Entry(
        "_embedding_bag_backward",
        "embedding_backward",
        lambda n, a: "sparse" if a[9] else "dense",
        lambda a, o: _looked_up(
            a[1].numel(), a[0].shape[0], a[0].shape[1], a[1].numel() if a[9] else a[6]
        ),
        (3, 4, 5),
    ),
    Entry("embedding", "rowwise", "", lambda a, o: _split(o, a[1].numel(), a[0].shape[1]), (0,)),
    Entry(
        "embedding_dense_backward",
        "embedding_backward",
        "dense_rows",
        lambda a, o: _looked_up(a[1].numel(), a[1].numel(), o.shape[1], o.shape[0]),
    ),
    Entry(
        "nll_loss*_forward",
        "rowwise",
        "nll_loss_forward",
        lambda a, o: _split(a[1], a[1].numel(), 0),
        (0,),
    ),
    Entry("nll_loss*_backward", "rowwise", "nll_loss_backward", lambda a, o: _rows(a[1]), (1,)),
    Entry(
        "binary_cross_entropy* *_loss", "elementwise", "", lambda a, o: {"elements": a[0].numel()}
    ),
    Entry(
        "_softmax _safe_softmax _log_softmax cumsum sort topk logcumsumexp cumprod _softmax_backward_data "
        "_log_softmax_backward_data",
        "rowwise",
        lambda n, a: n.replace("_safe", ""),
        lambda a, o: _rows(a[0]),
    ),
    # in the backward pass the first argument is the gradient of the result, as large as the input
    Entry(
        "native_layer_norm* _fused_rms_norm*",
        "rowwise",
        lambda n, a: n.replace("_fused_rms", "native_layer"),
        lambda a, o: _rows(a[0]),
    ),
    Entry(
        "native_batch_norm* _native_batch_norm_legit* _batch_norm_with_update* cudnn_batch_norm* "
        "batch_norm_backward",
        "rowwise",
        lambda n, a: "native_batch_norm" + "_backward" * n.endswith("_backward"),
        lambda a, o: _split(a[0], a[0].shape[1]),
    ),  # a row is a channel
    Entry("_weight_norm_interface*", "rowwise", "norm", lambda a, o: _rows(a[0])),
    Entry("native_group_norm*", "rowwise", "", lambda a, o: _split(a[0], prod(a[0].shape[:2]), 0)),
    Entry(
        "sum mean var std var_mean amax amin max min argmax argmin any all prod norm logsumexp linalg_vector_norm "
        "_foreach_norm _amp_foreach_non_finite_check_and_unscale_ count_nonzero median aminmax",
        "rowwise",
        # mostly of columns, as gradients of biases
        lambda n, a: n.removeprefix("_foreach_"),
        _reduced,
    ),
    Entry("cat stack", "copy", "cat", _concatenated),
    # a fully sharded module gathers its weights in one buffer, and shards its gradients from one
    Entry("all_gather_copy_in", "copy", "copy_", lambda a, o: _moved(o, o), (1,)),
    Entry(
        "chunk_cat",
        "copy",
        "cat",
        lambda a, o: {"elements": a[3].numel(), "rows": a[2] * len(a[0])},
    ),
    Entry(
        "split_with_sizes_copy",
        "copy",
        "cat",
        lambda a, o: {"elements": a[0].numel(), "rows": prod(a[0].shape[: a[2]]) * len(a[1])},
    ),
    Entry("clone contiguous", "copy", "clone", _moved),
    Entry("index masked_select", "copy", "", _indexed),
    # a GPU sorts the indices to add without conflicts
    Entry("index_put index_put_ _index_put_impl_", "copy", "index_put", _indexed, launches=SORT),
    Entry("ones_like", "copy", "new_zeros", _elements),
    Entry(
        "new_zeros new_ones new_full zeros_like full_like full ones scalar_tensor arange eye tril_indices linspace "
        "triu_indices rand rand_like randn randn_like randint randperm",
        "copy",
        "new_zeros",
        _elements,
        (0,),
    ),
    # written, not read
    Entry("zero_ fill_ normal_ uniform_ random_", "elementwise", "", _elements, (0,)),
    Entry("gather index_select take_along_dim", "copy", "gather", _moved),
    Entry(
        "_coalesce sparse_mask",
        "copy",
        "scatter_add",  # rows of a sparse gradient
        lambda a, o: {"elements": a[-1]._nnz() * prod(o.shape[1:]), "rows": a[-1]._nnz()},
    ),
    Entry(
        "scatter scatter_ scatter_add scatter_add_ index_add index_add_ scatter_reduce index_copy*",
        "copy",
        "scatter_add",
        _moved,
    ),
    Entry("copy_ _foreach_copy_", "copy", "copy_", _moved, (0,)),  # the target is written, not read
    Entry(
        "repeat roll flip constant_pad_nd reflection_pad* replication_pad* slice_backward select_backward "
        "slice_scatter select_scatter tril triu upsample* repeat_interleave unfold_backward diag_embed as_strided_* "
        "nonzero pixel_shuffle pixel_unshuffle im2col col2im channel_shuffle *_copy",
        "copy",
        "",
        _moved,
    ),
    Entry("_fused_*_", "elementwise", "", _elements),  # one kernel for all weights
    # one kernel for a list of tensors
    Entry("_foreach_*_ _foreach_*", "elementwise", _function, _elements),
    Entry(
        "<pointwise> hardswish glu log_sigmoid_forward _prelu_kernel "
        "native_dropout* bernoulli* _fused_dropout masked_fill* where *_backward *_",
        "elementwise",
        _function,
        _elements,
    ),
    Entry("*", "other", "", _elements),  # timed by its traffic, and listed as unmodelled
)


#: Operations whose work is not proportional to the bytes they move, and which have no model:
#: linear algebra, Fourier transforms, distances of all pairs, products that no line of the table
#: describes.
UNPRICED = (
    "linalg_* _linalg_* cholesky* triangular_solve geqrf orgqr ormqr lu_* matrix_exp lstsq "
    "_cholesky_solve_helper _cdist_* _pdist_* _euclidean_dist _fft_* _varlen_attn* "
    "_flash_attention_* _efficient_attention_* _cudnn_attention_* _weight_int* _trilinear "
    "_native_multi_head_attention _transformer_encoder_layer_fwd _sparse_mm* _sparse_addmm* "
    "_sparse_semi_structured_* _cslt_sparse_mm _cudnn_rnn* miopen_* conv_tbc* flex_attention* "
    "cudnn_convolution* mkldnn_convolution* slow_conv* _slow_conv2d* _conv_depthwise2d "
    "conv_depthwise3d addbmm _compute_linear_combination"
)
#: Those of them whose work is proportional to their bytes.
_PRICED = "linalg_vector_norm* linalg_cross linalg_diagonal _linalg_check_errors linalg_vecdot"


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
    if any(fnmatchcase(name, pattern) for pattern in _PRICED.split()):
        return False
    return any(fnmatchcase(name, pattern) for pattern in UNPRICED.split())


@lru_cache(maxsize=4096)
def find_entry(name: str, *, pointwise: bool = False, sparse: bool = False) -> Entry:
    """The line of the table for an operation.

    Parameters
    ----------
    name : str
        Name without namespace and overload.
    pointwise : bool
        Whether the framework tags it as a function of single elements.
    sparse : bool
        Whether a sparse tensor is added to a dense one.

    Returns
    -------
    entry : Entry
        Its line; that of ``other`` if no other matches.
    """
    keys = ["<sparse>"] if sparse else [name, *["<pointwise>"] * pointwise]
    return next(
        e
        for e in TABLE
        if any(fnmatchcase(key, pattern) for pattern in e.names.split() for key in keys)
    )
