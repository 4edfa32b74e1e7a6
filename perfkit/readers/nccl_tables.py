"""Tables that nccl-tests and rccl-tests print, old and new, found among other lines of a text.

`find_tables` reads line by line: `_feed` says what each kind of line means. A `Table` holds what one
run of one program printed; what its figures mean is told in `perfkit.readers.nccl`.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perfkit.ground.units import show
from perfkit.models.collectives import OPERATIONS
from perfkit.readers.collective_rows import MisfitError
from perfkit.readers.log_text import COLOURS
from perfkit.readers.torn_rows import DEVICE, ROW, VALUE, mend_rows

#: perfkit's name of an operation by that of its program, such as alltoall_perf.
NAMES = {name.replace("_", ""): name for name in OPERATIONS}
ADVICE = "pass the text that all_reduce_perf or its like print"
#: Columns before the figures of a row, and those of each half, where no header names them.
_LEADING = ("size", "count", "type", "redop", "root")
_BLOCK = ("time", "algbw", "busbw", "#wrong")
_CLOSING = "'# Avg bus bandwidth'"
#: Names of columns whose values are figures; any other column may hold text.
_FIGURES = {"time", "algbw", "busbw", "#wrong", "error"}
#: Characters of a line that are read [-]: a row has up to 250, and the time of some searches grows
#: with their square.
_LONGEST = 4_000
_TOGETHER = (
    "several programs write here at once; use one file for each, or build nccl-tests with MPI=1"
)
_OLD = (
    "it is the layout of nccl-tests before 2019 (columns bytes, N, type, op, time, res), which is "
    "not read; run a newer nccl-tests"
)

#: What a line of a log in JSON says, as Docker and others write it.
_MESSAGE = re.compile(r'"(?:log|message|msg|line|output)"\s*:\s*"((?:[^"\\]|\\.)*)"')
START = re.compile(r"(?:nThreads?:?\s*(\d{1,9})\s+)?nGpus\S*\s+(\d{1,9})\s.*minBytes")
_PROGRAM = re.compile(r"Collective test starting: (?:\S*/)?(\w+?)_perf")
COMMAND = re.compile(r"\b(\w+?)_perf(?:_mpi)?[\"']?\s+-")
HEADER = re.compile(r"size\s+count\s+type\s.*algbw\s+busbw.*")
_IN_PLACE_ALONE = re.compile(r"#\s{1,200}in-place\s*$")
_FOOTER = re.compile(r"Out of bounds values|Avg bus bandwidth|Collective test concluded")
_FAILED = re.compile(r"Out of bounds values\s*:\s*\d+\s+FAILED")
#: Names of columns of nccl-tests before 2019, whose times are in milliseconds.
_ANCIENT = re.compile(r"bytes\s+N\s+type\s.*algbw\s+busbw\s+res\b")
_USAGE = re.compile(r"^\W*USAGE\s*:?.*_perf\b", re.IGNORECASE)
#: Lines that say why a run ended, and lines that may.
_FAILURES = (
    re.compile(
        r"(?:NCCL|RCCL|CUDA|Cuda|HIP|hip) (?:failure|error)|Test failure|unhandled \w+ error"
        r"|Segmentation fault|Bus error|out of memory|command not found|cannot open shared object"
        r"|Invalid number of GPUs|not enough slots|Permission denied|cannot execute binary file"
        r"|Host key verification failed|Connection (?:refused|timed out)"
        r"|No such file or directory|DUE TO TIME LIMIT|CANCELLED|Killed|Aborted"
        r"|Test timeout|MPI_ABORT|mpirun was unable|slurmstepd: error"
        r"|srun: error|exited on signal|non-zero (?:exit code|status)"
    ),
    re.compile(r"NCCL WARN"),
)
_DTYPE = re.compile(r"char|u?int\d*|half|b?float\d*|double|bf16|fp?\d+\w*")
_ENDED = re.compile(
    r"\d\.\d+\s+\d+\.\d+\s+(?:N/A|[\d.e+*-]+)(?:\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)?\s*$"
)


class Device(NamedTuple):
    """One line of the list of devices."""

    group: str  # of NCCL_TESTS_SPLIT
    host: str
    number: int | None  # of the GPU in its host, None where the line is cut off [-]
    bus: str | None  # PCI address as printed: 0000:1b:00, 0x1b
    name: str | None  # NVIDIA H100 80GB HBM3
    line: int


class Failure(NamedTuple):
    """A line that says why a run ended."""

    line: int
    text: str


class FailedLaunch(NamedTuple):
    """A command that printed no table, and a line that says why."""

    line: int
    failure: Failure


class Communicator(NamedTuple):
    """Ranks that took part, and their nodes."""

    ranks: int  # 0 where the log lists none [-]
    nodes: int | None  # None where lines of the list of devices are missing [-]


class Half(NamedTuple):
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


class PrintedChoice(NamedTuple):
    """How a size was exchanged, as rccl-tests print it with -M 1."""

    line: int
    nbytes: float  # [B]
    algorithm: str
    protocol: str
    channels: int  # [-]


@dataclass
class Table:
    """Output of one run of one program."""

    label: str = ""
    command: str = ""
    command_line: int = 0  # of the last command, 0 for none
    begin: int = 1  # first line that tells of this run
    start: int = 0
    place: str = "line"  # what the numbers of its halves count: lines, or results of a report
    closed: bool = False
    end: int = 0  # line that closes it, 0 for none
    failure: Failure | None = None  # after the last row, or after the last command
    launches: list[FailedLaunch] = field(default_factory=list)  # before it, or after its end
    died: bool = False  # after some rows, or before the first one
    headed: bool = False
    gpus: int = 1
    is_in_place: bool = False  # the only half is in place, as rccl-tests print it with -O 0
    failed: bool = False  # the closing line says that results were wrong
    devices: dict[int, Device] = field(default_factory=dict)
    leading: tuple[str, ...] = _LEADING
    trailing: tuple[str, ...] = _BLOCK + _BLOCK
    halves: list[Half] = field(default_factory=list)
    choices: list[PrintedChoice] = field(default_factory=list)
    unread: tuple[str, ...] = ()  # words after the first row that has any that no column names
    stray: list[int] = field(default_factory=list)  # lines of rows after the closing line

    @property
    def wrong_lines(self) -> tuple[int, ...]:
        """Lines of rows whose results hold wrong values."""
        return tuple(half.line for half in self.halves if half.wrong > 0)

    def list_hosts(self) -> list[str]:
        """Host of each listed rank; of the first group where NCCL_TESTS_SPLIT made several."""
        first = min((device.group for device in self.devices.values()), default="")
        return [device.host for device in self.devices.values() if device.group == first]

    def count(self) -> Communicator:
        """Ranks and nodes of a communicator from the list of devices."""
        hosts = self.list_hosts()
        ranks = len(hosts)
        if ranks == len(self.devices):  # one group: lines of it may be missing
            ranks = max(self.devices, default=-1) + 1
        is_whole = bool(hosts) and len(hosts) == ranks
        return Communicator(ranks, len(set(hosts)) if is_whole else None)

    def describe_unequal_hosts(self) -> str:
        """Say that hosts hold unequal numbers of ranks; empty where they do not."""
        by_host = Counter(self.list_hosts())
        if len(set(by_host.values())) < 2:
            return ""
        ranks = self.count().ranks
        listed = by_host.total()
        if listed < ranks:
            return (
                f"its list of devices lacks {ranks - listed} of {ranks} ranks: how many a node "
                "holds is unknown"
            )
        hosts = by_host.most_common()
        most, many = hosts[0]
        least, few = hosts[-1]
        return (
            f"host {most} holds {many} ranks and host {least} {few}: its times are not those of "
            "whole nodes"
        )

    def describe_death(self, *, partial: bool) -> str:
        """Say that the run died, why, and whether its rows are kept."""
        which = f"the run of line {self.start or self.begin}"
        why = "" if self.failure is None else f": {_quote(self.failure)}"
        if not self.halves:
            return f"{which} printed no row{why}"
        rows = len({half.line for half in self.halves})
        kept = "its rows are kept" if partial else "its rows are left out, partial=True keeps them"
        return f"{which} died after {rows} row{'s' if rows > 1 else ''}{why}; {kept}"

    def read_header(self, header: str) -> bool:
        """Read the names of the columns, and return whether the first three of a block are the
        usual ones."""
        names = header.replace("timestamp", "date clock").split()
        first = names.index("time") if "time" in names else len(names)
        self.leading = tuple(names[:first])
        self.trailing = tuple(names[first:])
        self.headed = True
        return names[first : first + 3] == list(_BLOCK[:3])

    def take_row(self, line: int, text: str) -> bool:
        """Add both halves of a printed row; False if the row is not complete."""
        words, extra = self._split_words(text.split())
        cut = max(len(words) - len(self.trailing), 0)
        leading = words[:cut]
        figures = list(zip(self.trailing, words[cut:], strict=False))
        if not self._is_complete(leading, figures):
            return False
        halves = []
        starts = [place for place, name in enumerate(self.trailing) if name == "time"]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            in_place = start > 0 or self.is_in_place
            half = _read_half(line, text, leading, dict(figures[start:end]), in_place=in_place)
            if half is None:
                return False
            halves.append(half)
        self.halves += halves
        if "nchannels" in self.trailing:
            self._take_choice(line, halves, dict(figures))
        if not self.unread:
            self.unread = tuple(extra)
        return True

    def _take_choice(self, line: int, halves: Sequence[Half], figures: dict[str, str]) -> None:
        """Keep the algorithm of a row, where its columns name it and it is known."""
        channels = figures.get("nchannels", "")
        if halves and channels.isdecimal() and len(channels) < 9:
            algorithm = figures.get("algo", "N/A")
            protocol = figures.get("proto", "N/A")
            choice = PrintedChoice(line, halves[0].nbytes, algorithm, protocol, int(channels))
            self.choices.append(choice)

    def _is_complete(self, leading: Sequence[str], figures: Sequence[tuple[str, str]]) -> bool:
        """Whether a row has as many values as its columns, and numbers where figures must be."""
        # old all_to_all leaves the column of the reduction empty
        is_word = len(leading) > 3 and leading[3].isalpha()
        lacks_reduction = "redop" in self.leading and not is_word
        if len(leading) not in self._count_leading(lacks_reduction):
            return False
        return all(VALUE.fullmatch(text) for name, text in figures if name in _FIGURES)

    def _count_leading(self, lacks_reduction: bool) -> tuple[int, ...]:
        """How many values may stand before the figures of a row."""
        if self.headed:
            return (len(self.leading) - int(lacks_reduction),)
        return (3, 4) if lacks_reduction else (5,)

    def _split_words(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Split off words after the figures of a row that no column names, such as the
        algorithm."""
        usual = len(self.leading) + len(self.trailing)
        row = words[:usual]
        extra = words[usual:]
        begins_with_word = bool(extra) and bool(re.fullmatch(r"[A-Za-z][\w+-]*", extra[0]))
        if begins_with_word and not any(_DTYPE.fullmatch(word) for word in extra):
            return row, extra
        return words, []

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


def _read_half(
    line: int, text: str, leading: Sequence[str], figures: dict[str, str], *, in_place: bool
) -> Half | None:
    """One half of a row from its printed figures; None where one is not a number."""
    time = float(_find_figure(figures, "time"))
    algbw_text = _find_figure(figures, "algbw")
    busbw_text = _find_figure(figures, "busbw")
    algbw, busbw = float(algbw_text), float(busbw_text)
    if not (math.isfinite(time) and math.isfinite(algbw) and math.isfinite(busbw)):
        return None
    reduction, root = None, None
    for word in leading[3:]:
        if reduction is None and word.isalpha() and word != "none":
            reduction = word
        elif root is None and word.lstrip("-").isdigit():
            root = int(word)
    return Half(
        line,
        text,
        dtype=leading[2],
        redop=reduction,
        root=-1 if root is None else root,
        in_place=in_place,
        nbytes=float(leading[0]),
        seconds=1e-6 * time,
        algbw=algbw,
        busbw=busbw,
        algbw_half=_find_half_digit(algbw_text),
        busbw_half=_find_half_digit(busbw_text),
        wrong=float(_find_figure(figures, "#wrong")),
    )


def _find_figure(figures: dict[str, str], name: str) -> str:
    """Text of a printed figure; NaN for a missing one, and for ``N/A``."""
    return figures.get(name, "N/A").rstrip("*").replace("N/A", "nan")


def _find_half_digit(figure: str) -> float:
    """Half of the last printed digit, and a bit more for rounding."""
    digits, _, power = figure.partition("e")
    _, _, decimals = digits.partition(".")
    return 0.501 * 10.0 ** (int(power or 0) - len(decimals))


def _feed(tables: list[Table], line: int, text: str) -> None:
    """Read one line, which belongs to the last table or begins another one."""
    table = tables[-1]
    row = ROW.search(text)
    if row is not None and _feed_row(table, line, text, row):
        return
    header = HEADER.search(text)
    if header is not None:
        if not _begin(tables, line, text, header=True).read_header(header.group()):
            reason = "the table has other columns"
            if "cputime" in text:
                reason = "its times are those of the host alone (cputime)"
            raise MisfitError(line, text, f"{reason}; run the test without -C")
        return
    if _ANCIENT.search(text):
        raise MisfitError(line, text, _OLD)
    device = DEVICE.search(text)
    if device is not None:
        if table.closed:  # of the next run
            table = _append_table(tables, line)
        table.devices.setdefault(int(device["rank"]), _read_device(device, line))
        return
    if _FOOTER.search(text):
        table.closed = True
        table.end = line
        table.failed = table.failed or bool(_FAILED.search(text))
        return
    start = START.search(text)
    if start is not None:
        threads = int(start[1] or 1)
        _begin(tables, line, text).gpus = max(threads * int(start[2]), 1)
        return
    program = _PROGRAM.search(text)
    if program is not None:
        _begin(tables, line, text).label = program[1]
        return
    command = COMMAND.search(text)
    if command is not None:
        if table.failure is not None and table.start and not table.closed:
            table.died = True
            table = _append_table(tables, line)
        _note_failed_launch(table)
        table.command = command[1]
        table.command_line = line
        return
    if _IN_PLACE_ALONE.search(text):
        table.is_in_place = True
        return
    is_open = not table.closed and (table.headed or bool(table.halves))
    if is_open and _ENDED.search(text):
        raise MisfitError(line, text, "these figures belong to no row")
    tells_of_run = not table.closed or table.command_line > table.end
    is_asked = tells_of_run and table.failure is None and "NCCL INFO" not in text
    if is_asked and _FAILURES[0].search(text):
        table.failure = Failure(line, text)


def _note_failed_launch(table: Table) -> None:
    """Keep the last command as one that printed no table, if a failure follows it and no run does."""
    has_run = not table.closed and bool(table.start or table.devices or table.halves)
    if table.failure is not None and table.command_line and not has_run:
        table.launches.append(FailedLaunch(table.command_line, table.failure))
        table.failure = None


def _feed_row(table: Table, line: int, text: str, row: re.Match[str]) -> bool:
    """Read a line in which a row may begin; False where it may be another kind of line."""
    is_typed = _DTYPE.fullmatch(row[1]) is not None
    if table.closed and table.halves:
        if is_typed:
            table.stray.append(line)
        return True
    is_first = not table.halves
    if table.take_row(line, text[row.start() :]):
        table.failure = None
        if is_first:
            table.label = table.label or table.command
            table.command = ""
        return True
    begins_line = not text[: row.start()].strip()
    if is_typed or begins_line:
        raise MisfitError(line, text, table.explain_row(text[row.start() :].split()))
    return False


def _begin(tables: list[Table], line: int, text: str, *, header: bool = False) -> Table:
    """Return the table that starts here: the last one if it is still empty, otherwise a new one."""
    table = tables[-1]
    has_begun = table.headed if header else bool(table.halves)
    if has_begun and not table.closed and table.failure is not None:
        table.died = True
    elif has_begun and not table.closed:
        raise MisfitError(line, text, f"{_CLOSING} should close the table before it; {_TOGETHER}")
    failed_before = bool(table.devices or table.headed) and not header
    table.died = table.died or (failed_before and not table.halves)
    if table.halves or table.closed or failed_before:
        table = _append_table(tables, line)
    if not header:
        table.start = line
    return table


def _append_table(tables: list[Table], line: int) -> Table:
    """Append the table of a run that begins here, or at a command after the rows of the last one."""
    last = tables[-1]
    rows = [half.line for half in last.halves[-1:]]
    devices = [device.line for device in last.devices.values()]
    has_new_command = last.command_line > max([last.begin, last.start, *rows, *devices])
    begin = last.command_line if has_new_command else line
    tables.append(Table(command=last.command, begin=begin))
    return tables[-1]


def _read_device(device: re.Match[str], line: int) -> Device:
    """A line of the list of devices."""
    number = None if device["number"] is None else int(device["number"])
    name = None if device["name"] is None else device["name"].strip()
    return Device(device["group"] or "0", device["host"], number, device["bus"], name, line)


class Findings(NamedTuple):
    """What a text holds."""

    lines: list[tuple[int, str]]  # number and text of those that hold something
    runs: list[Table]  # also those without a row
    misfit: MisfitError | None  # the first line that does not fit; no table after it is read

    def list_tables(self, *, partial: bool) -> list[Table]:
        """Tables of the runs with rows; of those that died only where `partial` asks for them."""
        return [run for run in self.runs if run.halves and (partial or not run.died)]

    def describe_deaths(self, *, partial: bool) -> list[str]:
        """Say which runs died, in the order of the log, and whether their rows are kept."""
        texts = []
        for run in self.runs:
            for launch in run.launches:
                texts.append(
                    f"the command of line {launch.line} printed no table: {_quote(launch.failure)}"
                )
            if run.died:
                texts.append(run.describe_death(partial=partial))
        return texts


def find_tables(text: str) -> Findings:
    """Find the tables of a text, and the first line that does not fit."""
    lines = mend_rows(list_lines(text))
    tables = [Table()]
    misfit = None
    try:
        for line, content in lines:
            _feed(tables, line, content)
        _check_end(tables, lines)
    except MisfitError as error:
        misfit = error
    for table in tables:  # a program that perfkit does not know keeps its name
        table.label = NAMES.get(table.label.replace("_", ""), table.label)
    return Findings(lines, tables, misfit)


def _quote(failure: Failure) -> str:
    """A line that says why a run ended."""
    return f"line {failure.line} says {show(failure.text.strip(), 160)}"


def list_lines(text: str) -> list[tuple[int, str]]:
    """Lines of a log that hold something, with their numbers from 1; those that a collector of logs
    wraps in JSON as they were printed.

    Parameters
    ----------
    text : str
        The log.

    Returns
    -------
    lines : list of (int, str)
        Number and text of each.

    Examples
    --------
    >>> list_lines('{"log": "# Using devices\\\\n", "stream": "stdout"}')
    [(1, '# Using devices')]
    """
    plain = COLOURS.sub("", text)
    if "\n" not in plain:  # line ends of old Macs
        plain = plain.replace("\r", "\n")
    lines = []
    for number, line in enumerate(plain.split("\n"), 1):
        if "\\n" in line or line.startswith('{"'):
            lines += [(number, part[:_LONGEST]) for part in _unwrap(line) if part.strip()]
        elif line.strip():
            lines.append((number, line[:_LONGEST]))
    return lines


def _unwrap(line: str) -> list[str]:
    """Lines that a collector of logs writes as one, in JSON or with their ends spelled out."""
    messages = _MESSAGE.findall(line) if line.startswith('{"') else []
    if messages:
        line = max(messages, key=len)
    elif not any(mark in line for mark in ("algbw", "NCCL", "nThread")):
        return [line]
    return [part.rstrip("\r").replace("\\t", "\t") for part in line.split("\\n")]


def _check_end(tables: Sequence[Table], lines: Sequence[tuple[int, str]]) -> None:
    """Refuse a text that ends inside of a table, or that has none."""
    last = tables[-1]
    _note_failed_launch(last)
    has_whole_table = any(table.halves and table.closed for table in tables)
    if last.start and not last.closed and last.failure is not None and has_whole_table:
        last.died = True
    elif last.start and not last.closed:
        reason = f"the log ends before {_CLOSING} closes the table of line {last.start}"
        raise MisfitError(*lines[-1], reason + _quote_failure(lines, last.start))
    if lines and not any(table.halves for table in tables):
        raise MisfitError(*lines[0], _explain_absence(lines))


def _quote_failure(lines: Sequence[tuple[int, str]], after: int = 0) -> str:
    """What the log itself says about a failure, after a line; empty if it says nothing."""
    for pattern in _FAILURES:
        for line, text in lines:
            if line > after and "NCCL INFO" not in text and pattern.search(text):
                if line == lines[-1][0]:  # the message shows it
                    return ""
                return f"; line {line} says {show(text.strip(), 160)}"
    return ""


def _explain_absence(lines: Sequence[tuple[int, str]]) -> str:
    """Why a text has no row of a table."""
    failure = _quote_failure(lines)
    if any(_USAGE.search(text) for _, text in lines[:50]):
        return "it is the help of the program; run the test and keep what it prints"
    if any(START.search(text) or HEADER.search(text) for _, text in lines):
        return f"the run printed no row{failure or '; run it again'}"
    if failure:
        return f"no row of an nccl-tests table follows{failure}"
    if re.match(r"\s*(?:\{\s*\"|\[\s*\{\s*\"|[{[]\s*$)", lines[0][1]):
        return f"no row of an nccl-tests table follows, it looks like JSON; {ADVICE}"
    return f"no row of an nccl-tests table follows; {ADVICE}"
