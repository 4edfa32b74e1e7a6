"""Estimates: a time with its interval, parts and formula, and what warns about it."""

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import NormalDist
from typing import Any

import numpy as np

from perfkit.fitting import Fit
from perfkit.ground.notes import write_warnings
from perfkit.ground.records import set_fields
from perfkit.ground.results import Shown
from perfkit.ground.units import (
    Array,
    Values,
    check_positive,
    check_type,
    coerce,
    escape,
    format_bytes,
    format_count,
    format_rate,
    format_time,
    show,
)

_QUIET = ContextVar("quiet", default=False)
#: A number that stands alone, with its unit.
_NUMBER = re.compile(r"(?<![\w.'])\d[\d.,]*(?: [kMGTmµn]?[sB]\b)?")


class ExtrapolationWarning(UserWarning):
    """A model is used for sizes or rank counts outside those it was fitted on."""


#: Times from here on are refused: their intervals would not be finite [s].
LONGEST = 1e100


def check_time(label: str, time: float, spread: float, parts: Iterable[float]) -> None:
    """Refuse a time [s] that is negative, infinite, no number, without interval, or not the sum of
    its parts [s].

    `label` names what was timed and the platform. A spread above 50, or a time above `LONGEST`,
    gives no finite interval.

    Examples
    --------
    >>> check_time("gemm on 'toy'", 2.0, 0.1, [0.5, 1.5])
    >>> check_time("gemm on 'toy'", float("nan"), 0.1, [])
    Traceback (most recent call last):
    ...
    ValueError: gemm on 'toy' takes nan s (parts nan s, spread 0.1); a size or a number of the platform is far too large
    """
    known = list(parts)
    if time > LONGEST:  # also a whole number that no float holds
        time = math.inf
    total = math.fsum(known) if known else time
    sound = 0 <= time < LONGEST and 0 <= spread <= 50 and (time > 0 or not known)
    if not sound or not math.isclose(total, time, rel_tol=1e-9):
        found = f"takes {time:g} s (parts {total:g} s, spread {spread:g})"
        raise ValueError(
            f"{escape(label, 200)} {found}; a size or a number of the platform is far too large"
        )


def find_interval(time: Any, spread: Any, level: float) -> tuple[Any, Any]:
    """Find the bounds [s] that contain a measured time with the probability `level`; times are
    log-normal.

    Examples
    --------
    >>> [round(bound, 2) for bound in find_interval(1.0, 0.1, 0.8)]
    [0.88, 1.14]
    """
    if check_positive("level", level, maximum=1) == 1:
        raise ValueError("level is 1; it must be a number above 0 and below 1, such as 0.8")
    factor = np.exp(NormalDist().inv_cdf(0.5 + level / 2) * spread)
    low, high = time / factor, time * factor
    return (low, high) if np.ndim(low) else (float(low), float(high))


@dataclass(frozen=True)
class Estimate(Shown):
    """A predicted time with its interval and parts.

    Parameters
    ----------
    time : float
        Predicted time [s].
    spread : float
        Standard deviation of the logarithm of measured over predicted [-].
    terms : mapping of str to float
        Parts that sum to `time` [s].
    formula : str
        The closed form with its numbers [-].
    warnings : tuple of str
        Reasons why the error may be larger than the spread says [-].

    Examples
    --------
    >>> estimate = Estimate(0.0412, 0.05, {"start-up": 0.0012, "transfer": 0.04}, "t = alpha + beta n", ())
    >>> estimate
    Estimate(41.2 ms, 80 % within 38.6 ms to 43.9 ms)
    """

    time: float
    spread: float
    terms: Mapping[str, float]
    formula: str
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("time", "spread"):
            number = coerce(name, getattr(self, name), float)
            set_fields(self, **{name: number})
        terms = coerce("terms", self.terms, Mapping[str, float])
        set_fields(self, terms=terms)
        check_type("formula", self.formula, str)
        warnings = coerce("warnings", self.warnings, tuple[str, ...])
        set_fields(self, warnings=warnings)
        check_time(self.formula.partition(": ")[0], self.time, self.spread, self.terms.values())

    def interval(self, level: float = 0.8) -> tuple[float, float]:
        """Bounds that contain the measured time with a given probability; times are log-normal.

        Parameters
        ----------
        level : float, optional
            Probability between 0 and 1 [-].

        Returns
        -------
        bounds : (float, float)
            Lower and upper bound [s].

        Raises
        ------
        ValueError
            For a level that is not between 0 and 1.
        """
        return find_interval(self.time, self.spread, level)

    def explain(self) -> str:
        """Explain the time: formula with numbers, parts, interval, warnings.

        Returns
        -------
        text : str
            A few lines [-].
        """
        low, high = self.interval()
        parts = [f"  {name}: {format_time(part)}" for name, part in self.terms.items()]
        total = f"  together {format_time(self.time)}; 80 % interval {format_time(low)} to {format_time(high)} (spread {self.spread:.0%})"
        return "\n".join([self.formula, *parts, total, *write_warnings(self.warnings)])

    def __repr__(self) -> str:
        low, high = self.interval()
        text = f"{format_time(self.time)}, 80 % within {format_time(low)} to {format_time(high)}"
        if self.warnings:
            text += f", {format_count(len(self.warnings), 'warning')}"
        return f"Estimate({text})"


@dataclass(frozen=True)
class CollectiveTime:
    """Times of collectives [s], parts that sum to them, the closed form with its numbers, spread
    [-] and warnings."""

    time: Array
    terms: Mapping[str, Array] = field(default_factory=dict)
    formula: object = ""  # its text is written when it is shown
    spread: float | Array = 0.0
    notes: tuple[str, ...] = ()


def find_extrapolations(label: str, fit: Fit, features: Mapping[str, Values]) -> tuple[str, ...]:
    """Write one sentence for each size, in base units, that is outside the measured range of a fit.

    Examples
    --------
    >>> from perfkit.fitting import Pipelined
    >>> fit = Pipelined.build({"alpha": 2e-5, "beta": 5e-12}, ranges={"nbytes": (512, 5e8)})
    >>> find_extrapolations("all_reduce", fit, {"nbytes": 4e9})
    ('all_reduce: nbytes 4 GB is outside the fitted range 512 B to 500 MB',)
    """
    write: dict[str, Callable[[float], str]] = {
        "nbytes": format_bytes,
        "flops": partial(format_rate, unit="FLOP"),
    }
    found = []
    for name, (low, high) in fit.ranges.items():
        values = np.atleast_1d(np.asarray(features.get(name, low), dtype=float))
        outside = values[(values < low) | (values > high)]
        if outside.size:
            worst = outside.max() if outside.max() > high else outside.min()
            show_size = write.get(name, "{:.4g}".format)
            fitted = f"{show_size(low)} to {show_size(high)}"
            found.append(f"{label}: {name} {show_size(worst)} is outside the fitted range {fitted}")
    return tuple(found)


def find_transfers(label: str, fit: Fit) -> tuple[str, ...]:
    """Write one sentence for each machine or format that a fit was carried over from."""
    return tuple(f"{label}: transferred from {text}" for text in fit.transferred)


def missing_data_error(platform: str, what: str, have: Iterable[str]) -> ValueError:
    """Error for a model that a platform of this name does not have, with the models it has."""
    known = list(dict.fromkeys(have))
    listed = ", ".join(known[:8]) or "none"
    if len(known) > 8:
        listed += f" and {len(known) - 8} others"
    lack = f"platform {show(platform)} has no {what}; it has {escape(listed, 200)}"
    return ValueError(f"{lack}; calibrate it or choose another platform")


def format_equation(fit: Fit) -> str:
    """Write the equation of a fit and its numbers in one line."""
    return f"{fit.equation} with {fit!r}"


@contextmanager
def keep_quiet() -> Iterator[None]:
    """Raise no `ExtrapolationWarning` in this thread; results still carry the messages.

    Python's own filters belong to all threads: restoring them in one thread undoes the changes of
    another.
    """
    before = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(before)


def warn_once(messages: tuple[str, ...], stacklevel: int) -> tuple[str, ...]:
    """Raise one Python warning for all messages, except inside `keep_quiet`, and return the
    messages."""
    if messages and not _QUIET.get():
        warnings.warn("; ".join(messages), ExtrapolationWarning, stacklevel=stacklevel)
    return messages


def name_sides(found: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Join the warnings of several results, by name: each says which results it belongs to, unless
    it belongs to all.

    If more than two warnings differ in numbers alone, the last one is given.

    Examples
    --------
    >>> name_sides({"a": ["no fit", "takes 2 ms"], "b": ["no fit", "takes 3 ms"]})
    ('no fit', 'a: takes 2 ms', 'b: takes 3 ms')
    >>> name_sides({"2 ranks": ["takes 2 ms"], "4 ranks": ["takes 30 µs"], "8 ranks": ["takes 4 ms"], "16 ranks": []})
    ('2 ranks, 4 ranks, 8 ranks: takes 4 ms (the last of 3 such warnings)',)
    """
    # the results that have a warning, by its text; texts that differ in numbers alone together.
    # Each result counts once, and there may be many: names are the keys of a dictionary
    results_of_alike: dict[str, dict[str, dict[str, None]]] = {}
    for name, texts in found.items():
        for text in texts:
            results_of = results_of_alike.setdefault(_NUMBER.sub("#", text), {})
            results_of.setdefault(text, {})[name] = None
    notes: list[str] = []
    for results_of in results_of_alike.values():
        if len(results_of) > 2:
            last = list(results_of)[-1]
            text = f"{last} (the last of {len(results_of)} such warnings)"
            results_of = {text: dict.fromkeys(chain.from_iterable(results_of.values()))}
        for text, names in results_of.items():
            if len(names) == len(found):
                notes.append(text)
            else:
                others = " and others" if len(names) > 6 else ""
                notes.append(f"{', '.join(list(names)[:6])}{others}: {text}")
    return tuple(notes)
