"""What a user sees of measurements that take minutes: which part runs, what each part has found, and
how long the rest takes."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from perfkit.ground.units import check_type

#: A part that took less than this share of what was expected was measured before, and kept [-].
_KEPT = 0.2


@dataclass(frozen=True)
class Part:
    """A part of what is measured.

    Parameters
    ----------
    name : str
        In a word or two.
    seconds : float
        How long it takes on the machine of docs/formulas.md, table 7.2 [s].
    """

    name: str
    seconds: float


def format_duration(seconds: float) -> str:
    """Say how long something takes, in half minutes.

    Parameters
    ----------
    seconds : float
        Time [s].

    Returns
    -------
    text : str
        Such as ``6 min``.

    Examples
    --------
    >>> format_duration(340), format_duration(80), format_duration(20)
    ('6 min', '1.5 min', 'half a minute')
    """
    halves = max(1, round(seconds / 30))
    if halves == 1:
        return "half a minute"
    if halves < 6:
        return f"{halves / 2:g} min"
    return f"{round(seconds / 60)} min"


class Progress:
    """Says on standard error which part of several runs, what it found, and how long the rest takes
    on this machine.

    Parameters
    ----------
    *after : Part
        Parts that follow those of `plan`.
    shown : bool, optional
        Whether anything is said.

    Notes
    -----
    This machine takes as many times longer than the expected seconds for the parts that are left as
    it took for the parts that are done.
    """

    def __init__(self, *after: Part, shown: bool = True) -> None:
        self._after = after
        self.shown = shown
        self.parts: Sequence[Part] = after
        self._number = 0
        self._began = time.monotonic()
        self._spent = 0.0
        self._expected = 0.0

    def plan(self, parts: Sequence[Part]) -> None:
        """Say what will be measured, before the parts that follow.

        Parameters
        ----------
        parts : sequence of Part
            In their order.
        """
        self.parts = [*parts, *self._after]

    def begin(self, name: str) -> None:
        """Say that a part begins.

        Parameters
        ----------
        name : str
            Name of one of the parts.
        """
        names = [part.name for part in self.parts]
        self._number = names.index(name)
        self._began = time.monotonic()
        self.tell(f"{self._number + 1} of {len(names)}: {name}")

    def end(self, found: str) -> None:
        """Say what the part has found, and how long the rest takes.

        Parameters
        ----------
        found : str
            In one line.
        """
        part = self.parts[self._number]
        self.tell(f"  {part.name}: {found}")
        spent = time.monotonic() - self._began
        if spent > _KEPT * part.seconds:
            self._spent += spent
            self._expected += part.seconds
        left = self.expect_left()
        if left is not None:
            self.tell(f"  the rest takes about {format_duration(left)} on this machine")

    def expect_left(self) -> float | None:
        """Expect how long the parts after this one take on this machine.

        Returns
        -------
        seconds : float or None
            None where nothing is left, or nothing was timed yet [s].
        """
        left = sum(part.seconds for part in self.parts[self._number + 1 :])
        if not left or not self._expected:
            return None
        return left * self._spent / self._expected

    def tell(self, text: str) -> None:
        """Say one line.

        Parameters
        ----------
        text : str
            The line.
        """
        if self.shown:
            print(text, file=sys.stderr, flush=True)


def follow_progress(progress: bool | Progress) -> Progress:
    """Read the argument ``progress`` of what measures.

    Parameters
    ----------
    progress : bool or Progress
        Whether anything is said, or what says it.

    Returns
    -------
    progress : Progress
        What says it.

    Raises
    ------
    ValueError
        For anything else.
    """
    if isinstance(progress, Progress):
        return progress
    check_type("progress", progress, bool)
    return Progress(shown=progress)
