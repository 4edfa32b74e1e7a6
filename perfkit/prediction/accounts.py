"""Views of an iteration: its parts, operations, modules, idle time, critical path, and its Chrome
trace."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from perfkit.ground.forks import check_threads
from perfkit.ground.results import Table
from perfkit.ground.units import check_positive, rank_largest
from perfkit.prediction.simulation import RankTimeline, measure_overlap
from perfkit.workloads.columns import list_sizes
from perfkit.workloads.graph import PHASES, STAGE_HOST, Graph, Label

#: Two times are equal if they differ by less than this share of the period [-].
_EQUAL = 1e-9
#: An event of a trace that ui.perfetto.dev and chrome://tracing open: ranks are processes, streams
#: are threads.
Event: TypeAlias = dict[str, Any]
_MODULES, _HOST, _COMPUTE, _COMMUNICATION = range(4)


def sum_idle(timeline: RankTimeline) -> dict[str, float]:
    """Busy and idle time of a compute stream by cause, see `Prediction.idle`; the times sum to the
    period [s]."""
    # time that hosts add to the stages of a pipeline
    pipeline_hosts: Any = timeline.graph.kernels.get(STAGE_HOST, [])
    busy = float(np.delete(timeline.times.seconds, pipeline_hosts).sum())
    contention = float(timeline.contention_time.sum())
    idle = float(timeline.communication_idle_time.sum())
    wait_for_ranks = timeline.wait_time_for_ranks
    times = {
        "busy_s": busy,
        "contention_s": contention,
        "host_s": timeline.period - busy - contention - idle - wait_for_ranks,
        "communication_s": idle,
        "waiting_s": wait_for_ranks,
    }
    rounding = _EQUAL * timeline.period
    return {name: seconds if seconds > rounding else 0.0 for name, seconds in times.items()}


def sum_communication(timeline: RankTimeline) -> dict[str, float]:
    """Time of a rank in collectives [s], and shares of the iteration [-], see
    `Prediction.communication`."""
    collectives = timeline.graph.collectives
    in_flight = np.stack([timeline.starts, timeline.ends], axis=1)[collectives]
    total = float(measure_overlap(in_flight, np.array([-np.inf]), np.array([np.inf]))[0])
    idle = float(timeline.communication_idle_time.sum())
    exposed = min(idle + float(timeline.contention_time.sum()), total)
    return {
        "total_s": total,
        "exposed_s": exposed,
        "overlapped_s": total - exposed,
        "waiting_s": timeline.wait_time_for_ranks,
        "exposed_share": exposed / timeline.period,
        "waiting_share": timeline.wait_time_for_ranks / timeline.period,
    }


def list_operations(timelines: Sequence[RankTimeline]) -> Table:
    """Start and end of every operation in program order, see `Prediction.timeline`."""
    import polars

    schema = {"rank": polars.Int64, "stream": polars.String, "operation": polars.Int64}
    schema |= dict.fromkeys(("name", "kind", "phase", "module"), polars.String)
    rows: list[tuple[Any, ...]] = []
    for timeline in timelines:
        rank = timeline.times.group.ranks[0]
        times = zip(timeline.starts.tolist(), timeline.ends.tolist(), strict=True)
        for place, (label, (start, end)) in enumerate(
            zip(timeline.graph.labels, times, strict=True)
        ):
            stream = timeline.name_stream(place)
            names = (label.name, label.kind, label.phase, label.module)
            rows.append((rank, stream, place, *names, start, end))
        for cause, start, end in timeline.list_added():
            rows.append((rank, "compute", None, cause, cause, cause, "", start, end))
    return polars.DataFrame(
        rows, {**schema, "start_s": polars.Float64, "end_s": polars.Float64}, orient="row"
    )


def cut_path(depth: int | None) -> Any:
    """The first names of a module's path."""
    import polars

    if depth is None:
        return polars.col("module")
    names = polars.col("module").str.split(".").list
    return names.head(int(check_positive("depth", depth, integer=True))).list.join(".")


def list_spans(operations: Table, level: str, depth: int | None = None) -> Table:
    """Start and end of each module or stage on the compute streams, from its first operation to its
    last.

    Columns rank, stream (the level), phase, module, operations [-], start_s, end_s [s]; spans of a
    rank do not overlap.
    """
    check_threads()
    import polars

    keys, module = (
        ("rank", "stream", "phase", "module"),
        cut_path(depth) if level == "module" else polars.lit(""),
    )
    frame = operations.filter(stream="compute").drop_nulls("operation")
    frame = frame.with_columns(stream=polars.lit(level), module=module)
    ends = {"operations": polars.len().cast(polars.Int64), "start_s": polars.first("start_s")}
    spans = frame.group_by(polars.struct(keys).rle_id().alias("span"), *keys, maintain_order=True)
    return spans.agg(**ends, end_s=polars.last("end_s")).drop("span")


def _list_idle(timeline: RankTimeline) -> Iterator[tuple[int, float]]:
    """Idle times of the compute stream [s], each with the position of the collective or operation
    it counts to.

    Position -1 is the time between two iterations.
    """
    compute = timeline.compute
    if not len(compute):
        return
    starts, ends = timeline.starts[compute], timeline.ends[compute]
    ends_before = np.append(ends[-1] - timeline.simulated_period, ends[:-1])
    gaps = np.maximum(starts - ends_before, 0.0)
    rounding = _EQUAL * timeline.period
    for index, waits in timeline.waits_by_operation.items():
        for position in dict.fromkeys(wait.position for wait in waits):
            collectives = [wait.collective for wait in waits if wait.position == position]
            last = rank_largest(timeline.ends[collectives], slack=rounding)[0]
            wait_time = float(timeline.stream_wait_time[position])
            yield collectives[last], wait_time
            gaps[index] -= wait_time
    for index in np.flatnonzero(gaps > rounding).tolist():
        between_iterations = index == 0 and timeline.device
        yield -1 if between_iterations else int(compute[index]), float(gaps[index])


def sum_modules(timeline: RankTimeline, depth: int | None) -> Table:
    """Time of every module in program order, see `Prediction.modules`.

    Idle time between two iterations belongs to no module. The time of an update is shared among the
    modules whose weights, gradients and states it reads and writes, by their bytes; it counts as an
    operation of each. Time that was not simulated has its own rows, as idle time of the update.
    """
    check_threads()
    import polars

    graph, owners = timeline.graph, _find_owners(timeline.graph)
    between_iterations = Label("", "", "", "forward", "")
    labels = (*graph.labels, between_iterations)
    busy = np.where(timeline.times.seconds > 0, timeline.ends - timeline.starts, 0.0)
    spent = []
    for place, seconds in enumerate(busy.tolist()):
        idle = seconds if labels[place].kind == "host" else 0.0
        spent.append((place, 1, seconds, idle))
    spent += [(place, 0, seconds, seconds) for place, seconds in _list_idle(timeline)]
    rows = [
        (module, count, labels[place].phase, share * seconds, share * idle)
        for place, count, seconds, idle in spent
        for module, share in owners.get(place, {labels[place].module: 1.0}).items()
    ]
    rows += [
        (name, 0, "update", seconds, seconds) for name, seconds in timeline.added.list_causes()
    ]
    frame = polars.DataFrame(
        rows, schema=("module", "operations", "phase", "time_s", "idle_s"), orient="row"
    )
    phases = [
        polars.col("time_s").filter(phase=phase).sum().alias(f"{phase}_s") for phase in PHASES
    ]
    sums = (
        polars.sum("operations"),
        *phases,
        polars.sum("idle_s"),
        polars.sum("time_s").alias("share") / timeline.period,
    )
    frame = frame.group_by(cut_path(depth), maintain_order=True).agg(*sums)
    return polars.concat([frame.filter(polars.col("module") != ""), frame.filter(module="")])


def _find_owners(graph: Graph) -> dict[int, dict[str, float]]:
    """Shares of modules in each update without a module, by the bytes of their weights, gradients
    and states [-]."""
    owner = dict(zip(graph.owners.buffer.tolist(), graph.owners.module, strict=True))
    touched: dict[int, list[tuple[int, float]]] = {}
    for access in graph.accesses:
        label = graph.labels[access.operation]
        if label.module:
            owner.setdefault(access.buffer, label.module)
        elif label.phase == "update" and label.kind != "collective":
            touched.setdefault(access.operation, []).append((access.buffer, access.nbytes))
    # states of a weight that is updated alone belong to its module; those of lists are known
    for _ in range(2):
        for buffers in touched.values():
            modules = {owner[buffer] for buffer, _ in buffers if buffer in owner}
            if len(modules) == 1:
                owner |= dict.fromkeys((buffer for buffer, _ in buffers), modules.pop())
    shares: dict[int, dict[str, float]] = {}
    for place, buffers in touched.items():
        owned = [(owner[buffer], nbytes) for buffer, nbytes in buffers if buffer in owner]
        total = sum(nbytes for _, nbytes in owned)
        for module, nbytes in owned if total else ():
            mine = shares.setdefault(place, {})
            mine[module] = mine.get(module, 0.0) + nbytes / total
    return shares


class _Event(NamedTuple):
    """An operation in this iteration or an earlier one.

    Parameters
    ----------
    position : int
        Of the operation [-].
    shift : float
        How much later its iteration is than the one shown; below 0 for an earlier one [s].
    """

    position: int
    shift: float


class _Launch(NamedTuple):
    """What the host did before it launched an operation.

    Parameters
    ----------
    previous : _Event
        What it launched before.
    free : float
        When it was free again [s].
    waited_for : _Event or None
        The operation that it waited for in between.
    """

    previous: _Event
    free: float
    waited_for: _Event | None


class _Step(NamedTuple):
    """A step of the critical path.

    Parameters
    ----------
    timeline : RankTimeline
        Iteration of the rank.
    stream : str
        ``host`` while an operation is launched.
    position : int
        Of the operation [-].
    start, end : float
        [s].
    """

    timeline: RankTimeline
    stream: str
    position: int
    start: float
    end: float


def _precede(positions: np.ndarray, position: int, period: float) -> list[_Event]:
    """The last of some positions before a given one, in this iteration or the one before, if there
    are any."""
    if not len(positions):
        return []
    index = int(np.searchsorted(positions, position)) - 1
    shift = 0.0 if index >= 0 else -period
    return [_Event(int(positions[index]), shift)]


def _find_awaited(timeline: RankTimeline, position: int) -> list[_Event]:
    """The collective that ended last, of those that an operation of the compute stream or its host
    waited for."""
    rounding = _EQUAL * timeline.period
    start = timeline.starts[position]
    events, ends = [], []
    for wait in timeline.waits_by_operation.get(timeline.find_next(position), ()):
        iterations = int(wait.position > position) + int(wait.of_iteration_before)
        event = _Event(wait.collective, -timeline.period * iterations)
        end = float(timeline.ends[event.position]) + event.shift
        if end <= start + rounding:
            events.append(event)
            ends.append(end)
    return [events[index] for index in rank_largest(ends, slack=rounding)[:1]]


def _find_launch(timeline: RankTimeline, position: int) -> _Launch:
    """What the host did before it launched an operation."""
    everything = np.arange(len(timeline.starts))
    (previous,) = _precede(everything, position, timeline.period)
    kind = timeline.graph.labels[previous.position].kind
    if timeline.device:
        host_waits = kind == "transfer"
        awaited = []
    else:
        host_waits = kind != "collective"
        awaited = _find_awaited(timeline, position)
    if host_waits:
        awaited = [previous, *awaited]
    free = float(timeline.issued[previous.position]) + previous.shift
    waited_for = None
    for event in dict.fromkeys(awaited):
        end = float(timeline.ends[event.position]) + event.shift
        if end >= free - _EQUAL * timeline.period:
            free, waited_for = end, event
    return _Launch(previous, free, waited_for)


def _find_last(
    timelines: Sequence[RankTimeline], timeline: RankTimeline, position: int
) -> tuple[RankTimeline, int]:
    """The rank that was ready last for a collective, and the position of the collective there.

    All ranks run their part of a collective at the same time.
    """
    rounding = _EQUAL * timeline.period
    start, end = timeline.starts[position], timeline.ends[position]
    parts: list[tuple[RankTimeline, int]] = []
    wait_times: list[float] = []
    for peer in timelines:
        collectives = peer.graph.collectives
        differences = abs(peer.starts[collectives] - start) + abs(peer.ends[collectives] - end)
        for part in collectives[differences <= rounding].tolist():
            parts.append((peer, part))
            wait_times.append(-peer.arrival_wait_time[part])
    return parts[rank_largest(wait_times, slack=rounding)[0]]


def _walk_back(timelines: Sequence[RankTimeline]) -> Iterator[_Step]:
    """Steps of the critical path, the last first, without a gap."""
    period = timelines[0].period
    rounding = _EQUAL * period
    last_ends = [timeline.ends.max(initial=-np.inf) for timeline in timelines]
    timeline = timelines[rank_largest(last_ends, slack=rounding)[0]]
    position = rank_largest(timeline.ends, slack=rounding)[0]
    shift = 0.0
    time = float(timeline.ends[position])
    while True:
        stream = timeline.name_stream(position)
        end, time = time, float(timeline.starts[position]) + shift
        yield _Step(timeline, stream, position, time, end)
        same_communicator = np.zeros(0)
        if stream != "compute":
            timeline, position = _find_last(timelines, timeline, position)
            collectives = timeline.graph.collectives
            communicators = timeline.graph.column("group")
            same = communicators[collectives] == communicators[position]
            same_communicator = collectives[same]
        candidates = [
            *_precede(same_communicator, position, period),
            *_find_awaited(timeline, position),
            *_precede(timeline.compute, position, period),
        ]
        cause = None
        for event in candidates:
            event_end = timeline.ends[event.position] + event.shift + shift
            if abs(event_end - time) <= rounding:
                cause = event
                break
        # it started when it was launched: back along the host's clock, to what that waited for
        while cause is None:
            launch = _find_launch(timeline, position)
            end, time = time, min(launch.free + shift, time)
            yield _Step(timeline, "host", position, time, end)
            cause = launch.waited_for
            if cause is None:
                position = launch.previous.position
                shift += launch.previous.shift
        position = cause.position
        shift += cause.shift


def find_critical_path(timelines: Sequence[RankTimeline]) -> Table:
    """The chain of operations that sets the time, see `Prediction.critical_path`.

    The path is followed backward from the last operation over two periods, and the earlier one is
    shown: a delay at the end of an iteration that the next one absorbs is left out. Time that was
    not simulated follows at the end.
    """
    import polars

    timelines = [replace(timeline, period=timeline.simulated_period) for timeline in timelines]
    period = timelines[0].period
    rounding = _EQUAL * period
    last = max(float(timeline.ends.max(initial=-np.inf)) for timeline in timelines)
    first_rank = timelines[0].times.group.ranks[0]
    end = last
    unsimulated = []
    for cause, seconds in timelines[0].added.list_causes():
        unsimulated.append((first_rank, "host", None, cause, cause, "", "", end, end + seconds))
        end += seconds
    rows: list[tuple[Any, ...]] = unsimulated[::-1]
    most = 8 * sum(len(timeline.starts) for timeline in timelines)
    for step in islice(_walk_back(timelines), most) if period > 0 else ():
        start, end = max(step.start + period, last - period), min(step.end + period, last)
        if end <= last - period + rounding:
            break
        if end > start + rounding:
            label = step.timeline.graph.labels[step.position]
            names = (label.name, label.kind, label.phase, label.module)
            rank = step.timeline.times.group.ranks[0]
            rows.append((rank, step.stream, step.position, *names, start, end))
    columns = ("rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s")
    return polars.DataFrame(rows[::-1], schema=columns, orient="row")


def list_events(timelines: Sequence[RankTimeline], sources: Mapping[int, int]) -> list[Event]:
    """Events of a trace: slices with sizes, and the names of their ranks and streams.

    `sources` gives, for each rank of the trace, the timeline it is like. Slices on one stream do not
    overlap; slices of modules are nested.
    """
    slices, names = list[Event](), list[Event]()
    for rank, source in sources.items():
        timeline = timelines[source]
        slices += _list_slices(timeline, rank)
        streams = {_MODULES: "modules"} | ({_HOST: "host"} if timeline.device else {})
        streams |= {
            _find_thread(timeline, place): timeline.name_stream(place)
            for place in range(len(timeline.starts))
        }
        named = [("process", {"pid": rank}, rank, f"rank {rank}")]
        named += [
            ("thread", {"pid": rank, "tid": thread}, thread, name)
            for thread, name in streams.items()
        ]
        for what, place, number, name in named:
            names.append({"name": f"{what}_name", "ph": "M", **place, "args": {"name": name}})
            names.append(
                {"name": f"{what}_sort_index", "ph": "M", **place, "args": {"sort_index": number}}
            )
    return [*names, *sorted(slices, key=lambda event: float(event["ts"]))]


def _find_thread(timeline: RankTimeline, place: int) -> int:
    collective = timeline.graph.labels[place].kind == "collective"
    return _COMMUNICATION + int(timeline.graph.column("group")[place]) if collective else _COMPUTE


def _list_slices(timeline: RankTimeline, rank: int) -> Iterator[Event]:
    """Stages, their modules and the modules inside those; then every operation, and its launch on
    the host."""
    graph, operations = timeline.graph, list_operations([timeline])
    for depth in range(2 + max((label.module.count(".") for label in graph.labels), default=0)):
        level = "module" if depth else "stage"
        for _, _, phase, module, count, *ends in list_spans(
            operations, level, depth or None
        ).rows():
            if not depth or (module and module.count(".") == depth - 1):
                more = {"phase": phase} if depth else {}
                yield _slice(
                    module or phase, level, rank, _MODULES, *ends, **more, operations=count
                )
    free = float(timeline.issued[-1]) - timeline.period if len(graph) else 0.0
    for place, label in enumerate(graph.labels):
        sizes, issued = graph[place].features, float(timeline.issued[place])
        args: dict[str, Any] = {
            "operation": place,
            "phase": label.phase,
            "module": label.module,
            "variant": label.variant,
        }
        shown = list_sizes(sizes)
        # what has no bytes of its own is shown with those that it moves
        nbytes = shown.pop("nbytes", graph.traffic[place])
        args |= {name: int(size) for name, size in shown.items()}
        args["dtype"] = graph.dtypes[place] if graph.dtypes else graph.dtype
        args["bytes"] = int(nbytes)
        if label.kind == "collective":
            args["waiting_us"] = round(float(timeline.arrival_wait_time[place]) * 1e6, 3)
        start, end = float(timeline.starts[place]), float(timeline.ends[place])
        thread = _find_thread(timeline, place)
        yield _slice(label.name, label.kind, rank, thread, start, end, **args)
        if timeline.device:
            yield _slice(label.name, "host", rank, _HOST, free, issued, operation=place)
        free = issued
    for name, *ends in timeline.list_added():
        yield _slice(name, name, rank, _COMPUTE, *ends)


def _slice(
    name: str, category: str, rank: int, thread: int, start: float, end: float, **args: Any
) -> Event:
    """A slice; start and end are rounded to nanoseconds each, so that neighbours do not overlap."""
    begin, until = round(start * 1e6, 3), round(end * 1e6, 3)
    place = {"pid": rank, "tid": thread, "ts": begin, "dur": round(max(until - begin, 0.0), 3)}
    return {"name": name, "cat": category, "ph": "X", **place, "args": args}
