"""Convolutional nets and XLNet in PyTorch, each as published, but with any width, depth and
size."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

#: a `perfkit.recording.nets.Net`, which imports this module to capture its nets
_Net: TypeAlias = Any


def _unit(
    inputs: int, outputs: int, kernel: Any = 1, stride: int = 1, groups: int = 1, act: Any = nn.ReLU
) -> Any:
    """Convolution, batch norm and activation."""
    pad = tuple(k // 2 for k in kernel) if isinstance(kernel, tuple) else kernel // 2
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, pad, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([act(inplace=True)] if act else []))


def _chain(inputs: int, *units: tuple[Any, ...]) -> nn.Sequential:
    """Units in sequence, each with its arguments after the number of inputs."""
    return nn.Sequential(
        *(_unit(before, *unit) for (before, *_), unit in pairwise([(inputs,), *units]))
    )


def _active(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Convolution and activation."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2), nn.ReLU(inplace=True)]


def _normed(inputs: int, outputs: int, kernel: int = 1) -> list[nn.Module]:
    """Batch norm, activation and convolution."""
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), convolution]


def _head(channels: int, classes: int) -> list[nn.Module]:
    """Mean over the image, and scores of classes."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


class Residual(nn.Module):
    """Body plus shortcut, and possibly an activation after the sum."""

    def __init__(
        self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()
        self.act = act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.shortcut(x))


class Branches(nn.Module):
    """Several branches with the same input, whose channels are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _resnet(net: _Net) -> Iterator[nn.Module]:
    """Four stages of bottleneck blocks."""
    before = net.width
    yield from (_unit(3, before, 7, 2), nn.MaxPool2d(3, 2, 1))
    for stage in range(4):
        middle, after = net.width << stage, 4 * net.width << stage
        for block in range(net.depth):
            stride = 2 if stage and not block else 1
            body = _chain(before, (middle,), (middle, 3, stride), (after, 1, 1, 1, None))
            same = before == after and stride == 1
            shortcut = None if same else _unit(before, after, 1, stride, act=None)
            yield Residual(body, shortcut, nn.ReLU(inplace=True))
            before = after
    yield from _head(before, net.classes)


def _vgg(net: _Net) -> Iterator[nn.Module]:
    """Five stages of plain convolutions, and two linear layers."""
    before, wide = 3, 16 * net.width
    for stage in range(5):
        for _ in range(net.depth):
            yield from _active(before, net.width << min(stage, 3), 3)
            before = net.width << min(stage, 3)
        yield nn.MaxPool2d(2, 2)
    yield from (
        nn.Flatten(),
        nn.Linear(before * (net.size // 32) ** 2, wide),
        nn.ReLU(inplace=True),
    )
    yield nn.Linear(wide, net.classes)


def _mobilenet(net: _Net) -> Iterator[nn.Module]:
    """Five stages of inverted bottlenecks with depthwise convolutions."""
    before = 2 * net.width
    yield _unit(3, before, 3, 2, act=nn.ReLU6)
    for stage, factor in enumerate((1, 2, 4, 6, 10)):
        for block in range(net.depth):
            halves = stage in (1, 2, 4) and block == 0
            stride = 2 if halves else 1
            wide = before * 6
            after = net.width * factor
            body = _chain(
                before,
                (wide, 1, 1, 1, nn.ReLU6),
                (wide, 3, stride, wide, nn.ReLU6),
                (after, 1, 1, 1, None),
            )
            yield Residual(body) if before == after and stride == 1 else body
            before = after
    yield from (_unit(before, 4 * before, act=nn.ReLU6), *_head(4 * before, net.classes))


def _densenet(net: _Net) -> Iterator[nn.Module]:
    """Three stages of layers whose new channels join the old ones."""
    growth, channels = net.width, 2 * net.width
    yield from (_unit(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1))
    for stage in range(3):
        for _ in range(2 * net.depth):
            new = nn.Sequential(*_normed(channels, 4 * growth), *_normed(4 * growth, growth, 3))
            yield Branches(nn.Identity(), new)
            channels += growth
        if stage < 2:
            yield from (*_normed(channels, channels // 2), nn.AvgPool2d(2, 2))
            channels //= 2
    yield from (nn.BatchNorm2d(channels), nn.ReLU(inplace=True), *_head(channels, net.classes))


def _inception(net: _Net) -> Iterator[nn.Module]:
    """Blocks of four branches, first with square kernels, then with factorised ones."""
    before = 2 * net.width
    flat, tall = (1, 7), (7, 1)
    yield from (_unit(3, net.width, 3, 2), _unit(net.width, before, 3), nn.MaxPool2d(3, 2, 1))
    for stage in range(2):
        n = net.width << stage
        near = ((n, flat), (n, tall)) if stage else ((n, 5),)
        far = (
            ((n, tall), (n, flat), (n, tall), (2 * n, flat)) if stage else ((2 * n, 3), (2 * n, 3))
        )
        for _ in range(net.depth):
            pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(before, n))
            yield Branches(
                _unit(before, n), _chain(before, (n,), *near), _chain(before, (n,), *far), pool
            )
            before = 5 * n
        if not stage:
            yield Branches(
                _unit(before, n, 3, 2), _chain(before, (n,), (2 * n, 3, 2)), nn.MaxPool2d(3, 2, 1)
            )
            before += 3 * n
    yield from _head(before, net.classes)


def _squeezenet(net: _Net) -> Iterator[nn.Module]:
    """Three stages of fire modules: few channels, then two sizes of kernel side by side."""
    before = 2 * net.width
    yield from (*_active(3, before, 3, 2), nn.MaxPool2d(3, 2, 1))
    for stage in range(3):
        squeeze = net.width // 2 * (stage + 1)
        for _ in range(net.depth):
            yield from _active(before, squeeze, 1)
            yield Branches(
                *(nn.Sequential(*_active(squeeze, 4 * squeeze, kernel)) for kernel in (1, 3))
            )
            before = 8 * squeeze
        if stage < 2:
            yield nn.MaxPool2d(3, 2, 1)
    yield from (*_active(before, net.classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _draw_projection(hidden: int, heads: int) -> nn.Parameter:
    """Weights from hidden numbers to all heads."""
    return nn.Parameter(torch.empty(hidden, heads, hidden // heads).normal_(std=0.02))


class _RelativeAttention(nn.Module):
    """Attention by content and by distance; scores by distance are shifted so that their columns
    match."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        width = hidden // heads
        self.q = _draw_projection(hidden, heads)
        self.k = _draw_projection(hidden, heads)
        self.v = _draw_projection(hidden, heads)
        self.r = _draw_projection(hidden, heads)
        self.o = _draw_projection(hidden, heads)
        self.by_content = nn.Parameter(torch.zeros(heads, width))
        self.by_distance = nn.Parameter(torch.zeros(heads, width))
        self.norm = nn.LayerNorm(hidden)
        self.scale = width**-0.5

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        q = torch.einsum("ibh,hnd->ibnd", x, self.q)
        k = torch.einsum("ibh,hnd->ibnd", x, self.k)
        v = torch.einsum("ibh,hnd->ibnd", x, self.v)
        r = torch.einsum("ih,hnd->ind", distances, self.r)
        content = torch.einsum("ibnd,jbnd->bnij", q + self.by_content, k)
        distance = torch.einsum("ibnd,jnd->bnij", q + self.by_distance, r)
        b, n, i, j = distance.shape
        distance = distance.reshape(b, n, j, i)[:, :, 1:, :].reshape(b, n, i, j - 1)[:, :, :, :i]
        scores = torch.softmax((content + distance) * self.scale, 3)
        mixed = torch.einsum("bnij,jbnd->ibnd", scores, v)
        return self.norm(torch.einsum("ibnd,hnd->ibh", mixed, self.o) + x)


class _XLNet(nn.Module):
    """Layers of relative attention and an MLP; the decoder shares the weights of the embedding."""

    def __init__(self, net: _Net) -> None:
        super().__init__()
        h, s = net.width, net.size
        layers = range(net.depth)
        self.words = nn.Embedding(net.classes, h)
        nn.init.normal_(self.words.weight, std=0.02)
        self.attention = nn.ModuleList(_RelativeAttention(h, max(1, h // 64)) for _ in layers)
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h)) for _ in layers
        )
        self.norm = nn.ModuleList(nn.LayerNorm(h) for _ in layers)
        self.decoder = nn.Linear(h, net.classes)
        self.decoder.weight = self.words.weight
        angles = torch.arange(s, -s, -1.0)[:, None] / 10000 ** (torch.arange(0, h, 2) / h)
        self.register_buffer("distances", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens.t())
        for attention, mlp, norm in zip(self.attention, self.mlp, self.norm, strict=True):
            x = attention(x, self.distances)
            x = norm(mlp(x) + x)
        return self.decoder(x).transpose(0, 1).flatten(0, 1)


_LAYERS: dict[str, Callable[[_Net], Iterator[nn.Module]]] = {
    "resnet": _resnet,
    "vgg": _vgg,
    "mobilenet": _mobilenet,
    "densenet": _densenet,
    "inception": _inception,
    "squeezenet": _squeezenet,
}


def build_net(net: _Net) -> nn.Module:
    """The module of a net.

    Parameters
    ----------
    net : Net
        Name and sizes.

    Returns
    -------
    module : torch.nn.Module
        In training mode. Its weights keep activations and gradients in range at any depth.
    """
    module = nn.Sequential(*_LAYERS[net.name](net)) if net.name in _LAYERS else _XLNet(net)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out" if layer.groups == 1 else "fan_in")
    return module
