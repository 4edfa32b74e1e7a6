"""The current assignment of shards to ranks in a search, and what a change of it costs."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, steady
from perfkit.sharding.problem import DEVICE_RESOURCES, REDUCED, Candidates, Problem, Resource
from perfkit.workloads.placement_kinds import PLACEMENT_KINDS

_BYTES = [resource for resource in Resource if resource not in (*DEVICE_RESOURCES, Resource.HOST)]
#: Memory counts in the smooth time from this share of the capacity on [-].
_MEMORY_COUNTS_FROM = 0.3
#: Most units of tables of a small problem [-]; docs/formulas.md, table 8.2.
_FEW_UNITS = 20
#: Most ways to give units to nodes that are tried together [-]; docs/formulas.md, table 8.2.
_MOST_WAYS = 4096


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

    @property
    def is_small(self) -> bool:
        """Whether there are few units, which are searched in rounds."""
        return len(self.conflicts) <= _FEW_UNITS

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

    def settle_nodes(self) -> int:
        """Give the largest units that fill a node to the nodes where the time is least, by trying all
        ways; returns how many ways were tried [-]."""
        nodes = self.ranks // self.ranks_per_node
        units = self._list_units_of_nodes()
        if nodes < 2 or len(units) < 2:
            return 0
        units = units[: int(np.log(_MOST_WAYS) / np.log(nodes))]
        before = [self.unassign(unit) for unit in units.tolist()]
        node_of_unit = np.indices((nodes,) * len(units)).reshape(len(units), -1)
        ways = np.arange(node_of_unit.shape[1])
        loads = np.tile(self.loads, (len(ways), 1, 1))
        for unit_assignment, node in zip(before, node_of_unit, strict=True):
            # the most popular row stays on the same rank of the node
            place = unit_assignment.ranks % self.ranks_per_node
            ranks = node[:, None] * self.ranks_per_node + place
            loads[ways[:, None], ranks] += self.shard_load[
                self.shards_of(unit_assignment.candidate)
            ]
        peaks = loads.max(axis=1)
        overflow = np.maximum(peaks[:, Resource.MEMORY] - self.capacity, 0.0)
        best = np.lexsort((steady(self.problem.time(peaks)), overflow))[0]
        for unit_assignment, node in zip(before, node_of_unit[:, best].tolist(), strict=True):
            place = unit_assignment.ranks % self.ranks_per_node
            self.assign(unit_assignment.candidate, node * self.ranks_per_node + place)
        return len(ways)

    def _list_units_of_nodes(self) -> np.ndarray:
        """Units with a shard on each rank of a node, which may be any; those with most work first."""
        fills_node = self.inside_node[self.chosen]
        fills_node &= self.candidates.shards[self.chosen] == self.ranks_per_node
        fills_node &= ~self.must_be_apart
        units = np.intersect1d(np.flatnonzero(fills_node), self.free_units)
        seconds = self.candidate_load[self.chosen[units]][:, DEVICE_RESOURCES].sum(axis=1)
        return units[np.argsort(-steady(seconds), kind="stable")]

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
