import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models.caches import lru_hit_rate
from perfkit.models.distributions import ReuseHistogram, Uniform, Zipf, unique_rows

hitters = st.lists(st.floats(0, 0.2), max_size=5).map(tuple)
zipfs = st.one_of(
    st.builds(Zipf, st.integers(1, 10**8), st.floats(0, 3), st.floats(-0.9, 100)),
    st.builds(Zipf, st.integers(6, 10**8), st.floats(0, 3), st.floats(-0.9, 100), hitters),
)
distributions = st.one_of(zipfs, st.builds(Uniform, st.integers(1, 10**8)))


def probabilities(distribution: Uniform | Zipf) -> np.ndarray:
    """Of every row, term by term."""
    if isinstance(distribution, Uniform):
        return np.full(distribution.rows, 1 / distribution.rows)
    hitters = np.array(distribution.heavy_hitters)
    ranks = np.arange(len(hitters) + 1.0, distribution.rows + 1)
    tail = (ranks + distribution.shift) ** -distribution.exponent
    return np.concatenate([hitters, tail / tail.sum() * (1 - hitters.sum())])


@given(distributions)
def test_buckets_hold_all_rows_and_all_probability(distribution: Uniform | Zipf) -> None:
    p, rows = distribution.buckets()
    assert rows.sum() == distribution.rows and len(p) <= 135
    assert p @ rows == pytest.approx(1, abs=1e-12)
    tail = p[len(getattr(distribution, "heavy_hitters", ())) :]
    assert np.all(np.diff(tail) <= 1e-12 * tail[0])


@pytest.mark.parametrize(
    "zipf",
    [
        Zipf(10**6, 1.05),
        Zipf(10**6, 0.5),
        Zipf(10**6, 1.2, 10),
        Zipf(10**6, 1.0),
        Zipf(1000, 2.0),
        Zipf(50, 0.8),
        Zipf(10**6, 1.1, -0.9),
        Zipf(10**6, 1.15, 40, (0.1, 0.05, 0.02)),
        Zipf(10**6, 0.1, -0.9, (0.0, 0.5)),
        Zipf(10**5, 0.8, 0, (0.6, 0.4)),
        Zipf(4, 1.0, 0, (0.1, 0.2, 0.3)),
    ],
)
def test_bucketed_unique_rows_are_the_exact_sum(zipf: Zipf) -> None:
    p = probabilities(zipf)
    for lookups in (1, 10, 1e3, 1e5, 1e7):
        exact = -np.expm1(lookups * np.log1p(-p)).sum()
        assert float(unique_rows(zipf, lookups)) == pytest.approx(exact, rel=1e-3)


def test_unique_rows_of_a_uniform_table() -> None:
    assert float(unique_rows(Uniform(1000), 700)) == pytest.approx(1000 * (1 - (1 - 1 / 1000) ** 700))
    assert unique_rows(Uniform(1), [0, 0.5, 1, 50]).tolist() == pytest.approx([0, 0.5, 1, 1])
    assert float(unique_rows(Zipf(10**6, 0.0), 1e5)) == pytest.approx(float(unique_rows(Uniform(10**6), 1e5)))


@given(distributions, st.floats(0, 1e12), st.floats(1, 3))
def test_unique_rows_are_bounded_and_grow(distribution: Uniform | Zipf, lookups: float, more: float) -> None:
    few, many = unique_rows(distribution, [lookups, lookups * more])
    assert 0 <= few <= min(lookups, distribution.rows * (1 + 1e-9))
    assert few * (1 - 1e-12) <= many <= few * more * (1 + 1e-9) + 1e-9


def histogram_of(accesses: np.ndarray) -> tuple[float, ...]:
    seen = accesses[accesses > 0]
    bins = np.minimum(np.ceil(np.log2(seen)).astype(int), 16)
    return tuple(np.bincount(bins, minlength=17).astype(float).tolist())


def test_reuse_histogram_against_its_own_lookups() -> None:
    zipf = Zipf(20_000, 1.05)
    lookups = np.random.default_rng(1).choice(zipf.rows, 100_000, p=probabilities(zipf))
    accesses = np.bincount(lookups, minlength=zipf.rows)
    histogram = ReuseHistogram(histogram_of(accesses), 100_000, zipf.rows)
    assert float(unique_rows(histogram, 100_000)) == pytest.approx((accesses > 0).sum(), rel=1e-9)
    for part in (0.05, 0.2, 0.5, 1.5):
        assert float(unique_rows(histogram, part * 1e5)) == pytest.approx(
            float(unique_rows(zipf, part * 1e5)), rel=0.03
        )
    for cached in (200, 1000, 5000):
        assert lru_hit_rate(histogram, cached) == pytest.approx(lru_hit_rate(zipf, cached), abs=0.03)
    with pytest.warns(UserWarning, match="more than twice"):
        assert float(unique_rows(histogram, 1e9)) <= zipf.rows


def test_reuse_histogram_of_a_published_data_set() -> None:
    """facebookresearch/dlrm_datasets, 2021 (t856_bs65536.pt): 887.0 M lookups of 128.4 M rows; share of rows by bin."""
    share = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001, 0, 0, 0, 0, 0, 0, 0]
    counts = tuple(128.4e6 * s for s in share)
    histogram = ReuseHistogram(counts, 887.0e6, 1_000_000_000)
    half, whole = unique_rows(histogram, [443.5e6, 887e6])
    assert whole == pytest.approx(sum(counts))
    assert 0.5 * whole < half < whole
    # Rows seen once give half of themselves, rows seen twice three quarters, ...
    assert half > 128.4e6 * (0.473 / 2 + 0.152 * 3 / 4 + 0.139 * 7 / 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1.0,) * 16, 20, 100), "16 bins"),
        (((1.0,) * 17, 10, 100), "add up to 17"),
        (((0.0,) * 17, 10, 100), "add up to 0"),
        (((-1.0, *(1.0,) * 16), 100, 100), "counts is -1"),
    ],
)
def test_histograms_that_cannot_be(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReuseHistogram(*arguments)


@pytest.mark.parametrize("bad", [0, -5, 2.5, "many", float("nan")])
def test_tables_that_cannot_be(bad: object) -> None:
    with pytest.raises(ValueError, match=r"^rows is"):
        Uniform(bad)
    with pytest.raises(ValueError, match=r"^rows is"):
        Zipf(bad, 1.0)
    with pytest.raises(ValueError, match=r"^exponent is -1"):
        Zipf(10, -1)


@pytest.mark.parametrize(
    "zipf", [Zipf(20_000, 1.1, 30), Zipf(20_000, 1.0, 2, (0.2, 0.1, 0.05)), Zipf(20_000, 0.1, -0.9)]
)
def test_unique_rows_are_those_of_drawn_lookups(zipf: Zipf) -> None:
    rng, p = np.random.default_rng(7), probabilities(zipf)
    for lookups in (1000, 10_000, 100_000):
        drawn = [len(np.unique(rng.choice(zipf.rows, lookups, p=p))) for _ in range(4)]
        assert float(unique_rows(zipf, lookups)) == pytest.approx(np.mean(drawn), rel=0.02)


@pytest.mark.parametrize("parts", [2, 3, 8, 64])
@pytest.mark.parametrize(
    "law", [Zipf(80_000, 1.05), Zipf(80_000, 1.3, 50), Zipf(80_000, 0.8, 2, (0.02,) * 16), Uniform(80_000)]
)
def test_parts_find_together_what_the_whole_finds(law: Uniform | Zipf, parts: int) -> None:
    part = law.resize(law.rows // parts)
    assert part.rows == law.rows // parts and law.resize(law.rows) == law
    for lookups in (1e4, 1e6):
        found = parts * float(unique_rows(part, lookups / parts))
        assert found == pytest.approx(float(unique_rows(law, lookups)), rel=0.02)
    assert part.resize(part.rows // 2) == law.resize(part.rows // 2)


def test_a_part_of_a_histogram_has_its_part_of_rows_and_lookups() -> None:
    whole = ReuseHistogram((50.0, 10.0, 5.0, *(0.0,) * 14), 90, 1000)
    part = whole.resize(250)
    assert (part.rows, part.lookups, sum(part.counts)) == (250, 22.5, 16.25)
    assert float(unique_rows(part, 10)) == pytest.approx(float(unique_rows(whole, 40)) / 4)


@given(zipfs, st.integers(1, 10**8))
def test_any_law_can_be_resized(law: Zipf, rows: int) -> None:
    part = law.resize(min(rows, law.rows))
    p, many = part.buckets()
    assert many.sum() == pytest.approx(min(rows, law.rows)) and p @ many == pytest.approx(1)
    assert 0 <= float(unique_rows(part, 1e6)) <= min(rows, 1e6) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shift": -1}, "shift is -1; it must be a number above -1"),
        ({"shift": float("nan")}, "shift is nan"),
        ({"shift": "far"}, "shift is 'far'"),
        ({"heavy_hitters": (0.5, 0.6)}, "add up to 1.1"),
        ({"heavy_hitters": (-0.1,)}, "heavy_hitters is -0.1"),
        ({"heavy_hitters": (float("nan"),)}, "heavy_hitters is nan"),
        ({"heavy_hitters": (0.01,) * 10}, "has 10 entries; it must have fewer than the 10 rows"),
    ],
)
def test_laws_that_cannot_be(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Zipf(10, 1.0, **arguments)


def test_heavy_hitters_in_single_precision_may_add_up_to_a_little_more() -> None:
    law = Zipf(10, 1.0, heavy_hitters=(0.5, 0.5000003))
    assert sum(law.heavy_hitters) <= 1 and float(unique_rows(law, 1e9)) == pytest.approx(2)
