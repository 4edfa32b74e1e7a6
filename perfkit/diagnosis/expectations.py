"""What a system should give: the expected time of each size, with its interval."""

from dataclasses import dataclass

import numpy as np

from perfkit.diagnosis.candidates import OF_PAIRS, Candidate
from perfkit.diagnosis.limits import find_line, find_node_rate
from perfkit.diagnosis.models import find_bandwidth, find_times
from perfkit.diagnosis.networks import ACROSS
from perfkit.ground.units import Array
from perfkit.models.collectives import bus_factor
from perfkit.platform.estimates import keep_quiet

#: Standard deviations of an 80 % interval, and beyond which a time is slow: 1 of 130 healthy ones [-].
INTERVAL = 1.2816
SLOW = 2.43
#: Share of the rate of network adapters that large messages reach: the mean of those six [-].
REACHED = 0.95


@dataclass(frozen=True)
class Band:
    """Expected times of sizes.

    Parameters
    ----------
    seconds : array
        Expected times [s].
    low, high : array
        Ends of their 80 % interval [s].
    slow : array
        Times beyond which a run is slow [s].
    moved : array
        Part of each expected time that the bytes take at the bandwidth of the largest messages [s].
    full : array or None
        What the bytes take where the adapters between nodes are full [s]; None for other bounds.
    """

    seconds: Array
    low: Array
    high: Array
    slow: Array
    moved: Array
    full: Array | None


def price(candidate: Candidate, operation: str, nbytes: Array) -> Band | None:
    """Say which times a system should take.

    Parameters
    ----------
    candidate : Candidate
        The system.
    operation : str
        Such as ``all_reduce``.
    nbytes : array
        Message sizes [B].

    Returns
    -------
    band : Band or None
        Expected times and their ends; None where nothing is known of the operation.

    Notes
    -----
    A time is t = b + s: b what its bytes take at the bandwidth of the largest messages, s all else,
    start-ups and protocols. Both are uncertain on their own, so that the ends are t exp(±k σ) with
    σ² = (b/t σ_b)² + (s/t σ_s)², the spreads of `Candidate`, and k = 1.28 for an interval of 80 %, 2.43
    for a slow run.
    """
    sizes = np.asarray(nbytes, dtype=float)
    with keep_quiet():
        try:
            seconds = find_times(
                candidate.model, operation, sizes, candidate.ranks, candidate.algorithm
            )
            bandwidth = find_bandwidth(
                candidate.model, operation, candidate.ranks, candidate.algorithm
            )
        except ValueError:
            return None
    factor = float(bus_factor(operation, candidate.ranks))
    line = _find_crossed(candidate, operation)
    spread_of_bytes = candidate.bytes_spread
    if line is not None and bandwidth < line * REACHED:
        spread_of_bytes = max(spread_of_bytes, ACROSS)  # the nodes bound it, not the adapters alone
    if line is not None:
        # platforms price exchanges level by level, of which less crosses than of NCCL's rings and trees
        bandwidth = min(bandwidth, line * REACHED)
        seconds = np.maximum(seconds, factor * sizes / bandwidth)
    moved = np.minimum(factor * sizes / bandwidth, seconds)
    share = moved / seconds
    spread = np.hypot(share * spread_of_bytes, (1 - share) * candidate.starts)
    # where links are shared unevenly, less is normal, too
    longer = moved * (1 / candidate.slowest - 1)
    low = seconds * np.exp(-INTERVAL * spread)
    slowest = seconds
    node = find_node_rate(candidate.links)
    if _may_be_tree(candidate, operation) and node is not None:
        fastest = _find_fastest(candidate, operation, sizes, node)
        low = np.where(share > 0.5, np.minimum(low, fastest), low)  # start-ups are those of both
        # NCCL may choose a ring, which sends each byte twice
        slowest = np.maximum(seconds, factor * sizes / (node * REACHED))
    return Band(
        seconds,
        low=low,
        high=slowest * np.exp(INTERVAL * spread) + longer,
        slow=slowest * np.exp(SLOW * spread) + longer,
        moved=moved,
        full=None if line is None else factor * sizes / line,
    )


def _find_crossed(candidate: Candidate, operation: str) -> float | None:
    """Bus bandwidth of rings and trees that the adapters of a node bound [B/s]; None within a node, and
    for exchanges between pairs."""
    if candidate.nodes == 1 or operation in OF_PAIRS:
        return None
    return find_line(candidate, operation)


def _may_be_tree(candidate: Candidate, operation: str) -> bool:
    """Whether an exchange is one of two nodes for which NCCL may choose a tree, whose bytes cross once."""
    is_of_two = candidate.nodes == 2 and candidate.local > 1
    return operation == "all_reduce" and is_of_two and candidate.algorithm is None


def _find_fastest(candidate: Candidate, operation: str, sizes: Array, node: float) -> Array:
    """Times of trees over two nodes that hide one way behind the other: those of one node, or of the
    adapters of a node [B/s], which each byte crosses once [s]. Prices of the platform do not know them: 470
    GB/s are published (NVIDIA/nccl-tests#309), 367 priced."""
    inside = find_times(candidate.model, operation, sizes, candidate.local, None)
    return np.maximum(inside, sizes / node)
