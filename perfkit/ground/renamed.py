"""Old names of public fields: they work for one release, and warn."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def _warn(owner: str, old: str, new: str) -> None:
    text = f"{owner}: {old} is now called {new}; the old name goes with the next release"
    # the caller's caller is the line that uses the old name
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def with_old_names(**names: str) -> Callable[[C], C]:
    """Let a dataclass take and show fields by their old names too.

    Parameters
    ----------
    **names : str
        The new name of each old one.

    Returns
    -------
    decorate : callable
        Changes the class and returns it.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @with_old_names(colour="color")
    ... @dataclass
    ... class Paint:
    ...     color: str
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     Paint(colour="red"), Paint("red").colour
    (Paint(color='red'), 'red')
    """

    def decorate(kind: C) -> C:
        plain: Any = kind.__init__  # type: ignore[misc]

        @wraps(plain)
        def start(self: Any, *given: Any, **named: Any) -> None:
            for old, new in names.items():
                if old not in named:
                    continue
                if new in named:
                    raise TypeError(f"{kind.__name__} takes {new} or {old}, its old name, not both")
                _warn(kind.__name__, old, new)
                named[new] = named.pop(old)
            plain(self, *given, **named)

        kind.__init__ = start  # type: ignore[misc]
        for old, new in names.items():
            setattr(kind, old, _make_property(kind.__name__, old, new))
        return kind

    return decorate


def _make_property(owner: str, old: str, new: str) -> property:
    def read(self: Any) -> Any:
        _warn(owner, old, new)
        return getattr(self, new)

    return property(read, doc=f"The old name of `{new}`.")
