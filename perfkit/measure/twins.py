"""The workloads as PyTorch modules, and the exchange of embedding rows between ranks."""

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.transformer import Transformer

__all__ = ["RecommendationModule", "TransformerModule"]


def _mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class _Cross(nn.Module):
    """Low-rank cross layers: the input times a projection to a few columns and back, plus what came before."""

    def __init__(self, width: int, layers: int, rank: int) -> None:
        super().__init__()
        pairs = [(nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)) for _ in range(layers)]
        self.layers = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        for layer in self.layers:
            layer.bias = nn.Parameter(torch.zeros(width))

    def forward(self, first: Tensor) -> Tensor:
        x = first
        for layer in self.layers:
            narrow, wide = cast(nn.ModuleList, layer)
            x = first * (wide(narrow(x)) + cast(Tensor, layer.bias)) + x
        return x


class _Exchange(torch.autograd.Function):
    """All_to_all of pooled rows: whole batch of local tables in, local batch of all tables out."""

    @staticmethod
    def forward(ctx: Any, send: Tensor, widths: Sequence[int]) -> Tensor:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        batch = send.shape[0] // ranks
        ctx.widths, ctx.shape = widths, send.shape
        received = send.new_empty(batch * sum(widths))
        dist.all_to_all_single(received, send.view(-1), [batch * w for w in widths], [batch * widths[rank]] * ranks)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ranks, rank, widths = dist.get_world_size(), dist.get_rank(), ctx.widths
        batch = ctx.shape[0] // ranks
        out = gradients[0].new_empty(ctx.shape)
        flat = gradients[0]
        dist.all_to_all_single(out.view(-1), flat, [batch * widths[rank]] * ranks, [batch * w for w in widths])
        return (out if out.numel() else None), None  # nothing came, so nothing is accumulated


class _Launch(torch.autograd.Function):
    """The first half of an exchange that goes on while the bottom MLP works, both ways; `flight` is its state."""

    @staticmethod
    def forward(ctx: Any, send: Tensor, widths: Sequence[int], flight: dict[str, Any]) -> Tensor:
        ranks, rank, ctx.flight = dist.get_world_size(), dist.get_rank(), flight
        batch = send.shape[0] // ranks
        sizes = [batch * w for w in widths], [batch * widths[rank]] * ranks
        flight |= {"shape": send.shape, "sizes": sizes}
        received = send.new_empty(batch * sum(widths))
        flight["work"] = dist.all_to_all_single(received, send.view(-1), sizes[0], sizes[1], async_op=True)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.flight["work"].wait()
        out = ctx.flight.pop("out")
        return (out if out.numel() else None), None, None


class _Arrive(torch.autograd.Function):
    """The second half: waits for the rows on the way there, sends their gradients off on the way back."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, flight: dict[str, Any]) -> Tensor:
        ctx.flight = flight
        flight["work"].wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        flat, flight = gradients[0], ctx.flight
        flight["out"] = flat.new_empty(flight["shape"])
        came, sent = flight["sizes"]
        flight["work"] = dist.all_to_all_single(flight["out"].view(-1), flat, sent, came, async_op=True)
        return flat, None


class RecommendationModule(nn.Module):
    """What one rank holds of a DLRM: its tables, and the bottom and top MLP.

    Parameters
    ----------
    model : DLRM
        The workload.
    plan : Plan
        Placement of the tables.
    rank : int
        This rank [-].
    """

    def __init__(self, model: DLRM, plan: Plan, rank: int) -> None:
        super().__init__()
        self.model, self.plan, self.rank = model, plan, rank
        dim, features = model.tables[0].dim, len(model.tables) + 1
        self.bottom = _mlp((model.features, *model.bottom), last_relu=True)
        tables = [model.tables[t] for t in plan.tables_of(rank)]
        self.tables = nn.ModuleList(nn.EmbeddingBag(t.rows, dim, mode="sum", sparse=model.sparse) for t in tables)
        for table, module in zip(tables, self.tables, strict=True):
            nn.init.uniform_(cast(Tensor, module.weight), -(table.rows**-0.5), table.rows**-0.5)
        if model.interaction == "cross":
            width = dim * features
            self.top = nn.Sequential(_Cross(width, *model.cross), *_mlp((width, *model.top), last_relu=False))
            return
        self.top = _mlp((dim + features * (features - 1) // 2, *model.top), last_relu=False)
        i, j = torch.tril_indices(features, features, -1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)

    def forward(self, x: Tensor, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        batch, dim = x.shape[0], self.model.tables[0].dim
        overlap = self.plan.ranks > 1 and getattr(self.model, "overlap", False)
        if not overlap:
            x = self.bottom(x)
        pooled = [table(i, o) for table, i, o in zip(self.tables, indices, offsets, strict=True)]
        if overlap:
            flight: dict[str, Any] = {}
            received = _Launch.apply(*self._send(pooled, batch), flight)
            x = self.bottom(x)
            pooled = self._unpack(_Arrive.apply(received, flight), batch)
        elif self.plan.ranks > 1:
            pooled = self._unpack(_Exchange.apply(*self._send(pooled, batch)), batch)
        joined = torch.cat([x, *pooled], 1)
        if self.model.interaction == "cross":
            return self.top(joined)
        vectors = joined.view(batch, -1, dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return self.top(torch.cat([x, products[:, cast(Tensor, self.i), cast(Tensor, self.j)]], 1))

    def _widths(self) -> list[int]:
        return [self.model.tables[0].dim * len(self.plan.tables_of(rank)) for rank in range(self.plan.ranks)]

    def _send(self, pooled: list[Tensor], batch: int) -> tuple[Tensor, list[int]]:
        if pooled:
            return torch.cat(pooled, 1) if len(pooled) > 1 else pooled[0], self._widths()
        # nothing to send, but the other ranks wait for this one in the backward exchange too
        weight = next(self.bottom.parameters())
        return weight.new_empty(batch * self.plan.ranks, 0).requires_grad_(), self._widths()

    def _unpack(self, received: Tensor, batch: int) -> list[Tensor]:
        widths = self._widths()
        parts = received.split([batch * w for w in widths])
        return [part.view(batch, w) for part, w in zip(parts, widths, strict=True) if w]


class _Attention(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        h = model.hidden
        self.heads, self.causal, self.fused = model.heads, model.causal, model.attention == "fused"
        self.inputs = nn.ModuleList([nn.Linear(h, 3 * h)] if model.causal else [nn.Linear(h, h) for _ in range(3)])
        self.output = nn.Linear(h, h)
        mask = torch.triu(torch.full((model.sequence, model.sequence), float("-inf")), 1)
        self.register_buffer("mask", mask if model.causal and not self.fused else torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        parts = self.inputs[0](x).split(h, 2) if self.causal else [layer(x) for layer in self.inputs]
        q, k, v = (part.view(b, s, self.heads, h // self.heads).transpose(1, 2) for part in parts)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) * (h // self.heads) ** -0.5
            mixed = torch.softmax(scores + self.mask if self.causal else scores, -1) @ v
        return self.output(mixed.transpose(1, 2).reshape(b, s, h))


class _Layer(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        h, self.causal = model.hidden, model.causal
        mlp = nn.Sequential(nn.Linear(h, 4 * h), nn.GELU("tanh" if model.causal else "none"), nn.Linear(4 * h, h))
        if self.causal:  # registered in the order of use, which is the order in which the optimizer updates
            self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(h), _Attention(model), nn.LayerNorm(h), mlp
        else:
            self.attention, self.norm1, self.mlp, self.norm2 = _Attention(model), nn.LayerNorm(h), mlp, nn.LayerNorm(h)

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class TransformerModule(nn.Module):
    """A BERT with a masked-token head, or a GPT-2.

    Parameters
    ----------
    model : Transformer
        The workload.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        h, self.causal = model.hidden, model.causal
        self.words, self.places = nn.Embedding(model.vocabulary, h), nn.Embedding(model.positions, h)
        if not model.causal:
            self.types, self.first_norm = nn.Embedding(2, h), nn.LayerNorm(h)
        self.layers = nn.ModuleList(_Layer(model) for _ in range(model.layers))
        if not model.causal:
            self.transform = nn.Sequential(nn.Linear(h, h), nn.GELU())
        self.norm = nn.LayerNorm(h)
        self.decoder = nn.Linear(h, model.vocabulary, bias=not model.causal)
        self.decoder.weight = self.words.weight
        self.register_buffer("positions", torch.arange(model.sequence))
        for module in self.modules():  # as published: wider weights saturate the softmax, and denormals slow it down
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(self.positions)
        if not self.causal:
            x = self.first_norm(x + self.types(types))
        for layer in self.layers:
            x = layer(x)
        if not self.causal:
            x = self.transform(x)
        return self.decoder(self.norm(x))
