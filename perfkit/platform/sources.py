"""Platforms from what people already have: datasheets, logs of nccl-tests, a kernel database, parts measured before."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from perfkit.fitting import Fit, fit_collective
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import Link, Network, Quantity
from perfkit.models.collectives import bus_factor
from perfkit.models.hierarchy import OVERLAP
from perfkit.platform.collectives import Match
from perfkit.platform.frames import fit_curves, fit_database, name_database
from perfkit.platform.gallery import load_platform, platforms
from perfkit.platform.platform import Platform
from perfkit.readers.datasheets import list_datasheets, read_datasheet, read_overheads
from perfkit.readers.nccl import list_devices, read_nccl_tests

_GEMMS = "bf16 GEMMs of A100 and H100 (aiconfigurator-core 0.12.0, Apache-2.0)"
_ROWS = "random rows were not measured; they move in 32 B sectors"
#: Kernels that were not measured: share of arithmetic peak and memory bandwidth, spread, reason; docs/formulas.md,
#: table 2.3.
ASSUMED_KERNELS: Mapping[str, tuple[float, float, float, str]] = {
    "gemm": (0.78, 0.78, 0.25, f"middle of {_GEMMS}"),
    "bmm": (0.78, 0.78, 0.35, f"middle of {_GEMMS}; few or small products fill a device less"),
    "attention": (0.35, 0.78, 0.4, "FlashAttention-2 reaches 35 % of the peak of an H100 (arXiv 2407.08608, abstract)"),
    "elementwise": (0.78, 0.78, 0.3, f"memory share of {_GEMMS}"),
    "rowwise": (0.78, 0.78, 0.35, f"memory share of {_GEMMS}"),
    "copy": (0.78, 0.78, 0.35, f"memory share of {_GEMMS}"),
    **dict.fromkeys(
        ("embedding_forward", "embedding_backward", "embedding_update"),
        (0.78, 0.78, 0.45, f"memory share of {_GEMMS}; {_ROWS}"),
    ),
}
#: The part of a GPU's name that identifies it in datasheets and drivers.
_MODEL = re.compile(r"\bRTX PRO \d+|\bG?[ABHLPTV]\d{2,3}S?\b")
_UNFITTED = "no standard error: not fitted"
_UNITS = {"launch": "s", "compute_efficiency": "-", "memory_efficiency": "-", "sharpness": "-"}


def start_platform(system: str, *, name: str, ranks_per_node: int, date: str = "") -> Platform:
    """Describe one node from its datasheet; numbers that it lacks are assumed, with wide intervals.

    Host overheads are as published of another machine; there are no collectives.

    Examples
    --------
    >>> node = start_platform("l40s", name="my-l40s-4", ranks_per_node=4)
    >>> node.network.links["intra"].bandwidth.value / 1e9, node.kernels["gemm"].kind
    (32.0, 'assumed')
    """
    sheet = read_datasheet(system)
    about: dict[str, Any] = {"kind": "assumed", "date": date, "notes": (_UNFITTED,)}
    kernels = {
        kind: Fit(
            "roofline",
            {"launch": 4e-6, "compute_efficiency": compute, "memory_efficiency": memory, "sharpness": 1.8},
            spread=spread, source=why, units=_UNITS, dtypes=("bf16",) if kind in ("gemm", "bmm") else (), **about,
        )
        for kind, (compute, memory, spread, why) in ASSUMED_KERNELS.items()
    }  # fmt: skip
    wire = sheet.links.get("NVLink") or sheet.links["PCIe"]
    hop = Quantity(2e-6, "s", "assumed", "no document states it; replaced by fits of collectives", date)
    network = Network(ranks_per_node, links={"intra": Link(wire, hop)})
    kernels["transfer"] = Fit(
        "additive", {"launch": 1e-6, "nbytes": 1 / 8.1e9}, spread=0.5, units={"launch": "s", "nbytes": "s/B"},
        source="pageable memory over PCIe as on the V100 host of arXiv 2404.12674 (hw_params, pcie_gbps)", **about,
    )  # fmt: skip
    return Platform(name, sheet.device, network, kernels=kernels, host=read_overheads())


def assemble(
    base: Platform,
    *,
    name: str | None = None,
    nodes: int | None = None,
    collectives: Mapping[str, Fit] | None = None,
    kernels: Mapping[str, Fit] | None = None,
    provenance: Mapping[str, str] | None = None,
) -> Platform:
    """Put fitted parts, as `perfkit.platform.frames` gives them, into a platform; what they do not replace stays.

    The latency of the links is that of the slowest fitted start-up over its ring steps, the bandwidth between nodes
    that of the fits of rails; operations inside a node that were never fitted follow a fitted one.
    """
    network = _fit_links(replace(base.network, nodes=nodes or base.network.nodes), collectives or {})
    return replace(
        base, name=name or base.name, network=network,
        collectives=_complete({**base.collectives, **(collectives or {})}, network.ranks_per_node),
        kernels={**base.kernels, **_follow_kernels(kernels or {}, base.kernels), **(kernels or {})},
        provenance={**base.provenance, **(provenance or {})},
    )  # fmt: skip


def _follow_kernels(fits: Mapping[str, Fit], known: Mapping[str, Fit]) -> dict[str, Fit]:
    """Classes without measurements follow a fitted class of the same device, with more spread."""
    out = {}
    for kind, model in (("bmm", "gemm"), ("rowwise", "elementwise"), ("copy", "elementwise")):
        if model in fits and (kind not in known or known[kind].kind == "assumed"):
            out[kind] = replace(
                fits[model], spread=max(0.35, 1.5 * fits[model].spread), spread_time=None, n=0, kind="assumed",
                source=f"as {model}: {fits[model].source}", notes=(), quality="",
            )  # fmt: skip
    return out


def _complete(fits: Mapping[str, Fit], ranks: int) -> dict[str, Fit]:
    """Add a broadcast with the start-up and the bus bandwidth of all_gather where there is none."""
    gather = fits.get(f"all_gather.{ranks}")
    if gather is None or any(Key.parse(key).operation == "broadcast" for key in fits):
        return dict(fits)
    scale = 1.0 / bus_factor("all_gather", ranks)
    broadcast = replace(
        gather, stderr={}, kind="assumed", spread=max(0.3, gather.spread), n=0, bias=0.0, notes=(_UNFITTED,),
        parameters={key: value * (scale if key.startswith("beta") else 1.0) for key, value in gather.items()},
        source=f"as all_gather.{ranks}, with the same start-up and busbw: {gather.source}", at_bounds=(), quality="",
    )  # fmt: skip
    return {**fits, f"broadcast.{ranks}": broadcast}


def _fit_links(network: Network, fits: Mapping[str, Fit]) -> Network:
    """Latency of a hop from the start-up of fitted all_gathers, bandwidth between nodes from the rails."""
    links = dict(network.links)
    for name, way in (("intra", ""), ("inter", "rail")):
        names = [Key(name, n, way) for name in ("all_gather", "all_reduce") for n in range(2, 1 + 8 * network.ranks)]
        keys = [key for key in names if str(key) in fits]
        if not keys:
            continue
        key = keys[-1] if way else max(keys[:3], key=lambda key: key.ranks or 0)
        operation, count, fit = key.operation, key.ranks or 0, fits[str(key)]
        alpha, beta = Match(operation, ((fit, count, 1.0),)).find_hop(count)
        why = f"{operation} on {count} ranks: {fit.source}"
        text = f"what the smallest size takes beyond its transfer, over its ring steps, {why}"
        hop = Quantity(alpha, "s", "fitted", text, fit.date)
        wire = Quantity(1.0 / beta, "B/s", "fitted", f"bus bandwidth, {why}", fit.date, basis="one way per rank")
        links[name] = replace(links[name], latency=hop) if name in links else Link(wire, hop)
    return replace(network, links=links)


def fit_rails(frame: pl.DataFrame, platform: Platform, *, source: str = "", date: str = "") -> dict[str, Fit]:
    """Fit what the rails between nodes do to all_reduces over whole nodes: ``all_reduce.<nodes>.rail``.

    The share inside the nodes is taken out: both overlap as ``perfkit.models.hierarchy`` has it, what is left is
    ``(t^q - t_inside^q)^(1/q)``. Rows of all_reduce over several whole nodes count, out of place where that is known;
    the platform is one node with fits of reduce_scatter and all_gather.
    """
    local, fits = platform.network.ranks_per_node, {}
    rows = frame.filter((pl.col("operation") == "all_reduce") & (pl.col("nbytes") > 0) & (pl.col("ranks") > local))
    rows = rows.filter(pl.col("nodes").fill_null(pl.col("ranks") // local) * local == pl.col("ranks"))
    if "in_place" in rows.columns:
        rows = rows.filter(~pl.col("in_place"))
    for (ranks,), group in sorted(rows.group_by("ranks"), key=lambda item: item[0]):
        nbytes, whole = group["nbytes"].to_numpy().astype(float), group["seconds"].to_numpy()
        stages = [platform.collective_time(stage, nbytes, ranks=local) for stage in ("reduce_scatter", "all_gather")]
        inside = np.sum(stages, axis=0)
        seen = whole > 1.05 * inside
        between = (whole[seen] ** OVERLAP - inside[seen] ** OVERLAP) ** (1.0 / OVERLAP)
        logs = sorted(group["file"].unique()) if "file" in group.columns else []
        text = ", ".join((source, *logs)) if source else ", ".join(logs)
        fit = fit_collective(nbytes[seen] / local, between, source=text, date=date)
        note = f"what all_reduce on {ranks} ranks leaves beside the shares inside the nodes, q = {OVERLAP:g}"
        fits[f"all_reduce.{int(ranks) // local}.rail"] = replace(fit, notes=(*fit.notes, note), sources=tuple(logs))
    return fits


def assemble_sources(
    base: str | Path | Platform | None = None,
    *,
    name: str | None = None,
    nccl_logs: str | Path | Sequence[str | Path] | None = None,
    kernel_database: str | None = None,
    partial: bool = False,
    date: str = "",
) -> Platform:
    """Make a platform from logs of nccl-tests, the kernel database and a platform to start from.

    Logs win over the database, both over `base`, a gallery name, file or platform, which is by default the gallery's
    node of the system; nodes are added where the logs span more. With `partial`, what a log holds before a line that
    does not fit is kept, with a warning. Warns where a source is of another device than the base, and of unused logs.
    """
    if nccl_logs is None and kernel_database is None:
        raise ValueError("no source is given; name logs of nccl-tests, a system of the kernel database, or both")
    platform = find_base(kernel_database) if base is None else load_platform(base)
    start = platform.name
    if platform.device.kind == "cpu":
        raise ValueError(f"base is {start!r}, a CPU; the sources are of GPUs; name a platform such as h100-sxm-8")
    sources = []
    if kernel_database is not None:
        names = [read_datasheet(sheet).device.name for sheet in _find_sheets(kernel_database)[-1:]]
        _compare_devices(f"{kernel_database} is", names, platform)
        curves, kernels = fit_database(kernel_database, platform.device, date=date)
        platform = assemble(platform, collectives=curves, kernels=kernels)
        sources.append(f"{name_database()}, {kernel_database}")
    if nccl_logs is not None:
        platform = _add_logs(platform, nccl_logs, partial, date)
        logs = [nccl_logs] if isinstance(nccl_logs, str | Path) else nccl_logs
        sources.append(f"nccl-tests logs in {', '.join(map(str, logs))}")
    return assemble(platform, name=name, provenance={"sources": "; ".join(sources), "base": start})


def _compare_devices(what: str, names: Sequence[str], platform: Platform) -> None:
    """Warn where measurements come from another device than that of the platform they go into."""
    own = _MODEL.findall(platform.device.name)
    others = [name for name in names if own and _MODEL.findall(name) not in ([], own)]
    if others:
        warnings.warn(
            f"{what} of {', '.join(others)}, platform {platform.name!r} of {platform.device.name}: it now mixes both; "
            "take another base, or other sources",
            stacklevel=4,
        )


def find_base(system: str | None) -> Platform:
    """Find the gallery's single node of a system of the kernel database.

    Examples
    --------
    >>> find_base("gb200").name, find_base("rtx_pro_6000_server").name
    ('gb200-4', 'rtx-pro-6000-8')
    """
    if system is None:
        raise ValueError("base is missing; name the platform whose collectives the logs replace, such as h100-sxm-8")
    names = [f"{sheet}-{n}" for sheet in _find_sheets(system) for n in (4, 8)]
    found = [name for name in platforms()["name"] if name in names]
    if not found:
        advice = "name the platform to start from, or a system of the kernel database, such as h100_sxm"
        raise ValueError(f"base is missing and the gallery has no node of {system!r}; {advice}")
    return load_platform(str(found[0]))


def _find_sheets(system: str) -> list[str]:
    """Datasheets of a system of the kernel database."""
    return [name for name in list_datasheets() if system.replace("_", "-").startswith(name)]


def _add_logs(platform: Platform, logs: str | Path | Sequence[str | Path], partial: bool, date: str) -> Platform:
    """Fits of logs in place of those of a platform, on as many nodes as the logs span."""
    frame = read_nccl_tests(logs, partial=partial)
    _compare_devices("logs are", list_devices(logs), platform)
    local = platform.network.ranks_per_node
    spans = frame.select(pl.coalesce("nodes", (pl.col("ranks") / local).ceil().cast(pl.Int64)))["nodes"].max()
    fits = fit_curves(frame, ranks_per_node=local, source="nccl-tests", date=date)
    used = {file for fit in fits.values() for file in fit.sources}
    for file in sorted(set(frame["file"]) - used):
        text = "perfkit has no model of it, or logs of the same operation and ranks in half precision go first"
        warnings.warn(f"{file}: nothing of it is used; {text}", stacklevel=3)
    wider = assemble(platform, nodes=max(platform.network.nodes, int(str(spans))), collectives=fits)
    if any(Key.parse(key).algorithm == "rail" for key in fits):
        return wider
    return assemble(wider, collectives=fit_rails(frame, wider, source="nccl-tests", date=date))
