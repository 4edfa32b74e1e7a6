"""Search for the placement with the shortest time: greedy starts, then simulated annealing of
shards and units of tables."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from perfkit.ground.units import Array, steady
from perfkit.sharding.problem import (
    DEVICE_RESOURCES,
    REDUCED,
    Candidates,
    Problem,
    Resource,
)
from perfkit.workloads.placement_kinds import PLACEMENT_KINDS, WHOLE, Reach

_BYTES = [resource for resource in Resource if resource not in (*DEVICE_RESOURCES, Resource.HOST)]
#: Memory counts in the smooth time from this share of the capacity on [-].
_MEMORY_COUNTS_FROM = 0.3
#: Most ranks that a rank may move a shard to, or exchange shards with, in one step [-].
_MOST_PARTNERS = 16
#: Largest shard of a table that is split by columns in a start, over the average load of a rank
#: [-].
_SPLITS = (0.7, 0.35, 2.0)
#: First temperature of each anneal, over the time [-]; the last anneal improves the incumbent.
_TEMPERATURES = (3e-3, 0.1, 1e-3)
#: Lowest temperature, over the time: only improvements are taken [-].
_COLD, _LAST_TEMPERATURE = 1e-6, 3e-6
#: Fewest and most anneals before the last: small problems need less work for each, so they get more
#: [-].
_FEWEST_ANNEALS, _MOST_ANNEALS = 3, 11
#: Share of the work for these anneals, if they are few or more [-].
_SHARE_OF_FEW_ANNEALS, _SHARE_OF_MORE_ANNEALS = 0.36, 0.7
#: Work of one of these anneals for each unit of tables [s].
_WORK_OF_UNIT = 2e-3
#: The part of the work for starts: one of so many [-].
_PARTS_OF_WORK = 6
#: Steps from each start, stages of an anneal, and units that are placed again at a time [-].
_DESCENT_STEPS, _STAGES, _UNITS_AT_A_TIME = 30, 60, 4
#: A search ends where the incumbent is so close to the bound, relative to it [-].
_CLOSE = 1e-4
#: Work of a step, a pair of shards that may be exchanged, a candidate, and a unit that is placed
#: [s]; docs/formulas.md, table 8.2.
_STEP, _PAIR, _CANDIDATE, _PLACE = 1.4e-4, 1.3e-7, 8e-5, 6e-5
#: Called with the share of the work that is done [-] and the best time so far [s].
Progress: TypeAlias = Callable[[float, float], None] | None


class Assignment(NamedTuple):
    """A complete placement: a value of each variable.

    Parameters
    ----------
    overflow : float
        Bytes that the fullest rank lacks; infinite where tables share a rank that must be apart
        [B].
    time : float
        Time of an iteration [s].
    candidates : array of int
        Chosen candidate of each unit of tables [-].
    shard_ranks : array of int
        Rank of each shard; only those of chosen candidates mean something [-].
    """

    overflow: float
    time: float
    candidates: np.ndarray
    shard_ranks: np.ndarray

    @property
    def objective(self) -> tuple[float, float]:
        """What a search minimizes: first the overflow [B], then the time [s]."""
        return self.overflow, self.time


class UnitAssignment(NamedTuple):
    """The value of one variable.

    Parameters
    ----------
    candidate : int
        Chosen candidate of a unit of tables [-].
    ranks : array of int
        Rank of each of its shards; empty if every rank has one [-].
    """

    candidate: int
    ranks: np.ndarray


class RankChoice(NamedTuple):
    """The cheapest ranks for a candidate.

    Parameters
    ----------
    growth : float
        How much the smooth time grows [s].
    ranks : array of int
        Rank of each of its shards; empty if every rank has one [-].
    """

    growth: float
    ranks: np.ndarray


class Moves(NamedTuple):
    """Moves of a shard of one rank: to a partner alone, or in exchange for a shard of the partner.

    Parameters
    ----------
    growth : array, shape (shards, others)
        How much the smooth time grows; infinite where a move is not allowed [s].
    shards : array of int
        The shards of the rank [-].
    exchanged : array of int
        Shards of partners, the first of the others: they come back in exchange [-].
    targets : array of int, shape (others,)
        Rank that the shard moves to. Behind those of the shards in `exchanged` are the partners
        that give nothing back [-].
    """

    growth: Array
    shards: np.ndarray
    exchanged: np.ndarray
    targets: np.ndarray


class Stage(NamedTuple):
    """Settings of a stage of an anneal.

    Parameters
    ----------
    temperature : float
        Growth of the smooth time that is still likely to be taken, over the time [-].
    squarings : int
        The power of the smooth time is 2 to this number [-].
    memory_slack : float
        Factor by which the memory of a rank may be exceeded [-].
    """

    temperature: float
    squarings: int
    memory_slack: float


@dataclass(frozen=True, eq=False)
class SmoothTime:
    """A smooth stand-in for the time of an iteration, with power means over ranks in place of
    maxima.

    .. math:: \\sum_r \\sum_i w_i \\left(\\frac{l_{ri}}{s_i}\\right)^{p}

    Here l is the load of a rank r on a resource i. Every rank counts, the fullest ones most, so a
    step that relieves one of several full ranks shows.

    Parameters
    ----------
    resources : array of int
        Resources that count [-].
    scale : array
        Load of each resource where it counts as much as its weight says [s or B].
    weight : array
        Weight of each resource [s].
    squarings : int
        The power p is 2 to this number [-].
    """

    resources: np.ndarray
    scale: Array
    weight: Array
    squarings: int

    def normalize(self, loads: Array) -> Array:
        """Loads of the resources that count, over their scale [-]."""
        return loads[..., self.resources] / self.scale

    def sum_powers(self, normalized: Array) -> Array:
        """Part of ranks with these normalized loads in the smooth time [s]."""
        return _raise_to_power(normalized, self.squarings) @ self.weight

    def of_ranks(self, loads: Array) -> Array:
        """Part of each rank in the smooth time [s]."""
        return steady(self.sum_powers(self.normalize(loads)))

    def grow(self, loads: Array, added: Array) -> Array:
        """How much the part of each rank grows with more load [s]."""
        normalized = self.normalize(loads)
        before = _raise_to_power(normalized, self.squarings)
        after = _raise_to_power(normalized + self.normalize(added), self.squarings)
        return steady((after - before) @ self.weight)


class State:
    """The current assignment of shards to ranks, with the loads of the ranks.

    Parameters
    ----------
    problem : Problem
        What is placed.
    candidates : Candidates
        Candidate placements of each unit of tables.
    """

    def __init__(self, problem: Problem, candidates: Candidates) -> None:
        self.problem = problem
        self.candidates = candidates
        self.ranks = problem.costs.ranks
        self.ranks_per_node = problem.costs.ranks_per_node
        self.capacity = problem.capacity
        #: Loads of candidates in whole bytes, so that sums do not depend on their order or on the
        #: processor.
        self.candidate_load = _round_bytes(candidates.shard_load)
        self.hot_row_load = _round_bytes(candidates.hot_row_load)
        inside_node = [kind.name for kind in PLACEMENT_KINDS if kind.is_inside_node]
        self.inside_node = np.isin(candidates.kind, inside_node)
        self._list_shards()
        units = len(candidates.first_of_unit)
        #: First candidate of each unit, and the end of the last.
        self.first_candidate = np.append(candidates.first_of_unit, len(candidates.unit))
        self.free_units = np.setdiff1d(np.arange(units), list(problem.constraints.pinned))
        self.movable = ~self.inside_node[self.shard_candidate]
        self.movable &= np.isin(self.shard_unit, self.free_units)
        #: Units whose ranks a unit may not share: itself, and those that must be apart from it.
        self.conflicts = self._list_conflicts(units)
        #: Which units must be apart from others.
        self.must_be_apart = (self.conflicts != np.arange(units)[:, None]).any(axis=1)
        #: Which ranks have a shard of each unit.
        self.occupied = np.zeros((units, self.ranks), dtype=bool)
        self.clear()

    def _list_shards(self) -> None:
        """Number the shards of all candidates whose ranks are searched for."""
        candidates = self.candidates
        searched = np.where(candidates.on_every_rank, 0, candidates.shards)
        #: First shard of each candidate, and the end of the last.
        self.first_shard = np.append(0, np.cumsum(searched))
        self.shard_candidate = np.repeat(np.arange(len(candidates.unit)), searched)
        self.shard_unit = candidates.unit[self.shard_candidate]
        self.shard_load = self.candidate_load[self.shard_candidate]
        # the first shard inside a node has the most popular row
        has_hot_row = self.first_shard[:-1][self.inside_node]
        self.shard_load[has_hot_row] += self.hot_row_load[self.inside_node]

    def _list_conflicts(self, units: int) -> np.ndarray:
        """Units whose ranks each unit may not share, shape (units, most conflicts); a unit that has
        fewer is repeated."""
        conflicts = []
        for unit in range(units):
            conflicts.append([unit, *self.problem.constraints.list_conflicts(unit)])
        most = max(len(others) for others in conflicts)
        for unit, others in enumerate(conflicts):
            others.extend([unit] * (most - len(others)))
        return np.array(conflicts)

    def clear(self) -> None:
        """Assign no unit."""
        #: The memory of a rank may be exceeded by this factor during the search.
        self.memory_slack = 1.0
        self.shard_ranks = np.zeros(len(self.shard_unit), dtype=int)
        #: Which shards belong to the chosen candidate of their unit.
        self.assigned = np.zeros(len(self.shard_unit), dtype=bool)
        self.chosen = self.candidates.first_of_unit.copy()
        self.loads = np.zeros((self.ranks, len(Resource)))
        self.occupied[:] = False

    def clear_for(self, chosen: np.ndarray) -> None:
        """Assign no unit, and scale the smooth time by the average load of a rank under these
        candidates."""
        self.clear()
        shards = self.candidates.shards[chosen]
        average = shards @ self.candidate_load[chosen] / self.ranks
        self.loads += np.maximum(average, 1e-30)
        self.set_smooth_time(3)
        self.loads[:] = 0.0

    def shards_of(self, candidate: int) -> slice:
        """Shards of a candidate whose ranks are searched for."""
        return slice(self.first_shard[candidate], self.first_shard[candidate + 1])

    def assign(self, candidate: int, ranks: np.ndarray) -> None:
        """Place a unit of tables by a candidate on ranks, one for each shard."""
        unit = self.candidates.unit[candidate]
        self.chosen[unit] = candidate
        if self.candidates.on_every_rank[candidate]:
            self.loads += self.candidate_load[candidate]
            self.loads[self.candidates.hot_row_rank[candidate]] += self.hot_row_load[candidate]
            return
        shards = self.shards_of(candidate)
        self.shard_ranks[shards] = ranks
        self.assigned[shards] = True
        self.loads[ranks] += self.shard_load[shards]
        self.occupied[unit, ranks] = True

    def unassign(self, unit: int) -> UnitAssignment:
        """Remove a unit from its ranks; returns where it was."""
        candidate = int(self.chosen[unit])
        shards = self.shards_of(candidate)
        ranks = self.shard_ranks[shards].copy()
        if self.candidates.on_every_rank[candidate]:
            self.loads -= self.candidate_load[candidate]
            self.loads[self.candidates.hot_row_rank[candidate]] -= self.hot_row_load[candidate]
        else:
            self.assigned[shards] = False
            self.loads[ranks] -= self.shard_load[shards]
            self.occupied[unit, ranks] = False
        return UnitAssignment(candidate, ranks)

    def move_shard(self, shard: int, rank: int) -> None:
        """Move a shard to another rank."""
        candidate, ranks = self.unassign(self.shard_unit[shard])
        ranks[shard - self.first_shard[candidate]] = rank
        self.assign(candidate, ranks)

    def restore(self, assignment: Assignment) -> None:
        """Place all units as in an earlier assignment."""
        self.clear()
        for candidate in assignment.candidates.tolist():
            self.assign(candidate, assignment.shard_ranks[self.shards_of(candidate)])

    def _evaluate(self) -> tuple[float, float]:
        """Overflow [B] and time [s] of the current assignment."""
        most_memory = float(self.loads[:, Resource.MEMORY].max())
        overflow = max(most_memory - self.capacity, 0.0)
        time = float(self.problem.time(self.loads.max(axis=0)))
        if self._share_ranks():
            return np.inf, time
        return overflow, time

    def _share_ranks(self) -> bool:
        """Whether units share a rank that must be apart."""
        for unit in np.flatnonzero(self.must_be_apart):
            others = self.conflicts[unit][self.conflicts[unit] != unit]
            if (self.occupied[others] & self.occupied[unit]).any():
                return True
        return False

    def copy_assignment(self) -> Assignment:
        """The current assignment."""
        overflow, time = self._evaluate()
        return Assignment(overflow, time, self.chosen.copy(), self.shard_ranks.copy())

    def better_of(self, incumbent: Assignment) -> Assignment:
        """The current assignment, or the incumbent if that is at least as good."""
        overflow, time = self._evaluate()
        if (overflow, time) >= (incumbent.overflow, incumbent.time * (1 - 1e-12)):
            return incumbent
        return Assignment(overflow, time, self.chosen.copy(), self.shard_ranks.copy())

    def set_smooth_time(self, squarings: int) -> None:
        """Scale the smooth time to the current loads; its power is 2 to the number of squarings."""
        power = 2.0**squarings
        peaks = self.loads.max(axis=0)
        time = float(self.problem.time(peaks))
        sensitivity = self._find_sensitivity(peaks, time)
        resources = np.flatnonzero(sensitivity > 0)
        scale = peaks[resources]
        normalized = self.loads[:, resources] / scale
        total = _raise_to_power(normalized, squarings).sum(axis=0)
        weight = steady(sensitivity[resources] * total ** (1 / power - 1) / power)
        if sensitivity[Resource.MEMORY]:
            # memory, the last one, costs nearly nothing below the capacity, and much beyond it
            scale[-1] = self.capacity
            weight[-1] = sensitivity[Resource.MEMORY] / power
        self.smooth_time = SmoothTime(resources, scale, weight, squarings)
        self.normalized_shard_load = self.smooth_time.normalize(self.shard_load)

    def _find_sensitivity(self, peaks: Array, time: float) -> Array:
        """How much the time changes with the largest load of each resource, over the relative
        change of that load [s]."""
        problem = self.problem
        step = np.maximum(peaks * 1e-3, 1e-12)
        sensitivity = (problem.time(peaks + np.diag(step)) - time) / step * peaks
        # Where the host sets the time, the device still counts a little; so does a host that is a
        # little faster.
        always = [*DEVICE_RESOURCES]
        host_time = problem.correction * (problem.host_seconds + peaks[Resource.HOST])
        if host_time > 0.5 * time:
            always.append(Resource.HOST)
        least = 1e-3 * time * (peaks[always] > 0)
        sensitivity[always] = np.maximum(sensitivity[always], least)
        # the same on all ranks; `find_cheapest_ranks` adds their exact time
        sensitivity[[*REDUCED]] = 0.0
        sensitivity[Resource.MEMORY] = 0.0
        if peaks[Resource.MEMORY] > _MEMORY_COUNTS_FROM * self.capacity:
            sensitivity[Resource.MEMORY] = time
        return sensitivity

    def smooth_time_of_ranks(self) -> Array:
        """Part of each rank in the smooth time [s]."""
        return self.smooth_time.of_ranks(self.loads)

    def grow_smooth_time(self, added: Array) -> Array:
        """How much the part of each rank in the smooth time would grow with more load [s]."""
        return self.smooth_time.grow(self.loads, added)

    @property
    def memory_limit(self) -> float:
        """Memory that a rank may fill now [B]."""
        return self.memory_slack * self.capacity

    def is_barred(self, unit: int) -> np.ndarray:
        """Which ranks may not hold another shard of this unit, however much memory they have."""
        barred = self.occupied[self.conflicts[unit]].any(axis=0)
        pinned = self.problem.constraints.pinned
        if unit in pinned:
            barred |= np.arange(self.ranks) != pinned[unit]
        return barred

    def cannot_take(self, unit: int, load: Array) -> np.ndarray:
        """Which ranks have no memory for a shard, or may not hold one of this unit."""
        filled = self.loads[:, Resource.MEMORY] + load[Resource.MEMORY]
        return self.is_barred(unit) | (filled > self.memory_limit)

    def find_cheapest_ranks(self, candidate: int) -> RankChoice | None:
        """Cheapest ranks for a candidate, if there is room."""
        if self.candidates.on_every_rank[candidate]:
            return self._price_every_rank(candidate)
        unit = self.candidates.unit[candidate]
        shards = int(self.candidates.shards[candidate])
        inside_node = self.inside_node[candidate]
        load = self.candidate_load[candidate]
        load_with_hot_row = load + self.hot_row_load[candidate]
        growth = self.grow_smooth_time(load)
        growth_if_allowed = np.where(self.cannot_take(unit, load_with_hot_row), np.inf, growth)
        # a candidate inside a node has one group of ranks for each full node, others have one group
        group_size = self.ranks_per_node if inside_node else self.ranks
        groups = self.ranks // group_size
        growth_by_group = growth_if_allowed[: groups * group_size].reshape(groups, group_size)
        cheapest = np.argsort(growth_by_group, axis=1, kind="stable")[:, :shards]
        ranks_by_group = cheapest + group_size * np.arange(groups)[:, None]
        totals = growth_if_allowed[ranks_by_group].sum(axis=1)
        if inside_node:
            more_with_hot_row = self.grow_smooth_time(load_with_hot_row) - growth
            totals += more_with_hot_row[ranks_by_group[:, 0]]
        best = int(np.argmin(totals))
        if not totals[best] < np.inf:
            return None
        return RankChoice(float(totals[best]), ranks_by_group[best])

    def _price_every_rank(self, candidate: int) -> RankChoice | None:
        """Growth of the smooth time with a shard on every rank, if there is room."""
        load = self.candidate_load[candidate]
        added = load + np.zeros_like(self.loads)
        added[self.candidates.hot_row_rank[candidate]] += self.hot_row_load[candidate]
        filled = (self.loads + added)[:, Resource.MEMORY]
        if filled.max() > self.memory_limit:
            return None
        growth = float(self.grow_smooth_time(added).sum())
        for resource in REDUCED:
            nbytes = load[resource]
            if nbytes:
                before_and_after = self.loads[0, resource] + np.array([0.0, nbytes])
                times = self.problem.curves[resource](before_and_after)
                growth += float(np.diff(times)[0])
        return RankChoice(growth, np.zeros(0, dtype=int))

    def list_moves(self, rank: int, partners: np.ndarray) -> Moves:
        """Moves of a shard of a rank to a partner, alone or in exchange for another shard."""
        is_partner = np.zeros(self.ranks, dtype=bool)
        is_partner[partners] = True
        movable = self.assigned & self.movable
        shards = np.flatnonzero(movable & (self.shard_ranks == rank))
        exchanged = np.flatnonzero(movable & is_partner[self.shard_ranks])
        targets = np.concatenate([self.shard_ranks[exchanged], partners])
        growth = self._grow_by_moves(rank, shards, exchanged, targets)
        growth[self._find_forbidden_moves(rank, shards, exchanged, targets)] = np.inf
        return Moves(growth, shards, exchanged, targets)

    def _grow_by_moves(
        self, rank: int, shards: np.ndarray, exchanged: np.ndarray, targets: np.ndarray
    ) -> Array:
        """How much the smooth time grows with each move, also where it is not allowed [s]."""
        smooth_time = self.smooth_time
        # those who give nothing back
        nothing = np.zeros((len(targets) - len(exchanged), len(smooth_time.resources)))
        returned = np.concatenate([self.normalized_shard_load[exchanged], nothing])
        moved = self.normalized_shard_load[shards][:, None] - returned
        loads = smooth_time.normalize(self.loads)
        changed = smooth_time.sum_powers(np.stack([loads[rank] - moved, loads[targets] + moved]))
        before = smooth_time.sum_powers(loads)
        return np.asarray(changed[0] + changed[1] - (before[rank] + before[targets]))

    def _find_forbidden_moves(
        self, rank: int, shards: np.ndarray, exchanged: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """Which moves find no memory, or break a constraint."""
        memory = self.shard_load[:, Resource.MEMORY]
        nothing = np.zeros(len(targets) - len(exchanged))
        moved = memory[shards][:, None] - np.append(memory[exchanged], nothing)
        free_memory = np.maximum(self.memory_limit - self.loads[:, Resource.MEMORY], 0.0)
        forbidden = (moved > free_memory[targets]) | (-moved > free_memory[rank])
        # two shards that may not share a rank are not exchanged either
        conflicts = self.conflicts[self.shard_unit[shards]]
        forbidden |= self.occupied[conflicts].any(axis=1)[:, targets]
        conflicts_of_exchanged = self.conflicts[self.shard_unit[exchanged]]
        cannot_come_back = self.occupied[conflicts_of_exchanged, rank].any(axis=1)
        forbidden[:, : len(exchanged)] |= cannot_come_back
        return forbidden


def _round_bytes(loads: Array) -> Array:
    """Loads whose bytes are whole numbers."""
    rounded = loads.copy()
    rounded[:, _BYTES] = np.ceil(rounded[:, _BYTES] - 1e-3)
    return rounded


def _raise_to_power(loads: Array, squarings: int) -> Array:
    """Loads squared so many times, kept finite; that of an almost empty rank underflows to zero,
    which the caller lets NumPy do."""
    powers = np.minimum(loads, 1e200 ** (0.5**squarings))
    for _ in range(squarings):
        np.multiply(powers, powers, out=powers)
    return powers


class _Start(NamedTuple):
    """Where a search may start: a candidate of each unit, and a key of each unit; those with the
    largest key are placed first [-]."""

    chosen: np.ndarray
    key: Array


def _construct(state: State, start: _Start) -> None:
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


def _list_starts(state: State, bases: Sequence[np.ndarray]) -> Iterator[_Start]:
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
            yield _Start(chosen, keys[number])


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


def _plan_stage(done: float, first_temperature: float) -> Stage:
    """Settings of an anneal after a share `done` of its work [-]."""
    if done < 0.1:  # only improvements at the start and at the end
        return Stage(_COLD, squarings=8, memory_slack=1.0)
    if done > 0.85:
        return Stage(_COLD, squarings=11, memory_slack=1.0)
    part = (done - 0.1) / 0.75
    temperature = first_temperature * (_LAST_TEMPERATURE / first_temperature) ** part
    memory_slack = 1.2 if part < 0.8 else 1.0
    return Stage(temperature, 4 + int(4 * part), memory_slack)


@dataclass(eq=False)
class Search:
    """Improves an assignment until its time is close to a lower bound.

    Parameters
    ----------
    state : State
        The current assignment.
    rng : numpy.random.Generator
        Source of all random choices.
    bound : float
        Lower bound of the time [s].
    steps : int or None
        Limit of the search in steps, if it has one: every move and every unit that is placed counts
        as one [-].
    incumbent : Assignment
        The best assignment so far.
    work : float
        Work so far. It is counted and not measured, so that the same seed gives the same plan on
        every machine [s].
    interrupted : bool
        Whether Ctrl-C ended the search.
    """

    state: State
    rng: np.random.Generator
    bound: float
    steps: int | None
    incumbent: Assignment
    work: float = 0.0
    interrupted: bool = False

    def is_done(self) -> bool:
        """Whether the incumbent is close to the bound."""
        within_bound = self.incumbent.time <= self.bound * (1 + _CLOSE)
        return self.incumbent.overflow == 0 and within_bound

    def _count_work(self, seconds: float, steps: int = 1) -> None:
        """Add to the work: seconds, or steps if these limit the search."""
        if self.steps is not None:
            self.work += _STEP * steps
        else:
            self.work += seconds

    def _update_incumbent(self) -> None:
        """Take the current assignment if it is better than the incumbent."""
        self.incumbent = self.state.better_of(self.incumbent)

    def try_starts(
        self, bases: Sequence[np.ndarray], placed: Sequence[Assignment], seconds: float
    ) -> list[Assignment]:
        """Try starts for an amount of work; returns the best few, the best first.

        The best of the `placed` assignments is the incumbent if no start is better; the last anneal
        improves it.
        """
        state = self.state
        starts = list[Assignment]()
        for start in _list_starts(state, bases):
            _construct(state, start)
            units = len(start.chosen)
            self._count_work(_PLACE * units * (1 + state.ranks / 200), units)
            self._update_incumbent()
            state.set_smooth_time(8)
            for _ in range(_DESCENT_STEPS):
                if self._move_shard(_COLD * self.incumbent.time, from_fullest=True):
                    self._update_incumbent()
            starts.append(state.copy_assignment())
            if self.work > seconds or self.is_done():
                break
        starts.sort(key=lambda start: start.objective)
        if placed:
            best_placed = min(placed, key=lambda assignment: assignment.objective)
            if best_placed.objective < self.incumbent.objective:
                state.restore(best_placed)
                self._update_incumbent()
        return starts[: len(_TEMPERATURES)]

    def anneal(
        self,
        start: Assignment,
        seconds: float,
        first_temperature: float,
        progress: Progress = None,
    ) -> None:
        """Improve an assignment at a falling temperature, with an amount of work [s]."""
        state = self.state
        work_before = self.work
        step = 0
        state.restore(start)
        for number in range(_STAGES):
            if self.is_done():
                break
            stage = _plan_stage(number / _STAGES, first_temperature)
            state.memory_slack = stage.memory_slack
            if stage.memory_slack == 1:
                current = state.copy_assignment()
                if current.overflow > self.incumbent.overflow:
                    state.restore(self.incumbent)
            state.set_smooth_time(stage.squarings)
            end_of_stage = work_before + seconds * (number + 1) / _STAGES
            while self.work < end_of_stage:
                step += 1
                if self._take_step(step, stage.temperature * self.incumbent.time):
                    self._update_incumbent()
            if progress is not None:
                progress((number + 1) / _STAGES, self.incumbent.time)

    def _take_step(self, step: int, temperature: float) -> bool:
        """Take the step of this number, counted from 1; returns whether anything changed.

        Every third step places units again, and six times as rarely several of them.
        """
        from_fullest = step % 2 == 1
        if step % 3:
            return self._move_shard(temperature, from_fullest)
        if step % 18 == 0:
            return self._replace_units(temperature, from_fullest)
        return self._replace_unit(temperature, from_fullest)

    def _draw(self, growth: Array, temperature: float) -> int:
        """Draw one of several changes; cheap ones are more probable, the more so at a low
        temperature."""
        exponents = np.maximum((growth.min() - growth) / temperature, -700.0)
        summed = np.cumsum(np.exp(exponents))
        position = int(np.searchsorted(summed, self.rng.random() * summed[-1]))
        return min(position, len(growth) - 1)

    def _move_shard(self, temperature: float, from_fullest: bool) -> bool:
        """Move or exchange a shard of the fullest rank, or of any; returns whether anything
        changed."""
        state = self.state
        smooth_time = state.smooth_time_of_ranks()
        rank = int(np.argmax(smooth_time) if from_fullest else self.rng.integers(state.ranks))
        partners = self._choose_partners(smooth_time)
        moves = state.list_moves(rank, partners[partners != rank])
        self._count_work(_STEP + _PAIR * moves.growth.size)
        no_change = moves.growth.size
        drawn = self._draw(np.append(moves.growth.ravel(), 0.0), temperature)
        if drawn == no_change:
            return False
        row, column = divmod(drawn, moves.growth.shape[1])
        state.move_shard(int(moves.shards[row]), int(moves.targets[column]))
        if column < len(moves.exchanged):
            state.move_shard(int(moves.exchanged[column]), rank)
        return True

    def _choose_partners(self, smooth_time: Array) -> np.ndarray:
        """Ranks that a shard may move to: all, or some of the lightest and some others."""
        ranks = self.state.ranks
        if ranks - 1 <= _MOST_PARTNERS:
            return np.arange(ranks)
        half = _MOST_PARTNERS // 2
        lightest = np.argsort(smooth_time, kind="stable")[:half]
        drawn = self.rng.integers(0, ranks, half)
        return np.unique(np.concatenate([lightest, drawn]))

    def _draw_unit(self, units: np.ndarray, from_fullest: bool) -> int:
        """Draw one of these units; if `from_fullest`, one on the fullest rank where there is
        one."""
        state = self.state
        if from_fullest:
            fullest = np.argmax(state.smooth_time_of_ranks())
            on_fullest = state.shard_unit[state.assigned & (state.shard_ranks == fullest)]
            wanted = np.intersect1d(on_fullest, units)
            if len(wanted):
                units = wanted
        return int(units[self.rng.integers(len(units))])

    def _place(self, unit: int, temperature: float) -> bool:
        """Place an unassigned unit by one of its candidates; returns whether there was room."""
        state = self.state
        candidates = range(state.first_candidate[unit], state.first_candidate[unit + 1])
        choices = [state.find_cheapest_ranks(candidate) for candidate in candidates]
        self._count_work(_CANDIDATE * (1 + len(choices)))
        growth = np.array([np.inf if choice is None else choice.growth for choice in choices])
        if not np.isfinite(growth).any():
            return False
        drawn = self._draw(growth, temperature)
        choice = choices[drawn]
        if choice is None:
            return False
        state.assign(candidates[drawn], choice.ranks)
        return True

    def _replace_unit(self, temperature: float, from_fullest: bool) -> bool:
        """Place a unit with several candidates again; returns whether anything changed."""
        state = self.state
        candidates_of_unit = np.diff(state.first_candidate)
        units = state.free_units[candidates_of_unit[state.free_units] > 1]
        if not len(units):
            return self._move_shard(temperature, from_fullest)
        unit = self._draw_unit(units, bool(self.rng.random() < 0.5))
        before = state.unassign(unit)
        if self._place(unit, temperature):
            return True
        state.assign(before.candidate, before.ranks)
        return False

    def _replace_units(self, temperature: float, from_fullest: bool) -> bool:
        """Place several units again in another order, which may be undone; returns whether anything
        changed."""
        state = self.state
        units = state.free_units
        if not len(units):
            return self._move_shard(temperature, from_fullest)
        time_before = float(state.smooth_time_of_ranks().sum())
        # the first one is on the fullest rank
        drawn = [self._draw_unit(units, number == 0) for number in range(_UNITS_AT_A_TIME)]
        before = {unit: state.unassign(unit) for unit in dict.fromkeys(drawn)}
        placed = []
        for unit in self.rng.permutation(list(before)).tolist():
            if self._place(unit, temperature):
                placed.append(unit)
        growth = float(state.smooth_time_of_ranks().sum()) - time_before
        accepted = self.rng.random() < np.exp(min(-growth / temperature, 0.0))
        if accepted and len(placed) == len(before):
            return True
        for unit in placed:
            state.unassign(unit)
        for assignment in before.values():
            state.assign(assignment.candidate, assignment.ranks)
        return False


def search_assignment(
    state: State,
    bound: float,
    bases: Sequence[np.ndarray],
    placed: Sequence[Assignment],
    seconds: float,
    seed: int,
    steps: int | None,
    progress: Progress,
) -> Search:
    """Search for the assignment with the shortest time; `bases` are candidates of the units in
    relaxed problems, and `placed` are whole assignments by rules of thumb.

    A sixth of the work goes into starts. A start places the units in the order of their largest
    load, seconds or memory, each where it adds the least. Units have the candidates of a relaxed
    problem, or one kind where they can, or are whole; large tables are split by columns. Then
    simulated annealing improves the best starts: a rank moves a shard or exchanges it, or a unit
    gets another candidate. The maximum over ranks is replaced by a power mean, whose power grows.
    """
    nothing = Assignment(np.inf, np.inf, state.chosen, state.shard_ranks)
    search = Search(state, np.random.default_rng(seed), bound, steps, nothing)
    if steps:
        seconds = steps * _STEP
    units = len(state.conflicts)
    try:
        starts = search.try_starts(bases, placed, seconds / _PARTS_OF_WORK)
        wanted = seconds / (_WORK_OF_UNIT * units)
        anneals = int(np.clip(wanted, _FEWEST_ANNEALS, _MOST_ANNEALS))
        share = _SHARE_OF_MORE_ANNEALS
        if anneals == _FEWEST_ANNEALS:
            share = _SHARE_OF_FEW_ANNEALS
        seconds_of_anneal = seconds * share / anneals
        for number in range(anneals):
            start = starts[number % len(starts)]
            temperature = _TEMPERATURES[number % len(_TEMPERATURES)]
            search.anneal(start, seconds_of_anneal, temperature)
        search.anneal(search.incumbent, seconds - search.work, _TEMPERATURES[-1], progress)
    except KeyboardInterrupt:
        if search.incumbent.time == np.inf:
            raise
        search.interrupted = True
    return search
