"""Published training steps of Stable Diffusion 2's U-Net on 8, 64 and 128 A100, captured and predicted.

python -m benchmarks.gpu_unet

The rows are those of mosaicml/diffusion (`diffusion_unet.csv` of the shared data): images of 512
pixels, 2048 of them in a step, 16 at a time on a GPU. The U-Net below is written after the published
configuration of stabilityai/stable-diffusion-2-base; it has its 865.9 million weights. The step is that
of the source's file yamls/hydra-yamls/SD-2-base-512.yaml:

- latents of images and texts are computed before, so that the step is the U-Net alone;
- autocast to fp16 with scaled gradients, group and layer norms in fp16 too
  (low_precision_groupnorm, low_precision_layernorm), AdamW;
- one fully sharded unit (SHARD_GRAD_OP). Composer's `ddp_sync_context` lets each micro-batch reduce
  its gradients there, and the weights are gathered for each;
- images in NCHW; nothing asks for channels_last;
- flash attention over copied heads, as xformers has it in diffusers.

Weights are gathered and gradients reduced in fp32 here; Composer may reduce in fp16. Nodes have 8 GPUs,
and the links between them are those of the gallery's cluster of A100. The step on 8 GPUs has 16
micro-batches: its time follows from those with one and with two, as each further one takes as long.

No parameter was fitted to these rows, but they had been seen when what follows was mended: passes of
group norm, the bias of convolutions, and the time in which operands of convolutions are moved into
channels_last (docs/formulas.md, tables 2.1, 2.2 and 2.4).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.errors import judge, widen
from benchmarks.helpers.files import find_shared_data, read_csv
from benchmarks.helpers.tables import Row, lay_out
from perfkit.platform.estimates import keep_quiet

#: Images of a step, and of a micro-batch of a rank.
BATCH, MICRO_BATCH = 2048, 16
#: Channels of the stages from the largest images to the smallest.
WIDTHS = (320, 640, 1280, 1280)
#: Channels and pixels of an edge of a latent image; tokens of a text and their width; width of a head.
LATENT_CHANNELS, LATENT_EDGE = 4, 64
TEXT_TOKENS, TEXT_WIDTH = 77, 1024
HEAD_WIDTH = 64
#: Width of what is made of the time step, and of its sines and cosines.
TIME_WIDTH, TIME_WAVES = 1280, 320
#: Groups of a group norm; steps of the diffusion.
GROUPS, DIFFUSION_STEPS = 32, 1000


def _narrow(tensor: Tensor) -> Tensor:
    """A tensor in the format of autocast."""
    return tensor.to(torch.get_autocast_dtype("cuda"))


class GroupNorm(nn.GroupNorm):
    """A group norm in the format of autocast, as Composer's LPGroupNorm."""

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = _narrow(x), _narrow(self.weight), _narrow(self.bias)
        with torch.autocast("cuda", enabled=False):
            return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class LayerNorm(nn.LayerNorm):
    """A layer norm in the format of autocast, as Composer's LPLayerNorm."""

    def forward(self, x: Tensor) -> Tensor:
        x, weight, bias = _narrow(x), _narrow(self.weight), _narrow(self.bias)
        with torch.autocast("cuda", enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class ResidualBlock(nn.Module):
    """Two convolutions with the time step between them, and a way around them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first_norm = GroupNorm(GROUPS, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(TIME_WIDTH, outputs)
        self.second_norm = GroupNorm(GROUPS, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.first_norm(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.second(F.silu(self.second_norm(y)))
        return (self.shortcut(x) + y) / 1.0  # diffusers divides by output_scale_factor, which is 1


class Attention(nn.Module):
    """Attention of tokens of an image to themselves, or to those of a text."""

    def __init__(self, width: int, width_of_keys: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width_of_keys, width, bias=False)
        self.value = nn.Linear(width_of_keys, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        heads = [
            projected.unflatten(2, (-1, HEAD_WIDTH)).transpose(1, 2).contiguous()
            for projected in (self.query(x), self.key(keys), self.value(keys))
        ]
        y = F.scaled_dot_product_attention(*heads)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class GatedMLP(nn.Module):
    """A feed-forward part with a gate of GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 8 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.widen(x).chunk(2, dim=-1)
        return self.narrow(y * F.gelu(gate))


class TransformerBlock(nn.Module):
    """A layer of a Transformer over the places of an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = GroupNorm(GROUPS, width, eps=1e-6)
        self.enter = nn.Linear(width, width)
        self.norms = nn.ModuleList(LayerNorm(width) for _ in range(3))
        self.self_attention = Attention(width, width)
        self.cross_attention = Attention(width, TEXT_WIDTH)
        self.mlp = GatedMLP(width)
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        y = self.norm(x).permute(0, 2, 3, 1).reshape(batch, height * width, channels)
        y = self.enter(y)
        first, second, third = self.norms
        tokens = first(y)
        y = self.self_attention(tokens, tokens) + y
        y = self.cross_attention(second(y), text) + y
        y = self.mlp(third(y)) + y
        y = self.leave(y).reshape(batch, height, width, channels)
        return y.permute(0, 3, 1, 2).contiguous() + x


class Upsample(nn.Module):
    """Twice as many pixels along an edge, and a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Unit(nn.Module):
    """A residual block, and a Transformer block except where images are smallest."""

    def __init__(self, inputs: int, outputs: int, *, attends: bool) -> None:
        super().__init__()
        self.residual = ResidualBlock(inputs, outputs)
        self.transformer = TransformerBlock(outputs) if attends else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.residual(x, time)
        if self.transformer is None:
            return x
        return self.transformer(x, text)


class UNet(nn.Module):
    """The U-Net of Stable Diffusion 2, as diffusers builds it from its configuration: Rombach et al.
    2022, arXiv:2112.10752."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(
            nn.Linear(TIME_WAVES, TIME_WIDTH), nn.SiLU(), nn.Linear(TIME_WIDTH, TIME_WIDTH)
        )
        self.enter = nn.Conv2d(LATENT_CHANNELS, WIDTHS[0], 3, padding=1)
        last = len(WIDTHS) - 1
        channels = WIDTHS[0]
        kept = [channels]  # channels of what the way up takes from the way down
        self.down = nn.ModuleList()
        for stage, width in enumerate(WIDTHS):
            for _ in range(2):
                self.down.append(Unit(channels, width, attends=stage < last))
                channels = width
                kept.append(channels)
            if stage < last:
                self.down.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
                kept.append(channels)
        self.middle = Unit(channels, channels, attends=True)
        self.after_middle = ResidualBlock(channels, channels)
        self.up = nn.ModuleList()
        for stage, width in reversed(list(enumerate(WIDTHS))):
            for _ in range(3):
                self.up.append(Unit(channels + kept.pop(), width, attends=stage < last))
                channels = width
            if stage > 0:
                self.up.append(Upsample(channels))
        self.norm = GroupNorm(GROUPS, channels)
        self.leave = nn.Conv2d(channels, LATENT_CHANNELS, 3, padding=1)

    def forward(self, x: Tensor, time_step: Tensor, text: Tensor) -> Tensor:
        time = self.time(_embed_time(time_step))
        x = self.enter(x)
        kept = [x]
        for module in self.down:
            x = module(x, time, text) if isinstance(module, Unit) else module(x)
            kept.append(x)
        x = self.after_middle(self.middle(x, time, text), time)
        for module in self.up:
            if isinstance(module, Unit):
                x = module(torch.cat([x, kept.pop()], dim=1), time, text)
            else:
                x = module(x)
        return self.leave(F.silu(self.norm(x)))


def _embed_time(time_step: Tensor) -> Tensor:
    """Sines and cosines of a time step."""
    places = torch.arange(TIME_WAVES // 2, dtype=torch.float32, device=time_step.device)
    frequencies = torch.exp(-math.log(10_000) * places / len(places))
    angles = time_step[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def capture_step(ranks: int, micro_batches: int) -> pk.Graph:
    """A training step of one of these ranks, with so many micro-batches of `MICRO_BATCH` images."""

    def make_step() -> Callable[[], None]:
        model = UNet().to("cuda")
        mesh = init_device_mesh("cuda", (ranks,))
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
        scaler = torch.amp.GradScaler("cuda")
        edge = (LATENT_EDGE, LATENT_EDGE)
        latents = torch.randn(MICRO_BATCH, LATENT_CHANNELS, *edge, device="cuda")
        text = torch.randn(MICRO_BATCH, TEXT_TOKENS, TEXT_WIDTH, device="cuda").half()
        kept_share = torch.rand(DIFFUSION_STEPS, device="cuda")

        def add_gradients() -> None:
            with torch.autocast("cuda", torch.float16):
                time_step = torch.randint(DIFFUSION_STEPS, (MICRO_BATCH,), device="cuda")
                noise = torch.randn_like(latents)
                share = kept_share[time_step][:, None, None, None]
                noised = share.sqrt() * latents + (1 - share).sqrt() * noise
                loss = F.mse_loss(model(noised, time_step, text), noise) / micro_batches
            scaler.scale(loss).backward()

        def step() -> None:
            optimizer.zero_grad()
            for _ in range(micro_batches):
                add_gradients()
            scaler.step(optimizer)
            scaler.update()

        return step

    name = f"SD2 U-Net, {micro_batches} x {MICRO_BATCH} images"
    with warnings.catch_warnings(action="ignore"):
        return pk.capture(make_step, name=name, ranks=ranks, device="cuda")


def _predict(platform: str, ranks: int, micro_batches: int) -> pk.Prediction:
    """Predict a step from its capture."""
    with keep_quiet():
        return pk.predict(capture_step(ranks, micro_batches), platform, ranks=ranks)


def predict_step(platform: str, ranks: int, micro_batches: int) -> tuple[float, float]:
    """Time of a step [s], and the standard deviation of its logarithm [-]; from the third
    micro-batch on each takes as long as the second."""
    recorded = min(micro_batches, 2)
    prediction = _predict(platform, ranks, recorded)
    time = prediction.time
    if micro_batches > recorded:
        further = time - _predict(platform, ranks, 1).time
        time += (micro_batches - recorded) * further
    return time, prediction.spread


def predict_rows() -> list[dict[str, Any]]:
    """The published steps with what is predicted of them."""
    rows = []
    for row in read_csv(find_shared_data("steps", "diffusion_unet.csv")):
        ranks = int(row["ranks"])
        nodes = ranks // 8
        platform = "a100-sxm-8" if nodes == 1 else f"a100-sxm-8x{nodes}"
        micro_batches = BATCH // ranks // MICRO_BATCH
        time, spread = predict_step(platform, ranks, micro_batches)
        figures = widen(time, spread, float(row["measured_s"]))
        rows.append(
            {
                "platform": platform,
                "ranks": ranks,
                "micro_batches": micro_batches,
                "spread": spread,
                "deviation": math.log(figures["predicted"] / figures["measured"]) / spread,
                **figures,
            }
        )
    return rows


_ROWS = {
    "platform": "{platform}",
    "ranks": "{ranks:.0f}",
    "micro-batches": "{micro_batches:.0f}",
    "predicted (80 %)": "{predicted:.3f} s ({low:.3f} to {high:.3f})",
    "measured": "{measured:.3f} s",
    "error": "{error:+.1%}",
    "error over spread": "{deviation:+.1f}",
}
_FIGURES = {
    "n": "{n:.0f}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "bias": "{bias:+.1f}",
    "inside 80 %": "{inside:.0f}",
}


def format_rows(rows: Sequence[Row]) -> str:
    """Every row, and the errors of all."""
    return f"{lay_out(rows, _ROWS)}\n\nerrors [%]\n{lay_out([judge(rows)], _FIGURES)}"


@command({})
def main(given: Any) -> None:
    """Published steps of a diffusion U-Net on A100."""
    print(format_rows(predict_rows()))
