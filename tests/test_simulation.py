"""The simulation of ranks, streams and their collectives, by hand and against an oracle, and the views
of its timeline."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import polars
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perfkit.prediction import accounts
from perfkit.prediction.breakdown import break_down
from perfkit.prediction.ranks import RankGroup, RankTimes
from perfkit.prediction.simulation import (
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
    n, features = len(work), Features.zeros(len(work))
    at = [place for place, value in enumerate(work) if isinstance(value, str)]
    keys = [ord(str(work[place])) - ord("a") for place in at]
    features.group[at] = keys
    features.nbytes[:], features.launches[:] = 64, launches
    kinds = [
        "collective" if i in at else "transfer" if i in transfers else "elementwise"
        for i in range(n)
    ]
    phases = [
        "forward" if i < n / 3 else "backward" if i < 2 * n / 3 else "update" for i in range(n)
    ]
    paths = modules or [
        f"net.{('one', 'two')[i % 2]}.part" if i < 2 * n / 3 else "" for i in range(n)
    ]
    labels = tuple(
        Label(kind, kind, kind, phase, path)
        for kind, phase, path in zip(kinds, phases, paths, strict=True)
    )
    rows = None
    if waits is not None:  # numbers below 0 are collectives of the iteration before
        rows = Waits.from_rows([Wait(place, key % len(at), key < 0) for place, key in waits])
    graph = Graph(
        labels,
        features,
        Accesses.from_rows(),
        waits=rows,
        groups=((0, 1), (0, 1)) if "b" in work else (),
    )
    values = np.array([0.0 if isinstance(value, str) else value for value in work])
    times = np.full(n, host), np.full(n, launch_interval), np.array(durations, dtype=float)
    return RankTimes(RankGroup(graph, (rank,), 1.0, {}, keys), values, *times)


def run(
    ranks: Sequence[RankTimes], durations: Sequence[float] = (), device: bool = False, **how: Any
) -> Timeline:
    each = [np.array(durations[: len(rank.group.communicators)], dtype=float) for rank in ranks]
    ranks = [replace(rank, durations=own) for rank, own in zip(ranks, each, strict=True)]
    return simulate(ranks, device=device, **how)


BUCKETS, AFTER = [4, "a", 4, "a", 4, "a", 2], {"waits": [(6, 0), (6, 1), (6, 2)]}


@pytest.mark.parametrize(
    ("ranks", "durations", "how", "period", "latency"),
    [
        ([make([1.0, 2.0, 3.0], 0.5)], [], {}, 7.5, 7.5),  # a CPU adds up
        # the device waits for the host
        ([make([1e-6] * 50, 3e-5)], [], {"device": True}, 50 * 3e-5, 50 * 3e-5 + 1e-6),
        # the first launch is seen
        ([make([1e-3] * 50, 3e-5)], [], {"device": True}, 50 * 1e-3, 50 * 1e-3 + 3e-5),
        # it catches up
        (
            [make([1e-6] * 10 + [1e-3] * 10, 1e-5)],
            [],
            {"device": True},
            10 * 1e-6 + 10 * 1e-3,
            None,
        ),
        (
            [make([10.0001], 10.0)],
            [],
            {"device": True},
            10.0001,
            20.0001,
        ),  # chains that differ little
        ([make([1.0, 9.9999], 5.0)], [], {"device": True}, 10.9999, 19.9999),
        # by a millionth
        ([make([9.0, "a"], 5.0), make([10.00001, "a"])], [0.0], {"device": True}, 10.00001, None),
        # the last starts at 10
        ([make([1.0], 1.0, launch_interval=9.0, launches=10)], [], {"device": True}, 10.0, 10.1),
        # the last bucket alone is seen
        ([make(BUCKETS, **AFTER)] * 2, [3, 3, 3], {"device": True}, 12 + 3 + 2, 17),
        ([make(BUCKETS, **AFTER)] * 2, [3, 3, 3], {}, 17, 17),
        # a shared core hides nothing
        ([make(BUCKETS, **AFTER)] * 2, [3, 3, 3], {"contention": 1.0}, 12 + 9 + 2, 23),
        ([make(BUCKETS, **AFTER)] * 2, [3, 3, 3], {"contention": 0.5}, 4 + 5.5 + 5.5 + 3 + 2, None),
        # two at once take it all
        ([make([4, "a", "b", 4], waits=[(4, 0), (4, 1)])], [2, 2], {"contention": 0.5}, 10, 10),
        (
            [make(BUCKETS, **AFTER)],
            [6, 6, 6],
            {"device": True},
            4 + 18 + 2,
            None,
        ),  # one after another
        # on two streams
        ([make([4, "a", 4, "b", 4, "a", 2], **AFTER)], [6, 6, 6], {"device": True}, 18 + 2, None),
        # under what is launched late
        ([make([1, "a", 1], 10.0, waits=[(2, 0)])], [8.0], {"device": True}, 30, 31),
        # hidden by the next iteration
        ([make([1, 2, 3, "a"], waits=[(2, -1)])], [2.5], {"device": True}, 6, 6),
        ([make([1, 2, 3, "a"], waits=[(1, -1)])], [2.5], {"device": True}, 1 + 1.5 + 2 + 3, 6),
        # the first one waits for nothing
        ([make([1, "a"], waits=[(0, -1)])], [5.0], {"device": True}, 6, 1),
        ([make([1, "a"]), make([5, "b"])], [1.0], {}, 6, 6),  # they do not meet
        ([make([1, "a"]), make([1.0])], [1.0], {}, 2, 2),  # a rank without a collective
    ],
)
def test_iterations_by_hand(ranks, durations, how, period, latency):
    timeline = run(ranks, durations, **how)
    assert timeline.period == pytest.approx(period, rel=1e-12)
    assert latency is None or timeline.latency == pytest.approx(latency, rel=1e-12)


def test_starts_waits_and_contention_by_hand() -> None:
    rank_timeline = run([make([1.0, 2.0, 3.0], 0.5)]).rank_timelines[0]
    assert (rank_timeline.starts.tolist(), rank_timeline.ends.tolist()) == (
        [0.5, 2.0, 4.5],
        [1.5, 4.0, 7.5],
    )
    for device in (True, False):
        rank_timeline = run([make(BUCKETS, **AFTER)] * 2, [3, 3, 3], device).rank_timelines[0]
        assert rank_timeline.starts.tolist() == [0, 4, 4, 8, 8, 12, 15]
        assert (
            rank_timeline.stream_wait_time.tolist() == [0, 0, 0, 0, 0, 0, 3, 0]
            and rank_timeline.exposed_time.sum() == 3
        )
    rank_timeline = run([make(BUCKETS, **AFTER)] * 2, [3, 3, 3], contention=1.0).rank_timelines[0]
    assert rank_timeline.ends.tolist() == [4, 7, 11, 14, 18, 21, 23] and (
        rank_timeline.contention_time.sum(),
        rank_timeline.exposed_time.sum(),
    ) == (6, 3)
    rank_timeline = run([make(BUCKETS, **AFTER)], [6, 6, 6], True).rank_timelines[0]
    assert (
        rank_timeline.starts[[1, 3, 5]].tolist() == [4, 10, 16]
        and rank_timeline.stream_wait_time[6] == rank_timeline.exposed_time[6] == 22 - 12
    )
    assert not rank_timeline.arrival_wait_time.any(), "no other rank is waited for"
    rank_timeline = run([make([1, "a", 1], 10.0, waits=[(2, 0)])], [8.0], True).rank_timelines[0]
    assert rank_timeline.stream_wait_time.tolist() == [0, 0, 8, 0], (
        "for that the stream is idle anyway"
    )
    assert rank_timeline.starts[2] - rank_timeline.ends[1] == 2
    assert [
        rank_timeline.starts[0]
        for rank_timeline in run([make([1, "a"]), make([5, "b"])], [1.0]).rank_timelines
    ] == [0, 0]


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
    ranks = [make(["a"] * 4, 1e-300)]
    rank_timeline = run(ranks, [0.0, 0.0, 0.0, 1.0], contention=1.0).rank_timelines[0]
    assert rank_timeline.issued.tolist() == rank_timeline.starts.tolist() == [0.0] * 4


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
        run(ranks, [1.0] * 2)


# Against every event in fractions.


class Machine:
    """Hosts, streams and collectives in fractions, one event after the other."""

    def __init__(self, ranks: list[RankTimes], device: bool, contention: float) -> None:
        self.ranks, self.device, self.contention, self.now = (
            ranks,
            device,
            Fraction(contention),
            Fraction(0),
        )
        self.passed: set[tuple] = set()  # what was launched, has ended and has landed
        self.ready: dict[tuple, set[int]] = {}
        self.flying: dict[tuple, Fraction] = {}
        self.done: list[list[Fraction]] = [[] for _ in ranks]

    def members(self, key: tuple) -> set[int]:
        return {rank for rank, mine in enumerate(self.ranks) if key[0] in mine.group.communicators}

    def key(self, rank: int, iteration: int, number: int) -> tuple:
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
        mine, places = self.ranks[rank], self.ranks[rank].group.graph.collectives.tolist()
        for iteration in range(iterations):
            for place in range(len(mine.seconds) + 1):
                yield from (
                    self.key(rank, iteration - wait.of_previous_iteration, wait.collective)
                    for wait in mine.group.graph.collective_waits
                    if wait.operation == place
                )
                if place < len(mine.seconds):
                    if self.device:
                        yield "launched", rank, iteration, place
                    yield Fraction(mine.seconds[place] + (0 if self.device else mine.host[place]))
                    self.passed.add(("ended", rank, iteration, place))
                if place in places:
                    self.ready.setdefault(
                        self.key(rank, iteration, places.index(place)), set()
                    ).add(rank)
            self.done[rank].append(self.now)

    def meet(self) -> None:
        for key in list(self.ready):
            first = not any(other[0] == key[0] and other[1:] < key[1:] for other in self.ready)
            if self.ready[key] == self.members(key) and first and key not in self.flying:
                pairs = [
                    (rank, n)
                    for rank in self.ready[key]
                    for n in range(len(self.ranks[rank].durations))
                ]
                same = [
                    self.ranks[rank].durations[n]
                    for rank, n in pairs
                    if self.key(rank, key[1], n) == key
                ]
                self.flying[key] = self.now + Fraction(max(same))
            if self.flying.get(key, self.now + 1) <= self.now:
                del self.flying[key], self.ready[key]
                self.passed.add(key)

    def run(self, iterations: int) -> list[Fraction]:
        """When each iteration is done on all ranks."""
        for rank, mine in enumerate(self.ranks):  # nothing is left from before the first iteration
            self.passed |= {self.key(rank, -1, number) for number in range(len(mine.durations))}
        agents = [(self.stream(rank, iterations), rank) for rank in range(len(self.ranks))]
        agents += [
            (self.host(rank, iterations), -1) for rank in range(len(self.ranks)) if self.device
        ]
        wants: dict[Iterator, Any] = dict.fromkeys(agent for agent, _ in agents)
        while True:
            moved = True
            while moved:
                before = len(self.passed), len(self.flying)
                self.meet()
                free = [agent for agent, want in wants.items() if not want or want in self.passed]
                wants |= {agent: next(agent, ("over",)) for agent in free}
                moved = bool(free) or before != (len(self.passed), len(self.flying))
            active = []
            for agent, rank in agents:
                beside = sum(rank in self.members(key) for key in self.flying)
                rate = max(1 - self.contention * beside, 0)
                if rate and isinstance(wants[agent], Fraction):
                    active.append((agent, rate))
            steps = [end - self.now for end in self.flying.values()] + [
                wants[agent] / rate for agent, rate in active
            ]
            if not steps:
                assert all(len(done) == iterations for done in self.done), "nothing moves"
                return [max(ends) for ends in zip(*self.done, strict=True)]
            for agent, rate in active:
                wants[agent] -= min(steps) * rate
            self.now += min(steps)


@st.composite
def meshes(
    draw: st.DrawFn, contention: bool = False, whole: bool = True, device: bool | None = None
) -> tuple[list, bool, float]:
    """One to three ranks, two communicators, collectives in one order, and waits anywhere after
    them."""
    small, short = (st.integers(0, 5), st.integers(0, 2)) if whole else (seconds, seconds)
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
        work = work or [1]
        at = [place for place, value in enumerate(work) if isinstance(value, str)]
        waits = [
            (draw(st.integers(place + 1, len(work))), n)
            for n, place in enumerate(at)
            if draw(st.booleans())
        ]
        # some of them for the next iteration
        left = set(range(len(at))) - {number for _, number in waits}
        waits += [
            (draw(st.integers(0, len(work))), n - len(at))
            for n in sorted(left)
            if draw(st.integers(0, 3)) == 0
        ]
        transfers = [
            i for i in range(len(work)) if i not in at and device and draw(st.integers(0, 5)) == 0
        ]
        lengths = [float(length) for _, length in mine]
        more = {
            "waits": waits if late else None,
            "transfers": transfers,
            "rank": rank,
            "durations": lengths,
        }
        ranks.append(make(work, draw(short), **more))
    return ranks, device, draw(st.sampled_from([0.5, 1.0])) if contention else 0.0


@given(meshes() | meshes(contention=True))
def test_any_schedule_takes_as_long_as_event_by_event(mesh: tuple[list, bool, float]) -> None:
    ranks, device, contention = mesh
    timeline = simulate(ranks, device=device, contention=contention)
    ends = Machine(*mesh).run(25 if contention else 72)
    # the first iteration leaves something
    left = any(
        wait.of_previous_iteration for rank in ranks for wait in rank.group.graph.collective_waits
    )
    assert left or timeline.latency == pytest.approx(float(ends[0]), abs=1e-9)
    assert timeline.period == pytest.approx(float(ends[-1] - ends[-13]) / 12, abs=1e-9)


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
        assert sum(parts) == pytest.approx(timeline.period, abs=near) and min(parts) >= 0


@given(
    meshes(whole=False)
    | meshes(whole=False, contention=True)
    | meshes(whole=False, contention=True, device=True)
)
def test_where_the_time_of_a_rank_goes(mesh: tuple[list, bool, float]) -> None:
    ranks, device, contention = mesh
    timeline = simulate(ranks, device=device, contention=contention)
    near, met = (
        1e-9 * max(timeline.period, 1),
        dict[tuple[int, int], list[tuple[float, float, float]]](),
    )
    for rank, rank_timeline in zip(ranks, timeline.rank_timelines, strict=True):
        starts, ends, places = (
            rank_timeline.starts,
            rank_timeline.ends,
            rank.group.graph.collectives,
        )
        assert (
            (ends <= timeline.period + near).all()
            and (rank_timeline.arrival_wait_time >= -near).all()
            and (starts >= rank_timeline.issued - near).all()
        )
        assert (
            starts[rank_timeline.compute][1:] >= ends[rank_timeline.compute][:-1] - near
        ).all(), "operations follow one another"
        least = rank.seconds[rank_timeline.compute] - near
        assert (ends - starts)[rank_timeline.compute] == pytest.approx(
            least, abs=2 * near
        ) or contention
        assert ((ends - starts)[rank_timeline.compute] >= least).all()
        assert (rank_timeline.stream_wait_time >= rank_timeline.exposed_time - near).all() and (
            rank_timeline.exposed_time >= 0
        ).all()
        shifted = [
            (
                wait.operation,
                ends[places[wait.collective]] - timeline.period * wait.of_previous_iteration,
            )
            for wait in rank.group.graph.collective_waits
        ]
        assert all(starts[place] >= end - near for place, end in shifted if place < len(starts))
        seen: dict[int, int] = {}
        for key, place in zip(rank.group.communicators, places, strict=True):
            seen[key] = seen.get(key, 0) + 1
            met.setdefault((key, seen[key]), []).append(
                (starts[place], ends[place], rank_timeline.arrival_wait_time[place])
            )
        idle = accounts.sum_idle(rank_timeline)
        assert (
            sum(idle.values()) == pytest.approx(timeline.period, rel=1e-6, abs=1e-6)
            and min(idle.values()) >= 0
        )
        assert idle["host_s"] >= (0.0 if device else rank.host.sum()) - 1e-6
        modules = accounts.sum_modules(rank_timeline, 2)
        parts = sum(modules[f"{phase}_s"].sum() for phase in ("forward", "backward", "update"))
        assert parts == pytest.approx(timeline.period, rel=1e-6, abs=1e-6) or not len(
            rank_timeline.compute
        )
        assert modules["operations"].sum() == len(rank_timeline.starts)
    for ends_of in met.values():
        begins, ends, waits = (np.array(column) for column in zip(*ends_of, strict=True))
        assert np.ptp(begins) <= 1e-6 and np.ptp(ends) <= 1e-6
        assert waits.min() <= 1e-6, "the last rank to come waits for none"


# Views of a timeline.


@given(meshes(whole=False))
def test_the_critical_path_has_no_gap_and_slices_of_a_trace_do_not_overlap(mesh):
    ranks, device, contention = mesh
    timeline = simulate(ranks, device=device, contention=contention)
    if timeline.period > 1e-3 and all(
        len(rank_timeline.compute) for rank_timeline in timeline.rank_timelines
    ):
        steps = (
            accounts.find_critical_path(timeline.rank_timelines).select("start_s", "end_s").rows()
        )
        assert sum(end - start for start, end in steps) == pytest.approx(
            timeline.period, rel=1e-6, abs=1e-6
        )
        assert all(
            before[1] == pytest.approx(after[0], abs=1e-6) for before, after in pairwise(steps)
        )
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in json.loads(json.dumps(accounts.list_events(timeline.rank_timelines, {0: 0}))):
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for (_, thread), spans in threads.items():
        stack: list[float] = []
        for start, end in spans:
            while stack and stack[-1] <= start + 2e-3:
                stack.pop()
            assert not stack or (thread == 0 and end <= stack[-1] + 2e-3), "modules nest"
            stack.append(end)


def test_idle_time_by_cause_and_the_path_over_ranks() -> None:
    """Rank 0 computes 1 s, waits 3 s for rank 5, both reduce for 2 s, of which 0.5 s are under an
    operation."""
    ranks = [make([w, "a", 0.5, 1.0], waits=[(3, 0)], rank=r) for r, w in ((0, 1.0), (5, 4.0))]
    rank_timelines = run(ranks, [2.0]).rank_timelines
    fast, slow = (
        tuple(accounts.sum_idle(rank_timeline).values()) for rank_timeline in rank_timelines
    )
    assert fast == pytest.approx((2.5, 0.0, 0.0, 2.0, 2.5)), (
        "half a second of the waiting is under the operation"
    )
    assert slow == pytest.approx((5.5, 0.0, 0.0, 1.5, 0.0)) and rank_timelines[0].period == 7
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
    for kernel, streams in ((1e-6, {"host"}), (1e-3, {"compute"})):
        path = accounts.find_critical_path(
            run([make([kernel] * 9, 3e-5)], device=True).rank_timelines
        )
        assert set(path["stream"]) == streams and set(path["operation"]) == set(range(9))


def test_modules_and_spans_in_program_order() -> None:
    modules = ["net.a.x", "net.a.y", "net.b", "net.b", "net.a.x", ""]
    (rank_timeline,) = run(
        [make([1.0, 2.0, 3.0, "a", 4.0, 5.0], modules=modules)], [0.5]
    ).rank_timelines
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
    frame = accounts.list_operations(
        run([make([w, "a", 0.5], rank=r) for r, w in ((0, 1.0), (5, 2.0))], [2.0]).rank_timelines
    )
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
    assert frame["stream"].to_list() == ["compute", "communication", "compute"] * 2
    assert frame.filter(polars.col("kind") == "collective")["start_s"].to_list() == [2.0, 2.0]


def test_updates_belong_to_the_modules_whose_parameters_they_change() -> None:
    modules = [("forward", "a"), ("forward", "b"), ("backward", "a"), *[("update", "")] * 4]
    labels = tuple(Label("add", "elementwise", "add", phase, module) for phase, module in modules)
    first, second, gradient, state, step = range(5)
    touched = [
        (0, first, 8),
        (1, second, 24),
        (2, gradient, 8),
        (3, state, 8),
        (4, state, 8),
        (4, gradient, 8),
    ]
    touched += [(5, first, 8), (5, second, 24), (6, step, 4)]
    graph = Graph(labels, Features.zeros(7), Accesses.from_rows([(*row, False) for row in touched]))
    (rank_timeline,) = run(
        [
            RankTimes(
                RankGroup(graph, (0,), 1.0, {}, []),
                np.ones(7),
                np.zeros(7),
                np.zeros(7),
                np.zeros(0),
            )
        ]
    ).rank_timelines
    frame = accounts.sum_modules(rank_timeline, 2)
    assert frame.select("module", "update_s").rows() == [("a", 1 + 1 + 0.25), ("b", 0.75), ("", 1)]


def test_a_trace_shows_ranks_streams_and_sizes() -> None:
    ranks = [
        make([w, "a", 0.5, "b", 1.0], waits=[(4, 0), (5, 1)], rank=r)
        for r, w in ((0, 1.0), (1, 4.0))
    ]
    rank_timelines = run(ranks, [2.0, 0.25]).rank_timelines
    events = accounts.list_events(rank_timelines, {0: 0, 1: 1, 5: 1})
    assert {event["pid"] for event in events} == {0, 1, 5}
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and "name" in e["args"]
    }
    assert (
        names[1, None] == "rank 1"
        and names[1, 3] == "communication 0"
        and names[1, 4] == "communication 1"
    )
    slices = [event for event in events if event["ph"] == "X" and event["tid"] in (2, 3, 4)]
    assert len(slices) == 3 * 5 and all(event["args"]["bytes"] == 64 for event in slices)
    compute = [
        event["dur"]
        for event in slices
        if event["pid"] == 0 and names[0, event["tid"]] == "compute"
    ]
    assert sum(compute) == pytest.approx(accounts.sum_idle(rank_timelines[0])["busy_s"] * 1e6)


def test_a_breakdown_has_a_field_for_each_cause() -> None:
    timeline = run([make([1.0, "a", 1.0]), make([5.0, "a", 1.0])], [2.0], device=True)
    assert timeline.period == 8.0
    timeline.extend("host_device_synchronization", 9.0)
    timeline.extend("loading", 12.0)
    causes = break_down(timeline.measure(0))
    kernels = {(part.phase, part.kind): part.time for part in causes.kernels}
    assert kernels == {("forward", "elementwise"): 1.0, ("update", "elementwise"): 1.0}
    assert causes.exposed_time == pytest.approx(2.0) and causes.contention_time == 0.0
    assert causes.wait_time_for_ranks == pytest.approx(4.0) and causes.host == 0.0
    assert (causes.host_device_synchronization, causes.loading) == (1.0, 3.0)
    assert causes.sum_by_resource()["imbalance"] == causes.wait_time_for_ranks
    parts = causes.list_parts()
    assert parts["", "waiting"] == (1, causes.wait_time_for_ranks)
    assert parts["", "host_device_synchronization"] == (1, 1.0) and ("", "host") not in parts
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
