"""What perfkit fits its models to, out of a kernel database: collectives, products, attention, casts."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perfkit.models.collectives import OPERATIONS, bus_bandwidth
from perfkit.readers.kernel_database.tables import list_tables, read_table
from perfkit.resources import reading
from perfkit.units import check_choice, escape

if TYPE_CHECKING:
    import polars as pl

__all__ = ["read_attention", "read_casts", "read_collectives", "read_gemms"]

#: perfkit's name of a number format by the recorded one; the others keep theirs (``fp8_block``, ``nvfp4``).
_DTYPES: Mapping[str, str] = MappingProxyType(
    {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32", "double": "fp64"}
)
#: Bytes of one element of a message [B].
_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
#: Who measured a row, beside its time.
_WITNESS = {"collector": "collector", "collector_version": "collector_version", "kernel": "kernel_source"}
#: Tells in one line where columns hold something else than they should.
_guard = reading("kernel database", "compare with its release", told=True)


@_guard
def read_collectives(system: str, *, version: str = "newest", root: str | Path | None = None) -> "pl.DataFrame":
    """Read the collectives of one system, as NCCL's test programs measured them (oneCCL's on Intel), out of place.

    Parameters
    ----------
    system : str
        System, as `list_tables` names it.
    version : str, optional
        Library version as the rows record it, ``newest`` or ``all``.
    root : str or Path, optional
        Where the database lies, as in `find_database`.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``operation``, ``ranks``, ``nodes`` (null: not recorded), ``dtype``, ``nbytes`` in the nccl-tests
        convention [B], ``seconds`` [s], ``algbw`` and ``busbw`` [B/s], ``library``, ``library_version`` (null where
        none is recorded), ``repeat`` (counts sweeps that were run again), ``file``.

    Raises
    ------
    FileNotFoundError
        Where there is no database.
    ValueError
        For an unknown system or version, a system without collectives, and a number format of unknown size.

    Notes
    -----
    The folder of a file may bear another version than its rows; the rows are right. Which algorithm the library chose
    is not recorded. On 8 H100 or H200 an all_reduce of fp16 takes 20 % less time than one of int8 from 64 MiB on: their
    switches add up fp16 but not int8 (in-network reduction), so do not fit one law to both.
    """
    import polars as pl

    held = list_tables(system, root=root)["table"]
    tables = [name for name in ("nccl", "oneccl") if name in held]
    if not tables:
        raise ValueError(f"{system} has no table of collectives; it has {', '.join(held.unique(maintain_order=True))}")
    columns = ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
    frames = [
        read_table(system, name, columns=columns, root=root).with_columns(library=pl.lit(name)) for name in tables
    ]
    frame = pl.concat(frames).with_columns(dtype=pl.col("nccl_dtype").replace(_DTYPES), collector="library")
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
        System, as `list_tables` names it.
    dtype : str, optional
        Number format, such as ``bf16`` or ``fp8_block``; None for all.
    version : str, optional
        Version of the collectors as the rows record it, ``newest`` (of each collector) or ``all``.
    root : str or Path, optional
        Where the database lies, as in `find_database`.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``dtype``, ``m``, ``n``, ``k``, ``seconds`` [s], ``collector``, ``collector_version``, ``kernel``,
        ``repeat``, ``file``.

    Raises
    ------
    FileNotFoundError
        Where there is no database.
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
        System, as `list_tables` names it.
    dtype : str, optional
        Number format of the queries, such as ``bf16``; None for all.
    version : str, optional
        Version of the collectors as the rows record it, ``newest`` (of each collector) or ``all``.
    root : str or Path, optional
        Where the database lies, as in `find_database`.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``dtype``, ``kv_dtype`` (of keys and values in memory), ``causal``, ``batch``, ``sequence`` (queries
        of a sample), ``past`` (earlier keys that they see as well), ``heads``, ``kv_heads``, ``head_dim``, ``window``
        (keys a query sees, 0 for all), ``seconds`` [s], ``collector``, ``collector_version``, ``kernel``, ``repeat``,
        ``file``.

    Raises
    ------
    FileNotFoundError
        Where there is no database.
    ValueError
        For an unknown system, version or number format, and a system that has no such attention.
    """
    import polars as pl

    # An encoder has a key for every query and head, and no cache whose format could differ.
    absent = {"num_key_value_heads": None, "kv_cache_dtype": None, "step": 0, "window_size": 0}
    names = {
        "dtype": "dtype",
        "kv_dtype": pl.coalesce(_rename("kv_cache_dtype"), "dtype"),
        "causal": pl.col("op_name") != "encoder_attention",
        "batch": "batch_size", "sequence": "isl", "past": "step", "heads": "num_heads",
        "kv_heads": pl.coalesce("num_key_value_heads", "num_heads"), "head_dim": "head_dim", "window": "window_size",
        "seconds": "seconds", **_WITNESS,
    }  # fmt: skip
    held = set(list_tables(system, root=root)["table"])
    columns = ("op_name", "batch_size", "isl", "num_heads", "head_dim")
    tables = ["context_attention", *({"encoder_attention"} & held)]
    frames = [_read(system, table, columns, ("attn_dtype", dtype), root, absent) for table in tables]
    return pl.concat(_tidy(frame, version, names) for frame in frames)


@_guard
def read_casts(system: str, *, version: str = "newest", root: str | Path | None = None) -> "pl.DataFrame":
    """Read the casts of a bf16 matrix to fp8 by a known scale: the only kernels here that memory alone bounds.

    Parameters
    ----------
    system : str
        System, as `list_tables` names it.
    version : str, optional
        Version of the collectors as the rows record it, ``newest`` (of each collector) or ``all``.
    root : str or Path, optional
        Where the database lies, as in `find_database`.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``dtype`` (written), ``rows``, ``columns``, ``nbytes`` (two read and one written per element [B]),
        ``seconds`` [s], ``collector``, ``collector_version``, ``kernel``, ``repeat``, ``file``.

    Raises
    ------
    FileNotFoundError
        Where there is no database.
    ValueError
        For an unknown system or version, and a system that has no such casts (A100 has none).

    Notes
    -----
    Matrices that fit the L2 cache stay there between repetitions and run faster than main memory. From 100 M elements
    on, collectors ``vllm`` and ``trtllm`` reach 64–91 % of the datasheet bandwidth; the kernel of ``sglang`` reaches a
    tenth of it: leave it out.
    """
    import polars as pl

    frame = _read(system, "scale_matrix", ("m", "k"), ("quant_dtype", "fp8"), root)
    nbytes = 3 * pl.col("m") * pl.col("k")
    names = {"dtype": "dtype", "rows": "m", "columns": "k", "nbytes": nbytes, "seconds": "seconds"}
    return _tidy(frame, version, names | _WITNESS)


def _read(
    system: str,
    table: str,
    columns: tuple[str, ...],
    dtype: tuple[str, str | None],
    root: str | Path | None,
    absent: Mapping[str, Any] = MappingProxyType({}),
) -> "pl.DataFrame":
    """Rows of a table whose column `dtype[0]` holds the number format `dtype[1]`, named ``dtype``."""
    column, wanted = dtype
    where = None if wanted is None else _rename(column) == wanted
    columns, defaults = (*columns, column, "latency"), {"kernel_source": None, **absent}
    frame = read_table(system, table, columns=columns, defaults=defaults, where=where, root=root)
    if not frame.height:
        every = read_table(system, table, columns=[column], root=root)
        check_choice("dtype", wanted, every.select(_rename(column).unique().sort()).to_series())
    return frame.with_columns(_rename(column).alias("dtype"))


def _rename(column: str) -> "pl.Expr":
    """A recorded number format of a kernel in perfkit's words."""
    import polars as pl

    return pl.col(column).cast(pl.String).replace(_DTYPES)


def _tidy(frame: "pl.DataFrame", version: str, names: Mapping[str, Any]) -> "pl.DataFrame":
    """Leave out what was not measured, choose versions, name the columns, and number the repeats."""
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
    """Sort key of a version: 1.3.0rc20 comes before 1.3.0, that before 1.3.0.post2; what is not recorded before all."""
    parts = re.findall(r"\d+|[a-z]+", (version or "").split("+")[0])
    key = [(2, int(part)) if part.isdigit() else (1 if part == "post" else -1, 0) for part in parts]
    return (*key, (0, 0)) if parts else ()
