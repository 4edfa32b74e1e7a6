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
        work = sum(own.work + own.fill for own in gradients[bucket])
        clock = _advance(clock, work, landing, contention)
        landing = np.maximum(landing, clock) + message
        landings.append(landing)
    clock = _advance(clock, rest, landing, contention)
    for bucket, landed in zip(buckets, landings, strict=True):
        clock = np.maximum(clock, landed)
        copies = sum(own.empty for own in gradients[bucket])
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
    again: Array,
    copies: Array,
    contention: Any,
) -> tuple[Array, Array]:
    """Time of a forward pass that gathers the weights of all units, and what it leaves of a message
    for the backward pass [s].

    `ends` and `layer` are messages of the unit of all other weights and of a layer; `again` is the
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
    last = _slow_down(kernels.layer + kernels.last, again, contention)
    ends = _wait_for_both(copies, ends, contention)
    return np.asarray(ends + first + paces + last - copies), np.maximum(again - last, 0.0)


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
    whole_layer = kernels.layer + packing
    head = _wait_for_both(kernels.first, left, contention)
    begin = np.where(several, _wait_for_both(whole_layer, gathered, contention), 0.0)
    middle = np.maximum(kernels.layers - 2.0, 0.0)
    packed = layer + _wait_for_both(packing, gathered, contention)
    paces = middle * np.maximum(packed, _slow_down(whole_layer, layer + gathered, contention))
    before = np.where(several, layer, 0.0)
    end = np.maximum(before + packing, _slow_down(whole_layer, before, contention))
    last = _wait_for_both(kernels.last, layer, contention)
    tail = _wait_for_both(beside, ends, contention)
    return np.asarray(head + begin + paces + end + last + last_packing + tail)
