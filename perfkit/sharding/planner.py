"""Shard a workload's tables, or price a given plan: constraints as people write them, ways to place
a table, search."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from perfkit.ground.units import check_choice, check_positive, check_type, format_bytes, steady
from perfkit.models.distributions import unique_rows
from perfkit.platform.platform import Platform
from perfkit.sharding.problem import LOAD, NODE_KINDS, Constraints, Options, Problem, set_up
from perfkit.sharding.result import PlanPrice, ShardingResult, find_price
from perfkit.sharding.search import Found, State, search_plan
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import EVERYWHERE, KINDS, SPLIT_BY_COLUMNS, Placement, Plan
from perfkit.workloads.tables import EmbeddingTable, TableSet, name_tables

#: Smallest number of columns in a shard [-]; docs/formulas.md, table 8.2.
_NARROWEST = 4
#: Smallest load of a table that is split, over the average load of a rank [-]; docs/formulas.md,
#: table 8.2.
_LARGE = 0.2
#: Sort key of each rule of thumb: the largest table is placed first, and the sums of keys are
#: balanced over ranks. ``random`` draws the rank, ``storage`` balances seconds. Sources:
#: docs/formulas.md, table 8.2.
BASELINES: MappingProxyType[str, Callable[[EmbeddingTable, int], float]] = MappingProxyType(
    {
        "random": lambda table, batch: 0.0,
        "size": lambda table, batch: float(table.rows * table.dim),
        "lookup": lambda table, batch: table.pooling * table.dim,
        "size-lookup": lambda table, batch: table.pooling * table.dim * float(np.log10(table.rows)),
        "unique-rows": lambda table, batch: (
            float(unique_rows(table.distribution, batch * table.pooling)) * table.dim
        ),
        "storage": lambda table, batch: float(table.nbytes),
    }
)


class InfeasibleError(ValueError):
    """No placement satisfies the constraints."""


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
        Where its tables are stored.
    memory : float, optional
        Memory of a rank; by default that of the platform's device [B].
    objective : str, optional
        ``iteration`` or ``additive``.
    inputs : str, optional
        ``local`` if the data loader of a rank reads the indices of its own tables, ``exchanged`` if
        an all_to_all brings them at the start of the iteration.

    Returns
    -------
    price : PlanPrice
        Time and memory of the plan; its ``fits`` says whether the memory suffices.

    Raises
    ------
    ValueError
        For a plan of other tables, splits that do not fit a table or a node, or kinds that the
        platform cannot price.

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
        shown, least = (
            f"table {number} is {kind} on ranks {ranks}",
            node if kind == "table_row_wise" else 1,
        )
        if kind not in known:
            raise ValueError(
                f"{shown}; {name!r} has no model of its messages; take one of {', '.join(known)}"
            )
        if kind in NODE_KINDS and (len({rank // node for rank in ranks}) > 1 or len(ranks) < least):
            raise ValueError(
                f"{shown}; it must be on ranks of one node, and table_row_wise on all {node} of them"
            )
    return find_price(problem, plan)


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
    """Search for the placement of embedding tables with the shortest iteration.

    Parameters
    ----------
    workload : DLRM or TableSet
        What is trained; its batch is over all ranks.
    platform : Platform, str or Path
        On what: a platform, a name of the gallery or a file.
    ranks : int
        Number of ranks [-].
    memory : float, optional
        Memory of a rank; by default that of the platform's device [B].
    objective : str, optional
        ``iteration``: the predicted time of an iteration, whose collectives wait for the slowest
        rank. ``additive``: the seconds of the tables on the slowest rank, without messages; tables
        are whole or split by columns.
    seconds : float, optional
        Work to spend on the search. Steps are counted, each with its time on one core of an AMD Zen
        5. So the same input, seed and seconds give the same plan on every machine [s].
    steps : int, optional
        Number of steps in place of `seconds`: trades between ranks, and tables that are placed. The
        same input, seed and steps give the same plan. With a few dozen tables, 7,000 steps take
        about a second [-].
    seed : int, optional
        Seed [-].
    pin : mapping, optional
        Rank of each table that must be whole on a given rank; tables by number or name.
    together, apart : sequence of groups, optional
        Groups of tables that must share a rank, or must not.
    forbid : str, sequence of str or mapping, optional
        Kinds of placement that no table may have; a mapping gives such kinds by table.
    inputs : str, optional
        ``local`` if the data loader of a rank reads the indices of its own tables, ``exchanged`` if
        an all_to_all brings them at the start of the iteration.
    progress : callable, optional
        ``progress(done, time)`` gets the share of the work that is done and the best time so far
        [s].

    Returns
    -------
    result : ShardingResult
        Plan, price, lower bound and gap, beside the rules of thumb; after Ctrl-C the best plan so
        far.

    Raises
    ------
    ValueError
        For bad input.
    InfeasibleError
        If no placement keeps memory and constraints; the message says what is missing and what
        would help.

    Notes
    -----
    The bound holds for all plans that are made of these placements: whole on one rank; copied to
    every rank; columns halved one or more times; rows split over all ranks or over those of a node.
    Splits of small tables and copies of large ones are left out, because they only add work.

    Examples
    --------
    >>> from perfkit.workloads.tables import draw_tables
    >>> tables = TableSet(draw_tables(100, seed=0), batch=65536, embedding="fused")
    >>> result = shard(tables, "h100-sxm-8", ranks=8, steps=2000)
    >>> result.gap < 0.05
    True
    """
    problem = set_up(workload, platform, ranks, memory, objective, inputs)
    seconds = check_positive("seconds", seconds)
    steps = None if steps is None else int(check_positive("steps", steps, integer=True))
    seed = check_positive("seed", seed, integer=True, zero=True)
    rules = {"pin": pin, "together": together, "apart": apart, "forbid": forbid}
    constraints = read_constraints(name_tables(workload.tables), problem.costs.ranks, **rules)
    problem = replace(problem, constraints=constraints)
    options = list_options(problem)
    check_memory(problem, options)
    state = State(problem, options)
    placed = {name: _place_greedily(state, name, seed) for name in BASELINES}
    search = search_plan(state, seconds, seed, steps, progress)
    over = search.best.overflow
    if over > 0 and not any(placed.values()):
        fault = f"the best one exceeds the {format_bytes(problem.capacity)} of a rank by {format_bytes(over)}"
        advice = (
            "allow more kinds, give more seconds or steps, ranks or memory, or drop constraints"
        )
        raise InfeasibleError(f"memory: no placement was found that fits; {fault}; {advice}")
    priced = {
        name: find_price(problem, _make_plan(state, own)) if own else None
        for name, own in placed.items()
    }
    every = [price for price in priced.values() if price]
    if over <= 0:
        every.insert(0, find_price(problem, _make_plan(state, search.best)))
    # or the least time of the device
    best = min(every, key=lambda price: (price.time, -price.parts.get("host", 0.0)))
    return ShardingResult(
        best.plan, best, search.bound, objective, search.work, search.interrupted, priced
    )


def _find(names: Sequence[str], table: Any, argument: str) -> int:
    """Number of a table, which is given by number or name."""
    if isinstance(table, str):
        return names.index(check_choice(f"table of {argument}", table, names))
    return int(
        check_positive(
            f"table of {argument}", table, integer=True, zero=True, maximum=len(names) - 1
        )
    )


def _list(given: Any) -> list[Any]:
    """A list of the values, or of the only one."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _find_groups(names: Sequence[str], groups: Any, argument: str) -> list[list[int]]:
    """Groups of tables by number."""
    found = []
    for group in _list(groups):
        numbers = list(dict.fromkeys(_find(names, table, argument) for table in _list(group)))
        if len(numbers) < 2:
            raise ValueError(
                f"{argument} has {group!r}; it must be groups of at least two tables, such as [(0, 3)]"
            )
        found.append(numbers)
    return found


def read_constraints(
    names: Sequence[str],
    ranks: int,
    *,
    pin: Any = None,
    together: Any = (),
    apart: Any = (),
    forbid: Any = (),
) -> Constraints:
    """Check the constraints of `perfkit.shard`; returns them with tables by number."""
    fixed, groups = dict[int, int](), []
    check_type("pin", pin, Mapping | None)
    first = np.arange(len(names))  # first table of the unit of each
    for group in _find_groups(names, together, "together"):
        joined = first[group]
        first[np.isin(first, joined)] = joined.min()
    home = np.unique(first, return_inverse=True)[1]
    for table, rank in (pin or {}).items():
        number = _find(names, table, "pin")
        name, unit = names[number], int(home[number])
        check_positive(f"rank of {name!r}", rank, integer=True, zero=True, maximum=ranks - 1)
        if fixed.setdefault(unit, int(rank)) != rank:
            text = f"pin puts {name!r} on rank {rank} and a table that must share its rank on rank {fixed[unit]}"
            raise InfeasibleError(f"{text}; drop one of the two")
    allowed = {kind: np.ones(len(names), dtype=bool) for kind in KINDS}
    for table, kinds in (
        forbid if isinstance(forbid, Mapping) else dict.fromkeys(range(len(names)), forbid)
    ).items():
        for kind in _list(kinds):
            allowed[check_choice("forbidden kind", kind, KINDS)][_find(names, table, "forbid")] = (
                False
            )
    for group in _find_groups(names, apart, "apart"):
        for one, other in combinations(group, 2):
            if home[one] == home[other] or fixed.get(home[one], -1) == fixed.get(home[other], -2):
                pair = f"{names[one]!r} and {names[other]!r}"
                raise InfeasibleError(
                    f"{pair} must be apart, but together or pin puts them on one rank; drop one"
                )
        if len(group) > ranks:
            raise InfeasibleError(
                f"{len(group)} tables must be apart on {ranks} ranks; take more ranks"
            )
        groups.append(tuple(home[group].tolist()))
        for kind in EVERYWHERE:
            allowed[kind][group] = False
    # these must be whole on one rank
    whole = np.isin(home, list(fixed)) | (np.bincount(home)[home] > 1)
    for kind in KINDS:
        allowed[kind] &= ~whole | (kind == "table_wise")
    return Constraints(home, fixed, tuple(groups), allowed)


def list_options(problem: Problem) -> Options:
    """List the options of each unit of tables that may help; whole on one rank comes first where
    that is allowed.

    What cannot help is left out: splits of tables below a fifth of the average load of a rank, and
    copies of tables whose gradient has more than four times the bytes of their pooled rows.
    """
    costs, constraints, capacity = problem.costs, problem.constraints, problem.capacity
    tables, ranks, node, found = (
        costs.workload.tables,
        costs.ranks,
        costs.node,
        list[tuple[np.ndarray, ...]](),
    )
    rows, dim = np.array([(table.rows, table.dim) for table in tables]).T

    def add(kind: str, members: np.ndarray, parts: int, part: float = 1.0) -> None:
        own = np.flatnonzero(members & constraints.allowed[kind] & (kind in problem.kinds))
        if len(own) or not found:
            loads = map(problem.loads, costs.shards(own, kind, part))
            found.append((own, np.full(len(own), kind), np.full(len(own), parts), *loads))

    add("table_wise", rows > 0, 1)
    loads = problem.loads(costs.shards(np.arange(len(tables)), "table_wise")[0])
    limit = (1.0 if problem.objective == "additive" else _LARGE) * loads.sum(axis=0) / ranks
    limit[-1] = min(limit[-1], _LARGE * capacity) if capacity > 0 else limit[-1]
    large = ((loads > limit) & (limit > 0)).any(axis=1) | ~constraints.allowed["table_wise"]
    if ranks > 1:
        for kind, most in (
            ("column_wise", ranks),
            ("table_column_wise", node if node < ranks else 0),
        ):
            for count in (2**power for power in range(1, most.bit_length())):
                add(kind, large & (dim % (count * _NARROWEST) == 0), count, 1 / count)
        add("row_wise", large & (rows >= ranks), 0)
        if 1 < node < ranks:
            add("table_row_wise", large & (rows >= node), node)
        add("data_parallel", costs.worth, 0)
    table, kinds, parts, load, hot = (np.concatenate(part) for part in zip(*found, strict=True))
    if len(missing := np.setdiff1d(np.arange(len(tables)), table)):
        text = (
            f"no kind is left for {name_tables(tables)[missing[0]]!r}: constraints rule out some of"
        )
        text += f" {', '.join(problem.kinds)}, and the others do not fit its shape or the ranks"
        raise InfeasibleError(f"{text}; allow another kind")
    # Tables of one unit are whole, so they have one option: the sum of theirs.
    order, home = np.argsort(constraints.home[table], kind="stable"), constraints.home
    unit = home[table[order]]
    first = np.flatnonzero((np.bincount(home)[unit] == 1) | (np.diff(unit, prepend=-1) > 0))
    chosen, load = order[first], np.add.reduceat(load[order], first, axis=0)
    return Options(
        unit[first], kinds[chosen], parts[chosen], load, hot[chosen], costs.home[table[chosen]]
    )


def check_memory(problem: Problem, options: Options) -> None:
    """Refuse tables that no placement can hold; the error says how many ranks would do."""
    capacity, ranks, tables = (
        problem.capacity,
        problem.costs.ranks,
        name_tables(problem.costs.workload.tables),
    )
    names = [repr("+".join(tables[t] for t in unit)) for unit in problem.constraints.units]
    taken = format_bytes(max(problem.reserved, 0.0))
    rest = f"of the {format_bytes(capacity + problem.reserved)} of a rank, {taken} are taken by everything else"
    if capacity <= 0:
        raise InfeasibleError(
            f"memory: nothing is left for tables; {rest}; give more bytes, or a smaller batch"
        )
    alone = options.load + options.hot * (options.parts > 0)[:, None]
    least, total = (
        options.least(loads[:, LOAD["memory"]]) for loads in (alone, options.total(ranks))
    )
    if (most := least.max()) > capacity:
        need = f"{names[np.argmax(least)]} needs at least {format_bytes(most)} on one rank"
        would = f"about {max(ranks + 1, math.ceil(ranks * most / capacity))} ranks would do if it may be split"
        advice = "or give more memory, a smaller batch or smaller tables"
        raise InfeasibleError(f"memory: {need}; {rest}; {would}, {advice}")
    if (needed := total.sum()) > capacity * ranks:
        hold = f"{ranks} ranks hold {format_bytes(capacity * ranks)} ({rest})"
        largest = ", ".join(names[n] for n in np.argsort(-total, kind="stable")[:3])
        text = f"{math.ceil(needed / capacity)} ranks would do; the largest are {largest}"
        raise InfeasibleError(
            f"memory: all tables together need {format_bytes(needed)}; {hold}; {text}"
        )


def _make_plan(state: State, found: Found) -> Plan:
    """Turn a placement of units into a plan of tables."""
    tables, options = state.problem.costs.workload.tables, state.options
    owners: list[int | Placement] = [0] * len(tables)
    for members, option in zip(state.problem.constraints.units, found.choice.tolist(), strict=True):
        at = tuple(found.rank[state.first[option] : state.first[option + 1]].tolist()) or tuple(
            range(state.ranks)
        )
        kind = str(options.kind[option])
        widths = (tables[members[0]].dim // len(at),) * len(at) if kind in SPLIT_BY_COLUMNS else ()
        for table in members:
            owners[table] = Placement(kind, at, widths)
    return Plan(state.ranks, tuple(owners), tuple(name_tables(tables)))


def _place_greedily(state: State, name: str, seed: int) -> Found | None:
    """Place units of tables by a rule of thumb, whole where that is allowed; None if one finds no
    room."""
    alone, rng, workload = (
        state.options.starts,
        np.random.default_rng([4, seed]),
        state.problem.costs.workload,
    )
    state.clear(alone)
    keys = [BASELINES[name](table, workload.batch) for table in workload.tables]
    weights = steady(
        np.array([sum(keys[table] for table in unit) for unit in state.problem.constraints.units])
    )
    balanced = state.load[alone, :2].sum(axis=1) if name == "storage" else weights
    order, carried = np.argsort(-weights, kind="stable"), np.zeros(state.ranks)
    for unit in rng.permutation(len(alone)) if name == "random" else order:
        found, free = None, np.flatnonzero(~state.bar(unit, state.load[alone[unit]]))
        if state.options.parts[alone[unit]] != 1:  # it must not be whole on one rank
            found = state.find_ranks(alone[unit])
        elif len(free):
            rank = rng.choice(free) if name == "random" else free[np.argmin(carried[free])]
            carried[rank] += balanced[unit]
            found = 0.0, np.array([rank])
        if found is None:
            return None
        state.put(alone[unit], found[1])
    return state.snapshot()
