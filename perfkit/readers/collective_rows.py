"""Rows of measured collectives, as the readers of all benchmarks return them, and what these readers
share: names of operations and number formats, the command that started a run, and ranks from figures.

Sizes are those of nccl-tests, the full buffer of a rank (NVIDIA, nccl-tests, doc/PERFORMANCE.md): an
all_gather counts what a rank has at the end, a reduce_scatter and an all_to_all what it has at the
start. Each reader says what its program counts, and with which source.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from perfkit.ground.units import escape, show
from perfkit.models.collectives import COLLECTIVES, OPERATIONS, bus_factor
from perfkit.readers.rank_bounds import bound_factors, bound_ranks

#: Columns of a frame of collectives, see `perfkit.readers.nccl.parse_nccl_tests`.
COLUMNS: dict[str, Any] = {
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
#: Number format of rows whose log does not name it.
UNKNOWN_DTYPE = "unknown"
#: What to do where a log names no ranks.
NAME_RANKS = (
    "the log names no ranks; write the command that started the run above its table, such as "
    "'mpirun -n 16 -ppn 8 PROGRAM', with the number of ranks"
)
#: Characters of a line that are read [-].
_LONGEST = 2_000
#: Largest number of ranks, and size of a message [B], that are read.
_MOST_RANKS = 10**6
_MOST_BYTES = 2**62
#: Longest time of one operation [s].
_MOST_SECONDS = 1e6
#: perfkit's name of an operation by that of other programs, without marks between words and in small
#: letters.
_OPERATIONS = {name.replace("_", ""): name for name in OPERATIONS} | {
    "allgatherintotensor": "all_gather",
    "allgatherbase": "all_gather",
    "reducescattertensor": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "alltoallsingle": "all_to_all",
    "alltoallpersonalizedexchange": "all_to_all",
    "bcast": "broadcast",
}
_LAUNCHER = re.compile(
    r"\b(mpirun|mpirun_rsh|mpiexec|prun|srun|torchrun|torch\.distributed\.(?:run|launch)|deepspeed"
    r"|accelerate launch)\b(.*)"
)
#: Launchers of PyTorch start one node where they name none.
_OF_ONE_NODE = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed")
_RANKS = re.compile(r"\s(?:--?np|-n|--ntasks|--n|--num_processes)[ =]+(\d{1,6})\b")
_PER_NODE = re.compile(
    r"\s(?:-ppn|--?npernode|--ntasks-per-node|--nproc[-_]per[-_]node|--num_gpus|--map-by ppr:)[ =]*(\d{1,5})\b"
)
_NODES = re.compile(r"\s(?:--nodes|--nnodes|--num_nodes|--num_machines)[ =]+(\d{1,5})\b")
#: ``-N`` is the number of nodes for srun, and the ranks of a node for mpirun of Open MPI.
_CAPITAL_N = re.compile(r"\s-N[ =]*(\d{1,5})\b")


class MisfitError(Exception):
    """A line that does not fit, and the reason."""

    def __init__(self, line: int, text: str, reason: str, *, place: str = "line") -> None:
        where = f"{place} {line} does not fit: {show(text.strip(), 100)}"
        super().__init__(f"{where}: {escape(reason, 400)}")


class Launch(NamedTuple):
    """How a command started a run."""

    ranks: int | None  # None where the command does not say it [-]
    nodes: int | None  # None where the command does not say it [-]

    def find_nodes(self, ranks: int) -> int | None:
        """Nodes of a table of so many ranks; None where the command started others [-]."""
        if self.nodes is None or self.ranks not in (None, ranks) or ranks % self.nodes:
            return None
        return self.nodes


class Program(NamedTuple):
    """Which benchmark wrote a log, and what its times are of."""

    name: str
    unlike: str | None = None  # why they are not those of nccl-tests over NCCL, in words


#: What is known of a run without a command.
NO_LAUNCH = Launch(None, None)


class CollectiveRow(NamedTuple):
    """One measured collective, its size in the convention of nccl-tests."""

    line: int
    operation: str
    ranks: int
    nodes: int | None  # None where unknown [-]
    dtype: str
    redop: str | None
    nbytes: int  # [B]
    seconds: float  # [s]
    in_place: bool = False


@dataclass
class Measurements:
    """What a log of a benchmark other than nccl-tests holds."""

    rows: list[CollectiveRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader must know of it
    misfit: MisfitError | None = None  # the first line that does not fit
    unlike: str | None = None  # why its times are not those of nccl-tests over NCCL, in words
    devices: tuple[str, ...] = ()  # names of devices, sorted


def number_lines(text: str) -> list[tuple[int, str]]:
    """Lines that hold something, with their numbers from 1; a command that goes on after a backslash
    is one line.

    Parameters
    ----------
    text : str
        A log, with ends of lines of any kind.

    Returns
    -------
    lines : list
        Number and text of each, shortened where it is very long.

    Examples
    --------
    >>> number_lines("a\\n\\nb")
    [(1, 'a'), (3, 'b')]
    """
    lines: list[tuple[int, str]] = []
    is_continued = False
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if is_continued:
            start, before = lines[-1]
            lines[-1] = (start, f"{before.rstrip()[:-1]} {line}"[:_LONGEST])
        elif line.strip():
            lines.append((number, line[:_LONGEST]))
        is_continued = bool(lines) and line.rstrip().endswith("\\") and line.strip() != "\\"
    return lines


def spell_operation(name: str) -> str | None:
    """Spell an operation in perfkit's words; None for one that perfkit does not know.

    Examples
    --------
    >>> spell_operation("AllReduce"), spell_operation("all_gather_into_tensor")
    ('all_reduce', 'all_gather')
    >>> spell_operation("barrier")
    """
    return _OPERATIONS.get(re.sub(r"[^a-z]", "", name.lower()))


def spell_redop(operation: str, name: str = "sum") -> str | None:
    """The reduction of an operation; None for one that only moves data.

    Examples
    --------
    >>> spell_redop("all_reduce", "max"), spell_redop("reduce_scatter"), spell_redop("all_gather")
    ('max', 'sum', None)
    """
    return name if COLLECTIVES[operation].reduces else None


def read_launch(line: str) -> Launch | None:
    """Read how many ranks and nodes a command starts; None for a line that is no such command.

    Parameters
    ----------
    line : str
        A line with mpirun, mpiexec, srun, torchrun, deepspeed or accelerate.

    Returns
    -------
    launch : Launch or None
        Ranks and nodes, as far as the command says them.

    Examples
    --------
    >>> read_launch("mpirun -n 16 -ppn 8 ./benchmark")
    Launch(ranks=16, nodes=2)
    >>> read_launch("srun -N 4 --ntasks-per-node=8 osu_allreduce")
    Launch(ranks=32, nodes=4)
    """
    command = _LAUNCHER.search(line)
    if command is None:
        return None
    program, options = command[1], command[2]
    ranks = _read_count(_RANKS, options)
    per_node = _read_count(_PER_NODE, options)
    nodes = _read_count(_NODES, options)
    capital = _read_count(_CAPITAL_N, options)
    if capital is not None and program == "srun":
        nodes = nodes or capital
    elif capital is not None and program in ("mpirun", "mpiexec", "prun"):
        per_node = per_node or capital
    if program in _OF_ONE_NODE and per_node and nodes is None:
        nodes = 1
    if ranks is None and per_node and nodes:
        ranks = per_node * nodes
    if nodes is None and ranks and per_node and ranks % per_node == 0:
        nodes = ranks // per_node
    if ranks is None and nodes is None:
        return None
    return Launch(ranks, nodes)


def _read_count(pattern: re.Pattern[str], options: str) -> int | None:
    """A positive number of an option; None where it is missing."""
    match = pattern.search(options)
    if match is None or int(match[1]) < 1:
        return None
    return int(match[1])


def read_size(line: int, text: str, figure: str | float, *, times: int = 1) -> int:
    """Read a size of a message, times what its program leaves out.

    Parameters
    ----------
    line : int
        Number of the line, for the error [-].
    text : str
        The line.
    figure : str or float
        Size as printed [B].
    times : int, optional
        What nccl-tests count it by: ranks where the program counts the part of one rank [-].

    Returns
    -------
    nbytes : int
        Size [B].

    Raises
    ------
    MisfitError
        For a size that no message has.
    """
    nbytes = float(figure) * times
    if not 0 <= nbytes <= _MOST_BYTES:
        raise MisfitError(line, text, f"no message has a size of {nbytes:g} B")
    return round(nbytes)


def read_seconds(line: int, text: str, figure: str | float, unit: float) -> float:
    """Read a time of one operation.

    Parameters
    ----------
    line : int
        Number of the line, for the error [-].
    text : str
        The line.
    figure : str or float
        Time as printed [-].
    unit : float
        Seconds of its unit [s].

    Returns
    -------
    seconds : float
        The time [s].

    Raises
    ------
    MisfitError
        For a time that is not above 0, or of days.
    """
    seconds = float(figure) * unit
    if not 0 < seconds <= _MOST_SECONDS:
        raise MisfitError(line, text, f"no operation takes {seconds:g} s")
    return seconds


def check_ranks(line: int, text: str, ranks: int) -> int:
    """Check a number of ranks that a log states.

    Parameters
    ----------
    line : int
        Number of the line, for the error [-].
    text : str
        The line.
    ranks : int
        Ranks [-].

    Returns
    -------
    ranks : int
        The same [-].

    Raises
    ------
    MisfitError
        For one rank, which exchanges nothing, and for numbers that no cluster has.
    """
    if not 2 <= ranks <= _MOST_RANKS:
        raise MisfitError(line, text, f"{ranks} ranks exchange nothing, or no cluster has them")
    return ranks


@dataclass(frozen=True)
class PrintedRates:
    """Two printed bandwidths of a row, in one unit.

    Parameters
    ----------
    algbw, busbw : float
        Algorithm and bus bandwidth [-].
    half : float
        Half of the last printed digit of both [-].
    """

    algbw: float
    busbw: float
    half: float


def find_ranks(operation: str, rates: Sequence[PrintedRates]) -> int | None:
    """Find the number of ranks whose bus factor is busbw / algbw of every row.

    Parameters
    ----------
    operation : str
        The operation.
    rates : sequence of PrintedRates
        Bandwidths of its rows.

    Returns
    -------
    ranks : int or None
        Ranks [-]; None where the figures allow several numbers, or none.

    Examples
    --------
    >>> find_ranks("all_reduce", [PrintedRates(100.0, 175.0, 0.005)])
    8
    >>> find_ranks("broadcast", [PrintedRates(100.0, 100.0, 0.005)])
    """
    if not rates:
        return None
    algbw = np.array([rate.algbw for rate in rates])
    busbw = np.array([rate.busbw for rate in rates])
    half = np.array([rate.half for rate in rates])
    low, high = bound_factors(algbw, half, busbw, half)
    fewest, most = bound_ranks(low.max(), high.min(), operation)
    return fewest if fewest == most else None


def make_frame(rows: Sequence[CollectiveRow], file: str) -> pl.DataFrame:
    """Make the frame of rows, with bandwidths from size and time.

    Parameters
    ----------
    rows : sequence of CollectiveRow
        Measured collectives.
    file : str
        Name of the log.

    Returns
    -------
    frame : polars.DataFrame
        Columns as in `perfkit.readers.nccl.parse_nccl_tests`.
    """
    nbytes = np.array([row.nbytes for row in rows], dtype=float)
    seconds = np.array([row.seconds for row in rows], dtype=float)
    factors = np.array([float(bus_factor(row.operation, row.ranks)) for row in rows], dtype=float)
    algbw = nbytes / seconds
    return pl.DataFrame(
        {
            "operation": [row.operation for row in rows],
            "ranks": [row.ranks for row in rows],
            "nodes": [row.nodes for row in rows],
            "dtype": [row.dtype for row in rows],
            "redop": [row.redop for row in rows],
            "nbytes": [row.nbytes for row in rows],
            "seconds": seconds,
            "algbw": algbw,
            "busbw": factors * algbw,
            "in_place": [row.in_place for row in rows],
            "file": [file] * len(rows),
            "line": [row.line for row in rows],
        },
        schema=COLUMNS,
    )
