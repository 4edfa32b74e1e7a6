"""Constraints of a placement as people write them: pins, groups, forbidden kinds, and the least
columns of a shard."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from perfkit.ground.units import check_choice, check_positive, check_type, is_listed, show
from perfkit.readers.planner_statistics import SHARDING_TYPES
from perfkit.sharding.problem import Constraints
from perfkit.workloads.placement_kinds import KINDS, PLACEMENT_KINDS
from perfkit.workloads.torchrec_format import UNPOOLED_KINDS

#: Least columns of a shard by default [-]: ``MIN_CW_DIM`` of TorchRec's planner, 128 today and 32 in
#: old versions (pytorch/torchrec, torchrec/distributed/planner/constants.py).
MIN_COLUMNS = 128


class InfeasibleError(ValueError):
    """No placement satisfies the constraints."""


def _find_table(names: Sequence[str], table: Any, argument: str) -> int:
    """Number of a table, which is given by number or name."""
    text = f"table of {argument}"
    if isinstance(table, str):
        return names.index(check_choice(text, table, names))
    last = len(names) - 1
    return int(check_positive(text, table, integer=True, zero=True, maximum=last))


def _as_list(values: Any) -> list[Any]:
    """A list of the values, or of the only one."""
    return list(values) if is_listed(values) else [values]


def _read_groups(names: Sequence[str], groups: Any, argument: str) -> list[list[int]]:
    """Groups of tables by number."""
    read = []
    for group in _as_list(groups):
        tables = [_find_table(names, table, argument) for table in _as_list(group)]
        numbers = list(dict.fromkeys(tables))
        if len(numbers) < 2:
            raise ValueError(
                f"{argument} has {group!r}; it must be groups of at least two tables, such as [(0, 3)]"
            )
        read.append(numbers)
    return read


def read_constraints(
    names: Sequence[str],
    ranks: int,
    order: np.ndarray | None = None,
    *,
    pin: Any = None,
    together: Any = (),
    apart: Any = (),
    forbid: Any = (),
    min_columns: Any = MIN_COLUMNS,
    beyond_device: np.ndarray | None = None,
    unpooled: np.ndarray | None = None,
) -> Constraints:
    """Check the constraints of `perfkit.shard`; returns them with tables by number.

    `order` lists the tables as units are numbered, so that the order in which tables were given does
    not matter; by default they are numbered as given. Tables `beyond_device` memory are not copied:
    gradients of copies are averaged in device memory. Tables whose rows are `unpooled` have only the kinds
    that an ``EmbeddingCollection`` of TorchRec takes.
    """
    check_type("pin", pin, Mapping | None)
    unit_of_table = _join_tables(names, order, together)
    pinned = _read_pins(names, ranks, unit_of_table, pin or {})
    allowed = _read_forbidden(names, forbid)
    groups = []
    for group in _read_groups(names, apart, "apart"):
        _check_apart(names, ranks, unit_of_table, pinned, group)
        groups.append(tuple(unit_of_table[group].tolist()))
        for kind in PLACEMENT_KINDS:
            if kind.is_everywhere:
                allowed[kind.name][group] = False
    tables_of_unit = np.bincount(unit_of_table)[unit_of_table]
    must_be_whole = np.isin(unit_of_table, list(pinned)) | (tables_of_unit > 1)
    for kind in PLACEMENT_KINDS:
        if not kind.is_whole:
            allowed[kind.name] &= ~must_be_whole
        if kind.is_copied and beyond_device is not None:
            allowed[kind.name] &= ~beyond_device
        if kind.name not in UNPOOLED_KINDS and unpooled is not None:
            allowed[kind.name] &= ~unpooled
    least = read_min_columns(names, min_columns)
    return Constraints(unit_of_table, pinned, tuple(groups), allowed, least)


def read_min_columns(names: Sequence[str], min_columns: Any) -> np.ndarray:
    """Least columns of a shard of each table; a mapping gives them by table, and the others have
    `MIN_COLUMNS`."""
    if not isinstance(min_columns, Mapping):
        least = check_positive("min_columns", min_columns, integer=True)
        return np.full(len(names), least)
    columns = np.full(len(names), MIN_COLUMNS)
    for table, value in min_columns.items():
        number = _find_table(names, table, "min_columns")
        least = check_positive(f"min_columns of {names[number]!r}", value, integer=True)
        columns[number] = least
    return columns


def _join_tables(names: Sequence[str], order: np.ndarray | None, together: Any) -> np.ndarray:
    """Unit of each table; those of a group in `together` are one."""
    # position of the first table of the unit of each table
    first = np.arange(len(names)) if order is None else np.argsort(order)
    for group in _read_groups(names, together, "together"):
        joined = first[group]
        first[np.isin(first, joined)] = joined.min()
    return np.unique(first, return_inverse=True)[1]


def _read_pins(
    names: Sequence[str], ranks: int, unit_of_table: np.ndarray, pin: Mapping[Any, Any]
) -> dict[int, int]:
    """Rank of each unit that has a given rank."""
    pinned = dict[int, int]()
    for table, rank in pin.items():
        number = _find_table(names, table, "pin")
        name, unit = names[number], int(unit_of_table[number])
        check_positive(f"rank of {name!r}", rank, integer=True, zero=True, maximum=ranks - 1)
        if unit in pinned and pinned[unit] != rank:
            text = (
                f"pin puts {name!r} on rank {rank} and a table that must share its rank on rank "
                f"{pinned[unit]}"
            )
            raise InfeasibleError(f"{text}; drop one of the two")
        pinned[unit] = int(rank)
    return pinned


def _read_forbidden(names: Sequence[str], forbid: Any) -> dict[str, np.ndarray]:
    """Which tables may be placed by each kind."""
    allowed = {kind: np.ones(len(names), dtype=bool) for kind in KINDS}
    for table, kinds in _list_forbidden(len(names), forbid):
        for kind in _as_list(kinds):
            if isinstance(kind, str) and SHARDING_TYPES.get(kind) in KINDS:
                raise ValueError(
                    f"forbidden kind is {show(kind)}, which TorchRec prints for {SHARDING_TYPES[kind]}; "
                    "take that name"
                )
            check_choice("forbidden kind", kind, KINDS)
            allowed[kind][_find_table(names, table, "forbid")] = False
    return allowed


def _list_forbidden(tables: int, forbid: Any) -> Iterator[tuple[Any, Any]]:
    """Each table with the kinds that are forbidden for it."""
    if isinstance(forbid, Mapping):
        yield from forbid.items()
        return
    for table in range(tables):
        yield table, forbid


def _check_apart(
    names: Sequence[str],
    ranks: int,
    unit_of_table: np.ndarray,
    pinned: Mapping[int, int],
    group: Sequence[int],
) -> None:
    """Refuse a group of tables that cannot be apart."""
    for first, second in combinations(group, 2):
        first_unit, second_unit = unit_of_table[first], unit_of_table[second]
        both_pinned = first_unit in pinned and second_unit in pinned
        on_one_rank = both_pinned and pinned[first_unit] == pinned[second_unit]
        if first_unit == second_unit or on_one_rank:
            pair = f"{names[first]!r} and {names[second]!r}"
            raise InfeasibleError(
                f"{pair} must be apart, but together or pin puts them on one rank; drop one"
            )
    if len(group) > ranks:
        raise InfeasibleError(
            f"{len(group)} tables must be apart on {ranks} ranks; take more ranks"
        )
