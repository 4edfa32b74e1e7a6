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

    pair = (partial(nn.Linear, width, 4 * width), nn.GELU, partial(nn.Linear, 4 * width, width))
    net = nn.Sequential(*(nn.Sequential(*(make() for make in pair)) for _ in range(blocks)))
    mesh = init_device_mesh("cpu", (_RANKS,))
    for each in (*net, net):
        # gloo takes no averages
        fully_shard(each, mesh=mesh).set_force_sum_reduction_for_comms(True)
    optimizer, x = torch.optim.SGD(net.parameters(), lr=1e-6), torch.randn(rows, width)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


def time_sharded(*, sizes: list[int]) -> dict[str, Any]:
    """Time the step as one rank, as all iterations of perfkit are timed."""
    from perfkit.measure.iterations import time_step

    return write_record(time_step(make_step(*sizes), seconds=4.0))


@command({"--platform": {**PLATFORM["--platform"], "required": True}, **OUT})
def main(given: Any) -> None:
    """Fully sharded steps on two ranks of this machine."""
    from perfkit.recording.steps import capture

    rows = []
    for sizes in _SIZES:
        found = predict(capture(partial(make_step, *sizes), ranks=_RANKS), given.platform)
        results = run_processes(
            {"task": "benchmarks.sharded:time_sharded", "sizes": sizes}, ranks=_RANKS
        )
        low, middle, high = (
            max(result[key] for result in results) for key in ("q1", "median", "q3")
        )
        row = {
            "predicted [s]": found.time,
            "measured [s]": middle,
            "error": found.time / middle - 1,
        }
        row |= {
            "quarters [s]": (low, high),
            "core share": min(result["core_share"] for result in results),
        }
        rows.append({"rows, width, blocks": sizes} | row)
    shown = [
        tuple(", ".join(f"{v:.3g}" for v in np.atleast_1d(each)) for each in row.values())
        for row in rows
    ]
    print(format_table([tuple(rows[0]), *shown], numbers=True))
    save_rows(given.json, rows)
