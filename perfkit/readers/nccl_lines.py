"""Lines of nccl-tests output: which are rows of a table, what the table says of itself, and which do not fit."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

__all__ = ["scan_tables"]

_Half: TypeAlias = tuple[bool, int, int, int, int | None]
_Layout: TypeAlias = tuple[int, list[_Half]]

_BLOCK = ("time", "algbw", "busbw", "#wrong")
_OLD_NAMES = {"bytes": "size", "N": "count", "op": "redop"}
_CLOSING = "'# Avg bus bandwidth'"
_TOGETHER = "several programs write here at once; keep their outputs apart, or build nccl-tests with MPI=1"

_START = re.compile(r"(?:nThreads?:?\s*(\d+)\s+)?nGpus\S*\s+(\d+)\s.*minBytes")
_PROGRAM = re.compile(r"Collective test (?:starting|concluded): (?:\S*/)?(\w+?)_perf")
_COMMAND = re.compile(r"(\w+?)_perf(?:_mpi)?[\"']?\s+-")
_DEVICE = re.compile(r"Rank\s+(\d+)(?:\s+Group\s+(\d+))?(?:\s+Pid\s+(\d+))?\s+on\s+(\S+)\s+device")
_HEADER = re.compile(r"(?:size|bytes)\s+(?:count|N)\s+type\s.*algbw\s+busbw.*")
_FOOTER = re.compile(r"Out of bounds values|Avg bus bandwidth|Collective test concluded")
_ROW = re.compile(r"(?<![\w.-])\d{1,18}\s+\d+\s+([A-Za-z]\w*)(?!\S)")
_DTYPE = re.compile(r"char|u?int\d*|half|b?float\d*|double|bf16|fp?\d+\w*")
_REDOP = re.compile(r"sum|prod|min|max|avg|mulsum|none")
_VALUE = re.compile(r"N/A|[-+]?(?:nan|inf|\d+(?:\.\d*)?(?:e[-+]?\d+)?)\*?")
_GLUED = re.compile(rf"N/A|-?\d+(?:\.\d+)?(?:e[-+]\d\d)?|{_REDOP.pattern}")
#: A row that other output cuts right after its type, and the end of a row.
_BEGUN = re.compile(
    r"(?<![\w.-])(\d+)\s+(\d+)\s+(bfloat16|f8e[45]m[23]|fp8_e[45]m[23]|u?int(?:8|32|64)|half|float|double|char|int)(?=\S)"
)
_ENDED = re.compile(r"\d\.\d+\s+\d+\.\d+\s+(?:N/A|[\d.e+*-]+)\s*$")
_CUT = re.compile(r"\d+(\s+\d+(\s+\w+)?)?\s*")
_CLOCK = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
#: What launchers write before a line: "3: ", "[1,0]<stdout>:", "(worker, rank=3) ", "pod | ", a date.
_LAUNCHER = re.compile(r"\s*(?:(?:\d+:|\[[^]]*\](?:<\w+>)?:?|\([^)]*\)|\S+\s*\||\d{4}-\d\d-\d\d[T ]\S+)\s*)*")


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
    known: dict[int, list[_Layout]] = field(default_factory=dict)

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
        self.known.clear()
        return True

    def add_rows(self, rows: list[Row]) -> None:
        """Keep a row; the first one settles the layout."""
        if rows and not self.rows:
            self.known.clear()
        self.rows += rows

    def read_row(self, line: int, text: str, tokens: Sequence[str]) -> list[Row]:
        """Halves of a printed row; none where the tokens do not make a complete one."""
        fitting = self.fit_row(text, tokens)
        if fitting is None:
            return []
        lead, halves, values = fitting
        redop, root = None, -1
        for token in tokens[3:lead]:
            if _REDOP.fullmatch(token):
                redop = None if token == "none" else token
            elif token.lstrip("-").isdigit():
                root = int(token)
        head, rows = (line, text, int(tokens[0]), tokens[2], redop, root), []
        for in_place, time, algbw, busbw, wrong in halves:
            digits = _half_digit(tokens[lead + algbw]), _half_digit(tokens[lead + busbw])
            figures = self.unit * values[time], values[algbw], values[busbw], *digits
            rows.append(Row(*head, in_place, *figures, values[wrong] if wrong is not None else math.nan))
        return rows

    def fit_row(self, text: str, tokens: Sequence[str]) -> tuple[int, list[_Half], list[float]] | None:
        """Figures of a complete row: how many tokens lead to them, their halves and their values."""
        for lead, halves in self.layouts(len(tokens)):
            if self.headed and lead != len(self.leading) - ("redop" in self.leading and not tokens[3].isalpha()):
                continue
            try:
                values = [_number(token) for token in tokens[lead:]]
            except ValueError:
                continue
            if any(tokens[lead + place] == "N/A" for half in halves for place in half[1:4]):
                continue
            if len(halves) == self.trailing.count("time"):
                if not self.rows and len(values) < len(self.trailing):  # all rows are as the first one
                    self.trailing = _without_check(self.trailing)
                return lead, halves, values
            if re.search(r"\S\s{25,}\S", text.strip()):  # the first half is left blank
                return lead, halves, values
        return None

    def layouts(self, width: int) -> list[_Layout]:
        """Where figures may stand in a row of so many tokens: after how many others, and which in each half."""
        if width not in self.known:
            second = self.trailing.index("time", 1) if self.trailing.count("time") > 1 else 0
            choices = [(False, self.trailing), (True, self.trailing[second:])][: 2 if second else 1]
            if not self.rows and not (self.headed and self.validated):
                choices.insert(1, (False, _without_check(self.trailing)))
            found = [(width - len(names), _place_halves(names, lone)) for lone, names in choices]
            self.known[width] = [choice for choice in found if 3 <= choice[0] <= max(5, len(self.leading))]
        return self.known[width]


def _without_check(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in ("#wrong", "error", "res"))


def _place_halves(names: Sequence[str], lone: bool) -> list[_Half]:
    """For each half of a row whether it is in place, and where time, algbw, busbw and #wrong are."""
    starts = [*(i for i, name in enumerate(names) if name == "time"), len(names)]
    halves: list[_Half] = []
    for start, end in pairwise(starts):
        at = {name: start + i for i, name in enumerate(names[start:end])}
        halves.append((lone or start > 0, at["time"], at["algbw"], at["busbw"], at.get("#wrong")))
    return halves


def _number(token: str) -> float:
    return math.nan if token == "N/A" else float(token.rstrip("*"))


def _half_digit(token: str) -> float:
    """Half a unit of the last digit printed, and a little."""
    mantissa, _, exponent = token.partition("e")
    point = mantissa.find(".")
    return 0.501 * 10.0 ** (int(exponent or 0) - (len(mantissa) - point - 1 if point >= 0 else 0))


def _cut_noise(tokens: Sequence[str]) -> list[str]:
    """Tokens of a row up to where other output runs into it."""
    kept = list(tokens[:3])
    for token in tokens[3:]:
        if not (_VALUE.fullmatch(token) or _REDOP.fullmatch(token)):
            glued = _GLUED.match(token)
            return [*kept, glued.group()] if glued else kept
        kept.append(token)
    return kept


def _skip_launcher(text: str) -> int:
    """Where a line begins that its launcher has marked."""
    found = _LAUNCHER.match(text)
    return found.end() if found else 0


class _Scan:
    """Tables found so far, and a row that other output has cut in two."""

    def __init__(self) -> None:
        self.tables = [Table()]
        self.command = ""
        self.pending: tuple[int, str, list[str]] | None = None

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
            self.check_pending()
            self.table.closed = True
        elif start := _START.search(text):
            self.begin(line, text)
            self.table.gpus = int(start[1] or 1) * int(start[2])
            self.table.validated = "validation: 0" not in text
        elif command := _COMMAND.search(text):
            self.command = command[1]
        elif begun := _BEGUN.search(text):
            self.check_pending()
            self.pending = line, text, list(begun.groups())
        elif self.table.open or self.pending:
            self.take_rest(line, text)
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
        """Take a row, or the beginning of one that other output has cut; False for what only looks like one."""
        table, whole = self.table, text[found.start() :]
        tokens = whole.split()
        rows = table.read_row(line, whole, tokens)
        if not rows:
            if not (_DTYPE.fullmatch(found[1]) or _skip_launcher(text) == found.start()):
                return False
            if _ROW.search(text, found.end()):
                raise MisfitError(line, text, f"two rows run into each other; {_TOGETHER}")
            tokens = _cut_noise(tokens)
            rows = table.read_row(line, whole, tokens)
        self.check_pending()
        if table.closed:
            self.tables.append(Table())
        if not self.table.rows:
            self.table.label, self.command = self.table.label or self.command, ""
        self.table.add_rows(rows)
        self.pending = None if rows else (line, text, tokens)
        return True

    def take_rest(self, line: int, text: str) -> None:
        """Take the rest of a row that other output has cut in two; no figures may be lost."""
        tokens = text[_skip_launcher(text) :].split()
        rest = len(tokens) > (self.pending is None) and all(
            _VALUE.fullmatch(token) or _REDOP.fullmatch(token) for token in tokens
        )
        if self.pending is None or not rest:
            if rest or _ENDED.search(text):
                raise MisfitError(line, text, "these figures belong to no row")
            return
        first, start, begun = self.pending
        rows = self.table.read_row(first, start, [*begun, *tokens])
        self.table.add_rows(rows)
        self.pending = None if rows else (first, start, [*begun, *tokens])

    def check_pending(self) -> None:
        """Refuse to go on while a row is incomplete."""
        if self.pending is not None:
            raise MisfitError(*self.pending[:2], "the row is not complete")

    def check_complete(self, line: int, text: str) -> None:
        """Refuse to leave a table that its program has not closed."""
        self.check_pending()
        if self.table.start and not self.table.closed and self.table.rows:
            reason = f"before it, {_CLOSING} should close the table of line {self.table.start[0]}"
            raise MisfitError(line, text, reason)

    def finish(self, line: int, text: str) -> None:
        """Judge what the last line leaves open."""
        self.check_pending()
        if self.table.open and _CUT.fullmatch(text, _skip_launcher(text)):
            raise MisfitError(line, text, "the row is not complete")
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
    scan, written = _Scan(), [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
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
