"""Memory of strategies: what the fullest rank holds, for many strategies at once."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models import partitions
from perfkit.models.optimizers import find_optimizer
from perfkit.prediction.kept import BackwardMoments, Moments
from perfkit.prediction.micro_batches import MicroBatchTimes, Sizes
from perfkit.prediction.strategy_case import Case, StageLayers, average_owners
from perfkit.prediction.strategy_records import map_arrays
from perfkit.workloads.blocks import UNFUSED
from perfkit.workloads.columns import HeldMemory
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer


class _Candidate(NamedTuple):
    """What may be the fullest moment of an iteration [B]."""

    activations: Any
    gradients: Any
    gathered: Any
    scratch: Any

    @property
    def total(self) -> Any:
        """All of it [B]."""
        return self.activations + self.gradients + self.gathered + self.scratch


class _Weights(NamedTuple):
    """Trained numbers of a stage: of a layer, of all other weights, and of the whole stage; and by
    how many ranks they are shared on average [-]."""

    layer: Array
    ends: Array
    all: Array
    owners: Array


class _Gradients(NamedTuple):
    """Sums of gradients that are held through an iteration [B], and how long those of a micro-batch
    are: until their unit is reduced, until the update, or else until they are added to a sum."""

    sums: Array
    until_reduction: np.ndarray
    until_update: np.ndarray


class _Gathered(NamedTuple):
    """Weights that a rank has gathered from others, at each moment of a micro-batch [B].

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

    Those that the first stage keeps of other layers and micro-batches, and the last stage of other
    layers; inputs that ranks hold whole although they share tokens; and what a vocabulary that ranks
    share takes besides.
    """

    first_stage: Array
    last_stage: Array
    whole_inputs: Array
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
    as those of the graph of `predict`. Docs/formulas.md, table 9.3, has what PyTorch holds besides.
    """
    model, s, sizes, times, stage_layers = (
        case.model,
        case.s,
        case.sizes,
        case.times,
        case.stage_layers,
    )
    all_weights = case.weights
    owners = average_owners(case)
    layer = times.layer.weights
    layers = stage_layers.inner
    shards = np.where(s.zero > 0, owners, 1.0)
    weights = _Weights(layer, all_weights - layers * layer, all_weights, shards)
    fullest = _find_fullest(_list_candidates(model, s, sizes, times, stage_layers, weights))
    # of shards: gradients that are not yet reduced are what collectives send
    reduced = sizes.wide * all_weights / shards
    unreduced = np.where(s.zero > 0, np.maximum(fullest.gradients - reduced, 0.0), 0.0)
    messages = _hold_messages(model, s, sizes, weights, stage_layers)
    return HeldMemory(
        parameters=_hold_parameters(s, sizes, all_weights, owners),
        gradients=fullest.gradients - unreduced,
        states=_hold_states(model, s, sizes, all_weights, owners),
        activations=fullest.activations,
        communication=fullest.gathered + unreduced + messages,
        workspace=fullest.scratch,
    )


def _is_autocast(s: Strategy, sizes: Sizes) -> np.ndarray:
    """Whether weights are cast in each micro-batch, so that ranks hold fp32 weights alone."""
    return np.asarray(s.replicated & (sizes.wide > sizes.itemsize))


def _hold_parameters(s: Strategy, sizes: Sizes, weights: Array, owners: Array) -> Array:
    """Weights that layers work with, or shards of those that the optimizer updates [B].

    What FSDP gathers in its stages 1 and 2 counts as communication: it trains shards alone.
    """
    is_wide = _is_autocast(s, sizes) | (s.zero > 0)
    return np.asarray(
        partitions.model_state_bytes(
            weights,
            weight=np.where(is_wide, sizes.wide, sizes.itemsize),
            gradient=0.0,
            states=0.0,
            ranks=owners,
            zero=np.where(s.zero > 0, 3, 0),
        )
    )


def _hold_states(
    model: Transformer, s: Strategy, sizes: Sizes, weights: Array, owners: Array
) -> Array:
    """States of the optimizer, and fp32 weights that it updates beside narrower ones [B]."""
    has_masters = np.zeros(np.shape(weights), dtype=bool)
    if sizes.wide > sizes.itemsize:
        has_masters = np.logical_not((s.zero > 0) | _is_autocast(s, sizes))
    masters = np.where(has_masters, 1.0, 0.0)
    states = find_optimizer(model.optimizer).states
    return np.asarray(
        partitions.model_state_bytes(
            weights,
            weight=0.0,
            gradient=0.0,
            states=sizes.wide * (states + masters),
            ranks=owners,
            zero=np.where(s.zero > 0, 3, 0),
        )
    )


def _find_fullest(candidates: Sequence[_Candidate]) -> _Candidate:
    """The fullest of some moments, and the first of equal ones."""
    fullest = candidates[0]
    for candidate in candidates[1:]:
        fuller = candidate.total > fullest.total
        fullest = map_arrays(partial(np.where, fuller), candidate, fullest)
    return fullest


def _hold_gradients(s: Strategy, sizes: Sizes, weights: _Weights) -> _Gradients:
    """Sums of gradients, and how long the gradients of a micro-batch are held."""
    several = sizes.micro > 1
    shards = sizes.wide * weights.all / weights.owners
    whole = sizes.wide * weights.all
    # replicas of Megatron-LM add all gradients to fp32 buffers
    buffers = ~s.replicated & (sizes.wide > sizes.itemsize)
    added_whole = np.where(several | buffers, whole, 0.0)
    added_in_zero = np.where(several & ~s.scattered, whole, 0.0)
    # of the unit that is reduced, before it is added to those of earlier micro-batches
    unit = sizes.summed * np.maximum(weights.ends, weights.layer) / weights.owners
    added_to_shards = np.where(several & s.scattered, unit, 0.0)
    return _Gradients(
        sums=np.where(s.zero > 0, shards + added_in_zero + added_to_shards, added_whole),
        until_reduction=(s.zero > 0) & (s.scattered | ~several),
        until_update=(s.zero == 0) & (added_whole == 0),
    )


def _hold_gathered(
    model: Transformer, s: Strategy, sizes: Sizes, weights: _Weights, layers: Array
) -> _Gathered:
    """Weights that a rank has gathered from others.

    Those that are gathered once (ZeRO stages 1 and 2) stay until their last use. The norm of BERT's
    embeddings is among the last weights that its backward pass reads.
    """
    layer, ends = sizes.itemsize * weights.layer, sizes.itemsize * weights.ends
    all_layers = layers * layer
    gathers = s.zero > 0
    once = gathers & (s.zero < 3)

    def hold(gathered_once: Array, gathered_again: Array) -> Array:
        return np.where(once, gathered_once, np.where(gathers, gathered_again, 0.0))

    ends_to_the_end = np.where(gathers, 0.0 if model.causal else ends, 0.0)
    return _Gathered(
        embeddings=np.where(gathers, ends, 0.0),
        layers=hold(all_layers + ends, layer + ends),
        head=hold(all_layers + ends, ends),
        layers_backward=ends_to_the_end + hold(all_layers, layer),
        layers_end=ends_to_the_end + np.where(gathers, layer, 0.0),
        packing=ends_to_the_end + np.where(once, all_layers - layer, 0.0),
        stage=all_layers + ends,
    )


def _hold_activations(
    model: Transformer,
    s: Strategy,
    sizes: Sizes,
    times: MicroBatchTimes,
    stage_layers: StageLayers,
) -> _Activations:
    """Activations beside those of the micro-batch and the layer that run.

    The first stage holds several micro-batches, the last one a single one. Over a shared vocabulary
    there are a shifted copy of the logits and a buffer of exponentials in place of one.
    """
    layers = stage_layers.inner
    last_layers = np.where(s.pp > 1, stage_layers.last, layers)
    saved = _save_by_checkpoint(model, s, sizes, times)
    held = partitions.held_batches(sizes.micro, stages=s.pp, schedule=s.schedule, chunks=s.chunks)
    tokens = s.micro_batch * model.sequence / s.cp
    return _Activations(
        first_stage=(held * layers - 1.0) * saved + (held - 1.0) * times.embeddings.saved,
        last_stage=(last_layers - 1.0) * saved,
        whole_inputs=np.where(s.rows > 1, sizes.column * model.hidden, 0.0),
        logits=np.where(s.tp > 1, sizes.wide * tokens * model.vocabulary / s.tp, 0.0),
    )


def _choose_moments(moments: Moments, gradients: _Gradients) -> BackwardMoments:
    """Fullest moments of the backward pass of strategies, which hold gradients for different
    times."""

    def choose(until_sum: Array, until_reduction: Array, until_update: Array) -> Array:
        kept = np.where(gradients.until_update, until_update, until_sum)
        return np.where(gradients.until_reduction, until_reduction, kept)

    return map_arrays(choose, moments.until_sum, moments.until_reduction, moments.until_update)


def _list_candidates(
    model: Transformer,
    s: Strategy,
    sizes: Sizes,
    times: MicroBatchTimes,
    stage_layers: StageLayers,
    weights: _Weights,
) -> list[_Candidate]:
    """Moments one of which is the fullest."""
    layers = stage_layers.inner
    gradients = _hold_gradients(s, sizes, weights)
    gathered = _hold_gathered(model, s, sizes, weights, layers)
    activations = _hold_activations(model, s, sizes, times, stage_layers)
    backward = _choose_moments(times.moments, gradients)
    # a gradient that is kept as it is computed has the format of its weight
    itemsize = np.where(_is_autocast(s, sizes), sizes.wide, sizes.itemsize)
    other_layers = (layers - 1.0) * itemsize * weights.layer
    other_gradients = np.where(gradients.until_update, other_layers, 0.0)
    return [
        *_list_in_forward(times.moments, activations, gradients, gathered),
        *_list_in_backward(backward, activations, gradients, gathered, other_gradients),
        _find_next_micro_batch(s, sizes, weights, backward, gradients, gathered),
        _find_packing_of_layer(sizes, weights, backward, activations, gradients, gathered),
        _find_packing_of_ends(sizes, weights, gradients),
        _find_update(model, sizes, weights, gradients, itemsize),
    ]


def _list_in_forward(
    moments: Moments, activations: _Activations, gradients: _Gradients, gathered: _Gathered
) -> list[_Candidate]:
    """The fullest moments of a forward pass: in the embeddings and a layer of the first stage, and
    in the head of the last one."""
    forward = moments.forward
    inputs = activations.whole_inputs
    none = np.zeros(len(inputs))
    of_layer = forward.layer + activations.first_stage + inputs
    of_head = forward.head + activations.last_stage + inputs + activations.logits
    return [
        _Candidate(forward.embeddings + inputs, gradients.sums, gathered.embeddings, none),
        _Candidate(of_layer, gradients.sums, gathered.layers, none),
        _Candidate(of_head, gradients.sums, gathered.head, none),
    ]


def _list_in_backward(
    backward: BackwardMoments,
    activations: _Activations,
    gradients: _Gradients,
    gathered: _Gathered,
    other_gradients: Array,
) -> list[_Candidate]:
    """The fullest moments of a backward pass: in the head of the last stage, in its first layer on
    the first stage, and in its last layer and the embeddings, with gradients of other layers."""
    head, layer, embeddings = backward.head, backward.layer, backward.embeddings
    inputs = activations.whole_inputs
    none = np.zeros(len(inputs))
    in_head = head.activations + activations.last_stage + inputs + activations.logits
    in_layer = layer.activations + activations.first_stage + inputs + 3.0 * inputs
    sums = gradients.sums
    with_others = sums + layer.gradients + other_gradients
    in_embeddings = sums + embeddings.gradients + other_gradients
    return [
        _Candidate(in_head, sums + head.gradients, gathered.head, none),
        _Candidate(in_layer, sums + layer.gradients, gathered.layers_backward, none),
        _Candidate(layer.activations, with_others, gathered.layers_end, none),
        _Candidate(embeddings.activations, in_embeddings, none, none),
    ]


def _find_next_micro_batch(
    s: Strategy,
    sizes: Sizes,
    weights: _Weights,
    backward: BackwardMoments,
    gradients: _Gradients,
    gathered: _Gathered,
) -> _Candidate:
    """The end of a backward pass that keeps all gathered weights for the next micro-batch (ZeRO
    stage 1); the sums of the first one are only being made."""
    keeps_weights = (s.zero == 1) & (sizes.micro > 1)
    sums = gradients.sums
    made = np.where(sizes.micro > 2, sums, sums - sizes.wide * weights.ends)
    embeddings = backward.embeddings
    return _Candidate(
        np.where(keeps_weights, embeddings.activations, 0.0),
        np.where(keeps_weights, made + embeddings.gradients, 0.0),
        np.where(keeps_weights, gathered.stage, 0.0),
        np.zeros(len(sums)),
    )


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
    copy = np.where(gradients.until_reduction, sizes.summed * weights.layer, 0.0)
    return _Candidate(
        moment.activations + activations.first_stage,
        gradients.sums + moment.gradients,
        gathered.packing + copy,
        np.zeros(len(copy)),
    )


def _find_packing_of_ends(sizes: Sizes, weights: _Weights, gradients: _Gradients) -> _Candidate:
    """When the gradients of all other weights and their copy are there, and all else of the pass is
    gone."""
    new = np.where(gradients.until_reduction, sizes.itemsize * weights.ends, 0.0)
    copy = np.where(gradients.until_reduction, sizes.summed * weights.ends, 0.0)
    none = np.zeros(len(copy))
    return _Candidate(none, gradients.sums + new, copy, none)


def _find_update(
    model: Transformer, sizes: Sizes, weights: _Weights, gradients: _Gradients, itemsize: Array
) -> _Candidate:
    """The update, with the tensors that it writes beside its results."""
    all_gradients = np.where(gradients.until_update, itemsize * weights.all, gradients.sums)
    none = np.zeros(len(all_gradients))
    updated = sizes.wide * weights.all / weights.owners
    return _Candidate(none, all_gradients, none, updated * _count_scratch(model))


def _count_scratch(model: Transformer) -> float:
    """Tensors of the size of all weights that an update of all at once writes beside its
    results [-]."""
    if model.fused:
        return 0.0
    optimizer = find_optimizer(model.optimizer)
    steps = optimizer.for_each_update or optimizer.update
    return float(
        len({name for step in steps for name in step.writes if name.startswith("scratch")})
    )


def _save_by_checkpoint(
    model: Transformer, s: Strategy, sizes: Sizes, times: MicroBatchTimes
) -> Array:
    """Activations that a layer keeps for its backward pass [B]; with ``selective`` checkpoints
    none of those between the projections of attention."""
    keep = partial(
        partitions.activation_bytes,
        s.micro_batch,
        model.sequence / s.cp,
        model.hidden,
        heads=model.heads,
        fused=model.attention not in UNFUSED,
        dropout=model.dropout > 0,
        tensor=s.tp,
        sharing=s.rows,
        itemsize=sizes.itemsize,
    )
    scores = keep(recompute="none") - keep(recompute="selective")
    saved = times.layer.saved
    return np.where(s.checkpoint == "selective", np.maximum(saved - scores, 0.0), saved)


def _hold_messages(
    model: Transformer,
    s: Strategy,
    sizes: Sizes,
    weights: _Weights,
    stage_layers: StageLayers,
) -> Array:
    """What collectives and messages of stages hold through an iteration [B]."""
    layer, ends = sizes.itemsize * weights.layer, sizes.itemsize * weights.ends
    # the stream that gathers holds two units at once, and shards that were cast for one
    casts = np.where(sizes.wide > sizes.itemsize, np.maximum(ends, layer) / weights.owners, 0.0)
    two_layers = np.where(stage_layers.inner > 1, 2.0 * layer, 0.0)
    gathered = np.where(s.zero > 0, np.maximum(ends + layer, two_layers) + casts, 0.0)
    held = partitions.held_batches(sizes.micro, stages=s.pp, schedule=s.schedule, chunks=s.chunks)
    inputs = sizes.column * model.hidden
    messages = (2.0 * s.chunks - 1.0) * sizes.micro + s.chunks * held
    messages = np.where(s.pp > 1, inputs * messages, 0.0) / s.rows
    # DistributedDataParallel keeps all gradients a second time, in its buckets
    buckets = np.where(s.replicated & (s.dp > 1), sizes.wide * weights.all, 0.0)
    return np.asarray(gathered + messages + buckets)
