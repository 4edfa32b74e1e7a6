"""The public kernel database: its files, and measured collectives, matrix products, attention and
casts.

There is one table per kind of kernel, collector (the serving framework whose kernels were timed)
and its version: ``SYSTEM/FAMILY/COLLECTOR/VERSION/TABLE_perf.parquet``. Columns differ between
files and are read by name.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl
from polars.selectors import by_name, numeric

from perfkit.ground.files import reading
from perfkit.ground.forks import check_threads
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import check_choice, escape
from perfkit.models.collectives import OPERATIONS, bus_factor

_PACKAGE, _TABLES = "aiconfigurator_core", "*/*/*/*_perf.parquet"
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
    *("m", "n", "k", "num_gpus", "message_size"),
    *("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"),
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
#: Columns of a frame by name: another column, an expression, or None for the column of that name.
_Names = Mapping[str, Any]
#: Columns that tell who measured a row.
_WITNESS: _Names = {"collector": None, "collector_version": None, "kernel": "kernel_source"}
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
    named = os.environ.get("PERFKIT_KERNEL_DATABASE")
    spec = None if named else find_spec(_PACKAGE)
    homes = [
        Path(home) / "systems/data" for home in (spec and spec.submodule_search_locations) or ()
    ]
    for place in [Path(named) / below for below in _BELOW] if named else homes:
        if any(place.glob(f"*/{_TABLES}")):
            return place
    where = f"in {named}" if named else "installed"
    advice = f"{_INSTALL} brings one (only its files are read: what it depends on is not needed)"
    text = f"no kernel database of release 0.12 or later {where}; {advice}, or name its folder"
    raise FileNotFoundError(f"{text} in PERFKIT_KERNEL_DATABASE")


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
    own = (
        list(folder.glob(f"{system}/{_TABLES}"))
        if any(place.name == system for place in folder.iterdir())
        else []
    )
    files = [
        path.relative_to(folder) for path in sorted(own or folder.glob(f"*/{_TABLES}"), key=str)
    ]
    names = [
        {
            "system": file.parts[0],
            "table": file.stem.removesuffix("_perf"),
            "collector": file.parts[2],
            "version": file.parts[3],
            "file": file.as_posix(),
        }
        for file in files
    ]
    tables = pl.DataFrame(names).with_columns(
        nbytes=pl.Series([(folder / file).stat().st_size for file in files])
    )
    if system is not None and not own:
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
    held, algbw = set(list_tables(system)["table"]), pl.col("nbytes") / pl.col("seconds")
    factors = {name: bus_factor(name, pl.col("ranks")) for name in OPERATIONS}
    busbw = pl.coalesce(
        pl.when(operation=name).then(algbw * factor) for name, factor in factors.items()
    )
    names = {
        "operation": pl.col("op_name").replace("alltoall", "all_to_all"),
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
    tables = [name for name in ("nccl", "oneccl") if name in held] or ["nccl"]
    rows = pl.concat(_read(system, table, ("nccl_dtype", None), names, table) for table in tables)
    nbytes = pl.col("nbytes") * pl.col("dtype").replace_strict(_BYTES, return_dtype=pl.Int64)
    return rows.with_columns(nbytes).with_columns(algbw=algbw, busbw=busbw)


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
    names = {**dict.fromkeys(("dtype", "m", "n", "k", "seconds")), **_WITNESS}
    return _read(system, "gemm", ("gemm_dtype", dtype), names)


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
    past, window, heads = (
        pl.col(name).cast(pl.Int64) for name in ("step", "window_size", "num_key_value_heads")
    )
    names = {
        "dtype": None,
        "kv_dtype": pl.coalesce(_rename("kv_cache_dtype"), "dtype"),
        "causal": pl.col("op_name") != "encoder_attention",
        "batch": "batch_size",
        "sequence": "isl",
        "past": past.fill_null(0),
        "heads": "num_heads",
        "kv_heads": pl.coalesce(heads, "num_heads"),
        "head_dim": None,
        "window": window.fill_null(0),
        "seconds": None,
        **_WITNESS,
    }
    tables = ["context_attention", *({"encoder_attention"} & set(list_tables(system)["table"]))]
    return pl.concat(_read(system, table, ("attn_dtype", dtype), names) for table in tables)


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
    nbytes = 3 * pl.col("m") * pl.col("k")
    names = {
        "dtype": None,
        "rows": "m",
        "columns": "k",
        "nbytes": nbytes,
        "seconds": None,
        **_WITNESS,
    }
    return _read(system, "scale_matrix", ("quant_dtype", "fp8"), names)


def _rename(column: str) -> pl.Expr:
    """A recorded number format under perfkit's name."""
    return pl.col(column).cast(pl.String).replace(_DTYPES)


def _read(
    system: str, table: str, dtype: tuple[str, str | None], names: _Names, library: str = ""
) -> pl.DataFrame:
    """Rows of the newest version of each collector with the columns `names`, in the number format
    `dtype[1]`.

    `dtype[0]` is the recorded column of number formats.
    """
    check_threads()
    tables, folder, (column, wanted) = list_tables(system), find_database(), dtype
    check_choice(f"table of {system}", table, tables["table"].unique(maintain_order=True))
    columns = [
        (old if isinstance(old, pl.Expr) else pl.col(old or new)).alias(new)
        for new, old in names.items()
    ]
    derived = {"dtype", "seconds", "collector", "collector_version", *_OPTIONAL}
    needed = sorted(
        {name for each in columns for name in each.meta.root_names()} - derived
        | {column, "latency"}
    )
    raw = []
    for file, collector in (
        tables.filter(pl.col("table") == table).select("file", "collector").iter_rows()
    ):
        with reading(folder / file, f"{_INSTALL} brings a sound one", most=_LARGEST):
            who = (
                pl.lit(library)
                if library
                else pl.coalesce("framework", pl.lit(collector)).str.to_lowercase()
            )
            frame = _read_file(folder / file, needed).with_columns(
                collector=who, collector_version="version"
            )
            sizes = {
                "dtype": _rename(column),
                "seconds": pl.col("latency").cast(pl.Float64, strict=False) * 1e-3,
                "file": pl.lit(file),
            }
            frame = frame.with_columns(system=pl.lit(system), **sizes)
            raw.append(frame.with_columns(damage=_find_damage(needed, messages=bool(library))))
    rows = pl.concat(raw, how="diagonal_relaxed")
    if wanted is not None:
        sound = rows.filter(pl.col("damage").is_null())["dtype"]
        check_choice("dtype", wanted, (sound if len(sound) else rows["dtype"]).unique().sort())
        # a row without a number format may be of any
        rows = rows.filter((pl.col("dtype") == wanted) | pl.col("dtype").is_null())
    if len(lost := rows.filter(pl.col("damage").is_not_null())):
        text = _describe_damage(lost)
        if len(lost) == len(rows):
            raise ValueError(
                f"{table} of {system} has no row that can be used: {len(rows)} rows {text}; "
                f"{_INSTALL} brings a sound one"
            )
        warnings.warn(f"{len(lost)} of {len(rows)} rows {text}", stacklevel=4)
    whole = (numeric() - by_name("seconds")).cast(pl.Int64)
    rows, version = rows.filter(pl.col("damage").is_null()), pl.col("collector_version")
    pairs = rows.select("collector", version).unique().sort(pl.all()).rows()
    newest = {
        who: max((each for other, each in pairs if other == who), key=_order) for who, _ in pairs
    }
    rows = rows.with_columns(newest=version.eq_missing(pl.col("collector").replace(newest)))
    _warn_of_few(rows)
    rows = rows.filter("newest")
    return rows.select("system", *columns, "file").with_columns(whole)


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
    time = pl.col("seconds")
    causes = [
        pl.when(~((time > 0) & time.is_finite()).fill_null(False)).then(
            pl.lit("have no positive time")
        )
    ]
    for name in (*_SIZES, *_COUNTS):
        if name not in needed and name not in _OPTIONAL:
            continue
        size = pl.col(name)
        least = 0 if name in _COUNTS else 1
        sound = (size >= least) & (size <= _MOST) & (size == size.floor())
        if name in _OPTIONAL:  # absent in some files; damaged values are not a number
            sound = sound | size.is_null()
        word = "whole" if name in _COUNTS else "positive whole"
        causes.append(
            pl.when(~sound.fill_null(False)).then(pl.lit(f"have no {word} number {name}"))
        )
    version = pl.col("version")  # the newest one counts, so a damaged one would hide all others
    numbered = version.is_null() | version.str.contains(r"^\d+(\.\d+)+|^[a-z-]+$")
    causes.append(pl.when(~numbered).then(pl.lit("have no version such as 1.2.0")))
    dtype = pl.col("dtype")
    known = dtype.is_in([*_BYTES]) if messages else dtype.str.contains(_FORMAT)
    causes.append(pl.when(dtype.is_null()).then(pl.lit("name no number format")))
    causes.append(
        pl.when(~known.fill_null(False)).then(
            pl.format("have the unknown number format '{}'", dtype.str.slice(0, 40))
        )
    )
    if messages:
        operation = pl.col("op_name").cast(pl.String).replace("alltoall", "all_to_all")
        causes.append(
            pl.when(~operation.is_in([*OPERATIONS]).fill_null(False)).then(
                pl.format(
                    "have the unknown operation '{}'", operation.fill_null("").str.slice(0, 40)
                )
            )
        )
    return pl.coalesce(causes)


def _read_file(path: Path, needed: Sequence[str]) -> pl.DataFrame:
    """Some columns of one file; optional columns that are missing are null, and sizes are
    numbers: NaN where one is no number, null where there is none."""
    scan = pl.scan_parquet(path)
    names = scan.collect_schema().names()
    if missing := [name for name in needed if name not in names]:
        raise ValueError(
            f"{path} has no column {', '.join(missing)}; it has {', '.join(names[:40])}"
        )
    columns = []
    for name in (*needed, *_OPTIONAL):
        column = pl.col(name) if name in names else pl.lit(None, pl.String).alias(name)
        if name in (*_SIZES, *_COUNTS):
            number = column.cast(pl.Float64, strict=False)
            lost = number.is_null() & column.is_not_null()
            column = pl.when(lost).then(float("nan")).otherwise(number).alias(name)
        elif name in _OPTIONAL:
            column = column.cast(pl.String)
        columns.append(column)
    return scan.select(columns).collect()


def _order(version: str | None) -> tuple[tuple[int, int], ...]:
    """Sort key of a version: 1.3.0rc20 before 1.3.0, 1.3.0 before 1.3.0.post2, and none before all
    others."""
    parts = re.findall(r"\d+|[a-z]+", (version or "").split("+")[0])
    key = [(2, int(part)) if part.isdigit() else (1 if part == "post" else -1, 0) for part in parts]
    return (*key, (0, 0)) if parts else ()
