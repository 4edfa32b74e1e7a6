"""Embedding tables and sets of them: what is drawn, and what is refused."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfkit.sharding.planner import price_plan
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import EmbeddingTable, TableSet, draw_tables, name_tables


@pytest.fixture(scope="module")
def drawn() -> list[EmbeddingTable]:
    """Enough tables to see how they are distributed."""
    return draw_tables(4000, seed=3)


def test_rows_of_drawn_tables_are_uniform_in_their_logarithm(drawn: list[EmbeddingTable]) -> None:
    """10^U(3, 7)"""
    rows = np.array([table.rows for table in drawn])
    assert rows.min() >= 1e3
    assert rows.max() <= 1e7
    assert np.percentile(np.log10(rows), [25, 50, 75]) == pytest.approx([4, 5, 6], abs=0.1)


def test_pooling_of_drawn_tables_is_log_normal(drawn: list[EmbeddingTable]) -> None:
    """Around 8, with spread 1, from 1 to 64: within ln 8 = 2.08 standard deviations."""
    pooling = np.array([table.pooling for table in drawn])
    assert pooling.min() >= 1
    assert pooling.max() <= 64
    assert np.median(pooling) == pytest.approx(8, rel=0.05)
    inside = (pooling > 1) & (pooling < 64)
    assert inside.mean() == pytest.approx(math.erf(math.log(8) / math.sqrt(2)), abs=0.01)


def test_dimensions_and_exponents_of_drawn_tables_are_those_documented(
    drawn: list[EmbeddingTable],
) -> None:
    assert {table.dim for table in drawn} == {16, 32, 64, 128}
    exponents = np.array([table.exponent for table in drawn])
    assert exponents.min() >= 0
    assert exponents.max() <= 1.2
    assert exponents.mean() == pytest.approx(0.6, abs=0.02)


def test_rows_and_pooling_are_drawn_alone(drawn: list[EmbeddingTable]) -> None:
    rows = np.array([table.rows for table in drawn])
    pooling = np.array([table.pooling for table in drawn])
    assert abs(np.corrcoef(np.log(rows), np.log(pooling))[0, 1]) < 0.05


def test_a_seed_names_its_tables() -> None:
    assert draw_tables(3, seed=1) == draw_tables(3, seed=1) != draw_tables(3, seed=2)
    assert [(t.name, t.itemsize) for t in draw_tables(2, itemsize=2)] == [
        ("table 0", 2),
        ("table 1", 2),
    ]


@pytest.mark.parametrize("correlation", [-0.8, 0.5, 1.0])
def test_rows_and_pooling_can_be_correlated(correlation: float) -> None:
    plain, tables = draw_tables(4000, seed=3), draw_tables(4000, seed=3, correlation=correlation)
    found = np.corrcoef(*np.log([(t.rows, t.pooling) for t in tables]).T)[0, 1]
    assert found == pytest.approx(correlation, abs=0.06)
    assert [t.rows for t in tables] == [t.rows for t in plain], (
        "the distribution of each stays as it is"
    )
    assert np.median([t.pooling for t in tables]) == pytest.approx(8, rel=0.06)


def test_a_set_counts_its_tables() -> None:
    tables = TableSet(
        [EmbeddingTable(100, 8), EmbeddingTable(50, 4, pooling=2, exponent=1.0, name="clicks")],
        batch=64,
    )
    assert (len(tables), tables.nbytes) == (2, 100 * 8 * 4 + 50 * 4 * 4)
    assert [t.name for t in tables] == ["", "clicks"]
    assert name_tables(tables.tables) == ["table 0", "clicks"]
    assert repr(tables) == "TableSet('tables': 2 tables, 4 kB, 3 lookups a sample, batch 64)"
    frame = tables.table()
    assert frame["name"].to_list() == ["table 0", "clicks"]
    assert 0 < frame["unique_rows"][1] < 50
    assert frame["unique_rows"][0] == pytest.approx(100 * (1 - 0.99**64))


ONE = EmbeddingTable(100, 8, name="a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n is 0; it must be a whole number above 0"),
        ({"n": 3, "correlation": 1.5}, "correlation is 1.5; it must be between -1 and 1"),
    ],
)
def test_tables_that_cannot_be_drawn(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_tables(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0, "dim": 8}, "rows is 0; it must be a whole number above 0"),
        ({"rows": 10, "dim": 8, "exponent": math.nan}, "exponent is nan"),
    ],
)
def test_a_table_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingTable(**arguments)


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ([], {}, "tables is empty; it must hold at least one EmbeddingTable"),
        ([1, 2], {}, r"tables\[0\] is 1; it must be a EmbeddingTable"),
        ([ONE, ONE], {}, "two tables are named 'a'"),
        (
            [replace(ONE, pooling=101)],
            {},
            "pooling of 'a' is 101; it must be at most its 100 rows",
        ),
        ([ONE], {"batch": 2.5}, "batch is 2.5"),
        ([ONE], {"optimizer": "adma"}, "optimizer is 'adma'; .* did you mean 'adam'"),
        ([ONE], {"sparse": 1}, "sparse is 1; it must be True"),
    ],
)
def test_a_set_that_cannot_be(tables: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableSet(tables, **options)


def test_tables_of_more_bytes_than_an_integer_holds_are_listed_and_priced() -> None:
    tables = TableSet((EmbeddingTable(2**62, 64), EmbeddingTable(1000, 64)), batch=64)
    assert tables.table()["nbytes"][0] == 2.0**70
    assert price_plan(tables, "h100-sxm-8", Plan.round_robin(2, ranks=2)).memory.max() >= 2.0**70


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernel": "hbm"}, "kernel is 'hbm'; known are fused, uvm, uvm_caching, key_value"),
        ({"load_factor": 0.3}, "load_factor is 0.3 with kernel 'fused', which has no cache"),
        ({"kernel": "uvm", "load_factor": 0.3}, "load_factor is 0.3 with kernel 'uvm'"),
        ({"kernel": "uvm_caching", "load_factor": 0}, "load_factor is 0; it must be a number"),
        ({"kernel": "uvm_caching", "load_factor": 1.5}, "load_factor is 1.5; it must be a number"),
    ],
)
def test_kernels_of_tables_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingTable(1000, 16, **fields)


def test_a_cache_holds_a_fifth_of_the_rows_where_nobody_says_it() -> None:
    """As in TorchRec's planner; a kernel without a cache has no load factor."""
    assert EmbeddingTable(1000, 16).load_factor is None
    assert EmbeddingTable(1000, 16, kernel="uvm").load_factor is None
    assert EmbeddingTable(1000, 16, kernel="uvm_caching").load_factor == 0.2
    assert EmbeddingTable(1000, 16, kernel="key_value", load_factor=0.5).load_factor == 0.5


def test_tables_beyond_device_memory_are_not_priced_as_if_they_were_in_it() -> None:
    table = EmbeddingTable(1000, 16, name="a", kernel="uvm")
    with pytest.raises(ValueError, match="kernel of 'a' is 'uvm'"):
        price_plan(TableSet((table,)), "h100-sxm-8", Plan.round_robin(1, ranks=1))
