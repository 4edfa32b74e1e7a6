"""A chart of bandwidths: how fast a byte moves to each memory and over each link."""

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type, format_rate
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame
from perfkit.plots.colours import INK, colour
from perfkit.plots.theme import LayerChart

#: Where numbers come from, in the order of the legend.
_EVIDENCE = ("measured", "fitted", "datasheet", "assumed")


@refuse_misfits(ROWS)
def bandwidth_ladder(
    frame: Frame, measured: Frame = (), *, title: str = "Bandwidths of one device"
) -> alt.LayerChart:
    """Draw bandwidths on a logarithmic axis, and measured ones beside them.

    Parameters
    ----------
    frame : frame or list of dict
        Rows ``way`` (the memory or the link), ``bandwidth_bytes_per_s`` [B/s] and ``evidence``, one of
        ``measured``, ``fitted``, ``datasheet`` and ``assumed``, in the order in which they are shown.
    measured : frame or list of dict, optional
        Rows ``way`` and ``bandwidth_bytes_per_s`` [B/s] of measurements.
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        A bar for each way with its bandwidth, and a tick for each measurement.
    """
    check_type("title", title, str)
    rows = canvas.read_rows(frame)
    ticks = canvas.read_rows(measured)
    rates = [row["bandwidth_bytes_per_s"] for row in (*rows, *ticks)]
    domain = canvas.log_domain(rates, room=4)
    for row in rows:
        row["start"] = domain.low
        row["text"] = format_rate(row["bandwidth_bytes_per_s"], "B/s")
    x = canvas.log_axis("bandwidth_bytes_per_s", "Bandwidth", domain, "B/s")
    y = alt.Y("way:N", title=None, sort=canvas.unique(row["way"] for row in rows))
    kinds = {row["evidence"] for row in rows}
    legend = alt.Legend(orient="bottom", title=None)
    color = colour("evidence", [kind for kind in _EVIDENCE if kind in kinds], legend=legend)
    shown = canvas.tips("way", "evidence", bandwidth_bytes_per_s=".3s")
    bars = canvas.draw(rows).mark_bar(height={"band": 0.55}, opacity=0.8)
    bars = bars.encode(x=x, x2="start:Q", y=y, color=color, tooltip=shown)
    texts = canvas.draw(rows).mark_text(align="left", dx=6, color=INK, fontSize=11)
    texts = texts.encode(x=x, y=y, text="text:N")
    layers = [bars, texts]
    heading = alt.Title(title)
    if ticks:
        marks = canvas.draw(ticks).mark_tick(color=INK, thickness=2, size=24)
        marks = marks.encode(x=x, y=y, tooltip=canvas.tips("way", bandwidth_bytes_per_s=".3s"))
        layers.append(marks)
        heading = alt.Title(title, subtitle="black ticks: measured by others")
    chart = LayerChart(layer=layers)
    return chart.properties(width=460, height=alt.Step(38), title=heading)
