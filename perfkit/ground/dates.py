"""Dates that arguments name: nothing here asks the clock."""

from datetime import date, datetime
from typing import Any

from perfkit.ground.units import show

#: What an argument may be that names a moment.
Moment = str | date | datetime


def read_date(name: str, value: Any) -> datetime:
    """Read a moment from an argument.

    Parameters
    ----------
    name : str
        The argument.
    value : str, date or datetime
        Such as ``2027-01-15`` or ``2027-01-15 18:00``; a day alone is its begin.

    Returns
    -------
    moment : datetime
        Without a time zone.

    Raises
    ------
    ValueError
        For anything else, and for a time zone.

    Examples
    --------
    >>> read_date("start", "2027-01-15")
    datetime.datetime(2027, 1, 15, 0, 0)
    >>> read_date("start", "15.1.2027")
    Traceback (most recent call last):
    ...
    ValueError: start is '15.1.2027'; it must be a date such as '2027-01-15' or '2027-01-15 18:00'
    """
    moment = None
    if isinstance(value, datetime):
        moment = value
    elif isinstance(value, date):
        moment = datetime(value.year, value.month, value.day)
    elif isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            moment = None
    if moment is None:
        raise ValueError(
            f"{name} is {show(value)}; it must be a date such as '2027-01-15' or '2027-01-15 18:00'"
        )
    if moment.tzinfo is not None:
        raise ValueError(
            f"{name} is {show(value)}, with a time zone; give all dates of a run in one zone, and leave it out"
        )
    return moment


def write_date(moment: datetime) -> str:
    """Write a moment to the minute; a day alone where it is its begin.

    Examples
    --------
    >>> write_date(datetime(2027, 1, 15)), write_date(datetime(2027, 1, 15, 18, 0, 30))
    ('2027-01-15', '2027-01-15 18:00')
    """
    if moment == datetime(moment.year, moment.month, moment.day):
        return f"{moment:%Y-%m-%d}"
    return f"{moment:%Y-%m-%d %H:%M}"
