"""What replicas exchange beside the passes of the stages of a pipeline: time that gathers of weights
and reductions of gradients add."""

from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, Values
from perfkit.prediction.replicas import (
    Backlog,
    Contention,
    Passed,
    UnitMessages,
    UnitTimes,
    time_gathers_ahead,
    time_gathers_beside,
    time_reductions,
    time_regathering_backward,
)


class StageKind(NamedTuple):
    """Stages that are alike.

    Parameters
    ----------
    number, layers : array
        How many there are, and layers of each [-].
    has_embeddings, has_head : array of bool
        Whether they hold the embeddings, and the head.
    forward_host, backward_host : array
        By how much the host makes the forward and the backward pass of a micro-batch through all
        chunks longer [s].
    first_host, last_host : array
        The same of the first forward and the last backward pass of a chunk, with messages that are
        sent once [s].
    """

    number: Array
    layers: Array
    has_embeddings: np.ndarray
    has_head: np.ndarray
    forward_host: Array
    backward_host: Array
    first_host: Array
    last_host: Array


class StageKinds(NamedTuple):
    """Stages of a pipeline.

    Parameters
    ----------
    first, inner, last : StageKind
        The first stage, those between the ends, and the last one.
    """

    first: StageKind
    inner: StageKind
    last: StageKind


class Exchange(NamedTuple):
    """What stages and their replicas do in an iteration, for strategies that reduce gradients with
    the same rhythm.

    Parameters
    ----------
    kinds : StageKinds
        Its stages.
    micro, chunks, pp : array
        Micro-batches, chunks of a stage, and stages [-].
    zero : array
        What replicas share [-].
    overlap, put_off : array of bool
        Whether messages run beside kernels, and whether the schedule puts off weight gradients.
    phase_by_phase, breadth_first : array of bool
        Whether the schedule is of one of these shapes, see `perfkit.models.partitions.Schedule`.
    forward, backward : UnitTimes
        Kernels of each unit, with the messages inside of layers [s].
    delayed : array
        Weight gradients of a layer in its backward pass, which may be put off [s].
    gather_copies, reduce_copies : UnitTimes
        Copies before messages [s].
    gathers, reductions : UnitMessages
        Messages of weights and of gradients [s].
    forward_lead, lead : array
        What a layer waits for at the beginning of its forward and of its backward pass: tokens that
        go to experts [s].
    border : array
        Message between two stages [s].
    contention : Contention
        Share of the speed of a pass that messages beside it take.
    """

    kinds: StageKinds
    micro: Array
    chunks: Array
    pp: Array
    zero: Array
    overlap: np.ndarray
    put_off: np.ndarray
    phase_by_phase: np.ndarray
    breadth_first: np.ndarray
    forward: UnitTimes
    backward: UnitTimes
    delayed: Array
    gather_copies: UnitTimes
    reduce_copies: UnitTimes
    gathers: UnitMessages
    reductions: UnitMessages
    forward_lead: Array
    lead: Array
    border: Array
    contention: Contention


class Added(NamedTuple):
    """Time that messages of replicas add to the passes of a stage [s].

    To a forward pass, to a backward pass until its gradients go to the stage before, until all of
    its messages have landed, and to the pass of weight gradients that were put off.
    """

    forward: Array
    backward: Array
    landed: Array
    weights: Array


def slow_passes(kernels: Array, contention: Values) -> Contention:
    """What messages beside a pass take of its speed, if they take a share of the speed of its
    `kernels` alone, which are a share of the pass [-].

    Notes
    -----
    Beside a message a pass takes q / (1 - c) + 1 - q times as long, with q the share of its kernels
    and c the `contention`. A pass that lost the share c' of its speed would take 1 / (1 - c') times
    as long: c' = c q / (1 - c + c q). Two messages take 2 c, at most all.
    """
    shares = [np.minimum(count * contention, 1.0) for count in (1, 2)]
    single, two = (share * kernels / (1.0 - share + share * kernels) for share in shares)
    return Contention(np.asarray(single), np.asarray(two))


def _keep_units(times: UnitTimes, stage: StageKind) -> UnitTimes:
    """Times of the units that a stage holds; a chunk may hold an end alone."""
    return UnitTimes(
        np.where(stage.has_embeddings, times.embeddings, 0.0),
        np.where(stage.layers > 0, times.layer, 0.0),
        np.where(stage.has_head, times.head, 0.0),
    )


def _keep_messages(messages: UnitMessages, stage: StageKind) -> UnitMessages:
    """Messages of the units that a stage holds."""
    return messages._replace(
        embeddings=np.where(stage.has_embeddings, messages.embeddings, 0.0),
        layer=np.where(stage.layers > 0, messages.layer, 0.0),
        experts=np.where(stage.layers > 0, messages.experts, 0.0),
        head=np.where(stage.has_head, messages.head, 0.0),
    )


def _add_up(times: UnitTimes, layers: Array) -> Array:
    """Time of all units [s]."""
    return np.asarray(times.embeddings + layers * times.layer + times.head)


def _add_up_messages(messages: UnitMessages, layers: Array) -> Array:
    """Time of all messages, one after another [s]."""
    of_layer = messages.layer + messages.experts
    return np.asarray(messages.embeddings + layers * of_layer + messages.head)


def _find_chunk(stage: StageKind, exchange: Exchange, *, last: bool) -> StageKind:
    """The first chunk of a stage, or a later one; of the ends, each is in one chunk."""
    one = exchange.chunks <= 1
    longest = np.ceil(stage.layers / exchange.chunks)
    others = (stage.layers - longest) / np.maximum(exchange.chunks - 1.0, 1.0)
    return stage._replace(
        layers=longest if not last else np.where(one, longest, others),
        has_embeddings=stage.has_embeddings & (one | (not last)),
        has_head=stage.has_head & (one | last),
        forward_host=stage.forward_host / exchange.chunks,
        backward_host=stage.backward_host / exchange.chunks,
    )


def _gather_ahead(exchange: Exchange, chunk: StageKind, stage: StageKind) -> Array:
    """Time that gathers of all weights add to the first forward pass of a stage (ZeRO stage 1)
    [s]."""
    kernels = _keep_units(exchange.forward, chunk)
    copies = _keep_units(exchange.gather_copies, stage)
    messages = _keep_messages(exchange.gathers, stage)
    alone = _add_up(kernels, chunk.layers)
    hidden = time_gathers_ahead(
        kernels, copies, messages, chunk.layers, stage.layers, exchange.contention
    )
    exposed = alone + _add_up(copies, stage.layers) + _add_up_messages(messages, stage.layers)
    late = chunk.first_host - chunk.forward_host
    return np.asarray(np.where(exchange.overlap, hidden, exposed) - alone + late)


def _slow_later_passes(exchange: Exchange, chunk: StageKind, stage: StageKind) -> Array:
    """Time by which gathers of the weights of later chunks slow the passes behind the first one (ZeRO
    stage 1) [s]."""
    kernels = _add_up(_keep_units(exchange.forward, chunk), chunk.layers)
    messages = _keep_messages(exchange.gathers, stage)
    sent = messages.embeddings + stage.layers * messages.longest + messages.head
    first_pass = kernels + _gather_ahead(exchange, chunk, stage)
    left = np.maximum(sent - first_pass, 0.0)
    share = exchange.contention.single
    passes = (exchange.micro - 1.0) * kernels / np.maximum(1.0 - share, 1e-9)
    return np.asarray(np.where(exchange.chunks > 1, share * np.minimum(left, passes), 0.0))


def _gather_beside(exchange: Exchange, chunk: StageKind) -> Array:
    """Time that gathers of weights add to a forward pass (ZeRO stages 2 and 3) [s]."""
    kernels = _keep_units(exchange.forward, chunk)
    copies = _keep_units(exchange.gather_copies, chunk)
    messages = _keep_messages(exchange.gathers, chunk)
    alone = _add_up(kernels, chunk.layers)
    hidden = time_gathers_beside(
        kernels, copies, messages, chunk.layers, exchange.forward_lead, exchange.contention
    )
    exposed = alone + _add_up(copies, chunk.layers) + _add_up_messages(messages, chunk.layers)
    return np.asarray(np.where(exchange.overlap, hidden, exposed) - alone)


def _regather(exchange: Exchange, chunk: StageKind) -> Array:
    """Time that gathers of the weights of layers, without reductions, add to a backward pass (ZeRO
    stage 3) [s]."""
    layers_alone = chunk._replace(
        has_embeddings=np.zeros_like(chunk.has_embeddings),
        has_head=np.zeros_like(chunk.has_head),
    )
    kernels = _keep_units(exchange.backward, layers_alone)
    copies = _keep_units(exchange.gather_copies, layers_alone)
    messages = _keep_messages(exchange.gathers, layers_alone)
    hidden = time_gathers_beside(
        kernels, copies, messages, chunk.layers, exchange.lead, exchange.contention
    )
    # the head hides the first one
    first = copies.layer + messages.longest
    head = np.where(chunk.has_head, exchange.backward.head, 0.0)
    hidden = hidden - np.minimum(head, first)
    alone = _add_up(kernels, chunk.layers)
    exposed = alone + chunk.layers * (copies.layer + messages.layer + messages.experts)
    return np.asarray(np.where(exchange.overlap, hidden, exposed) - alone)


def _reduce(
    exchange: Exchange,
    chunk: StageKind,
    left: Backlog,
    host: Array,
    all_layers: Array | None = None,
) -> Passed:
    """Times that reductions of gradients add to a backward pass: until its kernels have ended, and
    until all gradients have landed, those of all layers of the stage where nothing hides them
    [s]."""
    kernels = _keep_units(exchange.backward, chunk)
    copies = _keep_units(exchange.reduce_copies, chunk)
    messages = _keep_messages(exchange.reductions, chunk)
    hidden = time_reductions(
        kernels,
        copies,
        messages,
        chunk.layers,
        exchange.lead,
        host,
        left,
        exchange.contention,
    )
    alone = _add_up(kernels, chunk.layers) + chunk.backward_host
    # without overlap all chunks are reduced at the end
    whole = chunk if all_layers is None else chunk._replace(layers=all_layers)
    exposed = _add_up(_keep_units(exchange.reduce_copies, whole), whole.layers)
    exposed = exposed + _add_up_messages(_keep_messages(exchange.reductions, whole), whole.layers)
    return Passed(
        np.where(exchange.overlap, hidden.kernels - alone, 0.0),
        np.where(exchange.overlap, hidden.landed - alone, exposed),
    )


def _reduce_put_off(exchange: Exchange, stage: StageKind) -> tuple[Passed, Array]:
    """Times that reductions add to a backward pass without weight gradients, and to the pass of
    these, after which all have landed [s].

    The gradients of the head and of the embeddings are complete in the first of both, those of
    layers in the second.
    """
    copies = _keep_units(exchange.reduce_copies, stage)
    messages = _keep_messages(exchange.reductions, stage)
    rest = exchange.backward.layer - exchange.delayed
    no_time = np.zeros(len(exchange.micro))
    nothing_left = _leave_nothing(exchange)
    only_head = UnitMessages(no_time, no_time, messages.head, no_time)
    head = np.where(stage.has_head, exchange.backward.head, 0.0)
    first = time_reductions(
        UnitTimes(no_time, rest, head),
        UnitTimes(no_time, no_time, copies.head),
        only_head,
        stage.layers,
        exchange.lead,
        stage.backward_host,
        nothing_left,
        exchange.contention,
    )
    alone = head + stage.layers * rest + stage.backward_host
    passed = Passed(first.kernels - alone, first.landed - alone)
    layers = time_reductions(
        UnitTimes(no_time, exchange.delayed, no_time),
        UnitTimes(no_time, copies.layer, copies.embeddings),
        UnitMessages(no_time, messages.layer, messages.embeddings, messages.experts),
        stage.layers,
        no_time,
        no_time,
        nothing_left,
        exchange.contention,
    )
    hidden = layers.landed - stage.layers * exchange.delayed
    exposed = _add_up(copies, stage.layers) + _add_up_messages(messages, stage.layers)
    passed = Passed(
        np.where(exchange.overlap, passed.kernels, 0.0),
        np.where(exchange.overlap, passed.landed, 0.0),
    )
    return passed, np.where(exchange.overlap, hidden, exposed)


def _change_chunks(exchange: Exchange, stage: StageKind) -> Array:
    """Time that reductions of gradients of a chunk before the last one add [s].

    Notes
    -----
    Until the last micro-batch returns to the next chunk, it passes all stages, each of which its
    messages make longer; or a stage works on the next chunk for the other micro-batches, which what
    is left of the messages slows down. The longer of both counts.
    """
    chunk = _find_chunk(stage, exchange, last=True)
    chunk = chunk._replace(has_head=np.zeros_like(stage.has_head))
    passed = _reduce(exchange, chunk, _leave_nothing(exchange), stage.last_host)
    one_pass = chunk.layers * exchange.backward.layer + chunk.backward_host
    others = np.where(exchange.breadth_first, np.maximum(exchange.micro - exchange.pp, 0.0), 0.0)
    slack = np.maximum(others * one_pass - exchange.pp * exchange.border, 0.0)
    on_other_stages = (exchange.pp - 1.0) * passed.kernels - slack
    left = np.where(exchange.overlap, passed.landed - passed.kernels, 0.0)
    next_passes = (
        np.where(exchange.breadth_first, exchange.micro, np.minimum(exchange.micro, exchange.pp))
        - 1.0
    )
    slowed = next_passes * one_pass / np.maximum(1.0 - exchange.contention.single, 1e-9)
    on_this_stage = exchange.contention.single * np.minimum(left, slowed)
    return np.asarray(passed.kernels + np.maximum(on_other_stages, on_this_stage))


def _find_backlog(exchange: Exchange, stage: StageKind, change: Array) -> Backlog:
    """What is left of the messages of earlier chunks when the last backward pass of the iteration
    begins, if messages make each `change` to the next chunk longer [s].

    A chunk follows on as many backward passes as there are micro-batches (breadth-first), or on
    those of a group of one for each stage (interleaved).
    """
    layers = stage.layers / exchange.chunks
    kernels = exchange.backward.layer + exchange.reduce_copies.layer
    passes = np.where(exchange.breadth_first, np.maximum(exchange.micro, exchange.pp), exchange.pp)
    one_pass = layers * exchange.backward.layer + stage.backward_host / exchange.chunks
    between = passes * one_pass + change
    several = exchange.overlap & (exchange.chunks > 1)

    def find_left(message: Array) -> Array:
        sent = layers * message
        after_pass = np.maximum(message, sent - (layers - 1.0) * kernels)
        before = np.maximum(exchange.chunks - 2.0, 0.0) * np.maximum(sent - between, 0.0)
        left = np.maximum(before + after_pass - (between - one_pass), 0.0)
        return np.asarray(np.where(several, left, 0.0))

    return Backlog(find_left(exchange.reductions.layer), find_left(exchange.reductions.experts))


def time_once(exchange: Exchange) -> Array:
    """Time that messages of replicas add to an iteration in which gradients are reduced once [s].

    Notes
    -----
    The iteration begins with what the first stage waits for its weights; other stages gather theirs
    while they wait for the first micro-batch. It ends when the gradients of the first stage have
    landed, whose last backward pass is the last of all. Before that come the last backward passes
    of the other stages, one after another, which copies and messages make longer; their messages
    land while the stages before them compute.

    Of several chunks, the last micro-batch passes each. Its passes through the chunks before the
    last one lie on the way of the iteration on one stage if the stage has other micro-batches to
    work on, else on all stages.
    """
    gathered = _gather_once(exchange)
    change, left = np.zeros(len(exchange.micro)), _leave_nothing(exchange)
    if np.any(exchange.chunks > 1):
        change = _change_chunks(exchange, exchange.kinds.first)
        left = _find_backlog(exchange, exchange.kinds.first, change)
    reduced = _reduce_once(exchange, left)
    return np.asarray(gathered + reduced + (exchange.chunks - 1.0) * change)


def _leave_nothing(exchange: Exchange) -> Backlog:
    """No messages of earlier passes."""
    no_time = np.zeros(len(exchange.micro))
    return Backlog(no_time, no_time)


def _gather_once(exchange: Exchange) -> Array:
    """Time that gathers of weights add to an iteration, see `time_once` [s]."""
    first, inner, last = exchange.kinds
    first_chunk, inner_chunk, last_chunk = (
        _find_chunk(stage, exchange, last=False) for stage in exchange.kinds
    )
    ahead = _gather_ahead(exchange, first_chunk, first)
    # other stages only copy ahead of their first forward pass
    for stage, chunk in ((inner, inner_chunk), (last, last_chunk)):
        ahead = ahead + stage.number * (chunk.first_host - chunk.forward_host)
    time = np.where(exchange.zero == 1, ahead, 0.0)
    if not np.any(exchange.zero > 1):
        return time
    forward, backward = np.zeros_like(time), np.zeros_like(time)
    for stage in exchange.kinds:
        chunk = _find_chunk(stage, exchange, last=False)
        forward = forward + stage.number * _gather_beside(exchange, chunk)
        backward = backward + stage.number * _regather(exchange, chunk)
    on_all_stages = np.where(exchange.micro < exchange.pp, exchange.chunks, 1.0)
    on_one_stage = exchange.chunks - on_all_stages
    turns = on_all_stages + on_one_stage / exchange.pp
    time = time + np.where(exchange.zero > 1, turns * forward, 0.0)
    return np.asarray(time + np.where(exchange.zero > 2, turns * backward, 0.0))


def _reduce_once(exchange: Exchange, left: Backlog) -> Array:
    """Time that reductions of gradients add to the last backward passes of an iteration, of which
    those of the first stage end last, see `time_once` [s]."""
    first, inner, last = exchange.kinds
    first_chunk, inner_chunk, last_chunk = (
        _find_chunk(stage, exchange, last=False) for stage in exchange.kinds
    )
    landed = _reduce(exchange, first_chunk, left, first_chunk.last_host, first.layers).landed
    passed_inner = _reduce(exchange, inner_chunk, left, inner.last_host).kernels
    passed_last = _reduce(exchange, last_chunk, left, last.last_host).kernels
    if np.any(exchange.put_off):
        first_put_off, after = _reduce_put_off(exchange, first)
        last_put_off, _ = _reduce_put_off(exchange, last)
        passed_inner = np.where(exchange.put_off, 0.0, passed_inner)
        passed_last = np.where(exchange.put_off, last_put_off.kernels, passed_last)
        landed = np.where(exchange.put_off, first_put_off.kernels + after, landed)
    return np.asarray(inner.number * passed_inner + last.number * passed_last + landed)


def add_to_each_pass(exchange: Exchange, stage: StageKind) -> Added:
    """Time that messages of replicas add to each pass of a stage that gathers weights and reduces
    gradients with each micro-batch [s]."""
    forward = _gather_beside(exchange, stage)
    reduced = _reduce(exchange, stage, _leave_nothing(exchange), stage.backward_host)
    kernels = _keep_units(exchange.backward, stage)
    both = time_regathering_backward(
        kernels,
        exchange.gather_copies,
        exchange.gathers,
        _keep_units(exchange.reduce_copies, stage),
        _keep_messages(exchange.reductions, stage),
        stage.layers,
        exchange.lead,
        stage.backward_host,
        exchange.contention,
    )
    alone = _add_up(kernels, stage.layers) + stage.backward_host
    again = _regather(exchange, stage)
    with_gathers = Passed(
        np.where(exchange.overlap, both.kernels - alone, reduced.kernels + again),
        np.where(exchange.overlap, both.landed - alone, reduced.landed + again),
    )
    backward = np.where(exchange.zero > 2, with_gathers.kernels, reduced.kernels)
    landed = np.where(exchange.zero > 2, with_gathers.landed, reduced.landed)
    added = Added(forward, backward, landed, np.zeros(len(exchange.micro)))
    if not np.any(exchange.put_off):
        return added
    regathered = np.where(exchange.zero > 2, again, 0.0)
    put_off = _add_to_passes_put_off(exchange, stage, forward, regathered)
    return Added(
        forward,
        np.where(exchange.put_off, put_off.backward, added.backward),
        np.where(exchange.put_off, put_off.landed, added.landed),
        np.where(exchange.put_off, put_off.weights, added.weights),
    )


def _add_to_passes_put_off(
    exchange: Exchange, stage: StageKind, gathered: Array, regathered: Array
) -> Added:
    """What `add_to_each_pass` says where weight gradients are put off, from what gathers of weights
    add to the forward and to the backward pass [s]."""
    passed, _ = _reduce_put_off(exchange, stage)
    copies = _keep_units(exchange.reduce_copies, stage)
    messages = _keep_messages(exchange.reductions, stage)
    head = np.where(exchange.overlap, passed.landed, copies.head + messages.head)
    ends = head + copies.embeddings + messages.embeddings
    nothing = np.zeros_like(stage.has_head)
    without_ends = stage._replace(has_embeddings=nothing, has_head=nothing)
    _, layers = _reduce_put_off(exchange, without_ends)
    return Added(
        forward=gathered,
        backward=passed.kernels + regathered,
        landed=ends + regathered,
        weights=layers,
    )


class AddedOnce(NamedTuple):
    """Time that messages of replicas add to the passes of a chunk, if weights are gathered and
    gradients reduced once.

    Parameters
    ----------
    gathering, gathering_later : array
        To the first forward pass of the chunk that begins the iteration, and of any other [s].
    lead : array
        By how much later a stage begins its first forward pass, if it does not wait for the first
        micro-batch [s].
    regathering, reducing : array
        To the first backward pass, and to the last one [s].
    tail, queue : array
        What is left of messages of gradients behind the last backward pass, or behind weight
        gradients that were put off; and all of these messages, one after another [s].
    """

    gathering: Array
    gathering_later: Array
    lead: Array
    regathering: Array
    reducing: Array
    tail: Array
    queue: Array


def exchange_once(exchange: Exchange, chunk: StageKind, all_layers: Array) -> AddedOnce:
    """Time that messages of replicas add to the passes of a chunk in an iteration in which gradients
    are reduced once; its stage has some layers in all chunks [s].

    Notes
    -----
    With ZeRO stage 1 a stage gathers all weights before its first pass: the first stage waits for
    them, others gather theirs while they wait for the first micro-batch.
    """
    stage = chunk._replace(layers=all_layers)
    beside = np.where(exchange.zero > 1, _gather_beside(exchange, chunk), 0.0)
    slowed = np.where(exchange.overlap, _slow_later_passes(exchange, chunk, stage), 0.0)
    ahead = np.where(exchange.zero == 1, _gather_ahead(exchange, chunk, stage) + slowed, beside)
    late = np.where(exchange.zero == 1, chunk.first_host - chunk.forward_host, beside)
    regathering = np.where(exchange.zero > 2, _regather(exchange, chunk), 0.0)
    passed = _reduce(exchange, chunk, _leave_nothing(exchange), chunk.last_host, all_layers)
    reducing, tail = passed.kernels, passed.landed - passed.kernels
    if np.any(exchange.put_off):
        of_ends, of_layers = _reduce_put_off(exchange, chunk)
        reducing = np.where(exchange.put_off, of_ends.kernels, reducing)
        tail = np.where(exchange.put_off, of_layers, tail)
    messages = _add_up_messages(_keep_messages(exchange.reductions, chunk), chunk.layers)
    return AddedOnce(
        gathering=ahead,
        gathering_later=late,
        lead=np.where(exchange.zero == 1, np.maximum(ahead - late, 0.0), 0.0),
        regathering=regathering,
        reducing=reducing,
        tail=tail,
        queue=np.where(exchange.overlap, messages, 0.0),
    )


def add_to_all_chunks(exchange: Exchange, stage: StageKind) -> Added:
    """Time that messages of replicas add to the passes of a micro-batch through all chunks of a
    stage, see `add_to_each_pass` [s]."""
    chunk = stage._replace(
        layers=stage.layers / exchange.chunks,
        forward_host=stage.forward_host / exchange.chunks,
        backward_host=stage.backward_host / exchange.chunks,
    )
    with_ends = add_to_each_pass(exchange, chunk)
    if np.all(exchange.chunks <= 1):
        return with_ends
    nothing = np.zeros_like(stage.has_head)
    other = add_to_each_pass(exchange, chunk._replace(has_embeddings=nothing, has_head=nothing))
    others = exchange.chunks - 1.0
    return Added(*(one + others * rest for one, rest in zip(with_ends, other, strict=True)))


def time_each_micro_batch(exchange: Exchange) -> Array:
    """Time that messages of replicas add where these gather weights and reduce gradients with each
    micro-batch, on one stage, with GPipe and with interleaved chunks [s].

    Notes
    -----
    Every pass waits for its own messages. The passes of all micro-batches follow one another on the
    slowest stage; one of each phase lies on the way on all other stages. Gradients go to the stage
    before when the kernels of a pass have ended: only the stage itself waits for its messages.
    """
    stages, number = exchange.kinds, sum(stage.number for stage in exchange.kinds)
    added = [add_to_all_chunks(exchange, stage) for stage in stages]
    forward = [
        _add_up(_keep_units(exchange.forward, stage), stage.layers) + stage.forward_host
        for stage in stages
    ]
    backward = [
        _add_up(_keep_units(exchange.backward, stage), stage.layers) + stage.backward_host
        for stage in stages
    ]
    both = [one + other for one, other in zip(forward, backward, strict=True)]
    more_forward = _lengthen_slowest(stages, forward, [each.forward for each in added])
    more_backward = _lengthen_slowest(stages, backward, [each.landed for each in added])
    more_of_both = _lengthen_slowest(stages, both, [each.forward + each.landed for each in added])
    more = np.where(exchange.phase_by_phase, more_forward + more_backward, more_of_both)
    on_all_stages = sum(
        stage.number * (each.forward + each.backward)
        for stage, each in zip(stages, added, strict=True)
    )
    return np.asarray(
        exchange.micro * more + (1.0 - 1.0 / number) * on_all_stages / exchange.chunks
    )


def _lengthen_slowest(stages: StageKinds, times: list[Array], added: list[Array]) -> Array:
    """By how much what is added to the `times` of the stages makes the longest of them longer
    [s]."""
    present = [np.where(stage.number > 0, 1.0, 0.0) for stage in stages]
    alone = [exists * time for exists, time in zip(present, times, strict=True)]
    longer = [
        exists * (time + more) for exists, time, more in zip(present, times, added, strict=True)
    ]
    return np.asarray(np.maximum.reduce(longer) - np.maximum.reduce(alone))
