"""How ranks share a Transformer: the bubble of a pipeline, exposed communication, and the memory of
a rank."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Values, check_choice, check_positive, show
from perfkit.models.checkpoints import find_checkpoint
from perfkit.models.v_schedules import V_ORDERS, Step


@dataclass(frozen=True)
class Schedule:
    """Order in which each stage of a pipeline runs the passes of its micro-batches.

    All that is known of a schedule is its record in `SCHEDULES`; the order of passes
    (`list_steps`), the memory (`held_batches`), the event loop and the closed forms of strategies
    read its fields. Fields may be arrays, with one value for each of many strategies, see
    `find_schedules`.

    Parameters
    ----------
    name : str
        Its name in `SCHEDULES` and strategies.
    has_chunks : bool
        Whether a stage may hold several chunks of layers, so that a micro-batch passes all stages
        once for each chunk.
    all_forward_first : bool
        Whether all forward passes of a stage come before its first backward pass.
    passes_ahead : int
        Of other schedules: forward passes that a stage runs ahead for each stage behind it; then
        come a forward and a backward pass in turn. The forward pass before the first backward pass
        is the first one in turn, and does not count: stage s of p runs `passes_ahead` (p - 1 - s) +
        1 forward passes before its first backward pass, and where it has chunks, p more for each
        chunk but one. 0 with `all_forward_first` [-].
    takes_ahead : bool
        Whether a stage takes each message beside the pass before, and waits for none that it sends:
        the message of a pass may start when the pass before the one before has ended, so that
        messages of both ways run beside passes and beside each other. Stages that have several
        chunks always do.
    puts_off_weights : bool
        Whether gradients of weights are put off: on stage s behind the backward pass of s
        micro-batches later, unless stages are in a V.
    is_v_shaped : bool
        Whether a stage holds two chunks in a V, and runs its passes in the order of
        `perfkit.models.v_schedules.V_ORDERS`: stage s of p has chunk s of the way through the model,
        and chunk 2 p - 1 - s.
    least_batches : int
        Micro-batches for each stage that the order of passes needs at least; 0 for any number [-].

    Examples
    --------
    >>> one = SCHEDULES["1f1b"]
    >>> bool(one.alternates), one.takes_messages_ahead(chunks=1)
    (True, False)
    """

    name: Any
    has_chunks: Any = False
    all_forward_first: Any = False
    passes_ahead: Any = 0
    takes_ahead: Any = False
    puts_off_weights: Any = False
    is_v_shaped: Any = False
    least_batches: Any = 0

    @property
    def alternates(self) -> Any:
        """Whether stages of one chunk do a forward and a backward pass in turn: 1F1B and H1."""
        return np.logical_not(self.has_chunks) & np.logical_not(self.all_forward_first)

    @property
    def runs_phase_by_phase(self) -> Any:
        """Whether stages of one chunk do all forward passes, then all backward passes: GPipe."""
        return np.logical_not(self.has_chunks) & self.all_forward_first

    @property
    def interleaves(self) -> Any:
        """Whether groups of one micro-batch for each stage pass one chunk after another, so that
        forward and backward passes take turns: interleaved 1F1B."""
        in_groups = np.logical_not(self.all_forward_first) & np.logical_not(self.is_v_shaped)
        return self.has_chunks & in_groups

    @property
    def runs_breadth_first(self) -> Any:
        """Whether all micro-batches pass one chunk after another, forward first: breadth-first."""
        return self.has_chunks & np.asarray(self.all_forward_first)

    def takes_messages_ahead(self, chunks: int) -> bool:
        """Whether a stage of some chunks takes each message beside the pass before.

        Parameters
        ----------
        chunks : int
            Chunks of layers of each stage [-].

        Returns
        -------
        ahead : bool
            If not, a stage takes a message when its last pass has ended, and before its next pass
            waits for what it has sent, too.
        """
        return bool(self.takes_ahead or chunks > 1)


#: Schedules of micro-batches over stages, by their names.
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            # Huang et al. 2019, arXiv:1811.06965
            Schedule("gpipe", all_forward_first=True, takes_ahead=True),
            # Narayanan et al. 2021, arXiv:2104.04473, section 2.2
            Schedule("1f1b", passes_ahead=1),
            Schedule("interleaved", has_chunks=True, passes_ahead=2, takes_ahead=True),
            # Lamy-Poirier 2023, arXiv:2211.05953
            Schedule("breadth_first", has_chunks=True, all_forward_first=True, takes_ahead=True),
            # H1 of Qi et al. 2024, arXiv:2401.10241
            Schedule("zero_bubble", passes_ahead=1, puts_off_weights=True),
            # the same, section 6
            Schedule(
                "zb_v", has_chunks=True, takes_ahead=True, puts_off_weights=True, is_v_shaped=True
            ),
            # DeepSeek-AI 2024, arXiv:2412.19437, cut in half
            Schedule(
                "dualpipe_v",
                has_chunks=True,
                takes_ahead=True,
                puts_off_weights=True,
                is_v_shaped=True,
                least_batches=2,
            ),
        )
    }
)
#: Schedules that are known and not modelled, and what to do instead.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "dualpipe": "it holds two copies of the weights, whose halves do the same; take 'dualpipe_v', "
        "one of these halves, with half of pp and twice dp, which holds as many weights on each rank",
        "v_half": "no time of it was found that could check it; take 'zb_v', which holds twice as much",
        "v_min": "no time of it was found that could check it; take 'zb_v', which holds three times as "
        "much",
    }
)
#: Schedules whose stages hold two chunks in a V.
V_SHAPED = tuple(name for name, schedule in SCHEDULES.items() if schedule.is_v_shaped)
#: Schedules whose stages may hold several chunks of layers.
CHUNKED = tuple(name for name, schedule in SCHEDULES.items() if schedule.has_chunks)
#: Schedules that pass all micro-batches through one chunk after another.
BREADTH_FIRST = tuple(name for name, schedule in SCHEDULES.items() if schedule.runs_breadth_first)


def check_schedule(name: Any) -> str:
    """Check the name of a schedule.

    Parameters
    ----------
    name : str
        Name in `SCHEDULES`.

    Returns
    -------
    name : str
        The same.

    Raises
    ------
    ValueError
        For an unknown name, and for a schedule that is known and not modelled.

    Examples
    --------
    >>> check_schedule("zb_v")
    'zb_v'
    """
    if isinstance(name, str) and name in REFUSED:
        raise ValueError(f"schedule {name!r} is not modelled: {REFUSED[name]}")
    return str(check_choice("schedule", name, SCHEDULES))


def find_schedules(names: Any) -> Schedule:
    """Find the record of a schedule, or of many.

    Parameters
    ----------
    names : str or array of str
        Names in `SCHEDULES`.

    Returns
    -------
    schedule : Schedule
        For an array of names each field is an array.

    Raises
    ------
    ValueError
        For an unknown name.

    Examples
    --------
    >>> find_schedules(np.array(["gpipe", "1f1b"])).all_forward_first
    array([ True, False])
    """
    if isinstance(names, str):
        return SCHEDULES[check_schedule(names)]
    array = np.asarray(names)
    is_text = array.dtype.kind == "U"
    if not is_text and not all(isinstance(name, str) for name in array.ravel().tolist()):
        raise ValueError(f"schedule is {show(names)}; it must be a name, or an array of names")
    numbers = np.full(array.shape, -1)
    for number, name in enumerate(SCHEDULES):
        numbers[array == name] = number
    for name in np.unique(array[numbers < 0]).tolist():
        check_schedule(name)
    values = {}
    for field in fields(Schedule):
        of_all = np.array([getattr(schedule, field.name) for schedule in SCHEDULES.values()])
        values[field.name] = of_all[numbers]
    return Schedule(**values)


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
    micro_batches: Values,
    *,
    stages: Values,
    schedule: Values,
    chunks: Values = 1,
    stage: Values = 0,
) -> Values:
    """Micro-batches whose activations a stage keeps at once.

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
    stage : int or array, optional
        Number of the stage, from 0; by default the first one, which keeps most [-].

    Returns
    -------
    held : same kind as `micro_batches`
        Micro-batches, counted in all layers of the stage [-].

    Notes
    -----
    Of stages in a V it is counted step by step, see `count_held_in_v`, and 0 where they cannot run: not
    of whole micro-batches, or of fewer than `Schedule.least_batches` for each stage. Of others it is
    all m where all forward passes come first. Else stage s has done a (p - 1 - s) + (v - 1) p + 1
    passes through chunks before its first backward pass, for `Schedule.passes_ahead` a. So the
    first one keeps at most p + (a - 1) (p - 1) / v: p of 1F1B and of H1, whose peak is the same; p
    (1 + (p - 1) / (p v)) where chunks are interleaved [1]_. What H1 keeps of micro-batches whose
    weight gradients are put off is not counted.

    References
    ----------
    .. [1] V. Korthikanti et al., "Reducing activation recomputation in large Transformer models",
       MLSys 2023, arXiv:2205.05198, section 4.2.3
    .. [2] P. Qi et al., "Zero bubble pipeline parallelism", arXiv:2401.10241, section 6
    .. [3] DeepSeek-AI, "DeepSeek-V3 technical report", arXiv:2412.19437, table 2

    Examples
    --------
    >>> float(held_batches(64, stages=8, schedule="1f1b")), float(held_batches(64, stages=8, schedule="gpipe"))
    (8.0, 64.0)
    """
    record = find_schedules(schedule)
    # schedules without chunks have one
    chunks = np.where(record.has_chunks, chunks, 1)
    ahead = record.passes_ahead * (stages - 1.0 - stage)
    most = (ahead + (chunks - 1.0) * stages + 1.0) / chunks
    held = np.where(record.all_forward_first, micro_batches, np.minimum(micro_batches, most))
    if np.any(record.is_v_shaped):
        in_v = _count_all_in_v(record, micro_batches, stages, stage)
        held = np.where(record.is_v_shaped, in_v, held)
    return held


class HeldInV(NamedTuple):
    """What a stage in a V keeps when it keeps most.

    Parameters
    ----------
    held, put_off : float
        Micro-batches whose backward pass is to come, and those that only have gradients of weights
        to come, counted in all layers of the stage [-].
    """

    held: float
    put_off: float


@lru_cache(maxsize=1024)
def count_held_in_v(schedule: str, stage: int, stages: int, micro_batches: int) -> HeldInV:
    """Count what a stage in a V keeps, step by step.

    Parameters
    ----------
    schedule : str
        One of `V_SHAPED`.
    stage, stages : int
        Number of the stage, from 0, and how many there are [-].
    micro_batches : int
        Micro-batches of an iteration [-].

    Returns
    -------
    held : HeldInV
        When most gradients of weights are to come, and of several such moments when most backward
        passes are.
    """
    held = put_off = 0
    most = (0, 0)
    for step in V_ORDERS[schedule](stage, stages, micro_batches):
        if step.phase == "forward":
            held += 1
        elif step.phase == "weights":
            put_off -= 1
        else:
            held -= 1
            if not step.whole:
                put_off += 1
        most = max(most, (held + put_off, held))
    both, held = most
    return HeldInV(held / 2.0, (both - held) / 2.0)


def _count_all_in_v(
    record: Schedule, micro_batches: Values, stages: Values, stage: Values
) -> np.ndarray:
    """What each of many strategies keeps, see `HeldInV`; 0 of those whose stages are in no V, and that do
    not have whole micro-batches, at least as many as their schedule needs [-]."""
    names, is_v_shaped, least, batches, counts, numbers = np.broadcast_arrays(
        record.name, record.is_v_shaped, record.least_batches, micro_batches, stages, stage
    )
    can_be_run = is_v_shaped & (batches % 1 == 0) & (batches >= least * counts)
    # no more are kept of more micro-batches
    counted = np.minimum(batches, 4 * counts)
    held = np.zeros(can_be_run.shape)
    for place in np.ndindex(held.shape):
        if can_be_run[place]:
            one = count_held_in_v(
                str(names[place]), int(numbers[place]), int(counts[place]), int(counted[place])
            )
            held[place] = one.held
    return held


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
        First the forward passes that the stage runs ahead; then each backward pass, behind one more
        forward pass while there are any. A stage puts off as many weight gradients as stages come
        before it, if the schedule does so. Stages in a V have orders of their own.

    Raises
    ------
    ValueError
        For fewer micro-batches than the order of passes needs, see `Schedule.least_batches`.

    Examples
    --------
    >>> "".join(step.phase[0] for step in list_steps("1f1b", 1, stages=3, micro_batches=4))
    'ffbfbfbb'
    """
    record = find_schedules(schedule)
    stages = check_positive("stages", stages, integer=True)
    stage = check_positive("stage", stage, integer=True, zero=True, maximum=stages - 1)
    micro_batches = check_positive("micro_batches", micro_batches, integer=True, maximum=10**7)
    chunks = check_positive("chunks", chunks, integer=True, maximum=10**6)
    least = record.least_batches * stages
    if micro_batches < least:
        raise ValueError(
            f"micro_batches is {micro_batches} with schedule {schedule!r} of {stages} stages; it must be "
            f"{least} or more: take more of them, or another schedule"
        )
    if record.is_v_shaped:
        return V_ORDERS[schedule](stage, stages, micro_batches)
    order = _order_passes(record, stages, micro_batches, chunks)
    forward = [Step("forward", micro, chunk) for micro, chunk in order]
    backward = [Step("backward", micro, chunks - 1 - chunk) for micro, chunk in order]
    ahead = _count_passes_ahead(record, stage, stages, micro_batches, chunks)
    steps = forward[:ahead]
    for number, backward_pass in enumerate(backward):
        steps += forward[ahead + number : ahead + number + 1]
        steps.append(backward_pass)
        if record.puts_off_weights and number >= stage:
            steps.append(Step("weights", number - stage, 0))
    if record.puts_off_weights:
        first_left = max(micro_batches - stage, 0)
        steps += [Step("weights", micro, 0) for micro in range(first_left, micro_batches)]
    return steps


def _order_passes(
    record: Schedule, stages: int, micro_batches: int, chunks: int
) -> list[tuple[int, int]]:
    """Micro-batch and chunk of the forward passes of a stage, in their order."""
    if not record.interleaves:
        return [(micro, chunk) for chunk in range(chunks) for micro in range(micro_batches)]
    order = []
    for first in range(0, micro_batches, stages):
        for chunk in range(chunks):
            order += [(micro, chunk) for micro in range(first, first + stages)]
    return order


def _count_passes_ahead(
    record: Schedule, stage: int, stages: int, micro_batches: int, chunks: int
) -> int:
    """Forward passes of a stage before the first one that a backward pass follows; all of them, if
    there are no more [-]."""
    of_all = micro_batches * chunks
    # Megatron-LM lets a single group of interleaved micro-batches take no turns
    is_single_group = record.interleaves and micro_batches <= stages
    if record.all_forward_first or is_single_group:
        return of_all
    ahead = record.passes_ahead * (stages - 1 - stage)
    if record.interleaves:
        ahead += (chunks - 1) * stages
    return min(ahead, of_all)


@closed_form()
def exposed_time(communication: Values, *, compute: Values, pieces: Values = 1) -> Values:
    """Exposed communication: what no computation hides, if both go on in equal pieces and neither
    slows the other down.

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
def time_beside(communication: Values, *, compute: Values, contention: Values = 0.0) -> Values:
    """What a message adds to the time of kernels that run beside it.

    Parameters
    ----------
    communication : float or array
        Time of the message [s].
    compute : float or array
        Time of the kernels alone [s].
    contention : float or array, optional
        Share of their rate that kernels lose while the message is in flight [-].

    Returns
    -------
    added : same kind as `communication`
        max(n - compute, contention n) [s]: kernels outlast the message, which slows them, or the
        message outlasts them.

    Examples
    --------
    A message of 2 ms slows kernels of 10 ms by half while it is in flight:

    >>> float(time_beside(2.0, compute=10.0, contention=0.5))
    1.0
    >>> float(time_beside(12.0, compute=10.0, contention=0.1))
    2.0
    """
    return np.maximum(communication - compute, contention * communication)


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
        What is computed again, see `perfkit.models.checkpoints.find_checkpoint`; without experts,
        and not ``per_op`` [-].
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
    again; if all is computed again, 2 s b h remain. Norms that are computed again keep 4 s b h less,
    the activation between the products 2 s b times the inner width, and the whole MLP between its
    first input and its last output all of that width.

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
    checkpoint = find_checkpoint(recompute)
    if checkpoint.keeps_input_alone:
        return itemsize * tokens * hidden / sharing
    if checkpoint.saves_products or "experts" in checkpoint.parts:
        raise ValueError(
            f"recompute is {show(recompute)}, which this form does not know; take none, selective, "
            "full, norms, activation or mlp"
        )
    # inputs of both norms, and what they hand on
    kept_by_norms = 2.0 if "norms" in checkpoint.parts else 4.0
    rest = tokens * hidden * (kept_by_norms * itemsize + 2 * mask) / sharing
    # between the products of the MLP: the input of the activation, and what it hands on
    inner_tensors = 3.0 if gated else 2.0
    if "activation" in checkpoint.parts:
        inner_tensors -= 1.0
    if "mlp" in checkpoint.parts:
        inner_tensors = 0.0
    attention_width = (width or hidden) * (2 + 2 * kv_share)
    shared = itemsize * tokens * (attention_width + wide * inner_tensors) / tensor
    scores = heads * sequence * tokens * (itemsize * (1 + mask) + mask)
    if fused or "attention" in checkpoint.parts:
        scores = 0.0
    return rest + shared + scores / tensor
