"""Shard a workload's tables, or price a given plan: constraints as people write them, ways to place
a table, search."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import (
    Array,
    check_choice,
    check_positive,
    check_type,
    format_bytes,
    is_listed,
    steady,
)
from perfkit.models.distributions import unique_rows
from perfkit.platform.estimates import warn_once
from perfkit.platform.platform import Platform
from perfkit.sharding.problem import (
    LOAD,
    NODE_KINDS,
    Constraints,
    Floors,
    Options,
    Problem,
    set_up,
)
from perfkit.sharding.result import PlanPrice, ShardingResult, find_price
from perfkit.sharding.search import Found, Progress, State, search_plan
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import (
    BY_ROWS,
    EVERYWHERE,
    KINDS,
    SPLIT_BY_COLUMNS,
    Placement,
    Plan,
)
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
#: A rule that a search may start from: equally many tables on each rank, which suits a host that
#: launches kernels for each table.
_EVENLY = "equally many"


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

    Notes
    -----
    The time of a DLRM is a closed form that a search can bound, within 2 % of `perfkit.predict` for
    the same plan on GPUs, and 6 % where tables are split by rows. There is one exception: where the host sets the time, it takes as many
    ranks to send pooled rows as a balanced plan of whole tables has. `perfkit.predict` counts them:
    each takes the host a copy more, some 20 µs, so the difference is up to a tenth on 16 ranks.

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
        5. So the same input, seed and seconds give the same plan on every machine. The preparation
        comes on top and is not counted: prices of all tables, the bound and the rules of thumb take
        1 to 4 ms a table [s].
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
        Kinds of placement that no table may have; a mapping gives such kinds by table. The search
        without `forbid` goes first. It is repeated, with as much work each time, only if its plan
        uses what is forbidden.
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
        far. Its `warnings` name the kinds of placement that were not tried, and why.

    Raises
    ------
    ValueError
        For bad input.
    InfeasibleError
        If no placement keeps memory and constraints; the message says what is missing and what
        would help.

    Notes
    -----
    The bound holds for all plans that keep the constraints and that `price_plan` can price. No plan
    is slower than the rules of thumb, which keep the constraints as well.

    The search tries these placements: whole on one rank; copied to every rank; columns halved one
    or more times, over any ranks or inside one node; rows split. Splits of small tables and copies
    of large ones are tried only where the bound uses them, because they mostly add work.

    ``row_wise`` always splits the rows over all ranks. ``table_row_wise`` splits them over the ranks
    of one node, and the search takes the cheapest node. Both need a model of reduce_scatter and
    all_gather, over all ranks or inside a node, and ``data_parallel`` needs all_reduce over all
    ranks. A kind is not tried if the platform has no such model; the result says so. Where both
    kinds can be priced, the time decides. Partial sums of ``row_wise`` cross the links between
    nodes, so it mostly wins where a table fits into no node.

    What is guaranteed: equal input gives an equal plan. If `forbid` names only what the plan
    without it does not use, plan and time stay the same, unless a rule of thumb under `forbid` is
    faster. Forbidding never lowers the bound. So a plan under `forbid` is never faster than the plan
    without it by more than the `gap` of the latter. Within that gap it may be, as both searches end
    after their work. The order of the tables does not matter, except among tables that are alike.
    Other constraints, and ranks that are named by `pin`, change the way of the search: another plan
    may be found, within the gap.

    Examples
    --------
    >>> from perfkit.workloads.tables import draw_tables
    >>> tables = TableSet(draw_tables(100, seed=0), batch=65536, embedding="fused")
    >>> result = shard(tables, "h100-sxm-8", ranks=8, steps=2000)
    >>> result.gap < 0.05
    True
    """
    problem = set_up(workload, platform, ranks, memory, objective, inputs)
    budget = _Budget(
        check_positive("seconds", seconds),
        None if steps is None else int(check_positive("steps", steps, integer=True)),
        int(check_positive("seed", seed, integer=True, zero=True)),
    )
    names, order = name_tables(workload.tables), problem.costs.order
    rules = {"pin": pin, "together": together, "apart": apart}
    constraints = read_constraints(names, problem.costs.ranks, order, **rules, forbid=forbid)
    unforbidden = read_constraints(names, problem.costs.ranks, order, **rules)
    prepared = _prepare(replace(problem, constraints=constraints))
    check_memory(prepared.problem, prepared.state.options)
    forbidden = [
        kind for kind in KINDS if (constraints.allowed[kind] < unforbidden.allowed[kind]).any()
    ]
    attempts = _Attempts(prepared, unforbidden, forbidden, budget, progress)
    with np.errstate(under="ignore"):  # once, as entering it takes as long as a step of the search
        outcome = attempts.run()
        best, baselines = _choose(outcome.prices), outcome.baselines
        if outcome.state is not prepared.state:
            placed = {
                name: _place_greedily(prepared.state, name, budget.seed) for name in BASELINES
            }
            baselines = _price_baselines(prepared.state, placed)
            best = _choose([find_price(prepared.problem, best.plan), *baselines.values()])
    reasons = [f"{kind} was not tried: {text}" for kind, text in problem.left_out.items()]
    return ShardingResult(
        best.plan,
        best,
        prepared.bound,
        objective,
        attempts.work,
        attempts.interrupted,
        baselines,
        warn_once(tuple(reasons), 3),
    )


class _Budget(NamedTuple):
    """Work of one search [s], or its steps, and its seed."""

    seconds: float
    steps: int | None
    seed: int


class _Prepared(NamedTuple):
    """A problem before its search: lower bound [s], and options of the units to start from."""

    problem: Problem
    bound: float
    bases: Sequence[np.ndarray]
    state: State


class _Outcome(NamedTuple):
    """What one search found: prices of the plans that fit, its own and those of rules of thumb."""

    state: State
    prices: Sequence[PlanPrice]
    baselines: dict[str, PlanPrice | None]


@np.errstate(under="ignore")
def _prepare(problem: Problem) -> _Prepared:
    """Bound a problem and list its options."""
    bound = problem.bound(list_floors(problem))
    # options that rarely help are tried where the bound uses them
    helpful = {kind: bound.kinds == kind for kind in (*BY_ROWS, "data_parallel")}
    options = list_options(problem, helpful)
    bases = problem.relax(options)
    bases.insert(0 if bound.by_host else len(bases), options.take(bound.kinds))
    return _Prepared(problem, bound.time, bases, State(problem, options))


@dataclass
class _Attempts:
    """Searches until a plan uses nothing that is forbidden.

    The search without `forbid` goes first: what it finds stays the plan if it uses nothing that is
    forbidden. So forbidding what a plan does not use changes nothing. Else the forbidden kinds that
    it uses are ruled out, and the search is repeated. `prepared` has all constraints.
    """

    prepared: _Prepared
    unforbidden: Constraints
    forbidden: Sequence[str]
    budget: _Budget
    progress: Progress
    work: float = 0.0
    interrupted: bool = False

    def run(self) -> _Outcome:
        """The outcome of the first search whose plan keeps all constraints."""
        constraints, ruled_out = self.prepared.problem.constraints, set[str]()
        while True:
            last = len(ruled_out) == len(self.forbidden)
            outcome = self._search(self._allow(ruled_out), len(ruled_out), last)
            if last:
                return outcome
            if not outcome.prices:
                ruled_out = set(self.forbidden)
                continue
            best = _choose(outcome.prices)
            used = {
                placement.kind
                for table, placement in enumerate(best.plan.placements)
                if not constraints.allowed[placement.kind][table]
            }
            if not used:
                if self.progress is not None:
                    self.progress(1.0, best.time)
                return outcome
            ruled_out |= used
            if self.interrupted:  # a last plan, with no more work than a start
                ruled_out, self.budget = set(self.forbidden), self.budget._replace(steps=1)

    def _allow(self, ruled_out: set[str]) -> _Prepared:
        """The problem where only these of the forbidden kinds are forbidden."""
        problem = self.prepared.problem
        if len(ruled_out) == len(self.forbidden):
            return self.prepared
        allowed = {
            kind: (problem.constraints if kind in ruled_out else self.unforbidden).allowed[kind]
            for kind in KINDS
        }
        return _prepare(replace(problem, constraints=replace(problem.constraints, allowed=allowed)))

    def _search(self, prepared: _Prepared, number: int, last: bool) -> _Outcome:
        """Search once; if it is the last search and nothing fits, an error says what is missing."""
        problem, state, budget = prepared.problem, prepared.state, self.budget
        share = 1 / (len(self.forbidden) + 1)

        def tell(done: float, time: float) -> None:
            if self.progress is not None:
                self.progress(1.0 if last and done == 1 else share * (number + done), time)

        rules = [*BASELINES]
        if not (problem.costs.fused and problem.costs.accelerated):
            rules.append(_EVENLY)  # each table has kernels of its own
        placed = {name: _place_greedily(state, name, budget.seed) for name in rules}
        baselines = _price_baselines(state, placed)
        search = search_plan(
            state,
            prepared.bound,
            prepared.bases,
            [found for found in placed.values() if found],
            budget.seconds,
            budget.seed,
            budget.steps,
            tell,
        )
        self.work += search.work
        self.interrupted |= search.interrupted
        prices = [price for price in baselines.values() if price]
        over = search.best.overflow
        if over <= 0:
            prices.insert(0, find_price(problem, _make_plan(state, search.best)))
        if not prices and last:
            room = format_bytes(problem.capacity)
            fault = f"the best one exceeds the {room} of a rank by {format_bytes(over)}"
            advice = (
                "allow more kinds, give more seconds or steps, ranks or memory, or drop constraints"
            )
            raise InfeasibleError(f"memory: no placement was found that fits; {fault}; {advice}")
        return _Outcome(state, prices, baselines)


def _choose(prices: Sequence[PlanPrice | None]) -> PlanPrice:
    """The first one of the shortest time; among equal times, of the shortest time of the device."""
    return min(
        (price for price in prices if price),
        key=lambda price: (price.time, -price.parts.get("host", 0.0)),
    )


def _price_baselines(
    state: State, placed: Mapping[str, Found | None]
) -> dict[str, PlanPrice | None]:
    """Prices of the plans of the rules of thumb; None for one that finds no room."""
    prices = dict[str, PlanPrice | None]()
    for name in BASELINES:
        found = placed[name]
        prices[name] = find_price(state.problem, _make_plan(state, found)) if found else None
    return prices


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
    return list(given) if is_listed(given) else [given]


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
    order: np.ndarray | None = None,
    *,
    pin: Any = None,
    together: Any = (),
    apart: Any = (),
    forbid: Any = (),
) -> Constraints:
    """Check the constraints of `perfkit.shard`; returns them with tables by number.

    `order` lists the tables as units are numbered, so that the order in which tables were given does
    not matter; by default they are numbered as given.
    """
    fixed, groups = dict[int, int](), []
    check_type("pin", pin, Mapping | None)
    # place of the first table of the unit of each
    first = np.arange(len(names)) if order is None else np.argsort(order)
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


class _Entries(NamedTuple):
    """Ways of one kind to place some tables: numbers of the tables, kind, and numbers by table."""

    tables: np.ndarray
    kind: str
    numbers: tuple[np.ndarray, ...]


def list_options(problem: Problem, helpful: Mapping[str, np.ndarray] | None = None) -> Options:
    """List the options of each unit of tables that may help; whole on one rank comes first where
    that is allowed.

    What rarely helps is left out: splits of tables below a fifth of the average load of a rank, and
    copies of tables whose gradient has more than four times the bytes of their pooled rows. It is
    tried where `helpful` names it: by kind, which units of tables the relaxed problem places so.
    """
    costs, allowed = problem.costs, problem.constraints.allowed
    tables, ranks, node = costs.workload.tables, costs.ranks, costs.node
    rows, dim = _list_shapes(tables)
    entries = list[_Entries]()

    def add(kind: str, members: np.ndarray, parts: int, part: float = 1.0) -> None:
        wanted = (helpful or {}).get(kind)
        if wanted is not None:
            members = members | (wanted[problem.constraints.home] & (rows >= (parts or 1)))
        chosen = np.flatnonzero(members & allowed[kind] & (kind in problem.kinds))
        if not len(chosen) and entries:
            return
        load, hot = map(problem.loads, costs.shards(chosen, kind, part))
        entries.append(_Entries(chosen, kind, (np.full(len(chosen), parts), load, hot)))

    add("table_wise", rows > 0, 1)
    loads = problem.loads(costs.shards(np.arange(len(tables)), "table_wise")[0])
    large = _find_large(problem, loads) | ~allowed["table_wise"]
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
    add("data_parallel", costs.worth & (ranks > 1), 0)
    units, chosen, kinds, (parts, load, hot) = _join_units(problem, entries)
    return Options(units, kinds, parts, load, hot, costs.home[chosen])


def list_floors(problem: Problem) -> Floors:
    """List the least loads of every kind of placement of each unit of tables, for the lower bound.

    The parts of a split by columns look up the same rows, and each reads all indices. Together they
    cost no less than the whole table or equal parts, whichever is less for a resource. The largest
    part has at least the columns of an even split over all ranks. Under one kernel of a GPU for all
    tables, splits of a table only add work, so small ones need no price of their own: only the
    messages of a split by rows are others.
    """
    costs, allowed = problem.costs, problem.constraints.allowed
    tables, ranks, node = costs.workload.tables, costs.ranks, costs.node
    rows, dim = _list_shapes(tables)
    everything = np.arange(len(tables))
    whole = problem.loads(costs.shards(everything, "table_wise")[0])
    entries = list[_Entries]()

    def add(kind: str, members: np.ndarray, average: Array, largest: Array) -> None:
        chosen = np.flatnonzero(members & allowed[kind] & (kind in problem.kinds))
        if len(chosen) or not entries:
            entries.append(_Entries(chosen, kind, (average[chosen], largest[chosen])))

    priced = rows > 0
    if costs.fused and costs.accelerated:
        priced = _find_large(problem, whole)

    def add_split_by_rows(kind: str, parts: int) -> None:
        average, largest = whole / ranks, np.zeros_like(whole)
        if kind == "row_wise":  # each rank has partial sums of the whole batch
            average[:, LOAD["pooled"]] = 0.0
            average[:, LOAD["rows"]] = whole[:, LOAD["pooled"]]
        members = np.flatnonzero(priced & (rows >= parts) & allowed[kind] & (kind in problem.kinds))
        load, hot = map(problem.loads, costs.shards(members, kind))
        average[members] = (parts * load + hot) / ranks
        largest[members] = load + hot
        add(kind, (rows >= parts) & (needed | (kind == "row_wise")), average, largest)

    # Small tables have no largest shard that counts, and splits that cost as much as they do as a
    # whole are left out beside it.
    add("table_wise", rows > 0, whole / ranks, np.where(priced[:, None], whole, 0.0))
    needed = priced | ~allowed["table_wise"]
    for kind, most in (("column_wise", ranks), ("table_column_wise", node)):
        average, largest = whole / ranks, np.zeros_like(whole)
        members = np.flatnonzero(priced & allowed[kind] & (kind in problem.kinds))
        largest[members] = whole[members]
        for parts in (*(2**power for power in range(1, most.bit_length())), most):
            chosen = members[dim[members] > 1]
            if not len(chosen) or parts == 1:
                continue
            width = np.ceil(dim[chosen] / np.minimum(dim[chosen], parts)) / dim[chosen]
            shard = problem.loads(costs.shards(chosen, kind, width)[0])
            average[chosen] = np.minimum(average[chosen], shard / width[:, None] / ranks)
            largest[chosen] = np.minimum(largest[chosen], shard)
        add(kind, needed, average, largest)
    add_split_by_rows("row_wise", ranks)
    add_split_by_rows("table_row_wise", node)
    copies = np.zeros_like(whole)
    copied = np.flatnonzero(allowed["data_parallel"] & ("data_parallel" in problem.kinds))
    copies[copied] = problem.loads(costs.shards(copied, "data_parallel")[0])
    add("data_parallel", rows > 0, copies, copies)
    units, _, kinds, (average, largest) = _join_units(problem, entries)
    return Floors(units, kinds, average, largest)


def _list_shapes(tables: Sequence[EmbeddingTable]) -> tuple[Array, Array]:
    """Rows and columns of tables, as floats: their products may pass the largest whole number."""
    rows, columns = np.array([(table.rows, table.dim) for table in tables], dtype=float).T
    return rows, columns


def _find_large(problem: Problem, whole: Array) -> np.ndarray:
    """Which tables are so large that it may help to split them, from their loads as a whole."""
    share = 1.0 if problem.objective == "additive" else _LARGE
    limit = share * whole.sum(axis=0) / problem.costs.ranks
    if problem.capacity > 0:
        limit[-1] = min(limit[-1], _LARGE * problem.capacity)
    return np.asarray(((whole > limit) & (limit > 0)).any(axis=1))


def _join_units(
    problem: Problem, entries: Sequence[_Entries]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Entries sorted by unit of tables: unit, first table, kind, and numbers of each.

    Tables of one unit are whole, so a unit of several has one entry: the sum of theirs.
    """
    home = problem.constraints.home
    table = np.concatenate([entry.tables for entry in entries])
    kinds = np.concatenate([np.full(len(entry.tables), entry.kind) for entry in entries])
    numbers = [
        np.concatenate(part) for part in zip(*(entry.numbers for entry in entries), strict=True)
    ]
    missing = np.setdiff1d(np.arange(len(home)), table)
    if len(missing):
        name = name_tables(problem.costs.workload.tables)[missing[0]]
        text = f"no kind is left for {name!r}: constraints rule out some of"
        text += f" {', '.join(problem.kinds)}, and the others do not fit its shape or the ranks"
        raise InfeasibleError(f"{text}; allow another kind")
    order = np.argsort(home[table], kind="stable")
    unit = home[table[order]]
    alone = np.bincount(home)[unit] == 1
    first = np.flatnonzero(alone | (np.diff(unit, prepend=-1) > 0))
    chosen = order[first]
    joined = [
        np.add.reduceat(part[order], first, axis=0) if part.ndim > 1 else part[chosen]
        for part in numbers
    ]
    return unit[first], table[chosen], kinds[chosen], joined


def check_memory(problem: Problem, options: Options) -> None:
    """Refuse tables that no placement can hold; the error says how many ranks would do."""
    capacity, ranks, tables = (
        problem.capacity,
        problem.costs.ranks,
        name_tables(problem.costs.workload.tables),
    )
    names = [repr("+".join(tables[t] for t in unit)) for unit in problem.constraints.units]
    taken = format_bytes(problem.reserved)
    rest = f"of the {format_bytes(problem.memory)} of a rank, {taken} are taken by everything else"
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
        if kind == "table_wise":
            for table in members:
                owners[table] = at[0]
            continue
        widths = (tables[members[0]].dim // len(at),) * len(at) if kind in SPLIT_BY_COLUMNS else ()
        placement = Placement(kind, at, widths)
        for table in members:
            owners[table] = placement
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
    keys = [1.0] * len(workload.tables)
    if name != _EVENLY:
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
