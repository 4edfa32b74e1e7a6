"""Colours and shapes of series: those of phases and of classes of operations, and the palette of
all others."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import altair as alt

#: Okabe and Ito, "Color Universal Design", 2008, with grey in place of black, and pale yellow last.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#F0E442"]
#: Colour of text, axes and reference lines.
INK = "#24292f"
#: Colours of phases and of operation classes, the same in every chart. They are those of Okabe and
#: Ito, then the muted ones of Tol, "Colour schemes", SRON/EPS/TN/09-002, 2021, and others that are far
#: from all of these. Two names with one colour mean the same thing.
PHASES = {
    "forward": "#0072B2",
    "backward": "#D55E00",
    "forward and backward": "#CC79A7",
    "update": "#009E73",
    "optimizer": "#009E73",
    "host": "#8C8C8C",
    "host_device_synchronization": "#404040",
    "loading": "#CC6677",
}
CLASSES = {
    "gemm": "#0072B2",
    "busy": "#0072B2",
    "bmm": "#56B4E9",
    "attention": "#332288",
    "convolution": "#AA4499",
    "elementwise": "#009E73",
    "rowwise": "#8C510A",
    "pooling": "#117733",
    "recurrent": "#7A7AE0",
    "factorization": "#661100",
    "fourier": "#77B41F",
    "copy": "#DDCC77",
    "copies": "#DDCC77",
    "pack": "#DDCC77",
    "transfer": "#7FE0D0",
    "offload": "#7FE0D0",
    "inputs": "#7FE0D0",
    "embedding_forward": "#E69F00",
    "lookup": "#E69F00",
    "embedding_backward": "#F0E442",
    "backward": "#F0E442",
    "embedding_update": "#882255",
    "update": "#882255",
    "collective": "#D55E00",
    "communication": "#D55E00",
    "messages": "#D55E00",
    # messages of embedding tables; the first one is most of what they send
    "exchange of pooled rows": "#D55E00",
    "exchange of indices": "#FFC9A3",
    "partial sums": "#C00020",
    "partial sums inside nodes": "#F2A3A3",
    "gradients of copies": "#FF8A5B",
    "waiting": "#CC79A7",
    "host": "#8C8C8C",
    "queued": "#C9B3DC",
    "synchronisation": "#404040",
    "loading": "#CC6677",
    "host_device_synchronization": "#404040",
    "other": "#D9D9D9",
    "everything else": "#D9D9D9",
}
#: What memory is used for; a use that is absent takes no colour from the others.
USES = {
    "parameters": "#0072B2",
    "gradients": "#009E73",
    "states": "#CC79A7",
    "activations": "#E69F00",
    "tables": "#882255",
    "communication": "#D55E00",
    "workspace": "#56B4E9",
}
#: Nine shapes and eight colours: 72 series differ in one of both.
SHAPES = [
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
    "triangle-left",
    "wedge",
]


class SeriesLooks(NamedTuple):
    """How the series of a column differ: by colour and by shape, so that readers need only one of
    them."""

    color: alt.Color
    shape: alt.Shape


def colour(
    column: str, values: Sequence[Any], *, title: str | None = None, legend: Any = alt.Undefined
) -> alt.Color:
    """Colours for the values of a column: phases, classes and uses of memory have their own, curves of
    closed forms and others the unused ones of `PALETTE`."""
    named: Mapping[str, str] = {"phase": PHASES, "use": USES, "curve": {}}.get(column, CLASSES)
    taken = [named.get(value) for value in values]
    unused = [shade for shade in PALETTE if shade not in taken]
    shades_of_others = cycle(unused or PALETTE)
    shades: dict[Any, str] = {}
    for value in values:
        if value in named:
            shades[value] = named[value]
        elif value not in shades:
            shades[value] = next(shades_of_others)
    scale = alt.Scale(domain=list(values), range=list(shades.values()))
    return alt.Color(f"{column}:N", scale=scale, title=title, legend=legend)


def choose_ink(ground: str, opacity: float = 1.0) -> str:
    """White or `INK`, whichever is read better on a colour that lies on white.

    The one with more contrast as WCAG 2.1 defines it, from relative luminances.
    """
    luminance = opacity * _find_luminance(ground) + 1 - opacity
    contrast_of_white = 1.05 / (luminance + 0.05)
    contrast_of_ink = (luminance + 0.05) / (_find_luminance(INK) + 0.05)
    return "white" if contrast_of_white > contrast_of_ink else INK


def _find_luminance(shade: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2.1), from 0 of black to 1 of white."""
    luminance = 0.0
    for start, weight in ((1, 0.2126), (3, 0.7152), (5, 0.0722)):
        level = int(shade[start : start + 2], 16) / 255
        linear = level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4
        luminance += weight * linear
    return luminance


def mark_series(
    column: str, values: Sequence[Any], *, legend: Any = alt.Undefined, title: str | None = None
) -> SeriesLooks:
    """A colour and a shape for each value of a column."""
    shapes = [SHAPES[number % len(SHAPES)] for number in range(len(values))]
    scale = alt.Scale(domain=list(values), range=shapes)
    shape = alt.Shape(f"{column}:N", scale=scale, title=title, legend=legend)
    return SeriesLooks(colour(column, values, title=title, legend=legend), shape)
