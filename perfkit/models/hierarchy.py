"""Collectives over trees, switches and nodes: their stages inside nodes and between them, and the
time of both."""

import math
from collections.abc import Mapping

import numpy as np

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Values, check_choice
from perfkit.models.collectives import COLLECTIVES, find_collective, pipelined
from perfkit.models.roofline import smooth_maximum

#: Sharpness of the overlap of links inside nodes with those between them [-]; docs/formulas.md,
#: table 1.2.
OVERLAP = 2.9
#: Start-up of each further message of an all_to_all between nodes [s]; docs/formulas.md, table 1.2.
MESSAGE = 3e-6
#: Start-up of a call of the library, of a hop inside a node, and of one between nodes, for
#: vanishing messages [s]; docs/formulas.md, table 1.2.
CALL, NEAR, FAR = 6.6e-6, 0.83e-6, 5e-6
#: Least time of a step of a ring over nodes at full bandwidth [s]; docs/formulas.md, table 1.2.
STEP = 7.67e-6
#: Hops of a tree at full bandwidth: each waits for a chunk [s]; docs/formulas.md, table 1.2.
CHUNKS = {"near": 28e-6, "alpha_rail": 50e-6}
#: Times the bytes that the protocol of small messages sends between nodes [-]; docs/formulas.md,
#: table 1.2.
FLAGS = 4.0
#: Start-up of a tree whose bytes travel in lines with a flag each: of the call, of a hop inside a
#: node, and of one between nodes [s]; docs/formulas.md, table 1.2.
LINES = {"call": 14e-6, "near": 1.25e-6, "alpha_rail": 8.5e-6}
#: Times the bytes that lines of 128 B with 120 B of the message send [-]; docs/formulas.md, table
#: 1.2.
LINE = 128.0 / 120.0
#: Messages of all ranks of a node to a rank of another one go together if each of them is no longer
#: than this chunk [B]; docs/formulas.md, table 1.2.
CHUNK_OF_MESSAGES = 131072.0
#: Stages inside a node by operation across nodes; each stage moves the whole message.
LEVELS: Mapping[str, tuple[str, ...]] = {
    name: collective.stages_inside_nodes
    for name, collective in COLLECTIVES.items()
    if collective.stages_inside_nodes
}


@closed_form()
def split_levels(
    operation: str, nbytes: Values, *, ranks_per_node: int
) -> tuple[tuple[tuple[str, Values], ...], Values]:
    """Split a collective over nodes into its stages inside a node and its stage on the rails
    between nodes.

    Parameters
    ----------
    operation : str
        One of `LEVELS` [-].
    nbytes : float, array or expression
        Message size in the nccl-tests convention [B].
    ranks_per_node : int
        Ranks of a node, each on its own rail [-].

    Returns
    -------
    inside : tuple of (str, same kind as `nbytes`)
        Operations on the ranks of a node and their message sizes [B].
    between : same kind as `nbytes`
        Message size of the same operation on one rank of each node [B].

    Raises
    ------
    ValueError
        For an operation that is not known to split.

    Notes
    -----
    all_reduce is a reduce_scatter inside nodes, an all_reduce of each share on its rail, an
    all_gather inside nodes; the others move the whole message inside and a share of 1/g on each
    rail. A two-level all_to_all moves it all twice.

    References
    ----------
    .. [1] M. Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous
       network hierarchy", MLSys 2019

    Examples
    --------
    >>> split_levels("all_reduce", 8e9, ranks_per_node=8)
    ((('reduce_scatter', 8000000000.0), ('all_gather', 8000000000.0)), 1000000000.0)
    """
    check_choice("operation", operation, LEVELS)
    inside = tuple((stage, nbytes) for stage in LEVELS[operation])
    return inside, nbytes if operation == "all_to_all" else nbytes / ranks_per_node


@closed_form()
def overlap_levels(inside: Values, between: Values, *, sharpness: float = OVERLAP) -> Values:
    r"""Time of a collective whose stages inside nodes and between them use different links, chunk
    by chunk.

    Parameters
    ----------
    inside : float, array or expression
        Time of the stages inside a node [s].
    between : float, array or expression
        Time of the stage on the rails [s].
    sharpness : float, optional
        Exponent q: 1 adds them, infinity hides the shorter one [-].

    Returns
    -------
    time : same kind as `inside`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t = \left(t_{in}^q + t_{out}^q\right)^{1/q}

    From one node of 8 H100 and one rank on each of 10 nodes, the all_reduce of 80 ranks comes out
    within 10 % from 256 MiB to 16 GiB at q = 2.9; the sum is 50 to 70 % too long.

    Examples
    --------
    >>> round(float(overlap_levels(82.5e-3, 79.3e-3)) * 1e3, 1)
    102.8
    """
    return smooth_maximum(inside, between, sharpness=sharpness)


@closed_form()
def start_across(
    operation: str,
    *,
    ranks_per_node: Values,
    nodes: Values,
    alpha_rail: float = FAR,
    call: float = CALL,
    near: float = NEAR,
) -> Values:
    r"""Start-up of a collective over nodes, by the algorithm that a library takes for vanishing
    messages.

    Parameters
    ----------
    operation : str
        One of `perfkit.models.collectives.OPERATIONS` [-].
    ranks_per_node : int, array or expression
        Ranks of a node [-].
    nodes : int, array or expression
        Nodes, one or more [-].
    alpha_rail : float, optional
        Latency of a hop between nodes [s].
    call : float, optional
        Start-up of any call [s].
    near : float, optional
        Latency of a hop inside a node [s].

    Returns
    -------
    time : same kind as `nodes`
        Time of a message without bytes [s].

    Raises
    ------
    ValueError
        For an unknown operation.

    Notes
    -----
    .. math:: \alpha = \alpha_c + 2 (g - 1) \alpha_h + 2 \log_2(N)\, \alpha_r

    for all_reduce, which goes up and down a chain in each node and a double binary tree of nodes.
    Pairs (all_to_all, gather, scatter, send_recv) take one hop, and further messages between nodes
    `MESSAGE` each. All others go around a ring: N (g - 1) hops inside nodes, N - 1 between them.
    Measured: all_reduce of 8 B takes 63 us on 32 nodes of 8 A100, 19 us on one A100 of each of two
    nodes; a hop between nodes is then 4.5 and 6.2 us.

    References
    ----------
    .. [1] NVIDIA, NCCL, src/graph/tuning.cc (latencies by algorithm, protocol and link; the library
       takes the algorithm of least modelled time)
    .. [2] NVIDIA/nccl, issue 652; NVIDIA/nccl-tests, issue 150 (measured times)

    Examples
    --------
    >>> round(float(start_across("all_reduce", ranks_per_node=8, nodes=32, alpha_rail=5e-6)) * 1e6)
    68
    """
    g, far = ranks_per_node, np.minimum(nodes - 1, 1)
    if operation == "send_recv":
        return call + near + far * (alpha_rail - near)
    collective = find_collective(operation)
    if collective.in_pairs:
        further_messages = far * (g * (nodes - 1) - 1)
        return call + near + far * (alpha_rail - near) + further_messages * MESSAGE
    if operation == "all_reduce":
        return call + 2.0 * ((g - 1) * near + np.log2(nodes) * alpha_rail)
    return (
        call
        + collective.count_steps(nodes * (g - 1) + 1) * near
        + collective.count_steps(nodes) * alpha_rail
    )


@closed_form()
def pipelined_tree(
    nbytes: Values,
    *,
    ranks_per_node: Values,
    nodes: Values,
    start_up: float,
    beta_intra: float,
    beta_rail: float,
    expansion: float = 1.0,
) -> Values:
    r"""Time of an all_reduce over nodes whose bytes carry flags, so that no hop waits for a chunk: a
    chain in each node, and a double binary tree of nodes.

    Parameters
    ----------
    nbytes : float, array or expression
        Bytes of the buffer each rank reduces [B].
    ranks_per_node : int, array or expression
        Ranks of a node, each on its own rail [-].
    nodes : int, array or expression
        Nodes, two or more [-].
    start_up : float
        Start-up of all hops, see `start_across` [s].
    beta_intra : float
        Time per byte of the link of a rank inside the node, one way [s/B].
    beta_rail : float
        Time per byte of one rail, one way [s/B].
    expansion : float, optional
        Times the bytes that are sent with their flags: `FLAGS` or `LINE` [-].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t = \left(\alpha^q + (e \beta n)^q\right)^{1/q}, \quad \beta = \left[\left(2
       \tfrac{g-1}{g} \beta_i\right)^Q + \left(2 \tfrac{N-1}{N} \tfrac{\beta_r}{g}\right)^Q\right]^{1/Q}

    with q = 0.6 of `perfkit.models.collectives.pipelined` and Q of `overlap_levels`; nothing was
    fitted. The fastest of both protocols and of the one in chunks errs in mean by 17 and 10 % on
    all_reduces of 1 MiB to 8 GiB on 16 and 64 H100 of one cluster, by 7 % on those of 8 B to 8 GiB
    on 32 of another: docs/formulas.md, table 1.2.

    References
    ----------
    .. [1] NVIDIA, NCCL, src/graph/tuning.cc (BSD-3; LL and LL128: latencies, and their share of the
       bandwidth)
    .. [2] Z. Hu et al., "Demystifying NCCL: an in-depth analysis of GPU communication protocols and
       algorithms", 2025, arXiv:2507.04786 (the LL and LL128 protocols)
    .. [3] NVIDIA/nccl-tests, issue 309 (measured times)

    Examples
    --------
    >>> links = dict(ranks_per_node=8, nodes=8, beta_intra=1 / 370e9, beta_rail=1 / 49e9)
    >>> lines = start_across("all_reduce", ranks_per_node=8, nodes=8, **LINES)
    >>> round(float(pipelined_tree(2**20, start_up=lines, expansion=LINE, **links)) * 1e6)
    115
    """
    inside = 2.0 * (ranks_per_node - 1) / ranks_per_node * beta_intra
    between = 2.0 * (nodes - 1) / nodes * beta_rail / ranks_per_node
    beta = expansion * smooth_maximum(inside, between, sharpness=OVERLAP)
    return pipelined(nbytes, alpha=start_up, beta=beta)


@closed_form()
def ring_across_nodes(
    nbytes: Values,
    *,
    operation: str,
    ranks_per_node: Values,
    nodes: Values,
    alpha_hop: float,
    beta_intra: float,
    beta_rail: float,
    sharpness: float = OVERLAP,
) -> Values:
    r"""Time of a collective on rings over all ranks of several nodes, one ring for each rail.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention [B].
    operation : str
        One of `perfkit.models.collectives.OPERATIONS` but all_to_all and send_recv [-].
    ranks_per_node : int, array or expression
        Ranks of a node, each on its own rail [-].
    nodes : int, array or expression
        Nodes [-].
    alpha_hop : float
        Latency of a step, that of the slowest hop, between nodes [s].
    beta_intra : float
        Time per byte of the link of a rank inside the node, one way [s/B].
    beta_rail : float
        Time per byte of one rail, one way [s/B].
    sharpness : float, optional
        How much the links overlap, see `overlap_levels` [-].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Raises
    ------
    ValueError
        For an unknown operation.

    Notes
    -----
    .. math:: t = s(p)\, \alpha_h + f(p)\, n \left[\left(\tfrac{g-1}{g} \beta_i\right)^q +
       \left(\tfrac{1}{g} \beta_r\right)^q\right]^{1/q}, \quad p = g N

    s are the steps and f the bus factor of the operation; of the traffic of a rank, g - 1 hops in g
    stay in the node. The start-up grows with the number of ranks: on 80 H100 it is 0.6 ms, nearly
    all of an all_gather up to 128 MiB. Links and hop were fitted on one node and on one rank of
    each of 10. Then all_gather and reduce_scatter are within 12 % from 512 MiB on; at 256 MiB,
    where the library changes protocol, up to 22 % too fast; below up to 41 % too slow.

    References
    ----------
    .. [1] Z. Hu et al., "Demystifying NCCL: an in-depth analysis of GPU communication protocols and
       algorithms", 2025, arXiv:2507.04786 (rings over all ranks, channels and rails)

    Examples
    --------
    >>> links = dict(ranks_per_node=8, nodes=10, alpha_hop=7.8e-6, beta_intra=1 / 368e9, beta_rail=1 / 48e9)
    >>> [round(float(ring_across_nodes(n, operation="all_gather", **links)) * 1e3, 2) for n in (2**27, 2**34)]
    [1.04, 54.39]
    """
    ranks = ranks_per_node * nodes
    inside, between = (ranks_per_node - 1) / ranks_per_node * beta_intra, beta_rail / ranks_per_node
    collective = find_collective(operation)
    traffic = collective.find_bus_factor(ranks) * nbytes
    return collective.count_steps(ranks) * alpha_hop + traffic * smooth_maximum(
        inside, between, sharpness=sharpness
    )


@closed_form()
def start_messages(
    nbytes: Values,
    *,
    ranks_per_node: Values,
    nodes: Values,
    alpha_message: float = MESSAGE,
    chunk: float = CHUNK_OF_MESSAGES,
) -> Values:
    r"""Start-up of the messages of an all_to_all between nodes, beyond one to each other node.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention, the whole buffer of a rank [B].
    ranks_per_node : int, array or expression
        Ranks of a node, each on its own rail [-].
    nodes : int, array or expression
        Nodes [-].
    alpha_message : float, optional
        Start-up of each message [s].
    chunk : float, optional
        Messages of the ranks of a node to one rank of another node are written to the memory of the
        rank on the same rail, and sent together. What fills a chunk is sent by itself [B]. 0 where
        ranks send all messages themselves, as without a fast link inside nodes.

    Returns
    -------
    time : same kind as `nbytes`
        Start-up of these messages [s].

    Notes
    -----
    .. math:: \alpha = (g-1)(N-1)\, \alpha_m \min\left(1, \frac{n}{g N c}\right)

    Each rank has (g - 1) (N - 1) messages of n / (g N) besides the N - 1 that one rank of each node
    would have. Long ones were measured: on 20, 40 and 80 H100 of ten nodes, from 32 MiB to 1 GiB
    (0.4 MiB a message and more), all_to_alls come out within 14 %, 5 % in the mean. No published time of short ones
    over nodes with NVLink was found: that they go together is what the library says of itself.

    References
    ----------
    .. [1] NVIDIA, "Doubling all2all performance with NVIDIA Collective Communication Library 2.12",
       2022 (PXN: NVLink to the rank on the rail of the destination, and messages sent together)
    .. [2] NVIDIA, NCCL, parameter NCCL_P2P_NET_CHUNKSIZE, 128 KiB by default

    Examples
    --------
    >>> [round(float(start_messages(n, ranks_per_node=8, nodes=8)) * 1e6) for n in (2**20, 2**25)]
    [18, 147]
    >>> round(float(start_messages(2**20, ranks_per_node=8, nodes=8, chunk=0.0)) * 1e6)
    147
    """
    all_messages = (ranks_per_node - 1) * (nodes - 1) * alpha_message
    if chunk == 0:
        return all_messages + 0.0 * nbytes
    share_of_chunk = nbytes / (ranks_per_node * nodes * chunk)
    return all_messages * np.minimum(share_of_chunk, 1.0)


@closed_form()
def flat_all_to_all(inside: Values, between: Values, messages: Values) -> Values:
    r"""Time of an all_to_all in which every rank sends to every other one, over nodes.

    Parameters
    ----------
    inside : float, array or expression
        Time of the all_to_all of n / N on the ranks of a node [s].
    between : float, array or expression
        Time of the all_to_all of n on one rank of each node [s].
    messages : float, array or expression
        Start-up of the messages between nodes beyond those that `between` holds, see
        `start_messages` [s].

    Returns
    -------
    time : same kind as `inside`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t = \max\left(t_{in},\; t_{out} + \alpha\right)

    A share of 1/N of the message stays in the node. On 80 H100 it comes out within 7 % from 32 MiB
    to 16 GiB.

    Examples
    --------
    >>> round(float(flat_all_to_all(0.1e-3, 0.78e-3, 0.19e-3)) * 1e3, 2)
    0.97
    """
    return smooth_maximum(inside, between + messages, sharpness=math.inf)


@closed_form()
def two_level_all_to_all(
    nbytes: Values, inside: Values, between: Values, *, memory_bandwidth: float
) -> Values:
    r"""Time of an all_to_all that first gathers in the node what goes to the same rank of all other
    nodes.

    Parameters
    ----------
    nbytes : float, array or expression
        Message size in the nccl-tests convention, the whole buffer of a rank [B].
    inside : float, array or expression
        Time of the all_to_all of n on the ranks of a node [s].
    between : float, array or expression
        Time of the all_to_all of n on one rank of each node [s].
    memory_bandwidth : float
        Memory of a rank, for the copies that bring chunks into order, before and after the stage
        inside [B/s].

    Returns
    -------
    time : same kind as `nbytes`
        Time until the last rank has finished [s].

    Notes
    -----
    .. math:: t = t_{in} + t_{out} + 2 \cdot \frac{2n}{W}

    It sends N - 1 messages of n / N instead of (N - 1) g messages of n / (N g), which pays on many
    nodes where the library does not send short messages together, see `start_messages`, or where
    they fill its chunks.

    References
    ----------
    .. [1] C. Hwang et al., "Tutel: adaptive mixture-of-experts at scale", MLSys 2023,
       arXiv:2206.03382

    Examples
    --------
    >>> round(two_level_all_to_all(1e6, 20e-6, 60e-6, memory_bandwidth=2e12) * 1e6)
    82
    """
    return inside + between + 4.0 * nbytes / memory_bandwidth


@closed_form()
def tree_collective(
    nbytes: Values,
    *,
    operation: str,
    ranks: Values,
    alpha_hop: float,
    beta_link: float,
    nodes: Values = 1,
    alpha_rail: float = 0.0,
) -> Values:
    r"""Time of a broadcast, a reduce, or of both as an all_reduce, on a pipelined (double) binary
    tree.

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
    .. [1] P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast,
       reduction and scan", Parallel Computing 35(12), 2009. doi:10.1016/j.parco.2009.09.001

    Examples
    --------
    >>> round(float(tree_collective(1e6, operation="all_reduce", ranks=64, alpha_hop=5e-6, beta_link=1 / 25e9)) * 1e6)
    140
    """
    check_choice("operation", operation, COLLECTIVES)
    hops = np.log2(ranks / nodes) * alpha_hop + np.log2(nodes) * alpha_rail
    return float(COLLECTIVES[operation].rounds) * (hops + beta_link * nbytes)


@closed_form()
def in_network_all_reduce(
    nbytes: Values, *, ranks: Values, alpha_hop: float, beta_link: float
) -> Values:
    r"""Time of an all_reduce that the switch does: each rank reads one reduced share and writes it
    back to all.

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

    Each link carries the operands of its rank once, and the share of 1/p that its rank multicasts;
    a ring carries 2 (p - 1) / p. On 8 ranks that is a gain of 1.56. H100 with NVLink SHARP shows
    about 1.26, because the switches do not reduce at the full rate of the links.

    References
    ----------
    .. [1] R. L. Graham et al., "Scalable hierarchical aggregation protocol (SHArP)", COM-HPC 2016.
       doi:10.1109/COMHPC.2016.006
    .. [2] NVIDIA/nccl-tests, pull request 239, comment by S. Jeaugey: algbw = busbw p / (p + 1)
       with NVLink SHARP

    Examples
    --------
    >>> round(float(in_network_all_reduce(1e9, ranks=8, alpha_hop=2e-6, beta_link=1 / 450e9)) * 1e3, 2)
    2.5
    """
    return ((ranks + 1) / ranks * beta_link * nbytes + 2.0 * alpha_hop) * np.minimum(ranks - 1, 1)
