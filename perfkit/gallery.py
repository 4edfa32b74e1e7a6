"""The gallery: platforms that ship with perfkit, found by name; others are found by path."""

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


def load_platform(platform: str | Path | Platform) -> Platform:
    """Find a platform by gallery name or path.

    Parameters
    ----------
    platform : str, Path or Platform
        Name from `platforms`, path of a TOML file, or a platform, which is handed back [-].

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
    >>> load_platform("a100-sxm-8").network.ranks
    8
    """
    if isinstance(platform, Platform):
        return platform
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
