"""Activity of one rank in a trace: its kernels, their place in the training step, and where its
time goes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from perfkit.calibration.collectives import COLLECTIVE, checked, spell_operation
from perfkit.calibration.places import Places, classify, find_places
from perfkit.ground.forks import check_threads
from perfkit.ground.results import Table
from perfkit.ground.units import Array, escape
from perfkit.readers.kineto import DEVICE, TraceFile, find_iterations
from perfkit.workloads.vocabulary import VIEWS

#: Calls in which the host waits for the device.
BLOCKING = (
    "Synchronize|^(cuda|hip)(Malloc|Free|HostAlloc)$"
    "|^(cuda|hip)Memcpy(2D|3D|Peer|ToSymbol|FromSymbol|DtoH|HtoD|DtoD|WithStream)?$"
    "|^cuMemcpy(DtoH|HtoD|DtoD)(_v2)?$"
)
#: Roles in order: where several overlap in time, the first counts. The device is busy in the first
#: four.
ROLES = (
    "compute",
    "communication",
    "waiting",
    "copies",
    "queued",
    "synchronisation",
    "loading",
    "host",
    "rest",
)
#: Annotations in which the host loads data.
_LOADING = r"DataLoader\)#"
#: A step counts as stalled, and is left out, from this multiple of the median time on [-];
#: formulas, table 6.2.
_STALLED = 1.5

_WORK = {
    "rank": pl.Int64,
    "index": pl.Int64,
    "iteration": pl.Int64,
    "role": pl.String,
    "stream": pl.Int64,
    "start": pl.Int64,
    "end": pl.Int64,
    "launched": pl.Int64,
    "kernel": pl.String,
    "operation": pl.Int64,
    "exchange": pl.Int64,
    "collective": pl.Int64,
    "name": pl.String,
    "kind": pl.String,
    "phase": pl.String,
    "module": pl.String,
}


@checked
def list_work(file: TraceFile) -> Table:
    """List the kernels and copies of the device of a rank; without a device, the operators of its
    host.

    Parameters
    ----------
    file : TraceFile
        One rank.

    Returns
    -------
    frame : polars.DataFrame
        Sorted by start: rank, index, iteration [-]; role (compute, communication, copies); stream
        [-]; start, end, and launched, when the host had launched it [ns]; kernel, its own name;
        operation, index of its operator; exchange, index of the operator that launched a
        collective; collective, index of the first kernel of the same collective; -1 for none [-];
        name of the operator; kind, as in `Graph`; phase, empty where no host event tells it;
        module.
    """
    check_threads()
    events = file.events
    places = find_places(file)
    device = events.filter(pl.col("cat").is_in(DEVICE))
    if device.is_empty():
        device = _find_workers(events.filter(pl.col("cat") == "cpu_op"), places)
    launch = device["index_correlation"].to_numpy()
    is_launched = launch >= 0
    owner = np.where(is_launched, places.owner[launch], -1)
    exchange = np.where(is_launched, places.exchange[launch], -1)
    ends = (events["ts"] + events["dur"]).to_numpy()
    # work that is its own launch runs on the host
    has_launch = is_launched & (launch != device["index"].to_numpy())
    work = pl.DataFrame(
        {
            "rank": pl.Series([file.rank] * len(device), dtype=pl.Int64),
            "index": device["index"],
            "iteration": device["iteration"],
            "stream": device["stream"],
            "start": device["ts"],
            "end": device["ts"] + device["dur"],
            "launched": np.where(has_launch, ends[launch], -1),
            "kernel": device["name"],
            "operation": owner,
            "exchange": exchange,
            # what no host event launched has no known phase
            "phase": pl.Series(np.where(is_launched, places.phase[launch], ""), dtype=pl.String),
            "module": pl.Series(np.where(is_launched, places.module[launch], ""), dtype=pl.String),
            "cat": device["cat"],
            "owner": _name_events(events, owner),
            "is_known": is_launched & places.is_known[launch],
        }
    )
    is_of_collective = _find_collective_kernels(file, work)
    frames = [
        _describe_collectives(file, work.filter(is_of_collective)),
        _describe_operations(work.filter(~is_of_collective)),
    ]
    return pl.concat(frames).sort("start", "index")


def _name_events(events: Table, indices: Array) -> pl.Series:
    """Names of some events, empty for index -1."""
    names = events["name"].gather(pl.Series(indices).clip(0))
    return names.set(pl.Series(indices < 0), "")


def _find_collective_kernels(file: TraceFile, work: Table) -> pl.Series:
    """Whether kernels and copies belong to a collective."""
    names = work["kernel"].unique()
    of_collectives = [name for name in names if COLLECTIVE.search(name)]
    is_named = (pl.col("cat") == "kernel") & pl.col("kernel").is_in(of_collectives)
    # an operator inside of an exchange, such as a copy, does work of its own
    is_inside = (pl.col("cat") == "cpu_op") | (pl.col("operation") < pl.col("exchange"))
    is_exchange = (pl.col("exchange") >= 0) & is_inside
    is_stated = pl.col("index").is_in(file.args.find("Collective name"))
    return work.select(is_named | is_exchange | is_stated).to_series()


def _describe_operations(work: Table) -> Table:
    """Role, name and class of work that belongs to no collective."""
    says = ["cat", "kernel", "owner", "is_known"]
    kinds = work.select(says).unique(maintain_order=True)
    rows = []
    for cat, kernel, owner, is_known in kinds.iter_rows():
        role = "compute" if cat in ("kernel", "cpu_op") else "copies"
        # a known operator says what its kernels do
        tells = owner if is_known and role == "compute" else kernel
        kind = classify(tells) or classify(owner, last=True) or "other"
        rows.append((role, owner.removeprefix("aten::") or kernel, kind))
    described = pl.DataFrame(rows, dict.fromkeys(("role", "name", "kind"), pl.String), orient="row")
    frame = work.join(kinds.hstack(described), on=says, how="left", maintain_order="left")
    return frame.with_columns(collective=pl.lit(-1, pl.Int64)).select(*_WORK)


def _describe_collectives(file: TraceFile, work: Table) -> Table:
    """Name of the collective that kernels and copies belong to, and the first of them."""
    exchanges = _name_events(file.events, work["exchange"].to_numpy()).to_list()
    first_kernels: dict[Any, int] = {}  # of each collective
    collectives = []
    names = []
    columns = work.select("index", "exchange", "cat", "kernel").iter_rows()
    for (index, exchange, cat, kernel), written in zip(columns, exchanges, strict=True):
        facts = file.args.get(index, {})
        stated = {**file.args.get(exchange, {}), **facts}.get("Collective name", "")
        names.append(spell_operation(str(stated), written, kernel))
        is_named = cat == "kernel" and COLLECTIVE.search(kernel) is not None
        group = _find_group(index, exchange, facts, is_named)
        collectives.append(first_kernels.setdefault(group, index))
    frame = work.with_columns(
        role=pl.lit("communication"),
        kind=pl.lit("collective"),
        name=pl.Series(names, dtype=pl.String),
        collective=pl.Series(collectives, dtype=pl.Int64),
    )
    return frame.select(*_WORK)


def _find_group(index: int, exchange: int, facts: Mapping[str, Any], is_named: bool) -> Any:
    """What all kernels of a collective have in common: the operator that launched them, or their
    number in the trace; otherwise a kernel is a collective of its own."""
    if exchange >= 0:
        return "exchange", exchange
    if not is_named and "External id" in facts:
        return "external", str(facts["External id"]), str(facts["Collective name"])
    return index


def _find_workers(operators: Table, places: Places) -> Table:
    """Operators of a host that do work: those that the vocabulary knows, and others that call no
    operator."""
    index = operators["index"].to_numpy()
    names = operators["name"].unique().to_list()
    working = [name for name in names if name.startswith("aten::") and name[6:] not in VIEWS]
    is_innermost = ~pl.col("index").is_in(operators["parent"].implode())
    is_worker = (
        pl.Series(places.is_known[index])
        | operators.select(is_innermost & pl.col("name").is_in(working)).to_series()
    )
    workers = operators.filter(is_worker & pl.Series(places.owner[index] == index))
    return workers.with_columns(index_correlation=pl.col("index"))


def time_host(file: TraceFile) -> Table:
    """Measure the overheads of the host.

    Parameters
    ----------
    file : TraceFile
        One rank.

    Returns
    -------
    frame : polars.DataFrame
        rank; overhead, named as in `Platform.host`: gap (T1, before the next call of PyTorch),
        before_launch (T2), after_launch (T3), launch (T4), between_launches (T5), bare (a call
        without a launch); n [-]; median_s, mean_s [s]. A node of autograd is one call, as in a
        `Graph`. Times in which the host waits for its device or loads data are left out. While one
        thread waits for another, the calls of the other thread count. observers: what the profiler
        recorded beside, which slows the host.

    References
    ----------
    .. [1] Z. Lin et al., "Building a performance model for deep learning recommendation model
       training on GPUs", 2022, arXiv:2201.07821, section 3.4 (the five overheads)
    """
    check_threads()
    ts, end = pl.col("ts"), pl.col("end")
    threads = ("pid", "tid")
    host = file.events.filter(pl.col("stream") < 0).with_columns(end=ts + pl.col("dur"))
    loading = pl.col("name").str.contains("DataLoader")
    calls = host.filter((pl.col("cat") == "cpu_op") | loading)
    # the outermost calls
    last_end = end.cum_max().shift(1)
    calls = calls.filter(ts >= last_end.fill_null(0).over(threads))
    calls = calls.sort(ts).with_columns(before=last_end.over("pid")).filter(~loading)
    is_blocking = pl.col("name").str.contains(BLOCKING)
    launches = host.filter(pl.col("index_correlation") >= 0, ~is_blocking)
    launches = launches.select(*threads, "ts", "end", begin="ts")
    # the call around each launch
    launches = launches.join_asof(calls, on="ts", by=threads, check_sortedness=False)
    launches = launches.filter(ts < pl.col("end_right"))
    by_call = launches.group_by("index")
    launching = by_call.agg(pl.min("begin"), pl.max("end"), done=pl.first("end_right"))
    launching = launching.join(calls.select("index", "ts"), on="index")
    bare = calls.join(launching, on="index", how="anti")
    waits = host.filter(is_blocking)["ts"]
    last_launch = end.shift(1).over("index")
    gaps = calls.select("before", after=ts)
    between_launches = launches.select(last_launch.alias("before"), after="begin")
    times = {
        "bare": bare.select(end - ts),
        "before_launch": launching.select(pl.col("begin") - ts),
        "after_launch": launching.select(pl.col("done") - end),
        "launch": launches.select(end - pl.col("begin")),
        "gap": _time_between(gaps, waits),
        "between_launches": _time_between(between_launches, waits),
    }
    rows = []
    for name, frame in times.items():
        seconds = 1e-9 * frame.to_series().drop_nulls()
        rows.append((file.rank, name, len(seconds), seconds.median(), seconds.mean()))
    kinds = {
        "rank": pl.Int64,
        "overhead": pl.String,
        "n": pl.Int64,
        "median_s": pl.Float64,
        "mean_s": pl.Float64,
    }
    return pl.DataFrame(rows, kinds, orient="row").with_columns(
        observers=pl.lit(", ".join(file.observers))
    )


def _time_between(pairs: Table, waits: pl.Series) -> Table:
    """Times from before to after, in which the host did not wait for its device [ns]."""
    before, after = pl.col("before"), pl.col("after")
    pairs = pairs.drop_nulls().filter(before <= after)
    is_free = waits.search_sorted(pairs["before"]) == waits.search_sorted(pairs["after"])
    return pairs.filter(is_free).select(after - before)


def list_steps(file: TraceFile, basis: str) -> Table:
    """List the steps of a rank: rank, step, begin_ns, time_ns [ns], time_s [s], kept, and the reason if
    not kept."""
    check_threads()
    steps = find_iterations(file.events)
    # steps follow one another: the first kernels of a prefetched step run earlier
    if basis == "kernels":
        time = pl.col("period").round().cast(pl.Int64)
        begin = pl.col("begin").first() + time.cum_sum() - time
        rows = steps.drop_nulls("period").select("iteration", begin, time, "allocations")
    elif basis == "host step":
        worked = (pl.col("kernels") > 0) | (pl.col("kernels").max() == 0)
        rows = steps.filter(worked).select("iteration", "ts", "dur", "allocations")
    else:
        span = file.events
        if basis == "device span":
            span = span.filter(pl.col("cat").is_in(DEVICE))
        time = (pl.col("ts") + pl.col("dur")).max() - pl.col("ts").min()
        rows = span.select(
            step=pl.lit(-1), begin=pl.min("ts"), time=time, allocations=pl.lit(0)
        ).drop_nulls()
    if rows.is_empty():
        raise ValueError(
            f"basis is {basis!r}, which {escape(file.source)} does not have; leave basis out"
        )
    rows.columns = ["step", "begin_ns", "time_ns", "allocations"]
    times_median = pl.col("time_ns") / pl.median("time_ns")
    is_allocating = pl.col("allocations") > 0
    some_do_not = (pl.col("allocations") == 0).any()
    is_first_of_several = (pl.int_range(pl.len()) == 0) & (pl.len() > 2)
    reason = (
        pl.when(is_first_of_several)
        .then(pl.lit("the first, in which the profiler starts"))
        .when(is_allocating & some_do_not)
        .then(pl.lit("device memory was allocated or freed in it"))
        .when(times_median > _STALLED)
        .then(pl.format("stalled: {} times the median", times_median.round(1)))
        .otherwise(pl.lit(""))
    )
    rows = rows.with_columns(reason=reason, rank=pl.lit(file.rank, pl.Int64))
    is_left_out = pl.col("reason") != ""
    kept = ~is_left_out | is_left_out.all()
    rows = rows.with_columns(time_s=1e-9 * pl.col("time_ns"), kept=kept)
    return rows.select("rank", "step", "begin_ns", "time_ns", "time_s", "kept", "reason")


def fill_time(file: TraceFile, work: Table, meetings: Table) -> Table:
    """Add waits and idle times to the work of a rank, so that every moment has a role.

    Parameters
    ----------
    file : TraceFile
        One rank.
    work : polars.DataFrame
        Of `list_work`.
    meetings : polars.DataFrame
        Its collectives, of `perfkit.calibration.collectives.list_collectives`.

    Returns
    -------
    frame : polars.DataFrame
        The work, and rows with other roles: waiting for other ranks, the first part of a
        collective; queued, from the launch of work to its start; synchronisation, from a wait of
        the host for the device to its next launch; loading of data; host, between two works while
        the next one is not launched; rest, after the last work.
    """
    whole = _join_exchanges(work, meetings)
    frames = [
        whole.with_columns(start=pl.col("ready")),
        *_list_waits(whole),
        *_list_host_times(file.events),
    ]
    filled = pl.concat(frames, how="diagonal").filter(pl.col("end") > pl.col("start"))
    filled = filled.with_columns(rank=pl.lit(file.rank, pl.Int64))
    return filled.sort("start", maintain_order=True)


def _join_exchanges(work: Table, meetings: Table) -> Table:
    """Work in which each collective is one row, from its first kernel to the end of all of them; and
    ready, when it has waited for other ranks [ns]."""
    waits = meetings.select("waiting_s", collective="index")
    work = work.join(waits, on="collective", how="left", maintain_order="left")
    is_collective = pl.col("collective") >= 0
    is_first_kernel = pl.col("index") == pl.col("collective")
    last_end = pl.col("end").max().over("collective")
    work = work.with_columns(end=pl.when(is_collective).then(last_end).otherwise("end"))
    work = work.filter(~is_collective | is_first_kernel)
    waited = (pl.col("waiting_s") * 1e9).fill_null(0).round().cast(pl.Int64)
    return work.with_columns(ready=pl.col("start") + waited)


def _list_waits(work: Table) -> list[Table]:
    """Times before each work: for other ranks, in the queue of the device, and for the host."""
    start = pl.col("start")
    launched = pl.when(pl.col("launched") >= 0).then("launched").otherwise(start)
    device_free = pl.col("end").cum_max().shift(1).fill_null(start)
    spans = {
        "waiting": (start, pl.col("ready")),
        "queued": (launched, start),
        "host": (device_free, start),
    }
    frames = []
    for role, (begin, end) in spans.items():
        frames.append(work.with_columns(role=pl.lit(role), kind=pl.lit(role), start=begin, end=end))
    return frames


def _list_host_times(events: Table) -> list[Table]:
    """Times of no work in particular: waits of the host for its device until the next launch,
    loading of data, and the whole trace, of which the rest is left."""
    end = pl.col("ts") + pl.col("dur")
    is_launch = (pl.col("index_correlation") >= 0) & pl.col("name").str.contains("Launch")
    launches = events.filter(is_launch).select("ts")
    host = events.filter(pl.col("stream") < 0).select("name", start="ts", end=end)
    calls = host.filter(pl.col("name").str.contains(BLOCKING)).sort("end")
    calls = calls.join_asof(
        launches, left_on="end", right_on="ts", strategy="forward", coalesce=False
    )
    until_launch = pl.max_horizontal("end", "ts")
    frames = [
        _name_role(calls.with_columns(end=until_launch).drop("ts"), "synchronisation"),
        _name_role(host.filter(pl.col("name").str.contains(_LOADING)), "loading"),
    ]
    whole = events.select(name=pl.lit(""), start=pl.min("ts"), end=end.max())
    return [*frames, _name_role(whole, "rest", kind="host")]


def _name_role(spans: Table, role: str, kind: str | None = None) -> Table:
    """Spans with a role, and a kind if that has another name; they belong to no phase and module."""
    return spans.with_columns(
        role=pl.lit(role),
        kind=pl.lit(kind or role),
        phase=pl.lit(""),
        module=pl.lit(""),
    )


def account(work: Table, begin: int, end: int) -> np.ndarray:
    """Divide a window of time among all works: where several overlap, the first role counts, and in
    it the first work.

    Parameters
    ----------
    work : polars.DataFrame
        role, one of `ROLES`; start, end [ns], in order of start.
    begin, end : int
        The window [ns].

    Returns
    -------
    own : array
        Time of each work, which sum to the part of the window with any work [ns].
    """
    check_threads()
    starts = work["start"].to_numpy().clip(begin, end)
    ends = work["end"].to_numpy().clip(begin, end)
    roles = work["role"].to_numpy()
    own = np.zeros(len(work), dtype=np.int64)
    # all starts and ends divide the window into intervals; free is what no role has taken of each
    edges = np.unique(np.concatenate([starts, ends]))
    first, last = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
    free = np.diff(edges)
    for role in ROLES:
        mine = roles == role
        # a work begins where the works before it have ended
        ended_before = np.append(0, np.maximum.accumulate(last[mine]))[:-1]
        low = np.maximum(first[mine], ended_before)
        high = np.maximum(last[mine], low)
        free_up_to = np.append(0, np.cumsum(free))
        own[mine] = free_up_to[high] - free_up_to[low]
        opened = np.bincount(first[mine], minlength=len(edges))
        closed = np.bincount(last[mine], minlength=len(edges))
        is_taken = np.cumsum(opened - closed)[:-1] > 0
        free = np.where(is_taken, 0, free)
    return own
