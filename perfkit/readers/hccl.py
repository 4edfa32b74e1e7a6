"""Tables of HCCL Test, the benchmark of Ascend's HCCL.

Source of what is printed: hicann/oam-tools, src/hccl_test (Huawei, Apache-2.0):
common/src/hccl_opbase_rootinfo_base.cc prints the table, opbase_test/*.cc count the sizes. The size is
that of nccl-tests: `hccl_allgather_rootinfo_test.cc` divides it among the ranks. Neither operation nor
ranks stand in the table; both are read from the command above it, the operation else from the name of
the file.
"""

import re
from typing import NamedTuple

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

#: Head of its tables; the program writes aveg_time, its guide avg_time.
HEAD = re.compile(r"data_size\(Bytes\):\s*\|\s*ave?g_time\(us\):\s*\|\s*alg_bandwidth\(GB/s\):")
#: Operations of its programs, the longer of two names first where one is a part of the other.
_TESTS = (
    "allreduce",
    "reducescatter",
    "allgather",
    "alltoall",
    "broadcast",
    "scatter",
    "reduce",
)
_PROGRAM = re.compile(r"\b(\w+)_test\b(?=[\"']?\s+-)(.*)")
_OPTION = r"\s(?:-{short}|--{long})[ =]+(\S+)"
_DTYPE = re.compile(_OPTION.format(short="d", long="datatype"))
_REDUCTION = re.compile(_OPTION.format(short="o", long="op"))
_LOCAL = re.compile(_OPTION.format(short="p", long="npus"))
_START = re.compile(r"(?<![\w.,|-])\d+\s*\|\s*\d")
_ROW = re.compile(
    r"(?<![\w.,|-])(\d{1,18})\s*\|\s*(\d{1,15}(?:\.\d+)?)\s*\|\s*(\d{1,9}(?:\.\d+)?)\s*\|\s*(success|failed|NULL)\b"
)


class _Test(NamedTuple):
    """The program of a table, and its options."""

    operation: str
    dtype: str
    redop: str
    local: int | None  # devices of a node [-]


def read_hccl(text: str, file: str) -> Measurements:
    """Read the tables of HCCL Test.

    Parameters
    ----------
    text : str
        What it printed.
    file : str
        Name of the log: it names the operation where no command does.

    Returns
    -------
    found : Measurements
        Its rows, and the first line that does not fit.
    """
    found = Measurements(unlike="its operations are those of HCCL, not of NCCL")
    launch = NO_LAUNCH
    test = _name_test(file)
    failed: list[int] = []
    is_open = False
    try:
        for line, content in number_lines(text):
            started = read_launch(content)
            program = _PROGRAM.search(content)
            if started is not None:
                launch = started
            if program is not None:
                test = _read_test(program) or test
            if HEAD.search(content):
                is_open = True
            if "rank_id" in content or not is_open or not _START.search(content):
                continue  # a rank whose results were wrong says so, too
            row = _ROW.search(content)
            if row is None:
                raise MisfitError(line, content, "the row is not complete")
            if row[4] == "failed":
                failed.append(line)
            found.rows.append(_make_row(line, content, row, test, launch))
    except MisfitError as error:
        found.misfit = error
    if failed:
        found.notes.append(
            f"{len(failed)} results hold wrong values (the first in line {failed[0]}); do not trust them"
        )
    return found


def _name_test(file: str) -> _Test | None:
    """The operation in the name of a file, with the options that HCCL Test takes by itself; None
    where it names none or several."""
    letters = re.sub(r"[^a-z]", "", file.rsplit("/", 1)[-1].lower())
    named = []
    for name in _TESTS:
        if name in letters:
            named.append(name)
            letters = letters.replace(name, " ")  # reduce is a part of longer names
    operation = spell_operation(named[0]) if len(named) == 1 else None
    return None if operation is None else _Test(operation, "fp32", "sum", None)


def _read_test(program: re.Match[str]) -> _Test | None:
    """Operation and options of a command; None for another program."""
    operation = spell_operation(program[1])
    if operation is None:
        return None
    dtype = _DTYPE.search(program[2])
    redop = _REDUCTION.search(program[2])
    local = _LOCAL.search(program[2])
    return _Test(
        operation,
        spell_dtype(dtype[1]) if dtype else "fp32",
        redop[1] if redop else "sum",
        int(local[1]) if local and local[1].isdecimal() and len(local[1]) < 5 else None,
    )


def _make_row(
    line: int, text: str, row: re.Match[str], test: _Test | None, launch: Launch
) -> CollectiveRow:
    """One printed row with what its command says."""
    if test is None:
        raise MisfitError(
            line,
            text,
            "no command names the operation; put its name, and no other one, into the name of the "
            "file, such as all_reduce.log",
        )
    if launch.ranks is None:
        raise MisfitError(line, text, NAME_RANKS)
    ranks = check_ranks(line, text, launch.ranks)
    nodes = launch.find_nodes(ranks)
    if nodes is None and test.local and ranks % test.local == 0:
        nodes = ranks // test.local
    nbytes = read_size(line, text, row[1])
    seconds = read_seconds(line, text, row[2], 1e-6)
    _check_rate(line, text, nbytes, seconds, float(row[3]))
    return CollectiveRow(
        line,
        test.operation,
        ranks,
        nodes,
        test.dtype,
        spell_redop(test.operation, test.redop),
        nbytes,
        seconds,
    )


def _check_rate(line: int, text: str, nbytes: int, seconds: float, algbw: float) -> None:
    """Refuse a row whose bandwidth is not its size over its time, within the printed digits; the size
    that is exchanged is rounded up to whole numbers for each rank."""
    rate = nbytes / seconds / 1e9
    rounding = 0.00001 + rate * 0.006e-6 / seconds
    if nbytes >= 2**20 and abs(rate - algbw) > 0.01 * rate + rounding:
        raise MisfitError(line, text, "alg_bandwidth is not size / time")
