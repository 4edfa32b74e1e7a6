"""Sizes and times that are written with their unit, such as 80GB and 4096h."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from perfkit.ground.units import check_positive, show

#: Units that sizes and times may be written with, and what they are [B], [s].
BYTES: Mapping[str, float] = {
    **{f"{prefix}B": 1e3**power for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}
SECONDS: Mapping[str, float] = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_NUMBER_WITH_UNIT = re.compile(
    r"\s*(?P<number>[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*(?P<unit>[A-Za-zµ]+)\s*"
)


def read_quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Read a number that may have a unit after it.

    Parameters
    ----------
    text : str
        As written.
    units : mapping of str to float
        Units that it may have, and what they are.

    Returns
    -------
    value : float or None
        In the unit of 1, as a number without a unit is; None where the text is none of these.

    Examples
    --------
    >>> read_quantity("4096h", SECONDS), read_quantity("0.5", SECONDS), read_quantity("3y", SECONDS)
    (14745600.0, 0.5, None)
    """
    with suppress(ValueError):
        return float(text)
    written = _NUMBER_WITH_UNIT.fullmatch(text)
    if written is None or written["unit"] not in units:
        return None
    return float(written["number"]) * units[written["unit"]]


def check_bytes(name: str, value: Any) -> float:
    """Return a size in bytes, or raise an error that says what is allowed.

    Parameters
    ----------
    name : str
        Name of the argument [-].
    value : float or str
        The size [B], or a text with its unit, such as ``80GB``.

    Returns
    -------
    nbytes : float
        The same size [B].

    Raises
    ------
    ValueError
        For a text that is no size, and as `perfkit.ground.units.check_positive` does.

    Examples
    --------
    >>> check_bytes("memory", "40GB"), check_bytes("memory", 16e9)
    (40000000000.0, 16000000000.0)
    """
    if not isinstance(value, str):
        return float(check_positive(name, value))
    nbytes = read_quantity(value, BYTES)
    if nbytes is None:
        raise ValueError(
            f"{name} is {show(value)}; it must be bytes, or a size with one of the units {', '.join(BYTES)}, such as "
            "'80GB'"
        )
    return float(check_positive(name, nbytes))


def check_seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Return a time in seconds, or raise an error that says what is allowed.

    Parameters
    ----------
    name : str
        Name of the argument [-].
    value : float or str
        The time [s], or a text with its unit, such as ``8h``.
    zero : bool, optional
        Whether zero is allowed [-].

    Returns
    -------
    seconds : float
        The same time [s].

    Raises
    ------
    ValueError
        For a text that is no time, and as `perfkit.ground.units.check_positive` does.

    Examples
    --------
    >>> check_seconds("restart", "10min")
    600.0
    """
    if not isinstance(value, str):
        return float(check_positive(name, value, zero=zero))
    seconds = read_quantity(value, SECONDS)
    if seconds is None:
        raise ValueError(
            f"{name} is {show(value)}; it must be seconds, or a time with one of the units {', '.join(SECONDS)}, "
            "such as '8h'"
        )
    return float(check_positive(name, seconds, zero=zero))
