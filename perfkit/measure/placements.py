"""Several placements of one model's tables, timed in turns: what the machine does meanwhile meets all of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from perfkit.measure.iteration import OperationTimer, build_step
from perfkit.measure.runner import Timing
from perfkit.workloads.placement import Plan
from perfkit.workloads.samples import load

__all__ = ["Pacer", "time_placements"]

_COLLECTIVES = ("all_reduce", "all_to_all_single")  # those of `perfkit.measure.twins` and of gradients


class Pacer:
    """Wraps a training step on a CPU: how long it takes, when this rank comes to its collectives, and how slow it is.

    Parameters
    ----------
    step : callable
        The step; its collectives are those of `torch.distributed`, or of `DistributedDataParallel` inside `module`.
    module : torch.nn.Module
        The model.
    factor : float
        How many times as long this rank is made to compute: before each collective, and at the end, it spins until its
        thread has used so many times the processor time it needed since the last one. Nothing is added per operation,
        and what a collective or another process takes from the core meanwhile is not held against it [-].
    wait : callable, optional
        Waits for the device.
    """

    def __init__(
        self, step: Callable[[], Any], module: nn.Module, factor: float = 1.0, wait: Callable[[], None] = lambda: None
    ) -> None:
        self.step, self.factor, self.wait = step, factor, wait
        self.arrivals: list[float] = []
        self._since = 0.0
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                part.register_comm_hook(None, allreduce_hook)  # its own way, but for a division, where it can be seen

    def __call__(self) -> tuple[float, float]:
        """Run the step; returns its time and that of it in which this thread did not compute [s]."""
        calls = {name: getattr(dist, name) for name in _COLLECTIVES}
        for name, call in calls.items():
            setattr(dist, name, self._meet(call))
        self.arrivals = []
        start, computed = time.perf_counter(), time.thread_time()
        self._since = computed
        try:
            self.step()
            self._hold()
        finally:
            for name, call in calls.items():
                setattr(dist, name, call)
        self.wait()
        took = time.perf_counter() - start
        return took, max(0.0, took - (time.thread_time() - computed))

    def _meet(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def meet(*args: Any, **kwargs: Any) -> Any:
            self._hold()
            self.arrivals.append(time.perf_counter())
            out = call(*args, **kwargs)
            self._since = time.thread_time()
            return out

        return meet

    def _hold(self) -> None:
        end = self._since + self.factor * (time.thread_time() - self._since)
        while time.thread_time() < end:
            pass


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
        How many times as long a rank is made to compute, by its number, for each placement; on a CPU [-].
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
        For each placement its `Timing`, ``rounds``: the median of every turn [s], ``idle``: the median time of an
        iteration that this thread did not compute [s], ``arrivals``: for every iteration when the rank came to each
        collective, on a clock that all processes of a machine share [s], and median ``operation_seconds`` in program
        order [s].

    Notes
    -----
    Every placement has a model of its own in memory. A turn starts with an iteration that is not timed: it brings back
    to the caches what the turn before has displaced.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, wait = load(workload), synchronize or (lambda: None)
    plans = [None if owners is None else Plan.from_owners(owners, ranks=ranks) for owners in placements]
    factors = [float(slowdown.get(str(rank), 1.0)) for slowdown in slowdowns or [{}] * len(plans)]
    built = [build_step(model, plan=plan, rank=rank, ranks=ranks, device=device, seed=seed) for plan in plans]
    steps = [Pacer(*one, factor, wait) for one, factor in zip(built, factors, strict=True)]
    counts = torch.tensor([_count(step, seconds / rounds) for step in steps], device=device)
    dist.broadcast(counts, 0)
    shuffled = np.random.default_rng([6, seed])  # the same on all ranks, which have to run the same placement
    turns: list[list[list[float]]] = [[] for _ in steps]
    idle: list[list[float]] = [[] for _ in steps]
    shares: list[list[float]] = [[] for _ in steps]
    arrivals: list[list[list[float]]] = [[] for _ in steps]
    for _ in range(rounds):
        for i in shuffled.permutation(len(steps)).tolist():
            steps[i]()
            begin, cpu = time.perf_counter(), time.process_time()
            turns[i].append([])
            for _ in range(int(counts[i])):
                took, waited = steps[i]()
                turns[i][-1].append(took)
                idle[i].append(waited)
                arrivals[i].append(steps[i].arrivals)
            shares[i].append((time.process_time() - cpu) / (time.perf_counter() - begin))
    inside = _time_operations([step for step, _ in built], operations, synchronize)
    return [
        {**vars(Timing.from_samples([s for turn in turns[i] for s in turn], float(np.mean(shares[i])))),
         "rounds": [float(np.median(turn)) for turn in turns[i]], "idle": float(np.median(idle[i])),
         "arrivals": arrivals[i],
         "operation_seconds": np.median(seconds, axis=0).tolist() if seconds else []}
        for i, seconds in enumerate(inside)
    ]  # fmt: skip


def _count(step: Pacer, seconds: float) -> int:
    """Iterations that fill a turn."""
    step()
    once = min(step()[0] for _ in range(2))
    return int(np.clip(round(seconds / max(once, 1e-5)), 2, 200))


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
