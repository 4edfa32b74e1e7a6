"""The operations PyTorch dispatches, and what perfkit takes them for: one readable table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Any

__all__ = ["TABLE", "VIEWS", "Entry", "count_bytes", "find_entry", "find_layout", "walk_tensors"]

#: Operations that only make views or bookkeeping, and copies that exist under a dispatch mode alone.
VIEWS = frozenset(
    "view t detach transpose expand _unsafe_view split slice unsqueeze as_strided alias select squeeze permute unbind "
    "_indices _values _local_scalar_dense _record_function_enter_new _record_function_exit set_ resize_ empty "
    "new_empty lift_fresh is_same_size split_with_sizes zeros "
    "_reshape_alias diagonal unfold view_as_real view_as_complex real imag detach_ squeeze_ unsqueeze_ t_ transpose_ "
    "empty_strided empty_like new_empty_strided is_coalesced _coalesced_ _nnz _sparse_coo_tensor_with_dims_and_tensors "
    "_assert_async _assert_scalar lift".split()
)

_Sizes = dict[str, float]


def walk_tensors(tree: Any) -> Iterator[Any]:
    """The tensors among arguments or results, lists looked into, in order.

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
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from walk_tensors(item)
    elif isinstance(tree, dict):
        yield from walk_tensors(list(tree.values()))


def count_bytes(tensor: Any) -> float:
    """Bytes that one pass over a tensor moves: elements repeated by a stride of zero count once, absent rows not.

    Parameters
    ----------
    tensor : torch.Tensor
        Dense or sparse.

    Returns
    -------
    nbytes : float
        Distinct bytes [B].
    """
    if str(tensor.layout) == "torch.sparse_coo":
        return float(tensor._nnz() * prod(tensor.shape[1:]) * tensor.element_size())
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return float(prod(sizes) * tensor.element_size()) if tensor.numel() else 0.0


def find_layout(*operands: Any) -> str:
    """Which operands of a product lie transposed in memory, one letter each: ``n`` not, ``t`` transposed.

    Parameters
    ----------
    *operands : torch.Tensor
        The factors, seen as rows by columns in their last two dimensions.

    Returns
    -------
    layout : str
        Such as ``nt``.
    """

    def lies(tensor: Any) -> str:
        (rows, columns), (down, along) = tensor.shape[-2:], tensor.stride()[-2:]
        return "t" if 0 < down < along or (down == along == 1 and rows == 1 < columns) else "n"

    return "".join(map(lies, operands))


# -- sizes: (arguments, results) -> features. Arguments are complete, defaults included, in the order of the schema. ---


def _product(args: Sequence[Any], first: int) -> _Sizes:
    a, b = args[first], args[first + 1]
    batch = a.shape[0] if a.dim() == 3 else 1
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    return {"flops": 2.0 * batch * m * n * k, "batch": batch, "m": m, "n": n, "k": k}


def _vectors(args: Sequence[Any], out: Any) -> _Sizes:
    a = args[1] if len(args) > 2 and hasattr(args[2], "shape") else args[0]
    k = a.shape[-1]
    m = a.numel() // max(k, 1)
    return {"flops": 2.0 * m * k, "batch": 1, "m": m, "n": 1, "k": k}


def _convolution(args: Sequence[Any], out: Any) -> _Sizes:
    x, weight, transposed, groups = args[0], args[1], args[6], args[8]
    return _windows(x, weight, next(walk_tensors(out)), transposed, groups, 1.0)


def _convolution_backward(args: Sequence[Any], out: Any) -> _Sizes:
    g, x, weight, transposed, groups, wanted = args[0], args[1], args[2], args[7], args[9], args[10]
    return _windows(x, weight, g, transposed, groups, float(wanted[0]) + float(wanted[1]))


def _windows(x: Any, weight: Any, y: Any, transposed: bool, groups: int, passes: float) -> _Sizes:
    if transposed:  # a transposed convolution is the gradient of one from y to x
        x, y = y, x
    places, channels = y.shape[0] * prod(y.shape[2:]), y.shape[1]
    m, n, k = places, channels // groups, x.shape[1] // groups * prod(weight.shape[2:])
    return {"flops": passes * 2.0 * groups * m * n * k, "batch": groups, "m": m, "n": n, "k": k,
            "elements": y.numel(), "rows": y.shape[0]}  # fmt: skip


def _suffix_convolution(args: Sequence[Any]) -> str:
    """Which code of the libraries runs it: that of products, of groups or of single channels."""
    first = isinstance(args[-1], list | tuple) and isinstance(args[-1][0], bool)  # backward: the gradient comes first
    x, weight, stride, groups = (args[i + first] for i in (0, 1, 3, 8))
    if groups > 1:
        return "_depthwise" if groups == x.shape[1] else "_grouped"
    return "_pointwise" if prod(weight.shape[2:]) * max(stride) == 1 else ""


def _attention(q: Any, k: Any, v: Any, causal: bool, factor: float) -> _Sizes:
    (b, h, m, d), n = q.shape, k.shape[2]
    flops = 2.0 * factor * b * h * m * n * (d + v.shape[3]) * (0.5 if causal else 1.0)
    return {"flops": flops, "batch": b * h, "m": m, "n": n, "k": d}


def _elements(args: Sequence[Any], out: Any) -> _Sizes:
    """One number a thread: of the results, or of what is changed in place."""
    written = list(walk_tensors(out)) or list(walk_tensors(args[0]))
    lists = isinstance(args[0] if args else None, list | tuple)
    return {"elements": sum(t.numel() for t in written) if lists else max((t.numel() for t in written), default=0)}


def _rows_of(x: Any) -> _Sizes:
    n = x.shape[-1] if x.dim() else 1
    return {"elements": x.numel(), "rows": x.numel() // max(n, 1), "n": n}


def _rows(position: int) -> Callable[[Sequence[Any], Any], _Sizes]:
    return lambda args, out: _rows_of(args[position])


def _channels(position: int) -> Callable[[Sequence[Any], Any], _Sizes]:
    def sizes(args: Sequence[Any], out: Any) -> _Sizes:
        x = args[position]
        return {"elements": x.numel(), "rows": x.shape[1], "n": x.numel() // max(x.shape[1], 1)}

    return sizes


def _reduced(args: Sequence[Any], out: Any) -> _Sizes:
    """Rows are summed up by themselves, or, where the first dimension goes, added to one another."""
    elements = sum(t.numel() for t in walk_tensors(args[0]))
    kept = max([1, *(t.numel() for t in walk_tensors(out))])
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    leading = bool(dims) and any(d % max(args[0].dim(), 1) == 0 for d in dims)
    rows, n = (elements // kept, kept) if leading else (kept, elements // kept)
    return {"elements": elements, "rows": rows, "n": n}


def _planes(position: int) -> Callable[[Sequence[Any], Any], _Sizes]:
    def sizes(args: Sequence[Any], out: Any) -> _Sizes:
        x = args[position]
        return {"elements": x.numel(), "rows": prod(x.shape[:2])}

    return sizes


def _pooled(position: int, adaptive: bool = False) -> Callable[[Sequence[Any], Any], _Sizes]:
    """Places that come out, ``m``, and those that each looks at, ``k``."""

    def sizes(args: Sequence[Any], out: Any) -> _Sizes:
        x, y = args[position], args[0] if position else next(walk_tensors(out))
        window = x.numel() / max(y.numel(), 1) if adaptive else prod(args[position + 1])
        if not adaptive and len(args[position + 1]) == 1:
            window **= max(x.dim() - 2, 1)
        return {"elements": x.numel(), "rows": prod(x.shape[:2]), "m": y.numel(), "k": window}

    return sizes


def _moved(args: Sequence[Any], out: Any) -> _Sizes:
    return _rows_of(next(walk_tensors([out, args]))) | {"n": 0}


def _rows_moved(args: Sequence[Any], out: Any) -> _Sizes:
    rows = args[-1]._nnz()
    return {"elements": rows * prod(out.shape[1:]), "rows": rows}


def _concatenated(args: Sequence[Any], out: Any) -> _Sizes:
    inner = prod(out.shape[args[1] % max(out.dim(), 1) :])
    return {"elements": out.numel(), "rows": out.numel() // max(inner, 1) * sum(t.numel() > 0 for t in args[0])}


def _indexed(args: Sequence[Any], out: Any) -> _Sizes:
    values = args[2] if len(args) > 2 and hasattr(args[2], "shape") else out
    return {"elements": values.numel(), "rows": values.shape[0] if values.dim() else 1}


def _filled(args: Sequence[Any], out: Any) -> _Sizes:
    return {"elements": sum(t.numel() for t in walk_tensors(args[0] if out is None else out))}


def _word_rows(args: Sequence[Any], out: Any) -> _Sizes:
    return {"elements": out.numel(), "rows": args[1].numel(), "n": args[0].shape[1]}


def _word_gradient(args: Sequence[Any], out: Any) -> _Sizes:
    lookups, (rows, dim) = args[1].numel(), out.shape
    return {"elements": out.numel(), "rows": rows, "lookups": lookups, "bags": lookups, "dim": dim}


def _bags(args: Sequence[Any], out: Any) -> _Sizes:
    lookups, dim = args[1].numel(), args[0].shape[1]
    return {"lookups": lookups, "bags": out[0].shape[0], "dim": dim, "elements": lookups * dim}


def _bag_gradient(args: Sequence[Any], out: Any) -> _Sizes:
    g, lookups, rows, sparse = args[0], args[1].numel(), args[6], args[9]
    dim = g.shape[1]
    written = lookups if sparse else rows
    return {"lookups": lookups, "bags": g.shape[0], "dim": dim, "elements": written * dim, "rows": written}


def _row_update(args: Sequence[Any], out: Any) -> _Sizes:
    lookups, dim = args[1]._nnz(), prod(args[0].shape[1:])
    return {"lookups": lookups, "bags": lookups, "dim": dim, "elements": lookups * dim, "rows": lookups}


def _first(args: Sequence[Any], out: Any) -> _Sizes:
    return {"elements": args[0].numel()}


def _losses(args: Sequence[Any], out: Any) -> _Sizes:
    return {"elements": args[1].numel(), "rows": args[1].numel()}


# -- variants --------------------------------------------------------------------------------------------------------


def _layout(first: int) -> Callable[[str, Sequence[Any]], str]:
    def variant(name: str, args: Sequence[Any]) -> str:
        layout = find_layout(args[first], args[first + 1])
        return "nt" if layout == "tt" else layout  # nothing in training asks for it often enough to be measured

    return variant


def _function(name: str, args: Sequence[Any]) -> str:
    """Name of an elementwise function; one with a number in place of the second tensor is another kernel."""
    name = name.removeprefix("_foreach_")
    if name in ("gelu", "gelu_backward"):
        return name + ("_tanh" if args[-1] == "tanh" else "")
    number = len(args) > 1 and not hasattr(args[1], "shape") and not isinstance(args[1], list | tuple)
    if number and name in ("mul", "add", "sub", "div", "pow", "rsub", "lt", "gt", "le", "ge", "eq", "ne"):
        return name + "_scalar"
    return "add_scalar_" if number and name in ("add_", "sub_") else name


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Parameters
    ----------
    names : str
        Names of operations, with wildcards, apart by spaces.
    kind : str
        Operation class, one of `perfkit.workloads.graph.KINDS`.
    variant : str or callable
        Finer class: fixed, from the name and arguments, or empty for the name itself.
    sizes : callable
        Features from arguments and results: FLOP, dimensions and elements [-].
    unread : tuple of int
        Positions of arguments that only lend their shape, or that rows are looked up in.
    note : str
        What else there is to know.
    launches : int
        Kernels that a GPU starts for it [-].
    """

    names: str
    kind: str
    variant: str | Callable[[str, Sequence[Any]], str]
    sizes: Callable[[Sequence[Any], Any], _Sizes]
    unread: tuple[int, ...] = ()
    note: str = ""
    launches: int = 1


#: First match wins. Bytes are those of all operands read and written, see `count_bytes`, the unread ones aside.
TABLE: tuple[Entry, ...] = (
    Entry("mm", "gemm", _layout(0), lambda a, o: _product(a, 0)),
    Entry("addmm", "gemm", _layout(1), lambda a, o: _product(a, 1), note="bias added in the same kernel"),
    Entry("mv dot vdot addmv", "gemm", "nn", _vectors, note="a product with one column"),
    Entry("bmm", "bmm", _layout(0), lambda a, o: _product(a, 0)),
    Entry("baddbmm", "bmm", _layout(1), lambda a, o: _product(a, 1)),
    Entry("_scaled_dot_product_*_backward", "attention",
          lambda n, a: "backward" + ("_causal" if a[7] is True else ""),
          lambda a, o: _attention(a[1], a[2], a[3], a[7] is True, 2.5),
          note="scores are computed again: 2.5 times the forward (Dao 2023, arXiv:2307.08691, 4.1)"),
    Entry("_scaled_dot_product_*", "attention", lambda n, a: "forward" + ("_causal" if a[4] is True else ""),
          lambda a, o: _attention(a[0], a[1], a[2], a[4] is True, 1.0), note="half the work where causal"),
    Entry("convolution", "convolution", lambda n, a: "forward" + _suffix_convolution(a), _convolution,
          note="as a product of places by output channels by window"),
    Entry("convolution_backward", "convolution", lambda n, a: "backward" + _suffix_convolution(a),
          _convolution_backward, note="gradients of input, weight and bias; as much work as each is wanted"),
    Entry("*adaptive*pool?d*_backward", "pooling", "", _pooled(1, adaptive=True)),
    Entry("*adaptive*pool?d*", "pooling", "", _pooled(0, adaptive=True)),
    Entry("*pool?d*_backward", "pooling", "", _pooled(1)),
    Entry("*pool?d*", "pooling", "", _pooled(0)),
    Entry("_embedding_bag", "embedding_forward", "", _bags, (0,), "rows are priced by lookups, not as bytes"),
    Entry("_embedding_bag_backward", "embedding_backward", lambda n, a: "sparse" if a[9] else "dense", _bag_gradient,
          (3, 4, 5),           note="one row per lookup, or a gradient as large as the table"),
    Entry("embedding", "rowwise", "", _word_rows, (0,)),
    Entry("embedding_dense_backward", "embedding_backward", "dense_rows", _word_gradient),
    Entry("nll_loss*_forward", "rowwise", "nll_loss_forward", _losses, (0,), "one number of each row"),
    Entry("nll_loss*_backward", "rowwise", "nll_loss_backward", _rows(1), (1,)),
    Entry("binary_cross_entropy* *_loss", "elementwise", "", _first),
    Entry("_safe_softmax", "rowwise", "_softmax", _rows(0)),
    Entry("_softmax _log_softmax cumsum sort topk logcumsumexp cumprod", "rowwise", "", _rows(0)),
    Entry("_softmax_backward_data _log_softmax_backward_data", "rowwise", "", _rows(0)),
    Entry("native_layer_norm _fused_rms_norm", "rowwise", "native_layer_norm", _rows(0)),
    Entry("native_layer_norm_backward _fused_rms_norm_backward", "rowwise", "native_layer_norm_backward", _rows(1)),
    Entry("native_batch_norm _native_batch_norm_legit* _batch_norm_with_update* cudnn_batch_norm", "rowwise",
          "native_batch_norm", _channels(0), note="a row is a channel"),
    Entry("native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward", "rowwise",
          "native_batch_norm_backward", _channels(1)),
    Entry("native_group_norm", "rowwise", "", _planes(0)),
    Entry("native_group_norm_backward", "rowwise", "", _planes(1)),
    Entry("sum", "rowwise", "", _reduced, note="mostly of the columns, as gradients of biases"),
    Entry("mean var std var_mean amax amin max min argmax argmin any all prod norm logsumexp linalg_vector_norm "
          "_foreach_norm _amp_foreach_non_finite_check_and_unscale_ count_nonzero median aminmax", "rowwise",
          lambda n, a: n.removeprefix("_foreach_"), _reduced),
    Entry("cat stack", "copy", "cat", _concatenated),
    Entry("clone contiguous", "copy", "clone", _moved),
    Entry("index", "copy", "", _indexed),
    Entry("index_put index_put_ _index_put_impl_", "copy", "index_put", _indexed,
          note="a GPU sorts the indices to add without conflicts: ten kernels", launches=10),
    Entry("ones_like", "copy", "new_zeros", _filled),
    Entry("new_zeros new_ones new_full zeros_like full_like full ones scalar_tensor arange eye tril_indices "
          "triu_indices linspace rand rand_like randn randn_like randint randperm", "copy", "new_zeros", _filled,
          (0,), "written, nothing read"),
    Entry("zero_ fill_ normal_ uniform_ random_", "elementwise", "", _elements, (0,), "written, nothing read"),
    Entry("gather index_select take_along_dim", "copy", "gather", _moved),
    Entry("_coalesce sparse_mask", "copy", "scatter_add", _rows_moved, note="rows of a sparse gradient"),
    Entry("scatter scatter_ scatter_add scatter_add_ index_add index_add_ scatter_reduce index_copy*", "copy",
          "scatter_add", _moved),
    Entry("copy_ _foreach_copy_", "copy", "copy_", _moved, (0,), "the target is written, not read"),
    Entry("repeat roll flip constant_pad_nd reflection_pad* replication_pad* slice_backward select_backward "
          "slice_scatter select_scatter tril triu upsample* repeat_interleave unfold_backward diag_embed as_strided_* "
          "pixel_shuffle pixel_unshuffle im2col col2im channel_shuffle *_copy", "copy", "", _moved),
    Entry("_to_copy", "elementwise", "", _elements, note="another data type"),
    Entry("_fused_*_", "elementwise", "", _elements, note="one kernel updates all weights"),
    Entry("_foreach_*_ _foreach_*", "elementwise", _function, _elements, note="a list of tensors by one kernel"),
    Entry("native_dropout* bernoulli* _fused_dropout masked_fill* where *_backward *_", "elementwise", _function,
          _elements, note="functions PyTorch does not itself mark as pointwise"),
)  # fmt: skip

_POINTWISE = Entry("", "elementwise", _function, _elements, note="whatever PyTorch marks as pointwise")
_ROW_UPDATE = Entry("add_", "embedding_update", "sparse", _row_update, note="a sparse gradient added to a table")
_OTHER = Entry("", "other", "", _elements, note="timed by its traffic and named as unmodelled")


@lru_cache(maxsize=4096)
def find_entry(name: str, *, pointwise: bool = False, sparse: bool = False) -> Entry:
    """The line of the table that an operation falls under.

    Parameters
    ----------
    name : str
        Name without namespace and overload.
    pointwise : bool
        Whether the framework marks it as one function of each element.
    sparse : bool
        Whether a sparse tensor is added to a dense one.

    Returns
    -------
    entry : Entry
        Its line; the last resort is ``other``.
    """
    if sparse:
        return _ROW_UPDATE
    generic = TABLE[-1]
    for entry in TABLE[:-1]:
        if any(fnmatchcase(name, pattern) for pattern in entry.names.split()):
            return entry
    if pointwise:
        return _POINTWISE
    return generic if any(fnmatchcase(name, pattern) for pattern in generic.names.split()) else _OTHER
