"""Fits of kernels as rooflines, and of caches from stream times: parameters are found again, with
honest errors."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import few_sizes
from perfkit.fitting import Fit, Roofline, find_levels, fit_additive, fit_roofline
from perfkit.models.caches import miss_share
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform

TRUE = {"launch": 3e-6, "compute_efficiency": 0.7, "memory_efficiency": 0.85, "sharpness": 2.2}
RATES = {"peak": 989.4e12, "bandwidth": 3.35e12}
Work = dict[str, np.ndarray]


def shapes(rng: np.random.Generator, n: int) -> Work:
    """FLOP and bytes of random bf16 GEMMs."""
    m, n_, k = 2.0 ** rng.uniform([[0], [7], [7]], [[15], [14], [14]], (3, n))
    return {"flops": gemm_flops(m, n_, k), "nbytes": gemm_bytes(m, n_, k, itemsize=2)}


def times(work: Work, parameters: Mapping[str, float] = TRUE) -> np.ndarray:
    rates = {name: np.asarray(rate) for name, rate in RATES.items()}
    return Roofline.build(parameters).time(rates | work)


def measured(
    seed: int, n: int, noise: float = 0.08, parameters: Mapping[str, float] = TRUE
) -> tuple[Work, np.ndarray]:
    rng = np.random.default_rng(seed)
    work = shapes(rng, n)
    return work, times(work, parameters) * np.exp(noise * rng.standard_normal(n))


def fit(work: Work, seconds: np.ndarray, **more: Any) -> Fit:
    return fit_roofline(**work, seconds=seconds, **(RATES | more))


def test_without_noise_the_prior_does_not_matter() -> None:
    work, seconds = measured(0, 60, noise=0.0)
    found = fit(work, seconds, source="test data", date="2026-11-21")
    assert dict(found) == pytest.approx(TRUE, rel=2e-3) and set(found.stderr) == set(TRUE)
    assert found.spread < 2e-3 and not found.notes and not found.at_bounds
    assert "source: test data 2026-11-21" in found.report() and fit(work, seconds).date == ""
    peaks = np.where(np.arange(60) % 2, 989.4e12, 1978.9e12)  # may differ by measurement
    assert dict(fit(work, times(work | {"peak": peaks}), peak=peaks)) == pytest.approx(
        TRUE, rel=2e-3
    )


def test_standard_errors_cover_the_truth_and_fall_with_more_measurements() -> None:
    fits = [fit(*measured(seed, 80)) for seed in range(40)]
    inside = []
    for found in fits:
        for name, error in found.stderr.items():
            inside.append(abs(found[name] - TRUE[name]) <= 2 * error)
    assert 0.85 <= np.mean(inside) <= 1.0
    for name, value in TRUE.items():
        assert np.median([found[name] / value for found in fits]) == pytest.approx(1, abs=0.05)
    few = [fit(*measured(seed, 30)).stderr["compute_efficiency"] for seed in range(5)]
    many = [fit(*measured(seed, 480)).stderr["compute_efficiency"] for seed in range(5)]
    assert np.mean(many) < 0.45 * np.mean(few)


def test_as_many_measurements_as_parameters_say_nothing_of_their_errors() -> None:
    for noise in (0.0, 0.02, 0.1):
        found = fit(*measured(1, 4, noise=noise))
        assert (
            not found.stderr
            and found.spread >= 0.11
            and "as many measurements as parameters" in found.notes[-1]
        )
    assert fit(*measured(1, 5, noise=0.02)).stderr


def time_with_noise(rng: np.random.Generator, work: Work) -> np.ndarray:
    """Times with a noise that falls as they grow."""
    seconds = times(work)
    noise = 0.1 * (seconds / 1e-4) ** -0.2
    return seconds * np.exp(noise * rng.standard_normal(len(seconds)))


@pytest.mark.parametrize("n", [8, 32, 400])
def test_intervals_hold_what_was_not_fitted(n: int) -> None:
    """Noise that falls with the time, as that of real kernels does: four fifths of unseen ones lie
    inside."""
    inside = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        work, unseen = shapes(rng, n), shapes(rng, 300)
        found = fit(work, time_with_noise(rng, work))
        later = time_with_noise(rng, unseen)
        predicted = times(unseen, found)
        errors = np.abs(np.log(later / predicted))
        inside.append(np.mean(errors <= 1.2816 * found.spread_at(predicted)))
    assert 0.7 <= np.mean(inside) <= 0.9


def test_outliers_are_tamed() -> None:
    work, seconds = measured(3, 100, noise=0.02)
    clean, robust = fit(work, seconds), fit(work, np.where(np.arange(100) % 12, 1, 2) * seconds)
    assert dict(robust) == pytest.approx(dict(clean), rel=0.1) and robust.spread > 2 * clean.spread


@pytest.mark.parametrize(
    ("flops", "nbytes", "known", "unknown"),
    [
        (0.0, 1e9, ["launch", "memory_efficiency"], ["compute_efficiency", "sharpness"]),
        (1e7, 1e9, ["launch", "memory_efficiency"], ["compute_efficiency", "sharpness"]),
        (1e14, 0.0, ["launch", "compute_efficiency"], ["memory_efficiency", "sharpness"]),
    ],
)
def test_what_the_measurements_do_not_tell_is_not_invented(flops, nbytes, known, unknown):
    """Kernels that only move data, also with little arithmetic, and kernels that only compute."""
    rng = np.random.default_rng(5)
    size = 10 ** rng.uniform(-5, 0, 40)
    work = {"flops": size * flops, "nbytes": size * nbytes}
    found = fit(work, times(work) * np.exp(0.03 * rng.standard_normal(40)), notes=("from a test",))
    assert list(found.stderr) == known and [note.split()[0] for note in found.notes] == [
        "from",
        *unknown,
    ]
    assert found[known[1]] == pytest.approx(TRUE[known[1]], rel=0.03)
    assert found[unknown[0]] == pytest.approx(0.78, rel=0.02)  # where it is without data
    assert list(found.ranges) == (["nbytes"] if nbytes else ["flops"])


def test_a_parameter_at_its_bound_is_named_and_has_no_error() -> None:
    slow = {**TRUE, "sharpness": 0.6}  # more than one after the other
    found = fit(*measured(8, 300, noise=0.02, parameters=slow))
    assert found.at_bounds == ("sharpness",) and "sharpness" not in found.stderr
    assert found["sharpness"] == pytest.approx(1.0, abs=1e-3)
    fast = {**TRUE, "memory_efficiency": 1.4}  # what a cache does: faster than the datasheet
    assert "memory_efficiency" in fit(*measured(9, 300, noise=0.02, parameters=fast)).at_bounds


def test_a_note_says_what_a_parameter_is_and_what_it_was_before() -> None:
    work, seconds = measured(1, 12)
    only_arithmetic = {**work, "nbytes": np.zeros(12)}
    (note,) = fit(only_arithmetic, seconds).notes[:1]
    assert note.startswith("memory_efficiency is hardly known from these measurements: it is 0.78,")
    assert note.endswith("and was 0.78 before them (bf16 GEMMs of A100 and H100)")


def test_another_device_can_be_the_prior() -> None:
    work, seconds = measured(1, 12)
    silent = {**work, "nbytes": np.zeros(12)}  # no measurement says anything of the memory
    usual = fit(silent, seconds)
    assert dict(fit(silent, seconds, prior={})) == dict(usual)
    other = fit(silent, seconds, prior={"memory_efficiency": 0.6})
    assert other["memory_efficiency"] == pytest.approx(0.6)
    assert other["launch"] == pytest.approx(usual["launch"])
    assert "and was 0.6 before them (the prior of the call)" in other.notes[0]
    device = fit(*measured(2, 60), source="another device")
    carried_over = fit(silent, seconds, prior=device)
    assert carried_over["memory_efficiency"] == pytest.approx(device["memory_efficiency"])
    assert carried_over.notes[0].endswith("(another device)")


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(4, 40), st.floats(0.0, 0.6))
def test_any_data_give_parameters_within_bounds(seed: int, n: int, noise: float) -> None:
    work, seconds = measured(seed, n, noise)
    found = fit(work, seconds)
    assert all(0.01 <= found[name] <= 1 for name in ("compute_efficiency", "memory_efficiency"))
    assert 1 <= found["sharpness"] <= 20 and 1e-8 <= found["launch"] <= 1e-3
    assert all(math.isfinite(error) and error > 0 for error in found.stderr.values())
    assert found.n == n and math.isfinite(found.spread) and found.spread_time is not None
    more = {name: 1.5 * values for name, values in work.items()}
    assert (times(more, found) >= times(work, found)).all()


def test_the_spread_falls_with_time_within_limits_and_platforms_keep_and_use_it(
    tmp_path: Path,
) -> None:
    assert Roofline.build(TRUE, spread=0.1).spread_at([1e-6, 1.0]) == pytest.approx(0.1)
    curved = Roofline.build(TRUE, spread=0.1, spread_time=1e-4)
    assert curved.spread_at([1e-4, 1e-4 / 32, 32e-4, 0.0, 1e3]) == pytest.approx(
        [0.1, 0.2, 0.05, 0.3, 0.05]
    )
    assert "residual spread 10.0% at 100 µs" in curved.report()
    h100 = load_platform("h100-sxm-8")
    gemm = replace(h100.kernels["gemm"], spread=0.1, spread_time=1e-4)
    again = Platform.load(
        replace(h100, kernels={**h100.kernels, "gemm": gemm}).save(tmp_path / "p.toml")
    )
    short = again.gemm(512, 512, 512, dtype="bf16")
    long = again.gemm(16384, 16384, 16384, dtype="bf16")
    assert short.spread > 0.12 and long.spread == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seconds": np.ones(3)}, "at least 4 finite times"),
        ({"flops": np.ones(3)}, r"flops has the shape \(3,\)"),
        ({"flops": -np.ones(4)}, "flops .* at least 0"),
        ({"nbytes": np.array([1.0, np.nan, 1.0, 1.0])}, "nbytes has the shape"),
        ({"peak": 0.0}, "peak .* above 0"),
        ({"bandwidth": np.inf}, "bandwidth has the shape"),
        ({"flops": 0.0, "nbytes": 0.0}, "flops and nbytes are 0 throughout"),
        ({"prior": 1.8}, "prior is 1.8"),
        ({"prior": {"sharp": 1.8}}, "parameter of prior is 'sharp'; known are launch"),
        ({"prior": {"sharpness": 0.5}}, r"prior\['sharpness'\] is 0.5; it must be from 1 to 20$"),
        ({"prior": {"launch": 1.0}}, r"prior\['launch'\] is 1.0; it must be from 1e-08 to 0.001 s"),
    ],
)
def test_wrong_input_is_refused(changed: dict[str, Any], message: str) -> None:
    given = {
        "flops": np.full(4, 1e9),
        "nbytes": np.full(4, 1e6),
        "seconds": np.full(4, 1e-5),
        **RATES,
        **changed,
    }
    with pytest.raises(ValueError, match=message):
        fit_roofline(**given)


# Memory levels from curves whose caches are known.
SIZES = 2.0 ** np.arange(14.0, 31.1, 0.5)


def curve(
    capacities: tuple[float, ...], rates: tuple[float, ...], noise: float = 0.0, seed: int = 0
) -> np.ndarray:
    """Times of passes over working sets through caches of these capacities [s]."""
    slopes = 1.0 / np.array(rates)
    cost = np.full(len(SIZES), slopes[0])
    for level, capacity in enumerate(capacities):
        slower = slopes[level + 1] - slopes[level]
        cost += slower * miss_share(SIZES, capacity=capacity)
    draws = np.random.default_rng(seed).standard_normal(len(SIZES))
    return (1e-6 + 2 * SIZES * cost) * np.exp(noise * draws)


@pytest.mark.parametrize(
    ("capacities", "rates"),
    [
        ((), (5e10,)),
        ((3e7,), (9e10, 2e10)),
        ((2e6, 7.5e7), (1.2e11, 5.7e10, 3e10)),
        ((1e6, 4e8), (1.2e11, 6e10, 3e10)),
        ((4e5, 8e6, 3e8), (2e11, 1e11, 5e10, 2e10)),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_known_caches_are_found(
    capacities: tuple[float, ...], rates: tuple[float, ...], noise: float
) -> None:
    found, speeds = find_levels(SIZES, 2 * SIZES, curve(capacities, rates, noise))
    assert len(found) == len(capacities)
    assert np.allclose(np.log2(found), np.log2(capacities), atol=0.5)
    assert speeds == pytest.approx(rates, rel=0.15)


def test_a_curve_that_ends_inside_a_cache_shows_no_level() -> None:
    inside = SIZES < 2.5e8
    found, speeds = find_levels(
        SIZES[inside], 2 * SIZES[inside], curve((1e9,), (5e10, 2e10))[inside]
    )
    assert found == () and speeds == pytest.approx((5e10,), rel=0.05)


def test_with_wild_noise_levels_still_grow_and_rates_are_positive() -> None:
    for seed in range(5):
        found, speeds = find_levels(
            SIZES, 2 * SIZES, curve((2e6, 7.5e7), (1.2e11, 5.7e10, 3e10), 0.5, seed)
        )
        assert all(a < b for a, b in itertools.pairwise(found)) and all(s > 0 for s in speeds)


def test_a_sum_of_terms_from_few_sizes_knows_that_it_knows_little() -> None:
    """Through three sizes a sum of three terms passes exactly, which says nothing of other sizes."""
    n = np.array([1e3, 1e5, 1e7, 2e7, 4e7, 8e7, 1e8])
    terms = {"launch": np.ones(7), "nbytes": n, "beyond_l2": np.maximum(n - 1e6, 0.0)}
    seconds = 2e-6 + 1e-11 * n + 3e-11 * terms["beyond_l2"]
    few = []
    for count in (3, 4, 5, 6, 7):
        first_terms = {name: values[:count] for name, values in terms.items()}
        few.append(fit_additive(first_terms, seconds[:count]))
    assert [len(fit) for fit in few] == [3, 3, 3, 3, 3]
    assert [round(fit.spread, 2) for fit in few] == [0.92, 0.56, 0.47, 0.0, 0.0]
    assert not few[0].stderr and "measure more" in few[0].notes[-1]
    assert few[1].stderr and not few[1].notes


def test_intervals_from_few_sizes_hold_on_a_machine_that_did_not_set_them() -> None:
    fits = list(few_sizes.fit_few("zen5-2"))
    for beyond in (0, 1, 2):
        assert few_sizes.hold([fit for fit in fits if fit.beyond == beyond]) > 0.8
