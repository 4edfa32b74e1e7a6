"""Fits: known parameters are found again, honest errors, outliers tamed, and a report a person can read."""

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.fitting import Fit, fit_additive, fit_context, fit_iteration, fit_pipelined
from perfkit.models.collectives import pipelined
from perfkit.models.kernels import additive, in_context

TRUE = {"launch": 3e-6, "nbytes": 2e-11, "rows": 4e-9}
HOSTILE = "<script>alert(1)</script>"


def sizes(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    return {"nbytes": 10 ** rng.uniform(3, 8, n), "rows": 10 ** rng.uniform(1, 5, n)}


def kernels(seed: int, n: int = 60, noise: float = 0.05) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    swept = sizes(rng, n)
    seconds = additive(swept, **TRUE) * np.exp(noise * rng.standard_normal(n))
    return {"launch": np.ones(n), **swept}, seconds


def collectives(seed: int, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    nbytes = 2.0 ** np.arange(9, 27)
    return nbytes, pipelined(nbytes, alpha=4e-5, beta=3e-10, sharpness=0.6) * np.exp(
        noise * rng.standard_normal(len(nbytes))
    )


# Known parameters are found again.


def test_additive_without_noise_is_exact() -> None:
    terms, seconds = kernels(0, noise=0.0)
    fit = fit_additive(terms, seconds)
    assert dict(fit) == pytest.approx(TRUE, rel=1e-6)
    assert fit.spread < 1e-6


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_additive_errors_cover_the_truth(noise: float) -> None:
    """Two standard errors hold the truth in about 19 of 20 draws, and the estimates are not off on average."""
    inside, ratios = [], []
    for seed in range(40):
        fit = fit_additive(*kernels(seed, noise=noise))
        inside += [abs(fit[name] - value) <= 2 * fit.stderr[name] for name, value in TRUE.items()]
        ratios.append([fit[name] / value for name, value in TRUE.items()])
    assert 0.8 <= np.mean(inside) <= 1.0
    assert np.median(ratios, axis=0) == pytest.approx(1, abs=noise)


def test_pipelined_errors_cover_the_truth() -> None:
    inside = []
    for seed in range(40):
        fit = fit_pipelined(*collectives(seed))
        inside += [abs(fit[n] - v) <= 2 * fit.stderr[n] for n, v in (("alpha", 4e-5), ("beta", 3e-10))]
        assert fit["sharpness"] == 0.6
    assert 0.8 <= np.mean(inside) <= 1.0


def test_the_spread_is_the_noise() -> None:
    spreads = [fit_additive(*kernels(seed, noise=0.1)).spread for seed in range(10)]
    assert np.mean(spreads) == pytest.approx(0.1, rel=0.25)
    curves = [fit_pipelined(*collectives(seed, noise=0.1)).spread for seed in range(20)]
    assert np.mean(curves) == pytest.approx(0.1, rel=0.35)


def test_more_measurements_are_more_certain() -> None:
    few, many = (np.mean([fit_additive(*kernels(s, n)).stderr["nbytes"] for s in range(8)]) for n in (15, 240))
    assert many < 0.5 * few


def test_context_finds_scale_and_launch() -> None:
    rng = np.random.default_rng(1)
    hot, cold, walks = 10 ** rng.uniform(-5, -3, 300), 10 ** rng.uniform(-6, -4, 300), rng.uniform(0, 500, 300)
    known = {"scale": 1.2, "cold_scale": 0.7, "launch": 3e-6, "page_walks": 4e-8}
    truth = in_context({"hot": hot, "cold": cold, "page_walks": walks}, **known)
    fit = fit_context(hot, cold, walks, truth * np.exp(0.03 * rng.standard_normal(300)), pull=0.1)
    assert fit["scale"] == pytest.approx(1.2, abs=0.05)
    assert fit["cold_scale"] == pytest.approx(0.7, abs=0.2)
    assert fit["page_walks"] == pytest.approx(4e-8, rel=0.2)
    again = in_context({"hot": hot, "cold": cold, "page_walks": walks}, **fit)
    assert np.abs(again / truth - 1).mean() < 0.05


def test_context_without_much_data_stays_near_nothing() -> None:
    one = np.array([1e-4])
    fit = fit_context(one, 0 * one, 0 * one, 1.5 * one)
    assert 1.0 < fit["scale"] < fit_context(one, 0 * one, 0 * one, 1.5 * one, pull=0.1)["scale"] < 1.5
    assert fit.get("launch", 0.0) < 4e-5


def test_iterations_find_scale_and_host_time() -> None:
    rng = np.random.default_rng(2)
    priced, counts = 10 ** rng.uniform(-3, -1, 25), rng.integers(50, 1500, 25).astype(float)
    truth = 1.1 * priced + 4e-6 * counts
    fit = fit_iteration(priced, counts, truth * np.exp(0.02 * rng.standard_normal(25)))
    assert fit["scale"] == pytest.approx(1.1, abs=0.04)
    assert fit["per_operation"] == pytest.approx(4e-6, abs=1.5e-6)


# Outliers, bounds, limits.


def test_outliers_are_tamed() -> None:
    terms, seconds = kernels(3, noise=0.02)
    spoilt = seconds.copy()
    spoilt[::12] *= 2  # what a neighbour's load does
    clean, robust = fit_additive(terms, seconds), fit_additive(terms, spoilt)
    for name, value in TRUE.items():
        assert robust[name] == pytest.approx(value, rel=0.08)
    assert robust.spread > clean.spread
    nbytes, times = collectives(3, noise=0.02)
    times[4] *= 2
    curve = fit_pipelined(nbytes, times)
    assert curve["alpha"] == pytest.approx(4e-5, rel=0.1)
    assert curve["beta"] == pytest.approx(3e-10, rel=0.1)


def test_terms_that_stop_at_zero_are_left_out() -> None:
    terms, seconds = kernels(4, noise=0.0)
    rng = np.random.default_rng(4)
    useless = {"flops": rng.uniform(1, 2, len(seconds)) / seconds}  # falls where the time grows
    fit = fit_additive({**terms, **useless}, seconds)
    assert "flops" not in fit
    assert "flops" not in fit.stderr
    assert all(value > 0 for value in fit.values())


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.0, 0.5), st.integers(5, 40))
def test_additive_fits_never_turn_negative(seed: int, noise: float, n: int) -> None:
    fit = fit_additive(*kernels(seed, n, noise))
    assert all(value > 0 for value in fit.values())
    assert math.isfinite(fit.spread)
    assert fit.n == n
    assert (additive(sizes(np.random.default_rng(seed), 50), **fit) >= 0).all()


@settings(max_examples=25)
@given(st.floats(1e-7, 1e-2), st.floats(1e-13, 1e-8))
def test_pipelined_is_found_at_any_scale(alpha: float, beta: float) -> None:
    nbytes = np.geomspace(alpha / beta / 1000, alpha / beta * 1000, 13)
    fit = fit_pipelined(nbytes, pipelined(nbytes, alpha=alpha, beta=beta, sharpness=0.6))
    assert fit["alpha"] == pytest.approx(alpha, rel=1e-3)
    assert fit["beta"] == pytest.approx(beta, rel=1e-3)


def test_fits_unpack_into_their_models() -> None:
    terms, seconds = kernels(5)
    fit = fit_additive(terms, seconds, ranges={"nbytes": (1e3, 1e8)}, source="test data")
    assert additive(terms, **fit) == pytest.approx(seconds, rel=0.5)
    nbytes, times = collectives(5)
    curve = fit_pipelined(nbytes, times, source="test data")
    assert pipelined(nbytes, **curve) == pytest.approx(times, rel=0.5)
    assert curve.ranges == {"nbytes": (nbytes.min(), nbytes.max())}
    assert (fit.source, fit.kind, fit.form, curve.form) == ("test data", "fitted", "additive", "pipelined")
    assert set(fit.units) == set(fit)
    assert set(curve.units) == set(curve)


# Reports.


def test_a_report_can_be_read() -> None:
    fit = Fit(
        "pipelined", {"alpha": 2.0123e-5, "beta": 5e-12, "sharpness": 0.6}, stderr={"alpha": 3e-7, "beta": 1e-13},
        spread=0.08, bias=-0.01, ranges={"nbytes": (512, 5.4e8)}, n=21, source="nccl-tests", date="2026-11-20",
        notes=("two runs",), units={"alpha": "s", "beta": "s/B", "sharpness": "-"}, at_bounds=("sharpness",),
    )  # fmt: skip
    text = fit.report()
    for words in (
        "[pipelined]", "2.012e-05 s", "± 3e-07 (1.5%)", "(no standard error)", "residual spread 8.0%, bias -1.0%",
        "21 points", "valid for nbytes from 512 to 5.4e+08", "source: nccl-tests 2026-11-20",
        "warning: sharpness is at a bound", "note: two runs",
    ):  # fmt: skip
        assert words in text, text
    assert repr(fit).startswith("Fit(pipelined: alpha=2.012e-05 s, beta=5e-12 s/B, sharpness=0.6; spread 8%, n=21")
    assert "\n" not in repr(fit)


def test_reports_escape_what_they_are_given() -> None:
    fit = Fit(HOSTILE, {HOSTILE: 1.0}, source=HOSTILE, notes=(HOSTILE,), units={HOSTILE: HOSTILE})
    page = fit._repr_html_()
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 4


def test_an_empty_fit_has_a_report() -> None:
    assert Fit("none", {}).report().startswith("[none]")
    assert Fit("none", {"a": 0.0}, stderr={"a": 1.0}).report()


def test_a_fit_is_a_mapping_and_a_value() -> None:
    fit = Fit("additive", {"launch": 1e-6})
    assert dict(fit) == {"launch": 1e-6}
    assert len(fit) == 1
    assert fit.get("nbytes", 0.0) == 0.0
    assert "launch" in fit
    with pytest.raises(FrozenInstanceError):
        fit.n = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        fit["launch"] = 2.0  # type: ignore[index]


# Refusals.

ONE = np.ones(1)


def call(values: Any) -> list[Callable[[], Fit]]:
    x = np.ones(np.size(values))
    return [
        lambda: fit_additive({"launch": x}, values),
        lambda: fit_pipelined(x, values),
        lambda: fit_context(x, x, x, values),
        lambda: fit_iteration(x, x, values),
    ]


@pytest.mark.parametrize("which", range(4), ids=["additive", "pipelined", "context", "iteration"])
@pytest.mark.parametrize(
    "values", [[], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf], [[1.0], [2.0]]], ids=str
)
def test_broken_times_are_refused(which: int, values: list[Any]) -> None:
    with pytest.raises(
        ValueError, match=r"seconds holds \d+ values .* finite times above 0; measure more points or drop"
    ):
        call(values)[which]()


@pytest.mark.parametrize("which", [0, 1], ids=["additive", "pipelined"])
def test_one_measurement_is_too_few(which: int) -> None:
    with pytest.raises(ValueError, match="at least 2 finite times"):
        call([1.0])[which]()
