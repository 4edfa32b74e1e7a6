"""Fully sharded steps (FSDP2) on two gloo ranks, predicted from their captures first and then
measured.

python -m benchmarks.sharded --platform P.toml [--json OUT]
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.helpers.command import OUT, PLATFORM, command
from benchmarks.helpers.files import save_rows
from perfkit.ground.units import format_table
from perfkit.measure.processes import run_processes
from perfkit.measure.records import write_record
from perfkit.prediction.predictor import predict

_RANKS = 2
#: Rows of the input, width and number of blocks; the first is the one that was looked at.
_SIZES = ((256, 512, 6), (64, 256, 12), (512, 768, 3), (1024, 256, 4), (128, 1024, 2), (32, 384, 8))


def make_step(rows: int, width: int, blocks: int) -> Callable[[], None]:
    """A step of blocks of two products each, every one sharded by itself."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def make_block() -> nn.Module:
        widen = nn.Linear(width, 4 * width)
        return nn.Sequential(widen, nn.GELU(), nn.Linear(4 * width, width))

    net = nn.Sequential(*(make_block() for _ in range(blocks)))
    mesh = init_device_mesh("cpu", (_RANKS,))
    for module in (*net, net):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo takes no averages
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    x = torch.randn(rows, width)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


def time_sharded(*, sizes: list[int]) -> dict[str, Any]:
    """Time the step as one rank, as all iterations of perfkit are timed."""
    from perfkit.measure.iterations import time_step

    return write_record(time_step(make_step(*sizes), seconds=4.0))


def compare(sizes: tuple[int, int, int], platform: str) -> dict[str, Any]:
    """Predict a step from its capture, then measure it; the slowest rank sets the pace [s]."""
    from perfkit.recording.steps import capture

    prediction = predict(capture(partial(make_step, *sizes), ranks=_RANKS), platform)
    task = {"task": "benchmarks.sharded:time_sharded", "sizes": sizes}
    results = run_processes(task, ranks=_RANKS)
    measured = max(result["median"] for result in results)
    return {
        "rows, width, blocks": sizes,
        "predicted [s]": prediction.time,
        "measured [s]": measured,
        "error": prediction.time / measured - 1,
        "quarters [s]": (
            max(result["q1"] for result in results),
            max(result["q3"] for result in results),
        ),
        "core share": min(result["core_share"] for result in results),
    }


def _format_cell(value: Any) -> str:
    """Numbers of a cell, separated by commas."""
    return ", ".join(f"{number:.3g}" for number in np.atleast_1d(value))


@command({"--platform": {**PLATFORM["--platform"], "required": True}, **OUT})
def main(given: Any) -> None:
    """Fully sharded steps on two ranks of this machine."""
    rows = [compare(sizes, given.platform) for sizes in _SIZES]
    lines = [tuple(rows[0])]
    for row in rows:
        lines.append(tuple(_format_cell(value) for value in row.values()))
    print(format_table(lines, numbers=True))
    save_rows(given.json, rows)
