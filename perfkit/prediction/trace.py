"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open: ranks are processes, streams are threads."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from perfkit.prediction.communicators import find_peers
from perfkit.prediction.lanes import find_stream
from perfkit.prediction.simulation import Timeline
from perfkit.prediction.views import find_spans
from perfkit.resources import write_text
from perfkit.workloads.graph import FEATURES, Graph

__all__ = ["make_events", "write_trace"]

Event: TypeAlias = dict[str, Any]
#: Sizes of an operation that its slice shows, where they apply.
_SHOWN = ("flops", "batch", "m", "n", "k", "elements", "rows", "lookups", "bags", "dim")
_MODULES, _HOST, _COMPUTE, _COMMUNICATION = range(4)


def _slice(name: str, category: str, rank: int, thread: int, start: float, end: float, **args: Any) -> Event:
    """A slice; start and end are rounded to nanoseconds each, so that what touches does not overlap."""
    begin, until = round(start * 1e6, 3), round(end * 1e6, 3)
    place = {"pid": rank, "tid": thread, "ts": begin, "dur": round(max(until - begin, 0.0), 3)}
    return {"name": name, "cat": category, "ph": "X", **place, "args": args}


def _names(graph: Graph, rank: int, device: bool) -> Iterator[Event]:
    """Names and order of a rank's streams."""
    threads = {_MODULES: "modules", **({_HOST: "host"} if device else {}), _COMPUTE: "compute"}
    threads |= {_thread(graph, int(position)): find_stream(graph, int(position)) for position in graph.collectives}
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
    for thread, name in threads.items():
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": thread, "args": {"sort_index": thread}}


def _thread(graph: Graph, position: int) -> int:
    collective = graph.labels[position][1] == "collective"
    return _COMMUNICATION + int(graph.column("group")[position]) if collective else _COMPUTE


def _modules(graph: Graph, timeline: Timeline, source: int, rank: int) -> Iterator[Event]:
    """Stages, the modules inside them and the modules inside those, as slices that nest."""
    times = timeline.starts[source], timeline.ends[source]
    for phase, _, count, *place in find_spans(graph, *times, level="stage"):
        yield _slice(phase, "stage", rank, _MODULES, *place, operations=count)
    for depth in range(1, 1 + max((label[4].count(".") + 1 for label in graph.labels), default=0)):
        for phase, module, count, *place in find_spans(graph, *times, depth=depth):
            if module and module.count(".") == depth - 1:
                yield _slice(module, "module", rank, _MODULES, *place, phase=phase, operations=count)


def _operations(graph: Graph, timeline: Timeline, source: int, rank: int) -> Iterator[Event]:
    """Every operation on its stream, and before it on the host that launches it, with its sizes."""
    starts, ends = timeline.starts[source].tolist(), timeline.ends[source].tolist()
    issued, traffic = timeline.issued[source].tolist(), graph.traffic.tolist()
    waits = timeline.waits[source].tolist()
    columns = [(name, FEATURES.index(name)) for name in _SHOWN]
    free = issued[-1] - timeline.period if issued else 0.0
    for position, (name, kind, variant, phase, module) in enumerate(graph.labels):
        row = graph.features[position].tolist()
        args: dict[str, Any] = {"operation": position, "phase": phase, "module": module, "variant": variant}
        args |= {key: int(row[column]) for key, column in columns if row[column]}
        args["dtype"] = graph.dtypes[position] if graph.dtypes else graph.dtype
        args["bytes"] = int(row[FEATURES.index("nbytes")] or traffic[position])
        if kind == "collective":
            args["waiting_us"] = round(waits[position] * 1e6, 3)
        yield _slice(name, kind, rank, _thread(graph, position), starts[position], ends[position], **args)
        if timeline.device:
            yield _slice(name, "host", rank, _HOST, free, issued[position], operation=position)
        free = issued[position]


def _flows(graphs: Sequence[Graph], timeline: Timeline, sources: Mapping[int, int]) -> Iterator[Event]:
    """Arrows: from the operation before a collective to it, on to the one that waits for it, and from rank to rank."""
    number = 0

    def flow(name: str, *ends: tuple[int, int]) -> Iterator[Event]:
        nonlocal number
        number += 1
        for (rank, position), phase in zip(ends, "sf", strict=True):
            start = round(float(timeline.starts[sources[rank]][position]) * 1e6, 3)
            thread = _thread(graphs[sources[rank]], position)
            place = {"id": number, "pid": rank, "tid": thread, "ts": start}
            yield {"name": name, "cat": "flow", "ph": phase, **place, **({"bp": "e"} if phase == "f" else {})}

    meetings: dict[tuple[tuple[int, ...], int], list[tuple[float, int, int]]] = {}
    for rank, source in sources.items():
        graph = graphs[source]
        seen: dict[int, int] = {}
        compute = np.setdiff1d(np.arange(len(graph)), graph.collectives)
        waits = None if graph.waits is None else {int(c): int(p) for p, c in sorted(graph.waits.tolist(), reverse=True)}
        for order, position in enumerate(graph.collectives.tolist()):
            before = compute[compute < position]
            waiter = position + 1 if waits is None else waits.get(order, len(graph))
            after = compute[compute >= waiter]
            if len(before):
                yield from flow("launch", (rank, int(before[-1])), (rank, position))
            if len(after):
                yield from flow("wait", (rank, position), (rank, int(after[0])))
            group = int(graph.column("group")[position])
            seen[group] = seen.get(group, 0) + 1
            members = find_peers(graph.groups[group], rank) if graph.groups else ()
            part = (float(timeline.waits[source][position]), rank, position)
            meetings.setdefault((members, seen[group]), []).append(part)
    for parts in meetings.values():
        last, *others = sorted(parts)
        for other in others:
            yield from flow("meet", last[1:], other[1:])


def make_events(graphs: Sequence[Graph], timeline: Timeline, sources: Mapping[int, int] | None = None) -> list[Event]:
    """List the events of a trace.

    Parameters
    ----------
    graphs : sequence of Graph
        One per simulated rank.
    timeline : Timeline
        What the simulation says of them.
    sources : mapping of int to int, optional
        Ranks of the trace, and which simulated one each is like; each is itself, unless given.

    Returns
    -------
    events : list of dict
        Names, slices with sizes, and flows of collectives; slices on one stream do not overlap, those of modules nest.
    """
    sources = {index: index for index in range(len(graphs))} if sources is None else sources
    slices: list[Event] = []
    for rank, source in sources.items():
        slices += _modules(graphs[source], timeline, source, rank)
        slices += _operations(graphs[source], timeline, source, rank)
    slices.sort(key=lambda event: float(event["ts"]))
    names = [event for rank, source in sources.items() for event in _names(graphs[source], rank, timeline.device)]
    return [*names, *slices, *_flows(graphs, timeline, sources)]


def write_trace(path: str | Path, events: Sequence[Event], **notes: str) -> Path:
    """Write events as a Chrome trace, whole or not at all.

    Parameters
    ----------
    path : str or Path
        File to write, such as ``iteration.json``.
    events : sequence of dict
        See `make_events`.
    **notes : str
        What the trace says about itself.

    Returns
    -------
    path : Path
        The file; ui.perfetto.dev opens it.
    """
    lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
    head = json.dumps(notes, ensure_ascii=False)
    return write_text(path, f'{{"displayTimeUnit": "ms", "otherData": {head}, "traceEvents": [\n{lines}\n]}}\n')
