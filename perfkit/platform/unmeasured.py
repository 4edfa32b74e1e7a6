"""Platforms of devices that were not measured: numbers of a datasheet, with the efficiencies of
measured devices."""

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from perfkit.fitting import KernelModel, Roofline
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import DTYPES, Device, Link, MemoryLevel, Network, Quantity, check_base
from perfkit.ground.units import check_choice, check_positive, check_type, show
from perfkit.models.collectives import COLLECTIVES
from perfkit.platform.datasheets import Datasheet, list_datasheets, read_datasheet
from perfkit.platform.levels import find_generation, read_levels
from perfkit.platform.lookup_kernels import make_lookup_kernels
from perfkit.platform.machine import Context, Machine
from perfkit.platform.whatif import rescale_fit, with_link

P = TypeVar("P", bound=Machine)  # a platform
_GIVEN = "stated by the caller of Platform.from_datasheet"
#: Spread of products whose rate was measured on such a device, or is assumed [-]; docs/formulas.md,
#: table 2.4.
RATE_SPREADS = {"measured": 0.17, "assumed": 0.36}
#: Exponent of a smooth maximum that is within 0.07 % of the larger of two times [-].
SHARPEST = 1e3


def put_on_datasheet(
    typical: P,
    name: str,
    *,
    flops: Mapping[str, float] | None = None,
    memory: tuple[float, float] | None = None,
    link: float | None = None,
    ranks: int | None = None,
    efficiency: float | None = None,
) -> P:
    """One node of a device that was not measured, see `Platform.from_datasheet`; `typical` has the
    efficiencies of measured devices."""
    if efficiency is not None:
        check_positive("efficiency", efficiency, maximum=1.0)
    sheet, count = _read_sheet(name, flops, memory)
    count = check_positive("ranks", count if ranks is None else ranks, integer=True)
    link_bandwidth = sheet.link_bandwidth
    if link is not None:
        link_bandwidth = Quantity(
            check_base("link", link, "B/s"), "B/s", "datasheet", _GIVEN, basis="one way per rank"
        )
    if count > 1 and not link_bandwidth:
        raise ValueError(
            f"link is missing; give its bandwidth for {count} ranks, one way per rank [B/s]"
        )
    kind = next((kind for kind, rate in sheet.links.items() if rate == link_bandwidth), "")
    links = (
        {"intra": Link(link_bandwidth, typical.network.links["intra"].latency, kind)}
        if link_bandwidth
        else {}
    )
    lacking, name = (
        DTYPES.keys() - sheet.device.peaks.keys(),
        f"{sheet.system}-{count}" if flops is None else name,
    )
    fits = {
        key: fit for key, fit in typical.kernels.items() if Key.parse(key).variant not in lacking
    }
    if efficiency is None:
        fits |= _set_products(fits, sheet)
    platform = replace(
        typical,
        name=name,
        device=sheet.device,
        network=Network(count, links=links),
        kernels={key: rescale_fit(fit, typical.name, 0.0) for key, fit in fits.items()},
        collectives=with_link(typical, "intra", bandwidth=link_bandwidth.value).collectives
        if link_bandwidth
        else {},
    )
    if efficiency is None:
        platform = _add_lookup_kernels(platform, sheet)
        levels = read_levels(find_generation(sheet.system))
        return replace(platform, context=replace(platform.context, stacks=levels))
    return _simplify(platform, efficiency)


def _add_lookup_kernels(platform: P, sheet: Datasheet) -> P:
    """Add kernels that wait for rows of tables, where it is known how many wait at once."""
    if sheet.multiprocessors is None:
        return platform
    capability = sheet.device.capability
    fits = make_lookup_kernels(
        platform.kernels,
        sheet.multiprocessors.value,
        None if capability is None else capability.value,
    )
    return replace(platform, kernels={**platform.kernels, **fits})


def _simplify(platform: P, efficiency: float) -> P:
    """The platform as the simplest roofline there is.

    A kernel takes the longer of FLOP over peak and bytes over bandwidth, a collective start-ups and
    bytes over the link, where all rates are reached to the same share. Nothing else takes time, but
    copies that the host waits for.
    """
    source = f"efficiency={efficiency:g} of Platform.from_datasheet"
    roofline = Roofline.build(
        {
            "launch": 0.0,
            "compute_efficiency": efficiency,
            "memory_efficiency": efficiency,
            "sharpness": SHARPEST,
        },
        spread=platform.kernels["gemm"].spread,
        kind="assumed",
        source=source,
        dtypes=tuple(DTYPES),
    )
    kinds = {Key.parse(key).operation for key in platform.kernels} | {"convolution", "pooling"}
    kernels: dict[str, KernelModel] = dict.fromkeys(sorted(kinds - {"transfer"}), roofline)
    kernels["transfer"] = platform.kernels["transfer"]
    collectives = {}
    for key, law in platform.collectives.items():
        link = platform.network.links["intra"]
        reached = efficiency * link.bandwidth.value
        collective = COLLECTIVES[Key.parse(key).operation]
        time_of_a_byte = collective.rounds / reached
        values = {
            "alpha0": 0.0,
            "alpha1": link.latency.value,
            # a rank sends the whole message, or all of it but the part of one rank
            "beta0": 0.0 if collective.in_shares else time_of_a_byte,
            "beta1": time_of_a_byte if collective.in_shares else 0.0,
            "sharpness": 1.0,
        }
        collectives[key] = law.with_values(values, source=source)
    host = {
        name: replace(overhead, value=0.0, stderr=None, source=source)
        for name, overhead in platform.host.items()
    }
    return replace(
        platform,
        # without its generation, products whose rows are not aligned take no longer
        device=replace(platform.device, capability=None),
        kernels=kernels,
        collectives=collectives,
        host=host,
        context=Context(),
    )


def _read_sheet(name: str, flops: Mapping[str, float] | None, memory: Any) -> tuple[Datasheet, int]:
    """Datasheet from the table, or from the numbers of the caller, and the ranks in its name."""
    check_type("name", name, str)
    if flops is None and memory is None:
        match = re.fullmatch(r"(.+)-([1-9][0-9]{0,3})", name)
        system, count = (
            (name, 1) if match is None or name in list_datasheets() else (match[1], int(match[2]))
        )
        return read_datasheet(
            check_choice("name, of no flops and memory,", system, list_datasheets())
        ), count
    if (
        not isinstance(flops, Mapping)
        or not flops
        or not isinstance(memory, tuple | list)
        or len(memory) != 2
    ):
        given = f"flops is {show(flops)} and memory is {show(memory)}"
        raise ValueError(
            f"{given}; give rates by format and two numbers: flops={{'bf16': 4e14}}, memory=(96e9, 3e12)"
        )
    rates = {
        check_choice("flops", d, DTYPES): check_base(f"flops[{d!r}]", flops[d], "FLOP/s")
        for d in flops
    }
    peaks = {d: Quantity(rate, "FLOP/s", "datasheet", _GIVEN) for d, rate in rates.items()}
    size = Quantity(check_base("memory[0]", memory[0], "B"), "B", "datasheet", _GIVEN)
    rate = Quantity(check_base("memory[1]", memory[1], "B/s"), "B/s", "datasheet", _GIVEN)
    level = MemoryLevel("DRAM", size, rate)
    return Datasheet(name, Device(name, "cuda", peaks, (level,)), {}), 1


def _set_products(fits: Mapping[str, KernelModel], sheet: Datasheet) -> dict[str, KernelModel]:
    """Products at the rates that a datasheet's rows give, at most at the peak; convolutions in fp32
    keep the usual."""
    found = (
        {"convolution.fp32": fits.get("convolution", fits["gemm"])}
        if "fp32" in sheet.products
        else {}
    )
    for kind, (dtype, rate) in product(("gemm", "bmm"), sheet.products.items()):
        usual, key = fits[kind], Key(kind, variant="" if dtype in ("bf16", "fp16") else dtype)
        share = min(rate.value / sheet.device.peaks[dtype].value, 1.0)
        spread = max(RATE_SPREADS[rate.kind], usual.spread if kind == "bmm" else 0.0)
        found[str(key)] = usual.with_values(
            {"compute_efficiency": share}, spread=spread, source=rate.source, dtypes=(dtype,)
        )
    return found
