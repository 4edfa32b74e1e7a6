"""Numbers of NumPy, fractions and decimals count as Python's do; what only looks like a number is
refused."""

import datetime
import decimal
import fractions
from typing import Any

import numpy as np
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
