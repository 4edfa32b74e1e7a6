"""Memory of strategies: what the fullest rank holds, for many strategies at once."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models import partitions
from perfkit.models.optimizers import find_optimizer
from perfkit.prediction.kept import UNTIL
from perfkit.prediction.memory import HELD
from perfkit.prediction.micro_batches import Sizes
from perfkit.workloads.blocks import UNFUSED
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer


class _Candidate(NamedTuple):
    """What may be the fullest moment of an iteration [B]."""

    activations: Any
    gradients: Any
    gathered: Any
    scratch: Any


class _Weights(NamedTuple):
    """Trained numbers of a stage: of a layer, of all other weights, and of the whole stage; and by
    how many ranks they are shared on average [-]."""

    layer: Array
    ends: Array
    all: Array
    owners: Array


def measure_strategies(
    model: Transformer,
    s: Strategy,
    sizes: Sizes,
    parts: Mapping[str, Array],
    stages: Sequence[Array],
    all_weights: Array,
    owners: Array,
) -> dict[str, Array]:
    """Memory of the fullest rank of each strategy.

    Parameters
    ----------
    model : Transformer
        The model.
    s : Strategy
        Each field an array.
    sizes : Sizes
        Sizes of a micro-batch.
    parts : mapping of str to array
        What `perfkit.prediction.micro_batches.price_micro_batch` finds.
    stages : sequence of array
        Layers of the first stage, of the largest between the ends, and of the last [-].
    all_weights : array
        Trained numbers of the largest stage [-].
    owners : array
        Mean number of ranks that share a weight, if they share any [-].

    Returns
    -------
    held : dict of str to array
        Bytes by use, see `perfkit.prediction.memory.HELD`, without the workspaces of libraries [B].

    Notes
    -----
    Activations and new gradients are those of the recorded micro-batch, whose tensors live as long
    as those of the graph of `predict`. Docs/formulas.md, table 9.3, has what PyTorch holds besides.
    """
    layer = parts["layers.weights"]
    layers = stages[1]
    shards = np.where(s.zero > 0, owners, 1.0)
    weights = _Weights(layer, all_weights - layers * layer, all_weights, shards)
    autocast = s.replicated & (sizes.wide > sizes.itemsize)
    # weights that the optimizer updates, and copies of them that layers work with
    itemsize = np.where(autocast | (s.zero > 0), sizes.wide, sizes.itemsize)
    # what FSDP gathers in its stages 1 and 2 counts as communication: it trains shards alone
    shared = {"ranks": owners, "zero": np.where(s.zero > 0, 3, 0)}
    trained = partitions.model_state_bytes(
        all_weights, weight=itemsize, gradient=0.0, states=0.0, **shared
    )
    masters = np.where((s.zero > 0) | autocast, 0.0, 1.0 * (sizes.wide > sizes.itemsize))
    optimizer = find_optimizer(model.optimizer)
    states = partitions.model_state_bytes(
        all_weights,
        weight=0.0,
        gradient=0.0,
        states=sizes.wide * (optimizer.states + masters),
        **shared,
    )
    sums, until = _hold_sums(s, sizes, weights, autocast)
    candidates = _list_candidates(model, s, sizes, parts, stages, weights, sums, until)
    activations, gradients, gathered, scratch = candidates[0]
    most = sum(candidates[0])
    for candidate in candidates[1:]:
        total = sum(candidate)
        fuller = total > most
        most = np.where(fuller, total, most)
        activations, gradients, gathered, scratch = (
            np.where(fuller, own, known)
            for own, known in zip(
                candidate, (activations, gradients, gathered, scratch), strict=True
            )
        )
    # of shards: gradients that are not yet reduced are what collectives send
    sharded = s.zero > 0
    unreduced = np.where(sharded, gradients - sizes.wide * all_weights / shards, 0.0)
    unreduced = np.maximum(unreduced, 0.0)
    gradients, gathered = gradients - unreduced, gathered + unreduced
    held = {
        "parameters": trained,
        "gradients": gradients,
        "states": states,
        "activations": activations,
        "communication": gathered + _hold_messages(model, s, sizes, weights, stages),
        "workspace": scratch,
    }
    return {name: held[name] for name in HELD}


def _hold_sums(
    s: Strategy, sizes: Sizes, weights: _Weights, autocast: Array
) -> tuple[Array, Array]:
    """Sums of gradients that are held through an iteration [B], and until when the gradients of a
    micro-batch are, see `perfkit.prediction.kept.UNTIL`."""
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
    sums = np.where(s.zero > 0, shards + added_in_zero + added_to_shards, added_whole)
    reduced = (s.zero > 0) & (s.scattered | ~several)
    kept_alone = (s.zero == 0) & (added_whole == 0)
    return sums, np.where(reduced, "reduction", np.where(kept_alone, "update", "sum"))


def _list_candidates(
    model: Transformer,
    s: Strategy,
    sizes: Sizes,
    parts: Mapping[str, Array],
    stages: Sequence[Array],
    weights: _Weights,
    sums: Array,
    until: Array,
) -> list[_Candidate]:
    """Moments one of which is the fullest."""
    none = np.zeros(len(sums))
    layers = stages[1]
    last_layers = np.where(s.pp > 1, stages[2], layers)
    saved = _save_by_checkpoint(model, s, sizes, parts)
    held = partitions.held_batches(sizes.micro, stages=s.pp, schedule=s.schedule, chunks=s.chunks)
    # over a shared vocabulary, a shifted copy and a buffer of exponentials in place of one
    tokens = s.micro_batch * model.sequence / s.cp
    logits = np.where(s.tp > 1, sizes.wide * tokens * model.vocabulary / s.tp, 0.0)
    whole_inputs = np.where(s.rows > 1, sizes.column * model.hidden, 0.0)

    held_until = {when: np.flatnonzero(until == when) for when in UNTIL}

    def find(phase: str, region: str) -> tuple[Array, Array]:
        """Activations and new gradients at the fullest moment of a segment."""
        key = f"{phase}.{region}"
        activations = parts[f"activations.sum.{key}"]
        if phase == "forward":
            return activations, none
        activations = activations.copy()
        gradients = parts[f"gradients.sum.{key}"].copy()
        for when in ("reduction", "update"):
            chosen = held_until[when]
            if len(chosen):
                activations[chosen] = parts[f"activations.{when}.{key}"][chosen]
                gradients[chosen] = parts[f"gradients.{when}.{key}"][chosen]
        return activations, gradients

    narrow = sizes.itemsize
    layer, ends = narrow * weights.layer, narrow * weights.ends
    all_layers = layers * layer
    whole = s.zero > 0
    once = whole & (s.zero < 3)  # gathered weights stay until their last use
    in_forward = np.where(once, all_layers + ends, np.where(whole, layer + ends, 0.0))
    in_head = np.where(once, all_layers + ends, np.where(whole, ends, 0.0))
    # the norm of BERT's embeddings is among the last to be read
    ends_to_the_end = np.where(whole, 0.0 if model.causal else ends, 0.0)
    in_backward = ends_to_the_end + np.where(once, all_layers, np.where(whole, layer, 0.0))
    at_end = ends_to_the_end + np.where(whole, layer, 0.0)
    autocast = s.replicated & (sizes.wide > sizes.itemsize)
    gradient = np.where(autocast, sizes.wide, narrow)
    inner_gradients = (layers - 1.0) * gradient * weights.layer * (until == "update")
    candidates = []
    # the first stage holds several micro-batches, the last one a single one
    kept_in_first = (held * layers - 1.0) * saved + (held - 1.0) * parts["kept.embeddings"]
    kept_in_last = (last_layers - 1.0) * saved
    for phase, region, kept, gathered in (
        ("forward", "embeddings", none, np.where(whole, ends, 0.0)),
        ("forward", "layers", kept_in_first, in_forward),
        ("forward", "head", kept_in_last, in_head),
        ("backward", "head", kept_in_last, in_head),
        ("backward", "layers", kept_in_first, in_backward),
    ):
        activations, gradients = find(phase, region)
        again = 3.0 * whole_inputs if (phase, region) == ("backward", "layers") else 0.0
        again = again + logits if region == "head" else again
        candidates.append(
            _Candidate(activations + kept + whole_inputs + again, sums + gradients, gathered, none)
        )
    activations, gradients = find("backward", "layers")
    candidates.append(_Candidate(activations, sums + gradients + inner_gradients, at_end, none))
    activations, gradients = find("backward", "embeddings")
    candidates.append(_Candidate(activations, sums + gradients + inner_gradients, none, none))
    # weights that are gathered once are kept for the next micro-batch; the sums of the first one
    # are only being made
    kept_weights = (s.zero == 1) & (sizes.micro > 1)
    made = np.where(sizes.micro > 2, sums, sums - sizes.wide * weights.ends)
    candidates.append(
        _Candidate(
            np.where(kept_weights, activations, 0.0),
            np.where(kept_weights, made + gradients, 0.0),
            np.where(kept_weights, all_layers + ends, 0.0),
            none,
        )
    )
    # gradients of a unit and the copy that is reduced
    activations, gradients = find("packing", "layers")
    packed = np.where(until == "reduction", sizes.summed * weights.layer, 0.0)
    other_layers = ends_to_the_end + np.where(once, all_layers - layer, 0.0)
    candidates.append(
        _Candidate(activations + kept_in_first, sums + gradients, other_layers + packed, none)
    )
    # when all else of the pass is gone
    packed = np.where(until == "reduction", sizes.summed * weights.ends, 0.0)
    new = np.where(until == "reduction", narrow * weights.ends, 0.0)
    candidates.append(_Candidate(none, sums + new, packed, none))
    update = sizes.wide * weights.all / weights.owners
    all_gradients = np.where(until == "update", gradient * weights.all, sums)
    candidates.append(_Candidate(none, all_gradients, none, update * _count_scratch(model)))
    return candidates


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
    model: Transformer, s: Strategy, sizes: Sizes, parts: Mapping[str, Array]
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
    saved = parts["kept.layers"]
    return np.where(s.checkpoint == "selective", np.maximum(saved - scores, 0.0), saved)


def _hold_messages(
    model: Transformer,
    s: Strategy,
    sizes: Sizes,
    weights: _Weights,
    stages: Sequence[Array],
) -> Array:
    """What collectives and messages of stages hold through an iteration [B]."""
    layer, ends = sizes.itemsize * weights.layer, sizes.itemsize * weights.ends
    # the stream that gathers holds two units at once, and shards that were cast for one
    casts = np.where(sizes.wide > sizes.itemsize, np.maximum(ends, layer) / weights.owners, 0.0)
    two_layers = np.where(stages[1] > 1, 2.0 * layer, 0.0)
    gathered = np.where(s.zero > 0, np.maximum(ends + layer, two_layers) + casts, 0.0)
    held = partitions.held_batches(sizes.micro, stages=s.pp, schedule=s.schedule, chunks=s.chunks)
    inputs = sizes.column * model.hidden
    messages = (2.0 * s.chunks - 1.0) * sizes.micro + s.chunks * held
    messages = np.where(s.pp > 1, inputs * messages, 0.0) / s.rows
    # DistributedDataParallel keeps all gradients a second time, in its buckets
    buckets = np.where(s.replicated & (s.dp > 1), sizes.wide * weights.all, 0.0)
    return np.asarray(gathered + messages + buckets)
