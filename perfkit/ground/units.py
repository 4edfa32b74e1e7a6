"""Numbers as text for people, and checks of input with messages that say what is allowed."""

import json
import math
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from numbers import Integral, Rational, Real
from types import MappingProxyType, NoneType, UnionType
from typing import Any, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from perfkit.ground.records import set_fields

Array: TypeAlias = npt.NDArray[np.float64]
#: Input of a closed form: a float, an array, a Series or a Polars expression; the form returns the
#: same kind.
Values: TypeAlias = Any

LARGEST = 2.0**63
LARGEST_FLOAT = sys.float_info.max
_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
#: Seconds of each unit that `format_time` writes [s].
_SECONDS_OF = {"h": 3600.0, "min": 60.0, **{symbol: factor for factor, symbol in _TIME}}
_BRIEF = reprlib.Repr()  # a list of a million entries is not written out before it is shortened
_BRIEF.maxstring = _BRIEF.maxother = 200


#: From more known names than this on, the one that was probably meant stands before them [-].
_LONG_LIST = 20
#: Most values of a sequence that is given as an argument [-]; looking at them takes some seconds.
MOST_VALUES = 10_000_000


def _scaled(value: float, scales: Sequence[tuple[float, str]]) -> str:
    """Write three digits in the largest scale that leaves at least 1 before the point, after
    rounding."""
    value = float(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {next(symbol for factor, symbol in scales if factor == 1)}"
    rounded = abs(float(f"{value:.2e}"))
    factor, symbol = next(((f, s) for f, s in scales if rounded >= f * (1 - 1e-12)), scales[-1])
    shown = float(f"{value / factor:.3g}")
    return f"{shown:.0f} {symbol}" if abs(shown) >= 1000 else f"{shown:g} {symbol}"


def format_time(seconds: float) -> str:
    """Write a time with three digits and the unit that suits it.

    Parameters
    ----------
    seconds : float
        Time [s].

    Returns
    -------
    text : str
        Nanoseconds to seconds, then minutes from 120 s and hours from 7,200 s [-].

    Examples
    --------
    >>> format_time(0.0412), format_time(9.9996e-4), format_time(5400)
    ('41.2 ms', '1 ms', '90 min')
    """
    size = abs(float(seconds))
    if 120 <= size < math.inf:
        return f"{seconds / 3600:.3g} h" if size >= 7200 else f"{seconds / 60:.3g} min"
    return _scaled(seconds, _TIME)


def format_interval(seconds: float, low: float, high: float) -> str:
    """Write a time with its interval, all in the unit that suits the time.

    Parameters
    ----------
    seconds, low, high : float
        Time, and the ends of its interval [s].

    Returns
    -------
    text : str
        The time with its unit, and the ends in parentheses; they have units of their own where one of
        them is less than a hundredth of the unit, or 10,000 of it [-].

    Examples
    --------
    >>> format_interval(0.0445, 0.0334, 0.0593), format_interval(1.1e-3, 8.2e-4, 1.5e-3)
    ('44.5 ms (33.4 to 59.3)', '1.1 ms (0.82 to 1.5)')
    >>> format_interval(5400, 60, 7000)
    '90 min (1 to 117)'
    >>> format_interval(0.2, 0.0001, 3)
    '200 ms (0.1 to 3000)'
    """
    text = format_time(seconds)
    ends = (float(low), float(high))
    unit = text.split(" ")[1]
    factor = _SECONDS_OF[unit]
    written = []
    for end in ends:
        shown = float(f"{end / factor:.3g}")
        if shown != 0 and not 0.01 <= abs(shown) < 10_000:
            low_text, high_text = map(format_time, ends)
            return f"{text} ({low_text} to {high_text})"
        written.append(f"{shown:.0f}" if abs(shown) >= 1000 else f"{shown:g}")
    return f"{text} ({written[0]} to {written[1]})"


def format_bytes(nbytes: float) -> str:
    """Write a size [B] with its unit, three digits and an SI prefix (1 GB is 10^9 bytes).

    Examples
    --------
    >>> format_bytes(1.5e9), format_bytes(64 * 2**20), format_bytes(512)
    ('1.5 GB', '67.1 MB', '512 B')
    """
    return format_rate(nbytes, "B")


def format_rate(value: float, unit: str) -> str:
    """Write any quantity with three digits and an SI prefix.

    Parameters
    ----------
    value : float
        Quantity in its base unit [-].
    unit : str
        Base unit that takes the prefix [-].

    Returns
    -------
    text : str
        Quantity with prefixed unit [-].

    Examples
    --------
    >>> format_rate(13.28e12, "FLOP/s"), format_rate(0.5, "B/s")
    ('13.3 TFLOP/s', '0.5 B/s')
    """
    return _scaled(value, [(factor, prefix + unit) for factor, prefix in _SI])


def format_count(count: int, noun: str) -> str:
    """Write a number of things, whose plural ends in s.

    Examples
    --------
    >>> format_count(1, "rank"), format_count(8, "rank")
    ('1 rank', '8 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_ranks(ranks: Sequence[int]) -> str:
    """Write ranks in their order; three or more in a row as their ends.

    Examples
    --------
    >>> format_ranks((1, 2, 3, 4, 5, 6, 7, 0)), format_ranks((3,)), format_ranks((0, 1, 4))
    ('1-7, 0', '3', '0, 1, 4')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    written: list[str] = []
    for run in runs:
        if len(run) < 3:
            written += map(str, run)
        else:
            written.append(f"{run[0]}-{run[-1]}")
    return ", ".join(written)


def format_table(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Lay rows of text out in aligned columns, the heads first; `numbers` aligns those after the
    first to the right.

    Examples
    --------
    >>> print(format_table([("kernel", "mean"), ("GEMM", "7.0 %"), ("copy", "12.0 %")], numbers=True))
    kernel    mean
    GEMM     7.0 %
    copy    12.0 %
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    places = ["<", *(">" if numbers else "<") * (len(widths) - 1)]
    cells = (zip(row, places, widths, strict=True) for row in rows)
    return "\n".join(
        "  ".join(f"{cell:{place}{width}}" for cell, place, width in row).rstrip() for row in cells
    )


def significant(value: float, stderr: float | None) -> str:
    """Write a value with the digits its standard error supports: down to the second digit of the
    error.

    Parameters
    ----------
    value : float
        Estimate, in any unit [-].
    stderr : float or None
        Its standard error in the same unit; None, zero or a non-finite error shows four digits [-].

    Returns
    -------
    text : str
        The value alone, at least one digit of it [-].

    Examples
    --------
    >>> significant(0.671234, 0.0123), significant(0.0123, 0.0123)
    ('0.671', '0.012')
    >>> significant(20.12e-6, 0.3e-6), significant(131234.5, 2100), significant(0.6, None)
    ('2.012e-05', '131200', '0.6000')
    """
    value = float(value)
    if not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value))) if value else 0
    place = exponent - 3
    if stderr is not None and math.isfinite(stderr) and stderr > 0:
        place = min(int(f"{stderr:.1e}".split("e")[1]) - 1, exponent)
    if value and not -4 <= exponent < 6:
        return f"{value:.{exponent - place}e}"
    return f"{round(value, -place):.{max(0, -place)}f}"


def escape(text: Any, most: int = 80) -> str:
    """Write text of unknown origin in one line of at most `most` characters, without control
    characters.

    Examples
    --------
    >>> escape("a\\nb\\x1b[31m"), escape("x" * 5000, most=12)
    ('a\\\\nb\\\\x1b[31m', 'xxxxxx...xxx')
    """
    whole = str(text)
    # saves time with long texts
    whole = whole if len(whole) <= 2 * most else whole[:most] + whole[-most:]
    line = (
        whole
        if whole.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in whole)
    )
    return line if len(line) <= most else f"{line[: most - 3 - most // 4]}...{line[-(most // 4) :]}"


#: Control characters, halves of characters and other code points that pictures and pages cannot
#: hold, and marks that nobody sees and that turn the direction of text round.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufdd0-\ufdef\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)


def clean(text: str) -> str:
    """Write characters that nobody sees, and that a picture or a page cannot hold, as their codes;
    tabs and ends of lines stay.

    Examples
    --------
    >>> clean("a\\x1bb")
    'a\\\\x1bb'
    """
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(lambda match: repr(match[0])[1:-1], text)


def show(value: Any, most: int = 80) -> str:
    """Write a value for a message: its repr in one line, shortened.

    Examples
    --------
    >>> show("a\\nb"), show([1, 2, 3]), show("x" * 5000, most=15)
    ("'a\\\\nb'", '[1, 2, 3]', "'xxxxxxxx...xx'")
    """
    try:
        return escape(_BRIEF.repr(value), most)
    except Exception:  # a whole number of more digits than Python writes, a repr that fails
        return f"<{escape(type(value).__name__, most - 2)}>"


def rank_largest(values: Sequence[float] | Array, *, slack: float | None = None) -> list[int]:
    """Positions of values, the largest first; values that differ by at most `slack`, or rounding,
    keep their order.

    Examples
    --------
    >>> rank_largest([1.0, 3.0, 3.0000000000001])
    [1, 2, 0]
    """
    numbers = np.asarray(values, dtype=float)
    order = np.argsort(-numbers, kind="stable")
    steps = np.diff(-numbers[order]) > (
        1e-9 * np.abs(numbers).max(initial=0.0) if slack is None else slack
    )
    return [
        int(place) for place in order[np.lexsort((order, np.cumsum([0, *steps])[: len(order)]))]
    ]


def steady(values: float | Array) -> Array:
    """Round numbers to 24 bits: they are then equal on every processor, and their sums are exact.

    Examples
    --------
    >>> bool(steady(0.1 + 0.2) == steady(0.3))
    True
    """
    parts, exponents = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(parts * 2.0**24), exponents - 24))


def read_number(value: Any) -> int | float | None:
    """Return a real number of any kind as Python's int or float, which cannot overflow or count in
    bytes; None for what is no real number.

    Numbers of NumPy, fractions and decimals are taken, as is an array of one number without axes.
    Booleans, text, complex numbers, durations, dates and masked values are none.

    Examples
    --------
    >>> read_number(np.int8(100)), read_number(np.float32(0.5)), read_number(np.timedelta64(3, "s"))
    (100, 0.5, None)
    """
    if type(value) in (int, float):
        number: int | float = value
        return number
    if isinstance(value, np.ndarray) and value.ndim == 0 and not np.ma.is_masked(value):
        value = value[()]
    # a duration of NumPy counts among its whole numbers
    if isinstance(value, bool | np.timedelta64) or not isinstance(value, Real | Decimal):
        return None
    if isinstance(value, Integral):
        return int(value)
    exact: Any = value
    try:
        real = float(exact)
    except OverflowError:  # a fraction that is larger than any float
        return math.inf if exact > 0 else -math.inf
    except ValueError:  # a decimal that signals that it is not a number
        return math.nan
    if isinstance(value, Rational | Decimal) and math.isfinite(real):
        whole = int(exact)
        if whole == exact:  # also where it has more digits than a float
            return whole
    return real


def read_numbers(values: Any) -> Array | None:
    """Return real numbers of any kind as an array of float64; None if one of them is no real number,
    is masked, or if rows differ in length.

    Examples
    --------
    >>> read_numbers(np.array([100, 27], dtype=np.int8)), read_numbers(["1"]), read_numbers([1j])
    (array([100.,  27.]), None, None)
    """
    if np.ma.is_masked(values):
        return None
    if isinstance(values, range):  # it holds no values until it is copied
        count_values("the range", values)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):  # rows of different lengths
        return None
    if array.dtype.kind in "biuf":
        with np.errstate(over="ignore"):  # wider numbers than float64 become infinite
            return array.astype(np.float64, copy=False)
    if array.dtype.kind != "O":
        return None
    numbers = [read_number(value) for value in array.ravel().tolist()]
    if any(number is None for number in numbers):
        return None
    try:
        return np.array(numbers, dtype=np.float64).reshape(array.shape)
    except OverflowError:  # a whole number that is larger than any float
        return None


def is_listed(values: Any) -> bool:
    """Whether these are several values rather than one: no text, no array without axes.

    Examples
    --------
    >>> is_listed([3]), is_listed(np.array([3])), is_listed(np.array(3)), is_listed("abc")
    (True, True, False, False)
    """
    return (
        isinstance(values, Iterable)
        and not isinstance(values, str | bytes)
        and getattr(values, "ndim", 1) != 0
    )


def count_values(name: str, values: Any, most: int = MOST_VALUES) -> int:
    """Number of the values of a sequence; a ValueError where there are too many to look at.

    A sequence need not hold its values: ``range(10**12)`` takes no memory until it is copied.

    Examples
    --------
    >>> count_values("owners", [0, 1, 0])
    3
    >>> count_values("owners", range(10**12))
    Traceback (most recent call last):
    ...
    ValueError: owners has 1,000,000,000,000 values; it may have at most 10,000,000
    """
    try:
        count = len(values)
    except OverflowError:  # more than an index can be
        raise ValueError(
            f"{name} has more than {sys.maxsize:,} values; it may have at most {most:,}"
        ) from None
    if count > most:
        raise ValueError(f"{name} has {count:,} values; it may have at most {most:,}")
    return count


def check_positive(
    name: str,
    value: Any,
    *,
    integer: bool = False,
    maximum: float | None = None,
    zero: bool = False,
) -> Any:
    """Return a size as a Python number, or raise an error that says what is allowed.

    Parameters
    ----------
    name : str
        Name of the argument [-].
    value : int or float
        The argument; all that `read_number` takes is allowed, booleans and text are not [-].
    integer : bool, optional
        Whether only whole numbers are allowed; a float such as 1e6 is one [-].
    maximum : float, optional
        Largest value allowed; 2**63 if not given [-].
    zero : bool, optional
        Whether zero is allowed [-].

    Returns
    -------
    value : int or float
        The same number as a Python int (where `integer`) or float [-].

    Raises
    ------
    ValueError
        For numbers that are negative, zero, NaN, infinite or above the maximum, and for other
        types.

    Examples
    --------
    >>> check_positive("batch", 2048, integer=True)
    2048
    >>> check_positive("batch", -3, integer=True)
    Traceback (most recent call last):
    ...
    ValueError: batch is -3; it must be a whole number above 0
    """
    number = read_number(value)
    real = math.nan if number is None else number
    limit = LARGEST if maximum is None else maximum
    if not 0 <= real <= limit or (real == 0 and not zero) or (integer and real != int(real)):
        bound = f", at most {limit:g}" if maximum is not None or real > limit else ""
        wanted = f"a {'whole ' * integer}number {'of 0 or more' if zero else 'above 0'}{bound}"
        raise ValueError(f"{name} is {show(value)}; it must be {wanted}")
    return int(real) if integer else float(real)


def _is_other_width(one: str, other: str) -> bool:
    """Whether two names are formats of another number of digits: fp4 for fp64 is no slip of the pen."""
    widths = [re.fullmatch(r"[a-z]+(\d+)", name) for name in (one.lower(), other)]
    digits = [len(width[1]) for width in widths if width is not None]
    return len(digits) == 2 and digits[0] != digits[1]


#: Share of letters that a misspelt name has in common with the one that was meant: one wrong letter of four
#: is a slip (0.75), while 'mamba' (0.6 of 'llama') and 'dualpipe' (0.62 of 'gpipe') are other things [-].
_SPELLING = 0.7


#: Names that others have for what perfkit knows: formats of PyTorch, stages of DeepSpeed's ZeRO.
_SYNONYMS = {
    **{"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"},
    **{"float64": "fp64", "double": "fp64", "zero3": "fsdp", "zero-3": "fsdp"},
}


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return a known name, or raise an error with the known names and the closest match.

    Examples
    --------
    >>> check_choice("dtype", "fp31", ["bf16", "fp32"])
    Traceback (most recent call last):
    ...
    ValueError: dtype is 'fp31'; known are bf16, fp32; did you mean 'fp32'?
    """
    if type(value) is str and isinstance(choices, tuple | dict) and value in choices:
        return value  # saves time with what is right
    known = [str(choice) for choice in choices]
    if isinstance(value, str) and value in known:
        return str(value)
    given = value if isinstance(value, str) and value else "\0"
    # h100 is h100-sxm-8 rather than p100-1
    begun = [choice for choice in known if choice.startswith(given.lower())]
    near = [
        choice
        for choice in get_close_matches(given.lower(), known, n=1, cutoff=_SPELLING)
        if not _is_other_width(given, choice)
    ]
    ended = [choice for choice in known if choice and given.endswith(f".{choice}")]
    synonym = _SYNONYMS.get(given.lower().removeprefix("torch."))
    meant = [synonym] if synonym in known else []
    close = [*meant, *begun, *ended, *near]
    named = [choice or "''" for choice in known]  # where none is a choice, too
    listed = escape(", ".join(named) or "none", 900)
    if not close:
        raise ValueError(f"{name} is {show(value)}; known are {listed}")
    hint = f"did you mean {close[0]!r}?"
    if len(known) > _LONG_LIST:
        raise ValueError(f"{name} is {show(value)}; {hint} known are {listed}")
    raise ValueError(f"{name} is {show(value)}; known are {listed}; {hint}")


def check_sizes(name: str, values: Any) -> Array:
    """Return sizes as an array of floats, or raise an error for other than finite numbers of 0 or
    more.

    Examples
    --------
    >>> check_sizes("nbytes", [0, 2**70])
    array([0.00000000e+00, 1.18059162e+21])
    """
    sizes = read_numbers(values)
    if sizes is None or not np.all((sizes >= 0) & (sizes < math.inf)):
        raise ValueError(
            f"{name} is {show(values)}; it must be a finite number of 0 or more, or an array of them"
        )
    return sizes


#: Names of types in messages.
WORDS: Mapping[Any, str] = {
    bool: "True or False",
    str: "text",
    int: "a whole number",
    float: "a number",
    Mapping: "a mapping",
    Callable: "a function",
    Sequence: "a sequence",
    tuple: "a sequence",
}
_HALF = re.compile("[\ud800-\udfff]")  # of a character, which no encoding of text writes


class _Hint(NamedTuple):
    """An annotation, taken apart."""

    kind: Any  # the class without its arguments, or the whole union
    arguments: tuple[Any, ...]
    kinds: tuple[Any, ...]  # the classes that are allowed, without None
    optional: bool  # whether None is allowed


@lru_cache
def _take_apart(hint: Any) -> _Hint:
    """An annotation by its parts; ``X | None`` counts as an X that is optional."""
    if isinstance(hint, UnionType):
        optional = NoneType in get_args(hint)
        alternatives = tuple(part for part in get_args(hint) if part is not NoneType)
        if len(alternatives) > 1:
            return _Hint(hint, (), alternatives, optional)
        (hint,) = alternatives
    else:
        optional = False
    kind = get_origin(hint) or hint
    return _Hint(kind, get_args(hint), (kind,), optional)


# Arguments are checked by hand: no library takes NumPy's numbers, fractions and infinities, refuses
# halves of characters, and says so in one line. Files are checked by `perfkit.ground.schemas`.
def coerce(name: str, value: Any, hint: Any) -> Any:
    """Return an argument as the type of an annotation, or raise an error that says what is allowed.

    Parameters
    ----------
    name : str
        Name of the argument, for errors.
    value : object
        The argument.
    hint : type
        A class, a number, a mapping or a sequence of such, or a union.

    Returns
    -------
    value : object
        Numbers as Python's, mappings as dicts and sequences as tuples where the annotation says of
        what they are; anything else unchanged.

    Raises
    ------
    ValueError
        For a value of another type.

    Examples
    --------
    >>> coerce("sizes", [np.int8(1), 2.0], Sequence[float])
    (1.0, 2.0)
    >>> coerce("sizes", [1, "2"], Sequence[float])
    Traceback (most recent call last):
    ...
    ValueError: sizes[1] is '2'; it must be a number
    """
    if isinstance(value, str):
        _check_text(name, value)
    if type(value) is hint:
        return value
    wanted = _take_apart(hint)
    if value is None and wanted.optional:
        return None
    if wanted.kind in (int, float):
        number = read_number(value)
        if wanted.kind is int and isinstance(number, int):
            return number
        if wanted.kind is float and number is not None and _fits_float(number):
            return float(number)
    elif wanted.kind is Mapping:
        if isinstance(value, Mapping):
            return _coerce_mapping(name, value, wanted.arguments)
    elif wanted.kind in (tuple, Sequence):
        if is_listed(value) and isinstance(value, Sequence | np.ndarray):
            return _coerce_sequence(name, value, wanted.arguments)
    elif isinstance(value, wanted.kind):
        return value
    words = [WORDS.get(kind, f"a {kind.__name__}") for kind in wanted.kinds]
    raise ValueError(f"{name} is {show(value)}; it must be {' or '.join(words)}")


def _check_text(name: str, text: str) -> None:
    """Refuse text with a half of a character."""
    if not text.isascii() and _HALF.search(text):
        raise ValueError(
            f"{name} is {show(text)}; it must be text of whole characters, which a file can hold"
        )


def _fits_float(number: int | float) -> bool:
    """Whether a number is infinite, not a number, or within the range of floats."""
    return not LARGEST_FLOAT < abs(number) < math.inf


def _coerce_mapping(
    name: str, value: Mapping[Any, Any], arguments: tuple[Any, ...]
) -> Mapping[Any, Any]:
    """A mapping as a dict of the types of an annotation."""
    if not arguments:
        return value
    key_hint, entry_hint = arguments
    key_name = f"a key of {name}"
    entries = {}
    for key, entry in value.items():
        key = coerce(key_name, key, key_hint)
        if type(entry) is not entry_hint or entry_hint is str:  # saves time with what is right
            entry = coerce(join_place(name, str(key)), entry, entry_hint)
        entries[key] = entry
    return entries


def _coerce_sequence(name: str, value: Any, arguments: tuple[Any, ...]) -> Any:
    """A sequence as a tuple of the type of an annotation."""
    if not arguments:
        return value
    count_values(name, value)
    return tuple(coerce(f"{name}[{i}]", entry, arguments[0]) for i, entry in enumerate(value))


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise an error for a value of another type that says what is allowed.

    Examples
    --------
    >>> check_type("slowdown", {0: 1.5}, Mapping[int, float])
    >>> check_type("slowdown", 5, Mapping[int, float] | None)
    Traceback (most recent call last):
    ...
    ValueError: slowdown is 5; it must be a mapping
    """
    coerce(name, value, hint)


class _Field(NamedTuple):
    """A field of a dataclass, with its name in errors and its annotation."""

    name: str
    place: str
    hint: Any


@lru_cache
def _list_fields(kind: Any) -> list[_Field]:
    """Fields of a dataclass, in their order."""
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)]
    return [_Field(name, f"{kind.__name__}.{name}", hints[name]) for name in names]


class Typed:
    """A dataclass that checks the types of its fields and keeps their numbers as Python's."""

    def __post_init__(self) -> None:
        kind: Any = type(self)  # which mypy takes for something that cannot be a key
        for field in _list_fields(kind):
            value = getattr(self, field.name)
            coerced = coerce(field.place, value, field.hint)
            if coerced is not value:
                set_fields(self, **{field.name: coerced})


def join_place(
    place: str, key: str, known: Sequence[str] = (), meant: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Dotted place of an entry in a table, with quotation marks around a key that is no plain word.

    If `known` names are given, any other key raises a ValueError: most likely it is misspelt. What a
    key of `meant` stands for is known, whatever name is spelt like it.
    """
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum() and len(key) < 80
    path = f"{place}.{key if plain else escape(json.dumps(key, ensure_ascii=False))}".removeprefix(
        "."
    )
    if known and key not in known:
        near = [meant[key]] if key in meant else get_close_matches(key, known, n=1)
        hints = [f"; did you mean {close}?" for close in near]
        raise ValueError(f"{path} is not known; known here are {', '.join(known)}{''.join(hints)}")
    return path
