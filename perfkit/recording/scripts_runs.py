"""Scripts and modules that are recorded as their author would run them."""

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfkit.ground.units import show
from perfkit.recording.refusals import LIBRARIES
from perfkit.recording.scripts import LoopEnds, Recording

#: What is said of a script that fails by itself.
FAILED = "{0} failed in {1} with {2}: {3}; it did so before its second update: see whether it fails without perfkit, too"
#: What is said of a script that ends too early.
EXITED = (
    "{0} ended by itself with exit code {1}, before its second update; see what it says, and whether it runs without "
    "perfkit"
)
#: Variables of the environment by which launchers tell a script its ranks.
OF_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
)
#: What is said of a script that asks for its rank where it has none.
NO_RANKS = "{0} asks in {1} for {2}, which a launcher sets; give the number of ranks, such as --ranks 8, as torchrun would"


@dataclass(frozen=True)
class Program:
    """What a command line of Python runs.

    Parameters
    ----------
    path : str or None
        File of a script; None for a module.
    module : str or None
        Name of a module, as after ``python -m``; None for a script.
    arguments : sequence of str
        Words that follow it.
    """

    path: str | None
    module: str | None
    arguments: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Name of the script or the module."""
        return str(self.module) if self.path is None else Path(self.path).name

    def check(self) -> None:
        """Check that there is such a script or module.

        Raises
        ------
        ValueError
            For both or none, or for a file that does not exist.
        """
        if (self.path is None) == (self.module is None):
            raise ValueError("give a script, such as train.py, or a module by -m")
        if self.path is not None and not Path(self.path).is_file():
            raise ValueError(
                f"script is {show(self.path)}, which is no file; give a file of Python, or a module by -m"
            )

    def run(self) -> None:
        """Run it in this process, as the main program."""
        if self.path is not None:
            runpy.run_path(self.path, run_name="__main__")
        else:
            runpy.run_module(str(self.module), run_name="__main__", alter_sys=True)


class ScriptError(Exception):
    """A script failed by itself; its message is for the user.

    Parameters
    ----------
    text : str
        What happened, in one line.
    frames : str
        The lines of the script that led to it, as Python prints them.
    """

    def __init__(self, text: str, frames: str) -> None:
        super().__init__(text)
        self.frames = frames


def record_program(program: Program, recording: Recording) -> Recording:
    """Run a script or module, and record its training loop.

    Parameters
    ----------
    program : Program
        What to run. It finds its arguments, its folder first among those of modules, and the
        working folder unchanged.
    recording : Recording
        Receives the iterations.

    Returns
    -------
    recording : Recording
        The same, with iterations.

    Raises
    ------
    ValueError
        For a script without an update, and for one that cannot be captured.
    ScriptError
        For a script that fails by itself.
    """
    program.check()
    code: Any = None
    failure: BaseException | None = None
    try:
        with recording, set_up(program):
            try:
                program.run()
            except SystemExit as error:
                code = error.code
            except LoopEnds:
                raise
            except BaseException as error:
                failure = error
                raise
    except ValueError as error:
        if error is failure and not _is_refusal(error):
            raise _explain(program, error) from error
        if code not in (None, 0):
            raise ValueError(EXITED.format(program.name, code)) from error
        raise
    except Exception as error:
        if error is failure:
            raise _explain(program, error) from error
        raise
    return recording


@contextmanager
def set_up(program: Program) -> Iterator[None]:
    """Arguments and folders as Python sets them for its main program; put back afterwards."""
    before = sys.argv, sys.path[:], os.getcwd(), sys.modules["__main__"]
    first = "" if program.path is None else str(Path(program.path).resolve().parent)
    sys.argv = [program.path or "-m", *program.arguments]
    sys.path.insert(0, first)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        os.chdir(before[2])
        sys.modules["__main__"] = before[3]


def _is_refusal(error: BaseException) -> bool:
    """Whether perfkit itself has raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(LIBRARIES[-1])


def _explain(program: Program, error: Exception) -> ScriptError:
    """The error of a script, with the lines that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_machinery(frame.filename)]
    line = "a place that could not be found"
    of_user = [frame for frame in own if not frame.filename.startswith((*LIBRARIES, "<frozen "))]
    if of_user:
        line = f"{of_user[-1].filename}, line {of_user[-1].lineno}"
    if isinstance(error, KeyError) and error.args[:1] and error.args[0] in OF_LAUNCHERS:
        advice = NO_RANKS.format(program.name, line, error.args[0])
        return ScriptError(advice, "".join(traceback.format_list(of_user)))
    text = str(error).strip().splitlines() or [""]
    message = FAILED.format(program.name, line, type(error).__name__, text[0][:300])
    return ScriptError(message, "".join(traceback.format_list(own)))


def _is_machinery(file: str) -> bool:
    """Whether a file belongs to perfkit, or to what starts a script."""
    return file.startswith(LIBRARIES[-1]) or "runpy" in file
