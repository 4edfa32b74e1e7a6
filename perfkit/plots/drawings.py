"""What drawings of hardware are built from: boxes, lines and words at places in pixels.

A drawing lists its `Box`, `Line` and `Words` records and calls `lay_out`. Places count from the upper
left corner of the drawing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt

from perfkit.plots import canvas
from perfkit.plots.colours import INK
from perfkit.plots.theme import LayerChart

#: How much of a colour fills a box; text in ink stays readable on it [-].
_PALE = 0.18
#: Distance of two lines of text in a box [pixels].
_LINE_HEIGHT = 14


class Box(NamedTuple):
    """A rectangle with lines of text in its middle."""

    left: float  # [pixels]
    top: float  # [pixels]
    right: float  # [pixels]
    bottom: float  # [pixels]
    text: str
    color: str
    opacity: float = _PALE  # of its inside [-]
    border: float = 1.5  # [pixels]


class Line(NamedTuple):
    """A line, with an arrow head at its end if it has a direction."""

    from_x: float  # [pixels]
    from_y: float  # [pixels]
    to_x: float  # [pixels]
    to_y: float  # [pixels]
    color: str
    is_arrow: bool = False


class Words(NamedTuple):
    """Words beside a place."""

    x: float  # [pixels]
    y: float  # [pixels]
    text: str
    align: str = "left"  # left, center or right
    angle: float = 0.0  # clockwise [degrees]
    weight: str = "normal"  # normal or bold


def lay_out(
    boxes: Sequence[Box],
    lines: Sequence[Line],
    words: Sequence[Words],
    *,
    frames: Sequence[Box] = (),
    width: int,
    height: int,
    title: alt.Title,
) -> alt.LayerChart:
    """Draw frames, lines inside them, boxes over lines, and words over all.

    Parameters
    ----------
    boxes, lines, words : sequence
        What the drawing has; neither boxes nor words are empty.
    frames : sequence, optional
        Boxes around other boxes.
    width, height : int
        Size of the drawing [pixels].
    title : altair.Title
        Heading.

    Returns
    -------
    chart : altair.LayerChart
        The drawing.
    """
    x = _make_place(alt.X, "x", width)
    y = _make_place(alt.Y, "y", height, is_downwards=True)
    layers: list[alt.Chart] = []
    if frames:
        layers += _draw_boxes(frames, x, y)
    if lines:
        layers.append(_draw_lines(lines, x, y))
    layers += _draw_boxes(boxes, x, y)
    texts = [text for box in boxes for text in _place_texts(box)]
    layers += _draw_words([*texts, *words], x, y)
    arrows = [line for line in lines if line.is_arrow]
    if arrows:
        layers.append(_draw_arrow_heads(arrows, x, y))
    return LayerChart(layer=layers).properties(width=width, height=height, title=title)


def _make_place(channel: Any, name: str, size: int, *, is_downwards: bool = False) -> Any:
    """A scale of pixels without an axis."""
    scale = alt.Scale(domain=[0, size], nice=False, zero=False, reverse=is_downwards)
    return channel(f"{name}:Q", scale=scale, axis=None)


def _draw_lines(lines: Sequence[Line], x: alt.X, y: alt.Y) -> alt.Chart:
    rows = []
    for line in lines:
        ends = {"x": line.from_x, "y": line.from_y, "x2": line.to_x, "y2": line.to_y}
        rows.append({**ends, "color": line.color})
    rules = canvas.draw(rows).mark_rule(strokeWidth=2)
    return rules.encode(x=x, y=y, x2="x2:Q", y2="y2:Q", color=_take_color())


def _draw_arrow_heads(arrows: Sequence[Line], x: alt.X, y: alt.Y) -> alt.Chart:
    """Triangles at the ends of lines that go to the right, down, to the left or up."""
    rows = []
    for line in arrows:
        row = {"x": line.to_x, "y": line.to_y, "color": line.color}
        rows.append(row | {"angle": _find_direction(line)})
    heads = canvas.draw(rows).mark_point(shape="triangle", filled=True, size=70, opacity=1)
    angle = alt.Angle("angle:Q", scale=alt.Scale(domain=[0, 360], range=[0, 360]))
    return heads.encode(x=x, y=y, angle=angle, color=_take_color())


def _find_direction(line: Line) -> float:
    """Where a line goes, clockwise from upwards [degrees]."""
    if line.to_x > line.from_x:
        return 90.0
    if line.to_x < line.from_x:
        return 270.0
    if line.to_y > line.from_y:
        return 180.0
    return 0.0


def _draw_boxes(boxes: Sequence[Box], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """White ground, which hides lines below it, the pale inside, and the border."""
    rows = []
    for box in boxes:
        row = {"x": box.left, "x2": box.right, "y": box.top, "y2": box.bottom}
        looks = {"color": box.color, "opacity": box.opacity, "border": box.border}
        rows.append({**row, **looks})
    ends = {"x": x, "y": y, "x2": "x2:Q", "y2": "y2:Q"}
    ground = canvas.draw(rows).mark_rect(color="white", cornerRadius=3).encode(**ends)
    inside = canvas.draw(rows).mark_rect(cornerRadius=3)
    opacity = alt.Opacity("opacity:Q", scale=None, legend=None)
    inside = inside.encode(**ends, color=_take_color(), opacity=opacity)
    border = canvas.draw(rows).mark_rect(filled=False, cornerRadius=3)
    stroke = alt.Stroke("color:N", scale=None, legend=None)
    thickness = alt.StrokeWidth("border:Q", scale=None, legend=None)
    border = border.encode(**ends, stroke=stroke, strokeWidth=thickness)
    return [ground, inside, border]


def _place_texts(box: Box) -> list[Words]:
    """The lines of text of a box, in its middle."""
    middle_x = (box.left + box.right) / 2
    middle_y = (box.top + box.bottom) / 2
    lines = box.text.split("\n")
    texts = []
    for number, line in enumerate(lines):
        below = number - (len(lines) - 1) / 2
        texts.append(Words(middle_x, middle_y + below * _LINE_HEIGHT, line, "center"))
    return texts


def _draw_words(words: Sequence[Words], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """A layer for each way in which words stand."""
    layers = []
    looks = canvas.unique((some.align, some.angle, some.weight) for some in words)
    for align, angle, weight in looks:
        rows = []
        for some in words:
            if (some.align, some.angle, some.weight) == (align, angle, weight):
                rows.append({"x": some.x, "y": some.y, "text": some.text})
        layer = canvas.draw(rows).mark_text(
            color=INK,
            fontSize=11,
            align=align,
            angle=angle,
            fontWeight=weight,
            baseline="middle",
        )
        layers.append(layer.encode(x=x, y=y, text="text:N"))
    return layers


def _take_color() -> alt.Color:
    """The colour that a row names."""
    return alt.Color("color:N", scale=None, legend=None)
