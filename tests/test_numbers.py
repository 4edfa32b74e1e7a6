"""Numbers of NumPy, fractions and decimals count as Python's do; what only looks like a number is
refused."""

import datetime
import decimal
import fractions
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pytest

import perfkit as pk
from perfkit.ground.units import check_positive, check_sizes, read_number, read_numbers
from perfkit.models.collectives import bus_factor, over_ranks, ring_collective, ring_steps
from perfkit.models.distributions import ReuseHistogram, Uniform, Zipf, unique_rows
from perfkit.models.kernels import additive
from perfkit.models.roofline import gemm_flops
from perfkit.platform.estimates import keep_quiet
from tests.fuzz.entries_numbers import FORMS, KINDS, SIZED, Example, holds, is_number, retype, same


def name_calls(*calls: Example) -> list[str]:
    """A name for each example."""
    return [f"{i}-{call.function.__name__}" for i, call in enumerate(calls)]


class Taker(NamedTuple):
    """A function, one of its arguments, and what the others are."""

    function: Callable[..., Any]
    argument: str
    others: dict[str, Any]

    def take(self, value: Any) -> Any:
        """Call the function with this value for the argument."""
        return self.function(**self.others, **{self.argument: value})


NO_NUMBERS = [
    np.timedelta64(3, "s"),
    np.datetime64("2020-01-01"),
    np.complex128(5 + 3j),
    np.ma.masked,
    np.array([]),
    np.str_("3"),
    datetime.timedelta(seconds=3),
    decimal.Decimal("NaN"),
    5j,
    None,
    "3",
    True,
]


@pytest.mark.parametrize("call", [*FORMS, *SIZED], ids=name_calls(*FORMS, *SIZED))
@pytest.mark.filterwarnings("ignore")
def test_numbers_of_numpy_give_what_numbers_of_python_give(call: Example) -> None:
    expected = call()
    for name, value in call.arguments.items():
        if not is_number(value):
            continue
        for kind in KINDS:
            if not holds(value, kind):
                continue
            try:
                found = call(**{name: retype(value, kind)})
            except ValueError as error:  # a float for the number of a rank
                assert issubclass(kind, np.floating), error
                assert "it must be a whole number" in str(error) or "number of" in str(error)
                continue
            assert same(found, expected), (name, kind)


@pytest.mark.parametrize("call", FORMS, ids=name_calls(*FORMS))
def test_arrays_of_small_types_give_what_their_numbers_give(call: Example) -> None:
    if call.function.__name__ in ("list_steps", "lru_hit_rate"):  # they take no arrays
        return
    for name, value in call.arguments.items():
        if not isinstance(value, int | float):
            continue
        for kind in KINDS:
            if not holds(value, kind):
                continue
            array = np.array([value, value], dtype=kind)
            try:
                expected = call(**{name: array.astype(float)})
            except ValueError:  # an argument that is one number
                continue
            assert same(call(**{name: array}), expected), (name, kind)


def test_a_batch_of_16_bits_finds_all_rows() -> None:
    tables = (pk.EmbeddingTable(10**7, 64, pooling=20),)
    for batch in (np.int16(4096), 4096):
        table = pk.TableSet(tables, batch=batch).table()  # type: ignore[arg-type]
        assert table["unique_rows"][0] == pytest.approx(81585, rel=1e-4)
    assert pk.TableSet(tables, batch=np.uint8(64)).batch == 64  # type: ignore[arg-type]


def test_closed_forms_do_not_overflow() -> None:
    law = {"alpha0": 1e-5, "alpha1": 1e-6, "beta0": 1e-11, "beta1": 1e-11}
    assert over_ranks(1e9, np.int8(100), "all_reduce", **law) == pytest.approx(0.0220950, rel=1e-5)
    ring = {"operation": "all_reduce", "alpha_hop": 1e-6, "beta_link": 1e-11}
    few = ring_collective(1e9, ranks=np.int8(100), **ring)
    assert few == ring_collective(1e9, ranks=100, **ring)
    assert ring_steps("all_reduce", np.int8(100)) == 198
    assert ring_steps("all_reduce", np.array([100, 2], dtype=np.int8)).tolist() == [198, 2]
    assert gemm_flops(np.int32(2**20), np.int32(2**20), np.int32(2**20)) == 2.0**61
    assert additive({"nbytes": np.array([200], dtype=np.uint8)}, nbytes=2).tolist() == [400]


def test_closed_forms_of_columns_of_bytes() -> None:
    column = pl.Series("ranks", [100, 2], dtype=pl.Int8)
    assert ring_steps("all_reduce", column).to_list() == [198, 2]
    frame = pl.DataFrame(column).with_columns(steps=ring_steps("all_reduce", pl.col("ranks")))
    assert frame["steps"].to_list() == [198, 2]
    pandas = pytest.importorskip("pandas")
    assert ring_steps("all_reduce", pandas.Series([100, 2], dtype="int8")).tolist() == [198, 2]
    with pytest.raises(ValueError, match=r"ranks is .* must be a real number"):
        ring_steps("all_reduce", pl.Series(["a"]))


def place_second_table(owner: Any) -> pk.Plan:
    """A plan of two tables, of which the first lies on rank 0."""
    return pk.Plan(2, (0, owner))


NUMBER_TAKERS = [
    Taker(pk.EmbeddingTable, "rows", {"dim": 4}),
    Taker(pk.EmbeddingTable, "pooling", {"rows": 4, "dim": 4}),
    Taker(pk.TableSet, "batch", {"tables": (pk.EmbeddingTable(4, 4),)}),
    Taker(Uniform, "rows", {}),
    Taker(Zipf, "shift", {"rows": 1000, "exponent": 1.0}),
    Taker(check_positive, "value", {"name": "batch"}),
    Taker(place_second_table, "owner", {}),
    Taker(pk.Estimate, "time", {"spread": 0.1, "terms": {}, "formula": "a"}),
]
ARRAY_TAKER = Taker(pk.load_platform("zen5-2").device.bandwidth, "working_set", {})


@pytest.mark.parametrize("odd", NO_NUMBERS, ids=repr)
def test_what_only_looks_like_a_number_is_refused(odd: Any) -> None:
    takers = [*NUMBER_TAKERS, ARRAY_TAKER]
    is_empty = isinstance(odd, np.ndarray) and odd.size == 0
    if odd is True or is_empty:
        takers.remove(ARRAY_TAKER)
    for taker in takers:
        with pytest.raises(ValueError, match=r"must be|go from 0|takes nan s") as caught:
            taker.take(odd)
        assert len(str(caught.value)) < 300
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("odd", [np.complex128(5 + 3j), np.timedelta64(3, "s"), "3", 5j, None])
def test_closed_forms_refuse_what_is_no_number(odd: Any) -> None:
    for call in FORMS:
        for name, value in call.arguments.items():
            if not isinstance(value, int | float):
                continue
            try:
                call(**{name: odd})
            except ValueError as error:
                assert re.search("must be|cannot take", str(error)), (call.function, name)
            else:
                assert odd is None, "only an argument that may be absent takes no number"


def test_fractions_and_decimals_are_numbers() -> None:
    assert read_number(fractions.Fraction(10**30)) == 10**30
    assert read_number(decimal.Decimal("0.5")) == 0.5
    assert read_number(decimal.Decimal("1e999999")) == np.inf
    assert type(read_number(np.float16(0.5))) is float
    assert read_number(np.array(5, dtype=np.int8)) == 5
    table = pk.EmbeddingTable(fractions.Fraction(1000), decimal.Decimal(16))  # type: ignore[arg-type]
    assert table == pk.EmbeddingTable(1000, 16)


def test_arrays_of_any_kind_become_float64() -> None:
    assert read_numbers(np.array([2**70, 1], dtype=object)).tolist() == [2.0**70, 1]  # type: ignore[union-attr]
    odd: list[Any] = [["1"], [None], [1j], np.ma.array([1, 2], mask=[True, False]), [[1], [1, 2]]]
    for values in odd:
        assert read_numbers(values) is None
        with pytest.raises(ValueError, match=r"sizes is .* must be a finite number"):
            check_sizes("sizes", values)
    huge = np.array([np.finfo(np.longdouble).max])
    with pytest.raises(ValueError, match=r"must be a finite number"):
        check_sizes("sizes", huge)


def test_records_keep_numbers_of_python() -> None:
    histogram = ReuseHistogram((np.float32(2),) * 17, np.int16(2048), np.int16(1000))  # type: ignore[arg-type]
    assert histogram == ReuseHistogram((2.0,) * 17, 2048.0, 1000)
    assert type(histogram.rows) is int
    plan = pk.Plan(np.int8(2), (np.int8(0), pk.Placement("row_wise", np.arange(2, dtype=np.int8))))  # type: ignore[arg-type]
    assert plan == pk.Plan(2, (0, pk.Placement("row_wise", (0, 1))))
    strategy = pk.Strategy(dp=2**20, zero=1, shards=np.int8(4), overlap=np.bool_(True))
    assert strategy == pk.Strategy(dp=2**20, zero=1, shards=4)
    assert type(strategy.shards) is int
    estimate = pk.Estimate(np.float32(0.5), np.float16(0.125), {"a": np.float16(0.5)}, "a")  # type: ignore[arg-type, dict-item]
    assert estimate == pk.Estimate(0.5, 0.125, {"a": 0.5}, "a")
    assert type(estimate.time) is float
    device = pk.load_platform("zen5-2").device
    peak = device.peaks["fp32"]
    assert type(type(peak)(np.float32(1e12), "FLOP/s", "measured", "a").value) is float  # type: ignore[arg-type]


def test_a_share_of_the_caches_needs_ranks() -> None:
    zen = pk.load_platform("zen5-2")
    for odd in (-1, 0, "a", None):
        with pytest.raises(ValueError, match=r"ranks is .* whole number above 0"):
            zen.share_caches(odd)  # type: ignore[arg-type]
    assert zen.share_caches(np.int8(2)) == zen.share_caches(2)  # type: ignore[arg-type]


def test_arrays_without_a_size_are_refused() -> None:
    for rows in (np.array([]), np.array([1, np.nan]), np.array([1j])):
        with pytest.raises(ValueError, match="rows is"):
            pk.EmbeddingTable(rows, 4)  # type: ignore[arg-type]


def test_unique_rows_of_small_numbers_of_lookups() -> None:
    assert unique_rows(Uniform(1000), np.int8(100)) == unique_rows(Uniform(1000), 100)
    assert bus_factor("all_reduce", np.uint8(200)) == bus_factor("all_reduce", 200)


NODE = pk.load_platform("h100-sxm-8")
SMALL = pk.DLRM(rows=[1000, 1000], dim=16, pooling=2, batch=64, bottom=[16], top=[16])
BERT = pk.Transformer.bert
FRAME = pd.DataFrame({"rows": [100], "dim": [8]})
SWEPT = {"workload": SMALL, "grid": {"batch": [64]}, "platform": NODE}
SEARCHED = {"workload": SMALL, "platform": NODE, "ranks": 2, "steps": 1}
JOBS = {"jobs": {"a": SMALL}, "platform": NODE, "ranks": 2}
SOLVED = {"unknown": "ranks", "workload": SMALL, "platform": NODE}
TRACE = "reference_data/measured/xeon-2.step.json.gz"
with keep_quiet():
    RESULT = pk.predict(SMALL, NODE)


def solve_where_until_answers(until: Any) -> Any:
    """Ask for the ranks that meet a condition, whose answer is odd."""
    return pk.solve_for("ranks", SMALL, NODE, lambda prediction: until)


def allocate_where_worth_answers(worth: Any) -> Any:
    """Share ranks by what they are worth, which is odd."""
    return pk.allocate({"a": SMALL}, NODE, 2, lambda prediction: worth)


#: Arguments that are text, a choice, a switch, a function or a list.
TAKERS_OF_ANYTHING = {
    "table_dtype": Taker(pk.DLRM, "table_dtype", {}),
    "parallel": Taker(BERT, "parallel", {}),
    "kv_heads": Taker(BERT, "kv_heads", {}),
    "norm": Taker(BERT, "norm", {}),
    "gated": Taker(BERT, "gated", {}),
    "execution": Taker(pk.predict, "execution", {"workload": SMALL, "platform": NODE}),
    "ranks": Taker(pk.sweep, "ranks", SWEPT),
    "events": Taker(pk.sweep, "events", SWEPT),
    "progress": Taker(pk.sweep, "progress", SWEPT),
    "execution of a sweep": Taker(pk.sweep, "execution", SWEPT),
    "grid": Taker(pk.sweep, "grid", {"workload": SMALL, "platform": NODE}),
    "strong": Taker(pk.scaling, "strong", {"workload": SMALL, "platform": NODE}),
    "strong of solve_for": Taker(pk.solve_for, "strong", SOLVED),
    "until": Taker(pk.solve_for, "until", SOLVED),
    "until answers": Taker(solve_where_until_answers, "until", {}),
    "worth": Taker(pk.allocate, "worth", JOBS),
    "worth answers": Taker(allocate_where_worth_answers, "worth", {}),
    "tables": Taker(NODE.lookup, "tables", {"batch": 64}),
    "loader": Taker(pk.time_loader, "loader", {}),
    "sizes": Taker(pk.read_trace, "sizes", {"paths": TRACE}),
    "partial": Taker(pk.calibrate, "partial", {"nccl_logs": "none"}),
    "ranks_per_node": Taker(NODE.with_nodes, "ranks_per_node", {"nodes": 2}),
    "power": Taker(RESULT.cost, "power", {"price_per_gpu_hour": 2.0, "samples": 1e6}),
    "price_per_gpu_hour": Taker(RESULT.cost, "price_per_gpu_hour", {"samples": 1e6}),
    "rows": Taker(pk.read_tables, "rows", {"source": FRAME, "batch": 64}),
    "itemsize": Taker(pk.read_tables, "itemsize", {"source": FRAME, "batch": 64}),
    "correlation": Taker(pk.draw_tables, "correlation", {"n": 3}),
    "a of compare": Taker(pk.compare, "a", {"b": "h100-sxm-8"}),
    "ranks of explore": Taker(pk.explore, "ranks", {"model": BERT(), "platform": NODE}),
    "together": Taker(pk.shard, "together", SEARCHED),
    "forbid": Taker(pk.shard, "forbid", SEARCHED),
}
#: What says something of several arguments, or of what is in them.
NAME_OTHER_ARGUMENTS = ("rows", "a of compare", "ranks of explore")
#: Objects that answer a comparison or a question of truth with an error of their own.
ODD_OBJECTS = [
    pd.NA,
    pd.Series([4]),
    pl.Series([4]),
    pl.col("a"),
    np.array([4, 8]),
    np.array([(1, 2)], dtype="i4,i4"),
    np.ma.masked,
    decimal.Decimal("sNaN"),
    np.str_("odd"),
]


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
@pytest.mark.parametrize("name", TAKERS_OF_ANYTHING)
def test_what_answers_no_comparison_is_refused_with_the_name_of_the_argument(name: str) -> None:
    taker = TAKERS_OF_ANYTHING[name]
    for odd in ODD_OBJECTS:
        try:
            taker.take(odd)
        except ValueError as error:
            text = str(error)
            assert text.isprintable(), repr(odd)
            assert len(text) < 700, repr(odd)
            assert "ambiguous" not in text, repr(odd)
            assert "truth value" not in text, repr(odd)
            if name not in NAME_OTHER_ARGUMENTS:
                assert taker.argument in text, text


def test_an_empty_cell_of_whole_numbers_takes_the_default() -> None:
    frame = pd.DataFrame({"rows": [100, 200], "dim": [8, 8], "pooling": [3, None]}, dtype="Int64")
    assert [table.pooling for table in pk.read_tables(frame, batch=64).tables] == [3, 1]


@pytest.mark.parametrize("column", ["rows", "dim", "pooling"])
def test_an_odd_cell_is_refused_with_its_column(column: str) -> None:
    for odd in (np.array([4, 8]), decimal.Decimal("sNaN"), pl.Series([4]), np.ma.masked, [4]):
        record = {"rows": 100, "dim": 8, "pooling": 2, column: odd}
        with pytest.raises(ValueError, match=f"source.*{column} is ") as caught:
            pk.read_tables([record], batch=64)
        assert str(caught.value).isprintable()


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
def test_arrays_without_axes_count_as_the_number_in_them() -> None:
    four = np.array(4)
    plain = pk.DLRM(rows=[1000, 1000], pooling=4, exponent=1.0)
    assert pk.DLRM(rows=[1000, 1000], pooling=four, exponent=np.array(1.0)) == plain
    assert len(pk.DLRM(rows=np.array(1000)).tables) == 1
    with pytest.raises(ValueError, match="pooling is empty"):
        pk.DLRM(rows=[1000], pooling=[])
    swept = pk.sweep(pk.Transformer.bert, {"batch": four}, NODE).table()
    assert swept["batch"].to_list() == [4]
    for number in (np.longdouble(4), decimal.Decimal(4), four):
        one = pk.sweep(pk.Transformer.bert, {"batch": [number]}, NODE).table()
        assert one.equals(swept)
