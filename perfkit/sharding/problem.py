"""The placement problem: time of an iteration from the loads of ranks, a bound on it, memory and
constraints."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, check_choice, check_positive, check_type, steady
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.platform.kernels import find_kernel
from perfkit.platform.platform import Platform
from perfkit.prediction.predictor import predict
from perfkit.sharding.costs import AT, COLUMNS, MEMORY, Costs
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import SPLIT_BY_COLUMNS, Placement, Plan
from perfkit.workloads.sizes import alter, check_ranks
from perfkit.workloads.tables import TableSet

#: Resources of a rank, and the costs that load each. No collective is between update and lookup, so
#: their sum counts.
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
#: Index of each in an array of loads.
LOAD = {name: place for place, name in enumerate(RESOURCES)}
#: Messages by resource: name of their part of the time, and the collectives that send them.
MESSAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "indices": ("exchange of indices", ("all_to_all",)),
    "pooled": ("exchange of pooled rows", ("all_to_all", "all_to_all")),
    "partial": ("partial sums inside nodes", ("reduce_scatter", "all_gather")),
    "rows": ("partial sums", ("reduce_scatter", "all_gather")),
    "gradients": ("gradients of copies", ("all_reduce",)),
}
#: Objectives (the time of an iteration, or of the tables alone without messages), with the costs of
#: each resource.
OBJECTIVES: dict[str, dict[str, tuple[str, ...]]] = {
    "iteration": RESOURCES,
    "additive": {"forward": ("lookup", "pack", "update", "backward"), "memory": MEMORY},
}
#: Messages that all ranks reduce together.
_REDUCED = ("rows", "gradients")
#: Kinds of placement with messages of their own.
_NEEDS = {"row_wise": "rows", "table_row_wise": "partial", "data_parallel": "gradients"}
#: Kinds that keep a table inside one node.
NODE_KINDS = ("table_row_wise", "table_column_wise")
_HALVINGS = 12
#: What sums of floats in another order may differ by, relative to them [-].
_ROUNDING = 1e-9
_LOADS = {
    kind: np.array([[float(name in sums.get(part, ())) for part in RESOURCES] for name in COLUMNS])
    for kind, sums in OBJECTIVES.items()
}


@dataclass(frozen=True, eq=False)
class Curve:
    """Time of a message by its size, as a table [s]; 0 B take no time."""

    nbytes: Array
    seconds: Array

    def __call__(self, nbytes: Array | float) -> Array:
        return np.where(np.asarray(nbytes) > 0, np.interp(nbytes, self.nbytes, self.seconds), 0.0)

    def line_below(self, low: float, high: float) -> tuple[float, float]:
        """Intercept [s] and slope [s/B] of a line that stays below the curve from `low` to
        `high`."""
        sizes = np.unique(np.clip(self.nbytes, low, high))
        times = self(sizes)
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else 0.0
        return float(np.min(times - slope * sizes)), float(slope)

    def slope_below(self, high: float) -> float:
        """Slope of the steepest line through 0 that stays below the curve up to `high` [s/B].

        Between two sizes of the table the time is a straight line, and it is least per byte at one
        of its ends: at a size of the table, or at `high`.
        """
        sizes = np.unique(np.minimum(self.nbytes, max(high, 1.0)))
        return float(np.min(self(sizes) / np.maximum(sizes, 1.0)))

    def never_falling(self) -> "Curve":
        """The curve below this one that no larger message is faster on.

        A message of at least so many bytes takes at least this time, also where another protocol
        makes a larger message faster.
        """
        least = np.minimum.accumulate(self.seconds[::-1])[::-1]
        return Curve(self.nbytes, least)


_NOTHING = Curve(np.array([0.0, 1e18]), np.zeros(2))


class _Relaxed(NamedTuple):
    """A relaxed problem whose messages have sizes within `spans`.

    It has the least time, the option of each table, and how far the line is below the curve of each
    message [s].
    """

    time: float
    choice: np.ndarray
    spans: Mapping[str, tuple[float, float]]
    gaps: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Options:
    """Ways to place each table, sorted by table: number of the table, kind, number of shards, load
    of a shard.

    The number of shards is 0 where every rank has one. The shard with the most popular row carries
    `hot` in addition; that shard is on rank `home` if the table is on all ranks.
    """

    table: np.ndarray
    kind: np.ndarray
    parts: np.ndarray
    load: Array
    hot: Array
    home: np.ndarray

    @cached_property
    def starts(self) -> np.ndarray:
        """First option of each table."""
        return np.flatnonzero(np.diff(self.table, prepend=-1))

    def least(self, values: Array) -> Array:
        """Smallest value among the options of each table."""
        return np.asarray(np.minimum.reduceat(values, self.starts))

    def take(self, kinds: np.ndarray) -> np.ndarray:
        """First option of these kinds, one for each table; its first option where it has none."""
        chosen = self.starts.copy()
        for kind in np.unique(kinds):
            options = np.flatnonzero(self.kind == kind)[::-1]  # the first one is written last
            first = self.starts.copy()
            first[self.table[options]] = options
            chosen = np.where(kinds == kind, first, chosen)
        return chosen

    def total(self, ranks: int) -> Array:
        """Load of each option on all ranks together."""
        return np.where(self.parts, self.parts, ranks)[:, None] * self.load + self.hot


@dataclass(frozen=True, eq=False)
class Floors:
    """Least loads of every way to place each table, sorted by table: number of the table, kind, and
    loads by resource.

    No plan of that kind gives a rank less than `average` on the mean of all ranks, nor every rank
    less than `largest`: some rank carries at least that. Unlike `Options` they cover all that
    `perfkit.price_plan` takes: copies and splits of all tables, and columns of any width.
    """

    table: np.ndarray
    kind: np.ndarray
    average: Array
    largest: Array

    @cached_property
    def starts(self) -> np.ndarray:
        """First entry of each table."""
        return np.flatnonzero(np.diff(self.table, prepend=-1))

    def least(self, values: Array) -> Array:
        """Smallest value among the entries of each table."""
        return np.asarray(np.minimum.reduceat(values, self.starts))

    def cheapest(self, values: Array) -> np.ndarray:
        """First entry of the smallest value of each table."""
        smallest = np.flatnonzero(values == self.least(values)[self.table])
        return smallest[np.unique(self.table[smallest], return_index=True)[1]]

    def most(self, values: Array) -> float:
        """Sum over tables of the largest value among their entries."""
        return float(np.maximum.reduceat(values, self.starts).sum())


class Bound(NamedTuple):
    """Lower bound of the time [s], the kinds of the tables where it is reached, and whether the
    host sets it."""

    time: float
    kinds: np.ndarray
    by_host: bool


@dataclass(frozen=True, eq=False)
class Constraints:
    """What a placement must keep, with tables by number.

    Tables of one unit share a rank: `home` is the unit of each table. A unit in `pinned` has a
    given rank. Units of one group in `apart` do not share a rank. `allowed` says by kind which
    tables may be placed so.
    """

    home: np.ndarray
    pinned: Mapping[int, int] = field(default_factory=dict)
    apart: Sequence[tuple[int, ...]] = ()
    allowed: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def units(self) -> list[list[int]]:
        """Tables of each unit."""
        ends = np.cumsum(np.bincount(self.home))[:-1]
        return [own.tolist() for own in np.split(np.argsort(self.home, kind="stable"), ends)]

    def frees(self, table: int, rank: int, plan: Plan) -> bool:
        """Whether a shard of a table may go to a rank while the rest of the plan stays."""
        unit = self.home[table]
        others = {
            t
            for group in self.apart
            if unit in group
            for u in group
            if u != unit
            for t in self.units[u]
        }
        tied = unit in self.pinned or len(self.units[unit]) > 1
        return not tied and all(rank not in plan.placements[t].ranks for t in others)


@dataclass(frozen=True, eq=False)
class Problem:
    """What has to be placed, and what it costs.

    `memory` is that of a rank, `reserved` what everything else takes, and `capacity` what is left
    for tables, 0 where everything else alone does not fit [B]; `from_platform` says whether nobody
    gave the memory. The
    time of an iteration follows from the loads of the ranks; all work without tables takes `dense`
    on the device and `host` on the host [s]:

    .. math:: t = c \\max\\left(t_0 + \\max_r f_r + \\max_r b_r + \\sum_m t_m,\\; \\max_r
    h_r\\right)

    Here f is lookup and update and b is backward of a rank, t_m is the time of a message, and h is
    the time of the host. Messages follow one after another, each as long as that of the fullest
    rank. `calls` is the time that a host takes for a kind of message, however many tables it
    carries. `missing` says by kind of message why the platform cannot price it. The correction c is
    the predicted over the modelled time of one plan; it covers the overlap of collectives.

    `perfkit.predict` has one term that this time lacks: each host copies the pooled rows of every
    rank that sends some, and here as many ranks send as in that one plan, at most one for each
    table. A search could not bound a term that depends on the whole plan so closely. Where the host
    sets the time, both differ by that copy (20 µs on an H100) for every rank more or fewer, and
    otherwise by up to 2 %, and 6 % with tables split by rows, whose calls are counted for a pair of
    tables; a test holds this.
    """

    costs: Costs
    constraints: Constraints
    objective: str
    capacity: float
    reserved: float
    memory: float
    dense: float = 0.0
    host: float = 0.0
    correction: float = 1.0
    curves: Mapping[str, Curve] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    from_platform: bool = False

    def loads(self, costs: Array) -> Array:
        """Loads by resource; the additive objective puts all seconds into the first."""
        return costs @ _LOADS[self.objective]

    def messages(self, peaks: Array) -> dict[str, Array]:
        """Time of each kind of message [s]."""
        return {
            name: self.curves[name](peaks[..., LOAD[name]])
            for name in MESSAGES
            if name in self.curves
        }

    def time(self, peaks: Array) -> Array:
        """Time of an iteration from the largest load of each resource [s]."""
        forward, backward, host = (
            peaks[..., LOAD[name]] for name in ("forward", "backward", "host")
        )
        chain = self.dense + forward + backward + sum(self.messages(peaks).values())
        called = sum(time * (peaks[..., LOAD[name]] > 0) for name, time in self.calls.items())
        return self.correction * np.maximum(chain, self.host + host + called)

    def parts(self, costs: Array) -> dict[str, float]:
        """Parts that sum to the time, from the costs of ranks: phases of the slowest ranks,
        messages, the rest [s]."""
        loads, sums = self.loads(costs), OBJECTIVES[self.objective]
        peaks = loads.max(axis=0)
        slowest = {name: np.argmax(loads[:, LOAD[name]]) for name in ("forward", "backward")}
        found = {
            part: float(costs[rank, AT[part]])
            for name, rank in slowest.items()
            for part in sums.get(name, ())
        }
        found |= {MESSAGES[name][0]: float(time) for name, time in self.messages(peaks).items()}
        found = {
            name: self.correction * part
            for name, part in (found | {"everything else": self.dense}).items()
        }
        total = float(self.time(peaks))
        found["host"] = total - sum(found.values())
        return {name: part for name, part in found.items() if abs(part) > 1e-12 * total}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of placement that the platform can price: it has a model of their messages."""
        if self.objective == "additive":
            return ("table_wise", "column_wise")
        return (
            "table_wise",
            *SPLIT_BY_COLUMNS,
            *(kind for kind, name in _NEEDS.items() if name in self.curves),
        )

    @property
    def left_out(self) -> dict[str, str]:
        """Why a kind of placement cannot be priced on this platform and number of ranks, by
        kind."""
        reasons = {
            kind: self.missing[name] for kind, name in _NEEDS.items() if name in self.missing
        }
        if not 1 < self.costs.node < self.costs.ranks:
            reasons.pop("table_row_wise", None)  # the same as row_wise, or as whole tables
        return reasons

    def spread(self, parts: Mapping[str, float]) -> float:
        """Standard deviation of the logarithm of a time, from its parts with independent errors
        [-]."""
        if self.costs.iteration is not None:
            return self.costs.iteration.spread
        kernels = {"lookup": "forward", "backward": "backward", "update": "update"}
        found = {
            n: find_kernel(self.costs.platform.kernels, f"embedding_{kind}")
            for n, kind in kernels.items()
        }
        spreads = {name: pair[1].spread for name, pair in found.items() if pair}
        total = sum(parts.values())
        return float(
            np.hypot.reduce([spreads.get(name, 0.3) * part / total for name, part in parts.items()])
        )

    def bound(self, floors: Floors) -> "Bound":
        """Time that no plan of these kinds can beat, and the kinds that come near it.

        Notes
        -----
        The fullest rank carries at least the average load of every resource. Each table takes its
        best kind at a price per exchanged byte (Lagrangian relaxation), with lines below the curves
        of the messages on short intervals. Also, some rank carries the largest shard. Where a
        larger message is faster, the fullest rank is charged the fastest of the larger messages.
        """
        lowest = replace(
            self, curves={name: curve.never_falling() for name, curve in self.curves.items()}
        )
        relaxed = lowest._relax(floors)
        least = floors.least(floors.average).sum(axis=0)
        with_largest_shard = lowest.time(np.maximum(floors.largest, least))
        host = self.correction * (self.host + float(least[LOAD["host"]]))
        bound = max(relaxed[0].time, float(floors.least(with_largest_shard).max()), host)
        by_host = host > relaxed[0].time
        choice = relaxed[0].choice
        if by_host:
            choice = floors.cheapest(floors.average[:, LOAD["host"]])
        return Bound(bound * (1 - _ROUNDING), floors.kind[choice], by_host)

    def relax(self, options: Options) -> list[np.ndarray]:
        """Options of the tables in relaxed problems, the least time first."""
        average = options.total(self.costs.ranks) / self.costs.ranks
        floors = Floors(options.table, options.kind, average, options.load + options.hot)
        return [part.choice for part in self._relax(floors)]

    def _relax(self, floors: Floors) -> list[_Relaxed]:
        """Relaxed problems by the bytes that ranks reduce, the least time first: every table can be
        divided at will.

        The first ones are with and without each reduced message. The span of bytes with the least
        time is halved as long as its line is far below the curve.
        """
        average = floors.average
        curves = {name: self.curves.get(name, _NOTHING) for name in MESSAGES}
        sizes = {name: average[:, LOAD[name]] for name in MESSAGES}
        seconds = average[:, LOAD["forward"]] + average[:, LOAD["backward"]]
        for name in ("indices", "partial"):
            seconds = seconds + curves[name].slope_below(floors.most(sizes[name])) * sizes[name]

        def solve(spans: Mapping[str, tuple[float, float]], floor: float = 0.0) -> _Relaxed:
            lines = {name: curves[name].line_below(*span) for name, span in spans.items()}
            cost = seconds + sum(slope * sizes[name] for name, (_, slope) in lines.items())
            cost[np.any([sizes[name] > high for name, (_, high) in spans.items()], axis=0)] = np.inf
            if not np.isfinite(floors.least(cost)).all():
                return _Relaxed(np.inf, floors.starts, spans, {})
            time, price = _exchange(curves["pooled"], cost, sizes["pooled"], floors)
            time += self.dense + sum(start for start, _ in lines.values())
            choice = floors.cheapest(cost + price * sizes["pooled"])
            used = {
                name: float(np.clip(sizes[name][choice].sum(), *span))
                for name, span in spans.items()
            }
            gaps = {
                name: float(curves[name](used[name])) - np.dot(lines[name], (1, used[name]))
                for name in lines
            }
            return _Relaxed(max(self.correction * time, floor), choice, spans, gaps)

        most = {name: floors.most(sizes[name]) for name in _REDUCED}
        least = {
            name: np.min(sizes[name], initial=most[name], where=sizes[name] > 0)
            for name in _REDUCED
        }
        spans = [((0.0, 0.0), (least[name], most[name])) for name in _REDUCED]
        parts = [
            solve(dict(zip(_REDUCED, pair, strict=True))) for pair in itertools.product(*spans)
        ]
        for _ in range(_HALVINGS):
            parts.sort(key=lambda part: part.time)
            first = parts[0]
            name = max(first.gaps, key=lambda name: first.gaps[name], default="")
            if first.gaps.get(name, 0.0) < 1e-4 * first.time:
                break
            low, high = first.spans[name]
            middle = math.sqrt(max(low, 1.0) * high)
            parts[:1] = [
                solve({**first.spans, name: half}, first.time)
                for half in ((low, middle), (middle, high))
            ]
        return sorted((part for part in parts if part.time < np.inf), key=lambda part: part.time)


def _exchange(curve: Curve, cost: Array, pooled: Array, floors: Floors) -> tuple[float, float]:
    """Least time with the exchange of pooled rows [s], interval by interval; and the price of a
    byte in it [s/B]."""
    high = floors.most(np.where(np.isfinite(cost), pooled, 0.0))
    if not high or not curve.seconds.any():
        return float(floors.least(cost).sum()), 0.0
    edges = np.concatenate([[0.0], steady(np.geomspace(high / 1e3, high * (1 + 1e-6), 40))])
    start, slope = np.array(
        [curve.line_below(max(low, 1.0), up) for low, up in itertools.pairwise(edges)]
    ).T
    start[0] = min(start[0], 0.0)  # there may be no exchange
    # the slope is 0 where all messages are so short that they take the same time
    steepest = float(slope.max()) or 1.0
    prices = np.unique([0.0, *slope, *steady(np.geomspace(1e-3 * steepest, 1e2 * steepest, 80))])
    prices = np.concatenate([-prices[:0:-1], prices])
    least = np.array([floors.least(cost + price * pooled).sum() for price in prices])
    slack = prices[:, None] - slope
    values = start + least[:, None] - np.where(slack > 0, slack * edges[1:], slack * edges[:-1])
    place = int(np.argmin(values.max(axis=0)))
    return float(values[:, place].max()), float(prices[np.argmax(values[:, place])])


def set_up(
    workload: DLRM | TableSet,
    platform: Platform | str | Path,
    ranks: int,
    memory: float | None,
    kind: str,
    inputs: str,
) -> Problem:
    """Check what was given and make a placement problem of it; `memory` is that of a rank [B]."""
    check_type("workload", workload, DLRM | TableSet)
    where, ranks = load_platform(platform), check_ranks(workload.batch, ranks)
    check_choice("objective", kind, OBJECTIVES)
    check_choice("inputs", inputs, ("local", "exchanged"))
    if ranks > where.network.ranks:
        raise ValueError(
            f"ranks is {ranks}; platform {where.name!r} has {where.network.ranks}; take fewer"
        )
    capacity = where.memory_of_rank if memory is None else float(check_positive("memory", memory))
    if capacity is None:
        raise ValueError(f"platform {where.name!r} states no memory; give memory in bytes")
    costs, sent, dense, host = Costs(workload, where, ranks), 0.0, 0.0, 0.0
    if (rest := costs.rest) is not None:
        dense, host = float(costs.seconds(rest).sum()), float(costs.issue(rest).sum())
        if not costs.accelerated:  # the host computes as well
            dense, host = dense + host, 0.0
        collectives = [rest[int(place)] for place in rest.collectives]
        sent = sum(each.features["nbytes"] for each in collectives if each.name == "all_reduce")
    pooled = 2 * workload.batch / ranks * sum(t.dim * t.itemsize for t in workload.tables)
    reserved = pooled if isinstance(workload, TableSet) else costs.footprint
    constraints = Constraints(np.arange(len(workload.tables)))
    left = max(capacity - reserved, 0.0)
    problem = Problem(
        costs, constraints, kind, left, reserved, capacity, from_platform=memory is None
    )
    if kind == "additive":
        return problem
    curves, missing = _find_curves(costs, sent, inputs)
    *launch, issue = costs.launch()
    dense, host = dense + float(sum(launch)), host + float(issue)
    if sent and "gradients" in curves:
        dense += float(curves["gradients"](sent))
        nbytes, curve = curves["gradients"].nbytes, curves["gradients"]
        # of copies, in the same message
        curves["gradients"] = Curve(nbytes, curve(nbytes + sent) - curve(sent))
    problem = replace(
        problem,
        dense=float(steady(dense)),
        host=float(steady(host)),
        curves=curves,
        missing=missing,
    )
    if not isinstance(workload, DLRM):
        return problem
    return replace(
        problem, correction=_correct(workload, problem), calls=_count_calls(workload, costs)
    )


def _count_calls(workload: DLRM, costs: Costs) -> dict[str, float]:
    """Host time around the messages of each kind of placement, beyond what is counted by table
    [s]."""
    pair, found = alter(workload, {"tables": workload.tables[:1] * 2}), dict[str, float]()

    def issue(first: int | Placement) -> float:
        """Host time of the first rank with one table; the other table is on the second."""
        plan = Plan.from_owners([first, 1], ranks=costs.ranks)
        return float(costs.issue(pair.graphs(costs.ranks, plan, accelerator=True)[0]).sum())

    for kind, name in _NEEDS.items() if costs.accelerated and costs.ranks > 1 else ():
        ranks = range(costs.node if name == "partial" else costs.ranks)
        counted = float(costs.shards(np.zeros(1, dtype=int), kind)[0][0, AT["host"]])
        counted += 0.0 if name == "gradients" else float(costs.launch()[-1])
        more = issue(Placement(kind, tuple(ranks))) - issue(1) - counted
        found[name] = float(steady(max(more, 0.0)))
    return found


def _find_curves(
    costs: Costs, reduced: float, inputs: str
) -> tuple[dict[str, Curve], dict[str, str]]:
    """Curves of the messages that the platform has a model of, and why it has none of the others;
    `reduced` is the size of the dense gradients [B]."""
    tables, batch = costs.workload.tables, costs.workload.batch
    largest = dict.fromkeys(
        ("pooled", "rows", "partial"), float(batch * sum(t.dim * t.itemsize for t in tables))
    )
    largest["gradients"] = float(sum(t.nbytes for t in tables)) + reduced
    if inputs == "exchanged":
        largest["indices"] = 8.0 * batch * sum(t.pooling + 1 for t in tables)
    curves, missing = dict[str, Curve](), dict[str, str]()
    whole = costs.iteration or {"scale": 1.0}
    delay = whole.get("per_collective", 0.0) + whole.get("per_resume", 0.0)
    for name, size in largest.items():
        ranks, nbytes = (
            costs.node if name == "partial" else costs.ranks,
            np.geomspace(64.0, max(2 * size, 1e6), 640),
        )
        nbytes, seconds = steady(nbytes), np.zeros(len(nbytes))
        try:
            for operation in MESSAGES[name][1] if ranks > 1 else ():
                time = costs.platform.collective_time(operation, nbytes, ranks=ranks)
                seconds = seconds + steady(whole["scale"] * time + delay)
        except ValueError as error:  # this collective has no model on so many ranks
            if name == "pooled":
                raise
            missing[name] = str(error)
            continue
        curves[name] = Curve(nbytes, seconds)
    return curves, missing


def _correct(workload: DLRM, problem: Problem) -> float:
    """Predicted over modelled time of a plan of whole tables, balanced by their seconds [-]."""
    costs, local = (
        problem.costs,
        {name: c for name, c in problem.curves.items() if name != "indices"},
    )
    owners = np.zeros(len(workload.tables), dtype=int)
    loads = problem.loads(costs.shards(np.arange(len(owners)), "table_wise")[0])
    total = np.zeros((costs.ranks, loads.shape[1]))
    for table in np.argsort(-loads[:, :2].sum(axis=1), kind="stable"):
        owners[table] = np.argmin(total[:, :2].sum(axis=1))
        total[owners[table]] += loads[table]
    modelled = float(replace(problem, curves=local).time(total.max(axis=0)))
    with keep_quiet():
        plan = Plan.from_owners(owners.tolist(), ranks=costs.ranks)
        predicted = predict(workload, costs.platform, ranks=costs.ranks, plan=plan).time
    return float(steady(predicted / modelled)) if modelled else 1.0
