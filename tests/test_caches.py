"""Which rows are looked up and which of them a cache still holds: against exact sums, simulated
caches and limits."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perfkit.models.caches import (
    cold_misses,
    lru_hit_rate,
    lru_misses,
    miss_share,
    page_walks,
    rotating_misses,
)
from perfkit.models.distributions import Distribution, ReuseHistogram, Uniform, Zipf, unique_rows
from perfkit.models.kernels import reuse_distances

hitters = st.lists(st.floats(0, 0.2), max_size=5).map(tuple)
zipfs = st.one_of(
    st.builds(Zipf, st.integers(1, 10**8), st.floats(0, 3), st.floats(-0.9, 100)),
    st.builds(Zipf, st.integers(6, 10**8), st.floats(0, 3), st.floats(-0.9, 100), hitters),
)
distributions = st.one_of(zipfs, st.builds(Uniform, st.integers(1, 10**8)))
parts = st.builds(lambda law, rows: law.resize(min(rows, law.rows)), zipfs, st.integers(1, 10**8))
Law = Uniform | Zipf


def probabilities(law: Law) -> np.ndarray:
    """Of every row, term by term."""
    if isinstance(law, Uniform):
        return np.full(law.rows, 1 / law.rows)
    heavy = np.array(law.heavy_hitters)
    tail = (np.arange(len(heavy) + 1.0, law.rows + 1) + law.shift) ** -law.exponent
    return np.concatenate([heavy, tail / tail.sum() * (1 - heavy.sum())])


# Distinct rows.


@given(st.one_of(distributions, parts))
def test_buckets_hold_all_rows_and_all_probability(law: Law) -> None:
    p, rows = law.buckets()
    assert (
        rows.sum() == pytest.approx(law.rows, rel=1e-12)
        and len(p) <= 135
        and p @ rows == pytest.approx(1, abs=1e-9)
    )
    tail = p[len(getattr(getattr(law, "law", law), "heavy_hitters", ())) :]
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
        Zipf(10**6, 0.0),
        Uniform(1000),
        Uniform(1),
    ],
    ids=repr,
)
def test_unique_rows_are_the_exact_sum(zipf: Law) -> None:
    p = np.minimum(probabilities(zipf), 1 - 1e-16)
    for lookups in (1, 10, 1e3, 1e5, 1e7):
        exact = -np.expm1(lookups * np.log1p(-p)).sum()
        assert float(unique_rows(zipf, lookups)) == pytest.approx(exact, rel=1e-3)


@given(st.one_of(distributions, parts), st.floats(0, 1e12), st.floats(1, 3))
def test_unique_rows_are_bounded_and_grow(law: Law, lookups: float, more: float) -> None:
    few, many = unique_rows(law, [lookups, lookups * more])
    assert 0 <= few <= min(lookups, law.rows * (1 + 1e-9))
    assert few * (1 - 1e-12) <= many <= few * more * (1 + 1e-9) + 1e-9


def test_reuse_histogram_against_its_own_lookups() -> None:
    zipf = Zipf(20_000, 1.05)
    lookups = np.random.default_rng(1).choice(zipf.rows, 100_000, p=probabilities(zipf))
    accesses = np.bincount(lookups)[np.unique(lookups)]
    counts = np.bincount(np.minimum(np.ceil(np.log2(accesses)).astype(int), 16), minlength=17)
    histogram = ReuseHistogram(tuple(counts.tolist()), 100_000, zipf.rows)
    assert float(unique_rows(histogram, 100_000)) == pytest.approx(len(accesses), rel=1e-9)
    for part in (0.05, 0.2, 0.5, 1.5):
        expected = float(unique_rows(zipf, part * 1e5))
        assert float(unique_rows(histogram, part * 1e5)) == pytest.approx(expected, rel=0.03)
    for cached in (200, 1000, 5000):
        assert lru_hit_rate(histogram, cached) == pytest.approx(
            lru_hit_rate(zipf, cached), abs=0.03
        )
    with pytest.warns(UserWarning, match="more than twice"):
        assert float(unique_rows(histogram, 1e9)) <= zipf.rows


def test_reuse_histogram_of_a_published_data_set() -> None:
    """facebookresearch/dlrm_datasets, 2021 (t856_bs65536.pt): 887.0 M lookups of 128.4 M rows;
    share of rows by bin."""
    share = [
        0.473,
        0.152,
        0.139,
        0.112,
        0.072,
        0.032,
        0.011,
        0.005,
        0.002,
        0.001,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]
    counts = tuple(128.4e6 * s for s in share)
    half, whole = unique_rows(ReuseHistogram(counts, 887.0e6, 1_000_000_000), [443.5e6, 887e6])
    assert whole == pytest.approx(sum(counts)) and 0.5 * whole < half < whole
    # Rows seen once give half of themselves, rows seen twice three quarters, ...
    assert half > 128.4e6 * (0.473 / 2 + 0.152 * 3 / 4 + 0.139 * 7 / 8)


@pytest.mark.parametrize("parts", [2, 3, 8, 64])
@pytest.mark.parametrize(
    "law",
    [
        Zipf(80_000, 1.05),
        Zipf(80_000, 1.3, 50),
        Zipf(80_000, 0.8, 2, (0.02,) * 16),
        Uniform(80_000),
    ],
)
def test_parts_find_together_what_the_whole_finds(law: Law, parts: int) -> None:
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


HALF, NAN = (0.5, 0.5000003), float("nan")


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (ReuseHistogram, ((1.0,) * 16, 20, 100), "16 bins"),
        (ReuseHistogram, ((1.0,) * 17, 10, 100), "add up to 17"),
        (ReuseHistogram, ((0.0,) * 17, 10, 100), "add up to 0"),
        (ReuseHistogram, ((-1.0, *(1.0,) * 16), 100, 100), "counts is -1"),
        *(
            (law, (bad, 1.0)[: 1 + (law is Zipf)], "^rows is")
            for law in (Uniform, Zipf)
            for bad in (0, 2.5, "x", NAN)
        ),
        (Zipf, (10, -1), "^exponent is -1"),
        (Zipf, (10, 1.0, -1), "shift is -1; it must be a number above -1"),
        (Zipf, (10, 1.0, NAN), "shift is nan"),
        (Zipf, (10, 1.0, "far"), "shift is 'far'"),
        (Zipf, (10, 1.0, 0, (0.5, 0.6)), "add up to 1.1"),
        (Zipf, (10, 1.0, 0, (-0.1,)), "heavy_hitters is -0.1"),
        (Zipf, (10, 1.0, 0, (NAN,)), "heavy_hitters is nan"),
        (Zipf, (10, 1.0, 0, (0.01,) * 10), "has 10 entries; it must have fewer than the 10 rows"),
    ],
)
def test_laws_that_cannot_be(kind: type[Distribution], arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*arguments)
    # in single precision they may add up to a little more than 1
    law = Zipf(10, 1.0, heavy_hitters=HALF)
    assert sum(law.heavy_hitters) <= 1 and float(unique_rows(law, 1e9)) == pytest.approx(2)


# What a cache holds.


def simulate_lru(keys: list, sizes: list[float], capacity: float) -> np.ndarray:
    cache: OrderedDict = OrderedDict()
    used, missed = 0.0, np.zeros(len(keys), bool)
    for i, (key, nbytes) in enumerate(zip(keys, sizes, strict=True)):
        if key in cache:
            cache.move_to_end(key)
            continue
        missed[i] = True
        cache[key] = nbytes
        used += nbytes
        while used > capacity:
            used -= cache.popitem(last=False)[1]
    return missed


@pytest.mark.parametrize(
    ("law", "cached"),
    [
        (Zipf(20_000, 1.05), 500),
        (Zipf(20_000, 1.05), 4000),
        (Zipf(5000, 0.6), 1000),
        (Uniform(5000), 1000),
        (Zipf(20_000, 1.1, shift=30), 1500),
        (Zipf(20_000, 0.9, shift=-0.9), 1500),
        (Zipf(20_000, 1.0, heavy_hitters=(0.2, 0.15, 0.05)), 1500),
        (Zipf(5000, 0.7, shift=9, heavy_hitters=(0.3, 0.001, 0.0)), 1000),
    ],
)
def test_one_table_against_a_simulated_lru(law: Law, cached: int) -> None:
    drawn = [
        np.random.default_rng(seed).choice(law.rows, 40_000, p=probabilities(law))
        for seed in range(6)
    ]
    missed = np.mean(
        [simulate_lru(keys.tolist(), [1.0] * len(keys), cached) for keys in drawn], axis=0
    )
    assert 1 - lru_hit_rate(law, cached) == pytest.approx(missed[20_000:].mean(), rel=0.02)
    for lookups in (3000, 12_000, 40_000):
        assert float(cold_misses(law, lookups, cached)) == pytest.approx(
            missed[:lookups].sum(), rel=0.02
        )


@pytest.mark.parametrize("dense_bytes", [0.0, 2e5])
@pytest.mark.parametrize("capacity", [3e4, 1e5, 3e5, 1e6])
def test_shared_cache_against_a_simulated_lru(capacity: float, dense_bytes: float) -> None:
    tables = [Zipf(3000, 1.0), Zipf(10_000, 0.8), Uniform(500), Zipf(20_000, 1.2)]
    lookups, row_bytes, blocks, rounds = [300, 800, 200, 1500], [64.0, 128.0, 256.0, 128.0], 100, 30
    rng = np.random.default_rng(0)
    keys, sizes = [], []
    for _ in range(rounds):
        drawn = [
            (t, row)
            for t, d in enumerate(tables)
            for row in rng.choice(d.rows, lookups[t], p=probabilities(d))
        ]
        drawn = [drawn[i] for i in rng.permutation(len(drawn))]
        for block, chunk in enumerate(np.array_split(np.arange(len(drawn)), blocks)):
            keys += [*(drawn[i] for i in chunk), *([("dense", block)] if dense_bytes else [])]
            sizes += [
                *(row_bytes[drawn[i][0]] for i in chunk),
                *([dense_bytes / blocks] if dense_bytes else []),
            ]
    missed = simulate_lru(keys, sizes, capacity)
    owner = np.array([-1 if key[0] == "dense" else key[0] for key in keys])
    warm = np.arange(len(keys)) > len(keys) // 2
    simulated = np.array([missed[warm & (owner == t)].mean() for t in range(len(tables))])
    predicted = lru_misses(tables, lookups, row_bytes, capacity=capacity, dense_bytes=dense_bytes)
    assert np.abs(predicted - simulated).max() < 0.02
    assert predicted @ lookups == pytest.approx(simulated @ lookups, rel=0.02)


@pytest.mark.parametrize("law", [Zipf(20_000, 0.8), Uniform(8000), Zipf(3000, 0.3)])
@pytest.mark.parametrize("part", [0.3, 0.7, 0.95, 1.1])
def test_rotating_misses_against_a_simulated_lru(law: Law, part: float) -> None:
    """Eight batches that take turns: what no other batch touches comes back a round later, or
    never."""
    n, row, dense, batches = 600, 64, 20_000, 8
    drawn = np.random.default_rng(3).choice(law.rows, (batches, n), p=probabilities(law))
    unique = [float(unique_rows(law, n * k)) for k in (batches - 1, batches)]
    size = part * (unique[1] * row + dense)
    keys: list = [key for batch in [*drawn, *drawn, *drawn] for key in [*batch, "dense"]]
    missed = simulate_lru(keys, [dense if key == "dense" else row for key in keys], size)
    looked_up = np.array([key != "dense" for key in keys])
    looked_up[: 2 * batches * (n + 1)] = False
    fresh = lru_misses([law], [n], [row], capacity=size, dense_bytes=dense)[0]
    distance, oldest = unique[1] * row + dense, (unique[1] - unique[0]) / n
    found = rotating_misses(fresh, oldest, distance, capacity=size, sharpness=200)
    assert found == pytest.approx(missed[looked_up].mean(), abs=0.02)


table = st.tuples(distributions, st.floats(0.5, 1e6), st.sampled_from([32.0, 64.0, 512.0]))


@settings(max_examples=25)
@example([(Uniform(770), 521951.0, 32.0)], 490145.0, 0.5)  # what is left underflows on the way
@given(st.lists(table, min_size=1, max_size=4), st.floats(0, 1e9), st.floats(1e-6, 0.9999))
def test_the_cache_is_exactly_full(tables: list, dense: float, part: float) -> None:
    """Put the misses back into the equation they solve, through a bisection that shares no code
    with it."""
    names, lookups, row_bytes = zip(*tables, strict=True)
    total = dense + sum(d.rows * b for d, _, b in tables)
    rates = [n * np.log1p(-np.minimum(d.buckets()[0], 1 - 1e-16)) for d, n, _ in tables]

    def kept(time: float) -> float:
        found = [
            -np.expm1(rate * time) @ d.buckets()[1] for rate, d in zip(rates, names, strict=True)
        ]
        return float(np.dot(found, row_bytes)) + min(time, 1) * dense

    low, high = -60.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(np.exp(middle)) < part * total else (low, middle)
    shares = [np.prod(d.buckets(), axis=0) for d in names]
    expected = [
        share @ np.exp(rate * np.exp(low)) for share, rate in zip(shares, rates, strict=True)
    ]
    found = lru_misses(names, lookups, row_bytes, capacity=part * total, dense_bytes=dense)
    assert found == pytest.approx(expected, abs=1e-6)


def test_ends_of_the_capacity_range() -> None:
    tables, sizes = [Uniform(100), Zipf(1000, 1.0)], [1100 * 64 + 5000, 1100 * 64 + 4999, 0]
    misses = lru_misses(tables, [10, 10], [64, 64], capacity=sizes, dense_bytes=5000)
    assert misses[0].tolist() == [0, 0] and misses[1:] == pytest.approx(
        np.array([[0, 0], [1, 1]]), abs=2e-3
    )
    # A table nobody looks into takes no room.
    assert lru_misses(tables, [10, 0], [64, 64], capacity=6400)[0] == 0
    assert page_walks(tables, [10, 0], [64, 64], entries=3)[0] == 0
    assert [
        page_walks(tables, [10, 10], [64, 64], entries=n).round(15).tolist() for n in (0, np.inf)
    ] == [
        [1, 1],
        [0, 0],
    ]
    assert (
        cold_misses(Zipf(1000, 1.0), [0, 50], 1000).tolist()
        == unique_rows(Zipf(1000, 1.0), [0, 50]).tolist()
    )


@given(
    st.builds(Zipf, st.integers(10**4, 10**8), st.floats(0, 2)),
    st.floats(1e-2, 0.9),
    st.floats(0, 1e7),
)
def test_cold_misses_are_bounded_and_continuous(law: Zipf, part: float, lookups: float) -> None:
    now, later = cold_misses(law, [lookups, lookups * 1.001 + 1e-6], part * law.rows)
    assert float(unique_rows(law, lookups)) * (1 - 1e-3) - 1e-6 <= now <= lookups * (1 + 1e-9)
    assert now * (1 - 1e-9) <= later <= now + lookups * 0.00101 + 2e-6


@given(st.floats(0, 1e15), st.floats(1, 1e12), st.floats(0.5, 50))
def test_miss_share_is_a_smooth_step(distance: float, capacity: float, sharpness: float) -> None:
    none, share, more, half = (
        miss_share(d, capacity=capacity, sharpness=sharpness)
        for d in (0.0, distance, distance * 1.1, capacity)
    )
    assert none == 0 <= share <= 1 + 1e-9 and more >= share - 1e-12 and half == pytest.approx(0.5)


def brute_force(tensors: list[int], nbytes: list[float]) -> list[float]:
    size: dict[int, float] = {}
    for t, n in zip(tensors, nbytes, strict=True):
        size[t] = max(n, size.get(t, 0.0))
    distances = []
    for i, tensor in enumerate(tensors):
        window = {tensor}
        for back in range(1, len(tensors) + 1):
            if (other := tensors[i - back]) == tensor:
                break
            window.add(other)
        distances.append(sum(size[t] for t in window))
    return distances


@example([(number, 8) for number in range(1000)])
@example(
    [
        (int(t), int(n))
        for t, n in np.random.default_rng(5).integers((-40, 1), (400, 10**6), (700, 2))
    ]
)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 10**9)), max_size=60))
def test_reuse_distances_against_brute_force(accesses: list[tuple[int, int]]) -> None:
    tensors, nbytes = [t for t, _ in accesses], [float(n) for _, n in accesses]
    assert reuse_distances(tensors, nbytes).tolist() == brute_force(tensors, nbytes)
