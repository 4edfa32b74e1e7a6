"""Ranks whose kernels share their core with the collectives in flight, run event by event."""

import math
from collections.abc import Sequence

import numpy as np

from perfkit.prediction.programs import LAUNCH, MEET, RUN, WAIT, Program, Schedule
from perfkit.units import Array

__all__ = ["Flights", "dilate", "measure_overlap", "share_cores"]

#: Start and end of collectives [s].
Flights = Sequence[tuple[float, float]]

_MOST = 60  # iterations, unless the clocks repeat before


def measure_overlap(flights: Flights, starts: Array, ends: Array) -> Array:
    """Time of each interval in which at least one collective is in flight.

    Parameters
    ----------
    flights : sequence of (float, float)
        Start and end of collectives [s].
    starts, ends : array
        The intervals [s].

    Returns
    -------
    time : array
        At most their lengths [s].

    Examples
    --------
    >>> measure_overlap([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)], np.array([1.0]), np.array([6.0])).tolist()
    [3.0]
    """
    if not len(flights):
        return np.zeros(len(starts))
    edges, active = _count_active(flights)
    flown = np.concatenate([[0.0], np.cumsum(np.diff(edges) * (active[:-1] > 0))])
    return np.asarray(np.interp(ends, edges, flown) - np.interp(starts, edges, flown))


def _count_active(flights: Flights) -> tuple[Array, np.ndarray]:
    """Times at which collectives start or end, and how many are in flight from then on."""
    starts, ends = (np.sort(times) for times in np.array(flights).T)
    edges = np.unique(np.concatenate([starts, ends]))
    return edges, np.searchsorted(starts, edges, side="right") - np.searchsorted(ends, edges, side="right")


def dilate(clock: float, work: Array, flights: Flights | Array, contention: float) -> Array:
    """When pieces of work are done that start one after another and slow down while collectives are in flight.

    Parameters
    ----------
    clock : float
        When the first starts [s].
    work : array
        Work from there to the end of each piece, in rising order [s].
    flights : sequence of (float, float)
        Start and end of collectives [s].
    contention : float
        Share of its time that each collective takes from the work, all of it at most [-].

    Returns
    -------
    ends : array
        When each is done [s].

    Examples
    --------
    >>> dilate(0.0, np.array([1.0, 2.0]), [(0.5, 1.5)], 0.5).tolist()
    [1.5, 2.5]
    """
    near = [(max(start, clock), end) for start, end in flights if end > clock]
    if not near:
        return np.asarray(clock + work)
    edges, active = _count_active([(clock, clock), *near])
    rates = np.maximum(1.0 - contention * active, 0.0)
    done = np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(edges))])
    piece = np.maximum(np.searchsorted(done, work, side="left") - 1, 0)  # what ends with a pause does not wait for it
    left = work - done[piece]
    return np.asarray(edges[piece] + np.divide(left, rates[piece], out=np.zeros_like(left), where=left > 0))


def _finish(clock: float, work: float, flights: Flights, contention: float) -> float:
    """The same for one piece of work."""
    while work > 0 and flights:
        rate = max(1.0 - contention * sum(start <= clock < end for start, end in flights), 0.0)
        change = min((edge for flight in flights for edge in flight if edge > clock), default=math.inf)
        if work <= rate * (change - clock):
            return clock + work / rate
        work, clock = work - rate * (change - clock), change
    return clock + work


class _Cores:
    """Clocks of all ranks, and the collectives in flight beside each."""

    def __init__(self, programs: Sequence[Program], schedule: Schedule, contention: float) -> None:
        self.programs, self.schedule, self.contention = programs, schedule, contention
        self.clocks = [0.0] * len(programs)

    def iterate(self) -> tuple[list[tuple[int, int, int]], list[tuple[float, float]], list[list[tuple[float, float]]]]:
        """Run one iteration of all ranks; returns its steps, their times as `simulation` has them, and the flights."""
        programs, plan = self.programs, self.schedule
        self.steps: list[tuple[int, int, int]] = []
        self.log: list[tuple[float, float]] = []
        self.flights: list[list[tuple[float, float]]] = [[] for _ in programs]
        self.near: list[list[tuple[float, float]]] = [[] for _ in programs]  # those that are not over
        self.ends: dict[int, float] = {}
        self.free: dict[int, float] = {}
        self.missing, reached = [len(ranks) for ranks in plan.members], [0] * len(programs)
        due = [self.find_due(rank, 0) for rank in range(len(programs))]
        while (now := min(due)) < math.inf:
            rank = due.index(now)
            changed = self.take(rank, reached[rank], now)
            reached[rank] += 1
            for other in {rank, *changed}:
                due[other] = self.find_due(other, reached[other])
        return self.steps, self.log, self.flights

    def find_due(self, rank: int, step: int) -> float:
        """When the next step of a rank is done, as far as it is known."""
        program, clock = self.programs[rank], self.clocks[rank]
        if step == len(program.steps):
            return math.inf
        code, part = program.steps[step]
        if code == WAIT:
            return max(clock, self.ends.get(self.schedule.meetings[rank][program.waits[part][1]], math.inf))
        work = program.runs[part][0] if code == RUN else float(program.first[program.times.collectives[part]])
        self.near[rank] = [flight for flight in self.near[rank] if flight[1] > clock]
        return _finish(clock, work, self.near[rank], self.contention)

    def take(self, rank: int, step: int, now: float) -> Sequence[int]:
        """Take a step that is done now; returns the ranks for which that changes something."""
        code, part = self.programs[rank].steps[step]
        self.steps.append((code, rank, part))
        before, self.clocks[rank] = self.clocks[rank], now
        self.log.append((now, now) if code == LAUNCH else (before, now if code == RUN else before))
        if code != LAUNCH:
            return ()
        meeting = self.schedule.meetings[rank][part]
        self.missing[meeting] -= 1
        if self.missing[meeting]:
            return ()
        key = self.schedule.keys[meeting]
        start = max(now, self.free.get(key, -math.inf))
        self.ends[meeting] = self.free[key] = end = start + self.schedule.durations[meeting]
        self.steps.append((MEET, rank, meeting))
        self.log.append((start, end))
        for other in self.schedule.members[meeting]:
            self.flights[other].append((start, end))
            self.near[other].append((start, end))
        return self.schedule.members[meeting]


def share_cores(
    programs: Sequence[Program], schedule: Schedule, contention: float
) -> tuple[float, float, tuple[Sequence[tuple[int, int, int]], Sequence[tuple[float, float]], Sequence[Flights]]]:
    """Run iterations in the order of time until the clocks repeat.

    Parameters
    ----------
    programs : sequence of Program
        What every rank executes, on its host.
    schedule : Schedule
        Which collectives meet.
    contention : float
        Share of its time that each collective in flight takes from the work beside it [-].

    Returns
    -------
    period, latency : float
        Time from one iteration to the next, and of the first from a common start [s].
    found : tuple
        Steps of the last iteration, their times, and the collectives in flight on every rank.
    """
    cores, seen = _Cores(programs, schedule, contention), [np.zeros(len(programs))]
    period = 0.0
    while len(seen) <= _MOST:
        found = cores.iterate()
        now = np.array(cores.clocks)
        for back, before in enumerate(reversed(seen), 1):
            steps = now - before
            if np.ptp(steps) <= 1e-12 * now.max():
                return float(steps.max()) / back, float(max(seen[1] if len(seen) > 1 else now)), found
        seen.append(now)
        middle = (len(seen) - 1) // 2
        period = float((now - seen[middle]).max()) / (len(seen) - 1 - middle)
    return period, float(seen[1].max()), found
