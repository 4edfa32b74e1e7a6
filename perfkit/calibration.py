"""From raw measurements to a platform: kernels, collectives, and what real iterations add to them."""

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from perfkit.fitting import Fit, fit_additive, fit_context, fit_iteration, fit_pipelined
from perfkit.hardware import Device, Link, MemoryLevel, Network, Quantity
from perfkit.models.caches import Uniform, Zipf, lru_misses, miss_share, page_walks, unique_rows
from perfkit.models.embedding import row_traffic
from perfkit.models.kernels import TERMS, additive, in_context, term_names
from perfkit.platform import ExtrapolationWarning, Platform
from perfkit.prediction.cost import PAGE, Costs, find_iteration, price
from perfkit.prediction.result import predict
from perfkit.units import Array
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.samples import load

__all__ = ["fit_platform", "judge_kernels", "size_cases"]

#: Spread of a family whose runs cannot be left out one at a time, because there is only one.
_UNKNOWN = 0.3

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
    per_row = row_traffic(sizes["dim"], 4, 64)
    sizes["row_bytes"] = sizes["lookups"] * per_row
    laws = [
        Zipf(int(r), float(e)) if e else Uniform(int(r))
        for r, e in zip(sizes["table_rows"], sizes["exponent"], strict=True)
    ]
    unique = [float(unique_rows(law, n)) for law, n in zip(laws, sizes["lookups"], strict=True)]
    sizes |= {"unique_bytes": np.array(unique) * per_row, "page_walks": np.zeros(len(rows))}
    if kind == "embedding_backward":
        if rows[0]["variant"] == "dense":  # each distinct row is found again in the gradient that has just been zeroed
            pages = sizes["table_rows"] * sizes["dim"] * 4 / PAGE
            sizes["page_walks"] = np.array(unique) * miss_share(pages, capacity=entries)
        return sizes
    for level, capacity in zip(("l2", "l3"), capacities, strict=True):
        missed = [
            float(lru_misses([law], [n], [size], capacity=capacity, dense_bytes=dense)[0])
            for law, n, size, dense in zip(laws, sizes["lookups"], per_row, nbytes, strict=True)
        ]
        sizes[f"beyond_{level}"] = sizes[f"beyond_{level}"] + np.array(missed) * sizes["row_bytes"]
    walked = [
        float(page_walks([law], [n], [size], entries=entries, dense_bytes=dense)[0])
        for law, n, size, dense in zip(laws, sizes["lookups"], per_row, nbytes, strict=True)
    ]
    sizes["page_walks"] = np.array(walked) * sizes["lookups"]
    return sizes


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
    groups: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], nominal: tuple[float, float], source: str
) -> tuple[dict[str, float], dict[str, Fit]]:
    """Effective cache capacities and the kernel fits that go with them: those of smallest residuals on a coarse grid.

    Each class alone has few sizes beyond the caches, so the time of a byte from there is first taken from all
    elementwise kernels and then handed to every class as what is known.
    """

    def score(kinds: Sequence[str], capacities: tuple[float, float], entries: float) -> float:
        part = {key: rows for key, rows in groups.items() if key[0] in kinds}
        return float(np.mean([fit.spread for fit in _fit_kernels(part, capacities, entries, source).values()]))

    pairs = [(l2 * nominal[0], l3 * nominal[1]) for l2 in _SHARES["l2"] for l3 in _SHARES["l3"]]
    best = min(pairs, key=lambda pair: score(("elementwise", "rowwise"), pair, np.inf))
    tables = ("embedding_forward", "embedding_update")
    entries = min(_ENTRIES, key=lambda n: score(tables, best, n)) if any(k in tables for k, _ in groups) else np.inf
    streams = {key: rows for key, rows in groups.items() if key[0] == "elementwise" and key[1] in _STREAMS}
    alone = _fit_kernels(streams, best, entries, source).values()
    prior = {name: float(np.median([fit.get(name, 0.0) for fit in alone])) for name in ("beyond_l2", "beyond_l3")}
    return {"l2": best[0], "l3": best[1], "pages": float(entries)}, _fit_kernels(groups, best, entries, source, prior)


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
        predicted / measured - 1 by ``kind.variant``, GEMMs under 2 MFLOP aside [-].
    """
    errors = {}
    for (kind, variant), group in _groups(rows).items():
        if kind == "gemm":
            group = [row for row in group if row["sizes"]["flops"] >= 2e6]
        if not group:
            continue
        sizes = size_cases(group, platform.cache_capacities, platform.page_entries)
        predicted = additive(sizes, **platform.kernels[f"{kind}.{variant}"])
        errors[f"{kind}.{variant}"] = np.asarray(predicted / np.array([row["median"] for row in group]) - 1)
    return errors


# -- in context ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """One measured iteration beside what its operations cost in isolation."""

    family: str
    graph: Graph
    costs: Costs
    measured: Array
    wall: float


def _runs(iterations: Iterable[Mapping[str, Any]], platform: Platform) -> list[_Run]:
    runs = []
    for row in iterations:
        if len(row["runs"]) > 1:
            continue
        workload = load(row["workload"])
        graph, result = workload.graphs()[0], row["runs"][0]
        _check_stream(row["name"], result, graph)
        costs = price(graph, platform, dtype=workload.dtype)
        runs.append(_Run(workload.family, graph, costs, np.array(result["operation_seconds"]), result["median"]))
    return runs


def _check_stream(name: str, result: Mapping[str, Any], graph: Graph) -> None:
    if len(result["operation_seconds"]) != len(graph):
        raise ValueError(
            f"iteration {name} was measured with {len(result['operation_seconds'])} operations and its graph has "
            f"{len(graph)}; the framework runs it in another way than perfkit knows; measure with torch 2.6 to 2.13"
        )


def _fit_contexts(runs: Sequence[_Run], source: str) -> dict[str, Fit]:
    """Context of every variant, and of every kind for variants that no calibration iteration ran."""
    parts: dict[str, list[tuple[Array, ...]]] = {}
    for run in runs:
        for (kind, variant), i in run.graph.kernels.items():
            if kind == "collective":
                continue
            columns = (run.costs.hot[i], run.costs.cold[i], run.costs.page_walks[i], run.measured[i])
            parts.setdefault(f"{kind}.{variant}", []).append(columns)
            parts.setdefault(kind, []).append(columns)
    fits = {}
    for key, groups in parts.items():
        hot, cold, walks, measured = (np.concatenate(c) for c in zip(*groups, strict=True))
        fits[key] = fit_context(hot, cold, walks, np.maximum(measured, 1e-7), source=source)
    return fits


def _fit_iterations(runs: Sequence[_Run], platform: Platform, source: str) -> dict[str, Fit]:
    """Scale and host time of each family; the spread is that of iterations left out of every fit in turn."""
    fits = {}
    for family in dict.fromkeys(run.family for run in runs):
        own = [run for run in runs if run.family == family]
        left_out = []
        for run in own if len(own) > 1 else ():
            others = [other for other in runs if other is not run]
            fit, context = _iteration(others, family, platform, source)
            sums, count = _priced(run, context)
            left_out.append(np.log(run.wall / (fit["scale"] * sums + fit.get("per_operation", 0.0) * count)))
        final, _ = _iteration(runs, family, platform, source)
        spread, bias = (_conformal(left_out), float(np.mean(left_out))) if left_out else (_UNKNOWN, 0.0)
        fits[f"iteration.{family}"] = replace(final, spread=spread, bias=bias)
    pooled = list(fits.values())
    scale, host = (float(np.mean([fit.get(name, 0.0) for fit in pooled])) for name in ("scale", "per_operation"))
    fits["iteration"] = replace(
        pooled[0],
        parameters={"scale": scale, "per_operation": host},
        units={"scale": "-", "per_operation": "s"},
        stderr={},
        n=len(runs),
        spread=2.0 * max(fit.spread for fit in pooled),
        notes=("for families without calibration runs",),
    )
    return fits


def _iteration(runs: Sequence[_Run], family: str, platform: Platform, source: str) -> tuple[Fit, dict[str, Fit]]:
    context = _fit_contexts(runs, source)
    own = [run for run in runs if run.family == family]
    sums, counts = np.array([_priced(run, context) for run in own]).T
    return fit_iteration(sums, counts, np.array([run.wall for run in own]), source=source), context


def _priced(run: _Run, context: Mapping[str, Fit]) -> tuple[float, int]:
    """Sum of a run's operations in context, and their number."""
    total = 0.0
    for (kind, variant), i in run.graph.kernels.items():
        sizes = {"hot": run.costs.hot[i], "cold": run.costs.cold[i], "page_walks": run.costs.page_walks[i]}
        fit = context.get(f"{kind}.{variant}", context.get(kind))
        total += float(in_context(sizes, **(fit if fit is not None else {})).sum())
    return total, len(run.graph)


def _conformal(logs: Sequence[float], level: float = 0.8) -> float:
    """Spread whose interval holds the next run with at least this probability, if it is drawn as these were.

    Split conformal prediction: the ceil((n + 1) level)-th smallest error of runs left out, read as that quantile of a
    normal distribution.
    """
    size = np.sort(np.abs(logs))
    rank = min(len(size), int(np.ceil((len(size) + 1) * level)))
    return float(size[rank - 1]) / NormalDist().inv_cdf(0.5 + level / 2)


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


def _fit_parallel(measurements: Mapping[str, Any], platform: Platform, source: str) -> dict[str, Fit]:
    """What collectives cost inside iterations, and the scale of iterations that share the machine."""
    parallel = [row for row in measurements["iterations"] if len(row["runs"]) > 1]
    if not parallel:
        return {}
    found: dict[str, list[tuple[float, float]]] = {}
    for row in parallel:
        workload, plan, ranks = (
            load(row["workload"]),
            Plan.from_owners(row["owners"], ranks=len(row["runs"])),
            len(row["runs"]),
        )
        graphs = workload.graphs(ranks, plan)
        for run, graph in zip(row["runs"], graphs, strict=True):
            _check_stream(row["name"], run, graph)
        inside = [np.array(run["operation_seconds"])[g.collectives] for run, g in zip(row["runs"], graphs, strict=True)]
        transfer = np.min(inside, axis=0)  # the last rank to come waits for none
        for number, index in enumerate(graphs[0].collectives):
            operation = graphs[0][int(index)]
            alone = platform.collective_time(operation.name, operation.features["nbytes"], ranks=ranks)
            found.setdefault(operation.name, []).append((float(alone), float(transfer[number])))
    fits = {}
    for name, pairs in found.items():
        alone, inside = np.array(pairs).T
        zero = np.zeros(len(alone))
        fits[f"collective.{name}"] = fit_context(alone, zero, zero, inside, source=source)
    within = replace(platform, context={**platform.context, **fits})
    return fits | _fit_shared(parallel, measurements["collectives"], within, source)


def _fit_shared(
    parallel: Sequence[Mapping[str, Any]], collectives: Sequence[Mapping[str, Any]], platform: Platform, source: str
) -> dict[str, Fit]:
    """Scale of iterations whose ranks share the machine, and the delay that slow calls add to an average collective.

    Before any iteration is looked at, the delay is that of isolated collectives: their mean over their lower quartile.
    """
    family = load(parallel[0]["workload"]).family
    alone = find_iteration(platform, family, 1) or Fit(
        "iteration", {"scale": 1.0}, spread=_UNKNOWN, units={"scale": "-"}
    )
    neutral = replace(alone, parameters={**alone.parameters, "scale": 1.0})
    plain = replace(platform, context={**platform.context, f"iteration.{family}": neutral})
    times, counts, walls = [], [], []
    for row in parallel:
        plan = Plan.from_owners(row["owners"], ranks=len(row["runs"]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtrapolationWarning)  # that it is not calibrated yet is known here
            prediction = predict(load(row["workload"]), plain, ranks=plan.ranks, plan=plan)
        times.append(prediction.time)
        counts.append(sum(count for (_, kind), (count, _) in prediction.parts.items() if kind == "collective"))
        walls.append(max(run["median"] for run in row["runs"]))
    delay = max(float(np.mean([row["mean"] - row["q1"] for row in collectives])), 1e-5)

    def fit_runs(kept: Sequence[int]) -> Fit:
        columns = (np.array(values, dtype=float)[kept] for values in (times, counts, walls))
        prior, trust = (alone["scale"], delay), (0.2, delay)
        return fit_iteration(*columns, each="per_collective", prior=prior, trust=trust, source=source)

    fit, left_out = fit_runs(range(len(walls))), []
    for number, wall in enumerate(walls):
        other = fit_runs([i for i in range(len(walls)) if i != number]) if len(walls) > 1 else fit
        predicted = other["scale"] * times[number] + other.get("per_collective", 0.0) * counts[number]
        left_out.append(float(np.log(wall / predicted)))
    host = {"per_operation": alone["per_operation"]} if "per_operation" in alone else {}
    return {
        f"iteration.{family}.parallel": replace(
            fit, parameters={**fit.parameters, **host}, units={**fit.units, **dict.fromkeys(host, "s")},
            spread=_conformal(left_out),
            notes=("iterations of ranks that share this machine",),
        )
    }  # fmt: skip


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
        For measurements of another format.
    """
    if measurements.get("format") != 1:
        raise ValueError(
            f"format is {measurements.get('format')!r}; this perfkit reads measurements of format 1; measure again"
        )
    for key in ("id", "date", "device", "ranks", "machine", "caches", "kernels", "collectives", "iterations"):
        if key not in measurements:
            raise ValueError(f"measurements lack {key!r}; take the file that calibrate wrote beside the platform")
    if not any(row["kind"] == "gemm" for row in measurements["kernels"]):
        raise ValueError("kernels holds no gemm; a platform needs at least one to know its peak; measure again")
    source, groups = measurements["id"], _groups(measurements["kernels"])
    found = measurements["caches"]
    nominal = (found.get("L2", 2.0**20), found.get("L3", found.get("L2", 2.0**25)))
    capacities, kernels = _choose_caches(groups, nominal, source)
    caches = Fit(
        "caches", capacities, n=len(measurements["kernels"]), source=source, date=measurements["date"],
        units={"l2": "B", "l3": "B", "pages": "-"}, notes=("effective capacities, chosen from a coarse grid",),
    )  # fmt: skip
    ranks = int(measurements["ranks"])
    platform = Platform(
        name=name or f"{measurements['device']}-{ranks}",
        device=_device(measurements, nominal),
        network=_network(measurements, ranks),
        kernels=kernels,
        collectives=_fit_collectives(measurements["collectives"], ranks, source) if measurements["collectives"] else {},
        context={"caches": caches},
        provenance={
            **measurements["machine"],
            **measurements["versions"],
            "measured": measurements["date"],
            "id": source,
        },
    )
    runs = _runs(measurements["iterations"], platform)
    if runs:
        context = {**platform.context, **_fit_contexts(runs, source), **_fit_iterations(runs, platform, source)}
        platform = replace(platform, context=context)
        platform = replace(platform, context=context | _fit_parallel(measurements, platform, source))
    kernels, collectives, context = (
        {key: replace(fit, date=measurements["date"]) for key, fit in fits.items()}
        for fits in (platform.kernels, platform.collectives, platform.context)
    )
    return replace(platform, kernels=kernels, collectives=collectives, context=context)


def _device(measurements: Mapping[str, Any], nominal: tuple[float, float]) -> Device:
    """Peaks and bandwidths: the best rates seen, since a rate that was measured cannot be above the peak."""
    rows, source, day = measurements["kernels"], measurements["id"], measurements["date"]

    def quantity(value: float, unit: str, kind: str = "measured") -> Quantity:
        return Quantity(value, unit, kind, source, day)

    peak = max(row["sizes"]["flops"] / row["q1"] for row in rows if row["kind"] == "gemm")
    streams = [row for row in rows if row["kind"] == "elementwise" and row["nbytes"] > 1e5]
    bounds = (0.0, nominal[0], nominal[1], np.inf)
    levels = []
    for level, (low, high) in zip(("L2", "L3", "DRAM"), itertools.pairwise(bounds), strict=True):
        inside = [row["nbytes"] / row["q1"] for row in streams if low < row["nbytes"] <= high]
        capacity = {"L2": nominal[0], "L3": nominal[1], "DRAM": measurements["memory_bytes"]}[level]
        bandwidth = quantity(max(inside), "B/s") if inside else None
        levels.append(MemoryLevel(level, quantity(capacity, "B", "datasheet"), bandwidth))
    return Device(
        measurements["machine"]["processor"] + ", one core per rank",
        measurements["device"],
        {"fp32": quantity(peak, "FLOP/s")},
        tuple(levels),
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
