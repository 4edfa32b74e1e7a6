"""Attention of a Transformer layer as one rank records it."""

from typing import Any

import numpy as np

from perfkit.workloads import layers
from perfkit.workloads.layer_types import Attention, ConcatenateHeads, split
from perfkit.workloads.operations import Tensor
from perfkit.workloads.rank_share import RankShare, exchange_tokens, project
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
        normed_width = head_width if model.qk_norm_of == "head" else None
        q = _norm_heads(tape, q, normed_width)
        k = _norm_heads(tape, k, normed_width)
    if model.rotary:
        turned = model.rotary_width or head_width
        angles = tape.share_angles(share.sequence, turned // 2)
        if model.rotary_width and np.any(turned != head_width):
            q = _rotate_part(tape, q, head_width, angles)
            k = _rotate_part(tape, k, head_width, angles)
        else:
            q = layers.rotate(tape, q, angles)
            k = layers.rotate(tape, k, angles)
    layers.count_views(tape, 6)  # of queries, keys and values: split into heads, and transposed
    with tape.inside("attention"):
        if model.attention in UNFUSED:
            mixed = layers.eager_attention(
                tape,
                q,
                k,
                v,
                heads=heads,
                causal=model.causal,
                drop=model.dropout,
                capped=model.score_cap,
            )
        else:
            attention = Attention(
                heads,
                causal=model.causal,
                kernel=_name_kernel(model),
                context=share.context,
                window=model.window or None,
            )
            operands: list[Tensor] = [q, k, v]
            if model.sinks:
                operands.append(tape.parameter(heads))
            mixed = tape.apply(attention, *operands)
    layers.count_views(tape, 2)
    return project(tape, model, mixed, model.hidden, "o_proj")


def _rotate_part(tape: Tape, x: Tensor, head_width: Any, angles: Tensor) -> Tensor:
    """Heads, of which positions rotate the first part, as wide as the angles say."""
    turned = 2 * angles.shape[-1]
    heads = x.view(*x.shape[:2], x.shape[-1] // head_width, head_width)
    first, rest = split(tape, heads, [turned, head_width - turned])
    first = layers.rotate(tape, first, angles)
    return tape.apply(ConcatenateHeads(), first, rest).view(*x.shape)


def _is_joined(model: Any, hidden: Any, kv_hidden: Any) -> bool:
    """Whether queries, keys and values come from one product: as the model says, else in models like
    GPT-2."""
    if model.joined:
        return bool(model.joined != "none")
    return bool(model.causal and not model.rotary and np.all(kv_hidden == hidden))


def attend_latent(tape: Tape, model: Any, share: RankShare, x: Tensor) -> Tensor:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; in the order of
    torchtitan's ``models/deepseek_v3/model/model.py``).

    Queries, and keys with values, are projected to few numbers of each token, normed, and back to
    heads. A part of each head is rotated by positions; that of keys is the same for all heads. Ranks
    that share heads have all of the first projections, and exchange their results, as those of
    Megatron-LM do (``megatron/core/transformer/multi_latent_attention.py``).
    """
    heads = share.part(model.heads)
    plain, turned, value = model.plain_width, model.rope_width, model.width_of_values
    tokens = (share.batch, share.sequence)
    angles = tape.share_angles(share.sequence, turned // 2)
    queries = x
    if model.q_lora_rank:
        queries = layers.norm(tape, model.norm, project(tape, model, x, model.q_lora_rank))
    queries = exchange_tokens(tape, queries, share, ahead=True)
    q = project(tape, model, queries, heads * (plain + turned))
    q_plain, q_turned = split(tape, q.view(*tokens, heads, plain + turned), [plain, turned])
    q_turned = layers.rotate(tape, q_turned, angles)
    q = tape.apply(ConcatenateHeads(), q_plain, q_turned)

    narrow = project(tape, model, x, model.kv_lora_rank + turned)
    latent, k_turned = split(tape, narrow, [model.kv_lora_rank, turned])
    k_turned = exchange_tokens(tape, k_turned, share, ahead=True)
    k_turned = layers.rotate(tape, k_turned.view(*tokens, 1, turned), angles)
    latent = exchange_tokens(tape, layers.norm(tape, model.norm, latent), share, ahead=True)
    wide = project(tape, model, latent, heads * (plain + value))
    k_plain, v = split(tape, wide.view(*tokens, heads, plain + value), [plain, value])
    k = tape.apply(ConcatenateHeads(), k_plain, k_turned)

    layers.count_views(tape, 6)  # of queries, keys and values: split into heads, and transposed
    attention = Attention(
        heads,
        causal=model.causal,
        kernel=_name_kernel(model),
        context=share.context,
        value_width=value,
    )
    width = heads * (plain + turned)
    with tape.inside("attention"):
        mixed = tape.apply(
            attention,
            q.view(*tokens, width),
            k.view(*tokens, width),
            v.view(*tokens, heads * value),
        )
    layers.count_views(tape, 2)
    return project(tape, model, mixed, model.hidden)


def _name_kernel(model: Any) -> str:
    """The named kernel of fused attention; empty for the one that PyTorch chooses."""
    return "" if model.attention == "fused" else str(model.attention)


def _norm_heads(tape: Tape, x: Tensor, head_width: Any | None) -> Tensor:
    """Norm of each head of queries or keys, or of all of them together without a width."""
    if head_width is None:
        return layers.norm(tape, "rms", x)
    by_head = x.view(*x.shape[:2], x.shape[-1] // head_width, head_width)
    return layers.norm(tape, "rms", by_head).view(*x.shape)
