"""From operation times to a timeline: one event loop over the hosts, streams and collectives of all ranks."""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from perfkit.ground.units import Array

#: Steps of a rank: operations one after another, the launch of a collective, the wait for its end, and the host's wait
#: for its device.
_RUN, _LAUNCH, _WAIT, _SYNC = range(4)
#: Most iterations, the longest pattern of iterations looked for, how many iterations what is faster gets ahead, and how
#: far two equal times differ, as a part [-].
_MOST, _PATTERN, _FAR, _EQUAL = 72, 12, 1000, 1e-12


@dataclass(frozen=True, eq=False)
class RankTimes:
    """What one rank executes: a time for each operation in program order, zero for collectives [s], and its waits.

    `host` is the time of the host up to the first launch of each operation, `spacing` from there to its last, and
    `last` the time of its last kernel [s]. `collectives` are positions among the operations, `communicators` the number
    of the communicator of each: all ranks that name it take part, in the same order. `waits` holds rows of the position
    of an operation and the number of a collective that has to end before it (the number of operations: the end of the
    iteration); None where every collective is waited for at once. The host waits for the end of `transfers` [-].
    """

    seconds: Array
    host: Array
    spacing: Array
    last: Array
    collectives: np.ndarray
    communicators: Sequence[int]
    waits: np.ndarray | None
    transfers: Sequence[int]

    @cached_property
    def awaited(self) -> tuple[tuple[int, int], ...]:
        """Positions that wait, in order, and the collectives they wait for; the end of the iteration for the rest."""
        count, n = len(self.collectives), len(self.seconds)
        if self.waits is None:
            return tuple((place + 1, number) for number, place in enumerate(self.collectives.tolist()))
        pairs = sorted(map(tuple, self.waits.tolist()))
        for place, number in pairs:
            if not (0 <= number < count and self.collectives[number] < place <= n):
                raise ValueError(
                    f"waits has operation {place} wait for collective {number}; it must be one of the {count} "
                    f"collectives, and before one of the {n} operations; record the iteration again"
                )
        waited = {number for _, number in pairs}
        return (*pairs, *((n, number) for number in range(count) if number not in waited))

    @cached_property
    def steps(self) -> tuple[list[tuple[int, int, int]], np.ndarray]:
        """Steps as kind, number of the run or collective, and position; first and last operation of every run."""
        n, numbers = len(self.seconds), {place: number for number, place in enumerate(self.collectives.tolist())}
        transfers, waits = {place + 1 for place in self.transfers}, dict[int, list[int]]()
        for place, number in self.awaited:
            waits.setdefault(place, []).append(number)
        steps: list[tuple[int, int, int]] = []
        runs: list[tuple[int, int]] = []
        for begin, end in pairwise([*sorted({0, n, *numbers, *(p + 1 for p in numbers), *transfers, *waits}), n]):
            steps += [(_SYNC, 0, begin)] * (begin in transfers)
            steps += [(_WAIT, number, begin) for number in waits.get(begin, ())]
            if begin in numbers:
                steps.append((_LAUNCH, numbers[begin], begin))
            elif begin < n:
                steps.append((_RUN, len(runs), begin))
                runs.append((begin, end))
        return steps, np.array(runs, dtype=int).reshape(-1, 2)

    def add_up(self, device: bool, slower: float = 1.0) -> tuple[Array, Array, Array]:
        """Host and device time before each operation, and how far its end is from the second on a free device [s].

        Kernels of a CPU run on the host itself.
        """
        if not device:
            issued = _add_up(slower * self.host + self.seconds)
            return issued, np.zeros(len(issued)), issued[1:]
        spacing = slower * self.spacing
        issued, done = _add_up(slower * self.host + spacing), _add_up(self.seconds)
        return issued, done, np.maximum(issued[1:] - spacing + self.seconds, issued[1:] + self.last) - done[1:]

    def sum_runs(self, device: bool, slower: float) -> list[tuple[float, float, float]]:
        """Host time and device time of every run, and time from the host's start to its end on a free device [s]."""
        begins, ends = self.steps[1].T
        if not len(begins):
            return []
        issued, done, ready = self.add_up(device, slower)
        latest = np.maximum.reduceat(np.append(ready, -np.inf), self.steps[1].ravel())[::2]
        sums = (issued[ends] - issued[begins], done[ends] - done[begins], latest - issued[begins] + done[ends])
        return list(zip(*(times.tolist() for times in sums), strict=True))


@dataclass(frozen=True)
class Timeline:
    """One iteration of the steady state, and the two iteration times [s]; arrays are per rank and operation [s].

    `period` is the time from one iteration to the next once the pattern repeats, `latency` that of a first iteration
    from a common start, `device` whether kernels run on a device of their own, behind the host. `starts`, `ends` and
    `issued` (when the host has launched an operation, or has reached it where it runs on the host) count from the
    earliest start. `waits` is how long each collective waited for other ranks; `stalls` how long the compute stream is
    idle before each operation, and the end, because a collective has not ended, from when this rank was ready for it;
    `exposed` the part of that in which a collective of the rank is in flight; `stolen` what collectives in flight take
    from operations on the same core. `awaited` are positions that wait, and the number of the collective.
    """

    period: float
    latency: float
    device: bool
    starts: tuple[Array, ...]
    ends: tuple[Array, ...]
    issued: tuple[Array, ...]
    waits: tuple[Array, ...]
    stalls: tuple[Array, ...]
    exposed: tuple[Array, ...]
    stolen: tuple[Array, ...]
    awaited: tuple[tuple[tuple[int, int], ...], ...]


def simulate(
    ranks: Sequence[RankTimes], durations: Sequence[Array], *, device: bool, contention: float = 0.0
) -> Timeline:
    """Run all ranks on their clocks until iterations repeat; contention is the share that collectives take of a core.

    Durations are those of each rank's collectives in program order [s]; of those that meet the longest counts. A
    ValueError names waits that come before their collective, and ranks whose collectives do not match.

    Notes
    -----
    A collective is ready on a rank when its host has launched it and its compute stream has done what was launched
    before. It starts when the last rank of its communicator is ready and the collective before it there has ended, and
    it ends on all ranks together. Kernels on a device start when the one before has ended, the host has launched them
    and the collectives they wait for have ended; kernels of a CPU run on the host clock itself.

    Iterations are run one after another until every clock goes on by the same time for the same number of them, twice
    in a row. Without contention all is sums and maxima: no cycle of them has a larger mean than the largest of these
    times, and one cycle has it.
    """
    loop = _Loop(ranks, durations, device, contention)
    period, latency = loop.settle()
    columns: Any = zip(*loop.measure(period), strict=True)
    return Timeline(period, latency, device, *columns)


def find_period(
    ranks: Sequence[RankTimes], durations: Sequence[Array], device: bool, contention: float, slower: float
) -> float:
    """Period [s] as `simulate` finds it, with host times that are some times longer [-]."""
    return _Loop(ranks, durations, device, contention, slower).settle(exact=False)[0]


def measure_overlap(flights: Array, starts: Array, ends: Array) -> Array:
    """Time [s] of each interval in which at least one collective is in flight.

    Examples
    --------
    >>> measure_overlap(np.array([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)]), np.array([1.0]), np.array([6.0])).tolist()
    [3.0]
    """
    if not len(flights):
        return np.zeros(len(starts))
    edges, active = _count_active(flights)
    flown = _add_up(np.diff(edges) * (active[:-1] > 0))
    return np.asarray(np.interp(ends, edges, flown) - np.interp(starts, edges, flown))


def _add_up(values: Array) -> Array:
    """Sums of the first 0, 1, 2, ... values."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _count_active(flights: Array) -> tuple[Array, np.ndarray]:
    """Times at which collectives start or end, and how many are in flight from then on."""
    starts, ends = np.sort(flights, axis=0).T
    edges = np.unique(flights)
    return edges, np.searchsorted(starts, edges, side="right") - np.searchsorted(ends, edges, side="right")


def _dilate(clock: float, work: Array, flights: Sequence[tuple[float, float]] | Array, contention: float) -> Array:
    """When pieces of work end that start one after another and are slower while collectives are in flight."""
    edges, active = _count_active(np.maximum([(clock, clock), *flights], clock))
    rates = np.maximum(1.0 - contention * active, 0.0)
    done = _add_up(rates[:-1] * np.diff(edges))
    piece = np.maximum(np.searchsorted(done, work, side="left") - 1, 0)  # what ends with a pause does not wait for it
    left = work - done[piece]
    return np.asarray(edges[piece] + np.divide(left, rates[piece], out=np.zeros_like(left), where=left > 0))


class _Loop:
    """Clocks of ranks that meet each other, and fronts: when the compute stream of each has done what it was given."""

    def __init__(
        self,
        ranks: Sequence[RankTimes],
        durations: Sequence[Array],
        device: bool,
        contention: float,
        slower: float = 1.0,
    ) -> None:
        self.ranks, self.device, self.contention = ranks, device, 0.0 if device else contention
        self.clock, self.front = [0.0] * len(ranks), [0.0] * len(ranks)
        self.runs = [rank.sum_runs(device, slower) for rank in ranks]
        self.first = [(slower * rank.host[rank.collectives]).tolist() for rank in ranks]
        self.meetings: list[list[int]] = []  # number of each collective, the same on all ranks that meet there
        self.members: list[list[int]] = []
        self.durations: list[float] = []
        numbers: dict[tuple[int, int], int] = {}  # by communicator, and how many come before it there
        for index, (rank, own) in enumerate(zip(ranks, durations, strict=True)):
            seen: Counter[int] = Counter()
            self.meetings.append([])
            for key, duration in zip(rank.communicators, own.tolist(), strict=True):
                number = numbers.setdefault((key, seen[key]), len(numbers))
                if number == len(self.members):
                    self.members.append([])
                    self.durations.append(0.0)
                self.meetings[index].append(number)
                self.members[number].append(index)
                self.durations[number] = max(self.durations[number], duration)
                seen[key] += 1
        self.previous = [numbers.get((key, order - 1), -1) for key, order in numbers]
        for (key, order), number in numbers.items():
            some, all_ranks = len(self.members[number]), len(self.members[numbers[key, 0]])
            if some != all_ranks:
                raise ValueError(
                    f"communicator {key} has {all_ranks} ranks and {some} launch its collective {order}; all must "
                    "launch the same ones; give the graphs of one iteration"
                )

    def run(self) -> None:
        """Run one iteration of all ranks in the order of time, move clocks and fronts on, and note what happens."""
        count, device, contention = len(self.ranks), self.device, self.contention
        self.marks: list[list[tuple[float, float]]] = [[] for _ in self.ranks]
        self.launched: list[list[tuple[float, float]]] = [[] for _ in self.ranks]
        self.flights: list[list[tuple[float, float]]] = [[] for _ in self.ranks]
        self.idle: list[list[float]] = [[] for _ in self.ranks]
        self.ready: list[list[float]] = [[] for _ in self.members]
        self.met: dict[int, tuple[float, float, float]] = {}
        parked, at = dict[int, list[int]](), [0] * count
        queue = [(clock, rank) for rank, clock in enumerate(self.clock)]
        heapq.heapify(queue)
        while queue:
            rank = heapq.heappop(queue)[1]
            meetings, clock, front = self.meetings[rank], self.clock[rank], self.front[rank]
            for kind, number, _ in self.ranks[rank].steps[0][at[rank] :]:
                if kind == _WAIT:
                    if meetings[number] not in self.met:
                        parked.setdefault(meetings[number], []).append(rank)
                        break
                    self.idle[rank].append(front if device else clock)
                    front = max(front, self.met[meetings[number]][1])
                if kind == _SYNC or (kind == _WAIT and not device):
                    clock = max(clock, front)
                elif kind != _WAIT:
                    host, work, latest = self.runs[rank][number] if kind == _RUN else (self.first[rank][number], 0, 0)
                    now = self.finish(rank, clock, host) if contention else clock + host
                    if contention and queue and now > queue[0][0]:  # until then more collectives may start
                        heapq.heappush(queue, (now, rank))
                        break
                    if kind == _RUN:
                        self.marks[rank].append((clock, front if device else now))
                        front = max(front + work, clock + latest)
                    else:
                        self.launched[rank].append((now, max(now, front)))
                        for other in self.meet(meetings[number], max(now, front), parked):
                            heapq.heappush(queue, (self.met[meetings[number]][1], other))
                    clock = now
                at[rank] += 1
            self.clock[rank], self.front[rank] = clock, front
        for rank, (own, done) in enumerate(zip(self.ranks, at, strict=True)):
            if done < len(own.steps[0]):
                _, number, place = own.steps[0][done]
                stuck = [str(r) for r in range(count) if at[r] < len(self.ranks[r].steps[0])]
                raise ValueError(
                    f"ranks {', '.join(stuck)} wait for one another: operation {place} of rank {rank} waits for "
                    f"collective {number}, which another rank launches only later; order the collectives alike on all"
                )

    def finish(self, rank: int, clock: float, work: float) -> float:
        """When a piece of work of a rank is done, given the collectives in flight that are known."""
        near = [flight for flight in self.flights[rank] if clock < flight[1] and flight[0] < clock + work]
        return float(_dilate(clock, np.array([work]), self.flights[rank], self.contention)[0]) if near else clock + work

    def meet(self, meeting: int, ready: float, parked: dict[int, list[int]]) -> Sequence[int]:
        """Note that a rank is ready for a collective, which starts with the last one; the ranks that go on after it."""
        self.ready[meeting].append(ready)
        if len(self.ready[meeting]) < len(self.members[meeting]):
            return ()
        previous = self.previous[meeting]
        before = self.met[previous][1] if previous >= 0 else -math.inf
        start = max(before, *self.ready[meeting])
        self.met[meeting] = (start, start + self.durations[meeting], before)
        for rank in self.members[meeting] if self.contention else ():
            self.flights[rank].append(self.met[meeting][:2])
        return parked.pop(meeting, ())

    def settle(self, *, exact: bool = True) -> tuple[float, float]:
        """Run iterations until all clocks and fronts go on as before; returns the period and the time of the first one.

        The period is the most that one goes on by. Whatever goes on by less, such as a host that nothing holds up, is
        ahead without end in the long run: where the iteration itself is asked for, that is brought about.
        """
        count, latency, seen = len(self.ranks), 0.0, [np.array([*self.clock, *self.front])]
        for _ in range(_MOST):
            self.run()
            seen.append(np.array([*self.clock, *self.front]))
            latency, near = latency or float(seen[-1].max()), _EQUAL * abs(float(seen[-1].max()))
            for back in range(1, min(_PATTERN, (len(seen) - 1) // 2) + 1):
                step, before = seen[-1] - seen[-1 - back], seen[-1 - back] - seen[-1 - 2 * back]
                pace = float(step.max())
                if abs(step - before).max() <= near:
                    ahead = step < pace - near
                    if not exact or not ahead.any():
                        return pace / back, latency
                    seen, exact = [np.where(ahead, seen[-1] - _FAR * pace, seen[-1])], False
                    self.clock, self.front = seen[0][:count].tolist(), seen[0][count:].tolist()
                    break
        return pace / back, latency

    def measure(self, period: float) -> list[tuple[Any, ...]]:
        """One more iteration, rank by rank: the columns of `Timeline`."""
        last, far = max(self.front), _FAR / 2 * period
        for index, runs in enumerate(self.runs):
            if last - self.front[index] > far:  # it meets none of the others: begin together
                self.clock[index] += last - self.front[index]
                self.front[index] = last
            if self.front[index] - self.clock[index] > far:  # all is launched before the device begins
                self.clock[index] = self.front[index] - sum(issue for issue, *_ in runs) - sum(self.first[index])
        begin, found = min(self.clock), []
        self.run()
        for index, rank in enumerate(self.ranks):
            n, places = len(rank.seconds), rank.collectives
            flown = np.array([self.met[meeting] for meeting in self.meetings[index]]).reshape(-1, 3)
            starts, ends, issued, stolen = self.time_runs(index, flown[:, :2])
            launched, ready = np.array(self.launched[index]).reshape(-1, 2).T
            starts[places], ends[places], issued[places] = flown[:, 0], flown[:, 1], launched
            waits, stalls, exposed = np.zeros(n), np.zeros(n + 1), np.zeros(n + 1)
            waits[places] = flown[:, 0] - np.maximum(ready, flown[:, 2])
            wait_at, numbers = np.array(rank.awaited, dtype=int).reshape(-1, 2).T
            since = np.maximum(self.idle[index], ready[numbers])
            until = np.maximum(since, flown[numbers, 1])
            np.add.at(stalls, wait_at, until - since)
            np.add.at(exposed, wait_at, measure_overlap(flown[:, :2], since, until))
            found.append((starts, ends, issued, waits, stalls, exposed, stolen, rank.awaited))
        if self.device:
            begin = min(float(starts.min(initial=np.inf)) for starts, *_ in found)
        for view in (view for columns in found for view in columns[:3]):
            view -= begin
        return found

    def time_runs(self, index: int, flights: Array) -> tuple[Array, Array, Array, Array]:
        """Starts, ends, launches and stolen time of one rank's operations; zero for collectives."""
        rank, (runs, marks) = self.ranks[index], (self.ranks[index].steps[1], self.marks[index])
        starts, ends, issued, stolen = (np.zeros(len(rank.seconds)) for _ in range(4))
        if not marks:
            return starts, ends, issued, stolen
        launched, done, ready = rank.add_up(self.device)
        clock, front = np.array(marks).T
        inside = np.delete(np.arange(len(starts)), rank.collectives)
        which = np.repeat(np.arange(len(runs)), np.diff(runs)[:, 0])
        shift = (clock - launched[runs[:, 0]])[which]
        free = ready[inside] + shift
        if self.device:
            first = np.searchsorted(inside, runs[:, 0])
            free[first] = np.maximum(free[first], front - done[runs[:, 0]])
            free = np.maximum.accumulate(free)
        ends[inside] = done[inside + 1] + free
        starts[inside] = ends[inside] - rank.seconds[inside]
        issued[inside] = (launched[1:] - rank.spacing)[inside] + shift
        for (begin, end), (time, until) in zip(runs.tolist(), marks, strict=True) if self.contention else ():
            near = flights[(flights[:, 1] > time) & (flights[:, 0] < until)]
            if len(near):
                work, each = np.cumsum((rank.host + rank.seconds)[begin:end]), slice(begin, end)
                starts[each] = _dilate(time, work - rank.seconds[each], near, self.contention)
                ends[each] = _dilate(time, work, near, self.contention)
                stolen[each] = np.diff(ends[each], prepend=time) - np.diff(work, prepend=0.0)
        return starts, ends, issued if self.device else starts.copy(), stolen
