"""What a shard of a table costs its rank: seconds by phase, bytes by message and by use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from perfkit.fitting import Fit
from perfkit.models.embedding import STATE, row_traffic
from perfkit.models.kernels import in_context
from perfkit.platform import Platform
from perfkit.prediction.cost import find_iteration, price
from perfkit.prediction.host import price_host
from perfkit.units import Array, steady
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph
from perfkit.workloads.tables import EmbeddingTable, TableSet
from perfkit.workloads.tape import ITEMSIZE
from perfkit.workloads.training import Training

__all__ = ["COLUMNS", "MEMORY", "RESOURCES", "SECONDS", "Curve", "Rates", "column", "project"]

#: What a shard adds to its rank, in seconds.
SECONDS = ("lookup", "pack", "update", "backward", "host")
#: What it adds to messages: pooled rows to exchange, partial sums to reduce inside a node, indices to receive [B].
MESSAGES = ("pooled", "partial", "indices")
#: What it takes of the memory [B].
MEMORY = ("weights", "state", "inputs", "outputs", "gradients")
COLUMNS = (*SECONDS, *MESSAGES, *MEMORY)
#: What a rank can run out of. Update and lookup follow each other from the last collective of an iteration to the first
#: of the next, so that the slowest rank counts by their sum.
RESOURCES: dict[str, tuple[str, ...]] = {
    "forward": ("lookup", "pack", "update"),
    "backward": ("backward",),
    "pooled": ("pooled",),
    "partial": ("partial",),
    "indices": ("indices",),
    "host": ("host",),
    "memory": MEMORY,
}
_PROJECTION = np.array([[float(name in parts) for parts in RESOURCES.values()] for name in COLUMNS])
_INDEX = 8.0  # torch's int64 indices and offsets
_NO_TABLE = EmbeddingTable(1, 1, pooling=1e-9)


def column(name: str) -> int:
    """Place of a column in the vectors of this module.

    Parameters
    ----------
    name : str
        One of `COLUMNS`.

    Returns
    -------
    index : int
        Its place [-].
    """
    return COLUMNS.index(name)


def project(costs: Array) -> Array:
    """Resources that costs come down to.

    Parameters
    ----------
    costs : array, shape (..., 13)
        Costs by `COLUMNS`, in seconds and bytes [-].

    Returns
    -------
    loads : array, shape (..., 7)
        Loads by `RESOURCES`, in seconds and bytes [-].
    """
    return costs @ _PROJECTION


class Curve:
    """Time of a message by its bytes, tabulated on a geometric grid; nothing to send takes no time.

    Parameters
    ----------
    nbytes : array
        Message sizes, rising [B].
    seconds : array
        Time of each [s].
    """

    def __init__(self, nbytes: Array, seconds: Array) -> None:
        self.nbytes, self.seconds = nbytes, seconds

    def __call__(self, nbytes: Array | float) -> Array:
        if np.ndim(nbytes):
            return np.where(np.asarray(nbytes) > 0, np.interp(nbytes, self.nbytes, self.seconds), 0.0)
        return np.asarray(np.interp(nbytes, self.nbytes, self.seconds) if nbytes > 0 else 0.0)

    def __add__(self, other: "Curve") -> "Curve":
        return Curve(self.nbytes, self.seconds + other.seconds)

    def shift(self, nbytes: float) -> "Curve":
        """Time that a longer message takes more than one of `nbytes`."""
        return Curve(self.nbytes, self(self.nbytes + nbytes) - self(nbytes)) if nbytes else self

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


@dataclass(frozen=True, eq=False)
class Rates:
    """Prices of one workload on one platform and number of ranks.

    Parameters
    ----------
    workload : DLRM or TableSet
        What is trained.
    platform : Platform
        On what.
    ranks : int
        Ranks that take part [-].
    footprint : float
        Distinct bytes that one rank touches in an iteration beside tables and their pooled rows [B].

    Notes
    -----
    A shard costs what `perfkit.predict` charges for its operations. What another shard on the same rank leaves of a
    cache is taken as on the average rank: all tables together compete for the caches of all ranks. So costs of shards
    add up.
    """

    workload: DLRM | TableSet
    platform: Platform
    ranks: int
    footprint: float = 0.0

    @cached_property
    def iteration(self) -> Fit | None:
        """What real iterations were found to add."""
        return find_iteration(self.platform, "dlrm", self.ranks)

    @cached_property
    def node(self) -> int:
        """Ranks of a node that take part [-]."""
        return min(self.platform.network.ranks_per_node, self.ranks)

    @cached_property
    def optimizer(self) -> str:
        """What updates the rows."""
        return self.workload.optimizer

    def times(self, graph: Graph, seconds: Array) -> tuple[Array, Array]:
        """Time of operations inside an iteration, and of the host where that is a device of its own.

        Parameters
        ----------
        graph : Graph
            Operations.
        seconds : array
            Their prices [s].

        Returns
        -------
        seconds, host : array
            Times [s].
        """
        whole = self.iteration
        if whole is not None and "per_operation" in whole:
            host = np.full(len(graph), whole["per_operation"])
        else:
            first, more = price_host(graph, self.platform)
            launch = self.platform.host["launch"].value if "launch" in self.platform.host else 0.0
            host = first + more + launch * np.minimum(graph.column("launches"), 1.0)
        seconds = (whole["scale"] if whole else 1.0) * seconds
        return (seconds + host, 0.0 * host) if self.platform.device.kind == "cpu" else (seconds, host)

    def curve(self, operation: str, ranks: int, largest: float) -> Curve | None:
        """Time of a collective inside an iteration; None where the platform has no model of it."""
        nbytes = steady(np.geomspace(64.0, max(2 * largest, 1e6), 640))
        if ranks == 1:
            return Curve(nbytes, np.zeros(len(nbytes)))
        try:
            time = self.platform.collective_time(operation, nbytes, ranks=ranks)
        except ValueError:
            return None
        found = self.platform.context
        context = found.get(f"collective.{operation}") or found.get("collective.all_reduce")
        time = in_context({"hot": time, "cold": 0 * time, "page_walks": 0 * time}, **(context if context else {}))
        whole = self.iteration
        if whole is not None:
            time = whole["scale"] * time + whole.get("per_collective", 0.0) + whole.get("per_resume", 0.0)
        return Curve(nbytes, steady(time))

    def _near(self, scale: float) -> Platform:
        """The platform with caches so large that all tables compete for them as those of one rank do for one."""
        platform = self.platform
        (l2, l3), pages = platform.cache_capacities, platform.page_entries
        sizes = {"l2": l2 * scale, "l3": l3 * scale, **({"pages": pages * scale} if pages < np.inf else {})}
        return replace(platform, context={**platform.context, "caches": Fit("caches", sizes)})

    def cost(
        self, parts: Mapping[int, EmbeddingTable], *, share: float = 1.0, replicated: bool = False
    ) -> dict[int, Array]:
        """Cost of shards, one of each table at most.

        Parameters
        ----------
        parts : mapping of int to EmbeddingTable
            Shard by number of its table, as a table of its own.
        share : float, optional
            Part of the rows that each shard holds [-].
        replicated : bool, optional
            Whether every rank holds it, for its own samples, and its gradient is reduced.

        Returns
        -------
        costs : dict of int to array
            Costs by `COLUMNS`, in seconds and bytes, by number of the table [-].
        """
        given = self.workload.tables
        # A fused kernel of a GPU finds nothing of other tables in the caches; else all tables compete for them.
        apart = self.workload.embedding != "separate" and self.platform.device.kind != "cpu"
        members = list(parts) if apart else range(len(given))
        tables = [parts.get(n, given[n]) for n in members]
        bags = max(self.workload.batch // self.ranks, 1) if replicated else self.workload.batch
        scale = 1.0
        if not replicated:
            touched = np.array([min(given[n].rows, bags * given[n].pooling) * given[n].dim for n in members])
            kept = [share * t.dim / given[n].dim if n in parts else 1.0 for n, t in zip(members, tables, strict=True)]
            scale = self.ranks * float(touched @ kept) / float(touched.sum())
        copied = {place for place, n in enumerate(members) if n in parts} if replicated else set()
        times, sizes = self._time(tables, bags, scale, copied), _size(tables, bags, self, replicated)
        times = steady(times)  # a search that weighs them goes the same way everywhere
        return {n: np.concatenate([times[i], sizes[i]]) for i, n in enumerate(members) if n in parts}

    def _time(self, tables: Sequence[EmbeddingTable], bags: int, scale: float, replicated: set[int]) -> Array:
        """Seconds of each table by `SECONDS`."""
        copied = len(replicated) == len(tables)
        # the launch of a fused kernel belongs to none of its tables: see `launch`
        launched = self.workload.embedding != "separate" and (copied or not replicated)
        tables = [_NO_TABLE, *tables] if launched else tables
        replicated = set(range(len(tables))) if copied else replicated
        graph = self._record(tables, bags, scale, replicated)
        costs = price(graph, self._near(scale), dtype=getattr(self.workload, "dtype", "fp32"))
        seconds, host = self.times(graph, costs.seconds)
        out = np.zeros((len(tables), len(SECONDS)))
        dense = np.array([t.rows * t.dim * (i in replicated or not self._sparse) for i, t in enumerate(tables)], float)
        wide = np.array([t.dim for t in tables], dtype=float)
        number, alone = graph.column("table").astype(int), iter(np.flatnonzero(dense))
        names = {"embedding_forward": "lookup", "embedding_backward": "backward", "embedding_update": "update"}
        for i, (name, kind, _, phase, _) in enumerate(graph.labels):
            if kind in names:
                own: Any = number[i]
                out[own, column(names[kind])] += seconds[i]
                out[own, column("host")] += host[i]
            elif name == "add_":  # the update of one table
                own = next(alone)
                out[own, column("update")] += seconds[i]
                out[own, column("host")] += host[i]
            elif kind != "collective" and name != "everything else":  # one kernel for all tables
                by, place = (wide, "pack") if phase == "forward" else (dense, "update")
                launch = float(self.launch[column("pack")])
                out[:, column(place)] += max(seconds[i] - launch, 0.0) * by / max(by.sum(), 1.0)
        itemsize = np.array([t.itemsize for t in tables], dtype=float)
        growth = _state_traffic(wide, itemsize, self.optimizer, 64.0 if self.platform.device.kind == "cpu" else 32.0)
        if copied or self.workload.embedding != "exact":  # whose traffic is that of the optimizer already
            out[:, column("backward" if launched and not copied else "update")] *= growth
        return out[1:] if launched else out

    @cached_property
    def launch(self) -> Array:
        """What a rank pays once, however many tables it holds: kernels that work on all of them, by `SECONDS` [s]."""
        graph = self._record([_NO_TABLE], self.workload.batch, 1.0, set())
        prices = price(graph, self.platform, dtype=getattr(self.workload, "dtype", "fp32")).seconds
        seconds, host = self.times(graph, prices)
        out, fused = np.zeros(len(SECONDS)), self.workload.embedding != "separate"
        names = {"embedding_forward": "lookup", "embedding_backward": "backward", "copy": "pack"}
        for (name, kind, _, _, _), time, issue in zip(graph.labels, seconds, host, strict=True):
            if name != "everything else" and (kind == "copy" or (fused and kind in names)):
                out[column(names[kind])], out[column("host")] = time, out[column("host")] + issue
        return out

    @property
    def _sparse(self) -> bool:
        return self.workload.sparse or self.workload.embedding != "separate"

    def _record(self, tables: Sequence[EmbeddingTable], bags: int, scale: float, replicated: set[int]) -> Graph:
        """Operations on the tables of all ranks, as if one rank ran them, the rest of the iteration in between."""
        dtype = getattr(self.workload, "dtype", None)
        tape = Training(ITEMSIZE[dtype] if dtype else tables[-1].itemsize, mixed=getattr(self.workload, "mixed", False))
        tape.module = "embeddings"
        copied = len(replicated) == len(tables)
        if self.workload.embedding != "separate" and (copied or not replicated):
            exact = self.optimizer if self.workload.embedding == "exact" else ""
            pooled = tape.fused_embeddings(tables, bags, exact=exact, dense=copied)
        else:
            pooled = [
                tape.embedding_bag(t, bags, sparse=self._sparse and i not in replicated) for i, t in enumerate(tables)
            ]
        send = tape.cat(pooled)
        rest = tape.tensor(int(self.footprint * scale), itemsize=1)
        tape.emit("everything else", "copy", [rest], [], "everything else")
        back = tape.tensor(*send.shape)
        tape.collective("all_to_all", [], [back], 0.0)
        tape.arrive(send, back)
        tape.backward()
        if replicated:
            weights = tape.trained
            tape.local.difference_update(weights[i] for i in replicated)
            tape.all_reduce_gradients()
        lists = self.platform.device.kind != "cpu" and (bool(replicated) or not self._sparse)
        tape.step("sgd", lists=lists)
        return tape.graph()


def _state_traffic(dim: Array, itemsize: Array, optimizer: str, granularity: float) -> Array:
    """Traffic of an update with its optimizer state, relative to plain SGD: gradient, weights and states."""
    values = itemsize * dim
    row = row_traffic(values, 1, granularity)
    state = granularity if optimizer == "rowwise_adagrad" else STATE[optimizer] * row
    return (values + _INDEX + 2.0 * (row + state)) / (values + _INDEX + 2.0 * row)


def _size(tables: Sequence[EmbeddingTable], bags: int, rates: Rates, replicated: bool) -> Array:
    """Bytes of each table by `MESSAGES` and `MEMORY`."""
    rows, dim, pooling, item = np.array([(t.rows, t.dim, t.pooling, t.itemsize) for t in tables], dtype=float).T
    lookups, weights, outputs = bags * pooling, rows * dim * item, bags * dim * item
    inputs = _INDEX * (lookups + bags)
    state = STATE[rates.optimizer] * weights + (item * rows if rates.optimizer == "rowwise_adagrad" else 0.0)
    if replicated or not (rates.workload.sparse or rates.workload.embedding != "separate"):
        gradients = outputs + weights
    elif rates.workload.embedding != "separate":
        gradients = outputs
    else:
        gradients = outputs + lookups * (dim * item + _INDEX)
    none = np.zeros(len(tables))
    pooled = none if replicated else outputs
    return np.stack([pooled, none, none if replicated else inputs, weights, state, inputs, outputs, gradients], axis=1)
