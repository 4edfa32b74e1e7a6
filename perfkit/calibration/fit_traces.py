"""Calibration of GPUs from traces of training steps, where no probes can be run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from perfkit.calibration.collectives import fit_transfers
from perfkit.calibration.traces import Trace, find_unsized, name_devices, read_trace
from perfkit.fitting import Roofline, fit_roofline
from perfkit.fitting.kernels import FEWEST_SIZES
from perfkit.ground.hardware import Quantity
from perfkit.ground.units import Array
from perfkit.platform.gallery import Named, find_similar, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.sources import assemble, compare_devices
from perfkit.prediction.cost import size_rooflines
from perfkit.readers.kineto import TraceFile
from perfkit.workloads.graph import Graph

#: How many times slower the profiler alone makes a host [-]; formulas, table 6.2.
_PROFILED = 1.26
#: From where on something else must have slowed it [-]; formulas, table 6.2.
_SLOWED = 2.0


def _fit_steps(
    recorded: Sequence[tuple[Graph, Array]], platform: Platform, source: str
) -> dict[str, Roofline]:
    """Rooflines of kernels in recorded steps, by class and, where there are enough, by variant.

    If an operation has several kernels, each of them counts with an equal share of the work.
    """
    columns: dict[str, list[Array]] = {}
    for graph, seconds in recorded:
        work, counts = size_rooflines(graph, platform), graph.column("launches")
        shares = np.stack([work.flops, work.nbytes, seconds]) / np.maximum(counts, 1.0)
        table = np.stack([*shares, work.peak, work.bandwidth])
        # work of unknown size teaches nothing
        known = (seconds > 0) & (work.flops + work.nbytes > 0)
        times = np.where(known, counts, 0).astype(int)
        for kernel, places in graph.kernels.items():
            if kernel.kind in ("collective", "transfer"):
                continue
            for key in (kernel.kind, f"{kernel.kind}.{kernel.variant}"):
                columns.setdefault(key, []).append(table[:, np.repeat(places, times[places])])
    joined = {key: np.concatenate(parts, axis=1) for key, parts in columns.items()}
    return {
        key: fit_roofline(flops, nbytes, each, peak=peak, bandwidth=bandwidth, source=source)
        for key, (flops, nbytes, each, peak, bandwidth) in joined.items()
        if len(each) >= FEWEST_SIZES
    }


def calibrate_traces(
    traces: str | Path | Sequence[str | Path], base: Named | None = None, name: str | None = None
) -> Platform:
    """Make a platform from traces of training steps and a platform of the same device.

    Parameters
    ----------
    traces : str, Path or sequence of them
        Kineto traces, one per rank, with sizes of operands; and execution traces of the same ranks.
    base : Platform, str or Path, optional
        Platform of the same device, for all that the traces do not tell; by default the gallery's
        node.
    name : str, optional
        Name of the platform; by default that of the base.

    Returns
    -------
    platform : Platform
        The base with kernels fitted to the steps; with collectives that were read on all ranks of
        their group, see `perfkit.calibration.collectives.fit_transfers`; and with the host of ranks
        on which nothing but the profiler ran. Its provenance names what the traces do not tell.
        Kernels were timed inside iterations, so they take no further scale for that.

    Raises
    ------
    ValueError
        For traces that tell nothing or hold no device, and for a base that is a CPU.

    Warns
    -----
    UserWarning
        If the traces are of another device than the base.
    """
    trace = read_trace(traces)
    names = name_devices(trace.files)
    old = load_platform(base or find_similar(names[0] if names else ""))
    if old.device.kind == "cpu":
        raise ValueError(
            f"base is {old.name!r}, a CPU; traces tell kernels of GPUs; name one such as h100-sxm-8"
        )
    platform = fit_trace(trace, old, name or old.name, record=trace.record)
    compare_devices("traces are", names, old)
    return platform


def fit_trace(
    trace: Trace, old: Platform, name: str, *, record: Callable[[int | None], tuple[Graph, Array]]
) -> Platform:
    """Put what traces tell into a platform, see `calibrate_traces`.

    Parameters
    ----------
    trace : Trace
        Traces of all ranks.
    old : Platform
        Platform of the same device.
    name : str
        Name of the result.
    record : callable
        Graph of the step of a rank, and what its operations took [s], as `Trace.record` gives them;
        who asks several times may keep them.

    Returns
    -------
    platform : Platform
        As `calibrate_traces` returns it.

    Raises
    ------
    ValueError
        For traces that tell nothing.
    """
    sources = [file.source for file in trace.files[:3]]
    if len(trace.files) > 3:
        sources.append("...")
    source = f"traces {', '.join(sources)}"
    nodes = math.ceil((trace.files[0].ranks or 1) / old.network.ranks_per_node)
    where = old.with_nodes(max(old.network.nodes, nodes))
    sized = [file for file in trace.files if _holds_sizes(file)]
    steps = [record(file.rank) for file in sized]
    kernels = _fit_steps(steps, where, source)
    # the others need no scale
    known = {key: fit for key, fit in where.context.kernels.items() if key not in kernels}
    where = replace(where, context=replace(where.context, kernels=known))
    where, lost = fit_transfers(assemble(where, kernels=kernels), trace.collectives(), source)
    where, host = _fit_host(where, trace, source)
    lost += [
        f"kernels of {file.source}: sizes of operands are unknown"
        for file in trace.files
        if file not in sized
    ]
    for graph, _ in steps:
        unsized = len(find_unsized(graph))
        if unsized:
            lost.append(
                f"work of {unsized} of {len(graph.labels)} operations of {graph.name}: their sizes "
                "are unknown"
            )
    lost += trace.doubts
    if not name_devices(trace.files):
        lost.append("the name of the device, which is taken to be that of the base")
    if not kernels and where.collectives == old.collectives and where.host == old.host:
        raise ValueError(
            f"{source}: nothing can be fitted ({'; '.join([*lost, f'host {host}'])}); record_shapes=True"
        )
    story = {"traces": source, "base": old.name, "host": host, "not in the traces": "; ".join(lost)}
    return replace(where, name=name, provenance={**old.provenance, **story})


def _holds_sizes(file: TraceFile) -> bool:
    """Whether a trace states sizes of operands."""
    return bool(file.args.find("Input Dims"))


def _fit_host(platform: Platform, trace: Trace, source: str) -> tuple[Platform, str]:
    """Take the host over from ranks on which nothing but the profiler ran; what is said of it."""
    free = trace.host().filter(
        pl.col("n") > 0, pl.col("overhead").is_in([*platform.host]), observers=""
    )
    if free.is_empty():
        return platform, f"as in the base: {'; '.join(trace.warnings) or 'it made no calls'}"
    means = pl.mean("mean_s") / _PROFILED
    rows = free.group_by("overhead", maintain_order=True).agg(means, pl.sum("n")).rows()
    measured_time = sum(n * mean for _, mean, n in rows)
    time_of_base = sum(n * platform.host[name].value for name, _, n in rows)
    slowness = measured_time / time_of_base
    if slowness > _SLOWED:
        return (
            platform,
            f"as in the base: calls took {slowness:.1f} times as long, slowed by what no trace "
            "names",
        )
    host = {name: quantity for name, quantity in platform.host.items() if "." not in name}
    for name, mean, _ in rows:
        error = (_PROFILED - 1) * mean
        host[name] = Quantity(mean, "s", "measured", source, "", error)
    return replace(platform, host=host), f"measured, {slowness:.2f} times as long as in the base"
