"""Ranks that wait for one another: how cases are drawn and predicted, and how a rank is slowed down."""

import itertools

import pytest

from benchmarks.imbalance import draw_cases, predict_case
from perfkit.platform import Platform


def test_cases_that_differ_wait(toy: Platform) -> None:
    cases = {case.name: case for case in draw_cases(3, models=1)}
    found = {name: predict_case(case, toy) for name, case in cases.items()}
    for kind in ("dlrm-0", "transformer-0"):
        even, slow = (found[f"{kind} {what}"] for what in ("even", "straggler 1.5"))
        assert slow["predicted_s"] > even["predicted_s"]
        assert slow["predicted_waiting_s"] > even["predicted_waiting_s"]
    assert found["dlrm-0 straggler 2.5"]["predicted_waiting_s"] > found["dlrm-0 straggler 1.5"]["predicted_waiting_s"]
    assert found["transformer-0 even"]["predicted_waiting_s"] == 0
    assert cases["dlrm-0 lopsided"].owners.count(1) == 1


def test_operations_of_a_straggler_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks whenever it is read, an operation takes one tick, and is held up until it has taken ten."""
    torch = pytest.importorskip("torch")
    from perfkit.measure import placements

    ticks = itertools.count()
    monkeypatch.setattr(placements.time, "perf_counter", lambda: next(ticks))
    x = torch.ones(4)
    with placements.Slowness(10):
        y = x.add(1)
    assert next(ticks) == 11
    assert y.tolist() == [2] * 4
