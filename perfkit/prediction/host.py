"""What the host does around kernels: the gaps T1 to T5 of every operation of a graph, from the platform's overheads."""

import numpy as np

from perfkit.platform import Platform
from perfkit.units import Array
from perfkit.workloads.graph import Graph

__all__ = ["find_doubt", "price_host"]

#: Relative doubt of an overhead that states no standard error, by what it rests on [-].
_DOUBT = {"assumed": 0.3, "datasheet": 0.3, "fitted": 0.1, "measured": 0.1}


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
