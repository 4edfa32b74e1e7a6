"""How much ranks vary: the parts of a variation by hand and drawn, a published job of 32 replicas, traces
and training logs, and what a run costs with them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import perfkit as pk
from perfkit.ground.files import group_rows
from perfkit.models.failures import wait_for_slowest
from perfkit.models.variation import deviation_of_slowest, split_variation
from perfkit.readers.measured_jitter import find_jitter, find_jitter_of_steps, read_jitter
from tests import samples

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")

Array = np.ndarray
#: Traces of both ranks of a step, see `tests/data/README.md`: rank 0 waits 100 of 1,000 µs.
STEP = [samples.FOLDER / f"step_rank{rank}.kineto.json" for rank in range(2)]


def read_published() -> Array:
    """Time of each of 32 replicas of a job at ByteDance in each of 43 steps, over that of an even step."""
    groups = group_rows("step", "published", "rank_times.csv").values()
    return np.array(
        [[float(row[str(rank)]) for row in rows for rank in range(32)] for rows in groups]
    )


# The parts of a variation.


def test_parts_by_hand() -> None:
    # 10 + (0, 2, 4) of ranks + (0, 6) of steps, and a rest of ±1 in the corners
    times = [[10 + 1, 16 - 1], [12.0, 18.0], [14 - 1, 20 + 1]]
    parts = split_variation(np.array(times))
    assert parts.mean == 15.0
    assert parts.random**2 == pytest.approx(4 / 2)
    assert parts.persistent is not None and parts.common is not None
    # means of ranks are 2 apart, of which the rest makes 2 / 2
    assert parts.persistent**2 == pytest.approx(4 - 2 / 2)
    # means of steps are 6 apart: 18 in variance, of which the rest makes 2 / 3
    assert parts.common**2 == pytest.approx(18 - 2 / 3)
    assert parts.freedom == 2


def test_drawn_parts_are_found_again() -> None:
    rng = np.random.default_rng(5)
    drawn = 1 + rng.normal(0, 0.03, (40, 1)) + rng.normal(0, 0.05, (1, 60))
    parts = split_variation(drawn + rng.normal(0, 0.02, (40, 60)))
    assert parts.random == pytest.approx(0.02, rel=0.04)
    assert parts.persistent == pytest.approx(0.03, rel=0.25)
    assert parts.common == pytest.approx(0.05, rel=0.25)


@pytest.mark.parametrize(
    "ranks, variance",
    # D. Teichroew, Annals of Mathematical Statistics 27, 1956
    [(1, 1.0), (2, 0.6816901), (5, 0.4475341), (10, 0.3443438), (20, 0.2756962)],
)
def test_the_slowest_varies_less_than_one(ranks: int, variance: float) -> None:
    assert deviation_of_slowest(ranks=ranks) ** 2 == pytest.approx(variance, abs=1e-5)


@pytest.mark.parametrize("times", [[[1.0]], [1.0, 2.0], [[1.0, 0.0]], [[1.0, np.nan]]])
def test_what_cannot_be_split(times: list[float]) -> None:
    with pytest.raises(ValueError, match="times has"):
        split_variation(np.array(times))


# How far the expected largest of normal times is from that of others.


def _draw_lognormal(
    rng: np.random.Generator, shape: tuple[int, int], spread: float = 0.05
) -> Array:
    """Mean 1 and this standard deviation."""
    width = np.log1p(spread**2) ** 0.5
    return rng.lognormal(-(width**2) / 2, width, shape)


def _draw_wide(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Lognormal with a standard deviation of 0.15."""
    return _draw_lognormal(rng, shape, 0.15)


def _draw_long_stalls(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """One time of a thousand is twice as long, all vary by 1 %."""
    return 1 + (rng.random(shape) < 0.001) + rng.normal(0, 0.01, shape)


def _draw_two_kinds(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """One time of ten is longer by 20 %, all vary by 1 %."""
    return 1 + 0.2 * (rng.random(shape) < 0.1) + rng.normal(0, 0.01, shape)


def _draw_rare_stalls(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """One time of a hundred is longer by 20 %, all vary by 1 %."""
    return 1 + 0.2 * (rng.random(shape) < 0.01) + rng.normal(0, 0.01, shape)


@pytest.mark.parametrize(
    "draw, ranks, ratio",
    # docs/formulas.md, table 15.3: waiting of the form over that of ranks that are drawn
    [
        (_draw_lognormal, 8, 0.98),
        (_draw_lognormal, 64, 0.95),
        (_draw_lognormal, 1024, 0.93),
        (_draw_wide, 8, 0.93),
        (_draw_wide, 64, 0.87),
        (_draw_wide, 1024, 0.80),
        (_draw_long_stalls, 8, 2.25),
        (_draw_long_stalls, 64, 0.94),
        (_draw_long_stalls, 1024, 0.17),
        (_draw_two_kinds, 8, 0.85),
        (_draw_two_kinds, 64, 0.74),
        (_draw_two_kinds, 1024, 0.96),
        (_draw_rare_stalls, 8, 1.20),
        (_draw_rare_stalls, 64, 0.49),
        (_draw_rare_stalls, 1024, 0.34),
    ],
)
def test_other_distributions(
    draw: Callable[[np.random.Generator, tuple[int, int]], Array], ranks: int, ratio: float
) -> None:
    rng = np.random.default_rng(2)
    times = draw(rng, (2_000_000 // ranks, ranks))
    spread = times.std() / times.mean()
    waiting = times.max(axis=1).mean() / times.mean() - 1
    assert wait_for_slowest(spread, ranks=ranks) / waiting == pytest.approx(ratio, rel=0.07)


# A published job.


def test_the_published_job_is_the_published_one() -> None:
    # data/result-SE.json of the artifact: blocking_slowdown, and blocking_decompose_by_dp_rank of ranks 8, 24
    times = read_published()
    assert times.shape == (43, 32)
    assert times.max(axis=1).mean() == pytest.approx(1.53736, abs=3e-4)
    assert times[:, 8].mean() == pytest.approx(1.20448, abs=1e-4)
    assert times[:, 24].mean() == pytest.approx(1.11804, abs=1e-4)


def test_waiting_of_the_published_job() -> None:
    # replicas of unlike sequences: no one is slow for ever (the study finds so, too), and the tail is long
    published = read_published()
    times = {rank: published[:, rank].tolist() for rank in range(32)}
    jitter = find_jitter("a job", times, float(published.mean()))
    assert jitter.slow_ranks == ()
    assert jitter.persistent == 0.0
    assert jitter.spread == pytest.approx(0.119, abs=5e-4)
    measured = published.max(axis=1).mean() / published.mean() - 1
    assert measured == pytest.approx(0.316, abs=5e-4)
    # of a step 5 % too short, of what is waited 22 %
    assert (1 + jitter.wait(32)) / (1 + measured) == pytest.approx(0.947, abs=1e-3)
    assert jitter.wait(32) / measured == pytest.approx(0.78, abs=0.005)
    assert "a long tail (skewness 0.9)" in jitter.explain()


def test_a_rank_that_was_slowed_on_purpose_is_named() -> None:
    # trace AR of the same artifact, data/result-AR.json: five of 44 steps of four replicas, of which a worker of
    # the first was slowed; the job takes 1.9730 times as long as without
    steps = {
        821: [1.98997, 1.01064, 1.01064, 1.01064],
        414: [1.98976, 1.01076, 1.01076, 1.01076],
        16: [1.95131, 1.01564, 1.01365, 1.01106],
        27: [1.94805, 1.01078, 1.02451, 1.02696],
        21: [1.93704, 1.01075, 1.01075, 1.01075],
    }
    published = np.array([*steps.values()])
    times = {rank: published[:, rank].tolist() for rank in range(4)}
    jitter = find_jitter("a job", times, float(published.mean()))
    [slow] = jitter.slow_ranks
    assert slow.rank == 0
    assert slow.share == pytest.approx(0.571, abs=2e-3)
    assert slow.error < 0.006
    # what is random is small: as chance, the differences would let four ranks wait a third of the time
    assert jitter.spread == pytest.approx(0.0112, abs=3e-4)
    assert jitter.wait(4) < 0.014
    assert float(wait_for_slowest(published.std() / published.mean(), ranks=4)) > 0.3
    # the mean rank and what the slow one adds are the whole job
    assert published.mean() * (1 + slow.share) == pytest.approx(1.9730, rel=0.01)


def test_few_steps_of_the_published_job_have_their_interval() -> None:
    # of 4 ranks and 6 steps, 80 % of the intervals should hold what all ranks and steps give
    published = read_published()
    rng = np.random.default_rng(11)
    inside = 0
    for _ in range(300):
        part = published[rng.choice(43, 6, replace=False)][:, rng.choice(32, 4, replace=False)]
        times = {rank: part[:, rank].tolist() for rank in range(4)}
        low, high = find_jitter("a job", times, 1.0).interval()
        inside += low < 0.1391 < high
    assert inside / 300 == pytest.approx(0.8, abs=0.08)


# Traces.


def write_rank(folder: Path, rank: int, times: Array) -> str:
    """Steps of one of several ranks: a kernel of some µs, then a collective of 8 µs for which all wait."""
    events = []
    begin = 0.0
    number = 1
    for step in range(times.shape[1]):
        own, last = times[rank, step], times[:, step].max()
        rows = [
            ("user_annotation", f"ProfilerStep#{step}", begin, last + 8, {}),
            ("cuda_runtime", "cudaLaunchKernel", begin + 1, 1, {"correlation": number}),
            ("cuda_runtime", "cudaLaunchKernel", begin + 2, 1, {"correlation": number + 1}),
        ]
        gemm = {"correlation": number, "stream": 7}
        facts = {
            "Collective name": "allreduce",
            "Process Group Ranks": "[0, 1, 2]",
            "Group size": 3,
        }
        message = {"correlation": number + 1, "stream": 9, **facts}
        rows.append(("kernel", "gemm", begin + 5, own - 5, gemm))
        rows.append(("kernel", "ncclDevKernel_AllReduce", begin + own, last + 8 - own, message))
        number += 2
        begin += last + 8
        for cat, name, ts, dur, args in rows:
            event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur}
            events.append({**event, "args": args})
    path = folder / f"rank{rank}.json"
    world = {"rank": rank, "world_size": len(times)}
    path.write_text(json.dumps({"distributedInfo": world, "traceEvents": events}))
    return str(path)


@pytest.fixture
def slow_rank(tmp_path: Path) -> pk.Trace:
    """Three ranks of ten steps of 1,000 µs with a spread of 10; rank 1 is slower by 60, step 4 by 300 for all."""
    rng = np.random.default_rng(3)
    times = 1000 + rng.normal(0, 10, (3, 10)).round(1)
    times[1] += 60
    times[:, 4] += 300
    return pk.read_trace([write_rank(tmp_path, rank, times) for rank in range(3)])


def test_a_slow_rank_and_a_slow_step_are_no_chance(slow_rank: pk.Trace) -> None:
    jitter = slow_rank.jitter()
    assert (jitter.ranks, jitter.steps) == (3, 8)  # from kernel to kernel, without the first
    assert jitter.spread == pytest.approx(0.0096, rel=0.25)
    [slow] = jitter.slow_ranks
    assert slow.rank == 1
    # 60 µs are 40 above the mean rank, of 1,061 µs
    assert slow.share == pytest.approx(0.0377, abs=2.5 * slow.error)
    assert jitter.common == pytest.approx(0.095, rel=0.15)
    assert jitter.time == pytest.approx(1061e-6, rel=0.01)
    text = jitter.explain()
    assert "rank 1 is slower than the mean by 3." in text
    assert jitter.by_rank()["is_slow"].to_list() == [False, True, False]
    # the two others wait 60 µs in mean and more: 40 of 1,061
    assert jitter.waited == pytest.approx(0.038, abs=0.008)
    low, high = jitter.interval()
    assert low < jitter.spread < high
    # (R - 1)(S - 1) = 14: chi-squared at 10 and 90 % are 7.790 and 21.064
    assert jitter.spread / low == pytest.approx((21.064 / 14) ** 0.5, rel=1e-3)
    assert jitter.spread / high == pytest.approx((7.790 / 14) ** 0.5, rel=1e-3)


def test_a_step_by_hand() -> None:
    # rank 0 waits 100 µs of 1,000: 900 and 1,000, in mean 950
    jitter = pk.read_trace(STEP).jitter()
    assert jitter.times == {0: pytest.approx([900e-6]), 1: pytest.approx([1000e-6])}
    assert jitter.spread == pytest.approx(50 * 2**0.5 / 950)
    assert jitter.waited == pytest.approx(50 / 950)
    assert jitter.persistent is None
    assert jitter.by_rank()["is_slow"].to_list() == [None, None]
    assert jitter.explain().startswith(
        "one step does not tell chance from slow ranks: 2 ranks differ by 7.4%"
    )
    # no share of more ranks
    assert jitter.table().is_empty()
    assert "4,096" not in jitter.explain()
    assert "measured: ranks waited 5.3% on average" in jitter.explain()
    assert "rank 1 took longest, 5.3% more than the mean rank" in jitter.explain()


def test_one_step_of_several_ranks_is_no_jitter_of_a_run() -> None:
    # a rank that is slow in every step would count as chance, and of more ranks more
    trace = pk.read_trace(STEP)
    words = r"step_rank0\.kineto\.json and 1 more has one step of 2 ranks, which does not tell chance .*; record"
    for jitter in (trace, trace.jitter()):
        with pytest.raises(ValueError, match=words):
            read_jitter(jitter)
    with pytest.raises(ValueError, match=words):
        trace.jitter().wait(4096)


def test_the_headline_says_the_time_of_its_rank() -> None:
    # of which the shares are
    assert "of rank 1 (1 ms): " in pk.read_trace(STEP).headline()


def test_several_files_are_named_one_by_one(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"is no file; name the files: sorted\(glob\.glob\('.*/\*\.json\*'"
    ):
        pk.read_trace(tmp_path)
    with pytest.raises(ValueError, match=r"sorted\(glob\.glob\('.*/rank\*\.json'\)\)"):
        pk.read_trace(tmp_path / "rank*.json")


def test_one_rank_is_a_bound(slow_rank: pk.Trace, tmp_path: Path) -> None:
    times = np.ones((3, 5))
    times[0] = [1000, 1000, 1010, 990, 2000]
    jitter = pk.read_trace(write_rank(tmp_path, 0, times)).jitter()
    # the three steps between the first and the last, without the collectives of 8 µs, which nobody met
    assert jitter.spread == pytest.approx(10 / 1008, rel=1e-6)
    assert jitter.time == pytest.approx(1008e-6)
    assert jitter.is_bound
    assert jitter.interval()[0] == 0.0
    assert "varies by 1.0% or less" in jitter.headline()
    assert "not all collectives were met" in jitter.explain()
    assert slow_rank.jitter().is_bound is False


def test_one_step_of_one_rank_tells_nothing() -> None:
    with pytest.raises(ValueError, match=r"step_rank0\.kineto\.json has one step of one rank"):
        pk.read_trace(STEP[0]).jitter()


def test_ranks_without_a_step_in_common(tmp_path: Path) -> None:
    text = json.loads(Path(write_rank(tmp_path, 1, np.full((3, 2), 100.0))).read_text())
    for event in text["traceEvents"]:
        event["name"] = event["name"].replace("ProfilerStep#", "ProfilerStep#7")
    first = write_rank(tmp_path, 0, np.full((3, 2), 100.0))
    (tmp_path / "rank1.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match="the ranks have no step in common"):
        pk.read_trace([first, tmp_path / "rank1.json"]).jitter()


# Training logs.


def test_a_log_by_hand() -> None:
    # two GPUs: sqrt(((-2)^2 + 0 + 2^2) / 2) = 2 s, of one of them 1 / 0.8256 times as much
    jitter = find_jitter_of_steps("a log", [98.0, 100.0, 102.0], [1, 1, 1], 2)
    own = 2 / 0.8256427
    waiting = own * 0.5641896
    assert jitter.spread == pytest.approx(own / (100 - waiting), rel=1e-5)
    assert jitter.time == pytest.approx(100 - waiting)
    assert jitter.is_bound
    # means of four iterations vary half as much
    means = find_jitter_of_steps("a log", [99.0, 100.0, 101.0], [4, 4, 4], 2)
    assert means.spread == pytest.approx(jitter.spread)
    unknown = find_jitter_of_steps("a log", [98.0, 100.0, 102.0], [1, 1, 1], None)
    assert unknown.spread == pytest.approx(0.02)
    assert "does not say how many ranks" in unknown.explain()


def test_drawn_jobs_give_their_spread() -> None:
    drawn = np.random.default_rng(9).normal(10.0, 0.3, (4000, 16)).max(axis=1)
    jitter = find_jitter_of_steps("a log", drawn.tolist(), [1] * 4000, 16)
    assert jitter.spread == pytest.approx(0.03, rel=0.04)
    assert jitter.time == pytest.approx(10.0, rel=0.003)


@pytest.mark.parametrize(
    "seconds, ranks, words",
    [
        ([1.0], 8, "a log has 1 step that counts"),
        ([1.0, 1.5, 2.0], 1024, "vary by 33.3%, more than ranks of their own"),
    ],
)
def test_logs_that_do_not_tell(seconds: list[float], ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_jitter_of_steps("a log", seconds, [1] * len(seconds), ranks)


# What a run costs.


def test_a_trace_and_a_log_are_a_jitter(slow_rank: pk.Trace, tmp_path: Path) -> None:
    model = pk.Transformer.bert("bert-base", batch=256, sequence=128, dtype="bf16", mixed=True)
    r = pk.predict(model, "h100-sxm-8x4", ranks=32)
    jitter = slow_rank.jitter()
    wanted = r.cost(2.0, tokens=1e12, jitter=jitter.spread)
    assert r.cost(2.0, tokens=1e12, jitter=jitter) == wanted
    assert r.cost(2.0, tokens=1e12, jitter=slow_rank) == wanted
    run = r.cost(2.0, tokens=1e12, jitter=slow_rank, mtbf="llama-3", checkpoint=30.0)
    assert "as in rank0.json and 2 more" in run.explain()
    assert "rank 1 of rank0.json and 2 more is slower by" in run.explain()
    line = " iteration {}/ 50 | elapsed time per iteration (ms): {} | global batch size: 16 |\n"
    path = tmp_path / "run.log"
    path.write_text("".join(line.format(n, 400 + n % 2) for n in range(1, 51)))
    log = pk.read_training_log(path)
    assert log.jitter().spread == pytest.approx(0.5 / 400.5, rel=0.02)
    costs = r.cost(2.0, tokens=1e12, jitter=log)
    assert costs == r.cost(2.0, tokens=1e12, jitter=log.jitter().spread)


@pytest.mark.parametrize("wrong", ["2%", None, [0.1], -0.1, 1.5, True])
def test_what_is_no_jitter(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"jitter is .*; or a trace \(pk.read_trace\)"):
        read_jitter(wrong)
