"""Fits of whole frames: what readers of logs and databases give, sorted into the entries of a platform."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import polars as pl

from perfkit.fitting.collectives import fit_collective, fit_over_ranks
from perfkit.fitting.kernels import fit_roofline
from perfkit.fitting.parameters import Fit, Key
from perfkit.ground.hardware import DTYPES, Device
from perfkit.ground.units import Array, check_choice, format_bytes
from perfkit.models.collectives import OPERATIONS
from perfkit.models.roofline import attention_bytes, attention_flops, gemm_bytes, gemm_flops
from perfkit.readers import kernel_database as database

#: Spread above which a fit is called poor [-]; docs/formulas.md, table 1.4.
POOR = 0.25
#: Half-precision over int8 time below which the switch reduces, which it does not for int8 [-], from this size on [B].
IN_NETWORK, LARGE = 0.85, 2**26
#: First size from which on a curve does not show the start-up [B].
LATE = 2**20
#: Number formats to fit, if measured: those of gradients first.
PREFERRED = ("bf16", "fp16", "fp32", "fp64")


def fit_curves(
    frame: pl.DataFrame, *, ranks_per_node: int | None = None, source: str = "", date: str = ""
) -> dict[str, Fit]:
    """Fit every collective of a tidy frame: one curve per rank count, and a law where there are several.

    Names are ``<operation>.<ranks or any>[.<algorithm>]``: ``rail`` where a node has one rank, ``in_network`` and
    ``ring`` where half-precision sums are so much faster than int8 that the switch must reduce them. A law is fitted
    inside nodes or on rails, never across both. `ranks_per_node` counts where the frame knows no nodes.
    """
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


def _fit_operation(operation: str, place: str, rows: pl.DataFrame, source: str, date: str) -> dict[str, Fit]:
    """Curves of one operation by rank count, and the law over the counts that one algorithm serves."""
    fits, law, rail = {}, [], "rail" if place == "rail" else ""
    for (count,), group in sorted(rows.group_by("ranks"), key=lambda item: item[0]):
        dtype = next((name for name in PREFERRED if name in group["dtype"]), group["dtype"].mode().sort()[0])
        key, ring = Key(operation, int(count), rail), group.filter(pl.col("dtype") == dtype)
        fits[str(key)] = curve = _fit_curve(ring, source, date)
        if place == "inside" and operation == "all_reduce" and _is_in_network(group):
            ring = group.filter(pl.col("dtype") == "int8")
            text = "int8 takes the ring: the switch does not add it up"
            fits[str(key._replace(algorithm="ring"))] = _fit_curve(ring, source, date, text)
            curve = replace(curve, notes=(*curve.notes, "the switch adds up (in-network reduction, NVLS)"))
            fits |= dict.fromkeys((str(key), str(key._replace(algorithm="in_network"))), curve)
        law.append(ring)
    if len(law) > 1 and place != "across":
        every = pl.concat(law)
        columns = (every[name].to_numpy() for name in ("ranks", "nbytes", "seconds"))
        law_fit = fit_over_ranks(operation, *columns, date=date)
        fits[str(Key(operation, None, rail))] = _say_origin(law_fit, every, source)
    return fits


def _say_origin(fit: Fit, rows: pl.DataFrame, source: str) -> Fit:
    """Add the data id, the logs and the number formats to a fit, and whether it is poor."""
    logs, formats = sorted(rows["file"].unique()) if "line" in rows.columns else [], sorted(rows["dtype"].unique())
    text = ", ".join(part for part in (source, *logs, "/".join(formats)) if part)
    dtypes = tuple(name for name in DTYPES if name in formats)
    return _judge(replace(fit, source=text, sources=tuple(logs), dtypes=dtypes))


def _fit_curve(rows: pl.DataFrame, source: str, date: str, *notes: str) -> Fit:
    """One curve in one number format."""
    nbytes, seconds = rows["nbytes"].to_numpy(), rows["seconds"].to_numpy()
    fit = fit_collective(nbytes, seconds, date=date)
    late = f"the start-up is a guess: no message under {format_bytes(float(nbytes.min()))} was measured"
    notes = (*fit.notes, *([late] if nbytes.min() > LATE else []), *notes)
    return _say_origin(replace(fit, notes=notes), rows, source)


def _is_in_network(rows: pl.DataFrame) -> bool:
    """Whether large sums of half precision are much faster than those of int8."""
    large = rows.filter(pl.col("nbytes") >= LARGE).group_by("nbytes", "dtype").agg(pl.col("seconds").median())
    wide = large.pivot("dtype", index="nbytes", values="seconds")
    if not {"fp16", "int8"} <= set(wide.columns):
        return False
    ratio = (wide["fp16"] / wide["int8"]).median()
    return isinstance(ratio, float) and ratio < IN_NETWORK


def _judge(fit: Fit) -> Fit:
    """Mark a fit whose form does not describe the measurements."""
    if fit.spread <= POOR:
        return fit
    note = f"poor fit: measurements scatter by {fit.spread:.0%} around this form"
    return replace(fit, quality="poor", notes=(*fit.notes, note))


def fit_gemms(frame: pl.DataFrame, device: Device, *, source: str = "", date: str = "") -> dict[str, Fit]:
    """Fit the matrix products of a frame of `perfkit.readers.kernel_database.read_gemms`, each number format by itself.

    Of several kernels of a number format the one with the most shapes counts. ``gemm`` is half precision, which other
    formats without their own fit, such as ``gemm.fp8``, fall back on.
    """
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
        fit = _fit_kernel(rows, gemm_flops(m, n, k), nbytes, device, known, source=text, date=date)
        key = Key("gemm", variant="" if known in PREFERRED[:2] else known)
        fits[str(key)] = replace(fit, dtypes=(known,))
    if not fits:
        raise ValueError(
            f"frame holds products in {', '.join(sorted(set(frame['dtype']))) or 'no number format'}; {device.name} "
            f"has peaks for {', '.join(device.peaks)}; pass others"
        )
    return fits


def _fit_kernel(rows: pl.DataFrame, flops: Array, nbytes: Array, device: Device, dtype: str, **about: Any) -> Fit:
    rates: dict[str, Any] = {"peak": device.peaks[dtype].value, "bandwidth": device.main_bandwidth}
    return _judge(fit_roofline(flops, nbytes, rows["seconds"].to_numpy(), **rates, **about))


def fit_attention(
    frame: pl.DataFrame, device: Device, *, source: str = "", date: str = "", notes: Sequence[str] = ()
) -> dict[str, Fit]:
    """Fit fused attention over whole sequences, causal and full together.

    Of the frame of `perfkit.readers.kernel_database.read_attention`, rows with a window, a past, keys in other
    number formats, or head sizes beyond 128 are left out.
    """
    plain = (pl.col("window") == 0) & (pl.col("past") == 0) & (pl.col("kv_dtype") == pl.col("dtype"))
    rows = frame.filter(plain & (pl.col("head_dim") <= 128) & (pl.col("sequence") >= 32))
    sizes = ["causal", "batch", "sequence", "heads", "kv_heads", "head_dim"]
    rows = rows.group_by(*sizes, "dtype").agg(pl.col("seconds").median()).sort(*sizes)
    causal, b, s, h, kv, d = (rows[name].to_numpy().astype(float) for name in sizes)
    dtype = str(rows["dtype"][0])
    flops = attention_flops(b, h, s, d, causal=causal)
    nbytes = attention_bytes(b, h, s, d, kv_heads=kv, itemsize=DTYPES[dtype])
    about = {"source": source, "date": date, "notes": tuple(notes)}
    return {"attention": _fit_kernel(rows, flops, nbytes, device, dtype, **about)}


def fit_casts(frame: pl.DataFrame, device: Device, *, source: str = "", date: str = "") -> dict[str, Fit]:
    """Fit kernels that only move memory to casts that the last cache of the device cannot have served."""
    cache = near.value if (near := device.memory[-2:][0].capacity) and len(device.memory) > 1 else 0.0
    rows = frame.filter((pl.col("nbytes") > 4 * cache) | (pl.col("nbytes") < 2**20))
    rows = rows.group_by("nbytes").agg(pl.col("seconds").median()).sort("nbytes")
    nbytes, dtype = rows["nbytes"].to_numpy().astype(float), next(iter(device.peaks))
    note = "casts of bf16 to fp8, below 1 MiB and beyond four times the last cache"
    about = {"source": source, "date": date, "notes": (note,)}
    return {"elementwise": _fit_kernel(rows, 0.0 * nbytes, nbytes, device, dtype, **about)}


def fit_database(
    system: str, device: Device, *, parts: Sequence[str] = (), label: str = "", date: str = ""
) -> tuple[dict[str, Fit], dict[str, Fit]]:
    """Fit what a kernel database knows of a system, such as ``h100_sxm``: collectives, and kernels of a device.

    `parts` are some of ``collectives``, ``gemm``, ``attention`` and ``elementwise``, by default all there are; `label`
    names the database. Products are those that the collector sglang timed with random data, in bf16 and, if measured,
    fp8 and fp4; attention is flash attention of the version that vllm runs there, forward; casts are of plain torch.
    """
    label = label or name_database()
    held = set(database.list_tables(system)["table"])
    tables = {"collectives": "nccl", "gemm": "gemm", "attention": "context_attention", "elementwise": "scale_matrix"}
    asked = [check_choice("part", part, tables) for part in parts or tables if parts or tables[part] in held]
    about = {"source": f"{label}, {system}", "date": date}
    curves: dict[str, Fit] = {}
    kernels: dict[str, Fit] = {}
    if "collectives" in asked:
        frame = database.read_collectives(system)
        library = f"NCCL {frame['library_version'][0]}, medians over repeats"
        curves = fit_curves(frame, source=f"{label}, nccl {system}, {library}", date=date)
    if "gemm" in asked:
        frame = database.read_gemms(system, dtype=None).filter(pl.col("collector") == "sglang")
        kernels |= fit_gemms(frame, device, **about)
    if "attention" in asked:
        flash = (pl.col("collector") == "vllm") & pl.col("kernel").str.contains("flash_attn")
        frame = database.read_attention(system).filter(flash)
        names = "/".join(sorted(frame["kernel"].unique()))
        notes = ["forward only; the backward is taken to reach the same share of the peak"]
        if "fa3" in names or "fa4" in names:
            notes.append("torch's own flash attention is version 2: about half as fast there (arXiv 2407.08608)")
        more = {"source": f"{label}, {system}, {names}", "date": date}
        kernels |= fit_attention(frame, device, **more, notes=notes)
    if "elementwise" in asked:
        frame = database.read_casts(system).filter(pl.col("kernel") == "torch_ops")
        kernels |= fit_casts(frame, device, source=f"{label}, {system}, torch_ops", date=date)
    return curves, kernels


def name_database() -> str:
    """Name the kernel database that is installed, with its version where it is known."""
    try:
        return f"aiconfigurator-core {version('aiconfigurator-core')} (Apache-2.0)"
    except PackageNotFoundError:
        return "aiconfigurator-core (Apache-2.0)"
