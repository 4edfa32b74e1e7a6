"""A chart of picks: how far each choice among a few is from the fastest of its group."""

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame
from perfkit.plots.colours import PALETTE, mark_series
from perfkit.plots.theme import LayerChart

#: The pick of a row that nobody picked.
_OTHERS = "not picked"
#: Grey of the rows that nobody picked.
_GREY = PALETTE[6]


@refuse_misfits(ROWS)
def pick_strips(
    frame: Frame, *, title: str = "Picks, and what else there was", about: str = ""
) -> alt.LayerChart:
    """Draw how much longer than the fastest of its group each row takes, a line for each group.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``family`` (the group), ``time_s`` [s] and ``pick``, who picked this row: a text, empty
        for a row that nobody picked. A row that two have picked is there twice.
    title, about : str, optional
        Heading, and a line below it.

    Returns
    -------
    chart : altair.LayerChart
        A point for each row: grey and small where nobody picked it, else with the colour and shape
        of its pick.
    """
    check_type("title", title, str)
    check_type("about", about, str)
    rows = canvas.read_rows(frame)
    fastest: dict[str, float] = {}
    for row in rows:
        family, time = row["family"], row["time_s"]
        fastest[family] = min(time, fastest.get(family, time))
    for row in rows:
        least = fastest[row["family"]]
        row["extra_share"] = row["time_s"] / least - 1 if least > 0 else None
        row["pick"] = row["pick"] or _OTHERS
    picked = [row for row in rows if row["pick"] != _OTHERS]
    others = [row for row in rows if row["pick"] == _OTHERS]
    x = alt.X("extra_share:Q", title="Time beyond the fastest", axis=alt.Axis(format="%"))
    families = canvas.unique(row["family"] for row in rows)
    y = alt.Y("family:N", title=None, sort=families, axis=alt.Axis(labelPadding=10))
    shown = canvas.tips("family", "pick", time_s=".3s", extra_share=".1%")
    rest = canvas.draw(others).mark_point(filled=True, color=_GREY, opacity=0.6, size=30)
    rest = rest.encode(x=x, y=y, tooltip=shown)
    names = canvas.unique(row["pick"] for row in picked)
    looks = mark_series("pick", names, legend=alt.Legend(orient="bottom", title=None))
    marks = canvas.draw_points(picked, x, y, looks, shown, filled=False, size=110, strokeWidth=2.5)
    heading = alt.Title(title, subtitle=about or alt.Undefined)
    chart = LayerChart(layer=[rest, marks])
    return chart.properties(width=440, height=alt.Step(20), title=heading)
