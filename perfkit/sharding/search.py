"""Search for the placement with the least time: greedy starts, then shards that move at a falling temperature."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from perfkit.ground.units import Array
from perfkit.sharding.state import MEMORY, Snapshot, State, find_ranks

_PARTNERS = 16  # ranks considered for a trade at a time
#: First options: largest shard of a table that is split by columns, over the average load of a rank [-].
_SPLITS = (0.7, 0.35, 2.0)
_STAGES = 60
_HEATS = (3e-3, 0.1, 1e-3)  # first temperatures over the time, for one anneal after another; the last improves the best
_TRIALS = (3, 11)  # anneals before the last: few of large problems, more of small ones, which are done sooner
_TRIALS_WORK, _UNIT = 0.36, 2e-3  # share of the work for them, and work that one should have for every table
_DESCENT = 30  # steps from each start
_TOGETHER = 4  # tables that are placed again at a time
#: Work of the parts of a step, the clock of the search on every machine [s]; docs/formulas.md, table 8.2.
_STEP, _PAIR, _OPTION, _PLACE = 1.4e-4, 1.3e-7, 8e-5, 6e-5


def _construct(state: State, choice: np.ndarray, key: Array) -> None:
    """Place tables, the largest first, where they add least; where none has room, on the emptiest."""
    state.clear(choice)
    first = [t for t, option in enumerate(choice) if not state.options.parts[option] or t in state.pinned]
    rest = np.argsort(-key, kind="stable")
    for table in (*first, *rest[~np.isin(rest, first)].tolist()):
        found = find_ranks(state, choice[table])
        state.put(choice[table], found[1] if found else _roomiest(state, table, choice[table]))


def _roomiest(state: State, table: int, option: int) -> np.ndarray:
    """Ranks with the most memory left, where none has enough."""
    if table in state.pinned:
        return np.array([state.pinned[table]])
    free = state.capacity - state.loads[:, MEMORY]
    free[state.occupied[state.groups[table]].any(axis=0)] = -np.inf
    ranks = np.argsort(-free, kind="stable")[: state.options.parts[option]]
    return ranks[0] // state.node * state.node + np.arange(len(ranks)) if state.within[option] else ranks


def _starts(state: State, bases: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, Array]]:
    """Options and orders to place tables by, the most promising first: large whole tables are split by columns."""
    alone, kinds, load = state.starts[:-1], state.options.kind, state.load
    parts = np.where(state.options.parts, state.options.parts, state.ranks)[alone, None] * load[alone]
    average = parts.sum(axis=0) / state.ranks
    average = np.where(average > 0, average, np.inf)
    room = np.append(average[:-1], max(state.capacity, 1.0))
    seen = set()
    for number, key in enumerate(((parts / room).max(axis=1), parts[:, MEMORY], parts[:, :2].sum(axis=1))):
        for split in _SPLITS:
            for base in (*bases, alone):
                choice, fits = base.copy(), np.all(load <= split * average, axis=1)
                for table in np.flatnonzero((kinds[base] == "table_wise") & ~fits[base]):
                    own = np.arange(state.starts[table], state.starts[table + 1])
                    own = own[np.isin(kinds[own], ("table_wise", "column_wise"))]
                    choice[table] = own[np.argmax(fits[own])] if fits[own].any() else own[-1]
                if (name := (number, choice.tobytes())) not in seen:
                    seen.add(name)
                    yield choice, key


def search_plan(
    state: State, seconds: float, seed: int, steps: int | None, progress: Callable[[float, float], None] | None
) -> tuple[float, bool]:
    """Search for the placement with the least time; it and the work end up in the state.

    Returns a time that no placement can beat [s] and whether Ctrl-C ended the search. Work is counted and not timed, so
    that the same seed gives the same plan everywhere; of `steps`, trades weighed and tables placed count the same.

    A sixth of the work goes into starts: tables in the order of their largest load, seconds or memory, each
    where it adds least, with options from the bound's relaxation or whole tables, large ones split by columns. Then the
    best start is improved: a rank gives a shard away or trades it for another, or a table gets another option, at a
    temperature that falls. A power mean over ranks takes the place of the maximum and becomes it in the end. A gap to
    the bound of 1e-4 is good enough.
    """
    bound, bases = state.objective.bound(state.options, state.ranks)
    run = _Run(state, np.random.default_rng(seed), bound * (1 + 1e-4), steps is not None)
    seconds = steps * _STEP if steps else seconds
    try:
        heads = run.start(bases, seconds / 6)
        trials = int(np.clip(seconds / (_UNIT * (len(state.starts) - 1)), *_TRIALS))
        part = seconds * (_TRIALS_WORK if trials == _TRIALS[0] else 0.7) / trials
        for number in range(trials):
            run.anneal(heads[number % len(heads)], part, _HEATS[number % len(_HEATS)])
        run.anneal(state.best, seconds - state.work, _HEATS[-1], progress)
    except KeyboardInterrupt:
        if state.best.time == np.inf:
            raise
        return bound, True
    return bound, False


@dataclass(eq=False)
class _Run:
    """Improves a placement until it is as good as the goal."""

    state: State
    rng: np.random.Generator
    goal: float
    counted: bool

    def done(self) -> bool:
        """Whether the best placement is good enough."""
        return self.state.best.overflow == 0 and self.state.best.time <= self.goal

    def _spend(self, seconds: float, steps: int = 1) -> None:
        self.state.work += _STEP * steps if self.counted else seconds

    def start(self, bases: Sequence[np.ndarray], seconds: float) -> list[Snapshot]:
        """Try starts; returns the best few, best first."""
        state, found = self.state, []
        for choice, key in _starts(state, bases):
            _construct(state, choice, key)
            self._spend(_PLACE * len(choice) * (1 + state.ranks / 200), len(choice))
            state.best = state.snapshot(state.best)
            state.smooth(8)
            for _ in range(_DESCENT):
                if self._trade(1e-6 * state.best.time, full=True):
                    state.best = state.snapshot(state.best)
            found.append(state.snapshot())
            if state.work > seconds or self.done():
                break
        return sorted(found, key=lambda each: each[:2])[: len(_HEATS)]

    def anneal(
        self, start: Snapshot, seconds: float, hot: float, progress: Callable[[float, float], None] | None = None
    ) -> None:
        """Spend work on a placement."""
        state, begin, count = self.state, self.state.work, 0
        if self.done():
            return
        self._restore(start)
        for stage in range(_STAGES):
            heat, squarings, state.slack = _schedule(stage / _STAGES, hot)
            if state.slack == 1 and state.snapshot().overflow > state.best.overflow:
                self._restore(state.best)
            state.smooth(squarings)
            while state.work < begin + seconds * (stage + 1) / _STAGES:
                count += 1
                act = self._recreate if count % 18 == 0 else self._change if count % 3 == 0 else self._trade
                if act(heat * state.best.time, count % 2 == 1):
                    state.best = state.snapshot(state.best)
            if progress is not None:
                progress((stage + 1) / _STAGES, state.best.time)
            if self.done():
                break

    def _restore(self, snapshot: Snapshot) -> None:
        self.state.clear()
        for option in snapshot.choice.tolist():
            self.state.put(option, snapshot.rank[self.state.first[option] : self.state.first[option + 1]])

    def _draw(self, costs: Array, heat: float) -> int:
        """Draw one of several changes at a temperature."""
        summed = np.cumsum(np.exp(np.maximum((costs.min() - costs) / heat, -700.0)))
        return min(int(np.searchsorted(summed, self.rng.random() * summed[-1])), len(costs) - 1)

    def _trade(self, heat: float, full: bool) -> bool:
        """Let the fullest rank or any rank trade a shard; returns whether anything changed."""
        state, pressure = self.state, self.state.press()
        rank = int(np.argmax(pressure)) if full else int(self.rng.integers(state.ranks))
        if state.ranks - 1 <= _PARTNERS:
            partners = np.delete(np.arange(state.ranks), rank)
        else:
            light = np.argsort(pressure, kind="stable")[: _PARTNERS // 2]
            partners = np.unique(np.concatenate([light, self.rng.integers(0, state.ranks, _PARTNERS // 2)]))
            partners = partners[partners != rank]
        growth, mine, others = state.trades(rank, partners)
        self._spend(_STEP + _PAIR * growth.size)
        pick = self._draw(np.append(growth.ravel(), 0.0), heat)  # the last one leaves everything as it is
        if pick == growth.size:
            return False
        row, place = divmod(pick, growth.shape[1])
        other = int(others[place])
        state.move(int(mine[row]), -1 - other if other < 0 else int(state.rank[other]))
        if other >= 0:
            state.move(other, rank)
        return True

    def _pick(self, tables: np.ndarray, full: bool) -> int:
        """One of some tables, if possible one on the fullest rank."""
        if full:
            here = np.intersect1d(self.state.table[self.state.rank == np.argmax(self.state.press())], tables)
            tables = here if len(here) else tables
        return int(tables[self.rng.integers(len(tables))])

    def _place(self, table: int, heat: float) -> bool:
        """Place a table that is on no rank by one of its options; returns whether there was room."""
        options = range(self.state.starts[table], self.state.starts[table + 1])
        found = [find_ranks(self.state, option) for option in options]
        self._spend(_OPTION * (1 + len(found)))
        costs = np.array([each[0] if each else np.inf for each in found])
        if not np.isfinite(costs).any():
            return False
        pick = self._draw(costs, heat)
        self.state.put(options[pick], found[pick][1])  # type: ignore[index]
        return True

    def _change(self, heat: float, full: bool) -> bool:
        """Give a table another option, or the same one elsewhere."""
        several = np.setdiff1d(np.flatnonzero(np.diff(self.state.starts) > 1), list(self.state.pinned))
        if not len(several):
            return self._trade(heat, full)
        table = self._pick(several, self.rng.random() < 0.5)
        old = self.state.take(table)
        if not self._place(table, heat):
            self.state.put(*old)
        return True

    def _recreate(self, heat: float, full: bool) -> bool:
        """Take a few tables off and place them again in another order; keep that as chance at a temperature allows."""
        state, free = self.state, np.setdiff1d(np.arange(len(self.state.choice)), list(self.state.pinned))
        if not len(free):
            return self._trade(heat, full)
        before = float(state.press().sum())
        tables = dict.fromkeys(self._pick(free, number == 0) for number in range(_TOGETHER))
        old = {table: state.take(table) for table in tables}
        done = [table for table in self.rng.permutation(list(tables)).tolist() if self._place(table, heat)]
        worse = float(state.press().sum()) - before
        if self.rng.random() < np.exp(min(-worse / heat, 0.0)) and len(done) == len(tables):
            return True
        for table in done:
            state.take(table)
        for place in old.values():
            state.put(*place)
        return False


def _schedule(done: float, hot: float) -> tuple[float, int, float]:
    """Temperature relative to the time, how sharply the smooth time counts the fullest rank, and slack of memory."""
    if done < 0.1 or done > 0.85:  # a descent first, and one at the end
        return 1e-6, 8 if done < 0.1 else 11, 1.0
    part = (done - 0.1) / 0.75
    return hot * (3e-6 / hot) ** part, 4 + int(4 * part), 1.2 if part < 0.8 else 1.0
