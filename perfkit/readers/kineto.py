"""Traces of PyTorch's profiler (Kineto, a Chrome trace) of any age, as one frame of events.

`read_kineto` is the table of contents: `perfkit.readers.trace_events` parses the document, the
events become a frame, and links are added to it. How PyTorch names things is in
`perfkit.readers.trace_names`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from perfkit.ground.files import reading
from perfkit.ground.units import show
from perfkit.readers.trace_arguments import Arguments
from perfkit.readers.trace_events import read_events
from perfkit.readers.trace_names import DEVICE, STREAMS, WHOLE, is_of_profiler
from perfkit.readers.trace_numbers import LATEST
from perfkit.readers.trace_text import LARGEST_TRACE, uncollected

#: Columns of a frame of events as they are read: members of an event, and two of its arguments.
_MEMBERS = ("cat", "name", "ts", "dur", "pid", "tid")
_ARGUMENTS = ("stream", "correlation")
_ADVICE = "pass the file that torch.profiler wrote with export_chrome_trace, whole"
#: Times of the host and of a device may differ by this much [ns].
CLOCKS = 1_000_000
#: Marks of the profiler around steps; the name ends with the number of the step.
_STEP_NAME = "ProfilerStep#"
_STEP = rf"^{_STEP_NAME}\d{{1,15}}$"
MARK = (pl.col("cat") == "user_annotation") & pl.col("name").str.contains(_STEP)
_ON_DEVICE = pl.col("cat").is_in(DEVICE)
_ON_HOST = ~pl.col("cat").is_in((*DEVICE, *STREAMS))


@dataclass(frozen=True, eq=False, repr=False)
class TraceFile:
    """Content of one Kineto file: one rank, or one process.

    Parameters
    ----------
    events : polars.DataFrame
        One row per event, sorted by time. Columns have the names of HolisticTraceAnalysis: index
        [-]; cat, in today's names; name; ts, since the epoch where the trace says when it was
        recorded, and dur [ns]; pid and tid, below -1 for names [-]; stream, -1 on the host;
        correlation, -1 for none; index_correlation: the launch of an event on a device, or the
        first event that a launch started, -1 for none; parent: the innermost event around it on its
        host thread, -1 for none; iteration: number of the step mark around it or around its launch,
        -1 outside of steps.
    args : Arguments
        Other facts of an event by its index: sizes and types of operands, collectives.
    rank, ranks : int or None
        Rank and number of ranks, where the trace knows them [-].
    devices : tuple of mapping
        Properties of the devices, from the driver.
    groups : mapping of str to tuple of int
        Ranks of each process group by its name, where the trace lists them.
    observers : tuple of str
        What the profiler recorded beside, which slows the host: ``shapes``, ``stacks``, ``memory``.
    source : str
        Name of the file.
    notes : tuple of str
        What was left out, with its count.
    """

    events: pl.DataFrame
    args: Arguments
    rank: int | None
    ranks: int | None
    devices: tuple[Mapping[str, Any], ...]
    groups: Mapping[str, tuple[int, ...]]
    observers: tuple[str, ...]
    source: str
    notes: tuple[str, ...] = ()


def read_kineto(path: str | Path, *, progress: bool = False) -> TraceFile:
    """Read a Kineto trace of 2021 or later, plain or compressed with gzip.

    Parameters
    ----------
    path : str or Path
        The file.
    progress : bool, optional
        Whether to show a line on a terminal where it takes seconds.

    Returns
    -------
    trace : TraceFile
        Its events, sorted by time.

    Raises
    ------
    ValueError
        For a file that is no trace, is cut off, or has impossible times or sizes.
    """
    with reading(path, _ADVICE, most=LARGEST_TRACE, unpacks=True), uncollected():
        events = read_events(path, progress=progress)
        frame = _make_frame(events.frame, _read_base_time(events.facts))
        args = Arguments(frame["text"], events.renamed)
        notes = _list_notes(frame, events.begun)
        file = _describe(events.facts, _link(frame.drop("text")), args, Path(path).name)
        return replace(file, notes=tuple(notes))


def _read_base_time(facts: Mapping[str, Any]) -> int:
    """Time since the epoch from which the times of a trace count [ns], 0 where it does not say."""
    base = facts.get("baseTimeNanoseconds", 0)
    if type(base) is not int or not 0 <= base < LATEST // 2:
        raise ValueError(
            f"baseTimeNanoseconds is {show(base)}; it must be nanoseconds since the epoch"
        )
    return base


def _list_notes(frame: pl.DataFrame, begun: int) -> list[str]:
    """Say how many events are not used."""
    notes = []
    for category, count in frame["cat"].value_counts(sort=True).rows():
        if not is_of_profiler(category):
            notes.append(f"events of the category {show(category, 40)} are not used: {count}")
    if begun:
        notes.append(f"events that are written as a begin and an end are left out: {begun}")
    return notes


# -- the frame of events
# --------------------------------------------------------------------------------------------------


def _make_frame(events: pl.DataFrame, base: int) -> pl.DataFrame:
    """Events sorted by time, outer ones before inner ones, without the category ``trace``, which
    spans everything."""
    frame = events.select(*_MEMBERS, *_ARGUMENTS, "text")
    _refuse_other_tools(frame)
    frame = frame.filter(pl.col("cat") != WHOLE)
    frame = _place_events(frame).with_columns(ts=pl.col("ts") + base)
    negative = frame.filter(pl.col("dur") < 0)
    if len(negative):
        raise ValueError(
            f"event {show(negative['name'][0], 60)} takes {negative['dur'][0]} ns; times cannot be "
            "negative"
        )
    frame = frame.sort("ts", pl.col("dur").neg(), maintain_order=True)
    return frame.select(pl.int_range(pl.len()).alias("index"), pl.all())


def _refuse_other_tools(frame: pl.DataFrame) -> None:
    """Refuse a trace none of whose categories is one of PyTorch's profiler."""
    categories = frame["cat"].unique().sort().to_list()
    if not any(map(is_of_profiler, categories)):
        names = ", ".join(show(category, 30) for category in categories[:5])
        raise ValueError(
            f"its events have the categories {names}; those of PyTorch's profiler are cpu_op, "
            "kernel and others, so another tool wrote it"
        )


def _place_events(frame: pl.DataFrame) -> pl.DataFrame:
    """Marks of steps under the category of annotations, which old traces write as operators, and
    the stream of each event, -1 on the host."""
    is_step = (pl.col("cat") == "cpu_op") & pl.col("name").str.contains(_STEP)
    category = pl.when(is_step).then(pl.lit("user_annotation")).otherwise("cat")
    is_annotation = pl.col("cat") == "gpu_user_annotation"
    written_stream = pl.when(is_annotation).then("tid").otherwise("stream")
    stream = pl.when(_ON_HOST).then(-1).otherwise(written_stream)
    return frame.with_columns(cat=category, stream=stream)


# -- links
# --------------------------------------------------------------------------------------------------


def _link(frame: pl.DataFrame) -> pl.DataFrame:
    """Add columns that link events to their launch, to the event around them, and to their step."""
    frame = _link_steps(frame)
    frame = _link_launches(frame)
    host = frame.filter(_ON_HOST).select("index", "pid", "tid", "ts", "dur")
    parents = _find_parents(host, len(frame))
    return frame.with_columns(parent=pl.Series(parents, dtype=pl.Int64))


def _link_steps(frame: pl.DataFrame) -> pl.DataFrame:
    """Add the number of the step mark around each event of the host, -1 for none."""
    number = pl.col("name").str.slice(len(_STEP_NAME)).cast(pl.Int64)
    steps = frame.filter(MARK).select("ts", until=pl.col("ts") + pl.col("dur"), step=number)
    is_inside = _ON_HOST & (pl.col("ts") < pl.col("until"))
    iteration = pl.when(is_inside).then("step").otherwise(-1)
    return frame.join_asof(steps, on="ts").with_columns(iteration=iteration).drop("until", "step")


def _link_launches(frame: pl.DataFrame) -> pl.DataFrame:
    """Add the launch of each event on a device, and the first event that each launch started; what
    was started belongs to the step of its launch."""
    columns = ("index", "cat", "correlation", "iteration", "ts", "pid")
    numbered = frame.filter(pl.col("correlation") > 0).select(columns)
    # two processes may use one number: nothing runs before its launch
    launches = numbered.filter(_ON_HOST).unique(["correlation", "pid"], keep="first").sort("ts")
    started = numbered.filter(_ON_DEVICE).with_columns(pl.col("ts") + CLOCKS)
    pairs = started.join_asof(launches, on="ts", by="correlation", check_sortedness=False)
    pairs = pairs.drop_nulls("index_right")
    iteration = pl.col("iteration_right").alias("iteration")
    launched = pairs.select("index", iteration, index_correlation="index_right")
    firsts = pairs.unique("index_right", keep="first", maintain_order=True)
    launching = firsts.select(iteration, index="index_right", index_correlation="index")
    links = pl.concat([launched, launching.select(launched.columns)])
    return frame.with_columns(index_correlation=pl.lit(-1, pl.Int64)).update(links, on="index")


def _find_parents(host: pl.DataFrame, count: int) -> np.ndarray:
    """The innermost event around each event on its thread, -1 for none."""
    parents = np.full(count, -1)
    for thread in host.partition_by("pid", "tid", maintain_order=True):
        indices = thread["index"].to_list()
        parents[indices] = find_around(thread["ts"], thread["ts"] + thread["dur"], indices)
    return parents


def find_around(starts: pl.Series, ends: pl.Series, indices: Sequence[int]) -> list[int]:
    """Find the innermost span around the start of each span.

    Parameters
    ----------
    starts, ends : polars.Series
        Spans, sorted by start, outer ones before inner ones [ns].
    indices : sequence of int
        Their numbers [-].

    Returns
    -------
    around : list of int
        For each span the number of the last one before it that has not ended, -1 for none [-].

    Examples
    --------
    >>> find_around(pl.Series([0, 2, 5]), pl.Series([9, 4, 6]), [7, 8, 9])
    [-1, 7, 7]
    """
    around = []
    open_ends: list[float] = [math.inf]
    open_indices = [-1]
    for start, end, index in zip(starts.to_list(), ends.to_list(), indices, strict=True):
        while open_ends[-1] <= start:
            open_ends.pop()
            open_indices.pop()
        around.append(open_indices[-1])
        open_ends.append(end)
        open_indices.append(index)
    return around


# -- the head of a trace
# --------------------------------------------------------------------------------------------------


def _describe(
    facts: Mapping[str, Any],
    events: pl.DataFrame,
    args: Arguments,
    source: str,
) -> TraceFile:
    """A trace with the ranks, devices and observers that its head names."""
    distributed = facts.get("distributedInfo")
    if not isinstance(distributed, dict):
        distributed = {}
    devices = _list_objects(facts.get("deviceProperties"))
    for device in devices:
        if type(device.get("id")) is not int:  # its number is compared with those of kernels
            device["id"] = None
    return TraceFile(
        events,
        args,
        rank=_read_count(distributed.get("rank")),
        ranks=_read_count(distributed.get("world_size")),
        devices=tuple(devices),
        groups=_read_groups(distributed.get("pg_config")),
        observers=_find_observers(facts, events, args),
        source=source,
    )


def _list_objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; none where it is no list."""
    if not isinstance(value, list):
        return []
    return [item for item in value if isinstance(item, dict)]


def _read_count(value: Any) -> int | None:
    """A rank or a number of ranks, None for what is none."""
    is_count = type(value) is int and 0 <= value < 2**31
    return value if is_count else None


def _read_groups(value: Any) -> dict[str, tuple[int, ...]]:
    """Ranks of each process group by its name, where the trace lists them."""
    groups = {}
    for group in _list_objects(value):
        ranks = group.get("ranks")
        if isinstance(ranks, list):
            groups[str(group.get("pg_name"))] = tuple(rank for rank in ranks if type(rank) is int)
    return groups


def _find_observers(
    facts: Mapping[str, Any], events: pl.DataFrame, args: Arguments
) -> tuple[str, ...]:
    """What the profiler recorded beside, see `TraceFile`."""
    observers = []
    if args.find("Input Dims"):
        observers.append("shapes")
    if args.tells("Call stack") or "python_function" in events["cat"]:
        observers.append("stacks")
    if facts.get("profile_memory"):
        observers.append("memory")
    return tuple(observers)


# -- what a trace tells of its steps
# --------------------------------------------------------------------------------------------------


def find_iterations(events: pl.DataFrame) -> pl.DataFrame:
    """Steps between the marks of the profiler, and the period of their kernels.

    Parameters
    ----------
    events : polars.DataFrame
        Events of a `TraceFile`.

    Returns
    -------
    frame : polars.DataFrame
        One row per mark: iteration; ts and dur of the mark on the host [ns]; kernels [-]; begin of
        its work on the device [ns]; period, from its kernels to the same kernels of the next step,
        median over kernels that run once in a step [ns], null where there are none; allocations,
        calls that allocate or free device memory, which stop everything else [-].
    """
    device = events.filter(_ON_DEVICE & (pl.col("iteration") >= 0))
    count = (pl.col("cat") == "kernel").sum().cast(pl.Int64)
    work = device.group_by("iteration").agg(kernels=count, begin=pl.min("ts"))
    slow = events.filter(pl.col("name").str.contains("^(cuda|hip)(Malloc|Free)$"))
    slow = slow.group_by("iteration").agg(allocations=pl.len())
    marks = events.filter(MARK).unique("iteration", maintain_order=True)
    frame = marks.select("iteration", "ts", "dur")
    frame = frame.join(work, on="iteration", how="left").join(slow, on="iteration", how="left")
    frame = frame.sort("ts").with_columns(pl.col("kernels", "allocations").fill_null(0))
    periods = _find_periods(device.filter(cat="kernel"), frame["iteration"])
    return frame.join(periods, on="iteration", how="left", maintain_order="left")


def _find_periods(kernels: pl.DataFrame, iterations: pl.Series) -> pl.DataFrame:
    """The time from the kernels of each iteration to the same kernels of the next one, where it is
    positive: the median over kernels that run once in a step."""
    single = kernels.filter(pl.len().over("iteration", "name") == 1)
    following = pl.DataFrame({"iteration": iterations, "after": iterations.shift(-1)})
    pairs = single.join(following, on="iteration")
    pairs = pairs.join(single, left_on=["after", "name"], right_on=["iteration", "name"])
    period = (pl.col("ts_right") - pl.col("ts")).median()
    return pairs.group_by("iteration").agg(period=period).filter(pl.col("period") > 0)


def find_basis(events: pl.DataFrame) -> str:
    """How the time of an iteration is measured in a trace.

    Parameters
    ----------
    events : polars.DataFrame
        Events of a `TraceFile`.

    Returns
    -------
    basis : str
        ``kernels``: from kernels to the same kernels of the next step, where there are several
        steps; ``host step``: between the marks on the host; without marks ``device span`` or ``host
        span``: from the first event to the last. These include events that were launched before the
        recording began, which HolisticTraceAnalysis leaves out.
    """
    steps = find_iterations(events)
    if steps["period"].count():
        return "kernels"
    if len(steps):
        return "host step"
    on_device = events["cat"].is_in(DEVICE).any()
    return "device span" if on_device else "host span"
