"""The gallery: platforms by the name of one that ships with perfkit, by the name of a datasheet, or
by path."""

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from perfkit.ground.results import Table
from perfkit.ground.units import show
from perfkit.platform.datasheets import list_datasheets
from perfkit.platform.file import find_file, list_gallery
from perfkit.platform.machine import Origin, PlatformError, list_numbers
from perfkit.platform.node_networks import find_fabric
from perfkit.platform.platform import Platform

#: The part of a device's name that datasheets and drivers share, in capitals.
_MODEL = re.compile(
    r"\bRTX PRO \d+|\bRTX A?\d{3,4}(?: ?TI| SUPER| ADA)*|\bGTX \d{3,4}(?: ?TI)?|\bTITAN \w+"
    r"|\bMI\d{2,3}[A-Z]?\b|\bGAUDI ?\d?|\bTPU V\d\w*|\bTRAINIUM ?\d?|\bMAX \d{4}\b"
    r"|\bG?[ABHKLMPTV]\d{1,3}[GSX]?\b"
)
#: The form of a device, which decides its links.
_FORM = re.compile(r"\b(SXM|PCIE|NVL)\d?\b")
#: A slice of a device, as drivers name it, such as MIG 3g.40gb.
_SLICE = re.compile(r"\bMIG \d+g\.", re.IGNORECASE)
#: Name of a node or cluster: a device, the ranks of a node, and perhaps the number of nodes.
_NODE = re.compile(r"(.+)-([1-9][0-9]{0,3})(?:x([1-9][0-9]{0,5}))?")
#: A platform, a name of the gallery or a file.
Named: TypeAlias = Platform | str | Path


@lru_cache(maxsize=64)
def _read(path: Path, changed: int, size: int, named: str | None) -> Platform:
    """Read a file once until it changes; `named` is how the caller names it, None in the gallery."""
    platform = Platform.load(path)
    if named is None:
        return platform
    return replace(platform, origin=Origin(named, platform.name))


@lru_cache(maxsize=64)
def _read_nodes(path: Path, changed: int, size: int, named: str | None, nodes: int) -> Platform:
    """A file with another number of nodes, once until it changes."""
    return _read(path, changed, size, named).with_nodes(nodes)


def load_platform(platform: Named) -> Platform:
    """Find a platform by gallery name or path.

    Parameters
    ----------
    platform : str, Path or Platform
        Name from `platforms`, or a datasheet (see `Platform.from_datasheet`): of one rank
        (``rtx-4090``), or with the ranks of a node, such as ``mi300x-8``. With any number of nodes,
        such as ``h100-sxm-8x4`` for four, and with the network of a provider, such as
        ``h100-sxm-8x4@p5``, see `perfkit.fabrics`. Or the path of a TOML file, or a platform, which is
        returned as it is [-].

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
    >>> [load_platform(name).network.ranks for name in ("a100-sxm-8", "a100-sxm-8x4", "rtx-4090")]
    [8, 32, 1]
    """
    if isinstance(platform, Platform):
        return platform
    if isinstance(platform, str) and platform in list_datasheets():
        return Platform.from_datasheet(platform)
    if isinstance(platform, str) and "@" in platform and not Path(platform).exists():
        return _load_with_fabric(platform)
    name = platform
    nodes: int | None = None
    if isinstance(platform, str) and platform not in list_gallery():
        cluster = _NODE.fullmatch(platform)
        if cluster is not None:
            device, ranks = cluster[1], int(cluster[2])
            nodes = int(cluster[3]) if cluster[3] else None
            known = _find_cluster(f"{device}-{ranks}") if nodes else None
            if known is None and device in list_datasheets():
                sheet = Platform.from_datasheet(device, ranks=ranks)
                return sheet.with_nodes(nodes) if nodes else sheet
            if known is not None:
                name = known
    path = find_file(name)
    facts = path.stat()
    named = None if path in list_gallery().values() else str(path)
    if nodes is None:
        return _read(path.resolve(), facts.st_mtime_ns, facts.st_size, named)
    return _read_nodes(path.resolve(), facts.st_mtime_ns, facts.st_size, named, nodes)


def load_nodes(platform: Named, nodes: int) -> Platform:
    """Find a platform with so many nodes like its own, under the name that says so.

    Parameters
    ----------
    platform : str, Path or Platform
        See `load_platform` [-].
    nodes : int
        Nodes [-].

    Returns
    -------
    platform : Platform
        Of a node of the gallery what `load_platform` finds by its name and the number of nodes, such as
        ``h100-sxm-8x8`` with a network that was measured; else `Platform.with_nodes` [-].

    Raises
    ------
    PlatformError
        As `load_platform` does.
    ValueError
        As `Platform.with_nodes` does.

    Examples
    --------
    >>> load_nodes("h100-sxm-8", 8).name
    'h100-sxm-8x8'
    """
    is_of_gallery = isinstance(platform, str) and platform in list_gallery()
    if is_of_gallery and nodes > 1:
        name = f"{platform}x{nodes}"
        if _NODE.fullmatch(name):
            return load_platform(name)
    return load_platform(platform).with_nodes(nodes)


class _SplitName(NamedTuple):
    """Parts of the name of a platform."""

    node: str  # with the number of nodes only where the gallery writes it, as in h100-sxm-8x4
    network: str  # of a provider, with its @; empty without one


def _split_name(name: str) -> _SplitName:
    """Split the name of a platform, as `Platform.with_nodes` writes it."""
    plain, at, fabric = name.replace(" by datasheet", "").partition("@")
    node = re.sub(r"(, \d+ nodes)?( in \d+ regions)?$", "", plain)
    return _SplitName(node, f"{at}{fabric}")


def _is_derived(name: str, origin: Origin) -> bool:
    """Whether a platform has the name of that in a file, but for the number of nodes and the network.

    Another name is of a platform that is in no file, such as one that was calibrated from it.
    """
    nodes = r"(?<=\d)x\d+$"
    node = re.sub(nodes, "", _split_name(name).node)
    return node == re.sub(nodes, "", _split_name(origin.name).node)


def spell_platform(platform: Platform) -> str:
    """How a command line names a platform, with as many nodes as its file has.

    Parameters
    ----------
    platform : Platform
        Of the gallery, of a datasheet, or from a file; more nodes or a network may be added.

    Returns
    -------
    text : str
        The file that it was loaded from, else a name that `load_platform` knows, else the file that
        ``platform.save`` would be asked for.
    """
    node, network = _split_name(platform.name)
    if platform.origin is not None and _is_derived(platform.name, platform.origin):
        return f"{platform.origin.path}{network}"
    try:
        load_platform(f"{node}{network}")
    except PlatformError:
        return f"{node}.toml{network}"
    return f"{node}{network}"


def _load_with_fabric(name: str) -> Platform:
    """A platform by name or path, with the network of a provider after an @.

    Of the gallery it is the single node: the network that was measured on several of them is
    another one.
    """
    node, _, fabric = name.rpartition("@")  # a folder may have an @, too
    try:
        find_fabric(fabric)
    except ValueError as error:
        raise PlatformError(f"platform is {show(name)}: {error}") from None
    nodes: int | None = None
    cluster = _NODE.fullmatch(node)
    if (
        cluster is not None
        and cluster[3] is not None
        and f"{cluster[1]}-{cluster[2]}" in list_gallery()
    ):
        node, nodes = f"{cluster[1]}-{cluster[2]}", int(cluster[3])
    platform = load_platform(node)
    return platform.with_nodes(nodes or platform.network.nodes, network=fabric)


def _find_cluster(node: str) -> str | None:
    """The platform of the gallery with this node, the largest cluster of it first; None without
    one."""
    clusters = [name for name in list_gallery() if name == node or name.startswith(f"{node}x")]
    return max(clusters, key=len, default=None)


def platforms() -> Table:
    """List the platforms that ship with perfkit.

    Returns
    -------
    table : polars.DataFrame
        Columns name, device, ranks [-], fabric (links inside and between nodes), evidence (the
        kinds of numbers inside) and date of the newest number.

    Examples
    --------
    >>> platforms()["name"].to_list()[0]
    'a100-sxm-8'
    """
    from perfkit.ground.frames import ResultFrame  # imports polars

    rows = []
    for name, path in list_gallery().items():
        platform = load_platform(path)
        kinds, dates = zip(
            *((number.kind, number.date) for number in list_numbers(platform)), strict=True
        )
        fabric = ", ".join(
            link.name
            for _, link in sorted(platform.network.links.items(), reverse=True)
            if link.name
        )
        evidence, device = ", ".join(sorted(set(kinds))), platform.device.name
        rows.append((name, device, platform.network.ranks, fabric, evidence, max(dates)))
    return ResultFrame(
        rows, schema=["name", "device", "ranks", "fabric", "evidence", "date"], orient="row"
    )


def find_models(name: str) -> frozenset[str]:
    """Find the models that the name of a device names; none for an unknown device.

    Examples
    --------
    >>> sorted(find_models("NVIDIA H100 80GB HBM3") | find_models("AMD Instinct MI250X / MI250"))
    ['H100', 'MI250', 'MI250X']
    """
    return frozenset(model.replace(" ", "") for model in _MODEL.findall(name.upper()))


def is_same_device(name: str, own: str) -> bool:
    """Whether a device that a driver names may be that of a datasheet.

    Names that tell no model are different if they hold a number or name another maker; a datasheet
    without a known model may be any device.

    Examples
    --------
    >>> is_same_device("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM5 80 GB")
    True
    >>> is_same_device("NVIDIA H100 PCIe", "NVIDIA H100 SXM5 80 GB")
    False
    """
    known, models = find_models(own), find_models(name)
    if not known:
        return True
    if _SLICE.search(name) and not _SLICE.search(own):
        return False
    if not models:
        maker = own.upper().split()[0]
        return maker in name.upper() and not re.search(r"\d", name)
    forms = set(_FORM.findall(name.upper()))
    own_forms = set(_FORM.findall(own.upper()))
    same_form = not forms or not own_forms or bool(forms & own_forms)
    return bool(known & models) and same_form


def find_similar(device: str) -> Platform:
    """Find the single node of the gallery, with the most ranks, that has the device a driver names.

    Examples
    --------
    >>> find_similar("NVIDIA H100 80GB HBM3").name
    'h100-sxm-8'
    """
    nodes = [
        p
        for p in map(load_platform, list_gallery())
        if p.network.nodes == 1 and p.device.kind != "cpu"
    ]
    found = [p for p in nodes if find_models(p.device.name) & find_models(device)]
    if not found:
        raise ValueError(
            f"base is missing and the gallery has no {show(device)}; name the most similar platform"
        )
    return max(found, key=lambda p: p.network.ranks)
