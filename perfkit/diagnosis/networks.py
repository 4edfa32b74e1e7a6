"""Networks that may join the nodes of a run: the adapters that its log names, or published ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfkit.diagnosis.known_rates import ADAPTER_LINES
from perfkit.diagnosis.records import Adapters, Rate
from perfkit.diagnosis.systems import System, is_on_ec2
from perfkit.ground.hardware import Quantity
from perfkit.ground.units import format_count
from perfkit.platform.datasheets import HOP, Datasheet
from perfkit.platform.node_networks import list_fabrics

#: Spread of times per byte that are composed over nodes, as a standard deviation of logarithms
#: (docs/formulas.md, `LINES`: mean errors of 7 to 17 % on three clusters) [-].
ACROSS = 0.12
#: For runs whose adapters the log names, which bound all but two nodes. Published rates of single
#: adapters are 0.91 to 0.98 of the line rate, the logarithms with a standard deviation of 0.03 (six in
#: NVIDIA/nccl-tests#119, #290, #309 and the gallery's rails of ten nodes): that is the spread where NCCL
#: lists one adapter less than there are GPUs; elsewhere more, a choice, as other networks reach less [-].
NAMED = 0.055
ONE_MISSING = 0.03
#: GPUs of nodes that may have one adapter for each [-]; with other numbers a run does not use all GPUs.
_WITH_ONE_EACH = (4, 8, 16)
#: GPUs of a node whose networks are published [-].
_WHOLE = 8


@dataclass(frozen=True)
class Network:
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
    is_assured : bool
        Whether the log says that it is this one.
    """

    name: str
    of_node: float
    adapters: Adapters
    source: str
    latency: float = HOP.value
    spread: float = ACROSS
    is_default: bool = False
    is_assured: bool = False


def list_networks(system: System, sheet: Datasheet, local: int) -> list[Network]:
    """List the networks that may join the nodes of a run.

    Parameters
    ----------
    system : System
        What the log says.
    sheet : Datasheet
        Of its devices.
    local : int
        Ranks of a node [-].

    Returns
    -------
    networks : list of Network
        The usual one first. Those of adapters that the log names, with the rate that it says, else with
        each that adapters are sold with; else the datasheet's and published ones, of clouds that of EC2
        alone where hosts are named as there; where NCCL uses EFA, that alone.
    """
    named = read_adapters(system)
    if named is not None and named.is_named:
        return _list_named(named, sheet)
    kind = None if named is None else named.network
    networks = []
    if "NIC" in sheet.links:
        rate = Rate(sheet.links["NIC"].value, sheet.links["NIC"].source)
        name = f"{format_count(local, 'adapter')} of {_name_rate(rate.value)}"
        adapters = Adapters(None, local, rate, kind)
        networks.append(Network(name, local * rate.value, adapters, rate.source, is_default=True))
    if local == _WHOLE:
        networks += _list_published(sheet.system, sheet.links.get("NIC"), kind)
    if is_on_ec2(system.facts):
        networks = list(_prefer_efa(networks))
    providers = () if system.facts is None else system.facts.providers
    if any(provider.name == "efa" for provider in providers):
        for network in networks:
            if network.adapters.network == "EFA":
                return [replace(network, is_default=True, is_assured=True)]
    return networks


def _prefer_efa(networks: Sequence[Network]) -> Sequence[Network]:
    """Networks of nodes whose hosts are named as on EC2: its own first, then the usual one; no other
    cloud's. All of them where several are EC2's, or none."""
    of_ec2 = [network for network in networks if network.adapters.network == "EFA"]
    if len(of_ec2) != 1:
        return networks
    usual = [replace(network, is_default=False) for network in networks if network.is_default]
    return [replace(of_ec2[0], is_default=True), *usual]


def _list_named(named: Adapters, sheet: Datasheet) -> list[Network]:
    """Adapters that a log names, with the rate that it says, or with each that adapters are sold with; the
    usual one first. Of more adapters than GPUs the others may serve storage."""
    usual_rate = sheet.links["NIC"].value if "NIC" in sheet.links else None
    rates = [Rate(sold, "the adapters that NCCL lists, as they are sold") for sold in ADAPTER_LINES]
    if named.rate is not None:
        usual_rate = named.rate.value
        rates = [named.rate]
    usual = named.usual or 1
    counts = sorted({usual, max(usual, named.count or 1)})
    networks = []
    for count in counts:
        for rate in rates:
            # of a known rate, all adapters may carry data as well as one for each GPU
            is_alike = count == usual or named.rate is not None
            is_default = rate.value == usual_rate and is_alike
            networks.append(_name_network(named, count, rate, is_default=is_default))
    return sorted(networks, key=lambda network: not network.is_default)


def _name_network(named: Adapters, count: int, rate: Rate, *, is_default: bool) -> Network:
    """Adapters that a log names, as many as carry data, with a rate."""
    is_one_missing = named.count is not None and named.count < count
    return Network(
        f"{format_count(count, 'adapter')} of {_name_rate(rate.value)}",
        count * rate.value,
        replace(named, usual=count, rate=rate),
        rate.source,
        spread=ONE_MISSING if is_one_missing else NAMED,
        is_default=is_default,
    )


def _list_published(system: str, usual: Quantity | None, kind: str | None) -> list[Network]:
    """Published networks between nodes of eight devices, but those with the adapters of the
    datasheet."""
    networks = []
    for fabric in list_fabrics():
        if system not in fabric.systems or fabric.gpus != _WHOLE:
            continue
        # a network like that of the datasheet says nothing that it does not
        if usual is not None and fabric.latency is None and fabric.bandwidth.value == usual.value:
            continue
        rate = Rate(fabric.rate.value, fabric.rate.source)
        count = format_count(fabric.adapters, "adapter")
        network = Network(
            f"{count} of {_name_rate(rate.value)} ({fabric.title})",
            fabric.adapters * rate.value,
            Adapters(None, fabric.adapters, rate, fabric.network or kind),
            rate.source,
            latency=fabric.link.latency.value,
        )
        networks.append(network)
    return networks


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
        ports = {(each.name, each.port) for each in adapters if each.fabric != "Socket"}
        if ports:
            counts.append(len(ports))
    if facts.network in (None, "Socket") and not counts:
        return None if facts.network is None else Adapters(network=facts.network)
    if facts.network == "Socket" or not counts:
        return Adapters(network=facts.network)
    count = min(counts)
    local = system.local or count
    usual = min(count, local)
    if count == local - 1 and local in _WITH_ONE_EACH:
        usual = local  # one for each GPU, of which one is missing
    rates = {adapter.rate for adapter in facts.adapters if adapter.fabric != "Socket"}
    rate = rates.pop() if len(rates) == 1 else None
    stated = None if rate is None else Rate(rate, "what NCCL says of its adapters")
    return Adapters(count, usual, stated, facts.network, is_named=True)


def _name_rate(rate: float) -> str:
    """A rate of a network adapter as it is sold."""
    return f"{rate * 8 / 1e9:g} Gb/s"
