"""What is known of a family of models that calibration has not run, and how much a few of its iterations help.

    python -m benchmarks.families P.measurements.json --check P.check-*.json

Nothing is measured: `perfkit calibrate --models all` writes the measurements, `perfkit check --models all` the runs.
Platforms are fitted to the isolated kernels and to the iterations of all other families, with none, one, two and more
iterations of the family itself, drawn at random; each predicts the saved runs of the family.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import save_rows
from perfkit.__main__ import run_command
from perfkit.calibration import fit_platform
from perfkit.contexts import add_context
from perfkit.prediction.comparison import Comparison, summarize_errors
from perfkit.units import check_positive, format_table

__all__ = ["format_families", "judge_families", "main"]


def judge_families(measurements: Mapping[str, Any], comparison: Comparison, *, draws: int = 6) -> list[dict[str, Any]]:
    """Errors of each family by the number of its own iterations, beside all those of the others.

    Returns rows of family, iterations [-], error (mean), geomean, bias and width (of the 80 % interval, high over low),
    the share of runs inside it, and the number of draws.
    """
    iterations: Sequence[Mapping[str, Any]] = measurements["iterations"]
    bare = fit_platform({**measurements, "iterations": []}, name="isolated")
    rows = []
    for family in dict.fromkeys(run["family"] for run in comparison.runs):
        runs = comparison.select(family)
        others = [row for row in iterations if row["family"] != family]
        own = [row for row in iterations if row["family"] == family]
        for count in range(len(own) + 1):
            found = []
            for draw in range(draws if 0 < count < len(own) else 1):
                order = np.random.default_rng([count, draw]).permutation(len(own))[:count]
                chosen = others + [own[i] for i in order]
                found.append(runs.predict_again(add_context(bare, {**measurements, "iterations": chosen})))
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


def _run(arguments: argparse.Namespace) -> int:
    measurements = json.loads(arguments.measurements.read_text(encoding="utf-8"))
    if not isinstance(measurements, dict) or not measurements.get("iterations"):
        raise ValueError(
            f"{str(arguments.measurements)!r} holds no calibration iterations; name what calibrate has written"
        )
    draws = int(check_positive("draws", arguments.draws, integer=True))
    comparison = Comparison.pool([Comparison.load(file) for file in arguments.check])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # fits to two iterations leave standard errors open
        rows = judge_families(measurements, comparison, draws=draws)
    print(format_families(rows))
    save_rows(arguments.json, rows, measurements=measurements["id"], runs=len(comparison.runs))
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="families", description="Errors on families that calibration has not run.")
    parser.add_argument("measurements", type=Path, help="raw measurements that calibrate has written")
    parser.add_argument("--check", type=Path, nargs="+", required=True, metavar="FILE", help="saved runs of check")
    parser.add_argument("--draws", type=int, default=6, help="random subsets of each size")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for the rows")
    arguments = parser.parse_args(words)
    return run_command(lambda: _run(arguments), name="families")


if __name__ == "__main__":
    sys.exit(main())
