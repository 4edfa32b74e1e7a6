"""Embedding tables and sets of them: what is drawn, and what is refused."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from perfkit.sharding.planner import price_plan
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import EmbeddingTable, TableSet, draw_tables, name_tables


def test_drawn_tables_are_distributed_as_documented() -> None:
    tables = draw_tables(4000, seed=3)
    rows, pooling = np.array([(t.rows, t.pooling) for t in tables]).T
    assert rows.min() >= 1e3 and rows.max() <= 1e7
    assert np.percentile(np.log10(rows), [25, 50, 75]) == pytest.approx([4, 5, 6], abs=0.1), (
        "10^U(3, 7)"
    )
    assert {t.dim for t in tables} == {16, 32, 64, 128}
    assert pooling.min() >= 1 and pooling.max() <= 64
    assert np.median(pooling) == pytest.approx(8, rel=0.05)
    inside = (pooling > 1) & (pooling < 64)  # within ln 8 = 2.08 standard deviations of the median
    assert inside.mean() == pytest.approx(math.erf(math.log(8) / math.sqrt(2)), abs=0.01), (
        "log-normal with spread 1"
    )
    exponents = np.array([t.exponent for t in tables])
    assert (
        exponents.min() >= 0
        and exponents.max() <= 1.2
        and exponents.mean() == pytest.approx(0.6, abs=0.02)
    )
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
    assert 0 < frame["unique_rows"][1] < 50 and frame["unique_rows"][0] == pytest.approx(
        100 * (1 - 0.99**64)
    )


ONE = EmbeddingTable(100, 8, name="a")
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: draw_tables(0), "n is 0; it must be a whole number above 0"),
    (lambda: draw_tables(3, correlation=1.5), "correlation is 1.5; it must be between -1 and 1"),
    (lambda: EmbeddingTable(0, 8), "rows is 0; it must be a whole number above 0"),
    (lambda: EmbeddingTable(10, 8, exponent=math.nan), "exponent is nan"),
    (lambda: TableSet([]), "tables is empty; it must hold at least one EmbeddingTable"),
    (lambda: TableSet([1, 2]), "tables[0] is 1; it must be a EmbeddingTable"),  # type: ignore[list-item]
    (lambda: TableSet([ONE, ONE]), "two tables are named 'a'"),
    (
        lambda: TableSet([ONE, replace(ONE, name="b", itemsize=2)]),
        "itemsize is 2 and 4; one kernel reads numbers",
    ),
    (
        lambda: TableSet([replace(ONE, pooling=101)]),
        "pooling of 'a' is 101; it must be at most its 100 rows",
    ),
    (lambda: TableSet([ONE], batch=2.5), "batch is 2.5"),  # type: ignore[arg-type]
    (lambda: TableSet([ONE], optimizer="adma"), "optimizer is 'adma'; .* did you mean 'adam'"),
    (lambda: TableSet([ONE], sparse=1), "sparse is 1; it must be True"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("make", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_tables_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message if ".*" in message else re.escape(message)):
        make()


def test_tables_of_more_bytes_than_an_integer_holds_are_listed_and_priced() -> None:
    tables = TableSet((EmbeddingTable(2**62, 64), EmbeddingTable(1000, 64)), batch=64)
    assert tables.table()["nbytes"][0] == 2.0**70
    assert price_plan(tables, "h100-sxm-8", Plan.round_robin(2, ranks=2)).memory.max() >= 2.0**70
