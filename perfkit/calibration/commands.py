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
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from perfkit.ground.files import write_text
from perfkit.ground.units import escape
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.processes import tidy


def run_command(run: Callable[[], int], *, name: str = "perfkit", log: Path | None = None) -> int:
    """Run a command and report an error in one line.

    Parameters
    ----------
    run : callable
        Returns the exit code.
    name : str, optional
        Starts each line.
    log : Path, optional
        Folder for ``perfkit-run.log``, written when a command fails for another reason than its input.

    Returns
    -------
    code : int
        That of `run`, 2 for an error, 130 if interrupted, 128 plus the number of a signal, 141 where nobody reads on.
    """

    def say(message: Warning | str, *_: object, **__: object) -> None:
        print(f"{name}: {'note: ' * isinstance(message, Warning)}{escape(message, 1000)}", file=sys.stderr)

    warnings.showwarning = say
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character still shows the rest
    try:
        with tidy():
            code = run()
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # as after | head
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # which Python flushes at its end
        return 141
    except KeyboardInterrupt as error:
        say("interrupted; what was measured is kept, the same command goes on from there")
        return int(128 + (error.args or (2,))[0])
    except ModuleNotFoundError as error:
        say(f"{error.name} is not installed; pip install 'perfkit[measure]' brings it")
    except (ValueError, ImportError) as error:
        say(str(error))
    except BaseException as error:
        say(str(error))
        if log and (file := _write_log(log, error)):
            say(f"{file} tells more: machine, versions, where it failed; it can be sent")
        if not isinstance(error, OSError | RuntimeError):
            raise
    return 2


def _write_log(folder: Path, error: BaseException) -> Path | None:
    """Write ``perfkit-run.log``, where that fails into the folder of temporary files."""
    matter = "(OMP|MKL|MALLOC|CUDA|NCCL|GLOO|LD|XDG|PYTHON)_|TMPDIR"
    facts = {"date": datetime.now().isoformat(" ", "seconds"), "command": shlex.join(sys.argv), **describe_machine()}
    facts |= list_versions() | {name: text for name, text in sorted(os.environ.items()) if re.match(matter, name)}
    text = "\n".join([*(f"{name}: {fact}" for name, fact in facts.items()), "", *traceback.format_exception(error)])
    for place in (folder, Path(tempfile.gettempdir())):
        with suppress(OSError):
            return write_text(place / "perfkit-run.log", text.encode(errors="backslashreplace").decode())
    return None
