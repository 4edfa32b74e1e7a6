"""Statistics that the planner of TorchRec prints, found among other lines of a text.

`perfkit.readers.printed_plans` makes tables and a plan of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from perfkit.ground.files import LARGEST_TEXT, MOST_ROWS, reading
from perfkit.ground.units import escape, show
from perfkit.readers.log_text import COLOURS
from perfkit.workloads.placement import MOST_RANKS

#: Endings of files of printed statistics.
LOG_SUFFIXES = (".log", ".txt", ".out", ".err")
#: Bytes of a "GB" of TorchRec, ``bytes_to_gb`` in torchrec/distributed/planner/utils.py [B].
_GB = 2**30
#: What a number of GB can be off, as it is printed with three digits after the point [B].
ROUNDING = 0.5e-3 * _GB
#: Sharding types by the letters that are printed, ``_get_sharding_type_abbr`` in
#: torchrec/distributed/planner/stats.py.
SHARDING_TYPES = {
    "DP": "data_parallel",
    "TW": "table_wise",
    "CW": "column_wise",
    "RW": "row_wise",
    "TWRW": "table_row_wise",
    "TWCW": "table_column_wise",
    "GS": "grid_shard",
}
#: What one column of the table of parameters is called, in all versions since 2022.
_COLUMNS = {
    "FQN": "path",
    "Sharding": "sharding",
    "Compute Kernel": "kernel",
    "Perf (ms)": "time",
    "Storage (HBM, DDR)": "storage",
    "Storage (HBM, DDR, SSD)": "storage",
    "Cache Load Factor": "load_factor",
    "Pooling Factor": "lengths",
    "Sum Pooling Factor": "lengths",
    "Num Poolings": "poolings",
    "Sum Num Poolings": "poolings",
    "Num Indices": "lookups",
    "Output": "output",
    "Weighing": "weighted",
    "Weighted": "weighted",
    "Sharder": "sharder",
    "Features": "features",
    "Emb Dim": "dim",
    "Emb Dim (CW Dim)": "dim",
    "Hash Size": "rows",
    "Ranks": "ranks",
    "Batch Sizes": "batches",
}
#: Where the frame of a line begins; before it may stand what a logger or a launcher writes.
_FRAME = re.compile(r"#[ #]")
_TITLE = "--- Planner Statistics ---"
#: A rank that a launcher or a logger writes before its lines, as ``[rank3]:``, ``[default3]:``, ``3: ``.
_RANK = re.compile(r"(?:rank|default|trainer|worker)[ _=-]?(\d+)|^\s*\[?(\d+)\]?: ", re.IGNORECASE)
#: Cells stand at least three spaces apart; inside of a cell are single ones.
_GAP = re.compile(r" {2,}")
#: Where the text is to be had.
_WHERE = (
    "they are in '\\n'.join(planner._stats[0]._stats_table) after planner.plan or collective_plan, and "
    "in logs of torchrec.distributed.planner.stats at level INFO"
)


class PlannedTable(NamedTuple):
    """A table as the planner prints it; None is what this version does not print.

    The path has the module and the name. Ranks are sorted, one for each shard, and empty where no
    plan was found. `width` are the columns of a shard, `lookups` those of a sample over all
    features, `storage` [B] what all shards take in all memories together.
    """

    place: str
    path: str
    sharding: str
    kernel: str | None
    rows: int | None
    dim: int | None
    width: int | None
    lookups: float | None
    features: int | None
    is_pooled: bool | None
    is_weighted: bool | None
    load_factor: float | None
    storage: float | None
    ranks: tuple[int, ...]


class RankUsage(NamedTuple):
    """What the planner expects of a rank: bytes of device and host memory [B], and its time [s]."""

    rank: int
    hbm: float
    ddr: float
    time: float


@dataclass(frozen=True)
class PlannerStatistics:
    """What the planner of TorchRec printed.

    Parameters
    ----------
    tables : tuple of PlannedTable
        One for each line of the table of parameters.
    usage : tuple of RankUsage
        One for each line of the table of ranks; empty where it is missing.
    batch : int or None
        Samples of one rank [-].
    kernels : mapping
        Number of tables by compute kernel; empty where it is missing [-].
    weights : mapping
        Bytes of the weights by compute kernel, rounded to 1 MB; empty where they are not printed
        [B].
    reserved, planned : float or None
        Device memory of a rank that the planner leaves to others, and that it may fill [B].
    dense, inputs : float or None
        Device memory of a rank for weights that are not in tables, and for inputs (KJT), which are
        part of what it may fill [B].
    ignored : tuple of str
        Columns that are not read.
    """

    tables: tuple[PlannedTable, ...]
    usage: tuple[RankUsage, ...] = ()
    batch: int | None = None
    kernels: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    reserved: float | None = None
    planned: float | None = None
    dense: float | None = None
    inputs: float | None = None
    ignored: tuple[str, ...] = ()

    @property
    def ranks(self) -> int | None:
        """Number of ranks [-]: the lines of the table of ranks, or one more than the last rank of a
        table that is on all of them; None if neither tells."""
        if self.usage:
            return len(self.usage)
        for table in self.tables:
            if table.sharding in ("DP", "RW") and table.ranks:
                return max(table.ranks) + 1
        return None


def read_planner_statistics(
    source: str | Path | Sequence[str], *, origin: str = "text"
) -> PlannerStatistics:
    """Read what the planner of TorchRec printed.

    Parameters
    ----------
    source : str, Path or sequence of str
        The text, its lines, or a file with it. Lines of other loggers may stand between, and before
        each line what a logger or a launcher writes.
    origin : str, optional
        Name of the text in errors.

    Returns
    -------
    statistics : PlannerStatistics
        Tables, ranks and memory. Equal statistics of several ranks are one.

    Raises
    ------
    ValueError
        For a text without statistics or without their table of parameters, for statistics that end
        early, have lines that do not fit, or tables of other numbers, and for several that differ.

    References
    ----------
    .. [1] meta-pytorch/torchrec, torchrec/distributed/planner/stats.py, ``EmbeddingStats``, versions
       of 2022 to 2026

    Examples
    --------
    >>> log = [
    ...     "#   FQN           Sharding   Emb Dim (CW Dim)   Hash Size   Ranks   #",
    ...     "#   sparse.user         TW                128        1000       1   #",
    ... ]
    >>> table = read_planner_statistics(log).tables[0]
    >>> table.path, table.rows, table.ranks
    ('sparse.user', 1000, (1,))
    """
    if isinstance(source, Path) or (isinstance(source, str) and is_file_name(source)):
        with reading(source, _WHERE, most=LARGEST_TEXT):
            text = Path(source).read_bytes().decode("utf-8-sig", errors="replace")
            return _read_text(text, escape(source, 200))
    text = source if isinstance(source, str) else "\n".join(source)
    with reading(origin, _WHERE, told=True):
        return _read_text(text, origin)


def is_file_name(source: str) -> bool:
    """Whether a text is the name of a file with statistics, and not the statistics."""
    return "\n" not in source and source.lower().endswith(LOG_SUFFIXES)


def name_source(source: str | Path | Sequence[str]) -> str:
    """The name of printed statistics in errors: that of their file, or ``source``."""
    if isinstance(source, Path) or (isinstance(source, str) and is_file_name(source)):
        return escape(source, 200)
    return "source"


def has_statistics(text: str) -> bool:
    """Whether a text has a line of statistics: their title, or the head of their table."""
    return _TITLE in text or re.search(r"#\s+FQN\s{2,}Sharding", text) is not None


def is_list_of_lines(source: Any) -> bool:
    """Whether something is a list of texts, as the planner keeps its statistics."""
    if not isinstance(source, list | tuple) or not source:
        return False
    return all(isinstance(line, str) for line in source)


# -- from lines to statistics
# --------------------------------------------------------------------------------------------------


class _Line(NamedTuple):
    """A line inside of the frame: its number in the text, and what stands there."""

    number: int
    content: str


@dataclass
class _Frame:
    """The lines of one frame; whether its title and its last line were seen, and its width [-], which
    a title tells."""

    lines: list[_Line]
    is_titled: bool
    width: int
    is_closed: bool = False

    def has(self, width: int) -> bool:
        """Whether a line of this width may be one of the frame. One line of TorchRec's is a character
        wider than the others; those that people write by hand have any width."""
        return not self.is_titled or 0 <= width - self.width <= 1


def _read_text(text: str, origin: str) -> PlannerStatistics:
    """The statistics of a text; several must be equal."""
    frames = _find_frames(text)
    if not frames:
        raise ValueError(f"{origin} has no statistics of TorchRec's planner; {_WHERE}")
    first = _read_frame(frames[0], origin)
    for frame in frames[1:]:
        if not _are_equal(first, _read_frame(frame, origin)):
            raise ValueError(
                f"{origin} has several statistics that differ, at lines {frames[0].lines[0].number} "
                f"and {frame.lines[0].number}; leave one of them in the text"
            )
    return first


def _are_equal(one: PlannerStatistics, other: PlannerStatistics) -> bool:
    """Whether two statistics tell of the same tables on the same ranks."""
    tables = [table._replace(place="") for table in one.tables]
    other_tables = [table._replace(place="") for table in other.tables]
    return tables == other_tables and one.usage == other.usage and one.batch == other.batch


def _find_frames(text: str) -> list[_Frame]:
    """Frames of statistics in the lines of a text; each rank that prints has its own."""
    if re.search(r"""['"], ?['"]#""", text):  # a printed list of lines
        text = re.sub(r"""['"], ?['"](?=#)""", "\n", text)
    frames: list[_Frame] = []
    open_frames: dict[str, _Frame] = {}  # by the rank that prints
    for number, line in enumerate(text.splitlines(), start=1):
        plain = COLOURS.sub("", line)
        start = _FRAME.search(plain)
        end = plain.rfind("#")
        if start is None or end == start.start() or re.search(r"\w", plain[end:]):
            continue
        width = end - start.start()
        content = plain[start.start() + 1 : end].rstrip()
        writer = _find_writer(plain[: start.start()])
        is_title = _TITLE in content
        frame = open_frames.get(writer)
        if is_title or (frame is None and _begins_table(content)):
            frame = open_frames[writer] = _Frame([], is_title, width)
            frames.append(frame)
        if frame is None or not frame.has(width):
            continue
        if content and not content.strip("#"):
            frame.is_closed = True
            del open_frames[writer]
            continue
        frame.lines.append(_Line(number, content))
    return frames


def _begins_table(content: str) -> bool:
    """Whether a line is the head of the table of parameters or of ranks."""
    cells = _split(content)
    return cells[:2] == ["FQN", "Sharding"] or (len(cells) > 4 and cells[0] == "Rank")


def _find_writer(prefix: str) -> str:
    """The rank that a launcher or a logger names before a line; empty if none is named."""
    named = _RANK.search(prefix)
    if named is None:
        return ""
    return named[1] or named[2]


def _split(content: str) -> list[str]:
    """The cells of a line of a table."""
    return _GAP.split(content.strip())


def _read_frame(frame: _Frame, origin: str) -> PlannerStatistics:
    """The statistics in one frame."""
    begin = frame.lines[0].number
    if frame.is_titled and not frame.is_closed:
        raise ValueError(
            f"{origin} has statistics from line {begin} on that end early, without their last line of "
            "#; pass them whole"
        )
    facts = _read_facts(frame.lines)
    kernels = {name: int(count) for name, count in facts.kernels.items()}
    rows, ignored = _read_parameters(frame, origin)
    if kernels and sum(kernels.values()) != len(rows):
        raise ValueError(
            f"{origin} lists {len(rows)} tables from line {begin} on, and counts "
            f"{sum(kernels.values())} by compute kernel; lines were lost: pass the statistics whole"
        )
    return PlannerStatistics(
        tables=tuple(rows),
        usage=tuple(_read_usage(frame.lines, origin)),
        batch=facts.batch,
        kernels=kernels,
        weights=facts.weights,
        reserved=facts.reserved,
        planned=facts.planned,
        dense=facts.dense,
        inputs=facts.inputs,
        ignored=tuple(ignored),
    )


@dataclass
class _Facts:
    """What stands below the tables."""

    kernels: dict[str, int]
    weights: dict[str, float]
    batch: int | None = None
    reserved: float | None = None
    planned: float | None = None
    dense: float | None = None
    inputs: float | None = None


def _read_facts(lines: Sequence[_Line]) -> _Facts:
    """Batch, kernels and memory: lines of a heading, and indented ones below it."""
    facts = _Facts({}, {})
    heading = ""
    for line in lines:
        words = line.content.strip()
        if not line.content.startswith("   "):
            heading = words.rstrip(": ")
            batch = re.fullmatch(r"Batch Size: (\d{1,12})", words)
            if batch is not None:
                facts.batch = int(batch[1])
            continue
        if heading in ("Compute Kernels", "Compute Kernels Count"):
            counted = re.fullmatch(r"(\w+): (\d{1,9})", words)
            if counted is not None:
                facts.kernels[counted[1]] = int(counted[2])
        if heading == "Compute Kernels Embedding Weights":
            weighed = re.fullmatch(r"(\w+): ([\d.]{1,30}) GB", words)
            if weighed is not None:
                facts.weights[weighed[1]] = float(weighed[2]) * _GB
        stored = re.match(r"HBM: ([\d.]{1,30}) GB", words)
        if stored is None:
            continue
        nbytes = float(stored[1]) * _GB
        if heading == "Reserved Memory":
            facts.reserved = nbytes
        elif heading == "Planning Memory":
            facts.planned = nbytes
        elif heading == "Dense Storage (per rank)":
            facts.dense = nbytes
        elif heading == "KJT Storage (per rank)":
            facts.inputs = nbytes
    return facts


def _read_usage(lines: Sequence[_Line], origin: str) -> list[RankUsage]:
    """The table of ranks; empty if there is none."""
    usage: list[RankUsage] = []
    is_inside = False
    for line in lines:
        cells = _split(line.content)
        if cells[0] == "Rank":
            is_inside = True
            continue
        if not is_inside or cells[0].startswith("--"):
            continue
        if cells == [""]:
            break
        place = f"{origin} line {line.number}"
        if len(cells) < 4:
            raise ValueError(f"{place} is no line of the table of ranks: {show(line.content)}")
        row = RankUsage(
            rank=_read_whole(place, "Rank", cells[0]),
            hbm=_read_first_number(place, "HBM (GB)", cells[1]) * _GB,
            ddr=_read_first_number(place, "DDR (GB)", cells[2]) * _GB,
            time=_read_first_number(place, "Perf (ms)", cells[3]) * 1e-3,
        )
        if row.rank != len(usage):
            raise ValueError(
                f"{place} is of rank {row.rank} after {len(usage)} ranks; lines were lost: pass the "
                "statistics whole"
            )
        usage.append(row)
    return usage


def _read_parameters(frame: _Frame, origin: str) -> tuple[list[PlannedTable], list[str]]:
    """The table of parameters, and the columns of it that are not read."""
    begin = frame.lines[0].number
    heads = [number for number, line in enumerate(frame.lines) if _split(line.content)[0] == "FQN"]
    if not heads:
        raise ValueError(
            f"{origin} has statistics from line {begin} on without the table of parameters (FQN, "
            "Sharding, ...); make the planner with debug=True"
        )
    names = _split(frame.lines[heads[0]].content)
    columns = {}
    ignored = []
    for position, name in enumerate(names):
        if name in _COLUMNS:
            columns[_COLUMNS[name]] = position
        else:
            ignored.append(name)
    missing = [name for name in ("path", "sharding", "ranks") if name not in columns]
    if missing:
        raise ValueError(
            f"{origin} line {frame.lines[heads[0]].number} has no column of {' and '.join(missing)}; "
            "pass the statistics whole"
        )
    tables: list[PlannedTable] = []
    for line in frame.lines[heads[0] + 1 :]:
        cells = _split(line.content)
        if cells[0].startswith("--"):
            continue
        if cells == [""]:
            break
        place = f"{origin} line {line.number}"
        if len(cells) != len(names):
            raise ValueError(
                f"{place} has {len(cells)} cells for the {len(names)} columns of its table; pass "
                "the statistics as they were printed, with all spaces"
            )
        found = {column: cells[position] for column, position in columns.items()}
        tables.append(_read_table(place, found))
        if len(tables) > MOST_ROWS:
            raise ValueError(f"{origin} lists more than {MOST_ROWS:,} tables; leave some out")
    return tables, ignored


def _read_table(place: str, cells: Mapping[str, str]) -> PlannedTable:
    """A line of the table of parameters."""
    sharding = cells["sharding"]
    if sharding not in SHARDING_TYPES:
        raise ValueError(
            f"{place}: Sharding is {show(sharding)}; known are {', '.join(SHARDING_TYPES)}"
        )
    features = _read_optional(place, "Features", cells.get("features"))
    dim = None
    width = None
    if "dim" in cells:
        sizes = re.fullmatch(r"(\d{1,18})(?: \((\d{1,18})\))?", cells["dim"])
        if sizes is None:
            raise ValueError(
                f"{place}: Emb Dim (CW Dim) is {show(cells['dim'])}; it must be as 128, or 128 (64)"
            )
        dim = int(sizes[1])
        if sizes[2] is not None:
            width = int(sizes[2])
    load_factor = None
    if cells.get("load_factor", "None") != "None":
        load_factor = _read_first_number(place, "Cache Load Factor", cells["load_factor"])
    storage = None
    if "storage" in cells:
        storage = sum(
            float(n) for n in re.findall(r"(\d{1,30}(?:\.\d{1,30})?) GB", cells["storage"])
        )
        storage *= _GB
    return PlannedTable(
        place=place,
        path=cells["path"],
        sharding=sharding,
        kernel=cells.get("kernel"),
        rows=_read_optional(place, "Hash Size", cells.get("rows")),
        dim=dim,
        width=width,
        lookups=_count_lookups(place, cells, features),
        features=features,
        is_pooled=_read_word(place, "Output", cells.get("output"), ("pooled", "sequence")),
        is_weighted=_read_word(
            place, "Weighted", cells.get("weighted"), ("weighted", "unweighted")
        ),
        load_factor=load_factor,
        storage=storage,
        ranks=_read_ranks(place, cells["ranks"]),
    )


def _count_lookups(place: str, cells: Mapping[str, str], features: int | None) -> float | None:
    """Lookups of a sample over all features of a table [-]."""
    if "lookups" in cells:
        return _read_first_number(place, "Num Indices", cells["lookups"])
    if "lengths" not in cells:
        return None
    lengths = _read_first_number(place, "Pooling Factor", cells["lengths"])
    if "poolings" not in cells or not features:
        return lengths
    return lengths * _read_first_number(place, "Num Poolings", cells["poolings"]) / features


def _read_ranks(place: str, cell: str) -> tuple[int, ...]:
    """Ranks as 0-7, or as 0,2,2; none where no plan was found."""
    if cell == "None":
        return ()
    span = re.fullmatch(r"(\d{1,9})-(\d{1,9})", cell)
    if span is not None:
        first, last = int(span[1]), int(span[2])
        if not first < last < MOST_RANKS:
            raise ValueError(f"{place}: Ranks is {show(cell)}; it must be as 0-7, or as 0,2,5")
        return tuple(range(first, last + 1))
    if re.fullmatch(r"\d{1,9}(?:,\d{1,9})*", cell) is None:
        raise ValueError(f"{place}: Ranks is {show(cell)}; it must be as 0-7, or as 0,2,5")
    return tuple(int(rank) for rank in cell.split(","))


def _read_whole(place: str, column: str, cell: str) -> int:
    """A whole number of a cell."""
    if re.fullmatch(r"\d{1,18}", cell) is None:
        raise ValueError(f"{place}: {column} is {show(cell)}; it must be a whole number")
    return int(cell)


def _read_optional(place: str, column: str, cell: str | None) -> int | None:
    """A whole number of a cell; None where the column is missing."""
    return None if cell is None else _read_whole(place, column, cell)


def _read_first_number(place: str, column: str, cell: str) -> float:
    """The number that a cell begins with: 0.5 of ``0.5 (1%)``."""
    number = re.match(
        r"\d{1,3}(?:,\d{3}){1,6}(?![\d.])|\d{1,30}(?:\.\d{1,30})?(?:e[-+]\d{1,3})?", cell
    )
    if number is None:
        raise ValueError(f"{place}: {column} is {show(cell)}; it must begin with a number")
    return float(number[0].replace(",", ""))


def _read_word(place: str, column: str, cell: str | None, words: tuple[str, str]) -> bool | None:
    """Whether a cell has the first of two words; None where the column is missing."""
    if cell is None:
        return None
    if cell not in words:
        raise ValueError(f"{place}: {column} is {show(cell)}; it must be {' or '.join(words)}")
    return cell == words[0]
