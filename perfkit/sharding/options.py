"""The ways to place each table that a search weighs against each other, and what each of them adds to which rank."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perfkit.sharding.pricing import COLUMNS, Rates, column, project
from perfkit.units import Array
from perfkit.workloads.placement import Placement
from perfkit.workloads.shards import share_lookups

__all__ = ["Option", "column_options", "list_options", "price_placement"]

#: Narrowest shard, in columns: kernels move four at a time.
_NARROWEST = 4
#: A table is worth splitting if it is more than this part of what the average rank carries, of any resource.
_LARGE = 0.2
#: A table is worth copying to all ranks if its gradient is at most this many times its pooled rows.
_COPIED = 4.0


@dataclass(frozen=True, eq=False)
class Option:
    """One way to place one table.

    Parameters
    ----------
    kind : str
        One of `perfkit.workloads.placement.KINDS`.
    shards : tuple of array
        Costs of each shard on the rank that gets it, by `perfkit.sharding.pricing.COLUMNS` [-].
    columns : tuple of int
        Columns of each shard where it is split by columns [-].
    everywhere : array
        Costs on every rank [-].
    hot : array
        Costs on top where the most popular row lies [-].
    rows, gradients : float
        Bytes of partial sums that all ranks reduce, and of gradients they reduce [B].
    """

    kind: str
    shards: tuple[Array, ...]
    columns: tuple[int, ...]
    everywhere: Array
    hot: Array
    rows: float = 0.0
    gradients: float = 0.0

    def total(self, ranks: int) -> Array:
        """Costs on all ranks together."""
        return sum(self.shards, ranks * self.everywhere + self.hot)


_NONE = np.zeros(len(COLUMNS))


def _rows_over(rates: Rates, members: Collection[int], ranks: int) -> tuple[dict[int, Array], dict[int, Array]]:
    """Costs of a shard with an equal part of the rows, and what the most popular row adds to it."""
    tables, found = rates.workload.tables, []
    for hot in (False, True):
        parts = {}
        for number in members:
            table = tables[number]
            pooling = share_lookups(table, ranks, first=hot)
            parts[number] = replace(table, rows=-(-table.rows // ranks), pooling=pooling)
        found.append(rates.cost(parts, share=1 / ranks) if parts else {})
    cold, warm = found
    return cold, {number: np.maximum(warm[number] - cold[number], 0.0) for number in members}


def _by_rows(rates: Rates, members: Collection[int], kind: str) -> dict[int, Option]:
    """Options of tables whose rows are split over all ranks, or over those of a node."""
    ranks = rates.ranks if kind == "row_wise" else rates.node
    cold, hot = _rows_over(rates, members, ranks)
    options = {}
    for number in members:
        cost, nbytes = cold[number].copy(), cold[number][column("pooled")]
        extra = hot[number].copy()
        extra[[column("pooled"), column("weights"), column("state")]] = 0.0
        if kind == "row_wise":
            cost[column("pooled")] = 0.0
            options[number] = Option(kind, (), (), cost, extra, rows=nbytes)
        else:  # partial sums are reduced inside the node, and each of its ranks passes its part on to the others
            cost[column("partial")], cost[column("pooled")] = nbytes, nbytes / ranks
            options[number] = Option(kind, (cost + extra, *(cost,) * (ranks - 1)), (), _NONE, _NONE)
    return options


def column_options(rates: Rates, cuts: Mapping[int, tuple[int, ...]], kind: str = "column_wise") -> dict[int, Option]:
    """Options of tables that are split by columns.

    Parameters
    ----------
    rates : Rates
        Prices.
    cuts : mapping of int to tuple of int
        Columns of every shard by number of the table [-].
    kind : str, optional
        ``column_wise`` or ``table_column_wise``.

    Returns
    -------
    options : dict of int to Option
        By number of the table.
    """
    tables, shards = rates.workload.tables, {number: [] for number in cuts}  # type: ignore[var-annotated]
    known: dict[tuple[int, int], Array] = {}
    for place in range(max(map(len, cuts.values()), default=0)):
        fresh = {n: replace(tables[n], dim=c[place]) for n, c in cuts.items()
                 if place < len(c) and (n, c[place]) not in known}  # fmt: skip
        if fresh:
            known |= {(n, cuts[n][place]): cost for n, cost in rates.cost(fresh).items()}
        for number, widths in cuts.items():
            if place < len(widths):
                shards[number].append(known[number, widths[place]])
    return {n: Option(kind, tuple(shards[n]), tuple(cuts[n]), _NONE, _NONE) for n in cuts}


def _whole(rates: Rates, members: Collection[int]) -> dict[int, Option]:
    costs = rates.cost({n: rates.workload.tables[n] for n in members})
    return {n: Option("table_wise", (cost,), (), _NONE, _NONE) for n, cost in costs.items()}


def _copied(rates: Rates, members: Collection[int]) -> dict[int, Option]:
    tables = rates.workload.tables
    costs = rates.cost({n: tables[n] for n in members}, replicated=True) if members else {}
    return {
        n: Option("data_parallel", (), (), cost, _NONE, gradients=float(tables[n].nbytes)) for n, cost in costs.items()
    }


def price_placement(rates: Rates, placements: Sequence[Placement]) -> list[Option]:
    """Options that a plan has chosen.

    Parameters
    ----------
    rates : Rates
        Prices.
    placements : sequence of Placement
        One for each table.

    Returns
    -------
    options : list of Option
        One for each table.
    """
    by: dict[str, dict[int, Placement]] = {}
    for number, placement in enumerate(placements):
        by.setdefault(placement.kind, {})[number] = placement
    found: dict[int, Option] = {}
    for kind, members in by.items():
        if kind in ("column_wise", "table_column_wise"):
            cuts = {n: tuple(s.columns for s in p.cut(rates.workload.tables[n], n)) for n, p in members.items()}
            found |= column_options(rates, cuts, kind)
        elif kind in ("row_wise", "table_row_wise"):
            found |= _by_rows(rates, members, kind)
        else:
            found |= {"table_wise": _whole, "data_parallel": _copied}[kind](rates, members)
    return [found[number] for number in range(len(placements))]


def list_options(
    rates: Rates, allowed: Callable[[int, str], bool], capacity: float, *, additive: bool = False
) -> list[list[Option]]:
    """Ways to place each table that are worth a try.

    Parameters
    ----------
    rates : Rates
        Prices.
    allowed : callable
        Whether a table, by its number, may be placed in a way, by its kind.
    capacity : float
        Memory of a rank for tables [B].
    additive : bool, optional
        Whether only whole tables and splits by columns count.

    Returns
    -------
    options : list of list of Option
        For each table, whole first where that is allowed.

    Notes
    -----
    Left out is what cannot pay: splits by columns and rows of tables below a fifth of what the average rank carries,
    and copies of tables whose gradient has more than four times the bytes of their pooled rows.
    """
    tables, ranks = rates.workload.tables, rates.ranks
    every = range(len(tables))
    whole = _whole(rates, every)
    loads = project(np.array([whole[n].shards[0] for n in every]))
    limit = (1.0 if additive else _LARGE) * loads.sum(axis=0) / ranks
    limit[-1] = min(limit[-1], _LARGE * capacity) if capacity > 0 else limit[-1]
    large = [n for n in every if (loads[n] > limit)[limit > 0].any() or not allowed(n, "table_wise")]
    found: list[list[Option]] = [[whole[n]] if allowed(n, "table_wise") else [] for n in every]

    def add(options: Mapping[int, Option]) -> None:
        for number, option in options.items():
            found[number].append(option)

    if ranks == 1:
        return found
    for kind, most in (("column_wise", ranks), ("table_column_wise", rates.node)):
        if kind == "table_column_wise" and rates.node == ranks:
            continue
        count = 2
        while count <= most:
            cuts = {n: (tables[n].dim // count,) * count for n in large if allowed(n, kind)
                    and tables[n].dim % (count * _NARROWEST) == 0}  # fmt: skip
            add(column_options(rates, cuts, kind) if cuts else {})
            count *= 2
    if not additive:
        for kind, over in (("row_wise", ranks), ("table_row_wise", rates.node)):
            if kind == "row_wise" or 1 < rates.node < ranks:
                add(_by_rows(rates, [n for n in large if allowed(n, kind) and tables[n].rows >= over], kind))
        pooled = rates.workload.batch
        add(_copied(rates, [n for n in every if allowed(n, "data_parallel") and tables[n].rows <= _COPIED * pooled]))
    return found
