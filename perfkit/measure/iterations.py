"""Time whole training iterations and the operations inside them, with references between the
iterations."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from perfkit.measure.operations import count_operands
from perfkit.measure.records import MeasuredRank
from perfkit.measure.samples import load
from perfkit.measure.timing import LEAST, MOST, Reference, clock, round_times, summarize_samples
from perfkit.recording.modules import build_step
from perfkit.workloads.placement import Plan
from perfkit.workloads.vocabulary import VIEWS

#: Time between two references [s]: a machine can change its speed within a second.
_BLOCK = 0.025
#: Turns of each step where there are several.
_ROUNDS = 6


class OperationTimer(TorchDispatchMode):
    """Times every operation that runs under it on a CPU, except views. Times of GPU operations come
    from traces.

    It keeps names, bytes and seconds, never tensors: a kept tensor would change what the autograd
    engine does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.nbytes: list[float] = []
        self.seconds: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name in VIEWS or (name == "clone" and args[0].layout is torch.sparse_coo):
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":  # a collective returns at once, and its caller waits for it
            dist.distributed_c10d.Work.unbox(
                out[-1] if isinstance(out, tuple | list) else out
            ).wait()
        self.seconds.append(time.perf_counter() - start)
        self.names.append(name)
        self.nbytes.append(count_operands((args, kwargs)) + count_operands(out))
        return out


def find_ranks() -> tuple[int, int]:
    """Rank of this process, and the number of ranks.

    Returns
    -------
    rank, ranks : int
        0 and 1 without a process group [-].
    """
    return (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_available() and dist.is_initialized()
        else (0, 1)
    )


def _build(
    workload: dict[str, Any], owners: Sequence[int] | None, device: str, seed: int
) -> Callable[[], Any]:
    """Build the training step of this rank."""
    rank, ranks = find_ranks()
    plan = None if owners is None else Plan.from_owners(owners, ranks=ranks)
    return build_step(load(workload), plan=plan, rank=rank, ranks=ranks, device=device, seed=seed)[
        0
    ]


def _plan_turns(once: Sequence[float], seconds: float, seed: int) -> list[tuple[int, int]]:
    """Plan the turns of steps from the time of one iteration of each [s]: the step and its number
    of iterations."""
    if len(once) == 1:
        count, each = (
            max(LEAST, min(MOST, int(seconds / once[0]))),
            max(1, min(50, round(_BLOCK / once[0]))),
        )
        return [(0, min(each, count - start)) for start in range(0, count, each)]
    counts = [int(np.clip(round(seconds / _ROUNDS / one), 2, 200)) for one in once]
    shuffled = np.random.default_rng([6, seed])
    return [
        (i, counts[i]) for _ in range(_ROUNDS) for i in shuffled.permutation(len(once)).tolist()
    ]


@dataclass
class _Turns:
    """Times of all turns of one step.

    `blocks` has the times of the iterations of each turn [s]; `idle` the part of each iteration in
    which this thread did not compute [s]; `core_shares` the CPU time over wall time of each turn
    [-].
    """

    blocks: list[list[float]] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    core_shares: list[float] = field(default_factory=list)

    def summarize(self) -> MeasuredRank:
        """Join the times of all turns."""
        seconds = [time for block in self.blocks for time in block]
        timing = summarize_samples(seconds, float(np.mean(self.core_shares)))
        return MeasuredRank(
            **timing.summary,
            blocks=[float(f"{np.median(block):.5g}") for block in self.blocks],
            idle=max(0.0, float(np.median(self.idle))),
        )


def time_in_turns(
    steps: Sequence[Callable[[], Any]],
    *,
    seconds: float,
    device: str = "cpu",
    seed: int = 0,
    after: Callable[[int], Any] = lambda count: None,
) -> list[MeasuredRank]:
    """Time several steps in turns, so that other load on the machine affects all of them alike.

    Parameters
    ----------
    steps : sequence of callable
        The same on all ranks.
    seconds : float
        Time for each step, over all its turns [s].
    device : str
        Torch device.
    seed : int
        Seed of the order of several steps, which differs in each of six rounds; a single step runs
        in turns of 25 ms [-].
    after : callable, optional
        Called after every turn, with its number of iterations.

    Returns
    -------
    results : list of MeasuredRank
        For each step its timing, the blocks of its turns, and how long this thread was idle.
    """
    once = [max(min([clock([step], device) for _ in range(4)][2:]), 1e-5) for step in steps]
    agreed = torch.tensor(once, dtype=torch.float64, device=device)
    if find_ranks()[1] > 1:  # all ranks run the same turns: those that the times of rank 0 give
        dist.broadcast(agreed, 0)
    turns = _plan_turns(agreed.tolist(), seconds, seed)
    grouped = max(count for _, count in turns) > 1
    times = [_Turns() for _ in steps]
    for number, count in turns:
        step, own, block = steps[number], times[number], list[float]()
        if grouped:  # an untimed iteration fills the caches again
            step()
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            thread = time.thread_time()
            block.append(clock([step], device))
            own.idle.append(block[-1] - (time.thread_time() - thread))
        own.core_shares.append((time.process_time() - cpu) / (time.perf_counter() - begin))
        own.blocks.append(block)
        after(count)
    return [own.summarize() for own in times]


def time_iteration(
    *,
    workload: dict[str, Any],
    owners: Sequence[int] | None = None,
    device: str = "cpu",
    seed: int = 0,
    **how: Any,
) -> MeasuredRank:
    """Time iterations of a workload in this process, and then the operations inside some of them.

    Parameters
    ----------
    workload : dict
        From `perfkit.measure.samples.dump`.
    owners : sequence of int, optional
        Rank of every table when several ranks run.
    device : str
        Torch device.
    seed : int
        Seed of weights and data [-].
    **how : object
        Other arguments of `time_step`.

    Returns
    -------
    result : MeasuredRank
        As `time_step` returns.
    """
    return time_step(_build(workload, owners, device, seed), device=device, **how)


def time_step(
    step: Callable[[], Any], *, seconds: float = 2.0, operations: int = 0, device: str = "cpu"
) -> MeasuredRank:
    """Time a training step over and over in this process, and then the operations inside some of
    its iterations.

    Parameters
    ----------
    step : callable
        One iteration.
    seconds : float
        Time to spend on whole iterations [s].
    operations : int
        Iterations to run under the operation timer afterwards [-].
    device : str
        Torch device.

    Returns
    -------
    result : MeasuredRank
        Timing of one iteration with the references between its blocks; names and times of the
        operations if they were timed; and with several ranks on a CPU how long the thread was idle.
    """
    reference = Reference(device)

    def look(count: int) -> list[float]:
        """Times of the references: of one call, or the median of three after a long step, where
        they cost little."""
        return round_times(np.median([reference() for _ in range(3 if count == 1 else 1)], axis=0))

    paces = [look(1)]
    (result,) = time_in_turns(
        [step], seconds=seconds, device=device, after=lambda count: paces.append(look(count))
    )
    if find_ranks()[1] == 1 or device != "cpu":
        result = replace(result, idle=None)
    # a long step is followed by three calls of the references
    count = 1 if result.median > _BLOCK else 2
    timers, inside = list[OperationTimer](), [look(count)]
    for _ in range(operations):
        with OperationTimer() as timer:
            step()
        timers.append(timer)
        inside.append(look(count))
    result = replace(result, references=paces, operation_seconds=[])
    if timers:
        seconds_by_iteration = [timer.seconds for timer in timers]
        result = replace(
            result,
            names=timers[-1].names,
            operation_seconds=round_times(np.median(seconds_by_iteration, axis=0)),
            operation_references=inside,
        )
    return replace(result, core_share=reference.core_share)


def time_placements(
    *,
    workload: dict[str, Any],
    placements: Sequence[Sequence[int] | None],
    seconds: float,
    device: str = "cpu",
    seed: int = 0,
) -> list[MeasuredRank]:
    """Time iterations of a DLRM under several placements of its tables, as one rank of several; see
    `time_in_turns`.

    Each placement has its own model in memory.
    """
    steps = [_build(workload, owners, device, seed) for owners in placements]
    return time_in_turns(steps, seconds=seconds, device=device, seed=seed)
