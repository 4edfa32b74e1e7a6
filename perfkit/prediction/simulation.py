"""From operation times to a timeline: one event loop over the hosts, streams and collectives of all
ranks."""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.prediction.ranks import RankTimes
from perfkit.workloads.graph import Graph

#: Most iterations that are run, and the longest pattern of iterations that is looked for [-].
_MOST, _PATTERN = 72, 12
#: Iterations that a device is ahead of a slow host at first, and the relative difference of two
#: equal times [-].
_FAR, _EQUAL = 1000, 1e-12


class UnsimulatedTime(NamedTuple):
    """The part of a period that was not simulated; it comes after everything else.

    Parameters
    ----------
    host_device_synchronization : float, optional
        What an iteration takes beyond the longer of host and device, because each waits for the
        other at times [s].
    loading : float, optional
        What it takes beyond that because its data loader is slower [s].
    """

    host_device_synchronization: float = 0.0
    loading: float = 0.0

    @property
    def total(self) -> float:
        """Both together [s]."""
        return self.host_device_synchronization + self.loading

    def list_causes(self) -> list[tuple[str, float]]:
        """Name and time of each cause that takes any [s]."""
        return [(name, seconds) for name, seconds in self._asdict().items() if seconds]


@dataclass(frozen=True, eq=False)
class RankTimeline:
    """One steady-state iteration on a group of identical ranks.

    Parameters
    ----------
    times : RankTimes
        What a rank executes, and how long each operation takes alone.
    period : float
        Time from one iteration to the next [s].
    device : bool
        Whether kernels run on a device behind the host, such as a GPU.
    starts, ends, issued : array
        When each operation starts, when it ends, and when the host has launched it. The last
        operation of any rank ends with the iteration; what a rank with little to do begins before
        the iteration has times below zero [s].
    arrival_wait_time : array
        How long each collective waits for other ranks after this one has arrived [s].
    stream_wait_time : array
        How long the compute stream is idle before each operation, and at the end, because a
        collective has not ended [s].
    exposed_time : array
        The part of that time with a collective of this rank in flight [s].
    contention_time : array
        How much longer each operation takes because of collectives on the same core [s].
    added : UnsimulatedTime
        The part of the period that was not simulated.
    """

    times: RankTimes
    period: float
    device: bool
    starts: Array
    ends: Array
    issued: Array
    arrival_wait_time: Array
    stream_wait_time: Array
    exposed_time: Array
    contention_time: Array
    added: UnsimulatedTime

    @property
    def graph(self) -> Graph:
        """What the rank executes."""
        return self.times.group.graph

    @cached_property
    def compute(self) -> np.ndarray:
        """Positions of the operations of the compute stream."""
        return np.delete(np.arange(len(self.starts)), self.graph.collectives)

    @cached_property
    def waits_by_operation(self) -> dict[int, list[tuple[int, int, bool]]]:
        """Waits that keep the compute stream idle, by the number of its next operation.

        Each is the position of the wait, the collective, and whether that is one of the iteration
        before.
        """
        found: dict[int, list[tuple[int, int, bool]]] = {}
        for place, number in self.times.collective_waits:
            if self.stream_wait_time[place] > 1e-9 * self.period:
                held = (place, int(self.graph.collectives[number]), number < 0)
                found.setdefault(self.find_next(place), []).append(held)
        return found

    @property
    def host_time(self) -> float:
        """Time of the host in an iteration, on a device [s]; on a CPU operations are part of it."""
        return float(self.times.host.sum() + self.times.launch_interval.sum())

    @cached_property
    def wait_time_for_ranks(self) -> float:
        """Time in which the compute stream is idle because of other ranks alone [s].

        A host that is ahead of its device goes on launching while the device waits for a collective
        that other ranks join late. Without them, the iteration would still take as long as the host
        does: only what is longer counts as waiting for others, and the rest as time of the host.
        """
        waited = float((self.stream_wait_time - self.exposed_time).sum())
        if self.device:
            without_others = self.host_time
            simulated = self.period - self.added.total
            waited = min(waited, max(simulated - without_others, 0.0))
        return waited

    def list_added(self) -> Iterator[tuple[str, float, float]]:
        """Name, start and end [s] of the time that was not simulated; it comes after everything
        else."""
        begin = min(float(self.starts[self.compute[:1]].sum()), 0.0)  # an early rank ends early too
        end = begin + self.period - self.added.total
        for name, seconds in self.added.list_causes():
            yield name, end, end + seconds
            end += seconds

    def find_next(self, place: int) -> int:
        """Number, on the compute stream, of the operation at a position or of the next one after
        it."""
        return int(np.searchsorted(self.compute, place)) % max(len(self.compute), 1)

    def name_stream(self, place: int) -> str:
        """Stream of an operation: compute, or communication, with the communicator where there are
        several."""
        if self.graph.labels[place].kind != "collective":
            return "compute"
        number = f" {int(self.graph.column('group')[place])}" if len(self.graph.groups) > 1 else ""
        return f"communication{number}"


def measure_overlap(in_flight: Array, starts: Array, ends: Array) -> Array:
    """Time in each interval in which at least one collective is in flight [s].

    Examples
    --------
    >>> measure_overlap(np.array([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)]), np.array([1.0]), np.array([6.0])).tolist()
    [3.0]
    """
    if not len(in_flight):
        return np.zeros(len(starts))
    edges, active = _count_active(in_flight)
    flown = np.append(0.0, np.cumsum(np.diff(edges) * (active[:-1] > 0)))
    return np.asarray(np.interp(ends, edges, flown) - np.interp(starts, edges, flown))


def _count_active(in_flight: Array) -> tuple[Array, np.ndarray]:
    """Times at which collectives start or end [s], and how many are in flight from then on."""
    starts, ends = np.sort(in_flight, axis=0).T
    edges = np.unique(in_flight)
    return edges, np.searchsorted(starts, edges, side="right") - np.searchsorted(
        ends, edges, side="right"
    )


def _dilate(
    clock: Array, work: Array, in_flight: Sequence[tuple[float, float]] | Array, contention: float
) -> Array:
    """When work ends that begins at `clock` and is slower while collectives are in flight [s]."""
    begin = float(np.min(clock))
    edges, active = _count_active(np.array([(begin, begin), *in_flight]))
    rates = np.maximum(1.0 - contention * active, 0.0)
    done = np.append(0.0, np.cumsum(rates[:-1] * np.diff(edges)))
    until = np.interp(clock, edges, done) + np.maximum(clock - edges[-1], 0.0) + work
    # work that ends where a pause begins does not wait for the end of the pause
    piece = np.maximum(np.searchsorted(done, (1 - _EQUAL) * until) - 1, 0)
    left = until - done[piece]
    return np.maximum(
        edges[piece] + np.divide(left, rates[piece], out=np.zeros_like(left), where=left > 0), clock
    )


@dataclass(eq=False)
class CollectiveInstance:
    """A collective of some ranks: when each is `ready` for it, and when it starts and ends in this
    iteration [s]."""

    previous: "CollectiveInstance | None"  # on the same communicator
    members: list[int] = field(default_factory=list)
    slows: bool = True  # kernels that run at the same time
    duration: float = 0.0
    ready: list[float] = field(default_factory=list)
    waiting_ranks: list[int] = field(default_factory=list)  # ranks that wait for its end
    before: float = -math.inf  # end of the previous one
    start: float = 0.0
    end: float = math.inf
    # the one of the iteration before, where this iteration may wait for it
    earlier: "CollectiveInstance | None" = None


class Timeline:
    """All ranks of an iteration, each with the clock of its host and the front of its compute
    stream [s].

    The front is the time at which the stream has done all that was launched. `period` is the time
    from one iteration to the next once the pattern repeats; `latency` that of a first iteration
    from a common start; `device_time` the period if hosts that wait for nothing had launched
    everything before; `hosts` the host time of an iteration by rank; `added` is what makes the
    period longer than the simulated one.
    """

    period: float
    latency: float
    device_time: float

    def __init__(self, ranks: Sequence[RankTimes], device: bool, contention: float) -> None:
        self.ranks, self.device, self.contention = ranks, device, contention
        self.added = UnsimulatedTime()
        # by communicator, and how many come before it there
        self.collectives: dict[tuple[int, int], CollectiveInstance] = {}
        self.collectives_of_rank: list[list[CollectiveInstance]] = [[] for _ in ranks]
        for index, rank in enumerate(ranks):
            seen, graph = Counter[int](), rank.group.graph
            # nobody has measured that a message from one GPU to another slows their kernels
            slows = [
                not device or graph.labels[place].name != "send_recv" for place in graph.collectives
            ]
            for key, duration, slow in zip(
                rank.group.communicators, rank.durations.tolist(), slows, strict=True
            ):
                collective = self.collectives.setdefault(
                    (key, seen[key]), CollectiveInstance(self.collectives.get((key, seen[key] - 1)))
                )
                collective.members.append(index)
                collective.duration, collective.slows = max(collective.duration, duration), slow
                self.collectives_of_rank[index].append(collective)
                seen[key] += 1
        looks_back = any(number < 0 for rank in ranks for _, number in rank.collective_waits)
        for (key, order), collective in self.collectives.items():
            some, every = len(collective.members), len(self.collectives[key, 0].members)
            if some != every:
                fault = (
                    f"communicator {key} has {every} ranks and {some} launch its collective {order}"
                )
                raise ValueError(
                    f"{fault}; all must launch the same ones; give the graphs of one iteration"
                )
            if looks_back:
                collective.earlier = CollectiveInstance(None, end=-math.inf)
                if (key, order + 1) not in self.collectives:
                    self.collectives[key, 0].previous = collective.earlier
        self.sums = [rank.add_up(device) for rank in ranks]
        self.steps = [self.list_steps(index) for index in range(len(ranks))]
        self.hosts = np.array([issued[-1] for issued, *_ in self.sums])
        # by their devices
        self.held = np.array([device and len(rank.group.graph.transfers) > 0 for rank in ranks])
        self.clock, self.front = np.zeros(len(ranks)), np.zeros(len(ranks))

    def list_steps(self, index: int) -> list[tuple[Any, ...]]:
        """Pieces of a rank between two waits or launches of collectives, as `run` takes them.

        Each has whether the host waits for its device before, host time, device time, and the time
        from the start of the host to the end on a free device [s]; then the collective that is
        waited for and the one that is launched.
        """
        (issued, done, ready), own = self.sums[index], self.collectives_of_rank[index]
        collectives = [*own, None, *(collective.earlier for collective in own)]
        begins, ends, waits, launches = self.ranks[index].segments
        latest = (
            np.where(begins < ends, np.maximum.reduceat(ready, begins), -np.inf)
            - issued[begins]
            + done[ends]
        )
        syncs = np.isin(begins, self.ranks[index].group.graph.transfers + 1) & (
            np.diff(begins, prepend=-1) > 0
        )
        columns = (
            syncs & self.device,
            issued[ends] - issued[begins],
            done[ends] - done[begins],
            latest,
        )
        known = ([collectives[number] for number in numbers] for numbers in (waits, launches))
        return list(zip(*(column.tolist() for column in columns), *known, strict=True))

    def run(self) -> None:
        """Run one iteration of all ranks in the order of time, move clocks and fronts on, and note
        the marks."""
        clocks, fronts, contention = self.clock.tolist(), self.front.tolist(), self.contention
        self.marks: list[list[tuple[float, float, float]]] = [[] for _ in self.ranks]
        in_flight: list[list[tuple[float, float]]] = [[] for _ in self.ranks]
        for collective in self.collectives.values():
            if collective.earlier and collective.ready:
                collective.earlier.start, collective.earlier.end = collective.start, collective.end
                for rank in collective.members if collective.slows else ():
                    in_flight[rank].append((collective.start, collective.end))
            collective.ready, collective.end = [], math.inf
        queue = [(front, rank) for rank, front in enumerate(fronts)]
        heapq.heapify(queue)
        while queue:
            rank = heapq.heappop(queue)[1]
            marks, clock, front = self.marks[rank], clocks[rank], fronts[rank]
            steps = self.steps[rank]
            for index in range(len(marks), len(steps)):
                sync, host, work, latest, wait, launched = steps[index]
                if wait is not None and wait.end == math.inf:
                    wait.waiting_ranks.append(rank)
                    break
                clock, begin = (
                    max(clock, front) if sync else clock,
                    max(front, wait.end) if wait else front,
                )
                end = max(begin + work, clock + latest)
                if contention:
                    # what has landed is past
                    in_flight[rank] = [
                        interval for interval in in_flight[rank] if interval[1] > begin
                    ]
                    if any(start < end for start, _ in in_flight[rank]):
                        slowed = float(
                            _dilate(np.array(begin), np.array(work), in_flight[rank], contention)
                        )
                        end = max(slowed, clock + latest)  # nothing ends before it is launched
                    if queue and end > queue[0][0]:  # until then more collectives may start
                        heapq.heappush(queue, (end, rank))
                        break
                marks.append((front, clock, begin))
                clock, front = clock + host, end
                if launched is not None:
                    self.arrive(launched, max(clock, front), queue, in_flight)
            clocks[rank], fronts[rank] = clock, front
        stuck = [
            rank for rank, steps in enumerate(self.steps) if len(self.marks[rank]) < len(steps)
        ]
        if stuck:
            place, _, number, _ = self.ranks[stuck[0]].segments[:, len(self.marks[stuck[0]])]
            names = ", ".join(map(str, stuck))
            fault = f"operation {place} of rank {stuck[0]} waits for collective {number}, which another rank launches"
            raise ValueError(
                f"ranks {names} wait for one another: {fault} later; order the collectives alike on all"
            )
        self.clock, self.front = np.array(clocks), np.array(fronts)

    def arrive(
        self, collective: CollectiveInstance, ready: float, queue: list[Any], in_flight: list[Any]
    ) -> None:
        """Note that a rank is ready for a collective; with the last rank it starts, and waiting
        ranks go on."""
        collective.ready.append(ready)
        if len(collective.ready) == len(collective.members):
            collective.before = collective.previous.end if collective.previous else -math.inf
            collective.start = max(collective.before, *collective.ready)
            collective.end = collective.start + collective.duration
            for rank in collective.members if collective.slows else ():
                in_flight[rank].append((collective.start, collective.end))
            for rank in collective.waiting_ranks:
                heapq.heappush(queue, (collective.end, rank))
            collective.waiting_ranks = []

    def repeat(self, seen: list[Array]) -> float:
        """Run iterations until all ranks advance by the same time, or each by the same as before;
        the longest of these.

        A rank that advances by less never waits for the slowest ranks, and then begins together
        with them.
        """
        for _ in range(_MOST):
            left = [
                collective.end for collective in self.collectives.values() if collective.earlier
            ]
            seen.append(np.concatenate([self.front, self.clock[self.held], left]))
            near = _EQUAL * abs(seen[-1].max())
            for back in range(1, min(_PATTERN + 1, len(seen))):
                step = seen[-1] - seen[-1 - back]
                period, ahead = float(step.max()) / back, step < step.max() - near
                again = (
                    2 * back < len(seen)
                    and abs(step - seen[-1 - back] + seen[-1 - 2 * back]).max() <= near
                )
                if again or not ahead.any():
                    late = np.where(ahead[: len(self.front)], self.front.max() - self.front, 0.0)
                    self.clock, self.front = self.clock + late, self.front + late
                    return period
            self.run()
        return period

    def extend(self, cause: str, time: float) -> None:
        """Make the period at least as long as a time, and note what the cause adds.

        Parameters
        ----------
        cause : str
            Field of `UnsimulatedTime`.
        time : float
            Least time from one iteration to the next [s].
        """
        more = time - self.period
        if more > 1e-9 * time:
            self.added = self.added._replace(**{cause: more})
        self.period = max(self.period, time)

    @cached_property
    def rank_timelines(self) -> tuple[RankTimeline, ...]:
        """One iteration of all kinds of ranks; the last operation of any rank ends with it.

        A rank with little to do begins its next iteration while others still end theirs: what it
        does before the iteration of the slowest ranks begins has times below zero.
        """
        rank_timelines = tuple(self.measure(index) for index in range(len(self.ranks)))
        ends = [
            float(rank_timeline.ends.max(initial=-math.inf)) for rank_timeline in rank_timelines
        ]
        begin = max(ends) - (self.period - self.added.total)
        if math.isinf(begin):  # nothing runs
            begin = 0.0
        for view in (
            view
            for rank_timeline in rank_timelines
            for view in (rank_timeline.starts, rank_timeline.ends, rank_timeline.issued)
        ):
            view -= begin
        return rank_timelines

    def measure(self, index: int) -> RankTimeline:
        """What a kind of rank did in the iteration that was run last, on the clock of the
        simulation."""
        rank, (issued, done, ready), own = (
            self.ranks[index],
            self.sums[index],
            self.collectives_of_rank[index],
        )
        (begins, stops, numbers, _), (fronts, clocks, resumed) = (
            rank.segments,
            np.array(self.marks[index]).T,
        )
        places, waits, contention_time = (
            rank.group.graph.collectives,
            np.zeros(len(rank.seconds)),
            np.zeros(len(rank.seconds)),
        )
        flown = np.array([(one.start, one.end, one.before) for one in own]).reshape(-1, 3)
        of, heads = np.repeat(np.arange(len(begins)), stops - begins), begins[begins < stops]
        launched = issued[1:] - rank.launch_interval + (clocks - issued[begins])[of]
        free, work = ready[:-1] + (clocks - issued[begins])[of], done[1:] - done[begins][of]
        free[heads] = np.maximum(free[heads], (resumed - done[begins])[of][heads])
        ends = done[1:] + np.maximum.accumulate(free)
        starts = ends - rank.seconds
        if self.contention:
            slows = flown[[one.slows for one in own], :2]
            slowed = _dilate(resumed[of], work, slows, self.contention)
            delays = slowed - resumed[of] - work
            free_starts, free_ends = starts, ends
            starts = _dilate(resumed[of], work - rank.seconds, slows, self.contention)
            ends = slowed
            if self.device:  # nothing runs before it is launched
                starts, ends = np.maximum(starts, free_starts), np.maximum(ends, free_ends)
            contention_time = delays - np.where(
                np.isin(np.arange(len(of)), heads), 0.0, np.roll(delays, 1)
            )
            contention_time[contention_time < 1e-9 * self.period] = 0.0
        launched = launched if self.device else starts.copy()
        arrived = np.maximum(launched, ends)[places]
        starts[places], ends[places], contention_time[places] = flown[:, 0], flown[:, 1], 0.0
        waits[places] = np.maximum(flown[:, 0] - np.maximum(arrived, flown[:, 2]), 0.0)
        at, numbers, fronts = (
            column[numbers < len(places)] for column in (begins, numbers, fronts)
        )
        since = np.maximum(fronts, arrived[numbers] - self.period * (numbers < 0))
        until = np.maximum(since, flown[numbers, 1] - self.period * (numbers < 0))
        in_flight = flown[:, :2]
        if numbers.min(initial=0) < 0:
            in_flight = np.concatenate([in_flight, in_flight - self.period])
        lengths = (until - since, measure_overlap(in_flight, since, until))
        stream_wait_time, exposed_time = (
            np.bincount(at, seconds, len(waits) + 1).astype(float) for seconds in lengths
        )
        return RankTimeline(
            rank,
            self.period,
            self.device,
            starts,
            ends,
            launched,
            waits,
            stream_wait_time,
            exposed_time,
            contention_time,
            self.added,
        )


def simulate(ranks: Sequence[RankTimes], *, device: bool, contention: float = 0.0) -> Timeline:
    """Run all ranks on their clocks until iterations repeat.

    `contention` is the share of a core that a collective in flight takes from kernels [-]. Where
    the ranks of a collective have different times for it, the longest counts. A ValueError names
    waits that come before their collective, and ranks whose collectives do not match.

    Notes
    -----
    A collective is ready on a rank when its host has launched it and its compute stream has done
    what was launched before. It starts when the last rank of its communicator is ready and the
    collective before it there has ended, and it ends on all ranks together. A kernel on a device
    starts when the kernel before has ended, the host has launched it and the collectives it waits
    for have ended. Kernels of a CPU run on the host clock itself.

    Iterations are run one after another until all ranks advance by the same time, or each by the
    same as before. A rank that advances by less than the period is ahead of the others: its host
    waits for nothing and has launched everything before.
    """
    timeline = Timeline(ranks, device, contention)
    timeline.run()
    timeline.latency, slowest = float(timeline.front.max()), timeline.hosts.max()
    collectives = timeline.collectives.values()
    if device:  # hosts that wait for nothing are far ahead of their devices
        timeline.clock[~timeline.held] = -np.inf
    fresh = device or any(collective.earlier for collective in collectives)
    timeline.period = timeline.device_time = timeline.repeat(
        [] if fresh else [np.zeros(len(ranks))]
    )
    if slowest > (1 + _EQUAL) * timeline.device_time:  # a host is slower than all devices together
        leads, late = (
            timeline.hosts >= (1 - _EQUAL) * slowest,
            timeline.front.max() + _FAR * slowest,
        )
        timeline.held |= leads
        timeline.clock = np.where(leads, 0.0, timeline.clock - late)
        timeline.front -= late  # devices have done all that was launched
        for collective in collectives:
            collective.start, collective.end = collective.start - late, collective.end - late
        timeline.period = timeline.repeat([])
    far = np.isinf(timeline.clock)  # all is launched before the device begins
    timeline.clock[far] = (timeline.front - timeline.hosts)[far]
    timeline.run()  # the iteration that is shown
    return timeline
