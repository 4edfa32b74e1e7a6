"""Devices, memory levels and links: what a datasheet says of a machine, every number with its origin."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from perfkit.ground.units import Array, Typed, Values, check_sizes

#: Bytes of one number by dtype [B]; tf32 is stored as fp32, two numbers of fp4 share a byte.
DTYPES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "int8": 1, "fp8": 1, "fp4": 0.5}
#: Kinds of origin of a number.
KINDS = ("datasheet", "measured", "fitted", "assumed")


@dataclass(frozen=True)
class Quantity(Typed):
    """One number with its provenance.

    Parameters
    ----------
    value : float
        The number [unit].
    unit : str
        Base unit, such as ``FLOP/s`` [-].
    kind : str
        Kind of its origin, one of `KINDS` [-].
    source : str
        Document, data id or machine [-].
    date : str, optional
        Day it was measured or entered, ISO 8601 [-].
    stderr : float, optional
        Standard error [unit].
    basis : str, optional
        How the document counts: ``dense`` or ``sparse``, ``GB`` or ``GiB``, ``one way`` or ``both ways``; `value` is
        dense, in bytes and one way whatever the document says [-].
    """

    value: float
    unit: str
    kind: str
    source: str
    date: str = ""
    stderr: float | None = None
    basis: str = ""


@dataclass(frozen=True)
class MemoryLevel(Typed):
    """A cache or a main memory.

    Parameters
    ----------
    name : str
        Name, such as ``L2`` [-].
    capacity : Quantity, optional
        Size [B]; None for a main memory of unknown size.
    bandwidth : Quantity, optional
        Sustained or datasheet bandwidth, reads and writes together [B/s]; None where nobody states it.
    """

    name: str
    capacity: Quantity | None = None
    bandwidth: Quantity | None = None


@dataclass(frozen=True)
class Device(Typed):
    """What one rank computes on.

    Parameters
    ----------
    name : str
        Product name [-].
    kind : str
        ``cpu`` or ``cuda`` [-].
    peaks : mapping of str to Quantity
        Peak rate by dtype, dense [FLOP/s].
    memory : tuple of MemoryLevel
        Levels from near to far; the last one is the main memory [-].
    never_left_cache : bool, optional
        Whether no working set was timed that was surely larger than the caches.
    capability : Quantity, optional
        Compute capability of an NVIDIA GPU, such as 9.0, which kernels are chosen by [-].
    """

    name: str
    kind: str
    peaks: Mapping[str, Quantity]
    memory: tuple[MemoryLevel, ...]
    never_left_cache: bool = False
    capability: Quantity | None = None

    @property
    def main_bandwidth(self) -> float:
        """Bandwidth of the main memory; a platform knows it [B/s]."""
        main = self.memory[-1].bandwidth
        return main.value if main else math.nan

    def bandwidth(self, working_set: Values) -> Array:
        """Memory bandwidth that a working set sees, continuous in its size.

        Parameters
        ----------
        working_set : float or array
            Bytes that are touched again and again [B].

        Returns
        -------
        bandwidth : array
            Bytes over the time to move them, where each level serves what the nearer ones cannot hold [B/s].
        """
        levels = [(x.capacity.value if x.capacity else math.inf, x.bandwidth.value) for x in self.memory if x.bandwidth]
        size = np.maximum(check_sizes("working_set", working_set), 1.0)
        ends = [*np.maximum.accumulate([0.0, *(capacity for capacity, _ in levels[:-1])]), math.inf]
        inside = (np.clip(size - low, 0.0, high - low) for low, high in itertools.pairwise(ends))
        return size / sum(part / rate for part, (_, rate) in zip(inside, levels, strict=True))


@dataclass(frozen=True)
class Link(Typed):
    """The network as one rank sees it.

    Parameters
    ----------
    bandwidth : Quantity
        One way, per rank [B/s].
    latency : Quantity
        Time of one hop with a vanishing message [s].
    name : str, optional
        What it is, such as ``NVLink``; empty where unknown [-].
    """

    bandwidth: Quantity
    latency: Quantity
    name: str = ""


@dataclass(frozen=True)
class Network(Typed):
    """How ranks are connected.

    Parameters
    ----------
    ranks_per_node : int
        Ranks that share the intra-node link [-].
    nodes : int, optional
        Nodes [-].
    links : mapping of str to Link, optional
        ``intra`` and, between nodes, ``inter`` [-].
    rails : int, optional
        Network adapters of a node [-].
    starts : float, optional
        How many times as long as those that were measured the start-ups of the library are, in collectives that are
        composed over nodes; as long, if not given [-].
    """

    ranks_per_node: int
    nodes: int = 1
    links: Mapping[str, Link] = field(default_factory=dict)
    rails: int = 1
    starts: float | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the whole network [-]."""
        return self.ranks_per_node * self.nodes
