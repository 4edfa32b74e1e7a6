"""Text output of nccl-tests and rccl-tests, of any age, as one tidy frame."""

import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perfkit.ground.files import LARGEST_TEXT, reading
from perfkit.ground.units import check_choice, check_positive, escape, show
from perfkit.models.algorithms import OPERATIONS, bus_factor

if TYPE_CHECKING:
    import polars as pl

_SUFFIXES = (".log", ".out", ".txt")
_NAMES = {name.replace("_", ""): name for name in OPERATIONS}  # the programs are called alltoall_perf, sendrecv_perf
_DTYPES = {
    "float": "fp32", "half": "fp16", "double": "fp64", "bfloat16": "bf16", "char": "int8",
    **dict.fromkeys(("f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), "fp8"),
}  # fmt: skip
_COLUMNS = tuple("operation ranks nodes dtype redop nbytes seconds algbw busbw in_place file line".split())
_BLOCK = ("time", "algbw", "busbw", "#wrong")
_OLD_NAMES = {"bytes": "size", "N": "count", "op": "redop"}
_CLOSING = "'# Avg bus bandwidth'"
#: Characters of a line that are looked at [-]: a row has up to 250, and some searches take the square of their number.
_LONGEST = 4_000
_COUNTS = np.arange(1, 2**17)  # ranks that a bus factor may tell [-]
_TOGETHER = "several programs write here at once; use one file for each, or build nccl-tests with MPI=1"

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GPU = re.compile(r"\bdevice +\d+ +\[[^\]\n]*\] +(\S[^\r\n]*)")
_START = re.compile(r"(?:nThreads?:?\s*(\d{1,9})\s+)?nGpus\S*\s+(\d{1,9})\s.*minBytes")
_PROGRAM = re.compile(r"Collective test starting: (?:\S*/)?(\w+?)_perf")
_COMMAND = re.compile(r"\b(\w+?)_perf(?:_mpi)?[\"']?\s+-")
_DEVICE = re.compile(r"Rank\s+(\d{1,9})(?:\s+Group\s+(\d+))?(?:\s+Pid\s+(\d+))?\s+on\s+(\S+)\s+device")
_HEADER = re.compile(r"(?:size|bytes)\s+(?:count|N)\s+type\s.*algbw\s+busbw.*")
_FOOTER = re.compile(r"Out of bounds values|Avg bus bandwidth|Collective test concluded")
#: A row, whatever its launcher has written before it ("3: ", "[1,0]<stdout>:", "pod | ", a date).
_ROW = re.compile(r"(?<![\w.-])\d{1,18}\s+\d+\s+([A-Za-z]\w*)(?!\S)")
_DTYPE = re.compile(r"char|u?int\d*|half|b?float\d*|double|bf16|fp?\d+\w*")
_REDOP = re.compile(r"sum|prod|min|max|avg|mulsum")
_VALUE = re.compile(r"N/A|[-+]?(?:nan|inf|\d{1,30}(?:\.\d*)?(?:e[-+]?\d{1,2})?)\*?")
_ENDED = re.compile(r"\d\.\d+\s+\d+\.\d+\s+(?:N/A|[\d.e+*-]+)(?:\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)?\s*$")


class LogWarning(UserWarning):
    """A log contradicts itself, reports corrupt data, or was read in part."""


class _MisfitError(Exception):
    """A line that does not fit, and why."""

    def __init__(self, line: int, text: str, reason: str) -> None:
        text = text.strip()
        shown = text if len(text) <= 100 else f"{text[:97]}..."
        super().__init__(f"line {line} does not fit: {shown!r}: {reason}")


class _Row(NamedTuple):
    """One half of a printed row; its figures are nbytes, seconds, algbw and busbw with half a last digit, and wrong."""

    line: int
    text: str
    dtype: str
    redop: str | None
    root: int
    in_place: bool
    figures: tuple[float, ...]


@dataclass
class _Table:
    """What one run of one program has printed."""

    label: str = ""
    start: int = 0
    closed: bool = False
    headed: bool = False
    gpus: int = 1
    devices: dict[int, tuple[str, ...]] = field(default_factory=dict)
    leading: tuple[str, ...] = ("size", "count", "type", "redop", "root")
    trailing: tuple[str, ...] = _BLOCK + _BLOCK
    unit: float = 1e-6
    rows: list[_Row] = field(default_factory=list)

    def count(self) -> tuple[int, int | None]:
        """Ranks and nodes of a communicator by the list of devices; nodes only where no line of it was lost."""
        first = min((group for group, *_ in self.devices.values()), default="")  # NCCL_TESTS_SPLIT makes several
        hosts = [host for group, host, *_ in self.devices.values() if group == first]
        ranks = len(hosts) if len(hosts) < len(self.devices) else max(self.devices, default=-1) + 1
        return ranks, len(set(hosts)) if hosts and len(hosts) == ranks else None

    def read_header(self, header: str) -> bool:
        """Learn the columns, which grew over the years: "bytes N type op", later "size count type redop root"."""
        names = [_OLD_NAMES.get(name, name) for name in header.replace("timestamp", "date clock").split()]
        first = names.index("time") if "time" in names else len(names)
        self.leading, self.trailing, self.headed = tuple(names[:first]), tuple(names[first:]), True
        self.unit = 1e-3 if header.startswith("bytes") else 1e-6  # the first version printed ms
        return names[first : first + 3] == list(_BLOCK[:3])

    def read_row(self, line: int, text: str) -> list[_Row]:
        """Halves of a printed row; none where the tokens do not make a complete one."""
        tokens = text.split()
        lead = len(tokens) - len(self.trailing)
        blank = len(tokens) > 3 and not tokens[3].isalpha()  # the redop; without a header there may be no root either
        fewest = len(self.leading) - blank * (("redop" in self.leading) + (not self.headed))
        if not max(fewest, 3) <= lead <= len(self.leading) - (blank and self.headed and "redop" in self.leading):
            return []
        shown = list(zip(self.trailing, tokens[lead:], strict=True))
        if not all(_VALUE.fullmatch(token) for name, token in shown if name not in ("date", "clock")):
            return []
        redop = next((token for token in tokens[3:lead] if _REDOP.fullmatch(token)), None)
        root = next((int(token) for token in tokens[3:lead] if token.lstrip("-").isdigit()), -1)
        rows, starts = [], [place for place, name in enumerate(self.trailing) if name == "time"]
        for start, end in zip(starts, [*starts[1:], len(shown)], strict=True):
            half = dict(shown[start:end])
            time, algbw, busbw, wrong = (
                float(half.get(name, "N/A").rstrip("*").replace("N/A", "nan")) for name in _BLOCK
            )
            digits = (0.501 * 10.0 ** -_count_decimals(half[name]) for name in _BLOCK[1:3])
            figures = (float(tokens[0]), self.unit * time, algbw, busbw, *digits, wrong)
            rows.append(_Row(line, text, tokens[2], redop, root, start > 0, figures))
        return rows if all(math.isfinite(figure) for row in rows for figure in row.figures[:4]) else []


def _count_decimals(token: str) -> int:
    mantissa, _, exponent = token.rstrip("*").partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


class _Scan:
    """Tables found so far."""

    def __init__(self) -> None:
        self.tables, self.command = [_Table()], ""

    def feed(self, line: int, text: str) -> None:
        """Take one line."""
        table = self.tables[-1]
        if (found := _ROW.search(text)) and self.take_row(line, text, found):
            return
        if header := _HEADER.search(text):
            if not self.begin(line, text, headed=True).read_header(header.group()):
                raise _MisfitError(line, text, "the table has other columns; run the test without -C")
        elif device := _DEVICE.search(text):
            place = (device[2] or "0", device[4], device[3] or "")
            if table.devices.setdefault(int(device[1]), place) != place:
                raise _MisfitError(line, text, f"rank {device[1]} is listed twice; {_TOGETHER}")
        elif _FOOTER.search(text):
            table.closed = True
        elif start := _START.search(text):
            self.begin(line, text).gpus = max(int(start[1] or 1) * int(start[2]), 1)
        elif program := _PROGRAM.search(text):
            self.begin(line, text).label = program[1]
        elif command := _COMMAND.search(text):
            self.command = command[1]
        elif not table.closed and (table.headed or table.rows) and _ENDED.search(text):
            raise _MisfitError(line, text, "these figures belong to no row")

    def begin(self, line: int, text: str, *, headed: bool = False) -> _Table:
        """Give the table that starts here: the one at hand where it has only begun, else another one."""
        table = self.tables[-1]
        if not table.closed and (table.headed if headed else table.start) and (headed or table.rows):
            raise _MisfitError(line, text, f"{_CLOSING} should close the table before it; {_TOGETHER}")
        if table.rows or table.closed:
            self.tables.append(table := _Table())
        table.start = table.start if headed else line
        return table

    def take_row(self, line: int, text: str, found: re.Match[str]) -> bool:
        """Take a row; False for what only looks like one."""
        rows = self.tables[-1].read_row(line, text[found.start() :])
        if not rows and (_DTYPE.fullmatch(found[1]) or not text[: found.start()].strip()):
            raise _MisfitError(line, text, "the row is not complete")
        if rows and self.tables[-1].closed:
            self.tables.append(_Table())
        table = self.tables[-1]
        if rows and not table.rows:
            table.label, self.command = table.label or self.command, ""
        table.rows += rows
        return bool(rows)


def _find_tables(text: str) -> tuple[list[_Table], _MisfitError | None]:
    """Tables that have rows, and the first line that does not fit: nothing after it is read."""
    lines = [(i, line[:_LONGEST]) for i, line in enumerate(_COLOURS.sub("", text).split("\n"), 1) if line.strip()]
    scan, misfit = _Scan(), None
    try:
        for line in lines:
            scan.feed(*line)
        if scan.tables[-1].start and not scan.tables[-1].closed:
            reason = f"the log breaks off before {_CLOSING} closes the table of line {scan.tables[-1].start}"
            raise _MisfitError(*lines[-1], reason)
        if lines and not scan.tables[0].rows and len(scan.tables) == 1:
            reason = "no row of an nccl-tests table follows; pass the text that all_reduce_perf or its like print"
            raise _MisfitError(*lines[0], reason)
    except _MisfitError as error:
        misfit = error
    return [table for table in scan.tables if table.rows], misfit


class _Ratio:
    """Bounds of the bus factor of each row, busbw over algbw, within their printed digits."""

    def __init__(self, table: _Table) -> None:
        nbytes, seconds, algbw, busbw, algbw_half, busbw_half, _ = np.array([row.figures for row in table.rows]).T
        digit = 0.00501 * table.unit  # half of the last that a time may show
        room = 0.05 * nbytes + 1e9 * (algbw_half * (seconds + digit) + algbw * digit)
        self.torn = (abs(1e9 * algbw * seconds - nbytes) > room) | ((nbytes == 0) & (algbw > 0))
        self.telling = (algbw > 20 * algbw_half) & ~self.torn
        self.low = (busbw - busbw_half) / (algbw + algbw_half)
        self.high = np.where(self.telling, busbw + busbw_half, np.inf) / np.where(self.telling, algbw - algbw_half, 1.0)

    def agrees(self, operation: str, ranks: int) -> npt.NDArray[np.bool_]:
        """Rows that have the bus factor of this number of ranks."""
        factor = bus_factor(operation, ranks)
        return np.asarray((self.low <= factor) & (factor <= self.high))

    def fits(self, operation: str, ranks: int) -> bool:
        """Whether most rows with enough digits agree; true for programs without a model."""
        told = operation in OPERATIONS and self.telling.any()
        return not told or bool(self.agrees(operation, ranks)[self.telling].mean() > 0.5)

    def bound_ranks(self, operation: str) -> tuple[int, float]:
        """Fewest and most ranks whose bus factor explains every row, 1 and 0 where none does."""
        if operation not in OPERATIONS:
            return 1, math.inf
        factors = bus_factor(operation, _COUNTS)
        low, high = np.max(self.low[self.telling], initial=0.0), np.min(self.high, initial=np.inf)
        found = _COUNTS[(low <= factors) & (factors <= high)]
        if not len(found):
            return 1, 0
        return int(found[0]), math.inf if found[-1] == _COUNTS[-1] else int(found[-1])


def _name_operation(table: _Table, ratio: _Ratio, file: str) -> tuple[str, str]:
    """Operation by label, columns and figures, or last by the file name; and a note if something is odd."""
    if table.label:
        return _NAMES.get(table.label.replace("_", ""), table.label), ""
    first, ranks = table.rows[0], table.count()[0]
    if first.redop:
        names = ["reduce"] if first.root >= 0 else ["all_reduce", "reduce_scatter", "send_recv"]
    elif first.root >= 0:
        names = ["broadcast", "gather", "scatter"]
    elif "redop" not in table.leading:
        names = ["all_gather", "send_recv"]
    else:  # older versions had no column for a root, but one for the redop that all_to_all left blank
        names = ["all_gather", "all_to_all", "send_recv"] if "root" in table.leading else ["all_to_all"]
    wrong = [row.figures[-1] for row in table.rows[:2]]
    if len(wrong) > 1 and table.rows[1].in_place and wrong[0] >= 0 and math.isnan(wrong[1]):
        names = [name for name in names if name in ("all_to_all", "send_recv")]  # these cannot work in place
    fitting = [name for name in names if (ratio.fits(name, ranks) if ranks else ratio.bound_ranks(name)[1])]
    if len(fitting) == 1:
        return fitting[0], ""
    which, text = " or ".join(fitting) or "none known", re.sub(r"[^a-z]", "", Path(file).stem.lower())
    named = max((name for name in _NAMES if name in text), key=len, default="")  # a reduce_scatter is no reduce
    if _NAMES.get(named) not in fitting:
        raise ValueError(f"the operation is not named, by its figures it is {which}; pass operation=")
    return _NAMES[named], f"it may be {which}; only the name of the file says {_NAMES[named]}"


def _count_ranks(table: _Table, ratio: _Ratio, operation: str) -> int:
    """Ranks that took part, by the list of devices or the bus factor."""
    if listed := table.count()[0]:
        return listed
    (low, high), step = ratio.bound_ranks(operation), table.gpus
    if high < math.inf and (low - 1) // step < high // step:  # ranks come in multiples of the GPUs of a process
        low, high = step * math.ceil(low / step), high // step * step
    if low == high or (high == math.inf and low <= step > 1):
        return low if low == high else step
    raise ValueError(f"the log lists no ranks, by busbw / algbw they are {low} to {high:g}; pass ranks=")


def _read_table(
    table: _Table, file: str, operation: str | None, ranks: int | None, nodes: int | None
) -> tuple[list[dict[str, Any]], list[str], _MisfitError | None]:
    """Rows before one that contradicts itself, notes, and the error of that one."""
    ratio, (listed, hosts), kept, misfit = _Ratio(table), table.count(), table.rows, None
    try:
        name, odd = (operation, "") if operation else _name_operation(table, ratio, file)
        count = ranks or _count_ranks(table, ratio, name)
    except ValueError as error:
        raise ValueError(f"{file} line {table.rows[0].line}: {error}") from None
    wrong = [row.line for row in table.rows if row.figures[-1] > 0]
    label, fits = _NAMES.get(table.label.replace("_", ""), table.label), ratio.fits(name, count)
    notes = [odd] if odd else []
    if operation and label not in ("", operation):
        notes.append(f"the log says {label}, not operation={operation!r}")
    if ranks and listed not in (0, ranks):
        notes.append(f"the log lists {listed} ranks, not ranks={ranks}")
    elif not fits:
        notes.append(f"busbw / algbw does not fit {name} of {count} ranks; pass operation= or ranks=")
    if wrong:
        notes.append(f"{len(wrong)} results hold wrong values (the first in line {wrong[0]}); mistrust them")
    known = name in OPERATIONS
    good = ~ratio.torn & (ratio.agrees(name, count) | (not fits)) if known else np.ones(len(kept), dtype=bool)
    if not good.all():
        row, torn = kept[int(good.argmin())], ratio.torn[good.argmin()]
        reason = "algbw is not size / time" if torn else "busbw / algbw is not that of the other rows"
        misfit = _MisfitError(row.line, row.text, reason)
        kept = [other for other in kept if other.line < row.line]
    rows = []
    for row in kept:
        nbytes, seconds, algbw, busbw = row.figures[0], row.figures[1], 1e9 * row.figures[2], 1e9 * row.figures[3]
        if known:  # size and time have more digits
            algbw = nbytes / seconds if seconds > 0 else algbw
            busbw = float(bus_factor(name, count)) * algbw
        what = (name, count, nodes or hosts, _DTYPES.get(row.dtype, row.dtype), row.redop, int(nbytes), seconds)
        rows.append(dict(zip(_COLUMNS, (*what, algbw, busbw, row.in_place, file, row.line), strict=True)))
    return rows, [f"line {table.rows[0].line}: {note}" for note in notes], misfit


def _advise(file: str, misfit: _MisfitError, kept: int) -> str:
    return f"{file} {misfit}" + (f"; partial=True keeps the {kept} measurements before it" if kept else "")


def _collect(logs: Iterable[tuple[str, str]], partial: bool, **given: Any) -> "pl.DataFrame":
    """Read named texts into one frame."""
    import polars as pl

    if given["operation"] is not None:
        check_choice("operation", given["operation"], OPERATIONS)
    for name in ("ranks", "nodes"):
        if given[name] is not None:
            check_positive(name, given[name], integer=True)
    rows: list[dict[str, Any]] = []
    for name, text in logs:
        file, before = escape(name, 200), len(rows)
        with reading(file, "pass the text that all_reduce_perf or its like print"):
            tables, misfit = _find_tables(text)
            if misfit and not partial:
                raise ValueError(_advise(file, misfit, sum(len(table.rows) for table in tables)))
            for table in tables:
                found, notes, wrong = _read_table(table, file, **given)
                rows += found
                for note in notes:
                    warnings.warn(escape(f"{file} {note}", 500), LogWarning, stacklevel=3)
                if wrong and not partial:
                    raise ValueError(_advise(file, wrong, len(rows) - before))
                misfit = wrong or misfit
        if misfit:
            kept = len(rows) - before or "no"
            warnings.warn(f"{file} {misfit}; {kept} measurements are kept", LogWarning, stacklevel=3)
    if not rows:
        raise ValueError("no complete row of an nccl-tests table is there; pass the text that all_reduce_perf prints")
    kinds: dict[str, Any] = dict.fromkeys(("operation", "dtype", "redop", "file"), pl.String)
    kinds |= dict.fromkeys(("ranks", "nodes", "nbytes", "line"), pl.Int64) | {"in_place": pl.Boolean}
    return pl.DataFrame(rows, schema={name: kinds.get(name, pl.Float64) for name in _COLUMNS})


def _read_logs(source: str | Path | Sequence[str | Path]) -> Iterator[tuple[str, str]]:
    """Name and text of each log."""
    paths = [Path(item) for item in ([source] if isinstance(source, str | Path) else source)]
    folder = paths[0] if isinstance(source, str | Path) and os.path.isdir(paths[0]) else None
    if folder:
        paths = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
        if not paths:
            raise ValueError(f"{show(str(source), 200)} holds no {', '.join(_SUFFIXES)} file; name the logs one by one")
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"{show(str(path), 200)} is no file; name a log, several, or a folder of logs")
    for path in paths:
        with reading(path, "name the output of nccl-tests", most=LARGEST_TEXT):
            text = path.read_text(encoding="utf-8", errors="replace")
        yield path.relative_to(folder).as_posix() if folder else path.name, text


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
        A log, several, or a folder with its subfolders, whose .log, .out and .txt files are read.
    operation : str, optional
        Operation, one of `perfkit.models.collectives.OPERATIONS`; by default from the logs.
    ranks : int, optional
        Ranks that took part; by default from the logs [-].
    nodes : int, optional
        Nodes they ran on; by default from the logs [-].
    partial : bool, optional
        Whether to keep, with a warning, the rows before a line that does not fit.

    Returns
    -------
    frame : polars.DataFrame
        As `parse_nccl_tests` gives it, one log below the other; `file` is the path within the folder, or the name.

    Raises
    ------
    ValueError
        For a source that does not exist or holds no log, and as `parse_nccl_tests` does.
    """
    return _collect(_read_logs(source), partial, operation=operation, ranks=ranks, nodes=nodes)


def parse_nccl_tests(
    text: str,
    *,
    file: str = "text",
    operation: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    partial: bool = False,
) -> "pl.DataFrame":
    """Read output of nccl-tests or rccl-tests: old and new formats, among other lines, several runs in one text.

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
    The ranks follow from the ratio of busbw to algbw, 2 (p - 1) / p for all_reduce and (p - 1) / p for others, and from
    the list of devices; where they disagree, the ratio counts. Bandwidths are computed from size and time, which have
    more digits than the printed bandwidths.

    References
    ----------
    .. [1] NVIDIA, nccl-tests, doc/PERFORMANCE.md (definition of size, algbw and busbw)

    Examples
    --------
    >>> log = "67108864 16777216 float sum -1 584.5 114.81 200.91 0 581.9 115.33 201.82 0"
    >>> frame = parse_nccl_tests(log)
    >>> frame.select("operation", "ranks", "dtype", "nbytes", "in_place").row(1)
    ('all_reduce', 8, 'fp32', 67108864, True)
    """
    return _collect([(file, text)], partial, operation=operation, ranks=ranks, nodes=nodes)


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
