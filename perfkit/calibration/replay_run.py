"""Replay of recorded steps: what waits for what, and how long an iteration takes if something
changes.

A recorded run is a graph of items: launches and waits of the host, works on streams, and
collectives in which ranks meet. Each begins when all that it comes after have ended. With the
recorded times the replay gives the recorded run; with other times or links it says what a change
brings, so that time which something else hides counts as nothing. The idea is that of Daydream (H.
Zhu et al., "Daydream: Accurately Estimating the Efficacy of Optimizations for DNN Training", USENIX
ATC 2020).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

#: Times that work beside collectives is timed again, each time with the overlap of the time before
#: [-]: a choice.
_PASSES = 2


class Link(NamedTuple):
    """What an item comes after.

    Parameters
    ----------
    item : int
        Number of the item before [-].
    lag : float
        Least time from its end [s].
    kind : str
        ``host`` (the order of the host's calls; the lag is the host's own time), ``launch``,
        ``stream`` (the order of a stream), ``wait`` (a stream that waited for another one),
        ``input`` (a collective and the work that was launched before it), ``meet`` (a rank that is
        ready for a collective), ``blocked`` (the host that waits for its device), or ``maybe`` (a
        wait that the trace allows and does not show).
    """

    item: int
    lag: float
    kind: str


@dataclass(slots=True)
class Item:
    """One thing that happens in a recorded run.

    Parameters
    ----------
    kind : str
        ``launch`` or ``block`` of the host, ``work`` of a device, or ``meeting``: the transfer of a
        collective once all its ranks are ready.
    rank : int
        Of a meeting, the first of its ranks [-].
    step : int
        Its number, -1 for an unmarked step [-].
    begin, end : float
        As recorded, on the clock of the first rank [s].
    name : str
        Of the operator, or of the host's call.
    work : str
        Class of the kernels, as in `Graph`; empty on the host.
    role : str
        ``compute``, ``communication`` or ``copies``; empty on the host.
    phase : str
        Of the training step.
    stream : int
        -1 on the host [-].
    caller : str
        Operator around a call of the host.
    nbytes : float
        Size of the message of a collective; 0 if it is unknown [B].
    group : str
        Ranks of a collective.
    ranks : int
        How many they are [-].
    loading : float
        Part of the time of the host before this item in which it loads data [s].
    outside : float
        Part of it in no operator and no call of the device's runtime, but for calls that allocate,
        and in no loading: Python, mostly [s].
    transfer : float
        Least time that the transfer of a lone rank's collective may take; its other time is a wait
        that one rank does not show [s].
    kernel : str
        The kernel and the dimensions of the operands of its operator: equal ones do equal work if it
        is sized.
    is_sized : bool
        Whether the trace has these dimensions.
    meets : int
        Of a rank's kernel that is ready for a collective: the meeting with which it ends; -1 for
        none [-].
    """

    kind: str
    rank: int
    step: int
    begin: float
    end: float
    name: str
    work: str = ""
    role: str = ""
    phase: str = ""
    stream: int = -1
    caller: str = ""
    nbytes: float = 0.0
    group: str = ""
    ranks: int = 1
    loading: float = 0.0
    outside: float = 0.0
    transfer: float = 0.0
    kernel: str = ""
    is_sized: bool = False
    meets: int = -1

    @property
    def is_collective(self) -> bool:
        """Whether it is the transfer of a collective."""
        return self.work == "collective" and self.meets < 0


@dataclass(eq=False)
class Run:
    """Consecutive recorded steps of all ranks as a graph of items.

    Parameters
    ----------
    items : list of Item
        What happens.
    seconds : list of float
        How long each takes [s].
    links : list of list of Link
        What each comes after.
    delays : list of float
        Time from the end of all that each comes after to its begin that the trace does not explain
        [s].
    floors : list of float
        When an item begins at the earliest, minus infinity for those that come after others [s].
    lead : int or None
        Step before the first one that counts; None where one step alone was recorded, which counts
        from its begin [-].
    steps : tuple of int
        Steps that count [-].
    begins : dict of int to float
        By rank, when a lone step begins [s].
    contention : float
        Share of its rate that work loses to each collective beside it [-].
    recorded_contention : float
        That share in the recorded times of work [-].
    order : list of int or None
        Numbers of items so that each comes after all that it waits for; None if links have been
        added since it was found [-].
    """

    items: list[Item]
    seconds: list[float]
    links: list[list[Link]]
    delays: list[float]
    floors: list[float]
    lead: int | None
    steps: tuple[int, ...]
    begins: dict[int, float] = field(default_factory=dict)
    contention: float = 0.0
    recorded_contention: float = 0.0
    order: list[int] | None = None

    def copy(self) -> "Run":
        """A run that can be changed; items are shared."""
        return replace(
            self,
            items=list(self.items),
            seconds=list(self.seconds),
            links=list(self.links),
            delays=list(self.delays),
            floors=list(self.floors),
        )

    def add(self, item: Item, seconds: float, links: list[Link]) -> int:
        """Add an item, and give its number."""
        self.order = None
        self.items.append(item)
        self.seconds.append(seconds)
        self.links.append(links)
        self.delays.append(0.0)
        self.floors.append(-math.inf)
        return len(self.items) - 1

    @property
    def ranks(self) -> list[int]:
        """Ranks that were read."""
        return sorted(self.begins)


class Replayed(NamedTuple):
    """When everything happens.

    Parameters
    ----------
    begins, ends : list of float
        Of each item [s].
    time : float
        Of an iteration, mean over ranks [s].
    """

    begins: list[float]
    ends: list[float]
    time: float


def sort_items(run: Run) -> list[int]:
    """Numbers of items so that each comes after all that it waits for.

    Parameters
    ----------
    run : Run
        The run.

    Returns
    -------
    order : list of int
        In the order of their recorded begin, as far as links allow [-].

    Raises
    ------
    ValueError
        If items wait for one another, as those of ranks whose collectives do not match.
    """
    followers: list[list[int]] = [[] for _ in run.items]
    missing = [0] * len(run.items)
    for number, links in enumerate(run.links):
        missing[number] = len(links)
        for link in links:
            followers[link[0]].append(number)
    ready = [(run.items[number].begin, number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for follower in followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (run.items[follower].begin, follower))
    if len(order) < len(run.items):
        stuck = next(number for number, count in enumerate(missing) if count)
        item = run.items[stuck]
        raise ValueError(
            f"traces cannot be replayed: {item.name} of rank {item.rank} waits for itself through other ranks; read "
            "the ranks of one job, or one of them"
        )
    return order


def replay(run: Run, *, tight: bool = False) -> Replayed:
    """Run the items of recorded steps again.

    Parameters
    ----------
    run : Run
        Recorded, or changed.
    tight : bool, optional
        Whether streams also wait where the trace only allows it, see `Link`.

    Returns
    -------
    replayed : Replayed
        Times of all items, and of an iteration.

    Notes
    -----
    An item begins at the latest of the ends of what it comes after, each with its lag. Work beside
    collectives takes longer by the contention of the run: it is timed again with the overlap of the
    time before.
    """
    if run.order is None:
        run.order = sort_items(run)
    begins, ends = _place(run, run.seconds, run.order, tight)
    has_collectives = any(item.is_collective for item in run.items)
    if has_collectives and (run.contention > 0 or run.recorded_contention > 0):
        beside = Beside(run)
        alone = _time_alone(run, beside)
        for _ in range(_PASSES):
            seconds = _slow(run, alone, beside.measure(begins, ends), begins, ends)
            begins, ends = _place(run, seconds, run.order, tight)
    return Replayed(begins, ends, _measure(run, ends))


def _place(
    run: Run, seconds: Sequence[float], order: Sequence[int], tight: bool
) -> tuple[list[float], list[float]]:
    """Begin and end of every item [s]."""
    begins, ends = [0.0] * len(run.items), [0.0] * len(run.items)
    delays, floors, links = run.delays, run.floors, run.links
    for number in order:
        begin = floors[number]
        for item, lag, kind in links[number]:
            after = ends[item] + lag
            if after > begin and (tight or kind != "maybe"):
                begin = after
        begin += delays[number]
        begins[number] = begin
        ends[number] = begin + seconds[number]
    return begins, ends


class Beside:
    """Which items compute on each rank, and which collectives its ranks run beside them.

    Parameters
    ----------
    run : Run
        Its items.
    """

    def __init__(self, run: Run) -> None:
        self.count = len(run.items)
        self.computing: dict[int, np.ndarray] = {}
        self.collectives: dict[int, np.ndarray] = {}
        computing: dict[int, list[int]] = {rank: [] for rank in run.ranks}
        collectives: dict[int, list[int]] = {rank: [] for rank in run.ranks}
        for number, item in enumerate(run.items):
            if item.role == "compute":
                computing[item.rank].append(number)
            elif item.is_collective:
                members = [item.rank]
                if item.kind == "meeting":
                    listed = {int(text) for text in item.group.split(", ") if text.isdigit()}
                    members = [rank for rank in run.ranks if rank in listed] or run.ranks
                for rank in members:
                    collectives[rank].append(number)
        for rank in run.ranks:
            self.computing[rank] = np.array(computing[rank], dtype=int)
            self.collectives[rank] = np.array(collectives[rank], dtype=int)

    def measure(self, begins: Sequence[float], ends: Sequence[float]) -> np.ndarray:
        """Time of each item of computation in which a collective of its rank is in flight.

        Parameters
        ----------
        begins, ends : sequence of float
            When each item happens [s].

        Returns
        -------
        beside : array
            Zero for all other items [s].
        """
        beside = np.zeros(self.count)
        starts, stops = np.array(begins), np.array(ends)
        for rank, works in self.computing.items():
            numbers = self.collectives[rank]
            if not len(numbers) or not len(works):
                continue
            numbers = numbers[np.argsort(starts[numbers], kind="stable")]
            low, high = starts[numbers], np.maximum.accumulate(stops[numbers])
            low = np.maximum(low, np.append(-np.inf, high[:-1]))
            edges = np.ravel(np.column_stack([low, np.maximum(high, low)]))
            lengths = np.diff(edges) * (np.arange(len(edges) - 1) % 2 == 0)
            covered = np.append(0.0, np.cumsum(lengths))
            beside[works] = np.interp(stops[works], edges, covered) - np.interp(
                starts[works], edges, covered
            )
        return beside


def _time_alone(run: Run, beside: Beside) -> np.ndarray:
    """What each item would take with no collective beside it [s]."""
    seconds = np.array(run.seconds)
    if run.recorded_contention == 0:
        return seconds
    begins = [item.begin for item in run.items]
    ends = [item.end for item in run.items]
    length = np.maximum(np.array(ends) - np.array(begins), 1e-12)
    share = np.clip(beside.measure(begins, ends) / length, 0.0, 1.0)
    return seconds * (1.0 - run.recorded_contention * share)


def _slow(
    run: Run,
    alone: np.ndarray,
    beside: np.ndarray,
    begins: Sequence[float],
    ends: Sequence[float],
) -> list[float]:
    """Times of items beside the collectives of a replay [s]."""
    length = np.maximum(np.array(ends) - np.array(begins), 1e-12)
    share = np.clip(beside / length, 0.0, 1.0)
    slowed: list[float] = (alone / (1.0 - run.contention * share)).tolist()
    return slowed


def _measure(run: Run, ends: Sequence[float]) -> float:
    """Time of an iteration, mean over ranks [s]."""
    last_ends: dict[tuple[int, int], float] = {}
    host_times: dict[int, float] = dict.fromkeys(run.ranks, 0.0)
    counted = set(run.steps)
    for number, item in enumerate(run.items):
        if item.kind == "work":
            place = (item.rank, item.step)
            end = ends[number] if item.meets < 0 else ends[item.meets]
            last_ends[place] = max(last_ends.get(place, -math.inf), end)
        elif item.kind != "meeting" and item.step in counted:
            for link in run.links[number]:
                if link.kind == "host":
                    host_times[item.rank] += link.lag
    times = []
    for rank in run.ranks:
        last = last_ends.get((rank, run.steps[-1]), -math.inf)
        if run.lead is None:
            times.append(last - run.begins[rank])
            continue
        before = last_ends.get((rank, run.lead), -math.inf)
        period = (last - before) / len(run.steps)
        # a host that launches more slowly than its device works is ahead only for a while
        times.append(max(period, host_times[rank] / len(run.steps)))
    return float(np.mean(times))
