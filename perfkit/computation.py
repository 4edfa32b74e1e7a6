"""What kernels cost on a device: the fit of a class, the peak and the memory level that apply, and where rows lie."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from perfkit.estimates import FORMS, TRANSFERRED, Estimate, fill_in, find_extrapolations, find_transfers
from perfkit.fitting import Fit
from perfkit.hardware import DTYPES, Device
from perfkit.models import embedding
from perfkit.models.caches import lru_misses, miss_share, page_walks, unique_rows
from perfkit.units import Array, Values, check_choice, check_type, format_rate, show

__all__ = ["UNMEASURED", "estimate_kernels", "find_kernel", "find_stand_in", "price_kernels", "size_lookups"]

_PRODUCTS, _HALF = ("gemm", "bmm", "attention"), {"bf16", "fp16"}
#: What a fit of products leaves open in a number format it was not fitted in. In fp8 and fp4 one of bf16 is too fast by
#: a factor of 2.1 to 2.6 (35,742 shapes each of H100, H200, B200 and GB200, aiconfigurator-core 0.12.0; root mean
#: square of the logarithm 0.93 to 1.13); in others as much as where no product was measured at all.
NARROW_DOUBT, FORMAT_DOUBT = 1.0, 0.25
#: What the note of a fit says that stands in for a class, after the name of the class.
UNMEASURED = " was not measured: taken at "
#: Which class stands in for one that was not measured, the shares of its rate reached on a core and on a GPU, and what
#: that leaves open (standard deviation of the logarithm). A convolution as a product of places by channels by window:
#: those of a ResNet-50 (batch 32, fp32) on a V100 take 0.99 of what the fit to a DLRM's products says, single ones 0.37
#: off (kernels of the trace resnet50_num_workers_0 of pytorch/kineto, BSD-3). On an AMD Zen 3 (zen3-2, measured after
#: the shares were set) 134 random ones of at least 2 MFLOP come out at 0.92 to 1.31 of their times by class, single
#: ones 0.3 to 0.5 off; small groups at 0.6 to 1.0; channels that stand alone are too slow, 2 times backward and 12
#: times forward. The poolings of that ResNet move their bytes at 0.9 (forward) and 0.35 (backward) of the rate of
#: element-wise kernels; those of the Zen 3 come out at 0.45 to 1.0, the backward of maxima 6 times too slow.
_STAND_INS = {"convolution": ("gemm", 0.8, 1.0, 0.4), "pooling": ("elementwise", 0.05, 0.6, 0.8)}
#: What a class leaves open for functions that were not measured: square roots and powers are slower than sums.
_FUNCTION_DOUBT = 0.5


def find_kernel(
    kernels: Mapping[str, Fit], kind: str, *, variant: str = "", dtype: str = "fp32"
) -> tuple[str, Fit] | None:
    """Find the fit of a class: that of its variant, else of its number format, else of the whole class.

    Parameters
    ----------
    kernels : mapping of str to Fit
        Fits by ``<kind>.<variant>``, ``<kind>.<dtype>`` or ``<kind>`` [-].
    kind : str
        Operation class, such as ``gemm`` [-].
    variant : str, optional
        Finer class, such as ``nt`` [-].
    dtype : str, optional
        Number format [-].

    Returns
    -------
    found : (str, Fit) or None
        Key and fit, with a wider spread where it is of products in another number format; None where the class has no
        model [-].
    """
    check_type("kind", kind, str)
    check_choice("dtype", dtype, DTYPES)
    keys = ((f"{kind}.{variant}",) if variant else ()) + (f"{kind}.{dtype}", kind)
    found = next(((key, kernels[key]) for key in keys if key in kernels), None)
    if found is None or found[0] != kind or kind not in _PRODUCTS:
        return found
    return kind, _doubt_format(found[1], dtype)


def find_stand_in(kernels: Mapping[str, Fit], kind: str, *, variant: str = "", dtype: str = "fp32") -> Fit | None:
    """Find what prices a class that was not measured: the middle of its other variants, or another class.

    Parameters
    ----------
    kernels : mapping of str to Fit
        Fits by ``<kind>.<variant>``, ``<kind>.<dtype>`` or ``<kind>`` [-].
    kind : str
        Operation class [-].
    variant : str, optional
        Finer class [-].
    dtype : str, optional
        Number format [-].

    Returns
    -------
    fit : Fit or None
        With a wide spread and a note that says what it stands for; None where nothing is near [-].
    """
    found = find_kernel(kernels, kind, variant=variant, dtype=dtype)
    if found is not None:
        return found[1]
    others = [fit for key, fit in kernels.items() if key.partition(".")[0] == kind and fit.form == "additive"]
    if others and not kind.startswith(("embedding", "attention")):
        names = dict.fromkeys(name for fit in others for name in fit)
        middles = np.median([[fit.get(name, 0.0) for name in names] for fit in others], axis=0)
        middle = {name: float(value) for name, value in zip(names, middles, strict=True)}
        units, note = {name: "s" for name in names}, f"{kind}.{variant}{UNMEASURED}the middle of {len(others)}"
        spread = math.hypot(_FUNCTION_DOUBT, float(np.median([fit.spread for fit in others])))
        return replace(
            others[0], parameters=middle, units=units, stderr={}, ranges={}, at_bounds=(), spread=spread,
            spread_time=None, kind="assumed", notes=(f"{note} variants that were",),
        )  # fmt: skip
    if kind not in _STAND_INS:
        return None
    other, *shares, doubt = _STAND_INS[kind]
    fit = find_stand_in(kernels, other, variant="nn", dtype=dtype)
    if fit is None:
        return None
    slower, share = fit.form == "additive", shares[fit.form != "additive"]
    rates = set(fit) if slower else {"compute_efficiency", "memory_efficiency"} & set(fit)
    scaled = {name: value / share if slower else value * share for name, value in fit.items() if name in rates}
    doubt *= 2.0 if variant.endswith(("_depthwise", "_grouped")) else 1.0
    return replace(
        fit, parameters={**fit.parameters, **scaled}, spread=math.hypot(doubt, fit.spread), spread_time=None,
        kind="assumed", notes=(f"{kind}{UNMEASURED}{share:g} of the rate of {other}", *fit.notes),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _find_formats(source: str) -> frozenset[str]:
    """Number formats that a data id names; both of half precision run alike."""
    named = set(re.findall(rf"\b({'|'.join(DTYPES)})\b", source))
    return frozenset(named | _HALF if named & _HALF else named)


def _doubt_format(fit: Fit, dtype: str) -> Fit:
    """Widen a fit for a number format that its data id does not name, where it names any."""
    formats = _find_formats(fit.source)
    if not formats or dtype in formats:
        return fit
    narrow, names = DTYPES[dtype] < 2, "/".join(sorted(formats))
    note = f"fitted in {names}; {dtype} is taken to reach the same share of its peak"
    if narrow:
        note = f"{TRANSFERRED}{names}: no product in {dtype} was measured here; fp8 on other GPUs takes twice as long"
    spread = math.hypot(fit.spread, NARROW_DOUBT if narrow else FORMAT_DOUBT)
    return replace(fit, kind="assumed", spread=spread, spread_time=None, notes=(note, *fit.notes))


def price_kernels(
    fit: Fit, device: Device, features: Mapping[str, Values], *, dtype: str, capacities: tuple[float, float]
) -> Array:
    """Price kernels of one class, alone on the device, for arrays of sizes.

    Parameters
    ----------
    fit : Fit
        Model of the class [-].
    device : Device
        Where they run [-].
    features : mapping of str to float or array
        Sizes by name, see `perfkit.platform.Platform.kernel_time` [-].
    dtype : str
        Number format whose peak applies [-].
    capacities : (float, float)
        Bytes that the last two caches before the main memory hold [B].

    Returns
    -------
    time : array
        One time per element of the features [s].

    Raises
    ------
    ValueError
        For a dtype without a peak.
    """
    check_choice("dtype", dtype, device.peaks)
    ready = fit.form == "additive" and "beyond_l3" in features  # needs nothing of the device
    return np.asarray(FORMS[fit.form](features if ready else _on_device(features, device, dtype, capacities), **fit))


def estimate_kernels(
    fit: Fit,
    device: Device,
    features: Mapping[str, Values],
    *,
    dtype: str,
    capacities: tuple[float, float],
    title: str,
    place: str,
) -> Estimate:
    """Estimate kernels of one class, one after the other, and say which resource they are up against.

    Parameters
    ----------
    fit : Fit
        Model of the class [-].
    device : Device
        Where they run [-].
    features : mapping of str to float or array
        Sizes by name, see `perfkit.platform.Platform.kernel_time` [-].
    dtype : str
        Number format whose peak applies [-].
    capacities : (float, float)
        Bytes that the last two caches before the main memory hold [B].
    title, place : str
        What is estimated, and on which platform, in words [-].

    Returns
    -------
    estimate : Estimate
        Predicted time with interval and parts; its warnings are not raised yet [s].

    Raises
    ------
    ValueError
        For a dtype without a peak.
    """
    times = np.atleast_1d(price_kernels(fit, device, features, dtype=dtype, capacities=capacities))
    sizes, time = _on_device(features, device, dtype, capacities), float(times.sum())
    compute, memory = sizes["flops"] / sizes["peak"], sizes["nbytes"] / sizes["bandwidth"]
    name = "arithmetic" if np.sum(compute) > np.sum(memory) else "memory traffic"
    launch = min(times.size * fit.get("launch", 0.0), time)
    bound = min(float(np.maximum(compute, memory).sum()), time - launch)
    terms = {"launch": launch, f"{name} at the full rate": bound, "below that rate": time - launch - bound}
    peak, bandwidth = float(np.max(sizes["peak"])), float(np.max(sizes["bandwidth"]))
    rates = f"peak {format_rate(peak, 'FLOP/s')}, memory {format_rate(bandwidth, 'B/s')}"
    formula = f"{title} on {place}: {fill_in(fit)}; {rates}"
    spread = float(fit.spread_at(times) @ times) / time if time else fit.spread
    return Estimate(
        time, spread, terms, formula, find_extrapolations(title, fit, features) + find_transfers(title.split()[0], fit)
    )


def size_lookups(
    tables: Sequence[Any], batch: int, device: Device, *, capacities: tuple[float, float], entries: float
) -> dict[str, Values]:
    """Sizes of the forward lookups of embedding tables as the kernel forms take them.

    Parameters
    ----------
    tables : sequence of Table
        Tables with ``rows``, ``dim``, ``pooling``, ``distribution`` and ``itemsize`` [-].
    batch : int
        Samples [-].
    device : Device
        Where they run [-].
    capacities : (float, float)
        Bytes that the last two caches before the main memory hold [B].
    entries : float
        Pages that the translation buffer effectively holds [-].

    Returns
    -------
    sizes : dict of str to array
        Traffic by the level it comes from [B], page walks and lookups [-], one element per table.

    Raises
    ------
    ValueError
        For no table.
    """
    if not isinstance(tables, Collection) or not tables or not all(hasattr(t, "distribution") for t in tables):
        raise ValueError(f"tables is {show(tables)}; pass at least one embedding table")
    granularity = 32.0 if device.kind == "cuda" else 64.0  # sectors of a GPU, cache lines of a CPU
    columns = [(t.rows, t.dim, batch, batch * t.pooling, t.itemsize) for t in tables]
    rows, dim, bags, lookups, itemsize = np.array(columns, dtype=float).T
    distributions = [table.distribution for table in tables]
    row = embedding.row_traffic(dim, itemsize, granularity)
    unique = np.array([float(unique_rows(d, n)) for d, n in zip(distributions, lookups, strict=True)])
    sizes = {"rows": rows, "dim": dim, "bags": bags, "lookups": lookups, "flops": lookups * dim}
    sizes |= {"row_bytes": lookups * row, "unique_bytes": unique * row}
    sizes["nbytes"] = embedding.forward_bytes(bags, lookups, dim, itemsize=itemsize, granularity=granularity)
    sizes["working_set"] = sizes["nbytes"] - sizes["row_bytes"] + sizes["unique_bytes"]
    for level, capacity in zip(("l2", "l3"), capacities, strict=True):
        misses = lru_misses(distributions, lookups, row, capacity=max(capacity, 1.0))
        sizes[f"beyond_{level}"] = misses * sizes["row_bytes"]
    sizes["page_walks"] = page_walks(distributions, lookups, row, entries=entries) * lookups
    return sizes


def _on_device(
    features: Mapping[str, Values], device: Device, dtype: str, capacities: tuple[float, float]
) -> dict[str, Array]:
    """Put the peak and the bandwidth that apply beside the sizes."""
    sizes: dict[str, Array] = {name: np.asarray(value, dtype=float) for name, value in features.items()}
    if "peak" not in sizes:
        sizes["peak"] = np.asarray(device.peaks[check_choice("dtype", dtype, device.peaks)].value)
    working_set = sizes.get("working_set", sizes["nbytes"])
    if "bandwidth" not in sizes:
        mixed = "beyond_l3" in sizes
        sizes["bandwidth"] = _mixed_bandwidth(sizes, device) if mixed else device.bandwidth(working_set)
    for level, capacity in zip(("l2", "l3"), capacities, strict=True):
        if f"beyond_{level}" not in sizes:
            sizes[f"beyond_{level}"] = sizes["nbytes"] * miss_share(working_set, capacity=capacity)
    return sizes


def _mixed_bandwidth(sizes: Mapping[str, Array], device: Device) -> Array:
    """Bandwidth of traffic that comes in part from behind the last cache."""
    main = device.memory[-1].bandwidth
    near = device.memory[-2].bandwidth if len(device.memory) > 1 else None
    slow, fast = (main.value if main else 1e9), (near.value if near else main.value if main else 1e9)
    far = np.clip(sizes["beyond_l3"] / np.maximum(sizes["nbytes"], 1.0), 0.0, 1.0)
    return np.asarray(1.0 / (far / slow + (1.0 - far) / fast))
