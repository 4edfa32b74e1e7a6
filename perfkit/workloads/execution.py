"""How an iteration is executed: operation by operation, compiled into fewer kernels, or replayed as a whole."""

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from perfkit.ground.units import check_choice
from perfkit.workloads.graph import FEATURES, Graph

#: How an iteration may be executed, and what a graph recorded in one way can be priced in.
EXECUTIONS = {"eager": ("eager", "compiled", "graphs"), "compiled": ("compiled", "graphs"), "graphs": ("graphs",)}
_Label = tuple[str, str, str, str, str]
_COLUMN = {name: index for index, name in enumerate(FEATURES)}
_ELEMENTS, _ROWS, _N, _CALLS, _BARE = (_COLUMN[n] for n in ("elements", "rows", "n", "calls", "bare"))
#: Variants that a compiler leaves to a kernel of their own, though they loop over elements; and sums.
_ALONE = frozenset("sort topk cumsum cumprod logcumsumexp index_put scatter_add".split())
_SUMS = frozenset("sum mean amax amin prod norm linalg_vector_norm".split())


@dataclass(eq=False)
class _Region:
    """Operations that one kernel works out, what they need and who needs them, by their positions.

    `loop` is what the kernel loops over: the stretch of the iteration, elements, and columns where these are summed up;
    empty where it stays alone. `sums` is how many sums it makes, and `ready` the last position that it needs [-].
    """

    loop: tuple[float, ...]
    members: list[int]
    needs: set[int]
    ready: float
    sums: float = -1.0
    users: set[int] = field(default_factory=set)

    @property
    def place(self) -> tuple[float, int]:
        """Order among all kernels: each comes after what it needs."""
        return self.ready, self.members[0] if self.loop else -1


class _Fusion:
    """Regions of a graph, which grow operation by operation."""

    def __init__(self, graph: Graph, phases: Container[str]) -> None:
        self.graph, n = graph, len(graph)
        self.loops = [
            phase in phases and kind in ("elementwise", "rowwise", "copy") and variant not in _ALONE
            for _, kind, variant, phase, _ in graph.labels
        ]
        cuts = {0, *graph.transfers.tolist(), *(graph.transfers + 1).tolist()}
        cuts |= {i for i in range(1, n) if graph.labels[i][3] != graph.labels[i - 1][3]}
        cuts |= {*(graph.collectives + 1 if graph.waits is None else graph.waits[:, 0]).tolist()}
        first = np.zeros(n + 1, dtype=int)
        first[list(cuts)] = list(cuts)
        self.first = np.maximum.accumulate(first).tolist()  # of the stretch that an operation stays in
        self.rows: list[list[list[float]]] = [[] for _ in range(n)]
        self.sizes = dict[float, float]()
        for place, *row in graph.accesses.tolist():
            self.rows[int(place)].append(row)
            self.sizes[row[0]] = max(self.sizes.get(row[0], 0.0), row[1])
        self.makers: list[dict[float, int]] = []  # of what each operation reads, by buffer
        self.readers: dict[tuple[int, float], set[int]] = defaultdict(set)  # of what each operation writes
        self.needs, users, made = list[set[int]](), [set[int]() for _ in range(n)], dict[float, int]()
        for place, rows in enumerate(self.rows):
            read, written = ([buffer for buffer, _, write in rows if write == flag] for flag in (0, 1))
            self.makers.append({buffer: made[buffer] for buffer in read if buffer in made})
            before = {one for buffer in written for one in self.readers[made.get(buffer, -1), buffer]}
            before |= {made[buffer] for buffer in written if buffer in made}
            self.needs.append({*self.makers[place].values(), *before} - {place})
            for one in self.needs[place]:
                users[one].add(place)
            for buffer in read:
                self.readers[made.get(buffer, -1), buffer].add(place)
            made |= dict.fromkeys(written, place)
        roots = list(range(n))
        for place in reversed(roots):  # what one operation alone needs is worked out there
            after = next(iter(users[place]), place)
            alike = self.loops[place] and self.loops[after] and self.first[place] == self.first[after]
            if len(users[place]) == 1 and graph.labels[place][1] != "rowwise" and alike:
                roots[place] = roots[after]
        parts = defaultdict[int, list[int]](list)
        for place, root in enumerate(roots):
            parts[root].append(place)
        self.home = [_Region((), [place], set(), float(place)) for place in range(n)]
        for root in sorted(parts):
            self.begin(root, parts[root])

    def begin(self, root: int, members: list[int]) -> None:
        """A region of one operation and what it alone needs, which joins those before it."""
        needs = {one for member in members for one in self.needs[member]} - {*members}
        makers = {one for member in members for one in self.makers[member].values()} - {*members}
        region = self.home[root]
        region.members, region.needs = members, needs
        for one in needs:
            self.home[one].users |= {*members}
        if not self.loops[root]:
            return
        region.ready = max([self.first[root] - 0.5, *(self.home[one].ready for one in needs)])
        elements, rows, n = self.graph.features[root, [_ELEMENTS, _ROWS, _N]].tolist()
        region.loop = float(self.first[root]), elements
        if self.graph.labels[root][2] in _SUMS:
            read, made = (max([b for _, b, write in self.rows[root] if write == flag] or [0.0]) for flag in (0, 1))
            columns = n > 1 and rows > 1 and abs(made * rows - read) <= abs(made * n - read)
            region.loop, region.sums = (*region.loop, n)[: 2 + columns], n if columns else rows
        for member in members:
            self.home[member] = region
        pairs = [(member, buffer) for member in members for buffer, _, write in self.rows[member] if not write]
        beside = {one for m, buffer in pairs for one in self.readers[self.makers[m].get(buffer, -1), buffer]}
        for one in (*sorted(makers, reverse=True), *sorted(beside, reverse=True)):
            if one < root:
                self.join(self.home[one], self.home[root], one in makers)

    def join(self, one: _Region, other: _Region, after: bool) -> None:
        """Make two regions one if they loop alike, or one goes on with the other's sums, and nothing is between."""
        if one is other or not one.loop or one.loop[:1] != other.loop[:1]:
            return
        alike = one.loop == other.loop and not (after and len(one.loop) > 2)
        if not alike and not (after and one.sums == other.loop[1]):
            return
        members = sorted([*one.members, *other.members])
        needs, users = (one.needs | other.needs) - {*members}, (one.users | other.users) - {*members}
        place = max(one.ready, other.ready), members[0]
        if all(self.home[n].place < place for n in needs) and all(self.home[u].place > place for u in users):
            one.members, one.needs, one.users, one.ready = members, needs, users, place[0]
            one.sums = max(one.sums, other.sums)
            for member in other.members:
                self.home[member] = one

    def order(self) -> list[_Region]:
        """All regions, each as late as it was and as early as it is needed."""
        regions, keys = sorted({id(r): r for r in self.home}.values(), key=lambda r: r.place), dict[int, int]()
        for region in reversed(regions):
            keys[id(region)] = min([region.members[-1], *(keys[id(self.home[user])] for user in region.users)])
        return sorted(regions, key=lambda region: keys[id(region)])

    def touch(self, region: _Region) -> list[tuple[float, float, float]]:
        """Buffers that a region reads from outside and leaves to others, with their bytes and 1 for a write."""
        inside, found = {*region.members}, dict[tuple[float, float], float]()
        for place in region.members:
            for buffer, nbytes, write in self.rows[place]:
                readers = self.readers.get((place, buffer), set())
                if (readers and readers <= inside) if write else self.makers[place].get(buffer, -1) in inside:
                    continue  # it stays in the kernel
                found[write, buffer] = min(found.get((write, buffer), 0.0) + nbytes, self.sizes[buffer])
        return [(buffer, nbytes, write) for (write, buffer), nbytes in sorted(found.items())]

    def label(self, region: _Region) -> _Label:
        """Name, class, variant, phase and module of what a region computes; sums make it row by row."""
        names, kinds, variants, phases, modules = zip(*(self.graph.labels[m] for m in region.members), strict=True)
        kind = next(kind for kind in ("rowwise", "elementwise", "copy") if kind in kinds)
        again = next((variant for variant in variants if "batch_norm" in variant), "fused")
        return "fused_" + "_".join(dict.fromkeys(names)), kind, again, phases[0], modules[-1]


def compile_graph(graph: Graph, phases: Container[str] = ("forward", "backward")) -> Graph:
    """Merge what loops over the same elements into kernels, as PyTorch's compiler does.

    Parameters
    ----------
    graph : Graph
        Operations as the eager mode dispatches them.
    phases : collection of str
        Phases that are compiled; the others stay as they are.

    Returns
    -------
    graph : Graph
        The same work: element-wise functions, normalisations, copies and sums as kernels of variant ``fused``, whose
        traffic is what they read from outside and leave to others; products, attention, convolutions, lookups and
        collectives as they were. A compiled phase is one call of the framework.

    Notes
    -----
    An operation joins the kernel of what it reads, or of what else reads the same, if both loop over as many elements
    and nothing lies between them. Sums over columns are kernels of their own. Nothing is merged over a wait for a
    collective or a copy to the host. Element-wise work behind a product is a kernel beside it.

    References
    ----------
    .. [1] J. Ansel et al., "PyTorch 2: faster machine learning through dynamic Python bytecode transformation and
       graph compilation", ASPLOS 2024, doi:10.1145/3620665.3640366, section 4.4 (fusion)
    """
    fusion = _Fusion(graph, phases)
    regions, called = fusion.order(), set[str]()
    labels, dtypes, touched = list[_Label](), list[str](), list[tuple[float, ...]]()
    features = graph.features[[region.members[0] for region in regions]]
    for row, region in enumerate(regions):
        places = region.members
        dtypes += graph.dtypes[places[0] : places[0] + 1]
        touched += [(row, *rest) for rest in (fusion.touch(region) if len(places) > 1 else fusion.rows[places[0]])]
        labels.append(fusion.label(region) if len(places) > 1 else graph.labels[places[0]])
        if len(places) > 1:
            features[row] = graph.features[places].max(axis=0)
        if labels[row][3] in phases and labels[row][1] not in ("collective", "transfer"):
            features[row, [_CALLS, _BARE]] = labels[row][3] not in called, 0.0
            called.add(labels[row][3])
    heads, waits = np.array([region.members[0] for region in regions]), graph.waits
    if waits is not None:
        waits = np.stack([[(heads < place).sum() for place in waits[:, 0]], waits[:, 1]], axis=1)
    return replace(
        graph, labels=tuple(labels), features=features, accesses=np.array(touched, dtype=float).reshape(-1, 4),
        dtypes=tuple(dtypes), waits=waits, execution="compiled",
    )  # fmt: skip


def execute(graphs: Sequence[Graph], execution: str | None) -> list[Graph]:
    """Graphs of an iteration that is executed in this way.

    Parameters
    ----------
    graphs : sequence of Graph
        One per rank, or one for all.
    execution : str or None
        ``eager``, ``compiled``, or ``graphs``, where the host launches all kernels at once; as they are, unless given.

    Returns
    -------
    graphs : list of Graph
        The same where they were the same.

    Raises
    ------
    ValueError
        For a name that is none of these, and for graphs that were recorded in another way already.
    """
    if execution is None:
        return [*graphs]
    check_choice("execution", execution, EXECUTIONS)
    found = dict[int, Graph]()
    for graph in {id(graph): graph for graph in graphs}.values():
        if execution not in (known := EXECUTIONS[graph.execution]):
            fault = f"execution is {execution!r} and {graph.name} was recorded as {graph.execution!r}"
            raise ValueError(f"{fault}; it can be priced as {' or '.join(known)}; else record it again")
        merged = execution == "compiled" != graph.execution
        found[id(graph)] = compile_graph(graph) if merged else replace(graph, execution=execution)
    return [found[id(graph)] for graph in graphs]
