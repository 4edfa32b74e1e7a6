"""Predictions beside measured times: their errors, and whether an interval holds them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.helpers.tables import Row, lay_out
from perfkit.calibration.checks import summarize_errors
from perfkit.prediction.result import Prediction

#: Half width of an 80 % interval, in standard deviations of the logarithm [-].
HALF_WIDTH = 1.2816


def state(prediction: Prediction, measured: float = math.nan) -> dict[str, float]:
    """Predicted time with its 80 % interval [s], and its error against the measured time [-]."""
    low, high = prediction.interval(0.8)
    return {
        "predicted": prediction.time,
        "low": low,
        "high": high,
        "measured": measured,
        "error": prediction.time / measured - 1,
    }


def widen(time: float, spread: float, measured: float) -> dict[str, float]:
    """The figures of `state` from a time [s] and the standard deviation of its logarithm [-]."""
    width = np.exp(HALF_WIDTH * spread)
    return {
        "predicted": time,
        "measured": measured,
        "error": time / measured - 1,
        "low": time / width,
        "high": time * width,
    }


def judge(rows: Sequence[Row]) -> dict[str, float]:
    """Errors of ``predicted`` against ``measured``, and the share of ``measured`` between ``low``
    and ``high`` [%]."""
    errors, inside = [], []
    for row in rows:
        measured = row["measured"]
        errors.append(row["predicted"] / measured - 1)
        inside.append(row["low"] <= measured <= row["high"])
    figures = summarize_errors(errors)
    share = np.array(inside).mean()
    return {**figures, "inside": 100 * float(share)}


#: Columns of a table of the figures of `summarize_errors` [%].
ERROR_COLUMNS = {
    "n": "{n:.0f}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "bias": "{bias:+.1f}",
}
_FIGURES = {"rows": "{what}", **ERROR_COLUMNS, "inside": "{inside:.0f}"}


def lay_out_errors(groups: Mapping[str, Sequence[Row]]) -> str:
    """A table of the errors of some groups of rows, by their names, see `judge`."""
    figures = [{"what": what, **judge(rows)} for what, rows in groups.items()]
    return f"Errors in %, and share inside the 80 % interval\n{lay_out(figures, _FIGURES)}"


def join_passes(passes: Sequence[Row]) -> dict[str, Any]:
    """Measured time and quartiles of a run of `Comparison`, as the means of its passes [s], and
    their disagreement."""

    def average(name: str) -> float:
        values = [one[name] for one in passes]
        return float(np.mean(values))

    medians = [one["median"] for one in passes]
    noise = max(medians) / min(medians) - 1
    return {
        "measured_s": average("median"),
        "measured_q1_s": average("q1"),
        "measured_q3_s": average("q3"),
        "flagged": False,
        "passes_s": medians,
        "noise": noise,
    }
