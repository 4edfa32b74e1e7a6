"""Forms of GPUs on other people's measurements: the bars hold, and a new system needs no code."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from benchmarks import gpu_forms
from benchmarks.gpu_forms import BARS, PAIR, POOLED, Judged, make_records
from perfkit.fitting import Roofline
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.platform.datasheets import read_datasheet

PUBLISHED = Path(__file__).resolve().parent.parent / "reference_data" / "published"
KEYS = ["system", "quantity", "form", "parameters", "split", "n", "geomean", "mean", "p95", "bias"]
TRUE = {"launch": 3e-6, "compute_efficiency": 0.7, "memory_efficiency": 0.85, "sharpness": 2.2}


def points(
    errors: Any, key: tuple[str, str, str], inside: Any = (True, True, True, True, False)
) -> Judged:
    system, quantity, split = key
    return Judged(system, quantity, "roofline", 4, split, errors, inside)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GEMMs of an H200 that follow the form, with the scatter of a real kernel, as the kernel
    database holds them."""
    rng = np.random.default_rng(0)
    m, n, k = np.array(
        np.meshgrid(*[2.0 ** np.arange(*ends) for ends in ((0, 15), (7, 14), (7, 14))])
    ).reshape(3, -1)
    device = read_datasheet("h200-sxm").device
    rates = {
        "peak": np.asarray(device.peaks["bf16"].value),
        "bandwidth": np.asarray(device.memory[-1].bandwidth.value),
    }
    work = {"flops": gemm_flops(m, n, k), "nbytes": gemm_bytes(m, n, k, itemsize=2)}
    seconds = Roofline.build(TRUE).time(work | rates) * np.exp(0.05 * rng.standard_normal(m.size))
    frame = (
        pl.DataFrame({"m": m, "n": n, "k": k})
        .cast(pl.Int64)
        .with_columns(
            latency=seconds * 1e3,
            gemm_dtype=pl.lit("bfloat16"),
            framework=pl.lit("SGLang"),
            version=pl.lit("0.5.14"),
            device=pl.lit("NVIDIA H200"),
            op_name=pl.lit("gemm"),
            kernel_source=pl.lit("torch"),
        )
    )
    folder = tmp_path / "aiconfigurator_core/systems/data/h200_sxm/gemm/sglang/0.5.14"
    folder.mkdir(parents=True)
    frame.write_parquet(folder / "gemm_perf.parquet")
    monkeypatch.setenv("PERFKIT_KERNEL_DATABASE", str(tmp_path))
    return tmp_path


# The bars, on real measurements.


def test_bars_hold(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = []
    monkeypatch.setattr(
        gpu_forms, "make_records", lambda judged: rows.extend(make_records(judged)) or rows
    )
    assert gpu_forms.main(["--systems", ",".join(PAIR)]) == 0
    text = capsys.readouterr().out
    met = {(row["system"], row["quantity"], row["split"]) for row in rows if row["met"]}
    assert met == {key for key in BARS if key[0] == POOLED}
    assert text.count("yes") == len(met) and "NO" not in text
    few = next(row for row in rows if (row["system"], row["split"]) == (POOLED, "32 shapes"))
    assert few["n"] == 750 and 70 <= few["inside"] <= 90


def test_cited_shapes_are_those_of_the_source(shared_data: Path) -> None:
    with (PUBLISHED / "gemm_bf16.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) <= 60 and all(
        row["source"] and row["date"] and row["kind"] == "measured" for row in rows
    )
    found = 0
    for system in PAIR:
        known = {
            row[:3]: row[3]
            for row in gpu_forms.load_shapes(system).select(*"mnk", "seconds").iter_rows()
        }
        for row in rows:
            time = (
                known.get(tuple(float(row[side]) for side in "mnk"))
                if row["system"] == system
                else None
            )
            assert time is None or float(row["seconds"]) == pytest.approx(time, rel=1e-4)
            found += time is not None
    assert found >= 48


# Any other system.


def test_a_new_system_is_fitted_and_judged_by_the_same_code(database: Path) -> None:
    rows = {
        (row["quantity"], row["split"]): row
        for row in make_records(gpu_forms.judge_gemms(["h200_sxm"]))
    }
    assert len(rows) == 6 and {row["system"] for row in rows.values()} == {"h200_sxm"}
    for row in rows.values():
        assert list(row)[: len(KEYS)] == KEYS and row["parameters"] == 4
        assert 3 < row["mean"] < 5.5 and abs(row["bias"]) < 2.5  # the mean of 5 % of scatter is 4 %
        assert 55 <= row["inside"] <= 98
    assert rows["GEMM, any size", "random fifth"]["n"] == pytest.approx(735 / 5, abs=30)


# Records, bars and the table.


@pytest.mark.parametrize(
    ("system", "errors", "inside", "met"),
    [
        (POOLED, 0.05, 80, True),
        (POOLED, 0.09, 80, False),
        (POOLED, 0.05, 95, False),
        ("h200_sxm", 0.068, 95, True),
        ("b200_sxm", 0.5, 10, None),
    ],
)
def test_a_bar_holds_for_errors_and_on_both_first_gpus_for_intervals(system, errors, inside, met):
    (row,) = make_records(
        [points(np.full(100, errors), (system, "GEMM", "random fifth"), np.arange(100) < inside)]
    )
    assert row["met"] is met


def test_a_missed_bar_is_the_exit_code(tmp_path, monkeypatch, capsys):
    (tmp_path / "gemm").mkdir()
    monkeypatch.setenv("PERFKIT_SHARED_DATA", str(tmp_path))
    found = [points([0.2] if key[1] == "GEMM" else [0.01], key) for key in BARS if key[0] == POOLED]
    monkeypatch.setattr(gpu_forms, "judge_collectives", lambda systems: found[:2])
    monkeypatch.setattr(gpu_forms, "judge_gemms", lambda systems: found[3:])
    assert gpu_forms.main(["--systems", "a100_sxm"]) == 0  # has no bars of its own
    assert gpu_forms.main(["--systems", "a100_sxm,h100_sxm"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert f"missed: {POOLED}, GEMM, random fifth" in told and len(told) == 4
    assert told[0] == f"not judged: {POOLED}, collective, rank law, 2 and 4 ranks to 8"
