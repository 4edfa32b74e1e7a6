"""Records whose fields are set once."""

from typing import Any


def set_fields(record: Any, **values: Any) -> None:
    """Set fields of a frozen record while it is made, such as to what a check has returned.

    Parameters
    ----------
    record : object
        An instance of a frozen dataclass, in its own ``__init__`` or ``__post_init__``.
    **values : object
        The fields.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Batch:
    ...     size: int
    ...
    ...     def __post_init__(self) -> None:
    ...         set_fields(self, size=int(self.size))
    >>> Batch(8.0)
    Batch(size=8)
    """
    for name, value in values.items():
        object.__setattr__(record, name, value)
