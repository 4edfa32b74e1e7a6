"""What windows of time were spent on: steps of a trace, work that nothing hides, idle time and its causes."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import polars as pl

from perfkit.calibration.activity import BLOCKING
from perfkit.ground.results import Table
from perfkit.ground.units import escape, format_time
from perfkit.readers.trace import DEVICE, TraceFile, find_iterations

#: What hides what: time in which several work counts for the first of these.
ROLES = ("compute", "communication", "waiting", "copies")
#: When some intervals begin, and when they end [ns].
Spans: TypeAlias = tuple[np.ndarray, np.ndarray]
#: Annotations in which the host loads data.
_LOADING = r"DataLoader\)#"
#: A step that takes so many times the median is left out as stalled [-].
_STALLED = 1.5
#: What a longer time of a kind says.
_SAYS = {
    "host": "the host launches more slowly, or less hides it",
    "loading": "the device waits for data",
    "synchronisation": "the host waits for the device and launches nothing meanwhile",
    "queued": "streams wait for one another, or kernels start slowly",
    "waiting": "ranks do not do equal work, or do not begin together",
    "collective": "messages, links, or what hides them differ",
}
_NS = 1e-9


def cover(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where intervals together begin and end, and what they have covered up to there: what `numpy.interp` takes.

    Examples
    --------
    >>> [values.tolist() for values in cover(np.array([4, 0, 1]), np.array([6, 2, 3]))]
    [[0, 3, 4, 6], [0, 3, 3, 5]]
    """
    if not len(starts):
        return np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    apart = starts[1:] > ends[:-1]
    begins, stops = starts[np.append(True, apart)], ends[np.append(apart, True)]
    covered = np.cumsum(stops - begins)
    return np.stack([begins, stops], axis=1).ravel(), np.stack([covered - (stops - begins), covered], axis=1).ravel()


def account(
    work: Table, begin: int, end: int, held: Mapping[str, Spans]
) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """What a window of time was spent on.

    Parameters
    ----------
    work : polars.DataFrame
        Of `list_work`, in order of time.
    begin, end : int
        The window [ns].
    held : mapping of str to (array, array)
        By cause when the host could not launch, from and to; of several the first counts [ns].

    Returns
    -------
    own : array
        Time of each work that no other hides: of works of one role the first counts, of roles that of `ROLES` [ns].
    before : array
        Time before each work in which nothing runs [ns].
    idle : dict of str to int
        That time, and the time after the last work, by cause: ``host``: what came next was not launched, for none of
        the causes that are `held`; ``queued``: it was, and the device waited for another stream or started slowly [ns].

    Notes
    -----
    Whole nanoseconds: own and idle times sum to the window exactly.
    """
    inside = (work["end"] > begin).to_numpy() & (work["start"] < end).to_numpy()
    starts, ends = (work[name].to_numpy()[inside].clip(begin, end) - begin for name in ("start", "end"))
    places, roles = np.flatnonzero(inside), work["role"].to_numpy()[inside]
    own, before = np.zeros((2, len(work) + 1), dtype=np.int64)
    hidden, done = cover(starts[:0], ends[:0]), np.zeros(len(starts), dtype=bool)
    for role in ROLES:
        mine = roles == role
        low = np.maximum(starts[mine], np.append(0, np.maximum.accumulate(ends[mine]))[:-1])
        high = np.maximum(ends[mine], low)
        own[places[mine]] = (high - low) - (np.interp(high, *hidden) - np.interp(low, *hidden)).astype(np.int64)
        done |= mine
        hidden = cover(starts[done], ends[done])
    idle, until = np.append(0, hidden[0][1::2]), np.append(hidden[0][::2], end - begin)
    later = np.searchsorted(work["start"], until + begin)
    np.add.at(before, later, until - idle)
    launched = np.append(work["launched"], -1)[later]
    host = np.where(launched < 0, until - idle, np.clip(launched - begin - idle, 0, until - idle))
    causes, known = {"host": 0, "queued": int((until - idle - host).sum())}, 0
    for number, cause in enumerate(held, 1):
        some = zip(*list(held.values())[:number], strict=True)
        edges, covered = cover(*(np.concatenate(ends) - begin for ends in some))
        among = (np.interp(idle + host, edges, covered) - np.interp(idle, edges, covered)).astype(np.int64).sum()
        causes[cause], known = int(among) - known, int(among)
    return own[:-1], before[:-1], causes | {"host": int(host.sum()) - known}


class Account(NamedTuple):
    """What the mean step of a rank was spent on.

    `work` has, beside the columns of `list_work`, times: how often it came in a step [-]; own_s: its time that nothing
    hides; idle_s: idle time before it [s]. `causes` are those of idle time [s].
    """

    work: Table
    causes: dict[str, float]


def account_rank(file: TraceFile, work: Table, steps: Table) -> Account:
    """Account for the steps of a rank that count, and take the mean."""
    held = _list_holds(file.events)
    sums, causes = np.zeros((3, len(work))), dict[str, float]()
    for begin, time in steps.select("begin", "time").rows():
        own, before, idle = account(work, begin, begin + time, held)
        inside = ((work["start"] >= begin) & (work["start"] < begin + time)).to_numpy()
        sums += np.stack([own * _NS, before * _NS, inside]) / len(steps)
        causes = {cause: causes.get(cause, 0.0) + ns * _NS / len(steps) for cause, ns in idle.items()}
    columns = {name: pl.Series(values) for name, values in zip(("own_s", "idle_s", "times"), sums, strict=True)}
    return Account(work.with_columns(**columns), causes)


def _list_holds(events: Table) -> dict[str, Spans]:
    """When the host waits for the device, up to what it launches next, and when it loads data."""
    host = events.filter(pl.col("stream") < 0).with_columns(end=pl.col("ts") + pl.col("dur"))
    waits, loads = (host.filter(pl.col("name").str.contains(name)) for name in (BLOCKING, _LOADING))
    launches = host.filter((pl.col("index_correlation") >= 0) & pl.col("name").str.contains("Launch"))["ts"].to_numpy()
    later = np.append(launches, 0)[np.searchsorted(launches, waits["end"])]
    until = np.maximum(waits["end"].to_numpy(), later)
    loading = loads["ts"].to_numpy(), loads["end"].to_numpy()
    return {"synchronisation": (waits["ts"].to_numpy(), until), "loading": loading}


def split_waits(work: Table, meetings: Table) -> Table:
    """Part every collective into its wait for other ranks, which comes first, and its transfer."""
    waits = meetings.select("index", pl.col("waiting").fill_null(0)).filter(pl.col("waiting") > 0)
    middle = pl.col("start") + pl.col("waiting").fill_null(0)
    both = work.join(waits, on="index", how="left", maintain_order="left")
    early = both.filter(pl.col("waiting") > 0).with_columns(role=pl.lit("waiting"), kind=pl.lit("waiting"), end=middle)
    return pl.concat([both.with_columns(start=middle), early]).drop("waiting").sort("start", "index")


def list_steps(file: TraceFile, basis: str) -> Table:
    """Steps of a rank: step, begin, time [ns], kept, and the reason where it is not."""
    found, events = find_iterations(file.events), file.events
    if basis == "kernels":
        # one after the other: of a step that is prefetched, the first kernels come early
        period = pl.col("period").round().cast(pl.Int64)
        begin = pl.col("begin").first() + period.cum_sum() - period
        rows = found.drop_nulls("period").select("iteration", begin, period, "allocations")
    elif basis == "host step":
        own = found.filter((pl.col("kernels") > 0) | (pl.col("kernels").max() == 0))
        rows = own.select("iteration", "ts", "dur", "allocations")
    else:
        events = events.filter(pl.col("cat").is_in(DEVICE)) if basis == "device span" else events
        span = (pl.col("ts") + pl.col("dur")).max() - pl.col("ts").min()
        rows = events.select(step=pl.lit(-1), begin=pl.min("ts"), time=span, allocations=pl.lit(0)).drop_nulls()
    if rows.is_empty():
        raise ValueError(f"basis is {basis!r}, which {escape(file.source)} does not have; leave it out")
    rows.columns = ["step", "begin", "time", "allocations"]
    slow = pl.col("time") / pl.median("time")
    calm = (pl.col("allocations") == 0).any()
    reason = (
        pl.when((pl.int_range(pl.len()) == 0) & (pl.len() > 2)).then(pl.lit("the first, in which the profiler starts"))
        .when((pl.col("allocations") > 0) & calm).then(pl.lit("device memory was taken or given back in it"))
        .when(slow > _STALLED).then(pl.format("stalled: {} times the median", slow.round(1)))
        .otherwise(pl.lit(""))
    )  # fmt: skip
    left = pl.col("reason") != ""
    return rows.with_columns(reason=reason).with_columns(kept=~left | left.all()).drop("allocations")


def list_spans(work: Table, steps: Table) -> Table:
    """Kernels of the step that counts and is nearest the mean, as `Prediction.timeline` has its operations."""
    kept = steps.filter("kept")
    near = kept.sort((pl.col("time") - pl.col("time").mean()).abs(), maintain_order=True)
    begin, time = near.select("begin", "time").row(0)
    part = work.filter((pl.col("end") > begin) & (pl.col("start") < begin + time))
    own = pl.when(pl.col("operation") < 0).then(-1 - pl.col("index")).otherwise("operation").alias("operation")
    times = [(_NS * (pl.col(name) - begin).clip(0, time)).alias(f"{name}_s") for name in ("start", "end")]
    about = ("name", "kind", "phase", "module", "kernel")
    return part.select(pl.col("role").alias("stream"), own, *about, *times)


def interpret_difference(row: Mapping[str, Any]) -> str:
    """What a difference may mean: other operations, or other times of the same."""
    mine, theirs = row["operations"], row["other_operations"]
    if row["kind"] in _SAYS:
        return _SAYS[row["kind"]] if row["difference_s"] > 0 else f"here less: {_SAYS[row['kind']]} there"
    if abs(mine - theirs) > 0.1 * max(mine, theirs):
        return f"{mine} kernels here, {theirs} operations there"
    return f"each takes {format_time(row['time_s'] / mine)} here, {format_time(row['other_s'] / theirs)} there"
