"""Calibrating with runs of one's own: what made them is found again, and what nobody ran is
said."""

import itertools
from typing import Any

import numpy as np
import polars as pl
import pytest

from perfkit.calibration.runs import tune
from perfkit.exploration.strategies import explore
from perfkit.platform.estimates import ExtrapolationWarning
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

GPT = Transformer.preset("gpt3-1.3b", batch=64, sequence=1024, dtype="bf16", fused=True)
NODE = load_platform("a100-sxm-8")


def list_settings() -> list[dict[str, int]]:
    """Ways to run the model on eight ranks."""
    settings = []
    for tp, pp, micro_batch in itertools.product((1, 2, 4), (1, 2), (1, 4)):
        dp = 8 // (tp * pp)
        batch = 64 * micro_batch
        settings.append({"tp": tp, "pp": pp, "dp": dp, "micro_batch": micro_batch, "batch": batch})
    return settings


SETTINGS = list_settings()


def time(
    settings: list[dict[str, int]], platform: Platform, noise: float = 0.0
) -> list[dict[str, Any]]:
    """Runs on some platform, with noise."""
    rng = np.random.default_rng(0)
    runs = []
    for setting in settings:
        arguments = dict(setting)
        model = Transformer.preset(
            "gpt3-1.3b", batch=arguments.pop("batch"), sequence=1024, dtype="bf16", fused=True
        )
        strategies = Strategy.stack([Strategy(**arguments)])
        exact = float(price_strategies(model, platform, strategies)["time"][0])
        seconds = exact * float(np.exp(noise * rng.standard_normal()))
        runs.append({**setting, "seconds": seconds})
    return runs


def test_runs_on_another_machine_move_predictions_to_it() -> None:
    other = NODE.with_scale(peak=0.8, memory=0.7, intra=0.5, host=1.3)
    runs = time(SETTINGS, other, 0.02)
    fitted = [run for number, run in enumerate(runs) if number % 3 < 2]
    left_out = runs[2::3]
    tuning = tune(GPT, NODE, pl.DataFrame(fitted))
    measured = np.array([run["seconds"] for run in left_out])
    untuned = np.array([run["seconds"] for run in time(SETTINGS[2::3], NODE)])
    before = [run["seconds"] for run in time(SETTINGS, NODE)]
    of_fitted = [seconds for number, seconds in enumerate(before) if number % 3 < 2]
    assert tuning.table()["untuned_s"].to_list() == pytest.approx(of_fitted, rel=1e-3)
    priced = tuning.price(left_out)
    errors = np.abs(priced["predicted_s"].to_numpy() / measured - 1)
    assert errors.mean() < np.abs(untuned / measured - 1).mean() / 2
    low, high = priced["low_s"].to_numpy(), priced["high_s"].to_numpy()
    assert np.mean((low < measured) & (measured < high)) >= 0.7
    assert tuning.error < 0.08 and "runs, " in repr(tuning)
    ranked = explore(GPT, tuning.platform, 8).table()
    assert (ranked["low_s"] < ranked["time_s"]).all()


def test_errors_of_runs_left_out_are_those_of_fits_without_them() -> None:
    runs = time(SETTINGS, NODE.with_scale(peak=0.9, intra=0.7), 0.05)
    tuning = tune(GPT, NODE, runs)
    for number in (0, 5, 11):
        others = runs[:number] + runs[number + 1 :]
        without = tune(GPT, NODE, others)
        error = without.price([runs[number]])["predicted_s"][0] / runs[number]["seconds"] - 1
        assert tuning.table()["left_out"][number] == pytest.approx(error, abs=0.02)
    assert np.abs(tuning.table()["left_out"]).mean() == pytest.approx(tuning.error)


def test_a_chart_of_runs_has_each_before_the_fit_and_by_a_fit_to_the_others() -> None:
    runs = time(SETTINGS[:6], NODE.with_scale(peak=0.8), 0.02)
    tuning = tune(GPT, NODE, runs)
    drawn = str(tuning.chart().to_dict())
    for row in tuning.table().to_dicts():
        assert f"{row['untuned_s']}" in drawn
        assert f"{row['seconds'] * (1 + row['left_out'])}" in drawn


def test_what_nobody_ran_is_said_and_helps_most_to_measure() -> None:
    runs = [run for run in time(SETTINGS, NODE, 0.02) if run["tp"] == 1]
    tuning = tune(GPT, NODE, [*runs, runs[0]])
    asked = [{"tp": 1, "dp": 8, "micro_batch": 2}, {"tp": 8, "micro_batch": 1, "schedule": "gpipe"}]
    with pytest.warns(
        ExtrapolationWarning, match="no run that was fitted has tp 8, .*schedule 'gpipe'"
    ) as caught:
        found = tuning.price(asked)
    assert caught[0].filename == __file__  # the line that asks
    assert found["beyond"].to_list()[0] == "" and found["gain"].arg_max() == 1
    assert (found["high_s"] / found["low_s"]).arg_max() == 1


@pytest.mark.parametrize(
    ("count", "run", "message"),
    [
        (4, {"seconds": 1.0}, "runs are 4; fit at least 5"),
        (5, {"seconds": 0.0}, "seconds is 0.0"),
        (5, {"tpp": 1, "seconds": 1.0}, "column of runs is 'tpp'"),
        (5, {"tp": 1}, "seconds is None"),
    ],
)
def test_too_few_runs_and_unknown_columns_are_refused(
    count: int, run: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tune(GPT, NODE, [run for _ in range(count)])


def test_whole_numbers_are_times_and_what_is_no_table_is_refused() -> None:
    runs = [{**setting, "seconds": 1} for setting in SETTINGS[:6]]
    runs[0]["seconds"] = 0.9
    assert tune(GPT, NODE, runs[::-1]).table()["seconds"].to_list() == [1, 1, 1, 1, 1, 0.9]
    for odd in (3, None, True, [1, 2]):
        with pytest.raises(ValueError, match="runs"):
            tune(GPT, NODE, odd)
