"""A fully sharded step (FSDP2) on two gloo ranks, predicted from its capture first and then measured.

python -m benchmarks.sharded --platform P.toml [--json OUT]
"""

import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks import OUT, PLATFORM, make_command, save_rows
from perfkit.ground.units import format_table
from perfkit.prediction.result import predict

_RANKS, _ROWS, _WIDTH, _BLOCKS, _STEPS = 2, 256, 512, 6, 30


def make_step() -> Callable[[], None]:
    """A step of blocks of two products each, every one sharded by itself."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    pair = (partial(nn.Linear, _WIDTH, 4 * _WIDTH), nn.GELU, partial(nn.Linear, 4 * _WIDTH, _WIDTH))
    net = nn.Sequential(*(nn.Sequential(*(make() for make in pair)) for _ in range(_BLOCKS)))
    mesh = init_device_mesh("cpu", (_RANKS,))
    for each in (*net, net):
        fully_shard(each, mesh=mesh).set_force_sum_reduction_for_comms(True)  # gloo takes no averages
    optimizer, x = torch.optim.SGD(net.parameters(), lr=1e-6), torch.randn(_ROWS, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


def measure_rank(rank: int, store: str) -> list[float]:
    """Times of the steps of one rank [s]."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=_RANKS)
    step, times = make_step(), []
    for _ in range(_STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return times[_STEPS // 3 :]


def run(given: Any) -> None:
    """Predict the step, measure it and print both."""
    from perfkit.recording.steps import capture

    found = predict(capture(make_step, ranks=_RANKS), given.platform)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(_RANKS, get_context("spawn")) as pool:
        runs = [pool.submit(measure_rank, rank, f"{folder}/store") for rank in range(_RANKS)]
        low, measured, high = np.quantile(np.max([each.result() for each in runs], axis=0), (0.25, 0.5, 0.75))
    row = {"predicted": found.time, "measured": measured, "quarter": low, "three quarters": high}
    print(format_table([tuple(row), tuple(f"{1e3 * value:.2f} ms" for value in row.values())], numbers=True))
    print(f"{found.time / measured - 1:+.0%}\n{found.explain()}")
    save_rows(given.json, [row])


_NEEDED = {"--platform": {**PLATFORM["--platform"], "required": True}}
main = make_command("sharded", "A fully sharded step on two ranks of this machine.", run, {**_NEEDED, **OUT})

if __name__ == "__main__":
    sys.exit(main())
