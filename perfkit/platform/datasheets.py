"""Published numbers of machines: datasheets of GPUs and their links."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from perfkit.ground.files import group_rows
from perfkit.ground.hardware import Device, Link, MemoryLevel, Quantity
from perfkit.ground.renamed import with_old_names
from perfkit.ground.units import check_choice
from perfkit.models.hierarchy import FAR

#: Links between the ranks of a node, the fastest first, and out of it; ``fabric`` is the NVLink of
#: other vendors.
_LINKS = ("NVLink", "fabric", "PCIe", "NIC")
#: Name of the link between nodes that comes from the datasheet.
ADAPTERS = "adapters of the datasheet"
#: Latency between nodes that no log gives.
HOP = Quantity(
    FAR,
    "s",
    "assumed",
    "tuning table of NCCL for trees; 4.5 and 6.2 us between A100 nodes",
    "2026-11-22",
)


@with_old_names(wire="link_bandwidth")
@dataclass(frozen=True)
class Datasheet:
    """Datasheet of one device and of its links.

    Parameters
    ----------
    system : str
        Name in ``reference_data/datasheets.csv``, such as ``h100-sxm`` [-].
    device : Device
        Peaks and memory levels [-].
    links : mapping of str to Quantity
        Bandwidth of ``NVLink``, ``fabric``, ``PCIe`` and ``NIC``, one way per rank, where stated
        [B/s].
    products : mapping of str to Quantity
        Rate of large matrix products by number format, where it is known or assumed beside the peak
        [FLOP/s].
    power : Quantity or None
        Most that the device draws, where stated [W].
    multiprocessors : Quantity or None
        Multiprocessors of the device, where stated [-].
    node : Quantity or None
        Most ranks that the links join in one node, or in one rack, where stated [-].
    """

    system: str
    device: Device
    links: Mapping[str, Quantity]
    products: Mapping[str, Quantity] = field(default_factory=dict)
    power: Quantity | None = None
    multiprocessors: Quantity | None = None
    node: Quantity | None = None

    @property
    def link_bandwidth(self) -> Quantity | None:
        """Bandwidth between the ranks of a node, one way per rank, where stated [B/s]."""
        return next((self.links[name] for name in _LINKS[:3] if name in self.links), None)


def _stated(row: Mapping[str, str]) -> Quantity:
    source = "; ".join(text for text in (row["source"], row["note"]) if text)
    return Quantity(
        float(row["value"]), row["unit"], row["kind"], source, row["date"], basis=row["basis"]
    )


def list_datasheets() -> tuple[str, ...]:
    """List the devices whose datasheets ship with perfkit.

    Returns
    -------
    systems : tuple of str
        Names for `read_datasheet` [-].

    Examples
    --------
    >>> list_datasheets()[:3]
    ('a100-sxm', 'a100-sxm-40gb', 'h100-sxm')
    """
    return tuple(group_rows("system", "datasheets.csv"))


def read_datasheet(system: str) -> Datasheet:
    """Read the datasheet of a device.

    Parameters
    ----------
    system : str
        One of `list_datasheets` [-].

    Returns
    -------
    datasheet : Datasheet
        Device and links [-].

    Raises
    ------
    ValueError
        For an unknown system.

    Examples
    --------
    >>> h200 = read_datasheet("h200-sxm")
    >>> h200.device.peaks["bf16"].value / 1e12, h200.links["NVLink"].value / 1e9
    (989.5, 450.0)
    """
    systems = group_rows("system", "datasheets.csv")
    rows = systems[check_choice("system", system, systems)]
    found = {(row["quantity"], row["dtype"]): _stated(row) for row in rows}
    peaks, products = {}, {}
    memory = []
    for (name, dtype), quantity in found.items():
        if name == "peak":
            peaks[dtype] = quantity
        elif name == "products":
            products[dtype] = quantity
        elif name.endswith(" capacity"):
            level = name.removesuffix(" capacity")
            memory.append(MemoryLevel(level, quantity, found.get((f"{level} bandwidth", ""))))
    caches = _read_caches().get(system)
    if caches is not None:
        if memory[0].name != "L2":
            raise ValueError(
                f"published/l2_bandwidth.csv has {system!r}, whose datasheet has no L2 capacity before its "
                "memory; add that row"
            )
        memory[0] = _add_cache_rate(memory[0], caches, peaks["fp32"])
    links = {}
    for name in _LINKS:
        bandwidth = found.get((f"{name} bandwidth", ""))
        if bandwidth is not None:
            links[name] = bandwidth
    capability = found.get(("capability", ""))
    device = Device(rows[0]["device"], "cuda", peaks, tuple(memory), capability=capability)
    return Datasheet(
        system,
        device,
        links,
        products,
        power=found.get(("power", "")),
        multiprocessors=found.get(("multiprocessors", "")),
        node=found.get(("node", "")),
    )


class _CacheRate(NamedTuple):
    """What was measured of the last cache of a generation of GPUs, see
    ``reference_data/published/l2_bandwidth.csv``.

    Parameters
    ----------
    bytes_per_clock : float
        Bytes that it serves a multiprocessor in a clock [B].
    lanes : int
        Products in fp32 that a multiprocessor computes in a clock, as the peak counts them [-].
    held : float
        Share of the nominal capacity at which half of the gain over the main memory is lost [-].
    kind : str
        ``measured`` on such a device, or ``assumed`` from others [-].
    spread : float
        Standard deviation of the logarithm of the bandwidth [-].
    source, date : str
        Where from, and when it was entered [-].
    """

    bytes_per_clock: float
    lanes: int
    held: float
    kind: str
    spread: float
    source: str
    date: str


@lru_cache(maxsize=1)
def _read_caches() -> dict[str, _CacheRate]:
    """What is known of the last caches of devices, by their system."""
    rates = {}
    for systems, [row] in group_rows("systems", "published", "l2_bandwidth.csv").items():
        rate = _CacheRate(
            bytes_per_clock=float(row["bytes_per_clock"]),
            lanes=int(row["lanes"]),
            held=float(row["held"]),
            kind=row["kind"],
            spread=float(row["spread"]),
            source=f"{row['source']}; {row['note']}",
            date=row["date"],
        )
        for system in systems.split():
            rates[system] = rate
    return rates


def _add_cache_rate(level: MemoryLevel, cache: _CacheRate, peak: Quantity) -> MemoryLevel:
    """A cache with its bandwidth: bytes in a clock times multiprocessors and their clock, which the
    peak in fp32 gives; a product and a sum are two operations."""
    multiprocessor_clocks = peak.value / (2.0 * cache.lanes)
    bandwidth = cache.bytes_per_clock * multiprocessor_clocks
    text = f"{cache.bytes_per_clock:g} B a clock and multiprocessor, by the peak in fp32"
    return replace(
        level,
        bandwidth=Quantity(
            bandwidth,
            "B/s",
            cache.kind,
            cache.source,
            cache.date,
            stderr=cache.spread * bandwidth,
            basis=text,
        ),
        held=Quantity(
            cache.held,
            "-",
            cache.kind,
            cache.source,
            cache.date,
            basis="where half of the gain over the main memory is lost",
        ),
    )


def find_datasheet(device: Device) -> Datasheet | None:
    """Find the datasheet of a device by the name of the device; None where there is none."""
    return _find_sheet(device.name)


@lru_cache(maxsize=64)
def _find_sheet(device: str) -> Datasheet | None:
    """The datasheet of a device by its name, which each prediction asks for."""
    for sheet in map(read_datasheet, list_datasheets()):
        if sheet.device.name == device:
            return sheet
    return None


def note_large_node(device: Device, ranks_per_node: int, ranks: int) -> tuple[str, ...]:
    """A note where a node has more ranks than the links of its device join.

    Parameters
    ----------
    device : Device
        What a rank computes on.
    ranks_per_node : int
        Ranks of a node [-].
    ranks : int
        Ranks of the platform [-].

    Returns
    -------
    notes : tuple of str
        A sentence, with the name of a platform whose nodes have as many as there are; or nothing,
        also where no datasheet says how many.

    Examples
    --------
    >>> device = read_datasheet("h100-sxm").device
    >>> note_large_node(device, 8, 64)
    ()
    >>> note_large_node(device, 64, 64)[0]
    "a node has 64 ranks, and links of NVIDIA H100 SXM5 80 GB join 8: all 64 are priced as if they did; take 'h100-sxm-8x8'"
    """
    sheet = find_datasheet(device)
    if sheet is None or sheet.node is None or ranks_per_node <= sheet.node.value:
        return ()
    joined = int(sheet.node.value)
    nodes = -(-ranks // joined)
    return (
        f"a node has {ranks_per_node} ranks, and links of {device.name} join {joined}: all "
        f"{ranks_per_node} are priced as if they did; take '{sheet.system}-{joined}x{nodes}'",
    )


def find_adapter(platform: str, device: Device) -> Link:
    """Find the link between nodes in the datasheet of the device of a platform."""
    sheet = find_datasheet(device)
    if sheet is not None and "NIC" in sheet.links:
        return Link(sheet.links["NIC"], HOP, ADAPTERS)
    such = ".with_link('inter', bandwidth=50e9, latency=1e-6).with_nodes(2) for 400 Gb/s per rank"
    raise ValueError(
        f"platform {platform!r} knows nothing between nodes; add a link first, such as {such}"
    )
