"""The prediction of one training iteration: its time, interval, bounds, breakdown and timeline."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, overload

from perfkit.fitting import Iteration
from perfkit.ground.notes import write_warnings
from perfkit.ground.results import Picture, Sections, Table, Tabular, write_cell
from perfkit.ground.targets import check_target, write_text
from perfkit.ground.units import (
    check_choice,
    check_positive,
    check_type,
    format_bytes,
    format_count,
    format_interval,
    format_time,
    rank_largest,
    show,
)
from perfkit.models.failures import wait_for_slowest
from perfkit.platform.estimates import find_interval
from perfkit.platform.platform import Platform
from perfkit.platform.whatif import RESOURCES
from perfkit.prediction import accounts, uncertainty
from perfkit.prediction.breakdown import Breakdown
from perfkit.prediction.classes import list_attention
from perfkit.prediction.goodput import Goodput, find_goodput, find_shortage
from perfkit.prediction.levels import find_level
from perfkit.prediction.memory import Memory, measure_memory
from perfkit.prediction.memory_timeline import find_fullest, list_memory
from perfkit.prediction.ranks import (
    Workload,
)
from perfkit.prediction.simulation import Timeline
from perfkit.workloads.graph import Graph
from perfkit.workloads.stack import Stack

if TYPE_CHECKING:
    from perfkit.ground.dates import Moment
    from perfkit.prediction.against import Deviation
    from perfkit.prediction.operation_accounts import OperationAccount
    from perfkit.readers.measured_jitter import HasJitter, Jitter
    from perfkit.readers.measured_steps import MeasuredStep
    from perfkit.readers.training_logs import TrainingLog

#: Pictures of an iteration.
CHARTS = {
    "breakdown": "breakdown_bars",
    "timeline": "timeline_lanes",
    "modules": "module_bars",
    "memory": "memory_areas",
}
#: Amounts of work that some workload has.
_AMOUNTS = ("samples", "tokens", "images", "iterations")
#: What is meant by names that `Prediction.cost` does not have.
_MEANT = {
    "checkpoint_time": "checkpoint=",
    "checkpoint_interval": "interval=",
    "price": "price_per_gpu_hour=",
    "deadline": "start=, and chance_by(date) of what cost(mtbf=...) returns",
}
#: Figures that people ask a `Prediction` for by other names, and what they are called.
_OTHER_NAMES = {
    "confidence_interval": "interval(0.8), the range that holds the measured time in 80 % of all cases",
    "step_time": "time, in seconds",
    "iteration_time": "time, in seconds",
    "tokens_per_s": "throughput['tokens']",
    "tokens_per_second": "throughput['tokens']",
    "samples_per_s": "throughput['samples']",
    "samples_per_second": "throughput['samples']",
    "images_per_s": "throughput['images']",
    "memory_bytes": "memory().total, in bytes",
    "peak_memory": "memory().total, in bytes",
    "table": "breakdown(), operations() or modules()",
}
#: Least share of the time that a report says a faster resource to bring [-].
_TELLING_GAIN = 0.001
#: Warning where the host sets the pace.
_ASSUMED = "the host sets the pace, and how fast it is was assumed from another machine"


def _refuse_argument(name: str, units: Mapping[str, float]) -> None:
    """Refuse a named argument that `Prediction.cost` does not have, or an amount of another workload."""
    if name in _AMOUNTS:
        check_choice("amount, as in samples=1e6,", name, units)
    if name in _MEANT:
        raise ValueError(f"{name}= is no argument of cost; did you mean {_MEANT[name]}?")
    own = {*signature(Prediction.cost).parameters} - {"self", "amount"}
    check_choice("argument of cost", name, [*units, *sorted(own)])


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
    bottleneck : str
        What sets the pace: data or the host if the device waits for them, else the resource with
        the largest part, such as ``GEMM-bound``, or ``offload-bound`` for copies to the host and
        updates there.
    lower_bound : float
        Time of the busiest single resource, without any dependency [s].
    serial : float
        Time of everything one after another, without waiting [s].
    latency : float
        Time of a first iteration from a common start; where host and device wait for each other, at
        least that of an iteration that repeats [s].
    device_time : float
        Steady-state time if the host had launched everything before [s].
    fixed_time : float
        Time that the kernels of the slowest rank take whatever their size [s].
    execution : str
        ``eager``, ``compiled`` or ``graphs``.
    unmodelled : mapping of str to float
        Operations without a model, which are timed by the bytes they move, and their time; the most that
        they may take at a twentieth of the peak where it is not proportional to their bytes [s].
    warnings : tuple of str
        What to know before trusting the number.
    stack : Stack
        The software that runs it, with the settings that won over its facts.
    is_single_rank_assumed : bool
        Whether one rank of several was taken because nobody said how many.
    """

    report_title = "Predicted time of one training iteration and where it goes"

    workload: Workload | Graph
    platform: Platform
    ranks: int
    time: float
    spread: float
    causes: Breakdown
    bottleneck: str
    lower_bound: float
    serial: float
    latency: float
    device_time: float
    fixed_time: float
    execution: str
    unmodelled: Mapping[str, float]
    warnings: tuple[str, ...]
    stack: Stack
    is_single_rank_assumed: bool
    _timeline: Timeline = field(repr=False)
    _repredict: Callable[[Platform], "Prediction"] = field(repr=False)

    def __getattr__(self, name: str) -> NoReturn:
        """Say what a figure is called here that has another name elsewhere."""
        if name in _OTHER_NAMES:
            raise AttributeError(f"a Prediction has no {name}; take {_OTHER_NAMES[name]}")
        raise AttributeError(f"'Prediction' object has no attribute {name!r}")

    @property
    def level(self) -> Iteration | None:
        """Level of the software on this platform, whose scale is part of all times; None without
        one."""
        return find_level(self.platform, self.stack, self.workload, self.ranks)

    @property
    def software(self) -> str:
        """The software in words, with its level."""
        level = self.level
        said = f"{self.stack.name} ({self.stack.description})"
        if level is None:
            return said
        origin = "of other software or steps"
        if level.n:
            origin = f"from {format_count(level.n, 'published step')}"
        return f"{said}, level x {level['scale']:.3f} {origin}"

    def interval(self, level: float = 0.8) -> tuple[float, float]:
        """Range that holds the measured time with the probability `level` [s].

        Parameters
        ----------
        level : float
            Probability between 0 and 1 [-].
        """
        return find_interval(self.time, self.spread, level)

    @cached_property
    def parts(self) -> Mapping[tuple[str, str], tuple[int, float]]:
        """Number and time of the operations of the slowest rank, by phase and class; the times sum
        to `time` [s]."""
        return self.causes.list_parts()

    def breakdown(self) -> Table:
        """Time of the slowest rank by phase and operation class; sums to the total.

        Columns phase, kind, operations [-], time_s [s], share [-].

        Notes
        -----
        The kind is that of the kernel, as traces have it. So an update of whole embedding tables is
        ``elementwise``: the same kernel updates them and the weights of MLPs, often in one launch.
        `modules` shares its time among the modules.
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
        if rank is None:
            kernel_times = [float(timeline.times.seconds.sum()) for timeline in timelines]
            return accounts.sum_modules(timelines[rank_largest(kernel_times)[0]], depth)
        return accounts.sum_modules(self._find_timeline(rank), depth)

    def _find_timeline(self, rank: int) -> accounts.RankTimeline:
        """The iteration of a rank; a ValueError for one that does not exist."""
        for timeline in self._timeline.rank_timelines:
            if rank in timeline.times.group.ranks:
                return timeline
        raise ValueError(
            f"rank is {rank}; the ranks are 0 to {self.ranks - 1}; choose one of these"
        )

    def explain_operation(self, operation: int, *, rank: int = 0) -> "OperationAccount":
        """Why one operation takes its time: its sizes, its fit with each term, and each factor of
        the iteration, which together make the time.

        Parameters
        ----------
        operation : int
            Its number in `timeline` [-].
        rank : int, optional
            On which rank [-].

        Returns
        -------
        account : OperationAccount
            Steps whose times sum to that of the operation; ``print(account.explain())`` shows them,
            ``table`` has them as a frame.

        Raises
        ------
        ValueError
            For an operation or a rank that does not exist, and for operations that are no kernels,
            such as collectives.
        """
        from perfkit.prediction.operation_accounts import explain_operation

        number = check_positive("operation", operation, integer=True, zero=True)
        return explain_operation(
            self._find_timeline(rank),
            self.platform,
            number,
            rank,
            dtype=self.workload.dtype,
            family=self.workload.family,
            ranks=self.ranks,
            level=self.level,
            stack=self.stack.name,
        )

    def idle(self) -> Table:
        """Busy and idle time of the compute streams, by cause; ranks that do the same are listed
        once.

        Columns rank, ranks (how many do the same) [-]; busy_s; contention_s (how much longer operations
        take in the timeline because of collectives beside them, on a CPU with what the host does);
        host_s (nothing is launched, with synchronization and loading); communication_s (a collective that the stream waits for is in flight);
        waiting_s (that collective waits for other ranks) [s]. The times of a rank sum to the time.
        """
        return self._tabulate(accounts.sum_idle)

    def critical_path(self) -> Table:
        """The chain of operations that sets the time: each starts when the previous one ends, on
        any rank and stream.

        Columns rank, stream (``host`` while an operation is launched), operation, name, kind,
        phase, module, start_s, end_s [s]. ``host_device_synchronization`` and ``loading`` come
        last. The steps sum to the time.
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
        most = check_positive("ranks", ranks, integer=True)
        timelines = self._timeline.rank_timelines
        candidates = []  # the first rank of every group, then the second of each, and so on
        for index, timeline in enumerate(timelines):
            for order, rank in enumerate(timeline.times.group.ranks):
                candidates.append((order, rank, index))
        shown = sorted((rank, index) for _, rank, index in sorted(candidates)[:most])
        events = accounts.list_events(timelines, dict(shown))
        lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
        notes = json.dumps({"prediction": repr(self)}, ensure_ascii=False)
        return write_text(
            target,
            f'{{"displayTimeUnit": "ms", "otherData": {notes}, "traceEvents": [\n{lines}\n]}}\n',
        )

    def memory(self) -> Memory:
        """Memory of the rank that needs most, by use: parameters, gradients, states, activations
        and more.

        Gradients of a rank alone and of replicas are freed ahead of the forward pass, as by
        ``zero_grad(set_to_none=True)``; shares of gradients (ZeRO), and sums of strategies that
        share layers, count through the whole iteration.
        """
        graphs = [rank_timeline.graph for rank_timeline in self._timeline.rank_timelines]
        return measure_memory(graphs, self.platform)

    def memory_over_time(self) -> Table:
        """Memory of the rank that needs most through one iteration, by use.

        Returns
        -------
        frame : polars.DataFrame
            A row for each moment at which memory begins to rise or to fall: time_s, as in `timeline`
            [s]; operation [-], phase and module, what runs then; a column for each use of `memory`,
            such as activations_bytes, and total_bytes, whose largest is `Memory.total` [B]. The first
            row holds the gradients of the iteration before, which ``zero_grad`` drops, and equals the
            last one.

        Raises
        ------
        ValueError
            For a strategy whose memory is known at its fullest moment alone: ranks share layers,
            sequences or experts, there are stages, hybrid shards, an offload or selective
            checkpoints, or a stated stack keeps buffers as Megatron-LM does.

        Notes
        -----
        Tensors live from the operation that makes them to the last one that touches them. What
        streams of messages hold at most counts through the whole iteration, as PyTorch does not give
        it to kernels.
        """
        fullest = find_fullest(self._timeline.rank_timelines, self.platform)
        return list_memory(fullest, self.platform)

    @property
    def throughput(self) -> dict[str, float]:
        """Iterations per second, and samples per second if the workload has a batch; of sequences also
        tokens per second, of images these [1/s]."""
        counts = {"iterations": 1}
        batch = getattr(self.workload, "batch", 0)
        if batch:
            counts["samples"] = batch
            sequence = getattr(self.workload, "sequence", 0)
            if getattr(self.workload, "patch", 0):
                counts["images"] = batch
            elif sequence:
                counts["tokens"] = batch * sequence
        return {name: count / self.time for name, count in counts.items()}

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization: `Graph.model_flops` of all ranks over their peak in the number
        format of the workload, dense, which a power cap lowers [-]; None without products."""
        flops = sum(
            len(timeline.times.group.ranks) * timeline.graph.model_flops
            for timeline in self._timeline.rank_timelines
        )
        peak = self.platform.device.peaks[self.workload.dtype].value
        return flops / (self.time * self.ranks * peak) or None

    @overload
    def cost(
        self,
        price_per_gpu_hour: float,
        power: float = ...,
        epochs: float = ...,
        *,
        mtbf: None = ...,
        checkpoint: None = ...,
        write_rate: None = ...,
        restart: None = ...,
        interval: None = ...,
        jitter: "float | Jitter | HasJitter" = ...,
        start: None = ...,
        **amount: float,
    ) -> dict[str, float]: ...

    @overload
    def cost(
        self,
        price_per_gpu_hour: float,
        power: float = ...,
        epochs: float = ...,
        *,
        mtbf: float | str,
        checkpoint: float | str | None = ...,
        write_rate: float | None = ...,
        restart: float | str | None = ...,
        interval: float | str | None = ...,
        jitter: "float | Jitter | HasJitter" = ...,
        start: "Moment | None" = ...,
        **amount: float,
    ) -> Goodput: ...

    def cost(
        self,
        price_per_gpu_hour: float | None = None,
        power: float = 0.0,
        epochs: float = 1.0,
        *,
        mtbf: float | str | None = None,
        checkpoint: float | str | None = None,
        write_rate: float | None = None,
        restart: float | str | None = None,
        interval: float | str | None = None,
        jitter: "float | Jitter | HasJitter" = 0.0,
        start: "Moment | None" = None,
        **amount: float,
    ) -> dict[str, float] | Goodput:
        """Hours, price and energy of a training run; with `mtbf` until it is done in spite of
        failures.

        Parameters
        ----------
        price_per_gpu_hour : float
            Price of one rank for an hour, in any currency; 0 counts hours alone [1/h].
        power : float, optional
            Power of one rank, with its share of the node and the cooling [W].
        epochs : float, optional
            How many times the amount is gone through [-].
        mtbf : float or str, optional
            Mean time between failures that stop the job, of one rank with its share of the node: hours
            of all ranks over failures, in seconds. The job fails as many times as often as it has ranks.
            Or the name of a published run, such as ``llama-3`` [s]. Times may be text with a unit: ``4096h``.
        checkpoint : float or str, optional
            Time for which writing one checkpoint stops the run; 0 if it is written beside the training
            [s].
        write_rate : float, optional
            In place of `checkpoint`: bytes that a rank writes in a second, of its weights, states of the
            optimizer and tables [B/s].
        restart : float or str, optional
            From a failure until the run goes on: detection, new nodes, reading the checkpoint, first
            iterations; 10 minutes if it is not said, which a warning says [s].
        interval : float or str, optional
            Training between two checkpoints; by default the one that loses least [s].
        jitter : float, Jitter, Trace or TrainingLog, optional
            Standard deviation of the time that a rank takes for an iteration, over its mean: all wait for
            the slowest one, once in an iteration [-]. Or a trace of several ranks and steps, or a training
            log, from which it is found (`perfkit.Trace.jitter`): what is random from step to step. One step of several
            ranks is refused: it does not tell chance from slow ranks.
        start : str, date or datetime, optional
            When the run starts, such as ``2026-12-01``: then the result has dates, too, and
            `Goodput.chance_by` one of them.
        **amount : float
            One of ``samples``, ``tokens``, ``images`` and ``iterations``: how many [-].

        Returns
        -------
        cost : dict of str to float, or Goodput
            ``hours`` and ``gpu_hours`` [h], ``cost`` in the currency of the price, and, with
            `power`, ``energy_kwh`` [kWh]. With `mtbf` a `Goodput`.

        Raises
        ------
        ValueError
            For no price; for no amount, several, or one that the workload does not have; for checkpoints without
            `mtbf`; if failures come faster than the job restarts.

        Warns
        -----
        UserWarning
            If the run does not fit into the memory of a rank: what it would cost is said all the same.
        """
        units = ", ".join(self.throughput)
        unknown = [unit for unit in amount if unit not in self.throughput]
        if unknown:
            _refuse_argument(unknown[0], self.throughput)
        if not amount:
            raise ValueError(f"the amount is missing; give one of {units}, as in samples=1e6")
        if price_per_gpu_hour is None:
            unit = next(iter(amount))
            raise ValueError(
                "price_per_gpu_hour is missing; give the price of a rank for an hour, as in "
                f"cost(2.5, {unit}=1e6); 0 counts hours alone"
            )
        if len(amount) > 1:
            raise ValueError(f"amounts are {', '.join(amount)}; give one of {units}")
        [(unit, count)] = amount.items()
        rate = self.throughput[unit]
        hours = check_positive(unit, count) * check_positive("epochs", epochs) / rate / 3600
        from perfkit.readers.measured_jitter import read_jitter

        of_ranks = read_jitter(jitter)
        waiting = hours * float(wait_for_slowest(of_ranks.spread, ranks=self.ranks))
        price = check_positive("price_per_gpu_hour", price_per_gpu_hour, zero=True)
        watts = check_positive("power", power, zero=True)
        shortage = find_shortage(self)
        if shortage is not None:
            text = f"this run cannot be: {shortage}; its cost is that with enough memory"
            warnings.warn(text, UserWarning, stacklevel=2)
        if mtbf is not None:
            return find_goodput(
                self,
                hours,
                waiting,
                notes=of_ranks.notes,
                price_per_gpu_hour=price,
                power=watts,
                mtbf=mtbf,
                checkpoint=checkpoint,
                write_rate=write_rate,
                restart=restart,
                interval=interval,
                start=start,
            )
        stated = {
            "checkpoint": checkpoint,
            "write_rate": write_rate,
            "restart": restart,
            "interval": interval,
            "start": start,
        }
        for name, value in stated.items():
            if value is not None:
                raise ValueError(
                    f"{name} is {show(value)}; it counts with failures alone; give mtbf=, too, such as "
                    "mtbf='llama-3'"
                )
        hours += waiting
        gpu_hours = hours * self.ranks
        account = {"hours": hours, "gpu_hours": gpu_hours, "cost": gpu_hours * price}
        if watts:
            account["energy_kwh"] = gpu_hours * watts / 1000
        return account

    def sensitivity(self, swing: float = 0.2) -> uncertainty.Sensitivity:
        """Predict the iteration again with less and with more of each resource, one at a time.

        Parameters
        ----------
        swing : float, optional
            How much less and more of a resource the chart shows: 0.2 is 1 / 1.2 and 1.2 times as
            much [-].

        Returns
        -------
        sensitivity : Sensitivity
            Table and tornado chart of the resources that the platform knows.
        """
        return uncertainty.find_sensitivity(self, swing)

    def against(self, measured: "float | str | MeasuredStep | TrainingLog") -> "Deviation":
        """Set a measured iteration beside the prediction.

        Parameters
        ----------
        measured : float or str or MeasuredStep or TrainingLog
            Time of an iteration [s], as text with its unit, such as ``44ms``; or what `perfkit.read_training_log`
            read.

        Returns
        -------
        deviation : Deviation
            How far it is, whether inside the interval, and what could explain it.

        Raises
        ------
        ValueError
            For anything else.

        Examples
        --------
        >>> import perfkit as pk
        >>> r = pk.predict(pk.Transformer.bert("bert-base", batch=2, sequence=128), "zen3-2")
        >>> r.against("20s").is_inside
        False
        """
        from perfkit.prediction.against import Deviation, read_measured

        return Deviation(self, read_measured(measured))

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
        """A row for every group of ranks, with the columns of an account."""
        import polars

        rows = []
        for timeline in self._timeline.rank_timelines:
            ranks = timeline.times.group.ranks
            rows.append({"rank": ranks[0], "ranks": len(ranks), **account(timeline)})
        return polars.DataFrame(rows)

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
            ``breakdown``, ``timeline``, ``modules`` or ``memory``, see `memory_over_time`: of one rank,
            replicas with `zero` 0 to 3, a DLRM and captured steps.

        Raises
        ------
        ValueError
            For the memory of a strategy that is known at its fullest moment alone.
        """
        from perfkit import plots

        check_choice("kind", kind, CHARTS)
        draw: Callable[..., Picture] = getattr(plots, CHARTS[kind])
        if kind == "timeline":
            return draw(self.timeline(), about=self.about, time=self.time)
        if kind == "memory":
            memory = self.memory()
            reserve = memory.reserve or None
            return draw(
                self.memory_over_time(),
                capacity=memory.capacity,
                reserve=reserve,
                about=self.about,
            )
        return draw(getattr(self, kind)(), about=self.about)

    def _has_chart(self, kind: str) -> bool:
        """Whether there is a chart of this kind: of memory only where it is known over time."""
        graphs = [timeline.graph for timeline in self._timeline.rank_timelines]
        return kind != "memory" or all(graph.held is None for graph in graphs)

    @property
    def about(self) -> str:
        """The workload, and on how many ranks of which platform it runs."""
        where = f"{self.ranks} of {self.platform.network.ranks} ranks of {self.platform.name}"
        return f"{self.workload.description} on {where}"

    @property
    def _unhidden(self) -> str:
        if self.ranks > 1 and self.serial < self.time:
            return "if nothing overlapped nor waited for other ranks"
        return "if nothing overlapped"

    def sections(self) -> Sections:
        """What a report shows, see `perfkit.ground.results.Sections`."""
        memory = self.memory()
        yield "", self.chart("breakdown")
        times = {"time of an iteration": self.time, "the busiest resource alone": self.lower_bound}
        times |= {self._unhidden: self.serial, "if the host were never late": self.device_time}
        rows = [(name, format_time(seconds)) for name, seconds in times.items()]
        rows += [
            ("80% interval", " to ".join(map(format_time, self.interval()))),
            ("bottleneck", self.bottleneck),
            ("software", self.software),
            ("memory", repr(memory)),
        ]
        if memory.reserve > 0:
            least, most = map(format_bytes, memory.reserved_range)
            reserved = f"{format_bytes(memory.reserved)} ({least} to {most} in half of public logs)"
            rows.append(("with its reserve", reserved))
        rows += [
            (f"{name} a second", write_cell("", rate, None))
            for name, rate in self.throughput.items()
        ]
        if self.mfu:
            peak = self.platform.device.peaks[self.workload.dtype].value
            of_peak = write_cell("", peak / 1e12, None)
            share = f"share of {of_peak} TFLOP/s, the peak in {self.workload.dtype} (MFU)"
            rows.append((share, f"{self.mfu:.1%}"))
        yield "Time and memory", [("quantity", "value"), *rows]
        yield "What 20 % more would bring", self._list_helps()
        for kind in CHARTS:
            if kind != "breakdown" and self._has_chart(kind):
                yield "", self.chart(kind)
        yield "Where the time goes", self.breakdown()
        yield "", self.platform

    def _list_helps(self) -> list[Sequence[str]]:
        """Rows of text: by how much an iteration is shorter with 20 % more of each resource, the
        largest first."""
        rows: list[Sequence[str]] = [("of this resource", "iteration", "shorter by")]
        for resource in self.sensitivity(0.2).table().sort("more_s").to_dicts():
            name, time = resource["resource"], resource["more_s"]
            gain = 1 - time / self.time
            if gain >= _TELLING_GAIN:
                rows.append((f"{RESOURCES[name]} ({name})", format_time(time), f"{gain:.1%}"))
        return rows

    def explain(self) -> str:
        """The prediction in words: what was priced, the bounds of its time, and where the time
        goes."""
        lines = [self._answer]
        if self.is_single_rank_assumed:
            most = self.platform.network.ranks
            lines.append(
                f"  ranks: 1 of the {most} of {self.platform.name}, as ranks is left out; ranks={most} takes all"
            )
        lines += [
            f"  {self._describe_rates()}",
            f"  {self._described}",
            f"  at least {format_time(self.lower_bound)} (busiest resource alone), "
            f"{format_time(self.serial)} {self._unhidden}",
            f"  stack: {self.software}",
        ]
        for (phase, kind), (count, seconds) in self._largest[:6]:
            label = f"{phase} {kind}".strip().replace("_", " ")
            operations = format_count(count, "operation")
            of_time = f"{seconds / self.time:6.1%}  {format_time(seconds):>9}"
            lines.append(f"  {of_time}  {label} ({operations})")
        if self.execution == "graphs":
            share, fixed = self.fixed_time / self.time, format_time(self.fixed_time)
            lines.append(f"  {share:6.1%}  {fixed:>9}  of it fixed time of kernels, however small")
        kinds = {label.name: label.kind for label in self._timeline.rank_timelines[0].graph.labels}
        for name, seconds in self.unmodelled.items():
            words = "up to " if uncertainty.has_unknown_work(name, kinds.get(name, "")) else ""
            lines.append(
                f"  not modelled, timed as memory traffic: {name} {words}{format_time(seconds)}"
            )
        return "\n".join([*lines, *write_warnings(self.warnings)])

    @property
    def _answer(self) -> str:
        """The time with its interval and what sets the pace; and that a rank has too little memory."""
        time = format_interval(self.time, *self.interval(0.8))
        shortage = f", {self.memory()}" if self.fits is False else ""
        return f"{time}, {self.bottleneck}{shortage}"

    def _describe_rates(self) -> str:
        """What is trained in a second, the share of the peak, and the memory of a rank."""
        words = []
        for name, rate in self.throughput.items():
            if name != "iterations" or len(self.throughput) == 1:
                words.append(f"{write_cell('', rate, None)} {name}/s")
        if "tokens" in self.throughput and self.ranks > 1:
            of_rank = f"{self.throughput['tokens'] / self.ranks:,.0f}"
            rank = "a rank" if self.platform.device.kind == "cpu" else "a GPU"
            words[-1] += f" ({of_rank} {rank})"
        if self.mfu:
            words.append(f"MFU {self.mfu:.1%}")
        if self.fits is not False:  # else the first line says it
            words.append(f"{self.memory()}")
        return ", ".join(words)

    @property
    def _described(self) -> str:
        """What was priced: the workload, where it runs, number format, optimizer, execution."""
        dtype = self.workload.dtype
        if getattr(self.workload, "mixed", False):
            way = self.stack.mixed
            if way == "masters":
                way = "with fp32 masters"
            dtype += f" {way}"
        optimizer = getattr(self.workload, "optimizer", "") or getattr(
            self.workload, "updated_by", ""
        )
        words = [self.about, dtype, optimizer, self.execution]
        attention = list_attention(self._timeline.rank_timelines[0].graph, self.platform)
        if attention:
            words.append(f"{'/'.join(attention)} attention")
        return ", ".join(word for word in words if word)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        return f"{self._answer}: {self._described}"

    def __repr__(self) -> str:
        return self.headline()
