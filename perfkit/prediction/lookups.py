"""Rows of embedding tables: what operations touch of them, and how much of it no cache holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.caches import PAGE, miss_share
from perfkit.models.distributions import Uniform, distinct_rows
from perfkit.models.embedding import size_lookup
from perfkit.platform.platform import Platform
from perfkit.workloads.columns import Features
from perfkit.workloads.graph import Graph
from perfkit.workloads.tables import list_laws


class CacheLimits(NamedTuple):
    """What the caches of one rank hold.

    Parameters
    ----------
    l2, l3 : float
        Effective capacities of the last two caches [B].
    page_entries : float
        Pages that the translation buffer holds [-].
    granularity : float
        Smallest access to memory [B].
    in_turn : bool
        Whether tables are looked up one after another, as GPUs do.
    """

    l2: float
    l3: float
    page_entries: float
    granularity: float
    in_turn: bool

    @classmethod
    def of_rank(cls, platform: Platform, ranks: int) -> "CacheLimits":
        """Limits for one of several ranks; those of a CPU share its last cache."""
        l2, l3 = platform.share_caches(ranks)
        device = platform.device
        in_turn = device.kind != "cpu"
        return cls(l2, l3, platform.page_entries, device.access_granularity, in_turn)


@dataclass(frozen=True, eq=False)
class RowSizes:
    """Rows of embedding tables that operations touch: one element of each array per operation; zero
    for operations that touch none.

    Parameters
    ----------
    row_bytes : array
        Bytes of all lookups [B].
    unique_bytes : array
        Bytes of the distinct rows [B].
    page_walks : array
        Lookups whose page address is not cached [-].
    beyond_l2, beyond_l3 : array
        Bytes that come from beyond each cache [B].
    has_misses : array of bool
        Whether it is known what caches hold of the rows of each operation: of lookups and updates,
        not of gradients that have a row for each lookup [-].
    """

    row_bytes: Array
    unique_bytes: Array
    page_walks: Array
    beyond_l2: Array
    beyond_l3: Array
    has_misses: np.ndarray

    @classmethod
    def without_caches(cls, row_bytes: Array) -> "RowSizes":
        """Rows of which no cache holds any."""
        shape = row_bytes.shape
        return cls(
            row_bytes=row_bytes,
            unique_bytes=np.zeros(shape),
            page_walks=np.zeros(shape),
            beyond_l2=np.zeros(shape),
            beyond_l3=np.zeros(shape),
            has_misses=np.zeros(shape, dtype=bool),
        )

    @property
    def from_memory(self) -> Array:
        """Bytes of rows that come from the main memory of a GPU [B]."""
        return np.where(self.has_misses, self.beyond_l3, self.row_bytes)


class _RowOperations(NamedTuple):
    """The operations that touch rows of tables.

    Parameters
    ----------
    operation : array of int
        Position among all operations [-].
    graph : array of int
        Position of its graph [-].
    table : array of int
        Number of its table in this graph [-].
    kind, variant : array of str
        See `perfkit.workloads.graph.Operation`.
    lookups, width, row_bytes : array
        Looked-up rows [-], bytes of a row, and of all looked-up rows [B].
    """

    operation: np.ndarray
    graph: np.ndarray
    table: np.ndarray
    kind: np.ndarray
    variant: np.ndarray
    lookups: Array
    width: Array
    row_bytes: Array

    def select(self, members: np.ndarray) -> "_RowOperations":
        """Take some of them: their positions here, or whether to take each one."""
        return _RowOperations(*(values[members] for values in self))


class _TableSizes(NamedTuple):
    """What lookups into tables touch and miss: one element of each array per operation, that of its
    table, see `perfkit.models.embedding.LookupSizes`.

    Parameters
    ----------
    unique, unique_bytes : array
        Distinct rows [-] and their bytes [B].
    l2_misses, l3_misses : array
        Share of looked-up bytes that comes from beyond each cache [-].
    page_walks : array
        Page walks of the lookups [-].
    l2_update_misses, l3_update_misses, update_page_walks : array
        Likewise of an update of the distinct rows.
    """

    unique: Array
    unique_bytes: Array
    l2_misses: Array
    l3_misses: Array
    page_walks: Array
    l2_update_misses: Array
    l3_update_misses: Array
    update_page_walks: Array


def size_rows(
    graphs: Sequence[Graph],
    features: Features,
    traffic: Array,
    row_bytes: Array,
    widths: Array,
    limits: CacheLimits,
) -> RowSizes:
    """Size the rows of embedding tables that the operations of some graphs touch, with what caches
    hold of them.

    Parameters
    ----------
    graphs : sequence of Graph
        What ranks execute, each with caches of its own.
    features : Features
        Sizes of all their operations, one graph after the other.
    traffic, row_bytes : array
        Bytes of other operands of each operation, and of the rows that it looks up [B].
    widths : array
        Bytes of a row that each operation looks up [B].
    limits : CacheLimits
        What the caches of a rank hold.

    Returns
    -------
    rows : RowSizes
        One element per operation.
    """
    rows = RowSizes.without_caches(row_bytes)
    if not row_bytes.any():
        return rows
    operations = _list_row_operations(graphs, features, row_bytes, widths)
    is_forward = operations.kind == "embedding_forward"
    is_fused = operations.variant == "fused"
    looks_up_in_fused = np.isin(operations.graph, operations.graph[is_fused])
    has_lookups = np.isin(operations.graph, operations.graph[is_forward])
    # a fused kernel goes from table to table and finds no rows of an iteration before
    for finds_empty_caches in (False, True):
        chosen = has_lookups & (looks_up_in_fused == finds_empty_caches)
        if chosen.any():
            _size_rows_of_tables(
                rows, operations.select(chosen), graphs, traffic, limits, finds_empty_caches
            )
    rows_of_gradient = operations.select(operations.variant == "dense_rows")
    if len(rows_of_gradient.operation) and limits.page_entries < math.inf:
        _size_rows_of_gradients(rows, rows_of_gradient, features, traffic, limits)
    return rows


def _list_row_operations(
    graphs: Sequence[Graph], features: Features, row_bytes: Array, widths: Array
) -> _RowOperations:
    """The operations of all graphs that touch rows."""
    operation = np.flatnonzero(features.lookups.reshape(len(features), -1).any(axis=1))
    lengths = [len(graph) for graph in graphs]
    graph_of_operation = np.repeat(np.arange(len(graphs)), lengths)[operation]
    first_of_graph = np.cumsum([0, *lengths])
    kinds, variants = [], []
    for position, number in zip(operation.tolist(), graph_of_operation.tolist(), strict=True):
        label = graphs[number].labels[position - first_of_graph[number]]
        kinds.append(label.kind)
        # how the rows of a bag are joined changes no traffic
        variants.append(label.variant.partition(".")[0])
    lookups = features.lookups[operation]
    return _RowOperations(
        operation=operation,
        graph=graph_of_operation,
        # a table is the same in all configurations
        table=features.table[operation].reshape(len(operation), -1)[:, 0].astype(int),
        kind=np.array(kinds),
        variant=np.array(variants),
        lookups=lookups,
        width=np.broadcast_to(widths[operation], lookups.shape),
        row_bytes=row_bytes[operation],
    )


def _size_rows_of_tables(
    rows: RowSizes,
    operations: _RowOperations,
    graphs: Sequence[Graph],
    traffic: Array,
    limits: CacheLimits,
    finds_empty_caches: bool,
) -> None:
    """Size rows of graphs that look up tables, and write them into `rows`."""
    tables = _size_tables(operations, graphs, limits, finds_empty_caches)
    is_forward = operations.kind == "embedding_forward"
    is_update = operations.kind == "embedding_update"
    is_dense_gradient = operations.variant == "dense"
    touches_table = operations.variant != "dense_rows"
    misses_as_lookup = is_forward
    if finds_empty_caches:  # fused kernels of the backward pass read rows as lookups do
        misses_as_lookup = is_forward | (operations.variant == "fused")
    position = operations.operation

    rows.unique_bytes[position[touches_table]] = tables.unique_bytes[touches_table]
    rows.has_misses[position[misses_as_lookup | is_update]] = True

    by_cache = (
        (rows.beyond_l2, tables.l2_misses, tables.l2_update_misses),
        (rows.beyond_l3, tables.l3_misses, tables.l3_update_misses),
    )
    for beyond, misses, update_misses in by_cache:
        lookup_bytes = misses * operations.row_bytes
        update_bytes = update_misses * tables.unique_bytes
        beyond[position[misses_as_lookup]] = lookup_bytes[misses_as_lookup]
        beyond[position[is_update]] = update_bytes[is_update]

    gradient = position[is_dense_gradient]
    # rows of a gradient that was just zeroed
    gradient_misses = miss_share(traffic[gradient] / PAGE, capacity=limits.page_entries)
    rows.page_walks[position[is_forward]] = tables.page_walks[is_forward]
    rows.page_walks[position[is_update]] = tables.update_page_walks[is_update]
    rows.page_walks[gradient] = tables.unique[is_dense_gradient] * gradient_misses


def _size_tables(
    operations: _RowOperations,
    graphs: Sequence[Graph],
    limits: CacheLimits,
    finds_empty_caches: bool,
) -> _TableSizes:
    """Size the lookups of all graphs in one pass; those of a graph share its caches."""
    lookups = operations.select(operations.kind == "embedding_forward")
    count = len(lookups.operation)
    configurations = lookups.lookups.shape[1] if lookups.lookups.ndim > 1 else 0
    graph_numbers, cache_of_lookup = np.unique(lookups.graph, return_inverse=True)
    tables = []
    for graph, table in zip(lookups.graph.tolist(), lookups.table.tolist(), strict=True):
        tables.append(graphs[graph].tables[table])
    # all lookups of the first configuration, all of the second, ...
    repeats = max(configurations, 1)
    caches_before = len(graph_numbers) * np.repeat(np.arange(repeats), count)
    shape = (len(graph_numbers), *lookups.lookups.shape[1:])
    dense_bytes = np.empty(shape)
    for row, number in enumerate(graph_numbers.tolist()):
        dense_bytes[row] = graphs[number].footprint
    sizes = size_lookup(
        list_laws(tables, configurations),
        lookups.lookups.T.ravel(),
        lookups.width.T.ravel(),
        capacities=(limits.l2, limits.l3),
        entries=limits.page_entries,
        itemsize=1.0,
        granularity=limits.granularity,
        dense_bytes=dense_bytes.T.ravel(),
        groups=caches_before + np.tile(cache_of_lookup, repeats),
        cold=finds_empty_caches,
        in_turn=limits.in_turn,
    )
    lookup_of_operation = _find_lookups(operations, lookups)

    def by_operation(values: Array) -> Array:
        if configurations:
            values = values.reshape(configurations, count).T
        return values[lookup_of_operation]

    return _TableSizes(
        unique=by_operation(sizes.unique),
        unique_bytes=by_operation(sizes.unique_bytes),
        l2_misses=by_operation(sizes.misses[0]),
        l3_misses=by_operation(sizes.misses[1]),
        page_walks=by_operation(sizes.walks),
        l2_update_misses=by_operation(sizes.update_misses[0]),
        l3_update_misses=by_operation(sizes.update_misses[1]),
        update_page_walks=by_operation(sizes.update_walks),
    )


def _find_lookups(operations: _RowOperations, lookups: _RowOperations) -> np.ndarray:
    """Position of the lookup whose rows each operation touches: its own, or that of its table; the
    first one of its graph where nothing looks its table up."""
    lookup_of_operation: dict[int, int] = {}
    lookup_of_table: dict[tuple[int, int], int] = {}
    first_of_graph: dict[int, int] = {}
    columns = (lookups.operation.tolist(), lookups.graph.tolist(), lookups.table.tolist())
    for position, (operation, graph, table) in enumerate(zip(*columns, strict=True)):
        lookup_of_operation[operation] = position
        lookup_of_table[graph, table] = position
        first_of_graph.setdefault(graph, position)
    positions = []
    columns = (operations.operation.tolist(), operations.graph.tolist(), operations.table.tolist())
    for operation, graph, table in zip(*columns, strict=True):
        if operation in lookup_of_operation:
            positions.append(lookup_of_operation[operation])
        elif (graph, table) in lookup_of_table:
            positions.append(lookup_of_table[graph, table])
        else:
            positions.append(first_of_graph[graph])
    return np.array(positions, dtype=np.intp)


def _size_rows_of_gradients(
    rows: RowSizes,
    operations: _RowOperations,
    features: Features,
    traffic: Array,
    limits: CacheLimits,
) -> None:
    """Page walks of gradients whose rows another operation looked up; these are taken to be
    uniform."""
    position = operations.operation
    laws = [Uniform(int(count)) for count in features.rows[position]]
    misses = miss_share(traffic[position] / PAGE, capacity=limits.page_entries)
    rows.page_walks[position] = misses * distinct_rows(laws, operations.lookups)
