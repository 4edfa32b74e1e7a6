"""Costs of every table in every kind of placement, as arrays: seconds by phase, bytes by message and by use."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfkit.fitting import Fit
from perfkit.ground.units import Array, steady
from perfkit.models.embedding import STATE, row_traffic, state_bytes
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import price, price_host
from perfkit.workloads import layers
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import FEATURES, Graph
from perfkit.workloads.iteration import average, make_graph, step
from perfkit.workloads.shards import share_lookups
from perfkit.workloads.tables import EmbeddingTable, TableSet
from perfkit.workloads.tape import ITEMSIZE, Tape

#: Times that a shard adds to its rank [s].
SECONDS = ("lookup", "pack", "update", "backward", "host")
#: Memory that it takes [B].
MEMORY = ("weights", "state", "inputs", "outputs", "gradients")
#: Costs of a shard: seconds, bytes of its rank's messages, memory, and bytes that all ranks reduce: partial sums of
#: rows, and gradients of copied tables.
COLUMNS = (*SECONDS, "pooled", "partial", "indices", *MEMORY, "summed", "averaged")
#: Place of each in an array of costs.
AT = {name: place for place, name in enumerate(COLUMNS)}
_INDEX = 8.0  # torch's int64 indices and offsets
#: Largest gradient of a table that is copied to all ranks, over its pooled rows [-]; docs/formulas.md, table 8.2.
COPIED = 4.0


class Costs:
    """Costs of one workload on one platform and number of ranks; `footprint` is what else a rank touches [B].

    A shard costs what `perfkit.predict` charges for its operations. All tables, split alike, compete for the caches of
    all ranks. So the cost of a shard depends on nothing else of a plan, and costs add up. Of a kernel that works on all
    tables a table costs what it adds; the start-up is in `launch`.
    """

    def __init__(self, workload: DLRM | TableSet, platform: Platform, ranks: int) -> None:
        self.workload, self.platform, self.ranks, self.footprint = workload, platform, ranks, 0.0
        #: What real iterations were found to add; ranks of a node that take part; whether they have a device.
        self.iteration: Fit | None = platform.context.find_iteration("dlrm", ranks)
        self.node, self.accelerated = min(platform.network.ranks_per_node, ranks), platform.device.kind != "cpu"
        self.fused = workload.embedding != "separate"
        #: Tables by their sizes, so that nothing depends on the order they are given in; those worth copying.
        self.order = np.lexsort(np.array([(t.exponent, t.pooling, t.dim, t.rows) for t in workload.tables]).T)
        self.worth = np.array([t.rows <= COPIED * workload.batch for t in workload.tables])
        #: Rank of the most popular row of each table that is split over all ranks: one rank after the other.
        self.home = np.argsort(self.order, kind="stable") % ranks
        self._known: dict[tuple[str, float], Array] = {}

    def launch(self) -> Array:
        """Start-up of kernels that work on all tables of a rank, by `SECONDS` [s]."""
        return self._time([], self.workload.batch, False, 1.0)[1]

    def seconds(self, graph: Graph, platform: Platform | None = None) -> Array:
        """Time of operations inside an iteration [s]."""
        dtype, scale = getattr(self.workload, "dtype", "fp32"), self.iteration["scale"] if self.iteration else 1.0
        return scale * price([graph], platform or self.platform, dtype=dtype, ranks=self.ranks)[0].seconds

    def issue(self, graph: Graph) -> Array:
        """Time that the host takes for operations inside an iteration [s]."""
        if self.iteration and "per_operation" in self.iteration:
            return np.full(len(graph), self.iteration["per_operation"])
        return np.asarray(np.add(*price_host(graph, self.platform)))

    def shards(self, numbers: np.ndarray, kind: str, part: float = 1.0) -> tuple[Array, Array]:
        """Costs of one shard of each of some tables, and what the most popular row adds to the shard that holds it.

        `part` is the share of the columns in the shard; costs are by `COLUMNS`.
        """
        if kind not in ("row_wise", "table_row_wise"):
            copies = kind == "data_parallel"  # priced with those worth copying, or else with all that are not
            split, sizes = ("copies", self.worth[numbers]) if copies else ("columns", part + 0 * numbers)
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
        else:  # partial sums are reduced inside the node, and each of its ranks passes its part on to the others
            cost[:, AT["partial"]], cost[:, AT["pooled"]] = sums, sums / over
        return cost, hot

    def _price(self, numbers: np.ndarray, split: str, size: float) -> Array:
        """Costs of one shard of some tables, with all tables split alike; found once."""
        given, bags, scale = self.workload.tables, self.workload.batch, float(self.ranks)
        known = self._known.setdefault((split, size), np.full((len(given), len(COLUMNS)), np.nan))
        missing = np.unique(numbers[np.isnan(known[numbers, 0])])
        if not len(missing):
            return known[numbers]
        # A fused kernel of a GPU finds nothing of other tables in the caches; else those split alike compete for them.
        copied = split == "copies"
        alike = self.order[self.worth[self.order] == size] if copied else self.order
        members = missing if self.fused and self.accelerated else alike
        tables = [given[n] for n in members]
        if copied:
            bags, scale = max(bags // self.ranks, 1), 1.0
        elif split == "columns":
            tables, scale = [replace(t, dim=max(round(t.dim * size), 1)) for t in tables], scale * size
        else:
            over, first = int(size), split == "first rows"
            pooling, scale = [share_lookups(t, over, first=first) for t in tables], scale / over
            tables = [replace(t, rows=-(-t.rows // over), pooling=p) for t, p in zip(tables, pooling, strict=True)]
        known[members] = _size(self.workload, tables, bags, copied)
        seconds, _ = self._time(tables, bags, copied, scale)
        known[members, : len(SECONDS)] = steady(seconds)  # a search goes the same way on every processor
        return known[numbers]

    def _time(self, tables: Sequence[EmbeddingTable], bags: int, copied: bool, scale: float) -> tuple[Array, Array]:
        """Seconds of each table by `SECONDS`, and the start-up of kernels that work on all of them."""
        graph, rows = _spread(_record(self, tables, bags, copied, scale), tables, self.fused)
        (l2, l3), pages = self.platform.cache_capacities, self.platform.page_entries
        sizes = {"l2": l2 * scale, "l3": l3 * scale, **({"pages": pages * scale} if pages < np.inf else {})}
        if (near := self.platform.memo.get(("caches", scale))) is None:
            context = self.platform.context
            fit = Fit("caches", {**(context.caches or {}), **sizes})
            near = self.platform.memo["caches", scale] = replace(self.platform, context=replace(context, caches=fit))
        out, launch = np.zeros((len(tables) + 1, len(SECONDS))), np.zeros(len(SECONDS))
        for row, time in zip(rows, self.seconds(graph, near)[rows], strict=True):
            first = slice(row.min(), row.min() + 1)
            [(name, kind, _, phase, _)] = graph.labels[first]
            if name in ("clone", "all_reduce"):  # of no table, and a message
                continue
            at = AT[phase if phase != "forward" else "pack" if kind == "copy" else "lookup"]
            # The host takes for each as long as after one of its own class.
            [host] = self.issue(Graph(graph.labels[first], graph.features[first], np.zeros((0, 4))))
            time, host = (time, host) if self.accelerated else (time + host, 0.0)
            if name in ("cat", "div_") or (self.accelerated and (self.fused or kind == "elementwise")):  # one kernel
                empty = time[-1]
                time = np.maximum(time - empty, 0.0)
                if phase != "update":  # which dense weights start in any case
                    launch[[at, AT["host"]]] += empty, host
            else:
                out[:, AT["host"]] += host
            out[:, at] += time
        growth = _grow(self.workload.optimizer, tables, 32.0 if self.accelerated else 64.0)
        within = self.fused and not copied  # rows are updated in the backward pass
        if not within or self.workload.embedding == "fused":
            out[:-1, AT["backward" if within else "update"]] *= growth
        return out[:-1], launch


def _record(costs: Costs, tables: Sequence[EmbeddingTable], bags: int, copied: bool, scale: float) -> Graph:
    """What is done to each table, and to an empty one at the end, with sizes as arrays over them."""
    workload, last = costs.workload, np.arange(len(tables) + 1) == len(tables)
    rows, dim, pooling = np.array([*((t.rows, t.dim, t.pooling) for t in tables), (1.0,) * 3]).T
    itemsize = workload.tables[0].itemsize
    narrow = ITEMSIZE[workload.dtype] if isinstance(workload, DLRM) else itemsize
    tape = Tape(narrow, mixed=getattr(workload, "mixed", False))
    stack = EmbeddingTable(rows, dim, pooling, itemsize=itemsize)
    [pooled] = layers.embedding_bags(tape, workload, [stack], bags * ~last, copied=copied)
    packed, back = (tape.tensor(*pooled.shape, itemsize=pooled.itemsize) for _ in range(2))
    tape.emit("cat", "copy", [pooled], [packed], elements=pooled.numel, rows=pooled.shape[0], bare=1)
    rest = tape.tensor(last * costs.footprint * scale, itemsize=1)
    tape.emit("clone", "copy", [rest], [back])  # everything else, of no table
    tape.gradients[pooled] = back
    tape.backward()
    tape.sizes[-1]["bare"], tape.bare = tape.bare, 0  # each gradient is kept before the next one is found
    if copied:
        average(tape)
    step(tape, "sgd", lists=costs.accelerated)
    graph = make_graph(tape, family=workload.family)
    if workload.embedding == "exact" and not copied:  # which rows are looked up differs from table to table
        [exact] = graph.kernels["embedding_backward", "exact"]
        place = np.flatnonzero(graph.accesses[:, 0, 0] == exact)[-1]
        graph.accesses[place, 2] = [*(layers.exact_traffic(t, bags, workload.optimizer) for t in tables), 0.0]
    return graph


def _spread(graph: Graph, tables: Sequence[EmbeddingTable], fused: bool) -> tuple[Graph, np.ndarray]:
    """The same operations table by table on tensors of their own, and the position of each by table.

    Gradients of single tables are found in the reverse order.
    """
    each = np.arange(len(tables) + 1)
    turned = np.array([label[3] == "backward" and not fused for label in graph.labels])
    rows = np.arange(len(graph))[:, None] * len(each) + np.where(turned[:, None], each[::-1], each)
    features = np.empty((rows.size, len(FEATURES)))
    features[rows] = np.moveaxis(graph.features, 1, 2)
    features[rows, FEATURES.index("table")] = each % max(len(tables), 1)
    own, storage, nbytes, write = np.moveaxis(graph.accesses, 1, 0)
    touched = rows[own.astype(int), each], storage * len(each) + each, nbytes, write
    accesses = np.stack(touched, axis=2).reshape(-1, 4)
    accesses = accesses[np.argsort(accesses[:, 0], kind="stable")]
    labels = tuple(label for label in graph.labels for _ in each)
    return Graph(labels, features, accesses, tuple(tables), family=graph.family), rows


def _grow(optimizer: str, tables: Sequence[EmbeddingTable], granularity: float) -> Array:
    """Traffic of an update with its optimizer state, relative to plain SGD: gradient, weights and states."""
    values = np.array([float(t.itemsize * t.dim) for t in tables])
    row = row_traffic(values, 1, granularity)
    state = granularity if optimizer == "rowwise_adagrad" else STATE[optimizer] * row
    return (values + _INDEX + 2.0 * (row + state)) / (values + _INDEX + 2.0 * row)


def _size(workload: DLRM | TableSet, tables: Sequence[EmbeddingTable], bags: int, copied: bool) -> Array:
    """Bytes of each table by `COLUMNS`, in which seconds are still zero."""
    rows, dim, pooling, item = np.array([(t.rows, t.dim, t.pooling, t.itemsize) for t in tables], dtype=float).T
    lookups, weights, outputs = bags * pooling, rows * dim * item, bags * dim * item
    fused, inputs = workload.embedding != "separate", _INDEX * (lookups + bags)
    sparse = 0.0 if fused else lookups * (dim * item + _INDEX)
    found = {
        "pooled": outputs * (not copied), "indices": inputs * (not copied), "weights": weights,
        "state": state_bytes(rows, dim, item, optimizer=workload.optimizer),
        "inputs": inputs, "outputs": outputs, "averaged": weights * copied,
        "gradients": outputs + (weights if copied or not (workload.sparse or fused) else sparse),
    }  # fmt: skip
    return np.stack([found.get(name, 0.0 * rows) for name in COLUMNS], axis=1)
