"""Iterations of many pipelines at once, pass by pass: those with the same schedule, stages,
micro-batches and chunks, which differ in their times alone."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.partitions import Schedule, find_schedules
from perfkit.prediction.passes import (
    ChunkTimes,
    PipelineShape,
    PipelineTimes,
    run_iteration,
)

#: Phases of passes.
_FORWARD, _BACKWARD = "forward", "backward"


class _Part(NamedTuple):
    """Passes of one phase that wait for none of one another, each on another stage.

    Parameters
    ----------
    stages, chunks, micro : array of int, shape (passes,)
        Stage, chunk of the stage and micro-batch of each [-].
    receiving : array of int
        Positions of the passes that wait for a message [-].
    senders, borders : array of int, shape (receiving,)
        Stage that sends each message, and the border that it crosses, by the stage before it; the
        last border is that from the last stage to the first one [-].
    returning : array of int
        Positions, among those that receive, of messages over the last border, which were sent several
        passes before [-].
    keeping : array of int
        Positions of the passes whose ends such messages need later [-].
    first, last : array of int
        Positions of the passes of the first and of the last micro-batch [-].
    """

    stages: np.ndarray
    chunks: np.ndarray
    micro: np.ndarray
    receiving: np.ndarray
    senders: np.ndarray
    borders: np.ndarray
    returning: np.ndarray
    keeping: np.ndarray
    first: np.ndarray
    last: np.ndarray


class _Slot(NamedTuple):
    """Forward and backward passes of stages that wait for none of one another; None if there are
    none."""

    forward: _Part | None
    backward: _Part | None


class _Slots(NamedTuple):
    """All passes of an iteration, in an order in which they can be run.

    Parameters
    ----------
    slots : tuple of _Slot
        Passes.
    from_one_to_next : int
        Slots from one micro-batch to the next one [-].
    """

    slots: tuple[_Slot, ...]
    from_one_to_next: int


def _runs_all_forward_first(schedule: Schedule, shape: PipelineShape) -> bool:
    """Whether all forward passes come first, as also in a single group of interleaved
    micro-batches."""
    is_single_group = schedule.interleaves and shape.micro_batches <= shape.stages
    return bool(schedule.all_forward_first or is_single_group)


def can_run_at_once(shape: PipelineShape) -> bool:
    """Say whether the passes of a shape have slots.

    Parameters
    ----------
    shape : PipelineShape
        Passes of a pipeline.

    Returns
    -------
    can : bool
        Else each pipeline is run for itself, see `perfkit.prediction.passes`. Stages that alternate
        have slots if they run one pass ahead for each stage behind, or two with messages ahead; in a V
        they have none.
    """
    schedule = find_schedules(shape.schedule)
    if schedule.is_v_shaped:
        return False
    if _runs_all_forward_first(schedule, shape):
        return schedule.takes_messages_ahead(shape.chunks)
    if schedule.takes_messages_ahead(shape.chunks):
        return schedule.passes_ahead in (1, 2)
    return bool(schedule.passes_ahead == 1)


def _list_slots_of_passes(shape: PipelineShape) -> list[np.ndarray]:
    """Slots of all forward and of all backward passes, by stage and then in the order of the passes
    of a stage [-].

    Notes
    -----
    Stage s runs its forward pass number f in slot a s + 2 f, and its backward pass number b in slot
    2 b + 1 + a (2 (p - 1) - s) + 2 (v - 1) p, for `Schedule.passes_ahead` a: it runs as many forward
    passes before its first backward pass as the schedule says, each pass comes behind those that it
    waits for, and stages behind are a slots later. Where all forward passes come first, a pass
    comes one slot behind the same of the stage before, and a chunk when the first micro-batch has
    returned.
    """
    schedule = find_schedules(shape.schedule)
    stages = np.arange(shape.stages)[:, np.newaxis]
    number = np.arange(shape.micro_batches * shape.chunks)
    last = shape.stages - 1
    if _runs_all_forward_first(schedule, shape):
        between = max(shape.micro_batches, shape.stages)
        in_turn = number // shape.micro_batches * between + number % shape.micro_batches
        behind = shape.chunks * between + shape.stages
        return [in_turn + stages, behind + in_turn + last - stages]
    ahead = int(schedule.passes_ahead)
    first = 1 + 2 * ahead * last + 2 * (shape.chunks - 1) * shape.stages
    return [2 * number + ahead * stages, first + 2 * number - ahead * stages]


def _name_passes(shape: PipelineShape) -> tuple[np.ndarray, np.ndarray]:
    """Micro-batch and chunk of the passes of a stage in their order; a backward pass has the chunk
    that comes as many from the last one [-]."""
    number = np.arange(shape.micro_batches * shape.chunks)
    schedule = find_schedules(shape.schedule)
    if not schedule.interleaves:
        return number % shape.micro_batches, number // shape.micro_batches
    in_group = number % (shape.stages * shape.chunks)
    group = number // (shape.stages * shape.chunks)
    return group * shape.stages + in_group % shape.stages, in_group // shape.stages


@lru_cache(maxsize=512)
def _list_slots(shape: PipelineShape) -> _Slots:
    """All passes of an iteration by their slots."""
    forward_slots, backward_slots = _list_slots_of_passes(shape)
    count = int(max(forward_slots.max(), backward_slots.max())) + 1
    forward = _make_parts(shape, _order_passes(shape, _FORWARD, forward_slots, count))
    backward = _make_parts(shape, _order_passes(shape, _BACKWARD, backward_slots, count))
    joined = tuple(_Slot(*parts) for parts in zip(forward, backward, strict=True))
    schedule = find_schedules(shape.schedule)
    from_one_to_next = 1 if _runs_all_forward_first(schedule, shape) else 2
    return _Slots(joined, from_one_to_next)


class _OrderedPasses(NamedTuple):
    """All passes of a phase in the order of their slots.

    Parameters
    ----------
    phase : str
        ``forward`` or ``backward``.
    stages, chunks, micro : array of int, shape (passes,)
        Stage, chunk of the stage and micro-batch of each [-].
    bounds : array of int, shape (slots + 1,)
        Where the passes of each slot begin, and behind the last slot, where they end [-].
    """

    phase: str
    stages: np.ndarray
    chunks: np.ndarray
    micro: np.ndarray
    bounds: np.ndarray


def _order_passes(
    shape: PipelineShape, phase: str, slots: np.ndarray, count: int
) -> _OrderedPasses:
    """Order the passes of a phase, whose slots are some of `count`."""
    order = np.argsort(slots, axis=None, kind="stable")
    stages, numbers = np.unravel_index(order, slots.shape)
    micro_of, chunk_of = _name_passes(shape)
    chunks = chunk_of[numbers]
    if phase == _BACKWARD:
        chunks = shape.chunks - 1 - chunks
    bounds = np.searchsorted(slots.ravel()[order], np.arange(count + 1))
    return _OrderedPasses(phase, stages, chunks, micro_of[numbers], bounds)


class _PassMessages(NamedTuple):
    """What all passes of a phase receive and send, in the order of their slots.

    Parameters
    ----------
    receives, returns, keeps : array of bool, shape (passes,)
        Whether each waits for a message, for one over the last border, and whether such a message
        needs its end later [-].
    senders, borders : array of int, shape (passes,)
        Stage that sends the message of each, and the border that it crosses, see `_Part` [-].
    """

    receives: np.ndarray
    returns: np.ndarray
    keeps: np.ndarray
    senders: np.ndarray
    borders: np.ndarray


def _find_messages(shape: PipelineShape, passes: _OrderedPasses) -> _PassMessages:
    """Find what passes receive and send."""
    stages, chunks = passes.stages, passes.chunks
    if passes.phase == _FORWARD:
        first_stage, last_stage = 0, shape.stages - 1
        first_chunk, last_chunk = 0, shape.chunks - 1
        senders = (stages - 1) % shape.stages
        borders = senders
    else:
        first_stage, last_stage = shape.stages - 1, 0
        first_chunk, last_chunk = shape.chunks - 1, 0
        senders = (stages + 1) % shape.stages
        borders = stages
    begins_chunk = stages == first_stage
    receives = ~begins_chunk | (chunks != first_chunk)
    return _PassMessages(
        receives=receives,
        returns=receives & begins_chunk,
        keeps=(stages == last_stage) & (chunks != last_chunk),
        senders=senders,
        borders=borders,
    )


def _make_parts(shape: PipelineShape, passes: _OrderedPasses) -> list[_Part | None]:
    """Passes of a phase by slot; None where a slot has none of them."""
    bounds = passes.bounds
    messages = _find_messages(shape, passes)
    received = _Chosen(messages.receives, bounds)
    returning = _Chosen(messages.returns[messages.receives], received.bounds)
    keeping = _Chosen(messages.keeps, bounds)
    first = _Chosen(passes.micro == 0, bounds)
    last = _Chosen(passes.micro == shape.micro_batches - 1, bounds)
    senders = messages.senders[messages.receives]
    borders = messages.borders[messages.receives]
    parts: list[_Part | None] = []
    for slot in range(len(bounds) - 1):
        of_slot = slice(bounds[slot], bounds[slot + 1])
        if of_slot.start == of_slot.stop:
            parts.append(None)
            continue
        of_received = slice(received.bounds[slot], received.bounds[slot + 1])
        parts.append(
            _Part(
                stages=passes.stages[of_slot],
                chunks=passes.chunks[of_slot],
                micro=passes.micro[of_slot],
                receiving=received.list_in(slot),
                senders=senders[of_received],
                borders=borders[of_received],
                returning=returning.list_in(slot),
                keeping=keeping.list_in(slot),
                first=first.list_in(slot),
                last=last.list_in(slot),
            )
        )
    return parts


class _Chosen:
    """Some of the passes of all slots: their positions in the passes of their slot, and the bounds of
    slots among them [-]."""

    def __init__(self, chosen: np.ndarray, bounds: np.ndarray) -> None:
        positions = np.flatnonzero(chosen)
        self.bounds = np.searchsorted(positions, bounds)
        slots = np.searchsorted(bounds, positions, side="right") - 1
        self.positions = positions - bounds[slots]

    def list_in(self, slot: int) -> np.ndarray:
        """Positions in one slot."""
        return self.positions[self.bounds[slot] : self.bounds[slot + 1]]


class _Durations(NamedTuple):
    """Times of chunks, see `ChunkTimes`; arrays of chunks of a stage, stages and pipelines [s].

    `gather` is the first or the later gather, whichever the chunk has.
    """

    forward: Array
    backward: Array
    weights: Array
    reduction: Array
    gather: Array
    lead: Array
    gathered: Array
    regather: Array
    last_reduction: Array
    tail: Array
    queue: Array


def _stack_durations(chunks: Sequence[ChunkTimes], stages: int) -> _Durations:
    """Times of chunks as arrays."""
    count = len(chunks) // stages

    def stack(name: str) -> Array:
        rows = np.broadcast_arrays(*(np.asarray(getattr(chunk, name)) for chunk in chunks))
        return np.array(rows, dtype=float).reshape(count, stages, -1)

    gather = stack("later_gather")
    gather[0, 0] = chunks[0].first_gather
    others = {name: stack(name) for name in _Durations._fields if name != "gather"}
    return _Durations(gather=gather, **others)


def _stack_latencies(times: PipelineTimes, messages: Array) -> Array:
    """Latencies of borders, an array like that of their messages [s]."""
    if times.latencies is None:
        return np.zeros_like(messages)
    return np.array(times.latencies, dtype=float)


class _Phase:
    """Messages of one phase: when the last passes of stages have ended, when the last message has
    passed each border [s], and when passes have ended whose messages return to the first stage, by
    micro-batch."""

    def __init__(self, shape: PipelineShape, pipelines: int) -> None:
        self.ends = np.zeros((shape.stages, pipelines))
        self.passed = np.zeros((shape.stages, pipelines))
        self.returning = np.zeros((shape.micro_batches if shape.chunks > 1 else 0, pipelines))


class _Clock:
    """When stages of many pipelines have done what was run so far; arrays of stages and pipelines
    [s]."""

    def __init__(
        self, shape: PipelineShape, durations: _Durations, messages: Array, latencies: Array
    ) -> None:
        schedule = find_schedules(shape.schedule)
        self.shape = shape
        self.durations = durations
        self.messages = messages
        self.latencies = latencies
        self.ahead = schedule.takes_messages_ahead(shape.chunks)
        self.put_off = bool(schedule.puts_off_weights)
        #: Whether any chunk has these times.
        self.gathers = bool(durations.gather.any())
        self.regathers = bool(durations.regather.any())
        self.waits_for_weights = bool(durations.gathered.any())
        pipelines = messages.shape[1]
        self.phases = {name: _Phase(shape, pipelines) for name in (_FORWARD, _BACKWARD)}

        def start() -> Array:
            return np.zeros((shape.stages, pipelines))

        #: When a stage goes on, when it went on before its last pass, when its last pass and the
        #: messages that it waits for had ended, when what it has sent has arrived, when messages
        #: of gradients have landed, and when its first pass began.
        self.free = start()
        self.free_before = start()
        self.ready = start()
        self.sent = start()
        self.landed = start()
        self.begins = start()

    def copy(self) -> "_Clock":
        """The same clock, which goes on by itself."""
        other = _Clock(self.shape, self.durations, self.messages, self.latencies)
        for name in ("free", "free_before", "ready", "sent", "landed", "begins"):
            setattr(other, name, getattr(self, name).copy())
        for name, phase in self.phases.items():
            for field, times in vars(phase).items():
                setattr(other.phases[name], field, times.copy())
        return other

    def run(self, slots: Sequence[_Slot]) -> None:
        """Run the passes of some slots."""
        for slot in slots:
            forward = backward = None
            # what stages have sent arrives before their next passes
            if slot.forward is not None:
                forward = self.receive(slot.forward, _FORWARD)
            if slot.backward is not None:
                backward = self.receive(slot.backward, _BACKWARD)
            if slot.forward is not None:
                self.run_forward(slot.forward, forward)
            if slot.backward is not None:
                self.run_backward(slot.backward, backward)

    def receive(self, part: _Part, name: str) -> Array | None:
        """When the messages of passes arrive [s]; None if there are none."""
        if not len(part.receiving):
            return None
        phase = self.phases[name]
        sent = phase.ends[part.senders]
        if len(part.returning):
            micro = part.micro[part.receiving[part.returning]]
            sent[part.returning] = phase.returning[micro]
        sent += self.latencies[part.borders]
        stages = part.stages[part.receiving]
        taken = self.free_before[stages] if self.ahead else self.ready[stages]
        np.maximum(sent, taken, out=sent)
        np.maximum(sent, phase.passed[part.borders], out=sent)
        sent += self.messages[part.borders]
        phase.passed[part.borders] = sent
        if not self.ahead:
            self.sent[part.senders] = sent
        return sent

    def begin(self, part: _Part, received: Array | None) -> Array:
        """When passes begin [s]."""
        free = self.free[part.stages]
        self.free_before[part.stages] = free
        if received is not None and len(part.receiving) == len(part.stages):
            np.maximum(free, received, out=free)
        elif received is not None:
            free[part.receiving] = np.maximum(free[part.receiving], received)
        if not self.ahead:
            np.maximum(free, self.sent[part.stages], out=free)
        return free

    def end(self, part: _Part, name: str, ends: Array) -> None:
        """Note when passes have ended."""
        phase = self.phases[name]
        phase.ends[part.stages] = ends
        if len(part.keeping):
            phase.returning[part.micro[part.keeping]] = ends[part.keeping]

    def run_forward(self, part: _Part, received: Array | None) -> None:
        """Run forward passes."""
        ends = self.begin(part, received)
        if self.waits_for_weights and len(part.first):
            chunks, stages = part.chunks[part.first], part.stages[part.first]
            gathered = np.where(
                chunks[:, np.newaxis] > 0, self.durations.gathered[chunks, stages], 0.0
            )
            ends[part.first] = np.maximum(ends[part.first], gathered)
        if len(part.first):
            starting = part.first[part.chunks[part.first] == 0]
            self.begins[part.stages[starting]] = ends[starting]
        ends += self.durations.forward[part.chunks, part.stages]
        if self.gathers and len(part.first):
            chunks, stages = part.chunks[part.first], part.stages[part.first]
            ends[part.first] += self.durations.gather[chunks, stages]
        self.end(part, _FORWARD, ends)
        self.free[part.stages] = ends
        self.ready[part.stages] = ends

    def run_backward(self, part: _Part, received: Array | None) -> None:
        """Run backward passes, with what comes behind them on their stages."""
        durations, stages = self.durations, part.stages
        ends = self.begin(part, received)
        ends += durations.backward[part.chunks, stages]
        if self.regathers and len(part.first):
            chunks_of_first = part.chunks[part.first]
            ends[part.first] += durations.regather[chunks_of_first, stages[part.first]]
        if len(part.last):
            chunks_of_last = part.chunks[part.last]
            ends[part.last] += durations.last_reduction[chunks_of_last, stages[part.last]]
        self.end(part, _BACKWARD, ends)
        if self.shape.scattered:
            self.wait_for_reductions(part, ends)
        else:
            self.free[stages] = ends
            self.ready[stages] = ends
            if len(part.last) and not self.put_off:
                self.land(part, ends)
        if self.put_off:
            complete = part.micro >= stages
            self.free[stages[complete]] += durations.weights[0, stages[complete]]

    def wait_for_reductions(self, part: _Part, ends: Array) -> None:
        """Go on when the gradients of a pass are reduced. Weight gradients that were put off hide
        the last reduction."""
        reduced = ends + self.durations.reduction[part.chunks, part.stages]
        if self.put_off and len(part.last):
            last = part.stages[part.last]
            self.landed[last] = reduced[part.last]
            reduced[part.last] = ends[part.last]
        self.free[part.stages] = reduced
        self.ready[part.stages] = reduced

    def land(self, part: _Part, ends: Array) -> None:
        """Note when the messages of gradients that are reduced once have landed."""
        stages, chunks = part.stages[part.last], part.chunks[part.last]
        tail = ends[part.last] + self.durations.tail[chunks, stages]
        queue = self.landed[stages] + self.durations.queue[chunks, stages]
        self.landed[stages] = np.maximum(tail, queue)

    def finish(self, micro_batches: int) -> Array:
        """Time of the iteration: the longest time of a stage from the begin of its first pass, or of
        what comes before it, to the end of its last activity [s]."""
        ends = self.free
        if self.put_off:
            left = np.minimum(np.arange(self.shape.stages), micro_batches)
            ends = ends + left[:, np.newaxis] * self.durations.weights[0]
        if self.put_off and not self.shape.scattered:
            self.landed = ends + self.durations.tail[0]
        times = np.maximum(ends, self.landed) - self.begins
        times[1:] += self.durations.lead[0, 1:]
        return np.asarray(times.max(axis=0))


def run_iterations(shape: PipelineShape, times: PipelineTimes, groups: np.ndarray) -> Array:
    """Run iterations of many pipelines.

    Parameters
    ----------
    shape : PipelineShape
        Their passes and the order of these, with as many micro-batches as are run.
    times : PipelineTimes
        How long each takes, with an array for each time: an element for each pipeline.
    groups : array of int, shape (pipelines,)
        Groups of micro-batches, one for each stage, that each pipeline has besides; they repeat the
        last group that is run. Above 0 only where `shorten` leaves groups out, so that a pipeline
        with one group less runs its passes in the same order [-].

    Returns
    -------
    times : array, shape (pipelines,)
        From the begin of an iteration to the next one, without the update [s].

    Examples
    --------
    Four even stages of 1 and 2 s, and of twice that, take (8 + 3) 3 s:

    >>> fast_and_slow = np.array([1.0, 2.0])
    >>> chunk = ChunkTimes(fast_and_slow, 2.0 * fast_and_slow, *[0.0] * 10)
    >>> times = PipelineTimes([chunk] * 4, 4, np.zeros((4, 2)))
    >>> run_iterations(PipelineShape("1f1b", 4, 8, 1, False), times, np.zeros(2)).tolist()
    [33.0, 66.0]
    """
    if not can_run_at_once(shape):
        return _run_one_by_one(shape, times, groups)
    all_slots = _list_slots(shape)
    messages = np.array(times.messages, dtype=float)
    latencies = _stack_latencies(times, messages)
    clock = _Clock(shape, _stack_durations(times.chunks, times.stages), messages, latencies)
    if not np.any(groups > 0):
        clock.run(all_slots.slots)
        return clock.finish(shape.micro_batches)
    fewer = shape.micro_batches - shape.stages
    shorter = _list_slots(shape._replace(micro_batches=fewer))
    # both begin with the same passes
    shared = all_slots.from_one_to_next * fewer
    clock.run(all_slots.slots[:shared])
    other = clock.copy()
    clock.run(all_slots.slots[shared:])
    other.run(shorter.slots[shared:])
    longer = clock.finish(shape.micro_batches)
    return np.asarray(longer + groups * (longer - other.finish(fewer)))


def _run_one_by_one(shape: PipelineShape, times: PipelineTimes, groups: np.ndarray) -> Array:
    """Iterations of pipelines, each for itself [s]."""
    iterations = np.zeros(len(groups))
    messages = np.array(times.messages, dtype=float)
    latencies = _stack_latencies(times, messages)
    for index, group in enumerate(groups):
        chunks = []
        for chunk in times.chunks:
            fields = [float(np.broadcast_to(time, len(groups))[index]) for time in chunk]
            chunks.append(ChunkTimes(*fields))
        micro_batches = shape.micro_batches + int(group) * shape.stages
        one = PipelineTimes(
            chunks,
            times.stages,
            messages[:, index].tolist(),
            latencies[:, index].tolist(),
            times.is_v_shaped,
        )
        iterations[index] = run_iteration(shape._replace(micro_batches=micro_batches), one)
    return iterations
