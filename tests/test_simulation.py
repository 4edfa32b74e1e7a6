"""The simulation of ranks, streams and their collectives, by hand and against an oracle, and the views
of its timeline."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import polars
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perfkit.prediction import accounts
from perfkit.prediction.breakdown import break_down
from perfkit.prediction.ranks import RankGroup, RankTimes
from perfkit.prediction.simulation import (
    RankTimeline,
    Timeline,
    _end_beside_collectives,
    _end_segment,
    simulate,
)
from perfkit.workloads.columns import Accesses, Features, Wait, Waits
from perfkit.workloads.graph import Graph, Label

seconds = st.floats(0, 10, allow_subnormal=False)
Work = Sequence[float | str]


def make(
    work: Work,
    host: float = 0.0,
    *,
    waits: Any = None,
    launch_interval: float = 0.0,
    launches: int = 1,
    modules: Sequence[str] = (),
    transfers: Sequence[int] = (),
    rank: int = 0,
    durations: Sequence[float] = (),
) -> RankTimes:
    """Operations of so many seconds; a letter is a collective on a communicator, a to z."""
    n = len(work)
    collectives = [place for place, value in enumerate(work) if isinstance(value, str)]
    communicators = [ord(str(work[place])) - ord("a") for place in collectives]
    features = Features.zeros(n)
    features.group[collectives] = communicators
    features.nbytes[:] = 64
    features.launches[:] = launches

    def find_kind(place: int) -> str:
        if place in collectives:
            return "collective"
        if place in transfers:
            return "transfer"
        return "elementwise"

    def find_phase(place: int) -> str:
        """A third of the operations in each."""
        if place < n / 3:
            return "forward"
        if place < 2 * n / 3:
            return "backward"
        return "update"

    def find_module(place: int) -> str:
        """As stated, or two modules in turns; updates belong to none."""
        if modules:
            return modules[place]
        if find_phase(place) == "update":
            return ""
        return "net.one.part" if place % 2 == 0 else "net.two.part"

    labels = []
    for place in range(n):
        kind = find_kind(place)
        labels.append(Label(kind, kind, kind, find_phase(place), find_module(place)))
    rows = None
    if waits is not None:  # numbers below 0 are collectives of the iteration before
        rows = Waits.from_rows(
            [Wait(place, number % len(collectives), number < 0) for place, number in waits]
        )
    groups = ((0, 1), (0, 1)) if "b" in work else ()
    graph = Graph(tuple(labels), features, Accesses.from_rows(), waits=rows, groups=groups)
    seconds = np.array([0.0 if isinstance(value, str) else value for value in work])
    return RankTimes(
        RankGroup(graph, (rank,), 1.0, {}, communicators),
        seconds,
        np.full(n, host),
        np.full(n, launch_interval),
        np.array(durations, dtype=float),
    )


def run(
    ranks: Sequence[RankTimes],
    durations: Sequence[float] = (),
    device: bool = False,
    contention: float = 0.0,
) -> Timeline:
    """Simulate ranks; the n-th collective of each takes the n-th duration."""
    timed = []
    for rank in ranks:
        own = durations[: len(rank.group.communicators)]
        timed.append(replace(rank, durations=np.array(own, dtype=float)))
    return simulate(timed, device=device, contention=contention)


#: Three kernels whose results are reduced, and a fourth one that waits for all of them.
BUCKETS = make([4, "a", 4, "a", 4, "a", 2], waits=[(6, 0), (6, 1), (6, 2)])


class ByHand(NamedTuple):
    """What ranks run, and how long their iterations take."""

    law: str
    ranks: list[RankTimes]
    period: float
    latency: float | None = None  # of the first iteration; None: not worked out
    durations: Sequence[float] = ()
    device: bool = True
    contention: float = 0.0


BY_HAND = [
    ByHand("a CPU adds up", [make([1.0, 2.0, 3.0], 0.5)], 7.5, 7.5, device=False),
    ByHand("the device waits for the host", [make([1e-6] * 50, 3e-5)], 50 * 3e-5, 50 * 3e-5 + 1e-6),
    ByHand("the first launch is seen", [make([1e-3] * 50, 3e-5)], 50 * 1e-3, 50 * 1e-3 + 3e-5),
    ByHand("the device catches up", [make([1e-6] * 10 + [1e-3] * 10, 1e-5)], 10 * 1e-6 + 10 * 1e-3),
    ByHand("chains that differ little", [make([10.0001], 10.0)], 10.0001, 20.0001),
    ByHand("two kernels that differ little", [make([1.0, 9.9999], 5.0)], 10.9999, 19.9999),
    ByHand(
        "ranks that differ by a millionth",
        [make([9.0, "a"], 5.0), make([10.00001, "a"])],
        10.00001,
        durations=[0.0],
    ),
    ByHand(
        "the last of ten launches starts at 10",
        [make([1.0], 1.0, launch_interval=9.0, launches=10)],
        10.0,
        10.1,
    ),
    ByHand(
        "the last bucket alone is seen on a device",
        [BUCKETS, BUCKETS],
        12 + 3 + 2,
        17,
        durations=[3, 3, 3],
    ),
    ByHand(
        "the last bucket alone is seen on a CPU",
        [BUCKETS, BUCKETS],
        17,
        17,
        durations=[3, 3, 3],
        device=False,
    ),
    ByHand(
        "a shared core hides nothing",
        [BUCKETS, BUCKETS],
        12 + 9 + 2,
        23,
        durations=[3, 3, 3],
        device=False,
        contention=1.0,
    ),
    ByHand(
        "half of a core hides half",
        [BUCKETS, BUCKETS],
        4 + 5.5 + 5.5 + 3 + 2,
        durations=[3, 3, 3],
        device=False,
        contention=0.5,
    ),
    ByHand(
        "two collectives at once take the whole core",
        [make([4, "a", "b", 4], waits=[(4, 0), (4, 1)])],
        10,
        10,
        durations=[2, 2],
        device=False,
        contention=0.5,
    ),
    ByHand("buckets go one after another", [BUCKETS], 4 + 18 + 2, durations=[6, 6, 6]),
    ByHand(
        "buckets of two communicators go together",
        [make([4, "a", 4, "b", 4, "a", 2], waits=[(6, 0), (6, 1), (6, 2)])],
        18 + 2,
        durations=[6, 6, 6],
    ),
    ByHand(
        "a collective hides under what is launched late",
        [make([1, "a", 1], 10.0, waits=[(2, 0)])],
        30,
        31,
        durations=[8.0],
    ),
    ByHand(
        "a collective is hidden by the next iteration",
        [make([1, 2, 3, "a"], waits=[(2, -1)])],
        6,
        6,
        durations=[2.5],
    ),
    ByHand(
        "a collective is half hidden by the next iteration",
        [make([1, 2, 3, "a"], waits=[(1, -1)])],
        1 + 1.5 + 2 + 3,
        6,
        durations=[2.5],
    ),
    ByHand(
        "the first iteration waits for nothing",
        [make([1, "a"], waits=[(0, -1)])],
        6,
        1,
        durations=[5.0],
    ),
    ByHand(
        "ranks of two communicators do not meet",
        [make([1, "a"]), make([5, "b"])],
        6,
        6,
        durations=[1.0],
        device=False,
    ),
    ByHand(
        "a rank without a collective",
        [make([1, "a"]), make([1.0])],
        2,
        2,
        durations=[1.0],
        device=False,
    ),
]


@pytest.mark.parametrize("case", BY_HAND, ids=lambda case: case.law)
def test_iterations_by_hand(case: ByHand) -> None:
    timeline = run(case.ranks, case.durations, case.device, case.contention)
    assert timeline.period == pytest.approx(case.period, rel=1e-12)
    if case.latency is not None:
        assert timeline.latency == pytest.approx(case.latency, rel=1e-12)


def test_operations_of_a_cpu_start_after_their_host_time() -> None:
    [rank_timeline] = run([make([1.0, 2.0, 3.0], 0.5)]).rank_timelines
    assert rank_timeline.starts.tolist() == [0.5, 2.0, 4.5]
    assert rank_timeline.ends.tolist() == [1.5, 4.0, 7.5]


@pytest.mark.parametrize("device", [True, False])
def test_collectives_start_beside_what_follows_them(device: bool) -> None:
    rank_timeline = run([BUCKETS, BUCKETS], [3, 3, 3], device).rank_timelines[0]
    assert rank_timeline.starts.tolist() == [0, 4, 4, 8, 8, 12, 15]
    assert rank_timeline.stream_wait_time.tolist() == [0, 0, 0, 0, 0, 0, 3, 0]
    assert rank_timeline.communication_idle_time.sum() == 3


def test_what_collectives_take_from_a_core_is_contention() -> None:
    rank_timeline = run([BUCKETS, BUCKETS], [3, 3, 3], contention=1.0).rank_timelines[0]
    assert rank_timeline.ends.tolist() == [4, 7, 11, 14, 18, 21, 23]
    assert rank_timeline.contention_time.sum() == 6
    assert rank_timeline.communication_idle_time.sum() == 3


def test_collectives_wait_for_one_another_and_for_no_other_rank() -> None:
    [rank_timeline] = run([BUCKETS], [6, 6, 6], True).rank_timelines
    assert rank_timeline.starts[[1, 3, 5]].tolist() == [4, 10, 16]
    assert rank_timeline.stream_wait_time[6] == rank_timeline.communication_idle_time[6] == 22 - 12
    assert not rank_timeline.arrival_wait_time.any()


def test_a_stream_waits_while_it_is_idle_anyway() -> None:
    [rank_timeline] = run([make([1, "a", 1], 10.0, waits=[(2, 0)])], [8.0], True).rank_timelines
    assert rank_timeline.stream_wait_time.tolist() == [0, 0, 8, 0]
    assert rank_timeline.starts[2] - rank_timeline.ends[1] == 2


def test_ranks_of_two_communicators_start_at_once() -> None:
    first, second = run([make([1, "a"]), make([5, "b"])], [1.0]).rank_timelines
    assert first.starts[0] == 0
    assert second.starts[0] == 0


def test_kernels_that_wait_for_their_launch_lose_nothing_to_a_collective() -> None:
    kernels = make(["a", 1.0, "b", 1.0, 1.0], 10.0, waits=[(5, 0), (5, 1)])
    rank_timeline = run([kernels], [25.0, 0.0], True, contention=0.5).rank_timelines[0]
    assert rank_timeline.period == 50.0
    assert (rank_timeline.ends - rank_timeline.starts).tolist() == [25, 1, 0, 1, 1]
    causes = break_down(rank_timeline)
    assert (causes.contention_time, causes.host) == (0.0, 47.0)
    # the last kernel is launched in time, and slower for one second
    kernels = make(["a", 6.0, 6.0], 4.0, waits=[(3, 0)])
    rank_timeline = run([kernels], [14.0], True, contention=0.5).rank_timelines[0]
    durations = (rank_timeline.ends - rank_timeline.starts)[1:]
    assert break_down(rank_timeline).contention_time == durations.sum() - 12.0 > 0.0


def test_a_collective_of_the_iteration_before_slows_kernels() -> None:
    for device in (True, False):
        ranks = [make([4.0, "a", 1.0], waits=[(1, -1)])]
        rank_timeline = run(ranks, [3.0], device, contention=0.5).rank_timelines[0]
        assert rank_timeline.period == 6.5
        assert (rank_timeline.ends - rank_timeline.starts)[[0, 2]].tolist() == [4.5, 2.0]
        assert rank_timeline.contention_time.tolist() == [0.5, 0.0, 1.0]
        assert break_down(rank_timeline).host == 0.0


def test_operations_too_short_for_the_clock_end_before_the_collective_that_they_launch() -> None:
    ranks = [make(["a", "a", "a", "a"], 1e-300)]
    [rank_timeline] = run(ranks, [0.0, 0.0, 0.0, 1.0], contention=1.0).rank_timelines
    assert rank_timeline.issued.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert rank_timeline.starts.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_ranks_that_are_ahead_hold_up_nobody() -> None:
    # rank 1 waits for what rank 0 did in the iteration before
    ranks = [make(["a", 1.0], 1.0, waits=[(1, 0)]), make([2.0, "a"], waits=[(1, -1)], rank=1)]
    timeline = run(ranks, [0.0])
    slow, fast = map(break_down, timeline.rank_timelines)
    assert timeline.period == 3.0
    assert (slow.wait_time_for_ranks, slow.host) == (0.0, 2.0)
    assert (fast.wait_time_for_ranks, fast.host) == (1.0, 0.0)
    # rank 1 waits for nothing, and rank 0 for rank 1, which is ahead
    ranks = [make(["a", 7.0], waits=[(1, 0)]), make([5.0, "a"], waits=[], rank=1)]
    timeline = run(ranks, [0.0])
    assert timeline.period == 7.0
    assert timeline.rank_timelines[0].starts.tolist() == [0.0, 0.0]
    assert timeline.rank_timelines[0].wait_time_for_ranks == 0.0


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [make([1, "a", 1], waits=[(1, 0)])],
            "ranks 0 wait for one another: operation 1 of rank 0 waits for collective 0",
        ),
        ([make(["a", "a"]), make(["a"])], "has 2 ranks and 1 launch its collective 1"),
        (
            [make(["a", "b"]), make(["b", "a"])],
            "ranks 0, 1 wait for one another: operation 1 of rank 0 waits for coll",
        ),
    ],
)
def test_what_cannot_run_is_refused(ranks: list[RankTimes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(ranks, [1.0, 1.0])


# Against every event in fractions.


class Machine:
    """Hosts, streams and collectives in fractions, one event after the other."""

    def __init__(self, ranks: list[RankTimes], device: bool, contention: float) -> None:
        self.ranks = ranks
        self.device = device
        self.contention = Fraction(contention)
        self.now = Fraction(0)
        self.passed: set[tuple] = set()  # what was launched, has ended and has landed
        self.ready: dict[tuple, set[int]] = {}  # ranks that have launched a collective
        self.flying: dict[tuple, Fraction] = {}  # when collectives that run will end
        self.done: list[list[Fraction]] = [[] for _ in ranks]

    def members(self, key: tuple) -> set[int]:
        return {rank for rank, mine in enumerate(self.ranks) if key[0] in mine.group.communicators}

    def key(self, rank: int, iteration: int, number: int) -> tuple:
        """Communicator, iteration, and how many of its collectives come before in the iteration."""
        keys = self.ranks[rank].group.communicators
        return keys[number], iteration, keys[:number].count(keys[number])

    def host(self, rank: int, iterations: int) -> Iterator:
        """Seconds that the host of a device works, and what it waits for."""
        for iteration in range(iterations):
            for place, work in enumerate(self.ranks[rank].host):
                yield Fraction(work)
                self.passed.add(("launched", rank, iteration, place))
                if place in self.ranks[rank].group.graph.transfers:
                    yield "ended", rank, iteration, place

    def stream(self, rank: int, iterations: int) -> Iterator:
        """Seconds that a compute stream works, and what it waits for."""
        mine = self.ranks[rank]
        graph = mine.group.graph
        collectives = graph.collectives.tolist()
        for iteration in range(iterations):
            for place in range(len(mine.seconds) + 1):
                for wait in graph.collective_waits:
                    if wait.operation == place:
                        of_iteration = iteration - wait.of_previous_iteration
                        yield self.key(rank, of_iteration, wait.collective)
                if place < len(mine.seconds):
                    work = Fraction(mine.seconds[place])
                    if self.device:
                        yield "launched", rank, iteration, place
                    else:
                        work = Fraction(mine.seconds[place] + mine.host[place])
                    yield work
                    self.passed.add(("ended", rank, iteration, place))
                if place in collectives:
                    key = self.key(rank, iteration, collectives.index(place))
                    self.ready.setdefault(key, set()).add(rank)
            self.done[rank].append(self.now)

    def meet(self) -> None:
        """Start the collectives that all ranks have launched, and end those whose time is over."""
        for key in list(self.ready):
            if self.can_start(key):
                self.flying[key] = self.now + Fraction(self.find_duration(key))
            if key in self.flying and self.flying[key] <= self.now:
                del self.flying[key], self.ready[key]
                self.passed.add(key)

    def can_start(self, key: tuple) -> bool:
        """Whether all ranks have come and no earlier collective of the communicator is left."""
        for other in self.ready:
            if other[0] == key[0] and other[1:] < key[1:]:
                return False
        return self.ready[key] == self.members(key) and key not in self.flying

    def find_duration(self, key: tuple) -> float:
        """The longest of what ranks say of a collective."""
        longest = 0.0
        for rank in self.ready[key]:
            for number, duration in enumerate(self.ranks[rank].durations):
                if self.key(rank, key[1], number) == key:
                    longest = max(longest, duration)
        return longest

    def run(self, iterations: int) -> list[Fraction]:
        """When each iteration is done on all ranks."""
        for rank, mine in enumerate(self.ranks):  # nothing is left from before the first iteration
            self.passed |= {self.key(rank, -1, number) for number in range(len(mine.durations))}
        agents: list[tuple[Iterator, int | None]] = []  # with the rank whose collectives slow it
        for rank in range(len(self.ranks)):
            agents.append((self.stream(rank, iterations), rank))
            if self.device:
                agents.append((self.host(rank, iterations), None))
        wants: dict[Iterator, Any] = {agent: None for agent, _ in agents}
        while True:
            self.go_on(wants)
            active = []
            for agent, rank in agents:
                beside = sum(rank in self.members(key) for key in self.flying)
                rate = max(1 - self.contention * beside, 0)
                if rate and isinstance(wants[agent], Fraction):
                    active.append((agent, rate))
            steps = [end - self.now for end in self.flying.values()]
            steps += [wants[agent] / rate for agent, rate in active]
            if not steps:
                assert all(len(done) == iterations for done in self.done), "nothing moves"
                return [max(ends) for ends in zip(*self.done, strict=True)]
            for agent, rate in active:
                wants[agent] -= min(steps) * rate
            self.now += min(steps)

    def go_on(self, wants: dict[Iterator, Any]) -> None:
        """Let all go on that have done their work or got what they waited for, until none can."""
        moved = True
        while moved:
            before = (len(self.passed), len(self.flying))
            self.meet()
            free = [agent for agent, want in wants.items() if not want or want in self.passed]
            for agent in free:
                wants[agent] = next(agent, ("over",))
            moved = bool(free) or before != (len(self.passed), len(self.flying))


@st.composite
def meshes(
    draw: st.DrawFn, contention: bool = False, whole: bool = True, device: bool | None = None
) -> tuple[list, bool, float]:
    """One to three ranks, two communicators, collectives in one order, and waits anywhere after
    them."""
    small = st.integers(0, 5) if whole else seconds
    short = st.integers(0, 2) if whole else seconds
    count = draw(st.integers(1, 3))
    members = [range(count), draw(st.sets(st.integers(0, count - 1), min_size=1))]
    order = draw(st.lists(st.tuples(st.integers(0, 1), small), max_size=4))
    if device is None:
        device = not contention and draw(st.booleans())
    late = draw(st.booleans())
    ranks = []
    for rank in range(count):
        mine = [(key, length) for key, length in order if rank in members[key]]
        work: list[float | str] = draw(st.lists(small, max_size=2))
        for key, _ in mine:
            work += ["ab"[key], *draw(st.lists(small, max_size=2))]
        if not work:
            work = [1]
        collectives = [place for place, value in enumerate(work) if isinstance(value, str)]
        waits = draw_waits(draw, len(work), collectives)
        transfers = []
        for place in range(len(work)):
            if place not in collectives and device and draw(st.integers(0, 5)) == 0:
                transfers.append(place)
        ranks.append(
            make(
                work,
                draw(short),
                waits=waits if late else None,
                transfers=transfers,
                rank=rank,
                durations=[float(length) for _, length in mine],
            )
        )
    return ranks, device, draw(st.sampled_from([0.5, 1.0])) if contention else 0.0


def draw_waits(
    draw: st.DrawFn, operations: int, collectives: Sequence[int]
) -> list[tuple[int, int]]:
    """Operations that wait for collectives before them, or for some of the iteration before."""
    waits = []
    left = []
    for number, place in enumerate(collectives):
        if draw(st.booleans()):
            waits.append((draw(st.integers(place + 1, operations)), number))
        else:
            left.append(number)
    for number in left:
        if draw(st.integers(0, 3)) == 0:
            waits.append((draw(st.integers(0, operations)), number - len(collectives)))
    return waits


@given(meshes() | meshes(contention=True))
def test_any_schedule_takes_as_long_as_event_by_event(mesh: tuple[list, bool, float]) -> None:
    ranks, device, contention = mesh
    timeline = simulate(ranks, device=device, contention=contention)
    ends = Machine(*mesh).run(25 if contention else 72)
    if not waits_for_previous_iteration(ranks):
        assert timeline.latency == pytest.approx(float(ends[0]), abs=1e-9)
    assert timeline.period == pytest.approx(float(ends[-1] - ends[-13]) / 12, abs=1e-9)


def waits_for_previous_iteration(ranks: list[RankTimes]) -> bool:
    """Whether an iteration leaves something for the next one."""
    for rank in ranks:
        for wait in rank.group.graph.collective_waits:
            if wait.of_previous_iteration:
                return True
    return False


def add_up_contention(timeline: Timeline, index: int) -> float:
    """What the operations of a group of ranks take longer than alone [s].

    On a device, each kernel from its start to its end. On a CPU, what its host does for it is
    slower, too: all that runs without waiting, from its begin to its end.
    """
    rank_timeline = timeline.rank_timelines[index]
    if timeline.device:
        longer = rank_timeline.ends - rank_timeline.starts - rank_timeline.times.seconds
        return float(longer[rank_timeline.compute].sum())
    durations = [times.end - times.begin for times in timeline.segment_times[index]]
    times = rank_timeline.times
    return sum(durations) - float(times.host.sum() + times.seconds.sum())


@given(
    meshes(whole=False)
    | meshes(whole=False, contention=True)
    | meshes(whole=False, contention=True, device=True)
)
def test_contention_is_what_operations_take_longer_in_the_timeline(
    mesh: tuple[list, bool, float],
) -> None:
    ranks, device, contention = mesh
    timeline = simulate(ranks, device=device, contention=contention)
    near = 1e-6 * max(timeline.period, 1)
    for index, rank_timeline in enumerate(timeline.rank_timelines):
        causes = break_down(rank_timeline)
        assert causes.contention_time == pytest.approx(add_up_contention(timeline, index), abs=near)
        assert accounts.sum_idle(rank_timeline)["contention_s"] == pytest.approx(
            causes.contention_time, abs=near
        )
        parts = [seconds for _, seconds in causes.list_parts().values()]
        assert sum(parts) == pytest.approx(timeline.period, abs=near)
        assert min(parts) >= 0


@given(
    meshes(whole=False)
    | meshes(whole=False, contention=True)
    | meshes(whole=False, contention=True, device=True)
)
def test_where_the_time_of_a_rank_goes(mesh: tuple[list, bool, float]) -> None:
    ranks, device, contention = mesh
    timeline = simulate(ranks, device=device, contention=contention)
    near = 1e-9 * max(timeline.period, 1)
    for rank, rank_timeline in zip(ranks, timeline.rank_timelines, strict=True):
        check_operations(rank, rank_timeline, near, slowed=contention > 0)
        check_waits(rank, rank_timeline, near)
        idle = accounts.sum_idle(rank_timeline)
        assert sum(idle.values()) == pytest.approx(timeline.period, rel=1e-6, abs=1e-6)
        assert min(idle.values()) >= 0
        host = 0.0 if device else rank.host.sum()
        assert idle["host_s"] >= host - 1e-6
        modules = accounts.sum_modules(rank_timeline, 2)
        assert modules["operations"].sum() == len(rank_timeline.starts)
        if len(rank_timeline.compute) > 0:
            columns = modules.select("forward_s", "backward_s", "update_s")
            parts = columns.sum_horizontal().sum()
            assert parts == pytest.approx(timeline.period, rel=1e-6, abs=1e-6)
    check_meetings(ranks, timeline)


def check_operations(
    rank: RankTimes, rank_timeline: RankTimeline, near: float, slowed: bool
) -> None:
    """Operations of the compute stream follow one another and take their time, or more if they are
    slowed down; all start when they are issued or later, and end within the period."""
    assert (rank_timeline.ends <= rank_timeline.period + near).all()
    assert (rank_timeline.starts >= rank_timeline.issued - near).all()
    starts = rank_timeline.starts[rank_timeline.compute]
    ends = rank_timeline.ends[rank_timeline.compute]
    assert (starts[1:] >= ends[:-1] - near).all()
    alone = rank.seconds[rank_timeline.compute]
    assert (ends - starts >= alone - near).all()
    if not slowed:
        assert ends - starts == pytest.approx(alone, abs=near)


def check_waits(rank: RankTimes, rank_timeline: RankTimeline, near: float) -> None:
    """What waits for a collective starts after its end, and no wait is negative."""
    assert (rank_timeline.arrival_wait_time >= -near).all()
    assert (rank_timeline.communication_idle_time >= 0).all()
    assert (rank_timeline.stream_wait_time >= rank_timeline.communication_idle_time - near).all()
    graph = rank.group.graph
    for wait in graph.collective_waits:
        end = rank_timeline.ends[graph.collectives[wait.collective]]
        if wait.of_previous_iteration:
            end -= rank_timeline.period
        if wait.operation < len(rank_timeline.starts):
            assert rank_timeline.starts[wait.operation] >= end - near


def check_meetings(ranks: list[RankTimes], timeline: Timeline) -> None:
    """The n-th collective of a communicator runs at one time on all ranks, of which the last one to
    come waits for none."""
    starts = defaultdict(list)
    ends = defaultdict(list)
    waits = defaultdict(list)
    for rank, rank_timeline in zip(ranks, timeline.rank_timelines, strict=True):
        seen: Counter[int] = Counter()
        for key, place in zip(rank.group.communicators, rank.group.graph.collectives, strict=True):
            seen[key] += 1
            meeting = (key, seen[key])
            starts[meeting].append(rank_timeline.starts[place])
            ends[meeting].append(rank_timeline.ends[place])
            waits[meeting].append(rank_timeline.arrival_wait_time[place])
    for meeting in starts:
        assert np.ptp(starts[meeting]) <= 1e-6
        assert np.ptp(ends[meeting]) <= 1e-6
        assert min(waits[meeting]) <= 1e-6


# Views of a timeline.


@given(meshes(whole=False))
def test_the_critical_path_has_no_gap(mesh: tuple[list, bool, float]) -> None:
    ranks, device, contention = mesh
    timeline = simulate(ranks, device=device, contention=contention)
    computes = [len(rank_timeline.compute) > 0 for rank_timeline in timeline.rank_timelines]
    if timeline.period <= 1e-3 or not all(computes):
        return
    path = accounts.find_critical_path(timeline.rank_timelines)
    steps = path.select("start_s", "end_s").rows()
    length = sum(end - start for start, end in steps)
    assert length == pytest.approx(timeline.period, rel=1e-6, abs=1e-6)
    for (_, end_before), (start, _) in pairwise(steps):
        assert end_before == pytest.approx(start, abs=1e-6)


@given(meshes(whole=False))
def test_slices_of_a_trace_do_not_overlap_but_for_modules_which_nest(
    mesh: tuple[list, bool, float],
) -> None:
    ranks, device, contention = mesh
    timeline = simulate(ranks, device=device, contention=contention)
    events = json.loads(json.dumps(accounts.list_events(timeline.rank_timelines, {0: 0})))
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            span = (event["ts"], event["ts"] + event["dur"])
            threads[event["pid"], event["tid"]].append(span)
    for (_, thread), spans in threads.items():
        around: list[float] = []  # ends of the slices that are still open
        for start, end in spans:
            while around and around[-1] <= start + 2e-3:
                around.pop()
            if around:
                assert thread == 0, "only modules are inside of others"
                assert end <= around[-1] + 2e-3
            around.append(end)


def test_idle_time_by_cause_and_the_path_over_ranks() -> None:
    """Rank 0 computes 1 s, waits 3 s for rank 5, both reduce for 2 s, of which 0.5 s are under an
    operation."""
    ranks = [
        make([1.0, "a", 0.5, 1.0], waits=[(3, 0)], rank=0),
        make([4.0, "a", 0.5, 1.0], waits=[(3, 0)], rank=5),
    ]
    rank_timelines = run(ranks, [2.0]).rank_timelines
    assert rank_timelines[0].period == 7
    fast = list(accounts.sum_idle(rank_timelines[0]).values())
    # half a second of the waiting is under the operation
    assert fast == pytest.approx([2.5, 0.0, 0.0, 2.0, 2.5])
    slow = list(accounts.sum_idle(rank_timelines[1]).values())
    assert slow == pytest.approx([5.5, 0.0, 0.0, 1.5, 0.0])
    path = accounts.find_critical_path(rank_timelines).select("rank", "stream", "operation").rows()
    assert path == [(5, "compute", 0), (5, "communication", 1), (5, "compute", 3)]
    path = accounts.find_critical_path(run([make([1.0, "a", 1.0], 0.5)], [3.0]).rank_timelines)
    assert path["stream"].to_list() == [
        "host",
        "compute",
        "host",
        "communication",
        "host",
        "compute",
    ]
    for kernel, stream in ((1e-6, "host"), (1e-3, "compute")):
        timeline = run([make([kernel] * 9, 3e-5)], device=True)
        path = accounts.find_critical_path(timeline.rank_timelines)
        assert set(path["stream"]) == {stream}
        assert set(path["operation"]) == set(range(9))


def test_modules_and_spans_in_program_order() -> None:
    modules = ["net.a.x", "net.a.y", "net.b", "net.b", "net.a.x", ""]
    rank = make([1.0, 2.0, 3.0, "a", 4.0, 5.0], modules=modules)
    [rank_timeline] = run([rank], [0.5]).rank_timelines
    rows = accounts.sum_modules(rank_timeline, 2).drop("share").rows()
    assert rows == [
        ("net.a", 3, 3.0, 0.0, 4.0, 0.0),
        ("net.b", 2, 0.0, 3.5, 0.0, 0.5),
        ("", 1, 0.0, 0.0, 5.0, 0.0),
    ], "the collective is its module's"
    assert accounts.sum_modules(rank_timeline, None)["module"].to_list() == [
        "net.a.x",
        "net.a.y",
        "net.b",
        "",
    ]
    assert accounts.sum_modules(rank_timeline, 1)["operations"].to_list() == [5, 1]
    rank_timelines = run([make([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], modules=modules)]).rank_timelines
    spans = accounts.list_spans(accounts.list_operations(rank_timelines), "module", 2)
    assert spans.select("phase", "module", "operations", "start_s", "end_s").rows() == [
        ("forward", "net.a", 2, 0.0, 3.0),
        ("backward", "net.b", 2, 3.0, 10.0),
        ("update", "net.a", 1, 10.0, 15.0),
        ("update", "", 1, 15.0, 21.0),
    ]


def test_a_table_of_operations_has_a_row_for_each_rank_and_operation() -> None:
    ranks = [make([1.0, "a", 0.5], rank=0), make([2.0, "a", 0.5], rank=5)]
    frame = accounts.list_operations(run(ranks, [2.0]).rank_timelines)
    assert frame.columns == [
        "rank",
        "stream",
        "operation",
        "name",
        "kind",
        "phase",
        "module",
        "start_s",
        "end_s",
    ]
    assert frame["rank"].to_list() == [0, 0, 0, 5, 5, 5]
    for rank in (0, 5):
        streams = frame.filter(polars.col("rank") == rank)["stream"].to_list()
        assert streams == ["compute", "communication", "compute"]
    assert frame.filter(polars.col("kind") == "collective")["start_s"].to_list() == [2.0, 2.0]


def test_updates_belong_to_the_modules_whose_parameters_they_change() -> None:
    modules = [("forward", "a"), ("forward", "b"), ("backward", "a")]
    modules += [("update", ""), ("update", ""), ("update", ""), ("update", "")]
    labels = tuple(Label("add", "elementwise", "add", phase, module) for phase, module in modules)
    first, second, gradient, state, step = range(5)
    # operation, buffer and bytes
    touched = [
        (0, first, 8),
        (1, second, 24),
        (2, gradient, 8),
        (3, state, 8),
        (4, state, 8),
        (4, gradient, 8),
        (5, first, 8),
        (5, second, 24),
        (6, step, 4),
    ]
    graph = Graph(labels, Features.zeros(7), Accesses.from_rows([(*row, False) for row in touched]))
    rank = RankTimes(
        RankGroup(graph, (0,), 1.0, {}, []), np.ones(7), np.zeros(7), np.zeros(7), np.zeros(0)
    )
    [rank_timeline] = run([rank]).rank_timelines
    frame = accounts.sum_modules(rank_timeline, 2)
    assert frame.select("module", "update_s").rows() == [("a", 1 + 1 + 0.25), ("b", 0.75), ("", 1)]


def test_a_trace_shows_ranks_streams_and_sizes() -> None:
    ranks = [
        make([1.0, "a", 0.5, "b", 1.0], waits=[(4, 0), (5, 1)], rank=0),
        make([4.0, "a", 0.5, "b", 1.0], waits=[(4, 0), (5, 1)], rank=1),
    ]
    rank_timelines = run(ranks, [2.0, 0.25]).rank_timelines
    events = accounts.list_events(rank_timelines, {0: 0, 1: 1, 5: 1})
    assert {event["pid"] for event in events} == {0, 1, 5}
    names = {}
    for event in events:
        if event["ph"] == "M" and "name" in event["args"]:
            names[event["pid"], event.get("tid")] = event["args"]["name"]
    assert names[1, None] == "rank 1"
    assert names[1, 3] == "communication 0"
    assert names[1, 4] == "communication 1"
    slices = [event for event in events if event["ph"] == "X" and event["tid"] in (2, 3, 4)]
    assert len(slices) == 3 * 5
    busy = 0.0
    for event in slices:
        assert event["args"]["bytes"] == 64
        if event["pid"] == 0 and names[0, event["tid"]] == "compute":
            busy += event["dur"]
    assert busy == pytest.approx(accounts.sum_idle(rank_timelines[0])["busy_s"] * 1e6)


def test_a_breakdown_has_a_field_for_each_cause() -> None:
    timeline = run([make([1.0, "a", 1.0]), make([5.0, "a", 1.0])], [2.0], device=True)
    assert timeline.period == 8.0
    timeline.extend("host_device_synchronization", 9.0)
    timeline.extend("loading", 12.0)
    causes = break_down(timeline.measure(0))
    kernels = {(part.phase, part.kind): part.time for part in causes.kernels}
    assert kernels == {("forward", "elementwise"): 1.0, ("update", "elementwise"): 1.0}
    assert causes.communication_idle_time == pytest.approx(2.0)
    assert causes.contention_time == 0.0
    assert causes.wait_time_for_ranks == pytest.approx(4.0)
    assert causes.host == 0.0
    assert causes.host_device_synchronization == 1.0
    assert causes.loading == 3.0
    assert causes.sum_by_resource()["imbalance"] == causes.wait_time_for_ranks
    parts = causes.list_parts()
    assert parts["", "waiting"] == (1, causes.wait_time_for_ranks)
    assert parts["", "host_device_synchronization"] == (1, 1.0)
    assert ("", "host") not in parts
    assert sum(seconds for _, seconds in parts.values()) == pytest.approx(12.0)


@example(0, 3, [(3, 2)], 1.0)  # ends where a pause begins
@given(
    st.integers(0, 8),
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=4),
    st.sampled_from([0.25, 0.5, 1.0]),
)
def test_one_segment_ends_when_many_do(
    begin: int, work: int, drawn: list[tuple[int, int]], contention: float
) -> None:
    in_flight = [(float(start), float(start + length)) for start, length in drawn]
    one = _end_segment(float(begin), float(work), in_flight, contention)
    many = _end_beside_collectives(
        np.array([float(begin)]), np.array([float(work)]), np.array(in_flight), contention
    )
    assert one == pytest.approx(float(many[0]), rel=1e-9)
