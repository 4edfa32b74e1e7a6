"""Run a command: errors in one line, exit codes, and a log file after a failure."""

import io
import os
import re
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from perfkit.ground.interrupts import Interrupts, noting_interrupts
from perfkit.ground.targets import write_text
from perfkit.ground.units import escape
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.processes import tidy

#: Variables of the environment that a log names: they change how fast a machine is.
_SETTINGS = "(OMP|MKL|MALLOC|CUDA|NCCL|GLOO|LD|XDG|PYTHON)_|TMPDIR"


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
        Folder for ``perfkit-run.log``, which is written if the command fails after its first
        output.

    Returns
    -------
    code : int
        Exit code of `run`; 2 for an error, 130 for an interrupt, 128 plus the number of another
        signal, 141 if the reader of the output has closed it [-].
    """

    def say(message: Warning | str, *_: Any, **__: Any) -> None:
        kind = "note: " if isinstance(message, Warning) else ""
        print(f"{name}: {kind}{escape(message, 1000)}", file=sys.stderr)

    if sys.stderr is None:  # closed by 2>&-; messages are lost, as the user wants
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    warnings.showwarning = say
    if sys.stdout is None:  # closed by >&-
        say("standard output is closed; send it to a file, or to /dev/null")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        # "?" for characters that the terminal does not have
        sys.stdout.reconfigure(errors="replace")
    printed: list[str] = []
    interrupts = Interrupts()
    try:
        with (
            noting_interrupts() as interrupts,
            redirect_stdout(_Copy(sys.stdout, printed)),
            redirect_stderr(_Copy(sys.stderr, printed)),
            tidy(),
        ):
            code = run()
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # such as by | head
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python flushes it at its end
        return 141
    except BaseException as error:
        # an import that is interrupted may end with another error
        if isinstance(error, KeyboardInterrupt) or interrupts.arrived:
            failure = _describe_interrupt(error, measures=log is not None)
        else:
            failure = _describe_error(error)
        say(failure.text)
        if log and printed:
            with suppress(OSError):  # the error above matters more
                file = _write_log(log, printed, error)
                say(f"{file} has machine, versions and output; send it with your question")
        if not failure.is_expected:
            raise
        return failure.code


class _Failure(NamedTuple):
    """What a command that failed says, and its exit code; one that is not expected is a fault of
    perfkit, and shows its traceback."""

    text: str
    code: int
    is_expected: bool


def _describe_interrupt(error: BaseException, *, measures: bool) -> _Failure:
    """An interrupt, or another signal, whose number the error holds."""
    number: int = signal.SIGINT
    if isinstance(error, KeyboardInterrupt) and error.args:
        number = error.args[0]
    text = "interrupted"
    if measures:
        text += "; finished measurements are kept, the same command continues"
    return _Failure(text, 128 + number, is_expected=True)


def _describe_error(error: BaseException) -> _Failure:
    is_expected = isinstance(error, ImportError | ValueError | OSError | RuntimeError)
    return _Failure(str(error), 2, is_expected)


def _write_log(folder: Path, printed: list[str], error: BaseException) -> Path:
    """Write ``perfkit-run.log``: machine, versions, settings, output and the error."""
    facts = {
        "date": datetime.now().isoformat(" ", "seconds"),
        "command": shlex.join(sys.argv),
        **describe_machine(),
        **list_versions(),
    }
    for name, value in sorted(os.environ.items()):
        if re.match(_SETTINGS, name):
            facts[name] = value
    lines = [f"{name}: {fact}" for name, fact in facts.items()]
    output = re.sub(r"[^\n]*\r", "", "".join(printed))  # only the last state of a progress bar
    lines += ["", output, "".join(traceback.format_exception(error))]
    text = "\n".join(lines).encode(errors="backslashreplace").decode()
    return write_text(folder / "perfkit-run.log", text)
