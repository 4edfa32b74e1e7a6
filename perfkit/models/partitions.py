"""How ranks share a Transformer: the bubble of a pipeline, exposed communication, and the memory of
a rank."""

from typing import NamedTuple

import numpy as np

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Values, check_choice, check_positive

#: Schedules of micro-batches over stages.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "breadth_first", "zero_bubble")
#: Schedules whose stages hold several chunks of layers.
CHUNKED = ("interleaved", "breadth_first")
#: What is computed again in the backward pass: nothing, scores of attention, or whole layers.
RECOMPUTED = ("none", "selective", "full")


class Step(NamedTuple):
    """A pass of a micro-batch through a chunk of layers.

    Parameters
    ----------
    phase : str
        ``forward``, ``backward``, or ``weights``: gradients of weights that a backward pass has put
        off.
    micro, chunk : int
        Which micro-batch, and which chunk of the stage, from 0 [-].
    """

    phase: str
    micro: int
    chunk: int


@closed_form()
def bubble_time(
    total: Values,
    *,
    slowest: Values,
    stages: Values,
    chunks: Values = 1,
    delayed: Values = 0.0,
    micro_batches: Values = np.inf,
) -> Values:
    """Time that a pipeline adds to the work of its slowest stage.

    Parameters
    ----------
    total : float or array
        Forward and backward time of one micro-batch in all stages [s].
    slowest : float or array
        That of the slowest stage [s].
    stages : int or array
        Stages [-].
    chunks : int or array, optional
        Chunks of layers of each stage, of the schedules in `CHUNKED` [-].
    delayed : float or array, optional
        Time of the weight gradients of a stage for one micro-batch, if they may be put off
        (``zero_bubble``) [s].
    micro_batches : int or array, optional
        Micro-batches of an iteration; by default at least as many as stages [-].

    Returns
    -------
    bubble : same kind as `total`
        Idle time: an iteration of m micro-batches takes m times `slowest` plus this [s].

    Notes
    -----
    (sum of all stages - slowest) / v - 2 (p - 1) t_W, never below 0. Of p even stages it is the
    share (p - 1) / (v m) of the ideal time [1]_, and (p - 1) (t_F + t_B - t_W) of H1 [2]_. GPipe
    and 1F1B differ in memory alone; the bubble of a breadth-first schedule is that of interleaved
    stages [3]_. With m < p micro-batches no stage puts off more than m - 1 gradients: p - 1 + m - 1
    in place of 2 (p - 1).

    References
    ----------
    .. [1] D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
       Megatron-LM", SC 2021, arXiv:2104.04473, section 2.2
    .. [2] P. Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, arXiv:2401.10241, table 1
    .. [3] J. Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023, arXiv:2211.05953,
       section 4.1

    Examples
    --------
    Eight stages of 10 ms, one chunk each and three:

    >>> [round(float(bubble_time(0.08, slowest=0.01, stages=8, chunks=v)), 4) for v in (1, 3)]
    [0.07, 0.0233]
    """
    put_off = stages - 1.0 + np.minimum(stages, micro_batches) - 1.0
    return np.maximum((total - slowest) / chunks - put_off * delayed, 0.0)


@closed_form(other=("schedule",))
def held_batches(
    micro_batches: Values, *, stages: Values, schedule: Values, chunks: Values = 1
) -> Values:
    """Micro-batches whose activations the first stage keeps at once.

    Parameters
    ----------
    micro_batches : int or array
        Micro-batches of an iteration [-].
    stages : int or array
        Stages [-].
    schedule : str or array
        One of `SCHEDULES` [-].
    chunks : int or array, optional
        Chunks of layers of each stage [-].

    Returns
    -------
    held : same kind as `micro_batches`
        Micro-batches, counted in all layers of the stage [-].

    Notes
    -----
    All m of GPipe and breadth-first; at most p of 1F1B and of H1, whose peak is the same; p (1 + (p
    - 1) / (p v)) where chunks are interleaved [1]_.

    References
    ----------
    .. [1] V. Korthikanti et al., "Reducing activation recomputation in large Transformer models",
       MLSys 2023, arXiv:2205.05198, section 4.2.3

    Examples
    --------
    >>> float(held_batches(64, stages=8, schedule="1f1b")), float(held_batches(64, stages=8, schedule="gpipe"))
    (8.0, 64.0)
    """
    for name in np.unique(schedule).tolist():
        check_choice("schedule", name, SCHEDULES)
    most = stages + (stages - 1.0) / chunks * (np.asarray(schedule) == "interleaved")
    return np.where(
        np.isin(schedule, ("gpipe", "breadth_first")),
        micro_batches,
        np.minimum(micro_batches, most),
    )


def list_steps(
    schedule: str, stage: int, *, stages: int, micro_batches: int, chunks: int = 1
) -> list[Step]:
    """List the passes of one stage in the order of a schedule.

    Parameters
    ----------
    schedule : str
        One of `SCHEDULES`.
    stage, stages : int
        Number of the stage, from 0, and how many there are [-].
    micro_batches, chunks : int
        Micro-batches of an iteration, and chunks of layers of each stage [-].

    Returns
    -------
    steps : list of Step
        With H1 (``zero_bubble``), a stage puts off as many weight gradients as stages come before
        it.

    Examples
    --------
    >>> "".join(step.phase[0] for step in list_steps("1f1b", 1, stages=3, micro_batches=4))
    'ffbfbfbb'
    """
    check_choice("schedule", schedule, SCHEDULES)
    stages = check_positive("stages", stages, integer=True)
    stage = check_positive("stage", stage, integer=True, zero=True, maximum=stages - 1)
    micro_batches = check_positive("micro_batches", micro_batches, integer=True, maximum=10**7)
    chunks = check_positive("chunks", chunks, integer=True, maximum=10**6)
    last, m = stages - 1, micro_batches
    if schedule == "interleaved":
        order = [
            (first + k, c)
            for first in range(0, m, stages)
            for c in range(chunks)
            for k in range(stages)
        ]
        warm = 2 * (last - stage) + (chunks - 1) * stages if m > stages else m * chunks
    else:
        order = [(k, c) for c in range(chunks) for k in range(m)]
        warm = last - stage if schedule in ("1f1b", "zero_bubble") else m * chunks
    forward = [Step("forward", *own) for own in order]
    backward = [Step("backward", k, chunks - 1 - c) for k, c in order]
    steps, warm = forward[: min(warm, len(forward))], min(warm, len(forward))
    for number, own in enumerate(backward):
        steps += [*forward[warm + number : warm + number + 1], own]
        if schedule == "zero_bubble" and number >= stage:
            steps.append(Step("weights", number - stage, 0))
    put_off = range(max(m - stage, 0), m) if schedule == "zero_bubble" else ()
    return steps + [Step("weights", number, 0) for number in put_off]


@closed_form()
def exposed_time(communication: Values, *, compute: Values, pieces: Values = 1) -> Values:
    """Exposed communication: what no computation hides, if both go on in equal pieces.

    Parameters
    ----------
    communication : float or array
        Time of all pieces [s].
    compute : float or array
        Time of the computation that may hide them [s].
    pieces : float or array, optional
        Number of pieces; the first or the last one is always exposed [-].

    Returns
    -------
    exposed : same kind as `communication`
        n / k + (1 - 1 / k) max(0, n - compute) [s]: two stages through which k pieces go one after
        another.

    Examples
    --------
    Gradients of 24 layers are reduced in 12 ms, beside 30 ms of backward pass:

    >>> round(float(exposed_time(0.012, compute=0.03, pieces=24)), 6)
    0.0005
    """
    return communication / pieces + (1.0 - 1.0 / pieces) * np.maximum(communication - compute, 0.0)


@closed_form()
def compressed_time(
    gradient: Values,
    *,
    compute: Values,
    start: float,
    encode: float,
    ratio: float,
    alpha: float,
    beta: float,
    groups: Values = 0,
) -> Values:
    """Time of a backward pass whose gradients are compressed in groups and sent during the pass.

    Parameters
    ----------
    gradient : float or array
        Bytes of all gradients [B].
    compute : float or array
        Time of the backward pass alone [s].
    start, encode : float
        Time to compress and restore an empty group [s], and each byte [s/B].
    ratio : float
        Bytes that are sent, relative to the bytes of the gradients [-].
    alpha, beta : float
        Start-up of the collective [s], and its time per byte [s/B].
    groups : int or array, optional
        Equal groups; by default the number, up to 1,024, that takes the shortest time [-].

    Returns
    -------
    time : same kind as `gradient`
        max(T + g h + c n + (alpha + beta r n / g), (T + c n) / g + h + g alpha + beta r n), for g
        groups: all kernels and the last message, or the first group and all messages, whichever is
        longer [s].

    References
    ----------
    .. [1] Z. Wang et al., "MergeComp: a compression scheduler for scalable communication-efficient
       distributed training", arXiv:2103.15195, section 4
    .. [2] S. Agarwal et al., "On the utility of gradient compression in distributed training
       systems", MLSys 2022, arXiv:2103.00543, section 4

    Examples
    --------
    1.3 GB at 10 GB/s, which compression makes a quarter: in one piece, in 400, and in the best
    groups.

    >>> costs = {"compute": 0.1, "start": 2e-4, "encode": 1e-11, "ratio": 0.25, "alpha": 5e-5, "beta": 1e-10}
    >>> [round(float(compressed_time(1.3e9, **costs, groups=g)), 3) for g in (1, 400, 0)]
    [0.146, 0.193, 0.118]
    """
    many = (
        np.arange(1.0, 1025.0)
        if np.all(np.equal(groups, 0))
        else np.asarray(groups)[..., np.newaxis]
    )
    n, work = (np.asarray(own, dtype=float)[..., np.newaxis] for own in (gradient, compute))
    kernels, sent = work + many * start + encode * n, beta * ratio * n
    first = (work + encode * n) / many + start + many * alpha + sent
    return np.maximum(kernels + alpha + sent / many, first).min(axis=-1)


@closed_form()
def model_state_bytes(
    parameters: Values,
    *,
    ranks: Values = 1,
    zero: Values = 0,
    weight: Values = 2.0,
    gradient: Values = 2.0,
    states: Values = 12.0,
) -> Values:
    """Memory of weights, gradients and optimizer states.

    Parameters
    ----------
    parameters : float or array
        Trained parameters of the rank, before they are shared [-].
    ranks : int or array, optional
        Ranks that share them [-].
    zero : int or array, optional
        Stage: nothing is shared (0), states (1), gradients too (2), weights too (3) [-].
    weight, gradient, states : float or array, optional
        Bytes of a weight, its gradient, and its states; Adam keeps an fp32 copy and two moments
        [B].

    Returns
    -------
    nbytes : same kind as `parameters`
        Bytes [B].

    References
    ----------
    .. [1] S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
       models", SC 2020, arXiv:1910.02054, figure 1

    Examples
    --------
    Figure 1: 7.5 billion parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB.

    >>> [round(float(model_state_bytes(7.5e9, ranks=64, zero=stage)) / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    parts = [
        own / np.where(zero >= stage, ranks, 1)
        for own, stage in ((weight, 3), (gradient, 2), (states, 1))
    ]
    return parameters * sum(parts)


@closed_form()
def activation_bytes(
    batch: Values,
    sequence: Values,
    hidden: Values,
    *,
    heads: Values,
    kv_share: Values = 1.0,
    width: Values = 0,
    inner: Values = 0,
    gated: bool = False,
    fused: bool = False,
    dropout: bool = True,
    tensor: Values = 1,
    sharing: Values = 1,
    recompute: str = "none",
    itemsize: float = 2.0,
) -> Values:
    """Memory of the activations that a layer keeps for its backward pass.

    Parameters
    ----------
    batch, sequence, hidden : int or array
        Sequences of a micro-batch, tokens of one, and width [-].
    heads : int or array
        Attention heads [-].
    kv_share : float or array, optional
        Heads of keys and values for each head of queries [-].
    width : int or array, optional
        Width of all heads of queries; by default that of the layer [-].
    inner : int or array, optional
        Width between the two products of the feed-forward part; by default four times the width of
        the layer [-].
    gated : bool, optional
        Whether a product gates another one [-].
    fused : bool, optional
        Whether scores of attention never reach memory [-].
    dropout : bool, optional
        Whether a mask of a byte for each number is kept, twice a layer and of the scores [-].
    tensor : int or array, optional
        Ranks that share the products of a layer [-].
    sharing : int or array, optional
        Ranks that share the rest of a layer: as many as `tensor` with sequence parallelism, else 1
        [-].
    recompute : str, optional
        One of `RECOMPUTED` [-].
    itemsize : float, optional
        Bytes of one number [B].

    Returns
    -------
    nbytes : same kind as `batch`
        Bytes of one layer on one rank [B].

    Notes
    -----
    With dropout, an inner width of 4 h and scores in memory, this is table 2 of [1]_: s b h (34 + 5
    a s / h). If t ranks share products it is s b h (10 + 24 / t + 5 a s / (h t)); with sequence
    parallelism all of it is divided by t. The term 5 a s / h is absent if scores are computed
    again; if all is computed again, 2 s b h remain.

    References
    ----------
    .. [1] V. Korthikanti et al., "Reducing activation recomputation in large Transformer models",
       MLSys 2023, arXiv:2205.05198, table 2

    Examples
    --------
    >>> activation_bytes(1, 2048, 12288, heads=96) / (2048 * 12288)  # 34 + 5 * 96 * 2048 / 12288
    114.0
    """
    tokens, wide, mask = 1.0 * batch * sequence, 1.0 * (inner or 4 * hidden), 1.0 * dropout
    if check_choice("recompute", recompute, RECOMPUTED) == "full":
        return itemsize * tokens * hidden / sharing
    rest = tokens * hidden * (4 * itemsize + 2 * mask) / sharing
    shared = (
        itemsize
        * tokens
        * ((width or hidden) * (2 + 2 * kv_share) + wide * (3 if gated else 2))
        / tensor
    )
    scores = (
        0.0
        if fused or recompute == "selective"
        else heads * sequence * tokens * (itemsize * (1 + mask) + mask)
    )
    return rest + shared + scores / tensor
