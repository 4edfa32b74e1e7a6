"""Networks of providers by name: what joins the nodes of a kind of machine, from published specifications."""

from dataclasses import dataclass
from functools import cache

from perfkit.ground.files import group_rows
from perfkit.ground.hardware import Device, Link, Quantity
from perfkit.ground.results import Table
from perfkit.ground.units import check_choice, show
from perfkit.platform.datasheets import HOP, find_datasheet

#: Bits a second of one byte a second, in Gb/s.
_GIGABITS = 8e-9


@dataclass(frozen=True)
class Fabric:
    """The network of one kind of node.

    Parameters
    ----------
    names : tuple of str
        Names to ask for it by, such as ``p5`` [-].
    title : str
        Provider and machine, in words [-].
    systems : tuple of str
        Datasheets of its devices, see `perfkit.platform.datasheets.list_datasheets` [-].
    gpus : int
        Devices of a node [-].
    adapters : int
        Network adapters of a node that carry data between devices [-].
    rate : Quantity
        Line rate of one adapter, one way [B/s].
    network : str
        Network as NCCL names it in logs, such as ``EFA``; empty where logs do not tell it [-].
    transport : str
        Kind of network, such as ``InfiniBand NDR``; empty where it is not known [-].
    latency : Quantity or None
        Latency of a hop, where it is published [s].
    """

    names: tuple[str, ...]
    title: str
    systems: tuple[str, ...]
    gpus: int
    adapters: int
    rate: Quantity
    network: str
    transport: str
    latency: Quantity | None

    @property
    def bandwidth(self) -> Quantity:
        """Share of a device of all adapters of its node, one way [B/s]."""
        gigabits = self.rate.value * _GIGABITS
        basis = f"one way per rank; {self.adapters} x {gigabits:g} Gb/s for {self.gpus} devices"
        value = self.adapters * self.rate.value / self.gpus
        return Quantity(value, "B/s", "datasheet", self.rate.source, self.rate.date, basis=basis)

    @property
    def link(self) -> Link:
        """The link between nodes of one rank; the latency is `HOP` where none is published."""
        latency = HOP if self.latency is None else self.latency
        return Link(self.bandwidth, latency, f"{self.transport or 'network'} of {self.title}")

    def is_called(self, text: str) -> bool:
        """Whether a text is a part of the provider, the machine or the kind of network."""
        publisher = self.rate.source.partition(",")[0]
        parts = (publisher, self.title, *self.names, self.network, self.transport)
        return any(text.lower() in part.lower() for part in parts)

    def is_of(self, device: Device) -> bool:
        """Whether machines with this network may have a device; True where the device has no
        datasheet."""
        sheet = find_datasheet(device)
        return sheet is None or sheet.system in self.systems


def _make_fabric(row: dict[str, str]) -> Fabric:
    """A fabric from its row of the table."""

    def state(value: str, unit: str) -> Quantity:
        return Quantity(float(value), unit, "datasheet", row["source"], row["date"])

    return Fabric(
        names=tuple(row["keys"].split()),
        title=row["name"],
        systems=tuple(row["systems"].split()),
        gpus=int(row["gpus"]),
        adapters=int(row["adapters"]),
        rate=state(row["rate"], "B/s"),
        network=row["network"],
        transport=row["transport"],
        latency=state(row["latency"], "s") if row["latency"] else None,
    )


@cache
def list_fabrics() -> tuple[Fabric, ...]:
    """List the published networks of nodes, in the order of their table.

    Returns
    -------
    fabrics : tuple of Fabric
        The rows of ``reference_data/published/node_networks.csv``.

    Examples
    --------
    >>> [fabric.title for fabric in list_fabrics() if "p5" in fabric.names]
    ['AWS p5']
    """
    groups = group_rows("keys", "published", "node_networks.csv")
    return tuple(_make_fabric(row) for rows in groups.values() for row in rows)


def find_fabric(name: str) -> Fabric:
    """Find a network by the name of the provider's machine.

    Parameters
    ----------
    name : str
        Such as ``p5``, ``nd-h100-v5``, ``a3-mega``, ``bm.gpu.h100.8`` or ``dgx-h100`` [-].

    Returns
    -------
    fabric : Fabric
        Its adapters, with their source.

    Raises
    ------
    ValueError
        For an unknown name; the message lists those of the provider, machine or kind of network that
        it may mean, else all known ones.

    Examples
    --------
    Each of eight GPUs of a p4d has half an adapter of 100 Gb/s:

    >>> find_fabric("p4d").bandwidth.value
    6250000000.0
    """
    by_name = {known: fabric for fabric in list_fabrics() for known in fabric.names}
    is_begun = isinstance(name, str) and any(known.startswith(name.lower()) for known in by_name)
    if isinstance(name, str) and not is_begun:
        meant = [
            f"{fabric.title}: {', '.join(fabric.names)}"
            for fabric in list_fabrics()
            if fabric.is_called(name)
        ]
        if meant:
            raise ValueError(
                f"network is {show(name)}; did you mean {'; '.join(meant)}? known are {', '.join(by_name)}"
            )
    return by_name[check_choice("network", name, by_name)]


def fabrics() -> Table:
    """List the networks of providers that `Platform.with_nodes` and `load_platform` take by name.

    Returns
    -------
    table : polars.DataFrame
        Columns names, machine, devices (their datasheets), transport; gpus and adapters of a node
        [-]; rate of an adapter [Gb/s]; bandwidth of each device, one way [B/s]; latency of a hop,
        null where none is published [s]; source.

    Examples
    --------
    >>> fabrics().row(0)[:2]
    ('p4d, p4de', 'AWS p4d and p4de')
    """
    import polars as pl

    from perfkit.ground.frames import ResultFrame

    rows = []
    for fabric in list_fabrics():
        row = {
            "names": ", ".join(fabric.names),
            "machine": fabric.title,
            "devices": ", ".join(fabric.systems),
            "transport": fabric.transport,
            "gpus": fabric.gpus,
            "adapters": fabric.adapters,
            "rate_Gbps": fabric.rate.value * _GIGABITS,
            "bandwidth_bytes_per_s": fabric.bandwidth.value,
            "latency_s": None if fabric.latency is None else fabric.latency.value,
            "source": fabric.rate.source,
        }
        rows.append(row)
    return ResultFrame(rows, schema_overrides={"latency_s": pl.Float64})
