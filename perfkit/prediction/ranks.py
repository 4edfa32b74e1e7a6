"""Ranks of an iteration: what each executes, which are alike, which meet in a collective, and how
long each takes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from perfkit.fitting import Iteration
from perfkit.ground.hardware import Link
from perfkit.ground.units import Array, check_positive, check_type, show
from perfkit.models.experts import DISPATCH
from perfkit.models.offload import HOST_WORK
from perfkit.platform.nodes import advise_nodes
from perfkit.platform.platform import Platform
from perfkit.prediction.classes import check_format
from perfkit.prediction.cost import HostTimes, price_hosts
from perfkit.workloads.execution import execute
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import TableSet

if TYPE_CHECKING:
    from perfkit.platform.collective_costs import CollectiveCost

Ranks = Sequence[int]


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


Work: TypeAlias = Workload | str | Graph | Sequence[Graph]


class ResolvedWorkload(NamedTuple):
    """What is predicted, as graphs of ranks.

    Parameters
    ----------
    workload : Workload or Graph
        What was given; the first graph if several were.
    graphs : sequence of Graph
        One for each rank, or one for all.
    ranks : int
        How many take part [-].
    """

    workload: Workload | Graph
    graphs: Sequence[Graph]
    ranks: int


class RankGroup(NamedTuple):
    """Ranks that execute the same and meet the same groups of ranks.

    Parameters
    ----------
    graph : Graph
        What each of them executes.
    ranks : tuple of int
        Their numbers [-].
    slowdown : float
        How many times longer their operations take [-].
    communicator_ranks : mapping of int to sequence of int
        Ranks of each communicator of the first of them, by its number in the graph [-].
    communicators : list of int
        Communicator of each collective, in program order: the same number on all groups that share
        it [-].
    """

    graph: Graph
    ranks: tuple[int, ...]
    slowdown: float
    communicator_ranks: Mapping[int, Ranks]
    communicators: list[int]


class RunningTimes(NamedTuple):
    """Times of a rank added up from the begin of an iteration to each operation, and to the end.

    Parameters
    ----------
    issued, done : array
        Time of the host, and of the device, for all operations before [s].
    ready : array
        End of each operation on a device that is free, less `done` after it; minus infinity for
        collectives, which do not end on their own, and at the end [s].
    """

    issued: Array
    done: Array
    ready: Array


@dataclass(frozen=True, eq=False)
class RankTimes:
    """How long the operations of a group of ranks take, in program order.

    Parameters
    ----------
    group : RankGroup
        The ranks, and what they execute.
    seconds : array
        Time of each operation, zero for collectives [s].
    host : array
        Time of the host up to the first launch of each operation [s].
    launch_interval : array
        Time from there to its last launch [s].
    durations : array
        Time of each collective [s].
    """

    group: RankGroup
    seconds: Array
    host: Array
    launch_interval: Array
    durations: Array

    def scale(self, factor: float) -> "RankTimes":
        """The same with all times longer by a factor: operations, collectives and the host."""
        return replace(
            self,
            seconds=factor * self.seconds,
            host=factor * self.host,
            launch_interval=factor * self.launch_interval,
            durations=factor * self.durations,
        )

    def add_up(self, device: bool) -> RunningTimes:
        """Add up times of the host and of the device.

        Kernels of a CPU run on the host itself, which launches nothing ahead.
        """
        if not device:
            done = np.append(0.0, np.cumsum(self.host + self.seconds))
            return RunningTimes(np.zeros(len(done)), done, np.full(len(done), -np.inf))
        graph = self.group.graph
        time_of_last_launch = self.seconds / np.maximum(graph.column("launches"), 1.0)
        issued = np.append(0.0, np.cumsum(self.host + self.launch_interval))
        done = np.append(0.0, np.cumsum(self.seconds))
        end_from_first_launch = issued[1:] - self.launch_interval + self.seconds
        end_from_last_launch = issued[1:] + time_of_last_launch
        ends = np.maximum(end_from_first_launch, end_from_last_launch)
        ends[graph.collectives] = -np.inf
        return RunningTimes(issued, done, np.append(ends - done[1:], -np.inf))


def resolve_workload(
    workload: Work,
    platform: Platform,
    ranks: int | None,
    plan: Plan | None,
    execution: str | None = None,
    *,
    pads_products: bool = True,
) -> ResolvedWorkload:
    """Find the graphs of all ranks of a workload.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        See `predict`.
    platform : Platform
        Where it runs.
    ranks : int or None
        Ranks that take part; None for one, or those that graphs were captured for [-].
    plan : Plan or None
        Placement of embedding tables.
    execution : str, optional
        See `predict`.
    pads_products : bool, optional
        Whether what compiles the graphs pads the sides of products, see `Stack.pads_products`.

    Returns
    -------
    resolved : ResolvedWorkload
        Graphs with numbers in them.

    Raises
    ------
    ValueError
        Names arguments that do not fit.
    """
    listed: Sequence[Any] = workload if isinstance(workload, list | tuple) else [workload]
    asked = None if ranks is None else int(check_positive("ranks", ranks, integer=True))
    captured = bool(listed) and all(isinstance(graph, Graph) for graph in listed)
    source: Any = listed[0] if captured else workload
    if not captured and not (hasattr(source, "graphs") and hasattr(source, "family")):
        allowed = (
            "a DLRM, a Transformer, the name of a preset such as 'bert-large', or captured graphs"
        )
        text = f"workload is {show(source)}; it must be {allowed}"
        if isinstance(source, TableSet):
            text += (
                "; perfkit.shard finds a plan for tables alone and perfkit.price_plan prices one, or make a "
                "DLRM with them"
            )
        raise ValueError(text)
    if captured:
        count = source.ranks
        _check_captured(listed, asked, plan)
    else:
        count = asked or 1
    if count > platform.network.ranks:
        most = f"platform {platform.name!r} has {platform.network.ranks}"
        raise ValueError(f"ranks is {count}; {most}; {advise_nodes(platform, count)}")
    check_format(platform, source.dtype)
    if execution is not None:  # a missing value of pandas cannot be compared
        check_type("execution", execution, str)
    on_cpu = platform.device.kind == "cpu"
    if execution == "graphs" and on_cpu:
        raise ValueError(
            f"execution is 'graphs'; {platform.name!r} is a CPU, which has none; take eager or compiled"
        )
    graphs = listed if captured else source.graphs(count, plan, accelerator=not on_cpu)
    if any(graph.columns for graph in graphs):
        raise ValueError("sizes are arrays; find their times with perfkit.sweep")
    executed = graphs
    if execution is not None:
        executed = execute(graphs, execution, pads_products=pads_products)
    if any(not len(graph) for graph in executed if isinstance(graph, Graph)):
        raise ValueError(
            "the graph has no operations, so there is nothing to predict; capture a step that runs "
            "its work in this process"
        )
    return ResolvedWorkload(source, executed, count)


def _check_captured(graphs: Sequence[Graph], ranks: int | None, plan: Plan | None) -> None:
    """Raise a ValueError if captured graphs do not fit together, or to the other arguments."""
    if plan is not None:
        raise ValueError(
            "plan is given with graphs, which already have a place for every table; leave it out"
        )
    count = graphs[0].ranks
    captured_for = {graph.ranks for graph in graphs}
    if captured_for != {ranks or count} or len(graphs) not in (1, count):
        fault = f"workload holds {len(graphs)} graphs of {', '.join(map(str, sorted(captured_for)))} ranks"
        if ranks:
            fault += f" and ranks is {ranks}"
        raise ValueError(
            f"{fault}; it must be one graph for all ranks or one for each; capture it for the "
            "ranks that take part"
        )


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
    """Group ranks that execute the same at the same speed, and meet the same groups of ranks.

    Parameters
    ----------
    graphs : sequence of Graph
        One for each rank, or one for all.
    ranks : int
        How many there are [-].
    slowdown : mapping of int to float
        How many times longer the operations of a rank take, by rank [-].

    Returns
    -------
    groups : list of RankGroup
        In the order of their first ranks.

    Raises
    ------
    ValueError
        For a slow rank that does not exist.
    """
    for rank, factor in slowdown.items():
        if rank not in range(ranks):
            raise ValueError(
                f"slowdown names rank {show(rank)}; the ranks are 0 to {ranks - 1}; choose one of these"
            )
        check_positive(f"slowdown of rank {rank}", factor)
    if len({id(graph) for graph in graphs}) == 1:  # all ranks execute one graph
        graphs = graphs[:1]
    named = _list_communicators(graphs, ranks)
    if len(graphs) == 1 and not slowdown:
        (graph,) = graphs
        of_first = {number: find_peers(peers, 0) for number, peers in named[0].items()}
        order = {number: index for index, number in enumerate(of_first)}
        numbers = graph.features.group[graph.collectives].astype(int).tolist()
        communicators = [order[number] for number in numbers]
        return [RankGroup(graph, tuple(range(ranks)), 1.0, of_first, communicators)]
    return _group_unlike_ranks(graphs, named, ranks, slowdown)


def _list_communicators(graphs: Sequence[Graph], ranks: int) -> list[dict[int, Ranks]]:
    """Ranks of the communicators of each graph, by their numbers in the graph [-]."""
    everyone = range(ranks)
    spaced: dict[int, Ranks] = {}  # of each group, which many graphs share, looked at once
    communicators = dict[int, dict[int, Ranks]]()  # of each graph, which many ranks may share
    for graph in graphs:
        if id(graph) in communicators:
            continue
        numbers = sorted({*graph.features.group[graph.collectives].astype(int).tolist()})
        communicators[id(graph)] = {}
        for number in numbers:
            group: Ranks = graph.groups[number] if graph.groups else everyone
            if id(group) not in spaced:
                spaced[id(group)] = find_peers(group, group[0])
            communicators[id(graph)][number] = spaced[id(group)]
    return [communicators[id(graph)] for graph in graphs]


def _group_unlike_ranks(
    graphs: Sequence[Graph],
    named: Sequence[Mapping[int, Ranks]],
    ranks: int,
    slowdown: Mapping[int, float],
) -> list[RankGroup]:
    """Group ranks by refining colours: ranks of one colour execute the same, until they also meet
    the same colours.

    `named` are the communicators of each graph.
    """
    several = len(graphs) > 1
    graph_of_rank = list(graphs) if several else list(graphs) * ranks
    named_of_rank = list(named) if several else list(named) * ranks
    colours = _number(
        (graph.content if several else 0, float(slowdown.get(rank, 1.0)))
        for rank, graph in enumerate(graph_of_rank)
    )
    different = range(ranks) if max(colours) else range(1)
    communicators = [
        {number: find_peers(peers, rank) for number, peers in named_of_rank[rank].items()}
        for rank in different
    ]
    while True:
        distinct = dict.fromkeys(peers for of_rank in communicators for peers in of_rank.values())
        met_colours = _number(tuple(sorted(colours[rank] for rank in peers)) for peers in distinct)
        colour_of_peers = dict(zip(distinct, met_colours, strict=True))
        finer = _number(
            (colour, *map(colour_of_peers.get, of_rank.values()))
            for colour, of_rank in zip(colours, communicators, strict=False)
        )
        if max(finer) == max(colours):
            break
        colours = finer
    ranks_of_colour: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours):
        ranks_of_colour.setdefault(colour, []).append(rank)
    shared_numbers: dict[tuple[int, int], int] = {}
    groups = []
    for members in ranks_of_colour.values():
        first = members[0]
        graph, of_rank = graph_of_rank[first], communicators[first]
        seen = Counter[int]()
        keys = dict[int, int]()
        for number, peers in of_rank.items():
            colour = colour_of_peers[peers]
            keys[number] = shared_numbers.setdefault((colour, seen[colour]), len(shared_numbers))
            seen[colour] += 1
        numbers = graph.features.group[graph.collectives].astype(int).tolist()
        groups.append(
            RankGroup(
                graph=graph,
                ranks=tuple(members),
                slowdown=float(slowdown.get(first, 1.0)),
                communicator_ranks=of_rank,
                communicators=[keys[number] for number in numbers],
            )
        )
    return groups


def _number(values: Iterable[object]) -> list[int]:
    """Number of each value, from 0 in order of first appearance."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def find_group_cost(
    platform: Platform,
    operation: str,
    count: int,
    nodes: int,
    most: int,
    regions: int = 1,
    algorithm: str = "",
) -> "CollectiveCost":
    """Find what prices collectives of `count` ranks that are spread over some nodes, at `most` so
    many ranks on one node. It is found once for each platform.

    `algorithm` is that of ranks that fill several nodes; all others leave it to the library.

    A message between two ranks that was not measured is priced as an all_gather of the two, by the
    algorithm of the library.
    """
    if nodes == 1 or most < platform.network.ranks_per_node:
        algorithm = ""
    key = ("group cost", operation, count, nodes, most, regions, algorithm)
    if key not in platform.memo:
        if algorithm:
            from perfkit.platform.collectives import find_cost

            platform.memo[key] = find_cost(platform, operation, count, algorithm)
        else:
            platform.memo[key] = _choose_group_cost(
                platform, operation, count, nodes, most, regions
            )
    cost: CollectiveCost = platform.memo[key]
    return cost


def find_link_of_dispatch(platform: Platform, name: str) -> Link:
    """Find a link of which bandwidth and latency price tokens that are sent once.

    Parameters
    ----------
    platform : Platform
        Where they are sent.
    name : str
        ``intra`` inside nodes, ``inter`` between them [-].

    Returns
    -------
    link : Link
        The link.

    Raises
    ------
    ValueError
        For a platform that does not know it.
    """
    if name not in platform.network.links:
        raise ValueError(
            f"dispatch is 'once', and platform {platform.name!r} knows no {name} link, whose bandwidth "
            f"prices it; take dispatch='all_to_all', or state network.links.{name} in its file"
        )
    return platform.network.links[name]


def _choose_group_cost(
    platform: Platform, operation: str, count: int, nodes: int, most: int, regions: int
) -> "CollectiveCost":
    """Choose what prices collectives of a group of ranks, see `find_group_cost`."""
    # only exchanges need them
    from perfkit.platform.collective_costs import AsAllGather, NoExchange, SentOnce
    from perfkit.platform.collectives import find_cost, join_regions
    from perfkit.platform.spread_ranks import find_cost_of_parts

    if operation in HOST_WORK:  # of a rank and its host
        from perfkit.platform.host_costs import find_host_cost

        return find_host_cost(platform, operation, ranks=most)

    if operation == DISPATCH:
        if regions > 1:
            raise ValueError(
                "dispatch is 'once' among ranks of several regions, whose links it does not know; "
                "take dispatch='all_to_all', or an ep that stays in a region"
            )
        link = find_link_of_dispatch(platform, "intra")
        if nodes == 1:
            return SentOnce(link.bandwidth.value, link.latency.value)
        between = find_link_of_dispatch(platform, "inter")
        return SentOnce(between.bandwidth.value, link.latency.value + between.latency.value)
    if regions > 1:
        local = -(-count // regions)
        inside: CollectiveCost = NoExchange()
        if local > 1:
            inside = find_group_cost(platform, operation, local, -(-nodes // regions), most)
        return join_regions(platform, inside, operation, local, regions)
    if operation == "send_recv":  # between two neighbours
        most = min(most, 2)
        if count > 2 and nodes > 1:  # a ring is as slow as its step to another node
            count, most = 2, 1
        # both on one node, or each on its own
        nodes = 1
        if most == 1:
            nodes = 2
        if not any(key.startswith(operation) for key in platform.collectives):
            if platform.network.algorithms:
                network = replace(platform.network, algorithms={})
                platform = replace(platform, network=network)
            return AsAllGather(find_group_cost(platform, "all_gather", 2, nodes, most))
    if nodes == 1 or most == platform.network.ranks_per_node:
        return find_cost(platform, operation, count)
    return find_cost_of_parts(platform, operation, nodes, most)


class _MessageKind(NamedTuple):
    """What collectives that are priced together have in common.

    Parameters
    ----------
    operation : str
        The collective.
    ranks : sequence of int
        Ranks that take part [-].
    algorithm : str
        That of ranks that fill several nodes; empty where the library chooses.
    """

    operation: str
    ranks: Ranks
    algorithm: str


class _Messages(NamedTuple):
    """Collectives of one kind in one group of ranks.

    Parameters
    ----------
    times : array
        Times of the collectives of the group, which receive the answer [s].
    numbers : array of int
        Numbers of these there [-].
    nbytes : array
        Sizes of the messages that they send [B].
    shares : array
        Share of its message that each of them sends [-].
    """

    times: Array
    numbers: np.ndarray
    nbytes: Array
    shares: Array


def _list_messages(group: RankGroup, times: Array) -> Iterator[tuple[_MessageKind, _Messages]]:
    """Collectives of a group of ranks by their kind, with their `times`, which are still to be
    found."""
    graph = group.graph
    positions = graph.collectives
    parts = graph.features.part[positions]
    shares = np.where(parts > 0, parts, 1.0)
    # a part takes its share of the time of the whole message
    nbytes = np.maximum(graph.features.nbytes[positions] / shares, 1.0)
    communicators = graph.features.group[positions].astype(int).tolist()
    kinds: dict[tuple[str, int], int] = {}
    kind_of_collective = []
    for position, communicator in zip(positions.tolist(), communicators, strict=True):
        key = (graph.labels[position].name, communicator)
        if key not in kinds:
            kinds[key] = len(kinds)
        kind_of_collective.append(kinds[key])
    kind_numbers = np.array(kind_of_collective, dtype=int)
    for (operation, communicator), kind in kinds.items():
        numbers = np.flatnonzero(kind_numbers == kind)
        ranks = group.communicator_ranks[communicator]
        algorithm = graph.algorithms.get(communicator, "")
        kind_of_messages = _MessageKind(operation, ranks, algorithm)
        yield kind_of_messages, _Messages(times, numbers, nbytes[numbers], shares[numbers])


def time_collectives(
    groups: Sequence[RankGroup], platform: Platform, iteration_fit: Iteration | None = None
) -> tuple[list[Array], tuple[str, ...]]:
    """Time the collectives of all groups, those of the same ranks and operation in one pass.

    Parameters
    ----------
    groups : sequence of RankGroup
        Ranks, which fill one node after the other.
    platform : Platform
        Where they run.
    iteration_fit : Iteration, optional
        Fit of whole iterations: collectives inside them take longer.

    Returns
    -------
    durations : list of array
        Time of each collective, by group [s].
    notes : tuple of str
        What makes these times less certain than their spread, those of the collectives with most time
        first.
    """
    durations = [np.zeros(len(group.graph.collectives)) for group in groups]
    messages = dict[_MessageKind, list[_Messages]]()
    for group, times in zip(groups, durations, strict=True):
        for kind, of_group in _list_messages(group, times):
            messages.setdefault(kind, []).append(of_group)
    ranks_per_node = platform.network.ranks_per_node
    ranks_per_region = platform.network.ranks // platform.network.regions
    seconds_of_notes: dict[str, float] = {}
    for kind, alike in messages.items():
        ranks = kind.ranks
        ranks_of_node = Counter(rank // ranks_per_node for rank in ranks)
        cost = find_group_cost(
            platform,
            kind.operation,
            count=len(ranks),
            nodes=len(ranks_of_node),
            most=max(ranks_of_node.values()),
            regions=len({rank // ranks_per_region for rank in ranks}),
            algorithm=kind.algorithm,
        )
        # messages of one size are priced once
        nbytes = np.concatenate([of_group.nbytes for of_group in alike])
        sizes, size_of_message = np.unique(nbytes, return_inverse=True)
        priced = cost.price(sizes)
        seconds = priced.time[size_of_message]
        for note in priced.notes:
            seconds_of_notes[note] = seconds_of_notes.get(note, 0.0) + float(seconds.sum())
        begin = 0
        for of_group in alike:
            end = begin + len(of_group.numbers)
            of_group.times[of_group.numbers] = of_group.shares * seconds[begin:end]
            begin = end
    if iteration_fit is not None:
        delay = 0.0
        if sum(len(group.ranks) for group in groups) > 1:
            delay = iteration_fit.get("per_collective", 0.0)
        for group, times in zip(groups, durations, strict=True):
            graph = group.graph
            names = [graph.labels[position].name for position in graph.collectives.tolist()]
            # nobody measured iterations in which hosts work
            of_ranks = np.array([name not in HOST_WORK for name in names], dtype=bool)
            times[of_ranks] = iteration_fit["scale"] * times[of_ranks] + delay
    notes = sorted(seconds_of_notes, key=lambda note: -seconds_of_notes[note])
    return durations, tuple(notes)


def time_ranks(
    groups: Sequence[RankGroup],
    seconds: Sequence[Array],
    durations: Sequence[Array],
    platform: Platform,
    iteration_fit: Iteration | None,
) -> list[RankTimes]:
    """Times of the operations of all ranks inside an iteration, of their collectives, and of their
    hosts.

    Parameters
    ----------
    groups : sequence of RankGroup
        Ranks that execute the same.
    seconds, durations : sequence of array
        Times of the operations and of the collectives of each group [s].
    platform : Platform
        Where they run.
    iteration_fit : Iteration or None
        Fit of whole iterations, if there is one: it scales times, and may hold the time of the
        host.

    Returns
    -------
    times : list of RankTimes
        What the simulation takes, by group.
    """
    graphs = [group.graph for group in groups]
    if iteration_fit is not None and "per_operation" in iteration_fit:
        per_operation = iteration_fit["per_operation"]
        hosts = []
        for graph in graphs:
            operations = np.zeros(len(graph))
            hosts.append(HostTimes(operations + per_operation, operations))
    else:
        hosts = price_hosts(graphs, platform)
    times = []
    for group, host, kernels, collectives in zip(groups, hosts, seconds, durations, strict=True):
        first_launch, later_launches = host
        if group.graph.execution == "graphs":  # the first launch is that of all
            first_launch[1:] = 0.0
            later_launches[:] = 0.0
        if iteration_fit is not None:
            first_launch[group.graph.collectives] += iteration_fit.get("per_resume", 0.0)
            kernels = iteration_fit["scale"] * kernels
        if platform.device.kind == "cpu":
            first_launch = group.slowdown * first_launch
        kernels = group.slowdown * kernels
        times.append(RankTimes(group, kernels, first_launch, later_launches, collectives))
    return times
