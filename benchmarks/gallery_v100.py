"""The single GPUs of a published study, at the clocks it locked them to, and the table of its host overheads.

V100, TITAN Xp and P100 of Lin et al. (arXiv 2201.07821 and 2404.12674; BSD-3): rates of the hardware from their
parameter file, kernels of the V100 from their kernel trace of DLRM-MLPerf at batch 2048. The other two GPUs are priced
with the shares of peak and bandwidth that the V100 reaches. Peaks are those of the locked clocks (V100: 80
multiprocessors of 64 units, 2 FLOP, 1297 MHz: 13.3 TFLOP/s), not the rates that the parameter file lists for V100 and
P100, which need 16 and 10 % more than the locked clock. Nothing here was fitted to iterations.
"""

import ast
import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.fitting import Fit, fit_roofline
from perfkit.hardware import Device, MemoryLevel, Network, Quantity
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.overheads import read_overheads
from perfkit.platform import Platform
from perfkit.prediction.cost import price
from perfkit.workloads.dlrm import DLRM

__all__ = ["DATE", "NAMES", "REFERENCE", "build", "fit_kernels", "read_trace", "tabulate_overheads"]

DATE = "2022-02-01"
#: Platforms by the name that the study gives the GPU: product, multiprocessors and fp32 units of each.
NAMES: Mapping[str, tuple[str, str, int]] = {
    "v100-locked-1": ("V100", "NVIDIA V100, clocks locked to 877 and 1297 MHz", 80 * 64),
    "titan-xp-1": ("TITAN Xp", "NVIDIA TITAN Xp, clocks locked to 5505 and 1404 MHz", 30 * 128),
    "p100-1": ("P100", "NVIDIA P100, clocks locked to 715 and 1189 MHz", 56 * 64),
}
#: How the study's DLRMs run, as its kernel trace shows: one kernel looks up all tables; copies that the host waits for.
REFERENCE: Mapping[str, Any] = {"embedding": "fused", "loop": "reference"}
_STUDY = "arXiv 2404.12674 and 2201.07821, owensgroup/ml_perf_model (BSD-3)"
_SETS = {
    "2021": f"{_STUDY}: DLRM_default at batch 2048 on a V100, two traces of 2021, profiler included",
    "2022": f"{_STUDY}: three DLRMs at batch 512 to 4096 on V100s, traces of 2022, less 2 us for every nested event",
}
_TRACE = f"{_STUDY}: kernels of DLRM-MLPerf, batch 2048, fp32, on a V100 at 1297 MHz"
#: Fused lookups of 8 tables of a million rows, 64 columns, 100 lookups, batch 2048, forward and backward [s].
_DEFAULT_LOOKUPS = {"forward": 521.8e-6, "backward": 1276.7e-6}
#: Shape of what the interaction gathers from.
_GATHERED = (2048, 27, 27)
#: The tile of volta_sgemm_32x128, which the trace shows for products of 27 x 27.
_TILE = {"tile_m": 32.0, "tile_n": 128.0}


def _quantity(value: float, unit: str, source: str, kind: str = "measured") -> Quantity:
    return Quantity(float(f"{value:.6g}"), unit, kind, f"{_STUDY}: {source}", DATE)


def _read_hardware(shared: Path, gpu: str) -> dict[str, float | str]:
    with open(shared / "kernels_v100" / "hw_params.csv", newline="", encoding="utf-8") as file:
        row = next(row for row in csv.DictReader(file) if row["gpu"] == gpu)
    return {key: float(value) if value.replace(".", "", 1).isdigit() else value for key, value in row.items()}


def _device(name: str, shared: Path) -> Device:
    gpu, product, units = NAMES[name]
    hardware = _read_hardware(shared, gpu)
    clock = float(str(hardware["locked_clock_mem_MHz_sm_MHz"]).split(",")[1]) * 1e6
    peak = _quantity(2 * units * clock, "FLOP/s", f"{units} fp32 units at {clock / 1e6:.0f} MHz", "datasheet")
    cache = MemoryLevel(
        "L2",
        _quantity(float(hardware["l2_mib"]) * 2**20, "B", "hw_params, l2_mib", "datasheet"),
        _quantity(float(hardware["l2_gbps"]) * 1e9, "B/s", "hw_params, l2_gbps"),
    )
    memory = MemoryLevel(
        "DRAM",
        _quantity(float(hardware["dram_gib"]) * 2**30, "B", "hw_params, dram_gib", "datasheet"),
        _quantity(float(hardware["dram_gbps"]) * 1e9, "B/s", "hw_params, dram_gbps"),
    )
    return Device(product, "cuda", {"fp32": peak}, (cache, memory))


# -- kernels of the trace --------------------------------------------------------------------------------------------


def read_trace(shared: Path) -> list[dict[str, Any]]:
    """Kernels of the trace by operation and shapes: mean time [s], times it runs in an iteration, shapes."""
    import polars as pl

    frame = pl.read_csv(shared / "kernels_v100" / "kernel_trace_v100_dlrm_mlperf_bs2048_10iter_shapes.csv")
    groups = frame.group_by("module", "op", "kernel", "shapes", maintain_order=True)
    sums = groups.agg(pl.col("count").sum(), pl.col("runtime_us").sum())
    rows = sums.with_columns(seconds=pl.col("runtime_us") / pl.col("count") * 1e-6, each=pl.col("count") / 10)
    return [
        {**row, "shapes": [shape for shape in ast.literal_eval(row["shapes"]) if shape]}
        for row in rows.iter_rows(named=True)
    ]


def _moved(row: Mapping[str, Any]) -> tuple[str, float]:
    """Class and traffic of a kernel that only moves data [B]; of no class where the trace does not say what it moves."""
    passes = {
        "aten::relu": 8, "ReluBackward0": 12, "Optimizer.step#SGD.step": 12, "Optimizer.zero_grad#SGD.zero_grad": 4,
        "torch::autograd::AccumulateGrad": 12,
    }  # fmt: skip
    size = max((math.prod(shape) for shape in row["shapes"]), default=1)
    if row["op"] in passes:
        return "elementwise", passes[row["op"]] * size
    if row["op"] == "aten::linear" and row["kernel"].startswith("unrolled"):
        (outputs,), (rows, _) = row["shapes"][:2]
        return "copy", 4 * (rows + 1) * outputs
    if row["op"] == "SliceBackward":
        return "copy", (8 if row["kernel"].startswith("Memcpy") else 4) * size
    return "", 0.0


def _fit_moves(rows: Sequence[Mapping[str, Any]], kind: str, device: Device) -> Fit:
    found = [(nbytes, row["seconds"]) for row in rows for name, nbytes in [_moved(row)] if name == kind]
    nbytes, seconds = np.array(found).T
    rates = {"peak": device.peaks["fp32"].value, "bandwidth": device.memory[-1].bandwidth.value}  # type: ignore[union-attr]
    return fit_roofline(0.0, nbytes, seconds, **rates, source=_TRACE, date=DATE)


def _fit_products(shared: Path, device: Device) -> Fit:
    """Unbatched products of the trace."""
    import polars as pl

    frame = pl.read_csv(shared / "kernels_v100" / "gemm_v100_fp32_from_trace.csv").filter(pl.col("B") == 1)
    m, n, k, seconds = (frame[name].to_numpy().astype(float) for name in ("M", "N", "K", "mean_us"))
    rates = {"peak": device.peaks["fp32"].value, "bandwidth": device.memory[-1].bandwidth.value}  # type: ignore[union-attr]
    work = {"flops": gemm_flops(m, n, k), "nbytes": gemm_bytes(m, n, k)}
    return fit_roofline(**work, seconds=seconds * 1e-6, **rates, source=_TRACE, date=DATE)


def _share(reached: float, moves: Fit, *, n: int, spread: float, source: str, notes: Sequence[str] = ()) -> Fit:
    """A class that moves data at a share of the bandwidth, with the launch of `moves`."""
    parameters = {**moves, "memory_efficiency": min(reached, 1.0)}
    return Fit("roofline", parameters, spread=spread, n=n, source=source, date=DATE, units=moves.units, notes=tuple(notes))


def _measure_class(platform: Platform, model: DLRM, name: str, moves: Fit) -> float:
    """Seconds that the operations of a name would take at the full bandwidth, launches aside."""
    full = replace(moves, parameters={**moves, "memory_efficiency": 1.0, "launch": 1e-12})
    graph = model.graphs(accelerator=True)[0]
    keys = {f"{kind}.{variant}" for label, kind, variant, _, _ in graph.labels if label == name}
    costs = price(graph, replace(platform, kernels={key: full for key in keys}))
    return float(sum(t for t, label in zip(costs.seconds, graph.labels, strict=True) if label[0] == name))


def fit_kernels(shared: Path) -> dict[str, Fit]:
    """Kernel models of the V100: fitted to its kernel trace, or carried over from a class of the trace."""
    device = _device("v100-locked-1", shared)
    bare = Platform("v100", device, Network(1))
    rows = read_trace(shared)
    moves = {kind: _fit_moves(rows, kind, device) for kind in ("elementwise", "copy")}
    kernels = {"gemm": _fit_products(shared, device), **moves}
    kernels["bmm"] = _tile(kernels["gemm"], moves["elementwise"])
    trace = DLRM("dlrm-mlperf", batch=2048, **REFERENCE)
    launch = moves["copy"]["launch"]
    for name, variant, launches in (("index", "index", 1), ("index_put", "index_put", 10)):
        operation = {"index": "aten::index", "index_put": "IndexBackward"}[name]
        taken = sum(row["seconds"] * row["each"] for row in rows if row["op"] == operation)
        taken -= sum(r["seconds"] for r in rows if r["op"] == operation == "IndexBackward" and r["shapes"] == [_GATHERED])
        reached = _measure_class(bare, trace, name, moves["copy"]) / (taken - launches * launch)
        kernels[f"copy.{variant}"] = _share(reached, moves["copy"], n=1, spread=0.2, source=_TRACE)
    kernels |= _fit_lookups(bare, rows, trace, moves["elementwise"])
    kernels["rowwise"] = _carry(moves["elementwise"], "as element-wise kernels")
    kernels["attention"] = _carry(kernels["gemm"], "as products")
    for name in ("embedding_forward", "embedding_backward", "embedding_update"):
        like = "embedding_forward.fused" if name == "embedding_forward" else "embedding_backward.fused"
        kernels[name] = _carry(kernels[like], "as fused lookups")
    return kernels


def _fit_lookups(bare: Platform, rows: Sequence[Mapping[str, Any]], trace: DLRM, moves: Fit) -> dict[str, Fit]:
    """Share of the bandwidth that fused lookups reach: the mean of the two kernels that were published."""
    default = DLRM("dlrm-default", batch=2048, **REFERENCE)
    found = {}
    names = {"forward": ("LookupFunction", "fused_embeddings"), "backward": ("LookupFunctionBackward",) * 2}
    for phase, (operation, name) in names.items():
        name = name if phase == "forward" else "fused_embeddings_backward"
        taken = next(row["seconds"] for row in rows if row["op"] == operation)
        pairs = ((trace, taken), (default, _DEFAULT_LOOKUPS[phase]))
        shares = np.log([_measure_class(bare, model, name, moves) / (t - moves["launch"]) for model, t in pairs])
        notes = (f"two kernels, each {np.abs(shares - shares.mean()).max():.0%} from the mean of both",)
        found[f"embedding_{phase}.fused"] = _share(
            float(np.exp(shares.mean())), moves, n=2, spread=max(float(shares.std(ddof=1)), 0.1), source=_TRACE, notes=notes
        )
    return found


def _tile(gemm: Fit, moves: Fit) -> Fit:
    """Small batched products: the shares of peak and bandwidth that large products and copies reach, in whole tiles."""
    parameters = {
        "launch": moves["launch"], "compute_efficiency": gemm["compute_efficiency"],
        "memory_efficiency": moves["memory_efficiency"], "sharpness": 2.0, **_TILE,
    }  # fmt: skip
    note = "tiles as the kernel volta_sgemm_32x128 of the trace has them; its three batched products are up to 31 % off"
    units = {**gemm.units, "tile_m": "-", "tile_n": "-"}
    return Fit("tiled", parameters, spread=0.25, kind="assumed", source=_TRACE, date=DATE, notes=(note,), units=units)


def _carry(fit: Fit, note: str) -> Fit:
    """A class that the trace does not show."""
    return replace(fit, kind="assumed", stderr={}, spread=max(fit.spread, 0.3), n=0, notes=(note,))


#: Class of operations, see `perfkit.prediction.host`, by what the study calls the operation: for T2 and T3, ...
_CALLS = {
    "aten::linear": "gemm.forward", "AddmmBackward": "gemm.backward", "aten::bmm": "bmm.forward",
    "BmmBackward": "bmm.backward", "aten::relu": "elementwise.forward", "aten::sigmoid": "elementwise.forward",
    "aten::mse_loss": "elementwise.forward", "aten::binary_cross_entropy": "elementwise.forward",
    "ReluBackward": "elementwise.backward", "SigmoidBackward": "elementwise.backward",
    "MseLossBackward": "elementwise.backward", "BinaryCrossEntropyBackward": "elementwise.backward",
    "torch::autograd::AccumulateGrad": "elementwise.accumulate", "aten::cat": "copy.forward",
    "aten::index": "copy.forward", "IndexBackward": "copy.backward", "SliceBackward": "copy.backward",
    "aten::ones_like": "copy.backward", "LookupFunction": "embedding_forward.fused",
    "LookupFunctionBackward": "embedding_backward.fused", "aten::to": "transfer",
    "Optimizer.step#SGD.step": "elementwise.update", "Optimizer.zero_grad#SGD.zero_grad": "elementwise.zero_",
}  # fmt: skip
#: ... for T5, the gaps inside a call, and for T5 as the whole time of a call without a kernel.
_GAPS = {
    "aten::linear": "copy.expand", "AddmmBackward": "gemm.backward rowwise.sum", "BmmBackward": "bmm.backward",
    "IndexBackward": "copy.index_put", "SliceBackward": "copy.copy_", "aten::mse_loss": "rowwise.mean",
    "MseLossBackward": "elementwise.div_", "Optimizer.step#SGD.step": "elementwise.update",
    "Optimizer.zero_grad#SGD.zero_grad": "elementwise.zero_",
    **dict.fromkeys(("CatBackward", "TBackward", "TransposeBackward", "ViewBackward", "aten::detach", "aten::slice",
                     "aten::transpose", "aten::view"), "bare"),
}  # fmt: skip


def _classify(term: str, name: str) -> str:
    if term in ("t1", "t4"):
        return "all" if name in ("", "cudaLaunchKernel") else ""
    return (_GAPS if term == "t5" else _CALLS).get(name, "")


# -- platforms -------------------------------------------------------------------------------------------------------


def build(name: str, shared: Path) -> Platform:
    """One of the three GPUs: its own rates, the kernels of the V100, the published host overheads."""
    hardware, own = _read_hardware(shared, NAMES[name][0]), name == "v100-locked-1"
    note = "transferred from the V100: the same shares of peak and bandwidth"
    kernels = {
        key: fit if own else replace(fit, kind="assumed", stderr={}, spread=max(fit.spread, 0.2), notes=(*fit.notes, note))
        for key, fit in fit_kernels(shared).items()
    }
    per_byte = 1e-9 / float(hardware["pcie_gbps"])
    kernels["transfer"] = Fit(
        "additive", {"launch": 1e-6, "nbytes": per_byte}, spread=0.2, kind="measured", date=DATE,
        source=f"{_STUDY}: hw_params, pcie_gbps (pageable memory); the shortest copies of the trace take 1 µs",
        units={"launch": "s", "nbytes": "s/B"},
    )  # fmt: skip
    host = read_overheads(kind="measured" if own else "assumed")
    provenance = {"study": _STUDY, "clocks": str(hardware["locked_clock_mem_MHz_sm_MHz"]) + " MHz memory, SM"}
    return Platform(name, _device(name, shared), Network(1), kernels, {}, host, {}, provenance)


def tabulate_overheads(shared: Path) -> str:
    """The table of host overheads that perfkit ships, as CSV: means over the published traces of DLRM training."""
    import polars as pl

    folder = shared / "kernels_v100"
    late = pl.read_csv(folder / "overheads_t1_t2_2022.csv").with_columns(set=pl.lit("2022"))
    late = late.filter(pl.col("model").str.starts_with("DLRM"), pl.col("batch") >= 512, pl.col("batch") <= 4096)
    early = pl.read_csv(folder / "overheads_t1_t5_dlrm_default_2048.csv").with_columns(set=pl.lit("2021"))
    early = early.filter((pl.col("op") != "aten::to") | (pl.col("source") == "ad411a68"))  # in the other it waits as well
    name = pl.col("op").fill_null("").str.strip_suffix("0")
    columns = ["set", pl.col("type").alias("term"), name.alias("operation"), "mean_us"]
    rows = pl.concat([early.select(*columns, count=pl.lit(None)), late.select(*columns, "count")], how="vertical_relaxed")
    counts = pl.col("count").fill_null(1.0)
    table = rows.group_by("set", "term", "operation").agg(
        mean=(pl.col("mean_us") * counts).sum() / counts.sum() * 1e-6, deviation=pl.col("mean_us").std() * 1e-6,
        calls=pl.col("count").mean() / 100,
    ).sort("set", "term", "operation")  # fmt: skip
    calls = {row["operation"]: row["calls"] for row in table.iter_rows(named=True) if row["term"] == "t2" and row["calls"]}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["term", "operation", "set", "mean", "deviation", "unit", "calls", "class", "source"])
    for row in table.iter_rows(named=True):
        group = _classify(row["term"], row["operation"])
        if group or (row["term"] == "t2" and row["operation"] in calls):
            figures = (f"{row['mean']:.3g}", f"{row['deviation'] or 0:.2g}", "s", f"{calls.get(row['operation'], 1):.1f}")
            writer.writerow([row["term"].upper(), row["operation"], row["set"], *figures, group, _SETS[row["set"]]])
    return out.getvalue()
