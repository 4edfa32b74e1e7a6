"""A lower bound of the time of all placements, by Lagrangian relaxation."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.sharding.candidates import find_grain
from perfkit.sharding.problem import Candidates, Floors, Grain, Problem, Resource
from perfkit.sharding.relaxation import ROUNDING, Relaxation
from perfkit.workloads.placement_kinds import PLACEMENT_KINDS

#: Most choices of relaxed problems that a search begins with, and prices that are tried for them [-].
_MOST_CHOICES, _STEPS_OF_CANDIDATES = 16, 4000


class LowerBound(NamedTuple):
    """Time that no placement can beat.

    Parameters
    ----------
    time : float
        The bound [s].
    kinds : array of str
        Kind of placement of each unit of tables where it is reached [-].
    set_by_host : bool
        Whether the host sets it.
    """

    time: float
    kinds: np.ndarray
    set_by_host: bool


def find_lower_bound(problem: Problem, floors: Floors) -> LowerBound:
    """Time that no placement of these kinds can beat, and the kinds that come near it.

    Notes
    -----
    The fullest rank carries at least the average load of every resource, and the largest shard.
    Each table takes its best kind at a price per byte of each message (Lagrangian relaxation), and
    the prices are those that give the largest bound. This is repeated on shorter and shorter
    intervals of bytes, as the curves of messages are not convex, and of the largest shard. Where a
    larger message is faster, the fullest rank is charged the fastest of the larger messages.
    """
    rising_curves = {resource: curve.never_falling() for resource, curve in problem.curves.items()}
    rising = replace(problem, curves=rising_curves)
    best = Relaxation(rising, floors).solve_all()[0]
    least_load = floors.least_of_units(floors.average).sum(axis=0)
    with_largest_shard = rising.time(np.maximum(floors.largest, least_load))
    time_of_largest_shard = float(floors.least_of_units(with_largest_shard).max())
    least_host_time = problem.host_seconds + float(least_load[Resource.HOST])
    host_time = problem.correction * least_host_time
    bound = max(best.time, time_of_largest_shard, host_time)
    set_by_host = host_time > best.time
    choice = best.choice
    if set_by_host:
        choice = floors.cheapest_of_units(floors.average[:, Resource.HOST])
    return LowerBound(bound * (1 - ROUNDING), floors.kind[choice], set_by_host)


def relax(problem: Problem, candidates: Candidates, lightest: Array | None = None) -> Relaxation:
    """Relaxed problems of candidates; `lightest` is that of `Floors`."""
    everywhere = np.where(candidates.on_every_rank[:, None], candidates.shard_load, 0.0)
    floors = Floors(
        candidates.unit,
        candidates.kind,
        candidates.total_load / problem.costs.ranks,
        everywhere,
        candidates.shard_load + candidates.hot_row_load,
        _find_grain(candidates),
        lightest,
    )
    return Relaxation(problem, floors, _STEPS_OF_CANDIDATES)


def list_choices(relaxation: Relaxation) -> list[np.ndarray]:
    """Candidates of the units in relaxed problems, the least time first."""
    chosen = dict[bytes, np.ndarray]()
    for relaxed in relaxation.solve_all():
        chosen.setdefault(relaxed.choice.tobytes(), relaxed.choice)
    return list(chosen.values())[:_MOST_CHOICES]


def _find_grain(candidates: Candidates) -> Grain | None:
    """Grain of the pooled rows of candidates, but for those split by rows inside nodes; None if there
    is none."""
    pooled = candidates.shard_load[:, Resource.POOLED]
    partial = candidates.shard_load[:, Resource.PARTIAL]
    splits_columns = [kind.name for kind in PLACEMENT_KINDS if kind.splits_columns]
    if np.isin(candidates.kind, splits_columns).any():
        return None
    nbytes = find_grain(pooled[partial == 0])
    if nbytes is None:
        return None
    breaks = pooled % nbytes > 0
    return Grain(nbytes, breaks, float(np.min(partial[breaks], initial=np.inf)))
