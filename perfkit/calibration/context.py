"""Fit what iterations add to isolated kernels and collectives: by class, by family, and on several ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from perfkit.calibration.pace import relate_run
from perfkit.fitting import Fit, find_context, fit_context, fit_iteration
from perfkit.ground.units import Array
from perfkit.measure.samples import load
from perfkit.models.kernels import in_context
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.platform import ANY, Context, Platform
from perfkit.prediction.cost import price
from perfkit.prediction.result import predict
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan

#: Spread of a family with a single run [-].
_UNKNOWN = 0.3

#: Spread that families are expected to have before their runs are seen, that of Transformers, which scatter less, and
#: how many runs that counts for; docs/formulas.md, table 9.1.
_USUAL, _USUAL_TRANSFORMER, _WORTH = 0.11, 0.08, 6.0

#: Shares of the last cache that iterations may find: they come back to their data late, when other guests of the
#: processor have taken the rest, while kernels that were repeated alone have kept it to themselves.
_HELD = (1.0, 0.5, 0.25)

#: Standard error of the median of an iteration, by the logarithm of its quartiles' ratio, if it holds about seven
#: independent spells: 1.25 / 1.35 of that ratio over the root of seven.
_CHANCE = 0.35

#: Shares of its time that a collective in flight may take from the kernels beside it.
_SHARED = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def add_context(platform: Platform, measurements: Mapping[str, Any]) -> Platform:
    """Fit what iterations add to a platform of isolated kernels and collectives.

    Parameters
    ----------
    platform : Platform
        With kernels, collectives and effective caches.
    measurements : mapping
        Raw measurements with ``id``, ``iterations`` and ``collectives``, see `perfkit.calibration.fit.fit_platform`.

    Returns
    -------
    platform : Platform
        With context by operation class and family, unless there are no iterations.
    """
    source, raw = measurements["id"], measurements["iterations"]
    related = [{**row, "runs": relate_run(row["runs"], row["family"], platform.context.paces)} for row in raw]
    # Times at the usual pace are taken where they predict iterations that were left out better.
    tried = [raw] if related == raw else [raw, related]
    fits = []
    for context in map(partial(_hold, platform.context), _HELD):
        within = replace(platform, context=context)
        fits += [_fit_families(runs, context, source) for rows in tried if (runs := _read_runs(rows, within))]
    if not fits:
        return platform
    context = min(fits, key=lambda context: _left_out({k: f for k, f in context.iterations.items() if k != ANY}))
    platform = replace(platform, context=context)
    shared = [_fit_parallel({**measurements, "iterations": rows}, platform, source) for rows in tried]
    return replace(platform, context=min(shared, key=lambda context: _left_out(context.parallel)))


def _hold(context: Context, share: float) -> Context:
    """The context of iterations that find this share of the last cache."""
    caches = context.caches
    if caches is None:
        return context
    held = {"parameters": {**caches.parameters, "l3_share": share}, "units": {**caches.units, "l3_share": "-"}}
    return replace(context, caches=replace(caches, **held))  # type: ignore[arg-type]


def _left_out(fits: Mapping[str, Fit]) -> float:
    """How far iterations are from fits that have not seen them."""
    return sum(fit.n * fit.spread**2 for fit in fits.values())


# -- on one rank -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A measured iteration; of the operations of each class: isolated times, page walks, measured time, if assumed."""

    family: str
    classes: Mapping[tuple[str, str], tuple[Array, ...]]
    operations: int
    wall: float

    def price(self, context: Mapping[str, Mapping[str, float]]) -> float:
        """Sum of the operations in context [s]."""
        total = 0.0
        for (kind, variant), (hot, cold, walks, *_) in self.classes.items():
            fit = context.get(f"{kind}.{variant}", context.get(kind, {}))
            total += float(in_context({"hot": hot, "cold": cold, "page_walks": walks}, **fit).sum())
        return total


def _read_runs(iterations: Iterable[Mapping[str, Any]], platform: Platform) -> list[_Run]:
    runs = []
    for row in iterations:
        if len(row["runs"]) > 1:
            continue
        workload, result = load(row["workload"]), row["runs"][0]
        graph = workload.graphs()[0]
        _check_stream(row["name"], result, graph)
        costs = price([graph], platform, dtype=workload.dtype)[0]
        seconds = np.maximum(result["operation_seconds"], 1e-7)
        columns = (costs.hot, costs.cold, costs.page_walks, seconds, costs.assumed)
        kernels = {key: i for key, i in graph.kernels.items() if key[0] != "collective"}
        classes = {key: tuple(column[i] for column in columns) for key, i in kernels.items()}
        runs.append(_Run(workload.family, classes, len(graph), result["median"]))
    return runs


def _check_stream(name: str, result: Mapping[str, Any], graph: Graph) -> None:
    if len(result["operation_seconds"]) != len(graph):
        raise ValueError(
            f"iteration {name} was measured with {len(result['operation_seconds'])} operations and its graph has "
            f"{len(graph)}; the framework runs it in another way than perfkit knows; measure with torch 2.6 to 2.13"
        )


def _fit_classes(runs: Sequence[_Run], fit: Callable[..., Any]) -> dict[str, Any]:
    """Context of every variant, and of every kind for variants that no calibration iteration ran."""
    parts: dict[str, list[tuple[Array, ...]]] = {}
    for run in runs:
        for (kind, variant), columns in run.classes.items():
            parts.setdefault(f"{kind}.{variant}", []).append(columns)
            parts.setdefault(kind, []).append(columns)
    fits = {}
    for key, groups in parts.items():
        *sizes, assumed = (np.concatenate(column) for column in zip(*groups, strict=True))
        fits[key] = fit(*sizes, pull=0.1 if assumed.all() else 10.0)  # an assumption is hardly a prior
    return fits


def _fit_walls(runs: Sequence[_Run], context: Mapping[str, Mapping[str, float]], source: str = "") -> Fit:
    sums, counts, walls = np.array([(run.price(context), run.operations, run.wall) for run in runs]).T
    return fit_iteration(sums, counts, walls, source=source)


def _fit_families(runs: Sequence[_Run], known: Context, source: str) -> Context:
    """Context of all classes; scale and host time of each family, whose spread is that of iterations left out."""
    context: dict[str, Fit] = _fit_classes(runs, partial(fit_context, source=source))
    families = {run.family: [other for other in runs if other.family == run.family] for run in runs}
    fits = {}
    for family, own in families.items():
        fits[family], spread, bias = _fit_walls(own, context, source), _UNKNOWN, 0.0
        if len(own) > 1:
            logs = [_judge([run], [other for other in runs if other is not run], [family])[0] for run in own]
            spread, bias = expect_spread(logs, family), float(np.mean(logs))
        fits[family] = replace(fits[family], spread=spread, bias=bias)
    # A family that was never calibrated: as each of several that is left out, or twice the widest of two.
    strange = 2.0 * max(fit.spread for fit in fits.values())
    if len(families) > 2:
        others = {family: [other for other in families if other != family] for family in families}
        kept = {family: [run for run in runs if run.family != family] for family in families}
        logs = [log for family, own in families.items() for log in _judge(own, kept[family], others[family])]
        strange = bound_spread(logs)
    scale, host = _average([*fits.values()])
    common = {"parameters": {"scale": scale, "per_operation": host}, "units": {"scale": "-", "per_operation": "s"}}
    notes = ("for families without calibration runs",)
    whole = replace(fits[runs[0].family], **common, stderr={}, n=len(runs), spread=strange, notes=notes)  # type: ignore[arg-type]
    for family, fit in fits.items():
        if fit.n == 1 and len(fits) > 2:  # one run is no worse than none
            fits[family] = replace(fit, spread=strange)
    return replace(known, kernels=context, iterations=fits | {ANY: whole})


def _judge(left_out: Sequence[_Run], kept: Sequence[_Run], families: Sequence[str]) -> list[float]:
    """Errors (logarithms) of some runs by what others say, as the average of some of their families."""
    context = _fit_classes(kept, find_context)
    fits = [_fit_walls([run for run in kept if run.family == family], context) for family in families]
    scale, host = _average(fits)
    return [float(np.log(run.wall / (scale * run.price(context) + host * run.operations))) for run in left_out]


def _average(fits: Sequence[Fit]) -> tuple[float, float]:
    """Scale [-] and host time of an operation [s] that families have in common."""
    return float(np.mean([fit["scale"] for fit in fits])), float(
        np.mean([fit.get("per_operation", 0.0) for fit in fits])
    )


def expect_spread(logs: Sequence[float], family: str = "") -> float:
    """Estimate the spread of the next run from errors of runs left out.

    Parameters
    ----------
    logs : sequence of float
        Logarithms of measured over predicted times [-].
    family : str, optional
        Workload family of the runs.

    Returns
    -------
    spread : float
        Standard deviation of the logarithm [-].

    Notes
    -----
    Three or four errors can all be small by chance, or one of them large. So the result is the posterior mean of a
    variance under a scaled inverse chi-squared prior with the usual spread; docs/formulas.md, table 9.1.
    """
    usual = _USUAL_TRANSFORMER if family == "transformer" else _USUAL
    return float(np.sqrt((np.sum(np.square(logs)) + _WORTH * usual**2) / (len(logs) + _WORTH)))


def bound_spread(logs: Sequence[float], level: float = 0.8) -> float:
    """Find the spread whose interval holds the next run with at least some probability, if it is drawn as these were.

    Parameters
    ----------
    logs : sequence of float
        Logarithms of measured over predicted times of runs left out [-].
    level : float, optional
        That probability [-].

    Returns
    -------
    spread : float
        Standard deviation of the logarithm [-].

    Notes
    -----
    Split conformal prediction: the ceil((n + 1) level)-th smallest error, read as that quantile of a normal
    distribution. For families that were never calibrated.
    """
    size = np.sort(np.abs(logs))
    rank = min(len(size), int(np.ceil((len(size) + 1) * level)))
    return float(size[rank - 1]) / NormalDist().inv_cdf(0.5 + level / 2)


# -- on several ranks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parallel:
    """One measured iteration of several ranks: time of the slowest, idle at least, and how far its times scatter."""

    workload: Any
    plan: Plan | None
    graphs: tuple[Graph, ...]
    wall: float
    idle: float
    noise: float

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> "_Parallel":
        workload, ranks, runs = load(row["workload"]), len(row["runs"]), row["runs"]
        plan = Plan.from_owners(row["owners"], ranks=ranks) if row["owners"] else None
        graphs = workload.graphs(ranks, plan)
        for run, graph in zip(runs, graphs, strict=True):
            _check_stream(row["name"], run, graph)
        noise = max(float(np.log(run["q3"] / run["q1"])) for run in runs)
        walls, idle = ([run.get(key, np.nan) for run in runs] for key in ("median", "idle"))
        return cls(workload, plan, graphs, max(walls), min(idle), noise)

    def predict(self, platform: Platform, delay: float, waited: float) -> tuple[float, float]:
        """Time if a collective costs `delay` more, this share of it waiting, and how long the busiest rank waits."""
        family, ranks = self.workload.family, len(self.graphs)
        more = {"per_collective": waited * delay, "per_resume": (1.0 - waited) * delay}
        values = {"scale": 1.0, **(platform.context.find_iteration(family, 1) or {}), **more}
        fit = Fit("iteration", values, units={key: "-" if key == "scale" else "s" for key in values})
        context = replace(platform.context, parallel={**platform.context.parallel, family: fit})
        platform = replace(platform, context=context)
        with keep_quiet():  # that it is not calibrated yet need not be said
            found = predict(self.workload, platform, ranks=ranks, plan=self.plan)
        waits = found.communication()
        return found.time, float((waits["exposed_s"] + waits["waiting_s"]).to_numpy().min())


def _fit_parallel(measurements: Mapping[str, Any], platform: Platform, source: str) -> Context:
    """Context with what collectives cost inside iterations, and the scale of iterations that share the machine."""
    parallel = [_Parallel.read(row) for row in measurements["iterations"] if len(row["runs"]) > 1]
    if not parallel:
        return platform.context
    # Before any iteration is looked at, a call is delayed like a usual isolated one: median over lower quartile.
    delay = max(float(np.mean([row["median"] - row["q1"] for row in measurements["collectives"]])), 1e-5)
    shares = _SHARED if any(run.graphs[0].waits is not None for run in parallel) else (None,)
    tried = [_fit_shared(parallel, delay, platform, share, source) for share in shares]
    return min(tried, key=lambda pair: pair[0])[1]


def _fit_shared(
    parallel: Sequence[_Parallel], delay: float, platform: Platform, share: float | None, source: str
) -> tuple[float, Context]:
    """Squared error of left-out iterations, and the context of ranks that share the machine: scale and delays."""
    if share is not None:
        notes = ("share of its time that a collective in flight takes from kernels on the same core",)
        overlap = Fit(
            "overlap", {"contention": share}, units={"contention": "-"}, source=source, n=len(parallel), notes=notes
        )
        platform = replace(platform, context=replace(platform.context, overlap=overlap))
    times, idle = np.array([run.predict(platform, 0.0, 1.0) for run in parallel]).T
    waited = 1.0
    for _ in range(2):  # waiting may be hidden by what runs beside it, so that both depend on each other
        slowed, stopped = np.array([run.predict(platform, delay, waited) for run in parallel]).T
        fit, logs = _fit_delays(times, (slowed - times) / delay, parallel, delay, source)
        waited = _share_waited(fit, (stopped - idle) / delay, parallel, idle, waited)
    total = fit.get("per_collective", 0.0)
    parts = {"per_collective": waited * total} | ({"per_resume": (1.0 - waited) * total} if waited < 1.0 else {})
    whole = replace(
        fit, parameters={**fit.parameters, **parts}, units={**fit.units, **dict.fromkeys(parts, "s")},
        spread=expect_spread(logs), notes=("iterations of ranks that share this machine",),
    )  # fmt: skip
    fits, context = {ANY: whole}, replace(platform.context, parallel={ANY: whole})
    for family in dict.fromkeys(run.workload.family for run in parallel):
        known = context.find_iteration(family, 2) or whole
        fits[family] = replace(known, spread=whole.spread, notes=whole.notes)
    return float(np.mean(np.square(logs))), replace(context, parallel=fits)


def _share_waited(fit: Fit, stops: Array, runs: Sequence[_Parallel], idle: Array, share: float) -> float:
    """Share of the delay of collectives in which the busiest rank was seen to wait; unchanged if unseen."""
    more = fit.get("per_collective", 0.0) * stops / share
    seen = np.array([run.idle for run in runs]) - idle
    weights = np.where(np.isfinite(seen), more * np.square(_weigh(runs)), 0.0)
    if not (weights * more).sum() > 0:
        return share
    # not quite none, as the next round divides by it
    return float(np.clip(np.nansum(weights * seen) / (weights * more).sum(), 0.01, 1.0))


def _weigh(runs: Sequence[_Parallel]) -> Array:
    """Weights of the times of runs that err by 10 %, and by what is left to chance in a median of few modes [1/s]."""
    return np.array([1.0 / (run.wall * np.hypot(1.0, _CHANCE * run.noise / 0.1)) for run in runs])


def _fit_delays(
    times: Array, counts: Array, runs: Sequence[_Parallel], delay: float, source: str
) -> tuple[Fit, list[float]]:
    """Scale and delay of iterations that share the machine, and errors of those left out one at a time."""
    walls = np.array([run.wall for run in runs])
    steady = walls * _weigh(runs)
    # Trusted within 20 % and three delays, where iterations err by 15 %: with a third of that, two ranks on one core
    # (tests/machines.py) are missed, and with 0.15 or 0.3 instead of 0.07 errors differ by less than 0.5 points.
    fit_runs = partial(fit_iteration, each="per_collective", prior=(1.0, delay), trust=(0.07, delay), source=source)
    fit, left_out = fit_runs(times, counts, walls, weights=steady), []
    for number, wall in enumerate(walls):
        kept = np.arange(len(walls)) != number
        other = fit_runs(times[kept], counts[kept], walls[kept], weights=steady[kept]) if kept.any() else fit
        predicted = other["scale"] * times[number] + other.get("per_collective", 0.0) * counts[number]
        left_out.append(float(np.log(wall / predicted)))
    return fit, left_out
