"""Text output of nccl-tests and rccl-tests, old and new, as one frame."""

import gzip
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from perfkit.ground.files import LARGEST_TEXT, check_paths, explain_content, reading
from perfkit.ground.forks import check_threads
from perfkit.ground.units import escape, format_bytes, show
from perfkit.models.collectives import COLLECTIVES, OPERATIONS, bus_factor

#: Endings of the files of a folder that are taken for logs; others are where a table is in them.
_SUFFIXES = (".log", ".out", ".txt", ".dat", ".nccl", ".stdout")
# the programs are called alltoall_perf, sendrecv_perf
_NAMES = {name.replace("_", ""): name for name in OPERATIONS}
_REDUCING = {name for name, collective in COLLECTIVES.items() if collective.reduces}
_ROOTED = {name for name, collective in COLLECTIVES.items() if collective.has_root}
_DTYPES = {
    "float": "fp32",
    "half": "fp16",
    "double": "fp64",
    "bfloat16": "bf16",
    "char": "int8",
    **dict.fromkeys(("f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), "fp8"),
}
_COLUMNS: dict[str, Any] = {
    "operation": pl.String,
    "ranks": pl.Int64,
    "nodes": pl.Int64,
    "dtype": pl.String,
    "redop": pl.String,
    "nbytes": pl.Int64,
    "seconds": pl.Float64,
    "algbw": pl.Float64,
    "busbw": pl.Float64,
    "in_place": pl.Boolean,
    "file": pl.String,
    "line": pl.Int64,
}
_BLOCK = ("time", "algbw", "busbw", "#wrong")
_CLOSING = "'# Avg bus bandwidth'"
#: Names of columns whose values are figures; any other column may hold text.
_FIGURES = {"time", "algbw", "busbw", "#wrong", "error"}
#: Characters of a line that are read [-]: a row has up to 250, and the time of some searches grows
#: with their square.
_LONGEST = 4_000
_COUNTS = np.arange(1, 2**17)  # numbers of ranks that are tried [-]
_TOGETHER = (
    "several programs write here at once; use one file for each, or build nccl-tests with MPI=1"
)
_OLD = (
    "it is the layout of nccl-tests before 2019 (columns bytes, N, type, op, time, res), which is "
    "not read; run a newer nccl-tests"
)
_ADVICE = "pass the text that all_reduce_perf or its like print"
#: What a table of one rank means, and the next step.
ONE_RANK = (
    "a table of one rank holds no exchange; if mpirun or srun started several ranks, build "
    "nccl-tests with MPI=1; on one node, run it with -g and the number of GPUs"
)
#: Bytes of a file of a folder in which the head of a table is looked for [B].
_SEARCHED = 2**20

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GPU = re.compile(r"\bdevice +\d+ +\[[^\]\n]*\] +(\S[^\r\n]*)")
_START = re.compile(r"(?:nThreads?:?\s*(\d{1,9})\s+)?nGpus\S*\s+(\d{1,9})\s.*minBytes")
_PROGRAM = re.compile(r"Collective test starting: (?:\S*/)?(\w+?)_perf")
_COMMAND = re.compile(r"\b(\w+?)_perf(?:_mpi)?[\"']?\s+-")
_DEVICE = re.compile(
    r"Rank\s+(\d{1,9})(?:\s+Group\s+(\d+))?(?:\s+Pid\s+\d+)?\s+on\s+(\S+)\s+device"
)
_HEADER = re.compile(r"size\s+count\s+type\s.*algbw\s+busbw.*")
_FOOTER = re.compile(r"Out of bounds values|Avg bus bandwidth|Collective test concluded")
_FAILED = re.compile(r"Out of bounds values\s*:\s*\d+\s+FAILED")
#: Names of columns of nccl-tests before 2019, whose times are in milliseconds.
_ANCIENT = re.compile(r"bytes\s+N\s+type\s.*algbw\s+busbw\s+res\b")
_USAGE = re.compile(r"^\W*USAGE\s*:?.*_perf\b", re.IGNORECASE)
#: Network adapters that NCCL lists with NCCL_DEBUG=INFO, once for each node that says so.
_ADAPTERS = re.compile(r"NET/IB : Using((?: \[\d+\][\w.-]+:\d+\S*)+)")
#: Variables that take a way of the data from NCCL, or its choice of an algorithm, as it lists them
#: or as a command or a job script sets them.
_SETTINGS = re.compile(
    r"\b(?:(?P<off>NCCL_(?:P2P|SHM|IB|NET)_DISABLE)|(?P<on>NCCL_NVLS_ENABLE)"
    r"|(?P<forced>NCCL_(?:ALGO|PROTO)))\b"
    r"(?:[\"']?\s?[=:]\s?[\"']?| set by environment to )"
    r"(?P<value>[\w^][\w^,;:@/+-]{0,79})"
)
#: Variables that the network plugin of EFA sets by itself where nobody else has, in every job on
#: such a network: aws-ofi-nccl, src/platform-aws.c (Apache-2.0).
_BY_PLUGIN = re.compile(
    r"NET/OFI Setting (?P<name>NCCL_\w+) to [\"']?(?P<value>[\w^,;:@/+-]{1,80})"
)
#: Lines that say why a run ended, and lines that may.
_FAILURES = (
    re.compile(
        r"(?:NCCL|RCCL|CUDA|Cuda|HIP|hip) (?:failure|error)|Test failure|unhandled \w+ error"
        r"|Segmentation fault|Bus error|out of memory|command not found|cannot open shared object"
        r"|Invalid number of GPUs|not enough slots|Permission denied|cannot execute binary file"
        r"|Host key verification failed|Connection (?:refused|timed out)"
        r"|No such file or directory|DUE TO TIME LIMIT|CANCELLED|Killed|Aborted"
        r"|srun: error|exited on signal|non-zero (?:exit code|status)"
    ),
    re.compile(r"NCCL WARN"),
)
#: A row, whatever its launcher wrote before it ("3: ", "[1,0]<stdout>:", "pod | ", a date).
_ROW = re.compile(r"(?<![\w.,-])\d{1,18}\s+\d+\s+([A-Za-z]\w*)(?!\S)")
_DTYPE = re.compile(r"char|u?int\d*|half|b?float\d*|double|bf16|fp?\d+\w*")
_VALUE = re.compile(r"N/A|[-+]?(?:nan|inf|\d{1,30}(?:\.\d*)?(?:e[-+]?\d{1,2})?)\*?")
_ENDED = re.compile(
    r"\d\.\d+\s+\d+\.\d+\s+(?:N/A|[\d.e+*-]+)(?:\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)?\s*$"
)


class LogWarning(UserWarning):
    """A log contradicts itself, reports wrong results, or was read in part."""


class _Content(NamedTuple):
    """What one log holds."""

    frames: list[pl.DataFrame]
    misfit: str | None  # the first line that does not fit, and why
    unequal: str  # hosts with unequal numbers of ranks, empty for none
    settings: str  # variables that told NCCL how to exchange, empty for none


class _MisfitError(Exception):
    """A line that does not fit, and the reason."""

    def __init__(self, line: int, text: str, reason: str) -> None:
        super().__init__(f"line {line} does not fit: {show(text.strip(), 100)}: {reason}")


class NcclLogs(NamedTuple):
    """What logs of nccl-tests hold: their rows, and the devices and hosts that each file names."""

    rows: pl.DataFrame  # as `parse_nccl_tests` returns them
    devices: dict[str, tuple[str, ...]]  # by file, as printed, sorted
    unequal: dict[str, str]  # files whose hosts hold unequal numbers of ranks, and which
    settings: dict[str, str]  # files of runs that were told how to exchange, and by which variables


class _Device(NamedTuple):
    """One line of the list of devices."""

    group: str  # of NCCL_TESTS_SPLIT
    host: str


class _Half(NamedTuple):
    """One half of a printed row: bandwidths as printed, each with half of its last digit."""

    line: int
    text: str
    dtype: str
    redop: str | None
    root: int
    in_place: bool
    nbytes: float  # [B]
    seconds: float  # [s]
    algbw: float  # [GB/s]
    busbw: float  # [GB/s]
    algbw_half: float  # [GB/s]
    busbw_half: float  # [GB/s]
    wrong: float  # results with wrong values; NaN if they were not checked [-]


class _Bounds(NamedTuple):
    """Bounds of the bus factor, busbw / algbw, of each half of the rows, within the printed
    digits."""

    low: np.ndarray
    high: np.ndarray
    torn: np.ndarray  # whether a half contradicts itself


@dataclass
class _Table:
    """Output of one run of one program."""

    label: str = ""
    command: str = ""
    start: int = 0
    closed: bool = False
    headed: bool = False
    gpus: int = 1
    failed: bool = False  # the closing line says that results were wrong
    devices: dict[int, _Device] = field(default_factory=dict)
    leading: tuple[str, ...] = ("size", "count", "type", "redop", "root")
    trailing: tuple[str, ...] = _BLOCK + _BLOCK
    halves: list[_Half] = field(default_factory=list)
    unread: tuple[str, ...] = ()  # words after the first row that has any that no column names
    stray: list[int] = field(default_factory=list)  # lines of rows after the closing line

    def count(self) -> tuple[int, int | None]:
        """Ranks and nodes of a communicator from the list of devices; nodes are None where lines of
        it are missing."""
        # NCCL_TESTS_SPLIT makes several groups
        first = min((group for group, _ in self.devices.values()), default="")
        hosts = [host for group, host in self.devices.values() if group == first]
        ranks = len(hosts) if len(hosts) < len(self.devices) else max(self.devices, default=-1) + 1
        return ranks, len(set(hosts)) if hosts and len(hosts) == ranks else None

    def describe_unequal_hosts(self) -> str:
        """Say that hosts hold unequal numbers of ranks; empty where they do not."""
        first = min((group for group, _ in self.devices.values()), default="")
        by_host = Counter(host for group, host in self.devices.values() if group == first)
        if len(set(by_host.values())) < 2:
            return ""
        ranks, listed = self.count()[0], by_host.total()
        if listed < ranks:
            return f"its list of devices lacks {ranks - listed} of {ranks} ranks: how many a node holds is unknown"
        (most, many), *_, (least, few) = by_host.most_common()
        return f"host {most} holds {many} ranks and host {least} {few}: its times are not those of whole nodes"

    def read_header(self, header: str) -> bool:
        """Read the names of the columns, and return whether the first three of a block are the
        usual ones."""
        names = header.replace("timestamp", "date clock").split()
        first = names.index("time") if "time" in names else len(names)
        self.leading, self.trailing, self.headed = tuple(names[:first]), tuple(names[first:]), True
        return names[first : first + 3] == list(_BLOCK[:3])

    def take_row(self, line: int, text: str) -> bool:
        """Add both halves of a printed row; False if the row is not complete."""
        tokens, extra = self._split_words(text.split())
        halves: list[_Half] = []
        cut = max(len(tokens) - len(self.trailing), 0)
        lead, shown = tokens[:cut], list(zip(self.trailing, tokens[cut:], strict=False))
        # old all_to_all leaves this column empty
        blank = "redop" in self.leading and not "".join(lead[3:4]).isalpha()
        if cut not in self._count_leading(blank) or not all(
            _VALUE.fullmatch(text) for name, text in shown if name in _FIGURES
        ):
            return False
        redop = next((token for token in lead[3:] if token.isalpha() and token != "none"), None)
        root = next((int(token) for token in lead[3:] if token.lstrip("-").isdigit()), -1)
        starts = [place for place, name in enumerate(self.trailing) if name == "time"]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            half = dict(shown[start:end])
            exact = [
                Decimal(half.get(name, "N/A").rstrip("*").replace("N/A", "nan")) for name in _BLOCK
            ]
            if not all(map(math.isfinite, map(float, exact[:3]))):
                return False
            time, algbw, busbw, wrong = map(float, exact)
            digits = (0.501 * 10.0 ** int(number.as_tuple().exponent) for number in exact[1:3])
            figures = (float(lead[0]), 1e-6 * time, algbw, busbw, *digits, wrong)
            halves.append(_Half(line, text, lead[2], redop, root, start > 0, *figures))
        self.halves += halves
        self.unread = self.unread or tuple(extra)
        return True

    def _count_leading(self, blank: bool) -> tuple[int, ...]:
        """How many values may stand before the figures of a row; `blank` without an operation."""
        if self.headed:
            return (len(self.leading) - blank,)
        return (3, 4) if blank else (5,)

    def _split_words(self, tokens: list[str]) -> tuple[list[str], list[str]]:
        """Split off words after the figures of a row that no column names, such as the
        algorithm."""
        usual = len(self.leading) + len(self.trailing)
        row, extra = tokens[:usual], tokens[usual:]
        is_word = bool(extra) and bool(re.fullmatch(r"[A-Za-z][\w+-]*", extra[0]))
        if is_word and not any(_DTYPE.fullmatch(token) for token in extra):
            return row, extra
        return tokens, []

    def explain_row(self, tokens: Sequence[str]) -> str:
        """Say why a row is not complete."""
        expected = len(self.leading) + len(self.trailing)
        if len(tokens) > expected + 1 and self.headed:
            return f"the row has {len(tokens)} values, the header names {expected} columns"
        if 7 <= len(tokens) <= 12 and not self.headed and re.fullmatch(r"\de[+-]\d\d", tokens[-1]):
            return f"it is not a row of 2019 or later; {_OLD}"
        if any(re.fullmatch(r"\d+,\d+", token) for token in tokens):
            return "its figures have decimal commas; run the test with LC_ALL=C"
        return "the row is not complete"


def _feed(tables: list[_Table], line: int, text: str) -> None:
    """Read one line, which belongs to the last table or begins another one."""
    table, found, first = tables[-1], _ROW.search(text), not tables[-1].halves
    if found and table.closed and table.halves:
        if _DTYPE.fullmatch(found[1]):
            table.stray.append(line)
    elif found and table.take_row(line, text[found.start() :]):
        if first:
            table.label, table.command = table.label or table.command, ""
    elif found and (_DTYPE.fullmatch(found[1]) or not text[: found.start()].strip()):
        raise _MisfitError(line, text, table.explain_row(text[found.start() :].split()))
    elif header := _HEADER.search(text):
        if not _begin(tables, line, text, header=True).read_header(header.group()):
            raise _MisfitError(line, text, "the table has other columns; run the test without -C")
    elif _ANCIENT.search(text):
        raise _MisfitError(line, text, _OLD)
    elif device := _DEVICE.search(text):
        if table.closed:  # of the next run
            tables.append(table := _Table(command=table.command))
        table.devices.setdefault(int(device[1]), _Device(device[2] or "0", device[3]))
    elif _FOOTER.search(text):
        table.closed = True
        table.failed = table.failed or bool(_FAILED.search(text))
    elif start := _START.search(text):
        _begin(tables, line, text).gpus = max(int(start[1] or 1) * int(start[2]), 1)
    elif program := _PROGRAM.search(text):
        _begin(tables, line, text).label = program[1]
    elif command := _COMMAND.search(text):
        table.command = command[1]
    elif not table.closed and (table.headed or table.halves) and _ENDED.search(text):
        raise _MisfitError(line, text, "these figures belong to no row")


def _begin(tables: list[_Table], line: int, text: str, *, header: bool = False) -> _Table:
    """Return the table that starts here: the last one if it is still empty, otherwise a new one."""
    table = tables[-1]
    if not table.closed and (table.headed if header else table.halves):
        raise _MisfitError(line, text, f"{_CLOSING} should close the table before it; {_TOGETHER}")
    failed_before = bool(table.devices or table.headed) and not header
    if table.halves or table.closed or failed_before:
        tables.append(table := _Table(command=table.command))
    table.start = table.start if header else line
    return table


def _find_tables(text: str) -> tuple[list[_Table], _MisfitError | None]:
    """Tables with rows, and the first line that does not fit; lines after it are not read."""
    plain = _COLOURS.sub("", text)
    if "\n" not in plain:  # line ends of old Macs
        plain = plain.replace("\r", "\n")
    lines = [(i, line[:_LONGEST]) for i, line in enumerate(plain.split("\n"), 1) if line.strip()]
    tables, misfit = [_Table()], None
    try:
        for line in lines:
            _feed(tables, *line)
        if tables[-1].start and not tables[-1].closed:
            reason = f"the log ends before {_CLOSING} closes the table of line {tables[-1].start}"
            raise _MisfitError(*lines[-1], reason + _quote_failure(lines, tables[-1].start))
        if lines and not any(table.halves for table in tables):
            raise _MisfitError(*lines[0], _explain_absence(lines))
    except _MisfitError as error:
        misfit = error
    for table in tables:  # a program that perfkit does not know keeps its name
        table.label = _NAMES.get(table.label.replace("_", ""), table.label)
    return [table for table in tables if table.halves], misfit


def _quote_failure(lines: Sequence[tuple[int, str]], after: int = 0) -> str:
    """What the log itself says about a failure, after a line; empty if it says nothing."""
    for pattern in _FAILURES:
        for line, text in lines:
            if line > after and pattern.search(text):
                if line == lines[-1][0]:  # the message shows it
                    return ""
                return f"; line {line} says {show(text.strip(), 160)}"
    return ""


def _explain_absence(lines: Sequence[tuple[int, str]]) -> str:
    """Why a text has no row of a table."""
    failure = _quote_failure(lines)
    if any(_USAGE.search(text) for _, text in lines[:50]):
        return "it is the help of the program; run the test and keep what it prints"
    if any(_START.search(text) or _HEADER.search(text) for _, text in lines):
        return f"the run printed no row{failure or '; run it again'}"
    if failure:
        return f"no row of an nccl-tests table follows{failure}"
    if re.match(r"\s*(?:\{\s*\"|\[\s*\{\s*\"|[{[]\s*$)", lines[0][1]):
        return f"no row of an nccl-tests table follows, it looks like JSON; {_ADVICE}"
    return f"no row of an nccl-tests table follows; {_ADVICE}"


def _bound_factor(halves: Sequence[_Half]) -> _Bounds:
    """Bounds of the bus factor of printed rows."""
    figures = np.array([half[6:12] for half in halves])
    nbytes, seconds, algbw, busbw, algbw_half, busbw_half = figures.T
    digit = 0.00501e-6  # half of the last printed digit of a time [s]
    room = 0.05 * nbytes + 1e9 * (algbw_half * (seconds + digit) + algbw * digit)
    torn = (abs(1e9 * algbw * seconds - nbytes) > room) | ((nbytes == 0) & (algbw > 0))
    telling = (algbw > 20 * algbw_half) & ~torn
    low = np.where(telling, (busbw - busbw_half) / (algbw + algbw_half), 0.0)
    high = np.where(telling, busbw + busbw_half, np.inf) / np.where(
        telling, algbw - algbw_half, 1.0
    )
    return _Bounds(low, high, torn)


def _agrees(bounds: _Bounds, operation: str, ranks: int) -> np.ndarray:
    """Halves whose bounds hold the bus factor of so many ranks; all of an unknown program."""
    if operation not in OPERATIONS:
        return np.ones(len(bounds.low), dtype=bool)
    factor = float(bus_factor(operation, ranks))
    return np.asarray((bounds.low <= factor) & (factor <= bounds.high))


def _fits(bounds: _Bounds, operation: str, ranks: int) -> bool:
    """Whether the bus factor of most rows is that of so many ranks."""
    telling = np.isfinite(bounds.high)
    return bool(not telling.any() or _agrees(bounds, operation, ranks)[telling].mean() > 0.5)


def _bound_ranks(bounds: _Bounds, operation: str) -> tuple[int, float]:
    """Fewest and most ranks that explain every row; 1 and 0 where none do."""
    if operation not in OPERATIONS:
        return 1, math.inf
    factors = _list_factors(operation)
    found = _COUNTS[(factors >= bounds.low.max()) & (factors <= bounds.high.min())]
    if not len(found):
        return 1, 0
    return int(found[0]), math.inf if found[-1] == _COUNTS[-1] else int(found[-1])


@cache
def _list_factors(operation: str) -> np.ndarray:
    """Bus factors of all numbers of ranks that are tried."""
    return np.asarray(bus_factor(operation, _COUNTS) * np.ones(len(_COUNTS)))


def _name_operation(table: _Table, bounds: _Bounds, file: str) -> tuple[str, str]:
    """Operation from the label, from columns and figures, or from the file name; and a note if it
    is uncertain."""
    if table.label:
        return table.label, ""
    first, (ranks, _), names = table.halves[0], table.count(), set(OPERATIONS)
    names &= _ROOTED if first.root >= 0 else names - _ROOTED
    names &= {*_REDUCING, "send_recv"} if first.redop else names - _REDUCING
    # in old logs only all_to_all has an empty column
    if "root" not in table.leading and not first.redop:
        names &= {"all_to_all"} if "redop" in table.leading else {"all_gather", "send_recv"}
    both = any(half.in_place for half in table.halves[:2])
    if both and first.wrong >= 0:  # these two cannot work in place, so it is not checked there
        unchecked = math.isnan(table.halves[1].wrong)
        only_out_of_place = {"all_to_all", "send_recv"}
        names = names & only_out_of_place if unchecked else names - only_out_of_place
    known = [name for name in OPERATIONS if name in names]
    fitting = [
        name
        for name in known
        if (_fits(bounds, name, ranks) if ranks else _bound_ranks(bounds, name)[1])
    ]
    if len(fitting) == 1:
        return fitting[0], ""
    which, text = (
        " or ".join(fitting) or "none known",
        re.sub(r"[^a-z]", "", Path(file).stem.lower()),
    )
    named = _NAMES.get(max((name for name in _NAMES if name in text), key=len, default=""))
    if named not in fitting:
        if ranks == 1:
            raise ValueError(ONE_RANK)
        if ranks and not fitting:
            raise ValueError(
                f"the list of devices names {ranks} ranks, no operation of so many has these "
                "figures; lines of the list may be missing"
            )
        advice = "put its name into the name of the file, such as all_gather.log"
        raise ValueError(f"the operation is not named, by its figures it is {which}; {advice}")
    return named, f"it may be {which}; only the name of the file says {named}"


def _count_ranks(table: _Table, bounds: _Bounds, operation: str) -> tuple[int, int | None]:
    """Ranks and nodes that took part, from the list of devices or from the bus factor."""
    ranks, nodes = table.count()
    if ranks:
        return ranks, nodes
    (low, high), step = _bound_ranks(bounds, operation), table.gpus
    # ranks come in multiples of the GPUs of a process
    if high < math.inf and (low - 1) // step < high // step:
        low, high = step * math.ceil(low / step), high // step * step
    if low == high or (high == math.inf and low <= step > 1):
        return (low if low == high else step), None
    advice = "keep its lines '#  Rank  0 ... device'"
    raise ValueError(
        f"the log lists no ranks, by busbw / algbw they are {low} to {high:g}; {advice}"
    )


def _describe_stray(lines: Sequence[int]) -> str:
    """Say which rows after the closing line are left out."""
    if len(lines) == 1:
        which = f"1 row after its closing line (line {lines[0]}) is left out"
    else:
        span = f"lines {lines[0]} to {lines[-1]}"
        which = f"{len(lines)} rows after its closing line ({span}) are left out"
    return f"{which}: no header says which run they belong to; use one file for each run"


def _read_table(table: _Table, file: str) -> tuple[pl.DataFrame, _MisfitError | None]:
    """Rows before the first one that contradicts the others, and the error of that one; warns of
    other problems."""
    halves, bounds = table.halves, _bound_factor(table.halves)
    where = f"{file} line {halves[0].line}"
    try:
        name, note = _name_operation(table, bounds, file)
        ranks, nodes = _count_ranks(table, bounds, name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    fits = _fits(bounds, name, ranks)
    notes = [note] if note else []
    if not fits:
        notes.append(f"busbw / algbw does not fit {name} of {ranks} ranks; check the log")
    for text in [*notes, *_list_notes(table)]:
        warnings.warn(escape(f"{where}: {text}", 500), LogWarning, stacklevel=4)
    misfit = None
    if name in OPERATIONS:
        bad = bounds.torn | (fits & ~_agrees(bounds, name, ranks))
        if bad.any():
            worst = int(bad.argmax())
            reason = "busbw / algbw is not that of the other rows"
            if bounds.torn[worst]:
                reason = "algbw is not size / time"
            misfit = _MisfitError(halves[worst].line, halves[worst].text, reason)
            halves = [half for half in halves if half.line < halves[worst].line]
    return _make_frame(halves, file, name, ranks, nodes), misfit


def _list_notes(table: _Table) -> list[str]:
    """What a reader must know of a table, whatever its operation."""
    notes = []
    wrong = [half.line for half in table.halves if half.wrong > 0]
    if wrong:
        notes.append(
            f"{len(wrong)} results hold wrong values (the first in line {wrong[0]}); do not trust them"
        )
    elif table.failed:
        notes.append("its closing line says FAILED: results were wrong; do not trust the times")
    if table.stray:
        notes.append(_describe_stray(table.stray))
    if table.unread:
        words = show(" ".join(table.unread), 60)
        notes.append(f"words after the figures of a row are not used: {words}")
    return notes


def _make_frame(
    halves: Sequence[_Half], file: str, operation: str, ranks: int, nodes: int | None
) -> pl.DataFrame:
    """Halves of rows with the columns of a frame, in base units."""
    nbytes = np.array([half.nbytes for half in halves], dtype=float)
    seconds = np.array([half.seconds for half in halves], dtype=float)
    algbw = 1e9 * np.array([half.algbw for half in halves], dtype=float)
    busbw = 1e9 * np.array([half.busbw for half in halves], dtype=float)
    if operation in OPERATIONS:  # size and time have more digits than the printed bandwidth
        algbw = np.divide(nbytes, seconds, out=algbw, where=seconds > 0)
        busbw = float(bus_factor(operation, ranks)) * algbw
    count = len(halves)
    columns = {
        "operation": [operation] * count,
        "ranks": [ranks] * count,
        "nodes": [nodes] * count,
        "dtype": [_DTYPES.get(half.dtype, half.dtype) for half in halves],
        "redop": [half.redop for half in halves],
        "nbytes": nbytes.astype(np.int64),
        "seconds": seconds,
        "algbw": algbw,
        "busbw": busbw,
        "in_place": [half.in_place for half in halves],
        "file": [file] * count,
        "line": [half.line for half in halves],
    }
    return pl.DataFrame(columns, _COLUMNS)


def _read_text(name: str, text: str, partial: bool) -> _Content:
    """Frames of the tables of one log, and what does not fit in it."""
    file = escape(name, 200)
    with reading(file, _ADVICE):
        tables, misfit = _find_tables(text)
        try:
            pairs = [_read_table(table, file) for table in tables]
        except ValueError:
            if misfit is None or partial:
                raise
            pairs = []  # the line that does not fit comes first
        _compare_adapters(file, text, tables)
        settings = _list_settings(text)
        _warn_of_settings(file, settings)
        misfit = next(filter(None, [*(wrong for _, wrong in pairs), misfit]), None)
    unequal = next(filter(None, (table.describe_unequal_hosts() for table in tables)), "")
    said = None if misfit is None else str(misfit)
    return _Content([rows for rows, _ in pairs], said, unequal, settings)


def _compare_adapters(file: str, text: str, tables: Sequence[_Table]) -> None:
    """Warn where the network adapters that NCCL lists do not divide among the ranks of a node: one
    may be missing."""
    listed = _ADAPTERS.search(text)
    if listed is None:
        return
    names = listed[1].split()
    for table in tables:
        ranks, nodes = table.count()
        if nodes is None or nodes < 2 or ranks % nodes:
            continue
        local = ranks // nodes
        if len(names) < local and local % len(names):
            warnings.warn(
                escape(
                    f"{file}: NCCL lists {len(names)} network adapters for the {local} ranks of a "
                    f"node; one may be missing: {', '.join(names)}",
                    500,
                ),
                LogWarning,
                stacklevel=4,
            )
            return


def _list_settings(text: str) -> str:
    """Variables of a log that told NCCL how to exchange, such as ``NCCL_ALGO=Ring``; empty where it
    or its network plugin chose."""
    found: dict[str, list[str]] = {}
    text = _COLOURS.sub("", text)
    by_plugin = {(match["name"], match["value"]) for match in _BY_PLUGIN.finditer(text)}
    for match in _SETTINGS.finditer(text):
        value = match["value"].rstrip(".,;:")
        is_zero = not value.strip("0")
        # a way that is left on changes nothing, and NCCL asks 1 or 2 of what it may use anyway
        if (match["off"] and is_zero) or (match["on"] and not is_zero):
            continue
        name = match["off"] or match["on"] or match["forced"]
        if (name, value) in by_plugin:
            continue
        values = found.setdefault(name, [])
        if value not in values:
            values.append(value)
    return ", ".join(
        f"{name}={escape(' and '.join(values), 100)}" for name, values in sorted(found.items())
    )


def _warn_of_settings(file: str, settings: str) -> None:
    """Warn of times of a run that was told how to exchange: other jobs may choose better."""
    if settings:
        warnings.warn(
            f"{file} was recorded with {settings}: its times hold for jobs with it, no others",
            LogWarning,
            stacklevel=4,
        )


def _collect(logs: Sequence["_Log"], partial: bool) -> NcclLogs:
    """Read logs into one frame; of several, those without a table are left out with a warning."""
    check_threads()
    frames: list[pl.DataFrame] = []
    devices: dict[str, tuple[str, ...]] = {}
    unequal: dict[str, str] = {}
    settings: dict[str, str] = {}
    unused: list[str] = []
    for log in logs:
        file = escape(log.name, 200)
        if log.fault is not None:
            unused.append(log.fault)
            continue
        try:
            found, misfit, unequal_hosts, variables = _read_text(log.name, log.text, partial)
        except ValueError as error:
            if len(logs) == 1:
                raise
            unused.append(str(error))
            continue
        kept = sum(map(len, found))
        if misfit and not kept and len(logs) > 1:
            unused.append(f"{file} {misfit}".removesuffix(f"; {_ADVICE}"))
            continue
        if misfit and not partial:
            more = f"; partial=True keeps the {kept} measurements before it" if kept else ""
            raise ValueError(f"{file} {misfit}{more}")
        if misfit:
            warnings.warn(
                f"{file} {misfit}; {kept or 'no'} measurements are kept", LogWarning, stacklevel=3
            )
        frames += found
        devices[file] = _find_devices(log.text)
        if unequal_hosts:
            unequal[file] = unequal_hosts
        if variables:
            settings[file] = variables
    if not sum(map(len, frames)):
        first = f"; {unused[0]}" if unused else ""
        raise ValueError(
            f"no complete row of an nccl-tests table is there{first or f'; {_ADVICE}'}"
        )
    for text in unused:
        warnings.warn(f"{text}; the file is not used", LogWarning, stacklevel=3)
    return NcclLogs(pl.concat(frames), devices, unequal, settings)


def _find_devices(text: str) -> tuple[str, ...]:
    """Names of devices in a log, sorted."""
    return tuple(sorted({name.strip() for name in _GPU.findall(_COLOURS.sub("", text))}))


class _Log(NamedTuple):
    """One log: its name, and its text or why it cannot be read."""

    name: str
    text: str
    fault: str | None = None


def _read_logs(source: str | Path | Sequence[str | Path]) -> list[_Log]:
    """Name and text of each log; a file that is no text is a fault where there are several."""
    paths = check_paths("source", source)
    folder = paths[0] if isinstance(source, str | os.PathLike) and paths[0].is_dir() else None
    if folder:
        paths = _list_folder(folder)
        if not paths:
            raise ValueError(
                f"{show(str(source), 200)} holds no {', '.join(_SUFFIXES)} file and no table of "
                "nccl-tests; name the logs one by one"
            )
    logs = []
    for path in paths:
        if not path.is_file():
            raise ValueError(
                f"{show(str(path), 200)} is no file; name a log, several, or a folder of logs"
            )
        name = path.relative_to(folder).as_posix() if folder else path.name
        try:
            logs.append(_Log(name, _read_file(path)))
        except ValueError as error:
            if len(paths) == 1:
                raise
            logs.append(_Log(name, "", str(error)))
    return logs


#: Most files of a folder of logs, other ones included [-]; looking at them takes some seconds.
_MOST_FILES = 50_000


def _list_folder(folder: Path) -> list[Path]:
    """Files of a folder that are logs by their ending, or that hold the head of a table."""
    inside = list(islice(folder.rglob("*"), _MOST_FILES + 1))
    if len(inside) > _MOST_FILES:
        raise ValueError(
            f"{show(str(folder), 200)} holds more than {_MOST_FILES:,} files; name the folder of the logs alone"
        )
    found = []
    for path in sorted(inside):
        if not path.is_file():
            continue
        if Path(path.name.removesuffix(".gz")).suffix in _SUFFIXES or _holds_table(path):
            found.append(path)
    return found


def _holds_table(path: Path) -> bool:
    """Whether the head of a table of nccl-tests stands near the beginning of a file."""
    try:
        with open(path, "rb") as file:
            head = file.read(_SEARCHED)
    except OSError:
        return False
    return b"algbw" in head and bool(_HEADER.search(head.decode("utf-8", "replace")))


def _read_file(path: Path) -> str:
    """Text of a log: UTF-8, or UTF-16 with its mark, plain or compressed with gzip."""
    with reading(path, "name the output of nccl-tests", most=LARGEST_TEXT, unpacks=True):
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            with gzip.open(path) as file:
                data = file.read(LARGEST_TEXT + 1)
            if len(data) > LARGEST_TEXT:
                limit = format_bytes(LARGEST_TEXT)
                raise ValueError(f"it unpacks to more than {limit}; name a part of it")
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            return data.decode("utf-16", errors="replace")
        cause = explain_content(data[:4096], path.name)
        if cause is not None:
            raise ValueError(cause)
        if len(data) > 9 and not any(data[1:200:2]):  # UTF-16 without its mark
            return data.decode("utf-16-le", errors="replace")
        if len(data) > 9 and not any(data[0:200:2]):
            return data.decode("utf-16-be", errors="replace")
        return data.decode("utf-8-sig", errors="replace")


def read_logs(source: str | Path | Sequence[str | Path], *, partial: bool = False) -> NcclLogs:
    """Read logs as `read_nccl_tests` does, with the devices that each file names."""
    return _collect(_read_logs(source), partial)


def read_nccl_tests(
    source: str | Path | Sequence[str | Path], *, partial: bool = False
) -> pl.DataFrame:
    """Read logs of nccl-tests or rccl-tests.

    Parameters
    ----------
    source : str, Path or sequence of them
        A log, several, or a folder: its .log, .out, .txt, .dat, .nccl and .stdout files are read,
        and others with a table, also in its subfolders. Each may be compressed with gzip.
    partial : bool, optional
        As in `parse_nccl_tests`.

    Returns
    -------
    frame : polars.DataFrame
        Rows of all logs, as `parse_nccl_tests` returns them; `file` is the path within the folder,
        or the name.

    Warns
    -----
    LogWarning
        As `parse_nccl_tests` does; and for each of several files that has no table.
    """
    return read_logs(source, partial=partial).rows


def parse_nccl_tests(text: str, *, file: str = "text", partial: bool = False) -> pl.DataFrame:
    """Read output of nccl-tests or rccl-tests: old and new formats, among other lines, several runs
    in one text.

    Parameters
    ----------
    text : str
        The log.
    file : str, optional
        Name of the log, for the frame and for messages; it names the operation where the log does
        not.
    partial : bool, optional
        Whether to keep, with a warning, the rows before a line that does not fit.

    Returns
    -------
    frame : polars.DataFrame
        One row for each half of a printed row: operation, ranks, nodes (null where unknown), dtype,
        redop, nbytes [B], seconds [s], algbw and busbw [B/s], in_place, file, line. Messages of 0
        bytes are kept; programs that perfkit does not know, such as alltoallv, keep their name.

    Raises
    ------
    ValueError
        For text that is no log or is cut off, with the first line that does not fit; and where the
        operation or the ranks cannot be known.

    Warns
    -----
    LogWarning
        For a log that contradicts itself or is read in part.

    Notes
    -----
    The ranks come from the list of devices, or from busbw / algbw, which is 2 (p - 1) / p for
    all_reduce and (p - 1) / p for others (NVIDIA, nccl-tests, doc/PERFORMANCE.md). Bandwidths are
    computed from size and time, which have more digits than the printed ones.

    Examples
    --------
    >>> frame = parse_nccl_tests("67108864 16777216 float sum -1 584.5 114.81 200.91 0 581.9 115.33 201.82 0")
    >>> frame.select("operation", "ranks", "dtype", "nbytes", "in_place").row(1)
    ('all_reduce', 8, 'fp32', 67108864, True)
    """
    if not isinstance(text, str):
        raise ValueError(
            f"text is {show(text)}; it must be the text of a log, a str; read_nccl_tests takes files"
        )
    return _collect([_Log(file, text)], partial).rows


def list_devices(source: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """List the devices that logs name, as printed, sorted; none where the lists of devices are
    missing."""
    names = {name for log in _read_logs(source) for name in _find_devices(log.text)}
    return tuple(sorted(names))
