"""What a placement has to keep: tables pinned, together or apart, kinds, memory; contradictions are found early."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from perfkit.sharding.objective import Objective
from perfkit.sharding.options import Option
from perfkit.units import check_choice, format_bytes
from perfkit.workloads.placement import KINDS, Plan
from perfkit.workloads.tables import EmbeddingTable, name_tables

__all__ = ["Constraints", "InfeasibleError", "check_memory", "read_constraints"]

_EVERYWHERE = ("data_parallel", "row_wise")


class InfeasibleError(ValueError):
    """No placement keeps what is asked for."""


@dataclass(frozen=True)
class Constraints:
    """Constraints on tables by number.

    Parameters
    ----------
    units : tuple of tuple of int
        Tables that are placed as one; single ones too.
    pinned : dict of int to int
        Rank by unit.
    apart : tuple of tuple of int
        Units no two of which may share a rank.
    forbidden : frozenset of (int, str)
        Tables and the kinds they may not be placed in.
    """

    units: tuple[tuple[int, ...], ...]
    pinned: dict[int, int]
    apart: tuple[tuple[int, ...], ...]
    forbidden: frozenset[tuple[int, str]]

    def allows(self, table: int, kind: str) -> bool:
        """Whether a table may be placed in a way."""
        return (table, kind) not in self.forbidden

    def frees(self, table: int, rank: int, plan: Plan) -> bool:
        """Whether a shard of a table may go to a rank while everything else of a plan stays."""
        unit = next(u for u, members in enumerate(self.units) if table in members)
        if unit in self.pinned or len(self.units[unit]) > 1:
            return False
        others = {other for group in self.apart if unit in group for other in group} - {unit}
        return all(rank not in plan.placements[t].ranks for other in others for t in self.units[other])


def _find(names: Sequence[str], table: object, argument: str) -> int:
    """Number of a table that is given by number or name."""
    if isinstance(table, str):
        return names.index(check_choice(f"table of {argument}", table, names))
    if isinstance(table, bool) or not isinstance(table, int | np.integer) or not 0 <= table < len(names):
        raise ValueError(f"{argument} names table {table!r}; tables go from 0 to {len(names) - 1}, or by their names")
    return int(table)


def _groups(names: Sequence[str], groups: Any, argument: str) -> list[tuple[int, ...]]:
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        raise ValueError(f"{argument} is {groups!r}; it must be a list of groups of tables, such as [(0, 3), (1, 2)]")
    found = []
    for group in groups:
        if isinstance(group, str) or not isinstance(group, Iterable):
            raise ValueError(f"{argument} has {group!r}; each group must hold at least two tables, such as (0, 3)")
        members = tuple(dict.fromkeys(_find(names, table, argument) for table in group))
        if len(members) < 2:
            raise ValueError(f"{argument} has a group of {len(members)} table; a group must hold at least two")
        found.append(members)
    return found


def _merge(groups: Sequence[tuple[int, ...]], n: int) -> list[tuple[int, ...]]:
    """Groups that share a table as one, and every other table by itself."""
    home = list(range(n))
    for group in groups:
        low = min(home[t] for t in group)
        joined = {home[t] for t in group}
        home = [low if h in joined else h for h in home]
    units: dict[int, list[int]] = {}
    for table, unit in enumerate(home):
        units.setdefault(unit, []).append(table)
    return [tuple(members) for members in units.values()]


def _forbidden(names: Sequence[str], forbid: Any) -> set[tuple[int, str]]:
    given = forbid if isinstance(forbid, Mapping) else {t: forbid for t in range(len(names))}
    out = set()
    for table, kinds in given.items():
        if isinstance(kinds, str):
            kinds = (kinds,)
        if not isinstance(kinds, Iterable):
            raise ValueError(f"forbid is {kinds!r}; it must be kinds, or kinds by table, such as ('row_wise',)")
        out |= {(_find(names, table, "forbid"), check_choice("forbidden kind", kind, KINDS)) for kind in kinds}
    return out


def read_constraints(
    tables: Sequence[EmbeddingTable],
    ranks: int,
    *,
    pin: Any = None,
    together: Any = (),
    apart: Any = (),
    forbid: Any = (),
) -> Constraints:
    """Check constraints and bring them into one form.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        The tables.
    ranks : int
        Number of ranks [-].
    pin : mapping, optional
        Rank by table, for tables that must lie whole on it.
    together, apart : sequence of groups, optional
        Tables, by number or name, that must share a rank, or must not.
    forbid : str, sequence of str or mapping, optional
        Kinds that no table may be placed in, or such kinds by table.

    Returns
    -------
    constraints : Constraints
        The same by numbers.

    Raises
    ------
    ValueError
        For unknown tables and kinds, and ranks that do not exist.
    InfeasibleError
        For constraints that contradict each other.
    """
    names = name_tables(tables)
    if pin is not None and not isinstance(pin, Mapping):
        raise ValueError(f"pin is {pin!r}; it must map tables to ranks, such as {{0: 3}}")
    pinned = {_find(names, table, "pin"): rank for table, rank in (pin or {}).items()}
    for table, rank in pinned.items():
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or not 0 <= rank < ranks:
            raise ValueError(f"pin puts {names[table]!r} on rank {rank!r}; ranks go from 0 to {ranks - 1}")
    units = _merge(_groups(names, together, "together"), len(names))
    home = {table: unit for unit, members in enumerate(units) for table in members}
    separate = _groups(names, apart, "apart")
    forbidden = _forbidden(names, forbid)
    by_unit: dict[int, dict[int, int]] = {}
    for table, rank in pinned.items():
        by_unit.setdefault(home[table], {})[table] = int(rank)
    for ranked in by_unit.values():
        if len(set(ranked.values())) > 1:
            where = ", ".join(f"{names[t]!r} to rank {r}" for t, r in ranked.items())
            raise InfeasibleError(f"pin puts tables that lie together on different ranks: {where}; drop one of them")
    fixed = {unit: next(iter(ranked.values())) for unit, ranked in by_unit.items()}
    for group in separate:
        _check_apart(names, group, home, fixed, ranks)
        forbidden |= {(t, kind) for t in group for kind in _EVERYWHERE}
    for unit, members in enumerate(units):
        if len(members) > 1 or unit in fixed:  # these lie whole on one rank
            forbidden |= {(t, kind) for t in members for kind in KINDS if kind != "table_wise"}
    for table, name in enumerate(names):
        if all((table, kind) in forbidden for kind in KINDS):
            raise InfeasibleError(
                f"no kind is left for {name!r}: what is pinned, together with others or apart from them can only lie "
                "whole or in columns, and the rest is forbidden; allow another kind"
            )
    return Constraints(tuple(units), fixed, tuple(tuple(home[t] for t in g) for g in separate), frozenset(forbidden))


def _check_apart(
    names: Sequence[str], group: tuple[int, ...], home: Mapping[int, int], fixed: Mapping[int, int], ranks: int
) -> None:
    for one, other in combinations(group, 2):
        pair = f"{names[one]!r} and {names[other]!r}"
        if home[one] == home[other]:
            raise InfeasibleError(f"{pair} must lie together and apart; drop one of the two")
        if fixed.get(home[one], -1) == fixed.get(home[other], -2):
            raise InfeasibleError(f"{pair} must lie apart and are both pinned to rank {fixed[home[one]]}; move one")
    if len(group) > ranks:
        raise InfeasibleError(
            f"{len(group)} tables must lie apart on {ranks} ranks; take {len(group)} ranks or fewer tables"
        )


def check_memory(
    objective: Objective,
    options: Sequence[Sequence[Option]],
    names: Sequence[str],
    *,
    ranks: int,
    capacity: float,
    reserved: float,
    pinned: Mapping[int, int],
) -> None:
    """Refuse tables that no placement could hold.

    Parameters
    ----------
    objective : Objective
        Knows which costs are memory.
    options : sequence of sequence of Option
        Ways to place each table.
    names : sequence of str
        What errors call them.
    ranks : int
        Number of ranks [-].
    capacity : float
        Memory of a rank for tables [B].
    reserved : float
        Memory of a rank that everything else takes [B].
    pinned : mapping of int to int
        Rank by table.

    Raises
    ------
    InfeasibleError
        Which resource is short, for which tables, and how many ranks would do.
    """
    whole = format_bytes(capacity + reserved)
    rest = f"of the {whole} of a rank, {format_bytes(max(reserved, 0.0))} are taken by everything else"
    if capacity <= 0:
        advice = "memory is in bytes" if capacity + reserved < 1e6 else "take a smaller batch or more memory"
        raise InfeasibleError(f"memory: nothing is left for tables, {rest}; {advice}")

    def memory(costs: np.ndarray) -> float:
        return float(objective.loads(costs)[-1])

    least = [
        min(max((memory(o.everywhere + s) for s in o.shards), default=memory(o.everywhere)) for o in own)
        for own in options
    ]
    total = [min(memory(o.total(ranks)) for o in own) for own in options]
    large = [n for n, needed in enumerate(least) if needed > capacity]
    if large:
        worst = max(large, key=lambda n: least[n])
        more = max(ranks + 1, math.ceil(ranks * least[worst] / capacity)) if len(options[worst]) > 1 else 0
        advice = f"about {more} ranks would do" if more else "allow it to be split"
        shown = ", ".join(repr(names[n]) for n in large[:5]) + (f" and {len(large) - 5} more" if len(large) > 5 else "")
        raise InfeasibleError(
            f"memory: {shown} need{'s' if len(large) == 1 else ''} at least {format_bytes(least[worst])} on one rank; "
            f"{rest}; {advice}, or more memory, a smaller batch, smaller tables"
        )
    if sum(total) > capacity * ranks:
        largest = sorted(range(len(total)), key=lambda n: -total[n])[:3]
        raise InfeasibleError(
            f"memory: all tables together need {format_bytes(sum(total))}; {ranks} ranks hold "
            f"{format_bytes(capacity * ranks)} ({rest}); {math.ceil(sum(total) / capacity)} ranks would do; "
            f"the largest are {', '.join(repr(names[n]) for n in largest)}"
        )
    for rank in sorted(set(pinned.values())):
        own = [unit for unit, where in pinned.items() if where == rank]
        if (needed := sum(least[unit] for unit in own)) > capacity:
            shown = ", ".join(repr(names[unit]) for unit in own[:5])
            raise InfeasibleError(
                f"memory: {shown} are pinned to rank {rank} and need {format_bytes(needed)}; {rest}; pin fewer there"
            )
