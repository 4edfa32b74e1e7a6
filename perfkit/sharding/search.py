"""Search for the placement with the shortest time: greedy starts, then simulated annealing of
shards and tables."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from perfkit.ground.units import Array, steady
from perfkit.sharding.problem import LOAD, NODE_KINDS, RESOURCES, Options, Problem

_ROWS, _GRADIENTS, _HOST, _MEMORY = (LOAD[name] for name in ("rows", "gradients", "host", "memory"))
_BYTES = [place for name, place in LOAD.items() if name not in ("forward", "backward", "host")]
_TIGHT = 0.3  # memory counts in the smooth time from this share of the capacity on [-]
_PARTNERS = 16  # ranks in one trade at most
#: Largest shard of a table that is split by columns in a start, over the average load of a rank
#: [-].
_SPLITS = (0.7, 0.35, 2.0)
# first temperature of each anneal, over the time [-]; the last anneal improves the best
_HEATS = (3e-3, 0.1, 1e-3)
# fewest and most anneals before the last: small problems need less work for each, so they get more
_TRIALS = (3, 11)
# share of the work for these anneals [-], and work of one for each table [s]
_TRIALS_WORK, _UNIT = 0.36, 2e-3
# steps from each start, stages of an anneal, tables placed again at a time
_DESCENT, _STAGES, _TOGETHER = 30, 60, 4
#: Work of a step, a pair in a trade, an option, and a table that is placed [s]; docs/formulas.md,
#: table 8.2.
_STEP, _PAIR, _OPTION, _PLACE = 1.4e-4, 1.3e-7, 8e-5, 6e-5
#: Called with the share of the work that is done [-] and the best time so far [s].
Progress: TypeAlias = Callable[[float, float], None] | None


class Found(NamedTuple):
    """A placement: bytes that the fullest rank lacks, time [s], option of each table, rank of each
    shard."""

    overflow: float
    time: float
    choice: np.ndarray
    rank: np.ndarray


class State:
    """Shards on ranks with their loads; a smooth time, with a power mean over ranks, judges
    changes."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self.problem, self.options, self.pinned = problem, options, problem.constraints.pinned
        self.ranks, self.node, self.capacity = (
            problem.costs.ranks,
            problem.costs.node,
            problem.capacity,
        )
        # Loads are whole bytes, so that sums do not depend on their order or on the processor.
        self.load, self.hot = options.load.copy(), options.hot.copy()
        for loads in (self.load, self.hot):
            loads[:, _BYTES] = np.ceil(loads[:, _BYTES] - 1e-3)
        self.within = np.isin(options.kind, NODE_KINDS)
        self.first = np.append(0, np.cumsum(options.parts))  # first shard of each option
        self.starts = np.append(options.starts, len(options.table))
        of = np.repeat(np.arange(len(options.table)), options.parts)
        self.table, self.shard = options.table[of], self.load[of]
        self.shard[self.first[:-1][self.within]] += self.hot[self.within]
        self.free = np.setdiff1d(np.arange(len(options.starts)), list(self.pinned))
        self.movable = ~self.within[of] & np.isin(self.table, self.free)
        near = [[table] for table in range(len(options.starts))]
        for group in problem.constraints.apart:
            for table in group:
                near[table] += group
        most = max(map(len, near))
        #: Tables whose ranks a table may not share: itself, and those that must be apart from it.
        self.near = np.array([own + own[:1] * (most - len(own)) for own in near])
        self.on = np.zeros((len(near), self.ranks), dtype=bool)
        self.clear()

    def clear(self, choice: np.ndarray | None = None) -> None:
        """Remove all tables; with a choice of options, scale the smooth time by the average loads
        of a rank."""
        self.slack = 1.0  # the memory of a rank may be exceeded by this factor during the search
        self.rank, self.choice = np.full(len(self.table), -1), np.full(len(self.near), -1)
        self.loads, self.on[:] = np.zeros((self.ranks, len(RESOURCES))), False
        if choice is not None:
            parts = np.where(self.options.parts, self.options.parts, self.ranks)[choice]
            self.loads += np.maximum(parts @ self.load[choice] / self.ranks, 1e-30)
            self.smooth(3)
            self.loads[:] = 0.0

    def put(self, option: int, ranks: np.ndarray, sign: int = 1) -> None:
        """Place a table on ranks, one for each shard; or, with `sign` -1, remove it."""
        table, own = self.options.table[option], slice(self.first[option], self.first[option + 1])
        self.choice[table], self.rank[own] = (option, ranks) if sign > 0 else (-1, -1)
        if len(ranks):
            self.loads[ranks] += sign * self.shard[own]
            self.on[table, ranks] = sign > 0
        else:
            self.loads += sign * self.load[option]
            self.loads[self.options.home[option]] += sign * self.hot[option]

    def take(self, table: int) -> tuple[int, np.ndarray]:
        """Remove a table from its ranks; returns its option and ranks."""
        option = int(self.choice[table])
        ranks = self.rank[self.first[option] : self.first[option + 1]].copy()
        self.put(option, ranks, -1)
        return option, ranks

    def move(self, shard: int, rank: int) -> None:
        """Move a shard to another rank."""
        option, ranks = self.take(self.table[shard])
        ranks[shard - self.first[option]] = rank
        self.put(option, ranks)

    def restore(self, found: Found) -> None:
        """Place all tables as in an earlier placement."""
        self.clear()
        for option in found.choice.tolist():
            self.put(option, found.rank[self.first[option] : self.first[option + 1]])

    def snapshot(self, than: Found | None = None) -> Found:
        """The current placement, or `than` if that is at least as good."""
        overflow = max(float(self.loads[:, _MEMORY].max()) - self.capacity, 0.0)
        time = float(self.problem.time(self.loads.max(axis=0)))
        if than and (overflow, time) >= (than.overflow, than.time * (1 - 1e-12)):
            return than
        return Found(overflow, time, self.choice.copy(), self.rank.copy())

    def smooth(self, squarings: int) -> None:
        """Scale the smooth time to the current loads; its power is 2 to the number of squarings."""
        self.squarings, power, problem = squarings, 2.0**squarings, self.problem
        peaks = self.loads.max(axis=0)
        step = np.maximum(peaks * 1e-3, 1e-12)
        now = float(problem.time(peaks))
        timed = (problem.time(peaks + np.diag(step)) - now) / step * peaks
        # Where the host sets the time, the device still counts a little; so does a host that is a
        # little faster.
        host = problem.correction * (problem.host + peaks[_HOST]) > 0.5 * now
        counted = [0, 1, *((_HOST,) if host else ())]
        timed[counted] = np.maximum(timed[counted], 1e-3 * now * (peaks[counted] > 0))
        # the same on all ranks; `find_ranks` adds their exact time
        timed[[_ROWS, _GRADIENTS]] = 0.0
        timed[_MEMORY] = now if peaks[_MEMORY] > _TIGHT * self.capacity else 0.0
        self.timed = np.flatnonzero(timed > 0)
        self.scale = peaks[self.timed]
        total = _raise(self.loads[:, self.timed] / self.scale, squarings).sum(axis=0)
        self.weight = steady(timed[self.timed] * total ** (1 / power - 1) / power)
        if timed[_MEMORY]:  # costs nearly nothing below the capacity, and much beyond it
            self.scale[-1], self.weight[-1] = self.capacity, timed[_MEMORY] / power
        self.scaled = self.shard[:, self.timed] / self.scale

    def press(self, more: Array | None = None) -> Array:
        """Part of each rank in the smooth time, or how much this part would grow with more load
        [s]."""
        now = self.loads[:, self.timed] / self.scale
        if more is None:
            return steady(_raise(now, self.squarings) @ self.weight)
        then = _raise(now + more[..., self.timed] / self.scale, self.squarings)
        return steady((then - _raise(now, self.squarings)) @ self.weight)

    def bar(self, table: int, load: Array) -> np.ndarray:
        """Which ranks have no room for a shard, or may not hold one of this table."""
        full = self.loads[:, _MEMORY] + load[_MEMORY] > self.slack * self.capacity
        if table in self.pinned:
            full |= np.arange(self.ranks) != self.pinned[table]
        return full | self.on[self.near[table]].any(axis=0)

    def find_ranks(self, option: int) -> tuple[float, np.ndarray] | None:
        """Cheapest ranks for an option of a table, and the growth of the smooth time [s]; None if
        there is no room."""
        table, load, n = (
            self.options.table[option],
            self.load[option],
            int(self.options.parts[option]),
        )
        if not n:
            more = load + np.zeros_like(self.loads)
            more[self.options.home[option]] += self.hot[option]
            if (self.loads + more)[:, _MEMORY].max() > self.slack * self.capacity:
                return None
            price = float(self.press(more).sum())
            for name in ("rows", "gradients"):
                if size := load[LOAD[name]]:
                    both = self.loads[0, LOAD[name]] + np.array([0.0, size])
                    price += float(np.diff(self.problem.curves[name](both))[0])
            return price, np.zeros(0, dtype=int)
        hot, growth = load + self.hot[option], self.press(load)
        size = self.node if self.within[option] else self.ranks
        costs = np.where(self.bar(table, hot), np.inf, growth)[: self.ranks // size * size].reshape(
            -1, size
        )
        ranks = (
            np.argsort(costs, axis=1, kind="stable")[:, :n]
            + np.arange(0, costs.size, size)[:, None]
        )
        totals = costs.ravel()[ranks].sum(axis=1)
        if self.within[option]:
            totals += (self.press(hot) - growth)[ranks[:, 0]]
        best = int(np.argmin(totals))
        return (float(totals[best]), ranks[best]) if totals[best] < np.inf else None

    def trades(self, rank: int, partners: np.ndarray) -> tuple[Array, np.ndarray, np.ndarray]:
        """Growth of the smooth time if a shard of a rank moves to a partner, alone or in exchange
        for another shard.

        Returns the growth by (own shard, other) [s], the own shards, and the others: shards, or -1
        - rank for none.
        """
        marked = np.zeros(self.ranks + 1, dtype=bool)
        marked[partners] = True
        mine, theirs = (
            np.flatnonzero(here & self.movable) for here in (self.rank == rank, marked[self.rank])
        )
        there = np.concatenate([self.rank[theirs], partners])
        none = np.zeros((len(partners), len(self.timed)))
        given = self.scaled[mine][:, None] - np.concatenate([self.scaled[theirs], none])
        now = self.loads[:, self.timed] / self.scale
        changed = (
            _raise(np.stack([now[rank] - given, now[there] + given]), self.squarings) @ self.weight
        )
        before = _raise(now, self.squarings) @ self.weight
        growth = changed[0] + changed[1] - (before[rank] + before[there])
        memory = self.shard[:, _MEMORY]
        given = memory[mine][:, None] - np.append(memory[theirs], none[:, 0])
        rooms = np.maximum(self.slack * self.capacity - self.loads[:, _MEMORY], 0.0)
        bad = (given > rooms[there]) | (-given > rooms[rank])
        # Two shards that may not share a rank are not exchanged either.
        bad |= self.on[self.near[self.table[mine]]].any(axis=1)[:, there]
        bad[:, : len(theirs)] |= self.on[self.near[self.table[theirs]], rank].any(axis=1)
        growth[bad] = np.inf
        return growth, mine, np.concatenate([theirs, -1 - partners])


def _raise(loads: Array, squarings: int) -> Array:
    """Loads squared so many times, kept finite; that of an almost empty rank underflows to zero,
    which the caller lets NumPy do."""
    out = np.minimum(loads, 1e200 ** (0.5**squarings))
    for _ in range(squarings):
        np.multiply(out, out, out=out)
    return out


def _construct(state: State, choice: np.ndarray, key: Array) -> None:
    """Place each table where it adds the least, the largest first; if no rank has room, where most
    memory is left."""
    state.clear(choice)
    first = np.flatnonzero(
        (state.options.parts[choice] == 0) | ~np.isin(np.arange(len(choice)), state.free)
    )
    rest = np.argsort(-key, kind="stable")
    for table in (*first, *rest[~np.isin(rest, first)]):
        option = choice[table]
        if found := state.find_ranks(option):
            state.put(option, found[1])
            continue
        barred = state.bar(table, np.full(len(RESOURCES), -np.inf))
        room = np.where(barred, -np.inf, state.capacity - state.loads[:, _MEMORY])
        ranks = np.argsort(-room, kind="stable")[: state.options.parts[option]]
        in_node = ranks[:1] // state.node * state.node + np.arange(len(ranks))
        state.put(option, in_node if state.within[option] else ranks)


def _starts(state: State, bases: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, Array]]:
    """Options of the tables and keys to order them by, the most promising first; large tables are
    split by columns."""
    alone, kinds, load = state.options.starts, state.options.kind, state.load
    parts = (
        np.where(state.options.parts, state.options.parts, state.ranks)[alone, None] * load[alone]
    )
    average = parts.sum(axis=0) / state.ranks
    average = np.where(average > 0, average, np.inf)
    room = np.append(average[:-1], max(state.capacity, 1.0))
    keys = (parts / room).max(axis=1), parts[:, _MEMORY], parts[:, :2].sum(axis=1)
    tries = [
        (number, split, base)
        for number in range(len(keys))
        for split in _SPLITS
        for base in (*bases, alone)
    ]
    # one kind for all tables that can have it
    one_kind = [state.options.take(np.full(len(alone), kind)) for kind in np.unique(kinds)]
    tries += [(0, _SPLITS[0], base) for base in one_kind]
    seen = set()
    for number, split, base in tries:
        choice, fits = base.copy(), np.all(load <= split * average, axis=1)
        for table in np.flatnonzero((kinds[base] == "table_wise") & ~fits[base]):
            own = np.arange(state.starts[table], state.starts[table + 1])
            own = own[np.isin(kinds[own], ("table_wise", "column_wise"))]
            choice[table] = own[np.argmax(fits[own])] if fits[own].any() else own[-1]
        if (name := (number, choice.tobytes())) not in seen:
            seen.add(name)
            yield choice, keys[number]


@dataclass(eq=False)
class Search:
    """Improves a placement until its time is close to the `bound`.

    `work` is counted and not measured [s], so that the same seed gives the same plan on every
    machine. If `steps` limit the search, every trade and every table that is placed counts as one
    step. `interrupted` is true after Ctrl-C.
    """

    state: State
    rng: np.random.Generator
    bound: float
    steps: int | None
    best: Found
    work: float = 0.0
    interrupted: bool = False

    def done(self) -> bool:
        """Whether the best placement is within 1e-4 of the bound."""
        return self.best.overflow == 0 and self.best.time <= self.bound * (1 + 1e-4)

    def _spend(self, seconds: float, steps: int = 1) -> None:
        self.work += _STEP * steps if self.steps is not None else seconds

    def start(
        self, bases: Sequence[np.ndarray], placed: Sequence[Found], seconds: float
    ) -> list[Found]:
        """Try starts; returns the best few, the best first.

        The best of the given placements is the best so far if no start is better; the last anneal
        improves it.
        """
        state, found = self.state, []
        for choice, key in _starts(state, bases):
            _construct(state, choice, key)
            self._spend(_PLACE * len(choice) * (1 + state.ranks / 200), len(choice))
            self.best = state.snapshot(self.best)
            state.smooth(8)
            for _ in range(_DESCENT):
                if self._trade(1e-6 * self.best.time, full=True):
                    self.best = state.snapshot(self.best)
            found.append(state.snapshot())
            if self.work > seconds or self.done():
                break
        found.sort(key=lambda start: start[:2])
        ready = min(placed, key=lambda start: start[:2], default=None)
        if ready is not None and ready[:2] < self.best[:2]:
            state.restore(ready)
            self.best = state.snapshot(self.best)
        return found[: len(_HEATS)]

    def anneal(self, start: Found, seconds: float, hot: float, progress: Progress = None) -> None:
        """Improve a placement at a falling temperature, with an amount of work [s]."""
        state, begin, count = self.state, self.work, 0
        state.restore(start)
        for stage in range(_STAGES):
            if self.done():
                break
            heat, squarings, state.slack = _schedule(stage / _STAGES, hot)
            if state.slack == 1 and state.snapshot().overflow > self.best.overflow:
                state.restore(self.best)
            state.smooth(squarings)
            while self.work < begin + seconds * (stage + 1) / _STAGES:
                count += 1
                now, full = heat * self.best.time, count % 2 == 1
                if (
                    self._trade(now, full)
                    if count % 3
                    else self._change(now, full, many=count % 18 == 0)
                ):
                    self.best = state.snapshot(self.best)
            if progress is not None:
                progress((stage + 1) / _STAGES, self.best.time)

    def _draw(self, costs: Array, heat: float) -> int:
        """Draw one of several changes; cheap ones are more probable, the more so at a low
        temperature."""
        summed = np.cumsum(np.exp(np.maximum((costs.min() - costs) / heat, -700.0)))
        return min(int(np.searchsorted(summed, self.rng.random() * summed[-1])), len(costs) - 1)

    def _trade(self, heat: float, full: bool) -> bool:
        """Move or exchange a shard of the fullest rank, or of any; returns whether anything
        changed."""
        state, pressure = self.state, self.state.press()
        rank = int(np.argmax(pressure)) if full else int(self.rng.integers(state.ranks))
        partners = np.arange(state.ranks)
        if state.ranks - 1 > _PARTNERS:
            light = np.argsort(pressure, kind="stable")[: _PARTNERS // 2]
            partners = np.unique(
                np.concatenate([light, self.rng.integers(0, state.ranks, _PARTNERS // 2)])
            )
        growth, mine, others = state.trades(rank, partners[partners != rank])
        self._spend(_STEP + _PAIR * growth.size)
        pick = self._draw(np.append(growth.ravel(), 0.0), heat)  # the last one changes nothing
        if pick == growth.size:
            return False
        row, place = divmod(pick, growth.shape[1])
        other = int(others[place])
        state.move(int(mine[row]), -1 - other if other < 0 else int(state.rank[other]))
        if other >= 0:
            state.move(other, rank)
        return True

    def _pick(self, tables: np.ndarray, full: bool) -> int:
        """Draw one of these tables; if `full`, one on the fullest rank where there is one."""
        if full:
            here = np.intersect1d(
                self.state.table[self.state.rank == np.argmax(self.state.press())], tables
            )
            tables = here if len(here) else tables
        return int(tables[self.rng.integers(len(tables))])

    def _place(self, table: int, heat: float) -> bool:
        """Place a removed table by one of its options; returns whether there was room."""
        options = range(self.state.starts[table], self.state.starts[table + 1])
        found = [self.state.find_ranks(option) for option in options]
        self._spend(_OPTION * (1 + len(found)))
        costs = np.array([each[0] if each else np.inf for each in found])
        if not np.isfinite(costs).any():
            return False
        pick = self._draw(costs, heat)
        self.state.put(options[pick], found[pick][1])  # type: ignore[index]
        return True

    def _change(self, heat: float, full: bool, many: bool) -> bool:
        """Place a table again, or several in another order, which may be undone; returns whether
        anything changed."""
        state, count = self.state, np.diff(self.state.starts)
        tables = state.free if many else state.free[count[state.free] > 1]
        if not len(tables):
            return self._trade(heat, full)
        before = float(state.press().sum())
        fullest = (
            [number == 0 for number in range(_TOGETHER)] if many else [self.rng.random() < 0.5]
        )
        old = {
            table: state.take(table)
            for table in dict.fromkeys([self._pick(tables, each) for each in fullest])
        }
        done = [
            table for table in self.rng.permutation(list(old)).tolist() if self._place(table, heat)
        ]
        worse = float(state.press().sum()) - before
        kept = not many or self.rng.random() < np.exp(min(-worse / heat, 0.0))
        if kept and len(done) == len(old):
            return True
        for table in done:
            state.take(table)
        for place in old.values():
            state.put(*place)
        return False


def _schedule(done: float, hot: float) -> tuple[float, int, float]:
    """Temperature over the time [-], squarings of the smooth time, and slack of memory [-]."""
    if done < 0.1 or done > 0.85:  # only improvements at the start and at the end
        return 1e-6, 8 if done < 0.1 else 11, 1.0
    part = (done - 0.1) / 0.75
    return hot * (3e-6 / hot) ** part, 4 + int(4 * part), 1.2 if part < 0.8 else 1.0


def search_plan(
    state: State,
    bound: float,
    bases: Sequence[np.ndarray],
    placed: Sequence[Found],
    seconds: float,
    seed: int,
    steps: int | None,
    progress: Progress,
) -> Search:
    """Search for the placement with the shortest time; `bases` are options of the tables in relaxed
    problems, and `placed` are whole placements by rules of thumb.

    A sixth of the work goes into starts. A start places the tables in the order of their largest
    load, seconds or memory, each where it adds the least. Tables have the options of a relaxed
    problem, or one kind where they can, or are whole; large ones are split by columns. Then
    simulated annealing improves the best starts: a rank moves a shard or exchanges it, or a table
    gets another option. The maximum over ranks is replaced by a power mean, whose power grows.
    """
    search = Search(
        state,
        np.random.default_rng(seed),
        bound,
        steps,
        Found(np.inf, np.inf, state.choice, state.rank),
    )
    seconds = steps * _STEP if steps else seconds
    try:
        heads = search.start(bases, placed, seconds / 6)
        trials = int(np.clip(seconds / (_UNIT * len(state.near)), *_TRIALS))
        part = seconds * (_TRIALS_WORK if trials == _TRIALS[0] else 0.7) / trials
        for number in range(trials):
            search.anneal(heads[number % len(heads)], part, _HEATS[number % len(_HEATS)])
        search.anneal(search.best, seconds - search.work, _HEATS[-1], progress)
    except KeyboardInterrupt:
        if search.best.time == np.inf:
            raise
        search.interrupted = True
    return search
