"""Tables and the plan of what the planner of TorchRec prints."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfkit.ground.callers import find_stacklevel
from perfkit.ground.files import reading
from perfkit.ground.units import check_positive, escape, format_bytes, show
from perfkit.readers.planner_statistics import (
    ROUNDING,
    SHARDING_TYPES,
    PlannedTable,
    PlannerStatistics,
    is_list_of_lines,
    name_source,
    read_planner_statistics,
)
from perfkit.readers.torchrec_tables import (
    TorchrecTable,
    find_kernel,
    list_notes,
)
from perfkit.workloads.placement import MOST_RANKS, Plan
from perfkit.workloads.table_kernels import TABLE_KERNELS
from perfkit.workloads.tables import EmbeddingTable, TableSet, list_tables
from perfkit.workloads.torchrec_format import KERNELS, read_kernel

#: What to do with a plan whose kernels have no price.
_WITHOUT_KERNELS = (
    "pass read_plan(log, tables=), a plan without kernels, to price those of the tables"
)
_COLUMN_WISE = ("column_wise", "table_column_wise")
#: Compute kernels whose tables are wholly in the memories that are printed.
_WHOLLY_STORED = ("dense", "fused", "fused_uvm", "fused_uvm_caching")


def list_tables_of(
    statistics: PlannerStatistics, *, itemsize: int | None = None, origin: str = "text"
) -> tuple[list[EmbeddingTable], list[str]]:
    """Tables of printed statistics, in their order.

    Parameters
    ----------
    statistics : PlannerStatistics
        The statistics.
    itemsize : int, optional
        Bytes of one number where the printed weights do not tell, otherwise 4 [B].
    origin : str, optional
        Name of the text in errors.

    Returns
    -------
    tables : list of EmbeddingTable
        One for each line; `EmbeddingTable.module` has its module.
    notes : list of str
        What is assumed or left out, in words.

    Raises
    ------
    ValueError
        For statistics without sizes, and for tables that take less storage than their numbers.
    """
    found = _make_tables(statistics, itemsize, origin)
    sizes = _find_itemsizes(statistics)
    notes = []
    if statistics.ignored:
        listed = ", ".join(map(show, statistics.ignored))
        notes.append(f"columns that are not read: {escape(listed, 400)}")
    if itemsize is None and not sizes and not _find_mixed_sizes(statistics, sizes):
        notes.append("the size of numbers is not printed, and 4 B (FP32) are taken; pass itemsize=")
    if all(table.lookups == (table.features or 1) for table in statistics.tables):
        notes.append(
            "each feature has 1 lookup a sample, which TorchRec takes without ParameterConstraints"
        )
    tables = [one.table for one in found]
    for printed, table in zip(statistics.tables, tables, strict=True):
        _check_storage(printed, table)
    return tables, notes + list_notes(found)


def _make_tables(
    statistics: PlannerStatistics, itemsize: int | None, origin: str
) -> list[TorchrecTable]:
    """The tables of the statistics, whose numbers have the printed size, this one, or 4 B."""
    sizes = _find_itemsizes(statistics)
    sizes_of_tables = _find_mixed_sizes(statistics, sizes)
    found = []
    for number, printed in enumerate(statistics.tables):
        if printed.rows is None or printed.dim is None:
            raise ValueError(
                f"{origin} has no columns Emb Dim and Hash Size, as in TorchRec of 2022; read the "
                "tables from the model or its configurations, and the plan by read_plan(log, tables=)"
            )
        module, _, name = printed.path.rpartition(".")
        features = printed.features or 1
        kernel = find_kernel(printed.kernel)
        size = sizes.get(printed.kernel or "", itemsize or 4)
        with reading(printed.place, "change the table"):
            table = EmbeddingTable(
                printed.rows,
                printed.dim,
                pooling=float(features) if printed.lookups is None else printed.lookups,
                itemsize=sizes_of_tables.get(number, size),
                name=name,
                module=module,
                kernel=kernel,
                load_factor=printed.load_factor if TABLE_KERNELS[kernel].has_cache else None,
                weighted=bool(printed.is_weighted),
                pooled=printed.is_pooled is not False,
                num_features=features,
            )
        has_lookups = printed.lookups is not None
        found.append(TorchrecTable(table, has_lookups, printed.kernel))
    return found


def _find_itemsizes(statistics: PlannerStatistics) -> dict[str, int]:
    """Bytes of one number by compute kernel, where the printed weights tell them [B].

    Weights of copies (``dense``) are left out, as each rank counts its own.
    """
    numbers: dict[str, int] = {}
    for table in statistics.tables:
        kernel = table.kernel or ""
        numbers[kernel] = numbers.get(kernel, 0) + (table.rows or 0) * (table.dim or 0)
    sizes = {}
    for kernel, nbytes in statistics.weights.items():
        for size in (1, 2, 4, 8):
            difference = abs(size * numbers.get(kernel, 0) - nbytes)
            if kernel != "dense" and nbytes > 0 and difference <= ROUNDING:
                sizes[kernel] = size
    known = set(sizes.values())
    if len(known) == 1:
        return dict.fromkeys(numbers, known.pop())
    return sizes


def _find_mixed_sizes(statistics: PlannerStatistics, sizes: Mapping[str, int]) -> dict[int, int]:
    """Bytes of one number by table, where those of a compute kernel have several sizes [B].

    Storage holds more than weights, so that it bounds the size of numbers of a table. The largest ones
    that it allows are right if they add up to the printed weights of the kernel.
    """
    found = {}
    for kernel, nbytes in statistics.weights.items():
        if kernel in sizes or kernel not in _WHOLLY_STORED or kernel == "dense":
            continue
        largest = {}
        total = 0
        for number, table in enumerate(statistics.tables):
            if table.kernel != kernel or table.storage is None:
                continue
            numbers = (table.rows or 0) * (table.dim or 0)
            for size in (1, 2, 4):
                if size * numbers <= table.storage + 3 * ROUNDING:
                    largest[number] = size
            total += largest.get(number, 0) * numbers
        if largest and abs(total - nbytes) <= ROUNDING:
            found.update(largest)
    return found


def _check_storage(printed: PlannedTable, table: EmbeddingTable) -> None:
    """Refuse a table that takes less storage than its numbers; a store of keys holds only some."""
    if printed.storage is None or printed.kernel not in _WHOLLY_STORED:
        return
    if printed.storage + 3 * ROUNDING < table.nbytes:
        raise ValueError(
            f"{printed.place}: {show(printed.path)} has numbers of {format_bytes(table.nbytes)} at "
            f"{table.itemsize} B each, and takes {format_bytes(printed.storage)}; pass itemsize=, 2 for "
            "FP16"
        )


def read_plan(
    source: str | Path | Sequence[str],
    *,
    tables: TableSet | Sequence[EmbeddingTable] | None = None,
    ranks: int | None = None,
) -> Plan:
    """Read the plan that TorchRec's planner printed.

    Parameters
    ----------
    source : str, Path or sequence of str
        The printed statistics: their text, their lines, or a file with them.
    tables : TableSet or sequence of EmbeddingTable, optional
        The tables of the plan, in any order, such as those of the configurations; by default those
        of the same statistics, as `perfkit.read_tables` gives them.
    ranks : int, optional
        Number of ranks; by default from the statistics [-].

    Returns
    -------
    plan : Plan
        For `perfkit.price_plan` and `perfkit.predict`, in the order of the tables.

    Raises
    ------
    ValueError
        For what `perfkit.readers.planner_statistics.read_planner_statistics` refuses, for
        statistics without a plan, for tables that are not those of the statistics, and for a kind
        of placement that perfkit does not have.

    Warns
    -----
    UserWarning
        For tables that lie in another memory than `tables` say, for compute kernels that perfkit does
        not know, and for columns that are split unevenly, as it is not printed which rank has the
        narrower shard.

    Examples
    --------
    >>> log = '''
    ... #   FQN           Sharding   Compute Kernel   Emb Dim (CW Dim)   Hash Size   Ranks   #
    ... #   sparse.user         TW            fused                128        1000       1   #
    ... #   sparse.item         CW            fused           128 (64)         900     0-1   #
    ... '''
    >>> read_plan(log, ranks=2).owners
    (1, Placement(kind='column_wise', ranks=(0, 1), columns=(64, 64)))
    """
    if not isinstance(source, str | Path) and not is_list_of_lines(source):
        raise ValueError(
            f"source is {show(source)}; it must be what TorchRec's planner prints: its text, its lines "
            "or a file with it; Plan.from_torchrec reads the plan itself, and Plan.load a file of "
            "perfkit's"
        )
    origin = name_source(source)
    statistics = read_planner_statistics(source, origin=origin)
    if not all(table.ranks for table in statistics.tables):
        raise ValueError(
            f"{origin}: the planner found no plan; read_tables reads its tables, and perfkit.shard "
            "searches a plan"
        )
    world = statistics.ranks if ranks is None else ranks
    if world is None:
        raise ValueError(f"{origin} has no table of ranks; pass ranks=")
    world = int(check_positive("ranks", world, integer=True, maximum=MOST_RANKS))
    known: Sequence[EmbeddingTable]
    if tables is None:
        known = [one.table for one in _make_tables(statistics, None, origin)]
    else:
        known = list_tables("tables", tables)
    entries, uneven = _list_entries(statistics, known, origin)
    if uneven:
        more = " and others" if len(uneven) > 1 else ""
        warnings.warn(
            f"{origin}: shards of {show(uneven[0])}{more} have different columns; it is not printed "
            "which rank has the narrower one, and the last is taken",
            UserWarning,
            stacklevel=find_stacklevel(),
        )
    with reading(origin, "pass the tables of this plan", told=True):
        return Plan.from_torchrec(entries, known, ranks=world)


def take_printed_kernels(
    source: str | Path | Sequence[str], tables: Sequence[EmbeddingTable]
) -> tuple[EmbeddingTable, ...]:
    """Tables with the compute kernels that TorchRec's planner printed.

    Parameters
    ----------
    source : str, Path or sequence of str
        The printed statistics, see `read_plan`.
    tables : sequence of EmbeddingTable
        The tables of the plan.

    Returns
    -------
    tables : tuple of EmbeddingTable
        The same tables, in their order. Those whose kernel is not printed keep theirs; so do load
        factors that are not printed.

    Raises
    ------
    ValueError
        For statistics that cannot be read, for other tables, and for kernels that perfkit does not
        price.
    """
    origin = name_source(source)
    statistics = read_planner_statistics(source, origin=origin)
    kernels = dict[int, PlannedTable]()
    for printed, table in zip(
        statistics.tables, _match_tables(statistics, tables, origin), strict=True
    ):
        kernels[id(table)] = printed
    changed = []
    for table in tables:
        printed = kernels[id(table)]
        entry: dict[str, Any] = {"compute_kernel": printed.kernel}
        if printed.sharding in SHARDING_TYPES:
            entry["sharding_type"] = SHARDING_TYPES[printed.sharding]
        if printed.load_factor is not None:
            entry["cache_params"] = {"load_factor": printed.load_factor}
        with reading(origin, _WITHOUT_KERNELS):
            changed.append(read_kernel(show(printed.path), entry, table))
    return tuple(changed)


def _list_entries(
    statistics: PlannerStatistics, tables: Sequence[EmbeddingTable], origin: str
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Module to table to its placement, as `Plan.from_torchrec` takes it; and tables whose shards
    have different columns."""
    entries: dict[str, dict[str, Any]] = {}
    uneven = []
    matches = _match_tables(statistics, tables, origin)
    for printed, table in zip(statistics.tables, matches, strict=True):
        sharding_type = SHARDING_TYPES[printed.sharding]
        if sharding_type == "grid_shard":
            raise ValueError(
                f"{printed.place}: {show(printed.path)} is split by columns and by rows (GS, "
                "grid_shard), which perfkit does not price; plan it by columns or by rows"
            )
        entry: dict[str, Any] = {
            "sharding_type": sharding_type,
            "ranks": list(dict.fromkeys(printed.ranks)),
        }
        is_unknown = printed.kernel is not None and printed.kernel not in KERNELS
        if is_unknown or find_kernel(printed.kernel) != table.kernel:
            entry["compute_kernel"] = printed.kernel
        if sharding_type in _COLUMN_WISE:
            widths = _list_widths(printed, table)
            if len(set(widths)) > 1:
                uneven.append(printed.path)
            entry["shards"] = [
                {"rank": rank, "sizes": [table.rows, width]}
                for rank, width in zip(printed.ranks, widths, strict=True)
            ]
        module = printed.path.removesuffix(table.name).removesuffix(".")
        entries.setdefault(module, {})[table.name] = entry
    return entries, uneven


def _list_widths(printed: PlannedTable, table: EmbeddingTable) -> list[int]:
    """Columns of each shard [-]; all have those that are printed, and the last one the rest."""
    count = len(printed.ranks)
    if printed.width is None:
        if table.dim % count:
            raise ValueError(
                f"{printed.place}: {show(printed.path)} has {table.dim} columns on {count} ranks, and "
                "the columns of a shard are not printed; pass the plan itself to Plan.from_torchrec"
            )
        return [table.dim // count] * count
    widths = [printed.width] * (table.dim // max(printed.width, 1))
    if sum(widths) < table.dim:
        widths.append(table.dim - sum(widths))
    if len(widths) != count:
        raise ValueError(
            f"{printed.place}: {show(printed.path)} has {table.dim} columns in shards of "
            f"{printed.width}, and {count} ranks; they must be as many as the shards"
        )
    return widths


def _match_tables(
    statistics: PlannerStatistics, tables: Sequence[EmbeddingTable], origin: str
) -> list[EmbeddingTable]:
    """The table of each line: of the same module and name, or the only one of that name."""
    numbers: dict[str, list[int]] = {}  # of the tables, by path and by name
    for number, table in enumerate(tables):
        if table.module:
            numbers.setdefault(f"{table.module}.{table.name}", []).append(number)
        if table.name:
            numbers.setdefault(table.name, []).append(number)
    matches = []
    used = set[int]()
    for printed in statistics.tables:
        candidates = _find_candidates(printed.path, numbers)
        if not candidates:
            raise ValueError(
                f"{printed.place}: {show(printed.path)} is not in tables; pass the tables of this plan"
            )
        if len(candidates) > 1 or candidates[0] in used:
            raise ValueError(
                f"{printed.place}: which of the tables {show(printed.path)} is cannot be told; give "
                "EmbeddingTable its module"
            )
        table = tables[candidates[0]]
        for column, size, own in (
            ("Hash Size", printed.rows, table.rows),
            ("Emb Dim", printed.dim, table.dim),
        ):
            if size is not None and size != own:
                raise ValueError(
                    f"{printed.place}: {column} of {show(printed.path)} is {size}, and {own} in tables; "
                    "pass the tables of this plan"
                )
        used.add(candidates[0])
        matches.append(table)
    for number, table in enumerate(tables):
        if number not in used:
            raise ValueError(
                f"{show(table.name or f'table {number}')} of tables is not in {origin}; pass the tables "
                "of this plan"
            )
    return matches


def _find_candidates(path: str, numbers: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Tables that a path may name: those of the whole path, or of the longest end of it."""
    end = path
    while end:
        if end in numbers:
            return numbers[end]
        end = end.partition(".")[2]
    return []
