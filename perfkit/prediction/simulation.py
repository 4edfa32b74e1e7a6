"""From operation times to a timeline: host clocks and streams of all ranks, and the collectives at which they meet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfkit.prediction.programs import (
    LAUNCH,
    MEET,
    RUN,
    SYNC,
    WAIT,
    Host,
    Program,
    RankTimes,
    Schedule,
    arrange,
)
from perfkit.prediction.sharing import Flights, dilate, measure_overlap, share_cores
from perfkit.units import Array

__all__ = ["Timeline", "find_period", "simulate"]

#: Iterations run until the pattern repeats, and the longest pattern looked for: one of 1, 2, 3, 4, 6 or 12 [-].
_SETTLING, _PATTERN = 40, 12


@dataclass(frozen=True)
class Timeline:
    """One iteration of the steady state, and the two iteration times; arrays are per rank and operation.

    Parameters
    ----------
    period : float
        Time from one iteration to the next once the pattern repeats [s].
    latency : float
        Time of a first iteration from a common start [s].
    starts, ends : tuple of array
        Of every operation, relative to the earliest start of the iteration [s].
    issued : tuple of array
        When the host has launched each operation, or has got to it where it runs on the host [s].
    waits : tuple of array
        How long each collective waited for other ranks; zero for other operations [s].
    stalls : tuple of array
        How long the compute stream stands still before each operation because a collective has not ended, from when
        this rank was ready for it; one more for the end of the iteration [s].
    exposed : tuple of array
        Part of the stalls in which a collective of the rank is in flight; in the rest it waits for others [s].
    stolen : tuple of array
        What collectives in flight take from each operation on the same core [s].
    device : bool
        Whether kernels run on a device of their own, behind the host.
    """

    period: float
    latency: float
    starts: tuple[Array, ...]
    ends: tuple[Array, ...]
    issued: tuple[Array, ...]
    waits: tuple[Array, ...]
    stalls: tuple[Array, ...]
    exposed: tuple[Array, ...]
    stolen: tuple[Array, ...]
    device: bool = False


def simulate(ranks: Sequence[RankTimes], durations: Array | Sequence[Array], host: Host) -> Timeline:
    r"""Run all ranks on their clocks, and find the time from one iteration to the next in the long run.

    Parameters
    ----------
    ranks : sequence of RankTimes
        What each rank executes; the same object twice costs no more than once.
    durations : array or sequence of array
        Time of each collective in program order, the same for all ranks or one array a rank; the longest counts [s].
    host : Host
        Host overheads.

    Returns
    -------
    timeline : Timeline
        Period, latency and the operations of an iteration of the steady state.

    Raises
    ------
    ValueError
        For waits that come before their collective, and for ranks whose collectives do not match.

    Notes
    -----
    A collective is ready on a rank when its host has launched it and its compute stream has done what was launched
    before. It starts when the last rank of its communicator is ready and the collective before it there has ended, and
    it ends on all ranks together. Kernels on a device start when the one before has ended, the host has launched them
    and the collectives they wait for have ended; kernels of a CPU run on the host clock itself.

    All of this is sums and maxima, so that an iteration is a matrix that takes the clocks at its start to those at its
    end, and the period is its largest cycle mean [1]_:

    .. math:: \lambda = \max_i \min_{0 \le k < n} \frac{x_i(n) - x_i(k)}{n - k}, \quad
       x_i(k) = \max_j \left( A_{ij} + x_j(k-1) \right), \quad x(0) = 0

    Only kernels that share a core with collectives in flight are run event by event, until the clocks repeat.

    References
    ----------
    .. [1] R. M. Karp, "A characterization of the minimum cycle mean in a digraph", Discrete Mathematics 23 (1978),
       theorem 1, doi:10.1016/0012-365X(78)90011-0

    Examples
    --------
    >>> one = RankTimes(np.array([2.0, 0.0, 1.0]), np.zeros(3), np.array([1]))
    >>> other = RankTimes(np.array([5.0, 0.0, 1.0]), np.zeros(3), np.array([1]))
    >>> timeline = simulate([one, other], np.array([0.5]), Host())
    >>> timeline.period, float(timeline.waits[0][1])
    (6.5, 3.0)
    """
    programs, schedule, number = _compile(ranks, durations, host)
    found: _Found
    if _shares_cores(programs, host):
        period, latency, found = share_cores(programs, schedule, host.contention)
    else:
        period, latency, found = _settle(programs, schedule, host)
    views = _measure(programs, schedule, found, host)
    columns: dict[str, Any] = {key: tuple(view[number[id(rank)]] for rank in ranks) for key, view in views.items()}
    return Timeline(period, latency, **columns, device=host.asynchronous)


def find_period(ranks: Sequence[RankTimes], durations: Array | Sequence[Array], host: Host) -> float:
    """Time from one iteration to the next in the long run, without the timeline.

    Parameters
    ----------
    ranks : sequence of RankTimes
        What each rank executes.
    durations : array or sequence of array
        Time of each collective, see `simulate` [s].
    host : Host
        Host overheads.

    Returns
    -------
    period : float
        As `simulate` has it [s].
    """
    programs, schedule, _ = _compile(ranks, durations, host)
    if _shares_cores(programs, host):
        return share_cores(programs, schedule, host.contention)[0]
    matrix = _make_matrix(programs, schedule, host)[0]
    return _find_cycle_mean(_iterate(matrix, len(matrix)))


def _compile(
    ranks: Sequence[RankTimes], durations: Array | Sequence[Array], host: Host
) -> tuple[list[Program], Schedule, dict[int, int]]:
    """Programs of ranks that are not the same object, their order, and the number of each object."""
    distinct = list({id(rank): rank for rank in ranks}.values())
    number = {id(rank): i for i, rank in enumerate(distinct)}
    times = [durations] * len(ranks) if isinstance(durations, np.ndarray) else list(durations)
    own = [np.max([t for t, r in zip(times, ranks, strict=True) if r is rank], axis=0) for rank in distinct]
    programs = [Program.compile(rank, host) for rank in distinct]
    return programs, arrange(programs, own), number


def _shares_cores(programs: Sequence[Program], host: Host) -> bool:
    return host.contention > 0 and not host.asynchronous and any(program.overlaps for program in programs)


#: The steps of an iteration, two times for each, and the collectives in flight beside every rank that shares its core.
_Found = tuple[Sequence[tuple[int, int, int]], Sequence[tuple[Any, Any]], Sequence[Flights] | None]


def _advance(
    programs: Sequence[Program], schedule: Schedule, clock: list[Array], front: list[Array], host: Host
) -> list[tuple[Array, Array]]:
    """Run one iteration from clocks, which it moves on; returns a pair of times for every step.

    Before a run: clock and front; of a launch: clock and when the rank is ready; of a meeting: start and end; before a
    wait: where the compute stream stands, twice.
    """
    log: list[tuple[Array, Array]] = []
    ready: dict[int, Array] = {}
    free: dict[int, Array] = {}
    ends: dict[int, Array] = {}
    for code, rank, part in schedule.steps:
        if code == RUN:
            log.append((clock[rank], front[rank]))
            issue, done, reach = programs[rank].runs[part]
            front[rank] = np.maximum(front[rank] + done, clock[rank] + reach)
            clock[rank] = clock[rank] + issue
        elif code == LAUNCH:
            clock[rank] = clock[rank] + programs[rank].first[programs[rank].times.collectives[part]]
            own, meeting = np.maximum(clock[rank], front[rank]), schedule.meetings[rank][part]
            log.append((clock[rank], own))
            ready[meeting] = np.maximum(ready[meeting], own) if meeting in ready else own
        elif code == MEET:
            key, start = schedule.keys[part], ready[part]
            start = np.maximum(start, free[key]) if key in free else start
            ends[part] = free[key] = start + schedule.durations[part]
            log.append((start, ends[part]))
        elif code == WAIT:
            end = ends[schedule.meetings[rank][programs[rank].waits[part][1]]]
            before = front[rank] if host.asynchronous else clock[rank]
            log.append((before, before))
            front[rank] = np.maximum(front[rank], end)
            clock[rank] = clock[rank] if host.asynchronous else np.maximum(clock[rank], end)
        elif code == SYNC:
            log.append((clock[rank], front[rank]))
            clock[rank] = np.maximum(clock[rank], front[rank])
    return log


def _settle(programs: Sequence[Program], schedule: Schedule, host: Host) -> tuple[float, float, _Found]:
    """Period, latency, and the steps of an iteration of the steady state with their times."""
    matrix, latency = _make_matrix(programs, schedule, host)
    size, count = len(matrix), len(programs)
    states = size // count
    history = _iterate(matrix, max(size, _SETTLING + _PATTERN))
    late = history.reshape(len(history), states, count).max(axis=1)
    pace = (late[-1] - late[-1 - _PATTERN]) / _PATTERN  # of every rank: some may have nobody to meet
    rest = history - np.arange(len(history))[:, None] * np.tile(pace, states)
    begin = rest[-_PATTERN:].max(axis=0)
    clock = list(begin[:count])
    front = list(begin[count:]) if host.asynchronous else [np.asarray(-np.inf)] * count
    log = _advance(programs, schedule, clock, front, host)
    return _find_cycle_mean(history[: size + 1]), latency, (schedule.steps, log, None)


def _make_matrix(programs: Sequence[Program], schedule: Schedule, host: Host) -> tuple[Array, float]:
    """What an iteration makes of clocks and fronts, as sums and maxima, and the time of a first iteration."""
    count = len(programs)
    size = count * (2 if host.asynchronous else 1)
    unit = np.full((2 * count, size), -np.inf)
    np.fill_diagonal(unit, 0.0)  # clocks first, then fronts; the front of a CPU is its clock
    clock, front = list(unit[:count]), list(unit[count:])
    _advance(programs, schedule, clock, front, host)
    return np.array([*clock, *front][:size]), float(max(times.max() for times in (*clock, *front)))


def _iterate(matrix: Array, count: int) -> Array:
    """States after so many iterations from a common start."""
    steps = [np.zeros(len(matrix))]
    for _ in range(count):
        steps.append((matrix + steps[-1]).max(axis=1))
    return np.array(steps)


def _find_cycle_mean(history: Array) -> float:
    """Largest mean of a cycle of n states, from n iterations."""
    size = len(history) - 1
    means = (history[size] - history[:size]) / np.arange(size, 0, -1)[:, None]
    return float(means.min(axis=0).max())


def _measure(programs: Sequence[Program], schedule: Schedule, found: _Found, host: Host) -> dict[str, list[Array]]:
    """Starts, ends, launches, waits, stalls and what is exposed of them, and stolen time, for every operation."""
    starts, ends, issued, waits, stolen = ([np.zeros(len(p.first)) for p in programs] for _ in range(5))
    stalls, exposed = ([np.zeros(len(p.first) + 1) for p in programs] for _ in range(2))
    steps, log, flights = found
    ready: dict[tuple[int, int], float] = {}
    met: dict[int, tuple[float, float, float]] = {}
    free: dict[int, float] = {}
    pauses: list[list[tuple[int, float, float]]] = [[] for _ in programs]
    beside = [np.array(own).reshape(-1, 2) for own in flights] if flights else None
    begin = np.inf
    for (code, rank, part), (one, other) in zip(steps, log, strict=True):
        program = programs[rank]
        if code == RUN:
            where = program.spans[part]
            near = beside[rank][(beside[rank][:, 1] > one) & (beside[rank][:, 0] < other)] if beside else ()
            times = _time_run(program, where, float(one), float(other), near)
            starts[rank][where], ends[rank][where], issued[rank][where], stolen[rank][where] = times
            begin = min(begin, float(times[0][0] if host.asynchronous else one))
        elif code == LAUNCH:
            place = program.times.collectives[part]
            ready[rank, part], issued[rank][place] = float(other), float(one)
            begin = begin if host.asynchronous else min(begin, float(one) - float(program.first[place]))
        elif code == MEET:
            before = free.get(schedule.keys[part], -np.inf)
            met[part], free[schedule.keys[part]] = (float(one), float(other), before), float(other)
        elif code == WAIT:
            place, number = program.waits[part]
            end, since = met[schedule.meetings[rank][number]][1], max(float(one), ready[rank, number])
            pauses[rank].append((place, since, max(since, end)))
    for (rank, number), own in ready.items():
        place, (start, end, before) = programs[rank].times.collectives[number], met[schedule.meetings[rank][number]]
        starts[rank][place], ends[rank][place], waits[rank][place] = start, end, start - max(own, before)
        begin = min(begin, start) if host.asynchronous else begin
    for rank, own_pauses in enumerate(pauses):
        if not own_pauses:
            continue
        flown = [met[meeting][:2] for meeting in schedule.meetings[rank]]
        places, since_, until = (np.array(column) for column in zip(*own_pauses, strict=True))
        np.add.at(stalls[rank], places, until - since_)
        np.add.at(exposed[rank], places, measure_overlap(flown, since_, until))
    for view in (*starts, *ends, *issued):
        view -= begin if np.isfinite(begin) else 0.0
    return {
        "starts": starts, "ends": ends, "issued": issued, "waits": waits, "stalls": stalls, "exposed": exposed,
        "stolen": stolen,
    }  # fmt: skip


def _time_run(
    program: Program, where: slice, clock: float, front: float, flights: Flights | Array
) -> tuple[Array, Array, Array, Array]:
    """Starts, ends, launches and stolen time of the operations of a run."""
    seconds, first, more = program.times.seconds[where], program.first[where], program.more[where]
    if not program.host.asynchronous:
        work = np.cumsum(program.times.overhead[where] + seconds)
        if not len(flights):
            return clock + work - seconds, clock + work, clock + work - seconds, np.zeros(len(work))
        starts, ends = (dilate(clock, done, flights, program.host.contention) for done in (work - seconds, work))
        return starts, ends, starts, np.diff(ends, prepend=clock) - np.diff(work, prepend=0.0)
    issued, done = clock + np.cumsum(first + more), np.cumsum(seconds)
    ready = np.maximum(issued - more + seconds, issued + program.last[where])
    ends = done + np.maximum(np.maximum.accumulate(ready - done), front)
    return ends - seconds, ends, issued - more, np.zeros(len(done))
