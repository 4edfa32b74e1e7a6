"""What a page shows of results, as records: headings, warnings, tables and charts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

from markupsafe import Markup

from perfkit.ground.notes import group_notes
from perfkit.ground.results import Reported, write_cells
from perfkit.ground.units import clean, format_count, show
from perfkit.plots import INK
from perfkit.plots.pictures import PictureError, draw_picture
from perfkit.plots.theme import is_chart
from perfkit.reports.svg import rewrite_picture

#: How cells of a column of numbers begin.
_BEGIN_NUMBERS = frozenset("0123456789+-–✗✓")


@dataclass(frozen=True)
class TablePart:
    """A table of a result."""

    heading: str
    rows: list[Sequence[str]]  # the heads first
    is_numeric: list[bool]  # of each column


@dataclass(frozen=True)
class ChartPart:
    """A chart of a result."""

    about: str  # the chart in words
    spec: Markup  # for the script that draws it
    picture: Markup  # where the script does not run; empty after a fault
    fault: str  # why there is no picture, or empty


@dataclass(frozen=True)
class ShownResult:
    """What the page shows of one result."""

    title: str
    headline: str
    is_asked: bool  # False for one that another result uses, such as its platform
    warnings: list[str]
    warning_count: int
    words: str  # its explanation, or empty
    parts: list[TablePart | ChartPart] = field(default_factory=list)

    @property
    def counted_warnings(self) -> str:
        """How many warnings there are."""
        return format_count(self.warning_count, "warning")


def show_results(results: Sequence[Reported], *, with_charts: bool) -> list[ShownResult]:
    """Make records of results, and then, once each, of the platforms and other results that they
    used.

    Parameters
    ----------
    results : sequence of Reported
        In reading order.
    with_charts : bool
        Whether charts are drawn.

    Returns
    -------
    shown : list of ShownResult
        In the order of the page.

    Raises
    ------
    ValueError
        For a section that is no chart, no table and no result.
    """
    waiting = list(results)
    shown: list[ShownResult] = []
    charts = 0
    for number, result in enumerate(waiting):  # which grows
        record = _describe(result, is_asked=number < len(results))
        for heading, part in result.sections():
            if isinstance(part, Reported):
                if part not in waiting:
                    waiting.append(part)
            elif is_chart(part):
                if with_charts:
                    charts += 1
                    record.parts.append(_show_chart(part, charts, record.headline))
            else:
                rows = _write_rows(result, heading, part)
                if len(rows) > 1:  # there is more than heads
                    record.parts.append(_show_table(heading, rows))
        shown.append(record)
    return shown


def _describe(result: Reported, *, is_asked: bool) -> ShownResult:
    """What a result is and says, without its sections."""
    warnings = [*getattr(result, "warnings", ())]
    for name in ("provenance", "machine"):
        facts = getattr(result, name, {})
        if "disturbances" in facts:
            warnings.append(f"{facts['disturbances']} (disturbed measurements)")
    return ShownResult(
        title=result.report_title,
        headline=result.headline(),
        is_asked=is_asked,
        warnings=group_notes(warnings),
        warning_count=len(warnings),
        words=result.explain() if hasattr(result, "explain") else "",
    )


# -- tables


def _write_rows(result: Reported, heading: str, part: Any) -> list[Sequence[str]]:
    """A frame, or rows of text, as rows of text; a ValueError for anything else."""
    is_frame = hasattr(part, "to_dicts")
    if is_frame or _is_rows_of_text(part):
        return write_cells(part)
    takes = "a frame, rows of text with their heads first, a chart, or another result"
    section = f"section {heading!r} of {type(result).__name__}"
    raise ValueError(f"{section} is {show(part)}; a report takes {takes}")


def _is_rows_of_text(part: Any) -> bool:
    if not isinstance(part, list | tuple):
        return False
    for row in part:
        if not isinstance(row, list | tuple) or not all(isinstance(cell, str) for cell in row):
            return False
    return True


def _show_table(heading: str, rows: list[Sequence[str]]) -> TablePart:
    columns = zip(*rows[1:], strict=True)
    return TablePart(heading, rows, [_is_numeric(column) for column in columns])


def _is_numeric(cells: Sequence[str]) -> bool:
    """Whether a column has numbers, which stand at its right."""
    begins = {cell[0] for cell in cells if cell}
    return bool(begins) and begins <= _BEGIN_NUMBERS


# -- charts


def _show_chart(chart: Any, number: int, headline: str) -> ChartPart:
    """A chart for the script and as a picture, in the colours of the page."""
    spec = chart.to_dict()
    spec["description"] += f". {clean(headline)}"
    spec["config"]["background"] = "transparent"
    text = json.dumps(spec).replace(f'"{INK}"', '"currentColor"')
    picture = ""
    fault = ""
    try:
        picture = rewrite_picture(draw_picture(text).decode(), f"figure{number}")
    except (PictureError, expat.ExpatError) as error:
        fault = str(error)
    # a name such as "</script>" must not end the script that holds it
    spec_in_page = text.replace("<", "\\u003c")
    return ChartPart(spec["description"], Markup(spec_in_page), Markup(picture), fault)
