"""Warnings for people: those that say the same of other sizes or operations share a line."""

import re
from collections.abc import Sequence

from perfkit.ground.results import write_notes

#: A number with its unit, and the name of an operation or a setting: in what alike warnings differ.
_NUMBER = re.compile(r"(?<![\w-])\d[\d.,]*(?: [kMGTPEµmnp]?(?:B|s|FLOP)\b)?")
_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")


def write_warnings(warnings: Sequence[str]) -> list[str]:
    """Lines of text for the warnings of a result, those that are alike in one, see `group_notes`.

    Examples
    --------
    >>> write_warnings(["all_gather takes 2 ms", "all_gather takes 3 ms"])
    ['  warning: all_gather takes 2 ms (one of 2 such warnings)']
    """
    return write_notes("warning", group_notes(warnings))


def group_notes(notes: Sequence[str]) -> list[str]:
    """Write notes that differ in numbers or in names of operations once.

    Parameters
    ----------
    notes : sequence of str
        All of them, the most important first.

    Returns
    -------
    texts : list of str
        The first note of each kind, with how many there are and the other names.

    Examples
    --------
    >>> group_notes(["all_gather on 8 ranks: 2 GB is outside", "no fit", "send_recv on 8 ranks: 4 MB is outside"])
    ['all_gather on 8 ranks: 2 GB is outside (one of 2 such warnings; also of send_recv)', 'no fit']
    """
    alike: dict[str, list[str]] = {}
    for note in notes:
        kind = _NAME.sub("@", _NUMBER.sub("#", note))
        of_kind = alike.setdefault(kind, [])
        if note not in of_kind:
            of_kind.append(note)
    texts = []
    for of_kind in alike.values():
        first = of_kind[0]
        if len(of_kind) == 1:
            texts.append(first)
            continue
        count = f"one of {len(of_kind)} such warnings"
        others = dict.fromkeys(name for note in of_kind for name in _NAME.findall(note))
        for name in _NAME.findall(first):
            others.pop(name, None)
        if others:
            count += f"; also of {', '.join(others)}"
        texts.append(f"{first} ({count})")
    return texts
