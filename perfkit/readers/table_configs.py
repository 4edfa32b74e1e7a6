"""Sets of embedding tables, from frames, from files, and from publications."""

import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
from perfkit.readers.planner_statistics import (
    LOG_SUFFIXES,
    has_statistics,
    is_file_name,
    is_list_of_lines,
    read_planner_statistics,
)
from perfkit.readers.printed_plans import list_tables_of
from perfkit.readers.tbe_configs import parse_tbe_config
from perfkit.readers.torchrec_models import explain_object, find_configs, list_constraints
from perfkit.readers.torchrec_tables import (
    OUTPUT_DTYPE,
    TorchrecTable,
    is_torchrec,
    list_notes,
    name_fields,
    read_flag,
    translate_fields,
    warn_of,
)
from perfkit.workloads.sizes import check_size
from perfkit.workloads.tables import EmbeddingTable, TableSet

_COLUMNS = (
    "rows",
    "dim",
    "pooling",
    "exponent",
    "itemsize",
    "name",
    "module",
    "kernel",
    "load_factor",
    "weighted",
    "pooled",
    "dtype",
    "num_features",
)
_CONSTRAINTS_OF_OTHERS = (
    "constraints are for configurations, models and frames of TorchRec; leave them out"
)
#: Most columns of a CSV file [-].
_MOST_COLUMNS = 1000
#: perfkit's name of a column by that of TorchRec or FBGEMM.
_FOREIGN = {
    "num_embeddings": "rows",
    "embedding_dim": "dim",
    "E": "rows",
    "D": "dim",
    "L": "pooling",
}
#: TorchRec's and FBGEMM's names of the size of a table by perfkit's.
_SIZES_OF_TORCHREC = {"rows": "num_embeddings", "dim": "embedding_dim"}
_SIZES_OF_FBGEMM = {"rows": "E", "dim": "D"}
#: Fields of TorchRec that errors name.
_USUAL_FIELDS = (*_SIZES_OF_TORCHREC.values(), "data_type", "feature_names", "pooling_factor")
#: Column that is meant by a name which no source has, where that is not the closest spelling.
_MEANT = {"pool": "pooling", "pool_factor": "pooling", "pooling_size": "pooling"}
#: Keys by which a TBEDataConfig is known.
_TBE_PARTS = ("T", "batch_params", "indices_params", "pooling_params")
_ARRAYS = (".npy", ".npz", ".pt", ".pth", ".pt.gz")
_SUFFIXES = (".csv", ".parquet", ".json", *_ARRAYS, *LOG_SUFFIXES)


class _Contents(NamedTuple):
    """What a source holds: tables, the fields of their set that it names, None for others, and what
    is assumed or left out of it, in words."""

    tables: list[EmbeddingTable]
    batch: int | None = None
    embedding: str | None = None
    notes: Sequence[str] = ()
    output_dtype: str | None = None


class _Record(NamedTuple):
    """Values of one table by column, its place in errors, and fields of newer versions of TorchRec
    that it has besides."""

    place: str
    values: Mapping[Any, Any]
    unknown: Sequence[str] = ()


def read_tables(
    source: Any,
    *,
    batch: int | None = None,
    dim: int | None = None,
    rows: int | Sequence[int] | None = None,
    tables: int | None = None,
    itemsize: int | None = None,
    law: str = "histogram",
    constraints: Mapping[str, Any] | None = None,
) -> TableSet:
    """Read a set of embedding tables.

    Parameters
    ----------
    source : str, Path, frame, model or sequence
        One of the following.

        - A pandas or polars frame, a list of dicts, or a CSV, Parquet or JSON file. Its columns are
          ``rows`` and ``dim`` and, where they differ from the defaults of `EmbeddingTable`,
          ``pooling``, ``exponent``, ``itemsize`` [B], ``name``, ``module``, ``kernel``,
          ``load_factor``, ``weighted`` and ``pooled``. The fields of TorchRec's configurations are known, too
          (``num_embeddings``, ``embedding_dim``, ``data_type``, ``feature_names``,
          ``pooling_factor``, ...), as are ``E``, ``D`` and ``L`` of FBGEMM. ``pooling`` is that of
          a sample, over all features of a table; ``pooling_factor`` is that of each feature. The
          ``feature_names`` of a cell are a list, or text with commas between names; a table without
          them has one feature.
        - ``EmbeddingBagConfig`` and ``EmbeddingConfig`` of TorchRec: one, or a list.
        - A model of TorchRec, sharded or not. Each table keeps the path of its collection as
          `EmbeddingTable.module`.
        - What TorchRec's planner prints, as text, as lines or in a file; `perfkit.read_plan` reads
          the plan in it.
        - A JSON file with a TBEDataConfig of FBGEMM, or a list of them.
        - A file of recorded indices, see `perfkit.readers.index_arrays.read_indices`.
        - A name from `list_published`.
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
        Bytes of one number, for sources without it; 4 by default [B].
    law : str, optional
        Popularity of recorded rows: ``histogram`` of their reuse, or the fitted ``zipf``.
    constraints : mapping, optional
        TorchRec's ParameterConstraints by the name of their table, for frames, configurations and
        models. Pooling factors, weighting, the compute kernel and the load factor are read;
        `read_parameter_constraints` reads where a table may be placed.

    Returns
    -------
    tables : TableSet
        The tables, named after the source. Those of TBE, TorchRec and MLPerf use fused kernels.
        Change embedding, optimizer and other fields with `dataclasses.replace`.

    Raises
    ------
    ValueError
        For files that are missing, unreadable or ragged, for unknown columns, for impossible
        sizes, and for constraints of unknown tables.

    Warns
    -----
    UserWarning
        Once, of what is assumed or left out of tables of TorchRec: pooling factors that nothing
        tells, and fields that are not used.

    Notes
    -----
    Nothing is unpickled: arrays are loaded with ``allow_pickle=False``, tensors with
    ``weights_only=True``.

    Examples
    --------
    >>> read_tables("mlperf-dlrm-dcnv2")
    TableSet('mlperf-dlrm-dcnv2': 26 tables, 105 GB, 214 lookups a sample, batch 65,536)
    >>> user = {"num_embeddings": 10**6, "embedding_dim": 64, "data_type": "FP16", "pooling_factor": 20}
    >>> read_tables([user])
    TableSet('tables': 1 tables, 128 MB, 20 lookups a sample, batch 65,536)
    >>> read_tables("dlrm-datasets-2021", dim=64, rows=1_000_000)
    TableSet('dlrm-datasets-2021': 856 tables, 219 GB, 13,535 lookups a sample, batch 65,536)
    """
    check_choice("law", law, ("histogram", "zipf"))
    if itemsize is not None:
        _check_itemsize(itemsize)
    has_sizes = dim is not None or rows is not None or tables is not None
    if _is_printed(source):
        if has_sizes:
            raise ValueError(
                "statistics of a planner have rows and columns of their own; leave dim, rows and "
                "tables out"
            )
        if constraints is not None:
            raise ValueError(_CONSTRAINTS_OF_OTHERS)
        return _read_printed(source, batch, itemsize)
    size = itemsize or 4
    is_frame = not isinstance(source, str | Path)
    if is_frame:
        _refuse_others(source)
    name = "source" if is_frame else str(source)
    suffix = "" if is_frame else _find_suffix(source)
    is_published = not is_frame and not suffix
    lacks_sizes = suffix in _ARRAYS or (is_published and name in _histograms())
    if constraints is not None and not is_frame:
        raise ValueError(_CONSTRAINTS_OF_OTHERS)
    if has_sizes and not lacks_sizes:
        raise ValueError(
            f"{escape(name, 200)} has rows and columns of its own; leave dim, rows and tables out"
        )
    if lacks_sizes and dim is None:
        raise ValueError(
            f"{escape(name, 200)} lacks the columns of its tables; pass dim=, 64 for example"
        )
    width = int(check_positive("dim", dim, integer=True)) if lacks_sizes else 0
    if is_frame:
        with reading("source", "change the tables", told=True):
            contents = _make_tables(_walk_objects(source), "source", size, constraints)
    elif suffix in _ARRAYS:
        statistics = read_indices(source, rows=rows, tables=tables, batch=batch)
        made = [part.to_table(width, itemsize=size, law=law) for part in statistics]
        contents = _Contents(made, batch=statistics[0].bags)
    elif suffix:
        with reading(source, f"pass a readable {suffix} file", most=LARGEST_TEXT):
            contents = _READERS[suffix](Path(source), size)
    else:
        contents = _read_published(name, width, rows, size, law)
    fields: dict[str, Any] = {}
    if not is_frame:
        fields["name"] = Path(name).name[: -len(suffix)] if suffix else name
    if contents.embedding is not None:
        fields["embedding"] = contents.embedding
    if contents.output_dtype is not None:
        fields["output_dtype"] = contents.output_dtype
    if batch is not None:
        fields["batch"] = batch
    elif contents.batch is not None:
        fields["batch"] = contents.batch
    warn_of(escape(name, 200), contents.notes, stacklevel=2)
    with reading(name, "change the tables"):
        return TableSet(tuple(contents.tables), **fields)


def _is_printed(source: Any) -> bool:
    """Whether a source is what TorchRec's planner prints, or names a file of it."""
    if isinstance(source, str):
        return is_file_name(source) or has_statistics(source)
    if isinstance(source, Path):
        return is_file_name(str(source))
    return is_list_of_lines(source)


def _read_printed(
    source: str | Path | Sequence[str], batch: int | None, itemsize: int | None
) -> TableSet:
    """The tables of what TorchRec's planner prints."""
    origin = "source"
    fields: dict[str, Any] = {}
    if isinstance(source, Path) or (isinstance(source, str) and is_file_name(source)):
        origin = escape(source, 200)
        fields["name"] = Path(source).stem
    statistics = read_planner_statistics(source, origin=origin)
    tables, notes = list_tables_of(statistics, itemsize=itemsize, origin=origin)
    if batch is not None:
        fields["batch"] = batch
    elif statistics.batch is not None and statistics.ranks is not None:
        fields["batch"] = statistics.batch * statistics.ranks
    warn_of(origin, notes, stacklevel=3)
    with reading(origin, "change the tables"):
        return TableSet(tuple(tables), embedding="fused", output_dtype=OUTPUT_DTYPE, **fields)


def _find_suffix(source: str | Path) -> str:
    """Suffix of a file with tables, empty for a published set."""
    lower = Path(source).name.lower()
    suffixes = [suffix for suffix in _SUFFIXES if lower.endswith(suffix)]
    suffix = max(suffixes, key=len, default="")
    if not suffix and not os.path.exists(source):
        check_choice("source", str(source), list_published())
        return suffix
    is_file = os.path.isfile(source)
    if suffix and is_file:
        return suffix
    fault = f"has another suffix than {', '.join(_SUFFIXES)}" if is_file else "is no file"
    raise ValueError(
        f"{escape(source, 200)} {fault}; name such a file, or one of {', '.join(list_published())}"
    )


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


def _refuse_others(source: Any) -> None:
    """Refuse an object that is no frame and has no tables, and say what it is if that is known."""
    with reading("source", "pass configurations or a model of TorchRec", told=True):
        known = explain_object(source)
        if known is not None:
            raise ValueError(f"source is {known}")
        is_torchrec_object = find_configs(source) is not None
    is_frame = isinstance(source, Mapping | list | tuple) or hasattr(source, "columns")
    if not is_frame and not is_torchrec_object:
        raise ValueError(
            f"source is {show(source)}; it must be a pandas or polars frame, or lists by name; "
            "configurations or a model of TorchRec; or the name of a file or of a published set, a str "
            "or a Path"
        )


def _walk_objects(source: Any) -> Iterator[_Record]:
    """Configurations of TorchRec, or rows of a frame; empty cells of a pandas frame hold NaN."""
    configs = find_configs(source)
    if configs is not None:
        for config in configs:
            yield _Record(config.place, config.values, config.unknown)
        return
    for number, row in enumerate(read_records("source", source)):
        values = {column: cell for column, cell in row.items() if not _is_missing(cell)}
        yield _Record(f"source row {number}", values)


def _make_tables(
    records: Iterable[_Record],
    name: str,
    itemsize: int,
    constraints: Mapping[str, Any] | None = None,
) -> _Contents:
    """Tables from records; empty cells take the default, tables with names of others are fused."""
    constraints_of_table: dict[str, dict[str, Any]] = {}
    if constraints is not None:
        constraints_of_table = list_constraints(constraints)
    tables = []
    of_torchrec = []
    unused: list[str] = []
    output_dtypes = set[str]()
    has_foreign_names = False
    names = set[str]()
    for record in islice(records, MOST_ROWS + 1):
        name_of_table = str(record.values.get("name", ""))
        names.add(name_of_table)
        values = {**record.values, **constraints_of_table.get(name_of_table, {})}
        if not _FOREIGN.keys().isdisjoint(values):
            has_foreign_names = True
        if not is_torchrec(values):
            tables.append(_make_table(record, itemsize))
            continue
        with reading(record.place, "change the table"):
            fields = translate_fields(values)
        columns = _Record(record.place, fields.columns)
        table = _make_table(columns, itemsize, fields.features, _SIZES_OF_TORCHREC)
        tables.append(table)
        has_lookups = "pooling" in fields.columns
        of_torchrec.append(TorchrecTable(table, has_lookups, fields.kernel))
        unused += [*fields.unused, *record.unknown]
        output_dtypes.add(fields.output_dtype)
    _check_count(len(tables), name)
    for of_table in sorted(constraints_of_table.keys() - names):
        check_choice("table of constraints", of_table, sorted(names))
    notes = list_notes(of_torchrec)
    if unused:
        notes.append(f"fields that are not used: {name_fields(unused)}")
    # where formats differ, torch.cat takes the wider one
    output_dtype = next(iter(output_dtypes)) if len(output_dtypes) == 1 else OUTPUT_DTYPE
    return _Contents(
        tables,
        embedding="fused" if has_foreign_names else None,
        notes=notes,
        output_dtype=output_dtype if of_torchrec else None,
    )


def _make_table(
    record: _Record,
    itemsize: int,
    features: int = 1,
    words: Mapping[str, str] = MappingProxyType({}),
) -> EmbeddingTable:
    """The table of a record; without lookups it has one for each of its features. Errors name its
    sizes as it does, else by these `words`."""
    place = record.place
    cells = _rename_columns(record)
    if "" in cells:
        raise ValueError(
            f"{place} has a column without a name; write the file without an index, and its "
            f"first line with names: {', '.join(_COLUMNS)}"
        )
    _refuse_unknown(place, list(cells))
    values: dict[str, Any] = {"pooling": float(features)}
    values |= {column: cell for column, cell in cells.items() if not _is_blank(cell)}
    if "dtype" not in values:
        values.setdefault("itemsize", itemsize)
    if not words and not _SIZES_OF_FBGEMM.keys().isdisjoint(values):
        is_fbgemm = any(name in record.values for name in _SIZES_OF_FBGEMM.values())
        words = _SIZES_OF_FBGEMM if is_fbgemm else words
    sizes = {}
    for column in _SIZES_OF_TORCHREC:
        is_written = column in record.values
        sizes[column] = column if is_written else words.get(column, column)
    missing = [sizes[column] for column in sizes if column not in values]
    if missing:
        raise ValueError(
            f"{place} lacks {' and '.join(missing)}; give the rows and columns of the table"
        )
    with reading(place, "change the table"):
        for column, value in values.items():
            if column not in ("name", "module") and is_listed(value):
                raise ValueError(f"{column} is {show(value)}; it must be one number")
        for column, written in sizes.items():
            check_size(written, values[column])
        if "itemsize" in values:
            _check_itemsize(values["itemsize"])
        for column in ("weighted", "pooled"):
            if column in values:
                values[column] = read_flag(column, values[column])
        return EmbeddingTable(**values)


def _refuse_unknown(place: str, columns: Sequence[str]) -> None:
    """Refuse columns that are not known, all at once."""
    unknown = [column for column in columns if column not in _COLUMNS]
    if len(unknown) == 1:
        join_place(place, unknown[0], (*_COLUMNS, *_USUAL_FIELDS), _MEANT)
    if unknown:
        raise ValueError(
            f"{place} has columns that are not known: {escape(', '.join(unknown), 400)}; known here are "
            f"{', '.join((*_COLUMNS, *_USUAL_FIELDS))}"
        )


def _rename_columns(record: _Record) -> dict[str, Any]:
    """Cells of a record by perfkit's names of their columns."""
    columns: dict[str, Any] = {}
    for column in record.values:
        name = _FOREIGN.get(column, str(column))
        if name in columns:
            twins = sorted((str(column), str(columns[name])), key=lambda twin: twin == name)
            raise ValueError(
                f"{record.place} has {escape(twins[0], 40)} and {escape(twins[1], 40)}, which are "
                "the same; give one"
            )
        columns[name] = column
    return {name: record.values[column] for name, column in columns.items()}


def _check_count(count: int, name: str) -> None:
    """Refuse more tables than any model has."""
    if count > MOST_ROWS:
        raise ValueError(f"{name} lists more than {MOST_ROWS:,} tables; leave some out")


def _read_csv(path: Path, itemsize: int) -> _Contents:
    """Tables of a CSV file whose first line names the columns."""
    name = path.name
    data = path.read_bytes()
    _check_count(data.count(b"\n") - data.count(b"\n\n") - 1, name)
    columns = data.partition(b"\n")[0].count(b",") + 1
    if columns > _MOST_COLUMNS:
        raise ValueError(
            f"{name} has {columns} columns; its first line must name columns: {', '.join(_COLUMNS)}"
        )
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = _read_header(next(reader, []), name)
            return _make_tables(_walk_csv(reader, header, name), name, itemsize)
        except csv.Error as error:
            raise ValueError(
                f"{name} line {reader.line_num}: {error}; separate values by commas"
            ) from error


def _read_header(cells: list[str], name: str) -> list[str]:
    """Names of the columns of a CSV file."""
    header = [column.strip() for column in cells]
    if not header or len(set(header)) < len(header):
        fault = "names a column twice" if header else "is empty"
        raise ValueError(f"{name} {fault}; its first line must name columns: {', '.join(_COLUMNS)}")
    separator = re.search(r"\w\s*([;|\t])\s*\w", header[0])
    if len(header) == 1 and separator is not None:
        raise ValueError(
            f"{name} separates its columns by {show(separator[1])}; separate values by commas"
        )
    return header


def _walk_csv(reader: Any, header: list[str], name: str) -> Iterator[_Record]:
    """Lines of a CSV file that are not empty; `reader` is that of the module csv."""
    for values in reader:
        cells = [value.strip() for value in values]
        if not any(cells):
            continue
        place = f"{name} line {reader.line_num}"
        if len(cells) != len(header):
            text = f"{place} has {len(cells)} values for {len(header)} columns"
            if header[0].startswith("#"):
                raise ValueError(f"{text}; the first line must name columns, without a comment")
            raise ValueError(f"{text}; write no thousands commas")
        record = {}
        for column, cell in zip(header, cells, strict=True):
            record[column] = cell if column in ("name", "module") else _number(cell)
        yield _Record(place, record)


def _number(text: str) -> Any:
    """Value of a cell: a whole number, another one, or text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _read_parquet(path: Path, itemsize: int) -> _Contents:
    """Tables of a Parquet file."""
    check_threads()
    import polars

    scan = polars.scan_parquet(path)
    _check_count(scan.select(polars.len()).collect().item(), path.name)
    rows = enumerate(scan.collect().iter_rows(named=True))
    records = (_Record(f"{path.name} row {number}", row) for number, row in rows)
    return _make_tables(records, path.name, itemsize)


def _read_json(path: Path, itemsize: int) -> _Contents:
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
    if _is_tbe_config(content):
        return _read_tbe(content, name, itemsize)
    is_named = isinstance(content, Mapping) and set(content) == {"tables"}
    entries = content["tables"] if is_named else content
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(
            f'{name} must hold a list of tables such as {{"rows": 1000, "dim": 64}}, or a TBEDataConfig'
        )
    records = (_Record(f"{name}[{number}]", entry) for number, entry in enumerate(entries))
    return _make_tables(records, name, itemsize)


def _is_tbe_config(content: Any) -> bool:
    """Whether JSON is a configuration of FBGEMM, or a list that begins with one."""
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, Mapping) and not first.keys().isdisjoint(_TBE_PARTS)


def _read_tbe(content: Any, name: str, itemsize: int) -> _Contents:
    """Tables of one or several configurations of FBGEMM."""
    if not isinstance(content, list):
        tables, batch = parse_tbe_config(content, place=name, itemsize=itemsize)
        _check_count(len(tables), name)
        return _Contents(tables, batch, embedding="fused")
    tables = []
    batches = set()
    for number, config in enumerate(content):
        place = f"{name}[{number}]"
        tables_of_config, batch = parse_tbe_config(config, place=place, itemsize=itemsize)
        tables += [replace(table, name=f"{number}.{table.name}") for table in tables_of_config]
        batches.add(batch)
        _check_count(len(tables), name)
    if len(batches) > 1:
        shown = ", ".join(map(str, sorted(batches)))
        raise ValueError(f"{name} has batches of {shown}; use one file for each batch")
    return _Contents(tables, batches.pop(), embedding="fused")


_READERS: dict[str, Callable[[Path, int], _Contents]] = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".json": _read_json,
}


# -- published sets
# --------------------------------------------------------------------------------------------------


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
    first = bins[0]
    lookups = int(first["lookups"])
    unique_rows = int(first["unique_rows"])
    lowest_count = np.array([float(row["above"]) for row in bins])
    row_share = np.array([float(row["row_share"]) for row in bins])
    lookup_share = np.array([float(row["lookup_share"]) for row in bins])
    middle = np.array([1.0, 2.0, *lowest_count[2:16] / np.log(2.0), 2 * lowest_count[16]])
    rows_by_lookups = lookup_share * lookups / middle
    counts = np.where(row_share >= 0.005, row_share * unique_rows, rows_by_lookups)
    counts *= unique_rows / counts.sum()
    histogram = ReuseHistogram(tuple(counts.tolist()), lookups, rows)
    return histogram, int(first["tables"]), int(first["batch"])


def _read_published(name: str, dim: int, rows: Any, itemsize: int, law: str) -> _Contents:
    """Tables of a published model, or of a data set of which only the reuse is published."""
    models = group_rows("model", "published", "dlrm_tables.csv")
    if name in models:
        return _Contents(_make_model_tables(models[name], itemsize), embedding="fused")
    if rows is None:
        raise ValueError(f"{name} lacks the rows of its tables; pass rows=, 1_000_000 for example")
    rows_of_table = int(check_positive("rows", rows, integer=True))
    count = int(_histograms()[name][0]["tables"])
    whole, _, batch = find_histogram(name, rows=count * rows_of_table)
    histogram = whole.resize(rows_of_table)
    pooling = whole.lookups / batch / count
    exponent = fit_zipf(histogram).exponent
    popularity = histogram if law == "histogram" else Zipf(rows_of_table, exponent)
    tables = [
        EmbeddingTable(
            rows_of_table, dim, pooling, exponent, itemsize, f"table {number}", popularity
        )
        for number in range(count)
    ]
    return _Contents(tables, batch)


def _make_model_tables(rows: Iterable[Mapping[str, str]], itemsize: int) -> list[EmbeddingTable]:
    """Tables of a published model."""
    tables = []
    for number, row in enumerate(rows):
        table = EmbeddingTable(
            int(row["rows"]),
            int(row["dim"]),
            float(row["pooling"]),
            itemsize=itemsize,
            name=f"table {number}",
        )
        tables.append(table)
    return tables
