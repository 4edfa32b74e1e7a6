"""What a log of collectives says besides its rows, as records: a `LogFacts` for each run.

A statement keeps the line in which it first stands, so that a diagnosis can quote it. What a log does
not say is None or empty: most logs hold no line of NCCL. `perfkit.readers.nccl_facts` finds the
statements; what they mean is told in `perfkit.diagnosis`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

#: Who gave a variable its value: the environment of the job, as NCCL lists it; a command or a job
#: script that the log shows; or a plugin of the network, where nobody else had set it.
Source = Literal["environment", "command", "plugin"]
#: Way of the data between two ranks.
Way = Literal["P2P", "SHM", "NET", "COLLNET", "other"]
#: What a telling line of NCCL is about.
Topic = Literal[
    "no IB device",
    "no libibverbs",
    "no network plugin",
    "P2P disabled",
    "GPU Direct RDMA enabled",
    "GPU Direct RDMA disabled",
    "no tuner plugin",
    "tuner plugin",
    "virtual adapter",
    "MNNVL",
    "rings connected",
    "speed of a network unknown",
]


class Statement(NamedTuple):
    """What a log says, in its own words."""

    text: str
    host: str  # that says so, empty where the line names none
    line: int  # the first one that says so
    times: int = 1  # how often it is said [-]


class Remark(NamedTuple):
    """A line of NCCL that may tell why a run is slow."""

    topic: Topic
    text: str
    host: str
    line: int
    times: int = 1


class Setting(NamedTuple):
    """A variable of NCCL and its neighbours, and its value."""

    name: str
    value: str
    source: Source
    hosts: tuple[str, ...]  # that list it, sorted; empty for commands
    line: int


class Adapter(NamedTuple):
    """One network adapter that NCCL lists."""

    host: str
    number: int  # by which NCCL calls it
    name: str  # mlx5_0, eth0
    port: str  # a number, or the address of an Ethernet card
    fabric: str  # IB, RoCE, Socket
    line: int
    rate: float | None = None  # None where NCCL does not say it [B/s]


class Affinity(NamedTuple):
    """Cores of the host on which NCCL runs the threads of a GPU."""

    host: str
    device: int
    cores: int  # [-]
    text: str  # what NCCL says
    line: int


class Provider(NamedTuple):
    """What the plugin of libfabric selects."""

    host: str
    name: str  # efa, tcp
    adapters: int | None  # that it finds [-]
    line: int


class Transport(NamedTuple):
    """How data pass between ranks, with the number of connections of channels that do so."""

    name: str  # as printed: P2P/CUMEM/read, SHM/direct/direct, NET/IB/0/GDRDMA
    way: Way
    network: str | None  # IB, Socket, AWS Libfabric; None within a node
    adapter: int | None  # its number, as in `Adapter` and in the same host
    has_gdrdma: bool  # whether the adapter reads and writes the memory of GPUs
    times: int  # lines that say so [-]
    line: int


class Channels(NamedTuple):
    """Numbers of channels, each of which is a ring, a tree or a way of its own."""

    collective: int
    collnet: int
    nvls: int  # 0 where NVLink SHARP is not used
    p2p: int
    p2p_per_peer: int
    line: int


class Multicast(NamedTuple):
    """Whether NVLink SHARP is available on a device."""

    is_available: bool
    host: str
    device: int
    line: int


class Choice(NamedTuple):
    """Algorithm and protocol that NCCL chose for one size."""

    operation: str | None  # all_reduce; None where NCCL before 2.22 does not say
    nbytes: int  # [B]
    algorithm: str  # Ring, Tree, NVLS, NVLSTree, CollNetDirect, CollNetChain, PAT, Symmetric
    protocol: str  # LL, LL128, Simple; the name of the kernel for Symmetric
    channels: int | None  # None where NCCL before 2.24 does not say [-]
    seconds: float | None  # that NCCL expects; None where NCCL does not say [s]
    line: int
    times: int = 1  # [-]


class Graph(NamedTuple):
    """A shape that NCCL found in the topology, with the bandwidth that it counts for a channel."""

    pattern: str  # ring, tree, balanced tree, split tree, NVLS, CollNetDirect
    channels: int
    within: float  # bandwidth of a channel within the node [B/s]
    between: float  # and between nodes [B/s]
    within_path: str  # NVL, PIX, PXB, PHB, SYS, LOC, XGMI
    between_path: str
    host: str
    line: int


class RankPlace(NamedTuple):
    """Where a rank runs."""

    rank: int
    host: str
    device: int | None  # number of its GPU [-]
    bus: str | None  # PCI address of its GPU: 0000:1b:00, or 1b where only the bus is printed
    name: str | None  # of its GPU, as NVIDIA H100 80GB HBM3
    line: int


class Options(NamedTuple):
    """Options of a run, as nccl-tests prints them."""

    warmup: int
    iterations: int
    aggregated: int | None  # operations in one group [-]
    is_checked: bool | None  # whether results are checked
    graph_launches: int | None  # launches of a CUDA graph; 0 for none [-]
    line: int


@dataclass(frozen=True)
class LogFacts:
    """What the lines of one run say besides its table.

    Rows of the run are those with this `file` and a line from `first_line` to `last_line`.
    """

    file: str
    first_line: int
    last_line: int
    command: Statement | None = None
    options: Options | None = None
    places: tuple[RankPlace, ...] = ()  # by rank
    ranks: int | None = None  # of NCCL's communicator [-]
    nodes: int | None = None  # of NCCL's communicator [-]
    library: Literal["NCCL", "RCCL"] | None = None
    versions: tuple[Statement, ...] = ()  # of the library, such as 2.21.5
    networks: tuple[Statement, ...] = ()  # of each host: IB, Socket, the name of a plugin
    adapters: tuple[Adapter, ...] = ()
    providers: tuple[Provider, ...] = ()
    transports: tuple[Transport, ...] = ()
    channels: Channels | None = None
    multicast: tuple[Multicast, ...] = ()
    affinities: tuple[Affinity, ...] = ()
    settings: tuple[Setting, ...] = ()
    chosen: tuple[Choice, ...] = ()
    graphs: tuple[Graph, ...] = ()
    remarks: tuple[Remark, ...] = ()
    warnings: tuple[Statement, ...] = ()  # of NCCL itself: NCCL WARN
    wrong_lines: tuple[int, ...] = ()  # rows whose results hold wrong values

    def holds(self, file: str, line: int) -> bool:
        """Whether a line belongs to this run."""
        return file == self.file and self.first_line <= line <= self.last_line

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts in the order of their ranks."""
        return tuple(dict.fromkeys(place.host for place in self.places))

    @property
    def buses(self) -> dict[str, tuple[str, ...]]:
        """PCI addresses of the GPUs of each host, in the order of their ranks; hosts without are
        left out."""
        by_host: dict[str, tuple[str, ...]] = {}
        for place in self.places:
            if place.bus is not None:
                by_host[place.host] = (*by_host.get(place.host, ()), place.bus)
        return by_host

    @property
    def version(self) -> str | None:
        """Version of the library, such as 2.21.5; None where it is not said or where hosts differ."""
        return _find_only(statement.text for statement in self.versions)

    @property
    def network(self) -> str | None:
        """Network between nodes, also as transports name it; None where neither is said or where
        hosts differ."""
        if not self.networks:
            return _find_only(way.network for way in self.transports if way.network is not None)
        return _find_only(statement.text for statement in self.networks)

    @property
    def has_nvls(self) -> bool | None:
        """Whether NVLink SHARP is available on all devices; None where it is not said."""
        if not self.multicast:
            return None
        return all(statement.is_available for statement in self.multicast)

    @property
    def nvls_channels(self) -> int | None:
        """Channels of NVLink SHARP; None where they are not said [-]."""
        return None if self.channels is None else self.channels.nvls

    def list_adapters(self, host: str) -> tuple[Adapter, ...]:
        """Network adapters of a host, by number."""
        return tuple(adapter for adapter in self.adapters if adapter.host == host)

    def find_settings(self, name: str) -> tuple[Setting, ...]:
        """Settings of a variable, in the order of the log."""
        return tuple(setting for setting in self.settings if setting.name == name)

    def find_choices(self, operation: str, nbytes: int) -> tuple[Choice, ...]:
        """What NCCL chose for a size [B], the most frequent first."""
        choices = [
            choice
            for choice in self.chosen
            if choice.nbytes == nbytes and choice.operation in (None, operation)
        ]
        return tuple(sorted(choices, key=lambda choice: (-choice.times, choice.line)))


def _find_only(values: Iterable[str]) -> str | None:
    """The only value of several equal ones; None for none and for different ones."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
