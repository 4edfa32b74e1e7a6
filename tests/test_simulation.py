"""The simulation of ranks, streams and their meetings, on times that can be added up by hand and against oracles."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.prediction.simulation import RankTimes, Timeline, simulate

seconds = st.floats(0, 10, allow_subnormal=False)


def times(values: Sequence[float], host: float = 0.0, at: Sequence[int] = (), **more: object) -> RankTimes:
    work, n = np.array(values, dtype=float), len(values)
    work[list(at)] = 0.0
    given = {"waits": None, "spacing": np.zeros(n), "last": work, "transfers": [], "communicators": [0] * len(at)}
    given |= more
    if given["waits"] is not None:
        given["waits"] = np.array(given["waits"], dtype=int).reshape(-1, 2)
    return RankTimes(work, np.full(n, host), collectives=np.array(at, dtype=int), **given)  # type: ignore[arg-type]


def run(
    ranks: Sequence[RankTimes], durations: Sequence[float], device: bool = False, contention: float = 0.0
) -> Timeline:
    lengths = [np.array(durations[: len(rank.collectives)], dtype=float) for rank in ranks]
    return simulate(ranks, lengths, device=device, contention=contention)


def test_one_rank_without_a_device_adds_up() -> None:
    timeline = run([times([1.0, 2.0, 3.0], 0.5)], [])
    assert timeline.period == timeline.latency == 7.5
    assert timeline.starts[0].tolist() == [0.5, 2.0, 4.5]
    assert timeline.ends[0].tolist() == [1.5, 4.0, 7.5]
    with pytest.raises(AttributeError):
        timeline.period = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kernels", "host", "period", "latency"),
    [
        ([1e-6] * 50, 3e-5, 50 * 3e-5, 50 * 3e-5 + 1e-6),  # short kernels leave the device waiting for the host
        ([1e-3] * 50, 3e-5, 50 * 1e-3, 50 * 1e-3 + 3e-5),  # long ones hide the host: only the first launch is seen
        ([1e-6] * 10 + [1e-3] * 10, 1e-5, 10 * 1e-6 + 10 * 1e-3, None),  # it falls behind and catches up
        ([10.0001], 10.0, 10.0001, 20.0001),  # two chains that differ little settle on the longer one
        ([1.0, 9.9999], 5.0, 10.9999, 19.9999),
    ],
)
def test_a_device_hides_the_host_where_kernels_are_long(
    kernels: list[float], host: float, period: float, latency: float | None
) -> None:
    timeline = run([times(kernels, host)], [], device=True)
    assert timeline.period == pytest.approx(period, rel=1e-12)
    assert latency is None or timeline.latency == pytest.approx(latency, rel=1e-12)
    gaps = timeline.starts[0][1:] - timeline.ends[0][:-1]
    assert (gaps >= -1e-12).all() and (gaps.max(initial=0) > 0) == (max(kernels) < host)


def test_chains_that_differ_by_a_millionth_are_told_apart() -> None:
    """One rank is slower in its host, the other in its device, and they meet once: no pattern shows for long."""
    host = times([9.0, 0.0], 5.0, at=(1,))
    device = times([10.00001, 0.0], 0.0, at=(1,))
    assert run([host, device], [0.0], device=True).period == pytest.approx(10.00001, rel=1e-12)


def test_a_call_of_many_launches_keeps_the_device_waiting() -> None:
    """Ten kernels of 0.1 that are launched 1 apart: the last starts with its launch, at 10."""
    timeline = run([times([1.0], 1.0, last=np.array([0.1]), spacing=np.array([9.0]))], [], device=True)
    assert timeline.latency == pytest.approx(10.1)
    assert timeline.period == pytest.approx(10.0)


def test_buckets_of_gradients_are_reduced_under_the_backward_pass() -> None:
    """Backward 4 + 4 + 4, a bucket of 3 after each, update 2: the last one alone is seen."""
    one = times([4, 0, 4, 0, 4, 0, 2], at=[1, 3, 5], waits=[(6, 0), (6, 1), (6, 2)])
    for device in (True, False):
        timeline = run([one] * 2, [3, 3, 3], device=device)
        assert timeline.period == timeline.latency == 4 + 4 + 4 + 3 + 2
        assert timeline.starts[0].tolist() == [0, 4, 4, 8, 8, 12, 15]
        assert timeline.stalls[0].tolist() == [0, 0, 0, 0, 0, 0, 3, 0]
        assert timeline.exposed[0].sum() == 3
    timeline = run([one] * 2, [3, 3, 3], contention=1.0)
    assert timeline.period == 12 + 9 + 2, "a core that collectives share hides nothing of them"
    assert timeline.ends[0].tolist() == [4, 7, 11, 14, 18, 21, 23]
    assert (timeline.stolen[0].sum(), timeline.exposed[0].sum()) == (6, 3)
    assert run([one] * 2, [3, 3, 3], contention=0.5).period == 4 + 5.5 + 5.5 + 3 + 2


def test_buckets_that_take_longer_than_the_backward_pass_queue_on_their_communicator() -> None:
    """Three of 6 one after another from 4 on: 22; the update follows."""
    one = times([4, 0, 4, 0, 4, 0, 2], at=[1, 3, 5], waits=[(6, 0), (6, 1), (6, 2)])
    timeline = run([one], [6, 6, 6], device=True)
    assert timeline.period == 4 + 18 + 2
    assert timeline.starts[0][[1, 3, 5]].tolist() == [4, 10, 16]
    assert timeline.stalls[0][6] == timeline.exposed[0][6] == 22 - 12
    assert not timeline.waits[0].any(), "no other rank is waited for"
    timeline = run([replace(one, communicators=[0, 1, 0])], [6, 6, 6], device=True)
    assert timeline.starts[0][[1, 3, 5]].tolist() == [4, 8, 12]
    assert timeline.period == 18 + 2


def test_the_host_hides_what_it_launches_late() -> None:
    """The host needs 10 for each of three launches; a collective of 8 beside it costs nothing."""
    timeline = run([times([1, 0, 1], 10.0, at=[1], waits=[(2, 0)])], [8.0], device=True)
    assert (timeline.period, timeline.latency) == (30, 31)
    assert timeline.stalls[0].tolist() == [0, 0, 8, 0], "for that the stream is idle anyway"
    assert timeline.starts[0][2] - timeline.ends[0][1] == 2


def test_ranks_that_share_no_communicator_do_not_wait_for_each_other() -> None:
    timeline = run([times([w, 0], at=[1], communicators=[key]) for key, w in enumerate((1, 5))], [1.0])
    assert timeline.period == timeline.latency == 6
    assert [starts[0] for starts in timeline.starts] == [0, 0]
    assert run([times([1, 0], at=[1]), times([1.0])], [1.0]).period == 2, "a rank may have no collective"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([times([1, 0, 1], at=[1], waits=[(1, 0)])], "has operation 1 wait for collective 0; it must be one"),
        ([times([1, 0, 1], at=[1], waits=[(2, 1)])], "wait for collective 1; it must be one of the 1"),
        ([times([0, 0], at=[0, 1]), times([0], at=[0])], "has 2 ranks and 1 launch its collective 1"),
        (
            [times([0, 0], at=[0, 1], communicators=keys) for keys in ([0, 1], [1, 0])],
            "ranks 0, 1 wait for one another: operation 1 of rank 0 waits for collective 0",
        ),
    ],
)
def test_what_cannot_run_is_refused(ranks: list[RankTimes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(ranks, [1.0] * 2)


# Against every event in fractions.


class Machine:
    """One clock for all ranks: what happens next happens next, in fractions, one event after the other."""

    def __init__(self, ranks: list[RankTimes], durations: list[np.ndarray], device: bool, contention: float) -> None:
        self.ranks, self.durations, self.device, self.contention = ranks, durations, device, contention
        self.now = Fraction(0)
        every = range(len(ranks))
        self.issuing = [[0, 0, None] for _ in every]  # iteration, operation, and what is left to do for it
        self.running = [[0, 0, None] for _ in every]
        self.launched: set[tuple[int, int, int]] = set()
        self.ready: dict[tuple[int, int, int], set[int]] = {}
        self.flying: dict[tuple[int, int, int], Fraction] = {}
        self.landed: set[tuple[int, int, int]] = set()
        self.done: list[list[Fraction]] = [[] for _ in every]

    def members(self, communicator: int) -> set[int]:
        return {r for r, mine in enumerate(self.ranks) if communicator in mine.communicators}

    def key(self, rank: int, iteration: int, number: int) -> tuple[int, int, int]:
        keys = self.ranks[rank].communicators
        return keys[number], iteration, list(keys[:number]).count(keys[number])

    def blocked(self, rank: int, iteration: int, operation: int) -> bool:
        """Whether an operation has to wait; the first one of an iteration for the end of the one before."""
        needed = [number for place, number in self.ranks[rank].awaited if place == operation]
        return any(self.key(rank, iteration, number) not in self.landed for number in needed)

    def settle(self, iterations: int) -> bool:
        """Do all that takes no time; returns whether anything was done."""
        moved = False
        for rank, mine in enumerate(self.ranks):
            for agent in (self.issuing, self.running)[not self.device :]:
                moved |= self.step(rank, mine, agent, iterations)
        for key, ranks in list(self.ready.items()):
            first = not any(other[0] == key[0] and other[1:] < key[1:] for other in self.ready)
            if ranks == self.members(key[0]) and first and key not in self.flying:
                pairs = [(r, n) for r in ranks for n in range(len(self.ranks[r].collectives))]
                same = [self.durations[r][n] for r, n in pairs if self.key(r, key[1], n) == key]
                self.flying[key] = self.now + Fraction(max(same))
                moved = True
        for key, end in list(self.flying.items()):
            if end <= self.now:
                del self.flying[key], self.ready[key]
                self.landed.add(key)
                moved = True
        return moved

    def step(self, rank: int, mine: RankTimes, agent: list, iterations: int) -> bool:
        iteration, operation, left = agent[rank]
        n, host = len(mine.seconds), agent is self.issuing
        cpu = not self.device
        if iteration == iterations:
            return False
        if operation == n:
            if not host and self.blocked(rank, iteration, n):
                return False
            if not host:
                self.done[rank].append(self.now)
            agent[rank] = [iteration + 1, 0, None]
            return True
        if left is None:
            if host:
                work = mine.host[operation]
            else:
                if not cpu and (rank, iteration, operation) not in self.launched:
                    return False
                if self.blocked(rank, iteration, operation):
                    return False
                work = mine.seconds[operation] + (mine.host[operation] if cpu else 0)
            agent[rank][2] = Fraction(work)
            return True
        if left > 0:
            return False
        if host:
            self.launched.add((rank, iteration, operation))
            reached = self.running[rank][:2] > [iteration, operation]
            if operation in mine.transfers and not reached:
                return False
        elif operation in mine.collectives:
            number = mine.collectives.tolist().index(operation)
            self.ready.setdefault(self.key(rank, iteration, number), set()).add(rank)
        agent[rank] = [iteration, operation + 1, None]
        return True

    def rate(self, rank: int, agent: list) -> Fraction:
        beside = sum(1 for key in self.flying if rank in self.members(key[0]))
        return (
            max(Fraction(1) - Fraction(self.contention) * beside, Fraction(0)) if agent is self.running else Fraction(1)
        )

    def run(self, iterations: int) -> list[Fraction]:
        """When each iteration is done on all ranks."""
        while True:
            while self.settle(iterations):
                pass
            steps = [end - self.now for end in self.flying.values()]
            active = [
                (agent, rank, self.rate(rank, agent))
                for agent in (self.issuing, self.running)
                for rank in range(len(self.ranks))
                if agent[rank][2]
            ]
            steps += [agent[rank][2] / rate for agent, rank, rate in active if rate]
            if not steps:
                assert all(len(done) == iterations for done in self.done), "nothing moves"
                return [max(ends) for ends in zip(*self.done, strict=True)]
            for agent, rank, rate in active:
                agent[rank][2] -= min(steps) * rate
            self.now += min(steps)


@st.composite
def meshes(draw: st.DrawFn, contention: bool = False, whole: bool = True) -> tuple[list, list, bool, float]:
    """One to three ranks, two communicators, collectives in one order, and waits anywhere after them."""
    small, short = (st.integers(0, 5), st.integers(0, 2)) if whole else (seconds, seconds)
    count = draw(st.integers(1, 3))
    members = [range(count), draw(st.sets(st.integers(0, count - 1), min_size=1))]
    order = draw(st.lists(st.tuples(st.integers(0, 1), small), max_size=4))
    device = not contention and draw(st.booleans())
    ranks, lengths = [], []
    for rank in range(count):
        mine = [(key, length) for key, length in order if rank in members[key]]
        blocks = [draw(st.lists(small, max_size=2)) for _ in range(len(mine) + 1)]
        values, at = list(blocks[0]), []
        for block in blocks[1:]:
            at.append(len(values))
            values += [0, *block]
        values = values or [1]
        waits = [(draw(st.integers(place + 1, len(values))), n) for n, place in enumerate(at) if draw(st.booleans())]
        transfers = [i for i in range(len(values)) if i not in at and device and draw(st.integers(0, 5)) == 0]
        more = {"waits": waits, "transfers": transfers, "communicators": [key for key, _ in mine]}
        ranks.append(times(values, draw(short), at, **more))
        lengths.append(np.array([float(length) for _, length in mine]))
    return ranks, lengths, device, draw(st.sampled_from([0.5, 1.0])) if contention else 0.0


@given(meshes() | meshes(contention=True))
def test_any_schedule_takes_as_long_as_event_by_event(mesh: tuple[list, list, bool, float]) -> None:
    ranks, lengths, device, contention = mesh
    timeline = simulate(ranks, lengths, device=device, contention=contention)
    ends = Machine(*mesh).run(25 if contention else 72)
    assert timeline.latency == pytest.approx(float(ends[0]), abs=1e-9)
    near = 1e-9
    assert timeline.period == pytest.approx(float(ends[-1] - ends[-13]) / 12, abs=near)


@given(meshes(whole=False))
def test_where_the_time_of_a_rank_goes(mesh: tuple[list, list, bool, float]) -> None:
    ranks, lengths, device, contention = mesh
    timeline = simulate(ranks, lengths, device=device, contention=contention)
    met: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for index, rank in enumerate(ranks):
        starts, ends, waits = timeline.starts[index], timeline.ends[index], timeline.waits[index]
        work = np.setdiff1d(np.arange(len(starts)), rank.collectives)
        near = 1e-9 * max(timeline.period, 1)
        assert (starts >= -near).all() and (waits >= -near).all()
        assert (starts[work][1:] >= ends[work][:-1] - near).all(), "operations of a rank follow one another"
        assert ends[work] - starts[work] - timeline.stolen[index][work] == pytest.approx(rank.seconds[work], abs=near)
        assert (timeline.stalls[index] >= timeline.exposed[index] - near).all()
        assert (timeline.exposed[index] >= 0).all()
        assert (starts >= timeline.issued[index] - near).all()
        for place, number in rank.awaited:
            if place < len(starts):
                assert starts[place] >= ends[rank.collectives[number]] - near
        seen: dict[int, int] = {}
        for key, place in zip(rank.communicators, rank.collectives, strict=True):
            seen[key] = seen.get(key, 0) + 1
            met.setdefault((key, seen[key]), []).append((starts[place], ends[place], waits[place]))
        busy = rank.seconds.sum() + timeline.stalls[index].sum()
        assert busy + (0.0 if device else rank.host.sum()) <= timeline.period * (1 + 1e-9) + near
    for parts in met.values():
        begins, ends, waits = (np.array(column) for column in zip(*parts, strict=True))
        assert np.ptp(begins) <= 1e-6 and np.ptp(ends) <= 1e-6
        assert waits.min() <= 1e-6, "the last rank to come waits for none"
