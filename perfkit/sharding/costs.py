"""What one shard of a table costs in every kind of placement: seconds by phase, bytes of messages
and of memory."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfkit.fitting import Caches, Iteration
from perfkit.ground.units import Array, steady
from perfkit.models.embedding import row_traffic, state_bytes
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import price, price_hosts
from perfkit.workloads import layers
from perfkit.workloads.columns import Accesses, Features
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph, KernelKey, Label
from perfkit.workloads.iteration import average, make_graph, step
from perfkit.workloads.placement import BY_ROWS, Plan
from perfkit.workloads.tables import EmbeddingTable, TableSet, share_lookups, take_part
from perfkit.workloads.tape import ITEMSIZE, Tape

#: Times of a shard on its rank [s].
SECONDS = ("lookup", "pack", "update", "backward", "host")
#: Memory of a shard [B].
MEMORY = ("weights", "state", "inputs", "outputs", "gradients")
#: All costs of a shard: seconds, bytes in messages of its rank, memory, and bytes that all ranks
#: reduce together (partial sums of rows, and gradients of copied tables).
COLUMNS = (*SECONDS, "pooled", "partial", "indices", *MEMORY, "summed", "averaged")
#: Index of each cost in an array.
AT = {name: place for place, name in enumerate(COLUMNS)}
_INDEX = 8.0  # torch's int64 indices and offsets
_FEWEST = 1e-12  # lookups a sample of a shard that has none; a table has more than 0
#: A table may be copied to all ranks if its gradient is at most this many times its pooled rows
#: [-]; docs/formulas.md, table 8.2.
COPIED = 4.0


class Costs:
    """Costs of shards of a workload on a platform and number of ranks; `footprint` is what else a
    rank touches [B].

    A shard costs what `perfkit.predict` charges for its operations. Caches are shared as if all
    tables were split in the same way over all ranks. So the cost of a shard does not depend on the
    rest of a plan, and costs add up. Where one kernel works on all tables, a table costs what it
    adds to the kernel, and `launch` is the start of the kernel.
    """

    def __init__(self, workload: DLRM | TableSet, platform: Platform, ranks: int) -> None:
        self.workload, self.platform, self.ranks = workload, platform, ranks
        #: What real iterations add (a fit, if there is one); ranks that take part in a node;
        #: whether they have a GPU.
        self.iteration: Iteration | None = platform.context.find_iteration("dlrm", ranks)
        self.node, self.accelerated = (
            min(platform.network.ranks_per_node, ranks),
            platform.device.kind != "cpu",
        )
        self.fused = workload.embedding != "separate"
        #: Work of a rank without tables: the first one, with all tables of a DLRM on the others.
        self.rest: Graph | None = None
        if isinstance(workload, DLRM) and ranks > 1:
            others = Plan.from_owners(
                [1 + n % (ranks - 1) for n in range(len(workload.tables))], ranks=ranks
            )
            self.rest = workload.graphs(ranks, others, accelerator=self.accelerated)[0]
        self.footprint = self.rest.footprint if self.rest else 0.0
        #: Tables sorted by size, so that their order in the workload does not matter; which tables
        #: may be copied.
        self.order = _sort(workload.tables)
        self.worth = np.array([t.rows <= COPIED * workload.batch for t in workload.tables])
        #: Rank that holds the most popular row of a table split over all ranks: a different one for
        #: each table.
        self.home = np.argsort(self.order, kind="stable") % ranks
        self._known: dict[tuple[str, float], Array] = {}

    def launch(self) -> Array:
        """Time to start the kernels that work on all tables of a rank, by `SECONDS` [s]."""
        return self._time([], self.workload.batch, False, 1.0)[1]

    def seconds(self, graph: Graph, platform: Platform | None = None) -> Array:
        """Device time of each operation inside an iteration [s]."""
        dtype, scale = (
            getattr(self.workload, "dtype", "fp32"),
            self.iteration["scale"] if self.iteration else 1.0,
        )
        return (
            scale
            * price([graph], platform or self.platform, dtype=dtype, ranks=self.ranks)[0].seconds
        )

    def issue(self, graph: Graph) -> Array:
        """Host time of each operation inside an iteration [s]."""
        if self.iteration and "per_operation" in self.iteration:
            return np.full(len(graph), self.iteration["per_operation"])
        return np.asarray(np.add(*price_hosts([graph], self.platform)[0]))

    def shards(
        self, numbers: np.ndarray, kind: str, part: float | Array = 1.0
    ) -> tuple[Array, Array]:
        """Costs of one shard of each of these tables, and what the most popular row adds to the
        shard that holds it.

        `part` is the share of the columns that a shard holds, or one for each table; costs are by
        `COLUMNS`.
        """
        if kind not in BY_ROWS:
            # those worth copying share the caches, and so do all others
            copies = kind == "data_parallel"
            split, sizes = (
                ("copies", self.worth[numbers]) if copies else ("columns", part + 0 * numbers)
            )
            cost = np.zeros((len(numbers), len(COLUMNS)))
            for size in np.unique(sizes):
                cost[sizes == size] = self._price(numbers[sizes == size], split, size)
            return cost, np.zeros_like(cost)
        over = self.ranks if kind == "row_wise" else self.node
        cost = self._price(numbers, "rows", over)
        hot = np.maximum(self._price(numbers, "first rows", over) - cost, 0.0)
        hot[:, [AT["pooled"], AT["weights"], AT["state"]]] = 0.0
        sums = cost[:, AT["pooled"]].copy()
        if kind == "row_wise":
            cost[:, AT["pooled"]], cost[:, AT["summed"]] = 0.0, sums
        else:
            # a node reduces its partial sums, then each of its ranks exchanges its part with the
            # other nodes
            cost[:, AT["partial"]], cost[:, AT["pooled"]] = sums, sums / over
        return cost, hot

    def _price(self, numbers: np.ndarray, split: str, size: float) -> Array:
        """Costs of one shard of these tables, where all tables are split in this way; computed
        once."""
        given, bags, scale = self.workload.tables, self.workload.batch, float(self.ranks)
        known = self._known.setdefault((split, size), np.full((len(given), len(COLUMNS)), np.nan))
        missing = np.unique(numbers[np.isnan(known[numbers, 0])])
        if not len(missing):
            return known[numbers]
        # Under a fused kernel of a GPU no table depends on the others; else those split alike
        # compete for the caches.
        copied = split == "copies"
        alike = self.order[self.worth[self.order] == size] if copied else self.order
        members = missing if self.fused and self.accelerated else alike
        tables = [given[n] for n in members]
        if copied:
            bags, scale = max(bags // self.ranks, 1), 1.0
        elif split == "columns":
            tables, scale = (
                [take_part(t, dim=max(round(t.dim * size), 1)) for t in tables],
                scale * size,
            )
        else:
            over, first = int(size), split == "first rows"
            # where all lookups go to one row, the other shards have next to none
            pooling = [max(share_lookups(t, over, first=first), _FEWEST) for t in tables]
            scale = scale / over
            tables = [
                take_part(t, rows=-(-t.rows // over), pooling=float(p))
                for t, p in zip(tables, pooling, strict=True)
            ]
        known[members] = _size(self.workload, tables, bags, copied)
        seconds, _ = self._time(tables, bags, copied, scale)
        # so that every processor finds the same plan
        known[members, : len(SECONDS)] = steady(seconds)
        return known[numbers]

    def _time(
        self, tables: Sequence[EmbeddingTable], bags: int, copied: bool, scale: float
    ) -> tuple[Array, Array]:
        """Seconds of each table by `SECONDS`, and the time to start kernels that work on all of
        them [s]."""
        graph, rows = _spread(_record(self, tables, bags, copied, scale), tables, self.fused)
        (l2, l3), pages = self.platform.cache_capacities, self.platform.page_entries
        sizes = {
            "l2": l2 * scale,
            "l3": l3 * scale,
            **({"pages": pages * scale} if pages < np.inf else {}),
        }
        if (near := self.platform.memo.get(("caches", scale))) is None:
            context = self.platform.context
            fit = Caches.build({**(context.caches or {}), **sizes})
            near = self.platform.memo["caches", scale] = replace(
                self.platform, context=replace(context, caches=fit)
            )
        out, launch = np.zeros((len(tables) + 1, len(SECONDS))), np.zeros(len(SECONDS))
        for row, time in zip(rows, self.seconds(graph, near)[rows], strict=True):
            first = row.min()
            label = graph.labels[first]
            if label.name in ("clone", "all_reduce"):  # other memory traffic, and a message
                continue
            at = AT[_find_part(label)]
            # The host time is that of an operation which follows one of its own class.
            [host] = self.issue(
                Graph((label,), graph.features.select([first]), Accesses.from_rows())
            )
            time, host = (time, host) if self.accelerated else (time + host, 0.0)
            one_kernel = label.name in ("cat", "div_") or (
                self.accelerated and (self.fused or label.kind == "elementwise")
            )
            if one_kernel:  # of all tables
                empty = time[-1]
                time = np.maximum(time - empty, 0.0)
                if label.phase != "update":  # dense weights start that kernel in any case
                    launch[[at, AT["host"]]] += empty, host
            else:
                out[:, AT["host"]] += host
            out[:, at] += time
        growth = _grow(self.workload.optimizer, tables, 32.0 if self.accelerated else 64.0)
        within = self.fused and not copied  # a fused backward pass updates the rows as well
        if not within or self.workload.embedding == "fused":
            out[:-1, AT["backward" if within else "update"]] *= growth
        return out[:-1], launch


def _find_part(label: Label) -> str:
    """The part of `SECONDS` that an operation counts in."""
    if label.phase != "forward":
        return label.phase
    if label.kind == "copy":
        return "pack"
    return "lookup"


def _sort(tables: Sequence[EmbeddingTable]) -> np.ndarray:
    """Numbers of the tables sorted by rows, columns, lookups and law; equal ones stay in their
    order."""
    keys = np.array([(t.exponent, t.pooling, t.dim, t.rows) for t in tables], dtype=float).T
    # writing a law out takes long, and few tables differ in nothing else
    numbers, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)[1:]
    alike = counts[numbers.ravel()] > 1
    laws = [repr(t.law) if t.law and same else "" for t, same in zip(tables, alike, strict=True)]
    return np.lexsort((np.unique(laws, return_inverse=True)[1], *keys))


def _record(
    costs: Costs, tables: Sequence[EmbeddingTable], bags: int, copied: bool, scale: float
) -> Graph:
    """Operations on each table and on an empty one at the end; their sizes are arrays over these
    tables."""
    workload, last = costs.workload, np.arange(len(tables) + 1) == len(tables)
    rows, dim, pooling = np.array([*((t.rows, t.dim, t.pooling) for t in tables), (1.0,) * 3]).T
    itemsize = workload.tables[0].itemsize
    narrow = ITEMSIZE[workload.dtype] if isinstance(workload, DLRM) else itemsize
    tape = Tape(narrow, mixed=getattr(workload, "mixed", False))
    stack = EmbeddingTable(rows, dim, pooling, itemsize=itemsize)
    [pooled] = layers.embedding_bags(tape, workload, [stack], float(bags) * ~last, copied=copied)
    packed, back = (tape.tensor(*pooled.shape, itemsize=pooled.itemsize) for _ in range(2))
    tape.bare = 1  # the host makes a view of the pooled rows
    tape.copy("cat", [pooled], [packed], rows=pooled.shape[0])
    rest = tape.tensor(last * costs.footprint * scale, itemsize=1)
    tape.emit("clone", "copy", [rest], [back])  # all other memory traffic of the rank
    pooled.root.gradient = back
    tape.backward()
    # each gradient is stored before the next one is computed
    last_gradient = tape.operations[-1]
    last_gradient.host_calls = last_gradient.host_calls._replace(bare=tape.bare)
    tape.bare = 0
    if copied:
        average(tape)
    step(tape, "sgd", lists=costs.accelerated)
    graph = make_graph(tape, family=workload.family)
    # the traffic of each table follows its own law of lookups
    if workload.embedding == "exact" and not copied:
        [exact] = graph.kernels[KernelKey("embedding_backward", "exact")]
        place = np.flatnonzero(graph.accesses.operation == exact)[-1]
        graph.accesses.nbytes[place] = [
            *(layers.exact_traffic(t, bags, workload.optimizer) for t in tables),
            0.0,
        ]
    return graph


def _spread(
    graph: Graph, tables: Sequence[EmbeddingTable], fused: bool
) -> tuple[Graph, np.ndarray]:
    """Repeat each operation for each table, with its own tensors; also the index of each operation
    by table.

    The backward pass visits separate tables in the reverse order.
    """
    each = np.arange(len(tables) + 1)
    turned = np.array([label.phase == "backward" and not fused for label in graph.labels])
    rows = np.arange(len(graph))[:, None] * len(each) + np.where(turned[:, None], each[::-1], each)
    features = Features.zeros(rows.size)
    for name, values in vars(graph.features).items():
        vars(features)[name][rows] = values
    features.table[rows] = each % max(len(tables), 1)
    recorded = graph.accesses
    accesses = Accesses(
        operation=rows[recorded.operation].ravel(),
        buffer=(recorded.buffer[:, None] * len(each) + each).ravel(),
        nbytes=recorded.nbytes.ravel(),
        is_write=np.repeat(recorded.is_write, len(each)),
    ).sort()
    labels = tuple(label for label in graph.labels for _ in each)
    return Graph(labels, features, accesses, tuple(tables), family=graph.family), rows


def _grow(optimizer: str, tables: Sequence[EmbeddingTable], granularity: float) -> Array:
    """Bytes that an update moves (gradient, weights, optimizer states), relative to plain SGD
    [-]."""
    values = np.array([float(t.itemsize * t.dim) for t in tables])
    row = row_traffic(values, 1, granularity)
    state = find_optimizer(optimizer).row_state_bytes(row, granularity)
    return (values + _INDEX + 2.0 * (row + state)) / (values + _INDEX + 2.0 * row)


def _size(
    workload: DLRM | TableSet, tables: Sequence[EmbeddingTable], bags: int, copied: bool
) -> Array:
    """Bytes of each table by `COLUMNS`; the seconds are still zero."""
    rows, dim, pooling, item = np.array(
        [(t.rows, t.dim, t.pooling, t.itemsize) for t in tables], dtype=float
    ).T
    lookups, weights, outputs = bags * pooling, rows * dim * item, bags * dim * item
    fused, inputs = workload.embedding != "separate", _INDEX * (lookups + bags)
    sparse = 0.0 if fused else lookups * (dim * item + _INDEX)
    found = {
        "pooled": outputs * (not copied),
        "indices": inputs * (not copied),
        "weights": weights,
        "state": state_bytes(rows, dim, item, optimizer=workload.optimizer),
        "inputs": inputs,
        "outputs": outputs,
        "averaged": weights * copied,
        "gradients": outputs + (weights if copied or not (workload.sparse or fused) else sparse),
    }
    return np.stack([found.get(name, 0.0 * rows) for name in COLUMNS], axis=1)
