"""Collective communication: the forms perfkit fits, the textbook ones, and the bandwidths people compare."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from perfkit.models.roofline import smooth_maximum
from perfkit.units import Array, Values, check_choice

__all__ = [
    "OPERATIONS",
    "algorithm_bandwidth",
    "alpha_beta",
    "bus_bandwidth",
    "bus_factor",
    "equivalent_bytes",
    "pipelined",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_steps",
    "tree_all_reduce",
    "two_regime",
]

#: Bus factor by operation: the multiple of (p - 1) / p for the first group, of 1 for the second.
_SHARED: Mapping[str, float] = MappingProxyType(
    {"all_reduce": 2.0, **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 1.0)}
)
_WHOLE = ("broadcast", "reduce", "send_recv")
#: Operations in the vocabulary of nccl-tests.
OPERATIONS = (*_SHARED, *_WHOLE)


def alpha_beta(nbytes: Values, *, alpha: float, beta: float) -> Values:
    r"""Time of a collective as start-up plus transfer.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention (full per-rank buffer) [B].
    alpha : float
        Time of a vanishing message [s].
    beta : float
        Time per byte, the inverse of algorithm bandwidth [s/B].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t(n) = \alpha + \beta n

    Fitted on log time to 76 NCCL curves it leaves 7.9 % geometric-mean error on held-out sizes; `pipelined` leaves
    4.5 %.

    References
    ----------
    .. [1] R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20(3),
       1994. doi:10.1016/S0167-8191(06)80021-9

    Examples
    --------
    >>> round(alpha_beta(64 * 2**20, alpha=20e-6, beta=1 / 130e9) * 1e6)
    536
    """
    return alpha + beta * nbytes


def pipelined(nbytes: Values, *, alpha: float, beta: float, sharpness: float = 0.6) -> Values:
    r"""Time of a collective whose start-up and transfer phases overlap in chunks.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention (full per-rank buffer) [B].
    alpha : float
        Time of a vanishing message [s].
    beta : float
        Time per byte of a huge message, the inverse of algorithm bandwidth [s/B].
    sharpness : float, optional
        Exponent q of the smooth maximum, between 0.3 and 50: 1 adds the phases (classic alpha-beta), large values take
        the longer one, and values below 1 charge the crossover, where protocols change and pipelines fill [-].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t(n) = \left(\alpha^q + (\beta n)^q\right)^{1/q}

    Continuous, increasing in every argument but `sharpness`, never below ``max(alpha, beta * nbytes)``. Checked on 76
    NCCL curves of seven NVSwitch systems, 512 B to 512 MiB, 2 to 8 ranks: held-out sizes 4.5 % geometric-mean error
    at q = 0.6, against 7.9 % for the classic form. PCIe systems prefer q = 0.7; q = 0.5 is the optimal chunking of a
    pipeline, alpha + beta n + 2 sqrt(alpha beta n).

    References
    ----------
    .. [1] R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20(3),
       1994. doi:10.1016/S0167-8191(06)80021-9 (the alpha-beta form, q = 1)

    Examples
    --------
    An 8-GPU all_reduce of 64 MiB with 20 µs start-up and 130 GB/s:

    >>> round(float(pipelined(64 * 2**20, alpha=20e-6, beta=1 / 130e9)) * 1e6)
    644
    """
    return smooth_maximum(alpha, beta * nbytes, sharpness=sharpness)


def two_regime(nbytes: Values, *, alpha1: float, beta1: float, alpha2: float, beta2: float) -> Values:
    r"""Time of a collective that switches from a low-latency to a high-bandwidth protocol where that pays.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention [B].
    alpha1 : float
        Start-up of the protocol for small messages [s].
    beta1 : float
        Time per byte of the protocol for small messages [s/B].
    alpha2 : float
        Start-up of the protocol for large messages [s].
    beta2 : float
        Time per byte of the protocol for large messages [s/B].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t(n) = \min(\alpha_1 + \beta_1 n,\; \alpha_2 + \beta_2 n)

    On the curves of `pipelined`: 3.2 % geometric-mean error on held-out sizes, with four parameters instead of two.

    References
    ----------
    .. [1] Z. Hu et al., "Demystifying NCCL: an in-depth analysis of GPU communication protocols and algorithms", 2025,
       arXiv:2507.04786 (the LL, LL128 and Simple protocols)

    Examples
    --------
    >>> parameters = dict(alpha1=10e-6, beta1=50e-12, alpha2=40e-6, beta2=5e-12)
    >>> [round(float(two_regime(n, **parameters)) * 1e6, 1) for n in (0, 1e5, 1e8)]
    [10.0, 15.0, 540.0]
    """
    return np.minimum(alpha1 + beta1 * nbytes, alpha2 + beta2 * nbytes)


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


def algorithm_bandwidth(nbytes: Values, time: Values) -> Values:
    """Message size over time, as nccl-tests prints it under algbw.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention [B].
    time : float, array or expression
        Completion time [s].

    Returns
    -------
    bandwidth : same kind as `nbytes`
        algbw [B/s].

    Examples
    --------
    >>> round(algorithm_bandwidth(8589934592, 63896e-6) / 1e9, 2)
    134.44
    """
    return nbytes / time


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


def bus_bandwidth(nbytes: Values, time: Values, *, ranks: Values, operation: str) -> Values:
    """Hardware bandwidth a collective achieved, comparable across operations and rank counts.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention [B].
    time : float, array or expression
        Completion time [s].
    ranks : int, array or expression
        Ranks taking part [-].
    operation : str
        One of `OPERATIONS` [-].

    Returns
    -------
    bandwidth : same kind as `nbytes`
        busbw as nccl-tests prints it, one direction [B/s].

    Raises
    ------
    ValueError
        For an unknown operation; the message lists the known ones.

    References
    ----------
    .. [1] NVIDIA, nccl-tests, doc/PERFORMANCE.md (definition of algbw and busbw)

    Examples
    --------
    >>> round(bus_bandwidth(8e9, 0.0312268, ranks=8, operation="all_reduce") / 1e9, 1)
    448.3
    """
    return bus_factor(operation, ranks) * nbytes / time


def equivalent_bytes(split: npt.ArrayLike) -> Array:
    r"""Balanced all_to_all that takes as long as an uneven one.

    Parameters
    ----------
    split : array, shape (..., p, p)
        Bytes that rank i (row) sends to rank j (column); the diagonal stays on its rank [B].

    Returns
    -------
    nbytes : array, shape (...)
        Message size in the nccl-tests convention, to feed to a curve calibrated on balanced messages; 0 for one rank
        [B].

    Raises
    ------
    ValueError
        For a split that is not square, or holds a number that is negative or not finite.

    Notes
    -----
    .. math:: n = \frac{p}{p-1} \max_i \max\left(\sum_{j \ne i} S_{ij},\; \sum_{j \ne i} S_{ji}\right)

    The busiest port, in or out, decides. Where every rank sends the same to all (table-wise sharding, s_i from rank
    i) this is p max s_i.

    Examples
    --------
    Rank 0 holds two tables, rank 1 one; 1 MB of each goes to either rank:

    >>> float(equivalent_bytes([[2e6, 2e6], [1e6, 1e6]])) / 1e6
    4.0
    """
    split = np.asarray(split, dtype=float)
    if split.ndim < 2 or split.shape[-1] != split.shape[-2] or split.shape[-1] == 0:
        raise ValueError(
            f"split has shape {split.shape}; it must be square, a row for each sender and a column per receiver"
        )
    if not np.all((split >= 0) & np.isfinite(split)):
        raise ValueError("split holds a number that is negative or not finite; every entry must be a size in bytes")
    ranks = split.shape[-1]
    if ranks == 1:
        return np.zeros(split.shape[:-2])
    away = split * (1 - np.eye(ranks))
    busiest = np.maximum(away.sum(axis=-1).max(axis=-1), away.sum(axis=-2).max(axis=-1))
    return np.asarray(ranks / (ranks - 1) * busiest)
