"""Textbook algorithms of collectives in hop latencies and link bandwidths: ring, tree, reduction in the switch."""

from collections.abc import Mapping

import numpy as np

from perfkit.ground.units import Values, check_choice

#: Bus factor by operation: the multiple of (p - 1) / p for the first group, of 1 for the second.
_SHARED: Mapping[str, float] = {
    "all_reduce": 2.0, **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 1.0)
}  # fmt: skip
_WHOLE = ("broadcast", "reduce", "send_recv")
#: Operations in the vocabulary of nccl-tests.
OPERATIONS = (*_SHARED, *_WHOLE)


def ring_steps(operation: str, ranks: Values) -> Values:
    """Steps of a ring, or of a sequence of pairs for all_to_all, one after another.

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


def ring_collective(nbytes: Values, *, operation: str, ranks: Values, alpha_hop: float, beta_link: float) -> Values:
    r"""Time of a collective around a ring; an all_reduce is a reduce_scatter, then an all_gather.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention [B].
    operation : str
        One of `OPERATIONS` [-].
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

    Raises
    ------
    ValueError
        For an unknown operation.

    Notes
    -----
    .. math:: t = s(p)\, \alpha_h + f(p)\, \beta_l n

    with the steps s and the bus factor f; additions overlap with the transfer. Measured all_reduces of large messages
    grow less with p: a ring fitted on 2 and 4 ranks is 23 to 28 % too slow on 8.

    References
    ----------
    .. [1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
       High Performance Computing Applications 19(1), 2005. doi:10.1177/1094342005051521

    Examples
    --------
    >>> round(ring_collective(1e9, operation="all_gather", ranks=8, alpha_hop=2e-6, beta_link=1 / 250e9) * 1e3, 2)
    3.51
    """
    return ring_steps(operation, ranks) * alpha_hop + bus_factor(operation, ranks) * beta_link * nbytes


def ring_all_reduce(nbytes: Values, *, ranks: Values, alpha_hop: float, beta_link: float) -> Values:
    """Time of an all_reduce around a ring, see `ring_collective`.

    Parameters
    ----------
    nbytes : float, array or expression
        Bytes of the buffer each rank reduces [B].
    ranks : int, array or expression
        Ranks of the ring [-].
    alpha_hop : float
        Latency of one hop [s].
    beta_link : float
        Time per byte of one link, one way [s/B].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished; zero for one rank [s].

    Examples
    --------
    >>> round(ring_all_reduce(1e9, ranks=8, alpha_hop=2e-6, beta_link=1 / 250e9) * 1e3, 2)
    7.03
    """
    return ring_collective(nbytes, operation="all_reduce", ranks=ranks, alpha_hop=alpha_hop, beta_link=beta_link)


def tree_collective(
    nbytes: Values, *, operation: str, ranks: Values, alpha_hop: float, beta_link: float, nodes: Values = 1,
    alpha_rail: float = 0.0,
) -> Values:  # fmt: skip
    r"""Time of a broadcast, a reduce, or of both as an all_reduce, on a pipelined (double) binary tree.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention [B].
    operation : str
        ``all_reduce``, which goes up and down the tree, or another one that goes one way [-].
    ranks : int, array or expression
        Ranks of the tree, at least two [-].
    alpha_hop : float
        Latency of one hop inside a node [s].
    beta_link : float
        Time per byte of the link that limits it, one way [s/B].
    nodes : int, array or expression, optional
        Nodes that the ranks are spread over [-].
    alpha_rail : float, optional
        Latency of one hop between nodes [s].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t = w \left(\log_2(p / N)\, \alpha_h + \log_2(N)\, \alpha_r + \beta_l n\right)

    with w = 2 for all_reduce, else 1.

    References
    ----------
    .. [1] P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
       Parallel Computing 35(12), 2009. doi:10.1016/j.parco.2009.09.001

    Examples
    --------
    >>> round(float(tree_collective(1e6, operation="all_reduce", ranks=64, alpha_hop=5e-6, beta_link=1 / 25e9)) * 1e6)
    140
    """
    hops = np.log2(ranks / nodes) * alpha_hop + np.log2(nodes) * alpha_rail
    return (2.0 if operation == "all_reduce" else 1.0) * (hops + beta_link * nbytes)


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

    Each link carries the operands of its rank once, and the share of 1/p that its rank multicasts; a ring carries
    2 (p - 1) / p. On 8 ranks that is a gain of 1.56. H100 with NVLink SHARP shows about 1.26, because the switches do
    not reduce at the full rate of the links.

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
