"""The file that a failed command leaves for whoever is asked about it."""

import os
import re
import shlex
import sys
import tempfile
import traceback
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from perfkit.measure.machine import describe_machine, list_versions
from perfkit.resources import write_text

__all__ = ["Copy", "write_log"]


class Copy:
    """A stream that also keeps what it is given.

    Parameters
    ----------
    stream : file
        Receives all of it.
    kept : list of str
        Receives all of it too.
    """

    def __init__(self, stream: Any, kept: list[str]) -> None:
        self._stream, self._kept = stream, kept

    def write(self, text: str) -> Any:
        self._kept.append(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def write_log(folder: Path, printed: list[str], error: BaseException) -> Path | None:
    """Write ``perfkit-run.log``: versions, machine, command, environment, what was printed, and the error.

    Parameters
    ----------
    folder : Path
        Where to write it; where that fails, the folder of temporary files is taken.
    printed : list of str
        What `Copy` has kept.
    error : BaseException
        What ended the command.

    Returns
    -------
    file : Path or None
        What was written, if anything.
    """
    matter = "(OMP|MKL|MALLOC|CUDA|NCCL|GLOO|LD|XDG|PYTHON)_|TMPDIR"
    facts = {"date": datetime.now().isoformat(" ", "seconds"), "command": shlex.join(sys.argv), **describe_machine()}
    facts |= list_versions() | {name: text for name, text in sorted(os.environ.items()) if re.match(matter, name)}
    said = re.sub(r"[^\n]*\r", "", "".join(printed))  # of a bar, what was seen last: it has the time of its stage
    head = [f"{name}: {fact}" for name, fact in facts.items()]
    text = "\n".join([*head, "", said, "".join(traceback.format_exception(error))])
    for place in (folder, Path(tempfile.gettempdir())):
        with suppress(OSError):
            return write_text(place / "perfkit-run.log", text.encode(errors="backslashreplace").decode())
    return None
