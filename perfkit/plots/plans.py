"""Charts of placements: what every rank does and holds, and which one the others wait for."""

import altair as alt

from perfkit.plots.canvas import INK, Frame, Row, colour, draw, label_si, layer, read_rows, tips
from perfkit.units import format_bytes, format_time

__all__ = ["plan_bars"]


def _long(rows: list[Row], ending: str) -> tuple[list[Row], list[str]]:
    """A row for every part that a rank has, and the names of all parts, so that each keeps its colour."""
    parts = [key for key in (rows[0] if rows else ()) if key.endswith(ending)]
    names = [key.removesuffix(ending).replace("_", " ") for key in parts]
    long: list[Row] = [
        {"rank": row["rank"], "part": name, "value": row[key], "order": place}
        for row in rows
        for place, (key, name) in enumerate(zip(parts, names, strict=True))
        if (row[key] or 0) > 0
    ]
    return long, names


def _sum(row: Row, ending: str) -> float:
    return sum(value or 0.0 for key, value in row.items() if key.endswith(ending))


def _panel(rows: list[Row], ending: str, limit: float | None, texts: tuple[str, str, str]) -> alt.LayerChart:
    """Stacked bars of one unit; the rank with the longest bar is marked, and so is a limit within reach."""
    unit, title, mark = texts
    long, names = _long(rows, ending)
    totals: dict[int, float] = {}
    for row in long:
        totals[row["rank"]] = totals.get(row["rank"], 0.0) + row["value"]
    most = max(totals.values(), default=0.0)
    near = [limit] if limit is not None and limit < 4 * most else []
    end = 1.22 * max([most, *near])  # room for the mark beside the longest bar
    y = alt.Y("rank:O", title="Rank", axis=alt.Axis(labelAngle=0))
    x = alt.X(
        "value:Q",
        title=title,
        axis=alt.Axis(labelExpr=label_si(unit), tickCount=5),
        scale=alt.Scale(domain=[0, end or 1], nice=False),
    )
    legend = alt.Legend(orient="bottom", columns=3, values=[n for n in names if any(r["part"] == n for r in long)])
    bars = (
        draw(long)
        .mark_bar(height={"band": 0.75})
        .encode(
            x=x,
            y=y,
            color=colour("part", names, title=None, legend=legend),
            order=alt.Order("order:Q"),
            tooltip=tips("rank", "part", value=".3s"),
        )
    )
    first = max(totals, key=lambda rank: totals[rank], default=None)
    beside = max([most, *(value for value in near if value < 1.2 * most)])  # the mark stands clear of the dashed line
    marked = [{"rank": first, "value": beside, "text": mark}] if most > 0 else []
    words = draw(marked).mark_text(align="left", dx=5, color=INK, fontWeight="bold", fontSize=11)
    words = words.encode(x=alt.X("value:Q"), y=alt.Y("rank:O"), text="text:N")
    line = draw([{"value": value} for value in near]).mark_rule(color=INK, strokeDash=[4, 3], strokeWidth=1.5)
    return layer(bars, words, line.encode(x=alt.X("value:Q"))).properties(width=330, height=alt.Step(24))


def plan_bars(
    frame: Frame,
    *,
    time: float | None = None,
    capacity: float | None = None,
    notes: str | list[str] = "",
    title: str = "What every rank does and holds",
    ranks: int = 32,
) -> alt.HConcatChart:
    """Draw seconds and memory of every rank as stacked bars, and mark the slowest and the fullest rank.

    Parameters
    ----------
    frame : frame or list of dict
        A row per ``rank``; columns that end in ``_s`` are seconds [s], in ``_bytes`` memory [B], each a part of a bar;
        others are left out.
    time : float, optional
        Time of an iteration, drawn dashed: what a bar lacks of it, its rank waits [s].
    capacity : float, optional
        Memory of a rank, drawn dashed where the fullest rank takes more than a quarter of it [B].
    notes : str or list of str, optional
        Lines below the heading.
    title : str, optional
        Heading.
    ranks : int, optional
        Ranks drawn, those with most to do and the fullest one; at least two [-].

    Returns
    -------
    chart : altair.HConcatChart
        Time on the left, memory on the right.
    """
    rows = read_rows(frame)
    fullest = max(rows, key=lambda row: _sum(row, "_bytes"), default=None)
    busy = sorted(rows, key=lambda row: (-_sum(row, "_s"), row is not fullest))[: max(2, ranks)]
    if fullest is not None and all(row is not fullest for row in busy):
        busy[-1] = fullest
    lines = [notes] if isinstance(notes, str) else list(notes)
    if len(rows) > len(busy):
        lines.append(f"{len(busy)} of {len(rows)} ranks: the busiest, and the fullest")
    busy.sort(key=lambda row: row["rank"])
    whole = f"; dashed: iteration, {format_time(time)}" if time else ""
    room = f"; a rank has {format_bytes(capacity)}" if capacity else ""
    panels = [
        _panel(busy, "_s", time, ("s", f"Time{whole}", "slowest")),
        _panel(busy, "_bytes", capacity, ("B", f"Memory{room}", "fullest")),
    ]
    heading = alt.Title(title, subtitle=[line for line in lines if line])
    return alt.HConcatChart(hconcat=panels, title=heading).resolve_scale(color="independent")
