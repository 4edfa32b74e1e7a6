"""The gallery: platforms that ship with perfkit, found by name; others are found by path."""

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from perfkit.platform.file import find_file, list_gallery
from perfkit.platform.numbers import list_numbers
from perfkit.platform.platform import Platform

if TYPE_CHECKING:
    import polars


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


def load_platform(platform: str | Path | Platform) -> Platform:
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


def platforms() -> "polars.DataFrame":
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
        evidence = ", ".join(sorted(set(kinds)))
        rows.append((name, platform.device.name, platform.network.ranks, evidence, max(dates)))
    return polars.DataFrame(rows, schema=["name", "device", "ranks", "evidence", "date"], orient="row")
