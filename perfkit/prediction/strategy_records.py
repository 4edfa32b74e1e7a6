"""Records of many strategies: NamedTuples of arrays with one element for each strategy, and what is
done with all arrays of such a record at once."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from perfkit.ground.units import Array

#: Regions of a model, in the order of its forward pass, as modules of a recorded graph are named.
REGIONS = ("embeddings", "layers", "head")
#: Keeps ratios of times finite where both are zero; far below any time of a kernel [s].
SMALLEST_TIME = 1e-30

Record = TypeVar("Record", bound=tuple[Any, ...])
Quantity = TypeVar("Quantity")


class Work(NamedTuple):
    """Kernels on a device, and the calls of its host that launch them.

    Parameters
    ----------
    device, host : array
        Time of the kernels, and of the calls [s].
    """

    device: Array
    host: Array


class ByRegion(NamedTuple, Generic[Quantity]):
    """A quantity of each region of a model, in the order of `REGIONS`.

    Parameters
    ----------
    embeddings, layer, head : object
        Of the embeddings, of one layer, and of the head.
    """

    embeddings: Quantity
    layer: Quantity
    head: Quantity


class Group(NamedTuple):
    """Strategies that were priced together.

    Parameters
    ----------
    members : array of int, shape (strategies of the group,)
        Their positions among all strategies [-].
    rows : array of int, shape (strategies of the group,)
        Which element of the record each of them has; those of equal sizes share one [-].
    record : NamedTuple
        What was found: arrays of equal length, and numbers that all of them share.
    """

    members: np.ndarray
    rows: np.ndarray
    record: Any


def map_arrays(function: Callable[..., Any], *records: Record) -> Record:
    """Apply a function to the arrays of records of one type, field by field.

    Parameters
    ----------
    function : callable
        Takes one array of each record, and returns an array.
    records : NamedTuple
        One or several; their fields are arrays or such records themselves.

    Returns
    -------
    record : NamedTuple
        Of the same type.

    Examples
    --------
    >>> map_arrays(max, Work(1.0, 2.0), Work(0.5, 2.25))
    Work(device=1.0, host=2.25)
    """
    values = []
    for fields in zip(*records, strict=True):
        if isinstance(fields[0], tuple):
            values.append(map_arrays(function, *fields))
        else:
            values.append(function(*fields))
    return type(records[0])(*values)


def select(record: Record, chosen: np.ndarray, count: int) -> Record:
    """Take some of many strategies.

    Parameters
    ----------
    record : NamedTuple
        Arrays with an element for each strategy, or numbers that all of them share.
    chosen : array of int
        Positions of strategies [-].
    count : int
        Strategies of the record [-].

    Returns
    -------
    record : NamedTuple
        Arrays with an element for each chosen strategy.
    """
    return map_arrays(lambda values: np.broadcast_to(values, count)[chosen], record)


def join_groups(groups: Sequence[Group], count: int) -> Any:
    """Join what was found for groups of strategies.

    Parameters
    ----------
    groups : sequence of Group
        Together they hold each strategy once.
    count : int
        All strategies [-].

    Returns
    -------
    record : NamedTuple
        Of the type of their records, with an element of each array for each strategy.
    """

    def join(*arrays: Array) -> Array:
        joined = np.zeros(count)
        for group, values in zip(groups, arrays, strict=True):
            joined[group.members] = values[group.rows] if np.ndim(values) else values
        return joined

    return map_arrays(join, *(group.record for group in groups))
