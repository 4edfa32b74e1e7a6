"""Times of collectives by message size, and the bus bandwidth they reach; between nodes see
`hierarchy`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Values, check_choice
from perfkit.models.roofline import smooth_maximum


@dataclass(frozen=True)
class Collective:
    """One collective operation: how it moves a message, and by which algorithms.

    Parameters
    ----------
    name : str
        Name in the vocabulary of nccl-tests.
    rounds : int
        How often each byte of the message goes around a ring [-].
    in_shares : bool
        Whether each of p ranks has a p-th part of the message from the start or at the end, and so
        sends or receives the other parts alone.
    reduces : bool
        Whether it adds up numbers.
    has_root : bool
        Whether one rank sends to all others or receives from them.
    in_pairs : bool
        Whether each message goes from one rank straight to another, and not around a ring or a
        tree.
    in_workloads : bool
        Whether graphs of workloads have it; `perfkit calibrate` measures these.
    across_nodes : str
        How libraries do it across nodes: an entry of `perfkit.models.algorithms.ALGORITHMS`, or ``flat``, where all pairs of
        ranks exchange their messages at once; empty where nothing is known.
    stages_inside_nodes : tuple of str
        Operations inside each node on two levels, each of which moves the whole message.
    """

    name: str
    rounds: int = 1
    in_shares: bool = True
    reduces: bool = False
    has_root: bool = False
    in_pairs: bool = False
    in_workloads: bool = False
    across_nodes: str = ""
    stages_inside_nodes: tuple[str, ...] = ()

    def count_steps(self, ranks: Any) -> Any:
        """Steps of a ring, see `ring_steps`.

        Parameters
        ----------
        ranks : int, array or expression
            Ranks taking part [-].

        Returns
        -------
        steps : same kind as `ranks`
            Steps, one after another [-].
        """
        if self.name == "send_recv":
            return ranks * 0 + 1
        return self.rounds * (ranks - 1)

    def find_bus_factor(self, ranks: Any) -> Any:
        """Ratio of bus to algorithm bandwidth, see `bus_factor`.

        Parameters
        ----------
        ranks : int, array or expression
            Ranks taking part [-].

        Returns
        -------
        factor : same kind as `ranks`
            The ratio [-].
        """
        if self.in_shares:
            return float(self.rounds) * (ranks - 1) / ranks
        return ranks * 0 + float(self.rounds)


#: Operations by name.
COLLECTIVES: Mapping[str, Collective] = {
    collective.name: collective
    for collective in (
        Collective(
            "all_reduce",
            rounds=2,
            reduces=True,
            in_workloads=True,
            across_nodes="two_level",
            stages_inside_nodes=("reduce_scatter", "all_gather"),
        ),
        Collective(
            "all_gather",
            in_workloads=True,
            across_nodes="ring",
            stages_inside_nodes=("all_gather",),
        ),
        Collective(
            "reduce_scatter",
            reduces=True,
            in_workloads=True,
            across_nodes="ring",
            stages_inside_nodes=("reduce_scatter",),
        ),
        Collective(
            "all_to_all",
            in_pairs=True,
            in_workloads=True,
            across_nodes="flat",
            stages_inside_nodes=("all_to_all",),
        ),
        Collective("gather", has_root=True, in_pairs=True),
        Collective("scatter", has_root=True, in_pairs=True),
        Collective(
            "broadcast",
            in_shares=False,
            has_root=True,
            in_workloads=True,
            across_nodes="ring",
            stages_inside_nodes=("broadcast",),
        ),
        Collective(
            "reduce",
            in_shares=False,
            reduces=True,
            has_root=True,
            across_nodes="ring",
            stages_inside_nodes=("reduce",),
        ),
        Collective("send_recv", in_shares=False, in_pairs=True, across_nodes="rail"),
    )
}
#: Names of the operations.
OPERATIONS = tuple(COLLECTIVES)


def find_collective(operation: str) -> Collective:
    """Find an operation by its name.

    Parameters
    ----------
    operation : str
        One of `OPERATIONS` [-].

    Returns
    -------
    collective : Collective
        What is known about it.

    Raises
    ------
    ValueError
        For an unknown operation; the message lists the known ones.

    Examples
    --------
    >>> find_collective("all_reduce").rounds
    2
    """
    return COLLECTIVES[check_choice("operation", operation, OPERATIONS)]


@closed_form()
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
    steps: Values = find_collective(operation).count_steps(ranks)
    return steps


@closed_form()
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
        2 (p - 1) / p for all_reduce, 1 for broadcast, reduce and send_recv, (p - 1) / p for the
        others [-].

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
    factor: Values = find_collective(operation).find_bus_factor(ranks)
    return factor


@closed_form()
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


@closed_form()
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

    Fitted on log time to 76 NCCL curves it leaves 7.9 % geometric-mean error on held-out sizes;
    `pipelined` leaves 4.5 %.

    References
    ----------
    .. [1] R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2",
       Parallel Computing 20(3),
       1994. doi:10.1016/S0167-8191(06)80021-9

    Examples
    --------
    >>> round(alpha_beta(64 * 2**20, alpha=20e-6, beta=1 / 130e9) * 1e6)
    536
    """
    return alpha + beta * nbytes


@closed_form()
def pipelined(nbytes: Values, *, alpha: float, beta: float, sharpness: float = 0.6) -> Values:
    r"""Time of a collective from its start-up and its transfer, with a rounded corner between them.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention (full per-rank buffer) [B].
    alpha : float
        Time of a vanishing message [s].
    beta : float
        Time per byte of a huge message, the inverse of algorithm bandwidth [s/B].
    sharpness : float, optional
        Exponent q of the smooth maximum, between 0.3 and 50: 1 adds the phases (classic
        alpha-beta), large values take the longer one, and values below 1 charge the crossover,
        where protocols change and pipelines fill [-].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t(n) = \left(\alpha^q + (\beta n)^q\right)^{1/q}

    Continuous, increasing in every argument but `sharpness`, never below ``max(alpha, beta *
    nbytes)``. Checked on 76 NCCL curves of seven NVSwitch systems, 512 B to 512 MiB, 2 to 8 ranks:
    held-out sizes 4.5 % geometric-mean error at q = 0.6, against 7.9 % for the classic form. PCIe
    systems prefer q = 0.7; q = 0.5 is the optimal chunking of a pipeline, alpha + beta n + 2
    sqrt(alpha beta n).

    References
    ----------
    .. [1] R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2",
       Parallel Computing 20(3),
       1994. doi:10.1016/S0167-8191(06)80021-9 (the alpha-beta form, q = 1)

    Examples
    --------
    An 8-GPU all_reduce of 64 MiB with 20 µs start-up and 130 GB/s:

    >>> round(float(pipelined(64 * 2**20, alpha=20e-6, beta=1 / 130e9)) * 1e6)
    644
    """
    return smooth_maximum(alpha, beta * nbytes, sharpness=sharpness)


@closed_form()
def two_branch(
    nbytes: Values,
    *,
    alpha1: float,
    beta1: float,
    alpha2: float,
    beta2: float,
    sharpness: float = 0.8,
) -> Values:
    r"""Time of a collective that switches between two pipelined protocols when that is faster.

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

    Continuous where the branches meet. Every other size of 66 A100 and H100 curves (2 to 8 ranks,
    512 B to 512 MiB) predicted from the rest: 3.3 / 5.8 / 17 % (geometric mean / mean / 95th
    percentile) at q = 0.8; `pipelined` has 3.8 / 6.6 / 21 %. Libraries switch twice, to more
    channels near 64 KiB and to another protocol at some MiB; the form holds one switch.

    References
    ----------
    .. [1] Z. Hu et al., "Demystifying NCCL: an in-depth analysis of GPU communication protocols and
       algorithms", 2025, arXiv:2507.04786 (the LL, LL128 and Simple protocols)

    Examples
    --------
    >>> parameters = dict(alpha1=10e-6, beta1=50e-12, alpha2=40e-6, beta2=5e-12)
    >>> [round(float(two_branch(n, **parameters)) * 1e6, 1) for n in (0, 1e5, 1e8)]
    [10.0, 17.6, 584.2]
    """
    small = pipelined(nbytes, alpha=alpha1, beta=beta1, sharpness=sharpness)
    return np.minimum(small, pipelined(nbytes, alpha=alpha2, beta=beta2, sharpness=sharpness))


@closed_form()
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
    .. math:: t(n, p) = \left(\alpha^q + (\beta n)^q\right)^{1/q}, \quad
       \alpha = \alpha_0 + \alpha_1 s(p), \quad
       \beta = \beta_0 + \beta_1 \frac{p-1}{p}

    Fitted on 2 and 4 ranks of A100 and H100 nodes it predicts 8 with 4.2 / 7.4 / 21 % (geometric
    mean / mean / 95th percentile). Other laws do worse: docs/formulas.md, table 1.3.

    Examples
    --------
    >>> law = dict(alpha0=7e-6, alpha1=1e-6, beta0=1.5e-12, beta1=6e-12)
    >>> [round(float(over_ranks(64 * 2**20, p, "all_reduce", **law)) * 1e6) for p in (2, 4, 8)]
    [366, 492, 579]
    """
    steps = find_collective(operation).count_steps(ranks)
    alpha, share = alpha0 + alpha1 * steps, (ranks - 1) / ranks
    return pipelined(nbytes, alpha=alpha, beta=beta0 + beta1 * share, sharpness=sharpness)


@closed_form()
def ring_collective(
    nbytes: Values, *, operation: str, ranks: Values, alpha_hop: float, beta_link: float
) -> Values:
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

    with the steps s and the bus factor f; additions overlap with the transfer. Measured all_reduces
    of large messages grow less with p: a ring fitted on 2 and 4 ranks is 23 to 28 % too slow on 8.

    References
    ----------
    .. [1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication
       operations in MPICH", Int. J. High Performance Computing Applications 19(1), 2005.
       doi:10.1177/1094342005051521

    Examples
    --------
    >>> round(ring_collective(1e9, operation="all_gather", ranks=8, alpha_hop=2e-6, beta_link=1 / 250e9) * 1e3, 2)
    3.51
    """
    collective = find_collective(operation)
    steps, factor = collective.count_steps(ranks), collective.find_bus_factor(ranks)
    time: Values = steps * alpha_hop + factor * beta_link * nbytes
    return time
