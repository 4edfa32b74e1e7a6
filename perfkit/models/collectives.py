"""Collective communication: the forms perfkit fits to whole collectives, and the bandwidths people compare."""

import numpy as np
import numpy.typing as npt

from perfkit.models.algorithms import (
    OPERATIONS,
    bus_factor,
    in_network_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_steps,
    tree_all_reduce,
)
from perfkit.models.roofline import smooth_maximum
from perfkit.units import Array, Values

__all__ = [
    "OPERATIONS",
    "algorithm_bandwidth",
    "alpha_beta",
    "bus_bandwidth",
    "bus_factor",
    "equivalent_bytes",
    "in_network_all_reduce",
    "over_ranks",
    "pipelined",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_steps",
    "tree_all_reduce",
    "two_branch",
    "two_regime",
]


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


def two_branch(
    nbytes: Values, *, alpha1: float, beta1: float, alpha2: float, beta2: float, sharpness: float = 0.8
) -> Values:
    r"""Time of a collective that switches between two pipelined protocols where that pays.

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
    sharpness : float, optional
        Exponent q of both branches, see `pipelined` [-].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t(n) = \min_{i=1,2} \left(\alpha_i^q + (\beta_i n)^q\right)^{1/q}

    Continuous where the branches meet. Every other size of 66 A100 and H100 curves (2 to 8 ranks, 512 B to 512 MiB)
    predicted from the rest: 3.3 / 5.8 / 17 % (geometric mean / mean / 95th percentile) at q = 0.8, against 3.8 / 6.6 /
    21 % of `pipelined`. Both switches that libraries make, to more channels near 64 KiB and to another protocol at
    some MiB, are found; only one of them fits in.

    References
    ----------
    .. [1] Z. Hu et al., "Demystifying NCCL: an in-depth analysis of GPU communication protocols and algorithms", 2025,
       arXiv:2507.04786 (the LL, LL128 and Simple protocols)

    Examples
    --------
    >>> parameters = dict(alpha1=10e-6, beta1=50e-12, alpha2=40e-6, beta2=5e-12)
    >>> [round(float(two_branch(n, **parameters)) * 1e6, 1) for n in (0, 1e5, 1e8)]
    [10.0, 17.6, 584.2]
    """
    small = pipelined(nbytes, alpha=alpha1, beta=beta1, sharpness=sharpness)
    return np.minimum(small, pipelined(nbytes, alpha=alpha2, beta=beta2, sharpness=sharpness))


def over_ranks(
    nbytes: Values,
    ranks: Values,
    operation: str,
    *,
    alpha0: float,
    alpha1: float,
    beta0: float,
    beta1: float,
    sharpness: float = 0.6,
) -> Values:
    r"""Time of a collective for any number of ranks of one network.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention [B].
    ranks : int, array or expression
        Ranks taking part [-].
    operation : str
        One of `OPERATIONS`, for its `ring_steps` [-].
    alpha0 : float
        Part of the start-up that does not depend on the ranks [s].
    alpha1 : float
        Start-up of each step [s].
    beta0 : float
        Time per byte that does not depend on the ranks [s/B].
    beta1 : float
        Time per byte that leaves a rank [s/B].
    sharpness : float, optional
        Exponent q, see `pipelined` [-].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Raises
    ------
    ValueError
        For an unknown operation; the message lists the known ones.

    Notes
    -----
    .. math:: t(n, p) = \left(\alpha^q + (\beta n)^q\right)^{1/q}, \quad \alpha = \alpha_0 + \alpha_1 s(p), \quad
       \beta = \beta_0 + \beta_1 \frac{p-1}{p}

    Fitted on 2 and 4 ranks of A100 and H100 nodes it predicts 8 with 4.2 / 7.4 / 21 % (geometric mean / mean / 95th
    percentile). Without beta0, as in a ring, the same comparison leaves 9 / 13 / 29 %; with log2(p) for the steps 5.6
    / 9.9 / 25 %; a fifth parameter, q or a second branch, makes unseen rank counts worse.

    Examples
    --------
    >>> law = dict(alpha0=7e-6, alpha1=1e-6, beta0=1.5e-12, beta1=6e-12)
    >>> [round(float(over_ranks(64 * 2**20, p, "all_reduce", **law)) * 1e6) for p in (2, 4, 8)]
    [366, 492, 579]
    """
    alpha, share = alpha0 + alpha1 * ring_steps(operation, ranks), (ranks - 1) / ranks
    return pipelined(nbytes, alpha=alpha, beta=beta0 + beta1 * share, sharpness=sharpness)


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
