"""The simulation of ranks, streams and their meetings, on times that can be added up by hand."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.prediction.programs import Host, RankTimes
from perfkit.prediction.simulation import Timeline, simulate

seconds = st.floats(0, 10, allow_subnormal=False)


def times(values: list[float], overhead: float = 0.0, at: tuple[int, ...] = ()) -> RankTimes:
    work = np.array(values, dtype=float)
    work[list(at)] = 0.0
    return RankTimes(work, np.full(len(values), overhead), np.array(at, dtype=int))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[RankTimes], np.ndarray, Host]:
    """One to four ranks with different operations around the same number of collectives."""
    meetings = draw(st.integers(0, 3))
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        blocks = [draw(st.lists(seconds, max_size=4)) for _ in range(meetings + 1)]
        values, at = list(blocks[0]), []
        for block in blocks[1:]:
            at.append(len(values))
            values += [0.0, *block]
        ranks.append(times(values or [1.0], draw(seconds), tuple(at)))
    host = Host(0.0, draw(seconds), True) if draw(st.booleans()) else Host()
    return ranks, np.array([draw(seconds) for _ in range(meetings)]), host


def test_one_rank_without_a_device_adds_up() -> None:
    timeline = simulate([times([1.0, 2.0, 3.0], overhead=0.5)], np.zeros(0), Host(0.5))
    assert timeline.period == timeline.latency == 7.5
    assert timeline.starts[0].tolist() == [0.5, 2.0, 4.5]
    assert timeline.ends[0].tolist() == [1.5, 4.0, 7.5]


def test_ranks_wait_at_collectives_for_the_slowest() -> None:
    fast, slow = times([1.0, 0.0, 1.0, 0.0], at=(1, 3)), times([4.0, 0.0, 2.0, 0.0], at=(1, 3))
    timeline = simulate([fast, slow], np.array([0.5, 0.25]), Host())
    assert timeline.period == 4 + 0.5 + 2 + 0.25
    assert timeline.waits[0].tolist() == [0, 3, 0, 1]
    assert timeline.waits[1].tolist() == [0, 0, 0, 0]
    assert timeline.starts[0][1] == timeline.starts[1][1] == 4
    assert timeline.ends[0][1] == timeline.ends[1][1] == 4.5


def test_work_after_the_last_collective_of_one_rank_shifts_to_the_next_iteration() -> None:
    """Each rank starts its next iteration on its own; the tail of one overlaps with the head of the other."""
    one, other = times([1.0, 0.0, 3.0], at=(1,)), times([3.0, 0.0, 1.0], at=(1,))
    timeline = simulate([one, other], np.array([1.0]), Host())
    assert timeline.period == 1 + 3 + 1
    assert timeline.latency == 3 + 1 + 3


def test_kernels_that_are_short_leave_the_device_waiting_for_the_host() -> None:
    n, kernel, launch = 50, 1e-6, 1e-5
    timeline = simulate([times([kernel] * n, overhead=2e-5)], np.zeros(0), Host(2e-5, launch, True))
    assert timeline.period == pytest.approx(n * (2e-5 + launch))
    gaps = timeline.starts[0][1:] - timeline.ends[0][:-1]
    assert (gaps > 0).all()


def test_kernels_that_are_long_hide_the_host() -> None:
    n, kernel = 50, 1e-3
    timeline = simulate([times([kernel] * n, overhead=2e-5)], np.zeros(0), Host(2e-5, 1e-5, True))
    assert timeline.period == pytest.approx(n * kernel)
    assert timeline.latency == pytest.approx(n * kernel + 3e-5), "only the first launch is seen"
    gaps = timeline.starts[0][1:] - timeline.ends[0][:-1]
    assert gaps == pytest.approx(0, abs=1e-12)


def test_a_device_hides_the_host_only_where_kernels_are_long() -> None:
    """Short kernels first: the host falls behind, and catches up under the long ones."""
    mixed = times([1e-6] * 10 + [1e-3] * 10, overhead=1e-5)
    timeline = simulate([mixed], np.zeros(0), Host(1e-5, 0.0, True))
    assert timeline.period == pytest.approx(10 * 1e-6 + 10 * 1e-3)


def test_the_host_waits_for_a_transfer() -> None:
    """Launch 1, kernel 5, transfer 2, kernel 3: the host is back at 8 and launches the last kernel at 9."""
    one = RankTimes(np.array([5.0, 2.0, 3.0]), np.zeros(3), np.zeros(0, dtype=int), np.array([1]))
    timeline = simulate([one], np.zeros(0), Host(0.0, 1.0, True))
    assert timeline.ends[0][1] - timeline.starts[0][0] == 7
    assert timeline.starts[0][2] - timeline.ends[0][1] == 1
    assert timeline.period == 5 + 2 + 1 + 3, "the launches of the first two hide behind the kernels before"
    hidden = simulate([RankTimes(one.seconds, one.overhead, one.collectives)], np.zeros(0), Host(0.0, 1.0, True))
    assert hidden.period == 10


def test_a_call_of_many_launches_keeps_the_device_waiting() -> None:
    """Ten kernels of 0.1 that are launched 1 apart: the last starts with its launch, at 10."""
    many = RankTimes(
        np.array([1.0]), np.zeros(1), np.zeros(0, dtype=int), launches=np.array([10.0]), spacing=np.array([9.0])
    )
    timeline = simulate([many], np.zeros(0), Host(0.0, 1.0, True))
    assert timeline.latency == pytest.approx(10.1)
    assert timeline.period == pytest.approx(10.0)


def test_a_part_of_a_kernel_is_not_launched() -> None:
    parts = RankTimes(np.array([1.0, 1.0]), np.zeros(2), np.zeros(0, dtype=int), launches=np.array([1.0, 0.0]))
    assert simulate([parts], np.zeros(0), Host(0.0, 3.0, True)).period == 3.0
    first, more = parts.issue(Host(0.0, 3.0, True))
    assert (first.tolist(), more.tolist()) == ([3.0, 0.0], [0.0, 0.0])


@given(schedules(), st.integers(0, 5))
def test_waiting_for_transfers_never_takes_less_time(
    schedule: tuple[list[RankTimes], np.ndarray, Host], where: int
) -> None:
    ranks, durations, host = schedule
    free = [np.setdiff1d(np.arange(len(rank.seconds)), rank.collectives)[:where] for rank in ranks]
    waiting = [RankTimes(r.seconds, r.overhead, r.collectives, at) for r, at in zip(ranks, free, strict=True)]
    plain, slower = simulate(ranks, durations, host), simulate(waiting, durations, host)
    assert slower.period >= plain.period * (1 - 1e-9) - 1e-9
    assert slower.latency >= plain.latency * (1 - 1e-9) - 1e-9
    if not host.asynchronous:
        assert slower.period == plain.period, "kernels of a CPU run on the host clock"


@given(schedules())
def test_bounds(schedule: tuple[list[RankTimes], np.ndarray, Host]) -> None:
    ranks, durations, host = schedule
    timeline = simulate(ranks, durations, host)
    exchange = durations.sum()
    for rank in ranks:
        issuing = rank.overhead.sum() + host.launch * len(rank.seconds)
        assert timeline.period >= (rank.seconds.sum() + exchange) * (1 - 1e-9)
        assert timeline.period >= issuing * (1 - 1e-9)
    serial = sum(float(r.seconds.sum() + r.overhead.sum()) + host.launch * len(r.seconds) for r in ranks) + exchange
    assert timeline.period <= timeline.latency * (1 + 1e-9) + 1e-9
    assert timeline.latency <= serial * (1 + 1e-9) + 1e-9


@given(schedules())
def test_streams_never_overlap_and_collectives_agree(schedule: tuple[list[RankTimes], np.ndarray, Host]) -> None:
    ranks, durations, host = schedule
    timeline = simulate(ranks, durations, host)
    for rank, starts, ends, waits in zip(ranks, timeline.starts, timeline.ends, timeline.waits, strict=True):
        assert (starts >= -1e-9).all()
        assert (starts[1:] >= ends[:-1] - 1e-9).all(), "operations of a rank follow one another"
        lengths = rank.seconds.copy()
        lengths[rank.collectives] = durations
        assert ends - starts == pytest.approx(lengths, abs=1e-9)
        assert (waits >= -1e-9).all()
        assert not np.delete(waits, rank.collectives).any()
    for number in range(len(durations)):
        begins = {round(float(s[r.collectives[number]]), 9) for r, s in zip(ranks, timeline.starts, strict=True)}
        assert max(begins) - min(begins) <= 2e-9
        idle = [w[r.collectives[number]] for r, w in zip(ranks, timeline.waits, strict=True)]
        assert min(idle) == pytest.approx(0, abs=1e-9), "the last rank to come waits for none"


def run_long(ranks: list[RankTimes], durations: np.ndarray, host: Host, iterations: int = 120) -> float:
    """The same machine operation by operation, over many iterations: mean period of the last ones."""
    clock, front, finished = [0.0] * len(ranks), [0.0] * len(ranks), []
    for _ in range(iterations):
        position = [0] * len(ranks)
        for duration in [*durations, None]:
            ready = []
            for r, rank in enumerate(ranks):
                while position[r] < len(rank.seconds) and position[r] not in rank.collectives:
                    clock[r] += rank.overhead[position[r]] + host.launch
                    front[r] = max(front[r], clock[r]) + rank.seconds[position[r]]
                    waits = not host.asynchronous or position[r] in rank.transfers
                    clock[r] = max(clock[r], front[r]) if waits else clock[r]
                    position[r] += 1
                if duration is not None:
                    clock[r] += rank.overhead[position[r]] + host.launch
                    position[r] += 1
                ready.append(max(clock[r], front[r]))
            if duration is not None:
                front = [max(ready) + duration] * len(ranks)
                clock = clock if host.asynchronous else list(front)
        finished.append(max(*clock, *front))
    return (finished[-1] - finished[-31]) / 30


whole = st.integers(0, 6).map(float)


@st.composite
def whole_schedules(draw: st.DrawFn) -> tuple[list[RankTimes], np.ndarray, Host]:
    meetings, ranks = draw(st.integers(0, 2)), []
    for _ in range(draw(st.integers(1, 3))):
        blocks = [draw(st.lists(whole, max_size=2)) for _ in range(meetings + 1)]
        values, at = list(blocks[0]), []
        for block in blocks[1:]:
            at.append(len(values))
            values += [0.0, *block]
        ranks.append(times(values or [1.0], draw(whole), tuple(at)))
    host = Host(0.0, draw(whole), True) if draw(st.booleans()) else Host()
    return ranks, np.array([draw(whole) for _ in range(meetings)]), host


@settings(max_examples=60)
@given(whole_schedules())
def test_the_period_is_that_of_the_long_run(schedule: tuple[list[RankTimes], np.ndarray, Host]) -> None:
    assert simulate(*schedule).period == pytest.approx(run_long(*schedule), rel=1e-9, abs=1e-9)


@settings(max_examples=60)
@given(whole_schedules(), st.integers(0, 2))
def test_the_period_with_transfers_is_that_of_the_long_run(
    schedule: tuple[list[RankTimes], np.ndarray, Host], where: int
) -> None:
    ranks, durations, host = schedule
    free = [np.setdiff1d(np.arange(len(rank.seconds)), rank.collectives)[where : where + 2] for rank in ranks]
    waiting = [RankTimes(r.seconds, r.overhead, r.collectives, at) for r, at in zip(ranks, free, strict=True)]
    found = simulate(waiting, durations, host).period
    assert found == pytest.approx(run_long(waiting, durations, host), rel=1e-9, abs=1e-9)


@given(schedules())
def test_an_iteration_fits_into_its_period(schedule: tuple[list[RankTimes], np.ndarray, Host]) -> None:
    ranks, durations, host = schedule
    timeline = simulate(ranks, durations, host)
    for rank, starts, ends in zip(ranks, timeline.starts, timeline.ends, strict=True):
        if not host.asynchronous:  # else the device finishes one iteration while the host is in the next
            span = float(ends.max() - starts.min() + rank.overhead[0])
            assert span <= timeline.period * (1 + 1e-9) + 1e-9


@given(schedules(), st.integers(0, 3), seconds)
def test_more_work_never_takes_less_time(
    schedule: tuple[list[RankTimes], np.ndarray, Host], which: int, extra: float
) -> None:
    ranks, durations, host = schedule
    rank = ranks[which % len(ranks)]
    free = np.setdiff1d(np.arange(len(rank.seconds)), rank.collectives)
    if not len(free):
        return
    more = rank.seconds.copy()
    more[free[0]] += extra
    slower = [RankTimes(more, r.overhead, r.collectives) if r is rank else r for r in ranks]
    assert simulate(slower, durations, host).period >= simulate(ranks, durations, host).period - 1e-9


@given(schedules())
def test_identical_ranks_need_not_be_repeated(schedule: tuple[list[RankTimes], np.ndarray, Host]) -> None:
    ranks, durations, host = schedule
    one, many = simulate(ranks[:1], durations, host), simulate(ranks[:1] * 5, durations, host)
    assert (one.period, one.latency) == (many.period, many.latency)
    assert all(np.array_equal(one.starts[0], starts) for starts in many.starts)
    assert not any(waits.any() for waits in one.waits)


# Collectives in flight.


def overlapping(
    values: list[float], *, at: list[int], waits: list[tuple[int, int]] | None = None, **more: object
) -> RankTimes:
    return replace(times(values, at=tuple(at)), waits=np.array(waits) if waits is not None else None, **more)


DEVICE, CPU, SHARED = Host(asynchronous=True), Host(), Host(contention=1.0)


def test_buckets_of_gradients_are_reduced_under_the_backward_pass() -> None:
    """Backward 4 + 4 + 4, a bucket of 3 after each, update 2: the last one alone is seen."""
    one = overlapping([4, 0, 4, 0, 4, 0, 2], at=[1, 3, 5], waits=[(6, 0), (6, 1), (6, 2)])
    for host in (DEVICE, CPU):
        timeline = simulate([one] * 2, np.full(3, 3.0), host)
        assert timeline.period == timeline.latency == 4 + 4 + 4 + 3 + 2
        assert timeline.starts[0].tolist() == [0, 4, 4, 8, 8, 12, 15]
        assert timeline.stalls[0].tolist() == [0, 0, 0, 0, 0, 0, 3, 0]
        assert timeline.exposed[0].sum() == 3


def test_buckets_that_take_longer_than_the_backward_pass_queue_on_their_communicator() -> None:
    """Three of 6 one after another from 4 on: 22; the update follows."""
    one = overlapping([4, 0, 4, 0, 4, 0, 2], at=[1, 3, 5], waits=[(6, 0), (6, 1), (6, 2)])
    timeline = simulate([one], np.full(3, 6.0), DEVICE)
    assert timeline.period == 4 + 18 + 2
    assert timeline.starts[0][[1, 3, 5]].tolist() == [4, 10, 16]
    assert timeline.stalls[0][6] == timeline.exposed[0][6] == 22 - 12
    assert not timeline.waits[0].any(), "no other rank is waited for"
    two = replace(one, communicators=[0, 1, 0])
    timeline = simulate([two], np.full(3, 6.0), DEVICE)
    assert timeline.starts[0][[1, 3, 5]].tolist() == [4, 8, 12]
    assert timeline.period == 18 + 2


def test_a_core_that_collectives_share_hides_nothing_of_them() -> None:
    one = overlapping([4, 0, 4, 0, 4, 0, 2], at=[1, 3, 5], waits=[(6, 0), (6, 1), (6, 2)])
    timeline = simulate([one] * 2, np.full(3, 3.0), SHARED)
    assert timeline.period == 12 + 9 + 2
    assert timeline.ends[0].tolist() == [4, 7, 11, 14, 18, 21, 23]
    assert timeline.stolen[0].sum() == 6
    assert timeline.exposed[0].sum() == 3
    half = simulate([one] * 2, np.full(3, 3.0), replace(SHARED, contention=0.5))
    assert half.period == 4 + 5.5 + 5.5 + 3 + 2


def test_the_host_hides_what_it_launches_late() -> None:
    """The host needs 10 for each of three launches; a collective of 8 beside it costs nothing."""
    one = overlapping([1, 0, 1], at=[1], waits=[(2, 0)], overhead=np.full(3, 10.0))
    timeline = simulate([one], np.array([8.0]), DEVICE)
    assert timeline.period == 30
    assert timeline.latency == 31
    assert timeline.stalls[0].tolist() == [0, 0, 8, 0], "for that the stream stands still anyway"
    assert timeline.starts[0][2] - timeline.ends[0][1] == 2


def test_a_straggler_makes_others_wait_for_what_they_have_not_hidden() -> None:
    """Ranks of 4 and 7, then 2 beside a collective of 1; the fast one starts 1 ahead, and has 5 behind it at 7."""
    fast, slow = (overlapping([first, 0, 2, 0], at=[1], waits=[(3, 0)]) for first in (4, 7))
    timeline = simulate([fast, slow], np.array([1.0]), DEVICE)
    assert timeline.period == 9
    assert timeline.waits[0].tolist() == [0, 4, 0, 0]
    assert (timeline.stalls[0][3], timeline.exposed[0][3]) == (3, 1)
    assert timeline.stalls[1].sum() == 0


def test_ranks_that_share_no_communicator_go_their_own_way() -> None:
    one, other = (overlapping([w, 0], at=[1], communicators=[key]) for key, w in enumerate((1, 5)))
    timeline = simulate([one, other], np.array([1.0]), CPU)
    assert timeline.period == timeline.latency == 6
    assert [starts[0] for starts in timeline.starts] == [0, 0]


def test_two_chains_that_differ_little_settle_on_the_longer_one() -> None:
    """No number of iterations shows it: the host takes 10 and its device 10.0001."""
    one = RankTimes(np.array([10.0001]), np.array([10.0]), np.zeros(0, dtype=int))
    assert simulate([one], np.zeros(0), DEVICE).period == pytest.approx(10.0001, rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([overlapping([1, 0, 1], at=[1], waits=[(1, 0)])], "has operation 1 wait for collective 0; it must be one"),
        ([overlapping([1, 0, 1], at=[1], waits=[(2, 1)])], "wait for collective 1; it must be one of the 1"),
        ([overlapping([1, 0], at=[1]), times([1.0])], ""),
        ([overlapping([0, 0], at=[0, 1]), overlapping([0], at=[0])], "has 2 ranks and 1 launch its collective 1"),
        (
            [overlapping([0, 0], at=[0, 1], communicators=keys) for keys in ([0, 1], [1, 0])],
            "ranks 0, 1 wait for one another: operation 1 of rank 0 waits for collective 0",
        ),
    ],
)
def test_what_cannot_run_is_refused(ranks: list[RankTimes], message: str) -> None:
    lengths = [np.ones(len(rank.collectives)) for rank in ranks]
    if not message:
        assert simulate(ranks, lengths, CPU).period == 2, "a rank may stay away from a communicator"
        return
    with pytest.raises(ValueError, match=message):
        simulate(ranks, lengths, CPU)


class Machine:
    """One clock for all ranks: what happens next happens next, in fractions, one event after the other."""

    def __init__(self, ranks: list[RankTimes], durations: list[np.ndarray], host: Host) -> None:
        self.ranks, self.durations, self.host = ranks, durations, host
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
        mine = self.ranks[rank]
        waited = {number for _, number in mine.waits}
        rows = [*mine.waits, *((len(mine.seconds), n) for n in range(len(mine.collectives)) if n not in waited)]
        needed = [(iteration, n) for place, n in rows if place == operation]
        return any(self.key(rank, k, n) not in self.landed for k, n in needed)

    def settle(self, iterations: int) -> bool:
        """Do all that takes no time; returns whether anything was done."""
        moved = False
        for rank, mine in enumerate(self.ranks):
            for agent in (self.issuing, self.running)[not self.host.asynchronous :]:
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
        cpu = not self.host.asynchronous
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
                work = mine.overhead[operation] + self.host.launch
            else:
                if not cpu and (rank, iteration, operation) not in self.launched:
                    return False
                if self.blocked(rank, iteration, operation):
                    return False
                work = mine.seconds[operation] + (mine.overhead[operation] if cpu else 0)
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
            max(Fraction(1) - Fraction(self.host.contention) * beside, Fraction(0))
            if agent is self.running
            else Fraction(1)
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
def meshes(draw: st.DrawFn, contention: bool) -> tuple[list[RankTimes], list[np.ndarray], Host]:
    """One to three ranks, two communicators, collectives in one order, and waits anywhere after them."""
    count = draw(st.integers(1, 3))
    members = [range(count), draw(st.sets(st.integers(0, count - 1), min_size=1))]
    order = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=4))
    ranks, lengths = [], []
    for rank in range(count):
        mine = [(key, length) for key, length in order if rank in members[key]]
        blocks = [draw(st.lists(st.integers(0, 5), max_size=2)) for _ in range(len(mine) + 1)]
        values, at = list(blocks[0]), []
        for block in blocks[1:]:
            at.append(len(values))
            values += [0, *block]
        values = values or [1]
        waits = [(draw(st.integers(place + 1, len(values))), n) for n, place in enumerate(at) if draw(st.booleans())]
        free = [i for i in range(len(values)) if i not in at]
        ranks.append(
            replace(
                times([float(v) for v in values], draw(st.integers(0, 2)), tuple(at)),
                waits=np.array(waits, dtype=int).reshape(-1, 2), communicators=[key for key, _ in mine],
                transfers=np.array([i for i in free if not contention and draw(st.integers(0, 5)) == 0], dtype=int),
            )
        )  # fmt: skip
        lengths.append(np.array([float(length) for _, length in mine]))
    device = not contention and draw(st.booleans())
    host = Host(0.0, float(draw(st.integers(0, 2))), True) if device else Host()
    return ranks, lengths, replace(host, contention=draw(st.sampled_from([0.5, 1.0])) if contention else 0.0)


@settings(max_examples=50, deadline=None)
@given(meshes(contention=False))
def test_any_schedule_takes_as_long_as_event_by_event(mesh: tuple[list[RankTimes], list[np.ndarray], Host]) -> None:
    ranks, lengths, host = mesh
    timeline, ends = simulate(ranks, lengths, host), Machine(ranks, lengths, host).run(72)
    assert timeline.latency == pytest.approx(float(ends[0]), abs=1e-9)
    assert timeline.period == pytest.approx(float(ends[-1] - ends[-25]) / 24, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(meshes(contention=True))
def test_shared_cores_take_as_long_as_event_by_event(mesh: tuple[list[RankTimes], list[np.ndarray], Host]) -> None:
    ranks, lengths, host = mesh
    timeline, ends = simulate(ranks, lengths, host), Machine(ranks, lengths, host).run(25)
    assert timeline.latency == pytest.approx(float(ends[0]), abs=1e-9)
    assert timeline.period == pytest.approx(float(ends[-1] - ends[-13]) / 12, abs=1e-9)


@given(meshes(contention=False))
def test_where_the_time_of_a_rank_goes(mesh: tuple[list[RankTimes], list[np.ndarray], Host]) -> None:
    ranks, lengths, host = mesh
    timeline = simulate(ranks, lengths, host)
    for index, rank in enumerate(ranks):
        starts, ends = timeline.starts[index], timeline.ends[index]
        work = np.setdiff1d(np.arange(len(starts)), rank.collectives)
        assert (starts[work][1:] >= ends[work][:-1] - 1e-9).all()
        assert (timeline.stalls[index] >= timeline.exposed[index] - 1e-9).all()
        assert (timeline.exposed[index] >= 0).all()
        assert (starts >= timeline.issued[index] - 1e-9).all()
        for place, number in rank.find_waits():
            if place < len(starts):
                assert starts[place] >= ends[rank.collectives[number]] - 1e-9
        busy = rank.seconds.sum() + timeline.stalls[index].sum()
        assert busy + (0.0 if host.asynchronous else rank.overhead.sum()) <= timeline.period * (1 + 1e-9) + 1e-9


def test_a_timeline_is_a_value() -> None:
    timeline = simulate([times([1.0])], np.zeros(0), Host())
    assert isinstance(timeline, Timeline)
    with pytest.raises(AttributeError):
        timeline.period = 2.0  # type: ignore[misc]
