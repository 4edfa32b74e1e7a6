"""A chart of ranks: the time and the memory of each, as stacked bars side by side."""

from collections.abc import Sequence
from typing import NamedTuple

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type, format_bytes, format_time, show
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame, Row
from perfkit.plots.colours import INK, colour
from perfkit.plots.theme import HConcatChart, LayerChart

#: Most ranks that are drawn: the busiest ones, and the one with the fullest memory.
_MOST = 32


class _Quantity(NamedTuple):
    """What one side of the chart shows, and what is marked there."""

    ending: str  # of its columns; the column of this name is the sum of them
    unit: str
    title: str
    limit: float | None  # a dashed line, in the unit
    mark: str  # stands beside the longest bar


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
    check_type("time", time, float | None)
    check_type("capacity", capacity, float | None)
    rows = _read_ranks(frame)
    drawn = _choose_ranks(rows)
    title_of_times = f"Time; dashed: iteration, {format_time(time)}" if time else "Time"
    title_of_memory = "Memory"
    if capacity:
        title_of_memory = f"Memory; a rank has {format_bytes(capacity)}"
    times = _Quantity("_s", "s", title_of_times, time, mark="slowest")
    memory = _Quantity("_bytes", "B", title_of_memory, capacity, mark="fullest")
    lines = [note for note in notes if note]
    if len(drawn) < len(rows):
        lines.append(f"{len(drawn)} of {len(rows)} ranks: the busiest, and the fullest")
    heading = alt.Title("What every rank does and holds", subtitle=lines)
    panels = [_draw_panel(drawn, times), _draw_panel(drawn, memory)]
    return HConcatChart(hconcat=panels, title=heading).resolve_scale(color="independent")


# -- rows


def _read_ranks(frame: Frame) -> list[Row]:
    """Rows with the sums of their times and of their memory, in columns ``_s`` and ``_bytes``."""
    rows = canvas.read_rows(frame)
    for row in rows:
        if "rank" not in row:
            raise ValueError(f"a row is {show(row)}; it must have a rank")
        time = _sum_columns(row, "_s")
        memory = _sum_columns(row, "_bytes")
        row["_s"] = time
        row["_bytes"] = memory
    return rows


def _sum_columns(row: Row, ending: str) -> float:
    return sum(value or 0.0 for column, value in row.items() if column.endswith(ending))


def _choose_ranks(rows: Sequence[Row]) -> list[Row]:
    """At most `_MOST` ranks in their order: the busiest, and the one with the fullest memory."""
    chosen = list(rows)
    if len(rows) > _MOST:
        fullest = max(rows, key=lambda row: row["_bytes"])
        # among equally busy ones, the fullest is the first
        busiest = sorted(rows, key=lambda row: (-row["_s"], row is not fullest))
        chosen = busiest[:_MOST]
        if fullest in busiest[_MOST:]:
            chosen[-1] = fullest
    return sorted(chosen, key=lambda row: row["rank"])


# -- marks


def _draw_panel(rows: Sequence[Row], quantity: _Quantity) -> alt.LayerChart:
    """Stacked bars of one quantity, a mark beside the longest, and the limit if it is near."""
    totals = [row[quantity.ending] for row in rows]
    longest = max(totals, default=0.0)
    limits = []
    if quantity.limit is not None and quantity.limit < 4 * longest:
        limits.append(quantity.limit)
    end = 1.22 * max([longest, *limits])  # leaves room for the mark
    scale = alt.Scale(domain=[0, end or 1], nice=False)
    x = canvas.amount_axis("value", quantity.title, quantity.unit, ticks=5, scale=scale)
    marks = []
    if longest:
        # not on the dashed line
        beside = max([longest, *(limit for limit in limits if limit < 1.2 * longest)])
        rank = rows[totals.index(longest)]["rank"]
        marks.append({"rank": rank, "value": beside, "text": quantity.mark})
    layers = [_draw_parts(rows, quantity, x), _draw_marks(marks), _draw_limits(limits)]
    return LayerChart(layer=layers).properties(width=330, height=alt.Step(24))


def _draw_parts(rows: Sequence[Row], quantity: _Quantity, x: alt.X) -> alt.Chart:
    names = _name_parts(rows, quantity.ending)
    parts = []
    for row in rows:
        for order, (column, name) in enumerate(names.items()):
            value = row[column]
            if canvas.is_above_zero(value):
                parts.append({"rank": row["rank"], "part": name, "value": value, "order": order})
    y = alt.Y("rank:O", title="Rank", axis=alt.Axis(labelAngle=0))
    drawn = {part["part"] for part in parts}
    named = [name for name in names.values() if name in drawn]
    legend = alt.Legend(orient="bottom", columns=3, values=named)
    # of all parts, so that each keeps its colour
    color = colour("part", list(names.values()), legend=legend)
    return canvas.draw_bars(parts, x, y, color, canvas.tips("rank", "part", value=".3s"))


def _name_parts(rows: Sequence[Row], ending: str) -> dict[str, str]:
    """Names of the parts of a bar by their columns."""
    names: dict[str, str] = {}
    if rows:
        for column in rows[0]:
            if column.endswith(ending) and column != ending:
                names[column] = column.removesuffix(ending).replace("_", " ")
    return names


def _draw_marks(marks: Sequence[Row]) -> alt.Chart:
    words = canvas.draw(marks)
    words = words.mark_text(align="left", dx=5, color=INK, fontWeight="bold", fontSize=11)
    return words.encode(x=alt.X("value:Q"), y=alt.Y("rank:O"), text="text:N")


def _draw_limits(limits: Sequence[float]) -> alt.Chart:
    lines = canvas.draw([{"value": limit} for limit in limits])
    lines = lines.mark_rule(color=INK, strokeDash=[4, 3], strokeWidth=1.5)
    return lines.encode(x=alt.X("value:Q"))
