"""Collectives of a captured step: their sizes and ranks, and where each is waited for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from perfkit.workloads.sandbox import replace
from perfkit.workloads.vocabulary import walk_tensors

__all__ = ["Exchanges"]

_C10D: Any = getattr(torch._C, "_distributed_c10d", None)

#: Operations of a process group, by how their names begin, as those that a platform is calibrated for.
_NAMES = (
    ("allreduce", "all_reduce"), ("all_reduce", "all_reduce"), ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"), ("all_gather", "all_gather"), ("alltoall", "all_to_all"), ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"), ("barrier", "all_reduce"), ("reduce", "all_reduce"), ("gather", "all_gather"),
    ("scatter", "broadcast"), ("send", "broadcast"), ("recv", "broadcast"), ("isend", "broadcast"),
    ("irecv", "broadcast"),
)  # fmt: skip


class Exchanges:
    """Stands in for the process group while a step is captured.

    Parameters
    ----------
    position : callable
        Number of operations recorded so far [-].
    """

    def __init__(self, position: Callable[[], int]) -> None:
        self.position = position
        self.groups: list[tuple[int, ...]] = []
        self.waits: list[tuple[int, int]] = []
        self.count = 0
        self._open: dict[int, tuple[int, Any]] = {}
        self._buffers: dict[int, int] = {}
        self._unseen: list[int] = []

    def find(self, func: Any) -> str:
        """The collective that an operation of PyTorch is; empty for what is none."""
        name = func._schema.name.split("::")[-1].lstrip("_")
        return next((ours for theirs, ours in _NAMES if name.startswith(theirs)), "")

    def stand_in(self, func: Any, args: Sequence[Any]) -> tuple[Any, Any]:
        """What an operation of a process group returns: its tensors and the handle that is waited for."""
        result = args[0] if isinstance(args[0], Tensor | list) else None
        future: Any = Future()
        future.set_result(result)
        work = _C10D._create_work_from_future(future)
        return ((result, work.boxed()) if len(func._schema.returns) == 2 else work.boxed()), work

    def describe(self, name: str, func: Any, args: list[Any], out: Any) -> tuple[list[Any], list[Any], float, int]:
        """Tensors read and written, bytes in the nccl-tests convention, and number of the communicator."""
        lists = [a for a in args if next(walk_tensors(a), None) is not None]
        functional = func.namespace != "c10d"
        written = list(walk_tensors(out if functional else lists[0]))
        read = list(walk_tensors(lists[-1] if functional or len(lists) > 1 else lists[0]))
        ranks = self._ranks(func, args)
        group = self.groups.index(ranks) if ranks in self.groups else len(self.groups)
        if group == len(self.groups):
            self.groups.append(ranks)
        largest = max(sum(_size(t) for t in tensors) for tensors in (read, written))
        splits = [s for a in args if isinstance(a, list | tuple) for s in a if isinstance(s, int)]
        if name == "all_to_all" and splits:
            first = next(t for t in (*read, *written) if t.dim())
            row = _size(first) / max(first.shape[0], 1) if first.numel() else first.element_size()
            largest = len(ranks) * max(splits) * row  # the fullest rank's whole buffer bounds an uneven exchange
        return read, written, float(largest), group

    def _ranks(self, func: Any, args: list[Any]) -> tuple[int, ...]:
        for value in args:
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
        names = [a.name for a in func._schema.arguments]
        group = args[names.index("group_name")] if "group_name" in names else None
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return tuple(dist.get_process_group_ranks(resolve(group) if isinstance(group, str) else group))

    def launch(self, keys: Sequence[int], work: Any, *, blocking: bool, called: bool) -> None:
        """Note a collective that has just been recorded: whether its caller waits at once, and may wait at all.

        What a module over ranks launches during the backward pass is not `called`: the pass waits for it at its end.
        """
        number, self.count = self.count, self.count + 1
        if blocking:
            self.waits.append((self.position(), number))
            return
        self._buffers.update(dict.fromkeys(keys, number))
        if work is not None:
            self._open[id(work)] = number, work
        if not called and work is not None:
            self._unseen.append(number)

    def finish(self, number: int) -> None:
        """Note that a collective is waited for here, unless it was before."""
        if any(number == ended for _, ended in self.waits):
            return
        self.waits.append((self.position(), number))

    def touch(self, keys: Sequence[int]) -> None:
        """The end of a backward pass uses these tensors: it has waited for what fills them."""
        for number in sorted({self._buffers.pop(key) for key in keys if key in self._buffers}):
            self.finish(number)

    def end_backward(self) -> None:
        """What was launched during the backward pass by no one who could wait has ended with it."""
        for number in self._unseen:
            self.finish(number)
        self._unseen.clear()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See where handles are waited for."""
        handle: Any = _C10D.Work
        wait = handle.wait

        def note(work: Any, *args: Any, **kwargs: Any) -> Any:
            if id(work) in self._open:
                number, _ = self._open.pop(id(work))
                self.finish(number)
            return wait(work, *args, **kwargs)

        with replace(handle, wait=note):
            yield

    def communicators(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of each communicator; nothing where all ranks share the only one."""
        return () if self.groups in ([], [tuple(range(ranks))]) else tuple(self.groups)

    def rows(self, labels: Sequence[tuple[str, ...]]) -> np.ndarray | None:
        """Waits of all collectives as `perfkit.workloads.graph.Graph` takes them."""
        known = {number for _, number in self.waits}
        open_end = ((len(labels), number) for number in range(self.count) if number not in known)
        rows = sorted([*self.waits, *open_end])
        launched = [position for position, label in enumerate(labels) if label[1] == "collective"]
        at_once = [(position + 1, number) for number, position in enumerate(launched)]
        return None if rows == at_once else np.array(rows, dtype=int)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
