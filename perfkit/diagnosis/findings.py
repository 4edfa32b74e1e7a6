"""Runs with their causes, and which of them is said first."""

from collections.abc import Collection
from dataclasses import dataclass

from perfkit.diagnosis.records import Case, Cause, Range, Word
from perfkit.ground.units import escape

#: What is said first: what is wrong, then what is right.
_ORDER = (Word.WRONG, Word.TOO_GOOD, Word.SLOW, Word.EXPECTED, Word.LOW, Word.UNKNOWN)


@dataclass(frozen=True)
class Finding:
    """One run of a log, with the causes of what it shows.

    Parameters
    ----------
    case : Case
        The run with its verdicts.
    causes : tuple of Cause
        The surest one first.
    system : str
        The system in words.
    reason : str
        Why nothing is expected; empty where something is.
    """

    case: Case
    causes: tuple[Cause, ...]
    system: str
    reason: str = ""

    @property
    def word(self) -> Word:
        """The verdict on the whole run. It is low where its largest messages are."""
        if self.count_wrong():
            return Word.WRONG
        words = {verdict.word for verdict in self.case.verdicts}
        if not words & {Word.SLOW, Word.TOO_GOOD} and self.case.verdicts:
            largest = self.case.verdicts[-1]
            if largest.word is Word.LOW and largest.sizes is Range.BANDWIDTH:
                return Word.LOW
        return find_worst(words)

    @property
    def name(self) -> str:
        """Its log, with the line where it begins if other runs stand before it."""
        file = escape(self.case.file, 80)
        facts = self.case.facts
        if facts is None or facts.first_line <= 1:
            return file
        return f"{file} line {facts.first_line}"

    def count_wrong(self) -> int:
        """Rows whose results hold wrong values [-]."""
        return 0 if self.case.facts is None else len(self.case.facts.wrong_lines)


def find_worst(words: Collection[Word]) -> Word:
    """Find the verdict that is said first.

    Parameters
    ----------
    words : collection of Word
        Verdicts.

    Returns
    -------
    word : Word
        What is wrong before what is right; that there is not enough to say where there is none.

    Examples
    --------
    >>> find_worst([Word.EXPECTED, Word.SLOW]).value, find_worst([]).value
    ('slow', 'not enough to say')
    """
    for word in _ORDER:
        if word in words:
            return word
    return Word.UNKNOWN


def rank_finding(finding: Finding) -> tuple[int, float]:
    """Rank a run for a text.

    Parameters
    ----------
    finding : Finding
        The run.

    Returns
    -------
    rank : tuple of int and float
        What sorts runs: what is wrong first, the worst first.
    """
    worst = 0.0
    for verdict in finding.case.verdicts:
        if verdict.word is finding.word and verdict.expected_s:
            worst = max(worst, verdict.seconds / verdict.expected_s)
    is_sick = finding.word in (Word.TOO_GOOD, Word.SLOW)
    return _ORDER.index(finding.word), -worst if is_sick else 0.0
