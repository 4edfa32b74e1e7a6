"""The text of traces: unpacked up to a limit, and parsed object by object."""

import gc
import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perfkit.ground.files import check_values
from perfkit.ground.units import format_bytes, show

#: Largest trace that is read, unpacked [B]: columns and text take up to three times as much memory,
#: and 1.5 times as much where events are parsed in batches.
LARGEST_TRACE = 2**30
#: Most lists and objects of a trace that is read [-]. Real traces have one in 31 bytes or more;
#: those of empty lists fill the memory.
MOST_CONTAINERS = 34_000_000
#: Most values of a trace that is read [-]. Real traces have one in 13 bytes.
MOST_VALUES = 90_000_000
#: Objects that Python's garbage collector searches through in a millisecond or so [-]; fewer are
#: not worth hiding from it.
_MANY_OBJECTS = 20_000
#: How much is unpacked at once [B].
_PART = 2**24
#: What a file ends with that is cut off inside a number or a word: the sign, point or exponent of a
#: number, or the begin of a word of JSON.
_BEGUN = re.compile(r"-|\.|\.?[0-9]*[eE][+-]?|t(ru?)?|f(a(ls?)?)?|n(ul?)?")


def read_text(path: str | Path, most: int | None = None) -> str:
    """Read the text of a file, unpacked: `decode_text` of `read_bytes`."""
    return decode_text(read_bytes(path, most))


def decode_text(data: bytes | bytearray) -> str:
    """The text of bytes in UTF-8; bytes that are none become replacement characters."""
    return data.decode("utf-8-sig", errors="replace")


def read_bytes(path: str | Path, most: int | None = None) -> bytearray:
    """Read the first `most` bytes of a file, unpacked: a small file may unpack to a very large
    one, of which `LARGEST_TRACE` is refused."""
    if most is None:
        most = LARGEST_TRACE
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    data = bytearray()
    containers = 0
    values = 0
    with gzip.open(path) if is_packed else open(path, "rb") as file:
        while len(data) <= most:
            try:
                part = file.read(min(_PART, most + 1 - len(data)))
            except EOFError:
                raise ValueError("it is cut off: its packed data end too early") from None
            if not part:
                break
            data += part
            containers += part.count(b"[") + part.count(b"{")
            values += part.count(b",")
            if containers > MOST_CONTAINERS or values > MOST_VALUES:
                raise ValueError(
                    f"it has more than {MOST_CONTAINERS / 1e6:.0f} million lists and objects, or "
                    f"{MOST_VALUES / 1e6:.0f} million values; record fewer steps"
                )
    if len(data) > LARGEST_TRACE:
        raise ValueError(
            f"it unpacks to more than {format_bytes(LARGEST_TRACE)}; record fewer steps"
        )
    return data


def parse_document(
    text: str,
    number: Callable[[str], Any] = float,
    take: Callable[[dict[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """Parse JSON and hand over each object as soon as it is complete, so that unused objects take
    no memory.

    Parameters
    ----------
    text : str
        An object; a list counts as its member ``traceEvents``.
    number : callable, optional
        Converts the text of a number with a point or an exponent: `str` keeps all of its digits.
    take : callable, optional
        Is called with every object, the inner ones first; what it returns takes the place of the
        object.

    Returns
    -------
    members : dict
        Content of the document.

    Raises
    ------
    ValueError
        For anything else, with the place.
    """
    check_values(text, "it")
    decoder = json.JSONDecoder(parse_float=number, object_hook=take, strict=False)
    begin = len(text) - len(text.lstrip())
    try:
        document, end = decoder.raw_decode(text, begin)
    except json.JSONDecodeError as fault:
        raise ValueError(_explain_syntax(text, fault)) from None
    except RecursionError:
        raise ValueError("it has lists inside of lists without end; it is no trace") from None
    after = text[end : end + 100].lstrip()
    if not isinstance(document, dict | list) and not after.startswith("{"):
        raise ValueError("it is no JSON object")
    if after.startswith(("{", "[")):
        raise ValueError(
            f"a second document begins after character {end}; name one file for each trace"
        )
    return document if isinstance(document, dict) else {"traceEvents": document}


def _explain_syntax(text: str, fault: json.JSONDecodeError) -> str:
    """Say why a text is no JSON: by its first characters, and by what stands at the fault."""
    return _explain_other_file(text) or _explain_fault(text, fault)


def _explain_other_file(text: str) -> str | None:
    """What a text is by its first characters, if it is not meant to be JSON."""
    begin = text[:512].lstrip("\ufeff \t\r\n").lower()
    if not begin:
        return "it is empty"
    if begin.startswith("version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself; run `git lfs pull` where it lies"
    if text[257:262] == "ustar" or begin.startswith("pk\x03\x04"):
        return "it is an archive; unpack it, and name the files inside"
    if begin.startswith(("<!doctype html", "<html", "<?xml")):
        return "it is a web page, perhaps an error page; download the file itself"
    if begin.startswith("sqlite format"):
        return "it is a database, as Nsight Systems writes it; export a trace of PyTorch's profiler"
    if any(character in "\0\ufffd" for character in text[:512]) and begin[0] not in "{[":
        return "it is binary, such as a protobuf of Perfetto; export the trace as JSON"
    if begin[0] not in "{[":
        return f"it begins with {show(text[:30])}; JSON begins with an object or a list"
    return None


def _explain_fault(text: str, fault: json.JSONDecodeError) -> str:
    """What is wrong at the place of a fault."""
    rest = text[fault.pos :]
    place = f"at character {fault.pos}, {show(rest[:30])}"
    is_at_end = fault.pos >= len(text.rstrip())
    is_begun = _BEGUN.fullmatch(rest.rstrip()) is not None
    if is_at_end or is_begun or fault.msg.startswith("Unterminated string"):
        return f"it is cut off {place}"
    if "escape" in fault.msg:
        around = show(text[max(fault.pos - 20, 0) : fault.pos + 20])
        return (
            f"a backslash stands alone at character {fault.pos}, in {around}; in JSON it is "
            "written twice, such as in C:\\\\tools"
        )
    if rest.startswith(("//", "/*", "#")):
        return f"a comment stands {place}; JSON has none"
    if rest.startswith("'"):
        return f"a text stands in single quotation marks {place}; JSON has double ones"
    before = text[: fault.pos].rstrip()
    if fault.msg.startswith("Expecting ',' delimiter") and before.endswith('"'):
        return f'a quotation mark ends a text too early {place}; inside of a text it is written \\"'
    if fault.msg.startswith("Expecting value") and (rest[0].isalpha() or rest[0] in "-+."):
        word = re.match(r"[\w./+-]+", rest)
        return f"{show(word[0] if word else rest[0])} is no number, text or null, {place}"
    if before.endswith(",") and rest.startswith(("]", "}")):
        return f"a comma has nothing after it {place}"
    return f"it is no JSON {place}: {fault.msg}"


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off: a trace has no cycles, and searching for them takes as long
    as reading."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        made_since_collected = gc.get_count()[0]
        # counting what is frozen takes as long as a small trace
        if made_since_collected > _MANY_OBJECTS and not gc.get_freeze_count():
            gc.freeze()
            # counts as old from here on, so that nothing soon searches through it again
            gc.unfreeze()
        if enabled:
            gc.enable()
