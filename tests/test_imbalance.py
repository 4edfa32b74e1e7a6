"""Ranks that wait for one another: how cases are drawn, predicted and measured, and what came of
the committed ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import imbalance
from benchmarks.imbalance import Pacer, draw_cases, predict_case
from perfkit.measure.samples import dump
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.workloads.transformer import Transformer
from tests.jobs import run_together

MEASURED = sorted(
    (Path(__file__).parents[1] / "reference_data" / "measured").glob("zen3-2.imbalance-*.json")
)


def test_cases_that_differ_wait(toy: Platform) -> None:
    cases = {case.name: case for case in draw_cases(3, models=1)}
    found = {name: predict_case(case, toy) for name, case in cases.items()}
    for kind in ("dlrm-0", "transformer-0", "transformer-0 ddp"):
        even, slow, slower = (
            found[f"{kind} {what}"] for what in ("even", "straggler 1.5", "straggler 2.5")
        )
        assert even["predicted_s"] < slow["predicted_s"] < slower["predicted_s"]
        assert (
            even["predicted_waiting_s"]
            < slow["predicted_waiting_s"]
            < slower["predicted_waiting_s"]
        )
    assert found["transformer-0 even"]["predicted_waiting_s"] == 0
    assert cases["dlrm-0 lopsided"].owners.count(1) == 1


def test_committed_cases_are_predicted_as_they_were_and_meet_the_bars() -> None:
    platform, rows = load_platform("zen3-2"), []
    for file in MEASURED:
        saved = json.loads(file.read_text(encoding="utf-8"))
        cases = draw_cases(saved["seed"])
        assert [row["case"] for row in saved["records"]] == [case.name for case in cases]
        for case, row in zip(cases, saved["records"], strict=True):
            now = predict_case(case, platform)
            assert now == pytest.approx({key: row[key] for key in now}, rel=1e-6), (
                f"{file.name}: {case.name}"
            )
        rows += [row for row in saved["records"] if not row["case"].endswith("even")]
    assert len(rows) >= 60
    for key in ("error", "waiting_error"):
        assert np.mean([abs(row[key]) for row in rows]) <= 0.15, key


class Clock:
    """Processor and wall time that pass when they are made to, and a little whenever they are
    read."""

    def __init__(self) -> None:
        self.computed = self.wall = 0.0

    def thread_time(self) -> float:
        self.compute(1e-3)
        return self.computed

    def perf_counter(self) -> float:
        return self.wall

    def compute(self, seconds: float, asleep: float = 0.0) -> None:
        self.computed += seconds
        self.wall += seconds + asleep


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_straggler_computes_so_many_times_as_long(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a collective takes, or what other processes take meanwhile, is not multiplied."""
    torch, clock = pytest.importorskip("torch"), Clock()
    dist, failing = torch.distributed, [False]
    monkeypatch.setattr(imbalance, "time", clock)

    def step() -> None:
        clock.compute(3.0, asleep=0.5)  # another process has the core
        dist.all_reduce()
        clock.compute(1.0 / (not failing[0]))

    exchange = lambda: clock.compute(2.0, asleep=5.0)  # noqa: E731  waiting for others
    monkeypatch.setattr(dist, "all_reduce", exchange)
    (pacer := Pacer(step, torch.nn.Linear(1, 1), factor))()
    assert pacer.arrivals == [pytest.approx([3.0 * factor + 0.5], abs=0.02)]
    assert clock.wall == pytest.approx(4.0 * factor + 0.5 + 7.0, abs=0.03)
    assert clock.wall - clock.computed == pytest.approx(5.5, abs=0.02)
    failing[0] = True
    with pytest.raises(ZeroDivisionError):
        Pacer(step, torch.nn.Linear(1, 1))()
    assert dist.all_reduce is exchange, "as it was, after a step that fails too"


@pytest.mark.serial
def test_others_come_to_collectives_before_a_straggler() -> None:
    pytest.importorskip("torch")
    sizes = {"batch": 4, "sequence": 16, "layers": 2, "hidden": 64, "heads": 2, "vocabulary": 500}
    models = [Transformer.gpt2(**sizes, overlap=overlap) for overlap in (False, True)]
    about = {"cases": [(None, [1.0, 1.0]), (None, [1.0, 4.0])], "seconds": 0.2}
    jobs = [{"workload": dump(model), **about} for model in models]
    for model, (one, other) in zip(
        models, run_together("benchmarks.imbalance:time_stragglers", jobs, 2), strict=True
    ):
        for even, slow in (one, other):
            assert slow["median"] > even["median"]
            assert len({len(iteration) for iteration in slow["arrivals"]}) == 1
        early = np.array(other[1]["arrivals"]) - np.array(one[1]["arrivals"])
        assert early.shape[1] == 1 or (model.overlap and early.shape[1] > 1)
        assert np.median(early, axis=0).max() > 0
