"""Which placements are allowed and worth a try: constraints on tables, options of each, whether memory can suffice."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from perfkit.ground.units import check_choice, check_positive, check_type, format_bytes
from perfkit.sharding.objective import LOAD, Options, Problem
from perfkit.workloads.placement import EVERYWHERE, KINDS, Plan
from perfkit.workloads.tables import name_tables

#: Kinds that keep a table inside one node.
NODE_KINDS = ("table_row_wise", "table_column_wise")
#: Narrowest shard in columns [-]; docs/formulas.md, table 8.2.
_NARROWEST = 4
#: Least load of a table that is split, over the average load of a rank [-]; docs/formulas.md, table 8.2.
_LARGE = 0.2


class InfeasibleError(ValueError):
    """No placement satisfies the constraints."""


@dataclass(frozen=True, eq=False)
class Constraints:
    """Constraints by number.

    `home` is the unit of each table: tables of a unit are placed as one. Ranks of units are `pinned`, no two units of a
    group in `apart` share a rank, and `allowed` are the tables that may be placed in a kind.
    """

    home: np.ndarray
    pinned: Mapping[int, int]
    apart: tuple[tuple[int, ...], ...]
    allowed: Mapping[str, np.ndarray]

    @cached_property
    def units(self) -> list[list[int]]:
        """Tables of each unit."""
        ends = np.cumsum(np.bincount(self.home))[:-1]
        return [own.tolist() for own in np.split(np.argsort(self.home, kind="stable"), ends)]

    def frees(self, table: int, rank: int, plan: Plan) -> bool:
        """Whether a shard of a table may go to a rank while everything else of a plan stays."""
        unit = self.home[table]
        others = {t for group in self.apart if unit in group for u in group if u != unit for t in self.units[u]}
        tied = unit in self.pinned or len(self.units[unit]) > 1
        return not tied and all(rank not in plan.placements[t].ranks for t in others)


def _find(names: Sequence[str], table: Any, argument: str) -> int:
    """Number of a table that is given by number or name."""
    if isinstance(table, str):
        return names.index(check_choice(f"table of {argument}", table, names))
    return int(check_positive(f"table of {argument}", table, integer=True, zero=True, maximum=len(names) - 1))


def _list(given: Any) -> list[Any]:
    """Several values, or the only one."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _groups(names: Sequence[str], groups: Any, argument: str) -> list[list[int]]:
    """Groups of tables by number."""
    found = []
    for group in _list(groups):
        found.append(list(dict.fromkeys(_find(names, table, argument) for table in _list(group))))
        if len(found[-1]) < 2:
            raise ValueError(f"{argument} has {group!r}; it must be groups of at least two tables, such as [(0, 3)]")
    return found


def read_constraints(
    names: Sequence[str], ranks: int, *, pin: Any = None, together: Any = (), apart: Any = (), forbid: Any = ()
) -> Constraints:
    """Check constraints as `perfkit.shard` takes them and bring them into one form."""
    fixed, groups = dict[int, int](), []
    check_type("pin", pin, Mapping | None)
    first = np.arange(len(names))  # first table of each unit
    for group in _groups(names, together, "together"):
        joined = first[group]
        first[np.isin(first, joined)] = joined.min()
    home = np.unique(first, return_inverse=True)[1]
    for table, rank in (pin or {}).items():
        number = _find(names, table, "pin")
        name, unit = names[number], int(home[number])
        check_positive(f"rank of {name!r}", rank, integer=True, zero=True, maximum=ranks - 1)
        if fixed.setdefault(unit, int(rank)) != rank:
            text = f"pin puts {name!r} on rank {rank} and a table that must share its rank"
            raise InfeasibleError(f"{text} on rank {fixed[unit]}; drop one")
    allowed = {kind: np.ones(len(names), dtype=bool) for kind in KINDS}
    for table, kinds in (forbid if isinstance(forbid, Mapping) else dict.fromkeys(range(len(names)), forbid)).items():
        for kind in _list(kinds):
            allowed[check_choice("forbidden kind", kind, KINDS)][_find(names, table, "forbid")] = False
    for group in _groups(names, apart, "apart"):
        for one, other in combinations(group, 2):
            if home[one] == home[other] or fixed.get(home[one], -1) == fixed.get(home[other], -2):
                pair = f"{names[one]!r} and {names[other]!r}"
                raise InfeasibleError(f"{pair} must be apart and share a rank by together or pin; drop one of the two")
        if len(group) > ranks:
            raise InfeasibleError(f"{len(group)} tables must be apart on {ranks} ranks; take more ranks")
        groups.append(tuple(home[group].tolist()))
        for kind in EVERYWHERE:
            allowed[kind][group] = False
    whole = np.isin(home, list(fixed)) | (np.bincount(home)[home] > 1)  # these lie whole on one rank
    for kind in KINDS:
        allowed[kind] &= ~whole | (kind == "table_wise")
    return Constraints(home, fixed, tuple(groups), allowed)


def list_options(problem: Problem, constraints: Constraints) -> Options:
    """List the options of each table, or unit of tables, that are worth a try; whole first where that is allowed.

    Left out is what cannot pay: splits by columns and rows of tables below a fifth of what the average rank carries,
    and copies of tables whose gradient has more than four times the bytes of their pooled rows.
    """
    costs, capacity, additive = problem.costs, problem.capacity, problem.objective == "additive"
    tables, ranks, node, found = costs.workload.tables, costs.ranks, costs.node, list[tuple[np.ndarray, ...]]()
    rows, dim = np.array([(table.rows, table.dim) for table in tables]).T

    def add(kind: str, members: np.ndarray, parts: int, part: float = 1.0) -> None:
        own = np.flatnonzero(members & constraints.allowed[kind] & (kind in problem.kinds))
        if len(own) or not found:
            loads = map(problem.loads, costs.shards(own, kind, part))
            found.append((own, np.full(len(own), kind), np.full(len(own), parts), *loads))

    add("table_wise", rows > 0, 1)
    loads = problem.loads(costs.shards(np.arange(len(tables)), "table_wise")[0])
    limit = (1.0 if additive else _LARGE) * loads.sum(axis=0) / ranks
    limit[-1] = min(limit[-1], _LARGE * capacity) if capacity > 0 else limit[-1]
    large = ((loads > limit) & (limit > 0)).any(axis=1) | ~constraints.allowed["table_wise"]
    if ranks > 1:
        for kind, most in (("column_wise", ranks), ("table_column_wise", node if node < ranks else 0)):
            for count in (2**power for power in range(1, most.bit_length())):
                add(kind, large & (dim % (count * _NARROWEST) == 0), count, 1 / count)
        add("row_wise", large & (rows >= ranks), 0)
        if 1 < node < ranks:
            add("table_row_wise", large & (rows >= node), node)
        add("data_parallel", costs.worth, 0)
    table, kinds, parts, load, hot = (np.concatenate(part) for part in zip(*found, strict=True))
    if len(missing := np.setdiff1d(np.arange(len(tables)), table)):
        text = f"no kind is left for {name_tables(tables)[missing[0]]!r}: of {', '.join(problem.kinds)}, what no"
        raise InfeasibleError(f"{text} constraint rules out does not suit its shape or the ranks; allow another kind")
    # Tables that are together are whole: one option is left, with their sum.
    order, home = np.argsort(constraints.home[table], kind="stable"), constraints.home
    unit = home[table[order]]
    first = np.flatnonzero((np.bincount(home)[unit] == 1) | (np.diff(unit, prepend=-1) > 0))
    chosen, load = order[first], np.add.reduceat(load[order], first, axis=0)
    return Options(unit[first], kinds[chosen], parts[chosen], load, hot[chosen], costs.home[table[chosen]])


def check_memory(problem: Problem, options: Options, constraints: Constraints) -> None:
    """Refuse tables that no placement could hold: what is short, for which tables, and how many ranks would do."""
    capacity, ranks, tables = problem.capacity, problem.costs.ranks, name_tables(problem.costs.workload.tables)
    names = [repr("+".join(tables[t] for t in unit)) for unit in constraints.units]
    whole, taken = format_bytes(capacity + problem.reserved), format_bytes(max(problem.reserved, 0.0))
    rest, text = f"of the {whole} of a rank, {taken} are taken by everything else", ""
    alone = options.load + options.hot * (options.parts > 0)[:, None]
    least, total = (options.least(loads[:, LOAD["memory"]]) for loads in (alone, options.total(ranks)))
    large, needed, most = np.flatnonzero(least > capacity), total.sum(), least.max()
    if capacity <= 0:
        advice = "memory is in bytes" if capacity + problem.reserved < 1e6 else "take a smaller batch or more memory"
        text = f"nothing is left for tables, {rest}; {advice}"
    elif len(large):
        shown = ", ".join(names[n] for n in large[:5]) + (f" and {len(large) - 5} more" if len(large) > 5 else "")
        would = f"about {max(ranks + 1, math.ceil(ranks * most / capacity))} ranks would do where it may be split"
        need = f"need{'s' if len(large) == 1 else ''} at least {format_bytes(most)} on one rank"
        text = f"{shown} {need}; {rest}; {would}, or give more memory, a smaller batch or smaller tables"
    elif needed > capacity * ranks:
        hold = f"{ranks} ranks hold {format_bytes(capacity * ranks)} ({rest})"
        would = f"{math.ceil(needed / capacity)} ranks would do"
        largest = ", ".join(names[n] for n in np.argsort(-total, kind="stable")[:3])
        text = f"all tables together need {format_bytes(needed)}; {hold}; {would}; the largest are {largest}"
    if text:
        raise InfeasibleError(f"memory: {text}")
