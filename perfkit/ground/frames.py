"""Frames of results: polars frames that print whole, with units, in a terminal and in a notebook."""

import html
from collections.abc import Sequence
from typing import Any

import polars

from perfkit.ground.results import drop_unit, write_cells
from perfkit.ground.units import format_table

#: Most rows that are printed; of a longer frame the first ones are [-].
_MOST_ROWS = 40
_FIRST_ROWS = 12
#: Widest line of a table in a terminal, and longest cell [characters].
_WIDTH = 120
_LONGEST = 34


class ResultFrame(polars.DataFrame):
    """A polars frame that prints its rows with units, in place of ``6.379674``.

    Tables of results are such frames; make one of your own numbers, from what `polars.DataFrame` takes, to show them alike.
    Columns hold what they held, numbers in base units; a column ``unit`` stands in the cells of its row. The unit at
    the end of a column's name stands in its cells, and no more in its head: ``time_s`` is ``time`` above ``44.5 ms``. A
    frame that others are made of by `select`, `filter`, `sort`, `with_columns`, `head` or `tail` prints so, too; what is
    computed from it is a plain frame.

    Examples
    --------
    >>> ResultFrame({"name": ["a", "b"], "time_s": [0.0445, 6.38], "needs_bytes": [71.7e9, 1e9]})
    name     time    needs
    a     44.5 ms  71.7 GB
    b      6.38 s     1 GB
    """

    def __repr__(self) -> str:
        """The rows as text: all, or the first ones; and the columns that fit into a line."""
        cells = _shorten(self._write_first())
        shown = _count_fitting(cells)
        text = format_table([row[:shown] for row in cells], numbers=True)
        notes = []
        if self.height > len(cells) - 1:
            notes.append(f"the first {len(cells) - 1} of {self.height:,} rows")
        hidden = self._list_shown()[shown:]
        if hidden:
            notes.append(f"more columns: {', '.join(hidden)}")
        if not notes:
            return text
        return f"{text}\n({'; '.join(notes)})"

    def __str__(self) -> str:
        """The same."""
        return repr(self)

    def _repr_html_(self, **_: Any) -> str:
        """All columns, as a table of a notebook."""
        cells = self._write_first()
        lines = ['<div style="overflow-x: auto"><table class="dataframe">']
        for number, row in enumerate(cells):
            tag = "td" if number else "th"
            words = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            lines.append(f"<tr>{words}</tr>")
        lines.append("</table></div>")
        if self.height > len(cells) - 1:
            lines.append(f"<p>the first {len(cells) - 1} of {self.height:,} rows</p>")
        return "\n".join(lines)

    def _write_first(self) -> list[Sequence[str]]:
        """Cells of the rows that are shown, the heads first."""
        rows = self.height if self.height <= _MOST_ROWS else _FIRST_ROWS
        # names as a program asks for them, without units that stand in the cells
        heads = [drop_unit(name) for name in self._list_shown()]
        return [heads, *write_cells(self[:rows])[1:]]

    def _list_shown(self) -> list[str]:
        """Names of the columns that are shown: all but the unit."""
        return [name for name in self.columns if name != "unit"]

    def select(self, *columns: Any, **named: Any) -> "ResultFrame":
        """The frame with these columns alone.

        Parameters
        ----------
        columns : str or polars.Expr
            Columns, or what is computed from them.
        named : polars.Expr
            The same, with new names.

        Returns
        -------
        frame : ResultFrame
            As polars' frames return it.
        """
        return ResultFrame(super().select(*columns, **named))

    def filter(self, *conditions: Any, **named: Any) -> "ResultFrame":
        """The frame with the rows that meet all conditions.

        Parameters
        ----------
        conditions : polars.Expr
            Conditions.
        named : object
            Values that columns of these names must have.

        Returns
        -------
        frame : ResultFrame
            As polars' frames return it.
        """
        return ResultFrame(super().filter(*conditions, **named))

    def sort(self, *columns: Any, **named: Any) -> "ResultFrame":
        """The frame with its rows in order.

        Parameters
        ----------
        columns : str or polars.Expr
            What rows are sorted by.
        named : object
            Settings such as ``descending``.

        Returns
        -------
        frame : ResultFrame
            As polars' frames return it.
        """
        return ResultFrame(super().sort(*columns, **named))

    def with_columns(self, *columns: Any, **named: Any) -> "ResultFrame":
        """The frame with more columns, or with others in their place.

        Parameters
        ----------
        columns : polars.Expr
            Columns that are computed.
        named : polars.Expr or list
            The same, with new names.

        Returns
        -------
        frame : ResultFrame
            As polars' frames return it.
        """
        return ResultFrame(super().with_columns(*columns, **named))

    def head(self, n: int = 5) -> "ResultFrame":
        """The first rows.

        Parameters
        ----------
        n : int, optional
            How many [-].

        Returns
        -------
        frame : ResultFrame
            As polars' frames return it.
        """
        return ResultFrame(super().head(n))

    def tail(self, n: int = 5) -> "ResultFrame":
        """The last rows.

        Parameters
        ----------
        n : int, optional
            How many [-].

        Returns
        -------
        frame : ResultFrame
            As polars' frames return it.
        """
        return ResultFrame(super().tail(n))


def _shorten(cells: Sequence[Sequence[str]]) -> list[list[str]]:
    """Cells of which none is too long for a line."""
    shortened = []
    for row in cells:
        short = []
        for cell in row:
            short.append(cell if len(cell) <= _LONGEST else f"{cell[: _LONGEST - 1]}…")
        shortened.append(short)
    return shortened


def _count_fitting(cells: Sequence[Sequence[str]]) -> int:
    """How many columns fit beside each other; at least one."""
    used = 0
    for number, column in enumerate(zip(*cells, strict=True)):
        used += max(map(len, column)) + 2
        if number and used - 2 > _WIDTH:
            return number
    return len(cells[0])
