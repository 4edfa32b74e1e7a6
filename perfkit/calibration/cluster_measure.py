"""Time a plan of probes on a cluster of GPUs: the second step of its calibration.

`measure_cluster` runs the plan of `perfkit.calibration.cluster_plan`; what it returns is fitted by
`perfkit.calibration.cluster_fit`.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from perfkit.calibration.activity import time_host
from perfkit.calibration.cluster_plan import plan_probes
from perfkit.calibration.rehearsal import rehearse_answers
from perfkit.measure.folders import Campaign
from perfkit.measure.gpu_records import (
    ClusterMeasurements,
    DeviceAnswers,
    HostOverhead,
    MeasuredProbe,
    TimedIteration,
    read_answers,
)
from perfkit.measure.leader import Leader
from perfkit.measure.probes import LARGE, IterationProbe, Probe, write_probe
from perfkit.measure.processes import run_processes
from perfkit.measure.records import write_record
from perfkit.platform.machine import REHEARSAL
from perfkit.platform.platform import Platform
from perfkit.readers.kineto import find_iterations, read_kineto


def measure_cluster(
    device: str | Callable[[Sequence[Probe]], DeviceAnswers],
    base: Platform,
    campaign: Campaign | None = None,
    folder: Path = Path(),
    *,
    leader: Leader | None = None,
    rehearse: bool = False,
) -> ClusterMeasurements:
    """Time the plan for a similar platform on a device.

    Parameters
    ----------
    device : str or callable
        ``cuda``: the GPUs of this machine, or those of all ranks that a launcher has started. Or a
        function that times a list of probes.
    base : Platform
        A similar platform, with the nodes and ranks that take part.
    campaign : Campaign, optional
        Stores finished probes.
    folder : Path, optional
        Folder for traces of iterations; made if missing.
    leader : Leader, optional
        Leads the ranks of a launcher; without one, processes of this machine are started.
    rehearse : bool, optional
        Whether all ranks go through the plan without timing it, and the answers are those that the
        similar platform predicts.

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
        job = _write_job(plan, device, base, campaign, folder)
        if rehearse:
            job = _write_rehearsal(plan, base, campaign)
        if leader is not None:
            results = leader.run(job)
        else:
            results = run_processes(job, ranks=base.network.ranks, timeout=7200)
        found = read_answers(results[0])  # rank 0 has all answers
        if rehearse:
            found = replace(found, id=f"{REHEARSAL}, as {base.name} predicts")
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


def _write_job(
    plan: Sequence[Probe], device: str, base: Platform, campaign: Campaign | None, folder: Path
) -> dict[str, Any]:
    """What every rank does: time the plan on its GPU."""
    return {
        "task": "perfkit.measure.cuda:time_probes",
        "device": device,
        "probes": [write_probe(probe) for probe in plan],
        "folder": str(folder.resolve()),
        "kept": _name_kept(campaign),
        "ranks_per_node": base.network.ranks_per_node,
    }


def _write_rehearsal(
    plan: Sequence[Probe], base: Platform, campaign: Campaign | None
) -> dict[str, Any]:
    """What every rank does in a rehearsal: meet the others, and take the answers of the base."""
    answers = rehearse_answers(plan, base)
    return {
        "task": "perfkit.measure.replayed:replay_probes",
        "probes": [write_probe(probe) for probe in plan],
        "answers": [write_record(answer) for answer in answers.answers],
        "facts": write_record(answers.facts),
        "kept": _name_kept(campaign),
        "ranks_per_node": base.network.ranks_per_node,
    }


def _name_kept(campaign: Campaign | None) -> str:
    """The file that keeps finished probes; empty for none."""
    return str(campaign.file) if campaign and campaign.file else ""


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
