"""Where the time of an iteration goes: operations, modules, idle time by cause, communication, the critical path."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from perfkit.ground.units import Array, check_positive, rank_largest
from perfkit.prediction.simulation import Timeline, measure_overlap
from perfkit.workloads.graph import PHASES, Graph

if TYPE_CHECKING:
    import polars

#: An operation, and how much later than the one shown its iteration is [s].
Place: TypeAlias = tuple[int, float]
#: Two times are the same when they differ by less than this part of the period [-].
_EQUAL = 1e-9


class Lane:
    """Streams of one rank as the cycle they are: before the first operation comes the last of the iteration before.

    A graph, the times of all ranks, the number of this one there, and what the rank is called [-].
    """

    def __init__(self, graph: Graph, timeline: Timeline, index: int, rank: int) -> None:
        self.graph, self.index, self.timeline, self.rank = graph, index, timeline, rank
        self.period, self.near = timeline.period, _EQUAL * timeline.period
        self.starts, self.ends, self.issued = timeline.starts[index], timeline.ends[index], timeline.issued[index]
        self.stalls, self.exposed, self.stolen = timeline.stalls[index], timeline.exposed[index], timeline.stolen[index]
        self.collectives = graph.collectives
        self.compute = np.delete(np.arange(len(graph)), self.collectives)
        self.groups = graph.column("group").astype(int)
        self.awaited: dict[int, list[int]] = {}
        for place, number in timeline.awaited[index]:
            self.awaited.setdefault(place, []).append(int(self.collectives[number]))
        self.stalled: dict[int, list[int]] = {}  # by the operation of the compute stream that comes next
        for place in np.flatnonzero(self.stalls > self.near).tolist():
            self.stalled.setdefault(self.next(place), []).append(place)

    @cached_property
    def streams(self) -> list[str]:
        """Stream of every operation: compute, or communication with the communicator where there are several."""
        names = ["compute"] * len(self.graph)
        for place in self.collectives.tolist():
            names[place] = f"communication {self.groups[place]}" if len(self.graph.groups) > 1 else "communication"
        return names

    def next(self, place: int) -> int:
        """Number among the operations of the compute stream of the one at a position, or the next one after."""
        return int(np.searchsorted(self.compute, place)) % max(len(self.compute), 1)

    def before(self, places: Sequence[int] | np.ndarray, place: int) -> Place | None:
        """The last of some positions that comes before one, in this iteration or the one before."""
        if not len(places):
            return None
        number = int(np.searchsorted(places, place)) - 1
        return int(places[number]), 0.0 if number >= 0 else -self.period

    def last(self, places: Sequence[Place]) -> Place | None:
        """The one that ends last, the first where several do."""
        ends = [self.ends[place] + shift for place, shift in places]
        return places[rank_largest(ends, slack=self.near)[0]] if places else None

    def held(self, place: int) -> Place | None:
        """The last to end of the collectives that an operation of the compute stream, or its host, was held up by."""
        found = [
            (one, -self.period if wait > place else 0.0)
            for wait in self.stalled.get(self.next(place), ())
            for one in self.awaited[wait]
        ]
        return self.last([one for one in found if self.ends[one[0]] + one[1] <= self.starts[place] + self.near])

    def find_blocker(self, place: int) -> tuple[Place, float, Place | None]:
        """What the host launched before an operation, when it was free again [s], and what it waited for, if at all."""
        last: Place = (place - 1, 0.0) if place else (len(self.graph) - 1, -self.period)
        freed, found = float(self.issued[last[0]]) + last[1], None
        device, kind = self.timeline.device, self.graph.labels[last[0]][1]
        held = None if device else self.held(place)
        waits = kind == "transfer" if device else kind != "collective"
        for one in (last if waits else None, held if held != last else None):
            if one is not None and self.ends[one[0]] + one[1] >= freed - self.near:
                found, freed = one, float(self.ends[one[0]]) + one[1]
        return last, freed, found

    def rests(self) -> Iterator[tuple[str, int, float]]:
        """Cause, operation and length [s] of every time in which the compute stream is idle."""
        ends = self.ends[self.compute]
        gaps = np.maximum(self.starts[self.compute] - np.concatenate((ends[-1:] - self.period, ends[:-1])), 0.0)
        for later, places in self.stalled.items() if len(gaps) else ():
            for place in places:
                stall = min(float(self.stalls[place]), float(gaps[later]))
                exposed = min(float(self.exposed[place]), stall)
                gaps[later] -= stall
                cause, _ = self.last([(one, 0.0) for one in self.awaited[place]]) or (place, 0.0)
                yield "communication", cause, exposed
                yield "waiting", cause, stall - exposed
        for later in np.flatnonzero(gaps > self.near).tolist():
            yield "host", int(self.compute[later]), float(gaps[later])


def split_period(graph: Graph, busy: Array, timeline: Timeline, index: int) -> dict[tuple[str, str], tuple[int, float]]:
    """Time of one rank by phase and class, with waiting and host time, so that the parts sum to the period.

    Given are the time of its operations, zero for collectives [s], and its number in the timeline [-].
    """
    parts: dict[tuple[str, str], tuple[int, float]] = {}
    for (kind, _, phase), members in graph.phases.items():
        count, total = parts.get((phase, kind), (0, 0.0))
        parts[phase, kind] = (count + len(members), total + float(busy[members].sum()))
    exposed, stolen = timeline.exposed[index], timeline.stolen[index]
    spent = dict.fromkeys((graph.labels[place][3] for place in graph.collectives), 0.0)
    for place, number in dict(timeline.awaited[index]).items():  # what is exposed counts in the phase of the collective
        spent[graph.labels[graph.collectives[number]][3]] += float(exposed[place])
    for place in np.flatnonzero(stolen).tolist():
        phase = graph.labels[place][3]
        spent[phase if phase in spent else next(iter(spent))] += float(stolen[place])
    for phase, seconds in spent.items():
        parts[phase, "collective"] = (parts[phase, "collective"][0], seconds)
    waiting = float((timeline.stalls[index] - exposed).sum())
    if waiting > _EQUAL * timeline.period:
        parts["", "waiting"] = (len(graph.collectives), waiting)
    rest = timeline.period - sum(time for _, time in parts.values())
    if abs(rest) > _EQUAL * timeline.period:
        parts["", "host"] = (len(graph), rest)
    return parts


def list_operations(lanes: Sequence[Lane]) -> "polars.DataFrame":
    """The interval table: every operation of one steady-state iteration in program order, see `Prediction.timeline`."""
    import polars

    names = ("name", "kind", "variant", "phase", "module")
    text = dict.fromkeys(("stream", *names), polars.String)
    frames = []
    for lane in lanes:
        labels = zip(*lane.graph.labels, strict=True) if lane.graph.labels else ((),) * 5
        columns = {
            "rank": [lane.rank] * len(lane.graph),
            "stream": lane.streams,
            "operation": np.arange(len(lane.graph)),
        }
        columns |= dict(zip(names, labels, strict=True)) | {"start_s": lane.starts, "end_s": lane.ends}
        frames.append(polars.DataFrame(columns, schema_overrides=text | {"rank": polars.Int64}).drop("variant"))
    return polars.concat(frames)


def _cut(depth: int | None) -> "polars.Expr":
    """The first names of a module's path."""
    import polars

    if depth is None:
        return polars.col("module")
    names = polars.col("module").str.split(".").list
    return names.head(int(check_positive("depth", depth, integer=True))).list.join(".")


def list_spans(operations: "polars.DataFrame", level: str, depth: int | None = None) -> "polars.DataFrame":
    """When each module, or each stage, is at work on the compute streams, from its first operation to its last.

    Gives rank, stream (the level), phase, module, operations [-], start_s, end_s [s]; spans of a rank do not overlap.
    """
    import polars

    keys = ("rank", "stream", "phase", "module")
    module = _cut(depth) if level == "module" else polars.lit("")
    frame = operations.filter(stream="compute").with_columns(stream=polars.lit(level), module=module)
    ends = {"operations": polars.len().cast(polars.Int64), "start_s": polars.first("start_s")}
    spans = frame.group_by(polars.struct(keys).rle_id().alias("span"), *keys, maintain_order=True)
    return spans.agg(**ends, end_s=polars.last("end_s")).drop("span")


def sum_idle(lane: Lane) -> dict[str, float]:
    """Time in which a compute stream works, and is idle, by cause; all together are the period.

    Gives busy_s; stolen_s (what collectives in flight took from operations on the same core); host_s (nothing was
        launched); communication_s (a collective that had to end was in flight); waiting_s (it waited for other ranks)
        [s].
    """
    stolen = float(lane.stolen.sum())
    busy = float((lane.ends - lane.starts)[lane.compute].sum()) - stolen
    times = {"busy_s": busy, "stolen_s": stolen, "host_s": 0.0, "communication_s": 0.0, "waiting_s": 0.0}
    for cause, _, seconds in lane.rests():
        times[f"{cause}_s"] += seconds
    return times


def sum_communication(lane: Lane) -> dict[str, float]:
    """Time of a rank in collectives, and its part that operations hide.

    Gives total_s, exposed_s, overlapped_s, waiting_s [s]; exposed_share, waiting_share of the iteration [-].
    """
    flights = np.stack([lane.starts, lane.ends], axis=1)[lane.collectives]
    total = float(measure_overlap(flights, np.array([-np.inf]), np.array([np.inf]))[0])
    stalled = float(lane.exposed.sum())
    exposed, waiting = min(stalled + float(lane.stolen.sum()), total), float(lane.stalls.sum()) - stalled
    shares = {"exposed_share": exposed / lane.period, "waiting_share": waiting / lane.period}
    return {"total_s": total, "exposed_s": exposed, "overlapped_s": total - exposed, "waiting_s": waiting} | shares


def sum_modules(lane: Lane, depth: int | None) -> "polars.DataFrame":
    """Time of every module: forward, backward and update, with the idle time of the compute stream before it.

    In program order; the three sum to the period. An update belongs to the modules whose parameters and gradients it
    reads and writes, by their bytes; one of several modules counts as an operation of each.
    """
    import polars

    graph, owners, period = lane.graph, _find_owners(lane.graph), lane.period
    busy = lane.ends - lane.starts
    busy[lane.collectives] = 0.0
    spent = [*zip(range(len(graph)), [1] * len(graph), busy.tolist(), [0.0] * len(graph), strict=True)]
    spent += [(place, 0, seconds, seconds) for _, place, seconds in lane.rests()]
    rows = [
        (module, count, graph.labels[place][3], share * seconds, share * idle)
        for place, count, seconds, idle in spent
        for module, share in owners.get(place, {graph.labels[place][4]: 1.0}).items()
    ]
    frame = polars.DataFrame(rows, schema=("module", "operations", "phase", "time_s", "idle_s"), orient="row")
    phases = [polars.col("time_s").filter(phase=phase).sum().alias(f"{phase}_s") for phase in PHASES]
    total = polars.col("time_s").sum().alias("share") / period
    sums = (polars.col("operations").sum(), *phases, polars.col("idle_s").sum(), total)
    frame = frame.group_by(_cut(depth), maintain_order=True).agg(*sums)
    return polars.concat([frame.filter(polars.col("module") != ""), frame.filter(module="")])


def _find_owners(graph: Graph) -> dict[int, dict[str, float]]:
    """Shares of modules in the updates that name none, by the bytes of the parameters and gradients that are theirs."""
    owner: dict[int, str] = {}
    touched: dict[int, list[tuple[int, float]]] = {}
    for place, buffer, nbytes in graph.accesses[:, :3].tolist():
        _, kind, _, phase, module = graph.labels[int(place)]
        if module:
            owner.setdefault(int(buffer), module)
        elif phase == "update" and kind != "collective":
            touched.setdefault(int(place), []).append((int(buffer), nbytes))
    for _ in range(2):  # what the optimizer keeps belongs with what it is used with
        for buffers in touched.values():
            known = {owner[buffer] for buffer, _ in buffers if buffer in owner}
            if len(known) == 1:
                owner |= dict.fromkeys((buffer for buffer, _ in buffers if buffer not in owner), known.pop())
    shares: dict[int, dict[str, float]] = {}
    for place, buffers in touched.items():
        total = sum(nbytes for buffer, nbytes in buffers if buffer in owner)
        for buffer, nbytes in buffers if total else ():
            if buffer in owner:
                mine = shares.setdefault(place, {})
                mine[owner[buffer]] = mine.get(owner[buffer], 0.0) + nbytes / total
    return shares


def _find_last(lanes: Sequence[Lane], lane: Lane, place: int) -> tuple[Lane, int]:
    """The rank that was ready last for a collective, and its position there: parts of it run at the same time."""
    parts = [
        (other.timeline.waits[other.index][one], other, one)
        for other in lanes
        for one in other.collectives[
            (abs(other.starts[other.collectives] - lane.starts[place]) <= lane.near)
            & (abs(other.ends[other.collectives] - lane.ends[place]) <= lane.near)
        ].tolist()
    ]
    return parts[rank_largest([-wait for wait, *_ in parts], slack=lane.near)[0]][1:]


def _walk_back(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, str, int, float, float]]:
    """Lane, stream, operation, start and end [s] of what everything waited for, the last first; without a gap."""
    lane = lanes[rank_largest([lane.ends.max(initial=-np.inf) for lane in lanes], slack=lanes[0].near)[0]]
    place, shift = rank_largest(lane.ends, slack=lane.near)[0], 0.0
    time = float(lane.ends[place])
    while True:
        stream, end, time = lane.streams[place], time, float(lane.starts[place]) + shift
        yield lane, stream, place, time, end
        if stream != "compute":
            lane, place = _find_last(lanes, lane, place)
        same = lane.collectives[lane.groups[lane.collectives] == lane.groups[place]] if stream != "compute" else ()
        known = (lane.before(same, place), lane.held(place), lane.before(lane.compute, place))
        found = next((f for f in known if f and abs(lane.ends[f[0]] + f[1] + shift - time) <= lane.near), None)
        while found is None:  # it started when it was launched: back along the host's clock, to what that waited for
            last, freed, found = lane.find_blocker(place)
            began = min(freed + shift, time)
            yield lane, "host", place, began, time
            time = began
            if found is None:
                place, shift = last[0], last[1] + shift
        place, shift = found[0], found[1] + shift


def find_critical_path(lanes: Sequence[Lane]) -> "polars.DataFrame":
    """The chain of operations that sets the time: each starts when the previous one ends, on any rank and stream.

    The path is followed backward from the last operation. It is recorded after one whole period, so that a delay of a
    rank at the end of an iteration, which the next one absorbs, is left out. Steps before the iteration belong to the
    previous one.
    """
    import polars

    period, near, steps = lanes[0].period, lanes[0].near, []
    last = max(float(lane.ends.max(initial=-np.inf)) for lane in lanes)
    most = 8 * sum(len(lane.graph) for lane in lanes)
    for lane, stream, place, start, end in islice(_walk_back(lanes), most) if period > 0 else ():
        start, end = max(start + period, last - period), min(end + period, last)
        if end <= last - period + near:
            break
        if end > start + near:
            name, kind, _, phase, module = lane.graph.labels[place]
            steps.append((lane.rank, stream, place, name, kind, phase, module, start, end))
    columns = ("rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s")
    return polars.DataFrame(steps[::-1], schema=columns, orient="row")
