"""The single GPUs of a published study at locked clocks, and its host overheads.

V100, TITAN Xp and P100 of Lin et al. (arXiv 2201.07821 and 2404.12674; BSD-3). Rates of the
hardware are from their parameter file, kernels of the V100 from their kernel trace of DLRM-MLPerf
at batch 2048. The other two GPUs have the shares of peak and bandwidth of the V100. Peaks are those
of the locked clocks (V100: 80 multiprocessors of 64 units, 2 FLOP, 1297 MHz: 13.3 TFLOP/s). The
parameter file lists higher rates for V100 and P100, which need clocks 16 and 10 % above the locked
ones. Nothing here was fitted to iterations.
"""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from benchmarks.helpers.eager import EagerDLRM
from benchmarks.helpers.files import find_shared_data, read_numbers
from benchmarks.helpers.overheads import read_overheads
from perfkit.fitting import Additive, KernelModel, Roofline, TiledRoofline, fit_roofline
from perfkit.ground.hardware import Device, MemoryLevel, Network, Quantity
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import price
from perfkit.workloads.dlrm import DLRM

DATE = "2022-02-01"
#: Platforms: name of the GPU in the study, product, and number of fp32 units.
NAMES: Mapping[str, tuple[str, str, int]] = {
    "v100-locked-1": ("V100", "NVIDIA V100, clocks locked to 877 and 1297 MHz", 80 * 64),
    "titan-xp-1": ("TITAN Xp", "NVIDIA TITAN Xp, clocks locked to 5505 and 1404 MHz", 30 * 128),
    "p100-1": ("P100", "NVIDIA P100, clocks locked to 715 and 1189 MHz", 56 * 64),
}
#: Compute capability of each GPU [-], and the list of NVIDIA that has it.
_CAPABILITIES: Mapping[str, tuple[float, str]] = {
    "v100-locked-1": (7.0, "https://developer.nvidia.com/cuda-gpus"),
    "titan-xp-1": (6.1, "https://developer.nvidia.com/cuda-legacy-gpus"),
    "p100-1": (6.0, "https://developer.nvidia.com/cuda-legacy-gpus"),
}
_STUDY = "arXiv 2404.12674 and 2201.07821, owensgroup/ml_perf_model (BSD-3)"
_TRACE = f"{_STUDY}: kernels of DLRM-MLPerf, batch 2048, fp32, on a V100 at 1297 MHz"
#: Fused lookups of 8 tables of a million rows, 64 columns, 100 lookups, batch 2048, forward and
#: backward [s].
_DEFAULT_LOOKUPS = {"forward": 521.8e-6, "backward": 1276.7e-6}
#: Shape of the tensor that the interaction gathers from.
_GATHERED = (2048, 27, 27)
#: Tile of volta_sgemm_32x128, the kernel of products of 27 x 27 in the trace.
_TILE = {"tile_m": 32.0, "tile_n": 128.0}


def _quantity(
    value: float, unit: str, source: str, kind: str = "measured", basis: str = ""
) -> Quantity:
    return Quantity(float(f"{value:.6g}"), unit, kind, f"{_STUDY}: {source}", DATE, basis=basis)


def _read_hardware(gpu: str) -> dict[str, Any]:
    """Sizes, rates and clocks of a GPU of the study."""
    for row in read_numbers(find_shared_data("kernels_v100", "hw_params.csv")):
        if row["gpu"] == gpu:
            return row
    raise ValueError(f"gpu is {gpu!r}; hw_params.csv has no such row")


def _level(
    name: str, size: str, rate: str, unit: float, hardware: Mapping[str, Any]
) -> MemoryLevel:
    """A memory level from the columns of its size and rate; `unit` is that of the size [B]."""
    word = "MiB" if unit == 2**20 else "GiB"
    nbytes = hardware[size] * unit
    capacity = _quantity(nbytes, "B", f"hw_params, {size}", "datasheet", f"{word} as quoted")
    bandwidth = _quantity(hardware[rate] * 1e9, "B/s", f"hw_params, {rate}")
    return MemoryLevel(name, capacity, bandwidth)


def _device(name: str) -> Device:
    gpu, product, units = NAMES[name]
    hardware = _read_hardware(gpu)
    clock = float(hardware["locked_clock_mem_MHz_sm_MHz"].split(",")[1]) * 1e6
    text = f"{units} fp32 units at {clock / 1e6:.0f} MHz"
    peak = _quantity(2 * units * clock, "FLOP/s", text, "datasheet", "dense")
    levels = (
        _level("L2", "l2_mib", "l2_gbps", 2**20, hardware),
        _level("DRAM", "dram_gib", "dram_gbps", 2**30, hardware),
    )
    number, page = _CAPABILITIES[name]
    capability = Quantity(
        number,
        "-",
        "datasheet",
        f"NVIDIA CUDA GPU Compute Capability, {page}",
        "2026-11-27",
        basis="compute capability",
    )
    return Device(product, "cuda", {"fp32": peak}, levels, capability=capability)


# -- kernels of the trace
# --------------------------------------------------------------------------------------------


def _read_shapes(text: str) -> list[tuple[int, ...]]:
    """Shapes of the tensors of a call, without those of numbers."""
    return [shape for shape in ast.literal_eval(text) if shape]


def read_trace() -> list[dict[str, Any]]:
    """Kernels of the trace by operation and shapes: mean time [s], calls in an iteration,
    shapes."""
    file = "kernel_trace_v100_dlrm_mlperf_bs2048_10iter_shapes.csv"
    frame = pl.read_csv(find_shared_data("kernels_v100", file))
    groups = frame.group_by("module", "op", "kernel", "shapes", maintain_order=True)
    sums = groups.agg(pl.col("count").sum(), pl.col("runtime_us").sum())
    micros = pl.col("runtime_us") / pl.col("count")
    table = sums.with_columns(seconds=micros * 1e-6, each=pl.col("count") / 10)
    rows = []
    for row in table.iter_rows(named=True):
        rows.append({**row, "shapes": _read_shapes(row["shapes"])})
    return rows


#: Bytes of a number that element-wise operations of the trace read and write.
_PASSES = {
    "aten::relu": 8,
    "ReluBackward0": 12,
    "Optimizer.step#SGD.step": 12,
    "Optimizer.zero_grad#SGD.zero_grad": 4,
    "torch::autograd::AccumulateGrad": 12,
}


def _moved(row: Mapping[str, Any]) -> tuple[str, float]:
    """Class and traffic of a kernel that only moves data [B]; an empty class if the trace does not
    give the traffic."""
    operation = row["op"]
    size = max((math.prod(shape) for shape in row["shapes"]), default=1)
    if operation in _PASSES:
        return "elementwise", _PASSES[operation] * size
    if operation == "aten::linear" and row["kernel"].startswith("unrolled"):
        (outputs,), (rows, _) = row["shapes"][:2]
        return "copy", 4 * (rows + 1) * outputs
    if operation == "SliceBackward":
        is_copied = row["kernel"].startswith("Memcpy")
        return "copy", (8 if is_copied else 4) * size
    return "", 0.0


def _rates(device: Device) -> dict[str, Any]:
    return {"peak": device.peaks["fp32"].value, "bandwidth": device.main_bandwidth}


def _fit_moves(rows: Sequence[Mapping[str, Any]], kind: str, device: Device) -> Roofline:
    """Fit of the kernels of the trace that only move data."""
    traffic, seconds = list[float](), list[float]()
    for row in rows:
        name, nbytes = _moved(row)
        if name == kind:
            traffic.append(nbytes)
            seconds.append(row["seconds"])
    return fit_roofline(
        0.0, np.array(traffic), np.array(seconds), **_rates(device), source=_TRACE, date=DATE
    )


def _fit_products(device: Device) -> Roofline:
    """Fit of the unbatched products of the trace."""
    frame = pl.read_csv(find_shared_data("kernels_v100", "gemm_v100_fp32_from_trace.csv"))
    frame = frame.filter(pl.col("B") == 1)
    m = frame["M"].to_numpy().astype(float)
    n = frame["N"].to_numpy().astype(float)
    k = frame["K"].to_numpy().astype(float)
    seconds = frame["mean_us"].to_numpy().astype(float) * 1e-6
    fit = fit_roofline(
        gemm_flops(m, n, k),
        gemm_bytes(m, n, k),
        seconds,
        **_rates(device),
        source=_TRACE,
        date=DATE,
    )
    return replace(fit, dtypes=("fp32",))


def _tile(gemm: Roofline, moves: Roofline) -> TiledRoofline:
    """Small batched products in whole tiles, with the shares of peak and bandwidth of large
    products and copies."""
    parameters = {
        "launch": moves["launch"],
        "compute_efficiency": gemm["compute_efficiency"],
        "memory_efficiency": moves["memory_efficiency"],
        "sharpness": 2.0,
        **_TILE,
    }
    note = "tiles as the kernel volta_sgemm_32x128 of the trace has them; its three batched products are up to 31 % off"
    return TiledRoofline.build(
        parameters,
        spread=0.25,
        notes=(note,),
        kind="assumed",
        source=_TRACE,
        date=DATE,
        dtypes=("fp32",),
    )


def _carry(fit: Roofline, note: str) -> Roofline:
    """An assumed fit for a class that is not in the trace."""
    return fit.with_values(
        {}, stderr={}, kind="assumed", spread=max(fit.spread, 0.3), n=0, notes=(note,)
    )


def _time_at_full_rate(platform: Platform, model: EagerDLRM, name: str, moves: Roofline) -> float:
    """Time of the operations of one name at the full bandwidth, without launches [s]."""
    full = moves.with_values({"memory_efficiency": 1.0, "launch": 1e-12})
    graph = model.graphs()[0]
    is_named = [label.name == name for label in graph.labels]
    classes = {f"{label.kind}.{label.variant}" for label in graph.labels if label.name == name}
    bare = replace(platform, kernels=dict.fromkeys(classes, full))
    (costs,) = price([graph], bare)
    return float(costs.seconds[is_named].sum())


def _describe_shares(count: int, off: float) -> str:
    """How many kernels a share comes from, and how far they are from their mean."""
    words = "1 kernel" if count == 1 else f"{count} kernels"
    return f"{words}, each {off:.0%} from their mean" if off else words


def _fit_share(shares: Sequence[float], moves: Roofline) -> Roofline:
    """Fit of a class that moves data at a share of the bandwidth: the geometric mean of these, at
    most 1."""
    logs = np.log(shares)
    reached = min(float(np.exp(logs.mean())), 1.0)
    off = float(np.abs(np.expm1(logs - logs.mean())).max())
    few = _describe_shares(len(shares), off)
    return Roofline.build(
        {**moves, "memory_efficiency": reached},
        spread=max(off, 0.2),
        n=len(shares),
        kind="measured",
        source=_TRACE,
        date=DATE,
        units=moves.units,
        notes=(f"{few}: too few for a standard error or a range",),
    )


def _sum_operations(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Time of the operations of an iteration by name [s].

    The gradient of the gather starts with zeros, which are a copy of their own and do not count.
    """
    seconds = dict[str, float]()
    for row in rows:
        name = row["op"]
        seconds.setdefault(name, 0.0)
        is_zeros = name == "IndexBackward" and row["shapes"] == [_GATHERED]
        if not is_zeros:
            seconds[name] += row["seconds"] * row["each"]
    return seconds


def _fit_lookups(
    platform: Platform, seconds: Mapping[str, float], moves: Roofline
) -> dict[str, Roofline]:
    """Fits of fused lookups, forward and backward, from those of two DLRMs."""
    traced = EagerDLRM(DLRM("dlrm-mlperf", batch=2048, embedding="fused"))
    default = EagerDLRM(DLRM("dlrm-default", batch=2048, embedding="fused"))
    fits = {}
    for phase, operation, name in (
        ("forward", "LookupFunction", "fused_embeddings"),
        ("backward", "LookupFunctionBackward", "fused_embeddings_backward"),
    ):
        shares = []
        for model, taken in ((traced, seconds[operation]), (default, _DEFAULT_LOOKUPS[phase])):
            full = _time_at_full_rate(platform, model, name, moves)
            shares.append(full / (taken - moves["launch"]))
        fits[phase] = _fit_share(shares, moves)
    return fits


def fit_kernels() -> dict[str, KernelModel]:
    """Kernel models of the V100, fitted to its kernel trace or taken from another class of the
    trace."""
    device = _device("v100-locked-1")
    rows = read_trace()
    elementwise = _fit_moves(rows, "elementwise", device)
    copy = _fit_moves(rows, "copy", device)
    gemm = _fit_products(device)
    kernels: dict[str, KernelModel] = {"gemm": gemm, "elementwise": elementwise, "copy": copy}
    kernels["bmm"] = _tile(gemm, elementwise)
    seconds = _sum_operations(rows)
    platform = Platform("V100", device, Network(1))
    trace = EagerDLRM(DLRM("dlrm-mlperf", batch=2048, embedding="fused"))
    for name, operation, launches in (
        ("index", "aten::index", 1),
        ("index_put", "IndexBackward", 10),
    ):
        full = _time_at_full_rate(platform, trace, name, copy)
        share = full / (seconds[operation] - launches * copy["launch"])
        kernels[f"copy.{name}"] = _fit_share([share], copy)
    for phase, fused in _fit_lookups(platform, seconds, elementwise).items():
        kernels[f"embedding_{phase}.fused"] = fused
        kernels[f"embedding_{phase}"] = _carry(fused, "as fused lookups")
    kernels["embedding_update"] = _carry(fused, "as the backward of fused lookups")
    kernels["rowwise"] = _carry(elementwise, "as element-wise kernels")
    kernels["attention"] = _carry(gemm, "as products")
    return kernels


# -- platforms
# -------------------------------------------------------------------------------------------------------


def _share_rates(fit: KernelModel) -> KernelModel:
    """A fit of the V100 for another GPU."""
    text = "the V100: the same shares of peak and bandwidth"
    spread = max(fit.spread, 0.2)
    return fit.with_values({}, stderr={}, kind="assumed", spread=spread, transferred=(text,))


def build(name: str) -> Platform:
    """One of the three GPUs, with its own rates, the kernels of the V100, and the published host
    overheads."""
    hardware = _read_hardware(NAMES[name][0])
    is_v100 = name == "v100-locked-1"
    kernels = fit_kernels()
    if not is_v100:
        kernels = {key: _share_rates(fit) for key, fit in kernels.items()}
    per_byte = 1e-9 / hardware["pcie_gbps"]
    kernels["transfer"] = Additive.build(
        {"launch": 1e-6, "nbytes": per_byte},
        spread=0.2,
        kind="measured",
        date=DATE,
        source=f"{_STUDY}: hw_params, pcie_gbps (pageable memory); the shortest copies of the trace take 1 µs",
        units={"launch": "s", "nbytes": "s/B"},
    )
    host = read_overheads(kind="measured" if is_v100 else "assumed")
    clocks = hardware["locked_clock_mem_MHz_sm_MHz"]
    provenance = {"study": _STUDY, "clocks": f"{clocks} MHz memory, SM"}
    return Platform(name, _device(name), Network(1), kernels, {}, host, provenance=provenance)


def read_traces() -> pl.DataFrame:
    """Mean overhead by set, term and operation [s], and calls of the operation in an iteration [-].

    Those of training are in reference_data/published/host_overheads.csv, with the class of each
    operation.
    """
    folder, calls = find_shared_data("kernels_v100"), pl.col("count").fill_null(1.0)
    late = pl.read_csv(folder / "overheads_t1_t2_2022.csv").with_columns(set=pl.lit("2022"))
    late = late.filter(
        pl.col("model").str.starts_with("DLRM"), pl.col("batch") >= 512, pl.col("batch") <= 4096
    )
    early = pl.read_csv(folder / "overheads_t1_t5_dlrm_default_2048.csv").with_columns(
        set=pl.lit("2021")
    )
    # else with the wait itself
    early = early.filter((pl.col("op") != "aten::to") | (pl.col("source") == "ad411a68"))
    columns: list[Any] = ["set", "mean_us", pl.col("type").str.to_uppercase().alias("term")]
    columns.append(pl.col("op").fill_null("").str.strip_suffix("0").alias("operation"))
    parts = [early.select(*columns, count=pl.lit(None)), late.select(*columns, "count")]
    table = (
        pl.concat(parts, how="vertical_relaxed")
        .group_by("set", "term", "operation")
        .agg(
            mean=(pl.col("mean_us") * calls).sum() / calls.sum() * 1e-6,
            deviation=pl.col("mean_us").std() * 1e-6,
            calls=pl.col("count").mean() / 100,
        )
    )
    counts = table.filter(pl.col("term") == "T2", pl.col("calls").is_not_null()).select(
        "operation", "calls"
    )
    return (
        table.drop("calls")
        .join(counts, on="operation", how="left")
        .sort("set", "term", "operation")
    )
