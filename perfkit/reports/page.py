"""One HTML file for any results: their words, tables and charts, and the platforms behind them; it
needs no network."""

import base64
import hashlib
import json
import platform as machine
import re
import warnings
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

import jinja2
from markupsafe import Markup

from perfkit.ground.results import write_cells
from perfkit.ground.targets import check_target, write_text
from perfkit.ground.units import clean, show
from perfkit.ground.version import __version__
from perfkit.plots import INK
from perfkit.plots.pictures import PictureError, bundle_script, draw_picture, start_painter
from perfkit.plots.theme import is_chart

_LOADER = jinja2.PackageLoader("perfkit.reports", "")


def _make_printable(value: Any) -> Any:
    """Text of any origin without characters that nobody sees; what perfkit made as markup stays."""
    if isinstance(value, Markup) or value is None:
        return value
    return clean(str(value))


_PAGES = jinja2.Environment(
    loader=_LOADER,
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_make_printable,
)
#: Elements of a picture.
_SHAPES = {"svg", "g", "path", "text", "tspan", "rect", "line", "defs", "clipPath", "title"}
_SHAPES |= {"circle", "linearGradient", "stop"}


class _Script(NamedTuple):
    """The script that draws charts, with all its code, and its part of the policy that forbids a
    browser to run anything else."""

    code: str
    source: str


@cache
def _bundle() -> _Script:
    """The script of every page.

    Raises
    ------
    PictureError
        If it cannot be made.
    """
    code = bundle_script(_LOADER.get_source(_PAGES, "charts.js")[0])
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return _Script(code, f"'sha256-{digest}'")


class _Rewriter:
    """Writes a picture again: its ids become unique in the page, and only shapes and their looks
    stay."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._ids: dict[str, str] = {}
        self._parts: list[str] = []
        self._dropped = 0  # depth inside an element that is left out

    def write(self, picture: str) -> str:
        """The new picture; an ExpatError for what is no XML."""
        self._parts, self._dropped = [], 0
        parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.Parse(picture, True)
        return "".join(self._parts)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        if self._dropped or tag not in _SHAPES:
            self._dropped += 1
            return
        looks = "".join(
            f" {name}={quoteattr(self._rename(name, value))}"
            for name, value in attributes.items()
            if not name.startswith("on") and not name.endswith("href")
        )
        self._parts.append(f"<{tag}{looks}>")

    def _end(self, tag: str) -> None:
        if self._dropped:
            self._dropped -= 1
            return
        self._parts.append(f"</{tag}>")

    def _text(self, text: str) -> None:
        if not self._dropped:
            self._parts.append(escape(text, {'"': "&quot;"}))

    def _rename(self, name: str, value: str) -> str:
        """The value of an attribute, with the new name of an id."""
        if name == "id":
            return self._find_id(value)
        if value.startswith("url(#") and value.endswith(")"):
            return f"url(#{self._find_id(value[5:-1])})"
        return value

    def _find_id(self, old: str) -> str:
        return self._ids.setdefault(old, f"{self._prefix}-{len(self._ids)}")


def _draw(number: int, chart: Any, summary: str) -> dict[str, str]:
    """A chart for the script and as a picture, in the colours of the page."""
    spec = chart.to_dict()
    spec["description"] += f". {clean(summary)}"
    spec["config"]["background"] = "transparent"
    text = json.dumps(spec).replace(f'"{INK}"', '"currentColor"')
    picture, fault = "", ""
    try:
        picture = _Rewriter(f"figure{number}").write(draw_picture(text).decode())
    except (PictureError, expat.ExpatError) as error:
        fault = str(error)
    return {
        "about": spec["description"],
        "fault": fault,
        "picture": Markup(picture),
        "spec": Markup(text.replace("<", "\\u003c")),
    }


def _write_heading(result: Any) -> str:
    """What a result is: the first line of its documentation, or its name where Python drops it."""
    words = type(result).__doc__ or type(result).__name__
    return words.partition("\n")[0].rstrip(".")


def _list_results(given: tuple[Any, ...], drawn: bool) -> Iterator[dict[str, Any]]:
    """What the page shows of every result, and then, once each, of the platforms that they used;
    charts only where they are `drawn`."""
    results, number = list(given), 0
    for place, result in enumerate(results):
        parts = []
        for heading, part in result.sections():
            if hasattr(part, "sections"):
                results += [part] * (part not in results)
            elif is_chart(part):
                if drawn:
                    number += 1
                    parts.append({"heading": heading, **_draw(number, part, repr(result))})
            elif len(rows := write_cells(part)) > 1:
                columns = [
                    "".join({cell[:1] for cell in column}) for column in zip(*rows[1:], strict=True)
                ]
                right = [bool(re.fullmatch("[-+–✗✓0-9]+", firsts)) for firsts in columns]
                parts.append({"heading": heading, "rows": rows, "right": right})
        about = [getattr(result, name, {}) for name in ("provenance", "machine")]
        disturbed = [
            f"{each['disturbances']} (disturbed measurements)"
            for each in about
            if "disturbances" in each
        ]
        yield {
            "heading": _write_heading(result),
            "summary": re.sub(r"^\w+\((.*)\)$", r"\1", repr(result)),
            "warnings": [*getattr(result, "warnings", ()), *disturbed],
            "parts": parts,
            "asked": place < len(given),
            "words": result.explain() if hasattr(result, "explain") else "",
        }


def report(
    *results: Any,
    path: str | Path,
    title: str | None = None,
    author: str | None = None,
    notes: str | None = None,
) -> Path:
    """Write results as one HTML file for screen (light or dark) and print, which opens without a
    network.

    Parameters
    ----------
    *results : result
        What `predict`, `compare`, `shard`, `sweep`, `check`, `read_trace` and `calibrate` return,
        in reading order. The platforms behind them follow.
    path : str or Path
        File to write; an older one is replaced only when the new one is complete.
    title : str, optional
        First line.
    author : str, optional
        Author of the report.
    notes : str, optional
        Text before the results; an empty line begins a new paragraph.

    Returns
    -------
    path : Path
        The file that was written.

    Raises
    ------
    ValueError
        Without results, for an argument that is no result, or for a path that cannot be written.

    Examples
    --------
    >>> import perfkit as pk
    >>> pk.report(path="report.html")
    Traceback (most recent call last):
    ...
    ValueError: results[0] is None; pass what predict, compare, shard, sweep, check, read_trace or calibrate returned
    """
    for number, result in enumerate(results or [None]):
        if isinstance(result, type) or not hasattr(result, "sections"):
            takes = (
                "pass what predict, compare, shard, sweep, check, read_trace or calibrate returned"
            )
            raise ValueError(f"results[{number}] is {show(result)}; {takes}")
    target = check_target("path", path)
    try:
        start_painter()
        script: _Script | None = _bundle()
    except PictureError as error:
        warnings.warn(f"the report has no charts, only tables: {error}", stacklevel=2)
        script = None
    shown = list(_list_results(results, drawn=script is not None))
    faults = [part["fault"] for result in shown for part in result["parts"] if part.get("fault")]
    if faults:
        charts = "1 chart" if len(faults) == 1 else f"{len(faults)} charts"
        text = f"the report shows {charts} only where its script runs, as a picture failed"
        warnings.warn(f"{text}: {faults[0]}", stacklevel=2)
    about = (
        author,
        date.today().isoformat(),
        f"perfkit {__version__}, Python {machine.python_version()}",
    )
    source = script.source if script else "'none'"
    page = _PAGES.get_template("page.html").render(
        title=title or "Performance report",
        about=about,
        notes=notes,
        results=shown,
        script=Markup(script.code) if script else "",
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {source}",
    )
    return write_text(target, page)
