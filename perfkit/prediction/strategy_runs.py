"""Pipelines of strategies, pass by pass, and where closed forms are too rough without."""

from functools import partial
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.partitions import find_schedules
from perfkit.models.v_schedules import find_place
from perfkit.prediction.cost import join_host
from perfkit.prediction.micro_batches import PassWork
from perfkit.prediction.passes import ChunkTimes, PipelineShape, PipelineTimes, shorten
from perfkit.prediction.passes_at_once import run_iterations
from perfkit.prediction.replicas import UnitMessages
from perfkit.prediction.stage_replicas import (
    Exchange,
    StageKind,
    add_to_each_pass,
    exchange_once,
)
from perfkit.prediction.strategy_case import Case
from perfkit.prediction.strategy_hosts import join_exchanges
from perfkit.prediction.strategy_passes import Passes, add_regions
from perfkit.prediction.strategy_pipelines import Borders, find_far_latency, find_put_off
from perfkit.prediction.strategy_records import Record, Work, map_arrays, select
from perfkit.workloads.strategy import LayerSpread, Strategy, spread_chunks

#: Share of a forward pass through a chunk that a message between stages may take, for closed forms to
#: be near passes that are run: of 121 pipelines that are not rough (seeds 5 to 7 of `draw` in
#: benchmarks/strategies_beside.py) they are 0.1 % apart in mean and 1.3 % at most [-].
FAST = 0.1


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


def find_runnable(case: Case) -> np.ndarray:
    """Find the strategies whose passes can be run.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    runnable : array of bool
        Those with several stages, which share the micro-batches as their schedule wants it [-].
    """
    is_whole = case.micro % 1 == 0
    divides = ~case.schedule.interleaves | (case.micro % case.s.pp == 0)
    are_enough = case.micro >= case.schedule.least_batches * case.s.pp
    return np.asarray(case.has_stages & is_whole & divides & are_enough)


def find_rough(case: Case, passes: Passes, borders: Borders) -> np.ndarray:
    """Find the strategies whose closed forms are rough.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : Passes
        Passes of a micro-batch through each region.
    borders : Borders
        Messages between stages.

    Returns
    -------
    rough : array of bool
        Those whose layers do not divide into chunks or are stated, whose replicas share gradients or
        weights (ZeRO stages 2 and 3), whose messages between stages take more than `FAST` of a
        forward pass through a chunk, or whose stages are in a V [-].
    """
    s = case.s
    unlike = case.all_layers % (s.pp * s.chunks) != 0
    unlike = unlike | (s.first_layers > 0) | (s.last_layers > 0)
    shares_gradients = (s.zero > 1) & case.has_messages
    one_pass = case.layers / s.chunks * passes.forward.layer.device
    slow = np.maximum(borders.inside, borders.far) / 2.0 > FAST * one_pass
    return np.asarray(unlike | shares_gradients | slow | case.schedule.is_v_shaped)


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

    Notes
    -----
    Strategies with the same schedule, stages, micro-batches and chunks are run together.
    """
    spread = spread_chunks(case.all_layers, case.s)
    # of two stages that are both stated, no chunk lies between
    shorter = np.where(spread.of_ends > 0, spread.of_ends, 1.0)
    first = spread.count_layers(case.s, 0, 0)
    # a V ends on the first stage
    is_v_shaped = case.schedule.is_v_shaped
    last_stage = np.where(is_v_shaped, 0, case.s.pp - 1)
    last = spread.count_layers(case.s, last_stage, case.s.chunks - 1)
    longer = shorter + 1.0
    ends = case.stage_layers
    layers_of_last_stage = np.where(is_v_shaped, ends.first, ends.last)
    chunks = _Chunks(
        first=_time_chunk(case, passes, exchange, first, ends.first, has_embeddings=True),
        longer=_time_chunk(case, passes, exchange, longer, case.s.chunks * longer),
        shorter=_time_chunk(case, passes, exchange, shorter, case.s.chunks * shorter),
        last=_time_chunk(case, passes, exchange, last, layers_of_last_stage, has_head=True),
    )
    times = np.zeros(case.count)
    for run in _list_runs(case):
        times[run.members] = _run_alike(case, run, chunks, spread, borders, exchange)
    return times


class _Run(NamedTuple):
    """Strategies whose passes are run together: their positions; the passes that are run; and how many
    groups of micro-batches each has besides [-]."""

    members: np.ndarray
    shape: PipelineShape
    groups_left_out: np.ndarray


def _list_runs(case: Case) -> list[_Run]:
    """Strategies by the passes that are run."""
    s = case.s
    columns = zip(
        s.schedule.tolist(),
        s.pp.astype(int).tolist(),
        case.micro.astype(int).tolist(),
        s.chunks.astype(int).tolist(),
        s.scattered.tolist(),
        strict=True,
    )
    members: dict[PipelineShape, list[int]] = {}
    left_out: dict[PipelineShape, list[int]] = {}
    for index, fields in enumerate(columns):
        shape = PipelineShape(*fields)
        shortened = shorten(shape)
        run = shape._replace(micro_batches=shortened.micro_batches)
        members.setdefault(run, []).append(index)
        left_out.setdefault(run, []).append(shortened.groups_left_out)
    return [_Run(np.array(members[run]), run, np.array(left_out[run])) for run in members]


def _run_alike(
    case: Case,
    run: _Run,
    chunks: _Chunks,
    spread: LayerSpread,
    borders: Borders,
    exchange: Exchange,
) -> Array:
    """Times of strategies whose passes are run together [s]."""
    members, stages = run.members, run.shape.stages
    s = case.s.select(members)
    of_members = _Members(
        spread=select(spread, members, case.count),
        s=s,
        gathers=select(exchange.gathers, members, case.count),
        layer=exchange.forward.layer[members],
        gathers_ahead=case.has_replicas[members] & (s.zero == 1) & s.overlap,
    )
    of_kinds = _Chunks(*(select(kind, members, case.count) for kind in chunks))
    in_order = _list_chunks(run.shape, of_members, of_kinds)
    messages = _list_messages(case, members, run.shape, borders)
    return run_iterations(
        run.shape,
        PipelineTimes(
            chunks=in_order,
            stages=stages,
            messages=messages.keeping,
            latencies=messages.latencies,
            is_v_shaped=is_v_shaped(run.shape),
        ),
        run.groups_left_out,
    )


def is_v_shaped(shape: PipelineShape) -> bool:
    """Say whether the stages of a pipeline are in a V.

    Parameters
    ----------
    shape : PipelineShape
        Its schedule.

    Returns
    -------
    is_v_shaped : bool
        Whether each holds two chunks.
    """
    return bool(find_schedules(shape.schedule).is_v_shaped)


class _Members(NamedTuple):
    """Strategies whose passes are run together: how their layers are spread over chunks; the
    strategies; messages that gather the weights of each unit, and the forward pass of a layer [s];
    and whether all weights are gathered ahead of the first pass."""

    spread: LayerSpread
    s: Strategy
    gathers: UnitMessages
    layer: Array
    gathers_ahead: np.ndarray


def _list_chunks(shape: PipelineShape, members: _Members, kinds: _Chunks) -> list[ChunkTimes]:
    """Times of all chunks in the order of a forward pass.

    Weights that are gathered ahead come before the first pass of a stage, one chunk after another.
    Without overlap all gradients are reduced behind its last pass.
    """
    s, spread = members.s, members.spread
    stages = shape.stages
    are_alike = not np.any(spread.longer > 0)
    gathers_ahead = bool(members.gathers_ahead.any())
    #: When the weights of the chunks so far are there [s].
    landed = [0.0 * members.layer for _ in range(stages)]
    landed[0] = landed[0] + members.gathers.embeddings
    in_order = []
    for position in range(stages * shape.chunks):
        place = find_place(position, stages, is_v_shaped=is_v_shaped(shape))
        stage, chunk = place.stage, place.chunk
        times = kinds.shorter
        if position == 0:
            times = kinds.first
        elif position == stages * shape.chunks - 1:
            times = kinds.last
        elif not are_alike:
            is_longer = spread.count_layers(s, stage, chunk) > spread.of_ends
            times = map_arrays(partial(np.where, is_longer), kinds.longer, kinds.shorter)
        gathered = times.gathered
        if gathers_ahead:
            layers = spread.count_layers(s, stage, chunk)
            landed[stage] = landed[stage] + layers * members.gathers.longest
            begin = np.maximum(landed[stage] + members.layer - times.forward, 0.0)
            gathered = np.where(members.gathers_ahead, begin, 0.0)
        if chunk > 0:
            times = times._replace(
                later_gather=np.where(s.zero == 1, 0.0, times.later_gather), gathered=gathered
            )
        if is_v_shaped(shape):
            in_order.append(times)
            continue
        if chunk > 0:
            times = times._replace(tail=np.where(s.overlap, times.tail, 0.0))
        elif stage == stages - 1 and shape.chunks > 1:
            times = times._replace(tail=np.where(s.overlap, times.tail, kinds.last.tail))
        in_order.append(times)
    if is_v_shaped(shape):
        _join_tails(in_order, s)
    return in_order


def _join_tails(in_order: list[ChunkTimes], s: Strategy) -> None:
    """Reduce gradients of both chunks of a stage in a V behind those of its first chunk, which ends
    last, without overlap."""
    for position in range(len(in_order) // 2):
        down, up = in_order[position], in_order[-1 - position]
        in_order[position] = down._replace(tail=np.where(s.overlap, down.tail, down.tail + up.tail))
        in_order[-1 - position] = up._replace(tail=np.where(s.overlap, up.tail, 0.0))


class _Messages(NamedTuple):
    """Messages from each stage to the next one, from the last to the first one, too: for how long
    each keeps its border, and how long it is on its way before [s]."""

    keeping: list[Array]
    latencies: list[Array]


def _list_messages(
    case: Case, members: np.ndarray, shape: PipelineShape, borders: Borders
) -> _Messages:
    """Messages between the stages of some strategies.

    Where messages are taken ahead, several are on their way between regions at once, so that their
    latency keeps no border. Else a stage waits for all of each.
    """
    stages = shape.stages
    schedule = find_schedules(shape.schedule)
    latency = find_far_latency(case) if schedule.takes_messages_ahead(shape.chunks) else 0.0
    network = case.platform.network
    ranks = (case.s.ranks // case.s.pp)[members]
    region = network.ranks // network.regions
    # borders hold the messages of both ways
    across = borders.across[members] / 2.0
    local = borders.local[members] / 2.0
    far = borders.far[members] / 2.0
    keeping, latencies = [], []
    for stage in range(stages):
        if stage == stages - 1:
            first, last = 0.0 * ranks, stages * ranks - 1
        else:
            first, last = stage * ranks, (stage + 2) * ranks - 1
        crosses_nodes = first // network.ranks_per_node != last // network.ranks_per_node
        crosses_regions = first // region != last // region
        message = np.where(crosses_nodes, across, local)
        keeping.append(np.where(crosses_regions, far - latency, message))
        latencies.append(np.where(crosses_regions, latency, 0.0))
    return _Messages(keeping, latencies)


def _time_chunk(
    case: Case,
    passes: Passes,
    exchange: Exchange,
    layers: Array,
    all_layers: Array,
    *,
    has_embeddings: bool = False,
    has_head: bool = False,
) -> ChunkTimes:
    """Times of the activities of a chunk of some layers and an end, if it has one, of a stage with
    some layers in all chunks.

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
    whole = backward
    backward = Work(backward.device - gradients.device, backward.host - gradients.host)
    copies = _list_exchange_work(case, layers, end_weights)
    whole_host = _add_host(case, whole, _add_work(copies.backward, copies.weights))
    forward_host = _add_host(case, forward, copies.forward)
    backward_host = _add_host(case, backward, copies.backward)
    further = _add_work(gradients, _add_work(copies.forward, copies.weights))
    gradients_host = _add_host(case, forward, further) - forward_host
    gradients_host = np.where(case.schedule.puts_off_weights, gradients_host, 0.0)
    hosts = join_exchanges(case, PassWork(forward, backward), all_layers, layers, end_weights)
    # each of the chunks takes a part of the passes
    forward_time = (forward.device + forward_host) / s.chunks
    backward_time = (backward.device + backward_host) / s.chunks
    weights_time = (gradients.device + gradients_host) / s.chunks
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
    at_once = often
    if np.any(case.schedule.is_v_shaped):
        puts_off_none = exchange._replace(put_off=np.zeros_like(exchange.put_off))
        kind = chunk._replace(backward_host=whole_host / s.chunks)
        at_once = _keep_if(s.scattered, add_to_each_pass(puts_off_none, kind))
    once = _keep_if(~s.scattered, exchange_once(exchange, chunk, all_layers))
    return ChunkTimes(
        forward=forward_time + often.forward,
        backward=backward_time + often.backward,
        weights=weights_time + often.weights,
        reduction=often.landed - often.backward,
        first_gather=once.gathering,
        later_gather=once.gathering_later,
        lead=once.lead,
        gathered=np.zeros(case.count),
        regather=once.regathering,
        last_reduction=once.reducing,
        tail=once.tail,
        queue=once.queue,
        whole=(whole.device + whole_host) / s.chunks + at_once.backward,
        whole_reduction=at_once.landed - at_once.backward,
    )


def _keep_if(chosen: np.ndarray, times: Record) -> Record:
    """Times of the chosen strategies, 0 for others."""
    return map_arrays(lambda seconds: np.where(chosen, seconds, 0.0), times)


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
        forward=_add_work(gather, _keep_if(with_forward, reduce)),
        backward=_add_work(regather, _keep_if(with_backward, reduce)),
        weights=_time_units(case, case.sizes.reduced, in_weights, None),
    )


def _time_units(
    case: Case, relative_size: Array | float, layers: Array, end_weights: Array | None
) -> Work:
    """Copies and calls around a message for each of some layers, and one for an end [s].

    `relative_size` says what the copies move, over a copy of all sums of gradients. Each message
    has a call, and a copy if there are no buffers; that of experts has its own.
    """
    s, sizes, times = case.s, case.sizes, case.times
    often = np.where(s.scattered & case.has_replicas, s.chunks, 0.0)
    reordered = sizes.gathered * sizes.reordered
    device = layers * (relative_size * times.layer.weights + reordered)
    copies = np.where(s.buffers, 0.0, 1.0)
    calls = layers * (copies + np.where(case.has_experts, 2.0, 1.0))
    if end_weights is not None:
        device = device + relative_size * end_weights
        calls = calls + copies + 1.0
    return Work(often * times.packing * device, often * calls * times.call)
