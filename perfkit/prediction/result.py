"""The prediction of one training iteration: its time, interval, bounds, breakdown and timeline."""

import html
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from perfkit.estimates import find_transfers
from perfkit.fitting import Fit
from perfkit.gallery import load_platform
from perfkit.models.kernels import in_context
from perfkit.platform import ExtrapolationWarning, Platform
from perfkit.prediction.cost import Costs, find_iteration, price
from perfkit.prediction.host import find_host_spread, make_host, time_rank
from perfkit.prediction.programs import RankTimes
from perfkit.prediction.simulation import Timeline, simulate
from perfkit.units import Array, check_choice, check_positive, format_time
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.transformer import Transformer

if TYPE_CHECKING:
    import altair
    import pandas
    import polars

__all__ = ["Prediction", "predict"]

#: What a class of operations is limited by, in words.
_BOUND = {
    "gemm": "GEMM-bound", "bmm": "GEMM-bound", "attention": "attention-bound", "elementwise": "memory-bound",
    "rowwise": "memory-bound", "copy": "memory-bound", "embedding_forward": "embedding-bound",
    "embedding_backward": "embedding-bound", "embedding_update": "embedding-bound",
    "collective": "communication-bound", "transfer": "transfer-bound", "host": "host-bound",
    "waiting": "imbalance-bound",
}  # fmt: skip

#: Doubt of kernels measured alone, inside an iteration on a platform never calibrated with one: the root mean square of
#: what published active times of V100, TITAN Xp and P100 leave (-2.5, -6.5 and -12 %, benchmarks/gpu_iterations.py).
_CONTEXT = 0.08


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predicted time of one training iteration and where it goes.

    Parameters
    ----------
    workload : DLRM or Transformer
        What was priced.
    platform : Platform
        On what.
    ranks : int
        Ranks that take part [-].
    time : float
        Steady-state time from one iteration to the next [s].
    spread : float
        Standard deviation of the logarithm of the time [-].
    parts : mapping of (str, str) to (int, float)
        Operations and time of the slowest rank by phase and class; the times sum to `time` [s].
    lower_bound : float
        Time of the busiest single resource, no dependency honoured [s].
    serial : float
        Time of everything one after another, waiting aside [s].
    latency : float
        Time of a first iteration from a common start [s].
    unmodelled : mapping of str to float
        Operations without a model of their own and the time they were given as memory traffic [s].
    warnings : tuple of str
        What to know before trusting the number.
    """

    workload: DLRM | Transformer
    platform: Platform
    ranks: int
    time: float
    spread: float
    parts: Mapping[tuple[str, str], tuple[int, float]]
    lower_bound: float
    serial: float
    latency: float
    unmodelled: Mapping[str, float]
    warnings: tuple[str, ...]
    _timeline: Timeline = field(repr=False)
    _graphs: tuple[Graph, ...] = field(repr=False)

    def interval(self, level: float = 0.8) -> tuple[float, float]:
        """Range that holds the measured time in a share of cases.

        Parameters
        ----------
        level : float
            That share, between 0 and 1 [-].

        Returns
        -------
        low, high : float
            Ends of the range [s].

        Raises
        ------
        ValueError
            For a level outside 0 to 1.
        """
        check_positive("level", level)
        if level >= 1:
            raise ValueError(f"level is {level!r}; it must be between 0 and 1; 0.8 holds four in five measurements")
        reach = math.exp(NormalDist().inv_cdf(0.5 + level / 2) * self.spread)
        return self.time / reach, self.time * reach

    @property
    def bottleneck(self) -> str:
        """What sets the pace, in words: the host where a device waits for it, else the class with the largest part."""
        device = self.time - self.parts.get(("", "host"), (0, 0.0))[1]
        if self.lower_bound > max(1.02 * device, 0.98 * self.time):
            return _BOUND["host"]
        totals: dict[str, float] = {}
        for (_, kind), (_, seconds) in self.parts.items():
            totals[_BOUND[kind]] = totals.get(_BOUND[kind], 0.0) + seconds
        return max(totals, key=lambda name: totals[name])

    def breakdown(self) -> "polars.DataFrame":
        """Time of the slowest rank by phase and operation class; sums to the total.

        Returns
        -------
        frame : polars.DataFrame
            phase, kind, operations [-], time_s [s], share [-].
        """
        import polars

        rows = [
            {"phase": phase, "kind": kind, "operations": count, "time_s": seconds, "share": seconds / self.time}
            for (phase, kind), (count, seconds) in self.parts.items()
        ]
        return polars.DataFrame(rows, orient="row").sort("time_s", descending=True)

    def timeline(self) -> "polars.DataFrame":
        """Start and end of every operation of one steady-state iteration.

        Returns
        -------
        frame : polars.DataFrame
            rank, stream, operation, name, kind, phase, module, start_s [s], end_s [s].
        """
        import polars

        columns: dict[str, list[Any]] = {
            key: [] for key in ("rank", "stream", "operation", "name", "kind", "phase", "module", "start_s", "end_s")
        }
        for rank, (graph, starts, ends) in enumerate(
            zip(self._graphs, self._timeline.starts, self._timeline.ends, strict=False)
        ):
            for index, (name, kind, _, phase, module) in enumerate(graph.labels):
                stream = "communication" if kind == "collective" else "compute"
                row = (rank, stream, index, name, kind, phase, module, float(starts[index]), float(ends[index]))
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
        return polars.DataFrame(columns)

    def table(self) -> "polars.DataFrame":
        """The breakdown; the same as `breakdown`.

        Returns
        -------
        frame : polars.DataFrame
            See `breakdown`.
        """
        return self.breakdown()

    def chart(self, kind: str = "breakdown") -> "altair.Chart":
        """A picture of the prediction.

        Parameters
        ----------
        kind : str
            ``breakdown`` or ``timeline``.

        Returns
        -------
        chart : altair.Chart
            Ready to be shown or saved.

        Raises
        ------
        ValueError
            For another kind.
        """
        from perfkit import plots

        check_choice("kind", kind, ("breakdown", "timeline"))
        return plots.breakdown_bars(self.breakdown()) if kind == "breakdown" else plots.timeline_lanes(self.timeline())

    def to_pandas(self) -> "pandas.DataFrame":
        """The breakdown as a pandas frame.

        Returns
        -------
        frame : pandas.DataFrame
            See `breakdown`.
        """
        import pandas

        return pandas.DataFrame(self.breakdown().to_dict(as_series=False))

    def explain(self) -> str:
        """The prediction in words: what was priced, where the time goes, between which bounds it lies.

        Returns
        -------
        text : str
            Several lines.
        """
        lines = [repr(self), f"  at least {format_time(self.lower_bound)} (busiest resource alone), "
                 f"{format_time(self.serial)} if nothing overlapped"]  # fmt: skip
        largest = sorted(self.parts.items(), key=lambda item: -item[1][1])[:6]
        for (phase, kind), (count, seconds) in largest:
            label = f"{phase} {kind}".strip().replace("_", " ")
            lines.append(f"  {seconds / self.time:6.1%}  {format_time(seconds):>9}  {label} ({count} operations)")
        lines += [f"  not modelled, timed as memory traffic: {n} {format_time(t)}" for n, t in self.unmodelled.items()]
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])

    def __repr__(self) -> str:
        low, high = self.interval(0.8)
        where = f"{self.ranks} of {self.platform.network.ranks} ranks of {self.platform.name}"
        unit = format_time(self.time)
        interval = f"({format_time(low)}–{format_time(high)})"
        return f"{self.workload.description} on {where}: {unit} {interval}, {self.bottleneck}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.explain())}</pre>"


def _account(
    graph: Graph, times: RankTimes, durations: Array, waits: Array, period: float
) -> dict[tuple[str, str], tuple[int, float]]:
    """Time of one rank by phase and class, with waiting and host time, so that the parts sum to the period."""
    seconds, collectives = times.seconds.copy(), times.collectives
    seconds[collectives] = durations
    parts: dict[tuple[str, str], tuple[int, float]] = {}
    for (_, kind, _, phase, _), time in zip(graph.labels, seconds.tolist(), strict=True):
        count, total = parts.get((phase, kind), (0, 0.0))
        parts[phase, kind] = (count + 1, total + time)
    waiting = float(waits[collectives].sum())
    if waiting > 1e-12:
        parts["", "waiting"] = (len(collectives), waiting)
    rest = period - sum(time for _, time in parts.values())
    if abs(rest) > 1e-12 * period:
        parts["", "host"] = (len(graph), rest)
    return parts


def predict(
    workload: DLRM | Transformer, platform: Platform | str | Path, *, ranks: int = 1, plan: Plan | None = None
) -> Prediction:
    """Predict the time of one training iteration and what limits it.

    Parameters
    ----------
    workload : DLRM or Transformer
        The iteration; its batch is over all ranks.
    platform : Platform, str or Path
        A platform, a name of the gallery or a file.
    ranks : int
        Ranks that take part [-].
    plan : Plan, optional
        Placement of embedding tables; by default they are dealt out in turn.

    Returns
    -------
    prediction : Prediction
        Time, interval, bounds, breakdown and timeline.

    Raises
    ------
    ValueError
        For more ranks than the platform has, a batch that does not divide, or an unknown platform.

    Examples
    --------
    >>> import perfkit as pk
    >>> r = pk.predict(pk.Transformer.bert("bert-large", batch=8, sequence=512, dtype="bf16"), "h100-sxm-8")
    >>> r.lower_bound <= r.time <= r.serial * 1.001
    True
    """
    if not isinstance(workload, DLRM | Transformer):
        raise ValueError(
            f"workload is {workload!r}; it must be a DLRM or a Transformer, such as Transformer.bert(batch=8)"
        )
    where = load_platform(platform)
    ranks = int(check_positive("ranks", ranks, integer=True))
    if ranks > where.network.ranks:
        raise ValueError(
            f"ranks is {ranks}; platform {where.name!r} has {where.network.ranks}; take fewer or another platform"
        )
    check_choice("dtype", workload.dtype, where.device.peaks)
    graphs = workload.graphs(ranks, plan, accelerator=where.device.kind != "cpu")
    alike = all(graph is graphs[0] for graph in graphs)
    graphs = graphs[:1] if alike else graphs
    costs = [price(graph, where, dtype=workload.dtype) for graph in graphs]
    whole = find_iteration(where, workload.family, ranks)
    scale, host = (whole["scale"] if whole else 1.0), make_host(where, whole)
    durations, notes = _collective_times(graphs[0], where, ranks)
    durations = scale * durations + (whole.get("per_collective", 0.0) if whole and ranks > 1 else 0.0)
    times = [time_rank(graph, scale * c.seconds, where, whole) for graph, c in zip(graphs, costs, strict=True)]
    timeline = simulate(times, durations, host)
    busy = [float(t.seconds.sum()) for t in times]
    slowest = int(np.argmax(busy))
    parts = _account(graphs[slowest], times[slowest], durations, timeline.waits[slowest], timeline.period)
    hosts = float(sum(part.sum() for part in times[slowest].issue(host)))
    notes += _notes(where, workload.family, ranks, costs[slowest])
    if notes:
        warnings.warn("; ".join(notes), ExtrapolationWarning, stacklevel=2)
    return Prediction(
        workload=workload, platform=where, ranks=ranks, time=timeline.period,
        spread=_spread(where, whole, parts, costs[slowest], times, durations, timeline.period), parts=parts,
        lower_bound=max(busy[slowest], float(durations.sum()), hosts if host.asynchronous else 0.0),
        serial=busy[slowest] + float(durations.sum()) + hosts, latency=timeline.latency,
        unmodelled=costs[slowest].unmodelled, warnings=notes, _timeline=timeline, _graphs=graphs,
    )  # fmt: skip


def _collective_times(graph: Graph, platform: Platform, ranks: int) -> tuple[Array, tuple[str, ...]]:
    """Time of each collective of an iteration, and what to know about it."""
    durations, notes = np.zeros(len(graph.collectives)), []
    for number, place in enumerate(graph.collectives):
        operation = graph[int(place)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtrapolationWarning)
            estimate = platform.collective(operation.name, max(operation.features["nbytes"], 1.0), ranks=ranks)
        context = platform.context.get(f"collective.{operation.name}")
        sizes = {"hot": np.asarray(estimate.time), "cold": np.asarray(0.0), "page_walks": np.asarray(0.0)}
        durations[number] = in_context(sizes, **(context if context is not None else {}))
        notes += list(estimate.warnings)
    return durations, tuple(dict.fromkeys(notes))


def _notes(platform: Platform, family: str, ranks: int, costs: Costs) -> tuple[str, ...]:
    """What a reader should know before trusting the number."""
    notes = []
    if platform.context and f"iteration.{family}" not in platform.context:
        notes.append(f"{platform.name} was never calibrated with {family} iterations; the interval is wider")
    if platform.context and ranks > 1 and f"iteration.{family}.parallel" not in platform.context:
        notes.append(f"{platform.name} was never calibrated with {family} iterations on several ranks")
    unmodelled = sum(costs.unmodelled.values())
    if unmodelled > 0.02 * float(costs.seconds.sum()):
        notes.append(f"{', '.join(costs.unmodelled)} have no model and are timed as memory traffic")
    notes += dict.fromkeys(text for fit in platform.kernels.values() for text in find_transfers("kernels", fit))
    return tuple(notes)


def _spread(
    platform: Platform,
    whole: Fit | None,
    parts: Mapping[tuple[str, str], tuple[int, float]],
    costs: Costs,
    times: Sequence[RankTimes],
    durations: Array,
    period: float,
) -> float:
    """Spread of the logarithm of the total.

    Where whole iterations were calibrated, the errors of those left out say it all: what a class gets wrong and what
    varies at random. Else the systematic errors of the classes, independent where they were fitted and alike where
    they are only assumed, 30 % on what other ranks add, what the doubt of the host overheads comes to, and what any
    iteration adds to kernels measured alone.
    """
    if whole is not None:
        return whole.spread
    slowest = max(times, key=lambda rank: float(rank.seconds.sum()))
    errors = costs.spread * slowest.seconds / period
    _, classes = np.unique(costs.spread, return_inverse=True)
    each = np.bincount(classes, weights=np.where(costs.assumed, 0.0, errors))
    own = float(errors[costs.assumed].sum() ** 2 + (each**2).sum())
    waits = sum(seconds for (_, kind), (_, seconds) in parts.items() if kind in ("waiting", "collective"))
    alone = 0.0 if platform.context else _CONTEXT * min(float(slowest.seconds.sum()) / period, 1.0)
    return math.hypot(math.sqrt(own), 0.3 * waits / period, alone, find_host_spread(platform, times, durations))
