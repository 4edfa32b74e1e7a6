"""Benchmarks that measure nothing: they judge what `calibrate` and `check` have written."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

import perfkit as pk
from benchmarks import Row
from perfkit.calibration.checks import Comparison, state_prediction
from perfkit.calibration.study import Trials
from perfkit.measure.samples import load
from perfkit.platform.estimates import keep_quiet

C = TypeVar("C", bound=Comparison)


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
