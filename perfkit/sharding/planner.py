"""Shard a workload's tables, or price a plan that is already there."""

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from perfkit.ground.units import check_positive, check_type, format_bytes, steady
from perfkit.models.distributions import unique_rows
from perfkit.platform.platform import Platform
from perfkit.sharding.constraints import NODE_KINDS, InfeasibleError, check_memory, list_options, read_constraints
from perfkit.sharding.objective import set_up
from perfkit.sharding.result import PlanPrice, ShardingResult, find_price
from perfkit.sharding.search import Found, State, search_plan
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import SPLIT_BY_COLUMNS, Placement, Plan
from perfkit.workloads.tables import EmbeddingTable, TableSet, name_tables

#: Sort key of each rule, the largest first, which it balances over ranks; ``random`` draws the rank, ``storage``
#: balances seconds. Sources: docs/formulas.md, table 8.2.
BASELINES: MappingProxyType[str, Callable[[EmbeddingTable, int], float]] = MappingProxyType({
    "random": lambda table, batch: 0.0,
    "size": lambda table, batch: float(table.rows * table.dim),
    "lookup": lambda table, batch: table.pooling * table.dim,
    "size-lookup": lambda table, batch: table.pooling * table.dim * float(np.log10(table.rows)),
    "unique-rows": lambda table, batch: float(unique_rows(table.distribution, batch * table.pooling)) * table.dim,
    "storage": lambda table, batch: float(table.nbytes),
})  # fmt: skip


def price_plan(
    workload: DLRM | TableSet, platform: Platform | str | Path, plan: Plan, *, memory: float | None = None,
    objective: str = "iteration", inputs: str = "local",
) -> PlanPrice:  # fmt: skip
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
    check_type("plan", plan, Plan)
    problem = set_up(workload, platform, plan.ranks, memory, objective, inputs)
    plan.cut(workload.tables)
    node, known, name = problem.costs.node, problem.kinds, problem.costs.platform.name
    for number, placement in enumerate(plan.placements):
        kind, ranks = placement.kind, placement.ranks
        shown, least = f"table {number} is {kind} on ranks {ranks}", node if kind == "table_row_wise" else 1
        if kind not in known:
            raise ValueError(f"{shown}; {name!r} has no model of its messages; take one of {', '.join(known)}")
        if kind in NODE_KINDS and (len({rank // node for rank in ranks}) > 1 or len(ranks) < least):
            raise ValueError(f"{shown}; it must be on ranks of one node, table_row_wise on all {node}")
    return find_price(problem, plan)


def shard(
    workload: DLRM | TableSet, platform: Platform | str | Path, *, ranks: int, memory: float | None = None,
    objective: str = "iteration", seconds: float = 1.0, steps: int | None = None, seed: int = 0, pin: Any = None,
    together: Any = (), apart: Any = (), forbid: Any = (), inputs: str = "local",
    progress: Callable[[float, float], None] | None = None,
) -> ShardingResult:  # fmt: skip
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
    problem = set_up(workload, platform, ranks, memory, objective, inputs)
    check_positive("seconds", seconds)
    steps = None if steps is None else int(check_positive("steps", steps, integer=True))
    check_positive("seed", seed, integer=True, zero=True)
    rules = {"pin": pin, "together": together, "apart": apart, "forbid": forbid}
    constraints = read_constraints(name_tables(workload.tables), problem.costs.ranks, **rules)
    options = list_options(problem, constraints)
    check_memory(problem, options, constraints)
    state = State(problem, options, constraints)
    placed = {name: _place_greedily(state, name, seed) for name in BASELINES}
    search = search_plan(state, seconds, seed, steps, progress)
    over = search.best.overflow
    if over > 0 and not any(placed.values()):
        fault = f"the best one exceeds the {format_bytes(problem.capacity)} of a rank by {format_bytes(over)}"
        advice = "allow more kinds, give more seconds or steps, ranks or memory, or drop constraints"
        raise InfeasibleError(f"memory: no placement was found that fits; {fault}; {advice}")
    placed["search"] = None if over > 0 else search.best
    priced = {
        name: find_price(problem, _plan(state, own), constraints) if own else None for name, own in placed.items()
    }
    every = filter(None, (priced.pop("search"), *priced.values()))
    best = min(every, key=lambda price: (price.time, -price.parts.get("host", 0.0)))  # of hosts alike, the least device
    return ShardingResult(best.plan, best, search.bound, objective, search.work, search.interrupted, priced)


def _plan(state: State, found: Found) -> Plan:
    """Turn a placement of units into a plan of tables."""
    tables, options = state.problem.costs.workload.tables, state.options
    owners: list[int | Placement] = [0] * len(tables)
    for members, option in zip(state.constraints.units, found.choice.tolist(), strict=True):
        at = tuple(found.rank[state.first[option] : state.first[option + 1]].tolist()) or tuple(range(state.ranks))
        kind = str(options.kind[option])
        widths = (tables[members[0]].dim // len(at),) * len(at) if kind in SPLIT_BY_COLUMNS else ()
        for table in members:
            owners[table] = Placement(kind, at, widths)
    return Plan(state.ranks, tuple(owners), tuple(name_tables(tables)))


def _place_greedily(state: State, name: str, seed: int) -> Found | None:
    """Place units of tables by a rule of thumb, whole where that is allowed; None where one finds no room."""
    alone, rng, workload = state.options.starts, np.random.default_rng([4, seed]), state.problem.costs.workload
    state.clear(alone)
    keys = [BASELINES[name](table, workload.batch) for table in workload.tables]
    weights = steady(np.array([sum(keys[table] for table in unit) for unit in state.constraints.units]))
    balanced = state.load[alone, :2].sum(axis=1) if name == "storage" else weights
    order, carried = np.argsort(-weights, kind="stable"), np.zeros(state.ranks)
    for unit in rng.permutation(len(alone)) if name == "random" else order:
        found, free = None, np.flatnonzero(~state.bar(unit, state.load[alone[unit]]))
        if state.options.parts[alone[unit]] != 1:  # it may not be whole on one rank
            found = state.find_ranks(alone[unit])
        elif len(free):
            rank = rng.choice(free) if name == "random" else free[np.argmin(carried[free])]
            carried[rank] += balanced[unit]
            found = 0.0, np.array([rank])
        if found is None:
            return None
        state.put(alone[unit], found[1])
    return state.snapshot()
