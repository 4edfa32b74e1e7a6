"""Isolated kernels timed: how each operation is called the way a training step does, one table of them all."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from perfkit.measure.kernels import FUNCTIONS, INDEX_BATCHES, Case
from perfkit.measure.timing import Reference, find_disagreement, find_wait, time_calls

if TYPE_CHECKING:
    import torch

_Calls = list[Callable[[], Any]]


class _Operands:
    """Operands on a device; adds up the bytes that one call touches."""

    def __init__(self, device: str, seed: int) -> None:
        import torch

        torch.manual_seed(seed)
        self.torch, self.aten, self.device = torch, torch.ops.aten, device
        self.rng, self.nbytes = np.random.default_rng(seed), 0.0

    def touch(self, elements: float, itemsize: int = 4) -> None:
        """Count what is written, or read beside the numbers."""
        self.nbytes += elements * itemsize

    def rand(self, *shape: int) -> "torch.Tensor":
        """Numbers that are read."""
        tensor = self.torch.rand(*shape, device=self.device).add_(0.1)
        self.touch(tensor.numel())
        return tensor

    def index(self, most: int, *shape: int) -> "torch.Tensor":
        """Whole numbers that are read."""
        tensor = self.torch.randint(0, most, shape, device=self.device)
        self.touch(tensor.numel(), 8)
        return tensor

    def mask(self, elements: int) -> "torch.Tensor":
        """Triangles, as masks of attention have them: where random, a mask costs a CPU its branch prediction."""
        self.touch(elements, 1)
        position = self.torch.arange(elements, device=self.device)
        return position % 64 > position // 64 % 64

    def rows(self, s: dict[str, Any]) -> list["torch.Tensor"]:
        """Batches of row numbers, one after the other in calls: Zipf over the rows, popular rows scattered."""
        from perfkit.recording.modules import draw_rows

        self.touch(s["lookups"], 8)
        settings = s["table_rows"], s["exponent"], s["lookups"]
        batches = [draw_rows(self.rng, *settings) for _ in range(s.get("index_batches", INDEX_BATCHES))]
        return [self.torch.from_numpy(rows).to(self.device) for rows in batches]

    def find(self, overload: str) -> Callable[..., Any]:
        """An operation by its name, with the overload after a dot."""
        name, _, end = overload.partition(".")
        return getattr(getattr(self.aten, name), end or "default")

    def call(self, overload: str, *args: Any, out: float = 0, **named: Any) -> _Calls:
        """Calls of an operation that writes so many numbers."""
        function = self.find(overload)
        self.touch(out)
        return [lambda: function(*args, **named)]


def _call_gemm(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    m, n, k = s["m"], s["n"], s["k"]
    if variant == "nt":
        return o.call("addmm", o.rand(n), o.rand(m, k), o.rand(n, k).t(), out=m * n)
    return o.call("mm", o.rand(k, m).t() if variant == "tn" else o.rand(m, k), o.rand(k, n), out=m * n)


def _call_bmm(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    batch, m, n, k = s["batch"], s["m"], s["n"], s["k"]
    a = o.rand(batch, k, m).transpose(1, 2) if variant == "tn" else o.rand(batch, m, k)
    b = o.rand(batch, n, k).transpose(1, 2) if variant == "nt" else o.rand(batch, k, n)
    return o.call("bmm", a, b, out=batch * m * n)


def _call_attention(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    causal, shape, forward = variant.endswith("_causal"), (1, s["m"], s["batch"], s["k"]), variant.startswith("forward")
    q, k, v = (o.rand(*shape).transpose(1, 2) for _ in range(3))
    o.touch(q.numel() * (1 if forward else 4))
    g = None if forward else o.rand(*shape).transpose(1, 2)
    if o.device == "cpu":
        name = "_scaled_dot_product_flash_attention_for_cpu"
        if forward:
            return o.call(name, q, k, v, 0.0, causal)
        return o.call(name + "_backward", g, q, k, v, *o.find(name)(q, k, v, 0.0, causal), 0.0, causal)
    attend = o.torch.nn.functional.scaled_dot_product_attention
    if forward:
        return [lambda: attend(q, k, v, is_causal=causal)]
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attend(leaves[0], leaves[1], leaves[2], is_causal=causal)
    return [lambda: o.torch.autograd.grad(out, leaves, g, retain_graph=True)]


def _call_elementwise(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    n = s["elements"]
    overload, pattern, named = FUNCTIONS[variant]
    tensors = {p: o.mask(n) if p == "mask" else o.rand(n) for p in dict.fromkeys(pattern) if isinstance(p, str)}
    if variant == "native_dropout":
        o.touch(n, 1)
    args = [tensors[p] if isinstance(p, str) else p for p in pattern]
    return o.call(overload, *args, out=0 if variant.endswith("_") else n, **named)


def _call_rowwise(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    if "image" in s:
        return _call_on_pictures(o, variant, s)
    rows, n = s["rows"], s["n"]
    if variant == "embedding":
        table = o.torch.rand(14000, n, device=o.device)
        return o.call(variant, table, o.index(14000, rows), out=rows * n)
    x = o.rand(rows, n)
    if variant == "sum":
        return o.call("sum.dim_IntList", x, [0], True)
    if variant == "nll_loss_forward":
        return o.call(variant, x, o.index(n, rows), None, 1, -100)
    if variant == "nll_loss_backward":
        labels = o.torch.randint(0, n, (rows,), device=o.device)
        loss, total = o.aten.nll_loss_forward.default(x, labels, None, 1, -100)
        return o.call(variant, o.torch.ones_like(loss), x, labels, None, 1, -100, total)
    if variant.endswith("softmax"):
        return o.call(variant, x, 1, False, out=x.numel())
    if variant.endswith("_data"):
        return o.call(variant, x, o.rand(rows, n), 1, x.dtype, out=x.numel())
    weight, bias = o.rand(n), o.rand(n)
    if variant == "native_layer_norm":
        return o.call(variant, x, [n], weight, bias, 1e-5, out=x.numel())
    _, mean, inverse = o.aten.native_layer_norm.default(x, [n], weight, bias, 1e-5)
    return o.call(variant, o.rand(rows, n), x, [n], mean, inverse, weight, bias, [True] * 3, out=x.numel())


def _call_on_pictures(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    """Normalizations over channels or groups of them, and reductions of pictures."""
    side, channels, n = s["image"], s["channels"], s["n"]
    batch = s["elements"] // channels // side**2
    x, weight, bias = o.rand(batch, channels, side, side), o.rand(channels), o.rand(channels)
    if not variant.startswith("native"):
        dim = [1] if variant in ("mean", "amax") else 1
        overload = "mean.dim" if variant == "mean" else variant
        return o.call(overload, x.view(-1, n), dim, out=x.numel() if variant == "cumsum" else 0)
    name, back = variant.removesuffix("_backward"), variant.endswith("_backward")
    place = (batch, channels, side**2, 8)
    if "group" in variant:
        if not back:
            return o.call(name, x, weight, bias, *place, 1e-5, out=x.numel())
        _, mean, inverse = o.find(name)(x, weight, bias, *place, 1e-5)
        return o.call(variant, o.rand(*x.shape), x, mean, inverse, weight, *place, [True] * 3, out=x.numel())
    given = (x, weight, bias, o.rand(channels), o.rand(channels), True, 0.1, 1e-5)
    if not back:
        return o.call(name, *given, out=x.numel())
    _, mean, inverse = o.find(name)(*given)
    found = (mean, inverse, True, 1e-5, [True] * 3)
    return o.call(variant, o.rand(*x.shape), x, weight, *given[3:5], *found, out=x.numel())


def _call_copy(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    elements, rows, n = s["elements"], s["rows"], s.get("n", 0)
    if variant == "clone":
        heads = max(h for h in (1, 2, 4) if rows % h == 0)
        x = o.rand(rows // heads, heads, elements // rows).transpose(0, 1)
        return o.call(variant, x, out=elements, memory_format=o.torch.contiguous_format)
    if variant == "new_zeros":
        return o.call(variant, o.torch.empty(1, device=o.device), [elements], out=elements)
    if variant == "cat":
        return o.call(variant, [o.rand(rows // n, elements // rows) for _ in range(n)], 1, out=elements)
    if variant in ("index", "index_put"):
        where: list[Any] = [None, *o.torch.tril_indices(n, n, -1, device=o.device)]
        x = o.rand(rows, n, n)
        if variant == "index":
            return o.call("index.Tensor", x, where, out=elements)
        return o.call(variant, x, where, o.rand(rows, len(where[1])), True, out=x.numel())
    if variant.startswith("upsample"):
        return _call_upsample(o, variant, s)
    x = o.rand(rows, n)
    if variant == "slice_backward":  # the gradient of all columns but one
        return o.call(variant, x, [rows, n + 1], 1, 1, n + 1, 1, out=rows * (n + 1))
    if variant == "copy_":
        return o.call(variant, o.rand(rows, n), x)
    index = o.index(n, rows, n)
    if variant == "gather":
        return o.call(variant, x, 1, index, out=x.numel())
    return o.call(variant, o.rand(rows, n), 1, index, x, out=x.numel())


def _call_upsample(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    side, half, shape = s["image"], s["image"] // 2, (s["rows"] // s["channels"], s["channels"])
    if variant.endswith("_backward"):
        g = o.rand(*shape, side, side)
        return o.call(variant, g, [side, side], [*shape, half, half], 2.0, 2.0, out=s["elements"] // 4)
    corners = (False,) if "bilinear" in variant else ()
    return o.call(variant, o.rand(*shape, half, half), [side, side], *corners, 2.0, 2.0, out=s["elements"])


def _call_convolution(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    groups, window, stride = s["batch"], (s["height"], s["width"]), [s["stride"]] * 2
    into, out, side = s["k"] // (window[0] * window[1]) * groups, s["n"] * groups, -(-s["image"] // s["stride"])
    x, w = o.rand(s["rows"], into, s["image"], s["image"]), o.rand(out, into // groups, *window)
    place = (stride, [(window[0] - 1) // 2, (window[1] - 1) // 2], [1, 1], False, [0, 0], groups)
    if variant.startswith("forward"):
        return o.call("convolution", x, w, None, *place, out=s["elements"])
    g, wanted = o.rand(s["rows"], out, side, side), [True, True, False]
    return o.call("convolution_backward", g, x, w, None, *place, wanted, out=x.numel() + w.numel())


def _call_pooling(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    side, window, name = s["image"], s["window"], variant.removesuffix("_backward")
    x = o.rand(s["rows"] // s["channels"], s["channels"], side, side)
    place: tuple[Any, ...] = ([window] * 2, [s["stride"]] * 2, [window // 3] * 2)
    more: tuple[Any, ...] = (False, True, None)
    if adaptive := name.startswith("_adaptive"):
        place, more = ([-(-side // 2)] * 2,), ()
    found = o.find(name)(x, *place)
    if name.startswith("max"):
        found, indices = found
        more = ([1, 1], False, indices)
        o.touch(found.numel(), 8)
    if name == variant:
        return o.call(name, x, *place, out=found.numel())
    return o.call(variant, o.rand(*found.shape), x, *(() if adaptive else place), *more)


def _call_embedding_forward(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    table, bags = o.torch.rand(s["table_rows"], s["dim"], device=o.device), s["bags"]
    offsets = o.torch.arange(bags, device=o.device) * (s["lookups"] // bags)
    o.touch(bags * s["dim"])
    return [partial(o.find(variant), table, i, offsets, False, 0, True) for i in o.rows(s)]


def _call_embedding_backward(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    rows, bags, g, indices = s["table_rows"], s["bags"], o.rand(s["bags"], s["dim"]), o.rows(s)
    o.touch(s["elements"])
    if variant == "dense_rows":
        return [partial(o.find("embedding_dense_backward"), g, i, rows, -1, False) for i in indices]
    table, sparse = o.torch.empty(rows, s["dim"], device=o.device), variant == "sparse"
    offsets = o.torch.arange(bags, device=o.device) * (s["lookups"] // bags)
    forward, backward = o.find("_embedding_bag"), o.find("_embedding_bag_backward")
    found = [(i, offsets, *forward(table, i, offsets, False, 0, sparse)[1:]) for i in indices]
    return [partial(backward, g, *own, rows, False, 0, sparse, None) for own in found]


def _call_embedding_update(o: _Operands, variant: str, s: dict[str, Any]) -> _Calls:
    shape = (s["table_rows"], s["dim"])
    table, values = o.torch.rand(shape, device=o.device), o.rand(s["lookups"], s["dim"])
    gradients = [o.torch.sparse_coo_tensor(i[None], values, shape, check_invariants=False) for i in o.rows(s)]
    return [partial(o.find("add_.Tensor"), table, g, alpha=-1e-9) for g in gradients]


#: How each operation class is called: with operands, variant and sizes.
_CALLS: dict[str, Callable[[_Operands, str, dict[str, Any]], _Calls]] = {
    "gemm": _call_gemm, "bmm": _call_bmm, "attention": _call_attention, "elementwise": _call_elementwise,
    "rowwise": _call_rowwise, "copy": _call_copy, "convolution": _call_convolution, "pooling": _call_pooling,
    "embedding_forward": _call_embedding_forward, "embedding_backward": _call_embedding_backward,
    "embedding_update": _call_embedding_update,
}  # fmt: skip


def prepare(case: Case, *, device: str = "cpu", seed: int = 0) -> tuple[_Calls, float]:
    """Allocate one case's operands and say how to run it.

    Parameters
    ----------
    case : Case
        What to time.
    device : str
        Torch device.
    seed : int
        Seed of the operands [-].

    Returns
    -------
    calls : list of callables
        Run in rotation; several where fresh data decides the time (embedding indices).
    nbytes : float
        Bytes of all operands read and written, embedding rows aside [B].
    """
    operands = _Operands(device, seed)
    sizes = {key: (value if key == "exponent" else int(value)) for key, value in case.sizes.items()}
    return _CALLS[case.kind](operands, case.variant, sizes), operands.nbytes


def time_kernels(*, cases: Sequence[Sequence[Any]], seconds: float, device: str = "cpu") -> list[dict[str, Any]]:
    """Time isolated kernels.

    Parameters
    ----------
    cases : sequence of sequence
        Kind, variant and sizes of each, as of a `Case`.
    seconds : float
        Time for each [s].
    device : str
        Torch device.

    Returns
    -------
    rows : list of dict
        ``nbytes`` [B], the timing and the references around it [s] of each case.
    """
    rows, reference, wait = [], Reference(device), find_wait(device)
    before = reference()
    for number, case in enumerate(cases):
        calls, nbytes = prepare(Case(*case), device=device, seed=number)
        timing = time_calls(calls, seconds=seconds, wait=wait)
        if find_disagreement(timing) > 0.1:
            timing = min(timing, time_calls(calls, seconds=seconds, wait=wait), key=find_disagreement)
        after = reference()
        around = [float(f"{t:.4g}") for t in np.sqrt(before * after)]
        rows.append({"nbytes": nbytes, **timing, "reference": around})
        before = after
    return rows
