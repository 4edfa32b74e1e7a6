"""How accuracy on unseen runs grows with the number of real iterations that calibration has measured.

    python -m benchmarks.learning P.measurements.json --check accuracy.check-*.json

Subsets of the calibration iterations are drawn, platforms fitted to them, and the saved runs predicted with each. The
families take turns in pairs, since one iteration alone cannot tell its own noise from its family's habits.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.saved import judge_saved, predict_again
from perfkit.calibration.checks import Comparison, summarize_errors
from perfkit.calibration.fit import fit_platform
from perfkit.ground.units import format_table

COUNTS = (0, 2, 4, 6, 8, 12, 16, 24)

_Rows = Sequence[Mapping[str, Any]]


def _family(row: Mapping[str, Any]) -> str:
    """Sorts parallel runs behind the single ones that they are judged by."""
    return "parallel" if row["owners"] else row["workload"]["family"]


def draw_subset(rows: _Rows, count: int, rng: np.random.Generator) -> list[Mapping[str, Any]]:
    """At least `count` random calibration iterations, all families in proportion, two or three of one at a time."""
    turns = []
    for family in sorted({_family(row) for row in rows}):
        own = [row for row in rows if _family(row) == family]
        shuffled = [own[i] for i in rng.permutation(len(own))]
        pairs = np.array_split(np.arange(len(own)), max(1, len(own) // 2))
        turns += [((i + 0.5) / len(pairs), family, [shuffled[j] for j in pair]) for i, pair in enumerate(pairs)]
    chosen: list[Mapping[str, Any]] = []
    for _, _, pair in sorted(turns, key=lambda turn: turn[:2]):
        if len(chosen) >= count:
            break
        chosen += pair
    return chosen


def learn(
    measurements: Mapping[str, Any], comparison: Comparison, *, counts: Sequence[int] = COUNTS, draws: int = 10
) -> list[dict[str, Any]]:
    """Errors on unseen runs by family and number of calibration iterations, and their quartiles over the draws."""
    every: _Rows = measurements["iterations"]
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    families = [*dict.fromkeys(run["family"] for run in comparison.runs), "all"]
    for count in [count for count in sorted(set(counts)) if count < len(every)] + [len(every)]:
        for draw in range(draws if 0 < count < len(every) else 1):
            chosen = draw_subset(every, count, np.random.default_rng([count, draw]))
            again = predict_again(comparison, fit_platform({**measurements, "iterations": chosen}))
            for family in families:
                own = np.array([family in (run["family"], "all") for run in again.runs])
                found.setdefault((family, len(chosen)), []).append(summarize_errors(again.errors[own]))
    rows = []
    for (family, count), figures in found.items():
        means = np.array([figure["mean"] for figure in figures]) / 100
        q1, q3 = np.percentile(means, [25, 75])
        geomean = float(np.mean([figure["geomean"] for figure in figures])) / 100
        rows.append(
            {"family": family, "iterations": count, "error": float(means.mean()), "q1": float(q1), "q3": float(q3),
             "geomean": geomean, "bias": float(np.mean([f["bias"] for f in figures])) / 100, "draws": len(figures)}
        )  # fmt: skip
    return sorted(rows, key=lambda row: (families.index(row["family"]), row["iterations"]))


def format_learning(rows: _Rows) -> str:
    """The table as text: mean error and its quartiles over the draws, geometric mean."""
    heads = ("family", "iterations", "mean", "quartiles over draws", "geomean", "bias", "draws")
    cells = [
        (row["family"], f"{row['iterations']}", f"{row['error']:.1%}", f"{row['q1']:.1%} to {row['q3']:.1%}",
         f"{row['geomean']:.1%}", f"{row['bias']:+.1%}", f"{row['draws']}")
        for row in rows
    ]  # fmt: skip
    return format_table([heads, *cells], numbers=True)


main = judge_saved("learning", "Error on unseen runs by calibration iterations.", learn, format_learning, draws=10)


if __name__ == "__main__":
    sys.exit(main())
