"""The prediction of one training iteration: its time, interval, bounds, breakdown and timeline."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from perfkit.ground.results import Picture, Sections, Table, Tabular, write_cell
from perfkit.ground.targets import check_target, write_text
from perfkit.ground.units import check_choice, check_positive, check_type, format_time, rank_largest
from perfkit.platform.estimates import check_time, find_interval, warn_once
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction import accounts, uncertainty
from perfkit.prediction.breakdown import PACE, Breakdown, break_down, find_bottleneck
from perfkit.prediction.cost import join_host, list_attention, price
from perfkit.prediction.memory import Memory, find_shortage, measure_memory
from perfkit.prediction.micro_batches import join_hosts
from perfkit.prediction.ranks import (
    Work,
    Workload,
    find_graphs,
    group_identical_ranks,
    time_collectives,
    time_rank,
)
from perfkit.prediction.simulation import Timeline, simulate
from perfkit.prediction.stages import find_stages
from perfkit.workloads.graph import STAGE_HOST, Graph
from perfkit.workloads.placement import Plan
from perfkit.workloads.strategy import Strategy

#: Pictures of an iteration.
CHARTS = {"breakdown": "breakdown_bars", "timeline": "timeline_lanes", "modules": "module_bars"}
#: Warning where the host sets the pace.
_ASSUMED = "the host sets the pace, and how fast it is was assumed from another machine"


@dataclass(frozen=True, eq=False)
class Prediction(Tabular):
    """Predicted time of one training iteration and where it goes.

    Parameters
    ----------
    workload : Workload or Graph
        What was priced.
    platform : Platform
        Where it runs.
    ranks : int
        Ranks that take part [-].
    time : float
        Steady-state time from one iteration to the next [s].
    spread : float
        Standard deviation of the logarithm of the time [-].
    causes : Breakdown
        Time of the slowest rank by cause; all causes sum to `time`.
    lower_bound : float
        Time of the busiest single resource, without any dependency [s].
    serial : float
        Time of everything one after another, without waiting [s].
    latency : float
        Time of a first iteration from a common start [s].
    device_time : float
        Steady-state time if the host had launched everything before [s].
    fixed_time : float
        Time that the kernels of the slowest rank take whatever their size [s].
    execution : str
        ``eager``, ``compiled`` or ``graphs``.
    unmodelled : mapping of str to float
        Operations without a model, which are timed by the bytes they move, and their time [s].
    warnings : tuple of str
        What to know before trusting the number.
    """

    workload: Workload | Graph
    platform: Platform
    ranks: int
    time: float
    spread: float
    causes: Breakdown
    lower_bound: float
    serial: float
    latency: float
    device_time: float
    fixed_time: float
    execution: str
    unmodelled: Mapping[str, float]
    warnings: tuple[str, ...]
    _timeline: Timeline = field(repr=False)
    _repredict: Callable[[Platform], "Prediction"] = field(repr=False)

    def __post_init__(self) -> None:
        parts = [seconds for _, seconds in self.parts.values()]
        check_time(
            f"{self.workload.description} on {self.platform.name!r}", self.time, self.spread, parts
        )

    def interval(self, level: float = 0.8) -> tuple[float, float]:
        """Range that holds the measured time with the probability `level` [s].

        Parameters
        ----------
        level : float
            Probability between 0 and 1 [-].
        """
        return find_interval(self.time, self.spread, level)

    @property
    def bottleneck(self) -> str:
        """What sets the pace: data or the host if the device waits for them, else the class with
        the largest part."""
        return _find_bottleneck(self.causes, self._timeline)

    @cached_property
    def parts(self) -> Mapping[tuple[str, str], tuple[int, float]]:
        """Number and time of the operations of the slowest rank, by phase and class; the times sum
        to `time` [s]."""
        return self.causes.list_parts()

    def breakdown(self) -> Table:
        """Time of the slowest rank by phase and operation class; sums to the total.

        Columns phase, kind, operations [-], time_s [s], share [-].
        """
        import polars

        rows = [
            (*key, count, seconds, seconds / self.time) for key, (count, seconds) in self._largest
        ]
        return polars.DataFrame(
            rows, schema=("phase", "kind", "operations", "time_s", "share"), orient="row"
        )

    table = breakdown  # what all results have

    def timeline(self, level: str = "operation", *, depth: int | None = None) -> Table:
        """Start and end of every operation, module or stage of one steady-state iteration.

        Ranks that do the same are listed once. The last operation of any rank ends with the
        iteration, at `time`. A rank that has less to do than others begins the iteration early;
        what it does before the others begin has times below zero.

        Parameters
        ----------
        level : str
            ``operation``; ``module`` or ``stage`` (forward, backward, update): from its first
            operation to its last.
        depth : int, optional
            How many names of a module's path count; all of them, unless given [-].

        Returns
        -------
        frame : polars.DataFrame
            rank, stream, operation, name, kind, phase, module, start_s [s], end_s [s]; of modules
            and stages rank, stream, phase, module, operations [-], start_s [s], end_s [s]. The last
            rows are no operations and have no number: ``host_device_synchronization``, when
            host and device wait for each other, and ``loading``.
        """
        check_choice("level", level, ("operation", "module", "stage"))
        frame = accounts.list_operations(self._timeline.rank_timelines)
        return frame if level == "operation" else accounts.list_spans(frame, level, depth)

    def modules(self, depth: int | None = 2, *, rank: int | None = None) -> Table:
        """Time of every module, forward, backward and update, with the idle time of the device
        before it.

        Parameters
        ----------
        depth : int or None
            How many names of a module's path count; None for all of them [-].
        rank : int, optional
            Which rank; the one with the most work, unless given [-].

        Returns
        -------
        frame : polars.DataFrame
            module (empty for operations of no module and for idle time between iterations),
            operations [-], forward_s, backward_s, update_s [s], idle_s (part of those three) [s],
            share [-], in program order. The three sum to the time; ``host_device_synchronization`` and
            ``loading`` have their own rows, under update.
        """
        check_type("rank", rank, int | None)
        timelines = self._timeline.rank_timelines
        busiest = timelines[
            rank_largest([float(rank_timeline.times.seconds.sum()) for rank_timeline in timelines])[
                0
            ]
        ]
        found = (
            [busiest]
            if rank is None
            else [
                rank_timeline
                for rank_timeline in timelines
                if rank in rank_timeline.times.group.ranks
            ]
        )
        if not found:
            raise ValueError(
                f"rank is {rank}; the ranks are 0 to {self.ranks - 1}; choose one of these"
            )
        return accounts.sum_modules(found[0], depth)

    def idle(self) -> Table:
        """Busy and idle time of the compute streams, by cause; ranks that do the same are listed
        once.

        Columns rank, ranks (how many do the same) [-]; busy_s; contention_s (how much longer operations
        take because of collectives on the same core); host_s (nothing is launched, with
        synchronization and loading); communication_s (a collective that the stream waits for is in flight);
        waiting_s (that collective waits for other ranks) [s]. The times of a rank sum to the time.
        """
        return self._tabulate(accounts.sum_idle)

    def critical_path(self) -> Table:
        """The chain of operations that sets the time: each starts when the previous one ends, on
        any rank and stream.

        Columns rank, stream (``host`` while an operation is launched), operation, name, kind,
        phase, module, start_s, end_s [s]. ``host_device_synchronization`` and ``loading`` come last. The steps sum to
        the time.
        """
        return accounts.find_critical_path(self._timeline.rank_timelines)

    def save_trace(self, path: str | Path, *, ranks: int = 8) -> Path:
        """Write the timeline as a Chrome trace, which ui.perfetto.dev opens.

        As in `timeline`, the iteration lasts from 0 to `time`; what a rank or a host that is ahead
        of the others begins before has times below zero.

        Parameters
        ----------
        path : str or Path
            File to write, such as ``iteration.json``.
        ranks : int
            Most ranks to write; if there are more, some of every kind [-].
        """
        target = check_target("path", path)
        most, timelines = (
            check_positive("ranks", ranks, integer=True),
            self._timeline.rank_timelines,
        )
        kinds = [rank_timeline.times.group.ranks for rank_timeline in timelines]
        order = sorted(
            (n, rank, index) for index, alike in enumerate(kinds) for n, rank in enumerate(alike)
        )
        events = accounts.list_events(timelines, dict(sorted(row[1:] for row in order[:most])))
        lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
        notes = json.dumps({"prediction": repr(self)}, ensure_ascii=False)
        return write_text(
            target,
            f'{{"displayTimeUnit": "ms", "otherData": {notes}, "traceEvents": [\n{lines}\n]}}\n',
        )

    def memory(self) -> Memory:
        """Memory of the rank that needs most, by use: parameters, gradients, states, activations
        and more."""
        graphs = [rank_timeline.graph for rank_timeline in self._timeline.rank_timelines]
        return measure_memory(graphs, self.platform)

    throughput, mfu, cost = (
        property(accounts.find_throughput),
        property(accounts.find_mfu),
        accounts.find_cost,
    )
    sensitivity = uncertainty.find_sensitivity

    @property
    def fits(self) -> bool | None:
        """Whether every rank has enough memory; None if the memory of the device is not known."""
        return self.memory().fits

    @property
    def _largest(self) -> list[tuple[tuple[str, str], tuple[int, float]]]:
        """Parts, the largest first."""
        parts = list(self.parts.items())
        return [parts[place] for place in rank_largest([seconds for _, (_, seconds) in parts])]

    def _tabulate(self, account: Callable[[accounts.RankTimeline], Mapping[str, float]]) -> Table:
        """A row for every kind of rank, with the columns of an account."""
        import polars

        kinds = [
            (rank_timeline, rank_timeline.times.group.ranks)
            for rank_timeline in self._timeline.rank_timelines
        ]
        return polars.DataFrame(
            [
                {"rank": own[0], "ranks": len(own), **account(rank_timeline)}
                for rank_timeline, own in kinds
            ]
        )

    def communication(self) -> Table:
        """Time of ranks in collectives, and how much of it is hidden; ranks that do the same are
        listed once.

        Columns rank, ranks (how many do the same) [-]; total_s, with a collective in flight;
        exposed_s, the part in which the compute stream is idle or slowed down; overlapped_s, the
        rest; waiting_s, for other ranks before a collective [s]; exposed_share, waiting_share of
        the iteration [-].
        """
        return self._tabulate(accounts.sum_communication)

    def chart(self, kind: str = "breakdown") -> Picture:
        """A picture of the prediction.

        Parameters
        ----------
        kind : str
            ``breakdown``, ``timeline`` or ``modules``.
        """
        from perfkit import plots

        check_choice("kind", kind, CHARTS)
        draw: Callable[..., Picture] = getattr(plots, CHARTS[kind])
        if kind == "timeline":
            return draw(self.timeline(), about=self._about, time=self.time)
        return draw(getattr(self, kind)(), about=self._about)

    @property
    def _about(self) -> str:
        where = f"{self.ranks} of {self.platform.network.ranks} ranks of {self.platform.name}"
        return f"{self.workload.description} on {where}"

    @property
    def _unhidden(self) -> str:
        return f"if nothing overlapped{' nor waited for other ranks' * (self.ranks > 1 and self.serial < self.time)}"

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        low, high = map(format_time, self.interval())
        times = {"time of an iteration": self.time, "the busiest resource alone": self.lower_bound}
        times |= {self._unhidden: self.serial, "if the host were never late": self.device_time}
        rows = [(name, format_time(seconds)) for name, seconds in times.items()]
        rows += [
            ("80% interval", f"{low}–{high}"),
            ("bottleneck", self.bottleneck),
            ("memory", repr(self.memory())),
        ]
        rows += [
            (f"{name} a second", write_cell("", rate, None))
            for name, rate in self.throughput.items()
        ]
        rows += [("share of the peak (MFU)", f"{self.mfu:.1%}")] if self.mfu else []
        yield "Time and memory", [("quantity", "value"), *rows]
        yield from (("", self.chart(kind)) for kind in CHARTS)
        yield "Where the time goes", self.breakdown()
        yield "", self.platform

    def explain(self) -> str:
        """The prediction in words: what was priced, the bounds of its time, and where the time
        goes."""
        lines = [
            repr(self),
            f"  at least {format_time(self.lower_bound)} (busiest resource alone), "
            f"{format_time(self.serial)} {self._unhidden}; {self.memory()}",
        ]
        for (phase, kind), (count, seconds) in self._largest[:6]:
            label = (
                f"{phase} {kind}".strip().replace("_", " ")
                + f" ({count} operation{'s' * (count != 1)})"
            )
            lines.append(f"  {seconds / self.time:6.1%}  {format_time(seconds):>9}  {label}")
        if self.execution == "graphs":
            share, fixed = self.fixed_time / self.time, format_time(self.fixed_time)
            lines.append(f"  {share:6.1%}  {fixed:>9}  of it fixed time of kernels, however small")
        lines += [
            f"  not modelled, timed as memory traffic: {n} {format_time(t)}"
            for n, t in self.unmodelled.items()
        ]
        return "\n".join(lines + [f"  warning: {text}" for text in self.warnings])

    def __repr__(self) -> str:
        time, low, high = map(format_time, (self.time, *self.interval(0.8)))
        what = self.workload
        dtype = what.dtype + (" autocast" if getattr(what, "mixed", False) else "")
        kernels = "/".join(list_attention(self._timeline.rank_timelines[0].graph, self.platform))
        attention = f"{kernels} attention" * bool(kernels)
        words = (self._about, dtype, getattr(what, "optimizer", ""), self.execution, attention)
        short = "" if self.fits is not False else f", {self.memory()}"
        return f"{', '.join(filter(None, words))}: {time} ({low}–{high}), {self.bottleneck}{short}"


def _find_bottleneck(causes: Breakdown, timeline: Timeline) -> str:
    """What sets the pace of an iteration with these causes, see `Prediction.bottleneck`."""
    if causes.loading:
        return "input-bound"
    by_resource = causes.sum_by_resource()
    host, device = float(timeline.hosts.max()), timeline.device_time
    if any(len(rank.group.graph.transfers) for rank in timeline.ranks):
        # a host that waits for its device is part of the time of the device
        device = timeline.period - by_resource["host"]
    return str(find_bottleneck(by_resource, host, device))


def predict(
    workload: Work,
    platform: Platform | str | Path,
    *,
    ranks: int | None = None,
    plan: Plan | None = None,
    slowdown: Mapping[int, float] | None = None,
    execution: str | None = None,
    loading: float = 0.0,
    strategy: Strategy | None = None,
) -> Prediction:
    """Predict the time of one training iteration and what limits it.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        The iteration: a DLRM, Transformer or Net, whose batch is that of all ranks together; one
        graph for all ranks; or one for each.
    platform : Platform, str or Path
        A platform, a name of the gallery or a file.
    ranks : int, optional
        Ranks that take part; one, unless given, or those that a graph was captured for [-].
    plan : Plan, optional
        Placement of embedding tables; round-robin by default.
    slowdown : mapping of int to float, optional
        How many times longer the operations of a slow rank take, by rank [-].
    execution : str, optional
        ``eager``; ``compiled``, which merges element-wise work of the forward and backward pass
        into fewer kernels; or ``graphs``, where the host launches all kernels of a GPU at once. As
        recorded, unless given: mostly eager.
    loading : float, optional
        Time of a rank's data loader for the batch of an iteration, while the iteration before runs
        [s].
    strategy : Strategy, optional
        How ranks share a Transformer; it replaces what the Transformer says of sharing, checkpoints
        and micro-batches.

    Returns
    -------
    prediction : Prediction
        Time, interval, bounds, breakdown and timeline.

    Raises
    ------
    ValueError
        For more ranks than the platform has, a batch that the ranks cannot share evenly, an unknown
        platform, or graphs that do not belong together.

    Examples
    --------
    >>> import perfkit as pk
    >>> r = pk.predict(pk.Transformer.bert("bert-base", batch=2, sequence=128), "zen3-2")
    >>> r.lower_bound <= r.time <= r.serial * 1.001
    True
    """
    settings: Any = {"plan": plan, "slowdown": slowdown, "execution": execution, "loading": loading}
    where, again = (
        load_platform(platform),
        partial(predict, workload, ranks=ranks, strategy=strategy, **settings),
    )
    check_type("slowdown", slowdown, Mapping | None)
    loading = check_positive("loading", loading, zero=True)
    find = find_graphs if strategy is None else partial(find_stages, strategy)
    what, graphs, count = find(workload, where, ranks, plan, execution)
    if any(not len(graph) for graph in graphs if isinstance(graph, Graph)):
        raise ValueError(
            "the graph has no operations, so there is nothing to predict; capture a step that runs its work in this "
            "process"
        )
    kinds = group_identical_ranks(graphs, count, slowdown or {})
    whole, device = where.context.find_iteration(what.family, count), where.device.kind != "cpu"
    costs = price([kind.graph for kind in kinds], where, dtype=what.dtype, ranks=count)
    durations, notes = time_collectives(kinds, where, whole)
    times = [
        time_rank(k, c.seconds, own, where, whole)
        for k, c, own in zip(kinds, costs, durations, strict=True)
    ]
    # hosts of ranks that share layers or sequences join their devices where a graph says so
    staged = strategy is not None and STAGE_HOST in kinds[0].graph.kernels
    if staged:
        times = [join_hosts(own, whole) for own in times]
    error = uncertainty.find_host_error(where, kinds[0].graph.execution)
    overlap = where.context.overlap
    # no overlap on a core where it was not measured; on a GPU what was fitted to other families
    # does not hold
    shared = overlap["contention"] if overlap and (whole or not device) else float(not device)
    timeline = simulate(times, device=device, contention=shared)
    natural, free = timeline.period, device and not any(len(kind.graph.transfers) for kind in kinds)
    if free:  # no host waits for its device
        timeline.extend(
            "host_device_synchronization",
            float(join_host(timeline.device_time, max(timeline.hosts), whole)),
        )
    timeline.extend("loading", loading)
    slowest = rank_largest([float(own.seconds.sum()) for own in times])[0]
    cost, rank_timeline = costs[slowest], timeline.measure(slowest)
    fixed = float(
        cost.models.numbers["launch"][cost.classes] @ rank_timeline.graph.column("launches")
    )
    causes = break_down(rank_timeline)
    busy, hosts, moving = accounts.sum_resources(rank_timeline)
    recorded = dict.fromkeys(note for kind in kinds for note in kind.graph.notes)
    found, unmodelled = uncertainty.list_notes(rank_timeline.graph, cost, where, what.family, count)
    short = find_shortage([kind.graph for kind in kinds], where)
    notes = (*notes, *recorded, *found, *short)
    warn_once(notes, 3)
    if _find_bottleneck(causes, timeline) not in ("host-bound", "input-bound"):
        notes += uncertainty.list_idle_tensor_cores(rank_timeline, where)
    placements = plan.placements if plan and count > 1 else ()
    copies = sum(placement.kind == "data_parallel" for placement in placements)
    notes += uncertainty.list_dense_tables(rank_timeline.graph, copies)
    if natural > PACE * timeline.device_time and {q.kind for q in where.host.values()} & {
        "assumed"
    }:
        notes += (f"{_ASSUMED}; the device alone takes {format_time(timeline.device_time)}",)
    spread = whole.spread if whole else uncertainty.CONTEXT if device or not where.context else 0.0
    if not whole or (device and "per_operation" not in whole):  # the host was not fitted
        waits = (causes.wait_time_for_ranks + causes.collective_time) / timeline.period
        late = 0.0
        if staged:
            late = causes.host_time / timeline.period * math.log(error)
        around = uncertainty.find_spread(cost, rank_timeline, waits, spread)
        spread = math.hypot(
            around, late, uncertainty.spread_host(timeline, error, loading, free, whole)
        )
    return Prediction(
        workload=what,
        platform=where,
        ranks=count,
        time=timeline.period,
        spread=spread,
        causes=causes,
        lower_bound=min(
            max(busy, float(moving.max()), hosts if device else 0.0, loading), timeline.period
        ),
        serial=busy + float(moving.sum()) + hosts + loading,
        latency=timeline.latency + loading,
        device_time=timeline.device_time,
        fixed_time=fixed,
        execution=rank_timeline.graph.execution,
        unmodelled=unmodelled,
        warnings=notes,
        _timeline=timeline,
        _repredict=again,
    )
