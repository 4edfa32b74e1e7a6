"""Interrupts of the command line: before a command runs, and after it, Ctrl-C ends the process
without a traceback."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

#: Exit code of an interrupted command, as of shells: 128 and the number of the signal.
INTERRUPTED = 130


class Interrupts:
    """Whether an interrupt arrived while a command ran; a package may hide it in another error."""

    def __init__(self) -> None:
        self.arrived = False

    def note(self, *_: Any) -> None:
        """Remember the interrupt and raise it."""
        self.arrived = True
        raise KeyboardInterrupt


def leave(*_: Any) -> None:
    """End this process at once, as nothing is to be tidied up."""
    os._exit(INTERRUPTED)


def end_quietly() -> None:
    """Let interrupts end this process without a traceback, if it is the command ``perfkit``.

    Imports take a second; Python would print where in them it was interrupted. Handlers that are
    not Python's stay, also those that ignore the signal.
    """
    program = sys.argv[0] if sys.argv else ""
    # "-m": Python looks for the package of `python -m perfkit`
    if os.path.basename(program) != "perfkit" and program != "-m":
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # only the main thread may
            signal.signal(signal.SIGINT, leave)


@contextmanager
def noting_interrupts() -> Iterator[Interrupts]:
    """Raise interrupts as a KeyboardInterrupt while a command runs, so that it can tidy up."""
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if before not in (leave, signal.default_int_handler):
        yield interrupts
        return
    try:
        signal.signal(signal.SIGINT, interrupts.note)
    except ValueError:  # only the main thread may
        yield interrupts
        return
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
