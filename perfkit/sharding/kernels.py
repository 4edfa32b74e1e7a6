"""Which tables lie in host memory where device memory is too small for all of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array, check_choice, check_type, show
from perfkit.prediction.host_tables import check_kernels, time_host_tables
from perfkit.sharding.constraints import InfeasibleError
from perfkit.sharding.costs import MEMORY
from perfkit.sharding.problem import Problem
from perfkit.sharding.result import ShardingResult
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement_kinds import WHOLE
from perfkit.workloads.sizes import alter
from perfkit.workloads.table_kernels import FUSED, KEY_VALUE, TABLE_KERNELS
from perfkit.workloads.tables import EmbeddingTable, TableSet, name_tables

#: Shares of the device memory of all ranks that tables may fill, one after another until a plan is
#: found: tables of different size never fill it wholly [-].
_SHARES = (1.0, 0.95, 0.9, 0.8, 0.6, 0.3, 0.0)
#: Most tables that a note names.
_MOST_NAMES = 5


class _Moves(NamedTuple):
    """What it means to put each table beyond device memory; one element per table.

    Parameters
    ----------
    tables : tuple of EmbeddingTable
        The tables there, each with the kernel that takes least time.
    freed : array
        Bytes of device memory that this frees [B].
    seconds : array
        Time that it adds to an iteration [s].
    """

    tables: tuple[EmbeddingTable, ...]
    freed: Array
    seconds: Array


def read_kernels(kernels: Any) -> tuple[str, ...]:
    """Check the kernels that a search may choose; returns those beyond device memory.

    Parameters
    ----------
    kernels : sequence of str
        Names of kernels of tables, ``fused`` among them.

    Returns
    -------
    beyond : tuple of str
        All but ``fused``.

    Raises
    ------
    ValueError
        For unknown names, without ``fused``, and for ``key_value``, which has no price.
    """
    check_type("kernels", kernels, Sequence[str])
    names = [kernels] if isinstance(kernels, str) else list(kernels)
    for name in names:
        check_choice("kernels", name, TABLE_KERNELS)
    if FUSED.name not in names:
        raise ValueError(
            f"kernels is {show(kernels)} without {FUSED.name!r}; a search puts tables beyond device memory "
            "only as far as this is too small; give tables a kernel of their own to have it otherwise"
        )
    if KEY_VALUE.name in names:
        raise ValueError(
            f"kernels is {show(kernels)}; no published time of lookups from an SSD is known to perfkit, so "
            "key_value has no price; leave it out"
        )
    return tuple(dict.fromkeys(name for name in names if name != FUSED.name))


def choose_kernels(
    problem: Problem,
    beyond: Sequence[str],
    search: Callable[[DLRM | TableSet], ShardingResult],
) -> ShardingResult:
    """Search with as many tables in device memory as it holds, for several choices of kernels.

    Parameters
    ----------
    problem : Problem
        With tables where they lie now.
    beyond : sequence of str
        Kernels that tables in device memory may have instead, see `read_kernels`.
    search : callable
        Finds a plan of a workload.

    Returns
    -------
    result : ShardingResult
        Its warnings name the tables that were put into host memory.

    Raises
    ------
    InfeasibleError
        If no plan was found, with all of these tables in host memory either.

    Notes
    -----
    Tables that free most bytes for the time that they add go first. That is tried with every
    selection of the kernels, and a table takes the fastest of them, or the one that frees most bytes
    for its time. So more kernels never make the plan slower. The bound holds for plans with the same
    kernels.
    """
    found: dict[tuple[EmbeddingTable, ...], ShardingResult | InfeasibleError] = {}
    best: ShardingResult | None = None
    for moves in _list_moves(problem, beyond):
        result = _search_first_that_fits(problem, moves, search, found)
        if result is None:
            continue
        if best is None or result.prediction.time < best.prediction.time:
            best = result
    if best is not None:
        return best
    failures = [error for error in found.values() if isinstance(error, InfeasibleError)]
    raise failures[-1]


def _list_moves(problem: Problem, beyond: Sequence[str]) -> Iterator[_Moves]:
    """What tables free and take elsewhere, by every selection of kernels."""
    for count in range(1, len(beyond) + 1):
        for selection in combinations(beyond, count):
            yield _price_moves(problem, selection, by_bytes=False)
            if count > 1:
                yield _price_moves(problem, selection, by_bytes=True)


def _search_first_that_fits(
    problem: Problem,
    moves: _Moves,
    search: Callable[[DLRM | TableSet], ShardingResult],
    found: dict[tuple[EmbeddingTable, ...], ShardingResult | InfeasibleError],
) -> ShardingResult | None:
    """Move ever more tables until a plan is found; None if none is. What was found before for the
    same tables is in `found`, and is added there."""
    workload = problem.costs.workload
    for share in _SHARES:
        moved = _choose_tables(problem, moves, share)
        tables = list(workload.tables)
        for number in moved:
            tables[number] = moves.tables[number]
        key = tuple(tables)
        if key not in found:
            try:
                result = search(alter(workload, {"tables": key}))
            except InfeasibleError as error:
                found[key] = error
                continue
            if moved:
                notes = (_note_moves(tables, moved), *result.warnings)
                result = replace(result, warnings=notes, are_kernels_chosen=True)
            found[key] = result
        known = found[key]
        if isinstance(known, ShardingResult):
            return known
    return None


def _price_moves(problem: Problem, beyond: Sequence[str], *, by_bytes: bool) -> _Moves:
    """What each table in device memory frees and takes elsewhere; nothing for the others. A table
    takes the fastest of the kernels, or the one that frees most bytes for its time if `by_bytes`."""
    costs = problem.costs
    workload = costs.workload
    count = len(workload.tables)
    lookups = np.array([workload.batch * float(table.pooling) for table in workload.tables])
    tables = workload.tables
    seconds = np.full(count, np.inf)
    least = np.full(count, np.inf)
    chosen = list(tables)
    on_device = np.array([float(table.device_bytes) for table in tables])
    for kernel in beyond:
        moved = []
        for table in tables:
            moved.append(table if table.host_bytes else replace(table, kernel=kernel))
        check_kernels(moved, costs.platform, embedding=workload.embedding)
        times = time_host_tables(
            moved,
            lookups,
            costs.platform,
            ranks=costs.ranks,
            optimizer=workload.table_optimizer,
            sorts=workload.embedding == "exact",
        )
        added = times.forward + times.weights + times.backward
        measure = added
        if by_bytes:
            freed = on_device - np.array([float(table.device_bytes) for table in moved])
            measure = added / np.maximum(freed, 1.0)
        for number in np.flatnonzero(measure < least).tolist():
            least[number] = measure[number]
            seconds[number] = added[number]
            chosen[number] = moved[number]
    elsewhere = np.array([float(table.device_bytes) for table in chosen])
    return _Moves(tuple(chosen), on_device - elsewhere, seconds)


def _choose_tables(problem: Problem, moves: _Moves, share: float) -> list[int]:
    """Numbers of the tables that have to leave device memory so that the others fill at most a share
    of it."""
    costs = problem.costs
    numbers = np.arange(len(costs.workload.tables))
    needed = float(costs.shards(numbers, WHOLE.name).shard[:, list(MEMORY)].sum())
    room = share * problem.capacity * costs.ranks
    worth = moves.seconds / np.maximum(moves.freed, 1.0)
    moved = []
    for number in np.argsort(worth, kind="stable").tolist():
        if needed <= room:
            break
        if moves.freed[number] > 0:
            moved.append(number)
            needed -= float(moves.freed[number])
    return sorted(moved)


def _note_moves(tables: Sequence[EmbeddingTable], moved: Sequence[int]) -> str:
    """The warning that names tables in host memory."""
    names = name_tables(tables)
    kernels = " or ".join(sorted({tables[number].kernel for number in moved}))
    shown = [names[number] for number in moved[:_MOST_NAMES]]
    listed = ", ".join(shown)
    if len(moved) > len(shown):
        listed += ", ..."
    return (
        f"device memory is too small: {len(moved)} of {len(tables)} tables lie in host memory ({kernels}): "
        f"{listed}; the bound holds for these kernels"
    )
