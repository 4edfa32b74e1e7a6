"""How accuracy on unseen runs grows with the number of real iterations that calibration has
measured.

    python -m benchmarks.learning P.measurements.json --check accuracy.check-*.json [--families]

A platform is fitted to each of several subsets of the calibration iterations, and predicts the
saved runs. Subsets take pairs of iterations of one family after another, because one iteration
cannot separate noise from the family. With --families the platform is fitted to none, one, two and
more iterations of a family beside those of all others; with none, calibration has not run the
family.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.helpers.command import command
from benchmarks.helpers.saved_runs import predict_again
from benchmarks.helpers.tables import lay_out
from perfkit.calibration.checks import Comparison
from perfkit.calibration.cpu_context import add_context
from perfkit.calibration.fit import fit_platform
from perfkit.ground.units import check_positive
from perfkit.measure.records import MachineMeasurements, MeasuredIteration, read_measurements

COUNTS = (0, 2, 4, 6, 8, 12, 16, 24)


def _family(iteration: MeasuredIteration) -> str:
    """Family of a calibration iteration; runs on several ranks are one of their own."""
    return "parallel" if iteration.owners else str(iteration.workload["family"])


def draw_subset(
    rows: Sequence[MeasuredIteration], count: int, rng: np.random.Generator
) -> list[MeasuredIteration]:
    """At least `count` random calibration iterations: pairs (or three) of one family, all families
    in proportion."""
    turns = []
    for family in sorted({_family(row) for row in rows}):
        own = [row for row in rows if _family(row) == family]
        shuffled = [own[i] for i in rng.permutation(len(own))]
        pairs = np.array_split(np.arange(len(own)), max(1, len(own) // 2))
        turns += [
            ((i + 0.5) / len(pairs), family, [shuffled[j] for j in pair])
            for i, pair in enumerate(pairs)
        ]
    chosen: list[MeasuredIteration] = []
    for _, _, pair in sorted(turns, key=lambda turn: turn[:2]):
        if len(chosen) >= count:
            break
        chosen += pair
    return chosen


def _average(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Means over draws, the width of intervals as high / low, and quartiles of the mean error over
    the draws [-]."""
    figures = [comparison.figures["all"] for comparison in comparisons]
    found = {
        key: float(np.mean([own[key] for own in figures]))
        for key in ("mean", "geomean", "bias", "inside")
    }
    q1, q3 = map(float, np.percentile([own["mean"] for own in figures], [25, 75]))
    width = float(
        np.mean([run["high_s"] / run["low_s"] for one in comparisons for run in one.runs])
    )
    return {
        "error": found.pop("mean"),
        **found,
        "width": width,
        "q1": q1,
        "q3": q3,
        "draws": len(comparisons),
    }


def learn(
    measurements: MachineMeasurements,
    comparison: Comparison,
    *,
    draws: int,
    counts: Sequence[int] = COUNTS,
) -> list[dict[str, Any]]:
    """Errors on unseen runs by family and number of calibration iterations."""
    every = measurements.iterations
    found: dict[tuple[str, int], list[Comparison]] = {}
    families = [*dict.fromkeys(run["family"] for run in comparison.runs), "all"]
    for count in [count for count in sorted(set(counts)) if count < len(every)] + [len(every)]:
        for draw in range(draws if 0 < count < len(every) else 1):
            chosen = draw_subset(every, count, np.random.default_rng([count, draw]))
            again = predict_again(
                comparison, fit_platform(replace(measurements, iterations=chosen))
            )
            for family in families:
                own = tuple(run for run in again.runs if family in (run["family"], "all"))
                found.setdefault((family, len(chosen)), []).append(replace(again, runs=own))
    rows = [
        {"family": family, "iterations": count, **_average(own)}
        for (family, count), own in found.items()
    ]
    return sorted(rows, key=lambda row: (families.index(row["family"]), row["iterations"]))


def learn_families(
    measurements: MachineMeasurements, comparison: Comparison, *, draws: int
) -> list[dict[str, Any]]:
    """Errors on runs of each family by the number of its own iterations, beside all iterations of
    the others."""
    bare, rows = fit_platform(replace(measurements, iterations=[]), name="isolated"), []
    for family in dict.fromkeys(run["family"] for run in comparison.runs):
        runs = replace(
            comparison, runs=tuple(run for run in comparison.runs if run["family"] == family)
        )
        own, others = (
            [row for row in measurements.iterations if (row.family == family) == mine]
            for mine in (True, False)
        )
        for count in range(len(own) + 1):
            found = []
            for draw in range(draws if 0 < count < len(own) else 1):
                order = np.random.default_rng([count, draw]).permutation(len(own))[:count]
                chosen = others + [own[i] for i in order]
                found.append(
                    predict_again(runs, add_context(bare, replace(measurements, iterations=chosen)))
                )
            rows.append({"family": family, "iterations": count, **_average(found)})
    return rows


_COLUMNS = {
    "family": "{family}",
    "iterations": "{iterations}",
    "mean": "{error:.1%}",
    "quartiles over draws": "{q1:.1%} to {q3:.1%}",
    "geomean": "{geomean:.1%}",
    "bias": "{bias:+.1%}",
    "80 % interval, high / low": "{width:.2f}",
    "inside": "{inside:.0%}",
    "draws": "{draws}",
}


@command(
    {
        "measurements": {"type": Path, "help": "raw measurements that calibrate has written"},
        "--check": {
            "type": Path,
            "nargs": "+",
            "required": True,
            "metavar": "FILE",
            "help": "saved runs of check",
        },
        "--draws": {"type": int, "default": 10, "help": "random subsets of each size"},
        "--families": {
            "action": "store_true",
            "help": "iterations of each family, beside all those of the others",
        },
    }
)
def main(given: Any) -> None:
    """Error on unseen runs by calibration iterations."""
    draws = int(check_positive("draws", given.draws, integer=True))
    measurements = read_measurements(json.loads(given.measurements.read_text(encoding="utf-8")))
    if not measurements.iterations:
        raise ValueError(
            f"{str(given.measurements)!r} holds no iterations; name what calibrate has written"
        )
    comparison = Comparison.load(*given.check)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # two iterations give no standard errors
        rows = (learn_families if given.families else learn)(measurements, comparison, draws=draws)
    print(lay_out(rows, _COLUMNS, numbers=True))
