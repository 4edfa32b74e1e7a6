"""A chart of modules: the time of each, by phase, and how long the device is idle in it."""

import re
import statistics
from collections.abc import Sequence
from typing import Any

import altair as alt
import polars as pl

from perfkit.ground.forks import check_threads
from perfkit.ground.forms import refuse_misfits
from perfkit.ground.results import Table
from perfkit.ground.units import check_type, format_ranks, format_time
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame, Row
from perfkit.plots.colours import INK, colour
from perfkit.plots.theme import LayerChart

#: Phases in the order of a bar, and their columns.
_PHASES = {"forward": "forward_s", "backward": "backward_s", "update": "update_s"}
#: Most modules with a bar of their own.
_MODULES = 30
#: Share of the whole time below which a module has no bar of its own [-].
_SMALL = 0.002
#: From so many layers on that take the same time they share a bar [-], and how far from their median
#: that time may be [-].
_FEWEST_ALIKE, _ALIKE = 4, 0.03
#: A module that is one of several: what they are called, and its number.
_NUMBERED = re.compile(r"(?P<name>.+)\.(?P<number>[0-9]+)")
#: Name of what belongs to no module.
_OUTSIDE = "outside modules"


@refuse_misfits(ROWS)
def module_bars(frame: Frame, *, about: str = "") -> alt.LayerChart:
    """Draw forward, backward and update time of every module, and how long the device is idle in
    it.

    Four or more layers of one name that take the same time, within 3 %, share a bar, which says how
    many there are and how long each takes. Then the 30 modules with most time have their own bar, in the
    order of the frame. All others, and those with less than 0.2 % of the time, share one bar.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``module``, ``forward_s``, ``backward_s``, ``update_s`` and ``idle_s`` [s].
    about : str, optional
        A line below the heading.

    Returns
    -------
    chart : altair.LayerChart
        One bar for each module.
    """
    check_threads()
    check_type("about", about, str)
    defaults: dict[str, Any] = dict.fromkeys([*_PHASES.values(), "idle_s"], 0.0)
    rows = canvas.read_frame(frame, module="", **defaults)
    rows = rows.with_columns(time_s=pl.sum_horizontal(_PHASES.values()))
    bars = _sum_bars(_join_alike(rows))
    modules = bars["module"].to_list()
    y = alt.Y("module:N", title=None, sort=modules, axis=alt.Axis(labelLimit=260))
    layers = [_draw_phases(bars.to_dicts(), y)]
    idle = bars.select("module", "idle_s").filter(pl.col("idle_s") > 0).to_dicts()
    if idle:
        layers.append(_draw_idle(idle, y))
    total = format_time(float(bars["time_s"].sum()))
    waits = format_time(float(bars["idle_s"].sum()))
    notes = [about] if about else []
    notes.append(f"{total} in all; thin line: the device is idle, {waits} in all")
    heading = alt.Title("Where the time goes, by module", subtitle=notes)
    return LayerChart(layer=layers).properties(width=460, height=alt.Step(18), title=heading)


def _join_alike(rows: Table) -> Table:
    """The rows with one in place of layers that take the same time."""
    numbers: dict[str, dict[int, float]] = {}
    for module, seconds in rows.select("module", "time_s").iter_rows():
        numbered = _NUMBERED.fullmatch(module)
        if numbered is not None:
            numbers.setdefault(numbered["name"], {})[int(numbered["number"])] = seconds
    shared_by: dict[str, str] = {}  # the name of their bar by module
    for name, seconds_of in numbers.items():
        median = statistics.median(seconds_of.values())
        alike = [
            number
            for number, seconds in sorted(seconds_of.items())
            if abs(seconds - median) <= _ALIKE * median
        ]
        if len(alike) < _FEWEST_ALIKE:
            continue
        mean = statistics.mean(seconds_of[number] for number in alike)
        label = f"{name}.{format_ranks(alike)}: {len(alike)} × {format_time(mean)}"
        shared_by.update({f"{name}.{number}": label for number in alike})
    names = [shared_by.get(module, module) for module in rows["module"]]
    rows = rows.with_columns(module=pl.Series(names, dtype=pl.String))
    return rows.group_by("module", maintain_order=True).agg(
        pl.sum(*_PHASES.values(), "idle_s", "time_s")
    )


def _sum_bars(rows: Table) -> Table:
    """A row for each bar: the longest modules, and all others together."""
    is_long = pl.col("time_s") > _SMALL * pl.sum("time_s")
    longest = rows.filter(is_long).top_k(_MODULES, by="time_s")["module"].to_list()
    names = rows["module"].to_list()
    name_of_others = _name_others([name for name in names if name not in longest])
    bars = []
    for name in names:
        if name in longest:
            bars.append(name or _OUTSIDE)
        else:
            bars.append(name_of_others)
    rows = rows.with_columns(module=pl.Series(bars, dtype=pl.String))
    return rows.group_by("module", maintain_order=True).agg(
        pl.sum(*_PHASES.values(), "idle_s", "time_s")
    )


def _name_others(names: Sequence[str]) -> str:
    """The bar that several modules share; few are named."""
    if len(names) > 3:
        return f"{len(names)} other modules"
    return ", ".join(name or _OUTSIDE for name in names)


def _draw_phases(bars: Sequence[Row], y: alt.Y) -> alt.Chart:
    parts = []
    for order, (phase, column) in enumerate(_PHASES.items()):
        for bar in bars:
            if bar[column] > 0:
                part = {"module": bar["module"], "time_s": bar["time_s"]}
                parts.append(part | {"phase": phase, "seconds": bar[column], "order": order})
    x = canvas.amount_axis("seconds", "Time", "s")
    color = colour("phase", list(_PHASES), title="Phase")
    shown = canvas.tips("module", "phase", seconds=".3s", time_s=".3s")
    return canvas.draw_bars(parts, x, y, color, shown)


def _draw_idle(rows: Sequence[Row], y: alt.Y) -> alt.Chart:
    line = canvas.draw(rows).mark_bar(color=INK, height={"band": 0.16})
    return line.encode(x="idle_s:Q", y=y, tooltip=canvas.tips("module", idle_s=".3s"))
