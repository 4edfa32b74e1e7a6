"""The public kernel database: its files, and measured collectives, matrix products, attention and
casts.

`read_collectives`, `read_gemms`, `read_attention` and `read_casts` say which columns they want, and
`_read` is the table of contents of what they share. There is one table per kind of kernel,
collector (the serving framework whose kernels were timed) and its version:
``SYSTEM/FAMILY/COLLECTOR/VERSION/TABLE_perf.parquet``. Columns differ between files and are read by
name.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import polars as pl
from polars.selectors import by_name, numeric

from perfkit.ground.files import reading
from perfkit.ground.forks import check_threads
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import check_choice, escape
from perfkit.models.collectives import OPERATIONS, bus_factor

_PACKAGE = "aiconfigurator_core"
_TABLES = "*/*/*/*_perf.parquet"
_INSTALL = "`pip install --no-deps 'aiconfigurator-core>=0.12'`"
#: Folders between a named folder and the folder of systems.
_BELOW = (f"{_PACKAGE}/systems/data", "systems/data", "data", "")
#: Largest file of a table [B]; releases up to 0.12 have at most a tenth of it.
_LARGEST = 2**28
#: perfkit's name of a number format by the recorded one; the others keep theirs (``fp8_block``,
#: ``nvfp4``).
_DTYPES = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
    "double": "fp64",
}
#: Bytes of one element of a message [B].
_BYTES = {name: DTYPES[name] for name in ("fp64", "fp32", "bf16", "fp16", "fp8", "int8")}
#: Recorded columns that some files do not have.
_OPTIONAL = (
    "framework",
    "version",
    "kernel_source",
    "num_key_value_heads",
    "kv_cache_dtype",
    "step",
    "window_size",
)
#: Recorded columns of sizes, which must be positive; those of files that lack them are null.
_SIZES = (
    "m",
    "n",
    "k",
    "num_gpus",
    "message_size",
    "batch_size",
    "isl",
    "num_heads",
    "num_key_value_heads",
    "head_dim",
)
#: Recorded columns of sizes that may be zero.
_COUNTS = ("step", "window_size")
#: Largest size that is no damage [-]: whole numbers up to here are exact as floating-point numbers.
_MOST = 2**53
#: Causes of lost rows that a warning names [-].
_NAMED = 6
#: A number format names its width, such as ``bf16``, ``fp8_block`` or ``int4_wo``, or is ``sq``
#: (SmoothQuant).
_FORMAT = r"(?i)(fp|bf|tf|int|w)\d|^sq$"
#: What a column of a frame is made of: a recorded or derived column, or an expression of some.
_Column: TypeAlias = str | pl.Expr
#: Columns that tell who measured a row.
_WITNESS: Mapping[str, _Column] = {
    "collector": "collector",
    "collector_version": "collector_version",
    "kernel": "kernel_source",
}
#: Columns that are derived from recorded ones.
_DERIVED = ("dtype", "seconds", "collector", "collector_version")
#: Turns errors about wrong contents of columns into one line.
_guard = reading("kernel database", "compare with its release", told=True)


def find_database() -> Path:
    """Find the folder that holds one folder of tables per system.

    The environment variable ``PERFKIT_KERNEL_DATABASE`` names this folder, a folder around it, or
    the target of ``pip install --target``. Otherwise it is the folder of the installed package,
    which is not imported.

    Returns
    -------
    folder : Path
        Folder of systems.

    Raises
    ------
    FileNotFoundError
        If there is no database, or only one of a release before 0.12. The message says how to
        install one.
    """
    for place in _list_places():
        if any(place.glob(f"*/{_TABLES}")):
            return place
    named = os.environ.get("PERFKIT_KERNEL_DATABASE")
    where = f"in {named}" if named else "installed"
    raise FileNotFoundError(
        f"no kernel database of release 0.12 or later {where}; {_INSTALL} brings one (only its "
        "files are read: what it depends on is not needed), or name its folder in "
        "PERFKIT_KERNEL_DATABASE"
    )


def _list_places() -> list[Path]:
    """Folders that may be the folder of systems, see `find_database`."""
    named = os.environ.get("PERFKIT_KERNEL_DATABASE")
    if named:
        return [Path(named) / below for below in _BELOW]
    package = find_spec(_PACKAGE)
    if package is None or package.submodule_search_locations is None:
        return []
    return [Path(home) / "systems/data" for home in package.submodule_search_locations]


def list_tables(system: str | None = None) -> pl.DataFrame:
    """List the tables of a kernel database.

    Parameters
    ----------
    system : str, optional
        One system, such as ``h100_sxm``; all by default.

    Returns
    -------
    tables : polars.DataFrame
        ``system``, ``table``, ``collector`` and ``version`` (names of the folders; rows of the file
        may name others), ``file`` below the folder of systems, ``nbytes`` of the file [B].

    Raises
    ------
    ValueError
        For an unknown system. The message lists the systems with tables.
    """
    check_threads()
    folder = find_database()
    is_known = any(place.name == system for place in folder.iterdir())
    files_of_system = list(folder.glob(f"{system}/{_TABLES}")) if is_known else []
    paths = files_of_system or folder.glob(f"*/{_TABLES}")
    rows = []
    for path in sorted(paths, key=str):
        file = path.relative_to(folder)
        row = {
            "system": file.parts[0],
            "table": file.stem.removesuffix("_perf"),
            "collector": file.parts[2],
            "version": file.parts[3],
            "file": file.as_posix(),
            "nbytes": path.stat().st_size,
        }
        rows.append(row)
    tables = pl.DataFrame(rows)
    if system is not None and not files_of_system:
        check_choice("system", system, tables["system"].unique(maintain_order=True))
    return tables


@_guard
def read_collectives(system: str) -> pl.DataFrame:
    """Read the collectives of one system: NCCL's test programs measured them out of place (on Intel
    those of oneCCL).

    Parameters
    ----------
    system : str
        A system of `list_tables`.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``operation``, ``ranks``, ``nodes`` (null: not recorded), ``dtype``, ``nbytes``
        in the nccl-tests convention [B], ``seconds`` [s], ``algbw`` and ``busbw`` [B/s],
        ``library``, ``library_version`` (null where none is recorded), ``file``. Repeated sweeps
        are more rows.

    Raises
    ------
    ValueError
        For an unknown system, for one without collectives, and where no row can be used.

    Warns
    -----
    UserWarning
        For rows without a positive time or size, or with an unknown operation or number format,
        which are left out.

    Notes
    -----
    Only rows of the newest version of the library are returned. Where folder and rows of a file
    name different versions, the rows are right. The algorithm of the library is not recorded. From
    64 MiB on, an all_reduce of fp16 on 8 H100 or H200 takes 20 % less time than one of int8: their
    switches reduce fp16 but not int8, so do not fit one law to both.
    """
    operation = pl.col("op_name").replace("alltoall", "all_to_all")
    names: dict[str, _Column] = {
        "operation": operation,
        "ranks": "num_gpus",
        "nodes": pl.lit(None, pl.Int64),
        "dtype": "dtype",
        "nbytes": "message_size",
        "seconds": "seconds",
        "algbw": pl.lit(0.0),
        "busbw": pl.lit(0.0),
        "library": "collector",
        "library_version": "collector_version",
    }
    known = set(list_tables(system)["table"])
    tables = [name for name in ("nccl", "oneccl") if name in known] or ["nccl"]
    rows = pl.concat(
        _read(system, table, names, format_column="nccl_dtype", library=table) for table in tables
    )
    itemsize = pl.col("dtype").replace_strict(_BYTES, return_dtype=pl.Int64)
    rows = rows.with_columns(nbytes=pl.col("nbytes") * itemsize)
    algbw = pl.col("nbytes") / pl.col("seconds")
    busbw = [
        pl.when(operation=name).then(algbw * bus_factor(name, pl.col("ranks")))
        for name in OPERATIONS
    ]
    return rows.with_columns(algbw=algbw, busbw=pl.coalesce(busbw))


@_guard
def read_gemms(system: str, *, dtype: str | None = "bf16") -> pl.DataFrame:
    """Read the matrix products y[m, n] = x[m, k] · w[n, k]ᵀ of one system.

    Parameters
    ----------
    system : str
        A system of `list_tables`.
    dtype : str, optional
        Number format, such as ``bf16`` or ``fp8_block``; None for all.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``dtype``, ``m``, ``n``, ``k``, ``seconds`` [s], ``collector``,
        ``collector_version``, ``kernel``, ``file``.

    Raises
    ------
    ValueError
        For an unknown system or number format, and for a system without such products.

    Notes
    -----
    The times are of replayed CUDA graphs at unlocked clocks. Collector ``sglang`` multiplies random
    numbers. Collector ``vllm`` uses uninitialised weights, which take less power, so its times are
    too short.
    """
    names = {"dtype": "dtype", "m": "m", "n": "n", "k": "k", "seconds": "seconds", **_WITNESS}
    return _read(system, "gemm", names, format_column="gemm_dtype", dtype=dtype)


@_guard
def read_attention(system: str, *, dtype: str | None = "bf16") -> pl.DataFrame:
    """Read fused attention over whole sequences: causal (language models) and, where measured, full
    (encoders).

    Parameters
    ----------
    system : str
        A system of `list_tables`.
    dtype : str, optional
        Number format of the queries, such as ``bf16``; None for all.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``dtype``, ``kv_dtype`` (of keys and values in memory), ``causal``, ``batch``,
        ``sequence`` (queries of a sample), ``past`` (earlier keys of it), ``heads``, ``kv_heads``,
        ``head_dim``, ``window`` (keys a query sees, 0 for all), ``seconds`` [s], ``collector``,
        ``collector_version``, ``kernel``, ``file``.

    Raises
    ------
    ValueError
        For an unknown system or number format, and for a system without such attention.
    """
    # Tables of encoders lack some columns: there are as many keys as queries, and as many heads of
    # keys, and no cache.
    past = pl.col("step").cast(pl.Int64).fill_null(0)
    window = pl.col("window_size").cast(pl.Int64).fill_null(0)
    kv_heads = pl.coalesce(pl.col("num_key_value_heads").cast(pl.Int64), "num_heads")
    names: dict[str, _Column] = {
        "dtype": "dtype",
        "kv_dtype": pl.coalesce(_rename("kv_cache_dtype"), "dtype"),
        "causal": pl.col("op_name") != "encoder_attention",
        "batch": "batch_size",
        "sequence": "isl",
        "past": past,
        "heads": "num_heads",
        "kv_heads": kv_heads,
        "head_dim": "head_dim",
        "window": window,
        "seconds": "seconds",
        **_WITNESS,
    }
    tables = ["context_attention"]
    if "encoder_attention" in list_tables(system)["table"]:
        tables.append("encoder_attention")
    return pl.concat(
        _read(system, table, names, format_column="attn_dtype", dtype=dtype) for table in tables
    )


@_guard
def read_casts(system: str) -> pl.DataFrame:
    """Read the casts of a bf16 matrix to fp8 with a known scale: the only kernels here that only
    memory limits.

    Parameters
    ----------
    system : str
        A system of `list_tables`.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``dtype`` (written), ``rows``, ``columns``, ``nbytes`` (two read and one written
        per element [B]), ``seconds`` [s], ``collector``, ``collector_version``, ``kernel``,
        ``file``.

    Raises
    ------
    ValueError
        For an unknown system, and for a system without such casts (A100 has none).

    Notes
    -----
    Matrices that fit into the L2 cache stay there between repetitions, so they are faster than main
    memory. From 100 M elements on, collectors ``vllm`` and ``trtllm`` reach 64–91 % of the
    datasheet bandwidth. The kernel of ``sglang`` reaches a tenth of it: do not fit it.
    """
    names: dict[str, _Column] = {
        "dtype": "dtype",
        "rows": "m",
        "columns": "k",
        "nbytes": 3 * pl.col("m") * pl.col("k"),
        "seconds": "seconds",
        **_WITNESS,
    }
    return _read(system, "scale_matrix", names, format_column="quant_dtype", dtype="fp8")


def _rename(column: str) -> pl.Expr:
    """A recorded number format under perfkit's name."""
    return pl.col(column).cast(pl.String).replace(_DTYPES)


def _read(
    system: str,
    table: str,
    names: Mapping[str, _Column],
    *,
    format_column: str,
    dtype: str | None = None,
    library: str = "",
) -> pl.DataFrame:
    """Rows of the newest version of each collector with the columns `names`, in one number format
    or all.

    `format_column` is the recorded column of number formats. A `library` measured messages, and
    takes the place of the collector.
    """
    check_threads()
    tables = list_tables(system)
    check_choice(f"table of {system}", table, tables["table"].unique(maintain_order=True))
    columns = [_make_expression(column).alias(name) for name, column in names.items()]
    needed = _list_needed(columns, format_column)
    files = tables.filter(pl.col("table") == table)
    rows = pl.concat(
        [
            _read_rows(file, needed, format_column=format_column, library=library)
            for file in files.rows(named=True)
        ],
        how="diagonal_relaxed",
    )
    if dtype is not None:
        rows = _filter_dtype(rows, dtype)
    rows = _drop_damaged(rows, f"{table} of {system}")
    rows = _mark_newest(rows)
    _warn_of_few(rows)
    whole = (numeric() - by_name("seconds")).cast(pl.Int64)
    return rows.filter("newest").select("system", *columns, "file").with_columns(whole)


def _make_expression(column: _Column) -> pl.Expr:
    """A column by its name, or an expression as it is."""
    return pl.col(column) if isinstance(column, str) else column


def _list_needed(columns: Sequence[pl.Expr], format_column: str) -> list[str]:
    """Recorded columns that a file must have, sorted."""
    needed = {format_column, "latency"}
    for column in columns:
        needed.update(column.meta.root_names())
    return sorted(needed - {*_DERIVED, *_OPTIONAL})


def _read_rows(
    file: Mapping[str, str], needed: Sequence[str], *, format_column: str, library: str
) -> pl.DataFrame:
    """Rows of one file of `list_tables`, with derived columns, and why one cannot be used."""
    path = find_database() / file["file"]
    with reading(path, f"{_INSTALL} brings a sound one", most=_LARGEST):
        if library:
            collector = pl.lit(library)
        else:
            recorded = pl.coalesce("framework", pl.lit(file["collector"]))
            collector = recorded.str.to_lowercase()
        frame = _read_file(path, needed).with_columns(
            system=pl.lit(file["system"]),
            file=pl.lit(file["file"]),
            collector=collector,
            collector_version="version",
            dtype=_rename(format_column),
            seconds=pl.col("latency").cast(pl.Float64, strict=False) * 1e-3,
        )
        return frame.with_columns(damage=_find_damage(needed, messages=bool(library)))


def _filter_dtype(rows: pl.DataFrame, dtype: str) -> pl.DataFrame:
    """Rows of a number format; a row without one may be of any."""
    sound = rows.filter(pl.col("damage").is_null())["dtype"]
    known = sound if len(sound) else rows["dtype"]
    check_choice("dtype", dtype, known.unique().sort())
    return rows.filter((pl.col("dtype") == dtype) | pl.col("dtype").is_null())


def _drop_damaged(rows: pl.DataFrame, source: str) -> pl.DataFrame:
    """Rows that can be used; warns of the others, and refuses a table that has no other."""
    damaged = rows.filter(pl.col("damage").is_not_null())
    if len(damaged):
        text = _describe_damage(damaged)
        if len(damaged) == len(rows):
            raise ValueError(
                f"{source} has no row that can be used: {len(rows)} rows {text}; "
                f"{_INSTALL} brings a sound one"
            )
        warnings.warn(f"{len(damaged)} of {len(rows)} rows {text}", stacklevel=5)
    return rows.filter(pl.col("damage").is_null())


def _mark_newest(rows: pl.DataFrame) -> pl.DataFrame:
    """Add whether a row is of the newest version of its collector."""
    version = pl.col("collector_version")
    newest: dict[str, str | None] = {}
    for collector, name in rows.select("collector", version).unique().sort(pl.all()).rows():
        if collector not in newest or _order(name) > _order(newest[collector]):
            newest[collector] = name
    return rows.with_columns(newest=version.eq_missing(pl.col("collector").replace(newest)))


def _warn_of_few(rows: pl.DataFrame) -> None:
    """Warn where the newest version is that of few rows of a file, beside more of older versions: a
    file is measured by one version, so a damaged number may hide what was measured."""
    files = rows.group_by("collector", "file", maintain_order=True).agg(
        pl.col("newest").sum(),
        older=(~pl.col("newest")).sum(),
        version=pl.col("collector_version").filter("newest").first(),
    )
    few = (pl.col("newest") > 0) & (pl.col("newest") < pl.col("older"))
    for file in files.filter(few).to_dicts():
        warnings.warn(
            f"{file['newest']} of {file['newest'] + file['older']} rows of "
            f"{escape(file['file'], 200)} say that version {escape(file['version'])} measured them: "
            "as the newest, these alone count; if it is wrong, correct it or drop the rows",
            stacklevel=5,
        )


def _describe_damage(lost: pl.DataFrame) -> str:
    """Count the causes for which rows are left out, and name the file of the first one."""
    counts = lost["damage"].value_counts().sort("count", "damage", descending=[True, False])
    first = f"the first is in {escape(lost['file'][0], 200)}"
    if len(counts) == 1:
        return f"{escape(counts['damage'][0])} and are left out; {first}"
    causes = [f"{count} {escape(cause)}" for cause, count in counts.rows()[:_NAMED]]
    if len(counts) > _NAMED:
        causes.append(f"{counts['count'][_NAMED:].sum()} have other faults")
    return f"are left out: {', '.join(causes)}; {first}"


def _find_damage(needed: Sequence[str], *, messages: bool) -> pl.Expr:
    """Why a row cannot be used, null where it can: the first of its causes."""
    causes = [
        _unless(_is_positive_time(), "have no positive time"),
        *_check_sizes(needed),
        _unless(_is_version(), "have no version such as 1.2.0"),
        _unless(pl.col("dtype").is_not_null(), "name no number format"),
        _check_format(messages=messages),
    ]
    if messages:
        causes.append(_check_operation())
    return pl.coalesce(causes)


def _unless(condition: pl.Expr, cause: str | pl.Expr) -> pl.Expr:
    """A cause where a condition does not hold, null where it does."""
    text = pl.lit(cause) if isinstance(cause, str) else cause
    return pl.when(~condition.fill_null(False)).then(text)


def _is_positive_time() -> pl.Expr:
    time = pl.col("seconds")
    return (time > 0) & time.is_finite()


def _is_version() -> pl.Expr:
    """Whether the version can be compared: the newest one counts, so a damaged one would hide all
    others."""
    version = pl.col("version")
    return version.is_null() | version.str.contains(r"^\d+(\.\d+)+|^[a-z-]+$")


def _check_sizes(needed: Sequence[str]) -> list[pl.Expr]:
    """Why a row cannot be used, for each of its sizes."""
    causes = []
    for name in (*_SIZES, *_COUNTS):
        if name not in needed and name not in _OPTIONAL:
            continue
        size = pl.col(name)
        may_be_zero = name in _COUNTS
        least = 0 if may_be_zero else 1
        is_sound = (size >= least) & (size <= _MOST) & (size == size.floor())
        if name in _OPTIONAL:  # absent in some files; damaged values are not a number
            is_sound = is_sound | size.is_null()
        word = "whole" if may_be_zero else "positive whole"
        causes.append(_unless(is_sound, f"have no {word} number {name}"))
    return causes


def _check_format(*, messages: bool) -> pl.Expr:
    """Why the number format of a row cannot be used: of messages the bytes must be known."""
    dtype = pl.col("dtype")
    is_known = dtype.is_in([*_BYTES]) if messages else dtype.str.contains(_FORMAT)
    return _unless(
        is_known, pl.format("have the unknown number format '{}'", dtype.str.slice(0, 40))
    )


def _check_operation() -> pl.Expr:
    """Why the operation of a message cannot be used."""
    operation = pl.col("op_name").cast(pl.String).replace("alltoall", "all_to_all")
    shown = operation.fill_null("").str.slice(0, 40)
    is_known = operation.is_in([*OPERATIONS])
    return _unless(is_known, pl.format("have the unknown operation '{}'", shown))


def _read_file(path: Path, needed: Sequence[str]) -> pl.DataFrame:
    """Some columns of one file; optional columns that are missing are null, and sizes are
    numbers: NaN where one is no number, null where there is none."""
    scan = pl.scan_parquet(path)
    names = scan.collect_schema().names()
    missing = [name for name in needed if name not in names]
    if missing:
        raise ValueError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(names[:40])}"
        )
    columns = []
    for name in (*needed, *_OPTIONAL):
        column = pl.col(name) if name in names else pl.lit(None, pl.String).alias(name)
        if name in (*_SIZES, *_COUNTS):
            column = _read_size(column).alias(name)
        elif name in _OPTIONAL:
            column = column.cast(pl.String)
        columns.append(column)
    return scan.select(columns).collect()


def _read_size(column: pl.Expr) -> pl.Expr:
    """A column as numbers: NaN where one is no number, null where there is none."""
    number = column.cast(pl.Float64, strict=False)
    is_damaged = number.is_null() & column.is_not_null()
    return pl.when(is_damaged).then(float("nan")).otherwise(number)


def _order(version: str | None) -> tuple[tuple[int, int], ...]:
    """Sort key of a version: 1.3.0rc20 before 1.3.0, 1.3.0 before 1.3.0.post2, and none before all
    others."""
    parts = re.findall(r"\d+|[a-z]+", (version or "").split("+")[0])
    if not parts:
        return ()
    return (*map(_order_part, parts), (0, 0))


def _order_part(part: str) -> tuple[int, int]:
    """Sort key of a part of a version; what ends it counts 0, see `_order`."""
    if part.isdigit():
        return 2, int(part)
    if part == "post":
        return 1, 0
    return -1, 0
