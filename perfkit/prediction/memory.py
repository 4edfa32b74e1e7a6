"""What one iteration holds in the memory of a rank at its fullest moment, and whether the device
has as much."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.results import Shown
from perfkit.ground.units import Array, format_bytes
from perfkit.models.embedding import state_bytes
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.host_memory import find_host_share
from perfkit.platform.platform import Platform
from perfkit.workloads.graph import PHASES, Graph, KernelKey
from perfkit.workloads.table_kernels import TABLE_KERNELS
from perfkit.workloads.tables import EmbeddingTable

#: Workspaces of cuBLAS, one for the forward and one for the backward pass [B]; docs/formulas.md,
#: table 9.2.
WORKSPACE = 2 * 32 * 2.0**20
#: Context of CUDA with the kernels of PyTorch, and buffers of NCCL for each communicator [B], and
#: what the caching allocator of PyTorch reserves beyond the most that is allocated [-];
#: docs/formulas.md, table 9.2.
CUDA_CONTEXT = 0.5 * 2.0**30
COMMUNICATOR = 0.65 * 2.0**30
FRAGMENTS = 0.04
#: What the middle half of public logs has in place of that share [-]; docs/formulas.md, table 9.2.
FRAGMENTS_LOW, FRAGMENTS_HIGH = 0.03, 0.13
#: Bytes of a device for each byte that its datasheet quotes: it has GiB where GB are quoted [-].
GIB_OF_GB = 2.0**30 / 1e9
#: Uses of memory: weights without embedding tables; gradients; states of the optimizer; inputs and
#: what is computed from them; tables; what collectives send and receive; workspaces of libraries
#: and optimizers.
PARTS = ("parameters", "gradients", "states", "activations", "tables", "communication", "workspace")
#: Operations of the kind ``copy`` that copy sharded weights before and after their collectives.
_PACKING = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
_AT = {name: number for number, name in enumerate(PARTS)}


@dataclass(frozen=True)
class Room:
    """What a rank may use of the memory of its device.

    Parameters
    ----------
    allocated : float
        Most that may be allocated [B].
    reserved : float
        Most that it may take with the reserve of its process [B].
    """

    allocated: float = np.inf
    reserved: float = np.inf

    @classmethod
    def of_device(cls, capacity: float | None) -> "Room":
        """The room of a device with this memory, as its datasheet quotes it; without end if it is not
        known [B].

        The quoted memory has to hold what is allocated, and the GiB that a GPU has where GB are quoted
        the reserve, too.
        """
        if capacity is None:
            return cls()
        return cls(allocated=capacity, reserved=GIB_OF_GB * capacity)

    @classmethod
    def stated(cls, memory: float) -> "Room":
        """The room of a rank that may take so much, all in all [B]."""
        return cls(allocated=memory, reserved=memory)

    def holds(self, allocated: Any, reserve: Any) -> Any:
        """Whether it holds what ranks allocate, with what their processes take beside it [B].

        Parameters
        ----------
        allocated, reserve : float or array
            See `Memory` [B].

        Returns
        -------
        holds : bool or array of bool
            Of each [-].
        """
        fits = np.less_equal(allocated, self.allocated)
        return fits & np.less_equal(np.add(allocated, reserve), self.reserved)

    def describe_reserved(self) -> str:
        """Say what a rank may take with its reserve.

        Examples
        --------
        >>> Room.of_device(80e9).describe_reserved()
        '85.9 GB, the GiB of a device of 80 GB'
        >>> Room.stated(40e9).describe_reserved()
        '40 GB'
        """
        most = format_bytes(self.reserved)
        if self.reserved == self.allocated:
            return most
        return f"{most}, the GiB of a device of {format_bytes(self.allocated)}"

    def double(self) -> "Room":
        """Twice as much of both."""
        return Room(allocated=2 * self.allocated, reserved=2 * self.reserved)


@dataclass(frozen=True)
class Memory(Shown):
    """Memory of a rank at the fullest moment of an iteration.

    Parameters
    ----------
    parts : mapping of str to float
        Bytes by use, see `PARTS` [B].
    capacity : float or None
        Memory of the device as its datasheet quotes it; None if it is not known [B].
    reserve : float
        What a process on a GPU takes beside these parts: the context of CUDA, buffers of NCCL, and
        fragments of the caching allocator; 0 on a CPU [B].
    on_host : float
        What a strategy that offloads, and tables in host memory, take of the memory of the host [B].
    host_capacity : float or None
        What a rank may take of it; None if nothing lies there [B].
    """

    parts: Mapping[str, float]
    capacity: float | None
    reserve: float = 0.0
    on_host: float = 0.0
    host_capacity: float | None = None

    @property
    def total(self) -> float:
        """Sum of all parts, as `torch.cuda.max_memory_allocated` counts it [B]."""
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        """All of it with the reserve, as nvidia-smi shows it [B]."""
        return self.total + self.reserve

    @property
    def reserved_range(self) -> tuple[float, float]:
        """All of it if the allocator wastes as little or as much as in the middle half of public
        logs; both are `reserved` where there is no reserve [B]."""
        if not self.reserve:
            return self.reserved, self.reserved
        low = self.reserved - (FRAGMENTS - FRAGMENTS_LOW) * self.total
        high = self.reserved + (FRAGMENTS_HIGH - FRAGMENTS) * self.total
        return low, high

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough memory, and the host for what is offloaded; None if the
        memory of the device is not known.

        The rule is that of `Room`, as in `perfkit.explore`: the quoted memory has to hold what is
        allocated, and the GiB that a GPU has where GB are quoted hold the reserve, too.
        """
        if self.host_capacity is not None and self.on_host > self.host_capacity:
            return False
        if self.capacity is None:
            return None
        return bool(Room.of_device(self.capacity).holds(self.total, self.reserve))

    @property
    def lacks_reserve(self) -> bool:
        """Whether only what a process takes beside its tensors does not fit."""
        has_room = self.host_capacity is None or self.on_host <= self.host_capacity
        return self.fits is False and has_room and self.total <= (self.capacity or 0.0)

    def describe_need(self) -> str:
        """Say what is needed, and of how much.

        Examples
        --------
        >>> Memory({"all": 79e9}, 80e9, 8e9).describe_need()
        'needs 79 GB of 80 GB'
        """
        known = f" of {format_bytes(self.capacity)}" if self.capacity is not None else ""
        if self.host_capacity is not None:
            of_host = f"{format_bytes(self.on_host)} of {format_bytes(self.host_capacity)}"
            known += f", and {of_host} on the host"
        return f"needs {format_bytes(self.total)}{known}"

    def __repr__(self) -> str:
        need = self.describe_need()
        if self.lacks_reserve:
            return f"{need}, and {format_bytes(self.reserved)} with its reserve: does not fit"
        return f"{need}: does not fit" if self.fits is False else need


def _sort_buffers(graph: Graph, count: int) -> np.ndarray:
    """Use of each buffer as its number in `PARTS`, from the operations that touch it."""

    def mark(chosen: np.ndarray) -> np.ndarray:
        """Whether each buffer is among those chosen."""
        return np.bincount(chosen, minlength=count) > 0

    operations, buffers = graph.accesses.operation, graph.accesses.buffer
    first, places = np.unique(buffers, return_index=True)
    phase_of_class = np.array([own.phase for own in graph.classes.distinct], dtype=str)
    phases = phase_of_class[graph.classes.of_operation][operations]
    forward, backward, update = (mark(buffers[phases == name]) for name in PHASES)
    # in every iteration; a buffer that is read first is kept
    made = mark(first[graph.accesses.is_write[places]])
    trained, own = mark(graph.weights.buffer), update & ~forward & ~backward
    part = np.full(count, _AT["activations"])
    part[own] = _AT["workspace"]
    copies = graph.find_kind("copy").tolist()
    packing = [position for position in copies if graph.labels[position].name in _PACKING]
    moves = np.zeros(len(graph), dtype=bool)
    moves[graph.collectives] = True
    moves[packing] = True
    part[mark(buffers[moves[operations]]) | (trained & made)] = _AT["communication"]
    part[update & backward & ~trained] = _AT["gradients"]
    part[own & ~made] = _AT["states"]
    part[(trained | (update & forward)) & ~made] = _AT["parameters"]
    part[graph.weights.table_buffers] = _AT["tables"]
    return part


class BufferLives(NamedTuple):
    """Lives of buffers, from the operation that makes them to the last that touches them: one
    element of each array per life.

    The clock counts operations: number n begins at 2n and ends at 2n + 1.

    Parameters
    ----------
    begins : array
        Clock at the begin; minus infinity if the buffer is there before the iteration [-].
    ends : array
        Clock at the end; infinity if it lasts beyond the iteration [-].
    buffers : array of int
        Number of the buffer [-].
    nbytes : array
        Its size [B].
    """

    begins: Array
    ends: Array
    buffers: np.ndarray
    nbytes: Array

    def select(self, lives: np.ndarray) -> "BufferLives":
        """Take some lives: an array says of each whether to take it."""
        return BufferLives(*(column[lives] for column in self))


def _find_freed(graph: Graph, count: int) -> np.ndarray:
    """Which of so many buffers are last touched by an update ahead of the end of the backward pass, as
    gradients of weights that hooks update."""
    if not graph.updates_in_backward:
        return np.zeros(count, dtype=bool)
    phases = np.array([label.phase for label in graph.labels])
    backward, updates = np.flatnonzero(phases == "backward"), phases == "update"
    last = np.full(count, -1)
    np.maximum.at(last, graph.accesses.buffer, graph.accesses.operation)
    return (last >= 0) & (last < backward[-1]) & updates[last]


def find_lives(graph: Graph, is_gradient: np.ndarray) -> BufferLives:
    """Find the lives of the buffers of a graph; `is_gradient` says which hold gradients.

    A buffer that is written as a whole begins a new life. Buffers that are read first are kept from
    one iteration to the next, and so are buckets of gradients, which are reduced in place. Gradients
    are kept to the end, unless their weight is updated inside of the backward pass.
    """
    is_gradient = is_gradient & ~_find_freed(graph, len(is_gradient))
    reduces = [
        n
        for n in graph.kernels.get(KernelKey("collective", "all_reduce"), ())
        if graph.labels[n].phase == "backward"
    ]
    buckets = graph.accesses.buffer[graph.accesses.find_of(reduces)]
    sorts = list[int]()
    for variant in ("exact", "hash"):
        sorts.extend(graph.kernels.get(KernelKey("embedding_backward", variant), ()))
    # one operand of such a sort only represents traffic
    accesses = graph.accesses.select(~graph.accesses.find_of(sorts))
    accesses = accesses.select(np.argsort(accesses.buffer, kind="stable"))
    operations, buffers, nbytes = accesses.operation, accesses.buffer, accesses.nbytes
    opens = np.diff(buffers, prepend=-1) > 0
    starts, number = np.flatnonzero(opens), np.cumsum(opens) - 1
    sizes = np.maximum.reduceat(nbytes, starts)[number]
    kept = (~accesses.is_write[starts] | np.isin(buffers[starts], buckets))[number]
    lasting = kept | is_gradient[buffers]
    read = (np.diff(operations, prepend=-1) == 0) & ~opens  # by the same operation
    is_whole = accesses.is_write & (nbytes >= sizes)
    begins = np.flatnonzero(opens | (is_whole & ~read & ~lasting))
    ends = 2.0 * operations[np.append(begins[1:], len(opens)) - 1] + 1.0
    times = np.where(kept, -np.inf, 2.0 * operations)[begins]
    ends = np.where(lasting[begins], np.inf, ends)
    lives = BufferLives(times, ends, buffers[begins], sizes[begins])
    return _free_units_together(graph, lives)


def _free_units_together(graph: Graph, lives: BufferLives) -> BufferLives:
    """The same lives, where weights that were gathered by one collective are freed together, but for
    those that are only copied to another order."""
    names = np.array([label.name for label in graph.labels])
    unpacked = np.flatnonzero(names == "split_with_sizes_copy")
    if not len(unpacked):
        return lives
    copied = np.isin(lives.ends, 2.0 * np.flatnonzero(names == "cat") + 1.0)
    of_unit = np.isin(lives.begins, 2.0 * unpacked) & ~copied
    units = (lives.begins[of_unit] / 2.0).astype(int)
    last = np.full(len(graph), -1.0)
    np.maximum.at(last, units, lives.ends[of_unit])
    ends = lives.ends.copy()
    ends[of_unit] = last[units]
    return lives._replace(ends=ends)


def _find_streams(graph: Graph, count: int) -> np.ndarray:
    """Stream of a GPU in which each buffer is made: that of kernels (0), that which gathers weights
    (1), or that which reduces gradients (2).

    PyTorch does not give memory of one stream to tensors of another.
    """
    streams = np.zeros(count, dtype=int)
    names = np.array([label.name for label in graph.labels])
    operations, buffers = graph.accesses.operation, graph.accesses.buffer
    writes = graph.accesses.is_write

    def find_buffers(name: str, *, written: bool) -> np.ndarray:
        return buffers[(names[operations] == name) & (writes == written)]

    gathered = find_buffers("all_gather_copy_in", written=True)
    if len(gathered):
        streams[find_buffers("_foreach_copy_", written=True)] = 1
        streams[gathered] = 1
    packed = find_buffers("chunk_cat", written=True)
    reduced = find_buffers("reduce_scatter", written=True)
    if len(packed):
        streams[np.setdiff1d(reduced, packed)] = 2
        # what they are cast to
        casts = names[operations] == "_to_copy"
        of_shards = np.unique(operations[casts & (streams[buffers] == 2)])
        streams[buffers[np.isin(operations, of_shards) & writes]] = 2
    return streams


class Changes(NamedTuple):
    """Allocations and releases of one stream, in their order: one element of each array per change.

    Parameters
    ----------
    at : array
        When, by the clock of `BufferLives`; minus infinity for what is there before the iteration [-].
    buffer : array of int
        Number of the buffer [-].
    nbytes : array
        Bytes that are allocated, negative for a release [B].
    """

    at: Array
    buffer: np.ndarray
    nbytes: Array


def _list_changes(lives: BufferLives) -> Changes:
    """Allocations and releases of buffers with these lives."""
    released = lives.select(np.isfinite(lives.ends))
    at = np.concatenate([lives.begins, released.ends])
    order = np.argsort(at, kind="stable")
    return Changes(
        at=at[order],
        buffer=np.concatenate([lives.buffers, released.buffers])[order],
        nbytes=np.concatenate([lives.nbytes, -released.nbytes])[order],
    )


def _place_allocations(graph: Graph, count: int) -> Changes:
    """When a captured graph with so many buffers allocates and releases.

    Captures list changes in their order without the operations: each is made no later than the
    operation that first touches its buffer, and no later than those behind it.
    """
    changes = graph.allocations
    end = 2.0 * len(graph)
    operations, buffers = graph.accesses.operation, graph.accesses.buffer
    first = np.full(count, end)
    np.minimum.at(first, buffers, 2.0 * operations)
    is_allocation = changes.nbytes > 0
    latest = np.where(is_allocation, first[changes.buffer], end)
    at = np.minimum.accumulate(latest[::-1])[::-1]
    # what an operation makes is not read by it; all that is listed ahead of that was there before
    is_read_first = np.zeros(count, dtype=bool)
    is_read_first[buffers[~graph.accesses.is_write & (2.0 * operations == first[buffers])]] = True
    is_touched = first[changes.buffer] < end
    is_made = is_allocation & is_touched & ~is_read_first[changes.buffer]
    was_there = np.cumsum(is_made | ~is_allocation) == 0
    return Changes(np.where(was_there, -np.inf, at), changes.buffer, changes.nbytes)


class StreamChanges(NamedTuple):
    """What an iteration of a graph allocates and releases.

    Parameters
    ----------
    part : array of int
        Use of each buffer, its number in `PARTS` [-].
    streams : list of Changes
        Those of the stream of kernels, and of each other stream of a GPU.
    constant : array
        What is held through the whole iteration beside them, by use [B].
    has_earlier_gradients : bool
        Whether they begin with the gradients of the iteration before, and their release, as captures
        do.
    """

    part: np.ndarray
    streams: list[Changes]
    constant: Array
    has_earlier_gradients: bool


def list_changes(graph: Graph, platform: Platform) -> StreamChanges:
    """List what an iteration allocates and releases.

    Parameters
    ----------
    graph : Graph
        What a rank executes; a captured one that is compiled allocates less than it recorded.
    platform : Platform
        Where it runs.

    Returns
    -------
    changes : StreamChanges
        Allocations and releases of each stream.
    """
    on_device = platform.device.kind != "cpu"
    buffers = np.concatenate(
        [graph.accesses.buffer, graph.weights.buffer, graph.allocations.buffer]
    )
    part = _sort_buffers(graph, int(buffers.max(initial=0)) + 1)
    captured = len(graph.allocations) > 0 and graph.execution != "compiled"
    constant = np.zeros(len(PARTS))
    if on_device:
        constant[_AT["workspace"]] = WORKSPACE
    if captured:
        streams = [_place_allocations(graph, len(part))]
        return StreamChanges(part, streams, constant, has_earlier_gradients=True)
    constant[[_AT["tables"], _AT["states"]]] += sum_untouched(graph, graph.tables)
    constant[_AT["parameters"]] += graph.untouched
    streams = []
    if len(graph.accesses):
        lives = find_lives(graph, part == _AT["gradients"])
        stream = np.zeros(len(part), dtype=int)
        if on_device:
            stream = _find_streams(graph, len(part))
        of_life = stream[lives.buffers]
        streams = [_list_changes(lives.select(of_life == one)) for one in np.unique(of_life)]
    return StreamChanges(part, streams, constant, has_earlier_gradients=False)


def hold_at_peak(part: np.ndarray, changes: Changes) -> Array:
    """Find what a stream holds at its fullest moment.

    Parameters
    ----------
    part : array of int
        Use of each buffer, its number in `PARTS` [-].
    changes : Changes
        Its allocations and releases.

    Returns
    -------
    held : array
        Bytes by use [B].
    """
    peak = np.argmax(np.append(0.0, np.cumsum(changes.nbytes)))
    uses = part[changes.buffer[:peak]]
    weights = changes.nbytes[:peak]
    return np.asarray(np.bincount(uses, weights=weights, minlength=len(PARTS)), dtype=float)


def list_peaks(graph: Graph, kinds: np.ndarray, sizes: Array, *, accelerator: bool) -> list[Array]:
    """Moments of an iteration, one of which needs the most memory whatever the sizes are, for each
    stream of a GPU.

    Each is the number of buffers held of every kind. Buffers of one of the `kinds` always have the
    same size; `sizes` is an example of the size of each kind [B].
    """
    lives = find_lives(graph, _sort_buffers(graph, len(kinds)) == _AT["gradients"])
    lives = lives._replace(nbytes=np.ones(len(lives.buffers)))
    stream = np.zeros(len(kinds), dtype=int)
    if accelerator:
        stream = _find_streams(graph, len(kinds))
    of_life = stream[lives.buffers]
    return [
        _list_peaks_of(lives.select(of_life == one), kinds, sizes) for one in np.unique(of_life)
    ]


def _list_peaks_of(lives: BufferLives, kinds: np.ndarray, sizes: Array) -> Array:
    """Moments of one stream, see `list_peaks`."""
    events = _list_changes(lives)
    shares = events.nbytes
    held = np.zeros((len(shares), len(sizes)))
    held[np.arange(len(shares)), kinds[events.buffer]] = shares
    rest = np.cumsum(held, axis=0)[(shares > 0) & (np.append(shares[1:], -1.0) < 0)]
    moves = (rest != rest[:1]).any(axis=0)
    moving = rest[:, moves]
    totals = moving @ sizes[moves]
    fullest = list[int]()
    left = np.arange(len(rest))
    while len(left):
        fullest.append(left[np.argmax(totals[left])])
        # the others are never fuller
        left = left[(moving[left] > moving[fullest[-1]]).any(axis=1)]
    in_order = sorted(fullest)
    peaks = moving[in_order]
    ends = np.ones(len(peaks), dtype=bool)
    # of moments on a line, as in layer after layer, one of the ends is
    for apart in range(1, (len(peaks) + 1) // 2):
        ends[apart:-apart] &= (
            2.0 * peaks[apart:-apart] > peaks[: -2 * apart] + peaks[2 * apart :]
        ).any(axis=1)
    return rest[in_order][ends]


def sum_untouched(graph: Graph, tables: Sequence[EmbeddingTable]) -> list[Any]:
    """Bytes of the tables that are only looked up and updated row by row, with what maps ids to rows
    of any table; and of their optimizer states [B]."""
    numbers = graph.weights.table_buffers.tolist()
    met = set(graph.accesses.buffer.tolist())
    own = [table for table, number in zip(tables, numbers, strict=False) if number not in met]
    weights = sum((table.device_bytes for table in own), start=0.0)
    ids = sum((table.id_bytes for table in tables), start=0.0)
    return [weights + ids, sum_states(graph, own)]


def sum_states(graph: Graph, tables: Sequence[EmbeddingTable], *, on_device: bool = True) -> Any:
    """Bytes that the optimizer of a graph keeps for the rows of these tables, in device memory or
    beyond it [B].

    States for each weight lie where all rows of a table lie, and those for each row on the device, as
    FBGEMM has them.
    """
    if not graph.optimizer:
        return 0.0
    optimizer = find_optimizer(graph.optimizer)
    if not optimizer.states and not optimizer.states_per_row:
        return 0.0
    states = []
    for table in tables:
        is_on_device = TABLE_KERNELS[table.kernel].is_on_device or not optimizer.states
        if is_on_device == on_device:
            states.append(
                state_bytes(table.rows, table.dim, table.itemsize, optimizer=graph.optimizer)
            )
    return sum(states, start=0.0)


def sum_beyond_device(graph: Graph) -> Any:
    """Bytes of tables of a graph, and of their optimizer states, that lie in host memory [B]."""
    if all(TABLE_KERNELS[table.kernel].is_on_device for table in graph.tables):
        return 0.0
    weights = sum((table.host_bytes for table in graph.tables), start=0.0)
    return weights + sum_states(graph, graph.tables, on_device=False)


def measure_memory(graphs: Sequence[Graph], platform: Platform) -> Memory:
    """Memory of the rank that needs most, at the fullest moment of an iteration.

    Parameters
    ----------
    graphs : sequence of Graph
        What the ranks execute.
    platform : Platform
        Where they run.

    Returns
    -------
    memory : Memory
        Bytes by use; what lies on the host is that of the rank with most there.
    """
    of_ranks = [_measure(graph, platform) for graph in graphs]
    fullest = max(of_ranks, key=lambda memory: memory.total)
    on_host = max(of_ranks, key=lambda memory: memory.on_host)
    return replace(fullest, on_host=on_host.on_host, host_capacity=on_host.host_capacity)


def _measure(graph: Graph, platform: Platform) -> Memory:
    """Memory of a rank; a captured graph that is compiled allocates less than it recorded."""
    on_device = platform.device.kind != "cpu"
    if graph.held is not None:
        parts = dict.fromkeys(PARTS, 0.0) | graph.held._asdict()
        if on_device:
            parts["workspace"] += WORKSPACE
        return _make_memory(graph, parts, platform)
    changes = list_changes(graph, platform)
    held = changes.constant
    for stream in changes.streams:
        held = held + hold_at_peak(changes.part, stream)
    return _make_memory(graph, dict(zip(PARTS, held.tolist(), strict=True)), platform)


def _make_memory(graph: Graph, parts: Mapping[str, float], platform: Platform) -> Memory:
    """Memory by use, with the reserve of a process on a GPU."""
    reserve = 0.0
    if platform.device.kind != "cpu":
        reserve = estimate_reserve(sum(parts.values()), count_communicators(graph))
    host_capacity = None
    on_host = graph.on_host + sum_beyond_device(graph)
    if np.any(on_host):
        host_capacity = find_host_share(platform, graph.ranks)
    return Memory(parts, platform.memory_of_rank, reserve, on_host, host_capacity)


def estimate_reserve(allocated: Any, communicators: Any) -> Any:
    """What a process on a GPU takes beside what is allocated.

    Parameters
    ----------
    allocated : float or array
        The most that is allocated [B].
    communicators : int or array
        Groups of ranks that it communicates with [-].

    Returns
    -------
    reserve : same kind as `allocated`
        Context of CUDA, buffers of NCCL and fragments of the caching allocator [B].
    """
    return CUDA_CONTEXT + COMMUNICATOR * communicators + FRAGMENTS * allocated


def count_communicators(graph: Graph) -> int:
    """Count the groups of ranks that a graph communicates with.

    Parameters
    ----------
    graph : Graph
        What a rank executes.

    Returns
    -------
    count : int
        Groups of several ranks; pairs of stages of a pipeline count as one [-].
    """
    numbers, first = np.unique(
        graph.column("group")[graph.collectives].astype(int), return_index=True
    )
    met = set[Any]()
    for number, place in zip(numbers.tolist(), first.tolist(), strict=True):
        label = graph.labels[graph.collectives[place]]
        members = graph.groups[number] if graph.groups else tuple(range(graph.ranks))
        if len(members) > 1:
            met.add("stages" if label.module == "stages" else number)
    return len(met)


def find_shortage(
    graphs: Sequence[Graph], platform: Platform, advise: Callable[[], str]
) -> tuple[str, ...]:
    """The warning if a rank has too little memory, or too little for its reserve; first checks
    whether all its buffers together would fit.

    Parameters
    ----------
    graphs : sequence of Graph
        What ranks execute.
    platform : Platform
        Where they do.
    advise : callable
        Says what would need less memory; it is called if ranks have too little.

    Returns
    -------
    notes : tuple of str
        A sentence, or nothing.
    """
    capacity = platform.memory_of_rank
    if capacity is None:
        return ()
    most = 0.0
    for graph in graphs:
        nbytes = graph.footprint + graph.untouched
        if graph.tables:
            nbytes += sum(table.device_bytes for table in graph.tables)
            nbytes += sum_states(graph, graph.tables)
        most = max(most, nbytes + WORKSPACE)
    offloads = any(graph.on_host or sum_beyond_device(graph) for graph in graphs)
    if most <= capacity and not offloads:
        communicators = max(count_communicators(graph) for graph in graphs)
        reserve = estimate_reserve(most, communicators)
        if Memory({"all": most}, capacity, reserve).fits:
            return ()
    memory = measure_memory(graphs, platform)
    if memory.fits:
        return ()
    if memory.host_capacity is not None and memory.on_host > memory.host_capacity:
        less = "a smaller offload_fraction"
        if any(sum_beyond_device(graph) for graph in graphs):
            less = "fewer tables in host memory"
        return (
            f"a rank {memory}: the host is too small; take {less}, more nodes, or state a host with more "
            "memory by .with_host_memory(capacity=...)",
        )
    if not memory.lacks_reserve:
        return (f"a rank {memory}; {advise()}",)
    reserved = format_bytes(memory.reserved)
    installed = Room.of_device(capacity).describe_reserved()
    return (
        f"a rank {memory.describe_need()}, and {reserved} with what its process takes beside it (context of CUDA, "
        f"buffers of NCCL, fragments) of {installed}: it may not fit; {advise()}",
    )
