"""Platform files in TOML: every number with its origin."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.fitting import Fit
from perfkit.ground.files import find_reference, reading
from perfkit.ground.targets import check_target, write_text
from perfkit.ground.units import check_choice, show
from perfkit.platform.datasheets import list_datasheets
from perfkit.platform.machine import Machine, PlatformError

#: Version of the file format.
FORMAT = 2
EXAMPLE = "reference_data/platforms/h100-sxm-8.toml"
#: Largest platform file that is read [B]: those of the gallery have up to 0.13 MB, and TOML is read
#: at 2 MB/s.
LARGEST_FILE = 2**20
#: Keys of TOML with more than 30 dots; each dot makes a table in a table, and reading them takes long.
_DOTTED = re.compile(
    r"""(?<![A-Za-z0-9_-])(?:(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){31}"""
)


@cache
def list_gallery() -> dict[str, Path]:
    """Files of the platforms that ship with perfkit, by name."""
    return {path.stem: path for path in sorted(find_reference("platforms").glob("*.toml"))}


def find_file(platform: str | Path) -> Path:
    """Find the file of a platform by gallery name or path; `PlatformError` for one that does not
    exist."""
    gallery = list_gallery()
    if not isinstance(platform, Path) and not (
        isinstance(platform, str) and re.search(r"[/\\]|\.toml$", platform)
    ):
        if isinstance(platform, str) and platform in gallery:
            return gallery[platform]
        advice = "files end in .toml, datasheets may have a number of ranks, as rtx-4090-1"
        try:
            check_choice("platform", platform, (*gallery, *list_datasheets()))
        except ValueError as error:
            raise PlatformError(f"{error}; {advice}") from None
        raise PlatformError(f"platform {platform} is a datasheet, which has no file; {advice}")
    with reading(
        platform, f"gallery: {', '.join(gallery)}", error=PlatformError, most=LARGEST_FILE
    ):
        return Path(platform)


def encode(value: Any) -> Any:
    """Turn a dataclass, mapping or sequence into plain tables, lists and numbers for TOML, without
    empty fields."""
    if isinstance(value, Fit):
        return encode_fit(value)
    if is_dataclass(value):
        needed = {
            item.name for item in fields(value) if item.default is item.default_factory is MISSING
        }
        # what does not count for equality, such as where a platform was read from, is in no file
        kept = [item.name for item in fields(value) if item.compare]
        entries = {name: encode(getattr(value, name)) for name in kept}
        usual = (("starts", 1), ("regions", 1), ("sharers", 1))
        empty = {
            k
            for k, v in entries.items()
            if v is False or v in (None, "", [], {}) or (k, v) in usual
        }
        return {k: v for k, v in entries.items() if k in needed or k not in empty}
    if isinstance(value, Mapping):
        return {str(key): encode(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [encode(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


def encode_fit(fit: Fit) -> dict[str, Any]:
    """Turn a fitted model into a plain table, as `perfkit.platform.schema.FitTable` has it."""
    table = {
        "form": fit.form,
        "parameters": dict(fit),
        "stderr": fit.stderr,
        "spread": fit.spread,
        "bias": fit.bias,
        "ranges": fit.ranges,
        "n": fit.n,
        "kind": fit.kind,
        "source": fit.source,
        "date": fit.date,
        "notes": fit.notes,
        "units": fit.units,
        "at_bounds": fit.at_bounds,
        "spread_time": fit.spread_time,
        "dtypes": fit.dtypes,
        "stands_for": fit.stands_for,
        "transferred": fit.transferred,
        "quality": fit.quality,
        "sources": fit.sources,
    }
    empty: tuple[Any, ...] = (None, "", [], {})
    entries = {name: encode(value) for name, value in table.items()}
    return {name: value for name, value in entries.items() if value not in empty}


def format_toml(data: Mapping[str, Any], place: tuple[str, ...] = ()) -> str:
    """Write plain tables as TOML, one line per number or group of parameters.

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
        nested: Iterable[Any] = ()
        if isinstance(value, Mapping):
            nested = value.values()
        elif isinstance(value, list):
            nested = value
        deep = any(isinstance(entry, Mapping) for entry in nested)
        if isinstance(value, list) and deep:
            name = ".".join(map(_toml_key, below))
            tables += [
                f"[[{name}]]\n" + format_toml(entry, below).partition("\n")[2] for entry in value
            ]
        elif isinstance(value, Mapping) and (not place or "form" in value or deep):
            tables.append(format_toml(value, below))
        else:
            plain.append(f"{_toml_key(key)} = {_toml_value(value)}")
    head = [f"[{'.'.join(map(_toml_key, place))}]"] if place and plain else []
    return "\n\n".join(part for part in ("\n".join(head + plain), *tables) if part)


@cache
def _toml_key(key: str) -> str:
    import tomli_w

    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _toml_value(value: Any) -> str:
    """Write one value on one line, tables and lists included."""
    import tomli_w

    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_toml_key(key)} = {_toml_value(entry)}' for key, entry in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float) and 1e6 <= abs(value) < math.inf:
        return np.format_float_scientific(value, trim="-", exp_digits=1).replace("+", "")
    if type(value) in (int, float):
        return str(value)
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def write(machine: Machine) -> str:
    """Write a platform as TOML, losslessly; `PlatformError` for fits without a source or units."""
    from perfkit.ground.schemas import convert  # msgspec takes time to import
    from perfkit.platform.schema import PlatformFile, check_units

    data = {"format": FORMAT, **encode(machine)}
    with reading(f"platform {show(machine.name)}", "complete it first", error=PlatformError):
        check_units(convert(data, PlatformFile))
    return format_toml(data) + "\n"


def save(machine: Machine, path: str | Path) -> Path:
    """Write a platform to a file, completely or not at all; an existing file is replaced.

    Raises
    ------
    PlatformError
        For a platform that could not be read back.
    OSError
        Where the file cannot be written.
    """
    return write_text(check_target("path", path, ".toml"), write(machine))


def parse(text: str) -> dict[str, Any]:
    """Read the TOML of a platform file in the format of today."""
    for line in text.split("\n"):  # a key is on one line
        deep = _DOTTED.search(line) if line.count(".") > 30 else None
        if deep is not None:
            raise ValueError(
                f"a key begins with {show(deep[0], 40)}; a key of a platform file has a few dots at most"
            )
    data = tomllib.loads(text)
    version = data.get("format")
    if type(version) is not int or version != FORMAT:
        found = "missing" if version is None else show(version)
        raise ValueError(
            f"format is {found}; this perfkit reads format {FORMAT}; fit the measurements again"
        )
    return data
