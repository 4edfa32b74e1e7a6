"""Systems that a run of nccl-tests may be of.

`find_candidates` is the way in. A run on one node, or with a platform of the user's, has one candidate.
Where the log does not say how its nodes are joined, there is one for each published network of such
nodes: a verdict then needs all of them.
"""

from dataclasses import dataclass, replace

from perfkit.diagnosis.models import (
    PCIE,
    Model,
    add_nodes,
    build_cards,
    build_cluster,
    build_node,
    build_nodes_of_cards,
)
from perfkit.diagnosis.networks import ACROSS, Network, list_networks, read_adapters
from perfkit.diagnosis.records import Adapters, Links, Rate
from perfkit.diagnosis.systems import (
    LARGEST_NODE,
    System,
    find_algorithm,
    find_fabric,
    find_multicast,
    find_slot,
    joins_all,
)
from perfkit.ground.units import escape, format_count
from perfkit.models.collectives import OPERATIONS
from perfkit.platform.datasheets import Datasheet
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import find_models, is_same_device
from perfkit.readers.nccl import ONE_RANK

#: Spreads of start-ups and of times per byte among machines with the same devices, as standard
#: deviations of logarithms [-]: eleven curves of four clusters beside those of the gallery, 0.71 and
#: 0.08 (docs/formulas.md, `_MACHINES`).
_STARTS = 0.71
BYTES = 0.08
#: For links whose collectives nobody measured, which take the medians of other devices: a choice, as each
#: of those devices is within 0.27 of what the medians give it [-].
_UNMEASURED = 0.25
#: Exchanges between pairs, which share links in ways that a log does not tell: a choice [-].
_PAIRS = 0.35
OF_PAIRS = ("all_to_all", "send_recv", "gather", "scatter")
#: The same for their start-ups: NCCL of 2021 takes 89 us for an all_to_all on eight A100, that of 2025 13
#: us (the gallery's a100-sxm-8); a choice, about half of the logarithm of that ratio [-].
_STARTS_OF_PAIRS = 1.0
#: Exchanges that platforms time only where they were measured, as no datasheet tells them.
_ONLY_MEASURED = ("send_recv", "gather", "scatter")
#: GPUs of boards without a switch, each linked with the three others (NVIDIA HGX A100 4-GPU) [-].
BOARD = 4


@dataclass(frozen=True)
class Candidate:
    """A system that a run may be of.

    Parameters
    ----------
    name : str
        In words, such as ``8 adapters of 400 Gb/s``.
    model : Model
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
    model: Model
    links: Links
    ranks: int
    nodes: int
    local: int
    algorithm: str | None = None
    starts: float = _STARTS
    bytes_spread: float = BYTES
    slowest: float = 1.0
    is_assured: bool = True
    is_default: bool = True
    source: str = ""


def find_candidates(
    system: System, operation: str, given: Model | None = None
) -> tuple[Candidate, ...]:
    """Find the systems that a run may be of.

    Parameters
    ----------
    system : System
        What the log says.
    operation : str
        Such as ``all_reduce``.
    given : Model, optional
        The system, if the user names it.

    Returns
    -------
    candidates : tuple of Candidate
        The usual one first; none where the links are unknown.
    """
    if operation not in OPERATIONS or system.ranks < 2:
        return ()
    if operation == "send_recv" and system.nodes != 1 and given is None:
        # 15 to 25 GB/s over adapters of 50 on healthy nodes (the gallery's h100-sxm-8x8): not explained
        return ()
    with keep_quiet():
        found = _find_all(system, given)
        return tuple(_widen(candidate, operation) for candidate in found)


def _find_all(system: System, given: Model | None) -> list[Candidate]:
    """Candidates of a run, before what is special about an operation."""
    if given is not None:
        return _take_given(system, given)
    sheet = system.sheet
    if sheet is None or system.nodes is None or system.local is None:
        return []
    if system.nodes == 1:
        return _find_node(system, sheet)
    channels = None if system.facts is None else system.facts.channels
    if channels is not None and channels.collnet:
        return []  # switches of the network reduce, and nothing published says how fast
    if sheet.node is not None and max(system.ranks, LARGEST_NODE + 1) <= sheet.node.value:
        return _find_rack(system, sheet)
    return _find_cluster(system, sheet, system.nodes, system.local)


def _take_given(system: System, model: Model) -> list[Candidate]:
    """The platform that the user names, with as many nodes as the run has."""
    if _refuse_given(system, model):
        return []
    network = model.platform.network
    local, nodes = _split_by_given(system, model)
    is_cluster = nodes > 1 and network.ranks_per_node > 1
    if system.ranks > network.ranks or (is_cluster and nodes != network.nodes):
        model = add_nodes(model, nodes)
    name = model.platform.name
    links = model.platform.network.links
    nvlink = None
    pcie = None
    if "intra" in links:
        rate = Rate(links["intra"].bandwidth.value, name)
        if links["intra"].name == "PCIe":
            pcie = rate
        else:
            nvlink = rate
    adapters = None
    if nodes > 1 and "inter" in links:
        adapters = _find_given_adapters(system, local, Rate(links["inter"].bandwidth.value, name))
    multicast = any(".in_network" in key for key in model.platform.collectives)
    found = Candidate(
        name,
        model,
        Links(nvlink, pcie, adapters, multicast or None),
        system.ranks,
        nodes,
        local,
        algorithm=find_algorithm(system),
        bytes_spread=BYTES if nodes == 1 else ACROSS,
        source=f"platform {name}",
    )
    return [found]


def _split_by_given(system: System, model: Model) -> tuple[int, int]:
    """Ranks of a node and nodes of a run: those of the log, else those of the platform [-]."""
    local = system.local or min(system.ranks, model.platform.network.ranks_per_node)
    return local, system.nodes or -(-system.ranks // local)


def _refuse_given(system: System, model: Model) -> str:
    """Say why the platform that the user names is not that of the log; empty where it may be."""
    platform = model.platform
    device, own = system.device, platform.device.name
    if device is not None and find_models(device) and not is_same_device(device, own):
        said = f"the log names {escape(device, 60)}, platform {platform.name} has {own}"
        return f"{said}; name a platform of the device of the log"
    local, nodes = _split_by_given(system, model)
    network = platform.network
    if nodes * local != system.ranks:
        held = f"platform {platform.name} has {network.ranks_per_node} in each node"
        return f"{system.ranks} ranks do not fill {nodes} nodes alike, and {held}; name another platform"
    is_cluster = nodes > 1 and network.ranks_per_node > 1
    has_other_nodes = system.ranks > network.ranks or (is_cluster and nodes != network.nodes)
    if has_other_nodes and local != network.ranks_per_node:
        said = f"the log names {format_count(nodes, 'node')} of {format_count(local, 'rank')}"
        held = f"{format_count(network.nodes, 'node')} of {network.ranks_per_node}"
        return f"{said}, platform {platform.name} has {held}; name a platform of such nodes"
    return ""


def _find_given_adapters(system: System, local: int, rate: Rate) -> Adapters:
    """Adapters of a platform of the user's, one for each rank of a node, with the rate of its links
    between nodes. Where NCCL lists one less, one is missing, whatever the platform has."""
    named = read_adapters(system)
    if named is None or named.count is None or named.usual is None or named.count >= named.usual:
        return Adapters(count=local, usual=local, rate=rate)
    return replace(named, rate=named.rate or rate)


def _find_node(system: System, sheet: Datasheet) -> list[Candidate]:
    """One node: the gallery's, or what the links of the datasheet give."""
    fabric = find_fabric(sheet)
    if fabric is None:
        return _find_cards(system, sheet)
    node = None if sheet.node is None else int(sheet.node.value)
    if node is None or system.ranks > node:
        return []
    if system.ranks < node and not joins_all(sheet):
        return []  # pairs of them have links of their own
    model = build_node(sheet.system, system.ranks)
    slowest = 1.0
    if system.ranks < BOARD:
        slowest = (system.ranks - 1) / (BOARD - 1)
    found = Candidate(
        f"{system.ranks} {sheet.device.name}",
        model,
        Links(fabric, find_slot(sheet), None, find_multicast(system, sheet)),
        system.ranks,
        1,
        system.ranks,
        algorithm=find_algorithm(system),
        bytes_spread=BYTES if model.is_measured else _UNMEASURED,
        slowest=slowest,
        source=fabric.source,
    )
    return [found]


def _find_cards(system: System, sheet: Datasheet) -> list[Candidate]:
    """One node of cards that PCIe alone joins, with direct copies between them."""
    slot = find_slot(sheet)
    if slot is None:
        return []
    found = Candidate(
        f"{system.ranks} {sheet.device.name}",
        build_cards(sheet.system, system.ranks, slot.value),
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
    fabric = find_fabric(sheet)
    if fabric is None:
        return []
    remarks = () if system.facts is None else system.facts.remarks
    found = Candidate(
        f"{system.ranks} {sheet.device.name} in one rack",
        build_node(sheet.system, system.ranks),
        Links(fabric, None, None, find_multicast(system, sheet)),
        system.ranks,
        1,
        system.ranks,
        bytes_spread=_UNMEASURED,
        is_assured=any(remark.topic == "MNNVL" for remark in remarks),
        source=fabric.source,
    )
    return [found]


def _find_cluster(system: System, sheet: Datasheet, nodes: int, local: int) -> list[Candidate]:
    """Several nodes, with each network that may join them."""
    networks = list_networks(system, sheet, local)
    return [_join(system, sheet, network, nodes, local) for network in networks]


def _join(system: System, sheet: Datasheet, network: Network, nodes: int, local: int) -> Candidate:
    """Nodes of a device that a network joins."""
    fabric, slot = find_fabric(sheet), find_slot(sheet)
    if fabric is None and slot is not None and local > 1:
        model = build_nodes_of_cards(sheet.system, local, nodes, slot.value, network.of_node)
    else:
        model = build_cluster(sheet.system, local, nodes, network.of_node, network.latency)
    spread = network.spread
    if not model.is_measured:
        spread = max(spread, _UNMEASURED)
    if fabric is None:
        spread = max(spread, PCIE)
    return Candidate(
        network.name,
        model,
        Links(fabric, slot, network.adapters, find_multicast(system, sheet)),
        nodes * local,
        nodes,
        local,
        algorithm=find_algorithm(system),
        bytes_spread=spread,
        is_assured=network.is_assured,
        is_default=network.is_default,
        source=network.source,
    )


def _widen(candidate: Candidate, operation: str) -> Candidate:
    """A candidate with the spread and the algorithm of an operation."""
    if operation != "all_reduce":
        candidate = replace(
            candidate, algorithm=None
        )  # others are rings, or exchanges between pairs
    if candidate.algorithm not in (None, "ring"):
        # of the algorithms that a user may ask for, published curves show rings alone
        spread = max(_UNMEASURED, candidate.bytes_spread)
        return replace(candidate, starts=_STARTS_OF_PAIRS, bytes_spread=spread)
    if operation not in OF_PAIRS:
        return candidate
    spread = candidate.bytes_spread
    if candidate.nodes > 1 or candidate.links.nvlink is None:
        spread = max(_PAIRS, spread)
    return replace(candidate, starts=_STARTS_OF_PAIRS, bytes_spread=spread)


def advise_platform(system: System) -> str:
    """Advise to name the platform of a run, by a name that this run can take.

    Parameters
    ----------
    system : System
        What the log says.

    Returns
    -------
    advice : str
        In one clause, as in ``name a platform, such as h100-sxm-8x4``.
    """
    sheet = system.sheet
    if sheet is None:
        return "name a platform, such as h100-sxm-8x4"
    local = system.local or 8
    if system.nodes == 1:
        return f"name a platform, such as {sheet.system}-{local}"
    if sheet.links.get("NIC") is None:
        return "name a file of a platform with such nodes and their links"
    return f"name a platform, such as {sheet.system}-{local}x{system.nodes or 4}"


def explain_unknown(system: System, operation: str, given: Model | None) -> str:
    """Say why nothing is expected of a run.

    Parameters
    ----------
    system : System
        What the log says.
    operation : str
        Such as ``all_reduce``.
    given : Model or None
        The system, if the user names it.

    Returns
    -------
    reason : str
        In one clause, with the next step.
    """
    name = advise_platform(system)
    measured = f"name a platform that was calibrated with healthy logs of {operation}"
    if operation in _ONLY_MEASURED:
        name = measured
    if system.ranks < 2:
        return ONE_RANK
    if operation not in OPERATIONS:
        return f"perfkit does not know what {escape(operation, 40)} exchanges"
    if given is not None and (refusal := _refuse_given(system, given)):
        return refusal
    if given is not None:
        ranks = format_count(system.ranks, "rank")
        return f"platform {given.platform.name} has no time for {operation} on {ranks}; {measured}"
    if system.device is None:
        return f"the log names no devices, or several kinds; {name}"
    if system.sheet is None:
        device = escape(system.device, 60)
        return f"no datasheet of {device} is known; name a file of a platform with this device"
    if system.nodes is None:
        return f"the log does not say on how many nodes it ran; {name}"
    if system.local is None:
        return "its nodes have unequal numbers of ranks, which no model describes"
    if system.facts is not None and system.facts.channels and system.facts.channels.collnet:
        return "switches of the network reduce (SHARP), and how fast is not known"
    if operation == "send_recv" and system.nodes > 1:
        return f"what pairs reach between nodes is not known well enough; {measured}"
    if system.nodes == 1 and system.ranks > 1 and system.sheet.link_bandwidth is not None:
        return f"links of {system.ranks} {system.sheet.device.name} are not known, or not measured with {operation}; {name}"
    return f"nothing is known of {operation} on such nodes; {name}"
