"""What a timeline shows: every operation, spans of modules and stages, idle time by cause, and the critical path."""

from collections.abc import Generator, Iterator, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from perfkit.prediction.simulation import Timeline
from perfkit.units import Array, check_choice, check_positive
from perfkit.workloads.graph import PHASES, Graph

if TYPE_CHECKING:
    import polars

__all__ = [
    "LEVELS",
    "find_critical_path",
    "find_idle",
    "find_spans",
    "find_stream",
    "list_operations",
    "list_spans",
    "sum_modules",
]

#: How finely a timeline can be listed: stages are the phases of an iteration.
LEVELS = ("operation", "module", "stage")
#: Ranks that every simulated one stands for, itself first [-].
Stands: TypeAlias = Sequence[tuple[int, ...]]
#: Rank, stream, operation, start and end [s] of a part of the critical path.
Step: TypeAlias = tuple[int, str, int, float, float]
#: An operation, and how much later than the one shown its iteration is [s].
Place: TypeAlias = tuple[int, float]
_TOLERANCE = 1e-9  # two times are the same when they differ by less than this part of the period


def find_stream(graph: Graph, position: int) -> str:
    """Name the stream of one operation.

    Parameters
    ----------
    graph : Graph
        One rank's iteration.
    position : int
        Position of the operation [-].

    Returns
    -------
    stream : str
        ``compute``, or ``communication`` with the number of the communicator where there are several.
    """
    if graph.labels[position][1] != "collective":
        return "compute"
    return f"communication {int(graph.column('group')[position])}" if len(graph.groups) > 1 else "communication"


def list_operations(graphs: Sequence[Graph], timeline: Timeline, stands: Stands = ()) -> "polars.DataFrame":
    """Start and end of every operation of one steady-state iteration.

    Parameters
    ----------
    graphs : sequence of Graph
        One per simulated rank.
    timeline : Timeline
        What the simulation says of them.
    stands : sequence of tuple of int, optional
        Ranks that each stands for, itself first; each for itself, unless given [-].

    Returns
    -------
    frame : polars.DataFrame
        rank, stream, operation, name, kind, phase, module, start_s, end_s [s], in program order.
    """
    import polars

    frames = []
    for index, graph in enumerate(graphs):
        rank = stands[index][0] if stands else index
        names, kinds, _, phases, modules = zip(*graph.labels, strict=True) if graph.labels else ((),) * 5
        streams = [find_stream(graph, position) for position in range(len(graph))]
        frames.append(
            polars.DataFrame(
                {
                    "rank": np.full(len(graph), rank), "stream": streams, "operation": np.arange(len(graph)),
                    "name": names, "kind": kinds, "phase": phases, "module": modules,
                    "start_s": timeline.starts[index], "end_s": timeline.ends[index],
                },
                schema_overrides=dict.fromkeys(("stream", "name", "kind", "phase", "module"), polars.String),
            )
        )  # fmt: skip
    return polars.concat(frames)


def _cut(module: str, depth: int | None) -> str:
    """The first names of a module's path."""
    return module if depth is None else ".".join(module.split(".")[:depth])


def list_spans(
    graphs: Sequence[Graph], timeline: Timeline, stands: Stands = (), *, level: str = "module", depth: int | None = None
) -> "polars.DataFrame":
    """When each module, or each stage, is at work on the compute streams, from its first operation to its last.

    Parameters
    ----------
    graphs : sequence of Graph
        One per simulated rank.
    timeline : Timeline
        What the simulation says of them.
    stands : sequence of tuple of int, optional
        Ranks that each stands for, itself first; each for itself, unless given [-].
    level : str
        ``module`` or ``stage``.
    depth : int, optional
        Names of a module's path that are told apart; all of them, unless given [-].

    Returns
    -------
    frame : polars.DataFrame
        rank, stream (the level), phase, module, operations [-], start_s, end_s [s]; spans of one rank do not overlap.
    """
    import polars

    columns = ("rank", "stream", "phase", "module", "operations", "start_s", "end_s")
    rows = [
        (stands[index][0] if stands else index, level, *span)
        for index, graph in enumerate(graphs)
        for span in find_spans(graph, timeline.starts[index], timeline.ends[index], level=level, depth=depth)
    ]
    return polars.DataFrame(rows, schema=columns, orient="row")


def find_spans(
    graph: Graph, starts: Array, ends: Array, *, level: str = "module", depth: int | None = None
) -> Iterator[tuple[str, str, int, float, float]]:
    """Operations of the compute stream that follow each other in one module, or one stage.

    Parameters
    ----------
    graph : Graph
        One rank's iteration.
    starts, ends : array
        Of its operations [s].
    level : str
        ``module`` or ``stage``.
    depth : int, optional
        Names of a module's path that are told apart; all of them, unless given [-].

    Yields
    ------
    span : (str, str, int, float, float)
        Phase, module, operations [-], start and end [s].
    """
    check_choice("level", level, LEVELS[1:])
    keys = [(phase, _cut(module, depth) if level == "module" else "") for *_, phase, module in graph.labels]
    compute = (position for position, label in enumerate(graph.labels) if label[1] != "collective")
    for (phase, module), members in groupby(compute, keys.__getitem__):
        inside = list(members)
        yield phase, module, len(inside), float(starts[inside[0]]), float(ends[inside[-1]])


class _Lanes:
    """Streams of one rank as the cycle they are: before the first operation comes the last of the iteration before."""

    def __init__(self, graph: Graph, timeline: Timeline, rank: int) -> None:
        self.graph, self.period, self.tolerance = graph, timeline.period, _TOLERANCE * timeline.period
        self.starts, self.ends, self.waits = timeline.starts[rank], timeline.ends[rank], timeline.waits[rank]
        self.stalls, self.exposed, self.issued = timeline.stalls[rank], timeline.exposed[rank], timeline.issued[rank]
        self.device, self.transfers = timeline.device, set(graph.transfers.tolist())
        self.collectives = graph.collectives
        self.compute = np.setdiff1d(np.arange(len(graph)), self.collectives)
        groups = graph.column("group")[self.collectives].astype(int)
        self.members = {group: self.collectives[groups == group].tolist() for group in set(groups.tolist())}
        self.group = dict(zip(self.collectives.tolist(), groups.tolist(), strict=True))
        self.awaited: dict[int, list[int]] = {}
        places = self.collectives.tolist()
        rows = graph.waits.tolist() if graph.waits is not None else [(p + 1, i) for i, p in enumerate(places)]
        for place, number in [*rows, *((len(graph), i) for i in set(range(len(places))) - {int(i) for _, i in rows})]:
            self.awaited.setdefault(int(place), []).append(places[int(number)])
        self.stalled: dict[int, list[int]] = {}
        for place in np.flatnonzero(self.stalls > self.tolerance).tolist():
            self.stalled.setdefault(self.next_compute(place), []).append(place)

    def blocks(self, position: int) -> bool:
        """Whether the host goes on only when the operation has ended."""
        return position in self.transfers if self.device else position not in self.group

    def before(self, positions: Sequence[int] | np.ndarray, position: int) -> Place | None:
        """The one of `positions` that comes before, and the shift [s] of its iteration."""
        if not len(positions):
            return None
        place = int(np.searchsorted(positions, position)) - 1
        return int(positions[place]), 0.0 if place >= 0 else -self.period

    def next_compute(self, position: int) -> int:
        """Place among the compute stream's operations of the one at `position` or the next one after."""
        return int(np.searchsorted(self.compute, position)) % max(len(self.compute), 1)

    def held(self, position: int) -> Place | None:
        """The last collective to end of those the compute stream stood still for since its operation before."""
        found = [
            (one, -self.period if place > position else 0.0)
            for place in self.stalled.get(self.next_compute(position), ())
            for one in self.awaited[place]
        ]
        known = [one for one in found if self.ends[one[0]] + one[1] <= self.starts[position] + self.tolerance]
        return max(known, key=lambda one: self.ends[one[0]] + one[1], default=None)

    def rests(self) -> Iterator[tuple[str, int, float]]:
        """Cause, operation and length [s] of every time the compute stream stands still."""
        ends = self.ends[self.compute]
        gaps = np.maximum(self.starts[self.compute] - np.concatenate((ends[-1:] - self.period, ends[:-1])), 0.0)
        for later, places in self.stalled.items() if len(gaps) else ():
            for place in places:
                stall = min(float(self.stalls[place]), float(gaps[later]))
                exposed = min(float(self.exposed[place]), stall)
                gaps[later] -= stall
                cause = max(self.awaited[place], key=lambda one: self.ends[one])
                yield "communication", cause, exposed
                yield "waiting", cause, stall - exposed
        for later in np.flatnonzero(gaps > self.tolerance).tolist():
            yield "host", int(self.compute[later]), float(gaps[later])


def find_idle(graphs: Sequence[Graph], timeline: Timeline, stands: Stands = ()) -> "polars.DataFrame":
    """Time in which each rank's compute stream works, and stands still, by cause; a row sums to the period.

    Parameters
    ----------
    graphs : sequence of Graph
        One per simulated rank.
    timeline : Timeline
        What the simulation says of them.
    stands : sequence of tuple of int, optional
        Ranks that each stands for, itself first; each for itself, unless given [-].

    Returns
    -------
    frame : polars.DataFrame
        rank, ranks (so many are alike) [-]; busy_s; stolen_s (what collectives in flight took from operations on the
        same core); host_s (nothing was launched); communication_s (a collective that had to end was in flight);
        waiting_s (it waited for other ranks) [s].
    """
    import polars

    rows = []
    for index, graph in enumerate(graphs):
        lanes = _Lanes(graph, timeline, index)
        stolen = float(timeline.stolen[index].sum())
        busy = float((lanes.ends - lanes.starts)[lanes.compute].sum()) - stolen
        causes = {"host_s": 0.0, "communication_s": 0.0, "waiting_s": 0.0}
        for cause, _, seconds in lanes.rests():
            causes[f"{cause}_s"] += seconds
        rank, ranks = (stands[index][0], len(stands[index])) if stands else (index, 1)
        rows.append({"rank": rank, "ranks": ranks, "busy_s": busy, "stolen_s": stolen, **causes})
    return polars.DataFrame(rows)


def sum_modules(
    graphs: Sequence[Graph], timeline: Timeline, stands: Stands = (), *, depth: int | None = 2, rank: int | None = None
) -> "polars.DataFrame":
    """Time of every module: forward, backward and update, with what the compute stream stands still for it.

    Parameters
    ----------
    graphs : sequence of Graph
        One per simulated rank.
    timeline : Timeline
        What the simulation says of them.
    stands : sequence of tuple of int, optional
        Ranks that each stands for, itself first; each for itself, unless given [-].
    depth : int or None
        Names of a module's path that are told apart; None for all of them [-].
    rank : int, optional
        Which rank; the one with most work, unless given [-].

    Returns
    -------
    frame : polars.DataFrame
        module (empty for what belongs to none), operations [-], forward_s, backward_s, update_s [s], idle_s (part of
        those three) [s], share [-], in program order; the three sum to the period.

    Notes
    -----
    An update belongs to the modules whose parameters and gradients it reads and writes, by their bytes; one of several
    modules counts as an operation of each.
    """
    import polars

    if depth is not None:
        depth = int(check_positive("depth", depth, integer=True))
    alike = {one: index for index in range(len(graphs)) for one in (stands[index] if stands else (index,))}
    if rank is not None and rank not in alike:
        raise ValueError(f"rank is {rank!r}; the ranks are 0 to {len(alike) - 1}; choose one of these")
    index = int(np.argmax(find_idle(graphs, timeline)["busy_s"].to_numpy())) if rank is None else alike[rank]
    lanes = _Lanes(graphs[index], timeline, index)
    rows: dict[str, dict[str, float]] = {}
    owners = _find_owners(lanes.graph)

    def add(position: int, busy: float, idle: float, count: int) -> None:
        phase, module = lanes.graph.labels[position][3:]
        for part, share in owners.get(position, {module: 1.0}).items():
            start = {"operations": 0, **{f"{name}_s": 0.0 for name in PHASES}, "idle_s": 0.0}
            row = rows.setdefault(_cut(part, depth), start)
            row["operations"] += count
            row[f"{phase}_s"] += share * (busy + idle)
            row["idle_s"] += share * idle

    for position, (_, kind, *_) in enumerate(lanes.graph.labels):
        busy = 0.0 if kind == "collective" else float(lanes.ends[position] - lanes.starts[position])
        add(position, busy, 0.0, 1)
    for _, position, seconds in lanes.rests():
        add(position, 0.0, seconds, 0)
    if "" in rows:
        rows[""] = rows.pop("")
    for row in rows.values():
        row["share"] = sum(row[f"{phase}_s"] for phase in PHASES) / timeline.period
    return polars.DataFrame([{"module": module, **row} for module, row in rows.items()])


def _find_owners(graph: Graph) -> dict[int, dict[str, float]]:
    """Shares of modules in the updates that name none, by the bytes of the parameters and gradients that are theirs."""
    owner: dict[int, str] = {}
    touched: dict[int, list[tuple[int, float]]] = {}
    for place, buffer, nbytes in graph.accesses[:, :3].tolist():
        phase, module = graph.labels[int(place)][3:]
        if module:
            owner.setdefault(int(buffer), module)
        elif phase == "update" and graph.labels[int(place)][1] != "collective":
            touched.setdefault(int(place), []).append((int(buffer), nbytes))
    for _ in range(2):  # what the optimizer keeps belongs with what it is used with
        for buffers in touched.values():
            known = {owner[buffer] for buffer, _ in buffers if buffer in owner}
            if len(known) == 1:
                owner |= dict.fromkeys((buffer for buffer, _ in buffers if buffer not in owner), known.pop())
    shares: dict[int, dict[str, float]] = {}
    for place, buffers in touched.items():
        weights: dict[str, float] = {}
        for buffer, nbytes in buffers:
            if buffer in owner:
                weights[owner[buffer]] = weights.get(owner[buffer], 0.0) + nbytes
        if total := sum(weights.values()):
            shares[place] = {module: weight / total for module, weight in weights.items()}
    return shares


class _Walk:
    """Backward through an iteration and those before: what each step had to wait for."""

    def __init__(self, graphs: Sequence[Graph], timeline: Timeline) -> None:
        self.lanes = [_Lanes(graph, timeline, rank) for rank, graph in enumerate(graphs)]
        self.tolerance = _TOLERANCE * timeline.period

    def steps(self) -> Iterator[Step]:
        """Rank, stream, operation, start and end [s] of each step, the last one first; they follow without a gap."""
        rank = max(range(len(self.lanes)), key=lambda r: self.lanes[r].ends.max(initial=-np.inf))
        position, shift = int(np.argmax(self.lanes[rank].ends)), 0.0
        time = float(self.lanes[rank].ends[position])
        while True:
            lanes = self.lanes[rank]
            begin = float(lanes.starts[position]) + shift
            yield rank, find_stream(lanes.graph, position), position, begin, time
            time = begin
            if position in lanes.group:
                rank, position = self._latest(rank, position)
                lanes = self.lanes[rank]
            found = self._stream(lanes, position, time - shift)
            if found is None:
                position, shift = yield from self._host(rank, position, shift, time)
                time = float(self.lanes[rank].ends[position]) + shift
            else:
                position, shift = found[0], found[1] + shift

    def _latest(self, rank: int, position: int) -> tuple[int, int]:
        """Rank and position of the part of a collective that was ready last; parts run at the same time."""
        start, end = self.lanes[rank].starts[position], self.lanes[rank].ends[position]
        parts = [
            (float(lanes.waits[place]), other, place)
            for other, lanes in enumerate(self.lanes)
            for place in lanes.collectives[
                (abs(lanes.starts[lanes.collectives] - start) <= self.tolerance)
                & (abs(lanes.ends[lanes.collectives] - end) <= self.tolerance)
            ].tolist()
        ]
        return min(parts)[1:]

    def _stream(self, lanes: _Lanes, position: int, time: float) -> Place | None:
        """What ended at `time` on a stream that the operation at `position` follows."""
        queue = lanes.before(lanes.members[lanes.group[position]], position) if position in lanes.group else None
        found = (queue or lanes.held(position), lanes.before(lanes.compute, position))
        return next((f for f in found if f and abs(lanes.ends[f[0]] + f[1] - time) <= self.tolerance), None)

    def _host(self, rank: int, position: int, shift: float, time: float) -> Generator[Step, None, Place]:
        """Back along the host's clock, to what the host itself waited for."""
        lanes = self.lanes[rank]
        while True:
            last = (position - 1, 0.0) if position else (len(lanes.graph) - 1, -lanes.period)
            freed = float(lanes.issued[last[0]]) + last[1]
            found = None
            for one in (last, None if lanes.device else lanes.held(position)):
                if one is not None and (one != last or lanes.blocks(last[0])):
                    end = float(lanes.ends[one[0]]) + one[1]
                    found, freed = (one, end) if end >= freed else (found, freed)
            began = min(freed + shift, time)
            yield rank, "host", position, began, time
            if found is not None:
                return found[0], found[1] + shift
            position, shift, time = last[0], last[1] + shift, began


def find_critical_path(graphs: Sequence[Graph], timeline: Timeline, stands: Stands = ()) -> "polars.DataFrame":
    """What the period consists of: each step began when the one before it had ended, on whatever rank and stream.

    Parameters
    ----------
    graphs : sequence of Graph
        One per simulated rank.
    timeline : Timeline
        What the simulation says of them.
    stands : sequence of tuple of int, optional
        Ranks that each stands for, itself first; each for itself, unless given [-].

    Returns
    -------
    frame : polars.DataFrame
        rank, stream (``host`` while an operation is launched), operation, name, kind, phase, module, start_s, end_s
        [s]; one step begins where the one before ends, and all together last one period.

    Notes
    -----
    The path is followed backward from the last operation, over a whole period before it is noted down, so that what one
    rank does at the end of an iteration and makes up for in the next is left out. Steps from before the iteration
    belong to the one before it.
    """
    import polars

    walk, period, steps = _Walk(graphs, timeline), timeline.period, []
    last = max(float(ends.max(initial=-np.inf)) for ends in timeline.ends)
    for rank, stream, position, start, end in islice(walk.steps(), 8 * sum(map(len, graphs))) if period > 0 else ():
        start, end = max(start + period, last - period), min(end + period, last)
        if end <= last - period + walk.tolerance:
            break
        if end > start:
            name, kind, _, phase, module = graphs[rank].labels[position]
            steps.append((stands[rank][0] if stands else rank, stream, position, name, kind, phase, module, start, end))
    columns = ("rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s")
    return polars.DataFrame(steps[::-1], schema=columns, orient="row")
