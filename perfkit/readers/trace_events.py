"""Events of a Kineto document as columns: parsed in batches, or object by object with care.

A document as the profiler writes it is parsed by msgspec in batches, which become columns at once:
a million events take a second or two, and little memory. Everything else (a list of events alone,
words such as NaN, damage) is parsed object by object, which is slower and can say what is wrong.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from perfkit.ground.forks import check_threads
from perfkit.ground.progress import follow
from perfkit.ground.units import escape, show
from perfkit.readers.trace_names import (
    find_renamed_fields,
    name_category,
    rename_fields,
)
from perfkit.readers.trace_numbers import pack_numbers, read_numbers, read_times
from perfkit.readers.trace_text import decode_text, parse_document, read_bytes

#: Categories of events whose arguments are not kept, unless they hold sizes or a collective.
_PLAIN = ("kernel", "cuda_runtime", "cuda_driver", "gpu_memset")
#: How many events are parsed at once [-].
_BATCH = 50_000
_NUMBERS = ("pid", "tid", "stream", "correlation")
#: Faults of msgspec and of polars with what is not as the profiler writes it. Before 0.22 msgspec
#: raises a SystemError for a whole number larger than any float.
_FAULTS = (ValueError, TypeError, OverflowError, RecursionError, SystemError)
_MISSING = msgspec.UNSET
#: Arguments that say nothing.
_NO_ARGUMENTS = r'"args"\s*:\s*(?:\{\s*\}|null)'


@dataclass(frozen=True, eq=False)
class Events:
    """Events of a document that have a duration.

    Parameters
    ----------
    facts : mapping of str to object
        Members of the document's head.
    frame : polars.DataFrame
        One row per event, in the order of the file: cat, in today's names; name; ts, dur [ns]; pid,
        tid, stream, correlation, see `perfkit.readers.trace_numbers.read_numbers` [-]; text, a JSON
        object that has the event's arguments as its member args, null where these are missing or do
        not matter.
    begun : int
        Number of events that are written as a begin and an end [-].
    renamed : mapping of str to str
        Own names of fields that the document names otherwise.
    """

    facts: Mapping[str, Any]
    frame: pl.DataFrame
    begun: int
    renamed: Mapping[str, str]


def read_events(path: str | Path, *, progress: bool) -> Events:
    """Read the events of a Kineto document.

    Parameters
    ----------
    path : str or Path
        The file, plain or compressed with gzip.
    progress : bool
        Whether to show a line on a terminal while it is read.

    Returns
    -------
    events : Events
        Its events and its head.

    Raises
    ------
    ValueError
        For a file that is no trace, is cut off, or has impossible times.
    """
    check_threads()
    data = read_bytes(path)
    renamed = find_renamed_fields(data)
    # a document with two lists of events, or fields that batches do not know, needs care
    is_usual = data.count(b'"traceEvents"') == 1 and not _READ & {*renamed.values()}
    if is_usual:
        with suppress(*_FAULTS):
            return _parse_batches(data, renamed, f"read {escape(Path(path).name, 60)}", progress)
    text = decode_text(data)
    del data
    return _parse_objects(text, renamed)


# -- columns
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Columns:
    """Members of events as they are written, and the text that holds their arguments, see
    `Events`."""

    cat: list[Any] = field(default_factory=list)
    name: list[Any] = field(default_factory=list)
    ts: list[Any] = field(default_factory=list)
    dur: list[Any] = field(default_factory=list)
    pid: list[Any] = field(default_factory=list)
    tid: list[Any] = field(default_factory=list)
    stream: list[Any] = field(default_factory=list)
    correlation: list[Any] = field(default_factory=list)
    text: list[str | None] = field(default_factory=list)


class _Packer:
    """Packs events, many at once, so that they take little memory."""

    def __init__(self) -> None:
        self._frames: list[pl.DataFrame] = []
        self._numbers: dict[str, list[pl.Series | Sequence[Any]]] = {}
        self._categories: dict[str, str] = {}

    def add(self, columns: _Columns) -> None:
        """Add events."""
        if not columns.cat:
            return
        for texts in (columns.cat, columns.name):
            if {*map(type, texts)} != {str}:
                raise ValueError("it holds events whose name or category is no text")
        for written in {*columns.cat} - {*self._categories}:
            self._categories[written] = name_category(written)
        text = pl.Series(columns.text, dtype=pl.String)
        is_empty = text.str.contains(_NO_ARGUMENTS).fill_null(False)
        frame = {
            "cat": pl.Series([self._categories[written] for written in columns.cat]),
            "name": pl.Series(columns.name),
            "ts": read_times(columns.ts, columns.name),
            "dur": read_times(columns.dur, columns.name),
            "text": text.set(is_empty, None),
        }
        self._frames.append(pl.DataFrame(frame))
        for name in _NUMBERS:
            self._numbers.setdefault(name, []).append(pack_numbers(getattr(columns, name)))

    def finish(self) -> pl.DataFrame:
        """All events, see `Events`."""
        frame = pl.concat(self._frames)
        threads: dict[str, int] = {}
        numbers = {name: read_numbers(self._numbers[name], threads) for name in _NUMBERS}
        return frame.with_columns(**numbers)


def _is_plain(written: Any) -> bool:
    """Whether arguments of a category do not matter, see `_PLAIN`."""
    return type(written) is str and name_category(written) in _PLAIN


def _check_content(facts: Mapping[str, Any], count: int, begun: int) -> None:
    """Refuse a document that is no Kineto trace."""
    about = facts.get("otherData")
    if isinstance(about, Mapping) and "prediction" in about:
        content = "a prediction, as save_trace writes it"
    elif "nodes" in facts:
        content = "nodes of an execution trace"
    elif count:
        return
    elif begun:
        content = f"{begun} events without a duration (a begin and an end each)"
    else:
        content = "no events"
    raise ValueError(f"it holds {content}; a Kineto trace has events with measured times")


# -- in batches
# --------------------------------------------------------------------------------------------------


class _Document(msgspec.Struct):
    """What is read of a document."""

    traceEvents: msgspec.Raw
    baseTimeNanoseconds: Any = _MISSING
    deviceProperties: Any = _MISSING
    distributedInfo: Any = _MISSING
    profile_memory: Any = _MISSING
    otherData: Any = _MISSING
    nodes: Any = _MISSING


class _Arguments(msgspec.Struct):
    """What is read of the arguments of every event."""

    stream: Any = None
    correlation: Any = None
    types: Any = msgspec.field(name="Input type", default=_MISSING)
    collective: Any = msgspec.field(name="Collective name", default=_MISSING)


class _Event(msgspec.Struct):
    """What is read of an event."""

    ph: Any = None
    cat: Any = ""
    name: Any = ""
    ts: Any = _MISSING
    dur: Any = ""
    pid: Any = _MISSING
    tid: Any = ""
    args: _Arguments | None = None


#: Names of the fields that are read in batches.
_READ = {part.encode_name for kind in (_Event, _Arguments) for part in msgspec.structs.fields(kind)}


def _parse_batches(
    data: bytearray, renamed: Mapping[str, str], what: str, progress: bool
) -> Events:
    """Parse a document in batches; see `_FAULTS` for what it raises."""
    # numbers keep all of their digits
    document = msgspec.json.Decoder(_Document, float_hook=str).decode(data)
    facts = {}
    for part in msgspec.structs.fields(_Document):
        value = getattr(document, part.name)
        if part.name != "traceEvents" and value is not _MISSING:
            facts[part.name] = value
    texts = msgspec.json.decode(document.traceEvents, type=list[msgspec.Raw])
    reader = _BatchReader()
    for first in follow(what, range(0, len(texts), _BATCH), progress=progress):
        reader.read(texts[first : first + _BATCH])
    _check_content(facts, reader.count, reader.begun)
    return Events(facts, reader.packer.finish(), reader.begun, renamed)


class _BatchReader:
    """Reads events of a document, many at once.

    Attributes
    ----------
    packer : _Packer
        Events with a duration.
    count, begun : int
        Number of events with a duration, and of those that are written as a begin and an end [-].
    """

    def __init__(self) -> None:
        self.packer = _Packer()
        self.count = 0
        self.begun = 0
        self._decoder = msgspec.json.Decoder(list[_Event], float_hook=str)

    def read(self, texts: Sequence[msgspec.Raw]) -> None:
        """Read events, each a JSON object."""
        events = self._decoder.decode(b"[" + b",".join(texts) + b"]")
        phases = [event.ph for event in events]
        if "B" in phases or "b" in phases:
            self.begun += sum(
                event.ph in ("B", "b") and event.pid is not _MISSING for event in events
            )
        are_spans = [phase == "X" for phase in phases]
        spans = list(compress(events, are_spans))
        nothing = _Arguments()
        arguments = [span.args or nothing for span in spans]
        columns = _Columns(
            cat=[span.cat for span in spans],
            name=[span.name for span in spans],
            ts=[span.ts for span in spans],
            dur=[span.dur for span in spans],
            pid=[span.pid for span in spans],
            tid=[span.tid for span in spans],
            stream=[each.stream for each in arguments],
            correlation=[each.correlation for each in arguments],
        )
        plain = {written for written in {*columns.cat} if _is_plain(written)}
        for written, each, text in zip(
            columns.cat, arguments, compress(texts, are_spans), strict=True
        ):
            is_told = each.types is not _MISSING or each.collective is not _MISSING
            is_kept = each is not nothing and (is_told or written not in plain)
            columns.text.append(str(text, "utf-8") if is_kept else None)
        self.count += len(spans)
        self.packer.add(columns)


# -- object by object
# --------------------------------------------------------------------------------------------------


def _parse_objects(text: str, renamed: Mapping[str, str]) -> Events:
    """Parse a document object by object, and say what is wrong with it."""
    collector = _Collector(renamed)
    facts = parse_document(text, str, collector.take)
    _check_content(facts, len(collector.columns.cat), collector.begun)
    packer = _Packer()
    packer.add(collector.columns)
    return Events(facts, packer.finish(), collector.begun, renamed)


class _Collector:
    """Takes events out of a document while it is parsed, so that they take little memory.

    Attributes
    ----------
    columns : _Columns
        Events with a duration, in the order of the file.
    begun : int
        Number of events that are written as a begin and an end [-].
    """

    def __init__(self, renamed: Mapping[str, str]) -> None:
        self.columns = _Columns()
        self.begun = 0
        self._renamed = renamed

    def take(self, value: dict[str, Any]) -> dict[str, Any] | None:
        """Move an event with a duration into the columns, drop other events, and leave all other
        objects in place."""
        if self._renamed:
            rename_fields(value, self._renamed)
        if "ph" not in value:
            return value
        # arguments may have a key "ph" too
        kind = value["ph"]
        if kind == "X" and ("pid" in value or "ts" in value):
            self._add(value)
            return None
        if "pid" not in value:
            return value
        if kind in ("B", "b"):
            self.begun += 1
        return None

    def _add(self, event: dict[str, Any]) -> None:
        """Add an event with a duration."""
        args = event.get("args") or {}
        if type(args) is not dict:
            raise ValueError(f"event {show(event, 60)} has arguments of another type")
        columns = self.columns
        category = event.get("cat", "")
        columns.cat.append(category)
        columns.name.append(event.get("name", ""))
        columns.ts.append(event.get("ts", ""))
        columns.dur.append(event.get("dur", ""))
        columns.pid.append(event.get("pid", ""))
        columns.tid.append(event.get("tid", ""))
        columns.stream.append(args.get("stream"))
        columns.correlation.append(args.get("correlation"))
        is_told = "Input type" in args or "Collective name" in args
        is_kept = bool(args) and (is_told or not _is_plain(category))
        columns.text.append(json.dumps({"args": args}) if is_kept else None)
