"""A chart of strategies: the time of an iteration over memory, with the best ones named, and the one
that somebody uses now."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Domain, Frame, Row
from perfkit.plots.colours import INK, mark_series
from perfkit.plots.labels import FONT_SIZE, LabelPlace, Place, place_labels, spread_out
from perfkit.plots.theme import LayerChart

#: Size of the chart [px].
_WIDTH, _HEIGHT = 600, 360
#: Most points with a label [-].
_MOST_LABELS = 10
#: Strategies that take more times as long as the fastest on as many ranks are not drawn [-].
_SLOWEST = 4.0


@refuse_misfits(ROWS)
def strategy_front(frame: Frame, *, title: str = "", about: str = "") -> LayerChart:
    """Draw the time of strategies over the memory that they need, a line for each number of ranks.

    Parameters
    ----------
    frame : frame or list of dict
        A row for each strategy: ``needs_bytes``, the memory of the fullest rank [B]; ``time_s`` and
        the ends of its interval, ``low_s`` and ``high_s`` [s]; ``ranks`` [-]; ``label``, the strategy in
        short; ``strategy``, as the pointer shows it; and ``is_yours``, whether it is the one that is used
        now, which no line goes through.
    title, about : str, optional
        Heading, and a line below it.

    Returns
    -------
    chart : altair.LayerChart
        Lines with points, and bars for the intervals. Ten points have their label, the fastest of
        each number of ranks first. Those that take more than four times as long as the fastest are
        counted below the heading.
    """
    check_type("title", title, str)
    check_type("about", about, str)
    rows = [row for row in canvas.read_rows(frame) if canvas.is_above_zero(row.get("time_s"))]
    yours = [row for row in rows if row.get("is_yours")]
    front = [row for row in rows if not row.get("is_yours")]
    drawn = _leave_out_slow(front)
    shown = [*yours, *drawn]
    for row in shown:
        row["series"] = f"{row['ranks']}"
    notes = [about] if about else []
    if len(drawn) < len(front):
        notes.append(
            f"{len(front) - len(drawn)} more that need less memory take over {_SLOWEST:g} times as long as the "
            "fastest"
        )
    domains = _find_domains(shown)
    x = canvas.log_axis("needs_bytes", "Memory of the fullest rank", domains[0], "B")
    y = canvas.log_axis("time_s", "Time of an iteration", domains[1], "s", alt.Y)
    names = canvas.unique(row["series"] for row in drawn)
    looks = mark_series("series", names, title="ranks")
    tips = canvas.tips("strategy", "ranks", needs_bytes=".3s", time_s=".3s")
    layers = [
        canvas.draw(drawn).mark_line(strokeWidth=2).encode(x=x, y=y, color=looks.color),
        canvas.draw_ranges(drawn, x, y, looks.color, along="y", low="low_s", high="high_s"),
        canvas.draw_points(drawn, x, y, looks, tips),
    ]
    if yours:
        layers += _draw_yours(yours, x, y, tips)
    layers += _draw_labels(shown, x, y, domains)
    heading = alt.Title(title, subtitle=notes or alt.Undefined)
    return LayerChart(layer=layers).properties(width=_WIDTH, height=_HEIGHT, title=heading)


def _leave_out_slow(rows: Sequence[Row]) -> list[Row]:
    """Those that take at most `_SLOWEST` times as long as the fastest on as many ranks."""
    fastest: dict[int, float] = {}
    for row in rows:
        ranks = row["ranks"]
        fastest[ranks] = min(row["time_s"], fastest.get(ranks, math.inf))
    return [row for row in rows if row["time_s"] <= _SLOWEST * fastest[row["ranks"]]]


def _find_domains(rows: Sequence[Row]) -> tuple[Domain, Domain]:
    """Ends of both axes, with room for labels and intervals."""
    memory = canvas.log_domain((row["needs_bytes"] for row in rows), room=1.35)
    ends = [row.get(name) for row in rows for name in ("time_s", "low_s", "high_s")]
    return memory, canvas.log_domain(ends, room=1.25)


def _draw_yours(
    yours: Sequence[Row], x: alt.X, y: alt.Y, tips: list[alt.Tooltip]
) -> list[alt.Chart]:
    """The strategy that is used now: a ring in the colour of text, and its interval."""
    base = canvas.draw(yours).encode(x=x, y=y)
    interval = base.mark_rule(color=INK, strokeWidth=1.5, opacity=0.55)
    interval = interval.encode(y=alt.Y("low_s:Q", scale=y["scale"]), y2="high_s:Q")
    ring = base.mark_point(shape="circle", size=130, filled=False, strokeWidth=2.5, color=INK)
    return [interval, ring.encode(tooltip=tips)]


def _draw_labels(
    rows: Sequence[Row], x: alt.X, y: alt.Y, domains: tuple[Domain, Domain]
) -> list[alt.Chart]:
    """Labels of the points that matter most, where there is room for them."""
    if not rows:
        return []
    order = _rank_for_labels(rows, domains)
    points = [_find_place(row["needs_bytes"], row["time_s"], domains) for row in rows]
    texts = [_write_label(row) for row in rows]
    lines = _list_lines(rows, domains)
    places = place_labels(
        [points[number] for number in order],
        [texts[number] for number in order],
        lines,
        width=_WIDTH,
        height=_HEIGHT,
        most=_MOST_LABELS,
    )
    labelled = [rows[order[position]] for position in places]
    rings = canvas.draw(labelled).encode(x=x, y=y)
    layers = [rings.mark_point(shape="circle", size=90, filled=False, strokeWidth=1, color=INK)]
    for position, place in places.items():
        number = order[position]
        if place.is_far:
            layers.append(_draw_leader(points[number], place, x, y, domains))
        layers.append(_draw_label(rows[number], texts[number], place, x, y))
    return layers


def _write_label(row: Row) -> str:
    """The strategy in short; of the one that is used now, that it is yours."""
    label = str(row.get("label", ""))
    return f"yours: {label}" if row.get("is_yours") else label


def _draw_label(row: Row, text: str, place: LabelPlace, x: alt.X, y: alt.Y) -> alt.Chart:
    words = {key: row[key] for key in ("needs_bytes", "time_s")}
    weight: Any = "bold" if row.get("is_yours") else "normal"
    align: Any = place.align
    chart = canvas.draw([{**words, "label": text}]).encode(x=x, y=y, text="label:N")
    return chart.mark_text(
        align=align,
        baseline="middle",
        dx=place.dx,
        dy=place.dy,
        color=INK,
        fontSize=FONT_SIZE,
        fontWeight=weight,
    )


def _draw_leader(
    point: Place, place: LabelPlace, x: alt.X, y: alt.Y, domains: tuple[Domain, Domain]
) -> alt.Chart:
    """A thin line from a point to its label."""
    memory, time = domains
    ends = []
    for end in (point, Place(point.x + place.dx, point.y + place.dy)):
        nbytes = memory.low * (memory.high / memory.low) ** (end.x / _WIDTH)
        seconds = time.high * (time.low / time.high) ** (end.y / _HEIGHT)
        ends.append({"needs_bytes": nbytes, "time_s": seconds})
    line = canvas.draw(ends).mark_line(color=INK, strokeWidth=0.7, opacity=0.6)
    return line.encode(x=x, y=y)


def _rank_for_labels(rows: Sequence[Row], domains: tuple[Domain, Domain]) -> list[int]:
    """Numbers of the points, those that need a label most first: yours, the fastest of each number of
    ranks, then others that are far from these."""
    first = [number for number, row in enumerate(rows) if row.get("is_yours")]
    for ranks in canvas.unique(row["ranks"] for row in rows):
        of_ranks = [
            number
            for number, row in enumerate(rows)
            if row["ranks"] == ranks and not row.get("is_yours")
        ]
        if of_ranks:
            first.append(min(of_ranks, key=lambda number: rows[number]["time_s"]))
    others = [number for number in range(len(rows)) if number not in first]
    # the last of the first ones, from which the others are far
    points = [
        _find_place(rows[number]["needs_bytes"], rows[number]["time_s"], domains)
        for number in [*first[-1:], *others]
    ]
    order = [*first, *(others[place - 1] for place in spread_out(points)[1:])]
    named: set[tuple[int, str]] = set()  # a label is written once for each number of ranks
    kept = []
    for number in order:
        key = (rows[number]["ranks"], _write_label(rows[number]))
        if key not in named:
            named.add(key)
            kept.append(number)
    return kept


def _list_lines(rows: Sequence[Row], domains: tuple[Domain, Domain]) -> list[list[Place]]:
    """Corners of the lines of all numbers of ranks, and ends of all intervals."""
    lines = []
    for ranks in canvas.unique(row["ranks"] for row in rows):
        of_ranks = [row for row in rows if row["ranks"] == ranks and not row.get("is_yours")]
        of_ranks.sort(key=lambda row: float(row["needs_bytes"]))
        lines.append([_find_place(row["needs_bytes"], row["time_s"], domains) for row in of_ranks])
    for row in rows:
        if canvas.is_above_zero(row.get("low_s")) and canvas.is_above_zero(row.get("high_s")):
            ends = [row["low_s"], row["high_s"]]
            lines.append([_find_place(row["needs_bytes"], end, domains) for end in ends])
    return lines


def _find_place(nbytes: float, seconds: float, domains: tuple[Domain, Domain]) -> Place:
    """Where a point of the chart is drawn."""
    memory, time = domains
    x = _WIDTH * math.log(nbytes / memory.low) / math.log(memory.high / memory.low)
    y = _HEIGHT * math.log(time.high / seconds) / math.log(time.high / time.low)
    return Place(x, y)
