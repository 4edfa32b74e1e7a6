"""Times of kernels on a device: from the fit of a class, the peak of a format and the level of
memory."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from perfkit.fitting import Additive, KernelModel
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import (
    Array,
    Values,
    check_choice,
    check_positive,
    check_sizes,
    check_type,
    format_rate,
    is_listed,
    show,
)
from perfkit.models import embedding
from perfkit.models.caches import miss_share
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.estimates import (
    Estimate,
    find_extrapolations,
    find_transfers,
    format_equation,
    missing_data_error,
    warn_once,
)
from perfkit.platform.machine import Machine

Models: TypeAlias = Mapping[str, KernelModel]
_PRODUCTS, _HALF = ("gemm", "bmm", "attention"), {"bf16", "fp16"}
#: Formats that run on tensor cores of a GPU that has them.
TENSOR = {"tf32", "fp8", "fp4", "int8", *_HALF}
#: Extra spread of products in a format that was not measured: fp8 or fp4, and others [-];
#: docs/formulas.md, table 2.4.
SIGMA_NARROW_FORMAT, SIGMA_OTHER_FORMAT = 1.0, 0.25
#: Share of its peak that tf32 reaches, over the share that half precision reaches [-];
#: docs/formulas.md, table 2.4.
TF32 = 1 / 1.2
#: Factor on the bytes of operands of a convolution on tensor cores that are not in channels_last
#: [-]; docs/formulas.md, table 2.4.
LAYOUT_CONVERSION_TRAFFIC = 3.0


class UnalignedSlowdown(NamedTuple):
    """How much longer products take whose rows in memory are not aligned, on tensor cores.

    Parameters
    ----------
    of_4_bytes, of_16_bytes : float
        Factor on the time beyond the launch where rows are no multiple of 4 B, and of 16 B [-].
    spread : float
        Extra spread of the logarithm of the time [-].
    """

    of_4_bytes: float
    of_16_bytes: float
    spread: float


#: Slowdowns by generation (0: unknown or older, 10: this and later); docs/formulas.md, table 2.4.
UNALIGNED = {
    0: UnalignedSlowdown(of_4_bytes=1.0, of_16_bytes=1.0, spread=0.7),
    8: UnalignedSlowdown(of_4_bytes=2.9, of_16_bytes=1.7, spread=0.5),
    9: UnalignedSlowdown(of_4_bytes=5.7, of_16_bytes=2.9, spread=0.3),
    10: UnalignedSlowdown(of_4_bytes=5.7, of_16_bytes=2.9, spread=0.7),
}


class Substitute(NamedTuple):
    """What times an operation class that was not measured: another class, slowed down.

    Parameters
    ----------
    measured_class : str
        The other class.
    cpu_share, gpu_share, tensor_core_share : float
        Share of its rate on a CPU core, on a GPU, and on the tensor cores of one [-].
    spread : float
        Extra spread of this guess [-].
    """

    measured_class: str
    cpu_share: float
    gpu_share: float
    tensor_core_share: float
    spread: float

    def find_share(self, fit: KernelModel, dtype: str) -> float:
        """Share of the rate of the class that was measured [-]."""
        if fit.form == "additive":
            return self.cpu_share
        return self.tensor_core_share if dtype in TENSOR else self.gpu_share


#: By the class that was not measured; docs/formulas.md, table 2.4.
SUBSTITUTES = {
    "convolution": Substitute(
        "gemm", cpu_share=0.8, gpu_share=1.0, tensor_core_share=0.7, spread=0.4
    ),
    "pooling": Substitute(
        "elementwise", cpu_share=0.05, gpu_share=0.6, tensor_core_share=0.6, spread=0.8
    ),
}
#: Extra spread of functions that were not measured, such as square roots [-]; docs/formulas.md,
#: table 2.4.
SIGMA_OTHER_FUNCTION = 0.5


def find_kernel(
    kernels: Models, kind: str, *, variant: str = "", dtype: str = "fp32"
) -> tuple[str, KernelModel] | None:
    """Find the fit of a class and its key: that of the variant and format, of the variant, of the
    format, or the class.

    The spread is wider where a fit of products was made in another number format.
    """
    check_type("kind", kind, str)
    check_choice("dtype", dtype, DTYPES)
    head, _, tail = variant.partition(".")  # a compiler replaces an operation by another kernel
    plain = variant.replace("_last", "")  # of a convolution whose layout the fit does not know
    names = dict.fromkeys(filter(None, (variant, plain, head, "" if head == "fused" else tail)))
    finer = [f"{kind}.{name}" for name in names]
    keys = [*(f"{key}.{dtype}" for key in finer), *finer, f"{kind}.{dtype}", kind]
    key = next((key for key in keys if key in kernels), None)
    if key is None:
        return None
    return key, _widen(kernels[key], dtype) if key == kind and kind in _PRODUCTS else kernels[key]


def find_stand_in(
    kernels: Models, kind: str, *, variant: str = "", dtype: str = "fp32"
) -> KernelModel | None:
    """Find the fit of a class; else, with a wide spread, the median of its variants or the fit of
    another class."""
    found = find_kernel(kernels, kind, variant=variant, dtype=dtype)
    if found is not None:
        return found[1]
    others = [
        fit
        for key, fit in kernels.items()
        if Key.parse(key).operation == kind and fit.form == "additive"
    ]
    if others and not kind.startswith(("embedding", "attention")):
        names = dict.fromkeys(name for fit in others for name in fit)
        middle = {name: float(np.median([fit.get(name, 0.0) for fit in others])) for name in names}
        spread = math.hypot(SIGMA_OTHER_FUNCTION, float(np.median([fit.spread for fit in others])))
        note = f"{kind}.{variant} was not measured; its time is the median of {len(others)} measured variants"
        return Additive.build(
            middle,
            spread=spread,
            kind="assumed",
            notes=(note,),
            stands_for=kind,
            source=others[0].source,
            n=others[0].n,
        )
    substitute = SUBSTITUTES.get(kind)
    if substitute is None:
        return None
    other = substitute.measured_class
    fit = find_stand_in(kernels, other, variant="nn", dtype=dtype)
    if fit is None:
        return None
    share = substitute.find_share(fit, dtype)
    if fit.form == "additive":
        changed = {name: time / share for name, time in fit.items()}
    else:
        changed = {name: fit[name] * share for name in ("compute_efficiency", "memory_efficiency")}
    spread = substitute.spread
    if variant.endswith(("_depthwise", "_grouped")):
        spread *= 2.0
    note = f"no {kind} was measured; its time assumes {share:.0%} of the rate of {other}"
    return fit.with_values(
        changed,
        spread=math.hypot(spread, fit.spread),
        spread_time=None,
        kind="assumed",
        stands_for=kind,
        notes=(note, *fit.notes),
    )


def _widen(fit: KernelModel, dtype: str) -> KernelModel:
    """Widen the spread of a fit for a number format that was not measured, if its formats are
    known."""
    # both half formats are equally fast
    formats = set(fit.dtypes) | (_HALF if _HALF & set(fit.dtypes) else set())
    if not formats or dtype in formats:
        return fit
    names, narrow = "/".join(sorted(formats)), DTYPES[dtype] < 2
    fit = replace(
        fit,
        kind="assumed",
        spread=math.hypot(fit.spread, SIGMA_NARROW_FORMAT if narrow else SIGMA_OTHER_FORMAT),
        spread_time=None,
    )
    if dtype == "tf32" and formats & _HALF and "compute_efficiency" in fit:
        note = (
            f"fitted in {names}; tf32 is assumed to reach {TF32:.2f} of that share of its own peak"
        )
        slower = {"compute_efficiency": TF32 * fit["compute_efficiency"]}
        return fit.with_values(slower, notes=(note, *fit.notes))
    if narrow:
        text = f"{names}: no product in {dtype} was measured here; fp8 on other GPUs takes twice as long"
        return replace(fit, transferred=(text, *fit.transferred))
    note = f"fitted in {names}; {dtype} is assumed to reach the same share of its peak"
    return replace(fit, notes=(note, *fit.notes))


def find_layout_passes(machine: Machine, kind: str, variant: str, dtype: str) -> float:
    """How many times a convolution moves its operands into the layout of tensor cores and back
    [-]."""
    cores = machine.device.kind != "cpu" and dtype in TENSOR and not variant.endswith("_depthwise")
    return (
        LAYOUT_CONVERSION_TRAFFIC
        if kind == "convolution" and cores and "_last" not in variant
        else 0.0
    )


class UnalignedRows(NamedTuple):
    """Which products have rows in memory that are no multiple of what a kernel loads at once.

    Parameters
    ----------
    of_4_bytes, of_16_bytes : array of bool
        Whether rows are no multiple of 4 B, and of 16 B.
    """

    of_4_bytes: np.ndarray
    of_16_bytes: np.ndarray


def find_unaligned_rows(
    m: Values, n: Values, k: Values, *, itemsize: Values, is_transposed: Any
) -> UnalignedRows:
    """Find matrix products whose rows in memory are not aligned.

    Parameters
    ----------
    m, n, k : float or array
        Rows, columns and inner size [-].
    itemsize : float or array
        Bytes of a number [B].
    is_transposed : bool or array of bool
        Whether the first operand is stored with rows of ``m`` numbers; else they have ``k``.

    Returns
    -------
    rows : UnalignedRows
        A product of one row or column reads its matrix once, as a vector kernel does: it is never
        among them.
    """
    numbers_of_first = np.where(np.asarray(is_transposed), np.asarray(m), np.asarray(k))
    bytes_of_first: Array = numbers_of_first * np.asarray(itemsize)
    bytes_of_second: Array = np.asarray(n) * np.asarray(itemsize)
    is_vector = (np.asarray(m) == 1) | (np.asarray(n) == 1)
    of_4_bytes = (bytes_of_first % 4 > 0) | (bytes_of_second % 4 > 0)
    of_16_bytes = (bytes_of_first % 16 > 0) | (bytes_of_second % 16 > 0)
    return UnalignedRows(of_4_bytes & ~is_vector, of_16_bytes & ~is_vector)


def find_unaligned(
    machine: Machine, kind: str, variant: str, dtype: str, sizes: Mapping[str, Values]
) -> np.ndarray:
    """Find products in a format of tensor cores whose rows in memory are no multiple of 16 B, as an
    array of bools."""
    if machine.device.kind == "cpu" or kind not in ("gemm", "bmm") or dtype not in TENSOR:
        return np.zeros(np.shape(sizes["n"]), dtype=bool)
    rows = find_unaligned_rows(
        sizes["m"], sizes["n"], sizes["k"], itemsize=DTYPES[dtype], is_transposed=variant == "tn"
    )
    return rows.of_16_bytes


def list_unaligned(machine: Machine) -> UnalignedSlowdown:
    """Slowdown of products whose rows are not aligned, on the generation of this GPU."""
    capability = machine.device.capability
    generation = min(10, int(capability.value)) if capability else 0
    return UNALIGNED.get(generation, UNALIGNED[0])


def slow_unaligned(
    seconds: Values, rows: UnalignedRows, slowdown: UnalignedSlowdown, *, launch: Values
) -> Array:
    """Times of products [s], longer beyond their launch [s] where rows in memory are not aligned."""
    slower = np.where(rows.of_16_bytes, slowdown.of_16_bytes, 1.0)
    slower = np.where(rows.of_4_bytes, slowdown.of_4_bytes, slower)
    return np.asarray(seconds + (slower - 1.0) * np.maximum(np.subtract(seconds, launch), 0.0))


def say_unaligned(machine: Machine, dtype: str, module: str = "") -> str:
    """Say that such products take longer, or, where that was not measured, have a wider
    interval."""
    rows, (odd, even, _) = f"{16 / DTYPES[dtype]:g}", list_unaligned(machine)
    of = f" of module {module!r}" if module else ""
    text = f"products in {dtype}{of} with rows that are no multiple of {rows} numbers"
    if odd > 1:
        most = (
            f" to {odd:g} times as long, odd ones the longest"
            if DTYPES[dtype] <= 2
            else " times as long"
        )
        return f"{text} take {even:g}{most}; pad these sizes"
    return f"{text} may take twice as long: none was measured; pad these sizes"


def time_kernels(
    machine: Machine, kind: str, features: Mapping[str, Values], *, dtype: str = "fp32"
) -> Array:
    """Times of kernels of one class [s], see `Platform.kernel_time`."""
    check_type("features", features, Mapping)
    check_type("kind", kind, str)
    key = ("kernel", kind, check_choice("dtype", dtype, DTYPES))
    if (found := machine.memo.get(key)) is None:
        found = machine.memo[key] = find_kernel(machine.kernels, kind, dtype=dtype)
    if found is None:
        raise missing_data_error(machine.name, f"kernel model for {show(kind)}", machine.kernels)
    check_choice("dtype", dtype, machine.device.peaks)
    sizes = {
        name: check_sizes(f"features[{show(name)}]", values) for name, values in features.items()
    }
    fit = found[1]
    ready = isinstance(fit, Additive) and "beyond_l3" in sizes  # needs nothing of the device
    try:
        return fit.time(sizes if ready else _put_on_device(machine, sizes, dtype))
    except KeyError as error:
        raise ValueError(
            f"features has no {error}; the model of {found[0]} needs it, in base units"
        ) from None


def estimate_gemm(
    machine: Machine, m: int, n: int, k: int, *, dtype: str = "fp32", batch: int = 1
) -> Estimate:
    """Time of a matrix product, see `Platform.gemm`."""
    given = {"m": m, "n": n, "k": k, "batch": batch}
    sizes = {name: float(check_positive(name, size, integer=True)) for name, size in given.items()}
    itemsize = DTYPES[check_choice("dtype", dtype, machine.device.peaks)]
    features = {
        **sizes,
        "flops": gemm_flops(**sizes),
        "nbytes": gemm_bytes(**sizes, itemsize=itemsize),
    }
    title = f"gemm {m} x {n} x {k}" + (f", batch {batch}," if batch > 1 else "") + f" in {dtype}"
    return _estimate(machine, title, "gemm" if batch == 1 else "bmm", features, dtype)


def estimate_lookups(machine: Machine, tables: Sequence[Any], *, batch: int) -> Estimate:
    """Time of the forward lookups of embedding tables, see `Platform.lookup`."""
    batch = check_positive("batch", batch, integer=True)
    tables = getattr(tables, "tables", tables)
    if (
        not isinstance(tables, Collection)
        or not is_listed(tables)
        or not len(tables)
        or not all(hasattr(t, "distribution") for t in tables)
    ):
        raise ValueError(f"tables is {show(tables)}; pass at least one embedding table")
    # sectors, cache lines
    access: dict[str, Any] = {"granularity": 32.0 if machine.device.kind == "cuda" else 64.0}
    columns = [(t.rows, t.dim, batch, batch * t.pooling, t.itemsize) for t in tables]
    rows, dim, bags, lookups, access["itemsize"] = np.array(columns, dtype=float).T
    laws, capacities = (
        [table.distribution for table in tables],
        [max(c, 1.0) for c in machine.cache_capacities],
    )
    found = embedding.size_lookup(
        laws, lookups, dim, capacities=capacities, entries=machine.page_entries, **access
    )
    nbytes = embedding.forward_bytes(bags, lookups, dim, **access)
    features = {
        "rows": rows,
        "dim": dim,
        "bags": bags,
        "lookups": lookups,
        "flops": lookups * dim,
        "nbytes": nbytes,
        "row_bytes": found.row_bytes,
        "unique_bytes": found.unique_bytes,
        "page_walks": found.walks,
        "working_set": nbytes - found.row_bytes + found.unique_bytes,
        **{
            f"beyond_{level}": share * found.row_bytes
            for level, share in zip(("l2", "l3"), found.misses, strict=True)
        },
    }
    return _estimate(
        machine,
        f"lookup in {len(tables)} tables, batch {batch},",
        "embedding_forward",
        features,
        "fp32",
    )


def _estimate(
    machine: Machine, title: str, kind: str, features: Mapping[str, Values], dtype: str
) -> Estimate:
    """Estimate kernels of one class, one after another, with the resource that limits them among
    the parts."""
    variants = (item for item in machine.kernels.items() if Key.parse(item[0]).operation == kind)
    # any variant if there is no class
    found = find_kernel(machine.kernels, kind, dtype=dtype) or next(variants, None)
    if found is None:
        raise missing_data_error(machine.name, f"kernel model for {show(kind)}", machine.kernels)
    fit, sizes = found[1], _put_on_device(machine, features, dtype)
    times = np.atleast_1d(fit.time(sizes))
    has_unaligned = False
    if kind in ("gemm", "bmm") and machine.device.kind != "cpu" and dtype in TENSOR:
        rows = find_unaligned_rows(
            sizes["m"], sizes["n"], sizes["k"], itemsize=DTYPES[dtype], is_transposed=False
        )
        has_unaligned = bool(np.any(rows.of_16_bytes))
        if kind == "gemm":
            slowdown = list_unaligned(machine)
            times = slow_unaligned(times, rows, slowdown, launch=fit.get("launch", 0.0))
    time = float(times.sum())
    compute, memory = sizes["flops"] / sizes["peak"], sizes["nbytes"] / sizes["bandwidth"]
    name = "arithmetic" if np.sum(compute) > np.sum(memory) else "memory traffic"
    launch = min(times.size * fit.get("launch", 0.0), time)
    bound = min(float(np.maximum(compute, memory).sum()), time - launch)
    terms = {
        "launch": launch,
        f"{name} at the full rate": bound,
        "below that rate": time - launch - bound,
    }
    peak, bandwidth = float(np.max(sizes["peak"])), float(np.max(sizes["bandwidth"]))
    rates = f"peak {format_rate(peak, 'FLOP/s')}, memory {format_rate(bandwidth, 'B/s')}"
    formula = f"{title} on {machine.name}: {format_equation(fit)}; {rates}"
    spread = float(fit.spread_at(times) @ times) / time if time else fit.spread
    notes = find_extrapolations(title, fit, features) + find_transfers(title.split()[0], fit)
    if has_unaligned:
        spread = math.hypot(spread, list_unaligned(machine).spread)
        notes = (*notes, say_unaligned(machine, dtype))
    # raises for impossible times, before the warning
    estimate = Estimate(time, spread, terms, formula, notes)
    warn_once(notes, 4)
    return estimate


def _put_on_device(
    machine: Machine, features: Mapping[str, Values], dtype: str
) -> dict[str, Array]:
    """Add the peak, the bandwidth and the cache misses of the device to the sizes."""
    device = machine.device
    sizes: dict[str, Array] = {
        name: np.asarray(value, dtype=float) for name, value in features.items()
    }
    nbytes, held = sizes["nbytes"], sizes.get("working_set", sizes["nbytes"])
    caches = zip(("beyond_l2", "beyond_l3"), machine.cache_capacities, strict=True)
    known = {name: nbytes * miss_share(held, capacity=capacity) for name, capacity in caches}
    known["peak"] = np.asarray(device.peaks[check_choice("dtype", dtype, device.peaks)].value)
    known["bandwidth"] = device.bandwidth(held)
    if "beyond_l3" in sizes:  # a part comes from main memory
        slow, *near = [level.bandwidth.value for level in device.memory[:-3:-1] if level.bandwidth]
        far = np.clip(sizes["beyond_l3"] / np.maximum(nbytes, 1.0), 0.0, 1.0)
        known["bandwidth"] = np.asarray(1.0 / (far / slow + (1.0 - far) / (near or [slow])[0]))
    return known | sizes
