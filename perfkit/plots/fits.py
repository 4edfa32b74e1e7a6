"""A chart of a fit: measured points, and the line of the form that was fitted to them."""

from collections.abc import Mapping

import altair as alt

from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import check_type
from perfkit.plots import canvas
from perfkit.plots.canvas import ROWS, Frame
from perfkit.plots.colours import INK, PALETTE
from perfkit.plots.theme import LayerChart


@refuse_misfits(ROWS)
def bandwidth_fit(
    points: Frame,
    curve: Frame,
    *,
    capacities: Mapping[str, float] | None = None,
    title: str = "Measured and fitted",
) -> alt.LayerChart:
    """Draw the bandwidth of a kernel over its bytes: points for what was measured, a line for the fit.

    Parameters
    ----------
    points, curve : frame or list of dict
        Measured and fitted rows ``nbytes``, what the kernel moves [B], and ``bytes_per_s`` [B/s].
    capacities : mapping of str to float, optional
        Caches by name, and how much each holds [B]: a dashed line stands there.
    title : str, optional
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        One panel with logarithmic axes.
    """
    check_type("title", title, str)
    measured = canvas.read_rows(points)
    fitted = canvas.read_rows(curve)
    rows = [*measured, *fitted]
    x = canvas.log_axis(
        "nbytes", "Bytes moved", canvas.log_domain(row["nbytes"] for row in rows), "B"
    )
    y = canvas.log_axis(
        "bytes_per_s",
        "Bandwidth",
        canvas.log_domain(row["bytes_per_s"] for row in rows),
        "B/s",
        alt.Y,
    )
    line = canvas.draw(fitted).mark_line(color=PALETTE[0]).encode(x=x, y=y)
    shown = canvas.tips(nbytes=".3s", bytes_per_s=".3s")
    dots = canvas.draw(measured).mark_point(color=INK, filled=True, size=40)
    layers = [line, dots.encode(x=x, y=y, tooltip=shown)]
    caches = [{"name": name, "nbytes": nbytes} for name, nbytes in (capacities or {}).items()]
    if caches:
        rules = canvas.draw(caches).encode(x=x)
        layers.append(rules.mark_rule(color=INK, strokeDash=[4, 3], opacity=0.6))
        names = rules.mark_text(color=INK, align="right", dx=-4, y=248).encode(text="name:N")
        layers.append(names)
    heading = alt.Title(
        title, subtitle="points: measured; line: fitted; dashed: what a cache holds"
    )
    if not caches:
        heading = alt.Title(title, subtitle="points: measured; line: fitted")
    return LayerChart(layer=layers).properties(width=460, height=260, title=heading)
