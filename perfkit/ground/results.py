"""Bases of results: tables, sections of a report, cells of text; and readers of frames that users
pass."""

import html
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from perfkit.ground.units import (
    MOST_VALUES,
    count_values,
    format_bytes,
    format_rate,
    format_time,
    is_listed,
    show,
)

if TYPE_CHECKING:
    import altair
    import pandas
    import polars

#: Types of packages that take long to load.
Picture: TypeAlias = "altair.Chart | altair.LayerChart | altair.HConcatChart"
Table: TypeAlias = "polars.DataFrame"
#: What a report shows of a result, in order: a heading and a table, rows of text with their heads
#: first, a chart, or another result that this one uses.
Sections: TypeAlias = Iterator[tuple[str, Any]]


#: Longest line of a note in an explanation [-].
LINE = 100

#: Units of columns whose names end so, and which cells have behind their numbers.
_UNITS_OF_ENDINGS = {
    "_flop_per_s": "FLOP/s",
    "_bytes_per_s": "B/s",
    "_flop_per_byte": "FLOP/B",
    "_bytes": "B",
    "_percent": "%",
    "_s": "s",
}
#: Units of columns whose names are units.
_UNITS_OF_COLUMNS = {"seconds": "s", "bytes": "B", "nbytes": "B"}


def write_notes(label: str, texts: Sequence[str]) -> list[str]:
    """Lines of text for notes below an answer, with their further lines indented.

    Parameters
    ----------
    label : str
        What each of them is, such as ``warning``.
    texts : sequence of str
        The notes.

    Returns
    -------
    lines : list of str
        At least one of each note, none longer than `LINE` characters where words allow it.

    Examples
    --------
    >>> write_notes("warning", ["the host sets the pace"])
    ['  warning: the host sets the pace']
    """
    lines: list[str] = []
    for text in texts:
        lines += textwrap.wrap(
            f"{label}: {text}",
            LINE,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def wrap_lines(lines: Sequence[str]) -> list[str]:
    """The first line as it is, and the others wrapped, with their further lines indented.

    Parameters
    ----------
    lines : sequence of str
        An answer, and what is said of it.

    Returns
    -------
    lines : list of str
        None but the first longer than `LINE` characters, where words allow it.

    Examples
    --------
    >>> wrap_lines(["10.5 s measured", "  the platform is slower"])
    ['10.5 s measured', '  the platform is slower']
    """
    wrapped = [*lines[:1]]
    for line in lines[1:]:
        wrapped += textwrap.wrap(
            line,
            LINE,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return wrapped


class Shown:
    """A result that a notebook shows by its explanation, or else its repr."""

    def _repr_html_(self) -> str:
        words: str = getattr(self, "explain", self.__repr__)()
        # JupyterLab alone breaks long lines inside a word
        style = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
        return f'<pre style="{style}">{html.escape(words)}</pre>'


class Reported(Shown):
    """A result that `perfkit.report` takes, alone or as a part of another one."""

    #: What a result of this kind is, in a few words: its heading in a report.
    report_title: ClassVar[str]

    def headline(self) -> str:
        """The result in one line, as it stands at the top of a report.

        Returns
        -------
        line : str
            What was predicted, measured or found, with its most important figures.
        """
        raise NotImplementedError

    def sections(self) -> Sections:
        """What a report shows, see `Sections`."""
        raise NotImplementedError


class Tabular(Reported):
    """A result that has a table."""

    def table(self) -> Table:
        """The result as a frame.

        Returns
        -------
        frame : polars.DataFrame
            One row per part.
        """
        raise NotImplementedError

    def to_pandas(self) -> "pandas.DataFrame":
        """The table as a pandas frame, made without pyarrow.

        Returns
        -------
        frame : pandas.DataFrame
            See `table`.
        """
        import pandas

        return pandas.DataFrame(self.table().to_dict(as_series=False))

    def sections(self) -> Sections:
        """What a report shows, see `Sections`."""
        if hasattr(self, "chart"):
            yield "", self.chart()
        yield "Table", self.table()


def write_cells(table: Any) -> list[Sequence[str]]:
    """Rows of text, heads first, of a frame; the end of a column's name or the column ``unit``
    gives the unit.

    Examples
    --------
    >>> import polars
    >>> write_cells(polars.DataFrame({"rank": [0], "busy_s": [0.25], "idle_share": [0.125]}))
    [['rank', 'busy', 'idle share'], ['0', '250 ms', '12.5%']]
    """
    if not hasattr(table, "to_dicts"):
        return list(table)
    names = [name for name in table.columns if name != "unit"]
    cells = (
        [write_cell(name, row[name], row.get("unit")) for name in names] for row in table.to_dicts()
    )
    return [[*map(name_column, names)], *cells]


def name_column(column: str) -> str:
    """Write the name of a column in words, without its unit.

    Examples
    --------
    >>> name_column("samples_per_s"), name_column("exposed_s")
    ('samples a second', 'exposed')
    """
    return drop_unit(column).replace("per_s", "a second").replace("_", " ")


def drop_unit(column: str) -> str:
    """Name of a column without the unit at its end, for heads of columns whose cells have it.

    Examples
    --------
    >>> drop_unit("time_s"), drop_unit("busbw_bytes_per_s"), drop_unit("tokens_per_s")
    ('time', 'busbw', 'tokens_per_s')
    """
    ending = _find_ending(column)
    return column if ending is None else column.removesuffix(ending)


def find_unit(column: str) -> str | None:
    """Unit that the name of a column says; None for plain numbers.

    Examples
    --------
    >>> find_unit("lookup_s"), find_unit("nbytes"), find_unit("tokens_per_s")
    ('s', 'B', None)
    """
    ending = _find_ending(column)
    if ending is not None:
        return _UNITS_OF_ENDINGS[ending]
    return _UNITS_OF_COLUMNS.get(column)


def _find_ending(column: str) -> str | None:
    """The end of a column's name that says the unit of its cells; None where these are plain
    numbers, as counts in a second are."""
    for ending in _UNITS_OF_ENDINGS:
        is_count = ending == "_s" and column.endswith("_per_s")
        if column.endswith(ending) and not is_count:
            return ending
    return None


def write_cell(column: str, value: Any, unit: str | None) -> str:
    """Write a value in the unit of its row, or in the unit at the end of the column's name."""
    ending = column.rpartition("_")[2]
    if value is None or value != value or isinstance(value, bool):
        return "✗✓"[value] if isinstance(value, bool) else "–"
    if not isinstance(value, float):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if ending in ("share", "gap", "error", "efficiency", "kept", "exposed"):
        return f"{value:{'+' * (ending == 'error')}.1%}"
    if ending == "ratio":
        unit = "-"
    elif unit is None:
        unit = find_unit(column)
    if unit == "s":
        return format_time(value)
    if unit == "B":
        return format_bytes(value)
    if unit == "%":
        return f"{value:.4g} %"
    number = f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
    return format_rate(value, unit) if unit and unit != "-" else number


def _is_column(values: Any) -> bool:
    """Whether these are the values of a column, and none is masked."""
    return is_listed(values) and not np.ma.is_masked(values)


def read_columns(name: str, frame: Any) -> dict[str, list[Any]]:
    """Columns of a polars or pandas frame, or of a mapping, as lists by name; a ValueError for
    anything else."""
    data = frame.to_dict(as_series=False) if hasattr(frame, "get_columns") else frame
    data = data.to_dict("list") if hasattr(data, "to_dict") and hasattr(data, "columns") else data
    if not isinstance(data, Mapping) or not all(map(_is_column, data.values())):
        raise ValueError(
            f"{name} is {show(frame)}; it must be a pandas or polars frame, or lists by name"
        )
    return {str(key): _copy_values(f"{name}[{key!r}]", values) for key, values in data.items()}


def _copy_values(name: str, values: Any) -> list[Any]:
    """The values of a column as a list; a ValueError for more than can be looked at."""
    if hasattr(values, "__len__"):
        count_values(name, values)
        return [*values]
    copied = [*islice(values, MOST_VALUES + 1)]  # an iterator may have no end
    if len(copied) > MOST_VALUES:
        raise ValueError(f"{name} does not end; it may have at most {MOST_VALUES:,} values")
    return copied


def read_records(name: str, frame: Any) -> list[dict[str, Any]]:
    """Rows of a polars or pandas frame, a mapping of columns, or a list of mappings; a ValueError
    for others."""
    if isinstance(frame, list | tuple) and all(isinstance(row, Mapping) for row in frame):
        return [dict(row) for row in frame]
    columns = read_columns(name, frame)
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{show(column, 40)} {length}" for column, length in lengths.items())
        raise ValueError(
            f"{name} has columns of different lengths: {shown}; give each column one value for "
            "each row"
        )
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
