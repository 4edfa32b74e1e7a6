import csv
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import embedding as e
from perfkit.models.caches import Uniform, unique_rows
from perfkit.models.roofline import optimizer_bytes

size = st.integers(1, 10**6)
dims = st.integers(1, 1024)
itemsizes = st.sampled_from([1, 2, 4, 8])


def test_fused_backward_against_one_v100_counter() -> None:
    """owensgroup/ml_perf_model, V100 kernel samples of 2020: batch 4096, 32 tables of 500,000 rows, L = 16, D = 128."""
    assert 2293410720 / e.fused_backward_bytes(4096 * 32, 4096 * 32 * 16, 128) == pytest.approx(1.04, abs=0.01)


def test_fused_backward_against_all_v100_counters(shared_data: Path) -> None:
    counters = shared_data / "kernels_v100" / "kernel_samples_v100_2020_counters.csv"
    with counters.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["set"] == "EL_bwd_sgd"]
    ratios = []
    for row in rows:
        bags = float(row["batch_size"]) * float(row["num_tables"])
        nbytes = e.fused_backward_bytes(bags, bags * float(row["bag_size"]), float(row["embedding_dim"]))
        ratios.append(float(row["dram_bytes"]) / nbytes)
    assert len(ratios) == 5 and np.mean(ratios) == pytest.approx(1.04, abs=0.005)
    assert max(ratios) - min(ratios) < 0.01


def test_lookup_times_of_a_v100_trace() -> None:
    """V100 trace of DLRM, 817 GB/s: 8 tables of 1M rows, B = 2048, L = 100, D = 64 took 521.8 and 1276.7 µs."""
    bags, lookups = 8 * 2048, 8 * 2048 * 100
    forward = e.lookup_time([e.forward_bytes(bags, lookups, 64, granularity=32)], [817e9])
    backward = e.lookup_time([e.fused_backward_bytes(bags, lookups, 64)], [817e9])
    assert forward / 521.8e-6 - 1 == pytest.approx(0.025, abs=0.005)
    assert backward / 1276.7e-6 - 1 == pytest.approx(-0.18, abs=0.02)


def test_small_criteo_tables_need_the_cache() -> None:
    """V100 trace of DLRM-MLPerf, 26 tables, B = 2048, L = 1, D = 128: 51.4 µs, far below all rows from DRAM."""
    everything = e.forward_bytes(26 * 2048, 26 * 2048, 128, granularity=32)
    assert e.lookup_time([everything], [817e9]) / 51.4e-6 > 1.3
    half = e.forward_bytes(26 * 2048, 26 * 2048, 128, granularity=32, misses=0.3)
    assert e.lookup_time([everything - half, half], [2847e9, 817e9]) < 0.75 * e.lookup_time([everything], [817e9])


def test_each_form_spelled_out() -> None:
    b, n, u, d, rows = 10, 80, 60, 20, 1000  # 80 B rows: 96 B in sectors, 128 B in lines
    assert e.forward_bytes(b, n, d) == 8 * n + 8 * b + n * 128 + b * 80
    assert e.forward_bytes(b, n, d, granularity=32, misses=0.5) == 8 * n + 8 * b + n * 48 + b * 80
    assert e.fused_backward_bytes(b, n, d) == 2 * n * 96 + b * 80
    assert e.exact_backward_bytes(u, b, n, d, sort_passes=2) == 64 * n + 2 * u * 96 + b * 80
    assert e.exact_backward_bytes(u, b, n, d, sort_passes=0, gradient_misses=1) == 2 * u * 96 + n * 96
    assert e.sparse_backward_bytes(b, n, d) == b * 80 + n * 80 + 8 * n
    assert e.dense_backward_bytes(rows, u, b, n, d) == rows * 80 + 2 * u * 128 + b * 80 + 16 * n
    assert e.sparse_update_bytes(n, u, d) == n * (80 + 8 + 256)
    assert e.sparse_update_bytes(n, u, d, optimizer="adagrad") == n * 96 + u * 80 + 4 * u * 128
    assert e.sparse_update_bytes(n, u, d, optimizer="sparse_adam") == n * 96 + u * 80 + 6 * u * 128
    assert e.dense_update_bytes(rows, d) == optimizer_bytes("sgd", rows * d) == 12 * rows * d
    with pytest.raises(ValueError, match=r"optimizer is 'adamw'; known are sgd, adagrad, sparse_adam"):
        e.sparse_update_bytes(n, u, d, optimizer="adamw")


def test_table_memory_by_optimizer() -> None:
    weights = 1000 * 64 * 4
    names = ("sgd", "rowwise_adagrad", "adagrad", "sgd_momentum", "adam", "sparse_adam")
    extra = [float(e.table_memory(1000, 64, optimizer=name)) / weights - 1 for name in names]
    assert extra == pytest.approx([0, 1 / 64, 1, 1, 2, 2])
    with pytest.raises(ValueError, match=r"optimizer is 'adagrda'; .*did you mean 'adagrad'"):
        e.table_memory(1000, 64, optimizer="adagrda")


@given(size, st.floats(1, 100), dims, itemsizes, st.floats(1, 3))
def test_traffic_is_at_least_compulsory_and_grows(
    bags: int, pooling: float, dim: int, itemsize: int, more: float
) -> None:
    lookups = bags * pooling
    unique = float(unique_rows(Uniform(10**6), lookups))
    values = lookups * dim * itemsize
    assert e.forward_bytes(bags, lookups, dim, itemsize=itemsize) >= values + bags * dim * itemsize
    assert e.sparse_backward_bytes(bags, lookups, dim, itemsize=itemsize) >= values
    exact = e.exact_backward_bytes(unique, bags, lookups, dim, itemsize=itemsize, sort_passes=0)
    assert exact <= e.fused_backward_bytes(bags, lookups, dim, itemsize=itemsize) * (1 + 1e-9)
    for form in (e.forward_bytes, e.fused_backward_bytes, e.sparse_backward_bytes):
        assert form(bags, lookups * more, dim, itemsize=itemsize) >= form(bags, lookups, dim, itemsize=itemsize)
    for granularity in (32, 64):
        row = e.row_traffic(dim, itemsize, granularity)
        assert row % granularity == 0 and 0 <= row - dim * itemsize < granularity


def test_lookup_time_has_its_parts() -> None:
    parts = {"launch": 5e-6, "tables": 8, "per_table": 1e-6, "lookups": 1000, "per_lookup": 21e-9}
    assert e.lookup_time([0.0, 0.0], [1e12, 1e11], **parts) == pytest.approx(5e-6 + 8e-6 + 21e-6)
    assert e.lookup_time([3e6, 4e5], [1e12, 1e11], sharpness=1) == pytest.approx(7e-6)
    assert e.lookup_time([3e6, 4e5], [1e12, 1e11], sharpness=2) == pytest.approx(5e-6)
    with pytest.raises(ValueError, match="zip"):
        e.lookup_time([1.0], [1e12, 1e11])


def test_arrays_and_expressions_agree() -> None:
    frame = pl.DataFrame({"bags": [128, 4096], "dim": [10, 128]})
    bags, dim = frame["bags"].to_numpy(), frame["dim"].to_numpy()
    for form in (e.forward_bytes, e.fused_backward_bytes, e.sparse_backward_bytes):
        scalars = [form(b, 10 * b, d) for b, d in frame.iter_rows()]
        assert form(bags, 10 * bags, dim).tolist() == scalars
        expression = form(pl.col("bags"), 10 * pl.col("bags"), pl.col("dim"))
        assert frame.select(expression.alias("n"))["n"].to_list() == scalars
    assert e.exact_backward_bytes(bags, bags, 10 * bags, dim, gradient_misses=0.5).shape == (2,)
