"""Charts of machines: kernels under their roofs, collectives over size, two platforms, time and
memory of ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type, format_bytes, format_rate, format_time, show
from perfkit.models.collectives import bus_bandwidth
from perfkit.plots import canvas
from perfkit.plots.canvas import (
    INK,
    ROWS,
    Frame,
    HConcatChart,
    LayerChart,
    Row,
    draw,
    read_rows,
    tips,
    unique,
)

#: Most ranks that are drawn: the busiest ones, and the one with the fullest memory.
_MOST = 32
#: Shape of a line, which the legend shows for series without points.
_LINE = "M-1.4,-0.2H1.4V0.2H-1.4Z"
_DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 2, 1, 2, 1, 2], [12, 4])


@refuse_misfits(ROWS)
def roofline_chart(
    points: Frame,
    peaks: Mapping[str, float],
    bandwidths: Mapping[str, float],
    *,
    title: str = "Roofline",
) -> alt.LayerChart:
    """Draw kernels under the roofs of their device.

    Parameters
    ----------
    points : frame or list of dict
        Rows ``kind`` (kernel class), ``flops`` [FLOP], ``nbytes`` [B], ``time_s`` [s] and, to tell
        number formats apart, ``dtype``. Rows without FLOP are left out.
    peaks : mapping of str to float
        Dense peak rate by number format [FLOP/s].
    bandwidths : mapping of str to float
        Bandwidth by memory level [B/s].
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        Log-log chart: a sloping roof for each memory level, a flat roof for each peak, a point for
        each kernel.

    Raises
    ------
    ValueError
        Without a peak or without a bandwidth.
    """
    check_type("title", title, str)
    if not peaks or not bandwidths:
        raise ValueError(
            "roofline_chart needs at least one peak and one bandwidth; pass peaks={'fp32': ...}"
        )
    rows = [
        row
        for row in read_rows(points)
        if row.get("flops") and row.get("nbytes") and row.get("time_s")
    ]
    for row in rows:
        row |= {"intensity": row["flops"] / row["nbytes"], "rate": row["flops"] / row["time_s"]}
        row["series"] = f"{row['kind']}, {row['dtype']}" if row.get("dtype") else row["kind"]
    top, fastest, slowest = max(peaks.values()), max(bandwidths.values()), min(bandwidths.values())
    x_domain = canvas.log_domain(
        [min(0.1, top / fastest / 8), top / slowest * 8, *(row["intensity"] for row in rows)]
    )
    y_domain = canvas.log_domain(
        [x_domain[0] * slowest * 2, top * 1.6, *(row["rate"] for row in rows)], room=1.6
    )
    x = canvas.log_axis("intensity", "Arithmetic intensity, FLOP per byte", x_domain, "")
    y = canvas.log_axis("rate", "Rate", y_domain, "FLOP/s", alt.Y)
    width, height = 460, 320
    tall = height / math.log(y_domain[1] / y_domain[0])  # pixels of a factor e
    slope = math.atan(tall / (width / math.log(x_domain[1] / x_domain[0])))
    roofs: list[Row] = []
    for name, bandwidth in bandwidths.items():
        start = max(x_domain[0], y_domain[0] / bandwidth)
        roofs += [
            {"roof": name, "intensity": ai, "rate": ai * bandwidth}
            for ai in (start, top / bandwidth)
        ]
    for name, peak in peaks.items():
        roofs += [
            {"roof": name, "intensity": ai, "rate": peak} for ai in (peak / fastest, x_domain[1])
        ]
    lines = draw(roofs).mark_line(color=INK, strokeWidth=1.5, clip=True)
    lines = lines.encode(x=x, y=y, detail="roof:N", tooltip=tips("roof", rate=".3s"))
    starts = {rate: 1.15 * max(x_domain[0], y_domain[0] / rate) for rate in bandwidths.values()}
    sloping = [
        {"intensity": starts[rate], "rate": starts[rate] * rate, "text": words}
        for rate, words in _label_roofs(bandwidths, "B/s", tall * math.cos(slope) / 18).items()
    ]
    level = [
        {"intensity": x_domain[1] * 1.05, "rate": rate, "text": words}
        for rate, words in _label_roofs(peaks, "FLOP/s", tall / 12).items()
    ]
    labels = [
        draw(texts)
        .mark_text(color=INK, fontSize=10, dy=dy, align="left", angle=angle)
        .encode(x=x, y=y, text="text:N")
        for texts, dy, angle in ((sloping, -6, -math.degrees(slope) % 360), (level, 0, 0))
    ]
    # the peaks are written at the right
    legend = alt.Legend(orient="bottom", columns=4, title=None)
    looks = canvas.mark_series("series", unique(row["series"] for row in rows), legend=legend)
    shown = tips("series", intensity=".3s", rate=".3s")
    # an empty legend has no size
    drawn = canvas.draw_points(rows, x, y, looks, shown, size=42) if rows else []
    return LayerChart(layer=[lines, *labels, *drawn]).properties(
        width=width, height=height, title=title
    )


def _label_roofs(rates: Mapping[str, float], unit: str, lines: float) -> dict[float, str]:
    """Labels of roofs by rate; equal or close roofs share one label at the upper roof, so that text
    crosses no line."""
    names: dict[float, list[str]] = {}
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        names.setdefault(rate, []).append(name)
    labels: dict[float, str] = {}
    upper, last = 0.0, math.inf
    for rate, found in names.items():
        words = f"{', '.join(found)} {format_rate(rate, unit)}"
        if lines * math.log(last / rate) < 1.0:  # less than one line of text between two roofs
            labels[upper] += f"; {words}"
        else:
            upper, labels[rate] = rate, words
        last = rate
    return labels


@refuse_misfits(ROWS)
def collective_curves(
    points: Frame, curves: Frame, *, title: str = "Collectives"
) -> alt.HConcatChart:
    """Draw time and bus bandwidth of collectives over message size: measured points and fitted
    curves.

    Parameters
    ----------
    points : frame or list of dict
        Measured rows ``operation``, ``ranks``, ``nbytes`` [B], ``time_s`` and, where known,
        ``q1_s`` and ``q3_s`` [s] and ``algorithm``.
    curves : frame or list of dict
        Fitted rows ``operation``, ``ranks``, ``nbytes`` [B], ``time_s`` [s] and, where known,
        ``algorithm``.
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.HConcatChart
        Two log-log panels side by side. Colours tell operations apart, dashes and shapes the ranks
        and algorithms. For a single operation, colours tell ranks and algorithms apart.
    """
    check_type("title", title, str)
    # logarithmic axes have no place for what takes no time, such as a collective of one rank
    measured, fitted = (
        [row for row in read_rows(frame) if (row["time_s"] or 0) > 0 and (row["nbytes"] or 0) > 0]
        for frame in (points, curves)
    )
    rows, ranged = [*measured, *fitted], any(row.get("q1_s") for row in measured)
    for row in rows:
        named = (f"{row['ranks']} ranks", (row.get("algorithm") or "").replace("_", "-"))
        row["group"] = ", ".join(filter(None, named))
        for time, name in (("time_s", "busbw"), ("q1_s", "busbw_high"), ("q3_s", "busbw_low")):
            row[time] = row.get(time) or row["time_s"]
            row[name] = float(
                bus_bandwidth(
                    row["nbytes"], row[time], ranks=row["ranks"], operation=row["operation"]
                )
            )
    groups = sorted(
        unique(row["group"] for row in rows), key=lambda name: (int(name.split()[0]), name)
    )
    # one colour is enough for each series
    single = min(len(groups), len({row["operation"] for row in rows})) < 2
    for row in rows:
        row["series"] = f"{row['operation']}, {row['group']}" if single else row["operation"]
    legend, dash = alt.Legend(orient="bottom", columns=4, title=None), dict[str, Any]()
    looks = canvas.mark_series("series", unique(row["series"] for row in rows), legend=legend)
    if single:
        dotted, scale = {row["series"] for row in measured}, looks["shape"]["scale"]
        marks = zip(scale["domain"], scale["range"], strict=True)
        scale["range"] = [mark if name in dotted else _LINE for name, mark in marks]
    else:
        looks["shape"] = canvas.mark_series("group", groups, legend=legend)["shape"]
        dashes = alt.Scale(
            domain=groups, range=[list(_DASHES[i % len(_DASHES)]) for i in range(len(groups))]
        )
        lined: dict[str, Any] = {} if measured else {"symbolSize": 300, "symbolType": "stroke"}
        wide = alt.Legend(orient="bottom", columns=4, title=None, **lined)
        dash = {"strokeDash": alt.StrokeDash("group:N", scale=dashes, title=None, legend=wide)}
    x = canvas.log_axis(
        "nbytes", "Message size", canvas.log_domain(row["nbytes"] for row in rows), "B"
    )
    panels = []
    for name, low, high, label, unit in (
        ("time_s", "q1_s", "q3_s", "Time", "s"),
        ("busbw", "busbw_low", "busbw_high", "Bus bandwidth", "B/s"),
    ):
        domain = canvas.log_domain(row[key] for row in rows for key in (name, low, high))
        y = canvas.log_axis(name, label, domain, unit, alt.Y)
        shown = tips("series", "group", **{"nbytes": ".3s", name: ".3s"})
        lines = (
            draw(fitted)
            .mark_line(strokeWidth=2)
            .encode(x=x, y=y, color=looks["color"], tooltip=shown, **dash)
        )
        dots = (
            canvas.draw_points(measured, x, y, looks, shown, {"y": (low, high)}, size=30)
            if measured
            else []
        )
        panels.append(LayerChart(layer=[lines, *dots]).properties(width=310, height=280))
    dots_mean = (
        ""
        if not measured
        else "dots and bars: measured, with quartiles; "
        if ranged
        else "dots: measured; "
    )
    note = f"{dots_mean}{'lines: modelled' if fitted else ''}".removesuffix("; ")
    return HConcatChart(hconcat=panels, title=alt.Title(title, subtitle=note), spacing=36)


@refuse_misfits(ROWS)
def platform_ratios(frame: Frame, *, a: str, b: str) -> alt.LayerChart:
    """Draw by what factor one platform is better than another, for each quantity.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``group``, ``quantity``, ``unit``, ``a``, ``b`` and, where known, ``a_low``,
        ``a_high``, ``b_low``, ``b_high``. Times in seconds are better when they are shorter, other
        quantities when they are larger. Rows without a value for both platforms are left out.
    a, b : str
        Names of the platforms.

    Returns
    -------
    chart : altair.LayerChart
        A dot with an interval for each quantity, on a logarithmic axis; right of the line `b` is
        better.
    """
    check_type("a", a, str)
    check_type("b", b, str)
    rows = [row for row in read_rows(frame) if (row.get("a") or 0) > 0 and (row.get("b") or 0) > 0]
    for row in rows:
        row["times"] = row["a"] / row["b"] if row["unit"] == "s" else row["b"] / row["a"]
        # Both are log-normal and independent: the squares of their half widths in logarithms add
        # up.
        reach = math.exp(
            math.hypot(*(math.log((row.get(f"{x}_high") or row[x]) / row[x]) for x in "ab"))
        )
        row["low"], row["high"] = row["times"] / reach, row["times"] * reach
    domain = canvas.log_domain(
        [*(row[end] for row in rows for end in ("low", "high")), 0.9, 1.1], room=1.1
    )
    x = canvas.log_axis(
        "times", f"left of 1 {a} is better, right of it {b}: so many times", domain, ""
    )
    quantities = [row["quantity"] for row in rows]
    y = alt.Y("quantity:N", title=None, sort=quantities, axis=alt.Axis(labelLimit=320, grid=True))
    rule = draw([{"times": 1.0}]).mark_rule(color=INK, strokeWidth=1).encode(x=x)
    looks = canvas.mark_series("group", unique(row["group"] for row in rows))
    shown = tips("quantity", "unit", a=".3s", b=".3s", times=".3f")
    dots = canvas.draw_points(rows, x, y, looks, shown, {"x": ("low", "high")}, size=60)
    heading = alt.Title(f"{b} against {a}", subtitle="dot: ratio; bar: its 80% interval")
    return LayerChart(layer=[rule, *dots]).properties(width=380, height=alt.Step(18), title=heading)


@refuse_misfits(ROWS)
def tornado_bars(frame: Frame, *, time: float, factor: float, about: str = "") -> alt.LayerChart:
    """Draw the time of an iteration with less and with more of every resource, around its time
    today.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``resource``, ``less_s`` and ``more_s`` [s], the most important resource first.
    time : float
        Time of the iteration today [s].
    factor : float
        How many times more and less of a resource the rows have [-].
    about : str, optional
        A line below the heading.

    Returns
    -------
    chart : altair.LayerChart
        Two bars for every resource, one on each side.
    """
    check_type("about", about, str)
    sides = {"less_s": f"1/{factor:g} as much", "more_s": f"{factor:g} times as much"}
    rows = [
        row | {"now_s": time, "side": side, "time_s": row[end]}
        for row in read_rows(frame)
        for end, side in sides.items()
    ]
    x = canvas.amount_axis(
        "time_s", "Time of an iteration", "s", scale=alt.Scale(zero=False, padding=8)
    )
    y = alt.Y("resource:N", title=None, sort=unique(row["resource"] for row in rows))
    shown = tips("resource", "side", time_s=".4s", now_s=".4s")
    bars = draw(rows).mark_bar(height={"band": 0.8})
    bars = bars.encode(
        x=x, x2="now_s:Q", y=y, color=canvas.colour("side", [*sides.values()]), tooltip=shown
    )
    line = draw([{"now_s": time}]).mark_rule(color=INK).encode(x=alt.X("now_s:Q"))
    heading = alt.Title("What more of each resource brings", subtitle=about or alt.Undefined)
    return LayerChart(layer=[bars, line]).properties(width=460, height=alt.Step(24), title=heading)


def _panel(
    rows: list[Row], ending: str, limit: float | None, *, unit: str, title: str, mark: str
) -> alt.LayerChart:
    """Stacked bars of one unit: `mark` stands beside the longest bar, and a limit that is near is a
    dashed line."""
    keys = [key for key in (rows[0] if rows else ()) if key.endswith(ending) and key != ending]
    names = {key: key.removesuffix(ending).replace("_", " ") for key in keys}
    parts: list[Row] = [
        {"rank": row["rank"], "part": names[key], "value": row[key], "order": place}
        for row in rows
        for place, key in enumerate(keys)
        if (row[key] or 0) > 0
    ]
    first: Row = max(rows, key=lambda row: float(row[ending]), default={"rank": None, ending: 0.0})
    longest = first[ending]
    near = [limit] if limit is not None and limit < 4 * longest else []
    end = 1.22 * max([longest, *near])  # leaves room for the mark
    x = canvas.amount_axis(
        "value", title, unit, ticks=5, scale=alt.Scale(domain=[0, end or 1], nice=False)
    )
    y = alt.Y("rank:O", title="Rank", axis=alt.Axis(labelAngle=0))
    drawn = {part["part"] for part in parts}
    legend = alt.Legend(
        orient="bottom", columns=3, values=[name for name in names.values() if name in drawn]
    )
    # of all parts, so that each keeps its colour
    color = canvas.colour("part", [*names.values()], legend=legend)
    bars = canvas.draw_bars(parts, x, y, color, tips("rank", "part", value=".3s"))
    # not on the dashed line
    beside = max([longest, *(value for value in near if value < 1.2 * longest)])
    words = draw([{"rank": first["rank"], "value": beside, "text": mark}] if longest else [])
    words = words.mark_text(align="left", dx=5, color=INK, fontWeight="bold", fontSize=11)
    words = words.encode(x=alt.X("value:Q"), y=alt.Y("rank:O"), text="text:N")
    line = draw([{"value": value} for value in near]).mark_rule(
        color=INK, strokeDash=[4, 3], strokeWidth=1.5
    )
    layers = [bars, words, line.encode(x=alt.X("value:Q"))]
    return LayerChart(layer=layers).properties(width=330, height=alt.Step(24))


@refuse_misfits(ROWS)
def plan_bars(
    frame: Frame,
    *,
    time: float | None = None,
    capacity: float | None = None,
    notes: Sequence[str] = (),
) -> alt.HConcatChart:
    """Draw seconds and memory of every rank as stacked bars, and mark the slowest and the fullest
    rank.

    Parameters
    ----------
    frame : frame or list of dict
        A row for each ``rank``. Columns that end in ``_s`` are times [s], those that end in
        ``_bytes`` are memory [B]; each is a part of a bar. Other columns are left out.
    time : float, optional
        Time of an iteration, a dashed line: a rank waits from the end of its bar to this line [s].
    capacity : float, optional
        Memory of a rank, a dashed line if the fullest rank takes more than a quarter of it [B].
    notes : sequence of str, optional
        Lines below the heading.

    Returns
    -------
    chart : altair.HConcatChart
        Time on the left, memory on the right.
    """
    rows = read_rows(frame)
    check_type("time", time, float | None)
    check_type("capacity", capacity, float | None)
    for row in rows:
        if "rank" not in row:
            raise ValueError(f"a row is {show(row)}; it must have a rank")
        row |= {
            end: sum(value or 0.0 for key, value in row.items() if key.endswith(end))
            for end in ("_s", "_bytes")
        }
    fullest = max(rows, key=lambda row: row["_bytes"], default=None)
    busy = sorted(rows, key=lambda row: (-row["_s"], row is not fullest))
    kept = (
        [*busy[: _MOST - 1], fullest if fullest in busy[_MOST:] else busy[_MOST - 1]]
        if len(rows) > _MOST
        else rows
    )
    cut = f"{_MOST} of {len(rows)} ranks: the busiest, and the fullest" if len(rows) > _MOST else ""
    kept = sorted(kept, key=lambda row: row["rank"])
    whole = f"; dashed: iteration, {format_time(time)}" if time else ""
    room = f"; a rank has {format_bytes(capacity)}" if capacity else ""
    times = _panel(kept, "_s", time, unit="s", title=f"Time{whole}", mark="slowest")
    held = _panel(kept, "_bytes", capacity, unit="B", title=f"Memory{room}", mark="fullest")
    heading = alt.Title(
        "What every rank does and holds", subtitle=[line for line in (*notes, cut) if line]
    )
    return HConcatChart(hconcat=[times, held], title=heading).resolve_scale(color="independent")
