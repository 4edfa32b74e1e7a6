"""Benchmarks that measure nothing: they judge what `calibrate` and `check` have written."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import OUT, make_command, save_rows
from perfkit.calibration.checks import Comparison, state_prediction
from perfkit.calibration.study import Trials
from perfkit.ground.units import check_positive
from perfkit.measure.samples import load
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.platform import Platform
from perfkit.prediction.result import predict
from perfkit.sharding.planner import price_plan
from perfkit.workloads.placement import Plan

_Rows = Sequence[Mapping[str, Any]]
C = TypeVar("C", bound=Comparison)


def predict_again(saved: C, platform: Platform) -> C:
    """The same measurements beside the predictions of another platform, such as a later fit."""
    runs = []
    for run in saved.runs:
        workload: Any = load({key: value for key, value in run["config"].items() if key != "owners"})
        owners, ranks = run["config"].get("owners"), run["ranks"]
        plan = Plan.from_owners(owners, ranks=ranks) if owners else None
        with keep_quiet():
            found: Any = predict(workload, platform, ranks=ranks, plan=plan)
            if plan and isinstance(saved, Trials):
                found = price_plan(workload, platform, plan)
        runs.append({**run, **state_prediction(found)})
    return replace(saved, runs=tuple(runs), platform=platform.name)


def judge_saved(
    name: str, text: str, judge: Callable[..., _Rows], show: Callable[[_Rows], str], *, draws: int
) -> Callable[..., int]:
    """Make the command line of `judge(measurements, comparison, draws=)`, whose rows `show` tells."""

    def run(given: Any) -> None:
        measurements = json.loads(given.measurements.read_text(encoding="utf-8"))
        if not isinstance(measurements, dict) or not measurements.get("iterations"):
            raise ValueError(f"{str(given.measurements)!r} holds no iterations; name what calibrate has written")
        count = int(check_positive("draws", given.draws, integer=True))
        comparison = Comparison.load(*given.check)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # fits to two iterations leave standard errors open
            rows = judge(measurements, comparison, draws=count)
        print(show(rows))
        save_rows(given.json, rows, measurements=measurements["id"], runs=len(comparison.runs))

    return make_command(name, text, run, {
        "measurements": {"type": Path, "help": "raw measurements that calibrate has written"},
        "--check": {"type": Path, "nargs": "+", "required": True, "metavar": "FILE", "help": "saved runs of check"},
        "--draws": {"type": int, "default": draws, "help": "random subsets of each size"}, **OUT,
    })  # fmt: skip
