"""What real iterations add to isolated kernels and collectives: by operation class, by family, and between ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from perfkit.estimates import keep_quiet
from perfkit.fitting import Fit, fit_context, fit_iteration
from perfkit.models.kernels import in_context
from perfkit.pace import relate_run
from perfkit.platform import Platform
from perfkit.prediction.cost import Costs, find_iteration, price
from perfkit.prediction.result import predict
from perfkit.units import Array
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.samples import load

__all__ = ["add_context"]

#: Spread of a family whose runs cannot be left out one at a time, because there is only one.
_UNKNOWN = 0.3

#: Spread that a family is expected to have before its runs are seen, and how many runs that counts for: 80 % of the
#: runs of zen3-2.check-7 to 9 and zen5-2.check-1 to 3 lie within 1.28 times 0.05 to 0.16 by family, 0.11 in the root
#: mean square; that families differ by so little, beside what 3 to 42 runs leave to chance, is worth 5 to 12 runs.
_USUAL = (0.11, 6.0)

#: Shares of its time that a collective in flight may take from the kernels beside it.
_SHARED = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def add_context(platform: Platform, measurements: Mapping[str, Any]) -> Platform:
    """Fit what iterations add to a platform of isolated kernels and collectives.

    Parameters
    ----------
    platform : Platform
        With kernels, collectives and effective caches.
    measurements : mapping
        Raw measurements with ``id``, ``iterations`` and ``collectives``, see `perfkit.calibration.fit_platform`.

    Returns
    -------
    platform : Platform
        With context by operation class and family, unless there are no iterations.
    """
    source, raw = measurements["id"], measurements["iterations"]
    related = [{**row, "runs": relate_run(row["runs"], row["family"], platform.context)} for row in raw]
    # Times at the usual pace are taken where iterations that were left out say so.
    tried = [runs for rows in (raw, related) if (runs := _runs(rows, platform))]
    fits = [_fit_contexts(runs, source) | _fit_iterations(runs, platform, source) for runs in tried]
    if not fits:
        return platform
    platform = replace(platform, context={**platform.context, **min(fits, key=_left_out)})
    shared = [_fit_parallel({**measurements, "iterations": rows}, platform, source) for rows in (raw, related)]
    return replace(platform, context={**platform.context, **min(shared, key=_left_out)})


def _left_out(fits: Any) -> float:
    """How far iterations lie from fits that they were left out of."""
    return sum(fit.n * fit.spread**2 for name, fit in fits.items() if name.startswith("iteration."))


# -- on one rank -----------------------------------------------------------------------------------------------------


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
            costs = run.costs
            columns = (costs.hot[i], costs.cold[i], costs.page_walks[i], run.measured[i], costs.assumed[i])
            parts.setdefault(f"{kind}.{variant}", []).append(columns)
            parts.setdefault(kind, []).append(columns)
    fits = {}
    for key, groups in parts.items():
        hot, cold, walks, measured, assumed = (np.concatenate(c) for c in zip(*groups, strict=True))
        about = {"pull": 0.1} if assumed.all() else {}  # what no kernel stands behind is held to nothing
        fits[key] = fit_context(hot, cold, walks, np.maximum(measured, 1e-7), source=source, **about)
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
        spread, bias = (_expect_spread(left_out), float(np.mean(left_out))) if left_out else (_UNKNOWN, 0.0)
        fits[f"iteration.{family}"] = replace(final, spread=spread, bias=bias)
    pooled = list(fits.values())
    strange = _judge_strangers(runs, platform, source, pooled)
    for name, fit in fits.items():
        if fit.n == 1 and len(pooled) > 2:  # one run is no worse than none
            fits[name] = replace(fit, spread=strange)
    notes = ("for families without calibration runs",)
    fits["iteration"] = replace(_average(pooled, len(runs)), spread=strange, notes=notes)
    return fits


def _average(fits: Sequence[Fit], n: int) -> Fit:
    """What families have in common."""
    scale, host = (float(np.mean([fit.get(name, 0.0) for fit in fits])) for name in ("scale", "per_operation"))
    units = {"scale": "-", "per_operation": "s"}
    return replace(fits[0], parameters={"scale": scale, "per_operation": host}, units=units, stderr={}, n=n)


def _judge_strangers(runs: Sequence[_Run], platform: Platform, source: str, fits: Sequence[Fit]) -> float:
    """Spread of families never calibrated: that of each family left out in turn, of twice the widest where few are."""
    families = [*dict.fromkeys(run.family for run in runs)]
    if len(families) < 3:
        return 2.0 * max(fit.spread for fit in fits)
    logs = []
    for family in families:
        others = [run for run in runs if run.family != family]
        known = [_iteration(others, name, platform, source) for name in families if name != family]
        fit, context = _average([fit for fit, _ in known], len(others)), known[0][1]
        for run in (run for run in runs if run.family == family):
            sums, count = _priced(run, context)
            logs.append(np.log(run.wall / (fit["scale"] * sums + fit["per_operation"] * count)))
    return _conformal(logs)


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


def _expect_spread(logs: Sequence[float]) -> float:
    """Spread of the next run, from errors of runs left out: their root mean square, as if there were a few more.

    Three or four errors can all be small by luck, or one of them large: so they are joined by `_USUAL`, the posterior
    mean of a variance under a scaled inverse chi-squared prior worth that many runs.
    """
    spread, worth = _USUAL
    return float(np.sqrt((np.sum(np.square(logs)) + worth * spread**2) / (len(logs) + worth)))


def _conformal(logs: Sequence[float], level: float = 0.8) -> float:
    """Spread whose interval holds the next run with at least this probability, if it is drawn as these were.

    Split conformal prediction: the ceil((n + 1) level)-th smallest error of runs left out, read as that quantile of a
    normal distribution. For families never calibrated, of which nothing usual is known.
    """
    size = np.sort(np.abs(logs))
    rank = min(len(size), int(np.ceil((len(size) + 1) * level)))
    return float(size[rank - 1]) / NormalDist().inv_cdf(0.5 + level / 2)


# -- on several ranks -------------------------------------------------------------------------------------------------


def _fit_parallel(measurements: Mapping[str, Any], platform: Platform, source: str) -> dict[str, Fit]:
    """What collectives cost inside iterations, and the scale of iterations that share the machine."""
    parallel = [_Parallel.read(row) for row in measurements["iterations"] if len(row["runs"]) > 1]
    if not parallel:
        return {}
    found: dict[str, list[tuple[float, float]]] = {}
    for run in parallel:
        graph, ranks = run.graphs[0], len(run.graphs)
        transfer = np.min(run.inside, axis=0)  # the last rank to come waits for none
        for number, index in enumerate(graph.collectives):
            operation = graph[int(index)]
            alone = platform.collective_time(operation.name, operation.features["nbytes"], ranks=ranks)
            found.setdefault(operation.name, []).append((float(alone), float(transfer[number])))
    fits = {}
    for name, pairs in found.items():
        alone, inside = np.array(pairs).T
        zero = np.zeros(len(alone))
        fits[f"collective.{name}"] = fit_context(alone, zero, zero, inside, pull=0.1, source=source)  # known to differ
    within = replace(platform, context={**platform.context, **fits})
    # Before any iteration is looked at, the delay of a slow call is that of isolated ones: mean over lower quartile.
    delay = max(float(np.mean([row["mean"] - row["q1"] for row in measurements["collectives"]])), 1e-5)
    shares = _SHARED if any(run.graphs[0].waits is not None for run in parallel) else (None,)
    tried = [_fit_shared(parallel, delay, within, share, source) for share in shares]
    return fits | min(tried, key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class _Parallel:
    """One measured iteration of several ranks."""

    workload: Any
    plan: Plan | None
    graphs: tuple[Graph, ...]
    inside: Array
    wall: float
    idle: float

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "_Parallel":
        workload, ranks, runs = load(row["workload"]), len(row["runs"]), row["runs"]
        plan = Plan.from_owners(row["owners"], ranks=ranks) if row["owners"] else None
        graphs = workload.graphs(ranks, plan)
        for run, graph in zip(runs, graphs, strict=True):
            _check_stream(row["name"], run, graph)
        inside = [np.array(run["operation_seconds"])[g.collectives] for run, g in zip(runs, graphs, strict=True)]
        walls, idle = ([run.get(key, np.nan) for run in runs] for key in ("median", "idle"))
        return cls(workload, plan, graphs, np.array(inside), max(walls), min(idle))

    def predict(self, platform: Platform) -> tuple[float, float]:
        """Time on a platform, and what of it the busiest rank stands still [s]."""
        with keep_quiet():  # that it is not calibrated yet need not be said
            found = predict(self.workload, platform, ranks=len(self.graphs), plan=self.plan)
        still = found.communication()
        return found.time, float((still["exposed_s"] + still["waiting_s"]).to_numpy().min())


def _fit_shared(
    parallel: Sequence[_Parallel], delay: float, platform: Platform, share: float | None, source: str
) -> tuple[float, dict[str, Fit]]:
    """Scale of iterations whose ranks share the machine, and what an average collective costs more than a usual one.

    The scale is one on that of iterations alone, the same for all families, for a given share of the core that
    collectives in flight take. What collectives cost more is time in which a rank stands still, ``per_collective``, as
    far as it was seen to, and the rest processor time, ``per_resume``: what runs after a collective runs slower.
    Beside the fits, what iterations left out in turn say against them.
    """
    fits: dict[str, Fit] = {}
    if share is not None:
        fits["overlap"] = Fit(
            "overlap", {"contention": share}, units={"contention": "-"}, source=source, n=len(parallel),
            notes=("share of its time that a collective in flight takes from kernels on the same core",),
        )  # fmt: skip
    times, idle = np.array([_time_delayed(run, fits, platform, 0.0, 1.0) for run in parallel]).T
    still = 1.0
    for _ in range(2):  # what stands still may be hidden by what runs beside it, so that both depend on each other
        slowed, stopped = np.array([_time_delayed(run, fits, platform, delay, still) for run in parallel]).T
        fit, left_out = _fit_walls(times, (slowed - times) / delay, parallel, delay, source)
        still = _share_still(fit, (stopped - idle) / delay, parallel, idle, still)
    total = fit.get("per_collective", 0.0)
    parts = {"per_collective": still * total} | ({"per_resume": (1.0 - still) * total} if still < 1.0 else {})
    units = {**fit.units, **dict.fromkeys(parts, "s")}
    fit = replace(fit, parameters={**fit.parameters, **parts}, units=units)
    fit = replace(fit, spread=_expect_spread(left_out), notes=("iterations of ranks that share this machine",))
    fits["iteration.parallel"] = fit
    within = replace(platform, context={**platform.context, "iteration.parallel": fit})
    for family in dict.fromkeys(run.workload.family for run in parallel):
        found = find_iteration(within, family, 2)
        fits[f"iteration.{family}.parallel"] = replace(found, spread=fit.spread, notes=fit.notes) if found else fit
    return float(np.mean(np.square(left_out))), fits


def _share_still(fit: Fit, stops: Array, runs: Sequence[_Parallel], idle: Array, share: float) -> float:
    """Share of what a collective costs more in which the busiest rank was seen to stand still; as it was if unseen."""
    more = fit.get("per_collective", 0.0) * stops / share
    seen = np.array([run.idle for run in runs]) - idle
    weights = np.where(np.isfinite(seen), more / np.array([run.wall for run in runs]) ** 2, 0.0)
    if not (weights * more).sum() > 0:
        return share
    # not quite none, as the next round divides by it
    return float(np.clip(np.nansum(weights * seen) / (weights * more).sum(), 0.01, 1.0))


def _time_delayed(
    run: _Parallel, fits: Mapping[str, Fit], platform: Platform, delay: float, still: float
) -> tuple[float, float]:
    """Time, and what of it a rank stands still, if every collective costs `delay` more, this share of it in flight."""
    family, units = run.workload.family, {"scale": "-"}
    alone = find_iteration(platform, family, 1)
    more = {"per_collective": still * delay, "per_resume": (1.0 - still) * delay}
    values = {"scale": 1.0, **(alone.parameters if alone else {}), **more}
    shared = Fit("iteration", values, units={key: units.get(key, "s") for key in values})
    return run.predict(replace(platform, context={**platform.context, **fits, f"iteration.{family}.parallel": shared}))


def _fit_walls(
    times: Array, counts: Array, runs: Sequence[_Parallel], delay: float, source: str
) -> tuple[Fit, list[float]]:
    """What sharing the machine does to any iteration, and the errors of those left out in turn."""
    walls = np.array([run.wall for run in runs])

    def fit_runs(kept: Sequence[int]) -> Fit:
        priced, slow, seen = (values[list(kept)] for values in (times, counts, walls))
        # trusted within 20 % and the delay itself, where iterations err by 15 %; chosen on the parallel runs of zen5-2,
        # and with 0.15 or 0.3 instead of 0.07 the mean errors of three machines differ by less than 0.5 %
        prior, trust = (1.0, delay), (0.07, delay / 3)
        return fit_iteration(priced, slow, seen, each="per_collective", prior=prior, trust=trust, source=source)

    fit, left_out = fit_runs(range(len(walls))), []
    for number, wall in enumerate(walls):
        other = fit_runs([i for i in range(len(walls)) if i != number]) if len(walls) > 1 else fit
        predicted = other["scale"] * times[number] + other.get("per_collective", 0.0) * counts[number]
        left_out.append(float(np.log(wall / predicted)))
    return fit, left_out
