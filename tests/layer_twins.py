"""Small Transformers in PyTorch, written as the papers and the public code of their models have them,
whose captured operations a test sets beside those of the builder."""

from functools import cache
from typing import Any

import pytest

from perfkit.workloads.layer_kinds import has_experts
from perfkit.workloads.transformer import Transformer

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from perfkit.recording.modules import make_optimizer  # noqa: E402

# Kernels that Transformer Engine has and PyTorch lacks: copies of tokens for their experts, and sums of
# their results with the weights of the router.


@torch.library.custom_op("perfkit_twins::moe_permute", mutates_args=())
def moe_permute(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Copies of tokens, as many as `rows`."""
    return x.new_zeros(rows, x.shape[-1])


@torch.library.custom_op("perfkit_twins::moe_unpermute", mutates_args=())
def moe_unpermute(results: torch.Tensor, gates: torch.Tensor, tokens: int) -> torch.Tensor:
    """Sums of the results of each token."""
    return results.new_zeros(tokens, results.shape[-1])


@torch.library.custom_op("perfkit_twins::moe_unpermute_sums", mutates_args=())
def sum_copies(dy: torch.Tensor, tokens: int) -> torch.Tensor:
    """Sums of the gradients of the copies of each token."""
    return dy.new_zeros(tokens, dy.shape[-1])


@torch.library.custom_op("perfkit_twins::moe_unpermute_gradients", mutates_args=())
def find_gradients(
    dy: torch.Tensor, results: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the results and of the weights of the router."""
    return torch.empty_like(results), torch.empty_like(gates)


moe_permute.register_fake(lambda x, rows: x.new_empty(rows, x.shape[-1]))
moe_unpermute.register_fake(
    lambda results, gates, tokens: results.new_empty(tokens, results.shape[-1])
)
sum_copies.register_fake(lambda dy, tokens: dy.new_empty(tokens, dy.shape[-1]))
find_gradients.register_fake(
    lambda dy, results, gates: (torch.empty_like(results), torch.empty_like(gates))
)


def _keep_tokens(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.tokens = inputs[0].shape[0]


def _keep_operands(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])


moe_permute.register_autograd(
    lambda ctx, dy: (sum_copies(dy, ctx.tokens), None), setup_context=_keep_tokens
)
moe_unpermute.register_autograd(
    lambda ctx, dy: (*find_gradients(dy, *ctx.saved_tensors), None), setup_context=_keep_operands
)


def make_linear(inputs: int, outputs: int, *, bias: bool = False) -> Any:
    """A product with a weight."""
    return nn.Linear(inputs, outputs, bias=bias)


class GroupedAttention(nn.Module):
    """Heads of queries share heads of keys and values; positions are angles of complex numbers in
    fp32 (Llama 2, arXiv:2307.09288)."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.width = model.head_width or model.hidden // model.heads
        queries = model.heads * self.width
        keys = (model.kv_heads or model.heads) * self.width
        bias = bool(model.qkv_bias)
        self.queries = make_linear(model.hidden, queries, bias=bias)
        self.keys = make_linear(model.hidden, keys, bias=bias)
        self.values = make_linear(model.hidden, keys, bias=bias)
        #: Norms of heads (Qwen3), or of all of them together (OLMo 2).
        self.norms: Any = None
        if model.qk_norm and model.qk_norm_of == "head":
            self.norms = nn.ModuleList([nn.RMSNorm(self.width), nn.RMSNorm(self.width)])
        elif model.qk_norm:
            self.norms = nn.ModuleList([nn.RMSNorm(queries), nn.RMSNorm(keys)])
        self.norms_heads = model.qk_norm_of == "head"
        self.output = make_linear(queries, model.hidden, bias=bool(model.output_bias))
        self.turned = model.rotary_width or self.width
        self.turns = make_turns(model.sequence, self.turned)

    def norm(self, number: int, x: Any) -> Any:
        """Norms of queries (0) or keys (1), if there are such."""
        if self.norms is None:
            return x
        if self.norms_heads:
            heads = x.view(*x.shape[:2], -1, self.width)
            return self.norms[number](heads).view(x.shape)
        return self.norms[number](x)

    def rotate(self, heads: Any) -> Any:
        """Heads whose first part is rotated (GPT-NeoX, Phi), or all of it."""
        if self.turned == self.width:
            return rotate(heads, self.turns)
        first, rest = torch.split(heads, [self.turned, self.width - self.turned], dim=-1)
        return torch.cat([rotate(first, self.turns), rest], dim=-1)

    def forward(self, x: Any) -> Any:
        """Attention of all tokens."""
        batch, sequence, _ = x.shape
        q, k, v = self.queries(x), self.keys(x), self.values(x)
        q = self.norm(0, q).view(batch, sequence, -1, self.width)
        k = self.norm(1, k).view(batch, sequence, -1, self.width)
        v = v.view(batch, sequence, -1, self.width)
        mixed = F.scaled_dot_product_attention(
            self.rotate(q).transpose(1, 2),
            self.rotate(k).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), as torchtitan has it in
    ``models/deepseek_v3/model/model.py``."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.heads, self.latent = model.heads, model.kv_lora_rank
        self.plain, self.turned = model.head_width, model.rope_width
        self.value = model.value_width or model.head_width
        queries = self.heads * (self.plain + self.turned)
        self.queries: Any = make_linear(model.hidden, queries)
        if model.q_lora_rank:
            self.queries = nn.Sequential(
                make_linear(model.hidden, model.q_lora_rank),
                nn.RMSNorm(model.q_lora_rank),
                make_linear(model.q_lora_rank, queries),
            )
        self.narrow = make_linear(model.hidden, self.latent + self.turned)
        self.norm = nn.RMSNorm(self.latent)
        self.wide = make_linear(self.latent, self.heads * (self.plain + self.value))
        self.output = make_linear(self.heads * self.value, model.hidden)
        self.turns = make_turns(model.sequence, self.turned)

    def forward(self, x: Any) -> Any:
        """Attention of all tokens."""
        batch, sequence, _ = x.shape
        q = self.queries(x).view(batch, sequence, self.heads, -1)
        q_plain, q_turned = torch.split(q, [self.plain, self.turned], dim=-1)
        q = torch.cat([q_plain, rotate(q_turned, self.turns)], dim=-1)
        latent, k_turned = torch.split(self.narrow(x), [self.latent, self.turned], dim=-1)
        k_turned = rotate(k_turned.unsqueeze(2), self.turns)
        wide = self.wide(self.norm(latent)).view(batch, sequence, self.heads, -1)
        k_plain, v = torch.split(wide, [self.plain, self.value], dim=-1)
        k = torch.cat([k_plain, k_turned.expand(-1, -1, self.heads, -1)], dim=-1)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, -1))


@cache
def make_turns(sequence: int, width: int) -> Any:
    """Angles of positions as complex numbers, which all layers share."""
    angles = torch.outer(torch.arange(sequence), torch.logspace(0, -4, width // 2))
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def rotate(heads: Any, turns: Any) -> Any:
    """Heads rotated by their positions."""
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(heads)


class GatedMLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, hidden: int, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = make_linear(hidden, inner, bias=bias)
        self.up = make_linear(hidden, inner, bias=bias)
        self.down = make_linear(inner, hidden, bias=bias)

    def forward(self, x: Any) -> Any:
        """The MLP of each token."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A router, its experts, and experts that all tokens go to (DeepSeekMoE, arXiv:2401.06066; with a
    gate Qwen2-MoE, ``modeling_qwen2_moe.py`` of Hugging Face Transformers)."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        hidden, inner = model.hidden, model.expert_width
        self.router = make_linear(hidden, model.experts)
        self.gate = nn.Parameter(torch.zeros(model.experts, hidden, inner))
        self.up = nn.Parameter(torch.zeros(model.experts, hidden, inner))
        self.down = nn.Parameter(torch.zeros(model.experts, inner, hidden))
        self.top_k = model.top_k
        self.shared: Any = None
        self.shared_gate: Any = None
        if model.shared_experts:
            width = model.shared_width or model.expert_width
            self.shared = GatedMLP(hidden, model.shared_experts * width)
        if model.shared_gate:
            self.shared_gate = make_linear(hidden, 1)

    def forward(self, x: Any) -> Any:
        """The experts of each token."""
        gates = self.router(x).float().softmax(-1).to(x.dtype)
        tokens = x.view(-1, x.shape[-1])
        copies = moe_permute(tokens, len(tokens) * self.top_k)
        ends = torch.zeros(len(self.gate), dtype=torch.int32, device=x.device)
        wide = F.silu(F.grouped_mm(copies, self.gate, offs=ends))
        wide = wide * F.grouped_mm(copies, self.up, offs=ends)
        results = F.grouped_mm(wide, self.down, offs=ends)
        mixed = moe_unpermute(results, gates, len(tokens)).view(x.shape)
        if self.shared is None:
            return mixed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(x))
        return mixed + shared


class Residual(nn.Module):
    """A branch and the sum with its input, with a norm before (Llama) or behind (OLMo 2) the branch, or
    both (Gemma 2)."""

    def __init__(self, model: Transformer, branch: nn.Module) -> None:
        super().__init__()
        parts = [branch]
        if model.norm_place != "after":
            parts.insert(0, nn.RMSNorm(model.hidden))
        if model.norm_place != "before":
            parts.append(nn.RMSNorm(model.hidden))
        self.branch = nn.Sequential(*parts)

    def forward(self, x: Any) -> Any:
        """The sum."""
        return x + self.branch(x)


class ParallelResidual(nn.Module):
    """Attention beside an MLP, behind one norm (GPT-J, Phi) or each behind its own (GPT-NeoX)."""

    def __init__(self, model: Transformer, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden)
        self.attention = attention
        self.second_norm: Any = None
        if model.parallel_norms == 2:
            self.second_norm = nn.RMSNorm(model.hidden)
        self.mlp = mlp

    def forward(self, x: Any) -> Any:
        """The sum."""
        normed = self.norm(x)
        attended = self.attention(normed)
        if self.second_norm is not None:
            normed = self.second_norm(x)
        return attended + self.mlp(normed) + x


class CappedHead(nn.Module):
    """Logits within a cap (Gemma 2)."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.head = make_linear(model.hidden, model.vocabulary)

    def forward(self, x: Any) -> Any:
        """The logits."""
        return torch.tanh(self.head(x) / 30.0) * 30.0


class FurtherToken(nn.Module):
    """A layer that predicts one more token (DeepSeek-V3, arXiv:2412.19437, section 2.2): norms of what
    the layers before give and of the embedding of the next token, a projection of both, a layer."""

    def __init__(self, model: Transformer, layer: nn.Module) -> None:
        super().__init__()
        self.given, self.following = nn.RMSNorm(model.hidden), nn.RMSNorm(model.hidden)
        self.project = make_linear(2 * model.hidden, model.hidden)
        self.layer = layer
        self.norm = nn.RMSNorm(model.hidden)

    def forward(self, x: Any, embedded: Any) -> Any:
        """What the head reads."""
        both = torch.cat([self.given(x), self.following(embedded)], dim=-1)
        return self.norm(self.layer(self.project(both)))


def make_layer(model: Transformer, layer: int) -> list[nn.Module]:
    """The residual parts of a layer."""
    attention: Any = GroupedAttention(model)
    if model.kv_lora_rank:
        attention = LatentAttention(model)
    mlp: Any = GatedMLP(model.hidden, model.inner, bias=bool(model.mlp_bias))
    if has_experts(model, layer):
        mlp = Experts(model)
    if model.parallel_mlp:
        return [ParallelResidual(model, attention, mlp)]
    return [Residual(model, attention), Residual(model, mlp)]


def build_twin(model: Transformer) -> Any:
    """A training step of a model in PyTorch.

    Parameters
    ----------
    model : Transformer
        What the builder records.

    Returns
    -------
    step : callable
        Forward, backward and update; its weights are registered in the order of use.
    """
    layers: list[Any] = [nn.Embedding(model.vocabulary, model.hidden)]
    for layer in range(model.layers):
        layers += make_layer(model, layer)
    head: Any = make_linear(model.hidden, model.vocabulary)
    if model.logit_cap:
        head = CappedHead(model)
    layers += [nn.RMSNorm(model.hidden), head]
    for number in range(model.mtp_layers):
        layer = nn.Sequential(*make_layer(model, model.layers + number))
        layers.append(FurtherToken(model, layer))
    module = nn.ModuleList(layers).to(torch.bfloat16)
    optimizer = make_optimizer(model.optimizer, module.parameters())
    tokens = torch.zeros(model.batch, model.sequence, dtype=torch.int64)
    main = len(layers) - model.mtp_layers

    def find_loss(x: Any) -> Any:
        # no name holds the logits, which the backward pass does not need
        return F.cross_entropy(module[main - 1](x).view(-1, model.vocabulary), tokens.view(-1))

    def step() -> None:
        optimizer.zero_grad()
        x = tokens
        for part in module[: main - 1]:
            x = part(x)
        loss, further_losses = find_loss(x), []
        for further in module[main:]:
            x = further(x, module[0](tokens))
            further_losses.append(find_loss(x))
        for of_token in further_losses:
            loss = loss + of_token * 0.3
        loss.backward()
        optimizer.step()

    return step
