from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perfkit.models.caches import (
    Uniform,
    Zipf,
    cold_misses,
    lru_hit_rate,
    lru_misses,
    miss_share,
    page_walks,
    reuse_distances,
    rotating_misses,
    unique_rows,
)

hitters = st.lists(st.floats(0, 0.2), max_size=5).map(tuple)
zipfs = st.builds(Zipf, st.integers(6, 10**8), st.floats(0, 3), st.floats(-0.9, 100), hitters)
distributions = st.one_of(zipfs, st.builds(Uniform, st.integers(1, 10**8)))


def probabilities(distribution: Uniform | Zipf) -> np.ndarray:
    """Of every row, term by term."""
    if isinstance(distribution, Uniform):
        return np.full(distribution.rows, 1 / distribution.rows)
    hitters = np.array(distribution.heavy_hitters)
    ranks = np.arange(len(hitters) + 1.0, distribution.rows + 1)
    tail = (ranks + distribution.shift) ** -distribution.exponent
    return np.concatenate([hitters, tail / tail.sum() * (1 - hitters.sum())])


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
    ("distribution", "cached"),
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
def test_one_table_against_a_simulated_lru(distribution: Uniform | Zipf, cached: int) -> None:
    drawn = [
        np.random.default_rng(seed).choice(distribution.rows, 40_000, p=probabilities(distribution))
        for seed in range(6)
    ]
    missed = np.mean([simulate_lru(keys.tolist(), [1.0] * len(keys), cached) for keys in drawn], axis=0)
    assert 1 - lru_hit_rate(distribution, cached) == pytest.approx(missed[20_000:].mean(), rel=0.02)
    for lookups in (3000, 12_000, 40_000):
        assert float(cold_misses(distribution, lookups, cached)) == pytest.approx(missed[:lookups].sum(), rel=0.02)


@pytest.mark.parametrize("dense_bytes", [0.0, 2e5])
@pytest.mark.parametrize("capacity", [3e4, 1e5, 3e5, 1e6])
def test_shared_cache_against_a_simulated_lru(capacity: float, dense_bytes: float) -> None:
    tables = [Zipf(3000, 1.0), Zipf(10_000, 0.8), Uniform(500), Zipf(20_000, 1.2)]
    lookups, row_bytes, blocks, rounds = [300, 800, 200, 1500], [64.0, 128.0, 256.0, 128.0], 100, 30
    rng = np.random.default_rng(0)
    keys, sizes = [], []
    for _ in range(rounds):
        drawn = [(t, row) for t, d in enumerate(tables) for row in rng.choice(d.rows, lookups[t], p=probabilities(d))]
        drawn = [drawn[i] for i in rng.permutation(len(drawn))]
        for block, chunk in enumerate(np.array_split(np.arange(len(drawn)), blocks)):
            keys += [*(drawn[i] for i in chunk), *([("dense", block)] if dense_bytes else [])]
            sizes += [*(row_bytes[drawn[i][0]] for i in chunk), *([dense_bytes / blocks] if dense_bytes else [])]
    missed = simulate_lru(keys, sizes, capacity)
    owner = np.array([-1 if key[0] == "dense" else key[0] for key in keys])
    warm = np.arange(len(keys)) > len(keys) // 2
    simulated = np.array([missed[warm & (owner == t)].mean() for t in range(len(tables))])
    predicted = lru_misses(tables, lookups, row_bytes, capacity=capacity, dense_bytes=dense_bytes)
    assert np.abs(predicted - simulated).max() < 0.02
    assert predicted @ lookups == pytest.approx(simulated @ lookups, rel=0.02)


table = st.tuples(distributions, st.floats(0.5, 1e6), st.sampled_from([32.0, 64.0, 512.0]))


@settings(max_examples=25)
@example([(Uniform(770), 521951.0, 32.0)], 490145.0, 257392.0, 2.0)  # what is left underflows on the way
@given(st.lists(table, min_size=1, max_size=4), st.floats(0, 1e9), st.floats(1, 1e10), st.floats(1.0001, 1e3))
def test_misses_fall_with_capacity(tables: list, dense: float, capacity: float, more: float) -> None:
    names, lookups, row_bytes = zip(*tables, strict=True)
    small, near, large = (
        lru_misses(names, lookups, row_bytes, capacity=size, dense_bytes=dense)
        for size in (capacity, capacity * (1 + 1e-12) + 1e-6, capacity * more)
    )
    assert np.all((small >= 0) & (small <= 1 + 1e-9))
    assert np.all(large <= small + 1e-9)
    assert near == pytest.approx(small, abs=1e-3)


@settings(max_examples=25)
@given(st.lists(table, min_size=1, max_size=4), st.floats(0, 1e9), st.floats(1e-6, 0.9999))
def test_the_cache_is_exactly_full(tables: list, dense: float, part: float) -> None:
    """Put the misses back into the equation they solve, through a bisection that shares no code with it."""
    names, lookups, row_bytes = zip(*tables, strict=True)
    total = dense + sum(d.rows * b for d, _, b in tables)

    def kept(time: float) -> float:
        found = [
            -np.expm1(n * time * np.log1p(-np.minimum(d.buckets()[0], 1 - 1e-16))) @ d.buckets()[1]
            for d, n, _ in tables
        ]
        return float(np.dot(found, row_bytes)) + min(time, 1) * dense

    low, high = -60.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(np.exp(middle)) < part * total else (low, middle)
    expected = []
    for distribution, n, _ in tables:
        p, rows = distribution.buckets()
        expected.append((p * rows) @ np.exp(n * np.exp(low) * np.log1p(-np.minimum(p, 1 - 1e-16))))
    assert lru_misses(names, lookups, row_bytes, capacity=part * total, dense_bytes=dense) == pytest.approx(
        expected, abs=1e-6
    )


def test_ends_of_the_capacity_range() -> None:
    tables = [Uniform(100), Zipf(1000, 1.0)]
    everything = 1100 * 64 + 5000
    assert lru_misses(tables, [10, 10], [64, 64], capacity=everything, dense_bytes=5000).tolist() == [0, 0]
    assert lru_misses(tables, [10, 10], [64, 64], capacity=everything - 1, dense_bytes=5000) == pytest.approx(
        0, abs=2e-3
    )
    assert lru_misses(tables, [10, 10], [64, 64], capacity=0, dense_bytes=5000) == pytest.approx([1, 1])
    # A table nobody looks into takes no room.
    assert lru_misses(tables, [10, 0], [64, 64], capacity=6400)[0] == 0
    assert page_walks(tables, [10, 0], [64, 64], entries=3)[0] == 0
    assert page_walks(tables, [10, 10], [64, 64], entries=0).tolist() == [1, 1]
    assert page_walks(tables, [10, 10], [64, 64], entries=np.inf).tolist() == [0, 0]
    assert cold_misses(Zipf(1000, 1.0), [0, 50], 1000).tolist() == unique_rows(Zipf(1000, 1.0), [0, 50]).tolist()


@given(st.builds(Zipf, st.integers(10**4, 10**8), st.floats(0, 2)), st.floats(1e-2, 0.9), st.floats(0, 1e7))
def test_cold_misses_are_bounded_and_continuous(distribution: Zipf, part: float, lookups: float) -> None:
    cached = part * distribution.rows
    now, later = cold_misses(distribution, [lookups, lookups * 1.001 + 1e-6], cached)
    assert float(unique_rows(distribution, lookups)) * (1 - 1e-3) - 1e-6 <= now <= lookups * (1 + 1e-9)
    assert now * (1 - 1e-9) <= later <= now + lookups * 0.00101 + 2e-6


@given(st.floats(0, 1e15), st.floats(1, 1e12), st.floats(0.5, 50))
def test_miss_share_is_a_smooth_step(distance: float, capacity: float, sharpness: float) -> None:
    share = miss_share(distance, capacity=capacity, sharpness=sharpness)
    assert 0 <= share <= 1 + 1e-9
    assert miss_share(distance * 1.1, capacity=capacity, sharpness=sharpness) >= share - 1e-12
    assert miss_share(capacity, capacity=capacity, sharpness=sharpness) == pytest.approx(0.5)
    assert miss_share(0.0, capacity=capacity, sharpness=sharpness) == 0


def brute_force(tensors: list[int], nbytes: list[float]) -> list[float]:
    size: dict[int, float] = {}
    for t, n in zip(tensors, nbytes, strict=True):
        size[t] = max(n, size.get(t, 0.0))
    distances = []
    for i, tensor in enumerate(tensors):
        window = {tensor}
        for back in range(1, len(tensors) + 1):
            other = tensors[i - back]
            if other == tensor:
                break
            window.add(other)
        distances.append(sum(size[t] for t in window))
    return distances


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 10**9)), max_size=60))
def test_reuse_distances_against_brute_force(accesses: list[tuple[int, int]]) -> None:
    tensors, nbytes = [t for t, _ in accesses], [float(n) for _, n in accesses]
    assert reuse_distances(tensors, nbytes).tolist() == brute_force(tensors, nbytes)


def test_reuse_distances_of_a_long_sequence() -> None:
    rng = np.random.default_rng(5)
    tensors, nbytes = rng.integers(0, 150, 700) * 3 - 40, rng.integers(1, 10**6, 700).astype(float)
    assert reuse_distances(tensors, nbytes).tolist() == brute_force(tensors.tolist(), nbytes.tolist())


def test_reuse_distances_of_a_sweep_are_the_whole_sweep() -> None:
    assert reuse_distances(np.arange(1000), np.full(1000, 8.0)).tolist() == [8000.0] * 1000
    assert reuse_distances([7, 7, 7], [1, 3, 2]).tolist() == [3, 3, 3]


@pytest.mark.parametrize("law", [Zipf(20_000, 0.8), Uniform(8000), Zipf(3000, 0.3)])
@pytest.mark.parametrize("part", [0.3, 0.7, 0.95, 1.1])
def test_rotating_misses_against_a_simulated_lru(law: Uniform | Zipf, part: float) -> None:
    """Eight batches that take turns: what no other batch touches comes back a round later, or never."""
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
