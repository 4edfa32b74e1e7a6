import csv
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import embedding as e
from perfkit.models.caches import cold_misses, lru_misses, miss_share, page_walks
from perfkit.models.distributions import Uniform, Zipf, unique_rows
from perfkit.models.roofline import smooth_maximum


def test_fused_backward_against_all_v100_counters(shared_data: Path) -> None:
    with (shared_data / "kernels_v100" / "kernel_samples_v100_2020_counters.csv").open(
        newline=""
    ) as file:
        rows = [row for row in csv.DictReader(file) if row["set"] == "EL_bwd_sgd"]
    batch, tables, size, dim, counted = (
        np.array([float(row[name]) for row in rows])
        for name in ("batch_size", "num_tables", "bag_size", "embedding_dim", "dram_bytes")
    )
    ratios = counted / e.fused_backward_bytes(batch * tables, batch * tables * size, dim)
    assert (
        len(ratios) == 5
        and ratios.mean() == pytest.approx(1.04, abs=0.005)
        and np.ptp(ratios) < 0.01
    )


def test_traffic_of_v100_traces() -> None:
    """DRAM counter of owensgroup/ml_perf_model (2020): batch 4096, 32 tables of 500,000 rows, L =
    16, D = 128.

    Trace of DLRM, 817 GB/s: 8 tables of 1M rows, B = 2048, L = 100, D = 64 took 521.8 and 1276.7
    µs. DLRM-MLPerf, 26 tables, B = 2048, L = 1, D = 128 took 51.4 µs, far below all rows from DRAM:
    caches hold the small tables.
    """
    assert 2293410720 / e.fused_backward_bytes(4096 * 32, 4096 * 32 * 16, 128) == pytest.approx(
        1.04, abs=0.01
    )
    bags, lookups = 8 * 2048, 8 * 2048 * 100
    forward = e.forward_bytes(bags, lookups, 64, granularity=32) / 817e9
    backward = e.fused_backward_bytes(bags, lookups, 64) / 817e9
    assert forward / 521.8e-6 - 1 == pytest.approx(0.025, abs=0.005)
    assert backward / 1276.7e-6 - 1 == pytest.approx(-0.18, abs=0.02)
    everything, far = (
        e.forward_bytes(26 * 2048, 26 * 2048, 128, granularity=32, misses=m) for m in (1.0, 0.3)
    )
    assert everything / 817e9 / 51.4e-6 - 1 == pytest.approx(0.32, abs=0.005)
    assert (
        smooth_maximum((everything - far) / 2847e9, far / 817e9, sharpness=2)
        < 0.75 * everything / 817e9
    )


def test_each_form_spelled_out() -> None:
    b, n, u, d = 10, 80, 60, 20  # 80 B rows: 96 B in sectors, 128 B in lines
    assert e.forward_bytes(b, n, d) == 8 * n + 8 * b + n * 128 + b * 80
    assert e.forward_bytes(b, n, d, granularity=32, misses=0.5) == 8 * n + 8 * b + n * 48 + b * 80
    assert e.fused_backward_bytes(b, n, d) == 2 * n * 96 + b * 80
    assert e.exact_backward_bytes(u, b, n, d, sort_passes=2) == 64 * n + 2 * u * 96 + b * 80
    assert (
        e.exact_backward_bytes(u, b, n, d, sort_passes=0, gradient_misses=1) == 2 * u * 96 + n * 96
    )


@given(
    st.integers(1, 10**6),
    st.floats(1, 100),
    st.integers(1, 1024),
    st.sampled_from([1, 2, 4, 8]),
    st.floats(1, 3),
)
def test_traffic_is_at_least_compulsory_and_grows(bags, pooling, dim, itemsize, more):
    lookups, size = bags * pooling, {"itemsize": itemsize}
    unique = float(unique_rows(Uniform(10**6), lookups))
    assert e.forward_bytes(bags, lookups, dim, **size) >= (lookups + bags) * dim * itemsize
    exact = e.exact_backward_bytes(unique, bags, lookups, dim, **size, sort_passes=0)
    assert exact <= e.fused_backward_bytes(bags, lookups, dim, **size) * (1 + 1e-9)
    for form in (e.forward_bytes, e.fused_backward_bytes):
        assert form(bags, lookups * more, dim, **size) >= form(bags, lookups, dim, **size)
    for granularity in (32, 64):
        row = e.row_traffic(dim, itemsize, granularity)
        assert row % granularity == 0 and 0 <= row - dim * itemsize < granularity


def test_arrays_and_expressions_agree() -> None:
    frame = pl.DataFrame({"bags": [128, 4096], "dim": [10, 128]})
    for form in (e.forward_bytes, e.fused_backward_bytes):
        scalars = [form(b, 10 * b, d) for b, d in frame.iter_rows()]
        assert (
            form(
                *(frame[n].to_numpy() * f for n, f in (("bags", 1), ("bags", 10), ("dim", 1)))
            ).tolist()
            == scalars
        )
        expression = form(pl.col("bags"), 10 * pl.col("bags"), pl.col("dim"))
        assert frame.select(expression.alias("n"))["n"].to_list() == scalars


def test_lookups_are_sized_as_the_single_forms_say() -> None:
    laws = [Uniform(10**5), Zipf(10**6, 1.05), Zipf(200, 0.4), Uniform(10**5).resize(25_000)]
    lookups, dim, row = (
        [2000.0, 30_000.0, 4000.0, 500.0],
        [10, 64, 32, 64],
        [64.0, 256.0, 128.0, 256.0],
    )
    where = {"capacities": (2e5, 3e6), "entries": 1024.0, "dense_bytes": 1e5}
    together = e.size_lookup(laws, lookups, dim, **where)
    assert together.unique.tolist() == pytest.approx(
        [float(unique_rows(d, n)) for d, n in zip(laws, lookups, strict=True)]
    )
    assert together.row_bytes.tolist() == pytest.approx(np.multiply(lookups, row))
    for level, capacity in enumerate(where["capacities"]):
        misses = lru_misses(laws, lookups, row, capacity=capacity, dense_bytes=1e5)
        assert together.misses[level] == pytest.approx(misses)
        again = miss_share(1e5 + together.unique_bytes.sum(), capacity=capacity)
        assert together.update_misses[level] == pytest.approx(again)
    assert together.walks == pytest.approx(
        lookups * page_walks(laws, lookups, row, entries=1024, dense_bytes=1e5)
    )
    assert np.all(together.update_walks <= together.unique)


def test_groups_of_lookups_are_sized_as_if_alone() -> None:
    laws, lookups = [Zipf(10**4 * (i + 1), 0.1 * i) for i in range(12)], 300.0 * np.arange(1, 13)
    where = {"capacities": (1e5, 1e6), "entries": 512.0}
    for more in ({}, {"cold": True}, {"batches": [8.0] * 12}):
        alone = e.size_lookup(
            laws, lookups, [64] * 12, groups=range(12), dense_bytes=[1e4] * 12, **where, **more
        )
        pairs = e.size_lookup(laws, lookups, [64] * 12, groups=np.arange(12) // 2, **where, **more)
        for i in range(0, 12, 2):
            turns = {"batches": [8.0]} if "batches" in more else more
            one = e.size_lookup(
                laws[i : i + 1], lookups[i : i + 1], [64], dense_bytes=1e4, **where, **turns
            )
            assert [v[..., i : i + 1] for v in vars(alone).values()] == [
                pytest.approx(v) for v in vars(one).values()
            ]
            turns = {"batches": [8.0] * 2} if "batches" in more else more
            two = e.size_lookup(laws[i : i + 2], lookups[i : i + 2], [64] * 2, **where, **turns)
            assert [v[..., i : i + 2] for v in vars(pairs).values()] == [
                pytest.approx(v) for v in vars(two).values()
            ]
    cold = e.size_lookup(laws, lookups, [64] * 12, cold=True, **where).misses
    expected = [float(cold_misses(d, n, 1e5 / 256)) / n for d, n in zip(laws, lookups, strict=True)]
    assert cold[0] == pytest.approx(expected)
