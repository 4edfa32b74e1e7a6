"""From operation times to a timeline: host clock and streams of every rank, and where they meet."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from perfkit.units import Array

__all__ = ["Host", "RankTimes", "Timeline", "simulate"]


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
    """

    per_operation: float = 0.0
    launch: float = 0.0
    asynchronous: bool = False


@dataclass(frozen=True)
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
    """

    seconds: Array
    overhead: Array
    collectives: np.ndarray
    transfers: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=int))
    launches: Array | None = None
    spacing: Array | None = None

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


@dataclass(frozen=True)
class Timeline:
    """Start and end of every operation of the last simulated iteration, and the two iteration times.

    Parameters
    ----------
    period : float
        Time from one iteration to the next once the pattern repeats [s].
    latency : float
        Time of a first iteration from a common start [s].
    starts, ends : tuple of array
        Per rank, relative to the earliest start of the iteration [s].
    waits : tuple of array
        Per rank, how long each collective waited for other ranks [s].
    """

    period: float
    latency: float
    starts: tuple[Array, ...]
    ends: tuple[Array, ...]
    waits: tuple[Array, ...]


class _Rank:
    """Clocks of one rank while the simulation runs."""

    def __init__(self, times: RankTimes, host: Host) -> None:
        self.times, self.host = times, host
        self.clock = self.front = 0.0
        self.position = 0
        self.first, self.more = times.issue(host)
        n = len(times.seconds)
        self.last = times.seconds / (np.ones(n) if times.launches is None else np.maximum(times.launches, 1.0))
        self.starts, self.ends, self.waits = np.zeros(n), np.zeros(n), np.zeros(n)

    def run_until(self, stop: int) -> None:
        """Run the operations before position `stop`, waiting for each transfer among them."""
        where = self.times.transfers
        for transfer in where[(where >= self.position) & (where < stop)]:
            self._run(int(transfer) + 1)
            self.clock = max(self.clock, self.front)
        self._run(stop)

    def _run(self, stop: int) -> None:
        part = slice(self.position, stop)
        seconds = self.times.seconds[part]
        self.position = stop
        if not len(seconds):
            return
        if self.host.asynchronous:
            issued = self.clock + np.cumsum(self.first[part] + self.more[part])
            done = np.cumsum(seconds)
            ready = np.maximum(issued - self.more[part] + seconds, issued + self.last[part])
            ends = done + np.maximum(np.maximum.accumulate(ready - done), self.front)
            self.clock, self.front = float(issued[-1]), float(ends[-1])
        else:
            ends = self.clock + np.cumsum(self.times.overhead[part] + seconds)
            self.clock = self.front = float(ends[-1])
        self.ends[part], self.starts[part] = ends, ends - seconds

    def meet(self, position: int) -> float:
        """Reach the collective at `position`; returns when this rank's part is ready."""
        self.run_until(position)
        self.clock += float(self.first[position])
        return max(self.clock, self.front)

    def leave(self, ready: float, start: float, end: float) -> None:
        """The collective has run from `start` to `end`."""
        self.starts[self.position], self.ends[self.position] = start, end
        self.waits[self.position] = start - ready
        self.position += 1
        self.front = end
        if not self.host.asynchronous:
            self.clock = end


def _iterate(ranks: Sequence[_Rank], durations: Array) -> None:
    """One iteration of all ranks."""
    for rank in ranks:
        rank.position = 0
    for number, duration in enumerate(durations):
        ready = [rank.meet(int(rank.times.collectives[number])) for rank in ranks]
        start = max(ready)
        for rank, own in zip(ranks, ready, strict=True):
            rank.leave(own, start, start + float(duration))
    for rank in ranks:
        rank.run_until(len(rank.times.seconds))


def _settle(ranks: Sequence[RankTimes], durations: Array, host: Host) -> float:
    """Time from one iteration to the next in the long run."""
    own = [rank.seconds if host.asynchronous else rank.seconds + rank.overhead for rank in ranks]
    totals = np.array([float(work.sum()) for work in own])
    chain = float(totals.max())
    if len(durations):
        reached = np.array([np.cumsum(work)[rank.collectives] for work, rank in zip(own, ranks, strict=True)])
        between = np.diff(reached, axis=1, prepend=(reached[:, -1] - totals)[:, None])
        chain = float(durations.sum() + between.max(axis=0).sum())
    if not host.asynchronous:
        return chain
    return max(chain, *(float(sum(part.sum() for part in rank.issue(host))) for rank in ranks))


def simulate(ranks: Sequence[RankTimes], durations: Array, host: Host, *, iterations: int = 50) -> Timeline:
    """Run a few iterations of all ranks on their clocks.

    Parameters
    ----------
    ranks : sequence of RankTimes
        What each rank executes; identical ones need not be repeated.
    durations : array
        Time of each collective, in program order and the same for all ranks [s].
    host : Host
        Host overheads.
    iterations : int
        Most iterations to run; they end once the pattern repeats [-].

    Returns
    -------
    timeline : Timeline
        Period, latency and the operations of the last iteration.

    Notes
    -----
    A collective starts when the last rank's part is ready and ends on all ranks together; the compute stream waits for
    its end, as after a blocking PyTorch call. Kernels on a device start when the one before has ended and the host has
    launched them; kernels of a CPU run on the host clock itself. In the long run the slowest host sets the period, or
    the chain from collective to collective by way of the slowest rank, whichever takes longer; where hosts wait for
    transfers, both chains cross, and the period is what iterations that repeat take.

    Examples
    --------
    >>> one = RankTimes(np.array([2.0, 0.0, 1.0]), np.zeros(3), np.array([1]))
    >>> other = RankTimes(np.array([5.0, 0.0, 1.0]), np.zeros(3), np.array([1]))
    >>> timeline = simulate([one, other], np.array([0.5]), Host())
    >>> timeline.period, float(timeline.waits[0][1])
    (6.5, 3.0)
    """
    states, finished = [_Rank(times, host) for times in ranks], [0.0]
    crossed = host.asynchronous and any(len(rank.transfers) for rank in ranks)
    period, begin = 0.0 if crossed else _settle(ranks, durations, host), 0.0
    for number in range(iterations):
        begin = min(min(state.clock, state.front) if host.asynchronous else state.clock for state in states)
        _iterate(states, durations)
        finished.append(max(max(state.clock, state.front) for state in states))
        settled = number >= 2 and abs(finished[-1] - finished[-2] - period) <= 1e-9 * period
        if crossed:
            period = finished[-1] - finished[-2]
        if settled:
            break
    return Timeline(
        period=period,
        latency=finished[1],
        starts=tuple(state.starts - begin for state in states),
        ends=tuple(state.ends - begin for state in states),
        waits=tuple(state.waits for state in states),
    )
