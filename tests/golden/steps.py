"""Training steps of PyTorch that are captured; the families, ranks and devices they are captured
for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from perfkit.measure.iterations import build_step

Make = Callable[[], Callable[[], Any]]


def twin(workload: Any, **settings: Any) -> Make:
    """The step that measures one of perfkit's own workloads."""
    return lambda: build_step(workload, **settings)[0]


def train(
    net: Callable[[], Any],
    shape: tuple[int, ...],
    optimizer: Any,
    *,
    ddp: bool = False,
    **settings: Any,
) -> Make:
    """A step over a module, with or without gradients averaged over ranks."""

    def make() -> Callable[[], Any]:
        module = nn.parallel.DistributedDataParallel(net()) if ddp else net()
        chosen = optimizer(module.parameters(), **settings)
        x = torch.randn(*shape, dtype=next(module.parameters()).dtype)

        def step() -> None:
            chosen.zero_grad()
            module(x).float().square().mean().backward()
            chosen.step()

        return step

    return make


def mlp() -> nn.Module:
    """Two layers with dropout."""
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 10))


def convolutions() -> nn.Module:
    """A plain, a depthwise and a pointwise convolution."""
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    then = (
        nn.Conv2d(16, 16, 3, groups=16),
        nn.Conv2d(16, 32, 1),
        nn.Flatten(),
        nn.Linear(32 * 169, 10),
    )
    return nn.Sequential(*first, *then)


class Encoder(nn.Module):
    """A Transformer layer under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)


class Bags(nn.Module):
    """Two tables with sparse gradients."""

    def __init__(self, rows: int = 1000, dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows * i, dim, mode="sum", sparse=True) for i in (1, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(320).reshape(32, 10) * 3 % 1000
        return torch.cat([table(rows) for table in self.tables], 1)


class CapturedStep(NamedTuple):
    """A program, and what it is captured for."""

    make: Make
    settings: dict[str, Any] = {}  # noqa: RUF012


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
STEPS = {
    "mlp, momentum": CapturedStep(
        train(mlp, (64, 256), SGD, lr=0.1, momentum=0.9), {"family": "dlrm"}
    ),
    "mlp, lists": CapturedStep(train(mlp, (64, 256), ADAMW, foreach=True)),
    "mlp, fused, cuda": CapturedStep(train(mlp, (64, 256), ADAMW, fused=True), {"device": "cuda"}),
    "mlp, 2 ranks": CapturedStep(train(mlp, (64, 256), SGD, ddp=True, lr=0.1), {"ranks": 2}),
    "mlp, 8 ranks, cuda": CapturedStep(
        train(mlp, (64, 256), ADAMW, ddp=True), {"ranks": 8, "rank": 3, "device": "cuda"}
    ),
    "convolutions": CapturedStep(
        train(convolutions, (4, 3, 30, 30), SGD, lr=0.1), {"family": "convolution"}
    ),
    "encoder, autocast": CapturedStep(
        train(Encoder, (8, 64, 128), ADAMW), {"family": "transformer"}
    ),
    "bags": CapturedStep(train(Bags, (1,), torch.optim.SparseAdam)),
}
