"""Tables of collectives of the OSU micro-benchmarks (`osu_allreduce` and others).

Source of what is printed: OSU micro-benchmarks 5.9 and 7, c/mpi/collective/blocking/*.c and
c/util/osu_util.c (BSD), also those over NCCL (c/xccl). ``Size`` is what a rank passes to the call: all
of it for allreduce, bcast, reduce and reduce_scatter, the part for or of one rank for allgather,
alltoall, gather and scatter, which are counted times the ranks here. The time is the mean over ranks.
No table names the ranks: they are read from the command above it.
"""

import re

from perfkit.ground.number_formats import spell_dtype
from perfkit.readers.collective_rows import (
    NAME_RANKS,
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

#: Title of a table.
HEAD = re.compile(r"# OSU (?P<library>[^\s#]{1,40}) (?P<name>[^\n#]{1,60}?)(?: Latency)? Test v\d")
_DTYPE = re.compile(r"# Datatype: (\w+)")
_COLUMNS = re.compile(r"# Size\s+(?P<first>Avg Latency\(us\))?")
_ROW = re.compile(r"(?:^|[\s:>|])(\d{1,18})\s+(\d{1,12}\.\d{1,6})(?:\s+\d[\d.]*){0,8}\s*$")
_ROW_START = re.compile(r"(?:^|[:>|]\s*)(\d{1,18})\s+\d")
#: Operations whose size is that of one part.
_BY_PART = {"all_gather", "all_to_all", "gather", "scatter"}


def read_osu(text: str, file: str) -> Measurements:
    """Read the tables of the OSU micro-benchmarks.

    Parameters
    ----------
    text : str
        What they printed.
    file : str
        Name of the log, for messages.

    Returns
    -------
    found : Measurements
        Their rows, and the first line that does not fit.
    """
    found = Measurements()
    launch = NO_LAUNCH
    operation: str | None = None
    dtype = "int8"
    on_hosts = False
    try:
        for line, content in number_lines(text):
            launch = read_launch(content) or launch
            head = HEAD.search(content)
            named = _DTYPE.search(content)
            columns = _COLUMNS.search(content)
            if head is not None:
                operation, dtype = _read_title(line, content, head), "int8"
                if head["library"].startswith("MPI"):
                    found.unlike = "its operations are those of MPI, not of NCCL"
                on_hosts = on_hosts or head["library"] == "MPI"
            elif named is not None:
                dtype = spell_dtype(named[1])
            elif columns is not None and columns["first"] is None:
                raise MisfitError(
                    line, content, "the columns are not those of a blocking collective"
                )
            elif operation is not None and _ROW_START.search(content):
                found.rows.append(_read_row(line, content, operation, dtype, launch))
    except MisfitError as error:
        found.misfit = error
    if on_hosts:
        found.notes.append(
            "its title says MPI alone: the buffers were in host memory, and no GPU took part; run it "
            "with -d cuda or -d rocm"
        )
    return found


def _read_title(line: int, text: str, head: re.Match[str]) -> str:
    """The operation of a title."""
    operation = spell_operation(head["name"])
    if operation is None:
        raise MisfitError(
            line,
            text,
            f"{head['name']} is no collective that perfkit reads; it reads those of osu_allreduce, "
            "osu_allgather, osu_reduce_scatter, osu_alltoall, osu_bcast, osu_reduce, osu_gather and "
            "osu_scatter",
        )
    return operation


def _read_row(line: int, text: str, operation: str, dtype: str, launch: Launch) -> CollectiveRow:
    """One printed row."""
    row = _ROW.search(text)
    if row is None:
        raise MisfitError(line, text, "the row is not complete")
    if launch.ranks is None:
        raise MisfitError(line, text, NAME_RANKS)
    ranks = check_ranks(line, text, launch.ranks)
    times = ranks if operation in _BY_PART else 1
    return CollectiveRow(
        line,
        operation,
        ranks,
        launch.find_nodes(ranks),
        dtype,
        spell_redop(operation),
        read_size(line, text, row[1], times=times),
        read_seconds(line, text, row[2], 1e-6),
    )
