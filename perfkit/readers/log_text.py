"""Text of logs: plain or compressed with gzip, UTF-8 or UTF-16."""

import gzip
import re
from pathlib import Path

from perfkit.ground.files import explain_content, reading
from perfkit.ground.units import format_bytes

#: Largest log of training that is read [B]: a million lines of Megatron-LM have 0.4 GB.
LARGEST_LOG = 2**29
#: Codes that change the colour of what a terminal shows.
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read_text(path: Path, advice: str) -> str:
    """Read the text of a log.

    Parameters
    ----------
    path : Path
        The file; it may be compressed with gzip.
    advice : str
        What to name instead if it cannot be read.

    Returns
    -------
    text : str
        Its text, with its colours.

    Raises
    ------
    ValueError
        For a file that is no text, and for one that is too large.
    """
    with reading(path, advice, most=LARGEST_LOG, unpacks=True):
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            with gzip.open(path) as file:
                data = file.read(LARGEST_LOG + 1)
            if len(data) > LARGEST_LOG:
                limit = format_bytes(LARGEST_LOG)
                raise ValueError(f"it unpacks to more than {limit}; name a part of it")
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            return data.decode("utf-16", errors="replace")
        cause = explain_content(data[:4096], path.name)
        if cause is not None:
            raise ValueError(cause)
        return data.decode("utf-8-sig", errors="replace")
