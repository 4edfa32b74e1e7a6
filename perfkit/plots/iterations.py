"""Charts of iterations: predicted and measured, broken down by operation class and module, and over time."""

from collections.abc import Iterable, Sequence

import altair as alt
import numpy as np

from perfkit.ground.units import format_time
from perfkit.plots import canvas
from perfkit.plots.canvas import INK, Frame, Row, draw, layer, order, read_rows, tips

#: Order in which an iteration goes through its phases; others come after.
_PHASES = ("forward", "backward", "exchange", "optimizer", "update")
_ROW_LIMIT = 1_500  # Altair refuses 5,000 rows; more than this makes notebooks heavy and shows nothing new


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
    domain = canvas.log_domain(row[key] for row in rows for key in keys)
    line = [{"measured_s": end, "predicted_s": end, "low_s": end * 0.9, "high_s": end * 1.1} for end in domain]
    x = canvas.log_axis("measured_s", "Measured", domain, "s")
    y = canvas.log_axis("predicted_s", "Predicted, with 80% interval", domain, "s", alt.Y)
    low = alt.Y("low_s:Q", scale=y["scale"])
    band = draw(line).mark_area(color=INK, opacity=0.08, clip=True).encode(x=x, y=low, y2="high_s:Q")
    diagonal = draw(line).mark_line(color=INK, strokeDash=[4, 3], strokeWidth=1).encode(x=x, y=y)
    looks = canvas.mark_series("family", order(row["family"] for row in rows), title="Family")
    shown = tips("name", "bottleneck", predicted_s=".3s", measured_s=".3s", error="+.1%")
    spans = {"y": ("low_s", "high_s"), "x": ("measured_q1_s", "measured_q3_s")}
    *ranges, points = canvas.draw_points(rows, x, y, looks, shown, spans, filled=False, strokeWidth=1.5)
    points = points.encode(
        fill=alt.Fill("family:N", scale=looks["color"]["scale"], title="Family"),
        fillOpacity=alt.condition("datum.flagged", alt.value(0), alt.value(1)),
    )
    flagged = "; hollow: the two halves of the measurement disagreed" if any(row["flagged"] for row in rows) else ""
    heading = alt.Title(title, subtitle=[_subtitle(rows), f"dashed: equal; band: within 10%{flagged}"])
    return layer(band, diagonal, *ranges, points).properties(width=420, height=420, title=heading)


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
    y = alt.Y("phase:N", title=None, sort=phases, axis=alt.Axis(labelLimit=220))
    color = canvas.colour("kind", shown, title="Operation class")
    x, tooltip = canvas.amount_axis("time_s", "Time", "s"), tips("phase", "kind", time_s=".3s")
    chart = canvas.draw_bars(data, x, y, color, tooltip)
    if len(runs := order(row["run"] for row in data)) > 1:
        header = alt.Header(labelAngle=0, labelAlign="left", labelFontWeight="bold", labelLimit=200)
        chart = chart.encode(row=alt.Row("run:N", title=None, sort=runs, header=header, spacing=8))
    return chart.properties(width=460, height=alt.Step(28), title=title)


def module_bars(frame: Frame, *, title: str = "Where the time goes, by module", modules: int = 30) -> alt.LayerChart:
    """Draw forward, backward and update of every module, and how long the device is idle for it.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``module``, ``forward_s``, ``backward_s``, ``update_s`` and ``idle_s`` [s].
    title : str, optional
        Heading; the time of all modules stands below it.
    modules : int, optional
        Modules that get a bar of their own, the longest ones in the order they come; the others, and those that take
        less than 0.2 % of the time, share one [-].

    Returns
    -------
    chart : altair.LayerChart
        One bar per module.
    """
    phases = ("forward", "backward", "update")
    columns = [f"{phase}_s" for phase in phases]
    rows = [row | {"time_s": sum(row[key] for key in columns)} for row in read_rows(frame)]
    least = 0.002 * sum(row["time_s"] for row in rows)
    longest = sorted((row for row in rows if row["time_s"] > least), key=lambda row: -row["time_s"])
    shown = {row["module"] for row in longest[:modules]}
    bars: dict[str, Row] = {}
    for row in rows:
        name = row["module"] or "outside modules"
        name = name if row["module"] in shown else f"{len(rows) - len(shown)} more modules"
        bar = bars.setdefault(name, {"module": name, **dict.fromkeys((*columns, "idle_s", "time_s"), 0.0)})
        bar.update({key: bar[key] + row[key] for key in (*columns, "idle_s", "time_s")})
    long = [
        {"module": name, "phase": phase, "order": place, "seconds": bar[f"{phase}_s"], "time_s": bar["time_s"]}
        for name, bar in bars.items()
        for place, phase in enumerate(phases)
        if bar[f"{phase}_s"] > 0
    ]
    y = alt.Y("module:N", title=None, sort=list(bars), axis=alt.Axis(labelLimit=260))
    color, tooltip = canvas.colour("phase", phases, title="Phase"), tips("module", "phase", seconds=".3s", time_s=".3s")
    time = canvas.draw_bars(long, canvas.amount_axis("seconds", "Time", "s"), y, color, tooltip)
    idle = [{"module": name, "idle_s": bar["idle_s"]} for name, bar in bars.items() if bar["idle_s"] > 0]
    line = draw(idle).mark_bar(color=INK, height={"band": 0.16})
    line = line.encode(x="idle_s:Q", y=y, tooltip=tips("module", idle_s=".3s"))
    total, waits = (format_time(sum(bar[key] for bar in bars.values())) for key in ("time_s", "idle_s"))
    heading = alt.Title(title, subtitle=f"{total} in all; dark line: the device is idle, {waits} in all")
    return layer(time, line).properties(width=460, height=alt.Step(18), title=heading)


def _merge(bar: Row, row: Row) -> None:
    """Add an operation to a bar, which names the longest one in it."""
    bar["end_s"] = max(bar["end_s"], row["end_s"])
    bar["busy_s"] += row["busy_s"]
    bar["operations"] += row["operations"]
    if row["longest_s"] > bar["longest_s"]:
        bar |= {key: row[key] for key in ("longest", "longest_s")}


def _join(rows: Iterable[Row], gap: float) -> list[Row]:
    """Neighbours of one lane and phase, at most `gap` apart, as one bar."""
    bars: list[Row] = []
    for row in rows:
        near = bars and (bars[-1]["lane"], bars[-1]["phase"]) == (row["lane"], row["phase"])
        if near and row["start_s"] - bars[-1]["end_s"] <= gap:
            _merge(bars[-1], row)
        else:
            bars.append(dict(row))
    return bars


def _aggregate(rows: list[Row], limit: int) -> list[Row]:
    """Few bars that look as one per operation would: nothing finer than a thousandth of the width is drawn."""
    rows = sorted(rows, key=lambda row: (row["lane"], row["start_s"]))
    first = min((row["start_s"] for row in rows), default=0.0)
    span = max((row["end_s"] for row in rows), default=0.0) - first
    bars = _join(rows, span / 1000)
    if len(bars) <= limit:
        return bars
    # Phases alternate faster than the eye can follow: each slot of time shows the phase that fills most of it.
    slots = max(1, limit // len({row["lane"] for row in rows}))
    width, filled = span / slots, dict[tuple[str, int], dict[str, Row]]()
    for row in rows:
        phases = filled.setdefault((row["lane"], min(slots - 1, int((row["start_s"] - first) / width))), {})
        if row["phase"] in phases:
            _merge(phases[row["phase"]], row)
        else:
            phases[row["phase"]] = dict(row)
    most = (
        max(phases.values(), key=lambda bar: bar["busy_s"])
        | {"start_s": first + slot * width, "end_s": first + (slot + 1) * width}
        for (_, slot), phases in sorted(filled.items())
    )
    return _join(most, width / 2)


def timeline_lanes(frame: Frame, *, title: str = "Timeline of one iteration", lanes: int = 24) -> alt.Chart:
    """Draw what every rank and stream does over time, coloured by phase; pale where it often is idle.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``rank``, ``stream``, ``phase``, ``start_s`` and ``end_s`` [s] and, where known, ``name`` and ``module``;
        neighbours of one phase become one bar, so that iterations of any length stay readable.
    title : str, optional
        Heading.
    lanes : int, optional
        Lanes drawn, from rank 0 on [-].

    Returns
    -------
    chart : altair.Chart
        One lane per rank and stream; the horizontal axis zooms where the renderer is interactive.
    """
    rows = []
    for row in read_rows(frame):
        if (seconds := row["end_s"] - row["start_s"]) > 0:
            kept = {key: row[key] for key in ("rank", "stream", "phase", "start_s", "end_s")}
            kept["longest"] = " · ".join(filter(None, (row.get("name"), row.get("module"))))
            kept |= {"lane": f"rank {row['rank']} · {row['stream']}", "longest_s": seconds, "busy_s": seconds}
            rows.append(kept | {"operations": 1})
    streams = order(str(row["stream"]) for row in rows)
    pairs = sorted({(row["rank"], streams.index(str(row["stream"]))) for row in rows})
    names = [f"rank {rank} · {streams[stream]}" for rank, stream in pairs]
    phases = order(row["phase"] for row in sorted(rows, key=lambda row: row["start_s"]))
    drawn = _aggregate([row for row in rows if row["lane"] in names[:lanes]], _ROW_LIMIT)
    for row in drawn:
        row["busy"] = min(1.0, row.pop("busy_s") / (row["end_s"] - row["start_s"]))
        del row["rank"], row["stream"], row["longest_s"]
    axis = "Time since the iteration began"
    axis += f"; {len(names) - lanes} more lanes are not drawn" if len(names) > lanes else ""
    pale = any(row["busy"] < 0.9 for row in drawn)
    note = "paler: the stream is idle for a part of the bar" if pale else alt.Undefined
    x, y = canvas.amount_axis("start_s", axis, "s", ticks=8), alt.Y("lane:N", title=None, sort=names[:lanes])
    shade = alt.Opacity("busy:Q", scale=alt.Scale(domain=[0, 1], range=[0.15, 1]), legend=None)
    shown = tips("lane", "phase", "longest", start_s=".4s", end_s=".4s", operations="d", busy=".0%")
    color, bars = canvas.colour("phase", phases, title="Phase"), draw(drawn, name="timeline")
    bars = bars.mark_bar(height={"band": 0.8})
    bars = bars.encode(x=x, x2="end_s:Q", y=y, color=color, opacity=shade, tooltip=shown)
    zoom = alt.selection_interval(name="zoom", bind="scales", encodings=["x"])
    heading = alt.Title(title, subtitle=note)
    return bars.add_params(zoom).properties(width=620, height=alt.Step(24), title=heading)
