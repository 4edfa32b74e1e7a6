"""Prices of plans and results of searches, by rank and by table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import polars

from perfkit.ground.forks import check_threads
from perfkit.ground.results import Picture, Sections, Table, Tabular
from perfkit.ground.units import Array, check_choice, format_bytes, format_time
from perfkit.platform.estimates import check_time, find_interval
from perfkit.sharding.costs import AT, COLUMNS, MEMORY, SECONDS, Costs
from perfkit.sharding.problem import MESSAGES, RESOURCES, Problem
from perfkit.workloads.placement import BY_ROWS, EVERYWHERE, Plan
from perfkit.workloads.tables import name_tables

#: Columns of seconds on the device and of memory.
_DEVICE, _MEMORY = ([AT[name] for name in names] for names in (SECONDS[:-1], MEMORY))


class Shards(NamedTuple):
    """Costs of the shards of a plan, by `perfkit.sharding.costs.COLUMNS`; rank -1 means every
    rank."""

    table: np.ndarray
    rank: np.ndarray
    costs: Array

    def by_rank(self, ranks: int) -> Array:
        """Costs of every rank."""
        every, out = self.rank < 0, np.zeros((ranks, len(COLUMNS)))
        np.add.at(out, self.rank[~every], self.costs[~every])
        return out + self.costs[every].sum(axis=0)

    def by_table(self, ranks: int) -> Array:
        """Costs of every table, summed over ranks."""
        out = np.zeros((self.table.max() + 1, len(COLUMNS)))
        np.add.at(out, self.table, self.costs * np.where(self.rank < 0, ranks, 1)[:, None])
        return out


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
    """

    plan: Plan
    time: float
    parts: Mapping[str, float]
    costs: Array = field(repr=False)
    messages: Mapping[str, float] = field(repr=False)
    capacity: float = field(repr=False)
    reserved: float = field(repr=False)
    spread: float = field(repr=False)
    _problem: Problem = field(repr=False)
    _shards: Shards = field(repr=False)

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
    def loads(self) -> Array:
        """Device time of the tables of every rank [s]."""
        return np.asarray(self.costs[:, _DEVICE].sum(axis=1))

    @property
    def memory(self) -> Array:
        """Memory of the tables of every rank [B]."""
        return np.asarray(self.costs[:, _MEMORY].sum(axis=1))

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
        for place, name in enumerate(COLUMNS[:-2]):  # without those that all ranks share
            data[name + ("_s" if name in SECONDS else "_bytes")] = self.costs[:, place]
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
        problem, placements = self._problem, self.plan.placements
        loads, shards, nodes = (
            problem.loads(self.costs),
            problem.loads(self._shards.costs),
            problem.costs.node,
        )
        # no move from another rank alone can shorten the time
        fullest = loads.argmax(axis=0)[loads.max(axis=0) > 0]
        spilled = float(np.maximum(loads[:, -1] - self.capacity, 0).sum())
        best, found, node = (
            (spilled, self.time * (1 - 1e-9)),
            None,
            np.arange(self.plan.ranks) // nodes,
        )
        for index in np.flatnonzero(np.isin(self._shards.rank, fullest)):
            table, source = int(self._shards.table[index]), int(self._shards.rank[index])
            kind = placements[table].kind
            if kind in BY_ROWS:
                continue
            rest = loads.copy()
            rest[source] -= shards[index]
            then = rest + shards[index]
            times = problem.time(np.maximum(rest.max(axis=0), then))
            spill, more = (np.maximum(held[:, -1] - self.capacity, 0) for held in (rest, then))
            for target in np.flatnonzero(
                (node == node[source]) | (kind != "table_column_wise")
            ).tolist():
                after = float(spill.sum() - spill[target] + more[target]), float(times[target])
                free = target not in placements[table].ranks and after < best
                if free and problem.constraints.frees(table, target, self.plan):
                    best, found = after, (table, source, target)
        if found is None:
            return None
        name = name_tables(problem.costs.workload.tables)[found[0]]
        return Move(name, found[1], found[2], best[1], 1 - best[1] / self.time)

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

        frame, scale = self.table(), self._problem.correction
        own = [polars.col(f"{name}_s") * scale for name in SECONDS[:-1]]
        other = self.parts.get("everything else", 0.0)
        messages = sum(
            value for key, value in self.parts.items() if key not in (*SECONDS, "everything else")
        )
        shared = (
            polars.lit(messages).alias("messages_s"),
            polars.lit(other).alias("everything else_s"),
        )
        frame = frame.select("rank", *own, *shared, *(f"{name}_bytes" for name in MEMORY))
        move = self.next_move()
        notes = [
            self.bottleneck,
            f"next best move: {move}" if move else "no move of a single shard makes it shorter",
        ]
        return plots.plan_bars(frame, time=self.time, capacity=self.capacity, notes=notes)

    def __repr__(self) -> str:
        low, high = map(format_time, self.interval())
        full = format_bytes(float(self.memory.max()))
        if self.capacity > 0:
            full += f" of {format_bytes(self.capacity)}{'' if self.fits else ', does not fit'}"
        else:
            rank = format_bytes(self._problem.memory)
            full += f", does not fit: everything else alone takes {format_bytes(self.reserved)}"
            full += f" of the {rank} of a rank"
        return (
            f"PlanPrice({format_time(self.time)} ({low}–{high}), memory {full}; {self.bottleneck})"
        )


def price_placements(costs: Costs, plan: Plan) -> Shards:
    """Costs of the shards of a plan."""
    tables, asked = costs.workload.tables, dict[tuple[str, float], list[tuple[int, int, bool]]]()
    for number, placement in enumerate(plan.placements):
        for place, shard in enumerate(placement.cut(tables[number], number)):
            if not (placement.kind in EVERYWHERE and place):
                at = placement.kind, shard.columns / tables[number].dim
                asked.setdefault(at, []).append((number, shard.rank, place == 0))
    found = []
    for (kind, part), entries in asked.items():
        table, rank, first = np.array(entries).T
        cost, more = costs.shards(table, kind, part)
        if kind in EVERYWHERE:
            # ranks are named in the order of the shards
            home = [plan.placements[number].ranks[costs.home[number]] for number in table.tolist()]
            found += [(table, 0 * rank - 1, cost), (table, np.array(home), more)]
        else:
            found.append((table, rank, cost + more * first[:, None]))
    return Shards(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def find_price(problem: Problem, plan: Plan) -> PlanPrice:
    """Price a plan that fits the problem."""
    shards = price_placements(problem.costs, plan)
    costs = shards.by_rank(plan.ranks)
    peaks, parts = problem.loads(costs).max(axis=0), problem.parts(costs)
    sizes = {
        name: float(size) for name, size in zip(RESOURCES, peaks, strict=True) if name in MESSAGES
    }
    return PlanPrice(
        plan,
        float(problem.time(peaks)),
        parts,
        costs,
        sizes,
        problem.capacity,
        problem.reserved,
        problem.spread(parts),
        problem,
        shards,
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
        saved = f"{abs(self.gain):.1%} {'less' if self.gain >= 0 else 'more'}"
        return f"{self.table} from rank {self.source} to rank {self.target}: {format_time(self.time)}, {saved}"


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
    """

    plan: Plan
    prediction: PlanPrice
    bound: float
    objective: str
    work: float
    interrupted: bool
    baselines: Mapping[str, PlanPrice | None] = field(repr=False)
    warnings: tuple[str, ...] = ()

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
            table, kind, ranks, rows [-], dim [-], pooling [-], shards [-], seconds [s] and bytes of
            memory [B], both summed over ranks.
        """
        price, tables = self.prediction, self.prediction._problem.costs.workload.tables
        total, placements = price._shards.by_table(self.plan.ranks), self.plan.placements
        return polars.DataFrame(
            {
                "table": name_tables(tables),
                "kind": [p.kind for p in placements],
                "ranks": [list(p.ranks) for p in placements],
                "rows": [t.rows for t in tables],
                "dim": [t.dim for t in tables],
                "pooling": [float(t.pooling) for t in tables],
                "shards": [len(p.ranks) for p in placements],
                "seconds": total[:, _DEVICE].sum(axis=1),
                "memory_bytes": total[:, _MEMORY].sum(axis=1),
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
            time = price.time if price else None
            gap, ratio = (
                (time / self.bound - 1, time / self.prediction.time) if time else (None, None)
            )
            rows.append({"method": name, "time_s": time, "gap": gap, "ratio": ratio})
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
        frame, placements = self.prediction.table(), self.plan.placements
        held = [sum(rank in place.ranks for place in placements) for rank in range(self.plan.ranks)]
        columns = {
            "tables": polars.Series(held),
            "memory_bytes": polars.Series(self.prediction.memory),
        }
        kept = (
            "rank",
            "tables",
            "lookup_s",
            "backward_s",
            "update_s",
            "memory_bytes",
            "memory_share",
        )
        return frame.with_columns(**columns).select(kept)

    def sections(self) -> Sections:
        """Parts of a report, see `perfkit.ground.results.Sections`."""
        yield "The plan and the rules of thumb", self.compare()
        yield "", self.chart()
        yield "Ranks", self.by_rank()
        yield "Tables", self.table()
        yield "", self.prediction._problem.costs.platform

    def explain(self) -> str:
        """Say the result in words: time, bound, parts of the time, memory, rules of thumb.

        Returns
        -------
        text : str
            Several lines.
        """
        price, kinds = self.prediction, [p.kind for p in self.plan.placements]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        batch = price._problem.costs.workload.batch
        low, high = map(format_time, price.interval(0.8))
        lines = [
            repr(self),
            f"  batch {batch:,}; {counts}; no plan can take less than {format_time(self.bound)}",
            f"  80 % interval of the time: {low} to {high}",
        ]
        for name, share in price.parts.items():
            lines.append(f"  {share / price.time:6.1%}  {format_time(share):>9}  {name}")
        memory = price.memory
        low, high, most = map(
            format_bytes, (float(memory.min()), float(memory.max()), price.capacity)
        )
        rank, rest = map(format_bytes, (price._problem.memory, price.reserved))
        lines.append(f"  memory of tables: {low} to {high} a rank, of {most}")
        if price._problem.from_platform:
            lines[-1] += f" (a rank of the platform has {rank}; everything else takes {rest})"
        for name, other in self.baselines.items():
            worse = f"{other.time / price.time:.2f} times as long" if other else "finds no room"
            lines.append(f"  {name:>12}  {format_time(other.time) if other else '':>9}  {worse}")
        if self.interrupted:
            lines.append("  interrupted: the best plan so far")
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])

    def __repr__(self) -> str:
        where = f"{self.plan.ranks} ranks of {self.prediction._problem.costs.platform.name}"
        time = f"{format_time(self.prediction.time)}, at most {self.gap:.2%} above the best"
        return f"ShardingResult({len(self.plan.owners)} tables on {where}: {time})"
