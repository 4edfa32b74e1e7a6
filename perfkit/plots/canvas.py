"""What charts are built from: rows that JSON can hold, axes with SI units, tooltips, and marks.

A chart reads its rows (`read_rows`), makes two axes (`log_axis`, `amount_axis`) and the looks of its
series (`perfkit.plots.colours`), draws them in layers (`draw_bars`, `draw_points`, `draw_ranges`,
`draw_band`, or `draw` and a mark of Altair), and lays these over each other in a `LayerChart` of
`perfkit.plots.theme`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import altair as alt
import polars

from perfkit.ground.results import Table, read_records
from perfkit.plots.colours import INK, SeriesLooks
from perfkit.plots.theme import Chart

#: A polars or pandas frame, or rows as mappings.
Frame: TypeAlias = Any
Row: TypeAlias = dict[str, Any]
#: What charts ask for where they cannot draw what they are given.
ROWS = "give a frame or a list of dicts with the columns that its documentation names"


# -- rows


def read_rows(frame: Frame) -> list[Row]:
    """New dictionaries, one per row; numbers that JSON cannot hold become null."""
    rows = []
    for record in read_records("frame", frame):
        rows.append({column: _make_storable(value) for column, value in record.items()})
    return rows


def _make_storable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_frame(frame: Frame, **defaults: Any) -> Table:
    """Some columns of a frame; each is named with its default, which also sets the type."""
    types = {str: polars.String, int: polars.Int64, float: polars.Float64}
    rows = read_rows(frame)
    columns = {}
    for name, default in defaults.items():
        kind = type(default)
        values = [kind(row.get(name) or default) for row in rows]
        columns[name] = polars.Series(name, values, dtype=types[kind])
    return polars.DataFrame(columns)


def is_above_zero(value: float | None) -> TypeGuard[float]:
    """Whether a number is known and has a place on a logarithmic axis."""
    return value is not None and value > 0


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order in which they come."""
    return list(dict.fromkeys(values))


# -- axes and tooltips


def tips(*names: str, **formats: str) -> list[alt.Tooltip]:
    """What the pointer shows: columns of text, then columns of numbers, each with its format."""
    texts = [alt.Tooltip(f"{name}:N") for name in names]
    numbers = [alt.Tooltip(f"{name}:Q", format=form) for name, form in formats.items()]
    return [*texts, *numbers]


def label_si(unit: str, value: str = "datum.value") -> str:
    """A Vega expression that writes a value such as ``20 ms`` or ``1 GB``; of pure numbers, large
    ones get a prefix, and a thousand seconds stay seconds."""
    if unit == "s":
        in_thousands = f"format({value}, ',.4~r') + ' s'"
        return f"({value} < 1000 ? {_label_with_prefix(unit, value)} : {in_thousands})"
    if unit:
        return _label_with_prefix(unit, value)
    return f"format({value}, {value} < 1000 ? '.4~g' : '.3~s')"


def _label_with_prefix(unit: str, value: str) -> str:
    return f"replace(format({value}, '.3~s'), regexp('([a-zA-Zµ]?)$'), ' $1{unit}')"


class Domain(NamedTuple):
    """Both ends of an axis, in its unit."""

    low: float
    high: float


def log_domain(values: Iterable[float | None], *, room: float = 1.25) -> Domain:
    """Ends of a logarithmic axis, with a factor `room` free at both ends; only values above zero
    count."""
    known = [value for value in values if is_above_zero(value)]
    if not known:
        return Domain(0.1, 10.0)
    return Domain(min(known) / room, max(known) * room)


class _Ticks(NamedTuple):
    """Which values of a decade have a tick, by how much an axis covers."""

    most_decades: float  # the axis covers fewer [-]
    steps: Sequence[int]  # tenths of the beginning of a decade [-]


#: Labels must not overlap: more ticks in a decade over few decades, powers of ten over many.
_TICKS = (
    _Ticks(0.35, range(10, 100, 5)),
    _Ticks(0.7, (10, 15, 20, 30, 40, 50, 60, 80)),
    _Ticks(1.2, (10, 20, 30, 50, 70)),
    _Ticks(2.5, (10, 20, 50)),
    _Ticks(4, (10, 30)),
)


def log_axis(
    name: str, title: str, domain: tuple[float, float], unit: str, channel: Any = alt.X
) -> Any:
    """A logarithmic axis (`altair.X` or `altair.Y`) over a domain in a base unit, with SI
    prefixes."""
    low, high = domain
    if not 0 < low <= high < math.inf or math.isinf(high / low):
        raise ValueError(
            f"{name} goes from {low:g} to {high:g}; a logarithmic axis takes numbers above 1e-300 "
            "and below 1e300; give other numbers"
        )
    axis = alt.Axis(values=_list_ticks(low, high), labelExpr=label_si(unit))
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    return channel(f"{name}:Q", title=title, scale=scale, axis=axis)


def _list_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: round numbers whose labels do not overlap."""
    decades = math.log10(high / low)
    steps = _choose_steps(decades)
    if decades >= 11:
        every = 3
    elif decades >= 7:
        every = 2
    else:
        every = 1
    values = []
    for power in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1):
        if power % every == 0:
            values += [float(f"{step}e{power - 1}") for step in steps]
    return [value for value in values if low <= value <= high]


def _choose_steps(decades: float) -> Sequence[int]:
    for ticks in _TICKS:
        if decades < ticks.most_decades:
            return ticks.steps
    return (10,)


def amount_axis(
    name: str, title: str, unit: str, *, ticks: int = 6, scale: Any = alt.Undefined
) -> alt.X:
    """A horizontal linear axis in a base unit, with SI prefixes and roughly `ticks` ticks; by
    default from zero."""
    axis = alt.Axis(labelExpr=label_si(unit), tickCount=ticks)
    return alt.X(f"{name}:Q", title=title, axis=axis, scale=scale)


# -- marks


def draw(rows: Sequence[Row], **settings: Any) -> alt.Chart:
    """A chart without a mark that holds these rows."""
    return Chart(alt.InlineData(values=list(rows)), **settings)


def draw_bars(
    rows: Sequence[Row], x: alt.X, y: alt.Y, color: alt.Color, shown: list[alt.Tooltip]
) -> alt.Chart:
    """Stacked horizontal bars: each row is one part, and its column ``order`` is the place in the
    bar."""
    bars = draw(rows).mark_bar(height={"band": 0.8})
    return bars.encode(x=x, y=y, color=color, order=alt.Order("order:Q"), tooltip=shown)


def draw_points(
    rows: Sequence[Row],
    x: alt.X,
    y: alt.Y,
    looks: SeriesLooks,
    shown: list[alt.Tooltip],
    **mark: Any,
) -> alt.Chart:
    """Points that look as `mark_series` says."""
    appearance = {"filled": True, "opacity": 0.9, "size": 50, **mark}
    points = draw(rows).encode(x=x, y=y, color=looks.color).mark_point(**appearance)
    return points.encode(shape=looks.shape, tooltip=shown)


def draw_ranges(
    rows: Sequence[Row],
    x: alt.X,
    y: alt.Y,
    color: alt.Color,
    *,
    along: str,
    low: str,
    high: str,
) -> alt.Chart:
    """Lines from the column `low` to the column `high` of each row, `along` ``x`` or ``y``; they
    belong behind points."""
    lines = draw(rows).encode(x=x, y=y, color=color).mark_rule(opacity=0.55, strokeWidth=1.5)
    if along == "x":
        return lines.encode(x=alt.X(f"{low}:Q", scale=x["scale"]), x2=f"{high}:Q")
    return lines.encode(y=alt.Y(f"{low}:Q", scale=y["scale"]), y2=f"{high}:Q")


def draw_band(
    rows: Sequence[Row],
    x: alt.X,
    y: alt.Y,
    *,
    low: str,
    high: str,
    color: str = INK,
    opacity: float = 0.08,
) -> alt.Chart:
    """A pale area over `x` between the columns `low` and `high`, on the scale of `y`. Dark ink needs
    little opacity, a colour of the palette about 0.2 [-]."""
    edge = alt.Y(f"{low}:Q", scale=y["scale"])
    area = draw(rows).mark_area(color=color, opacity=opacity, clip=True)
    return area.encode(x=x, y=edge, y2=f"{high}:Q")
