"""Costs of every table in every kind of placement, as arrays: seconds by phase, bytes by message and by use."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Fit
from perfkit.ground.units import Array, steady
from perfkit.models.embedding import STATE, row_traffic
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import price, price_host
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import FEATURES, PHASES, Graph
from perfkit.workloads.layers import exact_traffic
from perfkit.workloads.shards import share_lookups
from perfkit.workloads.tables import EmbeddingTable, TableSet
from perfkit.workloads.tape import ITEMSIZE

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
_SORT = 10.0  # kernels of a sort by key with what prepares it
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
        return self._time([], self.workload.batch, np.zeros(0, dtype=bool), 1.0)[1]

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
        # A fused kernel of a GPU finds nothing of other tables in the caches; else all tables compete for them.
        members = missing if self.fused and self.accelerated else self.order
        tables, copied = [given[n] for n in members], (self.worth[members] == size) & (split == "copies")
        if split == "copies":
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

    def _time(
        self, tables: Sequence[EmbeddingTable], bags: int, copied: np.ndarray, scale: float
    ) -> tuple[Array, Array]:
        """Seconds of each table by `SECONDS`, and the start-up of kernels that work on all of them."""
        listed = _list_operations(self, tables, bags, np.append(copied, False), scale)
        groups = [group for group in listed if len(group.members)]
        graph, starts = _join(groups, tuple(tables))
        (l2, l3), pages = self.platform.cache_capacities, self.platform.page_entries
        known: Mapping[str, float] = self.platform.context.caches or {}
        sizes = {**known, "l2": l2 * scale, "l3": l3 * scale, **({"pages": pages * scale} if pages < np.inf else {})}
        near = replace(self.platform, context=replace(self.platform.context, caches=Fit("caches", sizes)))
        out, launch = np.zeros((len(tables) + 1, len(SECONDS))), np.zeros(len(SECONDS))
        for group, start, time in zip(groups, starts, np.split(self.seconds(graph, near), starts[1:]), strict=True):
            first, at = slice(start, start + 1), AT[group.name]
            # The host takes for each as long as after one of its own class.
            [host] = self.issue(Graph(graph.labels[first], graph.features[first], np.zeros((0, 4))))
            time, host = (time, host) if self.accelerated else (time + host, 0.0)
            if group.shared:
                [empty] = time[group.members == len(tables)]
                time = np.maximum(time - empty, 0.0)
                if group.name != "update":  # which dense weights start in any case
                    launch[[at, AT["host"]]] += empty, host
            else:
                out[group.members, AT["host"]] += host
            out[group.members, at] += time
        growth = _grow(self.workload.optimizer, tables, 32.0 if self.accelerated else 64.0)
        out, within = out[:-1], self.fused & ~copied  # rows are updated in the backward pass
        out[:, AT["backward"]] *= np.where(within & (self.workload.embedding == "fused"), growth, 1.0)
        out[:, AT["update"]] *= np.where(within, 1.0, growth)
        return out, launch


class _Group(NamedTuple):
    """Operations of one class: what they count as, on which tables, their sizes, and buffers touched.

    Of a buffer there are its number, the bytes, and 1 for a write. All may be done by one `shared` kernel.
    """

    name: str
    label: tuple[str, str]
    members: np.ndarray
    sizes: Mapping[str, Any]
    touched: tuple[tuple[Any, ...], ...]
    shared: bool = False


def _list_operations(
    costs: Costs, tables: Sequence[EmbeddingTable], bags: int, copied: np.ndarray, scale: float
) -> Iterator[_Group]:
    """Classes of operations on tables in program order, as if one rank ran them all; each works on an empty one too."""
    workload, each = costs.workload, np.arange(len(copied))
    last, fused = each == len(tables), costs.fused
    one = fused and costs.accelerated  # on a CPU each table counts as a kernel of its own
    rows, dim, pooling, item = np.array([*((t.rows, t.dim, t.pooling, t.itemsize) for t in tables), (0.0,) * 4]).T
    narrow = ITEMSIZE[workload.dtype] if isinstance(workload, DLRM) else workload.tables[-1].itemsize
    wide = 4 if getattr(workload, "mixed", False) else narrow
    lookups, bag, weights = np.round(bags * pooling), bags * ~last, rows * dim
    pooled, gathered = bag * dim, lookups * dim
    # Buffers: of each table its own, or one of all.
    indices, offsets, out, sent, gradient, weight, order, rest = (k * len(each) + each for k in range(8))
    back, flat = (k * len(each) + 0 * each for k in (8, 9))
    looked = {"lookups": lookups, "bags": bag, "dim": dim, "table": each * ~last, "elements": gathered}
    index = (indices, _INDEX * lookups, 0), (offsets, _INDEX * bag, 0)
    label = "embedding_forward", "fused" if fused else "_embedding_bag"
    yield _Group("lookup", label, each, looked, (*index, (out, pooled * wide, 1)), one)
    sizes, packed = {"elements": pooled, "rows": bag, "bare": 1.0}, ((out, pooled * wide, 0), (sent, pooled * wide, 1))
    yield _Group("pack", ("copy", "cat"), each, sizes, packed, True)
    other = (rest, last * costs.footprint * scale, 0), (back, last * pooled.sum() * narrow, 1)
    yield _Group("pack", ("copy", "clone"), each[-1:], {}, other)  # everything else, of no table
    sparse, arrived = ~copied & (workload.sparse or fused), ((back, pooled * narrow, 0), *index)

    def find(which: np.ndarray) -> np.ndarray:
        return np.append(np.flatnonzero(which[:-1]), len(tables)) if which.any() else each[:0]

    gradients, dense = (gradient, weights * wide, 1), (gradient, weights * wide, 0)
    if workload.embedding == "exact":
        sizes = looked | {"lookups": 0.0, "launches": _SORT}
        sort = order, np.array([*(exact_traffic(t, bags, workload.optimizer) for t in tables), 0.0]), 0
        yield _Group("backward", ("embedding_backward", "exact"), find(sparse), sizes, (*arrived, sort), one)
    elif fused:
        yield _Group("backward", ("embedding_backward", "fused"), find(sparse), looked, arrived, one)
    else:  # gradients of single tables are found in the reverse order
        sizes, found = looked | {"rows": lookups, "bare": 1.0}, (*arrived, (gradient, gathered * wide, 1))
        yield _Group("backward", ("embedding_backward", "sparse"), find(sparse)[::-1], sizes, found)
    sizes = looked if fused else looked | {"elements": weights, "rows": rows, "bare": 1.0}
    members = find(~sparse) if fused else find(~sparse)[::-1]
    yield _Group("backward", ("embedding_backward", "dense"), members, sizes, (*arrived, gradients), one)
    sizes, written, reduced = {"elements": weights}, (flat, weights * wide, 1), (flat, weights * wide, 0)
    yield _Group("update", ("copy", "cat"), find(copied), sizes, (dense, written), True)
    yield _Group("update", ("elementwise", "div_"), find(copied), sizes, (reduced, written), True)
    for which, source in ((copied, reduced), (~copied & ~sparse, dense)):
        moved = (weight, weights * item, 0), source, (weight, weights * item, 1)
        yield _Group("update", ("elementwise", "add_"), find(which), sizes, moved, costs.accelerated)
    if not fused:
        sizes, read = looked | {"rows": lookups}, (gradient, gathered * wide, 0)
        yield _Group("update", ("embedding_update", "sparse"), find(sparse), sizes, (read,))


def _join(groups: Sequence[_Group], tables: tuple[EmbeddingTable, ...]) -> tuple[Graph, list[int]]:
    """Operations of classes as a graph, and the first one of each class."""
    labels: list[tuple[str, str, str, str, str]] = []
    features, accesses, starts, n = [], [], [], len(tables) + 1
    for name, label, members, sizes, touched, _ in groups:
        starts.append(len(labels))
        own, phase = len(labels) + np.arange(len(members)), name if name in PHASES else "forward"
        labels += [(label[1], *label, phase, "embeddings")] * len(members)
        columns = [np.broadcast_to(sizes.get(size, size in ("launches", "calls")), n) for size in FEATURES]
        features.append(np.stack(columns, axis=1, dtype=float)[members])
        for buffer, nbytes, write in touched:
            accesses.append(np.stack(np.broadcast_arrays(own, buffer[members], nbytes[members], write), axis=1))
    every = np.concatenate(accesses)
    every = every[np.argsort(every[:, 0], kind="stable")]
    return Graph(tuple(labels), np.concatenate(features), every, tables), starts


def _grow(optimizer: str, tables: Sequence[EmbeddingTable], granularity: float) -> Array:
    """Traffic of an update with its optimizer state, relative to plain SGD: gradient, weights and states."""
    values = np.array([float(t.itemsize * t.dim) for t in tables])
    row = row_traffic(values, 1, granularity)
    state = granularity if optimizer == "rowwise_adagrad" else STATE[optimizer] * row
    return (values + _INDEX + 2.0 * (row + state)) / (values + _INDEX + 2.0 * row)


def _size(workload: DLRM | TableSet, tables: Sequence[EmbeddingTable], bags: int, copied: np.ndarray) -> Array:
    """Bytes of each table by `COLUMNS`, in which seconds are still zero."""
    rows, dim, pooling, item = np.array([(t.rows, t.dim, t.pooling, t.itemsize) for t in tables], dtype=float).T
    lookups, weights, outputs = bags * pooling, rows * dim * item, bags * dim * item
    fused, inputs = workload.embedding != "separate", _INDEX * (lookups + bags)
    sparse = 0.0 if fused else lookups * (dim * item + _INDEX)
    found = {
        "pooled": outputs * ~copied, "indices": inputs * ~copied, "weights": weights,
        "state": item * rows if workload.optimizer == "rowwise_adagrad" else STATE[workload.optimizer] * weights,
        "inputs": inputs, "outputs": outputs, "averaged": weights * copied,
        "gradients": outputs + np.where(copied | (not (workload.sparse or fused)), weights, sparse),
    }  # fmt: skip
    return np.stack([found.get(name, 0.0 * rows) for name in COLUMNS], axis=1)
