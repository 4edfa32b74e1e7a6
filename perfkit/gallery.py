"""The gallery: platforms that ship with perfkit, found by name; others are found by path."""

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from perfkit.inventory import list_numbers
from perfkit.platform import Platform
from perfkit.platform_file import find_file
from perfkit.resources import find_reference

if TYPE_CHECKING:
    import polars

__all__ = ["load_platform", "platforms"]


@lru_cache(maxsize=64)
def _read(path: Path, changed: int, size: int) -> Platform:
    """Read a file once for as long as it stays as it is."""
    return Platform.load(path)


def _scale(name: str) -> Platform | None:
    """A cluster of the gallery, else a node, with another number of nodes, where `name` asks for one."""
    match = re.fullmatch(r"(.+-[0-9]+)x([1-9][0-9]*)", name)
    known = [path.stem for path in find_reference("platforms").glob("*.toml")] if match else []
    if match is None or name in known:
        return None
    base = max((stem for stem in known if stem == match[1] or stem.startswith(f"{match[1]}x")), key=len, default="")
    return load_platform(base).with_nodes(int(match[2])) if base else None


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
    if isinstance(platform, str) and (scaled := _scale(platform)):
        return scaled
    path = find_file(platform)
    facts = path.stat()
    return _read(path.resolve(), facts.st_mtime_ns, facts.st_size)


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
    for path in sorted(find_reference("platforms").glob("*.toml")):
        platform = load_platform(path)
        numbers = list(list_numbers(platform))
        evidence = ", ".join(sorted({number.kind for number in numbers}))
        newest = max((number.date for number in numbers), default="")
        rows.append((path.stem, platform.device.name, platform.network.ranks, evidence, newest))
    return polars.DataFrame(rows, schema=["name", "device", "ranks", "evidence", "date"], orient="row")
