"""The gallery: platforms that ship with perfkit, found by name; others are found by path or made of a datasheet."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from perfkit.fitting import Fit
from perfkit.ground.hardware import Link, Network, Quantity
from perfkit.ground.results import Table
from perfkit.ground.units import show
from perfkit.platform.file import find_file, list_gallery, list_numbers
from perfkit.platform.platform import Platform
from perfkit.readers.datasheets import read_datasheet, read_overheads

_GEMMS = "bf16 GEMMs of A100 and H100 (aiconfigurator-core 0.12.0, Apache-2.0)"
_ROWS = "random rows were not measured; they move in 32 B sectors"
#: Kernels that were not measured: share of arithmetic peak and memory bandwidth, spread, reason; docs/formulas.md,
#: table 2.3.
ASSUMED_KERNELS: Mapping[str, tuple[float, float, float, str]] = {
    "gemm": (0.78, 0.78, 0.25, f"middle of {_GEMMS}"),
    "bmm": (0.78, 0.78, 0.35, f"middle of {_GEMMS}; few or small products fill a device less"),
    "attention": (0.35, 0.78, 0.4, "FlashAttention-2 reaches 35 % of the peak of an H100 (arXiv 2407.08608, abstract)"),
    "elementwise": (0.78, 0.78, 0.3, f"memory share of {_GEMMS}"),
    **dict.fromkeys(("rowwise", "copy"), (0.78, 0.78, 0.35, f"memory share of {_GEMMS}")),
    **dict.fromkeys(("embedding_forward", "embedding_backward", "embedding_update"),
                    (0.78, 0.78, 0.45, f"memory share of {_GEMMS}; {_ROWS}")),
}  # fmt: skip
#: The part of a GPU's name that identifies it in datasheets and drivers.
MODEL = re.compile(r"\bRTX PRO \d+|\bG?[ABHLPTV]\d{2,3}S?\b")
UNFITTED = "no standard error: not fitted"
#: A platform, a name of the gallery or a file.
Named: TypeAlias = Platform | str | Path
_UNITS = {"launch": "s", "compute_efficiency": "-", "memory_efficiency": "-", "sharpness": "-"}


@lru_cache(maxsize=64)
def _read(path: Path, changed: int, size: int, nodes: int | None = None) -> Platform:
    """Read a file once for as long as it stays as it is, with another number of nodes where one is given."""
    return Platform.load(path) if nodes is None else _read(path, changed, size).with_nodes(nodes)


def _find_base(name: str) -> tuple[str, int | None]:
    """The name itself, or the cluster of the gallery, else the node, and the number of nodes that `name` asks for."""
    match = re.fullmatch(r"(.+-[0-9]+)x([1-9][0-9]*)", name)
    known = list_gallery() if match else {}
    if match is None or name in known:
        return name, None
    base = max((stem for stem in known if stem == match[1] or stem.startswith(f"{match[1]}x")), key=len, default="")
    return (base, int(match[2])) if base else (name, None)


def load_platform(platform: Named) -> Platform:
    """Find a platform by gallery name or path.

    Parameters
    ----------
    platform : str, Path or Platform
        Name from `platforms`, with any number of nodes, such as ``h100-sxm-8x4`` for four; path of a TOML file; or a
        platform, which is handed back [-].

    Returns
    -------
    platform : Platform
        The platform [-].

    Raises
    ------
    PlatformError
        For a name or file that does not exist, and for a file that is not a platform.

    Examples
    --------
    >>> load_platform("a100-sxm-8").network.ranks, load_platform("a100-sxm-8x4").network.ranks
    (8, 32)
    """
    if isinstance(platform, Platform):
        return platform
    name, nodes = _find_base(platform) if isinstance(platform, str) else (platform, None)
    path = find_file(name)
    facts = path.stat()
    return _read(path.resolve(), facts.st_mtime_ns, facts.st_size, nodes)


def platforms() -> Table:
    """List the platforms that ship with perfkit.

    Returns
    -------
    table : polars.DataFrame
        Columns name, device, ranks [-], evidence (the kinds of numbers inside) and date of the newest number.

    Examples
    --------
    >>> platforms()["name"].to_list()[0]
    'a100-sxm-8'
    """
    import polars

    rows = []
    for name, path in list_gallery().items():
        platform = load_platform(path)
        kinds, dates = zip(*((number.kind, number.date) for number in list_numbers(platform)), strict=True)
        rows.append((name, platform.device.name, platform.network.ranks, ", ".join(sorted(set(kinds))), max(dates)))
    return polars.DataFrame(rows, schema=["name", "device", "ranks", "evidence", "date"], orient="row")


def find_similar(device: str) -> Platform:
    """Find the gallery's single node of the device that a driver names; of several the one with the most ranks.

    Examples
    --------
    >>> find_similar("NVIDIA H100 80GB HBM3").name
    'h100-sxm-8'
    """
    nodes = [p for p in map(load_platform, list_gallery()) if p.network.nodes == 1 and p.device.kind != "cpu"]
    found = [p for p in nodes if MODEL.findall(p.device.name) == MODEL.findall(device) != []]
    if not found:
        raise ValueError(f"base is missing and the gallery has no {show(device)}; name the platform most like it")
    return max(found, key=lambda p: p.network.ranks)


def start_platform(system: str, *, name: str, ranks_per_node: int, date: str = "") -> Platform:
    """Describe one node from its datasheet; numbers that it lacks are assumed, with wide intervals.

    Host overheads are as published of another machine; there are no collectives.

    Examples
    --------
    >>> node = start_platform("l40s", name="my-l40s-4", ranks_per_node=4)
    >>> node.network.links["intra"].bandwidth.value / 1e9, node.kernels["gemm"].kind
    (32.0, 'assumed')
    """
    sheet, kernels = read_datasheet(system), {}
    about: dict[str, Any] = {"kind": "assumed", "date": date, "notes": (UNFITTED,)}
    for kind, (compute, memory, spread, why) in ASSUMED_KERNELS.items():
        shares = {"launch": 4e-6, "compute_efficiency": compute, "memory_efficiency": memory, "sharpness": 1.8}
        dtypes = ("bf16",) if kind in ("gemm", "bmm") else ()
        kernels[kind] = Fit("roofline", shares, spread=spread, source=why, units=_UNITS, dtypes=dtypes, **about)
    kernels["transfer"] = Fit(
        "additive", {"launch": 1e-6, "nbytes": 1 / 8.1e9}, spread=0.5, units={"launch": "s", "nbytes": "s/B"},
        source="pageable memory over PCIe as on the V100 host of arXiv 2404.12674 (hw_params, pcie_gbps)", **about,
    )  # fmt: skip
    hop = Quantity(2e-6, "s", "assumed", "no document states it; replaced by fits of collectives", date)
    network = Network(ranks_per_node, links={"intra": Link(sheet.links.get("NVLink") or sheet.links["PCIe"], hop)})
    return Platform(name, sheet.device, network, kernels=kernels, host=read_overheads())
