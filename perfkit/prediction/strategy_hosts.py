"""Hosts of strategies: the time that they add to passes, and what copies around messages of replicas
take on the device and on its host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.prediction.cost import join_host
from perfkit.prediction.micro_batches import MessageCopies, PassWork, count_shards
from perfkit.prediction.strategy_case import Case
from perfkit.prediction.strategy_records import SMALLEST_TIME, Work


class Rounds(NamedTuple):
    """How often replicas exchange all they share.

    Parameters
    ----------
    reduced, gathered, regathered : array
        Reductions of gradients, gathers of weights for the forward pass, and once more for the
        backward pass [-].
    """

    reduced: Array
    gathered: Array
    regathered: Array


class ShardCopies(NamedTuple):
    """Kernels around messages of replicas that hold shards of the whole model, on the slowest stage.

    Parameters
    ----------
    gather_layer, gather_ends : array
        Around the message that gathers the weights of a layer, and of all other weights [s].
    regather_layer : array
        Around the one that gathers those of a layer once more [s].
    scatter_layer, scatter_ends : array
        Around the messages that reduce gradients [s].
    reorder_gradients : array
        Copies of the gradients of experts, which are part of `scatter_layer` [s].
    layer_ahead, ends_ahead : array
        Those ahead of the messages that gather weights [s].
    """

    gather_layer: Array
    gather_ends: Array
    regather_layer: Array
    scatter_layer: Array
    scatter_ends: Array
    reorder_gradients: Array
    layer_ahead: Array
    ends_ahead: Array


class ChunkHosts(NamedTuple):
    """Time that the host adds to passes of a chunk that gather all weights or reduce all gradients.

    Parameters
    ----------
    first : array
        To the first forward pass of an iteration [s].
    last : array
        To its last backward pass [s].
    """

    first: Array
    last: Array


def count_rounds(case: Case) -> Rounds:
    """Count how often replicas exchange all they share.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    rounds : Rounds
        In an iteration; once, or with each micro-batch.
    """
    often = np.where(case.s.scattered, case.micro, 1.0)
    return Rounds(
        reduced=often,
        gathered=np.where(case.s.zero > 0, often, 0.0),
        regathered=np.where(case.s.zero > 2, often, 0.0),
    )


def time_shard_copies(case: Case) -> ShardCopies:
    """Time the kernels around messages of shards.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    copies : ShardCopies
        For each message.

    Notes
    -----
    Copies of shards are divided among the ranks that own them. Those of sums of several
    micro-batches move more bytes than those of gradients as they are computed.
    """
    s, times, sizes = case.s, case.times, case.sizes
    experts = sizes.experts / times.layer.weights
    layer_shard = count_shards(1.0, experts, owners=s.owners, sharers=sizes.sharers)
    all_ends = np.maximum(times.embeddings.weights + times.head.weights, 1.0)
    ends_of_stage = (case.weights - case.layers * times.layer.weights) / all_ends
    reorder = sizes.reorders * times.reorder.fixed + sizes.reordered * times.reorder.each
    wider = np.where(sizes.straight, 0.0, sizes.widened - 1.0)
    wide = np.where(sizes.straight, 1.0, sizes.wide / sizes.itemsize)
    reorder_sums = (
        sizes.reorders * times.reorder.fixed + wide * sizes.reordered * times.reorder.each
    )

    def copy_layer(copies: MessageCopies) -> Array:
        return copies.whole + copies.divided * layer_shard

    def copy_ends(copies: MessageCopies) -> Array:
        return copies.whole + copies.divided / s.owners

    def copy_ahead(copies: MessageCopies) -> Array:
        return copies.ahead + copies.divided / s.owners

    layer, ends = times.layer_copies, times.end_copies
    scatter_layer = copy_layer(layer.scatter) + wider * layer.scatter.packing + reorder_sums
    scatter_ends = copy_ends(ends.scatter) + wider * ends.scatter.packing
    return ShardCopies(
        gather_layer=copy_layer(layer.gather) + reorder,
        gather_ends=ends_of_stage * copy_ends(ends.gather),
        regather_layer=copy_layer(layer.regather) + reorder,
        scatter_layer=scatter_layer,
        scatter_ends=ends_of_stage * scatter_ends,
        reorder_gradients=reorder_sums,
        layer_ahead=copy_ahead(layer.gather),
        ends_ahead=copy_ahead(ends.gather),
    )


def time_exchange_work(case: Case, rounds: Rounds) -> Work:
    """Time what a device and its host do around messages of replicas.

    Parameters
    ----------
    case : Case
        Strategies.
    rounds : Rounds
        How often all is exchanged.

    Returns
    -------
    work : Work
        Copies, and calls of copies and messages, of the slowest stage [s].
    """
    device = np.where(case.shards_alone, _copy_shards(case, rounds), _copy_whole(case, rounds))
    host = np.where(
        case.shards_alone, _call_for_shards(case, rounds), _call_for_whole(case, rounds)
    )
    return Work(
        device=np.where(case.has_replicas, device, 0.0),
        host=np.where(case.has_replicas, host, 0.0),
    )


def _copy_shards(case: Case, rounds: Rounds) -> Array:
    """Copies of replicas of the whole model that share states, by units [s]."""
    copies = time_shard_copies(case)
    layer = copies.scatter_layer * rounds.reduced + copies.gather_layer * rounds.gathered
    layer = layer + copies.regather_layer * rounds.regathered
    ends = copies.scatter_ends * rounds.reduced + copies.gather_ends * rounds.gathered
    return np.asarray(case.layers * layer + ends)


def _copy_whole(case: Case, rounds: Rounds) -> Array:
    """Copies of ranks that share layers too, which copy each unit in one piece [s].

    Gradients that are not shared are unpacked once more.
    """
    sizes, weights = case.sizes, case.weights
    unpacked = np.where(case.s.zero > 0, 0.0, sizes.reduced * rounds.reduced)
    inner = case.layers * case.times.layer.weights / weights
    gathered = sizes.gathered * (rounds.gathered + inner * rounds.regathered)
    reordered = sizes.gathered * case.layers * sizes.reordered / weights
    all_rounds = rounds.reduced + rounds.gathered + rounds.regathered
    copies = sizes.reduced * rounds.reduced + unpacked + gathered + reordered * all_rounds
    return np.asarray(copies * case.times.packing * weights)


def _call_for_shards(case: Case, rounds: Rounds) -> Array:
    """Calls of replicas of the whole model that share states [s]."""
    layer, ends = case.times.layer_copies, case.times.end_copies
    regathered = case.layers * layer.regather.host
    reduced = case.layers * layer.scatter.host + ends.scatter.host
    gathered = case.layers * layer.gather.host + ends.gather.host
    return np.asarray(
        rounds.regathered * regathered + rounds.reduced * reduced + rounds.gathered * gathered
    )


def _call_for_whole(case: Case, rounds: Rounds) -> Array:
    """Calls of ranks that share layers too: a copy and a message for each unit; a message alone if
    there are buffers [s]."""
    all_rounds = rounds.reduced + rounds.gathered + rounds.regathered
    calls = np.where(case.s.buffers, 1.0, 2.0)
    return np.asarray(calls * all_rounds * (case.layers + 2.0) * case.times.call)


def time_exchange_of_micro_batch(case: Case) -> Work:
    """Time what a device and its host do around messages of replicas, in the mean of micro-batches.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    work : Work
        Copies and calls for one micro-batch [s].
    """
    rounds = count_rounds(case)
    return time_exchange_work(case, Rounds(*(often / case.micro for often in rounds)))


def join_passes(case: Case, passes: Sequence[Work], exchange: Work) -> list[Array]:
    """Find the time that hosts add to passes that wait for messages, each for itself.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : sequence of Work
        Kernels and calls of each pass [s].
    exchange : Work
        Copies and calls around messages of replicas, in the mean of micro-batches [s].

    Returns
    -------
    added : list of array
        To each pass [s].

    Notes
    -----
    Where replicas exchange with each micro-batch, copies and calls are spread over its passes. What
    is exchanged with a single micro-batch of an iteration is added to its passes alone.
    """
    filled: Any = 1.0
    grown: Any = 1.0
    if np.any(case.s.scattered):
        device = sum(work.device for work in passes)
        host = sum(work.host for work in passes)
        filled = 1.0 + np.where(
            case.s.scattered, exchange.device / np.maximum(device, SMALLEST_TIME), 0.0
        )
        grown = 1.0 + np.where(
            case.s.scattered, exchange.host / np.maximum(host, SMALLEST_TIME), 0.0
        )
    added = []
    for work in passes:
        joined = join_host(filled * work.device, grown * work.host, case.whole)
        added.append(np.asarray(joined - filled * work.device))
    return added


def join_all_passes(case: Case, passes: Sequence[Work], exchange: Work) -> Array:
    """Find the time that hosts add to passes that wait for no messages, to all of them together.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : sequence of Work
        Kernels and calls of each pass [s].
    exchange : Work
        Copies and calls around messages of replicas, in the mean of micro-batches [s].

    Returns
    -------
    added : array
        [s].
    """
    device = sum(work.device for work in passes) + exchange.device
    host = sum(work.host for work in passes) + exchange.host
    return np.asarray(join_host(device, host, case.whole) - device)


def join_stage(case: Case, passes: Sequence[Work], exchange: Work) -> Array:
    """Find the time that hosts add to a micro-batch of a stage.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : sequence of Work
        Kernels and calls of each pass [s].
    exchange : Work
        Copies and calls around messages of replicas, in the mean of micro-batches [s].

    Returns
    -------
    added : array
        Pass by pass where stages wait for messages, else to all passes; none for replicas of the
        whole model, whose host waits for nothing in an iteration [s].
    """
    added = sum(join_passes(case, passes, exchange))
    if np.any(case.s.pp == 1):
        added = np.where(case.has_stages, added, join_all_passes(case, passes, exchange))
    return np.asarray(np.where(case.s.alone, 0.0, added))


def join_exchanges(
    case: Case,
    passes: PassWork,
    layers: Array,
    layers_of_chunk: Array,
    end_weights: Array | None,
) -> ChunkHosts:
    """Find the time that hosts add to passes with messages that are sent once in an iteration.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : PassWork
        Passes of a micro-batch through all chunks of a stage [s].
    layers, layers_of_chunk : array
        Layers of the stage, and of one of its chunks [-].
    end_weights : array or None
        Trained numbers of the embeddings or the head, if the stage holds them [-].

    Returns
    -------
    added : ChunkHosts
        To passes of a chunk.

    Notes
    -----
    ZeRO stage 1 gathers the weights of all chunks ahead of the first pass. Without overlap gradients
    are reduced when the host waits for nothing any more; those of layers also where the schedule
    puts off weight gradients.
    """
    s, times, sizes = case.s, case.times, case.sizes
    once = case.has_replicas & ~s.scattered
    copied = np.where(s.buffers, 0.0, 1.0)
    gathers = np.where(once & (s.zero > 0), 1.0, 0.0)
    gathered = _list_exchanged(case, np.where(s.zero > 1, layers_of_chunk, layers), end_weights)
    gather = Work(
        gathers * times.packing * (sizes.gathered * gathered.weights + gathered.reordered),
        gathers * (1.0 + copied) * gathered.units * times.call,
    )
    reduces = np.where(once & s.overlap & ~case.schedule.puts_off_weights, 1.0, 0.0)
    # whole gradients are unpacked once more
    copies = copied * np.where(s.zero > 0, 1.0, 2.0)
    reduced = _list_exchanged(case, layers_of_chunk, end_weights)
    reduction = Work(
        reduces * times.packing * (copies * sizes.reduced * reduced.weights + reduced.reordered),
        reduces * (1.0 + copies) * reduced.units * times.call,
    )
    return ChunkHosts(
        first=_join_chunk(case, passes.forward, gather),
        last=_join_chunk(case, passes.backward, reduction),
    )


class _Exchanged(NamedTuple):
    """What is exchanged: trained numbers, numbers of experts that are copied once more, and units
    [-]."""

    weights: Array
    reordered: Array
    units: Array


def _list_exchanged(case: Case, layers: Array, end_weights: Array | None) -> _Exchanged:
    """What is exchanged of some layers and an end."""
    weights, units = layers * case.times.layer.weights, layers
    if end_weights is not None:
        weights, units = weights + end_weights, units + 1.0
    return _Exchanged(weights, case.sizes.gathered * case.sizes.reordered * layers, units)


def _join_chunk(case: Case, work: Work, exchange: Work) -> Array:
    """Time that the host adds to a pass of one chunk with an exchange [s]."""
    device = work.device / case.s.chunks + exchange.device
    host = work.host / case.s.chunks + exchange.host
    return np.asarray(join_host(device, host, case.whole) - device)
