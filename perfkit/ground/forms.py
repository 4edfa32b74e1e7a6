"""What closed forms do with their arguments: numbers of any kind become Python's or float64."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from perfkit.ground.units import Array, Values, escape, read_number, read_numbers, show

_FLOAT = np.dtype(np.float64)
_PACKAGE = str(Path(__file__).parent.parent)
Form = TypeVar("Form", bound=Callable[..., Any])
#: Annotations of arguments that are numbers.
_NUMBERS = (
    Values,
    int,
    float,
    float | None,
    Array,
    npt.ArrayLike,
    npt.ArrayLike | None,
    float | npt.ArrayLike,
    Sequence[float],
    Sequence[float] | None,
)


def closed_form(*, other: Sequence[str] = ()) -> Callable[[Form], Form]:
    """Make a closed form take numbers of any kind, and count in Python's numbers or float64.

    An array of bytes would overflow at 255 without a word. Results of Series and expressions stay
    Series and expressions.

    Parameters
    ----------
    other : sequence of str, optional
        Arguments that are no numbers in spite of their annotation, such as positions in an array.

    Raises
    ------
    ValueError
        From the form, for an argument that is no real number and no array of them, and for a
        division by zero.

    Examples
    --------
    >>> @closed_form()
    ... def double(ranks: Values) -> Values:
    ...     return 2 * ranks
    >>> double(np.int8(100)), double(np.array([100, 50], dtype=np.int8))
    (200, array([200., 100.]))
    >>> double("8")
    Traceback (most recent call last):
    ...
    ValueError: ranks is '8'; it must be a real number, or an array of them
    """

    def decorate(form: Form) -> Form:
        parameters = signature(form).parameters.values()
        numeric = {p.name for p in parameters if p.annotation in _NUMBERS} - {*other}
        optional = {p.name for p in parameters if p.default is None}
        places = [p.name for p in parameters if p.kind is not Parameter.KEYWORD_ONLY]
        many = next((p.name for p in parameters if p.kind is Parameter.VAR_POSITIONAL), "")
        named = next((p for p in parameters if p.kind is Parameter.VAR_KEYWORD), None)
        any_name = named is not None and named.annotation in _NUMBERS

        mappings = {p.name for p in parameters if p.annotation == Mapping[str, Array]}

        def convert(name: str, value: Any) -> Any:
            if type(value) in (int, float):
                return value
            if name in mappings:
                if not isinstance(value, Mapping):
                    raise ValueError(f"{name} is {show(value)}; it must be a mapping of numbers")
                entries = {}
                for key, entry in value.items():
                    if _is_converted(entry) or _is_text(entry):
                        entries[key] = entry
                    else:
                        entries[key] = to_values(f"{name}[{show(key)}]", entry)
                return entries
            if name not in numeric and not (any_name and name not in places):
                return value
            if value is None and name in optional:
                return value
            return to_values(name, value)

        @wraps(form)
        def checked(*arguments: Any, **keywords: Any) -> Any:
            if not all(map(_is_converted, arguments)):
                names = [*places[: len(arguments)], *[many] * (len(arguments) - len(places))]
                arguments = tuple(map(convert, names, arguments))
            if not all(map(_is_converted, keywords.values())):
                keywords = {name: convert(name, value) for name, value in keywords.items()}
            try:
                # shares that round to zero are no error, whatever the caller has set
                with np.errstate(under="ignore"):
                    return form(*arguments, **keywords)
            except (ImportError, OSError, Warning):
                raise
            except ArithmeticError as error:
                raise ValueError(
                    f"{form.__name__} of {show([*arguments, *keywords.values()])} is not a finite number; "
                    "sizes, rates and counts must be above 0 and below 1e300"
                ) from error
            except Exception as error:
                if _is_meant(error):
                    raise
                advice = "give numbers, or arrays of the shapes that its documentation names"
                values = [*arguments, *keywords.values()]
                raise ValueError(_say_misfit(form, values, error, advice)) from error

        return checked  # type: ignore[return-value]

    return decorate


def _is_converted(value: Any) -> bool:
    """Whether a value is a Python number or an array of float64 already, as most are."""
    kind = type(value)
    return kind is float or kind is int or (kind is np.ndarray and value.dtype is _FLOAT)


def refuse_misfits(advice: str) -> Callable[[Form], Form]:
    """Make a function refuse arguments of other types and shapes in one line.

    Parameters
    ----------
    advice : str
        What to give instead.

    Raises
    ------
    ValueError
        From the function, in place of every error that it did not raise itself. Its own errors,
        arithmetic ones, interrupts, warnings and missing packages pass, and so does the TypeError
        of a call without an argument that is needed.

    Examples
    --------
    >>> @refuse_misfits("give rows")
    ... def count(rows):
    ...     return len(rows)
    >>> count(5)
    Traceback (most recent call last):
    ...
    ValueError: count cannot take 5: TypeError object of type 'int' has no len(); give rows
    """

    def decorate(function: Form) -> Form:
        @wraps(function)
        def guarded(*arguments: Any, **keywords: Any) -> Any:
            try:
                return function(*arguments, **keywords)
            except (ArithmeticError, ImportError, OSError, Warning):
                raise
            except Exception as error:
                if _is_meant(error):
                    raise
                values = [*arguments, *keywords.values()]
                raise ValueError(_say_misfit(function, values, error, advice)) from error

        return guarded  # type: ignore[return-value]

    return decorate


def _say_misfit(
    function: Callable[..., Any], values: Sequence[Any], error: Exception, advice: str
) -> str:
    """Say in one line that a function cannot take these values."""
    given = ", ".join(show(value, 40) for value in values[:4])
    cause = escape(str(error).strip().partition("\n")[0], 80)
    return f"{function.__name__} cannot take {given}: {type(error).__name__} {cause}; {advice}"


def to_values(name: str, value: Any) -> Any:
    """Return a number as Python's, an array or sequence as float64, a Series or expression cast to
    Float64, or raise an error for what is none of them."""
    if type(value) is np.ndarray and value.dtype == np.float64:
        return value
    number = read_number(value)
    if number is not None:
        return number
    if isinstance(value, bool | np.bool_):
        return bool(value)
    package = type(value).__module__.partition(".")[0]
    try:
        if package == "polars":
            return _cast_polars(value)
        if package == "pandas":
            return value.astype("float64")
    except Exception as error:  # text and dates, in the words of another library
        raise ValueError(_refuse(name, value)) from error
    if hasattr(value, "__array_ufunc__") and not isinstance(value, np.ndarray | np.generic):
        return value  # arrays of other libraries, which know what their numbers do
    array = read_numbers(value)
    if array is None:
        raise ValueError(_refuse(name, value))
    return array


def _cast_polars(value: Any) -> Any:
    """A Series or expression of polars as Float64; other objects of polars raise."""
    polars = sys.modules["polars"]
    if isinstance(value, polars.Series) and not value.dtype.is_numeric():
        raise TypeError("no numbers")
    return value.cast(polars.Float64)


def _is_meant(error: Exception) -> bool:
    """Whether perfkit raised a ValueError itself, or an argument is missing; NumPy raises a
    ValueError for shapes that do not fit."""
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    is_missing = isinstance(error, TypeError) and len(frames) == 1
    if is_missing or type(error).__module__.startswith("perfkit."):
        return True
    return isinstance(error, ValueError) and frames[-1].startswith(_PACKAGE)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype.kind == "U")


def _refuse(name: str, value: Any) -> str:
    return f"{name} is {show(value)}; it must be a real number, or an array of them"
