"""Which placements are allowed and worth a try: constraints on tables, options of each, whether memory can suffice."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from perfkit.ground.units import check_choice, check_positive, check_type, format_bytes
from perfkit.sharding.objective import Options, Problem
from perfkit.workloads.placement import KINDS, SPLIT_BY_COLUMNS, Plan
from perfkit.workloads.tables import EmbeddingTable, name_tables

#: Kinds that put a part of a table on every rank, and kinds that keep a table inside one node.
EVERYWHERE, NODE_KINDS = ("row_wise", "data_parallel"), ("table_row_wise", "table_column_wise")
#: Narrowest shard in columns [-]; docs/formulas.md, table 8.2.
_NARROWEST = 4
#: Least load of a table that is split, over the average load of a rank [-]; docs/formulas.md, table 8.2.
_LARGE = 0.2


class InfeasibleError(ValueError):
    """No placement satisfies the constraints."""


@dataclass(frozen=True)
class Constraints:
    """Constraints by number.

    `units` are tables that are placed as one, `home` is the unit of each table; ranks of units are `pinned`, no two
    units of a group in `apart` share a rank, and a table is not placed in a kind in `forbidden`.
    """

    units: tuple[tuple[int, ...], ...]
    home: tuple[int, ...]
    pinned: dict[int, int]
    apart: tuple[tuple[int, ...], ...]
    forbidden: frozenset[tuple[int, str]]

    def frees(self, table: int, rank: int, plan: Plan) -> bool:
        """Whether a shard of a table may go to a rank while everything else of a plan stays."""
        unit = self.home[table]
        if unit in self.pinned or len(self.units[unit]) > 1:
            return False
        others = {other for group in self.apart if unit in group for other in group} - {unit}
        return all(rank not in plan.placements[t].ranks for other in others for t in self.units[other])


def _find(names: Sequence[str], table: Any, argument: str) -> int:
    """Number of a table that is given by number or name."""
    if isinstance(table, str):
        return names.index(check_choice(f"table of {argument}", table, names))
    return int(check_positive(f"table of {argument}", table, integer=True, zero=True, maximum=len(names) - 1))


def _groups(names: Sequence[str], groups: Any, argument: str) -> list[tuple[int, ...]]:
    """Groups of tables by number."""
    found = []
    for group in groups if isinstance(groups, Iterable) else [groups]:
        listed = () if isinstance(group, str) or not isinstance(group, Iterable) else group
        found.append(tuple(dict.fromkeys(_find(names, table, argument) for table in listed)))
        if len(found[-1]) < 2:
            raise ValueError(f"{argument} has {group!r}; it must be groups of at least two tables, such as [(0, 3)]")
    return found


def read_constraints(
    tables: Sequence[EmbeddingTable],
    ranks: int,
    *,
    pin: Any = None,
    together: Any = (),
    apart: Any = (),
    forbid: Any = (),
) -> Constraints:
    """Check constraints as `perfkit.shard` takes them and bring them into one form."""
    names = name_tables(tables)
    check_type("pin", pin, Mapping | None)
    pinned = {_find(names, table, "pin"): rank for table, rank in (pin or {}).items()}
    for table, rank in pinned.items():
        check_positive(f"rank of {names[table]!r}", rank, integer=True, zero=True, maximum=ranks - 1)
    first = np.arange(len(tables))  # first table of each unit
    for group in _groups(names, together, "together"):
        joined = first[list(group)]
        first[np.isin(first, joined)] = joined.min()
    home = np.unique(first, return_inverse=True)[1].tolist()
    members = np.split(np.argsort(home, kind="stable"), np.cumsum(np.bincount(home))[:-1])
    units, separate, fixed = tuple(tuple(m.tolist()) for m in members), _groups(names, apart, "apart"), dict[int, int]()
    by_table = forbid if isinstance(forbid, Mapping) else dict.fromkeys(range(len(names)), forbid)
    forbidden = {
        (_find(names, table, "forbid"), check_choice("forbidden kind", kind, KINDS))
        for table, kinds in by_table.items()
        for kind in ([kinds] if isinstance(kinds, str) or not isinstance(kinds, Iterable) else kinds)
    }
    for table, rank in pinned.items():
        if fixed.setdefault(home[table], int(rank)) != rank:
            shown = f"pin puts {names[table]!r} on rank {rank} and a table that must share its rank"
            raise InfeasibleError(f"{shown} on rank {fixed[home[table]]}; drop one")
    for group in separate:
        _check_apart(names, group, home, fixed, ranks)
        forbidden |= {(t, kind) for t in group for kind in EVERYWHERE}
    for unit, tied in enumerate(units):
        if len(tied) > 1 or unit in fixed:  # these are whole on one rank
            forbidden |= {(t, kind) for t in tied for kind in KINDS if kind != "table_wise"}
    for table, name in enumerate(names):
        if all((table, kind) in forbidden for kind in KINDS):
            rule = "a table that is pinned or together with others must be table_wise, one apart not on all ranks"
            raise InfeasibleError(f"no kind is left for {name!r}: {rule}; allow another kind")
    by_unit = tuple(tuple(home[t] for t in group) for group in separate)
    return Constraints(units, tuple(home), fixed, by_unit, frozenset(forbidden))


def _check_apart(
    names: Sequence[str], group: tuple[int, ...], home: Sequence[int], fixed: Mapping[int, int], ranks: int
) -> None:
    """Refuse tables that cannot be apart."""
    for one, other in combinations(group, 2):
        pair = f"{names[one]!r} and {names[other]!r}"
        if home[one] == home[other]:
            raise InfeasibleError(f"{pair} must be together and apart; drop one of the two")
        if fixed.get(home[one], -1) == fixed.get(home[other], -2):
            raise InfeasibleError(f"{pair} must be apart and are both pinned to rank {fixed[home[one]]}; move one")
    if len(group) > ranks:
        raise InfeasibleError(f"{len(group)} tables must be apart on {ranks} ranks; take more ranks or fewer tables")


def list_options(problem: Problem, constraints: Constraints) -> Options:
    """List the options of each table, or unit of tables, that are worth a try; whole first where that is allowed.

    Left out is what cannot pay: splits by columns and rows of tables below a fifth of what the average rank carries,
    and copies of tables whose gradient has more than four times the bytes of their pooled rows.
    """
    costs, kinds, capacity, forbidden = problem.costs, problem.kinds, problem.capacity, constraints.forbidden
    tables, ranks, node, additive = costs.workload.tables, costs.ranks, costs.node, problem.objective.kind == "additive"
    every, found = np.arange(len(tables)), []
    rows, dim = np.array([(table.rows, table.dim) for table in tables]).T

    def add(kind: str, members: np.ndarray, parts: int, part: float = 1.0) -> None:
        own = np.array([n for n in members if kind in kinds and (n, kind) not in forbidden], dtype=int)
        width = np.round(dim[own] * part).astype(int) if kind in SPLIT_BY_COLUMNS else 0 * own
        found.append((own, np.full(len(own), kind), np.full(len(own), parts), width, *costs.shards(own, kind, part)))

    add("table_wise", every, 1)
    loads = problem.objective.loads(costs.shards(every, "table_wise")[0])
    limit = (1.0 if additive else _LARGE) * loads.sum(axis=0) / ranks
    limit[-1] = min(limit[-1], _LARGE * capacity) if capacity > 0 else limit[-1]
    whole = np.isin(every, found[0][0])
    large = every[((loads > limit) & (limit > 0)).any(axis=1) | ~whole] if ranks > 1 else every[:0]
    for kind, most in (("column_wise", ranks), ("table_column_wise", node if node < ranks else 0)):
        for count in (2**power for power in range(1, most.bit_length())):
            add(kind, large[dim[large] % (count * _NARROWEST) == 0], count, 1 / count)
    if not additive and ranks > 1:
        add("row_wise", large[rows[large] >= ranks], 0)
        if 1 < node < ranks:
            add("table_row_wise", large[rows[large] >= node], node)
        add("data_parallel", every[costs.worth], 0)
    table, kind_of, parts, width, shard, hot = (np.concatenate(part) for part in zip(*found, strict=True))
    if len(missing := np.setdiff1d(every, table)):
        text = f"no kind is left for {name_tables(tables)[missing[0]]!r}: of {', '.join(kinds)}, what is not forbidden"
        raise InfeasibleError(f"{text} does not suit its shape or the number of ranks; allow another kind")
    unit = np.array(constraints.home)
    order = np.argsort(unit[table], kind="stable")
    together = np.bincount(unit)[unit[table][order]] > 1  # all of these are whole: one option is left, with their sum
    first = np.flatnonzero(~together | (np.diff(unit[table][order], prepend=-1) > 0))
    shard, chosen = np.add.reduceat(shard[order], first, axis=0), order[first]
    return Options(
        unit[table][chosen], kind_of[chosen], parts[chosen], width[chosen], shard, hot[chosen],
        costs.home[table[chosen]],
    )  # fmt: skip


def check_memory(problem: Problem, options: Options, constraints: Constraints) -> None:
    """Refuse tables that no placement could hold: what is short, for which tables, and how many ranks would do."""
    capacity, reserved, ranks = problem.capacity, problem.reserved, problem.costs.ranks
    pinned, tables = constraints.pinned, name_tables(problem.costs.workload.tables)
    names = [repr("+".join(tables[t] for t in unit)) for unit in constraints.units]
    whole, taken = format_bytes(capacity + reserved), format_bytes(max(reserved, 0.0))
    rest = f"of the {whole} of a rank, {taken} are taken by everything else"
    if capacity <= 0:
        advice = "memory is in bytes" if capacity + reserved < 1e6 else "take a smaller batch or more memory"
        raise InfeasibleError(f"memory: nothing is left for tables, {rest}; {advice}")
    starts = np.flatnonzero(np.diff(options.table, prepend=-1))
    alone = options.shard + options.hot * (options.parts > 0)[:, None]
    least, total = (np.minimum.reduceat(problem.objective.loads(costs)[:, -1], starts)
                    for costs in (alone, options.total(ranks)))  # fmt: skip
    large = np.flatnonzero(least > capacity)
    if len(large):
        worst = int(large[np.argmax(least[large])])
        several = (options.table == worst).sum() > 1
        more = f"about {max(ranks + 1, math.ceil(ranks * least[worst] / capacity))} ranks would do"
        shown = ", ".join(names[n] for n in large[:5]) + (f" and {len(large) - 5} more" if len(large) > 5 else "")
        raise InfeasibleError(
            f"memory: {shown} need{'s' if len(large) == 1 else ''} at least {format_bytes(least[worst])} on one rank; "
            f"{rest}; {more if several else 'allow it to be split'}, or more memory, a smaller batch, smaller tables"
        )
    if total.sum() > capacity * ranks:
        raise InfeasibleError(
            f"memory: all tables together need {format_bytes(total.sum())}; {ranks} ranks hold "
            f"{format_bytes(capacity * ranks)} ({rest}); {math.ceil(total.sum() / capacity)} ranks would do; "
            f"the largest are {', '.join(names[n] for n in np.argsort(-total, kind='stable')[:3])}"
        )
    for rank in sorted(set(pinned.values())):
        own = [unit for unit, where in pinned.items() if where == rank]
        if (needed := least[own].sum()) > capacity:
            shown = f"{', '.join(names[unit] for unit in own[:5])} are pinned to rank {rank}"
            raise InfeasibleError(f"memory: {shown} and need {format_bytes(needed)}; {rest}; pin fewer there")
