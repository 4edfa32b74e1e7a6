"""Platform files: TOML that keeps every number, with the place of every fault; format 1 is still read."""

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfkit.ground.files import find_reference, reading, write_text
from perfkit.ground.hardware import DTYPES
from perfkit.ground.units import check_choice, show

#: Version of the file format that this perfkit writes; it reads format 1 too.
FORMAT = 2
EXAMPLE = "reference_data/platforms/h100-sxm-8.toml"
#: Largest platform file that is read [B]: those of the gallery have up to 0.13 MB, and TOML is read at 2 MB/s.
LARGEST_FILE = 2**20
#: A key of many parts, for which Python's reader of TOML takes the square of their number.
_DEEP = re.compile(r"""(?<![\w"'.-])(?:["'\w-]++\s*+\.\s*+){20}""")
_OLD = "what collectives cost more in iterations was fitted as perfkit 0.1 did; fit the measurements again"
_TRANSFERRED = "transferred from "  # how a note of format 1 begins


class PlatformError(ValueError):
    """A platform file that cannot be used, with the place and the reason."""


def list_gallery() -> dict[str, Path]:
    """Files of the platforms that ship with perfkit, by name."""
    return {path.stem: path for path in sorted(find_reference("platforms").glob("*.toml"))}


def find_file(platform: str | Path) -> Path:
    """Find the file of a platform by gallery name or path; `PlatformError` for one that does not exist."""
    gallery = list_gallery()
    named = not isinstance(platform, str) or not (platform.endswith(".toml") or os.sep in platform)
    if named and not isinstance(platform, Path):
        try:
            return gallery[check_choice("platform", platform, gallery)]
        except ValueError as error:
            raise PlatformError(f"{error}; a file needs its .toml ending") from None
    with reading(platform, f"gallery: {', '.join(gallery)}", error=PlatformError, most=LARGEST_FILE):
        return Path(platform)


def encode(value: Any) -> Any:
    """Plain tables, lists and numbers for TOML of a dataclass, mapping or sequence, without what is empty."""
    if is_dataclass(value):
        entries = [(item, encode(getattr(value, item.name))) for item in fields(value)]
        empty: tuple[Any, ...] = (None, "", [], {})
        return {
            item.name: entry
            for item, entry in entries
            if item.default is item.default_factory is MISSING or (entry is not False and entry not in empty)
        }
    if isinstance(value, Mapping):
        return {str(key): encode(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [encode(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value


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
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            name = ".".join(map(_toml_key, below))
            tables += [f"[[{name}]]\n" + format_toml(entry, below).partition("\n")[2] for entry in value]
        elif isinstance(value, Mapping) and (
            not place or "form" in value or any(isinstance(entry, Mapping) for entry in value.values())
        ):
            tables.append(format_toml(value, below))
        else:
            plain.append(f"{_toml_key(key)} = {_toml_value(value)}")
    head = [f"[{'.'.join(map(_toml_key, place))}]"] if place and plain else []
    return "\n\n".join(part for part in ("\n".join(head + plain), *tables) if part)


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
    if isinstance(value, float) and 1e6 <= abs(value) < math.inf:
        digits, _, exponent = f"{value:.15e}".partition("e")
        short = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
        return short if float(short) == value else repr(value)
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def write(platform: Any) -> str:
    """Write a platform as TOML, losslessly.

    Raises
    ------
    PlatformError
        For fits without a source or units, which could not be read again.
    """
    plain = encode(platform)
    with reading(f"platform {show(platform.name)}", "complete it first", error=PlatformError):
        check_origins(plain)
    return format_toml({"format": FORMAT, **plain}) + "\n"


def save(platform: Any, path: str | Path) -> Path:
    """Write a platform to a file, whole or not at all; an existing one is replaced.

    Raises
    ------
    PlatformError
        For a platform that could not be read back.
    OSError
        Where the file cannot be written.
    """
    return write_text(path, write(platform))


def parse(text: str) -> dict[str, Any]:
    """Tables of a platform file of a known format, as those of format 2."""
    if _DEEP.search(text):
        raise ValueError("a key has 20 parts or more")
    data = tomllib.loads(text)
    version = data.pop("format", None)
    if type(version) is not int or version not in (1, FORMAT):
        found = "missing" if version is None else show(version)
        raise ValueError(f"format is {found}; this perfkit reads formats 1 and {FORMAT}")
    return _convert(data) if version == 1 else data


def _list_tables(data: Any, place: str = "") -> Any:
    """Fits among plain tables, by their place."""
    if isinstance(data, dict):
        if isinstance(data.get("parameters"), dict):
            yield place, data
        for key, value in data.items():
            yield from _list_tables(value, f"{place}.{key}".removeprefix("."))


def check_origins(data: Mapping[str, Any]) -> None:
    """Fits in files say what they rest on, and the unit of every parameter."""
    for place, fit in _list_tables(data):
        for name in ("kind", "source"):
            if name not in fit:
                raise ValueError(f"{place}.{name} is missing; it must be there")
        for name in fit["parameters"]:
            if name not in fit.get("units", ()):
                raise ValueError(f"{place}.units.{name} is missing; it must be a unit, such as s or s/B")


def _convert(data: dict[str, Any]) -> dict[str, Any]:
    """Turn tables of format 1 into those of format 2: what texts and dotted keys said becomes fields."""
    for place, fit in _list_tables(data):
        notes, source = fit.pop("notes", []), fit.get("source", "")
        fit["transferred"] = [note.removeprefix(_TRANSFERRED) for note in notes if note.startswith(_TRANSFERRED)]
        fit["notes"] = [note for note in notes if not note.startswith(_TRANSFERRED)]
        fit["quality"] = "poor" if any(note.startswith("poor fit") for note in notes) else ""
        fit["sources"] = [part for part in source.split(", ") if part.endswith((".log", ".out", ".txt"))]
        if place.startswith(("kernels.gemm", "kernels.bmm", "kernels.attention", "collectives.")):
            fit["dtypes"] = [name for name in DTYPES if re.search(rf"\b(nv)?{name}\b", source)]
    old, context = data.pop("context", {}), {}
    for key, fit in old.items():
        first, *rest = key.split(".")
        if first == "collective":
            data.setdefault("provenance", {})["collectives"] = _OLD
            continue
        if first == "iteration":
            part = "parallel" if "parallel" in rest else "iterations"
            name = next((word for word in rest if word != "parallel"), "any")
        else:
            part = {"pace": "paces"}.get(first, "kernels")
            name = key if part == "kernels" else ".".join(rest) or "any"
        if key in ("overlap", "caches"):
            context[key] = fit
        else:
            context.setdefault(part, {})[name] = fit
    return {**data, "context": context}
