"""Numbers of NumPy, fractions and decimals count as Python's do; what only looks like a number is
refused."""

import datetime
import decimal
import fractions
from typing import Any

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
from tests.fuzz.entries_numbers import FORMS, KINDS, SIZED, Example, holds, is_number, retype, same


def name_calls(*calls: Example) -> list[str]:
    """A name for each example."""
    return [f"{i}-{call.function.__name__}" for i, call in enumerate(calls)]


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
    for name in [name for name, value in call.arguments.items() if is_number(value)]:
        value = call.arguments[name]
        for kind in [kind for kind in KINDS if holds(value, kind)]:
            try:
                found = call(**{name: retype(value, kind)})
            except ValueError as error:  # a float for the number of a rank
                assert issubclass(kind, np.floating), error
                assert "it must be a whole number" in str(error) or "number of" in str(error)
                continue
            assert same(found, expected), (name, kind)


@pytest.mark.parametrize("call", FORMS, ids=name_calls(*FORMS))
def test_arrays_of_small_types_give_what_their_numbers_give(call: Example) -> None:
    plain = {"list_steps", "lru_hit_rate"}
    for name, value in call.arguments.items():
        if not isinstance(value, int | float) or call.function.__name__ in plain:
            continue
        for kind in [kind for kind in KINDS if holds(value, kind)]:
            array = np.array([value] * 2, dtype=kind)
            try:
                expected = call(**{name: array.astype(float)})
            except ValueError:  # an argument that is one number
                continue
            assert same(call(**{name: array}), expected), (name, kind)


def test_a_batch_of_16_bits_finds_all_rows() -> None:
    tables = (pk.EmbeddingTable(10**7, 64, pooling=20),)
    rows = [
        pk.TableSet(tables, batch=batch).table()["unique_rows"][0]  # type: ignore[arg-type]
        for batch in (np.int16(4096), 4096)
    ]
    assert rows == pytest.approx([81585, 81585], rel=1e-4)
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


@pytest.mark.parametrize("odd", NO_NUMBERS, ids=repr)
def test_what_only_looks_like_a_number_is_refused(odd: Any) -> None:
    calls = [
        lambda: pk.EmbeddingTable(odd, 4),
        lambda: pk.EmbeddingTable(4, 4, pooling=odd),
        lambda: pk.TableSet((pk.EmbeddingTable(4, 4),), batch=odd),
        lambda: pk.load_platform("zen5-2").device.bandwidth(odd),
        lambda: Uniform(odd),
        lambda: Zipf(1000, 1.0, shift=odd),
        lambda: check_positive("batch", odd),
        lambda: pk.Plan(2, (0, odd)),
        lambda: pk.Estimate(odd, 0.1, {}, "a"),
    ]
    for call in calls:
        if odd is True and call is calls[3]:
            continue
        if isinstance(odd, np.ndarray) and not odd.size and call is calls[3]:
            continue
        with pytest.raises(ValueError, match=r"must be|go from 0|takes nan s") as caught:
            call()
        assert len(str(caught.value)) < 300
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("odd", [np.complex128(5 + 3j), np.timedelta64(3, "s"), "3", 5j, None])
def test_closed_forms_refuse_what_is_no_number(odd: Any) -> None:
    for call in FORMS:
        for name, value in call.arguments.items():
            if isinstance(value, int | float):
                with pytest.raises(ValueError, match=r"must be|cannot take"):
                    if call(**{name: odd}) is not None and odd is None:
                        raise ValueError("None must be allowed here")


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
SMALL = pk.DLRM(rows=[1000] * 2, dim=16, pooling=2, batch=64, bottom=[16], top=[16])
FRAME = pd.DataFrame({"rows": [100], "dim": [8]})
#: Calls with one argument that is text, a choice, a switch, a function or a list.
TAKERS_OF_ANYTHING: dict[str, Any] = {
    "table_dtype": lambda odd: pk.DLRM(table_dtype=odd),
    "parallel": lambda odd: pk.Transformer.bert(parallel=odd),
    "kv_heads": lambda odd: pk.Transformer.bert(kv_heads=odd),
    "norm": lambda odd: pk.Transformer.bert(norm=odd),
    "gated": lambda odd: pk.Transformer.bert(gated=odd),
    "execution": lambda odd: pk.predict(SMALL, NODE, execution=odd),
    "ranks": lambda odd: pk.sweep(SMALL, {"batch": [64]}, NODE, ranks=odd),
    "events": lambda odd: pk.sweep(SMALL, {"batch": [64]}, NODE, events=odd),
    "progress": lambda odd: pk.sweep(SMALL, {"batch": [64]}, NODE, progress=odd),
    "execution of a sweep": lambda odd: pk.sweep(SMALL, {"batch": [64]}, NODE, execution=odd),
    "grid": lambda odd: pk.sweep(SMALL, odd, NODE),
    "strong": lambda odd: pk.scaling(SMALL, NODE, strong=odd),
    "strong of solve_for": lambda odd: pk.solve_for("ranks", SMALL, NODE, strong=odd),
    "until": lambda odd: pk.solve_for("ranks", SMALL, NODE, odd),
    "until answers": lambda odd: pk.solve_for("ranks", SMALL, NODE, lambda r: odd),
    "worth": lambda odd: pk.allocate({"a": SMALL}, NODE, 2, odd),
    "worth answers": lambda odd: pk.allocate({"a": SMALL}, NODE, 2, lambda r: odd),
    "tables": lambda odd: NODE.lookup(odd, batch=64),
    "loader": lambda odd: pk.time_loader(odd),
    "sizes": lambda odd: pk.read_trace("reference_data/measured/xeon-2.step.json.gz", sizes=odd),
    "partial": lambda odd: pk.calibrate(nccl_logs="none", partial=odd),
    "ranks_per_node": lambda odd: NODE.with_nodes(2, ranks_per_node=odd),
    "power": lambda odd: pk.predict(SMALL, NODE).cost(2.0, power=odd, samples=1e6),
    "price_per_gpu_hour": lambda odd: pk.predict(SMALL, NODE).cost(odd, samples=1e6),
    "rows": lambda odd: pk.read_tables(FRAME, batch=64, rows=odd),
    "itemsize": lambda odd: pk.read_tables(FRAME, batch=64, itemsize=odd),
    "correlation": lambda odd: pk.draw_tables(3, correlation=odd),
    "a of compare": lambda odd: pk.compare(odd, "h100-sxm-8"),
    "ranks of explore": lambda odd: pk.explore(pk.Transformer.bert(), NODE, ranks=odd),
    "together": lambda odd: pk.shard(SMALL, NODE, ranks=2, steps=1, together=odd),
    "forbid": lambda odd: pk.shard(SMALL, NODE, ranks=2, steps=1, forbid=odd),
}
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
    for odd in ODD_OBJECTS:
        try:
            TAKERS_OF_ANYTHING[name](odd)
        except ValueError as error:
            text = str(error)
            assert text.isprintable() and len(text) < 700, repr(odd)
            assert "ambiguous" not in text and "truth value" not in text, repr(odd)
            if name not in ("rows", "a of compare", "ranks of explore"):
                assert name.split()[0] in text, text


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
    plain = pk.DLRM(rows=[1000] * 2, pooling=4, exponent=1.0)
    assert pk.DLRM(rows=[1000] * 2, pooling=four, exponent=np.array(1.0)) == plain
    assert len(pk.DLRM(rows=np.array(1000)).tables) == 1
    with pytest.raises(ValueError, match="pooling is empty"):
        pk.DLRM(rows=[1000], pooling=[])
    swept = pk.sweep(pk.Transformer.bert, {"batch": four}, NODE).table()
    assert swept["batch"].to_list() == [4]
    for number in (np.longdouble(4), decimal.Decimal(4), four):
        one = pk.sweep(pk.Transformer.bert, {"batch": [number]}, NODE).table()
        assert one.equals(swept)
