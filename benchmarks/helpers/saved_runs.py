"""Committed runs of `perfkit check`: read, and predicted again."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import perfkit as pk
from perfkit.calibration.checks import Comparison, state_prediction
from perfkit.calibration.study import Trials
from perfkit.ground.files import find_reference
from perfkit.measure.samples import load
from perfkit.platform.estimates import keep_quiet

C = TypeVar("C", bound=Comparison)


def pool_checks(name: str) -> Comparison:
    """All committed checks of one machine.

    Raises
    ------
    ValueError
        If there are none of this machine.
    """
    folder = find_reference("measured")
    files = sorted(folder.glob(f"{name}.check-*.json"))
    if not files:
        known = sorted({file.name.split(".")[0] for file in folder.glob("*.check-*.json")})
        raise ValueError(f"machine is {name!r}; checks are committed of {', '.join(known)}")
    return Comparison.load(*files)


def load_model(run: Mapping[str, Any]) -> Any:
    """The workload of a saved run."""
    config = {key: value for key, value in run["config"].items() if key != "owners"}
    return load(config)


def predict_again(saved: C, platform: pk.Platform) -> C:
    """The same measurements beside the predictions of another platform, such as a later fit."""
    runs = []
    for run in saved.runs:
        workload = load_model(run)
        owners = run["config"].get("owners")
        ranks = run["ranks"]
        plan = pk.Plan.from_owners(owners, ranks=ranks) if owners else None
        prediction: Any
        with keep_quiet():
            if plan and isinstance(saved, Trials):
                prediction = pk.price_plan(workload, platform, plan)
            else:
                prediction = pk.predict(workload, platform, ranks=ranks, plan=plan)
        runs.append({**run, **state_prediction(prediction)})
    return replace(saved, runs=tuple(runs), platform=platform.name)
