"""Schemas of files: what was read becomes structs, or an error in one plain sentence.

It is imported where a file is read or written, and not before: msgspec takes time to import.
"""

from collections.abc import Iterator
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from perfkit.ground.units import WORDS, join_place, show

#: Errors of msgspec; before 0.22 it raises a SystemError for a whole number larger than any float.
_REFUSALS = (msgspec.ValidationError, SystemError)


class Table(msgspec.Struct, forbid_unknown_fields=True):
    """A table of a file: a struct that knows all of its keys."""


AnyTable = TypeVar("AnyTable", bound=Table)


def convert(data: Any, schema: type[AnyTable], place: str = "") -> AnyTable:
    """Turn what was read from TOML or JSON into a table of a schema.

    Parameters
    ----------
    data : dict
        Content of the file, as `tomllib` or `json` reads it.
    schema : type
        The table that it must be.
    place : str, optional
        Dotted place of the data in the file, for errors.

    Returns
    -------
    table : Table
        The data, checked; whole numbers count as floats where the schema has floats.

    Raises
    ------
    ValueError
        For missing or unknown keys and values of another type, with their dotted place.

    Examples
    --------
    >>> class Sizes(Table):
    ...     sizes: dict[str, tuple[float, ...]]
    >>> convert({"sizes": {"a": [1]}}, Sizes)
    Sizes(sizes={'a': (1.0,)})
    >>> convert({"sizes": {"a": [1, "2"]}}, Sizes)
    Traceback (most recent call last):
    ...
    ValueError: sizes.a[1] is '2'; it must be a number
    """
    try:
        return msgspec.convert(data, schema)
    except _REFUSALS as error:
        raise ValueError(_explain(data, schema, place)) from error


def _explain(value: Any, expected: Any, place: str) -> str:
    """Say what msgspec refused in a value, and where.

    Its own text, such as "Expected `float`, got `str` - at `$.peaks[...].value`", names neither keys
    of mappings nor values. So the parts of the value are tried one after the other, down to the one
    that does not fit.
    """
    expected = _remove_none(expected)
    if _is_table(expected) and isinstance(value, dict):
        _check_keys(value, expected, place)
    for part_place, part, part_type in _list_parts(value, expected, place):
        try:
            msgspec.convert(part, part_type)
        except _REFUSALS:
            return _explain(part, part_type, part_place)
    return f"{place or 'it'} is {show(value)}; it must be {_describe(expected)}"


def _check_keys(table: dict[str, Any], expected: type[Table], place: str) -> None:
    """Refuse a table with a key that its schema does not have, or without one that it must have."""
    fields = msgspec.structs.fields(expected)
    names = [field.name for field in fields]
    for key in table:
        join_place(place, key, names)  # raises for an unknown one
    for field in fields:
        if field.required and field.name not in table:
            raise ValueError(f"{join_place(place, field.name)} is missing; it must be there")


def _list_parts(value: Any, expected: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """List the parts of a value with their places and the types that they must have."""
    kind, arguments = get_origin(expected) or expected, get_args(expected)
    if _is_table(kind) and isinstance(value, dict):
        for field in msgspec.structs.fields(kind):
            if field.name in value:
                yield join_place(place, field.name), value[field.name], field.type
    elif kind is dict and isinstance(value, dict):
        for key, entry in value.items():
            yield join_place(place, key), entry, arguments[1]
    elif kind is tuple and isinstance(value, list):
        for number, entry in enumerate(value):
            last = min(number, len(arguments) - 1)
            entry_type = arguments[0] if arguments[last] is Ellipsis else arguments[last]
            yield f"{place}[{number}]", entry, entry_type


def _is_table(kind: Any) -> bool:
    """Whether a type is a table of a schema."""
    return isinstance(kind, type) and issubclass(kind, Table)


def _remove_none(expected: Any) -> Any:
    """The type X of ``X | None``; any other type unchanged."""
    alternatives = [kind for kind in get_args(expected) if kind is not NoneType]
    if NoneType in get_args(expected) and len(alternatives) == 1:
        return alternatives[0]
    return expected


def _describe(expected: Any) -> str:
    """Name a type in words."""
    kind, arguments = get_origin(expected) or expected, get_args(expected)
    if kind is dict or _is_table(kind):
        return "a table"
    if kind is tuple and Ellipsis not in arguments:
        return f"a sequence of {len(arguments)} entries"
    return WORDS[kind]
