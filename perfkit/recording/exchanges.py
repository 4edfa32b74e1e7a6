"""Collectives of a captured step: their sizes and ranks, and where each is waited for."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from perfkit.recording.sandbox import find_caller
from perfkit.workloads.vocabulary import walk_tensors

_C10D: Any = getattr(torch._C, "_distributed_c10d", None)

#: Calibrated collectives by the first letters of process-group operations.
_NAMES = {
    "allreduce": "all_reduce", "reducescatter": "reduce_scatter", "allgather": "all_gather", "alltoall": "all_to_all",
    "broadcast": "broadcast", "barrier": "all_reduce", "reduce": "all_reduce", "gather": "all_gather",
    "scatter": "broadcast", "send": "broadcast", "recv": "broadcast", "isend": "broadcast", "irecv": "broadcast",
}  # fmt: skip


class Exchanges:
    """Takes the place of the process group while a step is captured.

    Parameters
    ----------
    position : callable
        Number of operations recorded so far [-].
    """

    def __init__(self, position: Callable[[], int]) -> None:
        self._position = position
        self._groups: list[tuple[int, ...]] = []
        self._waits: dict[int, int] = {}  # by number of the collective: operations recorded when it is waited for
        self._count = 0
        self._open: dict[int, tuple[int, Any]] = {}
        self._buffers: dict[int, int] = {}
        self._unseen: list[int] = []

    def answer(self, func: Any, args: Sequence[Any]) -> tuple[Any, Any]:
        """Return value of an operation of a process group: its tensors and a handle to wait for."""
        result = args[0] if isinstance(args[0], Tensor | list) else None
        future: Any = Future()
        future.set_result(result)
        work = _C10D._create_work_from_future(future)
        return ((result, work.boxed()) if len(func._schema.returns) == 2 else work.boxed()), work

    def find(self, func: Any) -> str:
        """Name of the collective of a PyTorch operation; empty if it is none."""
        plain = func._schema.name.split("::")[-1].replace("_", "")
        return next((ours for theirs, ours in _NAMES.items() if plain.startswith(theirs)), "")

    def describe(self, name: str, func: Any, args: list[Any], out: Any) -> tuple[list[Any], list[Any], float, int]:
        """Tensors read and written, bytes in the nccl-tests convention, and number of the communicator."""
        lists = [a for a in args if next(walk_tensors(a), None) is not None]
        functional = func.namespace != "c10d"
        writes = list(walk_tensors(out if functional else lists[0]))
        reads = list(walk_tensors(lists[-1] if functional or len(lists) > 1 else lists[0]))
        ranks = _find_ranks(func, args)
        if ranks not in self._groups:
            self._groups.append(ranks)
        largest: float = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in (reads, writes))
        splits = [s for a in args if isinstance(a, list | tuple) for s in a if isinstance(s, int)]
        if name == "all_to_all" and splits:  # the fullest rank's whole buffer bounds an uneven exchange
            first = next(t for t in (*reads, *writes) if t.dim())
            row = first.numel() / max(first.shape[0], 1) if first.numel() else 1
            largest = len(ranks) * max(splits) * row * first.element_size()
        return reads, writes, float(largest), self._groups.index(ranks)

    def launch(self, keys: Sequence[int], work: Any, *, blocking: bool) -> None:
        """Note a recorded collective, the buffers it fills, and whether its caller waits at once."""
        number, self._count = self._count, self._count + 1
        if blocking:
            self._finish(number)
            return
        self._buffers.update(dict.fromkeys(keys, number))
        if work is not None:
            self._open[id(work)] = number, work
            if not find_caller("distributed_c10d.py"):  # a module over ranks: the backward pass waits at its end
                self._unseen.append(number)

    def _finish(self, number: int) -> None:
        self._waits.setdefault(number, self._position())

    def wait(self, work: Any) -> None:
        """Note that a handle is waited for."""
        if id(work) in self._open:
            self._finish(self._open.pop(id(work))[0])

    def touch(self, keys: Sequence[int]) -> None:
        """The end of a backward pass uses these tensors: it has waited for what fills them."""
        for number in sorted({self._buffers.pop(key) for key in keys if key in self._buffers}):
            self._finish(number)

    def end_backward(self) -> None:
        """What was launched during the backward pass by no one who could wait has ended with it."""
        for number in self._unseen:
            self._finish(number)
        self._unseen.clear()

    def list_groups(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of each communicator; nothing where all ranks share the only one."""
        return () if self._groups in ([], [tuple(range(ranks))]) else tuple(self._groups)

    def list_waits(self, labels: Sequence[tuple[str, ...]]) -> np.ndarray | None:
        """Waits of all collectives as `perfkit.workloads.graph.Graph` takes them."""
        rows = sorted((self._waits.get(number, len(labels)), number) for number in range(self._count))
        launched = [position for position, label in enumerate(labels) if label[1] == "collective"]
        at_once = [(position + 1, number) for number, position in enumerate(launched)]
        return None if rows == at_once else np.array(rows, dtype=int)


def _find_ranks(func: Any, args: list[Any]) -> tuple[int, ...]:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    names = [a.name for a in func._schema.arguments]
    group = args[names.index("group_name")] if "group_name" in names else None
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return tuple(dist.get_process_group_ranks(resolve(group) if isinstance(group, str) else group))
