"""The search: greedy orders and ways to split to start from, then trades between ranks, annealed on the iteration."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from perfkit.sharding.board import NODE_KINDS, Board, Rules, Snapshot
from perfkit.sharding.objective import Objective
from perfkit.sharding.options import Option
from perfkit.units import Array

__all__ = ["Found", "construct", "search_plan"]

_PARTNERS = 16  # ranks that a rank considers trades with at a time
#: Largest shard of a table that is split by columns, relative to what the average rank carries: the ways to start.
_SPLITS = (0.7, 0.35, 2.0, 0.2, 100.0)
_STAGES = 60
_HEATS = (3e-3, 0.1, 1e-3)  # first temperatures relative to the time, in turn; the last one improves the best of all
_TRIALS = (3, 11)  # anneals before the last: few of large problems, more of small ones, which are done sooner
_TRIALS_WORK, _UNIT = 0.36, 2e-3  # part of the work for them, and work that one should have for every table
_DESCENT = 30  # steps from each start
_TOGETHER = 4  # tables that are placed again at a time
#: Work of a step in seconds of one core of an AMD Zen 5 (2026-11): the clock of the search, the same on every machine.
_STEP, _PAIR, _OPTION, _PLACE = 1.4e-4, 1.3e-7, 8e-5, 6e-5


@dataclass(frozen=True)
class Found:
    """What a search found.

    Parameters
    ----------
    best : Snapshot
        The best placement.
    bound : float
        Time that no placement can beat [s].
    work : float
        Work spent, in seconds of the machine that steps were timed on; all of them alike where they are counted [s].
    overflow : float
        Bytes by which the fullest rank exceeds its memory [B].
    interrupted : bool
        Whether Ctrl-C ended it early.
    """

    best: Snapshot
    bound: float
    work: float
    overflow: float
    interrupted: bool


def construct(board: Board, choice: Sequence[int], key: Array) -> None:
    """Place tables one after the other where they add least, those with the largest key first.

    What finds no room lies where most is left.

    Parameters
    ----------
    board : Board
        Cleared first.
    choice : sequence of int
        Option of each table.
    key : array
        One number for each table [-].
    """
    board.expect(choice)
    first = [t for t, o in enumerate(choice) if not len(board.items[t, o]) or t in board.rules.pinned]
    rest = np.argsort(-key, kind="stable")
    for table in (*first, *rest[~np.isin(rest, first)].tolist()):
        found = board.best_ranks(table, choice[table])
        board.put(table, choice[table], found[1] if found else _roomiest(board, table, choice[table]))


def _roomiest(board: Board, table: int, option: int) -> np.ndarray:
    """Ranks with the most memory left, where none has enough."""
    if table in board.rules.pinned:
        return np.array([board.rules.pinned[table]])
    free = board.rules.capacity - board.loads[:, -1]
    free[board.occupied[board.groups[table]].any(axis=0)] = -np.inf
    ranks = np.argsort(-free, kind="stable")[: len(board.items[table, option])]
    if board.options[table][option].kind in NODE_KINDS:
        ranks = int(ranks[0]) // board.rules.node * board.rules.node + np.arange(len(ranks))
    return ranks


def _split(board: Board, base: Sequence[int], limit: Array) -> list[int]:
    """Options in which no whole table is larger than a limit, as far as splitting by columns helps."""
    out = []
    for table, pick in enumerate(base):
        own = board.options[table]
        if own[pick].kind == "table_wise" and (board.load[board.items[table, pick]] > limit).any():
            for option, chosen in enumerate(own):
                if chosen.kind in ("table_wise", "column_wise"):
                    pick = option
                    if (board.load[board.items[table, option]] <= limit).all():
                        break
        out.append(pick)
    return out


def _starts(board: Board, bases: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Array]]:
    """Options and orders to place tables by, the most promising first."""
    alone = [0] * len(board.options)
    average = np.sum([board.load[board.items[t, 0]].sum(axis=0) + board.everywhere[t, 0] * board.rules.ranks
                      for t in range(len(alone))], axis=0) / board.rules.ranks  # fmt: skip
    average = np.where(average > 0, average, np.inf)
    room = np.append(average[:-1], max(board.rules.capacity, 1.0))
    largest = np.array([(board.load[board.items[t, 0]].sum(axis=0) / room)[:].max() for t in range(len(alone))])
    memory = np.array([board.load[board.items[t, 0]].sum(axis=0)[-1] for t in range(len(alone))])
    seconds = np.array([board.load[board.items[t, 0]].sum(axis=0)[:2].sum() for t in range(len(alone))])
    seen = set()
    for key in (largest, seconds, memory):
        for split in _SPLITS:
            for base in (*bases, alone):
                choice = _split(board, base, np.where(np.isfinite(average), split * average, np.inf))
                name = (tuple(choice), id(key))
                if name not in seen:
                    seen.add(name)
                    yield choice, key


def search_plan(
    objective: Objective,
    options: Sequence[Sequence[Option]],
    rules: Rules,
    *,
    seconds: float,
    seed: int,
    steps: int | None = None,
    progress: Callable[[float, float], None] | None = None,
) -> Found:
    """Search for the placement with the least time.

    Parameters
    ----------
    objective : Objective
        What is to become small.
    options : sequence of sequence of Option
        Ways to place each table.
    rules : Rules
        What to keep.
    seconds : float
        Work to spend [s].
    seed : int
        Seed; work is counted and not timed, so that the same seed gives the same plan everywhere [-].
    steps : int, optional
        Steps to take in place of seconds: trades weighed and tables placed, each counting the same [-].
    progress : callable, optional
        Gets the part of the work that is done and the best time so far [s].

    Returns
    -------
    found : Found
        Placement and bound.

    Notes
    -----
    A third of the work at most goes into starts: tables in the order of their largest load, seconds or memory, each
    where it adds least, with options from the bound's relaxation or whole tables, large ones split by columns. Then the
    best start is improved: a rank gives a shard away or trades it for another, or a table is placed another way, at a
    temperature that falls. The time is stood in for by a power mean over ranks that becomes the maximum in the end. A
    gap to the bound of 1e-4 is good enough.
    """
    bound, bases = objective.bound(options, rules.ranks)
    rng, seconds, counted = np.random.default_rng(seed), steps * _STEP if steps else seconds, steps is not None
    run = _Annealing(Board(objective, options, rules), rng, bound * (1 + 1e-4), counted=counted)
    try:
        heads = run.start(bases, seconds / 4)
        trials = int(np.clip(seconds / (_UNIT * len(options)), *_TRIALS))
        part = seconds * (_TRIALS_WORK if trials == _TRIALS[0] else 0.7) / trials
        for number in range(trials):
            run.anneal(heads[number % len(heads)], part, _HEATS[number % len(_HEATS)], None)
        run.anneal(run.best, seconds - run.work, _HEATS[-1], progress)
    except KeyboardInterrupt:
        if not hasattr(run, "best"):
            raise
        run.interrupted = True
    return Found(run.best, bound, run.work, run.overflow, run.interrupted)


class _Annealing:
    """A placement that is being improved, and the best one so far."""

    best: Snapshot

    def __init__(self, board: Board, rng: np.random.Generator, goal: float, *, counted: bool) -> None:
        self.board, self.rng, self.goal, self.counted = board, rng, goal, counted
        self.free = np.array([t for t in range(len(board.options)) if t not in board.rules.pinned], dtype=int)
        self.several = self.free[[len(board.options[t]) > 1 for t in self.free]]
        self.work, self.overflow, self.interrupted = 0.0, np.inf, False

    def done(self) -> bool:
        """Whether the best placement is good enough."""
        return self.overflow == 0 and self.best.time <= self.goal

    def _spend(self, seconds: float, steps: int = 1) -> None:
        self.work += _STEP * steps if self.counted else seconds

    def start(self, bases: Sequence[Sequence[int]], seconds: float) -> list[Snapshot]:
        """Try ways to start; returns the best few, best first."""
        found: list[tuple[float, Snapshot]] = []
        for choice, key in _starts(self.board, bases):
            construct(self.board, choice, key)
            self._spend(_PLACE * len(choice) * (1 + self.board.rules.ranks / 200), len(choice))
            self._keep(first=not found)
            self.board.smooth(8)
            for _ in range(_DESCENT):
                if self._trade_full(1e-6 * self.best.time):
                    self._keep()
            found.append((self.board.overflow, self.board.snapshot()))
            if self.work > seconds or self.done():
                break
        found.sort(key=lambda each: (each[0], each[1].time))
        return [snapshot for _, snapshot in found[: len(_HEATS)]]

    def anneal(
        self, start: Snapshot, seconds: float, hot: float, progress: Callable[[float, float], None] | None
    ) -> None:
        """Spend work on a placement."""
        if self.done():  # nothing to do
            return
        self.board.restore(start)
        begin, count = self.work, 0
        for stage in range(_STAGES):
            heat, squarings, self.board.slack = _schedule(stage / _STAGES, hot)
            if self.board.slack == 1 and self.board.overflow > self.overflow:
                self.board.restore(self.best)
            self.board.smooth(squarings)
            while self.work < begin + seconds * (stage + 1) / _STAGES:
                count += 1
                act = self._trade_full if count % 2 else self._trade_any
                if count % 6 == 0 and len(self.several):
                    act = self._change_option
                if count % 18 == 0 and len(self.free):
                    act = self._recreate
                if act(heat * self.best.time):
                    self._keep()
            if progress is not None:
                progress((stage + 1) / _STAGES, self.best.time)
            if self.done():
                break

    def _keep(self, *, first: bool = False) -> None:
        over = self.board.overflow
        if (
            first
            or over < self.overflow
            or (over == self.overflow and self.board.time() < self.best.time * (1 - 1e-12))
        ):
            self.best, self.overflow = self.board.snapshot(), over

    def _draw(self, costs: Array, heat: float) -> int:
        """Pick one of several changes as chance at a temperature has it."""
        summed = np.cumsum(np.exp(np.maximum((costs.min() - costs) / heat, -700.0)))
        return min(int(np.searchsorted(summed, self.rng.random() * summed[-1])), len(costs) - 1)

    def _trade_full(self, heat: float) -> bool:
        """Let the fullest rank trade a shard; returns whether anything changed."""
        pressure = self.board.pressure()
        return self._trade(int(np.argmax(pressure)), pressure, heat)

    def _trade_any(self, heat: float) -> bool:
        """Let a rank by chance trade a shard."""
        return self._trade(int(self.rng.integers(self.board.rules.ranks)), self.board.pressure(), heat)

    def _trade(self, rank: int, pressure: Array, heat: float) -> bool:
        board, ranks = self.board, len(pressure)
        if ranks - 1 <= _PARTNERS:
            partners = np.delete(np.arange(ranks), rank)
        else:
            light = np.argsort(pressure, kind="stable")[: _PARTNERS // 2]
            partners = np.unique(np.concatenate([light, self.rng.integers(0, ranks, _PARTNERS // 2)]))
            partners = partners[partners != rank]
        growth, mine, others = board.trades(rank, partners)
        self._spend(_STEP + _PAIR * growth.size)
        pick = self._draw(np.append(growth.ravel(), 0.0), heat)  # the last one leaves everything as it is
        if pick < growth.size:
            row, place = divmod(pick, growth.shape[1])
            board.swap(int(mine[row]), int(others[place]))
        return pick < growth.size

    def _pick(self, tables: np.ndarray, *, full: bool) -> int:
        """One of some tables, if possible one that lies on the fullest rank."""
        if full:
            here = np.unique(self.board.table[self.board.rank == int(np.argmax(self.board.pressure()))])
            here = here[np.isin(here, tables)]
            if len(here):
                return int(here[self.rng.integers(len(here))])
        return int(tables[self.rng.integers(len(tables))])

    def _place(self, table: int, heat: float) -> bool:
        """Place a table that is on no rank in one of its ways; returns whether there was room."""
        found = [self.board.best_ranks(table, option) for option in range(len(self.board.options[table]))]
        self._spend(_OPTION * (1 + len(found)))
        costs = np.array([each[0] if each else np.inf for each in found])
        if not np.isfinite(costs).any():
            return False
        option = self._draw(costs, heat)
        self.board.put(table, option, found[option][1])  # type: ignore[index]
        return True

    def _change_option(self, heat: float) -> bool:
        """Place a table another way, or the same way elsewhere."""
        table = self._pick(self.several, full=self.rng.random() < 0.5)
        old = self.board.take(table)
        if not self._place(table, heat):
            self.board.put(table, *old)
        return True

    def _recreate(self, heat: float) -> bool:
        """Take a few tables off and place them again in another order; keep that as chance at a temperature has it."""
        board, before = self.board, float(self.board.pressure().sum())
        tables = dict.fromkeys(self._pick(self.free, full=number == 0) for number in range(_TOGETHER))
        old = {table: board.take(table) for table in tables}
        order = self.rng.permutation(list(tables)).tolist()
        done = [table for table in order if self._place(table, heat)]
        worse = float(board.pressure().sum()) - before
        if self.rng.random() < np.exp(min(-worse / heat, 0.0)) and len(done) == len(order):
            return True
        for table in done:
            board.take(table)
        for table, place in old.items():
            board.put(table, *place)
        return False


def _schedule(done: float, hot: float) -> tuple[float, int, float]:
    """Temperature relative to the time, how sharply the smooth time counts the fullest rank, and slack of memory."""
    if done < 0.1 or done > 0.85:  # a descent first, and one at the end
        return 1e-6, 8 if done < 0.1 else 11, 1.0
    part = (done - 0.1) / 0.75
    return hot * (3e-6 / hot) ** part, 4 + int(4 * part), 1.2 if part < 0.8 else 1.0
