"""Time whole training iterations and the operations inside them, with references between the
iterations."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
        named = kwargs or {}
        name = func._schema.name.split("::")[-1]
        copies_sparse = name == "clone" and args[0].layout is torch.sparse_coo
        if name in VIEWS or copies_sparse:
            return func(*args, **named)
        start = time.perf_counter()
        result = func(*args, **named)
        if func.namespace == "c10d":
            # a collective returns at once, and its caller waits for it
            work = result[-1] if isinstance(result, tuple | list) else result
            dist.distributed_c10d.Work.unbox(work).wait()
        self.seconds.append(time.perf_counter() - start)
        self.names.append(name)
        self.nbytes.append(count_operands((args, named)) + count_operands(result))
        return result


def find_ranks() -> tuple[int, int]:
    """Rank of this process, and the number of ranks.

    Returns
    -------
    rank, ranks : int
        0 and 1 without a process group [-].
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _build(
    workload: dict[str, Any], owners: Sequence[int] | None, device: str, seed: int
) -> Callable[[], Any]:
    """Build the training step of this rank."""
    rank, ranks = find_ranks()
    plan = None if owners is None else Plan.from_owners(owners, ranks=ranks)
    built = build_step(load(workload), plan=plan, rank=rank, ranks=ranks, device=device, seed=seed)
    step, _ = built
    return step


class _Turn(NamedTuple):
    """A turn: the position of its step, and its iterations."""

    step: int
    iterations: int


def _plan_turns(once: Sequence[float], seconds: float, seed: int) -> list[_Turn]:
    """Plan the turns of steps from the time of one iteration of each [s]."""
    if len(once) == 1:
        return _split_into_blocks(once[0], seconds)
    iterations = [int(np.clip(round(seconds / _ROUNDS / time), 2, 200)) for time in once]
    rng = np.random.default_rng([6, seed])
    turns = []
    for _ in range(_ROUNDS):
        for step in rng.permutation(len(once)).tolist():
            turns.append(_Turn(step, iterations[step]))
    return turns


def _split_into_blocks(once: float, seconds: float) -> list[_Turn]:
    """The turns of a single step: blocks of about 25 ms, the last one with what is left."""
    iterations = max(LEAST, min(MOST, int(seconds / once)))
    of_block = max(1, min(50, round(_BLOCK / once)))
    starts = range(0, iterations, of_block)
    return [_Turn(0, min(of_block, iterations - start)) for start in starts]


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
    agreed = torch.tensor(
        [_time_once(step, device) for step in steps], dtype=torch.float64, device=device
    )
    if find_ranks()[1] > 1:  # all ranks run the same turns: those that the times of rank 0 give
        dist.broadcast(agreed, 0)
    turns = _plan_turns(agreed.tolist(), seconds, seed)
    grouped = max(turn.iterations for turn in turns) > 1
    times = [_Turns() for _ in steps]
    for turn in turns:
        step, times_of_step = steps[turn.step], times[turn.step]
        if grouped:  # an untimed iteration fills the caches again
            step()
        block: list[float] = []
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for _ in range(turn.iterations):
            thread_begin = time.thread_time()
            block.append(clock([step], device))
            computed = time.thread_time() - thread_begin
            times_of_step.idle.append(block[-1] - computed)
        cpu_seconds = time.process_time() - cpu_begin
        times_of_step.core_shares.append(cpu_seconds / (time.perf_counter() - begin))
        times_of_step.blocks.append(block)
        after(turn.iterations)
    return [times_of_step.summarize() for times_of_step in times]


def _time_once(step: Callable[[], Any], device: str) -> float:
    """Time of one iteration after two that warm up [s]."""
    clock([step, step], device)
    once = min(clock([step], device), clock([step], device))
    return max(once, 1e-5)


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

    def time_references(iterations: int) -> list[float]:
        """Times of the references: of one call, or the median of three after a long step, which is
        alone in its turn; they cost little there."""
        calls = 3 if iterations == 1 else 1
        return round_times(np.median([reference() for _ in range(calls)], axis=0))

    references = [time_references(1)]

    def add_references(iterations: int) -> None:
        references.append(time_references(iterations))

    (result,) = time_in_turns([step], seconds=seconds, device=device, after=add_references)
    if find_ranks()[1] == 1 or device != "cpu":
        result = replace(result, idle=None)
    # a long step is followed by three calls of the references
    iterations = 1 if result.median > _BLOCK else 2
    timers: list[OperationTimer] = []
    operation_references = [time_references(iterations)]
    for _ in range(operations):
        with OperationTimer() as timer:
            step()
        timers.append(timer)
        operation_references.append(time_references(iterations))
    result = replace(result, references=references, operation_seconds=[])
    if timers:
        seconds_by_iteration = [timer.seconds for timer in timers]
        result = replace(
            result,
            names=timers[-1].names,
            operation_seconds=round_times(np.median(seconds_by_iteration, axis=0)),
            operation_references=operation_references,
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
