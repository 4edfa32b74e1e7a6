"""What all charts share: colours of classes, axes with SI units, rows that JSON can hold."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeAlias

import altair as alt

from perfkit.ground.results import Table, read_records
from perfkit.plots import theme
from perfkit.plots.theme import PALETTE, Row

#: A polars or pandas frame, or rows as mappings.
Frame: TypeAlias = Any
Chart: TypeAlias = alt.Chart | alt.LayerChart | alt.HConcatChart | alt.VConcatChart

#: Colours of phases and of classes of operations, the same in every chart: Okabe and Ito's, and where these end the
#: muted ones of Tol, "Colour schemes", SRON/EPS/TN/09-002, 2021. What shares a colour means the same.
PHASES = {"forward": "#0072B2", "backward": "#D55E00", "update": "#009E73", "optimizer": "#009E73",
          "host": "#8C8C8C", "handover": "#AAAAAA", "loading": "#CC6677"}  # fmt: skip
CLASSES = {
    "gemm": "#0072B2", "busy": "#0072B2", "bmm": "#56B4E9", "attention": "#332288", "convolution": "#AA4499",
    "elementwise": "#009E73", "rowwise": "#999933", "pooling": "#117733",
    "copy": "#DDCC77", "copies": "#DDCC77", "pack": "#DDCC77", "transfer": "#44AA99",
    "embedding_forward": "#E69F00", "lookup": "#E69F00", "embedding_backward": "#F0E442", "backward": "#F0E442",
    "embedding_update": "#882255", "update": "#882255",
    "collective": "#D55E00", "communication": "#D55E00", "messages": "#D55E00", "waiting": "#CC79A7",
    "host": "#8C8C8C", "queued": "#B5B5B5", "synchronisation": "#666666", "loading": "#CC6677",
    "handover": "#AAAAAA", "other": "#D9D9D9", "everything else": "#D9D9D9",
}  # fmt: skip
#: One more than colours, so that 72 series look different.
_SHAPES = "circle square triangle-up diamond cross triangle-down triangle-right triangle-left wedge".split()


def read_rows(frame: Frame) -> list[Row]:
    """Rows as plain dictionaries; what JSON cannot hold becomes null.

    Parameters
    ----------
    frame : frame or list of dict
        Any rows.

    Returns
    -------
    rows : list of dict
        New dictionaries.
    """
    return [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        for row in read_records("frame", frame)
    ]


def read_frame(frame: Frame, **columns: Any) -> Table:
    """Read some columns of rows.

    Parameters
    ----------
    frame : frame or list of dict
        Any rows.
    **columns : object
        What a column holds where a row lacks it, which gives its type.

    Returns
    -------
    rows : polars.DataFrame
        These columns.
    """
    import polars

    types = {str: polars.String, int: polars.Int64, float: polars.Float64}
    rows = [tuple(type(usual)(row.get(name) or usual) for name, usual in columns.items()) for row in read_rows(frame)]
    return polars.DataFrame(rows, {name: types[type(usual)] for name, usual in columns.items()}, orient="row")


def draw(rows: Sequence[Row], **settings: Any) -> alt.Chart:
    """Start a chart of rows, which it holds.

    Parameters
    ----------
    rows : sequence of dict
        What to draw.
    **settings : object
        Settings of `altair.Chart`.

    Returns
    -------
    chart : altair.Chart
        Without a mark.
    """
    return theme.Chart(alt.InlineData(values=list(rows)), **settings)


def layer(*charts: alt.Chart) -> alt.LayerChart:
    """Lay charts over each other.

    Parameters
    ----------
    *charts : altair.Chart
        From the back to the front.

    Returns
    -------
    chart : altair.LayerChart
        All of them.
    """
    return theme.LayerChart(layer=list(charts))


def order(values: Iterable[Any]) -> list[Any]:
    """List different values in the order in which they come.

    Parameters
    ----------
    values : iterable
        Any values.

    Returns
    -------
    ordered : list
        Each once.
    """
    return list(dict.fromkeys(values))


def colour(name: str, values: Sequence[Any], *, title: str | None = None, legend: Any = alt.Undefined) -> alt.Color:
    """Give each value of a column its colour: phases and classes theirs, others those of `PALETTE` that are left.

    Parameters
    ----------
    name : str
        Column.
    values : sequence
        Its values, in order.
    title : str, optional
        Title of the legend.
    legend : altair.Legend, optional
        The legend.

    Returns
    -------
    channel : altair.Color
        Nominal.
    """
    known = {value: (PHASES if name == "phase" else CLASSES).get(value) for value in values}
    free = cycle([each for each in PALETTE if each not in known.values()] or PALETTE)
    scale = alt.Scale(domain=list(values), range=[found or next(free) for found in known.values()])
    return alt.Color(f"{name}:N", scale=scale, title=title, legend=legend)


def mark_series(name: str, values: Sequence[Any], *, legend: Any = alt.Undefined, title: str | None = None) -> Row:
    """Colour and shape of a series, so that either alone identifies it.

    Parameters
    ----------
    name : str
        Column.
    values : sequence
        Its values, in order.
    legend : altair.Legend, optional
        The legend.
    title : str, optional
        Title of the legend.

    Returns
    -------
    channels : dict
        ``color`` and ``shape``.
    """
    scale = alt.Scale(domain=list(values), range=[_SHAPES[i % len(_SHAPES)] for i in range(len(values))])
    shape = alt.Shape(f"{name}:N", scale=scale, title=title, legend=legend)
    return {"color": colour(name, values, title=title, legend=legend), "shape": shape}


def tips(*names: str, **formats: str) -> list[alt.Tooltip]:
    """Say what the pointer shows.

    Parameters
    ----------
    *names : str
        Columns of text.
    **formats : str
        Columns of numbers and their format.

    Returns
    -------
    tooltips : list of altair.Tooltip
        One per column.
    """
    numbers = [alt.Tooltip(f"{name}:Q", format=text) for name, text in formats.items()]
    return [*(alt.Tooltip(f"{name}:N") for name in names), *numbers]


def label_si(unit: str, value: str = "datum.value") -> str:
    """Write tick labels such as ``20 ms`` or ``1 GB``; pure numbers take no prefix.

    Parameters
    ----------
    unit : str
        Base unit, empty for pure numbers [-].
    value : str, optional
        What is written, an expression.

    Returns
    -------
    expression : str
        For Vega.
    """
    if not unit:
        return f"format({value}, '~g')"
    return f"replace(format({value}, '.3~s'), regexp('([a-zA-Zµ]?)$'), ' $1{unit}')"


def log_domain(values: Iterable[float | None], *, room: float = 1.25) -> tuple[float, float]:
    """Find the ends of a logarithmic axis.

    Parameters
    ----------
    values : iterable of float or None
        What is drawn, in the unit of the axis; only values above zero count.
    room : float, optional
        Factor left free at either end [-].

    Returns
    -------
    low, high : float
        Ends, in the unit of the axis.
    """
    known = [value for value in values if value is not None and value > 0]
    return (min(known) / room, max(known) * room) if known else (0.1, 10.0)


def log_axis(name: str, title: str, domain: tuple[float, float], unit: str, channel: Any = alt.X) -> Any:
    """Make a logarithmic axis with SI units.

    Parameters
    ----------
    name : str
        Column.
    title : str
        What it is, in words.
    domain : (float, float)
        Ends, see `log_domain` [unit].
    unit : str
        Base unit, empty for pure numbers [-].
    channel : class, optional
        `altair.X` or `altair.Y`.

    Returns
    -------
    channel : altair.X or altair.Y
        The axis.
    """
    low, high = domain
    decades, first, last = math.log10(high / low), math.floor(math.log10(low)), math.floor(math.log10(high))
    # even steps within a decade, 1-2-5 over few decades, powers of ten over many, so that labels never collide
    steps, every = [1, 2, 5] if decades < 2.5 else [1, 3] if decades < 4 else [1], 1 + (decades >= 7) + (decades >= 11)
    ticks = [float(f"{step}e{power}") for power in range(first, last + 1) if power % every == 0 for step in steps]
    if decades < 1:
        unit_step = 10.0 ** math.floor(math.log10((high - low) / 4))
        step = next(step * unit_step for step in (1, 2, 5, 10) if step * unit_step >= (high - low) / 4)
        ticks = [float(f"{step * i:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axis = alt.Axis(values=[tick for tick in ticks if low <= tick <= high], labelExpr=label_si(unit))
    scale = alt.Scale(type="log", domain=list(domain), nice=False)
    return channel(f"{name}:Q", title=title, scale=scale, axis=axis)


def amount_axis(name: str, title: str, unit: str, *, ticks: int = 6, scale: Any = alt.Undefined) -> alt.X:
    """Make a horizontal axis of amounts with SI units.

    Parameters
    ----------
    name : str
        Column.
    title : str
        What it is, in words.
    unit : str
        Base unit [-].
    ticks : int, optional
        Ticks at most, roughly [-].
    scale : altair.Scale, optional
        By default from zero to the largest amount.

    Returns
    -------
    axis : altair.X
        The axis.
    """
    return alt.X(f"{name}:Q", title=title, axis=alt.Axis(labelExpr=label_si(unit), tickCount=ticks), scale=scale)


def draw_bars(rows: Sequence[Row], x: alt.X, y: alt.Y, color: alt.Color, shown: list[alt.Tooltip]) -> alt.Chart:
    """Draw stacked horizontal bars.

    Parameters
    ----------
    rows : sequence of dict
        A row for each part of a bar, with ``order``: its place in the bar.
    x, y, color : altair channel
        Amount, bar and part.
    shown : list of altair.Tooltip
        What the pointer shows.

    Returns
    -------
    chart : altair.Chart
        The bars.
    """
    bars = draw(rows).mark_bar(height={"band": 0.8})
    return bars.encode(x=x, y=y, color=color, order=alt.Order("order:Q"), tooltip=shown)


def draw_points(
    rows: Sequence[Row], x: alt.X, y: alt.Y, looks: Mapping[str, Any], shown: list[alt.Tooltip],
    spans: Mapping[str, tuple[str, str]] | None = None, **mark: Any,
) -> list[alt.Chart]:  # fmt: skip
    """Draw points with the ranges around them.

    Parameters
    ----------
    rows : sequence of dict
        A row for each point.
    x, y : altair channel
        Where it is.
    looks : mapping
        From `mark_series`.
    shown : list of altair.Tooltip
        What the pointer shows.
    spans : mapping of str to (low, high), optional
        Columns of the ends of a range along ``x`` or ``y``.
    **mark : object
        Settings of the points.

    Returns
    -------
    charts : list of altair.Chart
        A layer for each kind of range, then the points.
    """
    base, ranges = draw(rows).encode(x=x, y=y, color=looks["color"]), []
    for name, (low, high) in (spans or {}).items():
        along = {"x": x, "y": y}[name]
        ends = {name: type(along)(f"{low}:Q", scale=along["scale"]), f"{name}2": f"{high}:Q"}
        ranges.append(base.mark_rule(opacity=0.55, strokeWidth=1.5).encode(**ends))
    points = base.mark_point(**{"filled": True, "opacity": 0.9, "size": 50, **mark})
    return [*ranges, points.encode(shape=looks["shape"], tooltip=shown)]
