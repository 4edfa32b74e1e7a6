"""A GPU cluster calibrated through probes: a plan is priced, answered by a live or a recorded device, and fitted."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from perfkit.calibration.activity import list_work, time_host
from perfkit.fitting import Fit
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import Device, Quantity
from perfkit.ground.units import show
from perfkit.measure.folders import Campaign
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.probes import Probe, list_probes
from perfkit.measure.processes import join_ranks, run_processes
from perfkit.measure.recordings import Recording
from perfkit.measure.samples import load
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.sources import add_curves, assemble, fit_gemms, fit_kernel
from perfkit.prediction.result import predict
from perfkit.readers.trace import read_kineto

#: Time of the calls of one sample, most calls, and time to prepare a probe: operands and their random numbers [s].
_SAMPLE, _MOST, _PREPARE = 2e-3, 50, 0.05
#: Time to start a process and its libraries, to build and trace an iteration, and to compile it [s].
_START, _BUILD, _COMPILE = 12.0, 5.0, 30.0
#: Calls or iterations of one probe: samples and one to warm up; warm-up, timed and traced ones [-].
_SAMPLES, _ITERATIONS = 6, 33
#: Fewest sizes of a fit [-].
_LEAST = 4
_LIVE = "perfkit.measure.cuda"
#: Answers of every rank to the probes of one group.
_Answers = Callable[[Sequence[Probe]], Any]


def resize_base(base: Named, ranks_per_node: int, nodes: int) -> Platform:
    """Give a platform the nodes of a cluster, and leave out its collectives of more ranks."""
    platform = load_platform(base)
    known = {key: fit for key, fit in platform.collectives.items() if (Key.parse(key).ranks or 0) <= ranks_per_node}
    if ranks_per_node != platform.network.ranks_per_node:
        network = replace(platform.network, ranks_per_node=ranks_per_node, nodes=1)
        platform = replace(platform, network=network, collectives=known)
    return platform if nodes == platform.network.nodes else platform.with_nodes(nodes)


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
    network, plan, group = base.network, [], ""
    cache, memory = (level.capacity.value if level.capacity else 1e9 for level in base.device.memory[-2:])
    size: dict[str, Any] = {"memory": memory, "cache": cache, "local": network.ranks_per_node, "nodes": network.nodes}
    with keep_quiet():
        for probe in list_probes([*base.device.peaks], **size):
            seconds, start = _expect(probe, base), _START * (probe.group != group)
            repeats, group = int(np.clip(_SAMPLE / seconds, 1, _MOST)), probe.group
            whole = _PREPARE + _SAMPLES * repeats * seconds
            if probe.stage == "iterations":
                whole = _BUILD + _ITERATIONS * seconds + _COMPILE * (probe.variant == "compiled")
            plan.append(replace(probe, repeats=repeats, seconds=start + whole))
    return plan


def _expect(probe: Probe, base: Platform) -> float:
    """Time of one call as the platform predicts it [s]."""
    if probe.stage == "iterations":
        return predict(load(dict(probe.workload)), base).time
    if probe.stage == "collectives":
        known = {Key.parse(key).operation for key in base.collectives}
        operation = probe.kind if probe.kind in known else "all_reduce"
        return float(base.collective_time(operation, probe.sizes["nbytes"], ranks=probe.ranks))
    kind = probe.kind if probe.kind in base.kernels else "gemm"
    sizes = {name: probe.sizes[name] for name in ("flops", "nbytes")}
    return float(base.kernel_time(kind, sizes, dtype=probe.dtype))


# -- answers ---------------------------------------------------------------------------------------------------------


def measure_cluster(
    campaign: Campaign, device: Recording | str, base: Platform, *, folder: Path, launched: bool = False
) -> dict[str, Any]:
    """Let a device answer the plan for a platform like it.

    Parameters
    ----------
    campaign : Campaign
        Keeps what is finished.
    device : Recording or str
        A recorded device, or ``cuda`` for the GPUs of this machine or of the ranks that a launcher has started.
    base : Platform
        A platform like it, with the nodes and ranks that take part.
    folder : Path
        Where traces of iterations are kept; made if missing.
    launched : bool, optional
        Whether a launcher has started this process as one of several, which all call this.

    Returns
    -------
    measurements : dict
        Plain JSON, ``format`` 1; what `fit_cluster` takes.
    """
    measure = partial(_measure, campaign, base)
    if isinstance(device, Recording):
        return {**measure(lambda probes: [device.answer(probes)], {}), "id": device.source}
    folder.mkdir(parents=True, exist_ok=True)
    job = {"task": f"{_LIVE}:time_probes", "device": device, "folder": str(folder.resolve())}
    if launched:
        return dict(join_ranks({"task": partial(_meet, measure, campaign, job), "device": device})[0])
    facts = run_processes({"task": f"{_LIVE}:describe_device", "device": device})[0]

    def answer(probes: Sequence[Probe]) -> Any:
        return run_processes({**job, "probes": [*map(asdict, probes)]}, ranks=max(probe.ranks for probe in probes))

    return measure(answer, facts)


def _meet(measure: Callable[..., Any], campaign: Campaign, job: dict[str, str], device: str) -> Any:
    """Measure as one of the ranks that a launcher has started: what rank 0 has finished, none of them repeats."""
    import torch
    import torch.distributed as dist

    from perfkit.measure.cuda import describe_device, time_probes

    agreed: list[Any] = [campaign.done, describe_device(device=device)]
    dist.broadcast_object_list(agreed, 0, device=torch.device("cpu"))
    campaign.done.update(agreed[0])

    def answer(probes: Sequence[Probe]) -> Any:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, time_probes(probes=[*map(asdict, probes)], folder=job["folder"], device=device))
        return every

    return measure(answer, agreed[1])


def _read_hosts(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Overheads of the host off the traces of eager iterations, and how many times as long these took profiled."""
    for row in (row for row in rows if row["probe"]["variant"] == "eager" and os.path.exists(row.get("trace", ""))):
        file = read_kineto(row["trace"])
        for overhead in time_host(file, list_work(file)).to_dicts():
            yield {"iteration": row["probe"]["kind"], "slowed": row["profiled"] / row["seconds"], **overhead}


def _measure(campaign: Campaign, base: Platform, answer: _Answers, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Have the plan answered group by group: each probe with its samples, or the reason why there are none."""
    groups: dict[str, list[Probe]] = {}
    for probe in plan_probes(replace(base, device=_describe(base.device, facts))):
        groups.setdefault(probe.group, []).append(probe)
    found = campaign.run("probes", {group: partial(answer, probes) for group, probes in groups.items()})
    rows = [
        {"probe": asdict(probe), **_join(answers)}
        for group, probes in groups.items()
        for probe, *answers in zip(probes, *found[group], strict=True)
    ]
    versions, network = list_versions(), base.network
    where = f"{facts.get('name', '')}, {network.nodes} x {network.ranks_per_node} ranks"
    return {
        "format": 1, "device": "cuda", "id": f"perfkit {versions['perfkit']} on {where}, {campaign.day}",
        "date": campaign.day, "base": base.name, "ranks_per_node": network.ranks_per_node, "nodes": network.nodes,
        "facts": dict(facts), "machine": describe_machine() if facts else {}, "versions": versions, "probes": rows,
        "host": [*_read_hosts(rows)],
    }  # fmt: skip


def _join(answers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """One answer of all ranks: of a collective the mean over ranks, as in nccl-tests; the first failure, if any."""
    known = [answer for answer in answers if answer] or [{"failed": "not recorded"}]
    joined = dict(next((answer for answer in known if "failed" in answer), known[0]))
    if "samples" in joined:
        joined["samples"] = np.mean([answer["samples"] for answer in known], axis=0).tolist()
    return joined


# -- fits ------------------------------------------------------------------------------------------------------------


def fit_cluster(measurements: Mapping[str, Any], base: Platform, *, name: str | None = None) -> Platform:
    """Fit a platform to the answers to a plan; what no probe covers stays as in a platform like it.

    Parameters
    ----------
    measurements : mapping
        From `measure_cluster`.
    base : Platform
        The platform that the plan was made for.
    name : str, optional
        Name of the platform; by default that of the base, with a word that it was measured.

    Returns
    -------
    platform : Platform
        Its provenance says which parts are those of the base, and which probes have no time.

    Raises
    ------
    ValueError
        Where no probe has a time, and for measurements of another format.
    """
    if (version := measurements["format"]) != 1:
        raise ValueError(f"format is {show(version)}; this perfkit reads measurements of format 1; measure again")
    source, day = measurements["id"], measurements["date"]
    answers = [(Probe(**row["probe"]), row) for row in measurements["probes"]]
    if not any("samples" in row for _, row in answers):
        raise ValueError(f"no probe was timed; the first failed with: {answers[0][1].get('failed')}")
    frame = _tabulate(answers)
    platform = replace(base, device=_describe(base.device, measurements["facts"], frame, day))
    curve = pl.col("nbytes").n_unique().over("operation", "ranks", "nodes", "dtype")
    if len(sent := frame.filter(curve >= _LEAST, stage="collectives")):
        platform = add_curves(platform, sent, source=source, date=day)
    kernels = _fit_kernels(frame.filter(pl.col("cold"), stage="kernels"), platform.device, source, day)
    platform = assemble(platform, name=name or f"{base.name}, measured", kernels=kernels)
    host = _fit_host(measurements.get("host", ()), source, day)
    pairs = [(platform.kernels, base.kernels), (platform.collectives, base.collectives)]
    kept = [key for new, old in pairs for key, fit in new.items() if fit == old.get(key)] + ["host"] * (not host)
    lost = Counter(f"{probe.label} ({row['failed']})" for probe, row in answers if "failed" in row)
    story = {"id": source, "measured": day, "base": base.name, "as in the base": ", ".join(kept)}
    story |= {"without a time": "; ".join(f"{count} of {label}" for label, count in lost.items())}
    if slowed := [row["slowed"] for row in measurements.get("host", ())]:
        story["profiler"] = f"slows eager iterations {min(slowed):.2f} to {max(slowed):.2f} times"
    about = {**measurements["machine"], **measurements["versions"], **story}
    story = {key: str(text) for key, text in about.items() if text}
    return replace(platform, host=host or base.host, provenance=story)


def _fit_host(rows: Sequence[Mapping[str, Any]], source: str, day: str) -> dict[str, Quantity]:
    """Overheads of the host, also by what a call launches, each at the pace that its iteration has unprofiled."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name, by_class = row["overhead"], row["overhead"] in ("before_launch", "after_launch", "between_launches")
        for key in (name, f"{name}.{row['kind']}.{row['phase']}") if by_class and row["kind"] else (name,):
            found.setdefault(key, []).append((row["mean_s"] / row["slowed"], float(row["n"])))
    host, text = {}, f"{source}, traces of eager iterations, scaled to their time without the profiler"
    for name, pairs in sorted(found.items()):
        value, calls = np.array(pairs).T
        mean = float(np.average(value, weights=calls))
        error = float(np.sqrt(np.average((value - mean) ** 2, weights=calls) / len(value)))
        host[name] = Quantity(mean, "s", "measured", text, day, error)
    return host


def _tabulate(answers: Sequence[tuple[Probe, Mapping[str, Any]]]) -> pl.DataFrame:
    """Probes with a time as rows: what was timed, its sizes and seconds."""
    names = ("stage", "kind", "variant", "dtype", "ranks", "nodes", "cold")
    rows = [
        {**{name: getattr(probe, name) for name in names}, "operation": probe.kind,
         **row.get("sizes", probe.sizes), "seconds": float(np.median(row["samples"]))}
        for probe, row in answers if "samples" in row
    ]  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None)


def _fit_kernels(frame: pl.DataFrame, device: Device, source: str, day: str) -> dict[str, Fit]:
    """Fits of what was timed: products by number format, attention by direction, other classes as a whole."""
    backward, enough = pl.col("variant").str.starts_with("backward"), pl.len().over("dtype") >= _LEAST
    products = frame.filter(kind="gemm").filter(enough)
    fits = fit_gemms(products, device, source=source, date=day) if len(products) else {}
    key = pl.when(backward & (pl.col("kind") == "attention")).then(pl.lit("attention.backward")).otherwise("kind")
    others = frame.filter(pl.col("kind") != "gemm").group_by(key.alias("key"), "dtype")
    for (name, dtype), rows in sorted(others, key=lambda item: str(item[0])):
        if len(rows) >= _LEAST:
            work = pl.col("flops"), pl.col("nbytes")
            fit = fit_kernel(rows, ("flops", "nbytes"), *work, device, str(dtype), source, day)
            fits[str(name)] = replace(fit, dtypes=(str(dtype),))
    if "attention.backward" in fits:
        fits["attention.backward_causal"] = fits["attention.backward"]
    return fits


def _describe(device: Device, facts: Mapping[str, Any], frame: pl.DataFrame | None = None, day: str = "") -> Device:
    """The device as its driver describes it; its last cache is as fast as the fastest stream that fits into it."""
    if not facts:
        return device
    *rest, near, main = device.memory
    said = ("measured", "torch.cuda.get_device_properties", day)
    main = replace(main, capacity=Quantity(float(facts["memory"]), "B", *said))
    near = replace(near, capacity=Quantity(float(facts["cache"]), "B", *said))
    if frame is not None and len(warm := frame.filter(~pl.col("cold"))):
        rate, text = (warm["nbytes"] / warm["seconds"]).max(), "fastest sum of two tensors that stay in the cache"
        near = replace(near, bandwidth=Quantity(float(str(rate)), "B/s", "measured", text, day))
    return replace(device, name=str(facts["name"]), memory=(*rest, near, main))
