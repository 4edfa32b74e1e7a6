"""Ten real models as training steps, configurations and shapes alone: what a capture has to know the operations of."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfkit.measure.iterations import build_step
from perfkit.recording.nets import Net
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.transformer import Transformer

Step = Callable[[], Any]


class ScaleNorm(nn.Module):
    """Root mean square norm without bias, as in T5: Raffel 2020, arXiv:1910.10683."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class BiasedAttention(nn.Module):
    """Attention without scale whose scores get a bias by bucketed distance, to itself or to another sequence."""

    def __init__(self, hidden: int, heads: int, *, causal: bool = False, buckets: int = 32) -> None:
        super().__init__()
        self.heads, self.causal, self.buckets = heads, causal, buckets
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.bias = nn.Embedding(buckets, heads) if buckets else None

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        (b, n, h), m = x.shape, memory.shape[1]
        split = (b, -1, self.heads, h // self.heads)
        q, k, v = (
            layer(y).view(split).transpose(1, 2) for layer, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.transpose(-1, -2)
        if self.bias is not None:
            distance = (torch.arange(m)[None] - torch.arange(n)[:, None]).abs().clamp(max=self.buckets - 1)
            scores = scores + self.bias(distance).permute(2, 0, 1)[None]
        if self.causal:
            scores = scores.masked_fill(torch.ones(n, m).triu(1).bool(), float("-inf"))
        mixed = F.dropout(torch.softmax(scores.float(), -1), 0.1) @ v
        return self.o(mixed.transpose(1, 2).reshape(b, n, h))


class T5(nn.Module):
    """Encoder and decoder of T5."""

    def __init__(self, layers: int, hidden: int = 768, heads: int = 12, words: int = 32128) -> None:
        super().__init__()
        wide, self.words = 4 * hidden, nn.Embedding(words, hidden)
        self.attend = nn.ModuleList(
            BiasedAttention(hidden, heads, causal=kind == 1, buckets=0 if kind == 2 else 32)
            for _ in range(layers)
            for kind in range(3)
        )
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, wide, False), nn.ReLU(), nn.Dropout(0.1), nn.Linear(wide, hidden, False))
            for _ in range(2 * layers)
        )
        self.norms = nn.ModuleList(ScaleNorm(hidden) for _ in range(5 * layers + 2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        norms, x = iter(self.norms), self.words(source)
        for attend, feed in zip(self.attend[::3], self.feed[::2], strict=True):
            normed = next(norms)(x)
            x = x + attend(normed, normed)
            x = x + feed(next(norms)(x))
        memory, y = next(norms)(x), self.words(target)
        for attend, across, feed in zip(self.attend[1::3], self.attend[2::3], self.feed[1::2], strict=True):
            normed = next(norms)(y)
            y = y + attend(normed, normed)
            y = y + across(next(norms)(y), memory)
            y = y + feed(next(norms)(y))
        return F.linear(next(norms)(y) * y.shape[-1] ** -0.5, self.words.weight)


class ViT(nn.Module):
    """Vision Transformer: Dosovitskiy 2020, arXiv:2010.11929."""

    def __init__(self, layers: int, hidden: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 16, 16)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, hidden)), nn.Parameter(torch.zeros(1, 197, hidden))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = F.dropout(torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places, 0.1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Experts(nn.Module):
    """Mixture of experts with two per token and a fixed capacity: Lepikhin 2020, arXiv:2006.16668."""

    def __init__(self, hidden: int = 1024, experts: int = 16, capacity: int = 320) -> None:
        super().__init__()
        shapes = (hidden, 4 * hidden), (4 * hidden, hidden)
        self.router, self.capacity = nn.Linear(hidden, experts, bias=False), capacity
        self.up, self.down = (nn.Parameter(torch.randn(experts, *shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        share = torch.softmax(self.router(x), -1)
        weight, chosen = torch.topk(share, 2)
        weight = weight / weight.sum(-1, keepdim=True)
        own = F.one_hot(chosen, share.shape[-1])
        place = torch.cumsum(own.flatten(0, 1), 0).view_as(own) * own - 1
        kept = (place >= 0) & (place < self.capacity)
        slot = (chosen * self.capacity + place.amax(-1).clamp(0, self.capacity - 1)).flatten()
        scale = weight * kept.any(-1)
        room = x.new_zeros(own.shape[-1] * self.capacity, x.shape[-1])
        room = room.index_add(0, slot, x.repeat_interleave(2, 0))
        worked = F.gelu(room.view(own.shape[-1], self.capacity, -1) @ self.up) @ self.down
        return (worked.flatten(0, 1)[slot] * scale.flatten()[:, None]).view(len(x), 2, -1).sum(1)


def train(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Step:
    """A step of AdamW."""
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(module).backward()
        optimizer.step()

    return step


def _t5() -> Step:
    source, target = torch.randint(0, 32128, (4, 512)), torch.randint(0, 32128, (4, 128))
    return train(T5(2), lambda m: F.cross_entropy(m(source, target).flatten(0, 1), target.flatten()))


def _vit() -> Step:
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
    return train(ViT(3), lambda m: F.cross_entropy(m(images), labels))


def _experts() -> Step:
    tokens = torch.randn(2048, 1024)
    return train(Experts(), lambda m: m(tokens).square().mean())


def _workload(workload: DLRM | Transformer | Net) -> Callable[[], Step]:
    return lambda: build_step(workload)[0]


NETS: dict[str, Callable[[], Step]] = {
    "dlrm": _workload(DLRM("dlrm-default", batch=2048)),
    "dlrm-cross": _workload(DLRM("dlrm-default", batch=2048, interaction="cross")),
    "bert": _workload(Transformer.bert("bert-base", batch=8, layers=2)),
    "gpt2": _workload(Transformer.gpt2("gpt2", batch=2, layers=2, attention="eager")),
    "xlnet": _workload(Net("xlnet", batch=4, size=128, width=768, depth=2, classes=32000)),
    "t5": _t5,
    "resnet": _workload(Net("resnet", batch=16, size=224, width=64, depth=3, classes=1000)),
    "inception": _workload(Net("inception", batch=8, size=299, width=32, depth=3)),
    "vit": _vit,
    "experts": _experts,
}
