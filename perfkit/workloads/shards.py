"""What every rank holds of the tables of a plan, and who exchanges what."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from perfkit.workloads.placement import BY_ROWS, Plan
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


def hold_tables(plan: Plan, tables: Sequence[EmbeddingTable]) -> tuple[Held, ...]:
    """Work out what each rank holds.

    Parameters
    ----------
    plan : Plan
        Where every table lies.
    tables : sequence of EmbeddingTable
        The tables.

    Returns
    -------
    held : tuple of Held
        Tables and parts of tables of each rank.
    """
    everyone = tuple(range(plan.ranks))
    split = {p.ranks for p in plan.placements if p.kind in BY_ROWS and len(p.ranks) > 1} - {everyone}
    groups = (everyone, *sorted(split))
    alone, copies = ([list[EmbeddingTable]() for _ in everyone] for _ in range(2))
    sums = [[list[EmbeddingTable]() for _ in groups] for _ in everyone]
    widths = [0] * plan.ranks
    for number, (placement, table) in enumerate(zip(plan.placements, tables, strict=True)):
        members, by_rows = placement.ranks, placement.kind in BY_ROWS and len(placement.ranks) > 1
        parts: dict[tuple[int, bool], EmbeddingTable] = {}
        for shard in placement.cut(table, number):
            if placement.kind == "data_parallel":
                copies[shard.rank].append(table)
                continue
            if not (by_rows and members == everyone):
                widths[shard.rank] += shard.columns // len(members) if by_rows else shard.columns
            if not by_rows:
                own = table if shard.columns is table.dim else replace(table, dim=shard.columns)
                alone[shard.rank].append(own)
                continue
            key = (max(shard.rows, 1), shard.first_row == 0)
            if key not in parts:
                pooling = share_lookups(table, len(members), first=key[1])
                parts[key] = replace(table, rows=key[0], pooling=pooling)
            sums[shard.rank][groups.index(members)].append(parts[key])
    return tuple(
        Held(
            (*alone[rank], *(table for group in sums[rank] for table in group)), len(alone[rank]),
            tuple((number, len(group)) for number, group in enumerate(sums[rank]) if group),
            tuple(copies[rank]), tuple(widths), groups,
        )
        for rank in everyone
    )  # fmt: skip
