"""Ranks with what they carry: placing shards, and what a change would add to a smooth stand-in of the time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfkit.sharding.objective import Objective
from perfkit.sharding.options import Option
from perfkit.sharding.pricing import RESOURCES
from perfkit.units import Array, steady

__all__ = ["NODE_KINDS", "Board", "Rules", "Snapshot"]

_HOST, _MEMORY = -2, -1  # the last resource is limited, not timed
_BYTES = [place for place, name in enumerate(RESOURCES) if name not in ("forward", "backward", "host")]
_TIGHT = 0.3  # part of the memory from which on it is kept an eye on
#: Kinds whose shards lie on the ranks of one node.
NODE_KINDS = ("table_row_wise", "table_column_wise")


@dataclass(frozen=True)
class Rules:
    """What a placement has to keep.

    Parameters
    ----------
    ranks, node : int
        Ranks, and ranks of a node [-].
    capacity : float
        Memory of a rank for tables [B].
    pinned : dict of int to int
        Rank by table that may lie nowhere else.
    apart : tuple of tuple of int
        Tables no two of which may share a rank.
    """

    ranks: int
    node: int
    capacity: float
    pinned: dict[int, int]
    apart: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A placement.

    Parameters
    ----------
    choice : array of int
        Option of every table [-].
    rank : array of int
        Rank of every possible shard, -1 for those of other options [-].
    time : float
        Time of an iteration [s].
    """

    choice: np.ndarray
    rank: np.ndarray
    time: float


class Board:
    """Ranks with what they carry, and every shard that could lie on them.

    Parameters
    ----------
    objective : Objective
        What is to become small.
    options : sequence of sequence of Option
        Ways to place each table.
    rules : Rules
        What to keep.
    """

    def __init__(self, objective: Objective, options: Sequence[Sequence[Option]], rules: Rules) -> None:
        self.objective, self.options, self.rules = objective, options, rules
        flat = [(t, o) for t, own in enumerate(options) for o in range(len(own))]
        counts = [len(options[t][o].shards) for t, o in flat]
        ends = np.cumsum(counts)
        self.items = {key: np.arange(end - n, end) for key, n, end in zip(flat, counts, ends, strict=True)}
        shards = [cost for t, o in flat for cost in options[t][o].shards]
        self.load = self._even(np.array(shards)) if shards else np.zeros((0, 7))
        self.table = np.repeat([t for t, _ in flat], counts)
        kinds = np.repeat([options[t][o].kind in NODE_KINDS for t, o in flat], counts)
        self.movable = ~kinds & ~np.isin(self.table, list(rules.pinned))
        self.everywhere = {key: self._even(options[key[0]][key[1]].everywhere) for key in flat}
        self.hot = {key: self._even(options[key[0]][key[1]].hot) for key in flat}
        self.slack = 1.0  # how far a rank may exceed its memory, for now
        self._group(flat, counts)
        self.clear()

    def _even(self, costs: Array) -> Array:
        """Loads in whole bytes, so that neither the order of sums nor a processor shows in them."""
        loads = self.objective.loads(costs)
        loads[..., _BYTES] = np.ceil(loads[..., _BYTES] - 1e-3)
        return loads

    def _group(self, flat: Sequence[tuple[int, int]], counts: Sequence[int]) -> None:
        """Sets of shards no two of which may share a rank: those of one table, and tables that are kept apart."""
        split = [t for (t, _), n in zip(flat, counts, strict=True) if n > 1]
        sets = [(t,) for t in dict.fromkeys(split)] + list(self.rules.apart)
        member: dict[int, list[int]] = {}
        for number, tables in enumerate(sets):
            for t in tables:
                member.setdefault(t, []).append(number)
        most = max(map(len, member.values()), default=0)
        groups = np.full((len(self.options), most), len(sets))
        for t, own in member.items():
            groups[t, : len(own)] = own
        self.groups, self.sets = groups, len(sets)
        self.grouped = np.isin(np.arange(len(self.options)), list(member))

    def clear(self) -> None:
        """Take everything off the ranks."""
        ranks = self.rules.ranks
        self.loads = np.zeros((ranks, self.load.shape[1]))
        self.rank = np.full(len(self.table), -1)
        self.choice = np.full(len(self.options), -1)
        self.occupied = np.zeros((self.sets + 1, ranks), dtype=bool)
        self.rows = self.gradients = 0.0

    # -- placing -----------------------------------------------------------------------------------------------------

    def put(self, table: int, option: int, ranks: Sequence[int] | np.ndarray) -> None:
        """Place a table on ranks, one for each shard."""
        own, chosen = self.items[table, option], self.options[table][option]
        self.loads += self.everywhere[table, option]
        self.loads[table % self.rules.ranks] += self.hot[table, option]
        self.rows, self.gradients = self.rows + chosen.rows, self.gradients + chosen.gradients
        self.choice[table], self.rank[own] = option, ranks
        np.add.at(self.loads, self.rank[own], self.load[own])
        if self.grouped[table]:
            self.occupied[np.ix_(self.groups[table], self.rank[own])] = True
            self.occupied[-1] = False

    def take(self, table: int) -> tuple[int, np.ndarray]:
        """Take a table off its ranks; returns its option and ranks."""
        option = int(self.choice[table])
        own, chosen = self.items[table, option], self.options[table][option]
        ranks = self.rank[own].copy()
        self.loads -= self.everywhere[table, option]
        self.loads[table % self.rules.ranks] -= self.hot[table, option]
        self.rows, self.gradients = self.rows - chosen.rows, self.gradients - chosen.gradients
        np.subtract.at(self.loads, ranks, self.load[own])
        if self.grouped[table]:
            self.occupied[np.ix_(self.groups[table], ranks)] = False
        self.choice[table], self.rank[own] = -1, -1
        return option, ranks

    def snapshot(self) -> Snapshot:
        """The placement as it stands."""
        return Snapshot(self.choice.copy(), self.rank.copy(), self.time())

    def restore(self, snapshot: Snapshot) -> None:
        """Place everything as it stood."""
        self.clear()
        for table, option in enumerate(snapshot.choice.tolist()):
            self.put(table, option, snapshot.rank[self.items[table, option]])

    def time(self) -> float:
        """Time of an iteration [s]."""
        return float(self.objective.time(self.loads.max(axis=0), self.rows, self.gradients))

    @property
    def overflow(self) -> float:
        """Bytes by which the fullest rank exceeds its memory, zero where it does not [B]."""
        return max(float(self.loads[:, _MEMORY].max()) - self.rules.capacity, 0.0)

    def expect(self, choice: Sequence[int]) -> None:
        """Take everything off, and scale the smooth time by what ranks will carry on average."""
        self.clear()
        shards = np.sum([self.load[self.items[t, o]].sum(axis=0) for t, o in enumerate(choice)], axis=0)
        average = shards / self.rules.ranks + sum(self.everywhere[t, o] for t, o in enumerate(choice))
        self.loads += np.maximum(average, 1e-30)
        self.smooth(3)
        self.loads[:] = 0.0

    # -- the smooth stand-in of the time -----------------------------------------------------------------------------

    def smooth(self, squarings: int) -> None:
        """Weigh loads by a high power, so that nearly full ranks count as well as the fullest."""
        self.squarings, power = squarings, 2.0**squarings
        self.most = 1e200 ** (1 / power)  # keeps the power finite
        peaks = self.loads.max(axis=0)
        step = np.maximum(peaks * 1e-3, 1e-12) * np.eye(len(peaks))
        now = self.objective.time(peaks, self.rows, self.gradients)
        more = self.objective.time(peaks + step, self.rows, self.gradients) - now
        timed = more / np.diagonal(step) * peaks
        # Behind a host that limits all, the device still counts a little; and a host that is not far behind does too.
        host = self.objective.correction * (self.objective.host + peaks[_HOST]) > 0.5 * now
        counted = [0, 1, *((_HOST,) if host else ())]
        timed[counted] = np.maximum(timed[counted], 1e-3 * float(now) * (peaks[counted] > 0))
        timed[_MEMORY] = now if peaks[_MEMORY] > _TIGHT * self.rules.capacity else 0.0
        self.timed = np.flatnonzero(timed > 0)
        self.scale = peaks[self.timed]
        self.scaled = self.load[:, self.timed] / self.scale
        total = self._power(self.loads[:, self.timed] / self.scale).sum(axis=0)
        self.weight = steady(timed[self.timed] * total ** (1 / power - 1) / power)
        if timed[_MEMORY]:  # nothing below the capacity, and much beyond it
            self.scale[-1], self.weight[-1] = self.rules.capacity, timed[_MEMORY] / power
            self.scaled[:, -1] = self.load[:, _MEMORY] / self.rules.capacity

    def _power(self, loads: Array) -> Array:
        """A high power of scaled loads, kept finite."""
        out = np.minimum(loads, self.most)
        for _ in range(self.squarings):
            np.multiply(out, out, out=out)
        return out

    def pressure(self) -> Array:
        """What each rank adds to the smooth time [s]."""
        return steady(self._power(self.loads[:, self.timed] / self.scale) @ self.weight)

    def cost_of_adding(self, loads: Array) -> Array:
        """What the smooth time grows by if a rank carried more, for every rank [s]."""
        loads, now = loads[..., self.timed] / self.scale, self.loads[:, self.timed] / self.scale
        return steady((self._power(now + loads) - self._power(now)) @ self.weight)

    # -- changes -----------------------------------------------------------------------------------------------------

    def barred(self, table: int, load: Array) -> np.ndarray:
        """Ranks that have no room for a shard, or may not hold one of this table."""
        full = self.loads[:, _MEMORY] + load[_MEMORY] > self.slack * self.rules.capacity
        if table in self.rules.pinned:
            full |= np.arange(len(full)) != self.rules.pinned[table]
        return full | self.occupied[self.groups[table]].any(axis=0) if self.grouped[table] else full

    def best_ranks(self, table: int, option: int) -> tuple[float, np.ndarray] | None:
        """Cheapest ranks for an option of a table that is on none, and what the smooth time grows by; None: no room."""
        chosen, own = self.options[table][option], self.items[table, option]
        reduced = (("rows", self.rows, chosen.rows), ("gradients", self.gradients, chosen.gradients))
        price = sum(
            float(np.diff(self.objective.curve(n)(np.array([old, old + more])))[0]) for n, old, more in reduced if more
        )
        base = self.everywhere[table, option]
        if base.any():
            hot = np.zeros_like(self.loads)
            hot[table % self.rules.ranks] = self.hot[table, option]
            if (self.loads + base + hot)[:, _MEMORY].max() > self.slack * self.rules.capacity:
                return None
            price += float(self.cost_of_adding(base + hot).sum())
        if not len(own):
            return price, own
        if chosen.kind in NODE_KINDS:
            return self._best_node(table, own, price)
        costs = np.where(self.barred(table, self.load[own].max(axis=0)), np.inf, self.cost_of_adding(self.load[own[0]]))
        n = len(own)
        ranks = np.argsort(costs, kind="stable")[:n] if n > 1 else np.array([int(np.argmin(costs))])
        total = float(costs[ranks].sum())
        return (price + total, ranks) if total < np.inf else None

    def _best_node(self, table: int, own: np.ndarray, price: float) -> tuple[float, np.ndarray] | None:
        """Cheapest ranks inside one node."""
        node, best = self.rules.node, None
        cold, hot = self.load[own[-1]], self.load[own[0]]
        costs = np.where(self.barred(table, hot), np.inf, self.cost_of_adding(cold))
        extra = self.cost_of_adding(hot) - self.cost_of_adding(cold)
        for first in range(0, self.rules.ranks, node):
            ranks = first + np.argsort(costs[first : first + node], kind="stable")[: len(own)]
            total = float(costs[ranks].sum() + extra[ranks[0]])
            if total < np.inf and (best is None or total < best[0]):
                best = total, ranks
        return (price + best[0], best[1]) if best else None

    def trades(self, rank: int, partners: np.ndarray) -> tuple[Array, np.ndarray, np.ndarray]:
        """Growth of the smooth time if a shard of a rank goes to another one, alone or for one of its own.

        Returns the growth by (own shard, other), the own shards, and the others: shards, then partners as -1 - rank.
        """
        placed = self.rank
        mine = np.flatnonzero((placed == rank) & self.movable)
        marked = np.zeros(len(self.loads) + 1, dtype=bool)
        marked[partners] = True
        theirs = np.flatnonzero(marked[placed] & self.movable)
        there = np.concatenate([placed[theirs], partners])
        none = np.zeros((len(partners), len(self.timed)))
        given = self.scaled[mine][:, None] - np.concatenate([self.scaled[theirs], none])
        now = self.loads[:, self.timed] / self.scale
        far = now[there]
        changed = self._power(np.stack([now[rank] - given, far + given])) @ self.weight
        growth = changed[0] + changed[1] - (self._power(now[rank]) @ self.weight + self._power(far) @ self.weight)
        memory, room = self.load[:, _MEMORY], self.slack * self.rules.capacity
        given = memory[mine][:, None] - np.concatenate([memory[theirs], np.zeros(len(partners))])
        here, far = self.loads[rank, _MEMORY], self.loads[there, _MEMORY]
        bad = (given > np.maximum(room - far, 0.0)) | (-given > max(room - here, 0.0))
        if self.grouped[self.table[mine]].any() or self.grouped[self.table[theirs]].any():
            bad |= self._clash(rank, mine, theirs, there)
        growth[bad] = np.inf
        return growth, mine, np.concatenate([theirs, -1 - partners])

    def _clash(self, rank: int, mine: np.ndarray, theirs: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Trades after which two shards that are kept apart would share a rank."""
        out = np.zeros((len(mine), len(there)), dtype=bool)
        mine_groups, their_groups = self.groups[self.table[mine]], self.groups[self.table[theirs]]
        for slot in range(self.groups.shape[1]):
            group = mine_groups[:, slot]
            same = np.zeros_like(out)  # the one in the way leaves as the other comes
            for other in range(self.groups.shape[1]):
                same[:, : len(theirs)] |= (group[:, None] == their_groups[:, other]) & (group < self.sets)[:, None]
            out |= self.occupied[group][:, there] & ~same
        back = np.zeros_like(out)
        for slot in range(self.groups.shape[1]):
            group = their_groups[:, slot]
            same = np.zeros((len(mine), len(theirs)), dtype=bool)
            for other in range(self.groups.shape[1]):
                same |= (mine_groups[:, other][:, None] == group) & (group < self.sets)
            back[:, : len(theirs)] |= self.occupied[group, rank] & ~same
        return out | back

    def move(self, item: int, rank: int) -> None:
        """Move a shard."""
        old = self.rank[item]
        self.loads[old] -= self.load[item]
        self.loads[rank] += self.load[item]
        self.rank[item] = rank
        table = self.table[item]
        if self.grouped[table]:
            own = self.groups[table]
            self.occupied[own, old], self.occupied[own, rank] = False, True
            self.occupied[-1] = False

    def swap(self, item: int, other: int) -> None:
        """Move a shard to the rank of another and that one to its own; a negative number is a rank."""
        old = int(self.rank[item])
        if other < 0:
            self.move(item, -1 - other)
        else:
            new = int(self.rank[other])
            self.move(item, new)
            self.move(other, old)
            for moved, rank in ((item, new), (other, old)):
                self.occupied[self.groups[self.table[moved]], rank] = True
            self.occupied[-1] = False
