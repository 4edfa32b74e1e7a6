"""Which tables lie in host memory where device memory is too small for all of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
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
    """Search with as many tables in device memory as it holds.

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
    Tables that free most bytes for the time that they add go first. The bound holds for plans with
    the same kernels.
    """
    workload = problem.costs.workload
    moves = _price_moves(problem, beyond)
    last_moved: list[int] | None = None
    failure: InfeasibleError | None = None
    for share in _SHARES:
        moved = _choose_tables(problem, moves, share)
        if moved == last_moved:
            continue
        last_moved = moved
        tables = list(workload.tables)
        for number in moved:
            tables[number] = moves.tables[number]
        changed = alter(workload, {"tables": tuple(tables)})
        try:
            result = search(changed)
        except InfeasibleError as error:
            failure = error
            continue
        if not moved:
            return result
        return replace(result, warnings=(_note_moves(tables, moved), *result.warnings))
    raise failure or InfeasibleError("memory: no placement was found that fits")


def _price_moves(problem: Problem, beyond: Sequence[str]) -> _Moves:
    """What each table in device memory frees and takes elsewhere; nothing for the others."""
    costs = problem.costs
    workload = costs.workload
    count = len(workload.tables)
    lookups = np.array([workload.batch * float(table.pooling) for table in workload.tables])
    tables = workload.tables
    seconds = np.full(count, np.inf)
    chosen = list(tables)
    for kernel in beyond:
        moved = []
        for table in tables:
            moved.append(table if table.host_bytes else replace(table, kernel=kernel))
        check_kernels(moved, costs.platform, one_kernel=costs.fused)
        times = time_host_tables(
            moved,
            lookups,
            costs.platform,
            ranks=costs.ranks,
            optimizer=workload.table_optimizer,
            sorts=workload.embedding == "exact",
        )
        added = times.forward + times.backward
        for number in np.flatnonzero(added < seconds).tolist():
            seconds[number] = added[number]
            chosen[number] = moved[number]
    on_device = np.array([float(table.device_bytes) for table in tables])
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
