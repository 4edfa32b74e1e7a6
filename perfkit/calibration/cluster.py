"""Calibration of GPUs: with a plan of probes that a device times, or with traces of training
steps."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from perfkit.calibration.activity import time_host
from perfkit.calibration.collectives import fit_transfers
from perfkit.calibration.context import expect_spread
from perfkit.calibration.traces import Trace, find_unsized, name_devices, read_trace
from perfkit.fitting import InContext, Iteration, KernelModel, Roofline, fit_roofline
from perfkit.ground.files import reading
from perfkit.ground.forks import check_threads
from perfkit.ground.hardware import Device, Quantity
from perfkit.ground.units import Array
from perfkit.measure.folders import Campaign
from perfkit.measure.probes import LARGE, Probe, list_probes
from perfkit.measure.processes import join_ranks, launched_ranks, run_processes
from perfkit.measure.samples import load
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import Named, find_similar, load_platform
from perfkit.platform.machine import ANY
from perfkit.platform.platform import Platform
from perfkit.platform.sources import add_curves, assemble, compare_devices, fit_gemms, fit_kernel
from perfkit.prediction.classes import classify
from perfkit.prediction.cost import price, size_rooflines
from perfkit.prediction.predictor import predict
from perfkit.readers.trace import find_iterations, read_kineto
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph

#: Time of the calls of one sample [s]; most calls of one sample, and fewest sizes of a fit [-];
#: formulas, table 6.2.
_SAMPLE, _MOST, _LEAST = 2e-3, 50, 4
#: How many times slower the profiler alone makes a host, and from where on something else must have
#: slowed it [-]; formulas, table 6.2.
_PROFILED, _SLOWED = 1.26, 2.0
_COLUMNS = [
    "stage",
    "kind",
    "variant",
    "dtype",
    "ranks",
    "nodes",
    "cold",
    "m",
    "n",
    "k",
    "flops",
    "nbytes",
    "seconds",
]


def plan_probes(base: Platform) -> list[Probe]:
    """Plan the probes of a cluster that is similar to a platform.

    Parameters
    ----------
    base : Platform
        Its device and network determine the probes, its predictions how often each is called.

    Returns
    -------
    plan : list of Probe
        Probes, with the calls of one sample [-].
    """
    plan, network = [], base.network
    cache, memory = (
        level.capacity.value if level.capacity else 1e9 for level in base.device.memory[-2:]
    )
    size: dict[str, Any] = {
        "memory": memory,
        "cache": cache,
        "local": network.ranks_per_node,
        "nodes": network.nodes,
    }
    with keep_quiet():
        for probe in list_probes([*base.device.peaks], **size):
            seconds = _SAMPLE  # iterations run one by one
            if probe.stage == "kernels":  # estimated as a product with the same FLOP and bytes
                work = {
                    "flops": probe.sizes["flops"],
                    "nbytes": 12.0 * probe.sizes.get("elements", 0.0),
                }
                seconds = float(base.kernel_time("gemm", work, dtype=probe.dtype))
            elif probe.stage == "collectives":  # an all_reduce takes longest
                seconds = float(
                    base.collective_time("all_reduce", probe.sizes["nbytes"], ranks=probe.ranks)
                )
            plan.append(probe._replace(calls=int(np.clip(_SAMPLE / seconds, 1, _MOST))))
    return plan


def resize_base(base: Named, ranks_per_node: int, nodes: int) -> Platform:
    """A platform with the ranks and nodes of a cluster."""
    platform = load_platform(base)
    return replace(
        platform, network=replace(platform.network, ranks_per_node=ranks_per_node, nodes=nodes)
    )


def measure_cluster(
    device: str | Callable[[Sequence[Probe]], dict[str, Any]],
    base: Platform,
    campaign: Campaign | None = None,
    folder: Path = Path(),
) -> dict[str, Any]:
    """Time the plan for a similar platform on a device.

    Parameters
    ----------
    device : str or callable
        ``cuda``: the GPUs of this machine, or those of all ranks that a launcher has started; each
        of these ranks calls this function. Or a function that times a list of probes, as
        `perfkit.measure.cuda.time_probes` does.
    base : Platform
        A similar platform, with the nodes and ranks that take part.
    campaign : Campaign, optional
        Stores finished probes.
    folder : Path, optional
        Folder for traces of iterations; made if missing.

    Returns
    -------
    measurements : dict
        Plain JSON for `fit_cluster`.
    """
    plan = plan_probes(base)
    if callable(device):
        found = device(plan)
    else:
        kept, task = str((campaign and campaign.file) or ""), "perfkit.measure.cuda:time_probes"
        job = {
            "task": task,
            "device": device,
            "probes": plan,
            "folder": str(folder.resolve()),
            "kept": kept,
        }
        found, *_ = (
            join_ranks(job)
            if launched_ranks()
            else run_processes(job, ranks=base.network.ranks, timeout=7200)
        )
    rows = [
        {**probe._asdict(), **(answer or {"failed": "not recorded"})}
        for probe, answer in zip(plan, found.pop("answers"), strict=True)
    ]
    size = {"ranks_per_node": base.network.ranks_per_node, "nodes": base.network.nodes}
    about = {
        "id": "perfkit calibrate",
        "date": (campaign or Campaign(None)).day,
        "base": base.name,
        **size,
    }
    return {**about, **found, "probes": rows, "host": _time_host(rows)}


def _list_traced(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Eager iterations whose trace file exists."""
    return [
        row for row in rows if row["variant"] == "eager" and os.path.exists(row.get("trace", ""))
    ]


def _time_host(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Host overheads in eager iterations, scaled to their pace without the profiler: name, mean and
    its error [s]."""
    frames = [pl.DataFrame(schema={"overhead": pl.String, "s": pl.Float64})]
    for row in (row for row in _list_traced(rows) if row["kind"] not in LARGE):
        file = read_kineto(row["trace"])
        later = find_iterations(file.events)[1:]  # the profiler starts in the first step
        file = replace(
            file, events=file.events.filter(pl.col("iteration").is_in(later["iteration"].implode()))
        )
        slowed = 1e-9 * float(np.mean(later["dur"].to_numpy()))
        frames.append(
            time_host(file).select("overhead", s=row["seconds"] / slowed * pl.col("mean_s"))
        )
    means = (
        pl.concat(frames)
        .group_by("overhead")
        .agg(pl.mean("s"), error=pl.col("s").std() / pl.len().sqrt())
    )
    return [list(row) for row in means.sort("overhead").rows()]


@reading("measurements cannot be fitted", "take the file that calibrate wrote", told=True)
def fit_cluster(
    measurements: Mapping[str, Any], base: Named | None = None, *, name: str | None = None
) -> Platform:
    """Fit a platform to the times of a plan; parts without probes stay those of a similar platform.

    Parameters
    ----------
    measurements : mapping
        Result of `measure_cluster`.
    base : Platform, str or Path, optional
        Platform that the plan was made for; by default the gallery's platform of that name.
    name : str, optional
        Name of the platform; by default that of the base, followed by "measured".

    Returns
    -------
    platform : Platform
        The platform. Its provenance lists the parts of the base, and the probes without a time.

    Raises
    ------
    ValueError
        If no probe has a time.
    """
    check_threads()
    base = resize_base(
        base or measurements["base"], measurements["ranks_per_node"], measurements["nodes"]
    )
    source, day, rows = measurements["id"], measurements["date"], measurements["probes"]
    timed = [
        {**row, **row["sizes"], "seconds": float(np.median(row["samples"]))}
        for row in rows
        if "samples" in row
    ]
    if not timed:
        raise ValueError(f"no probe was timed; the first failed with: {rows[0]['failed']}")
    frame = pl.DataFrame(
        [{column: row.get(column) for column in _COLUMNS} for row in timed],
        infer_schema_length=None,
    )
    compare_devices("the measurements are", [measurements["facts"].get("name", "")], base)
    platform = replace(base, device=_describe(base.device, measurements["facts"], day))
    frame = frame.filter(pl.len().over("kind", "dtype", "ranks", "nodes") >= _LEAST, pl.col("cold"))
    if len(sent := frame.filter(stage="collectives").with_columns(operation="kind")):
        platform = add_curves(platform, sent, source=source, date=day)
    kernels = _fit_kernels(frame.filter(stage="kernels"), platform.device, source, day)
    platform = assemble(platform, name=name or f"{base.name}, measured", kernels=kernels)
    host = {
        key: Quantity(mean, "s", "measured", source, day, e)
        for key, mean, e in measurements["host"]
    } or base.host
    platform = _add_context(replace(platform, host=host), _list_traced(rows), source, day)
    parts = ((platform.kernels, base.kernels), (platform.collectives, base.collectives))
    kept = [key for new, old in parts for key, fit in new.items() if fit == old.get(key)]
    kept += [part for part in ("host", "context") if getattr(platform, part) == getattr(base, part)]
    lost = Counter(
        f"{row['kind']} in {row['dtype']} ({row['failed']})" for row in rows if "failed" in row
    )
    story = {"id": source, "measured": day, "base": base.name, "as in the base": ", ".join(kept)}
    story["without a time"] = "; ".join(f"{count} of {label}" for label, count in lost.items())
    story["clock"] = (
        f"{clock / 1e9:.3g} GHz" if (clock := measurements["facts"].get("clock")) else ""
    )
    runs = {(row["kind"], row["variant"]): row["seconds"] for row in rows if "profiled" in row}
    both = [kind for kind, how in runs if how == "compiled" and (kind, "eager") in runs]
    story["compiled over eager"] = ", ".join(
        f"{k} {runs[k, 'compiled'] / runs[k, 'eager']:.2f}" for k in both
    )
    return replace(platform, provenance=story)


def _fit_kernels(
    frame: pl.DataFrame, device: Device, source: str, day: str
) -> dict[str, KernelModel]:
    """Fits of timed kernels: products by number format, other classes as a whole and by variant."""
    products = frame.filter(kind="gemm")
    fits: dict[str, KernelModel] = {}
    if len(products):
        fits.update(fit_gemms(products, device, source=source, date=day))
    for (kind, dtype), rows in frame.filter(pl.col("kind") != "gemm").group_by(
        "kind", "dtype", maintain_order=True
    ):
        own = rows.filter(
            pl.len().over("variant") >= 2 * _LEAST,
            pl.col("kind").is_in(("attention", "convolution")),
        )
        parts = {str(kind): rows}
        parts |= {
            f"{kind}.{variant}": part
            for (variant,), part in own.group_by("variant", maintain_order=True)
        }
        for key, part in parts.items():
            work = pl.col("flops"), pl.col("nbytes")
            fit = fit_kernel(part, ("flops", "nbytes"), *work, device, str(dtype), source, day)
            fits[key] = replace(fit, dtypes=(str(dtype),))
    return fits


def _describe(device: Device, facts: Mapping[str, Any], day: str) -> Device:
    """The device with the name and the memory sizes that its driver reports."""
    if not facts:
        return device
    said = "measured", "torch.cuda.get_device_properties", day
    cache, main = (Quantity(facts[name], "B", *said) for name in ("cache", "memory"))
    *rest, near, far = device.memory
    memory = (*rest, replace(near, capacity=cache), replace(far, capacity=main))
    return replace(device, name=facts["name"], memory=memory)


def _add_context(
    platform: Platform, rows: Sequence[Mapping[str, Any]], source: str, day: str
) -> Platform:
    """Add scales of kernels inside iterations, and the spread of whole iterations around their
    prediction.

    Scales of the base belong to its own kernels. Only those of kernels that no iteration here runs
    are kept: fused kernels and those of Triton.
    """
    if not rows:
        return platform
    kept = {
        key: fit
        for key, fit in platform.context.kernels.items()
        if key.endswith((".fused", ".triton"))
    }
    bare = replace(platform, context=replace(platform.context, kernels={}))
    parts: dict[str, list[Array]] = {}
    # probes of small kernels include the time between them
    for row in (row for row in rows if row["kind"] in LARGE):
        for key, columns in _pair_times(row, bare):
            parts.setdefault(key, []).append(columns)
    learned = {
        key: _compare(np.concatenate(columns, axis=1), source, day)
        for key, columns in parts.items()
    }
    where = replace(
        platform, context=replace(platform.context, kernels={**kept, **learned}, iterations={})
    )
    runs = [(load(dict(row["sizes"])), row["seconds"]) for row in rows]
    with keep_quiet():
        logs = [
            (workload.family, math.log(seconds / predict(workload, where).time))
            for workload, seconds in runs
        ]
    own = {
        name: [log for family, log in logs if name in (ANY, family)] for name in (ANY, *dict(logs))
    }
    about: dict[str, Any] = {"source": source, "date": day}
    fits = {
        family: Iteration.build({"scale": 1.0}, spread=expect_spread(some), n=len(some), **about)
        for family, some in own.items()
    }
    context = replace(where.context, iterations=fits, parallel={**fits, **where.context.parallel})
    return replace(where, context=context)


def _compare(columns: Array, source: str, day: str) -> InContext:
    """Time of a class in iterations over the time of its isolated kernels; long operations weigh
    most."""
    alone, seconds = columns
    scale, weights = seconds.sum() / alone.sum(), seconds / seconds.sum()
    spread = float(np.sqrt(weights @ np.log(seconds / (scale * alone)) ** 2))
    return InContext.build(
        {"scale": float(scale)}, spread=spread, n=len(seconds), source=source, date=day
    )


def _pair_times(row: Mapping[str, Any], platform: Platform) -> Iterator[tuple[str, Array]]:
    """Isolated and traced times of the operations of an iteration, by class [s].

    A class has an entry for its variant in its number format, for its variant, for its number
    format, and as a whole. A sparse update runs as several operations: its time is that of the
    whole update phase without the dense part.
    """
    trace, workload = read_trace(row["trace"]), load(dict(row["sizes"]))
    busy, queued = trace.idle().select("busy_s", "queued_s").row(0)
    graph, seconds = trace.record()
    seconds = seconds * (1 + queued / busy)  # kernels start a little after the previous one ends
    updates = np.array([label.phase == "update" for label in graph.labels])
    sparse = isinstance(workload, DLRM) and workload.sparse
    operations = classify([graph], platform, graph.dtype)
    [costs] = price([graph], platform, dtype=graph.dtype)
    alone = costs.hot
    is_chosen = (seconds > 0) & ~costs.is_unaligned & ~(sparse & updates)
    for index, model in enumerate(operations.models):
        kind, variant, dtype = model.kind, model.variant, model.dtype
        chosen = (operations.of_operation == index) & is_chosen
        if kind in ("collective", "transfer", "other") or not chosen.any():
            continue
        finer = f"{kind}.{variant.replace('_causal', '')}"
        for key in dict.fromkeys((f"{finer}.{dtype}", finer, f"{kind}.{dtype}", kind)):
            yield key, np.stack([alone[chosen], seconds[chosen]])
    if sparse:
        (known,) = workload.graphs(1, None, accelerator=True)
        alone = price([known], platform, dtype=known.dtype)[0].hot
        rows = np.array([label.kind == "embedding_update" for label in known.labels])
        dense = ~rows & [label.phase == "update" for label in known.labels]
        left = max(float(np.nansum(seconds[updates]) - alone[dense].sum()), 1e-7)
        yield "embedding_update", np.array([[alone[rows].sum()], [left]])


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
        if len(each) >= _LEAST
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
    compare_devices("traces are", names, old)
    source = f"traces {', '.join(file.source for file in trace.files[:3])}{', ...' * (len(trace.files) > 3)}"
    nodes = math.ceil((trace.files[0].ranks or 1) / old.network.ranks_per_node)
    where = old.with_nodes(max(old.network.nodes, nodes))
    sized = [
        file for file in trace.files if any("Input Dims" in each for each in file.args.values())
    ]
    steps = [trace.record(file.rank) for file in sized]
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
        if unsized := len(find_unsized(graph)):
            lost.append(
                f"work of {unsized} of {len(graph.labels)} operations of {graph.name}: their sizes "
                "are unknown"
            )
    lost += trace.doubts
    if not names:
        lost.append("the name of the device, which is taken to be that of the base")
    if not kernels and where.collectives == old.collectives and where.host == old.host:
        raise ValueError(
            f"{source}: nothing can be fitted ({'; '.join([*lost, f'host {host}'])}); record_shapes=True"
        )
    story = {"traces": source, "base": old.name, "host": host, "not in the traces": "; ".join(lost)}
    return replace(where, name=name or old.name, provenance={**old.provenance, **story})


def _fit_host(platform: Platform, trace: Trace, source: str) -> tuple[Platform, str]:
    """Take the host over from ranks on which nothing but the profiler ran; what is said of it."""
    free = trace.host().filter(
        pl.col("n") > 0, pl.col("overhead").is_in([*platform.host]), observers=""
    )
    if free.is_empty():
        return platform, f"as in the base: {'; '.join(trace.warnings) or 'it made no calls'}"
    rows = (
        free.group_by("overhead", maintain_order=True)
        .agg(pl.mean("mean_s") / _PROFILED, pl.sum("n"))
        .rows()
    )
    times = sum(n * mean for _, mean, n in rows) / sum(
        n * platform.host[key].value for key, _, n in rows
    )
    if times > _SLOWED:
        return (
            platform,
            f"as in the base: calls took {times:.1f} times as long, slowed by what no trace names",
        )
    host = {key: q for key, q in platform.host.items() if "." not in key}
    host |= {
        key: Quantity(mean, "s", "measured", source, "", (_PROFILED - 1) * mean)
        for key, mean, _ in rows
    }
    return replace(platform, host=host), f"measured, {times:.2f} times as long as in the base"
