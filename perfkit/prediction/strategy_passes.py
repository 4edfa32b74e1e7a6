"""Passes of one micro-batch of strategies: kernels, messages inside of stages, and what their host
adds."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.checkpoints import recomputes
from perfkit.models.experts import DISPATCH
from perfkit.models.partitions import time_beside
from perfkit.prediction.micro_batches import PassWork, PhaseTimes
from perfkit.prediction.strategy_case import (
    Case,
    add_all_stages,
    add_slowest_end,
    add_slowest_stage,
    share_recomputed,
    stack_calls,
    stack_compute,
    stack_tensor_messages,
)
from perfkit.prediction.strategy_hosts import join_stage, time_exchange_of_micro_batch
from perfkit.prediction.strategy_records import SMALLEST_TIME, ByRegion, Work, map_arrays


class StageTimes(NamedTuple):
    """Time of a micro-batch.

    Parameters
    ----------
    slowest : array
        On the slowest stage [s].
    all_stages : array
        On all stages, one after another [s].
    """

    slowest: Array
    all_stages: Array


class ContextMessages(NamedTuple):
    """Messages among ranks that share sequences, in the passes of a layer.

    Parameters
    ----------
    forward, backward : array
        What attention does not hide [s].
    forward_calls, backward_calls : array
        Calls of the host [-].
    """

    forward: Array
    backward: Array
    forward_calls: Array
    backward_calls: Array

    @property
    def both(self) -> Array:
        """Of both passes [s]."""
        return self.forward + self.backward


class ExpertMessages(NamedTuple):
    """Messages among ranks that share experts, in the passes of a layer.

    Parameters
    ----------
    forward, backward : array
        What the kernels of another micro-batch do not hide, in the mean of micro-batches, with what
        these take longer beside messages [s].
    calls_forward, calls_backward : array
        Calls of the host [-].
    """

    forward: Array
    backward: Array
    calls_forward: Array
    calls_backward: Array

    @property
    def both(self) -> Array:
        """Of both passes [s]."""
        return self.forward + self.backward


class Passes(NamedTuple):
    """Both passes of a micro-batch, with the messages inside of stages.

    Parameters
    ----------
    forward, backward : ByRegion of Work
        Through the embeddings, one layer, and the head [s].
    """

    forward: ByRegion[Work]
    backward: ByRegion[Work]


class StageHosts(NamedTuple):
    """Time that hosts add to a micro-batch of a stage, if stages did not wait for one another.

    Parameters
    ----------
    slowest : array
        Of the stage that is the slowest without its host [s].
    inner : array
        Of one between the ends [s].
    either : array
        Of the first of both; or by how much longer the second one takes with its host, if that is
        more [s].
    """

    slowest: Array
    inner: Array
    either: Array


class MicroBatchParts(NamedTuple):
    """One micro-batch, part by part.

    Parameters
    ----------
    compute : StageTimes
        Kernels [s].
    tensor : StageTimes
        Messages among ranks that share layers: what no kernel hides, with what they slow kernels [s].
    context : ContextMessages
        Messages among ranks that share sequences.
    experts : ExpertMessages
        Messages among ranks that share experts.
    passes : Passes
        Passes with all of these.
    exchange : Work
        Copies and calls around messages of replicas, in the mean of micro-batches [s].
    hosts : StageHosts
        What hosts add.
    """

    compute: StageTimes
    tensor: StageTimes
    context: ContextMessages
    experts: ExpertMessages
    passes: Passes
    exchange: Work
    hosts: StageHosts


def time_micro_batch(case: Case) -> MicroBatchParts:
    """Time one micro-batch of each strategy.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    parts : MicroBatchParts
        Its kernels, messages and hosts.
    """
    compute = compute_time(case)
    tensor = tensor_parallel_time(case)
    context = context_parallel_time(case)
    experts = expert_parallel_time(case)
    passes = Passes(
        forward=_add_messages(
            case,
            _list_regions(case, backward=False),
            context.forward + experts.forward,
            context.forward_calls + experts.calls_forward,
        ),
        backward=_add_messages(
            case,
            _list_regions(case, backward=True),
            context.backward + experts.backward,
            context.backward_calls + experts.calls_backward,
        ),
    )
    exchange = time_exchange_of_micro_batch(case)
    hosts = _time_hosts(case, passes, exchange)
    return MicroBatchParts(compute, tensor, context, experts, passes, exchange, hosts)


def compute_time(case: Case) -> StageTimes:
    """Time of the kernels of a micro-batch.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    times : StageTimes
        Forward and backward pass.

    Notes
    -----
    A stage of l layers takes l t, with t the kernels of one layer; those at the ends take besides
    what embeddings and head do.
    """
    compute = case.times.list_by_region(stack_compute)
    return StageTimes(add_slowest_stage(case, compute), add_all_stages(case, compute))


def tensor_parallel_time(case: Case) -> StageTimes:
    """Exposed time of the messages among ranks that share layers, with what they slow kernels.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    exposed : StageTimes
        Of a micro-batch [s].

    Notes
    -----
    Nothing hides them but where ranks exchange tiles of a product while they compute others
    (`Strategy.tiled`), see `perfkit.prediction.tiles`.
    """
    messages = case.times.list_by_region(stack_tensor_messages)
    return StageTimes(add_slowest_stage(case, messages), add_all_stages(case, messages))


def context_parallel_time(case: Case) -> ContextMessages:
    """Exposed time of the messages among ranks that share sequences.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    messages : ContextMessages
        Of the passes of one layer.

    Notes
    -----
    ``ring``: keys and values go around a ring of c ranks beside attention, in the backward pass
    their gradients too: of c - 1 steps of time t, (c - 1) max(t - a / c, 0) is left, with a the time
    of attention [1]_. A ring that leaves a node is as slow as its slowest step.

    ``all_gather``: keys and values of the whole sequence are gathered, each in one message, once more
    in the backward pass, where two reduce_scatter of their gradients follow, as Transformer Engine
    does it (``AttnFuncWithCPAndKVAllGather``). Nothing hides them [3]_.

    ``ulysses``: tokens are exchanged for heads, in four all_to_all of each pass that nothing
    hides: queries, keys, values and outputs [2]_.

    Attention is computed again with its messages.

    References
    ----------
    .. [1] H. Liu et al., "Ring attention with blockwise Transformers for near-infinite context",
       2023, arXiv:2310.01889
    .. [2] S. A. Jacobs et al., "DeepSpeed Ulysses: System optimizations for enabling training of
       extreme long sequence Transformer models", 2023, arXiv:2309.14509
    .. [3] Llama team, "The Llama 3 herd of models", 2024, arXiv:2407.21783, section 3.3.2
    """
    s, keys, attention = case.s, case.sizes.keys, case.times.attention
    gathers = s.cp_kind == "all_gather"
    swaps = s.cp_kind == "ulysses"
    on_ring = np.where(gathers | swaps, 1, s.cp)
    steps = case.messages.time("send_recv", np.stack([2.0 * keys, 4.0 * keys]), on_ring, s.tp)
    gathering = np.where(gathers, s.cp, 1)
    gather = case.messages.time("all_gather", s.cp * keys, gathering, s.tp)
    reduction = case.messages.time("reduce_scatter", s.cp * keys, gathering, s.tp)
    exchanging = np.where(swaps, s.cp, 1)
    exchange = case.messages.time("all_to_all", case.sizes.swapped, exchanging, s.tp)
    is_shared = np.where(s.cp > 1, 1.0, 0.0)

    def expose(step: Array, beside: Work, *, reductions: int) -> Array:
        """What is left of the messages of a pass that reduces the gradients of keys and values, or
        nothing."""
        time = (s.cp - 1) * np.maximum(step - beside.device / s.cp, 0.0)
        time = np.where(gathers, 2.0 * gather + reductions * reduction, time)
        return np.where(swaps, 4.0 * exchange, time)

    def count_calls(beside: Work, *, reductions: int) -> Array:
        # each step of a ring with its kernels
        kernels = beside.host / np.maximum(case.times.call, SMALLEST_TIME)
        calls = (s.cp - 1) * (1.0 + kernels)
        calls = np.where(gathers, is_shared * (2.0 + reductions), calls)
        return np.where(swaps, is_shared * 4.0, calls)

    forward = expose(steps[0], attention.forward, reductions=0)
    backward = expose(steps[1], attention.backward, reductions=2)
    backward_calls = count_calls(attention.backward, reductions=2)
    calls_again = count_calls(attention.again, reductions=0)
    share = share_recomputed(s, case.layers)
    recomputed = np.where(recomputes(s.checkpoint, "attention"), share, 0.0)
    return ContextMessages(
        forward=forward,
        backward=backward + recomputed * forward,
        forward_calls=count_calls(attention.forward, reductions=0),
        backward_calls=backward_calls + recomputed * calls_again,
    )


def add_leading_context(case: Case) -> Case:
    """Add messages among ranks that share sequences to layers that go with the embeddings.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    case : Case
        With exposed messages, and their calls, in the passes of the embeddings.
    """
    if not np.any(case.leading > 0):
        return case
    messages = context_parallel_time(case)
    embeddings = case.times.embeddings
    call = case.leading * case.times.call
    forward = embeddings.forward._replace(
        device=embeddings.forward.device + case.leading * messages.forward,
        host=embeddings.forward.host + call * messages.forward_calls,
    )
    backward = embeddings.backward._replace(
        device=embeddings.backward.device + case.leading * messages.backward,
        host=embeddings.backward.host + call * messages.backward_calls,
    )
    embeddings = embeddings._replace(forward=forward, backward=backward)
    return replace(case, times=case.times._replace(embeddings=embeddings))


def expert_parallel_time(case: Case) -> ExpertMessages:
    """Time of the messages among ranks that share experts.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    messages : ExpertMessages
        Of the passes of one layer.

    Notes
    -----
    Tokens go to experts and come back: two all_to_all in each pass, and two more in a backward pass
    that computes the whole layer again. In two levels they are first gathered in each node. Sent
    once, a token crosses each link as often as `perfkit.models.experts.dispatched_bytes` says.
    The rank that gets most of them decides.

    Nothing hides them but where the forward pass of one micro-batch runs beside the backward pass of
    another (`Strategy.overlap_experts`). Then messages run beside the kernels of a layer in the other
    pass, see `perfkit.models.partitions.time_beside`. The first forward passes and the last backward
    passes have no partner.

    References
    ----------
    .. [1] C. Hwang et al., "Tutel: Adaptive mixture-of-experts at scale", 2022, arXiv:2206.03382,
       section 3.4 (two levels)
    """
    s, routed = case.s, case.sizes.routed
    stride = s.apart_for_experts
    once = np.equal(s.dispatch, "once")
    in_one_level = np.where(s.two_level | once, 1, s.ep)
    in_two_levels = np.where(s.two_level, s.ep, 1)
    message = case.messages.time("all_to_all", routed, in_one_level, stride)
    message = message + case.messages.time("all_to_all", routed, in_two_levels, stride, "two_level")
    if case.model.experts and np.any(once):
        sent = case.messages.size_dispatched(
            case.sizes.tokens * case.sizes.load,
            s.ep,
            stride,
            case.model,
        )
        message = message + case.messages.time(DISPATCH, sent, np.where(once, s.ep, 1), stride)
    share = share_recomputed(s, case.layers)
    in_backward = 2.0 + np.where(recomputes(s.checkpoint, "experts"), 2.0 * share, 0.0)
    sends = (s.ep > 1) & (case.model.experts > 0)
    # of layers without experts none
    message = case.experts_share * message
    forward, backward = 2.0 * message, in_backward * message
    paired = _count_paired(case)
    layer = case.times.layer
    return ExpertMessages(
        forward=_hide_beside(case, forward, layer.backward.device, paired),
        backward=_hide_beside(case, backward, layer.forward.device, paired),
        calls_forward=np.where(sends, 2.0 * case.experts_share, 0.0),
        calls_backward=np.where(sends, in_backward * case.experts_share, 0.0),
    )


def _count_paired(case: Case) -> Array:
    """Share of the passes of a stage that run beside a pass of another micro-batch [-].

    A stage of a pipeline begins with forward passes alone, on average of all stages pp c - 1 of c
    chunks, and one more than without overlap.
    """
    s = case.s
    alone = s.pp * s.chunks
    paired = np.maximum(1.0 - alone / (case.micro * s.chunks), 0.0)
    return np.where(s.overlap_experts, paired, 0.0)


def _hide_beside(case: Case, messages: Array, kernels: Array, paired: Array) -> Array:
    """What messages, of which the share `paired` is sent beside kernels, add to these [s]."""
    beside = time_beside(messages, compute=kernels, contention=case.contention)
    return np.asarray((1.0 - paired) * messages + paired * beside)


def _list_regions(case: Case, *, backward: bool) -> ByRegion[PhaseTimes]:
    """The forward or the backward pass through each region."""
    if backward:
        return case.times.list_by_region(lambda region: region.backward)
    return case.times.list_by_region(lambda region: region.forward)


def _add_messages(
    case: Case,
    regions: ByRegion[PhaseTimes],
    layer_messages: Array,
    layer_calls: Array,
) -> ByRegion[Work]:
    """A pass through each region with exposed messages, further ones of a layer, and the calls of
    these [s]."""

    def add_tensor_messages(region: PhaseTimes) -> Work:
        return Work(region.device + region.tensor_messages, region.host)

    layer = add_tensor_messages(regions.layer)
    return ByRegion(
        embeddings=add_tensor_messages(regions.embeddings),
        layer=Work(layer.device + layer_messages, layer.host + layer_calls * case.times.call),
        head=add_tensor_messages(regions.head),
    )


def time_stage(
    case: Case,
    passes: Passes,
    layers: Array,
    *,
    has_embeddings: bool = False,
    has_head: bool = False,
) -> PassWork:
    """Time both passes of a micro-batch through all chunks of a stage.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : Passes
        Passes through each region [s].
    layers : array
        Layers of the stage [-].
    has_embeddings, has_head : bool, optional
        Whether it holds the embeddings and the head.

    Returns
    -------
    work : PassWork
        Kernels with the messages inside of the stage, and calls with those of messages between
        stages [s].
    """
    calls = np.where(case.has_stages, 2.0 * case.s.chunks * case.times.call, 0.0)

    def time_pass(one_pass: ByRegion[Work]) -> Work:
        work = add_regions(one_pass, layers, has_embeddings=has_embeddings, has_head=has_head)
        return work._replace(host=work.host + calls)

    return PassWork(time_pass(passes.forward), time_pass(passes.backward))


def add_regions(
    one_pass: ByRegion[Work], layers: Array, *, has_embeddings: bool, has_head: bool
) -> Work:
    """Add up a pass through some layers and an end.

    Parameters
    ----------
    one_pass : ByRegion of Work
        The pass through each region [s].
    layers : array
        Layers [-].
    has_embeddings, has_head : bool
        Whether embeddings and head are passed, too.

    Returns
    -------
    work : Work
        Of all of them [s].
    """
    device = layers * one_pass.layer.device
    host = layers * one_pass.layer.host
    if has_embeddings:
        device, host = device + one_pass.embeddings.device, host + one_pass.embeddings.host
    if has_head:
        device, host = device + one_pass.head.device, host + one_pass.head.host
    return Work(device, host)


def _time_hosts(case: Case, passes: Passes, exchange: Work) -> StageHosts:
    """Time that hosts add to a micro-batch of the slowest stage and of one between the ends."""
    of_slowest = _list_slowest_passes(case, passes)
    of_inner = time_stage(case, passes, case.layers)
    slowest = join_stage(case, of_slowest, exchange)
    inner = join_stage(case, of_inner, exchange)
    slowest_device = sum(work.device for work in of_slowest)
    inner_device = of_inner.forward.device + of_inner.backward.device
    return StageHosts(slowest, inner, np.maximum(slowest, inner_device + inner - slowest_device))


def _list_slowest_passes(case: Case, passes: Passes) -> list[Work]:
    """Passes of the slowest stage through its chunks: those that hold layers alone, and the one that
    holds an end too."""
    compute = case.times.list_by_region(stack_compute)
    messages = case.times.list_by_region(stack_tensor_messages)
    calls = case.times.list_by_region(stack_calls)
    works = []
    one_chunk = 1.0 / case.s.chunks
    for number, layers in enumerate(time_stage(case, passes, case.layers)):
        of_pass = slice(number, number + 1)
        end = add_slowest_end(case, _take_pass(compute, of_pass))
        end = end + add_slowest_end(case, _take_pass(messages, of_pass))
        end_calls = add_slowest_end(case, _take_pass(calls, of_pass))
        works.append(Work((1.0 - one_chunk) * layers.device, (1.0 - one_chunk) * layers.host))
        works.append(Work(one_chunk * layers.device + end, one_chunk * layers.host + end_calls))
    return works


def _take_pass(by_region: ByRegion[Array], of_pass: slice) -> ByRegion[Array]:
    """One row of each region."""
    return map_arrays(lambda rows: rows[of_pass], by_region)


def count_calls(case: Case, passes: Passes) -> Array:
    """Time of the calls of a micro-batch on a single stage.

    Parameters
    ----------
    case : Case
        Strategies.
    passes : Passes
        Passes through each region.

    Returns
    -------
    time : array
        Without messages of replicas [s].
    """
    host = np.zeros(case.count)
    for one_pass in passes:
        host = host + case.layers * one_pass.layer.host
        host = host + one_pass.embeddings.host + one_pass.head.host
    return host
