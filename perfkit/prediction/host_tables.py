"""Embedding tables whose rows lie in host memory: what their lookups and updates add to the time of
the same tables in device memory, and which of them are refused."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array, show
from perfkit.models.caches import lru_misses
from perfkit.models.distributions import distinct_rows
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


class HostTableTimes(NamedTuple):
    """What rows in host memory add: one element of each array per table; zero for tables in device
    memory.

    Parameters
    ----------
    forward, backward : array
        Time that lookups take longer, and updates [s].
    """

    forward: Array
    backward: Array


def check_kernels(
    tables: Sequence[EmbeddingTable], platform: Platform, *, one_kernel: bool
) -> None:
    """Refuse tables whose rows lie where nothing can price them.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        Tables of a model.
    platform : Platform
        Where they are looked up.
    one_kernel : bool
        Whether one kernel looks up all tables, as in FBGEMM.

    Raises
    ------
    ValueError
        For tables beyond device memory on a CPU or on a GPU without a known host, in a key-value
        store, or with PyTorch's own bags.
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
        if not one_kernel:
            raise ValueError(
                f"{shown} with embedding 'separate'; PyTorch's own bags read device memory alone; take "
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
    weight lies in host memory, as FBGEMM keeps it; one for each row lies in device memory.
    """
    forward, backward = np.zeros(len(tables)), np.zeros(len(tables))
    beyond = [number for number, table in enumerate(tables) if table.kernel != FUSED.name]
    if not beyond:
        return HostTableTimes(forward, backward)
    chosen = [tables[number] for number in beyond]
    count = np.asarray(lookups, dtype=float)[beyond]
    bandwidth = find_link_bandwidth(platform, ranks)
    sector = platform.device.access_granularity
    laws = [table.distribution for table in chosen]
    row_bytes = np.array([float(row_traffic(t.dim, t.itemsize, sector)) for t in chosen])
    has_cache = np.array([table.load_factor is not None for table in chosen])
    # rows that are near: in the cache, or on their way over the link
    near = FLIGHT * bandwidth / row_bytes
    for position, table in enumerate(chosen):
        if table.load_factor is not None:
            near[position] = table.load_factor * table.rows
    looked_up = np.maximum(count, 1e-12)
    each_alone = np.arange(len(chosen))
    misses = lru_misses(laws, looked_up, 1.0 / near, capacity=1.0, groups=each_alone)
    link: dict[str, Any] = {"bandwidth": bandwidth}
    cached = keep_cache(count, misses * count, row_bytes, **link)
    read = read_from_host(count, row_bytes, misses=misses, **link)
    forward[beyond] = np.where(has_cache, cached, read)
    if not optimizer:
        return HostTableTimes(forward, backward)
    updated = count
    if sorts:
        updated = distinct_rows(laws, looked_up)
    states = find_optimizer(optimizer).states
    with_weights = update_on_host(updated, row_bytes, states=states, **link)
    weights_alone = update_on_host(updated, row_bytes, **link)
    # the cache has the weights
    backward[beyond] = np.where(has_cache, with_weights - weights_alone, with_weights)
    return HostTableTimes(forward, backward)


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


def _add_to_graph(graph: Graph, seconds: Array, platform: Platform, ranks: int) -> None:
    """Add to the times of the operations of one graph [s]."""
    if graph.repeats is not None:  # operations on tables of one size are merged, wherever these lie
        raise ValueError(
            "sizes are arrays and tables lie in host memory; configurations are priced one by one"
        )
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    table_of_operation = graph.features.table.astype(int)
    variants = set()
    for operation, label in enumerate(graph.labels):
        if label.kind not in ("embedding_forward", "embedding_backward"):
            continue
        table = int(table_of_operation[operation])
        if label.kind == "embedding_forward":
            forward[table] = operation
            variants.add(label.variant)
        else:
            backward[table] = operation
    check_kernels(graph.tables, platform, one_kernel=variants == {"fused"})
    for table, operation in backward.items():
        _refuse_copy(graph, table, graph.labels[operation].variant)
    numbers = [n for n in sorted(forward) if graph.tables[n].kernel != FUSED.name]
    if not numbers:
        return
    operations = [forward[number] for number in numbers]
    updates = [backward[number] for number in numbers if number in backward]
    sorts = any(graph.labels[update].variant == "exact" for update in updates)
    tables = [graph.tables[number] for number in numbers]
    times = time_host_tables(
        tables,
        graph.features.lookups[operations],
        platform,
        ranks=ranks,
        optimizer=graph.optimizer if updates else "",
        sorts=sorts,
    )
    starts = start_kernels(tables)
    seconds[operations[0]] += starts.forward
    if updates:
        seconds[updates[0]] += starts.backward
    for position, number in enumerate(numbers):
        seconds[forward[number]] += times.forward[position]
        if number in backward:
            seconds[backward[number]] += times.backward[position]


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
