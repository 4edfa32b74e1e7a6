"""Recorded indices: counted in every layout, read from every kind of file, and files that are
refused."""

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfkit.models.distributions import ReuseHistogram, Zipf, unique_rows
from perfkit.readers.index_arrays import IndexStatistics, count_indices, read_indices
from perfkit.readers.table_configs import read_tables
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


def facts(found: list[IndexStatistics]) -> list[tuple[int, float, float, float, int]]:
    return [
        (s.bags, s.pooling, s.unique_rows, s.histogram.lookups, s.histogram.rows) for s in found
    ]


ONE = [(3, 2.0, 4.0, 6.0, 10)]
MORE = [*INDICES, 3, 3, 3]
TWO = [*ONE, (3, 1.0, 1.0, 3.0, 4)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((INDICES, OFFSETS), ONE),
        ((np.array(INDICES, np.int32), np.array([*OFFSETS, 6])), ONE),
        ((INDICES, None, LENGTHS), ONE),
        ((INDICES, [*OFFSETS, 6], [LENGTHS]), ONE),
        ((np.reshape(INDICES, (3, 2)),), ONE),
        ((INDICES, None, None, None, None, 3), ONE),
        ((INDICES,), [(6, 1.0, 4.0, 6.0, 10)]),
        ((INDICES, OFFSETS, None, 50), [(3, 2.0, 4.0, 6.0, 50)]),
        ((MORE, None, [LENGTHS, [1, 1, 1]]), TWO),
        ((MORE, [0, 2, 2, 6, 7, 8, 9], None, None, 2), TWO),
        ((MORE, [0, 2, 2, 6, 7, 8], [LENGTHS, [1, 1, 1]]), TWO),
        ((MORE, None, [LENGTHS, [1, 1, 1]], [100, 20]), [(*ONE[0][:4], 100), (*TWO[1][:4], 20)]),
        ((np.zeros((2, 3, 4), int),), [(3, 4.0, 1.0, 12.0, 1), (3, 4.0, 1.0, 12.0, 1)]),
    ],
)
def test_tables_told_in_every_way(arguments: Any, expected: list) -> None:
    names = ("indices", "offsets", "lengths", "rows", "tables", "batch")
    assert facts(count_indices(**dict(zip(names, arguments, strict=False)))) == expected


def test_what_is_counted() -> None:
    (found,) = count_indices(INDICES, OFFSETS)
    assert found.spread == pytest.approx(np.std(LENGTHS))
    assert found.histogram.counts[:3] == (3, 0, 1)
    assert not any(found.histogram.counts[3:])
    with pytest.warns(UserWarning, match="1 of 3 tables have no lookups"):
        several = count_indices(MORE, lengths=[LENGTHS, [0, 0, 0], [1, 1, 1]])
    assert [s.number for s in several] == [0, 2] and several[1].to_table(8).name == "table 2"


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
        *(
            ({"indices": [0, 1], "offsets": bad}, "offsets must rise from 0")
            for bad in ([1, 2], [0, 2, 1, 2], [0, 5], [])
        ),
        ({"indices": [0, 1], "offsets": [0.0, 1.0]}, "offsets is an array of float64"),
        ({"indices": [0, 1, 2], "tables": 2}, "3 samples do not divide by tables = 2"),
        ({"indices": [0, 1, 2], "tables": 0}, "tables is 0"),
        ({"indices": [0, 1, 2], "batch": -1}, "batch is -1"),
    ],
)
def test_indices_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_indices(**arguments)


def test_what_is_told_of_drawn_lookups() -> None:
    law = Zipf(50_000, 0.95)
    ranks = np.arange(1.0, law.rows + 1) ** -law.exponent
    drawn = np.random.default_rng(2).choice(law.rows, 80_000, p=ranks / ranks.sum())
    drawn = np.random.default_rng(3).permutation(law.rows)[drawn]
    (part,) = count_indices(drawn.reshape(4000, 20), rows=law.rows)
    assert abs(part.fit.exponent - 0.95) < 2 * part.fit.stderr < 0.02
    recorded, fitted = part.to_table(64), part.to_table(64, itemsize=2, law="zipf", name="clicks")
    assert (recorded.rows, recorded.pooling, recorded.spread, recorded.itemsize) == (
        50_000,
        20,
        0,
        4,
    )
    assert (
        isinstance(recorded.distribution, ReuseHistogram) and recorded.exponent == part.fit.exponent
    )
    assert fitted.distribution == Zipf(50_000, part.fit.exponent) and (
        fitted.itemsize,
        fitted.name,
    ) == (2, "clicks")
    for table in (recorded, fitted):
        for lookups in (20_000, 80_000):
            found = float(unique_rows(table.distribution, lookups))
            assert found == pytest.approx(float(unique_rows(law, lookups)), rel=0.02)
    with pytest.raises(ValueError, match="law is 'uniform'"):
        part.to_table(64, law="uniform")


def test_files_of_numpy(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.reshape(INDICES, (3, 2)))
    np.savez(tmp_path / "parts.npz", indices=INDICES, offsets=OFFSETS)
    np.savez_compressed(
        tmp_path / "all.npz", lengths=[LENGTHS], indices=INDICES, offsets=[*OFFSETS, 6]
    )
    for name in ("one.npy", "parts.npz", "all.npz"):
        assert facts(read_indices(tmp_path / name)) == [(3, 2.0, 4.0, 6.0, 10)]
    tables = read_tables(tmp_path / "parts.npz", dim=16, rows=20)
    assert (tables.batch, tables.name, tables.tables[0].rows, tables.tables[0].dim) == (
        3,
        "parts",
        20,
        16,
    )
    with pytest.raises(ValueError, match="pass dim=, 64 for example"):
        read_tables(tmp_path / "one.npy")


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
        assert facts(read_indices(tmp_path / name)) == [(3, 2.0, 4.0, 6.0, 10)]
    assert read_tables(tmp_path / "set2.pt.gz", dim=8).name == "set2"
    assert facts(count_indices(indices, offsets, lengths)) == [(3, 2.0, 4.0, 6.0, 10)]
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
