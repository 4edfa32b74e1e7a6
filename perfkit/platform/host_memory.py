"""Memory of the host, to which strategies offload: how much there is, how fast a rank copies to it,
and how fast the host updates weights there."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from perfkit.ground.files import group_rows
from perfkit.ground.hardware import HostMemory, Quantity, check_base
from perfkit.ground.units import (
    Array,
    check_positive,
    format_bytes,
    format_rate,
)
from perfkit.platform.datasheets import find_datasheet
from perfkit.platform.machine import Machine
from perfkit.platform.whatif import derive

#: Share of the bandwidth of PCIe in a datasheet that copies of pinned memory reach, by generation:
#: 12.36 of 16, 25.13 of 32 and 55.36 of 64 GB/s [-]; docs/formulas.md, table 11.1.
PCIE_SHARES = {1.6e10: 0.772, 3.2e10: 0.785, 6.4e10: 0.865}
#: Spread of the time of a copy, and of an update of the host [-]; docs/formulas.md, table 11.2.
SIGMA_COPY, SIGMA_UPDATE = 0.1, 0.7
P = TypeVar("P", bound=Machine)  # a platform


def _read_quantity(row: Mapping[str, str]) -> Quantity:
    """Read one number of the table of hosts."""
    return Quantity(
        float(row["value"]),
        row["unit"],
        row["kind"],
        row["source"],
        row["date"],
        basis=row["basis"],
    )


def find_usual_host(device: str) -> HostMemory | None:
    """Find the memory of the host that a device usually has, by the name of the device.

    Parameters
    ----------
    device : str
        Such as ``NVIDIA H100 SXM5 80 GB`` [-].

    Returns
    -------
    memory : HostMemory or None
        That of ``reference_data/host_memory.csv``; None where there is none.

    Examples
    --------
    >>> find_usual_host("NVIDIA H100 SXM5 80 GB").name
    'DGX H100'
    """
    rows = group_rows("device", "host_memory.csv").get(device)
    if rows is None:
        return None
    by_quantity = {row["quantity"]: row for row in rows}
    return HostMemory(
        capacity=_read_quantity(by_quantity["capacity"]),
        bandwidth=_read_quantity(by_quantity["bandwidth"]),
        to_host=_read_quantity(by_quantity["to_host"]),
        from_host=_read_quantity(by_quantity["from_host"]),
        sharers=int(by_quantity["sharers"]["value"]),
        name=rows[0]["host"],
    )


def find_host_memory(platform: Machine) -> HostMemory:
    """Find the memory of the host of a platform: its own, or the one that its device usually has.

    Parameters
    ----------
    platform : Machine
        A platform.

    Returns
    -------
    memory : HostMemory
        Capacity, bandwidth and link.

    Raises
    ------
    ValueError
        Where neither is known.
    """
    if platform.host_memory is not None:
        return platform.host_memory
    if "usual host" not in platform.memo:
        platform.memo["usual host"] = find_usual_host(platform.device.name)
    usual: HostMemory | None = platform.memo["usual host"]
    if usual is None:
        raise ValueError(
            f"platform {platform.name!r} does not know the memory of its host, with which it "
            "copies; state it first, such as .with_host_memory(capacity=1e12, bandwidth=400e9) for "
            "1 TB at 400 GB/s on a node"
        )
    return usual


def find_host_share(platform: Machine, ranks: int) -> float:
    """Find how much memory of the host a rank may take.

    Parameters
    ----------
    platform : Machine
        A platform.
    ranks : int
        Ranks that take part, which fill one node after the other [-].

    Returns
    -------
    capacity : float
        That of a node over its ranks [B].

    Raises
    ------
    ValueError
        For a platform that does not know the memory of its host.
    """
    of_node = min(ranks, platform.network.ranks_per_node)
    return find_host_memory(platform).capacity.value / of_node


def share_hosts(platform: Machine, ranks: Any, on_host: Array) -> Array:
    """Find how much memory of the host the ranks of many strategies may take.

    Parameters
    ----------
    platform : Machine
        A platform.
    ranks : int or array
        Ranks of each strategy [-].
    on_host : array
        What a rank takes of it [B].

    Returns
    -------
    shares : array
        Infinite where nothing is offloaded, whose host may be unknown [B].

    Raises
    ------
    ValueError
        For a platform that does not know the memory of its host, if something is offloaded.
    """
    counts = np.broadcast_to(ranks, len(on_host))
    shares = np.full(len(on_host), np.inf)
    is_moved = on_host > 0
    for count in np.unique(counts[is_moved]).tolist():
        shares[is_moved & (counts == count)] = find_host_share(platform, int(count))
    return shares


def knows_host(platform: Machine) -> bool:
    """Find out whether a platform knows the memory of its host.

    Parameters
    ----------
    platform : Machine
        A platform.

    Returns
    -------
    knows : bool
        False where an offload is an error.
    """
    try:
        find_host_memory(platform)
    except ValueError:
        return False
    return True


def with_host_memory(
    platform: P,
    *,
    capacity: float | None = None,
    bandwidth: float | None = None,
    link: float | None = None,
    sharers: int | None = None,
) -> P:
    """Another memory of the host, see `Platform.with_host_memory`."""
    if platform.device.kind == "cpu":
        raise ValueError(
            f"platform {platform.name!r} is a CPU, which has no other memory to offload to; take a GPU, "
            "such as h100-sxm-8"
        )
    if capacity is None and bandwidth is None and link is None and sharers is None:
        raise ValueError(
            "capacity, bandwidth, link and sharers are missing; give at least one of them"
        )
    known = platform.host_memory
    if known is None:
        known = find_usual_host(platform.device.name)
    shown = []
    memory = known
    if memory is None:
        if capacity is None or bandwidth is None:
            wanted = "capacity [B] and bandwidth [B/s] of a node"
            if link is None and not _states_link(platform):
                wanted = (
                    "capacity [B] and bandwidth [B/s] of a node, and link, what one rank reaches between its "
                    "device and the host [B/s], as no datasheet states its PCIe"
                )
            raise ValueError(
                f"platform {platform.name!r} knows no memory of its host yet; give {wanted}"
            )
        way = _link_by_datasheet(platform, link)
        memory = HostMemory(
            capacity=_suppose("capacity", capacity, "B"),
            bandwidth=_suppose("bandwidth", bandwidth, "B/s"),
            to_host=way,
            from_host=way,
        )
    if capacity is not None:
        memory = replace(memory, capacity=_suppose("capacity", capacity, "B"), name="")
        shown.append(format_bytes(memory.capacity.value))
    if bandwidth is not None:
        memory = replace(memory, bandwidth=_suppose("bandwidth", bandwidth, "B/s"), name="")
        shown.append(format_rate(memory.bandwidth.value, "B/s"))
    if link is not None:
        way = _suppose("link", link, "B/s")
        memory = replace(memory, to_host=way, from_host=way, name="")
        shown.append(f"a link of {format_rate(way.value, 'B/s')}")
    if sharers is not None:
        count = check_positive("sharers", sharers, integer=True)
        of_node = platform.network.ranks_per_node
        if count > of_node:
            raise ValueError(
                f"sharers is {count} and a node of platform {platform.name!r} has {of_node} ranks; take at "
                "most these"
            )
        memory = replace(memory, sharers=int(count), name="")
        shown.append(f"{count} ranks on a link")
    change = f"host memory of {' and '.join(shown)}"
    return derive(platform, f"{platform.name}, {change}", change, host_memory=memory)


def _suppose(name: str, value: float, unit: str) -> Quantity:
    """A number that the caller supposes, in a base unit."""
    return Quantity(check_base(name, value, unit), unit, "assumed", "what if")


def _states_link(platform: Machine) -> bool:
    """Whether a datasheet states PCIe of the device."""
    sheet = find_datasheet(platform.device)
    return sheet is not None and "PCIe" in sheet.links


def _link_by_datasheet(platform: Machine, link: float | None) -> Quantity:
    """What a copy reaches over the link to the host: as supposed, or a share of PCIe in the
    datasheet of the device."""
    if link is not None:
        return _suppose("link", link, "B/s")
    sheet = find_datasheet(platform.device)
    if sheet is None or not _states_link(platform):
        raise ValueError(
            f"no datasheet states PCIe of {platform.device.name}; give link, what one rank reaches "
            "between its device and the host [B/s]"
        )
    stated = sheet.links["PCIe"]
    if stated.value not in PCIE_SHARES:
        raise ValueError(
            f"PCIe of {platform.device.name} has {format_rate(stated.value, 'B/s')}, of which no share "
            "is known; give link, what one rank reaches [B/s]"
        )
    share = PCIE_SHARES[stated.value]
    return replace(
        stated,
        value=share * stated.value,
        kind="assumed",
        source=f"{share:g} of PCIe, as copies of pinned memory reach; {stated.source}",
    )
