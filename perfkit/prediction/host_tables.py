"""Embedding tables whose rows lie in host memory: what their lookups and updates add to the time of
the same tables in device memory, and which of them are refused."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, show
from perfkit.models.caches import lru_misses
from perfkit.models.distributions import Distribution, distinct_rows
from perfkit.models.embedding import row_traffic
from perfkit.models.host_tables import (
    CACHE_START,
    CACHE_UPDATE_START,
    FLIGHT,
    UVM_UPDATE_START,
    keep_cache,
    read_from_host,
    update_on_host,
)
from perfkit.models.optimizers import find_optimizer
from perfkit.platform.host_memory import find_host_memory
from perfkit.platform.platform import Platform
from perfkit.workloads.graph import Graph
from perfkit.workloads.table_kernels import FUSED, KEY_VALUE
from perfkit.workloads.tables import EmbeddingTable, name_tables

#: Device whose tables in host memory were measured: the constants of the closed forms are its.
MEASURED = "NVIDIA H100 SXM5 80 GB"
#: Lookups of a table that has none: of zero no misses are counted [-].
_FEWEST_LOOKUPS = 1e-12


class HostTableTimes(NamedTuple):
    """What rows in host memory add: one element of each array per table; zero for tables in device
    memory.

    Parameters
    ----------
    forward : array
        Time that lookups take longer [s].
    weights : array
        Time that gradients of the weights of lookups take longer, which read the rows once more [s].
    backward : array
        Time that updates take longer [s].
    """

    forward: Array
    weights: Array
    backward: Array


#: Why tables in host memory have no price, by the kernel that looks them up.
_REFUSED = {
    "separate": "PyTorch's own bags read device memory alone",
    "hash": "hash tables are priced in device memory alone",
}


def check_kernels(tables: Sequence[EmbeddingTable], platform: Platform, *, embedding: str) -> None:
    """Refuse tables whose rows lie where nothing can price them.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        Tables of a model.
    platform : Platform
        Where they are looked up.
    embedding : str
        What looks them up, as in a `DLRM`.

    Raises
    ------
    ValueError
        For tables beyond device memory on a CPU or on a GPU without a known host, in a key-value
        store, with PyTorch's own bags, or as hash tables.
    """
    if all(table.kernel == FUSED.name for table in tables):
        return
    for name, table in zip(name_tables(tables), tables, strict=True):
        if table.kernel == FUSED.name:
            continue
        shown = f"kernel of {show(name)} is {table.kernel!r}"
        if platform.device.kind == "cpu":
            raise ValueError(
                f"{shown}; platform {platform.name!r} is a CPU, whose tables all lie in host memory; "
                f"take kernel={FUSED.name!r}"
            )
        if table.kernel == KEY_VALUE.name:
            raise ValueError(
                f"{shown}; no published time of lookups from an SSD is known to perfkit, so it has no "
                "price; take kernel='uvm_caching' if the host has room, or more ranks"
            )
        if embedding in _REFUSED:
            raise ValueError(
                f"{shown} with embedding {embedding!r}; {_REFUSED[embedding]}; take "
                "embedding='exact' (FBGEMM) in a DLRM, or embedding='fused' in a TableSet"
            )
        try:
            find_host_memory(platform)
        except ValueError:
            raise ValueError(
                f"{shown}; platform {platform.name!r} does not know the memory of its host and the link "
                "to it; state them first, such as .with_host_memory(capacity=1e12, bandwidth=400e9) for "
                "1 TB at 400 GB/s on a node"
            ) from None


def note_other_device(tables: Sequence[EmbeddingTable], platform: Platform) -> tuple[str, ...]:
    """The warning that tables in host memory were measured on another device.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        Tables of a rank or a model.
    platform : Platform
        Where they are looked up.

    Returns
    -------
    notes : tuple of str
        A sentence, or nothing.
    """
    if platform.device.name == MEASURED or all(table.kernel == FUSED.name for table in tables):
        return ()
    return (
        f"tables in host memory were measured on {MEASURED} alone; {platform.device.name} takes the same "
        "times of caches and kernels, with its own link",
    )


def find_link_bandwidth(platform: Platform, ranks: int) -> float:
    """Find what a rank reads from the memory of its host while the other ranks of its node do.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    ranks : int
        Ranks that take part, which fill one node after the other [-].

    Returns
    -------
    bandwidth : float
        Of the slower way of the link, shared with the ranks that have the same link, and at most a
        share of the bandwidth of the host [B/s].
    """
    memory = find_host_memory(platform)
    of_node = min(ranks, platform.network.ranks_per_node)
    of_link = min(memory.to_host.value, memory.from_host.value) / min(memory.sharers, of_node)
    return min(of_link, memory.bandwidth.value / of_node)


class _HostLookups(NamedTuple):
    """Lookups of one iteration into tables in host memory: one element of each array per table.

    Parameters
    ----------
    laws : list of Distribution
        Which rows are looked up.
    lookups : array
        Lookups [-].
    row_bytes : array
        Bytes of a row [B].
    has_cache : array of bool
        Whether a cache in device memory holds some of the rows.
    misses : array
        Share of the lookups whose row is neither in the cache nor on its way over the link [-].
    """

    laws: list[Distribution]
    lookups: Array
    row_bytes: Array
    has_cache: np.ndarray
    misses: Array


def _size_lookups(
    tables: Sequence[EmbeddingTable], lookups: Array, platform: Platform, bandwidth: float
) -> _HostLookups:
    """Size lookups over a link of this bandwidth [B/s]."""
    laws = [table.distribution for table in tables]
    sector = platform.device.access_granularity
    row_bytes = np.array([float(row_traffic(t.row_bytes, 1.0, sector)) for t in tables])
    has_cache = np.array([table.load_factor is not None for table in tables])
    # rows that are near: in the cache, or on their way over the link
    near = FLIGHT * bandwidth / row_bytes
    for position, table in enumerate(tables):
        if table.load_factor is not None:
            near[position] = table.load_factor * table.rows
    count = np.maximum(lookups, _FEWEST_LOOKUPS)
    each_alone = np.arange(len(tables))
    misses = lru_misses(laws, count, 1.0 / near, capacity=1.0, groups=each_alone)
    return _HostLookups(laws, lookups, row_bytes, has_cache, misses)


def _time_updates(sizes: _HostLookups, *, bandwidth: float, optimizer: str, sorts: bool) -> Array:
    """Time that updates of rows take longer [s]."""
    updated = sizes.lookups
    if sorts:
        updated = distinct_rows(sizes.laws, np.maximum(sizes.lookups, _FEWEST_LOOKUPS))
    states = find_optimizer(optimizer).states
    with_weights = update_on_host(updated, sizes.row_bytes, bandwidth=bandwidth, states=states)
    weights_alone = update_on_host(updated, sizes.row_bytes, bandwidth=bandwidth)
    # the cache has the weights
    return np.where(sizes.has_cache, with_weights - weights_alone, with_weights)


def time_host_tables(
    tables: Sequence[EmbeddingTable],
    lookups: Array,
    platform: Platform,
    *,
    ranks: int,
    optimizer: str,
    sorts: bool,
) -> HostTableTimes:
    """What lookups and updates of tables take longer than in device memory.

    Parameters
    ----------
    tables : sequence of EmbeddingTable, length n
        The tables; those in device memory take no time.
    lookups : array, shape (n,)
        Lookups of one iteration into each [-].
    platform : Platform
        Where it runs.
    ranks : int
        Ranks that take part [-].
    optimizer : str
        What updates the rows; empty if nothing does [-].
    sorts : bool
        Whether lookups are sorted and each distinct row is updated once, instead of a row for each
        lookup.

    Returns
    -------
    times : HostTableTimes
        Of each table, without what starts the kernels, see `start_kernels`.

    Notes
    -----
    The kernels go from table to table, and each table has a cache of its own: its load factor of
    its rows. Caches are in steady state, with fresh indices in every iteration. A state for each
    weight lies in host memory, as FBGEMM keeps it; one for each row lies in device memory. Gradients
    of the weights of lookups find in a cache what the lookups have put there.
    """
    nothing = np.zeros(len(tables))
    times = HostTableTimes(nothing, nothing.copy(), nothing.copy())
    beyond = [number for number, table in enumerate(tables) if table.kernel != FUSED.name]
    if not beyond:
        return times
    chosen = [tables[number] for number in beyond]
    count = np.asarray(lookups, dtype=float)[beyond]
    bandwidth = find_link_bandwidth(platform, ranks)
    sizes = _size_lookups(chosen, count, platform, bandwidth)
    missed = sizes.misses * count
    cached = keep_cache(count, missed, sizes.row_bytes, bandwidth=bandwidth)
    read = read_from_host(count, sizes.row_bytes, misses=sizes.misses, bandwidth=bandwidth)
    times.forward[beyond] = np.where(sizes.has_cache, cached, read)
    if not optimizer:
        return times
    weighted = np.array([table.weighted for table in chosen])
    times.weights[beyond] = np.where(weighted & ~sizes.has_cache, read, 0.0)
    times.backward[beyond] = _time_updates(
        sizes, bandwidth=bandwidth, optimizer=optimizer, sorts=sorts
    )
    return times


class KernelStarts(NamedTuple):
    """Time of a rank before its kernels work on tables in host memory [s]."""

    forward: float
    backward: float


def start_kernels(tables: Sequence[EmbeddingTable]) -> KernelStarts:
    """What starts the kernels of a rank that has these tables.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        Its tables.

    Returns
    -------
    starts : KernelStarts
        Those of tables with a cache and of those without one add up.
    """
    beyond = [table for table in tables if table.kernel != FUSED.name]
    forward, backward = 0.0, 0.0
    if any(table.load_factor is not None for table in beyond):
        forward += CACHE_START
        backward += CACHE_UPDATE_START
    if any(table.load_factor is None for table in beyond):
        backward += UVM_UPDATE_START
    return KernelStarts(forward, backward)


def add_host_tables(
    graphs: Sequence[Graph], seconds: Array, platform: Platform, *, ranks: int
) -> Array:
    """Times of the operations of some graphs, with what rows in host memory add.

    Parameters
    ----------
    graphs : sequence of Graph
        What ranks execute.
    seconds : array
        Times of all their operations as if all tables lay in device memory, one graph after the
        other [s].
    platform : Platform
        Where they run.
    ranks : int
        Ranks that take part [-].

    Returns
    -------
    seconds : array
        The same array if all tables lie there [s].

    Raises
    ------
    ValueError
        For tables that `check_kernels` refuses, and copies of tables in host memory.
    """
    added = None
    begin = 0
    for graph in graphs:
        if any(table.kernel != FUSED.name for table in graph.tables):
            if added is None:
                added = np.array(seconds, dtype=float)
            _add_to_graph(graph, added[begin : begin + len(graph)], platform, ranks)
        begin += len(graph)
    return seconds if added is None else added


class _TableOperations(NamedTuple):
    """Operations on the tables of a graph, by the number of the table.

    Parameters
    ----------
    forward, weights, backward : dict of int to int
        Those that look rows up, that compute gradients of the weights of lookups, and that update
        rows or compute their gradients.
    """

    forward: dict[int, int]
    weights: dict[int, int]
    backward: dict[int, int]


def _find_operations(graph: Graph) -> _TableOperations:
    """Find the operations on tables of a graph."""
    operations = _TableOperations({}, {}, {})
    table_of_operation = graph.features.table.astype(int).tolist()
    for operation, label in enumerate(graph.labels):
        table = table_of_operation[operation]
        if label.kind == "embedding_backward":
            operations.backward[table] = operation
        elif label.kind == "embedding_forward" and label.phase == "backward":
            operations.weights[table] = operation
        elif label.kind == "embedding_forward":
            operations.forward[table] = operation
    return operations


def _name_embedding(variant: str) -> str:
    """What looks tables up with a kernel of this variant, as in a `DLRM`."""
    return variant if variant in ("fused", "hash") else "separate"


def _add_to_graph(graph: Graph, seconds: Array, platform: Platform, ranks: int) -> None:
    """Add to the times of the operations of one graph [s]."""
    if graph.repeats is not None:  # operations on tables of one size are merged, wherever these lie
        raise ValueError(
            "sizes are arrays and tables lie in host memory; configurations are priced one by one"
        )
    found = _find_operations(graph)
    variants = [graph.labels[operation].variant for operation in found.forward.values()]
    for embedding in sorted(set(map(_name_embedding, variants))):
        check_kernels(graph.tables, platform, embedding=embedding)
    for table, operation in found.backward.items():
        _refuse_copy(graph, table, graph.labels[operation].variant)
    numbers = [n for n in sorted(found.forward) if graph.tables[n].kernel != FUSED.name]
    if not numbers:
        return
    lookups = [found.forward[number] for number in numbers]
    updates = [found.backward[number] for number in numbers if number in found.backward]
    sorts = any(graph.labels[update].variant == "exact" for update in updates)
    tables = [graph.tables[number] for number in numbers]
    times = time_host_tables(
        tables,
        graph.features.lookups[lookups],
        platform,
        ranks=ranks,
        optimizer=graph.optimizer if updates else "",
        sorts=sorts,
    )
    starts = start_kernels(tables)
    seconds[lookups[0]] += starts.forward
    if updates:
        seconds[updates[0]] += starts.backward
    for position, number in enumerate(numbers):
        seconds[found.forward[number]] += times.forward[position]
        if number in found.weights:
            seconds[found.weights[number]] += times.weights[position]
        if number in found.backward:
            seconds[found.backward[number]] += times.backward[position]


def _refuse_copy(graph: Graph, number: int, variant: str) -> None:
    """Refuse a gradient as large as a table that lies in host memory."""
    table = graph.tables[number]
    if table.kernel != FUSED.name and variant not in ("fused", "exact"):
        name = name_tables(graph.tables)[number]
        raise ValueError(
            f"kernel of {show(name)} is {table.kernel!r}, and every rank has a copy of its rows, whose "
            f"gradients are averaged in device memory; place it in another way, or take "
            f"kernel={FUSED.name!r}"
        )
