"""Pipelines of strategies whose closed forms are rough, pass by pass."""

from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.prediction.cost import join_host
from perfkit.prediction.micro_batches import PassWork
from perfkit.prediction.passes import ChunkTimes, PipelineShape, PipelineTimes, run_iteration
from perfkit.prediction.stage_replicas import (
    Added,
    AddedOnce,
    Exchange,
    StageKind,
    add_to_each_pass,
    exchange_once,
)
from perfkit.prediction.strategy_case import Case
from perfkit.prediction.strategy_hosts import join_exchanges
from perfkit.prediction.strategy_passes import Passes, add_regions
from perfkit.prediction.strategy_pipelines import Borders, find_put_off
from perfkit.prediction.strategy_records import Work, map_arrays


class ChunkLayers(NamedTuple):
    """Layers of the chunks of a pipeline.

    Parameters
    ----------
    first, longer, shorter, last : array
        Of the first chunk, of those between with a layer more and without, and of the last one [-].
    with_more : array
        The position, in all chunks, behind those with a layer more [-].
    """

    first: Array
    longer: Array
    shorter: Array
    last: Array
    with_more: Array


class _Chunks(NamedTuple):
    """Times of the first chunk, with the embeddings; of those between with a layer more and without;
    and of the last one, with the head."""

    first: ChunkTimes
    longer: ChunkTimes
    shorter: ChunkTimes
    last: ChunkTimes


class _ExchangeWork(NamedTuple):
    """Copies and calls around messages of replicas with each micro-batch, in the passes of all
    chunks of a stage: forward, backward, and that of weight gradients that were put off [s]."""

    forward: Work
    backward: Work
    weights: Work


def find_rough(case: Case) -> np.ndarray:
    """Find the strategies whose closed forms are rough.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    rough : array of bool
        Those in one region whose layers do not divide into chunks, or whose stages exchange weights
        or gradients with each micro-batch [-].
    """
    s = case.s
    unlike = case.model.layers % (s.pp * s.chunks) != 0
    unlike = unlike | (s.first_layers > 0) | (s.last_layers > 0)
    unlike_stages = (case.schedule.all_forward_first | case.schedule.has_chunks) & unlike
    exchanges_often = s.scattered & case.has_replicas
    in_one_region = case.has_stages & (case.regions <= 1)
    return np.asarray(in_one_region & (unlike_stages | exchanges_often))


def run_passes(case: Case, passes: Passes, borders: Borders, exchange: Exchange) -> Array:
    """Run the passes of strategies with stages.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : Passes
        Passes of a micro-batch through each region.
    borders : Borders
        Messages between stages.
    exchange : Exchange
        What replicas exchange beside them.

    Returns
    -------
    times : array
        Time of an iteration of each, without its update [s].
    """
    layers = _spread_chunks(case)
    chunks = _Chunks(
        first=_time_chunk(case, passes, exchange, layers.first, has_embeddings=True),
        longer=_time_chunk(case, passes, exchange, layers.longer),
        shorter=_time_chunk(case, passes, exchange, layers.shorter),
        last=_time_chunk(case, passes, exchange, layers.last, has_head=True),
    )
    times = np.zeros(case.count)
    for index in range(case.count):
        of_strategy = _pick(chunks, index)
        with_more = int(layers.with_more[index])
        times[index] = _run_pipeline(case, index, of_strategy, with_more, borders)
    return times


def _pick(chunks: _Chunks, index: int) -> _Chunks:
    """Times of one strategy."""
    return map_arrays(lambda times: float(times[index]), chunks)


def _run_pipeline(
    case: Case, index: int, chunks: _Chunks, with_more: int, borders: Borders
) -> float:
    """Time of one strategy, of whose chunks the first `with_more` have a layer more [s]."""
    s = case.s
    stages, chunks_of_stage = int(s.pp[index]), int(s.chunks[index])
    between = []
    for position in range(1, stages * chunks_of_stage - 1):
        between.append(chunks.longer if position < with_more else chunks.shorter)
    across, local = float(borders.across[index]) / 2.0, float(borders.local[index]) / 2.0
    ranks_of_stage = int(s.ranks[index] // s.pp[index])
    crosses = _cross_nodes(stages, ranks_of_stage, case.platform.network.ranks_per_node)
    return run_iteration(
        PipelineShape(
            schedule=str(s.schedule[index]),
            stages=stages,
            micro_batches=int(case.micro[index]),
            chunks=chunks_of_stage,
            scattered=bool(s.scattered[index]),
        ),
        PipelineTimes(
            chunks=[chunks.first, *between, chunks.last],
            stages=stages,
            messages=[across if is_far else local for is_far in crosses],
        ),
    )


def _cross_nodes(stages: int, ranks: int, ranks_of_node: int) -> list[bool]:
    """Whether stages of as many ranks each send messages between nodes to the stage behind them,
    the last one to the first one."""
    ends = [(stage * ranks, (stage + 2) * ranks - 1) for stage in range(stages - 1)]
    ends.append((0, stages * ranks - 1))
    return [first // ranks_of_node != last // ranks_of_node for first, last in ends]


def _spread_chunks(case: Case) -> ChunkLayers:
    """Spread layers over chunks: the first ones have a layer more if they do not divide."""
    s = case.s
    first_stated, last_stated = s.first_layers > 0, s.last_layers > 0
    stated = np.where(first_stated, 1, 0) + np.where(last_stated, 1, 0)
    rest = case.model.layers - s.first_layers - s.last_layers
    each, more = np.divmod(rest, np.maximum(s.pp * s.chunks - stated, 1))
    return ChunkLayers(
        first=np.where(first_stated, s.first_layers, np.where(more > 0, each + 1, each)),
        longer=each + 1,
        # of two chunks, none lies between the ends
        shorter=np.maximum(each, 1),
        last=np.where(last_stated, s.last_layers, each),
        with_more=more + np.where(first_stated, 1, 0),
    )


def _time_chunk(
    case: Case,
    passes: Passes,
    exchange: Exchange,
    layers: Array,
    *,
    has_embeddings: bool = False,
    has_head: bool = False,
) -> ChunkTimes:
    """Times of the activities of a chunk of some layers and an end, if it has one.

    The host joins the passes of all chunks of a stage, as if they were alike. Weight gradients that
    are put off are launched with the next forward pass.
    """
    s = case.s
    end_weights = None
    if has_embeddings:
        end_weights = case.times.embeddings.weights
    elif has_head:
        end_weights = case.times.head.weights
    forward = _repeat(
        case, add_regions(passes.forward, layers, has_embeddings=has_embeddings, has_head=has_head)
    )
    backward = _repeat(
        case, add_regions(passes.backward, layers, has_embeddings=has_embeddings, has_head=has_head)
    )
    # of all chunks of a stage
    gradients = find_put_off(case, case.s.chunks * layers)
    backward = Work(backward.device - gradients.device, backward.host - gradients.host)
    copies = _list_exchange_work(case, layers, end_weights)
    forward_host = _add_host(case, forward, copies.forward)
    backward_host = _add_host(case, backward, copies.backward)
    further = _add_work(gradients, _add_work(copies.forward, copies.weights))
    gradients_host = _add_host(case, forward, further) - forward_host
    gradients_host = np.where(case.schedule.puts_off_weights, gradients_host, 0.0)
    hosts = join_exchanges(case, PassWork(forward, backward), s.chunks * layers, end_weights)
    chunk = StageKind(
        number=np.ones(case.count),
        layers=layers,
        has_embeddings=np.full(case.count, has_embeddings),
        has_head=np.full(case.count, has_head),
        forward_host=forward_host / s.chunks,
        backward_host=backward_host / s.chunks,
        first_host=hosts.first,
        last_host=hosts.last,
    )
    often = _keep_if(s.scattered, add_to_each_pass(exchange, chunk))
    once = _keep_if_not(s.scattered, exchange_once(exchange, chunk))
    return ChunkTimes(
        forward=(forward.device + forward_host) / s.chunks + often.forward,
        backward=(backward.device + backward_host) / s.chunks + often.backward,
        weights=(gradients.device + gradients_host) / s.chunks + often.weights,
        reduction=often.landed - often.backward,
        first_gather=once.gathering,
        later_gather=once.gathering_later,
        regather=once.regathering,
        last_reduction=once.reducing,
        tail=once.tail,
        queue=once.queue,
    )


def _keep_if(chosen: np.ndarray, added: Added) -> Added:
    """Times of the chosen strategies, 0 for others."""
    return map_arrays(lambda times: np.where(chosen, times, 0.0), added)


def _keep_if_not(chosen: np.ndarray, added: AddedOnce) -> AddedOnce:
    """Times of other strategies than the chosen ones, 0 for these."""
    return map_arrays(lambda times: np.where(chosen, 0.0, times), added)


def _repeat(case: Case, chunk: Work) -> Work:
    """A pass through all chunks of a stage that are like one, with calls of messages between stages
    [s]."""
    chunks = case.s.chunks
    return Work(chunks * chunk.device, chunks * (chunk.host + 2.0 * case.times.call))


def _add_work(one: Work, two: Work) -> Work:
    """Kernels and calls of both [s]."""
    return map_arrays(np.add, one, two)


def _add_host(case: Case, work: Work, further: Work) -> Array:
    """Time that the host adds to a pass with further work [s]."""
    both = _add_work(work, further)
    return np.asarray(join_host(both.device, both.host, case.whole) - both.device)


def _list_exchange_work(case: Case, layers: Array, end_weights: Array | None) -> _ExchangeWork:
    """Copies and calls around messages of replicas with each micro-batch, in the passes of all
    chunks of a stage with as many layers.

    Weights are gathered before a forward pass, and those of layers once more before a backward pass
    (ZeRO stage 3). Gradients are reduced behind a backward pass, those of layers behind the pass of
    weight gradients that were put off. Without overlap the host launches the reductions behind a
    pass, with the pass that follows.
    """
    s = case.s
    again = np.where(s.zero > 2, layers, 0.0)
    in_backward = np.where(case.schedule.puts_off_weights, 0.0, layers)
    in_weights = np.where(case.schedule.puts_off_weights, layers, 0.0)
    gather = _time_units(case, case.sizes.gathered, layers, end_weights)
    regather = _time_units(case, case.sizes.gathered, again, None)
    reduce = _time_units(case, case.sizes.reduced, in_backward, end_weights)
    several = case.micro > 1
    with_backward = s.overlap | (case.schedule.all_forward_first & several)
    with_forward = ~s.overlap & ~case.schedule.all_forward_first & several
    return _ExchangeWork(
        forward=_add_work(gather, map_arrays(lambda t: np.where(with_forward, t, 0.0), reduce)),
        backward=_add_work(regather, map_arrays(lambda t: np.where(with_backward, t, 0.0), reduce)),
        weights=_time_units(case, case.sizes.reduced, in_weights, None),
    )


def _time_units(
    case: Case, relative_size: Array | float, layers: Array, end_weights: Array | None
) -> Work:
    """Copies and calls around a message for each of some layers, and one for an end [s].

    `relative_size` says what the copies move, over a copy of all sums of gradients. Each message
    has a copy and a call; that of experts has its own.
    """
    s, sizes, times = case.s, case.sizes, case.times
    often = np.where(s.scattered & case.has_replicas, s.chunks, 0.0)
    reordered = sizes.gathered * sizes.reordered
    device = layers * (relative_size * times.layer.weights + reordered)
    calls = layers * np.where(case.has_experts, 3.0, 2.0)
    if end_weights is not None:
        device = device + relative_size * end_weights
        calls = calls + 2.0
    return Work(often * times.packing * device, often * calls * times.call)
