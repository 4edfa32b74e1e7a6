"""What if: a device that nobody measured; a platform with more nodes, another device or link.

Each is a method of `Platform`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from perfkit.fitting import Fit
from perfkit.fitting.parameters import Key, evaluate_collective
from perfkit.ground.files import find_reference
from perfkit.ground.hardware import DTYPES, Device, Link, MemoryLevel, Network, Quantity
from perfkit.ground.units import check_choice, check_positive, check_type, format_rate, format_time, show
from perfkit.models.collectives import ring_steps
from perfkit.models.hierarchy import FAR
from perfkit.platform.file import PlatformError, find_file
from perfkit.readers.datasheets import Datasheet, list_datasheets, read_datasheet

#: Extra spread of kernels carried over to another device [-]; docs/formulas.md, table 2.4.
DEVICE_SPREAD = 0.15
#: Extra spread of collectives there, with a link of the same bandwidth and of another one [-]; docs/formulas.md,
#: table 1.4.
SAME_LINK_SPREAD, START_SPREAD = 0.06, 0.3
#: Time in start-ups at which that spread is `START_SPREAD` [-]; it falls with the fifth root of time.
SPREAD_AT = (0.46 / START_SPREAD) ** 5
#: Share of the logarithm of a change of bandwidth or latency that is uncertain [-]; docs/formulas.md, table 1.4.
SCALE_SPREAD = 0.3
#: Latency between nodes without a log.
HOP = Quantity(FAR, "s", "assumed", "tuning table of NCCL for trees; 4.5 and 6.2 us between A100 nodes", "2026-11-22")
_GIVEN = "stated by the caller of Platform.from_datasheet"
#: Largest power of a card that draws all of it from its slot [W]; share of its peak in fp32 that products reach there,
#: and their spread [-]; docs/formulas.md, table 2.4.
SLOT, SLOT_SHARE, SLOT_SPREAD = 75.0, 0.38, 0.36
P = TypeVar("P", bound=Any)  # a platform


def from_datasheet(
    cls: Any, name: str, *, flops: Mapping[str, float] | None = None, memory: tuple[float, float] | None = None,
    link: float | None = None, ranks: int | None = None,
) -> Any:  # fmt: skip
    """Describe one node of a device that nobody measured: a roofline with the shares that others reach.

    Parameters
    ----------
    name : str
        One of `readers.datasheets.list_datasheets`, with or without a number of ranks, such as ``mi300x-8``; any name
        where `flops` and `memory` are given [-].
    flops : mapping of str to float, optional
        Peak by number format, dense [FLOP/s].
    memory : (float, float), optional
        Capacity [B] and bandwidth, reads and writes together [B/s].
    link : float, optional
        Bandwidth between the ranks of the node, one way, per rank; that of the datasheet if not given [B/s].
    ranks : int, optional
        Ranks of the node; those in the name, else 1 [-].

    Returns
    -------
    platform : Platform
        Shares of peak, bandwidth and link are the middle of the devices of the gallery that were measured, with
        intervals as wide as these differ; all of it is ``assumed``. No time is below FLOP over peak or bytes over
        bandwidth. Host overheads are as published of another machine.

    Raises
    ------
    ValueError
        For an unknown datasheet, for numbers that are not above 0, and for several ranks without a link.

    Examples
    --------
    >>> from perfkit.platform.platform import Platform
    >>> mine = Platform.from_datasheet("mine", flops={"bf16": 4e14}, memory=(96e9, 3e12), link=450e9, ranks=8)
    >>> mine.network.ranks, mine.kernels["gemm"].kind
    (8, 'assumed')
    """
    typical = cls.load(find_reference("typical.toml"))
    sheet, count = _read_sheet(name, flops, memory)
    count = check_positive("ranks", count if ranks is None else ranks, integer=True)
    wire = sheet.wire
    if link is not None:
        wire = Quantity(check_positive("link", link), "B/s", "datasheet", _GIVEN, basis="one way per rank")
    if count > 1 and not wire:
        raise ValueError(f"link is missing; give its bandwidth for {count} ranks, one way per rank [B/s]")
    kind = next((kind for kind, rate in sheet.links.items() if rate == wire), "")
    links = {"intra": Link(wire, typical.network.links["intra"].latency, kind)} if wire else {}
    lacking, name = DTYPES.keys() - sheet.device.peaks.keys(), f"{sheet.system}-{count}" if flops is None else name
    fits = {key: fit for key, fit in typical.kernels.items() if Key.parse(key).variant not in lacking}
    fits |= _share_slot(fits) if sheet.power and sheet.power.value <= SLOT else {}
    return replace(
        typical, name=name, device=sheet.device, network=Network(count, links=links),
        kernels={key: carry_fit(fit, typical.name, 0.0) for key, fit in fits.items()},
        collectives=typical.with_link("intra", bandwidth=wire.value).collectives if wire else {},
    )  # fmt: skip


def _read_sheet(name: str, flops: Mapping[str, float] | None, memory: Any) -> tuple[Datasheet, int]:
    """A datasheet, of the table or of what the caller states, and the ranks that its name says."""
    check_type("name", name, str)
    if flops is None and memory is None:
        match = re.fullmatch(r"(.+)-([1-9][0-9]{0,3})", name)
        system, count = (name, 1) if match is None or name in list_datasheets() else (match[1], int(match[2]))
        return read_datasheet(check_choice("name, of no flops and memory,", system, list_datasheets())), count
    if not isinstance(flops, Mapping) or not flops or not isinstance(memory, tuple | list) or len(memory) != 2:
        given = f"flops is {show(flops)} and memory is {show(memory)}"
        raise ValueError(f"{given}; give both, such as flops={{'bf16': 4e14}} and memory=(96e9, 3e12)")
    formats = [check_choice("flops", dtype, DTYPES) for dtype in flops]
    peaks = {d: Quantity(check_positive(f"flops[{d!r}]", flops[d]), "FLOP/s", "datasheet", _GIVEN) for d in formats}
    size, rate = (check_positive(f"memory[{i}]", value) for i, value in enumerate(memory))
    level = MemoryLevel("DRAM", Quantity(size, "B", "datasheet", _GIVEN), Quantity(rate, "B/s", "datasheet", _GIVEN))
    return Datasheet(name, Device(name, "cuda", peaks, (level,)), {}), 1


def _share_slot(fits: Mapping[str, Fit]) -> dict[str, Fit]:
    """Products in fp32, for which a card without a plug has no power at its full clock; convolutions need less."""
    source, products = "slower than its peak by power, as T4 and P4 (sitar-lab/NeuSight)", dict[str, Fit]()
    for kind in ("gemm", "bmm"):
        slow, spread = {**fits[kind], "compute_efficiency": SLOT_SHARE}, max(fits[kind].spread, SLOT_SPREAD)
        products[f"{kind}.fp32"] = replace(fits[kind], parameters=slow, spread=spread, source=source, dtypes=("fp32",))
    return {**products, "convolution.fp32": fits.get("convolution", fits["gemm"])}


def resize_nodes(platform: P, nodes: int, local: int) -> P:
    """Give nodes another number of ranks; of the collectives those stay that hold there: on rails, and inside both."""
    kept, before = {}, platform.network.ranks_per_node
    for key, fit in platform.collectives.items():
        _, ranks, algorithm, _ = Key.parse(key)
        if algorithm == "rail" or (ranks is not None and ranks <= min(local, before)):
            kept[key] = fit
        elif ranks is None and (high := fit.ranges.get("ranks", (2.0, 2.0))[1]) <= before:
            kept[key] = replace(fit, ranges={**fit.ranges, "ranks": (2.0, float(local if local < before else high))})
    network = replace(platform.network, ranks_per_node=local, nodes=nodes)
    return replace(platform, network=network, collectives=kept)


def with_nodes(platform: P, nodes: int, *, ranks_per_node: int | None = None) -> P:
    """Take more or fewer nodes of the same kind.

    Parameters
    ----------
    platform : Platform
        The platform.
    nodes : int
        Nodes [-].
    ranks_per_node : int, optional
        Ranks of a node; as before if not given. Collectives of more ranks than both nodes hold are left out [-].

    Returns
    -------
    variant : Platform
        The platform with this number of nodes; its collectives between nodes are composed, see `Platform.collective`.
        Unknown links between nodes are the network adapters of the device's datasheet.

    Raises
    ------
    ValueError
        For several nodes without links between them, not even in a datasheet.

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> cluster = load_platform("h100-sxm-8").with_nodes(4)
    >>> cluster.network.ranks, cluster.network.links["inter"].bandwidth.value
    (32, 50000000000.0)
    """
    nodes, before = check_positive("nodes", nodes, integer=True), platform.network.nodes
    if ranks_per_node not in (None, platform.network.ranks_per_node):
        local = check_positive("ranks_per_node", ranks_per_node, integer=True)
        name = re.sub(rf"-\d+?(x{before})?$", f"-{local}", platform.name)
        platform, before = derive(resize_nodes(platform, 1, local), name, f"{local} ranks a node"), 1
    links, change, suffix = platform.network.links, f"{nodes} nodes instead of {before}", ""
    known = "inter" in links or any(Key.parse(key).algorithm == "rail" for key in platform.collectives)
    if nodes > 1 and not known:
        links = {**links, "inter": _find_adapter(platform)}
        change += ", linked by the network adapters of the datasheet"
        suffix = " by datasheet"  # a platform of the gallery with this name may know its links better
    gallery = re.fullmatch(rf"([^\s,]*-\d+?)(?:x{before})?", platform.name)
    stem = gallery[1] if gallery else platform.name.removesuffix(f", {before} nodes")
    count = "" if nodes == 1 else f"x{nodes}" if gallery else f", {nodes} nodes"
    return derive(platform, stem + count + suffix, change, network=replace(platform.network, nodes=nodes, links=links))


def with_datasheet(platform: P, other: "P | Datasheet | Device | str") -> P:
    """Take another device: keep the fitted shares of a datasheet's numbers, and swap those numbers.

    Parameters
    ----------
    platform : Platform
        The platform.
    other : Platform, Datasheet, Device or str
        Whose peaks, memories and links to take; a name is one of `readers.datasheets.list_datasheets`, a platform
        of the gallery or a file.

    Returns
    -------
    variant : Platform
        Launch times, efficiencies and sharpness as here; time per byte of collectives in inverse proportion to the
        bandwidth of the link, start-ups as here; the layout of the network as here. All of it is ``assumed``, warns
        that it was transferred, and has a wider interval.

    Raises
    ------
    ValueError
        For a device of another kind, and for kernels that are not fitted as shares of a datasheet's numbers.

    Notes
    -----
    The extra spread was chosen on A100 and H100, each priced with the other's datasheet. Judged on other GPUs, large
    bf16 GEMMs have mean errors of 8.5 to 23 % and collectives of 6 to 28 % (docs/formulas.md, section 2).

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> load_platform("h100-sxm-8").with_datasheet("h200-sxm").device.memory[-1].name
    'HBM3e'
    """
    name, device, links = _resolve(platform, other)
    if device.kind != platform.device.kind:
        kinds = f"{name} is {device.kind}, {platform.name} is {platform.device.kind}"
        raise ValueError(f"{kinds}; fits do not carry over between kinds")
    bound = [key for key, fit in platform.kernels.items() if fit.form == "additive" and key != "transfer"]
    if bound:  # transfers depend on the host
        held = f"platform {platform.name!r} holds seconds per byte for {bound[0]}, not shares of a datasheet's numbers"
        raise ValueError(f"{held}; calibrate on the other device instead")
    change = f"datasheet of {name} instead of {platform.device.name}"
    ours, local = platform.network.links, platform.network.ranks_per_node
    note, lacking = f"{platform.name}: {change}", DTYPES.keys() - device.peaks.keys()
    carry = partial(carry_fit, note=note, spread=DEVICE_SPREAD)
    collectives = {}
    for key, fit in platform.collectives.items():
        old, new = (known.get(find_link(key, local)) for known in (ours, links))
        ratio = old.bandwidth.value / new.bandwidth.value if old and new else 1.0
        collectives[key] = carry_fit(fit, note, SAME_LINK_SPREAD)
        if ratio != 1:
            carried = carry_fit(fit, f"{note}, time per byte x {ratio:.3g}", START_SPREAD, {"beta": ratio})
            collectives[key] = replace(carried, spread_time=SPREAD_AT * _start(key, fit, local))
    return derive(
        platform, f"{name} from {platform.name}", change, device=device, collectives=collectives,
        kernels={key: carry(fit) for key, fit in platform.kernels.items() if Key.parse(key).variant not in lacking},
        context=replace(platform.context, caches=None).map(carry),
        network=replace(platform.network, links={**ours, **links}),
    )  # fmt: skip


def with_link(platform: P, name: str, *, bandwidth: float | None = None, latency: float | None = None) -> P:
    """Take a faster or slower link, or add the one between nodes.

    Parameters
    ----------
    platform : Platform
        The platform.
    name : str
        ``intra`` within a node, ``inter`` between nodes [-].
    bandwidth : float, optional
        One way, per rank; as before if not given [B/s].
    latency : float, optional
        Time of one hop with a vanishing message; as before if not given [s].

    Returns
    -------
    variant : Platform
        Collectives over that link have a time per byte in inverse proportion to its bandwidth, and start-ups that
        change by the latency times the steps of a ring. Three tenths of the logarithm of either change are added to
        their spread.

    Raises
    ------
    ValueError
        For an unknown link, nothing to change, or a new link that is not described in full.

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> node = load_platform("h100-sxm-8")
    >>> slow = node.with_link("intra", bandwidth=225e9)
    >>> round(slow.collectives["all_gather.8"]["beta"] / node.collectives["all_gather.8"]["beta"], 6)
    2.0
    """
    check_choice("name", name, ("intra", "inter"))
    given = (("bandwidth", bandwidth, "B/s"), ("latency", latency, "s"))
    new = {k: Quantity(check_positive(k, x), unit, "assumed", "what if") for k, x, unit in given if x is not None}
    old, local = platform.network.links.get(name), platform.network.ranks_per_node
    fitted = [key for key in platform.collectives if find_link(key, local) == name]
    if old is None and fitted:
        raise ValueError(f"platform {platform.name!r} does not know the {name} link that {fitted[0]} was fitted on")
    if not new or (old is None and len(new) < 2):
        need = f"both, platform {platform.name!r} has no {name} link yet" if old is None else "one of them"
        raise ValueError(f"bandwidth [B/s, one way, per rank] and latency [s per hop] are missing; give {need}")
    link = replace(old, **new) if old else Link(new["bandwidth"], new["latency"])
    shown = [format_time(q.value) if q.unit == "s" else format_rate(q.value, q.unit) for q in new.values()]
    change = f"{name} link of {' and '.join(shown)}"
    note = f"{platform.name}: {change}"
    scaled = {key: _follow(key, platform.collectives[key], old, link, local, note) for key in fitted if old}
    network = replace(platform.network, links={**platform.network.links, name: link})
    fits = {**platform.collectives, **scaled}
    return derive(platform, f"{platform.name}, {change}", change, network=network, collectives=fits)


def derive(platform: P, name: str, change: str, **parts: Any) -> P:
    """Put in what changes, and write down where the platform comes from."""
    past = platform.provenance
    changes = "; ".join(filter(None, (past.get("changes"), change)))
    story = {**past, "derived_from": past.get("derived_from", platform.name), "changes": changes}
    return replace(platform, name=name, provenance=story, **parts)


def _find_adapter(platform: Any) -> Link:
    """Link between nodes in the datasheet of the device."""
    for sheet in map(read_datasheet, list_datasheets()):
        if sheet.device.name == platform.device.name and "NIC" in sheet.links:
            return Link(sheet.links["NIC"], HOP, "adapters of the datasheet")
    such = ".with_link('inter', bandwidth=50e9, latency=1e-6) for 400 Gb/s per rank"
    raise ValueError(f"platform {platform.name!r} knows nothing between nodes; add a link first, such as {such}")


def _resolve(platform: Any, other: Any) -> tuple[str, Device, dict[str, Link]]:
    """Name, device and links of the given platform, datasheet or device."""
    check_type("other", other, type(platform) | Datasheet | Device | str | Path)
    if isinstance(other, str) and other in list_datasheets():
        other = read_datasheet(other)
    elif isinstance(other, str | Path):
        try:
            other = type(platform).load(find_file(other))
        except PlatformError as error:
            raise PlatformError(f"{error}; datasheets are {', '.join(list_datasheets())}") from None
    if isinstance(other, Device):
        return other.name, other, {}
    if not isinstance(other, Datasheet):
        return other.name, other.device, dict(other.network.links)
    rates = {"intra": other.wire, "inter": other.links.get("NIC")}
    ours = platform.network.links.items()
    return other.system, other.device, {k: replace(x, bandwidth=rates[k]) for k, x in ours if rates[k]}


def find_link(key: str, ranks_per_node: int) -> str:
    """Link that decides on a collective: between nodes, that is the one between them."""
    _, ranks, algorithm, _ = Key.parse(key)
    return "inter" if algorithm == "rail" or (ranks or 0) > ranks_per_node else "intra"


def _start(key: str, fit: Fit, ranks_per_node: int) -> float:
    """Start-up time of a collective fit, above zero [s]."""
    operation, ranks, *_ = Key.parse(key)
    return max(float(evaluate_collective(fit, 0.0, operation, ranks or ranks_per_node)), 1e-9)


def carry_fit(fit: Fit, note: str, spread: float, factors: Mapping[str, float] | None = None) -> Fit:
    """Carry a fit over: scaled parameters, a wider spread, and a note that says so."""
    scale = {name: next((f for stem, f in (factors or {}).items() if name.startswith(stem)), 1.0) for name in fit}
    return replace(
        fit, kind="assumed", spread=math.hypot(fit.spread, spread), transferred=(note, *fit.transferred),
        parameters={name: value * scale[name] for name, value in fit.items()},
        stderr={name: error * scale[name] for name, error in fit.stderr.items()},
    )  # fmt: skip


def _follow(key: str, fit: Fit, old: Link, new: Link, ranks_per_node: int, note: str) -> Fit:
    """Let a collective fit follow its link: time per byte with bandwidth, start-up with the steps that pay latency."""
    ratio, change = old.bandwidth.value / new.bandwidth.value, new.latency.value - old.latency.value
    least = min(new.latency.value / max(old.latency.value, 1e-12), 1.0)  # as if all of the start-up were hops
    operation, ranks, *_ = Key.parse(key)
    law = fit.form == "over_ranks"
    steps = 1.0 if law else float(ring_steps(operation, ranks or ranks_per_node))
    moved = [name for name in fit if name == "alpha1" or (name.startswith("alpha") and not law)]
    starts = {name: max(fit[name] + steps * change, least * fit[name]) for name in moved}
    carried = carry_fit(replace(fit, parameters={**fit, **starts}), note, 0.0, {"beta": ratio})
    growth = _start(key, carried, ranks_per_node) / _start(key, fit, ranks_per_node)
    spreads = (fit.spread, SCALE_SPREAD * math.log(ratio), SCALE_SPREAD * math.log(growth))
    return replace(carried, spread=math.hypot(*spreads))
