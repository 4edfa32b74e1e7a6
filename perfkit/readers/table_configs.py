"""Sets of embedding tables, from frames, from files, and from publications."""

import csv
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from perfkit.ground.files import LARGEST_TEXT, MOST_ROWS, check_values, group_rows, reading
from perfkit.ground.forks import check_threads
from perfkit.ground.results import read_records
from perfkit.ground.units import (
    check_choice,
    check_positive,
    escape,
    is_listed,
    join_place,
    read_number,
    show,
)
from perfkit.models.distributions import ReuseHistogram, Zipf
from perfkit.models.skew import fit_zipf
from perfkit.readers.index_arrays import read_indices
from perfkit.readers.tbe_configs import parse_tbe_config
from perfkit.workloads.tables import EmbeddingTable, TableSet

_COLUMNS = ("rows", "dim", "pooling", "exponent", "itemsize", "name")
#: Most columns of a CSV file [-].
_MOST_COLUMNS = 1000
_FOREIGN = {
    "num_embeddings": "rows",
    "embedding_dim": "dim",
    "E": "rows",
    "D": "dim",
    "L": "pooling",
}
_ARRAYS = (".npy", ".npz", ".pt", ".pth", ".pt.gz")
_SUFFIXES = (".csv", ".parquet", ".json", *_ARRAYS)
#: Tables of a file, and other fields of the set.
_Tables: TypeAlias = tuple[list[EmbeddingTable], dict[str, Any]]


def read_tables(
    source: Any,
    *,
    batch: int | None = None,
    dim: int | None = None,
    rows: int | Sequence[int] | None = None,
    tables: int | None = None,
    itemsize: int = 4,
    law: str = "histogram",
) -> TableSet:
    """Read a set of embedding tables.

    Parameters
    ----------
    source : str, Path or frame
        One of: a pandas or polars frame, or a CSV, Parquet or JSON file. Its columns are ``rows``
        and ``dim`` and, where they differ from the defaults of `EmbeddingTable`, ``pooling``,
        ``exponent``, ``itemsize`` [B] and ``name``; the names of TorchRec, ``num_embeddings`` and
        ``embedding_dim``, and of FBGEMM, ``E``, ``D`` and ``L``, are known too. A JSON file with a
        TBEDataConfig of FBGEMM, or a list of them. A file of recorded indices, see
        `perfkit.readers.index_arrays.read_indices`. A name from `list_published`.
    batch : int, optional
        Samples of one iteration over all ranks; by default from the file, otherwise 65,536 [-].
    dim : int, optional
        Columns of every table, for sources without them: recorded indices and published histograms
        [-].
    rows : int or sequence of int, optional
        Rows of every table or of each, for the same sources; for recorded indices by default the
        largest plus one [-].
    tables : int, optional
        Number of tables of recorded indices, see `perfkit.readers.index_arrays.count_indices` [-].
    itemsize : int, optional
        Bytes of one number, for sources without it [B].
    law : str, optional
        Popularity of recorded rows: ``histogram`` of their reuse, or the fitted ``zipf``.

    Returns
    -------
    tables : TableSet
        The tables, named after the source. Those of TBE, TorchRec and MLPerf use fused kernels.
        Change embedding, optimizer and other fields with `dataclasses.replace`.

    Raises
    ------
    ValueError
        For files that are missing, unreadable or ragged, for unknown columns, and for impossible
        sizes.

    Notes
    -----
    Nothing is unpickled: arrays are loaded with ``allow_pickle=False``, tensors with
    ``weights_only=True``.

    Examples
    --------
    >>> read_tables("mlperf-dlrm-dcnv2")
    TableSet('mlperf-dlrm-dcnv2': 26 tables, 105 GB, 214 lookups a sample, batch 65,536)
    >>> read_tables("dlrm-datasets-2021", dim=64, rows=1_000_000)
    TableSet('dlrm-datasets-2021': 856 tables, 219 GB, 13,535 lookups a sample, batch 65,536)
    """
    check_choice("law", law, ("histogram", "zipf"))
    _check_itemsize(itemsize)
    framed = not isinstance(source, str | Path)
    if framed and not (isinstance(source, Mapping | list | tuple) or hasattr(source, "columns")):
        raise ValueError(
            f"source is {show(source)}; it must be a pandas or polars frame, or lists by name; or the "
            "name of a file or of a published set, a str or a Path"
        )
    name, suffix = ("source", "") if framed else (str(source), _find_suffix(source))
    bare = suffix in _ARRAYS or (name in _histograms() and not framed)
    has_sizes = dim is not None or rows is not None or tables is not None
    if has_sizes and not bare:
        raise ValueError(
            f"{escape(name, 200)} has rows and columns of its own; leave dim, rows and tables out"
        )
    if bare and dim is None:
        raise ValueError(
            f"{escape(name, 200)} lacks the columns of its tables; pass dim=, 64 for example"
        )
    width = int(check_positive("dim", dim, integer=True)) if bare else 0
    if framed:
        # empty cells of a pandas frame hold NaN
        records = enumerate(read_records("source", source))
        places = (
            (f"source row {i}", {k: v for k, v in row.items() if not _is_missing(v)})
            for i, row in records
        )
        with reading("source", "change the tables"):
            found, facts = _make_tables(places, "source", itemsize)
    elif suffix in _ARRAYS:
        statistics = read_indices(source, rows=rows, tables=tables, batch=batch)
        found = [part.to_table(width, itemsize=itemsize, law=law) for part in statistics]
        facts = {"batch": statistics[0].bags}
    elif suffix:
        with reading(source, f"pass a readable {suffix} file", most=LARGEST_TEXT):
            found, facts = _READERS[suffix](Path(source), itemsize)
    else:
        found, facts = _read_published(name, width, rows, itemsize, law)
    if not framed:
        facts["name"] = Path(name).name[: -len(suffix)] if suffix else name
    if batch is not None:
        facts["batch"] = batch
    with reading(name, "change the tables"):
        return TableSet(tuple(found), **facts)


def _find_suffix(source: str | Path) -> str:
    """Suffix of a file with tables, empty for a published set."""
    lower, shown = Path(source).name.lower(), escape(source, 200)
    suffix = next(
        (own for own in sorted(_SUFFIXES, key=len, reverse=True) if lower.endswith(own)), ""
    )
    if not suffix and not os.path.exists(source):
        check_choice("source", str(source), list_published())
    elif not suffix or not os.path.isfile(source):
        what = (
            f"has another suffix than {', '.join(_SUFFIXES)}"
            if os.path.isfile(source)
            else "is no file"
        )
        raise ValueError(
            f"{shown} {what}; name such a file, or one of {', '.join(list_published())}"
        )
    return suffix


def _check_itemsize(itemsize: Any) -> None:
    if read_number(itemsize) not in (1, 2, 4, 8):
        raise ValueError(
            f"itemsize is {show(itemsize)}; it must be 1, 2, 4 or 8 bytes, not bits (fp32 is 4, fp16 is 2)"
        )


def _is_blank(value: Any) -> bool:
    """Whether a cell of a file holds nothing, or no text."""
    return value is None or (isinstance(value, str) and not value)


def _is_missing(value: Any) -> bool:
    """Whether a cell of a frame is empty: also NaN, or what else pandas has in its place."""
    if isinstance(value, float):
        return math.isnan(value)
    return _is_blank(value) or type(value).__name__ in ("NAType", "NaTType")


def _make_tables(
    records: Iterable[tuple[str, Mapping[str, Any]]], name: str, itemsize: int
) -> _Tables:
    """Tables from records, each with its place in errors; empty cells take the default, TorchRec's
    tables are fused."""
    found, foreign = [], set[str]()
    for place, record in islice(records, MOST_ROWS + 1):
        given = {_FOREIGN.get(key, str(key)): value for key, value in record.items()}
        values = {"itemsize": itemsize} | {
            key: value for key, value in given.items() if not _is_blank(value)
        }
        foreign |= _FOREIGN.keys() & record
        if len(given) < len(record):
            twice = next(
                key for key in record if key in _FOREIGN and _FOREIGN[key] in {*record} - {key}
            )
            raise ValueError(
                f"{place} has {escape(twice, 40)} and {_FOREIGN[twice]}, which are the same; give one"
            )
        if "" in given:
            raise ValueError(
                f"{place} has a column without a name; write the file without an index, and its "
                f"first line with names: {', '.join(_COLUMNS)}"
            )
        for key in given:
            join_place(place, key, _COLUMNS)
        if missing := [key for key in ("rows", "dim") if key not in values]:
            raise ValueError(
                f"{place} lacks {' and '.join(missing)}; give the rows and columns of the table"
            )
        with reading(place, "change the table"):
            for key, value in values.items():
                if key != "name" and is_listed(value):
                    raise ValueError(f"{key} is {show(value)}; it must be one number")
            _check_itemsize(values["itemsize"])
            found.append(EmbeddingTable(**values))
    _check_count(len(found), name)
    return found, {"embedding": "fused"} if foreign else {}


def _check_count(count: int, name: str) -> None:
    """Refuse more tables than any model has."""
    if count > MOST_ROWS:
        raise ValueError(f"{name} lists more than {MOST_ROWS:,} tables; leave some out")


def _read_csv(path: Path, itemsize: int) -> _Tables:
    def walk() -> Iterator[tuple[str, dict[str, Any]]]:
        for values in filter(lambda values: any(map(str.strip, values)), reader):
            place = f"{path.name} line {reader.line_num}"
            if len(values) != len(header):
                text = f"{place} has {len(values)} values for {len(header)} columns"
                if header[0].startswith("#"):
                    raise ValueError(f"{text}; the first line must name columns, without a comment")
                raise ValueError(f"{text}; write no thousands commas")
            cells = zip(header, map(str.strip, values), strict=True)
            yield place, {name: cell if name == "name" else _number(cell) for name, cell in cells}

    data = path.read_bytes()
    _check_count(data.count(b"\n") - data.count(b"\n\n") - 1, path.name)
    columns = data.partition(b"\n")[0].count(b",") + 1
    if columns > _MOST_COLUMNS:
        raise ValueError(
            f"{path.name} has {columns} columns; its first line must name columns: {', '.join(_COLUMNS)}"
        )
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = [column.strip() for column in next(reader, [])]
            if not header or len(set(header)) < len(header):
                what = "names a column twice" if header else "is empty"
                raise ValueError(
                    f"{path.name} {what}; its first line must name columns: {', '.join(_COLUMNS)}"
                )
            if len(header) == 1 and (other := re.search(r"\w\s*([;|\t])\s*\w", header[0])):
                raise ValueError(
                    f"{path.name} separates its columns by {show(other[1])}; separate values by commas"
                )
            return _make_tables(walk(), path.name, itemsize)
        except csv.Error as error:
            raise ValueError(
                f"{path.name} line {reader.line_num}: {error}; separate values by commas"
            ) from error


def _number(text: str) -> Any:
    """Value of a cell: a whole number, another one, or text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _read_parquet(path: Path, itemsize: int) -> _Tables:
    check_threads()
    import polars

    scan = polars.scan_parquet(path)
    _check_count(scan.select(polars.len()).collect().item(), path.name)
    rows = enumerate(scan.collect().iter_rows(named=True))
    return _make_tables(((f"{path.name} row {i}", row) for i, row in rows), path.name, itemsize)


def _read_json(path: Path, itemsize: int) -> _Tables:
    """A list of tables, alone or as ``tables``, or configurations of FBGEMM."""
    name = path.name
    try:
        text = path.read_bytes().decode("utf-8-sig")
        check_values(text, name)
        if '"T"' not in text:  # a table is one object
            _check_count(text.count("{") - 1, name)
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name} line {error.lineno} is no JSON: {error.msg}; write a list of tables"
        ) from error
    first = content[0] if isinstance(content, list) and content else content
    parts = ("T", "batch_params", "indices_params", "pooling_params")
    if isinstance(first, Mapping) and not first.keys().isdisjoint(parts):
        return _read_tbe(content, name, itemsize)
    entries = (
        content.get("tables")
        if isinstance(content, Mapping) and set(content) == {"tables"}
        else content
    )
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(
            f'{name} must hold a list of tables such as {{"rows": 1000, "dim": 64}}, or a TBEDataConfig'
        )
    return _make_tables(
        ((f"{name}[{i}]", entry) for i, entry in enumerate(entries)), name, itemsize
    )


def _read_tbe(content: Any, name: str, itemsize: int) -> _Tables:
    several, found, batches = isinstance(content, list), [], set()
    for i, config in enumerate(content if several else [content]):
        tables, batch = parse_tbe_config(
            config, place=f"{name}[{i}]" if several else name, itemsize=itemsize
        )
        found += [
            replace(table, name=f"{i}.{table.name}") if several else table for table in tables
        ]
        batches.add(batch)
        _check_count(len(found), name)
    if len(batches) > 1:
        shown = ", ".join(map(str, sorted(batches)))
        raise ValueError(f"{name} has batches of {shown}; use one file for each batch")
    return found, {"batch": batches.pop(), "embedding": "fused"}


_READERS: dict[str, Any] = {".csv": _read_csv, ".parquet": _read_parquet, ".json": _read_json}


# Published sets.


def list_published() -> list[str]:
    """List the table sets that come with perfkit.

    Returns
    -------
    names : list of str
        MLPerf's DLRM models, which have rows and columns, and data sets of which only the reuse is
        published.

    Examples
    --------
    >>> list_published()[:2]
    ['mlperf-dlrm-v1', 'mlperf-dlrm-dcnv2']
    """
    return [*group_rows("model", "published", "dlrm_tables.csv"), *_histograms()]


def _histograms() -> dict[str, list[dict[str, str]]]:
    """Bins of each published histogram by its name."""
    return group_rows("data_set", "published", "dlrm_reuse.csv")


def find_histogram(name: str, *, rows: int) -> tuple[ReuseHistogram, int, int]:
    """Find a published reuse histogram of all tables of a data set together.

    Parameters
    ----------
    name : str
        A data set of `list_published`.
    rows : int
        Rows of all tables together, which are not published [-].

    Returns
    -------
    histogram : ReuseHistogram
        Number of distinct rows by how often the batch looked them up.
    tables, batch : int
        Tables of the data set, and samples of the batch [-].

    Raises
    ------
    ValueError
        For an unknown name, and for fewer rows than were looked up.

    Notes
    -----
    Shares are published with three digits after the point. For rows with more than about 1,000
    lookups the published share of rows is therefore 0, though they get a third of all lookups.
    Where the share of rows is below 0.5 %, the number of rows is computed from the share of lookups
    and the middle of the bin (log-uniform; twice the lower end for the last bin). The resulting
    shares of lookups equal the published ones within 1 % of all lookups.

    References
    ----------
    .. [1] facebookresearch/dlrm_datasets, embedding_bag, locality_stats.txt, 2021 and 2022

    Examples
    --------
    >>> histogram, tables, batch = find_histogram("dlrm-datasets-2022-part-0", rows=10**9)
    >>> tables, batch, round(sum(histogram.counts))
    (788, 131072, 110259238)
    """
    bins = _histograms()[check_choice("name", name, _histograms())]
    tables, batch, lookups, unique = (
        int(bins[0][key]) for key in ("tables", "batch", "lookups", "unique_rows")
    )
    low, share, looked = (
        np.array([float(row[k]) for row in bins]) for k in ("above", "row_share", "lookup_share")
    )
    middle = np.array([1.0, 2.0, *low[2:16] / np.log(2.0), 2 * low[16]])
    counts = np.where(share >= 0.005, share * unique, looked * lookups / middle)
    counts *= unique / counts.sum()
    return ReuseHistogram(tuple(counts.tolist()), lookups, rows), tables, batch


def _read_published(name: str, dim: int, rows: Any, itemsize: int, law: str) -> _Tables:
    models = group_rows("model", "published", "dlrm_tables.csv")
    if name in models:
        sizes = [(int(row["rows"]), int(row["dim"]), float(row["pooling"])) for row in models[name]]
        found = [
            EmbeddingTable(*size, itemsize=itemsize, name=f"table {i}")
            for i, size in enumerate(sizes)
        ]
        return found, {"embedding": "fused"}
    if rows is None:
        raise ValueError(f"{name} lacks the rows of its tables; pass rows=, 1_000_000 for example")
    each, tables = (
        int(check_positive("rows", rows, integer=True)),
        int(_histograms()[name][0]["tables"]),
    )
    whole, _, batch = find_histogram(name, rows=tables * each)
    part, pooling = whole.resize(each), whole.lookups / batch / tables
    exponent = fit_zipf(part).exponent
    known = part if law == "histogram" else Zipf(each, exponent)
    found = [
        EmbeddingTable(each, dim, pooling, exponent, itemsize, f"table {i}", known)
        for i in range(tables)
    ]
    return found, {"batch": batch}
