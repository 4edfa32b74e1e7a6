"""A drawing of a DLRM: what two ranks compute, and what they send each other."""

import altair as alt

from perfkit.plots.colours import CLASSES
from perfkit.plots.drawings import Box, Line, Words, lay_out

_WIDTH, _HEIGHT = 660, 428
#: Where the two columns of a rank and both together begin and end, for the first rank; the second rank
#: is its mirror image [pixels].
_MLP, _TABLES, _BOTH = (15, 140), (160, 295), (15, 295)
_INPUT = CLASSES["inputs"]
_PRODUCT, _LOOKUP = CLASSES["gemm"], CLASSES["lookup"]
_INTERACTION, _SENT = CLASSES["bmm"], CLASSES["communication"]


def draw_dlrm() -> alt.LayerChart:
    """Draw one step of a DLRM on two ranks.

    Each rank has some of the tables and a copy of both MLPs. It looks up the rows of its tables for all
    samples, and an all_to_all brings each rank the pooled rows of its own samples. The interaction
    multiplies all pairs of pooled rows and of the result of the bottom MLP; the top MLP follows.

    Returns
    -------
    chart : altair.LayerChart
        Boxes are what a rank holds or computes, arrows what the next one reads. What travels between
        ranks is red.
    """
    boxes: list[Box] = []
    lines: list[Line] = []
    words: list[Words] = []
    frames: list[Box] = []
    for rank in (0, 1):
        _add_rank(rank, frames, boxes, lines, words)
    exchange = "all_to_all: each rank gets the pooled rows\nof its own samples"
    boxes.append(Box(_TABLES[0], 218, _mirror(_TABLES[0]), 254, exchange, _SENT))
    lines.append(Line(_BOTH[1], 367, _mirror(_BOTH[1]), 367, _SENT))
    words.append(
        Words(
            _WIDTH / 2,
            416,
            "backward: all_reduce of the gradients of the top MLPs (line) and of the bottom ones",
            "center",
        )
    )
    note = "forward pass from top to bottom; the backward pass goes up, with an all_to_all of gradients"
    heading = alt.Title("One step of a DLRM on two ranks", subtitle=note)
    return lay_out(boxes, lines, words, frames=frames, width=_WIDTH, height=_HEIGHT, title=heading)


def _mirror(x: float) -> float:
    """The place of the second rank that is that of the first one in a mirror."""
    return _WIDTH - x


def _add_rank(
    rank: int, frames: list[Box], boxes: list[Box], lines: list[Line], words: list[Words]
) -> None:
    """What a rank holds and computes."""

    def add_box(
        column: tuple[float, float], top: float, bottom: float, text: str, color: str
    ) -> None:
        left, right = column
        if rank == 1:
            left, right = _mirror(right), _mirror(left)
        boxes.append(Box(left, top, right, bottom, text, color))

    def add_arrow(column: tuple[float, float], top: float, bottom: float) -> None:
        x = (column[0] + column[1]) / 2
        if rank == 1:
            x = _mirror(x)
        lines.append(Line(x, top, x, bottom, _PRODUCT, is_arrow=True))

    left, right = (4, 306) if rank == 0 else (_mirror(306), _mirror(4))
    frames.append(Box(left, 4, right, 396, "", "#8C8C8C", 0.06, 1.0))
    words.append(Words((left + right) / 2, 17, f"rank {rank}", "center", weight="bold"))
    add_arrow(_MLP, 66, 94)
    add_arrow(_TABLES, 66, 94)
    add_arrow(_TABLES, 130, 156)
    add_arrow(_TABLES, 192, 216)
    add_arrow(_TABLES, 254, 284)
    add_arrow(_MLP, 130, 284)
    add_arrow(_BOTH, 320, 348)
    add_box(_MLP, 30, 66, "dense features\nof its samples", _INPUT)
    add_box(_TABLES, 30, 66, "indices of all samples\ninto its tables", _INPUT)
    add_box(_MLP, 96, 132, "bottom MLP\n(a copy)", _PRODUCT)
    add_box(_TABLES, 96, 132, "its embedding tables", _LOOKUP)
    add_box(_TABLES, 158, 194, "pooled rows\nof all samples", _LOOKUP)
    add_box(
        _BOTH,
        286,
        322,
        "interaction: products of all pairs\nof pooled rows and bottom MLP",
        _INTERACTION,
    )
    add_box(_BOTH, 350, 386, "top MLP (a copy)\nand loss", _PRODUCT)
