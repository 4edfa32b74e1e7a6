"""Time isolated kernels: one table says how to call each operation in the way of a training
step."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from perfkit.measure.kernels import INDEX_BATCHES, Case
from perfkit.measure.records import KernelTiming
from perfkit.measure.timing import Reference, find_disagreement, round_times, time_calls
from perfkit.recording.modules import draw_rows
from perfkit.workloads.measured_functions import FUNCTIONS
from perfkit.workloads.vocabulary import find_entry

_Given: TypeAlias = tuple[Any, ...]
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_EACH = [True] * 3  # gradients of a layer: of its input, weight and bias


class _Operands:
    """Makes the operands of one case on a device, in one number format. Its attributes are the
    sizes of the case."""

    def __init__(
        self, case: Case, device: str, seed: int, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(seed)
        self.device, self.dtype, self.rng = device, dtype, np.random.default_rng(seed)
        self.sizes = {
            name: (size if name == "exponent" else int(size)) for name, size in case.sizes.items()
        }
        self.sizes["causal"] = case.variant.endswith("_causal")

    def __getattr__(self, name: str) -> Any:
        return self.sizes[name]

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device, dtype=self.dtype).add_(0.1)

    def index(self, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, device=self.device)

    def mask(self) -> torch.Tensor:
        """Triangles, like masks of attention. A random mask is slower, because a CPU cannot predict
        its branches."""
        position = torch.arange(self.elements, device=self.device)
        return position % 64 > position // 64 % 64

    def picture(self, side: int) -> torch.Tensor:
        return self.rand(self.elements // self.channels // self.image**2, self.channels, side, side)

    def heads(self) -> list[torch.Tensor]:
        return [self.rand(1, self.m, self.batch, self.k).transpose(1, 2) for _ in range(3)]

    def triangle(self) -> list[Any]:
        return [None, *torch.tril_indices(self.n, self.n, -1, device=self.device)]

    def lookups_of(self, table: torch.Tensor, *more: Any) -> list[_Given]:
        """Table, rows and bags of calls that rotate; the rows follow a Zipf law, with popular rows
        scattered."""
        draws = [
            draw_rows(self.rng, len(table), self.exponent, self.lookups)
            for _ in range(INDEX_BATCHES)
        ]
        offsets = torch.arange(self.bags, device=self.device) * (self.lookups // self.bags)
        return [(table, torch.from_numpy(rows).to(self.device), offsets, *more) for rows in draws]


def _convolve(o: _Operands) -> _Given:
    window, into, out = (o.height, o.width), o.k // (o.height * o.width), o.n * o.batch
    x, w = o.rand(o.rows, into * o.batch, o.image, o.image), o.rand(out, into, *window)
    return (
        x,
        w,
        None,
        [o.stride] * 2,
        [(edge - 1) // 2 for edge in window],
        [1, 1],
        False,
        [0, 0],
        o.batch,
    )


def _clone(o: _Operands) -> _Given:
    heads = max(h for h in (1, 2, 4) if o.rows % h == 0)
    x = o.rand(o.rows // heads, heads, o.elements // o.rows).transpose(0, 1)
    return x, {"memory_format": torch.contiguous_format}


def _return_bags(o: _Operands, sparse: bool) -> list[_Given]:
    g, calls = (
        o.rand(o.bags, o.dim),
        o.lookups_of(torch.empty(o.table_rows, o.dim, device=o.device), False, 0, sparse),
    )
    found = [(*call[1:3], *_find("_embedding_bag")(*call)[1:]) for call in calls]
    return [(g, *places, o.table_rows, False, 0, sparse, None) for places in found]


def _return_words(o: _Operands) -> list[_Given]:
    g, table = o.rand(o.bags, o.dim), torch.empty(o.table_rows, 1)
    return [(g, rows, o.table_rows, -1, False) for _, rows, _ in o.lookups_of(table)]


def _update(o: _Operands) -> list[_Given]:
    values, calls = o.rand(o.lookups, o.dim), o.lookups_of(o.rand(o.table_rows, o.dim))
    sparse = partial(
        torch.sparse_coo_tensor, values=values, size=calls[0][0].shape, check_invariants=False
    )
    return [(table, sparse(rows[None]), {"alpha": -1e-9}) for table, rows, _ in calls]


#: Arguments of every operation except elementwise ones and gradients, by class and variant or by
#: variant alone; a list of arguments for calls that rotate. Named arguments are in a dictionary at
#: the end.
ARGUMENTS: dict[str, Callable[[_Operands], "_Given | list[_Given]"]] = {
    "gemm.nt": lambda o: (o.rand(o.n), o.rand(o.m, o.k), o.rand(o.n, o.k).t()),
    "gemm.nn": lambda o: (o.rand(o.m, o.k), o.rand(o.k, o.n)),
    "gemm.tn": lambda o: (o.rand(o.k, o.m).t(), o.rand(o.k, o.n)),
    "bmm.nt": lambda o: (o.rand(o.batch, o.m, o.k), o.rand(o.batch, o.n, o.k).transpose(1, 2)),
    "bmm.nn": lambda o: (o.rand(o.batch, o.m, o.k), o.rand(o.batch, o.k, o.n)),
    "bmm.tn": lambda o: (o.rand(o.batch, o.k, o.m).transpose(1, 2), o.rand(o.batch, o.k, o.n)),
    "attention.forward": lambda o: (*o.heads(), 0.0, o.causal),
    "convolution.forward": _convolve,
    **dict.fromkeys(("_softmax", "_log_softmax"), lambda o: (o.rand(o.rows, o.n), 1, False)),
    "native_layer_norm": lambda o: (o.rand(o.rows, o.n), [o.n], o.rand(o.n), o.rand(o.n), 1e-5),
    "native_batch_norm": lambda o: (
        o.picture(o.image),
        *(o.rand(o.channels) for _ in range(4)),
        True,
        0.1,
        1e-5,
    ),
    "native_group_norm": lambda o: (
        o.picture(o.image),
        o.rand(o.channels),
        o.rand(o.channels),
        o.rows // o.channels,
        o.channels,
        o.n,
        8,
        1e-5,
    ),
    "sum": lambda o: (o.rand(o.rows, o.n), [0], True),
    **dict.fromkeys(("mean", "amax"), lambda o: (o.rand(o.rows, o.n), [1])),
    **dict.fromkeys(("argmax", "cumsum"), lambda o: (o.rand(o.rows, o.n), 1)),
    "nll_loss_forward": lambda o: (o.rand(o.rows, o.n), o.index(o.n, o.rows), None, 1, -100),
    "embedding": lambda o: (o.rand(14000, o.n), o.index(14000, o.rows)),
    "clone": _clone,
    "new_zeros": lambda o: (o.rand(1), [o.elements]),
    "cat": lambda o: ([o.rand(o.rows // o.n, o.elements // o.rows) for _ in range(o.n)], 1),
    "index": lambda o: (o.rand(o.rows, o.n, o.n), o.triangle()),
    "index_put": lambda o: (
        o.rand(o.rows, o.n, o.n),
        o.triangle(),
        o.rand(o.rows, o.n * (o.n - 1) // 2),
        True,
    ),
    # the gradient of all columns but one
    "slice_backward": lambda o: (o.rand(o.rows, o.n), [o.rows, o.n + 1], 1, 1, o.n + 1, 1),
    "copy_": lambda o: (o.rand(o.rows, o.n), o.rand(o.rows, o.n)),
    "gather": lambda o: (o.rand(o.rows, o.n), 1, o.index(o.n, o.rows, o.n)),
    "scatter_add": lambda o: (
        o.rand(o.rows, o.n),
        1,
        o.index(o.n, o.rows, o.n),
        o.rand(o.rows, o.n),
    ),
    "upsample_nearest2d": lambda o: (o.picture(o.image // 2), [o.image] * 2, 2.0, 2.0),
    "upsample_bilinear2d": lambda o: (o.picture(o.image // 2), [o.image] * 2, False, 2.0, 2.0),
    **dict.fromkeys(
        ("max_pool2d_with_indices", "avg_pool2d"),
        lambda o: (o.picture(o.image), [o.window] * 2, [o.stride] * 2, [o.window // 3] * 2),
    ),
    "_adaptive_avg_pool2d": lambda o: (o.picture(o.image), [-(-o.image // 2)] * 2),
    "_embedding_bag": lambda o: o.lookups_of(o.rand(o.table_rows, o.dim), False, 0, True),
    "embedding_backward.sparse": lambda o: _return_bags(o, True),
    "embedding_backward.dense": lambda o: _return_bags(o, False),
    "embedding_backward.dense_rows": _return_words,
    "embedding_update.sparse": _update,
}

#: Arguments of gradients, from the gradient of an operation's result, its result and its arguments.
GRADIENTS: dict[str, Callable[..., _Given]] = {
    "attention.backward": lambda g, y, q, k, v, *more: (g, q, k, v, *y, *more),
    "convolution.backward": lambda g, y, *given: (g, *given, [True, True, False]),
    **dict.fromkeys(
        ("_softmax_backward_data", "_log_softmax_backward_data"),
        lambda g, y, x, *_: (g, y, 1, x.dtype),
    ),
    "native_layer_norm_backward": lambda g, y, x, n, w, b, _: (g, x, n, *y[1:], w, b, _EACH),
    "native_batch_norm_backward": lambda g, y, x, w, b, m, s, *_: (
        g,
        x,
        w,
        m,
        s,
        *y[1:],
        True,
        1e-5,
        _EACH,
    ),
    "native_group_norm_backward": lambda g, y, x, w, b, *place: (
        g,
        x,
        *y[1:],
        w,
        *place[:4],
        _EACH,
    ),
    "nll_loss_backward": lambda g, y, *given: (g, *given, y[1]),
    "upsample_nearest2d_backward": lambda g, y, x, size, *scales: (g, size, [*x.shape], *scales),
    "max_pool2d_with_indices_backward": lambda g, y, *given: (g, *given, [1, 1], False, y[1]),
    "avg_pool2d_backward": lambda g, y, *given: (g, *given, False, True, None),
    "_adaptive_avg_pool2d_backward": lambda g, y, x, _: (g, x),
}
#: Names in PyTorch, with the overload after a dot, where they differ from the variant.
NAMES = {
    "gemm.nt": "addmm",
    "gemm.nn": "mm",
    "gemm.tn": "mm",
    "bmm.nt": "bmm",
    "bmm.nn": "bmm",
    "bmm.tn": "bmm",
    "attention.forward": _FLASH,
    "attention.backward": f"{_FLASH}_backward",
    "convolution.forward": "convolution",
    "convolution.backward": "convolution_backward",
    "sum": "sum.dim_IntList",
    "mean": "mean.dim",
    "index": "index.Tensor",
    "embedding_backward.sparse": "_embedding_bag_backward",
    "embedding_backward.dense": "_embedding_bag_backward",
    "embedding_backward.dense_rows": "embedding_dense_backward",
    "embedding_update.sparse": "add_.Tensor",
}


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
    found = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    found = [each._values() if each.layout is torch.sparse_coo else each for each in found]
    return float(
        sum(
            {
                (each.data_ptr(), each.numel()): each.numel() * each.element_size()
                for each in found
            }.values()
        )
    )


def _find(name: str) -> Any:
    name, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


def _list_calls(o: _Operands, key: str) -> "list[partial[Any]]":
    """One call of an operation, or several that rotate."""
    name, made = NAMES.get(key, key), list[_Given]()
    if key in GRADIENTS:
        names = (key.replace("backward", "forward"), re.sub("_backward(_data)?", "", key))
        (call,) = _list_calls(o, next(name for name in names if name in ARGUMENTS))
        result = call()
        first = result[0] if isinstance(result, tuple) else result
        made = [GRADIENTS[key](o.rand(*first.shape), result, *call.args)]
    elif key in ARGUMENTS:
        arguments = ARGUMENTS[key](o)
        made = arguments if isinstance(arguments, list) else [arguments]
    else:
        name, *operands = FUNCTIONS[key]
        tensors = {
            one: o.mask() if one == "mask" else o.rand(o.elements)
            for one in operands
            if isinstance(one, str)
        }
        made = [tuple(tensors[one] if isinstance(one, str) else one for one in operands)]
    calls = []
    for given in made:
        named = given[-1] if isinstance(given[-1], dict) else {}
        calls.append(partial(_find(name), *given[: len(given) - bool(named)], **named))
    return calls


def _attend_on_gpu(o: _Operands, phase: str) -> "partial[Any]":
    """Attention with the kernel that PyTorch chooses."""
    attend: Any = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=o.causal)
    if phase == "forward":
        return partial(attend, *o.heads())
    leaves = [leaf.detach().requires_grad_() for leaf in o.heads()]
    result = attend(*leaves)
    return partial(torch.autograd.grad, result, leaves, o.rand(*result.shape), retain_graph=True)


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
    kind, variant, o = case.kind, case.variant, _Operands(case, device, seed, dtype)
    # one call covers all groups of convolutions, and attention with and without mask
    phase = variant.partition("_")[0]
    keys = [
        key
        for key in (f"{kind}.{variant}", variant, f"{kind}.{phase}")
        if key in ARGUMENTS or key in GRADIENTS
    ]
    on_gpu = kind == "attention" and device != "cpu"
    calls = [_attend_on_gpu(o, phase)] if on_gpu else _list_calls(o, [*keys, variant][0])
    call, result = calls[0], calls[0]()
    unread = find_entry(call.func.__name__.partition(".")[0]).unread
    if kind == "embedding_update":  # only the rows of the gradient change in the table
        unread, result = (0,), ()
    read = [operand for place, operand in enumerate(call.args) if place not in unread]
    return calls, count_operands([read, result[0] if kind == "embedding_forward" else result])


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
