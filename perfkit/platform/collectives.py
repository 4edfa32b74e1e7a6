"""Prices of collectives: from fits, from textbook algorithms on the links, or composed over
nodes."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

import numpy as np

from perfkit.fitting import OverRanks
from perfkit.fitting.parameters import Key
from perfkit.ground.units import Array, check_choice, check_positive, check_type, format_rate, show
from perfkit.models import collectives as forms
from perfkit.models import hierarchy
from perfkit.models.algorithms import ALGORITHMS
from perfkit.platform.collective_costs import (
    SIGMA_COMPOSED,
    SIGMA_OF_PAIR,
    UNSHARED,
    CollectiveCost,
    ComparedFit,
    ComposedCost,
    FittedCost,
    FittedCurve,
    FittedRail,
    FlaggedTree,
    FlatAllToAll,
    LimitedByAllReduce,
    LimitedByLink,
    LinkedRail,
    NoExchange,
    PairOnRail,
    ProtocolsCost,
    RailCost,
    RegionsCost,
    RingCost,
    RingLink,
    TextbookCost,
    TreeCost,
    TwoLevelAllToAll,
    TwoLevels,
)
from perfkit.platform.collective_fits import (
    doubt_link,
    find_fitted_cost,
    find_link,
    find_start_up,
    grow_beyond,
    lacks_model,
)
from perfkit.platform.estimates import CollectiveTime
from perfkit.platform.machine import Machine
from perfkit.platform.nodes import advise_nodes


def price_collective(
    machine: Machine,
    operation: str,
    nbytes: Array,
    ranks: int,
    algorithm: str | None = None,
) -> CollectiveTime:
    """Price collectives as `Platform.collective_time` does, with parts, spread and warnings.

    `Platform.collective` says which fit is taken when. Composed times are never below what the
    links allow.
    """
    sizes = np.asarray(nbytes, dtype=float)
    return find_cost(machine, operation, ranks, algorithm).price(sizes)


def find_cost(
    machine: Machine, operation: str, ranks: int, algorithm: str | None = None
) -> CollectiveCost:
    """Find what prices a collective.

    Parameters
    ----------
    machine : Machine
        The platform.
    operation : str
        Such as ``all_reduce``.
    ranks : int
        Ranks that take part, which fill one node after the other [-].
    algorithm : str, optional
        One of `perfkit.models.algorithms.ALGORITHMS`; by default the one that the platform names
        for the operation, else what the library chooses.

    Returns
    -------
    cost : CollectiveCost
        It gives the times of messages of any size, and how sure these are.

    Raises
    ------
    ValueError
        For an operation or algorithm without a model, or more ranks than the network has.
    """
    check_type("operation", operation, str)
    ranks = check_positive("ranks", ranks, integer=True)
    if algorithm is None:
        algorithm = _find_chosen(machine, operation, ranks)
    else:
        check_choice("algorithm", algorithm, ALGORITHMS)
    most = _count_ranks(machine, ranks, algorithm)
    _check_operation(machine, operation, algorithm)
    ranks_of_region = most // machine.network.regions
    if ranks <= ranks_of_region:
        return _find_in_region(machine, operation, ranks, algorithm)
    inside = _find_in_region(machine, operation, ranks_of_region, algorithm)
    regions = -(-ranks // ranks_of_region)
    return join_regions(machine, inside, operation, ranks_of_region, regions)


def _find_chosen(machine: Machine, operation: str, ranks: int) -> str:
    """Algorithm that a platform names for an operation; empty where it leaves the choice to the
    library. So does an algorithm that needs nodes, inside a node."""
    chosen = machine.network.algorithms.get(operation, "")
    inside_node = ranks <= machine.network.ranks_per_node
    if chosen and ALGORITHMS[chosen].needs_nodes and inside_node:
        return ""
    return chosen


def list_algorithms(machine: Machine, operation: str) -> list[str]:
    """Algorithms of an operation that have a time on all ranks of a node or of the network.

    ``rail``, with one rank of each node, is none of them.
    """
    network = machine.network
    counts = {network.ranks_per_node, network.ranks} - {1}
    found = []
    for algorithm in ALGORITHMS:
        for ranks in sorted(counts):
            try:
                find_cost(machine, operation, ranks, algorithm).time(np.ones(1))
            except ValueError:
                continue
            if algorithm != "rail":
                found.append(algorithm)
            break
    return found


def _count_ranks(machine: Machine, ranks: int, algorithm: str) -> int:
    """Ranks of a machine that can take part, or an error if these are less than `ranks` [-]."""
    network = machine.network
    where = f"platform {machine.name!r}"
    most = network.ranks
    ranks_of_node = None
    if algorithm == "rail":
        where = f"with one on each node {where}"
        most = network.nodes
        ranks_of_node = 1
    if ranks > most:
        advice = advise_nodes(machine, ranks, each_node=ranks_of_node)
        raise ValueError(f"ranks is {ranks}; {where} has {most}; {advice}")
    return most


def _check_operation(machine: Machine, operation: str, algorithm: str) -> None:
    """Raise an error for an operation that was not measured, unless an algorithm is asked for whose
    form is known."""
    has_form = algorithm and operation in forms.OPERATIONS
    if not has_form and operation not in machine.collectives_by_operation:
        raise lacks_model(machine, operation, f"model for the collective {show(operation)}")


def join_regions(
    machine: Machine, inside: CollectiveCost, operation: str, ranks_of_region: int, regions: int
) -> RegionsCost:
    """Add to a collective inside regions what the far link between them takes.

    One rank of each region is on a ring with its share of the bytes, with ``all_to_all`` and
    ``send_recv`` with all of them, whatever the algorithm inside the regions. So all ranks of a
    region send at once, and the bandwidth of the link is that of each rank. Regions in which one rank
    sends all bytes would take up to `ranks_of_region` times as long between regions.
    """
    link = machine.network.links.get("far")
    if link is None:
        raise ValueError(
            f"platform {machine.name!r} has {regions} regions and no link 'far' between them; "
            "add it, such as .with_link('far', bandwidth=1e9, latency=0.01)"
        )
    return RegionsCost(
        inside=inside,
        operation=operation,
        ranks_of_region=ranks_of_region,
        regions=regions,
        alpha=link.latency.value,
        beta=1.0 / link.bandwidth.value,
    )


def _find_in_region(machine: Machine, operation: str, ranks: int, algorithm: str) -> CollectiveCost:
    """Find what prices a collective inside a region."""
    if ranks == 1:
        return NoExchange()
    if algorithm == "rail":
        return _find_rail(machine, operation, ranks)
    fitted = find_fitted_cost(machine, operation, ranks, algorithm)
    if fitted is not None:
        return _compare_with_link(machine, fitted)
    local = machine.network.ranks_per_node
    least_beta = _find_least_beta(machine, operation, ranks)
    if ranks <= local:
        textbook = _find_textbook(machine, operation, ranks, algorithm)
        return LimitedByLink(textbook, least_beta)
    if ranks % local:
        raise ValueError(
            f"ranks is {ranks}; across nodes it must be a multiple of the {local} ranks of a node"
        )
    composed = _compose(machine, operation, ranks // local, algorithm)
    limited = LimitedByLink(composed, least_beta)
    all_reduce = machine.collectives.get(str(Key("all_reduce", ranks)))
    is_ring = forms.COLLECTIVES[operation].across_nodes == "ring"
    if algorithm or not is_ring or all_reduce is None or isinstance(all_reduce, OverRanks):
        return limited
    start_up = float(composed.time(np.zeros(())))
    measured = FittedCost("all_reduce", ranks, (FittedCurve(all_reduce, ranks),))
    return LimitedByAllReduce(limited, measured, start_up)


def _compare_with_link(machine: Machine, fitted: FittedCost) -> CollectiveCost:
    """A fit, beside the bandwidth of its link if that is from a datasheet."""
    name = "intra" if fitted.ranks <= machine.network.ranks_per_node else "inter"
    link = machine.network.links.get(name)
    if link is None or link.bandwidth.kind != "datasheet":
        return fitted
    least_beta = _find_least_beta(machine, fitted.operation, fitted.ranks)
    return ComparedFit(fitted, name, link.bandwidth.value, least_beta)


def _find_least_beta(machine: Machine, operation: str, ranks: int) -> float:
    """Least time for each byte of the message [s/B]: for the bytes that leave or reach a rank, or a
    node over all its rails, even if switches reduce."""
    local = machine.network.ranks_per_node
    sharers = 1
    if ranks <= local:
        link = machine.network.links.get("intra")
        members = ranks
    else:
        link = machine.network.links.get("inter")
        members = ranks // local
        if operation not in UNSHARED:
            sharers = local
    if link is None:
        return 0.0
    # switches that reduce spare the second round of an all_reduce
    rounds = forms.COLLECTIVES[operation].rounds
    factor = float(forms.bus_factor(operation, members)) / rounds / sharers
    return factor / link.bandwidth.value


def _find_textbook(machine: Machine, operation: str, ranks: int, algorithm: str) -> TextbookCost:
    """An algorithm inside a node, from its textbook form and the link."""
    if not algorithm or ALGORITHMS[algorithm].needs_nodes:
        where = f"{ranks} ranks of one node" + (f" by {algorithm}" if algorithm else "")
        raise lacks_model(machine, operation, f"model for the collective {operation!r} on {where}")
    link = find_link(machine, "intra", operation, f"by {algorithm}")
    alpha, beta = link.latency.value, 1.0 / link.bandwidth.value
    of_link = "the link inside nodes"
    measured = _find_measured_link(machine, operation, ranks)
    if measured is not None and measured.beta > beta:
        alpha, beta = measured
        rates = [format_rate(rate, "B/s") for rate in (1.0 / beta, link.bandwidth.value)]
        of_link = f"the {rates[0]} of {rates[1]} that measured collectives reach inside nodes"
    numbers = f"alpha_hop = {alpha:.4g} s, beta_link = {beta:.4g} s/B"
    what = f"{operation} by {algorithm} on {ranks} ranks was not measured"
    return TextbookCost(
        operation=operation,
        algorithm=algorithm,
        sizes={"ranks": ranks, "alpha_hop": alpha, "beta_link": beta},
        formula=f"{algorithm} of the textbook, {numbers}",
        note=f"{what}: textbook form and {of_link}",
    )


def _find_measured_link(machine: Machine, operation: str, ranks: int) -> RingLink | None:
    """The link inside a node as measured collectives use it; None where the operation was not
    measured.

    A datasheet knows neither protocols nor a path through the memory of the host, which 8 L40S
    without NVLink take: measured collectives reach 1.5 of 32 GB/s there.
    """
    library = find_fitted_cost(machine, operation, ranks)
    if library is None:
        return None
    link = library.invert_ring()
    beta = _find_measured_beta(machine, operation, ranks)
    return link if beta is None else RingLink(link.alpha, beta)


# Over nodes.


def _compose(machine: Machine, operation: str, nodes: int, algorithm: str) -> ComposedCost:
    """Compose a collective over whole nodes from its stages inside nodes and between them."""
    local = machine.network.ranks_per_node
    algorithm = algorithm or forms.COLLECTIVES[operation].across_nodes
    if not algorithm:
        raise lacks_model(machine, operation, f"model of {operation} over {nodes} nodes")
    if algorithm not in COMPOSITIONS:
        key = Key(operation, local * nodes, algorithm)
        advice = f"leave the algorithm out, or calibrate it as {key}"
        raise ValueError(
            f"algorithm is {algorithm!r}; across nodes there is no form of it; {advice}"
        )
    composition = COMPOSITIONS[algorithm]
    rail_is_measured = any(
        key.algorithm == "rail" for key in machine.collectives_by_operation.get(operation, {})
    )
    is_guess = composition.evidence is Evidence.NOTHING
    if composition.evidence is Evidence.RAIL:
        is_guess = not rail_is_measured
    return ComposedCost(
        composition.find(machine, operation, nodes),
        operation,
        local,
        nodes,
        least_spread=composition.least_spread,
        rail_is_measured=rail_is_measured,
        is_guess=is_guess,
        growth=grow_beyond(machine, nodes),
    )


def _find_rail(machine: Machine, operation: str, nodes: int) -> RailCost:
    """The stage between nodes, with one rank of each: from its fit, or as a ring over the link."""
    fitted = find_fitted_cost(machine, operation, nodes, "rail")
    return _make_rail(machine, operation, nodes, fitted)


def _make_rail(machine: Machine, operation: str, nodes: int, fitted: FittedCost | None) -> RailCost:
    """The stage between nodes, from its fit if there is one."""
    start_up = float(find_start_up(machine, operation, nodes, "rail"))
    if fitted is not None:
        return FittedRail(fitted, start_up, link_is_known="inter" in machine.network.links)
    link = find_link(machine, "inter", operation, f"over {nodes} nodes")
    beta = float(forms.bus_factor(operation, nodes)) / link.bandwidth.value
    growth = grow_beyond(machine, nodes)
    return LinkedRail(alpha=start_up, beta=beta, growth=growth, notes=doubt_link(link))


class _RingLinks(NamedTuple):
    """Links of a ring over nodes."""

    beta_intra: float  # time per byte inside nodes [s/B]
    alpha_rail: float  # latency of a hop between nodes [s]
    beta_rail: float  # time per byte of a rail [s/B]


def _find_measured_beta(machine: Machine, operation: str, ranks: int) -> float | None:
    """Time per byte of a link inside a node [s/B] as measured collectives use it: the stages of the
    operation, such as reduce_scatter and all_gather of an all_reduce, go around a ring. None where
    one of them was not measured."""
    stages = hierarchy.LEVELS.get(operation, ())
    fitted_stages = [find_fitted_cost(machine, stage, ranks) for stage in stages]
    betas = [stage.invert_ring().beta for stage in fitted_stages if stage is not None]
    if not betas or len(betas) < len(stages):
        return None
    return sum(betas) / len(betas)


def _find_ring_links(
    machine: Machine, operation: str, nodes: int, fitted: FittedCost | None
) -> _RingLinks:
    """Links of a ring, from measured collectives where there are any; `fitted` are those of one
    rank of each node."""
    local, over = machine.network.ranks_per_node, f"over {nodes} nodes"
    beta_intra = 0.0
    if local > 1:
        measured = _find_measured_beta(machine, operation, local)
        if measured is None:
            beta_intra = 1.0 / find_link(machine, "intra", operation, over).bandwidth.value
        else:
            beta_intra = measured
    if fitted is not None:
        alpha_rail, beta_rail = fitted.invert_ring()
        return _RingLinks(beta_intra, alpha_rail, beta_rail)
    link = find_link(machine, "inter", operation, over)
    return _RingLinks(beta_intra, link.latency.value, 1.0 / link.bandwidth.value)


def _find_ring(machine: Machine, operation: str, nodes: int) -> RingCost:
    """Rings over all ranks."""
    if operation in UNSHARED:
        raise ValueError(
            f"algorithm is 'ring'; {operation} goes around no ring; leave the algorithm out"
        )
    local = machine.network.ranks_per_node
    ranks = local * nodes
    fitted_rail = find_fitted_cost(machine, operation, nodes, "rail")
    links = _find_ring_links(machine, operation, nodes, fitted_rail)
    steps = float(forms.ring_steps(operation, ranks))
    steps_between_nodes = float(forms.ring_steps(operation, nodes))
    step = machine.network.starts * hierarchy.STEP
    slower_step = max(links.alpha_rail - step, 0.0)
    alpha_hop = step + steps_between_nodes / steps * slower_step
    numbers = f"alpha_hop = {alpha_hop:.4g} s, beta_intra = {links.beta_intra:.4g} s/B, "
    numbers += f"beta_rail = {links.beta_rail:.4g} s/B"
    # an all_reduce goes around twice, each time as a reduce_scatter does
    turns = steps / (ranks - 1)
    return RingCost(
        operation=operation,
        links={
            "ranks_per_node": local,
            "nodes": nodes,
            "alpha_hop": alpha_hop,
            "beta_intra": links.beta_intra,
            "beta_rail": links.beta_rail,
        },
        start_up=turns * float(find_start_up(machine, "reduce_scatter", ranks)),
        formula=f"rings over all ranks, {numbers}, q = {hierarchy.OVERLAP:g}",
        between=_make_rail(machine, operation, nodes, fitted_rail),
    )


def _find_tree(machine: Machine, operation: str, nodes: int) -> TreeCost:
    """A tree over all ranks, from its textbook form and the links."""
    local = machine.network.ranks_per_node
    fitted_rail = find_fitted_cost(machine, operation, nodes, "rail")
    links = _find_ring_links(machine, operation, nodes, fitted_rail)
    alpha_hop = 0.0
    if local > 1:
        alpha_hop = find_link(machine, "intra", operation, "by tree").latency.value
    beta = max(links.beta_intra, links.beta_rail / local)
    numbers = f"alpha_rail = {links.alpha_rail:.4g} s, beta_link = {beta:.4g} s/B"
    return TreeCost(
        operation=operation,
        algorithm="tree",
        sizes={
            "ranks": local * nodes,
            "nodes": nodes,
            "alpha_hop": alpha_hop,
            "alpha_rail": links.alpha_rail,
            "beta_link": beta,
        },
        formula=f"tree of the textbook, {numbers}",
    )


def _find_stages(machine: Machine, operation: str) -> tuple[CollectiveCost, ...]:
    """Stages inside a node of a collective on two levels; none for nodes of one rank."""
    check_choice("operation", operation, hierarchy.LEVELS)
    local = machine.network.ranks_per_node
    if local == 1:
        return ()
    return tuple(_find_in_node(machine, stage) for stage in hierarchy.LEVELS[operation])


def _find_in_node(machine: Machine, operation: str) -> CollectiveCost:
    """A collective of all ranks of a node, as the library does it."""
    _check_operation(machine, operation, "")
    return _find_in_region(machine, operation, machine.network.ranks_per_node, "")


def _find_two_levels(machine: Machine, operation: str, nodes: int) -> TwoLevels:
    """Stages inside nodes and one between them that overlap."""
    inside = _find_stages(machine, operation)
    between = _find_rail(machine, operation, nodes)
    return TwoLevels(operation, machine.network.ranks_per_node, nodes, inside, between)


def _find_two_level_all_to_all(machine: Machine, operation: str, nodes: int) -> TwoLevelAllToAll:
    """An all_to_all inside nodes and one between them."""
    inside = _find_stages(machine, operation)
    between = _find_rail(machine, operation, nodes)
    local, memory_bandwidth = machine.network.ranks_per_node, machine.device.main_bandwidth
    return TwoLevelAllToAll(operation, local, nodes, inside, between, memory_bandwidth)


def _find_flat_all_to_all(machine: Machine, operation: str, nodes: int) -> FlatAllToAll:
    """An all_to_all of all pairs of ranks at once."""
    inside = _find_stages(machine, operation)
    between = _find_rail(machine, operation, nodes)
    network = machine.network
    chunk = 0.0
    if _is_faster_inside(machine, operation, nodes):
        chunk = hierarchy.CHUNK_OF_MESSAGES
    return FlatAllToAll(
        operation,
        network.ranks_per_node,
        nodes,
        inside,
        between,
        alpha_message=network.starts * hierarchy.MESSAGE,
        chunk=chunk,
    )


def _is_faster_inside(machine: Machine, operation: str, nodes: int) -> bool:
    """Whether the link of a rank inside nodes is faster than its rail, as NVLink is. Libraries send
    messages through the memory of other ranks of the node then, and lines with flags."""
    if machine.network.ranks_per_node == 1:
        return False
    fitted_rail = find_fitted_cost(machine, operation, nodes, "rail")
    links = _find_ring_links(machine, operation, nodes, fitted_rail)
    return links.beta_intra < links.beta_rail


def _find_pair_on_rail(machine: Machine, operation: str, nodes: int) -> PairOnRail:
    """A message between two ranks of different nodes."""
    return PairOnRail(_find_rail(machine, operation, nodes))


def _find_two_level(machine: Machine, operation: str, nodes: int) -> CollectiveCost:
    """A share on each rail between nodes."""
    if operation == "all_reduce":
        return _find_protocols(machine, operation, nodes)
    if operation == "all_to_all":
        return _find_two_level_all_to_all(machine, operation, nodes)
    return _find_two_levels(machine, operation, nodes)


def _find_protocols(machine: Machine, operation: str, nodes: int) -> CollectiveCost:
    """Two levels; where no start-up was measured, by the fastest protocol."""
    levels = _find_two_levels(machine, operation, nodes)
    if isinstance(levels.between, FittedRail) and levels.between.shows_start_up:
        return levels
    network = machine.network
    tree = hierarchy.start_across(
        operation,
        ranks_per_node=network.ranks_per_node,
        nodes=nodes,
        call=0.0,
        **hierarchy.CHUNKS,
    )
    return ProtocolsCost(
        levels, network.starts * float(tree), _find_flagged_trees(machine, operation, nodes)
    )


def _find_slowness(machine: Machine) -> float:
    """Latency of a hop between nodes over that of NCCL's table, at least 1 [-]."""
    link = machine.network.links.get("inter")
    if link is None:
        return 1.0
    return max(link.latency.value / machine.network.starts / hierarchy.FAR, 1.0)


def _find_flagged_trees(machine: Machine, operation: str, nodes: int) -> tuple[FlaggedTree, ...]:
    """Protocols of small and of medium messages: with a flag beside each number, and, where the
    link inside nodes allows it, in each line."""
    local, starts = machine.network.ranks_per_node, machine.network.starts
    fitted_rail = find_fitted_cost(machine, operation, nodes, "rail")
    links = _find_ring_links(machine, operation, nodes, fitted_rail)
    numbers = {
        "ranks_per_node": local,
        "nodes": nodes,
        "beta_intra": links.beta_intra,
        "beta_rail": links.beta_rail,
    }
    start_up = float(find_start_up(machine, operation, local * nodes))
    trees = [FlaggedTree({**numbers, "start_up": start_up, "expansion": hierarchy.FLAGS})]
    if _is_faster_inside(machine, operation, nodes):
        start_up = starts * float(
            hierarchy.start_across(
                operation,
                ranks_per_node=local,
                nodes=nodes,
                call=hierarchy.LINES["call"],
                near=hierarchy.LINES["near"],
                # on a network that is slower than NCCL's table has it, lines are slower, too
                alpha_rail=hierarchy.LINES["alpha_rail"] * _find_slowness(machine),
            )
        )
        trees.append(FlaggedTree({**numbers, "start_up": start_up, "expansion": hierarchy.LINE}))
    return tuple(trees)


class Evidence(Enum):
    """What a composition was compared with."""

    NOTHING = "nothing: start-up and transfer are as uncertain as those of a textbook"
    RAIL = "times over whole nodes, where one rank of each node was measured"
    NODES = "times over whole nodes"


class Composition(NamedTuple):
    """How an algorithm is composed over nodes, and how well that is known.

    Parameters
    ----------
    find : callable
        What prices it, of a platform, an operation and a number of nodes.
    evidence : Evidence, optional
        What it was compared with.
    least_spread : float, optional
        Least spread of its times [-].
    """

    find: Callable[[Machine, str, int], CollectiveCost]
    evidence: Evidence = Evidence.NOTHING
    least_spread: float = SIGMA_COMPOSED


#: How each algorithm is composed over nodes. ``flat``, in which all pairs of ranks exchange at
#: once, is a choice of libraries alone.
COMPOSITIONS: Mapping[str, Composition] = {
    "ring": Composition(_find_ring, Evidence.RAIL),
    "tree": Composition(_find_tree),
    "rail": Composition(_find_pair_on_rail, Evidence.NODES, SIGMA_OF_PAIR),
    "two_level": Composition(_find_two_level, Evidence.NODES),
    "flat": Composition(_find_flat_all_to_all, Evidence.NODES),
}
