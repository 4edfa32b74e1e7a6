"""Traces of PyTorch's profiler (Kineto, a Chrome trace) of any age, as one frame of events."""

import gc
import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import polars as pl

from perfkit.ground.files import check_values, reading
from perfkit.ground.forks import check_threads
from perfkit.ground.units import format_bytes, show

#: Largest trace that is read, unpacked [B]: columns and text take about three times as much memory.
LARGEST_TRACE = 2**29
#: Most lists and objects, and most values, of a trace that is read [-]. Real traces have one list
#: or object in 31 bytes or more, and one value in 13; those of empty lists fill the memory.
MOST_CONTAINERS, MOST_VALUES = 17_000_000, 45_000_000
#: Objects that Python's garbage collector searches through in a millisecond or so [-]; fewer are
#: not worth hiding from it.
_MANY_OBJECTS = 20_000
#: How much is unpacked at once [B].
_PART = 2**24
#: Today's names of the categories of old traces; other names only become lower case.
_CATEGORIES = {
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "driver": "cuda_driver",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
}
#: Categories of work on a device, and of other events about its streams.
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BESIDE = ("gpu_user_annotation", "cuda_sync", "overhead")
#: Categories of other events that PyTorch's profiler writes, in today's names, and how categories
#: of calls of a driver end.
_OTHERS = {
    "cpu_op",
    "cpu_instant_event",
    "user_annotation",
    "python_function",
    "external_correlation",
    "trace",
    "ac2g",
    "fwdbwd",
    "async_cpu_to_gpu",
    "collective_comm",
}
_CALLS = ("_runtime", "_driver")
#: Categories of events whose arguments are not kept, unless they hold sizes.
_PLAIN = ("kernel", "Kernel", "cuda_runtime", "Runtime", "cuda_driver", "gpu_memset", "Memset")
#: Columns of a frame of events: members of an event, then members of its arguments.
_OWN = ("cat", "name", "ts", "dur", "pid", "tid")
_NUMBERS = ("pid", "tid", "stream", "correlation")
_ADVICE = "pass the file that torch.profiler wrote with export_chrome_trace, whole"
#: Times of the host and of a device may differ by this much [ns].
CLOCKS = 1_000_000
#: Largest time since the epoch [ns]: the year 2116.
_LATEST = 2**62
_NUMBER = re.compile(r"(?:\w+ )?(?:0x)?([0-9]{1,18})")
#: Marks of the profiler around steps; the name ends with the number of the step.
_STEP = r"^ProfilerStep#\d{1,15}$"
MARK = (pl.col("cat") == "user_annotation") & pl.col("name").str.contains(_STEP)


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
    args : mapping of int to mapping
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
    args: Mapping[int, Mapping[str, Any]]
    rank: int | None
    ranks: int | None
    devices: tuple[Mapping[str, Any], ...]
    groups: Mapping[str, tuple[int, ...]]
    observers: tuple[str, ...]
    source: str
    notes: tuple[str, ...] = ()


def read_kineto(path: str | Path) -> TraceFile:
    """Read a Kineto trace of 2021 or later, plain or compressed with gzip.

    Parameters
    ----------
    path : str or Path
        The file.

    Returns
    -------
    trace : TraceFile
        Its events, sorted by time.

    Raises
    ------
    ValueError
        For a file that is no trace, is cut off, or has impossible times or sizes.
    """
    rows, kept, begun = list[tuple[Any, ...]](), list[Any](), list[str]()

    def take(each: dict[str, Any]) -> dict[str, Any] | None:
        """Move an event with a duration into rows, drop other events, and leave all other objects
        in place."""
        # arguments may have a key "ph" too
        if each.get("ph") != "X" or not ("pid" in each or "ts" in each):
            if "ph" not in each or "pid" not in each:
                return each
            if each["ph"] in ("B", "b"):
                begun.append(str(each.get("name", "")))
            return None
        args = each.get("args") or {}
        if type(args) is not dict:
            raise ValueError(f"event {show(each, 60)} has arguments of another type")
        rows.append((*map(each.get, _OWN, ("",) * 6), args.get("stream"), args.get("correlation")))
        # arguments of kernels matter only for collectives, those of driver calls never
        sized = "Input type" in args or each.get("cat") not in _PLAIN or "Collective name" in args
        kept.append(args if sized else None)
        return None

    with reading(path, _ADVICE, most=LARGEST_TRACE, unpacks=True), uncollected():
        facts = parse_document(read_text(path), str, take)
        if held := _find_other_content(facts, bool(rows), len(begun)):
            raise ValueError(f"it holds {held}; a Kineto trace has events with measured times")
        base = facts.get("baseTimeNanoseconds", 0)
        if type(base) is not int or not 0 <= base < _LATEST // 2:
            raise ValueError(
                f"baseTimeNanoseconds is {show(base)}; it must be nanoseconds since the epoch"
            )
        frame = _make_frame(rows, base)
        args = {
            index: found for index, row in enumerate(frame["row"].to_list()) if (found := kept[row])
        }
        notes = _count_others(frame)
        if begun:
            notes.append(
                f"events that are written as a begin and an end are left out: {len(begun)}"
            )
        file = _describe(facts, _link(frame.drop("row")), args, Path(path).name)
        return replace(file, notes=tuple(notes))


def _find_other_content(facts: Mapping[str, Any], has_events: bool, begun: int) -> str:
    """What a document holds that is no Kineto trace, empty for one."""
    about = facts.get("otherData")
    if isinstance(about, Mapping) and "prediction" in about:
        return "a prediction, as save_trace writes it"
    if "nodes" in facts:
        return "nodes of an execution trace"
    if has_events:
        return ""
    return f"{begun} events without a duration (a begin and an end each)" if begun else "no events"


def read_text(path: str | Path, most: int = LARGEST_TRACE) -> str:
    """Read the first `most` bytes of a file, unpacked: a small file may unpack to a very large
    one."""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    data, containers, values = bytearray(), 0, 0
    with gzip.open(path) if packed else open(path, "rb") as file:
        while len(data) <= most:
            try:
                part = file.read(min(_PART, most + 1 - len(data)))
            except EOFError:
                raise ValueError("it is cut off: its packed data end too early") from None
            if not part:
                break
            data += part
            containers += part.count(b"[") + part.count(b"{")
            values += part.count(b",")
            if containers > MOST_CONTAINERS or values > MOST_VALUES:
                raise ValueError(
                    f"it has more than {MOST_CONTAINERS / 1e6:.0f} million lists and objects, or "
                    f"{MOST_VALUES / 1e6:.0f} million values; record fewer steps"
                )
    if len(data) > LARGEST_TRACE:
        raise ValueError(
            f"it unpacks to more than {format_bytes(LARGEST_TRACE)}; record fewer steps"
        )
    return data.decode("utf-8-sig", errors="replace")


def parse_document(
    text: str,
    number: Callable[[str], Any] = float,
    take: Callable[[dict[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """Parse JSON and hand over each object as soon as it is complete, so that unused objects take
    no memory.

    Parameters
    ----------
    text : str
        An object; a list counts as its member ``traceEvents``.
    number : callable, optional
        Converts the text of a number with a point or an exponent: `str` keeps all of its digits.
    take : callable, optional
        Is called with every object, the inner ones first; what it returns takes the place of the
        object.

    Returns
    -------
    members : dict
        Content of the document.

    Raises
    ------
    ValueError
        For anything else, with the place.
    """
    check_values(text, "it")
    decoder = json.JSONDecoder(parse_float=number, object_hook=take, strict=False)
    try:
        found, end = decoder.raw_decode(text, len(text) - len(text.lstrip()))
    except json.JSONDecodeError as fault:
        raise ValueError(_explain_syntax(text, fault)) from None
    except RecursionError:
        raise ValueError("it has lists inside of lists without end; it is no trace") from None
    if not isinstance(found, dict | list) and not text[end : end + 100].lstrip().startswith("{"):
        raise ValueError("it is no JSON object")
    if text[end : end + 100].lstrip().startswith(("{", "[")):
        raise ValueError(
            f"a second document begins after character {end}; name one file for each trace"
        )
    return found if isinstance(found, dict) else {"traceEvents": found}


#: What a file ends with that is cut off inside a number or a word: the sign, point or exponent of a
#: number, or the begin of a word of JSON.
_BEGUN = re.compile(r"-|\.|\.?[0-9]*[eE][+-]?|t(ru?)?|f(a(ls?)?)?|n(ul?)?")


def _explain_syntax(text: str, fault: json.JSONDecodeError) -> str:
    """Say why a text is no JSON: by its first characters, and by what stands at the fault."""
    begin = text[:512].lstrip("\ufeff \t\r\n").lower()
    if not begin:
        return "it is empty"
    if begin.startswith("version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself; run `git lfs pull` where it lies"
    if text[257:262] == "ustar" or begin.startswith("pk\x03\x04"):
        return "it is an archive; unpack it, and name the files inside"
    if begin.startswith(("<!doctype html", "<html", "<?xml")):
        return "it is a web page, perhaps an error page; download the file itself"
    if begin.startswith("sqlite format"):
        return "it is a database, as Nsight Systems writes it; export a trace of PyTorch's profiler"
    if any(character in "\0\ufffd" for character in text[:512]) and begin[0] not in "{[":
        return "it is binary, such as a protobuf of Perfetto; export the trace as JSON"
    if begin[0] not in "{[":
        return f"it begins with {show(text[:30])}; JSON begins with an object or a list"
    rest = text[fault.pos :]
    place = f"at character {fault.pos}, {show(rest[:30])}"
    is_at_end = fault.pos >= len(text.rstrip()) or _BEGUN.fullmatch(rest.rstrip()) is not None
    if is_at_end or fault.msg.startswith("Unterminated string"):
        return f"it is cut off {place}"
    if "escape" in fault.msg:
        around = show(text[max(fault.pos - 20, 0) : fault.pos + 20])
        return (
            f"a backslash stands alone at character {fault.pos}, in {around}; in JSON it is "
            "written twice, such as in C:\\\\tools"
        )
    if rest.startswith(("//", "/*", "#")):
        return f"a comment stands {place}; JSON has none"
    if rest.startswith("'"):
        return f"a text stands in single quotation marks {place}; JSON has double ones"
    before = text[: fault.pos].rstrip()
    if fault.msg.startswith("Expecting ',' delimiter") and before.endswith('"'):
        return f'a quotation mark ends a text too early {place}; inside of a text it is written \\"'
    if fault.msg.startswith("Expecting value") and (rest[0].isalpha() or rest[0] in "-+."):
        word = re.match(r"[\w./+-]+", rest)
        return f"{show(word[0] if word else rest[0])} is no number, text or null, {place}"
    if before.endswith(",") and rest.startswith(("]", "}")):
        return f"a comma has nothing after it {place}"
    return f"it is no JSON {place}: {fault.msg}"


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off: a trace has no cycles, and searching for them takes as long
    as reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        made_since_collected = gc.get_count()[0]
        # counting what is frozen takes as long as a small trace
        if made_since_collected > _MANY_OBJECTS and not gc.get_freeze_count():
            gc.freeze()
            # counts as old from here on, so that nothing soon searches through it again
            gc.unfreeze()
        if enabled:
            gc.enable()


def _read_time(value: Any, name: str) -> int:
    """Whole nanoseconds of microseconds, which are a number or text with all digits."""
    with suppress(ArithmeticError):
        number = Decimal(
            value if type(value) is int or (type(value) is str and len(value) < 40) else "nan"
        )
        if abs(number) < _LATEST // 1000:
            return round(number * 1000)
    raise ValueError(
        f"event {show(name, 60)} has a time of {show(value, 40)}; it must be microseconds"
    )


def _read_number(value: Any, names: dict[str, int]) -> int:
    """Number of a process, thread, stream or link, -1 for none; names of threads get -2, -3 and so
    on."""
    if type(value) is not str:
        return value if type(value) is int and abs(value) < _LATEST else -1
    match = _NUMBER.fullmatch(value)
    return int(match[1]) if match else names.setdefault(value, -2 - len(names)) if value else -1


def _make_frame(rows: list[tuple[Any, ...]], base: int) -> pl.DataFrame:
    """Events sorted by time, outer ones before inner ones, without the category ``trace``, which
    spans everything."""
    check_threads()
    columns: dict[str, Any] = dict(
        zip((*_OWN, *_NUMBERS[2:]), zip(*rows, strict=True), strict=True)
    )
    if {*map(type, columns["cat"]), *map(type, columns["name"])} != {str}:
        raise ValueError("it holds events whose name or category is no text")
    for name in ("ts", "dur"):
        values = columns[name]
        whole = {*map(type, values)} == {int} and -_LATEST < 1000 * min(values) <= 1000 * max(
            values
        ) < _LATEST
        pairs = zip(values, columns["name"], strict=True)
        columns[name] = 1000 * np.array(values) if whole else [_read_time(*each) for each in pairs]
    threads: dict[str, int] = {}
    for name in _NUMBERS:  # few differ
        values = columns[name]
        if not {*map(type, values)} <= {int, str, NoneType}:
            values = [own if type(own) in (int, str) else None for own in values]
        known = {own: _read_number(own, threads) for own in dict.fromkeys(values)}
        columns[name] = [known[own] for own in values]
    types = {name: pl.String if name in ("cat", "name") else pl.Int64 for name in columns}
    lower = pl.col("cat").str.to_lowercase().replace(_CATEGORIES)
    frame = pl.DataFrame(columns, types).with_columns(lower)
    if not any(map(_is_of_profiler, frame["cat"].unique().to_list())):
        named = ", ".join(show(name, 30) for name in frame["cat"].unique().sort().to_list()[:5])
        raise ValueError(
            f"its events have the categories {named}; those of PyTorch's profiler are cpu_op, "
            "kernel and others, so another tool wrote it"
        )
    frame = frame.with_row_index("row").filter(pl.col("cat") != "trace")
    step = (pl.col("cat") == "cpu_op") & pl.col("name").str.contains(_STEP)
    place = pl.when(pl.col("cat") == "gpu_user_annotation").then("tid").otherwise("stream")
    frame = frame.with_columns(
        cat=pl.when(step).then(pl.lit("user_annotation")).otherwise("cat"),
        ts=pl.col("ts") + base,
        stream=pl.when(pl.col("cat").is_in((*DEVICE, *_BESIDE))).then(place).otherwise(-1),
    )
    if len(wrong := frame.filter(pl.col("dur") < 0)):
        raise ValueError(
            f"event {show(wrong['name'][0], 60)} takes {wrong['dur'][0]} ns; times cannot be negative"
        )
    frame = frame.sort("ts", pl.col("dur").neg(), maintain_order=True)
    return frame.select(pl.int_range(pl.len()).alias("index"), pl.all())


def _is_of_profiler(category: str) -> bool:
    """Whether PyTorch's profiler writes events of this category."""
    return category in {*DEVICE, *_BESIDE, *_OTHERS} or category.endswith(_CALLS)


def _count_others(frame: pl.DataFrame) -> list[str]:
    """Say how many events have categories that are not used."""
    counts = frame["cat"].value_counts(sort=True).rows()
    return [
        f"events of the category {show(name, 40)} are not used: {count}"
        for name, count in counts
        if not _is_of_profiler(name)
    ]


def _link(frame: pl.DataFrame) -> pl.DataFrame:
    """Add columns that link events to their launch, to the event around them, and to their step."""
    host, number = (
        ~pl.col("cat").is_in((*DEVICE, *_BESIDE)),
        pl.col("name").str.slice(13).cast(pl.Int64),
    )
    steps = frame.filter(MARK).select("ts", until=pl.col("ts") + pl.col("dur"), step=number)
    inside = pl.when(host & (pl.col("ts") < pl.col("until"))).then("step").otherwise(-1)
    frame = frame.join_asof(steps, on="ts").with_columns(iteration=inside).drop("until", "step")
    columns = ("index", "cat", "correlation", "iteration", "ts", "pid")
    numbered = frame.filter(pl.col("correlation") > 0).select(columns)
    # two processes may use one number: nothing runs before its launch
    launches = numbered.filter(host).unique(["correlation", "pid"], keep="first")
    started = numbered.filter(pl.col("cat").is_in(DEVICE)).with_columns(pl.col("ts") + CLOCKS)
    pairs = started.join_asof(
        launches.sort("ts"), on="ts", by="correlation", check_sortedness=False
    ).drop_nulls("index_right")
    started = pairs.select("index", index_correlation="index_right", iteration="iteration_right")
    firsts = pairs.unique("index_right", keep="first", maintain_order=True)
    firsts = firsts.select(
        index="index_right", index_correlation="index", iteration="iteration_right"
    )
    frame = frame.with_columns(index_correlation=pl.lit(-1, pl.Int64)).update(
        pl.concat([started, firsts]), on="index"
    )
    parents = _find_parents(
        frame.filter(host).select("index", "pid", "tid", "ts", "dur"), len(frame)
    )
    return frame.with_columns(parent=pl.Series(parents, dtype=pl.Int64))


def _find_parents(host: pl.DataFrame, count: int) -> list[int]:
    """The innermost event around each event on its thread."""
    parents = [-1] * count
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, pid, tid, ts, dur in host.iter_rows():
        around = threads.setdefault((pid, tid), [])
        while around and around[-1][0] <= ts:
            around.pop()
        if around:
            parents[index] = around[-1][1]
        around.append((ts + dur, index))
    return parents


def _describe(
    facts: Mapping[str, Any],
    events: pl.DataFrame,
    args: Mapping[int, Mapping[str, Any]],
    source: str,
) -> TraceFile:
    """A trace with the ranks, devices and observers that its head names."""

    def tables(value: Any) -> list[dict[str, Any]]:
        return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []

    own, *_ = [*tables([facts.get("distributedInfo")]), {}]
    said = map(own.get, ("rank", "world_size"))
    rank, ranks = (each if type(each) is int and 0 <= each < 2**31 else None for each in said)
    listed = [each for each in tables(own.get("pg_config")) if isinstance(each.get("ranks"), list)]
    groups = {
        str(each.get("pg_name")): tuple(r for r in each["ranks"] if type(r) is int)
        for each in listed
    }
    stacks = "python_function" in events["cat"] or any(
        each.get("Call stack") for each in args.values()
    )
    seen = {
        "shapes": any("Input Dims" in each for each in args.values()),
        "stacks": stacks,
        "memory": bool(facts.get("profile_memory")),
    }
    devices = tuple(tables(facts.get("deviceProperties")))
    for device in devices:
        if type(device.get("id")) is not int:  # its number is compared with those of kernels
            device["id"] = None
    observers = tuple(name for name, on in seen.items() if on)
    return TraceFile(events, args, rank, ranks, devices, groups, observers, source)


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
    marks = (
        events.filter(MARK)
        .unique("iteration", maintain_order=True)
        .select("iteration", "ts", "dur")
    )
    device = events.filter(pl.col("cat").is_in(DEVICE) & (pl.col("iteration") >= 0))
    kernels = (pl.col("cat") == "kernel").sum().cast(pl.Int64)
    work = device.group_by("iteration").agg(kernels=kernels, begin=pl.min("ts"))
    slow = events.filter(pl.col("name").str.contains("^(cuda|hip)(Malloc|Free)$"))
    slow = slow.group_by("iteration").agg(allocations=pl.len())
    frame = (
        marks.join(work, on="iteration", how="left")
        .join(slow, on="iteration", how="left")
        .sort("ts")
    )
    frame = frame.with_columns(pl.col("kernels", "allocations").fill_null(0))
    single = device.filter(cat="kernel").filter(pl.len().over("iteration", "name") == 1)
    pairs = single.join(
        frame.select("iteration", after=pl.col("iteration").shift(-1)), on="iteration"
    )
    pairs = pairs.join(single, left_on=["after", "name"], right_on=["iteration", "name"])
    periods = pairs.group_by("iteration").agg(period=(pl.col("ts_right") - pl.col("ts")).median())
    return frame.join(
        periods.filter(pl.col("period") > 0), on="iteration", how="left", maintain_order="left"
    )


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
    steps, device = find_iterations(events), events["cat"].is_in(DEVICE).any()
    spans = "host step" if len(steps) else "device span" if device else "host span"
    return "kernels" if steps["period"].count() else spans
