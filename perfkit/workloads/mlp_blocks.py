"""MLPs of a Transformer layer as one rank records them: two products, or a router and experts."""

from collections.abc import Callable
from typing import Any

import numpy as np

from perfkit.workloads import layers
from perfkit.workloads.activations import make_activation
from perfkit.workloads.layer_types import (
    Add,
    Multiply,
    MultiplyRows,
    Permute,
    Reorder,
    Sigmoid,
    Softmax,
    Unpermute,
    split,
)
from perfkit.workloads.operations import Tensor
from perfkit.workloads.rank_share import SHARING_EXPERT, RankShare, exchange_tokens, project
from perfkit.workloads.tape import Tape


def _activate(tape: Tape, model: Any, product: Callable[[str, Any], Tensor], inner: Any) -> Tensor:
    """A product of `inner` numbers of each token with its activation, which gates a second product in
    some models. Both are one product if they are joined. `product` takes a name and a width."""
    activation = make_activation(model)
    if model.gated and model.joined == "all":
        gate, up = split(tape, product("gate_up_proj", 2 * inner), [inner, inner])
        with tape.inside("activation"):
            return tape.apply(Multiply(), tape.apply(activation, gate), up)
    ahead = product("gate_proj" if model.gated else "up_proj", inner)
    with tape.inside("activation"):
        activated = tape.apply(activation, ahead)
    if not model.gated:
        return activated
    beside = product("up_proj", inner)
    with tape.inside("activation"):
        return tape.apply(Multiply(), activated, beside)


def feed_forward(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """Two products with an activation between."""
    return _multiply_twice(tape, model, x, share.part(model.width_of_mlp))


def _multiply_twice(tape: Tape, model: Any, x: Tensor, inner: Any) -> Tensor:
    """Two products with an activation of `inner` numbers of each token between."""
    activated = _activate(
        tape, model, lambda name, width: project(tape, model, x, width, name), inner
    )
    return project(tape, model, activated, model.hidden, "down_proj")


def mix_experts(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """A router and experts, on the busiest rank: tokens are copied for each of their experts, sent to
    the ranks of these, and come back."""
    tokens = x.numel // x.shape[-1]
    hidden, inner = model.hidden, share.part_of_expert(model.width_of_expert)
    of_router = tape.parameter(model.experts, hidden)
    router_bias = tape.parameter(model.experts) if model.expert_bias else None
    router = layers.linear(tape, x, of_router, router_bias)
    probabilities = tape.apply(Softmax(), layers.cast(tape, router, 4))
    # as wide as the tokens; otherwise the sum of all layers would become fp32
    gates = layers.cast(tape, probabilities, x.itemsize)
    local = model.experts // share.experts
    rows = (tokens * model.routed * share.experts + (model.experts - 1)) // model.experts
    if np.any(share.load > 1.0):
        rows = np.ceil(rows * share.load)
    sent = tape.apply(Permute(local, rows, hidden), x)
    if share.reorders:
        sent = tape.apply(Reorder(), sent)
    gathered = _exchange_for_expert(tape, sent, share, ahead=True)
    wide = _activate(
        tape,
        model,
        lambda _, width: _multiply_experts(tape, model, gathered, width),
        inner,
    )
    results = _multiply_experts(tape, model, wide, hidden)
    results = _exchange_for_expert(tape, results, share, ahead=False)
    if share.reorders:
        results = tape.apply(Reorder(), results)
    if model.fused_permutation:
        mixed = tape.apply(Unpermute(*x.shape), results, gates)
    else:
        weighted = tape.apply(Multiply(), results, gates)
        mixed = tape.apply(Unpermute(*x.shape), weighted)
    if model.shared_experts == 0:
        return mixed
    return tape.apply(Add(), mixed, share_experts(tape, model, share, x))


def share_experts(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """Experts that all tokens go to: one MLP, whose result a sigmoid may weight. A rank that holds its
    own tokens alone gathers those of the ranks with which it shares products."""
    tokens = x
    if share.spreads_experts:
        tokens = exchange_tokens(tape, x, share, ahead=True)
    shared = _multiply_twice(tape, model, tokens, share.part(model.width_of_shared))
    if share.spreads_experts:
        shared = exchange_tokens(tape, shared, share, ahead=False)
    if not model.shared_gate:
        return shared
    gate = layers.linear(tape, x, tape.parameter(1, model.hidden))
    return tape.apply(MultiplyRows(), shared, tape.apply(Sigmoid(), gate))


def _multiply_experts(tape: Tape, model: Any, x: Tensor, width: Any) -> Tensor:
    """Products of experts, to `width` numbers of each row: of unlike many rows, or of buffers that are
    padded to as many rows. Each expert may have a bias of its own."""
    experts, _, inputs = x.shape
    weights = tape.parameter(experts, inputs, width)
    if model.capacity != 1.0:
        y = layers.bmm(tape, x, weights)
    else:
        y = layers.multiply_groups(tape, x, weights, fp8=model.dtype == "fp8")
    if not model.expert_bias:
        return y
    return tape.apply(Add(), y, tape.parameter(experts, width))


def _exchange_for_expert(tape: Tape, x: Tensor, share: RankShare, *, ahead: bool) -> Tensor:
    """Gather the rows of the ranks that share products of an expert `ahead` of these, or sum up their
    parts behind them; in the backward pass it is the other way round."""
    if not np.any(share.expert_tensor > 1):
        return x
    experts, rows, width = x.shape
    rows = rows * share.expert_tensor if ahead else rows // share.expert_tensor
    out = tape.tensor(experts, rows, width, itemsize=x.itemsize, needs_gradient=True)
    out.root = x.root
    whole = out.nbytes if ahead else x.nbytes
    names = ("all_gather", "reduce_scatter") if ahead else ("reduce_scatter", "all_gather")
    tape.collective(names[0], [x], [out], nbytes=whole, group=SHARING_EXPERT)
    tape.node(lambda: tape.collective(names[1], [], [], nbytes=whole, group=SHARING_EXPERT))
    return out
