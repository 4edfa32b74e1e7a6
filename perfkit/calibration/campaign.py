"""Calibrate and check this machine, in campaigns that can be interrupted and continued.

`calibrate` measures, fits and writes a platform; `check` measures what it predicts. The steps of a
calibration, in reading order:

- of a CPU: plan (`perfkit.calibration.cpu_plan`), measure (`perfkit.calibration.cpu_measure`), fit
  (`perfkit.calibration.fit`, the table of contents of the fits);
- of GPUs: plan (`perfkit.calibration.cluster_plan`), measure (`perfkit.calibration.cluster_measure`),
  fit (`perfkit.calibration.cluster_fit`), context (`perfkit.calibration.cluster_context`);
- from traces of training steps: `perfkit.calibration.fit_traces`.

Measurements are records (`perfkit.measure.records`, `perfkit.measure.gpu_records`), whose files
`calibrate` writes beside the platform.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfkit.calibration.checks import Comparison, compare_run
from perfkit.calibration.cluster_fit import fit_cluster
from perfkit.calibration.cluster_measure import measure_cluster
from perfkit.calibration.cluster_plan import resize_base
from perfkit.calibration.cpu_measure import measure_platform, measure_samples
from perfkit.calibration.cpu_plan import ITERATION_SECONDS, START_SECONDS
from perfkit.calibration.fit import fit_platform
from perfkit.calibration.fit_traces import calibrate_traces
from perfkit.calibration.pace import name_disturbances
from perfkit.ground.files import LARGEST_TEXT, check_path, check_paths, reading
from perfkit.ground.targets import check_target, write_text
from perfkit.ground.units import check_choice, check_positive, check_type
from perfkit.measure.folders import Campaign, open_campaign, open_campaign_beside
from perfkit.measure.follower import Follower
from perfkit.measure.gpu_records import ClusterMeasurements, write_cluster
from perfkit.measure.launchers import LaunchedRanks, launched_ranks
from perfkit.measure.leader import Leader, lead
from perfkit.measure.machine import count_cores, describe_machine, list_versions
from perfkit.measure.processes import MeasurementError, check_processors, sharing_imports
from perfkit.measure.progress import Progress, follow_progress
from perfkit.measure.records import MeasuredRank, write_measurements
from perfkit.measure.samples import MODELS, Sample, draw_check
from perfkit.platform.gallery import Named, find_similar, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.sources import assemble_sources
from perfkit.prediction.predictor import predict


def _count_ranks(
    device: str, ranks: int | None, launched: LaunchedRanks | None, rehearse: bool
) -> int:
    """Ranks that were asked for; by default those of the launcher, two on two cores, or all
    GPUs."""
    if launched is not None:
        if ranks is not None and ranks != launched.ranks:
            raise ValueError(
                f"ranks is {ranks}; {launched.launcher} has started {launched.ranks}; leave ranks out"
            )
        return launched.ranks
    checked = "cpu" if rehearse else device
    if ranks is not None:
        return check_processors(int(check_positive("ranks", ranks, integer=True)), checked)
    if checked == "cpu":
        return min(2, count_cores())
    import torch

    _refuse_one_of_many_nodes()
    return check_processors(max(1, torch.cuda.device_count()), device)


def _refuse_one_of_many_nodes() -> None:
    """Refuse to measure one node of a job of Slurm that has several, if nobody said so."""
    nodes = os.environ.get("SLURM_NNODES", "")
    if nodes.isdigit() and int(nodes) > 1:
        raise ValueError(
            f"SLURM_NNODES is {nodes}, but srun has not started this process, so it would measure one "
            "node; write srun --ntasks-per-node=GPUS before it, or name ranks to measure this node "
            "alone (ranks=8, --ranks 8)"
        )


def calibrate(
    *,
    device: str = "cpu",
    base: Named | None = None,
    ranks: int | None = None,
    quick: bool = False,
    models: str = "standard",
    out: str | Path | None = None,
    measurements: str | Path | None = None,
    traces: str | Path | Sequence[str | Path] | None = None,
    nccl_logs: str | Path | Sequence[str | Path] | None = None,
    partial: bool = False,
    rehearse: bool = False,
    stop_early: bool = False,
    progress: bool | Progress = True,
) -> Platform:
    """Calibrate this machine: measure, fit, and return the platform.

    Parameters
    ----------
    device : str
        ``cpu`` or ``cuda``.
    base : Platform, str or Path, optional
        For GPUs: the most similar platform. It decides what to time, and its parts stay where
        nothing was timed. By default the gallery's node of the same device.
    ranks : int, optional
        Ranks, started as processes of this machine; by default 2 on two cores, or all GPUs [-].
    quick : bool
        Whether to take half the time on a CPU (two to three minutes on two cores), with wider
        intervals.
    models : str
        Families of iterations measured on a CPU: ``standard`` (DLRM, Transformer) or ``all`` (also
        XLNet, convolutional nets and data-parallel training; 15 iterations).
    out : str or Path, optional
        Platform file to write, with the raw measurements in a ``.measurements.json`` and the traces
        of a GPU in a folder ``.measurements.traces`` beside it.
    measurements : str or Path, optional
        Raw measurements of an earlier calibration, to fit again without measuring.
    traces : str, Path or sequence of them, optional
        Traces of steps whose kernels are fitted into the base, see
        `perfkit.calibration.fit_traces.calibrate_traces`.
    nccl_logs : str, Path or sequence of them, optional
        Logs of nccl-tests or another benchmark of collectives, files or folders, that replace
        collectives of the base. Nothing is measured.
    partial : bool
        Whether a log that breaks off is read up to there, with a warning.
    rehearse : bool
        For GPUs: whether to go the whole way without one. All ranks meet and exchange, and the
        answers are those that the base predicts, so the platform says nothing about this machine.
    stop_early : bool
        Whether to measure a CPU in about half the time: fewer sizes of kernels, and no more
        iterations of a family once more of them would move predictions by less than 3.5 %, see
        `perfkit.calibration.stopping`.
    progress : bool or Progress
        Whether to say which part runs, with a bar for each, and what it found.

    Returns
    -------
    platform : Platform
        With kernels, collectives, context and provenance.

    Raises
    ------
    ValueError
        For an unknown device, bad ranks or files, and a GPU that the gallery does not have.
    MeasurementError
        If a measuring process fails; finished measurements are kept and a rerun continues. Or if
        the measurements cannot be fitted; they are written to a file.
    """
    check_choice("device", device, ("cpu", "cuda"))
    check_choice("models", models, MODELS)
    check_type("partial", partial, bool)
    check_type("rehearse", rehearse, bool)
    check_type("stop_early", stop_early, bool)
    if partial and nccl_logs is None:
        raise ValueError("partial is True; it is for logs of nccl-tests, which nccl_logs names")
    if rehearse and (device != "cuda" or base is None):
        raise ValueError(
            "rehearse is True; it goes the way of GPUs as a base predicts it; take device='cuda' and "
            "name base, such as base='h100-sxm-8'"
        )
    if device == "cuda":
        given_for_cpus = (
            ("quick", quick),
            ("stop_early", stop_early),
            ("models", models != "standard"),
        )
        for argument, given in given_for_cpus:
            if given:
                raise ValueError(
                    f"{argument} is given; it says what to measure on a CPU, and GPUs have one plan; leave "
                    "it out"
                )
    sources = {"nccl_logs": nccl_logs, "traces": traces, "measurements": measurements}
    named = [name for name, source in sources.items() if source is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} are given; one is fitted at a time; leave one out")
    if traces is not None:
        check_paths("traces", traces)
    if nccl_logs is not None:
        check_paths("nccl_logs", nccl_logs)
    if measurements is not None:
        measurements = check_path("measurements", measurements)
    target = None if out is None else check_target("out", out, ".toml")
    if nccl_logs is None and traces is None and measurements is None:
        options = _Options(
            device=device,
            base=base,
            ranks=ranks,
            quick=quick,
            models=models,
            rehearse=rehearse,
            stop_early=stop_early,
            progress=follow_progress(progress),
        )
        platform = _calibrate_by_measuring(options, target)
    else:
        name = None if target is None else target.stem
        if nccl_logs is not None:
            platform = assemble_sources(
                base,
                name=name,
                nccl_logs=nccl_logs,
                partial=partial,
                progress=follow_progress(progress).shown,
            )
        elif traces is not None:
            platform = calibrate_traces(traces, base, name)
        elif measurements is not None:
            platform = _fit_raw(_read_measurements(Path(measurements)), base, name)
        if target is not None:
            platform.save(target)
    disturbed = platform.provenance.get("disturbances")
    if disturbed:
        warnings.warn(f"{disturbed}; close other programs and calibrate again", stacklevel=2)
    return platform


def _read_measurements(path: Path) -> dict[str, Any]:
    """Raw measurements of an earlier calibration; their traces may have moved with them."""
    with reading(path, "name the .measurements.json that calibrate wrote", most=LARGEST_TEXT):
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        check_type("the content", raw, dict)
        for row in raw.get("probes", ()):
            trace = row.get("trace")
            if trace and not Path(trace).exists():
                row["trace"] = str(path.with_suffix(".traces") / Path(trace).name)
    return raw


def _fit_raw(raw: Mapping[str, Any], base: Named | None, name: str | None) -> Platform:
    """Fit raw measurements: those of GPUs are times of probes."""
    if "probes" in raw:
        return fit_cluster(raw, base, name=name)
    return fit_platform(raw, name=name)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """What `calibrate` is asked to measure, see there."""

    device: str
    base: Named | None
    ranks: int | None
    quick: bool
    models: str
    rehearse: bool
    stop_early: bool
    progress: Progress


def _calibrate_by_measuring(options: _Options, target: Path | None) -> Platform:
    """Measure, fit and write, on this machine or on all ranks of a launcher. Rank 0 does it; the
    others do what it asks for, and return the same platform."""
    launched = launched_ranks()
    if launched is None:
        return _measure_and_fit(options, target, None)
    if launched.rank > 0:
        ending = Follower(launched).work()
        if ending.code or ending.answer is None:
            raise MeasurementError(f"{launched.name}: rank 0 has failed, and says why")
        return Platform.from_toml(ending.answer)
    with lead(launched) as leader:
        platform = _measure_and_fit(options, target, leader)
        leader.end(0, platform.to_toml())
    return platform


def _measure_and_fit(options: _Options, target: Path | None, leader: Leader | None) -> Platform:
    """Measure this machine, fit, and write the measurements and the platform. Measurements that
    cannot be fitted are written in any case."""
    raw_file = (target or Path("perfkit-platform.toml")).with_suffix(".measurements.json")
    if target is not None:
        check_target("the file of the raw measurements", raw_file)
    launched = None if leader is None else leader.launched
    ranks = _count_ranks(options.device, options.ranks, launched, options.rehearse)
    if options.device == "cuda":
        campaign, measured = _measure_gpus(options, ranks, target, raw_file, leader)
        raw = write_cluster(measured)
    else:
        about = ["calibrate", options.device, ranks, options.quick, options.models]
        if options.stop_early:
            about.append("stop_early")
        campaign = open_campaign(*about, progress=options.progress.shown)
        with sharing_imports():
            measurements = measure_platform(
                campaign=campaign,
                ranks=ranks,
                quick=options.quick,
                models=options.models,
                stop_early=options.stop_early,
                leader=leader,
                progress=options.progress,
            )
        raw = write_measurements(measurements)
    if target is not None:
        write_text(raw_file, json.dumps(raw))
    try:
        platform = _fit_raw(raw, options.base, None if target is None else target.stem)
        if target is not None:
            platform.save(target)
    except ValueError as error:
        write_text(raw_file, json.dumps(raw))
        raise MeasurementError(
            f"{error}; no measurement is lost: when the cause is removed, perfkit calibrate "
            f"--measurements {raw_file} --out PLATFORM.toml fits it without measuring again"
        ) from error
    campaign.close()  # the next call measures anew
    return platform


def _measure_gpus(
    options: _Options, ranks: int, target: Path | None, raw_file: Path, leader: Leader | None
) -> tuple[Campaign, ClusterMeasurements]:
    """Measure GPUs; returns the campaign, which keeps the measurements until they are written, and
    them.

    What ranks of a launcher have measured is kept beside the platform: the next job may run on
    other nodes, which have other caches.
    """
    base = options.base
    if count_cores() == 1 and not options.rehearse:
        warnings.warn(
            "this process may use one core, where the threads of PyTorch and NCCL wait for each other, "
            "so the host seems slow; start with srun --cpus-per-task=8, or mpirun --bind-to none",
            stacklevel=2,
        )
    if base is None:
        import torch

        base = find_similar(torch.cuda.get_device_name())
    local = ranks if leader is None else leader.launched.ranks_per_node
    where = resize_base(base, local, ranks // local)
    about = ("calibrate", "cuda", where.to_toml(), local, ranks, options.rehearse)
    if leader is not None and target is not None:
        campaign = open_campaign_beside(target, *about, progress=options.progress.shown)
    else:
        campaign = open_campaign(*about, progress=options.progress.shown)
    measured = measure_cluster(
        "cuda",
        where,
        campaign,
        raw_file.with_suffix(".traces"),
        leader=leader,
        rehearse=options.rehearse,
    )
    return campaign, measured


def check(
    platform: Platform | str | Path,
    *,
    seed: int = 0,
    models: str = "standard",
    samples: Sequence[Sample] | None = None,
    seconds: float = 0.8,
    progress: bool | Progress = True,
) -> Comparison:
    """Predict random configurations that calibration never saw, measure them, and compare.

    Parameters
    ----------
    platform : Platform, str or Path
        A calibration of this machine.
    seed : int
        Seed of the configurations [-].
    models : str
        Families of the configurations, see `calibrate`.
    samples : sequence of Sample, optional
        Configurations to take instead of drawing them.
    seconds : float
        Time for each configuration and pass; there are two passes [s].
    progress : bool or Progress
        Whether to show a progress bar; one with parts has a part ``check``.

    Returns
    -------
    comparison : Comparison
        Predicted and measured times, with the noise floor: the difference of the two passes.

    Raises
    ------
    MeasurementError
        If a measuring process fails; finished measurements are kept and a rerun continues.
    """
    where = load_platform(platform)
    check_positive("seed", seed, integer=True, zero=True)
    kind = where.device.kind
    room = count_cores() if kind == "cpu" else where.network.ranks
    if samples is not None:
        chosen = list(samples)
    elif min(where.network.ranks, room) >= 2:
        chosen = draw_check(seed, models=models)
    else:
        chosen = draw_check(seed, models=models, hybrid=0, ddp=0)
    check_processors(max((sample.ranks for sample in chosen), default=1), kind)
    if room < min(2, where.network.ranks):
        warnings.warn(
            "iterations on two ranks are left out: this process may use one core", stacklevel=2
        )
    # before measuring anything
    predictions = [predict(s.workload, where, ranks=s.ranks, plan=s.plan) for s in chosen]
    about = [(s.name, s.describe(), s.ranks) for s in chosen]
    told = follow_progress(progress)
    says_part = any(part.name == "check" for part in told.parts)
    if says_part:
        told.begin("check")
    campaign = open_campaign("check", where.name, seed, about, progress=told.shown)
    with sharing_imports():
        measured = measure_samples(
            campaign, chosen, device=kind, seconds=seconds, stage="check", passes=2
        )
    timed_ranks: list[MeasuredRank] = []
    for row in measured:
        for ranks in row.passes:
            timed_ranks.extend(ranks)
    disturbed = name_disturbances(iterations=timed_ranks)
    runs = tuple(
        compare_run(row.sample, prediction, row.passes, where.context.paces)
        for row, prediction in zip(measured, predictions, strict=True)
    )
    campaign.close()
    comparison = Comparison(runs, where.name, {**describe_machine(), **disturbed}, list_versions())
    if says_part:
        figures = comparison.figures["all"]
        told.end(
            f"{len(runs)} configurations, {figures['mean']:.1%} mean error, {figures['inside']:.0%} inside "
            "their 80 % interval"
        )
    return comparison


def expect_check(samples: Sequence[Sample], *, seconds: float = 0.8) -> float:
    """Expect how long `check` takes on the machine of docs/formulas.md, table 7.2.

    Parameters
    ----------
    samples : sequence of Sample
        Configurations.
    seconds : float
        Time for each configuration and pass [s].

    Returns
    -------
    seconds : float
        Of both passes [s].
    """
    passes = 2
    return START_SECONDS + passes * len(samples) * (ITERATION_SECONDS + seconds)
