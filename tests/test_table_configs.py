"""Sets of tables from every kind of source: frames, files of others, published models and data
sets; and bad input."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest

import perfkit as pk
from perfkit.models.distributions import ReuseHistogram, Uniform, Zipf, unique_rows
from perfkit.readers.table_configs import find_histogram, list_published, read_tables
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.tables import EmbeddingTable
from tests import samples

ROWS = [
    EmbeddingTable(1_000_000, 64, 8.5, 1.05, 2, "clicks"),
    EmbeddingTable(300, 16, 1.0, 0.0, 2, "country"),
]
CSV = (
    "name,rows,dim,pooling,exponent,itemsize\nclicks,1e6,64,8.5,1.05,2\n\n country , 300,16,1,0,2\n"
)


@pytest.fixture
def write(tmp_path: Path):
    def inner(name: str, content: Any) -> Path:
        path = tmp_path / name
        if isinstance(content, dict):
            polars.DataFrame(content).write_parquet(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return inner


#: The tables as columns, and as records.
COLUMNS = {
    "name": [table.name for table in ROWS],
    "rows": [table.rows for table in ROWS],
    "dim": [table.dim for table in ROWS],
    "pooling": [table.pooling for table in ROWS],
    "exponent": [table.exponent for table in ROWS],
    "itemsize": [table.itemsize for table in ROWS],
}
RECORDS = [
    dict(zip(COLUMNS, values, strict=True)) for values in zip(*COLUMNS.values(), strict=True)
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("set.csv", CSV),
        ("bom.csv", b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode()),
        ("set.json", json.dumps(RECORDS)),
        ("named.json", json.dumps({"tables": RECORDS})),
        ("set.parquet", COLUMNS),
    ],
)
def test_the_same_tables_from_every_kind_of_file(write, name: str, content: Any) -> None:
    file = write(name, content)
    tables = read_tables(file, batch=4096)
    assert list(tables) == ROWS
    assert tables.batch == 4096
    assert tables.name == file.stem
    assert read_tables(str(file)).batch == 65536


def test_reading_tables_is_part_of_the_interface() -> None:
    assert pk.read_tables is read_tables


def test_a_sample_of_tables_holds_what_its_file_says() -> None:
    tables = read_tables(samples.FOLDER / "tables.csv")
    sizes = [(t.name, t.rows, t.dim, t.pooling, t.exponent) for t in tables]
    assert sizes == [
        ("user", 40_000_000, 64, 1, 1.05),
        ("country", 250, 16, 1, 0.6),
        ("clicks", 1_000_000, 128, 25.5, 1.15),
    ]
    assert tables.embedding == "separate"


def test_a_sample_with_names_of_torchrec_uses_its_fused_kernels() -> None:
    with pytest.warns(UserWarning, match=r"the pooling factor of 2 tables \('user' first\) is not"):
        tables = read_tables(samples.FOLDER / "tables_torchrec.csv")
    assert [(t.name, t.rows, t.dim) for t in tables] == [
        ("user", 40_000_000, 64),
        ("country", 250, 16),
    ]
    assert tables.embedding == "fused"


def test_columns_and_cells_that_are_missing_have_defaults(write) -> None:
    in_sequential = read_tables(write("modules.csv", "name,module,rows,dim\n7,0,1000,64\n")).tables[
        0
    ]
    assert (in_sequential.name, in_sequential.module) == ("7", "0")
    table = read_tables(write("few.csv", "dim,rows\n64,1000\n"), itemsize=2).tables[0]
    assert table == EmbeddingTable(1000, 64, itemsize=2)
    mixed = '[{"rows": 9, "dim": 4}, {"rows": 9, "dim": 4, "pooling": 2, "name": "b"}]'
    assert [t.pooling for t in read_tables(write("mixed.json", mixed))] == [1, 2]
    frame = pandas.DataFrame({"rows": [1000, 2000], "dim": [16, 16], "exponent": [1.05, None]})
    assert [table.exponent for table in read_tables(frame).tables] == [
        1.05,
        EmbeddingTable(1000, 16).exponent,
    ]


TORCHREC = {
    "num_embeddings": [1000, 10**6],
    "embedding_dim": [16, 64],
    "pooling": [2.0, 20.0],
    "name": ["a", "b"],
}
FBGEMM = dict(zip(("E", "D", "L", "name"), TORCHREC.values(), strict=True))
OWN = dict(zip(("rows", "dim", "pooling", "name"), TORCHREC.values(), strict=True))


@pytest.mark.parametrize("columns", [TORCHREC, FBGEMM, OWN], ids=["TorchRec", "FBGEMM", "perfkit"])
def test_frames_and_files_with_names_of_others_are_the_same_tables(
    columns: dict[str, Any], tmp_path: Path
) -> None:
    wanted = (EmbeddingTable(1000, 16, 2.0, name="a"), EmbeddingTable(10**6, 64, 20.0, name="b"))
    frame = polars.DataFrame(columns)
    frame.write_csv(tmp_path / "mine.csv")
    for source in (
        columns,
        frame,
        pandas.DataFrame(columns),
        frame.to_dicts(),
        tmp_path / "mine.csv",
    ):
        found = read_tables(source, batch=64)
        assert found.tables == wanted
        assert found.batch == 64
        assert found.embedding == ("separate" if columns is OWN else "fused")


#: A number of more digits than Python reads, and lists inside of lists without end.
HUGE = "9" * 5000
NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("set.csv", "", r"set\.csv is empty; its first line must name columns"),
        ("set.csv", "rows,dim\n", "tables is empty"),
        (
            "set.csv",
            "rows,dimm\n1,1\n",
            r"set\.csv line 2\.dimm is not known; known here are rows, .*did you mean dim\?",
        ),
        ("set.csv", "rows,dim,pool\n1,1,1\n", r"2\.pool is not known.*did you mean pooling\?"),
        ("set.csv", "rows,dim,pool_factor\n1,1,1\n", r"did you mean pooling\?"),
        ("set.csv", "rows,dim,rows\n1,1,1\n", "names a column twice"),
        (
            "set.csv",
            "rows,dim\n1000,64\n1,000,64\n",
            "line 3 has 3 values for 2 columns; write no thousands commas",
        ),
        ("set.csv", "dim,pooling\n64,1\n", r"line 2 lacks rows; give the rows and columns"),
        (
            "set.csv",
            "rows,dim\n40M,64\n",
            r"line 2: rows is '40M'; it must be a whole number above 0",
        ),
        ("set.csv", f"rows,dim\n{HUGE},64\n", "line 2: rows is"),
        (
            "set.csv",
            "rows,dim,pooling\n10,4,11\n",
            r"set\.csv: pooling of 'table 0' is 11; .* not of the batch",
        ),
        (
            "set.csv",
            "rows,dim,itemsize\n10,4,32\n",
            r"line 2: itemsize is 32; it must be 1, 2, 4 or 8 bytes, not bits",
        ),
        ("set.csv", 'rows,dim\n10,"4\n', r"set\.csv line 2: unexpected end of data"),
        ("set.csv", "rows,dim,name\n10,4,a\n20,4,a\n", r"set\.csv: two tables are named 'a'"),
        ("set.csv", b"rows,dim\n\xff\xfe,4\n", r"set\.csv cannot be read: 'utf-8' codec"),
        ("set.json", "", r"set\.json cannot be read: it is empty"),
        ("set.json", NESTED, r"set\.json cannot be read"),
        ("set.json", '[{"rows": 1,\n "dim": }]', r"set\.json line 2 is no JSON"),
        ("set.json", '{"rows": 10}', r"set\.json must hold a list of tables"),
        (
            "set.json",
            '[{"rows": 10, "dim": 4}, {"rows": 10, "dims": 4}]',
            r"set\.json\[1\]\.dims is not known",
        ),
        (
            "set.json",
            '[{"rows": 10, "dim": 4, "name": 7}]',
            r"set\.json\[0\]: name is 7; it must be text",
        ),
        ("set.parquet", b"PAR1 but not really PAR1", r"set\.parquet cannot be read"),
        ("set.parquet", {"rows": [10, None], "dim": [4, 4]}, r"set\.parquet row 1 lacks rows"),
        ("set.parquet", {"rows": [10.0, 10.5], "dim": [4, 4]}, r"set\.parquet row 1: rows is 10.5"),
        (
            "set.parquet",
            {"rows": [10], "dim": [4], "exponent": [float("nan")]},
            r"parquet row 0: exponent is nan",
        ),
    ],
)
def test_files_that_cannot_be(write, name: str, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tables(write(name, content))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            "mlperf-dlrm-v9",
            {},
            r"source is 'mlperf-dlrm-v9'; known are .*did you mean 'mlperf-dlrm-v1'\?",
        ),
        ("none.csv", {}, r"none\.csv is no file; name such a file, or one of mlperf"),
        (Path(), {}, "is no file"),
        (Path(__file__), {}, r"test_table_configs\.py has another suffix than \.csv, \.parquet"),
        ("mlperf-dlrm-v1", {"itemsize": 32}, "itemsize is 32; it must be 1, 2, 4 or 8 bytes"),
        ("mlperf-dlrm-v1", {"batch": 0}, "mlperf-dlrm-v1: batch is 0"),
        ("mlperf-dlrm-v1", {"law": "normal"}, "law is 'normal'"),
        ("mlperf-dlrm-v1", {"rows": 5}, "has rows and columns of its own"),
        ("dlrm-datasets-2021", {}, "lacks the columns"),
        (
            "dlrm-datasets-2021",
            {"dim": 64},
            "dlrm-datasets-2021 lacks the rows of its tables; pass rows=",
        ),
        (
            "dlrm-datasets-2021",
            {"dim": 64, "rows": 1000},
            "add up to 1.28436e.08 distinct rows; .* into 856000 rows",
        ),
        ("dlrm-datasets-2021", {"dim": -64, "rows": 10**6}, "dim is -64"),
        (5, {}, "source is 5; it must be a pandas or polars frame, or lists by name"),
        (
            {"rows": [10, 20], "dim": [4]},
            {},
            "source has columns of different lengths: 'rows' 2, 'dim' 1; give each column one value",
        ),
        (pandas.DataFrame({"rows": [10]}), {}, "source row 0 lacks dim; give"),
        (
            polars.DataFrame({"rows": [10], "dims": [4]}),
            {},
            "source row 0.dims is not known.*did you mean dim",
        ),
        (pandas.DataFrame({"rows": [10, -1], "dim": [4, 4]}), {}, "source row 1: rows is -1"),
        (
            polars.DataFrame({"E": [10], "D": [4]}),
            {"dim": 4},
            "source has rows and columns of its own",
        ),
    ],
)
def test_sources_that_cannot_be(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tables(source, **options)


CONFIG = {
    "T": 3,
    "E": 9,
    "D": 4,
    "batch_params": {"B": 1},
    "pooling_params": {"L": 1},
    "indices_params": {"heavy_hitters": [], "zipf_q": 1, "zipf_s": 1},
}
SIX = range(6)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("many.csv", "\n".join(["rows,dim", *("10,4" for _ in SIX), ""])),
        ("many.json", json.dumps([{"rows": 10, "dim": 4} for _ in SIX])),
        ("tbe.json", json.dumps([CONFIG, CONFIG])),
        ("many.parquet", {"rows": [10 for _ in SIX], "dim": [4 for _ in SIX]}),
    ],
)
def test_files_of_more_tables_than_any_model_has(
    write, monkeypatch: pytest.MonkeyPatch, name: str, content: Any
) -> None:
    monkeypatch.setattr("perfkit.readers.table_configs.MOST_ROWS", 5)
    with pytest.raises(ValueError, match=rf"{name} lists more than 5 tables"):
        read_tables(write(name, content))


def test_tables_of_mlperf_run_as_one_kernel() -> None:
    assert {read_tables(f"mlperf-dlrm-{name}").embedding for name in ("v1", "dcnv2")} == {"fused"}


def test_published_tables_are_those_of_the_validation_data(shared_data: Path) -> None:
    with open(shared_data / "embedding" / "mlperf_dlrm_tables.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {
        "mlperf-dlrm-v1": ("dlrm_v1_rows", "dlrm_v1_hotness"),
        "mlperf-dlrm-dcnv2": ("dcnv2_rows", "dcnv2_multi_hot"),
    }
    for name, (size, pooling) in columns.items():
        assert [(t.rows, t.pooling) for t in read_tables(name)] == [
            (int(r[size]), float(r[pooling])) for r in rows
        ]
    preset = [(t.rows, t.dim, t.pooling) for t in DLRM("dlrm-mlperf").tables]
    assert [(t.rows, t.dim, t.pooling) for t in read_tables("mlperf-dlrm-v1")] == preset
    assert read_tables("mlperf-dlrm-dcnv2", itemsize=2).nbytes == 204_184_588 * 128 * 2
    with open(shared_data / "embedding" / "dlrm_datasets_reuse_histograms.csv", newline="") as file:
        published = [float(row["frac_of_lookups"]) for row in csv.DictReader(file)]
    for i, name in enumerate(name for name in list_published() if name.startswith("dlrm-datasets")):
        histogram = find_histogram(name, rows=10**9)[0]
        shares = np.array(histogram.counts) * histogram.accesses() / histogram.lookups
        assert np.abs(shares - published[17 * i : 17 * i + 17]).max() < 0.01
        assert shares.sum() == pytest.approx(1)


def test_published_reuse() -> None:
    """Distinct rows of the whole batch are those published; the tables share them evenly."""
    name = "dlrm-datasets-2021"
    found = read_tables(name, dim=64, rows=1_000_000, itemsize=2)
    assert len(found) == 856
    assert isinstance(found.tables[0].distribution, ReuseHistogram)
    rows = sum(float(unique_rows(t.distribution, found.batch * t.pooling)) for t in found)
    assert rows == pytest.approx(128_435_723)
    fitted = read_tables(name, dim=64, rows=1_000_000, law="zipf").tables[0]
    assert fitted.distribution == Zipf(1_000_000, fitted.exponent)
    assert 0.8 < fitted.exponent < 1.2
    with pytest.raises(ValueError, match="name is 'none'"):
        find_histogram("none", rows=10)


def test_tables_with_a_law() -> None:
    law = Zipf(1000, 1.1, heavy_hitters=(0.3,))
    table = EmbeddingTable(1000, 16, law=law)
    assert table.distribution is law
    assert table.exponent == 1.1
    assert hash(table) == hash(EmbeddingTable(1000, 16, law=law))
    assert table != EmbeddingTable(1000, 16, exponent=1.1)
    assert EmbeddingTable(250, 16, law=law).distribution == law.resize(250)
    assert EmbeddingTable(250, 16, law=Uniform(1000)).distribution == Uniform(250)
    bad = {
        "law is 'zipf'; it must be a Distribution": {"law": "zipf"},
        "spread is -1": {"spread": -1},
        "law has 10 rows, the table has 1000": {"law": Uniform(10)},
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=message):
            EmbeddingTable(1000, 16, **arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows,num_embeddings,dim\n10,99,4\n", "num_embeddings and rows, which are the same"),
        ("num_embeddings,rows,dim\n10,99,4\n", "num_embeddings and rows, which are the same"),
        ("E,num_embeddings,dim\n10,99,4\n", "num_embeddings and E, which are the same"),
        (",rows,dim\n0,10,4\n", "a column without a name; write the file without an index"),
        ("# mine\nrows,dim\n10,4\n", "the first line must name columns, without a comment"),
    ],
)
def test_a_head_that_names_no_table_says_why(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tables.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_tables(tmp_path / "tables.csv")
