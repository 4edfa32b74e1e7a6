"""Memory of strategies: what the fullest rank holds, for many strategies at once."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models import partitions
from perfkit.models.checkpoints import find_checkpoint, recomputes
from perfkit.models.optimizers import find_optimizer
from perfkit.prediction.kept import BackwardMoments, Moments
from perfkit.prediction.micro_batches import Sizes, count_words, fuses_sums, keeps_fp8
from perfkit.prediction.strategy_case import (
    Case,
    average_owners,
    count_groups_of_layers,
    name_running,
    share_recomputed,
)
from perfkit.prediction.strategy_offload import move_held
from perfkit.prediction.strategy_records import map_arrays
from perfkit.workloads.attention_blocks import UNFUSED
from perfkit.workloads.columns import HeldMemory
from perfkit.workloads.fp8 import RECIPES
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer


class _Candidate(NamedTuple):
    """What may be the fullest moment of an iteration [B]."""

    activations: Any
    gradients: Any
    gathered: Any
    scratch: Any


class _Numbers(NamedTuple):
    """Numbers of weights of a stage: of a layer, of all other weights, and of the whole stage [-]."""

    layer: Array
    ends: Array
    all: Array


class _Weights(NamedTuple):
    """Numbers of all weights of a stage, and of those that are trained; by how many ranks they are
    shared on average; and numbers that the optimizer keeps, of a stage that is the whole model [-]."""

    held: _Numbers
    trained: _Numbers
    owners: Array
    states: Array


class _Stage(NamedTuple):
    """A stage of a pipeline.

    Whether the pipeline has it, and whether it holds the embeddings and the head; its layers, and
    its weights; micro-batches whose activations it keeps at once, and those beside them
    whose gradients of weights are put off; micro-batches whose loss it keeps at once [-].
    """

    exists: np.ndarray
    has_embeddings: np.ndarray
    has_head: np.ndarray
    layers: Array
    weights: _Weights
    held: Array
    put_off: Array
    losses: Array


class _Software(NamedTuple):
    """How the software of each strategy uses memory, which is true of Megatron-LM and false of
    PyTorch's own FSDP, tensor parallelism and pipelines.

    Whether gradients are added up in buffers of their own, and with ZeRO stage 1 weights and these
    buffers are whole; whether a layer keeps the inputs of its products alone, and of the
    activation between two of them; whether the loss overwrites its logits; whether a product that
    adds its gradient to the sum leaves a placeholder of the gradient; and whether the message of a
    stage is allocated when it comes.
    """

    whole_buffers: np.ndarray
    fused_layers: np.ndarray
    loss_in_place: np.ndarray
    placeholders: np.ndarray
    brief_messages: np.ndarray


class _Gradients(NamedTuple):
    """Sums of gradients and placeholders that are held through an iteration [B], and how long the
    gradients of a micro-batch are: until their unit is reduced, until the update, or else until they
    are added to a sum."""

    sums: Array
    placeholders: Array
    until_reduction: np.ndarray
    until_update: np.ndarray


class _Gathered(NamedTuple):
    """Weights, and keys and values of whole sequences, that a rank has gathered from others, at each
    moment of a micro-batch [B].

    When it passes the embeddings, layers and head forward, layers backward, at the end of the
    backward pass of the last layer, and when the gradients of a layer are packed. Then all weights
    of the stage in the format of layers.
    """

    embeddings: Array
    layers: Array
    head: Array
    layers_backward: Array
    layers_end: Array
    packing: Array
    stage: Array


class _Activations(NamedTuple):
    """Activations beside those of the micro-batch and the layer that run [B].

    Those that a stage keeps of other layers and micro-batches while a layer is passed backward; in
    place of these while it is passed forward, and while the head is; those of the other layers of the
    group that is computed again, and which share of all other layers they are [-]; what a layer keeps less than it was
    recorded to; inputs that ranks hold whole although they share tokens, ahead of a product and in
    the backward pass of a layer; and what a vocabulary that ranks share takes besides.
    """

    others: Array
    others_in_forward: Array
    others_in_head: Array
    of_group: Array
    share_of_group: Array
    less: Array
    whole_inputs: Array
    whole_in_layer: Array
    logits: Array


def measure_strategies(case: Case) -> HeldMemory:
    """Memory of the fullest rank of each strategy.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    memory : HeldMemory
        Bytes by use.

    Notes
    -----
    Activations and new gradients are those of the recorded micro-batch, whose tensors live as long
    as those of the graph of `predict`. Docs/formulas.md, table 9.3, has what PyTorch holds besides,
    and what Megatron-LM holds in its place. The fullest of three stages counts: the first one, which
    keeps most micro-batches; the second one, which may have more layers; and the last one, which
    computes the loss.
    """
    software = _find_software(case)
    first, *others = _list_stages(case)
    fullest = _measure_stage(case, software, first)
    for stage in others:
        held = _measure_stage(case, software, stage)
        fuller = stage.exists & (held.total > fullest.total)
        fullest = map_arrays(partial(np.where, fuller), held, fullest)
    return fullest


def count_groups(case: Case) -> Array:
    """Count the groups of ranks that a rank communicates with.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    groups : array
        Groups of ranks that share layers, sequences, experts, stages, weights and gradients, or
        sum up the gradients of groups that do [-].
    """
    s, has_experts = case.s, case.has_experts
    several = [s.tp > 1, s.cp > 1, s.pp > 1, s.owners > 1, s.dp * s.cp > s.owners]
    several += [has_experts, has_experts & (case.sizes.sharers > 1)]
    return np.asarray(sum(np.where(are_several, 1.0, 0.0) for are_several in several))


def _find_software(case: Case) -> _Software:
    """How the software of each strategy uses memory."""
    return _Software(
        whole_buffers=case.as_megatron,
        fused_layers=case.as_megatron,
        loss_in_place=case.as_megatron & (case.model.loss_chunks == 1),
        placeholders=case.as_megatron & fuses_sums(case.model, case.s),
        brief_messages=case.as_megatron,
    )


def _list_stages(case: Case) -> tuple[_Stage, _Stage, _Stage]:
    """The first stage, the second, and the last; of a pipeline of one stage the first alone."""
    s, layers = case.s, case.stage_layers
    is_single = np.asarray(s.pp == 1)
    holds_both = case.holds_both_ends
    embeddings, head = case.times.embeddings, case.times.head
    # a head that is tied to the word embedding has a copy of it on a stage of its own
    copy = np.zeros(case.count)
    if case.model.tie:
        copy = copy + count_words(case.model, s) * case.model.hidden
    trained_copy = np.where(case.model.lora_rank > 0, 0.0, copy)
    none = np.zeros(case.count, dtype=bool)
    first = _make_stage(
        case,
        number=0,
        layers=layers.first,
        ends=embeddings.weights + np.where(holds_both, head.weights, 0.0),
        trained_ends=embeddings.trained + np.where(holds_both, head.trained, 0.0),
        exists=~none,
        has_head=holds_both,
    )
    second = _make_stage(
        case,
        number=1,
        layers=layers.inner,
        ends=np.zeros(case.count),
        trained_ends=np.zeros(case.count),
        exists=np.asarray(s.pp > 2),
        has_head=none,
    )
    last = _make_stage(
        case,
        number=s.pp - 1,
        layers=layers.last,
        ends=np.where(holds_both, 0.0, head.weights + copy),
        trained_ends=np.where(holds_both, 0.0, head.trained + trained_copy),
        exists=~is_single,
        has_head=~holds_both,
    )
    return first, second, last


def _make_stage(
    case: Case,
    *,
    number: Any,
    layers: Array,
    ends: Array,
    trained_ends: Array,
    exists: np.ndarray,
    has_head: np.ndarray,
) -> _Stage:
    """A stage by its number from 0, its layers, and the numbers of all weights and of trained ones
    outside of them."""
    s, sizes, schedule = case.s, case.sizes, case.schedule
    layer = case.times.layer
    held = _Numbers(layer.weights, ends, layers * layer.weights + ends)
    trained = _Numbers(layer.trained, trained_ends, layers * layer.trained + trained_ends)
    owners = np.where(s.zero > 0, average_owners(case, layers, held.all), 1.0)
    states = layers * layer.states + case.times.embeddings.states + case.times.head.states
    batches = partitions.held_batches(
        sizes.micro, stages=s.pp, schedule=s.schedule, chunks=s.chunks, stage=number
    )
    # in a V nothing is put off while most is kept
    puts_off = schedule.puts_off_weights & ~schedule.is_v_shaped
    # the forward pass of the next micro-batch runs beside a backward pass
    beside = np.where(s.overlap_experts & (sizes.micro > 1), 1.0 / s.chunks, 0.0)
    batches = batches + np.where(case.has_experts, beside, 0.0)
    return _Stage(
        exists=exists,
        has_embeddings=np.broadcast_to(np.equal(number, 0), case.count),
        has_head=has_head,
        layers=layers,
        weights=_Weights(held, trained, owners, states),
        held=batches,
        put_off=np.where(puts_off, np.minimum(number, sizes.micro), 0.0),
        losses=np.where(schedule.all_forward_first, sizes.micro, 1.0),
    )


def _measure_stage(case: Case, software: _Software, stage: _Stage) -> HeldMemory:
    """Memory of a rank of a stage at its fullest moment.

    What an offload takes away is not the same at all moments, so that the fullest one is that of what
    stays.
    """
    s, sizes, weights = case.s, case.sizes, stage.weights
    shares = (s.zero > 0) & ~software.whole_buffers
    shards = weights.trained.all / weights.owners
    parameters = _hold_parameters(s, sizes, software, weights) + _hold_fp8(case, stage)
    states = _hold_states(case.model, s, sizes, software, weights)
    inputs = _hold_inputs(case, software)
    messages = _hold_messages(case, software, stage)
    moments: list[HeldMemory] = []
    for candidate in _list_candidates(case, software, stage):
        # of shards: gradients that are not yet reduced are what collectives send
        unreduced = np.maximum(candidate.gradients - sizes.wide * shards, 0.0)
        unreduced = np.where(shares, unreduced, 0.0)
        held = HeldMemory(
            parameters=parameters,
            gradients=candidate.gradients - unreduced,
            states=states,
            activations=candidate.activations + inputs,
            communication=candidate.gathered + unreduced + messages,
            workspace=candidate.scratch,
        )
        moments.append(move_held(case, held, shards, whole_buffers=software.whole_buffers))
    return _find_fullest(moments)


def _hold_inputs(case: Case, software: _Software) -> Array:
    """Words and labels of all micro-batches, and angles of positions [B]; published forms of
    Megatron-LM have neither."""
    inputs = case.times.inputs
    held = inputs.shared + case.sizes.micro * inputs.of_micro_batch
    return np.where(software.fused_layers, 0.0, held)


def _hold_fp8(case: Case, stage: _Stage) -> Array:
    """Weights in fp8 that are cast once in an iteration: those of layers, in all their copies [B]."""
    numbers = stage.layers * case.times.layer.weights
    nbytes = RECIPES[case.model.fp8_recipe].bytes_kept * numbers
    return np.where(keeps_fp8(case.model, case.s), nbytes, 0.0)


def _is_autocast(s: Strategy, sizes: Sizes) -> np.ndarray:
    """Whether weights are cast in each micro-batch, so that ranks hold fp32 weights alone."""
    return np.asarray(s.replicated & (sizes.wide > sizes.itemsize))


def _hold_parameters(s: Strategy, sizes: Sizes, software: _Software, weights: _Weights) -> Array:
    """Weights that layers work with, or shards of those that the optimizer updates [B].

    What FSDP gathers in its stages 1 and 2 counts as communication: it trains shards alone.
    """
    in_shards = (s.zero > 0) & ~software.whole_buffers
    is_wide = _is_autocast(s, sizes) | in_shards
    return np.asarray(
        partitions.model_state_bytes(
            weights.held.all,
            weight=np.where(is_wide, sizes.wide, sizes.itemsize),
            gradient=0.0,
            states=0.0,
            ranks=weights.owners,
            zero=np.where(in_shards, 3, 0),
        )
    )


def _hold_states(
    model: Transformer, s: Strategy, sizes: Sizes, software: _Software, weights: _Weights
) -> Array:
    """States of the optimizer, and fp32 weights that it updates beside narrower ones [B]."""
    has_masters = np.zeros(np.shape(weights.trained.all), dtype=bool)
    if sizes.wide > sizes.itemsize:
        in_shards = (s.zero > 0) & ~software.whole_buffers
        has_masters = np.logical_not(in_shards | _is_autocast(s, sizes))
    masters = np.where(has_masters, 1.0, 0.0)
    optimizer = find_optimizer(model.optimizer)
    if optimizer.by_shape:
        # of replicas of the whole model
        return np.asarray(sizes.wide * weights.states)
    states = optimizer.kept_bytes(sizes.wide)
    return np.asarray(
        partitions.model_state_bytes(
            weights.trained.all,
            weight=0.0,
            gradient=0.0,
            states=states + sizes.wide * masters,
            ranks=weights.owners,
            zero=np.where(s.zero > 0, 3, 0),
        )
    )


def _find_fullest(moments: Sequence[HeldMemory]) -> HeldMemory:
    """The fullest of some moments, and the first of equal ones."""
    fullest = moments[0]
    for held in moments[1:]:
        fuller = held.total > fullest.total
        fullest = map_arrays(partial(np.where, fuller), held, fullest)
    return fullest


def _hold_gradients(case: Case, software: _Software, weights: _Weights) -> _Gradients:
    """Sums of gradients, and how long the gradients of a micro-batch are held."""
    s, sizes, trained = case.s, case.sizes, weights.trained
    several = sizes.micro > 1
    shards = sizes.wide * trained.all / weights.owners
    whole = np.where(s.buffers, sizes.summed, sizes.wide) * trained.all
    # replicas of Megatron-LM add all gradients to fp32 buffers
    buffers = s.buffers | ~s.replicated & (sizes.wide > sizes.itemsize)
    added_whole = np.where(several | buffers, whole, 0.0)
    added_in_zero = np.where(several & ~s.scattered, whole, 0.0)
    # of the unit that is reduced, before it is added to those of earlier micro-batches
    unit = sizes.summed * np.maximum(trained.ends, trained.layer) / weights.owners
    added_to_shards = np.where(several & s.scattered, unit, 0.0)
    shares = (s.zero > 0) & ~software.whole_buffers
    return _Gradients(
        sums=np.where(shares, shards + added_in_zero + added_to_shards, added_whole),
        placeholders=_hold_placeholders(case, software.placeholders & (added_whole > 0)),
        until_reduction=shares & (s.scattered | ~several),
        until_update=~shares & (added_whole == 0) & (not case.model.optimizer_in_backward),
    )


def _hold_placeholders(case: Case, is_made: np.ndarray) -> Array:
    """Placeholders of the gradients of a layer, one for all weights of a shape, if they are made [B].

    A product adds its gradient to the sum itself, but PyTorch wants a tensor of that shape. All
    layers share them, and so do the experts of a rank.
    """
    local_experts = np.maximum(case.model.experts // case.s.ep, 1)
    others = case.sizes.experts * (1.0 - 1.0 / local_experts)
    return np.where(is_made, case.sizes.itemsize * (case.times.layer.weights - others), 0.0)


def _hold_gathered(case: Case, software: _Software, stage: _Stage) -> _Gathered:
    """Weights, and keys and values of whole sequences, that a rank has gathered from others.

    Those that are gathered once (ZeRO stages 1 and 2) stay until their last use. The norm of BERT's
    embeddings is among the last weights that its backward pass reads, and so is the convolution of
    patches.
    """
    model, s, sizes, weights = case.model, case.s, case.sizes, stage.weights
    layer, ends = sizes.itemsize * case.times.layer.sent, sizes.itemsize * weights.held.ends
    all_layers = stage.layers * layer
    gathers = (s.zero > 0) & ~software.whole_buffers
    once = gathers & (s.zero < 3)

    def hold(gathered_once: Array, gathered_again: Array) -> Array:
        return np.where(once, gathered_once, np.where(gathers, gathered_again, 0.0))

    ends_to_the_end = np.where(gathers, 0.0 if model.causal else ends, 0.0)
    keys = _hold_whole_keys(s, sizes)
    return _Gathered(
        embeddings=np.where(gathers, ends, 0.0),
        layers=hold(all_layers + ends, layer + ends) + keys.forward,
        head=hold(all_layers + ends, ends),
        layers_backward=ends_to_the_end + hold(all_layers, layer) + keys.backward,
        layers_end=ends_to_the_end + np.where(gathers, layer, 0.0) + keys.backward,
        packing=ends_to_the_end + np.where(once, all_layers - layer, 0.0),
        stage=np.where(gathers, all_layers + ends, 0.0),
    )


class _WholeKeys(NamedTuple):
    """Keys and values of a whole sequence that a layer holds in a pass [B]."""

    forward: Array
    backward: Array


def _hold_whole_keys(s: Strategy, sizes: Sizes) -> _WholeKeys:
    """Keys and values that ranks which share sequences gather for a layer at a time; in the backward
    pass their gradients are there, too, until they are reduced.

    They are counted at the fullest moment of the layer, which may be another one than attention.
    """
    keys_and_values = np.where(
        (s.cp_kind == "all_gather") & (s.cp > 1), 2.0 * s.cp * sizes.keys, 0.0
    )
    return _WholeKeys(forward=keys_and_values, backward=2.0 * keys_and_values)


def _hold_activations(case: Case, software: _Software, stage: _Stage) -> _Activations:
    """Activations beside those of the micro-batch and the layer that run.

    Over a shared vocabulary there are a shifted copy of the logits and a buffer of exponentials in
    place of one. DTensor keeps whole inputs of attention and of the feed-forward part, and the
    gradient comes from two products; Megatron-LM holds one input and its gradient.
    """
    model, s, sizes, times = case.model, case.s, case.sizes, case.running
    kept_by_running = _keep_by_layer(case, software, name_running(s), times.layer.saved)
    kept_again = _keep_by_layer(case, software, np.asarray(s.checkpoint), case.saved_again)
    share = share_recomputed(s, stage.layers)
    kept = np.where(s.is_partial, share * kept_again + (1.0 - share) * kept_by_running, kept_again)
    scores = _count_scores(case)
    put_off = stage.put_off * stage.layers * np.maximum(kept - scores, 0.0)
    other_embeddings = np.where(stage.has_embeddings, stage.held - 1.0, 0.0)
    whole = np.where(s.rows > 1, sizes.column * model.hidden, 0.0)
    logits = np.where(s.tp > 1, sizes.wide * _count_logits(case), 0.0)
    others = _hold_other_layers(
        s, stage, kept=kept, kept_again=kept_again, kept_by_running=kept_by_running
    )
    leading = np.where(stage.has_embeddings, stage.held * _keep_leading(case, software), 0.0)
    other_losses = np.where(stage.has_head, stage.losses - 1.0, 0.0)
    of_embeddings = other_embeddings * times.embeddings.saved
    of_losses = other_losses * times.head.saved
    besides = leading + put_off + of_embeddings + of_losses
    return _Activations(
        others=others.in_backward + besides,
        others_in_forward=others.in_forward + besides,
        others_in_head=others.in_head + besides,
        of_group=others.count_of_group * kept_by_running,
        share_of_group=others.count_of_group / np.maximum(stage.layers - 1.0, 1.0),
        less=times.layer.saved - kept_by_running,
        whole_inputs=whole,
        whole_in_layer=np.where(software.fused_layers, 2.0, 4.0) * whole,
        logits=logits,
    )


class _OtherLayers(NamedTuple):
    """Activations of other layers and micro-batches than those that run.

    While a layer is passed backward, forward, and while the head is [B]; and how many other layers of
    its group are computed again with a layer [-].
    """

    in_backward: Array
    in_forward: Array
    in_head: Array
    count_of_group: Array


def _hold_other_layers(
    s: Strategy, stage: _Stage, *, kept: Array, kept_again: Array, kept_by_running: Array
) -> _OtherLayers:
    """What a stage keeps of other layers and micro-batches, if a layer keeps so much: one in mean, one
    that is computed again, and the one that runs [B]."""
    is_grouped = np.asarray(s.groups_layers)
    all_layers = stage.held * stage.layers
    # of those that go to the host, one is on its way
    others_on_device = np.where(
        s.offloads_activations, np.minimum(all_layers - 1.0, 1.0), all_layers - 1.0
    )
    of_layers = np.where(s.is_partial, all_layers * kept - kept_by_running, others_on_device * kept)
    # groups keep an input each; of the group that runs all layers are there, the input once
    inputs_of_groups = stage.held * count_groups_of_layers(s, stage.layers) * kept_again
    other_groups = np.maximum(inputs_of_groups - kept_again, 0.0)
    others_of_group = np.minimum(s.checkpoint_group, stage.layers / s.chunks) - 1.0
    others_of_group = np.where(is_grouped, others_of_group, 0.0)
    with_group = other_groups + others_of_group * kept_by_running
    return _OtherLayers(
        in_backward=np.where(is_grouped, with_group, of_layers),
        in_forward=np.where(is_grouped, other_groups, of_layers),
        in_head=np.where(is_grouped, inputs_of_groups - kept_by_running, of_layers),
        count_of_group=others_of_group,
    )


def _count_logits(case: Case) -> Array:
    """Logits of a micro-batch on a rank that live at once [-]."""
    if case.model.patch:  # each rank has all classes
        return np.asarray(1.0 * case.s.micro_batch * case.model.classes)
    tokens = case.sizes.column / case.sizes.itemsize / case.model.loss_chunks
    # those of each further token live until the backward pass begins
    heads = 1.0 + case.model.mtp_layers
    return np.asarray(heads * tokens * count_words(case.model, case.s))


def _choose_moments(moments: Moments, gradients: _Gradients) -> BackwardMoments:
    """Fullest moments of the backward pass of strategies, which hold gradients for different
    times."""

    def choose(until_sum: Array, until_reduction: Array, until_update: Array) -> Array:
        kept = np.where(gradients.until_update, until_update, until_sum)
        return np.where(gradients.until_reduction, until_reduction, kept)

    return map_arrays(choose, moments.until_sum, moments.until_reduction, moments.until_update)


def _list_candidates(case: Case, software: _Software, stage: _Stage) -> list[_Candidate]:
    """Moments one of which is the fullest."""
    s, sizes, weights = case.s, case.sizes, stage.weights
    gradients = _hold_gradients(case, software, weights)
    gathered = _hold_gathered(case, software, stage)
    activations = _hold_activations(case, software, stage)
    backward = _choose_moments(case.running.moments, gradients)
    # a gradient that is kept as it is computed has the format of its weight
    itemsize = np.where(_is_autocast(s, sizes), sizes.wide, sizes.itemsize)
    other_layers = (stage.layers - 1.0) * itemsize * weights.trained.layer
    other_gradients = np.where(gradients.until_update, other_layers, 0.0)
    candidates = [
        *_list_in_forward(case, software, stage, activations, gradients, gathered),
        *_list_in_backward(
            stage, software, backward, activations, gradients, gathered, other_gradients
        ),
        *_list_in_loss(case, software, stage, activations, gradients),
        _find_next_micro_batch(case, software, stage, backward, gradients, gathered),
        _find_packing_of_layer(sizes, weights, backward, activations, gradients, gathered),
        _find_packing_of_ends(sizes, weights, gradients),
        _find_update(case, weights, gradients, itemsize),
    ]
    return [
        candidate._replace(gradients=candidate.gradients + gradients.placeholders)
        for candidate in candidates
    ]


def _keep_where(holds: np.ndarray, candidate: _Candidate) -> _Candidate:
    """A moment of the stages that have it; elsewhere nothing."""
    return map_arrays(lambda nbytes: np.where(holds, nbytes, 0.0), candidate)


def _list_in_forward(
    case: Case,
    software: _Software,
    stage: _Stage,
    activations: _Activations,
    gradients: _Gradients,
    gathered: _Gathered,
) -> list[_Candidate]:
    """The fullest moments of a forward pass: in the embeddings, a layer and the head."""
    forward = case.running.moments.forward
    inputs = activations.whole_inputs
    none = np.zeros(len(inputs))
    others_in_head = activations.others_in_head
    of_layer = forward.layer - activations.less + activations.others_in_forward + inputs
    of_head = forward.head - activations.less + others_in_head + inputs + activations.logits
    in_embeddings = _Candidate(
        forward.embeddings + inputs, gradients.sums, gathered.embeddings, none
    )
    in_head = _Candidate(of_head, gradients.sums, gathered.head, none)
    return [
        _keep_where(stage.has_embeddings, in_embeddings),
        _Candidate(of_layer, gradients.sums, gathered.layers, none),
        _keep_where(stage.has_head & ~software.loss_in_place, in_head),
    ]


def _list_in_backward(
    stage: _Stage,
    software: _Software,
    backward: BackwardMoments,
    activations: _Activations,
    gradients: _Gradients,
    gathered: _Gathered,
    other_gradients: Array,
) -> list[_Candidate]:
    """The fullest moments of a backward pass: in the head, in the first layer that it passes, in the
    first one of the last group, and in its last layer and the embeddings, with gradients of other
    layers."""
    head, layer, embeddings = backward.head, backward.layer, backward.embeddings
    inputs = activations.whole_inputs
    none = np.zeros(len(inputs))
    others_in_head = activations.others_in_head
    of_head = head.activations - activations.less + others_in_head + inputs + activations.logits
    of_layer = layer.activations - activations.less
    of_first_layer = of_layer + activations.others + activations.whole_in_layer
    sums = gradients.sums
    # gradients of products are added to the sums, and only placeholders are made
    new = np.where(software.placeholders, 0.0, layer.gradients)
    with_others = sums + new + other_gradients
    in_embeddings = sums + embeddings.gradients + other_gradients
    in_head = _Candidate(of_head, sums + head.gradients, gathered.head, none)
    before_group = other_gradients * (1.0 - activations.share_of_group)
    in_last_group = _Candidate(
        of_layer + activations.of_group, sums + new + before_group, gathered.layers_end, none
    )
    at_the_end = _Candidate(embeddings.activations, in_embeddings, none, none)
    return [
        _keep_where(stage.has_head & ~software.loss_in_place, in_head),
        _Candidate(of_first_layer, sums + new, gathered.layers_backward, none),
        in_last_group,
        _Candidate(of_layer, with_others, gathered.layers_end, none),
        _keep_where(stage.has_embeddings, at_the_end),
    ]


def _list_in_loss(
    case: Case,
    software: _Software,
    stage: _Stage,
    activations: _Activations,
    gradients: _Gradients,
) -> list[_Candidate]:
    """The fullest moments of a loss that overwrites its logits: while they are there in the format
    of layers and in fp32, as they are and as gradients; and in the product behind them, with the
    placeholder of its gradient.

    Beside them are the sum of all layers, and its norm, whole.
    """
    model, s, sizes = case.model, case.s, case.sizes
    numbers = _count_logits(case)
    narrow = sizes.itemsize * numbers
    wide = np.zeros(len(numbers))
    if sizes.itemsize < 4:
        wide = 4.0 * numbers
    earlier = (stage.losses - 1.0) * np.maximum(narrow, wide)
    kept = activations.others_in_head + case.running.layer.saved - activations.less
    ahead = sizes.column * model.hidden * (1.0 / s.rows + 1.0)
    of_product = sizes.itemsize * count_words(model, s) * model.hidden
    placeholder = np.where(gradients.placeholders > 0, of_product, 0.0)
    none = np.zeros(len(numbers))
    in_loss = _Candidate(kept + ahead + narrow + wide + earlier, gradients.sums, none, none)
    in_product = _Candidate(
        kept + ahead + narrow + earlier, gradients.sums + placeholder, none, none
    )
    holds = stage.has_head & software.loss_in_place
    return [_keep_where(holds, in_loss), _keep_where(holds, in_product)]


def _find_next_micro_batch(
    case: Case,
    software: _Software,
    stage: _Stage,
    backward: BackwardMoments,
    gradients: _Gradients,
    gathered: _Gathered,
) -> _Candidate:
    """The end of a backward pass that keeps all gathered weights for the next micro-batch (ZeRO
    stage 1); the sums of the first one are only being made."""
    sizes = case.sizes
    sums = gradients.sums
    made = np.where(sizes.micro > 2, sums, sums - sizes.wide * stage.weights.trained.ends)
    embeddings = backward.embeddings
    candidate = _Candidate(
        embeddings.activations, made + embeddings.gradients, gathered.stage, np.zeros(len(sums))
    )
    keeps_weights = (case.s.zero == 1) & ~software.whole_buffers & (sizes.micro > 1)
    return _keep_where(keeps_weights, candidate)


def _find_packing_of_layer(
    sizes: Sizes,
    weights: _Weights,
    backward: BackwardMoments,
    activations: _Activations,
    gradients: _Gradients,
    gathered: _Gathered,
) -> _Candidate:
    """When the gradients of a layer and the copy that is reduced are both there."""
    moment = backward.layer_end
    copy = np.where(gradients.until_reduction, sizes.summed * weights.trained.layer, 0.0)
    return _Candidate(
        moment.activations + activations.others,
        gradients.sums + moment.gradients,
        gathered.packing + copy,
        np.zeros(len(copy)),
    )


def _find_packing_of_ends(sizes: Sizes, weights: _Weights, gradients: _Gradients) -> _Candidate:
    """When the gradients of all other weights and their copy are there, and all else of the pass is
    gone."""
    ends = weights.trained.ends
    new = np.where(gradients.until_reduction, sizes.itemsize * ends, 0.0)
    copy = np.where(gradients.until_reduction, sizes.summed * ends, 0.0)
    none = np.zeros(len(copy))
    return _Candidate(none, gradients.sums + new, copy, none)


def _find_update(
    case: Case, weights: _Weights, gradients: _Gradients, itemsize: Array
) -> _Candidate:
    """The update, with the tensors that it writes beside its results."""
    sizes = case.sizes
    trained = weights.trained.all
    all_gradients = np.where(gradients.until_update, itemsize * trained, gradients.sums)
    none = np.zeros(len(all_gradients))
    scratch = case.times.update_scratch + none
    if not find_optimizer(case.model.optimizer).by_shape:
        scratch = sizes.wide * trained / weights.owners * _count_scratch(case.model)
    return _Candidate(none, all_gradients, none, scratch)


def _count_scratch(model: Transformer) -> float:
    """Tensors of the size of all weights that an update of all at once writes beside its
    results [-]."""
    if model.fused or model.optimizer_in_backward:
        return 0.0
    optimizer = find_optimizer(model.optimizer)
    steps = optimizer.for_each_update or optimizer.update
    return float(
        len({name for step in steps for name in step.writes if name.startswith("scratch")})
    )


def keep_by_layer(case: Case) -> Array:
    """Find what a layer keeps for its backward pass that goes to the host.

    Parameters
    ----------
    case : Case
        Strategies.

    Returns
    -------
    kept : array
        Of a micro-batch, where all or none of a layer is computed again; 0 without such an offload
        [B].
    """
    offloads = case.s.offloads_activations
    if not np.any(offloads):
        return np.zeros(case.count)
    checkpoints = np.asarray(case.s.checkpoint)
    kept = _keep_by_layer(case, _find_software(case), checkpoints, case.saved_again)
    return np.asarray(np.where(offloads, kept, 0.0))


def _keep_by_layer(case: Case, software: _Software, checkpoints: np.ndarray, saved: Array) -> Array:
    """Activations that a layer keeps for its backward pass [B], if its checkpoints have these names,
    and it was recorded to save as much [B].

    With ``selective`` checkpoints none of those between the projections of attention. Layers whose
    activation is merged with what is around it keep the inputs of products, as published; the norm
    ahead of a product that ranks share is kept in shares. What is published has no experts.
    """
    names = np.broadcast_to(checkpoints, case.count)
    recorded = np.where(names == "selective", np.maximum(saved - _count_scores(case), 0.0), saved)
    is_merged = software.fused_layers & (names != "full")
    names_merged = np.unique(names[is_merged]).tolist()
    for name in names_merged:
        if find_checkpoint(name).saves_products:
            raise ValueError(
                f"checkpoint is {name!r} with a stack that holds memory as Megatron-LM, which has no "
                "such checkpoints; take parts, as 'norms+activation', or stack='torchtitan'"
            )
    if not _has_published_form(case.model):
        return np.where(is_merged, recorded + _merge_experts(case, names), recorded)
    kept = recorded
    for name in names_merged:
        published = _count_published(case, recompute=name)
        kept = np.where(is_merged & (names == name), published, kept)
    return kept


def _keep_leading(case: Case, software: _Software) -> Array:
    """Activations that the dense layers which go with the embeddings keep for the backward pass of a
    micro-batch [B]."""
    s, leading = case.s, case.leading
    names = np.broadcast_to(s.checkpoint, case.count)
    scores = np.where(names == "selective", leading * _count_scores(case), 0.0)
    recorded = case.leading_saved - scores
    is_merged = software.fused_layers & (names != "full")
    return np.where(is_merged, recorded + leading * _merge_dense(case, names), recorded)


def _merge_dense(case: Case, checkpoints: np.ndarray) -> Array:
    """What a dense layer keeps more than it was recorded to, see `_merge_experts` [B]."""
    model, s, sizes = case.model, case.s, case.sizes
    missing_norms = _count_gathered_norms(model)
    keeps_norms = (s.rows > 1) & ~recomputes(checkpoints, "norms")
    norms = np.where(keeps_norms, missing_norms * sizes.column * model.hidden / s.rows, 0.0)
    if not model.gated:
        return np.asarray(norms)
    is_kept = ~recomputes(checkpoints, "activation") & ~recomputes(checkpoints, "mlp")
    activation = sizes.column * np.ceil(model.width_of_mlp / s.tp)
    return np.asarray(norms - np.where(is_kept, activation, 0.0))


def _has_published_form(model: Transformer) -> bool:
    """Whether what a layer keeps is published: of attention and an MLP, each behind a norm."""
    is_other = model.experts > 0 or model.kv_lora_rank > 0 or model.parallel_mlp
    return not (is_other or model.qk_norm or model.norm_place != "before" or model.rotary_width)


def _count_gathered_norms(model: Transformer) -> float:
    """Norms of a layer whose copies ahead of products ranks gather, if they share tokens: both, or that
    of the MLP alone, as latent attention works with the share of its norm, or the one of both [-]."""
    has_one = model.kv_lora_rank > 0 or (model.parallel_mlp and model.parallel_norms == 1)
    return 1.0 if has_one else 2.0


def _merge_experts(case: Case, checkpoints: np.ndarray) -> Array:
    """What layers with experts keep more than they were recorded to, if their activation is merged
    with what is around it: shares of norms, less the activation ahead of a gate [B].

    A rank that sends its own tokens to experts works with the share of the second norm, which was
    recorded. Ranks that share products of an expert gather as many times the rows as they split its
    width.
    """
    model, s, sizes = case.model, case.s, case.sizes
    share_of_norm = sizes.column * model.hidden / s.rows
    missing_norms = _count_gathered_norms(model) - np.where(s.spreads_experts, 1.0, 0.0)
    keeps_norms = (s.rows > 1) & ~recomputes(checkpoints, "norms")
    norms = np.where(keeps_norms, missing_norms * share_of_norm, 0.0)
    activation = np.zeros(case.count)
    if model.gated:
        inner = model.width_of_expert
        width_for_own_tokens = np.where(s.spreads_experts, inner, np.ceil(inner / s.tp))
        activation = sizes.routed / model.hidden * width_for_own_tokens
        activation = activation + sizes.column * np.ceil(model.width_of_shared / s.tp)
    is_kept = ~recomputes(checkpoints, "activation") & ~recomputes(checkpoints, "experts")
    of_experts = norms - np.where(is_kept, activation, 0.0)
    share = case.experts_share
    return np.asarray(share * of_experts + (1.0 - share) * _merge_dense(case, checkpoints))


def _count_published(case: Case, *, recompute: str) -> Array:
    """Activations of a layer by the published form, with its heads and the rest of its sizes [B]."""
    model, s, sizes = case.model, case.s, case.sizes
    kv_heads = model.kv_heads or model.heads
    return np.asarray(
        partitions.activation_bytes(
            s.micro_batch,
            model.sequence / s.cp,
            model.hidden,
            heads=model.heads,
            kv_share=kv_heads / model.heads,
            width=model.head_width * model.heads,
            inner=model.inner,
            gated=model.gated,
            fused=model.attention not in UNFUSED,
            dropout=model.dropout > 0,
            tensor=s.tp,
            sharing=s.rows,
            recompute=recompute,
            itemsize=sizes.itemsize,
        )
    )


def _count_scores(case: Case) -> Array:
    """Those of them that are scores of attention [B]."""
    everything = _count_published(case, recompute="none")
    return np.asarray(everything - _count_published(case, recompute="selective"))


def _hold_messages(case: Case, software: _Software, stage: _Stage) -> Array:
    """What collectives and messages of stages hold through an iteration [B]."""
    s, sizes, weights = case.s, case.sizes, stage.weights
    layer, ends = sizes.itemsize * case.times.layer.sent, sizes.itemsize * weights.held.ends
    # the stream that gathers holds two units at once, and shards that were cast for the second one
    cast = np.where(sizes.wide > sizes.itemsize, 1.0 / weights.owners, 0.0)
    both_ends_first = np.maximum(ends * (1.0 + cast), ends + layer * (1.0 + cast))
    two_layers = np.where(stage.layers > 1, layer * (2.0 + cast), 0.0)
    gathers = (s.zero > 0) & ~software.whole_buffers
    gathered = np.where(gathers, np.maximum(both_ends_first, two_layers), 0.0)
    # PyTorch allocates those of all micro-batches and chunks ahead; the first stage receives no
    # inputs, and the last one no gradients
    not_received = np.where(stage.has_embeddings, 1.0, 0.0) + np.where(stage.has_head, 1.0, 0.0)
    received = 2.0 * s.chunks - not_received
    messages = received * sizes.micro + s.chunks * stage.held
    # Megatron-LM has one of each way at a time
    messages = np.where(software.brief_messages, 2.0, messages)
    inputs = sizes.column * case.model.hidden / s.rows
    messages = np.where(s.pp > 1, inputs * messages, 0.0)
    # DistributedDataParallel keeps all gradients a second time, in its buckets
    buckets = np.where(s.replicated & (s.dp > 1), sizes.wide * weights.trained.all, 0.0)
    return np.asarray(gathered + messages + buckets)
