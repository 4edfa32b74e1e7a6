"""Fits of collectives: truths are found again, more parameters have to be earned, few points are
honest about it."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares

from perfkit.fitting import OverRanks, Pipelined, fit_collective, fit_over_ranks, fit_pipelined
from perfkit.fitting.collectives import SCALE, Curve, pipelined_curve, ranks_curve, two_branch_curve
from perfkit.ground.files import find_reference
from perfkit.models.collectives import over_ranks, pipelined, ring_steps, two_branch
from perfkit.platform.collective_costs import choose_sample, spread_beyond
from perfkit.readers.nccl import LogWarning, read_nccl_tests

SIZES = 2.0 ** np.arange(9, 30)
LOGS = np.log(SIZES)
BRANCHES = {"alpha1": 1e-5, "beta1": 2e-11, "alpha2": 4e-5, "beta2": 4e-12}
LAW = {"alpha0": 7e-6, "alpha1": 1e-6, "beta0": 1.5e-12, "beta1": 6e-12}
PLAIN = {"alpha": 2e-5, "beta": 5e-12}
RANKS, EACH = np.repeat([2, 4, 8], len(SIZES)), np.tile(SIZES, 3)
CURVES = {
    "pipelined": (
        pipelined_curve(LOGS, np.log(pipelined(SIZES, **PLAIN)), sharpness=0.6),
        pipelined,
        (SIZES,),
    ),
    "free": (
        pipelined_curve(LOGS, np.log(pipelined(SIZES, **PLAIN)), sharpness=None),
        pipelined,
        (SIZES,),
    ),
    "two_branch": (
        two_branch_curve(LOGS, np.log(two_branch(SIZES, **BRANCHES))),
        two_branch,
        (SIZES,),
    ),
    "over_ranks": (
        ranks_curve(
            np.log(EACH), np.log(EACH), ring_steps("all_reduce", RANKS), (RANKS - 1) / RANKS
        ),
        over_ranks,
        (EACH, RANKS, "all_reduce"),
    ),
}


def noisy(times: np.ndarray, seed: int, noise: float = 0.03) -> np.ndarray:
    return times * np.exp(noise * np.random.default_rng(seed).standard_normal(len(times)))


def test_scipy_finds_the_same_curve() -> None:
    """All problems are solved at once; `least_squares` solves each alone."""
    times = np.log(noisy(two_branch(SIZES, **BRANCHES), seed=1))
    curve = two_branch_curve(LOGS, times)

    def find_residuals(p: np.ndarray) -> np.ndarray:
        values, _ = curve.evaluate(p[None])
        return times - values[0]

    solutions = []
    for start in curve.starts:
        bounds = (curve.low, curve.high)
        inside = np.clip(start, curve.low + 1e-9, curve.high - 1e-9)
        solutions.append(
            least_squares(find_residuals, inside, bounds=bounds, loss="soft_l1", f_scale=SCALE)
        )
    best = min(solutions, key=lambda solution: solution.cost)
    [found] = curve.solve(np.ones((1, len(SIZES))))
    assert np.sort(found) == pytest.approx(np.sort(best.x), abs=1e-5)


@pytest.mark.parametrize(("curve", "form", "given"), CURVES.values(), ids=CURVES)
def test_curves_are_the_public_forms_and_slopes_are_theirs(curve: Curve, form, given) -> None:
    p = curve.starts[:1] + 0.1
    [value], [slopes] = curve.evaluate(p)
    parameters = dict(zip(curve.names, np.exp(p[0]), strict=True))
    assert value == pytest.approx(np.log(form(*given, **parameters)))
    for i, step in enumerate(1e-6 * np.eye(len(curve.names))):
        [up], _ = curve.evaluate(p + step)
        [down], _ = curve.evaluate(p - step)
        assert slopes[i] == pytest.approx((up - down) / 2e-6, abs=1e-6)


# The form is chosen by what sizes left out say.


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-9), st.integers(0, 10**6))
def test_noise_that_earns_another_parameter_changes_little(
    alpha: float, beta: float, seed: int
) -> None:
    sizes = np.geomspace(alpha / beta / 1e3, alpha / beta * 1e3, 21)
    truth = pipelined(sizes, alpha=alpha, beta=beta)
    fit = fit_collective(sizes, noisy(truth, seed))
    assert fit.time(sizes, "all_reduce", 8) == pytest.approx(truth, rel=0.15)


def test_more_parameters_are_rarely_taken_without_need() -> None:
    fits = [fit_collective(SIZES, noisy(pipelined(SIZES, **PLAIN), seed)) for seed in range(16)]
    assert np.mean([len(fit.stderr) == 2 for fit in fits]) >= 0.6
    assert all(fit.notes == () for fit in fits if len(fit.stderr) == 2)


def test_a_protocol_switch_earns_two_branches_and_a_sharp_corner_its_own_exponent() -> None:
    fit = fit_collective(
        SIZES, noisy(two_branch(SIZES, **BRANCHES), 1), source="a test", date="2026-01-02"
    )
    assert fit.form == "two_branch" and fit["sharpness"] == 0.8 and set(fit.stderr) == set(BRANCHES)
    assert {name: fit[name] for name in BRANCHES} == pytest.approx(BRANCHES, rel=0.15)
    assert "with fewer parameters" in fit.notes[0] and (fit.source, fit.date) == (
        "a test",
        "2026-01-02",
    )
    assert (
        fit.ranges == {"nbytes": (512.0, 2.0**29)} and fit.units["beta1"] == "s/B" and fit.n == 21
    )
    sharp = fit_collective(
        SIZES, noisy(pipelined(SIZES, alpha=2e-5, beta=4e-12, sharpness=2.5), 2, 0.01)
    )
    assert (sharp.form, len(sharp.stderr)) == ("pipelined", 3) and sharp[
        "sharpness"
    ] == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_outliers_repeats_zeros_and_order_change_little(seed: int) -> None:
    """Twice the time at three sizes, slow repeats of every size, empty messages, sizes in any
    order."""
    truth = two_branch(SIZES, **BRANCHES)
    times = noisy(truth, seed, 0.01)
    times[[3, 11, 17]] *= 2
    repeated = np.tile(SIZES, 3), np.concatenate([times, times * 1.001, times * 3])
    mixed = np.random.default_rng(seed).permutation(22)
    fits = [fit_collective(SIZES, times), fit_collective(*repeated)]
    again = fit_collective(np.append(SIZES, 0.0)[mixed], np.append(times, 1e-3)[mixed])
    assert dict(again) == pytest.approx(dict(fits[0])) and again.ranges == fits[0].ranges
    for fit in fits:
        assert (
            np.median(np.abs(fit.time(SIZES, "all_reduce", 8) / truth - 1)) < 0.05 and fit.n == 21
        )


@pytest.mark.parametrize(
    "part", [SIZES <= 2**22, SIZES >= 2**20], ids=["no transfer", "no start-up"]
)
def test_a_form_takes_no_shape_from_sizes_that_show_half_of_it(part: np.ndarray) -> None:
    times = noisy(two_branch(SIZES, **BRANCHES), 5)
    assert fit_collective(SIZES, times).form == "two_branch"
    assert dict(fit_collective(SIZES[part], times[part])) == dict(
        fit_pipelined(SIZES[part], times[part])
    )


def test_two_points_are_enough_and_say_how_little_that_is() -> None:
    ends = np.array([2.0**14, 2.0**29])
    fit = fit_collective(ends, pipelined(ends, **PLAIN))
    many = fit_collective(SIZES, pipelined(SIZES, **PLAIN))
    assert fit.form == "pipelined" and fit.n == 2 and fit["alpha"] == pytest.approx(2e-5, rel=1e-3)
    assert fit.spread == pytest.approx(0.1) and 0.05 < fit.stderr["beta"] / fit["beta"] < 0.2
    assert many.spread < 0.05 and many.stderr["beta"] < 0.5 * fit.stderr["beta"]


def test_what_cannot_be_fitted_is_refused() -> None:
    for fit in (fit_collective, fit_pipelined):
        with pytest.raises(
            ValueError, match=r"1 size\(s\) above 0; a curve needs at least 2, .*; measure another"
        ):
            fit([1e6, 1e6, 0.0], [1e-4, 2e-4, 1e-5])
        for bad in (-1.0, math.nan, math.inf):
            with pytest.raises(
                ValueError, match=r"nbytes holds .* sizes must be finite and not below 0; drop"
            ):
                fit([1e6, bad], [1e-4, 2e-4])
    for ranks in ([8, 8], [1, 8], [2.5, 8]):
        with pytest.raises(
            ValueError, match=r"ranks holds .* at least two whole counts .* fit_collective"
        ):
            fit_over_ranks("all_reduce", ranks, [1e3, 1e6], [1e-5, 1e-4])
    with pytest.raises(ValueError, match="operation is 'allreduce'"):
        fit_over_ranks("allreduce", [2, 4], [1e3, 1e6], [1e-5, 1e-4])


def test_coverage_of_noise_at_unseen_sizes() -> None:
    inside = []
    for seed in range(24):
        half = np.arange(len(SIZES)) % 2 == seed % 2
        times = noisy(pipelined(SIZES, **PLAIN), seed, 0.15)
        fit = fit_collective(SIZES[half], times[half])
        predicted = fit.time(SIZES[~half], "all_reduce", 8)
        inside += list(np.abs(np.log(times[~half] / predicted)) < 1.2816 * fit.spread)
    assert 0.7 <= np.mean(inside) <= 0.9


# The law over ranks.


def test_the_law_is_found_again_and_predicts_a_count_it_never_saw() -> None:
    truth, few = over_ranks(EACH, RANKS, "all_reduce", **LAW), RANKS < 8
    fit = fit_over_ranks("all_reduce", RANKS[few], EACH[few], noisy(truth[few], 0, 0.01))
    assert fit.form == "over_ranks" and fit.ranges["ranks"] == (2.0, 4.0) and fit.n == 42
    assert fit.time(SIZES, "all_reduce", 8) == pytest.approx(truth[~few], rel=0.05)
    assert set(fit.units) == set(fit) and fit.units["alpha1"] == "s" and fit.units["beta0"] == "s/B"


def test_a_part_that_is_nowhere_seen_is_zero_and_says_so() -> None:
    fit = fit_over_ranks(
        "all_gather", RANKS, EACH, over_ranks(EACH, RANKS, "all_gather", **{**LAW, "beta0": 0.0})
    )
    assert fit["beta0"] == 0.0 and fit.at_bounds == ("beta0",) and "beta0" not in fit.stderr
    assert fit["beta1"] == pytest.approx(6e-12, rel=0.02)


def test_the_spread_of_a_law_is_that_of_counts_left_out() -> None:
    times = over_ranks(EACH, RANKS, "all_reduce", **LAW)
    plain = fit_over_ranks("all_reduce", RANKS, EACH, times)
    slower_on_four = np.where(RANKS == 4, 1.5, 1.0) * times
    bent = fit_over_ranks("all_reduce", RANKS, EACH, slower_on_four)
    assert plain.spread < 0.05 and bent.spread > 0.2


# Outside the fitted sizes.

TIMES = noisy(pipelined(SIZES[:13], **PLAIN), 4)
CURVE = fit_pipelined(SIZES[:13], TIMES)  # up to 2 MiB


def test_the_spread_grows_away_from_what_was_measured() -> None:
    assert spread_beyond(CURVE, SIZES[:13], "all_reduce", 8) == pytest.approx(
        np.full(13, CURVE.spread)
    )
    beyond = spread_beyond(CURVE, SIZES[12:], "all_reduce", 8)
    assert np.all(np.diff(beyond) > 0) and beyond[1] < 2 * CURVE.spread and beyond[-1] > 0.15
    assert spread_beyond(CURVE, [], "all_reduce", 8).shape == (0,)
    assumed = Pipelined.build({"alpha": 1e-5, "beta": 1e-11}, spread=0.3)
    assert spread_beyond(assumed, 1e9, "all_reduce", 8) == 0.3
    law = OverRanks.build(LAW, ranges={"nbytes": (512.0, 2.0**29), "ranks": (2, 8)}, spread=0.1)
    assert spread_beyond(law, 1e12, "all_reduce", 8) > 0.1


def test_the_sample_that_helps_most_helps() -> None:
    size = choose_sample(CURVE, 2.0**32, "all_reduce", 8)
    assert 2.0**24 <= size < 2.0**32 and math.log2(size).is_integer()
    more = fit_pipelined(np.append(SIZES[:13], size), np.append(TIMES, pipelined(size, **PLAIN)))
    before = float(spread_beyond(CURVE, 2.0**32, "all_reduce", 8))
    after = float(spread_beyond(more, 2.0**32, "all_reduce", 8))
    assert after < 0.4 * before and choose_sample(CURVE, 64.0, "all_reduce", 8) == 64.0


# Real measurements.

A100 = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reducescatter": "reduce_scatter",
}


def read_curve(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    frame = read_nccl_tests(folder / "nccl_logs" / f"a100x8_nvswitch_{name}.log")
    rows = frame.filter((pl.col("nbytes") > 0) & ~pl.col("in_place")).sort("nbytes")
    return rows["nbytes"].to_numpy(), rows["seconds"].to_numpy()


def test_cited_points_are_those_of_the_sources(shared_data: Path) -> None:
    """reference_data/published/nccl_curves.csv, which a notebook draws."""
    cited = pl.read_csv(find_reference("published", "nccl_curves.csv"))
    assert 30 <= cited.height <= 60 and cited["source"].str.len_chars().min() > 20
    raw = pl.read_csv(shared_data / "nccl" / "nccl_h100_sxm.csv", infer_schema_length=None)
    words = {
        "op": "operation",
        "num_gpus": "ranks",
        "message_bytes": "nbytes",
        "latency_us": "seconds",
    }
    raw = (
        raw.filter(nccl_version_recorded="2.29.2")
        .rename(words)
        .with_columns(pl.col("dtype").replace("half", "fp16"))
    )
    keys = ["operation", "ranks", "dtype", "nbytes"]
    truth = raw.group_by(keys).agg(pl.col("seconds").median() * 1e-6)
    for name in ("allreduce", "alltoall"):
        rows = pl.DataFrame(read_curve(shared_data, name), ["nbytes", "seconds"])
        about = {
            "operation": pl.lit(A100[name]),
            "ranks": pl.lit(8, pl.Int64),
            "dtype": pl.lit("fp32"),
        }
        truth = pl.concat([truth, rows.with_columns(**about).select(truth.columns)])
    both = cited.join(truth, on=keys, suffix="_source")
    assert both.height == cited.height
    assert both["seconds"].to_numpy() == pytest.approx(both["seconds_source"].to_numpy(), rel=1e-5)


@pytest.mark.filterwarnings(f"ignore::{LogWarning.__module__}.{LogWarning.__name__}")
@pytest.mark.parametrize("name", A100)
def test_half_of_the_sizes_of_a_log_predict_the_other(shared_data: Path, name: str) -> None:
    nbytes, seconds = read_curve(shared_data, name)
    for half in (np.arange(len(nbytes)) % 2 == side for side in (0, 1)):
        fit = fit_collective(nbytes[half], seconds[half])
        errors = fit.time(nbytes[~half], A100[name], 8) / seconds[~half] - 1
        assert len(fit.stderr) <= 4 and np.mean(np.abs(errors)) <= 0.08
    # in another machine's training step, a Megatron trace: the least over ranks, so no waiting
    if name == "allreduce":
        inside = fit_collective(nbytes, seconds).time(2.0**26, "all_reduce", 8)
        assert inside == pytest.approx(599e-6, rel=0.06)


def test_very_many_sizes_give_the_curve_of_fewer() -> None:
    law = {"alpha": 2e-5, "beta": 4e-12, "sharpness": 0.6}
    sizes = np.geomspace(1024, 2**30, 5000).round()
    many = fit_collective(sizes, pipelined(sizes, **law))
    sizes = np.geomspace(1024, 2**30, 40).round()
    few = fit_collective(sizes, pipelined(sizes, **law))
    assert many.n == 400 and many.ranges["nbytes"] == (1024, 2**30)
    for name in ("alpha", "beta"):
        assert many[name] == pytest.approx(few[name], rel=0.02)
