"""Blocks of a Transformer as one rank records them: whole, its part of shared layers, or with
weights in shards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from perfkit.models.optimizers import Optimizer, find_optimizer
from perfkit.workloads import layers
from perfkit.workloads.activations import make_activation
from perfkit.workloads.attention_blocks import attend, attend_latent
from perfkit.workloads.columns import OperationSizes
from perfkit.workloads.graph import Graph
from perfkit.workloads.image_blocks import classify_images, embed_images
from perfkit.workloads.iteration import make_graph, step, update_one_by_one
from perfkit.workloads.layer_kinds import find_layer_models
from perfkit.workloads.layer_types import Add, ConcatenateHeads, Scale
from perfkit.workloads.layers import MLPParallelism
from perfkit.workloads.mlp_blocks import feed_forward, mix_experts
from perfkit.workloads.operations import Tensor, Weight
from perfkit.workloads.rank_share import RankShare, exchange_tokens, project
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.tape import (
    ITEMSIZE,
    Calls,
    RecordedAccess,
    Tape,
    accumulate,
    empty_bucket,
    fill_bucket,
)
from perfkit.workloads.weight_updates import measure_scratch

#: Ways to train on several ranks. Ranks share nothing; states of the optimizer; gradients too;
#: weights too.
PARALLEL = ("ddp", "zero1", "zero2", "fsdp")
#: What replicas exchange: gradients in the buckets of DistributedDataParallel, or shards of weights
#: and gradients.
EXCHANGES = ("buckets", "shards")
#: Sizes that times on a GPU depend on.
_TIMED = ("flops", "batch", "m", "n", "k", "rows", "lookups", "dim", "nbytes")


def record_forward(
    tape: Tape,
    model: Any,
    share: RankShare,
    most: int,
    open_unit: Any,
    *,
    stands_for_all: bool = False,
) -> None:
    """Record the forward pass of a micro-batch, with at most so many layers; `open_unit` makes
    their weights ready. A single layer may stand for all, of which only the first one has no gradient
    of its input where embeddings are frozen."""
    tape.module, tape.layer = "embeddings", None
    tape.trains_adapters_alone = model.lora_rank > 0
    tape.reuse_weights()
    with open_unit(None):
        if model.patch:
            x = embed_images(tape, model, share)
        else:
            words = tape.parameter(share.words(model), model.hidden)
            x = _embed_words(tape, model, share, words)
        x = layers.dropout(tape, model.dropout, x)
        if stands_for_all:  # and only the first layer needs no gradient of its input
            x.needs_gradient = True
        models_of_layers = find_layer_models(model)
        recorded = models_of_layers[: model.layers][:most]
        if model.checkpoint_group > 1:
            for first in range(0, len(recorded), model.checkpoint_group):
                group = recorded[first : first + model.checkpoint_group]
                x = _run_group(tape, group, first, share, x)
        else:
            for layer, model_of_layer in enumerate(recorded):
                tape.layer = layer
                with open_unit(layer):
                    x = _run_layer(tape, model_of_layer, share, x)
        tape.module, tape.layer = "head", None
        if model.patch:
            layers.add_losses(tape, [classify_images(tape, model, share, x)])
            return
        if model.masks_words:
            x = tape.apply(make_activation(model), project(tape, model, x, model.hidden))
        normed = layers.norm(tape, model.norm, x)
        x = exchange_tokens(tape, normed, share, ahead=True)
        columns = share.words(model)
        weight = words if model.tie else tape.parameter(columns, model.hidden)
        if model.loss_chunks > 1:
            layers.chunked_cross_entropy(
                tape,
                x,
                weight,
                chunks=model.loss_chunks,
                itemsize=4 if model.mixed else tape.itemsize,
                ranks=share.tensor,
            )
            return
        bias = None
        if model.head_bias or model.masks_words:
            bias = tape.parameter(columns)
        losses = [_find_loss(tape, model, share, layers.linear(tape, x, weight, bias))]
        for number, model_of_layer in enumerate(models_of_layers[model.layers :]):
            normed = _join_next_token(tape, model, share, normed, words)
            if most > 1:  # else one layer represents all, also these
                tape.layer = len(recorded) + number
                with open_unit(tape.layer):
                    normed = _run_layer(tape, model_of_layer, share, normed)
                tape.module, tape.layer = "head", None
            normed = layers.norm(tape, model.norm, normed)
            x = exchange_tokens(tape, normed, share, ahead=True)
            losses.append(_find_loss(tape, model, share, layers.linear(tape, x, weight, bias)))
    layers.add_losses(tape, losses)


def _embed_words(tape: Tape, model: Any, share: RankShare, words: Weight) -> Tensor:
    """The sum of the embeddings of words, of positions and, in a BERT, of types of tokens, which it
    norms."""
    hidden = model.hidden
    batch, sequence = share.batch, share.sequence
    rows = sequence // share.rows if np.any(share.rows > 1) else sequence
    positions = None
    if not model.rotary:
        positions = tape.parameter(model.positions + model.padded_positions, hidden)
    x = layers.look_up(tape, words, batch * sequence, batch, sequence)
    x = exchange_tokens(tape, x, share, ahead=False)
    if model.scaled_embeddings:
        x = tape.apply(Scale(), x)
    if positions:
        x = tape.apply(Add(), x, layers.look_up(tape, positions, rows, rows))
    if model.masks_words:
        of_types = tape.parameter(model.token_types, hidden)
        types = layers.look_up(tape, of_types, batch * rows, batch, rows)
        x = layers.norm(tape, model.norm, tape.apply(Add(), x, types))
    return x


def _run_layer(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """A layer, by the number on the tape, whose backward pass may compute it again."""
    run = partial(_layer, tape, model, share)
    if model.checkpoint and tape.layer is not None and tape.layer < model.checkpoint_layers:
        return layers.recompute(tape, run, x, model.computed_again)
    return run(x)


def _run_group(
    tape: Tape, models: Sequence[Any], first: int, share: RankShare, x: Tensor
) -> Tensor:
    """Layers from the number `first` on that keep one input together, and are computed again at once."""

    def run(x: Tensor) -> Tensor:
        for number, model in enumerate(models):
            tape.layer = first + number
            x = _layer(tape, model, share, x)
        return x

    return layers.recompute(tape, run, x, models[0].computed_again)


def _join_next_token(tape: Tape, model: Any, share: RankShare, x: Tensor, words: Tensor) -> Tensor:
    """The input of a layer that predicts a further token: a projection of two norms, of what the layers
    before give and of the embeddings of the next tokens. Each rank projects its own tokens."""
    tokens = share.batch * share.sequence
    hidden = model.hidden
    embedded = layers.look_up(tape, words, tokens, share.batch, share.sequence)
    embedded = exchange_tokens(tape, embedded, share, ahead=False)
    given = layers.norm(tape, model.norm, x)
    following = layers.norm(tape, model.norm, embedded)
    shape = (*x.shape[:2], 1, hidden)
    both = tape.apply(ConcatenateHeads(), given.view(*shape), following.view(*shape))
    weight = tape.parameter(hidden, 2 * hidden)
    return layers.linear(tape, both.view(*x.shape[:2], 2 * hidden), weight)


def _find_loss(tape: Tape, model: Any, share: RankShare, logits: Tensor) -> Tensor:
    """The loss of logits, with the messages of ranks that share the vocabulary."""
    tokens = share.batch * share.sequence
    if model.scaled_logits:
        logits = tape.apply(Scale(), logits)
    if model.logit_cap:
        logits = layers.cap(tape, logits)
    if np.any(share.tensor > 1):
        # largest logit, sum of exponentials, and logit of the label
        for _ in range(3):
            tape.collective("all_reduce", [], [], nbytes=4 * tokens)
    # autocast takes the logarithm of narrow numbers, and casts it for the loss
    autocast = tape.wide > tape.itemsize
    if model.mixed and not autocast:
        narrow = logits
        logits = layers.cast(tape, narrow, 4)
        tape.node(partial(_hold, tape, narrow))
    return layers.cross_entropy(tape, logits, tokens)


def _hold(tape: Tape, tensor: Tensor) -> None:
    """Let a tensor live until the last recorded operation, which does not read it: its memory is
    free earlier, but too small for what is allocated meanwhile."""
    access = RecordedAccess(tensor.storage, 0.0, False, tensor.layer)
    tape.operations[-1].accesses.append(access)


def _layer(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """One Transformer layer: attention, and an MLP behind it or beside it."""
    if model.parallel_mlp:
        return _add_both(tape, model, share, x)
    for name, body in (("attention", _attend), ("mlp", _apply_mlp)):
        tape.module = f"layers.{tape.layer}.{name}"
        x = _add_branch(tape, model, x, partial(body, tape, model, share))
    return x


def _add_branch(tape: Tape, model: Any, x: Tensor, body: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum with what attention or an MLP makes of it. Norms are before these (GPT-2), behind them
    (OLMo 2), on both sides (Gemma 2), or behind the sum (BERT)."""
    branch = x
    if model.norm_place != "after" and not model.masks_words:
        with tape.inside("norms"):
            branch = layers.norm(tape, model.norm, branch)
    branch = body(branch)
    if model.norm_place != "before":
        with tape.inside("norms"):
            branch = layers.norm(tape, model.norm, branch)
    branch = layers.dropout(tape, model.dropout, branch)
    if model.scaled_branches:
        branch = tape.apply(Scale(), branch)
    x = tape.apply(Add(), x, branch)
    if model.masks_words:
        x = layers.norm(tape, model.norm, x)
    return x


def _add_both(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """The sum with what attention and an MLP make of one norm (GPT-J), or each of a norm of its own
    (GPT-NeoX). Ranks that share both sum up their parts once."""
    tape.module = f"layers.{tape.layer}.attention"
    with tape.inside("norms"):
        normed = layers.norm(tape, model.norm, x)
    normed = exchange_tokens(tape, normed, share, ahead=True)
    attended = layers.dropout(tape, model.dropout, attend(tape, model, share, normed))
    tape.module = f"layers.{tape.layer}.mlp"
    if model.parallel_norms == 2:
        with tape.inside("norms"):
            normed = layers.norm(tape, model.norm, x)
        normed = exchange_tokens(tape, normed, share, ahead=True)
    fed = layers.dropout(tape, model.dropout, feed_forward(tape, model, share, normed))
    both = exchange_tokens(tape, tape.apply(Add(), attended, fed), share, ahead=False)
    return tape.apply(Add(), both, x)


def _attend(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """Attention of a layer, with the messages of ranks that share its heads."""
    if model.kv_lora_rank:
        x = attend_latent(tape, model, share, x)
    else:
        x = attend(tape, model, share, exchange_tokens(tape, x, share, ahead=True))
    return exchange_tokens(tape, x, share, ahead=False)


def _apply_mlp(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """The MLP of a layer, or its experts, with the messages of ranks that share its products. A rank
    sends its own tokens where experts are spread over all ranks of a stage."""
    mlp, part = feed_forward, "mlp"
    if model.experts:
        mlp, part = mix_experts, "experts"
    with tape.inside(part):
        if share.spreads_experts:
            return mix_experts(tape, model, share, x)
        x = mlp(tape, model, share, exchange_tokens(tape, x, share, ahead=True))
        return exchange_tokens(tape, x, share, ahead=False)


class FSDPUnits:
    """Weights in shards over ranks, as PyTorch's `fully_shard` handles them.

    A unit is a layer, or all weights outside of layers (None). Its weights are gathered by one
    collective, and its gradients are reduced by one. Collectives run on streams of their own. In
    the forward pass a unit is gathered as soon as the last unit but one has been unpacked; in the
    backward pass, as soon as the unit before it has been. Gradients are reduced when their unit is
    finished; the next unit waits for that before it packs its own.

    Parameters
    ----------
    tape : Tape
        A tape that knows all weights and has recorded nothing.
    ranks : int
        Ranks that share them [-].
    parallel : str
        ``zero1`` gathers weights once and reduces gradients with the last micro-batch. ``zero2``
        gathers and reduces with each. ``fsdp`` also frees weights after the forward pass and
        gathers them again in the backward pass.
    itemsize, summed : int
        Bytes of a number in a shard, and of a gradient while it is reduced [B].
    """

    #: Number of the group of these ranks, and of the group that sums up reduced gradients; None if
    #: no group does [-].
    group = 0
    replicas: int | None = None

    def __init__(
        self,
        tape: Tape,
        ranks: int,
        parallel: str,
        itemsize: int,
        summed: int,
    ) -> None:
        self.tape, self.ranks, self.parallel = tape, ranks, parallel
        self.itemsize, self.summed = itemsize, summed
        self.weights: dict[int | None, list[Weight]] = {}
        for weight in tape.weights:
            self.weights.setdefault(weight.layer, []).append(weight)
        self.buffers: dict[int | None, Tensor] = {}

    def open(self, layer: int | None) -> AbstractContextManager[None]:
        """Gather the weights of a unit for what is recorded inside, and reduce its gradients in the
        backward pass."""
        if layer is None:
            return self._open_outside()
        return self._open_layer(layer)

    @property
    def _reduces_each(self) -> bool:
        """Whether each micro-batch gathers weights and reduces gradients."""
        return self.parallel != "zero1"

    @contextmanager
    def _open_outside(self) -> Iterator[None]:
        """Open the unit of the weights outside of layers, with which an iteration begins."""
        if self._reduces_each or self.tape.is_first_micro_batch:
            self.launch(None, None)
            self.launch(0, 0)
            self.unpack(None, 1)
        self._note_reduction(None)
        yield

    @contextmanager
    def _open_layer(self, layer: int) -> Iterator[None]:
        """Open the unit of a layer."""
        regathers = self.parallel == "fsdp"
        if self._reduces_each or self.tape.is_first_micro_batch:
            self.unpack(layer, layer + 2)
        if regathers and layer + 1 not in self.weights:
            self.launch(layer, layer)
        self._note_reduction(layer)
        yield
        if regathers:
            self.tape.node(partial(self.unpack, layer, layer - 1))

    def _note_reduction(self, layer: int | None) -> None:
        """Let the backward pass end a unit with the reduction of its gradients."""
        is_complete = self._reduces_each or self.tape.is_last_micro_batch
        self.tape.node(partial(self.reduce, layer, is_complete))

    def find_split_dimension(self, weight: Tensor) -> int:
        """The dimension along which ranks split a weight.

        It is the first one, but for weights of experts, (experts, inputs, outputs), whose experts
        the ranks do not divide: `fully_shard` would fill up the last ranks with zeros there.
        torchtitan and others split the inputs of such weights, and so does this.
        """
        if self.ranks == 1 or len(weight.shape) < 3 or weight.shape[0] % self.ranks == 0:
            return 0
        return 1

    def list_by_rank(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Weights as collectives take them, the part of one rank after that of another.

        Weights that are split along their first dimension are in this order already. The others
        get a tensor of their own, which `reorder` reads or writes.
        """
        by_rank: list[Tensor] = []
        for weight in weights:
            if self.find_split_dimension(weight) > 0:
                weight = self.tape.tensor(*weight.shape, itemsize=weight.itemsize)
            by_rank.append(weight)
        return by_rank

    def reorder(self, source: Tensor, target: Tensor) -> None:
        """Copy a weight or a gradient from or to the order of ranks, if it has another one."""
        if source is target:
            return
        self.tape.copy("cat", [source], [target], rows=source.numel // source.shape[-1])

    def launch(self, layer: int | None, owner: int | None) -> None:
        """Gather the weights of a layer while its `owner`, another layer, is at work."""
        tape, weights = self.tape, self.weights[layer]
        before, tape.layer = tape.layer, layer
        for weight in weights:
            if weight.shard is not None:
                continue
            shape = list(weight.shape)
            split = self.find_split_dimension(weight)
            shape[split] = -(-shape[split] // self.ranks)
            weight.shard = tape.tensor(*shape, itemsize=self.itemsize)
            weight.group = None
        parts = [weight.stored for weight in weights]
        has_fp8 = any(weight.in_fp8 for weight in weights)
        width = 1 if has_fp8 else tape.itemsize  # bytes are sent where formats differ
        count = 0
        for weight, part in zip(weights, parts, strict=True):
            count = count + part.numel * (1 if weight.in_fp8 else tape.itemsize // width)
        narrow = tape.tensor(count, itemsize=width)
        whole = tape.tensor(count * self.ranks, itemsize=width)
        self.buffers[layer] = whole
        part_of_rank = whole.view(count)
        tape.layer = owner
        if tape.phase == "forward":
            tape.bare += 5
        if self.itemsize != tape.itemsize or has_fp8:
            tape.copy("_foreach_copy_", parts, [narrow], "copy_", rows=1)
            parts = [narrow]
        tape.copy("all_gather_copy_in", parts, [part_of_rank], "copy_", rows=1)
        tape.collective(
            "all_gather", [part_of_rank], [whole], nbytes=whole.nbytes, group=self.group
        )
        tape.layer = before

    def unpack(self, layer: int | None, ahead: int | None = None) -> None:
        """Copy gathered weights to storages of their own, and gather the layer `ahead`, if there is
        one."""
        tape, weights = self.tape, self.weights[layer]
        whole = self.buffers[layer]
        for weight in weights:
            weight.storage = tape.tensor(*weight.shape).storage
        tape.bare += len(weights) + 3 if tape.phase == "forward" else 2
        rows = self.ranks * len(weights)
        parts = self.list_by_rank(weights)
        for place, weight in enumerate(weights):
            if weight.in_fp8 and parts[place] is weight:
                parts[place] = tape.view_in_fp8(weight)
        sizes = OperationSizes(elements=whole.numel, rows=rows)
        tape.emit("split_with_sizes_copy", "copy", [whole], parts, sizes, variant="cat")
        for part, weight in zip(parts, weights, strict=True):
            if not weight.in_fp8:
                self.reorder(part, weight)
        if ahead is not None and ahead in self.weights:
            self.launch(ahead, 0 if layer is None else layer)

    def widen(self, weights: Sequence[Weight]) -> None:
        """Cast the gradients of a micro-batch that are added up before they are reduced, as
        `to_accumulated_grad_if_needed` of PyTorch does."""
        for weight in weights:
            narrow = self.tape.find_gradient(weight)
            if narrow.itemsize == self.itemsize:
                continue
            wide = self.tape.tensor(*narrow.shape, itemsize=self.itemsize)
            self.tape.elementwise("_to_copy", [narrow], [wide])
            weight.gradient = wide

    def reduce(self, layer: int | None, is_complete: bool) -> None:
        """Sum up the gradients of a unit over ranks, of which each gets its shards, and add earlier
        micro-batches; unless later micro-batches are added first."""
        tape = self.tape
        weights = [weight for weight in self.weights[layer] if weight.needs_gradient]
        if not weights:  # all are frozen
            return
        if not is_complete:
            self.widen(weights)
            return
        shards = [weight.stored for weight in weights]
        count = sum(shard.numel for shard in shards)
        flat = tape.tensor(count * self.ranks, itemsize=self.summed)
        reduced = tape.tensor(count, itemsize=self.summed)
        gradients = [tape.find_gradient(weight) for weight in weights]
        for weight in weights:
            weight.gradient = None
        parts = self.list_by_rank(gradients)
        for gradient, part in zip(gradients, parts, strict=True):
            self.reorder(gradient, part)
        tape.copy("chunk_cat", parts, [flat], "cat", rows=self.ranks * len(weights))
        tape.collective("reduce_scatter", [flat], [reduced], nbytes=flat.nbytes, group=self.group)
        if self.replicas is not None:
            tape.collective(
                "all_reduce", [reduced], [reduced], nbytes=reduced.nbytes, group=self.replicas
            )
        reduced = layers.cast(tape, reduced, self.itemsize)
        for shard in shards:
            shard.gradient = reduced.view(*shard.shape)
            accumulate(tape, shard)


def share_mlps(
    tape: Tape, record: Callable[..., Any], s: Strategy | None, groups: list[tuple[int, ...]]
) -> MLPParallelism:
    """How an empty tape records the MLPs of a DLRM that ranks share as `s` says; adds to the groups
    of ranks, whose places are their numbers."""

    def number(*spaced: int) -> int:
        members = tuple(range(*spaced))
        if members not in groups:
            groups.append(members)
        return groups.index(members)

    tp, ranks, owners = (s.tp, s.tp * s.dp, s.tp * int(s.owners)) if s else (1, 1, 1)
    shared = MLPParallelism(
        tp, number(tp) if tp > 1 else 0, number(0, ranks, tp) if ranks > tp else None
    )
    if s is None or not s.zero or owners == tp:
        return shared
    probe, parallel = Tape(tape.itemsize, overlap=tape.overlap), "fsdp" if s.zero == 3 else "zero2"
    record(probe, shared._replace(layers=count()))
    tape.adopt(probe.weights)
    units = FSDPUnits(tape, owners // tp, parallel, tape.wide, tape.wide)
    units.group = number(0, owners, tp)
    if owners < ranks:
        units.replicas = number(0, ranks, owners)
    units.weights.pop(None, None)  # tables
    for layer in (0, 1):  # at the start of an iteration
        units.launch(layer, layer)
    return shared._replace(layers=count(), open_unit=units.open)


def _pack(tape: Tape, wide: int) -> None:
    """Copy all gradients to one tensor."""
    tape.module = "exchange.whole"
    parts = _list_sums(tape)
    flat = tape.tensor(sum(part.numel for part in parts), itemsize=wide)
    tape.copy("cat", parts, [flat], rows=len(parts))


def _list_sums(tape: Tape) -> list[Tensor]:
    """Sums of the gradients of earlier micro-batches."""
    return [weight.gradient_sum for weight in tape.weights if weight.gradient_sum is not None]


def _exchange_buckets(tape: Tape) -> None:
    """Copy gradients to buckets and back, in the order in which they were computed."""
    by_storage = {total.storage: total for total in _list_sums(tape)}
    computed = []
    for operation in tape.operations:
        # a gradient was added to its sum once it was complete
        if operation.label.name == "add_" and operation.label.phase == "backward":
            computed.append(by_storage[operation.accesses[-1].storage])
    tape.phase, tape.module = "backward", "exchange.fill"
    parts = [fill_bucket(tape, total) for total in computed]
    tape.module = "exchange.empty"
    for total, part in zip(computed, parts, strict=True):
        empty_bucket(tape, part, total)


def _exchange_shards(tape: Tape, model: Any, wide: int) -> None:
    """Gather the weights of both units and reduce their gradients, as a single rank would."""
    summed = ITEMSIZE.get(model.reduce_dtype, wide)
    names: dict[int | None, str] = {}
    if any(weight.layer is None for weight in tape.weights):
        names[None] = "ends"
    names[0] = "layers"
    units = FSDPUnits(tape, 1, "fsdp", wide, summed)
    for unit, name in names.items():
        tape.phase, tape.calls, tape.module = "forward", Calls.EACH, f"exchange.gather.{name}"
        units.launch(unit, unit)
        units.unpack(unit)
    # the operations of a node of the engine are one call
    tape.phase, tape.calls, tape.module = "backward", Calls.NEXT, "exchange.regather.layers"
    units.launch(0, 0)
    units.unpack(0)
    for unit, name in names.items():
        tape.calls, tape.module = Calls.NEXT, f"exchange.scatter.{name}"
        for weight in units.weights[unit]:
            if weight.needs_gradient:
                weight.gradient = tape.tensor(*weight.shape)
        units.reduce(unit, True)


class RegionWeights(NamedTuple):
    """Numbers of weights of the regions of a Transformer on one rank.

    Parameters
    ----------
    embeddings, layer, head : int or array
        Of the embeddings, of one layer, and of the head [-].
    """

    embeddings: Any
    layer: Any
    head: Any


class InputBytes(NamedTuple):
    """What the passes of a rank read that they do not make, but for weights.

    Parameters
    ----------
    shared : int or array
        Angles of positions and a mask of attention, which all micro-batches share [B].
    of_micro_batch : int or array
        Words and labels of a micro-batch [B].
    """

    shared: Any
    of_micro_batch: Any


class RecordedPart(NamedTuple):
    """One micro-batch of embeddings, one layer and the head on a rank.

    Parameters
    ----------
    graph : Graph
        Its operations, see `record_part`.
    weights, trained, sent : RegionWeights
        Numbers of the weights of each region, those of them that are trained, and as many as a
        message of all of them has bytes for in the format of layers. Frozen weights in fewer bits
        count as many as they have bytes for.
    states : RegionWeights
        Numbers that the optimizer keeps for those that are trained, without scales of blocks.
    update_scratch : float
        Most bytes that updates of one weight after another hold beside what is kept; 0 for other
        updates [B].
    inputs : InputBytes
        What its passes read that they do not make.
    """

    graph: Graph
    weights: RegionWeights
    trained: RegionWeights
    sent: RegionWeights
    states: RegionWeights
    update_scratch: float
    inputs: InputBytes


def record_part(
    model: Any,
    share: RankShare,
    *,
    autocast: bool = False,
    exchange: str = "shards",
    fuses_sums: bool = False,
    keeps_fp8: bool = False,
    gathers_fp8: bool = False,
    has_buffers: bool = False,
    is_first_layer: bool = False,
) -> RecordedPart:
    """Record one micro-batch of embeddings, one layer and the head on a rank, and the update of
    their weights.

    Sizes are arrays over shares. Gradients are added to those of earlier micro-batches. With mixed
    precision the sums of gradients and the weights that the optimizer updates are fp32. With
    `autocast` weights are cast in each micro-batch, and norms and sums of layers are fp32 too.
    Otherwise the optimizer writes narrower copies of the weights, and layers work in their format.

    Parameters
    ----------
    model : Transformer
        The model.
    share : RankShare
        What the rank works on.
    autocast : bool, optional
        Whether mixed precision is that of autocast.
    exchange : str, optional
        What replicas exchange, one of `EXCHANGES`.
    fuses_sums : bool, optional
        Whether products of weight gradients add to the sums of earlier micro-batches.
    keeps_fp8 : bool, optional
        Whether weights are cast to fp8 for all micro-batches at once; these casts are operations
        `perfkit.workloads.operations.CAST_ONCE` of the forward pass.
    gathers_fp8 : bool, optional
        Whether ranks gather the weights of products in fp8 in this format.
    has_buffers : bool, optional
        Whether sums are kept in the format in which ranks reduce them.
    is_first_layer : bool, optional
        Whether the layer is the first one, not one that represents all; they differ where the
        embeddings are frozen.

    Returns
    -------
    part : RecordedPart
        Operations of the first share, with the sizes of all shares beside them, and numbers of
        weights. Their modules are ``embeddings``, ``layers.0`` and ``head``. Collectives are those of the ranks that share
        layers. Behind the update follows what replicas do around their messages, with modules that
        begin with ``exchange``: the copies of each gradient in the order in which they are
        computed (``exchange.fill``, ``exchange.empty``); or the unit of a layer and that of all
        other weights, as if a single rank held all shards (``exchange.gather.layers``,
        ``exchange.gather.ends``, ``exchange.regather.layers``, ``exchange.scatter.layers``,
        ``exchange.scatter.ends``);
        besides a copy of all gradients (``exchange.whole``), and, with mixed precision that is not
        autocast, of all weights that were updated (``exchange.narrow``).

    Raises
    ------
    ValueError
        For buckets with mixed precision that is not autocast, where the optimizer updates shards.
    """
    if model.mixed and not autocast and exchange == "buckets":
        fault = "exchange is 'buckets' with mixed precision that is not autocast"
        raise ValueError(f"{fault}; the optimizer updates shards then; take exchange='shards'")
    tape = Tape(ITEMSIZE.get(model.dtype, 2), mixed=autocast)
    tape.fuses_sums = fuses_sums
    tape.keeps_fp8, tape.fp8_recipe = keeps_fp8, model.fp8_recipe
    tape.gathers_fp8 = gathers_fp8
    record_forward(
        tape, model, share, 1, nullcontext, stands_for_all=model.layers > 1 and not is_first_layer
    )
    weights = _count_by_region(tape)
    inputs = _measure_inputs(tape)
    trained = _count_by_region(tape, trained_alone=True)
    wide = 4 if model.mixed else tape.itemsize
    summed = ITEMSIZE.get(model.reduce_dtype, wide) if has_buffers else wide
    for weight in tape.trained:
        weight.gradient_sum = tape.tensor(*weight.shape, itemsize=summed)
    tape.backward()
    if exchange == "shards":
        for weight in tape.weights:
            weight.shard = tape.tensor(*weight.shape, itemsize=wide)
            weight.shard.gradient = weight.gradient
    if model.optimizer_in_backward:
        update_one_by_one(tape, model.optimizer, "fused" if model.fused else "for_each")
    else:
        step(tape, model.optimizer, lists=True, fused=model.fused, by_region=True)
    if model.mixed and not autocast:
        tape.module = "exchange.narrow"
        for weight in tape.trained:
            sizes = OperationSizes(elements=weight.numel)
            tape.emit("_to_copy", "elementwise", [weight.stored], [weight], sizes)
    _pack(tape, summed)
    if exchange == "shards":
        _exchange_shards(tape, model, wide)
    else:
        _exchange_buckets(tape)
    graph = make_graph(tape, name=model.name, family=model.family, dtype=model.dtype)
    accesses, configurations = graph.accesses, graph.accesses.nbytes.shape[1]
    traffic = np.zeros((len(graph), configurations))
    np.add.at(traffic, accesses.operation, accesses.nbytes)
    buffers = np.zeros((len(tape.storage_layers), configurations))
    np.maximum.at(buffers, accesses.buffer, accesses.nbytes)
    columns = {name: graph.column(name) for name in _TIMED} | {"traffic": traffic}
    graph = replace(
        graph,
        features=graph.features.change(lambda values: values[:, 0]),
        accesses=replace(accesses, nbytes=accesses.nbytes[:, 0]),
        columns=columns,
        buffers=tuple(buffers),
    )
    return RecordedPart(
        graph=graph,
        weights=weights,
        trained=trained,
        sent=_count_sent(tape, weights),
        states=_count_states(tape, find_optimizer(model.optimizer)),
        update_scratch=measure_scratch(tape.operations),
        inputs=inputs,
    )


def _measure_inputs(tape: Tape) -> InputBytes:
    """Bytes that the forward pass of a tape reads first, but for weights."""
    met = {weight.storage for weight in tape.weights}
    of_all_layers = {one.storage for one in (tape.angles, tape.mask) if one is not None}
    shared: Any = 0
    of_micro_batch: Any = 0
    for operation in tape.operations:
        for access in operation.accesses:
            if access.storage in met:
                continue
            met.add(access.storage)
            if access.is_write:
                continue
            if access.storage in of_all_layers:
                shared = shared + access.nbytes
            else:
                of_micro_batch = of_micro_batch + access.nbytes
    return InputBytes(shared, of_micro_batch)


def _count_sent(tape: Tape, weights: RegionWeights) -> RegionWeights:
    """Numbers in the format of layers that are as many bytes as the weights that ranks gather: of
    those in fp8 as many as bytes."""
    in_fp8 = sum(weight.numel for weight in tape.weights if weight.in_fp8)
    return weights._replace(layer=weights.layer - in_fp8 * (1.0 - 1.0 / tape.itemsize))


def _count_states(tape: Tape, optimizer: Optimizer) -> RegionWeights:
    """Numbers that an optimizer keeps for the trained weights of each region."""

    def count(weight: Weight) -> Any:
        if not weight.needs_gradient:
            return 0
        return optimizer.count_states(weight.shape, is_hidden=weight.layer is not None)

    return _add_up_by_region(tape, count)


def _count_by_region(tape: Tape, *, trained_alone: bool = False) -> RegionWeights:
    """Numbers of the weights of a tape that has recorded one layer, by region."""

    def count(weight: Weight) -> Any:
        if trained_alone and not weight.needs_gradient:
            return 0
        if weight.frozen_format is not None:
            return weight.nbytes / weight.itemsize
        return weight.numel

    return _add_up_by_region(tape, count)


def _add_up_by_region(tape: Tape, count: Callable[[Weight], Any]) -> RegionWeights:
    """Add up a number of each weight of a tape that has recorded one layer, by region."""
    in_layer = [number for number, weight in enumerate(tape.weights) if weight.layer == 0]
    first, end = in_layer[0], in_layer[-1] + 1

    def add_up(weights: Sequence[Weight]) -> Any:
        return sum(count(weight) for weight in weights)

    return RegionWeights(
        embeddings=add_up(tape.weights[:first]),
        layer=add_up(tape.weights[first:end]),
        head=add_up(tape.weights[end:]),
    )
