"""Tables of oneCCL's benchmark (`examples/benchmark`), as text and as CSV.

Source of what is printed: oneapi-src/oneCCL, examples/benchmark/include/benchmark.hpp and
src/*/*_strategy.hpp (Apache-2.0). ``#bytes`` are the elements that a rank passes to the call: for
allgather and allgatherv its own part, for alltoall the part for one other rank, so both are counted
times the ranks here; for reduce_scatter all of its input. The time is the mean over ranks, as
nccl-tests report it by default.
"""

import csv
import re
from typing import NamedTuple

from perfkit.ground.number_formats import spell_dtype
from perfkit.readers.collective_rows import (
    NO_LAUNCH,
    CollectiveRow,
    Launch,
    Measurements,
    MisfitError,
    check_ranks,
    number_lines,
    read_launch,
    read_seconds,
    read_size,
    spell_operation,
    spell_redop,
)

#: Head of its tables, and of its CSV files.
HEAD = re.compile(r"#bytes\s+#repetitions\s+t_min\[usec\]\s+t_max\[usec\]\s+t_avg\[usec\]\s+stddev")
CSV_HEAD = re.compile(r"#ranks,collective,reduction,d?type")
#: Operations whose message is counted times the ranks.
_BY_PART = {"all_gather", "all_to_all"}
_ABOUT = re.compile(
    r"(?P<name>Benchmarking|#processes|buf_count|backend|inplace|dtype|datatype|reduction)"
    r"[ \t]{0,20}:(?P<value>[^\r\n]*)"
)
_UNLIKE = "its operations are those of oneCCL, not of NCCL"
_FIGURE = r"\d{1,18}(?:\.\d+)?"
_ROW = re.compile(
    rf"(\d{{1,18}})\s+\d{{1,9}}\s+{_FIGURE}\s+{_FIGURE}\s+({_FIGURE})\s+(?:{_FIGURE}|-?nan|inf)(?:\s+{_FIGURE})?\s*$"
)
_START = re.compile(r"(?:^|[:>|]\s*|\s)(\d{1,18}\s+\d{1,9}\s+\d[\d.]*(?:\s.*)?)$")


class _Benchmark(NamedTuple):
    """What the lines above a table say of it."""

    operation: str
    ranks: int
    dtype: str
    redop: str | None
    in_place: bool


def read_oneccl(text: str, file: str) -> Measurements:
    """Read the tables of oneCCL's benchmark.

    Parameters
    ----------
    text : str
        What it printed.
    file : str
        Name of the log, for messages.

    Returns
    -------
    found : Measurements
        Its rows, and the first line that does not fit.
    """
    found = Measurements(unlike=_UNLIKE)
    on_hosts = False
    options: dict[str, str] = {}  # as printed
    benchmark: _Benchmark | None = None
    launch = NO_LAUNCH
    try:
        for line, content in number_lines(text):
            launch = read_launch(content) or launch
            statement = _ABOUT.search(content)
            if statement is not None:
                name = statement["name"].replace("datatype", "dtype")
                options[name] = statement["value"].strip()
                benchmark = None  # the next table has a head of its own
            elif HEAD.search(content):
                benchmark = _read_head(line, content, options)
                on_hosts = on_hosts or options.get("backend") == "host"
            elif benchmark is not None and _START.search(content):
                found.rows.append(_read_row(line, content, benchmark, launch))
    except MisfitError as error:
        found.misfit = error
    if on_hosts:
        found.notes.append("its backend is host: no GPU took part; run it with --backend sycl")
    return found


def _read_head(line: int, text: str, options: dict[str, str]) -> _Benchmark:
    """What a table is of; refuses one of several operations at a time."""
    named = options.get("Benchmarking", "").replace(",", " ").split()
    if len(named) != 1:
        what = f"the table is of {' and '.join(named)} together" if named else "no line names its"
        reason = f"{what} operation; run one at a time, such as --coll allreduce"
        raise MisfitError(line, text, reason)
    operation = spell_operation(_drop_v(named[0]))
    if operation is None:
        reason = f"perfkit knows no operation {named[0]}; run it without --coll {named[0]}"
        raise MisfitError(line, text, reason)
    if options.get("buf_count", "1") != "1":
        reason = "its times are of several operations at once; run it with --buf_count 1"
        raise MisfitError(line, text, reason)
    ranks = options.get("#processes", "")
    if not ranks.isdecimal() or len(ranks) > 9:
        raise MisfitError(line, text, "the line '# #processes:' above it is missing")
    reduction = options.get("reduction", "sum").split(",")[0]
    return _Benchmark(
        operation,
        check_ranks(line, text, int(ranks)),
        spell_dtype(options.get("dtype", "float32")),
        spell_redop(operation, reduction),
        options.get("inplace") == "1",
    )


def _drop_v(name: str) -> str:
    """The benchmark passes equal counts to allgatherv, the only all_gather of its older versions."""
    return "allgather" if name == "allgatherv" else name


def _read_row(line: int, text: str, benchmark: _Benchmark, launch: Launch) -> CollectiveRow:
    """One printed row."""
    start = _START.search(text)
    row = _ROW.match(start[1]) if start else None
    if row is None:
        raise MisfitError(line, text, "the row is not complete")
    times = benchmark.ranks if benchmark.operation in _BY_PART else 1
    return CollectiveRow(
        line,
        benchmark.operation,
        benchmark.ranks,
        launch.find_nodes(benchmark.ranks),
        benchmark.dtype,
        benchmark.redop,
        read_size(line, text, row[1], times=times),
        read_seconds(line, text, row[2], 1e-6),
        in_place=benchmark.in_place,
    )


def read_oneccl_csv(text: str, file: str) -> Measurements:
    """Read the file that oneCCL's benchmark writes with ``--csv_filepath``.

    Parameters
    ----------
    text : str
        The file.
    file : str
        Its name, for messages.

    Returns
    -------
    found : Measurements
        Its rows, and the first line that does not fit.
    """
    found = Measurements(unlike=_UNLIKE)
    columns: list[str] = []
    try:
        for line, content in number_lines(text):
            values = [value.strip() for value in next(csv.reader([content]))]
            if CSV_HEAD.search(content):
                columns = [value.replace("typesize", "dtype_size") for value in values]
                if "t_avg[usec]" not in columns:
                    raise MisfitError(
                        line, content, "no column t_avg[usec], as oneCCL before 2021 write it"
                    )
                continue
            if columns and content.lstrip()[:1].isdecimal():
                found.rows.append(_read_csv_row(line, content, columns, values))
    except MisfitError as error:
        found.misfit = error
    return found


def _read_csv_row(line: int, text: str, columns: list[str], values: list[str]) -> CollectiveRow:
    """One row of a CSV file."""
    if len(values) != len(columns):
        raise MisfitError(
            line, text, f"the row has {len(values)} values, the header names {len(columns)} columns"
        )
    figures = dict(zip(columns, values, strict=True))
    operation = spell_operation(_drop_v(figures["collective"]))
    if operation is None:
        raise MisfitError(line, text, f"perfkit knows no operation {figures['collective']}")
    for name in ("#ranks", "dtype_size", "#elements/buffer", "#buffers"):
        if not figures.get(name, "").isdecimal() or len(figures[name]) > 18:
            raise MisfitError(line, text, f"{name} is no whole number")
    if figures["#buffers"] != "1":
        raise MisfitError(
            line, text, "its times are of several operations at once; run it with --buf_count 1"
        )
    if not re.fullmatch(_FIGURE, figures["t_avg[usec]"]):
        raise MisfitError(line, text, "t_avg[usec] is no number")
    ranks = check_ranks(line, text, int(figures["#ranks"]))
    nbytes = int(figures["#elements/buffer"]) * int(figures["dtype_size"])
    return CollectiveRow(
        line,
        operation,
        ranks,
        None,
        spell_dtype(figures.get("dtype") or figures.get("type") or "float32"),
        figures["reduction"] or None,
        read_size(line, text, nbytes, times=ranks if operation in _BY_PART else 1),
        read_seconds(line, text, figures["t_avg[usec]"], 1e-6),
    )
