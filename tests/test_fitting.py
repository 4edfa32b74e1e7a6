"""Fits: known parameters are found again, honest errors, outliers tamed, and a report a person can
read."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfkit.fitting import (
    Additive,
    Pipelined,
    fit_additive,
    fit_context,
    fit_iteration,
    fit_pipelined,
)
from perfkit.models.collectives import pipelined
from perfkit.models.kernels import additive, in_context

TRUE = {"launch": 3e-6, "nbytes": 2e-11, "rows": 4e-9}
CURVE = {"alpha": 4e-5, "beta": 3e-10}
HOSTILE = "<script>alert(1)</script>"


def kernels(
    seed: int, n: int = 60, noise: float = 0.05
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    swept = {"nbytes": 10 ** rng.uniform(3, 8, n), "rows": 10 ** rng.uniform(1, 5, n)}
    seconds = additive(swept, **TRUE) * np.exp(noise * rng.standard_normal(n))
    return {"launch": np.ones(n), **swept}, seconds


def collectives(seed: int, noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    nbytes, rng = 2.0 ** np.arange(9, 27), np.random.default_rng(seed)
    return nbytes, pipelined(nbytes, **CURVE) * np.exp(noise * rng.standard_normal(len(nbytes)))


def test_without_noise_parameters_are_exact_and_terms_that_stop_at_zero_are_left_out() -> None:
    terms, seconds = kernels(0, noise=0.0)
    # falls where the time grows
    useless = {"flops": np.random.default_rng(4).uniform(1, 2, len(seconds)) / seconds}
    fit = fit_additive(terms | useless, seconds, ranges={"nbytes": (1e3, 1e8)}, source="test data")
    assert dict(fit) == pytest.approx(TRUE, rel=1e-6) and fit.spread < 1e-6
    assert fit.at_bounds == ("flops",) and set(fit.units) == set(fit) >= set(fit.stderr)
    assert (fit.source, fit.kind, fit.form) == ("test data", "fitted", "additive")


@pytest.mark.parametrize(("noise", "truth"), [(0.02, TRUE), (0.1, TRUE), (0.05, CURVE)])
def test_errors_cover_the_truth(noise: float, truth: dict[str, float]) -> None:
    """Two standard errors hold the truth in about 19 of 20 draws, and the estimates are not off on
    average."""
    draws = range(40)
    if truth is TRUE:
        fits = [fit_additive(*kernels(seed, noise=noise)) for seed in draws]
    else:
        fits = [fit_pipelined(*collectives(seed, noise)) for seed in draws]
    inside = []
    for name, value in truth.items():
        inside += [abs(fit[name] - value) <= 2 * fit.stderr[name] for fit in fits]
        middle = np.median([fit[name] / value for fit in fits])
        assert middle == pytest.approx(1, abs=noise)
    assert 0.8 <= np.mean(inside) <= 1.0


def test_standard_errors_are_those_of_weighted_least_squares_in_statsmodels() -> None:
    """Where no term stops at zero and no point is an outlier."""
    import statsmodels.api as sm  # slow to import, and only this test needs it

    n = np.geomspace(1e3, 1e7, 40)
    columns = np.stack([np.ones(40), n], axis=1)
    noise = np.exp(0.02 * np.random.default_rng(3).standard_normal(40))
    seconds = (2e-6 + 1e-11 * n) * noise
    fit = fit_additive({"launch": np.ones(40), "nbytes": n}, seconds)
    usual = sm.WLS(seconds, columns, weights=1 / seconds**2).fit()
    assert [fit["launch"], fit["nbytes"]] == pytest.approx(usual.params, rel=2e-3)
    errors = [fit.stderr["launch"], fit.stderr["nbytes"]]
    assert errors == pytest.approx(usual.bse, rel=0.02)


def test_the_spread_is_the_noise_and_more_measurements_are_more_certain() -> None:
    of_kernels = [fit_additive(*kernels(seed, noise=0.1)).spread for seed in range(10)]
    assert np.mean(of_kernels) == pytest.approx(0.1, rel=0.25)
    of_collectives = [fit_pipelined(*collectives(seed, 0.1)).spread for seed in range(20)]
    assert np.mean(of_collectives) == pytest.approx(0.1, rel=0.35)
    few = [fit_additive(*kernels(seed, 15)).stderr["nbytes"] for seed in range(8)]
    many = [fit_additive(*kernels(seed, 240)).stderr["nbytes"] for seed in range(8)]
    assert np.mean(many) < 0.5 * np.mean(few)


def test_context_finds_its_terms_or_stays_near_nothing() -> None:
    rng = np.random.default_rng(1)
    sizes = {"hot": 10 ** rng.uniform(-5, -3, 300), "cold": 10 ** rng.uniform(-6, -4, 300)}
    sizes["page_walks"] = rng.uniform(0, 500, 300)
    truth = in_context(sizes, scale=1.2, cold_scale=0.7, launch=3e-6, page_walks=4e-8)
    measured = truth * np.exp(0.03 * rng.standard_normal(300))
    fit = fit_context(sizes["hot"], sizes["cold"], sizes["page_walks"], measured, pull=0.1)
    assert (fit["scale"], fit["cold_scale"]) == (
        pytest.approx(1.2, abs=0.05),
        pytest.approx(0.7, abs=0.2),
    )
    assert fit["page_walks"] == pytest.approx(4e-8, rel=0.2)
    assert np.abs(in_context(sizes, **fit) / truth - 1).mean() < 0.05
    hot, nothing = np.array([1e-4]), np.zeros(1)
    pulled = fit_context(hot, nothing, nothing, 1.5 * hot, pull=10.0)
    free = fit_context(hot, nothing, nothing, 1.5 * hot, pull=0.1)
    assert 1.0 < pulled["scale"] < free["scale"] < 1.5
    assert pulled.get("launch", 0.0) < 4e-5


def test_iterations_find_scale_and_host_time() -> None:
    rng = np.random.default_rng(2)
    priced, counts = 10 ** rng.uniform(-3, -1, 25), rng.integers(50, 1500, 25).astype(float)
    fit = fit_iteration(
        priced, counts, (1.1 * priced + 4e-6 * counts) * np.exp(0.02 * rng.standard_normal(25))
    )
    assert (fit["scale"], fit["per_operation"]) == (
        pytest.approx(1.1, abs=0.04),
        pytest.approx(4e-6, abs=1.5e-6),
    )


def test_outliers_are_tamed() -> None:
    """What a neighbour's load does."""
    terms, seconds = kernels(3, noise=0.02)
    spoilt = np.where(np.arange(len(seconds)) % 12, 1, 2) * seconds
    clean, robust = fit_additive(terms, seconds), fit_additive(terms, spoilt)
    assert dict(robust) == pytest.approx(TRUE, rel=0.08) and robust.spread > clean.spread
    nbytes, times = collectives(3, noise=0.02)
    curve = fit_pipelined(nbytes, np.where(np.arange(len(times)) == 4, 2, 1) * times)
    assert {name: curve[name] for name in CURVE} == pytest.approx(CURVE, rel=0.1)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.0, 0.5), st.integers(5, 40))
def test_additive_fits_never_turn_negative(seed: int, noise: float, n: int) -> None:
    fit = fit_additive(*kernels(seed, n, noise))
    assert all(value > 0 for value in fit.values()) and math.isfinite(fit.spread) and fit.n == n


@settings(max_examples=25)
@given(st.floats(1e-7, 1e-2), st.floats(1e-13, 1e-8))
def test_pipelined_is_found_at_any_scale(alpha: float, beta: float) -> None:
    nbytes = np.geomspace(alpha / beta / 1000, alpha / beta * 1000, 13)
    fit = fit_pipelined(nbytes, pipelined(nbytes, alpha=alpha, beta=beta, sharpness=0.6))
    assert dict(fit) == pytest.approx({"alpha": alpha, "beta": beta, "sharpness": 0.6}, rel=1e-3)


def test_a_report_can_be_read() -> None:
    fit = Pipelined.build(
        {"alpha": 2.0123e-5, "beta": 5e-12, "sharpness": 0.6},
        stderr={"alpha": 3e-7, "beta": 1e-13},
        spread=0.08,
        bias=-0.01,
        ranges={"nbytes": (512, 5.4e8)},
        n=21,
        source="nccl-tests",
        date="2026-11-20",
        notes=("two runs",),
        units={"alpha": "s", "beta": "s/B", "sharpness": "-"},
        at_bounds=("sharpness",),
    )
    for words in (
        "[pipelined]",
        "2.012e-05 s",
        "± 3e-07 (1.5%)",
        "(no standard error)",
        "residual spread 8.0%, bias -1.0%",
        "21 points",
        "valid for nbytes from 512 to 5.4e+08",
        "source: nccl-tests 2026-11-20",
        "warning: sharpness is at a bound",
        "note: two runs",
    ):
        assert words in fit.report()
    assert repr(fit).startswith(
        "Pipelined(alpha=2.012e-05 s, beta=5e-12 s/B, sharpness=0.6; spread 8%, n=21"
    )
    assert Additive.build({}).report().startswith("[additive]")
    assert "± 1" in Additive.build({"launch": 0.0}, stderr={"launch": 1.0}).report()
    hostile = Additive.build(
        {"launch": 1.0}, source=HOSTILE, notes=(HOSTILE,), units={"launch": HOSTILE}
    )._repr_html_()
    assert "<script>" not in hostile
    assert hostile.count("&lt;script&gt;") == 3


@pytest.mark.parametrize(
    "bad", [[], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf], [[1.0], [2.0]], [1.0]]
)
def test_broken_times_are_refused(bad: list[float]) -> None:
    x = np.ones(np.size(bad))
    text = r"seconds holds \d+ val.* \d finite times above 0; measure more points or"
    with pytest.raises(ValueError, match=text):
        fit_additive({"launch": x}, bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=text):
        fit_pipelined(x, bad)
    if bad == [1.0]:  # enough for what iterations add
        return
    with pytest.raises(ValueError, match=text):
        fit_context(x, x, x, bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=text):
        fit_iteration(x, x, bad)  # type: ignore[arg-type]
