"""Sizes of a workload: numbers, or arrays over configurations; how they are checked and replaced."""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import is_dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from perfkit.ground.units import LARGEST, check_positive, read_numbers, show


class SizesError(ValueError):
    """Sizes that are arrays, and not allowed for some configurations.

    Parameters
    ----------
    invalid : array of bool
        Whether the sizes of each configuration are refused [-].
    describe : callable
        The reason, from the sizes of one configuration.
    *sizes : int, float or array
        What `describe` takes: numbers, or arrays with one for each configuration [-].
    """

    def __init__(self, invalid: np.ndarray, describe: Callable[..., str], *sizes: Any) -> None:
        self.invalid = invalid
        self._describe = describe
        self._sizes = np.broadcast_arrays(invalid, *sizes)[1:]
        refused = np.flatnonzero(invalid)
        count = f"{len(refused)} of {len(invalid)} configurations are refused"
        super().__init__(f"{self.find_reason(int(refused[0]))}; {count}")

    def __reduce__(self) -> tuple[type[ValueError], tuple[str]]:
        """Between processes it is a ValueError of the same words, as functions do not travel."""
        return ValueError, (str(self),)

    def find_reason(self, index: int) -> str:
        """Why one configuration is refused, in the words of a configuration whose sizes are
        numbers."""
        sizes = (values[index] for values in self._sizes)
        # a number above those of NumPy's types is a Python number already
        numbers = (size.item() if isinstance(size, np.generic) else size for size in sizes)
        return self._describe(*numbers)


def refuse_sizes(invalid: Any, describe: Callable[..., str], *sizes: Any) -> None:
    """Raise an error for sizes that are not allowed.

    Parameters
    ----------
    invalid : bool or array of bool
        Whether they are not allowed; an array says it of each configuration.
    describe : callable
        The reason, from the sizes of one configuration.
    *sizes : int, float or array
        What `describe` takes: numbers, or arrays with one for each configuration [-].

    Raises
    ------
    ValueError
        If `invalid`; a `SizesError` if it is an array and true for some configurations.

    Examples
    --------
    >>> def describe(heads, hidden):
    ...     return f"heads is {heads}; it must divide hidden, {hidden}"
    >>> heads, hidden = np.array([8, 12, 16]), np.array([512, 512, 500])
    >>> refuse_sizes(hidden % heads > 0, describe, heads, hidden)
    Traceback (most recent call last):
    ...
    perfkit.workloads.sizes.SizesError: heads is 12; it must divide hidden, 512; 2 of 3 configurations are refused
    """
    if not np.any(invalid):
        return
    if isinstance(invalid, np.ndarray) and invalid.ndim:
        raise SizesError(invalid, describe, *sizes)
    raise ValueError(describe(*sizes))


def check_size(name: str, value: Any, maximum: float | None = None) -> Any:
    """Check a size: a whole number above 0, or an array of them with one for each configuration.

    Raises
    ------
    ValueError
        For other numbers and types; a `SizesError` says it of each configuration of an array of
        numbers.

    Examples
    --------
    >>> check_size("batch", 8.0), check_size("batch", np.array([8, 16]))
    (8, array([ 8., 16.]))
    """
    return _check(name, value, integer=True, maximum=maximum)


def check_number(name: str, value: Any) -> Any:
    """Check a number above 0, or an array of them with one for each configuration.

    Raises
    ------
    ValueError
        As `check_size` does.

    Examples
    --------
    >>> check_number("pooling", np.array([0.5, 20]))
    array([ 0.5, 20. ])
    """
    return _check(name, value, integer=False, maximum=None)


def _check(name: str, value: Any, *, integer: bool, maximum: float | None) -> Any:
    """A checked number, or a checked array of floats."""
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        return check_positive(name, value, integer=integer, maximum=maximum)
    if value.ndim > 1:
        raise ValueError(
            f"{name} has the shape {value.shape}; it must be a number, or one for each configuration"
        )
    sizes = read_numbers(value)
    if sizes is None or value.dtype.kind == "b":
        raise ValueError(f"{name} is {show(value)}; it must be a number, or an array of numbers")
    if not sizes.size:
        raise ValueError(f"{name} is an empty array; it must be a number for each configuration")

    def describe(size: float) -> str:
        """The reason for which `check_positive` refuses a number."""
        try:
            check_positive(name, size, integer=integer, maximum=maximum)
        except ValueError as error:
            return str(error)
        return f"{name} is {size}"

    largest = LARGEST if maximum is None else maximum
    is_allowed = (sizes > 0) & (sizes <= largest)
    if integer:
        is_allowed &= np.floor(sizes) == sizes
    refuse_sizes(~is_allowed, describe, value)
    return sizes


def check_ranks(batch: Any, ranks: Any, plan: Any = None, micro: int = 1) -> int:
    """Check that the ranks are a whole number that divides the batch; a workload without tables
    takes no plan.

    Parameters
    ----------
    batch : int or array
        Samples of one iteration over all ranks [-].
    ranks : int
        Ranks [-].
    plan : None
        Anything else is refused.
    micro : int
        Micro-batches of a rank [-].

    Returns
    -------
    ranks : int
        The same number [-].

    Raises
    ------
    ValueError
        If the batch does not divide by the ranks or a plan is given.
    """
    ranks = int(check_positive("ranks", ranks, integer=True))
    if plan is not None:
        raise ValueError("plan is given; this workload has no tables to place; leave it out")
    whole = ranks * micro
    parts = f"{ranks} ranks"
    if micro > 1:
        parts += f" with {micro} micro-batches each"
    refuse_sizes(
        batch % whole != 0,
        lambda size: (
            f"batch is {int(size)}; it must divide by the {parts}; take a multiple of {whole}"
        ),
        batch,
    )
    return ranks


def alter(value: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a workload or graph with other values in some fields; its constructor does not
    check them again. What was computed from the former values is not kept."""
    part = copy(value)
    for name in _list_computed(value.__class__):
        vars(part).pop(name, None)
    vars(part).update(changes)
    return part


def list_fields(value: Any) -> dict[str, Any]:
    """What a workload or graph holds by name, without what it has computed from that."""
    computed = _list_computed(value.__class__)
    return {name: part for name, part in vars(value).items() if name not in computed}


@lru_cache(maxsize=256)
def _list_computed(kind: type) -> frozenset[str]:
    """Names of the values of a class that it computes once."""
    members = [item for owner in kind.__mro__ for item in vars(owner).items()]
    return frozenset(name for name, member in members if isinstance(member, cached_property))


def map_sizes(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A workload in which `change` replaces all values of one kind, also in its tuples and
    dataclasses."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_sizes(part, kind, change) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {name: map_sizes(part, kind, change) for name, part in list_fields(value).items()}
    return alter(value, changes)


def select_sizes(value: Any, index: Any) -> Any:
    """A workload with the sizes of some of its configurations; with numbers if `index` is that of
    one."""

    def select(sizes: np.ndarray) -> Any:
        part = sizes[index]
        if part.ndim:
            return part
        return int(part) if part == int(part) else float(part)

    return map_sizes(value, np.ndarray, select)


def count_configurations(value: Any) -> int:
    """Number of configurations of a workload whose sizes are arrays; 0 if all sizes are numbers.

    Raises
    ------
    ValueError
        For arrays of different lengths or with several axes.
    """
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise ValueError(
                f"a size has the shape {value.shape}; it must be a number, or one for each configuration"
            )
        return len(value)
    parts: Iterable[Any] = ()
    if isinstance(value, tuple):
        parts = value
    elif is_dataclass(value):
        parts = list_fields(value).values()
    counts_of_parts = set[int]()
    for part in parts:
        if not isinstance(part, str | int | float):
            counts_of_parts.add(count_configurations(part))
    counts_of_parts.discard(0)
    if len(counts_of_parts) > 1:
        counts = " and ".join(map(str, sorted(counts_of_parts)))
        raise ValueError(f"sizes are of {counts} configurations; give equally many of each")
    return counts_of_parts.pop() if counts_of_parts else 0


def round_size(value: Any) -> Any:
    """The nearest whole number of a size: a number, an array, or a symbolic size.

    Examples
    --------
    >>> round_size(2**70) == 2**70, round_size(2.5), round_size(np.array([2.5, 3.5]))
    (True, 2, array([2., 4.]))
    """
    return np.rint(value) if isinstance(value, np.ndarray) else round(value)
