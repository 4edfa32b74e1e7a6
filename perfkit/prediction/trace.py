"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open: ranks are processes, streams are threads."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from perfkit.prediction.accounts import Lane, list_operations, list_spans
from perfkit.prediction.ranks import find_peers

if TYPE_CHECKING:
    import polars

Event: TypeAlias = dict[str, Any]
_End: TypeAlias = tuple[int, int]  # rank and position
#: Sizes of an operation that its slice shows, where they apply.
_SHOWN = ("flops", "batch", "m", "n", "k", "elements", "rows", "lookups", "bags", "dim")
_MODULES, _HOST, _COMPUTE, _COMMUNICATION = range(4)


def _slice(name: str, category: str, rank: int, thread: int, start: float, end: float, **args: Any) -> Event:
    """A slice; start and end are rounded to nanoseconds each, so that what touches does not overlap."""
    begin, until = round(start * 1e6, 3), round(end * 1e6, 3)
    place = {"pid": rank, "tid": thread, "ts": begin, "dur": round(max(until - begin, 0.0), 3)}
    return {"name": name, "cat": category, "ph": "X", **place, "args": args}


def _names(lane: Lane, threads: Sequence[int], rank: int) -> Iterator[Event]:
    """Names and order of a rank's streams."""
    named = {_MODULES: "modules", **({_HOST: "host"} if lane.timeline.device else {}), _COMPUTE: "compute"}
    named |= dict(zip(threads, lane.streams, strict=True))
    places: list[tuple[str, Event, str, int]] = [("process", {}, f"rank {rank}", rank)]
    places += [("thread", {"tid": thread}, name, thread) for thread, name in named.items()]
    for what, place, name, order in places:
        for kind, value in (("name", name), ("sort_index", order)):
            yield {"name": f"{what}_{kind}", "ph": "M", "pid": rank, **place, "args": {kind: value}}


def _modules(operations: "polars.DataFrame", rank: int) -> Iterator[Event]:
    """Stages, the modules inside them and the modules inside those, as slices that nest."""
    depths = operations["module"].str.count_matches(".", literal=True).max()
    for level, depth in (("stage", 0), *(("module", depth + 1) for depth in range(1 + int(depths or 0)))):  # type: ignore[arg-type]
        for _, _, phase, module, count, *place in list_spans(operations, level, depth or None).rows():
            if level == "stage":
                yield _slice(phase, level, rank, _MODULES, *place, operations=count)
            elif module and module.count(".") == depth - 1:
                yield _slice(module, level, rank, _MODULES, *place, phase=phase, operations=count)


def _operations(lane: Lane, threads: Sequence[int], rank: int) -> Iterator[Event]:
    """Every operation on its stream, and before it on the host that launches it, with its sizes."""
    graph, timeline = lane.graph, lane.timeline
    starts, ends, issued = lane.starts.tolist(), lane.ends.tolist(), lane.issued.tolist()
    waits = timeline.waits[lane.index].tolist()
    sizes = {name: graph.column(name).astype(int).tolist() for name in _SHOWN}
    nbytes = np.where(graph.column("nbytes") > 0, graph.column("nbytes"), graph.traffic).astype(int).tolist()
    free = issued[-1] - timeline.period if issued else 0.0
    for position, (name, kind, variant, phase, module) in enumerate(graph.labels):
        args: dict[str, Any] = {"operation": position, "phase": phase, "module": module, "variant": variant}
        args |= {key: values[position] for key, values in sizes.items() if values[position]}
        args |= {"dtype": graph.dtypes[position] if graph.dtypes else graph.dtype, "bytes": nbytes[position]}
        if kind == "collective":
            args["waiting_us"] = round(waits[position] * 1e6, 3)
        yield _slice(name, kind, rank, threads[position], starts[position], ends[position], **args)
        if timeline.device:
            yield _slice(name, "host", rank, _HOST, free, issued[position], operation=position)
        free = issued[position]


def _meet(lanes: Sequence[Lane], sources: Mapping[int, int]) -> Iterator[tuple[str, _End, _End]]:
    """Arrows: from the operation before a collective to it, on to the one that waits for it, and from rank to rank."""
    meetings: dict[tuple[Sequence[int], int], list[tuple[float, int, int]]] = {}
    for rank, source in sources.items():
        lane, seen = lanes[source], Counter[int]()
        groups, waits = lane.graph.groups, lane.timeline.waits[source]
        waiters = {number: place for place, number in reversed(lane.timeline.awaited[source])}  # the first to wait
        for number, position in enumerate(lane.collectives.tolist()):
            before, after = lane.compute[lane.compute < position], lane.compute[lane.compute >= waiters[number]]
            if len(before):
                yield "launch", (rank, int(before[-1])), (rank, position)
            if len(after):
                yield "wait", (rank, position), (rank, int(after[0]))
            group = int(lane.groups[position])
            seen[group] += 1
            members = find_peers(groups[group], rank) if groups else ()
            meetings.setdefault((tuple(members), seen[group]), []).append((float(waits[position]), rank, position))
    for parts in meetings.values():
        last, *others = sorted(parts)
        yield from (("meet", last[1:], other[1:]) for other in others)


def make_events(lanes: Sequence[Lane], sources: Mapping[int, int]) -> list[Event]:
    """List the events of a trace: names, slices with sizes, and flows of collectives.

    `sources` are the ranks of the trace, and which lane each is like. Slices on one stream do not overlap, those of
    modules nest.
    """
    operations = list_operations(lanes)
    threads = [
        np.where([stream == "compute" for stream in lane.streams], _COMPUTE, _COMMUNICATION + lane.groups).tolist()
        for lane in lanes
    ]
    names, slices, flows = list[Event](), list[Event](), list[Event]()
    for rank, source in sources.items():
        lane = lanes[source]
        names += _names(lane, threads[source], rank)
        slices += [*_modules(operations.filter(rank=lane.rank), rank), *_operations(lane, threads[source], rank)]
    for number, (name, *ends) in enumerate(_meet(lanes, sources), 1):
        for (rank, position), phase in zip(ends, "sf", strict=True):
            lane, thread = lanes[sources[rank]], threads[sources[rank]][position]
            start = round(float(lane.starts[position]) * 1e6, 3)
            place: Event = {"id": number, "pid": rank, "tid": thread, "ts": start}
            flows.append({"name": name, "cat": "flow", "ph": phase, **place, **({"bp": "e"} if phase == "f" else {})})
    return [*names, *sorted(slices, key=lambda event: float(event["ts"])), *flows]
