"""Charts of machines: kernels under their roofs, collectives and kernels over size, one platform against another."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import altair as alt

from perfkit.models.collectives import bus_bandwidth
from perfkit.plots.canvas import (
    INK,
    Frame,
    Row,
    colour,
    draw,
    layer,
    log_axis,
    log_domain,
    mark_series,
    order,
    read_rows,
    tips,
)
from perfkit.units import format_rate

__all__ = ["collective_curves", "kernel_curves", "platform_ratios", "roofline_chart"]

_DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 2, 1, 2, 1, 2], [12, 4])
_LINE, _ROOM = 12, 18  # pixels of a line of text, and between two parallel roofs that leave room for one


def roofline_chart(
    points: Frame, peaks: Mapping[str, float], bandwidths: Mapping[str, float], *, title: str = "Roofline"
) -> alt.LayerChart:
    """Draw kernels under the roofs of their device.

    Parameters
    ----------
    points : frame or list of dict
        Rows ``kind`` (kernel class), ``flops`` [FLOP], ``nbytes`` [B], ``time_s`` [s] and, where kernels of several
        number formats are shown, ``dtype``; rows without FLOP are left out.
    peaks : mapping of str to float
        Peak rate by number format, dense [FLOP/s].
    bandwidths : mapping of str to float
        Bandwidth by memory level [B/s].
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        Log-log chart: a sloping roof per memory level, a level one per peak, a point per kernel.

    Raises
    ------
    ValueError
        Where there is no peak or no bandwidth.
    """
    if not peaks or not bandwidths:
        raise ValueError("roofline_chart needs at least one peak and one bandwidth; pass peaks={'fp32': ...}")
    rows = [row for row in read_rows(points) if row.get("flops") and row.get("nbytes") and row.get("time_s")]
    for row in rows:
        row |= {"intensity": row["flops"] / row["nbytes"], "rate": row["flops"] / row["time_s"]}
        row["series"] = f"{row['kind']}, {row['dtype']}" if row.get("dtype") else row["kind"]
    top, fastest, slowest = max(peaks.values()), max(bandwidths.values()), min(bandwidths.values())
    x_domain = log_domain([min(0.1, top / fastest / 8), top / slowest * 8, *(row["intensity"] for row in rows)])
    y_domain = log_domain([x_domain[0] * slowest * 2, top * 1.6, *(row["rate"] for row in rows)], room=1.6)
    x = log_axis("intensity", "Arithmetic intensity, FLOP per byte", x_domain, "")
    y = log_axis("rate", "Rate", y_domain, "FLOP/s", alt.Y)
    width, height = 460, 320
    tall = height / math.log(y_domain[1] / y_domain[0])  # pixels of a factor e
    slope = math.atan(tall / (width / math.log(x_domain[1] / x_domain[0])))
    roofs: list[Row] = []
    for name, bandwidth in bandwidths.items():
        start = max(x_domain[0], y_domain[0] / bandwidth)
        roofs += [{"roof": name, "intensity": ai, "rate": ai * bandwidth} for ai in (start, top / bandwidth)]
    for name, peak in peaks.items():
        roofs += [{"roof": name, "intensity": ai, "rate": peak} for ai in (peak / fastest, x_domain[1])]
    lines = draw(roofs).mark_line(color=INK, strokeWidth=1.5, clip=True).encode(x=x, y=y, detail="roof:N")
    texts: list[tuple[float, float, str, bool | None, float]] = []
    for rate, words, below in _label_roofs(bandwidths, "B/s", tall * math.cos(slope)):
        ai = max(x_domain[0], y_domain[0] / rate) * 1.15
        texts.append((ai, ai * rate, words, below, -math.degrees(slope) % 360))
    for rate, words, _ in _label_roofs(peaks, "FLOP/s", tall, aside=True):
        texts.append((x_domain[1] * 1.05, rate, words, None, 0.0))
    labels = [
        draw([{"intensity": ai, "rate": rate, "text": words}])
        .mark_text(color=INK, fontSize=10, dy={None: 0, True: 11, False: -6}[below], align="left")
        .encode(x=x, y=y, text="text:N", angle=alt.value(angle))
        for ai, rate, words, below, angle in texts
    ]
    legend = alt.Legend(orient="bottom", columns=4, title=None)  # the peaks are written at the right
    looks = mark_series("series", order(row["series"] for row in rows), title=None, legend=legend)
    drawn = draw(rows).mark_point(size=42, filled=True, opacity=0.85)
    drawn = drawn.encode(x=x, y=y, **looks, tooltip=tips("series", intensity=".3s", rate=".3s"))
    return layer(lines, *labels, drawn).properties(width=width, height=height, title=title)


def _label_roofs(
    rates: Mapping[str, float], unit: str, pixels: float, *, aside: bool = False
) -> Iterator[tuple[float, str, bool]]:
    """Label roofs so that no label crosses another roof: (rate, words, whether below the line).

    Equal roofs share a label. Where one runs close under another, the label of the upper one stands above both and
    names all that are close but the last, whose label goes below it where there is room and none stands `aside`.
    """
    names: dict[float, list[str]] = {}
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        names.setdefault(rate, []).append(name)
    groups: list[list[float]] = []
    for rate in names:
        if groups and pixels * math.log(groups[-1][-1] / rate) < (_LINE if aside else _ROOM):
            groups[-1].append(rate)
        else:
            groups.append([rate])
    words = {rate: f"{', '.join(found)} {format_rate(rate, unit)}" for rate, found in names.items()}
    room = [pixels * math.log(upper[-1] / lower[0]) for upper, lower in pairwise(groups)]
    for group, below in zip(groups, [*room, math.inf], strict=True):
        apart = len(group) > 1 and below > 2 * _ROOM and not aside
        yield group[0], "; ".join(words[rate] for rate in (group[:-1] if apart else group)), False
        if apart:
            yield group[-1], words[group[-1]], True


def collective_curves(points: Frame, curves: Frame, *, title: str = "Collectives") -> alt.HConcatChart:
    """Draw time and bus bandwidth of collectives over message size: measured quartiles and fitted curves.

    Parameters
    ----------
    points : frame or list of dict
        Measured rows ``operation``, ``ranks``, ``nbytes`` [B], ``time_s`` and, where known, ``q1_s`` and ``q3_s`` [s]
        and ``way`` (the algorithm, or ``rail``).
    curves : frame or list of dict
        Fitted rows ``operation``, ``ranks``, ``nbytes`` [B], ``time_s`` [s] and, where known, ``way``.
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.HConcatChart
        Two log-log panels side by side: a colour per operation; dashes and shapes by number of ranks and way. Of a
        single operation, ranks and ways have the colours.
    """

    def rate(row: Row, time: float) -> float:
        return float(bus_bandwidth(row["nbytes"], time, ranks=row["ranks"], operation=row["operation"]))

    measured, fitted = (read_rows(frame) for frame in (points, curves))
    for row in (*measured, *fitted):
        row["group"] = f"{row['ranks']} ranks" + (f", {row['way'].replace('_', '-')}" if row.get("way") else "")
    rows = [*measured, *fitted]
    operations, groups = ({row[key] for row in rows} for key in ("operation", "group"))
    rows.sort(key=lambda row: (row["ranks"], row.get("way") or ""))
    for row in rows:
        both = f"{row['operation']}, {row['group']}"
        row["series"] = both if min(len(operations), len(groups)) < 2 else row["operation"]
        row["group"] = row["group"] if row["series"] != both else ""
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
    measured, fitted = (
        [{**row, "series": row["kernel"], "group": ""} for row in read_rows(frame)] for frame in (points, curves)
    )
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
    ranged = any(row.get("q1_s") for row in measured)
    for row in rows:
        row["q1_s"], row["q3_s"] = row.get("q1_s") or row["time_s"], row.get("q3_s") or row["time_s"]
        for time, name in (("time_s", field), ("q1_s", f"{field}_high"), ("q3_s", f"{field}_low")):
            row[name] = compute(row, row[time])
    looks, dash = _tell_apart(rows, bool(measured))
    sizes = log_domain(row["nbytes"] for row in rows)
    panels = []
    for name, low, high, label, unit in (
        ("time_s", "q1_s", "q3_s", "Time", "s"),
        (field, f"{field}_low", f"{field}_high", titles[1], "B/s"),
    ):
        domain = log_domain(row[key] for row in rows for key in (name, low, high))
        x, y = log_axis("nbytes", titles[0], sizes, "B"), log_axis(name, label, domain, unit, alt.Y)
        lines = draw(fitted).mark_line(strokeWidth=2).encode(x=x, y=y, color=looks["color"], **dash)
        marks = draw(measured).encode(x=x, color=looks["color"])
        spread = alt.Y(f"{low}:Q", scale=y["scale"])
        bars = marks.mark_rule(strokeWidth=1.5, opacity=0.6).encode(y=spread, y2=f"{high}:Q")
        shown = tips("series", "group", **{"nbytes": ".3s", name: ".3s"})
        dots = marks.mark_point(size=30, filled=True, opacity=0.9).encode(y=y, shape=looks["shape"], tooltip=shown)
        panels.append(layer(lines, *([bars, dots] if measured else [])).properties(width=310, height=280))
    dots_mean = "" if not measured else "dots and bars: measured, with quartiles; " if ranged else "dots: measured; "
    heading = alt.Title(title, subtitle=f"{dots_mean}lines: modelled")
    return alt.hconcat(*panels, title=heading, spacing=36)


def _tell_apart(rows: Sequence[Row], dotted: bool) -> tuple[Row, Row]:
    """Channels of points and of lines: colour by series; shape and dashes by group, or by series where all are one."""
    legend = alt.Legend(orient="bottom", columns=4, title=None)
    series, groups = (order(row[key] for row in rows) for key in ("series", "group"))
    looks = mark_series("series", series, title=None, legend=legend)
    if len(groups) < 2:
        return looks, {}
    groups.sort(key=lambda name: (int(name.split()[0]), name))
    dashes = alt.Scale(domain=groups, range=[list(_DASHES[i % len(_DASHES)]) for i in range(len(groups))])
    wide = alt.Legend(orient="bottom", columns=4, title=None, symbolSize=300, symbolType="stroke")
    looks = {
        "color": colour("series", series, title=None, legend=legend),
        "shape": mark_series("group", groups, title=None, legend=legend)["shape"],
    }
    return looks, {"strokeDash": alt.StrokeDash("group:N", scale=dashes, title=None, legend=legend if dotted else wide)}


def platform_ratios(frame: Frame, *, a: str, b: str, title: str = "") -> alt.LayerChart:
    """Draw how many times better one platform is than another, quantity by quantity.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``group``, ``quantity``, ``unit``, ``a``, ``b`` and, where known, ``a_low``, ``a_high``, ``b_low``,
        ``b_high``; times in seconds count the shorter the better, all else the more the better. Rows that one platform
        lacks are left out.
    a, b : str
        Names of the platforms.
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        A dot per quantity on a logarithmic axis, with the interval of either side; right of the line `b` is better.
    """
    rows = [row for row in read_rows(frame) if (row.get("a") or 0) > 0 and (row.get("b") or 0) > 0]
    for row in rows:
        row["times"] = row["a"] / row["b"] if row["unit"] == "s" else row["b"] / row["a"]
        # Log-normal and independent: the half widths of the logarithms add as squares.
        reach = math.exp(math.hypot(*(math.log((row.get(f"{x}_high") or row[x]) / row[x]) for x in "ab")))
        row["low"], row["high"] = row["times"] / reach, row["times"] * reach
    low, high = log_domain([*(row[end] for row in rows for end in ("low", "high")), 0.9, 1.1], room=1.1)
    steps = (1, 1.5, 2, 3, 5, 7) if high / low < 10 else (1, 2, 5) if high / low < 300 else (1,)
    ticks = [float(f"{step}e{power}") for power in range(-9, 10) for step in steps]
    axis = alt.Axis(
        values=[tick for tick in ticks if low <= tick <= high], labelExpr="format(datum.value, '~g') + ' ×'"
    )
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    x = alt.X("times:Q", title=f"times better: left {a}, right {b}", scale=scale, axis=axis)
    y = alt.Y(
        "quantity:N", title=None, sort=[row["quantity"] for row in rows], axis=alt.Axis(labelLimit=320, grid=True)
    )
    looks = mark_series("group", order(row["group"] for row in rows), title=None)
    base = draw(rows).encode(y=y, color=looks["color"])
    rule = draw([{"times": 1.0}]).mark_rule(color=INK, strokeWidth=1).encode(x=x)
    spans = base.mark_rule(strokeWidth=2, opacity=0.5).encode(x=alt.X("low:Q", scale=scale), x2="high:Q")
    dots = base.mark_point(size=60, filled=True, opacity=1).encode(
        x=x, shape=looks["shape"], tooltip=tips("quantity", "unit", a=".3s", b=".3s", times=".3f")
    )
    heading = alt.Title(title or f"{b} against {a}", subtitle="dot: ratio; bar: its 80% interval")
    return layer(rule, spans, dots).properties(width=380, height=alt.Step(18), title=heading)
