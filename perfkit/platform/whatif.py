"""What if: platforms with other nodes, another device, other links, or faster resources."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from perfkit.fitting import Additive, CollectiveModel, Fit, OverRanks
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import DTYPES, LINKS, Device, Link, Quantity, check_base
from perfkit.ground.units import check_choice, check_positive, format_rate, format_time
from perfkit.models.collectives import COLLECTIVES, ring_steps
from perfkit.models.kernels import TERMS
from perfkit.platform.datasheets import (
    ADAPTERS,
    Datasheet,
    find_adapter,
)
from perfkit.platform.machine import Machine

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
#: Resources of a platform.
RESOURCES = ("peak", "memory", "cache", *LINKS, "latency", "host")
#: The resource that a fitted time depends on, by the start of its name: of most forms, and of sums
#: of terms.
_STARTS = dict.fromkeys(("launch", "alpha", "per_collective", "per_resume"), "latency") | {
    "page_walks": "memory"
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
    platform: P, nodes: int, *, ranks_per_node: int | None = None, regions: int | None = None
) -> P:
    """More or fewer nodes of the same kind, see `Platform.with_nodes`."""
    nodes, before, old = (
        check_positive("nodes", nodes, integer=True),
        platform.network.nodes,
        platform.network.regions,
    )
    if nodes % (
        regions := check_positive("regions", old if regions is None else regions, integer=True)
    ):
        raise ValueError(f"regions is {regions}; it must divide nodes, {nodes}; change one of them")
    local = platform.network.ranks_per_node
    if ranks_per_node is not None:
        local = check_positive("ranks_per_node", ranks_per_node, integer=True)
    if local != platform.network.ranks_per_node:
        name = re.sub(rf"-\d+?(x{before})?$", f"-{local}", platform.name)
        platform, before = (
            derive(resize_nodes(platform, 1, local), name, f"{local} ranks a node"),
            1,
        )
    links, change, suffix = platform.network.links, f"{nodes} nodes instead of {before}", ""
    if nodes > 1 and not (
        "inter" in links or any(Key.parse(key).algorithm == "rail" for key in platform.collectives)
    ):
        links = {**links, "inter": find_adapter(platform.name, platform.device)}
        change += ", linked by the network adapters of the datasheet"
        # a platform of the gallery with this name may know its links better
        suffix = " by datasheet"
    gallery = re.fullmatch(rf"([^\s,]*-\d+?)(?:x{before})?", platform.name)
    stem = (
        gallery[1]
        if gallery
        else re.sub(rf"(, {before} nodes|x{before})?( in {old} regions)?$", "", platform.name)
    )
    count = "" if nodes == 1 else f"x{nodes}" if gallery else f", {nodes} nodes"
    where = f" in {regions} regions" * (regions > 1)
    network = replace(platform.network, nodes=nodes, links=links, regions=regions)
    return derive(platform, stem + count + where + suffix, change + where, network=network)


def with_datasheet(platform: P, other: Machine | Datasheet | Device) -> P:
    """Another device, see `Platform.with_datasheet`."""
    name, device, links = _describe(platform, other)
    if device.kind != platform.device.kind:
        raise ValueError(
            f"{name} is {device.kind}, {platform.name} is {platform.device.kind}; fits do not carry over"
        )
    bound = [
        key
        for key, fit in platform.kernels.items()
        if isinstance(fit, Additive) and key != "transfer"
    ]
    if bound:  # transfers depend on the host
        held = f"platform {platform.name!r} holds seconds per byte for {bound[0]}, not efficiencies of a datasheet"
        raise ValueError(f"{held}; calibrate on the other device instead")
    change = f"datasheet of {name} instead of {platform.device.name}"
    ours, local = platform.network.links, platform.network.ranks_per_node
    note, lacking = f"{platform.name}: {change}", DTYPES.keys() - device.peaks.keys()
    carry = partial(rescale_fit, note=note, spread=DEVICE_SPREAD)
    collectives = {}
    for key, fit in platform.collectives.items():
        old, new = (known.get(find_link(key, local)) for known in (ours, links))
        ratio = old.bandwidth.value / new.bandwidth.value if old and new else 1.0
        collectives[key] = rescale_fit(fit, note, SAME_LINK_SPREAD)
        if ratio != 1:
            carried = rescale_fit(
                fit, f"{note}, time per byte x {ratio:.3g}", START_SPREAD, {"beta": ratio}
            )
            collectives[key] = replace(carried, spread_time=SPREAD_AT * _start(key, fit, local))
    return derive(
        platform,
        f"{name} from {platform.name}",
        change,
        device=device,
        collectives=collectives,
        kernels={
            key: carry(fit)
            for key, fit in platform.kernels.items()
            if Key.parse(key).variant not in lacking
        },
        context=replace(platform.context, caches=None).map(carry),
        network=replace(platform.network, links={**ours, **links}),
    )


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
    change, known = f"host overheads x {scale:g}", platform.host
    overheads = {name: replace(q, value=scale * q.value, stderr=None) for name, q in known.items()}
    host = {
        name: replace(q, kind="assumed", source=f"{change}; {q.source}")
        for name, q in overheads.items()
    }
    carry = partial(
        rescale_fit, note=f"{platform.name}: {change}", spread=0.0, factors={"per_operation": scale}
    )
    context = platform.context.map(lambda fit: carry(fit) if "per_operation" in fit else fit)
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
    known = platform.host or any("per_operation" in fit for fit in platform.context.fits().values())
    lacking = {*LINKS, "host"} - {*platform.network.links, "host" * bool(known)}
    return [name for name in RESOURCES if name not in lacking]


def with_scale(platform: P, **scales: float) -> P:
    """Other speeds of resources, see `Platform.with_scale`."""
    known, local = list_resources(platform), platform.network.ranks_per_node
    given = {
        check_choice("resource", name, known): check_positive(name, scale)
        for name, scale in scales.items()
    }
    change = ", ".join(f"{name} x {scale:g}" for name, scale in given.items())
    at = dict.fromkeys(RESOURCES, 1.0) | given
    follow, scale = (
        partial(_rescale, at=at, note=f"{platform.name}: {change}"),
        partial(_scale, at=at),
    )
    timed = ("peak", "memory", "cache", "latency")
    kernels = {
        key: follow(fit, _TERMS if isinstance(fit, Additive) else _STARTS, timed)
        if key != "transfer"
        else fit
        for key, fit in platform.kernels.items()
    }
    over = {key: find_link(key, local) for key in platform.collectives}
    collectives = {
        key: follow(fit, {**_STARTS, "beta": over[key]}, (over[key], "latency"))
        for key, fit in platform.collectives.items()
    }
    context = platform.context.map(lambda fit: follow(fit, _STARTS, timed))
    if caches := context.caches:
        sizes = {name: caches[name] * at["cache"] for name in ("l2", "l3")}
        context = replace(context, caches=caches.with_values(sizes))
    device, network = platform.device, platform.network
    *near, main = device.memory
    levels = [
        replace(x, capacity=scale(x.capacity, "cache"), bandwidth=scale(x.bandwidth, "peak"))
        for x in near
    ]
    levels.append(replace(main, bandwidth=scale(main.bandwidth, "memory")))
    peaks = {dtype: scale(peak, "peak") for dtype, peak in device.peaks.items()}
    links = {
        name: replace(
            x, bandwidth=scale(x.bandwidth, name), latency=scale(x.latency, "latency", power=-1)
        )
        for name, x in network.links.items()
    }
    scaled = derive(
        platform,
        f"{platform.name}, {change}" if given else platform.name,
        change,
        kernels=kernels,
        context=context,
        collectives=collectives,
        device=replace(device, peaks=peaks, memory=tuple(levels)),
        network=replace(network, links=links, starts=network.starts / at["latency"]),
    )
    return (
        replace(with_host(scaled, 1 / at["host"]), name=scaled.name) if "host" in given else scaled
    )


def _rescale(
    fit: F, names: Mapping[str, str], used: tuple[str, ...], at: Mapping[str, float], note: str
) -> F:
    """Scale the parameters of a fit with their resources, and widen its spread for all resources
    that it uses."""
    changes = [math.log(at[name]) for name in used]
    factors = {name: 1 / at[resource] for name, resource in names.items()}
    moved = rescale_fit(fit, note, SCALE_SPREAD * math.hypot(*changes), factors)
    return replace(moved, kind=fit.kind) if any(changes) else fit


def _scale(quantity: Quantity | None, name: str, at: Mapping[str, float], power: int = 1) -> Any:
    """Scale a number of a datasheet or link with its resource."""
    if quantity is None or at[name] == 1:
        return quantity
    source = f"{name} x {at[name]:g}; {quantity.source}"
    return replace(
        quantity, value=quantity.value * at[name] ** power, kind="assumed", source=source
    )


def derive(platform: P, name: str, change: str, **parts: Any) -> P:
    """Replace parts of a platform, and record the change in its provenance."""
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
    operation, ranks, *_ = Key.parse(key)
    return max(float(fit.time(0.0, operation, ranks or ranks_per_node)), 1e-9)


def rescale_fit(fit: F, note: str, spread: float, factors: Mapping[str, float] | None = None) -> F:
    """Carry a fit over to another machine: scaled parameters, a wider spread, and a note about
    it."""
    scale = {
        name: next((f for stem, f in (factors or {}).items() if name.startswith(stem)), 1.0)
        for name in fit
    }
    return fit.with_values(
        {name: value * scale[name] for name, value in fit.items()},
        stderr={name: error * scale[name] for name, error in fit.stderr.items()},
        kind="assumed",
        spread=math.hypot(fit.spread, spread),
        transferred=(note, *fit.transferred),
    )


def _follow_link(
    key: str, fit: CollectiveModel, old: Link, new: Link, ranks_per_node: int, note: str
) -> CollectiveModel:
    """Adapt a collective to a changed link: its time per byte to the bandwidth, its start-up to the
    latency."""
    ratio, change = old.bandwidth.value / new.bandwidth.value, new.latency.value - old.latency.value
    # if the start-up were nothing but hops
    least = min(new.latency.value / max(old.latency.value, 1e-12), 1.0)
    operation, ranks, *_ = Key.parse(key)
    law = isinstance(fit, OverRanks)
    steps = 1.0 if law else float(ring_steps(operation, ranks or ranks_per_node))
    moved = [name for name in fit if name == "alpha1" or (name.startswith("alpha") and not law)]
    starts = {name: max(fit[name] + steps * change, least * fit[name]) for name in moved}
    carried = rescale_fit(fit.with_values(starts), note, 0.0, {"beta": ratio})
    growth = _start(key, carried, ranks_per_node) / _start(key, fit, ranks_per_node)
    return replace(
        carried,
        spread=math.hypot(fit.spread, *(SCALE_SPREAD * math.log(x) for x in (ratio, growth))),
    )
