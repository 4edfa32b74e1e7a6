"""The prediction of one training iteration: its time, interval, bounds, breakdown and timeline."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from perfkit.ground.files import write_text
from perfkit.ground.results import Picture, Sections, Table, Tabular
from perfkit.ground.units import check_choice, check_positive, check_type, format_time, rank_largest
from perfkit.platform.estimates import check_time, find_interval, warn_once
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction import accounts
from perfkit.prediction.cost import join_host, list_attention, price, time_rank
from perfkit.prediction.events import make_events
from perfkit.prediction.memory import Memory, find_shortage, measure_memory
from perfkit.prediction.micro_batches import join_hosts
from perfkit.prediction.ranks import Work, Workload, cast_ranks, find_graphs, time_collectives
from perfkit.prediction.sensitivity import find_sensitivity
from perfkit.prediction.simulation import Timeline, simulate
from perfkit.prediction.stages import find_stages
from perfkit.prediction.uncertainty import CONTEXT, find_host_error, find_spread, list_notes
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.strategy import Strategy

#: Pictures of an iteration.
CHARTS = ("breakdown", "timeline", "modules")
#: What is said where the host sets the pace.
_ASSUMED = "the host sets the pace, and how fast it is was assumed from another machine"


@dataclass(frozen=True, eq=False)
class Prediction(Tabular):
    """Predicted time of one training iteration and where it goes.

    Parameters
    ----------
    workload : Workload or Graph
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
    device_time : float
        Steady-state time if the host had launched everything before [s].
    fixed_time : float
        What the kernels of the slowest rank take whatever their size [s].
    execution : str
        ``eager``, ``compiled`` or ``graphs``.
    unmodelled : mapping of str to float
        Operations without a model of their own and the time they were given as memory traffic [s].
    warnings : tuple of str
        What to know before trusting the number.
    """

    workload: Workload | Graph
    platform: Platform
    ranks: int
    time: float
    spread: float
    parts: Mapping[tuple[str, str], tuple[int, float]]
    lower_bound: float
    serial: float
    latency: float
    device_time: float
    fixed_time: float
    execution: str
    unmodelled: Mapping[str, float]
    warnings: tuple[str, ...]
    _timeline: Timeline = field(repr=False)
    _again: Callable[[Platform], "Prediction"] = field(repr=False)

    def __post_init__(self) -> None:
        parts = [seconds for _, seconds in self.parts.values()]
        check_time(f"{self.workload.description} on {self.platform.name!r}", self.time, self.spread, parts)

    def interval(self, level: float = 0.8) -> tuple[float, float]:
        """Range that holds the measured time in a share of cases.

        Parameters
        ----------
        level : float
            That share, between 0 and 1 [-].

        Returns
        -------
        low, high : float
            Ends of the range [s]."""
        return find_interval(self.time, self.spread, level)

    @property
    def bottleneck(self) -> str:
        """What sets the pace: data or the host where a device waits for them, else the class with the largest part."""
        if ("", "loading") in self.parts:
            return "input-bound"
        device = self.time - accounts.sum_kinds(self.parts, "host", "handover")
        if self.lower_bound > max(accounts.PACE * device, 0.82 * self.time):  # both together take 1.19 at most
            return "host-bound"
        totals: dict[str, float] = {}
        for (_, kind), (_, seconds) in self.parts.items():
            bound = f"{accounts.BOUND.get(kind, 'memory')}-bound"
            totals[bound] = totals.get(bound, 0.0) + seconds
        return list(totals)[rank_largest(list(totals.values()))[0]]

    def breakdown(self) -> Table:
        """Time of the slowest rank by phase and operation class; sums to the total.

        Columns phase, kind, operations [-], time_s [s], share [-].
        """
        import polars

        rows = [(*key, count, seconds, seconds / self.time) for key, (count, seconds) in self._largest]
        return polars.DataFrame(rows, schema=("phase", "kind", "operations", "time_s", "share"), orient="row")

    table = breakdown  # what all results have

    def timeline(self, level: str = "operation", *, depth: int | None = None) -> Table:
        """Start and end of every operation, module or stage of one steady-state iteration; alike ranks are listed once.

        Parameters
        ----------
        level : str
            ``operation``; ``module`` or ``stage`` (forward, backward, update): from its first operation to its last.
        depth : int, optional
            Names of a module's path that are told apart; all of them, unless given [-].

        Returns
        -------
        frame : polars.DataFrame
            rank, stream, operation, name, kind, phase, module, start_s [s], end_s [s]; of modules and stages rank,
            stream, phase, module, operations [-], start_s [s], end_s [s]. What is no operation comes last, without a
            number: ``handover`` (host and device wait for one another at times), and ``loading``.
        """
        check_choice("level", level, ("operation", "module", "stage"))
        frame = accounts.list_operations(self._timeline.lanes)
        return frame if level == "operation" else accounts.list_spans(frame, level, depth)

    def modules(self, depth: int | None = 2, *, rank: int | None = None) -> Table:
        """Time of every module, forward, backward and update, with the idle time of the device before it.

        Parameters
        ----------
        depth : int or None
            Names of a module's path that are told apart; None for all of them [-].
        rank : int, optional
            Which rank; the one with most work, unless given [-].

        Returns
        -------
        frame : polars.DataFrame
            module (empty for what belongs to none, and between iterations), operations [-], forward_s, backward_s,
            update_s [s], idle_s (part of those three) [s], share [-], in program order; the three sum to the time, with
            rows of their own for what `timeline` has last, under update.
        """
        check_type("rank", rank, int | None)
        lanes = self._timeline.lanes
        busiest = lanes[rank_largest([float(lane.seconds.sum()) for lane in lanes])[0]]
        found = [busiest] if rank is None else [lane for lane in lanes if rank in lane.kind.ranks]
        if not found:
            raise ValueError(f"rank is {rank}; the ranks are 0 to {self.ranks - 1}; choose one of these")
        return accounts.sum_modules(found[0], depth)

    def idle(self) -> Table:
        """Time in which compute streams work, and are idle, by cause; alike ranks are listed once.

        Columns rank, ranks (so many are alike) [-]; busy_s; stolen_s (what collectives in flight took from operations
        on the same core); host_s (nothing was launched, with handover and loading); communication_s (a collective that
        had to end was in flight); waiting_s (it waited for other ranks) [s]; those of a rank sum to the time.
        """
        return self._tabulate(accounts.sum_idle)

    def critical_path(self) -> Table:
        """The chain of operations that sets the time: each starts when the previous one ends, on any rank and stream.

        Columns rank, stream (``host`` while an operation is launched), operation, name, kind, phase, module, start_s,
        end_s [s]; ``handover`` and ``loading`` are no operations and stand at the end; the steps sum to the time.
        """
        return accounts.find_critical_path(self._timeline.lanes)

    def save_trace(self, path: str | Path, *, ranks: int = 8) -> Path:
        """Write the timeline as a Chrome trace, which ui.perfetto.dev opens.

        Parameters
        ----------
        path : str or Path
            File to write, such as ``iteration.json``.
        ranks : int
            Most ranks written; where there are more, some of every kind [-].
        """
        most, lanes = check_positive("ranks", ranks, integer=True), self._timeline.lanes
        order = sorted((n, rank, index) for index, lane in enumerate(lanes) for n, rank in enumerate(lane.kind.ranks))
        events = make_events(lanes, dict(sorted(row[1:] for row in order[:most])))
        lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
        notes = json.dumps({"prediction": repr(self)}, ensure_ascii=False)
        return write_text(path, f'{{"displayTimeUnit": "ms", "otherData": {notes}, "traceEvents": [\n{lines}\n]}}\n')

    def memory(self) -> Memory:
        """Memory of the fullest rank by what it holds: parameters, gradients, states, activations and more."""
        graphs = [lane.kind.graph for lane in self._timeline.lanes]
        return measure_memory(graphs, self.platform, getattr(self.workload, "optimizer", "sgd"))

    throughput, mfu, cost = property(accounts.find_throughput), property(accounts.find_mfu), accounts.find_cost
    sensitivity = find_sensitivity

    @property
    def fits(self) -> bool | None:
        """Whether every rank has the memory; None where that of the device is not known."""
        return self.memory().fits

    @property
    def _largest(self) -> list[tuple[tuple[str, str], tuple[int, float]]]:
        """Parts, the largest first."""
        parts = list(self.parts.items())
        return [parts[place] for place in rank_largest([seconds for _, (_, seconds) in parts])]

    def _tabulate(self, account: Callable[[accounts.Lane], Mapping[str, float]]) -> Table:
        """A row for every kind of rank."""
        import polars

        kinds = [(lane, lane.kind.ranks) for lane in self._timeline.lanes]
        return polars.DataFrame([{"rank": own[0], "ranks": len(own), **account(lane)} for lane, own in kinds])

    def communication(self) -> Table:
        """What ranks spend on collectives, and how much of it operations hide; alike ranks are listed once.

        Columns rank, ranks (so many are alike) [-]; total_s, with a collective in flight; exposed_s, while the compute
        stream is idle, or taken from operations on the same core; overlapped_s, the rest of it; waiting_s, for other
        ranks before a collective [s]; exposed_share, waiting_share of the iteration [-].
        """
        return self._tabulate(accounts.sum_communication)

    def chart(self, kind: str = "breakdown") -> Picture:
        """A picture of the prediction.

        Parameters
        ----------
        kind : str
            ``breakdown``, ``timeline`` or ``modules``.

        Returns
        -------
        chart : altair.Chart or LayerChart
            Ready to be shown or saved."""
        from perfkit import plots

        check_choice("kind", kind, CHARTS)
        if kind == "modules":
            return plots.module_bars(self.modules())
        return plots.breakdown_bars(self.breakdown()) if kind == "breakdown" else plots.timeline_lanes(self.timeline())

    @property
    def _unhidden(self) -> str:
        return f"if nothing overlapped{' nor waited for other ranks' * (self.ranks > 1 and self.serial < self.time)}"

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        low, high = map(format_time, self.interval())
        times = {"time of an iteration": self.time, "the busiest resource alone": self.lower_bound}
        times |= {self._unhidden: self.serial, "if the host were never late": self.device_time}
        rows = [(name, format_time(seconds)) for name, seconds in times.items()]
        rows += [("80% interval", f"{low}–{high}"), ("bottleneck", self.bottleneck), ("memory", repr(self.memory()))]
        yield "Time and memory", [("quantity", "value"), *rows]
        yield from (("", self.chart(kind)) for kind in CHARTS)
        yield "Where the time goes", self.breakdown()
        yield "", self.platform

    def explain(self) -> str:
        """The prediction in words: what was priced, where the time goes, between which bounds it is."""
        lines = [repr(self), f"  at least {format_time(self.lower_bound)} (busiest resource alone), "
                 f"{format_time(self.serial)} {self._unhidden}; {self.memory()}"]  # fmt: skip
        for (phase, kind), (count, seconds) in self._largest[:6]:
            label = f"{phase} {kind}".strip().replace("_", " ") + f" ({count} operation{'s' * (count != 1)})"
            lines.append(f"  {seconds / self.time:6.1%}  {format_time(seconds):>9}  {label}")
        if self.execution == "graphs":
            share, fixed = self.fixed_time / self.time, format_time(self.fixed_time)
            lines.append(f"  {share:6.1%}  {fixed:>9}  of it fixed time of kernels, however small")
        lines += [f"  not modelled, timed as memory traffic: {n} {format_time(t)}" for n, t in self.unmodelled.items()]
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])

    def __repr__(self) -> str:
        time, low, high = map(format_time, (self.time, *self.interval(0.8)))
        where, what = f"{self.ranks} of {self.platform.network.ranks} ranks of {self.platform.name}", self.workload
        dtype = what.dtype + (" autocast" if getattr(what, "mixed", False) else "")
        kernels = "/".join(list_attention(self._timeline.lanes[0].kind.graph, self.platform))
        attention = f"{kernels} attention" * bool(kernels)
        words = (f"{what.description} on {where}", dtype, getattr(what, "optimizer", ""), self.execution, attention)
        short = "" if self.fits is not False else f", {self.memory()}"
        return f"{', '.join(filter(None, words))}: {time} ({low}–{high}), {self.bottleneck}{short}"


def predict(
    workload: Work, platform: Platform | str | Path, *, ranks: int | None = None, plan: Plan | None = None,
    slowdown: Mapping[int, float] | None = None, execution: str | None = None, loading: float = 0.0,
    strategy: Strategy | None = None,
) -> Prediction:  # fmt: skip
    """Predict the time of one training iteration and what limits it.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        The iteration: a DLRM, Transformer or Net, whose batch is over all ranks; one graph for all ranks; or one for
        each.
    platform : Platform, str or Path
        A platform, a name of the gallery or a file.
    ranks : int, optional
        Ranks that take part: one, unless given, and those a graph was captured for [-].
    plan : Plan, optional
        Placement of embedding tables; round-robin by default.
    slowdown : mapping of int to float, optional
        How many times longer the operations of a rank take, by rank: stragglers [-].
    execution : str, optional
        ``eager``; ``compiled``, where element-wise work of the forward and backward pass is merged into fewer kernels;
        or ``graphs``, where the host launches all kernels of a GPU at once. As recorded, unless given: mostly eager.
    loading : float, optional
        Time of a rank's data loader for the batch of an iteration, beside the iteration before [s].
    strategy : Strategy, optional
        How ranks share a Transformer; what it says of sharing, checkpoints and micro-batches is then not asked for.

    Returns
    -------
    prediction : Prediction
        Time, interval, bounds, breakdown and timeline.

    Raises
    ------
    ValueError
        For more ranks than the platform has, a batch that does not divide, an unknown platform, or graphs that do not
        belong together.

    Examples
    --------
    >>> import perfkit as pk
    >>> r = pk.predict(pk.Transformer.bert("bert-base", batch=2, sequence=128), "zen3-2")
    >>> r.lower_bound <= r.time <= r.serial * 1.001
    True
    """
    settings: Any = {"plan": plan, "slowdown": slowdown, "execution": execution, "loading": loading}
    where, again = load_platform(platform), partial(predict, workload, ranks=ranks, strategy=strategy, **settings)
    check_type("slowdown", slowdown, Mapping | None)
    loading = check_positive("loading", loading, zero=True)
    find = find_graphs if strategy is None else partial(find_stages, strategy)
    what, graphs, count = find(workload, where, ranks, plan, execution)
    kinds = cast_ranks(graphs, count, slowdown or {})
    costs = price([kind.graph for kind in kinds], where, dtype=what.dtype, ranks=count)
    whole, device = where.context.find_iteration(what.family, count), where.device.kind != "cpu"
    scale, delay = (whole["scale"], whole.get("per_collective", 0.0) * (count > 1)) if whole else (1.0, 0.0)
    isolated, notes = time_collectives(kinds, where)
    durations = [scale * own + delay for own in isolated]
    times = [time_rank(kind, scale * own.seconds, where, whole) for kind, own in zip(kinds, costs, strict=True)]
    times = [join_hosts(*own, whole) for own in zip(times, durations, strict=True)] if strategy else times
    overlap, error = where.context.overlap, find_host_error(where)
    # no overlap on a core where it was not measured; on a GPU what was fitted to other families does not hold
    shared = overlap["contention"] if overlap and (whole or not device) else float(not device)
    slower = () if whole and (not device or "per_operation" in whole) else (error, 1 / error)
    timeline = simulate(times, durations, device=device, contention=shared, slower=slower)
    natural, free = timeline.period, device and not any(len(kind.graph.transfers) for kind in kinds)  # else it stops
    paces = [float(free * join_host(timeline.device, x * max(timeline.hosts), whole)) for x in (1.0, error, 1 / error)]
    timeline.extend(handover=paces[0], loading=loading)
    timeline.slower = [max(pair) for pair in zip(timeline.slower, paces[1:], (loading, loading), strict=False)]
    slowest = rank_largest([float(own.seconds.sum()) for own in times])[0]
    mine, cost, lane = times[slowest], costs[slowest], timeline.measure(slowest)
    parts = accounts.split_period(lane)
    busy, hosts, moving = accounts.sum_resources(lane, mine)
    notes += tuple(dict.fromkeys(note for kind in kinds for note in kind.graph.notes))
    notes += list_notes(where, what.family, count, cost, lane.kind.graph)
    notes += find_shortage([kind.graph for kind in kinds], where, getattr(what, "optimizer", "sgd"))
    warn_once(notes, 3)
    if natural > accounts.PACE * timeline.device and {q.kind for q in where.host.values()} & {"assumed"}:
        notes += (f"{_ASSUMED}; the device alone takes {format_time(timeline.device)}",)
    spread = whole.spread if whole else CONTEXT if device or not where.context else 0.0
    if timeline.slower:
        waits = accounts.sum_kinds(parts, "waiting", "collective")
        around = find_spread(cost, mine.seconds, waits, timeline.period, spread)
        late = accounts.sum_kinds(parts, "host") / timeline.period * math.log(error) * (strategy is not None)
        spread = math.hypot(around, late, math.log(timeline.slower[0] / timeline.slower[1]) / 2)
    return Prediction(
        workload=what, platform=where, ranks=count, time=timeline.period, spread=spread, parts=parts,
        lower_bound=min(max(busy, float(moving.max()), hosts if device else 0.0, loading), timeline.period),
        serial=busy + float(moving.sum()) + hosts + loading, latency=timeline.latency + loading,
        device_time=timeline.device, fixed_time=cost.fixed, execution=lane.kind.graph.execution,
        unmodelled=cost.unmodelled, warnings=notes, _timeline=timeline, _again=again,
    )  # fmt: skip
