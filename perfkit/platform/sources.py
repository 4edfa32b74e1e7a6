"""Platforms from data that people already have: logs of nccl-tests, a kernel database, and parts
measured before."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from perfkit.fitting import Fit, fit_collective, fit_over_ranks, fit_roofline
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import DTYPES, Device, Link, Network, Quantity
from perfkit.ground.results import Table
from perfkit.ground.units import check_choice, format_bytes
from perfkit.models.collectives import OPERATIONS, bus_factor
from perfkit.models.hierarchy import OVERLAP
from perfkit.models.roofline import attention_bytes, attention_flops, gemm_bytes, gemm_flops
from perfkit.platform.collectives import LATE, Match
from perfkit.platform.file import list_gallery
from perfkit.platform.gallery import MODEL, load_platform
from perfkit.platform.platform import Platform
from perfkit.readers import kernel_database as database
from perfkit.readers.datasheets import HOP, list_datasheets, read_datasheet
from perfkit.readers.nccl import list_devices, read_nccl_tests

#: Spread above which a fit is called poor [-]; docs/formulas.md, table 1.4.
POOR = 0.25
#: The switch reduces if half precision takes less than this share of the time of int8 [-], from
#: this size on [B].
IN_NETWORK, LARGE = 0.85, 2**26
UNFITTED = "no standard error: not fitted"
#: Number formats to fit, if measured: those of gradients first.
PREFERRED = ("bf16", "fp16", "fp32", "fp64")


def _say_origin(fit: Fit, source: str, date: str) -> Fit:
    """Add source, files, formats and date to a fit; mark it as poor if its spread is wide."""
    text = ", ".join(filter(None, (source, *fit.sources, "/".join(sorted(fit.dtypes)))))
    fit = replace(fit, source=text, date=date)
    if fit.spread <= POOR:
        return fit
    note = f"poor fit: measurements scatter by {fit.spread:.0%} around this form"
    return replace(fit, quality="poor", notes=(*fit.notes, note))


def _list_logs(rows: Table) -> tuple[str, ...]:
    return tuple(sorted(rows["file"].unique())) if "line" in rows.columns else ()


def fit_curves(
    frame: Table, *, ranks_per_node: int | None = None, source: str = "", date: str = ""
) -> dict[str, Fit]:
    """Fit every collective of a tidy frame: one curve per rank count, and a law over several
    counts.

    Names are ``<operation>.<ranks or any>[.<algorithm>]``. The algorithm is ``rail`` if nodes have
    one rank each, and ``in_network`` and ``ring`` if half-precision sums are so much faster than
    int8 that the switch must reduce them. A law is fitted only inside nodes: between nodes the
    algorithm changes with the count. `ranks_per_node` is used where the frame has no nodes.
    """
    rows = _select(frame).filter(pl.col("operation").is_in(OPERATIONS) & (pl.col("seconds") > 0))
    if rows.is_empty():
        known = ", ".join(sorted(frame["operation"].unique())) or "nothing"
        raise ValueError(
            f"frame holds {known}; it must hold times of {', '.join(OPERATIONS)}; pass other logs"
        )
    guess = 1 if ranks_per_node is None else (pl.col("ranks") / ranks_per_node).ceil()
    nodes = pl.coalesce(pl.col("nodes"), guess)
    place = (
        pl.when(nodes == 1)
        .then(pl.lit("inside"))
        .when(nodes == pl.col("ranks"))
        .then(pl.lit("rail"))
    )
    fits: dict[str, Fit] = {}
    groups = rows.with_columns(place=place.otherwise(pl.lit("across"))).group_by(
        "operation", "place"
    )
    for (operation, where), group in sorted(groups, key=lambda item: str(item[0])):
        fits |= _fit_operation(str(operation), str(where), group)
    return {key: _say_origin(fit, source, date) for key, fit in fits.items()}


def _select(frame: Table) -> Table:
    """Rows with bytes, out of place if that is known."""
    rows = frame.filter(pl.col("nbytes") > 0)
    return rows.filter(~pl.col("in_place")) if "in_place" in rows.columns else rows


def _fit_operation(operation: str, place: str, rows: Table) -> dict[str, Fit]:
    """Fit the curves of one operation by rank count, and the law over the counts inside nodes."""
    fits, law, rail = {}, [], "rail" if place == "rail" else ""
    for (count,), group in sorted(rows.group_by("ranks"), key=lambda item: item[0]):
        dtype = next(
            (name for name in PREFERRED if name in group["dtype"]), group["dtype"].mode().sort()[0]
        )
        key, ring = Key(operation, int(count), rail), group.filter(pl.col("dtype") == dtype)
        fits[str(key)] = curve = _fit_curve(ring)
        if place == "inside" and operation == "all_reduce" and _is_in_network(group):
            ring = group.filter(pl.col("dtype") == "int8")
            fits[f"{key}.ring"] = _fit_curve(
                ring, "int8 takes the ring: the switch does not reduce it"
            )
            curve = replace(
                curve, notes=(*curve.notes, "the switch reduces (in-network reduction, NVLS)")
            )
            fits |= {str(key): curve, f"{key}.in_network": curve}
        law.append(ring)
    if len(law) > 1 and place == "inside":
        every = pl.concat(law)
        fit = fit_over_ranks(
            operation, *(every[name].to_numpy() for name in ("ranks", "nbytes", "seconds"))
        )
        dtypes = tuple(sorted(every["dtype"].unique()))
        fits[f"{operation}.any"] = replace(fit, sources=_list_logs(every), dtypes=dtypes)
    return fits


def _fit_curve(rows: Table, *notes: str) -> Fit:
    """Fit one curve in one number format."""
    nbytes = rows["nbytes"].to_numpy()
    fit, least = fit_collective(nbytes, rows["seconds"].to_numpy()), float(nbytes.min())
    if least > LATE:
        notes = (
            f"the start-up is a guess: no message under {format_bytes(least)} was measured",
            *notes,
        )
    return replace(
        fit, notes=(*fit.notes, *notes), sources=_list_logs(rows), dtypes=(rows["dtype"][0],)
    )


def _is_in_network(rows: Table) -> bool:
    """Whether large sums in half precision are much faster than in int8."""
    large = (
        rows.filter(pl.col("nbytes") >= LARGE)
        .group_by("nbytes", "dtype")
        .agg(pl.col("seconds").median())
    )
    wide = large.pivot("dtype", index="nbytes", values="seconds")
    if not {"fp16", "int8"} <= set(wide.columns):
        return False
    ratio = (wide["fp16"] / wide["int8"]).median()
    return isinstance(ratio, float) and ratio < IN_NETWORK


def fit_rails(
    frame: Table, platform: Platform, *, source: str = "", date: str = ""
) -> dict[str, Fit]:
    """Fit the stage between nodes of all_reduces over whole nodes: ``all_reduce.<nodes>.rail``.

    The stages inside the nodes are removed from the measured times: as both overlap
    (`perfkit.models.hierarchy`), the rest is ``(t^q - t_inside^q)^(1/q)``. The platform is one node
    with fits of reduce_scatter and all_gather.
    """
    local, fits = platform.network.ranks_per_node, {}
    rows = _select(frame).filter((pl.col("operation") == "all_reduce") & (pl.col("ranks") > local))
    rows = rows.filter(
        pl.col("nodes").fill_null(pl.col("ranks") // local) * local == pl.col("ranks")
    )
    for (ranks,), group in sorted(rows.group_by("ranks"), key=lambda item: item[0]):
        nbytes, whole = group["nbytes"].to_numpy().astype(float), group["seconds"].to_numpy()
        stages = [
            platform.collective_time(stage, nbytes, ranks=local)
            for stage in ("reduce_scatter", "all_gather")
        ]
        inside = np.sum(stages, axis=0)
        seen = whole > 1.05 * inside
        between = (whole[seen] ** OVERLAP - inside[seen] ** OVERLAP) ** (1.0 / OVERLAP)
        fit = fit_collective(nbytes[seen] / local, between)
        note = f"the rest of all_reduce on {ranks} ranks without the stages inside the nodes, q = {OVERLAP:g}"
        fit = replace(fit, notes=(*fit.notes, note), sources=_list_logs(group))
        fits[f"all_reduce.{int(ranks) // local}.rail"] = _say_origin(fit, source, date)
    return fits


def fit_kernel(
    rows: Table,
    sizes: Sequence[str],
    flops: pl.Expr,
    nbytes: pl.Expr,
    device: Device,
    dtype: str,
    source: str,
    date: str,
    notes: Sequence[str] = (),
) -> Fit:
    """Fit a roofline of a device to the medians over rows of the same `sizes`, which are columns of
    the frame."""
    each = rows.group_by(*sizes).agg(pl.col("seconds").median()).sort(*sizes)
    work = each.select(flops, nbytes.alias("nbytes"), "seconds").to_numpy().T
    rates: dict[str, Any] = {"peak": device.peaks[dtype].value, "bandwidth": device.main_bandwidth}
    return _say_origin(fit_roofline(*work, **rates, notes=notes), source, date)


def _floats(*names: str) -> list[pl.Expr]:
    return [pl.col(name).cast(pl.Float64) for name in names]


def fit_gemms(frame: Table, device: Device, *, source: str = "", date: str = "") -> dict[str, Fit]:
    """Fit the matrix products of a frame of `perfkit.readers.kernel_database.read_gemms`, each
    number format alone.

    A number format takes its kernel with the most shapes. The key ``gemm`` is half precision; other
    formats have their own, such as ``gemm.fp8``.
    """
    fits = {}
    for (dtype,), group in sorted(frame.group_by("dtype"), key=lambda item: item[0]):
        known = {"nvfp4": "fp4"}.get(dtype, dtype)
        if known not in device.peaks:
            continue
        kernel = group["kernel"].mode().sort()[0] if "kernel" in group.columns else None
        rows = group if kernel is None else group.filter(pl.col("kernel") == kernel)
        m, n, k = _floats(*"mnk")
        nbytes = gemm_bytes(m, n, k, itemsize=DTYPES[known])
        if known in ("fp8", "fp4", "int8"):  # results are in half precision
            nbytes += (2 - DTYPES[known]) * m * n
        text = f"{source}, gemm {dtype}{f' {kernel}' if kernel else ''}".removeprefix(", ")
        fit = fit_kernel(rows, "mnk", gemm_flops(m, n, k), nbytes, device, known, text, date)
        fits[str(Key("gemm", variant="" if known in PREFERRED[:2] else known))] = replace(
            fit, dtypes=(known,)
        )
    if not fits:
        held = f"frame holds products in {', '.join(sorted(set(frame['dtype']))) or 'no number format'}"
        raise ValueError(
            f"{held}; {device.name} has peaks for {', '.join(device.peaks)}; pass others"
        )
    return fits


def fit_attention(
    frame: Table, device: Device, source: str, date: str, notes: Sequence[str] = ()
) -> Fit:
    """Fit fused attention over whole sequences, causal and full together.

    Rows of `perfkit.readers.kernel_database.read_attention` with a window, a past, keys in other
    number formats, or head sizes above 128 are left out.
    """
    plain = (
        (pl.col("window") == 0) & (pl.col("past") == 0) & (pl.col("kv_dtype") == pl.col("dtype"))
    )
    rows = frame.filter(plain & (pl.col("head_dim") <= 128) & (pl.col("sequence") >= 32))
    sizes, dtype = (
        ("causal", "batch", "sequence", "heads", "kv_heads", "head_dim"),
        str(rows["dtype"][0]),
    )
    causal, b, s, h, kv, d = _floats(*sizes)
    flops = attention_flops(b, h, s, d, causal=causal)
    nbytes = attention_bytes(b, h, s, d, kv_heads=kv, itemsize=DTYPES[dtype])
    return fit_kernel(rows, sizes, flops, nbytes, device, dtype, source, date, notes)


def fit_casts(frame: Table, device: Device, source: str, date: str) -> Fit:
    """Fit kernels that only move memory, from casts that are small or too large for the last cache
    of the device."""
    cache = (
        near.value if (near := device.memory[-2:][0].capacity) and len(device.memory) > 1 else 0.0
    )
    rows, dtype = (
        frame.filter((pl.col("nbytes") > 4 * cache) | (pl.col("nbytes") < 2**20)),
        next(iter(device.peaks)),
    )
    (nbytes,), notes = (
        _floats("nbytes"),
        ("casts of bf16 to fp8, below 1 MiB and beyond four times the last cache",),
    )
    return fit_kernel(rows, ("nbytes",), 0.0 * nbytes, nbytes, device, dtype, source, date, notes)


def fit_database(
    system: str, device: Device, *, parts: Sequence[str] = (), label: str = "", date: str = ""
) -> tuple[dict[str, Fit], dict[str, Fit]]:
    """Fit the collectives and the kernels of a system in the kernel database, such as ``h100_sxm``.

    `parts` are some of ``collectives``, ``gemm``, ``attention`` and ``elementwise``, by default all
    that the database has; `label` names the database. Products come from the collector sglang,
    which uses random data, in bf16 and, if measured, fp8 and fp4; attention is the forward pass of
    the flash attention of vllm; casts are of plain torch.
    """
    label, held = label or name_database(), set(database.list_tables(system)["table"])
    tables = {
        "collectives": "nccl",
        "gemm": "gemm",
        "attention": "context_attention",
        "elementwise": "scale_matrix",
    }
    asked = [
        check_choice("part", part, tables)
        for part in parts or tables
        if parts or tables[part] in held
    ]
    curves, kernels = dict[str, Fit](), dict[str, Fit]()
    if "collectives" in asked:
        frame = database.read_collectives(system)
        library = f"NCCL {frame['library_version'][0]}, medians over repeats"
        curves = fit_curves(frame, source=f"{label}, nccl {system}, {library}", date=date)
    if "gemm" in asked:
        frame = database.read_gemms(system, dtype=None).filter(pl.col("collector") == "sglang")
        kernels |= fit_gemms(frame, device, source=f"{label}, {system}", date=date)
    if "attention" in asked:
        flash = (pl.col("collector") == "vllm") & pl.col("kernel").str.contains("flash_attn")
        frame = database.read_attention(system).filter(flash)
        names = "/".join(sorted(frame["kernel"].unique()))
        notes = ["forward only; the backward pass is assumed to reach the same share of the peak"]
        if "fa3" in names or "fa4" in names:
            notes.append(
                "torch's own flash attention is version 2: about half as fast there (arXiv 2407.08608)"
            )
        kernels["attention"] = fit_attention(
            frame, device, f"{label}, {system}, {names}", date, notes
        )
    if "elementwise" in asked:
        frame = database.read_casts(system).filter(pl.col("kernel") == "torch_ops")
        kernels["elementwise"] = fit_casts(frame, device, f"{label}, {system}, torch_ops", date)
    return curves, kernels


def name_database() -> str:
    """Name of the installed kernel database, with its version if that is known."""
    try:
        return f"aiconfigurator-core {version('aiconfigurator-core')} (Apache-2.0)"
    except PackageNotFoundError:
        return "aiconfigurator-core (Apache-2.0)"


def assemble(
    base: Platform,
    *,
    name: str | None = None,
    nodes: int | None = None,
    collectives: Mapping[str, Fit] | None = None,
    kernels: Mapping[str, Fit] | None = None,
    provenance: Mapping[str, str] | None = None,
) -> Platform:
    """Put fitted parts, from `fit_curves` and similar functions, into a platform; other parts are
    unchanged.

    The latency of a link comes from the start-up of a fitted collective over its ring steps, and
    the bandwidth between nodes from the fits of rails. Operations inside a node without a fit take
    the fit of a similar one.
    """
    curves, fits = collectives or {}, dict(kernels or {})
    network = replace(
        base.network, nodes=nodes or base.network.nodes, links=_fit_links(base.network, curves)
    )
    for kind, model in (("bmm", "gemm"), ("rowwise", "elementwise"), ("copy", "elementwise")):
        if (
            model in fits
            and kind not in fits
            and (kind not in base.kernels or base.kernels[kind].kind == "assumed")
        ):
            spread = max(0.35, 1.5 * fits[model].spread)
            fits[kind] = _follow(fits[model], model, spread=spread, spread_time=None, notes=())
    return replace(
        base,
        name=name or base.name,
        network=network,
        collectives=_complete({**base.collectives, **curves}, network.ranks_per_node),
        kernels={**base.kernels, **fits},
        provenance={**base.provenance, **(provenance or {})},
    )


def _follow(fit: Fit, name: str, **changes: Any) -> Fit:
    """Fit of an operation that was not measured, from the fit of a similar one."""
    return replace(
        fit, source=f"as {name}: {fit.source}", n=0, kind="assumed", quality="", **changes
    )


def _complete(fits: Mapping[str, Fit], ranks: int) -> dict[str, Fit]:
    """Add a broadcast with the start-up and the bus bandwidth of all_gather, if there is no
    broadcast."""
    ranks = next((count for count in range(ranks, 1, -1) if f"all_gather.{count}" in fits), 0)
    gather = fits.get(f"all_gather.{ranks}")
    if gather is None or any(Key.parse(key).operation == "broadcast" for key in fits):
        return dict(fits)
    scale = 1.0 / bus_factor("all_gather", ranks)
    parameters = {
        key: value * (scale if key.startswith("beta") else 1.0) for key, value in gather.items()
    }
    about = {
        "stderr": {},
        "spread": max(0.3, gather.spread),
        "bias": 0.0,
        "notes": (UNFITTED,),
        "at_bounds": (),
    }
    text = f"all_gather.{ranks}, with the same start-up and busbw"
    return {**fits, f"broadcast.{ranks}": _follow(gather, text, parameters=parameters, **about)}


def _fit_links(network: Network, fits: Mapping[str, Fit]) -> dict[str, Link]:
    """Links with the latency of a hop from fitted collectives, and the bandwidth between nodes from
    the rails."""
    links = dict(network.links)
    known = sorted(
        key
        for key in map(Key.parse, fits)
        if key.ranks and key.operation in ("all_gather", "all_reduce")
    )
    for name, algorithm in (("intra", ""), ("inter", "rail")):
        keys = [key for key in known if key.algorithm == algorithm]
        if not keys:
            continue
        key = keys[-1] if algorithm else max(keys[:3], key=lambda key: key.ranks or 0)
        count, fit = key.ranks or 0, fits[str(key)]
        alpha, beta = (match := Match(key.operation, count, ((fit, count, 1.0),))).find_hop()
        why = f"{key.operation} on {count} ranks: {fit.source}"
        text = f"what the smallest size takes beyond its transfer, over its ring steps, {why}"
        hop = (
            HOP
            if algorithm and match.smallest > LATE
            else Quantity(alpha, "s", "fitted", text, fit.date)
        )
        wire = Quantity(
            1.0 / beta, "B/s", "fitted", f"bus bandwidth, {why}", fit.date, basis="one way per rank"
        )
        links[name] = replace(links[name], latency=hop) if name in links else Link(wire, hop)
    return links


def assemble_sources(
    base: str | Path | Platform | None = None,
    *,
    name: str | None = None,
    nccl_logs: str | Path | Sequence[str | Path] | None = None,
    kernel_database: str | None = None,
    partial: bool = False,
    ranks_per_node: int | None = None,
    date: str = "",
) -> Platform:
    """Make a platform from logs of nccl-tests, the kernel database and a platform to start from.

    Logs replace fits of the database, and both replace fits of `base`: a gallery name, file or
    platform, by default the gallery's node of the system. Nodes are added if the logs have more,
    with as many ranks as the logs say or `ranks_per_node`. With `partial`, logs are read up to a
    broken line. Another device and unused logs give a warning.
    """
    if nccl_logs is None and kernel_database is None:
        raise ValueError(
            "no source is given; name logs of nccl-tests, a system of the kernel database, or both"
        )
    platform = find_base(kernel_database) if base is None else load_platform(base)
    start, sources = platform.name, []
    if platform.device.kind == "cpu":
        raise ValueError(
            f"base is {start!r}, a CPU; the sources are of GPUs; name a platform such as h100-sxm-8"
        )
    if kernel_database is not None:
        names = [read_datasheet(sheet).device.name for sheet in _find_sheets(kernel_database)[-1:]]
        compare_devices(f"{kernel_database} is", names, platform)
        found, own = (
            MODEL.findall(text) for text in (kernel_database.upper(), platform.device.name)
        )
        if not names and found not in ([], own):
            # it has no datasheet
            device = replace(platform.device, name=f"{found[0]}, peaks assumed")
            platform = replace(
                platform, name=f"{kernel_database}-{platform.network.ranks_per_node}", device=device
            )
        curves, kernels = fit_database(kernel_database, platform.device, date=date)
        platform = assemble(platform, collectives=curves, kernels=kernels)
        sources.append(f"{name_database()}, {kernel_database}")
    if nccl_logs is not None:
        platform = _add_logs(platform, nccl_logs, partial, date, ranks_per_node)
        logs = [nccl_logs] if isinstance(nccl_logs, str | Path) else nccl_logs
        sources.append(f"nccl-tests logs in {', '.join(map(str, logs))}")
    return assemble(platform, name=name, provenance={"sources": "; ".join(sources), "base": start})


def compare_devices(what: str, names: Sequence[str], platform: Platform) -> None:
    """Warn about measurements of another device than that of their platform."""
    own = MODEL.findall(platform.device.name)
    others = [name for name in names if own and MODEL.findall(name) not in ([], own)]
    if others:
        mixed = f"platform {platform.name!r} of {platform.device.name}: it now mixes both"
        warnings.warn(
            f"{what} of {', '.join(others)}, {mixed}; take another base, or other sources",
            stacklevel=4,
        )


def find_base(system: str | None) -> Platform:
    """Find the single node in the gallery for a system of the kernel database.

    Examples
    --------
    >>> find_base("gb200").name, find_base("rtx_pro_6000_server").name
    ('gb200-4', 'rtx-pro-6000-8')
    """
    if system is None:
        raise ValueError(
            "base is missing; name the platform whose collectives the logs replace, such as h100-sxm-8"
        )
    found = [
        name
        for sheet in _find_sheets(system)
        for n in (4, 8)
        if (name := f"{sheet}-{n}") in list_gallery()
    ]
    if not found:
        advice = (
            "name the platform to start from, or a system of the kernel database, such as h100_sxm"
        )
        raise ValueError(f"base is missing and the gallery has no node of {system!r}; {advice}")
    return load_platform(found[0])


def _find_sheets(system: str) -> list[str]:
    """Datasheets of a system of the kernel database."""
    return [name for name in list_datasheets() if system.replace("_", "-").startswith(name)]


def _add_logs(
    platform: Platform, logs: Any, partial: bool, date: str, local: int | None
) -> Platform:
    """Replace collectives of a platform by fits of logs, and warn about unused files."""
    frame = read_nccl_tests(logs, partial=partial)
    said = {p / n for p, n in frame.select("ranks", "nodes").unique().rows() if n and 1 < n < p}
    local = local or (int(min(said)) if len(said) == 1 and min(said) % 1 == 0 else None)
    platform = (
        platform.with_nodes(platform.network.nodes, ranks_per_node=local) if local else platform
    )
    compare_devices("logs are", list_devices(logs), platform)
    found = add_curves(platform, frame, source="nccl-tests", date=date)
    fits = {
        key: fit for key, fit in found.collectives.items() if fit != platform.collectives.get(key)
    }
    for file in sorted(
        set(frame["file"]) - {file for fit in fits.values() for file in fit.sources}
    ):
        text = "perfkit has no model of its operation, or another log has it in half precision, which is preferred"
        warnings.warn(f"{file} is not used: {text}", stacklevel=3)
    return found


def add_curves(platform: Platform, frame: Table, *, source: str, date: str) -> Platform:
    """Replace collectives of a platform by fits of a frame, on as many nodes as the frame has."""
    local = platform.network.ranks_per_node
    spans = frame.select(pl.coalesce("nodes", (pl.col("ranks") / local).ceil().cast(pl.Int64)))[
        "nodes"
    ].max()
    fits = fit_curves(frame, ranks_per_node=local, source=source, date=date)
    wider = assemble(platform, nodes=max(platform.network.nodes, int(str(spans))), collectives=fits)
    measured = any(Key.parse(key).algorithm == "rail" for key in fits)
    return (
        wider
        if measured
        else assemble(wider, collectives=fit_rails(frame, wider, source=source, date=date))
    )
