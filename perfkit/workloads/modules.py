"""Convolutional nets and XLNet in PyTorch, each in the form of its publication and of any width, depth and size."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfkit.workloads.steps import assemble_step, share_gradients

__all__ = ["build_net", "build_net_step"]

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
           "fp64": torch.float64}  # fmt: skip


class _Sizes(NamedTuple):
    """Pixels along an edge or tokens, channels or hidden width, blocks of a stage or layers, classes or words."""

    size: int
    width: int
    depth: int
    classes: int


# -- convolutional nets ----------------------------------------------------------------------------------------------


def _unit(inputs: int, outputs: int, kernel: Any = 1, *, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> Any:
    """Convolution, batch norm and activation."""
    pad = tuple(k // 2 for k in kernel) if isinstance(kernel, tuple) else kernel // 2
    layers = [nn.Conv2d(inputs, outputs, kernel, stride, pad, groups=groups, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([act(inplace=True)] if act else []))


class _Residual(nn.Module):
    """Body plus shortcut, and an activation after the sum if there is one."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, act: bool) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut, nn.ReLU(inplace=True) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.shortcut(x))


class _Branches(nn.Module):
    """Several ways side by side, their channels put together."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


def _head(channels: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def _resnet(net: _Sizes) -> nn.Module:
    w = net.width
    layers: list[nn.Module] = [_unit(3, w, 7, stride=2), nn.MaxPool2d(3, 2, 1)]
    before = w
    for stage in range(4):
        middle, after = w << stage, 4 * w << stage
        for block in range(net.depth):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(_unit(before, middle), _unit(middle, middle, 3, stride=stride),
                                 _unit(middle, after, act=None))  # fmt: skip
            same = before == after and stride == 1
            short = nn.Identity() if same else _unit(before, after, stride=stride, act=None)
            layers.append(_Residual(body, short, act=True))
            before = after
    return nn.Sequential(*layers, *_head(before, net.classes))


def _vgg(net: _Sizes) -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for stage in range(5):
        after = net.width << min(stage, 3)
        for _ in range(net.depth):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True)]
            before = after
        layers.append(nn.MaxPool2d(2, 2))
    wide = 16 * net.width
    dense = [nn.Linear(before * (net.size // 32) ** 2, wide), nn.ReLU(inplace=True), nn.Linear(wide, net.classes)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


def _mobilenet(net: _Sizes) -> nn.Module:
    w = net.width
    layers: list[nn.Module] = [_unit(3, 2 * w, 3, stride=2, act=nn.ReLU6)]
    before = 2 * w
    for stage in range(5):
        after = w * (1, 2, 4, 6, 10)[stage]
        for block in range(net.depth):
            stride, wide = 2 if stage in (1, 2, 4) and not block else 1, before * 6
            body = nn.Sequential(_unit(before, wide, act=nn.ReLU6),
                                 _unit(wide, wide, 3, stride=stride, groups=wide, act=nn.ReLU6),
                                 _unit(wide, after, act=None))  # fmt: skip
            same = before == after and stride == 1
            layers.append(_Residual(body, nn.Identity(), act=False) if same else body)
            before = after
    return nn.Sequential(*layers, _unit(before, 4 * before, act=nn.ReLU6), *_head(4 * before, net.classes))


class _DenseLayer(nn.Module):
    """Batch norm and activation before each convolution; the new channels join the old ones."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(F.relu(self.norm1(x), inplace=True))
        return torch.cat([x, self.conv2(F.relu(self.norm2(new), inplace=True))], 1)


def _densenet(net: _Sizes) -> nn.Module:
    channels = 2 * net.width
    layers: list[nn.Module] = [_unit(3, channels, 7, stride=2), nn.MaxPool2d(3, 2, 1)]
    for stage in range(3):
        for _ in range(2 * net.depth):
            layers.append(_DenseLayer(channels, net.width))
            channels += net.width
        if stage < 2:
            shrink = nn.Conv2d(channels, channels // 2, 1, bias=False)
            layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), shrink, nn.AvgPool2d(2, 2)]
            channels //= 2
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(inplace=True), *_head(channels, net.classes))


def _inception(net: _Sizes) -> nn.Module:
    w = net.width

    def block(inputs: int, n: int, long: int) -> nn.Module:
        """Four ways; `long` is the size of the square or factorised kernels."""
        pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), _unit(inputs, n))
        if long == 5:
            near = nn.Sequential(_unit(inputs, n), _unit(n, n, 5))
            far = nn.Sequential(_unit(inputs, n), _unit(n, 2 * n, 3), _unit(2 * n, 2 * n, 3))
        else:
            near = nn.Sequential(_unit(inputs, n), _unit(n, n, (1, long)), _unit(n, n, (long, 1)))
            far = nn.Sequential(_unit(inputs, n), _unit(n, n, (long, 1)), _unit(n, n, (1, long)),
                                _unit(n, n, (long, 1)), _unit(n, 2 * n, (1, long)))  # fmt: skip
        return _Branches(_unit(inputs, n), near, far, pool)

    layers: list[nn.Module] = [_unit(3, w, 3, stride=2), _unit(w, 2 * w, 3), nn.MaxPool2d(3, 2, 1)]
    before = 2 * w
    for stage, long in enumerate((5, 7)):
        n = w << stage
        for _ in range(net.depth):
            layers.append(block(before, n, long))
            before = 5 * n
        if not stage:
            shrink = nn.Sequential(_unit(before, n), _unit(n, 2 * n, 3, stride=2))
            layers.append(_Branches(_unit(before, n, 3, stride=2), shrink, nn.MaxPool2d(3, 2, 1)))
            before += 3 * n
    return nn.Sequential(*layers, *_head(before, net.classes))


def _squeezenet(net: _Sizes) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 2 * net.width, 3, 2, 1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    before = 2 * net.width
    for stage in range(3):
        squeeze = net.width // 2 * (stage + 1)
        for _ in range(net.depth):
            near, wide = (nn.Conv2d(squeeze, 4 * squeeze, k, padding=k // 2) for k in (1, 3))
            ways = (nn.Sequential(conv, nn.ReLU(inplace=True)) for conv in (near, wide))
            layers += [nn.Conv2d(before, squeeze, 1), nn.ReLU(inplace=True), _Branches(*ways)]
            before = 8 * squeeze
        if stage < 2:
            layers.append(nn.MaxPool2d(3, 2, 1))
    last = nn.Conv2d(before, net.classes, 1)
    return nn.Sequential(*layers, last, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())


# -- XLNet -----------------------------------------------------------------------------------------------------------


class _RelativeAttention(nn.Module):
    """Attention by content and by distance; the scores by distance are shifted into place."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        width = hidden // heads
        self.q, self.k, self.v, self.r, self.o = (
            nn.Parameter(torch.empty(hidden, heads, width).normal_(std=0.02)) for _ in range(5)
        )
        self.by_content, self.by_distance = (nn.Parameter(torch.zeros(heads, width)) for _ in range(2))
        self.norm, self.scale = nn.LayerNorm(hidden), width**-0.5

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        q, k, v = (torch.einsum("ibh,hnd->ibnd", x, weight) for weight in (self.q, self.k, self.v))
        r = torch.einsum("ih,hnd->ind", distances, self.r)
        content = torch.einsum("ibnd,jbnd->bnij", q + self.by_content, k)
        distance = torch.einsum("ibnd,jnd->bnij", q + self.by_distance, r)
        b, n, i, j = distance.shape
        distance = distance.reshape(b, n, j, i)[:, :, 1:, :].reshape(b, n, i, j - 1)[:, :, :, :i]
        scores = torch.softmax((content + distance) * self.scale, 3)
        mixed = torch.einsum("bnij,jbnd->ibnd", scores, v)
        return self.norm(torch.einsum("ibnd,hnd->ibh", mixed, self.o) + x)


class _XLNet(nn.Module):
    def __init__(self, net: _Sizes) -> None:
        super().__init__()
        h, s = net.width, net.size
        self.words = nn.Embedding(net.classes, h)
        nn.init.normal_(self.words.weight, std=0.02)
        self.attention = nn.ModuleList(_RelativeAttention(h, max(1, h // 64)) for _ in range(net.depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(h, 4 * h), nn.GELU(), nn.Linear(4 * h, h)) for _ in range(net.depth)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(h) for _ in range(net.depth))
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


_BUILDERS: dict[str, Callable[[_Sizes], nn.Module]] = {
    "resnet": _resnet, "vgg": _vgg, "mobilenet": _mobilenet, "densenet": _densenet, "inception": _inception,
    "squeezenet": _squeezenet, "xlnet": _XLNet,
}  # fmt: skip


def build_net(name: str, *, size: int, width: int, depth: int, classes: int, dtype: str = "fp32") -> nn.Module:
    """The module of a net.

    Parameters
    ----------
    name : str
        One of `perfkit.workloads.nets.NETS`.
    size, width, depth, classes : int
        As those of a `perfkit.workloads.nets.Net` [-].
    dtype : str, optional
        Data type of the weights.

    Returns
    -------
    module : torch.nn.Module
        In training mode, with weights that keep activations and gradients in range through any depth.
    """
    module = _BUILDERS[name](_Sizes(size, width, depth, classes))
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out" if layer.groups == 1 else "fan_in")
    return module.to(_DTYPES[dtype])


def build_net_step(
    name: str,
    *,
    batch: int,
    optimizer: str,
    overlap: bool,
    dtype: str = "fp32",
    ranks: int = 1,
    device: str = "cpu",
    seed: int | None = None,
    **sizes: int,
) -> tuple[Callable[[], Any], nn.Module]:
    """The training step of a net, ready to be called over and over.

    Parameters
    ----------
    name : str
        One of `perfkit.workloads.nets.NETS`.
    batch : int
        Images or sequences of one iteration over all ranks [-].
    optimizer : str
        ``sgd`` (with momentum 0.9) or ``adamw``.
    overlap : bool
        Whether several ranks average gradients in buckets during the backward pass.
    dtype : str, optional
        Data type of everything.
    ranks : int
        Ranks of the process group [-].
    device : str
        Torch device.
    seed : int, optional
        Seed of weights and data; eight batches rotate [-].
    **sizes : int
        ``size``, ``width``, ``depth`` and ``classes`` of `build_net` [-].

    Returns
    -------
    step : callable
        Zeroes gradients, runs forward, backward and the optimizer.
    module : torch.nn.Module
        The net.
    """
    if seed is not None:
        torch.manual_seed(seed)
    module, size, classes = build_net(name, dtype=dtype, **sizes).to(device), sizes["size"], sizes["classes"]
    weights: Sequence[nn.Parameter] = list(module.parameters())
    if ranks > 1 and overlap:
        module, weights = share_gradients(module), []
    batches: list[tuple[tuple[Tensor], Tensor]] = []
    for _ in range(8):
        if name == "xlnet":
            tokens = torch.randint(classes, (batch // ranks, size), device=device)
            batches.append(((tokens,), tokens.view(-1)))
        else:
            images = torch.randn(batch // ranks, 3, size, size, dtype=_DTYPES[dtype], device=device)
            batches.append(((images,), torch.randint(classes, (batch // ranks,), device=device)))
    options: dict[str, Any] = {"optimizer": optimizer, "momentum": 0.9, "reduced": weights if ranks > 1 else ()}
    return assemble_step(module, batches, F.cross_entropy, **options), module
