"""Strategies of parallel training in closed form: time and memory of an iteration, for many
strategies at once."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.host_memory import SIGMA_UPDATE
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import join_host
from perfkit.prediction.memory import WORKSPACE, Room, estimate_reserve
from perfkit.prediction.stage_replicas import Exchange
from perfkit.prediction.strategy_case import Case, count_updated, make_case
from perfkit.prediction.strategy_hosts import count_rounds, time_exchange_work
from perfkit.prediction.strategy_memory import count_groups, keep_by_layer, measure_strategies
from perfkit.prediction.strategy_offload import (
    count_copies,
    measure_host,
    time_activation_copies,
    time_host_update,
)
from perfkit.prediction.strategy_passes import (
    MicroBatchParts,
    Passes,
    add_leading_context,
    count_calls,
    time_micro_batch,
)
from perfkit.prediction.strategy_pipelines import Borders, Pipeline, time_pipeline
from perfkit.prediction.strategy_records import map_arrays, select
from perfkit.prediction.strategy_replicas import (
    data_parallel_exposed_time,
    list_exchange,
    price_replica_messages,
)
from perfkit.prediction.strategy_runs import find_rough, find_runnable, run_passes
from perfkit.prediction.strategy_turns import find_turns, time_turns
from perfkit.prediction.uncertainty import CONTEXT, find_host_error, join_errors
from perfkit.workloads.columns import HeldMemory
from perfkit.workloads.stack import Stack, StackedWork, apply_stack
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.strategy_fits import check_fits
from perfkit.workloads.transformer import Transformer


class StrategyTimes(NamedTuple):
    """Time of an iteration by its parts, which add up to it.

    Parameters
    ----------
    work : array
        Kernels of the slowest stage [s].
    tensor, context, experts : array
        Exposed messages among ranks that share layers, sequences and experts [s].
    host : array
        What hosts add, and copies of activations to their memory and back that no pass hides [s].
    stages : array
        Exposed messages between stages [s].
    bubble : array
        Time in which the slowest stage waits for others [s].
    replicas : array
        Exposed messages of gradients and weights among replicas, with the copies around them [s].
    update : array
        The optimizer, with copies of weights in another format [s].
    """

    work: Array
    tensor: Array
    context: Array
    experts: Array
    host: Array
    stages: Array
    bubble: Array
    replicas: Array
    update: Array

    @property
    def total(self) -> Array:
        """Time of the iteration [s]."""
        return np.asarray(sum(self))

    @property
    def busy(self) -> Array:
        """Time of all passes of the slowest stage, with the messages that they wait for [s]."""
        inside = self.work + self.tensor + self.context + self.experts
        return np.asarray(inside + self.host + self.stages)

    @property
    def messages(self) -> Array:
        """All exposed messages [s]."""
        inside = self.tensor + self.context + self.experts
        return np.asarray(inside + self.stages + self.replicas)


class StrategyPrices(NamedTuple):
    """What iterations of strategies take.

    Parameters
    ----------
    times : StrategyTimes
        Time and its parts.
    run : array of bool
        Whether passes were run [-].
    spread : array
        Standard deviation of the logarithm of the time [-].
    memory : HeldMemory
        Memory of the fullest rank.
    on_host : array
        Memory of the host that a rank takes [B].
    needs : array
        All of it, with workspaces of libraries [B].
    reserve : array
        What a process takes beside it [B].
    """

    times: StrategyTimes
    run: np.ndarray
    spread: Array
    memory: HeldMemory
    on_host: Array
    needs: Array
    reserve: Array


#: Parts of the time of an iteration.
PARTS = StrategyTimes._fields
#: How many times as long as the fastest strategy others may take, so that their passes are run:
#: closed forms of layers that do not divide were seen to err by up to 20 % (docs/accuracy.md). Those
#: of slow links are up to 75 % too fast, so that passes are run until none of the nearest is left out.
#: Of 903 pipelines that are rough (seeds 5 to 7 of `draw` in benchmarks/strategies_beside.py) closed
#: forms of none are more than 24 % too slow [-].
NEAR = 1.25


def price_strategies(
    model: Transformer,
    platform: Platform,
    strategies: Strategy,
    execution: str | None = None,
    *,
    room: Room | None = None,
    near: float = NEAR,
    stack: str | Stack | None = None,
) -> dict[str, Array]:
    """Price an iteration for each of many strategies.

    Parameters
    ----------
    model : Transformer
        The model; its batch is over all ranks. Its own settings for sharing, checkpoints and
        micro-batches are ignored.
    platform : Platform
        GPUs. Ranks that share layers are neighbours; then come those that share sequences, experts,
        and the rest of the replicas; stages are furthest apart.
    strategies : Strategy
        Each field an array, with one value for each strategy.
    execution : str, optional
        ``eager``, ``compiled`` or ``graphs``.
    room : Room, optional
        What a rank may use; by default there is no end.
    near : float, optional
        How many times as long as the fastest strategy that fits others may take, so that their
        passes are run where closed forms are rough; infinite to run those of all with stages [-].
    stack : str or Stack, optional
        The software, see `predict`; by default the usual one of each strategy.

    Returns
    -------
    columns : dict of str to array
        ``time`` and its parts, which add up to it: ``work`` of the slowest stage; exposed messages
        of ``tensor``, ``context``, ``experts`` and ``stages``; ``host``; ``bubble``; ``replicas``
        (gradients and weights); ``update`` [s]. ``run``, whether passes were run. ``spread`` of the
        logarithm of the time [-].
        ``needs``, the memory of the fullest rank, and its parts, see
        `perfkit.workloads.columns.HeldMemory`; ``reserve``, what a process takes beside it;
        ``on_host``, what a rank takes of the memory of its host [B].

    Raises
    ------
    ValueError
        For a CPU.

    Notes
    -----
    The time is that of all micro-batches on the slowest stage, of the bubble, and of what replicas
    exchange that no layer hides, or that of the passes of all stages, run one after another. A rank
    is recorded with its part of one layer; its kernels and collectives are priced by the closed forms
    of `predict`, once for all strategies that cut a layer into the same sizes.
    """
    work = apply_stack(model, strategies, execution, stack)
    prices = price_iterations(platform, work, room or Room(), near)
    columns = {"time": prices.times.total}
    for part in PARTS:
        columns[part] = getattr(prices.times, part)
    columns["run"] = prices.run
    columns["spread"] = prices.spread
    columns["needs"] = prices.needs
    columns["reserve"] = prices.reserve
    columns["on_host"] = prices.on_host
    return columns | prices.memory._asdict()


def check_device(platform: Platform) -> None:
    """Check that strategies can be priced on a platform; else a ValueError."""
    if platform.device.kind == "cpu":
        raise ValueError(
            f"platform {platform.name!r} is a CPU; strategies are priced on GPUs, such as h100-sxm-8"
        )


def price_iterations(
    platform: Platform, work: StackedWork, room: Room, near: float
) -> StrategyPrices:
    """Price an iteration for each of many strategies, see `price_strategies`.

    Parameters
    ----------
    platform : Platform
        GPUs.
    work : StackedWork
        The model, strategies whose fields are arrays, how they are executed, and the software.
    room : Room
        What a rank may use.
    near : float
        How many times as long as the fastest strategy that fits others may take, so that their
        passes are run where closed forms are rough [-].

    Returns
    -------
    prices : StrategyPrices
        Times, their spread, and memory.

    Raises
    ------
    ValueError
        For a CPU, and for strategies that `predict` refuses, too, see `check_fits`.
    """
    check_device(platform)
    check_fits(work.workload, work.strategy)
    case = add_leading_context(make_case(platform, work))

    # 1. One micro-batch, and all of them on the stages of a pipeline.
    parts = time_micro_batch(case)
    pipeline = time_pipeline(case, parts)
    times = _add_up_micro_batches(case, parts, pipeline)

    # 2. What replicas exchange that no layer hides, the update, and the host of a single stage.
    kept = keep_by_layer(case)
    host = _join_whole_iteration(case, parts, times).host
    beside = _find_work_beside(case, parts, pipeline, times, host)
    exchange = beside.exchange
    replicas = data_parallel_exposed_time(
        case, beside.parts, pipeline, exchange, beside.kernel_share
    )
    in_turn = np.flatnonzero(find_turns(case))
    if len(in_turn):
        of_turns = time_turns(platform, work, in_turn, _list_exchange_of_kind)
        replicas[in_turn] = np.maximum(replicas[in_turn], of_turns)
    times = times._replace(replicas=replicas, update=optimizer_time(case))
    times = _join_whole_iteration(case, parts, times)
    waited = np.where(case.s.scattered, times.replicas, 0.0)
    copies = time_activation_copies(case, parts.passes, kept, host + waited)
    times = times._replace(host=times.host + copies.total)

    # 3. Memory.
    held = measure_strategies(case)
    needs = held.total + WORKSPACE
    reserve = estimate_reserve(needs, count_groups(case))
    fits = room.holds(needs, reserve)

    # 4. Passes of stages: of all strategies, or of the best whose closed forms are rough.
    run = np.zeros(case.count, dtype=bool)
    waiting = find_runnable(case)
    if np.isfinite(near):
        waiting = waiting & find_rough(case, parts.passes, pipeline.borders)
    # passes that take longer than their closed forms bring others near the fastest
    while True:
        chosen = waiting & ~run
        if np.isfinite(near):
            chosen = chosen & _find_near(case.level_scale * times.total, fits, near)
        if not chosen.any():
            break
        times = _run_chosen(case, parts.passes, pipeline.borders, exchange, times, chosen)
        run = run | chosen
    spread = _estimate_spread(case, times)

    # 5. The level of the software.
    times = map_arrays(lambda seconds: case.level_scale * seconds, times)
    return StrategyPrices(times, run, spread, held, measure_host(case, kept), needs, reserve)


class _WorkBeside(NamedTuple):
    """What replicas exchange, passes with the copies that hide it, and the share of a pass that its
    kernels take [-]."""

    parts: MicroBatchParts
    exchange: Exchange
    kernel_share: Array


def _find_work_beside(
    case: Case, parts: MicroBatchParts, pipeline: Pipeline, times: StrategyTimes, host: Array
) -> _WorkBeside:
    """What replicas exchange in an iteration, to which hosts add some time [s], and what hides it."""
    copies = time_activation_copies(case, parts.passes, keep_by_layer(case), host)
    # copies hide messages that are sent once; messages with each micro-batch hide copies
    hiding = map_arrays(partial(np.where, case.s.scattered, 0.0), copies)
    longer = parts._replace(passes=hiding.lengthen(parts.passes))
    kernel_share = _find_kernel_share(case, times, hiding.total)
    messages = price_replica_messages(case)
    exchange = list_exchange(case, longer, pipeline, messages, kernel_share)
    return _WorkBeside(longer, exchange, kernel_share)


def _list_exchange_of_kind(case: Case) -> Exchange:
    """What replicas exchange in an iteration of a model whose layers are all of one kind."""
    parts = time_micro_batch(case)
    pipeline = time_pipeline(case, parts)
    times = _add_up_micro_batches(case, parts, pipeline)
    host = _join_whole_iteration(case, parts, times).host
    return _find_work_beside(case, parts, pipeline, times, host).exchange


def _add_up_micro_batches(case: Case, parts: MicroBatchParts, pipeline: Pipeline) -> StrategyTimes:
    """Times of all micro-batches on the slowest stage, and the bubble, without replicas and
    update."""
    none = np.zeros(case.count)
    return StrategyTimes(
        work=case.micro * parts.compute.slowest,
        tensor=case.micro * parts.tensor.slowest,
        context=case.micro * case.layers * parts.context.both,
        experts=case.micro * case.layers * parts.experts.both,
        host=case.micro * pipeline.host,
        stages=case.micro * pipeline.stage_messages,
        bubble=pipeline.bubble,
        replicas=none,
        update=none,
    )


def _find_kernel_share(case: Case, times: StrategyTimes, copies: Array) -> Array:
    """Share of a pass that its kernels take, with their host [-]; it waits for `copies` besides [s].

    Messages of experts come before the kernels of a layer, and the host of a stage behind its pass.
    """
    host = np.where(case.has_stages, 0.0, times.host)
    kernels = times.work + host
    return np.asarray(kernels / (kernels + times.tensor + times.context + copies))


def optimizer_time(case: Case) -> Array:
    """Time of the update.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    time : array
        Of the optimizer on a rank of the first stage, and of the copies of weights in the format of
        layers [s].

    Notes
    -----
    It takes as long as its traffic, in proportion to the weights that a rank updates: all of the
    first stage, or its shard (ZeRO). FSDP casts shards when it gathers them. The host updates what
    is offloaded beside the device.
    """
    casts = np.where(case.shards_alone, 0.0, case.times.weight_casts.device)
    updated = count_updated(case)
    on_device = (1.0 - case.offload.fraction) * (case.times.update.device + casts) * updated
    return np.asarray(np.maximum(on_device, time_host_update(case, updated)))


def _join_whole_iteration(
    case: Case, parts: MicroBatchParts, times: StrategyTimes
) -> StrategyTimes:
    """The same with the host of replicas of the whole model, which waits for nothing: it and its
    device join once in an iteration."""
    casts = np.where(case.s.zero > 0, 0.0, case.times.weight_casts.host)
    exchange = time_exchange_work(case, count_rounds(case)).host
    exchange = np.where(case.in_buckets, case.times.buckets.host, exchange)
    calls = case.micro * count_calls(case, parts.passes)
    # as in the event loop, which runs passes of replicas that offload activations one by one: their
    # update is not waited for; and an update of the host alone launches nothing
    is_by_pass = np.not_equal(case.s.offload, "none") & np.equal(case.s.zero, 0)
    # an update whose host waits has joined both already
    is_apart = is_by_pass | find_optimizer(case.model.optimizer).host_waits
    launches = ~is_apart & (case.offload.fraction < 1.0)
    calls = calls + exchange + np.where(launches, case.times.update.host + casts, 0.0)
    calls = calls + count_copies(case, count_rounds(case)) * case.times.call
    device = times.total - np.where(is_apart, times.update, 0.0)
    added = join_host(device, calls, case.whole) - device
    return times._replace(host=np.where(case.s.alone, added, times.host))


def _find_near(time: Array, fits: np.ndarray, near: float) -> np.ndarray:
    """Whether each strategy fits, and takes at most some times as long as the fastest that fits."""
    if not fits.any():
        return fits
    return np.asarray(fits & (time <= near * time[fits].min()))


def _run_chosen(
    case: Case,
    passes: Passes,
    borders: Borders,
    exchange: Exchange,
    times: StrategyTimes,
    run: np.ndarray,
) -> StrategyTimes:
    """The same with times of the chosen strategies whose passes are run.

    The bubble is what this time is longer than the other parts. Messages of replicas are shorter if
    it would be below 0, and so are all parts of a stage if it is shorter than these.
    """
    chosen = np.flatnonzero(run)
    total = run_passes(
        case.select(chosen),
        select(passes, chosen, case.count),
        select(borders, chosen, case.count),
        select(exchange, chosen, case.count),
    )
    before = select(times, chosen, case.count)
    waits = np.maximum(total - before.busy, 0.0)
    replicas = np.minimum(before.replicas, waits)
    shorter = np.minimum(total / before.busy, 1.0)
    after = before._replace(
        work=before.work * shorter,
        tensor=before.tensor * shorter,
        context=before.context * shorter,
        experts=before.experts * shorter,
        host=before.host * shorter,
        stages=before.stages * shorter,
        bubble=waits - replicas,
        replicas=replicas,
    )

    def put(of_all: Array, of_chosen: Array) -> Array:
        changed = of_all.copy()
        changed[chosen] = of_chosen
        return changed

    return map_arrays(put, times, after)


def _spread_over_nodes(case: Case, times: StrategyTimes) -> Array:
    """Extra spread of the time, as messages span more nodes than were measured [-].

    Messages among ranks that share layers, sequences or experts, which fill nodes first, span the nodes
    of their own ranks; those of replicas span all of them.
    """
    network = case.platform.network
    if network.nodes == 1:
        return np.zeros(case.count)
    from perfkit.platform.collective_fits import grow_beyond  # only several nodes need it

    def grow(ranks: Any) -> Array:
        """Growth of messages among so many ranks, which fill one node after the other [-]."""
        nodes = np.ceil(np.broadcast_to(ranks, case.count) / network.ranks_per_node)
        growths = {count: grow_beyond(case.platform, int(count)) for count in np.unique(nodes)}
        return np.array([growths[count] for count in nodes])

    s = case.s
    seconds = (
        times.tensor * grow(s.tp)
        + times.context * grow(s.tp * s.cp)
        + times.experts * grow(s.apart_for_experts * s.ep)
        + times.replicas * grow(s.ranks)
    )
    return np.asarray(seconds / times.total)


def _estimate_spread(case: Case, times: StrategyTimes) -> Array:
    """Standard deviation of the logarithm of the time [-]."""
    message_share = times.messages / times.total
    kernels = case.times.spread * (1 - message_share)
    is_assumed = np.zeros(1, dtype=bool)
    around = CONTEXT if case.whole is None else case.whole.spread
    device = join_errors(kernels[np.newaxis], is_assumed, message_share, around)
    # a level of software holds all errors but those of hosts, and of networks of more nodes
    device = np.where(np.isnan(case.level_spread), device, case.level_spread)
    device = np.hypot(device, _spread_over_nodes(case, times))
    host_error = np.log(find_host_error(case.platform, case.execution))
    spread = np.hypot(device, times.host / times.total * host_error)
    update = np.where(case.s.offloads_optimizer, SIGMA_UPDATE * times.update / times.total, 0.0)
    return np.asarray(np.hypot(spread, update))
