"""Reference data that ships with perfkit, and readers of data files that name the place of every fault."""

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "LARGEST_TEXT",
    "MOST_ROWS",
    "Reader",
    "expect",
    "expect_each",
    "expect_list",
    "expect_number",
    "expect_record",
    "expect_text",
    "expect_whole",
    "find_reference",
    "join_place",
    "reading",
    "write_text",
]

#: ``reader(value, place)`` turns a value of a file into what it stands for, or raises ValueError with its dotted place.
Reader: TypeAlias = Callable[[Any, str], Any]

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
    A wheel carries the data inside the package. In a checkout it lies beside the package, and an editable install leads
    there: what its build copied elsewhere, if anything, grows old.

    Examples
    --------
    >>> find_reference("platforms", "h100-sxm-8.toml").name
    'h100-sxm-8.toml'
    """
    package = Path(__file__).resolve().parent
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


def expect(rule: str, accept: Callable[[Any], bool], convert: Callable[[Any], Any] = lambda value: value) -> Reader:
    """Make a reader of single values.

    Parameters
    ----------
    rule : str
        What the value must be, in words.
    accept : callable
        Whether a value keeps the rule.
    convert : callable, optional
        What an accepted value becomes.

    Returns
    -------
    reader : callable
        ``reader(value, place)`` gives the value, or raises ValueError naming place, value and rule.

    Examples
    --------
    >>> expect("a list", lambda value: isinstance(value, list))("fast", "device.peaks")
    Traceback (most recent call last):
    ...
    ValueError: device.peaks is "fast"; it must be a list
    """

    def read(value: Any, place: str) -> Any:
        if value is MISSING or not accept(value):
            raise ValueError(f"{place} is {'missing' if value is MISSING else _shown(value)}; it must be {rule}")
        return convert(value)

    return read


def expect_text(*choices: str) -> Reader:
    """Make a reader of text.

    Parameters
    ----------
    *choices : str
        Words allowed; none allows any text.

    Returns
    -------
    reader : callable
        See `expect`.
    """
    rule = f"one of {', '.join(choices)}" if choices else "text"
    return expect(rule, lambda value: isinstance(value, str) and (not choices or value in choices))


def expect_number(unit: str = "", *, low: float = -math.inf, above: bool = False) -> Reader:
    """Make a reader of finite numbers.

    Parameters
    ----------
    unit : str, optional
        Unit that messages show.
    low : float, optional
        Smallest value [unit].
    above : bool, optional
        Whether the value must be larger than `low`.

    Returns
    -------
    reader : callable
        Gives a float, see `expect`.
    """

    def accept(value: Any) -> bool:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        return plain and abs(value) <= sys.float_info.max and (value > low if above else value >= low)

    kind = "finite number" if low == -math.inf else f"number {'above' if above else 'of at least'} {low:g}"
    return expect(f"a {kind} [{unit}]" if unit else f"a {kind}", accept, float)


def expect_whole(low: int = 0) -> Reader:
    """Make a reader of whole numbers.

    Parameters
    ----------
    low : int, optional
        Smallest value [-].

    Returns
    -------
    reader : callable
        Gives an int, see `expect`.
    """
    return expect(f"a whole number of at least {low}", lambda value: type(value) is int and low <= value < 2**63)


def expect_each(reader: Reader, *keys: str) -> Reader:
    """Make a reader of tables whose entries are alike.

    Parameters
    ----------
    reader : callable
        Reads each entry.
    *keys : str
        Keys allowed; none allows any.

    Returns
    -------
    reader : callable
        Gives a dict, see `expect`.
    """
    whole = expect("a table", lambda value: isinstance(value, dict))

    def read(value: Any, place: str) -> dict[str, Any]:
        return {key: reader(entry, join_place(place, key, keys)) for key, entry in whole(value, place).items()}

    return read


def expect_list(reader: Reader) -> Reader:
    """Make a reader of lists whose entries are alike.

    Parameters
    ----------
    reader : callable
        Reads each entry.

    Returns
    -------
    reader : callable
        Gives a tuple, see `expect`.
    """
    whole = expect("a list", lambda value: isinstance(value, list))
    return lambda value, place: tuple(reader(entry, f"{place}[{i}]") for i, entry in enumerate(whole(value, place)))


def expect_record(make: type[Any], needed: Sequence[str] = (), /, **readers: Reader) -> Reader:
    """Make a reader of tables that become a dataclass.

    Parameters
    ----------
    make : class
        A dataclass; fields that have a default may be missing from the file.
    needed : sequence of str, optional
        Fields that may not, although they have a default.
    **readers : callable
        Reader of each field.

    Returns
    -------
    reader : callable
        Gives an instance, see `expect`.
    """
    whole = expect("a table", lambda value: isinstance(value, dict))
    must = {*needed, *(item.name for item in fields(make) if item.default is item.default_factory is MISSING)}

    def read(value: Any, place: str) -> Any:
        entries = {join_place(place, key, tuple(readers)): entry for key, entry in whole(value, place).items()}
        places = {key: join_place(place, key) for key in readers}
        return make(
            **{
                key: reader(entries.get(places[key], MISSING), places[key])
                for key, reader in readers.items()
                if key in must or places[key] in entries
            }
        )

    return read


def _shown(value: Any) -> str:
    """A value of a file in one line."""
    from perfkit.units import escape  # which loads NumPy

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
    from perfkit.units import escape, format_bytes  # which loads NumPy

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
