"""Which fits of a machine price a collective on some ranks, and what its links add to them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from perfkit.fitting import CollectiveModel, Fit
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import Link
from perfkit.ground.units import Array, format_rate, show
from perfkit.models import collectives as forms
from perfkit.models import hierarchy
from perfkit.models.algorithms import ALGORITHMS
from perfkit.platform.collective_costs import (
    NODES_OF_LINK,
    FittedCost,
    FittedCurve,
    grow_with_nodes,
    time_textbook,
)
from perfkit.platform.estimates import missing_data_error
from perfkit.platform.machine import Machine

#: Extra spread per doubling of ranks beyond a law, between two counts, beyond one inside a node [-];
#: docs/formulas.md, table 1.4.
SIGMA_OF_LAW, SIGMA_BETWEEN_COUNTS, SIGMA_BEYOND_COUNTS = 0.05, 0.1, 0.15
#: How the note of a fit of rails begins that is only a bound.
LOWER_BOUND = "lower bound"
#: How the source of a link between nodes begins that logs show to be far slower than its network.
CONTRADICTED = "logs contradict the network"
#: Nodes of an all_reduce that says nothing of more nodes: NCCL may take a tree there, whose bytes cross
#: once between two nodes, and more often between more (NVIDIA/nccl-tests issues 169 and 196,
#: NVIDIA/nccl issue 1031) [-].
PAIR = 2
#: Share of the link of the datasheet below which collectives of a node are doubted [-];
#: docs/formulas.md, table 1.4.
SLOW_INSIDE = 0.1


def lacks_model(machine: Machine, operation: str, what: str) -> ValueError:
    """Error for a missing model, with the fits of the operation, or else the operations that have
    fits."""
    fits = machine.collectives_by_operation
    known = [str(key) for key in fits.get(operation, {})]
    if not known:
        known = [*fits]
    return missing_data_error(machine.name, what, known)


def advise_network(nodes: int) -> str:
    """Say how to give a platform a network between nodes.

    Parameters
    ----------
    nodes : int
        Nodes that it shall have [-].

    Returns
    -------
    advice : str
        For Python, and for a calibration.
    """
    by_name = f"with_nodes({nodes}, network=...), whose names pk.fabrics() lists"
    return f"{by_name}, or calibrate with a base that has a network, such as --base h100-sxm-8@p5"


def find_link(machine: Machine, name: str, operation: str, what: str) -> Link:
    """Link of the network by name; an error for a missing one says what it is needed for."""
    links = machine.network.links
    if name not in links:
        where = "between" if name == "inter" else "inside"
        missing = f"model of {operation} {what} nor a link {where} nodes"
        if name == "inter" and machine.device.kind == "cuda":
            lack = f"platform {show(machine.name)} has no {missing}"
            nodes = max(machine.network.nodes, 2)
            raise ValueError(f"{lack}; say what joins them: {advise_network(nodes)}")
        raise lacks_model(machine, operation, missing)
    return links[name]


def find_start_up(machine: Machine, operation: str, ranks: int | Array, algorithm: str = "") -> Any:
    """Start-up of the algorithm that a library takes for vanishing messages, for each rank count
    [s]."""
    network = machine.network
    ranks_per_node: Any = 1
    if algorithm != "rail":
        ranks_per_node = np.minimum(ranks, network.ranks_per_node)
    alpha_rail = hierarchy.FAR
    if "inter" in network.links:
        alpha_rail = network.links["inter"].latency.value / network.starts
    start_up = hierarchy.start_across(
        operation,
        ranks_per_node=ranks_per_node,
        nodes=ranks / ranks_per_node,
        alpha_rail=alpha_rail,
    )
    return network.starts * start_up


def is_bound(fit: Fit) -> bool:
    """Whether a fit of rails only bounds the link between nodes."""
    return any(note.startswith(LOWER_BOUND) for note in fit.notes)


def doubt_link(link: Link) -> tuple[str, ...]:
    """Warnings about a link between nodes: that logs show another than its network has."""
    source = link.bandwidth.source
    return (source,) if source.startswith(CONTRADICTED) else ()


def count_measured_nodes(machine: Machine) -> int | None:
    """Count the nodes that collectives between nodes were measured on: the most of any fit.

    Parameters
    ----------
    machine : Machine
        The platform.

    Returns
    -------
    nodes : int or None
        None where no fit is of several nodes, or where all only bound the link [-].
    """
    local = machine.network.ranks_per_node
    most = 0
    for text, fit in machine.collectives.items():
        key = Key.parse(text)
        if key.ranks is None or is_bound(fit):
            continue
        if key.algorithm == "rail":
            most = max(most, key.ranks)
        elif key.ranks > local:
            most = max(most, key.ranks // local)
    return most or None


def grow_beyond(machine: Machine, nodes: int) -> float:
    """Extra spread of collectives over some nodes of a platform, beyond those that it knows.

    Parameters
    ----------
    machine : Machine
        The platform.
    nodes : int
        Nodes that take part [-].

    Returns
    -------
    spread : float
        See `perfkit.platform.collective_costs.grow_with_nodes` [-].
    """
    return grow_with_nodes(nodes, count_measured_nodes(machine) or NODES_OF_LINK)


def find_fitted_cost(
    machine: Machine, operation: str, ranks: int, algorithm: str = ""
) -> FittedCost | None:
    """Find the fits that price a rank count.

    Parameters
    ----------
    machine : Machine
        The platform.
    operation : str
        Such as ``all_reduce``.
    ranks : int
        Ranks that take part [-].
    algorithm : str, optional
        Algorithm that was measured; empty where the library chose one.

    Returns
    -------
    cost : FittedCost or None
        Of the fit of this rank count, else of the law over counts or of the nearest counts, poor
        fits last; None where there is no fit.
    """
    by_count = {
        key.ranks: fit
        for key, fit in machine.collectives_by_operation.get(operation, {}).items()
        if key.algorithm == algorithm
    }
    if ranks in by_count:
        curve = FittedCurve(by_count[ranks], ranks)
        cost = FittedCost(operation, ranks, (curve,), algorithm)
        return replace(cost, doubt=_doubt_slow_link(machine, cost))
    # fits inside nodes do not hold across them, and the other way round
    most_inside = math.inf if algorithm == "rail" else machine.network.ranks_per_node
    by_count = _drop_special(machine, operation, ranks, algorithm, by_count)
    costs = []
    law = by_count.pop(None, None)
    if law is not None:
        most = most_inside
        if algorithm:
            most = min(most_inside, ranks)
        low, high = law.ranges.get("ranks", (2.0, most))
        if (high <= most_inside) == (ranks <= most_inside):
            costs.append(_apply_law(law, operation, ranks, algorithm, low, high))
    fits = {
        count: fit
        for count, fit in by_count.items()
        if count and (count <= most_inside) == (ranks <= most_inside)
    }
    if fits:
        costs.append(_match_nearest(machine, operation, ranks, algorithm, fits))
    if not costs:
        return None
    costs.sort(key=lambda cost: cost.curves[0].fit.quality == "poor")
    return replace(costs[0], alternatives=tuple(costs[1:]))


def _drop_special(
    machine: Machine,
    operation: str,
    ranks: int,
    algorithm: str,
    fits: Mapping[int | None, CollectiveModel],
) -> dict[int | None, CollectiveModel]:
    """Fits by rank count without those that say nothing of other counts: of an all_reduce on two
    nodes, and of rails that only bound a link whose bandwidth is known."""
    local = machine.network.ranks_per_node
    kept = dict(fits)
    for count, fit in fits.items():
        is_pair = operation == "all_reduce" and algorithm == "" and count == PAIR * local
        says_nothing_of_more = is_pair and local > 1 and ranks > PAIR * local
        is_only_bound = algorithm == "rail" and is_bound(fit) and "inter" in machine.network.links
        if says_nothing_of_more or is_only_bound:
            del kept[count]
    return kept


def _doubt_slow_link(machine: Machine, cost: FittedCost) -> str:
    """A sentence where ranks of a node were measured with a small part of the bandwidth of their link,
    which may be the fault of one machine."""
    link = machine.network.links.get("intra")
    inside = cost.algorithm != "rail" and cost.ranks <= machine.network.ranks_per_node
    if link is None or link.bandwidth.kind != "datasheet" or not inside:
        return ""
    beta = cost.invert_ring().beta
    if beta * link.bandwidth.value <= 1.0 / SLOW_INSIDE:
        return ""
    share = 1.0 / (beta * link.bandwidth.value)
    return (
        f"{cost.operation} on {cost.ranks} ranks was measured at {format_rate(1.0 / beta, 'B/s')}, "
        f"{share:.0%} of the link of {machine.device.name}, on one machine; others may be much faster: "
        "time yours with nccl-tests"
    )


def _apply_law(
    law: CollectiveModel, operation: str, ranks: int, algorithm: str, low: float, high: float
) -> FittedCost:
    """A law over rank counts, fitted from `low` to `high` ranks."""
    octaves = abs(math.log2(ranks / min(max(ranks, low), high)))
    note = ""
    if octaves:
        note = (
            f"the law of {operation} was fitted on {low:g} to {high:g} ranks, {ranks} are outside"
        )
    return FittedCost(
        operation,
        ranks,
        (FittedCurve(law, ranks),),
        algorithm,
        spread=SIGMA_OF_LAW * octaves,
        note=note,
    )


def _match_nearest(
    machine: Machine,
    operation: str,
    ranks: int,
    algorithm: str,
    fits: Mapping[int, CollectiveModel],
) -> FittedCost:
    """Between two counts the geometric mean of both times, beyond them the nearest fit, scaled."""
    near = min(fits, key=lambda count: abs(math.log(count / ranks)))
    octaves = abs(math.log2(ranks / near))
    counts = ", ".join(map(str, sorted(fits)))
    where = f"{counts} ranks"
    if algorithm == "rail":
        where = f"one rank of each of {counts} nodes"
    note = f"{operation} was fitted on {where}; its time on {ranks} is "
    on_other_side = [count for count in fits if (count < ranks) != (near < ranks)]
    if not on_other_side:
        scaled = _scale(machine, fits[near], operation, ranks, near, algorithm)
        spread = SIGMA_BEYOND_COUNTS * octaves
        is_over_nodes = algorithm == "rail" or ranks > machine.network.ranks_per_node
        if is_over_nodes and ranks > near:
            spread = grow_with_nodes(ranks, near)
        return FittedCost(
            operation,
            ranks,
            (FittedCurve(scaled, ranks),),
            algorithm,
            spread=spread,
            note=f"{note}scaled from that on {near}",
        )
    far = min(on_other_side, key=lambda count: abs(count - ranks))
    weight = math.log(ranks / near) / math.log(far / near)
    return FittedCost(
        operation,
        ranks,
        (FittedCurve(fits[near], near, 1.0 - weight), FittedCurve(fits[far], far, weight)),
        algorithm,
        spread=SIGMA_BETWEEN_COUNTS * octaves,
        note=f"{note}interpolated between those on {near} and {far}",
    )


def _scale(
    machine: Machine, fit: CollectiveModel, operation: str, ranks: int, near: int, algorithm: str
) -> CollectiveModel:
    """A fit with start-ups and times per byte scaled from one rank count to another, as the
    algorithm does; their standard errors are unknown."""
    counts = np.array([ranks, near], dtype=float)
    has_form = algorithm and ALGORITHMS[algorithm].textbook is not None
    textbook = algorithm if has_form else ""

    def time_on_both(alpha_hop: float, beta_link: float) -> Array:
        """Times on these ranks and on those of the fit [s]."""
        return time_textbook(
            operation,
            np.array(1.0),
            textbook,
            ranks=counts,
            alpha_hop=alpha_hop,
            beta_link=beta_link,
        )

    if algorithm in ("", "rail") and machine.device.kind == "cuda":
        start_up = find_start_up(machine, operation, counts, algorithm)
    else:
        start_up = time_on_both(alpha_hop=1.0, beta_link=0.0)
    transfer = time_on_both(alpha_hop=0.0, beta_link=1.0)
    local = machine.network.ranks_per_node
    if operation == "all_to_all" and algorithm == "" and min(ranks, near) > local:
        # what crosses between nodes counts, half of the bytes on two (NVIDIA/nccl-tests issue 130)
        transfer = np.asarray(forms.bus_factor(operation, counts / local))
    of_start_up, of_transfer = float(start_up[0] / start_up[1]), float(transfer[0] / transfer[1])
    scaled = {}
    for name, value in fit.items():
        if name.startswith("alpha"):
            scaled[name] = value * of_start_up
        elif name.startswith("beta"):
            scaled[name] = value * of_transfer
        else:
            scaled[name] = value
    return fit.with_values(scaled, stderr={})
