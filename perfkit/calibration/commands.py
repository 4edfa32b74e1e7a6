"""How commands end: errors in one line, exit codes, and a log file of a failure."""

import io
import os
import re
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from perfkit.ground.files import write_text
from perfkit.ground.units import escape
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.processes import tidy


class _Copy:
    """A stream that also keeps its text."""

    def __init__(self, stream: Any, kept: list[str]) -> None:
        self._stream, self._kept = stream, kept

    def write(self, text: str) -> Any:
        self._kept.append(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_command(run: Callable[[], int], *, name: str = "perfkit", log: Path | None = None) -> int:
    """Run a command and report an error in one line.

    Parameters
    ----------
    run : callable
        Returns the exit code.
    name : str, optional
        Starts each line.
    log : Path, optional
        Folder for ``perfkit-run.log``, written when a command fails after its first output.

    Returns
    -------
    code : int
        That of `run`, 2 for an error, 130 if interrupted, 128 plus the number of a signal, 141 where nobody reads on.
    """

    def say(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"{name}: {'note: ' * isinstance(message, Warning)}{escape(message, 1000)}", file=sys.stderr)

    warnings.showwarning = say
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character still shows the rest
    printed: list[str] = []
    try:
        with redirect_stdout(_Copy(sys.stdout, printed)), redirect_stderr(_Copy(sys.stderr, printed)), tidy():
            code = run()
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # as after | head
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # which Python flushes at its end
        return 141
    except BaseException as error:
        code, text = 2, str(error)
        if isinstance(error, KeyboardInterrupt):
            code = 128 + (error.args or (2,))[0]
            text = "interrupted; what was measured is kept, the same command goes on from there"
        elif isinstance(error, ModuleNotFoundError):
            text = f"{error.name} is not installed; pip install 'perfkit[measure]' brings it"
        say(text)
        if log and printed and (file := _write_log(log, printed, error)):
            say(f"{file} tells more: machine, versions, what was printed; it can be sent")
        if not isinstance(error, KeyboardInterrupt | ImportError | ValueError | OSError | RuntimeError):
            raise
        return code


def _write_log(folder: Path, printed: list[str], error: BaseException) -> Path | None:
    """Write ``perfkit-run.log``, where that fails into the folder of temporary files."""
    matter = "(OMP|MKL|MALLOC|CUDA|NCCL|GLOO|LD|XDG|PYTHON)_|TMPDIR"
    facts = {"date": datetime.now().isoformat(" ", "seconds"), "command": shlex.join(sys.argv), **describe_machine()}
    facts |= list_versions() | {name: text for name, text in sorted(os.environ.items()) if re.match(matter, name)}
    said = re.sub(r"[^\n]*\r", "", "".join(printed))  # the last state of a progress bar
    head = [f"{name}: {fact}" for name, fact in facts.items()]
    text = "\n".join([*head, "", said, "".join(traceback.format_exception(error))])
    for place in (folder, Path(tempfile.gettempdir())):
        with suppress(OSError):
            return write_text(place / "perfkit-run.log", text.encode(errors="backslashreplace").decode())
    return None
