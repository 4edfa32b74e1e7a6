"""A chart of collectives: time and bus bandwidth over message size."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type
from perfkit.models.collectives import bus_bandwidth
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame, Row
from perfkit.plots.colours import SeriesLooks, mark_series
from perfkit.plots.theme import HConcatChart, LayerChart

#: Shape of a line, which the legend shows for series without points.
_LINE = "M-1.4,-0.2H1.4V0.2H-1.4Z"
_DASHES = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 2, 1, 2, 1, 2], [12, 4])


class _Quantity(NamedTuple):
    """What a panel shows: columns of the value and of the ends of its range."""

    column: str
    low: str
    high: str
    label: str
    unit: str


_TIME = _Quantity("time_s", "q1_s", "q3_s", "Time", "s")
_BANDWIDTH = _Quantity("busbw", "busbw_low", "busbw_high", "Bus bandwidth", "B/s")
#: Columns of times, and of the bus bandwidth that follows from each: the first quartile of the time
#: gives the highest.
_BANDWIDTHS = {"time_s": "busbw", "q1_s": "busbw_high", "q3_s": "busbw_low"}


class _Curves(NamedTuple):
    """Rows to draw, and how their series look."""

    measured: list[Row]
    fitted: list[Row]
    looks: SeriesLooks
    dash: alt.StrokeDash | None


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
    measured = _read_times(points)
    has_quartiles = any(row.get("q1_s") for row in measured)
    fitted = _read_times(curves)
    for row in (*measured, *fitted):
        _add_bandwidths(row)
    drawn = _choose_looks(measured, fitted)
    sizes = canvas.log_domain(row["nbytes"] for row in (*measured, *fitted))
    x = canvas.log_axis("nbytes", "Message size", sizes, "B")
    panels = [_draw_panel(drawn, quantity, x) for quantity in (_TIME, _BANDWIDTH)]
    notes = []
    if has_quartiles:
        notes.append("dots and bars: measured, with quartiles")
    elif measured:
        notes.append("dots: measured")
    if fitted:
        notes.append("lines: modelled")
    heading = alt.Title(title, subtitle="; ".join(notes))
    return HConcatChart(hconcat=panels, title=heading, spacing=36)


# -- rows


def _read_times(frame: Frame) -> list[Row]:
    """Rows with a place on logarithmic axes: a collective of one rank takes no time."""
    rows = []
    for row in canvas.read_rows(frame):
        if canvas.is_above_zero(row["time_s"]) and canvas.is_above_zero(row["nbytes"]):
            row["group"] = _name_group(row)
            rows.append(row)
    return rows


def _name_group(row: Row) -> str:
    """Ranks and, where it is known, the algorithm, such as ``8 ranks, in-network``."""
    ranks = f"{row['ranks']} ranks"
    algorithm = row.get("algorithm")
    return f"{ranks}, {algorithm.replace('_', '-')}" if algorithm else ranks


def _add_bandwidths(row: Row) -> None:
    """Complete the quartiles of a row, and add its bus bandwidths."""
    for time, bandwidth in _BANDWIDTHS.items():
        row[time] = row.get(time) or row["time_s"]
        value = bus_bandwidth(
            row["nbytes"], row[time], ranks=row["ranks"], operation=row["operation"]
        )
        row[bandwidth] = float(value)


# -- looks


def _choose_looks(measured: list[Row], fitted: list[Row]) -> _Curves:
    """Name the series, and choose what tells them apart."""
    rows = [*measured, *fitted]
    groups = canvas.unique(row["group"] for row in rows)
    groups.sort(key=_place_group)
    operations = {row["operation"] for row in rows}
    # then a colour for each series is enough
    is_simple = len(groups) < 2 or len(operations) < 2
    for row in rows:
        if is_simple:
            row["series"] = f"{row['operation']}, {row['group']}"
        else:
            row["series"] = row["operation"]
    legend = alt.Legend(orient="bottom", columns=4, title=None)
    looks = mark_series("series", canvas.unique(row["series"] for row in rows), legend=legend)
    if is_simple:
        _show_lines_in_legend(looks, {row["series"] for row in measured})
        return _Curves(measured, fitted, looks, dash=None)
    shape = mark_series("group", groups, legend=legend).shape
    dash = _make_dashes(groups, has_points=bool(measured))
    return _Curves(measured, fitted, looks._replace(shape=shape), dash)


def _place_group(name: str) -> tuple[int, str]:
    """By ranks, then by algorithm."""
    ranks = int(name.split()[0])
    return ranks, name


def _show_lines_in_legend(looks: SeriesLooks, with_points: set[str]) -> None:
    """Let the legend show a line for series without points."""
    scale = looks.shape["scale"]
    shapes = zip(scale["domain"], scale["range"], strict=True)
    scale["range"] = [shape if series in with_points else _LINE for series, shape in shapes]


def _make_dashes(groups: Sequence[str], *, has_points: bool) -> alt.StrokeDash:
    """A dash for each group; without points, the legend shows it as a line."""
    dashes = [list(_DASHES[number % len(_DASHES)]) for number in range(len(groups))]
    symbols: dict[str, Any] = {}
    if not has_points:
        symbols = {"symbolSize": 300, "symbolType": "stroke"}
    legend = alt.Legend(orient="bottom", columns=4, title=None, **symbols)
    scale = alt.Scale(domain=list(groups), range=dashes)
    return alt.StrokeDash("group:N", scale=scale, title=None, legend=legend)


# -- marks


def _draw_panel(curves: _Curves, quantity: _Quantity, x: alt.X) -> alt.LayerChart:
    """One quantity over message size: lines, then ranges and points where some are measured."""
    columns = (quantity.column, quantity.low, quantity.high)
    rows = (*curves.measured, *curves.fitted)
    domain = canvas.log_domain(row[column] for row in rows for column in columns)
    y = canvas.log_axis(quantity.column, quantity.label, domain, quantity.unit, alt.Y)
    shown = canvas.tips("series", "group", **{"nbytes": ".3s", quantity.column: ".3s"})
    color = curves.looks.color
    lines = canvas.draw(curves.fitted).mark_line(strokeWidth=2)
    lines = lines.encode(x=x, y=y, color=color, tooltip=shown)
    if curves.dash is not None:
        lines = lines.encode(strokeDash=curves.dash)
    layers = [lines]
    if curves.measured:
        ranges = canvas.draw_ranges(
            curves.measured, x, y, color, along="y", low=quantity.low, high=quantity.high
        )
        dots = canvas.draw_points(curves.measured, x, y, curves.looks, shown, size=30)
        layers += [ranges, dots]
    return LayerChart(layer=layers).properties(width=310, height=280)
