"""A chart of memory over time: stacked areas of its uses, the peak, and what the device has."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_positive, check_type, format_bytes
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame, Row
from perfkit.plots.colours import INK, colour
from perfkit.plots.theme import LayerChart

#: Columns of uses and of the sum of all end so.
_ENDING = "_bytes"
_TOTAL = f"total{_ENDING}"
#: About the most moments that are drawn [-].
_MOMENTS = 300


class _Line(NamedTuple):
    """A line across the chart: its words, and where it is [B]."""

    words: str
    nbytes: float


@refuse_misfits(ROWS)
def memory_areas(
    frame: Frame,
    *,
    capacity: float | None = None,
    reserve: float | None = None,
    about: str = "",
) -> LayerChart:
    """Draw the memory of a rank through one iteration as stacked areas, one for each use, with its
    peak.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``time_s`` [s], a column for each use whose name ends with ``_bytes``, and
        ``total_bytes`` [B]. Of many moments the fullest of each slot of time are drawn.
    capacity : float, optional
        Memory of the device, a line [B].
    reserve : float, optional
        What a process takes beside its peak, a line above it [B].
    about : str, optional
        A line below the heading.

    Returns
    -------
    chart : altair.LayerChart
        Areas over time.
    """
    check_type("about", about, str)
    rows = canvas.read_rows(frame)
    layers = [_stack_uses(rows)]
    peak = max(rows, key=lambda row: row[_TOTAL], default=None)
    if peak is not None:
        layers += _mark_peak(peak, rows[-1]["time_s"])
    for line in _list_lines(peak, capacity, reserve):
        layers += _draw_line(line)
    heading = alt.Title("Memory through one iteration", subtitle=about or alt.Undefined)
    return LayerChart(layer=layers).properties(width=620, height=260, title=heading)


def _stack_uses(rows: Sequence[Row]) -> alt.Chart:
    """An area for each use that is not always 0, one above the other."""
    uses = [
        name
        for name in (rows[0] if rows else ())
        if name.endswith(_ENDING) and name != _TOTAL and any(row[name] for row in rows)
    ]
    names = {use: use.removesuffix(_ENDING) for use in uses}
    areas = []
    for row in _choose_moments(rows):
        for order, use in enumerate(uses):
            areas.append(
                {"time_s": row["time_s"], "use": names[use], "nbytes": row[use], "order": order}
            )
    x = canvas.amount_axis("time_s", "Time since the iteration began", "s", ticks=8)
    axis = alt.Axis(labelExpr=canvas.label_si("B"), tickCount=6)
    y = alt.Y("nbytes:Q", title="Memory of the fullest rank", axis=axis, stack="zero")
    most = {names[use]: max(row[use] for row in rows) for use in uses}
    legend = alt.Legend(labelExpr=_say_most(most))
    color = colour("use", list(names.values()), title="Use, at most", legend=legend)
    chart = canvas.draw(areas).mark_area(interpolate="step-after", opacity=0.85)
    return chart.encode(x=x, y=y, color=color, order=alt.Order("order:Q"))


def _say_most(most: Mapping[str, float]) -> str:
    """The words of a legend: each use with the most that it holds, so that those too small to be seen are
    known to be there [B]."""
    words = {use: f"{use} {format_bytes(nbytes)}" for use, nbytes in most.items()}
    return f"{json.dumps(words)}[datum.label]"


def _list_lines(peak: Row | None, capacity: float | None, reserve: float | None) -> list[_Line]:
    """The peak with its reserve, and the memory of the device, where they are known."""
    lines = []
    if peak is not None and reserve is not None:
        reserved = peak[_TOTAL] + check_positive("reserve", reserve, zero=True)
        lines.append(_Line(f"with its reserve {format_bytes(reserved)}", reserved))
    if capacity is not None:
        nbytes = check_positive("capacity", capacity)
        lines.append(_Line(f"device {format_bytes(nbytes)}", nbytes))
    return lines


def _choose_moments(rows: Sequence[Row]) -> list[Row]:
    """The fullest moment of each slot of time, or of each time if they are few; areas are stacked at
    each time once."""
    if not rows:
        return []
    begin, end = rows[0]["time_s"], rows[-1]["time_s"]
    slot = (end - begin) / _MOMENTS
    fullest: dict[float, Row] = {}
    for row in rows:
        place = row["time_s"]
        if len(rows) > _MOMENTS and begin < place < end:
            place = begin + slot * ((place - begin) // slot + 0.5)
        if place not in fullest or row[_TOTAL] > fullest[place][_TOTAL]:
            fullest[place] = row
    return [fullest[place] for place in sorted(fullest)]


def _mark_peak(peak: Row, end: float) -> list[alt.Chart]:
    """A point at the fullest moment with its words, on the side of it that has more room."""
    row = {
        "time_s": peak["time_s"],
        "nbytes": peak[_TOTAL],
        "what": f"peak {format_bytes(peak[_TOTAL])}",
    }
    tips = canvas.tips("what", time_s=".3s")
    point = canvas.draw([row]).mark_point(filled=True, color=INK, size=60, opacity=1.0)
    is_early = 2.0 * peak["time_s"] < end
    words = canvas.draw([row]).mark_text(
        align="left" if is_early else "right", dx=8 if is_early else -8, color=INK
    )
    return [
        point.encode(x="time_s:Q", y="nbytes:Q", tooltip=tips),
        words.encode(x="time_s:Q", y="nbytes:Q", text="what:N"),
    ]


def _draw_line(line: _Line) -> list[alt.Chart]:
    """A dashed line across the chart with its words."""
    rows = [{"nbytes": line.nbytes, "what": line.words}]
    rule = canvas.draw(rows).mark_rule(color=INK, strokeDash=[5, 4]).encode(y="nbytes:Q")
    words = canvas.draw(rows).mark_text(align="left", baseline="bottom", dx=4, dy=-2, color=INK)
    return [rule, words.encode(x=alt.value(0), y="nbytes:Q", text="what:N")]
