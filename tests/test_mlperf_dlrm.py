"""MLPerf steps of DLRM on 8 GPUs: the bars they are held to, and that presets are what the
benchmark trains."""

import csv
from itertools import product
from pathlib import Path

import pytest

from benchmarks import mlperf_dlrm
from benchmarks.helpers.files import read_csv, read_published
from perfkit.workloads.dlrm import DLRM


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return mlperf_dlrm.predict_rows(read_published(mlperf_dlrm.TABLE), mlperf_dlrm.read_plans())[0]


def test_published_steps_meet_the_bars(rows: list[dict[str, object]]) -> None:
    errors = {
        (row["benchmark"], row["gpu"]): row["predicted"] / row["measured"] - 1 for row in rows
    }
    assert set(mlperf_dlrm.BARS) <= set(errors)
    for key, bar in mlperf_dlrm.BARS.items():
        assert abs(errors[key]) <= bar, key
    assert sum(row["low"] <= row["measured"] <= row["high"] for row in rows) >= 0.8 * len(rows)


def test_the_shipped_comparison_is_what_perfkit_predicts(rows: list[dict[str, object]]) -> None:
    shipped = read_published(mlperf_dlrm.TABLE)
    for key in ("predicted", "low", "high"):
        here, there = ([row[key] for row in own] for own in (rows, shipped))
        assert here == pytest.approx(there, rel=1e-3), (
            "run python -m benchmarks.mlperf_dlrm --write"
        )


def test_measured_steps_are_the_fastest_entries(shared_data: Path) -> None:
    entries = [
        row
        for row in read_csv(shared_data / "end_to_end" / "mlperf_8gpu_bert_dlrm.csv")
        if row["quality"].startswith("A")
        and row["train_only_iter_ms"]
        and row["num_accel"] == "8"
        and row["global_batch"] == str(mlperf_dlrm.BATCH)
    ]
    shipped = {(row["benchmark"], row["gpu"]): row for row in read_published(mlperf_dlrm.TABLE)}
    for benchmark, gpu in product(mlperf_dlrm.MODELS, mlperf_dlrm.PLATFORMS):
        own = [
            row
            for row in entries
            if row["benchmark"] == benchmark and f"{gpu}-SXM" in row["accelerator"]
        ]
        assert bool(own) == ((benchmark, gpu) in shipped)
        if own:
            best, row = (
                min(own, key=lambda one: float(one["train_only_iter_ms"])),
                shipped[benchmark, gpu],
            )
            assert all(
                row[key] == best[key].replace(" : ", ", ")
                for key in ("round", "submitter", "system", "source")
            )
            assert row["measured"] == pytest.approx(
                float(best["train_only_iter_ms"]) / 1e3, rel=1e-4
            )


@pytest.mark.parametrize(
    ("preset", "prefix", "lookups"),
    [("dlrm-mlperf", "dlrm_v1", "hotness"), ("dlrm-dcnv2", "dcnv2", "multi_hot")],
)
def test_presets_have_the_tables_of_the_benchmark(
    preset: str, prefix: str, lookups: str, shared_data: Path
) -> None:
    with open(
        shared_data / "embedding" / "mlperf_dlrm_tables.csv", newline="", encoding="utf-8"
    ) as file:
        published = list(csv.DictReader(file))
    tables = DLRM(preset, batch=8).tables
    for name, value in (
        ("rows", [t.rows for t in tables]),
        (lookups, [t.pooling for t in tables]),
        ("dim", [t.dim for t in tables]),
    ):
        assert [float(row[f"{prefix}_{name}"]) for row in published] == value


def test_steps_on_other_machines_are_predicted_as_their_files_say(shared_data: Path) -> None:
    """All three within 25 % in mean, DCNv2 on 64 H100 and on 8 GB200 each. v1 on 64 A100, whose frequent
    rows are copied, is too slow by more."""
    predicted, plans = mlperf_dlrm.predict_nodes(mlperf_dlrm.read_plans())
    errors = {(row["benchmark"], row["batch"]): row["error"] for row in predicted}
    assert len(predicted) == len(mlperf_dlrm.CASES)
    assert abs(errors["dlrm_dcnv2", 135_168]) <= 0.25
    assert abs(errors["dlrm_dcnv2", 55_296]) <= 0.25
    assert 0.25 < errors["dlrm", 71_680] <= 0.5
    assert sum(abs(error) for error in errors.values()) / len(errors) <= 0.25
    copied = [placement.frequent for placement in plans["dlrm-a100-sxm-8x8-64"].placements]
    assert sum(frequent or 0 for frequent in copied) == 9_144, "as its docstring says"
    assert {read["id"] for read in read_csv(shared_data / "steps" / "mlperf_dlrm.csv")} == {
        *mlperf_dlrm.CASES
    }
