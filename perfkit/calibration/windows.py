"""What the steps of a trace were spent on: work that nothing hides, waiting, and idle time by its cause."""

import numpy as np
import polars as pl

from perfkit.calibration.activity import BLOCKING
from perfkit.ground.results import Table
from perfkit.ground.units import escape
from perfkit.readers.trace import DEVICE, TraceFile, find_iterations

#: What hides what: of several that go on at a time, the first counts. The device works in the first four.
ROLES = ("compute", "communication", "waiting", "copies", "queued", "synchronisation", "loading", "host", "rest")
#: Annotations in which the host loads data.
_LOADING = r"DataLoader\)#"
#: A step that takes so many times the median is left out as stalled [-], see formulas, table 6.2.
_STALLED = 1.5


def list_steps(file: TraceFile, basis: str) -> Table:
    """Steps of a rank: rank, step, begin, time [ns], time_s [s], kept, and the reason where it is not."""
    found, span = find_iterations(file.events), file.events
    if basis == "kernels":  # one after the other: of a step that is prefetched, the first kernels come early
        time = pl.col("period").round().cast(pl.Int64)
        begin = pl.col("begin").first() + time.cum_sum() - time
        rows = found.drop_nulls("period").select("iteration", begin, time, "allocations")
    elif basis == "host step":
        worked = (pl.col("kernels") > 0) | (pl.col("kernels").max() == 0)
        rows = found.filter(worked).select("iteration", "ts", "dur", "allocations")
    else:
        span = span.filter(pl.col("cat").is_in(DEVICE)) if basis == "device span" else span
        time = (pl.col("ts") + pl.col("dur")).max() - pl.col("ts").min()
        rows = span.select(step=pl.lit(-1), begin=pl.min("ts"), time=time, allocations=pl.lit(0)).drop_nulls()
    if rows.is_empty():
        raise ValueError(f"basis is {basis!r}, which {escape(file.source)} does not have; leave it out")
    rows.columns = ["step", "begin", "time", "allocations"]
    slow, taken = pl.col("time") / pl.median("time"), pl.col("allocations")
    reason = (
        pl.when((pl.int_range(pl.len()) == 0) & (pl.len() > 2)).then(pl.lit("the first, in which the profiler starts"))
        .when((taken > 0) & (taken == 0).any()).then(pl.lit("device memory was taken or given back in it"))
        .when(slow > _STALLED).then(pl.format("stalled: {} times the median", slow.round(1)))
        .otherwise(pl.lit(""))
    )  # fmt: skip
    left = pl.col("reason") != ""
    about = {"time_s": 1e-9 * pl.col("time"), "kept": ~left | left.all(), "rank": pl.lit(file.rank, pl.Int64)}
    rows = rows.with_columns(reason=reason).with_columns(**about)
    return rows.select("rank", "step", "begin", "time", "time_s", "kept", "reason")


def fill_time(file: TraceFile, work: Table, meetings: Table) -> Table:
    """Put beside the work of a rank what else its time may have gone into, so that no time is without a role.

    Parameters
    ----------
    file : TraceFile
        One rank.
    work : polars.DataFrame
        Of `perfkit.calibration.activity.list_work`.
    meetings : polars.DataFrame
        Its collectives, of `perfkit.calibration.meetings.list_collectives`.

    Returns
    -------
    frame : polars.DataFrame
        Work with more rows and roles: waiting, the first part of a collective, for other ranks; queued, from the launch
        of work to its start; synchronisation, from when the host waits for the device to its next launch; loading of
        data; host, between works, where the next was not launched; rest, after the last.
    """
    start, finish, ends = pl.col("start"), pl.col("end"), pl.col("ts") + pl.col("dur")
    both = work.join(meetings.select("index", "waiting_s"), on="index", how="left", maintain_order="left")
    ready, events = start + (pl.col("waiting_s") * 1e9).fill_null(0).round().cast(pl.Int64), file.events
    known = pl.when(pl.col("launched") >= 0).then("launched").otherwise(start)
    spans = {
        "waiting": (start, ready),
        "queued": (known, start),
        "host": (finish.cum_max().shift(1).fill_null(start), start),
    }
    frames = [both.with_columns(start=ready)]
    for role, (begin, end) in spans.items():
        frames.append(both.with_columns(role=pl.lit(role), kind=pl.lit(role), start=begin, end=end))
    launches = events.filter((pl.col("index_correlation") >= 0) & pl.col("name").str.contains("Launch")).select("ts")
    host = events.filter(pl.col("stream") < 0).select("name", start="ts", end=ends)
    waits = host.filter(pl.col("name").str.contains(BLOCKING)).sort("end")
    waits = waits.join_asof(launches, left_on="end", right_on="ts", strategy="forward", coalesce=False)
    waits = waits.with_columns(end=pl.max_horizontal("end", "ts")).drop("ts")
    whole = events.select(name=pl.lit(""), start=pl.min("ts"), end=ends.max())
    others = {"synchronisation": waits, "loading": host.filter(pl.col("name").str.contains(_LOADING)), "rest": whole}
    for role, frame in others.items():
        kind, nothing = "host" if role == "rest" else role, pl.lit("")
        frames.append(frame.with_columns(role=pl.lit(role), kind=pl.lit(kind), phase=nothing, module=nothing))
    filled = pl.concat(frames, how="diagonal").filter(finish > start).with_columns(rank=pl.lit(file.rank, pl.Int64))
    return filled.sort("start", maintain_order=True)


def account(work: Table, begin: int, end: int) -> np.ndarray:
    """Part of a window of time that each work has for itself: of works of one role the first counts.

    Parameters
    ----------
    work : polars.DataFrame
        role, one of `ROLES`; start, end [ns], in order of start.
    begin, end : int
        The window [ns].

    Returns
    -------
    own : array
        Whole nanoseconds, which sum to what any work covers [ns].
    """
    starts, ends = (work[name].to_numpy().clip(begin, end) for name in ("start", "end"))
    own, roles = np.zeros(len(work), dtype=np.int64), work["role"].to_numpy()
    edges = np.unique(np.concatenate([starts, ends]))
    first, last, free = np.searchsorted(edges, starts), np.searchsorted(edges, ends), np.diff(edges)
    for role in ROLES:
        mine = roles == role
        low = np.maximum(first[mine], np.append(0, np.maximum.accumulate(last[mine]))[:-1])
        total = np.append(0, np.cumsum(free))
        own[mine] = total[np.maximum(last[mine], low)] - total[low]
        opened, closed = (np.bincount(places[mine], minlength=len(edges)) for places in (first, last))
        free = np.where(np.cumsum(opened - closed)[:-1] > 0, 0, free)
    return own
