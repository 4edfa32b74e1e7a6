"""Charts of iterations: predicted and measured, broken down, and how far predictions are off."""

from collections.abc import Sequence

import altair as alt
import numpy as np

from perfkit.plots.canvas import (
    INK,
    PALETTE,
    Frame,
    Row,
    colour,
    draw,
    label_si,
    layer,
    log_axis,
    log_domain,
    mark_series,
    order,
    read_rows,
    tips,
)

__all__ = [
    "breakdown_bars",
    "calibration_learning",
    "error_bars_by_class",
    "predicted_vs_measured",
]

#: Order in which an iteration goes through its phases; others come after.
_PHASES = ("forward", "backward", "exchange", "optimizer", "update")


def _subtitle(rows: Sequence[Row]) -> str:
    if not rows:
        return "no runs"
    errors = np.abs([row["error"] for row in rows])
    geomean = np.exp(np.log(np.maximum(errors, 1e-4)).mean())
    runs = f"{len(rows)} run{'s' if len(rows) > 1 else ''}"
    return f"{runs}: error {geomean:.1%} geometric mean, {errors.mean():.1%} mean, {errors.max():.1%} largest"


def predicted_vs_measured(runs: Frame, *, title: str = "Predicted and measured iteration time") -> alt.LayerChart:
    """Draw predicted against measured times, with the diagonal, a ±10 % band, 80 % intervals and measured quartiles.

    Parameters
    ----------
    runs : frame or list of dict
        One row per run: ``family``, ``name``, ``predicted_s``, ``low_s``, ``high_s``, ``measured_s`` and, where known,
        ``measured_q1_s``, ``measured_q3_s``, ``bottleneck`` and ``flagged`` (drawn hollow); times in seconds.
    title : str, optional
        Heading; the error over all runs stands below it.

    Returns
    -------
    chart : altair.LayerChart
        Log-log chart, coloured by family.
    """
    rows = [row for row in read_rows(runs) if (row.get("measured_s") or 0) > 0 and (row.get("predicted_s") or 0) > 0]
    for row in rows:
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        row["flagged"] = bool(row.get("flagged"))
        for middle, *bounds in (("predicted_s", "low_s", "high_s"), ("measured_s", "measured_q1_s", "measured_q3_s")):
            row.update({bound: row.get(bound) or row[middle] for bound in bounds})
    keys = ("predicted_s", "measured_s", "low_s", "high_s", "measured_q1_s", "measured_q3_s")
    domain = log_domain(row[key] for row in rows for key in keys)
    families = order(row["family"] for row in rows)
    line = [{"measured_s": end, "predicted_s": end, "low_s": end * 0.9, "high_s": end * 1.1} for end in domain]
    x = log_axis("measured_s", "Measured", domain, "s")
    y = log_axis("predicted_s", "Predicted, with 80% interval", domain, "s", alt.Y)
    low = alt.Y("low_s:Q", scale=y["scale"])
    band = draw(line).mark_area(color=INK, opacity=0.08, clip=True).encode(x=x, y=low, y2="high_s:Q")
    diagonal = draw(line).mark_line(color=INK, strokeDash=[4, 3], strokeWidth=1).encode(x=x, y=y)
    looks = mark_series("family", families, title="Family")
    base = draw(rows).encode(x=x, y=y, color=looks["color"])
    intervals = base.mark_rule(opacity=0.55, strokeWidth=1.5).encode(y=low, y2="high_s:Q")
    quartiles = base.mark_rule(opacity=0.55, strokeWidth=1.5).encode(
        x=alt.X("measured_q1_s:Q", scale=x["scale"]), x2="measured_q3_s:Q"
    )
    points = base.mark_point(size=50, strokeWidth=1.5, opacity=1).encode(
        shape=looks["shape"],
        fill=alt.Fill("family:N", scale=looks["color"]["scale"], title="Family"),
        fillOpacity=alt.condition("datum.flagged", alt.value(0), alt.value(1)),
        tooltip=tips("name", "bottleneck", predicted_s=".3s", measured_s=".3s", error="+.1%"),
    )
    flagged = "; hollow: the two halves of the measurement disagreed" if any(row["flagged"] for row in rows) else ""
    legend = f"dashed: equal; band: within 10%{flagged}"
    heading = alt.Title(title, subtitle=[_subtitle(rows), legend])
    return layer(band, diagonal, intervals, quartiles, points).properties(width=420, height=420, title=heading)


def breakdown_bars(frame: Frame, *, title: str = "Where the time goes", kinds: int = 7) -> alt.Chart:
    """Draw the parts of an iteration as stacked bars, one bar per phase or per phase of each run.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``phase``, ``kind``, ``time_s`` [s] and, to compare several runs, ``run``.
    title : str, optional
        Heading.
    kinds : int, optional
        Operation classes that get a colour of their own, the longest first; the rest becomes ``other`` [-].

    Returns
    -------
    chart : altair.Chart
        Horizontal bars.
    """
    totals: dict[str, float] = {}
    for row in (rows := read_rows(frame)):
        totals[row["kind"]] = totals.get(row["kind"], 0.0) + (row["time_s"] or 0.0)
    ranked = sorted(totals, key=lambda kind: -totals[kind])
    shown = ranked if len(ranked) <= kinds + 1 else [*ranked[:kinds], "other"]
    bars: dict[tuple[str, str, str], float] = {}
    for row in rows:
        kind = row["kind"] if row["kind"] in shown else "other"
        key = (row.get("run") or "", row["phase"] or kind, kind)
        bars[key] = bars.get(key, 0.0) + (row["time_s"] or 0.0)
    data = [
        {"run": run, "phase": phase, "kind": kind, "time_s": time, "order": shown.index(kind)}
        for (run, phase, kind), time in bars.items()
        if time > 0
    ]
    phases = sorted(order(row["phase"] for row in data), key=lambda p: _PHASES.index(p) if p in _PHASES else 9)
    chart = (
        draw(data)
        .mark_bar()
        .encode(
            x=alt.X("time_s:Q", title="Time", axis=alt.Axis(labelExpr=label_si("s"), tickCount=6)),
            y=alt.Y("phase:N", title=None, sort=phases, axis=alt.Axis(labelLimit=220)),
            color=colour("kind", shown, title="Operation class"),
            order=alt.Order("order:Q"),
            tooltip=tips("phase", "kind", time_s=".3s"),
        )
        .properties(width=460, height=alt.Step(28), title=title)
    )
    runs = order(row["run"] for row in data)
    if len(runs) > 1:
        header = alt.Header(labelAngle=0, labelAlign="left", labelFontWeight="bold", labelLimit=200)
        chart = chart.encode(row=alt.Row("run:N", title=None, sort=runs, header=header, spacing=8))
    return chart


def calibration_learning(frame: Frame, *, title: str = "How many calibration iterations are enough?") -> alt.LayerChart:
    """Draw the prediction error on unseen runs over the number of real iterations that calibrated the platform.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``iterations`` (count), ``family``, ``error`` (mean, as a fraction) and, where known, ``q1`` and ``q3``.
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        One line per family, with a band between the quartiles.
    """
    rows = read_rows(frame)
    for row in rows:
        row["q1"], row["q3"] = (row[key] if row.get(key) is not None else row["error"] for key in ("q1", "q3"))
    looks = mark_series("family", order(row["family"] for row in rows), title="Family")
    counts = sorted({row["iterations"] for row in rows})
    x = alt.X("iterations:Q", title="Real iterations used for calibration", axis=alt.Axis(values=counts, format="d"))
    y = alt.Y("error:Q", title="Error on unseen runs", axis=alt.Axis(format=".0%"), scale=alt.Scale(zero=True))
    base = draw(rows).encode(x=x, color=looks["color"])
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("q1:Q"), y2="q3:Q")
    line = base.mark_line(strokeWidth=2).encode(y=y)
    points = base.mark_point(size=50, filled=True, opacity=1).encode(y=y, shape=looks["shape"])
    return layer(band, line, points).properties(width=460, height=280, title=title)


def error_bars_by_class(frame: Frame, *, title: str = "Error by class, on runs that were not fitted") -> alt.LayerChart:
    """Draw the error of each class: geometric mean, mean and 95th percentile, beside the noise of the measurement.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``name``, ``geomean``, ``mean``, ``p95`` and, where known, ``floor`` (repeatability); fractions.
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        A bar for the mean, marks for the others.
    """
    rows = read_rows(frame)
    names = [row["name"] for row in rows]
    y = alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelLimit=260))
    x = alt.X("mean:Q", title="|predicted / measured - 1|", axis=alt.Axis(format=".0%", tickCount=6))
    mean = draw(rows).mark_bar(color=PALETTE[5], height={"band": 0.6}).encode(y=y, x=x)
    kinds = {"geomean": "geometric mean", "p95": "95th percentile", "floor": "noise floor"}
    long = [
        {"name": row["name"], "what": text, "error": row[key]}
        for row in rows
        for key, text in kinds.items()
        if row.get(key) is not None
    ]
    looks = mark_series("what", list(kinds.values()), title="bar: mean")
    marks = draw(long).mark_point(size=60, filled=True, opacity=1).encode(x=alt.X("error:Q"), y=y, **looks)
    return layer(mean, marks).properties(width=420, height=alt.Step(26), title=title)
