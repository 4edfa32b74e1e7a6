"""What the links of a system carry: the rate at which they are full, and what no run can exceed."""

from collections.abc import Sequence
from dataclasses import dataclass

from perfkit.diagnosis.candidates import BOARD, Candidate
from perfkit.diagnosis.records import Links
from perfkit.diagnosis.words import write_rate
from perfkit.models.collectives import OPERATIONS, bus_factor

#: Most of it that is payload: packets of 512 bytes, with header, frame and check of 24 bytes [-].
_PAYLOAD = 512 / 536


@dataclass(frozen=True)
class Limit:
    """What no run on the links of a system can exceed.

    Parameters
    ----------
    busbw : float
        Bus bandwidth [B/s].
    links : str
        The links that bound it, in words with their rates.
    """

    busbw: float
    links: str


def find_line(candidate: Candidate, operation: str) -> float | None:
    """Find the bus bandwidth at which the link that bounds an operation is full, for the way that its
    messages usually take.

    Parameters
    ----------
    candidate : Candidate
        The system.
    operation : str
        Such as ``all_reduce``.

    Returns
    -------
    line : float or None
        Bus bandwidth [B/s]; None where the links are unknown.

    Notes
    -----
    Within a node it is the rate of the link of a GPU. Between nodes it is that of all adapters of a node,
    times what the bus factor counts more than crosses them: trees over two nodes send each byte once, so
    2 (p - 1) / p for an all_reduce; of an all_to_all (N - 1) / N of all bytes of the g ranks of a node
    cross.
    """
    links = candidate.links
    inside = links.nvlink or links.pcie
    if candidate.nodes == 1:
        return None if inside is None else inside.value
    node = find_node_rate(links)
    if node is None:
        return None
    is_tree = candidate.nodes == 2 and candidate.algorithm != "ring"
    if operation == "all_reduce" and is_tree:
        return node * float(bus_factor("all_reduce", candidate.ranks))
    if operation in ("gather", "scatter"):
        crossing = (candidate.nodes - 1) / candidate.nodes
        return node * float(bus_factor(operation, candidate.ranks)) / crossing
    if operation == "all_to_all":
        crossing = (candidate.nodes - 1) / candidate.nodes * candidate.local
        return node * float(bus_factor("all_to_all", candidate.ranks)) / crossing
    return node


def find_node_rate(links: Links) -> float | None:
    """Find the rate of all adapters of a node.

    Parameters
    ----------
    links : Links
        Links of a system.

    Returns
    -------
    rate : float or None
        Rate, one way [B/s]; None where it is unknown.
    """
    adapters = links.adapters
    if adapters is None or adapters.rate is None:
        return None
    count = adapters.usual or adapters.count
    return None if count is None else count * adapters.rate.value


def find_limit(candidates: Sequence[Candidate], operation: str) -> Limit | None:
    """Find the bus bandwidth that no run of an operation can exceed.

    Parameters
    ----------
    candidates : sequence of Candidate
        What it may be.
    operation : str
        Such as ``all_reduce``.

    Returns
    -------
    limit : Limit or None
        The limit; None where the links are unknown.

    Notes
    -----
    Each rank receives what it does not have: n for an all_reduce in a switch, 2 (p - 1) / p n without
    one, (p - 1) / p n for the others. Between nodes, a node that has the sum of its own ranks receives n at
    least, or sends it, through its adapters; where these are unknown, the slots of its GPUs bound them.
    """
    if not candidates or operation not in OPERATIONS:
        return None
    first = candidates[0]
    factor = float(bus_factor(operation, first.ranks))
    links = first.links
    if first.nodes == 1:
        return _limit_node(first, operation, factor)
    node = find_node_rate(links) if first.is_assured else None
    words = "the adapters of a node"
    if node is None:
        if links.pcie is None:
            return None
        node = first.local * links.pcie.value * _PAYLOAD
        slots = f"the {first.local} PCIe slots of a node"
        words = f"{slots} ({write_rate(links.pcie.value)} each, 512 of 536 bytes are data)"
    share = (first.nodes - 1) / first.nodes
    busbw = node
    if operation == "all_reduce":
        busbw = node * factor
    if operation in ("all_gather", "reduce_scatter", "scatter", "gather"):
        busbw = node * factor / share
    if operation == "all_to_all":
        busbw = node * factor / share / first.local
    return Limit(busbw, words)


def _limit_node(candidate: Candidate, operation: str, factor: float) -> Limit | None:
    """The limit within one node, see `find_limit`."""
    links = candidate.links
    if links.nvlink is not None:
        may_reduce = operation == "all_reduce" and links.multicast is not False
        busbw = links.nvlink.value * (factor if may_reduce else 1.0)
        return Limit(busbw, f"links of {write_rate(links.nvlink.value)} between the GPUs")
    if links.pcie is None or candidate.ranks <= BOARD:
        return None  # up to four cards may have bridges of NVLink
    return Limit(links.pcie.value, f"PCIe slots of {write_rate(links.pcie.value)}")
