"""The files of a kernel database: where they lie, what they hold, and their columns in base units.

A table per kind of kernel, collector (the serving framework whose kernels were timed) and version of it is stored as
``SYSTEM/FAMILY/COLLECTOR/VERSION/TABLE_perf.parquet`` since release 0.12; earlier releases are not read. Columns differ
from file to file: names find them.
"""

import os
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfkit.resources import reading
from perfkit.units import check_choice

if TYPE_CHECKING:
    import polars as pl

__all__ = ["find_database", "list_tables", "read_table"]

#: Packages that carry the tables: since release 0.11, and before.
_PACKAGES = ("aiconfigurator_core", "aiconfigurator")
#: Ways from a folder that somebody names to the folder of systems, the longest first, and from there to the tables.
_WAYS = (*(f"{package}/systems/data" for package in _PACKAGES), "systems/data", "data", "")
#: Tables below the folder of systems, and as releases before 0.12 had them.
_TABLES, _OLDER = "*/*/*/*/*_perf.parquet", "*/*/*/*_perf.*"
#: Largest file of a table [B], and most rows [-]: releases up to 0.12 stay below a tenth of both.
_LARGEST, _MOST_ROWS = 2**28, 3_000_000
_INSTALL = "`pip install --no-deps 'aiconfigurator-core>=0.12'`"
#: Tables whose ``latency`` counts microseconds; everywhere else it counts milliseconds.
_MICROSECONDS = ("moe_a2a", "deepep")
#: Units that end a column's name: what they become, and the factor.
_UNITS = {"_us": ("_seconds", 1e-6), "_ms": ("_seconds", 1e-3), "_bandwidth_gbps": ("_bandwidth", 1e9)}


def find_database(root: str | Path | None = None) -> Path:
    """Find the folder that holds one folder of tables per system.

    Parameters
    ----------
    root : str or Path, optional
        Where to look: that folder, one around it, or what ``pip install --target`` filled. By default the environment
        variable ``PERFKIT_KERNEL_DATABASE``, else the installed package, which is not imported.

    Returns
    -------
    folder : Path
        Folder of systems.

    Raises
    ------
    FileNotFoundError
        Where there is no database, or one of a release before 0.12; the message says how to install one.
    """
    named = root or os.environ.get("PERFKIT_KERNEL_DATABASE")
    if named:
        places = [Path(named) / way for way in _WAYS]
    else:
        specs = [spec for package in _PACKAGES if (spec := find_spec(package)) is not None]
        places = [Path(home) / "systems/data" for spec in specs for home in spec.submodule_search_locations or ()]
    for place in places:
        if any(place.glob(_TABLES)):
            return place
        if any(place.glob(_OLDER)):
            raise FileNotFoundError(
                f"{place} holds a release before 0.12, which is not read; {_INSTALL} brings another"
            )
    where = f"in {named}" if named else "installed"
    raise FileNotFoundError(
        f"no kernel database {where}; {_INSTALL} brings one (perfkit only reads its files: what the package depends on "
        "is not needed), or name its folder as root= or in PERFKIT_KERNEL_DATABASE"
    )


def list_tables(system: str | None = None, *, root: str | Path | None = None) -> "pl.DataFrame":
    """List what a kernel database holds.

    Parameters
    ----------
    system : str, optional
        One system, such as ``h100_sxm``; all by default.
    root : str or Path, optional
        Where the database lies, as in `find_database`.

    Returns
    -------
    tables : polars.DataFrame
        ``system``, ``table`` (as `read_table` takes it), ``collector`` and ``version`` (as the folders are named; the
        rows may know better), ``file`` below the folder of systems, ``nbytes`` of the file [B].

    Raises
    ------
    FileNotFoundError
        Where there is no database.
    ValueError
        For an unknown system; the message lists those that have tables.
    """
    import polars as pl

    folder = find_database(root)
    if any(place.name == system for place in folder.iterdir()) and (own := _list_files(folder, str(system))):
        return pl.DataFrame(own)
    tables = pl.DataFrame(_list_files(folder, "*"))
    if system is not None:
        check_choice("system", system, tables["system"].unique(maintain_order=True))
    return tables


def _list_files(folder: Path, system: str) -> list[dict[str, Any]]:
    """Facts of the files of one system, or of all where it is a star."""
    return [
        {
            "system": path.relative_to(folder).parts[0],
            "table": path.stem.removesuffix("_perf"),
            "collector": path.parent.parent.name,
            "version": path.parent.name,
            "file": path.relative_to(folder).as_posix(),
            "nbytes": path.stat().st_size,
        }
        for path in sorted(folder.glob(_TABLES.replace("*", system, 1)), key=str)
    ]


def read_table(
    system: str,
    table: str,
    *,
    columns: Collection[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    where: "pl.Expr | None" = None,
    root: str | Path | None = None,
) -> "pl.DataFrame":
    """Read one table of one system, as all its collectors and versions recorded it, with times in seconds.

    Parameters
    ----------
    system : str
        System, as `list_tables` names it.
    table : str
        Table, such as ``moe_a2a``.
    columns : collection of str, optional
        Recorded columns to read, which every file must have; all columns by default.
    defaults : mapping, optional
        More columns, which some files lack, and what the rows of those files get instead.
    where : polars.Expr, optional
        Rows to read, a condition on recorded columns; all by default.
    root : str or Path, optional
        Where the database lies, as in `find_database`.

    Returns
    -------
    rows : polars.DataFrame
        ``system``, ``collector``, ``collector_version`` (null where none is recorded), the columns, ``file``.
        ``latency`` becomes ``seconds`` [s], ``*_us`` and ``*_ms`` become ``*_seconds`` [s], ``*_bandwidth_gbps``
        becomes ``*_bandwidth`` [B/s]; ``message_size`` stays in elements.

    Raises
    ------
    FileNotFoundError
        Where there is no database.
    ValueError
        For an unknown system or table, a missing column, and a file that cannot be read or is a git-LFS pointer; the
        message names the file.

    Notes
    -----
    Files are scanned one after another: only the columns and rows that were asked for are ever in memory.
    """
    import polars as pl

    tables = list_tables(system, root=root)
    check_choice(f"table of {system}", table, tables["table"].unique(maintain_order=True))
    folder, frames = find_database(root), []
    for file, collector in tables.filter(pl.col("table") == table).select("file", "collector").iter_rows():
        frame = _read_file(folder / file, table, columns, defaults or {}, where)
        recorded = [name for name in ("framework", "version") if name in frame.columns]
        framework = pl.col("framework").str.to_lowercase() if "framework" in recorded else pl.lit(collector)
        version = pl.col("version") if "version" in recorded else pl.lit(None, pl.String)
        about = {"system": pl.lit(system), "collector": framework, "collector_version": version}
        rest = {name: pl.col(name) for name in frame.columns if name not in recorded}
        frames.append(frame.select(**about, **rest, file=pl.lit(file)))
    return pl.concat([frame for frame in frames if frame.height] or frames[:1], how="diagonal_relaxed")


def _read_file(
    path: Path, table: str, columns: Collection[str] | None, defaults: Mapping[str, Any], where: "pl.Expr | None"
) -> "pl.DataFrame":
    """Rows of one file, and who recorded them."""
    import polars as pl

    with reading(path, f"{_INSTALL} brings a sound one", most=_LARGEST):
        scan = _scan(path)
        names = scan.collect_schema().names()
        if (rows := scan.select(pl.len()).collect().item()) > _MOST_ROWS:
            raise ValueError(f"it has {rows:,} rows; at most {_MOST_ROWS:,} are read")
        scan = scan.with_columns(pl.lit(defaults[name]).alias(name) for name in defaults if name not in names)
        needed = [*(columns or ()), *([] if where is None else where.meta.root_names())]
        if missing := [name for name in dict.fromkeys(needed) if name not in {*names, *defaults}]:
            raise ValueError(
                f"{path} has no column {', '.join(missing)}; it has {', '.join(names[:40])}; read_table reads others"
            )
        scan = scan if where is None else scan.filter(where)
        asked = names if columns is None else [name for name in names if name in {*columns, "framework", "version"}]
        units = {name: _find_unit(name, table) for name in dict.fromkeys([*asked, *defaults])}
        return scan.select(
            (pl.col(name) if factor == 1 else pl.col(name).cast(pl.Float64) * factor).alias(base)
            for name, (base, factor) in units.items()
        ).collect()


def _scan(path: Path) -> "pl.LazyFrame":
    """Open a table without reading it."""
    import polars as pl

    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path} is a git-LFS pointer, not the table: run `git lfs pull` there, or {_INSTALL}")
    if not head.startswith(b"PAR1"):
        raise ValueError(f"{path} is no parquet file, it starts with {head[:12]!r}; {_INSTALL} brings a sound one")
    return pl.scan_parquet(path)


def _find_unit(name: str, table: str) -> tuple[str, float]:
    """Name of a recorded column in base units, and the factor; 1 where it has none that needs a change."""
    if name == "latency":
        return "seconds", 1e-6 if any(word in table for word in _MICROSECONDS) else 1e-3
    for ending, (instead, factor) in _UNITS.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + instead, factor
    return name, 1.0
