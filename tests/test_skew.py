"""Zipf exponents of drawn lookups: unbiased, with honest errors, and a misfit where there is no
law."""

import math

import numpy as np
import pytest

from perfkit.models.distributions import ReuseHistogram
from perfkit.models.skew import ZipfFit, bin_accesses, fit_zipf
from perfkit.readers.table_configs import find_histogram


def draw(rows: int, exponent: float, lookups: int, seed: int) -> np.ndarray:
    """Accesses of the rows that were found, most popular first."""
    rng, weights = np.random.default_rng(seed), np.arange(1, rows + 1.0) ** -exponent
    if lookups >= rows:
        found = rng.multinomial(lookups, weights / weights.sum())
        return found[found > 0]
    cumulative = np.cumsum(weights)
    return np.unique(
        np.searchsorted(cumulative, rng.random(lookups) * cumulative[-1]), return_counts=True
    )[1]


@pytest.mark.parametrize(
    ("rows", "exponent", "lookups"),
    [
        (100_000, 1.05, 100_000),
        (1_000_000, 0.6, 100_000),
        (300_000, 0.2, 300_000),
        (100_000, 0.0, 300_000),
        (1_000_000, 1.2, 10_000),
        (10_000, 1.0, 1_000_000),
        (1000, 2.0, 10_000),
        (1000, 0.8, 1_000_000),
        (100_000, 0.9, 200),
        (200, 0.5, 5000),
        (500, 1.2, 50_000),
    ],
)
def test_the_exponent_is_found_within_two_standard_errors(
    rows: int, exponent: float, lookups: int
) -> None:
    """In 19 of 20 draws, and the error is as large as it says."""
    off = []
    for seed in range(20):
        accesses = draw(rows, exponent, lookups, seed)
        fit = fit_zipf(bin_accesses(accesses, rows=rows))
        off.append((fit.exponent - exponent) / fit.stderr)
        assert fit.stderr < 0.06 and fit.misfit < 5
    assert (
        np.sum(np.abs(off) > 2) <= 2
        and math.sqrt(np.mean(np.square(off))) < 1.5
        and np.abs(off).max() < 3
    )


def test_what_is_no_zipf_law_says_so() -> None:
    accesses = np.random.default_rng(0).poisson(np.repeat([100.0, 0.1], [1000, 99_000]))
    fit = fit_zipf(bin_accesses(accesses, rows=100_000))
    assert fit.misfit > 100 and fit.stderr > 0.02
    histogram = find_histogram("dlrm-datasets-2021", rows=856 * 10**6)[0]
    part = fit_zipf(histogram.resize(10**6))
    assert 0.8 < part.exponent < 1.2 and part.misfit > 100
    nothing = fit_zipf(bin_accesses([1000], rows=1))
    assert repr(nothing) == "ZipfFit(0.000 ± inf, misfit nan)"
    assert fit_zipf(bin_accesses(draw(30, 0.0, 100_000, 0), rows=30)).stderr > 1e6, (
        "all rows are in one bin"
    )
    assert fit_zipf(bin_accesses([1], rows=10**6)).stderr > 0.1
    assert repr(ZipfFit(0.93217, 0.0123, 1.234)) == "ZipfFit(0.932 ± 0.012, misfit 1.2)"


def test_accesses_are_binned_by_octave_and_impossible_counts_are_refused() -> None:
    accesses = [0, 1, 2, 3, 4, 5, 8, 9, 2**15, 2**15 + 1, 10**9]
    histogram = bin_accesses(accesses, rows=11)
    # no row is accessed between 2**4 and 2**14 times
    empty_bins = np.zeros(10, dtype=int).tolist()
    assert histogram == ReuseHistogram((1, 1, 2, 2, 1, *empty_bins, 1, 2), sum(accesses), 11)
    for given, rows, message in (
        (accesses, 9, "add up to 10"),
        (accesses, 0, "rows is 0"),
        ([], 5, "lookups is"),
    ):
        with pytest.raises(ValueError, match=message):
            bin_accesses(given, rows=rows)
