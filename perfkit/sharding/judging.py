"""A plan beside the best one that a search finds, and beside what no plan can beat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars

from perfkit.ground.notes import write_warnings
from perfkit.ground.results import Sections, Table, Tabular
from perfkit.ground.units import format_count, format_interval, format_ranks, format_time
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.readers.plans import PlacedTables, find_plan
from perfkit.sharding.constraints import MIN_COLUMNS
from perfkit.sharding.planner import price_plan, put_kernels, shard
from perfkit.sharding.result import PlanPrice, ShardingResult
from perfkit.sharding.setup import check_workload
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.table_kernels import FUSED
from perfkit.workloads.tables import EmbeddingTable, TableSet, name_tables


@dataclass(frozen=True, eq=False)
class PlanJudgement(Tabular):
    """A plan, the best one that a search found, and the lower bound for both.

    Parameters
    ----------
    yours : PlanPrice
        Time and memory of the plan.
    found : ShardingResult
        What the search found, as for the same tables, ranks and memory.
    warnings : tuple of str
        Where the plan goes beyond the usual limits of a search, so that it may do so, too.
    """

    report_title = "A plan beside the best one that a search found"

    yours: PlanPrice
    found: ShardingResult
    warnings: tuple[str, ...] = ()

    @property
    def bound(self) -> float:
        """Lower bound: no plan that fits takes less time [s]."""
        return self.found.bound

    @property
    def best(self) -> PlanPrice:
        """The faster of both plans that fit; yours if they take the same time."""
        if self.yours.fits and self.yours.time <= self.found.prediction.time:
            return self.yours
        return self.found.prediction

    @property
    def gain(self) -> float:
        """Share of your time that the best plan saves; negative if yours is faster but does not fit
        [-]."""
        return 1 - self.best.time / self.yours.time if self.yours.time else 0.0

    def table(self) -> Table:
        """Both placements of every table.

        Returns
        -------
        frame : polars.DataFrame
            table, yours, ranks, found and its ranks: kinds of placement, and ranks as text, in the order
            of the shards; the placements of a plan have them as numbers.
        """
        tables = self.yours._problem.costs.workload.tables
        yours, found = self.yours.plan.placements, self.found.plan.placements
        return polars.DataFrame(
            {
                "table": name_tables(tables),
                "yours": [placement.kind for placement in yours],
                "ranks": [format_ranks(placement.ranks) for placement in yours],
                "found": [placement.kind for placement in found],
                "ranks_found": [format_ranks(placement.ranks) for placement in found],
            }
        )

    def explain(self) -> str:
        """Say it in words: the three times, parts of both, the best single move.

        Returns
        -------
        text : str
            Several lines.
        """
        lines = [self.headline()]
        names = dict.fromkeys([*self.yours.parts, *self.found.prediction.parts])
        for name in names:
            yours = self.yours.parts.get(name, 0.0)
            found = self.found.prediction.parts.get(name, 0.0)
            lines.append(f"  {format_time(yours):>9}  {format_time(found):>9}  {name}")
        move = self.yours.next_move()
        if move is not None:
            lines.append(f"  best move of one shard of yours: {move}")
        lines += write_warnings((*self.warnings, *self.found.warnings))
        return "\n".join(lines)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        yours = _write_time(self.yours)
        if not self.yours.fits:
            yours += ", which does not fit"
        bound = f"nothing better than {format_time(self.bound)} exists"
        if self.best is self.yours:
            return f"yours {yours}, the best that was found, {bound}"
        return f"yours {yours}, best found {_write_time(self.found.prediction)}, {bound}"

    def sections(self) -> Sections:
        """Parts of a report, see `perfkit.ground.results.Sections`."""
        yield "Yours", self.yours.chart()
        yield "The best that was found", self.found.prediction.chart()
        yield "Tables", self.table()

    def __repr__(self) -> str:
        return f"PlanJudgement({self.headline()})"


def _write_time(price: PlanPrice) -> str:
    """A time and its 80 % interval."""
    return format_interval(price.time, *price.interval())


def judge_plan(
    workload: DLRM | TableSet,
    platform: Platform | str | Path,
    plan: Any,
    *,
    ranks: int | None = None,
    memory: float | str | None = None,
    objective: str = "iteration",
    seconds: float = 1.0,
    steps: int | None = None,
    seed: int = 0,
    inputs: str = "local",
    min_columns: Any = None,
    split_small: bool = False,
    kernels: Sequence[str] | None = None,
    reserve: float = 0.0,
    progress: bool | Callable[[float, float], None] = True,
) -> PlanJudgement:
    """Say how good a plan is: its time, that of the best plan that a search finds, and the time that
    no plan can beat.

    Parameters
    ----------
    workload : DLRM or TableSet
        What is trained.
    platform : Platform, str or Path
        On what.
    plan : Plan, ShardingResult, PlanPrice, ShardingPlan, mapping, str, Path or sequence of str
        A plan, or a result with one; a plan of TorchRec, as objects or as JSON; a ``.json`` file of either; or what
        TorchRec's planner prints, as text, as lines or in a file.
    ranks : int, optional
        Number of ranks, for plans that do not say it; by default those of the tables that are on every
        rank, else all of the platform [-].
    memory : float or str, optional
        Memory of a rank; by default that of the platform's device [B].
    objective : str, optional
        ``iteration`` or ``additive``, see `shard`.
    seconds : float, optional
        Work to spend on the search [s].
    steps : int, optional
        Number of steps in place of `seconds` [-].
    seed : int, optional
        Seed [-].
    inputs : str, optional
        ``local`` or ``exchanged``, see `shard`.
    min_columns : int or mapping, optional
        Least columns of a shard in the search, see `shard`; by default 128, and where the plan has
        narrower shards of a table, as many as the narrowest [-].
    split_small : bool, optional
        Whether small tables may stay in shards in the plan that is found, see `shard`.
    kernels : sequence of str, optional
        Where the search may put tables, see `shard`; by default they lie where the plan says, as plans of
        TorchRec and results do. A `Plan` does not say it: its tables lie where `workload` says, or with
        `kernels` as in the plan that is found.
    reserve : float, optional
        Share of the memory of a rank that stays free, see `shard` [-].
    progress : bool or callable, optional
        What is shown or told of the search, see `shard`.

    Returns
    -------
    judgement : PlanJudgement
        The three times; its ``explain`` has their parts, its ``table`` both placements.

    Raises
    ------
    ValueError
        For a plan that cannot be read or priced, such as one with the kernel ``key_value``.
    InfeasibleError
        If no placement keeps the memory.

    Warns
    -----
    UserWarning
        For what is not used of a plan of TorchRec, see `Plan.from_torchrec`.

    Notes
    -----
    The bound holds for plans with the kernels of the plan that is found, and that keep `min_columns`. With a number of your own, a plan with narrower
    shards may be faster than the bound.

    Both times have the same errors for the most part, so their ratio is surer than each of them.

    Examples
    --------
    >>> from perfkit.workloads.tables import draw_tables
    >>> tables = TableSet(draw_tables(26, seed=0), batch=8192, embedding="fused")
    >>> judged = judge_plan(tables, "h100-sxm-8", Plan.round_robin(26, ranks=8), steps=500)
    >>> judged.bound <= judged.best.time < judged.yours.time
    True
    """
    check_workload(workload)
    tables = workload.tables
    platform = load_platform(platform)
    placed = _find_placed(plan, tables, ranks, platform.network.ranks)
    yours = placed.plan
    narrow: dict[str, int] = {}
    if min_columns is None:
        narrow = _list_narrow(yours, tables)
        min_columns = narrow
    limits = {"memory": memory, "objective": objective, "inputs": inputs}
    limits["min_columns"] = min_columns
    limits["reserve"] = reserve
    mine = put_kernels(workload, placed.tables)
    # a plan that says no kernels gets those of the plan that is found, if this one may choose them
    takes_found = kernels is not None and not placed.says_kernels
    price = None
    if not takes_found:
        price = price_plan(mine, platform, yours, **limits)  # type: ignore[arg-type]
    found = shard(
        mine if kernels is None else workload,
        platform,
        ranks=yours.ranks,
        seconds=seconds,
        steps=steps,
        seed=seed,
        split_small=split_small,
        kernels=(FUSED.name,) if kernels is None else kernels,
        start=yours if kernels is None else None,
        progress=progress,
        **limits,  # type: ignore[arg-type]
    )
    notes = _note_narrow(narrow)
    if price is None:
        chosen = found.prediction._problem.costs.workload
        price = price_plan(chosen, platform, yours, **limits)  # type: ignore[arg-type]
        if chosen.tables != tables:
            text = "your plan does not say where tables lie; they lie as in the plan that was found"
            notes = (*notes, text)
    return PlanJudgement(price, found, notes)


def _find_placed(
    plan: Any, tables: tuple[EmbeddingTable, ...], ranks: int | None, platform_ranks: int
) -> PlacedTables:
    """A plan of any form, or that of a result, and the tables with its kernels."""
    if not isinstance(plan, ShardingResult | PlanPrice):
        return find_plan(plan, tables, ranks=ranks, platform_ranks=platform_ranks)
    price = plan.prediction if isinstance(plan, ShardingResult) else plan
    placed = find_plan(price.plan, tables, ranks=ranks)
    theirs = price._problem.costs.workload.tables
    if len(theirs) != len(tables):
        return placed  # which is refused
    with_kernels = []
    for table, other in zip(tables, theirs, strict=True):
        with_kernels.append(replace(table, kernel=other.kernel, load_factor=other.load_factor))
    return placed._replace(tables=tuple(with_kernels), says_kernels=True)


def _list_narrow(plan: Plan, tables: tuple[EmbeddingTable, ...]) -> dict[str, int]:
    """Least columns of the shards of tables that have narrower ones than searches make [-]."""
    names = name_tables(tables)
    narrow: dict[str, int] = {}
    for part in plan.cut(tables):
        least = min(MIN_COLUMNS, narrow.get(names[part.table], MIN_COLUMNS))
        placement = plan.placements[part.table]
        is_split = placement.traits.splits_columns and len(placement.ranks) > 1
        if is_split and part.columns < least:
            narrow[names[part.table]] = part.columns
    return narrow


def _note_narrow(narrow: dict[str, int]) -> tuple[str, ...]:
    """What the search may do since the plan does it, in words."""
    if not narrow:
        return ()
    name = min(narrow, key=lambda table: narrow[table])
    text = (
        f"your plan has a shard of {name!r} with {narrow[name]} columns, fewer than {MIN_COLUMNS}"
    )
    if len(narrow) > 1:
        text += f", and so of {format_count(len(narrow) - 1, 'other table')}"
    return (f"{text}; the search may split them so, too",)
