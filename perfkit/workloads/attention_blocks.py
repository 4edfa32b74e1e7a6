"""Attention of a Transformer layer as one rank records it."""

from typing import Any

import numpy as np

from perfkit.workloads import layers
from perfkit.workloads.layer_types import Attention, split
from perfkit.workloads.operations import Tensor
from perfkit.workloads.rank_share import RankShare, project
from perfkit.workloads.tape import Tape

#: Kinds of attention that store the scores in memory.
UNFUSED = ("eager", "math")


def attend(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """Self-attention with its projections."""
    head_width = model.head_width or model.hidden // model.heads
    heads = share.part(model.heads)
    hidden = head_width * heads
    kv_hidden = head_width * share.part(model.kv_heads) if model.kv_heads else hidden
    if _is_joined(model, hidden, kv_hidden):
        joined = project(tape, model, x, hidden + 2 * kv_hidden, "qkv_proj")
        q, k, v = split(tape, joined, [hidden, kv_hidden, kv_hidden])
    else:
        q = project(tape, model, x, hidden, "q_proj")
        k = project(tape, model, x, kv_hidden, "k_proj")
        v = project(tape, model, x, kv_hidden, "v_proj")
    if model.qk_norm:
        q = _norm_heads(tape, q, head_width)
        k = _norm_heads(tape, k, head_width)
    if model.rotary:
        angles = tape.tensor(share.sequence, head_width // 2, itemsize=8)
        q = layers.rotate(tape, q, angles)
        k = layers.rotate(tape, k, angles)
    layers.count_views(tape, 6)  # of queries, keys and values: split into heads, and transposed
    if model.attention in UNFUSED:
        mixed = layers.eager_attention(
            tape, q, k, v, heads=heads, causal=model.causal, drop=model.dropout
        )
    else:
        kernel = "" if model.attention == "fused" else model.attention
        attention = Attention(heads, causal=model.causal, kernel=kernel, context=share.context)
        mixed = tape.apply(attention, q, k, v)
    layers.count_views(tape, 2)
    return project(tape, model, mixed, model.hidden, "o_proj")


def _is_joined(model: Any, hidden: Any, kv_hidden: Any) -> bool:
    """Whether queries, keys and values come from one product: as the model says, else in models like
    GPT-2."""
    if model.joined:
        return bool(model.joined != "none")
    return bool(model.causal and not model.rotary and np.all(kv_hidden == hidden))


def _norm_heads(tape: Tape, x: Tensor, head_width: Any) -> Tensor:
    """Norm of each head of queries or keys."""
    by_head = x.view(*x.shape[:2], x.shape[-1] // head_width, head_width)
    return layers.norm(tape, "rms", by_head).view(*x.shape)
