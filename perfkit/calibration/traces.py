"""A measured iteration: where its time went, rank by rank, in the frames and charts of a prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from perfkit.calibration.activity import list_work, time_host
from perfkit.calibration.meetings import list_collectives, read_ranks
from perfkit.calibration.windows import Account, account_rank, interpret_difference, list_spans, list_steps, split_waits
from perfkit.ground.results import Picture, Table, Tabular
from perfkit.ground.units import check_choice, check_type, escape, format_table, format_time, rank_largest
from perfkit.prediction import accounts
from perfkit.prediction.result import Prediction
from perfkit.readers.trace import TraceFile, time_iterations
from perfkit.workloads.graph import COLLECTIVES

#: What the time of an iteration is, see `perfkit.readers.trace.time_iterations`.
BASES = ("kernels", "host step", "device span", "host span")
#: Charts, and what a report says below them.
_CHARTS = {
    "idle": "What every rank did, and why its device was idle.",
    "breakdown": "The rank that computes longest: what nothing hides, so that the parts sum to its time.",
    "regions": "One step of that rank, from stages to operations.",
    "timeline": "One step, each rank on its own clock; neighbouring operations of one phase are drawn as one bar.",
    "modules": "Modules of that rank, with the idle time before their kernels.",
    "collectives": "The shortest time over ranks of every collective: its transfer without waits.",
}
_PHASES = ("data", "forward", "backward", "update")
_NS = 1e-9


@dataclass(frozen=True, eq=False)
class Trace(Tabular):
    """A training iteration as PyTorch's profiler recorded it on one rank or several.

    Parameters
    ----------
    files : tuple of TraceFile
        What was read, one per rank.
    basis : str
        What counts as an iteration, one of `BASES` [-].
    sizes : mapping of str to float, optional
        Message sizes of collectives by pattern of the kernel's name, where the trace says none [B].
    """

    files: tuple[TraceFile, ...]
    basis: str
    sizes: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that were read, in the order of the files [-]."""
        return tuple(number if file.rank is None else file.rank for number, file in enumerate(self.files))

    @cached_property
    def time(self) -> float:
        """Time of an iteration: mean over the steps that count, and over ranks [s]."""
        means = [float(steps.filter("kept")["time"].to_numpy().mean()) for steps in self._steps]
        return _NS * sum(means) / len(means)

    @cached_property
    def _steps(self) -> list[Table]:
        return [list_steps(file, self.basis) for file in self.files]

    @cached_property
    def _works(self) -> list[Table]:
        return [list_work(file) for file in self.files]

    @cached_property
    def _meetings(self) -> Table:
        return list_collectives(self.files, self._works, self.sizes)

    @cached_property
    def _accounts(self) -> list[Account]:
        works = (
            split_waits(work, self._meetings.filter(rank=n)) for n, work in zip(self.ranks, self._works, strict=True)
        )
        each = zip(self.files, works, self._steps, strict=True)
        return [account_rank(file, work, steps.filter("kept")) for file, work, steps in each]

    def _find(self, rank: int | None) -> int:
        """Place of a rank among those read; of the one that computes longest, unless given."""
        check_type("rank", rank, int | None)
        if rank is None:
            return rank_largest(self.idle()["busy_s"].to_list())[0]
        if rank not in self.ranks:
            raise ValueError(f"rank is {rank}; ranks that were read are {', '.join(map(str, self.ranks))}; choose one")
        return self.ranks.index(rank)

    def _stack(self, frames: Sequence[Table], **more: Any) -> Table:
        """Frames of all ranks above one another, the rank first."""
        ranks = zip(self.ranks, frames, strict=True)
        return pl.concat([frame.select(pl.lit(rank, pl.Int64).alias("rank"), pl.all()) for rank, frame in ranks])

    def steps(self) -> Table:
        """Steps of every rank, and why some do not count.

        Columns rank, step [-]; start_s, since the trace began, time_s [s]; reason, why it does not count; kept.
        """
        begins = [
            steps.with_columns(pl.col("begin") - f.events["ts"][0])
            for f, steps in zip(self.files, self._steps, strict=True)
        ]
        frame = self._stack(begins).with_columns(pl.col("begin", "time") * _NS)
        return frame.rename({"begin": "start_s", "time": "time_s"})

    def breakdown(self, rank: int | None = None) -> Table:
        """Time of a rank by phase and operation class, and idle by cause; sums to its time.

        Parameters
        ----------
        rank : int, optional
            Which rank; the one that computes longest, unless given [-].

        Returns
        -------
        frame : polars.DataFrame
            phase, kind, operations [-], time_s [s], share [-]. What runs beside something else counts once, see
            `perfkit.calibration.windows.ROLES`; what has no phase is waiting or idle, see `idle`.
        """
        work, causes = self._accounts[self._find(rank)]
        phase = pl.when(pl.col("kind") == "waiting").then(pl.lit("")).otherwise("phase").alias("phase")
        counts = pl.sum("times").round().cast(pl.Int64)
        frame = work.group_by(phase, "kind", maintain_order=True).agg(operations=counts, time_s=pl.sum("own_s"))
        rest = [("", cause, 0, time) for cause, time in causes.items()]
        frame = pl.concat([frame, pl.DataFrame(rest, frame.schema, orient="row")]).filter(pl.col("time_s") > 0)
        share = pl.col("time_s") / pl.sum("time_s")
        return frame.with_columns(share=share).sort("time_s", descending=True, maintain_order=True)

    table = breakdown  # what all results have

    def timeline(self, level: str = "operation", *, depth: int | None = None, rank: int | None = None) -> Table:
        """Start and end of every operation, kernel, module or stage of the step whose time is nearest the mean.

        Parameters
        ----------
        level : str
            ``operation`` (its kernels together), ``kernel``, ``module`` or ``stage`` (forward, backward, update).
        depth : int, optional
            Names of a module's path that are told apart; all of them, unless given [-].
        rank : int, optional
            Which rank; all of them, unless given [-].

        Returns
        -------
        frame : polars.DataFrame
            As `Prediction.timeline`; each rank on its own clock.
        """
        check_choice("level", level, ("operation", "kernel", "module", "stage"))
        frame = self._stack([list_spans(*pair) for pair in zip(self._works, self._steps, strict=True)])
        frame = frame if rank is None else frame.filter(rank=self.ranks[self._find(rank)])
        if level != "kernel":
            sums = (pl.first("name", "kind", "phase", "module"), pl.min("start_s"), pl.max("end_s"))
            frame = frame.group_by("rank", "stream", "operation", maintain_order=True).agg(*sums)
        return frame if level in ("kernel", "operation") else accounts.list_spans(frame, level, depth)

    def modules(self, depth: int | None = 2, *, rank: int | None = None) -> Table:
        """Time of every module, forward, backward and update, with the idle time of the device before it.

        Parameters
        ----------
        depth : int or None
            Names of a module's path that are told apart; None for all of them [-].
        rank : int, optional
            Which rank; the one that computes longest, unless given [-].

        Returns
        -------
        frame : polars.DataFrame
            module (empty for what belongs to none), operations [-], data_s (loading), forward_s, backward_s, update_s
            [s], idle_s (part of those) [s], share [-]; they sum to the time, less what is idle at its end.
        """
        work, spent = self._accounts[self._find(rank)].work, pl.col("own_s") + pl.col("idle_s")
        sums = {f"{phase}_s": spent.filter(phase=phase).sum() for phase in _PHASES}
        sums = {"operations": pl.sum("times").round().cast(pl.Int64), **sums, "idle_s": pl.sum("idle_s")}
        frame = work.group_by(accounts.cut_path(depth), maintain_order=True).agg(**sums, share=spent.sum())
        return frame.with_columns(pl.col("share") / pl.sum("share"))

    def idle(self) -> Table:
        """Time in which every rank computes, and why it does not; the columns sum to its time.

        Columns rank [-]; busy_s, kernels; communication_s, collectives that no kernel hides; waiting_s, of these for
        other ranks, null and in communication_s where ranks were not matched; copies_s, copies that nothing hides;
        host_s, nothing was launched; synchronisation_s, because the host waited for the device; loading_s, or for data;
        queued_s, launched, and waiting for another stream or for its start [s].
        """
        rows = []
        for rank, (work, causes) in zip(self.ranks, self._accounts, strict=True):
            sums = dict(work.group_by("role").agg(pl.sum("own_s")).iter_rows())
            met = self._meetings.filter(rank=rank)["transfer"].count() > 0
            times = {"busy_s": sums.get("compute", 0.0), "communication_s": sums.get("communication", 0.0)}
            times |= {"waiting_s": sums.get("waiting", 0.0) if met else None, "copies_s": sums.get("copies", 0.0)}
            rows.append({"rank": rank, **times, **{f"{cause}_s": time for cause, time in causes.items()}})
        return pl.DataFrame(rows, schema_overrides={"waiting_s": pl.Float64})

    def collectives(self) -> Table:
        """Every collective of every rank: its size, and how long it waited for other ranks.

        Columns as of `perfkit.calibration.meetings.list_collectives`, times in seconds.
        """
        names = ("time", "transfer", "waiting")
        frame = self._meetings.drop("index", "start").with_columns(pl.col(*names) * _NS)
        return frame.rename({name: f"{name}_s" for name in names})

    def communication(self) -> Table:
        """What ranks spend on collectives, how much of it kernels hide, and who is late.

        Columns rank, collectives [-]; total_s, with a collective in flight; exposed_s, of that while nothing computes;
        overlapped_s, the rest of it; waiting_s, for other ranks, as in `idle` [s]; late, how often this rank came to a
        collective after all others [-].
        """
        rows = []
        for idle, file, account, steps in zip(
            self.idle().to_dicts(), self.files, self._accounts, self._steps, strict=True
        ):
            alone = (
                account_rank(file, account.work.filter(role="communication"), steps.filter("kept")).work["own_s"].sum()
            )
            waits, exposed = self._meetings.filter(rank=idle["rank"])["waiting"], idle["communication_s"]
            times = {
                "total_s": alone,
                "exposed_s": exposed,
                "overlapped_s": alone - exposed,
                "waiting_s": idle["waiting_s"],
            }
            rows.append({"rank": idle["rank"], "collectives": len(waits), **times, "late": (waits == 0).sum()})
        return pl.DataFrame(rows, schema_overrides={"waiting_s": pl.Float64})

    def host(self) -> Table:
        """The five overheads of every rank's host, T1 to T5, under the observers that ran beside it.

        Columns rank, those of `perfkit.calibration.activity.time_host`, observers: each of them slows the host.
        """
        frames = []
        for file, work in zip(self.files, self._works, strict=True):
            frames.append(time_host(file, work).with_columns(observers=pl.lit(", ".join(file.observers))))
        return self._stack(frames)

    def compare(self, other: "Trace | Prediction") -> Table:
        """Put this trace beside another one, or beside a prediction; where they differ most comes first.

        Parameters
        ----------
        other : Trace or Prediction
            Of the same step.

        Returns
        -------
        frame : polars.DataFrame
            phase, kind; operations [-] and time_s [s] of this trace, other_operations and other_s; difference_s, how
            much longer this one is [s]; says, what that may mean.
        """
        check_type("other", other, Trace | Prediction)
        theirs = other.breakdown().select("phase", "kind", other_operations="operations", other_s="time_s")
        frame = self.breakdown().drop("share").join(theirs, on=["phase", "kind"], how="full", coalesce=True)
        frame = frame.with_columns(pl.all().exclude("phase", "kind").fill_null(0))
        frame = frame.with_columns(difference_s=pl.col("time_s") - pl.col("other_s"))
        frame = frame.sort(pl.col("difference_s").abs(), descending=True, maintain_order=True)
        return frame.with_columns(
            says=pl.Series([interpret_difference(row) for row in frame.to_dicts()], dtype=pl.String)
        )

    def chart(self, kind: str = "breakdown") -> Picture:
        """A picture of the trace.

        Parameters
        ----------
        kind : str
            ``breakdown``; ``idle``, rank by rank; ``timeline``; ``modules``; ``regions``: stages, modules and
            operations of one rank above one another, with their times; ``collectives``: transfers over message size.

        Returns
        -------
        chart : altair.Chart or LayerChart
            Ready to be shown or saved.
        """
        from perfkit import plots

        check_choice("kind", kind, _CHARTS)
        if kind == "idle":
            rows = self.idle().unpivot(index="rank", variable_name="kind", value_name="time_s").drop_nulls()
            rows = rows.with_columns(phase=pl.format("rank {}", "rank"), kind=pl.col("kind").str.strip_suffix("_s"))
            return plots.breakdown_bars(rows, title="What every rank does")
        if kind == "collectives":
            known = pl.col("operation").is_in(COLLECTIVES) & pl.all_horizontal(pl.col("nbytes", "transfer_s") > 0)
            time, keys = pl.col("transfer_s"), ("operation", "ranks", "nbytes")
            sums = {"time_s": time.median(), "q1_s": time.quantile(0.25), "q3_s": time.quantile(0.75)}
            points = self.collectives().filter(known).group_by(*keys, maintain_order=True).agg(**sums)
            return plots.collective_curves(points, [])
        if kind == "regions":
            return plots.region_lanes(self._list_regions())
        if kind == "modules":
            return plots.module_bars(self.modules())
        return plots.breakdown_bars(self.breakdown()) if kind == "breakdown" else plots.timeline_lanes(self.timeline())

    def _list_regions(self) -> Table:
        """Spans of stages, modules of two depths and operations of the rank that computes longest."""
        rank = self.ranks[self._find(None)]
        frames = [self.timeline(rank=rank).filter(stream="compute").with_columns(level=pl.lit("operation"))]
        for title, depth in (("submodule", 2), ("module", 1), ("stage", None)):
            spans = self.timeline("module" if depth else "stage", depth=depth, rank=rank)
            frames.append(spans.with_columns(level=pl.lit(title), name="module" if depth else "phase"))
        return pl.concat([frame.select("level", "name", "phase", "start_s", "end_s") for frame in reversed(frames)])

    def save_report(self, path: str | Path) -> Path:
        """Write charts and tables as one HTML file that opens without a network.

        Parameters
        ----------
        path : str or Path
            File to write.
        """
        from perfkit.calibration.pages import write_charts

        bare = self._meetings.drop_nulls(["nbytes", "transfer"]).is_empty()
        charts = {text: self.chart(kind) for kind, text in _CHARTS.items() if kind != "collectives" or not bare}
        tables = {"Ranks": self.idle(), "Steps": self.steps(), "Where the time goes": self.breakdown()}
        return write_charts(path, heading=repr(self), text=self.explain(), charts=charts, tables=tables)

    def explain(self) -> str:
        """The trace in words: what was recorded, where the time goes, what was left out."""
        lines = [repr(self)]
        for row in self.breakdown().head(8).to_dicts():
            label = f"{row['phase']} {row['kind']}".strip().replace("_", " ")
            count = f" ({row['operations']} operations)" if row["operations"] else ""
            lines.append(f"  {row['share']:6.1%}  {format_time(row['time_s']):>9}  {label}{count}")
        if len(self.files) > 1:
            idle = self.idle()
            cells = [[str(rank), *(format_time(time or 0) for time in times)] for rank, *times in idle.rows()]
            heads = [name.removesuffix("_s") for name in idle.columns]
            lines += [f"  {line}" for line in format_table([heads, *cells], numbers=True).split("\n")]
        left = self.steps().filter(~pl.col("kept")).group_by("reason", maintain_order=True).agg(pl.col("step").unique())
        lines += [f"  left out: step {', '.join(map(str, found))}: {why}" for why, found in left.rows()]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What to know before trusting the numbers."""
        met, found = self._meetings, []
        if alone := met["transfer"].null_count():
            said = "hold waits for other ranks beside their transfer; read the traces of all ranks to tell them apart"
            found.append(f"{alone} of {len(met)} collectives were not matched on other ranks and {said}")
        if unsized := met["nbytes"].null_count():
            found.append(
                f"nothing says how large {unsized} of {len(met)} collectives are; pass sizes={{kernel: bytes}}"
            )
        if observers := ", ".join(dict.fromkeys(name for file in self.files for name in file.observers)):
            found.append(f"the profiler recorded {observers}, which slows the host: its times are upper bounds")
        return tuple(found)

    def __repr__(self) -> str:
        names = [str(each.get("name", "")) for file in self.files for each in file.devices]
        names += ["an unnamed device" if any("kernel" in file.events["cat"] for file in self.files) else "its host"]
        count, steps = len(self.files), self.steps().filter("kept")["step"].n_unique()
        top = [f"{row['share']:.0%} {row['phase']} {row['kind']}" for row in self.breakdown().head(2).to_dicts()]
        where = f"{count} rank{'s' * (count > 1)} on {escape(names[0], 60)}"
        said = f"{self.basis}, {steps} step{'s' * (steps > 1)}"
        return f"trace of {where}: {format_time(self.time)} ({said}), {' and '.join(top).replace('  ', ' ')}"


def read_trace(
    paths: str | Path | Sequence[str | Path], *, basis: str | None = None, sizes: Mapping[str, float] | None = None
) -> Trace:
    """Read what PyTorch's profiler has recorded of training steps, on any device, and say where the time went.

    Parameters
    ----------
    paths : str, Path or sequence of them
        Traces of Kineto, one per rank, plain or packed; and execution traces of the same ranks, in the same order or
        with their rank as the last number of their name.
    basis : str, optional
        What counts as an iteration, one of `BASES`; the first that the trace allows, unless given.
    sizes : mapping of str to float, optional
        Message sizes of collectives by pattern of the kernel's name, where the trace says none [B].

    Returns
    -------
    trace : Trace
        Breakdown, timeline, modules, idle time, collectives, host.

    Raises
    ------
    ValueError
        For a file that is no trace, breaks off or lies, ranks that do not belong together, a basis that it lacks.
    """
    files = read_ranks([paths] if isinstance(paths, str | Path) else paths)
    found = time_iterations(files[0].events)[1] if basis is None else check_choice("basis", basis, BASES)
    return Trace(tuple(files), found, dict(sizes or {}))
