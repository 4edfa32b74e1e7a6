"""Collectives of a captured step: their sizes and ranks, and where each is waited for."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from perfkit.recording.sandbox import find_caller
from perfkit.workloads.vocabulary import walk_tensors

#: Calibrated collectives by the first letters of process-group operations.
_NAMES = {
    "allreduce": "all_reduce", "reducescatter": "reduce_scatter", "allgather": "all_gather", "alltoall": "all_to_all",
    "broadcast": "broadcast", "barrier": "all_reduce", "reduce": "all_reduce", "gather": "all_gather",
    "scatter": "broadcast", "send": "broadcast", "recv": "broadcast",
}  # fmt: skip


def name_collective(func: Any) -> str:
    """Calibrated collective of a PyTorch operation; empty if it is none."""
    plain = func._schema.name.split("::")[-1].replace("_", "")
    found = func.namespace.lstrip("_").startswith("c10d")
    return next((ours for theirs, ours in _NAMES.items() if found and plain.startswith(theirs)), "")


def answer(func: Any, args: Sequence[Any]) -> tuple[Any, Any]:
    """Return value of an operation of a process group: its tensors and a handle to wait for; and the handle."""
    result = args[0] if isinstance(args[0], Tensor | list) else None
    future: Any = Future()
    future.set_result(result)
    private: Any = torch._C._distributed_c10d
    work = private._create_work_from_future(future)
    return ((result, work.boxed()) if len(func._schema.returns) == 2 else work.boxed()), work


class Exchanges:
    """The collectives of a recorder.

    Parameters
    ----------
    recorder : Recorder
        Where they are appended to.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = weakref.proxy(recorder)  # else its storages live until someone looks for circles
        self._groups: list[tuple[int, ...]] = []
        self._launched: list[int] = []  # operations recorded when a collective was launched, itself included
        self._waits: dict[int, int] = {}  # by number of the collective: operations recorded when it is waited for
        self._open: dict[int, tuple[int, Any]] = {}  # number by handle
        self._buffers: dict[int, int] = {}  # number by the storage that it fills
        self._unseen: list[int] = []

    def record(self, name: str, func: Any, args: list[Any], out: Any, module: str, work: Any) -> None:
        """Append a collective with its bytes in the nccl-tests convention."""
        lists = [a for a in args if next(walk_tensors(a), None) is not None]
        writes = list(walk_tensors(lists[0] if func.namespace == "c10d" else out))
        reads = list(walk_tensors(lists[-1]))
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=True))
        ranks = _find_ranks(given)
        if ranks not in self._groups:
            self._groups.append(ranks)
        nbytes: float = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in (reads, writes))
        splits = [s for a in args if isinstance(a, list | tuple) for s in a if isinstance(s, int)]
        if name == "all_to_all" and splits:  # the fullest rank's whole buffer bounds an uneven exchange
            first = next(t for t in (*reads, *writes) if t.dim())
            row = first.numel() / max(first.shape[0], 1) if first.numel() else 1
            nbytes = len(ranks) * max(splits) * row * first.element_size()
        sizes = {"nbytes": float(nbytes), "group": self._groups.index(ranks)}
        self._recorder.emit((name, "collective", name), module, sizes, reads, writes)
        number = len(self._launched)
        self._launched.append(len(self._recorder.labels))
        if given.get("async_op") is False:  # its caller waits at once
            self._finish(number)
            return
        self._buffers.update({self._recorder.values.number(t): number for t in writes})
        if work is not None:
            self._open[id(work)] = number, work
            if not find_caller("distributed_c10d.py"):  # a module over ranks: the backward pass waits at its end
                self._unseen.append(number)

    def _finish(self, *numbers: int) -> None:
        for number in numbers:
            self._waits.setdefault(number, len(self._recorder.labels))

    def wait(self, work: Any) -> None:
        """Note that a handle is waited for."""
        if id(work) in self._open:
            self._finish(self._open.pop(id(work))[0])

    def touch(self, tensors: Sequence[Tensor]) -> None:
        """The end of a backward pass uses these tensors: it has waited for what fills them."""
        keys = [self._recorder.values.number(t) for t in tensors]
        self._finish(*(self._buffers.pop(key) for key in keys if key in self._buffers))

    def end_backward(self) -> None:
        """What was launched during the backward pass by no one who could wait has ended with it."""
        self._finish(*self._unseen)
        self._unseen.clear()

    def list_groups(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of each communicator; nothing where all ranks share the only one."""
        return () if self._groups in ([], [tuple(range(ranks))]) else tuple(self._groups)

    def list_waits(self) -> np.ndarray | None:
        """Waits of all collectives as `perfkit.workloads.graph.Graph` takes them."""
        end = len(self._recorder.labels)
        rows = sorted((self._waits.get(number, end), number) for number in range(len(self._launched)))
        at_once = [(position, number) for number, position in enumerate(self._launched)]
        return None if rows == at_once else np.array(rows, dtype=int)


def _find_ranks(given: dict[str, Any]) -> tuple[int, ...]:
    """Ranks of the communicator among the arguments of a collective."""
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    elif isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return tuple(dist.get_process_group_ranks(group))
