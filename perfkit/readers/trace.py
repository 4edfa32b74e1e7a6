"""Traces of PyTorch's profiler (Kineto, a Chrome trace) of any age, as one frame of events."""

import gc
import gzip
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import polars as pl

from perfkit.ground.files import reading
from perfkit.ground.units import format_bytes, show

#: Largest trace that is read, unpacked [B]: columns and text take some three times as much memory.
LARGEST_TRACE = 2**29
#: Categories of old traces in today's words; names that are not here are written in lower case.
_CATEGORIES = {"operator": "cpu_op", "runtime": "cuda_runtime", "driver": "cuda_driver", "memcpy": "gpu_memcpy",
               "memset": "gpu_memset"}  # fmt: skip
#: What a device does, and what a trace says beside it about its streams.
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BESIDE = ("gpu_user_annotation", "cuda_sync", "overhead")
#: Categories of events whose arguments are not kept.
_PLAIN = ("kernel", "Kernel", "cuda_runtime", "Runtime", "cuda_driver", "gpu_memset", "Memset")
#: Columns that events have themselves, what takes them, and what stands for one that is missing.
_NOTHING = dict.fromkeys(("cat", "name", "ts", "dur", "pid", "tid"), "")
_GET = itemgetter(*_NOTHING)
_ADVICE = "pass the file that torch.profiler wrote with export_chrome_trace, whole"
#: Largest time since the epoch [ns]: the year 2116.
_LATEST = 2**62
_NUMBER = re.compile(r"(?:\w+ )?(?:0x)?([0-9]{1,18})")
#: Marks of the profiler around steps, whose name ends with their number.
_STEP = r"^ProfilerStep#\d{1,15}$"
_MARK = (pl.col("cat") == "user_annotation") & pl.col("name").str.contains(_STEP)


@dataclass(frozen=True, eq=False, repr=False)
class TraceFile:
    """What one file of Kineto holds: one rank, or one process.

    Parameters
    ----------
    events : polars.DataFrame
        One row per event in order of time, columns named as HolisticTraceAnalysis has them: index [-]; cat, in today's
        words; name; ts, since the epoch where the trace says when it was, and dur [ns]; pid and tid [-], below -1 for
        names; stream, -1 on the host; correlation and external_id, -1 for none; index_correlation, the launch of what a
        device does and the first that a launch started, -1 for none; parent, the innermost event of the host's thread
        around it, -1 for none; iteration, that of the step mark around it or its launch, -1 outside.
    args : mapping of int to mapping
        By index what the trace says of an event beyond these columns: sizes and types of operands, collectives.
    rank, ranks : int or None
        Its rank and how many there are, where the trace knows [-].
    devices : tuple of mapping
        Properties of the devices as the driver tells them.
    groups : mapping of str to tuple of int
        Ranks of each process group by its name, where the trace lists them.
    observers : tuple of str
        What ran beside and slowed the host: ``shapes``, ``stacks``, ``memory``.
    source : str
        Name of the file.
    """

    events: pl.DataFrame
    args: Mapping[int, Mapping[str, Any]]
    rank: int | None
    ranks: int | None
    devices: tuple[Mapping[str, Any], ...]
    groups: Mapping[str, tuple[int, ...]]
    observers: tuple[str, ...]
    source: str


def read_kineto(path: str | Path) -> TraceFile:
    """Read a trace of Kineto, plain or packed with gzip, of 2021 or later.

    Parameters
    ----------
    path : str or Path
        The file.

    Returns
    -------
    trace : TraceFile
        Its events, in order of time.

    Raises
    ------
    ValueError
        For a file that is none, breaks off, or has times or sizes that cannot be.
    """
    rows, links, kept = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[Any]()

    def take(each: dict[str, Any]) -> dict[str, Any] | None:
        if each.get("ph") != "X" or not ("pid" in each or "ts" in each):  # arguments may have a key of this name too
            return None if "ph" in each and "pid" in each else each
        try:
            rows.append(_GET(each))
        except KeyError:  # some lack a column
            rows.append(_GET(_NOTHING | each))
        args = each.get("args") or {}
        if type(args) is not dict:
            raise ValueError(f"event {show(each, 60)} has arguments of another type")
        get = args.get
        links.append((get("stream"), get("correlation"), get("External id", get("external id"))))
        # of kernels sizes are known only where they are collectives, of calls of the driver nothing
        said = "Input type" in args or each.get("cat") not in _PLAIN or "Collective name" in args
        kept.append(args if said else None)
        return None

    with reading(path, _ADVICE, most=LARGEST_TRACE), uncollected():
        facts = parse_document(read_text(path), str, take)
        if "nodes" in facts or not kept:
            held = "nodes of an execution trace" if "nodes" in facts else "no events"
            raise ValueError(f"it holds {held}, where a trace of Kineto has events with times")
        base = facts.get("baseTimeNanoseconds", 0)
        if type(base) is not int or not 0 <= base < _LATEST // 2:
            raise ValueError(f"baseTimeNanoseconds is {show(base)}; it must be nanoseconds since the epoch")
        frame = _make_frame(rows, links, base)
        args = {index: found for index, row in enumerate(frame["row"].to_list()) if (found := kept[row])}
        return _describe(facts, _link(frame.drop("row")), args, Path(path).name)


def read_text(path: str | Path, most: float = math.inf) -> str:
    """Text of a file or of the `most` bytes that it begins with, packed or not.

    More than `LARGEST_TRACE` unpacks nowhere: a small file may become a large one.
    """
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    parts, size = [], 0
    with gzip.open(path) if packed else open(path, "rb") as file:
        while size < most and (part := file.read(2**20)):
            parts.append(part)
            if (size := size + len(part)) > LARGEST_TRACE:
                raise ValueError(f"it unpacks to more than {format_bytes(LARGEST_TRACE)}; record fewer steps")
    return b"".join(parts).decode("utf-8-sig", errors="replace")


def parse_document(
    text: str, number: Callable[[str], Any] = float, take: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """Read JSON whose objects are taken as they come, so that what is not needed takes no memory.

    Parameters
    ----------
    text : str
        An object; a list counts as its member ``traceEvents``.
    number : callable, optional
        What makes a number with a point or an exponent of its text: `str` keeps all of its digits.
    take : callable, optional
        What is given every object, the inner ones first, and returns what stays in its place.

    Returns
    -------
    members : dict
        What the document holds.

    Raises
    ------
    ValueError
        For anything else, with the place.
    """
    decoder = json.JSONDecoder(parse_float=number, object_hook=take, strict=False)
    try:
        found, _ = decoder.raw_decode(text, len(text) - len(text.lstrip()))
    except json.JSONDecodeError as fault:
        raise ValueError(f"it breaks off, or is no JSON, at character {fault.pos}") from None
    if not isinstance(found, dict | list):
        raise ValueError("it is no JSON object")
    return found if isinstance(found, dict) else {"traceEvents": found}


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing that is read refers to itself; looking for what does would take as long as reading."""
    looking = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # what was read counts as old, so that nothing soon looks through it again
        if looking:
            gc.enable()


def _read_time(value: Any, name: str) -> int:
    """Microseconds, as a number or as text with all digits, in whole nanoseconds."""
    if type(value) is int and abs(value) < _LATEST // 1000:
        return 1000 * value
    with suppress(ArithmeticError):
        number = Decimal(value if type(value) is str and len(value) < 40 else "nan")
        if abs(number) < _LATEST // 1000:
            return round(number * 1000)
    raise ValueError(f"event {show(name, 60)} has a time of {show(value, 40)}; it must be microseconds")


def _number(value: Any, names: dict[str, int]) -> int:
    """Number of a process, thread, stream or link, -1 for none; names of threads count down from -2."""
    if type(value) is not str:
        return value if type(value) is int and abs(value) < _LATEST else -1
    match = _NUMBER.fullmatch(value)
    return int(match[1]) if match else names.setdefault(value, -2 - len(names)) if value else -1


def _make_frame(rows: list[tuple[Any, ...]], links: list[tuple[Any, ...]], base: int) -> pl.DataFrame:
    """Events in order of time, what is around others first; what is none, such as the span of all, is left out."""
    names = (*_NOTHING, "stream", "correlation", "external_id")
    columns: dict[str, Any] = dict(zip(names, (*zip(*rows, strict=True), *zip(*links, strict=True)), strict=True))
    threads: dict[str, int] = {}
    for number, (name, values) in enumerate(columns.items()):
        kinds = {*map(type, values)}
        if number < 2 and kinds != {str}:
            raise ValueError("it holds events whose name or category is no text")
        if number in (2, 3):
            whole = kinds == {int} and -_LATEST < 1000 * min(values) <= 1000 * max(values) < _LATEST
            pairs = zip(values, columns["name"], strict=True)
            columns[name] = np.array(values) * 1000 if whole else [_read_time(*each) for each in pairs]
        elif number > 3:
            numbers = values
            if str in kinds and kinds <= {int, str, NoneType}:  # few of which differ
                known = {value: _number(value, threads) for value in dict.fromkeys(values)}
                numbers = [known[value] for value in values]
            elif not kinds <= {int, NoneType}:
                numbers = [_number(value, threads) for value in values]
            columns[name] = pl.Series(numbers, dtype=pl.Int64, strict=False).fill_null(-1)
    types = {name: pl.String if name in ("cat", "name") else pl.Int64 for name in columns}
    lower = pl.col("cat").str.to_lowercase().replace(_CATEGORIES)
    frame = pl.DataFrame(columns, types).with_columns(lower).with_row_index("row").filter(pl.col("cat") != "trace")
    step = (pl.col("cat") == "cpu_op") & pl.col("name").str.contains(_STEP)
    place = pl.when(pl.col("cat") == "gpu_user_annotation").then("tid").otherwise("stream")
    frame = frame.with_columns(
        cat=pl.when(step).then(pl.lit("user_annotation")).otherwise("cat"), ts=pl.col("ts") + base,
        stream=pl.when(pl.col("cat").is_in((*DEVICE, *_BESIDE))).then(place).otherwise(-1),
    )  # fmt: skip
    if len(wrong := frame.filter(pl.col("dur") < 0)):
        raise ValueError(f"event {show(wrong['name'][0], 60)} takes {wrong['dur'][0]} ns; times cannot be negative")
    frame = frame.sort("ts", pl.col("dur").neg(), maintain_order=True)
    return frame.select(pl.int_range(pl.len()).alias("index"), pl.all())


def _link(frame: pl.DataFrame) -> pl.DataFrame:
    """Events with links from launches to what they start, to what is around them, and to their steps."""
    device, host = pl.col("cat").is_in(DEVICE), ~pl.col("cat").is_in((*DEVICE, *_BESIDE))
    numbered = frame.filter(pl.col("correlation") > 0).select("index", "cat", "correlation")
    launches = numbered.filter(host).unique("correlation", keep="first", maintain_order=True)
    pairs = numbered.filter(device).join(launches, on="correlation", maintain_order="left")
    started, launched, links = pairs["index"].to_numpy(), pairs["index_right"].to_numpy(), np.full(len(frame), -1)
    links[started] = launched
    links[launched[::-1]] = started[::-1]  # the first that it started stays
    number = pl.col("name").str.slice(13).cast(pl.Int64)
    steps = frame.filter(_MARK).select("ts", until=pl.col("ts") + pl.col("dur"), iteration=number)
    near = frame.select("cat", "ts").join_asof(steps, on="ts")
    inside = pl.when(host & (pl.col("ts") < pl.col("until"))).then("iteration").otherwise(-1)
    iteration = near.select(inside).to_series().to_numpy(writable=True)
    iteration[started] = iteration[launched]
    parents = _find_parents(frame.filter(host).select("index", "pid", "tid", "ts", "dur"), len(frame))
    columns: dict[str, Any] = {"index_correlation": links, "parent": parents, "iteration": iteration}
    return frame.with_columns(**{name: pl.Series(values, dtype=pl.Int64) for name, values in columns.items()})


def _find_parents(host: pl.DataFrame, count: int) -> list[int]:
    """The innermost event around each on its thread."""
    parents = [-1] * count
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    host = host.with_columns(end=pl.col("ts") + pl.col("dur"))
    columns = host.select("pid", "tid", "ts", "end", "index").to_dict(as_series=False)
    for pid, tid, ts, end, index in zip(*columns.values(), strict=True):
        around = threads.setdefault((pid, tid), [])
        while around and around[-1][0] <= ts:
            around.pop()
        if around:
            parents[index] = around[-1][1]
        around.append((end, index))
    return parents


def _describe(
    facts: Mapping[str, Any], events: pl.DataFrame, args: Mapping[int, Mapping[str, Any]], source: str
) -> TraceFile:
    """Ranks, devices and observers as the head of a trace has them."""

    def tables(value: Any) -> list[dict[str, Any]]:
        return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []

    own, *_ = [*tables([facts.get("distributedInfo")]), {}]
    said = map(own.get, ("rank", "world_size"))
    rank, ranks = (each if type(each) is int and 0 <= each < 2**31 else None for each in said)
    listed = [each for each in tables(own.get("pg_config")) if isinstance(each.get("ranks"), list)]
    groups = {str(each.get("pg_name")): tuple(r for r in each["ranks"] if type(r) is int) for each in listed}
    devices = tuple(tables(facts.get("deviceProperties")))
    stacks = "python_function" in events["cat"] or any(each.get("Call stack") for each in args.values())
    seen = {"shapes": any("Input Dims" in each for each in args.values()), "stacks": stacks,
            "memory": bool(facts.get("profile_memory"))}  # fmt: skip
    return TraceFile(events, args, rank, ranks, devices, groups, tuple(k for k, v in seen.items() if v), source)


def find_iterations(events: pl.DataFrame) -> pl.DataFrame:
    """Steps between the marks of the profiler, and the period of their kernels.

    Parameters
    ----------
    events : polars.DataFrame
        Those of a `TraceFile`.

    Returns
    -------
    frame : polars.DataFrame
        One row per mark: iteration; ts and dur of the mark on the host [ns]; kernels, and begin and end of what the
        device did for it [ns]; period, from its kernels to the same ones of the next step, median over those that run
        once in a step [ns], null where there are none; allocations, calls that take or return device memory, which hold
        all up [-].
    """
    marks = events.filter(_MARK).unique("iteration", maintain_order=True).select("iteration", "ts", "dur")
    device = events.filter(pl.col("cat").is_in(DEVICE) & (pl.col("iteration") >= 0))
    ends = {"begin": pl.col("ts").min(), "end": (pl.col("ts") + pl.col("dur")).max()}
    work = device.group_by("iteration").agg(kernels=(pl.col("cat") == "kernel").sum().cast(pl.Int64), **ends)
    slow = events.filter(pl.col("name").str.contains("^(cuda|hip)(Malloc|Free)$"))
    slow = slow.group_by("iteration").agg(allocations=pl.len())
    frame = marks.join(work, on="iteration", how="left").join(slow, on="iteration", how="left").sort("ts")
    frame = frame.with_columns(pl.col("kernels", "allocations").fill_null(0))
    kernels = device.filter(pl.col("cat") == "kernel").select("iteration", "name", "ts")
    kernels = kernels.filter(pl.len().over("iteration", "name") == 1)
    pairs = kernels.join(frame.select("iteration", after=pl.col("iteration").shift(-1)), on="iteration")
    pairs = pairs.join(kernels, left_on=["after", "name"], right_on=["iteration", "name"])
    periods = pairs.group_by("iteration").agg(period=(pl.col("ts_right") - pl.col("ts")).median())
    return frame.join(periods.filter(pl.col("period") > 0), on="iteration", how="left", maintain_order="left")


def find_basis(events: pl.DataFrame) -> str:
    """What the time of an iteration of a trace is.

    Parameters
    ----------
    events : polars.DataFrame
        Those of a `TraceFile`.

    Returns
    -------
    basis : str
        ``kernels``: from kernels to the same ones of the next step, where there are several; ``host step``: between
        the marks on the host; ``device span`` or ``host span``: from the first event to the last, without marks, with
        what was launched before the recording began (HolisticTraceAnalysis leaves that out).
    """
    steps, device = find_iterations(events), events["cat"].is_in(DEVICE).any()
    spans = "host step" if len(steps) else "device span" if device else "host span"
    return "kernels" if steps["period"].count() else spans
