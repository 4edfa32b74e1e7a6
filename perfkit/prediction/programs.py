"""What every rank executes, cut where ranks and streams meet, and an order in which all of it can be run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from perfkit.units import Array

__all__ = ["LAUNCH", "MEET", "RUN", "SYNC", "WAIT", "Host", "Program", "RankTimes", "Schedule", "arrange"]

#: Steps: operations one after another, the launch of a collective, the collective itself, a wait for its end, and the
#: host's wait for its device.
RUN, LAUNCH, MEET, WAIT, SYNC = range(5)


@dataclass(frozen=True)
class Host:
    """Time the host adds around operations.

    Parameters
    ----------
    per_operation : float
        Host time of each operation outside its kernel: T1 + T2 + T3 of a launching operation [s].
    launch : float
        Host time of one kernel launch, T4; zero where kernels run on the host itself [s].
    asynchronous : bool
        Whether kernels run on a device of their own, behind the host.
    contention : float
        Share of its time that a collective in flight takes from the kernels beside it, where these run on the host
        [-].
    """

    per_operation: float = 0.0
    launch: float = 0.0
    asynchronous: bool = False
    contention: float = 0.0


@dataclass(frozen=True, eq=False)
class RankTimes:
    """What one rank executes.

    Parameters
    ----------
    seconds : array
        Time of each operation in program order; zero for collectives [s].
    overhead : array
        Host time before the first launch of each operation [s].
    collectives : array of int
        Positions of the collectives among the operations [-].
    transfers : array of int, optional
        Positions of the operations for whose end the host waits [-].
    launches : array, optional
        Kernels of each operation: one, unless given; an operation of none is a part of the one before [-].
    spacing : array, optional
        Host time from the first to the last launch of each operation; zero unless given [s].
    waits : array of int, optional
        Rows of the position of an operation, and the number of a collective that has to end before it; the number of
        operations stands for the end of the iteration, which waits for all. By default every collective is waited for
        at once [-].
    communicators : sequence of int, optional
        Communicator of each collective: all ranks that name it take part, in the same order; by default one for all
        [-].
    """

    seconds: Array
    overhead: Array
    collectives: np.ndarray
    transfers: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=int))
    launches: Array | None = None
    spacing: Array | None = None
    waits: np.ndarray | None = None
    communicators: Sequence[int] | None = None

    def issue(self, host: Host) -> tuple[Array, Array]:
        """Host time of each operation up to its first launch, and from there to its last.

        Parameters
        ----------
        host : Host
            Host overheads.

        Returns
        -------
        first, more : array
            Times [s].
        """
        launches = np.ones(len(self.seconds)) if self.launches is None else self.launches
        more = np.zeros(len(self.seconds)) if self.spacing is None else self.spacing
        return self.overhead + host.launch * np.minimum(launches, 1.0), more

    def find_waits(self) -> list[tuple[int, int]]:
        """Positions that wait, and the collectives they wait for, the end of the iteration for what nobody else does.

        Returns
        -------
        waits : list of (int, int)
            Position and number of the collective, in order of position [-].

        Raises
        ------
        ValueError
            For a wait that is not after its collective, or for a collective that does not exist.
        """
        count, n = len(self.collectives), len(self.seconds)
        if self.waits is None:
            return [(int(place) + 1, number) for number, place in enumerate(self.collectives)]
        pairs = sorted((int(place), int(number)) for place, number in self.waits)
        for place, number in pairs:
            if not (0 <= number < count and self.collectives[number] < place <= n):
                raise ValueError(
                    f"waits has operation {place} wait for collective {number}; it must be one of the {count} "
                    f"collectives, and before one of the {n} operations; record the iteration again"
                )
        waited = {number for _, number in pairs}
        return pairs + [(n, number) for number in range(count) if number not in waited]


@dataclass(frozen=True, eq=False)
class Program:
    """The steps of one rank, and each run of operations as three numbers.

    Parameters
    ----------
    times : RankTimes
        What the rank executes.
    host : Host
        Host overheads.
    steps : tuple of (int, int)
        `RUN` and its number, `LAUNCH` and the number of the collective, `WAIT` and the number of the wait, or `SYNC`.
    spans : tuple of slice
        Operations of every run.
    runs : tuple of (float, float, float)
        Of every run: time of the host, time of the device, and time from the host's start to the end of the last
        kernel where the device is free [s].
    waits : tuple of (int, int)
        Position and number of the collective of every wait.
    first, more : array
        Host time of each operation up to its first launch, and from there to its last [s].
    last : array
        Time of the last kernel of each operation [s].
    """

    times: RankTimes
    host: Host
    steps: tuple[tuple[int, int], ...]
    spans: tuple[slice, ...]
    runs: tuple[tuple[float, float, float], ...]
    waits: tuple[tuple[int, int], ...]
    first: Array
    more: Array
    last: Array

    @property
    def overlaps(self) -> bool:
        """Whether operations run between the launch of a collective and the wait for it."""
        return any(place != self.times.collectives[number] + 1 for place, number in self.waits)

    @classmethod
    def compile(cls, times: RankTimes, host: Host) -> "Program":
        """Cut a rank's operations at collectives, waits and transfers.

        Parameters
        ----------
        times : RankTimes
            What the rank executes.
        host : Host
            Host overheads.

        Returns
        -------
        program : Program
            Its steps.
        """
        n, waits = len(times.seconds), times.find_waits()
        number_at = {int(place): number for number, place in enumerate(times.collectives)}
        transfers = {int(place) + 1 for place in times.transfers} if host.asynchronous else set()
        awaited: dict[int, list[int]] = {}
        for index, (place, _) in enumerate(waits):
            awaited.setdefault(place, []).append(index)
        cuts = {0, n, *number_at, *(place + 1 for place in number_at), *transfers, *awaited}
        steps: list[tuple[int, int]] = []
        spans: list[slice] = []
        for begin, stop in pairwise([*sorted(cuts), n]):
            steps += [(SYNC, 0)] * (begin in transfers) + [(WAIT, index) for index in awaited.get(begin, ())]
            if begin in number_at:
                steps.append((LAUNCH, number_at[begin]))
            elif begin < n:
                steps.append((RUN, len(spans)))
                spans.append(slice(begin, stop))
        first, more = times.issue(host)
        last = times.seconds / (1.0 if times.launches is None else np.maximum(times.launches, 1.0))
        runs = _summarise(times, host, spans, first, more, last)
        return cls(times, host, tuple(steps), tuple(spans), runs, tuple(waits), first, more, last)


def _summarise(
    times: RankTimes, host: Host, spans: Sequence[slice], first: Array, more: Array, last: Array
) -> tuple[tuple[float, float, float], ...]:
    """Host time, device time and reach of every run, from sums over all operations."""
    if not spans:
        return ()
    begins, stops = (np.array([getattr(span, end) for span in spans]) for end in ("start", "stop"))
    if not host.asynchronous:
        total = np.concatenate([[0.0], np.cumsum(times.overhead + times.seconds)])
        each = total[stops] - total[begins]
        return tuple((time, 0.0, time) for time in each.tolist())
    issued, done = (np.concatenate([[0.0], np.cumsum(parts)]) for parts in (first + more, times.seconds))
    ready = np.maximum(issued[1:] - more + times.seconds, issued[1:] + last) - done[1:]
    edges = np.stack([begins, stops], axis=1).ravel()
    latest = np.maximum.reduceat(np.append(ready, -np.inf), edges)[::2]
    reach = latest - issued[begins] + done[stops]
    issue, device = issued[stops] - issued[begins], done[stops] - done[begins]
    return tuple(zip(issue.tolist(), device.tolist(), reach.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Schedule:
    """All ranks' steps in an order in which each comes after what it waits for.

    Parameters
    ----------
    steps : tuple of (int, int, int)
        Kind, rank, and number of the run, collective, wait, or for `MEET` of the meeting.
    meetings : tuple of tuple of int
        Meeting of every rank's every collective.
    keys : tuple of int
        Communicator of every meeting.
    members : tuple of tuple of int
        Ranks at every meeting.
    durations : tuple of float
        Time of every meeting [s].
    """

    steps: tuple[tuple[int, int, int], ...]
    meetings: tuple[tuple[int, ...], ...]
    keys: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    durations: tuple[float, ...]


def arrange(programs: Sequence[Program], durations: Sequence[Array]) -> Schedule:
    """Match the collectives of all ranks and put all steps in order.

    Parameters
    ----------
    programs : sequence of Program
        One per rank.
    durations : sequence of array
        Time of each rank's collectives; of those that meet the longest counts [s].

    Returns
    -------
    schedule : Schedule
        The order.

    Raises
    ------
    ValueError
        Where ranks do not launch as many collectives on a communicator, or wait for one another.
    """
    found: dict[tuple[int, int], int] = {}
    meetings: list[tuple[int, ...]] = []
    members: list[list[int]] = []
    lengths: list[float] = []
    for rank, (program, own) in enumerate(zip(programs, durations, strict=True)):
        keys = program.times.communicators
        seen: dict[int, int] = {}
        numbers = []
        for key, duration in zip([0] * len(own) if keys is None else keys, own.tolist(), strict=True):
            seen[key] = seen.get(key, -1) + 1
            numbers.append(found.setdefault((key, seen[key]), len(found)))
            if numbers[-1] == len(members):
                members.append([])
                lengths.append(0.0)
            members[numbers[-1]].append(rank)
            lengths[numbers[-1]] = max(lengths[numbers[-1]], duration)
        meetings.append(tuple(numbers))
    for (key, index), number in found.items():
        if members[number] != members[found[key, 0]]:
            raise ValueError(
                f"communicator {key} has {len(members[found[key, 0]])} ranks and {len(members[number])} launch its "
                f"collective {index}; all must launch the same ones; give the graphs of one iteration"
            )
    steps = _order(programs, meetings, members)
    return Schedule(steps, tuple(meetings), tuple(key for key, _ in found), tuple(map(tuple, members)), tuple(lengths))


def _order(
    programs: Sequence[Program], meetings: Sequence[Sequence[int]], members: Sequence[Sequence[int]]
) -> tuple[tuple[int, int, int], ...]:
    """Every rank's steps, and each meeting once its last rank has launched it."""
    steps: list[tuple[int, int, int]] = []
    missing, reached = [len(ranks) for ranks in members], [0] * len(programs)
    before = -1
    while before < len(steps):
        before = len(steps)
        for rank, program in enumerate(programs):
            for code, part in program.steps[reached[rank] :]:
                if code == WAIT and missing[meetings[rank][program.waits[part][1]]]:
                    break
                steps.append((code, rank, part))
                reached[rank] += 1
                if code == LAUNCH:
                    meeting = meetings[rank][part]
                    missing[meeting] -= 1
                    if not missing[meeting]:
                        steps.append((MEET, rank, meeting))
    stuck = [rank for rank, program in enumerate(programs) if reached[rank] < len(program.steps)]
    if stuck:
        part = programs[stuck[0]].steps[reached[stuck[0]]][1]
        place, number = programs[stuck[0]].waits[part]
        raise ValueError(
            f"ranks {', '.join(map(str, stuck))} wait for one another: operation {place} of rank {stuck[0]} waits for "
            f"collective {number}, which another rank launches only later; order the collectives alike on all ranks"
        )
    return tuple(steps)
