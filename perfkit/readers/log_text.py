"""Text of logs: plain or compressed with gzip, UTF-8 or UTF-16; and the files of a folder of them."""

import gzip
import re
from collections.abc import Collection
from itertools import islice
from pathlib import Path

from perfkit.ground.files import explain_content, reading
from perfkit.ground.units import format_bytes, show

#: Largest log of training that is read [B]: a million lines of Megatron-LM have 0.4 GB.
LARGEST_LOG = 2**29
#: Most files of a folder of logs, other ones included [-]; looking at them takes some seconds.
_MOST_FILES = 50_000
#: Codes that change the colour of what a terminal shows.
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read_text(path: Path, advice: str, *, most: int = LARGEST_LOG) -> str:
    """Read the text of a log.

    Parameters
    ----------
    path : Path
        The file; it may be compressed with gzip.
    advice : str
        What to name instead if it cannot be read.
    most : int, optional
        Largest size that is read, also unpacked [B].

    Returns
    -------
    text : str
        Its text, with its colours.

    Raises
    ------
    ValueError
        For a file that is no text, and for one that is too large.
    """
    with reading(path, advice, most=most, unpacks=True):
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            with gzip.open(path) as file:
                data = file.read(most + 1)
            if len(data) > most:
                limit = format_bytes(most)
                raise ValueError(f"it unpacks to more than {limit}; name a part of it")
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            return data.decode("utf-16", errors="replace")
        cause = explain_content(data[:4096], path.name)
        if cause is not None:
            raise ValueError(cause)
        if len(data) > 9 and not any(data[1:200:2]):  # UTF-16 without its mark
            return data.decode("utf-16-le", errors="replace")
        if len(data) > 9 and not any(data[0:200:2]):
            return data.decode("utf-16-be", errors="replace")
        return data.decode("utf-8-sig", errors="replace")


def list_files(folder: Path) -> list[Path]:
    """List the files of a folder and of its subfolders.

    Parameters
    ----------
    folder : Path
        The folder.

    Returns
    -------
    files : list of Path
        In the order of their names.

    Raises
    ------
    ValueError
        For a folder with too many of them.
    """
    inside = list(islice(folder.rglob("*"), _MOST_FILES + 1))
    if len(inside) > _MOST_FILES:
        raise ValueError(
            f"{show(str(folder), 200)} holds more than {_MOST_FILES:,} files; name the folder of the logs alone"
        )
    return [path for path in sorted(inside) if path.is_file()]


def has_ending(path: Path, suffixes: Collection[str]) -> bool:
    """Whether a file has one of some endings, compressed with gzip or not.

    Examples
    --------
    >>> has_ending(Path("run.log.gz"), (".log", ".txt"))
    True
    """
    return Path(path.name.removesuffix(".gz")).suffix in suffixes
