"""What all charts share: their look, the colours of classes, axes with SI units, rows that JSON can
hold."""

import io
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeAlias

import altair as alt
import numpy as np
import polars

from perfkit.ground.results import Table, read_records
from perfkit.ground.targets import check_target, write_bytes
from perfkit.ground.units import check_choice, check_positive, check_type, clean, escape, show
from perfkit.plots.pictures import PictureError, draw_picture

#: A polars or pandas frame, or rows as mappings.
Frame: TypeAlias = Any
Row: TypeAlias = dict[str, Any]
#: What charts ask for where they cannot draw what they are given.
ROWS = "give a frame or a list of dicts with the columns that its documentation names"
#: Okabe and Ito, "Color Universal Design", 2008, with grey in place of black, and pale yellow last.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#F0E442"]
#: Colour of text, axes and reference lines.
INK = "#24292f"
#: Colours of phases and of operation classes, the same in every chart. They are those of Okabe and
#: Ito, then the muted ones of Tol, "Colour schemes", SRON/EPS/TN/09-002, 2021. Two names with one
#: colour mean the same thing.
PHASES = {
    "forward": "#0072B2",
    "backward": "#D55E00",
    "update": "#009E73",
    "optimizer": "#009E73",
    "host": "#8C8C8C",
    "host_device_synchronization": "#AAAAAA",
    "loading": "#CC6677",
}
CLASSES = {
    "gemm": "#0072B2",
    "busy": "#0072B2",
    "bmm": "#56B4E9",
    "attention": "#332288",
    "convolution": "#AA4499",
    "elementwise": "#009E73",
    "rowwise": "#999933",
    "pooling": "#117733",
    "copy": "#DDCC77",
    "copies": "#DDCC77",
    "pack": "#DDCC77",
    "transfer": "#44AA99",
    "embedding_forward": "#E69F00",
    "lookup": "#E69F00",
    "embedding_backward": "#F0E442",
    "backward": "#F0E442",
    "embedding_update": "#882255",
    "update": "#882255",
    "collective": "#D55E00",
    "communication": "#D55E00",
    "messages": "#D55E00",
    "waiting": "#CC79A7",
    "host": "#8C8C8C",
    "queued": "#B5B5B5",
    "synchronisation": "#666666",
    "loading": "#CC6677",
    "host_device_synchronization": "#AAAAAA",
    "other": "#D9D9D9",
    "everything else": "#D9D9D9",
}
#: Longest text in a chart; a longer name is cut in the middle [-].
_LONGEST = 2000
#: What a chart can be written as, and which of these are pictures.
_FORMATS = ("json", "html", "svg", "png", "pdf", "vega")
_PICTURES = ("svg", "png", "pdf")
#: Largest options of a picture; it then has some 10,000 pixels in a row [-].
_LARGEST = {"scale_factor": 20.0, "ppi": 1440.0}
#: Options of Altair for pages and JSON.
_OPTIONS = (
    "embed_options",
    "inline",
    "json_kwds",
    "override_data_transformer",
    "vega_version",
    "vegaembed_version",
    "vegalite_version",
)
#: Nine shapes and eight colours: 72 series differ in one of both.
_SHAPES = [
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


# -- theme
# -------------------------------------------------------------------------------------------------------------


@alt.theme.register("perfkit", enable=False)
def _theme() -> alt.theme.ThemeConfig:
    ink = dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor", "gridColor"), INK)
    text = {
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    }
    heading = {
        "color": INK,
        "subtitleColor": INK,
        "fontSize": 14,
        "subtitleFontSize": 11,
        "anchor": "start",
    }
    config: Any = {
        "background": "white",
        "font": "Inter, Helvetica Neue, Helvetica, Arial, Liberation Sans, DejaVu Sans Condensed, sans-serif",
        # Fonts of browsers are up to a tenth wider than the one that pictures are laid out with.
        "padding": {"left": 20, "top": 5, "right": 25, "bottom": 5},
        "axis": {**text, **ink, "titlePadding": 8, "gridOpacity": 0.12, "labelFlush": False},
        "legend": {**text, "offset": 30, "labelLimit": 240, "symbolOpacity": 1, "symbolSize": 70},
        "header": {**text, "labelLimit": 240},
        "title": {**heading, "offset": 10},
        "view": {"stroke": None, "continuousWidth": 460, "continuousHeight": 300},
        "range": {"category": PALETTE},
    }
    return {"config": config}


def _show(spec: Row, **options: Any) -> Row:
    """The picture and, of a chart with sliders, the chart itself, under the newest name that
    JupyterLab 4 draws."""
    live = (
        {"application/vnd.vegalite.v5+json": spec}
        if any("bind" in each for each in spec.get("params", ()))
        else {}
    )
    try:
        picture = {"image/svg+xml": draw_picture(json.dumps(spec)).decode()}
    except PictureError as error:
        warnings.warn(str(error), stacklevel=2)
        picture = {"text/plain": spec.get("description", "a chart")}
    return {**picture, **live}


alt.renderers.register("perfkit", _show)


class _Themed(alt.TopLevelMixin):
    """A chart that keeps perfkit's theme when it is shown or saved alone, and describes itself in
    words."""

    def to_dict(self, *args: Any, **settings: Any) -> Row:
        context = dict(settings.pop("context", None) or {})
        if not context.get("top_level", True):  # it is a part of another chart
            part: Row = super().to_dict(*args, context=context, **settings)
            return part
        form = settings.pop("format", "vega-lite")
        # Altair adds the theme of the whole process to charts at the top level; this one has its own.
        context |= {"top_level": False, "datasets": context.get("datasets", {})}
        spec: Row = super().to_dict(*args, context=context, **settings)
        spec = dict(alt.utils.update_nested(_theme(), spec, copy=True))
        spec.setdefault("$schema", alt.SCHEMA_URL)
        if context["datasets"]:
            spec["datasets"] = {**spec.get("datasets", {}), **context["datasets"]}
        if "description" not in spec:
            spec["description"] = _describe(spec)
        spec = _clean(spec)
        if form == "vega":
            compile_spec: Any = alt.vegalite_compilers.get()
            compiled: Row = compile_spec(spec)
            return compiled
        return spec

    def save(  # type: ignore[override]
        self, fp: Any, format: Any = None, **options: Any
    ) -> None:
        """Write the chart to a file; see ``altair.Chart.save``.

        Parameters
        ----------
        fp : str, Path or file object
            File to write; pictures are drawn in a process of their own.
        format : str, optional
            ``json``, ``html``, ``png``, ``svg``, ``pdf`` or ``vega``; by default the ending of the
            name.
        **options
            Of a picture ``scale_factor`` and ``ppi``, pixels per inch; of others those that
            ``altair.Chart.save`` takes, such as ``inline``.

        Raises
        ------
        ValueError
            For a name that cannot be written, an unknown format, and options that do not fit.
        PictureError
            For a picture that cannot be drawn.
        """
        named = isinstance(fp, str | os.PathLike)
        if named:
            fp = check_target("fp", fp)
        elif not hasattr(fp, "write"):
            wanted = "the name of a file to write, or a file that is open for writing"
            raise ValueError(f"fp is {show(fp)}; it must be {wanted}")
        form = _find_format(fp, format, named)
        if form in _PICTURES:
            content = self._draw(form, options)
        else:
            content = self._write(form, options).encode()
        if named:
            # Altair would wait for ever for the reader of a named pipe, and leave half a file
            write_bytes(fp, content)
            return
        is_text = form not in ("png", "pdf")
        try:
            fp.write(content.decode() if is_text else content)
        except TypeError as error:
            kind = "text" if is_text else "bytes"
            raise ValueError(
                f"fp is {show(fp)}; format {form!r} is {kind}; open the file for writing {kind}"
            ) from error

    def _draw(self, form: str, options: Row) -> bytes:
        """The chart as a picture."""
        names = {"scale_factor": "scale", "ppi": "ppi"}
        chosen = {}
        for name, value in options.items():
            check_choice("option", name, names)
            size = check_positive(name, value, maximum=_LARGEST[name])
            if form != "svg":  # it has no pixels
                chosen[names[name]] = size
        return draw_picture(json.dumps(self.to_dict()), form, **chosen)

    def _write(self, form: str, options: Row) -> str:
        """The chart as a page or as JSON."""
        for name in options:
            check_choice("option", name, _OPTIONS)
        for name in options.keys() & {"embed_options", "json_kwds"}:
            check_type(name, options[name], Mapping | None)
        text = io.StringIO()
        try:
            super().save(text, form, **options)  # type: ignore[arg-type]
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"the chart cannot be written as {form!r} with the options {show(options)}: "
                f"{escape(error, 200)}; leave them out"
            ) from error
        return text.getvalue()


def _find_format(fp: Any, format: Any, named: bool) -> str:
    """The format of a file, by its name where none is given."""
    if format is not None:
        return check_choice("format", format, _FORMATS)
    ending = fp.suffix.lstrip(".").lower() if named else ""
    if ending not in _FORMATS:
        endings = ", ".join(_FORMATS)
        raise ValueError(
            f"fp is {show(str(fp), 200)}; it must end with one of {endings}; name it so, or give format"
        )
    return ending


def _describe(spec: Row) -> str:
    """A chart in words: its title and subtitle."""
    title = spec.get("title", "Chart")
    if isinstance(title, str):
        return title
    lines = [title["text"], *np.atleast_1d(title.get("subtitle", []))]
    return ". ".join(filter(None, lines))


def _clean(value: Any) -> Any:
    """A part of a chart whose texts a picture can hold: visible characters, and no endless
    names."""
    if isinstance(value, str):
        text = clean(value)
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST - 503]}...{text[-500:]}"
        return text
    if isinstance(value, dict):
        return {_clean(key): _clean(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_clean(part) for part in value]
    return value


class Chart(_Themed, alt.Chart):
    """A chart in perfkit's theme."""


class LayerChart(_Themed, alt.LayerChart):
    """Charts on top of each other in perfkit's theme."""


class HConcatChart(_Themed, alt.HConcatChart):
    """Charts side by side in perfkit's theme."""


def is_chart(part: Any) -> bool:
    """Whether a part of a result is a chart."""
    return isinstance(part, alt.TopLevelMixin)


def use_svg() -> None:
    """Show charts in notebooks as SVG in perfkit's theme: small, stored in the file, and readable
    without a network.

    A chart with sliders is stored beside its picture, so that the sliders move in JupyterLab.

    Examples
    --------
    >>> use_svg()
    >>> alt.renderers.active, alt.theme.active
    ('perfkit', 'perfkit')
    """
    alt.renderers.enable("perfkit")
    alt.theme.enable("perfkit")


# -- rows
# --------------------------------------------------------------------------------------------------------------


def read_rows(frame: Frame) -> list[Row]:
    """New dictionaries, one per row; numbers that JSON cannot hold become null."""
    rows = read_records("frame", frame)
    return [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        for row in rows
    ]


def read_frame(frame: Frame, **columns: Any) -> Table:
    """Some columns of a frame; each is given with its default, which also sets the type."""
    types = {str: polars.String, int: polars.Int64, float: polars.Float64}
    rows = [
        tuple(type(usual)(row.get(name) or usual) for name, usual in columns.items())
        for row in read_rows(frame)
    ]
    return polars.DataFrame(
        rows, {name: types[type(usual)] for name, usual in columns.items()}, orient="row"
    )


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order in which they come."""
    return list(dict.fromkeys(values))


# -- colours, tooltips, axes
# -------------------------------------------------------------------------------------------


def colour(
    name: str, values: Sequence[Any], *, title: str | None = None, legend: Any = alt.Undefined
) -> alt.Color:
    """Colours for the values of a column: phases and classes have their own, others the unused ones
    of `PALETTE`."""
    known = {value: (PHASES if name == "phase" else CLASSES).get(value) for value in values}
    free = cycle([each for each in PALETTE if each not in known.values()] or PALETTE)
    scale = alt.Scale(domain=list(values), range=[found or next(free) for found in known.values()])
    return alt.Color(f"{name}:N", scale=scale, title=title, legend=legend)


def mark_series(
    name: str, values: Sequence[Any], *, legend: Any = alt.Undefined, title: str | None = None
) -> Row:
    """Channels ``color`` and ``shape`` for the series of a column, so that readers need only one of
    them."""
    scale = alt.Scale(
        domain=list(values), range=[_SHAPES[i % len(_SHAPES)] for i in range(len(values))]
    )
    shape = alt.Shape(f"{name}:N", scale=scale, title=title, legend=legend)
    return {"color": colour(name, values, title=title, legend=legend), "shape": shape}


def tips(*names: str, **formats: str) -> list[alt.Tooltip]:
    """What the pointer shows: columns of text, then columns of numbers, each with its format."""
    numbers = [alt.Tooltip(f"{name}:Q", format=text) for name, text in formats.items()]
    return [*(alt.Tooltip(f"{name}:N") for name in names), *numbers]


def label_si(unit: str, value: str = "datum.value") -> str:
    """A Vega expression that writes a value such as ``20 ms`` or ``1 GB``; of pure numbers, large
    ones get a prefix."""
    if not unit:
        return f"format({value}, {value} < 1000 ? '.4~g' : '.3~s')"
    return f"replace(format({value}, '.3~s'), regexp('([a-zA-Zµ]?)$'), ' $1{unit}')"


def log_domain(values: Iterable[float | None], *, room: float = 1.25) -> tuple[float, float]:
    """Ends of a logarithmic axis, with a factor `room` free at both ends; only values above zero
    count."""
    known = [value for value in values if value is not None and value > 0]
    return (min(known) / room, max(known) * room) if known else (0.1, 10.0)


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
    decades, first, last = (
        math.log10(high / low),
        math.floor(math.log10(low)),
        math.floor(math.log10(high)),
    )
    # Labels must not overlap: more steps in a decade over few decades, powers of ten over many.
    table = (
        (0.35, range(10, 100, 5)),
        (0.7, (10, 15, 20, 30, 40, 50, 60, 80)),
        (1.2, (10, 20, 30, 50, 70)),
    )
    steps = next(
        (own for most, own in (*table, (2.5, (10, 20, 50)), (4, (10, 30))) if decades < most), (10,)
    )
    every = 1 + (decades >= 7) + (decades >= 11)
    ticks = [
        float(f"{step}e{power - 1}")
        for power in range(first, last + 1)
        if power % every == 0
        for step in steps
    ]
    axis = alt.Axis(
        values=[tick for tick in ticks if low <= tick <= high], labelExpr=label_si(unit)
    )
    scale = alt.Scale(type="log", domain=list(domain), nice=False)
    return channel(f"{name}:Q", title=title, scale=scale, axis=axis)


def amount_axis(
    name: str, title: str, unit: str, *, ticks: int = 6, scale: Any = alt.Undefined
) -> alt.X:
    """A horizontal linear axis in a base unit, with SI prefixes and roughly `ticks` ticks; by
    default from zero."""
    return alt.X(
        f"{name}:Q",
        title=title,
        axis=alt.Axis(labelExpr=label_si(unit), tickCount=ticks),
        scale=scale,
    )


# -- drawing
# -----------------------------------------------------------------------------------------------------------


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
    looks: Mapping[str, Any],
    shown: list[alt.Tooltip],
    spans: Mapping[str, tuple[str, str]] | None = None,
    **mark: Any,
) -> list[alt.Chart]:
    """Layers of points that look as `mark_series` says, behind them their ranges.

    `spans` names the columns that hold the ends of a range along ``x`` or ``y``.
    """
    base, ranges = draw(rows).encode(x=x, y=y, color=looks["color"]), []
    for name, (low, high) in (spans or {}).items():
        along = {"x": x, "y": y}[name]
        ends = {name: type(along)(f"{low}:Q", scale=along["scale"]), f"{name}2": f"{high}:Q"}
        ranges.append(base.mark_rule(opacity=0.55, strokeWidth=1.5).encode(**ends))
    points = base.mark_point(**{"filled": True, "opacity": 0.9, "size": 50, **mark})
    return [*ranges, points.encode(shape=looks["shape"], tooltip=shown)]
