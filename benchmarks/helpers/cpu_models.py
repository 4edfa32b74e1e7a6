"""Training steps of the models of `benchmarks.cpu_truth`: each is written here, or made by the package
transformers from a small configuration. Sizes stand in each function; no weights or data of others are read.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

#: One training step.
Step: TypeAlias = Callable[[], Any]


@dataclass(frozen=True)
class TruthModel:
    """A model that is predicted and measured.

    Parameters
    ----------
    name : str
        Short name.
    family : str
        What it is for: ``cnn``, ``vit``, ``rnn`` and so on.
    make_step : callable
        Makes its training step.
    needs : str, optional
        Package that it needs beside torch.
    """

    name: str
    family: str
    make_step: Callable[[], Step]
    needs: str = ""


# -- steps
# ----------------------------------------------------------------------------------------------------


def train(model: nn.Module, find_loss: Callable[[], Any], optimizer: Any = None) -> Step:
    """The step of a model: AdamW, unless another optimizer is given."""
    updates = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        updates.zero_grad()
        find_loss().backward()
        updates.step()

    return step


def _classify(model: nn.Module, inputs: torch.Tensor, classes: int, optimizer: Any = None) -> Step:
    """The step of a classifier, whose result is a tensor."""
    labels = torch.randint(classes, (len(inputs),))
    return train(model, lambda: F.cross_entropy(model(inputs), labels), optimizer)


def _train_transformers(name: str, inputs: dict[str, Any], **settings: Any) -> Step:
    """The step of a model of transformers, from the name of its class and its configuration."""
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings)).train()
    return train(model, lambda: model(**inputs).loss)


def _make_images(count: int, side: int) -> torch.Tensor:
    return torch.randn(count, 3, side, side)


def _train_images(name: str, count: int, side: int, **settings: Any) -> Step:
    """The step of a classifier of images of transformers, with 100 classes."""
    inputs = {"pixel_values": _make_images(count, side), "labels": torch.randint(100, (count,))}
    return _train_transformers(name, inputs, num_labels=100, **settings)


def _normalized(*layers: nn.Module, channels: int, act: nn.Module | None) -> nn.Sequential:
    """Layers, then batch norm, then an activation, if there is one."""
    last = [] if act is None else [act]
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), *last)


# -- convolutional nets
# ----------------------------------------------------------------------------------------------------


def make_resnet18() -> Step:
    """ResNet-18 (He 2015, arXiv:1512.03385, table 1): 4 images of 112 by 112."""
    return _train_images(
        "ResNetForImageClassification",
        4,
        112,
        layer_type="basic",
        depths=[2, 2, 2, 2],
        hidden_sizes=[64, 128, 256, 512],
        embedding_size=64,
    )


class _SqueezeExcite(nn.Module):
    """Scales channels by what a small MLP makes of their means."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, hidden, 1),
            nn.ReLU(),
            nn.Conv2d(hidden, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.layers(x)


class _InvertedResidual(nn.Module):
    """Pointwise, depthwise, and pointwise convolution, with a sum where shapes are equal."""

    def __init__(
        self,
        channels_in: int,
        expanded: int,
        channels_out: int,
        *,
        kernel: int,
        stride: int,
        squeezes: bool,
        act: type[nn.Module],
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        if expanded != channels_in:
            expand = nn.Conv2d(channels_in, expanded, 1, bias=False)
            layers.append(_normalized(expand, channels=expanded, act=act()))
        depthwise = nn.Conv2d(
            expanded, expanded, kernel, stride, kernel // 2, groups=expanded, bias=False
        )
        layers.append(_normalized(depthwise, channels=expanded, act=act()))
        if squeezes:
            layers.append(_SqueezeExcite(expanded, max(8, expanded // 4)))
        project = nn.Conv2d(expanded, channels_out, 1, bias=False)
        layers.append(_normalized(project, channels=channels_out, act=None))
        self.layers = nn.Sequential(*layers)
        self.is_residual = stride == 1 and channels_in == channels_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return x + result if self.is_residual else result


#: Blocks of MobileNetV3-Small (Howard 2019, arXiv:1905.02244, table 2): kernel, expanded channels, channels
#: out, whether it squeezes, whether it has hard swish, stride.
_MOBILENET_BLOCKS = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


def make_mobilenet_v3_small() -> Step:
    """MobileNetV3-Small: 8 images of 128 by 128, SGD."""
    stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
    layers: list[nn.Module] = [_normalized(stem, channels=16, act=nn.Hardswish())]
    channels = 16
    for kernel, expanded, out, squeezes, has_swish, stride in _MOBILENET_BLOCKS:
        layers.append(
            _InvertedResidual(
                channels,
                expanded,
                out,
                kernel=kernel,
                stride=stride,
                squeezes=squeezes,
                act=nn.Hardswish if has_swish else nn.ReLU,
            )
        )
        channels = out
    last = nn.Conv2d(channels, 576, 1, bias=False)
    layers += [
        _normalized(last, channels=576, act=nn.Hardswish()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(576, 1024),
        nn.Hardswish(),
        nn.Linear(1024, 100),
    ]
    model = nn.Sequential(*layers)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return _classify(model, _make_images(8, 128), 100, sgd)


class _ShuffleUnit(nn.Module):
    """A unit of ShuffleNetV2: half of the channels pass, and channels are shuffled."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        half = channels_out // 2
        self.stride = stride
        read = channels_in if stride == 2 else half
        self.right = nn.Sequential(
            _normalized(nn.Conv2d(read, half, 1, bias=False), channels=half, act=nn.ReLU()),
            _normalized(
                nn.Conv2d(half, half, 3, stride, 1, groups=half, bias=False),
                channels=half,
                act=None,
            ),
            _normalized(nn.Conv2d(half, half, 1, bias=False), channels=half, act=nn.ReLU()),
        )
        self.left = nn.Identity() if stride == 1 else self._make_left(channels_in, half)

    def _make_left(self, channels_in: int, half: int) -> nn.Module:
        return nn.Sequential(
            _normalized(
                nn.Conv2d(channels_in, channels_in, 3, 2, 1, groups=channels_in, bias=False),
                channels=channels_in,
                act=None,
            ),
            _normalized(nn.Conv2d(channels_in, half, 1, bias=False), channels=half, act=nn.ReLU()),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (x, x) if self.stride == 2 else x.chunk(2, dim=1)
        joined = torch.cat([self.left(left), self.right(right)], dim=1)
        images, channels, height, width = joined.shape
        pairs = joined.view(images, 2, channels // 2, height, width).transpose(1, 2)
        return pairs.reshape(images, channels, height, width)


def make_shufflenet() -> Step:
    """ShuffleNetV2 1.0 (Ma 2018, arXiv:1807.11164, table 5): 8 images of 128 by 128, SGD."""
    layers: list[nn.Module] = [
        _normalized(nn.Conv2d(3, 24, 3, 2, 1, bias=False), channels=24, act=nn.ReLU()),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 24
    for units, out in ((4, 116), (8, 232), (4, 464)):
        for unit in range(units):
            layers.append(_ShuffleUnit(channels, out, 2 if unit == 0 else 1))
            channels = out
    layers += [
        _normalized(nn.Conv2d(464, 1024, 1, bias=False), channels=1024, act=nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, 100),
    ]
    model = nn.Sequential(*layers)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return _classify(model, _make_images(8, 128), 100, sgd)


def make_efficientnet_b0() -> Step:
    """EfficientNet-B0 (Tan 2019, arXiv:1905.11946, table 1): 4 images of 128 by 128; no layers dropped."""
    return _train_images(
        "EfficientNetForImageClassification",
        4,
        128,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        image_size=128,
        hidden_dim=1280,
        drop_connect_rate=0.0,
    )


def make_convnext_atto() -> Step:
    """ConvNeXt-Atto, as timm names it: depths 2, 2, 6, 2, widths 40 to 320; 4 images of 160 by 160."""
    return _train_images(
        "ConvNextForImageClassification",
        4,
        160,
        depths=[2, 2, 6, 2],
        hidden_sizes=[40, 80, 160, 320],
    )


def make_regnetx_002() -> Step:
    """RegNetX-200MF (Radosavovic 2020, arXiv:2003.13678): 8 images of 112 by 112."""
    return _train_images(
        "RegNetForImageClassification",
        8,
        112,
        layer_type="x",
        hidden_sizes=[24, 56, 152, 368],
        depths=[1, 1, 4, 7],
        groups_width=8,
    )


# -- vision Transformers and kin
# ----------------------------------------------------------------------------------------------------


def make_vit_tiny() -> Step:
    """ViT-Ti/16 (Touvron 2020, arXiv:2012.12877): width 192, 12 layers; 4 images of 160 by 160."""
    return _train_images(
        "ViTForImageClassification",
        4,
        160,
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=160,
    )


class _Mixer(nn.Module):
    """A block of MLP-Mixer: an MLP over places, and one over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.of_places = nn.Sequential(
            nn.Linear(places, width // 2), nn.GELU(), nn.Linear(width // 2, places)
        )
        self.of_channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.of_places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.of_channels(self.norms[1](x))


class _Patches(nn.Module):
    """Patches of images as rows."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, width, side, side)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches: torch.Tensor = self.layer(x)
        return patches.flatten(2).transpose(1, 2)


class _MeanOfRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=1)


def make_mixer() -> Step:
    """MLP-Mixer (Tolstikhin 2021, arXiv:2105.01601): width 256, 8 blocks; 8 images of 128, patches of 16."""
    blocks = [_Mixer(64, 256) for _ in range(8)]
    model = nn.Sequential(_Patches(16, 256), *blocks, _MeanOfRows(), nn.Linear(256, 100))
    return _classify(model, _make_images(8, 128), 100)


def make_poolformer() -> Step:
    """PoolFormer-S12 (Yu 2021, arXiv:2111.11418) of half the width: 2 images of 128 by 128."""
    return _train_images(
        "PoolFormerForImageClassification",
        2,
        128,
        depths=[2, 2, 6, 2],
        hidden_sizes=[32, 64, 160, 256],
        drop_path_rate=0.0,
    )


def make_swin_v2() -> Step:
    """Swin v2 (Liu 2021, arXiv:2111.09883) of width 48, depths 2, 2, 4, 2: 4 images of 128 by 128."""
    return _train_images(
        "Swinv2ForImageClassification",
        4,
        128,
        image_size=128,
        embed_dim=48,
        depths=[2, 2, 4, 2],
        num_heads=[2, 4, 8, 16],
        window_size=8,
        drop_path_rate=0.0,
    )


# -- U-Nets
# ----------------------------------------------------------------------------------------------------


def _double_convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        _normalized(
            nn.Conv2d(channels_in, channels_out, 3, 1, 1), channels=channels_out, act=nn.ReLU()
        ),
        _normalized(
            nn.Conv2d(channels_out, channels_out, 3, 1, 1), channels=channels_out, act=nn.ReLU()
        ),
    )


class _UNet(nn.Module):
    """U-Net (Ronneberger 2015, arXiv:1505.04597) with some widths."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        downs = [_double_convolution(3, widths[0])]
        ups, joins = [], []
        for narrow, wide in pairwise(widths):
            downs.append(_double_convolution(narrow, wide))
            ups.append(nn.ConvTranspose2d(wide, narrow, 2, 2))
            joins.append(_double_convolution(2 * narrow, narrow))
        self.downs, self.ups = nn.ModuleList(downs), nn.ModuleList(ups[::-1])
        self.joins = nn.ModuleList(joins[::-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.downs[:-1]:
            x = down(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.downs[-1](x)
        for up, join in zip(self.ups, self.joins, strict=True):
            x = join(torch.cat([up(x), kept.pop()], dim=1))
        result: torch.Tensor = self.head(x)
        return result


def make_unet_segment() -> Step:
    """A U-Net for segmentation, widths 16 to 128: 4 images of 96 by 96, 10 classes."""
    model = _UNet((16, 32, 64, 128), 10)
    images, labels = _make_images(4, 96), torch.randint(10, (4, 96, 96))
    return train(model, lambda: F.cross_entropy(model(images), labels))


class _TimedBlock(nn.Module):
    """A residual block of a diffusion model, which adds an embedding of time."""

    def __init__(self, channels_in: int, channels_out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(8, channels_in), nn.SiLU(), nn.Conv2d(channels_in, channels_out, 3, 1, 1)
        )
        self.of_time = nn.Linear(time, channels_out)
        self.second = nn.Sequential(
            nn.GroupNorm(8, channels_out),
            nn.SiLU(),
            nn.Conv2d(channels_out, channels_out, 3, 1, 1),
        )
        self.skip = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.of_time(F.silu(time))[:, :, None, None]
        result: torch.Tensor = self.skip(x) + self.second(hidden)
        return result


class _DiffusionNet(nn.Module):
    """A U-Net that predicts noise: widths 32, 64, 96, attention at the lowest resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 128))
        self.stem = nn.Conv2d(3, 32, 3, 1, 1)
        self.downs = nn.ModuleList([_TimedBlock(32, 32, 128), _TimedBlock(32, 64, 128)])
        self.middle = _TimedBlock(64, 96, 128)
        self.norm = nn.GroupNorm(8, 96)
        self.attention = nn.MultiheadAttention(96, 4, batch_first=True)
        self.ups = nn.ModuleList([_TimedBlock(96 + 64, 64, 128), _TimedBlock(64 + 32, 32, 128)])
        self.head = nn.Conv2d(32, 3, 3, 1, 1)

    def forward(self, x: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-math.log(1e4) * torch.arange(32) / 32)
        angles = moments[:, None] * frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.stem(x)
        kept = []
        for down in self.downs:
            x = down(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        rows = self.norm(x).flatten(2).transpose(1, 2)
        attended = self.attention(rows, rows, rows, need_weights=False)[0]
        x = x + attended.transpose(1, 2).reshape(x.shape)
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = up(torch.cat([x, kept.pop()], dim=1), time)
        result: torch.Tensor = self.head(x)
        return result


def make_unet_diffusion() -> Step:
    """A diffusion model (Ho 2020, arXiv:2006.11239) in small: 4 images of 32 by 32."""
    model = _DiffusionNet()
    images, noise, moments = _make_images(4, 32), _make_images(4, 32), torch.rand(4) * 1000
    return train(model, lambda: F.mse_loss(model(images + noise, moments), noise))


# -- recurrent nets and speech
# ----------------------------------------------------------------------------------------------------


def make_lstm_seq2seq() -> Step:
    """Encoder and decoder of two LSTM layers of 256: 16 sequences of 40 words, 5,000 words."""
    table, encoder = nn.Embedding(5000, 256), nn.LSTM(256, 256, 2, batch_first=True)
    decoder, head = nn.LSTM(256, 256, 2, batch_first=True), nn.Linear(256, 5000)
    model = nn.ModuleList([table, encoder, decoder, head])
    source, target = torch.randint(5000, (16, 40)), torch.randint(5000, (16, 40))

    def find_loss() -> Any:
        _, states = encoder(table(source))
        rows, _ = decoder(table(target), states)
        return F.cross_entropy(head(rows).flatten(0, 1), target.flatten())

    return train(model, find_loss)


def make_gru_attention() -> Step:
    """A GRU that reads, and a GRU cell with attention (Bahdanau 2014, arXiv:1409.0473) that writes: width
    128, 16 sequences of 24 words, 2,000 words."""
    table, encoder = nn.Embedding(2000, 128), nn.GRU(128, 128, batch_first=True)
    cell, head = nn.GRUCell(256, 128), nn.Linear(128, 2000)
    of_keys, of_query, score = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 1)
    model = nn.ModuleList([table, encoder, cell, head, of_keys, of_query, score])
    source, target = torch.randint(2000, (16, 24)), torch.randint(2000, (16, 24))

    def find_loss() -> Any:
        rows, last = encoder(table(source))
        state, keys, results = last[0], of_keys(rows), []
        for word in table(target).unbind(1):
            scores = score(torch.tanh(keys + of_query(state)[:, None]))
            read = (torch.softmax(scores, dim=1) * rows).sum(dim=1)
            state = cell(torch.cat([word, read], dim=1), state)
            results.append(state)
        logits = head(torch.stack(results, dim=1))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return train(model, find_loss)


def make_ctc_seq2seq() -> Step:
    """A bidirectional LSTM encoder of 192 with a CTC loss, and an LSTM decoder with a loss of words: 8
    sequences of 80 frames of 80 numbers, 20 of 500 words."""
    narrow = nn.Sequential(nn.Conv1d(80, 192, 3, 2, 1), nn.ReLU())
    encoder = nn.LSTM(192, 192, 2, bidirectional=True, batch_first=True)
    table, decoder = nn.Embedding(500, 192), nn.LSTM(192, 384, batch_first=True)
    of_frames, of_words = nn.Linear(384, 500), nn.Linear(384, 500)
    attention = nn.MultiheadAttention(384, 4, batch_first=True)
    model = nn.ModuleList([narrow, encoder, table, decoder, of_frames, of_words, attention])
    frames, words = torch.randn(8, 80, 80), torch.randint(1, 500, (8, 20))
    frame_counts, word_counts = torch.full((8,), 40), torch.full((8,), 20)

    def find_loss() -> Any:
        rows, _ = encoder(narrow(frames).transpose(1, 2))
        logs = of_frames(rows).log_softmax(-1).transpose(0, 1)
        ctc = F.ctc_loss(logs, words, frame_counts, word_counts)
        states, _ = decoder(table(words))
        read, _ = attention(states, rows, rows, need_weights=False)
        of_decoder = F.cross_entropy(of_words(states + read).flatten(0, 1), words.flatten())
        return ctc + of_decoder

    return train(model, find_loss)


def make_wav2vec2_ctc() -> Step:
    """wav2vec 2.0 (Baevski 2020, arXiv:2006.11477) with a CTC loss in small: width 192, 4 layers, 2 seconds of
    8,000 numbers; no layers dropped and nothing masked."""
    inputs = {"input_values": torch.randn(2, 8000), "labels": torch.randint(1, 32, (2, 8))}
    return _train_transformers(
        "Wav2Vec2ForCTC",
        inputs,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=768,
        conv_dim=(128,) * 7,
        layerdrop=0.0,
        apply_spec_augment=False,
        vocab_size=32,
    )


class _WaveNet(nn.Module):
    """Dilated causal convolutions with gates (van den Oord 2016, arXiv:1609.03499)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        dilations = [2 ** (layer % 8) for layer in range(layers)]
        self.pads = dilations
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 2, dilation=dilation) for dilation in dilations
        )
        self.outs = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in dilations)
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 256, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        total: Any = 0.0
        for pad, gate, out in zip(self.pads, self.gates, self.outs, strict=True):
            signal, opening = gate(F.pad(x, (pad, 0))).chunk(2, dim=1)
            change, skip = out(torch.tanh(signal) * torch.sigmoid(opening)).chunk(2, dim=1)
            x, total = x + change, total + skip
        result: torch.Tensor = self.head(total)
        return result


def make_wavenet() -> Step:
    """A WaveNet of width 32, 16 layers: 2 sequences of 2,000 numbers, 256 classes."""
    model = _WaveNet(32, 16)
    waves, labels = torch.randn(2, 1, 2000), torch.randint(256, (2, 2000))
    return train(model, lambda: F.cross_entropy(model(waves), labels))


# -- graphs
# ----------------------------------------------------------------------------------------------------


def _draw_graph(nodes: int, edges: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets of random edges."""
    return torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,))


def make_gcn() -> Step:
    """A graph convolution (Kipf 2016, arXiv:1609.02907) of two layers of 64: 10,000 nodes, 50,000 edges."""
    nodes, width = 10_000, 64
    layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 10)])
    features, labels = torch.randn(nodes, width), torch.randint(10, (nodes,))
    sources, targets = _draw_graph(nodes, 50_000)
    degrees = torch.bincount(targets, minlength=nodes).clamp(min=1).float()
    weights = (degrees[sources] * degrees[targets]).rsqrt()[:, None]

    def find_loss() -> Any:
        x = features
        for layer in layers[:-1]:
            messages = layer(x)[sources] * weights
            sums = torch.zeros(nodes, width).index_add(0, targets, messages)
            x = F.relu(sums)
        return F.cross_entropy(layers[-1](x), labels)

    return train(layers, find_loss)


def make_gat() -> Step:
    """Graph attention (Velickovic 2017, arXiv:1710.10903): two layers of 4 heads of 16, 3,000 nodes, 20,000
    edges."""
    nodes, heads, width = 3000, 4, 16
    layers = nn.ModuleList([nn.Linear(64, heads * width), nn.Linear(64, heads * width)])
    of_sources = nn.ParameterList([torch.randn(heads, width) for _ in layers])
    of_targets = nn.ParameterList([torch.randn(heads, width) for _ in layers])
    head = nn.Linear(64, 10)
    model = nn.ModuleList([layers, head])
    model.of_sources, model.of_targets = of_sources, of_targets
    features, labels = torch.randn(nodes, 64), torch.randint(10, (nodes,))
    sources, targets = _draw_graph(nodes, 20_000)

    def find_loss() -> Any:
        x = features
        for layer, of_source, of_target in zip(layers, of_sources, of_targets, strict=True):
            rows = layer(x).view(nodes, heads, width)
            scores = (rows * of_source).sum(-1)[sources] + (rows * of_target).sum(-1)[targets]
            weights = F.leaky_relu(scores, 0.2).exp()
            totals = torch.zeros(nodes, heads).index_add(0, targets, weights)
            weights = weights / totals[targets]
            messages = rows[sources] * weights[:, :, None]
            sums = torch.zeros(nodes, heads, width).index_add(0, targets, messages)
            x = F.elu(sums.flatten(1))
        return F.cross_entropy(head(x), labels)

    return train(model, find_loss)


# -- recommendation
# ----------------------------------------------------------------------------------------------------


def make_torchrec_like() -> Step:
    """Bags of four kinds (sum, mean, max, weighted), dense gradients, Adam: 4 tables of 20,000 rows of 64, 256
    samples of 10 lookups, and an MLP."""
    samples, lookups, rows, width = 256, 10, 20_000, 64
    modes = ("sum", "mean", "max", "sum")
    tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode=mode) for mode in modes)
    top = nn.Sequential(nn.Linear(4 * width + 16, 256), nn.ReLU(), nn.Linear(256, 1))
    model = nn.ModuleList([tables, top])
    indices = [torch.randint(rows, (samples * lookups,)) for _ in modes]
    offsets = torch.arange(0, samples * lookups, lookups)
    weights = torch.rand(samples * lookups)
    dense, labels = torch.randn(samples, 16), torch.randint(2, (samples, 1)).float()

    def find_loss() -> Any:
        vectors = [dense]
        for number, (table, chosen) in enumerate(zip(tables, indices, strict=True)):
            of_lookups = weights if number == 3 else None
            vectors.append(table(chosen, offsets, per_sample_weights=of_lookups))
        return F.binary_cross_entropy_with_logits(top(torch.cat(vectors, dim=1)), labels)

    return train(model, find_loss, torch.optim.Adam(model.parameters(), lr=1e-3))


def make_two_tower() -> Step:
    """Two towers with sparse tables of hashed words, SparseAdam: 2 tables of 500,000 rows of 64, 512 samples of
    8 words."""
    tables = nn.ModuleList(nn.EmbeddingBag(500_000, 64, mode="mean", sparse=True) for _ in range(2))
    towers = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2)
    )
    words = [torch.randint(2**31, (512, 8)) for _ in range(2)]
    labels = torch.arange(512)
    of_tables = torch.optim.SparseAdam(list(tables.parameters()))
    of_towers = torch.optim.Adam(towers.parameters())

    def step() -> None:
        of_tables.zero_grad()
        of_towers.zero_grad()
        sides = []
        for table, tower, hashed in zip(tables, towers, words, strict=True):
            sides.append(F.normalize(tower(table(hashed % 500_000)), dim=1))
        F.cross_entropy(sides[0] @ sides[1].t() * 20.0, labels).backward()
        of_tables.step()
        of_towers.step()

    return step


class _Hstu(nn.Module):
    """A layer of HSTU (Zhai 2024, arXiv:2402.17152): attention without softmax, with gates."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, length, length))
        self.register_buffer("mask", torch.ones(length, length).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        gate, q, k, v = F.silu(self.project(self.before(x))).chunk(4, dim=-1)
        shape = (samples, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        mask: Any = self.mask
        scores = F.silu(q @ k.transpose(-2, -1) + self.bias) / length * mask
        read = (scores @ v).transpose(1, 2).reshape(samples, length, width)
        result: torch.Tensor = x + self.out(self.after(read) * gate)
        return result


def make_hstu() -> Step:
    """Three layers of HSTU of width 128 and 4 heads: 8 sequences of 100 of 10,000 items."""
    table, head = nn.Embedding(10_000, 128), nn.Linear(128, 10_000)
    model = nn.Sequential(table, *(_Hstu(128, 4, 100) for _ in range(3)), head)
    items = torch.randint(10_000, (8, 100))
    return train(model, lambda: F.cross_entropy(model(items).flatten(0, 1), items.flatten()))


# -- operators, points, games
# ----------------------------------------------------------------------------------------------------


class _Spectral(nn.Module):
    """A layer of a Fourier neural operator (Li 2020, arXiv:2010.08895)."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        scale = 1 / width**2
        shape = (width, width, modes, modes)
        self.low = nn.Parameter(scale * torch.randn(*shape, dtype=torch.cfloat))
        self.high = nn.Parameter(scale * torch.randn(*shape, dtype=torch.cfloat))
        self.beside = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves, modes = torch.fft.rfft2(x), self.modes
        kept = torch.zeros_like(waves)
        first = torch.einsum("bixy,ioxy->boxy", waves[:, :, :modes, :modes], self.low)
        last = torch.einsum("bixy,ioxy->boxy", waves[:, :, -modes:, :modes], self.high)
        kept[:, :, :modes, :modes] = first
        kept[:, :, -modes:, :modes] = last
        result: torch.Tensor = torch.fft.irfft2(kept, s=x.shape[-2:]) + self.beside(x)
        return result


def make_fourier_operator() -> Step:
    """A Fourier neural operator of width 24, 4 layers of 12 modes: 4 fields of 64 by 64."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 1)]
    for _ in range(4):
        layers += [_Spectral(24, 12), nn.GELU()]
    model = nn.Sequential(*layers, nn.Conv2d(24, 1, 1))
    fields, truth = torch.randn(4, 3, 64, 64), torch.randn(4, 1, 64, 64)
    return train(model, lambda: F.mse_loss(model(fields), truth))


def make_nerf() -> Step:
    """A radiance field (Mildenhall 2020, arXiv:2003.08934): MLP of 4 layers of 128, 128 rays of 32 points."""
    layers: list[nn.Module] = [nn.Linear(63, 128), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 4))
    points, colours = torch.rand(128, 32, 3), torch.rand(128, 3)
    frequencies = 2.0 ** torch.arange(10)

    def find_loss() -> Any:
        angles = (points[..., None] * frequencies).flatten(2)
        result = model(torch.cat([points, angles.sin(), angles.cos()], dim=-1))
        density, colour = F.relu(result[..., 3]), torch.sigmoid(result[..., :3])
        opacity = 1 - torch.exp(-density * 0.1)
        passed = torch.cumprod(1 - opacity + 1e-6, dim=1)
        seen = ((opacity * passed)[..., None] * colour).sum(dim=1)
        return F.mse_loss(seen, colours)

    return train(model, find_loss)


def make_points() -> Step:
    """Points that attend to an image and the other way round, as the decoder of Segment Anything (Kirillov 2023,
    arXiv:2304.02643): width 128, 2 layers, 2 images of 256 places, 16 points."""
    layers = nn.ModuleList(nn.MultiheadAttention(128, 8, batch_first=True) for _ in range(6))
    mlps = nn.ModuleList(
        nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)) for _ in range(2)
    )
    norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(8))
    upscale = nn.Sequential(
        nn.ConvTranspose2d(128, 32, 2, 2), nn.GELU(), nn.ConvTranspose2d(32, 16, 2, 2)
    )
    narrow = nn.Linear(128, 16)
    model = nn.ModuleList([layers, mlps, norms, upscale, narrow])
    image, points = torch.randn(2, 256, 128), torch.randn(2, 16, 128)
    masks = torch.rand(2, 16, 64, 64).round()

    def attend(number: int, read: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layers[number](read, known, known, need_weights=False)[0]
        return result

    def find_loss() -> Any:
        x, places = points, image
        for layer in range(2):
            x = norms[4 * layer](x + attend(3 * layer, x, x))
            x = norms[4 * layer + 1](x + attend(3 * layer + 1, x, places))
            x = norms[4 * layer + 2](x + mlps[layer](x))
            places = norms[4 * layer + 3](places + attend(3 * layer + 2, places, x))
        pixels = upscale(places.transpose(1, 2).reshape(2, 128, 16, 16))
        logits = (narrow(x) @ pixels.flatten(2)).view(masks.shape)
        return F.binary_cross_entropy_with_logits(logits, masks)

    return train(model, find_loss)


def make_gan() -> Step:
    """A DCGAN (Radford 2015, arXiv:1511.06434) of width 32: 16 images of 32 by 32, both networks updated."""
    maker = nn.Sequential(
        nn.ConvTranspose2d(64, 128, 4, 1, 0, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    judge = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, 2, 1, bias=False),
        nn.BatchNorm2d(128),
        nn.LeakyReLU(0.2),
        nn.Conv2d(128, 1, 4, 1, 0, bias=False),
    )
    images, real, false = _make_images(16, 32), torch.ones(16), torch.zeros(16)
    of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    find_loss = F.binary_cross_entropy_with_logits

    def step() -> None:
        made = maker(torch.randn(16, 64, 1, 1))
        of_judge.zero_grad()
        of_real = find_loss(judge(images).flatten(), real)
        of_made = find_loss(judge(made.detach()).flatten(), false)
        (of_real + of_made).backward()
        of_judge.step()
        of_maker.zero_grad()
        find_loss(judge(made).flatten(), real).backward()
        of_maker.step()

    return step


def make_ppo() -> Step:
    """Proximal policy optimization (Schulman 2017, arXiv:1707.06347): MLPs of 2 layers of 128, 4 mini-batches
    of 256 states of 32 numbers, 8 actions."""
    policy = nn.Sequential(
        nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 8)
    )
    value = nn.Sequential(
        nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
    )
    model = nn.ModuleList([policy, value])
    states, actions = torch.randn(1024, 32), torch.randint(8, (1024, 1))
    old_logs, advantages, returns = torch.randn(1024), torch.randn(1024), torch.randn(1024)
    updates = torch.optim.Adam(model.parameters(), lr=3e-4)

    def step() -> None:
        for begin in range(0, 1024, 256):
            part = slice(begin, begin + 256)
            logs = policy(states[part]).log_softmax(-1)
            chosen = logs.gather(1, actions[part])[:, 0]
            ratio = (chosen - old_logs[part]).exp()
            gain = advantages[part]
            of_policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            of_value = F.mse_loss(value(states[part])[:, 0], returns[part])
            entropy = -(logs.exp() * logs).sum(-1).mean()
            updates.zero_grad()
            (of_policy + 0.5 * of_value - 0.01 * entropy).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            updates.step()

    return step


# -- Transformers of the package, and optimizers
# ----------------------------------------------------------------------------------------------------


def make_olmoe() -> Step:
    """OLMoE (Muennighoff 2024, arXiv:2409.02060) in small: width 128, 3 layers, 8 experts of which 2 are
    chosen; 2 sequences of 64."""
    words = torch.randint(2000, (2, 64))
    return _train_transformers(
        "OlmoeForCausalLM",
        {"input_ids": words, "labels": words},
        vocab_size=2000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=1,
        eos_token_id=2,
    )


def make_bart() -> Step:
    """BART (Lewis 2019, arXiv:1910.13461) in small: width 128, 3 and 3 layers; 4 sequences of 64."""
    words = torch.randint(3, 3000, (4, 64))
    return _train_transformers(
        "BartForConditionalGeneration",
        {"input_ids": words, "labels": words},
        vocab_size=3000,
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=128,
    )


def make_led() -> Step:
    """LED (Beltagy 2020, arXiv:2004.05150) in small: width 128, 2 and 2 layers, windows of 64; 2 sequences of
    256, of which 64 are written."""
    return _train_transformers(
        "LEDForConditionalGeneration",
        {
            "input_ids": torch.randint(3, 3000, (2, 256)),
            "labels": torch.randint(3, 3000, (2, 64)),
        },
        vocab_size=3000,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_encoder_position_embeddings=512,
        max_decoder_position_embeddings=128,
        attention_window=64,
    )


def make_informer() -> Step:
    """Informer (Zhou 2020, arXiv:2012.07436) in small: width 64, 2 and 2 layers; 8 series of 48 + 24 steps."""
    past = 48 + 7
    inputs = {
        "past_values": torch.randn(8, past),
        "past_time_features": torch.randn(8, past, 2),
        "past_observed_mask": torch.ones(8, past),
        "future_values": torch.randn(8, 24),
        "future_time_features": torch.randn(8, 24, 2),
    }
    return _train_transformers(
        "InformerForPrediction",
        inputs,
        prediction_length=24,
        context_length=48,
        num_time_features=2,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
    )


def make_patchtst() -> Step:
    """PatchTST (Nie 2022, arXiv:2211.14730) in small: width 64, 3 layers; 8 times 7 series of 256 steps."""
    inputs = {"past_values": torch.randn(8, 256, 7), "future_values": torch.randn(8, 48, 7)}
    return _train_transformers(
        "PatchTSTForPrediction",
        inputs,
        num_input_channels=7,
        context_length=256,
        patch_length=16,
        patch_stride=8,
        prediction_length=48,
        d_model=64,
        num_attention_heads=4,
        ffn_dim=256,
        num_hidden_layers=3,
    )


def _make_mlp() -> tuple[nn.Module, Callable[[], Any]]:
    """An MLP of two layers of 256, and its loss of 64 samples."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    inputs, truth = torch.randn(64, 256), torch.randn(64, 256)
    return model, lambda: F.mse_loss(model(inputs), truth)


def _find_root(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse fourth root of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    powers = values.clamp(min=1e-6).pow(-0.25)
    return vectors @ (powers[:, None] * vectors.t())


def make_shampoo() -> Step:
    """Shampoo (Gupta 2018, arXiv:1802.09568) with roots in each step: an MLP of 2 layers of 256."""
    model, find_loss = _make_mlp()
    weights = [weight for weight in model.parameters() if weight.dim() == 2]
    sides = [(torch.eye(len(w)), torch.eye(w.shape[1])) for w in weights]

    def step() -> None:
        model.zero_grad()
        find_loss().backward()
        with torch.no_grad():
            for weight, (left, right) in zip(weights, sides, strict=True):
                gradient: Any = weight.grad
                left.add_(gradient @ gradient.t())
                right.add_(gradient.t() @ gradient)
                weight.sub_(_find_root(left) @ gradient @ _find_root(right), alpha=1e-3)

    return step


def make_adam_8bit() -> Step:
    """Adam whose states are in 8 bits with a scale for 256 numbers (Dettmers 2021, arXiv:2110.02861): 6 layers of
    256."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    model = nn.Sequential(*layers)
    inputs, truth = torch.randn(64, 256), torch.randn(64, 256)
    weights = [weight for weight in model.parameters() if weight.dim() == 2]
    states = []
    for weight in weights:
        blocks = weight.numel() // 256
        numbers = [torch.zeros(blocks, 256, dtype=torch.int8) for _ in range(2)]
        scales = [torch.full((blocks, 1), 1e-6) for _ in range(2)]
        states.append((numbers, scales))

    def compress(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = values.abs().amax(dim=1, keepdim=True) / 127 + 1e-12
        return (values / scale).round().to(torch.int8), scale

    def step() -> None:
        model.zero_grad()
        F.mse_loss(model(inputs), truth).backward()
        with torch.no_grad():
            for weight, (numbers, scales) in zip(weights, states, strict=True):
                gradient: Any = weight.grad
                blocks = gradient.view(-1, 256)
                first = 0.9 * numbers[0].float() * scales[0] + 0.1 * blocks
                second = 0.999 * numbers[1].float() * scales[1] + 0.001 * blocks.square()
                change = first / (second.abs().sqrt() + 1e-8)
                weight.sub_(change.view_as(weight), alpha=1e-3)
                for state, values in enumerate((first, second)):
                    packed, scale = compress(values)
                    numbers[state].copy_(packed)
                    scales[state].copy_(scale)

    return step


_TRANSFORMERS = "transformers"
#: The models that `capture.md` of the project names, by family.
NAMED = (
    TruthModel("resnet18", "cnn", make_resnet18, _TRANSFORMERS),
    TruthModel("mobilenet-v3-small", "cnn", make_mobilenet_v3_small),
    TruthModel("shufflenet", "cnn", make_shufflenet),
    TruthModel("efficientnet-b0", "cnn", make_efficientnet_b0, _TRANSFORMERS),
    TruthModel("convnext-atto", "cnn", make_convnext_atto, _TRANSFORMERS),
    TruthModel("regnetx-002", "cnn", make_regnetx_002, _TRANSFORMERS),
    TruthModel("vit-tiny", "vit", make_vit_tiny, _TRANSFORMERS),
    TruthModel("mixer", "vit", make_mixer),
    TruthModel("poolformer", "vit", make_poolformer, _TRANSFORMERS),
    TruthModel("swin-v2-like", "vit", make_swin_v2, _TRANSFORMERS),
    TruthModel("unet-segment", "unet", make_unet_segment),
    TruthModel("unet-diffusers", "unet", make_unet_diffusion),
    TruthModel("lstm-seq2seq", "rnn", make_lstm_seq2seq),
    TruthModel("gru-attention", "rnn", make_gru_attention),
    TruthModel("gnn-gcn", "gnn", make_gcn),
    TruthModel("gnn-gat", "gnn", make_gat),
    TruthModel("hf-olmoe", "moe", make_olmoe, _TRANSFORMERS),
    TruthModel("hf-wav2vec2-ctc", "speech", make_wav2vec2_ctc, _TRANSFORMERS),
    TruthModel("seq2seq-ctc", "speech", make_ctc_seq2seq),
    TruthModel("wavenet", "speech", make_wavenet),
    TruthModel("torchrec-like", "recommendation", make_torchrec_like),
    TruthModel("two-tower-hash", "recommendation", make_two_tower),
    TruthModel("hstu", "recommendation", make_hstu),
    TruthModel("fourier-operator", "operator", make_fourier_operator),
    TruthModel("nerf", "operator", make_nerf),
    TruthModel("segment-anything-like-points", "operator", make_points),
    TruthModel("gan", "gan", make_gan),
    TruthModel("ppo", "rl", make_ppo),
    TruthModel("hf-bart", "seq2seq", make_bart, _TRANSFORMERS),
    TruthModel("hf-led", "seq2seq", make_led, _TRANSFORMERS),
    TruthModel("hf-informer", "series", make_informer, _TRANSFORMERS),
    TruthModel("hf-patchtst", "series", make_patchtst, _TRANSFORMERS),
    TruthModel("opt-shampoo", "optimizer", make_shampoo),
    TruthModel("opt-adam-8bit", "optimizer", make_adam_8bit),
)


# -- models drawn by a seed
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """A kind of models in transformers that may be drawn: its name there, the class that makes models of a
    task, and settings beside the usual ones."""

    name: str
    task: str
    settings: dict[str, Any] = field(default_factory=dict)


_CAUSAL, _MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
_IMAGES = "AutoModelForImageClassification"
#: Kinds to draw from: those of text have width 128, 3 layers, 4 heads and 2,000 words; those of images have
#: their usual sizes but for what is said here.
_KINDS = (
    _Kind("roberta", _MASKED),
    _Kind("electra", _MASKED, {"embedding_size": 128}),
    _Kind("albert", _MASKED, {"embedding_size": 64}),
    _Kind("distilbert", _MASKED, {"dim": 128, "n_layers": 3, "n_heads": 4, "hidden_dim": 512}),
    _Kind("deberta-v2", _MASKED),
    _Kind("mpnet", _MASKED),
    _Kind("fnet", _MASKED),
    _Kind("roformer", _MASKED),
    _Kind("convbert", _MASKED, {"embedding_size": 128}),
    _Kind("squeezebert", _MASKED),
    _Kind("nystromformer", _MASKED),
    _Kind("gpt_neo", _CAUSAL, {"attention_types": [[["global", "local", "global"], 1]]}),
    _Kind("gpt_neox", _CAUSAL),
    _Kind("opt", _CAUSAL, {"ffn_dim": 512, "word_embed_proj_dim": 128}),
    _Kind("bloom", _CAUSAL, {"n_layer": 3, "n_head": 4}),
    _Kind("falcon", _CAUSAL),
    _Kind("llama", _CAUSAL),
    _Kind("mistral", _CAUSAL, {"num_key_value_heads": 2}),
    _Kind("qwen2", _CAUSAL, {"num_key_value_heads": 2}),
    _Kind("phi", _CAUSAL),
    _Kind("gemma", _CAUSAL, {"num_key_value_heads": 1, "head_dim": 32}),
    _Kind("stablelm", _CAUSAL, {"num_key_value_heads": 4}),
    _Kind("beit", _IMAGES, {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}),
    _Kind("deit", _IMAGES, {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}),
    _Kind(
        "dinov2", _IMAGES, {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    ),
    _Kind("swin", _IMAGES, {"embed_dim": 48, "depths": [2, 2, 2, 2], "window_size": 4}),
    _Kind("mobilenet_v1", _IMAGES),
    _Kind("mobilenet_v2", _IMAGES),
    _Kind("mobilevit", _IMAGES),
    _Kind("focalnet", _IMAGES, {"embed_dim": 48, "depths": [2, 2, 2, 2]}),
    _Kind(
        "resnet",
        _IMAGES,
        {"layer_type": "basic", "depths": [1, 1, 2, 1], "hidden_sizes": [64, 128, 256, 512]},
    ),
    _Kind("pvt", _IMAGES, {"depths": [1, 1, 2, 1]}),
    _Kind("bit", _IMAGES, {"depths": [1, 2, 2, 1], "hidden_sizes": [64, 128, 256, 512]}),
    _Kind(
        "data2vec-vision",
        _IMAGES,
        {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    ),
    _Kind("convnextv2", _IMAGES, {"depths": [2, 2, 4, 2], "hidden_sizes": [40, 80, 160, 320]}),
)


@dataclass(frozen=True)
class _Drawn:
    """Numbers that are drawn beside a kind: sequences (images), and words of each (pixels of an edge) [-]."""

    batch: int
    length: int


def _make_drawn(kind: _Kind, sizes: _Drawn) -> Step:
    """The step of a drawn model."""
    import transformers

    usual: dict[str, Any]
    if kind.task == _IMAGES:
        usual = {"image_size": sizes.length, "num_labels": 100}
    else:
        usual = {
            "vocab_size": 2000,
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_layers": 3,
            "num_attention_heads": 4,
            "num_heads": 4,
            "intermediate_size": 512,
            "pad_token_id": 0,
        }
    config = transformers.AutoConfig.for_model(kind.name, **(usual | kind.settings))
    model = getattr(transformers, kind.task).from_config(config).train()
    if kind.task == _IMAGES:
        images, labels = (
            _make_images(sizes.batch, sizes.length),
            torch.randint(100, (sizes.batch,)),
        )
        return train(model, lambda: F.cross_entropy(model(pixel_values=images).logits, labels))
    words = torch.randint(3, 2000, (sizes.batch, sizes.length))
    return train(
        model,
        lambda: F.cross_entropy(model(input_ids=words).logits.flatten(0, 1), words.flatten()),
    )


def draw_models(seed: int, count: int = 10) -> list[TruthModel]:
    """Draw models of transformers: kinds without repeats, and their sizes.

    Parameters
    ----------
    seed : int
        Seed [-].
    count : int, optional
        How many [-].

    Returns
    -------
    models : list of TruthModel
        The same ones for the same seed.
    """
    import numpy as np

    rng = np.random.default_rng([46, seed])
    models = []
    for number in rng.permutation(len(_KINDS))[:count].tolist():
        kind = _KINDS[number]
        if kind.task == _IMAGES:
            sizes = _Drawn(int(rng.integers(2, 7)), 32 * int(rng.integers(3, 6)))
        else:
            sizes = _Drawn(int(rng.integers(2, 9)), 16 * int(rng.integers(2, 9)))
        name = f"{kind.name}-{sizes.batch}-{sizes.length}"
        models.append(TruthModel(name, "drawn", partial(_make_drawn, kind, sizes), _TRANSFORMERS))
    return models
