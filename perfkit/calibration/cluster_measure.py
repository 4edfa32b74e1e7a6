"""Time a plan of probes on a cluster of GPUs: the second step of its calibration.

`measure_cluster` runs the plan of `perfkit.calibration.cluster_plan`; what it returns is fitted by
`perfkit.calibration.cluster_fit`.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from perfkit.calibration.activity import time_host
from perfkit.calibration.cluster_plan import plan_probes
from perfkit.measure.folders import Campaign
from perfkit.measure.gpu_records import (
    ClusterMeasurements,
    DeviceAnswers,
    HostOverhead,
    MeasuredProbe,
    TimedIteration,
    read_answers,
)
from perfkit.measure.probes import LARGE, IterationProbe, Probe, write_probe
from perfkit.measure.processes import join_ranks, launched_ranks, run_processes
from perfkit.platform.platform import Platform
from perfkit.readers.kineto import find_iterations, read_kineto


def measure_cluster(
    device: str | Callable[[Sequence[Probe]], DeviceAnswers],
    base: Platform,
    campaign: Campaign | None = None,
    folder: Path = Path(),
) -> ClusterMeasurements:
    """Time the plan for a similar platform on a device.

    Parameters
    ----------
    device : str or callable
        ``cuda``: the GPUs of this machine, or those of all ranks that a launcher has started; each
        of these ranks calls this function. Or a function that times a list of probes.
    base : Platform
        A similar platform, with the nodes and ranks that take part.
    campaign : Campaign, optional
        Stores finished probes.
    folder : Path, optional
        Folder for traces of iterations; made if missing.

    Returns
    -------
    measurements : ClusterMeasurements
        Input of `perfkit.calibration.cluster_fit.fit_cluster`.

    Raises
    ------
    MeasurementError
        If a measuring process fails.
    """
    plan = plan_probes(base)
    if callable(device):
        found = device(plan)
    else:
        found = _run_plan(plan, device, base.network.ranks, campaign, folder)
    probes = [
        MeasuredProbe.join(probe, answer) for probe, answer in zip(plan, found.answers, strict=True)
    ]
    measurements = ClusterMeasurements(
        id=found.id,
        date=(campaign or Campaign(None)).day,
        base=base.name,
        ranks_per_node=base.network.ranks_per_node,
        nodes=base.network.nodes,
        facts=found.facts,
        probes=probes,
        host=(),
    )
    return replace(measurements, host=_time_host(list_traced(measurements)))


def _run_plan(
    plan: Sequence[Probe], device: str, ranks: int, campaign: Campaign | None, folder: Path
) -> DeviceAnswers:
    """Time a plan in measuring processes, or in this one if a launcher has started it; the answers
    of rank 0, which has all."""
    kept = campaign.file if campaign else None
    job = {
        "task": "perfkit.measure.cuda:time_probes",
        "device": device,
        "probes": [write_probe(probe) for probe in plan],
        "folder": str(folder.resolve()),
        "kept": str(kept) if kept else "",
    }
    if launched_ranks():
        return read_answers(join_ranks(job)[0])
    return read_answers(run_processes(job, ranks=ranks, timeout=7200)[0])


def list_traced(
    measurements: ClusterMeasurements,
) -> list[tuple[IterationProbe, TimedIteration]]:
    """List the eager iterations whose trace file exists.

    Parameters
    ----------
    measurements : ClusterMeasurements
        All measurements.

    Returns
    -------
    traced : list of (IterationProbe, TimedIteration)
        In the order of the plan.
    """
    return [
        (probe, times)
        for probe, times in measurements.list_iterations()
        if not probe.compiled and os.path.exists(times.trace)
    ]


def _time_host(traced: Sequence[tuple[IterationProbe, TimedIteration]]) -> list[HostOverhead]:
    """Host overheads in small iterations, scaled to their pace without the profiler."""
    frames = [pl.DataFrame(schema={"overhead": pl.String, "s": pl.Float64})]
    for probe, times in traced:
        if probe.name in LARGE:
            continue
        file = read_kineto(times.trace)
        later = find_iterations(file.events)[1:]  # the profiler starts in the first step
        in_later = pl.col("iteration").is_in(later["iteration"].implode())
        file = replace(file, events=file.events.filter(in_later))
        slowed = 1e-9 * float(np.mean(later["dur"].to_numpy()))
        overheads = time_host(file)
        frames.append(overheads.select("overhead", s=times.seconds / slowed * pl.col("mean_s")))
    means = (
        pl.concat(frames)
        .group_by("overhead")
        .agg(pl.mean("s"), error=pl.col("s").std() / pl.len().sqrt())
    )
    return [
        HostOverhead(name=name, mean=mean, error=error)
        for name, mean, error in means.sort("overhead").rows()
    ]
