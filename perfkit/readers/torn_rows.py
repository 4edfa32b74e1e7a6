"""Rows of nccl-tests that other lines tear apart, put together again.

nccl-tests prints a row in three pieces: sizes, then the figures of each half when they are measured.
What NCCL says in between, as with NCCL_DEBUG_SUBSYS=TUNING, follows a piece in the same line; and a
launcher that does not wait for the end of a line writes its label before each piece.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

#: A row, whatever its launcher wrote before it ("3: ", "[1,0]<stdout>:", "pod | ", a date).
ROW = re.compile(r"(?<![\w.,-])\d{1,18}\s+\d+\s+([A-Za-z]\w*)(?!\S)")
#: A figure of a row.
VALUE = re.compile(r"N/A|[-+]?(?:nan|inf|\d{1,30}(?:\.\d*)?(?:e[-+]?\d{1,2})?)\*?")
#: A line of the list of devices.
DEVICE = re.compile(
    r"Rank\s+(?P<rank>\d{1,9})(?:\s+Group\s+(?P<group>\d+))?(?:\s+Pid\s+\d+)?"
    r"\s+on\s+(?P<host>\S+)\s+device"
    r"(?:\s+(?P<number>\d{1,9}))?(?:\s+\[(?P<bus>[^\]]*)\])?(?:\s+(?P<name>\S.*))?"
)
#: The label of a launcher at the beginning of a line.
_LABEL = re.compile(r"\s*(\[\d{1,6}(?:,\d{1,6})?\](?:<std(?:out|err|diag)>)?:?|\d{1,6}: )")
#: Host, process and thread before what NCCL says, for hosts whose name begins with a letter.
_SPEAKER = re.compile(r"[A-Za-z][\w.-]{0,100}:\d+:\d+ \[")
_DATE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]\s*$")
#: Most characters of a piece of a row [-].
_LONGEST = 300
#: Most words of a launcher before a line [-].
_MOST_LABELS = 2


def mend_rows(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Put rows together that other lines tear apart.

    Parameters
    ----------
    lines : sequence of (int, str)
        Number and text of each line, in the order of the log.

    Returns
    -------
    lines : list of (int, str)
        The same with whole rows; a row has the number of the line in which it ends. What NCCL says
        behind a piece is a line of its own, with the number of its line.

    Examples
    --------
    >>> mend_rows([(1, "8 2 float sum -1elm:1:2 [0] NCCL INFO Trees"), (2, "3.5 0.00 0.00 0")])
    [(1, 'elm:1:2 [0] NCCL INFO Trees'), (2, '8 2 float sum -1 3.5 0.00 0.00 0')]
    """
    whole: list[tuple[int, str]] = []
    printer: re.Pattern[str] | None = None  # of lines of rank 0, which prints the rows
    torn: _TornRow | None = None
    for number, text in lines:
        if "CCL INFO" in text or "CCL WARN" in text:
            start = _find_speaker(text, printer)
            piece = _read_piece(text[:start])
            if _begins_row(piece):
                _give_up(torn, whole)
                torn = _TornRow("", before=_find_words_before(text))
            elif torn is not None:
                piece = _find_figures(piece, torn.before)
            if torn is not None and piece:
                torn.text = f"{torn.text} {piece}".strip()
                torn.places[len(whole)] = (number, text)
                text = text[start:]
            whole.append((number, text))
            continue
        row = _drop_repeated_label(text)
        if torn is not None:
            rest = _find_figures(row, torn.before)
            if rest:
                whole.append((number, f"{torn.text} {rest}"))
                torn = None
                continue
            if ROW.search(row):
                _give_up(torn, whole)
                torn = None
        if "Rank" in text:
            device = DEVICE.search(text)
            if device is not None and int(device["rank"]) == 0:
                printer = re.compile(rf"{re.escape(device['host'])}:\d+:\d+ \[")
        whole.append((number, row))
    _give_up(torn, whole)
    return whole


@dataclass
class _TornRow:
    """A row whose end is not there yet."""

    text: str
    before: str  # what a launcher writes before its line
    places: dict[int, tuple[int, str]] = field(default_factory=dict)  # lines that hold its pieces


def _give_up(torn: _TornRow | None, whole: list[tuple[int, str]]) -> None:
    """Put back the lines of a row that has no end."""
    if torn is not None:
        for place, line in torn.places.items():
            whole[place] = line


def _find_speaker(text: str, printer: re.Pattern[str] | None) -> int:
    """Where what NCCL says begins, with its host; 0 where no piece of a row can stand before it."""
    printed = None if printer is None else printer.search(text)
    if printed is not None:
        return printed.start()
    speaker = _SPEAKER.search(text)
    if speaker is None:
        return 0
    start = speaker.start()
    if text.startswith("N/A", start - 2):  # results that were not checked, before the host
        return start + 1
    head = text[:start]
    ends_with_label = head.rstrip().endswith(("]", ">", ":"))
    # a reduction without a root behind it would be taken for the beginning of the host
    return start if head[-1:].isdigit() or ends_with_label else 0


def _read_piece(head: str) -> str:
    """The piece of a row before what NCCL says, without labels; empty for none."""
    if not head or len(head) > _LONGEST:
        return ""
    label = _LABEL.match(head)
    if label is not None:
        head = head.replace(label[1], " ")
    piece = _DATE.sub("", head).strip()
    return piece


def _drop_repeated_label(text: str) -> str:
    """A row without the labels that stand before each of its pieces."""
    label = _LABEL.match(text)
    if label is None or len(text) > _LONGEST or text.count(label[1]) < 2:
        return text
    row = text.replace(label[1], " ")
    return row if ROW.search(row) or _holds_figures(row) else text


def _begins_row(piece: str) -> bool:
    """Whether a text is the beginning of a row and nothing behind it: sizes, type, perhaps reduction,
    root and figures."""
    row = ROW.search(piece)
    if row is None:
        return False
    words = piece[row.end() :].split()
    if words and words[0].isalpha():
        words = words[1:]
    return all(VALUE.fullmatch(word) for word in words)


def _find_words_before(text: str) -> str:
    """What a launcher writes before the line of a row."""
    row = ROW.search(text)
    return "" if row is None else text[: row.start()].strip()


def _find_figures(text: str, before: str) -> str:
    """The figures at the end of a line that holds nothing else but what a launcher writes before
    it; empty for other lines."""
    if len(text) > _LONGEST:
        return ""
    text = text.strip().removeprefix(before)
    label = _LABEL.match(text)
    words = (text if label is None else text[label.end() :]).split()
    for first in range(min(len(words), _MOST_LABELS + 1)):
        rest = " ".join(words[first:])
        if _holds_figures(rest):
            return rest
    return ""


def _holds_figures(text: str) -> bool:
    """Whether a text is figures of a row and nothing else, but for the time at its end."""
    words = text.split()
    if len(words) > 2 and re.fullmatch(r"\d{4}-\d\d-\d\d", words[-2]):
        words = words[:-2]
    return bool(words) and all(VALUE.fullmatch(word) for word in words)
