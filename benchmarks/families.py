"""What is known of a family of models that calibration has not run, and how much a few of its iterations help.

    python -m benchmarks.families P.measurements.json --check P.check-*.json

Nothing is measured: `perfkit calibrate --models all` writes the measurements, `perfkit check --models all` the runs.
Platforms are fitted to the isolated kernels and to the iterations of all other families, with none, one, two and more
iterations of the family itself, drawn at random; each predicts the saved runs of the family.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.saved import judge_saved, predict_again
from perfkit.calibration.checks import Comparison, summarize_errors
from perfkit.calibration.context import add_context
from perfkit.calibration.fit import fit_platform
from perfkit.ground.units import format_table


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
            rows.append({"family": family, "iterations": count, **_average(found), "draws": len(found)})
    return rows


def _average(comparisons: Sequence[Comparison]) -> dict[str, float]:
    figures = [summarize_errors(c.errors) for c in comparisons]
    mean, geomean, bias = (float(np.mean([f[key] for f in figures])) / 100 for key in ("mean", "geomean", "bias"))
    width = float(np.mean([run["high_s"] / run["low_s"] for c in comparisons for run in c.runs]))
    inside = float(np.mean([c.coverage() for c in comparisons]))
    return {"error": mean, "geomean": geomean, "bias": bias, "width": width, "inside": inside}


def format_families(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as text; no iterations of its own means that the family is left out."""
    heads = ("family", "own iterations", "mean", "geomean", "bias", "80 % interval, high / low", "inside", "draws")
    cells = [
        (row["family"], f"{row['iterations']}", f"{row['error']:.1%}", f"{row['geomean']:.1%}", f"{row['bias']:+.1%}",
         f"{row['width']:.2f}", f"{row['inside']:.0%}", f"{row['draws']}")
        for row in rows
    ]  # fmt: skip
    return format_table([heads, *cells], numbers=True)


TEXT = "Errors on families that calibration has not run."
main = judge_saved("families", TEXT, judge_families, format_families, draws=6)


if __name__ == "__main__":
    sys.exit(main())
