"""Fit the context: what real iterations add to isolated kernels and collectives, by class, family
and ranks. The last step of the calibration of a CPU.

`add_context` is the table of contents. Iterations on one rank come first: `_fit_single` tries times
and shares of the cache, and `_fit_families` fits classes of operations and families for each of
them, judged by iterations that it leaves out. Then iterations on several ranks: `_fit_parallel`
tries how much collectives disturb kernels, and `_fit_shared` fits what a collective takes longer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np

from perfkit.calibration.pace import relate_run
from perfkit.fitting import Fit, Iteration, Overlap, Pace, fit_context, fit_iteration
from perfkit.fitting.regression import solve_context
from perfkit.ground.units import Array
from perfkit.measure.records import MachineMeasurements, MeasuredIteration, MeasuredRank
from perfkit.measure.samples import load
from perfkit.models.kernels import in_context
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.machine import ANY, Context
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import Costs, price
from perfkit.prediction.predictor import predict
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan

#: Spread of a family with one run [-].
_UNKNOWN = 0.3

#: Prior spread of a family [-]; docs/formulas.md, table 9.1.
_USUAL = 0.11
#: Prior spread of Transformers, which vary less [-]; docs/formulas.md, table 9.1.
_USUAL_TRANSFORMER = 0.08
#: Number of runs that the prior is worth [-]; docs/formulas.md, table 9.1.
_WORTH = 6.0

#: Shares of the last cache that iterations may have, to try [-]. An iteration uses its data again
#: after some time, when other virtual machines have taken a part of the cache. Kernels that are
#: repeated alone keep all of it.
_HELD = (1.0, 0.5, 0.25)

#: Standard error of the logarithm of a median, over the logarithm of the ratio of the quartiles:
#: 1.25 / 1.35 over the root of seven, if a measurement has about seven independent parts [-].
_CHANCE = 0.35

#: Shares of its time that a collective in flight may take from concurrent kernels, to try [-].
_SHARED = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class _Run:
    """A measured iteration: the graph and the measured times of every rank.

    `classes` has columns for the operations of each class: isolated time with operands in caches
    and what distant operands add [s], page walks [-], measured time [s], and whether the isolated
    time is an assumption.
    """

    family: str
    graphs: tuple[Graph, ...]
    ranks: Sequence[MeasuredRank]
    classes: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def make(cls, iteration: MeasuredIteration) -> "_Run":
        """Make the graphs of a measured iteration."""
        workload, ranks = load(dict(iteration.workload)), iteration.runs
        plan = None
        if iteration.owners:
            plan = Plan.from_owners(iteration.owners, ranks=len(ranks))
        graphs = workload.graphs(len(ranks), plan)
        for rank, graph in zip(ranks, graphs, strict=True):
            count = len(rank.operation_seconds or ())
            if count != len(graph):
                raise ValueError(
                    f"iteration {iteration.name} was measured with {count} operations and its "
                    f"graph has {len(graph)}; this torch runs other operations than perfkit knows; "
                    "measure with torch 2.9 to 2.14"
                )
        return cls(workload.family, graphs, ranks)

    @property
    def wall(self) -> float:
        """Time of the slowest rank [s]."""
        return float(max(rank.median for rank in self.ranks))


def add_context(platform: Platform, measurements: MachineMeasurements) -> Platform:
    """Fit the context of iterations to a platform of isolated kernels and collectives.

    Parameters
    ----------
    platform : Platform
        With kernels, collectives and effective caches.
    measurements : MachineMeasurements
        Raw measurements; their iterations and collectives are used.

    Returns
    -------
    platform : Platform
        With context by operation class and family; unchanged without iterations.
    """
    paces = platform.context.paces
    as_measured = [_Run.make(iteration) for iteration in measurements.iterations]
    # Times at the usual pace are used if they predict left-out iterations better.
    tried = [as_measured]
    if paces:
        tried.append([_relate(run, paces) for run in as_measured])
    single, parallel = [], []
    for runs in tried:
        single.append([run for run in runs if len(run.graphs) == 1])
        parallel.append([run for run in runs if len(run.graphs) > 1])
    if not single[0]:
        return platform
    platform = replace(platform, context=_fit_single(single, platform))
    if not parallel[0]:
        return platform
    # Prior of the delay of a collective: median minus lower quartile of isolated calls.
    delays = [collective.median - collective.q1 for collective in measurements.collectives]
    delay = max(float(np.mean(delays)), 1e-5)
    return replace(platform, context=_fit_parallel(parallel, platform, delay))


def _relate(run: _Run, paces: Mapping[str, Pace]) -> _Run:
    """A measured iteration at the usual pace of the machine."""
    return replace(run, ranks=relate_run(run.ranks, run.family, paces).ranks)


def _square_errors(fits: Mapping[str, Fit]) -> float:
    """Squared errors of left-out iterations."""
    return sum(fit.n * fit.spread**2 for fit in fits.values())


# -- on one rank
# -----------------------------------------------------------------------------------------------------


def _join_times(run: _Run, costs: Costs) -> _Run:
    """Join the isolated times of all operations with the measured ones, by class."""
    seconds = np.maximum(run.ranks[0].operation_seconds or [], 1e-7)
    columns = np.stack(
        [costs.hot, costs.cold, costs.page_walks, seconds, costs.assumed[costs.classes]]
    )
    classes = {
        f"{kernel.kind}.{kernel.variant}": columns[:, places]
        for kernel, places in run.graphs[0].kernels.items()
        if kernel.kind != "collective"
    }
    return replace(run, classes=classes)


def _fit_single(tried: Sequence[Sequence[_Run]], platform: Platform) -> Context:
    """Fit the context of iterations on one rank: the times of those that were tried, and the share
    of the last cache, with which iterations that are left out are predicted best."""
    contexts = []
    for share in _HELD:
        context = platform.context
        if context.caches is not None:
            caches = context.caches.with_values({"l3_share": share})
            context = replace(context, caches=caches)
        with_share = replace(platform, context=context)
        costs = [_price_alone(run, with_share) for run in tried[0]]
        for runs in tried:
            joined = [_join_times(run, cost) for run, cost in zip(runs, costs, strict=True)]
            contexts.append(_fit_families(joined, context))
    return min(contexts, key=lambda context: _square_errors(_without_any(context.iterations)))


def _price_alone(run: _Run, platform: Platform) -> Costs:
    """Times of the operations of an iteration on one rank, alone."""
    graph = run.graphs[0]
    [costs] = price([graph], platform, dtype=graph.dtype)
    return costs


def _without_any(fits: Mapping[str, Fit]) -> dict[str, Fit]:
    """The fits of families that were measured."""
    return {family: fit for family, fit in fits.items() if family != ANY}


_Find: TypeAlias = Callable[[str], Mapping[str, float]]


def _learn(runs: Sequence[_Run], fit: Callable[..., Mapping[str, float]]) -> _Find:
    """Learn from some runs what iterations add to a class: to its variant, else to its kind, else
    nothing. `fit` is `fit_context`, or `solve_context` where only its parameters are asked for."""
    parts: dict[str, list[Array]] = {}
    for run in runs:
        for name, columns in run.classes.items():
            kind = name.partition(".")[0]
            for key in (name, kind):
                parts.setdefault(key, []).append(columns)

    @cache
    def find(name: str) -> Mapping[str, float]:
        key = name if name in parts else name.partition(".")[0]
        if key not in parts:
            return {}
        hot, cold, page_walks, seconds, assumed = np.concatenate(parts[key], axis=1)
        # an assumption is a weak prior
        pull = 0.1 if assumed.all() else 10.0
        return fit(hot, cold, page_walks, seconds, pull=pull)

    return find


def _sum(run: _Run, find: _Find) -> float:
    """Time of all operations in context [s]; it is linear in the sizes, so sums by class are
    enough."""
    total = 0.0
    for name, columns in run.classes.items():
        hot, cold, walks = columns[:3].sum(axis=1)
        added = {"launch": 0.0, **find(name)}
        added["launch"] *= columns.shape[1]
        total += float(in_context({"hot": hot, "cold": cold, "page_walks": walks}, **added))
    return total


def _fit_walls(runs: Sequence[_Run], find: _Find) -> Iteration:
    """Scale and host time of some runs, from the sums of their operations."""
    sums = np.array([_sum(run, find) for run in runs])
    counts = np.array([len(run.graphs[0]) for run in runs])
    walls = np.array([run.wall for run in runs])
    return fit_iteration(sums, counts, walls)


def _fit_families(runs: Sequence[_Run], known: Context) -> Context:
    """Fit the context of all classes, and scale, host time and spread of each family, from left-out
    iterations."""
    find: Callable[[str], Any] = _learn(runs, fit_context)
    names: dict[str, None] = {}
    families: dict[str, list[_Run]] = {}
    for run in runs:
        families.setdefault(run.family, []).append(run)
        for name in run.classes:
            kind = name.partition(".")[0]
            names.update(dict.fromkeys((name, kind)))
    fits: dict[str, Iteration] = {}
    for family, own in families.items():
        spread, bias = _UNKNOWN, 0.0
        if len(own) > 1:
            logs = []
            for run in own:
                others = [other for other in runs if other is not run]
                logs += _judge([run], others, [family])
            spread, bias = expect_spread(logs, family), float(np.mean(logs))
        fits[family] = replace(_fit_walls(own, find), spread=spread, bias=bias)
    # Spread of a family without runs: from families left out one at a time, or twice the widest of
    # two families.
    unseen = 2.0 * max(fit.spread for fit in fits.values())
    if len(families) > 2:
        logs = []
        for family, own in families.items():
            others = [run for run in runs if run.family != family]
            logs += _judge(own, others, [other for other in families if other != family])
        unseen = bound_spread(logs)
    scale, host = _average([*fits.values()])
    whole = fits[runs[0].family].with_values(
        {"scale": scale, "per_operation": host},
        stderr={},
        n=len(runs),
        spread=unseen,
        notes=("for families without calibration runs",),
    )
    for family, fit in fits.items():
        if fit.n == 1 and len(fits) > 2:  # one run is at least as good as none
            fits[family] = replace(fit, spread=unseen)
    return replace(
        known, kernels={name: find(name) for name in names}, iterations=fits | {ANY: whole}
    )


def _judge(left_out: Sequence[_Run], kept: Sequence[_Run], families: Sequence[str]) -> list[float]:
    """Errors (logarithms) of left-out runs, predicted from other runs with the average of some
    families."""
    find = _learn(kept, solve_context)
    fits = []
    for family in families:
        of_family = [run for run in kept if run.family == family]
        fits.append(_fit_walls(of_family, find))
    scale, host = _average(fits)
    errors = []
    for run in left_out:
        predicted = scale * _sum(run, find) + host * len(run.graphs[0])
        errors.append(float(np.log(run.wall / predicted)))
    return errors


def _average(fits: Sequence[Fit]) -> tuple[float, float]:
    """Average scale [-] and host time per operation [s] of some families."""
    scale = np.mean([fit["scale"] for fit in fits])
    host = np.mean([fit.get("per_operation", 0.0) for fit in fits])
    return float(scale), float(host)


def expect_spread(logs: Sequence[float], family: str = "") -> float:
    """Estimate the spread of the next run from errors of left-out runs.

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
    A few errors can be small or large by chance. So the result is the posterior mean of a variance
    under a scaled inverse chi-squared prior with the usual spread; docs/formulas.md, table 9.1.
    """
    usual = _USUAL_TRANSFORMER if family == "transformer" else _USUAL
    return float(np.sqrt((np.sum(np.square(logs)) + _WORTH * usual**2) / (len(logs) + _WORTH)))


def bound_spread(logs: Sequence[float]) -> float:
    """Find the spread whose 80 % interval holds the next run with a probability of at least 80 %.

    Parameters
    ----------
    logs : sequence of float
        Logarithms of measured over predicted times of left-out runs [-].

    Returns
    -------
    spread : float
        Standard deviation of the logarithm [-].

    Notes
    -----
    For families that were never calibrated. Split conformal prediction: the ceil(0.8 (n + 1))-th
    smallest error is taken as the 80 % quantile of absolute errors of a normal distribution.
    """
    size = np.sort(np.abs(logs))
    rank = min(len(size), int(np.ceil((len(size) + 1) * 0.8)))
    return float(size[rank - 1]) / NormalDist().inv_cdf(0.9)


# -- on several ranks
# -------------------------------------------------------------------------------------------------


def _fit_parallel(tried: Sequence[Sequence[_Run]], platform: Platform, delay: float) -> Context:
    """Fit the extra cost of collectives inside iterations, and the scale of iterations whose ranks
    share a machine."""
    runs = tried[0]
    shares = _SHARED if any(run.graphs[0].waits is not None for run in runs) else (None,)
    graphs = tuple(run.graphs for run in runs)
    found = []
    for share in shares:
        context = platform.context
        if share is not None:
            notes = (
                "share of its time that a collective in flight takes from kernels on the same core",
            )
            overlap = Overlap.build({"contention": share}, n=len(runs), notes=notes)
            context = replace(context, overlap=overlap)
        forecast = cache(partial(_forecast, graphs, replace(platform, context=context)))
        found.append([_fit_shared(own, forecast, context, delay) for own in tried])
    best = [min(pairs, key=lambda pair: pair[0])[1] for pairs in zip(*found, strict=True)]
    return min(best, key=lambda context: _square_errors(context.parallel))


def _forecast(
    runs: Sequence[tuple[Graph, ...]], platform: Platform, delay: float, waited: float
) -> tuple[Array, Array]:
    """Predict iterations whose collectives take `delay` longer, a share `waited` of it as waiting.

    Returns the time of each iteration, and the smallest waiting time of its ranks [s].
    """
    more = {"per_collective": waited * delay, "per_resume": (1.0 - waited) * delay}
    parallel = {}
    for family in dict.fromkeys(graphs[0].family for graphs in runs):
        values = {"scale": 1.0, **(platform.context.find_iteration(family, 1) or {}), **more}
        parallel[family] = Iteration.build(values)
    platform = replace(platform, context=replace(platform.context, parallel=parallel))
    with keep_quiet():  # no warnings that the platform is not calibrated yet
        found = [predict(graphs, platform) for graphs in runs]
    waits = [prediction.communication() for prediction in found]
    idle = [float((frame["exposed_s"] + frame["waiting_s"]).to_numpy().min()) for frame in waits]
    return np.array([prediction.time for prediction in found]), np.array(idle)


def _fit_shared(
    runs: Sequence[_Run],
    forecast: Callable[[float, float], tuple[Array, Array]],
    known: Context,
    delay: float,
) -> tuple[float, Context]:
    """Squared error of left-out iterations, and the context of ranks that share a machine: scale
    and delays."""
    walls = np.array([run.wall for run in runs])
    measured_idle = np.array([_find_idle(run) for run in runs])
    noise = np.array([_find_noise(run) for run in runs])
    # 10 % error of a prediction, and the error of the median
    trust = 1.0 / np.hypot(1.0, _CHANCE * noise / 0.1)
    times, idle = forecast(0.0, 1.0)
    waited = 1.0
    # delay and waiting depend on each other, since concurrent kernels can hide the waiting
    for _ in range(2):
        delayed_times, delayed_idle = forecast(delay, waited)
        fit, logs = _fit_delays(times, (delayed_times - times) / delay, walls, trust, delay)
        # Share of the delay in which the busiest rank waited; unchanged if its waiting was not
        # measured. At least 1 %, because the next round divides by it.
        total = fit.get("per_collective", 0.0)
        added_idle = total * (delayed_idle - idle) / delay / waited
        was_measured = np.isfinite(measured_idle)
        weights = np.where(was_measured, added_idle * np.square(trust / walls), 0.0)
        expected = float((weights * added_idle).sum())
        if expected > 0:
            found = float(np.nansum(weights * (measured_idle - idle)))
            waited = float(np.clip(found / expected, 0.01, 1.0))
    parts = {"per_collective": waited * total}
    if waited < 1.0:
        parts["per_resume"] = (1.0 - waited) * total
    whole = fit.with_values(
        parts,
        spread=expect_spread(logs),
        notes=("iterations of ranks that share this machine",),
    )
    context = replace(known, parallel={ANY: whole})
    fits = {ANY: whole}
    for family in dict.fromkeys(run.family for run in runs):
        fits[family] = replace(
            context.find_iteration(family, 2) or whole, spread=whole.spread, notes=whole.notes
        )
    return float(np.mean(np.square(logs))), replace(known, parallel=fits)


def _find_noise(run: _Run) -> float:
    """Logarithm of the ratio of the quartiles, of the rank where it is largest [-]."""
    return max(float(np.log(rank.q3 / rank.q1)) for rank in run.ranks)


def _find_idle(run: _Run) -> float:
    """Shortest time that a rank waited; NaN if that was not measured [s]."""
    return min(np.nan if rank.idle is None else rank.idle for rank in run.ranks)


def _fit_delays(
    times: Array, counts: Array, walls: Array, trust: Array, delay: float
) -> tuple[Iteration, list[float]]:
    """Fit scale and delay of iterations whose ranks share a machine, and their errors when left out
    one at a time."""

    def fit_runs(kept: Any) -> Iteration:
        # Trust in the prior: 0.07 lets the scale differ by 20 % and the delay by three times its
        # prior, if iterations have an error of 15 %. A third of it misses two ranks on one core
        # (tests/machines.py); with 0.15 or 0.3 errors differ by less than 0.5 points.
        return fit_iteration(
            times[kept],
            counts[kept],
            walls[kept],
            each="per_collective",
            prior=(1.0, delay),
            trust=(0.07, delay),
            weights=trust[kept],
        )

    whole = fit_runs(slice(None))
    numbers = np.arange(len(walls))
    logs = []
    for number, wall in enumerate(walls):
        other = fit_runs(numbers != number) if len(walls) > 1 else whole
        predicted = (
            other["scale"] * times[number] + other.get("per_collective", 0.0) * counts[number]
        )
        logs.append(float(np.log(wall / predicted)))
    return whole, logs
