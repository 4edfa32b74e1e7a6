"""Starts of a search: which candidate each unit of tables has, and where it is placed first."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.sharding.problem import DEVICE_RESOURCES, Resource
from perfkit.sharding.state import State
from perfkit.workloads.placement_kinds import PLACEMENT_KINDS, WHOLE, Reach

#: Largest shard of a table that is split by columns in a start, over the average load of a rank
#: [-].
_SPLITS = (0.7, 0.35, 2.0)


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
    for kind in np.unique(candidates.kind):
        base = candidates.choose_kinds(np.full(len(first), kind))
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
