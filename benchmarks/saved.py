"""Benchmarks that measure nothing: they judge what `calibrate` and `check` have written."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import perfkit as pk
from benchmarks import OUT, Options, Row, lay_out, save_rows
from perfkit.calibration.checks import Comparison, state_prediction
from perfkit.calibration.study import Trials
from perfkit.ground.units import check_positive
from perfkit.measure.samples import load
from perfkit.platform.estimates import keep_quiet

C = TypeVar("C", bound=Comparison)
#: What `judge_saved` is given; ``--draws`` has the default of each study.
SUBSETS: Options = {
    "measurements": {"type": Path, "help": "raw measurements that calibrate has written"},
    "--check": {"type": Path, "nargs": "+", "required": True, "metavar": "FILE", "help": "saved runs of check"},
    "--draws": {"type": int, "help": "random subsets of each size"}, **OUT,
}  # fmt: skip


def predict_again(saved: C, platform: pk.Platform) -> C:
    """The same measurements beside the predictions of another platform, such as a later fit."""
    runs = []
    for run in saved.runs:
        workload: Any = load({key: value for key, value in run["config"].items() if key != "owners"})
        owners, ranks = run["config"].get("owners"), run["ranks"]
        plan = pk.Plan.from_owners(owners, ranks=ranks) if owners else None
        with keep_quiet():
            found: Any = pk.predict(workload, platform, ranks=ranks, plan=plan)
            if plan and isinstance(saved, Trials):
                found = pk.price_plan(workload, platform, plan)
        runs.append({**run, **state_prediction(found)})
    return replace(saved, runs=tuple(runs), platform=platform.name)


def join_passes(passes: Sequence[Row]) -> dict[str, Any]:
    """Measured time and quartiles as of a run of `Comparison`, the mean of its passes [s], and how far these differ."""
    median, q1, q3 = (float(np.mean([one[key] for one in passes])) for key in ("median", "q1", "q3"))
    each = [one["median"] for one in passes]
    about = {"measured_s": median, "measured_q1_s": q1, "measured_q3_s": q3, "flagged": False}
    return about | {"passes_s": each, "noise": max(each) / min(each) - 1}


def average(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Means over draws: error with quartiles over the draws, geomean, bias, width of the intervals, and inside [-]."""
    figures = [comparison.figures["all"] for comparison in comparisons]
    found = {key: float(np.mean([own[key] for own in figures])) for key in ("mean", "geomean", "bias", "inside")}
    q1, q3 = map(float, np.percentile([own["mean"] for own in figures], [25, 75]))
    widths = [run["high_s"] / run["low_s"] for comparison in comparisons for run in comparison.runs]
    more = {"q1": q1, "q3": q3, "width": float(np.mean(widths)), "draws": len(comparisons)}
    return {"error": found.pop("mean"), **found, **more}


def judge_saved(given: Any, judge: Callable[..., Sequence[Row]], columns: Mapping[str, str]) -> None:
    """Print and save the rows of `judge(measurements, comparison, draws=)` for what `SUBSETS` asks."""
    measurements = json.loads(given.measurements.read_text(encoding="utf-8"))
    if not isinstance(measurements, dict) or not measurements.get("iterations"):
        raise ValueError(f"{str(given.measurements)!r} holds no iterations; name what calibrate has written")
    draws = {} if given.draws is None else {"draws": int(check_positive("draws", given.draws, integer=True))}
    comparison = Comparison.load(*given.check)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # fits to two iterations leave standard errors open
        rows = judge(measurements, comparison, **draws)
    print(lay_out(rows, columns, numbers=True))
    save_rows(given.json, rows, measurements=measurements["id"], runs=len(comparison.runs))
