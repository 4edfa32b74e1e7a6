"""A chart of gains: what each of several changes saves of an iteration."""

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type, format_time
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame
from perfkit.plots.colours import INK, PALETTE
from perfkit.plots.theme import LayerChart

#: Longest name of a change that is drawn whole [pixels].
_LABEL = 340


@refuse_misfits(ROWS)
def gain_bars(
    frame: Frame, *, time: float, title: str = "What each change alone would save"
) -> alt.LayerChart:
    """Draw by how much each change shortens an iteration, with intervals.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``what``, ``gain_s``, ``low_s`` and ``high_s`` [s], the largest gain first.
    time : float
        Time of the iteration today [s].
    title : str, optional
        Heading; the line below it gives the time today.

    Returns
    -------
    chart : altair.LayerChart
        A bar for each change, and its 80 % interval.
    """
    check_type("title", title, str)
    rows = canvas.read_rows(frame)
    x = canvas.amount_axis("gain_s", "Time that an iteration becomes shorter", "s")
    names = canvas.unique(row["what"] for row in rows)
    y = alt.Y("what:N", title=None, sort=names, axis=alt.Axis(labelLimit=_LABEL))
    shown = canvas.tips("what", gain_s=".3s", low_s=".3s", high_s=".3s")
    bars = canvas.draw(rows).mark_bar(height={"band": 0.6}, color=PALETTE[0], opacity=0.55)
    bars = bars.encode(x=x, y=y, tooltip=shown)
    ends = alt.X("low_s:Q", scale=x["scale"])
    intervals = canvas.draw(rows).mark_rule(color=INK, strokeWidth=1.5)
    intervals = intervals.encode(x=ends, x2="high_s:Q", y=y, tooltip=shown)
    about = f"bar: gain; line: its 80% interval; an iteration takes {format_time(time)} today"
    heading = alt.Title(title, subtitle=about)
    chart = LayerChart(layer=[bars, intervals])
    return chart.properties(width=380, height=alt.Step(26), title=heading)
