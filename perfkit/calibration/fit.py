"""Fit a platform to raw measurements: kernels, collectives, caches, and the context of real
iterations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np

from perfkit.calibration.context import add_context
from perfkit.calibration.pace import fit_paces, name_disturbances, relate_kernels
from perfkit.fitting import (
    Additive,
    Caches,
    CollectiveModel,
    find_levels,
    fit_sharpness,
)
from perfkit.fitting.kernels import fit_residuals, widen_few
from perfkit.ground.files import reading
from perfkit.ground.hardware import Device, Link, MemoryLevel, Network, Quantity
from perfkit.ground.units import Array
from perfkit.measure.machine import Fact
from perfkit.measure.records import (
    LadderStep,
    MachineMeasurements,
    MeasuredCollective,
    MeasuredKernel,
    SizedKernel,
    read_measurements,
)
from perfkit.models.caches import PAGE, miss_share
from perfkit.models.distributions import Uniform, Zipf
from perfkit.models.embedding import size_lookup
from perfkit.models.kernels import TERMS, term_names
from perfkit.platform.machine import Context
from perfkit.platform.platform import Platform

#: Numbers of pages in a translation buffer to try [-].
_ENTRIES = (1024.0, 1536.0, 2048.0, 3072.0, 4096.0, 6144.0, 8192.0)

#: Elementwise kernels with little arithmetic, whose time is that of their memory traffic.
_STREAMS = tuple(
    [
        "relu",
        "threshold_backward",
        "add",
        "add_",
        "mul_",
        "mul_scalar",
        "lerp_",
        "addcmul_",
        "addcdiv_",
        "add_scalar_",
    ]
)

#: Effective cache capacities to try, as shares of stated ones and of measured ones [-].
_SHARES = ((0.5, 0.7, 0.9), (0.4, 0.5, 0.6, 0.75, 0.9))
_AROUND = (0.6, 0.8, 1.0, 1.25)


def count_traffic(kernel: SizedKernel) -> float:
    """Count the bytes that a measured kernel reads and writes: each operand once, but twice if
    changed in place.

    Parameters
    ----------
    kernel : SizedKernel
        Its ``nbytes`` count each operand once [B].

    Returns
    -------
    nbytes : float
        Counted as for the operations of a graph [B].
    """
    nbytes = float(kernel.nbytes)
    if kernel.kind == "elementwise" and kernel.variant.endswith("_"):
        nbytes += 4.0 * float(kernel.sizes["elements"])
    return nbytes


def size_cases(
    kernels: Sequence[SizedKernel], capacities: tuple[float, float], entries: float
) -> dict[str, Array]:
    """Compute the sizes of isolated kernels of one kind for the closed forms; repeated calls find
    data in caches.

    Parameters
    ----------
    kernels : sequence of SizedKernel
        Kernels of one kind and variant.
    capacities : (float, float)
        Effective capacities of the two cache levels [B].
    entries : float
        Effective number of pages in the translation buffer [-].

    Returns
    -------
    sizes : dict of str to array
        As `perfkit.prediction.cost.size_operations` returns them for the operations of an iteration.
    """
    names = dict.fromkeys(name for kernel in kernels for name in kernel.sizes)
    # files of early campaigns have negative numbers of outputs of a pooling
    sizes = {
        name: np.array([abs(float(kernel.sizes.get(name, 0.0))) for kernel in kernels])
        for name in names
    }
    kind = kernels[0].kind
    nbytes = np.array([float(kernel.nbytes) for kernel in kernels])
    sizes["nbytes"] = np.array([count_traffic(kernel) for kernel in kernels])
    for level, capacity in zip(("l2", "l3"), capacities, strict=True):
        sizes[f"beyond_{level}"] = nbytes * miss_share(nbytes, capacity=capacity)
    if not kind.startswith("embedding"):
        return sizes
    pairs = zip(sizes["table_rows"], sizes["exponent"], strict=True)
    laws = [Zipf(int(n), float(exponent)) if exponent else Uniform(int(n)) for n, exponent in pairs]
    found = size_lookup(
        laws,
        sizes["lookups"],
        sizes["dim"],
        capacities=capacities,
        entries=entries,
        dense_bytes=nbytes,
        groups=np.arange(len(kernels)),
        batches=[float(kernel.sizes.get("index_batches", 8.0)) for kernel in kernels],
    )
    sizes |= {
        "row_bytes": found.row_bytes,
        "unique_bytes": found.unique_bytes,
        "page_walks": found.walks,
    }
    # rows of the gradient are still in the caches, where zeros were just written
    if kind == "embedding_backward":
        if kernels[0].variant == "sparse":
            near: Any = 0.0
        else:
            near = miss_share(nbytes / PAGE, capacity=entries)
        return sizes | {"page_walks": near * found.unique}
    for level, share in zip(("l2", "l3"), found.misses, strict=True):
        sizes[f"beyond_{level}"] = sizes[f"beyond_{level}"] + share * found.row_bytes
    return sizes


def _fit_kernels(
    measured: Iterable[MeasuredKernel],
    held: Mapping[str, float],
    prior: Mapping[str, float] | None = None,
) -> dict[str, Additive]:
    """Fit all classes of kernels; a class with a single size counts as not measured."""
    groups: dict[str, list[MeasuredKernel]] = {}
    for kernel in measured:
        groups.setdefault(kernel.name, []).append(kernel)
    fits = {}
    for key, kernels in groups.items():
        if len(kernels) == 1:
            continue
        sizes = size_cases(kernels, (held["l2"], held["l3"]), held.get("pages", np.inf))
        swept = {
            name: n
            for name, n in sizes.items()
            if name in ("flops", "elements", "lookups") and n.max() > 0
        }
        ranges = {name: (float(n.min()), float(n.max())) for name, n in swept.items()}
        terms = {name: TERMS[name](sizes) for name in term_names(*key.split(".", 1))}
        seconds = np.array([kernel.median for kernel in kernels])
        fits[key] = fit_residuals(terms, seconds, prior=prior, ranges=ranges)
    return fits


def _average_spread(fits: Mapping[str, Additive]) -> float:
    return float(np.mean([fit.spread for fit in fits.values()] or [0.0]))


def _choose_caches(
    kernels: Sequence[MeasuredKernel], pairs: Iterable[tuple[float, float]]
) -> dict[str, float]:
    """Choose the effective cache capacities among some pairs, and then the pages, by the smallest
    residuals."""
    flat = [kernel for kernel in kernels if kernel.kind in ("elementwise", "rowwise")]
    tables = [kernel for kernel in kernels if kernel.kind.startswith("embedding")]
    tried: Iterable[dict[str, float]] = ({"l2": near, "l3": far} for near, far in pairs)
    held = min(tried, key=lambda held: _average_spread(_fit_kernels(flat, held)))
    if not tables:
        return held
    tried = [held | {"pages": entries} for entries in _ENTRIES]
    return min(tried, key=lambda held: _average_spread(_fit_kernels(tables, held)))


def _fit_classes(
    kernels: Sequence[MeasuredKernel], held: Mapping[str, float]
) -> dict[str, Additive]:
    """Fit all classes of kernels; other classes give a prior for bytes beyond the caches, which few
    sizes need."""
    alone = _fit_kernels(_streams(kernels), held).values()
    costs = {name: [fit.get(name, 0.0) for fit in alone] for name in ("beyond_l2", "beyond_l3")}
    prior = {name: float(np.median(values)) for name, values in costs.items() if values}
    return _fit_kernels(kernels, held, prior)


# -- collectives
# -----------------------------------------------------------------------------------------------------


def _fit_collectives(
    collectives: Sequence[MeasuredCollective], ranks: int
) -> dict[str, CollectiveModel]:
    """Fit a pipelined curve to the lower quartiles of each operation; a note gives the cost of slow
    calls."""
    fits = {}
    for operation in dict.fromkeys(collective.operation for collective in collectives):
        sizes = [collective for collective in collectives if collective.operation == operation]
        nbytes = np.array([collective.nbytes for collective in sizes], dtype=float)
        lower_quartile = np.array([collective.q1 for collective in sizes], dtype=float)
        slow = float(np.mean([collective.mean / collective.q1 for collective in sizes]))
        fit = fit_sharpness(nbytes, lower_quartile)
        note = f"fitted to lower quartiles; the mean call takes {slow:.2f} times as long"
        fits[f"{operation}.{ranks}"] = replace(fit, notes=(note, *fit.notes))
    return fits


# -- the platform
# ----------------------------------------------------------------------------------------------------


@reading("measurements cannot be fitted", "take the file that calibrate wrote", told=True)
def fit_platform(
    measurements: MachineMeasurements | Mapping[str, Any], *, name: str | None = None
) -> Platform:
    """Fit a platform to the raw measurements of one machine.

    Parameters
    ----------
    measurements : MachineMeasurements or mapping
        What `perfkit.calibration.campaign.measure_platform` returns, or the same as plain JSON.
    name : str, optional
        Name of the platform; by default made from the device and the ranks.

    Returns
    -------
    platform : Platform
        With kernels, collectives, context and provenance.

    Raises
    ------
    ValueError
        For measurements of another format, or with missing parts or impossible times.
    """
    if not isinstance(measurements, MachineMeasurements):
        measurements = read_measurements(measurements)
    kernels, collectives = measurements.kernels, measurements.collectives
    if not any(kernel.kind == "gemm" for kernel in kernels):
        raise ValueError(
            "kernels holds no gemm; a platform needs at least one to know its peak; measure again"
        )
    ranks = int(measurements.ranks)
    stated = [_state_cache(measurements, level) for level in ("L2", "L3")]
    levels, rates, largest = find_caches(measurements.ladder, kernels)
    plausible = [] if measurements.ladder else stated
    held = _choose_caches(kernels, _pair_caches(plausible, levels, largest))
    caches = Caches.build(
        held,
        n=len(kernels),
        ranges={"nbytes": (0.0, largest)},
        notes=("effective capacities, chosen from a coarse grid",),
    )
    paces = fit_paces(kernels, measurements.iterations)
    tried = [kernels, relate_kernels(kernels, paces)] if paces else [kernels]
    classes = min((_fit_classes(own, held) for own in tried), key=_average_spread)
    device, network = _describe(measurements, levels, rates)
    never_left_cache = not levels or largest < 2.0 * (stated[1] or stated[0])
    platform = Platform(
        name or f"{measurements.device}-{ranks}",
        replace(device, never_left_cache=never_left_cache),
        network,
        {key: widen_few(fit) for key, fit in classes.items()},
        _fit_collectives(collectives, ranks),
        context=Context(caches=caches, paces=paces),
        provenance={
            **measurements.machine,
            **measurements.versions,
            "measured": measurements.date,
            "id": measurements.id,
            **_name_disturbances(measurements),
        },
    )
    platform = add_context(platform, measurements)
    stamp = partial(replace, source=measurements.id, date=measurements.date)
    return replace(
        platform,
        kernels={key: stamp(fit) for key, fit in platform.kernels.items()},
        collectives={key: stamp(fit) for key, fit in platform.collectives.items()},
        context=platform.context.map(stamp),
    )


def _state_cache(measurements: MachineMeasurements, level: str) -> float:
    """Size of a cache as the operating system states it; 0 if it does not [B]."""
    fact = measurements.facts.get(level)
    if fact is None:
        return 0.0
    return fact.value or 0.0


def _name_disturbances(measurements: MachineMeasurements) -> dict[str, str]:
    """What disturbed the measurements, see `perfkit.calibration.pace.name_disturbances`."""
    ranks = []
    for iteration in measurements.iterations:
        for rank in iteration.runs:
            # older measurements of several ranks have no share of a core
            if rank.core_share is not None or len(iteration.runs) == 1:
                ranks.append(rank)
    return name_disturbances(
        kernels=measurements.kernels, collectives=measurements.collectives, iterations=ranks
    )


def find_caches(
    ladder: Sequence[LadderStep], kernels: Sequence[MeasuredKernel] = ()
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Find the caches in a ladder of working sets, or else in the streams among the kernels.

    Parameters
    ----------
    ladder : sequence of LadderStep
        From `perfkit.measure.timing.time_ladder`; empty if not measured.
    kernels : sequence of MeasuredKernel, optional
        Measured kernels.

    Returns
    -------
    capacities, bandwidths : tuple of float
        See `perfkit.fitting.find_levels`; empty if too few sizes were timed [B] and [B/s].
    largest : float
        Largest working set that was timed [B].
    """
    # size of the working set, bytes that a pass reads and writes, time of a pass
    if ladder:
        passes = [
            (float(step.nbytes), 2.0 * step.nbytes, float(np.percentile(step.stream, 25)))
            for step in ladder
        ]
    else:
        streams = [kernel for kernel in _streams(kernels) if kernel.nbytes > 3e4]
        passes = [(kernel.nbytes, count_traffic(kernel), kernel.q1) for kernel in streams]
    points = np.array(passes, dtype=float)
    largest = float(points[:, 0].max()) if len(points) else 0.0
    if len(points) < 8 or largest < 16.0 * points[:, 0].min():
        return (), (), largest
    return *find_levels(*points.T), largest


def _streams(kernels: Sequence[MeasuredKernel]) -> list[MeasuredKernel]:
    """Kernels whose time is that of their memory traffic."""
    return [
        kernel for kernel in kernels if kernel.kind == "elementwise" and kernel.variant in _STREAMS
    ]


def _pair_caches(
    stated: Sequence[float], levels: Sequence[float], largest: float
) -> list[tuple[float, float]]:
    """Capacities of the last two caches to try: shares of plausible stated ones, or around measured
    ones [B]."""
    near, far = stated[-2:] or (0.0, 0.0)
    if 0 < near < far < largest / 2:
        return [(one * near, other * far) for one, other in product(*_SHARES)]
    if len(levels) > 1:
        return [(one * levels[-2], other * levels[-1]) for one, other in product(_AROUND, _AROUND)]
    if not levels:  # a flat curve: all timed sizes fit into a cache
        return [(4.0 * max(largest, 1e6),) * 2]
    # gathers may need a cache that streams do not show
    sizes = 2.0 ** np.arange(17.0, np.log2(levels[-1] / 3.0))
    return [
        (float(size), share * levels[-1]) for size, share in product((*sizes, levels[-1]), _AROUND)
    ]


def _describe(
    measurements: MachineMeasurements, capacities: Sequence[float], rates: Sequence[float]
) -> tuple[Device, Network]:
    """Make device and network; their peaks and bandwidths are the best measured rates."""
    device = _describe_device(measurements, capacities, rates)
    ranks, collectives = int(measurements.ranks), measurements.collectives
    if not collectives:
        return device, Network(max(ranks, 1))
    if measurements.ranks_per_node is None:
        ranks_per_node = ranks
    else:
        ranks_per_node = int(measurements.ranks_per_node)
    bandwidth = max(collective.nbytes / collective.q1 for collective in collectives)
    latency = min(collective.q1 for collective in collectives)
    link = Link(_measure(measurements, bandwidth, "B/s"), _measure(measurements, latency, "s"))
    links = {"intra" if ranks <= ranks_per_node else "inter": link}
    return device, Network(ranks_per_node, nodes=max(1, ranks // ranks_per_node), links=links)


def _describe_device(
    measurements: MachineMeasurements, capacities: Sequence[float], rates: Sequence[float]
) -> Device:
    """Make the device of one rank."""
    kernels, streams = measurements.kernels, _streams(measurements.kernels)
    peak = max(kernel.sizes["flops"] / kernel.q1 for kernel in kernels if kernel.kind == "gemm")
    if not rates:  # a lower bound: the best rate of a kernel
        rates = [max(count_traffic(kernel) / kernel.q1 for kernel in kernels)]
    names = [*("L1", "L2", "L3")[3 - len(capacities) :], "DRAM"]
    bounds = [0.0, *capacities, np.inf]
    levels = []
    for name, rate, (low, high) in zip(names, rates, pairwise(bounds), strict=True):
        seen = [
            count_traffic(kernel) / kernel.q1
            for kernel in streams
            if max(2.0 * low, 1e5) < kernel.nbytes <= high
        ]
        if high < np.inf:
            size: Quantity | None = _measure(measurements, high, "B", "fitted")
        else:
            size = _state_memory(measurements)
        bandwidth = _measure(measurements, max([rate, *seen]), "B/s")
        levels.append(MemoryLevel(name, size, bandwidth))
    processor = measurements.machine["processor"] + ", one core per rank"
    peaks = {"fp32": _measure(measurements, peak, "FLOP/s")}
    return Device(processor, measurements.device, peaks, tuple(levels))


def _state_memory(measurements: MachineMeasurements) -> Quantity | None:
    """Size of the main memory as the operating system states it, if it does [B]."""
    memory: Fact = measurements.facts["memory"]
    if not memory.value:
        return None
    return Quantity(float(memory.value), "B", "measured", memory.source, measurements.date)


def _measure(
    measurements: MachineMeasurements, value: float, unit: str, kind: str = "measured"
) -> Quantity:
    """A quantity that follows from the measurements."""
    return Quantity(float(value), unit, kind, measurements.id, measurements.date)
