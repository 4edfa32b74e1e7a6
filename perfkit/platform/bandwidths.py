"""How fast a byte moves to a rank of a platform: from each memory and over each link."""

from typing import NamedTuple

from perfkit.ground.hardware import HostMemory, Quantity
from perfkit.ground.results import Table
from perfkit.platform.datasheets import find_datasheet
from perfkit.platform.host_memory import find_usual_host
from perfkit.platform.machine import Machine

#: What each link of a network leads to.
_BEHIND_LINKS = {"intra": "ranks of the node", "inter": "other nodes", "far": "other regions"}
#: What carries messages between nodes and regions; links have the names of products, or none.
_CARRIERS = {"inter": "adapter", "far": "far link"}


class Way(NamedTuple):
    """A memory or a link, and the bandwidth that one rank has of it.

    Parameters
    ----------
    way : str
        ``L2``, ``HBM3``, ``NVLink``, ``PCIe from host``, ``adapter`` and the like [-].
    leads_to : str
        What is behind it, such as ``other nodes`` [-].
    bandwidth_bytes_per_s : float
        Of a memory reads and writes together; of a link one way, for one rank [B/s].
    capacity_bytes : float or None
        Size of the memory behind it, if it is one and its size is known [B].
    evidence : str
        ``measured``, ``fitted``, ``datasheet`` or ``assumed`` [-].
    source : str
        Document or data [-].
    """

    way: str
    leads_to: str
    bandwidth_bytes_per_s: float
    capacity_bytes: float | None
    evidence: str
    source: str


def list_bandwidths(machine: Machine) -> list[Way]:
    """List the memories and links of a platform from near to far: caches, main memory, links of the
    node, host, links between nodes."""
    ways = []
    for level in machine.device.memory:
        is_main = level is machine.device.memory[-1]
        if level.bandwidth is not None:
            leads_to = "memory of the device" if is_main else "cache of the device"
            ways.append(_make_way(level.name, leads_to, level.bandwidth, level.capacity))
    links = machine.network.links
    if "intra" in links:
        name = links["intra"].name or "link of the node"
        ways.append(_make_way(name, _BEHIND_LINKS["intra"], links["intra"].bandwidth))
    host = find_host(machine)
    if host is not None:
        name = f"{name_host_link(machine)} from host"
        ways.append(_make_way(name, "memory of the host", host.from_host, host.capacity))
    for scope, carrier in _CARRIERS.items():
        if scope in links:
            ways.append(_make_way(carrier, _BEHIND_LINKS[scope], links[scope].bandwidth))
    return ways


def find_host(machine: Machine) -> HostMemory | None:
    """The memory of the host of a GPU: that of the platform, or the usual one of the device; None
    where neither is known, and for CPUs, which have no other memory."""
    if machine.device.kind == "cpu":
        return None
    return machine.host_memory or find_usual_host(machine.device.name)


def count_multiprocessors(machine: Machine) -> int | None:
    """Multiprocessors of the device, by its datasheet; None where it does not say [-]."""
    sheet = find_datasheet(machine.device)
    if sheet is None or sheet.multiprocessors is None:
        return None
    return int(sheet.multiprocessors.value)


def name_host_link(machine: Machine) -> str:
    """What leads from the device to the host, by the datasheet of the device."""
    sheet = find_datasheet(machine.device)
    if sheet is not None and "PCIe" in sheet.links:
        return "PCIe"
    return "link"


def _make_way(
    name: str, leads_to: str, bandwidth: Quantity, capacity: Quantity | None = None
) -> Way:
    size = None if capacity is None else capacity.value
    return Way(name, leads_to, bandwidth.value, size, bandwidth.kind, bandwidth.source)


def tabulate_bandwidths(machine: Machine) -> Table:
    """The memories and links of a platform as a frame with the columns of `Way`."""
    import polars

    from perfkit.ground.frames import ResultFrame  # imports polars

    types = {
        name: polars.Float64 if name.endswith(("_bytes", "_per_s")) else polars.String
        for name in Way._fields
    }
    return ResultFrame(list_bandwidths(machine), schema=types, orient="row")
