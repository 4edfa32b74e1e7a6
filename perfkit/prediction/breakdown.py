"""Where the time of an iteration goes: a field for each cause, and what sets the pace."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from perfkit.models.offload import COPY_INPUTS, HOST_WORK
from perfkit.prediction.simulation import RankTimeline, Timeline

#: What limits classes of kernels that are not in `RESOURCES`.
MEMORY = "memory"
#: Resource that limits a class of kernels.
RESOURCES = {
    "gemm": "GEMM",
    "bmm": "GEMM",
    "attention": "attention",
    "convolution": "convolution",
    "recurrent": "recurrent",
    "factorization": "linear algebra",
    "transfer": "transfer",
    "embedding_forward": "embedding",
    "embedding_backward": "embedding",
    "embedding_update": "embedding",
}
#: What may set the pace, in the order in which equal parts are named.
LIMITS = (
    "GEMM",
    "attention",
    "convolution",
    "recurrent",
    "linear algebra",
    "embedding",
    "memory",
    "communication",
    "imbalance",
    "transfer",
    "offload",
    "host",
)
#: The host sets the pace where an iteration takes this many times as long as its device alone [-].
PACE = 1.02
#: Times below this share of the period are rounding [-].
_ROUNDING = 1e-9


class KernelPart(NamedTuple):
    """All kernels of one class in one phase.

    Parameters
    ----------
    phase : str
        ``forward``, ``backward`` or ``update``.
    kind : str
        Operation class, such as ``gemm``.
    operations : int
        How many there are [-].
    time : float
        How long they take alone [s].
    """

    phase: str
    kind: str
    operations: int
    time: float


class CollectivePart(NamedTuple):
    """All collectives of one phase, or all copies and updates of an offload.

    Parameters
    ----------
    phase : str
        ``forward``, ``backward`` or ``update``.
    kind : str
        ``collective``, ``offload`` for what a rank does with its host, or ``inputs`` for copies of
        inputs to the device.
    operations : int
        How many there are [-].
    communication_idle_time : float
        How long the compute stream is idle with one of them in flight [s].
    contention_time : float
        How much longer kernels take because of them [s].
    """

    phase: str
    kind: str
    operations: int
    communication_idle_time: float
    contention_time: float

    @property
    def time(self) -> float:
        """What these collectives add to the iteration [s]."""
        return self.communication_idle_time + self.contention_time


#: What a part of collectives is bound by.
_LIMIT_OF_COLLECTIVES = {
    "collective": "communication",
    "offload": "offload",
    "inputs": "transfer",
}


class Breakdown(NamedTuple):
    """Time of the slowest rank by cause; all causes together are the time of the iteration.

    Parameters
    ----------
    kernels : tuple of KernelPart
        Kernels, by phase and class.
    collectives : tuple of CollectivePart
        Collectives that kernels do not hide, by phase.
    pipeline_hosts : tuple of KernelPart
        Time that hosts add to the passes of a pipeline, whose stages wait for each other, by phase.
    wait_time_for_ranks : float
        The compute stream is idle, as other ranks come later to a collective [s].
    host_device_synchronization : float
        What the iteration takes beyond the longer of host and device, because each waits for the
        other at times [s].
    loading : float
        The iteration waits for the data loader [s].
    host : float
        The device has nothing to do, as its host has launched nothing [s].
    """

    kernels: tuple[KernelPart, ...]
    collectives: tuple[CollectivePart, ...]
    pipeline_hosts: tuple[KernelPart, ...]
    wait_time_for_ranks: float
    host_device_synchronization: float
    loading: float
    host: float

    @property
    def communication_idle_time(self) -> float:
        """How long the compute stream is idle with a collective in flight [s]."""
        return sum(part.communication_idle_time for part in self.collectives)

    @property
    def contention_time(self) -> float:
        """How much longer kernels take because of collectives [s]."""
        return sum(part.contention_time for part in self.collectives)

    @property
    def host_time(self) -> float:
        """What hosts add to the iteration, those of a pipeline included, synchronization aside
        [s]."""
        return self.host + sum(part.time for part in self.pipeline_hosts)

    def list_parts(self) -> dict[tuple[str, str], tuple[int, float]]:
        """Number of operations [-] and time [s] of each part, by phase and class.

        What belongs to no phase has an empty one; causes without any time are left out.
        """
        collectives = sum(part.operations for part in self.collectives)
        operations = collectives
        parts = dict[tuple[str, str], tuple[int, float]]()
        for kernels in (*self.kernels, *self.pipeline_hosts):
            parts[kernels.phase, kernels.kind] = (kernels.operations, kernels.time)
            operations += kernels.operations
        for part in self.collectives:
            parts[part.phase, part.kind] = (part.operations, part.time)
        if self.wait_time_for_ranks:
            parts["", "waiting"] = (collectives, self.wait_time_for_ranks)
        if self.host_device_synchronization:
            parts["", "host_device_synchronization"] = (1, self.host_device_synchronization)
        if self.loading:
            parts["", "loading"] = (1, self.loading)
        if self.host:
            parts["", "host"] = (operations, self.host)
        return parts

    def sum_by_resource(self) -> dict[str, float]:
        """Time that each of `LIMITS` takes, the data loader aside [s]."""
        times = dict.fromkeys(LIMITS, 0.0)
        for part in self.kernels:
            times[RESOURCES.get(part.kind, MEMORY)] += part.time
        for part in self.pipeline_hosts:
            times["host"] += part.time
        for collectives in self.collectives:
            times[_LIMIT_OF_COLLECTIVES[collectives.kind]] += collectives.time
        times["imbalance"] += self.wait_time_for_ranks
        times["host"] += self.host + self.host_device_synchronization
        return times


def break_down(timeline: RankTimeline) -> Breakdown:
    """Split the period of a rank by cause.

    Parameters
    ----------
    timeline : RankTimeline
        One iteration of a rank.

    Returns
    -------
    breakdown : Breakdown
        Causes that sum to the period.
    """
    graph = timeline.graph
    classes = graph.classes
    counts = np.bincount(classes.of_operation).tolist()
    times = np.bincount(classes.of_operation, timeline.times.seconds).tolist()
    parts = dict[tuple[str, str], KernelPart]()
    for operation_class, count, seconds in zip(classes.distinct, counts, times, strict=True):
        key = (operation_class.phase, operation_class.kind)
        before = parts.get(key, KernelPart(*key, 0, 0.0))
        parts[key] = KernelPart(*key, before.operations + count, before.time + seconds)
    kernels = [part for part in parts.values() if part.kind not in ("collective", "host")]
    pipeline_hosts = [part for part in parts.values() if part.kind == "host"]
    collectives = _break_down_collectives(timeline)
    rounding = _ROUNDING * timeline.period
    wait_time_for_ranks = timeline.wait_time_for_ranks
    if wait_time_for_ranks <= rounding:
        wait_time_for_ranks = 0.0
    host = timeline.simulated_period - wait_time_for_ranks
    host -= sum(part.time for part in (*kernels, *pipeline_hosts))
    host -= sum(part.time for part in collectives)
    if abs(host) <= rounding:
        host = 0.0
    return Breakdown(
        kernels=tuple(kernels),
        collectives=collectives,
        pipeline_hosts=tuple(pipeline_hosts),
        wait_time_for_ranks=wait_time_for_ranks,
        host_device_synchronization=timeline.added.host_device_synchronization,
        loading=timeline.added.loading,
        host=host,
    )


def _break_down_collectives(timeline: RankTimeline) -> tuple[CollectivePart, ...]:
    """Split the collectives of a rank, with what its host does beside it, by phase."""
    graph = timeline.graph
    kinds: list[tuple[str, str]] = []  # phase and kind of each
    for position in graph.collectives.tolist():
        label = graph.labels[position]
        kind = "collective"
        if label.name == COPY_INPUTS:
            kind = "inputs"
        elif label.name in HOST_WORK:
            kind = "offload"
        kinds.append((label.phase, kind))
    counts = Counter(kinds)
    communication_idle_time = dict.fromkeys(counts, 0.0)
    # all waits at a position are one time, which belongs to the last of them
    last_waits = {wait.operation: wait.collective for wait in graph.collective_waits}
    for position, collective in last_waits.items():
        communication_idle_time[kinds[collective]] += float(
            timeline.communication_idle_time[position]
        )
    contention_time = dict.fromkeys(counts, 0.0)
    for position in np.flatnonzero(timeline.contention_time).tolist():
        key = (graph.labels[position].phase, "collective")
        if key not in counts:  # those of another phase slow it down
            key = next(key for key in counts if key[1] == "collective")
        contention_time[key] += float(timeline.contention_time[position])
    return tuple(
        CollectivePart(*key, count, communication_idle_time[key], contention_time[key])
        for key, count in counts.items()
    )


def find_bottleneck(causes: Breakdown, timeline: Timeline) -> str:
    """What sets the pace of an iteration.

    Parameters
    ----------
    causes : Breakdown
        Where the time of its slowest rank goes.
    timeline : Timeline
        The iteration on all ranks.

    Returns
    -------
    name : str
        ``input-bound`` if it waits for its data loader, else see `name_bottleneck`.
    """
    if causes.loading:
        return "input-bound"
    times = causes.sum_by_resource()
    device_time = timeline.device_time
    if any(len(rank.group.graph.transfers) for rank in timeline.ranks):
        # a host that waits for its device is part of the time of the device
        device_time = timeline.period - times["host"]
    return str(name_bottleneck(times, float(timeline.hosts.max()), device_time))


def name_bottleneck(times: Mapping[str, Any], host: Any, device: Any) -> np.ndarray:
    """What sets the pace: the host where it takes longer than the device, else the resource with
    the largest part.

    Parameters
    ----------
    times : mapping of str to float or array
        Time that each of `LIMITS` takes; those that are absent take none [s].
    host : float or array
        Time of the host [s].
    device : float or array
        Time of an iteration whose host has launched everything before [s].

    Returns
    -------
    names : array of str
        A name such as ``host-bound`` for each configuration.
    """
    nothing = np.zeros(np.shape(device))
    parts = np.stack([nothing + times.get(limit, 0.0) for limit in LIMITS])
    equal = parts >= (1.0 - _ROUNDING) * parts.max(axis=0)
    largest = np.argmax(equal, axis=0)  # the first of equal parts
    named = np.array([f"{limit}-bound" for limit in LIMITS], dtype=object)
    host_is_slower = np.asarray(host) > PACE * np.asarray(device)
    return np.where(host_is_slower, "host-bound", named[largest])
