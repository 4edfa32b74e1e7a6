"""Textbook algorithms of collectives in hop latencies and link bandwidths: ring, tree, reduction in the switch."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from perfkit.units import Values, check_choice

__all__ = [
    "OPERATIONS",
    "bus_factor",
    "in_network_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_steps",
    "tree_all_reduce",
]

#: Bus factor by operation: the multiple of (p - 1) / p for the first group, of 1 for the second.
_SHARED: Mapping[str, float] = MappingProxyType(
    {"all_reduce": 2.0, **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 1.0)}
)
_WHOLE = ("broadcast", "reduce", "send_recv")
#: Operations in the vocabulary of nccl-tests.
OPERATIONS = (*_SHARED, *_WHOLE)


def ring_steps(operation: str, ranks: Values) -> Values:
    """Steps a ring (or, for all_to_all, a sequence of pairs) takes one after another.

    Parameters
    ----------
    operation : str
        One of `OPERATIONS` [-].
    ranks : int, array or expression
        Ranks taking part [-].

    Returns
    -------
    steps : same kind as `ranks`
        2 (p - 1) for all_reduce, 1 for send_recv, p - 1 for the others [-].

    Raises
    ------
    ValueError
        For an unknown operation; the message lists the known ones.

    Examples
    --------
    >>> ring_steps("all_reduce", 8), ring_steps("all_gather", 8)
    (14, 7)
    """
    check_choice("operation", operation, OPERATIONS)
    return ranks * 0 + 1 if operation == "send_recv" else (2 if operation == "all_reduce" else 1) * (ranks - 1)


def bus_factor(operation: str, ranks: Values) -> Values:
    """Ratio of bus to algorithm bandwidth.

    Parameters
    ----------
    operation : str
        One of `OPERATIONS` [-].
    ranks : int, array or expression
        Ranks taking part [-].

    Returns
    -------
    factor : same kind as `ranks`
        2 (p - 1) / p for all_reduce, 1 for broadcast, reduce and send_recv, (p - 1) / p for the others [-].

    Raises
    ------
    ValueError
        For an unknown operation; the message lists the known ones.

    References
    ----------
    .. [1] NVIDIA, nccl-tests, doc/PERFORMANCE.md (definition of algbw and busbw)

    Examples
    --------
    >>> bus_factor("all_reduce", 8), bus_factor("all_to_all", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    check_choice("operation", operation, OPERATIONS)
    return _SHARED[operation] * (ranks - 1) / ranks if operation in _SHARED else ranks * 0 + 1.0


def ring_all_reduce(nbytes: Values, *, ranks: Values, alpha_hop: float, beta_link: float) -> Values:
    r"""Time of an all_reduce around a ring: reduce_scatter, then all_gather.

    Parameters
    ----------
    nbytes : float, array or expression
        Bytes of the buffer each rank reduces [B].
    ranks : int, array or expression
        Ranks of the ring [-].
    alpha_hop : float
        Latency of one hop, not of the whole collective [s].
    beta_link : float
        Time per byte of one link, one way [s/B].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished; zero for one rank [s].

    Notes
    -----
    .. math:: t = 2 (p-1) \alpha_h + 2 \frac{p-1}{p} \beta_l n

    Measured large messages grow less with p: fitted on 2 and 4 ranks, pure ring volume is 23 to 28 % high on 8.

    References
    ----------
    .. [1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
       High Performance Computing Applications 19(1), 2005. doi:10.1177/1094342005051521

    Examples
    --------
    >>> round(ring_all_reduce(1e9, ranks=8, alpha_hop=2e-6, beta_link=1 / 250e9) * 1e3, 2)
    7.03
    """
    return 2.0 * _ring(nbytes, ranks, alpha_hop, beta_link)


def ring_all_gather(nbytes: Values, *, ranks: Values, alpha_hop: float, beta_link: float) -> Values:
    r"""Time of an all_gather around a ring.

    Parameters
    ----------
    nbytes : float, array or expression
        Bytes of the gathered buffer [B].
    ranks : int, array or expression
        Ranks of the ring [-].
    alpha_hop : float
        Latency of one hop, not of the whole collective [s].
    beta_link : float
        Time per byte of one link, one way [s/B].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished; zero for one rank [s].

    Notes
    -----
    .. math:: t = (p-1) \alpha_h + \frac{p-1}{p} \beta_l n

    References
    ----------
    .. [1] R. Thakur, R. Rabenseifner, W. Gropp, 2005. doi:10.1177/1094342005051521

    Examples
    --------
    >>> round(ring_all_gather(1e9, ranks=8, alpha_hop=2e-6, beta_link=1 / 250e9) * 1e3, 2)
    3.51
    """
    return _ring(nbytes, ranks, alpha_hop, beta_link)


def ring_reduce_scatter(nbytes: Values, *, ranks: Values, alpha_hop: float, beta_link: float) -> Values:
    r"""Time of a reduce_scatter around a ring.

    Parameters
    ----------
    nbytes : float, array or expression
        Bytes of the input buffer of each rank [B].
    ranks : int, array or expression
        Ranks of the ring [-].
    alpha_hop : float
        Latency of one hop, not of the whole collective [s].
    beta_link : float
        Time per byte of one link, one way [s/B].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished; zero for one rank [s].

    Notes
    -----
    .. math:: t = (p-1) \alpha_h + \frac{p-1}{p} \beta_l n

    The additions themselves are taken to hide behind the transfer.

    References
    ----------
    .. [1] R. Thakur, R. Rabenseifner, W. Gropp, 2005. doi:10.1177/1094342005051521

    Examples
    --------
    >>> round(ring_reduce_scatter(1e9, ranks=8, alpha_hop=2e-6, beta_link=1 / 250e9) * 1e3, 2)
    3.51
    """
    return _ring(nbytes, ranks, alpha_hop, beta_link)


def _ring(nbytes: Values, ranks: Values, alpha_hop: float, beta_link: float) -> Values:
    return (ranks - 1) * (alpha_hop + beta_link * nbytes / ranks)


def tree_all_reduce(nbytes: Values, *, ranks: Values, alpha_hop: float, beta_link: float) -> Values:
    r"""Time of an all_reduce up and down a pipelined (double) binary tree.

    Parameters
    ----------
    nbytes : float, array or expression
        Bytes of the buffer each rank reduces [B].
    ranks : int, array or expression
        Ranks of the tree [-].
    alpha_hop : float
        Latency of one hop, not of the whole collective [s].
    beta_link : float
        Time per byte of one link, one way [s/B].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished; zero for one rank [s].

    Notes
    -----
    .. math:: t = 2 \log_2(p)\, \alpha_h + 2 \beta_l n \quad (p \ge 2)

    References
    ----------
    .. [1] P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
       Parallel Computing 35(12), 2009. doi:10.1016/j.parco.2009.09.001

    Examples
    --------
    >>> round(float(tree_all_reduce(1e6, ranks=64, alpha_hop=5e-6, beta_link=1 / 25e9)) * 1e6)
    140
    """
    return 2.0 * alpha_hop * np.log2(ranks) + 2.0 * beta_link * nbytes * np.minimum(ranks - 1, 1)


def in_network_all_reduce(nbytes: Values, *, ranks: Values, alpha_hop: float, beta_link: float) -> Values:
    r"""Time of an all_reduce that the switch does: each rank reads one reduced share and writes it back to all.

    Parameters
    ----------
    nbytes : float, array or expression
        Bytes of the buffer each rank reduces [B].
    ranks : int, array or expression
        Ranks at the switch [-].
    alpha_hop : float
        Latency between a rank and the switch, one way [s].
    beta_link : float
        Time per byte of one link, one way [s/B].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished; zero for one rank [s].

    Notes
    -----
    .. math:: t = 2 \alpha_h + \frac{p+1}{p} \beta_l n \quad (p \ge 2)

    Each link carries the operands of its rank once and, once more, the share of 1/p that its rank multicasts; a ring
    carries 2 (p - 1) / p. On 8 ranks that would be a gain of 1.56; H100 with NVLink SHARP shows about 1.26 over the
    ring of the same machine, because the switches do not reduce at the full rate of the links.

    References
    ----------
    .. [1] R. L. Graham et al., "Scalable hierarchical aggregation protocol (SHArP)", COM-HPC 2016.
       doi:10.1109/COMHPC.2016.006
    .. [2] NVIDIA/nccl-tests, pull request 239, comment by S. Jeaugey: algbw = busbw p / (p + 1) with NVLink SHARP

    Examples
    --------
    >>> round(float(in_network_all_reduce(1e9, ranks=8, alpha_hop=2e-6, beta_link=1 / 450e9)) * 1e3, 2)
    2.5
    """
    return ((ranks + 1) / ranks * beta_link * nbytes + 2.0 * alpha_hop) * np.minimum(ranks - 1, 1)
