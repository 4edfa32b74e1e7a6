"""A chart of a sweep: one column over another, with a line for each series."""

from collections.abc import Sequence
from typing import NamedTuple

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.results import find_unit, name_column
from perfkit.ground.units import check_type
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame, Row
from perfkit.plots.colours import mark_series
from perfkit.plots.theme import LayerChart

#: Columns that are shares, from 0 to 1.
_SHARES = ("efficiency", "kept", "exposed", "mfu")
#: Columns of text that the pointer shows where a sweep has them.
_TEXTS = ("strategy", "bottleneck")
#: Most values that are all labelled on an axis [-].
_MOST_LABELS = 10


class _Quantity(NamedTuple):
    """What a column holds."""

    label: str
    unit: str


_QUANTITIES = {
    "time_s": _Quantity("Time of an iteration", "s"),
    "needs_bytes": _Quantity("Memory of the fullest rank", "B"),
}


#: Names of columns by those of frames that were saved before names ended with units.
_FORMER_NAMES = {
    "time": "time_s",
    "low": "low_s",
    "high": "high_s",
    "needs": "needs_bytes",
}


@refuse_misfits(ROWS)
def sweep_lines(
    frame: Frame,
    *,
    x: str,
    y: str = "time_s",
    series: Sequence[str] = (),
    title: str = "",
    about: str = "",
) -> LayerChart:
    """Draw one column of a sweep over another.

    Parameters
    ----------
    frame : frame or list of dict
        A row for each configuration. A ``time_s`` may have ends of its interval, ``low_s`` and
        ``high_s`` [s]. Frames with the former names ``time``, ``low``, ``high`` and ``needs`` are drawn, too.
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
    read = canvas.read_rows(frame)
    x, y = _find_column(x, read), _find_column(y, read)
    rows = [row for row in map(_rename_columns, read) if canvas.is_above_zero(row.get(y))]
    for row in rows:
        row["series"] = _name_series(row, series)
        if isinstance(row[x], list):  # such as the rows of all tables
            row[x] = ", ".join(f"{value}" for value in row[x])
    across = _make_x_axis(rows, x)
    tall = _make_y_axis(rows, y)
    names = canvas.unique(row["series"] for row in rows)
    legend = alt.Undefined if series else None
    looks = mark_series("series", names, legend=legend, title=", ".join(series))
    texts = [name for name in (x, *series, *_TEXTS) if any(name in row for row in rows)]
    shown = canvas.tips(*texts, **{y: ".3s"})
    lines = canvas.draw(rows).mark_line(strokeWidth=2)
    layers = [lines.encode(x=across, y=tall, color=looks.color)]
    if y == "time_s":
        intervals = canvas.draw_ranges(
            rows, across, tall, looks.color, along="y", low="low_s", high="high_s"
        )
        layers.append(intervals)
    layers.append(canvas.draw_points(rows, across, tall, looks, shown))
    heading = alt.Title(title, subtitle=about) if about else title
    return LayerChart(layer=layers).properties(width=460, height=300, title=heading)


def _find_column(name: str, rows: Sequence[Row]) -> str:
    """The name of a column today; of a column of the frame that has no other name, its own."""
    today = _FORMER_NAMES.get(name, name)
    is_there = any(today in _rename_columns(row) for row in rows)
    return today if is_there else name


def _rename_columns(row: Row) -> Row:
    """A row whose columns have the names of today."""
    renamed = {}
    for name, value in row.items():
        renamed[_FORMER_NAMES.get(name, name)] = value
    return renamed


def _name_series(row: Row, columns: Sequence[str]) -> str:
    """The line that a row belongs to, such as ``dtype bf16, ranks 8``."""
    if len(columns) > 1:
        values = [f"{column} {row[column]}" for column in columns]
    else:
        values = [f"{row[column]}" for column in columns]
    return ", ".join(values)


def _describe_column(column: str) -> _Quantity:
    """Label and unit of a column: those of its name, such as ``lookup_s``."""
    if column in _QUANTITIES:
        return _QUANTITIES[column]
    return _Quantity(name_column(column), find_unit(column) or "")


def _make_x_axis(rows: Sequence[Row], column: str) -> alt.X:
    """A logarithmic axis for numbers, whose few values are its ticks; names stand side by side."""
    quantity = _describe_column(column)
    values = canvas.unique(row[column] for row in rows)
    if not all(isinstance(value, int | float) for value in values):
        return alt.X(f"{column}:N", sort=None, title=quantity.label)
    domain = canvas.log_domain(values)
    axis: alt.X = canvas.log_axis(column, quantity.label, domain, quantity.unit)
    if len(values) <= _MOST_LABELS and not quantity.unit:
        axis["axis"]["values"] = values
    return axis


def _make_y_axis(rows: Sequence[Row], column: str) -> alt.Y:
    """A linear axis from 0 to 1 for shares, a logarithmic one for others, with room for
    intervals."""
    quantity = _describe_column(column)
    columns = ("time_s", "low_s", "high_s") if column == "time_s" else (column,)
    ends = [row[name] for row in rows for name in columns if row.get(name)]
    if column in _SHARES:
        scale = alt.Scale(domain=[0, max([1.0, *ends])])
        axis = alt.Axis(format="%")
        return alt.Y(f"{column}:Q", title=quantity.label, scale=scale, axis=axis)
    domain = canvas.log_domain(ends)
    axis_of_amounts: alt.Y = canvas.log_axis(column, quantity.label, domain, quantity.unit, alt.Y)
    return axis_of_amounts
