"""What is known of a family of models that calibration has not run, and how much a few of its iterations help.

    python -m benchmarks.families P.measurements.json --check P.check-*.json

Nothing is measured: `perfkit calibrate --models all` writes the measurements, `perfkit check --models all` the runs.
Platforms are fitted to the isolated kernels and to the iterations of all other families, with none, one, two and more
iterations of the family itself, drawn at random; each predicts the saved runs of the family.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.saved import SUBSETS, average, judge_saved, predict_again
from perfkit.calibration.checks import Comparison
from perfkit.calibration.context import add_context
from perfkit.calibration.fit import fit_platform


def judge_families(measurements: Mapping[str, Any], comparison: Comparison, *, draws: int = 6) -> list[dict[str, Any]]:
    """Errors of each family by the number of its own iterations, beside all those of the others.

    Returns rows of family, iterations [-], error (mean), geomean, bias and width (of the 80 % interval, high over low),
    the share of runs inside it, and the number of draws.
    """
    iterations: Sequence[Mapping[str, Any]] = measurements["iterations"]
    bare = fit_platform({**measurements, "iterations": []}, name="isolated")
    rows = []
    for family in dict.fromkeys(run["family"] for run in comparison.runs):
        runs = replace(comparison, runs=tuple(run for run in comparison.runs if run["family"] == family))
        others = [row for row in iterations if row["family"] != family]
        own = [row for row in iterations if row["family"] == family]
        for count in range(len(own) + 1):
            found = []
            for draw in range(draws if 0 < count < len(own) else 1):
                order = np.random.default_rng([count, draw]).permutation(len(own))[:count]
                chosen = others + [own[i] for i in order]
                found.append(predict_again(runs, add_context(bare, {**measurements, "iterations": chosen})))
            rows.append({"family": family, "iterations": count, **average(found)})
    return rows


@command(SUBSETS)
def main(given: Any) -> None:
    """Errors on families that calibration has not run; no iterations of its own means that the family is left out."""
    judge_saved(given, judge_families, {
        "family": "{family}", "own iterations": "{iterations}", "mean": "{error:.1%}", "geomean": "{geomean:.1%}",
        "bias": "{bias:+.1%}", "80 % interval, high / low": "{width:.2f}", "inside": "{inside:.0%}",
        "draws": "{draws}",
    })  # fmt: skip
