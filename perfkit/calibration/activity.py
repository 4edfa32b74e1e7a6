"""Activity of one rank in a trace: its kernels, their place in the training step, and where its
time goes."""

import re
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from perfkit.calibration.collectives import COLLECTIVE, checked, list_names, spell_operation
from perfkit.calibration.doubts import EXCHANGES
from perfkit.ground.forks import check_threads
from perfkit.ground.results import Table
from perfkit.ground.units import escape
from perfkit.readers.kineto import DEVICE, TraceFile, find_iterations
from perfkit.workloads.vocabulary import VIEWS, find_entry

#: Phases by the names of annotations, operators and nodes of the backward graph; the innermost
#: counts.
_PHASES = list_names("phase")
#: Annotations that name no module.
_NO_MODULE = re.compile(
    r"^(ProfilerStep|nccl:|c10d|Optimizer\.|enumerate\(|(## )?(forward|backward|optimizer)( ##)?$)"
)
#: Classes of operators and kernels that `perfkit.workloads.vocabulary` does not have; the first
#: match counts.
_CLASSES = list_names("class")
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


class _Work(NamedTuple):
    """One kernel or copy, see `list_work`."""

    rank: int | None
    event: int
    iteration: int
    role: str
    stream: int
    start: int
    end: int
    launched: int
    kernel: str
    operation: int
    exchange: int
    collective: int
    name: str
    kind: str
    phase: str
    module: str


class _Place(NamedTuple):
    """Phase, module and operator of a host event, from its own name or from the events around it.

    `owner` is the index of the outermost operator that the vocabulary knows, otherwise of the
    innermost operator; `exchange` that of the operator that launched a collective; -1 for none.
    """

    phase: str = ""
    module: str = ""
    owner: int = -1
    known: bool = False
    exchange: int = -1


class _Said(NamedTuple):
    """What the name of a host event tells alone: phase and module, empty if none; and whether it is
    an operator, one that the vocabulary knows, and a collective."""

    phase: str
    module: str
    is_operator: bool
    is_known: bool
    is_exchange: bool


@lru_cache(maxsize=65_536)
def _read_name(cat: str, name: str) -> _Said:
    """What a name alone tells."""
    phase = next((phase for pattern, phase in _PHASES if pattern.search(name)), "")
    module = ""
    if cat == "python_function":
        module = name.removeprefix("nn.Module: ") if name.startswith("nn.Module: ") else ""
    elif cat == "user_annotation" and not phase and not _NO_MODULE.search(name):
        module = name.strip("# ").removesuffix(".forward").replace(".", "_")
    is_exchange = bool(EXCHANGES.search(name))
    is_operator = cat == "cpu_op" and not (phase == "backward" or is_exchange)
    is_known = is_operator and bool(_classify(name))
    return _Said(phase, module, is_operator, is_known, is_exchange)


@lru_cache(maxsize=65_536)
def _classify(name: str, last: bool = False) -> str:
    """Class of an operator or kernel, empty if unknown; with `last`, unknown operators count as
    elementwise."""
    short, known = name.removeprefix("aten::"), ""
    if short != name and not _CLASSES[0][0].search(short) and not _CLASSES[1][0].search(short):
        known = "" if short in VIEWS else find_entry(short, pointwise=last).kind
    elif not last:
        begin = name[:160]  # names of C++ templates are very long
        known = next((kind for pattern, kind in _CLASSES if pattern.search(begin)), "")
    return "" if known == "other" else known


def _find_places(file: TraceFile) -> Callable[[int], _Place]:
    """Make a function that finds the place of an event; backward nodes take the module of their
    forward operator."""
    events = file.events
    cats, names = events["cat"].to_list(), events["name"].to_list()
    parents, threads = events["parent"].to_list(), events["tid"].to_list()
    # autocast casts the arguments of an operator and calls it again: the inner one is the operator
    wraps = set()
    for name, parent in zip(names, parents, strict=True):
        if parent >= 0 and names[parent] == name:
            wraps.add(parent)
    on_host = events.filter(pl.col("stream") < 0)
    first_of_thread = on_host.unique("tid", keep="first").select("tid", "name").rows()
    engines = {thread for thread, name in first_of_thread if _PHASES[2][0].search(name)}
    # the last operator before a node, by the number that both have
    operators = {}
    for index, args in file.args.items():
        number = args.get("Sequence number", -1)
        if number < 0 or args.get("Fwd thread id"):
            continue
        if _read_name(cats[index], names[index]).is_operator:
            operators[number] = index

    @cache
    def find(index: int) -> _Place:
        if index < 0:
            return _Place("forward")
        around = find(parents[index])
        if parents[index] < 0 and threads[index] in engines:
            around = _Place("backward")
        said = _read_name(cats[index], names[index])
        module = around.module
        if said.module:
            module = f"{around.module}.{said.module}".strip(".")
        if said.phase == "backward":
            number = file.args.get(index, {}).get("Sequence number", -1)
            if number in operators:
                module = find(operators[number]).module
        owner, known = around.owner, around.known
        if said.is_operator and not around.known and index not in wraps:
            owner, known = index, said.is_known
        exchange = index if said.is_exchange else around.exchange
        return _Place(said.phase or around.phase, module, owner, known, exchange)

    return find


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
    find = _find_places(file)
    device = events.filter(pl.col("cat").is_in(DEVICE))
    if device.is_empty():
        device = _find_workers(events.filter(pl.col("cat") == "cpu_op"), find)
    names = events["name"].to_list()
    ends = (events["ts"] + events["dur"]).to_list()
    is_of_collective = cache(COLLECTIVE.search)
    first_kernels: dict[Any, int] = {}  # of each collective
    columns = ("index", "iteration", "cat", "name", "stream", "index_correlation", "ts")
    rows = []
    for index, iteration, cat, kernel, stream, launch, start in device.select(columns).iter_rows():
        # what no host event launched has no known phase
        place = find(launch) if launch >= 0 else _Place()
        facts = file.args.get(index, {})
        # an operator inside of an exchange, such as a copy, does work of its own
        is_exchange = place.exchange >= 0 and (cat == "cpu_op" or place.owner < place.exchange)
        is_named = cat == "kernel" and is_of_collective(kernel) is not None
        collective = -1
        if is_named or is_exchange or "Collective name" in facts:
            exchange = names[place.exchange] if place.exchange >= 0 else ""
            stated = {**file.args.get(place.exchange, {}), **facts}.get("Collective name", "")
            name = spell_operation(str(stated), exchange, kernel)
            role, kind = "communication", "collective"
            group = _find_group(index, place, facts, is_named)
            collective = first_kernels.setdefault(group, index)
        else:
            owner = names[place.owner] if place.owner >= 0 else ""
            name = owner.removeprefix("aten::") or kernel
            role = "compute" if cat in ("kernel", "cpu_op") else "copies"
            # a known operator says what its kernels do
            tells = owner if place.known and role == "compute" else kernel
            kind = _classify(tells) or _classify(owner, last=True) or "other"
        rows.append(
            _Work(
                rank=file.rank,
                event=index,
                iteration=iteration,
                role=role,
                stream=stream,
                start=start,
                end=ends[index],
                launched=ends[launch] if launch not in (-1, index) else -1,
                kernel=kernel,
                operation=place.owner,
                exchange=place.exchange,
                collective=collective,
                name=name,
                kind=kind,
                phase=place.phase,
                module=place.module,
            )
        )
    return pl.DataFrame(rows, _WORK, orient="row").sort("start", "index")


def _find_group(index: int, place: _Place, facts: Mapping[str, Any], is_named: bool) -> Any:
    """What all kernels of a collective have in common: the operator that launched them, or their
    number in the trace; otherwise a kernel is a collective of its own."""
    if place.exchange >= 0:
        return "exchange", place.exchange
    if not is_named and "External id" in facts:
        return "external", str(facts["External id"]), str(facts["Collective name"])
    return index


def _find_workers(operators: Table, find: Callable[[int], _Place]) -> Table:
    """Operators of a host that do work: those that the vocabulary knows, and others that call no
    operator."""
    callers = set(operators["parent"])
    works: list[bool] = []
    for index, name in operators.select("index", "name").iter_rows():
        place = find(index)
        short = name.removeprefix("aten::")
        is_innermost = index not in callers and short not in VIEWS and short != name
        works.append(place.owner == index and (place.known or is_innermost))
    workers = operators.filter(pl.Series(works, dtype=pl.Boolean))
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
    """List the steps of a rank: rank, step, begin, time [ns], time_s [s], kept, and the reason if
    not kept."""
    check_threads()
    found, span = find_iterations(file.events), file.events
    # steps follow one another: the first kernels of a prefetched step run earlier
    if basis == "kernels":
        time = pl.col("period").round().cast(pl.Int64)
        begin = pl.col("begin").first() + time.cum_sum() - time
        rows = found.drop_nulls("period").select("iteration", begin, time, "allocations")
    elif basis == "host step":
        worked = (pl.col("kernels") > 0) | (pl.col("kernels").max() == 0)
        rows = found.filter(worked).select("iteration", "ts", "dur", "allocations")
    else:
        span = span.filter(pl.col("cat").is_in(DEVICE)) if basis == "device span" else span
        time = (pl.col("ts") + pl.col("dur")).max() - pl.col("ts").min()
        rows = span.select(
            step=pl.lit(-1), begin=pl.min("ts"), time=time, allocations=pl.lit(0)
        ).drop_nulls()
    if rows.is_empty():
        raise ValueError(
            f"basis is {basis!r}, which {escape(file.source)} does not have; leave basis out"
        )
    rows.columns = ["step", "begin", "time", "allocations"]
    slow, taken = pl.col("time") / pl.median("time"), pl.col("allocations")
    reason = (
        pl.when((pl.int_range(pl.len()) == 0) & (pl.len() > 2))
        .then(pl.lit("the first, in which the profiler starts"))
        .when((taken > 0) & (taken == 0).any())
        .then(pl.lit("device memory was allocated or freed in it"))
        .when(slow > _STALLED)
        .then(pl.format("stalled: {} times the median", slow.round(1)))
        .otherwise(pl.lit(""))
    )
    rows = rows.with_columns(reason=reason, rank=pl.lit(file.rank, pl.Int64))
    is_left_out = pl.col("reason") != ""
    kept = ~is_left_out | is_left_out.all()
    rows = rows.with_columns(time_s=1e-9 * pl.col("time"), kept=kept)
    return rows.select("rank", "step", "begin", "time", "time_s", "kept", "reason")


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
    start, finish = pl.col("start"), pl.col("end")
    ends = pl.col("ts") + pl.col("dur")
    waits = meetings.select("waiting_s", collective="index")
    both = work.join(waits, on="collective", how="left", maintain_order="left")
    # an exchange of several kernels lasts from the first to the last of them
    of_exchange = pl.col("collective") >= 0
    last = pl.when(of_exchange).then(finish.max().over("collective")).otherwise(finish)
    both = both.with_columns(end=last).filter(
        ~of_exchange | (pl.col("index") == pl.col("collective"))
    )
    waited = (pl.col("waiting_s") * 1e9).fill_null(0).round().cast(pl.Int64)
    both = both.with_columns(ready=start + waited)
    ready, events = pl.col("ready"), file.events
    known = pl.when(pl.col("launched") >= 0).then("launched").otherwise(start)
    spans = {"waiting": (start, ready), "queued": (known, start)}
    spans["host"] = finish.cum_max().shift(1).fill_null(start), start
    frames = [both.with_columns(start=ready)]
    for role, (begin, end) in spans.items():
        frames.append(both.with_columns(role=pl.lit(role), kind=pl.lit(role), start=begin, end=end))
    launches = events.filter(
        (pl.col("index_correlation") >= 0) & pl.col("name").str.contains("Launch")
    ).select("ts")
    host = events.filter(pl.col("stream") < 0).select("name", start="ts", end=ends)
    calls = host.filter(pl.col("name").str.contains(BLOCKING)).sort("end")
    calls = calls.join_asof(
        launches, left_on="end", right_on="ts", strategy="forward", coalesce=False
    )
    calls = calls.with_columns(end=pl.max_horizontal("end", "ts")).drop("ts")
    whole = events.select(name=pl.lit(""), start=pl.min("ts"), end=ends.max())
    others = {
        "synchronisation": calls,
        "loading": host.filter(pl.col("name").str.contains(_LOADING)),
        "rest": whole,
    }
    for role, frame in others.items():
        kind, nothing = "host" if role == "rest" else role, pl.lit("")
        frames.append(
            frame.with_columns(role=pl.lit(role), kind=pl.lit(kind), phase=nothing, module=nothing)
        )
    filled = (
        pl.concat(frames, how="diagonal")
        .filter(finish > start)
        .with_columns(rank=pl.lit(file.rank, pl.Int64))
    )
    return filled.sort("start", maintain_order=True)


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
