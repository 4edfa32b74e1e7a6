"""Calibrating with runs of one's own: what made them is found again, and what nobody ran is
said."""

from typing import Any

import numpy as np
import polars as pl
import pytest

from perfkit.calibration.runs import tune
from perfkit.exploration.strategies import explore
from perfkit.platform.estimates import ExtrapolationWarning
from perfkit.platform.gallery import load_platform
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

GPT = Transformer.preset("gpt3-1.3b", batch=64, sequence=1024, dtype="bf16", fused=True)
WAYS = [
    {"tp": tp, "pp": pp, "dp": 8 // (tp * pp), "micro_batch": n, "batch": 64 * n}
    for tp in (1, 2, 4)
    for pp in (1, 2)
    for n in (1, 4)
]
NODE = load_platform("a100-sxm-8")


def time(strategies: list[dict[str, int]], where: Any, noise: float = 0.0) -> list[dict[str, Any]]:
    """Runs on some platform, with noise."""
    drawn, runs = np.random.default_rng(0), []
    for way in strategies:
        model = Transformer.preset(
            "gpt3-1.3b", batch=way["batch"], sequence=1024, dtype="bf16", fused=True
        )
        strategy = Strategy(**{name: own for name, own in way.items() if name != "batch"})
        seconds = float(price_strategies(model, where, Strategy.stack([strategy]))["time"][0])
        runs.append({**way, "seconds": seconds * float(np.exp(noise * drawn.standard_normal()))})
    return runs


def test_runs_on_another_machine_move_predictions_to_it() -> None:
    other = NODE.with_scale(peak=0.8, memory=0.7, intra=0.5, host=1.3)
    runs = time(WAYS, other, 0.02)
    kept, left = [run for n, run in enumerate(runs) if n % 3 < 2], runs[2::3]
    tuning = tune(GPT, NODE, pl.DataFrame(kept))
    wanted = np.array([run["seconds"] for run in left])
    before = np.array([run["seconds"] for run in time(left_ways(left), NODE)])
    found = tuning.price(left).to_dict(as_series=False)
    errors = np.abs(np.array(found["predicted"]) / wanted - 1)
    assert errors.mean() < np.abs(before / wanted - 1).mean() / 2
    assert np.mean((found["low"] < wanted) & (wanted < found["high"])) >= 0.7
    assert tuning.error < 0.08 and "runs, " in repr(tuning)
    ranked = explore(GPT, tuning.platform, 8).table()
    assert (ranked["low"] < ranked["time"]).all()


def left_ways(runs: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [{name: own for name, own in run.items() if name != "seconds"} for run in runs]


def test_errors_of_runs_left_out_are_those_of_fits_without_them() -> None:
    runs = time(WAYS, NODE.with_scale(peak=0.9, intra=0.7), 0.05)
    tuning = tune(GPT, NODE, runs)
    for place in (0, 5, 11):
        rest = tune(GPT, NODE, [run for n, run in enumerate(runs) if n != place])
        alone = rest.price([runs[place]])["predicted"][0] / runs[place]["seconds"] - 1
        assert tuning.table()["left_out"][place] == pytest.approx(alone, abs=0.02)
    assert np.abs(tuning.table()["left_out"]).mean() == pytest.approx(tuning.error)


def test_what_nobody_ran_is_said_and_helps_most_to_measure() -> None:
    runs = [run for run in time(WAYS, NODE, 0.02) if run["tp"] == 1]
    tuning = tune(GPT, NODE, [*runs, runs[0]])
    asked = [{"tp": 1, "dp": 8, "micro_batch": 2}, {"tp": 8, "micro_batch": 1, "schedule": "gpipe"}]
    with pytest.warns(
        ExtrapolationWarning, match="no run that was fitted has tp 8, .*schedule 'gpipe'"
    ):
        found = tuning.price(asked)
    assert found["beyond"].to_list()[0] == "" and found["gain"].arg_max() == 1
    assert (found["high"] / found["low"]).arg_max() == 1


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([{"seconds": 1.0}] * 4, "runs are 4; fit at least 5"),
        ([{"seconds": 0.0}] * 5, "seconds is 0.0"),
        ([{"tpp": 1, "seconds": 1.0}] * 5, "column of runs is 'tpp'"),
        ([{"tp": 1}] * 5, "seconds is None"),
    ],
)
def test_what_cannot_be_tuned(runs: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune(GPT, NODE, runs)


def test_whole_seconds_and_odd_runs() -> None:
    runs = [{**run, "seconds": 1 if n else 0.9} for n, run in enumerate(time(WAYS[:6], NODE))]
    assert tune(GPT, NODE, runs[::-1]).table()["seconds"].to_list() == [1, 1, 1, 1, 1, 0.9]
    for odd in (3, None, True, [1, 2]):
        with pytest.raises(ValueError, match="runs"):
            tune(GPT, NODE, odd)
