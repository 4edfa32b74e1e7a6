"""Ways to execute an iteration: operation by operation, compiled into fewer kernels, or replayed as
a whole."""

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import check_choice
from perfkit.workloads.columns import Access, Accesses
from perfkit.workloads.graph import Graph, Label

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


@dataclass(eq=False)
class _Region:
    """Operations that one kernel computes, by their positions.

    `place` orders the kernels: by the last position that one needs, then by a second number. `loop`
    is the loop of the kernel: the stretch of the iteration, its elements, and its columns if these
    are summed up; it is empty if nothing can be merged with it. `sums` is the number of sums that
    it computes [-].
    """

    members: list[int]
    place: tuple[float, float]
    loop: tuple[float, ...] = ()
    sums: float = -1.0


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
    return label.kind in ("elementwise", "rowwise", "copy") and label.variant not in _ALONE


class _Fusion:
    """Regions of a graph, to which operations are added one by one."""

    def __init__(self, graph: Graph, phases: Container[str]) -> None:
        self.graph, n = graph, len(graph)
        cuts = {
            *(graph.transfers + 1).tolist(),
            *(graph.collectives + 1 if graph.waits is None else graph.waits.operation).tolist(),
        }
        cuts |= {
            i for i in range(n) if i == 0 or graph.labels[i].phase != graph.labels[i - 1].phase
        }
        # operation of each stretch, within which operations may be merged
        first = sorted(map(float, cuts))
        stretches = np.array(first)[np.searchsorted(first, np.arange(n), side="right") - 1].tolist()
        self.compiled = _find_compiled(graph, phases)
        self.stretch = [
            start if compiled and _can_be_merged(label) else -1.0
            for start, compiled, label in zip(
                stretches, self.compiled.tolist(), graph.labels, strict=True
            )
        ]
        self.accesses: list[list[Access]] = [[] for _ in range(n)]
        for access in graph.accesses:
            self.accesses[access.operation].append(access)
        # by buffer, the operation that wrote what each operation reads; -1 for none
        self.reads = list[dict[int, int]]()
        # operations that read what an operation has written to a buffer
        self.readers = defaultdict[tuple[int, int], set[int]](set)
        self.needs, self.users = list[set[int]](), [set[int]() for _ in range(n)]
        made = defaultdict[int, int](lambda: -1)
        for place, accesses in enumerate(self.accesses):
            self.reads.append(
                {own.buffer: made[own.buffer] for own in accesses if not own.is_write}
            )
            written = [own.buffer for own in accesses if own.is_write]
            before = [(made[buffer], buffer) for buffer in written]
            after = {one for key in before for one in (key[0], *self.readers[key])}
            self.needs.append({*self.reads[place].values(), *after} - {place, -1})
            for one in self.needs[place]:
                self.users[one].add(place)
            for buffer, maker in self.reads[place].items():
                self.readers[maker, buffer].add(place)
            made |= dict.fromkeys(written, place)
        self.home, parts = dict[int, _Region](), dict[int, list[int]]()
        roots = list(range(n))
        for place in reversed(roots):  # what only one operation needs is computed with it
            user = next(iter(self.users[place]), place)
            if len(self.users[place]) == 1 and self.stretch[user] == self.stretch[place] >= 0:
                roots[place] = roots[user] if graph.labels[place].kind != "rowwise" else place
        for place, root in enumerate(roots):
            parts.setdefault(root, []).append(place)
        for root in sorted(parts):
            self.begin(root, parts[root])

    def list_around(self, links: list[set[int]], members: list[int]) -> list[_Region]:
        """Existing regions of the operations that members need, or that need members, by their
        `links`."""
        return [
            self.home[one]
            for one in {one for m in members for one in links[m]} - {*members}
            if one in self.home
        ]

    def begin(self, root: int, members: list[int]) -> None:
        """Make a region of an operation and of what only it needs, and join it with earlier
        ones."""
        region = _Region(members, (float(root), -1.0))
        self.home |= dict.fromkeys(members, region)
        if self.stretch[root] < 0:
            return
        places = [one.place for one in self.list_around(self.needs, members)]
        ready = max([self.stretch[root] - 0.5, *(ready for ready, _ in places)])
        region.place = (
            ready,
            max([members[0], *(first + 0.5 for last, first in places if last == ready)]),
        )
        sizes = self.graph.features
        elements, rows, n = (float(own[root]) for own in (sizes.elements, sizes.rows, sizes.n))
        region.loop = self.stretch[root], elements
        if self.graph.labels[root].variant in _SUMS:
            accesses = self.accesses[root]
            read = max([own.nbytes for own in accesses if not own.is_write], default=0.0)
            made = max([own.nbytes for own in accesses if own.is_write], default=0.0)
            columns = n > 1 and rows > 1 and abs(made * rows - read) <= abs(made * n - read)
            region.loop, region.sums = (*region.loop, n)[: 2 + columns], n if columns else rows
        makers = {one for m in members for one in self.reads[m].values()} - {*members, -1}
        beside = {
            one
            for m in members
            for buffer, maker in self.reads[m].items()
            for one in self.readers[maker, buffer]
        }
        for one in (*sorted(makers, reverse=True), *sorted(beside, reverse=True)):
            if one in self.home:
                self.join(self.home[one], self.home[root], one in makers)

    def join(self, one: _Region, other: _Region, after: bool) -> None:
        """Merge regions with the same loop, or of which one uses sums of the other, if nothing runs
        in between."""
        if one is other or not one.loop or one.loop[:1] != other.loop[:1]:
            return
        alike = one.loop == other.loop and not (after and len(one.loop) > 2)
        if not alike and not (after and one.sums == other.loop[1]):
            return
        members = sorted([*one.members, *other.members])
        place = max(one.place[0], other.place[0]), min(one.place[1], other.place[1])
        below = all(need.place < place for need in self.list_around(self.needs, members))
        if below and all(user.place > place for user in self.list_around(self.users, members)):
            one.members, one.place, one.sums = members, place, max(one.sums, other.sums)
            self.home |= dict.fromkeys(other.members, one)

    def order(self) -> list[_Region]:
        """All regions in their order; each runs as late as its last operation, but before those
        that need it."""
        regions = sorted(
            dict.fromkeys(self.home[n] for n in range(len(self.graph))), key=lambda r: r.place
        )
        keys = dict[_Region, int]()
        for region in reversed(regions):
            users = self.list_around(self.users, region.members)
            keys[region] = min([region.members[-1], *(keys[user] for user in users)])
        return sorted(regions, key=lambda region: keys[region])

    def list_accesses(self, region: _Region, operation: int) -> list[Access]:
        """What a region reads from outside or writes for others, as accesses of one
        `operation`."""
        if len(region.members) == 1:
            [member] = region.members
            return [
                Access(operation, access.buffer, access.nbytes, access.is_write)
                for access in self.accesses[member]
            ]
        inside, largest = {*region.members}, dict[tuple[bool, int], float]()
        for place in region.members:
            for access in self.accesses[place]:
                if access.is_write:
                    readers = self.readers.get((place, access.buffer), set())
                    within = len(readers) > 0 and readers <= inside
                else:
                    within = self.reads[place][access.buffer] in inside
                if not within:
                    key = (access.is_write, access.buffer)
                    largest[key] = max(largest.get(key, 0.0), access.nbytes)
        return [
            Access(operation, buffer, nbytes, is_write)
            for (is_write, buffer), nbytes in sorted(largest.items())
        ]

    def label(self, region: _Region) -> Label:
        """The label of the kernel of a region; with sums it is row-wise."""
        labels = [self.graph.labels[member] for member in region.members]
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


def compile_graph(graph: Graph, phases: Container[str] = ("forward", "backward")) -> Graph:
    """Merge operations that loop over the same elements into kernels, as PyTorch's compiler does.

    Parameters
    ----------
    graph : Graph
        Operations of the eager mode.
    phases : collection of str
        Phases to compile; the others stay as they are.

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
    to the host, nor into the kernel of a product. The sides of products on tensor cores are padded
    to multiples of 16 B [2]_. The kernels that compute the operands write them padded, so that
    padding takes no extra time.

    References
    ----------
    .. [1] J. Ansel et al., "PyTorch 2: faster machine learning through dynamic Python bytecode
       transformation and graph compilation", ASPLOS 2024, doi:10.1145/3620665.3640366, section 4.4
       (fusion)
    .. [2] PyTorch 2.13, ``shape_padding`` in torch/_inductor/config.py (on by default) and
       torch/_inductor/fx_passes/pad_mm.py
    """
    fusion = _Fusion(graph, phases)
    # kernels of each call of compiled code: one call in each stretch of a phase
    regions, calls = fusion.order(), list[list[int]]()
    phase_before = ""
    labels, accesses = list[Label](), list[Access]()
    heads, sizes = (
        np.array([count(region.members) for region in regions], int) for count in (min, len)
    )
    members, starts = (
        np.array([m for region in regions for m in region.members], int),
        np.cumsum(sizes) - sizes,
    )

    def take_largest(values: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(values[members], starts) if len(values) else values

    features = graph.features.change(take_largest)
    columns = {name: take_largest(values) for name, values in graph.columns.items()}
    # relative to the first configuration
    growth = [sizes / max(sizes[0], 1.0) for sizes in graph.buffers]
    for row, region in enumerate(regions):
        merged, first = len(region.members) > 1, region.members[0]
        own = fusion.list_accesses(region, row)
        accesses += own
        if merged and columns:
            columns["traffic"][row] = sum(access.nbytes * growth[access.buffer] for access in own)
        labels.append(fusion.label(region) if merged else graph.labels[first])
        if labels[row].phase != phase_before:
            phase_before = labels[row].phase
            calls.append([])
        if fusion.compiled[first] and labels[row].kind not in ("collective", "transfer"):
            opens_call = not calls[-1]
            features.launches[row] = min(features.launches[row], 1.0)
            features.calls[row] = opens_call
            features.bare[row] = 0.0
            calls[-1].append(row)
        elif labels[row].kind == "elementwise" and labels[row].phase in phases:
            # `AccumulateGrad` is among the calls of the weights
            features.bare[row] = 0.0
    in_update = np.array([label.phase == "update" for label in graph.labels])
    by_update = in_update[graph.accesses.operation]
    read = graph.accesses.buffer[~by_update]
    written = graph.accesses.buffer[by_update & graph.accesses.is_write]
    # weights are what earlier operations read and the update writes
    handed = HANDED * len(np.intersect1d(read, written))
    for rows in calls:
        if rows:
            features.bare[rows] = handed / len(rows)
    dtypes = tuple(graph.dtypes[first] for first in heads) if graph.dtypes else ()
    pieces = np.array(
        [
            16 / DTYPES[own]
            if label.kind in ("gemm", "bmm") and label.phase in phases and own in _PADDED
            else 1.0
            for label, own in zip(labels, dtypes or [graph.dtype] * len(labels), strict=True)
        ]
    )
    for name in "mnk":
        for sides in (vars(features)[name], *([columns[name]] if name in columns else ())):
            piece = pieces.reshape(-1, *[1] * (sides.ndim - 1))
            sides += np.where((piece > 1) & (sides > 1), -sides % piece, 0.0)
    waits = graph.waits
    if waits is not None:
        later = np.array([(heads < place).sum() for place in waits.operation], dtype=np.intp)
        waits = replace(waits, operation=later)
    return replace(
        graph,
        labels=tuple(labels),
        features=features,
        accesses=Accesses.from_rows(accesses),
        dtypes=dtypes,
        waits=waits,
        columns=columns,
        execution="compiled",
    )


def execute(graphs: Sequence[Graph], execution: str | None) -> list[Graph]:
    """Graphs of an iteration that is executed in a given way.

    Parameters
    ----------
    graphs : sequence of Graph
        One per rank, or one for all.
    execution : str or None
        ``eager``, ``compiled``, or ``graphs`` (the host launches all kernels at once); None leaves
        the graphs as they are.

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
    found = dict[Graph, Graph]()
    for graph in dict.fromkeys(graphs):
        if execution not in (known := EXECUTIONS[graph.execution]):
            fault = (
                f"execution is {execution!r} and {graph.name} was recorded as {graph.execution!r}"
            )
            raise ValueError(
                f"{fault}; it can be priced as {' or '.join(known)}; else record it again"
            )
        merged = execution == "compiled" != graph.execution
        found[graph] = compile_graph(graph) if merged else replace(graph, execution=execution)
    return [found[graph] for graph in graphs]
