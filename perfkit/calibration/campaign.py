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
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfkit.calibration.checks import Comparison, compare_run
from perfkit.calibration.cluster_fit import fit_cluster
from perfkit.calibration.cluster_measure import measure_cluster
from perfkit.calibration.cluster_plan import resize_base
from perfkit.calibration.cpu_measure import measure_platform, measure_samples
from perfkit.calibration.fit import fit_platform
from perfkit.calibration.fit_traces import calibrate_traces
from perfkit.calibration.pace import name_disturbances
from perfkit.ground.files import LARGEST_TEXT, check_path, check_paths, reading
from perfkit.ground.targets import check_target, write_text
from perfkit.ground.units import check_choice, check_positive, check_type
from perfkit.measure.folders import Campaign, open_campaign
from perfkit.measure.gpu_records import ClusterMeasurements, write_cluster
from perfkit.measure.machine import count_cores, describe_machine, list_versions
from perfkit.measure.processes import (
    LaunchedRanks,
    MeasurementError,
    check_processors,
    launched_ranks,
)
from perfkit.measure.records import MeasuredRank, write_measurements
from perfkit.measure.samples import MODELS, Sample, draw_check
from perfkit.platform.gallery import Named, find_similar, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.sources import assemble_sources
from perfkit.prediction.predictor import predict


def _count_ranks(device: str, ranks: int | None) -> int:
    """Ranks that were asked for; by default those of the launcher, two on two cores, or all
    GPUs."""
    if ranks is not None:
        return check_processors(int(check_positive("ranks", ranks, integer=True)), device)
    launched = launched_ranks()
    if launched is not None:
        return launched.ranks
    if device == "cpu":
        return min(2, count_cores())
    import torch

    return check_processors(max(1, torch.cuda.device_count()), device)


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
    progress: bool = True,
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
    progress : bool
        Whether to show a bar for each stage.

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
    if partial and nccl_logs is None:
        raise ValueError("partial is True; it is for logs of nccl-tests, which nccl_logs names")
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
        platform = _measure_and_fit(device, base, ranks, quick, models, target, progress)
    else:
        name = None if target is None else target.stem
        if nccl_logs is not None:
            platform = assemble_sources(
                base, name=name, nccl_logs=nccl_logs, partial=partial, progress=progress
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


def _measure_and_fit(
    device: str,
    base: Named | None,
    ranks: int | None,
    quick: bool,
    models: str,
    target: Path | None,
    progress: bool,
) -> Platform:
    """Measure this machine, fit, and write the measurements and the platform. Measurements that
    cannot be fitted are written in any case."""
    raw_file = (target or Path("perfkit-platform.toml")).with_suffix(".measurements.json")
    if target is not None:
        check_target("the file of the raw measurements", raw_file)
    ranks = _count_ranks(device, ranks)
    if device == "cuda":
        campaign, measured = _measure_gpus(base, ranks, raw_file.with_suffix(".traces"), progress)
        raw = write_cluster(measured)
    else:
        campaign = open_campaign("calibrate", device, ranks, quick, models, progress=progress)
        raw = write_measurements(
            measure_platform(campaign=campaign, ranks=ranks, quick=quick, models=models)
        )
    if target is not None:
        write_text(raw_file, json.dumps(raw))
    try:
        platform = _fit_raw(raw, base, None if target is None else target.stem)
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
    base: Named | None, ranks: int, folder: Path, progress: bool
) -> tuple[Campaign, ClusterMeasurements]:
    """Measure GPUs; returns the campaign, which keeps the measurements until they are written, and
    them."""
    import torch

    launched = launched_ranks() or LaunchedRanks(rank=0, ranks=ranks, ranks_per_node=ranks)
    local = launched.ranks_per_node
    where = resize_base(base or find_similar(torch.cuda.get_device_name()), local, ranks // local)
    if launched.rank:
        campaign = Campaign(None, progress=False)
    else:
        options = ("calibrate", "cuda", where.name, local, ranks)
        campaign = open_campaign(*options, progress=progress)
    return campaign, measure_cluster("cuda", where, campaign, folder)


def check(
    platform: Platform | str | Path,
    *,
    seed: int = 0,
    models: str = "standard",
    samples: Sequence[Sample] | None = None,
    seconds: float = 0.8,
    progress: bool = True,
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
    progress : bool
        Whether to show a progress bar.

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
    campaign = open_campaign("check", where.name, seed, about, progress=progress)
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
    return Comparison(runs, where.name, {**describe_machine(), **disturbed}, list_versions())
