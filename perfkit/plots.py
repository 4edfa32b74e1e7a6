"""Charts from frames: Altair values, returned and never shown, in colours that colour-blind readers can tell apart."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import altair as alt
import numpy as np

from perfkit.models.collectives import bus_bandwidth
from perfkit.units import format_rate

__all__ = [
    "INK",
    "PALETTE",
    "breakdown_bars",
    "calibration_learning",
    "collective_curves",
    "error_bars_by_class",
    "kernel_curves",
    "predicted_vs_measured",
    "roofline_chart",
    "timeline_lanes",
    "use_svg",
]

#: A polars or pandas-like frame with ``to_dicts``, or rows as mappings.
Frame: TypeAlias = Any
Row: TypeAlias = dict[str, Any]
Chart: TypeAlias = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.VConcatChart

#: Okabe and Ito, "Color Universal Design", 2008; black gives way to grey, and pale yellow comes last.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#F0E442"]
#: Text, axes and reference lines.
INK = "#24292f"
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]
#: Order in which an iteration goes through its phases; others come after.
_PHASES = ("forward", "backward", "exchange", "optimizer", "update")
_ROW_LIMIT = 1_500  # Altair refuses 5,000 rows; more than this makes notebooks heavy and shows nothing new


@alt.theme.register("perfkit", enable=False)
def _theme() -> alt.theme.ThemeConfig:
    font = "Inter, Helvetica Neue, Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif"
    ink = dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor", "gridColor"), INK)
    sizes = {"labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 8}
    words = {"labelColor": INK, "titleColor": INK, "labelFontSize": 11, "titleFontSize": 12, "labelLimit": 240}
    title = {"color": INK, "subtitleColor": INK, "fontSize": 14, "subtitleFontSize": 11, "anchor": "start"}
    config: Any = {
        "background": "white",
        "font": font,
        "axis": {**ink, **sizes, "gridOpacity": 0.12, "labelFlush": False},
        "legend": {**words, "titleFontWeight": "normal", "symbolOpacity": 1, "symbolSize": 70},
        "header": words,
        "title": {**title, "offset": 10},
        "view": {"stroke": None, "continuousWidth": 460, "continuousHeight": 300},
        "range": {"category": PALETTE},
    }
    return {"config": config}


def use_svg() -> None:
    """Show charts as SVG in notebooks, with perfkit's theme: small, stored in the file, and readable without a network.

    Examples
    --------
    >>> use_svg()
    >>> alt.renderers.active, alt.theme.active
    ('svg', 'perfkit')
    """
    alt.renderers.enable("svg")
    alt.theme.enable("perfkit")


def _rows(frame: Frame) -> list[Row]:
    """Rows as plain dictionaries; what JSON cannot hold becomes null."""
    rows = frame.to_dicts() if hasattr(frame, "to_dicts") else frame
    return [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        for row in rows
    ]


def _chart(rows: Sequence[Row], **settings: Any) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)), **settings)


def _ordered(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _colour(name: str, values: Sequence[Any], *, title: str | None = None, legend: Any = alt.Undefined) -> alt.Color:
    scale = alt.Scale(domain=list(values), range=[PALETTE[i % len(PALETTE)] for i in range(len(values))])
    return alt.Color(f"{name}:N", scale=scale, title=title, legend=legend)


def _series(name: str, values: Sequence[Any], **settings: Any) -> dict[str, Any]:
    """Colour and shape of a series, so that either alone tells it from the others."""
    scale = alt.Scale(domain=list(values), range=[_SHAPES[i % len(_SHAPES)] for i in range(len(values))])
    title = settings.get("title")
    return {"color": _colour(name, values, **settings), "shape": alt.Shape(f"{name}:N", scale=scale, title=title)}


def _tips(*names: str, **formats: str) -> list[alt.Tooltip]:
    numbers = [alt.Tooltip(f"{name}:Q", format=text) for name, text in formats.items()]
    return [*(alt.Tooltip(f"{name}:N") for name in names), *numbers]


def _si(unit: str) -> str:
    """Vega expression for tick labels such as ``20 ms`` or ``1 GB``; pure numbers take no prefix."""
    if not unit:
        return "format(datum.value, '~g')"
    return f"replace(format(datum.value, '.3~s'), regexp('([a-zA-Zµ]?)$'), ' $1{unit}')"


def _log_domain(values: Iterable[float | None], *, room: float = 1.25) -> tuple[float, float]:
    known = [value for value in values if value is not None and value > 0]
    return (min(known) / room, max(known) * room) if known else (0.1, 10.0)


def _log_axis(domain: tuple[float, float], unit: str) -> alt.Axis:
    """Even steps within a decade, 1-2-5 over few decades, powers of ten over many, so that labels never collide."""
    low, high = domain
    decades = math.log10(high / low)
    if decades < 1:
        raw = (high - low) / 4
        step = next(step for step in (1, 2, 5, 10) if step * 10 ** math.floor(math.log10(raw)) >= raw)
        step *= 10 ** math.floor(math.log10(raw))
        ticks = [float(f"{step * i:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    else:
        every = 1 if decades < 7 else 2 if decades < 11 else 3
        steps = (1, 2, 5) if decades < 2.5 else (1, 3) if decades < 4 else (1,)
        powers = [power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
        ticks = [float(f"{step}e{power}") for power in powers if power % every == 0 for step in steps]
    return alt.Axis(values=[tick for tick in ticks if low <= tick <= high], labelExpr=_si(unit))


def _log(name: str, title: str, domain: tuple[float, float], unit: str, channel: Any = alt.X) -> Any:
    scale = alt.Scale(type="log", domain=list(domain), nice=False)
    return channel(f"{name}:Q", title=title, scale=scale, axis=_log_axis(domain, unit))


def _layer(*charts: alt.Chart) -> alt.LayerChart:
    return alt.LayerChart(layer=list(charts))


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
    rows = [row for row in _rows(runs) if (row.get("measured_s") or 0) > 0 and (row.get("predicted_s") or 0) > 0]
    for row in rows:
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        row["flagged"] = bool(row.get("flagged"))
        for middle, *bounds in (("predicted_s", "low_s", "high_s"), ("measured_s", "measured_q1_s", "measured_q3_s")):
            row.update({bound: row.get(bound) or row[middle] for bound in bounds})
    keys = ("predicted_s", "measured_s", "low_s", "high_s", "measured_q1_s", "measured_q3_s")
    domain = _log_domain(row[key] for row in rows for key in keys)
    families = _ordered(row["family"] for row in rows)
    line = [{"measured_s": end, "predicted_s": end, "low_s": end * 0.9, "high_s": end * 1.1} for end in domain]
    x = _log("measured_s", "Measured", domain, "s")
    y = _log("predicted_s", "Predicted, with 80% interval", domain, "s", alt.Y)
    low = alt.Y("low_s:Q", scale=y["scale"])
    band = _chart(line).mark_area(color=INK, opacity=0.08, clip=True).encode(x=x, y=low, y2="high_s:Q")
    diagonal = _chart(line).mark_line(color=INK, strokeDash=[4, 3], strokeWidth=1).encode(x=x, y=y)
    looks = _series("family", families, title="Family")
    base = _chart(rows).encode(x=x, y=y, color=looks["color"])
    intervals = base.mark_rule(opacity=0.55, strokeWidth=1.5).encode(y=low, y2="high_s:Q")
    quartiles = base.mark_rule(opacity=0.55, strokeWidth=1.5).encode(
        x=alt.X("measured_q1_s:Q", scale=x["scale"]), x2="measured_q3_s:Q"
    )
    points = base.mark_point(size=50, strokeWidth=1.5, opacity=1).encode(
        shape=looks["shape"],
        fill=alt.Fill("family:N", scale=looks["color"]["scale"], title="Family"),
        fillOpacity=alt.condition("datum.flagged", alt.value(0), alt.value(1)),
        tooltip=_tips("name", "bottleneck", predicted_s=".3s", measured_s=".3s", error="+.1%"),
    )
    legend = "dashed: equal; band: within 10%; hollow: the two halves of the measurement disagreed"
    heading = alt.Title(title, subtitle=[_subtitle(rows), legend])
    return _layer(band, diagonal, intervals, quartiles, points).properties(width=420, height=420, title=heading)


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
    for row in (rows := _rows(frame)):
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
    phases = sorted(_ordered(row["phase"] for row in data), key=lambda p: _PHASES.index(p) if p in _PHASES else 9)
    chart = (
        _chart(data)
        .mark_bar()
        .encode(
            x=alt.X("time_s:Q", title="Time", axis=alt.Axis(labelExpr=_si("s"), tickCount=6)),
            y=alt.Y("phase:N", title=None, sort=phases, axis=alt.Axis(labelLimit=220)),
            color=_colour("kind", shown, title="Operation class"),
            order=alt.Order("order:Q"),
            tooltip=_tips("phase", "kind", time_s=".3s"),
        )
        .properties(width=460, height=alt.Step(28), title=title)
    )
    runs = _ordered(row["run"] for row in data)
    if len(runs) > 1:
        header = alt.Header(labelAngle=0, labelAlign="left", labelFontWeight="bold", labelLimit=200)
        chart = chart.encode(row=alt.Row("run:N", title=None, sort=runs, header=header, spacing=8))
    return chart


def _joined(rows: Iterable[Row], gap: float) -> list[Row]:
    """Neighbours of one lane and phase, at most `gap` apart, as one bar."""
    joined: list[Row] = []
    for row in rows:
        last = joined[-1] if joined else None
        near = last is not None and (last["lane"], last["phase"]) == (row["lane"], row["phase"])
        if last is not None and near and row["start_s"] - last["end_s"] <= gap:
            last["end_s"] = max(last["end_s"], row["end_s"])
            last["operations"] += row.get("operations", 1)
        else:
            joined.append({"operations": 1, **row})
    return joined


def _aggregated(rows: list[Row], limit: int) -> list[Row]:
    """Few bars that look as one per operation would: nothing finer than a thousandth of the width is drawn."""
    rows = sorted(rows, key=lambda row: (row["lane"], row["start_s"]))
    first = min((row["start_s"] for row in rows), default=0.0)
    span = max((row["end_s"] for row in rows), default=0.0) - first
    joined = _joined(rows, span / 1000)
    if len(joined) <= limit:
        return joined
    # Phases alternate faster than the eye can follow: each slot of time shows the phase that fills most of it.
    slots = max(1, limit // len({row["lane"] for row in rows}))
    busy: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        slot = busy.setdefault((row["lane"], min(slots - 1, int((row["start_s"] - first) / span * slots))), {})
        slot[row["phase"]] = slot.get(row["phase"], 0.0) + row["end_s"] - row["start_s"]
    width = span / slots
    longest: Iterable[Row] = (
        {"lane": lane, "phase": max(phases, key=lambda phase: phases[phase]), "start_s": first + slot * width}
        for (lane, slot), phases in sorted(busy.items())
    )
    return _joined(({**row, "end_s": row["start_s"] + width} for row in longest), width / 2)


def timeline_lanes(frame: Frame, *, title: str = "Timeline of one iteration", lanes: int = 24) -> alt.Chart:
    """Draw what every rank and stream does over time, coloured by phase.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``rank``, ``stream``, ``phase``, ``start_s`` and ``end_s`` [s]; neighbours of one phase become one bar, so
        that iterations of any length stay readable.
    title : str, optional
        Heading.
    lanes : int, optional
        Lanes drawn, from rank 0 on [-].

    Returns
    -------
    chart : altair.Chart
        One lane per rank and stream; the horizontal axis zooms where the renderer is interactive.
    """
    rows = [
        {key: row[key] for key in ("rank", "stream", "phase", "start_s", "end_s")}
        for row in _rows(frame)
        if row["end_s"] > row["start_s"]
    ]
    streams = _ordered(str(row["stream"]) for row in rows)
    pairs = sorted({(row["rank"], streams.index(str(row["stream"]))) for row in rows})
    names = [f"rank {rank} · {streams[stream]}" for rank, stream in pairs]
    for row in rows:
        row["lane"] = f"rank {row['rank']} · {row['stream']}"
    phases = _ordered(row["phase"] for row in sorted(rows, key=lambda row: row["start_s"]))
    drawn = _aggregated([row for row in rows if row["lane"] in names[:lanes]], _ROW_LIMIT)
    axis = "Time since the iteration began"
    axis += f"; {len(names) - lanes} more lanes are not drawn" if len(names) > lanes else ""
    return (
        _chart(drawn, name="timeline")
        .mark_bar(height={"band": 0.8})
        .encode(
            x=alt.X("start_s:Q", title=axis, axis=alt.Axis(labelExpr=_si("s"), tickCount=8)),
            x2="end_s:Q",
            y=alt.Y("lane:N", title=None, sort=names[:lanes]),
            color=_colour("phase", phases, title="Phase"),
            tooltip=_tips("lane", "phase", start_s=".4s", end_s=".4s", operations="d"),
        )
        .add_params(alt.selection_interval(name="zoom", bind="scales", encodings=["x"]))
        .properties(width=620, height=alt.Step(24), title=title)
    )


def roofline_chart(
    points: Frame, peaks: Mapping[str, float], bandwidths: Mapping[str, float], *, title: str = "Roofline"
) -> alt.LayerChart:
    """Draw kernels under the roofs of their device.

    Parameters
    ----------
    points : frame or list of dict
        Rows ``kind`` (kernel class), ``flops`` [FLOP], ``nbytes`` [B], ``time_s`` [s]; rows without FLOP are left out.
    peaks : mapping of str to float
        Peak rate by number format [FLOP/s].
    bandwidths : mapping of str to float
        Bandwidth by memory level [B/s].
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        Log-log chart: a sloping roof per memory level, a level one per number format, a point per kernel.

    Raises
    ------
    ValueError
        Where there is no peak or no bandwidth.
    """
    if not peaks or not bandwidths:
        raise ValueError("roofline_chart needs at least one peak and one bandwidth; pass peaks={'fp32': ...}")
    rows = [row for row in _rows(points) if row.get("flops") and row.get("nbytes") and row.get("time_s")]
    for row in rows:
        row |= {"intensity": row["flops"] / row["nbytes"], "rate": row["flops"] / row["time_s"]}
    top, fastest, slowest = max(peaks.values()), max(bandwidths.values()), min(bandwidths.values())
    x_domain = _log_domain([0.1, top / slowest * 8, *(row["intensity"] for row in rows)])
    y_domain = _log_domain([x_domain[0] * slowest * 2, top * 1.6, *(row["rate"] for row in rows)], room=1.6)
    x = _log("intensity", "Arithmetic intensity, FLOP per byte", x_domain, "")
    y = _log("rate", "Rate", y_domain, "FLOP/s", alt.Y)
    roofs: list[Row] = []
    labels: list[tuple[float, float, str, str]] = []
    for name, bandwidth in bandwidths.items():
        start = max(x_domain[0], y_domain[0] / bandwidth)
        ends = [(start, start * bandwidth), (top / bandwidth, top)]
        roofs += [{"roof": name, "intensity": ai, "rate": rate} for ai, rate in ends]
        along = start * 1.15 * 1.9 ** len(labels)  # one further up than the other: caches can be equally fast
        labels.append((along, along * bandwidth, f"{name} {format_rate(bandwidth, 'B/s')}", "slope"))
    for name, peak in peaks.items():
        roofs += [{"roof": name, "intensity": ai, "rate": peak} for ai in (peak / fastest, x_domain[1])]
        labels.append((x_domain[1], peak, f"{name} peak {format_rate(peak, 'FLOP/s')}", "level"))
    width, height = 460, 320
    pixels = height / math.log(y_domain[1] / y_domain[0]) / (width / math.log(x_domain[1] / x_domain[0]))
    angle = -math.degrees(math.atan(pixels))
    lines = _chart(roofs).mark_line(color=INK, strokeWidth=1.5, clip=True).encode(x=x, y=y, detail="roof:N")
    texts = [
        _chart([{"intensity": ai, "rate": rate, "text": text}])
        .mark_text(color=INK, fontSize=10, dy=-6, align="left" if where == "slope" else "right")
        .encode(x=x, y=y, text="text:N", angle=alt.value(angle % 360 if where == "slope" else 0))
        for ai, rate, text, where in labels
    ]
    looks = _series("kind", _ordered(row["kind"] for row in rows), title="Kernel class")
    drawn = _chart(rows).mark_point(size=42, filled=True, opacity=0.85)
    drawn = drawn.encode(x=x, y=y, **looks, tooltip=_tips("kind", intensity=".3s", rate=".3s"))
    return _layer(lines, *texts, drawn).properties(width=width, height=height, title=title)


def collective_curves(points: Frame, curves: Frame, *, title: str = "Collectives") -> alt.HConcatChart:
    """Draw time and bus bandwidth of collectives over message size: measured quartiles and fitted curves.

    Parameters
    ----------
    points : frame or list of dict
        Measured rows ``operation``, ``ranks``, ``nbytes`` [B], ``time_s`` and, where known, ``q1_s`` and ``q3_s`` [s].
    curves : frame or list of dict
        Fitted rows ``operation``, ``ranks``, ``nbytes`` [B], ``time_s`` [s].
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.HConcatChart
        Two log-log panels side by side, one colour per operation and number of ranks.
    """

    def rate(row: Row, time: float) -> float:
        return float(bus_bandwidth(row["nbytes"], time, ranks=row["ranks"], operation=row["operation"]))

    measured, fitted = (
        [{**row, "series": f"{row['operation']}, {row['ranks']} ranks"} for row in _rows(frame)]
        for frame in (points, curves)
    )
    return _curves(measured, fitted, ("busbw", rate), ("Message size", "Bus bandwidth"), title)


def kernel_curves(points: Frame, curves: Frame, *, title: str = "Memory-bound kernels") -> alt.HConcatChart:
    """Draw time and bandwidth of kernels over the bytes they touch: measured quartiles and fitted curves.

    Parameters
    ----------
    points : frame or list of dict
        Measured rows ``kernel``, ``nbytes`` [B], ``time_s`` and, where known, ``q1_s`` and ``q3_s`` [s].
    curves : frame or list of dict
        Fitted rows ``kernel``, ``nbytes`` [B], ``time_s`` [s].
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.HConcatChart
        Two log-log panels side by side, one colour per kernel.
    """
    measured, fitted = ([{**row, "series": row["kernel"]} for row in _rows(frame)] for frame in (points, curves))
    rate = ("bandwidth", lambda row, time: row["nbytes"] / time)
    return _curves(measured, fitted, rate, ("Bytes touched", "Bandwidth"), title)


def _curves(
    measured: list[Row],
    fitted: list[Row],
    rate: tuple[str, Callable[[Row, float], float]],
    titles: tuple[str, str],
    title: str,
) -> alt.HConcatChart:
    """Time, and the rate that is computed from it, over bytes: a dot with quartiles per measurement, a line per fit."""
    rows, (field, compute) = [*measured, *fitted], rate
    for row in rows:
        row["q1_s"], row["q3_s"] = row.get("q1_s") or row["time_s"], row.get("q3_s") or row["time_s"]
        for time, name in (("time_s", field), ("q1_s", f"{field}_high"), ("q3_s", f"{field}_low")):
            row[name] = compute(row, row[time])
    legend = alt.Legend(orient="bottom", columns=4, title=None)
    looks = _series("series", _ordered(row["series"] for row in rows), title=None, legend=legend)
    sizes = _log_domain(row["nbytes"] for row in rows)
    panels = []
    for name, low, high, label, unit in (
        ("time_s", "q1_s", "q3_s", "Time", "s"),
        (field, f"{field}_low", f"{field}_high", titles[1], "B/s"),
    ):
        domain = _log_domain(row[key] for row in rows for key in (name, low, high))
        x, y = _log("nbytes", titles[0], sizes, "B"), _log(name, label, domain, unit, alt.Y)
        lines = _chart(fitted).mark_line(strokeWidth=2).encode(x=x, y=y, color=looks["color"])
        marks = _chart(measured).encode(x=x, color=looks["color"])
        spread = alt.Y(f"{low}:Q", scale=y["scale"])
        bars = marks.mark_rule(strokeWidth=1.5, opacity=0.6).encode(y=spread, y2=f"{high}:Q")
        tips = _tips("series", **{"nbytes": ".3s", name: ".3s"})
        dots = marks.mark_point(size=30, filled=True, opacity=0.9).encode(y=y, shape=looks["shape"], tooltip=tips)
        panels.append(_layer(lines, bars, dots).properties(width=310, height=280))
    heading = alt.Title(title, subtitle="dots and bars: measured, with quartiles; lines: fitted")
    return alt.hconcat(*panels, title=heading, spacing=36)


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
    rows = _rows(frame)
    for row in rows:
        row["q1"], row["q3"] = (row[key] if row.get(key) is not None else row["error"] for key in ("q1", "q3"))
    looks = _series("family", _ordered(row["family"] for row in rows), title="Family")
    counts = sorted({row["iterations"] for row in rows})
    x = alt.X("iterations:Q", title="Real iterations used for calibration", axis=alt.Axis(values=counts, format="d"))
    y = alt.Y("error:Q", title="Error on unseen runs", axis=alt.Axis(format=".0%"), scale=alt.Scale(zero=True))
    base = _chart(rows).encode(x=x, color=looks["color"])
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("q1:Q"), y2="q3:Q")
    line = base.mark_line(strokeWidth=2).encode(y=y)
    points = base.mark_point(size=50, filled=True, opacity=1).encode(y=y, shape=looks["shape"])
    return _layer(band, line, points).properties(width=460, height=280, title=title)


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
    rows = _rows(frame)
    names = [row["name"] for row in rows]
    y = alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelLimit=260))
    x = alt.X("mean:Q", title="|predicted / measured - 1|", axis=alt.Axis(format=".0%", tickCount=6))
    mean = _chart(rows).mark_bar(color=PALETTE[5], height={"band": 0.6}).encode(y=y, x=x)
    kinds = {"geomean": "geometric mean", "p95": "95th percentile", "floor": "noise floor"}
    long = [
        {"name": row["name"], "what": text, "error": row[key]}
        for row in rows
        for key, text in kinds.items()
        if row.get(key) is not None
    ]
    looks = _series("what", list(kinds.values()), title="bar: mean")
    marks = _chart(long).mark_point(size=60, filled=True, opacity=1).encode(x=alt.X("error:Q"), y=y, **looks)
    return _layer(mean, marks).properties(width=420, height=alt.Step(26), title=title)
