"""How one table is cut and where its shards lie."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from perfkit.resources import expect, expect_record, expect_text, expect_whole
from perfkit.units import check_choice, check_positive, check_type
from perfkit.workloads.tables import EmbeddingTable

__all__ = [
    "KINDS",
    "SPLIT_BY_COLUMNS",
    "Held",
    "Placement",
    "Shard",
    "expect_placement",
    "hold_tables",
    "share_lookups",
]

#: Ways to place one table, by their TorchRec names: copied to every rank; whole on one rank; columns split over ranks;
#: rows split over all ranks; rows split over the ranks of one node; columns split over ranks of one node.
KINDS = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise")
#: Those that split columns.
SPLIT_BY_COLUMNS = ("column_wise", "table_column_wise")
_BY_ROWS = ("row_wise", "table_row_wise")


class Shard(NamedTuple):
    """A rectangle of a table on a rank: table and rank number, first row, rows, first column and columns."""

    table: int
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


@dataclass(frozen=True)
class Placement:
    """Where one table lies.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    ranks : tuple of int
        Rank of every shard, in the order of rows or columns.
    columns : tuple of int, optional
        Columns of every shard of a table that is split by columns; by default all the same [-].

    Raises
    ------
    ValueError
        For an unknown kind, no rank, the same rank twice, or columns that do not fit.

    Examples
    --------
    >>> Placement("column_wise", (0, 3), columns=(64, 64))
    Placement(kind='column_wise', ranks=(0, 3), columns=(64, 64))
    """

    kind: str
    ranks: tuple[int, ...]
    columns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        for name in ("ranks", "columns"):
            given = getattr(self, name)
            check_type(f"{name} of a {self.kind} placement", given, Sequence[int])
            object.__setattr__(self, name, tuple(n.item() if isinstance(n, np.generic) else n for n in given))
        for rank in self.ranks:
            check_positive(f"rank of a {self.kind} shard", rank, integer=True, zero=True)
        if not self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"a {self.kind} table lies on ranks {self.ranks}; name at least one, and none twice")
        if self.kind == "table_wise" and len(self.ranks) > 1:
            raise ValueError(f"a table_wise table lies on one rank, not on {self.ranks}; split it another way")
        if self.columns and (self.kind not in SPLIT_BY_COLUMNS or len(self.columns) != len(self.ranks)):
            raise ValueError(
                f"columns {self.columns} do not belong to a {self.kind} placement on {len(self.ranks)} ranks; "
                "give one number a rank, to column_wise and table_column_wise only"
            )
        for width in self.columns:
            check_positive("columns of a shard", width, integer=True)

    def cut(self, table: EmbeddingTable, number: int = 0) -> list[Shard]:
        """Cut a table into the shards of this placement.

        Parameters
        ----------
        table : EmbeddingTable
            The table.
        number : int
            Its number [-].

        Returns
        -------
        shards : list of Shard
            One for every rank, in the order of `ranks`.

        Raises
        ------
        ValueError
            For fewer rows than shards, or columns that do not add up to those of the table.

        Notes
        -----
        Rows are cut into blocks of the same height, rounded up, so that the last ones can be lower or empty.
        """
        n, name = len(self.ranks), table.name or f"table {number}"
        if self.kind in SPLIT_BY_COLUMNS:
            if not self.columns and table.dim % n:
                raise ValueError(f"{name!r} has {table.dim} columns; {n} equal shards need a multiple; give columns")
            widths = self.columns or (table.dim // n,) * n
            if sum(widths) != table.dim:
                raise ValueError(f"the shards of {name!r} have {sum(widths)} columns together; the table {table.dim}")
            starts = (0, *accumulate(widths))
            spans = zip(self.ranks, starts, widths, strict=False)
            return [Shard(number, rank, 0, table.rows, start, width) for rank, start, width in spans]
        if self.kind in _BY_ROWS:
            if table.rows < n:
                raise ValueError(f"{name!r} has {table.rows} rows; it cannot be split by rows over {n} ranks")
            block = -(-table.rows // n)
            tops = [min(i * block, table.rows) for i in range(n + 1)]
            spans = zip(self.ranks, tops, tops[1:], strict=False)
            return [Shard(number, rank, top, end - top, 0, table.dim) for rank, top, end in spans]
        return [Shard(number, rank, 0, table.rows, 0, table.dim) for rank in self.ranks]


@dataclass(frozen=True)
class Held:
    """What one rank holds, and who exchanges what.

    Parameters
    ----------
    looked : tuple of EmbeddingTable
        Tables and parts of tables that the rank looks up for the whole batch: those whose rows it pools alone, then
        those whose pooled rows are sums over a group, group by group.
    whole : int
        How many of them it pools alone [-].
    sums : tuple of (int, int)
        Number of the group and of its tables [-].
    copies : tuple of EmbeddingTable
        Tables that every rank holds and looks up for its own samples.
    widths : tuple of int
        Columns that each rank sends to each other one [-].
    groups : tuple of tuple of int
        All ranks, and then those that add up rows among themselves.
    """

    looked: tuple[EmbeddingTable, ...]
    whole: int
    sums: tuple[tuple[int, int], ...]
    copies: tuple[EmbeddingTable, ...]
    widths: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def share_lookups(table: EmbeddingTable, parts: int, *, first: bool) -> float:
    """Lookups per sample of one part of the rows; the `first` part holds the most popular row.

    Parameters
    ----------
    table : EmbeddingTable
        The whole table.
    parts : int
        Parts of as many rows [-].
    first : bool
        Whether it is the first one.

    Returns
    -------
    pooling : float
        Lookups per sample [-].
    """
    hottest = float(table.distribution.buckets()[0].max())
    return table.pooling * ((1 - hottest) / parts + hottest * first)


def hold_tables(placements: Sequence[Placement], tables: Sequence[EmbeddingTable], rank: int, *, ranks: int) -> Held:
    """Work out what a rank holds.

    Parameters
    ----------
    placements : sequence of Placement
        One for each table.
    tables : sequence of EmbeddingTable
        The tables.
    rank : int
        The rank [-].
    ranks : int
        Ranks of all of them [-].

    Returns
    -------
    held : Held
        Its tables and parts of tables.
    """
    everyone = tuple(range(ranks))
    split = sorted({p.ranks for p in placements if p.kind in _BY_ROWS and len(p.ranks) > 1} - {everyone})
    groups = (everyone, *split)
    alone: list[EmbeddingTable] = []
    copies: list[EmbeddingTable] = []
    sums: list[list[EmbeddingTable]] = [[] for _ in groups]
    widths = [0] * ranks
    for number, (placement, table) in enumerate(zip(placements, tables, strict=True)):
        members, by_rows = placement.ranks, placement.kind in _BY_ROWS and len(placement.ranks) > 1
        for shard in placement.cut(table, number):
            if placement.kind != "data_parallel" and not (by_rows and members == everyone):
                widths[shard.rank] += shard.columns // len(members) if by_rows else shard.columns
            if shard.rank != rank:
                continue
            if placement.kind == "data_parallel":
                copies.append(table)
            elif by_rows:
                pooling = share_lookups(table, len(members), first=shard.first_row == 0)
                part = replace(table, rows=max(shard.rows, 1), pooling=pooling)
                sums[groups.index(members)].append(part)
            else:
                alone.append(table if shard.columns == table.dim else replace(table, dim=shard.columns))
    looked = (*alone, *(table for group in sums for table in group))
    counts = tuple((number, len(group)) for number, group in enumerate(sums) if group)
    return Held(looked, len(alone), counts, tuple(copies), tuple(widths), groups)


def expect_placement(value: Any, place: str) -> tuple[Placement, str]:
    """Read the placement of one table from a file.

    Parameters
    ----------
    value : dict
        ``kind``, ``ranks`` and, if need be, ``columns`` and ``name``.
    place : str
        Where it stands in the file.

    Returns
    -------
    placement : Placement
        The placement.
    name : str
        Name of the table, empty where none is given.

    Raises
    ------
    ValueError
        With the place and the reason, for anything else.
    """
    many = expect("a list of whole numbers of at least 0", lambda v: isinstance(v, list | tuple), tuple)

    def numbers(value: Any, place: str) -> tuple[int, ...]:
        return tuple(expect_whole()(entry, f"{place}[{i}]") for i, entry in enumerate(many(value, place)))

    readers = {"name": expect_text(), "kind": expect_text(*KINDS), "ranks": numbers, "columns": numbers}
    entry = expect_record(_Entry, **readers)(value, place)
    try:
        return Placement(entry.kind, entry.ranks, entry.columns), entry.name
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


@dataclass(frozen=True)
class _Entry:
    kind: str
    ranks: tuple[int, ...]
    columns: tuple[int, ...] = ()
    name: str = ""
