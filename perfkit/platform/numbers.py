"""Every number of a platform: its place, its origin, and its limits."""

import html
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perfkit.fitting import Fit
from perfkit.fitting.parameters import Key
from perfkit.ground.hardware import DTYPES, KINDS
from perfkit.ground.units import check_choice, check_positive, show, significant
from perfkit.models import collectives as forms
from perfkit.models.drift import at_usual_pace
from perfkit.models.kernels import TERMS, in_context
from perfkit.platform.estimates import COLLECTIVE_FORMS, FORMS

if TYPE_CHECKING:
    import polars

#: Largest time, scale or standard error of a parameter [s or -].
LARGEST = 1e6
#: Smallest and largest value that a number of a fit may have, by its name, each in its unit; others go from 0 to
#: `LARGEST`. They are far wider than what any machine has: outside them a file is damaged or mistyped.
LIMITS: dict[str, tuple[float, float]] = {
    "sharpness": (0.1, 1e3), "contention": (0.0, 1.0), "l2": (0.0, 1e18), "l3": (0.0, 1e18), "pages": (1.0, math.inf),
    "l3_share": (1e-3, 1.0),
    "compute_efficiency": (1e-6, 1e3), "memory_efficiency": (1e-6, 1e3), "tile_m": (1.0, 1e6), "tile_n": (1.0, 1e6),
    "spread": (0.0, 10.0), "bias": (-10.0, 10.0),
}  # fmt: skip
#: A unit is one of these, or one over another.
UNITS = ("-", "1", "s", "B", "FLOP", "row", "lookup", "element", "table", "operation")
#: Units of numbers outside fits, by the end of their group or name.
_QUANTITIES = {"peak": "FLOP/s", "capacity": "B", "bandwidth": "B/s", "latency": "s", "host": "s"}
_TINY = 5e-324  # what is not below it is above 0
#: Parameters that the fits of a context take, by form, those that they need first.
_CONTEXT = {
    "iteration": (("scale",), ("per_operation", "per_collective", "per_resume")),
    "overlap": (("contention",), ()),
    "caches": (("l2", "l3"), ("pages", "l3_share")),
}


class Number(NamedTuple):
    """One number of a platform, where it belongs and what it rests on; see `perfkit.ground.hardware.Quantity`."""

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
    """List every fit of a platform: ``kernel``, ``collective`` or ``context``, its name there, and the fit."""
    parts = {"kernel": platform.kernels, "collective": platform.collectives, "context": platform.context.fits()}
    return ((group, key, fit) for group, fits in parts.items() for key, fit in fits.items())


def list_numbers(platform: Any) -> Iterator[Number]:
    """List peaks, memory, links, host overheads, then the parameters and the spread of every fit."""
    quantities = [("peak", dtype, peak) for dtype, peak in platform.device.peaks.items()]
    levels, links = platform.device.memory, platform.network.links.items()
    quantities += [
        ("memory", f"{x.name} {name}", getattr(x, name)) for x in levels for name in ("capacity", "bandwidth")
    ]
    quantities += [("link", f"{name} {x}", getattr(link, x)) for name, link in links for x in ("bandwidth", "latency")]
    quantities += [("host", name, overhead) for name, overhead in platform.host.items()]
    for group, name, q in quantities:
        if q is not None:
            yield Number(group, name, q.value, q.unit, q.kind, q.stderr, q.source, q.date, q.basis)
    for group, key, fit in list_fits(platform):
        for name, value in fit.items():
            unit, error = fit.units.get(name, "-"), fit.stderr.get(name)
            yield Number(group, f"{key} {name}", value, unit, fit.kind, error, fit.source, fit.date)
        yield Number(group, f"{key} spread", fit.spread, "-", fit.kind, None, fit.source, fit.date)


def tabulate_numbers(platform: Any) -> "polars.DataFrame":
    """Every number of the platform: a frame with columns as in `Number`, values in the unit of their row."""
    import polars

    types = {name: polars.Float64 if name in ("value", "stderr") else polars.String for name in Number._fields}
    return polars.DataFrame(list(list_numbers(platform)), schema=types, orient="row")


def render_numbers(platform: Any) -> str:
    """Write every number of a platform as an HTML table, with all names escaped."""
    rows = [
        (group, name, significant(value, error), unit, kind, f"{error:.2g}" if error else "", *origin)
        for group, name, value, unit, kind, error, *origin in list_numbers(platform)
    ]
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in (Number._fields, *rows))
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><caption>{html.escape(repr(platform))}</caption>{body}</table>"


def check_numbers(platform: Any) -> None:
    """Refuse a platform with numbers that no machine has, whether a file or Python code made it."""
    device, network = platform.device, platform.network
    check_choice("device.kind", device.kind, ("cpu", "cuda"))
    for name in ("ranks_per_node", "nodes", "rails"):
        check_positive(f"network.{name}", getattr(network, name), integer=True)
    for dtype in device.peaks:
        check_choice("device.peaks", dtype, DTYPES)
    for name in network.links:
        check_choice("network.links", name, ("intra", "inter"))
    if not device.memory or device.memory[-1].bandwidth is None:
        raise ValueError("device.memory has no bandwidth in its last level; list levels from near to far")
    for level in device.memory[:-1]:
        if level.capacity is None:
            raise ValueError(f"device.memory has the cache {level.name!r} without a capacity; leave it out or state it")
    for group, key, fit in list_fits(platform):
        _check_fit(f"{group} {key}", group, key, fit)
    for number in list_numbers(platform):
        _check_number(number)


def _check_number(number: Number) -> None:
    group, name = number.group, f"{number.group} {number.name}"
    parameter = name.rpartition(" ")[2]
    if group in ("kernel", "collective", "context"):
        low, high = LIMITS.get(parameter, (0.0, LARGEST))
    else:
        unit = _QUANTITIES.get(group) or _QUANTITIES[parameter]
        if number.unit != unit:
            raise ValueError(f"{name}: unit is {show(number.unit)}; it must be {unit}")
        if not number.source.strip():
            raise ValueError(f"{name}: source is blank; name a document, data id or machine")
        low, high = (0.0, LARGEST) if unit == "s" else (_TINY, float(np.finfo(float).max))
    if number.kind not in KINDS:
        raise ValueError(f"{name}: kind is {show(number.kind)}; it must be one of {', '.join(KINDS)}")
    if not low <= number.value <= high:
        wanted = "above 0" if low == _TINY else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} is {show(number.value)}; it must be a number {wanted} [{number.unit}]")
    if not 0.0 <= (number.stderr or 0.0) <= max(high, LARGEST):
        raise ValueError(f"{name}: stderr is {show(number.stderr)}; it must be a number of 0 or more [{number.unit}]")


def _check_fit(name: str, group: str, key: str, fit: Fit) -> None:
    """Refuse fits of unknown forms, with other parameters than their form takes, and with odd ranges or units."""
    if group == "collective":
        Key.parse(key, collective=True)
    needed, allowed = _take(group, fit.form)
    for part, wanted, known in (("parameters", needed, allowed), ("units", (), fit), ("stderr", (), fit)):
        found = getattr(fit, part)
        for parameter in sorted((set(wanted) - set(found)) | (set(found) - set(known))):
            fault = "missing" if parameter in wanted else "not a parameter of this fit"
            raise ValueError(f"{name}: {part}.{parameter} is {fault}; {fit.form} takes {', '.join(sorted(allowed))}")
    divides = fit.form in ("pipelined", "roofline", "tiled")  # by times and rates; a launch may cost nothing
    for parameter in (parameter for parameter, value in fit.items() if divides and not value and parameter != "launch"):
        raise ValueError(f"{name} {parameter} is 0; it must be a number above 0 [{fit.units.get(parameter, '-')}]")
    for unit in fit.units.values():
        if unit.count("/") > 1 or not set(unit.split("/")) <= set(UNITS):
            raise ValueError(f"{name}: unit is {show(unit)}; it must be one of {', '.join(UNITS)} or one over another")
    for variable, ends in fit.ranges.items():
        if len(ends) != 2 or not -math.inf <= ends[0] <= ends[1]:
            raise ValueError(f"{name}: range of {show(variable)} is {show(ends)}; it must be a lower and an upper end")
    if not abs(fit.bias) <= LIMITS["bias"][1]:
        raise ValueError(f"{name}: bias is {show(fit.bias)}; it must be a number from -10 to 10 [-]")


@lru_cache(maxsize=256)
def _take(group: str, form: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parameters that a form needs, and all that it takes."""
    if group == "context" and form in _CONTEXT:
        return _CONTEXT[form][0], sum(_CONTEXT[form], ())
    known: Mapping[str, Callable[..., Any]] = {
        "kernel": FORMS,
        "collective": {name: getattr(forms, name) for name in COLLECTIVE_FORMS},
        "context": {"in_context": in_context, "pace": at_usual_pace, **dict.fromkeys(_CONTEXT, in_context)},
    }[group]
    form_of = known[check_choice(f"form of the {group}", form, known)]
    takes = [p for p in signature(form_of).parameters.values() if p.kind is p.KEYWORD_ONLY]
    every = tuple(TERMS) if form == "additive" else tuple(p.name for p in takes)
    return tuple(p.name for p in takes if p.default is Parameter.empty), every
