"""Which rows are looked up and which of them a cache still holds: against exact sums, simulated
caches and limits."""

from collections import OrderedDict
from typing import Any, NamedTuple

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
from perfkit.models.distributions import (
    ReuseHistogram,
    Uniform,
    Zipf,
    distinct_rows,
    unique_rows,
)
from perfkit.models.kernels import reuse_distances
from tests.refusals import Refusal

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


def make_counts(*first: float, rest: float = 0.0) -> tuple[float, ...]:
    """Counts of the 17 bins of a histogram, of which the first are given."""
    counts = np.full(17, rest)
    counts[: len(first)] = first
    return tuple(counts.tolist())


# Distinct rows.


@given(st.one_of(distributions, parts))
def test_buckets_hold_all_rows_and_all_probability(law: Law) -> None:
    p, rows = law.buckets()
    assert rows.sum() == pytest.approx(law.rows, rel=1e-12)
    assert p @ rows == pytest.approx(1, abs=1e-9)
    assert len(p) <= 135
    whole = getattr(law, "law", law)
    heavy_hitters = getattr(whole, "heavy_hitters", ())
    tail = p[len(heavy_hitters) :]
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
        expected_hits = lru_hit_rate(zipf, cached)
        assert lru_hit_rate(histogram, cached) == pytest.approx(expected_hits, abs=0.03)
    with pytest.warns(UserWarning, match="more than twice"):
        assert float(unique_rows(histogram, 1e9)) <= zipf.rows


def test_reuse_histogram_of_a_published_data_set() -> None:
    """facebookresearch/dlrm_datasets, 2021 (t856_bs65536.pt): 887.0 M lookups of 128.4 M rows;
    share of rows by bin."""
    share = np.zeros(17)
    share[:10] = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001]
    rows = 128.4e6 * share
    histogram = ReuseHistogram(tuple(rows.tolist()), 887.0e6, 1_000_000_000)
    half, whole = unique_rows(histogram, [443.5e6, 887e6])
    assert whole == pytest.approx(rows.sum())
    assert 0.5 * whole < half < whole
    # Rows seen once give half of themselves, rows seen twice three quarters, ...
    assert half > rows[0] / 2 + rows[1] * 3 / 4 + rows[2] * 7 / 8


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
    assert part.rows == law.rows // parts
    assert law.resize(law.rows) == law
    for lookups in (1e4, 1e6):
        found = parts * float(unique_rows(part, lookups / parts))
        assert found == pytest.approx(float(unique_rows(law, lookups)), rel=0.02)
    assert part.resize(part.rows // 2) == law.resize(part.rows // 2)


def test_a_part_of_a_histogram_has_its_part_of_rows_and_lookups() -> None:
    whole = ReuseHistogram(make_counts(50.0, 10.0, 5.0), 90, 1000)
    part = whole.resize(250)
    assert (part.rows, part.lookups, sum(part.counts)) == (250, 22.5, 16.25)
    assert float(unique_rows(part, 10)) == pytest.approx(float(unique_rows(whole, 40)) / 4)


def test_rows_of_several_tables_are_those_of_each_alone() -> None:
    """Tables with a law and recorded ones, in any order."""
    recorded = ReuseHistogram(make_counts(50.0, 10.0, 5.0), 90, 1000)
    laws = [Uniform(500), recorded, Zipf(10_000, 1.05), recorded.resize(250)]
    lookups = [100.0, 45.0, 2000.0, 20.0]
    alone = [float(unique_rows(law, n)) for law, n in zip(laws, lookups, strict=True)]
    assert distinct_rows(laws, lookups).tolist() == pytest.approx(alone)
    twice = distinct_rows(laws, [lookups, lookups])
    assert twice.tolist() == [pytest.approx(alone)] * 2


NAN = float("nan")
TEN_ROWS = {"rows": 10, "exponent": 1.0}
REFUSALS = [
    Refusal(
        ReuseHistogram,
        {"counts": make_counts(rest=1.0)[:16], "lookups": 20, "rows": 100},
        "16 bins",
    ),
    Refusal(
        ReuseHistogram,
        {"counts": make_counts(rest=1.0), "lookups": 10, "rows": 100},
        "add up to 17",
    ),
    Refusal(ReuseHistogram, {"counts": make_counts(), "lookups": 10, "rows": 100}, "add up to 0"),
    Refusal(
        ReuseHistogram,
        {"counts": make_counts(-1.0, rest=1.0), "lookups": 100, "rows": 100},
        "counts is -1",
    ),
    Refusal(Uniform, {"rows": 0}, "^rows is 0;"),
    Refusal(Uniform, {"rows": 2.5}, "^rows is 2.5;"),
    Refusal(Uniform, {"rows": "x"}, "^rows is 'x';"),
    Refusal(Uniform, {"rows": NAN}, "^rows is nan;"),
    Refusal(Zipf, {"rows": 0, "exponent": 1.0}, "^rows is 0;"),
    Refusal(Zipf, {"rows": 2.5, "exponent": 1.0}, "^rows is 2.5;"),
    Refusal(Zipf, {"rows": "x", "exponent": 1.0}, "^rows is 'x';"),
    Refusal(Zipf, {"rows": NAN, "exponent": 1.0}, "^rows is nan;"),
    Refusal(Zipf, {"rows": 10, "exponent": -1}, "^exponent is -1"),
    Refusal(Zipf, {**TEN_ROWS, "shift": -1}, "shift is -1; it must be a number above -1"),
    Refusal(Zipf, {**TEN_ROWS, "shift": NAN}, "shift is nan"),
    Refusal(Zipf, {**TEN_ROWS, "shift": "far"}, "shift is 'far'"),
    Refusal(Zipf, {**TEN_ROWS, "heavy_hitters": (0.5, 0.6)}, "add up to 1.1"),
    Refusal(Zipf, {**TEN_ROWS, "heavy_hitters": (-0.1,)}, "heavy_hitters is -0.1"),
    Refusal(Zipf, {**TEN_ROWS, "heavy_hitters": (NAN,)}, "heavy_hitters is nan"),
    Refusal(
        Zipf,
        {**TEN_ROWS, "heavy_hitters": (0.01,) * 10},
        "has 10 entries; it must have fewer than the 10 rows",
    ),
]


@pytest.mark.parametrize(
    "case", REFUSALS, ids=[f"{case.function.__name__}, {case.message}" for case in REFUSALS]
)
def test_laws_that_cannot_be(case: Refusal) -> None:
    with pytest.raises(ValueError, match=case.message):
        case.call()


def test_shares_of_single_precision_may_add_up_to_a_little_more_than_one() -> None:
    law = Zipf(10, 1.0, heavy_hitters=(0.5, 0.5000003))
    assert sum(law.heavy_hitters) <= 1
    assert float(unique_rows(law, 1e9)) == pytest.approx(2)


# What a cache holds.


def simulate_lru(keys: list[Any], sizes: list[float], capacity: float) -> np.ndarray:
    """Which accesses a cache misses that drops what was used least recently."""
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
    lookups, seeds = 40_000, 6
    missed = np.zeros(lookups)
    for seed in range(seeds):
        rows = np.random.default_rng(seed).choice(law.rows, lookups, p=probabilities(law))
        missed += simulate_lru(rows.tolist(), [1.0] * lookups, cached) / seeds
    warm = missed[20_000:]
    assert 1 - lru_hit_rate(law, cached) == pytest.approx(warm.mean(), rel=0.02)
    for first in (3000, 12_000, 40_000):
        simulated = missed[:first].sum()
        assert float(cold_misses(law, first, cached)) == pytest.approx(simulated, rel=0.02)


class Access(NamedTuple):
    """One access to a row of a table, or to a block of dense tensors."""

    owner: int  # the table, or `DENSE`
    row: int
    nbytes: float


DENSE = -1


def draw_rounds(
    tables: list[Law], lookups: list[int], row_bytes: list[float], dense_bytes: float
) -> list[Access]:
    """Thirty rounds of lookups in random order, which dense tensors interrupt in a hundred places."""
    rounds, blocks = 30, 100
    rng = np.random.default_rng(0)
    accesses: list[Access] = []
    for _ in range(rounds):
        of_round = []
        for table, law in enumerate(tables):
            rows = rng.choice(law.rows, lookups[table], p=probabilities(law))
            of_round += [Access(table, int(row), row_bytes[table]) for row in rows]
        order = rng.permutation(len(of_round))
        for block, chunk in enumerate(np.array_split(order, blocks)):
            accesses += [of_round[index] for index in chunk]
            if dense_bytes:
                accesses.append(Access(DENSE, block, dense_bytes / blocks))
    return accesses


@pytest.mark.parametrize("dense_bytes", [0.0, 2e5])
@pytest.mark.parametrize("capacity", [3e4, 1e5, 3e5, 1e6])
def test_shared_cache_against_a_simulated_lru(capacity: float, dense_bytes: float) -> None:
    tables = [Zipf(3000, 1.0), Zipf(10_000, 0.8), Uniform(500), Zipf(20_000, 1.2)]
    lookups = [300, 800, 200, 1500]
    row_bytes = [64.0, 128.0, 256.0, 128.0]
    accesses = draw_rounds(tables, lookups, row_bytes, dense_bytes)
    missed = simulate_lru(
        [(access.owner, access.row) for access in accesses],
        [access.nbytes for access in accesses],
        capacity,
    )
    owners = np.array([access.owner for access in accesses])
    is_warm = np.arange(len(accesses)) > len(accesses) // 2
    simulated = [missed[is_warm & (owners == table)].mean() for table in range(len(tables))]
    predicted = lru_misses(tables, lookups, row_bytes, capacity=capacity, dense_bytes=dense_bytes)
    assert np.abs(predicted - simulated).max() < 0.02
    assert predicted @ lookups == pytest.approx(np.dot(simulated, lookups), rel=0.02)


@pytest.mark.parametrize("law", [Zipf(20_000, 0.8), Uniform(8000), Zipf(3000, 0.3)])
@pytest.mark.parametrize("part", [0.3, 0.7, 0.95, 1.1])
def test_rotating_misses_against_a_simulated_lru(law: Law, part: float) -> None:
    """Eight batches that take turns: what no other batch touches comes back a round later, or
    never."""
    n, row_bytes, dense_bytes, batches = 600, 64, 20_000, 8
    rows = np.random.default_rng(3).choice(law.rows, (batches, n), p=probabilities(law))
    unique_of_others = float(unique_rows(law, n * (batches - 1)))
    unique_of_all = float(unique_rows(law, n * batches))
    distance = unique_of_all * row_bytes + dense_bytes
    capacity = part * distance

    keys: list[Any] = []
    sizes: list[float] = []
    for batch in [*rows, *rows, *rows]:
        keys += [*batch, "dense"]
        sizes += [row_bytes] * n + [dense_bytes]
    missed = simulate_lru(keys, sizes, capacity)
    is_warm_lookup = np.array([key != "dense" for key in keys])
    is_warm_lookup[: 2 * batches * (n + 1)] = False

    [fresh] = lru_misses([law], [n], [row_bytes], capacity=capacity, dense_bytes=dense_bytes)
    oldest = (unique_of_all - unique_of_others) / n
    found = rotating_misses(fresh, oldest, distance, capacity=capacity, sharpness=200)
    assert found == pytest.approx(missed[is_warm_lookup].mean(), abs=0.02)


class Lookups(NamedTuple):
    """Lookups of one table."""

    law: Law
    lookups: float
    row_bytes: float


tables_looked_up = st.lists(
    st.builds(Lookups, distributions, st.floats(0.5, 1e6), st.sampled_from([32.0, 64.0, 512.0])),
    min_size=1,
    max_size=4,
)
UNDERFLOWS = [Lookups(Uniform(770), 521951.0, 32.0)]  # what is left of it, on the way


@settings(max_examples=25)
@example(UNDERFLOWS, 490145.0, 0.5)
@given(tables_looked_up, st.floats(0, 1e9), st.floats(1e-6, 0.9999))
def test_the_cache_is_exactly_full(tables: list[Lookups], dense: float, part: float) -> None:
    """Put the misses back into the equation they solve, through a bisection that shares no code
    with it."""
    capacity = part * (dense + sum(table.law.rows * table.row_bytes for table in tables))

    def share_left(table: Lookups, time: float) -> np.ndarray:
        """Share of the rows of each bucket that was not looked up for so many rounds."""
        p, _ = table.law.buckets()
        return np.exp(table.lookups * np.log1p(-np.minimum(p, 1 - 1e-16)) * time)

    def bytes_kept(time: float) -> float:
        kept = min(time, 1) * dense
        for table in tables:
            _, rows = table.law.buckets()
            kept += table.row_bytes * float((1 - share_left(table, time)) @ rows)
        return kept

    low, high = -60.0, 60.0  # of the logarithm of the time
    for _ in range(80):
        middle = (low + high) / 2
        if bytes_kept(np.exp(middle)) < capacity:
            low = middle
        else:
            high = middle
    expected = []
    for table in tables:
        p, rows = table.law.buckets()
        expected.append((p * rows) @ share_left(table, np.exp(low)))
    found = lru_misses(
        [table.law for table in tables],
        [table.lookups for table in tables],
        [table.row_bytes for table in tables],
        capacity=capacity,
        dense_bytes=dense,
    )
    assert found == pytest.approx(expected, abs=1e-6)


def test_ends_of_the_capacity_range() -> None:
    tables = [Uniform(100), Zipf(1000, 1.0)]
    whole = 1100 * 64 + 5000
    misses = lru_misses(
        tables, [10, 10], [64, 64], capacity=[whole, whole - 1, 0], dense_bytes=5000
    )
    assert misses[0].tolist() == [0, 0]
    assert misses[1] == pytest.approx([0, 0], abs=2e-3)
    assert misses[2] == pytest.approx([1, 1], abs=2e-3)
    no_entries = page_walks(tables, [10, 10], [64, 64], entries=0)
    assert no_entries.round(15).tolist() == [1, 1]
    all_entries = page_walks(tables, [10, 10], [64, 64], entries=np.inf)
    assert all_entries.round(15).tolist() == [0, 0]
    law = Zipf(1000, 1.0)
    all_rows_cached = cold_misses(law, [0, 50], 1000)
    assert all_rows_cached.tolist() == unique_rows(law, [0, 50]).tolist()


def test_a_table_that_nobody_looks_into_takes_no_room() -> None:
    tables = [Uniform(100), Zipf(1000, 1.0)]
    assert lru_misses(tables, [10, 0], [64, 64], capacity=6400)[0] == 0
    assert page_walks(tables, [10, 0], [64, 64], entries=3)[0] == 0


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
    def share(distance: float) -> float:
        return float(miss_share(distance, capacity=capacity, sharpness=sharpness))

    assert share(0.0) == 0
    assert share(capacity) == pytest.approx(0.5)
    assert 0 <= share(distance) <= 1 + 1e-9
    assert share(distance * 1.1) >= share(distance) - 1e-12


def brute_force(tensors: list[int], nbytes: list[float]) -> list[float]:
    """Bytes of all tensors since the same was used before; of all if it never was."""
    size: dict[int, float] = {}
    for tensor, n in zip(tensors, nbytes, strict=True):
        size[tensor] = max(n, size.get(tensor, 0.0))
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


MANY_TENSORS = [(number, 8) for number in range(1000)]
RANDOM = np.random.default_rng(5).integers((-40, 1), (400, 10**6), (700, 2))
RANDOM_ACCESSES = [(int(tensor), int(nbytes)) for tensor, nbytes in RANDOM]


@example(MANY_TENSORS)
@example(RANDOM_ACCESSES)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 10**9)), max_size=60))
def test_reuse_distances_against_brute_force(accesses: list[tuple[int, int]]) -> None:
    tensors = [tensor for tensor, _ in accesses]
    nbytes = [float(n) for _, n in accesses]
    assert reuse_distances(tensors, nbytes).tolist() == brute_force(tensors, nbytes)
