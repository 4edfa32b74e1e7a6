"""Traffic of embedding tables: against counters and traces of a V100, and against its forms spelled
out."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import embedding as e
from perfkit.models.caches import (
    PAGE,
    cold_misses,
    cover_pages,
    lru_misses,
    miss_share,
    page_walks,
    rotating_misses,
)
from perfkit.models.distributions import Uniform, Zipf, unique_rows
from perfkit.models.roofline import smooth_maximum


def test_fused_backward_against_all_v100_counters(shared_data: Path) -> None:
    path = shared_data / "kernels_v100" / "kernel_samples_v100_2020_counters.csv"
    rows = pl.read_csv(path, infer_schema=False).filter(set="EL_bwd_sgd")
    names = ["batch_size", "num_tables", "bag_size", "embedding_dim", "dram_bytes"]
    counters = rows.select(pl.col(names).cast(pl.Float64))
    bags = (counters["batch_size"] * counters["num_tables"]).to_numpy()
    lookups = bags * counters["bag_size"].to_numpy()
    dim = counters["embedding_dim"].to_numpy()
    counted = counters["dram_bytes"].to_numpy()
    ratios = counted / e.fused_backward_bytes(bags, lookups, dim)
    assert len(ratios) == 5
    assert ratios.mean() == pytest.approx(1.04, abs=0.005)
    assert np.ptp(ratios) < 0.01


def test_traffic_of_a_v100_counter() -> None:
    """DRAM counter of owensgroup/ml_perf_model (2020): batch 4096, 32 tables of 500,000 rows, L =
    16, D = 128."""
    bags = 4096 * 32
    ratio = 2293410720 / e.fused_backward_bytes(bags, 16 * bags, 128)
    assert ratio == pytest.approx(1.04, abs=0.01)


def test_times_of_a_v100_trace() -> None:
    """Trace of DLRM, 817 GB/s: 8 tables of 1M rows, B = 2048, L = 100, D = 64 took 521.8 and 1276.7
    µs."""
    bags = 8 * 2048
    lookups = 100 * bags
    forward = e.forward_bytes(bags, lookups, 64, granularity=32) / 817e9
    backward = e.fused_backward_bytes(bags, lookups, 64) / 817e9
    assert forward / 521.8e-6 - 1 == pytest.approx(0.025, abs=0.005)
    assert backward / 1276.7e-6 - 1 == pytest.approx(-0.18, abs=0.02)


def test_caches_hold_the_small_tables_of_a_v100_trace() -> None:
    """DLRM-MLPerf, 26 tables, B = 2048, L = 1, D = 128 took 51.4 µs, far below all rows from DRAM,
    817 GB/s; caches give 2847 GB/s."""
    bags = 26 * 2048
    all_rows = e.forward_bytes(bags, bags, 128, granularity=32, misses=1.0)
    far_rows = e.forward_bytes(bags, bags, 128, granularity=32, misses=0.3)
    time_from_memory = all_rows / 817e9
    assert time_from_memory / 51.4e-6 - 1 == pytest.approx(0.32, abs=0.005)
    near_time = (all_rows - far_rows) / 2847e9
    far_time = far_rows / 817e9
    assert smooth_maximum(near_time, far_time, sharpness=2) < 0.75 * time_from_memory


def test_each_form_spelled_out() -> None:
    b, n, u, d = 10, 80, 60, 20  # 80 B rows: 96 B in sectors, 128 B in lines
    assert e.row_traffic(d) == 128  # lines of 64 B
    assert e.forward_bytes(b, n, d) == 8 * n + 8 * b + n * 128 + b * 80
    assert e.forward_bytes(b, n, d, granularity=32, misses=0.5) == 8 * n + 8 * b + n * 48 + b * 80
    assert e.fused_backward_bytes(b, n, d) == 2 * n * 96 + b * 80
    assert e.exact_backward_bytes(u, b, n, d, sort_passes=2) == 64 * n + 2 * u * 96 + b * 80
    without_sort = e.exact_backward_bytes(u, b, n, d, sort_passes=0, gradient_misses=1)
    assert without_sort == 2 * u * 96 + n * 96


@given(
    st.integers(1, 10**6),
    st.floats(1, 100),
    st.integers(1, 1024),
    st.sampled_from([1, 2, 4, 8]),
    st.floats(1, 3),
)
def test_traffic_is_at_least_compulsory_and_grows(
    bags: int, pooling: float, dim: int, itemsize: int, more: float
) -> None:
    lookups = bags * pooling
    size = {"itemsize": itemsize}
    unique = float(unique_rows(Uniform(10**6), lookups))
    assert e.forward_bytes(bags, lookups, dim, **size) >= (lookups + bags) * dim * itemsize
    exact = e.exact_backward_bytes(unique, bags, lookups, dim, **size, sort_passes=0)
    assert exact <= e.fused_backward_bytes(bags, lookups, dim, **size) * (1 + 1e-9)
    for form in (e.forward_bytes, e.fused_backward_bytes):
        assert form(bags, lookups * more, dim, **size) >= form(bags, lookups, dim, **size)
    for granularity in (32, 64):
        row = e.row_traffic(dim, itemsize, granularity)
        assert row % granularity == 0
        assert 0 <= row - dim * itemsize < granularity


def test_arrays_and_expressions_agree() -> None:
    frame = pl.DataFrame({"bags": [128, 4096], "dim": [10, 128]})
    bags, dim = frame["bags"].to_numpy(), frame["dim"].to_numpy()
    for form in (e.forward_bytes, e.fused_backward_bytes):
        scalars = [form(128, 1280, 10), form(4096, 40960, 128)]
        assert form(bags, 10 * bags, dim).tolist() == scalars
        expression = form(pl.col("bags"), 10 * pl.col("bags"), pl.col("dim"))
        assert frame.select(traffic=expression)["traffic"].to_list() == scalars


def test_lookups_are_sized_as_the_single_forms_say() -> None:
    laws = [Uniform(10**5), Zipf(10**6, 1.05), Zipf(200, 0.4), Uniform(10**5).resize(25_000)]
    lookups = [2000.0, 30_000.0, 4000.0, 500.0]
    dim = [10, 64, 32, 64]
    row_bytes = [64.0, 256.0, 128.0, 256.0]
    capacities = (2e5, 3e6)
    sizes = e.size_lookup(
        laws, lookups, dim, capacities=capacities, entries=1024.0, dense_bytes=1e5
    )
    unique = [float(unique_rows(law, n)) for law, n in zip(laws, lookups, strict=True)]
    assert sizes.unique.tolist() == pytest.approx(unique)
    assert sizes.row_bytes.tolist() == pytest.approx(np.multiply(lookups, row_bytes))
    for level, capacity in enumerate(capacities):
        misses = lru_misses(laws, lookups, row_bytes, capacity=capacity, dense_bytes=1e5)
        assert sizes.misses[level] == pytest.approx(misses)
        update_misses = miss_share(1e5 + sizes.unique_bytes.sum(), capacity=capacity)
        assert sizes.update_misses[level] == pytest.approx(update_misses)
    walks = page_walks(laws, lookups, row_bytes, entries=1024, dense_bytes=1e5)
    assert sizes.walks == pytest.approx(lookups * walks)
    assert np.all(sizes.update_walks <= sizes.unique)


N = 12
LAWS = [Zipf(10**4 * (i + 1), 0.1 * i) for i in range(N)]
LOOKUPS = 300.0 * np.arange(1, N + 1)


def size_lookups(first: int, last: int, **settings: Any) -> Any:
    """Sizes of some of the lookups, in rows of 64 numbers."""
    laws = LAWS[first:last]
    if "batches" in settings:
        settings["batches"] = [settings["batches"]] * len(laws)
    return e.size_lookup(
        laws,
        LOOKUPS[first:last],
        [64] * len(laws),
        capacities=(1e5, 1e6),
        entries=512.0,
        **settings,
    )


def check_part(whole: Any, first: int, last: int, part: Any) -> None:
    """Some of the lookups in all of them are as in a part of them."""
    for name, values in vars(part).items():
        assert vars(whole)[name][..., first:last] == pytest.approx(values), name


@pytest.mark.parametrize("settings", [{}, {"cold": True}, {"batches": 8.0}], ids=str)
def test_groups_of_lookups_are_sized_as_if_alone(settings: dict[str, Any]) -> None:
    own_groups = size_lookups(0, N, groups=range(N), dense_bytes=[1e4] * N, **settings)
    for i in range(N):
        alone = size_lookups(i, i + 1, dense_bytes=1e4, **settings)
        check_part(own_groups, i, i + 1, alone)
    pairs = size_lookups(0, N, groups=np.arange(N) // 2, **settings)
    for i in range(0, N, 2):
        pair = size_lookups(i, i + 2, **settings)
        check_part(pairs, i, i + 2, pair)


def test_cold_lookups_miss_as_the_single_form_says() -> None:
    cold = size_lookups(0, N, cold=True).misses[0]
    for law, lookups, misses in zip(LAWS, LOOKUPS, cold, strict=True):
        expected = float(cold_misses(law, lookups, 1e5 / 256)) / lookups
        assert misses == pytest.approx(expected)


def test_rotating_lookups_miss_as_the_single_form_says() -> None:
    """Four batches in turn, beside 100 kB of other data."""
    law = Zipf(10**5, 0.8)
    lookups = 2000.0
    row = 256.0  # 64 numbers
    asked = {"capacities": (4e6,), "entries": 900.0, "dense_bytes": 1e5}
    fresh = e.size_lookup([law], [lookups], [64], **asked)
    rotating = e.size_lookup([law], [lookups], [64], batches=[4.0], **asked)
    rows_before = float(unique_rows(law, 3 * lookups))
    rows = float(unique_rows(law, 4 * lookups))
    of_rows = rotating_misses(
        fresh.misses[0], (rows - rows_before) / lookups, rows * row + 1e5, capacity=4e6
    )
    assert rotating.misses[0] == pytest.approx(of_rows)
    pages_before = float(cover_pages(rows_before, law.rows * row))
    pages = float(cover_pages(rows, law.rows * row))
    of_pages = rotating_misses(
        fresh.walks / lookups, (pages - pages_before) / lookups, pages + 1e5 / PAGE, capacity=900
    )
    assert rotating.walks == pytest.approx(lookups * of_pages)
    assert rotating.walks < fresh.walks
