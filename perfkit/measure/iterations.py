"""Whole training iterations of real steps, and the operations inside them, timed in turns between references."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfkit.measure.samples import load
from perfkit.measure.timing import Reference, find_wait, summarize_samples
from perfkit.recording.modules import build_step
from perfkit.workloads.placement import Plan
from perfkit.workloads.vocabulary import VIEWS

#: Time between two references [s]: machines change their speed within a second.
_BLOCK = 0.025


class OperationTimer(TorchDispatchMode):
    """Times every operation that runs under it, views aside.

    Keeps names, bytes and seconds, never tensors: a kept tensor would change what the autograd engine does.

    Parameters
    ----------
    device : str, optional
        Torch device; on a GPU the timer waits before and after each operation.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.names: list[str] = []
        self.nbytes: list[float] = []
        self.seconds: list[float] = []
        self._synchronize = find_wait(device) if device == "cuda" else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name in VIEWS or (name == "clone" and args[0].layout is torch.sparse_coo):
            return func(*args, **(kwargs or {}))
        if self._synchronize:
            self._synchronize()
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":  # it returns at once; the caller would wait right after
            dist.distributed_c10d.Work.unbox(out[-1] if isinstance(out, tuple | list) else out).wait()
        if self._synchronize:
            self._synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.names.append(name)
        self.nbytes.append(_nbytes((args, kwargs)) + _nbytes(out))
        return out


def _nbytes(tree: Any) -> float:
    """Bytes of the tensors of a tree, each counted once."""
    tensors = [t._values() if t.layout is torch.sparse_coo else t for t in tree_leaves(tree) if isinstance(t, Tensor)]
    return float(sum({(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}.values()))


def _take_turns(
    steps: Sequence[Callable[[], Any]],
    turns: Iterable[tuple[int, int]],
    wait: Callable[[], None],
    *,
    warm: bool = True,
    after: Callable[[], Any] = lambda: None,
) -> list[dict[str, Any]]:
    """Time steps in turns of some iterations; an untimed one first fills the caches again."""
    found: list[dict[str, list[Any]]] = [{"turns": [], "idle": [], "shares": [], "returned": []} for _ in steps]
    for number, count in turns:
        step, own, seconds = steps[number], found[number], []
        if warm:
            step()
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            thread, start = time.thread_time(), time.perf_counter()
            own["returned"].append(step())
            wait()
            took = time.perf_counter() - start
            seconds.append(took)
            own["idle"].append(took - (time.thread_time() - thread))
        own["shares"].append((time.process_time() - cpu) / (time.perf_counter() - begin))
        own["turns"].append(seconds)
        after()
    return [
        {
            **summarize_samples([s for turn in own["turns"] for s in turn], float(np.mean(own["shares"]))),
            "rounds": [float(np.median(turn)) for turn in own["turns"]],
            "idle": float(np.median(own["idle"])),
            "returned": own["returned"],
        }
        for own in found
    ]


def _time_once(step: Callable[[], Any], wait: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    wait()
    return max(time.perf_counter() - start, 1e-5)


def _agree(counts: list[int], device: str) -> list[int]:
    """What rank 0 decided."""
    agreed = torch.tensor(counts, device=device)
    if _find_ranks()[1] > 1:
        dist.broadcast(agreed, 0)
    return list(agreed.tolist())


def _find_ranks() -> tuple[int, int]:
    """This rank, and their number."""
    joined = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)


def _build(workload: dict[str, Any], owners: Sequence[int] | None, device: str, seed: int) -> Callable[[], Any]:
    """This rank's step."""
    rank, ranks = _find_ranks()
    plan = None if owners is None else Plan.from_owners(owners, ranks=ranks)
    return build_step(load(workload), plan=plan, rank=rank, ranks=ranks, device=device, seed=seed)[0]


def time_iteration(
    *,
    workload: dict[str, Any],
    owners: Sequence[int] | None = None,
    seconds: float = 2.0,
    operations: int = 0,
    device: str = "cpu",
    seed: int = 0,
    minimum: int = 6,
) -> dict[str, Any]:
    """Time a workload's iterations in this process, and then the operations inside some of them.

    Parameters
    ----------
    workload : dict
        From `perfkit.measure.samples.dump`.
    owners : sequence of int, optional
        Rank of every table when several ranks run.
    seconds : float
        Time to spend on whole iterations [s].
    operations : int
        Iterations to run under the operation timer afterwards [-].
    device : str
        Torch device.
    seed : int
        Seed of weights and data [-].
    minimum : int
        Fewest iterations timed [-].

    Returns
    -------
    result : dict
        Timing of one iteration; ``blocks``: medians of iterations in a row [s], and ``references`` before, between and
        after them, see `perfkit.measure.timing.Reference` [s]; ``core_share`` that the references got [-]; ``names``,
        ``nbytes`` [B] and median ``operation_seconds`` [s] in program order, and ``operation_references`` around them;
        of several ranks on a CPU also ``idle``: the median time of an iteration that this thread did not compute,
        because it waited for a collective or a collective had its core [s].
    """
    wait, reference = find_wait(device), Reference(device)
    step = _build(workload, owners, device, seed)
    for _ in range(2):
        step()
    wait()
    once = _time_once(step, wait)
    wanted = [max(minimum, min(400, int(seconds / once))), max(1, min(50, round(_BLOCK / once)))]
    count, each = _agree(wanted, device)

    def look() -> list[float]:
        """The references once, or three times after a step so long that there is time for it; four digits are known."""
        times = np.median([reference() for _ in range(3 if each == 1 else 1)], axis=0)
        return [float(f"{t:.4g}") for t in times]

    paces, blocks = [look()], [(0, min(each, count - start)) for start in range(0, count, each)]
    (turns,) = _take_turns([step], blocks, wait, warm=each > 1, after=lambda: paces.append(look()))
    medians, idle, _ = (turns.pop(name) for name in ("rounds", "idle", "returned"))
    result: dict[str, Any] = {**turns, "references": paces, "operation_seconds": []}
    result["blocks"] = [float(f"{median:.5g}") for median in medians]
    if _find_ranks()[1] > 1 and device == "cpu":
        result["idle"] = idle
    rows, paces = [], [look()]
    for _ in range(operations):
        with OperationTimer(device) as timer:
            step()
        rows.append(timer.seconds)
        paces.append(look())
        result |= {"names": timer.names, "nbytes": timer.nbytes}
    if rows:
        result |= {"operation_references": paces, "operation_seconds": np.median(rows, axis=0).tolist()}
    return {**result, "core_share": reference.core_share}


def time_placements(
    *,
    workload: dict[str, Any],
    placements: Sequence[Sequence[int] | None],
    seconds: float,
    rounds: int = 6,
    device: str = "cpu",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Time whole iterations of every placement of a DLRM's tables as one rank of several, see `time_in_turns`.

    Every placement has a model of its own in memory.
    """
    steps = [_build(workload, owners, device, seed) for owners in placements]
    results = time_in_turns(steps, seconds=seconds, rounds=rounds, device=device, seed=seed)
    return [{**result, "operation_seconds": []} for result in results]


def time_in_turns(
    steps: Sequence[Callable[[], Any]], *, seconds: float, rounds: int = 6, device: str = "cpu", seed: int = 0
) -> list[dict[str, Any]]:
    """Time several steps in turns, so that other load on the machine affects all of them alike.

    Parameters
    ----------
    steps : sequence of callable
        The same on all ranks.
    seconds : float
        Time for each step, spread over all rounds [s].
    rounds : int
        Turns of every step, in a new order each time [-].
    device : str
        Torch device.
    seed : int
        Seed of the orders [-].

    Returns
    -------
    results : list of dict
        For each step its timing, ``rounds``: the median of every turn [s], ``idle``: the median time of an iteration in
        which this thread did not compute [s], and ``returned``: the return values of the step, if any.
    """
    wait, once = find_wait(device), []
    for step in steps:
        step()
        once.append(min(_time_once(step, wait) for _ in range(2)))
    counts = _agree([int(np.clip(round(seconds / rounds / one), 2, 200)) for one in once], device)
    shuffled = np.random.default_rng([6, seed])  # the same on all ranks, which have to run the same step
    order = [i for _ in range(rounds) for i in shuffled.permutation(len(steps)).tolist()]
    results = _take_turns(steps, [(i, counts[i]) for i in order], wait)
    for result in results:
        result["idle"] = max(0.0, result["idle"])
        if not any(result["returned"]):
            del result["returned"]
    return results
