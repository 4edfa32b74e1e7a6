"""From operation times to a timeline: one event loop over the hosts, streams and collectives of all
ranks."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.offload import HOST_UPDATE, HOST_WORK
from perfkit.prediction.ranks import RankTimes
from perfkit.workloads.graph import Graph

#: Most iterations that are run, and the longest pattern of iterations that is looked for [-].
_MOST_ITERATIONS, _LONGEST_PATTERN = 72, 12
#: Iterations that a device is ahead of a slow host at first [-].
_ITERATIONS_AHEAD = 1000
#: Relative difference of two equal times of the simulation, and of what it shows [-].
_EQUAL, _ROUNDING = 1e-12, 1e-9


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

    def list_causes(self) -> list[tuple[str, float]]:
        """Name and time of each cause that takes any [s]."""
        return [(name, seconds) for name, seconds in self._asdict().items() if seconds]


class StreamWait(NamedTuple):
    """A wait of the compute stream for a collective.

    Parameters
    ----------
    position : int
        Position of the operation that waits [-].
    collective : int
        Position of the collective [-].
    of_iteration_before : bool
        Whether it is one of the iteration before.
    """

    position: int
    collective: int
    of_iteration_before: bool


@dataclass(frozen=True, eq=False)
class RankTimeline:
    """One steady-state iteration on a group of identical ranks.

    Parameters
    ----------
    times : RankTimes
        What a rank executes, and how long each operation takes alone.
    period, simulated_period : float
        Time from one iteration to the next, with and without the time that was not simulated [s].
    device : bool
        Whether kernels run on a device behind the host, such as a GPU.
    starts, ends, issued : array
        When each operation starts, when it ends, and when the host has launched it. The last
        operation of any rank ends with the iteration; what a rank with little to do begins before
        the iteration has times below zero. A collective starts when the last of its ranks has
        arrived, so that its time is without waiting [s].
    arrival_wait_time : array
        How long each collective waits for other ranks after this one has arrived [s].
    stream_wait_time : array
        How long the compute stream is idle before each operation, and at the end, because a
        collective has not ended [s].
    communication_idle_time : array
        The part of that time with a collective of this rank in flight [s].
    contention_time : array
        How much longer each operation takes because of collectives beside it: on a device, its
        kernels; on a CPU, also what its host does on the same core [s].
    host_time : float
        Time of the host in an iteration, on a device [s]; on a CPU operations are part of it.
    added : UnsimulatedTime
        The part of the period that was not simulated.
    """

    times: RankTimes
    period: float
    simulated_period: float
    device: bool
    starts: Array
    ends: Array
    issued: Array
    arrival_wait_time: Array
    stream_wait_time: Array
    communication_idle_time: Array
    contention_time: Array
    host_time: float
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
    def waits_by_operation(self) -> dict[int, list[StreamWait]]:
        """Waits that keep the compute stream idle, by the number of its next operation."""
        waits: dict[int, list[StreamWait]] = {}
        for wait in self.graph.collective_waits:
            if self.stream_wait_time[wait.operation] > _ROUNDING * self.period:
                collective = int(self.graph.collectives[wait.collective])
                idle = StreamWait(wait.operation, collective, wait.of_previous_iteration)
                waits.setdefault(self.find_next(wait.operation), []).append(idle)
        return waits

    @cached_property
    def wait_time_for_ranks(self) -> float:
        """Time in which the compute stream is idle because of other ranks alone [s].

        A host that is ahead of its device goes on launching while the device waits for a collective
        that other ranks join late. Without them, the iteration would still take as long as the host
        does: only what is longer counts as waiting for others, and the rest as time of the host.
        """
        wait_time = float((self.stream_wait_time - self.communication_idle_time).sum())
        if self.device:
            time_without_others = self.host_time
            time_of_others = max(self.simulated_period - time_without_others, 0.0)
            wait_time = min(wait_time, time_of_others)
        return wait_time

    @property
    def begin(self) -> float:
        """When this rank begins the iteration: 0, or below for one that is early, and ends early, too
        [s]."""
        first = float(self.starts[self.compute[:1]].sum())
        if first < -_ROUNDING * self.period:
            return first
        return 0.0

    def list_added(self) -> Iterator[tuple[str, float, float]]:
        """Name, start and end [s] of the time that was not simulated; it comes after everything
        else."""
        end = self.begin + self.simulated_period
        for name, seconds in self.added.list_causes():
            yield name, end, end + seconds
            end += seconds

    def find_next(self, position: int) -> int:
        """Number, on the compute stream, of the operation at a position or of the next one after
        it."""
        return int(np.searchsorted(self.compute, position)) % max(len(self.compute), 1)

    def name_stream(self, position: int) -> str:
        """Stream of an operation: compute, or communication, with the communicator where there are
        several."""
        if self.graph.labels[position].kind != "collective":
            return "compute"
        if self.graph.labels[position].name in HOST_WORK:
            return "host memory"
        if len(self.graph.groups) <= 1:
            return "communication"
        number = int(self.graph.column("group")[position])
        return self.graph.group_names.get(number, f"communication {number}")


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
    time_in_flight = np.append(0.0, np.cumsum(np.diff(edges) * (active[:-1] > 0)))
    before_ends = np.interp(ends, edges, time_in_flight)
    before_starts = np.interp(starts, edges, time_in_flight)
    return np.asarray(before_ends - before_starts)


def _count_active(in_flight: Array) -> tuple[Array, np.ndarray]:
    """Times at which collectives start or end [s], and how many are in flight from then on."""
    starts, ends = np.sort(in_flight, axis=0).T
    edges = np.unique(in_flight)
    started = np.searchsorted(starts, edges, side="right")
    ended = np.searchsorted(ends, edges, side="right")
    return edges, started - ended


def _end_segment(
    begin: float, work: float, in_flight: Sequence[tuple[float, float]], contention: float
) -> float:
    """When one segment ends that is slower while collectives are in flight [s]: what
    `_end_beside_collectives` says of many pieces of work, without an array.

    Each collective in flight, from its start to its end [s], takes the share `contention` of the
    rate.
    """
    if work <= 0:
        return begin
    changes = sorted(edge for interval in in_flight for edge in interval if edge > begin)
    time, left = begin, work
    for change in changes:
        active = sum(start <= time < end for start, end in in_flight)
        rate = max(1.0 - contention * active, 0.0)
        done = rate * (change - time)
        # work that ends where a pause begins does not wait for the end of the pause
        if done >= left - _EQUAL * work:
            return time + left / rate
        time, left = change, left - done
    return time + left


def _end_beside_collectives(
    begin: Array, work: Array, in_flight: Array, contention: float
) -> Array:
    """When work ends that is slower while collectives are in flight.

    Parameters
    ----------
    begin, work : array
        When it begins, and how long it takes alone [s].
    in_flight : array, shape (collectives, 2)
        Starts and ends of collectives [s].
    contention : float
        Share of its rate that work loses to each of them [-].

    Returns
    -------
    ends : array
        [s].
    """
    first = float(np.min(begin))
    edges, active = _count_active(np.array([(first, first), *in_flight]))
    rates = np.maximum(1.0 - contention * active, 0.0)
    done_at_edges = np.append(0.0, np.cumsum(rates[:-1] * np.diff(edges)))
    done_before = np.interp(begin, edges, done_at_edges) + np.maximum(begin - edges[-1], 0.0)
    done_after = done_before + work
    # work that ends where a pause begins does not wait for the end of the pause
    interval = np.searchsorted(done_at_edges, (1 - _EQUAL) * done_after) - 1
    interval = np.maximum(interval, 0)
    left = done_after - done_at_edges[interval]
    rate = rates[interval]
    time_left = np.divide(left, rate, out=np.zeros_like(left), where=left > 0)
    return np.maximum(edges[interval] + time_left, begin)


@dataclass(eq=False, slots=True)
class CollectiveInstance:
    """A collective of some ranks in one iteration.

    Parameters
    ----------
    previous : CollectiveInstance or None
        The one before on the same communicator.
    members : list of int
        Groups of ranks of its communicator, which all its collectives share [-].
    slows_kernels : bool
        Whether kernels that run at the same time take longer.
    duration : float
        Time once all ranks are ready [s].
    arrived : int
        How many of them are ready [-].
    ready : float
        When the last of these was ready [s].
    waiting_ranks : list of int or None
        Groups of ranks that wait for its end, if any does [-].
    previous_end : float
        When the one before has ended [s].
    start, end : float
        When it starts and ends [s].
    of_iteration_before : CollectiveInstance or None
        The same of the iteration before, where this iteration may wait for it.
    """

    previous: "CollectiveInstance | None"
    members: list[int] = field(default_factory=list)
    slows_kernels: bool = True
    duration: float = 0.0
    arrived: int = 0
    ready: float = -math.inf
    waiting_ranks: list[int] | None = None
    previous_end: float = -math.inf
    start: float = 0.0
    end: float = math.inf
    of_iteration_before: "CollectiveInstance | None" = None


@dataclass(eq=False)
class Communicator:
    """Groups of ranks that launch collectives together.

    Parameters
    ----------
    members : list of int
        The groups of ranks [-].
    launches : list of int
        How many collectives each of them launches [-].
    collectives : list of CollectiveInstance
        In the order in which they are launched.
    """

    members: list[int] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    collectives: list[CollectiveInstance] = field(default_factory=list)


class Segment(NamedTuple):
    """Operations of a rank that run without waiting for anything in between.

    Parameters
    ----------
    waits_for_device : bool
        Whether the host waits for its device before.
    host_time, device_time : float
        Time of the host and of the device [s].
    latest_end : float
        From the start of the host to the end on a device that is free [s].
    awaited : CollectiveInstance or None
        The collective that the stream waits for before.
    launched : CollectiveInstance or None
        The collective that is launched at the end.
    """

    waits_for_device: bool
    host_time: float
    device_time: float
    latest_end: float
    awaited: CollectiveInstance | None
    launched: CollectiveInstance | None


class SegmentTimes(NamedTuple):
    """When a segment ran in the iteration that was run last.

    Parameters
    ----------
    stream_free, host_free : float
        When compute stream and host had done all that came before [s].
    begin, end : float
        When its first operation could begin on the stream, and when its last one ended [s].
    """

    stream_free: float
    host_free: float
    begin: float
    end: float


class _RunSegments(NamedTuple):
    """Segments of a group of ranks, and when they ran.

    Parameters
    ----------
    first : array of int, shape (segments,)
        Position of the first operation of each, or of what follows one without operations [-].
    of_operation : array of int, shape (operations,)
        Segment of each operation [-].
    heads, tails : array of int
        First and last operations of the segments that have any [-].
    stream_free, host_free, begins, ends : array, shape (segments,)
        See `SegmentTimes` [s].
    """

    first: np.ndarray
    of_operation: np.ndarray
    heads: np.ndarray
    tails: np.ndarray
    stream_free: Array
    host_free: Array
    begins: Array
    ends: Array


class _PlacedOperations(NamedTuple):
    """When each operation is launched, starts and ends, and what contention adds to it [s]."""

    launched: Array
    starts: Array
    ends: Array
    contention_time: Array


class _StreamWaits(NamedTuple):
    """Waits of a compute stream for collectives.

    Parameters
    ----------
    positions : array of int
        Operation that each comes before [-].
    times, with_communication : array
        How long it takes, and for how long of it a collective is in flight [s].
    """

    positions: np.ndarray
    times: Array
    with_communication: Array


class CollectivesBeside:
    """Collectives that run beside the kernels of each rank and slow them.

    Parameters
    ----------
    contention : float
        Share of its rate that a kernel loses to each collective in flight [-].
    ranks : int
        Groups of ranks [-].

    Attributes
    ----------
    in_flight : list of list of (float, float)
        Starts and ends of collectives by group of ranks [s].
    awaits_others : list of int
        Collectives for which the group is ready, and others are not [-].
    """

    def __init__(self, contention: float, ranks: int) -> None:
        self.contention = contention
        self.in_flight: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
        self.awaits_others = [0] * ranks

    def start(self, collective: CollectiveInstance) -> None:
        """Note a collective that starts."""
        for rank in collective.members:
            self.in_flight[rank].append((collective.start, collective.end))

    def wait_for_others(self, rank: int) -> None:
        """Note a group of ranks that is ready for a collective before others are."""
        self.awaits_others[rank] += 1

    def stop_waiting(self, last_rank: int, collective: CollectiveInstance) -> None:
        """Note that the last group of ranks is ready for a collective."""
        for rank in collective.members:
            if rank != last_rank:
                self.awaits_others[rank] -= 1

    def slow(self, rank: int, begin: float, work: float) -> float:
        """End of kernels that take `work` alone [s], beside the collectives in flight; those that
        have ended before are forgotten."""
        left = [interval for interval in self.in_flight[rank] if interval[1] > begin]
        self.in_flight[rank] = left
        end = begin + work
        for start, _ in left:
            if start < end:
                return _end_segment(begin, work, left, self.contention)
        return end


def _check_launches(number: int, communicator: Communicator) -> None:
    """Raise an error for a collective that not all ranks of its communicator launch."""
    fewest = min(communicator.launches)
    launching = sum(count > fewest for count in communicator.launches)
    if launching:
        fault = (
            f"communicator {number} has {len(communicator.members)} ranks and {launching} "
            f"launch its collective {fewest}"
        )
        raise ValueError(
            f"{fault}; all must launch the same ones; give the graphs of one iteration"
        )


class Timeline:
    """All ranks of an iteration, each with the clock of its host and of its compute stream.

    Parameters
    ----------
    ranks : sequence of RankTimes
        Times of each group of identical ranks.
    device : bool
        Whether kernels run on a device behind the host.
    contention : float
        Share of its rate that a kernel loses to each collective in flight [-].

    Attributes
    ----------
    period, simulated_period : float
        Time from one iteration to the next once the pattern repeats, with and without the time that
        was not simulated [s].
    latency : float
        Time of a first iteration from a common start [s].
    device_time : float
        The period if hosts that wait for nothing had launched everything before [s].
    hosts : array
        Time of the host in an iteration, by group [s].
    added : UnsimulatedTime
        What makes the period longer than the simulated one.
    host_free, stream_free : array
        When the host has launched, and the compute stream has done, all that came before, by group
        [s].
    """

    period: float
    simulated_period: float
    latency: float
    device_time: float

    def __init__(self, ranks: Sequence[RankTimes], device: bool, contention: float) -> None:
        self.ranks = ranks
        self.device = device
        self.contention = contention
        self.added = UnsimulatedTime()
        self.communicators: dict[int, Communicator] = {}
        self.collectives_of_rank = [self._list_collectives(index) for index in range(len(ranks))]
        looks_back = any(
            wait.of_previous_iteration
            for rank in ranks
            for wait in rank.group.graph.collective_waits
        )
        self.collectives: list[CollectiveInstance] = []
        for number, communicator in self.communicators.items():
            _check_launches(number, communicator)
            launched = communicator.collectives
            if looks_back:
                for collective in launched:
                    collective.of_iteration_before = CollectiveInstance(None, end=-math.inf)
                launched[0].previous = launched[-1].of_iteration_before
            self.collectives += launched
        self.sums = [rank.add_up(device) for rank in ranks]
        self.segments = [self._list_segments(index) for index in range(len(ranks))]
        self.hosts = np.array([sums.issued[-1] for sums in self.sums])
        transfers = [len(rank.group.graph.transfers) for rank in ranks]
        self.host_waits_for_device = np.array([device and count > 0 for count in transfers])
        self.host_free = np.zeros(len(ranks))
        self.stream_free = np.zeros(len(ranks))

    def _list_collectives(self, index: int) -> list[CollectiveInstance]:
        """Collectives of a group of ranks, in program order; those of all groups are matched by
        their order on a communicator."""
        rank = self.ranks[index]
        graph = rank.group.graph
        for number in dict.fromkeys(rank.group.communicators):
            communicator = self.communicators.setdefault(number, Communicator())
            communicator.members.append(index)
            communicator.launches.append(0)
        collectives = []
        columns = zip(
            graph.collectives.tolist(),
            rank.group.communicators,
            rank.durations.tolist(),
            strict=True,
        )
        for position, number, duration in columns:
            communicator = self.communicators[number]
            launched = communicator.collectives
            order = communicator.launches[-1]
            communicator.launches[-1] = order + 1
            if order == len(launched):  # this rank is the first one to launch it
                previous = launched[-1] if launched else None
                # nobody has measured that a message from one GPU to another slows their kernels
                name = graph.labels[position].name
                is_message = self.device and name == "send_recv"
                of_host = name in HOST_WORK  # engines of their own copy
                slows_kernels = self.contention > 0 and not is_message and not of_host
                collective = CollectiveInstance(
                    previous, communicator.members, slows_kernels=slows_kernels
                )
                launched.append(collective)
            collective = launched[order]
            if duration > collective.duration:
                collective.duration = duration
            collectives.append(collective)
        return collectives

    def _list_segments(self, index: int) -> list[Segment]:
        """Segments of a group of ranks, as `run` takes them."""
        issued, done, ready = self.sums[index]
        collectives = self.collectives_of_rank[index]
        segments = self.ranks[index].group.graph.segments
        begins, ends = segments.begins, segments.ends
        awaited: list[CollectiveInstance | None] = []
        for wait in segments.waits:
            if wait is None:
                awaited.append(None)
            elif wait.of_previous_iteration:
                awaited.append(collectives[wait.collective].of_iteration_before)
            else:
                awaited.append(collectives[wait.collective])
        launched = [None if number is None else collectives[number] for number in segments.launches]
        latest_ready = np.where(begins < ends, np.maximum.reduceat(ready, begins), -np.inf)
        latest_ends = latest_ready - issued[begins] + done[ends]
        columns = zip(
            (segments.follows_transfer & self.device).tolist(),
            (issued[ends] - issued[begins]).tolist(),
            (done[ends] - done[begins]).tolist(),
            latest_ends.tolist(),
            awaited,
            launched,
            strict=True,
        )
        return list(map(Segment._make, columns))

    def run(self) -> None:
        """Run one iteration of all ranks in the order of time, move their clocks on, and note when
        each segment runs."""
        host_clocks, stream_clocks = self.host_free.tolist(), self.stream_free.tolist()
        self.segment_times: list[list[SegmentTimes]] = [[] for _ in self.ranks]
        beside = CollectivesBeside(self.contention, len(self.ranks))
        for collective in self.collectives:
            before = collective.of_iteration_before
            if before is not None and collective.arrived:
                before.start, before.end = collective.start, collective.end
                if collective.slows_kernels:
                    beside.start(collective)
            collective.arrived, collective.ready, collective.end = 0, -math.inf, math.inf
        queue = [(stream_clock, rank) for rank, stream_clock in enumerate(stream_clocks)]
        heapq.heapify(queue)
        while queue:
            rank = heapq.heappop(queue)[1]
            segment_times, segments = self.segment_times[rank], self.segments[rank]
            host_free, stream_free = host_clocks[rank], stream_clocks[rank]
            for index in range(len(segment_times), len(segments)):
                segment = segments[index]
                begin = stream_free
                if segment.awaited is not None:
                    awaited_end = segment.awaited.end
                    if awaited_end == math.inf:
                        if segment.awaited.waiting_ranks is None:
                            segment.awaited.waiting_ranks = []
                        segment.awaited.waiting_ranks.append(rank)
                        break
                    if awaited_end > begin:
                        begin = awaited_end
                if segment.waits_for_device and stream_free > host_free:
                    host_free = stream_free
                end = begin + segment.device_time
                earliest_end = host_free + segment.latest_end  # once it has been launched
                if beside.in_flight[rank]:
                    end = beside.slow(rank, begin, segment.device_time)
                if earliest_end > end:
                    end = earliest_end
                # until then, a collective may start for which other ranks are not ready yet
                if beside.awaits_others[rank] and queue and end > queue[0][0]:
                    heapq.heappush(queue, (end, rank))
                    break
                segment_times.append(SegmentTimes(stream_free, host_free, begin, end))
                host_free, stream_free = host_free + segment.host_time, end
                if segment.launched is not None:
                    ready = stream_free if stream_free > host_free else host_free
                    self.arrive(rank, segment.launched, ready, queue, beside)
            host_clocks[rank], stream_clocks[rank] = host_free, stream_free
        stuck = [
            rank
            for rank, segments in enumerate(self.segments)
            if len(self.segment_times[rank]) < len(segments)
        ]
        if stuck:
            raise ValueError(self._explain_stuck(stuck))
        self.host_free, self.stream_free = np.array(host_clocks), np.array(stream_clocks)

    def _explain_stuck(self, stuck: list[int]) -> str:
        """Say that ranks wait for one another, and for what the first of them waits."""
        first = stuck[0]
        segments, segment = self.ranks[first].group.graph.segments, len(self.segment_times[first])
        position, wait = segments.begins[segment], segments.waits[segment]
        awaited = "a collective" if wait is None else f"collective {wait.collective}"
        names = ", ".join(map(str, stuck))
        return (
            f"ranks {names} wait for one another: operation {position} of rank {first} waits for "
            f"{awaited}, which another rank launches later; order the collectives alike "
            "on all"
        )

    def arrive(
        self,
        rank: int,
        collective: CollectiveInstance,
        ready: float,
        queue: list[tuple[float, int]],
        beside: CollectivesBeside,
    ) -> None:
        """Note that a rank is ready for a collective; with the last rank it starts, and waiting
        ranks go on."""
        collective.arrived += 1
        if ready > collective.ready:
            collective.ready = ready
        if collective.arrived < len(collective.members):
            if collective.slows_kernels:
                beside.wait_for_others(rank)
            return
        previous_end = -math.inf if collective.previous is None else collective.previous.end
        start = previous_end if previous_end > collective.ready else collective.ready
        collective.previous_end = previous_end
        collective.start = start
        collective.end = start + collective.duration
        if collective.slows_kernels:
            beside.stop_waiting(rank, collective)
            beside.start(collective)
        if collective.waiting_ranks:
            for waiting in collective.waiting_ranks:
                heapq.heappush(queue, (collective.end, waiting))
            collective.waiting_ranks = None

    def repeat(self, states: list[Array]) -> float:
        """Run iterations until all ranks advance by the same time, or each by the same as before;
        the longest of these.

        `states` are the clocks after earlier iterations [s]. For ranks that advance by less see
        `place_ranks_ahead`.
        """
        for _ in range(_MOST_ITERATIONS):
            ends_awaited_later = [
                collective.end for collective in self.collectives if collective.of_iteration_before
            ]
            clocks = (self.stream_free, self.host_free[self.host_waits_for_device])
            states.append(np.concatenate([*clocks, ends_awaited_later]))
            rounding = _EQUAL * abs(states[-1].max())
            for iterations in range(1, min(_LONGEST_PATTERN + 1, len(states))):
                advance = states[-1] - states[-1 - iterations]
                period = float(advance.max()) / iterations
                is_ahead = advance < advance.max() - rounding
                ranks_ahead = is_ahead[: len(self.stream_free)]
                repeats = False
                if 2 * iterations < len(states):
                    advance_before = states[-1 - iterations] - states[-1 - 2 * iterations]
                    repeats = abs(advance - advance_before).max() <= rounding
                if repeats or not is_ahead.any():
                    if ranks_ahead.any():
                        self.place_ranks_ahead(ranks_ahead, period)
                    return period
            self.run()
        return period

    def place_ranks_ahead(self, is_ahead: np.ndarray, period: float) -> None:
        """Move the clocks of ranks that advance by less than the period to where they may stay.

        Ranks that meet no slower ones in a collective begin together with the slowest. Those that
        wait for collectives of slower ones fall back on these at last: they are moved far ahead,
        and run until they wait. Others that meet slower ones are never held up, and stay.

        Parameters
        ----------
        is_ahead : array of bool
            Groups of ranks that advance by less.
        period : float
            What the slowest ranks advance by [s].
        """
        latest = self.stream_free.max()
        meets_slower = self._spread(~is_ahead, waiting_only=False)
        for rank in np.flatnonzero(~meets_slower).tolist():
            shift = latest - self.stream_free[rank]
            self.host_free[rank] += shift
            self.stream_free[rank] += shift
        waits_for_slower = is_ahead & self._spread(~is_ahead, waiting_only=True)
        if waits_for_slower.any():
            lead = _ITERATIONS_AHEAD * period
            self.host_free[waits_for_slower] -= lead
            self.stream_free[waits_for_slower] -= lead
            for _ in range(1 + int(waits_for_slower.sum())):  # each may wait for the one before
                self.run()

    def _spread(self, first: np.ndarray, *, waiting_only: bool) -> np.ndarray:
        """Groups of ranks that meet some `first` ones in a collective, or others that do; with
        `waiting_only`, those that wait for such a collective."""
        partners = []
        for rank, collectives in zip(self.ranks, self.collectives_of_rank, strict=True):
            met = collectives
            if waiting_only:
                waits = rank.group.graph.collective_waits
                met = [collectives[wait.collective] for wait in waits]
            partners.append(sorted({member for collective in met for member in collective.members}))
        reached = first.copy()
        for _ in self.ranks:
            for index, members in enumerate(partners):
                reached[index] |= reached[members].any()
        return reached

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
        if more > _ROUNDING * time:
            self.added = self.added._replace(**{cause: more})
            self.period = time

    @cached_property
    def rank_timelines(self) -> tuple[RankTimeline, ...]:
        """One iteration of all groups of ranks; the last operation of any rank ends with it.

        A rank with little to do begins its next iteration while others still end theirs: what it
        does before the iteration of the slowest ranks begins has times below zero.
        """
        timelines = tuple(self.measure(index) for index in range(len(self.ranks)))
        last_end = max(float(timeline.ends.max(initial=-math.inf)) for timeline in timelines)
        begin = last_end - self.simulated_period
        if math.isinf(begin):  # nothing runs
            begin = 0.0
        for timeline in timelines:
            for times in (timeline.starts, timeline.ends, timeline.issued):
                times -= begin
        return timelines

    def _list_collectives_beside(self, index: int) -> Array:
        """Starts and ends of the collectives that slow the kernels of a group of ranks, those of
        the iteration before included [s]."""
        in_flight = []
        for collective in self.collectives_of_rank[index]:
            if collective.slows_kernels:
                in_flight.append((collective.start, collective.end))
                before = collective.of_iteration_before
                if before is not None and before.end > -math.inf:
                    in_flight.append((before.start, before.end))
        return np.array(in_flight)

    def measure(self, index: int) -> RankTimeline:
        """What a group of ranks did in the iteration that was run last, on the clock of the
        simulation.

        Parameters
        ----------
        index : int
            Which group [-].

        Returns
        -------
        timeline : RankTimeline
            Starts, ends and waits [s].
        """
        rank = self.ranks[index]
        collectives = self.collectives_of_rank[index]
        segments = self._find_segments(index)

        # 1. Each operation starts behind the one before it, and when it has been launched.
        placed = self._place_operations(index, segments)
        if any(collective.slows_kernels for collective in collectives):
            placed = self._slow_operations(index, segments, placed)
        launched, starts, ends = placed.launched, placed.starts, placed.ends
        if not self.device:
            launched = starts.copy()

        # 2. Collectives run on streams of their own, once their last rank has arrived.
        positions = rank.group.graph.collectives
        in_flight = np.array([(one.start, one.end) for one in collectives]).reshape(-1, 2)
        arrived = np.maximum(launched, ends)[positions]
        previous_ends = np.array([collective.previous_end for collective in collectives])
        arrival_wait_time = np.zeros(len(rank.seconds))
        arrival_wait_time[positions] = np.maximum(
            in_flight[:, 0] - np.maximum(arrived, previous_ends), 0.0
        )
        starts[positions] = in_flight[:, 0]
        ends[positions] = in_flight[:, 1]

        # 3. The compute stream waits for some of them.
        waits = self._measure_waits(index, segments, arrived, in_flight)
        count = len(rank.seconds) + 1
        return RankTimeline(
            times=rank,
            period=self.period,
            simulated_period=self.simulated_period,
            device=self.device,
            starts=starts,
            ends=ends,
            issued=launched,
            arrival_wait_time=arrival_wait_time,
            stream_wait_time=np.bincount(waits.positions, waits.times, count).astype(float),
            communication_idle_time=np.bincount(
                waits.positions, waits.with_communication, count
            ).astype(float),
            contention_time=placed.contention_time,
            host_time=float(rank.host.sum() + rank.launch_interval.sum()),
            added=self.added,
        )

    def _find_segments(self, index: int) -> _RunSegments:
        """The segments of a group of ranks in the iteration that was run last."""
        segments = self.ranks[index].group.graph.segments
        first, behind_last = segments.begins, segments.ends
        has_operations = first < behind_last
        stream_free, host_free, begins, ends = np.array(self.segment_times[index]).T
        return _RunSegments(
            first=first,
            of_operation=np.repeat(np.arange(len(first)), behind_last - first),
            heads=first[has_operations],
            tails=behind_last[has_operations] - 1,
            stream_free=stream_free,
            host_free=host_free,
            begins=begins,
            ends=ends,
        )

    def _place_operations(self, index: int, segments: _RunSegments) -> _PlacedOperations:
        """When operations run if nothing slows them."""
        rank = self.ranks[index]
        issued, done, ready = self.sums[index]
        first, of_operation, heads = segments.first, segments.of_operation, segments.heads
        host_offset = (segments.host_free - issued[first])[of_operation]
        launched = issued[1:] - rank.launch_interval + host_offset
        ready_on_free_device = ready[:-1] + host_offset
        stream_offset = (segments.begins - done[first])[of_operation]
        ready_on_free_device[heads] = np.maximum(ready_on_free_device[heads], stream_offset[heads])
        ends = done[1:] + np.maximum.accumulate(ready_on_free_device)
        no_contention = np.zeros(len(rank.seconds))
        return _PlacedOperations(launched, ends - rank.seconds, ends, no_contention)

    def _slow_operations(
        self, index: int, segments: _RunSegments, placed: _PlacedOperations
    ) -> _PlacedOperations:
        """When operations run beside collectives that slow them."""
        rank, done, of_operation = self.ranks[index], self.sums[index].done, segments.of_operation
        beside = self._list_collectives_beside(index)
        begin, end = segments.begins[of_operation], segments.ends[of_operation]
        work = done[1:] - done[segments.first][of_operation]
        work_before = work - rank.seconds
        starts = _end_beside_collectives(begin, work_before, beside, self.contention)
        ends = _end_beside_collectives(begin, work, beside, self.contention)
        # segments end as in `run`, which did not know the collectives that start later
        ends = np.minimum(ends, end)
        ends[segments.tails] = end[segments.tails]
        takes_time = rank.seconds > 0
        starts = np.where(takes_time, np.minimum(starts, ends), ends)
        if self.device:  # nothing runs before it is launched
            starts = np.maximum(starts, placed.starts)
            ends = np.maximum(ends, placed.ends)
            contention_time = ends - starts - rank.seconds
        else:  # the host works on the same core, from the end of the operation before
            previous_ends = np.roll(ends, 1)
            previous_ends[segments.heads] = begin[segments.heads]
            contention_time = ends - previous_ends - rank.host - rank.seconds
        contention_time[contention_time < _ROUNDING * self.period] = 0.0
        return _PlacedOperations(placed.launched, starts, ends, contention_time)

    def _measure_waits(
        self, index: int, segments: _RunSegments, arrived: Array, in_flight: Array
    ) -> _StreamWaits:
        """How long the compute stream waits for each awaited collective, from when it is free, or
        the rank has arrived, to the end."""
        waits = self.ranks[index].group.graph.segments.waits
        is_waiting = np.array([wait is not None for wait in waits])
        present = [wait for wait in waits if wait is not None]
        awaited = np.array([wait.collective for wait in present], dtype=int)
        of_previous = np.array([wait.of_previous_iteration for wait in present], dtype=bool)
        shift = self.period * of_previous
        begins = np.maximum(segments.stream_free[is_waiting], arrived[awaited] - shift)
        ends = np.maximum(begins, in_flight[awaited, 1] - shift)
        times = ends - begins
        with_communication = times
        if of_previous.any():
            in_flight = np.concatenate([in_flight, in_flight - self.period])
        if len(awaited):
            with_communication = measure_overlap(in_flight, begins, ends)
        return _StreamWaits(segments.first[is_waiting], times, with_communication)


def simulate(ranks: Sequence[RankTimes], *, device: bool, contention: float = 0.0) -> Timeline:
    """Run all ranks on their clocks until iterations repeat.

    Parameters
    ----------
    ranks : sequence of RankTimes
        Times of each group of identical ranks. Where the ranks of a collective have different times
        for it, the longest counts.
    device : bool
        Whether kernels run on a device behind the host.
    contention : float, optional
        Share of a core that a collective in flight takes from kernels [-].

    Returns
    -------
    timeline : Timeline
        The iteration.

    Raises
    ------
    ValueError
        For waits that come before their collective, and ranks whose collectives do not match.

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
    timeline.latency = float(timeline.stream_free.max())
    slowest_host = timeline.hosts.max()
    collectives = timeline.collectives
    if device:  # hosts that wait for nothing are far ahead of their devices
        timeline.host_free[~timeline.host_waits_for_device] = -np.inf
    looks_back = any(collective.of_iteration_before for collective in collectives)
    first_states = [] if device or looks_back else [np.zeros(len(ranks))]
    timeline.period = timeline.device_time = timeline.repeat(first_states)
    if slowest_host > (1 + _EQUAL) * timeline.device_time:
        # a host is slower than all devices together: devices have done all that was launched
        is_slowest = timeline.hosts >= (1 - _EQUAL) * slowest_host
        lead = timeline.stream_free.max() + _ITERATIONS_AHEAD * slowest_host
        timeline.host_waits_for_device |= is_slowest
        timeline.host_free = np.where(is_slowest, 0.0, timeline.host_free - lead)
        timeline.stream_free -= lead
        for collective in collectives:
            collective.start -= lead
            collective.end -= lead
        timeline.period = timeline.repeat([])
    timeline.simulated_period = timeline.period
    is_far_ahead = np.isinf(timeline.host_free)  # all is launched before the device begins
    timeline.host_free[is_far_ahead] = (timeline.stream_free - timeline.hosts)[is_far_ahead]
    timeline.run()  # the iteration that is shown
    return timeline


def sum_host_updates(rank: RankTimeline) -> float:
    """Add up the updates on the host in an iteration of a rank.

    Parameters
    ----------
    rank : RankTimeline
        Its operations, and when they run.

    Returns
    -------
    time : float
        0 without offload [s].
    """
    graph = rank.graph
    durations = rank.times.durations.tolist()
    total = 0.0
    for position, duration in zip(graph.collectives.tolist(), durations, strict=True):
        if graph.labels[position].name == HOST_UPDATE:
            total += duration
    return total
