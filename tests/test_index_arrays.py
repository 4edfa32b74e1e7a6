"""Recorded indices: counted in every layout, read from every kind of file, and files that are
refused."""

import gzip
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import perfkit as pk
from perfkit.models.distributions import ReuseHistogram, Zipf, unique_rows
from perfkit.readers.index_arrays import IndexStatistics, count_indices, read_indices
from tests import samples

INDICES = [5, 5, 2, 9, 5, 0]
OFFSETS = [0, 2, 2]
LENGTHS = [2, 0, 4]


def test_a_sample_of_two_tables_is_counted() -> None:
    """A table of row 0 alone, and one of six rows that are looked up once."""
    first, second = read_indices(samples.FOLDER / "indices.npz")
    assert (first.bags, first.pooling, first.unique_rows, first.spread) == (3, 1.0, 1.0, 0.0)
    assert (second.bags, second.pooling, second.unique_rows) == (3, 2.0, 6.0)
    assert second.spread == pytest.approx((2 / 3) ** 0.5)
    assert second.to_table(dim=16).rows == 6


class Facts(NamedTuple):
    """What is counted of one table."""

    bags: int
    pooling: float
    unique_rows: float
    lookups: float
    rows: int


def list_facts(tables: list[IndexStatistics]) -> list[Facts]:
    facts = []
    for table in tables:
        histogram = table.histogram
        facts.append(
            Facts(table.bags, table.pooling, table.unique_rows, histogram.lookups, histogram.rows)
        )
    return facts


ONE = [Facts(bags=3, pooling=2.0, unique_rows=4.0, lookups=6.0, rows=10)]
MORE = [*INDICES, 3, 3, 3]
MORE_LENGTHS = [LENGTHS, [1, 1, 1]]
TWO = [*ONE, Facts(bags=3, pooling=1.0, unique_rows=1.0, lookups=3.0, rows=4)]
SAME_ROW = Facts(bags=3, pooling=4.0, unique_rows=1.0, lookups=12.0, rows=1)


class Told(NamedTuple):
    """Arguments that tell tables, and what is counted of these."""

    arguments: dict[str, Any]
    expected: list[Facts]


TOLD = {
    "offsets": Told({"indices": INDICES, "offsets": OFFSETS}, ONE),
    "arrays, offsets with the end": Told(
        {"indices": np.array(INDICES, np.int32), "offsets": np.array([*OFFSETS, 6])}, ONE
    ),
    "lengths": Told({"indices": INDICES, "lengths": LENGTHS}, ONE),
    "offsets and lengths": Told(
        {"indices": INDICES, "offsets": [*OFFSETS, 6], "lengths": [LENGTHS]}, ONE
    ),
    "a row of each bag": Told({"indices": np.reshape(INDICES, (3, 2))}, ONE),
    "batch": Told({"indices": INDICES, "batch": 3}, ONE),
    "nothing": Told({"indices": INDICES}, [Facts(6, 1.0, 4.0, 6.0, 10)]),
    "rows": Told(
        {"indices": INDICES, "offsets": OFFSETS, "rows": 50}, [Facts(3, 2.0, 4.0, 6.0, 50)]
    ),
    "two tables, lengths": Told({"indices": MORE, "lengths": MORE_LENGTHS}, TWO),
    "two tables, offsets": Told(
        {"indices": MORE, "offsets": [0, 2, 2, 6, 7, 8, 9], "tables": 2}, TWO
    ),
    "two tables, both": Told(
        {"indices": MORE, "offsets": [0, 2, 2, 6, 7, 8], "lengths": MORE_LENGTHS}, TWO
    ),
    "two tables, rows": Told(
        {"indices": MORE, "lengths": MORE_LENGTHS, "rows": [100, 20]},
        [TWO[0]._replace(rows=100), TWO[1]._replace(rows=20)],
    ),
    "an axis for tables": Told({"indices": np.zeros((2, 3, 4), int)}, [SAME_ROW, SAME_ROW]),
}


@pytest.mark.parametrize("case", TOLD.values(), ids=TOLD)
def test_tables_told_in_every_way(case: Told) -> None:
    assert list_facts(count_indices(**case.arguments)) == case.expected


def test_what_is_counted() -> None:
    """Three rows once, and one two to four times."""
    [table] = count_indices(INDICES, OFFSETS)
    assert table.spread == pytest.approx(np.std(LENGTHS))
    assert table.histogram.counts[:3] == (3, 0, 1)
    assert table.histogram.counts[3:] == (0,) * 14


def test_tables_without_lookups_are_left_out() -> None:
    with pytest.warns(UserWarning, match="1 of 3 tables have no lookups"):
        several = count_indices(MORE, lengths=[LENGTHS, [0, 0, 0], [1, 1, 1]])
    assert [table.number for table in several] == [0, 2]
    assert several[1].to_table(8).name == "table 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"indices": [0.5, 1.0]}, "indices is an array of float64; it must be of whole numbers"),
        ({"indices": [True, False]}, "indices is an array of bool"),
        ({"indices": ["a"]}, "indices is an array of <U1"),
        ({"indices": [[1, 2], [3]]}, "indices is no plain array"),
        ({"indices": []}, "0 samples do not divide"),
        ({"indices": [0, 0], "lengths": [1, 2]}, "lengths add up to 3"),
        ({"indices": [0, 0], "lengths": [3, -1]}, "none may be negative"),
        ({"indices": [0, -1]}, "an index of table 0 is -1; it must be 0 or more"),
        ({"indices": [0, 7], "rows": 7}, "an index of table 0 is 7; it must be below the 7 rows"),
        ({"indices": np.array([0, 2**64 - 1], np.uint64)}, "an index of table 0 is -1"),
        ({"indices": [0, 1], "rows": -7}, "rows is -7"),
        (
            {"indices": [0, 1], "rows": [7, 7]},
            "rows has 2 entries; it must have one for each of the 1 tables",
        ),
        ({"indices": [0, 1], "offsets": [1, 2]}, "offsets must rise from 0"),
        ({"indices": [0, 1], "offsets": [0, 2, 1, 2]}, "offsets must rise from 0"),
        ({"indices": [0, 1], "offsets": [0, 5]}, "offsets must rise from 0"),
        ({"indices": [0, 1], "offsets": []}, "offsets must rise from 0"),
        ({"indices": [0, 1], "offsets": [0.0, 1.0]}, "offsets is an array of float64"),
        ({"indices": [0, 1, 2], "tables": 2}, "3 samples do not divide by tables = 2"),
        ({"indices": [0, 1, 2], "tables": 0}, "tables is 0"),
        ({"indices": [0, 1, 2], "batch": -1}, "batch is -1"),
    ],
)
def test_indices_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_indices(**arguments)


@pytest.fixture(scope="module")
def part() -> IndexStatistics:
    """80,000 lookups by `LAW`, in bags of 20."""
    weights = np.arange(1.0, LAW.rows + 1) ** -LAW.exponent
    ranks = np.random.default_rng(2).choice(LAW.rows, 80_000, p=weights / weights.sum())
    rows = np.random.default_rng(3).permutation(LAW.rows)[ranks]
    [part] = count_indices(rows.reshape(4000, 20), rows=LAW.rows)
    return part


LAW = Zipf(50_000, 0.95)


def test_the_exponent_of_drawn_lookups_is_found(part: IndexStatistics) -> None:
    assert abs(part.fit.exponent - LAW.exponent) < 2 * part.fit.stderr
    assert 2 * part.fit.stderr < 0.02


def test_a_table_is_what_was_recorded_or_what_was_fitted(part: IndexStatistics) -> None:
    recorded = part.to_table(64)
    assert recorded.rows == 50_000
    assert recorded.pooling == 20
    assert recorded.spread == 0
    assert recorded.itemsize == 4
    assert isinstance(recorded.distribution, ReuseHistogram)
    assert recorded.exponent == part.fit.exponent
    fitted = part.to_table(64, itemsize=2, law="zipf", name="clicks")
    assert fitted.distribution == Zipf(50_000, part.fit.exponent)
    assert fitted.itemsize == 2
    assert fitted.name == "clicks"
    with pytest.raises(ValueError, match="law is 'uniform'"):
        part.to_table(64, law="uniform")


@pytest.mark.parametrize("lookups", [20_000, 80_000])
@pytest.mark.parametrize("law", ["histogram", "zipf"])
def test_a_table_finds_as_many_rows_as_the_law(
    part: IndexStatistics, law: str, lookups: int
) -> None:
    rows = float(unique_rows(part.to_table(64, law=law).distribution, lookups))
    assert rows == pytest.approx(float(unique_rows(LAW, lookups)), rel=0.02)


def test_files_of_numpy(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.reshape(INDICES, (3, 2)))
    np.savez(tmp_path / "parts.npz", indices=INDICES, offsets=OFFSETS)
    np.savez_compressed(
        tmp_path / "all.npz", lengths=[LENGTHS], indices=INDICES, offsets=[*OFFSETS, 6]
    )
    for name in ("one.npy", "parts.npz", "all.npz"):
        assert list_facts(read_indices(tmp_path / name)) == ONE
    tables = pk.read_tables(tmp_path / "parts.npz", dim=16, rows=20)
    assert tables.batch == 3
    assert tables.name == "parts"
    assert tables.tables[0].rows == 20
    assert tables.tables[0].dim == 16
    with pytest.raises(ValueError, match="pass dim=, 64 for example"):
        pk.read_tables(tmp_path / "one.npy")


def test_files_of_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    indices = torch.tensor(INDICES)
    offsets = torch.tensor([*OFFSETS, 6])
    lengths = torch.tensor([LENGTHS])
    # as facebookresearch/dlrm_datasets
    torch.save((indices, offsets, lengths), tmp_path / "set.pt")
    torch.save({"indices": indices.int(), "lengths": lengths[0]}, tmp_path / "named.pt")
    torch.save(indices.reshape(3, 2), tmp_path / "one.pth")
    (tmp_path / "set2.pt.gz").write_bytes(gzip.compress((tmp_path / "set.pt").read_bytes()))
    for name in ("set.pt", "named.pt", "one.pth", "set2.pt.gz"):
        assert list_facts(read_indices(tmp_path / name)) == ONE
    assert pk.read_tables(tmp_path / "set2.pt.gz", dim=8).name == "set2"
    assert list_facts(count_indices(indices, offsets, lengths)) == ONE
    torch.save([indices, indices, indices, indices], tmp_path / "four.pt")
    torch.save({"indices": "five"}, tmp_path / "text.pt")
    for name in ("four.pt", "text.pt"):
        with pytest.raises(ValueError, match="one to three tensors"):
            read_indices(tmp_path / name)
    torch.save({"rows": indices}, tmp_path / "odd.pt")
    with pytest.raises(
        ValueError, match=r"odd\.pt holds 'rows'; known are indices, offsets, lengths"
    ):
        read_indices(tmp_path / "odd.pt")


class Trap:
    """What is unpickled runs this."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_files_that_would_run_code_or_are_broken(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    trap = Trap(tmp_path / "sprung")
    np.save(tmp_path / "a.npy", np.array([trap], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "b.npz", indices=np.array([trap], dtype=object))
    torch.save(trap, tmp_path / "c.pt")
    (tmp_path / "c2.pt.gz").write_bytes(gzip.compress((tmp_path / "c.pt").read_bytes()))
    (tmp_path / "d.pt").write_bytes(pickle.dumps(trap))
    (tmp_path / "e.npy").write_bytes(pickle.dumps(trap))
    (tmp_path / "f.npz").write_bytes(b"PK\x03\x04 broken")
    (tmp_path / "g.pt.gz").write_bytes(b"no gzip")
    (tmp_path / "h.npy").write_bytes(b"\x93NUM")
    head = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,), }"
    (tmp_path / "i.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + (len(head) + 1).to_bytes(2, "little") + head + b"\n"
    )
    np.savez(tmp_path / "j", indices=[0])
    (tmp_path / "j.npz").write_bytes((tmp_path / "j.npz").read_bytes()[:-30])
    for path in sorted(tmp_path.iterdir()):
        message = rf"{path.name} cannot be read: .*; only arrays are read; save indices"
        with pytest.raises(ValueError, match=message) as caught:
            read_indices(path)
        assert "weights_only" not in str(caught.value), "the advice of torch is unsafe"
    with pytest.raises(ValueError, match=r"none\.npy cannot be read"):
        read_indices(tmp_path / "none.npy")
    assert not trap.path.exists()


def test_small_files_do_not_become_large_ones(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    many = np.zeros(2 * 10**7, dtype=np.int64)
    np.savez_compressed(tmp_path / "a.npz", indices=many)
    (tmp_path / "b.pt.gz").write_bytes(gzip.compress(bytes(many.nbytes), 1))
    torch.save(torch.zeros(1, dtype=torch.int64).expand(10**9), tmp_path / "c.pt")  # a stride of 0
    for path in sorted(tmp_path.iterdir()):
        assert path.stat().st_size < 10**6
        with pytest.raises(
            ValueError,
            match=rf"{path.name} cannot be read: it unpacks to .*B or more; a file of its",
        ):
            read_indices(path)
    with pytest.raises(
        ValueError, match="tables is 10001; it must be a whole number above 0, at most 10000"
    ):
        count_indices(np.zeros(10001, dtype=int), tables=10001, batch=1)
