"""Platform files in TOML: every number with its origin, checked against limits."""

import math
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfkit.fitting import Fit
from perfkit.fitting.parameters import Key
from perfkit.ground.files import find_reference, reading
from perfkit.ground.forks import check_threads
from perfkit.ground.hardware import DTYPES, KINDS, LINKS
from perfkit.ground.results import Sections, Table
from perfkit.ground.targets import check_target, write_text
from perfkit.ground.units import check_choice, check_positive, show
from perfkit.models.kernels import list_terms
from perfkit.platform.estimates import KNOWN_FORMS

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
#: Largest time, scale or standard error of a parameter [s or -].
LARGEST = 1e6
_TINY = 5e-324  # the smallest number above 0
#: Smallest and largest value of the numbers of a fit, by name and in their unit; others go from 0
#: to `LARGEST`. No machine comes near these limits: a number outside them is damaged or mistyped.
LIMITS: Mapping[str, tuple[float, float]] = {
    "alpha": (_TINY, LARGEST),
    "beta": (_TINY, LARGEST),
    "sharpness": (0.1, 1e3),
    "contention": (0.0, 1.0),
    "l2": (0.0, 1e18),
    "l3": (0.0, 1e18),
    "pages": (1.0, math.inf),
    "l3_share": (1e-3, 1.0),
    "compute_efficiency": (1e-6, 1e3),
    "memory_efficiency": (1e-6, 1e3),
    "tile_m": (1.0, 1e6),
    "tile_n": (1.0, 1e6),
    "spread": (0.0, 10.0),
    "bias": (-10.0, 10.0),
    "spread_time": (1e-12, LARGEST),
}
#: The unit of a fitted number is one of these, or one over another.
UNITS = ("-", "1", "s", "B", "FLOP", "row", "lookup", "element", "table", "operation")
#: Units of numbers outside fits, by group or by the last word of the name.
_QUANTITIES = {
    "peak": "FLOP/s",
    "capacity": "B",
    "bandwidth": "B/s",
    "latency": "s",
    "host": "s",
    "capability": "-",
}


class PlatformError(ValueError):
    """A platform or platform file that cannot be used; the message names place and reason."""


# Every number.


#: Kinds of evidence, the strongest first.
_EVIDENCE = ("measured", "fitted", "datasheet", "assumed")


class Number(NamedTuple):
    """One number of a platform with its place and origin; see
    `perfkit.ground.hardware.Quantity`."""

    group: str
    name: str
    value: float
    unit: str
    kind: str
    stderr: float | None
    source: str
    date: str
    basis: str = ""


def list_fits(platform: Any) -> Iterator[tuple[str, str, Fit]]:
    """List every fit of a platform: ``kernel``, ``collective`` or ``context``, its name there, and
    the fit."""
    parts = {
        "kernel": platform.kernels,
        "collective": platform.collectives,
        "context": platform.context.fits(),
    }
    return ((group, key, fit) for group, fits in parts.items() for key, fit in fits.items())


def list_numbers(platform: Any) -> Iterator[Number]:
    """List peaks, memory, links, host overheads, then the parameters and the spread of every
    fit."""
    levels, links = [(x.name, x) for x in platform.device.memory], platform.network.links.items()
    parts = [
        ("memory", levels, ("capacity", "bandwidth")),
        ("link", links, ("bandwidth", "latency")),
    ]
    quantities = [("peak", dtype, peak) for dtype, peak in platform.device.peaks.items()]
    quantities += [
        (group, f"{x} {y}", getattr(part, y))
        for group, of, ends in parts
        for x, part in of
        for y in ends
    ]
    quantities += [("host", name, overhead) for name, overhead in platform.host.items()]
    quantities.append(("device", "capability", platform.device.capability))
    for group, name, q in quantities:
        if q is not None:
            yield Number(group, name, q.value, q.unit, q.kind, q.stderr, q.source, q.date, q.basis)
    for group, key, fit in list_fits(platform):
        for name, value in {**fit, "spread": fit.spread}.items():
            unit, error = fit.units.get(name, "-"), fit.stderr.get(name)
            yield Number(group, f"{key} {name}", value, unit, fit.kind, error, fit.source, fit.date)


def tabulate_numbers(platform: Any) -> Table:
    """Every number of the platform: a frame with the columns of `Number`, each value in the unit of
    its row."""
    import polars

    types = {
        name: polars.Float64 if name in ("value", "stderr") else polars.String
        for name in Number._fields
    }
    return polars.DataFrame(list(list_numbers(platform)), schema=types, orient="row")


def explain_numbers(platform: Any) -> str:
    """Every number of the platform in words, by where it comes from: measured ones first.

    Returns
    -------
    text : str
        A line for each source with its kind and date, below it a line for each of its numbers with
        its unit and, where known, its standard error. The spread of a fit, the standard deviation
        of ln(measured / predicted), is one of its numbers.
    """
    numbers = list(list_numbers(platform))
    by_source: dict[tuple[str, str, str], list[Number]] = {}
    for number in numbers:
        by_source.setdefault((number.kind, number.source, number.date), []).append(number)
    lines = [f"{platform.name}: where its {len(numbers)} numbers come from"]
    for kind, source, date in sorted(by_source, key=lambda key: (_EVIDENCE.index(key[0]), key[1:])):
        lines.append(f"{kind}, {date}: {source}")
        for number in by_source[kind, source, date]:
            error = "" if number.stderr is None else f" ± {number.stderr:.2g}"
            unit = "" if number.unit == "-" else f" {number.unit}"
            basis = f" ({number.basis})" if number.basis else ""
            lines.append(f"  {number.group} {number.name}: {number.value:.4g}{error}{unit}{basis}")
    return "\n".join(lines)


def list_sections(platform: Any) -> Sections:
    """Sections of a report: rooflines, curves of collectives, assumptions, provenance, and every
    number."""
    check_threads()
    from perfkit import plots

    peaks = {name: peak.value for name, peak in platform.device.peaks.items()}
    levels = {
        level.name: level.bandwidth.value for level in platform.device.memory if level.bandwidth
    }
    if peaks and levels:
        yield "", plots.roofline_chart([], peaks, levels, title=f"Roofs of {platform.device.name}")
    ranks, sizes = platform.network.ranks, [2.0**power for power in range(10, 31)]
    names = dict.fromkeys(key.split(".")[0] for key in platform.collectives)
    if ranks == 1:  # it exchanges nothing
        names = {}
    times = [
        (name, size, platform.collective_time(name, size, ranks=ranks))
        for name in names
        for size in sizes
    ]
    curves = [
        {"operation": name, "ranks": ranks, "nbytes": size, "time_s": float(time)}
        for name, size, time in times
    ]
    if curves:
        yield (
            "",
            plots.collective_curves(
                [], curves, title=f"Collectives on {ranks} ranks of {platform.name}"
            ),
        )
    numbers = tabulate_numbers(platform)
    yield "Assumptions", numbers.filter(kind="assumed").drop("kind")
    yield "Provenance", [("what", "value"), *platform.provenance.items()]
    yield "Numbers", numbers


def check_numbers(platform: Any) -> None:
    """Refuse a platform with numbers outside the limits, whether a file or Python code made it."""
    device, network = platform.device, platform.network
    check_choice("device.kind", device.kind, ("cpu", "cuda"))
    for name in ("ranks_per_node", "nodes", "rails", "regions"):
        check_positive(f"network.{name}", getattr(network, name), integer=True)
    if network.nodes % network.regions:
        raise ValueError(
            f"network.regions is {network.regions}; it must divide {network.nodes} nodes"
        )
    check_positive("network.starts", network.starts)
    for name in device.peaks:
        check_choice("device.peaks", name, DTYPES)
    for name in network.links:
        check_choice("network.links", name, LINKS)
    if (
        not device.memory
        or device.memory[-1].bandwidth is None
        or any(x.capacity is None for x in device.memory[:-1])
    ):
        raise ValueError(
            "device.memory has no bandwidth in its last level, or a cache without a capacity; state them"
        )
    for group, key, fit in list_fits(platform):
        _check_fit(f"{group} {key}", group, key, fit)
        _check_number(Number(group, f"{key} bias", fit.bias, "-", fit.kind, None, "", ""))
        when = LARGEST if fit.spread_time is None else fit.spread_time
        _check_number(Number(group, f"{key} spread_time", when, "s", fit.kind, None, "", ""))
    for number in list_numbers(platform):
        _check_number(number)


def _check_number(number: Number) -> None:
    """Refuse a number with a wrong unit or kind, without a source, or outside its limits."""
    name, fitted = (
        f"{number.group} {number.name}",
        number.group in ("kernel", "collective", "context"),
    )
    parameter = name.rpartition(" ")[2]
    unit = number.unit if fitted else _QUANTITIES.get(number.group) or _QUANTITIES[parameter]
    if number.unit != unit or not {*unit.split("/")} <= {*UNITS}:
        wanted = f"made of {', '.join(UNITS)}" if fitted else unit
        raise ValueError(f"{name}: unit is {show(number.unit)}; it must be {wanted}")
    if not fitted and not number.source.strip():
        raise ValueError(f"{name}: source is blank; name a document, data id or machine")
    low, high = (
        LIMITS.get(parameter, (0.0, LARGEST))
        if fitted or unit == "s"
        else (_TINY, sys.float_info.max)
    )
    check_choice(f"{name}: kind", number.kind, KINDS)
    if not low <= number.value <= high:
        wanted = "above 0" if low == _TINY else f"from {low:g} to {high:g}"
        raise ValueError(
            f"{name} is {show(number.value)}; it must be a number {wanted} [{number.unit}]"
        )
    if not 0.0 <= (number.stderr or 0.0) <= max(high, LARGEST):
        raise ValueError(
            f"{name}: stderr is {show(number.stderr)}; it must be a number of 0 or more [{number.unit}]"
        )


def _check_fit(name: str, group: str, key: str, fit: Fit) -> None:
    """Refuse a fit of an unknown form, with missing or unknown parameters, or with a range that is
    none."""
    if group == "collective":
        Key.parse(key, collective=True)
    own = {form: names for form, (owner, *names, _) in KNOWN_FORMS.items() if owner == group}
    if (kind := key.partition(".")[0]) not in ("gemm", "bmm"):
        own.pop("tiled", None)  # other classes have no tiles
    needed, others = (
        names.split() for names in own[check_choice(f"form of the {group}", fit.form, own)]
    )
    # terms whose sizes its class has
    others = (fit.form == "additive" and list_terms(kind)) or others
    missing, unknown = {*needed} - {*fit}, {*fit} - {*needed, *others}
    for parameter in sorted(missing | unknown | {*fit.units, *fit.stderr} - {*fit}):
        fault = "missing" if parameter in needed else "not a parameter of this fit"
        raise ValueError(
            f"{name}: {parameter} is {fault}; {fit.form} takes {', '.join((*needed, *others))}"
        )
    for variable, ends in fit.ranges.items():
        if len(ends) != 2 or not -math.inf <= ends[0] <= ends[1]:
            raise ValueError(
                f"{name}: range of {show(variable)} is {show(ends)}; it must be a lower and an upper end"
            )


# Files.


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
        try:
            return gallery[check_choice("platform", platform, gallery)]
        except ValueError as error:
            raise PlatformError(
                f"{error}; files end in .toml, datasheets are named as rtx-4090 is"
            ) from None
    with reading(
        platform, f"gallery: {', '.join(gallery)}", error=PlatformError, most=LARGEST_FILE
    ):
        return Path(platform)


def encode(value: Any) -> Any:
    """Turn a dataclass, mapping or sequence into plain tables, lists and numbers for TOML, without
    empty fields."""
    if is_dataclass(value):
        needed = {
            item.name for item in fields(value) if item.default is item.default_factory is MISSING
        }
        entries = {item.name: encode(getattr(value, item.name)) for item in fields(value)}
        usual = (("starts", 1), ("regions", 1))
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
        nested = (
            value.values()
            if isinstance(value, Mapping)
            else value
            if isinstance(value, list)
            else ()
        )
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


def write(platform: Any) -> str:
    """Write a platform as TOML, losslessly; `PlatformError` for fits without a source or units."""
    plain = encode(platform)
    with reading(f"platform {show(platform.name)}", "complete it first", error=PlatformError):
        check_origins(plain)
    return format_toml({"format": FORMAT, **plain}) + "\n"


def save(platform: Any, path: str | Path) -> Path:
    """Write a platform to a file, completely or not at all; an existing file is replaced.

    Raises
    ------
    PlatformError
        For a platform that could not be read back.
    OSError
        Where the file cannot be written.
    """
    return write_text(check_target("path", path, ".toml"), write(platform))


def parse(text: str) -> dict[str, Any]:
    """Read the tables of a platform file."""
    deep = _DOTTED.search(text)
    if deep is not None:
        raise ValueError(
            f"a key begins with {show(deep[0], 40)}; a key of a platform file has a few dots at most"
        )
    data = tomllib.loads(text)
    version = data.pop("format", None)
    if type(version) is not int or version != FORMAT:
        found = "missing" if version is None else show(version)
        raise ValueError(
            f"format is {found}; this perfkit reads format {FORMAT}; fit the measurements again"
        )
    return data


def _list_tables(data: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """List the fits among plain tables, with their place."""
    if isinstance(data, dict):
        if isinstance(data.get("parameters"), dict):
            yield place, data
        for key, value in data.items():
            yield from _list_tables(value, f"{place}.{key}".removeprefix("."))


def check_origins(data: Mapping[str, Any]) -> None:
    """Check that every fit in a file has a kind, a source, and a unit for each parameter."""
    for place, fit in _list_tables(data):
        needed = {
            "kind": fit,
            "source": fit,
            **{f"units.{name}": fit.get("units", ()) for name in fit["parameters"]},
        }
        for name in (
            name for name, table in needed.items() if name.rpartition(".")[2] not in table
        ):
            raise ValueError(f"{place}.{name} is missing; it must be there")
