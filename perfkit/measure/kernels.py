"""Isolated kernels: which sizes to time, and how to call each operation the way a training step does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from perfkit.measure.networks import Networks, draw_networks

if TYPE_CHECKING:
    import torch

__all__ = ["Case", "draw_cases", "prepare"]

#: Batches of indices that take turns in the calls of an embedding kernel. A case records its own number, since the rows
#: of all of them may be found again: see `perfkit.models.caches.rotating_misses`.
_INDEX_BATCHES = 8

#: Largest working set of one case [B], where the last cache is not known to be larger than most.
_LARGEST = 160e6

_ELEMENTWISE = {
    # variant: (tensors read, of which the first is written in place)
    "relu": 1, "threshold_backward": 2, "add": 2, "sub": 2, "mul": 2, "mul_scalar": 1, "div_scalar": 1, "sqrt": 1,
    "gelu": 1, "gelu_backward": 2, "gelu_tanh": 1, "gelu_backward_tanh": 2, "sigmoid": 1,
    "binary_cross_entropy_with_logits": 2, "add_": 2, "mul_": 1, "lerp_": 2, "addcmul_": 2, "addcdiv_": 3,
    "add_scalar_": 1, "div_": 1,
}  # fmt: skip
_ROWWISE = (
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "sum", "nll_loss_forward", "nll_loss_backward", "embedding",
)  # fmt: skip
_COPY = ("clone", "cat", "index", "index_put", "new_zeros")


@dataclass(frozen=True)
class Case:
    """One kernel with its sizes.

    Parameters
    ----------
    kind : str
        Operation class of `perfkit.workloads.graph.KINDS`.
    variant : str
        Finer class: layout, function or gradient form.
    sizes : dict
        Features of `perfkit.workloads.graph.FEATURES` plus, for embeddings, ``exponent``, ``table_rows`` and
        ``index_batches``, which take turns [-].
    """

    kind: str
    variant: str
    sizes: dict[str, float] = field(default_factory=dict)


def _log_uniform(rng: np.random.Generator, low: float, high: float, n: int) -> np.ndarray:
    """Stratified draws: one in each of n equal parts of the logarithmic range, shuffled."""
    positions = (np.arange(n) + rng.random(n)) / n
    rng.shuffle(positions)
    return np.asarray(low * (high / low) ** positions)


def _log_uniforms(rng: np.random.Generator, n: int, *ranges: tuple[float, float]) -> list[np.ndarray]:
    return [_log_uniform(rng, low, high, n) for low, high in ranges]


def _gemms(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for layout in ("nt", "nn", "tn"):
        m, k = _log_uniform(rng, 16, 2048, n), _log_uniform(rng, 16, 2048, n)
        wide = np.where(rng.random(n) < 0.15, 7.0, 1.0)  # a vocabulary is wider than any hidden layer
        widths = _log_uniform(rng, 16, 2048, n) * wide
        for sizes in zip(m, widths, k, strict=True):
            rows, columns, inner = (round(s) for s in sizes)
            if layout == "tn" and rng.random() < 0.3:
                rows, inner = inner, rows
            yield Case("gemm", layout, _gemm_sizes(1, rows, columns, inner))


def _gemm_sizes(batch: int, m: int, n: int, k: int) -> dict[str, float]:
    return {"flops": 2.0 * batch * m * n * k, "batch": batch, "m": m, "n": n, "k": k}


def _bmms(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for layout in ("nn", "nt", "tn"):
        half = n // 2
        # interaction of embedding vectors: many tiny products
        batches, features, dims = _log_uniforms(rng, half, (64, 2048), (4, 28), (16, 128))
        for b, f, d in zip(batches, features, dims, strict=True):
            b, f, d = int(b), round(f), round(d)
            m, k = {"nt": (f, d), "nn": (f, f), "tn": (d, f)}[layout]
            yield Case("bmm", layout, _gemm_sizes(b, m, f if layout != "nn" else d, k))
        # attention heads: fewer, larger ones
        batches, sequences, dims = _log_uniforms(rng, n - half, (2, 128), (24, 300), (16, 128))
        for b, s, d in zip(batches, sequences, dims, strict=True):
            b, s, d = int(b), round(s), round(d)
            m, width, k = {"nn": (s, s, d), "nt": (s, s, d), "tn": (s, d, s)}[layout]
            if layout == "nn" and rng.random() < 0.5:
                width, k = k, width
            yield Case("bmm", layout, _gemm_sizes(b, m, width, k))


def _attentions(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for causal in ("", "_causal"):
        heads, sequences, dims = _log_uniforms(rng, n, (2, 160), (24, 512), (16, 128))
        for h, s, d in zip(heads, sequences, dims, strict=True):
            h, s, d = round(h), round(s), round(d / 8) * 8
            flops = 4.0 * h * s * s * d * (0.5 if causal else 1.0)
            for phase, factor in (("forward", 1.0), ("backward", 2.5)):
                sizes = {"flops": flops * factor, "batch": h, "m": s, "n": s, "k": d}
                yield Case("attention", phase + causal, sizes)


def _elementwise(rng: np.random.Generator, n: int, largest: float) -> Iterator[Case]:
    for variant, tensors in _ELEMENTWISE.items():
        top = 2e5 if variant in ("binary_cross_entropy_with_logits", "sub", "mul") else _LARGEST / 4 / (tensors + 1)
        sizes = list(_log_uniform(rng, 64, top, n))
        if top > 2e5:  # two more from main memory: what a byte from there costs is needed everywhere
            sizes += list(_log_uniform(rng, 0.4 * top * largest / _LARGEST, top * largest / _LARGEST, 2))
        for size in sizes:
            yield Case("elementwise", variant, {"elements": round(size)})


def _rowwise(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in _ROWWISE:
        for size, width in zip(_log_uniform(rng, 300, 6e6, n), _log_uniform(rng, 16, 14000, n), strict=True):
            if "softmax" not in variant and "nll" not in variant:
                width = 16 * (width / 16) ** 0.75
            width = min(round(width), round(size))
            rows = max(1, round(size / width))
            if variant == "nll_loss_forward":
                rows, width = min(rows, 8192), 1
            yield Case("rowwise", variant, {"elements": rows * width, "rows": rows, "n": width})


def _copies(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in _COPY:
        for size, width, parts in zip(
            _log_uniform(rng, 1e3, 8e6, n), _log_uniform(rng, 16, 128, n), _log_uniform(rng, 2, 27, n), strict=True
        ):
            width, parts = round(width), round(parts)
            if variant in ("index", "index_put"):
                batch = max(16, min(2048, round(size / parts**2)))
                yield Case("copy", variant, {"elements": batch * parts * (parts - 1) // 2, "rows": batch, "n": parts})
            elif variant == "cat":
                batch = max(16, min(4096, round(size / parts / width)))
                yield Case("copy", variant, {"elements": batch * parts * width, "rows": batch * parts, "n": parts})
            else:
                rows = max(4, round(size / width))
                yield Case("copy", variant, {"elements": rows * width, "rows": rows})


def _far_copies(rng: np.random.Generator, largest: float) -> Iterator[Case]:
    """Copies and gradients to fill with zeros that are larger than the last cache: those of large tables."""
    for variant, tensors in (("new_zeros", 1), ("clone", 2)):
        for size in _log_uniform(rng, 0.2 * largest, largest, 4):
            rows = round(size / 4 / tensors / 64)
            yield Case("copy", variant, {"elements": rows * 64, "rows": rows})


def _embeddings(rng: np.random.Generator, n: int, largest: float) -> Iterator[Case]:
    draws = _log_uniforms(rng, n, (1e3, 1e6), (16, 128), (64, 2048), (1, 32))
    # and many lookups into large tables, where pages and rows are far: rare in independent draws, decisive in a DLRM
    far = _log_uniforms(rng, n // 2, (6e4, 1e6), (16, 128), (256, 2048), (4, 32))
    joined = (np.concatenate(pair) for pair in zip(draws, far, strict=True))
    for rows, dim, batch, pooling in zip(*joined, strict=True):
        exponent, lookups = rng.uniform(0, 1.2), round(batch) * round(pooling)
        sizes = {"lookups": lookups, "bags": round(batch), "dim": round(dim), "exponent": exponent}
        sizes |= {"table_rows": round(rows), "index_batches": _INDEX_BATCHES}
        yield Case("embedding_forward", "_embedding_bag", sizes | {"elements": lookups * round(dim)})
        sparse = sizes | {"elements": lookups * round(dim), "rows": lookups}
        yield Case("embedding_backward", "sparse", sparse)
        yield Case("embedding_update", "sparse", sparse)
        small = sizes | {"table_rows": round(min(rows, largest / 4 / dim))}
        dense = small | {"elements": small["table_rows"] * round(dim), "rows": small["table_rows"]}
        yield Case("embedding_backward", "dense", dense)
        vocabulary = round(min(rows, 14000))
        words = {"lookups": lookups, "bags": lookups, "dim": round(dim) * 4, "table_rows": vocabulary}
        words |= {"elements": vocabulary * round(dim) * 4, "rows": vocabulary, "exponent": 0.0}
        words |= {"index_batches": _INDEX_BATCHES}
        if lookups <= 8192:
            yield Case("embedding_backward", "dense_rows", words)


def draw_cases(seed: int = 0, *, density: float = 1.0, cache: float = 0.0) -> list[Case]:
    """Sizes to time, spread evenly over the logarithm of what small training steps use.

    Parameters
    ----------
    seed : int
        Seed of the draw: other seeds give held-out sizes [-].
    density : float
        Share of the full number of sizes [-].
    cache : float
        What the last cache holds, so that some sizes are four times as large; 1 GB is the most [B].

    Returns
    -------
    cases : list of Case
        In random order, so that drift of the machine spreads over all classes.
    """
    rng, largest = np.random.default_rng(seed), float(np.clip(4.0 * cache, _LARGEST, 1e9))
    plan = (
        (_gemms, 36),
        (_bmms, 28),
        (_attentions, 12),
        (partial(_elementwise, largest=largest), 9),
        (_rowwise, 14),
        (_copies, 14),
        (partial(_embeddings, largest=largest), 30),
    )
    cases = [case for make, n in plan for case in make(rng, max(4, round(n * density)))]
    cases = [cases[i] for i in rng.permutation(len(cases))]
    other = np.random.default_rng([seed, 1])  # a draw of its own: the sizes above stay as they were
    far = _far_copies(np.random.default_rng([seed, 2]), largest) if cache else ()
    for number, case in enumerate([*(Case(*draw) for draw in draw_networks(other, density)), *far]):
        cases.insert(int(other.integers(number, len(cases) + 1)), case)
    return cases


def prepare(
    case: Case, *, device: str = "cpu", dtype: str = "fp32", seed: int = 0
) -> tuple[list[Callable[[], Any]], float]:
    """Allocate one case's operands and say how to run it.

    Parameters
    ----------
    case : Case
        What to time.
    device : str
        Torch device.
    dtype : str
        Data type of weights and activations.
    seed : int
        Seed of the operands [-].

    Returns
    -------
    calls : list of callables
        Run in rotation; several where fresh data decides the time (embedding indices).
    nbytes : float
        Bytes of all operands read and written, embedding rows aside [B].
    """
    import torch

    torch.manual_seed(seed)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    make = _Maker(device, types[dtype], np.random.default_rng(seed))
    builder = getattr(make, case.kind)
    calls = builder(case.variant, {k: (v if k == "exponent" else int(v)) for k, v in case.sizes.items()})
    return calls, float(sum(make.held.values()))


class _Maker(Networks):
    """Operands and calls of each operation class; adds up the bytes one call touches."""

    def gemm(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        m, n, k = s["m"], s["n"], s["k"]
        self._touch(m * n)
        if variant == "nt":
            bias, a, b = self._rand(n), self._rand(m, k), self._rand(n, k).t()
            return [lambda: self.aten.addmm.default(bias, a, b)]
        a = self._rand(k, m).t() if variant == "tn" else self._rand(m, k)
        b = self._rand(k, n)
        return [lambda: self.aten.mm.default(a, b)]

    def bmm(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        batch, m, n, k = s["batch"], s["m"], s["n"], s["k"]
        self._touch(batch * m * n)
        a = self._rand(batch, k, m).transpose(1, 2) if variant == "tn" else self._rand(batch, m, k)
        b = self._rand(batch, n, k).transpose(1, 2) if variant == "nt" else self._rand(batch, k, n)
        return [lambda: self.aten.bmm.default(a, b)]

    def attention(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        causal, shape = variant.endswith("_causal"), (1, s["m"], s["batch"], s["k"])
        q, k, v = (self._rand(*shape).transpose(1, 2) for _ in range(3))
        if self.device == "cpu":
            forward = self.aten._scaled_dot_product_flash_attention_for_cpu.default
            if variant.startswith("forward"):
                self._touch(q.numel())
                return [lambda: forward(q, k, v, 0.0, causal)]
            out, statistics = forward(q, k, v, 0.0, causal)
            g = self._rand(*shape).transpose(1, 2)
            self._touch(4 * q.numel())
            backward = self.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            return [lambda: backward(g, q, k, v, out, statistics, 0.0, causal)]
        attend = self.torch.nn.functional.scaled_dot_product_attention
        if variant.startswith("forward"):
            self._touch(q.numel())
            return [lambda: attend(q, k, v, is_causal=causal)]
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = attend(leaves[0], leaves[1], leaves[2], is_causal=causal)
        g = self._rand(*shape).transpose(1, 2)
        self._touch(4 * q.numel())
        return [lambda: self.torch.autograd.grad(out, leaves, g, retain_graph=True)]

    def elementwise(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        if variant not in _ELEMENTWISE:
            return self.function(variant, s["elements"])
        aten, x = self.aten, [self._rand(s["elements"]) for _ in range(_ELEMENTWISE[variant])]
        if not variant.endswith("_"):
            self._touch(s["elements"])
        calls: dict[str, Callable[[], Any]] = {
            "relu": lambda: aten.relu.default(x[0]),
            "threshold_backward": lambda: aten.threshold_backward.default(x[0], x[1], 0),
            "add": lambda: aten.add.Tensor(x[0], x[1]),
            "sub": lambda: aten.sub.Tensor(x[0], x[1]),
            "mul": lambda: aten.mul.Tensor(x[0], x[1]),
            "mul_scalar": lambda: aten.mul.Tensor(x[0], 0.999),
            "div_scalar": lambda: aten.div.Tensor(x[0], 0.999),
            "sqrt": lambda: aten.sqrt.default(x[0]),
            "gelu": lambda: aten.gelu.default(x[0]),
            "gelu_backward": lambda: aten.gelu_backward.default(x[0], x[1]),
            "gelu_tanh": lambda: aten.gelu.default(x[0], approximate="tanh"),
            "gelu_backward_tanh": lambda: aten.gelu_backward.default(x[0], x[1], approximate="tanh"),
            "sigmoid": lambda: aten.sigmoid.default(x[0]),
            "binary_cross_entropy_with_logits": lambda: aten.binary_cross_entropy_with_logits.default(x[0], x[1]),
            "add_": lambda: aten.add_.Tensor(x[0], x[1], alpha=-1e-9),
            "mul_": lambda: aten.mul_.Tensor(x[0], 1.0),
            "lerp_": lambda: aten.lerp_.Scalar(x[0], x[1], 0.1),
            "addcmul_": lambda: aten.addcmul_.default(x[0], x[1], x[1], value=1e-9),
            "addcdiv_": lambda: aten.addcdiv_.default(x[0], x[1], x[2], value=1e-9),
            "add_scalar_": lambda: aten.add_.Tensor(x[0], 1e-9),
            "div_": lambda: aten.div_.Scalar(x[0], 1.0),
        }
        return [calls[variant]]

    def rowwise(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        if variant not in _ROWWISE:
            return self.normalize(variant, s)
        aten, torch, rows, n = self.aten, self.torch, s["rows"], s["n"]
        if variant in ("nll_loss_forward", "embedding"):
            table = self._rand(rows, n) if variant == "nll_loss_forward" else torch.rand(14000, n, device=self.device)
            index = torch.randint(0, table.shape[-1 if variant[0] == "n" else 0], (rows,), device=self.device)
            self._touch(rows, 8)
            if variant == "nll_loss_forward":
                return [lambda: aten.nll_loss_forward.default(table, index, None, 1, -100)]
            table = table.to(self.dtype)
            self._touch(rows * n)
            return [lambda: aten.embedding.default(table, index)]
        x = self._rand(rows, n)
        if variant == "sum":
            return [lambda: aten.sum.dim_IntList(x, [0], True)]
        if variant == "nll_loss_backward":
            index = torch.randint(0, n, (rows,), device=self.device)
            loss, total = aten.nll_loss_forward.default(x, index, None, 1, -100)
            one = torch.ones_like(loss)
            return [lambda: aten.nll_loss_backward.default(one, x, index, None, 1, -100, total)]
        self._touch(rows * n)
        if variant in ("_softmax", "_log_softmax"):
            function = getattr(aten, variant).default
            return [lambda: function(x, 1, False)]
        if variant.endswith("_data"):
            function, y = getattr(aten, variant).default, self._rand(rows, n)
            return [lambda: function(x, y, 1, self.dtype)]
        weight, bias = self._rand(n), self._rand(n)
        if variant == "native_layer_norm":
            return [lambda: aten.native_layer_norm.default(x, [n], weight, bias, 1e-5)]
        _, mean, inverse = aten.native_layer_norm.default(x, [n], weight, bias, 1e-5)
        g, backward = self._rand(rows, n), aten.native_layer_norm_backward.default
        return [lambda: backward(g, x, [n], mean, inverse, weight, bias, [True, True, True])]

    def copy(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        if variant not in _COPY:
            return self.rearrange(variant, s)
        aten, torch, elements = self.aten, self.torch, s["elements"]
        if variant == "clone":
            width = elements // s["rows"]
            heads = max(h for h in (1, 2, 4) if s["rows"] % h == 0)
            x = self._rand(s["rows"] // heads, heads, width).transpose(0, 1)
            self._touch(elements)
            return [lambda: aten.clone.default(x, memory_format=torch.contiguous_format)]
        if variant == "new_zeros":
            x = torch.empty(1, device=self.device, dtype=self.dtype)
            self._touch(elements)
            return [lambda: aten.new_zeros.default(x, [elements])]
        if variant == "cat":
            parts = [self._rand(s["rows"] // s["n"], elements // s["rows"]) for _ in range(s["n"])]
            self._touch(elements)
            return [lambda: aten.cat.default(parts, 1)]
        batch, n = s["rows"], s["n"]
        i, j = torch.tril_indices(n, n, -1, device=self.device)
        x = self._rand(batch, n, n)
        self._touch(elements)
        if variant == "index":
            return [lambda: aten.index.Tensor(x, [None, i, j])]
        g = self._rand(batch, len(i))
        self._touch(x.numel() - elements)
        return [lambda: aten.index_put.default(x, [None, i, j], g, True)]

    def _indices(self, s: dict[str, Any]) -> list["torch.Tensor"]:
        """Batches of row numbers that take turns: Zipf over the rows, popular rows scattered."""
        rows, draws = s["table_rows"], []
        for _ in range(s.get("index_batches", _INDEX_BATCHES)):
            draws.append(self.torch.from_numpy(draw_rows(self.rng, rows, s["exponent"], s["lookups"])).to(self.device))
        self._touch(s["lookups"], 8)
        return draws

    def embedding_forward(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        table = self.torch.rand(s["table_rows"], s["dim"], device=self.device).to(self.dtype)
        bags, forward = s["bags"], self.aten._embedding_bag.default
        offsets = self.torch.arange(bags, device=self.device) * (s["lookups"] // bags)
        self._touch(bags * s["dim"])
        return [partial(forward, table, i, offsets, False, 0, True) for i in self._indices(s)]

    def embedding_backward(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        rows, bags, lookups = s["table_rows"], s["bags"], s["lookups"]
        g, indices, torch = self._rand(bags, s["dim"]), self._indices(s), self.torch
        self._touch(s["elements"])
        if variant == "dense_rows":
            backward = self.aten.embedding_dense_backward.default
            return [partial(backward, g, i, rows, -1, False) for i in indices]
        table = torch.empty(rows, s["dim"], device=self.device, dtype=self.dtype)
        offsets = torch.arange(bags, device=self.device) * (lookups // bags)
        sparse, backward = variant == "sparse", self.aten._embedding_bag_backward.default
        calls: list[Callable[[], Any]] = []
        for i in indices:
            _, o2b, size, maximum = self.aten._embedding_bag.default(table, i, offsets, False, 0, sparse)
            calls.append(partial(backward, g, i, offsets, o2b, size, maximum, rows, False, 0, sparse, None))
        return calls

    def embedding_update(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        torch, shape = self.torch, (s["table_rows"], s["dim"])
        table, values = torch.rand(shape, device=self.device).to(self.dtype), self._rand(s["lookups"], s["dim"])
        gradients = [torch.sparse_coo_tensor(i[None], values, shape, check_invariants=False) for i in self._indices(s)]
        return [partial(self.aten.add_.Tensor, table, g, alpha=-1e-9) for g in gradients]


def draw_rows(rng: np.random.Generator, rows: int, exponent: float, n: int) -> np.ndarray:
    """Row numbers whose popularity follows a Zipf law, popular rows scattered over the table.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of randomness.
    rows : int
        Rows of the table [-].
    exponent : float
        Zipf exponent, 0 for uniform [-].
    n : int
        Draws [-].

    Returns
    -------
    indices : array of int64
        Row numbers from 0 to ``rows - 1``.
    """
    if exponent == 0.0:
        return rng.integers(0, rows, n)
    cumulative = _cumulative(rows, exponent)
    ranks = np.searchsorted(cumulative, rng.random(n) * cumulative[-1])
    return (ranks * _coprime(rows) + rows // 3) % rows


@lru_cache(maxsize=32)
def _cumulative(rows: int, exponent: float) -> np.ndarray:
    return np.cumsum(np.arange(1, rows + 1, dtype=float) ** -exponent)


def _coprime(rows: int) -> int:
    """A multiplier near the golden section of the table that reaches every row."""
    step = max(1, round(rows * 0.6180339887))
    while np.gcd(step, rows) != 1:
        step += 1
    return step
