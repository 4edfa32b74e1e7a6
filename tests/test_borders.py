"""What enters from outside: objects of other types, files with too much in them, long texts."""

import gzip
import json
import re
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import perfkit as pk
from perfkit import fitting, plots
from perfkit.calibration.fit import fit_platform
from perfkit.ground.files import check_values, find_reference, reading
from perfkit.measure.folders import LARGEST_KEPT, Campaign
from perfkit.models import embedding
from perfkit.platform.platform import Platform
from perfkit.readers.execution_trace import read_execution
from perfkit.readers.nccl import parse_nccl_tests, read_nccl_tests
from perfkit.workloads.dlrm import list_local_tables
from tests.fuzz.entries_numbers import FORMS, OBJECTS, TAKERS, Example

TABLE = pk.EmbeddingTable(1000, 16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "call",
    [*FORMS, *TAKERS[len(TAKERS) // 2 :]],
    ids=[f"{i}-form" for i in range(len(FORMS))]
    + [f"{i}-taker" for i in range(len(TAKERS) // 2, len(TAKERS))],
)
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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pk.Estimate(1.0, 0.1, None, "a"), "terms is None; it must be a mapping"),  # type: ignore[arg-type]
        (lambda: pk.Placement("row_wise", (0, 1)).cut(5), "table is 5; it must be"),  # type: ignore[arg-type]
        (lambda: pk.Plan(2, (0, 1)).cut(5), "tables is 5; it must be a sequence"),  # type: ignore[arg-type]
        (lambda: pk.Plan(2, (0, 1)).to_torchrec(None), "tables is None; it must be a sequence"),  # type: ignore[arg-type]
        (lambda: pk.Placement("row_wise", (0, 1)).cut(TABLE, float("nan")), "number is nan"),  # type: ignore[arg-type]
        (lambda: pk.Strategy.stack([]), "strategies is empty"),
        (
            lambda: pk.Strategy.stack([pk.Strategy(tp=2), pk.Strategy(dp=8)]).select(5),
            "index is 5; it must be positions below 2",
        ),
        (lambda: pk.Strategy(tp=2).select([0]), "this is a single strategy"),
        (lambda: pk.calibrate(measurements=b"x", progress=False), "measurements is b'x'"),  # type: ignore[arg-type]
        (lambda: pk.load_platform("zen5-2").share_caches(-1), "ranks is -1"),
        (lambda: pk.Estimate(1e300, 50.0, {}, "a"), "a takes inf s"),
        (lambda: plots.plan_bars([{}], time=1.0, capacity=1e9), "it must have a rank"),
        (
            lambda: fitting.fit_collective([1.0, 2.0, 3.0], [1.0, 2.0]),
            r"nbytes has the shape \(3,\), seconds has 2 times",
        ),
    ],
)
def test_public_methods_name_the_argument(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_a_single_strategy_may_have_small_shards() -> None:
    assert pk.Strategy(dp=1048576, zero=1, shards=np.int8(4)).shards == 4


# Files.


def refused(call: Callable[[], Any], words: str) -> None:
    """Assert that a call is refused in one printable line."""
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_files_with_too_much_in_them_are_refused_before_they_are_read(tmp_path: Path) -> None:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    for key in ("a", '"a b"', "'a'"):
        for form in ("{} = 1", "[{}]\n", "x = {{{} = 1}}"):
            dotted = write("d.toml", form.format(".".join([key] * 20000)))
            refused(lambda path=dotted: pk.load_platform(path), "a few dots at most")  # type: ignore[misc]
    csv = write("a.csv", "rows,dim\n" + "10,4\n" * 300_000)
    refused(lambda: pk.read_tables(csv), "more than 200,000 tables")
    wide = write("b.csv", "rows,dim" + ",a" * 3_000)
    refused(lambda: pk.read_tables(wide), "has 3002 columns")
    several = write("a.json", json.dumps([{"rows": 10, "dim": 4}] * 200_001))
    refused(lambda: pk.read_tables(several), "more than 200,000 tables")
    lists = write("b.json", "[" + "[]," * 1_500_000 + "[]]")
    refused(lambda: pk.read_tables(lists), "holds 3000002 lists and values")
    rows = {"rows": np.full(300_000, 10), "dim": np.full(300_000, 4)}
    pl.DataFrame(rows).write_parquet(tmp_path / "a.parquet")
    refused(lambda: pk.read_tables(tmp_path / "a.parquet"), "more than 200,000 tables")
    packed = tmp_path / "t.json.gz"
    for made in ("[],", "{},"):
        content = f'{{"traceEvents": [{made * 1_500_000}[]]}}'
        packed.write_bytes(gzip.compress(content.encode(), 1))
        refused(lambda: pk.read_trace(packed), "lists and values in")
        refused(lambda: read_execution(packed), "lists and values in")


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
    path = tmp_path / "a.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    refused(lambda: pk.read_tables(path), "heavy_hitters has 30000 entries for each of 1000 tables")
    config["indices_params"]["heavy_hitters"] = [1e-4] * 30
    path.write_text(json.dumps(config), encoding="utf-8")
    assert len(pk.read_tables(path).tables) == 1000


def test_a_folder_of_logs_is_not_the_whole_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfkit.readers.nccl._MOST_FILES", 5)
    for number in range(6):
        (tmp_path / f"{number}.txt").touch()
    refused(lambda: read_nccl_tests(tmp_path), "holds more than 5 files")


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
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"schema": "1.0.1", "nodes": [node]}), encoding="utf-8")
    refused(lambda: read_execution(path), "node 2 has inputs of types")


def test_measurements_name_the_field_that_is_no_number() -> None:
    path = find_reference("measured", "zen5-2.measurements.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    for key, value in (("ranks", "two"), ("ranks", None), ("ranks_per_node", "x")):
        refused(lambda odd={key: value}: fit_platform(data | odd), f"{key} is")  # type: ignore[misc]


# Words.


def test_long_arguments_are_shortened_before_they_are_walked_through() -> None:
    refused(lambda: pk.Placement("row_wise", (0,), range(10**9)), "columns range")  # type: ignore[arg-type]
    refused(lambda: pk.Placement("row_wise", range(10**9)), "is on 1000000000 ranks")  # type: ignore[arg-type]
    refused(lambda: pk.Placement("table_wise", range(10**5)), "must be on one rank")  # type: ignore[arg-type]
    zen = pk.load_platform("zen5-2")
    refused(lambda: zen.kernel_time("convolution", {"flops": 1.0}), "and .* others; calibrate")


def test_the_terminal_is_not_turned_round(tmp_path: Path) -> None:
    path = tmp_path / "\u202egnp.txt"
    path.write_text("nothing", encoding="utf-8")
    refused(lambda: read_nccl_tests(path), "u202e")
    refused(lambda: pk.read_tables(tmp_path / "\u202egnp.csv"), "u202e")
    refused(lambda: pk.load_platform(str(tmp_path / "\u202egnp.toml")), "u202e")


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
        one, eight = (l40s.gemm(20000, n, 4096, dtype="bf16").time for n in (1, 8))
        row = l40s.gemm(1, 20001, 4096, dtype="bf16").time
    assert one <= eight
    assert row <= l40s.gemm(8, 20008, 4096, dtype="bf16").time
    with pytest.warns(pk.ExtrapolationWarning, match="pad these sizes"):
        assert l40s.gemm(20000, 129, 4096, dtype="bf16").time > one


#: What takes names of files, and the argument that its errors name.
NAMED_FILES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "logs": (lambda value: pk.calibrate(nccl_logs=value, base="h100-sxm-8"), "nccl_logs"),
    "traces": (lambda value: pk.calibrate(traces=value, base="h100-sxm-8"), "traces"),
    "trace": (pk.read_trace, "paths"),
    "measurements": (lambda value: pk.calibrate(measurements=value), "measurements"),
    "platform": (pk.Platform.load, "path"),
    "plan": (pk.Plan.load, "path"),
    "comparison": (pk.Comparison.load, "path"),
    "tables": (pk.read_tables, "source"),
    "text of a platform": (pk.Platform.from_toml, "text"),
    "text of a log": (parse_nccl_tests, "text"),
}


@pytest.mark.parametrize("value", [4, 1.5, b"x", {3}, range(10**12)], ids=str)
@pytest.mark.parametrize("reads", NAMED_FILES.values(), ids=[*NAMED_FILES])
def test_what_is_no_name_of_a_file_is_refused_with_its_argument(
    reads: tuple[Callable[[Any], Any], str], value: Any
) -> None:
    read, argument = reads
    with pytest.raises(
        ValueError, match=r"; (it must be|or) the (name|text|content) of a"
    ) as caught:
        read(value)
    first = rf"{argument} is {re.escape(repr(value))}|{argument}\[0\] is 0"
    assert re.match(first, str(caught.value)), caught.value


@pytest.mark.parametrize("value", ["", "a\0b"])
def test_names_that_no_file_has_are_refused(value: str) -> None:
    for read in (pk.read_trace, pk.Plan.load, pk.Platform.load, pk.Comparison.load):
        with pytest.raises(ValueError, match=r"it is empty; name a file|no name of a file holds"):
            read(value)


MANY = range(10**12)
#: Calls with a sequence of a trillion values, and what is said; each ends at once.
TOO_MANY: dict[str, tuple[Callable[[], Any], str]] = {
    "rows of tables": (lambda: pk.DLRM(rows=MANY), "rows has .* values; .* at most 1,000,000"),
    "lookups": (lambda: pk.DLRM(rows=[9, 9], pooling=MANY), "pooling has .* at most 1,000,000"),
    "layers": (lambda: pk.DLRM(bottom=MANY), "bottom has .* values; .* at most 10,000"),
    "owners": (lambda: pk.Plan(1, MANY), "owners has .* values; .* at most 10,000,000"),  # type: ignore[arg-type]
    "owners of a sequence": (lambda: pk.Plan.from_owners(MANY, ranks=1), "owners has .* values"),
    "names": (lambda: pk.Plan(1, (0,), MANY), "names has .* values"),  # type: ignore[arg-type]
    "ranks of a shard": (lambda: pk.Placement("row_wise", MANY), "may be on at most 1048576"),  # type: ignore[arg-type]
    "tables": (lambda: pk.TableSet(MANY, batch=4), "tables has .* values"),  # type: ignore[arg-type]
    "strategies": (lambda: pk.Strategy.stack(MANY), "strategies has .* values"),  # type: ignore[arg-type]
    "ranks": (lambda: pk.scaling(pk.DLRM(), "h100-sxm-8", MANY), "ranks has .* values"),
    "points": (lambda: fitting.fit_collective(MANY, MANY), "range has .* values"),
    "sizes": (
        lambda: pk.load_platform("h100-sxm-8").kernel_time("gemm", {"flops": MANY}),
        "the range has .* values",
    ),
    "configurations": (
        lambda: pk.sweep(pk.DLRM, {"batch": MANY}, "h100-sxm-8", progress=False),
        r"grid\['batch'\] has .* values",
    ),
    "products of configurations": (
        lambda: pk.sweep(
            pk.Transformer.bert,
            {"batch": range(1, 10**6), "sequence": range(1, 10**6)},
            "h100-sxm-8",
            progress=False,
        ),
        "grid has 999,999 × 999,999 configurations, .* at most 10,000,000",
    ),
    "configurations without an end": (
        lambda: pk.sweep(pk.DLRM, {"batch": count(1)}, "h100-sxm-8", progress=False),
        r"grid\['batch'\] does not end",
    ),
    "more than an index": (lambda: pk.Plan(1, range(10**20)), "owners has more than 9,223,"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", TOO_MANY.values(), ids=[*TOO_MANY])
def test_a_sequence_of_too_many_values_is_refused_by_its_count(
    case: tuple[Callable[[], Any], str],
) -> None:
    call, said = case
    with pytest.raises(ValueError, match=said) as caught:
        call()
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
        Platform.load("h100-sxm-8")
