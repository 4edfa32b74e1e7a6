"""Measure what a platform of CPUs is fitted to: the second step of a calibration.

`measure_platform` is the table of contents: working sets, kernels, collectives and iterations, as
many as `perfkit.calibration.cpu_plan` says, and as `perfkit.calibration.stopping` needs. Every measurement runs in processes of its own. What it
returns is fitted by `perfkit.calibration.fit`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from perfkit.calibration.cpu_plan import RARE_SHARE, CpuPlan, list_parts, plan_cpu
from perfkit.calibration.findings import (
    describe_collectives,
    describe_iterations,
    describe_kernels,
    describe_memory,
    describe_moves,
)
from perfkit.calibration.fit import fit_platform
from perfkit.calibration.fit_caches import find_caches
from perfkit.calibration.stopping import list_moving_families
from perfkit.measure.folders import Campaign
from perfkit.measure.kernels import Case, draw_cases
from perfkit.measure.leader import Leader
from perfkit.measure.machine import describe_machine, gather_facts, list_versions
from perfkit.measure.processes import run_processes
from perfkit.measure.progress import Progress
from perfkit.measure.rare_kernels import draw_rare_cases
from perfkit.measure.records import (
    LEAST_CORE_SHARE,
    CollectiveSamples,
    KernelTiming,
    LadderStep,
    MachineMeasurements,
    MeasuredCollective,
    MeasuredIteration,
    MeasuredKernel,
    MeasuredRank,
    read_measured_ranks,
    read_record,
    write_record,
)
from perfkit.measure.samples import Sample
from perfkit.measure.timing import LARGEST, find_disagreement, summarize_samples
from perfkit.workloads.graph import COLLECTIVES

#: Kernels, and rare ones, that one process times [-].
_GROUP = 110
_RARE_GROUP = 250


def measure_kernels(
    campaign: Campaign,
    *,
    seed: int = 0,
    density: float = 1.0,
    seconds: float = 0.04,
    cache: float = 0.0,
    rare_density: float = 0.0,
) -> list[MeasuredKernel]:
    """Time isolated kernels in new processes.

    Parameters
    ----------
    campaign : Campaign
        Keeps finished measurements.
    seed : int
        Seed of the sizes; other seeds give held-out sizes [-].
    density : float
        Share of the full number of sizes [-].
    seconds : float
        Time for each size [s].
    cache : float
        Size of the last cache, see `perfkit.measure.kernels.draw_cases` [B].
    rare_density : float
        Share of the full number of sizes of `perfkit.measure.rare_kernels`; 0 for none [-].

    Returns
    -------
    kernels : list of MeasuredKernel
        In the order in which they were drawn.
    """
    cases = draw_cases(seed, density=density, cache=cache)
    jobs = {}
    for number, group in enumerate(_group(cases, _GROUP)):
        job = {"task": "kernels", "seconds": seconds, "cases": group}
        jobs[f"{seed}-{cache:.0f}-{number}"] = partial(run_processes, job)
    if rare_density:
        rare = draw_rare_cases(seed, density=rare_density)
        for number, group in enumerate(_group(rare, _RARE_GROUP)):
            job = {"task": "kernels", "seconds": RARE_SHARE * seconds, "cases": group}
            jobs[f"{seed}-rare-{number}"] = partial(run_processes, job)
        cases = [*cases, *rare]
    rows: list[Any] = []
    for ranks in campaign.run("kernels", jobs).values():
        rows.extend(ranks[0])
    timings = [read_record(KernelTiming, row, f"kernels[{i}]") for i, row in enumerate(rows)]
    return [MeasuredKernel.join(case, timing) for case, timing in zip(cases, timings, strict=True)]


def _group(cases: Sequence[Case], most: int) -> list[list[list[Any]]]:
    """Kernels of each process, as plain JSON."""
    return [
        [list(astuple(case)) for case in cases[start : start + most]]
        for start in range(0, len(cases), most)
    ]


def measure_collectives(
    campaign: Campaign, *, ranks: int, seconds: float = 0.35, leader: Leader | None = None
) -> list[MeasuredCollective]:
    """Time collectives over gloo, between ranks of this machine or those that a launcher has
    started.

    Parameters
    ----------
    campaign : Campaign
        Keeps finished measurements.
    ranks : int
        Ranks [-].
    seconds : float
        Time for each operation and size [s].
    leader : Leader, optional
        Leads the ranks of a launcher; without one, processes of this machine are started.

    Returns
    -------
    collectives : list of MeasuredCollective
        Times of the slowest rank, by operation and size.
    """
    sizes = [int(4 * 2**power) for power in range(8, 23)]
    job = {"task": "collectives", "operations": COLLECTIVES, "sizes": sizes, "seconds": seconds}
    if leader is not None:
        jobs = {f"{ranks}": partial(leader.run, job)}
    else:
        jobs = {f"{ranks}": partial(run_processes, job, ranks=ranks)}
    by_rank = campaign.run("collectives", jobs)[f"{ranks}"]
    collectives = []
    for number, rows in enumerate(zip(*by_rank, strict=True)):
        place = f"collectives[{number}]"
        collectives.append(
            _join_ranks([read_record(CollectiveSamples, row, place) for row in rows])
        )
    return collectives


def _join_ranks(ranks: Sequence[CollectiveSamples]) -> MeasuredCollective:
    """Times of a collective on its slowest rank, call by call."""
    slowest = np.max([rank.samples for rank in ranks], axis=0)
    core_share = min(rank.core_share for rank in ranks)
    timing = summarize_samples(slowest, core_share)
    return MeasuredCollective(
        **timing.summary,
        operation=ranks[0].operation,
        nbytes=ranks[0].nbytes,
        core_share=core_share,
        mean=float(np.mean(slowest)),
    )


@dataclass(frozen=True)
class MeasuredSample:
    """A configuration with what was measured of it.

    Parameters
    ----------
    sample : Sample
        The configuration.
    passes : list of list of MeasuredRank
        For each pass what every rank saw.
    """

    sample: Sample
    passes: list[list[MeasuredRank]]


def measure_samples(
    campaign: Campaign,
    samples: Sequence[Sample],
    *,
    device: str,
    seconds: float,
    operations: int = 0,
    stage: str = "iterations",
    passes: int = 1,
) -> list[MeasuredSample]:
    """Time whole iterations, each configuration in its own processes.

    Parameters
    ----------
    campaign : Campaign
        Keeps finished measurements.
    samples : sequence of Sample
        Configurations.
    device : str
        ``cpu`` or ``cuda``.
    seconds : float
        Time for each configuration and pass [s].
    operations : int
        Iterations of each pass that also time their operations [-].
    stage : str
        Name shown.
    passes : int
        Passes over all configurations [-].

    Returns
    -------
    measured : list of MeasuredSample
        One for each configuration.
    """
    job = {"task": "iteration", "seconds": seconds, "operations": operations, "device": device}
    jobs = {}
    for number in range(passes):
        for sample in samples:
            jobs[f"{number}-{sample.name}"] = partial(
                _measure_steadily, job | sample.describe(), sample.ranks
            )
    results = campaign.run(stage, jobs)
    measured = []
    for sample in samples:
        names = [f"{number}-{sample.name}" for number in range(passes)]
        ranks = [read_measured_ranks(results[name], f"{stage} {name}") for name in names]
        measured.append(MeasuredSample(sample, ranks))
    return measured


def _measure_steadily(job: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Measure again if the halves of a run differ by over 10 %, keep the better run, and flag
    disturbed results. What every rank saw, as plain JSON."""

    def measure() -> list[MeasuredRank]:
        return read_measured_ranks(run_processes(job, ranks=ranks), "iteration")

    def disagree(seen: Sequence[MeasuredRank]) -> float:
        return max(find_disagreement(rank) for rank in seen)

    best = measure()
    if disagree(best) > 0.1:
        best = min((best, measure()), key=disagree)
    smallest_share = min(rank.share_of_core for rank in best)
    disturbed = disagree(best) > 0.1 or smallest_share < LEAST_CORE_SHARE
    return [write_record(replace(rank, flagged=disturbed)) for rank in best]


def measure_platform(
    campaign: Campaign,
    *,
    ranks: int = 1,
    quick: bool = False,
    models: str = "standard",
    stop_early: bool = False,
    leader: Leader | None = None,
    progress: Progress | None = None,
) -> MachineMeasurements:
    """Measure all that a CPU platform is fitted to: kernels, collectives and small iterations.

    Parameters
    ----------
    campaign : Campaign
        Keeps finished measurements.
    ranks : int
        Ranks of collectives and parallel iterations [-].
    quick : bool
        Whether to take fewer sizes and iterations.
    models : str
        One of `perfkit.measure.samples.MODELS`.
    stop_early : bool
        Whether to take fewer sizes, and to stop measuring iterations when their fit no longer moves.
    leader : Leader, optional
        Leads the ranks of a launcher.
    progress : Progress, optional
        Says what runs and what it found; by default nothing is said.

    Returns
    -------
    measurements : MachineMeasurements
        Input of `perfkit.calibration.fit.fit_platform`.

    Raises
    ------
    MeasurementError
        If a measuring process fails.
    """
    plan = plan_cpu(ranks=ranks, quick=quick, models=models, stop_early=stop_early)
    progress = progress or Progress(shown=False)
    progress.plan(list_parts(plan, ranks))
    facts = gather_facts()
    progress.begin("memory")
    ladder = _measure_ladder(campaign, plan, facts["free_memory"].value or LARGEST)
    progress.end(describe_memory(ladder))
    progress.begin("kernels")
    kernels = measure_kernels(
        campaign,
        density=plan.kernel_density,
        seconds=plan.kernel_seconds,
        cache=_find_last_cache(ladder),
        rare_density=plan.kernel_density,
    )
    progress.end(describe_kernels(kernels))
    collectives = []
    if ranks > 1:
        progress.begin("collectives")
        collectives = measure_collectives(
            campaign, ranks=ranks, seconds=plan.collective_seconds, leader=leader
        )
        progress.end(describe_collectives(collectives))
    machine, versions = describe_machine(), list_versions()
    measurements = MachineMeasurements(
        id=_name_measurements(machine, versions, ranks, campaign.day),
        device="cpu",
        ranks=ranks,
        date=campaign.day,
        ranks_per_node=leader.launched.ranks_per_node if leader else ranks,
        machine=machine,
        versions=versions,
        facts=facts,
        ladder=ladder,
        kernels=kernels,
        collectives=collectives,
        iterations=[],
    )
    progress.begin("iterations")
    iterations = _measure_rounds(campaign, plan, measurements, progress)
    # the oldest measurement in use may be an iteration
    return replace(
        measurements,
        id=_name_measurements(machine, versions, ranks, campaign.day),
        date=campaign.day,
        iterations=iterations,
    )


def _name_measurements(
    machine: Mapping[str, str], versions: Mapping[str, str], ranks: int, day: str
) -> str:
    """What measurements are called where they are a source."""
    return f"perfkit {versions.get('perfkit', '')} on {machine['processor']}, {ranks} ranks, {day}"


def _measure_rounds(
    campaign: Campaign, plan: CpuPlan, measurements: MachineMeasurements, progress: Progress
) -> list[MeasuredIteration]:
    """Time iterations, round by round; families whose fit no longer moves are left out of later
    rounds, if the plan says so."""
    moving = {sample.family for sample in plan.samples}
    iterations: list[MeasuredIteration] = []
    for number, samples in enumerate(plan.rounds):
        chosen = [sample for sample in samples if sample.family in moving]
        if not chosen:
            continue
        measured = measure_samples(
            campaign,
            chosen,
            device="cpu",
            seconds=plan.iteration_seconds,
            operations=plan.timed_operations,
        )
        iterations += [_keep_first_pass(row) for row in measured]
        if not plan.stops_early:
            continue
        try:
            context = fit_platform(replace(measurements, iterations=iterations)).context
        except ValueError as error:
            # measuring goes on: a calibration keeps what it cannot fit, and says how to fit it later
            progress.tell(f"  {len(iterations)} configurations so far; {error}")
            continue
        moves = list_moving_families(context, plan.samples)
        moving = set(moves)
        is_last = number == len(plan.rounds) - 1
        if is_last or not moving:
            progress.end(describe_iterations(context, len(iterations)))
            return iterations
        progress.tell(f"  {describe_moves(moves, len(iterations))}")
    progress.end(f"{len(iterations)} configurations")
    return iterations


def _measure_ladder(campaign: Campaign, plan: CpuPlan, free_memory: float) -> list[LadderStep]:
    """Time passes over working sets, as large as the plan and the free memory allow [B]."""
    largest = min(plan.largest_working_set, plan.memory_share * free_memory)
    job = {"task": "ladder", "largest": largest}

    def time_ladder() -> Any:
        [result] = run_processes(job)
        return result

    rows = campaign.run("memory", {"ladder": time_ladder})["ladder"]
    return [read_record(LadderStep, row, f"ladder[{i}]") for i, row in enumerate(rows)]


def _find_last_cache(ladder: Sequence[LadderStep]) -> float:
    """Size of the last cache that the working sets show, at most a quarter of the largest; 0 if they
    show none [B]."""
    levels, _, largest = find_caches(ladder)
    if not levels:
        return 0.0
    return min(levels[-1], largest / 4)


def _keep_first_pass(measured: MeasuredSample) -> MeasuredIteration:
    """What a file of measurements keeps of a configuration: its first pass, without the names of
    operations."""
    sample = measured.sample
    about = sample.describe()
    return MeasuredIteration(
        name=sample.name,
        family=sample.family,
        workload=about["workload"],
        owners=about["owners"],
        runs=[replace(rank, names=None) for rank in measured.passes[0]],
    )
