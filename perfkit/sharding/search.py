"""Search for the placement with the shortest time: greedy starts, then simulated annealing of
shards and units of tables."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from perfkit.ground.units import Array
from perfkit.sharding.starts import Start, construct, list_starts
from perfkit.sharding.state import Assignment, State

#: Most ranks that a rank may move a shard to, or exchange shards with, in one step [-].
_MOST_PARTNERS = 16
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
#: The part of the work for starts, and in a small problem: one of so many [-].
_PARTS_OF_WORK, _FEWER_PARTS_OF_WORK = 6, 3
#: Steps from each start, stages of an anneal, and units that are placed again at a time [-].
_DESCENT_STEPS, _STAGES, _UNITS_AT_A_TIME = 30, 60, 4
#: A search ends where the incumbent is so close to the bound, relative to it [-].
_CLOSE = 1e-4
#: Work of a step, a pair of shards that may be exchanged, a candidate, and a unit that is placed
#: [s]; docs/formulas.md, table 8.2.
_STEP, _PAIR, _CANDIDATE, _PLACE = 1.4e-4, 1.3e-7, 8e-5, 6e-5
#: Work of the first round of a small problem, and of each further one, over that of the one before
#: [s, -]; docs/formulas.md, table 8.2.
_FIRST_ROUND, _GROWTH_OF_ROUNDS = 1 / 31, 2
#: Called with the share of the work that is done [-] and the best time so far [s].
Progress: TypeAlias = Callable[[float, float], None]


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
    seconds : float
        Work that the search may take [s].
    progress : callable
        What is told of the search, see `Progress`.
    work : float
        Work so far. It is counted and not measured, so that the same seed gives the same plan on
        every machine [s].
    interrupted : bool
        Whether Ctrl-C ended the search.
    improvements : list of Assignment
        All incumbents so far, the best last; of a small problem alone.
    tried : list of Assignment
        What became of the starts so far.
    incumbent_of_half : Assignment or None
        The incumbent after half of the work; None if there was none.
    """

    state: State
    rng: np.random.Generator
    bound: float
    steps: int | None
    incumbent: Assignment
    seconds: float
    progress: Progress
    work: float = 0.0
    interrupted: bool = False
    improvements: list[Assignment] = field(default_factory=list)
    tried: list[Assignment] = field(default_factory=list)
    incumbent_of_half: Assignment | None = None

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
        better = self.state.better_of(self.incumbent)
        if better is not self.incumbent:
            self.incumbent = better
            if self.work <= self.seconds / 2:
                self.incumbent_of_half = better
            if self.is_small:
                self.improvements.append(better)

    def _report(self) -> None:
        """Tell how far the search is, once a plan fits."""
        if self.incumbent.overflow == 0:
            self.progress(min(self.work / self.seconds, 1.0), self.incumbent.time)

    @property
    def has_stalled(self) -> bool:
        """Whether the second half of the search of a small problem found nothing better, in time
        enough for its anneals. Of other problems that tells little: they are not searched in rounds."""
        half = self.incumbent_of_half
        enough = max(_FIRST_ROUND, _FEWEST_ANNEALS * _WORK_OF_UNIT * len(self.state.conflicts))
        if not self.is_small or half is None:
            return False
        if self.interrupted or self.seconds < enough:
            return False
        is_no_faster = self.incumbent.time >= half.time * (1 - _CLOSE)
        return self.incumbent.overflow == half.overflow and is_no_faster

    @property
    def is_small(self) -> bool:
        """Whether there are few units."""
        return self.state.is_small

    def has_ended(self) -> bool:
        """Whether all work is done, or the incumbent is close to the bound."""
        return self.work >= self.seconds or self.is_done()

    def try_starts(
        self, untried: Iterator[Start], placed: Sequence[Assignment], seconds: float
    ) -> list[Assignment]:
        """Try further starts for an amount of work; returns the best few of all, the best first.

        The best of the `placed` assignments is the incumbent if no start is better; the last anneal
        improves it.
        """
        state = self.state
        work_before = self.work
        for start in untried:
            construct(state, start)
            units = len(start.chosen)
            self._count_work(_PLACE * units * (1 + state.ranks / 200), units)
            self._update_incumbent()
            state.set_smooth_time(8)
            for _ in range(_DESCENT_STEPS):
                if self._move_shard(_COLD * self.incumbent.time, from_fullest=True):
                    self._update_incumbent()
                elif self.is_small:  # no move helps
                    break
            self._settle_nodes()
            self.tried.append(state.copy_assignment())
            self._report()
            if self.work - work_before > seconds or self.has_ended():
                break
        self.tried.sort(key=lambda start: start.objective)
        if placed:
            best_placed = min(placed, key=lambda assignment: assignment.objective)
            if best_placed.objective < self.incumbent.objective:
                state.restore(best_placed)
                self._update_incumbent()
        return self.tried[: len(_TEMPERATURES)]

    def _settle_nodes(self) -> None:
        """Give units to the best nodes, in a small problem."""
        if not self.is_small:
            return
        ways = self.state.settle_nodes()
        if ways:
            seconds = _PAIR * self.state.ranks * ways
            self._count_work(seconds, math.ceil(seconds / _STEP))
            self._update_incumbent()

    def anneal(
        self,
        start: Assignment,
        seconds: float,
        first_temperature: float,
    ) -> None:
        """Improve an assignment at a falling temperature, with an amount of work [s]."""
        state = self.state
        work_before = self.work
        step = 0
        state.restore(start)
        for number in range(_STAGES):
            if self.has_ended():
                break
            stage = _plan_stage(number / _STAGES, first_temperature)
            state.memory_slack = stage.memory_slack
            if stage.memory_slack == 1:
                current = state.copy_assignment()
                if current.overflow > self.incumbent.overflow:
                    state.restore(self.incumbent)
            state.set_smooth_time(stage.squarings)
            end_of_stage = work_before + seconds * (number + 1) / _STAGES
            end_of_stage = min(end_of_stage, self.seconds)
            while self.work < end_of_stage:
                step += 1
                if self._take_step(step, stage.temperature * self.incumbent.time):
                    self._update_incumbent()
            self._report()

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

    Small problems are searched so in rounds, each with twice the work of the one before, until all
    work is done. So a search with more work begins as one with less, and finds nothing slower.
    """
    nothing = Assignment(np.inf, np.inf, state.chosen, state.shard_ranks)
    if steps:
        seconds = steps * _STEP
    rng = np.random.default_rng(seed)
    search = Search(state, rng, bound, steps, nothing, seconds, progress)
    try:
        untried = list_starts(state, bases)
        seconds_of_round = _FIRST_ROUND if search.is_small else seconds
        _search_once(search, untried, placed, seconds_of_round)
        while search.is_small and not search.has_ended():
            seconds_of_round *= _GROWTH_OF_ROUNDS
            _search_once(search, untried, placed, seconds_of_round)
        if search.incumbent.overflow == 0:
            progress(1.0, search.incumbent.time)
    except KeyboardInterrupt:
        if search.incumbent.time == np.inf:
            raise
        search.interrupted = True
    return search


def _search_once(
    search: Search, untried: Iterator[Start], placed: Sequence[Assignment], seconds: float
) -> None:
    """Try starts and improve the best of them, with so much work unless the search ends before
    [s]."""
    end = search.work + seconds
    parts = _FEWER_PARTS_OF_WORK if search.is_small else _PARTS_OF_WORK
    starts = search.try_starts(untried, placed, seconds / parts)
    wanted = seconds / (_WORK_OF_UNIT * len(search.state.conflicts))
    anneals = int(np.clip(wanted, _FEWEST_ANNEALS, _MOST_ANNEALS))
    share = _SHARE_OF_MORE_ANNEALS
    if anneals == _FEWEST_ANNEALS:
        share = _SHARE_OF_FEW_ANNEALS
    seconds_of_anneal = seconds * share / anneals
    for number in range(anneals):
        start = starts[number % len(starts)]
        temperature = _TEMPERATURES[number % len(_TEMPERATURES)]
        search.anneal(start, seconds_of_anneal, temperature)
    search.anneal(search.incumbent, end - search.work, _TEMPERATURES[-1])
    if not search.has_ended():
        search.state.restore(search.incumbent)
        search._settle_nodes()
