"""What a log of nccl-tests says besides its tables: commands, devices, and what NCCL itself prints with
NCCL_DEBUG=INFO, from NCCL 2.4 to 2.28 and RCCL.

`gather_facts` reads the lines of a log, and gives the records of `perfkit.readers.log_facts` for each run.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from perfkit.ground.units import escape
from perfkit.readers.log_facts import (
    Adapter,
    Affinity,
    Channels,
    Choice,
    Graph,
    LogFacts,
    Multicast,
    Options,
    Provider,
    RankPlace,
    Remark,
    Setting,
    Source,
    Statement,
    Topic,
    Transport,
    Way,
)
from perfkit.readers.nccl_tables import COMMAND, NAMES, START, Device, Table

#: Algorithms and protocols by the numbers that NCCL 2.7 to 2.23 prints with NCCL_DEBUG_SUBSYS=TUNING
#: (NVIDIA, nccl, src/include/nccl_tuner.h and devcomm.h).
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
#: The same by the names that NCCL 2.24 and later print.
_NAMED = {name.lower().replace("_", ""): name for name in (*_ALGORITHMS, *_PROTOCOLS)}
_NAMED |= {"collnet": "CollNetDirect"}
#: Shapes that NCCL searches, by number (NVIDIA, nccl, src/include/graph.h).
_PATTERNS = {
    "1": "balanced tree",
    "2": "split tree",
    "3": "tree",
    "4": "ring",
    "5": "NVLS",
    "6": "CollNetDirect",
}

#: A line of NCCL: host, process, thread and device, then its kind and the message. The name of a
#: source file stands before the kind of a warning.
_SPOKEN = re.compile(
    r"(?:([\w.-]+):\d+:\d+ \[(-?\d+)\] (?:\S+ )?)?(?:NCCL|RCCL) (INFO|WARN|ERROR) +(.*)"
)
#: Beginnings of the names of variables that are kept.
_PREFIXES = ("NCCL_", "RCCL_", "OFI_NCCL_", "FI_", "UCX_", "CUDA_", "HSA_", "HIP_", "GPU_")
_VARIABLE = rf"(?:{'|'.join(_PREFIXES)})[A-Z0-9_]{{2,60}}"
_VALUE = r"[\w^=/.~-][\w^,;:@/+=.%~-]{0,199}"
_LISTED = re.compile(rf"({_VARIABLE}) set (?:by environment )?to ({_VALUE})")
#: Variables that the network plugin of EFA sets by itself where nobody else has, in every job on
#: such a network: aws-ofi-nccl, src/platform-aws.c (Apache-2.0).
_BY_PLUGIN = re.compile(
    rf"NET/OFI (?:Running on .{{1,60}}, )?Setting ({_VARIABLE})(?: environment variable)? to [\"']?({_VALUE})"
)
_ASSIGNED_PLUGIN = re.compile(r"Assigned NET plugin (.{1,60}?) to comm")
_AFFINITY = re.compile(
    r"Setting affinity for GPU (\d+) to ([\da-fA-F,-]+)"
    r"|Affinity for GPU (\d+) is ([\d,-]+)"
    r"|Affinity for GPU (\d+) is empty.*CPU affinity = ([\d,-]+)"
)
_ASSIGNED = re.compile(rf"\b({_VARIABLE})[\"']?\s?[=:]\s?[\"']?({_VALUE})")
_EXPORT = re.compile(r"(?:^|[\s+;&])export\s")
_UNSET = re.compile(r"(?:^|[\s+;&])unset\s+((?:-v\s+)?[A-Z][A-Z0-9_]+(?:\s+[A-Z][A-Z0-9_]+)*)")
_VERSION = re.compile(r"(?<![A-Za-z])([NR])CCL version *:? *v?(\d+\.\d+(?:\.\d+)?)([+.]\w[\w.]*)?")
_LIBRARY = re.compile(r"nccl-library=(\d{4,6})\b")
_ADAPTER = re.compile(r"\[(\d+)\] ?([\w.-]+):([\w.:%]+?)(?:/(\w+)(?:/(\w+))?)?(?=<|[\s,;}]|$)")
#: Rates of adapters in Mbit/s, as NCCL 2.21 and later print them.
_RATE = re.compile(
    r"Made virtual device \[\d+\] name=([\w.-]+) speed=(\d{1,9}) ndevs=1\b"
    r"|NET/IB ?: \[\d+\] ([\w.-]+):[\w.-]+:\d+/\w+ provider=\S+ speed=(\d{1,9})\b"
)
_PROVIDER = re.compile(
    r"Selected [Pp]rovider is ([\w;-]+)(?:, fabric is ([\w-]+))?(?: \(found (\d+) nics?\))?"
)
_CHANNELS = re.compile(
    r"(\d+) coll channels,(?: (\d+) collnet channels,)?(?: (\d+) nvls channels,)?"
    r" (\d+) p2p channels, (\d+) p2p channels per peer"
)
_COMMUNICATOR = re.compile(
    r"\brank (\d+) n[rR]anks (\d+)(?: nNodes (\d+) localRanks (\d+))?(?: cudaDev (-?\d+))?"
    r"(?: nvmlDev -?\d+)?(?: busId ([\da-f]+))?"
)
_CHOSEN = re.compile(
    r"(?:(\w+)(?: \[(Symmetric)\])?: +)?(\d+) Bytes -> "
    r"(?:(?:[Aa]lgo|[Aa]lgorithm) (\w+) [Pp]roto(?:col)? (\w+)|Kernel (\w+))"
    r"(?: time ([\d.]+(?:e[+-]?\d+)?))?"
    r"(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}| nchannels (\d+))?"
)
_NVLS = re.compile(r"NVLS multicast support is (not )?available on dev (\d+)")
_PATTERN = re.compile(
    r"Pattern (\w+), crossNic \d+, nChannels (\d+), (?:bw|speed) ([\d.]+)/([\d.]+), "
    r"type (\w+)/(\w+)"
)
#: What nccl-tests prints before the name of its program.
_FIRST_WORDS = re.compile(r"# (?:nccl-tests version |Writing JSON output to )")
_OPTIONS = re.compile(
    r"warmup iters: (\d+) iters: (\d+)(?: agg iters: (\d+))?(?: (?:validation|check): (\d+))?"
    r"(?: graph: (\d+))?"
)
_TOPICS: tuple[tuple[Topic, re.Pattern[str]], ...] = (
    ("no IB device", re.compile(r"NET/IB ?: No device found")),
    ("no libibverbs", re.compile(r"[Ff]ailed to open libibverbs")),
    ("no network plugin", re.compile(r"NET/Plugin ?:.*(?:No plugin found|Could not find)")),
    (
        "P2P disabled",
        re.compile(
            r"P2P is disabled|Could not enable P2P|P2P.* not supported"
            r"|Check P2P Type (?:intraNodeP2pSupport|isAllDirectP2p) 0"
        ),
    ),
    ("GPU Direct RDMA enabled", re.compile(r"GPU Direct RDMA (?:\([\w-]+\) )?[Ee]nabled")),
    ("GPU Direct RDMA disabled", re.compile(r"GPU Direct RDMA (?:\([\w-]+\) )?[Dd]isabled")),
    (
        "no tuner plugin",
        re.compile(
            r"TUNER/Plugin ?: (?:No plugin|Could not find|Failed|Plugin load|Using internal)"
        ),
    ),
    ("tuner plugin", re.compile(r"TUNER/Plugin|NET/OFI .*Tuner init|Using tuner plugin")),
    ("virtual adapter", re.compile(r"Made vNic|Made virtual device .*ndevs=[2-9]")),
    ("MNNVL", re.compile(r"\bMNNVL 1\b|via P2P/MNNVL")),
    ("rings connected", re.compile(r"Connected all rings")),
    ("speed of a network unknown", re.compile(r"Could not get speed from ")),
)
_BUS = re.compile(r"(?:0x)?(?:([\da-f]{4,8}):)?([\da-f]{1,2})(?::([\da-f]{2}))?(?:\.\d)?", re.I)
#: Most characters of a command and of a line that are kept [-].
_LONGEST_COMMAND = 4_000
_LONGEST_LINE = 400


def write_bus(text: str) -> str | None:
    """PCI address of a GPU in one form, from any that nccl-tests and NCCL print; None for others.

    Examples
    --------
    >>> write_bus("0000:1B:00"), write_bus("0x1b"), write_bus("00000000:1b:00.0")
    ('0000:1b:00', '1b', '0000:1b:00')
    """
    match = _BUS.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device = match.groups()
    bus = f"{int(bus, 16):02x}"
    if domain is None and device is None:
        return bus
    return f"{int(domain or '0', 16):04x}:{bus}:{device or '00'}".lower()


def _write_bus_number(text: str) -> str:
    """PCI address of the number of NCCL, whose digits are domain, bus (2), device (2), function
    (1)."""
    number = int(text, 16)
    return f"{number >> 20:04x}:{number >> 12 & 0xFF:02x}:{number >> 4 & 0xFF:02x}"


# -- lines of NCCL
# --------------------------------------------------------------------------------------------------


class _HostText(NamedTuple):
    """A text of a host."""

    host: str
    text: str


@dataclass
class _Collector:
    """Statements of one run, in the order of the log, equal ones once."""

    hosts: dict[str, str] = field(default_factory=dict)  # as listed, by the host of a line
    commands: list[Statement] = field(default_factory=list)
    options: Options | None = None
    places: dict[int, RankPlace] = field(default_factory=dict)
    ranks: int | None = None
    nodes: int | None = None
    is_rccl: bool = False
    versions: dict[_HostText, Statement] = field(default_factory=dict)
    networks: dict[_HostText, Statement] = field(default_factory=dict)
    adapters: dict[tuple[str, str, str], Adapter] = field(default_factory=dict)
    providers: dict[_HostText, Provider] = field(default_factory=dict)
    transports: dict[str, Transport] = field(default_factory=dict)
    channels: Channels | None = None
    multicast: dict[tuple[str, int], Multicast] = field(default_factory=dict)
    affinities: dict[tuple[str, int], Affinity] = field(default_factory=dict)
    rates: dict[tuple[str, str], float] = field(default_factory=dict)
    settings: dict[tuple[str, str, Source], Setting] = field(default_factory=dict)
    chosen: dict[tuple[str | None, ...], Choice] = field(default_factory=dict)
    graphs: dict[_HostText, Graph] = field(default_factory=dict)
    remarks: dict[_HostText, Remark] = field(default_factory=dict)
    warnings: dict[_HostText, Statement] = field(default_factory=dict)

    def find_host(self, name: str) -> str:
        """The host of a line as the list of devices writes it: what a collector of logs writes
        before a line may join the name."""
        host = self.hosts.get(name)
        if host is None:
            ends = [listed for listed in self.hosts.values() if name.endswith(listed)]
            host = max(ends, key=len, default=name)
            self.hosts[name] = host
        return host

    def take_message(self, line: int, host: str, message: str) -> None:
        """Read what NCCL says in a line of NCCL INFO."""
        word = message.split(" ", 1)[0]
        if word in _LINKS:
            self._take_link(line, host, message)
            return
        take = _TAKERS.get(word)
        if take is None and word.startswith("NET/"):
            take = _Collector._take_adapters
        if take is not None:
            take(self, line, host, message)
            return
        if word.startswith(_PREFIXES):
            self._take_setting(line, host, message)
        elif " Bytes -> " in message:
            self._take_choice(line, host, message)
        elif " coll channels" in message:
            self._take_channels(line, host, message)
        else:
            self._take_remark(line, host, message)

    def take_warning(self, line: int, host: str, message: str) -> None:
        """Read what NCCL warns of."""
        _count(self.warnings, line, host, message)
        self._take_remark(line, host, message)

    def take_other_line(self, line: int, text: str) -> None:
        """Read a line of a launcher, a job script or nccl-tests."""
        if "CCL version" in text:
            self._take_version(line, "", text)
        if "rccl-tests: Version" in text:
            self.is_rccl = True
        if "nccl-library=" in text:
            library = _LIBRARY.search(text)
            if library is not None:
                _count(self.versions, line, "", write_version(int(library[1])))
        if "_" in text:
            for name, value in _ASSIGNED.findall(text):
                self.add_setting(line, "", name, value, "command")
        if START.search(text):
            self._take_options(line, text)

    def add_setting(self, line: int, host: str, name: str, value: str, source: Source) -> None:
        """Keep a variable, and which hosts list it."""
        value = value.rstrip(".,;:")
        if not value:
            return
        key = (name, value, source)
        setting = self.settings.get(key)
        if setting is None:
            self.settings[key] = Setting(name, value, source, (host,) if host else (), line)
        elif host and host not in setting.hosts:
            self.settings[key] = setting._replace(hosts=tuple(sorted((*setting.hosts, host))))

    def add_exported(self, exported: dict[str, Setting]) -> None:
        """Keep what a job script has exported before."""
        for setting in exported.values():
            self.settings[setting.name, setting.value, "command"] = setting

    def drop_exported(self, setting: Setting | None) -> None:
        """Drop what a job script has exported before and sets anew."""
        if setting is not None:
            self.settings.pop((setting.name, setting.value, "command"), None)

    def add_devices(self, devices: dict[int, Device]) -> None:
        """Keep the list of devices of nccl-tests, which says more than NCCL does."""
        for rank, device in devices.items():
            bus = None if device.bus is None else write_bus(device.bus)
            self.places[rank] = RankPlace(
                rank, device.host, device.number, bus, device.name, device.line
            )

    def add_choices(self, run: Table) -> None:
        """Keep the algorithms in columns of the table of rccl-tests."""
        operation = NAMES.get(run.label.replace("_", ""))
        for printed in run.choices:
            key = (str(operation), str(printed.nbytes), printed.algorithm, printed.protocol)
            choice = self.chosen.get(key)
            if choice is None:
                self.chosen[key] = Choice(
                    operation,
                    int(printed.nbytes),
                    _name_choice(printed.algorithm, _ALGORITHMS),
                    _name_choice(printed.protocol, _PROTOCOLS),
                    printed.channels,
                    None,
                    printed.line,
                )
            else:
                self.chosen[key] = choice._replace(times=choice.times + 1)

    def _take_link(self, line: int, host: str, message: str) -> None:
        """Read a line such as ``Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM``."""
        _, is_link, name = message.partition(" via ")
        if not is_link:
            return
        name = name.split(" comm ", 1)[0].strip()  # RCCL writes its communicator behind
        transport = self.transports.get(name)
        if transport is None:
            self.transports[name] = _read_transport(name, line)
        else:
            self.transports[name] = transport._replace(times=transport.times + 1)
        if name == "P2P/MNNVL":
            self._take_remark(line, host, "via P2P/MNNVL")

    def _take_network(self, line: int, host: str, message: str) -> None:
        """Read a line such as ``Using network IB`` or ``Assigned NET plugin IB to comm``."""
        assigned = _ASSIGNED_PLUGIN.match(message)
        if assigned is not None:
            _count(self.networks, line, host, assigned[1])
        elif message.startswith("Using network "):
            _count(self.networks, line, host, message.removeprefix("Using network ").strip())
        elif message.startswith("Using tuner"):
            self._take_remark(line, host, message)

    def _take_adapters(self, line: int, host: str, message: str) -> None:
        """Read a line such as ``NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0``."""
        _, is_list, listed = message.partition(": Using ")
        if not is_list:
            rate = _RATE.search(message)
            if rate is not None:
                name = rate[1] or rate[3]
                self.rates[host, name] = 1e6 / 8 * int(rate[2] or rate[4])
            self._take_remark(line, host, message)
            return
        kind = message.split(" ", 1)[0].removeprefix("NET/").rstrip(":")
        for number, name, port, fabric, _ in _ADAPTER.findall(listed.split("; OOB", 1)[0]):
            key = (host, name, port)
            if key not in self.adapters:
                fabric = fabric or kind
                self.adapters[key] = Adapter(host, int(number), name, port, fabric, line)

    def _take_libfabric(self, line: int, host: str, message: str) -> None:
        """Read a line of the plugin of libfabric."""
        by_plugin = _BY_PLUGIN.match(message)
        if by_plugin is not None:
            self.add_setting(line, host, by_plugin[1], by_plugin[2], "plugin")
            return
        provider = _PROVIDER.search(message)
        if provider is not None:
            adapters = None if provider[3] is None else int(provider[3])
            key = _HostText(host, provider[1])
            self.providers.setdefault(key, Provider(host, provider[1], adapters, line))
            return
        self._take_remark(line, host, message)

    def _take_affinity(self, line: int, host: str, message: str) -> None:
        """Read a line such as ``Setting affinity for GPU 0 to ffff`` or ``... is 0-15``."""
        match = _AFFINITY.search(message)
        if match is None:
            return
        mask = match[2]
        device = int(match[1] or match[3] or match[5])
        is_list = mask is None or "-" in mask
        cores = _count_listed(match[2] or match[4] or match[6]) if is_list else _count_masked(mask)
        if cores:
            text = escape(message, _LONGEST_LINE)
            affinity = Affinity(host, device, cores, text, line)
            self.affinities.setdefault((host, device), affinity)

    def _take_multicast(self, line: int, host: str, message: str) -> None:
        """Read a line such as ``NVLS multicast support is available on dev 0``."""
        match = _NVLS.match(message)
        if match is not None:
            device = int(match[2])
            self.multicast.setdefault(
                (host, device), Multicast(match[1] is None, host, device, line)
            )

    def _take_channels(self, line: int, host: str, message: str) -> None:
        """Read the numbers of channels, which are equal on all ranks."""
        match = _CHANNELS.search(message)
        if match is not None and self.channels is None:
            self.channels = Channels(
                collective=int(match[1]),
                collnet=int(match[2] or 0),
                nvls=int(match[3] or 0),
                p2p=int(match[4]),
                p2p_per_peer=int(match[5]),
                line=line,
            )

    def _take_communicator(self, line: int, host: str, message: str) -> None:
        """Read rank, device and PCI bus of a line such as ``comm 0x1 rank 0 nranks 8 cudaDev 0``."""
        match = _COMMUNICATOR.search(message)
        if match is None:
            return
        rank, ranks, nodes, _, device, bus = match.groups()
        if self.ranks is None:
            self.ranks = int(ranks)
        if nodes and self.nodes is None:
            self.nodes = int(nodes)
        if bus and int(rank) not in self.places:
            self.places[int(rank)] = RankPlace(
                int(rank), host, int(device or 0), _write_bus_number(bus), None, line
            )
        if "MNNVL 1" in message:
            self._take_remark(line, host, message)

    def _take_setting(self, line: int, host: str, message: str) -> None:
        """Read a line such as ``NCCL_IB_DISABLE set by environment to 1.``."""
        match = _LISTED.match(message)
        if match is not None:
            self.add_setting(line, host, match[1], match[2], "environment")

    def _take_choice(self, line: int, host: str, message: str) -> None:
        """Read a line such as ``AllReduce: 8388608 Bytes -> Algo 1 proto 2 time 123.4``."""
        match = _CHOSEN.search(message)
        if match is None:
            return
        key = match.groups()
        choice = self.chosen.get(key)
        if choice is None:
            self.chosen[key] = _read_choice(match, line)
        else:
            self.chosen[key] = choice._replace(times=choice.times + 1)

    def _take_graph(self, line: int, host: str, message: str) -> None:
        """Read a line such as ``Pattern 4, crossNic 0, nChannels 12, bw 24/24, type NVL/PIX``."""
        match = _PATTERN.match(message)
        if match is None:
            return
        pattern = _PATTERNS.get(match[1], match[1].lower())
        channels = int(match[2])
        within, between = 1e9 * float(match[3]), 1e9 * float(match[4])
        graph = Graph(pattern, channels, within, between, match[5], match[6], host, line)
        self.graphs.setdefault(_HostText(host, message), graph)

    def _take_version(self, line: int, host: str, text: str) -> None:
        """Read a line such as ``NCCL version 2.21.5+cuda12.4``."""
        match = _VERSION.search(text)
        if match is not None:
            is_hip = (match[3] or "").startswith(("+hip", ".hip", "+rocm"))
            self.is_rccl = self.is_rccl or match[1] == "R" or is_hip
            _count(self.versions, line, host, match[2])

    def _take_remark(self, line: int, host: str, message: str) -> None:
        """Keep a line that may tell why a run is slow."""
        if " opCount " in message:  # one for each call of NCCL_DEBUG_SUBSYS=COLL
            return
        for topic, pattern in _TOPICS:
            if pattern.search(message):
                text = escape(message, _LONGEST_LINE)
                key = _HostText(host, f"{topic} {text}")
                remark = self.remarks.get(key)
                if remark is None:
                    self.remarks[key] = Remark(topic, text, host, line)
                else:
                    self.remarks[key] = remark._replace(times=remark.times + 1)
                return

    def _take_options(self, line: int, text: str) -> None:
        """Read the options that nccl-tests prints in its first lines."""
        match = _OPTIONS.search(text)
        if match is not None and self.options is None:
            warmup, iterations, aggregated, checked, launches = match.groups()
            self.options = Options(
                int(warmup),
                int(iterations),
                None if aggregated is None else int(aggregated),
                None if checked is None else int(checked) > 0,
                None if launches is None else int(launches),
                line,
            )

    def list_settings(self) -> tuple[Setting, ...]:
        """Settings in the order of the log, each with who set it: what a plugin has set, NCCL lists
        as of the environment."""
        by_plugin = {(name, value) for name, value, source in self.settings if source == "plugin"}
        kept = []
        for setting in self.settings.values():
            is_echo = setting.source == "environment" and (setting.name, setting.value) in by_plugin
            if not is_echo:
                kept.append(setting)
        return tuple(kept)

    def list_adapters(self) -> tuple[Adapter, ...]:
        """Adapters with their rates, which may stand before them."""
        return tuple(
            adapter._replace(rate=self.rates.get((adapter.host, adapter.name)))
            for adapter in self.adapters.values()
        )

    def finish(self, file: str, first_line: int, last_line: int) -> LogFacts:
        """The record of a run."""
        library: Literal["NCCL", "RCCL"] | None = "NCCL" if self.versions else None
        if self.is_rccl:
            library = "RCCL"
        return LogFacts(
            file,
            first_line,
            last_line,
            command=self.commands[-1] if self.commands else None,
            options=self.options,
            places=tuple(self.places[rank] for rank in sorted(self.places)),
            ranks=self.ranks,
            nodes=self.nodes,
            library=library,
            versions=tuple(self.versions.values()),
            networks=tuple(self.networks.values()),
            adapters=self.list_adapters(),
            providers=tuple(self.providers.values()),
            transports=tuple(self.transports.values()),
            channels=self.channels,
            multicast=tuple(self.multicast.values()),
            affinities=tuple(self.affinities.values()),
            settings=self.list_settings(),
            chosen=tuple(self.chosen.values()),
            graphs=tuple(self.graphs.values()),
            remarks=tuple(self.remarks.values()),
            warnings=tuple(self.warnings.values()),
        )


#: Beginnings of lines of NCCL whose host and kind somebody cut off.
_BARE = (
    "NET/",
    "Using network ",
    "Assigned NET plugin ",
    "NVLS multicast support ",
    "Channel ",
    "Setting affinity for GPU ",
    "ncclTopoGetCpuAffinity: ",
    "ncclCommInit",
    "comm 0x",
    "Check P2P Type ",
    "Connected all rings",
)
_Taker = Callable[[_Collector, int, str, str], None]
#: First words of lines that name the way between two ranks.
_LINKS = {"Channel", "Ring", "CollNet", "NVLS/Channel"}
#: What reads a line of NCCL INFO, by its first word.
_TAKERS: dict[str, _Taker] = {
    "Using": _Collector._take_network,
    "Assigned": _Collector._take_network,
    "Setting": _Collector._take_affinity,
    "ncclTopoGetCpuAffinity:": _Collector._take_affinity,
    "NET/OFI": _Collector._take_libfabric,
    "NVLS": _Collector._take_multicast,
    "comm": _Collector._take_communicator,
    "ncclCommInitRank": _Collector._take_communicator,
    "ncclCommInitRankConfig": _Collector._take_communicator,
    "ncclCommInitRankScalable": _Collector._take_communicator,
    "ncclCommInitAll": _Collector._take_communicator,
    "Pattern": _Collector._take_graph,
    "NCCL": _Collector._take_version,
    "RCCL": _Collector._take_version,
}


def _count(statements: dict[_HostText, Statement], line: int, host: str, text: str) -> None:
    """Count a statement of a host."""
    text = escape(text, _LONGEST_LINE)
    key = _HostText(host, text)
    known = statements.get(key)
    if known is None:
        statements[key] = Statement(text, host, line)
    else:
        statements[key] = known._replace(times=known.times + 1)


def _read_transport(name: str, line: int) -> Transport:
    """Parts of the name of a transport."""
    parts = name.split("/")
    way: Way = "other"
    if parts[0] == "P2P":
        way = "P2P"
    elif parts[0] == "SHM" or name.startswith("direct shared memory"):
        way = "SHM"
    elif parts[0] == "NET":
        way = "NET"
    elif parts[0] == "COLLNET":
        way = "COLLNET"
    network = adapter = None
    if way in ("NET", "COLLNET") and len(parts) > 1:
        network = parts[1]
        number = re.match(r"\d{1,6}", parts[2]) if len(parts) > 2 else None
        adapter = None if number is None else int(number[0])
    has_gdrdma = any(part.startswith("GDRDMA") for part in parts)
    return Transport(escape(name, 100), way, network, adapter, has_gdrdma, 1, line)


def _read_choice(match: re.Match[str], line: int) -> Choice:
    """A choice of NCCL, with algorithm and protocol by name."""
    operation, _, nbytes, algorithm, protocol, kernel, time, low, high, channels = match.groups()
    if operation is not None:
        operation = NAMES.get(operation.lower(), operation)
    used = None if channels is None else int(channels)
    if low is not None:
        used = int(high) - int(low) + 1
    return Choice(
        operation,
        int(nbytes),
        "Symmetric" if kernel else _name_choice(algorithm, _ALGORITHMS),
        kernel or _name_choice(protocol, _PROTOCOLS),
        used,
        None if time is None else 1e-6 * float(time),
        line,
    )


def _name_choice(text: str, names: Sequence[str]) -> str:
    """The name of an algorithm or protocol that NCCL writes as a number or in capitals."""
    if text.isdigit() and int(text) < len(names):
        return names[int(text)]
    return _NAMED.get(text.lower().replace("_", ""), text)


def _count_masked(mask: str) -> int:
    """Cores of a mask in hexadecimal."""
    return sum(int(part or "0", 16).bit_count() for part in mask.split(","))


def _count_listed(ranges: str) -> int:
    """Cores of a list such as 0-15,32."""
    cores = 0
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and last.isdigit():
            cores += max(int(last) - int(first) + 1, 0)
        elif first.isdigit():
            cores += 1
    return cores


def write_version(code: int) -> str:
    """Version of NCCL by its number in nccl.h.

    Examples
    --------
    >>> write_version(22603), write_version(2807)
    ('2.26.3', '2.8.7')
    """
    if code < 10_000:
        return f"{code // 1000}.{code // 100 % 10}.{code % 100}"
    return f"{code // 10_000}.{code // 100 % 100}.{code % 100}"


# -- runs
# --------------------------------------------------------------------------------------------------


def gather_facts(
    lines: Sequence[tuple[int, str]], runs: Sequence[Table], file: str
) -> tuple[LogFacts, ...]:
    """Gather what a log says of each run.

    Parameters
    ----------
    lines : sequence of (int, str)
        Number and text of each line, in the order of the log.
    runs : sequence of Table
        All runs, also those without a row, in the order of the log; each begins at its `begin`.
    file : str
        Name of the log.

    Returns
    -------
    facts : tuple of LogFacts
        One for each run. Lines before the first run belong to the first one. Of lines between two
        runs, what NCCL says belongs to the one before, and commands and settings to the next one.
        What a job script exports holds for all runs after it.
    """
    collectors = [_Collector(hosts=_list_hosts(run)) for run in runs]
    ends = [_find_begin(lines, run.begin) - 1 for run in runs[1:]]
    ends.append(lines[-1][0] if lines else 1)
    place = 0
    latest = 0  # the last run that has a line
    exported: dict[str, Setting] = {}
    unfinished = ""  # a command whose next line goes on
    for line, text in lines:
        while line > ends[place]:
            place += 1
        is_behind = 0 < runs[place].end < line and "CCL " not in text
        owner = place
        if is_behind and place + 1 < len(runs):
            owner = place + 1
        collector = collectors[owner]
        if owner > latest:
            latest = owner
            collector.add_exported(exported)
        if "export " in text or "unset " in text:
            _note_exported(exported, collector, line, text)
        unfinished = _take_line(collector, line, text, unfinished)
    facts = []
    begin = 1
    for run, collector, end in zip(runs, collectors, ends, strict=True):
        collector.add_devices(run.devices)
        collector.add_choices(run)
        facts.append(replace(collector.finish(file, begin, end), wrong_lines=run.wrong_lines))
        begin = end + 1
    return tuple(facts)


def collect_report(
    file: str,
    *,
    first_line: int,
    last_line: int,
    arguments: Sequence[str],
    variables: Sequence[str],
    version: int | None,
    options: Options | None,
    devices: dict[int, Device],
    errors: Sequence[Statement],
) -> LogFacts:
    """Make the facts of a report of nccl-tests.

    Parameters
    ----------
    file : str
        Name of the report.
    first_line, last_line : int
        Numbers of its first and its last result [-].
    arguments, variables : sequence of str
        The command and its environment, as NAME=VALUE.
    version : int or None
        Number of NCCL in nccl.h [-].
    options : Options or None
        Options of the run.
    devices : dict of int to Device
        The list of devices, by rank.
    errors : sequence of Statement
        What NCCL says went wrong.

    Returns
    -------
    facts : LogFacts
        What the report says besides its results.
    """
    collector = _Collector(options=options)
    if arguments:
        command = escape(" ".join(arguments), _LONGEST_COMMAND)
        collector.commands.append(Statement(command, "", first_line))
    host = min(devices.items())[1].host if devices else ""
    for variable in variables:
        assigned = _ASSIGNED.fullmatch(variable)
        if assigned is not None:
            collector.add_setting(first_line, host, assigned[1], assigned[2], "environment")
    if version is not None:
        _count(collector.versions, first_line, "", write_version(version))
    for error in errors:
        collector.warnings[_HostText("", error.text)] = error
    collector.add_devices(devices)
    return collector.finish(file, first_line, last_line)


def gather_file_facts(lines: Sequence[tuple[int, str]], file: str) -> LogFacts:
    """Gather what a log of another benchmark than nccl-tests says, as of one run.

    Parameters
    ----------
    lines : sequence of (int, str)
        Number and text of each line, in the order of the log.
    file : str
        Name of the log.

    Returns
    -------
    facts : LogFacts
        What its lines say.
    """
    collector = _Collector()
    unfinished = ""
    for line, text in lines:
        unfinished = _take_line(collector, line, text, unfinished)
    return collector.finish(file, 1, lines[-1][0] if lines else 1)


def _take_line(collector: _Collector, line: int, text: str, unfinished: str) -> str:
    """Keep what a line says; return the command that the next line may go on with."""
    if "CCL INFO" in text or "CCL WARN" in text or "CCL ERROR" in text:
        spoken = _SPOKEN.search(text)
        if spoken is not None:
            name, _, kind, message = spoken.groups()
            host = collector.find_host(name or "")
            if kind == "INFO":
                collector.take_message(line, host, message)
            else:
                collector.take_warning(line, host, message)
            return unfinished
    bare = text.lstrip()
    if bare.startswith(_BARE) or " set by environment to " in text:
        collector.take_message(line, "", bare)
    elif "_" in text or "CCL version" in text or "nGpus" in text or "ccl-" in text:
        collector.take_other_line(line, text)
    return _take_command(collector, line, text, unfinished)


def _note_exported(
    exported: dict[str, Setting], collector: _Collector, line: int, text: str
) -> None:
    """Keep what a job script exports from a line on, and drop what it takes back."""
    if _EXPORT.search(text):
        for name, value in _ASSIGNED.findall(text):
            collector.drop_exported(exported.get(name))
            exported[name] = Setting(name, value.rstrip(".,;:"), "command", (), line)
    removed = _UNSET.search(text)
    for name in removed[1].split() if removed is not None else []:
        collector.drop_exported(exported.pop(name, None))


def _list_hosts(run: Table) -> dict[str, str]:
    """Hosts of a list of devices by their names."""
    return {device.host: device.host for device in run.devices.values()}


def _find_begin(lines: Sequence[tuple[int, str]], begin: int) -> int:
    """First line of a command that goes on in several lines, or of what nccl-tests prints before the
    name of its program, or the line itself."""
    place = bisect_left(lines, (begin, ""))
    while place > 0:
        before = lines[place - 1][1].rstrip()
        if not (before.endswith("\\") or _FIRST_WORDS.search(before)):
            break
        place -= 1
    return lines[place][0] if place < len(lines) else begin


def _take_command(collector: _Collector, line: int, text: str, unfinished: str) -> str:
    """Keep the command of a run, also of several lines; return what a next line may go on with."""
    if not unfinished and "_perf" not in text and not text.endswith("\\"):
        return ""
    whole = f"{unfinished} {text.strip()}" if unfinished else text.strip()
    whole = whole[:_LONGEST_COMMAND]
    if whole.endswith("\\"):
        return whole.rstrip("\\").rstrip()
    if COMMAND.search(whole) and not whole.startswith("#"):
        collector.commands.append(Statement(escape(whole, _LONGEST_COMMAND), "", line))
    return ""
