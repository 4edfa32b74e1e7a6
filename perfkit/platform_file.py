"""Platform files: what TOML may hold, checked entry by entry, every fault named with its place."""

import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Self

import numpy as np

from perfkit.communication import split_key
from perfkit.estimates import COLLECTIVE_FORMS, CONTEXT_FORMS, FORMS, LARGEST, LIMITS
from perfkit.fitting import Fit
from perfkit.hardware import KINDS, Quantity, expect_device, expect_network, expect_quantity
from perfkit.models import collectives as forms
from perfkit.models.kernels import TERMS
from perfkit.resources import (
    Reader,
    expect,
    expect_each,
    expect_list,
    expect_number,
    expect_record,
    expect_text,
    expect_whole,
    find_reference,
    join_place,
    reading,
    write_text,
)
from perfkit.units import Values, check_choice, show

__all__ = [
    "EXAMPLE",
    "FORMAT",
    "UNITS",
    "PlatformError",
    "Stored",
    "check_numbers",
    "encode",
    "expect_platform",
    "find_file",
    "format_toml",
]

#: Version of the file format that this perfkit reads and writes.
FORMAT = 1
#: A unit is one of these, or one over another.
UNITS = ("-", "1", "s", "B", "FLOP", "row", "lookup", "element", "table", "operation")
_TINY = 5e-324  # what is not below it is above 0
_FORMS = {"kernels": FORMS, "collectives": COLLECTIVE_FORMS, "context": CONTEXT_FORMS}
EXAMPLE = "reference_data/platforms/h100-sxm-8.toml"
#: Largest platform file that is read [B]: those of the gallery have up to 0.13 MB, and TOML is read at 2 MB/s.
_LARGEST_FILE = 2**20
#: A key of many parts, for which Python's reader of TOML takes the square of their number.
_DEEP = re.compile(r"""(?<![\w"'.-])(?:["'\w-]++\s*+\.\s*+){20}""")


class PlatformError(ValueError):
    """A platform file that cannot be used, with the place and the reason."""


def find_file(platform: str | Path) -> Path:
    """Find the file of a platform by gallery name or path.

    Parameters
    ----------
    platform : str or Path
        Name of a platform that ships with perfkit, or path of a TOML file [-].

    Returns
    -------
    path : Path
        An existing file.

    Raises
    ------
    PlatformError
        For a name or file that does not exist.
    """
    gallery = {path.stem: path for path in sorted(find_reference("platforms").glob("*.toml"))}
    named = not isinstance(platform, str) or not (platform.endswith(".toml") or os.sep in platform)
    if named and not isinstance(platform, Path):
        try:
            return gallery[check_choice("platform", platform, gallery)]
        except ValueError as error:
            raise PlatformError(f"{error}; a file needs its .toml ending") from None
    with reading(platform, f"gallery: {', '.join(gallery)}", error=PlatformError, most=_LARGEST_FILE):
        return Path(platform)


def encode(value: Any) -> Any:
    """Plain tables, lists and numbers for TOML, without what is empty.

    Parameters
    ----------
    value : object
        A dataclass, mapping, sequence, number or text.

    Returns
    -------
    plain : object
        What TOML can hold.
    """
    if is_dataclass(value):
        entries = {item.name: encode(getattr(value, item.name)) for item in fields(value)}
        return {
            name: entry for name, entry in entries.items() if entry is not False and entry not in (None, "", [], {})
        }
    if isinstance(value, Mapping):
        return {str(key): encode(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [encode(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def format_toml(data: Mapping[str, Any], place: tuple[str, ...] = ()) -> str:
    """Write plain tables as TOML, one line per number or group of parameters.

    Parameters
    ----------
    data : mapping
        Tables, lists, numbers and text.
    place : tuple of str, optional
        Keys of the tables around `data` [-].

    Returns
    -------
    text : str
        TOML that reads back as `data` [-].

    Examples
    --------
    >>> print(format_toml({"kernels": {"gemm": {"n": 3, "parameters": {"launch": 1e-6, "sharpness": 2.0}}}}))
    [kernels.gemm]
    n = 3
    parameters = { launch = 1e-06, sharpness = 2.0 }
    """
    plain, tables = [], []
    for key, value in data.items():
        below = (*place, key)
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            name = ".".join(map(_toml_key, below))
            tables += [f"[[{name}]]\n" + format_toml(entry, below).partition("\n")[2] for entry in value]
        elif isinstance(value, Mapping) and (not place or "form" in value or _holds_tables(value)):
            tables.append(format_toml(value, below))
        else:
            plain.append(f"{_toml_key(key)} = {_toml_value(value)}")
    head = [f"[{'.'.join(map(_toml_key, place))}]"] if place and plain else []
    return "\n\n".join(part for part in ("\n".join(head + plain), *tables) if part)


def _holds_tables(table: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in table.values())


def _toml_key(key: str) -> str:
    import tomli_w

    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _toml_value(value: Any) -> str:
    """One value on one line, tables and lists included."""
    import tomli_w

    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_toml_key(key)} = {_toml_value(entry)}' for key, entry in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(entry) for entry in value)}]"
    if isinstance(value, float) and abs(value) >= 1e6:
        digits, _, exponent = f"{value:.15e}".partition("e")
        short = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
        return short if float(short) == value else repr(value)
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def _expect_fit(known: Mapping[str, Callable[..., Values]]) -> Reader:
    """Make a reader of fits; where their forms are known, the parameters must be those that the form takes."""
    number, share, text = expect_number(), expect_number("-", low=0.0), expect_text()
    unit = expect(
        f"a base unit ({', '.join(UNITS)}) or one over another",
        lambda value: isinstance(value, str) and value.count("/") < 2 and set(value.split("/")) <= set(UNITS),
    )
    read_fit = expect_record(
        Fit,
        ("kind", "source", "units"),
        form=expect_text(*known),
        parameters=expect_each(number),
        stderr=expect_each(share),
        spread=share,
        spread_time=expect_number("s", low=0.0, above=True),
        bias=number,
        ranges=expect_each(expect_list(number)),
        n=expect_whole(),
        kind=expect_text(*KINDS),
        source=text,
        date=text,
        notes=expect_list(text),
        units=expect_each(unit),
        at_bounds=expect_list(text),
    )

    def read(value: Any, place: str) -> Fit:
        fit = read_fit(value, place)
        names, needed = set(fit), set(fit)
        if known:
            takes = signature(known[fit.form]).parameters.values()
            keywords = [p for p in takes if p.kind is p.KEYWORD_ONLY]
            needed = {p.name for p in keywords if p.default is p.empty}
            names = set(TERMS) if fit.form == "additive" else {p.name for p in keywords}
        for part, wanted, allowed in (
            ("parameters", needed, names),
            ("units", set(fit), set(fit)),
            ("stderr", set(), set(fit)),
        ):
            found = set(getattr(fit, part))
            for name in sorted((wanted - found) | (found - allowed)):
                fault = "missing" if name in wanted else "not a parameter of this fit"
                raise ValueError(f"{place}.{part}.{name} is {fault}; {fit.form} takes {', '.join(sorted(names))}")
        return fit

    return read


def check_numbers(platform: Any) -> None:
    """Refuse a platform with numbers that no machine has, whether a file or Python code made it.

    Parameters
    ----------
    platform : Platform
        The platform.

    Raises
    ------
    ValueError
        With the place of a quantity or of a part of a fit, its value, and the range that it must be in.
    """
    for place, number, unit, low, high in _list_numbers(platform, ""):
        if not low <= number <= high:
            wanted = "above 0" if low == _TINY else f"from {low:g} to {high:g}"
            raise ValueError(f"{place} is {json.dumps(number, default=float)}; it must be a number {wanted} [{unit}]")


def _list_numbers(value: Any, place: str) -> Iterator[tuple[str, float, str, float, float]]:
    """Place, number, unit, smallest and largest value of all quantities and fits in a part of a platform."""
    if isinstance(value, Quantity):
        low, high = (0.0, LARGEST) if value.unit == "s" else (_TINY, float(np.finfo(float).max))
        yield f"{place}.value", value.value, value.unit, low, high
        yield f"{place}.stderr", value.stderr or 0.0, value.unit, 0.0, high
    elif isinstance(value, Fit):
        expect_text(*_FORMS[place.partition(".")[0]])(value.form, f"{place}.form")
        # A time or rate of zero would divide by zero in these; a launch may cost nothing.
        divides = set(value) - {"launch"} if value.form in ("pipelined", "roofline", "tiled") else ()
        numbers = {f"parameters.{name}": number for name, number in value.items()}
        numbers |= {f"stderr.{name}": error for name, error in value.stderr.items()}
        for name, number in (numbers | {"spread": value.spread, "bias": value.bias}).items():
            part, _, parameter = name.rpartition(".")
            low, high = LIMITS.get(name.removeprefix("parameters."), (0.0, LARGEST))
            low = low or _TINY * (part == "parameters" and parameter in divides)
            yield f"{place}.{name}", number, value.units.get(parameter, "-"), low, high
        for name, ends in value.ranges.items():
            if len(ends) != 2 or not -math.inf <= ends[0] <= ends[1]:
                raise ValueError(f"{place}.ranges.{name} is {show(ends)}; it must be two numbers, the lower one first")
    else:
        parts = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else value
        parts = dict(enumerate(parts)) if isinstance(parts, tuple | list) else parts
        for key, entry in parts.items() if isinstance(parts, Mapping) else ():
            yield from _list_numbers(entry, f"{place}[{key}]" if isinstance(key, int) else join_place(place, key))


def expect_platform(record: type) -> Reader:
    """Make a reader of whole platforms.

    Parameters
    ----------
    record : type
        The class to fill, with the fields of a platform.

    Returns
    -------
    reader : callable
        Gives a platform, see `perfkit.resources.expect`.
    """
    read_collectives = expect_each(_expect_fit({name: getattr(forms, name) for name in COLLECTIVE_FORMS}))

    def collectives(value: Any, place: str) -> dict[str, Fit]:
        for key in value if isinstance(value, dict) else ():
            try:
                split_key(key)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
        return read_collectives(value, place)

    text = expect_text()
    return expect_record(
        record,
        name=text,
        device=expect_device(),
        network=expect_network(),
        kernels=expect_each(_expect_fit(FORMS)),
        collectives=collectives,
        host=expect_each(expect_quantity("s", zero=True)),
        context=expect_each(_expect_fit(CONTEXT_FORMS)),
        provenance=expect_each(text),
    )


class Stored:
    """What makes a platform a file and a file a platform."""

    def to_toml(self) -> str:
        """Write the platform as TOML, losslessly.

        Returns
        -------
        text : str
            The file's content [-].

        Raises
        ------
        PlatformError
            For a platform that `from_toml` would refuse.
        """
        plain = encode(self)
        text = format_toml({"format": FORMAT, **plain}) + "\n"
        type(self).from_toml(text, origin=f"platform {plain.get('name', '')!r}")
        return text

    @classmethod
    def from_toml(cls, text: str, *, origin: str = "platform file") -> Self:
        """Read a platform from TOML.

        Parameters
        ----------
        text : str
            The file's content [-].
        origin : str, optional
            What errors call the file [-].

        Returns
        -------
        platform : Platform
            The platform [-].

        Raises
        ------
        PlatformError
            With the place and the reason, for anything that is not a platform of this `FORMAT`.
        """
        with reading(origin, f"compare with {EXAMPLE}", error=PlatformError):
            if _DEEP.search(text):
                raise ValueError("a key has 20 parts or more")
            data = tomllib.loads(text)
            version = data.pop("format", None)
            if type(version) is not int or version != FORMAT:
                found = "missing" if version is None else json.dumps(version, default=str)
                raise ValueError(f"format is {found}; this perfkit reads format {FORMAT}")
            return expect_platform(cls)(data, "")

    def save(self, path: str | Path) -> Path:
        """Write the platform to a file, whole or not at all.

        Parameters
        ----------
        path : str or Path
            File to write; an existing one is replaced [-].

        Returns
        -------
        path : Path
            The file [-].

        Raises
        ------
        PlatformError
            For a platform that could not be read back.
        OSError
            Where the file cannot be written.
        """
        return write_text(path, self.to_toml())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a platform file.

        Parameters
        ----------
        path : str or Path
            The file [-].

        Returns
        -------
        platform : Platform
            The platform [-].

        Raises
        ------
        PlatformError
            For a file that is missing, unreadable or not a platform.
        """
        with reading(path, "pass a platform file or a gallery name", error=PlatformError, most=_LARGEST_FILE):
            return cls.from_toml(Path(path).read_bytes().decode("utf-8-sig"), origin=str(path))
