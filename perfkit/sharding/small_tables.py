"""Join the shards of small tables where that costs little: people run no plan that spreads a table
of a few rows over ranks for a gain that nobody can measure."""

from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.sharding.costs import Cost
from perfkit.sharding.problem import DEVICE_RESOURCES, Problem, Resource
from perfkit.sharding.result import PlanPrice, price_checked_plan
from perfkit.workloads.placement import Placement, Plan
from perfkit.workloads.placement_kinds import KIND_OF_NAME, WHOLE, PlacementKind

#: Most weights and states of a small table, over the memory of a rank for tables: memory is no
#: reason to split it where a rank has room for a thousand of them, as many tables as large models
#: have [-]; docs/formulas.md, table 8.2.
_SMALL = 1e-3
#: Most of the time that is given up, relative to it: what no measurement would show [-];
#: docs/formulas.md, table 8.2.
_MOST_GIVEN_UP = 0.05
#: What times that are computed in another order may differ by, relative to them [-].
_ROUNDING = 1e-12


class JoinedPlan(NamedTuple):
    """A plan after the shards of small tables were joined.

    Parameters
    ----------
    price : PlanPrice
        Time and memory of the plan.
    tables : tuple of int
        Tables that were in shards before [-].
    given_up : float
        How much longer it takes than with the shards [s].
    """

    price: PlanPrice
    tables: tuple[int, ...] = ()
    given_up: float = 0.0


class _Place(NamedTuple):
    """A place of a table, whole or copied.

    Parameters
    ----------
    owner : int or Placement
        As in a plan.
    loads : array, shape (ranks, resources)
        Loads of all ranks with it [s or B].
    time : float
        Time of the plan with it [s].
    """

    owner: int | Placement
    loads: Array
    time: float


def join_small_tables(problem: Problem, price: PlanPrice) -> JoinedPlan:
    """Store small tables whole on one rank, or copied, where the plan has shards of them and their
    gain is within the uncertainty of the time.

    Parameters
    ----------
    problem : Problem
        What is placed; its constraints are kept.
    price : PlanPrice
        A plan and its time.

    Returns
    -------
    joined : JoinedPlan
        The plan with fewer shards. It takes no more than the upper end of the 80 % interval of the
        time of the plan that is given, and no more than a twentieth longer.
    """
    plan = price.plan
    numbers = _list_small_splits(problem, plan)
    most_time = min(price.interval()[1], (1 + _MOST_GIVEN_UP) * price.time)
    loads = problem.find_loads(price.costs)
    owners = list(plan.owners)
    joined = []
    for number in numbers:
        loads_of_table = problem.find_loads(price._costs.of_table(number, plan.ranks))
        place = _find_best_place(problem, owners, number, loads - loads_of_table)
        if place is None or place.time > most_time:
            continue
        owners[number] = place.owner
        loads = place.loads
        joined.append(number)
    if not joined:
        return JoinedPlan(price)
    changed = price_checked_plan(problem, Plan(plan.ranks, tuple(owners), plan.names, plan.mlps))
    given_up = max(changed.time - price.time, 0.0)
    return JoinedPlan(changed, tuple(joined), given_up)


def _list_small_splits(problem: Problem, plan: Plan) -> list[int]:
    """Small tables that have several shards, sorted as units are, so that the order in which tables
    were given does not matter."""
    costs = problem.costs
    split = []
    for number in costs.order.tolist():
        placement = plan.placements[number]
        is_split = placement.traits.splits_columns or placement.traits.splits_rows
        if is_split and len(placement.ranks) > 1:
            split.append(number)
    is_small = find_small_tables(problem)
    return [number for number in split if is_small[number]]


def find_small_tables(problem: Problem) -> np.ndarray:
    """Which tables are small, shape (tables,)."""
    numbers = np.arange(len(problem.costs.workload.tables))
    whole = problem.costs.shards(numbers, WHOLE.name).shard
    nbytes = whole[:, Cost.WEIGHTS] + whole[:, Cost.STATE]
    return np.asarray(nbytes <= _SMALL * problem.capacity)


def _find_best_place(
    problem: Problem, owners: list[int | Placement], number: int, loads: Array
) -> _Place | None:
    """The place of a table that adds the least to loads without it; None if there is no room."""
    places = []
    for kind in KIND_OF_NAME.values():
        if kind.name not in problem.kinds or not problem.constraints.allowed[kind.name][number]:
            continue
        if kind.is_whole:
            places.append(_find_best_rank(problem, owners, number, loads))
        elif kind.is_copied:
            places.append(_copy(problem, number, loads, kind))
    fitting = [place for place in places if place is not None]
    if not fitting:
        return None
    return min(fitting, key=lambda place: place.time)


def _find_best_rank(
    problem: Problem, owners: list[int | Placement], number: int, loads: Array
) -> _Place | None:
    """The best rank for a whole table; of those with the same time, the one with least work."""
    whole = problem.find_loads(problem.costs.shards(np.array([number]), WHOLE.name).shard[0])
    loads_with = loads + whole
    times = np.array(problem.time(np.maximum(loads.max(axis=0), loads_with)))
    times[loads_with[:, Resource.MEMORY] > problem.capacity] = np.inf
    times[_list_barred_ranks(problem, owners, number)] = np.inf
    least = times.min()
    if least == np.inf:
        return None
    equal = np.flatnonzero(times <= least * (1 + _ROUNDING))
    seconds = loads[equal][:, DEVICE_RESOURCES].sum(axis=1)
    rank = int(equal[np.argmin(seconds)])
    changed = loads.copy()
    changed[rank] += whole
    return _Place(rank, changed, float(times[rank]))


def _copy(problem: Problem, number: int, loads: Array, kind: PlacementKind) -> _Place | None:
    """A copy of a table on every rank."""
    copy = problem.find_loads(problem.costs.shards(np.array([number]), kind.name).shard[0])
    changed = loads + copy
    if changed[:, Resource.MEMORY].max() > problem.capacity:
        return None
    placement = Placement(kind.name, tuple(range(problem.costs.ranks)))
    return _Place(placement, changed, float(problem.time(changed.max(axis=0))))


def _list_barred_ranks(problem: Problem, owners: list[int | Placement], number: int) -> list[int]:
    """Ranks that have tables which must be apart from this one."""
    constraints = problem.constraints
    barred: list[int] = []
    for unit in constraints.list_conflicts(int(constraints.unit_of_table[number])):
        for table in constraints.units[unit]:
            owner = owners[table]
            barred += owner.ranks if isinstance(owner, Placement) else [owner]
    return barred
