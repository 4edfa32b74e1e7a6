"""Fits of kernels under the roofs of arithmetic and memory: found again, honest about what the data do not tell."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.fitting import Fit, fit_roofline
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.estimates import FORMS
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform

TRUE = {"launch": 3e-6, "compute_efficiency": 0.7, "memory_efficiency": 0.85, "sharpness": 2.2}
RATES = {"peak": 989.4e12, "bandwidth": 3.35e12}
Work = dict[str, np.ndarray]


def shapes(rng: np.random.Generator, n: int, low: float = 0.0) -> Work:
    """FLOP and bytes of random bf16 GEMMs, sides from 2^low on."""
    m, n_, k = 2.0 ** rng.uniform([[low], [7], [7]], [[15], [14], [14]], (3, n))
    return {"flops": gemm_flops(m, n_, k), "nbytes": gemm_bytes(m, n_, k, itemsize=2)}


def times(work: Work, parameters: Mapping[str, float] = TRUE) -> np.ndarray:
    rates = {name: np.asarray(rate) for name, rate in RATES.items()}
    return np.asarray(FORMS["roofline"](work | rates, **parameters))


def measured(seed: int, n: int, noise: float = 0.08, parameters: Mapping[str, float] = TRUE) -> tuple[Work, np.ndarray]:
    rng = np.random.default_rng(seed)
    work = shapes(rng, n)
    return work, times(work, parameters) * np.exp(noise * rng.standard_normal(n))


def fit(work: Work, seconds: np.ndarray, **more: Any) -> Fit:
    return fit_roofline(**work, seconds=seconds, **RATES, **more)


# Known parameters are found again.


def test_without_noise_the_prior_does_not_matter() -> None:
    found = fit(*measured(0, 60, noise=0.0))
    assert dict(found) == pytest.approx(TRUE, rel=2e-3)
    assert found.spread < 2e-3 and not found.notes and not found.at_bounds
    assert set(found.stderr) == set(TRUE)


def test_standard_errors_cover_the_truth() -> None:
    inside, ratios = [], []
    for seed in range(40):
        found = fit(*measured(seed, 80))
        inside += [abs(found[name] - TRUE[name]) <= 2 * error for name, error in found.stderr.items()]
        ratios.append([found[name] / value for name, value in TRUE.items()])
    assert 0.85 <= np.mean(inside) <= 1.0
    assert np.median(ratios, axis=0) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("n", [8, 32, 400])
def test_intervals_hold_what_was_not_fitted(n: int) -> None:
    """Noise that falls with the time, as that of real kernels does: four fifths of unseen ones lie inside."""
    inside = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        work, unseen = shapes(rng, n), shapes(rng, 300)
        seconds, later = (
            times(w) * np.exp(0.1 * (times(w) / 1e-4) ** -0.2 * rng.standard_normal(len(w["flops"])))
            for w in (work, unseen)
        )
        found = fit(work, seconds)
        predicted = times(unseen, found)
        inside.append(np.mean(np.abs(np.log(later / predicted)) <= 1.2816 * found.spread_at(predicted)))
    assert 0.7 <= np.mean(inside) <= 0.9


def test_outliers_are_tamed() -> None:
    work, seconds = measured(3, 100, noise=0.02)
    spoilt = seconds.copy()
    spoilt[::12] *= 2
    clean, robust = fit(work, seconds), fit(work, spoilt)
    assert dict(robust) == pytest.approx(dict(clean), rel=0.1)
    assert robust.spread > 2 * clean.spread


def test_more_measurements_are_more_certain() -> None:
    few, many = (np.mean([fit(*measured(s, n)).stderr["compute_efficiency"] for s in range(5)]) for n in (30, 480))
    assert many < 0.45 * few


# What the measurements do not tell is not invented.


def test_kernels_that_only_move_data_say_nothing_of_arithmetic() -> None:
    rng = np.random.default_rng(5)
    nbytes = 10 ** rng.uniform(4, 9, 40)
    seconds = times({"flops": 0 * nbytes, "nbytes": nbytes}) * np.exp(0.03 * rng.standard_normal(40))
    for flops in (0.0, nbytes / 100):
        found = fit_roofline(flops, nbytes, seconds, **RATES)
        assert set(found.stderr) == {"launch", "memory_efficiency"}
        assert found["memory_efficiency"] == pytest.approx(0.85, rel=0.03)
        assert found["compute_efficiency"] == pytest.approx(0.78, rel=0.02)  # where it is without data
        assert list(found.ranges) == ["nbytes"]
        assert [note.split()[0] for note in found.notes] == ["compute_efficiency", "sharpness"]


def test_kernels_that_only_compute_say_nothing_of_memory() -> None:
    rng = np.random.default_rng(6)
    flops = 10 ** rng.uniform(9, 14, 40)
    seconds = times({"flops": flops, "nbytes": 0 * flops}) * np.exp(0.03 * rng.standard_normal(40))
    found = fit_roofline(flops, 0.0, seconds, **RATES, notes=("from a test",))
    assert set(found.stderr) == {"launch", "compute_efficiency"}
    assert list(found.ranges) == ["flops"] and found.notes[0] == "from a test" and len(found.notes) == 3


def test_long_kernels_say_nothing_of_the_launch() -> None:
    rng = np.random.default_rng(7)
    work = {name: 1e3 * values for name, values in shapes(rng, 60, low=12).items()}
    found = fit(work, times(work) * np.exp(0.05 * rng.standard_normal(60)))
    assert "launch" not in found.stderr and "compute_efficiency" in found.stderr
    assert "launch is hardly known" in found.report()


def test_a_parameter_at_its_bound_is_named_and_has_no_error() -> None:
    slow = {**TRUE, "sharpness": 0.6}  # more than one after the other
    found = fit(*measured(8, 300, noise=0.02, parameters=slow))
    assert found.at_bounds == ("sharpness",) and "sharpness" not in found.stderr
    assert found["sharpness"] == pytest.approx(1.0, abs=1e-3)
    fast = {**TRUE, "memory_efficiency": 1.4}  # what a cache does: faster than the datasheet
    assert "memory_efficiency" in fit(*measured(9, 300, noise=0.02, parameters=fast)).at_bounds


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


def test_peaks_may_differ_by_measurement() -> None:
    work, _ = measured(0, 60)
    peak = np.where(np.arange(60) % 2, 989.4e12, 1978.9e12)
    seconds = np.asarray(FORMS["roofline"](work | {"peak": peak, "bandwidth": np.asarray(RATES["bandwidth"])}, **TRUE))
    found = fit_roofline(**work, seconds=seconds, peak=peak, bandwidth=RATES["bandwidth"])
    assert dict(found) == pytest.approx(TRUE, rel=2e-3)


def test_origin_is_kept_and_no_day_invented() -> None:
    work, seconds = measured(0, 10)
    assert fit(work, seconds).date == "" and fit(work, seconds).source == ""
    known = fit(work, seconds, source="test data", date="2026-11-21")
    assert "source: test data 2026-11-21" in known.report()
    assert known.units == {"launch": "s"} | dict.fromkeys(list(TRUE)[1:], "-")


# The spread follows the time.


def test_spread_at_falls_with_time_within_limits() -> None:
    flat = Fit("roofline", TRUE, spread=0.1)
    assert flat.spread_at([1e-6, 1.0]) == pytest.approx(0.1)
    curved = Fit("roofline", TRUE, spread=0.1, spread_time=1e-4)
    assert curved.spread_at(1e-4) == pytest.approx(0.1)
    assert curved.spread_at([1e-4 / 32, 32e-4]) == pytest.approx([0.2, 0.05])
    assert curved.spread_at([0.0, 1e-12, 1e3]) == pytest.approx([0.3, 0.3, 0.05])
    assert "residual spread 10.0% at 100 µs" in curved.report()


def test_platforms_keep_and_use_it(tmp_path: Path) -> None:
    from dataclasses import replace

    h100 = load_platform("h100-sxm-8")
    gemm = replace(h100.kernels["gemm"], spread=0.1, spread_time=1e-4)
    platform = replace(h100, kernels={**h100.kernels, "gemm": gemm})
    again = Platform.load(platform.save(tmp_path / "p.toml"))
    assert again.kernels["gemm"].spread_time == 1e-4
    short, long = (again.gemm(n, n, n, dtype="bf16") for n in (512, 16384))
    assert short.spread > 0.12 and long.spread == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seconds": np.ones(3)}, "at least 4 finite times"),
        ({"seconds": np.array([1.0, 2.0, 0.0, 1.0])}, "above 0"),
        ({"flops": np.ones(3)}, r"flops has the shape \(3,\)"),
        ({"flops": -np.ones(4)}, "flops .* at least 0"),
        ({"nbytes": np.array([1.0, np.nan, 1.0, 1.0])}, "nbytes has the shape"),
        ({"peak": 0.0}, "peak .* above 0"),
        ({"bandwidth": np.inf}, "bandwidth has the shape"),
        ({"flops": 0.0, "nbytes": 0.0}, "flops and nbytes are 0 throughout"),
    ],
)
def test_wrong_input_is_refused(changed: dict[str, Any], message: str) -> None:
    given = {"flops": np.full(4, 1e9), "nbytes": np.full(4, 1e6), "seconds": np.full(4, 1e-5), **RATES, **changed}
    with pytest.raises(ValueError, match=message):
        fit_roofline(**given)
