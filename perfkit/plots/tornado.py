"""A chart of sensitivities: the time with less and with more of each resource."""

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame
from perfkit.plots.colours import INK, colour
from perfkit.plots.theme import LayerChart


@refuse_misfits(ROWS)
def tornado_bars(frame: Frame, *, time: float, factor: float, about: str = "") -> alt.LayerChart:
    """Draw the time of an iteration with less and with more of every resource, around its time
    today.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``resource``, ``less_s`` and ``more_s`` [s], the most important resource first.
    time : float
        Time of the iteration today [s].
    factor : float
        How many times more and less of a resource the rows have [-].
    about : str, optional
        A line below the heading.

    Returns
    -------
    chart : altair.LayerChart
        Two bars for every resource, one on each side.
    """
    check_type("about", about, str)
    sides = {"less_s": f"1/{factor:g} as much", "more_s": f"{factor:g} times as much"}
    rows = []
    for row in canvas.read_rows(frame):
        for column, side in sides.items():
            rows.append(row | {"now_s": time, "side": side, "time_s": row[column]})
    scale = alt.Scale(zero=False, padding=8)
    x = canvas.amount_axis("time_s", "Time of an iteration", "s", scale=scale)
    y = alt.Y("resource:N", title=None, sort=canvas.unique(row["resource"] for row in rows))
    color = colour("side", list(sides.values()))
    shown = canvas.tips("resource", "side", time_s=".4s", now_s=".4s")
    bars = canvas.draw(rows).mark_bar(height={"band": 0.8})
    bars = bars.encode(x=x, x2="now_s:Q", y=y, color=color, tooltip=shown)
    today = canvas.draw([{"now_s": time}]).mark_rule(color=INK).encode(x=alt.X("now_s:Q"))
    heading = alt.Title("What more of each resource brings", subtitle=about or alt.Undefined)
    chart = LayerChart(layer=[bars, today])
    return chart.properties(width=460, height=alt.Step(24), title=heading)
