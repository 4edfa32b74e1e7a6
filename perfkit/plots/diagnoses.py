"""A chart of a diagnosis: measured bus bandwidth beside what is expected."""

import math
from collections.abc import Sequence

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_choice, check_type
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame, Row
from perfkit.plots.colours import INK, PALETTE
from perfkit.plots.theme import HConcatChart, LayerChart

#: Colours and shapes of verdicts; each tells them apart alone.
_VERDICTS = {
    "as expected": (PALETTE[0], "circle"),
    "low, not slow": (PALETTE[4], "diamond"),
    "slow": (PALETTE[1], "triangle-down"),
    "too good": (PALETTE[3], "triangle-up"),
    "not enough to say": (PALETTE[6], "square"),
}
#: Doublings between two ticks of an axis that covers so many at most, so that labels do not overlap.
_DOUBLINGS = ((1, 7), (2, 13), (5, 36))
#: Units of sizes in powers of two, the smallest first.
_UNITS = ((2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB"))


@refuse_misfits(ROWS)
def measured_against_links(
    rows: Frame, *, title: str = "Measured and expected"
) -> alt.HConcatChart:
    """Draw bus bandwidth over message size: measured, expected, and what the link carries.

    Parameters
    ----------
    rows : frame or list of dict
        Measured rows ``run``, ``size_bytes`` [B], ``measured_s`` [s], ``busbw_bytes_per_s`` [B/s],
        ``verdict`` and, where known, ``expected_s``, ``low_s`` and ``high_s`` [s], and ``link_share``
        [-].
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.HConcatChart
        A log-log panel for each run, with the same axes.
    """
    check_type("title", title, str)
    measured = [_complete(row) for row in canvas.read_rows(rows) if _is_drawn(row)]
    for row in measured:
        check_choice("verdict", row["verdict"], _VERDICTS)
    sizes = canvas.log_domain(row["size_bytes"] for row in measured)
    columns = ("busbw_bytes_per_s", "expected", "low", "high", "link")
    rates = canvas.log_domain(row.get(column) for row in measured for column in columns)
    x = _draw_sizes(sizes)
    y = canvas.log_axis("busbw_bytes_per_s", "Bus bandwidth", rates, "B/s", alt.Y)
    panels = []
    for run in canvas.unique(row["run"] for row in measured):
        panels.append(_draw_run(run, [row for row in measured if row["run"] == run], x, y))
    notes = ["points: measured"]
    if any(row.get("expected") for row in measured):
        notes.append("line and band: expected, with its 80% interval")
    if any(row.get("link") for row in measured):
        notes.append("dashed: the link that bounds it")
    heading = alt.Title(title, subtitle="; ".join(notes))
    return HConcatChart(hconcat=panels, title=heading, spacing=30)


def _draw_sizes(sizes: canvas.Domain) -> alt.X:
    """The axis of message sizes, in powers of two as in the table of a diagnosis."""
    x = canvas.log_axis("size_bytes", "Message size", sizes, "B")
    doublings = math.log2(sizes.high / sizes.low)
    every = next((step for step, most in _DOUBLINGS if doublings <= most), 10)
    powers = range(math.ceil(math.log2(sizes.low)), math.floor(math.log2(sizes.high)) + 1)
    ticks = [2**power for power in powers if power >= 0 and power % every == 0]
    if not ticks:
        return x
    return x.axis(values=ticks, labelExpr=_write_size("datum.value"))


def _write_size(value: str) -> str:
    """A Vega expression that writes a size [B], such as ``datum.value``, as in ``32 KiB``."""
    expression = f"{value} + ' B'"
    for unit, name in _UNITS:
        scaled = f"format({value} / {unit}, '.4~g') + ' {name}'"
        expression = f"{value} < {unit} ? {expression} : {scaled}"
    return expression


def _is_drawn(row: Row) -> bool:
    """Whether a row has a place on logarithmic axes."""
    return all(
        canvas.is_above_zero(row[name])
        for name in ("size_bytes", "measured_s", "busbw_bytes_per_s")
    )


def _complete(row: Row) -> Row:
    """A row with the bandwidths of its expected times, and of its link."""
    moved = row["busbw_bytes_per_s"] * row["measured_s"]
    for time, rate in (("expected_s", "expected"), ("high_s", "low"), ("low_s", "high")):
        value = row.get(time)
        row[rate] = moved / value if canvas.is_above_zero(value) else None
    share = row.get("link_share")
    row["link"] = row["busbw_bytes_per_s"] / share if canvas.is_above_zero(share) else None
    return row


def _draw_run(run: str, rows: Sequence[Row], x: alt.X, y: alt.Y) -> alt.LayerChart:
    """One panel: the band, the expected line, the link, and points on top."""
    layers = []
    with_band = [row for row in rows if row["low"] and row["high"]]
    if with_band:
        layers.append(
            canvas.draw_band(with_band, x, y, low="low", high="high", color=PALETTE[2], opacity=0.2)
        )
    expected = [row for row in rows if row["expected"]]
    if expected:
        height = alt.Y("expected:Q", scale=y["scale"])
        line = canvas.draw(expected).mark_line(color=PALETTE[2], strokeWidth=1.5)
        layers.append(line.encode(x=x, y=height))
    links = [row for row in rows if row["link"]]
    if links:
        height = alt.Y("link:Q", scale=y["scale"])
        rule = canvas.draw(links).mark_line(color=INK, strokeDash=[4, 3], strokeWidth=1)
        layers.append(rule.encode(x=x, y=height))
    names = list(_VERDICTS)
    color = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=names, range=[look[0] for look in _VERDICTS.values()]),
        legend=alt.Legend(orient="bottom", title=None),
    )
    shape = alt.Shape(
        "verdict:N",
        scale=alt.Scale(domain=names, range=[look[1] for look in _VERDICTS.values()]),
        legend=alt.Legend(orient="bottom", title=None),
    )
    points = canvas.draw(rows).mark_point(filled=True, opacity=0.9, size=34)
    points = points.transform_calculate(
        size=_write_size("datum.size_bytes"),
        busbw=canvas.label_si("B/s", "datum.busbw_bytes_per_s"),
        time=canvas.label_si("s", "datum.measured_s"),
    )
    shown = canvas.tips("verdict", "size", "busbw", "time")
    layers.append(points.encode(x=x, y=y, color=color, shape=shape, tooltip=shown))
    return LayerChart(layer=layers).properties(width=330, height=280, title=run)
