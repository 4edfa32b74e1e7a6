"""Memory levels are found from curves whose caches are known."""

import itertools

import numpy as np
import pytest

from perfkit.fitting import find_levels
from perfkit.models.caches import miss_share

SIZES = 2.0 ** np.arange(14.0, 31.1, 0.5)


def curve(capacities: tuple[float, ...], rates: tuple[float, ...], noise: float = 0.0, seed: int = 0) -> np.ndarray:
    slopes = 1.0 / np.array(rates)
    cost = slopes[0] + sum(
        (far - near) * miss_share(SIZES, capacity=c)
        for c, near, far in zip(capacities, slopes, slopes[1:], strict=False)
    )
    return (1e-6 + 2 * SIZES * cost) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(SIZES)))


@pytest.mark.parametrize(("capacities", "rates"), [
    ((), (5e10,)),
    ((3e7,), (9e10, 2e10)),
    ((2e6, 7.5e7), (1.2e11, 5.7e10, 3e10)),
    ((1e6, 4e8), (1.2e11, 6e10, 3e10)),
    ((4e5, 8e6, 3e8), (2e11, 1e11, 5e10, 2e10)),
])  # fmt: skip
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_known_caches_are_found(capacities: tuple[float, ...], rates: tuple[float, ...], noise: float) -> None:
    found, speeds = find_levels(SIZES, 2 * SIZES, curve(capacities, rates, noise))
    assert len(found) == len(capacities)
    assert np.allclose(np.log2(found), np.log2(capacities), atol=0.5)
    assert speeds == pytest.approx(rates, rel=0.15)


def test_a_curve_that_ends_inside_a_cache_shows_no_level() -> None:
    inside = SIZES < 2.5e8
    found, speeds = find_levels(SIZES[inside], 2 * SIZES[inside], curve((1e9,), (5e10, 2e10))[inside])
    assert found == () and speeds == pytest.approx((5e10,), rel=0.05)


def test_noise_does_not_break_it() -> None:
    for seed in range(5):
        found, speeds = find_levels(SIZES, 2 * SIZES, curve((2e6, 7.5e7), (1.2e11, 5.7e10, 3e10), 0.5, seed))
        assert all(a < b for a, b in itertools.pairwise(found)) and all(s > 0 for s in speeds)
