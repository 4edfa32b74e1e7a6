"""Messages of replicas beside the passes of a micro-batch: gradients in buckets, and shards of
weights and gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array


class Gradient(NamedTuple):
    """A gradient that DistributedDataParallel reduces in a bucket.

    Parameters
    ----------
    work : array
        Time of the backward pass since the gradient before it was complete, without copies [s].
    nbytes : float
        Bytes in its bucket [B].
    fill, empty : array
        Time of the copies to the bucket and back [s].
    """

    work: Array
    nbytes: float
    fill: Array
    empty: Array


def _advance(clock: Array, work: Any, landing: Array, contention: float) -> Array:
    """When kernels end that begin now, beside a message that lands later and slows them [s]."""
    beside = np.maximum(landing - clock, 0.0)
    done_beside = beside * (1.0 - contention)
    slowed = clock + work / (1.0 - contention) if contention < 1.0 else landing
    return np.asarray(np.where(work <= done_beside, slowed, clock + work + beside - done_beside))


def time_buckets(
    gradients: Sequence[Gradient],
    buckets: Sequence[slice],
    messages: Array,
    rest: Array,
    contention: float,
) -> Array:
    """Time from the start of a backward pass to the last copy out of a bucket.

    Parameters
    ----------
    gradients : sequence of Gradient
        In the order in which they are computed.
    buckets : sequence of slice
        Which of them share a bucket.
    messages : array
        Time of the reduction of each bucket, a row each [s].
    rest : array
        Time of the backward pass behind the last gradient [s].
    contention : float
        Share of the speed of kernels that a message beside them takes [-].

    Returns
    -------
    time : array
        [s].

    Notes
    -----
    A bucket is sent once its last gradient has been copied and the bucket before it has landed.
    Copies back begin behind the backward pass; the first of a bucket waits for it.
    """
    clock = np.zeros(np.shape(rest))
    landing = np.zeros(np.shape(rest))
    landings = []
    for bucket, message in zip(buckets, messages, strict=True):
        work = sum(gradient.work + gradient.fill for gradient in gradients[bucket])
        clock = _advance(clock, work, landing, contention)
        landing = np.maximum(landing, clock) + message
        landings.append(landing)
    clock = _advance(clock, rest, landing, contention)
    for bucket, landed in zip(buckets, landings, strict=True):
        clock = np.maximum(clock, landed)
        copies = sum(gradient.empty for gradient in gradients[bucket])
        clock = _advance(clock, copies, landing, contention)
    return clock


class ShardedPass(NamedTuple):
    """A pass of a micro-batch whose weights or gradients are in shards, of a single stage.

    Parameters
    ----------
    first, layer, last : array
        Time of the kernels of the unit that comes first, of a layer, and of the unit that comes
        last, with the copies around their messages [s].
    layers : array
        Layers [-].
    """

    first: Array
    layer: Array
    last: Array
    layers: Array

    @property
    def alone(self) -> Array:
        """Time without messages [s]."""
        return self.first + self.layers * self.layer + self.last


def _slow_down(kernels: Array, message: Array, contention: Any) -> Array:
    """Time of kernels beside a message that begins with them [s]."""
    all_beside = kernels / np.maximum(1.0 - contention, 1e-9)
    return np.asarray(kernels + contention * np.minimum(message, all_beside))


def _wait_for_both(kernels: Array, message: Array, contention: Any) -> Array:
    """Time of kernels and of a message that begins with them [s]."""
    return np.maximum(message, _slow_down(kernels, message, contention))


def time_gathering_forward(
    kernels: ShardedPass,
    ends: Array,
    layer: Array,
    regathered: Array,
    copies: Array,
    contention: Any,
) -> tuple[Array, Array]:
    """Time of a forward pass that gathers the weights of all units, and what it leaves of a message
    for the backward pass [s].

    `ends` and `layer` are messages of the unit of all other weights and of a layer; `regathered` is the
    message of the last layer where its weights are gathered once more, for the backward pass, else
    0; `copies` are those ahead of the message of the first layer, of which there is one more than
    layers have [s].

    Notes
    -----
    Nothing but these copies hides the first message. The layers are gathered one after another, two ahead of their pass: either messages or kernels
    set the pace.
    """
    paces = np.maximum(kernels.layers - 1.0, 0.0) * _wait_for_both(kernels.layer, layer, contention)
    first = _wait_for_both(kernels.first, layer, contention)
    last = _slow_down(kernels.layer + kernels.last, regathered, contention)
    ends = _wait_for_both(copies, ends, contention)
    return np.asarray(ends + first + paces + last - copies), np.maximum(regathered - last, 0.0)


def time_scattering_backward(
    kernels: ShardedPass,
    ends: Array,
    layer: Array,
    gathered: Array,
    left: Array,
    packing: Array,
    last_packing: Array,
    beside: Array,
    contention: Any,
) -> Array:
    """Time of a backward pass that reduces the gradients of all units, and gathers weights again
    [s].

    `ends` and `layer` are messages of gradients, `gathered` those of a layer's weights or 0, `left`
    what the forward pass left of the first of these, `packing` and `last_packing` the copies of the
    gradients of a layer and of the last unit, and `beside` the kernels beside the last message [s].

    Notes
    -----
    A unit waits for the gradients of the unit before it when it packs its own, and for its own
    weights, which are gathered one unit ahead, behind those gradients. Little hides the gradients of the last unit.
    """
    several = kernels.layers > 1
    packed_layer = kernels.layer + packing
    head = _wait_for_both(kernels.first, left, contention)
    begin = np.where(several, _wait_for_both(packed_layer, gathered, contention), 0.0)
    middle = np.maximum(kernels.layers - 2.0, 0.0)
    packed = layer + _wait_for_both(packing, gathered, contention)
    paces = middle * np.maximum(packed, _slow_down(packed_layer, layer + gathered, contention))
    before = np.where(several, layer, 0.0)
    end = np.maximum(before + packing, _slow_down(packed_layer, before, contention))
    last = _wait_for_both(kernels.last, layer, contention)
    tail = _wait_for_both(beside, ends, contention)
    return np.asarray(head + begin + paces + end + last + last_packing + tail)


class UnitTimes(NamedTuple):
    """A time of each unit of a stage: its embeddings, one of its layers, and its head; 0 for what
    the stage does not hold [s]."""

    embeddings: Array
    layer: Array
    head: Array


class UnitMessages(NamedTuple):
    """Messages of each unit of a stage, and those of the experts of a layer, which fewer ranks
    share on a communicator of their own [s]."""

    embeddings: Array
    layer: Array
    head: Array
    experts: Array

    @property
    def longest(self) -> Array:
        """Time until the messages of a layer have landed on both communicators [s]."""
        return np.maximum(self.layer, self.experts)


class Passed(NamedTuple):
    """When the kernels of a pass end, after which its activations or their gradients go to the next
    stage, and when its messages of replicas have landed too, from the start of the pass [s]."""

    kernels: Array
    landed: Array


class Contention(NamedTuple):
    """Share of the speed of kernels that a `single` message beside them takes, and that `two` take,
    on two communicators [-]."""

    single: Array
    two: Array


def _slow_for_two(kernels: Array, one: Array, other: Array, contention: Contention) -> Array:
    """Time of kernels beside the messages of two communicators that begin with them [s].

    First both are on their way, then the longer one alone, then none.
    """
    both = np.minimum(one, other)
    alone = np.maximum(one, other) - both
    done_beside_both = (1.0 - contention.two) * both
    done_beside_one = (1.0 - contention.single) * alone
    slowed_by_both = kernels / np.maximum(1.0 - contention.two, 1e-9)
    slowed_by_one = both + (kernels - done_beside_both) / np.maximum(1.0 - contention.single, 1e-9)
    after_both = kernels + both - done_beside_both + alone - done_beside_one
    time = np.where(kernels <= done_beside_both + done_beside_one, slowed_by_one, after_both)
    return np.asarray(np.where(kernels <= done_beside_both, slowed_by_both, time))


def time_gathers_ahead(
    kernels: UnitTimes,
    copies: UnitTimes,
    messages: UnitMessages,
    layers: Array,
    all_layers: Array,
    contention: Contention,
) -> Array:
    """Time of the first forward pass of a stage whose weights are all gathered ahead of it [s].

    `layers` are those of the pass, `all_layers` those of all chunks of the stage, which are
    gathered after them.

    Notes
    -----
    All copies come first, and each message begins when its copy has ended and the message before it
    has landed. A unit starts when the unit before it has ended and its own weights have landed: the
    time is the longest of the ways on which the pass waits last for the embeddings, for the first
    layer, for the last layer, or for the head. What lies between is no longer than one of these, as
    all layers are alike.
    """
    copied_layers = all_layers * copies.layer
    copying = copied_layers + copies.head
    sent = messages.embeddings + all_layers * messages.layer + messages.head
    routed = all_layers * messages.experts
    copied = copies.embeddings + _slow_for_two(copying, sent, routed, contention)
    landed = copies.embeddings + messages.embeddings
    begin = np.maximum(copied, landed)
    all_kernels = kernels.embeddings + layers * kernels.layer + kernels.head
    still = np.maximum(copies.embeddings + sent - begin, 0.0)
    still_routed = np.maximum(copies.embeddings + copies.layer + routed - begin, 0.0)
    times = [begin + _slow_for_two(all_kernels, still, still_routed, contention)]
    first_routed = copies.embeddings + copies.layer
    first_landed = np.maximum(landed, first_routed) + messages.layer
    first_landed = np.maximum(first_landed, first_routed + messages.experts)
    later = np.maximum(all_layers - 1.0, 0.0)
    since_first = _slow_for_two(
        layers * kernels.layer + kernels.head,
        later * messages.layer + messages.head,
        later * messages.experts,
        contention,
    )
    times.append(first_landed + since_first)
    last_landed = np.maximum(
        landed + layers * messages.layer, first_routed + layers * messages.experts
    )
    times.append(
        last_landed + _slow_down(kernels.layer + kernels.head, messages.head, contention.single)
    )
    times.append(landed + layers * messages.layer + messages.head + kernels.head)
    return np.asarray(np.maximum.reduce(np.broadcast_arrays(*times)))


def time_gathers_beside(
    kernels: UnitTimes,
    copies: UnitTimes,
    messages: UnitMessages,
    layers: Array,
    lead: Array,
    contention: Contention,
) -> Array:
    """Time of a forward pass that gathers the weights of each unit one unit ahead [s].

    `lead` is the part of a layer, at its beginning, in which it waits for messages of its own, which
    nothing slows down [s].

    Notes
    -----
    Nothing hides the first message. While a unit computes, the next one is gathered: either kernels
    or messages set the pace.
    """
    longest = messages.longest
    has_embeddings = messages.embeddings > 0
    first_copy = np.where(has_embeddings, copies.embeddings, copies.layer)
    first_message = np.where(has_embeddings, messages.embeddings, longest)
    time = first_copy + _wait_for_both(copies.layer, first_message, contention.single)
    beside_embeddings = np.maximum(
        longest,
        _slow_for_two(kernels.embeddings, messages.layer, messages.experts, contention),
    )
    time = time + np.where(has_embeddings, beside_embeddings, 0.0)
    beside_layer = lead + _slow_for_two(
        kernels.layer - lead + copies.layer,
        np.maximum(messages.layer - lead, 0.0),
        np.maximum(messages.experts - lead, 0.0),
        contention,
    )
    pace = np.maximum(longest, beside_layer)
    time = time + np.maximum(layers - 1.0, 0.0) * pace
    last = lead + _slow_down(
        kernels.layer - lead + copies.head,
        np.maximum(messages.head - lead, 0.0),
        contention.single,
    )
    return np.asarray(time + np.maximum(messages.head, last) + kernels.head)


class Backlog(NamedTuple):
    """What is left of the messages of earlier passes when a pass begins, on both communicators
    [s]."""

    layer: Array
    experts: Array


def time_reductions(
    kernels: UnitTimes,
    copies: UnitTimes,
    messages: UnitMessages,
    layers: Array,
    lead: Array,
    host: Array,
    left: Backlog,
    contention: Contention,
) -> Passed:
    """Times of a backward pass in which the gradients of each unit are reduced as soon as they are
    complete.

    `lead` is the part of a layer, at its beginning, in which it waits for messages of its own, and
    `host` by how much the host makes the pass longer [s].

    Notes
    -----
    Messages follow one another: all have landed when the last ones, from any unit on, have followed
    its kernels without a gap. With equal layers the longest of these ways begins with what is left,
    with the head, the first layer, the last one, or the embeddings.
    """
    layer = kernels.layer - lead + copies.layer
    head = _slow_for_two(kernels.head + copies.head, left.layer, left.experts, contention)
    sent = np.maximum(left.layer - head, 0.0) + messages.head
    routed = np.maximum(left.experts - head, 0.0)
    has_embeddings = messages.embeddings > 0
    before_last_layer = np.where(has_embeddings, 0.0, host)
    later = np.maximum(layers - 1.0, 0.0)
    # nothing slows down what a layer waits for
    beside_kernels = np.maximum(messages.layer - lead, 0.0)
    routed_beside_kernels = np.maximum(messages.experts - lead, 0.0)
    first = layer + before_last_layer * (layers <= 1)
    first = head + lead + _slow_for_two(first, sent, routed, contention)
    last = layers * layer + before_last_layer
    sent_before = sent + later * beside_kernels
    routed_before = routed + later * routed_beside_kernels
    last = head + layers * lead + _slow_for_two(last, sent_before, routed_before, contention)
    end = layers * layer + kernels.embeddings + copies.embeddings + host
    sent_before = sent_before + messages.layer
    routed_before = routed_before + messages.experts
    end = head + layers * lead + _slow_for_two(end, sent_before, routed_before, contention)
    end = np.where(has_embeddings, end, last)
    all_layers = layers * messages.layer
    landed = [
        end + messages.embeddings,
        last + messages.layer + messages.embeddings,
        last + messages.experts,
        first + all_layers + messages.embeddings,
        first + layers * messages.experts,
        head + sent + all_layers + messages.embeddings,
        head + routed + layers * messages.experts,
    ]
    return Passed(end, np.maximum.reduce(np.broadcast_arrays(*landed)))


def time_regathering_backward(
    kernels: UnitTimes,
    gather_copies: UnitTimes,
    gathers: UnitMessages,
    copies: UnitTimes,
    messages: UnitMessages,
    layers: Array,
    lead: Array,
    host: Array,
    contention: Contention,
) -> Passed:
    """Times of a backward pass that gathers the weights of each layer one unit ahead, and reduces
    its gradients. `lead` is the part of a layer, at its beginning, in which it waits for messages of
    its own [s].

    Notes
    -----
    Both kinds of messages share a communicator, in the order in which they are launched: the
    weights of a layer are gathered behind the gradients of the unit before last, and its kernels
    wait for them.
    """
    gather = gathers.longest
    reduced = messages.longest
    several = layers > 1
    layer = kernels.layer + copies.layer
    has_head = messages.head > 0
    beside_head = np.maximum(
        gather, _slow_for_two(kernels.head, gathers.layer, gathers.experts, contention)
    )
    beside_copy = _wait_for_both(gather_copies.layer * several, gather, contention.single)
    head = np.where(has_head, beside_head + copies.head, beside_copy)
    time = gather_copies.layer + head
    first_message = messages.head + gather
    first_layer = lead + _slow_for_two(
        layer - lead + gather_copies.layer,
        np.maximum(messages.head + gathers.layer - lead, 0.0),
        np.maximum(gathers.experts - lead, 0.0),
        contention,
    )
    first = np.maximum(first_message, first_layer)
    time = time + np.where(several, first, 0.0)
    beside_layer = lead + _slow_for_two(
        layer - lead + gather_copies.layer,
        np.maximum(messages.layer + gathers.layer - lead, 0.0),
        np.maximum(messages.experts + gathers.experts - lead, 0.0),
        contention,
    )
    pace = np.maximum(reduced + gather, beside_layer)
    time = time + np.maximum(layers - 2.0, 0.0) * pace
    before = np.where(several, reduced, messages.head)
    beside_last = lead + _slow_down(layer - lead, np.maximum(before - lead, 0.0), contention.single)
    last = np.maximum(before, beside_last)
    has_embeddings = messages.embeddings > 0
    rest = kernels.embeddings + copies.embeddings + host
    end = time + last + np.where(has_embeddings, _slow_down(rest, reduced, contention.single), host)
    landed = time + last + np.where(has_embeddings, 0.0, host) + reduced
    return Passed(end, np.maximum(landed, end) + messages.embeddings)
