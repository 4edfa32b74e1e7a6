"""A measured iteration: where its time went, rank by rank, in the frames and charts of a
prediction."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl

from perfkit.calibration.activity import ROLES, account, fill_time, list_steps, list_work, time_host
from perfkit.calibration.collectives import add_nodes, list_collectives, read_ranks
from perfkit.calibration.doubts import check_device, count_things, list_doubts
from perfkit.calibration.fixes import Fixes, find_fixes
from perfkit.calibration.rank_times import measure_jitter
from perfkit.calibration.replay_links import Recorded
from perfkit.ground.forks import check_threads
from perfkit.ground.results import Picture, Sections, Table, Tabular, write_cells, write_notes
from perfkit.ground.units import (
    Array,
    check_choice,
    check_positive,
    check_type,
    escape,
    format_table,
    format_time,
    rank_largest,
    show,
)
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import Named, load_platform
from perfkit.prediction import accounts
from perfkit.prediction.cost import size_rooflines
from perfkit.prediction.result import Prediction
from perfkit.readers.kineto import DEVICE, TraceFile, find_basis
from perfkit.readers.measured_jitter import Jitter
from perfkit.workloads.graph import PHASES, Graph

#: How the time of an iteration is measured, see `perfkit.readers.kineto.find_basis`, in short and in
#: words.
BASES = {
    "kernels": "from kernel to kernel",
    "host step": "from mark to mark on the host",
    "device span": "step unmarked, first to last work of the device",
    "host span": "step unmarked, first to last event",
}
_CHARTS = ("idle", "breakdown", "timeline", "modules")
#: What a chart calls work of which no host event tells the phase.
_NO_PHASE = "no phase"
#: Roles of recorded work; the other roles fill the time between.
_WORKED = ("compute", "communication", "copies")
#: What may cause a difference between two steps.
_SAYS = {
    "host": "how fast the host launches, and what hides it",
    "loading": "how fast data is loaded",
    "synchronisation": "calls in which the host waits for the device",
    "queued": "waits between streams",
    "waiting": "unequal work of the ranks, or unequal starts",
    "collective": "messages, links, or what hides them",
}
_NS = 1e-9


@dataclass(frozen=True, eq=False)
class Trace(Tabular):
    """A training iteration as PyTorch's profiler recorded it on one rank or several.

    Parameters
    ----------
    files : tuple of TraceFile
        Traces, one per rank.
    basis : str
        How the time of an iteration is measured, one of `BASES` [-].
    sizes : mapping of str to float, optional
        Message sizes of collectives by a pattern of the kernel's name, for traces that do not hold
        them [B].
    """

    report_title = "A training iteration as PyTorch's profiler recorded it on one rank or several"

    files: tuple[TraceFile, ...]
    basis: str
    sizes: Mapping[str, float] = field(default_factory=dict)

    @property
    def time(self) -> float:
        """Time of an iteration: mean over the steps that are kept, and over ranks [s]."""
        steps = (
            self._steps.filter("kept").group_by("rank").agg(pl.mean("time_s"))["time_s"].to_list()
        )
        return float(sum(steps) / len(steps))

    def steps(self) -> Table:
        """Steps of every rank: rank, step [-]; begin_ns, time_ns [ns], time_s [s]; kept, and the reason
        if not kept."""
        return pl.concat([list_steps(file, self.basis) for file in self.files])

    def collectives(self, ranks_per_node: int | None = None) -> Table:
        """Every collective of every rank, see `perfkit.calibration.collectives.list_collectives`.

        Parameters
        ----------
        ranks_per_node : int, optional
            Ranks of a node, which are numbered one node after the other: then the frame also has nodes
            and ranks_of_node, how the group lies on them [-].

        Returns
        -------
        frame : polars.DataFrame
            One row for each collective of each rank.
        """
        frame = list_collectives(self.files, self._works, self.sizes)
        if ranks_per_node is None:
            return frame
        local = check_positive("ranks_per_node", ranks_per_node, integer=True)
        return add_nodes(frame, int(local))

    @property
    def has_device(self) -> bool:
        """Whether the trace holds work of a device."""
        return any(file.events["cat"].is_in(DEVICE).any() for file in self.files)

    @cached_property
    def _steps(self) -> Table:
        """What `steps` returns, listed once."""
        return self.steps()

    @cached_property
    def _collectives(self) -> Table:
        """What `collectives` returns, listed once."""
        return self.collectives()

    @cached_property
    def _works(self) -> list[Table]:
        return [list_work(file) for file in self.files]

    @cached_property
    def doubts(self) -> tuple[str, ...]:
        """What the files lack, and where they contradict themselves."""
        doubts: list[str] = []
        for file, work in zip(self.files, self._works, strict=True):
            doubts.extend(list_doubts(file, work))
        return (*doubts, *_compare_ranks(self.files))

    @cached_property
    def _accounts(self) -> Table:
        """Work of the mean step of every rank: times, how often it ran [-]; own_s, its time that
        nothing hides [s]."""
        check_threads()
        frames = []
        for file, work in zip(self.files, self._works, strict=True):
            filled = fill_time(file, work, self._collectives.filter(rank=file.rank))
            windows = self._steps.filter(pl.col("kept"), rank=file.rank)
            spans = filled.select("role", "start", "end")
            starts, ends = spans["start"].to_numpy(), spans["end"].to_numpy()
            own = np.zeros(len(filled))
            times = np.zeros(len(filled))
            for begin, time in windows.select("begin_ns", "time_ns").iter_rows():
                # a trace of many steps has few works in each
                is_near = (starts < begin + time) & (ends > begin)
                near = account(spans.filter(pl.Series(is_near)), begin, begin + time)
                own[is_near] += near * _NS / len(windows)
                times[(starts >= begin) & (starts < begin + time)] += 1 / len(windows)
            worked = filled["role"].is_in(_WORKED).to_numpy()
            frames.append(
                filled.with_columns(own_s=pl.Series(own), times=pl.Series(times * worked))
            )
        return pl.concat(frames)

    @cached_property
    def busiest(self) -> int:
        """The rank that computes longest, which breakdown and modules show [-]."""
        idle = self.idle()
        return int(idle["rank"][rank_largest(idle["busy_s"].to_list())[0]])

    def breakdown(self) -> Table:
        """Time of the busiest rank by phase and operation class, waiting, and idle by cause; sums
        to its time.

        Columns phase, kind, operations [-], time_s [s], share [-]. Work that overlaps counts once,
        see `perfkit.calibration.activity.ROLES`. Rows without a phase are those of `idle`.
        """
        phase = (
            pl.when(pl.col("role").is_in(_WORKED))
            .then("phase")
            .otherwise(pl.lit(""))
            .alias("phase")
        )
        sums = {"operations": pl.sum("times").round().cast(pl.Int64), "time_s": pl.sum("own_s")}
        frame = (
            self._accounts.filter(rank=self.busiest)
            .group_by(phase, "kind", maintain_order=True)
            .agg(**sums)
        )
        frame = frame.filter(pl.col("time_s") > 0).with_columns(
            share=pl.col("time_s") / pl.sum("time_s")
        )
        return frame.sort("time_s", descending=True, maintain_order=True)

    table = breakdown  # all results have a table

    def timeline(self, level: str = "operation", depth: int | None = None) -> Table:
        """Start and end of every operation, module or stage of the step whose time is nearest the
        mean.

        Parameters
        ----------
        level : str
            ``operation`` (its kernels together), ``module`` or ``stage`` (forward, backward,
            update).
        depth : int, optional
            Levels of the module's path that are shown; all by default [-].

        Returns
        -------
        frame : polars.DataFrame
            As `Prediction.timeline`; each rank on its own clock.
        """
        check_choice("level", level, ("operation", "module", "stage"))
        apart = (pl.col("time_ns") - pl.mean("time_ns").over("rank")).abs()
        near = (
            self._steps.filter("kept").sort(apart, maintain_order=True).unique("rank", keep="first")
        )
        frame = pl.concat(self._works).join(
            near.select("rank", "begin_ns", "time_ns"), on="rank", maintain_order="left"
        )
        begin, time = pl.col("begin_ns"), pl.col("time_ns")
        frame = frame.filter((pl.col("end") > begin) & (pl.col("start") < begin + time))
        times = {f"{end}_s": (pl.col(end) - begin).clip(0, time) * _NS for end in ("start", "end")}
        first = pl.when(pl.col("collective") >= 0).then("collective").otherwise("index")
        alone = pl.when(pl.col("operation") < 0).then(-1 - first).otherwise("operation")
        frame = frame.with_columns(stream="role", operation=alone, **times)
        sums = (pl.first("name", "kind", "phase", "module"), pl.min("start_s"), pl.max("end_s"))
        frame = frame.group_by("rank", "stream", "operation", maintain_order=True).agg(*sums)
        return frame if level == "operation" else accounts.list_spans(frame, level, depth)

    def modules(self, depth: int | None = 2) -> Table:
        """Time of every module on the busiest rank by phase, with the idle time of the device
        before it.

        Parameters
        ----------
        depth : int or None
            Levels of the module's path that are shown; None for all [-].

        Returns
        -------
        frame : polars.DataFrame
            module (empty for none), operations [-]; forward_s, backward_s, update_s, and other_s
            without a phase, which sum to the time; idle_s, a part of them [s]; share [-].
        """
        own, idle = pl.col("own_s"), pl.col("role").is_in(("queued", "host"))
        sums = {f"{phase}_s": own.filter(phase=phase).sum() for phase in PHASES}
        sums |= {
            "other_s": own.filter(~pl.col("phase").is_in(PHASES)).sum(),
            "idle_s": own.filter(idle).sum(),
        }
        sums = {"operations": pl.sum("times").round().cast(pl.Int64), **sums, "share": own.sum()}
        groups = self._accounts.filter(rank=self.busiest).group_by(
            accounts.cut_path(depth), maintain_order=True
        )
        frame = groups.agg(**sums).with_columns(pl.col("share") / pl.sum("share"))
        return pl.concat([frame.filter(pl.col("module") != ""), frame.filter(module="")])

    def idle(self) -> Table:
        """Time in which every rank computes, and why it is idle in the rest; the columns sum to its
        time.

        Columns rank [-]; busy_s, kernels; communication_s, collectives that no kernel hides;
        waiting_s, their waits for other ranks (null, and part of communication_s, where ranks were
        not matched); copies_s, copies that nothing hides; queued_s, work that is launched but waits
        for another stream or for its start; and time without launched work: synchronisation_s, the
        host waits for the device; loading_s, it waits for data; host_s, other reasons [s].
        """
        role = pl.col("role").replace({"compute": "busy", "rest": "host"})
        names = dict.fromkeys("busy" if name == "compute" else name for name in ROLES[:-1])
        times = {f"{name}_s": pl.col("own_s").filter(role == name).sum() for name in names}
        frame = self._accounts.group_by("rank", maintain_order=True).agg(**times)
        met = self._collectives.drop_nulls("transfer_s")["rank"].unique()
        return frame.with_columns(
            waiting_s=pl.when(pl.col("rank").is_in(met.implode())).then("waiting_s")
        )

    def stragglers(self, by: str = "collective") -> Table:
        """Which rank the others waited for; the largest loss comes first.

        Parameters
        ----------
        by : str
            ``collective`` or ``rank``.

        Returns
        -------
        frame : polars.DataFrame
            By collective: iteration, group, order, as in `collectives`; rank, the last one to
            arrive [-]; operation, nbytes [B]; late_s, the median time that the others waited for
            it, and waited_s, the sum of their waits [s]. By rank, over all recorded steps: rank;
            last, the collectives in which it arrived last [-]; late_s and waited_s, sums of those;
            and of its mean step busy_s, host_s and waiting_s, as in `idle` [s].
        """
        check_choice("by", by, ("collective", "rank"))
        waited, first = pl.col("waiting_s"), pl.first("rank", "operation", "nbytes")
        calls = self._collectives.drop_nulls("waiting_s").sort("waiting_s", maintain_order=True)
        groups = calls.group_by("iteration", "group", "order", maintain_order=True)
        frame = groups.agg(first, late_s=waited.slice(1).median(), waited_s=waited.sum())
        if by == "rank":
            sums = frame.group_by("rank").agg(
                pl.sum("late_s", "waited_s"), last=pl.len().cast(pl.Int64)
            )
            ranks = self.idle().select("rank", "busy_s", "host_s", "waiting_s")
            frame = ranks.join(sums, on="rank", how="left", maintain_order="left").with_columns(
                pl.all().fill_null(0)
            )
            frame = frame.select(
                "rank", "last", "late_s", "waited_s", "busy_s", "host_s", "waiting_s"
            )
        return frame.sort("waited_s", descending=True, maintain_order=True)

    def jitter(self) -> Jitter:
        """How much the time that a rank takes for a step varies: from step to step, and between ranks.

        Returns
        -------
        jitter : Jitter
            Its `spread` is the ``jitter`` of `Prediction.cost`, which also takes the trace itself; of one
            step it is shown and not taken, as it does not tell chance from slow ranks.

        Raises
        ------
        ValueError
            For one step of one rank, which tells nothing, and for ranks that have no step in common.
        """
        return measure_jitter(self.files, self._works, self._steps, self._collectives, self.basis)

    def host(self) -> Table:
        """The five overheads of every rank's host, T1 to T5, see
        `perfkit.calibration.activity.time_host`."""
        return pl.concat([time_host(file) for file in self.files])

    def graph(self, rank: int | None = None, *, progress: bool = True) -> Graph:
        """Operations of a recorded step with their sizes, which `pk.predict` can price on any
        platform.

        Parameters
        ----------
        rank : int, optional
            Which rank; by default the `busiest` [-].
        progress : bool
            Whether to show a line on a terminal while it takes seconds.

        Returns
        -------
        graph : Graph
            As `pk.capture` would record it, see `perfkit.calibration.step_graph.record_step`.

        Warns
        -----
        UserWarning
            If operations have no sizes in the trace, such as those of CUDA graphs and of Triton:
            their work is unknown.
        """
        graph, _ = self.record(rank, progress=progress)
        text = describe_unsized(graph)
        if text:
            warnings.warn(text, stacklevel=2)
        return graph

    def record(self, rank: int | None = None, *, progress: bool = False) -> tuple[Graph, Array]:
        """The `graph` of a recorded step, and how long its operations took.

        Parameters
        ----------
        rank : int, optional
            Which rank; by default the `busiest` [-].
        progress : bool
            Whether to show a line on a terminal while it takes seconds.

        Returns
        -------
        graph : Graph
            As `graph` returns it.
        seconds : array
            Device time of each operation, see `perfkit.calibration.step_graph.record_step` [s].
        """
        from perfkit.calibration.step_graph import record_step

        check_type("progress", progress, bool)
        files = {file.rank: file for file in self.files}
        if rank is not None and rank not in list(files):
            raise ValueError(
                f"rank is {show(rank)}; ranks that were read are {', '.join(map(str, files))}; choose one"
            )
        file = files[self.busiest if rank is None else rank]
        return record_step(file, progress=progress)

    def roofline(self, platform: Named, rank: int | None = None) -> Table:
        """How close each operation of a recorded step comes to the limits of a device.

        Parameters
        ----------
        platform : Platform, str or Path
            Its peaks and its memory bandwidth are the limits.
        rank : int, optional
            Which rank; by default the `busiest` [-].

        Returns
        -------
        frame : polars.DataFrame
            Operations with known sizes, in order: name, kind, phase, module; time_s of the kernels
            [s], flops [FLOP], nbytes of traffic [B]; peak_share and bandwidth_share, the part of
            each limit that they reach [-].
        """
        (graph, seconds), where = self.record(rank), load_platform(platform)
        with keep_quiet():
            work = size_rooflines(graph, where)
        limits = {
            "peak_share": work.flops / work.peak,
            "bandwidth_share": work.nbytes / work.bandwidth,
        }
        columns = {"time_s": seconds, "flops": work.flops, "nbytes": work.nbytes, **limits}
        frame = graph.table().select("name", "kind", "phase", "module").with_columns(**columns)
        frame = frame.filter(
            pl.col("time_s") > 0, ~pl.col("kind").is_in(("other", "collective", "transfer"))
        )
        return frame.with_columns(pl.col(*limits) / pl.col("time_s"))

    def compare(self, other: "Trace | Prediction") -> Table:
        """Compare this trace with another one or with a prediction; the largest difference comes
        first.

        Parameters
        ----------
        other : Trace or Prediction
            Of the same training step.

        Returns
        -------
        frame : polars.DataFrame
            phase, kind; operations [-] and time_s [s] of this trace, other_operations and other_s
            of the other; difference_s, time_s minus other_s [s]; says, what to look at.
        """
        check_type("other", other, Trace | Prediction)
        theirs = other.breakdown().select(
            "phase", "kind", other_operations="operations", other_s="time_s"
        )
        frame = (
            self.breakdown()
            .drop("share")
            .join(theirs, on=["phase", "kind"], how="full", coalesce=True)
        )
        frame = frame.with_columns(pl.all().exclude("phase", "kind").fill_null(0))
        same = (pl.col("operations") / pl.col("other_operations")).is_between(0.9, 1.1)
        each = (
            pl.when(same)
            .then(pl.lit("the time of each operation"))
            .otherwise(pl.lit("the number of operations"))
        )
        says = pl.col("kind").replace_strict(_SAYS, default=None).fill_null(each)
        frame = frame.with_columns(difference_s=pl.col("time_s") - pl.col("other_s"), says=says)
        return frame.sort(pl.col("difference_s").abs(), descending=True, maintain_order=True)

    def fixes(self) -> Fixes:
        """What would help most: changes, ranked by the time that an iteration would become shorter.

        Returns
        -------
        fixes : Fixes
            Each change alone with its interval, and the best ones together; see
            `perfkit.calibration.fixes.find_fixes`.

        Raises
        ------
        ValueError
            For a trace without work of a device.

        Notes
        -----
        The recorded steps are replayed with each change, so that time which something else hides
        counts as nothing.
        """
        return find_fixes(self.recorded)

    @property
    def recorded(self) -> Recorded:
        """What `perfkit.calibration.replay_links.record_run` makes a replay of."""
        return Recorded(
            self.files, self._works, self._steps, self._collectives, self.time, self.has_device
        )

    def chart(self, kind: str = "breakdown") -> Picture:
        """Draw the trace.

        Parameters
        ----------
        kind : str
            ``breakdown``; ``idle``, rank by rank; ``timeline``: operations of all ranks, and above
            them stages and modules of the busiest rank; ``modules``.

        Returns
        -------
        chart : altair.Chart or LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        check_choice("kind", kind, _CHARTS)
        if kind == "idle":
            rows = (
                self.idle()
                .unpivot(index="rank", variable_name="kind", value_name="time_s")
                .drop_nulls()
            )
            rows = rows.with_columns(
                phase=pl.format("rank {}", "rank"), kind=pl.col("kind").str.strip_suffix("_s")
            )
            return plots.breakdown_bars(rows, title="What every rank does")
        if kind == "timeline":
            named = ("stage", "stage", None), ("module", "module", 1), ("submodule", "module", 2)
            scales = [
                self.timeline(level, depth).with_columns(stream=pl.lit(name))
                for name, level, depth in named
            ]
            shown = [
                frame.filter(rank=self.busiest)
                for frame in scales[: 3 if len(self.modules()) > 1 else 1]
            ]
            lanes = pl.concat([*shown, self.timeline()], how="diagonal")
            # names of lone kernels are too long and too many for a legend
            phase = pl.when(pl.col("phase") == "").then(pl.lit(_NO_PHASE)).otherwise("phase")
            return plots.timeline_lanes(lanes.with_columns(phase=phase))
        if kind == "modules":
            return plots.module_bars(self.modules())
        return plots.breakdown_bars(
            self.breakdown(), title=f"Where the time of rank {self.busiest} goes"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the times less certain."""
        notes = list(self.doubts)
        alone = self._collectives["transfer_s"].null_count()
        if alone:
            notes.append(
                f"the times of {alone} collectives include waits: no other rank that was read took part"
            )
        observers: dict[str, None] = {}
        for file in self.files:
            observers.update(dict.fromkeys(file.observers))
        if observers:
            notes.append(
                f"the profiler also recorded {' and '.join(observers)}, which slows the host: its "
                "times are upper bounds"
            )
        return tuple(notes)

    def sections(self) -> Sections:
        """Parts of a report, see `perfkit.ground.results.Sections`."""
        yield "Ranks", self.idle()
        for kind in _CHARTS:
            if kind != "modules" or len(self.modules()) > 1:
                yield "", self.chart(kind)
        yield f"Where the time of rank {self.busiest} goes", self.breakdown()
        shown_ranks = 8 if len(self.files) > 1 else 0
        yield "For whom the others waited", self.stragglers("rank").head(shown_ranks)
        yield "Steps", self._steps.drop("begin_ns", "time_ns")
        if self.has_device:
            yield "What would help most", self.fixes()

    def explain(self) -> str:
        """The trace in words: what was recorded, where the time goes, which steps were left out,
        and notes."""
        lines = [repr(self)]
        for phase, kind, count, seconds, share in self.breakdown().head(8).rows():
            label = f"{phase} {kind}"
            if count > 0:
                label += f" ({count_things(count, 'operation')})"
            label = label.strip().replace("_", " ")
            lines.append(f"  {share:6.1%}  {format_time(seconds):>9}  {label}")
        if len(self.files) > 1:
            lines.append(format_table(write_cells(self.idle()), numbers=True))
        left = (
            self._steps.filter(~pl.col("kept"))
            .group_by("reason", maintain_order=True)
            .agg(pl.col("step").unique())
        )
        lines += [
            f"  left out: step {', '.join(map(str, found))}: {why}" for why, found in left.rows()
        ]
        return "\n".join([*lines, *write_notes("note", self.warnings)])

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        names = name_devices(self.files)
        if not self.has_device:
            device = f"the host of {names[0]}" if names else "a CPU"
        else:
            device = names[0] if names else "an unnamed device"
        steps = self._steps.filter("kept")["step"].n_unique()
        basis = BASES[self.basis]
        if "span" not in self.basis:
            basis = f"{count_things(steps, 'step')}, {basis}"
        largest = []
        for phase, kind, _, _, share in self.breakdown().head(2).rows():
            largest.append(f"{share:.0%} {phase} {kind}".replace("  ", " "))
        parts = " and ".join(largest)
        if len(self.files) > 1:
            own = self._steps.filter("kept", rank=self.busiest)["time_s"].to_numpy().mean()
            parts = f"of rank {self.busiest} ({format_time(own)}): {parts}"
        ranks = count_things(len(self.files), "rank")
        return (
            f"trace of {ranks} on {escape(device, 60)}: {format_time(self.time)} ({basis}), {parts}"
        )

    def __repr__(self) -> str:
        return self.headline()


def name_devices(files: Sequence[TraceFile]) -> list[str]:
    """Names of the devices that worked, each once; of a trace that tells no device's number the
    first one that it lists."""
    names: dict[str, None] = {}
    for file in files:
        used = {*file.events.filter(pl.col("cat").is_in(DEVICE))["pid"].to_list()}
        worked = [each for each in file.devices if each.get("id") in used]
        for device in worked or file.devices[:1]:
            if device.get("name"):
                names[str(device["name"])] = None
    return list(names)


def _compare_ranks(files: Sequence[TraceFile]) -> list[str]:
    """Say where files of several ranks cannot be of one job, or are of unlike devices."""
    doubts = []
    for file in files:
        if file.rank is not None and file.ranks is not None and file.rank >= file.ranks:
            doubts.append(
                f"{escape(file.source, 200)}: it is of rank {file.rank}, and says that there are "
                f"{file.ranks} ranks"
            )
    worlds = sorted({file.ranks for file in files if file.ranks is not None})
    if len(worlds) > 1:
        doubts.append(
            f"the files are of jobs with {' and '.join(map(str, worlds))} ranks: these may not "
            "belong together"
        )
    by_device: dict[str, str] = {}
    for file in files:
        for name in name_devices([file])[:1]:
            by_device.setdefault(name, file.source)
    if len(by_device) > 1:
        listed = ", ".join(
            f"{escape(name, 60)} ({escape(source, 60)})" for name, source in by_device.items()
        )
        doubts.append(f"the ranks worked on several kinds of device: {listed}")
    return doubts


def find_unsized(graph: Graph) -> list[int]:
    """Operations of a recorded step that have no sizes in its trace [-]."""
    sized = {*graph.accesses.operation.tolist()}
    nbytes = graph.column("nbytes")
    unsized = []
    for index, label in enumerate(graph.labels):
        empty_message = label.kind == "collective" and not nbytes[index]
        if empty_message or (label.kind == "other" and index not in sized):
            unsized.append(index)
    return unsized


def describe_unsized(graph: Graph) -> str:
    """Say how many operations of a recorded step have no sizes; empty if all have."""
    unsized = find_unsized(graph)
    if not unsized:
        return ""
    names = dict.fromkeys(escape(graph.labels[index].name, 40) for index in unsized)
    shown = ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{len(unsized)} of {len(graph.labels)} operations of {escape(graph.name, 200)} have no "
        f"sizes in the trace ({shown}): a prediction counts their launches, and none of their work"
    )


def read_trace(
    paths: str | Path | Sequence[str | Path],
    *,
    basis: str | None = None,
    sizes: Mapping[str, float] | None = None,
    progress: bool = True,
) -> Trace:
    """Read training steps that PyTorch's profiler recorded on any device, and find where the time
    went.

    Parameters
    ----------
    paths : str, Path or sequence of them
        Kineto traces, one per rank, plain or compressed; and execution traces of the same ranks, in
        the same order.
    basis : str, optional
        How the time of an iteration is measured, one of `BASES`; by default the first that the
        trace allows.
    sizes : mapping of str to float, optional
        Message sizes of collectives by a pattern of the kernel's name, for traces that do not hold
        them [B].
    progress : bool
        Whether to show a line on a terminal while a trace takes seconds.

    Returns
    -------
    trace : Trace
        Breakdown, timeline, modules, idle time, collectives, host.

    Raises
    ------
    ValueError
        For a file that is no trace, is cut off or has impossible values, for ranks that do not
        belong together, and for a basis that the trace does not have.
    """
    check_type("sizes", sizes, Mapping | None)
    check_type("progress", progress, bool)
    files = read_ranks(paths, progress=progress)
    for file in files:
        check_device(file)
    if basis is None:
        # the first that all ranks allow
        order = list(BASES)
        basis = max((find_basis(file.events) for file in files), key=order.index)
    else:
        check_choice("basis", basis, BASES)
    return Trace(tuple(files), basis, dict(sizes or {}))
