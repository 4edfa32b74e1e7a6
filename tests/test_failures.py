"""Checkpoints, failures and restarts: published worked examples, a simulation that draws each failure, and
what a run costs until it is done."""

import math
import re
from datetime import date, datetime
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.special import gammainc, lambertw

import perfkit as pk
from perfkit.ground.files import group_rows
from perfkit.models.failures import (
    chance_done,
    daly_interval,
    segment_time,
    segment_variance,
    wait_for_slowest,
    young_interval,
)
from perfkit.prediction import goodput

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
#: Failures of a node of Meta's clusters in a day (arXiv:2410.21680).
RSC_1, RSC_2 = 0.0065, 0.00234
MODEL = pk.Transformer.bert("bert-base", batch=256, sequence=128, dtype="bf16", mixed=True)


@pytest.fixture(scope="module")
def predicted() -> pk.Prediction:
    """BERT on 32 GPUs."""
    return pk.predict(MODEL, "h100-sxm-8x4", ranks=32)


# Published worked examples.


@pytest.mark.parametrize(
    "checkpoint, mtbf, published",
    # J. T. Daly, Future Generation Computer Systems 22(3), 2006, figures 3 to 5
    [(5.0, 24 * 60.0, 117.0), (5.0, 6 * 60.0, 57.0), (5.0, 15.0, 9.1)],
)
def test_intervals_of_daly(checkpoint: float, mtbf: float, published: float) -> None:
    assert float(daly_interval(checkpoint, mtbf=mtbf)) == pytest.approx(published, rel=0.01)


def test_interval_of_young() -> None:
    # systemoverflow.com, "Checkpoint frequency": 120 s, a failure each 6 h, 2,277 s or about 38 minutes
    assert float(young_interval(120.0, mtbf=6 * HOUR)) == pytest.approx(2277, rel=1e-3)


@pytest.mark.parametrize(
    "gpus, failures, hours",
    # Kokolis et al., arXiv:2410.21680: MTTF of jobs of 16,384 and 131,072 GPUs
    [(16384, RSC_1, 1.8), (131072, RSC_1, 0.23)],
)
def test_times_between_failures_of_meta(gpus: int, failures: float, hours: float) -> None:
    assert 24 / (gpus / 8 * failures) == pytest.approx(hours, rel=0.05)


def test_jobs_of_a_thousand_gpus_fail_more_often_than_their_hardware() -> None:
    # 7.9 h were measured (arXiv:2410.21680), where the rate of failures of hardware gives 29 h
    hardware = 24 / (1024 / 8 * RSC_1)
    assert hardware / 7.9 == pytest.approx(3.65, rel=0.01)


@pytest.mark.parametrize(
    "gpus, failures, interval, checkpoint, restart, published",
    [
        # Kokolis et al., arXiv:2410.21680, effective training time ratio: 16,000 GPUs of RSC-1,
        # checkpoints each 5 minutes that stop nothing, 5 minutes to start
        (16000, RSC_1, 5 * MINUTE, 0.0, 5 * MINUTE, 0.93),
        # 100,000 GPUs that fail as RSC-2 need intervals and restarts of about 2 minutes
        (100_000, RSC_2, 2 * MINUTE, 0.0, 2 * MINUTE, 0.9),
        # 12,000 GPUs of RSC-1 need checkpoints of the order of 10 s; the interval is the best one
        (12000, RSC_1, None, 10.0, 5 * MINUTE, 0.9),
    ],
)
def test_goodput_of_meta(
    gpus: int,
    failures: float,
    interval: float | None,
    checkpoint: float,
    restart: float,
    published: float,
) -> None:
    mtbf = DAY / (gpus / 8 * failures)
    work = interval or float(daly_interval(checkpoint, mtbf=mtbf))
    goodput = work / float(segment_time(work + checkpoint, mtbf=mtbf, restart=restart))
    assert goodput == pytest.approx(published, rel=0.05)


def test_goodput_is_metas_equation_where_failures_are_rare() -> None:
    # (1 - N r (u + t / 2)) / (1 + w / t), arXiv:2410.21680
    mtbf, work, checkpoint, restart = 40 * HOUR, 1 * HOUR, 60.0, 300.0
    equation = (1 - (restart + work / 2) / mtbf) / (1 + checkpoint / work)
    goodput = work / float(segment_time(work + checkpoint, mtbf=mtbf, restart=restart))
    assert goodput == pytest.approx(equation, rel=0.002)


def test_published_failures_follow_from_their_counts() -> None:
    rows = [row for [row] in group_rows("name", "published", "failures.csv").values()]
    for row in rows:
        hours = float(row["gpus"]) * float(row["days"]) * 24 / float(row["failures"])
        assert float(row["mtbf_hours"]) == pytest.approx(hours, rel=1e-4), row["name"]
        assert row["source"], row["name"]
    # Epoch AI, "Hardware failures won't limit AI scaling": a GPU each 50,000 h, 100,000 GPUs each 30 minutes
    [llama] = group_rows("name", "published", "failures.csv")["llama-3"]
    assert float(llama["mtbf_hours"]) / 100_000 * 60 == pytest.approx(30, rel=0.05)


def test_llama_trains_nine_tenths_of_the_time_with_checkpoints_of_seconds() -> None:
    # more than 90 % (arXiv:2407.21783): not with checkpoints of a minute that stop the run
    mtbf = 54 * DAY / 419
    goodput = {}
    for checkpoint in (5.0, 60.0):
        work = float(daly_interval(checkpoint, mtbf=mtbf))
        length = work + checkpoint
        goodput[checkpoint] = work / float(segment_time(length, mtbf=mtbf, restart=10 * MINUTE))
    assert goodput[5.0] > 0.9 > goodput[60.0]


# The forms.


@pytest.mark.parametrize("share", [1e-4, 0.01, 0.1, 0.5])
def test_dalys_interval_is_nearly_the_best_one(share: float) -> None:
    # (1 - u) e^(u + d) = 1 at the least of (e^(u + d) - 1) / u
    best = 1 + float(lambertw(-math.exp(-1 - share)).real)
    assert float(daly_interval(share, mtbf=1.0)) == pytest.approx(best, rel=0.006)


def test_a_checkpoint_longer_than_twice_the_time_between_failures() -> None:
    both = daly_interval(np.array([3.0, 0.5]), mtbf=1.0)
    assert both[0] == 1.0
    assert both[1] == pytest.approx(1 + 1 / 6 + 1 / 36 - 0.5)


def _draw_run(
    rng: np.random.Generator, segments: int, length: float, mtbf: float, restart: float
) -> float:
    """Time of one run whose failures are drawn one by one."""
    seconds = 0.0
    for _ in range(segments):
        until = rng.exponential(mtbf)
        while until < length:
            seconds += until
            until = rng.exponential(mtbf)
            while until < restart:
                seconds += until
                until = rng.exponential(mtbf)
            seconds += restart
            until = rng.exponential(mtbf)
        seconds += length
    return seconds


@pytest.mark.parametrize(
    "segments, length, mtbf, restart",
    [(1, 1.0, 1.0, 0.2), (3, 1.0, 3.0, 0.3), (10, 1.0, 20.0, 0.2), (20, 1.0, 1.5, 0.7)],
)
def test_a_simulation_of_failures(
    segments: int, length: float, mtbf: float, restart: float
) -> None:
    rng = np.random.default_rng(7)
    runs = np.sort([_draw_run(rng, segments, length, mtbf, restart) for _ in range(2500)])
    mean = segments * float(segment_time(length, mtbf=mtbf, restart=restart))
    variance = segments * float(segment_variance(length, mtbf=mtbf, restart=restart))
    noise = (variance / len(runs)) ** 0.5
    assert abs(runs.mean() - mean) < 3.5 * noise
    assert runs.var() == pytest.approx(variance, rel=0.15)
    times = np.linspace(segments * length, runs[-25], 30)
    drawn = np.searchsorted(runs, times, side="right") / len(runs)
    form = chance_done(times, segments=segments, length=length, mtbf=mtbf, restart=restart)
    # 0.03 of the form, and three standard errors of 2,500 draws
    assert np.abs(form - drawn).max() < 0.03 + 0.03


def test_rare_failures_lose_no_digits() -> None:
    # one failure with probability L / M costs its time, uniform up to L: its square is L^2 / 3
    variance = float(segment_variance(100.0, mtbf=1e10, restart=0.0))
    assert variance == pytest.approx(100.0**3 / 3 / 1e10, rel=1e-5)
    assert float(
        chance_done(100.0, segments=1, length=100.0, mtbf=50.0, restart=1.0)
    ) == pytest.approx(math.exp(-2.0))


@pytest.mark.parametrize("length", [6.9, 6.92])
def test_many_failures_of_few_segments_are_no_normal_delay(length: float) -> None:
    # 991 and 1,011 failures of one segment, whose delay is as good as exponential, and of four, whose delay
    # has a gamma distribution of shape 4: 63 and 57 % are done at its mean
    for segments, chance in ((1, 1 - math.exp(-1)), (4, gammainc(4, 4))):
        mean = segments * float(segment_time(length, mtbf=1.0, restart=0.1))
        done = chance_done(mean, segments=segments, length=length, mtbf=1.0, restart=0.1)
        assert done == pytest.approx(chance, abs=0.005)


def test_many_failures_are_counted_or_not_alike() -> None:
    # below and above the number of failures from which on they are not counted one by one
    for segments in (7_000, 8_000):
        shape: dict[str, Any] = {"segments": segments, "length": 1.0, "mtbf": 8.0, "restart": 0.5}
        mean = segments * float(segment_time(1.0, mtbf=8.0, restart=0.5))
        deviation = (segments * float(segment_variance(1.0, mtbf=8.0, restart=0.5))) ** 0.5
        chances = chance_done(mean + deviation * np.array([-1.0, 0.0, 1.0]), **shape)
        assert chances == pytest.approx([0.1587, 0.5, 0.8413], abs=0.01)


@pytest.mark.parametrize(
    "ranks, largest",
    # H. L. Harter, Biometrika 48, 1961; of two it is 1 / sqrt(pi)
    [(1, 0.0), (2, math.pi**-0.5), (10, 1.53875), (100, 2.50759), (1000, 3.24144)],
)
def test_the_slowest_of_normal_ranks(ranks: int, largest: float) -> None:
    assert float(wait_for_slowest(1.0, ranks=ranks)) == pytest.approx(largest, abs=1e-4)
    assert float(wait_for_slowest(0.02, ranks=ranks)) == pytest.approx(0.02 * largest, abs=1e-5)


def test_ranks_that_are_drawn_wait_as_long() -> None:
    drawn = np.random.default_rng(3).normal(1.0, 0.05, (4000, 64)).max(axis=1).mean()
    assert 1 + float(wait_for_slowest(0.05, ranks=64)) == pytest.approx(drawn, rel=0.002)


# A run.


def test_a_run_without_failures_costs_what_it_did(predicted: pk.Prediction) -> None:
    plain = predicted.cost(2.5, tokens=1e9, power=700.0)
    sure = predicted.cost(2.5, tokens=1e9, power=700.0, mtbf=1e17, checkpoint=0.0, restart=0.0)
    assert sure.hours == pytest.approx(plain["hours"], rel=1e-6)
    assert sure.cost == pytest.approx(plain["cost"], rel=1e-6)
    assert sure.energy_kwh == pytest.approx(plain["energy_kwh"], rel=1e-6)
    assert sure.goodput == pytest.approx(1.0)


def test_a_run_by_hand(predicted: pk.Prediction) -> None:
    r = predicted.cost(
        2.0, tokens=3e12, mtbf=32 * 10 * HOUR, checkpoint=30.0, restart=300.0, interval=HOUR
    )
    assert isinstance(r, pk.Goodput)
    mtbf = 10 * HOUR
    training = 3e12 / (256 * 128) * predicted.time
    count = round(training / (round(HOUR / predicted.time) * predicted.time))
    one = mtbf * math.exp(300 / mtbf) * math.expm1((training / count + 30) / mtbf)
    assert r.hours == pytest.approx(count * one / HOUR)
    assert r.gpu_hours == pytest.approx(32 * r.hours)
    assert r.cost == pytest.approx(64 * r.hours)
    assert r.failure_count == pytest.approx(r.hours / 10)
    shares = r.account()
    assert shares["share"].sum() == pytest.approx(1.0)
    assert shares["hours"].to_list()[0] == pytest.approx(training / HOUR)
    assert shares["hours"].to_list()[1:3] == pytest.approx([0.0, count * 30 / HOUR])
    assert r.warnings == predicted.warnings
    low, high = r.hours_range()
    assert low < r.hours < high
    assert predicted.cost(2.0, tokens=3e12, mtbf=32 * 10 * HOUR, checkpoint=30.0).hours < r.hours


def test_ranks_of_unlike_speed_make_a_run_longer(predicted: pk.Prediction) -> None:
    wait = 0.02 * 2.0697  # Harter's largest of 32
    plain = predicted.cost(2.0, tokens=3e12)
    late = predicted.cost(2.0, tokens=3e12, jitter=0.02)
    assert late["hours"] == pytest.approx(plain["hours"] * (1 + wait), rel=1e-4)
    assert late["cost"] == pytest.approx(plain["cost"] * (1 + wait), rel=1e-4)
    failing: dict[str, Any] = {"mtbf": "llama-3", "checkpoint": 30.0, "restart": 60.0}
    steady = predicted.cost(2.0, tokens=3e12, **failing)
    r = predicted.cost(2.0, tokens=3e12, jitter=0.02, **failing)
    assert r.hours / steady.hours == pytest.approx(1 + wait, rel=1e-3)
    assert r.waiting_hours == pytest.approx(wait * plain["hours"], rel=1e-4)
    assert r.account()["share"].sum() == pytest.approx(1.0)
    assert r.goodput == pytest.approx(steady.goodput / (1 + wait), rel=1e-3)
    assert "waiting for the slowest of 32 ranks: 4.0%" in r.explain()
    assert "slowest" not in steady.explain()
    low, high = r.hours_range()
    assert low < r.hours < high


def test_chances_of_a_run(predicted: pk.Prediction) -> None:
    r = predicted.cost(2.0, tokens=3e12, mtbf="llama-3", checkpoint=30.0)
    assert r.chance(0.0) == 0.0
    assert r.chance(0.5 * r.training_hours, failures_alone=True) == 0.0
    for alone in (False, True):
        hours = r.hours_for(0.9, failures_alone=alone)
        assert r.chance(hours, failures_alone=alone) == pytest.approx(0.9, abs=0.005)
    # failures add little to what is not known of an iteration
    sigma = predicted.spread
    assert r.hours_for(0.9) / r.hours_for(0.5) == pytest.approx(math.exp(1.2816 * sigma), rel=0.02)
    table = r.table()
    assert table["hours"].is_sorted()
    assert (table["cost"] / table["hours"]).to_list() == pytest.approx([64.0] * len(table))


def test_dates_are_hours_after_the_start(predicted: pk.Prediction) -> None:
    failing: dict[str, Any] = {"tokens": 3e12, "mtbf": "llama-3", "checkpoint": 30.0}
    r = predicted.cost(2.0, **failing, start="2026-12-01")
    assert r.chance_by("2026-12-31 06:00") == r.chance(30 * 24 + 6)
    assert r.chance_by(datetime(2026, 12, 31)) == r.chance_by(date(2026, 12, 31))
    assert r.chance_by("2026-12-01") == 0.0
    day = r.date_for(0.9)
    hours = r.hours_for(0.9)
    assert (day - datetime(2026, 12, 1)).total_seconds() == math.ceil(hours * HOUR)
    assert r.chance_by(day) == pytest.approx(0.9, abs=1e-3)
    dates = r.table()["date"].to_list()
    assert dates[3] == f"{day:%Y-%m-%d %H:%M}"
    assert f"on {day:%Y-%m-%d %H:%M}" in r.explain()
    # all else is that without dates
    plain = predicted.cost(2.0, **failing)
    assert r.hours == plain.hours
    assert plain.table().equals(r.table().drop("date"))
    with pytest.raises(ValueError, match="start is missing; say when the run starts"):
        plain.chance_by("2026-12-31")
    with pytest.raises(ValueError, match="date is 2026-11-30; the run starts at 2026-12-01"):
        r.chance_by("2026-11-30")
    late = predicted.cost(2.0, **failing, start="9999-12-31")
    with pytest.raises(ValueError, match="the calendar has ended"):
        late.date_for(0.9)


@pytest.mark.parametrize(
    "start, words",
    [
        ("1.12.2026", "start is '1.12.2026'; it must be a date such as '2027-01-15'"),
        (20261201, "start is 20261201; it must be a date"),
        ("2026-12-01T00:00+01:00", "with a time zone"),
    ],
)
def test_what_is_no_start(predicted: pk.Prediction, start: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        predicted.cost(2.0, tokens=3e12, mtbf="llama-3", checkpoint=30.0, start=start)


@pytest.mark.parametrize("segments", [1, 3, 30, 1000, 10**5])
@pytest.mark.parametrize("failures", [1e-3, 0.0144, 0.1, 1.0, 10.0, 300.0])
def test_no_number_of_failures_is_left_out(segments: int, failures: float) -> None:
    mtbf = 1 / math.log1p(failures / segments)
    shape = {"segments": segments, "length": 1.0, "mtbf": mtbf, "restart": 0.1}
    assert chance_done(1e12, **shape) == pytest.approx(1.0, abs=1e-13)
    # without a failure there is no delay
    none = math.exp(-segments / mtbf)
    assert chance_done(float(segments), **shape) == pytest.approx(none, rel=1e-8, abs=1e-14)


def test_chances_near_certainty_have_a_time(predicted: pk.Prediction) -> None:
    # a million segments, whose chances come from differences of large logarithms
    r = predicted.cost(2.0, iterations=1e6, mtbf=1.6e5, checkpoint=1.0, restart=5.0, interval=1e-3)
    assert r.segments.count == 10**6
    assert r.chance(1e6, failures_alone=True) == pytest.approx(1.0, rel=1e-14)
    for alone in (False, True):
        nearly_certain = r.hours_for(1 - 1e-12, failures_alone=alone)
        assert r.hours_for(0.99, failures_alone=alone) < nearly_certain < 100 * r.hours
        for chance in (1.0, 1 - 1e-14, 90):
            with pytest.raises(
                ValueError, match=f"chance is {chance}; it must be a share below 1 by 1e-12"
            ):
                r.hours_for(chance, failures_alone=alone)


def test_the_answer_leads_and_assumptions_follow(predicted: pk.Prediction) -> None:
    r = predicted.cost(2.0, tokens=3e12, mtbf="llama-3", checkpoint=30.0)
    text = " ".join(r.explain().split())
    assert text.startswith("done in ")
    of_iteration = [f"warning of the iteration: {warning}" for warning in predicted.warnings]
    assumed, *_ = text.partition(of_iteration[0])
    assert text.endswith(" ".join(of_iteration))
    assert "a restart takes 10 min" in assumed
    assert len(r.warnings) == 2 + len(predicted.warnings)
    stated = predicted.cost(2.0, tokens=3e12, mtbf=1e8, checkpoint=30.0, restart=60.0)
    assert stated.warnings == predicted.warnings


def test_a_run_that_does_not_fit_says_so(predicted: pk.Prediction) -> None:
    large = pk.predict(
        pk.Transformer.preset("llama-3-8b", batch=512, sequence=8192, dtype="bf16"),
        "h100-sxm-8",
        ranks=8,
    )
    assert large.fits is False
    with pytest.warns(UserWarning, match="this run cannot be: a rank needs .* does not fit"):
        large.cost(2.0, iterations=1e5)
    with pytest.warns(UserWarning, match="does not fit"):
        r = large.cost(2.0, iterations=1e5, mtbf="llama-3", checkpoint=30.0)
    assert "does not fit" in r.warnings[0]
    assert r.headline().startswith("cannot run: a rank needs ")
    said = " ".join(r.explain().split())
    assert said.count("does not fit") == 1 + "; ".join(large.warnings).count("does not fit")
    assert set(large.warnings) < set(r.warnings)
    for text in large.warnings:
        assert text in said
    plain = predicted.cost(2.0, tokens=3e12, mtbf=1e8, checkpoint=30.0)
    assert "cannot" not in plain.explain()


def test_both_ends_of_a_range_have_one_unit() -> None:
    assert goodput._write_range(46.0, 50.64) == "1.92 to 2.11 days"
    assert goodput._write_range(1.0, 2.0) == "60 min to 2 h"


def test_a_checkpoint_takes_its_bytes_over_the_rate(predicted: pk.Prediction) -> None:
    parts = predicted.memory().parts
    r = predicted.cost(2.0, tokens=3e12, mtbf=1e9, write_rate=1e9)
    nbytes = parts["parameters"] + parts["states"] + parts["tables"]
    # 110 million weights of 4 B, and two states of Adam for each
    assert nbytes == pytest.approx(110e6 * 12, rel=0.02)
    assert r.failures.checkpoint == pytest.approx(nbytes / 1e9)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"mtbf": "llama"}, "did you mean 'llama-3'"),
        ({"mtbf": 0.0, "checkpoint": 1.0}, "mtbf is 0.0; it must be a number above 0"),
        ({"mtbf": 1e8}, "give checkpoint=, the seconds"),
        ({"mtbf": 1e8, "checkpoint": 1.0, "write_rate": 1e9}, "give one of them"),
        ({"checkpoint": 1.0}, "checkpoint is 1.0; it counts with failures alone"),
        ({"interval": 60.0}, "interval is 60.0; it counts with failures alone"),
        ({"start": "2026-12-01"}, "start is '2026-12-01'; it counts with failures alone"),
        ({"mtbf": 3200.0, "checkpoint": 60.0}, "mtbf is that of one rank in seconds"),
        ({"mtbf": "0.25h", "checkpoint": 60.0}, "if 15 min is that of the 32 together: mtbf='8h'"),
        (
            {"mtbf": "3y", "checkpoint": 60.0},
            "mtbf is '3y'; it must be seconds, or a time with .* 's?",
        ),
        ({"mtbf": 1e8, "checkpoint": "1 minute"}, "checkpoint is '1 minute'; it must be seconds"),
        ({"mtbf": 3.2e5, "checkpoint": 60.0, "interval": 1e6}, "take a shorter interval"),
        ({"mtbf": 1e8, "checkpoint": 60.0, "interval": 1.0}, "take a longer interval"),
        ({"mtbf": 1e8, "checkpoint": 1.0, "epochs": 1e-12}, "the run has 9.16e-05 iterations"),
        ({"jitter": 1.5}, "jitter is 1.5; it must be a number of 0 or more, at most 1"),
        ({"mtbf": 1e8, "checkpoint": -1.0}, "checkpoint is -1.0"),
    ],
)
def test_what_is_refused(predicted: pk.Prediction, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        predicted.cost(2.0, tokens=3e12, **wrong)


def test_times_may_have_units(predicted: pk.Prediction) -> None:
    stated: dict[str, Any] = {
        "mtbf": "50000h",
        "checkpoint": "1min",
        "restart": "5min",
        "interval": "2h",
    }
    run = predicted.cost(2.0, tokens=3e12, **stated)
    same = predicted.cost(
        2.0, tokens=3e12, mtbf=1.8e8, checkpoint=60.0, restart=300.0, interval=7200.0
    )
    assert run.failures == same.failures
    assert "ranks fail as those of" not in run.explain()
    # no published run has such a name
    assert goodput.read_mtbf(".5h") == 1800.0
    with pytest.raises(ValueError, match=r"mtbf is -10800\.0; it must be a number above 0"):
        goodput.read_mtbf("-3h")


def test_a_search_ranks_by_cost_as_predictions_do() -> None:
    model = pk.Transformer.preset("gpt3-6.7b", batch=64, dtype="bf16", mixed=True)
    explored = pk.explore(model, "a100-sxm-8x8", ranks=[16, 64])
    plain = explored.cost(2.0, tokens=1e12)
    assert plain["cost"].is_sorted()
    ranked = explored.cost(2.0, tokens=1e12, mtbf=1e7, checkpoint=60.0, restart=300.0)
    assert ranked["cost"].is_sorted()
    # of each row what failures add to the days of training
    for row in ranked.head(3).to_dicts():
        training = 1e12 / row["tokens_per_s"]
        mtbf = 1e7 / row["ranks"]
        work = float(daly_interval(60.0, mtbf=mtbf))
        one = float(segment_time(work + 60.0, mtbf=mtbf, restart=300.0))
        assert row["goodput"] == pytest.approx(work / one, rel=2e-3)
        assert row["days"] == pytest.approx(training / row["goodput"] / DAY)
        assert row["cost"] == pytest.approx(row["days"] * 24 * row["ranks"] * 2.0)
    # 64 ranks fail four times as often
    shares = ranked.group_by("ranks").agg(pl.max("goodput")).sort("ranks")["goodput"].to_list()
    assert shares[0] > shares[1]
    with pytest.raises(ValueError, match="checkpoint is missing; with mtbf="):
        explored.cost(2.0, tokens=1e12, mtbf=1e7)
    with pytest.raises(ValueError, match=r"restart is 3\.0; it counts with failures alone"):
        explored.cost(2.0, tokens=1e12, restart=3.0)
