"""Data sets that a program makes during a capture: their tensors have no contents, and data loaders
need some."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from perfkit.recording.values import compute

#: Assumption for data whose values are not known.
UNKNOWN_DATA = (
    "a data set that the program has made or read holds numbers that are not known, as they are computed or more than 16 "
    "million; they count as zeros"
)
#: Objects inside of each other that are looked through, and how many in all [-].
DEEPEST, MOST_OBJECTS = 8, 1_000_000


class _Search:
    """Replaces tensors without contents, in place, in all that an object holds.

    Parameters
    ----------
    note : callable
        Receives what is said of values that are not known.
    """

    def __init__(self, note: Callable[[str], Any]) -> None:
        self.found = 0  # how many tensors were replaced
        self._note = note
        self._seen: dict[int, Any] = {}  # objects by identity, which keeps them alive

    def replace(self, value: Any, depth: int = 0) -> Any:
        """A value with real tensors in place of others."""
        if isinstance(value, FakeTensor):
            self.found += 1
            return self._make(value)
        if isinstance(value, str | bytes | int | float | torch.Tensor | nn.Module | type):
            return value
        if depth > DEEPEST or id(value) in self._seen or len(self._seen) > MOST_OBJECTS:
            return value
        self._seen[id(value)] = value
        if isinstance(value, tuple):
            made = [self.replace(each, depth + 1) for each in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        if isinstance(value, list):
            value[:] = [self.replace(each, depth + 1) for each in value]
        elif isinstance(value, dict):
            value.update({key: self.replace(each, depth + 1) for key, each in value.items()})
        elif isinstance(getattr(value, "__dict__", None), dict):
            self.replace(vars(value), depth)
        return value

    def _make(self, tensor: FakeTensor) -> torch.Tensor:
        """A real tensor with the known values of another one, or with zeros."""
        known = tensor.constant
        if known is not None:
            return compute(known.clone)
        self._note(UNKNOWN_DATA)
        made: torch.Tensor = compute(torch.zeros, tuple(tensor.shape), dtype=tensor.dtype)
        return made


def make_real(data: Any, note: Callable[[str], Any]) -> bool:
    """Give contents to all tensors that a data set holds, and say whether there were any without.

    Parameters
    ----------
    data : object
        A data set, or any object; it is changed.
    note : callable
        Receives what is said of values that are not known.

    Examples
    --------
    >>> make_real([1, 2], print)
    False
    """
    search = _Search(note)
    search.replace(data)
    return search.found > 0
