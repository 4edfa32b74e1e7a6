"""What enters from outside: objects of other types, files with too much in them, long texts."""

import gzip
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest

import perfkit as pk
from perfkit import fitting, plots
from perfkit.calibration.fit import fit_platform
from perfkit.ground.files import check_values, find_reference, reading
from perfkit.measure.folders import LARGEST_KEPT, Campaign
from perfkit.models import embedding
from perfkit.readers.execution_trace import read_execution
from perfkit.readers.nccl import parse_nccl_tests, read_nccl_tests
from perfkit.workloads.dlrm import list_local_tables
from tests.fuzz.entries_numbers import FORMS, OBJECTS, TAKERS, Example
from tests.refusals import Refusal

TABLE = pk.EmbeddingTable(1000, 16)


#: Half of the calls that take objects; fuzzers draw from all.
FIRST_TAKER = len(TAKERS) // 2
CALLS = {f"{number}-form": call for number, call in enumerate(FORMS)}
CALLS |= {f"{number}-taker": call for number, call in enumerate(TAKERS) if number >= FIRST_TAKER}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_objects_of_other_types_are_taken_or_refused_in_a_line(call: Example) -> None:
    for name in call.arguments:
        for odd in OBJECTS:
            if name == "measurements" and odd is None:  # it would measure
                continue
            try:
                call(**{name: odd})
            except (ValueError, OSError) as error:
                assert 0 < len(str(error)) <= 1000, (name, odd)
                assert str(error).isprintable(), (name, odd)


ROW_WISE = pk.Placement("row_wise", (0, 1))
TWO_STRATEGIES = pk.Strategy.stack([pk.Strategy(tp=2), pk.Strategy(dp=8)])
REFUSALS = [
    Refusal(
        pk.Estimate,
        {"time": 1.0, "spread": 0.1, "terms": None, "formula": "a"},
        "terms is None; it must be a mapping",
    ),
    Refusal(ROW_WISE.cut, {"table": 5}, "table is 5; it must be"),
    Refusal(pk.Plan(2, (0, 1)).cut, {"tables": 5}, "tables is 5; it must be a sequence"),
    Refusal(
        pk.Plan(2, (0, 1)).to_torchrec, {"tables": None}, "tables is None; it must be a sequence"
    ),
    Refusal(ROW_WISE.cut, {"table": TABLE, "number": float("nan")}, "number is nan"),
    Refusal(pk.Strategy.stack, {"strategies": []}, "strategies is empty"),
    Refusal(TWO_STRATEGIES.select, {"index": 5}, "index is 5; it must be positions below 2"),
    Refusal(pk.Strategy(tp=2).select, {"index": [0]}, "this is a single strategy"),
    Refusal(pk.calibrate, {"measurements": b"x", "progress": False}, "measurements is b'x'"),
    Refusal(pk.load_platform("zen5-2").share_caches, {"ranks": -1}, "ranks is -1"),
    Refusal(
        pk.Estimate,
        {"time": 1e300, "spread": 50.0, "terms": {}, "formula": "a"},
        "a takes inf s",
    ),
    Refusal(plots.plan_bars, {"frame": [{}], "time": 1.0, "capacity": 1e9}, "it must have a rank"),
    Refusal(
        fitting.fit_collective,
        {"nbytes": [1.0, 2.0, 3.0], "seconds": [1.0, 2.0]},
        r"nbytes has the shape \(3,\), seconds has 2 times",
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=[case.message for case in REFUSALS])
def test_public_methods_name_the_argument(case: Refusal) -> None:
    with pytest.raises(ValueError, match=case.message):
        case.call()


def test_a_single_strategy_may_have_small_shards() -> None:
    assert pk.Strategy(dp=1048576, zero=1, shards=np.int8(4)).shards == 4


# Files.


@contextmanager
def refused(words: str) -> Iterator[None]:
    """Assert that what is done here is refused in one printable line."""
    with pytest.raises(ValueError, match=words) as caught:
        yield
    message = str(caught.value)
    assert len(message) < 400
    assert message.isprintable()


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("form", ["{} = 1", "[{}]\n", "x = {{{} = 1}}"])
@pytest.mark.parametrize("key", ["a", '"a b"', "'a'"])
def test_names_with_many_dots_are_refused_before_they_are_read(
    key: str, form: str, tmp_path: Path
) -> None:
    many_dots = ".".join([key] * 20_000)
    path = write(tmp_path / "d.toml", form.format(many_dots))
    with refused("a few dots at most"):
        pk.load_platform(path)


def test_files_with_too_much_in_them_are_refused_before_they_are_read(tmp_path: Path) -> None:
    many_rows = write(tmp_path / "a.csv", "rows,dim\n" + "10,4\n" * 300_000)
    with refused("more than 200,000 tables"):
        pk.read_tables(many_rows)
    many_columns = write(tmp_path / "b.csv", "rows,dim" + ",a" * 3_000)
    with refused("has 3002 columns"):
        pk.read_tables(many_columns)
    many_records = write(tmp_path / "a.json", json.dumps([{"rows": 10, "dim": 4}] * 200_001))
    with refused("more than 200,000 tables"):
        pk.read_tables(many_records)
    many_lists = write(tmp_path / "b.json", "[" + "[]," * 1_500_000 + "[]]")
    with refused("holds 3000002 lists and values"):
        pk.read_tables(many_lists)
    frame = pl.DataFrame({"rows": np.full(300_000, 10), "dim": np.full(300_000, 4)})
    frame.write_parquet(tmp_path / "a.parquet")
    with refused("more than 200,000 tables"):
        pk.read_tables(tmp_path / "a.parquet")


@pytest.mark.parametrize("event", ["[],", "{},"])
def test_traces_with_too_much_in_them_are_refused_before_they_are_read(
    event: str, tmp_path: Path
) -> None:
    text = f'{{"traceEvents": [{event * 1_500_000}[]]}}'
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text.encode(), 1))
    with refused("lists and values in"):
        pk.read_trace(path)
    with refused("lists and values in"):
        read_execution(path)


def test_files_of_usual_density_pass() -> None:
    check_values(json.dumps([{"rows": 10, "dim": 4, "pooling": 1.0}] * 10_000), "it")
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.5, "dur": 2.5, "args": {"a": 1}}
    check_values(json.dumps([event] * 200_000), "it")
    for name in ("h100-sxm-8", "a100-sxm-efa-8x8"):
        pk.load_platform(name)


def test_many_heavy_hitters_are_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "T": 1000,
        "E": 10**6,
        "D": 64,
        "batch_params": {"B": 512},
        "indices_params": {"heavy_hitters": [1e-6] * 30_000, "zipf_q": 2.5, "zipf_s": 1.15},
        "pooling_params": {"L": 13},
    }
    path = write(tmp_path / "a.json", json.dumps(config))
    with refused("heavy_hitters has 30000 entries for each of 1000 tables"):
        pk.read_tables(path)
    config["indices_params"]["heavy_hitters"] = [1e-4] * 30
    write(path, json.dumps(config))
    assert len(pk.read_tables(path).tables) == 1000


def test_a_folder_of_logs_is_not_the_whole_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfkit.readers.log_text._MOST_FILES", 5)
    for number in range(6):
        (tmp_path / f"{number}.txt").touch()
    with refused("holds more than 5 files"):
        read_nccl_tests(tmp_path)
    with refused("holds more than 5 files"):
        pk.read_training_logs(tmp_path)


def test_a_kept_campaign_that_is_too_large_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with path.open("wb") as file:
        file.truncate(LARGEST_KEPT + 1)
    with pytest.warns(UserWarning, match="its measurements are repeated"):
        assert Campaign(path, progress=False).done == {}
    path.write_text("[" * 3000 + "\n", encoding="utf-8")
    with pytest.warns(UserWarning, match="damaged"):
        assert Campaign(path, progress=False).done == {}


def test_execution_traces_name_the_node_with_an_odd_type(tmp_path: Path) -> None:
    sides = {
        "inputs": [1],
        "input_shapes": [[]],
        "input_types": [5],
        "outputs": [],
        "output_shapes": [],
        "output_types": [],
    }
    node = {"id": 2, "rf_id": 1, "tid": 1, "name": "aten::add", **sides}
    path = write(tmp_path / "a.json", json.dumps({"schema": "1.0.1", "nodes": [node]}))
    with refused("node 2 has inputs of types"):
        read_execution(path)


def test_measurements_name_the_field_that_is_no_number() -> None:
    path = find_reference("measured", "zen5-2.measurements.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    for key, value in (("ranks", "two"), ("ranks", None), ("ranks_per_node", "x")):
        with refused(f"{key} is"):
            fit_platform(data | {key: value})


# Words.


def test_long_arguments_are_shortened_before_they_are_walked_through() -> None:
    with refused("columns range"):
        pk.Placement("row_wise", (0,), range(10**9))  # type: ignore[arg-type]
    with refused("is on 1000000000 ranks"):
        pk.Placement("row_wise", range(10**9))  # type: ignore[arg-type]
    with refused("must be on one rank"):
        pk.Placement("table_wise", range(10**5))  # type: ignore[arg-type]
    zen = pk.load_platform("zen5-2")
    with refused("and .* others; calibrate"):
        zen.kernel_time("convolution", {"flops": 1.0})


def test_the_terminal_is_not_turned_round(tmp_path: Path) -> None:
    path = write(tmp_path / "\u202egnp.txt", "nothing")
    with refused("u202e"):
        read_nccl_tests(path)
    with refused("u202e"):
        pk.read_tables(tmp_path / "\u202egnp.csv")
    with refused("u202e"):
        pk.load_platform(str(tmp_path / "\u202egnp.toml"))


# Growth.


def test_many_ranks_share_what_they_have_in_common() -> None:
    tables = tuple(pk.EmbeddingTable(1000, 16) for _ in range(26))
    held = list_local_tables(pk.Plan.round_robin(26, ranks=4096), tables)
    assert len({id(rank.widths) for rank in held}) == 1
    plan = pk.Plan.round_robin(1000, ranks=4)
    read = pk.Plan.from_json(plan.to_json())
    assert read == plan
    row_wise = pk.Plan(2, (pk.Placement("row_wise", (0, 1)),) * 1000)
    assert len({id(owner) for owner in pk.Plan.from_json(row_wise.to_json()).owners}) == 1


@pytest.mark.filterwarnings("ignore")
def test_predictions_are_the_same_where_numpy_raises() -> None:
    model = pk.DLRM(rows=[10**7] * 8, dim=64, batch=2048, exponent=1.1, pooling=20)
    plain = pk.predict(model, "h100-sxm-8", ranks=2).time
    embedding._keep_sizes.cache_clear()
    with np.errstate(all="raise"):
        assert pk.predict(model, "h100-sxm-8", ranks=2).time == plain


@pytest.mark.filterwarnings("ignore")
def test_plans_are_the_same_where_numpy_raises() -> None:
    model = pk.DLRM(rows=[10**5] * 6, dim=32, pooling=5, exponent=1.05, batch=1024)
    plain = pk.shard(model, "h100-sxm-8", ranks=4, steps=50).plan
    with np.errstate(all="raise"):
        assert pk.shard(model, "h100-sxm-8", ranks=4, steps=50).plan == plain


def test_a_product_with_one_column_is_not_slowed_down() -> None:
    l40s = pk.load_platform("l40s-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_column = l40s.gemm(20000, 1, 4096, dtype="bf16").time
        eight_columns = l40s.gemm(20000, 8, 4096, dtype="bf16").time
        one_row = l40s.gemm(1, 20001, 4096, dtype="bf16").time
    assert one_column <= eight_columns
    assert one_row <= l40s.gemm(8, 20008, 4096, dtype="bf16").time
    with pytest.warns(pk.ExtrapolationWarning, match="pad these sizes"):
        assert l40s.gemm(20000, 129, 4096, dtype="bf16").time > one_column


class FileReader(NamedTuple):
    """A function that takes the name or the text of a file, and the argument its errors name."""

    read: Callable[[Any], Any]
    argument: str


def calibrate_with_logs(value: Any) -> pk.Platform:
    return pk.calibrate(nccl_logs=value, base="h100-sxm-8")


def calibrate_with_traces(value: Any) -> pk.Platform:
    return pk.calibrate(traces=value, base="h100-sxm-8")


def calibrate_with_measurements(value: Any) -> pk.Platform:
    return pk.calibrate(measurements=value)


FILE_READERS = {
    "logs": FileReader(calibrate_with_logs, "nccl_logs"),
    "traces": FileReader(calibrate_with_traces, "traces"),
    "trace": FileReader(pk.read_trace, "paths"),
    "measurements": FileReader(calibrate_with_measurements, "measurements"),
    "platform": FileReader(pk.Platform.load, "path"),
    "plan": FileReader(pk.Plan.load, "path"),
    "comparison": FileReader(pk.Comparison.load, "path"),
    "tables": FileReader(pk.read_tables, "source"),
    "text of a platform": FileReader(pk.Platform.from_toml, "text"),
    "text of a log": FileReader(parse_nccl_tests, "text"),
}


@pytest.mark.parametrize("value", [4, 1.5, b"x", {3}, range(10**12)], ids=str)
@pytest.mark.parametrize("reader", FILE_READERS.values(), ids=FILE_READERS)
def test_what_is_no_name_of_a_file_is_refused_with_its_argument(
    reader: FileReader, value: Any
) -> None:
    with pytest.raises(
        ValueError, match=r"; (it must be|or) the (name|text|content) of a"
    ) as caught:
        reader.read(value)
    beginning = rf"{reader.argument} is {re.escape(repr(value))}|{reader.argument}\[0\] is 0"
    assert re.match(beginning, str(caught.value)), caught.value


@pytest.mark.parametrize("value", ["", "a\0b"])
def test_names_that_no_file_has_are_refused(value: str) -> None:
    for read in (pk.read_trace, pk.Plan.load, pk.Platform.load, pk.Comparison.load):
        with pytest.raises(ValueError, match=r"it is empty; name a file|no name of a file holds"):
            read(value)


MANY = range(10**12)
SWEPT = {"platform": "h100-sxm-8", "progress": False}
#: Calls with a sequence of a trillion values, and what is said; each ends at once.
TOO_MANY = {
    "rows of tables": Refusal(pk.DLRM, {"rows": MANY}, "rows has .* values; .* at most 1,000,000"),
    "lookups": Refusal(
        pk.DLRM, {"rows": [9, 9], "pooling": MANY}, "pooling has .* at most 1,000,000"
    ),
    "layers": Refusal(pk.DLRM, {"bottom": MANY}, "bottom has .* values; .* at most 10,000"),
    "owners": Refusal(
        pk.Plan, {"ranks": 1, "owners": MANY}, "owners has .* values; .* at most 10,000,000"
    ),
    "owners of a sequence": Refusal(
        pk.Plan.from_owners, {"owners": MANY, "ranks": 1}, "owners has .* values"
    ),
    "names": Refusal(pk.Plan, {"ranks": 1, "owners": (0,), "names": MANY}, "names has .* values"),
    "ranks of a shard": Refusal(
        pk.Placement, {"kind": "row_wise", "ranks": MANY}, "may be on at most 1048576"
    ),
    "tables": Refusal(pk.TableSet, {"tables": MANY, "batch": 4}, "tables has .* values"),
    "strategies": Refusal(pk.Strategy.stack, {"strategies": MANY}, "strategies has .* values"),
    "ranks": Refusal(
        pk.scaling,
        {"workload": pk.DLRM(), "platform": "h100-sxm-8", "ranks": MANY},
        "ranks has .* values",
    ),
    "points": Refusal(
        fitting.fit_collective, {"nbytes": MANY, "seconds": MANY}, "range has .* values"
    ),
    "sizes": Refusal(
        pk.load_platform("h100-sxm-8").kernel_time,
        {"kind": "gemm", "features": {"flops": MANY}},
        "the range has .* values",
    ),
    "configurations": Refusal(
        pk.sweep,
        {"workload": pk.DLRM, "grid": {"batch": MANY}, **SWEPT},
        r"grid\['batch'\] has .* values",
    ),
    "products of configurations": Refusal(
        pk.sweep,
        {
            "workload": pk.Transformer.bert,
            "grid": {"batch": range(1, 10**6), "sequence": range(1, 10**6)},
            **SWEPT,
        },
        "grid has 999,999 × 999,999 configurations, .* at most 10,000,000",
    ),
    "configurations without an end": Refusal(
        pk.sweep,
        {"workload": pk.DLRM, "grid": {"batch": count(1)}, **SWEPT},
        r"grid\['batch'\] does not end",
    ),
    "more than an index": Refusal(
        pk.Plan, {"ranks": 1, "owners": range(10**20)}, "owners has more than 9,223,"
    ),
}


@pytest.mark.parametrize("case", TOO_MANY.values(), ids=TOO_MANY)
def test_a_sequence_of_too_many_values_is_refused_by_its_count(case: Refusal) -> None:
    with pytest.raises(ValueError, match=case.message) as caught:
        case.call()
    assert len(str(caught.value)) < 200


def test_long_sequences_that_are_usual_are_taken() -> None:
    assert len(pk.Plan(4, [0, 1, 2, 3] * 50_000).owners) == 200_000  # type: ignore[arg-type]
    assert len(pk.DLRM(rows=range(100, 2100)).tables) == 2_000


@pytest.mark.parametrize("mark", [";", "\t", "|", " ; "])
def test_other_separators_of_tables_are_named(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"rows{mark}dim\n10{mark}4\n")
    with pytest.raises(ValueError, match=r"a\.csv separates its columns by '.*'; separate values"):
        pk.read_tables(path)


def test_a_document_on_each_line_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5, "dur": 8}
    path.write_text("\n".join([json.dumps(event)] * 3))
    with pytest.raises(ValueError, match="a second document begins after character"):
        pk.read_trace(path)


def test_commas_inside_of_numbers_of_a_log_are_told() -> None:
    row = "1048576 262144 float sum -1 10,49 100,00 175,00 0 10,49 100,00 175,00 0"
    with pytest.raises(ValueError, match="its figures have decimal commas; run the test with LC_A"):
        parse_nccl_tests(row)
    # a part of a number is no size
    grouped = row.replace("1048576", "1,048,576").replace(",49", ".49").replace(",00", ".00")
    with pytest.raises(ValueError, match="1,048,576 262144"):
        parse_nccl_tests(grouped)


def test_a_mistake_in_the_code_of_a_reader_is_not_told_as_a_fault_of_the_file() -> None:
    with pytest.raises(NameError, match="never_defined"), reading("p.toml", "mend it"):
        never_defined()  # type: ignore[name-defined]  # noqa: F821


def test_a_name_of_the_gallery_is_no_path_and_the_error_names_who_takes_it() -> None:
    with pytest.raises(ValueError, match=r"`load_platform` takes names of the gallery"):
        pk.Platform.load("h100-sxm-8")
