"""Candidate placements of units of tables, and the least loads of all placements for the lower
bound."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from perfkit.ground.hardware import Network
from perfkit.ground.units import Array, format_bytes
from perfkit.sharding.constraints import InfeasibleError
from perfkit.sharding.problem import DEVICE_RESOURCES, Candidates, Floors, Grain, Problem, Resource
from perfkit.workloads.placement_kinds import PLACEMENT_KINDS, WHOLE, PlacementKind, Reduction
from perfkit.workloads.tables import name_tables

#: Columns of a shard are a multiple of this number [-]; docs/formulas.md, table 8.2.
_COLUMNS_AT_A_TIME = 4
#: Smallest load of a table that is split, over the average load of a rank [-]; docs/formulas.md,
#: table 8.2.
_LARGE = 0.2
#: Most multiples of the grain of pooled rows in a shard; largest number of bytes that is known to the
#: byte [-, B].
_MOST_GRAINS, _LARGEST_WHOLE = 64, 2.0**53
#: What sums of equal work may differ by, relative to it [-].
_ROUNDING = 1e-9


class _Joined(NamedTuple):
    """Entries of tables that were joined to entries of units.

    Parameters
    ----------
    unit : array of int
        The unit of each entry, in ascending order [-].
    first_table : array of int
        First table of each entry [-].
    kind : array of str
        Kind of placement [-].
    order : array of int
        The entries of tables, sorted by unit [-].
    first : array of int
        In that order, the first entry of a table for each entry of a unit [-].
    """

    unit: np.ndarray
    first_table: np.ndarray
    kind: np.ndarray
    order: np.ndarray
    first: np.ndarray

    def add_up(self, loads: Sequence[Array]) -> Array:
        """Sums of the loads of tables."""
        sums: Array = np.add.reduceat(np.concatenate(loads)[self.order], self.first, axis=0)
        return sums

    def take_first(self, numbers: Sequence[np.ndarray]) -> np.ndarray:
        """Numbers that all tables of a unit share."""
        return np.concatenate(numbers)[self.order[self.first]]


class _Loads(NamedTuple):
    """Loads of one shard of some tables, shape (tables, resources).

    Parameters
    ----------
    shard : array
        Load of a shard without the most popular row [s or B].
    hot_row : array
        What the most popular row adds [s or B].
    """

    shard: Array
    hot_row: Array


def fill_blocks(rows: Array, blocks: int) -> np.ndarray:
    """Which tables of so many rows have some for each of the blocks that `Placement.cut` makes.

    The kernels of TorchRec fail on a shard without rows. 12 rows on 8 ranks are 6 blocks of 2, and 2
    ranks would have none.
    """
    height = np.ceil(rows / blocks)
    return np.asarray((blocks - 1) * height < rows)


@dataclass(eq=False)
class _EntriesOfTables:
    """Ways to place tables, which are listed kind by kind."""

    problem: Problem
    tables: list[np.ndarray] = field(default_factory=list)
    kinds: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        shapes = [(table.rows, table.dim) for table in self.problem.costs.workload.tables]
        # as floats: their products may pass the largest whole number
        self.rows, self.columns = np.array(shapes, dtype=float).T
        self.most_column_shards = self.problem.constraints.count_column_shards(self.columns)
        self.whole = self.find_loads(WHOLE.name, np.arange(len(shapes))).shard

    def select(self, kind: str, members: np.ndarray) -> np.ndarray:
        """Those of the tables `members` that may be placed by a kind, as numbers."""
        if kind not in self.problem.kinds:
            return np.zeros(0, dtype=int)
        return np.flatnonzero(members & self.problem.constraints.allowed[kind])

    def find_loads(self, kind: str, tables: np.ndarray, share: float | Array = 1.0) -> _Loads:
        """Loads of a shard of each of these tables, which has a share of the columns."""
        costs = self.problem.costs.shards(tables, kind, share)
        return _Loads(self.problem.find_loads(costs.shard), self.problem.find_loads(costs.hot_row))

    def note(self, kind: str, tables: np.ndarray) -> None:
        """Add an entry for each of these tables."""
        self.tables.append(tables)
        self.kinds.append(np.full(len(tables), kind))

    def find_large(self) -> np.ndarray:
        """Which tables are so large that it may help to split them."""
        problem = self.problem
        share = _LARGE if problem.objective.has_messages else 1.0
        limit = share * self.whole.sum(axis=0) / problem.costs.ranks
        if problem.capacity > 0:
            most_memory = _LARGE * problem.capacity
            limit[Resource.MEMORY] = min(limit[Resource.MEMORY], most_memory)
        exceeds = (self.whole > limit) & (limit > 0)
        return np.asarray(exceeds.any(axis=1))

    def is_too_narrow(self, table: int) -> bool:
        """Whether a table could be split by columns if shards had fewer than they must."""
        return bool(self.most_column_shards[table] < 2 <= self.columns[table])

    def join(self) -> _Joined:
        """Entries of units.

        Tables of one unit are whole, so a unit of several has one entry: the sum of theirs.
        """
        unit_of_table = self.problem.constraints.unit_of_table
        table = np.concatenate(self.tables)
        kind = np.concatenate(self.kinds)
        self._check_all_placed(table)
        order = np.argsort(unit_of_table[table], kind="stable")
        unit = unit_of_table[table[order]]
        has_one_table = np.bincount(unit_of_table)[unit] == 1
        begins_unit = np.diff(unit, prepend=-1) > 0
        first = np.flatnonzero(has_one_table | begins_unit)
        chosen = order[first]
        return _Joined(unit[first], table[chosen], kind[chosen], order, first)

    def _check_all_placed(self, placed: np.ndarray) -> None:
        """Refuse tables that have no entry."""
        tables = self.problem.costs.workload.tables
        missing = np.setdiff1d(np.arange(len(tables)), placed)
        if len(missing):
            name = name_tables(tables)[missing[0]]
            text = f"no kind is left for {name!r}: constraints rule out some of"
            text += f" {', '.join(self.problem.kinds)}, and the others do not fit its shape or the ranks"
            advice = "allow another kind"
            least = self.problem.constraints.min_columns
            if least is not None and self.is_too_narrow(missing[0]):
                advice += f", or fewer than {least[missing[0]]} min_columns"
            raise InfeasibleError(f"{text}; {advice}")


@dataclass(eq=False)
class _CandidateList(_EntriesOfTables):
    """Candidates of tables, as they are listed."""

    helpful: Mapping[str, np.ndarray] = field(default_factory=dict)
    shards: list[np.ndarray] = field(default_factory=list)
    everywhere: list[np.ndarray] = field(default_factory=list)
    shard_load: list[Array] = field(default_factory=list)
    hot_row_load: list[Array] = field(default_factory=list)

    def with_helpful(self, kind: PlacementKind, members: np.ndarray) -> np.ndarray:
        """These tables, and those that a kind may help although it rarely does."""
        wanted_units = self.helpful.get(kind.name)
        if wanted_units is None:
            return members
        return np.asarray(members | wanted_units[self.problem.constraints.unit_of_table])

    def add(self, kind: PlacementKind, members: np.ndarray, shards: int) -> None:
        """Add placements of a kind into so many shards, for those of these tables that may have
        it."""
        if kind.splits_rows:
            members = members & fill_blocks(self.rows, shards)
        tables = self.select(kind.name, members)
        if not len(tables) and self.tables:
            return
        share = 1.0 / shards if kind.splits_columns else 1.0
        loads = self.find_loads(kind.name, tables, share)
        self.note(kind.name, tables)
        self.shards.append(np.full(len(tables), shards))
        self.everywhere.append(np.full(len(tables), kind.is_everywhere))
        self.shard_load.append(loads.shard)
        self.hot_row_load.append(loads.hot_row)


def list_candidates(
    problem: Problem, helpful: Mapping[str, np.ndarray] | None = None
) -> Candidates:
    """List the candidates of each unit of tables that may help; whole on one rank comes first where
    that is allowed.

    What rarely helps is left out: splits of tables below a fifth of the average load of a rank, and
    copies of tables whose gradient has more than four times the bytes of their pooled rows. It is
    tried where `helpful` names it: by kind, which units of tables the relaxed problem places so.
    Splits by rows that leave a rank without rows are never tried.
    """
    costs = problem.costs
    entries = _CandidateList(problem, helpful=helpful or {})
    everything = np.ones(len(costs.workload.tables), dtype=bool)
    large = entries.find_large() | ~problem.constraints.allowed[WHOLE.name]
    for kind in PLACEMENT_KINDS:
        if kind.is_inside_node and not costs.has_inner_nodes:
            continue
        if kind.is_whole:
            entries.add(kind, everything, shards=1)
        elif kind.is_copied:
            # a copy on the only rank is the table itself, with dense gradients
            copied = costs.worth_copying if costs.ranks > 1 else ~everything
            entries.add(kind, entries.with_helpful(kind, copied), costs.ranks)
        elif costs.ranks == 1:
            continue
        elif kind.splits_columns:
            _add_column_splits(entries, kind, entries.with_helpful(kind, large))
        elif kind.splits_rows:
            entries.add(kind, entries.with_helpful(kind, large), costs.count_parts(kind))
    joined = entries.join()
    return Candidates(
        joined.unit,
        joined.kind,
        joined.take_first(entries.shards),
        joined.take_first(entries.everywhere),
        joined.add_up(entries.shard_load),
        joined.add_up(entries.hot_row_load),
        costs.hot_row_rank[joined.first_table],
    )


def _add_column_splits(entries: _CandidateList, kind: PlacementKind, members: np.ndarray) -> None:
    """Add splits by columns into 2, 4, 8 … shards, as far as these are not too narrow."""
    for shards in _list_powers_of_two(entries.problem.costs.count_parts(kind)):
        divides = entries.columns % (shards * _COLUMNS_AT_A_TIME) == 0
        wide_enough = entries.most_column_shards >= shards
        entries.add(kind, members & divides & wide_enough, shards)


def _list_powers_of_two(most: int) -> list[int]:
    """2, 4, 8 … up to a number."""
    return [2**power for power in range(1, most.bit_length())]


def find_grain(nbytes: Array) -> float | None:
    """Largest common divisor of these bytes; None if they are no whole numbers, or if it is too small
    to make a difference [B]."""
    if (nbytes != np.floor(nbytes)).any() or not nbytes.any() or nbytes.max() > _LARGEST_WHOLE:
        return None
    grain = float(np.gcd.reduce(nbytes.astype(int)))
    return grain if nbytes.max() <= _MOST_GRAINS * grain else None


@dataclass(eq=False)
class _FloorList(_EntriesOfTables):
    """Least loads of tables, as they are listed."""

    average: list[Array] = field(default_factory=list)
    everywhere: list[Array] = field(default_factory=list)
    largest: list[Array] = field(default_factory=list)
    breaks: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        #: Bytes of pooled rows of which whole tables have multiples; None if they may be any [B].
        self.grain = self.find_grain()
        #: Loads of each table if all of its shards were the lightest, see `Floors`.
        self.lightest = self.whole.copy()

    @property
    def has_large(self) -> bool:
        """Whether a table takes half as long as an average rank."""
        seconds = self.whole[:, DEVICE_RESOURCES]
        average = seconds.sum(axis=0) / self.problem.costs.ranks
        return bool((seconds > average / 2).any())

    def is_faster(self, average: Array) -> np.ndarray:
        """Which tables take the average rank less in a pass than where they are whole."""
        whole = self.whole[:, DEVICE_RESOURCES] / self.problem.costs.ranks
        return np.asarray((average[:, DEVICE_RESOURCES] < whole * (1 - _ROUNDING)).any(axis=1))

    def note_lightest(self, tables: np.ndarray, loads: Array) -> None:
        """Lower the loads of these tables if all of their shards were the lightest."""
        self.lightest[tables] = np.minimum(self.lightest[tables], loads)

    def find_grain(self) -> float | None:
        """Grain of the pooled rows of whole tables; None where there is none, or where a table may be
        split by columns, or exchanges rows that are not pooled [B]."""
        if self.can_be_split_by_columns().any() or not self.problem.costs.is_pooled.all():
            return None
        return find_grain(self.whole[:, Resource.POOLED])

    def can_be_split_by_columns(self) -> np.ndarray:
        """Which tables may have several shards by columns."""
        may_be = np.zeros(len(self.columns), dtype=bool)
        for kind in PLACEMENT_KINDS:
            if kind.splits_columns and kind.name in self.problem.kinds:
                may_be |= self.problem.constraints.allowed[kind.name]
        return may_be & (self.most_column_shards > 1)

    def breaks_grain(self, kind: PlacementKind) -> np.ndarray:
        """Which tables have shards whose pooled rows are no multiples of the grain."""
        if (
            self.grain is None
            or not kind.splits_rows
            or kind.reduction is Reduction.SUMS_OF_ALL_RANKS
        ):
            return np.zeros(len(self.rows), dtype=bool)
        parts = self.problem.costs.count_parts(kind)
        return np.asarray(self.whole[:, Resource.POOLED] % (parts * self.grain) > 0)

    def add(self, kind: PlacementKind, members: np.ndarray, floors: "_FloorsOfTables") -> None:
        """Add placements of a kind for those of these tables that may have it."""
        tables = self.select(kind.name, members)
        if not len(tables) and self.tables:
            return
        self.note(kind.name, tables)
        self.average.append(floors.average[tables])
        self.everywhere.append(floors.everywhere[tables])
        self.largest.append(floors.largest[tables])
        self.breaks.append(self.breaks_grain(kind)[tables])

    def join_floors(self) -> Floors:
        """Least loads of units."""
        joined = self.join()
        grain = None
        if self.grain is not None:
            grain = Grain(self.grain, joined.take_first(self.breaks), self.find_least_partial())
        lightest = None
        if self.has_large:
            units = self.problem.constraints.units
            lightest = np.array([self.lightest[members].sum(axis=0) for members in units])
        return Floors(
            joined.unit,
            joined.kind,
            joined.add_up(self.average),
            joined.add_up(self.everywhere),
            joined.add_up(self.largest),
            grain,
            lightest,
        )

    def find_least_partial(self) -> float:
        """See `Grain`."""
        least = np.inf
        for kind in PLACEMENT_KINDS:
            tables = self.select(kind.name, self.breaks_grain(kind))
            if len(tables):
                least = min(least, float(self.whole[tables, Resource.POOLED].min()))
        return least


class _FloorsOfTables(NamedTuple):
    """Least loads of one kind of placement of each table, shape (tables, resources).

    Parameters
    ----------
    average, everywhere, largest : array
        See `Floors` [s or B].
    """

    average: Array
    everywhere: Array
    largest: Array


def list_floors(problem: Problem) -> Floors:
    """List the least loads of every kind of placement of each unit of tables, for the lower bound.

    Under one kernel of a GPU for all tables, splits of a table mostly add work. Those of a small one
    that do have no price of their own: only the messages of a split by rows are others. Those of which
    more lies in a cache may take less, and are listed with their prices.
    """
    costs = problem.costs
    floors = _FloorList(problem)
    everything = np.ones(len(costs.workload.tables), dtype=bool)
    priced = everything
    if costs.one_kernel_for_all:
        priced = floors.find_large()
    # Small tables have no largest shard that counts, and splits that cost as much as they do as a
    # whole are left out beside it.
    largest = np.where(priced[:, None], floors.whole, 0.0)
    split = priced | ~problem.constraints.allowed[WHOLE.name]
    nowhere = np.zeros_like(floors.whole)
    for kind in PLACEMENT_KINDS:
        if kind.is_whole:
            whole = _FloorsOfTables(floors.whole / costs.ranks, nowhere, largest)
            floors.add(kind, everything, whole)
        elif kind.splits_columns:
            _add_floors_of_columns(floors, kind, priced, split)
        elif kind.reduction is Reduction.SUMS_OF_ALL_RANKS:
            _add_floors_of_rows(floors, kind, priced, everything)
        elif kind.splits_rows:
            _add_floors_of_rows(floors, kind, priced, split)
        elif kind.is_copied:
            copies = np.zeros_like(floors.whole)
            copied = floors.select(kind.name, everything)
            copies[copied] = floors.find_loads(kind.name, copied).shard
            floors.add(kind, everything, _FloorsOfTables(copies, copies, copies))
    return floors.join_floors()


def _add_floors_of_columns(
    floors: _FloorList, kind: PlacementKind, priced: np.ndarray, members: np.ndarray
) -> None:
    """Add the least loads of splits by columns.

    The parts of a split look up the same rows, and each reads all indices. Together they cost no
    less than the whole table or equal parts, whichever is less for a resource. The largest part has
    at least the columns of an even split into as many parts as there may be.
    """
    ranks, most = floors.problem.costs.ranks, floors.problem.costs.count_parts(kind)
    average = floors.whole / ranks
    largest = np.zeros_like(floors.whole)
    tables = floors.select(kind.name, np.ones(len(priced), dtype=bool))
    largest[tables] = floors.whole[tables]
    can_be_split = floors.most_column_shards > 1
    divisible = tables[can_be_split[tables]]
    for shards in (*_list_powers_of_two(most), most):
        if not len(divisible) or shards == 1:
            continue
        columns = floors.columns[divisible]
        parts = np.minimum(floors.most_column_shards[divisible], shards)
        width = np.ceil(columns / parts)
        share = width / columns
        shard = floors.find_loads(kind.name, divisible, share).shard
        average_of_shards = shard / share[:, None] / ranks
        average[divisible] = np.minimum(average[divisible], average_of_shards)
        largest[divisible] = np.minimum(largest[divisible], shard)
    nowhere = np.zeros_like(floors.whole)
    floors.note_lightest(divisible, average[divisible] * ranks)
    members = members | floors.is_faster(average)
    floors.add(kind, members & can_be_split, _FloorsOfTables(average, nowhere, largest))


def _add_floors_of_rows(
    floors: _FloorList, kind: PlacementKind, priced: np.ndarray, members: np.ndarray
) -> None:
    """Add the least loads of splits by rows."""
    ranks, parts = floors.problem.costs.ranks, floors.problem.costs.count_parts(kind)
    average = floors.whole / ranks
    everywhere = np.zeros_like(floors.whole)
    largest = np.zeros_like(floors.whole)
    # rows that are not pooled are exchanged as those of whole tables are
    is_pooled = floors.problem.costs.is_pooled
    pooled = np.where(is_pooled, floors.whole[:, Resource.POOLED], 0.0)
    if (
        kind.reduction is Reduction.SUMS_OF_ALL_RANKS
    ):  # each rank has partial sums of the whole batch
        average[is_pooled, Resource.POOLED] = 0.0
        average[:, Resource.ROWS] = pooled
    else:  # each rank of a node has them
        average[:, Resource.PARTIAL] = pooled * parts / ranks
        largest[:, Resource.PARTIAL] = pooled
    divisible = floors.rows >= parts
    any_size = floors.select(kind.name, divisible)
    loads = floors.find_loads(kind.name, any_size)
    average_of_split = average.copy()
    average_of_split[any_size] = (parts * loads.shard + loads.hot_row) / ranks
    priced = priced | floors.is_faster(average_of_split)
    is_priced = priced[any_size]
    tables = any_size[is_priced]
    average[tables] = average_of_split[tables]
    if parts == ranks:
        everywhere[tables] = loads.shard[is_priced]
    largest[tables] = (loads.shard + loads.hot_row)[is_priced]
    members = members | floors.is_faster(average)
    floors.add(kind, members & divisible, _FloorsOfTables(average, everywhere, largest))
    if not floors.has_large:
        return
    if kind.reduction is Reduction.SUMS_OF_ALL_RANKS:
        # rows that are not pooled are exchanged, but their seconds are those of every rank
        unpooled = floors.select(kind.name, divisible & ~is_pooled)
        without_seconds = floors.lightest[unpooled]
        without_seconds[:, DEVICE_RESOURCES] = 0.0
        floors.note_lightest(unpooled, without_seconds)
    if everywhere.any():
        return
    floors.note_lightest(any_size, parts * loads.shard)


def check_memory(problem: Problem, candidates: Candidates) -> None:
    """Refuse tables that no placement can hold; the error says how many ranks would do."""
    capacity, ranks = problem.capacity, problem.costs.ranks
    reserved = format_bytes(problem.reserved)
    memory = format_bytes(problem.memory)
    rest = f"of the {memory} of a rank, {reserved} are taken by everything else"
    if problem.kept_free:
        rest += f" ({format_bytes(problem.kept_free)} of it by reserve)"
    if capacity <= 0:
        raise InfeasibleError(
            f"memory: nothing is left for tables; {rest}; give more bytes, or a smaller batch"
        )
    names = _name_units(problem)
    # the most popular row of a table on every rank adds no memory
    first_shard = candidates.shard_load[:, Resource.MEMORY].copy()
    searched = ~candidates.on_every_rank
    first_shard[searched] += candidates.hot_row_load[searched, Resource.MEMORY]
    least_of_shard = candidates.least_of_units(first_shard)
    largest = int(np.argmax(least_of_shard))
    needed = least_of_shard[largest]
    if needed > capacity:
        enough_ranks = round_to_nodes(
            max(ranks + 1, math.ceil(ranks * needed / capacity)), problem.costs.platform.network
        )
        need = f"{names[largest]} needs at least {format_bytes(needed)} on one rank"
        would = f"about {enough_ranks} ranks would do if it may be split"
        advice = "or give more memory, fewer min_columns, a smaller batch or smaller tables"
        advice += _advise_host(problem)
        raise InfeasibleError(f"memory: {need}; {rest}; {would}, {advice}")
    least_of_unit = candidates.least_of_units(candidates.total_load[:, Resource.MEMORY])
    needed = least_of_unit.sum()
    if needed > capacity * ranks:
        hold = f"{ranks} ranks hold {format_bytes(capacity * ranks)} ({rest})"
        by_size = np.argsort(-least_of_unit, kind="stable")
        largest_names = ", ".join(names[unit] for unit in by_size[:3])
        enough_ranks = round_to_nodes(math.ceil(needed / capacity), problem.costs.platform.network)
        text = f"{enough_ranks} ranks would do; the largest are {largest_names}"
        raise InfeasibleError(
            f"memory: all tables together need {format_bytes(needed)}; {hold}; {text}{_advise_host(problem)}"
        )


def round_to_nodes(ranks: int, network: Network) -> int:
    """The next number of ranks that somebody has: a power of two in a node, or whole nodes.

    Parameters
    ----------
    ranks : int
        Ranks that are needed [-].
    network : Network
        With the ranks of a node.

    Returns
    -------
    ranks : int
        As many or more [-].

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> network = load_platform("h100-sxm-8").network
    >>> [round_to_nodes(ranks, network) for ranks in (1, 3, 5, 8, 13, 17)]
    [1, 4, 8, 8, 16, 24]
    """
    of_node = network.ranks_per_node
    if ranks >= of_node:
        return of_node * math.ceil(ranks / of_node)
    return min(of_node, 2 ** math.ceil(math.log2(ranks)))


def _advise_host(problem: Problem) -> str:
    """The advice to put tables into host memory, where a GPU has one that is known."""
    costs = problem.costs
    if not costs.accelerated or not costs.fused:
        return ""
    if all(table.host_bytes for table in costs.workload.tables):
        return ""
    return (
        ", or put large tables into host memory: kernel='uvm_caching', or kernels=('fused', "
        "'uvm_caching') of pk.shard and pk.judge_plan"
    )


def _name_units(problem: Problem) -> list[str]:
    """Name of each unit, from those of its tables."""
    tables = name_tables(problem.costs.workload.tables)
    names = []
    for members in problem.constraints.units:
        names.append(repr("+".join(tables[table] for table in members)))
    return names
