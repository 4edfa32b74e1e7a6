"""An iteration as a Chrome trace: slices of ranks and streams, and arrows between them."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from perfkit.prediction.accounts import list_operations, list_spans
from perfkit.prediction.ranks import Ranks, find_peers
from perfkit.prediction.simulation import Lane

#: An event of a trace that ui.perfetto.dev and chrome://tracing open: ranks are processes, streams are threads.
Event: TypeAlias = dict[str, Any]
#: Sizes of an operation that its slice shows, where they apply.
_SHOWN = ("flops", "batch", "m", "n", "k", "elements", "rows", "lookups", "bags", "dim")
_MODULES, _HOST, _COMPUTE, _COMMUNICATION = range(4)


def make_events(lanes: Sequence[Lane], sources: Mapping[int, int]) -> list[Event]:
    """List the events of a trace: slices with sizes, names of their streams, and flows of collectives.

    `sources` are the ranks of the trace, and which lane each is like. Slices on one stream do not overlap, those of
    modules nest.
    """
    slices = [event for rank, source in sources.items() for event in _list_slices(lanes[source], rank)]
    names: dict[tuple[int, int], str] = {}
    for rank, lane in ((rank, lanes[source]) for rank, source in sources.items()):
        names |= {(rank, _MODULES): "modules"} | ({(rank, _HOST): "host"} if lane.device else {})
        names |= {(rank, _find_thread(lane, place)): lane.name_stream(place) for place in range(len(lane.starts))}
    named = [("process", {"pid": rank}, rank, f"rank {rank}") for rank in sources]
    named += [("thread", {"pid": rank, "tid": thread}, thread, name) for (rank, thread), name in names.items()]
    events: list[Event] = []
    for what, place, number, name in named:
        for key, value in (("name", name), ("sort_index", number)):
            events.append({"name": f"{what}_{key}", "ph": "M", **place, "args": {key: value}})
    return [*events, *sorted(slices, key=lambda event: float(event["ts"])), *_list_flows(lanes, sources)]


def _find_thread(lane: Lane, place: int) -> int:
    graph = lane.kind.graph
    return _COMMUNICATION + int(graph.column("group")[place]) if graph.labels[place][1] == "collective" else _COMPUTE


def _list_slices(lane: Lane, rank: int) -> Iterator[Event]:
    """Stages, the modules inside them and the modules inside those; every operation, and before it on its host."""
    graph, operations = lane.kind.graph, list_operations([lane])
    for depth in range(2 + max((label[4].count(".") for label in graph.labels), default=0)):
        level = "module" if depth else "stage"
        for _, _, phase, module, count, *ends in list_spans(operations, level, depth or None).rows():
            if not depth or (module and module.count(".") == depth - 1):
                more = {"phase": phase} if depth else {}
                yield _slice(module or phase, level, rank, _MODULES, *ends, **more, operations=count)
    free = float(lane.issued[-1]) - lane.period if len(graph) else 0.0
    for place, (name, kind, variant, phase, module) in enumerate(graph.labels):
        sizes, issued = graph[place].features, float(lane.issued[place])
        args: dict[str, Any] = {"operation": place, "phase": phase, "module": module, "variant": variant}
        args |= {key: int(sizes[key]) for key in _SHOWN if sizes[key]}
        args["dtype"] = graph.dtypes[place] if graph.dtypes else graph.dtype
        args["bytes"] = int(sizes["nbytes"] or graph.traffic[place])
        if kind == "collective":
            args["waiting_us"] = round(float(lane.waits[place]) * 1e6, 3)
        start, end = float(lane.starts[place]), float(lane.ends[place])
        yield _slice(name, kind, rank, _find_thread(lane, place), start, end, **args)
        if lane.device:
            yield _slice(name, "host", rank, _HOST, free, issued, operation=place)
        free = issued
    for name, *ends in lane.list_added():
        yield _slice(name, name, rank, _COMPUTE, *ends)


def _slice(name: str, category: str, rank: int, thread: int, start: float, end: float, **args: Any) -> Event:
    """A slice; start and end are rounded to nanoseconds each, so that what touches does not overlap."""
    begin, until = round(start * 1e6, 3), round(end * 1e6, 3)
    place = {"pid": rank, "tid": thread, "ts": begin, "dur": round(max(until - begin, 0.0), 3)}
    return {"name": name, "cat": category, "ph": "X", **place, "args": args}


def _list_flows(lanes: Sequence[Lane], sources: Mapping[int, int]) -> Iterator[Event]:
    """Arrows from the operation before a collective to it, on to the one that waits for it, and from rank to rank."""
    pairs: list[tuple[str, tuple[int, int], tuple[int, int]]] = []
    meetings: dict[tuple[Ranks, int], list[tuple[float, int, int]]] = defaultdict(list)
    for rank, source in sources.items():
        lane, seen = lanes[source], Counter[int]()
        graph, waiters = lane.kind.graph, {number: place for place, number in reversed(lane.awaited)}
        for number, place in enumerate(graph.collectives.tolist()):
            before = lane.compute[lane.compute < place]
            after = lane.compute[lane.compute >= waiters.get(number, len(graph))]
            pairs += [("launch", (rank, int(other)), (rank, place)) for other in before[-1:]]
            pairs += [("wait", (rank, place), (rank, int(other))) for other in after[:1]]
            group = int(graph.column("group")[place])
            seen[group] += 1
            members = tuple(find_peers(graph.groups[group], rank)) if graph.groups else ()
            meetings[members, seen[group]].append((float(lane.waits[place]), rank, place))
    for last, *others in map(sorted, meetings.values()):
        pairs += [("meet", last[1:], other[1:]) for other in others]
    for number, (name, *ends) in enumerate(pairs, 1):
        for (rank, position), phase in zip(ends, ({"ph": "s"}, {"ph": "f", "bp": "e"}), strict=True):
            lane = lanes[sources[rank]]
            place = {"pid": rank, "tid": _find_thread(lane, position)}
            start = round(float(lane.starts[position]) * 1e6, 3)
            yield {"name": name, "cat": "flow", "id": number, **phase, **place, "ts": start}
