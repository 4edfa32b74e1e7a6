"""Reading of Kineto and execution traces: samples whose contents are known, traces of other people
by their manifest, and files that are refused."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.calibration.activity import list_steps
from perfkit.ground.files import find_reference
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.predictor import predict
from perfkit.readers.execution_trace import join_traces, read_execution
from perfkit.readers.kineto import find_basis, find_iterations, read_kineto
from perfkit.readers.trace_names import DEVICE, RENAMED_CATEGORIES, RENAMED_FIELDS
from perfkit.readers.trace_text import parse_document
from perfkit.workloads.transformer import Transformer
from tests import samples

#: A training step of today on a device, see `tests/data/README.md`.
STEP = samples.FOLDER / "step_rank0.kineto.json"
#: Events with a time, kernels and steps of unusual files.
EDGES = {
    "distributed_info_not_found": (2467, 0, 1),
    "rank-34.Jul_15_10_52_41.1074.pt.trace": (15, 0, 1),
    "mi250_minitoy_train_ROCm6_2_kineto": (112, 14, 2),
    "triton_example": (7, 1, 1),
    "event_sync_trace": (56, 3, 0),
}


def list_manifest(folder: Path) -> list[dict[str, str]]:
    """Rows of the manifest of traces."""
    with open(folder / "traces" / "MANIFEST.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def name_basis(steps: int) -> str:
    """How the time of an iteration is measured in a trace of so many steps."""
    if steps > 1:
        return "kernels"
    return "host step" if steps else "device span"


def test_iterations_take_what_the_manifest_says(shared_data: Path) -> None:
    """Within 1 %, on its basis: period of kernels, mark of the host, or span of the device."""
    rows = [row for row in list_manifest(shared_data) if row["iteration_ms"]]
    assert len(rows) == 24
    for row in rows:
        file = read_kineto(shared_data / "traces" / row["file"])
        basis = find_basis(file.events)
        times = list_steps(file, basis)["time_s"].to_numpy()
        stated = [float(text) for text in row["iteration_ms"].split(";")]
        assert np.allclose(1e3 * times, stated, rtol=0.01), (row["file"], times, stated)
        assert basis == name_basis(int(row["steps"]))
        assert (file.events["cat"] == "kernel").sum() == int(row["kernels"])
        assert file.rank is None or file.ranks in (None, int(row["ranks"]))


def test_edge_cases_open_or_say_why_not(shared_data: Path) -> None:
    home = shared_data / "traces" / "edge_cases"
    for name, expected in EDGES.items():
        file = read_kineto(home / f"{name}.json.gz")
        kernels, steps = (file.events["cat"] == "kernel").sum(), len(find_iterations(file.events))
        assert (len(file.events), kernels, steps) == expected, name
    with pytest.raises(ValueError, match=r"cannot be read: .* at character \d+.*torch.profiler"):
        read_kineto(home / "streams_same_priority_streams.json.gz")  # no valid JSON


#: Traces of the repository, and kernels that were launched before their recording began.
OURS = {
    samples.FOLDER / "step_rank0.kineto.json": 1,
    samples.FOLDER / "step_rank1.kineto.json": 1,
    samples.FOLDER / "step_of_2021.kineto.json": 1,
    samples.FOLDER / "cpu_step.kineto.json.gz": 0,
    find_reference("measured", "h200-2.dlrm.json.gz"): 0,
    find_reference("measured", "h200-2.gpt2.json.gz"): 0,
}
#: The same of public traces.
PUBLIC = {
    "dlrm_v100x8_param/kineto_rank3": 64,
    "resnet50_v100x1_workers0": 0,
    "rec_v100x2_rank1_hta": 614,
}


def check_links(path: Path, unlaunched: int) -> None:
    """What a device does begins after its launch, which its thread's operations contain; steps
    follow the launch."""
    events = read_kineto(path).events
    assert events["index"].to_list() == list(range(len(events)))
    assert events["ts"].is_sorted()
    device = events.filter(pl.col("cat").is_in(DEVICE))
    linked = device.filter(pl.col("index_correlation") >= 0)
    assert len(linked) == len(device) - unlaunched
    launches = events[linked["index_correlation"].to_list()]
    assert (linked["ts"] + linked["dur"] >= launches["ts"]).all()
    assert launches["correlation"].equals(linked["correlation"])
    assert launches["iteration"].equals(linked["iteration"])
    assert (launches["stream"] == -1).all()
    assert (device["stream"] >= 0).all()
    inner = events.filter(pl.col("parent") >= 0)
    outer = events[inner["parent"].to_list()]
    assert inner.select("pid", "tid").equals(outer.select("pid", "tid"))
    assert (outer["ts"] <= inner["ts"]).all()
    assert (inner["ts"] < outer["ts"] + outer["dur"]).all()


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_links_and_parents_hold_together(path: Path) -> None:
    check_links(path, OURS[path])


@pytest.mark.parametrize("name", PUBLIC)
def test_links_and_parents_of_public_traces_hold_together(shared_data: Path, name: str) -> None:
    check_links(shared_data / "traces" / f"{name}.json.gz", PUBLIC[name])


# -- samples
# --------------------------------------------------------------------------------------------------


def test_two_steps_of_two_ranks_are_read_as_they_were_written() -> None:
    file = read_kineto(STEP)
    assert (file.rank, file.ranks, file.groups) == (0, 2, {"0": (0, 1)})
    assert file.devices == ({"id": 0, "name": "Invented GPU"},)
    assert file.observers == ("shapes",)
    assert file.notes == ()
    first, second = find_iterations(file.events).rows(named=True)
    assert (first["iteration"], second["iteration"]) == (1, 2)
    assert first["kernels"] == second["kernels"] == 5
    assert first["period"] == 1_000_000
    assert second["period"] is None
    assert find_basis(file.events) == "kernels"
    # since the epoch: the base of the file, and the clock of its events
    assert first["ts"] == 1_700_000_000_000_000_000 + 1000 * samples.START
    assert first["begin"] == first["ts"] + 80_000


def test_operations_stand_inside_of_those_that_call_them() -> None:
    events = read_kineto(STEP).events
    names = events["name"].to_list()
    around = {}
    for name, parent in events.filter(pl.col("iteration") == 1).select("name", "parent").rows():
        around[name] = names[parent] if parent >= 0 else ""
    assert around["aten::addmm"] == "aten::linear"
    assert around["aten::linear"] == "ProfilerStep#1"
    assert around["aten::mm"] == "AddmmBackward0"
    assert around["autograd::engine::evaluate_function: AddmmBackward0"] == ""


def test_a_layout_of_2021_holds_the_same_step() -> None:
    today = read_kineto(STEP)
    old = read_kineto(samples.FOLDER / "step_of_2021.kineto.json")
    first = today.events.filter(pl.col("ts") < today.events["ts"][0] + 1_000_000)
    same = ["name", "cat", "dur", "tid", "stream", "correlation", "parent", "iteration"]
    # old profilers wrote marks as operators, and knew one kind of calls
    merged = {"user_annotation": "cpu_op", "cuda_driver": "cuda_runtime"}
    categories = pl.col("cat").replace(merged)
    expected = first.select(same).with_columns(categories)
    assert old.events.select(same).with_columns(categories).equals(expected)
    for index, args in old.args.items():
        newer = {name: today.args[index][name] for name in args}
        assert args == newer


class Renamed(NamedTuple):
    """A name in a trace.

    Parameters
    ----------
    written : str
        How another version of PyTorch writes it.
    own : str
        perfkit's own name for it, which the sample has.
    """

    written: str
    own: str


#: Fields that PyTorch of 2021 named otherwise.
FIELDS = (Renamed("external id", "External id"), Renamed("Input dims", "Input Dims"))
#: Categories that PyTorch of 2021 named otherwise.
CATEGORIES = (
    Renamed("operator", "cpu_op"),
    Renamed("runtime", "cuda_runtime"),
    Renamed("driver", "cuda_driver"),
    Renamed("memcpy", "gpu_memcpy"),
    Renamed("memset", "gpu_memset"),
)


def test_every_name_that_the_reader_knows_is_tried_below() -> None:
    """The names stand here and there: a line that is missing or misspelt in one differs."""
    assert dict(FIELDS) == RENAMED_FIELDS
    assert dict(CATEGORIES) == RENAMED_CATEGORIES


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.written)
def test_a_field_of_another_version_is_read_by_its_own_name(tmp_path: Path, field: Renamed) -> None:
    """The sample must have the own name: where it lacks it, `tests/samples.py` adds it."""
    check_same(tmp_path, f'"{field.own}":', f'"{field.written}":')


@pytest.mark.parametrize("category", CATEGORIES, ids=lambda category: category.written)
def test_a_category_of_another_version_is_read_by_its_own_name(
    tmp_path: Path, category: Renamed
) -> None:
    for written in (category.written, category.written.capitalize()):
        check_same(tmp_path, f'"cat":"{category.own}"', f'"cat":"{written}"')


def check_same(folder: Path, own: str, written: str) -> None:
    """The sample says the same with the text of another version in place of the own one."""
    text = STEP.read_text(encoding="utf-8")
    assert own in text, f"{STEP.name} has no {own}"
    renamed = folder / STEP.name
    renamed.write_text(text.replace(own, written), encoding="utf-8")
    expected = read_kineto(STEP)
    file = read_kineto(renamed)
    assert file.events.equals(expected.events)
    assert file.args == expected.args
    assert file.observers == expected.observers


def test_a_field_with_both_names_keeps_the_own_one(tmp_path: Path) -> None:
    args = {"external id": 4, "External id": 5}
    file = read_kineto(write(tmp_path / "t.json", event(args=args)))
    assert file.args == {0: {"External id": 5}}


# -- execution traces
# --------------------------------------------------------------------------------------------------


def test_execution_traces_hold_what_the_manifest_says(shared_data: Path) -> None:
    rows = [row for row in list_manifest(shared_data) if "nodes" in row["kernels"]]
    assert len(rows) == 13
    for row in rows:
        trace = read_execution(shared_data / "traces" / row["file"])
        # events of the device, which a link has put among the nodes
        added = 261 if "linked" in row["file"] else 0
        assert len(trace.nodes) == int(row["kernels"].split()[0]) - added


#: Recordings of one step by both, in the repository.
PAIRS = {
    "step_rank0.kineto.json": "step_rank0.et.json",
    "step_rank1.kineto.json": "step_rank1.et.json",
    "cpu_step.kineto.json.gz": "cpu_step.et.json.gz",
}


@pytest.mark.parametrize("kineto", PAIRS)
def test_every_operation_of_a_step_has_its_node(kineto: str) -> None:
    file = read_kineto(samples.FOLDER / kineto)
    nodes = join_traces(file, read_execution(samples.FOLDER / PAIRS[kineto]))
    host = file.events.filter(pl.col("cat").is_in(["cpu_op", "user_annotation"]))
    names = dict(host.select("index", "name").rows())
    assert {index: node.name for index, node in nodes.items()} == names
    for index, node in nodes.items():
        traced = [dims for dims in file.args[index].get("Input Dims", []) if dims]
        recorded = [shape for shape in node.inputs.shapes if shape]
        assert traced == recorded[: len(traced)]


def test_operations_without_numbers_are_joined_by_their_order() -> None:
    file = read_kineto(STEP)
    execution = read_execution(samples.FOLDER / "step_rank0.et.json")
    by_number = join_traces(file, execution)
    args = {}
    for index, facts in file.args.items():
        args[index] = {"Input Dims": facts["Input Dims"]} if "Input Dims" in facts else {}
    assert join_traces(replace(file, args=args), execution) == by_number


def test_an_execution_trace_of_another_device_is_refused() -> None:
    execution = read_execution(samples.FOLDER / "step_rank1.et.json")
    with pytest.raises(ValueError, match="its device is 1, not 0; pass traces"):
        join_traces(read_kineto(STEP), execution)


def test_both_schemas_hold_the_same_nodes() -> None:
    nested = read_execution(samples.FOLDER / "step_rank0.et.json")
    flat = read_execution(samples.FOLDER / "step_rank0.schema_1_0.et.json")
    assert flat.nodes[0].name == "## process_group:init ##"
    assert flat.nodes[1:] == nested.nodes
    assert flat.groups == {"0": (0, 1)}
    assert nested.groups == {}


@pytest.mark.parametrize(("folder", "rank"), [("dlrm_v100x8_param", 5), ("megatron_tp8_a100x8", 1)])
def test_execution_traces_join_those_of_their_rank(
    shared_data: Path, folder: str, rank: int
) -> None:
    """By order on each thread, or by number: operations have the shapes that Kineto saw."""
    home = shared_data / "traces" / folder
    file, execution = (
        read_kineto(home / f"kineto_rank{rank}.json.gz"),
        read_execution(home / f"et_rank{rank}.json.gz"),
    )
    nodes = join_traces(file, execution)
    assert len(nodes) > 0.99 * len(file.events.filter(cat="cpu_op"))
    products = {
        i: node
        for i, node in nodes.items()
        if node.name in ("aten::mm", "aten::addmm", "aten::bmm")
    }
    assert len(products) > 10
    for index, node in products.items():
        assert [dims for dims in file.args[index]["Input Dims"] if dims] == [
            s for s in node.inputs.shapes if s
        ]
    wrong = read_kineto(home / "kineto_rank0.json.gz")
    with pytest.raises(ValueError, match=f"its device is {rank}, not 0; pass traces"):
        join_traces(wrong, execution)
    # every process sees one device
    alone = replace(wrong, events=wrong.events.with_columns(pid=rank))
    if folder.startswith("dlrm"):  # rank 0 and 5 have equal sizes, rank 3 has others
        assert len(join_traces(alone, execution)) > 1600
        alone = read_kineto(home / "kineto_rank3.json.gz")
        alone = replace(alone, events=alone.events.with_columns(pid=rank))
        with pytest.raises(
            ValueError, match="operands of 24 of 1671 operations have other sizes, the first"
        ):
            join_traces(alone, execution)
    other = read_kineto(shared_data / "traces" / "gaunernst_bert-small-uncased_h100.json.gz")
    with pytest.raises(ValueError, match="another step or rank"):
        join_traces(other, execution)


def test_an_execution_trace_names_its_device(shared_data: Path) -> None:
    """Published beside the trace of rank 0, but recorded on rank 1."""
    home = shared_data / "traces"
    file = read_kineto(home / "resnet_a100x2_rank0_ncclmeta_hta.json.gz")
    execution = read_execution(home / "et_resnet_2gpu_schema_1.1.0.json.gz")
    with pytest.raises(ValueError, match="its device is 1, not 0; pass traces"):
        join_traces(file, execution)
    right = replace(file, rank=1, events=file.events.with_columns(pid=1))
    assert len(join_traces(right, execution)) == 14_388


# -- what no trace holds
# -----------------------------------------------------------------------------------------------


def event(**changes: Any) -> dict[str, Any]:
    """An operation of 5 µs."""
    plain = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 1,
        "tid": 1,
        "ts": 1_700_000_000_000_000,
        "dur": 5,
    }
    return {**plain, **changes}


def write(path: Path, *events: Any, **head: Any) -> Path:
    """A trace of some events."""
    path.write_text(
        json.dumps({"schemaVersion": 1, **head, "traceEvents": list(events)}), encoding="utf-8"
    )
    return path


def test_times_keep_every_nanosecond(tmp_path: Path) -> None:
    """Of the clock since the epoch a float of 64 bits keeps but quarters of a microsecond."""
    plain = json.dumps({"traceEvents": [event(ts="TS", dur="DUR")]})
    cases = {
        ("1700000000000000.123", "0.001"): (1_700_000_000_000_000_123, 1),
        ('"4458676983543.183"', "15.6330"): (4_458_676_983_543_183, 15_633),
        ("7", "0"): (7000, 0),
    }
    for (ts, dur), expected in cases.items():
        (tmp_path / "t.json").write_text(
            plain.replace('"TS"', ts).replace('"DUR"', dur), encoding="utf-8"
        )
        assert read_kineto(tmp_path / "t.json").events.select("ts", "dur").row(0) == expected
    based = write(tmp_path / "b.json", event(ts=3), baseTimeNanoseconds=1_711_964_646_000_000_000)
    assert read_kineto(based).events["ts"][0] == 1_711_964_646_000_003_000


def test_categories_of_old_traces_and_threads_by_name(tmp_path: Path) -> None:
    device = {"name": "k", "pid": 0, "tid": "stream 7"}
    rows = [
        event(cat="Operator", tid="17"),
        event(cat="Operator", name="ProfilerStep#4", dur=90, tid="17"),
        event(cat="Runtime", name="cudaLaunchKernel", tid="17", args={"correlation": 5}),
        event(
            cat="Kernel", ts=1_700_000_000_000_100, args={"correlation": 5, "stream": 7}, **device
        ),
        event(cat="Memset", args={"stream": "0x0"}, **device),
        event(tid="worker"),
        event(tid="other"),
    ]
    events = read_kineto(write(tmp_path / "old.json", *rows)).events
    categories = "user_annotation cpu_op cuda_runtime gpu_memset cpu_op cpu_op kernel"
    assert events["cat"].to_list() == categories.split()
    assert events["tid"].to_list() == [17, 17, 17, 7, -2, -3, 7]
    assert events["parent"].to_list() == [-1, 0, 1, -1, -1, -1, -1]
    assert events["index_correlation"].to_list() == [-1, -1, 6, -1, -1, -1, 2]
    assert events["iteration"].to_list() == [4, 4, 4, -1, 4, 4, 4]


def test_arguments_may_have_a_key_that_events_have(tmp_path: Path) -> None:
    for ph in "Xi":
        args = {"ph": ph, "Input Dims": [[2, 3]], "dur": 7}
        file = read_kineto(write(tmp_path / "t.json", event(args=args), event(ph="i")))
        assert len(file.events) == 1
        assert file.args == {0: args}


@pytest.mark.parametrize(
    ("events", "head", "observers"),
    [
        ([event()], {}, ()),
        ([event(args={"Input Dims": [[2, 3]]})], {}, ("shapes",)),
        ([event(args={"Call stack": "train.py(7): step"})], {}, ("stacks",)),
        ([event(args={"Call stack": ""})], {}, ()),
        ([event(), event(cat="python_function", name="train.py(7): step")], {}, ("stacks",)),
        ([event()], {"profile_memory": 1}, ("memory",)),
        ([event()], {"profile_memory": 0}, ()),
    ],
)
def test_each_thing_that_the_profiler_recorded_beside_is_named(
    tmp_path: Path, events: list[Any], head: dict[str, Any], observers: tuple[str, ...]
) -> None:
    assert read_kineto(write(tmp_path / "t.json", *events, **head)).observers == observers


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([event(dur=-5)], "cannot be negative"),
        ([event(ts=float("nan"))], "must be microseconds"),
        ([event(ts=1e30)], "must be microseconds"),
        ([event(ts=2**62 // 1000 + 1)], "must be microseconds"),
        ([event(ts=-(2**62) // 1000 - 1)], "must be microseconds"),
        ([event(ts="now")], "now"),
        ([{k: v for k, v in event().items() if k != "dur"}], "must be microseconds"),
        ([event(name=5)], "is no text"),
        ([event(args=[1])], "of another type"),
        ([], "holds no events"),
        ([1, "a", None], "holds no events"),
    ],
)
def test_impossible_events_are_named(tmp_path: Path, events: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        read_kineto(write(tmp_path / "lie.json", *events))
    assert str(raised.value).startswith(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_prediction_is_not_taken_for_a_recording(tmp_path: Path) -> None:
    with keep_quiet():
        path = predict(Transformer.bert(layers=1), "h100-sxm-8").save_trace(tmp_path / "step.json")
    with pytest.raises(
        ValueError,
        match=r"step\.json cannot be read: it holds a prediction, as save_trace writes it",
    ):
        read_kineto(path)


def test_broken_and_mixed_files_are_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.json", event(), event()).read_bytes()
    texts = (
        whole[:90],
        whole[:-3],
        b"",
        b"[]",
        b"5",
        b'{"traceEvents": [1 2]}',
        gzip.compress(whole)[:60],
    )
    for text in texts:
        (tmp_path / "broken.json").write_bytes(text)
        with pytest.raises(ValueError, match=r"broken\.json cannot be read: "):
            read_kineto(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text(json.dumps([event()]), encoding="utf-8")
    # a list of events is a trace of Chrome too
    assert len(read_kineto(tmp_path / "list.json").events) == 1
    with pytest.raises(ValueError, match="execution trace"):
        read_kineto(write(tmp_path / "mixed.json", event(), nodes=[]))
    with pytest.raises(ValueError, match="no schema or no nodes"):
        read_execution(write(tmp_path / "kineto.json", event()))


JSON = st.recursive(
    st.text('}{,]" a', max_size=4),
    lambda each: st.lists(each) | st.dictionaries(st.text("a}"), each),
)


@given(st.lists(JSON, max_size=9))
def test_objects_that_are_taken_leave_no_others(items: list[Any]) -> None:
    taken: list[Any] = []
    whole = {"more": items, "taken": [{"ph": each} for each in items]}

    def take(value: dict[str, Any]) -> dict[str, Any] | None:
        if "ph" not in value:
            return value
        taken.append(value)
        return None

    document = parse_document(json.dumps(whole), float, take)
    assert taken == whole["taken"]
    assert document == {"more": items, "taken": [None for _ in items]}


def test_what_unpacks_without_end_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfkit.readers.trace_text.LARGEST_TRACE", 2**20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 2**22))
    with pytest.raises(ValueError, match=r"unpacks to more than 1\.05 MB"):
        read_kineto(tmp_path / "bomb.gz")


NODE: dict[str, Any] = {
    "id": 2,
    "name": "aten::mm",
    "rf_id": 1,
    "parent": 1,
    "tid": 1,
    "inputs": [],
    "input_shapes": [],
    "input_types": [],
    "outputs": [],
    "output_shapes": [],
    "output_types": [],
}


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([NODE, NODE], "node 2 twice"),
        ([{**NODE, "id": "two"}], "must be whole"),
        ([{**NODE, "inputs": [1]}], "do not match"),
        ([5], "must be an object"),
        ([{"id": 1}], "inputs"),
        ([], "no schema or no nodes"),
    ],
)
def test_nodes_that_cannot_be_are_named(tmp_path: Path, nodes: list[Any], reason: str) -> None:
    path = tmp_path / "et.json"
    path.write_text(json.dumps({"schema": "1.0.1", "nodes": nodes}), encoding="utf-8")
    with pytest.raises(ValueError, match=reason):
        read_execution(path)
