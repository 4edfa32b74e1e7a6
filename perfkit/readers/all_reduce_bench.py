"""Tables of `all_reduce_bench.py` of stas00/ml-engineering, and lines of its older version for one size.

Source of what is printed: stas00/ml-engineering, network/benchmarks/all_reduce_bench.py (CC-BY-SA-4.0;
the form alone is taken). The payload is the whole buffer of a rank, as in nccl-tests, KB to GB of the
table are powers of 1024 like KiB to GiB, GB of the older line is 10^9 bytes. It prints rates, no times:
a time is the payload over the rate, and rows whose rate has too few digits are left out.
"""

import re
from typing import NamedTuple

from perfkit.ground.units import escape
from perfkit.readers.collective_rows import (
    NAME_RANKS,
    NO_LAUNCH,
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
)
from perfkit.readers.rank_bounds import LEAST_HALVES

#: Head of its table, and the line of its older version.
HEAD = re.compile(
    r"\| payload \|\s+busbw\s+\|\s+algbw\s+\||bandwidth of all_reduce with a [\d.]+GB"
)
_TABLE = re.compile(r"\| payload \|\s+busbw\s+\|\s+algbw\s+\|")
_OPERATION = re.compile(
    r"average bandwidth(?: and the per-call latency)? of (\w+) over (\d{1,6}) ranks"
)
_OLDER = re.compile(
    r"bandwidth of all_reduce with a (\d{1,9}(?:\.\d+)?)GB payload \(.*?(\d{1,6}) ranks\)"
)
_ALGBW = re.compile(r"\balgbw: (\d{1,9}\.\d{3}) GBps")
_DEVICE = re.compile(r"_(?P<kind>Cuda|Hip|Xpu)DeviceProperties\(name='(?P<name>[^']{1,80})'")
_ROW = re.compile(
    r"\|\s*(\d{1,9}(?:\.\d+)?)([KMGT]?)i?B \|\s*(\d{1,9}\.\d\d)GBps \|\s*(\d{1,9}\.\d\d)GBps \|"
)
_ROW_START = re.compile(r"\|\s*\d[\d.]*[KMGT]?i?B \|")
_SCALES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: Half of the last printed digit of a rate in a table [GB/s].
_HALF = 0.00501


class _Printed(NamedTuple):
    """A row of the table, before its ranks are known."""

    line: int
    text: str
    nbytes: int  # [B]
    rates: PrintedRates  # [GB/s]


class _PrintedTable(NamedTuple):
    """A table, and what stands above it."""

    ranks: int | None  # of its title [-]
    launch: Launch
    rows: list[_Printed]


def read_all_reduce_bench(text: str, file: str) -> Measurements:
    """Read what `all_reduce_bench.py` printed.

    Parameters
    ----------
    text : str
        Its output.
    file : str
        Name of the log, for messages.

    Returns
    -------
    found : Measurements
        Rows of all_reduce, and the first line that does not fit.
    """
    found = Measurements()
    launch = NO_LAUNCH
    operation = "all_reduce"
    ranks: int | None = None
    payload: float | None = None  # of the older version [B]
    table = _PrintedTable(None, NO_LAUNCH, [])
    try:
        for line, content in number_lines(text):
            launch = read_launch(content) or launch
            device = _DEVICE.search(content)
            if device is not None:
                found.devices = tuple(sorted({*found.devices, escape(device["name"])}))
                if device["kind"] == "Xpu":
                    found.unlike = "its operations are those of oneCCL or MPI, not of NCCL"
            named = _OPERATION.search(content)
            older = _OLDER.search(content)
            rate = _ALGBW.search(content)
            if named is not None:
                operation, ranks = named[1], int(named[2])
            elif older is not None:
                payload, ranks = 1e9 * float(older[1]), int(older[2])
            elif rate is not None and payload is not None and ranks is not None:
                nbytes = read_size(line, content, payload)
                seconds = read_seconds(line, content, nbytes, 1e-9 / max(float(rate[1]), 1e-12))
                found.rows.append(_make_row(line, content, nbytes, seconds, ranks, launch))
                payload = None
            elif _TABLE.search(content):
                finished = table
                table = _PrintedTable(ranks, launch, [])
                _add_table(found, finished)
            elif _ROW_START.search(content) and operation == "all_reduce":
                table.rows.append(_read_row(line, content))
    except MisfitError as error:
        found.misfit = error
    try:
        _add_table(found, table)
    except MisfitError as error:
        found.misfit = found.misfit or error
    return found


def _read_row(line: int, text: str) -> _Printed:
    """One row of the table."""
    row = _ROW.search(text)
    if row is None:
        raise MisfitError(line, text, "the row is not complete")
    nbytes = read_size(line, text, float(row[1]) * _SCALES[row[2]])
    return _Printed(line, text, nbytes, PrintedRates(float(row[4]), float(row[3]), _HALF))


def _add_table(found: Measurements, table: _PrintedTable) -> None:
    """Add the rows of a table with their ranks, from its title, the command or the rates."""
    if not table.rows:
        return
    ranks = table.ranks
    if ranks is None:
        ranks = table.launch.ranks
    if ranks is None:
        ranks = find_ranks("all_reduce", [row.rates for row in table.rows])
    if ranks is None:
        raise MisfitError(table.rows[0].line, table.rows[0].text, NAME_RANKS)
    coarse = 0
    for row in table.rows:
        if row.rates.algbw < LEAST_HALVES * row.rates.half:
            coarse += 1
            continue
        seconds = read_seconds(row.line, row.text, row.nbytes, 1e-9 / row.rates.algbw)
        found.rows.append(_make_row(row.line, row.text, row.nbytes, seconds, ranks, table.launch))
    if coarse:
        found.notes.append(
            f"{coarse} rows are left out: their rates, in 0.01 GB/s, have too few digits for a time"
        )


def _make_row(
    line: int, text: str, nbytes: int, seconds: float, ranks: int, launch: Launch
) -> CollectiveRow:
    """A row of the frame: the benchmark exchanges fp32 in place."""
    return CollectiveRow(
        line,
        "all_reduce",
        check_ranks(line, text, ranks),
        launch.find_nodes(ranks),
        "fp32",
        "sum",
        nbytes,
        seconds,
        in_place=True,
    )
