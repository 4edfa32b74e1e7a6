"""Describe the device and the network of a measured machine: peaks, levels of the memory, and
links."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from perfkit.calibration.fit_kernels import count_traffic, list_streams
from perfkit.ground.hardware import Device, Link, MemoryLevel, Network, Quantity
from perfkit.measure.machine import Fact
from perfkit.measure.records import MachineMeasurements


def describe_hardware(
    measurements: MachineMeasurements, capacities: Sequence[float], rates: Sequence[float]
) -> tuple[Device, Network]:
    """Make device and network; their peaks and bandwidths are the best measured rates.

    Parameters
    ----------
    measurements : MachineMeasurements
        All measurements.
    capacities, rates : sequence of float
        Levels of the memory, see `perfkit.calibration.fit_caches.find_caches` [B] and [B/s].

    Returns
    -------
    device : Device
        One rank.
    network : Network
        With one link if collectives were timed.
    """
    device = _describe_device(measurements, capacities, rates)
    ranks, collectives = int(measurements.ranks), measurements.collectives
    if not collectives:
        return device, Network(max(ranks, 1))
    if measurements.ranks_per_node is None:
        ranks_per_node = ranks
    else:
        ranks_per_node = int(measurements.ranks_per_node)
    bandwidth = max(collective.nbytes / collective.q1 for collective in collectives)
    latency = min(collective.q1 for collective in collectives)
    link = Link(_measure(measurements, bandwidth, "B/s"), _measure(measurements, latency, "s"))
    links = {"intra" if ranks <= ranks_per_node else "inter": link}
    return device, Network(ranks_per_node, nodes=max(1, ranks // ranks_per_node), links=links)


def _describe_device(
    measurements: MachineMeasurements, capacities: Sequence[float], rates: Sequence[float]
) -> Device:
    """Make the device of one rank."""
    kernels, streams = measurements.kernels, list_streams(measurements.kernels)
    peak = max(kernel.sizes["flops"] / kernel.q1 for kernel in kernels if kernel.kind == "gemm")
    if not rates:  # a lower bound: the best rate of a kernel
        rates = [max(count_traffic(kernel) / kernel.q1 for kernel in kernels)]
    names = name_levels(capacities)
    bounds = [0.0, *capacities, np.inf]
    levels = []
    for name, rate, (low, high) in zip(names, rates, pairwise(bounds), strict=True):
        seen = [
            count_traffic(kernel) / kernel.q1
            for kernel in streams
            if max(2.0 * low, 1e5) < kernel.nbytes <= high
        ]
        if high < np.inf:
            size: Quantity | None = _measure(measurements, high, "B", "fitted")
        else:
            size = _state_memory(measurements)
        bandwidth = _measure(measurements, max([rate, *seen]), "B/s")
        levels.append(MemoryLevel(name, size, bandwidth))
    processor = measurements.machine["processor"] + ", one core per rank"
    peaks = {"fp32": _measure(measurements, peak, "FLOP/s")}
    return Device(processor, measurements.device, peaks, tuple(levels))


def name_levels(capacities: Sequence[float]) -> list[str]:
    """Name the levels of the memory.

    Parameters
    ----------
    capacities : sequence of float
        Those of the caches that were found, the smallest first [B].

    Returns
    -------
    names : list of str
        One for each cache, and the main memory.

    Examples
    --------
    >>> name_levels([1e6, 3e7])
    ['L2', 'L3', 'DRAM']
    """
    return [*("L1", "L2", "L3")[3 - len(capacities) :], "DRAM"]


def _state_memory(measurements: MachineMeasurements) -> Quantity | None:
    """Size of the main memory as the operating system states it, if it does [B]."""
    memory: Fact = measurements.facts["memory"]
    if not memory.value:
        return None
    return Quantity(float(memory.value), "B", "measured", memory.source, measurements.date)


def _measure(
    measurements: MachineMeasurements, value: float, unit: str, kind: str = "measured"
) -> Quantity:
    """A quantity that follows from the measurements."""
    return Quantity(float(value), unit, kind, measurements.id, measurements.date)
