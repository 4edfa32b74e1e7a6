"""What makes large traces fast gives what a plain reading gives."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.calibration.places import list_levels
from perfkit.readers import trace_events
from perfkit.readers.kineto import find_around, read_kineto
from perfkit.readers.trace_arguments import Arguments
from perfkit.readers.trace_numbers import read_times
from tests import samples

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12)


@given(SPANS)
def test_the_event_around_another_is_the_last_before_it_that_has_not_ended(spans: Any) -> None:
    """Spans may overlap, begin together or last no time."""
    spans = sorted(spans, key=lambda span: (span[0], -span[1]))
    starts = [start for start, _ in spans]
    ends = [start + length for start, length in spans]
    expected = []
    for number, start in enumerate(starts):
        running = [before for before in range(number) if ends[before] > start]
        expected.append(running[-1] if running else -1)
    columns = [pl.Series(values, dtype=pl.Int64) for values in (starts, ends)]
    assert find_around(columns[0], columns[1], range(len(spans))) == expected


@given(st.lists(st.integers(-1, 20), max_size=12))
def test_levels_count_the_members_above(drawn: list[int]) -> None:
    above = [min(member, number - 1) for number, member in enumerate(drawn)]
    depth: list[int] = []
    for member in above:
        depth.append(depth[member] + 1 if member >= 0 else 0)
    levels = list_levels(np.array(above, dtype=int))
    found = {member: number for number, level in enumerate(levels) for member in level.tolist()}
    assert found == dict(enumerate(depth))


def test_members_above_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="around themselves"):
        list_levels(np.array([-1, 2, 1, 0]))


TIMES = st.one_of(
    st.integers(0, 2**52),
    st.decimals(0, 2**51, places=3).map(str),
    st.decimals(-(2**40), 2**40, places=7).map(str),
    st.sampled_from(["0.0005", "0.0015", "1.0005000", "7e3", "-2.5", "3999999999999999.9995"]),
)


@given(st.lists(TIMES, max_size=5))
def test_times_are_rounded_as_decimal_numbers_are(values: list[Any]) -> None:
    expected = [round(Decimal(value) * 1000) for value in values]
    assert read_times(values, ["event"] * len(values)).to_list() == expected


def event(number: int, **others: Any) -> dict[str, Any]:
    """An event of a random trace."""
    rng = np.random.default_rng(number)
    categories = ("cpu_op", "Kernel", "cuda_runtime", "user_annotation", "gpu_memcpy")
    args = {
        "External id": number,
        "correlation": int(rng.integers(0, 9)),
        "stream": int(rng.integers(0, 3)),
        "Input Dims": [[number, 2], []],
        "bandwidth": 0.5,
    }
    kept = {name: args[name] for name in args if rng.random() < 0.7}
    made = {
        "ph": "X",
        "cat": str(rng.choice(categories)),
        "name": f"name {rng.integers(0, 4)} ü",
        "ts": float(rng.integers(0, 9000)) / 8,
        "dur": float(rng.integers(0, 300)) / 8,
        "pid": int(rng.integers(0, 2)),
        "tid": str(rng.choice(["7", "stream 7", "main"])),
        "args": kept,
    }
    return {**made, **others}


def test_batches_read_what_care_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events out of order, of several threads, without numbers, arguments or names of them."""
    events = [event(number) for number in range(60)]
    events += [
        event(60, pid="CPU", args=None),
        event(61, args={}),
        {"ph": "X", "pid": 1, "ts": 3, "dur": 0, "name": "no thread", "cat": "cpu_op"},
        {"ph": "B", "pid": 1, "ts": 3, "name": "begun"},
        {"ph": "s", "id": 5, "pid": 1, "tid": 2, "ts": 4},
        event(62, cat="kernel", args={"Collective name": "allreduce", "stream": 7}),
    ]
    path = tmp_path / "t.json"
    head = {"baseTimeNanoseconds": 5, "distributedInfo": {"rank": 1, "world_size": 2}}
    path.write_text(json.dumps({**head, "traceEvents": events}), encoding="utf-8")
    monkeypatch.setattr(trace_events, "_BATCH", 7)
    read_with_care = trace_events._parse_objects
    monkeypatch.setattr(trace_events, "_parse_objects", None)
    quick = read_kineto(path)
    monkeypatch.setattr(trace_events, "_parse_objects", read_with_care)
    monkeypatch.setattr(trace_events, "_parse_batches", refuse)
    slow = read_kineto(path)
    assert quick.events.equals(slow.events)
    assert dict(quick.args) == dict(slow.args)
    assert quick.args != {}
    assert quick.observers == slow.observers == ("shapes",)
    assert quick.rank == slow.rank == 1
    assert quick.notes == slow.notes
    assert quick.notes == ("events that are written as a begin and an end are left out: 1",)


def refuse(*_: Any) -> None:
    """Refuse a document, as msgspec does."""
    raise ValueError("it is refused")


def test_samples_are_read_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "_parse_objects", None)
    paths = list(samples.FOLDER.glob("*.kineto.json*"))
    assert len(paths) > 2
    for path in paths:
        assert len(read_kineto(path).events)


def test_a_word_that_json_lacks_is_read_with_care(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    events = [event(1, cat="cpu_op", args={"bandwidth": float("nan"), "External id": 3})]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    assert read_kineto(path).args[0]["External id"] == 3


def test_arguments_are_found_in_their_text_and_replaced() -> None:
    written = [
        {"args": {"Input dims": [[2]], "Call stack": ""}},
        {"args": {"text": '"Input Dims": 3', "Sequence number": 4, "Fwd thread id": 2}},
        None,
        {"args": {"Sequence number": 4}},
    ]
    texts = pl.Series([None if each is None else json.dumps(each) for each in written])
    arguments = Arguments(texts, {"Input dims": "Input Dims"})
    assert arguments.find("Input Dims") == [0]
    assert not arguments.tells("Call stack")
    assert arguments.tells("text")
    assert list(arguments) == [0, 1, 3]
    assert len(arguments) == 3
    assert arguments[0] == {"Input Dims": [[2]], "Call stack": ""}
    assert arguments.list_links().rows() == [(1, 4, True), (3, 4, False)]
    replaced = arguments.with_replaced({2: {"Input Dims": []}, 0: {}})
    assert replaced.find("Input Dims") == [2]
    assert sorted(replaced) == [0, 1, 2, 3]
    assert len(replaced) == 4
    with pytest.raises(KeyError):
        arguments[2]
