"""Several placements of one model's tables, timed in turns: what the machine does meanwhile meets all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from perfkit.measure.iteration import OperationTimer, build_step
from perfkit.measure.runner import Timing
from perfkit.workloads.placement import Plan
from perfkit.workloads.samples import load

__all__ = ["Slowness", "time_placements"]


class Slowness(TorchDispatchMode):
    """Makes every operation that runs under it take longer, collectives aside: a straggler.

    Parameters
    ----------
    factor : float
        How many times longer [-].
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        if func.namespace != "c10d":
            end = start + self.factor * (time.perf_counter() - start)
            while time.perf_counter() < end:
                pass
        return out


def time_placements(
    *,
    workload: dict[str, Any],
    placements: Sequence[Sequence[int] | None],
    seconds: float,
    slowdowns: Sequence[Mapping[str, float]] = (),
    rounds: int = 6,
    operations: int = 0,
    device: str = "cpu",
    seed: int = 0,
    synchronize: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Time whole iterations of every placement as one rank of several, and then the operations inside some.

    Parameters
    ----------
    workload : dict
        From `perfkit.workloads.samples.dump`.
    placements : sequence of sequence of int or None
        Rank of every table of a DLRM, for each placement.
    seconds : float
        Time for each placement, spread over all rounds [s].
    slowdowns : sequence of mapping of str to float, optional
        How many times longer the operations of a rank are made to take, by its number, for each placement [-].
    rounds : int
        Turns that every placement has, in another order each time [-].
    operations : int
        Iterations of every placement to run under the operation timer afterwards [-].
    device : str
        Torch device.
    seed : int
        Seed of weights, data and orders [-].
    synchronize : callable, optional
        Waits for the device.

    Returns
    -------
    results : list of dict
        For each placement its `Timing`, ``rounds``: the median of every turn [s], and median ``operation_seconds`` in
        program order [s].

    Notes
    -----
    Every placement has a model of its own in memory. A turn starts with an iteration that is not timed: it brings back
    to the caches what the turn before has displaced.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, wait = load(workload), synchronize or (lambda: None)
    plans = [None if owners is None else Plan.from_owners(owners, ranks=ranks) for owners in placements]
    steps = [build_step(model, plan=plan, rank=rank, ranks=ranks, device=device, seed=seed)[0] for plan in plans]
    for i, slowdown in enumerate(slowdowns):
        if (factor := slowdown.get(str(rank), 1.0)) > 1.0:
            steps[i] = _slow_down(steps[i], factor)
    counts = torch.tensor([_count(step, wait, seconds / rounds) for step in steps], device=device)
    dist.broadcast(counts, 0)
    shuffled = np.random.default_rng([6, seed])  # the same on all ranks, which have to run the same placement
    turns: list[list[list[float]]] = [[] for _ in steps]
    shares: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for i in shuffled.permutation(len(steps)).tolist():
            _time(steps[i], wait)
            begin, cpu = time.perf_counter(), time.process_time()
            turns[i].append([_time(steps[i], wait) for _ in range(int(counts[i]))])
            shares[i].append((time.process_time() - cpu) / (time.perf_counter() - begin))
    inside = _time_operations(steps, operations, synchronize)
    return [
        {**vars(Timing.from_samples([s for turn in own for s in turn], float(np.mean(share)))),
         "rounds": [float(np.median(turn)) for turn in own],
         "operation_seconds": np.median(seconds, axis=0).tolist() if seconds else []}
        for own, share, seconds in zip(turns, shares, inside, strict=True)
    ]  # fmt: skip


def _slow_down(step: Callable[[], Any], factor: float) -> Callable[[], Any]:
    def slowed() -> None:
        with Slowness(factor):
            step()

    return slowed


def _count(step: Callable[[], Any], wait: Callable[[], None], seconds: float) -> int:
    """Iterations that fill a turn."""
    _time(step, wait)
    once = min(_time(step, wait) for _ in range(2))
    return int(np.clip(round(seconds / max(once, 1e-5)), 2, 200))


def _time(step: Callable[[], Any], wait: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def _time_operations(
    steps: Sequence[Callable[[], Any]], count: int, synchronize: Callable[[], None] | None
) -> list[list[list[float]]]:
    """Seconds of every operation of some iterations of each placement, in turns as well."""
    found: list[list[list[float]]] = [[] for _ in steps]
    for _ in range(count):
        for own, step in zip(found, steps, strict=True):
            step()
            with OperationTimer(synchronize) as timer:
                step()
            own.append(timer.seconds)
    return found
