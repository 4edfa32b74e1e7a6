"""Platforms from what people already have: datasheets, logs of nccl-tests, a kernel database, parts measured before."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perfkit.communication import Match, find_hop
from perfkit.datasheets import list_datasheets, read_datasheet
from perfkit.fitting import Fit, fit_collective
from perfkit.fitting.frames import fit_curves, fit_database, name_database
from perfkit.gallery import load_platform, platforms
from perfkit.hardware import Link, Network, Quantity
from perfkit.models.collectives import bus_factor
from perfkit.models.hierarchy import OVERLAP
from perfkit.overheads import read_overheads
from perfkit.platform import Platform

if TYPE_CHECKING:
    import polars

__all__ = ["ASSUMED_KERNELS", "assemble", "assemble_sources", "find_base", "fit_rails", "start_platform"]

_GEMMS = "bf16 GEMMs of A100 and H100 (aiconfigurator-core 0.12.0, Apache-2.0)"
_ROWS = "random rows were not measured; they move in 32 B sectors"
#: What kernels do where nothing was measured: share of the arithmetic peak and of the memory bandwidth, spread, why.
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
#: What tells one GPU from another in the names that datasheets and drivers give them.
_MODEL = re.compile(r"\bRTX PRO \d+|\bG?[ABHLPTV]\d{2,3}S?\b")
_UNFITTED = "no standard error: not fitted"
_UNITS = {"launch": "s", "compute_efficiency": "-", "memory_efficiency": "-", "sharpness": "-"}


def start_platform(system: str, *, name: str, ranks_per_node: int, date: str = "") -> Platform:
    """Describe one node from its datasheet; what a datasheet does not say is assumed, with wide intervals.

    Parameters
    ----------
    system : str
        Datasheet, one of `perfkit.datasheets.list_datasheets` [-].
    name : str
        Name of the platform [-].
    ranks_per_node : int
        Devices of the node [-].
    date : str, optional
        Day of the assumptions, ISO 8601.

    Returns
    -------
    platform : Platform
        Device and links as stated, kernels assumed, host overheads as published of another machine, no collectives.

    Raises
    ------
    ValueError
        For an unknown system.

    Examples
    --------
    >>> node = start_platform("l40s", name="my-l40s-4", ranks_per_node=4)
    >>> node.network.links["intra"].bandwidth.value / 1e9, node.kernels["gemm"].kind
    (32.0, 'assumed')
    """
    sheet = read_datasheet(system)
    kernels = {kind: _assume_kernel(*row, date=date) for kind, row in ASSUMED_KERNELS.items()}
    wire = sheet.links.get("NVLink") or sheet.links["PCIe"]
    hop = Quantity(2e-6, "s", "assumed", "no document states it; replaced by fits of collectives", date)
    network = Network(ranks_per_node, links={"intra": Link(wire, hop)})
    kernels["transfer"] = Fit(
        "additive", {"launch": 1e-6, "nbytes": 1 / 8.1e9}, spread=0.5, kind="assumed", date=date, notes=(_UNFITTED,),
        source="pageable memory over PCIe as on the V100 host of arXiv 2404.12674 (hw_params, pcie_gbps)",
        units={"launch": "s", "nbytes": "s/B"},
    )  # fmt: skip
    return Platform(name, sheet.device, network, kernels=kernels, host=read_overheads())


def _assume_kernel(compute: float, memory: float, spread: float, why: str, *, date: str) -> Fit:
    parameters = {"launch": 4e-6, "compute_efficiency": compute, "memory_efficiency": memory, "sharpness": 1.8}
    about = {"kind": "assumed", "source": why, "date": date}
    return Fit("roofline", parameters, spread=spread, notes=(_UNFITTED,), units=_UNITS, **about)  # type: ignore[arg-type]


def assemble(
    base: Platform,
    *,
    name: str | None = None,
    nodes: int | None = None,
    collectives: Mapping[str, Fit] | None = None,
    kernels: Mapping[str, Fit] | None = None,
    host: Mapping[str, Quantity] | None = None,
    provenance: Mapping[str, str] | None = None,
) -> Platform:
    """Put fitted parts into a platform; what they do not replace stays.

    Parameters
    ----------
    base : Platform
        From a datasheet, the gallery or a calibration [-].
    name : str, optional
        Name of the new platform [-].
    nodes : int, optional
        Nodes, by default those of `base` [-].
    collectives : mapping of str to Fit, optional
        As `fit_curves` gives them.
    kernels : mapping of str to Fit, optional
        As `fit_gemms`, `fit_attention` and `fit_casts` give them.
    host : mapping of str to Quantity, optional
        Host overheads [s].
    provenance : mapping of str to str, optional
        What the parts come from [-].

    Returns
    -------
    platform : Platform
        The latency of the links is that of the slowest fitted start-up over its ring steps, the bandwidth between nodes
        that of the fits of rails; operations inside a node that were never fitted follow a fitted one.
    """
    fits = {**base.collectives, **(collectives or {})}
    network = _fit_links(replace(base.network, nodes=nodes or base.network.nodes), collectives or {})
    return replace(
        base,
        name=name or base.name,
        network=network,
        collectives=_complete(fits, network),
        kernels={**base.kernels, **_follow_kernels(kernels or {}, base.kernels), **(kernels or {})},
        host={**base.host, **(host or {})},
        provenance={**base.provenance, **(provenance or {})},
    )


def _follow_kernels(fits: Mapping[str, Fit], known: Mapping[str, Fit]) -> dict[str, Fit]:
    """Classes that nobody measured do as a fitted class of the same device does, less surely."""
    out = {}
    for model, followers in (("gemm", ("bmm",)), ("elementwise", ("rowwise", "copy"))):
        for kind in followers if model in fits else ():
            if kind in known and known[kind].kind != "assumed":
                continue
            fit = fits[model]
            why = f"as {model}: {fit.source}"
            spread = max(0.35, 1.5 * fit.spread)
            out[kind] = replace(fit, kind="assumed", spread=spread, spread_time=None, n=0, source=why, notes=())
    return out


def _complete(fits: Mapping[str, Fit], network: Network) -> dict[str, Fit]:
    """Add a broadcast with the start-up and the bus bandwidth of all_gather where there is none."""
    out, size = dict(fits), network.ranks_per_node
    gather = fits.get(f"all_gather.{size}")
    if gather is not None and not any(key.startswith("broadcast.") for key in fits):
        scale = 1.0 / bus_factor("all_gather", size)
        parameters = {key: value * (scale if key.startswith("beta") else 1.0) for key, value in gather.items()}
        out[f"broadcast.{size}"] = replace(
            gather, parameters=parameters, stderr={}, kind="assumed", spread=max(0.3, gather.spread), n=0, bias=0.0,
            source=f"as all_gather.{size}, with the same start-up and busbw: {gather.source}",
            notes=(_UNFITTED,), at_bounds=(),
        )  # fmt: skip
    return out


def _fit_links(network: Network, fits: Mapping[str, Fit]) -> Network:
    """Latency of a hop from the start-up of fitted all_gathers, bandwidth between nodes from the rails."""
    links = dict(network.links)
    for name, ending in (("intra", ""), ("inter", ".rail")):
        chosen = [
            (operation, count, fits[key])
            for operation in ("all_gather", "all_reduce")
            for count in range(2, 1 + 8 * network.ranks)
            if (key := f"{operation}.{count}{ending}") in fits
        ]
        if not chosen:
            continue
        operation, count, fit = chosen[-1] if ending else max(chosen[:3], key=lambda item: item[1])
        alpha, beta = find_hop(Match(operation, ((fit, count, 1.0),)), ranks=count)
        why = f"{operation} on {count} ranks: {fit.source}"
        text = f"what the smallest size takes beyond its transfer, over its ring steps, {why}"
        hop = Quantity(alpha, "s", "fitted", text, fit.date)
        wire = Quantity(1.0 / beta, "B/s", "fitted", f"bus bandwidth, {why}", fit.date, basis="one way per rank")
        links[name] = replace(links[name], latency=hop) if name in links else Link(wire, hop)
    return replace(network, links=links)


def fit_rails(frame: "polars.DataFrame", platform: Platform, *, source: str = "", date: str = "") -> dict[str, Fit]:
    """Fit what the rails between nodes do to all_reduces over whole nodes, the share inside the nodes taken out.

    Parameters
    ----------
    frame : polars.DataFrame
        Tidy collectives; rows of all_reduce over several whole nodes count, out of place where that is known.
    platform : Platform
        One node, with fits of reduce_scatter and all_gather.
    source : str, optional
        Data id.
    date : str, optional
        Day of the measurements, ISO 8601.

    Returns
    -------
    fits : dict of str to Fit
        ``all_reduce.<nodes>.rail``; empty where the frame has no such row.

    Notes
    -----
    Both shares overlap as ``perfkit.models.hierarchy`` has it: what is left is ``(t^q - t_inside^q)^(1/q)``.
    """
    import polars as pl

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
        fits[f"all_reduce.{int(ranks) // local}.rail"] = replace(fit, notes=(*fit.notes, note))
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

    Parameters
    ----------
    base : str, Path or Platform, optional
        Gallery name, file or platform whose other parts stay; by default the gallery's node of the system [-].
    name : str, optional
        Name of the new platform [-].
    nccl_logs : str, Path or sequence of them, optional
        Logs or a folder of logs, see `perfkit.readers.nccl_tests.read_nccl_tests`; they win over the database.
    kernel_database : str, optional
        System of the kernel database, such as ``h100_sxm`` [-].
    partial : bool, optional
        Whether to keep, with a warning, what logs hold before a line that does not fit.
    date : str, optional
        Day of the entry, ISO 8601.

    Returns
    -------
    platform : Platform
        With the fits of all sources; nodes are added where the logs span more than `base` has.

    Raises
    ------
    ValueError
        Without a source, without a base that can be known, with a CPU as base, and as the readers do.
    FileNotFoundError
        Where there is no kernel database.

    Warns
    -----
    UserWarning
        Where a source is of another device than the base, and for logs of which nothing was used.
    """
    if nccl_logs is None and kernel_database is None:
        raise ValueError("no source is given; name logs of nccl-tests, a system of the kernel database, or both")
    platform = find_base(kernel_database) if base is None else load_platform(base)
    start = platform.name
    if platform.device.kind == "cpu":
        raise ValueError(f"base is {start!r}, a CPU; the sources are of GPUs; name a platform such as h100-sxm-8")
    sources = []
    if kernel_database is not None:
        known = [name for name in list_datasheets() if kernel_database.replace("_", "-").startswith(name)]
        _compare_devices(f"{kernel_database} is", [read_datasheet(name).device.name for name in known[-1:]], platform)
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

    Parameters
    ----------
    system : str or None
        System as the database names it, such as ``h100_sxm`` [-].

    Returns
    -------
    platform : Platform
        The node.

    Raises
    ------
    ValueError
        Without a system, and for one that the gallery does not have.

    Examples
    --------
    >>> find_base("gb200").name, find_base("rtx_pro_6000_server").name
    ('gb200-4', 'rtx-pro-6000-8')
    """
    if system is None:
        raise ValueError("base is missing; name the platform whose collectives the logs replace, such as h100-sxm-8")
    names = [
        f"{sheet}-{n}" for sheet in list_datasheets() if system.replace("_", "-").startswith(sheet) for n in (4, 8)
    ]
    found = [name for name in platforms()["name"] if name in names]
    if not found:
        raise ValueError(
            f"base is missing and the gallery has no node of {system!r}; name the platform to start from, or a system "
            "of the kernel database, such as h100_sxm"
        )
    return load_platform(str(found[0]))


def _add_logs(platform: Platform, logs: str | Path | Sequence[str | Path], partial: bool, date: str) -> Platform:
    """Fits of logs in place of those of a platform, on as many nodes as the logs span."""
    import polars as pl

    from perfkit.readers.nccl_tests import list_devices, read_nccl_tests

    frame = read_nccl_tests(logs, partial=partial)
    _compare_devices("logs are", list_devices(logs), platform)
    local = platform.network.ranks_per_node
    spans = frame.select(pl.coalesce("nodes", (pl.col("ranks") / local).ceil().cast(pl.Int64)))["nodes"].max()
    fits = fit_curves(frame, ranks_per_node=local, source="nccl-tests", date=date)
    used = {part for fit in fits.values() for part in fit.source.split(", ")}
    for file in sorted(set(frame["file"]) - used):
        text = "perfkit has no model of it, or logs of the same operation and ranks in half precision go first"
        warnings.warn(f"{file}: nothing of it is used; {text}", stacklevel=3)
    wider = assemble(platform, nodes=max(platform.network.nodes, int(str(spans))), collectives=fits)
    if any(key.endswith(".rail") for key in fits):
        return wider
    return assemble(wider, collectives=fit_rails(frame, wider, source="nccl-tests", date=date))
