"""An iteration as a Chrome trace: slices of ranks and streams."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from perfkit.prediction.accounts import list_operations, list_spans
from perfkit.prediction.simulation import Lane

#: An event of a trace that ui.perfetto.dev and chrome://tracing open: ranks are processes, streams are threads.
Event: TypeAlias = dict[str, Any]
#: Sizes of an operation that its slice shows, where they apply.
_SHOWN = ("flops", "batch", "m", "n", "k", "elements", "rows", "lookups", "bags", "dim")
_MODULES, _HOST, _COMPUTE, _COMMUNICATION = range(4)


def list_events(lanes: Sequence[Lane], sources: Mapping[int, int]) -> list[Event]:
    """Events of a trace: slices with sizes, and the names of their ranks and streams.

    `sources` gives, for each rank of the trace, the lane it is like. Slices on one stream do not overlap; slices of
    modules are nested.
    """
    slices, names = list[Event](), list[Event]()
    for rank, source in sources.items():
        lane = lanes[source]
        slices += _list_slices(lane, rank)
        streams = {_MODULES: "modules"} | ({_HOST: "host"} if lane.device else {})
        streams |= {_find_thread(lane, place): lane.name_stream(place) for place in range(len(lane.starts))}
        named = [("process", {"pid": rank}, rank, f"rank {rank}")]
        named += [("thread", {"pid": rank, "tid": thread}, thread, name) for thread, name in streams.items()]
        for what, place, number, name in named:
            names.append({"name": f"{what}_name", "ph": "M", **place, "args": {"name": name}})
            names.append({"name": f"{what}_sort_index", "ph": "M", **place, "args": {"sort_index": number}})
    return [*names, *sorted(slices, key=lambda event: float(event["ts"]))]


def _find_thread(lane: Lane, place: int) -> int:
    collective = lane.graph.labels[place][1] == "collective"
    return _COMMUNICATION + int(lane.graph.column("group")[place]) if collective else _COMPUTE


def _list_slices(lane: Lane, rank: int) -> Iterator[Event]:
    """Stages, their modules and the modules inside those; then every operation, and its launch on the host."""
    graph, operations = lane.graph, list_operations([lane])
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
    """A slice; start and end are rounded to nanoseconds each, so that neighbours do not overlap."""
    begin, until = round(start * 1e6, 3), round(end * 1e6, 3)
    place = {"pid": rank, "tid": thread, "ts": begin, "dur": round(max(until - begin, 0.0), 3)}
    return {"name": name, "cat": category, "ph": "X", **place, "args": args}
