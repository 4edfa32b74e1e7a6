"""What each rank of a trace took for each step before it waited for others."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from perfkit.calibration.activity import account, fill_time
from perfkit.calibration.collectives import COLLECTIVE
from perfkit.ground.results import Table
from perfkit.ground.units import escape, format_count
from perfkit.readers.kineto import TraceFile
from perfkit.readers.measured_jitter import Jitter, find_jitter

_NS = 1e-9


@dataclass(frozen=True)
class _Step:
    """One step of one rank.

    Parameters
    ----------
    time : float
        From its begin to its end [s].
    waited : float
        Waits for other ranks that nothing hides [s].
    communicated : float
        The rest of collectives that nothing hides [s].
    """

    time: float
    waited: float
    communicated: float


def measure_jitter(
    files: Sequence[TraceFile],
    works: Sequence[Table],
    steps: Table,
    collectives: Table,
    basis: str,
) -> Jitter:
    """Find how much the time of a rank varies in a trace.

    Parameters
    ----------
    files : sequence of TraceFile
        One per rank.
    works : sequence of polars.DataFrame
        Work of each rank, from `perfkit.calibration.activity.list_work`.
    steps : polars.DataFrame
        Of `Trace.steps`; those that are kept count.
    collectives : polars.DataFrame
        Of `perfkit.calibration.collectives.list_collectives`.
    basis : str
        How the steps were measured, see `Trace`.

    Returns
    -------
    jitter : Jitter
        Of a step without its waits where all collectives were met by the other ranks, otherwise without
        all that collectives take beside kernels.

    Raises
    ------
    ValueError
        For one step of one rank, and for ranks that have no step in common.
    """
    kept = steps.filter("kept")
    shared = _find_shared_steps(kept)
    if not shared:
        raise ValueError(
            "the ranks have no step in common that counts, see Trace.steps(); record the same steps on each of them"
        )
    is_met = collectives["transfer_s"].null_count() == 0
    is_smooth = False
    measured: dict[int, list[_Step]] = {}
    for file, work in zip(files, works, strict=True):
        rank = int(file.rank or 0)
        own = collectives.filter(rank=rank)
        windows = kept.filter(pl.col("step").is_in(shared), rank=rank).sort("step")
        if basis == "kernels":
            from_kernel = _find_windows(file, windows)
            is_smooth = is_smooth or from_kernel is None
            windows = windows if from_kernel is None else from_kernel
        measured[rank] = _time_steps(file, work, own, windows)
    times: dict[int, list[float]] = {}
    whole, waited = [], []
    for rank, of_rank in measured.items():
        times[rank] = []
        for step in of_rank:
            rest = step.time - step.waited
            whole.append(rest)
            waited.append(step.waited)
            times[rank].append(rest if is_met else rest - step.communicated)
    left_out = steps["step"].n_unique() - len(shared)
    notes = _describe_contents(files, is_met, is_smooth, left_out, len(collectives))
    mean = float(np.mean(whole))
    if mean <= 0:
        raise ValueError(
            "the steps of the ranks hold nothing but waits for other ranks, see Trace.idle(); record whole steps"
        )
    share = None
    if is_met and len(collectives):
        share = float(np.mean(waited)) / mean
    return find_jitter(_name_trace(files), times, mean, waited=share, notes=notes)


def _find_windows(file: TraceFile, steps: Table) -> "Table | None":
    """Windows from one kernel to the same kernel of the next step: the medians over kernels of
    `Trace.steps` smooth what varies.

    It is the first that runs once in every step on the stream that computes longest, as others may run ahead.
    None where no kernel runs so.
    """
    kernels = file.events.filter(pl.col("cat") == "kernel", pl.col("iteration") >= 0)
    kernels = kernels.filter(~pl.col("name").str.contains(f"(?i){COLLECTIVE.pattern}"))
    busy = kernels.group_by("stream").agg(pl.sum("dur")).sort("dur", "stream", descending=True)
    if busy.is_empty():
        return None
    kernels = kernels.filter(stream=busy["stream"][0])
    once = kernels.filter(pl.len().over("iteration", "name") == 1)
    following = sorted(kernels["iteration"].unique().to_list())
    counts = once.group_by("name").agg(pl.len(), pl.min("ts"))
    everywhere = counts.filter(pl.col("len") == len(following)).sort("ts", "name")
    if everywhere.is_empty():
        return None
    starts = once.filter(name=everywhere["name"][0]).sort("iteration")
    windows = starts.select(
        step="iteration", begin_ns="ts", time_ns=pl.col("ts").shift(-1) - pl.col("ts")
    )
    windows = steps.select("step").join(windows, on="step", how="left", maintain_order="left")
    if windows["time_ns"].null_count() or (windows["time_ns"] <= 0).any():
        return None
    return windows


def _find_shared_steps(kept: Table) -> list[int]:
    """Numbers of the steps that every rank has."""
    ranks = kept["rank"].n_unique()
    counts = kept.group_by("step").agg(pl.col("rank").n_unique()).filter(rank=ranks)
    return sorted(counts["step"].to_list())


def _time_steps(file: TraceFile, work: Table, collectives: Table, windows: Table) -> list[_Step]:
    """Split each step of a rank."""
    filled = fill_time(file, work, collectives)
    is_waiting = (filled["role"] == "waiting").to_numpy()
    is_communication = (filled["role"] == "communication").to_numpy()
    steps = []
    for begin, time in windows.select("begin_ns", "time_ns").iter_rows():
        own = account(filled, begin, begin + time) * _NS
        steps.append(
            _Step(time * _NS, float(own[is_waiting].sum()), float(own[is_communication].sum()))
        )
    return steps


def _name_trace(files: Sequence[TraceFile]) -> str:
    """Name a trace by its first file."""
    name = escape(files[0].source, 60)
    if len(files) > 1:
        name += f" and {len(files) - 1} more"
    return name


def _describe_contents(
    files: Sequence[TraceFile], is_met: bool, is_smooth: bool, left_out: int, collectives: int
) -> list[str]:
    """Say what the times contain."""
    notes = ["the noise of the profiler counts: it slows the host, and not always equally"]
    if left_out:
        notes.append(
            f"{format_count(left_out, 'step')} left out, such as the first, in which the profiler starts, see steps()"
        )
    if is_smooth:
        notes.append(
            "no kernel runs once in every step, so that steps are medians over kernels, which smooth what varies"
        )
    if not is_met:
        notes.append(
            "not all collectives were met by other ranks that were read: what collectives take beside kernels is left "
            "out, with its waits and with what the network varies"
        )
    elif collectives and len(files) > 1:
        notes.append("a rank's own time is its step without the waits for other ranks")
    return notes
