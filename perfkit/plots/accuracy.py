"""Charts of accuracy: predicted against measured times, and residuals by size."""

from collections.abc import Sequence

import altair as alt
import numpy as np

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Domain, Frame, Row
from perfkit.plots.colours import INK, mark_series
from perfkit.plots.theme import LayerChart

#: Columns that a run may lack, and the column whose value then stands for them.
_BOUNDS = {
    "low_s": "predicted_s",
    "high_s": "predicted_s",
    "measured_q1_s": "measured_s",
    "measured_q3_s": "measured_s",
}
#: Columns that the axes cover.
_TIMES = ("predicted_s", "measured_s", *_BOUNDS)


@refuse_misfits(ROWS)
def predicted_vs_measured(
    runs: Frame, *, title: str = "Predicted and measured iteration time"
) -> alt.LayerChart:
    """Draw predicted against measured times, with the diagonal, a ±10 % band, 80 % intervals and
    measured quartiles.

    Parameters
    ----------
    runs : frame or list of dict
        One row per run: ``family``, ``name``, ``predicted_s``, ``low_s``, ``high_s``,
        ``measured_s`` and, where known, ``measured_q1_s``, ``measured_q3_s``, ``bottleneck`` and
        ``flagged`` (drawn hollow); times in seconds.
    title : str, optional
        Heading; the line below it gives the error over all runs.

    Returns
    -------
    chart : altair.LayerChart
        Log-log chart, coloured by family.
    """
    check_type("title", title, str)
    rows = _read_runs(runs)
    domain = canvas.log_domain(row[column] for row in rows for column in _TIMES)
    x = canvas.log_axis("measured_s", "Measured", domain, "s")
    y = canvas.log_axis("predicted_s", _say_what_is_drawn(rows), domain, "s", alt.Y)
    layers = [
        canvas.draw_band(_list_ends(domain), x, y, low="low_s", high="high_s"),
        _draw_diagonal(domain, x, y),
        *_draw_runs(rows, x, y),
    ]
    legend_of_lines = "dashed: equal; band: within 10%"
    if any(row["flagged"] for row in rows):
        legend_of_lines += "; hollow: the two halves of the measurement disagreed"
    heading = alt.Title(title, subtitle=[_describe_errors(rows), legend_of_lines])
    return LayerChart(layer=layers).properties(width=420, height=420, title=heading)


@refuse_misfits(ROWS)
def residuals_by_time(
    runs: Frame, *, title: str = "Measured over predicted, by size"
) -> alt.LayerChart:
    """Draw the residuals of a fit against the size of what was measured: the ratio of measured to
    predicted time against the predicted time, with a line where both are equal and the 80 %
    interval as a band.

    Parameters
    ----------
    runs : frame or list of dict
        One row per measurement: ``family``, ``name``, ``predicted_s``, ``measured_s`` and, where
        known, ``low_s`` and ``high_s``; times in seconds.
    title : str, optional
        Heading; the line below it gives the error over all rows.

    Returns
    -------
    chart : altair.LayerChart
        Log-log chart, coloured by family: a form that fits has points on both sides of the line at
        all sizes.
    """
    check_type("title", title, str)
    rows = sorted(_read_runs(runs), key=lambda row: row["predicted_s"])
    for row in rows:
        row["ratio"] = row["measured_s"] / row["predicted_s"]
        row["low"] = row["low_s"] / row["predicted_s"]
        row["high"] = row["high_s"] / row["predicted_s"]
    times = canvas.log_domain(row["predicted_s"] for row in rows)
    ratios = [row[column] for row in rows for column in ("ratio", "low", "high")]
    domain = canvas.log_domain([*ratios, 0.8, 1.25], room=1.1)
    x = canvas.log_axis("predicted_s", "Predicted", times, "s")
    y = canvas.log_axis("ratio", "Measured over predicted", domain, "", alt.Y)
    equal = canvas.draw([{"ratio": 1.0}]).mark_rule(color=INK, strokeDash=[4, 3]).encode(y=y)
    looks = mark_series("family", canvas.unique(row["family"] for row in rows), title="Family")
    shown = canvas.tips("name", predicted_s=".3s", measured_s=".3s", ratio=".3f")
    layers = [
        canvas.draw_band(rows, x, y, low="low", high="high"),
        equal,
        canvas.draw_points(rows, x, y, looks, shown, size=60),
    ]
    heading = alt.Title(title, subtitle=[_describe_errors(rows), "band: 80% interval"])
    return LayerChart(layer=layers).properties(width=440, height=240, title=heading)


def _read_runs(runs: Frame) -> list[Row]:
    """Runs that have both times, each with its error and with all bounds."""
    rows = []
    for row in canvas.read_rows(runs):
        measured = row.get("measured_s")
        predicted = row.get("predicted_s")
        if not canvas.is_above_zero(measured) or not canvas.is_above_zero(predicted):
            continue
        row["error"] = predicted / measured - 1
        row["flagged"] = bool(row.get("flagged"))
        for bound, middle in _BOUNDS.items():
            row[bound] = row.get(bound) or row[middle]
        rows.append(row)
    return rows


def _say_what_is_drawn(rows: Sequence[Row]) -> str:
    """The title of the axis of predictions; it names intervals only where some are known."""
    known = [row["low_s"] < row["high_s"] for row in rows]
    if all(known):
        return "Predicted, with 80% interval"
    if any(known):
        return "Predicted, with 80% interval where known"
    return "Predicted"


def _list_ends(domain: Domain) -> list[Row]:
    """Both ends of the diagonal, and of the band around it."""
    return [
        {"measured_s": end, "predicted_s": end, "low_s": end * 0.9, "high_s": end * 1.1}
        for end in domain
    ]


def _draw_diagonal(domain: Domain, x: alt.X, y: alt.Y) -> alt.Chart:
    line = canvas.draw(_list_ends(domain))
    return line.mark_line(color=INK, strokeDash=[4, 3], strokeWidth=1).encode(x=x, y=y)


def _draw_runs(rows: Sequence[Row], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Layers of intervals, quartiles and points; points of flagged runs are hollow."""
    families = canvas.unique(row["family"] for row in rows)
    looks = mark_series("family", families, title="Family")
    intervals = canvas.draw_ranges(rows, x, y, looks.color, along="y", low="low_s", high="high_s")
    quartiles = canvas.draw_ranges(
        rows, x, y, looks.color, along="x", low="measured_q1_s", high="measured_q3_s"
    )
    shown = canvas.tips("name", "bottleneck", predicted_s=".3s", measured_s=".3s", error="+.1%")
    points = canvas.draw_points(rows, x, y, looks, shown, filled=False, strokeWidth=1.5)
    fill = alt.Fill("family:N", scale=looks.color["scale"], title="Family")
    opacity = alt.condition("datum.flagged", alt.value(0), alt.value(1))
    return [intervals, quartiles, points.encode(fill=fill, fillOpacity=opacity)]


def _describe_errors(rows: Sequence[Row]) -> str:
    """How many runs there are, and their errors."""
    if not rows:
        return "no runs"
    errors = np.abs([row["error"] for row in rows])
    # a run without an error would make the geometric mean 0
    geomean = np.exp(np.log(np.maximum(errors, 1e-4)).mean())
    count = "1 run" if len(rows) == 1 else f"{len(rows)} runs"
    return (
        f"{count}: error {geomean:.1%} geometric mean, {errors.mean():.1%} mean, "
        f"{errors.max():.1%} largest"
    )
