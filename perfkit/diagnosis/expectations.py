"""Which system a run of nccl-tests is of, and what its links should give.

`find_candidates` is the way in. A run on one node, or with a platform of the user's, has one candidate.
Where the log does not say how its nodes are joined, there is one for each published network of such
nodes: a verdict then needs all of them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from perfkit.diagnosis.records import Adapters, Links, Rate
from perfkit.ground.files import group_rows
from perfkit.ground.units import Array, escape, format_count
from perfkit.models.collectives import OPERATIONS, bus_factor
from perfkit.platform.datasheets import HOP, Datasheet, list_datasheets, read_datasheet
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.file import list_gallery
from perfkit.platform.gallery import find_models, is_same_device, load_platform
from perfkit.platform.platform import Platform
from perfkit.readers.nccl import ONE_RANK
from perfkit.readers.nccl_facts import LogFacts

#: Spreads of start-ups and of times per byte among machines with the same devices, as standard
#: deviations of logarithms [-]: eleven curves of four clusters beside those of the gallery, 0.71 and
#: 0.08 (docs/formulas.md, `_MACHINES`).
STARTS = 0.71
BYTES = 0.08
#: The same for times per byte that are composed over nodes (docs/formulas.md, `LINES`: mean errors of
#: 7 to 17 % on three clusters) [-].
ACROSS = 0.12
#: For runs whose adapters the log names, which bound all but two nodes. Published rates of single
#: adapters are 0.91 to 0.98 of the line rate, the logarithms with a standard deviation of 0.03 (six in
#: NVIDIA/nccl-tests#119, #290, #309 and the gallery's rails of ten nodes): that is the spread where NCCL
#: lists one adapter less than there are GPUs; elsewhere more, as other networks reach less [-].
NAMED = 0.055
ONE_MISSING = 0.03
#: For links whose collectives nobody measured: medians of other devices [-].
UNMEASURED = 0.25
#: Exchanges between pairs, which share links in ways that a log does not tell [-].
PAIRS = 0.35
_OF_PAIRS = ("all_to_all", "send_recv", "gather", "scatter")
#: The same for their start-ups: NCCL of 2021 takes 89 us for an all_to_all on eight A100, that of 2025 13
#: us (the gallery's a100-sxm-8) [-].
STARTS_OF_PAIRS = 1.0
#: Share of the line rate that rings of GPUs without NVLink reach over PCIe, and its spread: 12 to 25.8
#: of 31.5 GB/s over PCIe 4.0 (NVIDIA/nccl#766, tinygrad/open-gpu-kernel-modules#36), 25.8 of 63 over
#: PCIe 5.0 (the gallery's rtx-pro-6000-8) [-].
PCIE_SHARE = 0.57
PCIE = 0.28
#: Standard deviations of an 80 % interval, and beyond which a time is slow: 1 of 130 healthy ones [-].
INTERVAL = 1.2816
SLOW = 2.43
#: Generation of PCIe by compute capability of GPUs on boards with NVLink (datasheets of V100, A100, H100
#: and B200: 32, 64 and 128 GB/s for both ways), and what 16 lanes of it carry, one way: 128 of 130 bits
#: are data (PCI Express Base Specification, revisions 3.0 to 5.0) [B/s].
_GENERATIONS = {7: 3, 8: 4, 9: 5, 10: 5}
_SLOTS = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
#: Share of the rate of network adapters that large messages reach: the mean of those six [-].
_REACHED = 0.95
#: Most of it that is payload: packets of 512 bytes, with header, frame and check of 24 bytes [-].
_PAYLOAD = 512 / 536
#: First compute capability of GPUs whose boards of eight have switches between all pairs, and of those
#: whose switches reduce and copy (NVIDIA, A100 and H100 whitepapers) [-].
_SWITCHED = 8.0
_REDUCING = 9.0
#: Most GPUs of a node that is no rack [-]; an HGX A100 of two boards has sixteen.
_LARGEST_NODE = 16
#: Most GPUs of a board with NVLink [-].
_WHOLE = 8
#: GPUs of boards without a switch, each linked with the three others (NVIDIA HGX A100 4-GPU) [-].
_BOARD = 4
#: Ranks that the largest size of a curve is asked for, beyond which bytes alone count [B].
_LARGEST = 2.0**36
#: Rates of network adapters, as they are sold [B/s].
_ADAPTER_RATES = tuple(1e9 / 8 * rate for rate in (25, 50, 100, 200, 400, 800))
#: Algorithms of perfkit by those of NCCL_ALGO.
_ALGORITHMS = {"ring": "ring", "tree": "tree", "nvls": "in_network"}
_MEMORY = re.compile(r"(\d+) ?GB", re.IGNORECASE)


@dataclass(frozen=True)
class System:
    """What a log says of the system: devices and where they are.

    Parameters
    ----------
    device : str or None
        Name of the devices as printed; None where it is missing or where devices differ.
    sheet : Datasheet or None
        Their datasheet; None where there is none.
    ranks : int
        Ranks of the run [-].
    nodes : int or None
        Nodes; None where the log does not say [-].
    local : int or None
        Ranks of a node; None where it is unknown, or where nodes differ [-].
    facts : LogFacts or None
        What else the log says.
    """

    device: str | None
    sheet: Datasheet | None
    ranks: int
    nodes: int | None
    local: int | None
    facts: LogFacts | None


@dataclass(frozen=True)
class Candidate:
    """A system that a run may be of.

    Parameters
    ----------
    name : str
        In words, such as ``8 adapters of 400 Gb/s``.
    platform : Platform
        What gives the times.
    links : Links
        Links that the times rest on.
    ranks, nodes, local : int
        Ranks, nodes, and ranks of a node [-].
    algorithm : str or None
        Algorithm that the user asked for; None where the library chose.
    starts, bytes_spread : float
        Spread of start-ups and of times per byte, as standard deviations of logarithms [-].
    slowest : float
        Least share of the bandwidth that is normal besides the spread, such as 1/3 for two GPUs of a
        board without a switch [-].
    is_assured : bool
        Whether the log or the user says that it is this system; a run may be slow then.
    is_default : bool
        Whether it is the usual one of several.
    source : str
        Where its links are from.
    """

    name: str
    platform: Platform
    links: Links
    ranks: int
    nodes: int
    local: int
    algorithm: str | None = None
    starts: float = STARTS
    bytes_spread: float = BYTES
    slowest: float = 1.0
    is_assured: bool = True
    is_default: bool = True
    source: str = ""


@dataclass(frozen=True)
class Band:
    """Expected times of sizes.

    Parameters
    ----------
    seconds : array
        Expected times [s].
    low, high : array
        Ends of their 80 % interval [s].
    slow : array
        Times beyond which a run is slow [s].
    moved : array
        Part of each expected time that the bytes take at the bandwidth of the largest messages [s].
    full : array or None
        What the bytes take where the adapters between nodes are full [s]; None for other bounds.
    """

    seconds: Array
    low: Array
    high: Array
    slow: Array
    moved: Array
    full: Array | None


# -- devices
# --------------------------------------------------------------------------------------------------


def find_system(
    devices: Sequence[str], ranks: int, nodes: int | None, local: int | None, facts: LogFacts | None
) -> System:
    """Find the system of a run by the names of its devices.

    Parameters
    ----------
    devices : sequence of str
        Names of its devices, as printed.
    ranks : int
        Ranks [-].
    nodes, local : int or None
        Nodes, and ranks of each; None where unknown or unequal [-].
    facts : LogFacts or None
        What else the log says.

    Returns
    -------
    system : System
        Its device and datasheet, where they are known.
    """
    names = sorted(set(devices))
    if len(names) != 1:
        return System(None, None, ranks, nodes, local, facts)
    return System(names[0], find_sheet(names[0]), ranks, nodes, local, facts)


@lru_cache(maxsize=256)
def find_sheet(device: str) -> Datasheet | None:
    """Find the datasheet of a device that a driver names; None where none is known for sure.

    Parameters
    ----------
    device : str
        Name as printed.

    Returns
    -------
    sheet : Datasheet or None
        The datasheet; of several that differ in memory alone, that with the memory of the name.

    Examples
    --------
    >>> find_sheet("NVIDIA A100-SXM4-40GB").system, find_sheet("NVIDIA H100 PCIe")
    ('a100-sxm-40gb', None)
    """
    if not find_models(device):
        return None
    sheets = []
    for sheet in map(read_datasheet, list_datasheets()):
        own = find_models(sheet.device.name)
        if own & find_models(device) and is_same_device(device, sheet.device.name):
            sheets.append(sheet)
    if not sheets:
        return None
    memory = _MEMORY.search(device)
    if memory is not None:
        for sheet in sheets:
            its_memory = _MEMORY.search(sheet.device.name)
            if its_memory is not None and its_memory[1] == memory[1]:
                return sheet
    if len({sheet.link_bandwidth.value for sheet in sheets if sheet.link_bandwidth}) > 1:
        return None  # cards and boards of the same name have other links
    return sheets[0]


def _joins_all(sheet: Datasheet) -> bool:
    """Whether switches join the GPUs of a node, so that any of them have the whole bandwidth."""
    capability = sheet.device.capability
    return capability is not None and capability.value >= _SWITCHED


def _may_reduce(sheet: Datasheet) -> bool:
    """Whether switches between the GPUs of a node can reduce."""
    capability = sheet.device.capability
    return "NVLink" in sheet.links and capability is not None and capability.value >= _REDUCING


def _find_fabric(sheet: Datasheet) -> Rate | None:
    """Bandwidth of NVLink, or of what other vendors have, one way for each GPU."""
    for name in ("NVLink", "fabric"):
        if name in sheet.links:
            return Rate(sheet.links[name].value, sheet.links[name].source)
    return None


def _find_slot(sheet: Datasheet) -> Rate | None:
    """Bandwidth of the slot of a GPU, one way; None where it is unknown, or where the GPU reaches the
    network without one."""
    if "PCIe" in sheet.links:
        return Rate(sheet.links["PCIe"].value, sheet.links["PCIe"].source)
    joins_rack = sheet.node is not None and sheet.node.value > _LARGEST_NODE
    capability = sheet.device.capability
    if joins_rack or capability is None:
        return None
    generation = _GENERATIONS.get(int(capability.value))
    if generation is None:
        return None
    return Rate(_SLOTS[generation], f"PCIe {generation}.0 x16 of {sheet.device.name}")


# -- candidates
# --------------------------------------------------------------------------------------------------


def find_candidates(
    system: System, operation: str, platform: Platform | None = None
) -> tuple[Candidate, ...]:
    """Find the systems that a run may be of.

    Parameters
    ----------
    system : System
        What the log says.
    operation : str
        Such as ``all_reduce``.
    platform : Platform, optional
        The system, if the user names it.

    Returns
    -------
    candidates : tuple of Candidate
        The usual one first; none where the links are unknown.
    """
    if operation not in OPERATIONS or system.ranks < 2:
        return ()
    if operation == "send_recv" and system.nodes != 1 and platform is None:
        # 15 to 25 GB/s over adapters of 50 on healthy nodes (the gallery's h100-sxm-8x8): not explained
        return ()
    with keep_quiet():
        found = _find_all(system, platform)
        return tuple(_widen(candidate, operation) for candidate in found)


def _find_all(system: System, platform: Platform | None) -> list[Candidate]:
    """Candidates of a run, before what is special about an operation."""
    if platform is not None:
        return _take_platform(system, platform)
    sheet = system.sheet
    if sheet is None or system.nodes is None or system.local is None:
        return []
    if system.nodes == 1:
        return _find_node(system, sheet)
    channels = None if system.facts is None else system.facts.channels
    if channels is not None and channels.collnet:
        return []  # switches of the network reduce, and nothing published says how fast
    if sheet.node is not None and max(system.ranks, _LARGEST_NODE + 1) <= sheet.node.value:
        return _find_rack(system, sheet)
    return _find_cluster(system, sheet, system.nodes, system.local)


def _take_platform(system: System, platform: Platform) -> list[Candidate]:
    """The platform that the user names, with as many nodes as the run has."""
    local = system.local or min(system.ranks, platform.network.ranks_per_node)
    nodes = system.nodes or -(-system.ranks // local)
    if nodes * local != system.ranks:
        return []
    is_cluster = nodes > 1 and platform.network.ranks_per_node > 1
    if system.ranks > platform.network.ranks or is_cluster:
        if local != platform.network.ranks_per_node:
            return []
        platform = platform.with_nodes(nodes)
    links = platform.network.links
    intra = Rate(links["intra"].bandwidth.value, platform.name) if "intra" in links else None
    adapters = None
    if nodes > 1 and "inter" in links:
        rate = Rate(links["inter"].bandwidth.value, platform.name)
        adapters = Adapters(count=local, usual=local, rate=rate)
    multicast = any(".in_network" in name for name in platform.collectives)
    found = Candidate(
        platform.name,
        platform,
        Links(intra, None, adapters, multicast or None),
        system.ranks,
        nodes,
        local,
        algorithm=find_algorithm(system),
        bytes_spread=BYTES if nodes == 1 else ACROSS,
        source=f"platform {platform.name}",
    )
    return [found]


def _find_node(system: System, sheet: Datasheet) -> list[Candidate]:
    """One node: the gallery's, or what the links of the datasheet give."""
    fabric = _find_fabric(sheet)
    if fabric is None:
        return _find_cards(system, sheet)
    node = None if sheet.node is None else int(sheet.node.value)
    if node is None or system.ranks > node:
        return []
    if system.ranks < node and not _joins_all(sheet):
        return []  # pairs of them have links of their own
    platform, is_measured = _find_platform(sheet, system.ranks)
    slowest = 1.0
    if system.ranks < _BOARD:
        slowest = (system.ranks - 1) / (_BOARD - 1)
    found = Candidate(
        f"{system.ranks} {sheet.device.name}",
        platform,
        Links(fabric, _find_slot(sheet), None, _find_multicast(system, sheet)),
        system.ranks,
        1,
        system.ranks,
        algorithm=find_algorithm(system),
        bytes_spread=BYTES if is_measured else UNMEASURED,
        slowest=slowest,
        source=fabric.source,
    )
    return [found]


def _find_multicast(system: System, sheet: Datasheet) -> bool:
    """Whether switches may reduce: what the log says, else what the device can do."""
    said = None if system.facts is None else system.facts.has_nvls
    return _may_reduce(sheet) if said is None else said


def _find_cards(system: System, sheet: Datasheet) -> list[Candidate]:
    """One node of cards that PCIe alone joins, with direct copies between them."""
    slot = _find_slot(sheet)
    if slot is None:
        return []
    platform = Platform.from_datasheet(sheet.system, ranks=max(2, system.ranks))
    # collectives of datasheets reach a share of the link, so that this link gives the usual share
    reached = _find_bandwidth(platform, "all_reduce", max(2, system.ranks), None) / slot.value
    platform = platform.with_link("intra", bandwidth=slot.value * PCIE_SHARE / reached)
    found = Candidate(
        f"{system.ranks} {sheet.device.name}",
        platform,
        Links(None, slot, None, False),
        system.ranks,
        1,
        system.ranks,
        algorithm=find_algorithm(system),
        bytes_spread=PCIE,
        source=slot.source,
    )
    return [found]


def _find_rack(system: System, sheet: Datasheet) -> list[Candidate]:
    """Several nodes that NVLink joins, as in racks of GB200; sure only if NCCL says so."""
    fabric = _find_fabric(sheet)
    if fabric is None:
        return []
    remarks = () if system.facts is None else system.facts.remarks
    found = Candidate(
        f"{system.ranks} {sheet.device.name} in one rack",
        Platform.from_datasheet(sheet.system, ranks=system.ranks),
        Links(fabric, None, None, _find_multicast(system, sheet)),
        system.ranks,
        1,
        system.ranks,
        bytes_spread=UNMEASURED,
        is_assured=any(remark.topic == "MNNVL" for remark in remarks),
        source=fabric.source,
    )
    return [found]


# -- several nodes
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Network:
    """What may join nodes.

    Parameters
    ----------
    name : str
        In words.
    of_node : float
        Rate of all adapters of a node, one way [B/s].
    adapters : Adapters
        The adapters.
    source : str
        Where their rate is from.
    latency : float
        Latency of a hop [s].
    spread : float
        Spread of times per byte over it [-].
    is_default : bool
        Whether it is the usual one of such nodes.
    """

    name: str
    of_node: float
    adapters: Adapters
    source: str
    latency: float = HOP.value
    spread: float = ACROSS
    is_default: bool = False


def _find_cluster(system: System, sheet: Datasheet, nodes: int, local: int) -> list[Candidate]:
    """Several nodes: with the adapters that the log names, else one for each published network."""
    named = read_adapters(system)
    if named is not None and named.is_named:
        networks = _list_named(named, sheet)
        return [_join(system, sheet, network, nodes, local) for network in networks]
    kind = None if named is None else named.network
    networks = []
    if "NIC" in sheet.links:
        rate = Rate(sheet.links["NIC"].value, sheet.links["NIC"].source)
        adapters = Adapters(None, local, rate, kind)
        name = f"{format_count(local, 'adapter')} of {_name_rate(rate.value)}"
        network = _Network(name, local * rate.value, adapters, rate.source, is_default=True)
        networks.append(network)
    if local == _WHOLE:
        networks += _list_published(sheet.system, kind)
    found = [_join(system, sheet, network, nodes, local) for network in networks]
    providers = () if system.facts is None else system.facts.providers
    if any(provider.name == "efa" for provider in providers):
        for candidate in found:
            if _is_efa(candidate):
                return [replace(candidate, is_assured=True, is_default=True)]
    return found


def _list_named(named: Adapters, sheet: Datasheet) -> list[_Network]:
    """Adapters that a log names, with the rate that it says, or with each that adapters are sold with; the
    usual rate first."""
    if named.rate is not None:
        return [_name_network(named, named.rate, is_default=True)]
    usual_rate = sheet.links["NIC"].value if "NIC" in sheet.links else None
    networks = []
    for sold in _ADAPTER_RATES:
        source = "the adapters that NCCL lists, with a rate that adapters are sold with"
        if sold == usual_rate:
            source = f"the adapters that NCCL lists, with the rate of {sheet.links['NIC'].source}"
        networks.append(_name_network(named, Rate(sold, source), is_default=sold == usual_rate))
    return sorted(networks, key=lambda network: not network.is_default)


def _name_network(named: Adapters, rate: Rate, *, is_default: bool) -> _Network:
    """Adapters that a log names, with a rate."""
    count = named.usual or 1
    return _Network(
        f"{format_count(count, 'adapter')} of {_name_rate(rate.value)}",
        count * rate.value,
        replace(named, rate=rate),
        rate.source,
        spread=NAMED if named.count == named.usual else ONE_MISSING,
        is_default=is_default,
    )


def _list_published(system: str, kind: str | None) -> list[_Network]:
    """Published networks between nodes of eight devices."""
    networks = []
    for systems, rows in group_rows("systems", "published", "node_networks.csv").items():
        for row in rows if system in systems.split() else []:
            count = int(row["adapters"])
            rate = Rate(float(row["rate"]), row["source"])
            name = f"{format_count(count, 'adapter')} of {_name_rate(rate.value)} ({row['name']})"
            network = _Network(
                name,
                count * rate.value,
                Adapters(None, count, rate, row["network"] or kind),
                rate.source,
                latency=float(row["latency"]) if row["latency"] else HOP.value,
            )
            networks.append(network)
    return networks


def _is_efa(candidate: Candidate) -> bool:
    """Whether the adapters of a candidate are those of AWS."""
    adapters = candidate.links.adapters
    return adapters is not None and adapters.network == "EFA"


def read_adapters(system: System) -> Adapters | None:
    """Read what a log says of the network adapters of a node; None where it says nothing.

    Parameters
    ----------
    system : System
        What the log says.

    Returns
    -------
    adapters : Adapters or None
        Those of the node with the fewest. Of sockets the adapters are not named: they are not what
        joins such nodes.
    """
    facts = system.facts
    if facts is None:
        return None
    listed = [facts.list_adapters(host) for host in {adapter.host for adapter in facts.adapters}]
    counts = []
    for adapters in listed:
        names = {adapter.name for adapter in adapters if adapter.fabric != "Socket"}
        if names:
            counts.append(len(names))
    if facts.network in (None, "Socket") and not counts:
        return None if facts.network is None else Adapters(network=facts.network)
    if facts.network == "Socket" or not counts:
        return Adapters(network=facts.network)
    count = min(counts)
    local = system.local or count
    count = min(count, local)  # more of them serve storage
    rates = {adapter.rate for adapter in facts.adapters if adapter.fabric != "Socket"}
    rate = rates.pop() if len(rates) == 1 else None
    usual = count
    if count == local - 1 and local > 2:
        usual = local  # one for each GPU, of which one is missing
    stated = None if rate is None else Rate(rate, "what NCCL says of its adapters")
    return Adapters(count, usual, stated, facts.network, is_named=True)


def _join(system: System, sheet: Datasheet, network: _Network, nodes: int, local: int) -> Candidate:
    """Nodes of a device that a network joins."""
    fabric = _find_fabric(sheet)
    spread = network.spread
    if local == 1:
        # a ring over the adapters alone
        platform = Platform.from_datasheet(sheet.system, ranks=nodes, link=network.of_node)
        platform = platform.with_link("intra", latency=network.latency)
        spread = UNMEASURED
    else:
        platform, is_measured = _find_platform(sheet, local)
        platform = platform.with_link(
            "inter", bandwidth=network.of_node / local, latency=network.latency
        ).with_nodes(nodes)
        if not is_measured:
            spread = max(spread, UNMEASURED)
        if fabric is None:
            spread = max(spread, PCIE)
    return Candidate(
        network.name,
        platform,
        Links(fabric, _find_slot(sheet), network.adapters, _find_multicast(system, sheet)),
        nodes * local,
        nodes,
        local,
        algorithm=find_algorithm(system),
        bytes_spread=spread,
        is_assured=False,
        is_default=network.is_default,
        source=network.source,
    )


def _name_rate(rate: float) -> str:
    """A rate of a network adapter as it is sold."""
    return f"{rate * 8 / 1e9:g} Gb/s"


@lru_cache(maxsize=64)
def _find_node_of_gallery(system: str) -> Platform | None:
    """The single node of the gallery with the device of a datasheet and collectives of its own; None
    where there is none."""
    for name in list_gallery():
        if re.fullmatch(rf"{re.escape(system)}-\d+", name):
            platform = load_platform(name)
            if platform.collectives:
                return platform
    return None


def _find_platform(sheet: Datasheet, ranks: int) -> tuple[Platform, bool]:
    """One node of so many ranks, and whether its collectives were measured on such devices."""
    # boards whose GPUs differ in memory alone have the same links
    for system in (sheet.system, sheet.system.removesuffix("-40gb")):
        platform = _find_node_of_gallery(system)
        if platform is not None and ranks <= platform.network.ranks_per_node:
            if ranks < platform.network.ranks_per_node:
                platform = platform.with_nodes(1, ranks_per_node=ranks)
            return platform, True
    return Platform.from_datasheet(sheet.system, ranks=max(2, ranks)), False


def find_algorithm(system: System) -> str | None:
    """Find the algorithm that the user asked for; None where NCCL chose, or where perfkit does not know
    it.

    Parameters
    ----------
    system : System
        What the log says.

    Returns
    -------
    algorithm : str or None
        One of `perfkit.models.algorithms.ALGORITHMS`.
    """
    facts = system.facts
    if facts is None:
        return None
    for setting in facts.find_settings("NCCL_ALGO"):
        return _ALGORITHMS.get(setting.value.lower())
    for setting in facts.find_settings("NCCL_NVLS_ENABLE"):
        if setting.source == "command" and setting.value == "0":
            return "ring"
    return None


def _widen(candidate: Candidate, operation: str) -> Candidate:
    """A candidate with the spread and the algorithm of an operation."""
    if operation != "all_reduce":
        candidate = replace(
            candidate, algorithm=None
        )  # others are rings, or exchanges between pairs
    if operation not in _OF_PAIRS:
        return candidate
    spread = candidate.bytes_spread
    if candidate.nodes > 1 or candidate.links.nvlink is None:
        spread = max(PAIRS, spread)
    return replace(candidate, starts=STARTS_OF_PAIRS, bytes_spread=spread)


# -- times and limits
# --------------------------------------------------------------------------------------------------


def _find_times(
    platform: Platform, operation: str, nbytes: Array, ranks: int, algorithm: str | None
) -> Array:
    """Times of sizes [s]; those of a broadcast for a reduction to one rank, which moves as many bytes
    the other way."""
    name = "broadcast" if operation == "reduce" else operation
    if algorithm is not None:
        try:
            return platform.collective_time(name, nbytes, ranks=ranks, algorithm=algorithm)
        except ValueError:
            pass  # an algorithm that this operation does not have: the library chooses
    return platform.collective_time(name, nbytes, ranks=ranks)


def _find_bandwidth(platform: Platform, operation: str, ranks: int, algorithm: str | None) -> float:
    """Bus bandwidth of the largest messages [B/s]."""
    sizes = np.array([_LARGEST / 2, _LARGEST])
    times = _find_times(platform, operation, sizes, ranks, algorithm)
    per_byte = (times[1] - times[0]) / (sizes[1] - sizes[0])
    return float(bus_factor(operation, ranks)) / float(per_byte)


def price(candidate: Candidate, operation: str, nbytes: Array) -> Band | None:
    """Say which times a system should take.

    Parameters
    ----------
    candidate : Candidate
        The system.
    operation : str
        Such as ``all_reduce``.
    nbytes : array
        Message sizes [B].

    Returns
    -------
    band : Band or None
        Expected times and their ends; None where nothing is known of the operation.

    Notes
    -----
    A time is t = b + s: b what its bytes take at the bandwidth of the largest messages, s all else,
    start-ups and protocols. Both are uncertain on their own, so that the ends are t exp(±k σ) with
    σ² = (b/t σ_b)² + (s/t σ_s)², the spreads of `Candidate`, and k = 1.28 for an interval of 80 %, 2.43
    for a slow run.
    """
    sizes = np.asarray(nbytes, dtype=float)
    with keep_quiet():
        try:
            seconds = _find_times(
                candidate.platform, operation, sizes, candidate.ranks, candidate.algorithm
            )
            bandwidth = _find_bandwidth(
                candidate.platform, operation, candidate.ranks, candidate.algorithm
            )
        except ValueError:
            return None
    factor = float(bus_factor(operation, candidate.ranks))
    line = _find_crossed(candidate, operation)
    spread_of_bytes = candidate.bytes_spread
    if line is not None and bandwidth < line * _REACHED:
        spread_of_bytes = max(spread_of_bytes, ACROSS)  # the nodes bound it, not the adapters alone
    if line is not None:
        # platforms price exchanges level by level, of which less crosses than of NCCL's rings and trees
        bandwidth = min(bandwidth, line * _REACHED)
        seconds = np.maximum(seconds, factor * sizes / bandwidth)
    moved = np.minimum(factor * sizes / bandwidth, seconds)
    share = moved / seconds
    spread = np.hypot(share * spread_of_bytes, (1 - share) * candidate.starts)
    # where links are shared unevenly, less is normal, too
    longer = moved * (1 / candidate.slowest - 1)
    low = seconds * np.exp(-INTERVAL * spread)
    fastest = _find_fastest(candidate, operation, sizes)
    if fastest is not None:
        low = np.minimum(low, fastest)
    return Band(
        seconds,
        low=low,
        high=seconds * np.exp(INTERVAL * spread) + longer,
        slow=seconds * np.exp(SLOW * spread) + longer,
        moved=moved,
        full=None if line is None else factor * sizes / line,
    )


def _find_crossed(candidate: Candidate, operation: str) -> float | None:
    """Bus bandwidth of rings and trees that the adapters of a node bound [B/s]; None within a node, and
    for exchanges between pairs."""
    if candidate.nodes == 1 or operation in _OF_PAIRS:
        return None
    return find_line(candidate, operation)


def _find_fastest(candidate: Candidate, operation: str, sizes: Array) -> Array | None:
    """Times of trees over two nodes that hide one way behind the other: those of one node, or of the
    adapters, which each byte crosses once [s]. Prices of the platform do not know them: 470 GB/s are
    published (NVIDIA/nccl-tests#309), 367 priced. None for others."""
    node = _find_node_rate(candidate.links)
    is_tree = operation == "all_reduce" and candidate.nodes == 2 and candidate.algorithm is None
    if not is_tree or node is None or candidate.local < 2:
        return None
    try:
        inside = _find_times(candidate.platform, operation, sizes, candidate.local, None)
    except ValueError:
        return None
    return np.maximum(inside, sizes / node)


def find_line(candidate: Candidate, operation: str) -> float | None:
    """Find the bus bandwidth at which the link that bounds an operation is full, for the way that its
    messages usually take.

    Parameters
    ----------
    candidate : Candidate
        The system.
    operation : str
        Such as ``all_reduce``.

    Returns
    -------
    line : float or None
        Bus bandwidth [B/s]; None where the links are unknown.

    Notes
    -----
    Within a node it is the rate of the link of a GPU. Between nodes it is that of all adapters of a node,
    times what the bus factor counts more than crosses them: trees over two nodes send each byte once, so
    2 (p - 1) / p for an all_reduce; of an all_to_all (N - 1) / N of all bytes of the g ranks of a node
    cross.
    """
    links = candidate.links
    inside = links.nvlink or links.pcie
    if candidate.nodes == 1:
        return None if inside is None else inside.value
    node = _find_node_rate(links)
    if node is None:
        return None
    is_tree = candidate.nodes == 2 and candidate.algorithm != "ring"
    if operation == "all_reduce" and is_tree:
        return node * float(bus_factor("all_reduce", candidate.ranks))
    if operation in ("gather", "scatter"):
        crossing = (candidate.nodes - 1) / candidate.nodes
        return node * float(bus_factor(operation, candidate.ranks)) / crossing
    if operation == "all_to_all":
        crossing = (candidate.nodes - 1) / candidate.nodes * candidate.local
        return node * float(bus_factor("all_to_all", candidate.ranks)) / crossing
    return node


def _find_node_rate(links: Links) -> float | None:
    """Rate of all adapters of a node [B/s]."""
    adapters = links.adapters
    if adapters is None or adapters.rate is None:
        return None
    count = adapters.usual or adapters.count
    return None if count is None else count * adapters.rate.value


def find_limit(system: System, candidates: Sequence[Candidate], operation: str) -> float | None:
    """Find the bus bandwidth that no run of an operation can exceed.

    Parameters
    ----------
    system : System
        What the log says.
    candidates : sequence of Candidate
        What it may be.
    operation : str
        Such as ``all_reduce``.

    Returns
    -------
    limit : float or None
        Bus bandwidth [B/s]; None where the links are unknown.

    Notes
    -----
    Each rank receives what it does not have: n for an all_reduce in a switch, 2 (p - 1) / p n without
    one, (p - 1) / p n for the others. Between nodes, a node that has the sum of its own ranks receives n at
    least, or sends it, through its adapters; where these are unknown, the slots of its GPUs bound them.
    """
    if not candidates or operation not in OPERATIONS:
        return None
    first = candidates[0]
    factor = float(bus_factor(operation, first.ranks))
    links = first.links
    if first.nodes == 1:
        return _limit_node(first, operation, factor)
    node = _find_node_rate(links) if first.is_assured else None
    if node is None:
        if links.pcie is None:
            return None
        node = first.local * links.pcie.value * _PAYLOAD
    share = (first.nodes - 1) / first.nodes
    if operation == "all_reduce":
        return node * factor
    if operation in ("all_gather", "reduce_scatter", "scatter", "gather"):
        return node * factor / share
    if operation == "all_to_all":
        return node * factor / share / first.local
    return node


def _limit_node(candidate: Candidate, operation: str, factor: float) -> float | None:
    """The limit within one node, see `find_limit`."""
    links = candidate.links
    if links.nvlink is not None:
        may_reduce = operation == "all_reduce" and links.multicast is not False
        return links.nvlink.value * (factor if may_reduce else 1.0)
    if links.pcie is None or candidate.ranks <= _BOARD:
        return None  # up to four cards may have bridges of NVLink
    return links.pcie.value


def describe_system(system: System) -> str:
    """Write the system of a run in words.

    Parameters
    ----------
    system : System
        What the log says.

    Returns
    -------
    text : str
        Such as ``4 nodes of 8 NVIDIA H100 80GB HBM3``.
    """
    device = "devices that are not named" if system.device is None else escape(system.device, 60)
    if system.nodes is None:
        return f"{system.ranks} ranks, {device}"
    if system.nodes == 1:
        return f"one node of {system.ranks} {device}"
    if system.local is None:
        return f"{system.nodes} nodes with {system.ranks} {device}"
    return f"{system.nodes} nodes of {system.local} {device}"


def explain_unknown(system: System, operation: str, platform: Platform | None) -> str:
    """Say why nothing is expected of a run.

    Parameters
    ----------
    system : System
        What the log says.
    operation : str
        Such as ``all_reduce``.
    platform : Platform or None
        The system, if the user names it.

    Returns
    -------
    reason : str
        In one clause, with the next step.
    """
    name = "name a platform"
    if system.ranks < 2:
        return ONE_RANK
    if operation not in OPERATIONS:
        return f"perfkit does not know what {escape(operation, 40)} exchanges"
    if platform is not None:
        return f"platform {platform.name} has no time for {operation} on {system.ranks} ranks"
    if system.device is None:
        return f"the log names no devices, or several kinds; {name}"
    if system.sheet is None:
        return f"no datasheet of {escape(system.device, 60)} is known; {name}"
    if system.nodes is None:
        return f"the log does not say on how many nodes it ran; {name}"
    if system.local is None:
        return "its nodes have unequal numbers of ranks, which no model describes"
    if system.facts is not None and system.facts.channels and system.facts.channels.collnet:
        return "switches of the network reduce (SHARP), and how fast is not known"
    if operation == "send_recv" and system.nodes > 1:
        return "what pairs reach between nodes is not known well enough"
    if system.nodes == 1 and system.ranks > 1 and system.sheet.link_bandwidth is not None:
        return f"links of {system.ranks} {system.sheet.device.name} are not known, or not measured with {operation}; {name}"
    return f"nothing is known of {operation} on such nodes; {name}"
