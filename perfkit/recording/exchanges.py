"""Collectives of a captured step: their sizes, their ranks, and where the step waits for each."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from perfkit.models.offload import COPY_INPUTS
from perfkit.recording.refusals import find_caller
from perfkit.workloads.columns import OperationSizes, Waits
from perfkit.workloads.vocabulary import walk_tensors

#: The calibrated collective for an operation of a process group, by the first letters of its name.
_NAMES = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "all_reduce",
    "reduce": "all_reduce",
    "gather": "all_gather",
    "scatter": "broadcast",
    "send": "broadcast",
    "recv": "broadcast",
}
#: Assumption for a tensor that is sent.
PAIR = (
    "a send from one rank to another is priced as a broadcast between the two; the time that a rank waits for the work "
    "of the other is left out"
)
#: Assumptions for kernels that are replayed, by the compiler and by a call of the user.
COMPILED_GRAPHS = (
    "with CUDA graphs of torch.compile (triton.cudagraphs) all kernels count as launched at once, also those of the "
    "optimizer"
)
GRAPHED = "with torch.cuda.make_graphed_callables all kernels count as launched at once, also those of the optimizer"


def name_collective(func: Any) -> str:
    """The calibrated collective for a PyTorch operation; empty if it is no collective."""
    plain = func._schema.name.split("::")[-1].replace("_", "")
    found = func.namespace.lstrip("_").startswith("c10d")
    return next((ours for theirs, ours in _NAMES.items() if found and plain.startswith(theirs)), "")


def answer(func: Any, args: Sequence[Any]) -> tuple[Any, Any]:
    """What an operation of a process group returns (tensors and a handle to wait for), and the
    handle alone."""
    result = args[0] if isinstance(args[0], Tensor | list) else None
    future: Any = Future()
    future.set_result(result)
    private: Any = torch._C._distributed_c10d
    work = private._create_work_from_future(future)
    return ((result, work.boxed()) if len(func._schema.returns) == 2 else work.boxed()), work


def _count_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of all elements of tensors [B]."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Stream:
    """A stream of a device, or an event on one: where in program order its next operation may
    start.

    Every recorder has its own subclass, whose `exchanges` are those of the recorder.
    """

    exchanges: Any

    def __init__(self, *_: Any, **__: Any) -> None:
        self.restart()
        self.exchanges.streams.add(self)

    def restart(self) -> None:
        """Begin before all operations."""
        self._place = -0.5
        # collectives that must end before the next operation
        self.pending: frozenset[int] = frozenset()

    @property
    def place(self) -> float:
        """Position of the next operation in program order [-]; on a side stream it lies between two
        positions."""
        return self.exchanges.position if self is self.exchanges.compute else self._place

    def wait_stream(self, other: "Stream") -> None:
        """Wait until another stream, or an event, has finished all work that it has now."""
        self._place = max(self._place, np.ceil(other.place) - 0.5)
        self.follow(*other.pending)

    wait_event = wait_stream

    def follow(self, *numbers: int) -> None:
        """Wait until these collectives have ended; the compute stream records the wait."""
        if self is self.exchanges.compute:
            self.exchanges.finish(*numbers)
        else:
            self.pending |= {*numbers}

    def record_event(self, event: "Stream | None" = None) -> "Stream":
        """An event that holds the present position of this stream."""
        event = event or type(self)()
        event._place, event.pending = np.ceil(self.place) - 0.5, self.pending
        return event

    def record(self, stream: "Stream | None" = None) -> None:
        """Let this event hold the present position of a stream (of the current one by default)."""
        (stream or self.exchanges.current).record_event(self)

    def wait(self, stream: "Stream | None" = None) -> None:
        """Let a stream (the current one by default) wait for this event."""
        (stream or self.exchanges.current).wait_stream(self)

    def elapsed_time(self, _: "Stream") -> float:
        """Milliseconds between two events, which a step may log; they are not known."""
        self.exchanges.note_reading("elapsed_time")
        return 1.0

    def query(self) -> bool:
        """Whether all work is done, as after `synchronize`."""
        return True

    def synchronize(self) -> None:
        """The host waits until this stream has finished."""
        self.exchanges.compute.wait_stream(self)


class Exchanges:
    """The collectives of a recorder.

    Parameters
    ----------
    recorder : Recorder
        It receives the collectives as operations.
    """

    def __init__(self, recorder: Any) -> None:
        # a cycle of references would keep its storages alive
        self._recorder = weakref.proxy(recorder)
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()  # and events
        self._streams = type("Stream", (Stream,), {"exchanges": weakref.proxy(self)})
        self.compute = self.current = self._streams()
        self._forget_collectives()

    def note_reading(self, name: str) -> None:
        """Note that the program has read something of a GPU that is not there."""
        self._recorder.places.readings.add(name)

    def _forget_collectives(self) -> None:
        """Begin without a collective."""
        self._groups: list[tuple[int, ...]] = []
        self._copies: int | None = None  # place among the groups of copies from pinned memory
        # Collectives have numbers in the order of their launch, operations have positions in
        # program order.
        self._launched: list[int] = []  # position after each collective
        self._waits: dict[int, int] = {}  # position of the first wait, by number
        # number and handle, by the identity of the handle
        self._open: dict[int, tuple[int, Any]] = {}
        self._buffers: dict[int, int] = {}  # number, by the storage that the collective fills
        # numbers of those that only the end of the backward pass waits for
        self._unseen: list[int] = []
        self._earlier: list[int] = []  # positions of waits for collectives of the previous step

    def restart(self) -> None:
        """Begin another iteration; what it waits for of the one before is of the previous step."""
        self._forget_collectives()
        for stream in self.streams:
            stream.restart()

    @property
    def position(self) -> int:
        """Number of operations recorded so far [-]."""
        return len(self._recorder.labels)

    def list_streams(self) -> dict[str, Any]:
        """Replacements for the streams, events and graphs of a device, by their names in
        `torch.cuda`."""

        def get_current(device: Any = None) -> Stream:
            return self.current

        def get_default(device: Any = None) -> Stream:
            return self.compute

        def synchronize(device: Any = None) -> None:
            return None

        return {
            "Stream": self._streams,
            "Event": self._streams,
            "stream": self._switch,
            "set_stream": self._choose,
            "synchronize": synchronize,
            "current_stream": get_current,
            "default_stream": get_default,
            "CUDAGraph": type("CUDAGraph", (), {"__init__": _refuse_graph}),
            "graph_pool_handle": _refuse_graph,
            "make_graphed_callables": self._keep,
        }

    def _keep(self, callables: Any, *_: Any, **__: Any) -> Any:
        """Return modules or functions unchanged: they run eagerly."""
        self._recorder.values.notes[GRAPHED] = None
        return callables

    def _choose(self, stream: Stream) -> None:
        """Make a stream the current one from now on."""
        self.current = stream

    @contextmanager
    def _switch(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def record(
        self, name: str, func: Any, args: list[Any], out: Any, module: str, work: Any
    ) -> None:
        """Append a collective, with its bytes by the convention of nccl-tests [B]."""
        lists = [a for a in args if next(walk_tensors(a), None) is not None]
        writes = list(walk_tensors(lists[0] if func.namespace == "c10d" else out))
        reads = list(walk_tensors(lists[-1]))
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=True))
        ranks = find_ranks(given)
        peer = given.get("dst", given.get("src"))
        if peer is not None:
            ranks = tuple(sorted({ranks[peer], dist.get_rank()}))
            self._recorder.values.notes[PAIR] = None
        group = self._find_group(ranks)
        nbytes: float = max(_count_bytes(reads), _count_bytes(writes))
        splits = []
        for argument in args:
            if isinstance(argument, list | tuple):
                splits += [number for number in argument if isinstance(number, int)]
        # the rank that sends most sets the time of an uneven exchange
        if name == "all_to_all" and splits:
            first = next(t for t in (*reads, *writes) if t.dim())
            row = first.numel() / max(first.shape[0], 1) if first.numel() else 1
            nbytes = len(ranks) * max(splits) * row * first.element_size()
        sizes = OperationSizes(nbytes=float(nbytes), group=group)
        self._recorder.emit(name, "collective", name, module, sizes, reads, writes)
        number = len(self._launched)
        self._launched.append(len(self._recorder.labels))
        if given.get("async_op") is False:  # its caller waits immediately
            self.current.follow(number)
            return
        self._buffers.update({self._recorder.values.number(t): number for t in writes})
        if work is not None:
            self._open[id(work)] = number, work
            # DistributedDataParallel: the end of the backward pass waits
            if not find_caller("distributed_c10d.py"):
                self._unseen.append(number)

    def _find_group(self, ranks: tuple[int, ...]) -> int:
        """Number of the communicator of these ranks."""
        for number, known in enumerate(self._groups):
            if known == ranks and number != self._copies:
                return number
        self._groups.append(ranks)
        return len(self._groups) - 1

    def copy_inputs(self, tensor: Tensor, module: str) -> None:
        """Append a copy from pinned memory of the host to a tensor of the GPU, in the current stream.

        All ranks do so at the same time; the copies have a communicator of their own, as nothing
        else waits for their engine.
        """
        if self._copies is None:
            self._copies = len(self._groups)
            everyone = dist.get_world_size() if dist.is_initialized() else 1
            self._groups.append(tuple(range(everyone)))
        sizes = OperationSizes(nbytes=float(_count_bytes([tensor])), group=self._copies)
        self._recorder.emit(COPY_INPUTS, "collective", COPY_INPUTS, module, sizes, [], [tensor])
        number = len(self._launched)
        self._launched.append(len(self._recorder.labels))
        self.current.follow(number)

    def finish(self, *numbers: int) -> None:
        """Record that the compute stream waits here for collectives; only the first wait for each
        counts."""
        for number in numbers:
            self._waits.setdefault(number, self.position)

    def wait(self, work: Any) -> None:
        """Record that the step waits for a handle."""
        if id(work) in self._open:
            self.current.follow(self._open.pop(id(work))[0])
        elif self._recorder.on:
            self._earlier.append(self.position)

    def touch(self, tensors: Sequence[Tensor]) -> None:
        """These tensors are used now, so the collectives that fill them have ended."""
        keys = [self._recorder.values.number(t) for t in tensors]
        self.current.follow(*(self._buffers.pop(key) for key in keys if key in self._buffers))

    def end_backward(self) -> None:
        """The end of the backward pass waits for the collectives of DistributedDataParallel."""
        self.finish(*self._unseen)
        self._unseen.clear()

    def list_groups(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Ranks of each communicator; empty if there is only one, of all ranks."""
        return () if self._groups in ([], [tuple(range(ranks))]) else tuple(self._groups)

    def list_waits(self, keys: np.ndarray, order: np.ndarray) -> Waits | None:
        """Waits of all collectives as a column of `perfkit.workloads.graph.Graph`; None if each is
        waited for at once.

        `keys` are the positions of operations, `order` sorts them.
        """
        launched = np.argsort(order)[np.array(self._launched, dtype=int) - 1]
        ends = [self._waits.get(number, len(keys)) for number in range(len(launched))]
        numbers = np.argsort(np.argsort(launched))
        previous = np.zeros(len(launched), dtype=bool)
        left = sorted(number for number, _ in self._open.values() if number not in self._waits)
        # the next step waits for what this step leaves open, in the same order
        if len(left) == len(self._earlier):
            for number, place in zip(left, self._earlier, strict=True):
                ends[number], previous[number] = place, True
        operations = np.searchsorted(keys[order], ends)
        # collectives of the iteration before come first
        by_operation = np.lexsort([numbers, ~previous, operations])
        waits = Waits(
            operation=operations[by_operation],
            collective=numbers[by_operation],
            of_previous_iteration=previous[by_operation],
        )
        follow_at_once = (
            np.array_equal(waits.operation, np.sort(launched) + 1)
            and np.array_equal(waits.collective, np.arange(len(launched)))
            and not previous.any()
        )
        return None if follow_at_once else waits


def _refuse_graph(*_: Any, **__: Any) -> NoReturn:
    """Refuse graphs whose kernels are replayed: no call of PyTorch shows them."""
    advice = "give the step without it, or with torch.cuda.make_graphed_callables, which runs the same kernels"
    raise ValueError(f"torch.cuda.CUDAGraph replays kernels that capture does not see; {advice}")


def find_ranks(given: dict[str, Any]) -> tuple[int, ...]:
    """Ranks of the communicator that a collective is given."""
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    elif isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return tuple(dist.get_process_group_ranks(group))
