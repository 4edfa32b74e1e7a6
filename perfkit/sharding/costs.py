"""Costs of every table in every kind of placement, as arrays: seconds by phase, bytes by message and by use."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perfkit.fitting import Fit
from perfkit.ground.units import Array, steady
from perfkit.models.distributions import unique_rows
from perfkit.models.embedding import STATE, exact_backward_bytes, row_traffic
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import price, price_host
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import FEATURES, Graph
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


@dataclass(frozen=True, eq=False)
class Curve:
    """Time of a message by its bytes, tabulated on a geometric grid [s]; nothing to send takes no time."""

    nbytes: Array
    seconds: Array

    def __call__(self, nbytes: Array | float) -> Array:
        return np.where(np.asarray(nbytes) > 0, np.interp(nbytes, self.nbytes, self.seconds), 0.0)

    def line_below(self, low: float, high: float) -> tuple[float, float]:
        """Intercept and slope of a line that stays below the curve from `low` to `high`."""
        sizes = np.unique(np.clip(self.nbytes, low, high))
        times = self(sizes)
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else 0.0
        return float(np.min(times - slope * sizes)), float(slope)

    def slope_below(self, high: float) -> float:
        """Slope of the steepest line through the origin that stays below the curve up to `high`."""
        sizes = self.nbytes[: max(int(np.searchsorted(self.nbytes, high)), 1)]
        return float(np.min(self(sizes) / np.maximum(sizes, 1.0)))


class _Group(NamedTuple):
    """Operations of one class: what they count as, on which tables; buffers touched, their bytes and 1 for a write."""

    name: str
    which: np.ndarray
    label: tuple[str, str]
    sizes: Mapping[str, Array]
    touched: tuple[tuple[str, Array, int], ...]
    shared: bool = False
    reverse: bool = False


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of one workload on one platform and number of ranks; `footprint` is what else a rank touches [B].

    A shard costs what `perfkit.predict` charges for its operations. All tables, split alike, compete for the caches of
    all ranks. So the cost of a shard depends on nothing else of a plan, and costs add up. Of a kernel that works on all
    tables a table costs what it adds; the start-up is in `launch`.
    """

    workload: DLRM | TableSet
    platform: Platform
    ranks: int
    footprint: float = 0.0
    _known: dict[tuple[str, float], Array] = field(default_factory=dict, repr=False)

    @cached_property
    def iteration(self) -> Fit | None:
        """What real iterations were found to add."""
        return self.platform.context.find_iteration("dlrm", self.ranks)

    @cached_property
    def node(self) -> int:
        """Ranks of a node that take part [-]."""
        return min(self.platform.network.ranks_per_node, self.ranks)

    @cached_property
    def order(self) -> np.ndarray:
        """Tables by their sizes, so that nothing depends on the order they are given in."""
        return np.lexsort(np.array([(t.exponent, t.pooling, t.dim, t.rows) for t in self.workload.tables]).T)

    @cached_property
    def home(self) -> np.ndarray:
        """Rank of the most popular row of each table that is split over all ranks: one rank after the other [-]."""
        return np.argsort(self.order, kind="stable") % self.ranks

    @cached_property
    def launch(self) -> Array:
        """Start-up of kernels that work on all tables of a rank, by `perfkit.sharding.objective.SECONDS` [s]."""
        return self._time([], self.workload.batch, np.zeros(0, dtype=bool), 1.0)[-1]

    @property
    def accelerated(self) -> bool:
        """Whether ranks compute on a device of its own."""
        return self.platform.device.kind != "cpu"

    def times(self, graph: Graph, platform: Platform | None = None) -> tuple[Array, Array]:
        """Time of operations inside an iteration, and what the host takes for each [s]."""
        [found] = price(
            [graph], platform or self.platform, dtype=getattr(self.workload, "dtype", "fp32"), ranks=self.ranks
        )
        seconds = (self.iteration["scale"] if self.iteration else 1.0) * found.seconds
        if self.iteration is not None and "per_operation" in self.iteration:
            return seconds, np.full(len(graph), self.iteration["per_operation"])
        first, more = price_host(graph, self.platform)
        return seconds, first + more

    def curve(self, operations: Sequence[str], ranks: int, largest: float) -> Curve | None:
        """Time of collectives, one after the other, in an iteration; None where the platform has no model of one."""
        nbytes = steady(np.geomspace(64.0, max(2 * largest, 1e6), 640))
        total, whole = np.zeros(len(nbytes)), self.iteration
        for operation in operations if ranks > 1 else ():
            try:
                time = self.platform.collective_time(operation, nbytes, ranks=ranks)
            except ValueError:
                return None
            if whole is not None:
                time = whole["scale"] * time + whole.get("per_collective", 0.0) + whole.get("per_resume", 0.0)
            total = total + steady(time)
        return Curve(nbytes, total)

    def shards(self, numbers: Sequence[int] | np.ndarray, kind: str, part: float = 1.0) -> tuple[Array, Array]:
        """Costs of one shard of each of some tables, and what the most popular row adds to the shard that holds it.

        `part` is the share of the columns in the shard; costs are by `COLUMNS`.
        """
        numbers = np.asarray(numbers, dtype=int)
        if kind == "data_parallel":  # priced with those worth copying, or else with all that are not
            worth = self.worth[numbers]
            cost = np.zeros((len(numbers), len(COLUMNS)))
            for own in (worth, ~worth):
                cost[own] = self._price(numbers[own], "copies", own is worth)
            return cost, np.zeros_like(cost)
        if kind not in ("row_wise", "table_row_wise"):
            cost = self._price(numbers, "columns", part)
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

    @cached_property
    def worth(self) -> np.ndarray:
        """Tables that are worth copying to all ranks."""
        return np.array([t.rows <= COPIED * self.workload.batch for t in self.workload.tables])

    def _price(self, numbers: np.ndarray, split: str, size: float) -> Array:
        """Costs of some tables, with all tables split alike; found once."""
        given, bags, scale = self.workload.tables, self.workload.batch, float(self.ranks)
        known = self._known.setdefault((split, size), np.full((len(given), len(COLUMNS)), np.nan))
        missing = np.unique(numbers[np.isnan(known[numbers, 0])])
        if not len(missing):
            return known[numbers]
        # A fused kernel of a GPU finds nothing of other tables in the caches; else all tables compete for them.
        fused = self.workload.embedding != "separate"
        members = missing if fused and self.accelerated else self.order
        tables, copied = [given[n] for n in members], (self.worth == size)[members] & (split == "copies")
        if split == "copies":
            bags, scale = max(bags // self.ranks, 1), 1.0
        elif split == "columns":
            tables, scale = [replace(t, dim=max(round(t.dim * size), 1)) for t in tables], scale * size
        else:
            over, first = int(size), split == "first rows"
            pooling, scale = [share_lookups(t, over, first=first) for t in tables], scale / over
            tables = [replace(t, rows=-(-t.rows // over), pooling=p) for t, p in zip(tables, pooling, strict=True)]
        seconds = steady(self._time(tables, bags, copied, scale)[:-1])  # a search goes the same way on every processor
        kept = copied | (split != "copies")
        known[members[kept]] = np.concatenate([seconds, _size(self.workload, tables, bags, copied)], axis=1)[kept]
        return known[numbers]

    def _time(self, tables: Sequence[EmbeddingTable], bags: int, copied: np.ndarray, scale: float) -> Array:
        """Seconds of each table by `SECONDS`, and in one more row the start-up of kernels that work on all of them."""
        listed = _list_operations(self, tables, bags, np.append(copied, False), scale)
        groups = [group for group in listed if group.which.any() or not group.name]
        graph, places = _join(groups, tuple(tables))
        (l2, l3), pages = self.platform.cache_capacities, self.platform.page_entries
        known: Mapping[str, float] = self.platform.context.caches or {}
        sizes = {**known, "l2": l2 * scale, "l3": l3 * scale, **({"pages": pages * scale} if pages < np.inf else {})}
        near = replace(self.platform, context=replace(self.platform.context, caches=Fit("caches", sizes)))
        seconds, _ = self.times(graph, near)
        out = np.zeros((len(tables) + 1, len(SECONDS)))
        for group, own in zip(groups, places, strict=True):
            if not group.name:
                continue
            members = np.flatnonzero(group.which[:-1])
            # The host takes for each as long as after one of its own class.
            _, host = self.times(Graph((graph.labels[own[-1]],), graph.features[own[-1:]], np.zeros((0, 4))))
            time, issue = (seconds[own], host[0]) if self.accelerated else (seconds[own] + host, 0.0)
            if not group.shared:
                out[members, AT[group.name]] += time[:-1]
                out[members, AT["host"]] += issue
                continue
            out[members, AT[group.name]] += np.maximum(time[:-1] - time[-1], 0.0)
            if group.name != "update":  # which dense weights start in any case
                out[-1, [AT[group.name], AT["host"]]] += time[-1], issue
        growth = np.append(_grow(self.workload.optimizer, tables, 32.0 if self.accelerated else 64.0), 1.0)
        fused = self.workload.embedding
        within = (fused != "separate") & ~np.append(copied, True)  # rows are updated in the backward pass
        out[:, AT["backward"]] *= np.where(within & (fused == "fused"), growth, 1.0)
        out[:, AT["update"]] *= np.where(within, 1.0, growth)
        return out


def _list_operations(
    costs: Costs, tables: Sequence[EmbeddingTable], bags: int, copied: np.ndarray, scale: float
) -> Iterator[_Group]:
    """Classes of operations on tables in program order, as if one rank ran them all; the last table is empty."""
    workload, last = costs.workload, np.arange(len(copied)) == len(tables)
    fused = workload.embedding != "separate"
    one = fused and costs.accelerated  # on a CPU each table counts as a kernel of its own
    rows, dim, pooling, item = np.array([*((t.rows, t.dim, t.pooling, t.itemsize) for t in tables), (0.0,) * 4]).T
    narrow = ITEMSIZE[workload.dtype] if isinstance(workload, DLRM) else workload.tables[-1].itemsize
    wide = 4 if getattr(workload, "mixed", False) else narrow
    lookups, bag, weights = np.round(bags * pooling), bags * ~last, rows * dim
    pooled, gathered, each = bag * dim, lookups * dim, np.arange(len(dim))
    looked = {"lookups": lookups, "bags": bag, "dim": dim, "table": each * ~last, "elements": gathered}
    index, out = (("indices", _INDEX * lookups, 0), ("offsets", _INDEX * bag, 0)), ("out", pooled * wide)
    variant = "fused" if fused else "_embedding_bag"
    yield _Group("lookup", each >= 0, ("embedding_forward", variant), looked, (*index, (*out, 1)), one)
    sizes, sent = {"elements": pooled, "rows": bag, "bare": 1.0 + 0.0 * dim}, ("sent", pooled * wide, 1)
    yield _Group("pack", each >= 0, ("copy", "cat"), sizes, ((*out, 0), sent), shared=True)
    other = (("all rest", last * costs.footprint * scale, 0), ("all back", last * pooled.sum() * narrow, 1))
    yield _Group("", last & False, ("copy", "clone"), {}, other)
    back, gradient = (("all back", pooled * narrow, 0), *index), ("gradient", weights * wide, 1)
    sparse = ~copied & (workload.sparse or fused)
    if workload.embedding == "exact":
        traffic = ("sorted", np.append(_sort(workload.optimizer, tables, bags), 0.0), 0)
        more = looked | {"lookups": 0.0 * dim, "launches": _SORT + 0.0 * dim}
        yield _Group("backward", sparse, ("embedding_backward", "exact"), more, (*back, traffic), one)
    elif fused:
        yield _Group("backward", sparse, ("embedding_backward", "fused"), looked, back, one)
    else:
        rowwise = looked | {"rows": lookups, "bare": 1.0 + 0.0 * dim}
        own = ("gradient", gathered * wide, 1)
        yield _Group("backward", sparse, ("embedding_backward", "sparse"), rowwise, (*back, own), False, True)
    sizes = looked if fused else looked | {"elements": weights, "rows": rows, "bare": 1.0 + 0.0 * dim}
    yield _Group("backward", ~sparse, ("embedding_backward", "dense"), sizes, (*back, gradient), one, not fused)
    flat, sizes = ("all reduced", weights * wide), {"elements": weights}
    yield _Group("update", copied, ("copy", "cat"), sizes, ((*gradient[:2], 0), (*flat, 1)), True)
    yield _Group("update", copied, ("elementwise", "div_"), sizes, ((*flat, 0), (*flat, 1)), True)
    for which, source in ((copied, flat), (~copied & ~sparse, gradient[:2])):
        moved = (("weight", weights * item, 0), (*source, 0), ("weight", weights * item, 1))
        yield _Group("update", which, ("elementwise", "add_"), sizes, moved, costs.accelerated)
    if not fused:
        rowwise, own = looked | {"rows": lookups}, ("gradient", gathered * wide, 0)
        yield _Group("update", sparse, ("embedding_update", "sparse"), rowwise, (own,))


def _sort(optimizer: str, tables: Sequence[EmbeddingTable], bags: int) -> list[float]:
    """Bytes that a sort and one update of each distinct row with its states move, pooled gradients aside."""
    found = []
    for table in tables:
        lookups, row = round(bags * table.pooling), row_traffic(table.dim, table.itemsize, 32)
        unique = float(unique_rows(table.distribution, lookups))
        whole = exact_backward_bytes(unique, bags, lookups, table.dim, itemsize=table.itemsize)
        state = 32.0 if optimizer == "rowwise_adagrad" else STATE[optimizer] * row
        found.append(round(whole - bags * table.dim * table.itemsize + 2.0 * unique * state))
    return found


def _grow(optimizer: str, tables: Sequence[EmbeddingTable], granularity: float) -> Array:
    """Traffic of an update with its optimizer state, relative to plain SGD: gradient, weights and states."""
    values = np.array([float(t.itemsize * t.dim) for t in tables])
    row = row_traffic(values, 1, granularity)
    state = granularity if optimizer == "rowwise_adagrad" else STATE[optimizer] * row
    return (values + _INDEX + 2.0 * (row + state)) / (values + _INDEX + 2.0 * row)


def _size(workload: DLRM | TableSet, tables: Sequence[EmbeddingTable], bags: int, copied: np.ndarray) -> Array:
    """Bytes of each table by the columns after the seconds."""
    rows, dim, pooling, item = np.array([(t.rows, t.dim, t.pooling, t.itemsize) for t in tables], dtype=float).T
    lookups, weights, outputs = bags * pooling, rows * dim * item, bags * dim * item
    state = STATE[workload.optimizer] * weights
    if workload.optimizer == "rowwise_adagrad":
        state = item * rows
    fused = workload.embedding != "separate"
    sparse = 0.0 if fused else lookups * (dim * item + _INDEX)
    dense = copied | (not (workload.sparse or fused))
    none, inputs = np.zeros(len(tables)), _INDEX * (lookups + bags)
    return np.stack([
        np.where(copied, 0.0, outputs), none, np.where(copied, 0.0, inputs), weights, state, inputs, outputs,
        outputs + np.where(dense, weights, sparse), none, np.where(copied, weights, 0.0),
    ], axis=1)  # fmt: skip


def _join(groups: Sequence[_Group], tables: tuple[EmbeddingTable, ...]) -> tuple[Graph, list[np.ndarray]]:
    """Operations of classes as a graph, and the places of each class in the order of its tables, the empty one last.

    Gradients of single tables are found in the reverse order. A buffer is one of each table, or one of all.
    """
    labels: list[tuple[str, str, str, str, str]] = []
    features, accesses, places, n = [], [], [], len(tables) + 1
    buffers = list(dict.fromkeys(name for group in groups for name, _, _ in group.touched))
    for group in groups:
        members = np.append(np.flatnonzero(group.which[:-1]), n - 1)
        own = len(labels) + np.arange(len(members))
        own = own[::-1] if group.reverse else own
        sizes = {"launches": np.ones(n), "calls": np.ones(n), **group.sizes}
        phase = group.name if group.name in ("backward", "update") else "forward"
        labels.extend([(group.label[1], *group.label, phase, "embeddings")] * len(members))
        block = np.zeros((len(members), len(FEATURES)))
        for name, values in sizes.items():
            block[own - own.min(), FEATURES.index(name)] = values[members]
        features.append(block)
        for name, nbytes, write in group.touched:
            buffer = buffers.index(name) * n + (0 if name.startswith("all") else members)
            accesses.append(np.stack(np.broadcast_arrays(own, buffer, nbytes[members], write), axis=1))
        places.append(own)
    touched = np.concatenate(accesses)
    touched = touched[np.argsort(touched[:, 0], kind="stable")]
    return Graph(tuple(labels), np.concatenate(features), touched, tables), places
