"""Prices of plans and results of searches, by rank and by table."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import polars

from perfkit.ground.forks import check_threads
from perfkit.ground.notes import write_warnings
from perfkit.ground.results import Picture, Sections, Table, Tabular
from perfkit.ground.units import (
    Array,
    check_choice,
    check_type,
    format_bytes,
    format_count,
    format_interval,
    format_ranks,
    format_time,
)
from perfkit.models.distributions import Uniform
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.estimates import check_time, find_interval
from perfkit.platform.host_memory import find_host_share
from perfkit.prediction.host_tables import note_other_device
from perfkit.sharding.costs import DEVICE_SECONDS, MEMORY, SECONDS, Cost, Costs
from perfkit.sharding.holders import describe_shared, list_holders
from perfkit.sharding.problem import MESSAGES, Problem, Resource, TimeParts
from perfkit.workloads.placement import Plan, Shard, warn_of_paths
from perfkit.workloads.placement_kinds import PlacementKind
from perfkit.workloads.tables import name_tables
from perfkit.workloads.torchrec_format import has_torchrec, make_constraints, make_sharding_plan

#: Change of a time that is not worth a word [-].
_SAME_TIME = 1e-3
#: Costs that every rank has of its own; those that all ranks reduce together are no part of them.
_COSTS_OF_RANK = [cost for cost in Cost if cost not in (Cost.SUMMED, Cost.AVERAGED)]
_BYTES = [cost for cost in _COSTS_OF_RANK if cost not in SECONDS]
#: A longer search is advised from this gap on, with so many times the work [-].
_WIDE_GAP, _LONGER = 0.01, 6
#: A gap is written without digits behind the point from here on [-].
_SHORT_GAP = 0.1


class PlanCosts(NamedTuple):
    """Costs of the shards of a plan.

    Parameters
    ----------
    table, rank : array of int
        Table and rank of each cost of a single rank [-].
    costs : array, shape (entries, 15)
        These costs by `perfkit.sharding.costs.Cost` [s or B].
    table_everywhere : array of int
        Table of each cost that every rank has [-].
    costs_everywhere : array, shape (entries, 15)
        These costs, for one rank [s or B].
    """

    table: np.ndarray
    rank: np.ndarray
    costs: Array
    table_everywhere: np.ndarray
    costs_everywhere: Array

    def by_rank(self, ranks: int) -> Array:
        """Costs of every rank, shape (ranks, 15) [s or B]."""
        total = np.zeros((ranks, len(Cost)))
        np.add.at(total, self.rank, self.costs)
        return total + self.costs_everywhere.sum(axis=0)

    def sum_copies(self, plan: Plan) -> Array:
        """Costs of all copied tables on each rank, shape (15,) [s or B]."""
        copied = np.array([placement.traits.is_copied for placement in plan.placements])
        total: Array = self.costs_everywhere[copied[self.table_everywhere]].sum(axis=0)
        return total

    def of_table(self, table: int, ranks: int) -> Array:
        """Costs of one table on every rank, shape (ranks, 15) [s or B]."""
        total = np.zeros((ranks, len(Cost)))
        is_of_table = self.table == table
        np.add.at(total, self.rank[is_of_table], self.costs[is_of_table])
        return total + self.costs_everywhere[self.table_everywhere == table].sum(axis=0)

    def by_table(self, tables: int, ranks: int) -> Array:
        """Costs of every table, summed over ranks, shape (tables, 15) [s or B]."""
        total = np.zeros((tables, len(Cost)))
        np.add.at(total, self.table_everywhere, self.costs_everywhere * ranks)
        np.add.at(total, self.table, self.costs)
        return total


class _Change(NamedTuple):
    """A move of a shard, and the plan after it.

    Parameters
    ----------
    overflow : float
        Bytes that ranks lack, all together [B].
    time : float
        Time of an iteration [s].
    table, source, target : int
        Table of the shard, and its rank before and after the move [-].
    """

    overflow: float
    time: float
    table: int
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class PlanPrice(Tabular):
    """Time and memory of a plan.

    Parameters
    ----------
    plan : Plan
        The placement.
    time : float
        Predicted time of an iteration; for the additive objective, of the tables on the slowest
        rank [s].
    parts : mapping of str to float
        Parts of the time by the work of the slowest ranks; they sum to `time` [s].
    costs : array, shape (ranks, 15)
        Seconds and bytes of every rank by `perfkit.sharding.costs.COLUMNS` [-].
    messages : mapping of str to float
        Size of each kind of message: of the rank with the most, or of all ranks where they reduce
        it together [B].
    capacity, reserved : float
        Memory of a rank for tables, 0 if everything else alone does not fit, and memory of a rank
        that everything else takes [B].
    spread : float
        Standard deviation of the logarithm of the time [-].
    warnings : tuple of str
        Tables whose shards have fewer columns than they should, a host that is too small for the
        tables of a rank, and a device on which tables in host memory were not measured.
    """

    report_title = "Time and memory of a plan"

    plan: Plan
    time: float
    parts: Mapping[str, float]
    costs: Array = field(repr=False)
    messages: Mapping[str, float] = field(repr=False)
    capacity: float = field(repr=False)
    reserved: float = field(repr=False)
    spread: float = field(repr=False)
    _problem: Problem = field(repr=False)
    _costs: PlanCosts = field(repr=False)
    _parts: TimeParts = field(repr=False)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_time(
            f"plan on {self._problem.costs.platform.name!r}",
            self.time,
            self.spread,
            self.parts.values(),
        )

    def interval(self, level: float = 0.8) -> tuple[float, float]:
        """Range that contains the measured time with a given probability.

        Parameters
        ----------
        level : float
            That probability, between 0 and 1 [-].

        Returns
        -------
        low, high : float
            Ends of the range [s].
        """
        return find_interval(self.time, self.spread, level)

    @property
    def kernels(self) -> dict[str, str]:
        """Kernel of each table, by name: where its rows lie, see `EmbeddingTable.kernel`."""
        tables = self._problem.costs.workload.tables
        return {name: table.kernel for name, table in zip(name_tables(tables), tables, strict=True)}

    @property
    def loads(self) -> Array:
        """Device time of the tables of every rank [s]."""
        return np.asarray(self.costs[:, DEVICE_SECONDS].sum(axis=1))

    @property
    def memory(self) -> Array:
        """Memory of the tables of every rank [B]."""
        return np.asarray(self.costs[:, MEMORY].sum(axis=1))

    @property
    def host_time(self) -> float:
        """What the device waits for the host [s]."""
        return self._parts.host

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return float(self.memory.max()) <= self.capacity * (1 + 1e-9)

    @property
    def bottleneck(self) -> str:
        """The largest part of the time, in words."""
        name = max(self.parts, key=lambda part: self.parts[part])
        return f"{name}, {self.parts[name] / self.time:.0%} of the time" if self.time else name

    def table(self) -> Table:
        """Time, messages and memory of every rank.

        Returns
        -------
        frame : polars.DataFrame
            rank, seconds of lookup, pack, update, backward and host [s], bytes of messages and of
            memory by use [B], and the share of the memory for tables in use [-]; null if there is
            no memory for tables.
        """
        data: dict[str, Any] = {"rank": list(range(len(self.costs)))}
        for cost in _COSTS_OF_RANK:
            data[_name_column(cost)] = self.costs[:, cost]
        shares: list[float | None] = [None] * len(self.costs)
        if self.capacity > 0:
            shares = (self.memory / self.capacity).tolist()
        return polars.DataFrame(
            data | {"memory_share": polars.Series(shares, dtype=polars.Float64)}
        )

    def next_move(self) -> "Move | None":
        """Find the best move of one shard to another rank; None if no move helps.

        Returns
        -------
        move : Move or None
            Table, ranks and the time after it. The move keeps the constraints that the search was
            given.
        """
        problem = self._problem
        loads = problem.find_loads(self.costs)
        # no move from another rank alone can shorten the time
        loaded = loads.max(axis=0) > 0
        fullest_ranks = loads.argmax(axis=0)[loaded]
        best_time, best_overflow = self.time * (1 - 1e-9), float(self._find_overflow(loads).sum())
        best: _Change | None = None
        for shard in np.flatnonzero(np.isin(self._costs.rank, fullest_ranks)):
            for change in self._list_changes(int(shard), loads):
                if (change.overflow, change.time) >= (best_overflow, best_time):
                    continue
                if problem.constraints.allow_move(change.table, change.target, self.plan):
                    best, best_overflow, best_time = change, change.overflow, change.time
        if best is None:
            return None
        name = name_tables(problem.costs.workload.tables)[best.table]
        gain = 1 - best.time / self.time
        return Move(name, best.source, best.target, best.time, gain)

    def _find_overflow(self, loads: Array) -> Array:
        """Bytes that each rank lacks under these loads [B]."""
        return np.maximum(loads[:, Resource.MEMORY] - self.capacity, 0)

    def _list_changes(self, shard: int, loads: Array) -> Iterator[_Change]:
        """Moves of a shard to each of the other ranks that may have it by its kind of placement."""
        problem = self._problem
        table, source = int(self._costs.table[shard]), int(self._costs.rank[shard])
        placement = self.plan.placements[table]
        kind = placement.traits
        if kind.is_everywhere or kind.fills_node:
            return
        shard_load = problem.find_loads(self._costs.costs[shard])
        loads_without = loads.copy()
        loads_without[source] -= shard_load
        loads_with = loads_without + shard_load
        times = problem.time(np.maximum(loads_without.max(axis=0), loads_with))
        overflow_without = self._find_overflow(loads_without)
        overflow_with = self._find_overflow(loads_with)
        others = overflow_without.sum() - overflow_without
        node_of_source = source // problem.costs.ranks_per_node
        for target in range(self.plan.ranks):
            same_node = target // problem.costs.ranks_per_node == node_of_source
            if kind.is_inside_node and not same_node:
                continue
            if target in placement.ranks:
                continue
            overflow = float(others[target] + overflow_with[target])
            yield _Change(overflow, float(times[target]), table, source, target)

    def chart(self) -> Picture:
        """Draw the time and memory of every rank, mark the slowest and the fullest, and name the
        next best move.

        Returns
        -------
        chart : altair.HConcatChart
            Ready to be shown or saved.
        """
        check_threads()
        from perfkit import plots

        correction = self._problem.correction
        columns = [polars.col("rank")]
        columns += [polars.col(_name_column(cost)) * correction for cost in DEVICE_SECONDS]
        for message in MESSAGES:
            seconds = self._parts.messages.get(message.resource, 0.0)
            if seconds > 0:
                columns.append(polars.lit(seconds).alias(f"{message.part}_s"))
        columns.append(polars.lit(self._parts.everything_else).alias("everything else_s"))
        columns += [polars.col(_name_column(cost)) for cost in MEMORY]
        frame = self.table().select(columns)
        move = self.next_move()
        notes = [
            self.bottleneck,
            f"next best move: {move}" if move else "no move of a single shard makes it shorter",
        ]
        return plots.plan_bars(frame, time=self.time, capacity=self.capacity, notes=notes)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        memory = format_bytes(float(self.memory.max()))
        if self.capacity > 0:
            memory += f" of {format_bytes(self.capacity)}"
            if not self.fits:
                memory += ", does not fit"
        else:
            of_rank = format_bytes(self._problem.memory)
            memory += f", does not fit: everything else alone takes {format_bytes(self.reserved)}"
            memory += f" of the {of_rank} of a rank"
        time = format_interval(self.time, *self.interval())
        return "; ".join([f"{time}, memory {memory}", self.bottleneck, *self.warnings])

    def __repr__(self) -> str:
        return f"PlanPrice({self.headline()})"


def _name_column(cost: Cost) -> str:
    """Name of the column of a cost in tables, with its unit."""
    return f"{cost.label}_bytes" if cost in _BYTES else f"{cost.label}_s"


class _ShardSize(NamedTuple):
    """What shards have in common that are priced together.

    Parameters
    ----------
    kind : PlacementKind
        Kind of placement.
    share : float
        Share of the columns of its table [-].
    """

    kind: PlacementKind
    share: float


def price_placements(costs: Costs, plan: Plan) -> PlanCosts:
    """Costs of the shards of a plan."""
    priced = [_price_alike(costs, plan, size, shards) for size, shards in _group(costs, plan)]
    return PlanCosts(*(np.concatenate(columns) for columns in zip(*priced, strict=True)))


def _group(costs: Costs, plan: Plan) -> list[tuple[_ShardSize, list[Shard]]]:
    """Shards of a plan that are priced together; one of the shards of a table on every rank stands
    for all."""
    tables = costs.workload.tables
    groups = dict[_ShardSize, list[Shard]]()
    for number, placement in enumerate(plan.placements):
        shards = placement.cut(tables[number], number)
        if placement.traits.is_everywhere:
            shards = shards[:1]
        for shard in shards:
            size = _ShardSize(placement.traits, shard.columns / tables[number].dim)
            groups.setdefault(size, []).append(shard)
    return list(groups.items())


def _price_alike(costs: Costs, plan: Plan, size: _ShardSize, shards: Sequence[Shard]) -> PlanCosts:
    """Costs of shards of one size."""
    table = np.array([shard.table for shard in shards])
    rank = np.array([shard.rank for shard in shards])
    shard_costs = costs.shards(table, size.kind.name, size.share)
    if size.kind.is_everywhere:
        # ranks are named in the order of the shards
        hot_row_ranks = []
        for number in table.tolist():
            hot_row_ranks.append(plan.placements[number].ranks[costs.hot_row_rank[number]])
        return PlanCosts(
            table, np.array(hot_row_ranks), shard_costs.hot_row, table, shard_costs.shard
        )
    # the first shard has the most popular row
    first_ranks = np.array([plan.placements[number].ranks[0] for number in table.tolist()])
    has_hot_row = rank == first_ranks
    total = shard_costs.shard + shard_costs.hot_row * has_hot_row[:, None]
    nothing = np.zeros((0, len(Cost)))
    return PlanCosts(table, rank, total, np.zeros(0, dtype=int), nothing)


def note_narrow_shards(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Tables whose shards have fewer columns than the constraints want, in words."""
    least = problem.constraints.min_columns
    if least is None:
        return ()
    tables = problem.costs.workload.tables
    narrow = []
    widths = []
    for number, placement in enumerate(plan.placements):
        shards = len(placement.ranks)
        if not placement.traits.splits_columns or shards == 1:
            continue
        width = min(placement.columns or (tables[number].dim // shards,))
        if width < least[number]:
            narrow.append(number)
            widths.append(width)
    if not narrow:
        return ()
    first = narrow[int(np.argmin(widths))]
    text = f"a shard of {name_tables(tables)[first]!r} has {min(widths)} columns, fewer than"
    text = f"{text} min_columns, {least[first]}"
    if len(narrow) > 1:
        text = f"{text}; so have shards of {format_count(len(narrow) - 1, 'other table')}"
    return (text,)


def _note_empty_shards(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Tables split by rows of which some ranks get none, in words."""
    tables = problem.costs.workload.tables
    empty: dict[int, int] = {}
    for number, placement in enumerate(plan.placements):
        if not placement.traits.splits_rows:
            continue
        # as in `Placement.cut`
        rows, blocks = tables[number].rows, len(placement.ranks)
        height = -(-rows // blocks)
        filled = -(-rows // height)
        if filled < blocks:
            empty[number] = blocks - filled
    if not empty:
        return ()
    first = next(iter(empty))
    text = (
        f"{format_count(empty[first], 'shard')} of {name_tables(tables)[first]!r} without rows: its "
        f"{tables[first].rows} rows are cut into {len(plan.placements[first].ranks)} blocks of one height; "
        "FBGEMM's kernels failed on such shards on a CPU; place it on fewer ranks, or in another way"
    )
    if len(empty) > 1:
        text = f"{text}; so have {format_count(len(empty) - 1, 'other table')}"
    return (text,)


def _note_full_host(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """The rank whose tables in host memory need more than its share of that, in words."""
    workload = problem.costs.workload
    tables = workload.tables
    if not any(table.host_bytes for table in tables):
        return ()
    copies = 1 + find_optimizer(workload.table_optimizer).states
    of_rank = np.zeros(plan.ranks)
    for number, placement in enumerate(plan.placements):
        table = tables[number]
        if not table.host_bytes:
            continue
        for shard in placement.cut(table, number):
            nbytes = shard.rows * (shard.columns * table.itemsize + table.scale_bytes)
            of_rank[shard.rank] += copies * nbytes
    share = find_host_share(problem.costs.platform, plan.ranks)
    fullest = int(np.argmax(of_rank))
    if of_rank[fullest] <= share:
        return ()
    return (
        f"tables and states of rank {fullest} in host memory need {format_bytes(of_rank[fullest])} of the "
        f"{format_bytes(share)} that a rank has of its host; take more ranks, fewer tables there, or "
        "state a host with more memory by .with_host_memory(capacity=...)",
    )


def price_checked_plan(problem: Problem, plan: Plan) -> PlanPrice:
    """Price a plan that fits the problem."""
    plan_costs = price_placements(problem.costs, plan)
    costs = plan_costs.by_rank(plan.ranks)
    peaks = problem.find_loads(costs).max(axis=0)
    parts = problem.break_down(costs)
    kinds_of_messages = {message.resource for message in MESSAGES}
    sizes = {
        resource.label: float(peaks[resource])
        for resource in Resource
        if resource in kinds_of_messages
    }
    return PlanPrice(
        plan,
        float(problem.time(peaks)),
        parts.by_name(),
        costs,
        sizes,
        problem.capacity,
        problem.reserved,
        problem.estimate_spread(parts, plan_costs.sum_copies(plan)),
        problem,
        plan_costs,
        parts,
        (
            *note_narrow_shards(problem, plan),
            *_note_empty_shards(problem, plan),
            *_note_full_host(problem, plan),
            *note_other_device(problem.costs.workload.tables, problem.costs.platform),
        ),
    )


class Move(NamedTuple):
    """A move of one shard from one rank to another.

    Parameters
    ----------
    table : str
        The table of the shard.
    source, target : int
        Rank before and after the move [-].
    time : float
        Time of the plan after the move [s].
    gain : float
        Share of the time that the move saves; negative if it costs time but makes room [-].
    """

    table: str
    source: int
    target: int
    time: float
    gain: float

    def __str__(self) -> str:
        change = f"{abs(self.gain):.1%} {'less' if self.gain >= 0 else 'more'}"
        move = f"{self.table} from rank {self.source} to rank {self.target}"
        return f"{move}: {format_time(self.time)}, {change}"


def _write_gap(gap: float) -> str:
    """A gap in words, with the digits that mean something."""
    return f"{gap:.0%}" if gap >= _SHORT_GAP else f"{gap:.2%}"


@dataclass(frozen=True, eq=False)
class ShardingResult(Tabular):
    """Placement of embedding tables that a search found.

    Parameters
    ----------
    plan : Plan
        The placement.
    prediction : PlanPrice
        Time and memory of the placement.
    bound : float
        Lower bound: no plan that keeps the constraints and can be priced takes less time [s].
    objective : str
        Time that was minimized: ``iteration`` or ``additive``.
    work : float
        Work of the search, counted by its steps [s].
    interrupted : bool
        Whether Ctrl-C ended the search early.
    baselines : mapping of str to PlanPrice or None
        Prices of the rules of thumb, see `perfkit.sharding.planner.BASELINES`; None for one that
        finds no room.
    warnings : tuple of str
        Kinds of placement that were not tried although nobody forbade them, and why.
    seconds : float
        Work that the search might take [s].
    steps : int, optional
        Steps that it might take in place of `seconds` [-].
    bound_of_any_width : float, optional
        Lower bound if shards might have any number of columns: `min_columns` costs at most what the
        time is above it. None if `min_columns` holds no table back [s].
    joined : tuple of str
        Small tables that are whole or copied although the search found shards of them faster.
    given_up : float
        How much longer the plan takes because of that [s].
    are_kernels_chosen : bool
        Whether the search put tables into host memory: the bound holds for plans with the same
        kernels.
    has_stalled : bool
        Whether the second half of the search found nothing better, so that a longer one hardly would;
        False with more than 20 tables, where that tells little.
    """

    report_title = "Placement of embedding tables that a search found"

    plan: Plan
    prediction: PlanPrice
    bound: float
    objective: str
    work: float
    interrupted: bool
    baselines: Mapping[str, PlanPrice | None] = field(repr=False)
    warnings: tuple[str, ...] = ()
    seconds: float = 1.0
    steps: int | None = None
    bound_of_any_width: float | None = None
    joined: tuple[str, ...] = ()
    given_up: float = 0.0
    are_kernels_chosen: bool = False
    has_stalled: bool = False

    @property
    def _limits(self) -> str:
        """What the bound holds for, in words."""
        if self.are_kernels_chosen:
            return "within these limits and with these kernels of tables"
        return "within these limits"

    @property
    def time(self) -> float:
        """Predicted time of an iteration with this plan, that of `prediction` [s]."""
        return self.prediction.time

    @property
    def cost_of_min_columns(self) -> float:
        """What `min_columns` costs at most: the best plan without it is no more than this faster
        [s]."""
        if self.bound_of_any_width is None:
            return 0.0
        return self.prediction.time - self.bound_of_any_width

    @property
    def cost_of_limits(self) -> float:
        """What `min_columns` and whole small tables cost at most, together [s]."""
        if self.bound_of_any_width is None:
            return self.given_up
        return self.prediction.time - self.bound_of_any_width

    @property
    def longer_search(self) -> str | None:
        """The argument of a search that may come closer to the bound; None if the plan is close to
        it, or the search has stalled."""
        if self.gap < _WIDE_GAP or self.has_stalled:
            return None
        if self.steps is not None:
            return f"steps={_LONGER * self.steps}"
        return f"seconds={_LONGER * self.seconds:g}"

    @property
    def kernels(self) -> dict[str, str]:
        """Kernel of each table, by name: where its rows lie, see `EmbeddingTable.kernel`."""
        return self.prediction.kernels

    @property
    def gap(self) -> float:
        """Time above the lower bound, relative to it: the best plan is at most this much faster
        [-]."""
        return self.prediction.time / self.bound - 1 if self.bound else 0.0

    def table(self) -> Table:
        """Placement and cost of every table.

        Returns
        -------
        frame : polars.DataFrame
            table, kind, ranks as text in the order of the shards, rows [-], dim [-], pooling [-], shards [-]; device_s, what
            devices take to look it up, to pool and to update it [s], and memory_bytes [B], both summed over ranks.
        """
        price, placements = self.prediction, self.plan.placements
        tables = price._problem.costs.workload.tables
        costs = price._costs.by_table(len(tables), self.plan.ranks)
        return polars.DataFrame(
            {
                "table": name_tables(tables),
                "kind": [placement.kind for placement in placements],
                "ranks": [format_ranks(placement.ranks) for placement in placements],
                "rows": [table.rows for table in tables],
                "dim": [table.dim for table in tables],
                "pooling": [float(table.pooling) for table in tables],
                "shards": [len(placement.ranks) for placement in placements],
                "device_s": costs[:, DEVICE_SECONDS].sum(axis=1),
                "memory_bytes": costs[:, MEMORY].sum(axis=1),
            }
        )

    def chart(self) -> Picture:
        """Draw the time and memory of every rank, see `PlanPrice.chart`.

        Returns
        -------
        chart : altair.HConcatChart
            Ready to be shown or saved.
        """
        return self.prediction.chart()

    def place(self, name: str) -> PlanPrice | None:
        """Place the same tables by a rule of thumb.

        Parameters
        ----------
        name : str
            One of `baselines`.

        Returns
        -------
        price : PlanPrice or None
            Its plan and price; None if a table finds no rank with room.
        """
        return self.baselines[check_choice("name", name, self.baselines)]

    def compare(self) -> Table:
        """Compare the plan with the rules of thumb.

        Returns
        -------
        frame : polars.DataFrame
            method, time_s [s], gap to the bound [-], and ratio to the time of the search's plan
            [-].
        """
        rows: list[dict[str, Any]] = []
        for name, price in {"search": self.prediction, **self.baselines}.items():
            row: dict[str, Any] = {"method": name, "time_s": None, "gap": None, "ratio": None}
            if price is not None:
                row["time_s"] = price.time
            if price is not None and price.time:
                row["gap"] = price.time / self.bound - 1
                row["ratio"] = price.time / self.prediction.time
            rows.append(row)
        return polars.DataFrame(
            rows, schema={"method": str, "time_s": float, "gap": float, "ratio": float}
        )

    def by_rank(self) -> Table:
        """Work and memory of every rank in short; `PlanPrice.table` has more.

        Returns
        -------
        frame : polars.DataFrame
            rank, tables [-], lookup_s, backward_s, update_s [s], memory_bytes [B] and their share
            of the memory for tables [-].
        """
        check_threads()
        tables_of_rank = np.zeros(self.plan.ranks, dtype=int)
        for placement in self.plan.placements:
            tables_of_rank[list(placement.ranks)] += 1
        return (
            self.prediction.table()
            .with_columns(
                tables=polars.Series(tables_of_rank),
                memory_bytes=polars.Series(self.prediction.memory),
            )
            .select(
                "rank",
                "tables",
                "lookup_s",
                "backward_s",
                "update_s",
                "memory_bytes",
                "memory_share",
            )
        )

    def holders(self) -> list[Sequence[str]]:
        """Which rank holds which tables, as rows of text with their heads first.

        Returns
        -------
        rows : list of sequence of str
            rank, memory of its tables, time of its device, and the tables that it has and others have not.
        """
        price = self.prediction
        names = name_tables(price._problem.costs.workload.tables)
        seconds = price.costs[:, DEVICE_SECONDS].sum(axis=1)
        return list_holders(names, self.plan.placements, seconds, price.memory)

    def describe_shared(self) -> list[str]:
        """Say which tables all ranks share or copy, a line for each kind of placement."""
        names = name_tables(self.prediction._problem.costs.workload.tables)
        return describe_shared(names, self.plan.placements, self.plan.ranks)

    def to_torchrec(
        self,
        *,
        module: str | None = None,
        ranks_per_node: int | None = None,
        device: str = "cuda",
        pooled: bool | None = None,
        plain: bool = False,
    ) -> Any:
        """The plan as ``DistributedModelParallel(plan=...)`` of TorchRec takes it: a ``ShardingPlan``
        where torchrec is installed.

        `Plan.to_torchrec` gives a dictionary in any case, as ``plain=True`` does here.

        Parameters
        ----------
        module : str, optional
            Path of the embedding collection in the model, see `Plan.to_torchrec`; by default that of
            each table, which `perfkit.read_tables` keeps of a model.
        ranks_per_node : int, optional
            Ranks of a node, by which GPUs are numbered; by default those of the platform [-].
        device : str, optional
            ``cuda`` or ``cpu``.
        pooled : bool, optional
            Whether the collection is an ``EmbeddingBagCollection``; an ``EmbeddingCollection`` takes
            fewer kinds of placement. By default as each table says.
        plain : bool, optional
            Whether to give plain values, for JSON, although torchrec is installed.

        Returns
        -------
        plan : torchrec.distributed.types.ShardingPlan or dict
            TorchRec's objects where torchrec is installed, else the same as plain values.

        Raises
        ------
        ValueError
            For a placement that TorchRec does not take, see `Plan.to_torchrec`.

        Warns
        -----
        UserWarning
            If the path of the collection is not known, or `module` is another one than tables name;
            and where the time changes as TorchRec gives
            blocks of rows to ranks in the order of these, while a search may put the first block,
            with the most popular row, on any.

        Examples
        --------
        >>> from perfkit.sharding.planner import shard
        >>> from perfkit.workloads.tables import TableSet, draw_tables
        >>> found = shard(TableSet(draw_tables(8, seed=0)), "h100-sxm-8", ranks=8, steps=100)
        >>> list(found.to_torchrec(module="sparse.ebc", plain=True))
        ['sparse.ebc']
        """
        check_type("plain", plain, bool)
        costs = self.prediction._problem.costs
        if ranks_per_node is None:
            ranks_per_node = min(costs.ranks_per_node, self.plan.ranks)
        ordered = self.plan.order_rows()
        if ordered != self.plan:
            time = price_checked_plan(self.prediction._problem, ordered).time
            if abs(time / self.prediction.time - 1) > _SAME_TIME:
                warnings.warn(
                    "blocks of rows go to their ranks in order, as TorchRec gives them: the most "
                    f"popular rows lie on other ranks, and the plan takes {format_time(time)} instead "
                    f"of {format_time(self.prediction.time)}",
                    UserWarning,
                    stacklevel=2,
                )
        modules, notes = ordered._write_torchrec(
            costs.workload.tables, module, ranks_per_node, device, pooled
        )
        warn_of_paths(notes, stacklevel=2)
        if plain or not has_torchrec():
            return modules
        return make_sharding_plan(modules)

    def to_torchrec_constraints(
        self, *, pooled: bool | None = None, plain: bool = False
    ) -> dict[str, Any]:
        """What ``EmbeddingShardingPlanner(constraints=...)`` of TorchRec takes, to keep the kinds of
        this plan and choose the ranks by itself.

        Parameters
        ----------
        pooled : bool, optional
            Whether the collection is an ``EmbeddingBagCollection``; by default as each table says.
        plain : bool, optional
            Whether to give plain values, for JSON, although torchrec is installed.

        Returns
        -------
        constraints : dict of str to torchrec.distributed.planner.ParameterConstraints or dict
            Constraints by table: TorchRec's objects where torchrec is installed, else the same as
            plain values.

        Raises
        ------
        ValueError
            For a placement that TorchRec does not take, see `Plan.to_torchrec`, and for two tables of
            one name.
        """
        check_type("plain", plain, bool)
        tables = self.prediction._problem.costs.workload.tables
        constraints = self.plan.to_torchrec_constraints(tables, pooled=pooled)
        if plain or not has_torchrec():
            return constraints
        return make_constraints(constraints)

    def _list_limits(self) -> list[Sequence[str]]:
        """How good the plan is and what its limits cost, as rows of text with their heads first."""
        price = self.prediction
        low, high = map(format_time, price.interval())
        rows: list[Sequence[str]] = [
            ("what", "figure"),
            ("80 % interval of the time", f"{low} to {high}"),
            (f"nothing better exists {self._limits} than", format_time(self.bound)),
            ("so the plan is above the best by at most", _write_gap(self.gap)),
        ]
        if self.bound_of_any_width is not None:
            cost = format_time(self.cost_of_min_columns)
            rows.append(("the least columns of a shard cost at most", cost))
        if self.joined:
            named = ", ".join(self.joined)
            rows.append(("small tables that are not split", named))
            rows.append(("which costs", format_time(self.given_up)))
        return rows

    def sections(self) -> Sections:
        """Parts of a report, see `perfkit.ground.results.Sections`."""
        yield "How good the plan is, and what its limits cost", self._list_limits()
        yield "The plan and the rules of thumb", self.compare()
        yield "", self.chart()
        shared = "".join(f"; {line}" for line in self.describe_shared())
        yield f"Ranks and their tables{shared}", self.holders()
        yield "Work of the ranks", self.by_rank()
        yield "Tables", self.table()
        yield "", self.prediction._problem.costs.platform

    def explain(self) -> str:
        """Say the result in words: time, bound, parts of the time, memory, rules of thumb.

        Returns
        -------
        text : str
            Several lines.
        """
        price, problem = self.prediction, self.prediction._problem
        kinds = [placement.kind for placement in self.plan.placements]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        batch = problem.costs.workload.batch
        share = f"{batch // self.plan.ranks:,} a rank"
        inputs = f"  batch {batch:,} ({share}); {counts}"
        lines = [self.headline(), inputs, self._explain_inputs()]
        lines += self._explain_limits()
        for name, time in price.parts.items():
            lines.append(f"  {time / price.time:6.1%}  {format_time(time):>9}  {name}")
        least, most = (
            format_bytes(float(price.memory.min())),
            format_bytes(float(price.memory.max())),
        )
        memory = f"  memory of tables: {least} to {most} a rank, of {format_bytes(price.capacity)}"
        if problem.memory_of_platform:
            of_rank, reserved = format_bytes(problem.memory), format_bytes(price.reserved)
            memory += f" (a rank of the platform has {of_rank}; everything else takes {reserved}"
            if problem.kept_free:
                memory += f", of which {format_bytes(problem.kept_free)} are kept free"
            memory += ")"
        lines.append(memory)
        lines += self._explain_baselines()
        if self.interrupted:
            lines.append("  interrupted: the best plan so far")
        lines += write_warnings(self.warnings)
        return "\n".join(lines)

    def _explain_inputs(self) -> str:
        """How popular rows are, and what updates them: both may be defaults that nobody stated."""
        workload = self.prediction._problem.costs.workload
        tables = workload.tables
        uniform = sum(1 for table in tables if isinstance(table.distribution, Uniform))
        ids = f"ids of {uniform} of {len(tables)} tables are uniform (exponent=0)"
        return f"  {ids}; rows are updated by {workload.table_optimizer} (optimizer)"

    def _explain_baselines(self) -> list[str]:
        """Times of the rules of thumb, those that say the same together."""
        names_of_text = dict[str, list[str]]()
        for name, baseline in self.baselines.items():
            text = f"{'':>9}  finds no room"
            if baseline is not None:
                ratio = baseline.time / self.prediction.time
                text = f"{format_time(baseline.time):>9}  {ratio:.2f} times as long"
            names_of_text.setdefault(text, []).append(name)
        return [f"  {', '.join(names):>12}  {text}" for text, names in names_of_text.items()]

    def _explain_limits(self) -> list[str]:
        """How good the plan is within its limits, how sure that is, and what the limits cost."""
        price = self.prediction
        low, high = map(format_time, price.interval())
        least = format_time(self.bound)
        lines = [
            f"  80 % interval of the time: {low} to {high}; most of that is the same for all plans",
            f"  no plan {self._limits} takes less than {least}: this one is at most "
            f"{_write_gap(self.gap)} above the best",
        ]
        columns = price._problem.constraints.min_columns
        if self.bound_of_any_width is not None and columns is not None:
            widths = f"{columns.min():,}"
            if columns.min() < columns.max():
                widths = f"{widths} to {columns.max():,}"
            share = self.cost_of_min_columns / price.time if price.time else 0.0
            lines.append(
                f"  shards by columns have at least {widths} columns (min_columns): that costs at "
                f"most {format_time(self.cost_of_min_columns)}, {share:.1%} of the time, as with "
                f"any columns no plan takes less than {format_time(self.bound_of_any_width)}"
            )
        if self.joined:
            named = ", ".join(self.joined[:3])
            if len(self.joined) > 3:
                named = f"{named}, …"
            share = self.given_up / price.time if price.time else 0.0
            lines.append(
                f"  whole or copied because they are small: {len(self.joined)} ({named}); shards "
                f"would save {format_time(self.given_up)}, {share:.1%} of the time (split_small)"
            )
        return lines

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        where = f"{self.plan.ranks} ranks of {self.prediction._problem.costs.platform.name}"
        time = format_interval(self.prediction.time, *self.prediction.interval())
        line = f"{time}, {len(self.plan.owners)} tables on {where}"
        line = f"{line}; nothing better than {format_time(self.bound)} exists {self._limits}"
        if self.longer_search is not None:
            line = f"{line}; search longer: {self.longer_search}"
        elif self.gap >= _WIDE_GAP:
            line = f"{line}; half of the search found nothing better, so the bound may be loose"
        return line

    def __repr__(self) -> str:
        return f"ShardingResult({self.headline()})"
