"""The one shard whose move to another rank helps a plan most."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from perfkit.sharding.options import Option
from perfkit.sharding.pricing import RESOURCES
from perfkit.sharding.problem import Problem
from perfkit.units import Array, format_time
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import name_tables

__all__ = ["Move", "find_move"]

_MEMORY = list(RESOURCES).index("memory")


@dataclass(frozen=True)
class Move:
    """A shard that goes from one rank to another.

    Parameters
    ----------
    table : str
        Its table.
    source, target : int
        From where to where [-].
    time : float
        Time of the plan after the move [s].
    gain : float
        Part of the time that the move saves; below zero where it costs time but makes room [-].
    """

    table: str
    source: int
    target: int
    time: float
    gain: float

    def __str__(self) -> str:
        saved = f"{abs(self.gain):.1%} {'less' if self.gain >= 0 else 'more'}"
        return f"{self.table} from rank {self.source} to rank {self.target}: {format_time(self.time)}, {saved}"


def find_move(
    problem: Problem,
    options: Sequence[Option],
    plan: Plan,
    loads: Array,
    *,
    free: Callable[[int, int, Plan], bool] | None = None,
) -> Move | None:
    """Find the move of one shard that shortens the time most, or makes most room where the memory does not suffice.

    Parameters
    ----------
    problem : Problem
        Prices and objective.
    options : sequence of Option
        How each table is placed.
    plan : Plan
        On which ranks.
    loads : array, shape (ranks, 7)
        What each rank carries by `perfkit.sharding.pricing.RESOURCES` [-].
    free : callable, optional
        Whether a shard of a table, by number, may go to a rank of a plan; any may, unless given.

    Returns
    -------
    move : Move or None
        The best one; None where no move of a single shard helps.

    Notes
    -----
    Only shards on a rank that carries most of some resource are tried, as no other move alone can shorten the time.
    """
    objective = problem.objective
    reduced = {name: float(sum(getattr(option, name) for option in options)) for name in ("rows", "gradients")}
    before = float(objective.time(loads.max(axis=0), **reduced))
    over = float(np.maximum(loads[:, _MEMORY] - problem.capacity, 0).sum())
    best, found = (over, before * (1 - 1e-9)), None
    for table, source, shard, allowed in _candidates(options, plan, loads, problem.rates.node):
        moved = objective.loads(shard)
        rest = loads.copy()
        rest[source] -= moved
        ahead = np.sort(rest, axis=0)[-2:]
        others = np.where(np.arange(len(rest))[:, None] == rest.argmax(axis=0), ahead[0], ahead[1])
        times = objective.time(np.maximum(others, rest + moved), **reduced)
        spill = np.maximum(rest[:, _MEMORY] - problem.capacity, 0)
        spills = spill.sum() - spill + np.maximum((rest + moved)[:, _MEMORY] - problem.capacity, 0)
        for target in allowed:
            if free is not None and not free(table, target, plan):
                continue
            if (after := (float(spills[target]), float(times[target]))) < best:
                best, found = after, (table, source, target)
    if found is None:
        return None
    table, source, target = found
    name = name_tables(problem.rates.workload.tables)[table]
    return Move(name, source, target, best[1], 1 - best[1] / before)


def _candidates(
    options: Sequence[Option], plan: Plan, loads: Array, node: int
) -> Iterator[tuple[int, int, Array, list[int]]]:
    """Table, rank and costs of each shard of the ranks in question, and the ranks that it may go to."""
    fullest = {int(rank) for rank, most in zip(loads.argmax(axis=0), loads.max(axis=0), strict=True) if most > 0}
    for table, (option, placement) in enumerate(zip(options, plan.placements, strict=True)):
        if placement.kind not in ("table_wise", "column_wise", "table_column_wise"):
            continue
        for source, shard in zip(placement.ranks, option.shards, strict=True):
            if source in fullest:
                near = range(source - source % node, min(source - source % node + node, plan.ranks))
                ranks = near if placement.kind == "table_column_wise" else range(plan.ranks)
                yield table, source, shard, [rank for rank in ranks if rank not in placement.ranks]
