"""Starts of a search: which candidate each unit of tables has, and where it is placed first."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, steady
from perfkit.sharding.candidates import fill_blocks
from perfkit.sharding.problem import DEVICE_RESOURCES, REDUCED, Resource
from perfkit.sharding.state import State
from perfkit.workloads.placement_kinds import COPIED, KIND_OF_NAME, PLACEMENT_KINDS, WHOLE, Reach

#: Largest shard of a table that is split by columns in a start, over the average load of a rank
#: [-].
_SPLITS = (0.7, 0.35, 2.0)
#: A unit that loads its rank with more than this share of the average time is also tried on several
#: ranks [-].
_LARGEST_ON_ONE_RANK = (1.0, 0.8)


class Start(NamedTuple):
    """Where a search may start: a candidate of each unit, and a key of each unit; those with the
    largest key are placed first [-]."""

    chosen: np.ndarray
    key: Array


def construct(state: State, start: Start) -> None:
    """Place each unit where it adds the least, the largest first; if no rank has room, where most
    memory is left.

    Units whose ranks cannot be chosen come before all others.
    """
    chosen = start.chosen
    state.clear_for(chosen)
    units = np.arange(len(chosen))
    has_no_choice = state.candidates.on_every_rank[chosen] | ~np.isin(units, state.free_units)
    by_key = np.argsort(-start.key, kind="stable")
    others = by_key[~has_no_choice[by_key]]
    for unit in (*units[has_no_choice], *others):
        candidate = chosen[unit]
        if state.must_be_apart[unit]:
            candidate = _leave_ranks_to_others(state, candidate)
        choice = state.find_cheapest_ranks(candidate)
        if choice is not None:
            state.assign(candidate, choice.ranks)
        else:
            state.assign(candidate, _find_emptiest_ranks(state, candidate))


def _leave_ranks_to_others(state: State, candidate: int) -> int:
    """The candidate of a unit, or if it would leave no rank to a unit that must be apart, the
    widest one that does; the narrowest if none does."""
    unit = int(state.candidates.unit[candidate])
    apart = np.setdiff1d(state.conflicts[unit], [unit])
    waiting = np.count_nonzero(~state.occupied[apart].any(axis=1))
    open_ranks = np.count_nonzero(~state.is_barred(unit)) - waiting
    own = np.arange(state.first_candidate[unit], state.first_candidate[unit + 1])
    shards = state.candidates.shards[own]
    if shards[candidate - own[0]] <= open_ranks:
        return candidate
    fitting = own[shards <= open_ranks]
    if not len(fitting):
        return int(own[np.argmin(shards)])
    return int(fitting[np.argmax(shards[shards <= open_ranks])])


def _find_emptiest_ranks(state: State, candidate: int) -> np.ndarray:
    """Ranks with most memory left, where none has enough for a candidate. If too few may hold it,
    the assignment breaks a constraint, which `State` finds."""
    unit = state.candidates.unit[candidate]
    shards = 0 if state.candidates.on_every_rank[candidate] else state.candidates.shards[candidate]
    free_memory = state.capacity - state.loads[:, Resource.MEMORY]
    barred = state.is_barred(unit)
    free_memory = np.where(barred, -np.inf, free_memory)
    ranks = np.argsort(-free_memory, kind="stable")[:shards]
    if not state.inside_node[candidate]:
        return ranks
    # a node none of whose ranks is barred, if there is one
    nodes = state.ranks // state.ranks_per_node * state.ranks_per_node
    node_is_open = ~barred[:nodes].reshape(-1, state.ranks_per_node).any(axis=1)
    node_of_rank = np.arange(state.ranks) // state.ranks_per_node
    is_open = np.isin(node_of_rank, np.flatnonzero(node_is_open))
    if is_open.any():
        ranks = np.argsort(-np.where(is_open, free_memory, -np.inf), kind="stable")[:shards]
    first_of_node = ranks[:1] // state.ranks_per_node * state.ranks_per_node
    return first_of_node + np.arange(len(ranks))


class _Exchange(NamedTuple):
    """What candidates exchange in pooled rows.

    Parameters
    ----------
    nbytes : array of int
        Bytes of each candidate on all ranks together [B].
    grain : int
        Common divisor of the bytes of all shards of a choice: what a rank exchanges is a multiple of
        it [B].
    """

    nbytes: np.ndarray
    grain: int


def _measure_exchange(state: State, chosen: np.ndarray) -> _Exchange:
    """Pooled rows of candidates, and the grain of those of these units."""
    of_shard = state.candidate_load[:, Resource.POOLED].astype(int)
    of_hot_row = state.hot_row_load[:, Resource.POOLED].astype(int)
    grain = np.gcd.reduce(of_shard[chosen])
    return _Exchange(state.candidates.shards * of_shard + of_hot_row, int(grain))


def _time_even_ranks(state: State, chosen: np.ndarray) -> float:
    """Time of an iteration if all ranks had the same load, up to the grain of the exchange and the
    largest shard [s]."""
    exchange = _measure_exchange(state, chosen)
    candidates = state.candidates
    load = candidates.total_load[chosen].sum(axis=0) / state.ranks
    everywhere = candidates.on_every_rank[chosen]
    largest = state.candidate_load[chosen[~everywhere]].max(axis=0, initial=0.0)
    with_largest = largest + state.candidate_load[chosen[everywhere]].sum(axis=0)
    load[DEVICE_RESOURCES] = np.maximum(load, with_largest)[DEVICE_RESOURCES]
    if exchange.grain:
        load[Resource.POOLED] = math.ceil(load[Resource.POOLED] / exchange.grain) * exchange.grain
    return float(steady(state.problem.time(load)))


def _price_candidates(state: State, base: np.ndarray) -> Array:
    """Time of each candidate on even ranks without pooled rows: its seconds, and its bytes at the
    price of a byte under a base [s]."""
    problem = state.problem
    loads = state.candidates.total_load / state.ranks
    average = loads[base].sum(axis=0)
    seconds: Array = loads[:, DEVICE_RESOURCES].sum(axis=1)
    for resource in (Resource.PARTIAL, Resource.INDICES, *REDUCED):
        if resource in problem.curves:
            curve, step = problem.curves[resource], max(average[resource] * 1e-2, 1.0)
            slope = float(curve(average[resource] + step) - curve(average[resource])) / step
            seconds = seconds + slope * loads[:, resource]
    return seconds


def _fill_exchange(state: State, base: np.ndarray, *, full: bool) -> np.ndarray:
    """Give some units other candidates, so that all ranks can exchange the same bytes: the next
    multiple of the grain above the average if `full`, else the one below.

    The exchange waits for the rank with most bytes, so the others exchange as much at no cost. Units
    whose time grows least for a byte change first.
    """
    candidates = state.candidates
    exchange = _measure_exchange(state, base)
    if not exchange.grain:
        return base
    multiple = exchange.grain * state.ranks
    missing = -int(exchange.nbytes[base].sum()) % multiple
    if not full and missing:
        missing -= multiple
    if not missing:
        return base
    seconds = _price_candidates(state, base)
    base_of_candidate = base[candidates.unit]
    added = exchange.nbytes - exchange.nbytes[base_of_candidate]
    growth = seconds - seconds[base_of_candidate]
    useful = (np.sign(added) == np.sign(missing)) & (np.abs(added) <= abs(missing))
    useful &= (added % exchange.grain == 0) & np.isin(candidates.unit, state.free_units)
    others = np.flatnonzero(useful)
    order = np.argsort(steady(growth[others] / np.abs(added[others])), kind="stable")
    filled = base.copy()
    for candidate in others[order]:
        unit = candidates.unit[candidate]
        if filled[unit] == base[unit] and abs(added[candidate]) <= abs(missing):
            filled[unit] = candidate
            missing -= added[candidate]
        if not missing:
            break
    return filled


def _spread_large_units(state: State, base: np.ndarray, share: float) -> np.ndarray:
    """Give units that lie on one rank and load it with more than a share of the average time of a
    rank [-] their cheapest candidate on several ranks, if they have one."""
    candidates, free = state.candidates, state.free_units
    seconds = _price_candidates(state, base)
    of_shard = state.candidate_load[:, DEVICE_RESOURCES]
    average = candidates.total_load[base].sum(axis=0)[DEVICE_RESOURCES] / state.ranks
    everywhere = base[candidates.on_every_rank[base]]
    limit = share * average - of_shard[everywhere].sum(axis=0)
    on_one_rank = (candidates.shards[base] == 1) & ~candidates.on_every_rank[base]
    too_large = on_one_rank & (of_shard[base] > limit).any(axis=1)
    spread = base.copy()
    for unit in np.intersect1d(np.flatnonzero(too_large), free):
        own = np.arange(state.first_candidate[unit], state.first_candidate[unit + 1])
        others = own[candidates.shards[own] > 1]
        if len(others):
            spread[unit] = others[np.argmin(steady(seconds[others]))]
    return spread


def _choose_one_kind(state: State) -> list[np.ndarray]:
    """Candidates of one kind for all units that can have it, by kind.

    Tables with too few rows for a split by rows are copied, if they can be: one whole table would
    need an exchange of pooled rows, which neither needs.
    """
    candidates = state.candidates
    tables = state.problem.costs.workload.tables
    rows = np.array([tables[members[0]].rows for members in state.problem.constraints.units])
    chosen = []
    for name in np.unique(candidates.kind).tolist():
        kind = KIND_OF_NAME[name]
        kinds = np.full(len(rows), name)
        if kind.splits_rows:
            can_be_split = fill_blocks(rows, state.problem.costs.count_parts(kind))
            kinds = np.where(can_be_split, name, COPIED.name)
        chosen.append(candidates.choose_kinds(kinds))
    return chosen


def fill_bases(
    state: State, bases: Sequence[np.ndarray], time_choice: Callable[[np.ndarray], float]
) -> list[np.ndarray]:
    """Candidates of the units to start from, those first whose time is least on even ranks, or if
    tables can be divided at will beside large shards, which `time_choice` says: what is longer.

    `bases` are candidates of the units in relaxed problems. Each is also taken with its largest units
    on several ranks, and with ranks that exchange the same bytes. In small problems candidates of one
    kind are among them.
    """
    filled = dict[bytes, np.ndarray]()
    for base in bases:
        spread = [_spread_large_units(state, base, share) for share in _LARGEST_ON_ONE_RANK]
        for variant in (base, *spread):
            more = _fill_exchange(state, variant, full=True)
            fewer = _fill_exchange(state, variant, full=False)
            for chosen in (variant, more, fewer):
                filled[chosen.tobytes()] = chosen
    if state.is_small:
        for chosen in _choose_one_kind(state):
            filled[chosen.tobytes()] = chosen
    times = dict[bytes, float]()
    for key, chosen in filled.items():
        relaxed = float(steady(time_choice(chosen)))
        times[key] = max(_time_even_ranks(state, chosen), relaxed)
    return [filled[key] for key in sorted(filled, key=lambda key: times[key])]


def list_starts(state: State, bases: Sequence[np.ndarray]) -> Iterator[Start]:
    """Starts, the most promising first; large tables are split by columns.

    `bases` are candidates of the units in relaxed problems.
    """
    candidates, first = state.candidates, state.candidates.first_of_unit
    unit_load = candidates.shards[first, None] * state.candidate_load[first]
    average = unit_load.sum(axis=0) / state.ranks
    average = np.where(average > 0, average, np.inf)
    available = average.copy()
    available[Resource.MEMORY] = max(state.capacity, 1.0)
    keys = (
        (unit_load / available).max(axis=1),
        unit_load[:, Resource.MEMORY],
        unit_load[:, DEVICE_RESOURCES].sum(axis=1),
    )
    tries = []
    for number in range(len(keys)):
        for split in _SPLITS:
            for base in (*bases, first):
                tries.append((number, split, base))
    # one kind for all units that can have it
    for base in _choose_one_kind(state):
        tries.append((0, _SPLITS[0], base))
    seen = set()
    for number, split, base in tries:
        chosen = _split_large_tables(state, base, split * average)
        start = number, chosen.tobytes()
        if start not in seen:
            seen.add(start)
            yield Start(chosen, keys[number])


def _split_large_tables(state: State, base: np.ndarray, limit: Array) -> np.ndarray:
    """Candidates of a start, with splits by columns for whole tables of more than this load: the
    first split whose shards are within the limit, else the finest."""
    split_kinds = [WHOLE.name]
    for kind in PLACEMENT_KINDS:
        if kind.splits_columns and kind.reach is Reach.SOME_RANKS:
            split_kinds.append(kind.name)
    kinds = state.candidates.kind
    fits = np.all(state.candidate_load <= limit, axis=1)
    chosen = base.copy()
    too_large = (kinds[base] == WHOLE.name) & ~fits[base]
    for unit in np.flatnonzero(too_large):
        splits = np.arange(state.first_candidate[unit], state.first_candidate[unit + 1])
        splits = splits[np.isin(kinds[splits], split_kinds)]
        fitting = splits[fits[splits]]
        chosen[unit] = fitting[0] if len(fitting) else splits[-1]
    return chosen
