"""Whole training iterations of real steps, and the operations inside them, timed in turns between references."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from perfkit.measure.operations import count_operands
from perfkit.measure.samples import load
from perfkit.measure.timing import Reference, clock, summarize_samples
from perfkit.recording.modules import build_step
from perfkit.workloads.placement import Plan
from perfkit.workloads.vocabulary import VIEWS

#: Time between two references [s]: machines change their speed within a second.
_BLOCK = 0.025
#: Turns of each of several steps.
_ROUNDS = 6


class OperationTimer(TorchDispatchMode):
    """Times every operation that runs under it on a CPU, views aside; those of a GPU are in its traces.

    Keeps names, bytes and seconds, never tensors: a kept tensor would change what the autograd engine does.
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
        if func.namespace == "c10d":  # it returns at once; the caller would wait right after
            dist.distributed_c10d.Work.unbox(out[-1] if isinstance(out, tuple | list) else out).wait()
        self.seconds.append(time.perf_counter() - start)
        self.names.append(name)
        self.nbytes.append(count_operands((args, kwargs)) + count_operands(out))
        return out


def _round(times: Iterable[float]) -> list[float]:
    """Four digits are more than a time is known to."""
    return [float(f"{t:.4g}") for t in times]


def _agree(counts: Sequence[int], device: str) -> list[int]:
    """What rank 0 decided."""
    agreed = torch.tensor(counts, device=device)
    if _find_ranks()[1] > 1:
        dist.broadcast(agreed, 0)
    return list(agreed.tolist())


def _find_ranks() -> tuple[int, int]:
    """This rank, and their number."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _build(workload: dict[str, Any], owners: Sequence[int] | None, device: str, seed: int) -> Callable[[], Any]:
    """This rank's step."""
    rank, ranks = _find_ranks()
    plan = None if owners is None else Plan.from_owners(owners, ranks=ranks)
    return build_step(load(workload), plan=plan, rank=rank, ranks=ranks, device=device, seed=seed)[0]


def time_in_turns(
    steps: Sequence[Callable[[], Any]], *, seconds: float, device: str = "cpu", seed: int = 0, minimum: int = 6,
    after: Callable[[int], Any] = lambda count: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time several steps in turns, so that other load on the machine affects all of them alike.

    Parameters
    ----------
    steps : sequence of callable
        The same on all ranks.
    seconds : float
        Time for each step, spread over all turns [s].
    device : str
        Torch device.
    seed : int
        Seed of the orders: in each of six rounds another one [-].
    minimum : int
        Fewest iterations of a step that is timed alone, in turns of 25 ms [-].
    after : callable, optional
        Called after every turn, with its iterations.

    Returns
    -------
    results : list of dict
        For each step its timing, ``blocks``: the median of every turn [s], ``idle``: the median time of an iteration in
        which this thread did not compute [s].
    """
    once = [max(min([clock([step], device) for _ in range(4)][2:]), 1e-5) for step in steps]
    if len(steps) == 1:
        wanted = [max(minimum, min(400, int(seconds / once[0]))), max(1, min(50, round(_BLOCK / once[0])))]
        count, each = _agree(wanted, device)
        turns = [(0, min(each, count - start)) for start in range(0, count, each)]
    else:
        counts = _agree([int(np.clip(round(seconds / _ROUNDS / one), 2, 200)) for one in once], device)
        shuffled = np.random.default_rng([6, seed])  # the same on all ranks, which have to run the same step
        turns = [(i, counts[i]) for _ in range(_ROUNDS) for i in shuffled.permutation(len(steps)).tolist()]
    found: list[dict[str, list[Any]]] = [{"blocks": [], "idle": [], "shares": []} for _ in steps]
    for number, count in turns:
        step, own, block = steps[number], found[number], []
        if max(turns)[1] > 1:  # an untimed one first fills the caches again
            step()
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            thread = time.thread_time()
            block.append(clock([step], device))
            own["idle"].append(block[-1] - (time.thread_time() - thread))
        own["shares"].append((time.process_time() - cpu) / (time.perf_counter() - begin))
        own["blocks"].append(block)
        after(count)
    results = []
    for own in found:
        timing = summarize_samples([t for block in own["blocks"] for t in block], float(np.mean(own["shares"])))
        blocks, idle = [float(f"{np.median(block):.5g}") for block in own["blocks"]], float(np.median(own["idle"]))
        results.append({**timing, "blocks": blocks, "idle": max(0.0, idle)})
    return results


def time_iteration(
    *, workload: dict[str, Any], owners: Sequence[int] | None = None, device: str = "cpu", seed: int = 0, **how: Any
) -> dict[str, Any]:
    """Time a workload's iterations in this process, and then the operations inside some of them.

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
    result : dict
        As from `time_step`.
    """
    return time_step(_build(workload, owners, device, seed), device=device, **how)


def time_step(
    step: Callable[[], Any], *, seconds: float = 2.0, operations: int = 0, device: str = "cpu", minimum: int = 6
) -> dict[str, Any]:
    """Time a training step over and over in this process, and then the operations inside some of its iterations.

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
    minimum : int
        Fewest iterations timed [-].

    Returns
    -------
    result : dict
        Timing of one iteration; ``blocks``: medians of iterations in a row [s], and ``references`` before, between and
        after them, see `perfkit.measure.timing.Reference` [s]; ``core_share`` that the references got [-]; ``names``
        and median ``operation_seconds`` [s] in program order, and ``operation_references`` around them;
        of several ranks on a CPU also ``idle``: the median time of an iteration that this thread did not compute,
        because it waited for a collective or a collective had its core [s].
    """
    reference = Reference(device)

    def look(count: int) -> list[float]:
        """The references once, or three times after a step so long that there is time for it."""
        return _round(np.median([reference() for _ in range(3 if count == 1 else 1)], axis=0))

    paces = [look(1)]
    how: dict[str, Any] = {"seconds": seconds, "device": device, "minimum": minimum}
    (result,) = time_in_turns([step], after=lambda count: paces.append(look(count)), **how)
    if _find_ranks()[1] == 1 or device != "cpu":
        del result["idle"]
    rows, each = [], 1 if result["median"] > _BLOCK else 2
    inside = [look(each)]
    for _ in range(operations):
        with OperationTimer() as timer:
            step()
        rows.append(timer.seconds)
        inside.append(look(each))
        result["names"] = timer.names
    result |= {"references": paces, "operation_seconds": _round(np.median(rows, axis=0)) if rows else []}
    result |= {"operation_references": inside} if rows else {}
    return {**result, "core_share": reference.core_share}


def time_placements(
    *, workload: dict[str, Any], placements: Sequence[Sequence[int] | None], seconds: float, device: str = "cpu",
    seed: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time whole iterations of every placement of a DLRM's tables as one rank of several, see `time_in_turns`.

    Every placement has a model of its own in memory.
    """
    steps = [_build(workload, owners, device, seed) for owners in placements]
    return time_in_turns(steps, seconds=seconds, device=device, seed=seed)
