"""What every rank holds of the tables of a plan, and who exchanges what."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from perfkit.workloads.placement import BY_ROWS, Placement
from perfkit.workloads.tables import EmbeddingTable


class Held(NamedTuple):
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
    split = sorted({p.ranks for p in placements if p.kind in BY_ROWS and len(p.ranks) > 1} - {everyone})
    groups = (everyone, *split)
    alone: list[EmbeddingTable] = []
    copies: list[EmbeddingTable] = []
    sums: list[list[EmbeddingTable]] = [[] for _ in groups]
    widths = [0] * ranks
    for number, (placement, table) in enumerate(zip(placements, tables, strict=True)):
        members, by_rows = placement.ranks, placement.kind in BY_ROWS and len(placement.ranks) > 1
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
