"""Ten real models as training steps, configurations and shapes alone: what a capture has to know the operations of."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfkit.recording.nets import Net
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.transformer import Transformer
from tests.golden.steps import Make, twin


class ScaleNorm(nn.Module):
    """Root mean square norm without bias, as in T5: Raffel 2020, arXiv:1910.10683."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class BiasedAttention(nn.Module):
    """Causal attention without scale whose scores get a bias by bucketed distance, as in T5, after its norm."""

    def __init__(self, hidden: int, heads: int = 12, buckets: int = 32) -> None:
        super().__init__()
        self.heads, self.buckets, self.norm = heads, buckets, ScaleNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.bias = nn.Embedding(buckets, heads)

    def forward(self, x: Tensor) -> Tensor:
        (b, n, h), places = x.shape, torch.arange(x.shape[1])
        normed = self.norm(x)
        q, k, v = (layer(normed).view(b, n, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        distance = (places[None] - places[:, None]).abs().clamp(max=self.buckets - 1)
        scores = q @ k.transpose(-1, -2) + self.bias(distance).permute(2, 0, 1)[None]
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        mixed = F.dropout(torch.softmax(scores.float(), -1), 0.1) @ v
        return x + self.o(mixed.transpose(1, 2).reshape(b, n, h))


class ViT(nn.Module):
    """Vision Transformer: Dosovitskiy 2020, arXiv:2010.11929."""

    def __init__(self, layers: int, hidden: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 16, 16)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, hidden)), nn.Parameter(torch.zeros(1, 197, hidden))
        layer = nn.TransformerEncoderLayer(hidden, heads, batch_first=True, norm_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = F.dropout(torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places, 0.1)
        return self.head(self.norm(self.layers(x))[:, 0])


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


def learn(make: Callable[[], nn.Module], draw: Callable[[], Tensor], classes: int = 0) -> Make:
    """A step of AdamW that finds one class of each row, or else makes numbers small."""

    def make_step() -> Callable[[], Any]:
        module, x = make(), draw()
        optimizer = torch.optim.AdamW(module.parameters())
        shape = x.shape if x.dtype is torch.long else x.shape[:1]
        labels = torch.randint(classes, (shape.numel(),)) if classes else None

        def step() -> None:
            optimizer.zero_grad()
            out = module(x).flatten(0, -2)
            (out.square().mean() if labels is None else F.cross_entropy(out, labels)).backward()
            optimizer.step()

        return step

    return make_step


def _language() -> nn.Module:
    layers = [BiasedAttention(768), ScaleNorm(768), nn.Linear(768, 3072, bias=False), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(nn.Embedding(32128, 768), *layers, nn.Linear(3072, 32128, bias=False))


NETS: dict[str, Make] = {
    "dlrm": twin(DLRM("dlrm-default", batch=2048)),
    "dlrm-cross": twin(DLRM("dlrm-default", batch=2048, interaction="cross")),
    "bert": twin(Transformer.bert("bert-base", batch=8, layers=2)),
    "gpt2": twin(Transformer.gpt2("gpt2", batch=2, layers=2, attention="eager")),
    "xlnet": twin(Net("xlnet", batch=4, size=128, width=768, depth=2, classes=32000)),
    "t5": learn(_language, partial(torch.randint, 32128, (4, 512)), 32128),
    "resnet": twin(Net("resnet", batch=16, size=224, width=64, depth=3, classes=1000)),
    "inception": twin(Net("inception", batch=8, size=299, width=32, depth=3)),
    "vit": learn(partial(ViT, 3), partial(torch.randn, 8, 3, 224, 224), 1000),
    "experts": learn(Experts, partial(torch.randn, 2048, 1024)),
}
