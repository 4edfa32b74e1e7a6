"""Ranks that wait for one another: how cases are drawn and predicted, and how a rank is slowed down."""

import time

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


def test_operations_of_a_straggler_take_longer() -> None:
    torch = pytest.importorskip("torch")
    from perfkit.measure.placements import Slowness

    x, starts = torch.randn(256, 256), [time.perf_counter()]
    with Slowness(1e4):
        y = x.add(1)
    starts.append(time.perf_counter())
    torch.testing.assert_close(y, x + 1)
    assert starts[1] - starts[0] > 1e-2, "an operation of a microsecond or more, ten thousand times as long"
