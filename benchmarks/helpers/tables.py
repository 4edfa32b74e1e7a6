"""Rows of figures as text."""

from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any, TypeAlias

import numpy as np

from perfkit.ground.units import format_table, format_time

#: Figures of a row by name.
Row: TypeAlias = Mapping[str, Any]
#: Words of tables for whether a bar is met.
MET = {True: "yes", False: "NO", None: ""}


class _Cells(Formatter):
    """Formats cells: ``time`` gives seconds a unit, ``.1fms`` turns them into milliseconds, truth
    becomes a word."""

    def format_field(self, value: Any, spec: str) -> str:
        """The text of one value."""
        if isinstance(value, bool | np.bool_):
            return MET[bool(value)]
        if spec.endswith("ms"):
            return format(1e3 * value, spec.removesuffix("ms"))
        if spec == "time":
            return format_time(value)
        return format(value, spec)


_CELLS = _Cells()


def _list_names(cell: str) -> list[str]:
    """Figures that a cell such as ``"{low:.1f} to {high:.1f}"`` shows."""
    return [name for _, name, *_ in _CELLS.parse(cell) if name]


def _is_missing(value: Any) -> bool:
    """Whether a figure is None or nan."""
    return value is None or value != value


def _fill(cell: str, row: Row) -> str:
    """The text of a cell in a row, empty if one of its figures is missing."""
    if any(_is_missing(row.get(name)) for name in _list_names(cell)):
        return ""
    return _CELLS.vformat(cell, (), row)


def lay_out(rows: Sequence[Row], columns: Mapping[str, str], *, numbers: bool = False) -> str:
    """Rows as text; columns are heads and cells such as ``"{error:+.1%}"``, empty if a value is
    missing."""
    lines = [tuple(columns)]
    for row in rows:
        lines.append(tuple(_fill(cell, row) for cell in columns.values()))
    return format_table(lines, numbers=numbers)
