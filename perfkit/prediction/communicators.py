"""Which ranks meet in which collectives, which ranks are alike, and what every collective takes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfkit.communication.lookup import split_key
from perfkit.estimates import Estimate, keep_quiet
from perfkit.fitting import Fit
from perfkit.models.kernels import in_context
from perfkit.platform import Platform
from perfkit.units import Array, check_positive
from perfkit.workloads.graph import Graph

__all__ = ["Cast", "cast_ranks", "find_peers", "time_collectives"]

Ranks = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Cast:
    """One rank of every kind, the others being like it in what they do and in whom they meet.

    Parameters
    ----------
    graphs : tuple of Graph
        What each does.
    stands : tuple of tuple of int
        Ranks that each stands for, itself first.
    slowdowns : tuple of float
        How many times longer its operations take [-].
    groups : tuple of tuple of tuple of int
        Ranks of each of its communicators.
    keys : tuple of tuple of int
        Numbers of these communicators, the same on all ranks that share one.
    """

    graphs: tuple[Graph, ...]
    stands: tuple[Ranks, ...]
    slowdowns: tuple[float, ...]
    groups: tuple[tuple[Ranks, ...], ...]
    keys: tuple[Ranks, ...]

    def name_communicators(self, number: int) -> list[int]:
        """Communicator of every collective of one of the ranks.

        Parameters
        ----------
        number : int
            Which of the graphs [-].

        Returns
        -------
        keys : list of int
            In program order [-].
        """
        graph = self.graphs[number]
        return [self.keys[number][int(group)] for group in graph.column("group")[graph.collectives]]


def find_peers(group: Ranks, rank: int) -> Ranks:
    """Ranks of the communicator that another rank has in place of this one, as in a mesh of ranks.

    Parameters
    ----------
    group : tuple of int
        Ranks of a communicator, evenly spaced unless the rank is one of them [-].
    rank : int
        Another rank [-].

    Returns
    -------
    peers : tuple of int
        Its communicator [-].

    Raises
    ------
    ValueError
        For a communicator whose ranks are not evenly spaced.

    Examples
    --------
    >>> find_peers((0, 1, 2, 3), 6), find_peers((0, 4), 6)
    ((4, 5, 6, 7), (2, 6))
    """
    if rank in group or len(group) == 1:
        return group if rank in group else (rank,)
    step = group[1] - group[0]
    if step < 1 or list(group) != list(range(group[0], group[-1] + 1, step)):
        raise ValueError(
            f"groups has {group}, which are not evenly spaced, so that the communicator of rank {rank} is not known; "
            "give one graph for each rank"
        )
    block = step * len(group)
    first = rank // block * block + rank % step
    return tuple(range(first, first + block, step))


def cast_ranks(graphs: Sequence[Graph], ranks: int, slowdown: Mapping[int, float]) -> Cast:
    """Find which ranks are alike: the same graph, the same speed, and communicators with the same kinds of ranks.

    Parameters
    ----------
    graphs : sequence of Graph
        One per rank, or one for all.
    ranks : int
        Ranks that take part [-].
    slowdown : mapping of int to float
        How many times longer the operations of a rank take, by rank [-].

    Returns
    -------
    cast : Cast
        One rank of every kind.

    Raises
    ------
    ValueError
        For a rank that does not exist, or a slowdown that is not above zero.
    """
    for rank, factor in slowdown.items():
        if rank not in range(ranks):
            raise ValueError(f"slowdown names rank {rank!r}; the ranks are 0 to {ranks - 1}; choose one of these")
        check_positive(f"slowdown of rank {rank}", factor)
    everyone, own = tuple(range(ranks)), list(graphs) * (ranks if len(graphs) == 1 else 1)
    kinds = [(id(graph), float(slowdown.get(rank, 1.0))) for rank, graph in enumerate(own)]
    colours = _number(kinds)
    alike = max(colours) == 0
    used, groups = [], []
    for rank, graph in enumerate(own[:1] if alike else own):
        used.append(sorted({int(number) for number in graph.column("group")[graph.collectives]}))
        named = enumerate(graph.groups or (everyone,))
        groups.append(tuple(find_peers(group, rank) if number in used[-1] else () for number, group in named))
    while not alike:
        kinds_of = _colour_groups(groups, used, colours)
        finer = _number([(c, *kinds_of[rank]) for rank, c in enumerate(colours)])
        alike, colours = max(finer) == max(colours), finer
    firsts = [colours.index(colour) for colour in range(max(colours) + 1)]
    names: dict[tuple[object, int], int] = {}
    keys = []
    for rank in firsts:
        seen: Counter[object] = Counter()
        numbers = [-1] * len(groups[rank])
        for group, kind in zip(used[rank], _colour_groups(groups, used, colours)[rank], strict=True):
            numbers[group] = names.setdefault((kind, seen[kind]), len(names))
            seen[kind] += 1
        keys.append(tuple(numbers))
    return Cast(
        graphs=tuple(own[rank] for rank in firsts),
        stands=tuple(tuple(r for r in everyone if colours[r] == colour) for colour in range(len(firsts))),
        slowdowns=tuple(kinds[rank][1] for rank in firsts),
        groups=tuple(groups[rank] for rank in firsts),
        keys=tuple(keys),
    )


def _number(values: Sequence[object]) -> list[int]:
    """Numbers of values, from 0 in order of first appearance."""
    found: dict[object, int] = {}
    return [found.setdefault(value, len(found)) for value in values]


def _colour_groups(
    groups: Sequence[Sequence[Ranks]], used: Sequence[Sequence[int]], colours: Sequence[int]
) -> list[list[Ranks]]:
    """Kinds of ranks in each communicator that every rank uses."""
    known: dict[Ranks, Ranks] = {}

    def sort(group: Ranks) -> Ranks:
        if group not in known:
            known[group] = tuple(sorted(colours[rank] for rank in group))
        return known[group]

    return [[sort(own[number]) for number in numbers] for own, numbers in zip(groups, used, strict=True)]


def time_collectives(cast: Cast, platform: Platform) -> tuple[list[Array], tuple[str, ...]]:
    """Time of each collective of every kind of rank, and what to know about it.

    Parameters
    ----------
    cast : Cast
        Who does what with whom.
    platform : Platform
        Where it runs; ranks fill one node after the other.

    Returns
    -------
    durations : list of array
        One time per collective [s].
    notes : tuple of str
        What makes them less sure than their spread says.
    """
    known: dict[tuple[str, float, int, int, int], float] = {}
    notes: dict[str, None] = {}
    local = platform.network.ranks_per_node

    def find(operation: str, nbytes: float, group: Ranks) -> float:
        nodes = Counter(rank // local for rank in group)
        key = (operation, nbytes, len(group), len(nodes), max(nodes.values()))
        if key not in known:
            estimate = _price(platform, operation, nbytes, *key[2:])
            context = platform.context.get(f"collective.{operation}")
            sizes = {"hot": np.asarray(estimate.time), "cold": np.asarray(0.0), "page_walks": np.asarray(0.0)}
            known[key] = float(in_context(sizes, **(context if context is not None else {})))
            notes.update(dict.fromkeys(estimate.warnings))
        return known[key]

    durations = []
    for graph, groups in zip(cast.graphs, cast.groups, strict=True):
        places = graph.collectives
        sizes, numbers = graph.column("nbytes")[places], graph.column("group")[places].astype(int)
        times = [
            find(graph.labels[place][0], max(float(nbytes), 1.0), groups[number])
            for place, nbytes, number in zip(places, sizes, numbers, strict=True)
        ]
        durations.append(np.array(times, dtype=float))
    return durations, tuple(notes)


def _price(platform: Platform, operation: str, nbytes: float, ranks: int, nodes: int, most: int) -> Estimate:
    """Price one collective of ranks on so many nodes, with at most so many on a node."""
    way, network = None, platform.network
    if nodes > 1 and most == 1:
        way = "rail"
    elif nodes > 1 and most < network.ranks_per_node:  # smaller nodes
        kept = _narrow(platform.collectives, most, network.ranks_per_node)
        narrow = replace(network, ranks_per_node=most, nodes=nodes)
        platform, ranks = replace(platform, network=narrow, collectives=kept), most * nodes
    with keep_quiet():
        return platform.collective(operation, nbytes, ranks=ranks, algorithm=way)


def _narrow(fits: Mapping[str, Fit], most: int, local: int) -> dict[str, Fit]:
    """Fits of collectives that still hold where a node has fewer ranks: on rails, and of so many ranks inside one."""
    kept = {}
    for key, fit in fits.items():
        _, ranks, way = split_key(key)
        if way == "rail" or (ranks is not None and ranks <= most):
            kept[key] = fit
        elif ranks is None and fit.ranges.get("ranks", (2.0, float(local)))[1] <= local:
            kept[key] = replace(fit, ranges={**fit.ranges, "ranks": (2.0, float(most))})
    return kept
