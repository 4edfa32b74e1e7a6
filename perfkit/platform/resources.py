"""What if: a platform whose processor, memory, links or host are faster or slower.

Each is a method of `Platform`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from perfkit.fitting import Fit
from perfkit.ground.hardware import Quantity
from perfkit.ground.units import check_choice, check_positive
from perfkit.models.kernels import TERMS
from perfkit.platform.whatif import SCALE_SPREAD, P, carry_fit, derive, find_link

#: Resources of a platform.
RESOURCES = ("peak", "memory", "cache", "intra", "inter", "latency", "host")
#: Which of them decides on a fitted time, by how its name begins: of forms that state all seconds, and of others.
_STARTS = dict.fromkeys(("launch", "alpha", "per_collective", "per_resume"), "latency") | {"page_walks": "memory"}
_TERMS = {**dict.fromkeys(TERMS, "peak"), **_STARTS, "beyond_l3": "memory"}


def with_host(platform: P, scale: float) -> P:
    """Take a faster or slower host.

    Parameters
    ----------
    platform : Platform
        The platform.
    scale : float
        Factor on all host overheads: 0.5 for a host twice as fast, 0 for one that is never waited for, as with
        replayed graphs [-].

    Returns
    -------
    variant : Platform
        The platform with those overheads.

    Raises
    ------
    ValueError
        Where the platform knows no host overheads.

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> load_platform("h100-sxm-8").with_host(0).host["launch"].value
    0.0
    """
    scale = check_positive("scale", scale, zero=True)
    change, known = f"host overheads x {scale:g}", platform.host
    overheads = {name: replace(q, value=scale * q.value, stderr=None) for name, q in known.items()}
    host = {name: replace(q, kind="assumed", source=f"{change}; {q.source}") for name, q in overheads.items()}
    carry = partial(carry_fit, note=f"{platform.name}: {change}", spread=0.0, factors={"per_operation": scale})
    context = platform.context.map(lambda fit: carry(fit) if "per_operation" in fit else fit)
    if not host and context == platform.context:
        raise ValueError(f"platform {platform.name!r} knows no host overheads; calibrate it first")
    return derive(platform, f"{platform.name}, {change}", change, host=host, context=context)


def list_resources(platform: Any) -> list[str]:
    """Those of `RESOURCES` that a platform knows."""
    known = platform.host or any("per_operation" in fit for fit in platform.context.fits().values())
    lacking = {"intra", "inter", "host"} - {*platform.network.links, "host" * bool(known)}
    return [name for name in RESOURCES if name not in lacking]


def with_scale(platform: P, **scales: float) -> P:
    """Take faster or slower resources.

    Parameters
    ----------
    platform : Platform
        The platform.
    **scales : float
        How many times as fast [-]: ``peak``, the rates of the processor and its caches; ``memory``, the bandwidth of
        the main memory; ``intra`` and ``inter``, that of links inside and between nodes; ``latency``, the start-ups of
        kernels and collectives; ``host``, its overheads; or ``cache``, how many times as large the caches are.

    Returns
    -------
    variant : Platform
        Fitted shares of peaks and bandwidths are kept; times per byte, per operation and per start follow. Three tenths
        of the logarithm of each change are added to the spread of what it changes, as in `with_link`. Transfers to and
        from the host stay as they are.

    Raises
    ------
    ValueError
        For a resource that the platform does not know, or a factor that is not above 0.

    Examples
    --------
    >>> from perfkit.platform.gallery import load_platform
    >>> load_platform("h100-sxm-8").with_scale(memory=1.2, peak=2).device.main_bandwidth / 1e12
    4.02
    """
    known, local = list_resources(platform), platform.network.ranks_per_node
    at = {check_choice("resource", name, known): check_positive(name, scale) for name, scale in scales.items()}
    change = ", ".join(f"{name} x {scale:g}" for name, scale in at.items())
    follow = partial(_follow, at=at, note=f"{platform.name}: {change}")
    timed = ("peak", "memory", "cache", "latency")
    kernels = {key: follow(fit, _TERMS if fit.form == "additive" else _STARTS, timed) if key != "transfer" else fit
               for key, fit in platform.kernels.items()}  # fmt: skip
    over = {key: find_link(key, local) for key in platform.collectives}
    collectives = {key: follow(fit, {**_STARTS, "beta": over[key]}, (over[key], "latency"))
                   for key, fit in platform.collectives.items()}  # fmt: skip
    context = platform.context.map(lambda fit: follow(fit, _STARTS, timed))
    if caches := context.caches:
        sizes = {name: caches[name] * at.get("cache", 1.0) for name in ("l2", "l3")}
        context = replace(context, caches=replace(caches, parameters={**caches, **sizes}))
    device, links, starts = platform.device, platform.network.links, platform.network.starts
    starts = (starts or 1.0) / at["latency"] if "latency" in at else starts
    *near, main = device.memory
    levels = [replace(x, capacity=_scale(x.capacity, at, "cache"), bandwidth=_scale(x.bandwidth, at, "peak"))
              for x in near]  # fmt: skip
    levels.append(replace(main, bandwidth=_scale(main.bandwidth, at, "memory")))
    peaks = {dtype: _scale(peak, at, "peak") for dtype, peak in device.peaks.items()}
    links = {name: replace(x, bandwidth=_scale(x.bandwidth, at, name), latency=_scale(x.latency, at, "latency", -1))
             for name, x in links.items()}  # fmt: skip
    scaled = derive(
        platform, f"{platform.name}, {change}" if at else platform.name, change, kernels=kernels, context=context,
        collectives=collectives, device=replace(device, peaks=peaks, memory=tuple(levels)),
        network=replace(platform.network, links=links, starts=starts),
    )  # fmt: skip
    return replace(with_host(scaled, 1 / at["host"]), name=scaled.name) if "host" in at else scaled


def _follow(fit: Fit, names: Mapping[str, str], touched: tuple[str, ...], at: Mapping[str, float], note: str) -> Fit:
    """A fit whose parameters follow what decides on them, and whose spread all that it is touched by."""
    changes = [math.log(at.get(name, 1.0)) for name in touched]
    factors = {name: 1 / at.get(resource, 1.0) for name, resource in names.items()}
    moved = carry_fit(fit, note, SCALE_SPREAD * math.hypot(*changes), factors)
    return replace(moved, kind=fit.kind) if any(changes) else fit


def _scale(quantity: Quantity | None, at: Mapping[str, float], name: str, power: int = 1) -> Any:
    """A number of a datasheet or link that follows its resource."""
    if quantity is None or name not in at:
        return quantity
    source = f"{name} x {at[name]:g}; {quantity.source}"
    return replace(quantity, value=quantity.value * at[name] ** power, kind="assumed", source=source)
