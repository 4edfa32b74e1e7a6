"""Ways to execute an iteration: operation by operation, compiled into fewer kernels, or replayed as
a whole."""

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import check_choice
from perfkit.models.optimizers import find_optimizer
from perfkit.workloads.columns import Access, Accesses, Features, Waits
from perfkit.workloads.fp8 import CAST_SCALED, LONE_CASTS
from perfkit.workloads.graph import Graph, Label
from perfkit.workloads.operations import CAST_ONCE

#: Ways to execute an iteration; for each, the ways in which a graph recorded so can be priced.
EXECUTIONS = {
    "eager": ("eager", "compiled", "graphs"),
    "compiled": ("compiled", "graphs"),
    "graphs": ("graphs",),
}
#: Variants that stay kernels of their own, though they loop over elements; and sums.
_ALONE = frozenset(
    ["sort", "topk", "cumsum", "cumprod", "logcumsumexp", "index_put", "scatter_add"]
)
#: Kernels that are written by hand, which a compiler does not look into.
_WRITTEN = frozenset(
    ["moe_permute", "moe_unpermute", CAST_ONCE, "dequantize_4bit", "dequantize_blockwise"]
)
#: Number formats of products that a compiler pads to multiples of 16 B.
_PADDED = ("tf32", "bf16", "fp16")
#: Operations that hooks of FSDP run around their collectives, outside of compiled code.
_IN_HOOKS = frozenset(
    ["_foreach_copy_", "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"]
)
_SUMS = frozenset(["sum", "mean", "amax", "amin", "prod", "norm", "linalg_vector_norm"])
#: Calls without a kernel that each weight costs the host in a pass of compiled code [-];
#: docs/formulas.md, table 6.1.
HANDED = 2.0


class _Loop(NamedTuple):
    """What a kernel loops over; kernels with equal loops can be one.

    Parameters
    ----------
    stretch : int
        First operation of the stretch of the iteration, within which operations may be merged [-].
    elements : float
        Numbers [-].
    columns : float, optional
        Columns that are summed up; None if nothing is summed up over rows [-].
    """

    stretch: int
    elements: float
    columns: float | None = None


class _Order(NamedTuple):
    """Where a kernel runs among all others: they are sorted by it.

    Parameters
    ----------
    after : float
        The last position that it needs [-].
    tie : float
        Sorts those with the same [-].
    """

    after: float
    tie: float


class _Slot(NamedTuple):
    """A tensor that a kernel reads or writes.

    Parameters
    ----------
    operation : int
        Position of the kernel [-].
    buffer : int
        Number of the buffer [-].
    is_write : bool
        Whether it is written.
    origins : tuple of int
        Accesses of the eager mode, by their positions, of which the largest counts [-].
    """

    operation: int
    buffer: int
    is_write: bool
    origins: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Kernels:
    """Which operations of graphs are merged; graphs that differ in other sizes share it.

    Parameters
    ----------
    members : list of list of int
        Positions of the operations of each kernel [-].
    labels : tuple of Label
        Of each kernel.
    is_compiled : array of bool
        Whether each kernel is in compiled code.
    slots : list of _Slot
        What they read and write.
    """

    members: list[list[int]]
    labels: tuple[Label, ...]
    is_compiled: np.ndarray
    slots: list[_Slot]


@dataclass(eq=False)
class _Region:
    """Operations that one kernel computes, by their positions.

    Parameters
    ----------
    members : list of int
        Positions of the operations, in their order [-].
    order : _Order
        Where it runs.
    loop : _Loop, optional
        The loop of the kernel; None if nothing can be merged with it.
    sums : float, optional
        Number of sums that it computes; None if it computes none [-].
    """

    members: list[int]
    order: _Order
    loop: _Loop | None = None
    sums: float | None = None


def _find_compiled(graph: Graph, phases: Container[str]) -> np.ndarray:
    """Whether each operation is in compiled code.

    Sums of gradients over micro-batches (`AccumulateGrad`) and the copies around collectives of
    weights and gradients are not: the engine and hooks run them between compiled functions.
    """
    inside = []
    for label, calls in zip(graph.labels, graph.features.calls.tolist(), strict=True):
        in_backward = label.phase == "backward"
        adds_gradients = in_backward and label.name == "add_" and label.kind == "elementwise"
        # the reducer of DistributedDataParallel copies without calls of the framework
        moves_buckets = in_backward and calls == 0 and label.variant in ("mul_scalar", "copy_")
        outside = adds_gradients or moves_buckets or label.name in _IN_HOOKS
        inside.append(label.phase in phases and not outside)
    return np.array(inside, dtype=bool)


def _can_be_merged(label: Label) -> bool:
    """Whether the compiler may merge an operation with others."""
    is_loop = label.kind in ("elementwise", "rowwise", "copy")
    is_alone = label.variant.partition(".")[0] in _ALONE or label.variant in LONE_CASTS
    return is_loop and not is_alone and label.name not in _WRITTEN


def _find_stretches(graph: Graph) -> list[int]:
    """For each operation, the first one of its stretch of the iteration. Nothing is merged over the
    ends of stretches: copies to the host, waits for collectives, and ends of phases."""
    begins = {0, *(graph.transfers + 1).tolist()}
    if graph.waits is None:
        begins |= {*(graph.collectives + 1).tolist()}
    else:
        begins |= {*graph.waits.operation.tolist()}
    stretches, begin, phase_before = [], 0, ""
    for operation, label in enumerate(graph.labels):
        if operation in begins or label.phase != phase_before:
            begin, phase_before = operation, label.phase
        stretches.append(begin)
    return stretches


@dataclass(eq=False)
class _Dataflow:
    """Which operations of a graph need which others, all by their positions.

    Parameters
    ----------
    accesses : list of list of Access
        What each operation reads and writes.
    positions : list of list of int
        The positions of these among the accesses of the graph.
    writers : list of dict of int to (int or None)
        For each operation and each buffer that it reads, the operation that wrote what it reads;
        None if none did.
    readers : dict of (int or None, int) to set of int
        By an operation and a buffer that it has written, those that read that.
    needs, users : list of set of int
        Operations that have to run before each one, and after it.
    """

    accesses: list[list[Access]]
    positions: list[list[int]]
    writers: list[dict[int, int | None]]
    readers: dict[tuple[int | None, int], set[int]]
    needs: list[set[int]]
    users: list[set[int]]

    @classmethod
    def follow(cls, graph: Graph) -> "_Dataflow":
        """Follow the buffers of a graph from operation to operation."""
        accesses: list[list[Access]] = [[] for _ in range(len(graph))]
        positions: list[list[int]] = [[] for _ in range(len(graph))]
        for position, access in enumerate(graph.accesses):
            accesses[access.operation].append(access)
            positions[access.operation].append(position)
        users: list[set[int]] = [set() for _ in range(len(graph))]
        flow = cls(accesses, positions, [], defaultdict(set), [], users)
        last_writer: dict[int, int] = {}  # of each buffer
        for operation, touched in enumerate(accesses):
            written = [access.buffer for access in touched if access.is_write]
            writers = {
                access.buffer: last_writer.get(access.buffer)
                for access in touched
                if not access.is_write
            }
            needs = {*writers.values()}
            for buffer in written:  # what it held before has been written and read
                writer = last_writer.get(buffer)
                needs.add(writer)
                needs |= flow.readers[writer, buffer]
            flow.writers.append(writers)
            flow.needs.append({need for need in needs if need is not None and need != operation})
            for need in flow.needs[operation]:
                users[need].add(operation)
            for buffer, writer in writers.items():
                flow.readers[writer, buffer].add(operation)
            for buffer in written:
                last_writer[buffer] = operation
        return flow


class _Fusion:
    """Regions of a graph, to which operations are added one by one."""

    def __init__(self, graph: Graph, phases: Container[str]) -> None:
        self.graph = graph
        self.compiled = _find_compiled(graph, phases)
        # of each operation that may be merged, the stretch in which it may
        self.stretches: list[int | None] = []
        for stretch, is_compiled, label in zip(
            _find_stretches(graph), self.compiled.tolist(), graph.labels, strict=True
        ):
            may_be_merged = is_compiled and _can_be_merged(label)
            self.stretches.append(stretch if may_be_merged else None)
        self.flow = _Dataflow.follow(graph)
        self.regions: dict[int, _Region] = {}  # of each operation
        members_of_root: dict[int, list[int]] = {}
        for operation, root in enumerate(self._find_roots()):
            members_of_root.setdefault(root, []).append(operation)
        for root in sorted(members_of_root):
            self.begin(root, members_of_root[root])

    def _find_roots(self) -> list[int]:
        """For each operation, the one with which it is computed: what only one operation needs is
        computed with it."""
        roots = list(range(len(self.graph)))
        for operation in reversed(range(len(self.graph))):
            users = self.flow.users[operation]
            if len(users) != 1 or self.graph.labels[operation].kind == "rowwise":
                continue
            [user] = users
            stretch = self.stretches[operation]
            if stretch is not None and self.stretches[user] == stretch:
                roots[operation] = roots[user]
        return roots

    def list_around(self, links: list[set[int]], members: list[int]) -> list[_Region]:
        """Existing regions of the operations that members need, or that need members, by their
        `links`."""
        around = {other for member in members for other in links[member]}
        around.difference_update(members)
        return [self.regions[other] for other in around if other in self.regions]

    def begin(self, root: int, members: list[int]) -> None:
        """Make a region of an operation and of what only it needs, and join it with earlier
        ones."""
        region = _Region(members, _Order(float(root), -1.0))
        self.regions |= dict.fromkeys(members, region)
        stretch = self.stretches[root]
        if stretch is None:
            return
        needed = [other.order for other in self.list_around(self.flow.needs, members)]
        after = max([stretch - 0.5, *(order.after for order in needed)])
        ties = [order.tie + 0.5 for order in needed if order.after == after]
        region.order = _Order(after, max([members[0], *ties]))
        features = self.graph.features
        region.loop = _Loop(stretch, float(features.elements[root]))
        if self.graph.labels[root].variant in _SUMS:
            if self._sums_columns(root):
                region.sums = float(features.n[root])
                region.loop = region.loop._replace(columns=region.sums)
            else:
                region.sums = float(features.rows[root])

        writers, beside = set[int](), set[int]()
        for member in members:
            for buffer, writer in self.flow.writers[member].items():
                beside |= self.flow.readers[writer, buffer]
                if writer is not None and writer not in members:
                    writers.add(writer)
        for other in chain(sorted(writers, reverse=True), sorted(beside, reverse=True)):
            if other in self.regions:
                self.join(self.regions[other], self.regions[root], uses=other in writers)

    def _sums_columns(self, operation: int) -> bool:
        """Whether a sum is one over rows, of each column: its result is as large as a row."""
        features = self.graph.features
        rows, n = float(features.rows[operation]), float(features.n[operation])
        accesses = self.flow.accesses[operation]
        read = max((access.nbytes for access in accesses if not access.is_write), default=0.0)
        written = max((access.nbytes for access in accesses if access.is_write), default=0.0)
        return n > 1 and rows > 1 and abs(written * rows - read) <= abs(written * n - read)

    def join(self, earlier: _Region, later: _Region, *, uses: bool) -> None:
        """Merge a region with an earlier one if nothing has to run in between: those with the same
        loop, or of which the later one uses sums of the earlier one."""
        if earlier is later or earlier.loop is None or later.loop is None:
            return
        if earlier.loop.stretch != later.loop.stretch:
            return
        # sums over rows are complete only when all rows have been read
        is_read_too_early = uses and earlier.loop.columns is not None
        has_same_loop = earlier.loop == later.loop and not is_read_too_early
        uses_sums = uses and earlier.sums == later.loop.elements
        if not has_same_loop and not uses_sums:
            return
        members = sorted([*earlier.members, *later.members])
        order = _Order(
            max(earlier.order.after, later.order.after), min(earlier.order.tie, later.order.tie)
        )
        if any(need.order >= order for need in self.list_around(self.flow.needs, members)):
            return
        if any(user.order <= order for user in self.list_around(self.flow.users, members)):
            return
        sums = [count for count in (earlier.sums, later.sums) if count is not None]
        earlier.members, earlier.order, earlier.sums = members, order, max(sums, default=None)
        self.regions |= dict.fromkeys(later.members, earlier)

    def order(self) -> list[_Region]:
        """All regions in their order; each runs as late as its last operation, but before those
        that need it."""
        distinct = dict.fromkeys(self.regions[position] for position in range(len(self.graph)))
        regions = sorted(distinct, key=lambda region: region.order)
        latest: dict[_Region, int] = {}
        for region in reversed(regions):
            users = self.list_around(self.flow.users, region.members)
            latest[region] = min([region.members[-1], *(latest[user] for user in users)])
        return sorted(regions, key=lambda region: latest[region])

    def list_slots(self, region: _Region, operation: int) -> list[_Slot]:
        """What a region reads from outside or writes for others, as accesses of one
        `operation`."""
        if len(region.members) == 1:
            [member] = region.members
            touched = zip(self.flow.accesses[member], self.flow.positions[member], strict=True)
            return [
                _Slot(operation, access.buffer, access.is_write, (position,))
                for access, position in touched
            ]
        origins: dict[tuple[bool, int], list[int]] = {}
        members = {*region.members}
        for member in region.members:
            touched = zip(self.flow.accesses[member], self.flow.positions[member], strict=True)
            for access, position in touched:
                if access.is_write:
                    readers = self.flow.readers.get((member, access.buffer), set())
                    stays_inside = len(readers) > 0 and readers <= members
                else:
                    stays_inside = self.flow.writers[member][access.buffer] in members
                if not stays_inside:
                    key = (access.is_write, access.buffer)
                    origins.setdefault(key, []).append(position)
        return [
            _Slot(operation, buffer, is_write, tuple(found))
            for (is_write, buffer), found in sorted(origins.items())
        ]

    def label(self, region: _Region) -> Label:
        """The label of the kernel of a region; with sums it is row-wise."""
        labels = [self.graph.labels[member] for member in region.members]
        if len(labels) == 1:
            return labels[0]
        names = dict.fromkeys(label.name for label in labels)
        kinds = {label.kind for label in labels}
        batch_norms = [label.variant for label in labels if "batch_norm" in label.variant]
        return Label(
            name="fused_" + "_".join(names),
            kind=next(kind for kind in ("rowwise", "elementwise", "copy") if kind in kinds),
            variant=f"fused.{batch_norms[0]}" if batch_norms else "fused",
            phase=labels[0].phase,
            module=labels[-1].module,
        )


#: Phases that are compiled by default.
_PHASES = ("forward", "backward")


def compile_graph(
    graph: Graph, phases: Container[str] = _PHASES, *, pads_products: bool = True
) -> Graph:
    """Merge operations that loop over the same elements into kernels, as PyTorch's compiler does.

    Parameters
    ----------
    graph : Graph
        Operations of the eager mode.
    phases : collection of str
        Phases to compile; the others stay as they are.
    pads_products : bool, optional
        Whether the compiler pads the sides of products, see `Stack.pads_products`; PyTorch's does,
        and makes the casts to fp8, too, which other software has written by hand.

    Returns
    -------
    graph : Graph
        The same work. Element-wise functions, norms, copies and sums are merged into kernels of
        variant ``fused``. The traffic of such a kernel is what it reads from outside and writes for
        others. Products, attention, convolutions, lookups and collectives are unchanged. The
        compiled pass of a micro-batch is one call of the framework, and two without a kernel for
        each weight, which its kernels share evenly. Sums of gradients over micro-batches and the
        copies around collectives of weights and gradients stay as they are, as PyTorch's engine
        and hooks run them. Gradients of single rows are added without a sort.

    Notes
    -----
    An operation is merged with an operation whose result it reads, or which reads the same tensor,
    if both loop over the same number of elements and no other kernel has to run in between. Sums
    over columns are kernels of their own. Nothing is merged over a wait for a collective or a copy
    to the host, nor into the kernel of a product. PyTorch's compiler pads the sides of products on
    tensor cores to multiples of 16 B [2]_. The kernels that compute the operands write them padded,
    so that padding takes no extra time. Software that fuses element-wise kernels alone, as
    Megatron-LM does, leaves the sides as they are.

    References
    ----------
    .. [1] J. Ansel et al., "PyTorch 2: faster machine learning through dynamic Python bytecode
       transformation and graph compilation", ASPLOS 2024, doi:10.1145/3620665.3640366, section 4.4
       (fusion)
    .. [2] PyTorch 2.13, ``shape_padding`` in torch/_inductor/config.py (on by default) and
       torch/_inductor/fx_passes/pad_mm.py
    """
    return _apply_kernels(_merge(graph, phases), graph, phases, pads_products=pads_products)


def _merge(graph: Graph, phases: Container[str]) -> _Kernels:
    """Find which operations of a graph the compiler merges."""
    fusion = _Fusion(graph, phases)
    regions = fusion.order()
    heads = np.array([region.members[0] for region in regions], dtype=int)
    slots: list[_Slot] = []
    for kernel, region in enumerate(regions):
        slots += fusion.list_slots(region, kernel)
    return _Kernels(
        members=[region.members for region in regions],
        labels=tuple(fusion.label(region) for region in regions),
        is_compiled=fusion.compiled[heads],
        slots=slots,
    )


def _describe_loops(graph: Graph, phases: Container[str]) -> bytes:
    """The sizes on which it depends what is merged: those of loops and sums, and what these read and
    write."""
    compiled = _find_compiled(graph, phases)
    merged = [
        position
        for position, label in enumerate(graph.labels)
        if compiled[position] and _can_be_merged(label)
    ]
    sizes = [vars(graph.features)[name][merged] for name in ("elements", "rows", "n")]
    touched = graph.accesses.find_of(np.array(merged, dtype=np.intp))
    return np.concatenate([*sizes, graph.accesses.nbytes[touched]]).tobytes()


def _apply_kernels(
    kernels: _Kernels, graph: Graph, phases: Container[str], *, pads_products: bool
) -> Graph:
    """A graph with merged operations."""
    counts = np.array([len(members) for members in kernels.members], int)
    members = np.array([*chain.from_iterable(kernels.members)], int)
    starts = np.cumsum(counts) - counts
    heads = members[starts]

    def take_largest(values: np.ndarray) -> np.ndarray:
        """The largest value of the operations of each kernel."""
        return np.maximum.reduceat(values[members], starts) if len(values) else values

    features = graph.features.change(take_largest)
    columns = {name: take_largest(values) for name, values in graph.columns.items()}
    accesses = _list_accesses(kernels.slots, graph)
    if columns:
        _add_up_traffic(columns["traffic"], np.flatnonzero(counts > 1), accesses, graph)
    labels = kernels.labels
    _count_host_calls(features, graph, labels, kernels.is_compiled, phases)
    dtypes = tuple(graph.dtypes[head] for head in heads) if graph.dtypes else ()
    if pads_products:
        formats = dtypes or (graph.dtype,) * len(labels)
        _pad_products(features, columns, labels, formats, phases)
        labels = _compile_casts(labels, kernels.is_compiled)
    return replace(
        graph,
        labels=labels,
        features=features,
        accesses=accesses,
        dtypes=dtypes,
        waits=_move_waits(graph.waits, heads),
        columns=columns,
        execution="compiled",
    )


def _add_up_traffic(
    traffic: np.ndarray, merged: np.ndarray, accesses: Accesses, graph: Graph
) -> None:
    """Set the traffic of merged kernels in several configurations, whose buffers grow as those of
    the graph, from their accesses in the first one."""
    growth = [nbytes / max(nbytes[0], 1.0) for nbytes in graph.buffers]
    for kernel in merged.tolist():
        touched = accesses.find_of(np.array([kernel]))
        buffers, nbytes = accesses.buffer[touched].tolist(), accesses.nbytes[touched].tolist()
        traffic[kernel] = sum(
            first * growth[buffer] for buffer, first in zip(buffers, nbytes, strict=True)
        )


def _list_accesses(slots: Sequence[_Slot], graph: Graph) -> Accesses:
    """What merged operations of a graph read and write."""
    if not slots:
        return Accesses.from_rows()
    counts = np.array([len(slot.origins) for slot in slots])
    origins = np.array([*chain.from_iterable(slot.origins for slot in slots)], dtype=np.intp)
    return Accesses(
        operation=np.array([slot.operation for slot in slots], dtype=np.intp),
        buffer=np.array([slot.buffer for slot in slots], dtype=np.intp),
        nbytes=np.maximum.reduceat(graph.accesses.nbytes[origins], np.cumsum(counts) - counts),
        is_write=np.array([slot.is_write for slot in slots], dtype=bool),
    )


def _count_host_calls(
    features: Features,
    graph: Graph,
    labels: Sequence[Label],
    is_compiled: np.ndarray,
    phases: Container[str],
) -> None:
    """Count what the host does for the kernels of a compiled graph: the compiled pass of a
    micro-batch is one call. The calls without a kernel of its weights are shared evenly."""
    passes: list[list[int]] = []  # kernels of each pass
    phase_before = ""
    for kernel, label in enumerate(labels):
        if label.phase != phase_before:
            phase_before = label.phase
            passes.append([])
        if is_compiled[kernel] and label.kind not in ("collective", "transfer"):
            is_first = not passes[-1]
            features.launches[kernel] = min(features.launches[kernel], 1.0)
            features.calls[kernel] = 1.0 if is_first else 0.0
            passes[-1].append(kernel)
        elif label.kind == "elementwise" and label.phase in phases:
            # `AccumulateGrad` is among the calls of the weights
            features.bare[kernel] = 0.0
    calls_of_weights = HANDED * _count_weights(graph)
    for kernels in passes:
        if kernels:
            features.bare[kernels] = calls_of_weights / len(kernels)


def _count_weights(graph: Graph) -> int:
    """Weights of a graph: what earlier operations read and the update writes."""
    in_update = np.array([label.phase == "update" for label in graph.labels])
    by_update = in_update[graph.accesses.operation]
    read = graph.accesses.buffer[~by_update]
    written = graph.accesses.buffer[by_update & graph.accesses.is_write]
    return len(np.intersect1d(read, written))


def _pad_products(
    features: Features,
    columns: Mapping[str, np.ndarray],
    labels: Sequence[Label],
    formats: Sequence[str],
    phases: Container[str],
) -> None:
    """Pad the sides of compiled products on tensor cores to multiples of 16 B."""
    multiples = np.ones(len(labels))
    for kernel, (label, dtype) in enumerate(zip(labels, formats, strict=True)):
        is_product = label.kind in ("gemm", "bmm") and label.phase in phases
        if is_product and dtype in _PADDED:
            multiples[kernel] = 16 / DTYPES[dtype]
    for name in ("m", "n", "k"):
        _pad(vars(features)[name], multiples)
        if name in columns:
            _pad(columns[name], multiples)


def _compile_casts(labels: Sequence[Label], is_compiled: np.ndarray) -> tuple[Label, ...]:
    """Labels of kernels, with those of casts to fp8 that a compiler makes: they are no kernels that
    are written by hand."""
    made = []
    for label, compiled in zip(labels, is_compiled.tolist(), strict=True):
        if compiled and label.name == CAST_SCALED:
            label = label._replace(variant=f"fused.{label.variant}")
        made.append(label)
    return tuple(made)


def _pad(sides: np.ndarray, multiples: np.ndarray) -> None:
    """Raise sides above 1 to multiples; several configurations are on a second axis."""
    if sides.ndim > 1:
        multiples = multiples[:, None]
    sides += np.where((multiples > 1) & (sides > 1), -sides % multiples, 0.0)


def _move_waits(waits: Waits | None, heads: np.ndarray) -> Waits | None:
    """Waits of the kernels whose first operations are `heads`: the first one that does not begin
    before the operation that waited."""
    if waits is None:
        return None
    later = [int((heads < operation).sum()) for operation in waits.operation]
    return replace(waits, operation=np.array(later, dtype=np.intp))


def refuse_hooks(updates_in_backward: bool) -> None:
    """Refuse to compile a step whose weights are updated by hooks.

    Parameters
    ----------
    updates_in_backward : bool
        Whether weights are updated inside of the backward pass.

    Raises
    ------
    ValueError
        If they are.
    """
    if updates_in_backward:
        raise ValueError(
            "execution is 'compiled' with weights that are updated in the backward pass; what a compiler "
            "makes of their hooks is not modelled; take execution='eager', or leave "
            "optimizer_in_backward out"
        )


def refuse_waits(optimizer: str, execution: str | None) -> None:
    """Refuse CUDA graphs of a step whose host waits for numbers of the update.

    Parameters
    ----------
    optimizer : str
        Name of the optimizer; empty if it is not known.
    execution : str or None
        How the step is executed.

    Raises
    ------
    ValueError
        If it waits, and the execution is ``graphs``.
    """
    if execution == "graphs" and optimizer and find_optimizer(optimizer).host_waits:
        raise ValueError(
            f"execution is 'graphs' with optimizer {optimizer!r}, whose update reads numbers back to the host, "
            "which a CUDA graph cannot hold; take execution='eager', or optimizer='adamw'"
        )


def execute(
    graphs: Sequence[Graph], execution: str | None, *, pads_products: bool = True
) -> list[Graph]:
    """Graphs of an iteration that is executed in a given way.

    Parameters
    ----------
    graphs : sequence of Graph
        One per rank, or one for all.
    execution : str or None
        ``eager``, ``compiled``, or ``graphs`` (the host launches all kernels at once); None leaves
        the graphs as they are.
    pads_products : bool, optional
        Whether what compiles them pads the sides of products, see `Stack.pads_products`; PyTorch's
        compiler does.

    Returns
    -------
    graphs : list of Graph
        One for each; equal graphs stay equal.

    Raises
    ------
    ValueError
        For an unknown name, and for graphs that were recorded in a way that excludes this one.
    """
    if execution is None:
        return [*graphs]
    check_choice("execution", execution, EXECUTIONS)
    executed: dict[Graph, Graph] = {}
    known: dict[tuple[Any, ...], _Kernels] = {}
    for graph in dict.fromkeys(graphs):
        allowed = EXECUTIONS[graph.execution]
        if execution not in allowed:
            fault = (
                f"execution is {execution!r} and {graph.name} was recorded as {graph.execution!r}"
            )
            raise ValueError(
                f"{fault}; it can be priced as {' or '.join(allowed)}; else record it again"
            )
        refuse_waits(graph.optimizer, execution)
        if execution == "compiled" and graph.execution != "compiled":
            refuse_hooks(graph.updates_in_backward)
            # ranks whose tables differ in sizes share all that else decides what is merged
            accesses = graph.accesses
            shared = (graph.labels, accesses.operation, accesses.buffer, accesses.is_write)
            ids = [id(part) for part in (*shared, graph.waits)]
            key = (*ids, _describe_loops(graph, _PHASES))
            if key not in known:
                known[key] = _merge(graph, _PHASES)
            executed[graph] = _apply_kernels(
                known[key], graph, _PHASES, pads_products=pads_products
            )
        else:
            executed[graph] = replace(graph, execution=execution)
    return [executed[graph] for graph in graphs]
