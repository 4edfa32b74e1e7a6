"""Devices, memory levels and links: the numbers of a datasheet, each with its origin."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from perfkit.ground.units import Array, Typed, Values, check_positive, check_sizes

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
        Kind of origin, one of `KINDS` [-].
    source : str
        Document, data id or machine [-].
    date : str, optional
        Day it was measured or entered, ISO 8601 [-].
    stderr : float, optional
        Standard error [unit].
    basis : str, optional
        How the document counts: ``dense`` or ``sparse``, ``GB`` or ``GiB``, ``one way`` or ``both
        ways``; `value` is always dense, in bytes and one way [-].
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
        Sustained or datasheet bandwidth, reads and writes together [B/s]; None if it is not known.
    held : Quantity, optional
        Share of the capacity of a cache that rows of tables are found in again [-]; None for all of
        it.
    """

    name: str
    capacity: Quantity | None = None
    bandwidth: Quantity | None = None
    held: Quantity | None = None

    @property
    def effective_capacity(self) -> float | None:
        """What a cache holds; None if its size is not known [B]."""
        if self.capacity is None:
            return None
        share = 1.0 if self.held is None else self.held.value
        return share * self.capacity.value


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
        Whether all working sets that were timed may have fitted into the caches.
    capability : Quantity, optional
        Compute capability of an NVIDIA GPU, such as 9.0; libraries choose kernels by it [-].
    """

    name: str
    kind: str
    peaks: Mapping[str, Quantity]
    memory: tuple[MemoryLevel, ...]
    never_left_cache: bool = False
    capability: Quantity | None = None

    @cached_property
    def main_bandwidth(self) -> float:
        """Bandwidth of the main memory; NaN if it is not known, which a platform does not allow
        [B/s]."""
        main = self.memory[-1].bandwidth
        return main.value if main else math.nan

    @cached_property
    def cache_bandwidth(self) -> float | None:
        """Bandwidth of the last cache; None if there is none, or if it is not known [B/s]."""
        if len(self.memory) < 2:
            return None
        cache = self.memory[-2].bandwidth
        return cache.value if cache else None

    @cached_property
    def access_granularity(self) -> float:
        """Smallest access to memory: a cache line of a CPU, a sector of a GPU [B]."""
        return 64.0 if self.kind == "cpu" else 32.0

    def bandwidth(self, working_set: Values) -> Array:
        """Memory bandwidth for a working set, continuous in its size.

        On a GPU it is that of the main memory for all of them: its last cache serves rows of tables
        alone (docs/formulas.md, table 3.2).

        Parameters
        ----------
        working_set : float or array
            Bytes that are used again and again [B].

        Returns
        -------
        bandwidth : array
            Bytes over the time to move them; each level holds what does not fit into the nearer
            ones [B/s].
        """
        of_operands = self.memory if self.kind == "cpu" else self.memory[-1:]
        levels = [
            (x.capacity.value if x.capacity else math.inf, x.bandwidth.value)
            for x in of_operands
            if x.bandwidth
        ]
        size = np.maximum(check_sizes("working_set", working_set), 1.0)
        ends = [*np.maximum.accumulate([0.0, *(capacity for capacity, _ in levels[:-1])]), math.inf]
        inside = (np.clip(size - low, 0.0, high - low) for low, high in itertools.pairwise(ends))
        return size / sum(part / rate for part, (_, rate) in zip(inside, levels, strict=True))


@dataclass(frozen=True)
class Link(Typed):
    """A link of the network, for one rank.

    Parameters
    ----------
    bandwidth : Quantity
        One way, per rank [B/s].
    latency : Quantity
        Time of one hop with a vanishing message [s].
    name : str, optional
        Product or kind, such as ``NVLink``; empty if unknown [-].
    """

    bandwidth: Quantity
    latency: Quantity
    name: str = ""


@dataclass(frozen=True)
class HostMemory(Typed):
    """Memory of the host of a node, and the way of a device to it.

    Parameters
    ----------
    capacity : Quantity
        Memory of the node [B].
    bandwidth : Quantity
        Peak bandwidth of that memory, all channels of the node, reads and writes together [B/s].
    to_host, from_host : Quantity
        What a copy of pinned memory by one rank reaches, one way [B/s].
    sharers : int, optional
        Ranks of a node that share one link to the host, such as a PCIe switch [-].
    name : str, optional
        The machine, such as ``DGX H100`` [-].
    """

    capacity: Quantity
    bandwidth: Quantity
    to_host: Quantity
    from_host: Quantity
    sharers: int = 1
    name: str = ""


#: Links of a network: in a node, between nodes, between regions.
LINKS = ("intra", "inter", "far")


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
        ``intra`` in a node, ``inter`` between nodes, and ``far`` between regions [-].
    rails : int, optional
        Network adapters of a node [-].
    starts : float, optional
        Start-ups of the library, in collectives composed over nodes, over the measured ones [-].
    regions : int, optional
        Regions of equally many nodes, which only the link ``far`` connects [-].
    algorithms : mapping of str to str, optional
        Algorithm of an operation that is chosen in place of what the library takes, see
        `Platform.with_algorithm` [-].
    """

    ranks_per_node: int
    nodes: int = 1
    links: Mapping[str, Link] = field(default_factory=dict)
    rails: int = 1
    starts: float = 1.0
    regions: int = 1
    algorithms: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> int:
        """Ranks of the whole network [-]."""
        return self.ranks_per_node * self.nodes


def check_base(name: str, value: float, unit: str) -> float:
    """Return a size or rate in a base unit, or raise an error for one that was given in GB or
    TFLOP/s.

    Examples
    --------
    >>> check_base("link", 450, "B/s")
    Traceback (most recent call last):
    ...
    ValueError: link is 450 B/s, too little for any device; write 450e9 for 450 GB/s
    """
    number: float = check_positive(name, value)
    if number < 1e6 and unit != "s":
        raise ValueError(
            f"{name} is {number:g} {unit}, too little for any device; write 450e9 for 450 G{unit}"
        )
    return number
