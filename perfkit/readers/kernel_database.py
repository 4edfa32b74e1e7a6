"""The public kernel database: its files, and what perfkit fits its models to: collectives, products, attention, casts.

A table per kind of kernel, collector (the serving framework whose kernels were timed) and version of it is stored as
``SYSTEM/FAMILY/COLLECTOR/VERSION/TABLE_perf.parquet``. Columns differ from file to file: names find them.
"""

import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfkit.ground.files import reading
from perfkit.ground.units import check_choice, escape
from perfkit.models.collectives import OPERATIONS, bus_bandwidth

if TYPE_CHECKING:
    import polars as pl

_PACKAGE, _TABLES = "aiconfigurator_core", "*/*/*/*_perf.parquet"
_INSTALL = "`pip install --no-deps 'aiconfigurator-core>=0.12'`"
#: Folders between a named folder and the folder of systems.
_BELOW = (f"{_PACKAGE}/systems/data", "systems/data", "data", "")
#: Largest file of a table [B], and most rows [-]: releases up to 0.12 stay below a tenth of both.
_LARGEST, _MOST_ROWS = 2**28, 3_000_000
#: Tables whose ``latency`` counts microseconds; everywhere else it counts milliseconds.
_MICROSECONDS = ("moe_a2a", "deepep")
#: Units at the end of a column's name: the new ending, and the factor.
_UNITS = {"_us": ("_seconds", 1e-6), "_ms": ("_seconds", 1e-3), "_bandwidth_gbps": ("_bandwidth", 1e9)}
#: perfkit's name of a number format by the recorded one; the others keep theirs (``fp8_block``, ``nvfp4``).
_DTYPES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32", "double": "fp64"}
#: Bytes of one element of a message [B].
_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
#: Who measured a row, beside its time.
_WITNESS = {"collector": "collector", "collector_version": "collector_version", "kernel": "kernel_source"}
#: Makes one-line errors of columns with wrong contents.
_guard = reading("kernel database", "compare with its release", told=True)


def find_database(root: str | Path | None = None) -> Path:
    """Find the folder that holds one folder of tables per system.

    Parameters
    ----------
    root : str or Path, optional
        That folder, one around it, or the target of ``pip install --target``. By default the environment
        variable ``PERFKIT_KERNEL_DATABASE``, else the installed package, which is not imported.

    Returns
    -------
    folder : Path
        Folder of systems.

    Raises
    ------
    FileNotFoundError
        Without a database, or with one of a release before 0.12; the message says how to install one.
    """
    named = root or os.environ.get("PERFKIT_KERNEL_DATABASE")
    spec = None if named else find_spec(_PACKAGE)
    homes = [Path(home) / "systems/data" for home in (spec and spec.submodule_search_locations) or ()]
    for place in [Path(named) / below for below in _BELOW] if named else homes:
        if any(place.glob(f"*/{_TABLES}")):
            return place
    where = f"in {named}" if named else "installed"
    raise FileNotFoundError(
        f"no kernel database of release 0.12 or later {where}; {_INSTALL} brings one (only its files are read: what it "
        "depends on is not needed), or name its folder as root= or in PERFKIT_KERNEL_DATABASE"
    )


def list_tables(system: str | None = None, *, root: str | Path | None = None) -> "pl.DataFrame":
    """List the tables of a kernel database.

    Parameters
    ----------
    system : str, optional
        One system, such as ``h100_sxm``; all by default.
    root : str or Path, optional
        As `find_database` takes it.

    Returns
    -------
    tables : polars.DataFrame
        ``system``, ``table`` (as `read_table` takes it), ``collector`` and ``version`` (as the folders are named; the
        rows may know better), ``file`` below the folder of systems, ``nbytes`` of the file [B].

    Raises
    ------
    ValueError
        For an unknown system; the message lists those that have tables.
    """
    import polars as pl

    folder = find_database(root)
    own = list(folder.glob(f"{system}/{_TABLES}")) if any(place.name == system for place in folder.iterdir()) else []
    files = [path.relative_to(folder) for path in sorted(own or folder.glob(f"*/{_TABLES}"), key=str)]
    names = [{"system": file.parts[0], "table": file.stem.removesuffix("_perf"), "collector": file.parts[2],
              "version": file.parts[3], "file": file.as_posix()} for file in files]  # fmt: skip
    tables = pl.DataFrame(names).with_columns(nbytes=pl.Series([(folder / file).stat().st_size for file in files]))
    if system is not None and not own:
        check_choice("system", system, tables["system"].unique(maintain_order=True))
    return tables


def read_table(
    system: str,
    table: str,
    *,
    columns: Collection[str] | None = None,
    optional: Collection[str] = (),
    where: "pl.Expr | None" = None,
    root: str | Path | None = None,
) -> "pl.DataFrame":
    """Read one table of one system, as all its collectors and versions recorded it, with times in seconds.

    Parameters
    ----------
    system, table : str
        As `list_tables` names them, such as ``h100_sxm`` and ``moe_a2a``.
    columns : collection of str, optional
        Recorded columns to read, which every file must have; all columns by default.
    optional : collection of str, optional
        More columns, null where a file lacks them.
    where : polars.Expr, optional
        Rows to read, a condition on recorded columns; all by default.
    root : str or Path, optional
        As `find_database` takes it.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``collector``, ``collector_version`` (null where none is recorded), the columns, ``file``.
        ``latency`` becomes ``seconds`` [s], ``*_us`` and ``*_ms`` become ``*_seconds`` [s], ``*_bandwidth_gbps``
        becomes ``*_bandwidth`` [B/s]; ``message_size`` stays in elements.

    Raises
    ------
    ValueError
        For an unknown system or table, a missing column, and a file that cannot be read or is a git-LFS pointer; the
        message names the file.
    """
    import polars as pl

    tables = list_tables(system, root=root)
    check_choice(f"table of {system}", table, tables["table"].unique(maintain_order=True))
    folder, frames = find_database(root), []
    for file, collector in tables.filter(pl.col("table") == table).select("file", "collector").iter_rows():
        with reading(folder / file, f"{_INSTALL} brings a sound one", most=_LARGEST):
            frame = _read_file(folder / file, table, columns, optional, where)
        lacking = {"framework": pl.lit(collector), **dict.fromkeys(("version", *optional), pl.lit(None, pl.String))}
        frame = frame.with_columns(**{name: value for name, value in lacking.items() if name not in frame.columns})
        about = {"system": pl.lit(system), "collector": pl.col("framework").str.to_lowercase(), "file": pl.lit(file)}
        frames.append(frame.with_columns(**about, collector_version="version").drop("framework", "version"))
    found = pl.concat([frame for frame in frames if frame.height] or frames[:1], how="diagonal_relaxed")
    first = ["system", "collector", "collector_version"]
    return found.select(*first, pl.exclude(*first, "file"), "file")


def _read_file(
    path: Path, table: str, columns: Collection[str] | None, optional: Collection[str], where: "pl.Expr | None"
) -> "pl.DataFrame":
    """Rows of one file, and who recorded them; only columns and rows that were asked for are ever in memory."""
    import polars as pl

    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a git-LFS pointer, not the table: run `git lfs pull` there, or {_INSTALL}")
    if not head.startswith(b"PAR1"):
        raise ValueError(f"{path} is no parquet file, it starts with {head[:12]!r}; {_INSTALL} brings a sound one")
    scan = pl.scan_parquet(path)
    names = scan.collect_schema().names()
    if (rows := scan.select(pl.len()).collect().item()) > _MOST_ROWS:
        raise ValueError(f"it has {rows:,} rows; at most {_MOST_ROWS:,} are read")
    needed = [*(columns or ()), *([] if where is None else where.meta.root_names())]
    if missing := [name for name in dict.fromkeys(needed) if name not in names]:
        raise ValueError(f"{path} has no column {', '.join(missing)}; it has {', '.join(names[:40])}")
    kept = names if columns is None else {*columns, *optional, "framework", "version"}
    units = {name: _find_unit(name, table) for name in names if name in kept}
    return (scan if where is None else scan.filter(where)).select(
        (pl.col(name) if factor == 1 else pl.col(name).cast(pl.Float64) * factor).alias(base)
        for name, (base, factor) in units.items()
    ).collect()  # fmt: skip


def _find_unit(name: str, table: str) -> tuple[str, float]:
    """Name of a recorded column in base units, and the factor; 1 where it has none that needs a change."""
    if name == "latency":
        return "seconds", 1e-6 if any(word in table for word in _MICROSECONDS) else 1e-3
    for ending, (instead, factor) in _UNITS.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + instead, factor
    return name, 1.0


@_guard
def read_collectives(system: str, *, version: str = "newest", root: str | Path | None = None) -> "pl.DataFrame":
    """Read the collectives of one system, as NCCL's test programs measured them (oneCCL's on Intel), out of place.

    Parameters
    ----------
    system : str
        As `list_tables` names it.
    version : str, optional
        Library version as the rows record it, ``newest`` or ``all``.
    root : str or Path, optional
        As `find_database` takes it.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``operation``, ``ranks``, ``nodes`` (null: not recorded), ``dtype``, ``nbytes`` in the nccl-tests
        convention [B], ``seconds`` [s], ``algbw`` and ``busbw`` [B/s], ``library``, ``library_version`` (null where
        none is recorded), ``repeat`` (counts sweeps that were run again), ``file``.

    Raises
    ------
    ValueError
        For an unknown system or version, a system without collectives, and a number format of unknown size.

    Notes
    -----
    Folder and rows of a file may name different versions; the rows are right. The algorithm of the library is not
    recorded. On 8 H100 or H200 an all_reduce of fp16 takes 20 % less time than one of int8 from 64 MiB on: their
    switches reduce fp16 but not int8, so do not fit one law to both.
    """
    import polars as pl

    held = list_tables(system, root=root)["table"]
    tables = [name for name in ("nccl", "oneccl") if name in held]
    if not tables:
        raise ValueError(f"{system} has no table of collectives; it has {', '.join(held.unique(maintain_order=True))}")
    columns = ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
    frame = pl.concat(
        read_table(system, name, columns=columns, root=root).with_columns(library=pl.lit(name)) for name in tables
    ).with_columns(dtype=pl.col("nccl_dtype").replace(_DTYPES), collector="library")
    if unknown := sorted(set(frame["dtype"].fill_null("nothing")) - set(_BYTES)):
        raise ValueError(
            f"messages of {system} hold {unknown[0]}, whose size is unknown; known are {', '.join(_BYTES)}"
        )
    nbytes = pl.col("message_size") * pl.col("dtype").replace_strict(_BYTES, return_dtype=pl.Int64)
    names = {"operation": pl.col("op_name").replace("alltoall", "all_to_all"), "ranks": "num_gpus"}
    names |= {"nodes": pl.lit(None, pl.Int64), "dtype": "dtype", "nbytes": nbytes, "seconds": "seconds"}
    tidy = _tidy(frame, version, names | {"library": "library", "library_version": "collector_version"})
    size, time, ranks = pl.col("nbytes"), pl.col("seconds"), pl.col("ranks")
    busbw = pl.coalesce(
        pl.when(pl.col("operation") == name).then(bus_bandwidth(size, time, ranks=ranks, operation=name))
        for name in OPERATIONS
    )
    after = tidy.columns.index("seconds") + 1
    return tidy.with_columns(algbw=size / time, busbw=busbw).select(
        *tidy.columns[:after], "algbw", "busbw", *tidy.columns[after:]
    )


@_guard
def read_gemms(
    system: str, *, dtype: str | None = "bf16", version: str = "newest", root: str | Path | None = None
) -> "pl.DataFrame":
    """Read the matrix products y[m, n] = x[m, k] · w[n, k]ᵀ of one system.

    Parameters
    ----------
    system : str
        As `list_tables` names it.
    dtype : str, optional
        Number format, such as ``bf16`` or ``fp8_block``; None for all.
    version : str, optional
        Version of the collectors as the rows record it, ``newest`` (of each collector) or ``all``.
    root : str or Path, optional
        As `find_database` takes it.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``dtype``, ``m``, ``n``, ``k``, ``seconds`` [s], ``collector``, ``collector_version``, ``kernel``,
        ``repeat``, ``file``.

    Raises
    ------
    ValueError
        For an unknown system, version or number format, and a system that has no such products.

    Notes
    -----
    Replayed CUDA graphs at unlocked clocks. Collector ``sglang`` multiplies random numbers; ``vllm`` leaves its weights
    uninitialised, which takes less power and is optimistic.
    """
    frame = _read(system, "gemm", ("m", "n", "k"), ("gemm_dtype", dtype), root)
    names = {name: name for name in ("dtype", "m", "n", "k", "seconds")}
    return _tidy(frame, version, names | _WITNESS)


@_guard
def read_attention(
    system: str, *, dtype: str | None = "bf16", version: str = "newest", root: str | Path | None = None
) -> "pl.DataFrame":
    """Read fused attention over whole sequences: causal (language models) and, where measured, full (encoders).

    Parameters
    ----------
    system : str
        As `list_tables` names it.
    dtype : str, optional
        Number format of the queries, such as ``bf16``; None for all.
    version : str, optional
        Version of the collectors as the rows record it, ``newest`` (of each collector) or ``all``.
    root : str or Path, optional
        As `find_database` takes it.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``dtype``, ``kv_dtype`` (of keys and values in memory), ``causal``, ``batch``, ``sequence`` (queries
        of a sample), ``past`` (earlier keys of it), ``heads``, ``kv_heads``, ``head_dim``, ``window``
        (keys a query sees, 0 for all), ``seconds`` [s], ``collector``, ``collector_version``, ``kernel``, ``repeat``,
        ``file``.

    Raises
    ------
    ValueError
        For an unknown system, version or number format, and a system that has no such attention.
    """
    import polars as pl

    # An encoder has a key for every query and head, and no cache whose format could differ.
    optional = ("num_key_value_heads", "kv_cache_dtype", "step", "window_size")
    names = {
        "dtype": "dtype",
        "kv_dtype": pl.coalesce(_rename("kv_cache_dtype"), "dtype"),
        "causal": pl.col("op_name") != "encoder_attention",
        "batch": "batch_size", "sequence": "isl", "past": pl.col("step").cast(pl.Int64).fill_null(0),
        "heads": "num_heads", "kv_heads": pl.coalesce(pl.col("num_key_value_heads").cast(pl.Int64), "num_heads"),
        "head_dim": "head_dim", "window": pl.col("window_size").cast(pl.Int64).fill_null(0),
        "seconds": "seconds", **_WITNESS,
    }  # fmt: skip
    held = set(list_tables(system, root=root)["table"])
    columns = ("op_name", "batch_size", "isl", "num_heads", "head_dim")
    tables = ["context_attention", *({"encoder_attention"} & held)]
    frames = [_read(system, table, columns, ("attn_dtype", dtype), root, optional) for table in tables]
    return pl.concat(_tidy(frame, version, names) for frame in frames)


@_guard
def read_casts(system: str, *, version: str = "newest", root: str | Path | None = None) -> "pl.DataFrame":
    """Read the casts of a bf16 matrix to fp8 by a known scale: the only kernels here that memory alone bounds.

    Parameters
    ----------
    system : str
        As `list_tables` names it.
    version : str, optional
        Version of the collectors as the rows record it, ``newest`` (of each collector) or ``all``.
    root : str or Path, optional
        As `find_database` takes it.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``dtype`` (written), ``rows``, ``columns``, ``nbytes`` (two read and one written per element [B]),
        ``seconds`` [s], ``collector``, ``collector_version``, ``kernel``, ``repeat``, ``file``.

    Raises
    ------
    ValueError
        For an unknown system or version, and a system that has no such casts (A100 has none).

    Notes
    -----
    Matrices that fit the L2 cache stay there between repetitions and run faster than main memory. From 100 M elements
    on, collectors ``vllm`` and ``trtllm`` reach 64–91 % of the datasheet bandwidth. The kernel of ``sglang`` reaches
    a tenth of it: leave it out.
    """
    import polars as pl

    frame = _read(system, "scale_matrix", ("m", "k"), ("quant_dtype", "fp8"), root)
    nbytes = 3 * pl.col("m") * pl.col("k")
    names = {"dtype": "dtype", "rows": "m", "columns": "k", "nbytes": nbytes, "seconds": "seconds"}
    return _tidy(frame, version, names | _WITNESS)


def _read(
    system: str,
    table: str,
    columns: Sequence[str],
    dtype: tuple[str, str | None],
    root: str | Path | None,
    optional: Sequence[str] = (),
) -> "pl.DataFrame":
    """Rows of a table whose column `dtype[0]` holds the number format `dtype[1]`, named ``dtype``."""
    column, wanted = dtype
    where = None if wanted is None else _rename(column) == wanted
    columns, optional = (*columns, column, "latency"), (*optional, "kernel_source")
    frame = read_table(system, table, columns=columns, optional=optional, where=where, root=root)
    if not frame.height:
        every = read_table(system, table, columns=[column], root=root)
        check_choice("dtype", wanted, every.select(_rename(column).unique().sort()).to_series())
    return frame.with_columns(_rename(column).alias("dtype"))


def _rename(column: str) -> "pl.Expr":
    """A recorded number format of a kernel in perfkit's words."""
    import polars as pl

    return pl.col(column).cast(pl.String).replace(_DTYPES)


def _tidy(frame: "pl.DataFrame", version: str, names: Mapping[str, Any]) -> "pl.DataFrame":
    """Leave out rows without a time, choose versions, name the columns, and number the repeats."""
    import polars as pl
    from polars.selectors import by_name, numeric

    good = frame.filter(pl.col("seconds") > 0)
    if lost := frame.height - good.height:
        file = frame.filter((pl.col("seconds") > 0).not_().fill_null(True))["file"][0]
        text = f"{lost} of {frame.height} rows have no positive time and are left out; the first is in {escape(file)}"
        warnings.warn(text, stacklevel=4)
    columns = ((pl.col(old) if isinstance(old, str) else old).alias(new) for new, old in names.items())
    whole = (numeric() - by_name("seconds")).cast(pl.Int64)
    tidy = _choose(good, version).select("system", *columns, "file").with_columns(whole)
    keys = [name for name in tidy.columns if name not in ("seconds", "file")]
    repeat = pl.int_range(pl.len(), dtype=pl.Int64).over(keys).alias("repeat")
    return tidy.select(pl.exclude("file"), repeat, "file")


def _choose(frame: "pl.DataFrame", version: str) -> "pl.DataFrame":
    """Rows of one version, or of the newest one of each collector."""
    import polars as pl

    if version == "all":
        return frame
    pairs = frame.select("collector", "collector_version").unique(maintain_order=True).rows()
    if version != "newest":
        check_choice("version", version, ["newest", "all", *sorted({v for _, v in pairs if v}, key=_order)])
    newest = {collector: max((v for c, v in pairs if c == collector), key=_order) for collector, _ in pairs}
    kept = [(c, v) for c, v in pairs if v == (newest[c] if version == "newest" else version)]
    keys = {"collector": pl.String, "collector_version": pl.String}
    chosen = pl.DataFrame(kept, keys, orient="row")
    return frame.join(chosen, on=list(keys), how="semi", nulls_equal=True, maintain_order="left")


def _order(version: str | None) -> tuple[tuple[int, int], ...]:
    """Sort key of a version: 1.3.0rc20 comes before 1.3.0, that before 1.3.0.post2; no version before all."""
    parts = re.findall(r"\d+|[a-z]+", (version or "").split("+")[0])
    key = [(2, int(part)) if part.isdigit() else (1 if part == "post" else -1, 0) for part in parts]
    return (*key, (0, 0)) if parts else ()
