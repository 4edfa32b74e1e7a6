"""One HTML file for any results: their words, tables and charts, and the platforms behind them; it
needs no network."""

import base64
import hashlib
import platform as machine
import warnings
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from perfkit.ground.results import Reported
from perfkit.ground.targets import check_page, write_text
from perfkit.ground.units import clean, show
from perfkit.ground.version import __version__
from perfkit.plots.pictures import PictureError, bundle_script, start_painter
from perfkit.reports.parts import ChartPart, ShownResult, show_results

_LOADER = jinja2.PackageLoader("perfkit.reports", "")
_TAKES = "pass what predict, compare, shard, sweep, check, read_trace or calibrate returned"


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
        First line; by default what the results are.
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
    _check_results(results)
    target = check_page("path", path)
    script = _prepare_script()
    shown = show_results(results, with_charts=script is not None)
    _warn_of_faults(shown)
    author_and_versions = (
        author,
        date.today().isoformat(),
        f"perfkit {__version__}, Python {machine.python_version()}",
    )
    source = script.source if script else "'none'"
    page = _PAGES.get_template("page.html").render(
        title=title or _choose_title(results),
        about=author_and_versions,
        notes=notes,
        results=shown,
        script=Markup(script.code) if script else "",
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {source}",
    )
    return write_text(target, page)


def _choose_title(results: Sequence[Reported]) -> str:
    """What the results are, if they are of one kind."""
    titles = {result.report_title for result in results}
    return titles.pop() if len(titles) == 1 else "Performance report"


def _check_results(results: Sequence[Any]) -> None:
    """Refuse what is no result, and a report without any."""
    if not results:
        raise ValueError(f"results[0] is None; {_TAKES}")
    for number, result in enumerate(results):
        if not isinstance(result, Reported):
            raise ValueError(f"results[{number}] is {show(result)}; {_TAKES}")


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


def _prepare_script() -> _Script | None:
    """The script of every page; None, with a warning, where charts cannot be drawn."""
    try:
        start_painter()
        return _bundle()
    except PictureError as error:
        warnings.warn(f"the report has no charts, only tables: {error}", stacklevel=3)
        return None


def _warn_of_faults(shown: Sequence[ShownResult]) -> None:
    """Warn of charts without a picture."""
    parts = [part for result in shown for part in result.parts]
    faults = [part.fault for part in parts if isinstance(part, ChartPart) and part.fault]
    if faults:
        charts = "1 chart" if len(faults) == 1 else f"{len(faults)} charts"
        text = f"the report shows {charts} only where its script runs, as a picture failed"
        warnings.warn(f"{text}: {faults[0]}", stacklevel=3)
