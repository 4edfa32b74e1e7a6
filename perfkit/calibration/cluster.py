"""GPUs calibrated through probes, a plan that a live or a recorded device answers, or through traces of their steps."""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from perfkit.calibration.activity import time_host
from perfkit.calibration.collectives import read_ranks
from perfkit.calibration.context import expect_spread
from perfkit.calibration.traced import record_step
from perfkit.calibration.traces import read_trace
from perfkit.fitting import Fit, fit_roofline
from perfkit.ground.files import reading
from perfkit.ground.hardware import Device, Quantity
from perfkit.ground.units import Array
from perfkit.measure.folders import Campaign
from perfkit.measure.probes import LARGE, Probe, list_probes
from perfkit.measure.processes import join_ranks, launched_ranks, run_processes
from perfkit.measure.samples import load
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import Named, find_similar, load_platform
from perfkit.platform.kernels import find_unaligned
from perfkit.platform.platform import ANY, Platform
from perfkit.platform.sources import add_curves, assemble, compare_devices, fit_gemms, fit_kernel
from perfkit.prediction.cost import classify, find_traffic, price, size_operations
from perfkit.prediction.result import predict
from perfkit.readers.trace import find_iterations, read_kineto
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph

#: Time of the calls of one sample, and assumed ones to prepare a probe, to build and trace an iteration, and to compile
#: it [s]; they only say how long a plan takes (formulas, table 6.2).
_SAMPLE, _PREPARE, _BUILD, _COMPILE = 2e-3, 0.15, 8.0, 30.0
#: Most calls of one sample, samples of a probe with that which warms up, its iterations, and fewest sizes of a fit [-].
_MOST, _SAMPLES, _ITERATIONS, _LEAST = 50, 6, 30, 4
_COLUMNS = "stage kind variant dtype ranks nodes cold m n k flops nbytes seconds".split()


def plan_probes(base: Platform) -> list[Probe]:
    """Plan what to time on a cluster like a platform.

    Parameters
    ----------
    base : Platform
        Its device and network say what there is to time, its predictions how long that takes.

    Returns
    -------
    plan : list of Probe
        With the calls of one sample [-] and the time that all of it takes [s].
    """
    plan, network = [], base.network
    cache, memory = (level.capacity.value if level.capacity else 1e9 for level in base.device.memory[-2:])
    size: dict[str, Any] = {"memory": memory, "cache": cache, "local": network.ranks_per_node, "nodes": network.nodes}
    with keep_quiet():
        for probe in list_probes([*base.device.peaks], **size):
            if probe.stage == "iterations":
                whole = _ITERATIONS * predict(load(dict(probe.sizes)), base).time
                plan.append(probe._replace(seconds=_BUILD + whole + _COMPILE * (probe.variant == "compiled")))
                continue
            if probe.stage == "kernels":  # as a product that does and moves as much
                work = {"flops": probe.sizes["flops"], "nbytes": 12.0 * probe.sizes.get("elements", 0.0)}
                seconds = float(base.kernel_time("gemm", work, dtype=probe.dtype))
            else:  # none takes longer than an all_reduce
                seconds = float(base.collective_time("all_reduce", probe.sizes["nbytes"], ranks=probe.ranks))
            calls = int(np.clip(_SAMPLE / seconds, 1, _MOST))
            plan.append(probe._replace(calls=calls, seconds=_PREPARE + _SAMPLES * calls * seconds))
    return plan


def resize_base(base: Named, ranks_per_node: int, nodes: int) -> Platform:
    """Give a platform the ranks of a cluster."""
    platform = load_platform(base)
    return replace(platform, network=replace(platform.network, ranks_per_node=ranks_per_node, nodes=nodes))


def measure_cluster(
    device: str | Callable[[Sequence[Probe]], dict[str, Any]],
    base: Platform,
    campaign: Campaign | None = None,
    folder: Path = Path(),
) -> dict[str, Any]:
    """Let a device answer the plan for a platform like it.

    Parameters
    ----------
    device : str or callable
        ``cuda``: the GPUs of this machine, or of the ranks that a launcher has started, which all call this. Or a
        function that answers a list of probes as `perfkit.measure.cuda.time_probes` does.
    base : Platform
        A platform like it, with the nodes and ranks that take part.
    campaign : Campaign, optional
        Keeps what is finished.
    folder : Path, optional
        Where traces of iterations are kept; made if missing.

    Returns
    -------
    measurements : dict
        Plain JSON; what `fit_cluster` takes.
    """
    plan = plan_probes(base)
    if callable(device):
        found = device(plan)
    else:
        kept, task = str((campaign and campaign.file) or ""), "perfkit.measure.cuda:time_probes"
        job = {"task": task, "device": device, "probes": plan, "folder": str(folder.resolve()), "kept": kept}
        ranks = base.network.ranks
        found = join_ranks(job)[0] if launched_ranks() else run_processes(job, ranks=ranks, timeout=7200)[0]
    rows = [{**probe._asdict(), **(answer or {"failed": "not recorded"})}
            for probe, answer in zip(plan, found.pop("answers"), strict=True)]  # fmt: skip
    size = {"ranks_per_node": base.network.ranks_per_node, "nodes": base.network.nodes}
    about = {"id": "perfkit calibrate", "date": (campaign or Campaign(None)).day, "base": base.name, **size}
    return {**about, **found, "probes": rows, "host": _time_host(rows)}


def _list_traced(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Eager iterations whose traces are still there."""
    return [row for row in rows if row["variant"] == "eager" and os.path.exists(row.get("trace", ""))]


def _time_host(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Overheads of the host in eager iterations [s]: name, mean and its error, at their pace without the profiler."""
    frames = [pl.DataFrame(schema={"overhead": pl.String, "s": pl.Float64})]
    for row in (row for row in _list_traced(rows) if row["kind"] not in LARGE):
        file, number, slowed = read_kineto(row["trace"]), pl.col("iteration"), row["profiled"]
        marks = find_iterations(file.events)
        if len(marks) > 1:  # the profiler starts in the first
            file = replace(file, events=file.events.filter(number > marks["iteration"].min()))
            slowed = 1e-9 * float(np.mean(marks["dur"].to_numpy()[1:]))
        frames.append(time_host(file).select("overhead", s=row["seconds"] / slowed * pl.col("mean_s")))
    value, every = pl.col("s"), pl.concat(frames).group_by("overhead")
    means = every.agg(value.mean(), error=value.std() / value.len().sqrt())
    return [list(row) for row in means.sort("overhead").rows()]


@reading("measurements cannot be fitted", "take the file that calibrate wrote", told=True)
def fit_cluster(measurements: Mapping[str, Any], base: Named | None = None, *, name: str | None = None) -> Platform:
    """Fit a platform to the answers to a plan; what no probe covers stays as in a platform like it.

    Parameters
    ----------
    measurements : mapping
        From `measure_cluster`.
    base : Platform, str or Path, optional
        The platform that the plan was made for; by default the one of its name.
    name : str, optional
        Name of the platform; by default that of the base, with a word that it was measured.

    Returns
    -------
    platform : Platform
        Its provenance says which parts are those of the base, and which probes have no time.

    Raises
    ------
    ValueError
        Where no probe has a time.
    """
    base = resize_base(base or measurements["base"], measurements["ranks_per_node"], measurements["nodes"])
    source, day, rows = measurements["id"], measurements["date"], measurements["probes"]
    timed = [{**row, **row["sizes"], "seconds": float(np.median(row["samples"]))} for row in rows if "samples" in row]
    if not timed:
        raise ValueError(f"no probe was timed; the first failed with: {rows[0]['failed']}")
    frame = pl.DataFrame([{column: row.get(column) for column in _COLUMNS} for row in timed], infer_schema_length=None)
    platform = replace(base, device=_describe(base.device, measurements["facts"], day))
    frame = frame.filter(pl.len().over("kind", "dtype", "ranks", "nodes") >= _LEAST, pl.col("cold"))
    if len(sent := frame.filter(stage="collectives").with_columns(operation="kind")):
        platform = add_curves(platform, sent, source=source, date=day)
    kernels = _fit_kernels(frame.filter(stage="kernels"), platform.device, source, day)
    platform = assemble(platform, name=name or f"{base.name}, measured", kernels=kernels)
    host = {key: Quantity(mean, "s", "measured", source, day, e) for key, mean, e in measurements["host"]} or base.host
    platform = _add_context(replace(platform, host=host), _list_traced(rows), source, day)
    parts = ((platform.kernels, base.kernels), (platform.collectives, base.collectives))
    kept = [key for new, old in parts for key, fit in new.items() if fit == old.get(key)]
    kept += [part for part in ("host", "context") if getattr(platform, part) is getattr(base, part)]
    lost = Counter(f"{row['kind']} in {row['dtype']} ({row['failed']})" for row in rows if "failed" in row)
    story = {"id": source, "measured": day, "base": base.name, "as in the base": ", ".join(kept)}
    story["without a time"] = "; ".join(f"{count} of {label}" for label, count in lost.items())
    return replace(platform, provenance=story)


def _fit_kernels(frame: pl.DataFrame, device: Device, source: str, day: str) -> dict[str, Fit]:
    """Fits of what was timed: products by number format, other classes as a whole."""
    products = frame.filter(kind="gemm")
    fits = fit_gemms(products, device, source=source, date=day) if len(products) else {}
    for (kind, dtype), rows in frame.filter(pl.col("kind") != "gemm").group_by("kind", "dtype", maintain_order=True):
        work = pl.col("flops"), pl.col("nbytes")
        fit = fit_kernel(rows, ("flops", "nbytes"), *work, device, str(dtype), source, day)
        fits[str(kind)] = replace(fit, dtypes=(str(dtype),))
        own = rows.filter(pl.len().over("variant") >= 2 * _LEAST, pl.col("kind").is_in(("attention", "convolution")))
        for (variant,), part in own.group_by("variant", maintain_order=True):
            fit = fit_kernel(part, ("flops", "nbytes"), *work, device, str(dtype), source, day)
            fits[f"{kind}.{variant}"] = replace(fit, dtypes=(str(dtype),))
    return fits


def _describe(device: Device, facts: Mapping[str, Any], day: str) -> Device:
    """The device as its driver describes it."""
    if not facts:
        return device
    *rest, near, main = device.memory
    said = "measured", "torch.cuda.get_device_properties", day
    near, main = (
        replace(level, capacity=Quantity(facts[name], "B", *said))
        for level, name in ((near, "cache"), (main, "memory"))
    )
    return replace(device, name=facts["name"], memory=(*rest, near, main))


def _add_context(platform: Platform, rows: Sequence[Mapping[str, Any]], source: str, day: str) -> Platform:
    """What traced iterations add to isolated kernels, and how far they are from the sum of kernels and host.

    What the base says belongs to its own kernels; only what no iteration here has run stays: fused kernels, Triton's.
    """
    if not rows:
        return platform
    kept = {key: fit for key, fit in platform.context.kernels.items() if key.endswith((".fused", ".triton"))}
    bare = replace(platform, context=replace(platform.context, kernels={}))
    parts: dict[str, list[Array]] = {}
    for row in (row for row in rows if row["kind"] in LARGE):  # time between small kernels counts as theirs in probes
        for key, columns in _put_beside(row, bare).items():
            parts.setdefault(key, []).append(columns)
    learned = {key: _compare(np.concatenate(columns, axis=1), source, day) for key, columns in parts.items()}
    where = replace(platform, context=replace(platform.context, kernels={**kept, **learned}, iterations={}))
    with keep_quiet():
        logs = [math.log(row["seconds"] / predict(load(dict(row["sizes"])), where).time) for row in rows]
    own: dict[str, list[float]] = {ANY: logs}
    for row, log in zip(rows, logs, strict=True):
        own.setdefault(load(dict(row["sizes"])).family, []).append(log)
    about: dict[str, Any] = {"units": {"scale": "-"}, "source": source, "date": day}
    fits = {family: Fit("iteration", {"scale": 1.0}, spread=expect_spread(some), n=len(some), **about)
            for family, some in own.items()}  # fmt: skip
    context = replace(where.context, iterations=fits, parallel={**fits, **where.context.parallel})
    return replace(where, context=context)


def _compare(columns: Array, source: str, day: str) -> Fit:
    """What a class takes in iterations over what its kernels take alone: long operations decide."""
    alone, seconds = columns
    scale, weights = seconds.sum() / alone.sum(), seconds / seconds.sum()
    spread = float(np.sqrt(weights @ np.log(seconds / (scale * alone)) ** 2))
    about: dict[str, Any] = {"n": len(seconds), "units": {"scale": "-"}, "source": source, "date": day}
    return Fit("in_context", {"scale": float(scale)}, spread=spread, **about)


def _put_beside(row: Mapping[str, Any], platform: Platform) -> dict[str, Array]:
    """Isolated times of the operations of a traced iteration, and those that were traced, by class [s].

    A class counts in its number format, its variant, and as a whole. A sparse update is called as a sum: what a whole
    update phase takes beyond its dense part tells its time.
    """
    trace, workload, parts = read_trace(row["trace"]), load(dict(row["sizes"])), dict[str, list[Array]]()
    busy, queued = trace.idle().select("busy_s", "queued_s").row(0)
    graph, seconds = record_step(trace.files[0])
    seconds = seconds * (1 + queued / busy)  # kernels that follow one another start late
    updates = np.array([label[3] == "update" for label in graph.labels])
    sparse = isinstance(workload, DLRM) and workload.sparse
    models, number = classify([graph], platform, graph.dtype)
    alone, sizes = price([graph], platform, dtype=graph.dtype)[0].hot, {name: graph.column(name) for name in "mnk"}
    for index, (kind, variant, dtype) in enumerate(models.classes):
        odd = find_unaligned(platform, kind, variant, dtype, sizes)
        chosen = (number == index) & (seconds > 0) & ~odd & ~(sparse & updates)
        if kind in ("collective", "transfer", "other") or not chosen.any():
            continue
        finer = f"{kind}.{variant.replace('_causal', '')}"
        for key in dict.fromkeys((f"{finer}.{dtype}", finer, f"{kind}.{dtype}", kind)):
            parts.setdefault(key, []).append(np.stack([alone[chosen], seconds[chosen]]))
    if sparse:
        (known,) = workload.graphs(1, None, accelerator=True)
        alone = price([known], platform, dtype=known.dtype)[0].hot
        rows = np.array([label[1] == "embedding_update" for label in known.labels])
        dense = ~rows & [label[3] == "update" for label in known.labels]
        left = max(float(np.nansum(seconds[updates]) - alone[dense].sum()), 1e-7)
        parts["embedding_update"] = [np.array([[alone[rows].sum()], [left]])]
    return {key: np.concatenate(each, axis=1) for key, each in parts.items()}


def fit_traced(recorded: Sequence[tuple[Graph, Array]], platform: Platform, *, source: str = "") -> dict[str, Fit]:
    """Fit kernels to what they took in recorded steps, by class and, where there are enough, by variant.

    Parameters
    ----------
    recorded : sequence of (Graph, array)
        Steps on this device, of `record_step`.
    platform : Platform
        Peaks and memory of the device.
    source : str, optional
        Data id.

    Returns
    -------
    fits : dict of str to Fit
        Rooflines by class.

    Notes
    -----
    An operation of several kernels counts for each of them with its share of the work.
    """
    columns: dict[str, list[Array]] = {}
    for graph, seconds in recorded:
        sizes = size_operations(graph, platform)
        sizes |= find_traffic(sizes, platform)
        counts = graph.column("launches")
        work = np.stack([sizes["flops"], sizes["nbytes"], seconds]) / np.maximum(counts, 1.0)
        table = np.concatenate([work, [sizes["peak"], sizes["bandwidth"]]])
        for (kind, variant), places in graph.kernels.items():
            chosen = np.repeat(places, np.where(seconds[places] > 0, counts[places], 0).astype(int))
            for key in {kind: None, f"{kind}.{variant}": None} if kind not in ("collective", "transfer") else ():
                columns.setdefault(key, []).append(table[:, chosen])
    fits = {}
    for key, parts in columns.items():
        flops, nbytes, times, peak, bandwidth = np.concatenate(parts, axis=1)
        if len(times) >= _LEAST and np.any(flops + nbytes):
            fits[key] = fit_roofline(flops, nbytes, times, peak=peak, bandwidth=bandwidth, source=source)
    return fits


def calibrate_traces(
    traces: str | Path | Sequence[str | Path], base: Named | None = None, name: str | None = None
) -> Platform:
    """Make a platform from traces of training steps and one to start from.

    Parameters
    ----------
    traces : str, Path or sequence of them
        Traces of Kineto, one per rank, with sizes of operands; and execution traces of the same ranks.
    base : Platform, str or Path, optional
        Platform of the same device, for all but the kernels; by default the gallery's node.
    name : str, optional
        Name of the platform; by default that of the base.

    Returns
    -------
    platform : Platform
        Kernels as they ran in the steps. The host stays that of the base: what a trace tells of it does not carry over
        to other steps, or restates the time of its own (formulas, table 6.2).

    Raises
    ------
    ValueError
        For traces without sizes or a device, and for a base that is a CPU.

    Warns
    -----
    UserWarning
        If the traces are of another device than the base.
    """
    files = read_ranks(traces)
    names = [str(each.get("name", "")) for file in files for each in file.devices[:1]]
    where = load_platform(base or find_similar(names[0] if names else ""))
    if where.device.kind == "cpu":
        raise ValueError(f"base is {where.name!r}, a CPU; traces tell kernels of GPUs; name one such as h100-sxm-8")
    compare_devices("traces are", names, where)
    source = f"traces {', '.join(file.source for file in files[:3])}{', ...' * (len(files) > 3)}"
    kernels = fit_traced([record_step(file) for file in files], where, source=source)
    known = {key: fit for key, fit in where.context.kernels.items() if key not in kernels}  # these ran in an iteration
    where = replace(where, context=replace(where.context, kernels=known))
    return assemble(where, name=name, kernels=kernels, provenance={"traces": source, "base": where.name})
