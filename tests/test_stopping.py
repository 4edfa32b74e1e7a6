"""A calibration measures first what decides most, and stops when its fit no longer moves."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfkit.calibration import cpu_measure
from perfkit.calibration.stopping import (
    LEAST_MOVE,
    expect_move,
    list_moving_families,
    plan_rounds,
)
from perfkit.fitting import Iteration
from perfkit.ground.files import find_reference
from perfkit.measure.folders import Campaign
from perfkit.measure.progress import Part, Progress, follow_progress, format_duration
from perfkit.measure.records import read_measurements, write_record
from perfkit.measure.samples import draw_calibration, load
from perfkit.platform.machine import ANY, Context
from tests.machines import MACHINES, thin


def test_the_move_of_a_mean_is_that_of_drawn_numbers() -> None:
    assert expect_move(0.11, measured=4, left=10) == pytest.approx(0.11 * np.sqrt(10 / 56))
    assert expect_move(0.2, measured=3, left=0) == 0.0
    errors = np.random.default_rng(0).normal(0.0, 0.1, (20000, 14))
    moved = errors.mean(axis=1) - errors[:, :6].mean(axis=1)
    assert moved.std() == pytest.approx(expect_move(0.1, measured=6, left=8), rel=0.02)


def test_rounds_begin_with_four_of_each_family_and_hold_all_once() -> None:
    samples = draw_calibration()
    first, second, *_ = rounds = plan_rounds(samples)
    assert sorted(s.name for part in rounds for s in part) == sorted(s.name for s in samples)
    counts = {family: 0 for family in ("dlrm", "transformer", "hybrid")}
    for sample in first:
        counts[sample.family] += 1
    assert set(counts.values()) == {4} and len(second) == 6
    assert {sample.workload.sparse for sample in first if sample.family == "dlrm"} == {True, False}
    assert len({s.workload.family for s in first}) == 2 and len({s.name[0] for s in first}) == 4


def fit(spread: float, n: int) -> Iteration:
    return replace(Iteration.build({"scale": 1.0, "per_operation": 0.0}), spread=spread, n=n)


def test_a_family_is_measured_until_more_of_it_would_not_move_its_fit() -> None:
    samples = draw_calibration()  # 14 DLRMs, 10 Transformers, 8 on two ranks
    scattered = {"dlrm": fit(0.11, 4), "transformer": fit(0.06, 4), ANY: fit(0.2, 8)}
    context = Context(iterations=scattered, parallel={ANY: fit(0.11, 4)})
    assert list_moving_families(context, samples) == {
        "dlrm": pytest.approx(0.11 * np.sqrt(10 / (4 * 14))),
        "hybrid": pytest.approx(0.11 * np.sqrt(4 / (4 * 8))),
    }
    settled = {"dlrm": fit(0.09, 6), "transformer": fit(0.06, 4)}
    context = Context(iterations=settled, parallel={ANY: fit(0.09, 6)})
    assert list_moving_families(context, samples) == {}
    # an unsteady machine goes to the end of the plan, where nothing is left
    context = Context(iterations=settled | {"dlrm": fit(0.4, 12)}, parallel={ANY: fit(0.4, 8)})
    assert list(list_moving_families(context, samples)) == ["dlrm"]
    alone = draw_calibration(hybrid=False)
    assert list_moving_families(Context(iterations=settled), alone) == {}
    assert list_moving_families(Context(iterations={"dlrm": fit(0.09, 6)}), alone) == {
        "transformer": np.inf
    }
    assert expect_move(0.08, measured=2, left=8) > LEAST_MOVE, "never less than four"


# Replayed answers of real machines, and of twins with one core and without an L3.


#: What DLRMs and Transformers run.
KINDS = ("gemm", "bmm", "attention", "elementwise", "rowwise", "copy")


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    """Measurements of xeon-2 with four kernels of each class, so that it is quick to fit."""
    whole = json.loads((find_reference("measured") / "xeon-2.measurements.json").read_text())
    few = thin(whole, step=1000)["kernels"]
    kept = [row for row in few if row["kind"] in KINDS or row["kind"].startswith("embedding")]
    return {**whole, "kernels": kept, "ladder": whole["ladder"][::2]}


def replay(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a calibration measure what a file has; returns the names of iterations as they are
    measured."""
    known = read_measurements(raw)
    asked: list[str] = []

    def answer(job: dict[str, Any], *, ranks: int = 1) -> Any:
        [row] = [
            row
            for row in known.iterations
            if row.owners == job["owners"] and load(dict(row.workload)) == load(job["workload"])
        ]
        asked.append(row.name)
        return [write_record(replace(rank, names=None)) for rank in row.runs]

    monkeypatch.setattr(cpu_measure, "run_processes", answer)
    for name in ("kernels", "collectives"):
        rows = getattr(known, name)
        monkeypatch.setattr(cpu_measure, f"measure_{name}", lambda *_, rows=rows, **__: rows)
    monkeypatch.setattr(cpu_measure, "_measure_ladder", lambda *_: known.ladder)
    monkeypatch.setattr(cpu_measure, "gather_facts", lambda: dict(known.facts))
    return asked


@pytest.mark.parametrize("twin", ["no L3", "one core"])
def test_replayed_answers_of_machines_stop_early(
    twin: str,
    raw: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = MACHINES[twin].edit(raw)
    asked = replay(machine, monkeypatch)
    ranks = int(machine["ranks"])
    progress = Progress(Part("check", 60.0))
    measured = cpu_measure.measure_platform(
        Campaign(None, progress=False), ranks=ranks, stop_early=True, progress=progress
    )
    names = [row.name for row in measured.iterations]
    assert names == [*dict.fromkeys(asked)], "nothing measured is lost; unsteady runs are repeated"
    planned = len(draw_calibration(hybrid=ranks == 2))
    assert 4 * (ranks + 1) <= len(names) < planned
    said = capsys.readouterr().err
    parts = 5 if ranks == 2 else 4
    assert said.startswith(f"1 of {parts}: memory\n") and f"2 of {parts}: kernels\n" in said
    assert f"{parts - 1} of {parts}: iterations\n" in said and "GB/s from DRAM" in said
    assert f"iterations: {len(names)} configurations" in said


def test_what_cannot_be_fitted_yet_is_measured_to_the_end(
    raw: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So that no measurement is lost: `calibrate` writes all of them, and says why they cannot be fitted."""
    without_products = [row for row in raw["kernels"] if row["kind"] != "gemm"]
    asked = replay({**raw, "kernels": without_products}, monkeypatch)
    measured = cpu_measure.measure_platform(
        Campaign(None, progress=False), ranks=2, stop_early=True, progress=Progress()
    )
    assert [row.name for row in measured.iterations] == [*dict.fromkeys(asked)]
    assert len(measured.iterations) == len(draw_calibration())
    said = capsys.readouterr().err
    assert "  12 configurations so far; kernels holds no gemm" in said
    assert said.endswith(f"  iterations: {len(measured.iterations)} configurations\n")


# What is said meanwhile.


def test_the_rest_is_expected_from_the_parts_that_are_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(Part("check", 50.0))
    progress.plan([Part("memory", 5.0), Part("kernels", 100.0)])
    progress.begin("memory")
    now[0] += 10.0
    progress.end("19 GB/s from DRAM")
    assert progress.expect_left() == 300.0, "twice as slow as expected"
    progress.begin("kernels")
    progress.end("kept from an earlier run, so its time says nothing")
    assert progress.expect_left() == 100.0
    progress.begin("check")
    now[0] += 1.0
    progress.end("done")
    assert capsys.readouterr().err.splitlines() == [
        "1 of 3: memory",
        "  memory: 19 GB/s from DRAM",
        "  the rest takes about 5 min on this machine",
        "2 of 3: kernels",
        "  kernels: kept from an earlier run, so its time says nothing",
        "  the rest takes about 1.5 min on this machine",
        "3 of 3: check",
        "  check: done",
    ]
    assert format_duration(1.0) == "half a minute"
    quiet = follow_progress(False)
    quiet.plan([Part("memory", 1.0)])
    quiet.begin("memory")
    quiet.end("nothing is said")
    assert capsys.readouterr().err == "" and follow_progress(progress) is progress
    with pytest.raises(ValueError, match="progress is 'yes'"):
        follow_progress("yes")
