"""What a timeline shows: every operation, spans of modules and stages, idle time by cause, and time by module."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from perfkit.prediction.lanes import Lanes, find_stream
from perfkit.prediction.simulation import Timeline
from perfkit.units import Array, check_choice, check_positive, check_type, rank_largest
from perfkit.workloads.graph import PHASES, Graph

if TYPE_CHECKING:
    import polars

__all__ = [
    "LEVELS",
    "find_idle",
    "find_spans",
    "list_operations",
    "list_spans",
    "sum_modules",
]

#: How finely a timeline can be listed: stages are the phases of an iteration.
LEVELS = ("operation", "module", "stage")
#: Ranks that every simulated one stands for, itself first [-].
Stands: TypeAlias = Sequence[tuple[int, ...]]


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
    return module if depth is None else ".".join(module.split(".")[: check_positive("depth", depth, integer=True)])


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
        lanes = Lanes(graph, timeline, index)
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

    check_type("rank", rank, int | None)
    alike = {one: index for index in range(len(graphs)) for one in (stands[index] if stands else (index,))}
    if rank is not None and rank not in alike:
        raise ValueError(f"rank is {rank!r}; the ranks are 0 to {len(alike) - 1}; choose one of these")
    index = rank_largest(find_idle(graphs, timeline)["busy_s"].to_numpy())[0] if rank is None else alike[rank]
    lanes = Lanes(graphs[index], timeline, index)
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
