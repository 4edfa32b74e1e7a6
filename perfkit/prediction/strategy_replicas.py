"""Messages among replicas of strategies: gradients that are reduced and weights that are gathered,
beside the passes of a pipeline."""

from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.prediction.replicas import (
    ShardedPass,
    UnitMessages,
    UnitTimes,
    time_gathering_forward,
    time_scattering_backward,
)
from perfkit.prediction.stage_replicas import (
    Exchange,
    StageKind,
    StageKinds,
    add_to_each_pass,
    slow_passes,
    time_each_micro_batch,
    time_once,
)
from perfkit.prediction.strategy_case import Case
from perfkit.prediction.strategy_hosts import (
    count_rounds,
    time_exchange_work,
    time_shard_copies,
)
from perfkit.prediction.strategy_offload import time_gradient_copies, time_shard_copies_of_host
from perfkit.prediction.strategy_passes import MicroBatchParts, Passes
from perfkit.prediction.strategy_pipelines import (
    Pipeline,
    Stage,
    Stages,
    time_alternating,
)
from perfkit.prediction.strategy_records import SMALLEST_TIME, ByRegion, Work, select


class ReplicaMessages(NamedTuple):
    """Messages of one exchange of all that replicas share.

    Parameters
    ----------
    gathers, reductions : UnitMessages
        Those of the weights and of the gradients of each unit [s].
    """

    gathers: UnitMessages
    reductions: UnitMessages


def data_parallel_exposed_time(
    case: Case,
    parts: MicroBatchParts,
    pipeline: Pipeline,
    exchange: Exchange,
    kernel_share: Array,
) -> Array:
    """Exposed time of the messages of gradients and weights among replicas, with the copies around
    them.

    Parameters
    ----------
    case : Case
        Strategies.
    parts : MicroBatchParts
        One micro-batch.
    pipeline : Pipeline
        Iterations without these messages.
    exchange : Exchange
        Messages and passes that may hide them.
    kernel_share : array
        Share of a pass that its kernels take, with the host [-].

    Returns
    -------
    time : array
        What they add to an iteration [s].

    Notes
    -----
    Where gradients are reduced once, the iteration begins with what the first stage waits for its
    weights; other stages gather theirs while they wait for the first micro-batch. It ends when the
    gradients of the first stage have landed, whose last backward pass is the last of all. Before
    that come the last backward passes of the other stages, which copies and messages make longer;
    theirs land while the stages before them compute.
    """
    scattered = case.s.scattered
    beside_stages = case.has_messages & ~case.shards_alone & ~case.in_buckets
    time = np.zeros(case.count)
    once = np.flatnonzero(beside_stages & ~scattered)
    if len(once):
        time[once] = time_once(select(exchange, once, case.count))
    timed_again = case.alternates & scattered
    often = np.flatnonzero(beside_stages & scattered & ~timed_again)
    if len(often):
        time[often] = time_each_micro_batch(select(exchange, often, case.count))
    if np.any(timed_again):
        time = np.where(timed_again, _lengthen_pipeline(case, pipeline, exchange), time)
    serial = case.shards_alone & ~case.s.overlap
    if np.any(serial):
        time = np.where(serial, _exchange_serially(case, exchange), time)
    hidden = np.flatnonzero(case.shards_alone & case.s.overlap)
    if len(hidden):
        time[hidden] = _share_alone(
            case.select(hidden),
            select(parts.passes, hidden, case.count),
            select(exchange, hidden, case.count),
            kernel_share[hidden],
        )
    # copies may fill time in which a device waits for its host
    time = np.maximum(time, 0.0)
    return np.asarray(np.where(case.in_buckets, case.times.buckets.device, time))


def price_replica_messages(case: Case) -> ReplicaMessages:
    """Price the messages of one exchange among replicas.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    messages : ReplicaMessages
        Of the weights and of the gradients of each unit.

    Notes
    -----
    With hybrid sharding, the sums of each group are added up over groups, on a communicator of their
    own: while the sums of one layer go from group to group, those of the next layer are reduced.
    Gradients that are offloaded go to the host behind their reduction, and shards of weights come from
    it before they are gathered.
    """
    s, sizes = case.s, case.sizes
    owners = s.owners
    shared = np.where(s.zero > 0, owners, 1)
    in_group = owners // shared
    groups = s.dp * s.cp // owners
    sent = case.times.list_by_region(lambda region: region.sent)
    trained = case.times.list_by_region(lambda region: region.trained)
    gathers = _send(case, "all_gather", sent, sizes.itemsize, shared)
    reductions = np.zeros_like(gathers)
    if np.any(shared > 1):
        reductions = reductions + _send(case, "reduce_scatter", trained, sizes.summed, shared)
    if np.any(in_group > 1):
        reductions = reductions + _send(case, "all_reduce", trained, sizes.summed, in_group)
    if np.any(groups > 1):
        across = _send(
            case, "all_reduce", trained, sizes.summed, groups, stride=owners, shards=shared
        )
        together = np.maximum(reductions, across)
        of_layer = np.maximum(reductions[3], across[1])
        together[1], together[3] = reductions[1], of_layer
        reductions = np.where(groups > 1, together, reductions)
    reductions = reductions + np.stack(time_gradient_copies(case))
    gathers = gathers + np.stack(time_shard_copies_of_host(case))
    return ReplicaMessages(UnitMessages(*gathers), UnitMessages(*reductions))


def _send(
    case: Case,
    operation: str,
    weights: ByRegion[Array],
    itemsize: float,
    ranks: Array,
    stride: Any = 1,
    shards: Any = 1,
) -> Array:
    """Times of messages of the numbers of some weights of the embeddings, of a layer, of the head,
    and of the experts of a layer, a row each [s].

    `ranks` of replicas take part, `stride` replicas apart, each with one of some `shards`. Experts
    are shared by fewer ranks; those that all replicas hold go with the rest of their layer. Replicas
    of the whole model that share states send both ends in one message.
    """
    s = case.s
    has_experts = case.model.experts > 0
    experts = np.where(case.has_experts, case.sizes.experts, 0.0)
    sharers_of_experts = s.ep * s.ranks_of_expert
    replicas_of_experts = np.maximum(ranks * s.tp // sharers_of_experts, 1)
    ranks_of_experts = np.where(case.has_experts, replicas_of_experts, 1)
    both_ends = weights.embeddings + weights.head
    numbers = np.stack(
        [
            np.where(case.shards_alone, both_ends, weights.embeddings),
            weights.layer - experts,
            np.where(case.shards_alone, 0.0, weights.head),
            experts,
        ]
    )
    taking_part = np.stack([ranks, ranks, np.where(case.shards_alone, 1, ranks), ranks_of_experts])
    distance = s.tp * stride * np.ones_like(ranks_of_experts)
    distances = np.stack(
        [distance, distance, distance, sharers_of_experts * stride * np.ones_like(distance)]
    )
    rows = slice(4) if has_experts else slice(3)
    times = np.zeros(numbers.shape)
    times[rows] = case.messages.time(
        operation, itemsize * numbers[rows] / shards, taking_part[rows], distances[rows]
    )
    return np.where(numbers > 0, times, 0.0)


def share_of_messages(case: Case, messages: ReplicaMessages) -> Array:
    """Share of collectives in what runs beside passes: copies to the host slow no kernels.

    Parameters
    ----------
    case : Case
        Strategies.
    messages : ReplicaMessages
        Messages, with copies to the host.

    Returns
    -------
    share : array
        1 without offload [-].
    """
    if not np.any(case.s.offloads_optimizer):
        return np.ones(case.count)
    layer = messages.gathers.layer + messages.gathers.experts
    layer = layer + messages.reductions.layer + messages.reductions.experts
    copies = time_gradient_copies(case).layer + time_shard_copies_of_host(case).layer
    return np.asarray(1.0 - copies / np.maximum(layer, SMALLEST_TIME))


def list_exchange(
    case: Case,
    parts: MicroBatchParts,
    pipeline: Pipeline,
    messages: ReplicaMessages,
    kernel_share: Array,
) -> Exchange:
    """Say what stages and their replicas do in an iteration.

    Parameters
    ----------
    case : Case
        Strategies.
    parts : MicroBatchParts
        One micro-batch.
    pipeline : Pipeline
        Iterations without messages of replicas.
    messages : ReplicaMessages
        Of one exchange among replicas.
    kernel_share : array
        Share of a pass that its kernels take, with the host [-].

    Returns
    -------
    exchange : Exchange
        Of all strategies.
    """
    s, sizes = case.s, case.sizes
    packing = np.where(case.has_replicas, case.times.packing, 0.0)
    gather = packing * sizes.gathered
    # whole gradients are unpacked once more
    reduce = packing * sizes.reduced * np.where(s.zero > 0, 1.0, 2.0)
    reordered = gather * sizes.reordered
    sent = case.times.list_by_region(lambda region: region.sent)
    trained = case.times.list_by_region(lambda region: region.trained)
    forward = _list_kernels(case, parts, parts.passes.forward)
    backward = _list_kernels(case, parts, parts.passes.backward)
    contention = case.contention * share_of_messages(case, messages)
    return Exchange(
        kinds=_list_kinds(case, pipeline.stages),
        micro=case.micro,
        chunks=s.chunks,
        pp=s.pp,
        zero=s.zero,
        overlap=s.overlap,
        put_off=s.puts_off_weights,
        phase_by_phase=case.schedule.runs_phase_by_phase,
        breadth_first=case.schedule.runs_breadth_first,
        forward=forward,
        backward=backward,
        delayed=case.times.weight_gradients.device,
        gather_copies=_copy_units(sent, gather, reordered),
        reduce_copies=_copy_units(trained, reduce, reordered),
        gathers=messages.gathers,
        reductions=messages.reductions,
        forward_lead=parts.experts.forward,
        lead=parts.experts.backward,
        border=pipeline.borders.inside / 2.0,
        contention=slow_passes(kernel_share, contention),
    )


def _copy_units(weights: ByRegion[Array], time_of_number: Array, reordered: Array) -> UnitTimes:
    """Copies of the numbers of each unit before a message, by the time of one number, and those of
    experts in another order, which are part of a layer [s]."""
    return UnitTimes(
        time_of_number * weights.embeddings,
        time_of_number * weights.layer + reordered,
        time_of_number * weights.head,
    )


def _list_kernels(case: Case, parts: MicroBatchParts, one_pass: ByRegion[Work]) -> UnitTimes:
    """Kernels of each unit in a pass [s].

    The host of a single stage waits for no messages between passes, and what it adds is spread over
    units.
    """
    has_own_host = case.has_stages | case.s.alone
    units_of_passes = 2.0 * (case.layers + 2.0)
    host = np.where(has_own_host, 0.0, parts.hosts.slowest / units_of_passes)
    return UnitTimes(
        one_pass.embeddings.device + host,
        one_pass.layer.device + host,
        one_pass.head.device + host,
    )


def _list_kinds(case: Case, stages: Stages) -> StageKinds:
    """The first stage, those between the ends, in units of the largest of them, and the last one."""
    several = case.has_stages
    inner_layers = case.all_layers - stages.first.layers - stages.last.layers
    inner = inner_layers / np.maximum(stages.inner.layers, 1.0)
    inner = np.where(case.s.pp > 2, inner, 0.0)
    one = np.ones(case.count)
    second = np.where(several, 1.0, 0.0)
    never, always = np.zeros(case.count, dtype=bool), np.ones(case.count, dtype=bool)
    return StageKinds(
        first=_make_kind(case, stages.first, one, has_embeddings=always, has_head=~several),
        inner=_make_kind(case, stages.inner, inner, has_embeddings=never, has_head=never),
        last=_make_kind(case, stages.last, second, has_embeddings=never, has_head=several),
    )


def _make_kind(
    case: Case, stage: Stage, number: Array, *, has_embeddings: np.ndarray, has_head: np.ndarray
) -> StageKind:
    """Some `number` of stages like one; the host of a single stage waits for no messages."""
    return StageKind(
        number=number,
        layers=np.maximum(stage.layers, 1.0),
        has_embeddings=has_embeddings,
        has_head=has_head,
        forward_host=np.where(case.has_stages, stage.forward_host, 0.0),
        backward_host=np.where(case.has_stages, stage.backward_host, 0.0),
        first_host=np.where(case.has_stages, stage.first_host, 0.0),
        last_host=np.where(case.has_stages, stage.last_host, 0.0),
    )


def _lengthen_pipeline(case: Case, pipeline: Pipeline, exchange: Exchange) -> Array:
    """Time that messages of replicas with each micro-batch add to stages that do a forward and
    a backward pass in turn [s]."""
    longer = []
    all_stages = pipeline.all_stages
    for stage, kind in zip(pipeline.stages, exchange.kinds, strict=True):
        added = add_to_each_pass(exchange, kind)
        both_passes = added.forward + added.backward + added.weights
        all_stages = all_stages + kind.number * both_passes
        longer.append(
            stage._replace(
                forward=stage.forward + added.forward,
                backward=stage.backward + added.backward + added.weights,
                weight_gradients=stage.weight_gradients + added.weights,
                landing=added.landed - added.backward,
            )
        )
    time = time_alternating(
        case, Stages(*longer), pipeline.borders, all_stages, pipeline.region_messages
    )
    return np.asarray(time - pipeline.pass_by_pass)


def _exchange_serially(case: Case, exchange: Exchange) -> Array:
    """Messages of shards and the copies around them, if nothing hides them [s]."""
    rounds = count_rounds(case)
    gathers, reductions = exchange.gathers, exchange.reductions
    layers = case.layers * (gathers.layer + gathers.experts)
    gathered = layers + gathers.embeddings + gathers.head
    reduced = case.layers * (reductions.layer + reductions.experts)
    reduced = reduced + reductions.embeddings + reductions.head
    time = rounds.reduced * reduced + rounds.gathered * gathered + rounds.regathered * layers
    return np.asarray(time + time_exchange_work(case, rounds).device)


def _share_alone(case: Case, passes: Passes, exchange: Exchange, kernel_share: Array) -> Array:
    """Time that messages of shards and the copies around them add to the passes of a single stage
    [s].

    Notes
    -----
    Copies of shards ahead of the first two messages, and sums of the last shards, run beside a
    message that the next pass waits for.
    """
    messages = ReplicaMessages(exchange.gathers, exchange.reductions)
    contention = case.contention * kernel_share * share_of_messages(case, messages)
    copies = time_shard_copies(case)
    gathers, reductions = exchange.gathers, exchange.reductions
    layer_gather = gathers.layer + gathers.experts
    regathers = case.s.zero > 2
    regather = np.where(regathers, layer_gather, 0.0)
    forward = _list_units(case, passes.forward)
    backward = _list_units(case, passes.backward)
    later = (case.micro - 1.0) / case.micro
    ahead = copies.ends_ahead + copies.layer_ahead
    beside_gradients = np.where(case.s.scattered, later * ahead, 0.0)
    sums = np.where(case.s.scattered, case.end_shard_sums, 0.0)
    gathering, left = time_gathering_forward(
        forward._replace(
            first=forward.first + copies.gather_ends - copies.ends_ahead,
            layer=forward.layer + copies.gather_layer,
        ),
        gathers.embeddings + gathers.head,
        layer_gather,
        regather,
        copies.layer_ahead,
        contention,
    )
    gathering = gathering + copies.ends_ahead - beside_gradients
    regather_copies = np.where(regathers, copies.regather_layer, 0.0)
    scattering = time_scattering_backward(
        backward._replace(
            first=backward.last,
            last=backward.first - sums,
            layer=backward.layer + copies.reorder_gradients + regather_copies,
        ),
        reductions.embeddings + reductions.head,
        reductions.layer + reductions.experts,
        regather,
        left,
        copies.scatter_layer - copies.reorder_gradients,
        copies.scatter_ends,
        sums + beside_gradients,
        contention,
    )
    rounds = count_rounds(case)
    gathered = rounds.gathered * (gathering - forward.alone)
    return np.asarray(gathered + rounds.reduced * (scattering - backward.alone))


def _list_units(case: Case, one_pass: ByRegion[Work]) -> ShardedPass:
    """Kernels of the units of a pass in the order of the forward pass; that of the embeddings may hold
    what a frozen first layer takes less than others, which hides no message."""
    return ShardedPass(
        first=np.maximum(one_pass.embeddings.device, 0.0),
        layer=one_pass.layer.device,
        last=one_pass.head.device,
        layers=case.layers,
    )
