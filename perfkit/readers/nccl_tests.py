"""Text output of nccl-tests and rccl-tests, of any age, as one tidy frame."""

import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfkit.models.collectives import OPERATIONS, bus_factor
from perfkit.readers.nccl_lines import MisfitError, Row, Table, scan_tables
from perfkit.resources import LARGEST_TEXT, reading
from perfkit.units import check_choice, check_positive, escape, show

if TYPE_CHECKING:
    import polars as pl

__all__ = ["LogWarning", "list_devices", "parse_nccl_tests", "read_nccl_tests"]

_SUFFIXES = (".log", ".out", ".txt")
_NAMES = {name.replace("_", ""): name for name in OPERATIONS}  # the programs are called alltoall_perf, sendrecv_perf
_DTYPES = {
    "float": "fp32", "half": "fp16", "double": "fp64", "bfloat16": "bf16", "char": "int8",
    **dict.fromkeys(("f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), "fp8"),
}  # fmt: skip
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GPU = re.compile(r"\bdevice +\d+ +\[[^\]\n]*\] +(\S[^\r\n]*)")
_COLUMNS = tuple("operation ranks nodes dtype redop nbytes seconds algbw busbw in_place file line".split())
_FIGURES = ("nbytes", "seconds", "algbw", "busbw", "algbw_half", "busbw_half")


class LogWarning(UserWarning):
    """A log contradicts itself, reports corrupt data, or was read in part."""


class _Given(NamedTuple):
    """What the caller knows better than the logs."""

    operation: str | None
    ranks: int | None
    nodes: int | None

    @classmethod
    def check(cls, operation: str | None, ranks: int | None, nodes: int | None) -> "_Given":
        if operation is not None:
            check_choice("operation", operation, OPERATIONS)
        counts = (("ranks", ranks), ("nodes", nodes))
        return cls(operation, *(n if n is None else check_positive(name, n, integer=True) for name, n in counts))


def read_nccl_tests(
    source: str | Path | Sequence[str | Path],
    *,
    operation: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    partial: bool = False,
) -> "pl.DataFrame":
    """Read logs of nccl-tests or rccl-tests.

    Parameters
    ----------
    source : str, Path or sequence of them
        A log, several, or a folder, of which all .log, .out and .txt files are read, those of its subfolders too.
    operation : str, optional
        What was measured, one of `perfkit.models.collectives.OPERATIONS`; by default what the logs say.
    ranks : int, optional
        Ranks that took part; by default what the logs say [-].
    nodes : int, optional
        Nodes they ran on; by default what the logs say [-].
    partial : bool, optional
        Whether to keep, with a warning, what comes before a line that does not fit.

    Returns
    -------
    frame : polars.DataFrame
        As `parse_nccl_tests` gives it, one log below the other; `file` is the path within the folder, or the name.

    Raises
    ------
    ValueError
        For a source that does not exist or holds no log, and as `parse_nccl_tests` does.
    """
    return _collect(_read_logs(source), _Given.check(operation, ranks, nodes), partial)


def parse_nccl_tests(
    text: str,
    *,
    file: str = "text",
    operation: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    partial: bool = False,
) -> "pl.DataFrame":
    """Read what nccl-tests or rccl-tests have printed: old and new formats, among noise, several runs in one text.

    Parameters
    ----------
    text : str
        The log.
    file : str, optional
        Name of the log, for the frame and for messages; it may tell the operation where nothing else does.
    operation : str, optional
        What was measured, one of `perfkit.models.collectives.OPERATIONS`; by default what the log says.
    ranks : int, optional
        Ranks that took part; by default what the log says [-].
    nodes : int, optional
        Nodes they ran on; by default what the log says [-].
    partial : bool, optional
        Whether to keep, with a warning, what comes before a line that does not fit.

    Returns
    -------
    frame : polars.DataFrame
        One row for each half of a printed one: operation, ranks, nodes (null where unknown), dtype, redop, nbytes [B],
        seconds [s], algbw and busbw [B/s], in_place, file, line. Messages of 0 bytes are kept; programs that perfkit
        has no model of, such as alltoallv, keep their name.

    Raises
    ------
    ValueError
        For text that is no log or breaks off, naming the first line that does not fit; where the operation or the
        ranks cannot be known.

    Warns
    -----
    LogWarning
        Where a log contradicts itself, counts wrong values, or is kept in part.

    Notes
    -----
    The ratio of busbw to algbw tells the ranks, 2 (p - 1) / p of all_reduce and (p - 1) / p of others, and so does the
    list of devices; where they disagree, the ratio is believed. Bandwidths are computed from size and time, which
    have more digits than the printed ones.

    References
    ----------
    .. [1] NVIDIA, nccl-tests, doc/PERFORMANCE.md (definition of size, algbw and busbw)

    Examples
    --------
    >>> log = "67108864 16777216 float sum -1 584.5 114.81 200.91 0 581.9 115.33 201.82 0"
    >>> frame = parse_nccl_tests(log)
    >>> frame.select("operation", "ranks", "dtype", "nbytes", "in_place").row(1)
    ('all_reduce', 8, 'fp32', 67108864, True)
    >>> parse_nccl_tests("time flies")
    Traceback (most recent call last):
    ...
    ValueError: text line 1 does not fit: 'time flies': no row of an nccl-tests table follows; pass the text that
    all_reduce_perf or its like print
    """
    return _collect([(file, text)], _Given.check(operation, ranks, nodes), partial)


def list_devices(source: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """List the devices that logs name.

    Parameters
    ----------
    source : str, Path or sequence of them
        As `read_nccl_tests` takes it.

    Returns
    -------
    devices : tuple of str
        Names as printed, sorted; none where the lists of devices were cut off [-].
    """
    return tuple(sorted({name.strip() for _, text in _read_logs(source) for name in _GPU.findall(text)}))


def _read_logs(source: str | Path | Sequence[str | Path]) -> Iterator[tuple[str, str]]:
    """Name and text of each log."""
    for file, path in _list_logs(source):
        with reading(path, "name the output of nccl-tests", most=LARGEST_TEXT):
            text = path.read_text(encoding="utf-8", errors="replace")
        yield file, text


def _list_logs(source: str | Path | Sequence[str | Path]) -> list[tuple[str, Path]]:
    """Name and place of each log."""
    if isinstance(source, str | Path) and os.path.isdir(folder := Path(source)):
        found = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
        if not found:
            raise ValueError(f"{show(str(source), 200)} holds no {', '.join(_SUFFIXES)} file; name the logs one by one")
        return [(path.relative_to(folder).as_posix(), path) for path in found]
    paths = [Path(item) for item in ([source] if isinstance(source, str | Path) else source)]
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"{show(str(path), 200)} is no file; name a log, several, or a folder of logs")
    return [(path.name, path) for path in paths]


def _collect(logs: Iterable[tuple[str, str]], given: _Given, partial: bool) -> "pl.DataFrame":
    """Read named texts into one frame."""
    import polars as pl

    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for file, text in logs:
        kept = len(columns["line"])
        file = escape(file, 200)
        with reading(file, "pass the text that all_reduce_perf or its like print"):
            misfit, notes = _read_log(columns, text, file, given, partial)
        for note in notes:
            warnings.warn(escape(f"{file} {note}", 500), LogWarning, stacklevel=3)
        if misfit:
            kept = len(columns["line"]) - kept
            if not partial:
                advice = f"; partial=True keeps the {kept} measurements before it" if kept else ""
                raise ValueError(f"{file} {misfit}{advice}")
            warnings.warn(f"{file} {misfit}; {kept or 'no'} measurements are kept", LogWarning, stacklevel=3)
    if not columns["line"]:
        raise ValueError("no complete row of an nccl-tests table is there; pass the text that all_reduce_perf prints")
    kinds: dict[str, Any] = dict.fromkeys(("operation", "dtype", "redop", "file"), pl.String)
    kinds |= dict.fromkeys(("ranks", "nodes", "nbytes", "line"), pl.Int64) | {"in_place": pl.Boolean}
    return pl.DataFrame(columns, schema={name: kinds.get(name, pl.Float64) for name in _COLUMNS})


def _read_log(
    columns: dict[str, list[Any]], text: str, file: str, given: _Given, partial: bool
) -> tuple[MisfitError | None, list[str]]:
    """Append the rows of one log; the first line that does not fit, and what is odd."""
    tables, misfit = scan_tables(_COLOURS.sub("", text).split("\n"))
    notes: list[str] = []
    for table in tables:
        run = _Run(table, file)
        try:
            wrong = run.append_to(columns, given)
        except ValueError:  # what is cut off may be what is missing
            if partial or not misfit:
                raise
            return misfit, notes
        notes += [f"line {table.rows[0].line}: {note}" for note in run.notes]
        if wrong:
            return wrong, notes
    return misfit, notes


def _operations_in(file: str) -> set[str]:
    """Operations that the name of a file bears."""
    text, found = re.sub(r"[^a-z]", "", Path(file).stem.lower()), set()
    for name in sorted(_NAMES, key=len, reverse=True):  # a reduce_scatter is no reduce
        if name in text:
            text = text.replace(name, " ")
            found.add(_NAMES[name])
    return found


class _Run:
    """One table, and what its figures say of its operation and its ranks."""

    def __init__(self, table: Table, file: str) -> None:
        self.table, self.file = table, file
        self.notes: list[str] = []
        self.nbytes, self.seconds, self.algbw, self.busbw, self.algbw_half, self.busbw_half = (
            np.array([row[i] for row in table.rows], dtype=float) for i in map(Row._fields.index, _FIGURES)
        )
        digit = 0.00501 * table.unit  # half of the last that a time may show
        room = 0.05 * self.nbytes + 1e9 * (self.algbw_half * (self.seconds + digit) + self.algbw * digit)
        self.torn = ~(abs(1e9 * self.algbw * self.seconds - self.nbytes) <= room)
        self.torn |= (self.nbytes == 0) & (self.algbw > 0)
        self.told = (self.algbw > 20 * self.algbw_half) & ~self.torn  # rows that can tell a bus factor

    def append_to(self, columns: dict[str, list[Any]], given: _Given) -> MisfitError | None:
        """Append the rows before one that contradicts itself, and give that one."""
        table, operation = self.table, self.name_operation(given.operation)
        ranks = self.count_ranks(operation, given.ranks)
        if given.nodes and table.nodes not in (None, given.nodes):
            self.notes.append(f"the log says nodes={table.nodes}, not nodes={given.nodes}")
        wrong = [row.line for row in table.rows if row.wrong > 0]
        if wrong:
            self.notes.append(f"{len(wrong)} results hold wrong values (the first in line {wrong[0]}); mistrust them")
        bad, misfit = self.find_misfit(operation, ranks)
        algbw, busbw = 1e9 * self.algbw, 1e9 * self.busbw
        if operation in OPERATIONS:
            algbw = np.divide(self.nbytes, self.seconds, out=algbw, where=self.seconds > 0)
            busbw = bus_factor(operation, ranks) * algbw
        rows = table.rows[:bad]
        same = {"operation": operation, "ranks": ranks, "nodes": given.nodes or table.nodes, "file": self.file}
        own = {
            name: [getattr(row, name) for row in rows] for name in ("redop", "nbytes", "seconds", "in_place", "line")
        }
        own |= {"dtype": [_DTYPES.get(row.dtype, row.dtype) for row in rows]}
        own |= {"algbw": algbw[:bad].tolist(), "busbw": busbw[:bad].tolist()}
        for name in _COLUMNS:
            columns[name] += own[name] if name in own else [same[name]] * len(rows)
        return misfit

    def name_operation(self, given: str | None) -> str:
        """What was measured: by the caller, the log, its columns and figures, and last the name of the file."""
        label = self.table.label
        says, in_name = _NAMES.get(label.replace("_", ""), label), _operations_in(self.file)
        fitting = self.find_operations()
        if given:
            if says not in ("", given):
                self.notes.append(f"the log says {says}, not operation={given!r}")
            return given
        found = says
        if says in OPERATIONS and not self.can_be(says):
            found = fitting[0] if len(fitting) == 1 else says
            more = "" if found == says else f"; it is taken for {found}"
            self.notes.append(f"the log says {says}, which its busbw / algbw does not fit{more}")
        elif not says and len(fitting) > 1 and len(in_name & set(fitting)) == 1:
            found = (in_name & set(fitting)).pop()
            self.notes.append(f"it may be {' or '.join(fitting)}; only the name of the file says {found}")
        elif not says and len(fitting) == 1:
            found = fitting[0]
        if not found:
            where, which = f"{self.file} line {self.table.rows[0].line}", " or ".join(fitting) or "none that is known"
            raise ValueError(f"{where}: the operation is not named, by its figures it is {which}; pass operation=")
        if in_name and found in OPERATIONS and found not in in_name:
            self.notes.append(f"this is {found}, the name of the file says {' and '.join(sorted(in_name))}")
        return found

    def find_operations(self) -> list[str]:
        """Operations that the columns and the bus factor leave possible."""
        first, columns = self.table.rows[0], self.table.leading
        if first.redop:
            names = ["reduce"] if first.root >= 0 else ["all_reduce", "reduce_scatter", "send_recv"]
        elif first.root >= 0:
            names = ["broadcast", "gather", "scatter"]
        elif "redop" not in columns:
            names = ["all_gather", "send_recv"]
        else:  # older versions had no column for a root, but one for the redop that all_to_all left blank
            names = ["all_gather", "all_to_all", "send_recv"] if "root" in columns else ["all_to_all"]
        halves = {row.in_place: row.wrong for row in self.table.rows[:2]}
        if halves.get(False, np.nan) >= 0 and np.isnan(halves.get(True, 0.0)):  # these two cannot work in place
            names = [name for name in names if name in ("all_to_all", "send_recv")]
        listed = [name for name in names if self.table.ranks and self.fits(name, self.table.ranks)]
        return listed or [name for name in names if self.can_be(name)]

    def can_be(self, operation: str) -> bool:
        """Whether a whole number of ranks explains the ratio of the bandwidths."""
        low, high = self.bound_ranks(operation)
        if self.table.ranks:  # a list is only wrong if another number is right
            return self.fits(operation, self.table.ranks) or low <= high < np.inf
        return low <= high

    def fits(self, operation: str, ranks: int) -> bool:
        """Whether most rows that say something about it have the bus factor of so many ranks."""
        return not self.told.any() or bool(self.is_off(operation, ranks)[self.told].mean() < 0.5)

    def is_off(self, operation: str, ranks: int) -> NDArray[np.bool_]:
        """Rows whose busbw is not the bus factor times algbw, as far as digits are printed."""
        factor = bus_factor(operation, ranks)
        return np.asarray(abs(self.busbw - factor * self.algbw) > self.busbw_half + factor * self.algbw_half)

    def bound_ranks(self, operation: str) -> tuple[int, float]:
        """Fewest and most ranks whose bus factor explains every row, as far as digits are printed."""
        algbw, busbw = self.algbw[self.told], self.busbw[self.told]
        algbw_half, busbw_half = self.algbw_half[self.told], self.busbw_half[self.told]
        low = np.max((busbw - busbw_half) / (algbw + algbw_half), initial=0.0)
        high = np.min((busbw + busbw_half) / (algbw - algbw_half), initial=np.inf)
        if bus_factor(operation, 1) == 1:
            return (1, np.inf) if low <= 1 <= high else (1, 0)
        limit = 2 * bus_factor(operation, 2)  # that of very many ranks
        fewest, most = (1 / (1 - ratio / limit) if ratio < limit else np.inf for ratio in (low, high))
        return (1, 0) if fewest == np.inf else (max(1, math.ceil(fewest)), most if most == np.inf else math.floor(most))

    def count_ranks(self, operation: str, given: int | None) -> int:
        """Ranks that took part: by the caller, the list of devices, or the bus factor."""
        listed, step = self.table.ranks, max(self.table.gpus, 1)
        expected, known = given or listed, operation in OPERATIONS
        low, high = self.bound_ranks(operation) if known else (1, np.inf)
        fits = not known or not expected or self.fits(operation, expected)
        if given and listed not in (0, given):
            self.notes.append(f"the log lists {listed} ranks, not ranks={given}")
        elif not fits and (given or not low <= high < np.inf):
            self.notes.append(f"busbw / algbw does not fit {operation} of {expected} ranks")
        if expected and (fits or given or not low <= high < np.inf):
            return expected
        if high < np.inf and (low - 1) // step < high // step:  # ranks come in multiples of the GPUs of a process
            low, high = step * math.ceil(low / step), high // step * step
        if listed:
            found = low if listed < low else int(high)
            self.notes.append(f"the log lists {listed} ranks, but busbw / algbw says {found}, which is believed")
            return found
        if low == high:
            return low
        if high == np.inf and low <= step > 1:
            return step
        where = f"{self.file} line {self.table.rows[0].line}"
        raise ValueError(f"{where}: the log lists no ranks, by busbw / algbw they are {low} to {high:g}; pass ranks=")

    def find_misfit(self, operation: str, ranks: int) -> tuple[int, MisfitError | None]:
        """How many rows come before the first that contradicts itself, as torn lines do, and that one."""
        if operation not in OPERATIONS:
            return len(self.torn), None
        off = self.is_off(operation, ranks) & self.fits(operation, ranks)
        bad = [row for row, misfit in zip(self.table.rows, self.torn | off, strict=True) if misfit]
        if not bad:
            return len(self.torn), None
        first = next(i for i, row in enumerate(self.table.rows) if row.line == bad[0].line)  # both halves of it go
        reason = "busbw / algbw is not that of the other rows" if off[first] else "algbw is not size / time"
        return first, MisfitError(bad[0].line, bad[0].text, reason)
