"""Traces that lack something or contradict themselves: it is said, and said of no complete trace."""

import gzip
import json
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import perfkit as pk
from perfkit.readers.execution_trace import read_execution
from perfkit.readers.trace_text import MOST_CONTAINERS
from tests.recordings import (
    H100,
    Event,
    event,
    exchange,
    healthy,
    operation,
    step,
    write,
    write_ranks,
)

torch = pytest.importorskip("torch", reason="graphs of traces need torch")


def notes_of(path: Path) -> list[str]:
    """What is said of a trace, without what is said of the profiler."""
    return [text for text in pk.read_trace(path).warnings if "profiler also" not in text]


def test_nothing_is_said_of_a_complete_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", healthy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = pk.read_trace(path)
        graph = trace.graph()
    assert notes_of(path) == [] and len(graph.labels) == 2
    assert repr(trace).startswith(f"trace of 1 rank on {H100}: 1 ms")


# What a collective is.


@pytest.mark.parametrize("annotated", [True, False])
def test_kernels_of_one_exchange_are_one_collective(tmp_path: Path, annotated: bool) -> None:
    """Copies between signals: one all_gather of 16.8 MB that takes 125 us, counted once."""
    took = [(50, 5), (110, 50), (170, 5)]
    rank = [
        step(),
        *exchange(10, 5, took, annotated=annotated),
        *operation("aten::mm", 300, 101, took=200),
    ]
    paths = write_ranks(tmp_path, [rank, rank], "AMD Instinct MI300X")
    trace = pk.read_trace(paths)
    met = trace.collectives()
    assert met["operation"].to_list() == ["all_gather", "all_gather"]
    assert met["nbytes"].to_list() == [2.0**24, 2.0**24]
    assert met["time_s"].to_list() == pytest.approx([125e-6, 125e-6])
    counts = trace.breakdown().filter(kind="collective")
    assert counts["operations"].to_list() == [1]
    drawn = trace.timeline().filter(stream="communication")
    assert drawn["name"].to_list() == ["all_gather", "all_gather"]
    platform = pk.calibrate(traces=paths, base="mi300x-8")
    assert platform.collective_time("all_gather", 2**24, ranks=2) > 60e-6
    (note,) = platform.collectives["all_gather.2"].notes
    assert note.startswith("times of mi300x-8: start-up times ")
    graph = trace.graph(0)
    assert [label.kind for label in graph.labels].count("collective") == 1


def test_the_wait_of_an_exchange_of_several_kernels_is_its_first_part(tmp_path: Path) -> None:
    """Rank 0 begins 40 us before rank 1: this is waiting; all parts sum to the step."""
    early = [step(), *exchange(10, 5, [(10, 5), (60, 90), (155, 5)])]
    late = [step(), *exchange(50, 5, [(50, 5), (60, 90), (155, 5)])]
    trace = pk.read_trace(write_ranks(tmp_path, [early, late]))
    waits = trace.collectives().sort("rank")["waiting_s"].to_list()
    assert waits == pytest.approx([40e-6, 0.0])
    idle = trace.idle()
    assert idle["waiting_s"].to_list() == pytest.approx([40e-6, 0.0])
    columns = [name for name in idle.columns if name != "rank"]
    sums = idle.select(pl.sum_horizontal(columns)).to_series().to_list()
    assert sums == pytest.approx([1e-3, 1e-3])
    assert trace.breakdown().filter(kind="collective")["operations"].to_list() == [1]


def test_alike_kernels_of_two_exchanges_stay_two_collectives(tmp_path: Path) -> None:
    rank = [step()]
    for number in range(2):
        begin = 10 + 200 * number
        rank += exchange(begin, 5 + number, [(begin + 20, 60)], kernels=["ncclDevKernel_AllGather"])
    met = pk.read_trace(write_ranks(tmp_path, [rank, rank])).collectives()
    assert met["order"].to_list() == [0, 1, 0, 1]
    assert met["time_s"].to_list() == pytest.approx([60e-6, 60e-6, 60e-6, 60e-6])


def test_a_copy_inside_of_an_exchange_is_no_collective(tmp_path: Path) -> None:
    """Operators that an exchange calls, such as copies of its buckets, work for themselves."""
    rank = [step(), *exchange(10, 5, [(60, 50)], kernels=["ncclDevKernel_AllGather"])]
    rank[1]["dur"] = 60
    rank += operation("aten::copy_", 30, 9)
    met = pk.read_trace(write_ranks(tmp_path, [rank, rank])).collectives()
    assert met["time_s"].to_list() == pytest.approx([50e-6, 50e-6])


# What is missing.


def test_a_trace_that_lost_its_kernels_is_refused(tmp_path: Path) -> None:
    lost = [each for each in healthy() if each["cat"] != "kernel"]
    with pytest.raises(ValueError, match="2 launches of kernels but no kernels: the profiler lost"):
        pk.read_trace(write(tmp_path / "t.json", lost))


def test_launches_without_a_kernel_are_counted(tmp_path: Path) -> None:
    events = [step(dur=3000)]
    for number in range(8):
        events += operation("aten::mm", 20 + 300 * number, 101 + number)
    kernels = [each for each in events if each["cat"] == "kernel"]
    cut = [each for each in events if each not in kernels[::2]]
    assert notes_of(write(tmp_path / "t.json", cut)) == [
        "t.json: 4 of 8 launches have no kernel: part of the device's work is missing"
    ]
    assert notes_of(write(tmp_path / "t.json", events)) == []


def test_operators_of_a_host_are_not_those_of_its_device(tmp_path: Path) -> None:
    host = [each for each in healthy() if each["cat"] in ("cpu_op", "user_annotation")]
    path = write(tmp_path / "t.json", host)
    assert f"no work of {H100} was recorded" in notes_of(path)[0]
    assert f"on the host of {H100}" in repr(pk.read_trace(path))
    alone = write(tmp_path / "t.json", host, device=None)
    assert notes_of(alone) == [] and "on a CPU" in repr(pk.read_trace(alone))


def test_a_kernel_has_the_phase_that_the_host_tells_or_none(tmp_path: Path) -> None:
    names = ("xmma_fprop", "batch_norm_backward", "multi_tensor_apply_adam")
    alone = [
        event("kernel", name, 100 + 30 * place, 25, correlation=0)
        for place, name in enumerate(names)
    ]
    trace = pk.read_trace(write(tmp_path / "t.json", alone))
    assert set(trace.breakdown()["phase"]) == {""}
    assert "3 of 3 kernels and copies have no phase and no module" in trace.explain()
    assert trace.timeline("stage")["phase"].to_list() == [""]
    (legend,) = {row["phase"] for row in trace.chart("timeline").data.values}
    assert legend == "no phase", "not the names of three kernels"


def test_devices_without_a_name_are_unnamed(tmp_path: Path) -> None:
    text = repr(pk.read_trace(write(tmp_path / "t.json", healthy(), device="")))
    assert text.startswith("trace of 1 rank on an unnamed device: 1 ms")


def test_a_device_is_named_by_its_number(tmp_path: Path) -> None:
    """A host lists all of its devices; a rank works on one of them."""
    listed = [{"id": 0, "name": "NVIDIA T4"}, {"id": 1, "name": H100}]
    events = [
        {**each, "pid": 1} if each["cat"] == "kernel" else {**each, "pid": 9} for each in healthy()
    ]
    trace = pk.read_trace(write(tmp_path / "t.json", events, deviceProperties=listed))
    assert repr(trace).startswith(f"trace of 1 rank on {H100}: ")
    assert not [text for text in trace.warnings if "profiler also" not in text]


@pytest.mark.parametrize("odd", [["1"], {"n": 1}, "1", 1.0, None])
def test_a_device_with_another_number_than_a_whole_one_may_be_any(
    tmp_path: Path, odd: object
) -> None:
    listed = [{"id": odd, "name": H100}]
    trace = pk.read_trace(write(tmp_path / "t.json", healthy(), deviceProperties=listed))
    assert repr(trace).startswith(f"trace of 1 rank on {H100}: ")


def test_two_documents_in_a_file_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", healthy())
    path.write_text(path.read_text() + "\n" + path.read_text())
    with pytest.raises(ValueError, match="a second document begins"):
        pk.read_trace(path)


def test_operations_without_sizes_are_counted_and_teach_nothing(tmp_path: Path) -> None:
    """Five kernels with sizes, and ten of a CUDA graph without any: only the five are fitted."""
    events = [step()]
    for number in range(5):
        events += operation(
            "own::step", 20 + 60 * number, 110 + number, took=4 + 2 * number, size=256 << number
        )
    events.append(event("cuda_runtime", "cudaGraphLaunch", 400, 20, correlation=900))
    for node in range(10):
        name = ("elementwise_kernel", "xmma_gemm")[node % 2]
        events.append(event("kernel", name, 430 + 20 * node, 18, correlation=900))
    path = write(tmp_path / "t.json", events, device="AMD Instinct MI300X")
    with pytest.warns(UserWarning, match="10 of 15 operations of t.json have no sizes"):
        graph = pk.read_trace(path).graph()
    assert len(graph.labels) == 15
    platform = pk.calibrate(traces=path, base="mi300x-8")
    assert platform.kernels["other"].n == 5
    missing = platform.provenance["not in the traces"]
    assert "work of 10 of 15 operations of t.json: their sizes are unknown" in missing


def test_lists_of_tensors_have_their_bytes(tmp_path: Path) -> None:
    """An operation that perfkit does not know moves its operands, those in lists included."""
    events = [step(), *operation("own::pack", 20, 101)]
    sizes, types = [[[512, 512], [256, 256]], [64]], ["TensorList(float)", "float"]
    events[1]["args"] |= {"Input Dims": sizes, "Input type": types}
    graph = pk.read_trace(write(tmp_path / "t.json", events)).graph()
    assert graph.accesses.nbytes.sum() == 4 * (512 * 512 + 256 * 256 + 64)


def test_collectives_without_a_size_are_counted(tmp_path: Path) -> None:
    """A message of unknown size is not one of no bytes."""
    rank = [*healthy(), *exchange(500, 5, [(560, 50)], kernels=["ncclDevKernel_AllGather"])]
    for path in write_ranks(tmp_path, [rank, rank]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pk.read_trace(path).graph()
    for each in rank:
        for name in ("In msg nelems", "Out msg nelems"):
            each["args"].pop(name, None)
    (path, _) = write_ranks(tmp_path, [rank, rank])
    with pytest.warns(UserWarning, match=r"1 of 3 operations of rank0.json have no sizes .*gather"):
        pk.read_trace(path).graph()


def test_collectives_without_kernels_are_counted(tmp_path: Path) -> None:
    whole = exchange(10, 5, [(60, 50)], kernels=["ncclDevKernel_AllGather"])
    lost = [each for each in exchange(200, 6, []) if each["cat"] != "kernel"]
    rank = [step(), *whole, *lost]
    (path, _) = write_ranks(tmp_path, [rank, rank])
    assert "kernels of 1 collective are missing" in notes_of(path)[0]
    rank = [step(), *whole]
    (path, _) = write_ranks(tmp_path, [rank, rank])
    assert not any("missing" in text for text in notes_of(path))


def test_events_of_another_form_are_counted(tmp_path: Path) -> None:
    pair = [{**operation("aten::mm", 500, 7)[0], "ph": form} for form in ("B", "E")]
    assert notes_of(write(tmp_path / "t.json", healthy() + pair)) == [
        "t.json: events that are written as a begin and an end are left out: 1"
    ]
    with pytest.raises(ValueError, match="it holds 1 events without a duration"):
        pk.read_trace(write(tmp_path / "t.json", pair))


def test_categories_of_other_tools_are_counted_or_refused(tmp_path: Path) -> None:
    extra = {**event("mtia_ccp_events", "work", 700, 20), "pid": 0}
    assert notes_of(write(tmp_path / "t.json", [*healthy(), extra])) == [
        "t.json: events of the category 'mtia_ccp_events' are not used: 1"
    ]
    foreign = [{**each, "cat": "XLA Ops"} for each in healthy()]
    with pytest.raises(ValueError, match=r"categories 'xla ops'; .* so another tool wrote it"):
        pk.read_trace(write(tmp_path / "t.json", foreign))
    bare = healthy()
    for each in bare:
        del each["cat"]
    with pytest.raises(ValueError, match=r"categories ''; .* so another tool wrote it"):
        pk.read_trace(write(tmp_path / "t.json", bare))


def test_packed_data_that_end_too_early_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": healthy()}).encode())[:-20])
    with pytest.raises(ValueError, match="it is cut off"):
        pk.read_trace(path)


def test_work_of_two_devices_is_named(tmp_path: Path) -> None:
    second = event("kernel", "elementwise", 500, 20, pid=1, correlation=102)
    assert notes_of(write(tmp_path / "t.json", [*healthy(), second])) == [
        "t.json: it holds work of 2 devices, which counts as that of one rank"
    ]


# What contradicts itself.


def test_a_kernel_that_outlasts_what_follows_is_named(tmp_path: Path) -> None:
    events = healthy()
    next(each for each in events if each["cat"] == "kernel")["dur"] = 3.6e9
    (note,) = notes_of(write(tmp_path / "t.json", events))
    assert "the next event of its stream starts before kernel of aten::mm ends" in note
    assert "which takes 60 min" in note


def test_a_step_or_operator_that_outlasts_the_next_step_is_named(tmp_path: Path) -> None:
    second = [step(2000, 1000, number=2), *operation("aten::mm", 2020, 201)]
    assert notes_of(write(tmp_path / "t.json", healthy() + second)) == []
    long = [{**healthy()[0], "dur": 2500.0}, *healthy()[1:], *second]
    (note,) = notes_of(write(tmp_path / "t.json", long))
    assert "the next step starts before ProfilerStep#1 ends" in note
    mine = [step(), {**healthy()[1], "dur": 2500.0}, *healthy()[2:], *second]
    assert any(
        "operator aten::mm lasts longer than until the next step" in note
        for note in notes_of(write(tmp_path / "t.json", mine))
    )


def test_a_kernel_belongs_to_no_launch_that_came_later(tmp_path: Path) -> None:
    """Two processes use one number: the kernel belongs to the launch before it."""
    first, second = operation("aten::mm", 20, 101), operation("aten::add", 9000, 101)
    other = [{**each, "pid": 2} for each in second if each["cat"] != "kernel"]
    trace = pk.read_trace(write(tmp_path / "t.json", [step(0, 20_000), *other, *first]))
    assert trace.breakdown().filter(phase="forward")["kind"].to_list() == ["gemm"]
    only = [step(0, 20_000), *other, first[-1]]
    trace = pk.read_trace(write(tmp_path / "t.json", only))
    assert trace.breakdown().filter(phase="forward").is_empty()


def test_blocking_copies_are_waits_of_the_host(tmp_path: Path) -> None:
    """AMD's copies return when they are done: the host waits for its device."""
    copy = [
        event("cuda_runtime", "hipMemcpyWithStream", 300, 500, correlation=9),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Host)", 700, 50, correlation=9),
    ]
    events = [step(), *operation("aten::mm", 20, 101), *copy]
    trace = pk.read_trace(write(tmp_path / "t.json", events))
    assert trace.idle()["synchronisation_s"].item() > 50e-6
    launches = trace.host().filter(overhead="launch")
    assert launches["mean_s"].item() == pytest.approx(5e-6)


# Files that are none.


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b'{"traceEvents": [{"ph": "X", "name": "C:\\tools\\lib"}]}', "a backslash stands alone"),
        (
            b'{"traceEvents": [{"ph": "X", "name": "say "no" here"}]}',
            "a quotation mark ends a text",
        ),
        (b'{"traceEvents": [{"ph": "X", "dur": N/A}]}', "'N/A' is no number, text or null"),
        (b'{"traceEvents": [{"ph": "X", "dur": -nan}]}', "is no number, text or null"),
        (b'{"traceEvents": [{"ph": "X", "dur": 1.5', "it is cut off"),
        (b'{"traceEvents": [{"ph": "X", "name": "atte', "it is cut off"),
        (b'{"traceEvents": [{"ph": "X", "dur": 1.', "it is cut off"),
        (b'{"traceEvents": [{"ph": "X", "dur": 1.5e-', "it is cut off"),
        (b'{"traceEvents": [{"ph": "X", "dur": -', "it is cut off"),
        (b'{"traceEvents": [{"ph": "X", "on": fal', "it is cut off"),
        (b'{"traceEvents": [ // by hand\n]}', "a comment stands"),
        (b"{'traceEvents': []}", "a text stands in single quotation marks"),
        (b'{"traceEvents": [1, ]}', "a comma has nothing after it|no JSON"),
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>login</html>", "a web page"),
        (b"PK\x03\x04rest", "an? (zip )?archive"),
        (b"\n\x1c\x08\x01\x12\x03abc\x00\x00\xff\xfe", "it is binary"),
        (b"SQLite format 3\x00rest", "database"),
        (b"rank,time\n0,1\n", "it begins with"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_refusal_names_the_cause(
    tmp_path: Path, content: bytes, cause: str, packed: bool
) -> None:
    path = tmp_path / ("t.json.gz" if packed else "t.json")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ValueError, match=cause) as refusal:
        pk.read_trace(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("piece", ["[],", "{},", "[[]],", "1,", '"",', "null,"])
@pytest.mark.parametrize("head", ['{"traceEvents": [', '{"schema": "1.1.1", "nodes": ['])
def test_small_files_of_many_values_are_refused_at_once(
    tmp_path: Path, piece: str, head: str
) -> None:
    path = tmp_path / "t.json.gz"
    block = piece.encode() * 2**18
    # a file of several compressed parts is the file of what they hold
    path.write_bytes(
        gzip.compress(head.encode()) + gzip.compress(block) * (500_000_000 // len(block))
    )
    read: Any = read_execution if "nodes" in head else pk.read_trace
    with pytest.raises(ValueError, match=f"more than {MOST_CONTAINERS / 1e6:.0f} million lists"):
        read(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ts", None), ("dur", None), ("name", 5), ("cat", None), ("args", 5), ("ts", [1])],
)
def test_fields_of_another_type_are_one_line(tmp_path: Path, name: str, value: Any) -> None:
    events = healthy()
    events[1][name] = value
    with pytest.raises(ValueError, match=r"t\.json cannot be read: ") as refusal:
        pk.read_trace(write(tmp_path / "t.json", events))
    assert "\n" not in str(refusal.value)


def test_types_of_an_execution_trace_are_texts(tmp_path: Path) -> None:
    node = {
        "name": "aten::mm",
        "id": 2,
        "rf_id": 1,
        "tid": 1,
        "inputs": [1],
        "input_shapes": [[]],
        "input_types": [7],
        "outputs": [],
        "output_shapes": [],
        "output_types": [],
    }
    path = tmp_path / "et.json"
    path.write_text(json.dumps({"schema": "1.0.1", "nodes": [node]}))
    kineto = write(tmp_path / "t.json", healthy())
    with pytest.raises(ValueError, match="has inputs of types"):
        pk.read_trace([kineto, path])


# Whose measurements these are.


@pytest.mark.parametrize(
    ("named", "base", "same"),
    [
        (H100, "h100-sxm-8", True),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-8", True),
        ("NVIDIA A100-PG509-200", "a100-sxm-8", True),
        ("AMD Instinct MI300X", "mi300x-8", True),
        ("NVIDIA GeForce RTX 3090", "rtx-3090", True),
        ("AMD Instinct MI250X/MI250", "mi250-8", True),
        ("AMD Instinct MI300X", "h100-sxm-8", False),
        ("NVIDIA GeForce RTX 3090", "h100-sxm-8", False),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090", False),
        ("NVIDIA TITAN V", "v100-sxm-8", False),
        ("AMD Radeon Graphics", "h100-sxm-8", False),
        ("Intel(R) Data Center GPU Max 1550", "h100-sxm-8", False),
        ("Ascend910B", "a100-sxm-8", False),
        ("NVIDIA H100 80GB HBM3", "mi300x-8", False),
    ],
)
def test_traces_of_another_device_are_named(
    tmp_path: Path, named: str, base: str, same: bool
) -> None:
    events = [step(dur=9000)]
    for number in range(8):
        events += operation("aten::mm", 20 + 600 * number, 101 + number, size=128 * (number + 1))
    path = write(tmp_path / "t.json", events, device=named)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pk.calibrate(traces=path, base=base)
    mixed = [str(each.message) for each in told if "it now mixes both" in str(each.message)]
    assert len(mixed) == (0 if same else 1)
    assert same or mixed[0].startswith(f"traces are of {named}, platform")


# Laws.


def shuffled(events: list[Event], seed: int) -> list[Event]:
    """The events in another order."""
    found = list(events)
    random.Random(seed).shuffle(found)
    return found


def draw_rank(rng: random.Random, rank: int) -> list[Event]:
    """Two steps of some operations and collectives of a rank."""
    events, link = [], 10
    for number in range(2):
        begin = 3000.0 * number
        events.append(step(begin, 2900, number + 1))
        place = begin + 20
        for _ in range(4):
            link += 1
            took = rng.randint(20, 200)
            events += operation(rng.choice(("aten::mm", "aten::add")), place, link, took=took)
            place += 300
            link += 1
            first = place + 20 + rng.randint(0, 60)
            parts = [(first, 10.0), (first + 30, 40.0)][: rng.randint(1, 2)]
            events += exchange(place, link, parts)
            place += 250
    return events


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_events_and_of_files_changes_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    ranks = [draw_rank(rng, rank) for rank in range(3)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ordered = write_ranks(tmp_path / "a", ranks)
    plain = pk.read_trace(ordered)
    paths = write_ranks(tmp_path / "b", [shuffled(rank, seed) for rank in ranks])
    rng.shuffle(paths)
    other = pk.read_trace(paths)
    for view in ("idle", "breakdown", "timeline", "collectives", "steps", "modules", "stragglers"):
        assert getattr(plain, view)().equals(getattr(other, view)()), view
    one = pk.calibrate(traces=ordered, base="h100-sxm-8")
    same = pk.calibrate(traces=paths, base="h100-sxm-8")
    assert one.kernels == same.kernels and one.collectives == same.collectives
    for rank in range(3):
        graph, again = plain.graph(rank), other.graph(rank)
        assert graph.labels == again.labels
        assert graph.table().equals(again.table())


@pytest.mark.parametrize("seed", range(3))
def test_parts_sum_to_the_step_and_timelines_end_with_it(tmp_path: Path, seed: int) -> None:
    rng = random.Random(10 + seed)
    trace = pk.read_trace(write_ranks(tmp_path, [draw_rank(rng, rank) for rank in range(2)]))
    times = trace.steps().filter("kept").group_by("rank").agg(pl.mean("time_s")).sort("rank")
    idle = trace.idle().sort("rank")
    columns = [name for name in idle.columns if name != "rank"]
    sums = idle.select(pl.sum_horizontal(columns)).to_series()
    assert sums.to_list() == pytest.approx(times["time_s"].to_list(), rel=1e-9)
    whole = times.filter(rank=trace.busiest)["time_s"].item()
    assert trace.breakdown()["time_s"].sum() == pytest.approx(whole, rel=1e-9)
    for level in ("operation", "stage"):
        drawn = trace.timeline(level)
        longest = trace.steps().filter("kept")["time_s"].max()
        assert isinstance(longest, float)
        assert (drawn["start_s"] >= 0).all() and (drawn["end_s"] <= longest * (1 + 1e-9)).all()


def test_one_more_rank_adds_only_its_own(tmp_path: Path) -> None:
    """Works of a rank stay as they are; only its waits can be told."""
    rng = random.Random(5)
    paths = write_ranks(tmp_path, [draw_rank(rng, rank) for rank in range(3)])
    few, many = pk.read_trace(paths[:2]), pk.read_trace(paths)
    for name in ("steps", "host"):
        own = getattr(many, name)().filter(pl.col("rank") < 2)
        assert own.equals(getattr(few, name)())
    same = ["rank", "busy_s", "copies_s", "host_s", "loading_s", "synchronisation_s"]
    assert many.idle().filter(pl.col("rank") < 2).select(same).equals(few.idle().select(same))


# What a trace may run.

_STATE = """
import io, json, os, resource, sys, warnings
from contextlib import redirect_stderr, redirect_stdout
import torch
import perfkit as pk

def read_state():
    return (
        torch.initial_seed(), torch.get_rng_state().sum().item(), torch.get_default_dtype(),
        str(torch.get_default_device()), torch.is_grad_enabled(), torch.get_num_threads(),
        torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled, torch.is_autocast_cache_enabled(), sorted(os.listdir(".")),
    )

resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, 12 * 2**30))
pk.read_trace(sys.argv[1]).graph()  # imports
torch.set_default_dtype(torch.float64)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    state, told = read_state(), io.StringIO()
    with redirect_stdout(told), redirect_stderr(told), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        graph = pk.read_trace(path).graph()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    others = [str(each.message) for each in seen if "have no sizes" not in str(each.message)]
    print(json.dumps([state == read_state(), told.getvalue(), others, grown, len(graph.labels)]))
"""


def list_operators() -> list[str]:
    """All operators of PyTorch's library, those of its scripts included, once each."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return sorted(name for name in names if name.startswith("aten::"))


#: Types and texts of four arguments.
ARGUMENTS = (
    (["Scalar", "Scalar", "Scalar", "Scalar"], ["7", "7", "7", "7"]),
    (
        ["Scalar", "Scalar", "Scalar", "Scalar"],
        ["[1, 2]", "1000000000", "1000000000", "1000000000"],
    ),
    (["Scalar", "Scalar", "Scalar", "Scalar"], ["'note.txt'", "'w'", "1", "1"]),
    (["float", "float", "float", "float"], ["", "", "", ""]),
    (["float", "Scalar", "Scalar", "Scalar"], ["", "1000000000", "2", "2"]),
    (["float", "ScalarList", "Scalar", "Scalar"], ["", "[1000000, 1000000]", "1", "True"]),
    (["TensorList(float)", "Scalar", "Scalar", "Scalar"], ["", "1000000000", "1", "1"]),
)


def call_all_operators(types: list[str], texts: list[str]) -> list[Event]:
    """A trace of one step that calls every operator with these arguments."""
    names = list_operators()
    sizes: dict[str, Any] = {"float": [2, 3], "TensorList(float)": [[2, 3], [2, 3]]}
    dims = [sizes.get(kind, []) for kind in types]
    events = [step(0, 100.0 * len(names))]
    for number, name in enumerate(names):
        call = operation(name, 100.0 * number, 101 + number, took=10)
        call[0]["args"] |= {"Input Dims": dims, "Input type": types, "Concrete Inputs": texts}
        events += call
    return events


def test_no_operator_that_a_trace_names_leaves_anything(tmp_path: Path) -> None:
    """All operators in one trace, for each kind of arguments: PyTorch is as before, nothing is
    printed, written or filled."""
    paths = [write(tmp_path / "first.json", healthy())]
    for number, (types, texts) in enumerate(ARGUMENTS):
        paths.append(write(tmp_path / f"t{number}.json", call_all_operators(types, texts)))
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _STATE, *map(str, paths)],
        capture_output=True,
        text=True,
        cwd=home,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stderr
    lines = done.stdout.splitlines()
    for arguments, line in zip(ARGUMENTS, lines, strict=True):
        same, told, others, grown, count = json.loads(line)
        assert same and not told and others == [], arguments
        assert grown < 500_000 and count >= len(list_operators()), arguments


def test_alike_calls_add_alike_operations(tmp_path: Path) -> None:
    """What is repeated is what would run again, in its own phase and on tensors of its own."""
    events = [step(dur=9000)]
    names = ("aten::mm", "aten::cross_entropy_loss", "aten::add_", "aten::mm")
    for number in range(8):
        events += operation(names[number % 4], 20 + 600 * number, 101 + number)
    graph = pk.read_trace(write(tmp_path / "t.json", events)).graph()
    half = len(graph.labels) // 2
    assert graph.labels[:half] == graph.labels[half:]
    assert graph.table()[:half].equals(graph.table()[half:])
    alone = pk.read_trace(write(tmp_path / "one.json", events[: 1 + 3 * 4])).graph()
    accesses, count = list(graph.accesses), len(alone.accesses)
    assert accesses[:count] == list(alone.accesses)
    shift = alone.accesses.buffer.max() + 1
    assert [access.buffer for access in accesses[count:]] == [
        access.buffer + shift for access in alone.accesses
    ]


# -- what ranks say of one another, and why sizes are unknown
# --------------------------------------------------------------------------------------------------


def write_rank(path: Path, rank: int, ranks: int, device: str = H100) -> Path:
    """A healthy step of one rank."""
    return write(
        path, healthy(), device=device, distributedInfo={"rank": rank, "world_size": ranks}
    )


def test_ranks_that_do_not_belong_together_are_told(tmp_path: Path) -> None:
    first, second = tmp_path / "0.json", tmp_path / "1.json"
    write_rank(first, 0, 2)
    write_rank(second, 1, 2)
    assert not pk.read_trace([first, second]).doubts
    write_rank(second, 1, 4)
    assert pk.read_trace([first, second]).doubts == (
        "the files are of jobs with 2 and 4 ranks: these may not belong together",
    )
    write_rank(second, 1, 2, device="AMD Instinct MI300X")
    (doubt,) = pk.read_trace([first, second]).doubts
    assert doubt == (
        f"the ranks worked on several kinds of device: {H100} (0.json), AMD Instinct MI300X (1.json)"
    )
    write_rank(first, 5, 2)
    (doubt,) = pk.read_trace(first).doubts
    assert doubt == "0.json: it is of rank 5, and says that there are 2 ranks"


def test_kernels_without_their_launches_are_the_cause_not_missing_sizes(tmp_path: Path) -> None:
    events = healthy()
    for each in events:
        each["args"].pop("correlation", None)
    trace = pk.read_trace(write(tmp_path / "a.json", events))
    assert "2 of 2 launches have no kernel, and 2 kernels no launch" in trace.doubts[0]
    with pytest.raises(ValueError, match="links no kernel to the operator that launched it"):
        trace.graph()


def test_a_step_of_graphs_alone_is_told(tmp_path: Path) -> None:
    events = [
        step(),
        event("cuda_runtime", "cudaGraphLaunch", 10, 5, correlation=1),
        *(event("kernel", "gemm", 50 + 60 * i, 40, correlation=1) for i in range(3)),
    ]
    with pytest.raises(ValueError, match="holds kernels of graphs alone"):
        pk.read_trace(write(tmp_path / "a.json", events)).graph()


@pytest.mark.parametrize("dims", [[[512, 512]], [[-1, 512], [512, 512]]])
def test_one_operation_with_damaged_sizes_does_not_spoil_the_graph(
    tmp_path: Path, dims: list[list[int]]
) -> None:
    events = [*healthy(), *operation("aten::mm", 500, 103)]
    events[1]["args"]["Input Dims"] = dims
    trace = pk.read_trace(write(tmp_path / "a.json", events))
    with pytest.warns(UserWarning, match=r"1 of 3 operations of a.json have no sizes"):
        graph = trace.graph()
    assert [label.kind for label in graph.labels].count("gemm") == 1


def test_products_of_complex_numbers_have_sizes(tmp_path: Path) -> None:
    events = healthy()
    events[1]["args"]["Input type"] = ["c10::complex<float>", "c10::complex<float>"]
    graph = pk.read_trace(write(tmp_path / "a.json", events)).graph()
    assert graph.labels[0].kind == "gemm"
