"""Blocks of a Transformer as one rank records them: whole ones, or its part where ranks share layers and sequences."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from perfkit.workloads import layers
from perfkit.workloads.graph import Graph
from perfkit.workloads.iteration import make_together, step
from perfkit.workloads.operations import Tensor
from perfkit.workloads.tape import ITEMSIZE, Tape

#: Kinds of attention that keep scores in memory.
UNFUSED = ("eager", "math")


class Cut(NamedTuple):
    """What a rank works on: sequences and its tokens of each; and how many ranks share what.

    Parameters
    ----------
    batch, sequence : int or array
        Sequences of a micro-batch, and tokens of each that are this rank's [-].
    tensor : int or array
        Ranks that share the products of a layer [-].
    rows : int or array
        Ranks that share the tokens of all else: 1, or as many [-].
    context : int or array
        Ranks that share the tokens of a sequence [-].
    experts : int or array
        Ranks that share the experts of a layer [-].
    """

    batch: Any
    sequence: Any
    tensor: Any = 1
    rows: Any = 1
    context: Any = 1
    experts: Any = 1

    def part(self, size: Any) -> Any:
        """What each rank has of a size that ranks share, rounded up."""
        return -(-size // self.tensor) if np.any(self.tensor > 1) else size


def record_forward(tape: Tape, model: Any, cut: Cut, most: int, open_unit: Any) -> None:
    """Record the forward pass of a micro-batch, of its layers the first ones; weights are met as units are opened."""
    hidden, batch, sequence = model.hidden, cut.batch, cut.sequence
    tokens, rows = batch * sequence, sequence // cut.rows if np.any(cut.rows > 1) else sequence
    tape.module, tape.layer, tape.drawn = "embeddings", -1, 0
    with open_unit(-1):
        words = tape.parameter(cut.part(model.vocabulary), hidden)
        places = None if model.rotary else tape.parameter(model.positions, hidden)
        x = _exchange(tape, layers.look_up(tape, words, tokens, batch, sequence), cut, ahead=False)
        if places:
            x = tape.record("add", x, layers.look_up(tape, places, rows, rows))
        if not model.causal:
            types = layers.look_up(tape, tape.parameter(2, hidden), batch * rows, batch, rows)
            x = layers.norm(tape, model.norm, tape.record("add", x, types))
        x = layers.dropout(tape, model.dropout, x)
        for tape.layer in range(min(model.layers, most)):
            run = partial(_layer, tape, model, cut, module=f"layers.{tape.layer}")
            with open_unit(tape.layer):
                x = layers.recompute(tape, run, x) if model.checkpoint else run(x)
        tape.module, tape.layer = "head", -1
        if not model.causal:
            x = tape.record("gelu", _project(tape, model, x, hidden))
        x = _exchange(tape, layers.norm(tape, model.norm, x), cut, ahead=True)
        columns = cut.part(model.vocabulary)
        weight = words if model.tie else tape.parameter(columns, hidden)
        logits = layers.linear(tape, x, weight, None if model.causal else tape.parameter(columns))
    for _ in range(3 * bool(np.any(cut.tensor > 1))):  # largest logit, sum of exponentials, and that of the label
        tape.emit("all_reduce", "collective", [], [], nbytes=4 * tokens)
    layers.cross_entropy(tape, layers.cast(tape, logits, 4) if model.mixed and tape.shards else logits, tokens)


def _exchange(tape: Tape, x: Tensor, cut: Cut, *, ahead: bool) -> Tensor:
    """All tokens `ahead` of products that ranks share, or sums behind these, of all tokens or of those of a rank.

    On the way back sums and tokens change places.
    """
    if not np.any(cut.tensor > 1):
        return x
    gather, add, out = "", "all_reduce", x
    if np.any(cut.rows > 1):
        gather, add, rows = "all_gather", "reduce_scatter", 1 if ahead else cut.rows
        out = tape.tensor(cut.batch, cut.sequence // rows, x.shape[-1], itemsize=x.itemsize, grad=True)
        out.root = x.root
    nbytes, (forth, back) = (out if ahead else x).nbytes, (gather, add) if ahead else (add, gather)
    if forth:
        tape.emit(forth, "collective", [x], [out], nbytes=nbytes)
    if back:
        tape.node(lambda: tape.emit(back, "collective", [], [], nbytes=nbytes))
    return out


def _project(tape: Tape, model: Any, x: Tensor, width: Any) -> Tensor:
    """A linear layer of a model, with or without bias."""
    weight = tape.parameter(width, x.shape[-1])
    bias = tape.parameter(width) if model.bias else None
    return layers.linear(tape, x, weight, bias, fp8=model.dtype == "fp8" and tape.layer >= 0)


def _layer(tape: Tape, model: Any, cut: Cut, x: Tensor, *, module: str) -> Tensor:
    """One Transformer layer: normalised before (GPT-2) or after (BERT) each residual sum."""
    for name, body in (("attention", _attention), ("mlp", _mix_experts if model.experts else _feed_forward)):
        tape.module = f"{module}.{name}"
        inner = _exchange(tape, layers.norm(tape, model.norm, x) if model.causal else x, cut, ahead=True)
        inner = _exchange(tape, body(tape, model, cut, inner), cut, ahead=False)
        x = tape.record("add", x, layers.dropout(tape, model.dropout, inner))
        x = x if model.causal else layers.norm(tape, model.norm, x)
    return x


def _activate(tape: Tape, model: Any, product: Callable[[], Tensor]) -> Tensor:
    """An activation behind a product, which gates another one where the model has it."""
    wide = tape.record("silu" if model.gated else "gelu_tanh" if model.causal else "gelu", product())
    return tape.record("multiply", wide, product()) if model.gated else wide


def _feed_forward(tape: Tape, model: Any, cut: Cut, x: Tensor) -> Tensor:
    """Two products with an activation between."""
    inner = cut.part(model.inner or 4 * model.hidden)
    return _project(tape, model, _activate(tape, model, lambda: _project(tape, model, x, inner)), model.hidden)


def _mix_experts(tape: Tape, model: Any, cut: Cut, x: Tensor) -> Tensor:
    """Experts, of which a router chooses some for each token: equally many tokens for each, brought to their rank."""
    tokens, hidden, inner = x.numel // x.shape[-1], model.hidden, cut.part(model.inner or 4 * model.hidden)
    router = layers.linear(tape, x, tape.parameter(model.experts, hidden))
    gates = tape.record("softmax", layers.cast(tape, router, 4))
    local = model.experts // cut.experts
    rows = (tokens * model.routed * cut.experts + (model.experts - 1)) // model.experts
    sent = tape.record("repeat", x, out=(local, rows, hidden))
    wide = _activate(tape, model, lambda: layers.bmm(tape, sent, tape.parameter(local, hidden, inner)))
    found = layers.bmm(tape, wide, tape.parameter(local, inner, hidden))
    return tape.record("fold", tape.record("multiply", found, gates), out=x.shape)


def _attention(tape: Tape, model: Any, cut: Cut, x: Tensor) -> Tensor:
    """Self-attention with its projections."""
    head, heads = model.head_width or model.hidden // model.heads, cut.part(model.heads)
    hidden, kv = head * heads, head * cut.part(model.kv_heads) if model.kv_heads else head * heads
    if model.causal and not model.rotary and np.all(kv == hidden):
        q, k, v = layers.split(tape, _project(tape, model, x, 3 * hidden), 3)
    else:
        q, k, v = (_project(tape, model, x, size) for size in (hidden, kv, kv))
    if model.qk_norm:
        apart = (layers.norm(tape, "rms", each.view(*each.shape[:2], each.shape[-1] // head, head)) for each in (q, k))
        q, k = (own.view(*each.shape) for own, each in zip(apart, (q, k), strict=True))
    if model.rotary:
        angles = tape.tensor(cut.sequence, head // 2, itemsize=8)
        q, k = (layers.rotate(tape, each, angles) for each in (q, k))
    layers.count_views(tape, 6)  # each of the three by heads, and transposed
    about: dict[str, Any] = {"heads": heads, "causal": model.causal}
    if model.attention in UNFUSED:
        mixed = layers.eager_attention(tape, q, k, v, drop=model.dropout, **about)
    else:
        kernel = model.attention.removeprefix("fused")
        mixed = layers.attention(tape, q, k, v, kernel=kernel, context=cut.context, **about)
    layers.count_views(tape, 2)
    return _project(tape, model, mixed, model.hidden)


def record_part(model: Any, cut: Cut) -> tuple[Graph, dict[str, Any]]:
    """Record one micro-batch of one layer, embeddings and head on a rank, and the update of their weights.

    Sizes are arrays over cuts. Gradients are added to those of the micro-batches before. With mixed precision sums of
    gradients and the weights that the optimizer updates are fp32, and products find copies of these.

    Parameters
    ----------
    model : Transformer
        The model.
    cut : Cut
        What the rank works on.

    Returns
    -------
    graph : Graph
        Operations, in modules ``embeddings``, ``layers.0`` and ``head``; in ``packing`` a copy of all gradients.
        Collectives are those of the ranks that share layers.
    weights : dict of str to array
        Trained numbers of the three, there ``layers`` for one layer [-].
    """
    tape = Tape(ITEMSIZE.get(model.dtype, 2))
    record_forward(tape, model, cut, 1, nullcontext)
    inside = [place for place, weight in enumerate(tape.trained) if weight.layer == 0]
    bounds = {"embeddings": (0, inside[0]), "layers": (inside[0], inside[-1] + 1), "head": (inside[-1] + 1, None)}
    weights = {name: sum(each.numel for each in tape.trained[slice(*own)]) for name, own in bounds.items()}
    wide = 4 if model.mixed else tape.itemsize
    tape.kept = {weight: tape.tensor(*weight.shape, itemsize=wide) for weight in tape.trained}
    tape.backward()
    if model.mixed:
        for weight in tape.trained:
            tape.shards[weight] = shard = tape.tensor(*weight.shape, itemsize=wide)
            tape.gradients[shard] = tape.gradients[weight]
            tape.emit("_to_copy", "elementwise", [shard], [weight], elements=weight.numel)
    step(tape, model.optimizer, lists=True, fused=model.fused)
    tape.module = "packing"
    parts, flat = [tape.kept[weight] for weight in tape.trained], tape.tensor(sum(weights.values()), itemsize=wide)
    tape.emit("cat", "copy", parts, [flat], elements=flat.numel, rows=len(parts))
    return make_together(tape, name=model.name, family=model.family, dtype=model.dtype), weights
