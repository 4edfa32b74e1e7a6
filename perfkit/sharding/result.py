"""Priced plans and what a search found: numbers by rank and by table, and what they mean."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from perfkit.estimates import check_time, find_interval
from perfkit.sharding.baselines import BASELINES
from perfkit.sharding.constraints import Constraints
from perfkit.sharding.options import Option, price_placement
from perfkit.sharding.pricing import COLUMNS, MEMORY, RESOURCES, SECONDS, column
from perfkit.sharding.problem import Problem
from perfkit.units import Array, check_choice, format_bytes, format_time
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import name_tables

if TYPE_CHECKING:
    import altair
    import polars

    from perfkit.sharding.moves import Move

__all__ = ["PlanPrice", "ShardingResult", "price_options", "spread_costs"]


def spread_costs(options: Sequence[Option], plan: Plan) -> Array:
    """Costs of every rank.

    Parameters
    ----------
    options : sequence of Option
        How each table is placed.
    plan : Plan
        On which ranks.

    Returns
    -------
    costs : array, shape (ranks, 13)
        Costs by `perfkit.sharding.pricing.COLUMNS` [-].
    """
    out = np.zeros((plan.ranks, len(COLUMNS)))
    for number, (option, placement) in enumerate(zip(options, plan.placements, strict=True)):
        out += option.everywhere
        out[number % plan.ranks] += option.hot
        for cost, rank in zip(option.shards, placement.ranks, strict=False):
            out[rank] += cost
    return out


@dataclass(frozen=True, eq=False)
class PlanPrice:
    """What a plan costs and needs.

    Parameters
    ----------
    plan : Plan
        The placement.
    time : float
        Predicted time of an iteration, or of the slowest rank's tables for the additive objective [s].
    parts : mapping of str to float
        Parts of the time by what the slowest ranks do; they sum to `time` [s].
    costs : array, shape (ranks, 13)
        Seconds and bytes of every rank by `perfkit.sharding.pricing.COLUMNS` [-].
    messages : mapping of str to float
        Bytes of each kind of message, of the fullest rank or of all [B].
    capacity, reserved : float
        Memory of a rank for tables, and what everything else takes of it [B].
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
    _options: Sequence[Option] = field(repr=False)
    _constraints: Constraints | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_time(f"plan on {self._problem.rates.platform.name!r}", self.time, self.spread, self.parts.values())

    def interval(self, level: float = 0.8) -> tuple[float, float]:
        """Range that holds the measured time in a share of cases.

        Parameters
        ----------
        level : float
            That share, between 0 and 1 [-].

        Returns
        -------
        low, high : float
            Ends of the range [s].
        """
        return find_interval(self.time, self.spread, level)

    @property
    def loads(self) -> Array:
        """Seconds that the tables of every rank take on its device [s]."""
        return np.asarray(self.costs[:, [column(name) for name in SECONDS[:-1]]].sum(axis=1))

    @property
    def memory(self) -> Array:
        """Bytes that the tables of every rank take [B]."""
        return np.asarray(self.costs[:, [column(name) for name in MEMORY]].sum(axis=1))

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return float(self.memory.max()) <= self.capacity * (1 + 1e-9)

    @property
    def bottleneck(self) -> str:
        """What takes most of the time, in words."""
        name = max(self.parts, key=lambda part: self.parts[part])
        return f"{name}, {self.parts[name] / self.time:.0%} of the time" if self.time else name

    def table(self) -> "polars.DataFrame":
        """What every rank does and holds.

        Returns
        -------
        frame : polars.DataFrame
            rank, seconds of lookup, pack, update, backward and host [s], message and memory bytes by use [B], and the
            share of the memory that is taken [-].
        """
        import polars

        units = {**dict.fromkeys(SECONDS, "_s"), **dict.fromkeys(COLUMNS[len(SECONDS) :], "_bytes")}
        data: dict[str, Any] = {"rank": list(range(len(self.costs)))}
        data |= {name + units[name]: self.costs[:, place] for place, name in enumerate(COLUMNS)}
        return polars.DataFrame(data | {"memory_share": self.memory / self.capacity})

    def next_move(self) -> "Move | None":
        """The move of one shard that helps most; None where none does.

        Returns
        -------
        move : Move or None
            Table, ranks and the time after it; the constraints that a search was given are kept.
        """
        from perfkit.sharding.moves import find_move

        loads, free = self._problem.objective.loads(self.costs), getattr(self._constraints, "frees", None)
        return find_move(self._problem, self._options, self.plan, loads, free=free)

    def chart(self) -> "altair.HConcatChart":
        """Seconds and memory of every rank, the slowest and the fullest one marked, and the next best move.

        Returns
        -------
        chart : altair.HConcatChart
            Ready to be shown or saved.
        """
        import polars

        from perfkit import plots

        frame, scale = self.table(), self._problem.objective.correction
        own = [polars.col(f"{name}_s") * scale for name in SECONDS[:-1]]
        shared = {key: value for key, value in self.parts.items() if key not in SECONDS}
        other = shared.pop("everything else", 0.0)
        shared = {"messages": sum(shared.values()), "everything else": other}
        memory = [polars.col(f"{name}_bytes") for name in MEMORY]
        frame = frame.select("rank", *own, *(polars.lit(v).alias(f"{k}_s") for k, v in shared.items()), *memory)
        move = self.next_move()
        notes = [self.bottleneck, f"next best move: {move}" if move else "no move of a single shard makes it shorter"]
        return plots.plan_bars(frame, time=self.time, capacity=self.capacity, notes=notes)

    def __repr__(self) -> str:
        low, high = self.interval()
        full = f"memory {format_bytes(float(self.memory.max()))} of {format_bytes(self.capacity)}"
        return (
            f"PlanPrice({format_time(self.time)} ({format_time(low)}–{format_time(high)}), {full}"
            f"{'' if self.fits else ', does not fit'}; {self.bottleneck})"
        )


def price_options(
    problem: Problem, options: Sequence[Option], plan: Plan, constraints: Constraints | None = None
) -> PlanPrice:
    """Price a plan whose options are known.

    Parameters
    ----------
    problem : Problem
        Prices and objective.
    options : sequence of Option
        How each table is placed.
    plan : Plan
        On which ranks.
    constraints : Constraints, optional
        What the next move has to keep.

    Returns
    -------
    price : PlanPrice
        Time, parts and memory.
    """
    objective, costs = problem.objective, spread_costs(options, plan)
    loads = objective.loads(costs)
    peaks = loads.max(axis=0)
    reduced = {name: float(sum(getattr(o, name) for o in options)) for name in ("rows", "gradients")}
    time = float(objective.time(peaks, **reduced))
    parts = objective.parts(loads, costs, reduced)
    sizes = {name: float(peaks[list(RESOURCES).index(name)]) for name in ("pooled", "partial", "indices")} | reduced
    return PlanPrice(
        plan, time, parts, costs, sizes, problem.capacity, problem.reserved, problem.spread(parts), problem, options,
        constraints,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ShardingResult:
    """What a search found.

    Parameters
    ----------
    plan : Plan
        The placement.
    prediction : PlanPrice
        What it costs and needs.
    bound : float
        Time that no plan of the kinds that were tried can beat [s].
    objective : str
        What became small: ``iteration`` or ``additive``.
    work : float
        Work spent, in seconds of the machine that the steps of the search were timed on [s].
    interrupted : bool
        Whether Ctrl-C ended the search early.
    """

    plan: Plan
    prediction: PlanPrice
    bound: float
    objective: str
    work: float
    interrupted: bool
    _problem: Problem = field(repr=False)
    _place: Callable[[str], PlanPrice | None] = field(repr=False)

    @property
    def gap(self) -> float:
        """How far the time can be above that of the best plan, relative to the bound [-]."""
        return self.prediction.time / self.bound - 1 if self.bound else 0.0

    @cached_property
    def baselines(self) -> Mapping[str, PlanPrice | None]:
        """What rules of thumb come to, see `perfkit.sharding.baselines.BASELINES`; None for one that finds no room."""
        return {name: self.place(name) for name in BASELINES}

    def place(self, name: str) -> PlanPrice | None:
        """Place the same tables by a rule of thumb.

        Parameters
        ----------
        name : str
            ``random``, ``size``, ``lookup``, ``size-lookup``, ``unique-rows`` or ``storage``.

        Returns
        -------
        price : PlanPrice or None
            Its plan and what that costs; None where a table finds no rank with room.

        Raises
        ------
        ValueError
            For an unknown rule.
        """
        return self._place(check_choice("name", name, BASELINES))

    def table(self) -> "polars.DataFrame":
        """Where every table lies and what it costs.

        Returns
        -------
        frame : polars.DataFrame
            table, kind, ranks, rows [-], dim [-], pooling [-], shards [-], seconds on all ranks together [s] and bytes
            of memory on all ranks together [B].
        """
        import polars

        tables = self._problem.rates.workload.tables
        options = price_placement(self._problem.rates, self.plan.placements)
        rows = []
        for name, table, placement, option in zip(
            name_tables(tables), tables, self.plan.placements, options, strict=True
        ):
            total = option.total(self.plan.ranks)
            rows.append({
                "table": name, "kind": placement.kind, "ranks": list(placement.ranks), "rows": table.rows,
                "dim": table.dim, "pooling": float(table.pooling), "shards": len(placement.ranks),
                "seconds": float(sum(total[column(c)] for c in SECONDS[:-1])),
                "memory_bytes": float(sum(total[column(c)] for c in MEMORY)),
            })  # fmt: skip
        return polars.DataFrame(rows)

    def chart(self) -> "altair.HConcatChart":
        """What every rank does and holds under the plan, see `PlanPrice.chart`.

        Returns
        -------
        chart : altair.HConcatChart
            Ready to be shown or saved.
        """
        return self.prediction.chart()

    def compare(self) -> "polars.DataFrame":
        """The plan beside the rules of thumb.

        Returns
        -------
        frame : polars.DataFrame
            method, time_s [s], gap to the bound [-], and how many times as long as the search's plan [-].
        """
        import polars

        rows: list[dict[str, Any]] = []
        for name, price in {"search": self.prediction, **self.baselines}.items():
            time = price.time if price else None
            gap, ratio = (time / self.bound - 1, time / self.prediction.time) if time else (None, None)
            rows.append({"method": name, "time_s": time, "gap": gap, "ratio": ratio})
        return polars.DataFrame(rows, schema={"method": str, "time_s": float, "gap": float, "ratio": float})

    def explain(self) -> str:
        """The result in words: time, bound, what it is worth, where the time goes.

        Returns
        -------
        text : str
            Several lines.
        """
        price, kinds = self.prediction, [p.kind for p in self.plan.placements]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        lines = [repr(self), f"  {counts}; no plan can take less than {format_time(self.bound)}"]
        lines += [
            f"  {share / price.time:6.1%}  {format_time(share):>9}  {name}" for name, share in price.parts.items()
        ]
        memory = price.memory
        low, high, most = map(format_bytes, (float(memory.min()), float(memory.max()), price.capacity))
        lines.append(f"  memory of tables: {low} to {high} a rank, of {most}")
        for name, other in self.baselines.items():
            worse = f"{other.time / price.time:.2f} times as long" if other else "finds no room"
            lines.append(f"  {name:>12}  {format_time(other.time) if other else '':>9}  {worse}")
        if self.interrupted:
            lines.append("  interrupted: the best plan so far")
        return "\n".join(lines)

    def __repr__(self) -> str:
        problem = self._problem.rates
        return (
            f"ShardingResult({len(self.plan.owners)} tables on {self.plan.ranks} ranks of {problem.platform.name}: "
            f"{format_time(self.prediction.time)}, at most {self.gap:.2%} above the best)"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.explain())}</pre>"
