"""What DeepSpeed prints of communication: the summary of its communication logger, which times the
operations of a training run, and the tables of its benchmarks (`ds_bench`, `benchmarks/communication`).

Source of what is printed: deepspeedai/DeepSpeed, deepspeed/utils/comms_logging.py, and
DeepSpeedExamples, benchmarks/communication/utils.py (Apache-2.0). Both count the input of a rank, so
an all_gather is counted times the ranks here. Their throughput of an all_reduce counts each byte
twice, and both rates are in Gbps unless ``--bw-unit`` says GBps: times and sizes are read, and rates
only tell the number of ranks. KB to TB are powers of 1024.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perfkit.models.collectives import bus_factor
from perfkit.readers.collective_rows import (
    NAME_RANKS,
    NO_LAUNCH,
    UNKNOWN_DTYPE,
    CollectiveRow,
    Launch,
    Measurements,
    MisfitError,
    PrintedRates,
    check_ranks,
    find_ranks,
    number_lines,
    read_launch,
    read_seconds,
    read_size,
    spell_operation,
    spell_redop,
)

#: Heads of the two tables of a summary, and of a table of a benchmark.
SUMMARY_HEAD = re.compile(r"Comm\. Op\s+Message Size\s+Count\s+Total Latency\(ms\)")
_STRAGGLER_HEAD = re.compile(r"Comm\. Op\s+Message Size\s+Count\s+Total comm lat\(ms\)")
BENCHMARK_HEAD = re.compile(r"---- Performance of (\w+) on (\d{1,6}) devices? -{5,}")
#: One operation, as the logger prints it with ``verbose``.
VERBOSE = re.compile(r"comm op: [^|]+\| time \(ms\): [\d.]+ \| msg size: ")
_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_FIGURE = r"(\d{1,15}(?:\.\d+)?)"
_SIZE = rf"{_FIGURE} ?([KMGT]?B)"
_ROW = re.compile(
    rf"(?:^|[\s:>|]){_SIZE}\s+(\d{{1,12}})\s+{_FIGURE}\s+{_FIGURE}\s+{_FIGURE}\s+{_FIGURE}\s*$"
)
_ROW_START = re.compile(r"(?:^|[\s:>|])\d[\d.]* ?[KMGT]?B\s+\d{1,12}\s+\d")
_NAME = re.compile(
    r"(?:^|[:>][ \t]{0,20})([A-Za-z]\w{0,80})(?:[ \t]{0,20}\|[ \t]{0,20}\[Caller Func: [^\]]*\])?[ \t\r]{0,80}$"
)
_CASE = re.compile(
    rf"(?:^|[\s:>|])(?:{_SIZE}|(\d{{1,18}}))\s+(\d{{1,15}})x(\d{{1,2}})\s+{_FIGURE}(?: (us|ms))?\s+{_FIGURE}\s+{_FIGURE}\s*$"
)
_CASE_START = re.compile(r"\s\d{1,15}x\d{1,2}\s")
_CASE_UNITS = re.compile(r"Duration( \(us\))?\s+Throughput \((Gbps|GBps)\)")
#: Operations that its ranks do not do alike, so that a row is no collective of nccl-tests.
_LEFT_OUT = {"send", "recv", "isend", "irecv", "pt2pt", "barrier", "gather", "scatter"}
_ALIASES = {"inference_all_reduce": "all_reduce", "all_reduce_coalesced": "all_reduce"}
#: Operations whose busbw / throughput is (p - 1) / p; that of a broadcast was so in old versions.
_TELLING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
#: Half of the last printed digit of a time in a summary [ms].
_HALF = 0.005
#: Largest error of a time by its printed digits that is read [-]. Choice: times below 0.05 ms, which
#: have a larger one, are start-ups, and an error evenly within ± 0.1 has a standard deviation of
#: 0.1 / √3 = 0.06, small beside the 0.71 with which start-ups are expected (docs/formulas.md, table 12.1).
_COARSE = 0.1


class _Entry(NamedTuple):
    """One row of a summary."""

    line: int
    text: str
    nbytes: float  # as counted by DeepSpeed [B]
    calls: int
    total: float  # [ms]
    mean: float  # without the outermost tenths [ms]
    rates: PrintedRates | None  # None in the second table


@dataclass
class _Summary:
    """One summary: entries of both tables by name of the operation, and what stands above it."""

    launch: Launch
    entries: dict[str, list[_Entry]] = field(default_factory=dict)
    apart: dict[str, list[_Entry]] = field(default_factory=dict)  # without waiting for others


def read_summary(text: str, file: str) -> Measurements:
    """Read the summary of DeepSpeed's communication logger.

    Parameters
    ----------
    text : str
        A log of training with ``deepspeed.comm.log_summary()``.
    file : str
        Its name, for messages.

    Returns
    -------
    found : Measurements
        Rows of the last summary, whose counts hold those before it. Where it has the table of
        stragglers, times are those of the transfer alone.
    """
    found = Measurements()
    summaries: list[_Summary] = []
    launch = NO_LAUNCH
    rows: dict[str, list[_Entry]] | None = None
    name = ""
    try:
        for line, content in number_lines(text):
            launch = read_launch(content) or launch
            if SUMMARY_HEAD.search(content):
                summaries.append(_Summary(launch))
                rows, name = summaries[-1].entries, ""
            elif _STRAGGLER_HEAD.search(content) and summaries:
                rows, name = summaries[-1].apart, ""
            elif rows is not None and _ROW_START.search(content):
                rows.setdefault(name, []).append(_read_entry(line, content, rows, summaries[-1]))
            elif rows is not None:
                named = _NAME.search(content)
                name = named[1] if named else name
    except MisfitError as error:
        found.misfit = error
    if summaries:
        _add_summary(found, summaries[-1])
    return found


def _read_entry(line: int, text: str, rows: dict[str, list[_Entry]], summary: _Summary) -> _Entry:
    """One printed row of a summary."""
    row = _ROW.search(text)
    if row is None:
        raise MisfitError(line, text, "the row is not complete")
    nbytes = float(row[1]) * _UNITS[row[2]]
    calls = int(row[3])
    if rows is summary.apart:  # totals and means of the transfer, then of the waiting
        return _Entry(line, text, nbytes, calls, float(row[4]), float(row[6]), None)
    rates = PrintedRates(float(row[6]), float(row[7]), 0.00501)
    return _Entry(line, text, nbytes, calls, float(row[4]), float(row[5]), rates)


def _add_summary(found: Measurements, summary: _Summary) -> None:
    """Add the rows of a summary."""
    has_waits = not summary.apart
    found.unlike = (
        "its times are of training and hold how long ranks waited for each other"
        if has_waits
        else "its times are of training, and the ranks of each operation are not known"
    )
    rates = [
        entry.rates
        for name, entries in summary.entries.items()
        for entry in entries
        if entry.rates is not None and _spell(name) in _TELLING
    ]
    # its rates are those of as many ranks as the job has, whatever the group
    ranks = find_ranks("all_gather", rates)
    if ranks is None:
        ranks = summary.launch.ranks
    left_out: list[str] = []
    coarse = 0
    for name, entries in (summary.apart or summary.entries).items():
        operation = _spell(name)
        if operation is None:
            left_out.append(name or "rows without a name")
            continue
        for entry in entries:
            if entry.nbytes == 0 or entry.calls == 0:
                continue
            if entry.mean < _HALF / _COARSE and not _agrees(entry):
                coarse += 1
                continue
            if ranks is None:
                found.misfit = found.misfit or MisfitError(entry.line, entry.text, NAME_RANKS)
                return
            try:
                found.rows.append(_make_row(entry, operation, ranks, summary.launch))
            except MisfitError as error:
                found.misfit = found.misfit or error
                return
    _add_notes(found, left_out, coarse, ranks)
    if found.rows and has_waits:
        found.notes.append(
            "its times are of training: they hold how long ranks waited for each other; "
            "log_summary(show_straggler=True) tells them apart"
        )


def _agrees(entry: _Entry) -> bool:
    """Whether total and count give the printed mean, so that they give it with more digits."""
    return abs(entry.total / entry.calls - entry.mean) <= 1.01 * _HALF and entry.total > 0.05


def _spell(name: str) -> str | None:
    """Operation of a name of the logger; None for those that are left out."""
    if name in _LEFT_OUT:
        return None
    return spell_operation(_ALIASES.get(name, name))


def _make_row(entry: _Entry, operation: str, ranks: int, launch: Launch) -> CollectiveRow:
    """A row of a summary in the convention of nccl-tests."""
    ranks = check_ranks(entry.line, entry.text, ranks)
    mean = entry.total / entry.calls if _agrees(entry) else entry.mean
    times = ranks if operation == "all_gather" else 1
    return CollectiveRow(
        entry.line,
        operation,
        ranks,
        launch.find_nodes(ranks),
        UNKNOWN_DTYPE,
        spell_redop(operation),
        read_size(entry.line, entry.text, entry.nbytes, times=times),
        read_seconds(entry.line, entry.text, mean, 1e-3),
    )


def _add_notes(
    found: Measurements, left_out: Sequence[str], coarse: int, ranks: int | None
) -> None:
    """Say what a summary leaves open."""
    if left_out:
        found.notes.append(f"operations that are not read: {', '.join(sorted(left_out))}")
    if coarse:
        found.notes.append(
            f"{coarse} rows are left out: their times, in 0.01 ms, have too few digits"
        )
    if found.rows:
        found.notes.append(
            f"DeepSpeed counts with all {ranks} ranks of the job; rows of smaller groups are not "
            "theirs"
        )


def read_benchmark(text: str, file: str) -> Measurements:
    """Read the tables of DeepSpeed's communication benchmarks.

    Parameters
    ----------
    text : str
        What they printed.
    file : str
        Name of the log, for messages.

    Returns
    -------
    found : Measurements
        Their rows, and the first line that does not fit. Those of pt2pt, between two ranks alone, are
        left out.
    """
    found = Measurements()
    launch = NO_LAUNCH
    name = ""
    ranks = 0
    in_gigabits = True
    left_out: list[str] = []
    try:
        for line, content in number_lines(text):
            launch = read_launch(content) or launch
            head = BENCHMARK_HEAD.search(content)
            units = _CASE_UNITS.search(content)
            if head is not None:
                name, ranks = head[1], int(head[2])
            elif units is not None:
                in_gigabits = units[2] == "Gbps"
            elif name and _CASE_START.search(content):
                operation = _spell(name)
                if operation is None:
                    left_out.append(name)
                    continue
                case = _Case(line, content, operation, ranks, in_gigabits)
                found.rows.append(_read_case(case, launch))
    except MisfitError as error:
        found.misfit = error
    if left_out:
        found.notes.append(
            f"{len(left_out)} rows of {', '.join(sorted(set(left_out)))} are not read: they are no "
            "collectives of nccl-tests"
        )
    return found


class _Case(NamedTuple):
    """One line of a table of a benchmark, and what stands above it."""

    line: int
    text: str
    operation: str
    ranks: int
    in_gigabits: bool  # rates are in Gbps, not in GBps


def _read_case(case: _Case, launch: Launch) -> CollectiveRow:
    """One row of a table of a benchmark."""
    row = _CASE.search(case.text)
    if row is None:
        raise MisfitError(case.line, case.text, "the row is not complete")
    ranks = check_ranks(case.line, case.text, case.ranks)
    unit = 1e-3 if row[7] == "ms" else 1e-6
    times = ranks if case.operation == "all_gather" else 1
    nbytes = read_size(case.line, case.text, int(row[4]) * int(row[5]), times=times)
    seconds = read_seconds(case.line, case.text, row[6], unit)
    printed = float(row[9]) / (8 if case.in_gigabits else 1)
    busbw = float(bus_factor(case.operation, ranks)) * nbytes / seconds / 1e9
    rounding = 0.0006 + busbw * 0.0006 * unit / seconds
    if abs(printed - busbw) > 0.01 * busbw + rounding:
        raise MisfitError(case.line, case.text, "its bus bandwidth is not that of size and time")
    return CollectiveRow(
        case.line,
        case.operation,
        ranks,
        launch.find_nodes(ranks),
        UNKNOWN_DTYPE,
        spell_redop(case.operation),
        nbytes,
        seconds,
    )
