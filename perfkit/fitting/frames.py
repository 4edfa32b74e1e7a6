"""Fits of whole frames: what readers of logs and databases give, sorted into the entries of a platform."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from perfkit.fitting.collectives import fit_collective, fit_over_ranks
from perfkit.fitting.kernels import fit_roofline
from perfkit.fitting.parameters import Fit
from perfkit.hardware import DTYPES, Device
from perfkit.models.collectives import OPERATIONS
from perfkit.models.roofline import gemm_bytes, gemm_flops
from perfkit.units import Array, check_choice, format_bytes

if TYPE_CHECKING:
    import polars

__all__ = ["POOR", "fit_attention", "fit_casts", "fit_curves", "fit_database", "fit_gemms", "name_database"]

#: Spread above which a platform says that a form does not fit its measurements [-].
POOR = 0.25
#: Half-precision sums faster than those of int8 by more than this are done by the switch, which adds up no int8 [-].
IN_NETWORK, LARGE = 0.85, 2**26
#: Curves that begin later do not show the start-up [B].
LATE = 2**20
#: What is added up in training comes first; the others are fitted where they are all there is.
PREFERRED = ("bf16", "fp16", "fp32", "fp64")


def fit_curves(
    frame: "polars.DataFrame", *, ranks_per_node: int | None = None, source: str = "", date: str = ""
) -> dict[str, Fit]:
    """Fit every collective of a tidy frame: one curve per rank count, and a law where there are several.

    Parameters
    ----------
    frame : polars.DataFrame
        As the readers give it: operation, ranks, nodes, dtype, nbytes [B], seconds [s]; in_place where it is known.
    ranks_per_node : int, optional
        Ranks of a node, where the frame does not say on how many nodes it was measured [-].
    source : str, optional
        Data id.
    date : str, optional
        Day of the measurements, ISO 8601.

    Returns
    -------
    fits : dict of str to Fit
        By ``<operation>.<ranks or any>[.<way>]``; ``rail`` where every node has one rank, ``in_network`` and ``ring``
        where sums of half precision are so much faster than those of int8 that the switch must have added them up. A
        law is fitted inside nodes and on rails, never across both.

    Raises
    ------
    ValueError
        For a frame without measurements of a known operation.
    """
    import polars as pl

    rows = frame.filter(pl.col("operation").is_in(OPERATIONS) & (pl.col("nbytes") > 0) & (pl.col("seconds") > 0))
    if "in_place" in rows.columns:
        rows = rows.filter(~pl.col("in_place"))
    if rows.is_empty():
        known = ", ".join(sorted(frame["operation"].unique())) or "nothing"
        raise ValueError(f"frame holds {known}; it must hold times of {', '.join(OPERATIONS)}; pass other logs")
    guess = 1 if ranks_per_node is None else (pl.col("ranks") / ranks_per_node).ceil()
    nodes = pl.coalesce(pl.col("nodes"), guess)
    place = pl.when(nodes == 1).then(pl.lit("inside")).when(nodes == pl.col("ranks")).then(pl.lit("rail"))
    fits: dict[str, Fit] = {}
    groups = rows.with_columns(place=place.otherwise(pl.lit("across"))).group_by("operation", "place")
    for (operation, where), group in sorted(groups, key=lambda item: str(item[0])):
        fits |= _fit_operation(str(operation), str(where), group, source, date)
    return fits


def _fit_operation(operation: str, place: str, rows: "polars.DataFrame", source: str, date: str) -> dict[str, Fit]:
    """Curves of one operation by rank count, and the law over the counts that one algorithm serves."""
    import polars as pl

    fits, law, ending = {}, [], ".rail" if place == "rail" else ""
    for (count,), group in sorted(rows.group_by("ranks"), key=lambda item: item[0]):
        dtype = next((name for name in PREFERRED if name in group["dtype"]), group["dtype"].mode().sort()[0])
        key, ring = f"{operation}.{count}{ending}", group.filter(pl.col("dtype") == dtype)
        fits[key] = _fit_curve(ring, source, date)
        if place == "inside" and operation == "all_reduce" and _is_in_network(group):
            ring = group.filter(pl.col("dtype") == "int8")
            fits[f"{key}.ring"] = _fit_curve(ring, source, date, "int8 takes the ring: the switch does not add it up")
            fits[key] = replace(fits[key], notes=(*fits[key].notes, "the switch adds up (in-network reduction, NVLS)"))
            fits[f"{key}.in_network"] = fits[key]
        law.append(ring)
    if len(law) > 1 and place != "across":
        every = pl.concat(law)
        columns = (every[name].to_numpy() for name in ("ranks", "nbytes", "seconds"))
        text = _name_source(every, source)
        fits[f"{operation}.any{ending}"] = _say_poor(fit_over_ranks(operation, *columns, source=text, date=date))
    return fits


def _name_source(rows: "polars.DataFrame", source: str) -> str:
    """The data id, the logs, and the number formats."""
    logs = sorted(rows["file"].unique()) if "line" in rows.columns else []
    return ", ".join(part for part in (source, *logs, "/".join(sorted(rows["dtype"].unique()))) if part)


def _fit_curve(rows: "polars.DataFrame", source: str, date: str, *notes: str) -> Fit:
    """One curve in one number format."""
    text = _name_source(rows, source)
    nbytes, seconds = rows["nbytes"].to_numpy(), rows["seconds"].to_numpy()
    fit = fit_collective(nbytes, seconds, source=text, date=date)
    late = f"the start-up is a guess: no message under {format_bytes(float(nbytes.min()))} was measured"
    return _say_poor(replace(fit, notes=(*fit.notes, *([late] if nbytes.min() > LATE else []), *notes)))


def _is_in_network(rows: "polars.DataFrame") -> bool:
    """Whether large sums of half precision are much faster than those of int8."""
    import polars as pl

    large = rows.filter(pl.col("nbytes") >= LARGE).group_by("nbytes", "dtype").agg(pl.col("seconds").median())
    wide = large.pivot("dtype", index="nbytes", values="seconds")
    if not {"fp16", "int8"} <= set(wide.columns):
        return False
    ratio = (wide["fp16"] / wide["int8"]).median()
    return isinstance(ratio, float) and ratio < IN_NETWORK


def _say_poor(fit: Fit) -> Fit:
    """Add to a fit that its form does not describe the measurements, where it does not."""
    if fit.spread <= POOR:
        return fit
    return replace(fit, notes=(*fit.notes, f"poor fit: measurements scatter by {fit.spread:.0%} around this form"))


def fit_gemms(frame: "polars.DataFrame", device: Device, *, source: str = "", date: str = "") -> dict[str, Fit]:
    """Fit the matrix products of a tidy frame, each number format by itself.

    Parameters
    ----------
    frame : polars.DataFrame
        As `perfkit.readers.kernel_database.read_gemms` gives it: dtype, m, n, k, seconds [s]; of several kernels of a
        number format the one with the most shapes counts.
    device : Device
        What it was measured on, for its peaks and bandwidth.
    source : str, optional
        Data id.
    date : str, optional
        Day of the measurements, ISO 8601.

    Returns
    -------
    fits : dict of str to Fit
        ``gemm`` of half precision, which other formats without their own fall back on, and such as ``gemm.fp8``.

    Raises
    ------
    ValueError
        For a frame without products in a number format of the device.
    """
    import polars as pl

    fits = {}
    for (dtype,), group in sorted(frame.group_by("dtype"), key=lambda item: item[0]):
        known = {"nvfp4": "fp4"}.get(dtype, dtype)
        if known not in device.peaks:
            continue
        kernel = group["kernel"].mode().sort()[0] if "kernel" in group.columns else None
        rows = group if kernel is None else group.filter(pl.col("kernel") == kernel)
        rows = rows.group_by("m", "n", "k").agg(pl.col("seconds").median()).sort("m", "n", "k")
        m, n, k = (rows[name].to_numpy().astype(float) for name in ("m", "n", "k"))
        nbytes = gemm_bytes(m, n, k, itemsize=DTYPES[known])
        if known in ("fp8", "fp4", "int8"):  # what comes out is half precision
            nbytes = nbytes + (2 - DTYPES[known]) * m * n
        text = f"{source}, gemm {dtype}{f' {kernel}' if kernel else ''}".removeprefix(", ")
        fit = _fit_kernel(gemm_flops(m, n, k), nbytes, rows["seconds"].to_numpy(), device, known, text, date)
        fits["gemm" if known in PREFERRED[:2] else f"gemm.{known}"] = fit
    if not fits:
        raise ValueError(
            f"frame holds products in {', '.join(sorted(set(frame['dtype']))) or 'no number format'}; {device.name} "
            f"has peaks for {', '.join(device.peaks)}; pass others"
        )
    return fits


def _fit_kernel(
    flops: Array, nbytes: Array, seconds: Array, device: Device, dtype: str, source: str, date: str, *notes: str
) -> Fit:
    memory = device.memory[-1].bandwidth
    rates = {"peak": device.peaks[dtype].value, "bandwidth": memory.value if memory else 0.0}
    return _say_poor(fit_roofline(flops, nbytes, seconds, **rates, source=source, date=date, notes=notes))


def fit_attention(
    frame: "polars.DataFrame", device: Device, *, source: str = "", date: str = "", notes: Sequence[str] = ()
) -> dict[str, Fit]:
    """Fit fused attention over whole sequences.

    Parameters
    ----------
    frame : polars.DataFrame
        As `perfkit.readers.kernel_database.read_attention` gives it; rows with a window, a past, other number formats
        of keys, or head sizes beyond 128 are left out.
    device : Device
        What it was measured on.
    source : str, optional
        Data id.
    date : str, optional
        Day of the measurements, ISO 8601.
    notes : sequence of str, optional
        What a reader should know.

    Returns
    -------
    fits : dict of str to Fit
        ``attention``, of causal and full attention together.
    """
    import polars as pl

    plain = (pl.col("window") == 0) & (pl.col("past") == 0) & (pl.col("kv_dtype") == pl.col("dtype"))
    rows = frame.filter(plain & (pl.col("head_dim") <= 128) & (pl.col("sequence") >= 32))
    sizes = ["causal", "batch", "sequence", "heads", "kv_heads", "head_dim"]
    rows = rows.group_by(*sizes, "dtype").agg(pl.col("seconds").median()).sort(*sizes)
    causal, b, s, h, kv, d = (rows[name].to_numpy().astype(float) for name in sizes)
    dtype = str(rows["dtype"][0])
    flops, nbytes = 4.0 * b * h * s**2 * d * (1.0 - 0.5 * causal), DTYPES[dtype] * 2.0 * b * s * d * (h + kv)
    return {"attention": _fit_kernel(flops, nbytes, rows["seconds"].to_numpy(), device, dtype, source, date, *notes)}


def fit_casts(frame: "polars.DataFrame", device: Device, *, source: str = "", date: str = "") -> dict[str, Fit]:
    """Fit kernels that only move memory to casts of matrices.

    Parameters
    ----------
    frame : polars.DataFrame
        As `perfkit.readers.kernel_database.read_casts` gives it: nbytes [B] and seconds [s].
    device : Device
        What it was measured on; what its last cache may have served is left out.
    source : str, optional
        Data id.
    date : str, optional
        Day of the measurements, ISO 8601.

    Returns
    -------
    fits : dict of str to Fit
        ``elementwise``.
    """
    import polars as pl

    cache = near.value if (near := device.memory[-2:][0].capacity) and len(device.memory) > 1 else 0.0
    rows = frame.filter((pl.col("nbytes") > 4 * cache) | (pl.col("nbytes") < 2**20))
    rows = rows.group_by("nbytes").agg(pl.col("seconds").median()).sort("nbytes")
    nbytes, dtype = rows["nbytes"].to_numpy().astype(float), next(iter(device.peaks))
    note = "casts of bf16 to fp8, below 1 MiB and beyond four times the last cache"
    return {
        "elementwise": _fit_kernel(0.0 * nbytes, nbytes, rows["seconds"].to_numpy(), device, dtype, source, date, note)
    }


def fit_database(
    system: str, device: Device, *, parts: Sequence[str] = (), label: str = "", date: str = "", root: str | None = None
) -> tuple[dict[str, Fit], dict[str, Fit]]:
    """Fit what a kernel database knows of a system.

    Parameters
    ----------
    system : str
        System as the database names it, such as ``h100_sxm`` [-].
    device : Device
        What it was measured on, for peaks, bandwidth and cache.
    parts : sequence of str, optional
        Some of ``collectives``, ``gemm``, ``attention`` and ``elementwise``; by default all that the system has.
    label : str, optional
        Name and version of the database, by default that of the installed package [-].
    date : str, optional
        Day of the entry, ISO 8601.
    root : str, optional
        Where the database lies, see `perfkit.readers.kernel_database.find_database`.

    Returns
    -------
    collectives, kernels : dict of str to Fit
        Fits by the names that a platform uses.

    Raises
    ------
    FileNotFoundError
        Where there is no database.
    ValueError
        For an unknown system, or a part that it lacks.

    Notes
    -----
    Products are those that the collector sglang timed with random data, in bf16 and, where measured, fp8 and fp4;
    attention is flash attention of the version that vllm runs there, forward; casts are those of plain torch.
    """
    import polars as pl

    from perfkit.readers import kernel_database as database

    label = label or name_database()
    held = set(database.list_tables(system, root=root)["table"])
    tables = {"collectives": "nccl", "gemm": "gemm", "attention": "context_attention", "elementwise": "scale_matrix"}
    asked = [check_choice("part", part, tables) for part in parts or tables if parts or tables[part] in held]
    about = {"source": f"{label}, {system}", "date": date}
    curves: dict[str, Fit] = {}
    kernels: dict[str, Fit] = {}
    if "collectives" in asked:
        frame = database.read_collectives(system, root=root)
        library = f"NCCL {frame['library_version'][0]}, medians over repeats"
        curves = fit_curves(frame, source=f"{label}, nccl {system}, {library}", date=date)
    if "gemm" in asked:
        frame = database.read_gemms(system, dtype=None, root=root).filter(pl.col("collector") == "sglang")
        kernels |= fit_gemms(frame, device, **about)
    if "attention" in asked:
        flash = (pl.col("collector") == "vllm") & pl.col("kernel").str.contains("flash_attn")
        frame = database.read_attention(system, root=root).filter(flash)
        names = "/".join(sorted(frame["kernel"].unique()))
        notes = ["forward only; the backward is taken to reach the same share of the peak"]
        if "fa3" in names or "fa4" in names:
            notes.append("torch's own flash attention is version 2: about half as fast there (arXiv 2407.08608)")
        more = {"source": f"{label}, {system}, {names}", "date": date}
        kernels |= fit_attention(frame, device, **more, notes=notes)
    if "elementwise" in asked:
        frame = database.read_casts(system, root=root).filter(pl.col("kernel") == "torch_ops")
        kernels |= fit_casts(frame, device, source=f"{label}, {system}, torch_ops", date=date)
    return curves, kernels


def name_database() -> str:
    """Name the kernel database that is installed, with its version where it is known.

    Returns
    -------
    label : str
        Package, version and licence [-].
    """
    try:
        return f"aiconfigurator-core {version('aiconfigurator-core')} (Apache-2.0)"
    except PackageNotFoundError:
        return "aiconfigurator-core (Apache-2.0)"
