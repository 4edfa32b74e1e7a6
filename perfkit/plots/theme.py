"""The look of charts, how notebooks show them, and how they are written to files."""

import io
import json
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import altair as alt
import numpy as np

from perfkit.ground.targets import check_target, write_bytes
from perfkit.ground.units import check_choice, check_positive, check_type, clean, escape, show
from perfkit.plots.colours import INK, PALETTE
from perfkit.plots.pictures import PictureError, draw_picture

#: A chart in the grammar of Vega-Lite, or a part of one.
Specification: TypeAlias = dict[str, Any]
#: Type of a chart that moves with the pointer: the newest name that JupyterLab 4 draws.
_INTERACTIVE = "application/vnd.vegalite.v5+json"
#: Longest text in a chart; a longer name is cut in the middle [-].
_LONGEST = 2000
#: What a chart can be written as, and which of these are pictures.
_FORMATS = ("json", "html", "svg", "png", "pdf", "vega")
_PICTURES = ("svg", "png", "pdf")


class _PictureOption(NamedTuple):
    """An option of `save` for pictures."""

    name: str  # what vl_convert calls it
    largest: float  # a picture then has some 10,000 pixels in a row [-]


_PICTURE_OPTIONS = {
    "scale_factor": _PictureOption("scale", largest=20.0),
    "ppi": _PictureOption("ppi", largest=1440.0),
}
#: Options of Altair for pages and JSON.
_TEXT_OPTIONS = (
    "embed_options",
    "inline",
    "json_kwds",
    "override_data_transformer",
    "vega_version",
    "vegaembed_version",
    "vegalite_version",
)


@alt.theme.register("perfkit", enable=False)
def _theme() -> alt.theme.ThemeConfig:
    text_in_ink = {"labelColor": INK, "titleColor": INK}
    text = {**text_in_ink, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal"}
    lines_in_ink = {"domainColor": INK, "tickColor": INK, "gridColor": INK}
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
        "axis": {
            **text,
            **lines_in_ink,
            "titlePadding": 8,
            "gridOpacity": 0.12,
            "labelFlush": False,
        },
        "legend": {**text, "offset": 30, "labelLimit": 240, "symbolOpacity": 1, "symbolSize": 70},
        "header": {**text, "labelLimit": 240},
        "title": {**heading, "offset": 10},
        "view": {"stroke": None, "continuousWidth": 460, "continuousHeight": 300},
        "range": {"category": PALETTE},
    }
    return {"config": config}


def _show(spec: Specification, **options: Any) -> Specification:
    """What a notebook stores of a chart after `use_svg`: its picture and, of a chart with sliders,
    the chart itself."""
    shown = _draw(spec)
    if any("bind" in parameter for parameter in spec.get("params", ())):
        shown[_INTERACTIVE] = spec
    return shown


def _draw(spec: Specification) -> Specification:
    """Draw the picture of a chart for a notebook, by its type; the description in words if it
    cannot be drawn."""
    try:
        return {"image/svg+xml": draw_picture(json.dumps(spec)).decode()}
    except PictureError as error:
        warnings.warn(str(error), stacklevel=2)
        return {"text/plain": spec.get("description", "a chart")}


alt.renderers.register("perfkit", _show)


class _Themed(alt.TopLevelMixin):
    """A chart that keeps perfkit's theme when it is shown or saved alone, and describes itself in
    words."""

    def to_dict(self, *args: Any, **settings: Any) -> Specification:
        context = dict(settings.pop("context", None) or {})
        is_part_of_another = not context.get("top_level", True)
        if is_part_of_another:
            part: Specification = super().to_dict(*args, context=context, **settings)
            return part
        form = settings.pop("format", "vega-lite")
        # Altair adds the theme of the whole process to charts at the top level; this one has its own.
        context["top_level"] = False
        context.setdefault("datasets", {})
        chart: Specification = super().to_dict(*args, context=context, **settings)
        spec = _complete(chart, context["datasets"])
        if form == "vega":
            compile_spec: Any = alt.vegalite_compilers.get()
            compiled: Specification = compile_spec(spec)
            return compiled
        return spec

    def _repr_mimebundle_(self, *args: Any, **settings: Any) -> Any:
        """What a notebook shows: both the chart that moves and its picture, unless a renderer was
        chosen.

        JupyterLab draws the first; what shows stored notebooks shows the second. Altair alone
        stores a page that fetches its program from the network.
        """
        if alt.renderers.active != "default":
            return super()._repr_mimebundle_(*args, **settings)
        spec = self.to_dict()
        return {_INTERACTIVE: spec, **_draw(spec)}

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
        is_name = isinstance(fp, str | os.PathLike)
        if is_name:
            fp = check_target("fp", fp)
        elif not hasattr(fp, "write"):
            wanted = "the name of a file to write, or a file that is open for writing"
            raise ValueError(f"fp is {show(fp)}; it must be {wanted}")
        if format is not None:
            form = check_choice("format", format, _FORMATS)
        else:
            form = _read_format(fp, fp.suffix if is_name else "")
        if form in _PICTURES:
            content = self._draw(form, options)
        else:
            content = self._write(form, options).encode()
        if is_name:
            # Altair would wait for ever for the reader of a named pipe, and leave half a file
            write_bytes(fp, content)
        else:
            _write_to_open_file(fp, form, content)

    def _draw(self, form: str, options: Mapping[str, Any]) -> bytes:
        """The chart as a picture."""
        pixels = {}
        for name, value in options.items():
            check_choice("option", name, _PICTURE_OPTIONS)
            option = _PICTURE_OPTIONS[name]
            pixels[option.name] = check_positive(name, value, maximum=option.largest)
        text = json.dumps(self.to_dict())
        if form == "svg":  # it has no pixels
            return draw_picture(text, form)
        return draw_picture(text, form, **pixels)

    def _write(self, form: str, options: Mapping[str, Any]) -> str:
        """The chart as a page or as JSON."""
        for name in options:
            check_choice("option", name, _TEXT_OPTIONS)
        for name in ("embed_options", "json_kwds"):
            if name in options:
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


def _read_format(fp: Any, ending: str) -> str:
    """The format that the ending of a name says."""
    form = ending.lstrip(".").lower()
    if form not in _FORMATS:
        endings = ", ".join(_FORMATS)
        raise ValueError(
            f"fp is {show(str(fp), 200)}; it must end with one of {endings}; name it so, or give format"
        )
    return form


def _write_to_open_file(file: Any, form: str, content: bytes) -> None:
    """Write to a file of the caller, which takes text or bytes."""
    is_text = form not in ("png", "pdf")
    try:
        file.write(content.decode() if is_text else content)
    except TypeError as error:
        kind = "text" if is_text else "bytes"
        raise ValueError(
            f"fp is {show(file)}; format {form!r} is {kind}; open the file for writing {kind}"
        ) from error


def _complete(chart: Specification, datasets: Mapping[str, Any]) -> Specification:
    """A chart with perfkit's theme, its data, a description in words, and texts that a picture can
    hold."""
    spec: Specification = dict(alt.utils.update_nested(_theme(), chart, copy=True))
    spec.setdefault("$schema", alt.SCHEMA_URL)
    if datasets:
        spec["datasets"] = {**spec.get("datasets", {}), **datasets}
    if "description" not in spec:
        spec["description"] = _describe(spec)
    complete: Specification = _clean(spec)
    return complete


def _describe(spec: Specification) -> str:
    """A chart in words: its title and subtitle."""
    title = spec.get("title", "Chart")
    if isinstance(title, str):
        return title
    lines = [title["text"], *np.atleast_1d(title.get("subtitle", []))]
    return ". ".join(line for line in lines if line)


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
