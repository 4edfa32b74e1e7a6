"""Ranks of an iteration: what each executes, which are alike, which meet in a collective, and how
long each takes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from perfkit.fitting import Iteration
from perfkit.ground.units import Array, check_choice, check_positive, check_type, show
from perfkit.platform.collectives import join_regions
from perfkit.platform.estimates import CollectiveTime
from perfkit.platform.nodes import advise_nodes
from perfkit.platform.platform import Platform
from perfkit.platform.whatif import resize_nodes
from perfkit.prediction.cost import price_host
from perfkit.workloads.execution import execute
from perfkit.workloads.graph import COLUMN, Graph
from perfkit.workloads.placement import Plan

Ranks = Sequence[int]
_NBYTES, _GROUP = COLUMN["nbytes"], COLUMN["group"]


class Workload(Protocol):
    """What describes an iteration on any number of ranks, such as a DLRM, a Transformer or a
    Net."""

    @property
    def family(self) -> str:
        """Family of workloads that it belongs to."""

    @property
    def dtype(self) -> str:
        """Data type of its products."""

    @property
    def description(self) -> str:
        """What is computed, in a few words."""

    def graphs(
        self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = False
    ) -> tuple[Graph, ...]:
        """What every rank computes in one iteration."""


Work: TypeAlias = Workload | Graph | Sequence[Graph]


class RankGroup(NamedTuple):
    """Ranks that execute the same and meet the same kinds of ranks.

    `groups` are the ranks of each communicator of the first of them, by its number in the graph.
    `communicators` is the communicator of each collective in program order: the same number on all
    kinds that share it [-].
    """

    graph: Graph
    ranks: tuple[int, ...]
    slowdown: float
    groups: Mapping[int, Ranks]
    communicators: list[int]


@dataclass(frozen=True, eq=False)
class RankTimes:
    """What a kind of rank executes: the time of each operation in program order, zero for
    collectives [s].

    `host` is the time of the host up to the first launch of each operation, `launch_interval` from there to
    its last, and `durations` is the time of each collective [s].
    """

    group: RankGroup
    seconds: Array
    host: Array
    launch_interval: Array
    durations: Array

    @cached_property
    def collective_waits(self) -> list[tuple[int, int]]:
        """Positions that wait, in order, and the collectives they wait for; the end of the
        iteration for the rest.

        Numbers below 0 are collectives of the iteration before.
        """
        graph = self.group.graph
        places, n = graph.collectives.tolist(), len(graph)
        if graph.waits is None:
            return [(place + 1, number) for number, place in enumerate(places)]
        pairs = sorted(map(tuple, graph.waits.tolist()))
        known = {number % len(places) for _, number in pairs}
        return [*pairs, *((n, number) for number in range(len(places)) if number not in known)]

    @cached_property
    def segments(self) -> np.ndarray:
        """Where pieces begin and end: after collectives and transfers, and at waits.

        With each stand the number of the collective that it waits for and of the one it launches at
        its end; where it has none, how many collectives there are.
        """
        graph, n, none = self.group.graph, len(self.seconds), len(self.group.graph.collectives)
        bounds = {0, n, *(graph.collectives + 1).tolist(), *(graph.transfers + 1).tolist()}
        rows = sorted(
            [
                *self.collective_waits,
                *(
                    (place, none)
                    for place in bounds - {place for place, _ in self.collective_waits}
                ),
            ]
        )
        begins, waits = np.array(rows, dtype=int).T
        ends, launches = np.append(begins[1:], n), np.full(n + 1, none)
        launches[graph.collectives] = np.arange(none)
        return np.stack([begins, ends, waits, np.where(begins < ends, launches[ends - 1], none)])

    def add_up(self, device: bool) -> tuple[Array, Array, Array]:
        """Host and device time before each operation, and how far its end is from the second on a
        free device [s].

        Kernels of a CPU run on the host itself, which launches nothing ahead. A collective does not
        end on its own.
        """
        if not device:
            done = np.append(0.0, np.cumsum(self.host + self.seconds))
            return np.zeros(len(done)), done, np.full(len(done), -np.inf)
        last = self.seconds / np.maximum(self.group.graph.column("launches"), 1.0)
        issued, done = (
            np.append(0.0, np.cumsum(times))
            for times in (self.host + self.launch_interval, self.seconds)
        )
        ends = np.maximum(issued[1:] - self.launch_interval + self.seconds, issued[1:] + last)
        ends[self.group.graph.collectives] = -np.inf
        return issued, done, np.append(ends - done[1:], -np.inf)


def find_graphs(
    workload: Work,
    platform: Platform,
    ranks: int | None,
    plan: Plan | None,
    execution: str | None = None,
) -> tuple[Workload | Graph, Sequence[Graph], int]:
    """What is priced, its graphs, and how many ranks take part; a ValueError names arguments that
    do not fit."""
    listed: Sequence[Any] = workload if isinstance(workload, list | tuple) else [workload]
    given = None if ranks is None else int(check_positive("ranks", ranks, integer=True))
    captured = bool(listed) and all(isinstance(graph, Graph) for graph in listed)
    what: Any = listed[0] if captured else workload
    count = what.ranks if captured else given or 1
    if not captured and not (hasattr(what, "graphs") and hasattr(what, "family")):
        known = "a DLRM, a Transformer, a Net or captured graphs, such as Transformer.bert(batch=8)"
        raise ValueError(f"workload is {show(what)}; it must be {known}")
    if captured and plan is not None:
        raise ValueError(
            "plan is given with graphs, which already have a place for every table; leave it out"
        )
    found = {graph.ranks for graph in listed} if captured else {count}
    if found != {given or count} or (captured and len(listed) not in (1, count)):
        held = f"workload holds {len(listed)} graphs of {', '.join(map(str, sorted(found)))} ranks"
        held += f" and ranks is {given}; it must be" if given else "; it must be"
        raise ValueError(
            f"{held} one graph for all ranks or one for each; capture it for the ranks that take part"
        )
    if count > platform.network.ranks:
        known = f"platform {platform.name!r} has {platform.network.ranks}"
        raise ValueError(f"ranks is {count}; {known}; {advise_nodes(platform, count)}")
    check_choice(f"on {platform.name} dtype", what.dtype, platform.device.peaks)
    check_type("execution", execution, str | None)
    if execution == "graphs" and platform.device.kind == "cpu":
        raise ValueError(
            f"execution is 'graphs'; {platform.name!r} is a CPU, which has none; take eager or compiled"
        )
    graphs = (
        listed if captured else what.graphs(count, plan, accelerator=platform.device.kind != "cpu")
    )
    if any(graph.columns or graph.sizes is not None for graph in graphs):
        raise ValueError("sizes are arrays; find their times with perfkit.sweep")
    return what, execute(graphs, execution), count


def find_peers(group: Ranks, rank: int) -> Ranks:
    """Ranks of the communicator that a rank has in place of this one, as in a mesh of ranks.

    Evenly spaced ranks are a range: two ranges are compared at once, however long they are.

    Examples
    --------
    >>> find_peers((0, 1, 2, 3), 6), find_peers((0, 4), 6)
    (range(4, 8), range(2, 10, 4))
    """
    if not isinstance(group, range):
        step = group[1] - group[0] if len(group) > 1 else 1
        spaced = range(group[0], group[0] + step * len(group), step) if step > 0 else range(0)
        group = spaced if [*spaced] == [*group] else group
    if rank in group:
        return group
    if not isinstance(group, range):
        fault = f"which are not evenly spaced, so that the communicator of rank {rank} is not known"
        raise ValueError(f"groups has {group}, {fault}; give one graph for each rank")
    block = group.step * len(group)
    first = rank // block * block + rank % group.step
    return range(first, first + block, group.step)


def group_identical_ranks(
    graphs: Sequence[Graph], ranks: int, slowdown: Mapping[int, float]
) -> list[RankGroup]:
    """Kinds of ranks, in order of their first ranks: equal graphs and speed, and equal kinds of
    ranks to meet.

    `graphs` are one for each rank, or one for all; `slowdown` is how many times longer the
    operations of a rank take, by rank [-]. A ValueError names a rank that does not exist.
    """
    for rank, factor in slowdown.items():
        if rank not in range(ranks):
            raise ValueError(
                f"slowdown names rank {show(rank)}; the ranks are 0 to {ranks - 1}; choose one of these"
            )
        check_positive(f"slowdown of rank {rank}", factor)
    slowdown = {rank: float(factor) for rank, factor in slowdown.items()}
    own = list(graphs) * (ranks if len(graphs) == 1 else 1)
    named = dict[int, dict[int, Ranks]]()
    everyone = range(ranks)
    spaced: dict[int, Ranks] = {}  # of each group, which many graphs share, looked at once
    for graph in graphs:
        named[id(graph)] = {}
        for number in np.unique(graph.features[graph.collectives, _GROUP]).astype(int).tolist():
            group: Ranks = graph.groups[number] if graph.groups else everyone
            if id(group) not in spaced:
                spaced[id(group)] = find_peers(group, group[0])
            named[id(graph)][number] = spaced[id(group)]
    several = len(graphs) > 1
    colours = _number(
        (graph.content if several else 0, slowdown.get(rank, 1.0)) for rank, graph in enumerate(own)
    )
    groups = [
        {number: find_peers(group, rank) for number, group in named[id(graph)].items()}
        for rank, graph in enumerate(own if max(colours) else own[:1])
    ]
    while True:
        every = dict.fromkeys(group for mine in groups for group in mine.values())
        numbers = _number(tuple(sorted(colours[rank] for rank in group)) for group in every)
        sorts = dict(zip(every, numbers, strict=True))
        finer = _number(
            (c, *map(sorts.get, mine.values())) for c, mine in zip(colours, groups, strict=False)
        )
        if max(finer) == max(colours):
            break
        colours = finer
    alike: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours):
        alike.setdefault(colour, []).append(rank)
    names: dict[tuple[int, int], int] = {}
    kinds = []
    for members in alike.values():
        graph, mine, keys, seen = (
            own[members[0]],
            groups[members[0]],
            dict[int, int](),
            Counter[int](),
        )
        for number, group in mine.items():
            keys[number] = names.setdefault((sorts[group], seen[sorts[group]]), len(names))
            seen[sorts[group]] += 1
        communicators = [keys[int(number)] for number in graph.features[graph.collectives, _GROUP]]
        kinds.append(
            RankGroup(
                graph, tuple(members), float(slowdown.get(members[0], 1.0)), mine, communicators
            )
        )
    return kinds


def _number(values: Iterable[object]) -> list[int]:
    """Number of each value, from 0 in order of first appearance."""
    found: dict[object, int] = {}
    return [found.setdefault(value, len(found)) for value in values]


def price_group(
    where: Platform,
    operation: str,
    nbytes: Array,
    count: int,
    nodes: int,
    most: int,
    regions: int = 1,
) -> CollectiveTime:
    """Price collectives of `count` ranks that are spread over some nodes, at `most` so many ranks
    on one node.

    A message between two ranks that was not measured is priced as an all_gather of the two.
    """
    if regions > 1:
        local, none = -(-count // regions), CollectiveTime(np.zeros(nbytes.shape))
        inside = (
            price_group(where, operation, nbytes, local, -(-nodes // regions), most)
            if local > 1
            else none
        )
        return join_regions(where, inside, operation, nbytes, local, regions)
    if operation == "send_recv":  # between two neighbours
        nodes, most = 3 - min(most, 2), min(most, 2)
        if not any(key.startswith(operation) for key in where.collectives):
            operation, nbytes, count = "all_gather", 2.0 * nbytes, 2
    if nodes == 1 or most == where.network.ranks_per_node:
        return where.price_collective(operation, nbytes, count)
    if most == 1:
        return where.price_collective(operation, nbytes, count, "rail")
    if (nodes, most) not in where.memo:
        where.memo[nodes, most] = resize_nodes(where, nodes, most)
    found: CollectiveTime = where.memo[nodes, most].price_collective(
        operation, nbytes, most * nodes
    )
    return found


def time_collectives(
    groups: Sequence[RankGroup], platform: Platform, whole: Iteration | None = None
) -> tuple[list[Array], tuple[str, ...]]:
    """Time of each collective of every group of ranks [s], and what makes these times less certain
    than their spread.

    Ranks fill one node after the other. `whole` is the fit of whole iterations: collectives inside
    them take longer.
    """
    durations = [np.zeros(len(group.graph.collectives)) for group in groups]
    local, wanted = (
        platform.network.ranks_per_node,
        dict[tuple[str, Ranks], list[tuple[Array, int, float]]](),
    )
    region = platform.network.ranks // platform.network.regions
    for group, times in zip(groups, durations, strict=True):
        used = group.graph.features[group.graph.collectives]
        columns = zip(
            group.graph.collectives.tolist(),
            used[:, _NBYTES].tolist(),
            used[:, _GROUP].tolist(),
            strict=True,
        )
        for index, (place, nbytes, number) in enumerate(columns):
            key = (group.graph.labels[place].name, group.groups[int(number)])
            wanted.setdefault(key, []).append((times, index, max(nbytes, 1.0)))
    notes: dict[str, None] = {}
    for (operation, ranks), members in wanted.items():
        nodes = Counter(rank // local for rank in ranks)
        sizes = np.array([nbytes for *_, nbytes in members])
        regions = len({rank // region for rank in ranks})
        found = price_group(
            platform, operation, sizes, len(ranks), len(nodes), max(nodes.values()), regions
        )
        notes |= dict.fromkeys(found.notes)
        for (times, index, _), seconds in zip(members, found.time.tolist(), strict=True):
            times[index] = seconds
    if whole is not None:
        delay = (
            whole.get("per_collective", 0.0)
            if sum(len(group.ranks) for group in groups) > 1
            else 0.0
        )
        durations = [whole["scale"] * times + delay for times in durations]
    return durations, tuple(notes)


def time_rank(
    group: RankGroup, seconds: Array, durations: Array, platform: Platform, whole: Iteration | None
) -> RankTimes:
    """Times of the operations of a rank inside an iteration, of its collectives, and of its host
    [s].

    `whole` is the fit of whole iterations, if there is one: it scales times, and may hold the time
    of the host.
    """
    graph, slowdown = group.graph, group.slowdown
    if whole is not None and "per_operation" in whole:
        first, more = np.full(len(graph), whole["per_operation"]), np.zeros(len(graph))
    else:
        first, more = price_host(graph, platform)
    if graph.execution == "graphs":  # the first launch is that of all
        first[1:], more[:] = 0.0, 0.0
    if whole is not None:
        first[graph.collectives] += whole.get("per_resume", 0.0)
        seconds = whole["scale"] * seconds
    if platform.device.kind == "cpu":
        first = slowdown * first
    return RankTimes(group, slowdown * seconds, first, more, durations)
