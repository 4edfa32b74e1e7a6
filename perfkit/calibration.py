"""From raw measurements to a platform: kernels, collectives, and what real iterations add to them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from perfkit.contexts import add_context
from perfkit.fitting import Fit, find_levels, fit_additive, fit_pipelined
from perfkit.hardware import Device, Link, MemoryLevel, Network, Quantity
from perfkit.models.caches import (
    Distribution,
    Uniform,
    Zipf,
    lru_misses,
    miss_share,
    page_walks,
    rotating_misses,
    unique_rows,
)
from perfkit.models.embedding import row_traffic
from perfkit.models.kernels import TERMS, additive, term_names
from perfkit.pace import fit_paces, name_disturbances, relate_kernels
from perfkit.platform import Platform
from perfkit.prediction.cost import PAGE
from perfkit.resources import expect_number, reading
from perfkit.units import Array, show

__all__ = ["find_caches", "fit_platform", "judge_kernels", "size_cases"]

#: Pages a translation buffer may effectively hold.
_ENTRIES = (1024.0, 1536.0, 2048.0, 3072.0, 4096.0, 6144.0, 8192.0)

#: Elementwise kernels that do little arithmetic: their time is that of the memory they touch.
_STREAMS = (
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
)

#: Effective cache capacities tried, as shares of the nominal ones.
_SHARES = {"l2": (0.5, 0.7, 0.9), "l3": (0.4, 0.5, 0.6, 0.75, 0.9)}
_AROUND = (0.6, 0.8, 1.0, 1.25)  # and of measured ones


def size_cases(rows: Sequence[Mapping[str, Any]], capacities: tuple[float, float], entries: float) -> dict[str, Array]:
    """Sizes of isolated kernels of one kind as the forms take them; a repeated call finds its data where it fits.

    Parameters
    ----------
    rows : sequence of mapping
        Measured kernels: ``sizes``, ``kind`` and ``nbytes`` [B].
    capacities : (float, float)
        Bytes that the two cache levels effectively hold [B].
    entries : float
        Pages that the translation buffer effectively holds [-].

    Returns
    -------
    sizes : dict of str to array
        As `perfkit.prediction.cost.size_operations` returns for the operations of an iteration.
    """
    names = {name for row in rows for name in row["sizes"]}
    sizes = {name: np.array([float(row["sizes"].get(name, 0.0)) for row in rows]) for name in names}
    kind, nbytes = rows[0]["kind"], np.array([float(row["nbytes"]) for row in rows])
    sizes |= {"nbytes": nbytes}
    for level, capacity in zip(("l2", "l3"), capacities, strict=True):
        sizes[f"beyond_{level}"] = nbytes * miss_share(nbytes, capacity=capacity)
    if not kind.startswith("embedding"):
        return sizes
    return sizes | _size_rows(rows, sizes, capacities, entries)


def _size_rows(
    rows: Sequence[Mapping[str, Any]], sizes: dict[str, Array], capacities: tuple[float, float], entries: float
) -> dict[str, Array]:
    """Embedding rows of isolated kernels, whose batches of indices take turns: bytes touched and missed, page walks."""
    lookups, per_row, dense = sizes["lookups"], row_traffic(sizes["dim"], 4, 64), sizes["nbytes"]
    pairs = zip(sizes["table_rows"], sizes["exponent"], strict=True)
    laws = [Zipf(int(r), float(e)) if e else Uniform(int(r)) for r, e in pairs]
    unique = _distinct(laws, lookups)
    out = {"row_bytes": lookups * per_row, "unique_bytes": unique * per_row, "page_walks": np.zeros(len(rows))}
    if rows[0]["kind"] == "embedding_backward":
        if rows[0]["variant"] != "sparse":  # each row is found again in the gradient that has just been zeroed
            out["page_walks"] = unique * miss_share(dense / PAGE, capacity=entries)
        return out
    batches = np.array([float(row["sizes"].get("index_batches", 8.0)) for row in rows])
    touched = np.stack([_distinct(laws, lookups * (batches - 1)), _distinct(laws, lookups * batches)])
    cases = list(zip(laws, lookups, per_row, dense, strict=True))
    for level, capacity in zip(("l2", "l3"), capacities, strict=True):
        fresh = [lru_misses([law], [n], [b], capacity=capacity, dense_bytes=d)[0] for law, n, b, d in cases]
        oldest, distance = (touched[1] - touched[0]) / lookups, touched[1] * per_row + dense
        missed = rotating_misses(np.array(fresh), oldest, distance, capacity=capacity)
        out[f"beyond_{level}"] = sizes[f"beyond_{level}"] + missed * out["row_bytes"]
    pages = np.maximum(sizes["table_rows"] * per_row / PAGE, 1.0)
    covered = pages * -np.expm1(-touched / pages)
    walks = [page_walks([law], [n], [b], entries=entries, dense_bytes=d)[0] for law, n, b, d in cases]
    oldest, distance = (covered[1] - covered[0]) / lookups, covered[1] + dense / PAGE
    out["page_walks"] = lookups * rotating_misses(np.array(walks), oldest, distance, capacity=entries)
    return out


def _distinct(laws: Sequence[Distribution], lookups: Array) -> Array:
    return np.array([float(unique_rows(law, n)) for law, n in zip(laws, lookups, strict=True)])


def _groups(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["variant"]), []).append(row)
    return groups


def _fit_kernels(
    groups: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    capacities: tuple[float, float],
    entries: float,
    source: str,
    prior: Mapping[str, float] | None = None,
) -> dict[str, Fit]:
    fits = {}
    for (kind, variant), rows in groups.items():
        if len(rows) < 2:  # one size says nothing of the others: the class is priced as if nobody had measured it
            continue
        sizes = size_cases(rows, capacities, entries)
        seconds = np.array([row["median"] for row in rows])
        names = term_names(kind, variant)
        terms = {name: np.broadcast_to(np.asarray(TERMS[name](sizes), float), seconds.shape) for name in names}
        ranges = {
            name: (float(values.min()), float(values.max()))
            for name, values in sizes.items()
            if name in ("flops", "elements", "lookups") and values.max() > 0
        }
        fits[f"{kind}.{variant}"] = fit_additive(terms, seconds, prior=prior, ranges=ranges, source=source)
    return fits


def _choose_caches(
    groups: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], pairs: Sequence[tuple[float, float]], source: str
) -> dict[str, float]:
    """Effective cache capacities: those of smallest residuals among some pairs, and the pages held likewise."""

    def score(kinds: Sequence[str], capacities: tuple[float, float], entries: float) -> float:
        part = {key: rows for key, rows in groups.items() if key[0] in kinds}
        return float(np.mean([fit.spread for fit in _fit_kernels(part, capacities, entries, source).values()] or [0.0]))

    best = min(pairs, key=lambda pair: score(("elementwise", "rowwise"), pair, np.inf))
    tables = ("embedding_forward", "embedding_update", "embedding_backward")
    looked = any(kind in tables for kind, _ in groups)
    pages = {"pages": min(_ENTRIES, key=lambda n: score(tables, best, n))} if looked else {}
    return {"l2": best[0], "l3": best[1], **pages}


def _fit_classes(
    groups: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    caches: Mapping[str, float],
    rates: Sequence[float],
    source: str,
) -> dict[str, Fit]:
    """Kernel fits of all classes.

    Each class alone has few sizes beyond the caches, so the time of a byte from there is first taken from all
    elementwise kernels, or from the bandwidths of the levels, and then handed to every class as what is known.
    """
    held, entries = (caches["l2"], caches["l3"]), caches.get("pages", np.inf)
    streams = {key: rows for key, rows in groups.items() if key[0] == "elementwise" and key[1] in _STREAMS}
    alone = _fit_kernels(streams, held, entries, source).values()
    levels = [1.0 / far - 1.0 / near for near, far in pairwise(rates)][-2:]
    costs = {name: [fit.get(name, 0.0) for fit in alone] for name in ("beyond_l2", "beyond_l3")}
    if not streams and len(levels) == 2:
        costs = {name: [cost] for name, cost in zip(costs, levels, strict=True)}
    prior = {name: float(np.median(values)) for name, values in costs.items() if values}
    return _fit_kernels(groups, held, entries, source, prior)


def judge_kernels(platform: Platform, rows: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Relative errors of isolated kernels that were not fitted.

    Parameters
    ----------
    platform : Platform
        With kernel fits.
    rows : sequence of mapping
        Measured kernels of other sizes.

    Returns
    -------
    errors : dict of str to array
        predicted / measured - 1 by ``kind.variant``, GEMMs and convolutions under 2 MFLOP aside, and what the platform
        has no fit of [-].
    """
    errors = {}
    for (kind, variant), group in _groups(rows).items():
        if kind in ("gemm", "convolution"):
            group = [row for row in group if row["sizes"]["flops"] >= 2e6]
        if not group or f"{kind}.{variant}" not in platform.kernels:
            continue
        sizes = size_cases(group, platform.cache_capacities, platform.page_entries)
        predicted = additive(sizes, **platform.kernels[f"{kind}.{variant}"])
        errors[f"{kind}.{variant}"] = np.asarray(predicted / np.array([row["median"] for row in group]) - 1)
    return errors


# -- collectives -----------------------------------------------------------------------------------------------------


def _fit_collectives(rows: Sequence[Mapping[str, Any]], ranks: int, source: str) -> dict[str, Fit]:
    """One pipelined curve per operation through the lower quartiles; the share and cost of slow calls are noted."""
    fits = {}
    for operation in dict.fromkeys(row["operation"] for row in rows):
        own = [row for row in rows if row["operation"] == operation]
        nbytes, quartile = (np.array([row[key] for row in own], dtype=float) for key in ("nbytes", "q1"))
        slow = float(np.mean([row["mean"] / row["q1"] for row in own]))
        tried = [fit_pipelined(nbytes, quartile, sharpness=q, source=source) for q in (0.6, None)]
        fit = min(tried, key=lambda fit: fit.spread)  # of sizes left out: the third parameter has to earn its place
        note = f"fitted to lower quartiles; the mean call takes {slow:.2f} times as long"
        fits[f"{operation}.{ranks}"] = replace(fit, notes=(note,))
    return fits


# -- the platform ----------------------------------------------------------------------------------------------------


def fit_platform(measurements: Mapping[str, Any], *, name: str | None = None) -> Platform:
    """Fit a platform to the raw measurements of one machine.

    Parameters
    ----------
    measurements : mapping
        What `perfkit.campaign.measure_platform` returns.
    name : str, optional
        Name of the platform; by default made from the processor.

    Returns
    -------
    platform : Platform
        With kernels, collectives, context and provenance.

    Raises
    ------
    ValueError
        For measurements of another format, or with parts or times that cannot be.
    """
    with reading("measurements cannot be fitted", "take the file that calibrate wrote", told=True):
        if type(measurements["format"]) is not int or measurements["format"] != 1:
            raise ValueError(
                f"format is {show(measurements['format'])}; this perfkit reads measurements of format 1; measure again"
            )
        for part, names in {"kernels": ("median", "q1", "nbytes"), "collectives": ("q1", "mean", "nbytes")}.items():
            for i, row in enumerate(measurements[part]):
                label = " ".join(str(row[key]) for key in ("kind", "variant", "operation") if key in row)
                for column in names:
                    read = expect_number(low=0.0, above=column != "nbytes")
                    read(row[column], f"{part}[{i}] ({label}).{column}")
        if not any(row["kind"] == "gemm" for row in measurements["kernels"]):
            raise ValueError("kernels holds no gemm; a platform needs at least one to know its peak; measure again")
        return _fit(measurements, name)


def _fit(measurements: Mapping[str, Any], name: str | None) -> Platform:
    source, rows = measurements["id"], measurements["kernels"]
    levels, rates, largest = find_caches(measurements.get("ladder") or (), rows)
    held = _choose_caches(_groups(rows), _pair_caches(measurements, levels, largest), source)
    kernels = _fit_classes(_groups(rows), held, rates, source)
    paces = fit_paces(measurements)
    related = _fit_classes(_groups(relate_kernels(rows, paces)), held, rates, source) if paces else kernels
    kernels = min(kernels, related, key=lambda fits: float(np.mean([fit.spread for fit in fits.values()])))
    caches = Fit(
        "caches", held, n=len(rows), source=source, date=measurements["date"], ranges={"nbytes": (0.0, largest)},
        units={name: "-" if name == "pages" else "B" for name in held},
        notes=("effective capacities, chosen from a coarse grid",),
    )  # fmt: skip
    ranks = int(measurements["ranks"])
    platform = Platform(
        name=name or f"{measurements['device']}-{ranks}",
        device=_device(measurements, levels, rates, largest),
        network=_network(measurements, ranks),
        kernels=kernels,
        collectives=_fit_collectives(measurements["collectives"], ranks, source) if measurements["collectives"] else {},
        context={"caches": caches, **paces},
        provenance={
            **measurements["machine"],
            **measurements["versions"],
            "measured": measurements["date"],
            "id": source,
            **name_disturbances(
                kernels=rows, collectives=measurements["collectives"],
                iterations=[run for row in measurements["iterations"] for run in row["runs"]
                            if "core_share" in run or len(row["runs"]) == 1],
            ),
        },
    )  # fmt: skip
    platform = add_context(platform, measurements)
    kernels, collectives, context = (
        {key: replace(fit, date=measurements["date"]) for key, fit in fits.items()}
        for fits in (platform.kernels, platform.collectives, platform.context)
    )
    return replace(platform, kernels=kernels, collectives=collectives, context=context)


def _state(measurements: Mapping[str, Any], name: str) -> tuple[float | None, str]:
    """What the machine says of the size of a cache or of its memory, and where; None where it does not [B]."""
    facts = measurements.get("facts")
    if facts:
        return facts[name]["value"], facts[name]["source"]
    old = {**measurements["caches"], "memory": measurements.get("memory_bytes")}
    return old.get(name) or None, "the operating system"


def find_caches(
    ladder: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]] = ()
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Find the caches that a ladder of working sets shows, or else the streams among kernels.

    Parameters
    ----------
    ladder : sequence of mapping
        From `perfkit.measure.ladder.time_ladder`; empty where none was measured.
    kernels : sequence of mapping, optional
        Measured kernels.

    Returns
    -------
    capacities, bandwidths : tuple of float
        See `perfkit.fitting.find_levels`; none where too few sizes were timed [B] and [B/s].
    largest : float
        Largest working set that was timed [B].
    """
    streams = [row for row in _streams(kernels) if row["nbytes"] > 3e4]
    pairs = [(row["nbytes"], 2.0 * row["nbytes"], np.percentile(row["stream"], 25)) for row in ladder]  # read, written
    points = np.array(pairs or [(row["nbytes"], row["nbytes"], row["q1"]) for row in streams], dtype=float)
    largest = float(points[:, 0].max()) if len(points) else 0.0
    if len(points) < 8 or largest < 16.0 * points[:, 0].min():
        return (), (), largest
    return *find_levels(*points.T), largest


def _streams(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["kind"] == "elementwise" and row["variant"] in _STREAMS]


def _pair_caches(measurements: Mapping[str, Any], levels: Sequence[float], largest: float) -> list[tuple[float, float]]:
    """Capacities of the last two caches to try: around measured ones, or shares of stated ones that can be true."""
    stated = [_state(measurements, level)[0] or 0.0 for level in ("L2", "L3")]
    if not measurements.get("ladder") and 0 < stated[0] < stated[1] < largest / 2:
        return [(near * stated[0], far * stated[1]) for near in _SHARES["l2"] for far in _SHARES["l3"]]
    if len(levels) > 1:
        return [(near * levels[-2], far * levels[-1]) for near in _AROUND for far in _AROUND]
    if not levels:  # a flat curve: whatever was timed fitted
        return [(4.0 * max(largest, 1e6),) * 2]
    near = 2.0 ** np.arange(17.0, np.log2(levels[-1] / 3.0))  # a stream need not show a cache that gathers notice
    return [(float(size), share * levels[-1]) for size in (*near, levels[-1]) for share in _AROUND]


def _device(
    measurements: Mapping[str, Any], capacities: Sequence[float], rates: Sequence[float], largest: float
) -> Device:
    """Peaks and bandwidths: the best rates seen, since a rate that was measured cannot be above the peak."""
    rows, source, day = measurements["kernels"], measurements["id"], measurements["date"]

    def quantity(value: float, unit: str, kind: str = "measured", said: str = source) -> Quantity:
        return Quantity(float(value), unit, kind, said, day)

    peak = max(row["sizes"]["flops"] / row["q1"] for row in rows if row["kind"] == "gemm")
    bounds, seen = [0.0, *capacities, np.inf], [(row["nbytes"], row["nbytes"] / row["q1"]) for row in _streams(rows)]
    names, levels = [*("L1", "L2", "L3")[3 - len(capacities) :], "DRAM"], []
    rates = rates or [max(row["nbytes"] / row["q1"] for row in rows)]  # at least what some kernel has moved
    for number, (level, rate) in enumerate(zip(names, rates, strict=True)):
        low, high = bounds[number : number + 2]
        best = max([rate, *(speed for size, speed in seen if max(2.0 * low, 1e5) < size <= high)])
        memory, place = _state(measurements, "memory")
        size = quantity(high, "B", "fitted") if high < np.inf else quantity(memory, "B", said=place) if memory else None
        levels.append(MemoryLevel(level, size, quantity(best, "B/s")))
    stated = _state(measurements, "L3")[0] or _state(measurements, "L2")[0]
    return Device(
        measurements["machine"]["processor"] + ", one core per rank",
        measurements["device"],
        {"fp32": quantity(peak, "FLOP/s")},
        tuple(levels),
        never_left_cache=not capacities or largest < 2.0 * (stated or 0.0),
    )


def _network(measurements: Mapping[str, Any], ranks: int) -> Network:
    source, day, node = measurements["id"], measurements["date"], int(measurements.get("ranks_per_node", ranks))
    if not measurements["collectives"]:
        return Network(max(ranks, 1))
    rows = measurements["collectives"]
    best = max(row["nbytes"] / row["q1"] for row in rows)
    fastest = min(row["q1"] for row in rows)
    link = Link(Quantity(best, "B/s", "measured", source, day), Quantity(fastest, "s", "measured", source, day))
    return Network(node, nodes=max(1, ranks // node), links={"intra" if ranks <= node else "inter": link})
