"""Choices among alternatives by computed scores, such as experts of tokens: every alternative counts as
chosen equally often."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from perfkit.workloads.vocabulary import walk_tensors

#: Operations whose results hold numbers of alternatives if what they are given does.
_PASSING_NUMBERS = frozenset(
    ["clone", "_to_copy", "select", "slice", "index", "gather", "cat", "stack", "sort", "repeat"]
)
#: Operations whose results hold as large a share of ones as what they are given.
_PASSING_SHARES = frozenset(["clone", "_to_copy", "select", "slice", "index", "eq", "gt", "ge"])
#: Operations that write ones at chosen places.
_SPREADING = ("scatter", "scatter_")
#: Operations that ask whether a number is larger, and whether the chosen ones are.
_ORDERING = {"gt": True, "ge": True, "lt": False, "le": False}


def balance(total: int, count: int) -> list[int]:
    """Whole numbers that differ by one at most, the larger ones first.

    Parameters
    ----------
    total, count : int
        Their sum, and how many there are [-].

    Examples
    --------
    >>> balance(10, 4)
    [3, 3, 2, 2]
    """
    least, rest = divmod(total, max(count, 1))
    return [least + (place < rest) for place in range(count)]


class Choices:
    """What is known of choices by computed scores, by the number of a storage.

    Parameters
    ----------
    number : callable
        Gives the number of the storage of a tensor.
    """

    def __init__(self, number: Callable[[Tensor], int]) -> None:
        # a cycle of references would keep its storages alive
        self._number: Any = weakref.WeakMethod(number)
        self._alternatives: dict[int, int] = {}  # of numbers below this one
        self._shares: dict[int, float] = {}  # of entries that are true or one
        self._thresholds: dict[int, float] = {}  # of entries at or above the least chosen one

    def find_share(self, tensor: Any) -> float | None:
        """Share of the entries of a tensor that are true or one; None if it is not known."""
        return self._find(self._shares, tensor)

    def find_alternatives(self, tensor: Any) -> int | None:
        """Number of alternatives whose numbers a tensor holds; None if it holds others."""
        return self._find(self._alternatives, tensor)

    def _find(self, kept: dict[int, Any], tensor: Any) -> Any:
        if not kept or not isinstance(tensor, Tensor):
            return None
        return kept.get(self._number()(tensor))

    def follow(self, name: str, args: Sequence[Any], given: Sequence[Tensor], out: Any) -> None:
        """Note what a result says of choices.

        Parameters
        ----------
        name : str
            Name of the operation.
        args : sequence
            Its arguments, with defaults.
        given : sequence of Tensor
            Tensors among them.
        out : Tensor or sequence of Tensor
            Its result.
        """
        results = [*walk_tensors(out)]
        if not results:
            return
        if name in ("topk", "argmax", "argmin", "multinomial"):
            self._begin(name, args, results)
            return
        if name in _SPREADING and self.find_alternatives(args[2]) is not None:
            share = args[2].numel() / max(results[0].numel(), 1)
            self._shares[self._number()(results[0])] = share
            return
        # of an index or a gather, what is chosen from, and not the places
        sources = [*walk_tensors(args[0])]
        alternatives = [self.find_alternatives(tensor) for tensor in sources]
        chosen = [number for number in alternatives if number is not None]
        if chosen and len(chosen) == len(sources):
            self._follow_numbers(name, args, results, min(chosen))
            return
        shares = [(tensor.numel(), self.find_share(tensor)) for tensor in sources]
        known = [(count, share) for count, share in shares if share is not None]
        if known:
            share = self._follow_shares(name, known, len(known) == len(shares))
            if share is not None:
                self._shares[self._number()(results[-1])] = share
        elif name in ("max", "min", "sort") and len(results) == 2:
            self._alternatives[self._number()(results[1])] = max(args[0].shape[args[1]], 1)
        elif name in _ORDERING and len(given) == 2:
            threshold = self._find(self._thresholds, given[1])
            if threshold is not None:
                share = threshold if _ORDERING[name] else 1 - threshold
                self._shares[self._number()(results[0])] = share

    def _begin(self, name: str, args: Sequence[Any], results: list[Tensor]) -> None:
        """Note the numbers of chosen alternatives, and the least score of those."""
        dim = args[1]
        if name == "topk":
            dim = args[2]
        elif name == "multinomial":
            dim = -1
        count = max(args[0].numel() if dim is None else args[0].shape[dim], 1)
        self._alternatives[self._number()(results[-1])] = count
        if name == "topk":
            self._thresholds[self._number()(results[0])] = args[1] / count

    def _follow_numbers(
        self,
        name: str,
        args: Sequence[Any],
        results: list[Tensor],
        count: int,
    ) -> None:
        """Note what follows from numbers of alternatives."""
        number = self._number()
        if name in _PASSING_NUMBERS:
            # of a sort the numbers, and not their places
            self._alternatives[number(results[0])] = count
        elif name in ("eq", "ne"):
            share = 1 / count
            self._shares[number(results[0])] = share if name == "eq" else 1 - share
        elif name in _ORDERING and isinstance(args[1], int | float):
            below = args[1] + (name in ("le", "gt"))
            share = min(max(below / count, 0.0), 1.0)
            self._shares[number(results[0])] = 1 - share if _ORDERING[name] else share

    def _follow_shares(
        self, name: str, known: Sequence[tuple[int, float]], complete: bool
    ) -> float | None:
        """The share of ones of a result; None if it does not follow. `known` are numbers of entries
        and shares, and `complete` says whether they are those of all arguments."""
        least = min(share for _, share in known)
        if name in ("sum", "any", "amax"):  # every alternative is chosen at least once
            return 1.0
        if name in ("bitwise_not", "logical_not"):
            return 1 - least
        if name == "cat" and complete:
            ones = sum(count * share for count, share in known)
            return ones / max(sum(count for count, _ in known), 1)
        return least if name in _PASSING_SHARES else None

    def count(self, name: str, args: Sequence[Any], out: Any) -> Tensor | None:
        """How often each alternative is chosen, as a real tensor; None where this is not asked.

        Parameters
        ----------
        name : str
            Name of the operation.
        args : sequence
            Its arguments, with defaults.
        out : Tensor, optional
            Its result without values, where PyTorch gives one.
        """
        if name == "bincount" and args[1] is None:
            count = self.find_alternatives(args[0])
            if count is None:
                return None
            numbers = balance(args[0].numel(), count) + [0] * max(args[2] - count, 0)
            return torch.tensor(numbers)
        if name == "histc":
            count = self.find_alternatives(args[0])
            # a bin for each alternative: from the first to the last one, or to what is behind it
            if (
                count is None
                or args[1] != count
                or args[2] != 0
                or args[3] not in (count - 1, count)
            ):
                return None
            return torch.tensor(balance(args[0].numel(), count), dtype=out.dtype)
        if name == "_unique2":
            count = self.find_alternatives(args[0])
            return None if count is None else torch.arange(count, dtype=args[0].dtype)
        # of one number it may be an accuracy, and not a number of rows
        if name == "sum" and isinstance(out, Tensor) and out.numel() > 1:
            share = self.find_share(args[0])
            total = None if share is None else round(share * args[0].numel())
            if total is None or total < out.numel():
                return None
            numbers = balance(total, out.numel())
            return torch.tensor(numbers, dtype=out.dtype).view(out.shape)
        return None
