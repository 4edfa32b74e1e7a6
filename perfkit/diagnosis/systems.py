"""What a log says of the system: devices and where they are, and what datasheets say of their links."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from perfkit.diagnosis.records import Rate
from perfkit.ground.units import escape
from perfkit.platform.datasheets import Datasheet, list_datasheets, read_datasheet
from perfkit.platform.gallery import find_models, is_same_device
from perfkit.readers.log_facts import LogFacts

#: Generation of PCIe by compute capability of GPUs on boards with NVLink (datasheets of V100, A100, H100
#: and B200: 32, 64 and 128 GB/s for both ways), and what 16 lanes of it carry, one way: 128 of 130 bits
#: are data (PCI Express Base Specification, revisions 3.0 to 5.0) [B/s].
_GENERATIONS = {7: 3, 8: 4, 9: 5, 10: 5}
_SLOTS = {3: 15.75e9, 4: 31.5e9, 5: 63.0e9}
#: First compute capability of GPUs whose boards of eight have switches between all pairs, and of those
#: whose switches reduce and copy (NVIDIA, A100 and H100 whitepapers) [-].
_SWITCHED = 8.0
_REDUCING = 9.0
#: Most GPUs of a node that is no rack [-]; an HGX A100 of two boards has sixteen.
LARGEST_NODE = 16
#: Algorithms of perfkit by those of NCCL_ALGO.
_ALGORITHMS = {"ring": "ring", "tree": "tree", "nvls": "in_network"}
#: Host names that EC2 gives, by the private address of the instance (AWS, hostnames of EC2 instances,
#: https://docs.amazonaws.cn/AWSCloudFormation/latest/UserGuide/aws-properties-ec2-instance-privatednsnameoptions.html).
_OF_EC2 = re.compile(r"ip-(\d{1,3}-){3}\d{1,3}(\..*)?")
#: Memory of a device in its name.
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


def is_on_ec2(facts: LogFacts | None) -> bool:
    """Whether all hosts of a log bear names that EC2 gives, such as ``ip-10-0-1-5``.

    Parameters
    ----------
    facts : LogFacts or None
        What the log says.

    Returns
    -------
    is_on_ec2 : bool
        False where the log names no host.
    """
    if facts is None or not facts.hosts:
        return False
    return all(_OF_EC2.fullmatch(host) for host in facts.hosts)


def joins_all(sheet: Datasheet) -> bool:
    """Whether switches join the GPUs of a node, so that any of them have the whole bandwidth."""
    capability = sheet.device.capability
    return capability is not None and capability.value >= _SWITCHED


def _may_reduce(sheet: Datasheet) -> bool:
    """Whether switches between the GPUs of a node can reduce."""
    capability = sheet.device.capability
    return "NVLink" in sheet.links and capability is not None and capability.value >= _REDUCING


def find_fabric(sheet: Datasheet) -> Rate | None:
    """Bandwidth of NVLink, or of what other vendors have, one way for each GPU."""
    for name in ("NVLink", "fabric"):
        if name in sheet.links:
            return Rate(sheet.links[name].value, sheet.links[name].source)
    return None


def find_slot(sheet: Datasheet) -> Rate | None:
    """Bandwidth of the slot of a GPU, one way; None where it is unknown, or where the GPU reaches the
    network without one."""
    if "PCIe" in sheet.links:
        return Rate(sheet.links["PCIe"].value, sheet.links["PCIe"].source)
    joins_rack = sheet.node is not None and sheet.node.value > LARGEST_NODE
    capability = sheet.device.capability
    if joins_rack or capability is None:
        return None
    generation = _GENERATIONS.get(int(capability.value))
    if generation is None:
        return None
    return Rate(_SLOTS[generation], f"PCIe {generation}.0 x16 of {sheet.device.name}")


def find_multicast(system: System, sheet: Datasheet) -> bool:
    """Whether switches may reduce: what the log says, else what the device can do."""
    said = None if system.facts is None else system.facts.has_nvls
    return _may_reduce(sheet) if said is None else said


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
