"""Lines of nccl-tests output: which are rows of a table, what the table says of itself, and which do not fit."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

__all__ = ["scan_tables"]

_BLOCK = ("time", "algbw", "busbw", "#wrong")
_OLD_NAMES = {"bytes": "size", "N": "count", "op": "redop"}
_CLOSING = "'# Avg bus bandwidth'"
#: Characters of a line that are looked at [-]: a row has up to 250, and some searches take the square of their number.
_LONGEST = 4_000
_TOGETHER = "several programs write here at once; keep their outputs apart, or build nccl-tests with MPI=1"

_START = re.compile(r"(?:nThreads?:?\s*(\d{1,9})\s+)?nGpus\S*\s+(\d{1,9})\s.*minBytes")
_PROGRAM = re.compile(r"Collective test (?:starting|concluded): (?:\S*/)?(\w+?)_perf")
_COMMAND = re.compile(r"\b(\w+?)_perf(?:_mpi)?[\"']?\s+-")
_DEVICE = re.compile(r"Rank\s+(\d{1,9})(?:\s+Group\s+(\d+))?(?:\s+Pid\s+(\d+))?\s+on\s+(\S+)\s+device")
_HEADER = re.compile(r"(?:size|bytes)\s+(?:count|N)\s+type\s.*algbw\s+busbw.*")
_FOOTER = re.compile(r"Out of bounds values|Avg bus bandwidth|Collective test concluded")
#: A row, whatever its launcher has written before it ("3: ", "[1,0]<stdout>:", "pod | ", a date).
_ROW = re.compile(r"(?<![\w.-])\d{1,18}\s+\d+\s+([A-Za-z]\w*)(?!\S)")
_DTYPE = re.compile(r"char|u?int\d*|half|b?float\d*|double|bf16|fp?\d+\w*")
_REDOP = re.compile(r"sum|prod|min|max|avg|mulsum|none")
_VALUE = re.compile(r"N/A|[-+]?(?:nan|inf|\d{1,30}(?:\.\d*)?(?:e[-+]?\d{1,2})?)\*?")
#: The end of a row.
_ENDED = re.compile(r"\d\.\d+\s+\d+\.\d+\s+(?:N/A|[\d.e+*-]+)\s*$")
_CLOCK = re.compile(r"(?<!\s)\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")


class MisfitError(Exception):
    """A line that does not fit: its number, its text and why."""

    def __init__(self, line: int, text: str, reason: str) -> None:
        text = text.strip()
        shown = text if len(text) <= 100 else f"{text[:97]}..."
        super().__init__(f"line {line} does not fit: {shown!r}: {reason}")


class Row(NamedTuple):
    """One half of a printed row: what was measured, and bandwidths with half a unit of their last digit [GB/s]."""

    line: int
    text: str
    nbytes: int
    dtype: str
    redop: str | None
    root: int
    in_place: bool
    seconds: float
    algbw: float
    busbw: float
    algbw_half: float
    busbw_half: float
    wrong: float


@dataclass
class Table:
    """What one run of one program has printed."""

    label: str = ""
    start: tuple[int, str] | None = None
    closed: bool = False
    headed: bool = False
    validated: bool = True
    gpus: int = 0
    devices: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    leading: tuple[str, ...] = ("size", "count", "type", "redop", "root")
    trailing: tuple[str, ...] = _BLOCK + _BLOCK
    unit: float = 1e-6
    dated: bool = False
    rows: list[Row] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether rows may follow."""
        return not self.closed and (self.headed or bool(self.rows))

    @property
    def group(self) -> list[tuple[int, str]]:
        """Ranks of one communicator with their hosts; NCCL_TESTS_SPLIT makes several."""
        first = min((group for group, _ in self.devices), default=0)
        return [(rank, host) for (group, rank), (host, _) in self.devices.items() if group == first]

    @property
    def ranks(self) -> int:
        """Ranks by the list of devices, of which a filter may have left some lines; 0 without a list."""
        ranks = [rank for rank, _ in self.group]
        return len(ranks) if len(ranks) < len(self.devices) else max(ranks, default=-1) + 1

    @property
    def nodes(self) -> int | None:
        """Hosts of a complete list of devices."""
        group = self.group
        return len({host for _, host in group}) if group and len(group) == self.ranks else None

    def read_header(self, header: str) -> bool:
        """Learn the columns, which grew over the years: "bytes N type op", later "size count type redop root"."""
        names = [_OLD_NAMES.get(name, name) for name in header.split() if name != "timestamp"]
        starts = [place for place, name in enumerate(names) if name == "time"]
        if not starts or any(tuple(names[start : start + 3]) != _BLOCK[:3] for start in starts):
            return False
        self.leading, self.trailing = tuple(names[: starts[0]]), tuple(names[starts[0] :])
        self.headed, self.dated = True, "timestamp" in header
        self.unit = 1e-3 if header.startswith("bytes") else 1e-6  # the first version printed ms
        return True

    def read_row(self, line: int, text: str, tokens: Sequence[str]) -> list[Row]:
        """Halves of a printed row; none where the tokens do not make a complete one."""
        names, in_place = self.fit_row(text, tokens)
        lead = len(tokens) - len(names)
        redop, root = None, -1
        for token in tokens[3:lead]:
            if _REDOP.fullmatch(token):
                redop = None if token == "none" else token
            elif token.lstrip("-").isdigit():
                root = int(token)
        rows, starts = [], [place for place, name in enumerate(names) if name == "time"]
        for start, end in pairwise([*starts, len(names)]):
            shown = dict(zip(names[start:end], tokens[lead + start : lead + end], strict=True))
            time, algbw, busbw, wrong = (_number(shown.get(name, "N/A")) for name in _BLOCK)
            digits = _half_digit(shown["algbw"]), _half_digit(shown["busbw"])
            what = line, text, int(tokens[0]), tokens[2], redop, root, in_place or start > 0
            rows.append(Row(*what, self.unit * time, algbw, busbw, *digits, wrong))
        return rows

    def fit_row(self, text: str, tokens: Sequence[str]) -> tuple[tuple[str, ...], bool]:
        """Columns of the figures of a complete row, and whether they are those in place alone; none for another row."""
        second = self.trailing.index("time", 1) if self.trailing.count("time") > 1 else 0
        choices = [(self.trailing, False)]
        if not self.rows and not (self.headed and self.validated):
            choices.append((tuple(name for name in self.trailing if name not in ("#wrong", "error", "res")), False))
        if second and re.search(r"\S\s{25,}\S", text.strip()):  # the first half is left blank
            choices.append((self.trailing[second:], True))
        for names, in_place in choices:
            lead = len(tokens) - len(names)
            if not 3 <= lead <= max(5, len(self.leading)):
                continue
            if self.headed and lead != len(self.leading) - ("redop" in self.leading and not tokens[3].isalpha()):
                continue
            figures = zip(names, tokens[lead:], strict=True)
            if all(_VALUE.fullmatch(token) and (token != "N/A" or name not in _BLOCK[:3]) for name, token in figures):
                if not in_place:
                    self.trailing = names  # all rows are as the first one
                return names, in_place
        return (), False


def _number(token: str) -> float:
    return math.nan if token == "N/A" else float(token.rstrip("*"))


def _half_digit(token: str) -> float:
    """Half a unit of the last digit printed, and a little."""
    mantissa, _, exponent = token.partition("e")
    point = mantissa.find(".")
    return 0.501 * 10.0 ** (int(exponent or 0) - (len(mantissa) - point - 1 if point >= 0 else 0))


class _Scan:
    """Tables found so far."""

    def __init__(self) -> None:
        self.tables = [Table()]
        self.command = ""

    @property
    def table(self) -> Table:
        return self.tables[-1]

    def feed(self, line: int, text: str) -> None:
        """Take one line."""
        if self.table.dated:
            text = _CLOCK.sub("", text)
        found = _ROW.search(text)
        if found and self.take_row(line, text, found):
            return
        if header := _HEADER.search(text):
            self.take_header(line, text, header.group())
        elif device := _DEVICE.search(text):
            self.take_device(line, text, device)
        elif _FOOTER.search(text):
            self.table.closed = True
        elif start := _START.search(text):
            self.begin(line, text)
            self.table.gpus = int(start[1] or 1) * int(start[2])
            self.table.validated = "validation: 0" not in text
        elif command := _COMMAND.search(text):
            self.command = command[1]
        elif self.table.open and _ENDED.search(text):
            raise MisfitError(line, text, "these figures belong to no row")
        if program := _PROGRAM.search(text):
            if "starting" in text:
                self.begin(line, text)
            self.table.label = program[1]

    def begin(self, line: int, text: str) -> None:
        """Start a table, unless the one at hand has only begun."""
        self.check_complete(line, text)
        if self.table.rows or self.table.closed or self.table.headed:
            self.tables.append(Table())
        self.table.start = (line, text)

    def take_header(self, line: int, text: str, header: str) -> None:
        """Learn the columns of the rows that follow."""
        if "cputime" in header:
            raise MisfitError(line, text, "-C 1 prints how long the CPU takes to launch; run the test without -C")
        if self.table.open and not self.table.rows:
            raise MisfitError(line, text, f"two tables begin at once; {_TOGETHER}")
        self.check_complete(line, text)
        if self.table.rows or self.table.closed:
            self.tables.append(Table())
        if not self.table.read_header(header):
            raise MisfitError(line, text, "the header of the table is not complete")

    def take_device(self, line: int, text: str, device: re.Match[str]) -> None:
        """Note where a rank runs."""
        key, (process, host) = (int(device[2] or 0), int(device[1])), (device[3] or "", device[4])
        if self.table.devices.setdefault(key, (host, process)) != (host, process):
            raise MisfitError(line, text, f"rank {key[1]} is listed twice; {_TOGETHER}")

    def take_row(self, line: int, text: str, found: re.Match[str]) -> bool:
        """Take a row; False for what only looks like one."""
        whole = text[found.start() :]
        rows = self.table.read_row(line, whole, whole.split())
        if not rows:
            if _DTYPE.fullmatch(found[1]) or not text[: found.start()].strip():
                raise MisfitError(line, text, "the row is not complete")
            return False
        if self.table.closed:
            self.tables.append(Table())
        if not self.table.rows:
            self.table.label, self.command = self.table.label or self.command, ""
        self.table.rows += rows
        return True

    def check_complete(self, line: int, text: str) -> None:
        """Refuse to leave a table that its program has not closed."""
        if self.table.start and not self.table.closed and self.table.rows:
            reason = f"before it, {_CLOSING} should close the table of line {self.table.start[0]}"
            raise MisfitError(line, text, reason)

    def finish(self, line: int, text: str) -> None:
        """Judge what the last line leaves open."""
        if self.table.start and not self.table.closed:
            reason = f"the log breaks off before {_CLOSING} closes the table of line {self.table.start[0]}"
            raise MisfitError(line, text, reason)


def scan_tables(lines: Iterable[str]) -> tuple[list[Table], MisfitError | None]:
    """Find the tables in the lines of a log.

    Parameters
    ----------
    lines : iterable of str
        The log.

    Returns
    -------
    tables : list of Table
        Those that have rows; of the last one perhaps not all.
    misfit : MisfitError or None
        The first line that does not fit; nothing after it was read.
    """
    scan, written = _Scan(), [(number, line[:_LONGEST]) for number, line in enumerate(lines, 1) if line.strip()]
    misfit = None
    try:
        for number, line in written:
            scan.feed(number, line)
        if written:
            scan.finish(*written[-1])
    except MisfitError as error:
        misfit = error
    tables = [table for table in scan.tables if table.rows]
    if misfit is None and not tables and written:
        misfit = MisfitError(
            *written[0], "no row of an nccl-tests table follows; pass the text that all_reduce_perf or its like print"
        )
    return tables, misfit
