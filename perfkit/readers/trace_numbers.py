"""Numbers of the events of a trace: times, and numbers of processes, threads, streams and links."""

import re
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from types import NoneType
from typing import Any

import polars as pl

from perfkit.ground.units import show

#: Largest time since the epoch [ns]: the year 2116.
LATEST = 2**62
#: Longest text of a time [-].
_LONGEST_TIME = 39
#: A time with all of its digits: up to picoseconds, and before `LATEST`.
_PLAIN_TIME = r"^[0-9]{1,15}(?:\.[0-9]{1,6})?$|^[123][0-9]{15}(?:\.[0-9]{1,6})?$"
_NUMBER = re.compile(r"(?:\w+ )?(?:0x)?([0-9]{1,18})")


def read_times(values: Sequence[Any], names: Sequence[str]) -> pl.Series:
    """Read the times of events.

    Parameters
    ----------
    values : sequence
        Whole numbers, and texts with all digits of other numbers [µs].
    names : sequence of str
        Names of the events, for errors.

    Returns
    -------
    times : polars.Series
        Whole nanoseconds, rounded half to even [ns].

    Raises
    ------
    ValueError
        For a time that is no number, or beyond `LATEST`.

    Examples
    --------
    >>> read_times([5, "1.0005", "1.0015", "2e3"], ["a", "b", "c", "d"]).to_list()
    [5000, 1000, 1002, 2000000]
    """
    kinds = {*map(type, values)}
    if kinds == {int} and 1000 * min(values) > -LATEST and 1000 * max(values) < LATEST:
        return 1000 * pl.Series(values, dtype=pl.Int64)
    if not kinds <= {int, str}:
        return pl.Series(_read_each(values, names), dtype=pl.Int64)
    texts = pl.Series([str(value) for value in values], dtype=pl.String)
    is_plain = texts.str.contains(_PLAIN_TIME)
    parts = texts.set(~is_plain, "0").str.split_exact(".", 1).struct.unnest()
    whole = parts["field_0"].cast(pl.Int64)
    fraction = parts["field_1"].fill_null("").str.pad_end(6, "0").cast(pl.Int64)  # [ps]
    nanoseconds, rest = fraction // 1000, fraction % 1000
    is_up = (rest > 500) | ((rest == 500) & (nanoseconds % 2 == 1))
    times = 1000 * whole + nanoseconds + is_up.cast(pl.Int64)
    others = (~is_plain).arg_true()
    if len(others):
        rows = others.to_list()
        read = _read_each([values[row] for row in rows], [names[row] for row in rows])
        times = times.scatter(others, read)
    return times


def _read_each(values: Sequence[Any], names: Sequence[str]) -> list[int]:
    """Whole nanoseconds of times that are written in some other way."""
    return [_read_time(value, name) for value, name in zip(values, names, strict=True)]


def _read_time(value: Any, name: str) -> int:
    """Whole nanoseconds of microseconds, which are a number or text with all digits."""
    is_number = type(value) is int
    is_text = type(value) is str and len(value) <= _LONGEST_TIME
    if is_number or is_text:
        with suppress(ArithmeticError):
            microseconds = Decimal(value)
            if abs(microseconds) < LATEST // 1000:
                return round(microseconds * 1000)
    raise ValueError(
        f"event {show(name, 60)} has a time of {show(value, 40)}; it must be microseconds"
    )


def pack_numbers(values: Sequence[Any]) -> pl.Series | Sequence[Any]:
    """Numbers of some events as they are written, in a column where all are whole numbers or
    missing."""
    if {*map(type, values)} <= {int, NoneType}:
        with suppress(OverflowError, TypeError):  # a number beyond 64 bits
            return pl.Series(values, dtype=pl.Int64)
    return values


def read_numbers(parts: Sequence[pl.Series | Sequence[Any]], names: dict[str, int]) -> pl.Series:
    """Read numbers of processes, threads, streams or links of all events.

    Parameters
    ----------
    parts : sequence
        From `pack_numbers`.
    names : dict of str to int
        Numbers of named threads; new names are added.

    Returns
    -------
    numbers : polars.Series
        -1 for none; names of threads have -2, -3 and so on [-].
    """
    read = [pl.Series(dtype=pl.Int64)]
    for part in parts:
        if isinstance(part, pl.Series):
            is_number = (part < LATEST) & (part > -LATEST)
            read.append(part.fill_null(-1).set(~is_number.fill_null(False), -1))
            continue
        # few of them differ, so each is read once
        values = [value if type(value) in (int, str) else None for value in part]
        numbers = {value: _read_number(value, names) for value in dict.fromkeys(values)}
        read.append(pl.Series([numbers[value] for value in values], dtype=pl.Int64))
    return pl.concat(read)


def _read_number(value: Any, names: dict[str, int]) -> int:
    """Number of a process, thread, stream or link, -1 for none; names of threads get -2, -3 and so
    on."""
    if type(value) is int:
        return value if abs(value) < LATEST else -1
    if type(value) is not str or not value:
        return -1
    match = _NUMBER.fullmatch(value)
    if match:
        return int(match[1])
    return names.setdefault(value, -2 - len(names))
