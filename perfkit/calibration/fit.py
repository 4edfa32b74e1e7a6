"""Fit a platform to raw measurements: kernels, collectives, caches, and the context of real
iterations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any, TypeAlias

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
from perfkit.ground.units import Array, check_positive, show
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

Row: TypeAlias = Mapping[str, Any]

#: Effective cache capacities to try, as shares of stated ones and of measured ones [-].
_SHARES = ((0.5, 0.7, 0.9), (0.4, 0.5, 0.6, 0.75, 0.9))
_AROUND = (0.6, 0.8, 1.0, 1.25)


def count_traffic(row: Row) -> float:
    """Count the bytes that a measured kernel reads and writes: each operand once, but twice if
    changed in place.

    Parameters
    ----------
    row : mapping
        Measured kernel; its ``nbytes`` count each operand once [B].

    Returns
    -------
    nbytes : float
        Counted as for the operations of a graph [B].
    """
    in_place = row["kind"] == "elementwise" and row["variant"].endswith("_")
    return float(row["nbytes"]) + (4.0 * float(row["sizes"]["elements"]) if in_place else 0.0)


def size_cases(
    rows: Sequence[Row], capacities: tuple[float, float], entries: float
) -> dict[str, Array]:
    """Compute the sizes of isolated kernels of one kind for the closed forms; repeated calls find
    data in caches.

    Parameters
    ----------
    rows : sequence of mapping
        Measured kernels: ``sizes``, ``kind``, ``variant`` and ``nbytes``, the bytes of their
        operands [B].
    capacities : (float, float)
        Effective capacities of the two cache levels [B].
    entries : float
        Effective number of pages in the translation buffer [-].

    Returns
    -------
    sizes : dict of str to array
        As `perfkit.prediction.cost.size_operations` returns them for the operations of an iteration.
    """
    names = dict.fromkeys(name for row in rows for name in row["sizes"])
    # files of early campaigns have negative numbers of outputs of a pooling
    sizes = {
        name: np.array([abs(float(row["sizes"].get(name, 0.0))) for row in rows]) for name in names
    }
    kind, nbytes = rows[0]["kind"], np.array([float(row["nbytes"]) for row in rows])
    sizes["nbytes"] = np.array([count_traffic(row) for row in rows])
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
        groups=np.arange(len(rows)),
        batches=[float(row["sizes"].get("index_batches", 8.0)) for row in rows],
    )
    sizes |= {
        "row_bytes": found.row_bytes,
        "unique_bytes": found.unique_bytes,
        "page_walks": found.walks,
    }
    # rows of the gradient are still in the caches, where zeros were just written
    if kind == "embedding_backward":
        near = (
            0.0 if rows[0]["variant"] == "sparse" else miss_share(nbytes / PAGE, capacity=entries)
        )
        return sizes | {"page_walks": near * found.unique}
    for level, share in zip(("l2", "l3"), found.misses, strict=True):
        sizes[f"beyond_{level}"] = sizes[f"beyond_{level}"] + share * found.row_bytes
    return sizes


def _fit_kernels(
    measured: Iterable[Row], held: Mapping[str, float], prior: Mapping[str, float] | None = None
) -> dict[str, Additive]:
    """Fit all classes of kernels; a class with a single size counts as not measured."""
    groups: dict[str, list[Row]] = {}
    for row in measured:
        groups.setdefault(f"{row['kind']}.{row['variant']}", []).append(row)
    fits = {}
    for key, rows in ((key, rows) for key, rows in groups.items() if len(rows) > 1):
        sizes = size_cases(rows, (held["l2"], held["l3"]), held.get("pages", np.inf))
        swept = {
            name: n
            for name, n in sizes.items()
            if name in ("flops", "elements", "lookups") and n.max() > 0
        }
        ranges = {name: (float(n.min()), float(n.max())) for name, n in swept.items()}
        terms = {name: TERMS[name](sizes) for name in term_names(*key.split(".", 1))}
        seconds = np.array([row["median"] for row in rows])
        fits[key] = fit_residuals(terms, seconds, prior=prior, ranges=ranges)
    return fits


def _average_spread(fits: Mapping[str, Additive]) -> float:
    return float(np.mean([fit.spread for fit in fits.values()] or [0.0]))


def _choose_caches(rows: Sequence[Row], pairs: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Choose the effective cache capacities among some pairs, and then the pages, by the smallest
    residuals."""
    flat = [row for row in rows if row["kind"] in ("elementwise", "rowwise")]
    tables = [row for row in rows if row["kind"].startswith("embedding")]
    tried: Iterable[dict[str, float]] = ({"l2": near, "l3": far} for near, far in pairs)
    held = min(tried, key=lambda held: _average_spread(_fit_kernels(flat, held)))
    if not tables:
        return held
    tried = [held | {"pages": entries} for entries in _ENTRIES]
    return min(tried, key=lambda held: _average_spread(_fit_kernels(tables, held)))


def _fit_classes(rows: Sequence[Row], held: Mapping[str, float]) -> dict[str, Additive]:
    """Fit all classes of kernels; other classes give a prior for bytes beyond the caches, which few
    sizes need."""
    alone = _fit_kernels(_streams(rows), held).values()
    costs = {name: [fit.get(name, 0.0) for fit in alone] for name in ("beyond_l2", "beyond_l3")}
    prior = {name: float(np.median(values)) for name, values in costs.items() if values}
    return _fit_kernels(rows, held, prior)


# -- collectives
# -----------------------------------------------------------------------------------------------------


def _fit_collectives(rows: Sequence[Row], ranks: int) -> dict[str, CollectiveModel]:
    """Fit a pipelined curve to the lower quartiles of each operation; a note gives the cost of slow
    calls."""
    fits = {}
    for operation in dict.fromkeys(row["operation"] for row in rows):
        own = [row for row in rows if row["operation"] == operation]
        nbytes, quartile = (
            np.array([row[key] for row in own], dtype=float) for key in ("nbytes", "q1")
        )
        slow = float(np.mean([row["mean"] / row["q1"] for row in own]))
        fit = fit_sharpness(nbytes, quartile)
        note = f"fitted to lower quartiles; the mean call takes {slow:.2f} times as long"
        fits[f"{operation}.{ranks}"] = replace(fit, notes=(note, *fit.notes))
    return fits


# -- the platform
# ----------------------------------------------------------------------------------------------------


def _check(measurements: Mapping[str, Any]) -> None:
    version = measurements["format"]
    if type(version) is not int or version != 1:
        raise ValueError(
            f"format is {show(version)}; this perfkit reads measurements of format 1; measure again"
        )
    check_positive("ranks", measurements["ranks"], integer=True, zero=True)
    if "ranks_per_node" in measurements:
        check_positive("ranks_per_node", measurements["ranks_per_node"], integer=True)
    for part, names in {
        "kernels": ("median", "q1", "nbytes"),
        "collectives": ("q1", "mean", "nbytes"),
    }.items():
        for i, row in enumerate(measurements[part]):
            label = " ".join(
                str(row[key]) for key in ("kind", "variant", "operation") if key in row
            )
            for column in names:
                check_positive(
                    f"{part}[{i}] ({label}).{column}", row[column], zero=column == "nbytes"
                )
    if not any(row["kind"] == "gemm" for row in measurements["kernels"]):
        raise ValueError(
            "kernels holds no gemm; a platform needs at least one to know its peak; measure again"
        )


@reading("measurements cannot be fitted", "take the file that calibrate wrote", told=True)
def fit_platform(measurements: Mapping[str, Any], *, name: str | None = None) -> Platform:
    """Fit a platform to the raw measurements of one machine.

    Parameters
    ----------
    measurements : mapping
        What `perfkit.calibration.campaign.measure_platform` returns.
    name : str, optional
        Name of the platform; by default made from the processor.

    Returns
    -------
    platform : Platform
        With kernels, collectives, context and provenance.

    Raises
    ------
    ValueError
        For measurements of another format, or with missing parts or impossible times.
    """
    _check(measurements)
    source, day, rows = measurements["id"], measurements["date"], measurements["kernels"]
    ranks, collectives = int(measurements["ranks"]), measurements["collectives"]
    # of perfkit 0.1
    old = {**measurements.get("caches", {}), "memory": measurements.get("memory_bytes")}
    known = {
        key: {"value": value or None, "source": "the operating system"}
        for key, value in old.items()
    }
    facts = {**known, **measurements.get("facts", {})}
    ladder, paces = measurements.get("ladder") or (), fit_paces(measurements)
    levels, rates, largest = find_caches(ladder, rows)
    stated = [facts.get(level, {}).get("value") or 0.0 for level in ("L2", "L3")]
    held = _choose_caches(rows, _pair_caches([] if ladder else stated, levels, largest))
    tried = [rows, relate_kernels(rows, paces)] if paces else [rows]
    classes = min((_fit_classes(own, held) for own in tried), key=_average_spread)
    kernels = {key: widen_few(fit) for key, fit in classes.items()}
    caches = Caches.build(
        held,
        n=len(rows),
        ranges={"nbytes": (0.0, largest)},
        notes=("effective capacities, chosen from a coarse grid",),
    )
    # Older measurements of several ranks have no share of a core.
    runs = [
        run
        for r in measurements["iterations"]
        for run in r["runs"]
        if "core_share" in run or len(r["runs"]) == 1
    ]
    disturbances = name_disturbances(kernels=rows, collectives=collectives, iterations=runs)
    origin = {
        **measurements["machine"],
        **measurements["versions"],
        "measured": day,
        "id": source,
        **disturbances,
    }
    device, network = _describe(measurements, facts["memory"], levels, rates)
    device = replace(
        device, never_left_cache=not levels or largest < 2.0 * (stated[1] or stated[0])
    )
    name, context = name or f"{measurements['device']}-{ranks}", Context(caches=caches, paces=paces)
    curves = _fit_collectives(collectives, ranks)
    platform = Platform(name, device, network, kernels, curves, context=context, provenance=origin)
    platform = add_context(platform, measurements)
    stamp = partial(replace, source=source, date=day)
    return replace(
        platform,
        kernels={key: stamp(fit) for key, fit in platform.kernels.items()},
        collectives={key: stamp(fit) for key, fit in platform.collectives.items()},
        context=platform.context.map(stamp),
    )


def find_caches(
    ladder: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]] = ()
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Find the caches in a ladder of working sets, or else in the streams among the kernels.

    Parameters
    ----------
    ladder : sequence of mapping
        From `perfkit.measure.timing.time_ladder`; empty if not measured.
    kernels : sequence of mapping, optional
        Measured kernels.

    Returns
    -------
    capacities, bandwidths : tuple of float
        See `perfkit.fitting.find_levels`; empty if too few sizes were timed [B] and [B/s].
    largest : float
        Largest working set that was timed [B].
    """
    streams = [row for row in _streams(kernels) if row["nbytes"] > 3e4]
    # read, written
    pairs = [
        (row["nbytes"], 2.0 * row["nbytes"], np.percentile(row["stream"], 25)) for row in ladder
    ]
    points = np.array(
        pairs or [(row["nbytes"], count_traffic(row), row["q1"]) for row in streams], dtype=float
    )
    largest = float(points[:, 0].max()) if len(points) else 0.0
    if len(points) < 8 or largest < 16.0 * points[:, 0].min():
        return (), (), largest
    return *find_levels(*points.T), largest


def _streams(rows: Sequence[Row]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["kind"] == "elementwise" and row["variant"] in _STREAMS]


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
    measurements: Mapping[str, Any],
    memory: Mapping[str, Any],
    capacities: Sequence[float],
    rates: Sequence[float],
) -> tuple[Device, Network]:
    """Make device and network; their peaks and bandwidths are the best measured rates."""
    rows, source, day = measurements["kernels"], measurements["id"], measurements["date"]

    def quantity(value: float, unit: str, kind: str = "measured", origin: str = source) -> Quantity:
        return Quantity(float(value), unit, kind, origin, day)

    peak = max(row["sizes"]["flops"] / row["q1"] for row in rows if row["kind"] == "gemm")
    bounds = [0.0, *capacities, np.inf]
    seen = [(row["nbytes"], count_traffic(row) / row["q1"]) for row in _streams(rows)]
    names, levels = [*("L1", "L2", "L3")[3 - len(capacities) :], "DRAM"], []
    # a lower bound: the best rate of a kernel
    rates = rates or [max(count_traffic(row) / row["q1"] for row in rows)]
    whole = quantity(memory["value"], "B", origin=memory["source"]) if memory["value"] else None
    for name, rate, (low, high) in zip(names, rates, pairwise(bounds), strict=True):
        best = max([rate, *(speed for size, speed in seen if max(2.0 * low, 1e5) < size <= high)])
        size = quantity(high, "B", "fitted") if high < np.inf else whole
        levels.append(MemoryLevel(name, size, quantity(best, "B/s")))
    name = measurements["machine"]["processor"] + ", one core per rank"
    device = Device(name, measurements["device"], {"fp32": quantity(peak, "FLOP/s")}, tuple(levels))
    ranks, calls = int(measurements["ranks"]), measurements["collectives"]
    if not calls:
        return device, Network(max(ranks, 1))
    node, wire = (
        int(measurements.get("ranks_per_node", ranks)),
        max(row["nbytes"] / row["q1"] for row in calls),
    )
    link = Link(quantity(wire, "B/s"), quantity(min(row["q1"] for row in calls), "s"))
    return device, Network(
        node, nodes=max(1, ranks // node), links={"intra" if ranks <= node else "inter": link}
    )
