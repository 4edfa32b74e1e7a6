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
    return next(
        row
        for row in read_numbers(find_shared_data("kernels_v100", "hw_params.csv"))
        if row["gpu"] == gpu
    )


def _device(name: str) -> Device:
    gpu, product, units = NAMES[name]
    hardware = _read_hardware(gpu)
    clock = float(hardware["locked_clock_mem_MHz_sm_MHz"].split(",")[1]) * 1e6
    peak = _quantity(
        2 * units * clock,
        "FLOP/s",
        f"{units} fp32 units at {clock / 1e6:.0f} MHz",
        "datasheet",
        "dense",
    )
    levels = []
    for level, key, unit, nbytes in (("L2", "l2", "MiB", 2**20), ("DRAM", "dram", "GiB", 2**30)):
        size, rate = f"{key}_{unit.lower()}", f"{key}_gbps"
        capacity = (
            hardware[size] * nbytes,
            "B",
            f"hw_params, {size}",
            "datasheet",
            f"{unit} as quoted",
        )
        levels.append(
            MemoryLevel(
                level,
                _quantity(*capacity),
                _quantity(hardware[rate] * 1e9, "B/s", f"hw_params, {rate}"),
            )
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
    return Device(product, "cuda", {"fp32": peak}, tuple(levels), capability=capability)


# -- kernels of the trace
# --------------------------------------------------------------------------------------------


def read_trace() -> list[dict[str, Any]]:
    """Kernels of the trace by operation and shapes: mean time [s], calls in an iteration,
    shapes."""
    frame = pl.read_csv(
        find_shared_data("kernels_v100", "kernel_trace_v100_dlrm_mlperf_bs2048_10iter_shapes.csv")
    )
    groups = frame.group_by("module", "op", "kernel", "shapes", maintain_order=True)
    sums = groups.agg(pl.col("count").sum(), pl.col("runtime_us").sum())
    rows = sums.with_columns(
        seconds=pl.col("runtime_us") / pl.col("count") * 1e-6, each=pl.col("count") / 10
    )
    return [
        {**row, "shapes": [shape for shape in ast.literal_eval(row["shapes"]) if shape]}
        for row in rows.iter_rows(named=True)
    ]


def _moved(row: Mapping[str, Any]) -> tuple[str, float]:
    """Class and traffic of a kernel that only moves data [B]; an empty class if the trace does not
    give the traffic."""
    passes = {
        "aten::relu": 8,
        "ReluBackward0": 12,
        "Optimizer.step#SGD.step": 12,
        "Optimizer.zero_grad#SGD.zero_grad": 4,
        "torch::autograd::AccumulateGrad": 12,
    }
    size = max((math.prod(shape) for shape in row["shapes"]), default=1)
    if row["op"] in passes:
        return "elementwise", passes[row["op"]] * size
    if row["op"] == "aten::linear" and row["kernel"].startswith("unrolled"):
        (outputs,), (rows, _) = row["shapes"][:2]
        return "copy", 4 * (rows + 1) * outputs
    if row["op"] == "SliceBackward":
        return "copy", (8 if row["kernel"].startswith("Memcpy") else 4) * size
    return "", 0.0


def _rates(device: Device) -> dict[str, Any]:
    return {"peak": device.peaks["fp32"].value, "bandwidth": device.main_bandwidth}


def _fit_moves(rows: Sequence[Mapping[str, Any]], kind: str, device: Device) -> Roofline:
    """Fit of the kernels of the trace that only move data."""
    found = [
        (nbytes, row["seconds"]) for row in rows for name, nbytes in [_moved(row)] if name == kind
    ]
    nbytes, seconds = np.array(found).T
    return fit_roofline(0.0, nbytes, seconds, **_rates(device), source=_TRACE, date=DATE)


def _fit_products(device: Device) -> Roofline:
    """Fit of the unbatched products of the trace."""
    frame = pl.read_csv(find_shared_data("kernels_v100", "gemm_v100_fp32_from_trace.csv")).filter(
        pl.col("B") == 1
    )
    m, n, k, micros = (frame[name].to_numpy().astype(float) for name in ("M", "N", "K", "mean_us"))
    work = {"flops": gemm_flops(m, n, k), "nbytes": gemm_bytes(m, n, k)}
    fit = fit_roofline(**work, seconds=micros * 1e-6, **_rates(device), source=_TRACE, date=DATE)
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
    own = [label.name == name for label in graph.labels]
    keys = {
        f"{label.kind}.{label.variant}"
        for label, mine in zip(graph.labels, own, strict=True)
        if mine
    }
    return float(
        price([graph], replace(platform, kernels=dict.fromkeys(keys, full)))[0].seconds[own].sum()
    )


def _fit_share(shares: Sequence[float], moves: Roofline) -> Roofline:
    """Fit of a class that moves data at a share of the bandwidth: the geometric mean of these, at
    most 1."""
    logs = np.log(shares)
    reached, off = (
        min(float(np.exp(logs.mean())), 1.0),
        float(np.abs(np.expm1(logs - logs.mean())).max()),
    )
    few = f"{len(shares)} kernel{'s' * (len(shares) > 1)}" + (
        f", each {off:.0%} from their mean" if off else ""
    )
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


def fit_kernels() -> dict[str, KernelModel]:
    """Kernel models of the V100, fitted to its kernel trace or taken from another class of the
    trace."""
    device, rows = _device("v100-locked-1"), read_trace()
    moves = {kind: _fit_moves(rows, kind, device) for kind in ("elementwise", "copy")}
    gemm = _fit_products(device)
    kernels: dict[str, KernelModel] = {"gemm": gemm, **moves}
    kernels["bmm"] = _tile(gemm, moves["elementwise"])
    taken: dict[str, float] = {}
    # of an iteration; the gradient of the gather starts with zeros, which are a copy of their own
    for row in rows:
        zeros = row["op"] == "IndexBackward" and row["shapes"] == [_GATHERED]
        taken[row["op"]] = taken.get(row["op"], 0.0) + (
            0.0 if zeros else row["seconds"] * row["each"]
        )
    platform = Platform("V100", device, Network(1))
    trace = EagerDLRM(DLRM("dlrm-mlperf", batch=2048, embedding="fused"))
    for name, operation, launches in (
        ("index", "aten::index", 1),
        ("index_put", "IndexBackward", 10),
    ):
        full = _time_at_full_rate(platform, trace, name, moves["copy"])
        share = full / (taken[operation] - launches * moves["copy"]["launch"])
        kernels[f"copy.{name}"] = _fit_share([share], moves["copy"])
    default, launch = (
        EagerDLRM(DLRM("dlrm-default", batch=2048, embedding="fused")),
        moves["elementwise"]["launch"],
    )
    for phase, way in (("forward", ""), ("backward", "Backward")):
        pairs = ((trace, taken[f"LookupFunction{way}"]), (default, _DEFAULT_LOOKUPS[phase]))
        name, shares = f"fused_embeddings{'_backward' if way else ''}", []
        for model, seconds in pairs:
            full = _time_at_full_rate(platform, model, name, moves["elementwise"])
            shares.append(full / (seconds - launch))
        fused = _fit_share(shares, moves["elementwise"])
        kernels[f"embedding_{phase}.fused"] = fused
        kernels[f"embedding_{phase}"] = _carry(fused, "as fused lookups")
    kernels["embedding_update"] = _carry(fused, "as the backward of fused lookups")
    return kernels | {
        "rowwise": _carry(moves["elementwise"], "as element-wise kernels"),
        "attention": _carry(gemm, "as products"),
    }


# -- platforms
# -------------------------------------------------------------------------------------------------------


def build(name: str) -> Platform:
    """One of the three GPUs, with its own rates, the kernels of the V100, and the published host
    overheads."""
    hardware, own = _read_hardware(NAMES[name][0]), name == "v100-locked-1"
    shared_rates = "the V100: the same shares of peak and bandwidth"
    kernels = {
        key: fit
        if own
        else fit.with_values(
            {},
            stderr={},
            kind="assumed",
            spread=max(fit.spread, 0.2),
            transferred=(shared_rates,),
        )
        for key, fit in fit_kernels().items()
    }
    per_byte = 1e-9 / hardware["pcie_gbps"]
    kernels["transfer"] = Additive.build(
        {"launch": 1e-6, "nbytes": per_byte},
        spread=0.2,
        kind="measured",
        date=DATE,
        source=f"{_STUDY}: hw_params, pcie_gbps (pageable memory); the shortest copies of the trace take 1 µs",
        units={"launch": "s", "nbytes": "s/B"},
    )
    host = read_overheads(kind="measured" if own else "assumed")
    provenance = {
        "study": _STUDY,
        "clocks": hardware["locked_clock_mem_MHz_sm_MHz"] + " MHz memory, SM",
    }
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
