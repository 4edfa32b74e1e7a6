"""What if: platforms with other nodes, another device, other links, or faster resources."""

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from perfkit.fitting import Additive, CollectiveModel, Fit, OverRanks
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import DTYPES, LINKS, Device, Link, Network, Quantity, check_base
from perfkit.ground.units import check_choice, check_positive, format_rate, format_time
from perfkit.models.collectives import COLLECTIVES, ring_steps
from perfkit.models.kernels import TERMS, capped_clock
from perfkit.platform.datasheets import (
    ADAPTERS,
    Datasheet,
    find_adapter,
    find_datasheet,
)
from perfkit.platform.machine import Machine
from perfkit.platform.node_networks import Fabric, find_fabric

#: Extra spread of kernels on another device [-]; docs/formulas.md, table 2.4.
DEVICE_SPREAD = 0.15
#: Extra spread of collectives on a device with the same or another bandwidth of links [-];
#: docs/formulas.md, table 1.4.
SAME_LINK_SPREAD, START_SPREAD = 0.06, 0.3
#: Time, in start-ups, at which that spread is `START_SPREAD` [-]; it falls with the fifth root of
#: time.
SPREAD_AT = (0.46 / START_SPREAD) ** 5
#: Spread per logarithm of a change of bandwidth or latency [-]; docs/formulas.md, table 1.4.
SCALE_SPREAD = 0.3
#: Least cap over the power of the datasheet for which the law of clocks holds [-]; docs/formulas.md,
#: table 2.4.
LEAST_POWER = 0.7
#: Resources of a platform, and what each is.
RESOURCES = {
    "peak": "FLOP/s of the device",
    "memory": "bandwidth of its memory",
    "cache": "bandwidth and size of its caches",
    "intra": "bandwidth of links in a node",
    "inter": "bandwidth of links between nodes",
    "far": "bandwidth of links between regions",
    "latency": "quickness of collectives to start",
    "host": "speed of the host",
}
#: The resource that a fitted time depends on, by the start of its name: of most forms, and of sums
#: of terms.
_STARTS = dict.fromkeys(("launch", "alpha", "per_collective", "per_resume"), "latency") | {
    "page_walks": "memory",
    "per_row": "peak",
    "per_column": "peak",
    "per_lookup": "peak",
    "per_number": "peak",
}
_TERMS = {**dict.fromkeys(TERMS, "peak"), **_STARTS, "beyond_l3": "memory"}
P = TypeVar("P", bound=Machine)  # a platform
F = TypeVar("F", bound=Fit)


def resize_nodes(platform: P, nodes: int, local: int) -> P:
    """Give nodes another number of ranks, and keep the collectives that hold there: on rails, and
    inside both nodes."""
    kept, before = {}, platform.network.ranks_per_node
    for key, fit in platform.collectives.items():
        _, ranks, algorithm, _ = Key.parse(key)
        if algorithm == "rail" or (ranks is not None and ranks <= min(local, before)):
            kept[key] = fit
        elif ranks is None and local > 1:  # a law over rank counts needs two ranks
            high = fit.ranges.get("ranks", (2.0, 2.0))[1]
            if high <= before:
                most = float(local) if local < before else high
                kept[key] = replace(fit, ranges={**fit.ranges, "ranks": (2.0, most)})
    network = replace(platform.network, ranks_per_node=local, nodes=nodes, regions=1)
    return replace(platform, network=network, collectives=kept)


def with_nodes(
    platform: P,
    nodes: int,
    *,
    ranks_per_node: int | None = None,
    regions: int | None = None,
    network: str | None = None,
) -> P:
    """More or fewer nodes of the same kind, see `Platform.with_nodes`."""
    if network is not None:
        platform = _with_fabric(platform, find_fabric(network), network)
    nodes = check_positive("nodes", nodes, integer=True)
    stated_nodes = nodes_before = platform.network.nodes
    regions_before = platform.network.regions
    if regions is None:
        regions = regions_before
    regions = check_positive("regions", regions, integer=True)
    if nodes % regions:
        raise ValueError(f"regions is {regions}; it must divide nodes, {nodes}; change one of them")
    if ranks_per_node is not None:
        ranks_per_node = check_positive("ranks_per_node", ranks_per_node, integer=True)
        if ranks_per_node != platform.network.ranks_per_node:
            platform = _with_ranks_of_node(platform, ranks_per_node)
            nodes_before = 1
    changes = []
    if nodes != stated_nodes or regions != regions_before:
        changes.append(f"{nodes} nodes instead of {stated_nodes}")
    name = _name_nodes(platform.name, nodes_before, nodes, regions_before)
    links = platform.network.links
    suffix = ""
    if nodes > 1 and not _knows_nodes(platform):
        links = {**links, "inter": find_adapter(platform.name, platform.device)}
        changes.append("linked by the network adapters of the datasheet")
        # a platform of the gallery with this name may know its links better
        suffix = " by datasheet"
    where = f" in {regions} regions" if regions > 1 else ""
    resized = replace(platform.network, nodes=nodes, links=links, regions=regions)
    change = ", ".join(changes) + where if changes else ""
    return derive(platform, name + where + suffix, change, network=resized)


def _with_fabric(platform: P, fabric: Fabric, name: str) -> P:
    """A platform whose nodes are joined by the network of a provider."""
    if not fabric.is_of(platform.device):
        devices = " or ".join(fabric.systems)
        warnings.warn(
            f"network is {name!r}, {fabric.title}, whose nodes have {devices}; platform "
            f"{platform.name!r} has {platform.device.name}: its nodes are linked by those adapters "
            "nevertheless",
            stacklevel=4,
        )
    node, _, _ = platform.name.partition("@")
    link = fabric.link
    if _knows_nodes(platform):  # measured collectives follow their link
        latency = None if fabric.latency is None else link.latency.value
        platform = with_link(platform, "inter", bandwidth=link.bandwidth.value, latency=latency)
        link = replace(link, latency=platform.network.links["inter"].latency)
    links = {**platform.network.links, "inter": link}
    network = replace(platform.network, links=links, rails=fabric.adapters)
    return derive(platform, f"{node}@{name}", f"nodes linked as in {fabric.title}", network=network)


def _with_ranks_of_node(platform: P, ranks_per_node: int) -> P:
    """A single node with another number of ranks."""
    nodes = platform.network.nodes
    name, at, fabric = platform.name.partition("@")
    name = re.sub(rf"-\d+?(x{nodes})?$", f"-{ranks_per_node}", name)
    node = resize_nodes(platform, 1, ranks_per_node)
    return derive(node, f"{name}{at}{fabric}", f"{ranks_per_node} ranks a node")


def _knows_nodes(platform: Machine) -> bool:
    """Whether a platform knows how its nodes are linked."""
    if "inter" in platform.network.links:
        return True
    return any(Key.parse(key).algorithm == "rail" for key in platform.collectives)


def _name_nodes(name: str, nodes_before: int, nodes: int, regions_before: int) -> str:
    """Name of a platform with another number of nodes: ``h100-sxm-8x4`` as in the gallery, with its
    network as in ``h100-sxm-8x4@p5``, else ``mine, 4 nodes``."""
    name, at, fabric = name.partition("@")
    if at:
        return f"{_name_nodes(name, nodes_before, nodes, regions_before)}@{fabric}"
    gallery_node = re.fullmatch(rf"([^\s,]*-\d+?)(?:x{nodes_before})?", name)
    if gallery_node:
        return gallery_node[1] if nodes == 1 else f"{gallery_node[1]}x{nodes}"
    stem = re.sub(
        rf"(, {nodes_before} nodes|x{nodes_before})?( in {regions_before} regions)?$", "", name
    )
    return stem if nodes == 1 else f"{stem}, {nodes} nodes"


def with_datasheet(platform: P, other: Machine | Datasheet | Device) -> P:
    """Another device, see `Platform.with_datasheet`."""
    name, device, links = _describe(platform, other)
    if device.kind != platform.device.kind:
        raise ValueError(
            f"{name} is {device.kind}, {platform.name} is {platform.device.kind}; fits do not carry over"
        )
    for key, fit in platform.kernels.items():
        if isinstance(fit, Additive) and key != "transfer":  # transfers depend on the host
            held = f"platform {platform.name!r} holds seconds per byte for {key}, not efficiencies of a datasheet"
            raise ValueError(f"{held}; calibrate on the other device instead")
    change = f"datasheet of {name} instead of {platform.device.name}"
    note = f"{platform.name}: {change}"

    def carry(fit: F) -> F:
        return rescale_fit(fit, note, DEVICE_SPREAD)

    lacking = DTYPES.keys() - device.peaks.keys()
    kernels = {}
    for key, kernel in platform.kernels.items():
        if Key.parse(key).variant not in lacking:
            kernels[key] = carry(kernel)
    collectives = {
        key: _carry_collective(key, fit, platform.network, links, note)
        for key, fit in platform.collectives.items()
    }
    return derive(
        platform,
        f"{name} from {platform.name}",
        change,
        device=device,
        collectives=collectives,
        kernels=kernels,
        context=replace(platform.context, caches=None).map(carry),
        network=replace(platform.network, links={**platform.network.links, **links}),
    )


def _carry_collective(
    key: str, fit: CollectiveModel, network: Network, links: Mapping[str, Link], note: str
) -> CollectiveModel:
    """Carry a collective over to a device with other links."""
    name = find_link(key, network.ranks_per_node)
    old, new = network.links.get(name), links.get(name)
    ratio = 1.0
    if old is not None and new is not None:
        ratio = old.bandwidth.value / new.bandwidth.value
    if ratio == 1.0:
        return rescale_fit(fit, note, SAME_LINK_SPREAD)
    carried = rescale_fit(
        fit, f"{note}, time per byte x {ratio:.3g}", START_SPREAD, {"beta": ratio}
    )
    start = _start(key, fit, network.ranks_per_node)
    return replace(carried, spread_time=SPREAD_AT * start)


def with_link(
    platform: P, name: str, *, bandwidth: float | None = None, latency: float | None = None
) -> P:
    """Another link, see `Platform.with_link`."""
    check_choice("name", name, LINKS)
    old, local = platform.network.links.get(name), platform.network.ranks_per_node
    fitted = [key for key in platform.collectives if find_link(key, local) == name]
    if old is None and fitted:
        raise ValueError(
            f"platform {platform.name!r} does not know the {name} link that {fitted[0]} was fitted on"
        )
    lacking = "bandwidth [B/s, one way, per rank] and latency [s per hop] are missing; give"
    if bandwidth is None and latency is None and old is not None:
        raise ValueError(f"{lacking} one of them")
    shown = []
    new_bandwidth = old.bandwidth if old is not None else None
    new_latency = old.latency if old is not None else None
    if bandwidth is not None:
        new_bandwidth = _suppose("bandwidth", bandwidth, "B/s")
        shown.append(format_rate(new_bandwidth.value, "B/s"))
    if latency is not None:
        new_latency = _suppose("latency", latency, "s")
        shown.append(format_time(new_latency.value))
    if new_bandwidth is None or new_latency is None:
        raise ValueError(f"{lacking} both, platform {platform.name!r} has no {name} link yet")
    change = f"{name} link of {' and '.join(shown)}"
    link_name = old.name if old is not None else ""
    if bandwidth is not None and link_name == ADAPTERS:
        link_name = ""  # no adapter of the datasheet any more
    link = Link(new_bandwidth, new_latency, link_name)
    collectives = dict(platform.collectives)
    if old is not None:
        note = f"{platform.name}: {change}"
        for key in fitted:
            collectives[key] = _follow_link(key, collectives[key], old, link, local, note)
    network = replace(platform.network, links={**platform.network.links, name: link})
    return derive(
        platform, f"{platform.name}, {change}", change, network=network, collectives=collectives
    )


def _suppose(name: str, value: float, unit: str) -> Quantity:
    """A number that the caller supposes, in a base unit."""
    return Quantity(check_base(name, value, unit), unit, "assumed", "what if")


def with_host(platform: P, scale: float) -> P:
    """Another host, see `Platform.with_host`."""
    scale = check_positive("scale", scale, zero=True)
    change = f"host overheads x {scale:g}"
    note = f"{platform.name}: {change}"
    host = {}
    for name, overhead in platform.host.items():
        host[name] = replace(
            overhead,
            value=scale * overhead.value,
            stderr=None,
            kind="assumed",
            source=f"{change}; {overhead.source}",
        )

    def carry(fit: F) -> F:
        if "per_operation" not in fit:
            return fit
        return rescale_fit(fit, note, 0.0, {"per_operation": scale})

    context = platform.context.map(carry)
    if not host and context == platform.context:
        raise ValueError(f"platform {platform.name!r} knows no host overheads; calibrate it first")
    return derive(platform, f"{platform.name}, {change}", change, host=host, context=context)


def with_algorithm(platform: P, operation: str, algorithm: str | None) -> P:
    """Another algorithm of a collective, see `Platform.with_algorithm`."""
    check_choice("operation", operation, COLLECTIVES)
    chosen = {name: own for name, own in platform.network.algorithms.items() if name != operation}
    change = f"{operation} as the library chooses"
    if algorithm is not None:
        from perfkit.platform.collectives import list_algorithms  # only exchanges need it

        known = list_algorithms(platform, operation)
        if not known:
            raise ValueError(
                f"platform {platform.name!r} knows no algorithm of {operation}; leave it to the library"
            )
        chosen[operation] = check_choice(f"algorithm of {operation}", algorithm, known)
        change = f"{operation} by {algorithm}"
    network = replace(platform.network, algorithms=chosen)
    return derive(platform, f"{platform.name}, {change}", change, network=network)


def list_resources(platform: Machine) -> list[str]:
    """List the resources of a platform, some of `RESOURCES`."""
    lacking = set(LINKS) - set(platform.network.links)
    context_of_host = any("per_operation" in fit for fit in platform.context.fits().values())
    if not platform.host and not context_of_host:
        lacking.add("host")
    return [name for name in RESOURCES if name not in lacking]


def with_scale(platform: P, **scales: float) -> P:
    """Other speeds of resources, see `Platform.with_scale`."""
    known = list_resources(platform)
    asked = {}
    for name, scale in scales.items():
        asked[check_choice("resource", name, known)] = check_positive(name, scale)
    change = ", ".join(f"{name} x {scale:g}" for name, scale in asked.items())
    speeds = _Speeds(dict.fromkeys(RESOURCES, 1.0) | asked, f"{platform.name}: {change}")
    context = platform.context.map(speeds.scale_kernel)
    if context.caches:
        cache = speeds.factors["cache"]
        sizes = {name: context.caches[name] * cache for name in ("l2", "l3")}
        context = replace(context, caches=context.caches.with_values(sizes))
    kernels = {}
    for key, kernel in platform.kernels.items():
        kernels[key] = kernel if key == "transfer" else speeds.scale_kernel(kernel)
    collectives = {}
    for key, collective in platform.collectives.items():
        link = find_link(key, platform.network.ranks_per_node)
        collectives[key] = speeds.scale_collective(collective, link)
    links = {name: speeds.scale_link(link, name) for name, link in platform.network.links.items()}
    starts = platform.network.starts / speeds.factors["latency"]
    scaled = derive(
        platform,
        f"{platform.name}, {change}" if asked else platform.name,
        change,
        kernels=kernels,
        context=context,
        collectives=collectives,
        device=speeds.scale_device(platform.device),
        network=replace(platform.network, links=links, starts=starts),
    )
    if "host" not in asked:
        return scaled
    with_slower_host = with_host(scaled, 1 / asked["host"])
    return replace(with_slower_host, name=scaled.name)


def with_power(platform: P, watts: float) -> P:
    """A power cap, see `Platform.with_power`."""
    watts = check_positive("watts", watts)
    sheet = find_datasheet(platform.device)
    advice = "scale the arithmetic by hand, such as .with_scale(peak=0.9)"
    if sheet is None or sheet.power is None:
        raise ValueError(
            f"platform {platform.name!r}: no datasheet states the power of {platform.device.name}; {advice}"
        )
    full = sheet.power
    if not LEAST_POWER * full.value <= watts <= full.value:
        raise ValueError(
            f"watts is {watts:g}; it must be from {LEAST_POWER * full.value:g} to {full.value:g}, the power of "
            f"{platform.device.name}, where clocks follow the law of `capped_clock`; {advice}"
        )
    for dtype, peak in platform.device.peaks.items():
        stated = sheet.device.peaks.get(dtype)
        if stated is not None and peak.value < stated.value:
            raise ValueError(
                f"platform {platform.name!r} reaches {format_rate(peak.value, 'FLOP/s')} in {dtype} and its "
                f"datasheet states {format_rate(stated.value, 'FLOP/s')}: its clock is lower already; "
                "cap the platform that it was made from"
            )
    clock = float(capped_clock(watts / full.value))
    change = f"power cap of {watts:g} W"
    slower = with_scale(platform, peak=clock)
    # the cap is the change, not the scale of its arithmetic
    slower = replace(slower, name=platform.name, provenance=platform.provenance)
    return derive(slower, f"{platform.name}, {change}", change)


class _Speeds(NamedTuple):
    """By which factor each resource is faster, and the note about it.

    Parameters
    ----------
    factors : mapping of str to float
        For each of `RESOURCES` [-].
    note : str
        What fits are told.
    """

    factors: Mapping[str, float]
    note: str

    def scale_kernel(self, fit: F) -> F:
        """A kernel, or what an iteration does to it."""
        names = _TERMS if isinstance(fit, Additive) else _STARTS
        return self._scale_fit(fit, names, ("peak", "memory", "cache", "latency"))

    def scale_collective(self, fit: F, link: str) -> F:
        """A collective over a link."""
        return self._scale_fit(fit, {**_STARTS, "beta": link}, (link, "latency"))

    def _scale_fit(self, fit: F, names: Mapping[str, str], resources: tuple[str, ...]) -> F:
        """Scale the parameters of a fit with their resources, and widen its spread for all
        resources that it uses."""
        changes = [math.log(self.factors[name]) for name in resources]
        if not any(changes):
            return fit
        factors = {name: 1 / self.factors[resource] for name, resource in names.items()}
        moved = rescale_fit(fit, self.note, SCALE_SPREAD * math.hypot(*changes), factors)
        return replace(moved, kind=fit.kind)

    def scale_device(self, device: Device) -> Device:
        """A device: its peaks, and its levels of memory."""
        peaks = {dtype: self.scale_rate(peak, "peak") for dtype, peak in device.peaks.items()}
        caches, main = device.memory[:-1], device.memory[-1]
        levels = []
        for cache in caches:
            capacity = self.scale_rate(cache.capacity, "cache")
            bandwidth = self.scale_rate(cache.bandwidth, "peak")
            levels.append(replace(cache, capacity=capacity, bandwidth=bandwidth))
        levels.append(replace(main, bandwidth=self.scale_rate(main.bandwidth, "memory")))
        return replace(device, peaks=peaks, memory=tuple(levels))

    def scale_link(self, link: Link, name: str) -> Link:
        """A link by its name: its bandwidth, and its latency with that of all."""
        return replace(
            link,
            bandwidth=self.scale_rate(link.bandwidth, name),
            latency=self._scale_quantity(link.latency, "latency", -1),
        )

    def scale_rate(self, quantity: Quantity | None, name: str) -> Any:
        """A number of a datasheet that grows with its resource."""
        return self._scale_quantity(quantity, name, 1)

    def _scale_quantity(self, quantity: Quantity | None, name: str, power: int) -> Any:
        factor = self.factors[name]
        if quantity is None or factor == 1:
            return quantity
        source = f"{name} x {factor:g}; {quantity.source}"
        value = quantity.value * factor**power
        return replace(quantity, value=value, kind="assumed", source=source)


def derive(platform: P, name: str, change: str, **parts: Any) -> P:
    """Replace parts of a platform, and record the change in its provenance, unless it is empty."""
    if not change:
        return replace(platform, name=name, **parts)
    past = platform.provenance
    changes = "; ".join(filter(None, (past.get("changes"), change)))
    story = {**past, "derived_from": past.get("derived_from", platform.name), "changes": changes}
    return replace(platform, name=name, provenance=story, **parts)


def _describe(
    machine: Machine, other: Machine | Datasheet | Device
) -> tuple[str, Device, dict[str, Link]]:
    """Name, device and links of another platform, datasheet or device."""
    if isinstance(other, Device):
        return other.name, other, {}
    if isinstance(other, Machine):
        return other.name, other.device, dict(other.network.links)
    rates = {"intra": other.link_bandwidth, "inter": other.links.get("NIC")}
    links = {}
    for name, link in machine.network.links.items():
        rate = rates.get(name)
        if rate is not None:
            links[name] = replace(link, bandwidth=rate)
    return other.system, other.device, links


def find_link(key: str, ranks_per_node: int) -> str:
    """Name of the link that limits a collective: ``inter`` across nodes, else ``intra``."""
    _, ranks, algorithm, _ = Key.parse(key)
    return "inter" if algorithm == "rail" or (ranks or 0) > ranks_per_node else "intra"


def _start(key: str, fit: CollectiveModel, ranks_per_node: int) -> float:
    """Start-up time of a collective fit, above zero [s]."""
    parsed = Key.parse(key)
    ranks = parsed.ranks or ranks_per_node
    return max(float(fit.time(0.0, parsed.operation, ranks)), 1e-9)


def rescale_fit(fit: F, note: str, spread: float, factors: Mapping[str, float] | None = None) -> F:
    """Carry a fit over to another machine: scaled parameters, a wider spread, and a note about
    it."""
    values, errors = {}, {}
    for name, value in fit.items():
        factor = _find_factor(name, factors or {})
        values[name] = value * factor
        if name in fit.stderr:
            errors[name] = fit.stderr[name] * factor
    return fit.with_values(
        values,
        stderr=errors,
        kind="assumed",
        spread=math.hypot(fit.spread, spread),
        transferred=(note, *fit.transferred),
    )


def _find_factor(name: str, factors: Mapping[str, float]) -> float:
    """The factor of a parameter: that of the first stem which its name begins with."""
    for stem, factor in factors.items():
        if name.startswith(stem):
            return factor
    return 1.0


def _follow_link(
    key: str, fit: CollectiveModel, old: Link, new: Link, ranks_per_node: int, note: str
) -> CollectiveModel:
    """Adapt a collective to a changed link: its time per byte to the bandwidth, its start-up to the
    latency."""
    ratio = old.bandwidth.value / new.bandwidth.value
    change = new.latency.value - old.latency.value
    # if the start-up were nothing but hops
    least = min(new.latency.value / max(old.latency.value, 1e-12), 1.0)
    parsed = Key.parse(key)
    is_law = isinstance(fit, OverRanks)
    steps = 1.0
    if not is_law:
        steps = float(ring_steps(parsed.operation, parsed.ranks or ranks_per_node))
    starts = {}
    for name, value in fit.items():
        is_start = name == "alpha1" or (name.startswith("alpha") and not is_law)
        if is_start:
            starts[name] = max(value + steps * change, least * value)
    carried = rescale_fit(fit.with_values(starts), note, 0.0, {"beta": ratio})
    growth = _start(key, carried, ranks_per_node) / _start(key, fit, ranks_per_node)
    spreads = [SCALE_SPREAD * math.log(factor) for factor in (ratio, growth)]
    return replace(carried, spread=math.hypot(fit.spread, *spreads))
