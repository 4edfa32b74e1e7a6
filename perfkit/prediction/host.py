"""What the host does around kernels: its clock, the gaps T1 to T5 of every operation, and how sure they are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from perfkit.fitting import Fit
from perfkit.platform import Platform
from perfkit.prediction.programs import Host, RankTimes
from perfkit.prediction.simulation import find_period
from perfkit.units import Array
from perfkit.workloads.graph import Graph

__all__ = ["find_doubt", "make_host", "price_host", "find_host_spread", "time_rank"]

#: Relative doubt of an overhead that states no standard error, by what it rests on [-].
_DOUBT = {"assumed": 0.3, "datasheet": 0.3, "fitted": 0.1, "measured": 0.1}

#: Share of its time that a collective takes from kernels on the same core, where it was not measured: all of it [-].
_CONTENTION = 1.0


def _by_operation(graph: Graph, platform: Platform, term: str) -> Array:
    """Value of one overhead for every operation: that of its variant, else its phase, its class, or all operations."""
    values = np.zeros(len(graph))
    for (kind, variant, phase), members in graph.phases.items():
        keys = (f"{term}.{kind}.{variant}", f"{term}.{kind}.{phase}", f"{term}.{kind}", term)
        values[members] = next((platform.host[key].value for key in keys if key in platform.host), 0.0)
    return values


def price_host(graph: Graph, platform: Platform) -> tuple[Array, Array]:
    r"""Host time of every operation before its first launch, and from there to its last; the first launch comes on top.

    Parameters
    ----------
    graph : Graph
        One rank's iteration.
    platform : Platform
        Where it runs, with ``host`` overheads ``gap`` (T1), ``before_launch`` (T2), ``after_launch`` (T3), ``launch``
        (T4), ``between_launches`` (T5) and ``bare`` (a call without a launch), the same for all operations or, as in
        ``before_launch.gemm.backward``, by class and phase or variant.

    Returns
    -------
    first, more : array
        One time per operation [s].

    Notes
    -----
    A call of the framework costs T1 + T2 before its first kernel, T5 + T4 for every further one and T3 after the last;
    T3 is counted with the next call. A call without a kernel costs T1 and its own time.

    References
    ----------
    .. [1] Z. Lin et al., "Building a performance model for deep learning recommendation model training on GPUs", 2022,
       arXiv:2201.07821, section 3.4 (the five overheads)
    """
    calls, launches = graph.column("calls"), graph.column("launches")
    terms = {
        name: _by_operation(graph, platform, name) for name in ("before_launch", "after_launch", "between_launches")
    }
    gap, bare, launch = (platform.host[key].value if key in platform.host else 0.0 for key in ("gap", "bare", "launch"))
    between = terms["between_launches"]
    first = calls * (gap + terms["before_launch"]) + graph.column("bare") * (gap + bare)
    first += np.where((calls == 0) & (launches > 0), between, 0.0)
    opens = np.flatnonzero(calls)
    first[opens] += np.roll(terms["after_launch"][opens], 1)
    return first, np.maximum(launches - 1, 0.0) * (between + launch)


def find_doubt(platform: Platform) -> float:
    """Relative doubt of what the host adds: the overheads are wrong together, as they come from one machine.

    Parameters
    ----------
    platform : Platform
        Where it runs.

    Returns
    -------
    doubt : float
        Standard error over value, of all overheads together [-].
    """
    pairs = [(q.value, q.stderr if q.stderr is not None else _DOUBT[q.kind] * q.value) for q in platform.host.values()]
    total = sum(value for value, _ in pairs)
    return sum(error for _, error in pairs) / total if total else _DOUBT["assumed"]


def make_host(platform: Platform, whole: Fit | None) -> Host:
    """Make the host clock: from real iterations where there are any, else with the launch time of the platform.

    Parameters
    ----------
    platform : Platform
        Where it runs.
    whole : Fit or None
        Fit of whole iterations, see `perfkit.prediction.cost.find_iteration`.

    Returns
    -------
    host : Host
        The clock.
    """
    asynchronous = platform.device.kind != "cpu"
    overlap: Mapping[str, float] = platform.context.get("overlap", {})
    contention = 0.0 if asynchronous else overlap.get("contention", _CONTENTION)
    if whole is not None and "per_operation" in whole:
        return Host(whole["per_operation"], 0.0, asynchronous, contention)
    launch = platform.host["launch"].value if "launch" in platform.host else 0.0
    return Host(0.0, launch, asynchronous, contention)


def time_rank(
    graph: Graph,
    seconds: Array,
    platform: Platform,
    whole: Fit | None,
    communicators: Sequence[int] | None = None,
    slowdown: float = 1.0,
) -> RankTimes:
    """Put the host time of every operation beside its own.

    Parameters
    ----------
    graph : Graph
        One rank's iteration.
    seconds : array
        Time of each operation [s].
    platform : Platform
        Where it runs.
    whole : Fit or None
        Fit of whole iterations, see `perfkit.prediction.cost.find_iteration`.
    communicators : sequence of int, optional
        Communicator of each collective; one for all by default [-].
    slowdown : float, optional
        How many times longer its operations take, with what their host adds where they run on it [-].

    Returns
    -------
    times : RankTimes
        What the rank executes.
    """
    if whole is not None and "per_operation" in whole:
        first, more = np.full(len(graph), whole["per_operation"]), np.zeros(len(graph))
    else:
        first, more = price_host(graph, platform)
    if whole is not None:
        first[graph.collectives] += whole.get("per_resume", 0.0)
    return RankTimes(
        slowdown * seconds, first * (slowdown if platform.device.kind == "cpu" else 1.0), graph.collectives,
        graph.transfers, graph.column("launches"), more, graph.waits, communicators,
    )  # fmt: skip


def find_host_spread(platform: Platform, times: Sequence[RankTimes], durations: Sequence[Array]) -> float:
    """Spread that the doubt of the host overheads gives the period: little where the host runs ahead of its device.

    Parameters
    ----------
    platform : Platform
        Where it runs, never calibrated with whole iterations.
    times : sequence of RankTimes
        What each rank executes.
    durations : sequence of array
        Time of each rank's collectives [s].

    Returns
    -------
    spread : float
        Standard deviation of the logarithm of the period [-].
    """
    doubt, host = find_doubt(platform), make_host(platform, None)

    def run(factor: float) -> float:
        scaled = [
            replace(
                rank, overhead=factor * rank.overhead, spacing=None if rank.spacing is None else factor * rank.spacing
            )
            for rank in times
        ]
        return find_period(scaled, durations, replace(host, launch=factor * host.launch))

    return math.log(run(1 + doubt) / run(1 / (1 + doubt))) / 2
