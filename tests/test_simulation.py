"""The simulation of ranks, streams and their meetings, on times that can be added up by hand."""

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


def test_a_timeline_is_a_value() -> None:
    timeline = simulate([times([1.0])], np.zeros(0), Host())
    assert isinstance(timeline, Timeline)
    with pytest.raises(AttributeError):
        timeline.period = 2.0  # type: ignore[misc]
