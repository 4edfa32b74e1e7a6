"""Places for labels of points, so that none covers a point, a line or another label."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

#: Size of the text of a label [px].
FONT_SIZE = 10
#: Mean width of a letter, and height of a line, in parts of that size; a little more than in the fonts
#: of browsers [-].
_LETTER, _LINE = 0.56, 1.2
#: Distance between a point and its label, and what is kept free around a point and a line [px].
_GAP, _FREE = 7.0, 4.0
#: Points that are nearer to one that has a label get none [px].
_APART = 12.0
#: Distance of the places along a line that a label must not cover [px].
_STEP = 4.0


class Place(NamedTuple):
    """A place in a chart, from its upper left corner [px]."""

    x: float
    y: float


class LabelPlace(NamedTuple):
    """Where a label stands beside its point.

    Parameters
    ----------
    dx, dy : float
        From the point to the anchor of the text, to the right and down [px].
    align : str
        Which end of the text is at the anchor: ``left``, ``right`` or ``center``.
    """

    dx: float
    dy: float
    align: str

    @property
    def is_far(self) -> bool:
        """Whether a line has to lead from the point to the label."""
        return abs(self.dy) > 3 * _GAP


class _Box(NamedTuple):
    """A rectangle of a chart [px]."""

    left: float
    top: float
    right: float
    bottom: float

    def holds(self, place: Place, margin: float) -> bool:
        """Whether a place is inside, or nearer than the margin [px]."""
        inside_x = self.left - margin < place.x < self.right + margin
        return inside_x and self.top - margin < place.y < self.bottom + margin

    def meets(self, other: "_Box") -> bool:
        """Whether two rectangles have a common part."""
        apart_x = self.right <= other.left or other.right <= self.left
        return not apart_x and not (self.bottom <= other.top or other.bottom <= self.top)


#: Places that are tried, the best first: the line of a front falls to the right, so that it is free
#: above on the right and below on the left.
_PLACES = (
    LabelPlace(_GAP, -_GAP, "left"),
    LabelPlace(-_GAP, _GAP, "right"),
    LabelPlace(_GAP + 2, 0.0, "left"),
    LabelPlace(-_GAP - 2, 0.0, "right"),
    LabelPlace(_GAP, _GAP, "left"),
    LabelPlace(-_GAP, -_GAP, "right"),
    LabelPlace(0.0, -2 * _GAP, "center"),
    LabelPlace(0.0, 2 * _GAP, "center"),
    LabelPlace(_GAP, -3 * _GAP, "left"),
    LabelPlace(-_GAP, 3 * _GAP, "right"),
)
#: Places that are tried where these are taken, with a line from the point to its label.
_FAR_PLACES = tuple(
    LabelPlace(dx, dy, align)
    for distance in (6 * _GAP, 9 * _GAP, 12 * _GAP)
    for dx, align in ((2 * _GAP, "left"), (-2 * _GAP, "right"))
    for dy in (distance, -distance)
)


def place_labels(
    points: Sequence[Place],
    texts: Sequence[str],
    lines: Sequence[Sequence[Place]],
    *,
    width: float,
    height: float,
    most: int,
    avoid: Sequence[Place] = (),
) -> dict[int, LabelPlace]:
    """Find places for the labels of some points.

    Parameters
    ----------
    points : sequence of Place
        All points, the ones whose labels matter most first [px].
    texts : sequence of str
        The label of each of them.
    lines : sequence of sequence of Place
        Corners of the lines of the chart, which labels do not cross [px].
    width, height : float
        Size of the chart [px].
    most : int
        Most labels [-].
    avoid : sequence of Place, optional
        Further points that labels do not cover [px].

    Returns
    -------
    places : dict of int to LabelPlace
        Where the label stands, by the number of its point. Points without a free place have none, nor have
        those that nearly cover one with a label.
    """
    kept_free = [*points, *avoid]
    for line in lines:
        kept_free += _walk(line)
    chart = _Box(0.0, 0.0, width, height)
    places: dict[int, LabelPlace] = {}
    labelled: list[Place] = []
    taken: list[_Box] = []
    for number, (point, text) in enumerate(zip(points, texts, strict=True)):
        if len(places) == most:
            break
        if any(math.dist(point, other) < _APART for other in labelled):
            continue
        for candidate in (*_PLACES, *_FAR_PLACES):
            box = _find_box(point, text, candidate)
            leader: list[Place] = []
            if candidate.is_far:
                leader = _walk([point, Place(point.x + candidate.dx, point.y + candidate.dy)])
            if _is_free(box, chart, taken, kept_free) and not _crosses(leader, taken):
                places[number] = candidate
                labelled.append(point)
                taken.append(box)
                kept_free += leader
                break
    return places


def spread_out(points: Sequence[Place]) -> list[int]:
    """Order points so that each is far from all before it, the first one as it is.

    Parameters
    ----------
    points : sequence of Place
        Points of a chart [px].

    Returns
    -------
    order : list of int
        Their numbers.

    Examples
    --------
    >>> spread_out([Place(0, 0), Place(1, 0), Place(9, 0), Place(5, 0)])
    [0, 2, 3, 1]
    """
    if not points:
        return []
    order = [0]
    distances = [math.dist(point, points[0]) for point in points]
    while len(order) < len(points):
        left = [number for number in range(len(points)) if number not in order]
        farthest = max(left, key=lambda number: distances[number])
        order.append(farthest)
        for number in left:
            to_new = math.dist(points[number], points[farthest])
            distances[number] = min(distances[number], to_new)
    return order


def _walk(line: Sequence[Place]) -> list[Place]:
    """Places along a line, `_STEP` apart."""
    places: list[Place] = []
    for start, end in pairwise(line):
        steps = max(1, math.ceil(math.dist(start, end) / _STEP))
        for step in range(steps + 1):
            share = step / steps
            x = start.x + share * (end.x - start.x)
            y = start.y + share * (end.y - start.y)
            places.append(Place(x, y))
    return places


def _find_box(point: Place, text: str, place: LabelPlace) -> _Box:
    """The rectangle that a label fills."""
    width = _LETTER * FONT_SIZE * len(text)
    height = _LINE * FONT_SIZE
    anchor = Place(point.x + place.dx, point.y + place.dy)
    starts = {"left": anchor.x, "right": anchor.x - width, "center": anchor.x - width / 2}
    left = starts[place.align]
    return _Box(left, anchor.y - height / 2, left + width, anchor.y + height / 2)


def _crosses(line: Sequence[Place], taken: Sequence[_Box]) -> bool:
    """Whether a line goes through a label."""
    return any(box.holds(place, 1.0) for place in line for box in taken)


def _is_free(box: _Box, chart: _Box, taken: Sequence[_Box], kept_free: Sequence[Place]) -> bool:
    """Whether a label stands inside the chart and covers nothing."""
    inside_x = box.left >= chart.left and box.right <= chart.right
    if not inside_x or box.top < chart.top or box.bottom > chart.bottom:
        return False
    if any(box.meets(other) for other in taken):
        return False
    return not any(box.holds(place, _FREE / 2) for place in kept_free)
