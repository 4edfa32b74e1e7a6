"""What `benchmarks.gpu_survey` times on a GPU, and how; it needs torch and NumPy alone.

One line of the file that `measure` writes is one kernel, or a short sequence of kernels: its section,
name, number format, sizes, and the time of each sample on the device [s], without the time of the host.
A line that failed has the reason instead. Operands rotate through twice the last cache.
"""

import functools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perfkit.measure.cuda import multiply_in, time_queued
from perfkit.measure.machine import describe_machine, list_versions

#: Where operands are made.
DEVICE = "cuda"
#: Formats of operands by their name in perfkit.
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
#: Time of the calls of one sample [s]; fewest and most calls of one sample [-].
_SAMPLE, _FEWEST, _MOST = 3e-3, 2, 20
#: Most sets of operands that rotate [-], and most memory that they may take together [B].
_MOST_SETS, _MOST_BYTES = 32, 16e9
#: Largest value of fp8 with four bits of exponent.
_LARGEST_FP8 = 448.0

Call = Callable[[], Any]


@dataclass(frozen=True)
class Point:
    """Something to time.

    Parameters
    ----------
    name : str
        What runs.
    dtype : str
        Number format of the operands.
    make : callable
        Makes fresh operands and returns the call to time.
    nbytes : float
        Operands of one call, by which it is decided how many sets rotate [B].
    sizes : mapping
        What decides the time [-].
    """

    name: str
    dtype: str
    make: Callable[[], Call]
    nbytes: float
    sizes: Mapping[str, Any] = field(default_factory=dict)


def time_point(point: Point) -> list[float]:
    """Time a point in rotation over cold operands [s]."""
    with multiply_in(point.dtype):
        return _time_rotating(point)


def _time_rotating(point: Point) -> list[float]:
    """Time a point in the number formats that are set [s]."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    sets = 1 + math.ceil(2 * cache / max(point.nbytes, 1.0))
    sets = max(1, min(sets, _MOST_SETS, int(_MOST_BYTES / max(point.nbytes, 1.0))))
    calls = [point.make() for _ in range(sets)]
    calls[0]()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    calls[0]()
    end.record()
    end.synchronize()
    once = max(start.elapsed_time(end) * 1e-3, 1e-6)
    count = max(_FEWEST, min(_MOST, round(_SAMPLE / once)))
    return time_queued(calls, count)


def _rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).mul_(0.1).to(dtype)


# Gradients of weights.

#: Rows of inputs and outputs of a linear layer in GPTs of 350M, 7B, 175B on eight tensor-parallel
#: ranks, and others.
_LAYERS = (
    (1024, 4096),
    (4096, 1024),
    (4096, 4096),
    (4096, 14336),
    (14336, 4096),
    (8192, 8192),
    (12288, 4608),
    (12288, 6144),
)


def list_accumulation() -> Iterator[Point]:
    """The gradient of a weight of `outputs` by `inputs`, from `tokens` rows."""
    for tokens in (1024, 2048, 8192):
        for inputs, outputs in _LAYERS:
            sizes = {"m": outputs, "n": inputs, "k": tokens}
            read = 2.0 * tokens * (inputs + outputs)
            weight = float(inputs * outputs)
            extra = {
                "product": 2 * weight,
                "product_into_fp32": 4 * weight,
                "added_inside_fp32": 4 * weight,
                "added_inside_bf16": 2 * weight,
                "added_after_fp32": 6 * weight,
                "added_after_bf16": 4 * weight,
            }
            for name, nbytes in extra.items():
                make = functools.partial(_accumulate, name, tokens, inputs, outputs)
                yield Point(name, "bf16", make, read + nbytes, sizes)


def _accumulate(name: str, tokens: int, inputs: int, outputs: int) -> Call:
    x, dy = _rand(tokens, inputs), _rand(tokens, outputs)
    wide = torch.zeros(outputs, inputs, device=DEVICE)
    narrow = torch.zeros(outputs, inputs, device=DEVICE, dtype=torch.bfloat16)
    product = functools.partial(torch.mm, dy.t(), x)

    def add_after(buffer: Tensor) -> None:
        buffer.add_(product())

    if name == "product":
        return product
    if name == "product_into_fp32":
        return functools.partial(torch.mm, dy.t(), x, out_dtype=torch.float32)
    if name == "added_inside_fp32":
        return functools.partial(
            torch.ops.aten.addmm.dtype_out, wide, dy.t(), x, torch.float32, out=wide
        )
    if name == "added_inside_bf16":
        return functools.partial(narrow.addmm_, dy.t(), x)
    return functools.partial(add_after, wide if name == "added_after_fp32" else narrow)


# fp8.


def list_fp8() -> Iterator[Point]:
    """Products of `m` by `k` with `k` by `n`, and what makes their operands from bf16."""
    for m in (1024, 4096, 16384):
        for k, n in _LAYERS:
            sizes = {"m": m, "n": n, "k": k}
            nbytes = float(m * k + n * k + 2 * m * n)
            names = ["bf16", "tensor", "tensor_fast", "row", "row_fast"]
            names += ["block_1x128_by_128x128", "block_1x128_by_1x128"]
            for name in names:
                make = functools.partial(_multiply, name, m, n, k)
                yield Point(name, "bf16" if name == "bf16" else "fp8", make, nbytes, sizes)
    for rows in (1024, 4096, 16384):
        for width in (1024, 4096, 14336):
            for name in ("cast_tensor", "cast_row", "cast_block"):
                for compiled in (False, True):
                    make = functools.partial(_prepare_cast, name, rows, width, compiled)
                    sizes = {"rows": rows, "n": width, "elements": rows * width}
                    kind = name + ("_compiled" if compiled else "")
                    yield Point(kind, "bf16", make, 3.0 * rows * width, sizes)


def _narrow(x: Tensor) -> Tensor:
    return x.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)


def _multiply(name: str, m: int, n: int, k: int) -> Call:
    x, w = _rand(m, k), _rand(n, k)
    if name == "bf16":
        return functools.partial(torch.mm, x, w.t())
    a, b = _narrow(x), _narrow(w)
    multiply = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16)
    if name.startswith("tensor"):
        one = torch.ones((), device=DEVICE)
        return functools.partial(
            multiply, a, b.t(), scale_a=one, scale_b=one, use_fast_accum=name.endswith("fast")
        )
    if name.startswith("row"):
        rows, columns = torch.ones(m, 1, device=DEVICE), torch.ones(1, n, device=DEVICE)
        return functools.partial(
            multiply, a, b.t(), scale_a=rows, scale_b=columns, use_fast_accum=name.endswith("fast")
        )
    return _multiply_blocks(name, a, b)


def _multiply_blocks(name: str, a: Tensor, b: Tensor) -> Call:
    """A product with a scale for 128 numbers of a row, and 128 numbers or a square of the weight.

    How the scales of squares lie in memory differs between versions of PyTorch; the first layout
    that it takes is used.
    """
    kinds = F.ScalingType
    swizzle = F.SwizzleType.NO_SWIZZLE
    (m, k), n = a.shape, b.shape[0]
    rows = torch.ones(k // 128, m, device=DEVICE).t()
    if name.endswith("by_1x128"):
        other, recipe = [torch.ones(k // 128, n, device=DEVICE).t()], kinds.BlockWise1x128
    else:
        squares = torch.ones(n // 128, k // 128, device=DEVICE)
        other = [squares, squares.t(), squares.t().contiguous(), squares.t().contiguous().t()]
        recipe = kinds.BlockWise128x128
    faults = []
    for scales in other:
        call = functools.partial(
            F.scaled_mm,
            a,
            b.t(),
            scale_a=rows,
            scale_recipe_a=kinds.BlockWise1x128,
            scale_b=scales,
            scale_recipe_b=recipe,
            swizzle_a=swizzle,
            swizzle_b=swizzle,
            output_dtype=torch.bfloat16,
        )
        try:
            call()
        except (RuntimeError, ValueError) as error:
            faults.append(str(error).splitlines()[0][:80])
            continue
        return call
    raise RuntimeError("; ".join(faults))


def _cast_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _LARGEST_FP8 / x.abs().amax().float().clamp(min=1e-12)
    return _narrow(x.float() * scale), scale.reciprocal()


def _cast_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _LARGEST_FP8 / x.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12)
    return _narrow(x.float() * scale), scale.reciprocal()


def _cast_block(x: Tensor) -> tuple[Tensor, Tensor]:
    parts = x.view(x.shape[0], -1, 128)
    scale = _LARGEST_FP8 / parts.abs().amax(dim=2, keepdim=True).float().clamp(min=1e-12)
    return _narrow(parts.float() * scale).view(x.shape), scale.reciprocal()


_CASTS = {"cast_tensor": _cast_tensor, "cast_row": _cast_row, "cast_block": _cast_block}
_COMPILED: dict[str, Any] = {}


def _prepare_cast(name: str, rows: int, width: int, compiled: bool) -> Call:
    cast: Any = _CASTS[name]
    if compiled:
        if name not in _COMPILED:
            _COMPILED[name] = torch.compile(cast, dynamic=True)
        cast = _COMPILED[name]
    return functools.partial(cast, _rand(rows, width))


# Attention.


def list_attention() -> Iterator[Point]:
    """Attention over 16,384 tokens in sequences of one length, or one sequence; 16 heads."""
    shapes = [(s, d, c) for s in (512, 1024, 2048, 4096, 8192) for d in (64, 128) for c in (0, 1)]
    shapes += [(s, 128, 1) for s in (16384, 32768)] + [(16384, 64, 1)]
    shapes += [(2048, width, 1) for width in (80, 96, 108, 150, 192, 256)]
    for sequence, width, causal in shapes:
        batch = max(1, 16384 // sequence)
        for backend in ("flash", "cudnn", "efficient", "math"):
            if backend == "math" and (sequence > 2048 or width not in (64, 128)):
                continue
            for phase in ("forward", "backward"):
                sizes = {"batch": batch, "heads": 16, "sequence": sequence, "width": width}
                sizes["causal"] = causal
                make = functools.partial(_attend, backend, phase, sizes)
                tensors = 4 if phase == "forward" else 8
                nbytes = 2.0 * tensors * batch * 16 * sequence * width
                yield Point(f"{backend}_{phase}", "bf16", make, nbytes, sizes)


def _attend(backend: str, phase: str, sizes: Mapping[str, int]) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    shape = (sizes["batch"], sizes["heads"], sizes["sequence"], sizes["width"])
    q, k, v = (_rand(*shape).requires_grad_(phase == "backward") for _ in range(3))

    def attend() -> Tensor:
        with sdpa_kernel(kinds[backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=bool(sizes["causal"]))

    if phase == "forward":
        return attend
    result = attend()
    gradient = _rand(*result.shape)
    return functools.partial(torch.autograd.grad, result, (q, k, v), gradient, retain_graph=True)


# Products of experts.

#: Experts, width of a token and of an expert: Mixtral-8x7B, OLMoE-1B-7B, Qwen3-30B-A3B.
_EXPERTS = ((8, 4096, 14336), (64, 2048, 1024), (128, 2048, 768))


def list_grouped() -> Iterator[Point]:
    """Products of all experts; each has `rows` tokens, or as Zipf's law with exponent 1 says."""
    for experts, width, inner in _EXPERTS:
        weights = 2.0 * experts * width * inner
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            tokens = experts * rows
            sizes = {"batch": experts, "m": rows, "k": width, "n": inner}
            nbytes = weights + 2.0 * tokens * (width + inner)
            names = ["grouped", "grouped_input_gradient", "grouped_weight_gradient", "batched"]
            if rows >= 16:
                names.append("grouped_zipf")
            if experts == 8 or rows in (8, 64, 512):
                names.append("one_by_one")
            for name in names:
                make = functools.partial(_multiply_experts, name, experts, rows, width, inner)
                yield Point(name, "bf16", make, nbytes, sizes)


def _count_rows(experts: int, tokens: int) -> list[int]:
    """Tokens of each expert by Zipf's law with exponent 1, from many to few; at least one each."""
    weights = [1 / (1 + i) for i in range(experts)]
    counts = [max(1, round(tokens * w / sum(weights))) for w in weights]
    counts[0] += tokens - sum(counts)
    return counts


def _multiply_experts(name: str, experts: int, rows: int, width: int, inner: int) -> Call:
    tokens = experts * rows
    x, w = _rand(tokens, width), _rand(experts, width, inner)
    counts = [rows] * experts
    if name == "grouped_zipf":
        counts = _count_rows(experts, tokens)
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)
    if name == "batched":
        return functools.partial(torch.bmm, x.view(experts, rows, width), w)
    if name == "one_by_one":
        parts = [*zip(x.view(experts, rows, width), w, strict=True)]

        def multiply() -> None:
            for part, weight in parts:
                torch.mm(part, weight)

        return multiply
    if name == "grouped_input_gradient":
        dy = _rand(tokens, inner)
        return functools.partial(torch._grouped_mm, dy, w.transpose(1, 2), offs=ends)
    if name == "grouped_weight_gradient":
        dy = _rand(tokens, inner)
        return functools.partial(torch._grouped_mm, x.t(), dy, offs=ends)
    return functools.partial(torch._grouped_mm, x, w, offs=ends)


# Rows.

_WIDTHS = (64, 128, 256, 512, 768, 1024, 1600, 2048, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
_WORDS = (30522, 50257, 50304, 128256)


def list_rowwise() -> Iterator[Point]:
    """Operations on rows of `n` numbers."""
    softmaxes = ["softmax", "log_softmax"]
    for dtype in ("bf16", "fp32"):
        for elements in (2**21, 2**25):
            for width in (*_WIDTHS, *_WORDS):
                rows = max(1, elements // width)
                names = softmaxes + ([] if width in _WORDS else ["layer_norm", "rms_norm"])
                for name in names:
                    for phase in ("forward", "backward"):
                        size = DTYPES[dtype].itemsize * rows * width
                        tensors = 2 if phase == "forward" else 3
                        make = functools.partial(_run_rows, name, phase, DTYPES[dtype], rows, width)
                        sizes = {"rows": rows, "n": width, "elements": rows * width}
                        yield Point(f"{name}_{phase}", dtype, make, tensors * size, sizes)


def _run_rows(name: str, phase: str, dtype: torch.dtype, rows: int, width: int) -> Call:
    aten = torch.ops.aten
    x, dy = _rand(rows, width, dtype=dtype), _rand(rows, width, dtype=dtype)
    if name in ("softmax", "log_softmax"):
        forward = getattr(aten, "_" + name)
        if phase == "forward":
            return functools.partial(forward, x, 1, False)
        backward = getattr(aten, f"_{name}_backward_data")
        return functools.partial(backward, dy, forward(x, 1, False), 1, dtype)
    weight, bias = _rand(width, dtype=dtype), _rand(width, dtype=dtype)
    if name == "layer_norm":
        if phase == "forward":
            return functools.partial(aten.native_layer_norm, x, [width], weight, bias, 1e-5)
        _, mean, inverse = aten.native_layer_norm(x, [width], weight, bias, 1e-5)
        backward = aten.native_layer_norm_backward
        wanted = [True, True, True]
        return functools.partial(backward, dy, x, [width], mean, inverse, weight, bias, wanted)
    if phase == "forward":
        return functools.partial(aten._fused_rms_norm, x, [width], weight, 1e-5)
    _, inverse = aten._fused_rms_norm(x, [width], weight, 1e-5)
    backward = aten._fused_rms_norm_backward
    return functools.partial(backward, dy, x, [width], inverse, weight, [True, True])


# Batched products.


def list_batched() -> Iterator[Point]:
    """Scores (nt), their use (nn) and their gradients (tn) of attention without a fused kernel."""
    for dtype in ("bf16", "tf32", "fp32"):
        for batch in (16, 64, 256, 1024):
            for sequence in (64, 128, 197, 256, 512, 1024, 2048):
                for width in (64, 128):
                    flops = 2.0 * batch * sequence**2 * width
                    if flops > 6e11 or flops < 1e7:
                        continue
                    for layout in ("nt", "nn", "tn"):
                        if layout == "nt":
                            m, n, k = sequence, sequence, width
                        else:
                            m, n, k = sequence, width, sequence
                        sizes = {"batch": batch, "m": m, "n": n, "k": k}
                        nbytes = DTYPES[dtype].itemsize * batch * (m * k + n * k + m * n)
                        make = functools.partial(_multiply_batch, layout, DTYPES[dtype], sizes)
                        yield Point(layout, dtype, make, float(nbytes), sizes)


def _multiply_batch(layout: str, dtype: torch.dtype, sizes: Mapping[str, int]) -> Call:
    batch, m, n, k = (sizes[name] for name in ("batch", "m", "n", "k"))
    a = _rand(batch, k, m, dtype=dtype) if layout == "tn" else _rand(batch, m, k, dtype=dtype)
    b = _rand(batch, n, k, dtype=dtype) if layout == "nt" else _rand(batch, k, n, dtype=dtype)
    if layout == "tn":
        a = a.transpose(1, 2)
    if layout == "nt":
        b = b.transpose(1, 2)
    return functools.partial(torch.bmm, a, b)


# Updates of single rows.


def list_adagrad() -> Iterator[Point]:
    """Updates of the rows that bags of lookups need; ids follow a power law with an exponent."""
    for rows, width in ((100_000, 64), (1_000_000, 64), (1_000_000, 128), (4_000_000, 128)):
        for lookups, pooling in ((2048, 1), (16384, 1), (65536, 1), (65536, 16), (524288, 16)):
            for exponent in (0.0, 1.05):
                sizes = {
                    "table_rows": rows,
                    "dim": width,
                    "lookups": lookups,
                    "bags": lookups // pooling,
                    "exponent": exponent,
                }
                names = ("lookup", "sort", "coalesce", "rowwise_adagrad", "adagrad", "sgd")
                for name in (*names, "rowwise_adagrad_one_kernel"):
                    make = functools.partial(_update_rows, name, sizes)
                    yield Point(name, "fp32", make, 4.0 * lookups * width, sizes)


@functools.lru_cache(maxsize=1)
def _make_table(rows: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, width, device=DEVICE), torch.full((rows, 1), 0.1, device=DEVICE)


def _draw_ids(rows: int, lookups: int, exponent: float) -> Tensor:
    """Ids with a probability like a power of their rank, in random places of the table."""
    if exponent == 0:
        return torch.randint(rows, (lookups,), device=DEVICE)
    weights = torch.arange(1, rows + 1, device=DEVICE, dtype=torch.float64).pow(-exponent)
    levels = weights.cumsum(0)
    drawn = torch.rand(lookups, device=DEVICE, dtype=torch.float64) * levels[-1]
    ranks = torch.searchsorted(levels, drawn).clamp(max=rows - 1)
    return torch.randperm(rows, device=DEVICE)[ranks]


def _update_rows(name: str, sizes: Mapping[str, Any]) -> Call:
    rows, width, lookups = sizes["table_rows"], sizes["dim"], sizes["lookups"]
    table, state = _make_table(rows, width)
    ids = _draw_ids(rows, lookups, sizes["exponent"])
    bags = sizes["bags"]
    pooling = lookups // bags
    if name == "lookup":
        offsets = torch.arange(0, lookups, pooling, device=DEVICE)
        return functools.partial(F.embedding_bag, ids, table, offsets, mode="sum")
    if name == "sort":
        return functools.partial(torch.sort, ids)
    gradients = _rand(bags, width, dtype=torch.float32)
    if name == "rowwise_adagrad_one_kernel":
        return _prepare_one_kernel(table, state, ids, gradients, pooling)
    values = gradients.repeat_interleave(pooling, dim=0)
    if name == "coalesce":

        def coalesce() -> Tensor:
            return torch.sparse_coo_tensor(ids[None], values, (rows, width)).coalesce()

        return coalesce
    found = torch.sparse_coo_tensor(ids[None], values, (rows, width)).coalesce()
    where, sums = found.indices()[0], found.values()

    def update_rowwise() -> None:
        state.index_add_(0, where, sums.pow(2).mean(dim=1, keepdim=True))
        scale = state[where].sqrt_().add_(1e-8)
        table.index_add_(0, where, sums / scale, alpha=-0.01)

    def update_elements() -> None:
        squares = _make_table(rows, width)[0]  # as large as the table; its numbers do not matter
        squares.index_add_(0, where, sums.pow(2))
        scale = squares[where].sqrt_().add_(1e-8)
        table.index_add_(0, where, sums / scale, alpha=-0.01)

    if name == "rowwise_adagrad":
        return update_rowwise
    if name == "adagrad":
        return update_elements
    return functools.partial(table.index_add_, 0, where, sums, alpha=-0.01)


def _prepare_one_kernel(
    table: Tensor, state: Tensor, ids: Tensor, gradients: Tensor, pooling: int
) -> Call:
    """Row-wise Adagrad as fused libraries have it: one program sums the gradients of one row, and
    updates it.

    Ids are sorted beforehand; `sort` is timed apart.
    """
    import triton

    ordered, places = torch.sort(ids)
    where, counts = torch.unique_consecutive(ordered, return_counts=True)
    ends = counts.cumsum(0)
    bags = torch.div(places, pooling, rounding_mode="floor")
    width = table.shape[1]
    kernel = _make_kernel()
    grid = (len(where),)
    return functools.partial(
        kernel[grid],
        table,
        state,
        gradients,
        where,
        ends,
        counts,
        bags,
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )


@functools.lru_cache
def _make_kernel() -> Any:
    from benchmarks.helpers import gpu_survey_kernel

    return gpu_survey_kernel.update_rows


SECTIONS: Mapping[str, Callable[[], Iterator[Point]]] = {
    "accumulation": list_accumulation,
    "fp8": list_fp8,
    "attention": list_attention,
    "grouped": list_grouped,
    "rowwise": list_rowwise,
    "batched": list_batched,
    "adagrad": list_adagrad,
}


def measure(path: Path, sections: Mapping[str, float]) -> None:
    """Time the points of these sections in random order, each section for so many seconds at most.

    Lines are appended to the file, the first of them with the facts of the machine.
    """
    device = torch.cuda.get_device_properties(0)
    with path.open("a") as file:
        facts = {
            "device": device.name,
            "memory": device.total_memory,
            "cache": device.L2_cache_size,
            "machine": describe_machine(),
            "versions": {**list_versions(), "cuda": torch.version.cuda},
            "date": time.strftime("%Y-%m-%d"),
        }
        print(json.dumps(facts), file=file, flush=True)
        for section, seconds in sections.items():
            points = [*SECTIONS[section]()]
            random.Random(0).shuffle(points)
            begin, done, failed = time.perf_counter(), 0, 0
            for point in points:
                if time.perf_counter() - begin > seconds:
                    break
                row: dict[str, Any] = {"section": section, "name": point.name}
                row |= {"dtype": point.dtype, "sizes": dict(point.sizes)}
                try:
                    row["samples"] = [float(f"{t:.4g}") for t in time_point(point)]
                    done += 1
                except Exception as error:  # what a version of PyTorch lacks must not end the rest
                    row["failed"] = f"{type(error).__name__} {error}".splitlines()[0][:200]
                    failed += 1
                    torch.cuda.synchronize()
                print(json.dumps(row), file=file, flush=True)
            spent = time.perf_counter() - begin
            print(
                f"{section:<14} {done:4d} of {len(points)} timed, {failed} failed, {spent:.0f} s",
                flush=True,
            )
            _make_table.cache_clear()
            torch.cuda.empty_cache()
