"""A chart of two platforms: by what factor one is better, quantity by quantity."""

import math

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame, Row
from perfkit.plots.colours import INK, mark_series
from perfkit.plots.theme import LayerChart


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
    rows = []
    for row in canvas.read_rows(frame):
        if canvas.is_above_zero(row.get("a")) and canvas.is_above_zero(row.get("b")):
            rows.append(_add_ratio(row))
    ends = [row[end] for row in rows for end in ("low", "high")]
    domain = canvas.log_domain([*ends, 0.9, 1.1], room=1.1)
    x = canvas.log_axis(
        "times", f"left of 1 {a} is better, right of it {b}: so many times", domain, ""
    )
    quantities = [row["quantity"] for row in rows]
    y = alt.Y("quantity:N", title=None, sort=quantities, axis=alt.Axis(labelLimit=320, grid=True))
    equal = canvas.draw([{"times": 1.0}]).mark_rule(color=INK, strokeWidth=1).encode(x=x)
    looks = mark_series("group", canvas.unique(row["group"] for row in rows))
    shown = canvas.tips("quantity", "unit", a=".3s", b=".3s", times=".3f")
    intervals = canvas.draw_ranges(rows, x, y, looks.color, along="x", low="low", high="high")
    dots = canvas.draw_points(rows, x, y, looks, shown, size=60)
    heading = alt.Title(f"{b} against {a}", subtitle="dot: ratio; bar: its 80% interval")
    chart = LayerChart(layer=[equal, intervals, dots])
    return chart.properties(width=380, height=alt.Step(18), title=heading)


def _add_ratio(row: Row) -> Row:
    """A quantity with how many times better `b` is, and both ends of the interval of that."""
    is_time = row["unit"] == "s"
    times = row["a"] / row["b"] if is_time else row["b"] / row["a"]
    # Both are log-normal and independent: the squares of their half widths in logarithms add up.
    half_width = math.hypot(_find_half_width(row, "a"), _find_half_width(row, "b"))
    factor = math.exp(half_width)
    return row | {"times": times, "low": times / factor, "high": times * factor}


def _find_half_width(row: Row, side: str) -> float:
    """Half width of the interval of one platform, in logarithms; 0 where it is not known [-]."""
    high = row.get(f"{side}_high") or row[side]
    return math.log(high / row[side])
