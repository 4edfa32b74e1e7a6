"""Large documents of JSON, plain or packed, whose long lists are taken piece by piece."""

import gzip
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from perfkit.ground.units import format_bytes

#: Largest trace that is read, unpacked [B]: columns and text take some three times as much memory.
LARGEST_TRACE = 2**29
#: Characters that are read at once where they can be cut off: their objects take some ten times as much memory [-].
_PIECE = 2**16
_AFTER = re.compile(r"[ \t\r\n]*([,:}\]])[ \t\r\n]*").match
_BEGIN = re.compile(r"[ \t\r\n]*([{\[])[ \t\r\n]*").match


def read_text(path: str | Path, most: float = math.inf) -> str:
    """Text of a file or of the `most` bytes that it begins with, packed or not.

    A ValueError stops one that unpacks to more than `LARGEST_TRACE`.
    """
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    parts, size = [], 0
    with gzip.open(path) if packed else open(path, "rb") as file:
        while size < most and (part := file.read(2**20)):
            parts.append(part)
            if (size := size + len(part)) > LARGEST_TRACE:
                raise ValueError(f"it unpacks to more than {format_bytes(LARGEST_TRACE)}; record fewer steps")
    return b"".join(parts).decode("utf-8-sig", errors="replace")


def parse_document(text: str, takers: Mapping[str, Callable[[list[Any]], None]], number: Any = float) -> dict[str, Any]:
    """Read JSON whose long lists are taken piece by piece, so that what is not needed takes no memory.

    Parameters
    ----------
    text : str
        An object; a list counts as the member ``traceEvents``.
    takers : mapping of str to callable
        What takes the items of a member of the object, several at a time.
    number : callable, optional
        What makes a number with a point or an exponent of its text: `str` keeps all of its digits.

    Returns
    -------
    members : dict
        All others.

    Raises
    ------
    ValueError
        For anything else, with the place.
    """
    decoder: Any = json.JSONDecoder(parse_float=number, strict=False)
    scan = decoder.scan_once
    members: dict[str, Any] = {}
    try:
        if (begin := _BEGIN(text)) is None:
            raise ValueError("it is no JSON object")
        if begin[1] == "[":
            _take_items(text, begin.end(), scan, takers["traceEvents"])
            return members
        place, end = begin.end(), text[begin.end() : begin.end() + 1] == "}"
        while not end:
            key, place = scan(text, place)
            place, _ = _step_over(text, place, ":")
            if type(key) is str and key in takers and text[place : place + 1] == "[":
                place = _take_items(text, _BEGIN(text, place).end(), scan, takers[key])  # type: ignore[union-attr]
            else:
                members[key], place = scan(text, place)
            place, end = _step_over(text, place, "}")
    except StopIteration as stop:
        raise ValueError(f"it breaks off, or is no JSON, at character {stop.value}") from None
    return members


def _step_over(text: str, place: int, closing: str) -> tuple[int, bool]:
    """Go over a comma or what closes, and whether it closes."""
    after = _AFTER(text, place)
    if after is None or (after[1] != closing and (after[1] != "," or closing == ":")):
        raise ValueError(f"it breaks off, or is no JSON, at character {place}")
    return after.end(), after[1] == closing


def _take_items(text: str, place: int, scan: Callable[..., Any], take: Callable[[list[Any]], None]) -> int:
    """Hand on the items of a list, many at once where a piece is a list itself; returns the place of what follows."""
    end, between = text[place : place + 1] == "]", None
    place += end
    while not end:
        begin, items = place, list[Any]()
        cut = text.rfind(between, place, place + _PIECE) + 1 if between else 0
        if cut:
            with suppress(StopIteration, ValueError):
                items, length = scan(f"[{text[place:cut]}]", 0)
                place = cut if length == cut - place + 2 else place
        if place == begin:  # one alone says where the text breaks off; after a piece that is no list, all go alone
            item, place = scan(text, place)
            items, between = [item], "" if cut else between
        take(items)
        last = place - 1
        place, end = _step_over(text, place, "]")
        between = text[last : place + 1] if between is None else between
    return place
