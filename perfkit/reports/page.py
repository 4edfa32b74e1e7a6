"""One HTML file for any results: their words, tables and charts, and the platforms behind them; it
needs no network."""

import base64
import hashlib
import json
import platform as machine
import re
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup

from perfkit import __version__
from perfkit.ground.results import write_cells
from perfkit.ground.targets import check_target, write_text
from perfkit.ground.units import show
from perfkit.plots import INK

_LOADER = jinja2.PackageLoader("perfkit.reports", "")
_PAGES = jinja2.Environment(loader=_LOADER, autoescape=True, trim_blocks=True, lstrip_blocks=True)


@cache
def _bundle() -> dict[str, str]:
    """The script that draws charts, with all its code, and the policy that forbids a browser to run
    anything else."""
    script = vl_convert.javascript_bundle(_LOADER.get_source(_PAGES, "charts.js")[0])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return {"script": Markup(script), "policy": policy}


def _draw(number: int, chart: Any, summary: str) -> dict[str, str]:
    """A chart for the script and as a picture, in the colours of the page; its ids become unique in
    the page."""
    spec = chart.to_dict()
    spec["description"] += f". {summary}"
    spec["config"]["background"] = "transparent"
    text = json.dumps(spec).replace(f'"{INK}"', '"currentColor"')
    picture = vl_convert.vegalite_to_svg(text)
    for place, name in enumerate(re.findall(r' id="([^"]+)"', picture)):
        picture = re.sub(
            rf'( id="|="url\(#|href="#){name}(?=[")])', rf"\1figure{number}-{place}", picture
        )
    return {
        "about": spec["description"],
        "picture": Markup(picture),
        "spec": Markup(text.replace("<", "\\u003c")),
    }


def _list_results(given: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """What the page shows of every result, and then, once each, of the platforms that they used."""
    results, number = list(given), 0
    for place, result in enumerate(results):
        parts = []
        for heading, part in result.sections():
            if hasattr(part, "sections"):
                results += [part] * (part not in results)
            elif isinstance(part, alt.TopLevelMixin):
                parts.append(
                    {"heading": heading, **_draw(number := number + 1, part, repr(result))}
                )
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
            "heading": (type(result).__doc__ or "").partition("\n")[0].rstrip("."),
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
    target, found = check_target("path", path), list(_list_results(results))
    about = (
        author,
        date.today().isoformat(),
        f"perfkit {__version__}, Python {machine.python_version()}",
    )
    words = {"title": title or "Performance report", "about": about, "notes": notes}
    return write_text(
        target, _PAGES.get_template("page.html").render(words, results=found, **_bundle())
    )
