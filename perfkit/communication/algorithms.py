"""Textbook algorithms by name: which operation has them, and how they scale with ranks."""

import math

import numpy as np

from perfkit.models import collectives as forms
from perfkit.units import Array

__all__ = ["scale_ring", "scale_textbook", "time_textbook"]

#: Operations by textbook algorithm.
_KNOWN = {
    "ring": ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
    "tree": ("all_reduce", "broadcast", "reduce"),
    "in_network": ("all_reduce",),
}


def time_textbook(
    operation: str, nbytes: Array, way: str, *, ranks: int, alpha_hop: float, beta_link: float, nodes: int = 1,
    alpha_rail: float = 0.0,
) -> Array:  # fmt: skip
    """Time of an algorithm in hop latencies and the link that limits it.

    Parameters
    ----------
    operation : str
        Operation, such as ``all_reduce``.
    nbytes : array
        Message sizes in the nccl-tests convention [B].
    way : str
        ``ring``, ``tree`` or ``in_network``.
    ranks : int
        Ranks taking part [-].
    alpha_hop : float
        Latency of a hop inside a node [s].
    beta_link : float
        Time per byte of the slowest link, one way [s/B].
    nodes : int, optional
        Nodes, for a tree only: it has a level for each doubling of nodes and of ranks in a node [-].
    alpha_rail : float, optional
        Latency of a hop between nodes [s].

    Returns
    -------
    time : array
        One time per size [s].

    Raises
    ------
    ValueError
        For an operation without such an algorithm.
    """
    if operation not in _KNOWN[way]:
        raise ValueError(
            f"algorithm is {way!r}; a textbook form is known for {', '.join(_KNOWN[way])} and not for {operation}; "
            f"leave the algorithm out, or calibrate it as {operation}.{ranks}.{way}"
        )
    if way == "ring":
        steps, traffic = forms.ring_steps(operation, ranks), forms.bus_factor(operation, ranks)
        return np.asarray(steps * alpha_hop + traffic * beta_link * nbytes)
    if way == "in_network":
        return np.asarray(forms.in_network_all_reduce(nbytes, ranks=ranks, alpha_hop=alpha_hop, beta_link=beta_link))
    passes = 2.0 if operation == "all_reduce" else 1.0
    hops = math.log2(ranks / nodes) * alpha_hop + math.log2(nodes) * alpha_rail
    return np.asarray(passes * (hops + beta_link * nbytes))


def scale_ring(operation: str, ranks: int, way: str = "") -> tuple[float, float]:
    """Steps and traffic of a ring, for operations that go around none as well.

    Parameters
    ----------
    operation : str
        Operation, such as ``all_to_all``.
    ranks : int
        Ranks taking part [-].
    way : str, optional
        Not used; here so that `scale_textbook` can take its place.

    Returns
    -------
    start, move : float
        In proportion to start-up and time per byte [-].
    """
    return float(forms.ring_steps(operation, ranks)), float(forms.bus_factor(operation, ranks))


def scale_textbook(operation: str, ranks: int, way: str) -> tuple[float, float]:
    """Start-up and traffic of a textbook algorithm.

    Parameters
    ----------
    operation : str
        Operation, such as ``all_reduce``.
    ranks : int
        Ranks taking part [-].
    way : str
        ``tree`` or ``in_network``.

    Returns
    -------
    start, move : float
        In proportion to start-up and time per byte [-].
    """
    about = {"operation": operation, "way": way, "ranks": ranks}
    start = time_textbook(nbytes=np.zeros(()), alpha_hop=1.0, beta_link=0.0, **about)  # type: ignore[arg-type]
    move = time_textbook(nbytes=np.ones(()), alpha_hop=0.0, beta_link=1.0, **about)  # type: ignore[arg-type]
    return float(start), float(move)
