"""Collectives of some ranks of each of several nodes, as those of groups beside tensor parallelism."""

import math
from dataclasses import replace

from perfkit.fitting.parameters import Key
from perfkit.ground.units import check_positive
from perfkit.platform.collective_costs import CollectiveCost
from perfkit.platform.collective_fits import find_fitted_cost
from perfkit.platform.collectives import find_cost
from perfkit.platform.machine import Machine
from perfkit.platform.nodes import advise_nodes
from perfkit.platform.whatif import resize_nodes


def find_spread_cost(
    machine: Machine, operation: str, ranks: int, nodes: int, algorithm: str | None = None
) -> CollectiveCost:
    """Find what prices a collective of some ranks of each of several nodes.

    Parameters
    ----------
    machine : Machine
        The platform.
    operation : str
        Such as ``all_reduce``.
    ranks : int
        Ranks that take part [-].
    nodes : int
        Nodes that they are on, equally many on each [-].
    algorithm : str, optional
        As in `find_cost`.

    Returns
    -------
    cost : CollectiveCost
        That of one rank of each node by its fit or the link, that of some as on nodes of as many ranks:
        each rank has its own rail, and the other ranks of a node theirs.

    Raises
    ------
    ValueError
        For ranks that are not equally many on each node, more nodes than there are, and as `find_cost`
        does.
    """
    ranks = check_positive("ranks", ranks, integer=True)
    nodes = check_positive("nodes", nodes, integer=True)
    network = machine.network
    local = network.ranks_per_node
    if nodes > network.nodes:
        advice = advise_nodes(machine, local * nodes)
        raise ValueError(
            f"nodes is {nodes}; platform {machine.name!r} has {network.nodes}; {advice}"
        )
    if ranks % nodes or ranks // nodes > local:
        raise ValueError(
            f"ranks is {ranks} and nodes is {nodes}; each node must have equally many, at most {local}; take "
            f"ranks = nodes times 1 to {local}"
        )
    most = ranks // nodes
    if nodes == 1 or most == local:
        return find_cost(machine, operation, ranks, algorithm)
    if network.regions > 1:
        raise ValueError(
            f"platform {machine.name!r} has {network.regions} regions; nodes= is for ranks of one: leave it out"
        )
    return find_cost_of_parts(machine, operation, nodes, most, algorithm)


def find_cost_of_parts(
    machine: Machine, operation: str, nodes: int, most: int, algorithm: str | None = None
) -> CollectiveCost:
    """Find what prices a collective of some, but not all, ranks of each of several nodes.

    Parameters
    ----------
    machine : Machine
        The platform.
    operation : str
        Such as ``all_reduce``.
    nodes, most : int
        Nodes, two or more, and ranks on each, fewer than it has [-].
    algorithm : str, optional
        As in `find_cost`.

    Returns
    -------
    cost : CollectiveCost
        See `find_spread_cost`.
    """
    is_chosen = algorithm is not None or operation in machine.network.algorithms
    if most == 1 and not is_chosen:
        return find_cost(machine, operation, nodes, "rail")
    resized = resize_nodes(machine, nodes, most)
    # what was measured on more ranks of a node holds for fewer, scaled, as inside a node
    scaled = {}
    for stage in machine.collectives_by_operation:
        if most == 1 or find_fitted_cost(resized, stage, most) is not None:
            continue  # one rank of a node has no collective inside it
        nearest = find_fitted_cost(machine, stage, most)
        if nearest is not None and len(nearest.curves) == 1:
            fit = nearest.curves[0].fit
            spread = math.hypot(fit.spread, nearest.spread)
            notes = (*fit.notes, nearest.note)
            scaled[str(Key(stage, most))] = replace(fit, spread=spread, notes=notes)
    if scaled:
        resized = replace(resized, collectives={**resized.collectives, **scaled})
    return find_cost(resized, operation, most * nodes, algorithm)
