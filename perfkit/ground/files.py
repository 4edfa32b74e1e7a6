"""Reference data that ships with perfkit, and readers of data files that name the place of every fault."""

import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

#: Largest file of JSON, TOML, CSV or a log that is read [B]: those that perfkit writes or comes with have up to 0.6 MB,
#: and what is parsed takes up to 30 times as much memory.
LARGEST_TEXT = 2**25
#: Most tables that a file may list [-], which take some 4 s and 100 MB: published sets have up to 856, more is a slip.
MOST_ROWS = 200_000


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
        Where the installation lacks it.

    Notes
    -----
    A wheel carries the data inside the package. In a checkout it is beside the package, and an editable install leads
    there: what its build copied elsewhere, if anything, grows old.

    Examples
    --------
    >>> find_reference("platforms", "h100-sxm-8.toml").name
    'h100-sxm-8.toml'
    """
    package = Path(__file__).resolve().parent.parent
    homes = [home / "reference_data" for home in (package, package.parent)]
    # Beside an installed package, a folder of that name may be somebody else's; ours has a platform gallery.
    home = next((home for home in homes if (home / "platforms").is_dir()), None)
    if home is None:
        tried = " and ".join(str(home) for home in homes)
        raise FileNotFoundError(f"reference data is missing; tried {tried}; install perfkit again")
    path = home.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"reference data has no {'/'.join(parts)}; its home is {home}; install perfkit again")
    return path


def decode(hint: Any, value: Any, place: str = "") -> Any:
    """Turn tables, lists and values of a file into what an annotation says.

    Parameters
    ----------
    hint : type
        A dataclass, mapping, tuple, union with None, or plain type.
    value : object
        What the file holds.
    place : str, optional
        Where, which errors name [-].

    Returns
    -------
    made : object
        An instance of the dataclass, a dict, a tuple or the value itself.

    Raises
    ------
    ValueError
        For keys that are missing or unknown, and values of another type, with their dotted place.

    Examples
    --------
    >>> decode(Mapping[str, tuple[float, ...]], {"sizes": [1, "2"]}, "file")
    Traceback (most recent call last):
    ...
    ValueError: file.sizes[1] is '2'; it must be a number
    """
    from perfkit.ground.units import check_type, find_hints, show  # which loads NumPy

    kind: Any = get_origin(hint) or hint
    parts, record = get_args(hint), bool(is_dataclass(kind))
    if kind is UnionType:
        return decode(parts[0], value, place)  # what is None is not in a file
    if record or kind is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{place} is {show(value)}; it must be a table")
        known = {item.name: item for item in fields(kind)} if record else {}
        hints = find_hints(kind) if record else dict.fromkeys(value, parts[-1])
        places = {key: join_place(place, key, tuple(known)) for key in value}
        entries = {key: decode(hints[key], value[key], places[key]) for key in value}
        for name, item in known.items():
            if name not in value and item.default is item.default_factory is MISSING:
                raise ValueError(f"{join_place(place, name)} is missing; it must be there")
        return kind(**entries) if record else entries
    if kind is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{place} is {show(value)}; it must be a list")
        return tuple(decode(parts[0], entry, f"{place}[{i}]") for i, entry in enumerate(value))
    whole = type(value) is int and abs(value) <= sys.float_info.max
    made = float(value) if kind is float and whole else value
    check_type(place, made, kind)
    return made


def _shown(value: Any) -> str:
    """A value of a file in one line."""
    from perfkit.ground.units import escape  # which loads NumPy

    return escape(json.dumps(value, default=str, ensure_ascii=False))


def join_place(place: str, key: str, known: Sequence[str] = ()) -> str:
    """Place of an entry in a table.

    Parameters
    ----------
    place : str
        Place of the table [-].
    key : str
        Key of the entry [-].
    known : sequence of str, optional
        Keys allowed; none allows any [-].

    Returns
    -------
    place : str
        Dotted, with quotation marks around a key that is no plain word [-].

    Raises
    ------
    ValueError
        For a key that is not among the known ones: most likely it is misspelt.
    """
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    path = f"{place}.{key if plain and len(key) < 80 else _shown(key)}".removeprefix(".")
    if known and key not in known:
        close = get_close_matches(key, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{path} is not known; known here are {', '.join(known)}{hint}")
    return path


@contextmanager
def reading(
    source: object, advice: str, *, error: type[ValueError] = ValueError, most: float | None = None, told: bool = False
) -> Iterator[None]:
    """Border around a reader: whatever goes wrong inside becomes one documented error of one line.

    Parameters
    ----------
    source : str or Path
        File that is read; or, without `most`, what errors call the source.
    advice : str
        What to do next.
    error : type, optional
        ValueError or a subclass, raised with what went wrong as its cause.
    most : float, optional
        Largest size of the file, which must be a regular one: a device never ends, a pipe may wait for ever [B].
    told : bool, optional
        Whether a ValueError or OSError that comes from inside says enough itself.

    Raises
    ------
    ValueError
        For every error, panics of compiled readers included, with control characters escaped and shortened. Errors that
        begin with the name of the source keep their words. Interrupts, warnings and missing packages pass.

    Notes
    -----
    It is a decorator as well, of functions whose source has one name.

    Examples
    --------
    >>> with reading("plan.json", "name a plan"):
    ...     {}["tables"]
    Traceback (most recent call last):
    ...
    ValueError: plan.json: KeyError 'tables'; name a plan
    """
    from perfkit.ground.units import escape, format_bytes  # which loads NumPy

    name = escape(source, 200)
    try:
        if most is not None:
            facts = os.stat(str(source))
            if not stat.S_ISREG(facts.st_mode):
                raise OSError("it is not a regular file")
            if facts.st_size > most:
                raise ValueError(f"it has {format_bytes(facts.st_size)}; at most {format_bytes(most)} are read")
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, Warning, ImportError):
        raise
    except BaseException as fault:  # panics of Rust are no Exception
        plain = isinstance(fault, ValueError) and not isinstance(fault, UnicodeError)
        said = fault.strerror or fault if isinstance(fault, OSError) else fault
        text = escape(said if plain else str(said).strip().split("\n")[0], 500)
        if told and isinstance(fault, OSError):
            raise
        if plain and (told or text.startswith((name, escape(Path(str(source)).name, 200)))):
            raise error(text) from fault
        text = text if isinstance(fault, ValueError | OSError) else f"{type(fault).__name__} {text}".strip()
        raise error(f"{name}{' cannot be read' if most is not None else ''}: {text}; {advice}") from fault


def write_text(path: str | Path, text: str) -> Path:
    """Write a file whole or not at all: an old one stays as it was until the new one is complete.

    Parameters
    ----------
    path : str or Path
        File to write.
    text : str
        Its content.

    Returns
    -------
    path : Path
        The file.

    Raises
    ------
    OSError
        Where the file cannot be written, a full disk for example; the message names it.
    ValueError
        For what is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path is {_shown(path)}; it must be the name of a file to write, a str or a Path")
    path = Path(path)
    draft = path.with_name(f".{os.urandom(8).hex()}.draft")  # a name that nobody can have taken or linked before
    try:
        with open(draft, "xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
    return path
