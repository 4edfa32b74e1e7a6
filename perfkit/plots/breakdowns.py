"""A chart of a breakdown: parts of an iteration as stacked bars."""

import altair as alt
import polars as pl

from perfkit.ground.forks import check_threads
from perfkit.ground.forms import refuse_misfits
from perfkit.ground.results import Table
from perfkit.ground.units import check_type
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame
from perfkit.plots.colours import CLASSES, colour

#: Order of the phases of an iteration; other phases come last.
_PHASES = ("forward", "backward", "exchange", "optimizer", "update")
#: Most operation classes with their own colour.
_CLASSES = 7


@refuse_misfits(ROWS)
def breakdown_bars(
    frame: Frame, *, title: str = "Where the time goes", about: str = ""
) -> alt.Chart:
    """Draw the parts of an iteration as stacked bars, one bar for each phase, or for each phase of
    each run.

    The operation classes with most time have their own colour, the others are drawn as ``other``.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``phase``, ``kind`` (operation class), ``time_s`` [s] and, to compare several runs,
        ``run``.
    title, about : str, optional
        Heading, and a line below it.

    Returns
    -------
    chart : altair.Chart
        Horizontal bars.
    """
    check_threads()
    check_type("title", title, str)
    check_type("about", about, str)
    rows = canvas.read_frame(frame, run="", phase="", kind="", time_s=0.0)
    kinds = _choose_kinds(rows)
    parts = _sum_parts(rows, kinds)
    phases = canvas.unique(parts["phase"])
    phases.sort(key=_place_phase)
    bars = [row | {"order": kinds.index(row["kind"])} for row in parts.to_dicts()]
    x = canvas.amount_axis("time_s", "Time", "s")
    y = alt.Y("phase:N", title=None, sort=phases, axis=alt.Axis(labelLimit=220))
    color = colour("kind", kinds, title="Operation class")
    chart = canvas.draw_bars(bars, x, y, color, canvas.tips("phase", "kind", time_s=".3s"))
    runs = canvas.unique(parts["run"])
    if len(runs) > 1:
        header = alt.Header(labelAngle=0, labelAlign="left", labelFontWeight="bold", labelLimit=200)
        chart = chart.encode(row=alt.Row("run:N", title=None, sort=runs, header=header, spacing=8))
    heading = alt.Title(title, subtitle=about or alt.Undefined)
    return chart.properties(width=460, height=alt.Step(28), title=heading)


def _choose_kinds(rows: Table) -> list[str]:
    """Operation classes that have a colour, those with most time, in the order of `CLASSES`, which all
    breakdowns have; ``other`` stands for the rest."""
    times = rows.group_by("kind", maintain_order=True).agg(pl.sum("time_s"))
    ranked = times.sort("time_s", descending=True, maintain_order=True)
    kinds: list[str] = ranked["kind"].to_list()
    if len(kinds) <= _CLASSES + 1:
        return sorted(kinds, key=_place_kind)
    return [*sorted(kinds[:_CLASSES], key=_place_kind), "other"]


def _place_kind(kind: str) -> tuple[int, str]:
    """Place of a class in all breakdowns: that of `CLASSES`, then by name."""
    known = [*CLASSES]
    if kind in known:
        return known.index(kind), kind
    return len(known), kind


def _sum_parts(rows: Table, kinds: list[str]) -> Table:
    """The time of each class in each phase of each run; what has no phase is its own bar."""
    has_colour = pl.col("kind").is_in(kinds)
    rows = rows.with_columns(kind=pl.when(has_colour).then("kind").otherwise(pl.lit("other")))
    has_no_phase = pl.col("phase") == ""
    rows = rows.with_columns(phase=pl.when(has_no_phase).then("kind").otherwise("phase"))
    parts = rows.group_by("run", "phase", "kind", maintain_order=True).agg(pl.sum("time_s"))
    return parts.filter(pl.col("time_s") > 0)


def _place_phase(phase: str) -> int:
    if phase in _PHASES:
        return _PHASES.index(phase)
    return len(_PHASES)
