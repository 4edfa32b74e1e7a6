"""What has to be placed: time of an iteration from the loads of ranks, a bound that no placement can beat, memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from perfkit.ground.units import Array, check_choice, check_positive, check_type, steady
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.kernels import find_kernel
from perfkit.platform.platform import Platform
from perfkit.prediction.result import predict
from perfkit.sharding.costs import AT, COLUMNS, MEMORY, Costs, Curve
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import TableSet

#: Whole iterations, or the seconds of the tables on each rank alone.
OBJECTIVES = ("iteration", "additive")
#: Resources of a rank, with their costs. Update and lookup have no collective between them, so their sum counts.
RESOURCES: dict[str, tuple[str, ...]] = {
    "forward": ("lookup", "pack", "update"),
    "backward": ("backward",),
    "pooled": ("pooled",),
    "partial": ("partial",),
    "indices": ("indices",),
    "rows": ("summed",),
    "gradients": ("averaged",),
    "host": ("host",),
    "memory": MEMORY,
}
_FORWARD, _BACKWARD, _POOLED, _PARTIAL, _INDICES, _ROWS, _GRADIENTS, _HOST, _MEMORY = range(len(RESOURCES))
#: Messages: place of the resource, what the part of the time is called, and what is sent.
MESSAGES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "indices": (_INDICES, "exchange of indices", ("all_to_all",)),
    "pooled": (_POOLED, "exchange of pooled rows", ("all_to_all", "all_to_all")),
    "partial": (_PARTIAL, "partial sums inside nodes", ("reduce_scatter", "all_gather")),
    "rows": (_ROWS, "partial sums", ("reduce_scatter", "all_gather")),
    "gradients": (_GRADIENTS, "gradients of copies", ("all_reduce",)),
}
_ADDED = {"forward": ("lookup", "pack", "update", "backward"), "memory": MEMORY}
_NOTHING = Curve(np.array([0.0, 1e18]), np.zeros(2))


@dataclass(frozen=True, eq=False)
class Options:
    """Options to place tables, sorted by table: number of the table, kind, shards and their columns, and costs.

    An option has 0 parts where every rank gets one, and a width where columns are split. `hot` comes on top for the
    shard with the most popular row, which is on rank `home` for a table that is on all ranks.
    """

    table: np.ndarray
    kind: np.ndarray
    parts: np.ndarray
    width: np.ndarray
    shard: Array
    hot: Array
    home: np.ndarray

    def total(self, ranks: int) -> Array:
        """Costs on all ranks together."""
        return np.where(self.parts, self.parts, ranks)[:, None] * self.shard + self.hot


@dataclass(frozen=True, eq=False)
class Objective:
    """Time of an iteration, from the loads of ranks and the time `dense` and host time of everything else [s].

    .. math:: t = \\max\\left(t_0 + \\max_r f_r + \\max_r b_r + \\sum_m t_m,\\; \\max_r h_r\\right)

    Lookup and update f and backward b of the slowest rank, messages m one after another, host h. Ranks wait for every
    collective at once; an exchange takes the time of its fullest rank. The time is within a few percent of
    `perfkit.predict`, except for a host-bound DLRM with tables on few ranks, because the host time of sending ranks
    assumes tables on all. The correction is predicted over modelled time of one plan; it holds the overlap of
    collectives.
    """

    kind: str
    dense: float = 0.0
    host: float = 0.0
    correction: float = 1.0
    curves: Mapping[str, Curve] = field(default_factory=dict)

    @property
    def sums(self) -> Mapping[str, tuple[str, ...]]:
        """Costs by the resource that they load."""
        return _ADDED if self.kind == "additive" else RESOURCES

    def loads(self, costs: Array) -> Array:
        """Loads by resource; an additive objective has one, in place of the first."""
        return costs @ np.array([[float(name in self.sums.get(part, ())) for part in RESOURCES] for name in COLUMNS])

    def messages(self, peaks: Array) -> dict[str, Array]:
        """Time of each kind of message [s]."""
        return {name: self.curves[name](peaks[..., at]) for name, (at, *_) in MESSAGES.items() if name in self.curves}

    def time(self, peaks: Array) -> Array:
        """Time of an iteration from the loads of the fullest rank of each resource [s]."""
        chain = self.dense + peaks[..., _FORWARD] + peaks[..., _BACKWARD] + sum(self.messages(peaks).values())
        return self.correction * np.maximum(chain, self.host + peaks[..., _HOST])

    def parts(self, costs: Array) -> dict[str, float]:
        """Parts that sum to the time, from the costs of ranks: phases of the slowest rank, messages, the rest [s]."""
        loads = self.loads(costs)
        peaks = loads.max(axis=0)
        total = float(self.time(peaks))
        found = {
            name: float(costs[np.argmax(loads[:, place]), AT[name]])
            for place, resource in enumerate(RESOURCES) if resource in ("forward", "backward")
            for name in self.sums.get(resource, ())
        }  # fmt: skip
        found |= {MESSAGES[name][1]: float(time) for name, time in self.messages(peaks).items()}
        if self.dense:
            found["everything else"] = self.dense
        found = {name: self.correction * part for name, part in found.items()}
        found["host"] = total - sum(found.values())
        return {name: part for name, part in found.items() if abs(part) > 1e-12 * total}

    def bound(self, options: Options, ranks: int) -> tuple[float, list[np.ndarray]]:
        """Time that no plan made of these options can beat, and the options of each table that would come closest.

        Notes
        -----
        The fullest rank carries at least the average of every resource. The option of each table is chosen under a
        price per exchanged byte (Lagrangian relaxation), with lines below the curves of the messages on short
        intervals of the exchange. Some rank also carries the largest shard.
        """
        starts = np.flatnonzero(np.diff(options.table, prepend=-1))
        average = self.loads(options.total(ranks)) / ranks
        alone = np.maximum(self.loads(options.shard + options.hot), np.minimum.reduceat(average, starts).sum(axis=0))
        largest = float(np.minimum.reduceat(self.time(alone), starts).max())
        shared = self._average(average, starts)
        host = float(np.minimum.reduceat(average[:, _HOST], starts).sum())
        best = max(min(time for time, _ in shared), largest, self.correction * (self.host + host))
        return best, [choice for _, choice in sorted(shared, key=lambda pair: pair[0])]

    def _average(self, average: Array, starts: np.ndarray) -> list[tuple[float, np.ndarray]]:
        """Time of an iteration if every table could be divided at will, with and without each way of reducing."""
        curves = {**dict.fromkeys(MESSAGES, _NOTHING), **self.curves}
        seconds = average[:, _FORWARD] + average[:, _BACKWARD]
        for name, place in (("indices", _INDICES), ("partial", _PARTIAL)):
            most = float(np.maximum.reduceat(average[:, place], starts).sum())
            seconds = seconds + curves[name].slope_below(most) * average[:, place]
        found, sizes = [], {"rows": average[:, _ROWS], "gradients": average[:, _GRADIENTS]}
        for used in ((), ("rows",), ("gradients",), ("rows", "gradients")):
            barred = np.any([sizes[name] > 0 for name in sizes if name not in used] or [seconds < 0], axis=0)
            cost, fixed = np.where(barred, np.inf, seconds), 0.0
            for name in used:
                most = float(np.maximum.reduceat(sizes[name], starts).sum())
                least = float(np.min(sizes[name], initial=most, where=sizes[name] > 0))
                start, slope = curves[name].line_below(least, most) if most else (0.0, 0.0)
                cost, fixed = cost + slope * sizes[name], fixed + start
            if np.isfinite(np.minimum.reduceat(cost, starts)).all():
                time, price = _exchange(curves["pooled"], cost, average[:, _POOLED], starts)
                priced, ends = cost + price * average[:, _POOLED], np.append(starts[1:], len(cost))
                choice = [low + int(np.argmin(priced[low:high])) for low, high in zip(starts, ends, strict=True)]
                found.append((self.correction * (self.dense + fixed + time), np.array(choice)))
        return found


def _exchange(curve: Curve, cost: Array, pooled: Array, starts: np.ndarray) -> tuple[float, float]:
    """Least cost with the exchange of pooled rows, bounded interval by interval; and what a byte of it costs."""
    high = float(np.maximum.reduceat(np.where(np.isfinite(cost), pooled, 0.0), starts).sum())
    if not high or not curve.seconds.any():
        return float(np.minimum.reduceat(cost, starts).sum()), 0.0
    edges = np.concatenate([[0.0], steady(np.geomspace(high / 1e3, high, 40))])
    lines = [curve.line_below(max(low, 1.0), up) for low, up in pairwise(edges)]
    steep = max(slope for _, slope in lines)
    prices = np.unique([0.0, *(slope for _, slope in lines), *steady(np.geomspace(1e-3 * steep, 1e2 * steep, 80))])
    prices = np.concatenate([-prices[:0:-1], prices])
    least = np.array([np.minimum.reduceat(cost + p * pooled, starts).sum() for p in prices])
    bounds = []
    for (start, slope), low, up in zip(lines, edges, edges[1:], strict=False):
        start = min(start, 0.0) if low == 0 else start  # nothing at all may be exchanged
        slack = prices - slope
        values = start + least - np.where(slack > 0, slack * up, slack * low)
        bounds.append((float(values.max()), float(prices[np.argmax(values)])))
    return min(bounds)


@dataclass(frozen=True, eq=False)
class Problem:
    """What has to be placed and what that costs; memory of a rank for tables, and what everything else takes [B]."""

    costs: Costs
    objective: Objective
    capacity: float
    reserved: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds whose messages the platform has a model for."""
        if self.objective.kind == "additive":
            return ("table_wise", "column_wise")
        needs = {"row_wise": "rows", "table_row_wise": "partial", "data_parallel": "gradients"}
        known = [kind for kind, name in needs.items() if name in self.objective.curves]
        return ("table_wise", "column_wise", "table_column_wise", *known)

    def spread(self, parts: Mapping[str, float]) -> float:
        """Standard deviation of the logarithm of a time from those of its parts, which err independently."""
        if self.costs.iteration is not None:
            return self.costs.iteration.spread
        kernels = {"lookup": "forward", "backward": "backward", "update": "update"}
        found = {n: find_kernel(self.costs.platform.kernels, f"embedding_{kind}") for n, kind in kernels.items()}
        spreads = {name: pair[1].spread for name, pair in found.items() if pair}
        total = sum(parts.values())
        return float(np.hypot.reduce([spreads.get(name, 0.3) * part / total for name, part in parts.items()]))


def set_up(
    workload: DLRM | TableSet,
    platform: Platform | str | Path,
    ranks: int,
    *,
    memory: float | None = None,
    objective: str = "iteration",
    inputs: str = "local",
) -> Problem:
    """Make a placement problem of a workload on ranks of a platform; `memory` of a rank is in bytes."""
    check_type("workload", workload, DLRM | TableSet)
    where, ranks = load_platform(platform), int(check_positive("ranks", ranks, integer=True))
    check_choice("objective", objective, OBJECTIVES)
    check_choice("inputs", inputs, ("local", "exchanged"))  # who reads indices: ranks that need them, or any
    if ranks > where.network.ranks:
        raise ValueError(f"ranks is {ranks}; platform {where.name!r} has {where.network.ranks}; take fewer")
    if workload.batch % ranks:
        raise ValueError(f"batch is {workload.batch}; it must divide by the {ranks} ranks; take a multiple of {ranks}")
    capacity = _capacity(where) if memory is None else float(check_positive("memory", memory))
    costs, rest = Costs(workload, where, ranks), None
    if isinstance(workload, TableSet):
        reserved = 2 * workload.batch / ranks * sum(t.dim * t.itemsize for t in workload.tables)
    else:
        if ranks > 1:
            others = Plan.from_owners([1 + n % (ranks - 1) for n in range(len(workload.tables))], ranks=ranks)
            rest = workload.graphs(ranks, others, accelerator=costs.accelerated)[0]
            costs = replace(costs, footprint=rest.footprint)
        reserved = costs.footprint
    made = _time(costs, rest, inputs) if objective == "iteration" else Objective(objective)
    if objective == "iteration" and isinstance(workload, DLRM):
        made = replace(made, correction=_correct(workload, costs, made))
    return Problem(costs, made, capacity - reserved, reserved)


def _capacity(platform: Platform) -> float:
    """Memory of one rank; ranks of a CPU share that of their node [B]."""
    whole = platform.device.memory[-1].capacity if platform.device.memory else None
    if whole is None:
        raise ValueError(f"platform {platform.name!r} states no memory; give memory in bytes")
    return whole.value / (platform.network.ranks_per_node if platform.device.kind == "cpu" else 1)


def _time(costs: Costs, rest: Graph | None, inputs: str) -> Objective:
    """Time of an iteration, with messages at the platform's prices and the rest of a rank without tables."""
    tables, batch, dense, host, reduced = costs.workload.tables, costs.workload.batch, 0.0, 0.0, 0.0
    if rest is not None:
        dense, host = (float(values.sum()) for values in costs.times(rest))
        dense, host = (dense, host) if costs.accelerated else (dense + host, 0.0)
        sent = (rest[int(place)] for place in rest.collectives)
        reduced = sum(operation.features["nbytes"] for operation in sent if operation.name == "all_reduce")
    largest = dict.fromkeys(("pooled", "rows", "partial"), float(batch * sum(t.dim * t.itemsize for t in tables)))
    largest["gradients"] = float(sum(t.nbytes for t in tables)) + reduced
    if inputs == "exchanged":
        largest["indices"] = 8.0 * batch * sum(t.pooling + 1 for t in tables)
    found = {
        name: costs.curve(MESSAGES[name][2], costs.node if name == "partial" else costs.ranks, size)
        for name, size in largest.items()
    }
    curves = {name: curve for name, curve in found.items() if curve is not None}
    if "pooled" not in curves:  # says which operation and count is missing
        costs.platform.collective_time("all_to_all", 1e6, ranks=costs.ranks)
    dense, host = dense + float(costs.launch[:-1].sum()), host + float(costs.launch[-1])
    if reduced and "gradients" in curves:
        dense += float(curves["gradients"](reduced))
        nbytes, curve = curves["gradients"].nbytes, curves["gradients"]  # what a longer message takes more
        curves["gradients"] = Curve(nbytes, curve(nbytes + reduced) - curve(reduced))
    return Objective("iteration", dense=float(steady(dense)), host=float(steady(host)), curves=curves)


def _correct(workload: DLRM, costs: Costs, objective: Objective) -> float:
    """Predicted over modelled time of a plan of whole tables, balanced by their seconds."""
    loads = objective.loads(costs.shards(range(len(workload.tables)), "table_wise")[0])
    seconds, carried, owners = loads[:, 0] + loads[:, 1], np.zeros(costs.ranks), np.zeros(len(loads), dtype=int)
    for table in np.argsort(-seconds, kind="stable"):
        owners[table] = np.argmin(carried)
        carried[owners[table]] += seconds[table]
    total = np.zeros((costs.ranks, loads.shape[1]))
    np.add.at(total, owners, loads)
    local = replace(objective, curves={name: c for name, c in objective.curves.items() if name != "indices"})
    modelled = float(local.time(total.max(axis=0)))
    with keep_quiet():
        plan = Plan.from_owners(owners.tolist(), ranks=costs.ranks)
        predicted = predict(workload, costs.platform, ranks=costs.ranks, plan=plan).time
    return float(steady(predicted / modelled)) if modelled else 1.0
