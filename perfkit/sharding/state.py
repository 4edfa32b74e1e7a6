"""Ranks with what they carry: placing shards, moving them, and a smooth time that says what a change would cost."""

from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, steady
from perfkit.sharding.constraints import NODE_KINDS, Constraints
from perfkit.sharding.objective import RESOURCES, Options, Problem

_ROWS, _GRADIENTS, _HOST, MEMORY = (list(RESOURCES).index(r) for r in ("rows", "gradients", "host", "memory"))
_BYTES = [place for place, name in enumerate(RESOURCES) if name not in ("forward", "backward", "host")]
_TIGHT = 0.3  # share of the memory from which on it is looked at


class Snapshot(NamedTuple):
    """A placement: bytes beyond the memory of the fullest rank, time, option of each table, rank of each shard."""

    overflow: float
    time: float
    choice: np.ndarray
    rank: np.ndarray


class State:
    """Ranks with what they carry, every shard that could be on them, and the best placement so far."""

    def __init__(self, problem: Problem, options: Options, constraints: Constraints) -> None:
        self.objective, self.options = problem.objective, options
        self.pinned, self.units = constraints.pinned, constraints.units
        self.ranks, self.node, self.capacity = problem.costs.ranks, problem.costs.node, problem.capacity
        # Loads in whole bytes, so that neither the order of sums nor a processor shows in them.
        self.load, self.hot = (self.objective.loads(costs) for costs in (options.shard, options.hot))
        for loads in (self.load, self.hot):
            loads[:, _BYTES] = np.ceil(loads[:, _BYTES] - 1e-3)
        self.within = np.isin(options.kind, NODE_KINDS)
        self.first = np.append(0, np.cumsum(options.parts))  # first shard of each option
        self.starts = np.append(np.flatnonzero(np.diff(options.table, prepend=-1)), len(options.table))
        of = np.repeat(np.arange(len(options.table)), options.parts)
        self.table, self.shard = options.table[of], self.load[of]
        self.shard[self.first[:-1][self.within]] += self.hot[self.within]
        self.movable = ~self.within[of] & ~np.isin(self.table, list(self.pinned))
        # Sets no two of whose shards may share a rank: the parts of one table, and tables that are kept apart.
        sets = [(t,) for t in np.unique(options.table[options.parts > 1])] + list(constraints.apart)
        member: list[list[int]] = [[] for _ in self.starts[1:]]
        for number, tables in enumerate(sets):
            for t in tables:
                member[t].append(number)
        padded = list(zip_longest(*member, fillvalue=len(sets)))
        self.groups = np.array(padded, dtype=int).reshape(-1, len(member)).T
        self.best, self.work = Snapshot(np.inf, np.inf, self.starts, of), 0.0
        self.occupied = np.zeros((len(sets) + 1, self.ranks), dtype=bool)
        self.clear()

    def clear(self, choice: np.ndarray | None = None) -> None:
        """Take everything off, and scale the smooth time by what ranks carry on average with a choice of options."""
        self.slack = 1.0  # a rank may exceed its memory by this factor, for now
        self.rank, self.choice = np.full(len(self.table), -1), np.full(len(self.starts) - 1, -1)
        self.loads = np.zeros((self.ranks, len(RESOURCES)))
        self.occupied[:] = False
        if choice is not None:
            parts = np.where(self.options.parts, self.options.parts, self.ranks)[choice]
            self.loads += np.maximum(parts @ self.load[choice] / self.ranks, 1e-30)
            self.smooth(3)
            self.loads[:] = 0.0

    def put(self, option: int, ranks: np.ndarray) -> None:
        """Place a table on ranks, one for each shard."""
        table, own = self.options.table[option], slice(self.first[option], self.first[option + 1])
        self.choice[table], self.rank[own] = option, ranks
        self._carry(table, option, ranks, 1.0)

    def take(self, table: int) -> tuple[int, np.ndarray]:
        """Take a table off its ranks; returns its option and ranks."""
        option = int(self.choice[table])
        own = slice(self.first[option], self.first[option + 1])
        ranks = self.rank[own].copy()
        self.choice[table], self.rank[own] = -1, -1
        self._carry(table, option, ranks, -1.0)
        return option, ranks

    def _carry(self, table: int, option: int, ranks: np.ndarray, sign: float) -> None:
        if len(ranks):
            np.add.at(self.loads, ranks, sign * self.shard[self.first[option] : self.first[option + 1]])
            self.occupied[self.groups[table][:, None], ranks] = sign > 0
            self.occupied[-1] = False
        else:
            self.loads += sign * self.load[option]
            self.loads[self.options.home[option]] += sign * self.hot[option]

    def snapshot(self, than: Snapshot | None = None) -> Snapshot:
        """The placement as it is; or another one where that is at least as good."""
        overflow = max(float(self.loads[:, MEMORY].max()) - self.capacity, 0.0)
        time = float(self.objective.time(self.loads.max(axis=0)))
        if than and (overflow, time) >= (than.overflow, than.time * (1 - 1e-12)):
            return than
        return Snapshot(overflow, time, self.choice.copy(), self.rank.copy())

    def smooth(self, squarings: int) -> None:
        """Weigh loads by a high power, so that nearly full ranks count as well as the fullest."""
        self.squarings, power = squarings, 2.0**squarings
        peaks = self.loads.max(axis=0)
        step = np.maximum(peaks * 1e-3, 1e-12)
        now = float(self.objective.time(peaks))
        timed = (self.objective.time(peaks + np.diag(step)) - now) / step * peaks
        # Behind a host that limits all, the device still counts a little; and a host that is not far behind does too.
        host = self.objective.correction * (self.objective.host + peaks[_HOST]) > 0.5 * now
        counted = [0, 1, *((_HOST,) if host else ())]
        timed[counted] = np.maximum(timed[counted], 1e-3 * now * (peaks[counted] > 0))
        timed[[_ROWS, _GRADIENTS]] = 0.0  # the same on all ranks, and counted as they are
        timed[MEMORY] = now if peaks[MEMORY] > _TIGHT * self.capacity else 0.0
        self.timed = np.flatnonzero(timed > 0)
        self.scale = peaks[self.timed]
        total = _raise(self.loads[:, self.timed] / self.scale, squarings).sum(axis=0)
        self.weight = steady(timed[self.timed] * total ** (1 / power - 1) / power)
        if timed[MEMORY]:  # nothing below the capacity, and much beyond it
            self.scale[-1], self.weight[-1] = self.capacity, timed[MEMORY] / power
        self.scaled = self.shard[:, self.timed] / self.scale

    def press(self, more: Array | None = None) -> Array:
        """What each rank adds to the smooth time, or what it would add on top if it carried more [s]."""
        now = self.loads[:, self.timed] / self.scale
        if more is None:
            return steady(_raise(now, self.squarings) @ self.weight)
        then = _raise(now + more[..., self.timed] / self.scale, self.squarings)
        return steady((then - _raise(now, self.squarings)) @ self.weight)

    def bar(self, table: int, load: Array) -> np.ndarray:
        """Ranks that have no room for a shard, or may not hold one of this table."""
        full = self.loads[:, MEMORY] + load[MEMORY] > self.slack * self.capacity
        if table in self.pinned:
            full |= np.arange(self.ranks) != self.pinned[table]
        return full | self.occupied[self.groups[table]].any(axis=0)

    def trades(self, rank: int, partners: np.ndarray) -> tuple[Array, np.ndarray, np.ndarray]:
        """Growth of the smooth time if a shard of a rank goes to another one, alone or for one of its own.

        Returns the growth by (own shard, other), the own shards, and the others: shards, then partners as -1 - rank.
        """
        marked = np.zeros(self.ranks + 1, dtype=bool)
        marked[partners] = True
        mine, theirs = (np.flatnonzero(here & self.movable) for here in (self.rank == rank, marked[self.rank]))
        there = np.concatenate([self.rank[theirs], partners])
        none = np.zeros((len(partners), len(self.timed)))
        given = self.scaled[mine][:, None] - np.concatenate([self.scaled[theirs], none])
        now = self.loads[:, self.timed] / self.scale
        changed = _raise(np.stack([now[rank] - given, now[there] + given]), self.squarings) @ self.weight
        before = _raise(now, self.squarings) @ self.weight
        growth = changed[0] + changed[1] - (before[rank] + before[there])
        memory, room = self.shard[:, MEMORY], self.slack * self.capacity
        given = memory[mine][:, None] - np.append(memory[theirs], none[:, 0])
        rooms = np.maximum(room - self.loads[:, MEMORY], 0.0)
        bad = (given > rooms[there]) | (-given > rooms[rank])
        # Shards of one set that may not share a rank do not trade places either.
        bad |= self.occupied[self.groups[self.table[mine]]].any(axis=1)[:, there]
        bad[:, : len(theirs)] |= self.occupied[self.groups[self.table[theirs]], rank].any(axis=1)
        growth[bad] = np.inf
        return growth, mine, np.concatenate([theirs, -1 - partners])

    def move(self, shard: int, rank: int) -> None:
        """Move a shard to another rank."""
        old, sets = self.rank[shard], self.groups[self.table[shard]]
        self.loads[old] -= self.shard[shard]
        self.loads[rank] += self.shard[shard]
        self.rank[shard] = rank
        self.occupied[sets, old], self.occupied[sets, rank] = False, True
        self.occupied[-1] = False


def _raise(loads: Array, squarings: int) -> Array:
    """A high power of loads, kept finite."""
    out = np.minimum(loads, 1e200 ** (0.5**squarings))
    for _ in range(squarings):
        np.multiply(out, out, out=out)
    return out


def find_ranks(state: State, option: int) -> tuple[float, np.ndarray] | None:
    """Growth of the smooth time [s] and the cheapest ranks for an option of a table on none; None without room."""
    table, load, n = state.options.table[option], state.load[option], int(state.options.parts[option])
    if not n:
        more = load + np.zeros_like(state.loads)
        more[state.options.home[option]] += state.hot[option]
        if (state.loads + more)[:, MEMORY].max() > state.slack * state.capacity:
            return None
        price = float(state.press(more).sum())
        for name, at in (("rows", _ROWS), ("gradients", _GRADIENTS)):
            if load[at]:
                price += float(np.diff(state.objective.curves[name](state.loads[0, at] + np.array([0.0, load[at]])))[0])
        return price, np.zeros(0, dtype=int)
    hot, growth = load + state.hot[option], state.press(load)
    costs = np.where(state.bar(table, hot), np.inf, growth)
    if not state.within[option]:
        ranks = np.argsort(costs, kind="stable")[:n] if n > 1 else np.array([int(np.argmin(costs))])
        total = float(costs[ranks].sum())
        return (total, ranks) if total < np.inf else None
    whole = state.ranks // state.node * state.node
    nodes = np.argsort(costs[:whole].reshape(-1, state.node), axis=1, kind="stable")[:, :n]
    nodes += np.arange(0, whole, state.node)[:, None]
    totals = costs[nodes].sum(axis=1) + (state.press(hot) - growth)[nodes[:, 0]]
    best = int(np.argmin(totals))
    return (float(totals[best]), nodes[best]) if totals[best] < np.inf else None
