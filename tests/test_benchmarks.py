"""Tables of benchmarks/ from saved measurements; nothing is measured and no clock read."""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as everything
from benchmarks import accuracy, learning, placement, speed
from benchmarks.bars import BARS, evaluate, format_accuracy
from perfkit.calibration.checks import Comparison
from perfkit.calibration.fit import judge_kernels
from perfkit.measure.kernels import draw_cases
from perfkit.measure.samples import draw_check, dump
from perfkit.platform.platform import Platform
from perfkit.prediction.result import predict

ROOT = Path(__file__).resolve().parent.parent
MEASURED = sorted((ROOT / "reference_data" / "measured").glob("*.measurements.json"))


def comparison(platform: Platform, seed: int, factor: float, floor: float = 0.04) -> Comparison:
    """A saved check whose predictions are `factor` times what was measured."""
    runs = []
    for sample in draw_check(seed, dlrm=2, transformer=1, hybrid=1):
        time = predict(sample.workload, platform, ranks=sample.ranks, plan=sample.plan).time
        owners = {"owners": list(sample.plan.owners)} if sample.plan else {}
        about = {"family": sample.family, "name": sample.name, "config": dump(sample.workload) | owners}
        times = {"predicted_s": time, "low_s": 0.9 * time, "high_s": 1.1 * time, "measured_s": time / factor}
        quartiles = {"measured_q1_s": time / factor, "measured_q3_s": time / factor}
        runs.append(
            {**about, **times, **quartiles, "ranks": sample.ranks, "flagged": False, "bottleneck": "x", "noise": floor}
        )
    return Comparison(tuple(runs), "other", {"processor": "x"}, {"perfkit": "0"})


@pytest.fixture
def checks(toy: Platform, tmp_path: Path) -> list[Path]:
    cases = [comparison(toy, 1, 1.05, 0.02), comparison(toy, 2, 0.8, 0.04)]
    return [case.save(tmp_path / f"check-{number}.json") for number, case in enumerate(cases)]


def by_name(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["quantity"]: row for row in rows}


def damaged(saved: Comparison) -> Iterator[str]:
    """Files of a comparison whose views would fail, or show what cannot be."""
    for key, value in {
        "measured_s": 0, "predicted_s": -1, "low_s": math.nan, "high_s": "1", "measured_q1_s": None, "name": 5,
        "bottleneck": [], "flagged": None, "exposed_measured": "x", "noise": "x",
    }.items():  # fmt: skip
        data = json.loads(json.dumps(saved.to_dict()))
        data["runs"][0][key] = value
        if key == "flagged":
            del data["runs"][0][key]
        yield json.dumps(data)
    for key, value in {"machine": 3, "runs": []}.items():
        yield json.dumps({**saved.to_dict(), key: value})


def test_a_comparison_survives_its_file(toy: Platform, tmp_path: Path) -> None:
    saved = comparison(toy, 1, 1.05)
    assert Comparison.load(saved.save(tmp_path / "c.json")).to_dict() == json.loads(json.dumps(saved.to_dict()))
    for text in ("", "[]", "{}", '{"format": 2}', '{"format": 1, "runs": [{}]}', *damaged(saved)):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json cannot be read: .*; name a file that check wrote"):
            Comparison.load(tmp_path / "bad.json")


def test_pooled_floors_count_runs(toy: Platform) -> None:
    pooled = Comparison.pool([comparison(toy, 1, 1.0, 0.02), comparison(toy, 2, 1.0, 0.04)])
    assert len(pooled.runs) == 8
    assert pooled.noise_floor == pytest.approx(dict.fromkeys(("dlrm", "transformer", "hybrid", "all"), 0.03))
    with pytest.raises(ValueError, match="comparisons is empty"):
        Comparison.pool([])


def test_iterations_are_pooled_and_held_against_their_bars(toy: Platform, checks: list[Path]) -> None:
    rows = by_name(evaluate(checks))
    one = rows["iterations, one process"]
    assert (one["n"], one["mean"], one["bias"]) == (6, pytest.approx(12.5), pytest.approx(-7.5))
    assert one["geomean"] == pytest.approx(10.0)
    assert one["floor"] == pytest.approx(3.0) and one["bar"] == {"geomean": 10, "mean": 12, "p95": 30}
    assert one["met"] is False and rows["iterations, two ranks"]["met"] is True
    assert rows["iterations, DLRM"]["met"] is None and rows["iterations, DLRM"]["n"] == 4
    assert (
        rows["inside the 80 % interval"]["inside"] == pytest.approx(50) and not rows["inside the 80 % interval"]["met"]
    )
    assert "collectives, lower quartile" not in rows


def test_kernels_and_collectives_are_judged(toy: Platform, tmp_path: Path) -> None:
    kernels = []
    for case in draw_cases(3, density=0.2):
        if case.kind not in ("gemm", "convolution") or case.sizes["flops"] >= 2e6:
            row = {"kind": case.kind, "variant": case.variant, "sizes": case.sizes, "nbytes": 1e6, "median": 1.0}
            (error,) = judge_kernels(toy, [row])[f"{case.kind}.{case.variant}"]
            kernels.append({**row, "median": (1 + error) / 1.04, "halves": [1.0, 1.02]})
    sweep = [{"operation": "all_reduce", "nbytes": 2**size, "q1": 1e-4 * 1.1} for size in range(10, 14)]
    other = [{**row, "q1": 1e-4} for row in sweep]
    parts = {
        "k.json": {"format": 1, "kernels": kernels},
        "c.json": {"format": 1, "collectives": [sweep, other], "ranks": 2},
    }
    for name, part in parts.items():
        (tmp_path / name).write_text(json.dumps(part))
    files = [tmp_path / name for name in parts]
    rows = by_name(evaluate(files, toy))
    bars = [bar.name for bar in BARS if not bar.name.startswith("iter")]
    assert list(rows) == bars
    for name in bars[:-1]:
        assert rows[name]["mean"] == pytest.approx(4.0) and rows[name]["floor"] == pytest.approx(2.0)
    assert rows[bars[-1]]["n"] == 8 and rows[bars[-1]]["floor"] == pytest.approx(100 * np.log(1.1), abs=0.01)
    text = format_accuracy([*rows.values()])
    assert "geomean 6 / mean 10  yes" in text and len(text.splitlines()) == len(bars) + 1
    with pytest.raises(ValueError, match="say with --platform what predicts"):
        evaluate(files)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "platform is missing"),
        (["--platform", "h100-sxm-9"], "did you mean 'h100-sxm-8'"),
        (["--platform", "h100-sxm-8"], "was calibrated on no machine"),
        (["--platform", "TOY", "--kernel-seed", "0"], "the sizes that calibration has fitted"),
        (["--platform", "TOY", "--seeds", "1,-2"], "seeds is -2"),
        (["--platform", "TOY", "--seeds", "one"], "could not convert string to float: 'one'"),
        (["--from", "nowhere.json"], "nowhere.json"),
        (["--from", "BROKEN"], "is not JSON"),
        (["--from", "OTHER"], "holds no kernels, collectives or runs"),
    ],
)
def test_wrong_arguments_of_accuracy_are_told_in_one_line(
    words: list[str], message: str, toy: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(accuracy, "describe_machine", lambda: {"processor": "invented"})
    toy.__class__(toy.name, toy.device, toy.network, provenance={"processor": "invented"}).save(tmp_path / "toy.toml")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"format": 1}')
    names = {"TOY": "toy.toml", "BROKEN": "broken.json", "OTHER": "other.json"}
    assert accuracy.main([names.get(word, word) for word in words]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("accuracy: ") and message in told and "\n" not in told


def test_a_rerun_takes_what_is_kept(toy: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, asked = {"processor": "invented"}, []
    monkeypatch.setattr(accuracy, "describe_machine", lambda: machine)
    monkeypatch.setattr(accuracy, "list_versions", lambda: {"perfkit": "0"})

    def jobs(*_: Any, **__: Any) -> dict[str, Any]:
        return {name: lambda name=name: asked.append(name) or {"kernels": []} for name in ("kernels-1", "check-1")}

    monkeypatch.setattr(accuracy, "_jobs", jobs)
    here = toy.__class__(toy.name, toy.device, toy.network, provenance=machine)
    for _ in range(2):
        files = accuracy.measure(here, tmp_path / "out.json", seeds=[1], kernel_seed=1)
        assert [file.name for file in files] == ["out.kernels-1.json", "out.check-1.json"]
    assert asked == ["kernels-1", "check-1"]
    files[0].write_text(json.dumps({"format": 1, "machine": {"processor": "y"}, "versions": {"perfkit": "0"}}))
    with pytest.raises(ValueError, match="measured on another machine"):
        accuracy.measure(here, tmp_path / "out.json", seeds=[1], kernel_seed=1)


@pytest.mark.skipif(not MEASURED, reason="no raw measurements in reference_data")
def test_learning_from_nothing_and_from_something(
    toy: Platform,
    checks: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw = json.loads(MEASURED[0].read_text(encoding="utf-8"))
    single = [row for row in raw["iterations"] if not row["owners"]]
    raw["iterations"] = single[:2] + single[-2:]
    by_class: dict[str, list[Any]] = {}
    for row in raw["kernels"]:
        by_class.setdefault(f"{row['kind']}.{row['variant']}", []).append(row)
    raw["kernels"] = [row for rows in by_class.values() for row in rows[:6]]
    (tmp_path / "raw.json").write_text(json.dumps(raw))
    monkeypatch.setattr(learning.learn, "__kwdefaults__", {"counts": (0,), "draws": 1})
    words = [str(tmp_path / "raw.json"), "--check", *map(str, checks), "--json", str(tmp_path / "out.json")]
    assert learning.main(words) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["records"]
    assert [(row["family"], row["iterations"]) for row in rows if row["family"] in ("dlrm", "all")] == [
        ("dlrm", 0), ("dlrm", 4), ("all", 0), ("all", 4),
    ]  # fmt: skip
    assert all(row["q1"] <= row["error"] <= row["q3"] for row in rows if row["draws"] == 1)
    assert "quartiles over draws" in capsys.readouterr().out


def test_speed_lists_jobs_that_run(toy: Platform) -> None:
    jobs = speed.list_jobs([toy], None)
    assert {job.bar for job in jobs} - {3.0} == {0.5, 0.05, 5e-3, 1e-6, 1.0, None}, "3 s to read an installed database"
    for job in jobs:
        if not job.slow:
            next(job.calls)()


@pytest.mark.parametrize("given", [False, True])
def test_all_benchmarks_calibrate_only_without_a_platform(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def calibrate(*, out: Path, quick: bool) -> None:
        asked.append("calibrate")
        out.write_text("")
        out.with_suffix(".measurements.json").write_text("")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(everything, "calibrate", calibrate)
    monkeypatch.setenv("PERFKIT_SHARED_DATA", str(tmp_path if given else tmp_path / "nowhere"))
    (tmp_path / "gemm").mkdir()
    monkeypatch.setattr(everything, "count_cores", lambda: 2)
    parts = [part for part in vars(everything).values() if getattr(part, "__package__", "") == "benchmarks"]
    for part in filter(lambda part: hasattr(part, "main"), parts):
        monkeypatch.setattr(part, "main", lambda words, name=part.__name__: asked.append(name.split(".")[-1]) or 0)
    words = ["--quick", *(["--platform", "mine.toml"] if given else [])]
    assert everything.main(words) == 0
    saved = ["gpu_iterations", "gpu_networks", "mlperf_dlrm", "sharding_study", "sharding_study", "left_out"]
    own = ["accuracy", "imbalance", "speed", "placement", "gpu_forms"]
    new = ["calibrate", "accuracy", "learning", "imbalance", "speed", "placement"]
    assert asked == (own if given else new) + saved
    assert everything.main(words) == 0
    assert asked.count("calibrate") == (0 if given else 1)
    assert given or "remove it to calibrate again" in capsys.readouterr().out


def test_placements_are_recorded_as_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    words = ["--tables", "20", "--ranks", "4", "--seed", "3", "--seconds", "0.02", "--huge", "--json", str(file)]
    assert placement.main(words) == 0
    records = json.loads(file.read_text(encoding="utf-8"))["records"]
    methods = {"search", "search-whole", "random", "size", "lookup", "size-lookup", "unique-rows", "storage"}
    assert {(r["method"], r["objective"]) for r in records} == set(product(methods, ("additive", "iteration")))
    for record in records:
        needed = {"method", "objective", "seed", "seconds", "predicted_s", "bound_s", "gap", "loads_s"}
        assert needed <= set(record) and record["seed"] == 3 and len(record["loads_s"]) == 4
        assert record["gap"] == pytest.approx(record["predicted_s"] / record["bound_s"] - 1) and record["gap"] >= 0
    assert "20 × 4, one huge" in capsys.readouterr().out
    for record in (r for r in records if r["objective"] == "additive"):
        assert record["predicted_s"] == pytest.approx(max(record["loads_s"]))
