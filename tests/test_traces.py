"""Results of a trace: shares equal to HolisticTraceAnalysis, collectives over ranks, idle time and
its causes."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfkit as pk
from perfkit.__main__ import main
from perfkit.calibration.activity import ROLES, account
from perfkit.calibration.places import classify
from perfkit.ground.files import find_reference
from perfkit.readers.trace_names import DEVICE
from tests import samples

#: Busy, computing [% of the device span] and hidden communication [% of it] by rank:
#: HolisticTraceAnalysis (traceinsight 0.6.1, get_temporal_breakdown, get_comm_comp_overlap;
#: HTA_DISABLE_NS_ROUNDING=1, last step included).
HTA = {
    "megatron_tp8_a100x8": (
        (62.62, 98.81, 89.21, 96.76, 99.47, 98.73, 65.57, 98.24),
        (22.07, 21.25, 21.52, 21.22, 20.91, 20.86, 22.03, 21.15),
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ),
    "dlrm_v100x8_param": (
        (50.66, 65.72, 37.92, 56.80, 46.43, 44.36, 38.20, 24.25),
        (7.95, 6.65, 9.41, 6.58, 6.79, 6.35, 9.21, 9.66),
        (4.50, 2.47, 7.88, 3.31, 0.56, 0.64, 7.56, 9.51),
    ),
}


LEVELS = {"stage", "module", "submodule", "compute"}


def list_ranks(folder: Path, name: str, kind: str = "kineto") -> list[Path]:
    """Files of all ranks of a public trace."""
    return [folder / "traces" / name / f"{kind}_rank{rank}.json.gz" for rank in range(8)]


# -- samples: what is said of a step can be worked out
# --------------------------------------------------------------------------------------------------

#: Traces of both ranks of a step, see `tests/data/README.md`.
STEP = [samples.FOLDER / f"step_rank{rank}.kineto.json" for rank in range(2)]
EXECUTION = [samples.FOLDER / f"step_rank{rank}.et.json" for rank in range(2)]


def test_who_comes_first_to_a_collective_waits_for_the_other() -> None:
    """Ranks begin at 500 and 600 µs of a step, and both end at 700."""
    met = pk.read_trace(STEP).collectives().filter(iteration=1)
    assert met["operation"].to_list() == ["all_reduce", "all_reduce"]
    assert met["nbytes"].to_list() == [4 * 528, 4 * 528]
    assert met["matched"].to_list() == [2, 2]
    assert met["time_s"].to_list() == pytest.approx([200e-6, 100e-6])
    assert met["transfer_s"].to_list() == pytest.approx([100e-6, 100e-6])
    assert met["waiting_s"].to_list() == pytest.approx([100e-6, 0.0])


def test_a_step_lasts_from_kernels_to_the_same_kernels_of_the_next() -> None:
    trace = pk.read_trace(STEP)
    assert trace.basis == "kernels"
    assert trace.time == pytest.approx(1e-3)
    for row in trace.idle().drop("rank").rows():
        assert sum(row) == pytest.approx(1e-3)
    assert trace.breakdown()["time_s"].sum() == pytest.approx(1e-3)


def test_kernels_have_the_phase_of_the_operation_that_launched_them() -> None:
    """Of rank 1, the last one: each kernel takes what `tests/samples.py` says."""
    parts = {}
    for row in pk.read_trace(STEP).breakdown().to_dicts():
        parts[row["phase"], row["kind"]] = row["time_s"]
    assert parts["forward", "gemm"] == pytest.approx(100e-6)
    assert parts["forward", "elementwise"] == pytest.approx(20e-6)
    assert parts["backward", "gemm"] == pytest.approx(400e-6)
    assert parts["backward", "collective"] == pytest.approx(100e-6)
    assert parts["update", "elementwise"] == pytest.approx(30e-6)


def test_what_was_launched_before_the_recording_is_said() -> None:
    said = [text for text in pk.read_trace(STEP).warnings if "no event of the host" in text]
    assert [text.partition(":")[0] for text in said] == [path.name for path in STEP]


def test_an_execution_trace_changes_no_time() -> None:
    alone = pk.read_trace(STEP)
    both = pk.read_trace([*STEP, *EXECUTION])
    assert both.time == alone.time
    assert both.breakdown().equals(alone.breakdown())
    assert both.collectives().equals(alone.collectives())


def test_a_recorded_step_of_a_cpu_has_its_products() -> None:
    """Two layers: a product of each forward, and two of each backward but for the gradient of the
    input."""
    trace = pk.read_trace(samples.FOLDER / "cpu_step.kineto.json.gz")
    counts = {}
    for row in trace.breakdown().filter(kind="gemm").to_dicts():
        counts[row["phase"]] = row["operations"]
    assert counts == {"forward": 2, "backward": 3}
    assert trace.breakdown()["time_s"].sum() == pytest.approx(trace.time)


# -- traces of other people
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HTA)
def test_shares_are_those_of_holistic_trace_analysis(shared_data: Path, name: str) -> None:
    for path, busy, computing, hidden in zip(
        list_ranks(shared_data, name), *HTA[name], strict=True
    ):
        # alone, a rank's waits belong to its communication
        trace = pk.read_trace(path, basis="device span")
        (row,) = trace.idle().to_dicts()
        idle = sum(row[f"{cause}_s"] for cause in ("host", "synchronisation", "loading", "queued"))
        shares = (
            1 - idle / trace.time,
            row["busy_s"] / trace.time,
            row["communication_s"] / trace.time,
        )
        assert row["waiting_s"] is None
        assert trace.collectives()["transfer_s"].null_count() == len(trace.collectives())
        exposed = (1 - hidden / 100) * trace.collectives()["time_s"].sum() / trace.time
        assert np.array(shares) == pytest.approx([busy / 100, computing / 100, exposed], abs=0.005)


def test_what_was_launched_before_the_recording_began_counts(shared_data: Path) -> None:
    """HolisticTraceAnalysis leaves out these 614 events: it has 69.1 % computing, the device had
    73.6 %."""
    trace = pk.read_trace(
        shared_data / "traces" / "rec_v100x2_rank1_hta.json.gz", basis="device span"
    )
    lost = pl.col("cat").is_in(DEVICE) & (pl.col("index_correlation") < 0)
    events = trace.files[0].events.with_columns(
        cat=pl.when(lost).then(pl.lit("lost")).otherwise("cat")
    )
    assert (events["cat"] == "lost").sum() == 614
    known = dataclasses.replace(trace, files=(dataclasses.replace(trace.files[0], events=events),))
    for each, share in ((trace, 0.736), (known, 0.691)):
        assert each.idle()["busy_s"].item() / each.time == pytest.approx(share, abs=0.002)


def test_megatron_waits_and_transfers_are_told_apart(shared_data: Path) -> None:
    trace = pk.read_trace(list_ranks(shared_data, "megatron_tp8_a100x8"))
    # 81 of a micro-batch of 4 x 2048 tokens x 4096 fp16
    large = trace.collectives().filter(nbytes=64 * 2**20)
    assert len(large) == 81 * 8
    assert set(large["operation"]) == {"all_reduce"}
    assert set(large["matched"]) == {8}
    assert large["transfer_s"].median() * 1e6 == pytest.approx(599, rel=0.01)
    assert (large.group_by("order").agg(pl.min("waiting_s"))["waiting_s"] == 0).all()
    assert trace.time == pytest.approx(0.60648, rel=1e-3)
    assert trace.basis == "host step"
    late = trace.stragglers()
    assert len(late) == 84
    assert late["rank"].is_in([0, 6]).mean() > 0.6
    assert late["late_s"].max() < late["waited_s"][0]
    assert late["waited_s"].sum() == pytest.approx(trace.collectives()["waiting_s"].sum())
    ranks = trace.stragglers(by="rank")
    assert ranks["rank"].to_list()[:2] == [0, 6]
    assert ranks["last"].sum() == len(late)
    assert len(ranks) == 8
    for name in ("late_s", "waited_s"):
        assert ranks[name].sum() == pytest.approx(late[name].sum())
    with pytest.raises(ValueError, match="by is 'order'; known are collective, rank"):
        trace.stragglers("order")
    slow = trace.idle().filter(pl.col("host_s") > 0.1)
    assert slow["rank"].to_list() == [0, 6]
    assert (slow["waiting_s"] < 0.6 * trace.idle()["waiting_s"].median()).all()


def test_dlrm_collectives_have_sizes_and_splits(shared_data: Path) -> None:
    name = "dlrm_v100x8_param"
    trace = pk.read_trace([*list_ranks(shared_data, name), *list_ranks(shared_data, name, "et")])
    met = trace.collectives()
    assert met.group_by("operation").len().sort("operation").rows() == [
        ("all_reduce", 24),
        ("all_to_all", 40),
    ]
    reduced = (
        met.filter(operation="all_reduce")
        .group_by("order", maintain_order=True)
        .agg(pl.col("nbytes").unique())
    )
    assert [sizes for _, sizes in reduced.rows()] == [[4 * n] for n in (394241, 112, 226960)]
    exchanged = met.filter(operation="all_to_all")
    assert exchanged["nbytes"].null_count() == 0
    assert set(met["matched"]) == {8}
    uneven = exchanged.filter(pl.col("sent").list.len() > 0)
    assert len(uneven) == 4 * 8  # of five, that of the splits themselves is even
    itemsize = uneven["dtype"].replace_strict({"float": 4, "int": 4})
    assert (uneven["sent"].list.sum() * itemsize == uneven["nbytes"]).all()
    assert uneven.filter(rank=0, order=3)["sent"][0].to_list() == [
        96,
        224,
        288,
        1664,
        592,
        96,
        192,
        240,
    ]
    for order in uneven["order"].unique():  # what one sends to another, the other receives from it
        sent = np.array(uneven.filter(order=order)["sent"].to_list())
        received = np.array(uneven.filter(order=order)["received"].to_list())
        assert (sent == received.T).all()
    # two ranks were still updating when the recording began
    early = [note for note in trace.warnings if "no event of the host launched them" in note]
    assert [note.split(":")[0] for note in early] == [
        "kineto_rank1.json.gz",
        "kineto_rank3.json.gz",
    ]
    assert trace.explain().count("note:") == 3
    assert trace.time == pytest.approx(16.0e-3, rel=0.01)


@pytest.mark.parametrize(
    ("name", "time", "largest", "modules"),
    [
        ("resnet50_v100x1_workers0", 0.152, ("", "loading"), {""}),
        (
            "rec_v100x2_rank1_hta",
            0.1175,
            ("backward", "gemm"),
            {"forward:over_arch", "forward:bottom_mlp", ""},
        ),
        ("resnet_a100x2_rank0_ncclmeta_hta", 0.2212, ("", "host"), {"DistributedDataParallel", ""}),
        ("gaunernst_bert-small-uncased_h100", 0.004426, ("", "host"), {"BertLMHeadModel_0"}),
    ],
)
def test_parts_sum_to_the_time(
    shared_data: Path, name: str, time: float, largest: Any, modules: set[str]
) -> None:
    trace = pk.read_trace(shared_data / "traces" / f"{name}.json.gz")
    assert trace.time == pytest.approx(time, rel=0.01)
    parts = trace.breakdown()
    assert largest in parts.select("phase", "kind").rows()[:2]
    whole = pytest.approx(trace.time, rel=1e-9)
    assert parts["time_s"].sum() == whole
    assert trace.idle().drop("rank").sum_horizontal().item() == whole
    found = trace.modules(1)
    assert modules <= set(found["module"])
    assert (
        found.select("other_s", "forward_s", "backward_s", "update_s").sum().sum_horizontal().item()
        == whole
    )
    spans = trace.timeline("stage")
    assert (spans["end_s"] >= spans["start_s"]).all()
    assert spans["end_s"].max() <= 1.05 * trace.time
    steps = trace.steps()
    assert len(steps) < 3 or "profiler starts" in steps["reason"][0]
    # backward kernels belong to forward's modules
    if modules == {"forward:over_arch", "forward:bottom_mlp", ""}:
        assert found.filter(module="forward:over_arch")["backward_s"].item() > 0.03


SPANS = st.lists(
    st.tuples(st.sampled_from(ROLES), st.integers(0, 60), st.integers(1, 25)), max_size=9
)


@given(SPANS, st.integers(0, 20), st.integers(1, 60))
def test_accounts_are_those_of_every_nanosecond(spans: Any, begin: int, length: int) -> None:
    rows = sorted(
        ((role, start, start + time) for role, start, time in spans), key=lambda row: row[1]
    )
    kinds = {"role": pl.String, "start": pl.Int64, "end": pl.Int64}
    own = account(pl.DataFrame(rows, kinds, orient="row"), begin, begin + length)
    expected = np.zeros(len(rows), dtype=int)
    for now in range(begin, begin + length):
        running = [number for number, (_, start, end) in enumerate(rows) if start <= now < end]
        for number in sorted(running, key=lambda number: (ROLES.index(rows[number][0]), number))[
            :1
        ]:
            expected[number] += 1
    assert own.tolist() == expected.tolist()


def test_a_step_of_a_cpu_is_told_in_its_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step of notebook 10 has the products of two layers of a Transformer and a head."""
    path = find_reference("measured", "xeon-2.step.json.gz")
    trace = pk.read_trace(path)
    parts = {(row["phase"], row["kind"]): row for row in trace.breakdown().to_dicts()}
    counts = {
        ("forward", "gemm"): 9,
        ("backward", "gemm"): 18,
        ("forward", "attention"): 2,
        ("backward", "attention"): 2,
    }
    assert {key: parts[key]["operations"] for key in counts} == counts
    assert (
        parts["update", "elementwise"]["time_s"]
        > 0.1 * trace.time
        > parts["", "host"]["time_s"]
        > 0
    )
    modules = {row["module"]: row for row in trace.modules(2).to_dicts()}
    assert list(modules) == [
        "Reader_0.Embedding_0",
        "Reader_0.TransformerEncoder_0",
        "Reader_0.Linear_4",
        "",
    ]
    # nodes of autograd too
    assert all(row["forward_s"] < row["backward_s"] for name, row in modules.items() if name)
    assert modules[""]["update_s"] > 0
    assert set(trace.timeline("stage")["phase"]) == {
        "forward",
        "backward",
        "update",
    }
    slower = pk.compare(trace, dataclasses.replace(trace, basis="host span"))
    assert slower["difference_s"].sum() == pytest.approx(trace.time - slower["other_s"].sum())
    predicted = pk.predict(pk.Transformer.bert("bert-base", batch=1, sequence=64), "zen5-2")
    table = trace.compare(predicted)
    assert table["difference_s"].sum() == pytest.approx(trace.time - predicted.time)
    assert table["difference_s"].abs().is_sorted(descending=True)
    assert table.filter(phase="forward", kind="gemm")["says"].item() == "the number of operations"
    lanes = trace.chart("timeline").layer[0].data.values
    assert {row["lane"] for row in lanes} == {f"rank 0 · {level}" for level in LEVELS}
    # each module has a bar of its own
    assert len([row for row in lanes if row["lane"].endswith(" submodule")]) > 6
    report, data = tmp_path / "report.html", tmp_path / "data.json"
    assert main(["trace", str(path), "--report", str(report), "--json", str(data)]) == 0
    assert repr(trace) in capsys.readouterr().out
    assert json.loads(data.read_text())["time_s"] == trace.time
    page = report.read_text(encoding="utf-8")
    assert page.count("<figure>") == 4
    assert "Ranks" in page
    assert repr(trace) in page
    assert trace.warnings
    assert all(text in page for text in trace.warnings)


def write_rank(folder: Path, rank: int, late: int, group: str = "") -> str:
    """A step of 100 µs: two kernels around a collective of 8 µs, for which ranks wait until the
    last is ready."""
    about = (
        {"Collective name": "allreduce", "Process Group Ranks": group, "Group size": 2}
        if group
        else {}
    )
    rows = [("user_annotation", "ProfilerStep#1", 0, 100, {}), ("cpu_op", "aten::mm", 1, 6, {})]
    rows += [("cuda_runtime", "cudaLaunchKernel", 2, 2, {"correlation": 1})]
    rows += [("kernel", "gemm", 10 + late, 20, {"correlation": 1, "stream": 7})]
    rows += [
        (
            "kernel",
            "ncclDevKernel_AllReduce",
            30 + late,
            38 - late,
            {"correlation": 2, "stream": 9, **about},
        )
    ]
    rows += [("kernel", "gemm", 70, 10, {"correlation": 3, "stream": 7})]
    events = [
        {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 1,
            "tid": 1,
            "ts": ts,
            "dur": dur,
            "args": args,
        }
        for cat, name, ts, dur, args in rows
    ]
    path = folder / f"rank{rank}.json"
    path.write_text(
        json.dumps({"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events})
    )
    return str(path)


def test_casts_of_autocast_are_no_part_of_the_operation_that_they_are_for(tmp_path: Path) -> None:
    """Autocast casts the arguments of an operator and calls it again; both are named alike in a
    trace."""
    shapes = {
        "Input Dims": [[8, 16, 9, 9]],
        "Input type": ["float"],
        "Input Strides": [[1296, 81, 9, 1]],
    }
    rows = [
        ("user_annotation", "ProfilerStep#1", 0, 100, {}),
        ("cpu_op", "aten::conv2d", 1, 60, {}),
    ]
    rows += [("cpu_op", "aten::to", 2, 20, {}), ("cpu_op", "aten::_to_copy", 3, 18, {**shapes})]
    rows += [("cpu_op", "aten::conv2d", 30, 30, {}), ("cpu_op", "aten::convolution", 31, 28, {})]
    for number, (launched, name) in enumerate(((10, "cast"), (40, "fprop")), start=1):
        rows.append(("cuda_runtime", "cudaLaunchKernel", launched, 2, {"correlation": number}))
        rows.append(("kernel", name, launched + 4, 9, {"correlation": number, "stream": 7}))
    events = [
        {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 1,
            "tid": 1,
            "ts": ts,
            "dur": dur,
            "args": args,
        }
        for cat, name, ts, dur, args in rows
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = pk.read_trace(path)
    kinds = trace.breakdown().filter(phase="forward")["kind"].to_list()
    assert sorted(kinds) == ["convolution", "copy"]
    pytest.importorskip("torch", reason="graphs of traces need torch")
    with pytest.warns(UserWarning, match="1 of 2 operations of trace.json have no sizes"):
        graph = trace.graph()
    assert [label.name for label in graph.labels] == ["_to_copy", "aten::conv2d"]


def test_the_shortest_time_over_ranks_is_the_transfer(tmp_path: Path) -> None:
    paths = [write_rank(tmp_path, rank, late) for rank, late in enumerate((0, 30))]
    trace = pk.read_trace(paths, sizes={"nccl*AllReduce*": 1e6})
    rows = trace.idle().to_dicts()
    assert [1e6 * row["communication_s"] for row in rows] == pytest.approx([8, 8])
    assert [1e6 * row["waiting_s"] for row in rows] == pytest.approx([30, 0])
    assert [1e6 * row["queued_s"] for row in rows] == pytest.approx([6, 36])
    assert [1e6 * row["host_s"] for row in rows] == pytest.approx([26, 26])
    met = trace.collectives()
    assert met["waiting_s"].to_list() == pytest.approx([30e-6, 0])
    assert met["nbytes"].to_list() == [1e6, 1e6]
    overheads = {row["overhead"]: row["median_s"] for row in trace.host().filter(rank=0).to_dicts()}
    assert overheads["before_launch"] == pytest.approx(1e-6)
    assert overheads["after_launch"] == pytest.approx(3e-6)
    alone = pk.read_trace(paths[0])
    assert alone.collectives()["transfer_s"].to_list() == [None]
    assert "include waits" in alone.explain()
    assert alone.breakdown().filter(kind="collective")["time_s"].item() == pytest.approx(38e-6)
    apart = pk.read_trace(
        [write_rank(tmp_path, 0, 0, "[0, 2]"), write_rank(tmp_path, 1, 30, "[1, 3]")]
    )
    assert apart.collectives()["transfer_s"].null_count() == 2  # other groups


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Sequence number", "7"),
        ("Sequence number", None),
        ("Group size", float("nan")),
        ("Input Dims", [[10**200, 10**200, 10**200]]),
        ("Input Strides", [1]),
        ("Input type", [[1]]),
        ("dtype", 10**400),
        ("In msg nelems", [1]),
    ],
)
def test_arguments_that_lie_are_errors_in_words(tmp_path: Path, key: str, value: Any) -> None:
    rows = json.loads(Path(write_rank(tmp_path, 0, 0, "[0, 1]")).read_text())["traceEvents"]
    dims = {"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}
    for row in rows:
        row["args"] |= (dims if row["name"] == "aten::mm" else {}) | {key: value}
    (tmp_path / "lie.json").write_text(json.dumps({"traceEvents": rows}))
    trace = pk.read_trace(tmp_path / "lie.json")
    for view in (trace.collectives, trace.modules, trace.explain):
        _ask_or_be_told(view)
    pytest.importorskip("torch", reason="graphs of traces need torch")
    _ask_or_be_told(trace.graph)


def _ask_or_be_told(view: Callable[[], object]) -> None:
    try:
        view()
    except ValueError as error:
        assert str(error).startswith("arguments of the trace cannot be used")


def test_kernels_of_an_optimizer_in_their_name_are_lookups() -> None:
    """Lookups whose gradient is fused with Adagrad."""
    kinds = {
        "split_embedding_codegen_forward_unweighted_kernel": "embedding_forward",
        "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function": "embedding_forward",
        "split_embedding_codegen_grad_indice_weights_kernel": "embedding_backward",
        "split_embedding_backward_codegen_rowwise_adagrad_kernel": "embedding_backward",
    }
    assert {name: classify(name) for name in kinds} == kinds


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    path, host = write_rank(tmp_path, 0, 0), tmp_path / "nodes.json"
    host.write_text('{"schema": "1.0.1", "nodes": []}')
    apart = []
    for rank, hour in ((0, 0), (1, 2)):
        made = Path(write_rank(tmp_path, rank, 0))
        text = made.read_text().replace(
            '"traceEvents"',
            f'"baseTimeNanoseconds": {2**60 + 1 + hour * 3600 * 10**9}, "traceEvents"',
        )
        apart.append(made.rename(tmp_path / f"apart{rank}.json"))
        apart[-1].write_text(text)
    path = write_rank(tmp_path, 0, 0)
    cases: dict[str, Any] = {
        "must name at least one file": {"paths": []},
        "for each execution trace the Kineto": {"paths": [path, host, host]},
        "read one trace for each rank": {"paths": [path, path]},
        "2 h apart; read one trace": {"paths": apart},
        "with 1 execution traces .without times.": {"paths": host},
        "does not have; leave basis": {"paths": path, "basis": "kernels"},
        "known are kernels": {"paths": path, "basis": "gpu"},
        "No such file": {"paths": tmp_path / "none.json"},
        "progress is 'no'; it must be True or False": {"paths": path, "progress": "no"},
    }
    for message, given_ in cases.items():
        with pytest.raises(ValueError, match=message):
            pk.read_trace(**given_).steps()
