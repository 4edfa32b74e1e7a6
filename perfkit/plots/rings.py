"""A drawing of a ring: how four GPUs add up what they have, step by step."""

from typing import NamedTuple

import altair as alt

from perfkit.plots.colours import CLASSES, PALETTE
from perfkit.plots.drawings import Box, Line, Words, lay_out

_RANKS = 4
_WIDTH, _HEIGHT = 640, 400
#: Size of a step in the drawing, and of the part of a buffer in it [pixels].
_PANEL_WIDTH, _PANEL_HEIGHT = 330, 205
_CELL_WIDTH, _CELL_HEIGHT = 24, 24
#: Places of the buffers in a step: the ring goes clockwise [pixels].
_PLACES = ((10, 45), (194, 45), (194, 132), (10, 132))
#: How dark a part is that is the sum over 1, 2, 3 or 4 GPUs [-].
_SHADES = (0.08, 0.25, 0.45, 0.7)
_SUM, _SENT, _COMPLETE = PALETTE[0], CLASSES["communication"], PALETTE[2]


class _Sent(NamedTuple):
    """A part of the buffer that a rank sends to the next one."""

    rank: int
    part: int


def draw_ring() -> alt.LayerChart:
    """Draw a reduce_scatter on a ring of four GPUs, step by step.

    Each GPU begins with four parts, a to d. In each of three steps it sends one part to the next GPU,
    which adds it to its own. At the end each GPU has the whole sum of one part. An all_reduce goes on
    with an all_gather: three more steps, in which the sums go round.

    Returns
    -------
    chart : altair.LayerChart
        The parts before the first step and after each step: the darker a part, the more GPUs it is the
        sum of. The part that is sent next has a bold border.
    """
    boxes: list[Box] = []
    lines: list[Line] = []
    words: list[Words] = []
    for step in range(_RANKS):
        left = _PANEL_WIDTH * (step % 2)
        top = _PANEL_HEIGHT * (step // 2)
        _add_step(step, left, top, boxes, lines, words)
    note = "darker: the sum of more GPUs; bold: sent in the next step; green: the whole sum"
    heading = alt.Title("A reduce_scatter on a ring of four GPUs", subtitle=note)
    return lay_out(boxes, lines, words, width=_WIDTH, height=_HEIGHT, title=heading)


def find_sent(step: int) -> list[_Sent]:
    """What each rank sends in a step, the first of which is 1."""
    return [_Sent(rank, (rank - step) % _RANKS) for rank in range(_RANKS)]


def count_sums(steps: int) -> list[list[int]]:
    """Over how many GPUs each part of each rank is the sum after some steps.

    Examples
    --------
    >>> count_sums(0)[0], [max(parts) for parts in count_sums(3)]
    ([1, 1, 1, 1], [4, 4, 4, 4])
    """
    counts = [[1] * _RANKS for _ in range(_RANKS)]
    for step in range(1, steps + 1):
        before = [list(parts) for parts in counts]
        for rank, part in find_sent(step):
            receiver = (rank + 1) % _RANKS
            counts[receiver][part] += before[rank][part]
    return counts


def _add_step(
    step: int, left: float, top: float, boxes: list[Box], lines: list[Line], words: list[Words]
) -> None:
    """The parts after a step, and what the next step sends."""
    is_last = step == _RANKS - 1
    sent = [] if is_last else find_sent(step + 1)
    words.append(Words(left + 10, top + 12, _name_step(step), weight="bold"))
    for rank, counts in enumerate(count_sums(step)):
        x, y = left + _PLACES[rank][0], top + _PLACES[rank][1]
        is_above = rank < 2
        beside = y - 10 if is_above else y + _CELL_HEIGHT + 10
        words.append(Words(x, beside, f"GPU {rank}"))
        for part, count in enumerate(counts):
            boxes.append(_make_part(x, y, part, count, is_sent=_Sent(rank, part) in sent))
    for rank, part in sent:
        _add_arrow(rank, "abcd"[part], left, top, lines, words)


def _name_step(step: int) -> str:
    if step == 0:
        return "Before: each GPU has its own a, b, c, d"
    if step == _RANKS - 1:
        return f"After step {step}: each GPU has one whole sum"
    return f"After step {step}"


def _make_part(x: float, y: float, part: int, count: int, *, is_sent: bool) -> Box:
    """A part of a buffer."""
    left = x + part * _CELL_WIDTH
    is_complete = count == _RANKS
    if is_sent:
        color, border = _SENT, 2.5
    elif is_complete:
        color, border = _COMPLETE, 2.5
    else:
        color, border = _SUM, 1.0
    right, bottom = left + _CELL_WIDTH - 3, y + _CELL_HEIGHT
    return Box(left, y, right, bottom, "abcd"[part], color, _SHADES[count - 1], border)


def _add_arrow(
    rank: int, letter: str, left: float, top: float, lines: list[Line], words: list[Words]
) -> None:
    """The message of a rank to the next one: to the right, down, to the left, up."""
    near, far = left + 112, left + 184
    upper, lower = top + 74, top + 127
    if rank == 0:
        y = top + 57
        lines.append(Line(near, y, far, y, _SENT, is_arrow=True))
        words.append(Words(left + 148, y - 10, letter, "center"))
    elif rank == 1:
        x = left + 240
        lines.append(Line(x, upper, x, lower, _SENT, is_arrow=True))
        words.append(Words(x + 10, (upper + lower) / 2, letter, "center"))
    elif rank == 2:
        y = top + 144
        lines.append(Line(far, y, near, y, _SENT, is_arrow=True))
        words.append(Words(left + 148, y - 10, letter, "center"))
    else:
        x = left + 56
        lines.append(Line(x, lower, x, upper, _SENT, is_arrow=True))
        words.append(Words(x + 10, (upper + lower) / 2, letter, "center"))
