"""Shard a workload's tables, or price a plan that is already there."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.platform import Platform
from perfkit.sharding.baselines import place_greedily
from perfkit.sharding.board import Board, Rules, Snapshot
from perfkit.sharding.constraints import Constraints, InfeasibleError, check_memory, read_constraints
from perfkit.sharding.options import Option, list_options, price_placement
from perfkit.sharding.problem import Problem, set_up
from perfkit.sharding.result import PlanPrice, ShardingResult, price_options
from perfkit.sharding.search import search_plan
from perfkit.units import check_positive, format_bytes
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.tables import TableSet, name_tables

__all__ = ["price_plan", "shard"]


def price_plan(
    workload: DLRM | TableSet,
    platform: Platform | str | Path,
    plan: Plan,
    *,
    memory: float | None = None,
    objective: str = "iteration",
    inputs: str = "local",
) -> PlanPrice:
    """Price a plan: time of an iteration, and seconds, messages and memory of every rank.

    Parameters
    ----------
    workload : DLRM or TableSet
        What is trained.
    platform : Platform, str or Path
        On what.
    plan : Plan
        Where its tables lie.
    memory : float, optional
        Memory of a rank; by default that of the platform's device [B].
    objective : str, optional
        ``iteration`` or ``additive``.
    inputs : str, optional
        ``local`` where every rank's loader reads the indices that its shards need, ``exchanged`` where an all_to_all
        brings them at the start of the iteration.

    Returns
    -------
    price : PlanPrice
        What it costs and needs; its ``fits`` says whether the memory suffices.

    Raises
    ------
    ValueError
        For a plan of other tables, splits that do not fit a table or a node, or kinds that the platform cannot price.

    Examples
    --------
    >>> from perfkit.workloads.tables import draw_tables
    >>> tables = TableSet(draw_tables(26, seed=0), batch=8192, embedding="fused")
    >>> price_plan(tables, "h100-sxm-8", Plan.round_robin(26, ranks=8)).fits
    True
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is {plan!r}; it must be a Plan, such as Plan.from_owners([0, 1, 0], ranks=2)")
    problem = set_up(workload, platform, plan.ranks, memory=memory, objective=objective, inputs=inputs)
    plan.cut(problem.rates.workload.tables)
    node, known = problem.rates.node, problem.kinds
    for number, placement in enumerate(plan.placements):
        if placement.kind not in known:
            raise ValueError(
                f"platform {problem.rates.platform.name!r} has no model of the messages that {placement.kind} needs; "
                f"table {number} needs another kind, of {', '.join(known)}"
            )
        if placement.kind in ("table_row_wise", "table_column_wise") and len({r // node for r in placement.ranks}) > 1:
            raise ValueError(
                f"table {number} is {placement.kind} on ranks {placement.ranks}, which are not of one node"
            )
        if placement.kind == "table_row_wise" and len(placement.ranks) < node:
            raise ValueError(f"table {number} is table_row_wise on {placement.ranks}; name all {node} ranks of a node")
    return price_options(problem, price_placement(problem.rates, plan.placements), plan)


def shard(
    workload: DLRM | TableSet,
    platform: Platform | str | Path,
    *,
    ranks: int,
    memory: float | None = None,
    objective: str = "iteration",
    seconds: float = 1.0,
    steps: int | None = None,
    seed: int = 0,
    pin: Any = None,
    together: Any = (),
    apart: Any = (),
    forbid: Any = (),
    inputs: str = "local",
    progress: Callable[[float, float], None] | None = None,
) -> ShardingResult:
    """Search for the placement of embedding tables with the least time of an iteration.

    Parameters
    ----------
    workload : DLRM or TableSet
        What is trained; its batch is over all ranks.
    platform : Platform, str or Path
        On what: a platform, a name of the gallery or a file.
    ranks : int
        Ranks that take part [-].
    memory : float, optional
        Memory of a rank; by default that of the platform's device [B].
    objective : str, optional
        ``iteration``: the predicted iteration, collectives waiting for the slowest rank; or ``additive``: the seconds
        of the tables on the slowest rank, whole or split by columns, without messages.
    seconds : float, optional
        Work to spend on the search itself. Steps are counted and not timed, with what each took on one core of an AMD
        Zen 5, so that the same input, seed and seconds give the same plan on every machine [s].
    steps : int, optional
        Steps to take in place of `seconds`: trades between ranks that are weighed, and tables that are placed. The
        same input, seed and steps give the same plan, whatever a step costs on any machine; about 7,000 of a few dozen
        tables are a second [-].
    seed : int, optional
        Seed [-].
    pin : mapping, optional
        Rank by table, number or name, for tables that must lie whole on it.
    together, apart : sequence of groups, optional
        Tables that must share a rank, or must not.
    forbid : str, sequence of str or mapping, optional
        Kinds of placement that no table may have, or such kinds by table.
    inputs : str, optional
        ``local`` where every rank's loader reads the indices that its shards need, ``exchanged`` where an all_to_all
        brings them at the start of the iteration.
    progress : callable, optional
        ``progress(done, time)`` gets the part of the work that is done and the best time so far [s].

    Returns
    -------
    result : ShardingResult
        Plan, price, lower bound and gap, and what rules of thumb come to; the best plan so far after Ctrl-C.

    Raises
    ------
    ValueError
        For bad input.
    InfeasibleError
        Where no placement keeps memory and constraints; the message says what is short and what would do.

    Notes
    -----
    The bound holds for all plans made of the ways to place a table that were considered: whole; copied to every rank;
    columns halved one or more times; rows over all ranks or those of a node. Splits of small tables and copies of large
    ones are left out, as they only add to what has to be done.

    Examples
    --------
    >>> from perfkit.workloads.tables import draw_tables
    >>> tables = TableSet(draw_tables(100, seed=0), batch=65536, embedding="fused")
    >>> result = shard(tables, "h100-sxm-8", ranks=8, steps=2000)
    >>> result.gap < 0.05
    True
    """
    problem = set_up(workload, platform, ranks, memory=memory, objective=objective, inputs=inputs)
    ranks, tables = problem.rates.ranks, problem.rates.workload.tables
    check_positive("seconds", seconds)
    if steps is not None:
        steps = int(check_positive("steps", steps, integer=True))
    check_positive("seed", seed, integer=True, zero=True)
    constraints = read_constraints(tables, ranks, pin=pin, together=together, apart=apart, forbid=forbid)
    options = _options(problem, constraints)
    names = ["+".join(name_tables(tables)[t] for t in unit) for unit in constraints.units]
    sizes: dict[str, Any] = {"ranks": ranks, "capacity": problem.capacity}
    check_memory(
        problem.objective, options, names, **sizes, reserved=problem.reserved, pinned=constraints.pinned
    )  # fmt: skip
    rules = Rules(**sizes, node=problem.rates.node, pinned=constraints.pinned, apart=constraints.apart)
    found = search_plan(problem.objective, options, rules, seconds=seconds, seed=seed, steps=steps, progress=progress)
    if found.overflow > 0:
        raise InfeasibleError(
            f"memory: no placement was found that fits; the best one exceeds the {format_bytes(problem.capacity)} of a "
            f"rank by {format_bytes(found.overflow)}; allow more kinds, give more seconds or steps, ranks or memory, "
            "or drop constraints"
        )
    best = _price(problem, constraints, options, found.best)
    place = partial(_place, problem, constraints, options, rules, seed)
    return ShardingResult(best.plan, best, found.bound, objective, found.work, found.interrupted, problem, place)


def _place(
    problem: Problem, constraints: Constraints, options: list[list[Option]], rules: Rules, seed: int, name: str
) -> PlanPrice | None:
    """What a rule of thumb comes to."""
    workload = problem.rates.workload
    units = [[workload.tables[t] for t in unit] for unit in constraints.units]
    found = place_greedily(Board(problem.objective, options, rules), name, units, workload.batch, seed=seed)
    return _price(problem, constraints, options, found) if found else None


def _options(problem: Problem, constraints: Constraints) -> list[list[Option]]:
    """Ways to place each unit: those of its only table, or all of its tables whole."""
    kinds = problem.kinds

    def allowed(table: int, kind: str) -> bool:
        return kind in kinds and constraints.allows(table, kind)

    own = list_options(problem.rates, allowed, problem.capacity, additive=problem.objective.kind == "additive")
    for name, options in zip(name_tables(problem.rates.workload.tables), own, strict=True):
        if not options:
            raise InfeasibleError(
                f"no kind is left for {name!r}: of {', '.join(kinds)}, what is not forbidden does not suit its shape "
                "or the number of ranks; allow another kind"
            )
    none = np.zeros_like(own[0][0].everywhere)
    return [
        own[unit[0]] if len(unit) == 1
        else [Option("table_wise", (np.sum([own[t][0].shards[0] for t in unit], axis=0),), (), none, none)]
        for unit in constraints.units
    ]  # fmt: skip


def _price(problem: Problem, constraints: Constraints, options: list[list[Option]], found: Snapshot) -> PlanPrice:
    """Turn a placement of units into a plan of tables with its price."""
    tables = problem.rates.workload.tables
    owners: list[int | Placement] = [0] * len(tables)
    first = np.cumsum([0, *(len(option.shards) for own in options for option in own)])
    number = np.cumsum([0, *map(len, options)])
    for unit, members in enumerate(constraints.units):
        chosen = int(found.choice[unit])
        place = number[unit] + chosen
        at = tuple(found.rank[first[place] : first[place + 1]].tolist())
        for table in members:
            option = options[unit][chosen]
            owners[table] = Placement(option.kind, at or tuple(range(problem.rates.ranks)), option.columns)
    plan = Plan(problem.rates.ranks, tuple(owners), tuple(name_tables(tables)))
    if len(constraints.units) < len(tables):  # costs of tables that lie together are known as a sum only
        return price_options(problem, price_placement(problem.rates, plan.placements), plan, constraints)
    chosen_options = [own[int(o)] for own, o in zip(options, found.choice, strict=True)]
    return price_options(problem, chosen_options, plan, constraints)
