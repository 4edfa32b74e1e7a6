"""The prediction of one training iteration: its time, interval, bounds, breakdown and timeline."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from perfkit.estimates import check_time, find_interval, find_transfers, warn_once
from perfkit.gallery import load_platform
from perfkit.platform import Platform
from perfkit.prediction.accounting import find_spread, split_period, sum_collectives, sum_communication
from perfkit.prediction.communicators import cast_ranks, time_collectives
from perfkit.prediction.cost import Costs, find_iteration, price
from perfkit.prediction.critical_path import find_critical_path
from perfkit.prediction.host import make_host, time_rank
from perfkit.prediction.simulation import Timeline, simulate
from perfkit.prediction.trace import make_events, write_trace
from perfkit.prediction.views import (
    LEVELS,
    find_idle,
    list_operations,
    list_spans,
    sum_modules,
)
from perfkit.units import check_choice, check_positive, check_type, format_bytes, format_time, rank_largest, show
from perfkit.workloads.graph import Graph
from perfkit.workloads.placement import Plan

if TYPE_CHECKING:
    import altair
    import pandas
    import polars

__all__ = ["Prediction", "Workload", "predict"]


class Workload(Protocol):
    """What describes an iteration on any number of ranks, such as a DLRM, a Transformer or a Net."""

    @property
    def family(self) -> str:
        """What it counts among."""

    @property
    def dtype(self) -> str:
        """Data type of its products."""

    @property
    def description(self) -> str:
        """What is computed, in a few words."""

    def graphs(self, ranks: int = 1, plan: Plan | None = None, *, accelerator: bool = False) -> tuple[Graph, ...]:
        """What every rank computes in one iteration."""


_Work: TypeAlias = Workload | Graph | Sequence[Graph]

#: What a class of operations is limited by, in words.
_BOUND = {
    "gemm": "GEMM-bound", "bmm": "GEMM-bound", "attention": "attention-bound", "elementwise": "memory-bound",
    "rowwise": "memory-bound", "copy": "memory-bound", "embedding_forward": "embedding-bound",
    "embedding_backward": "embedding-bound", "embedding_update": "embedding-bound",
    "collective": "communication-bound", "transfer": "transfer-bound", "host": "host-bound",
    "waiting": "imbalance-bound", "convolution": "convolution-bound", "pooling": "memory-bound",
    "other": "memory-bound",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Prediction:
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
    unmodelled: Mapping[str, float]
    warnings: tuple[str, ...]
    _timeline: Timeline = field(repr=False)
    _graphs: tuple[Graph, ...] = field(repr=False)
    _stands: tuple[tuple[int, ...], ...] = field(repr=False)

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
            Ends of the range [s].

        Raises
        ------
        ValueError
            For a level outside 0 to 1.
        """
        return find_interval(self.time, self.spread, level)

    @property
    def bottleneck(self) -> str:
        """What sets the pace, in words: the host where a device waits for it, else the class with the largest part."""
        device = self.time - self.parts.get(("", "host"), (0, 0.0))[1]
        if self.lower_bound > max(1.02 * device, 0.98 * self.time):
            return _BOUND["host"]
        totals: dict[str, float] = {}
        for (_, kind), (_, seconds) in self.parts.items():
            totals[_BOUND[kind]] = totals.get(_BOUND[kind], 0.0) + seconds
        return list(totals)[rank_largest(list(totals.values()))[0]]

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
            for (phase, kind), (count, seconds) in self._largest
        ]
        return polars.DataFrame(rows, orient="row")

    def timeline(self, level: str = "operation", *, depth: int | None = None) -> "polars.DataFrame":
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
            stream, phase, module, operations [-], start_s [s], end_s [s].
        """
        check_choice("level", level, LEVELS)
        if level == "operation":
            return list_operations(*self._views)
        return list_spans(*self._views, level=level, depth=depth)

    def modules(self, depth: int | None = 2, *, rank: int | None = None) -> "polars.DataFrame":
        """Time of every module, forward, backward and update, with what the device stands still for it.

        Parameters
        ----------
        depth : int or None
            Names of a module's path that are told apart; None for all of them [-].
        rank : int, optional
            Which rank; the one with most work, unless given [-].

        Returns
        -------
        frame : polars.DataFrame
            module (empty for what belongs to none), operations [-], forward_s, backward_s, update_s [s], idle_s (part
            of those three) [s], share [-], in program order; the three sum to the time.
        """
        return sum_modules(*self._views, depth=depth, rank=rank)

    def idle(self) -> "polars.DataFrame":
        """Time in which compute streams work, and stand still, by cause; alike ranks are listed once.

        Returns
        -------
        frame : polars.DataFrame
            rank, ranks (so many are alike) [-]; busy_s; stolen_s (what collectives in flight took from operations on
            the same core); host_s (nothing was launched); communication_s (a collective that had to end was in
            flight); waiting_s (it waited for other ranks) [s]; those of a rank sum to the time.
        """
        return find_idle(*self._views)

    def critical_path(self) -> "polars.DataFrame":
        """What the time consists of: each step began when the one before it had ended, on whatever rank and stream.

        Returns
        -------
        frame : polars.DataFrame
            rank, stream (``host`` while an operation is launched), operation, name, kind, phase, module, start_s, end_s
            [s]; the steps sum to the time.
        """
        return find_critical_path(*self._views)

    def save_trace(self, path: str | Path, *, ranks: int = 8) -> Path:
        """Write the timeline as a Chrome trace, which ui.perfetto.dev opens.

        Parameters
        ----------
        path : str or Path
            File to write, such as ``iteration.json``.
        ranks : int
            Most ranks written; where there are more, some of every kind [-].

        Returns
        -------
        path : Path
            The file.
        """
        most = int(check_positive("ranks", ranks, integer=True))
        each = {rank: index for index, alike in enumerate(self._stands) for rank in alike}
        order = sorted(each, key=lambda rank: (self._stands[each[rank]].index(rank), rank))[:most]
        events = make_events(self._graphs, self._timeline, {rank: each[rank] for rank in sorted(order)})
        return write_trace(path, events, prediction=repr(self))

    @property
    def _largest(self) -> list[tuple[tuple[str, str], tuple[int, float]]]:
        """Parts, the largest first."""
        parts = list(self.parts.items())
        return [parts[place] for place in rank_largest([seconds for _, (_, seconds) in parts])]

    @property
    def _views(self) -> tuple[tuple[Graph, ...], Timeline, tuple[tuple[int, ...], ...]]:
        return self._graphs, self._timeline, self._stands

    def communication(self) -> "polars.DataFrame":
        """What ranks spend on collectives, and how much of it operations hide; alike ranks are listed once.

        Returns
        -------
        frame : polars.DataFrame
            rank, ranks (so many are alike) [-]; total_s, with a collective in flight; exposed_s, while the compute
            stream stands still, or taken from operations on the same core; overlapped_s, the rest of it; waiting_s, for
            other ranks before a collective [s]; exposed_share, waiting_share of the iteration [-].
        """
        import polars

        rows = []
        for index, ranks in enumerate(self._stands):
            total, exposed, waiting = sum_communication(self._graphs[index], self._timeline, index)
            rows.append({
                "rank": ranks[0], "ranks": len(ranks), "total_s": total, "exposed_s": exposed,
                "overlapped_s": total - exposed, "waiting_s": waiting, "exposed_share": exposed / self.time,
                "waiting_share": waiting / self.time,
            })  # fmt: skip
        return polars.DataFrame(rows, orient="row")

    def table(self) -> "polars.DataFrame":
        """The breakdown; the same as `breakdown`.

        Returns
        -------
        frame : polars.DataFrame
            See `breakdown`.
        """
        return self.breakdown()

    def chart(self, kind: str = "breakdown") -> "altair.Chart | altair.LayerChart":
        """A picture of the prediction.

        Parameters
        ----------
        kind : str
            ``breakdown``, ``timeline`` or ``modules``.

        Returns
        -------
        chart : altair.Chart or LayerChart
            Ready to be shown or saved.

        Raises
        ------
        ValueError
            For another kind.
        """
        from perfkit import plots

        check_choice("kind", kind, ("breakdown", "timeline", "modules"))
        if kind == "modules":
            return plots.module_bars(self.modules())
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
        for (phase, kind), (count, seconds) in self._largest[:6]:
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


def predict(
    workload: _Work,
    platform: Platform | str | Path,
    *,
    ranks: int | None = None,
    plan: Plan | None = None,
    slowdown: Mapping[int, float] | None = None,
) -> Prediction:
    """Predict the time of one training iteration and what limits it.

    Parameters
    ----------
    workload : Workload, Graph or sequence of Graph
        The iteration: a DLRM, Transformer or Net, whose batch is over all ranks; a graph that stands for all ranks; or
        one for each.
    platform : Platform, str or Path
        A platform, a name of the gallery or a file.
    ranks : int, optional
        Ranks that take part: one, unless given, and those a graph was captured for [-].
    plan : Plan, optional
        Placement of embedding tables; by default they are dealt out in turn.
    slowdown : mapping of int to float, optional
        How many times longer the operations of a rank take, by rank: stragglers [-].

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
    >>> r = pk.predict(pk.Transformer.bert("bert-large", batch=8, sequence=512, dtype="bf16"), "h100-sxm-8")
    >>> r.lower_bound <= r.time <= r.serial * 1.001
    True
    """
    where = load_platform(platform)
    check_type("slowdown", slowdown, Mapping | None)
    what, graphs, count = _find_graphs(workload, where, ranks, plan)
    cast = cast_ranks(graphs, count, slowdown or {})
    costs = [price(graph, where, dtype=what.dtype) for graph in cast.graphs]
    whole = find_iteration(where, what.family, count)
    scale, host = (whole["scale"] if whole else 1.0), make_host(where, whole)
    durations, notes = time_collectives(cast, where)
    delay = whole.get("per_collective", 0.0) if whole and count > 1 else 0.0
    durations = [scale * own + delay for own in durations]
    times = [
        time_rank(graph, scale * own.seconds, where, whole, cast.name_communicators(index), cast.slowdowns[index])
        for index, (graph, own) in enumerate(zip(cast.graphs, costs, strict=True))
    ]
    timeline = simulate(times, durations, host)
    busy = [float(t.seconds.sum()) for t in times]
    slowest = rank_largest(busy)[0]
    parts = split_period(cast.graphs[slowest], times[slowest], timeline, slowest)
    hosts = float(sum(part.sum() for part in times[slowest].issue(host)))
    notes += _notes(where, what.family, count, costs[slowest])
    notes += _warn_of_size(where, cast.graphs[slowest])
    warn_once(notes, 3)
    moving = sum_collectives(cast, times, timeline, slowest)
    return Prediction(
        workload=what, platform=where, ranks=count, time=timeline.period,
        spread=find_spread(where, whole, parts, costs[slowest], times, durations, timeline.period), parts=parts,
        lower_bound=max(busy[slowest], max(moving.values(), default=0.0), hosts if host.asynchronous else 0.0),
        serial=busy[slowest] + sum(moving.values()) + hosts, latency=timeline.latency,
        unmodelled=costs[slowest].unmodelled, warnings=notes,
        _timeline=timeline, _graphs=cast.graphs, _stands=cast.stands,
    )  # fmt: skip


def _find_graphs(
    workload: _Work, platform: Platform, ranks: int | None, plan: Plan | None
) -> tuple[Workload | Graph, Sequence[Graph], int]:
    """What is priced, its graphs, and the ranks that take part."""
    listed = [workload] if isinstance(workload, Graph) else workload if isinstance(workload, list | tuple) else []
    given = None if ranks is None else int(check_positive("ranks", ranks, integer=True))
    if listed and all(isinstance(graph, Graph) for graph in listed):
        found = sorted({graph.ranks for graph in listed})
        if len(found) > 1 or len(listed) not in (1, found[0]) or given not in (None, found[0]):
            raise ValueError(
                f"workload holds {len(listed)} graphs of {', '.join(map(str, found))} ranks"
                + (f" and ranks is {given}" if given else "")
                + "; it must be one graph for all ranks or one for each; capture it for the ranks that take part"
            )
        if plan is not None:
            raise ValueError("plan is given beside graphs, in which every table has its place; leave it out")
        what: Workload | Graph = listed[0]
        count = found[0]
    elif hasattr(workload, "graphs") and hasattr(workload, "family"):
        what, count = workload, given or 1  # type: ignore[assignment]
    else:
        raise ValueError(
            f"workload is {show(workload)}; it must be a DLRM, a Transformer, a Net or captured graphs, such as "
            "Transformer.bert(batch=8)"
        )
    if count > platform.network.ranks:
        raise ValueError(
            f"ranks is {count}; platform {platform.name!r} has {platform.network.ranks}; take fewer or another platform"
        )
    check_choice("dtype", what.dtype, platform.device.peaks)
    if isinstance(what, Graph):
        return what, listed, count
    return what, what.graphs(count, plan, accelerator=platform.device.kind != "cpu"), count


def _warn_of_size(platform: Platform, graph: Graph) -> tuple[str, ...]:
    """Say so where a rank works on more memory than was ever timed, and that all fitted into caches."""
    size, timed = graph.footprint + sum(table.nbytes for table in graph.tables), platform.largest_timed
    if not platform.device.never_left_cache or size <= timed:
        return ()
    return (
        f"a rank works on {format_bytes(size)}; the largest working set timed on {platform.name} was "
        f"{format_bytes(timed)} and never left the caches, so that main memory may be slower than predicted",
    )


def _notes(platform: Platform, family: str, ranks: int, costs: Costs) -> tuple[str, ...]:
    """What a reader should know before trusting the number."""
    notes, kind = [], family or "such"
    if platform.context and f"iteration.{family}" not in platform.context:
        notes.append(f"{platform.name} was never calibrated with {kind} iterations; the interval is wider")
    if platform.context and ranks > 1 and f"iteration.{family}.parallel" not in platform.context:
        notes.append(f"{platform.name} was never calibrated with {kind} iterations on several ranks")
    unmodelled = sum(costs.unmodelled.values())
    if unmodelled > 0.02 * float(costs.seconds.sum()):
        notes.append(f"{', '.join(costs.unmodelled)} have no model and are timed as memory traffic")
    notes += [note for note, seconds in costs.stand_ins.items() if seconds > 0.05 * float(costs.seconds.sum())]
    notes += dict.fromkeys(text for fit in platform.kernels.values() for text in find_transfers("kernels", fit))
    return tuple(notes)
