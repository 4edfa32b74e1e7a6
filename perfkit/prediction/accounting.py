"""Where the time of an iteration goes on one rank, and how sure its total is."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from perfkit.fitting import Fit
from perfkit.platform import Platform
from perfkit.prediction.communicators import Cast
from perfkit.prediction.cost import Costs
from perfkit.prediction.host import find_host_spread
from perfkit.prediction.programs import RankTimes
from perfkit.prediction.sharing import measure_overlap
from perfkit.prediction.simulation import Timeline
from perfkit.units import Array, rank_largest
from perfkit.workloads.graph import Graph

__all__ = ["find_spread", "split_period", "sum_collectives", "sum_communication"]

#: Doubt of kernels measured alone, inside an iteration on a platform never calibrated with one: the root mean square of
#: what published active times of V100, TITAN Xp and P100 leave (-2.5, -6.5 and -12 %, benchmarks/gpu_iterations.py).
_CONTEXT = 0.08


def sum_communication(graph: Graph, timeline: Timeline, index: int) -> tuple[float, float, float]:
    """Time that one rank spends on collectives.

    Parameters
    ----------
    graph : Graph
        What it does.
    timeline : Timeline
        When.
    index : int
        Its number in the timeline [-].

    Returns
    -------
    total, exposed, waiting : float
        With a collective in flight, the part of it that operations do not hide, and waiting for other ranks [s].
    """
    places, starts, ends = graph.collectives, timeline.starts[index], timeline.ends[index]
    flights = list(zip(starts[places].tolist(), ends[places].tolist(), strict=True))
    total = float(measure_overlap(flights, np.array([-math.inf]), np.array([math.inf]))[0])
    exposed = float(timeline.exposed[index].sum())
    waiting = float(timeline.stalls[index].sum()) - exposed
    return total, min(exposed + float(timeline.stolen[index].sum()), total), waiting


def split_period(
    graph: Graph, times: RankTimes, timeline: Timeline, index: int
) -> dict[tuple[str, str], tuple[int, float]]:
    """Time of one rank by phase and class, with waiting and host time, so that the parts sum to the period.

    Parameters
    ----------
    graph : Graph
        What it does.
    times : RankTimes
        What that takes.
    timeline : Timeline
        When.
    index : int
        Its number in the timeline [-].

    Returns
    -------
    parts : dict of (str, str) to (int, float)
        Operations and time by phase and class [s].
    """
    parts: dict[tuple[str, str], tuple[int, float]] = {}
    for (kind, _, phase), members in graph.phases.items():
        count, total = parts.get((phase, kind), (0, 0.0))
        parts[phase, kind] = (count + len(members), total + float(times.seconds[members].sum()))
    spent = dict.fromkeys((graph.labels[place][3] for place in graph.collectives), 0.0)
    for place, number in dict(times.find_waits()).items():  # what is exposed counts in the phase of the collective
        spent[graph.labels[times.collectives[number]][3]] += float(timeline.exposed[index][place])
    for (_, _, _, phase, _), seconds in zip(graph.labels, timeline.stolen[index].tolist(), strict=True):
        if seconds:
            spent[phase if phase in spent else next(iter(spent))] += seconds
    for phase, seconds in spent.items():
        parts[phase, "collective"] = (parts[phase, "collective"][0], seconds)
    waiting = float((timeline.stalls[index] - timeline.exposed[index]).sum())
    if waiting > 1e-9 * timeline.period:
        parts["", "waiting"] = (len(times.collectives), waiting)
    rest = timeline.period - sum(time for _, time in parts.values())
    if abs(rest) > 1e-9 * timeline.period:
        parts["", "host"] = (len(graph), rest)
    return parts


def sum_collectives(cast: Cast, times: Sequence[RankTimes], timeline: Timeline, index: int) -> dict[int, float]:
    """Time of one rank's collectives by communicator.

    Parameters
    ----------
    cast : Cast
        Who meets whom.
    times : sequence of RankTimes
        What every rank executes.
    timeline : Timeline
        When.
    index : int
        The rank's number in these [-].

    Returns
    -------
    totals : dict of int to float
        By the number of the communicator [s].
    """
    places, keys = times[index].collectives, cast.name_communicators(index)
    lengths, totals = (timeline.ends[index] - timeline.starts[index])[places].tolist(), dict.fromkeys(keys, 0.0)
    for key, length in zip(keys, lengths, strict=True):
        totals[key] += length
    return totals


def find_spread(
    platform: Platform,
    whole: Fit | None,
    parts: Mapping[tuple[str, str], tuple[int, float]],
    costs: Costs,
    times: Sequence[RankTimes],
    durations: Sequence[Array],
    period: float,
) -> float:
    """Spread of the logarithm of the total.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    whole : Fit or None
        Fit of whole iterations, see `perfkit.prediction.cost.find_iteration`.
    parts : mapping of (str, str) to (int, float)
        Time of the slowest rank, see `split_period` [s].
    costs : Costs
        What its operations cost.
    times : sequence of RankTimes
        What every rank executes.
    durations : sequence of array
        Time of each rank's collectives [s].
    period : float
        Time of an iteration [s].

    Returns
    -------
    spread : float
        Standard deviation [-].

    Notes
    -----
    Where whole iterations were calibrated, the errors of those left out say it all: what a class gets wrong and what
    varies at random. Else the systematic errors of the classes, independent where they were fitted and alike where
    they are only assumed, 30 % on what other ranks add, what the doubt of the host overheads comes to, and what any
    iteration adds to kernels measured alone.
    """
    if whole is not None:
        return whole.spread
    slowest = times[rank_largest([float(rank.seconds.sum()) for rank in times])[0]]
    errors = costs.spread * slowest.seconds / period
    each = np.bincount(costs.classes, weights=np.where(costs.assumed, 0.0, errors))
    own = float(errors[costs.assumed].sum() ** 2 + (each**2).sum())
    waits = sum(seconds for (_, kind), (_, seconds) in parts.items() if kind in ("waiting", "collective"))
    alone = 0.0 if platform.context else _CONTEXT * min(float(slowest.seconds.sum()) / period, 1.0)
    return math.hypot(math.sqrt(own), 0.3 * waits / period, alone, find_host_spread(platform, times, durations))
