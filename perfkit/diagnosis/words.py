"""How a diagnosis writes sizes, rates and intervals: sizes in powers of two, as nccl-tests steps."""

import math

from perfkit.ground.units import format_rate

#: Share of a unit from which on a size of three digits is written with it [-].
_ALMOST = 0.9995
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def write_size(nbytes: float) -> str:
    """Write a size in powers of two.

    Parameters
    ----------
    nbytes : float
        The size [B].

    Returns
    -------
    text : str
        With three digits, or all before the point.

    Examples
    --------
    >>> write_size(8), write_size(1.5 * 2**20), write_size(2**30 - 64), write_size(1_023_898)
    ('8 B', '1.5 MiB', '1 GiB', '1000 KiB')
    """
    for unit, name in _SIZES:
        if nbytes >= _ALMOST * unit:
            return f"{_round(nbytes / unit)} {name}"
    return f"{nbytes:g} B"


def write_rate(rate: float) -> str:
    """Write a bandwidth in GB/s.

    Parameters
    ----------
    rate : float
        Bandwidth [B/s].

    Returns
    -------
    text : str
        With three digits.

    Examples
    --------
    >>> write_rate(166.9e9), write_rate(5.286e9), write_rate(7.22e4)
    ('167 GB/s', '5.29 GB/s', '72.2 kB/s')
    """
    if rate < 1e8:
        return format_rate(rate, "B/s")
    return f"{_round(rate / 1e9)} GB/s"


def write_rates(low: float, high: float) -> str:
    """Write an interval of bandwidths in GB/s.

    Parameters
    ----------
    low, high : float
        Its ends [B/s].

    Returns
    -------
    text : str
        Both ends, with one unit.

    Examples
    --------
    >>> write_rates(181.4e9, 208.8e9)
    '181 to 209 GB/s'
    """
    return f"{_round(low / 1e9)} to {_round(high / 1e9)} GB/s"


def write_times(low: float, high: float) -> str:
    """Write an interval of times in microseconds.

    Parameters
    ----------
    low, high : float
        Its ends [s].

    Returns
    -------
    text : str
        Both ends, with one unit.

    Examples
    --------
    >>> write_times(8.97e-6, 55.4e-6)
    '8.97 to 55.4 µs'
    """
    return f"{_round(low * 1e6)} to {_round(high * 1e6)} µs"


def write_microseconds(seconds: float) -> str:
    """Write a time in microseconds, as nccl-tests prints it.

    Parameters
    ----------
    seconds : float
        The time [s].

    Returns
    -------
    text : str
        With three digits, or all before the point.

    Examples
    --------
    >>> write_microseconds(21.2e-6), write_microseconds(0.0635)
    ('21.2 µs', '63500 µs')
    """
    return f"{_round(seconds * 1e6)} µs"


def _round(value: float) -> str:
    """A number with three digits, or all before the point."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{float(f'{value:.3g}'):g}"
