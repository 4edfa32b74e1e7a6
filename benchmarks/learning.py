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
from typing import Any, NamedTuple

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


class _Turn(NamedTuple):
    """Iterations of a family that are drawn together, and when it is their turn [-]."""

    position: float
    family: str
    pair: list[MeasuredIteration]


def draw_subset(
    rows: Sequence[MeasuredIteration], count: int, rng: np.random.Generator
) -> list[MeasuredIteration]:
    """At least `count` random calibration iterations: pairs (or three) of one family, all families
    in proportion."""
    turns = list[_Turn]()
    for family in sorted({_family(row) for row in rows}):
        members = [row for row in rows if _family(row) == family]
        shuffled = [members[place] for place in rng.permutation(len(members))]
        pairs = np.array_split(np.arange(len(members)), max(1, len(members) // 2))
        for number, places in enumerate(pairs):
            pair = [shuffled[place] for place in places]
            turns.append(_Turn((number + 0.5) / len(pairs), family, pair))
    turns.sort(key=lambda turn: (turn.position, turn.family))
    chosen: list[MeasuredIteration] = []
    for turn in turns:
        if len(chosen) >= count:
            break
        chosen += turn.pair
    return chosen


def _average(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Means over draws, the width of intervals as high / low, and quartiles of the mean error over
    the draws [-]."""
    figures = [comparison.figures["all"] for comparison in comparisons]
    widths = list[float]()
    for comparison in comparisons:
        widths += [run["high_s"] / run["low_s"] for run in comparison.runs]
    errors = [draw["mean"] for draw in figures]
    q1, q3 = np.percentile(errors, [25, 75])

    def average(name: str) -> float:
        return float(np.mean([draw[name] for draw in figures]))

    return {
        "error": average("mean"),
        "geomean": average("geomean"),
        "bias": average("bias"),
        "inside": average("inside"),
        "width": float(np.mean(widths)),
        "q1": float(q1),
        "q3": float(q3),
        "draws": len(comparisons),
    }


def _select(comparison: Comparison, family: str) -> Comparison:
    """The runs of one family, or all of them."""
    if family == "all":
        return comparison
    runs = tuple(run for run in comparison.runs if run["family"] == family)
    return replace(comparison, runs=runs)


def _count_draws(draws: int, count: int, total: int) -> int:
    """How often a subset is drawn; there is only one empty and one whole subset."""
    return draws if 0 < count < total else 1


def learn(
    measurements: MachineMeasurements,
    comparison: Comparison,
    *,
    draws: int,
    counts: Sequence[int] = COUNTS,
) -> list[dict[str, Any]]:
    """Errors on unseen runs by family and number of calibration iterations."""
    every = measurements.iterations
    families = [*dict.fromkeys(run["family"] for run in comparison.runs), "all"]
    judged: dict[tuple[str, int], list[Comparison]] = {}
    smaller = [count for count in sorted(set(counts)) if count < len(every)]
    for count in (*smaller, len(every)):
        for draw in range(_count_draws(draws, count, len(every))):
            chosen = draw_subset(every, count, np.random.default_rng([count, draw]))
            platform = fit_platform(replace(measurements, iterations=chosen))
            again = predict_again(comparison, platform)
            for family in families:
                judged.setdefault((family, len(chosen)), []).append(_select(again, family))
    rows = []
    for (family, count), comparisons in judged.items():
        rows.append({"family": family, "iterations": count, **_average(comparisons)})
    return sorted(rows, key=lambda row: (families.index(row["family"]), row["iterations"]))


def learn_families(
    measurements: MachineMeasurements, comparison: Comparison, *, draws: int
) -> list[dict[str, Any]]:
    """Errors on runs of each family by the number of its own iterations, beside all iterations of
    the others."""
    bare = fit_platform(replace(measurements, iterations=[]), name="isolated")
    rows = list[dict[str, Any]]()
    for family in dict.fromkeys(run["family"] for run in comparison.runs):
        runs = _select(comparison, family)
        members = [row for row in measurements.iterations if row.family == family]
        others = [row for row in measurements.iterations if row.family != family]
        for count in range(len(members) + 1):
            judged = []
            for draw in range(_count_draws(draws, count, len(members))):
                order = np.random.default_rng([count, draw]).permutation(len(members))
                chosen = others + [members[place] for place in order[:count]]
                platform = add_context(bare, replace(measurements, iterations=chosen))
                judged.append(predict_again(runs, platform))
            rows.append({"family": family, "iterations": count, **_average(judged)})
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
        if given.families:
            rows = learn_families(measurements, comparison, draws=draws)
        else:
            rows = learn(measurements, comparison, draws=draws)
    print(lay_out(rows, _COLUMNS, numbers=True))
