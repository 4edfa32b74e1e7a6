"""Files: reference data that ships with perfkit, and errors of readers that name the file."""

import csv
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from perfkit.ground.forks import ForkError
from perfkit.ground.units import escape, format_bytes, show

#: Largest file of JSON, TOML, CSV or a log that is read [B]: those that perfkit writes or ships
#: have up to 0.6 MB, and parsed data take up to 30 times as much memory.
LARGEST_TEXT = 2**25
#: Most tables that a file may list [-]; they take some 4 s and 100 MB. Published sets have up to
#: 856.
MOST_ROWS = 200_000
#: Lists and values of JSON that are parsed in any case [-]; they take at most 0.3 GB.
FEW_VALUES = 2_000_000
#: Bytes at the beginning of a file that tell what it is [B].
_HEAD = 4096
_EMPTY = "it is empty"
#: Longest name of a file or folder that file systems take (NAME_MAX of Linux) [-].
_LONGEST_NAME = 255
_UTF_16 = "it is UTF-16 text, as PowerShell writes it; save it as UTF-8"
#: First bytes of files that are often taken for another, what they are, and the next step.
_SIGNATURES = (
    (
        b"version https://git-lfs",
        "it is a Git LFS pointer, not the file itself; run `git lfs pull` where it lies",
    ),
    (b"\xff\xfe", _UTF_16),
    (b"\xfe\xff", _UTF_16),
    (b"\x28\xb5\x2f\xfd", "it is compressed by zstd; unpack it first"),
    (b"\xfd7zXZ", "it is compressed by xz; unpack it first"),
    (b"\x04\x22\x4d\x18", "it is compressed by lz4; unpack it first"),
    (b"Rar!\x1a\x07", "it is a rar archive; unpack it, and name the files inside"),
    (b"BZh", "it is compressed by bzip2; unpack it first"),
    (b"7z\xbc\xaf", "it is a 7z archive; unpack it, and name the files inside"),
    (b"%PDF", "it is a PDF; name the file with the data"),
    (b"SQLite format 3", "it is an SQLite database; export the data as text"),
    (b"\x89PNG", "it is an image; name the file with the data"),
    (b"\x7fELF", "it is a program; name the file that it writes"),
)
#: Endings of files that are zip archives by nature.
_ZIPPED = (".npz", ".pt", ".pth", ".pt.gz", ".pth.gz")


def find_reference(*parts: str) -> Path:
    """Find a file or folder of the reference data, however perfkit was installed.

    Parameters
    ----------
    *parts : str
        Path below ``reference_data``; none for the folder itself.

    Returns
    -------
    path : Path
        The existing file or folder.

    Raises
    ------
    FileNotFoundError
        If the installation does not have it.

    Notes
    -----
    A wheel has the data inside the package. A checkout has it beside the package, and an editable
    install points to the checkout.

    Examples
    --------
    >>> find_reference("platforms", "h100-sxm-8.toml").name
    'h100-sxm-8.toml'
    """
    package = Path(__file__).resolve().parent.parent
    homes = [home / "reference_data" for home in (package, package.parent)]
    # Another project may have a folder of that name beside an installed package; ours has a
    # platform gallery.
    for home in (home for home in homes if (home / "platforms").is_dir()):
        if (path := home.joinpath(*parts)).exists():
            return path
        raise FileNotFoundError(
            f"reference data has no {'/'.join(parts)}; its home is {home}; install perfkit again"
        )
    raise FileNotFoundError(
        f"reference data is missing; tried {' and '.join(map(str, homes))}; install perfkit again"
    )


@lru_cache(maxsize=4)
def group_rows(column: str, *parts: str) -> dict[str, list[dict[str, str]]]:
    """Read a CSV file of the reference data, see `find_reference`: its rows grouped by the values
    of a column."""
    groups: dict[str, list[dict[str, str]]] = {}
    with find_reference(*parts).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault(row[column], []).append(row)
    return groups


def explain_content(head: bytes, name: str = "", *, unpacks: bool = False) -> str | None:
    """Say what a file is by its first bytes, if it is none that perfkit can use.

    Parameters
    ----------
    head : bytes
        The first bytes, some thousand are enough.
    name : str, optional
        Name of the file; its ending says whether a zip archive is what it should be.
    unpacks : bool, optional
        Whether the reader unpacks gzip; then the bytes inside are looked at.

    Returns
    -------
    cause : str or None
        What it is and the next step, such as ``it is empty``; None for anything else.

    Examples
    --------
    >>> explain_content(b"BZh91AY&SY")
    'it is compressed by bzip2; unpack it first'
    >>> explain_content(b"size,time")
    """
    if not head:
        return _EMPTY
    if head.startswith(b"\x1f\x8b"):
        inside = _peek_gzip(head)
        if inside[257:262] == b"ustar":
            return "it is a compressed tar archive; unpack it, and name the files inside"
        if not unpacks:
            return "it is compressed by gzip; unpack it first"
        return explain_content(inside, name.removesuffix(".gz")) if inside else None
    for signature, cause in _SIGNATURES:
        if head.startswith(signature):
            return cause
    if head[257:262] == b"ustar":
        return "it is a tar archive; unpack it, and name the files inside"
    if head.startswith(b"PK\x03\x04") and not name.lower().endswith(_ZIPPED):
        return "it is a zip archive; unpack it, and name the files inside"
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html")):
        return "it is a web page (HTML), perhaps an error page; download the file itself"
    return None


def _peek_gzip(head: bytes) -> bytes:
    """The first bytes inside a gzip file; none where it is damaged."""
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, _HEAD)
    except zlib.error:
        return b""


def _explain_file(path: str, unpacks: bool) -> str | None:
    """What a file is by its first bytes, see `explain_content`; None where it cannot be opened."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return None
    return explain_content(head, path, unpacks=unpacks)


def check_path(argument: str, path: Any) -> Path:
    """The name of a file to read; a ValueError for anything else.

    Examples
    --------
    >>> check_path("path", 4)
    Traceback (most recent call last):
    ...
    ValueError: path is 4; it must be the name of a file, a str or a Path
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str):
        raise ValueError(
            f"{argument} is {show(path)}; it must be the name of a file, a str or a Path"
        )
    if not name:
        raise ValueError(f"{argument} is ''; it is empty; name a file")
    if "\0" in name:
        raise ValueError(f"{argument} is {show(name, 200)}; no name of a file holds \\x00")
    if max(map(len, name.split("/"))) > _LONGEST_NAME:
        raise ValueError(
            f"{argument} is {show(name, 200)}; no file has so long a name; if it is the text of a "
            "file, write it to one and name that"
        )
    return Path(name)


def check_paths(argument: str, paths: Any) -> list[Path]:
    """The name of a file to read, or several, as a list; a ValueError for anything else.

    Examples
    --------
    >>> check_paths("traces", ["a.json", 4])
    Traceback (most recent call last):
    ...
    ValueError: traces[1] is 4; it must be the name of a file, a str or a Path
    """
    if isinstance(paths, str | os.PathLike):
        return [check_path(argument, paths)]
    if not isinstance(paths, Sequence) or isinstance(paths, bytes | bytearray | memoryview):
        raise ValueError(
            f"{argument} is {show(paths)}; it must be the name of a file, a str or a Path, or a "
            "list of them"
        )
    if not len(paths):
        raise ValueError(f"{argument} is {show(paths)}; it must name at least one file")
    return [check_path(f"{argument}[{place}]", path) for place, path in enumerate(paths)]


@contextmanager
def reading(
    source: object,
    advice: str,
    *,
    error: type[ValueError] = ValueError,
    most: float | None = None,
    told: bool = False,
    unpacks: bool = False,
) -> Iterator[None]:
    """Turn every error of a reader into one documented error with a message of one line.

    Parameters
    ----------
    source : str or Path
        File that is read; or, without `most`, the name of the source in errors.
    advice : str
        What to do next.
    error : type, optional
        ValueError or a subclass; the original error is its cause.
    most : float, optional
        Largest size of the file, which must be a regular file: a device never ends, and a pipe may
        wait for ever [B].
    told : bool, optional
        Whether a ValueError or OSError from inside passes with its own words.
    unpacks : bool, optional
        Whether the reader unpacks gzip by itself.

    Raises
    ------
    ValueError
        For every error, panics of compiled readers included; the message is shortened and control
        characters are escaped. Errors that begin with the name of the source keep their words.
        Where the first bytes of a file tell that it is something else (a Git LFS pointer, an
        archive, a web page), the message says that instead. Interrupts, warnings, missing packages,
        names that the reader's own code lacks and a `ForkError` pass: the file has no fault.

    Notes
    -----
    It is also a decorator, of functions that always read the same source.

    Examples
    --------
    >>> with reading("plan.json", "name a plan"):
    ...     {}["tables"]
    Traceback (most recent call last):
    ...
    ValueError: plan.json: KeyError 'tables'; name a plan
    """
    name, opened = escape(source, 200), False
    if most is not None:
        try:
            check_path("path", source)
        except ValueError as fault:
            raise error(str(fault)) from None
    try:
        if most is not None:
            facts = os.stat(str(source))
            if not stat.S_ISREG(facts.st_mode):
                raise OSError("it is not a regular file")
            if facts.st_size > most:
                raise ValueError(
                    f"it has {format_bytes(facts.st_size)}; at most {format_bytes(most)} are read"
                )
            opened = True
            cause = _explain_file(str(source), unpacks)
            if cause not in (None, _EMPTY, _UTF_16):  # some readers take these two
                raise ValueError(f"{name} cannot be read: {cause}")
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, Warning, ImportError, ForkError):
        raise
    except NameError:  # a mistake of whoever wrote the reader
        raise
    except MemoryError as fault:
        raise error(
            f"{name} cannot be read: this process has too little memory for it; allow it more, or "
            "name a part of the file"
        ) from fault
    except BaseException as fault:  # panics of Rust are no Exception
        cause = _explain_file(str(source), unpacks) if opened else None
        if cause and "is empty" not in str(fault):
            raise error(f"{name} cannot be read: {cause}") from fault
        if told and isinstance(fault, OSError):
            raise
        plain = isinstance(fault, ValueError) and not isinstance(fault, UnicodeError)
        said = fault.strerror or fault if isinstance(fault, OSError) else fault
        text = escape(said if plain else str(said).strip().split("\n")[0], 500)
        if not (plain and (told or text.startswith((name, escape(Path(str(source)).name, 200))))):
            kind = "" if isinstance(fault, ValueError | OSError) else f"{type(fault).__name__} "
            text = (
                f"{name}{' cannot be read' * (most is not None)}: {kind}{text}".strip()
                + f"; {advice}"
            )
        raise error(text) from fault


def check_values(text: str, what: str) -> None:
    """Refuse JSON that holds far more values than its size suggests, before it is parsed: parsed
    lists take up to thirty times the bytes of their text.

    Texts that people or profilers write have at most an object or list for every 16 bytes, and a
    value for every 4. Up to `FEW_VALUES` are parsed in any case.

    Parameters
    ----------
    text : str
        The text.
    what : str
        What it is in the error.

    Examples
    --------
    >>> check_values("[" + "[]," * 10**6 + "[]]", "the trace")
    Traceback (most recent call last):
    ...
    ValueError: the trace holds 2000002 lists and values in 3000004 bytes, far more than a file of this kind; write fewer
    """
    nested = text.count("[") + text.count("{")
    values = nested + text.count(",")
    is_dense = 16 * nested > len(text) or 4 * values > len(text)
    if is_dense and values > FEW_VALUES:
        raise ValueError(
            f"{what} holds {values} lists and values in {len(text)} bytes, "
            "far more than a file of this kind; write fewer"
        )
