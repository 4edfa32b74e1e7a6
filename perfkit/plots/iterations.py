"""Charts of iterations: predicted and measured, broken down by operation class and module, and over
time."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from perfkit.ground.forks import check_threads
from perfkit.ground.forms import refuse_misfits
from perfkit.ground.results import Table, name_column
from perfkit.ground.units import check_type, format_time
from perfkit.plots import canvas
from perfkit.plots.canvas import (
    INK,
    ROWS,
    Frame,
    LayerChart,
    draw,
    read_frame,
    read_rows,
    tips,
    unique,
)

#: Order of the phases of an iteration; other phases come last.
_PHASES = ("forward", "backward", "exchange", "optimizer", "update")
#: Most operation classes with their own colour, bars of modules, lanes of a timeline, and bars of a
#: timeline.
_KINDS, _MODULES, _LANES, _BARS = 7, 30, 32, 1_900
#: Columns of sweeps that are shares, from 0 to 1.
_SHARES = ("efficiency", "kept", "exposed", "mfu")


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
    rows = [
        row
        for row in read_rows(runs)
        if (row.get("measured_s") or 0) > 0 and (row.get("predicted_s") or 0) > 0
    ]
    for row in rows:
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
        row["flagged"] = bool(row.get("flagged"))
        for middle, *bounds in (
            ("predicted_s", "low_s", "high_s"),
            ("measured_s", "measured_q1_s", "measured_q3_s"),
        ):
            row.update({bound: row.get(bound) or row[middle] for bound in bounds})
    keys = ("predicted_s", "measured_s", "low_s", "high_s", "measured_q1_s", "measured_q3_s")
    domain = canvas.log_domain(row[key] for row in rows for key in keys)
    line = [
        {"measured_s": end, "predicted_s": end, "low_s": end * 0.9, "high_s": end * 1.1}
        for end in domain
    ]
    x = canvas.log_axis("measured_s", "Measured", domain, "s")
    y = canvas.log_axis("predicted_s", "Predicted, with 80% interval", domain, "s", alt.Y)
    low = alt.Y("low_s:Q", scale=y["scale"])
    band = (
        draw(line).mark_area(color=INK, opacity=0.08, clip=True).encode(x=x, y=low, y2="high_s:Q")
    )
    diagonal = draw(line).mark_line(color=INK, strokeDash=[4, 3], strokeWidth=1).encode(x=x, y=y)
    looks = canvas.mark_series("family", unique(row["family"] for row in rows), title="Family")
    shown = tips("name", "bottleneck", predicted_s=".3s", measured_s=".3s", error="+.1%")
    spans = {"y": ("low_s", "high_s"), "x": ("measured_q1_s", "measured_q3_s")}
    *ranges, points = canvas.draw_points(
        rows, x, y, looks, shown, spans, filled=False, strokeWidth=1.5
    )
    fill = alt.Fill("family:N", scale=looks["color"]["scale"], title="Family")
    points = points.encode(
        fill=fill, fillOpacity=alt.condition("datum.flagged", alt.value(0), alt.value(1))
    )
    flagged = (
        "; hollow: the two halves of the measurement disagreed"
        if any(row["flagged"] for row in rows)
        else ""
    )
    errors, said = np.abs([row["error"] for row in rows]), "no runs"
    if rows:
        geomean = np.exp(np.log(np.maximum(errors, 1e-4)).mean())
        said = f"{len(rows)} run{'s' * (len(rows) > 1)}: error {geomean:.1%} geometric mean, {errors.mean():.1%} mean, "
        said += f"{errors.max():.1%} largest"
    heading = alt.Title(title, subtitle=[said, f"dashed: equal; band: within 10%{flagged}"])
    return LayerChart(layer=[band, diagonal, *ranges, points]).properties(
        width=420, height=420, title=heading
    )


@refuse_misfits(ROWS)
def breakdown_bars(
    frame: Frame, *, title: str = "Where the time goes", about: str = ""
) -> alt.Chart:
    """Draw the parts of an iteration as stacked bars, one bar for each phase, or for each phase of
    each run.

    The operation classes with most time have their own colour, the others are drawn as ``other``.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``phase``, ``kind`` (operation class), ``time_s`` [s] and, to compare several runs,
        ``run``.
    title, about : str, optional
        Heading, and a line below it.

    Returns
    -------
    chart : altair.Chart
        Horizontal bars.
    """
    check_threads()
    check_type("title", title, str)
    check_type("about", about, str)
    rows, seconds = read_frame(frame, run="", phase="", kind="", time_s=0.0), pl.sum("time_s")
    ranked = rows.group_by("kind", maintain_order=True).agg(seconds)
    kinds = ranked.sort("time_s", descending=True, maintain_order=True)["kind"].to_list()
    shown = kinds if len(kinds) <= _KINDS + 1 else [*kinds[:_KINDS], "other"]
    rows = rows.with_columns(
        kind=pl.when(pl.col("kind").is_in(shown)).then("kind").otherwise(pl.lit("other"))
    )
    rows = rows.with_columns(phase=pl.when(pl.col("phase") == "").then("kind").otherwise("phase"))
    bars = (
        rows.group_by("run", "phase", "kind", maintain_order=True)
        .agg(seconds)
        .filter(pl.col("time_s") > 0)
    )
    data = [row | {"order": shown.index(row["kind"])} for row in bars.to_dicts()]
    phases = sorted(unique(bars["phase"]), key=lambda p: _PHASES.index(p) if p in _PHASES else 9)
    y = alt.Y("phase:N", title=None, sort=phases, axis=alt.Axis(labelLimit=220))
    color = canvas.colour("kind", shown, title="Operation class")
    x, tooltip = canvas.amount_axis("time_s", "Time", "s"), tips("phase", "kind", time_s=".3s")
    chart = canvas.draw_bars(data, x, y, color, tooltip)
    if len(runs := unique(bars["run"])) > 1:
        header = alt.Header(labelAngle=0, labelAlign="left", labelFontWeight="bold", labelLimit=200)
        chart = chart.encode(row=alt.Row("run:N", title=None, sort=runs, header=header, spacing=8))
    return chart.properties(
        width=460, height=alt.Step(28), title=alt.Title(title, subtitle=about or alt.Undefined)
    )


@refuse_misfits(ROWS)
def sweep_lines(
    frame: Frame,
    *,
    x: str,
    y: str = "time",
    series: Sequence[str] = (),
    title: str = "",
    about: str = "",
) -> LayerChart:
    """Draw one column of a sweep over another.

    Parameters
    ----------
    frame : frame or list of dict
        A row for each configuration. A ``time`` [s] may have ends of its interval, ``low`` and
        ``high``.
    x, y : str
        Columns. Numbers have a logarithmic axis, shares a linear one from 0 to 1, and names stand
        side by side.
    series : sequence of str, optional
        Columns that tell the lines apart: one line for each combination of their values.
    title, about : str, optional
        Heading, and a line below it.

    Returns
    -------
    chart : altair.LayerChart
        Lines with points, and bars for the intervals.
    """
    check_type("title", title, str)
    check_type("about", about, str)
    check_type("x", x, str)
    check_type("y", y, str)
    rows = [row for row in read_rows(frame) if (row.get(y) or 0) > 0]
    for row in rows:
        row["series"] = ", ".join(
            f"{name} {row[name]}" if len(series) > 1 else f"{row[name]}" for name in series
        )
    units = {"time": ("Time of an iteration", "s"), "needs": ("Memory of the fullest rank", "B")}
    (name, of), (label, unit) = (units.get(key, (name_column(key), "")) for key in (x, y))
    ends = [
        row[end]
        for row in rows
        for end in ((y, "low", "high") if y == "time" else (y,))
        if row.get(end)
    ]
    tall = canvas.log_axis(y, label, canvas.log_domain(ends), unit, alt.Y)
    if y in _SHARES:
        tall = alt.Y(
            f"{y}:Q",
            title=label,
            scale=alt.Scale(domain=[0, max(1.0, *ends)]),
            axis=alt.Axis(format="%"),
        )
    across: Any = alt.X(f"{x}:N", sort=None, title=name)
    if all(isinstance(row[x], int | float) for row in rows):
        across = canvas.log_axis(x, name, canvas.log_domain(row[x] for row in rows), of)
        if len(values := unique(row[x] for row in rows)) <= 10 and not of:
            across["axis"]["values"] = values
    legend = alt.Undefined if series else None
    looks = canvas.mark_series(
        "series", unique(row["series"] for row in rows), legend=legend, title=", ".join(series)
    )
    shown = tips(
        *(key for key in (x, *series, "strategy", "bottleneck") if any(key in r for r in rows)),
        **{y: ".3s"},
    )
    lines = draw(rows).mark_line(strokeWidth=2).encode(x=across, y=tall, color=looks["color"])
    points = canvas.draw_points(
        rows, across, tall, looks, shown, {"y": ("low", "high")} if y == "time" else {}
    )
    heading = alt.Title(title, subtitle=about) if about else title
    return LayerChart(layer=[lines, *points]).properties(width=460, height=300, title=heading)


@refuse_misfits(ROWS)
def module_bars(frame: Frame, *, about: str = "") -> alt.LayerChart:
    """Draw forward, backward and update time of every module, and how long the device is idle in
    it.

    The 30 modules with most time have their own bar, in the order of the frame. All others, and
    those with less than 0.2 % of the time, share one bar.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``module``, ``forward_s``, ``backward_s``, ``update_s`` and ``idle_s`` [s].
    about : str, optional
        A line below the heading.

    Returns
    -------
    chart : altair.LayerChart
        One bar for each module.
    """
    check_threads()
    check_type("about", about, str)
    phases = ("forward", "backward", "update")
    times = dict.fromkeys([*(f"{phase}_s" for phase in phases), "idle_s"], 0.0)
    rows = read_frame(frame, module="", **times).with_columns(
        time_s=pl.sum_horizontal(list(times)[:3])
    )
    longest = (
        rows.filter(pl.col("time_s") > 0.002 * pl.sum("time_s"))
        .top_k(_MODULES, by="time_s")["module"]
        .to_list()
    )
    named = pl.when(pl.col("module") == "").then(pl.lit("outside modules")).otherwise("module")
    short = [name or "outside modules" for name in rows["module"] if name not in longest]
    others = pl.lit(", ".join(short) if len(short) <= 3 else f"{len(short)} other modules")
    module = pl.when(pl.col("module").is_in(longest)).then(named).otherwise(others)
    bars = rows.group_by(module=module, maintain_order=True).agg(pl.sum(*times, "time_s"))
    long = bars.rename(lambda name: name.removesuffix("_s") if name[:-2] in phases else name)
    long = long.unpivot(
        phases, index=("module", "time_s"), variable_name="phase", value_name="seconds"
    )
    parts = [
        row | {"order": phases.index(row["phase"])}
        for row in long.filter(pl.col("seconds") > 0).to_dicts()
    ]
    y = alt.Y("module:N", title=None, sort=bars["module"].to_list(), axis=alt.Axis(labelLimit=260))
    color, tooltip = (
        canvas.colour("phase", phases, title="Phase"),
        tips("module", "phase", seconds=".3s", time_s=".3s"),
    )
    time = canvas.draw_bars(parts, canvas.amount_axis("seconds", "Time", "s"), y, color, tooltip)
    idle = bars.select("module", "idle_s").filter(pl.col("idle_s") > 0).to_dicts()
    line = draw(idle).mark_bar(color=INK, height={"band": 0.16})
    line = line.encode(x="idle_s:Q", y=y, tooltip=tips("module", idle_s=".3s"))
    total, waits = (format_time(float(bars[key].sum())) for key in ("time_s", "idle_s"))
    note = f"{total} in all; thin line: the device is idle, {waits} in all"
    heading = alt.Title("Where the time goes, by module", subtitle=[*[about] * bool(about), note])
    return LayerChart(layer=[time, *[line] * bool(idle)]).properties(
        width=460, height=alt.Step(18), title=heading
    )


def _join(rows: Table, gap: float) -> Table:
    """Join neighbours of one lane and phase that are at most `gap` [s] apart into one bar."""
    rows = rows.sort("lane", "start_s", maintain_order=True)
    apart = pl.col("start_s") - pl.col("end_s").cum_max().shift(1).over("lane") > gap
    bar = (
        (apart.fill_null(True) | (pl.struct("lane", "phase", "region").rle_id().diff() != 0))
        .cum_sum()
        .alias("bar")
    )
    return _add_up(rows, bar, "lane", "phase").drop("bar")


def _add_up(rows: Table, *keys: Any) -> Table:
    """One row for each value of the keys, with sums, both ends in time, and the name of the longest
    operation."""
    longest = pl.col("longest", "longest_s").get(pl.col("longest_s").arg_max())
    sums = (pl.min("start_s"), pl.max("end_s"), pl.sum("busy_s", "operations"), longest)
    return rows.group_by(*keys, maintain_order=True).agg(*sums)


def _aggregate(rows: Table) -> Table:
    """At most about `_BARS` bars that look like a bar for each operation; gaps below 1/1000 of the
    width are closed."""
    first, last = (
        float(value or 0.0) for value in rows.select(pl.min("start_s"), pl.max("end_s")).row(0)
    )
    span = last - first
    bars = _join(rows, span / 1000)
    if len(bars) <= _BARS:
        return bars
    # Phases alternate too fast to be seen: divide time into slots and draw the phase that fills
    # most of each slot.
    slots = max(1, _BARS // rows["lane"].n_unique())
    width = span / slots
    slot = ((pl.col("start_s") - first) / width).cast(pl.Int64).clip(0, slots - 1).alias("slot")
    most = _add_up(rows, "lane", slot, "phase", "region").sort(
        "busy_s", descending=True, maintain_order=True
    )
    most = most.group_by("lane", "slot", maintain_order=True).first()
    begin = first + pl.col("slot") * width
    # a bar may be longer than its slot
    return _join(
        most.with_columns(start_s=begin, end_s=pl.max_horizontal(begin + width, "end_s")), width / 2
    )


def _mark_iteration(end: float, x: alt.X) -> list[alt.Chart]:
    """Lines where the iteration begins and ends, the second one with its length."""
    label = f"iteration, {format_time(end)}"
    edges = [{"start_s": 0.0, "label": ""}, {"start_s": end, "label": label}]
    # each layer has a name of its own: renderers refuse two of one name
    lines = draw(edges, name="iteration_ends").encode(x=x)
    lines = lines.mark_rule(color=INK, strokeDash=[4, 3])
    words = draw(edges, name="iteration_length").encode(x=x, y=alt.value(0), text="label:N")
    # above the lanes, where marks of a chart that can be zoomed are cut off unless they say so
    words = words.mark_text(color=INK, align="right", dx=4, dy=-4, baseline="bottom", clip=False)
    return [lines, words]


def _name_early(rows: Table) -> str:
    """The line under a timeline that says which ranks begin before the iteration; empty if none
    does."""
    early = unique(rows.filter(pl.col("start_s") < 0)["rank"])
    if not early:
        return ""
    named = ", ".join(map(str, early[:4])) + (" and others" if len(early) > 4 else "")
    ranks = f"rank {named} begins" if len(early) == 1 else f"ranks {named} begin"
    return f"left of 0: {ranks} early, while others end the iteration before"


@refuse_misfits(ROWS)
def timeline_lanes(
    frame: Frame, *, about: str = "", time: float | None = None
) -> alt.Chart | alt.LayerChart:
    """Draw what every rank and stream does over time, coloured by phase; bars are paler where a
    stream is often idle.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``rank``, ``stream``, ``phase``, ``start_s`` and ``end_s`` [s] and, where known,
        ``name`` and ``module``. Neighbours of one phase become one bar, so that iterations of any
        length stay readable.
    about : str, optional
        A line below the heading.
    time : float, optional
        Time of the iteration; where a rank begins before 0, lines show both ends of it [s].

    Returns
    -------
    chart : altair.Chart or altair.LayerChart
        One lane for each rank and stream. Where charts are interactive, the time axis can be
        zoomed.
    """
    check_threads()
    check_type("about", about, str)
    rows = read_frame(
        frame, rank=0, stream="", phase="", start_s=0.0, end_s=0.0, name="", module=""
    )
    seconds, label = (
        pl.col("end_s") - pl.col("start_s"),
        pl.format("rank {} · {}", "rank", "stream"),
    )
    longest = (
        pl.concat_list("name", "module")
        .list.eval(pl.element().filter(pl.element() != ""))
        .list.join(" · ")
    )
    own = {
        "lane": label,
        "longest": longest,
        "longest_s": seconds,
        "busy_s": seconds,
        "operations": pl.lit(1),
    }
    # operations without a phase
    own["phase"] = pl.when(pl.col("phase") == "").then("name").otherwise("phase")
    # spans of different modules are not joined
    own["region"] = pl.when(pl.col("name") == "").then("module").otherwise(pl.lit(""))
    rows = rows.filter(seconds > 0).with_columns(**own)
    phases = unique(rows.sort("start_s", maintain_order=True)["phase"])
    place = {stream: number for number, stream in enumerate(unique(rows["stream"]))}
    pairs = sorted(
        {*rows.select("rank", "stream").rows()}, key=lambda pair: (pair[0], place[pair[1]])
    )
    names = [f"rank {rank} · {stream}" for rank, stream in pairs]
    near = 1e-9 * float(rows["end_s"].max() or 0.0)  # type: ignore[arg-type]
    early = _name_early(rows.filter(pl.col("start_s") < -near))
    drawn = _aggregate(rows.filter(pl.col("lane").is_in(names[:_LANES])))
    drawn = drawn.with_columns(
        busy=(pl.col("busy_s") / (pl.col("end_s") - pl.col("start_s"))).clip(0, 1)
    )
    drawn = drawn.drop("busy_s", "longest_s")
    axis = "Time since the iteration began"
    axis += f"; {len(names) - _LANES} more lanes are not drawn" if len(names) > _LANES else ""
    notes = (
        about,
        early,
        "paler: the stream is idle for a part of the bar" * int((drawn["busy"] < 0.9).any()),
    )
    x, y = (
        canvas.amount_axis("start_s", axis, "s", ticks=8),
        alt.Y("lane:N", title=None, sort=names[:_LANES]),
    )
    shade = alt.Opacity("busy:Q", scale=alt.Scale(domain=[0, 1], range=[0.15, 1]), legend=None)
    shown = tips("lane", "phase", "longest", start_s=".4s", end_s=".4s", operations="d", busy=".0%")
    bars = draw(drawn.to_dicts(), name="timeline").mark_bar(height={"band": 0.8})
    color = canvas.colour("phase", phases, title="Phase")
    bars = bars.encode(x=x, x2="end_s:Q", y=y, color=color, opacity=shade, tooltip=shown)
    zoom = alt.selection_interval(name="zoom", bind="scales", encodings=["x"])
    heading = alt.Title(
        "Timeline of one iteration", subtitle=[*filter(None, notes)] or alt.Undefined
    )
    bars = bars.add_params(zoom)
    looks = {"width": 620, "height": alt.Step(24), "title": heading}
    if early and time is not None:
        return LayerChart(layer=[bars, *_mark_iteration(time, x)]).properties(**looks)
    return bars.properties(**looks)
