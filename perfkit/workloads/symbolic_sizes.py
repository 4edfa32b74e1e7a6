"""Sizes that are not known yet: open ones, such as the batch of a workload, and expressions of them."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.units import Array
from perfkit.workloads.sizes import map_sizes, round_size

#: Functions of two operands, and how they are written between them.
_SYMBOLS: Mapping[Any, str] = {
    operator.mul: "*",
    operator.add: "+",
    operator.sub: "-",
    operator.floordiv: "//",
}


@dataclass(frozen=True)
class OpenSize:
    """A size that varies: it stands in a workload where its number or array is not known yet.

    Parameters
    ----------
    path : tuple of str or int
        Fields and indices that lead to it, such as ``("tables", 0, "pooling")``.
    """

    path: tuple[str | int, ...]

    @cached_property
    def name(self) -> str:
        """The path as it is written, such as ``tables[0].pooling``."""
        text = ""
        for key in self.path:
            text += f"[{key}]" if isinstance(key, int) else f".{key}"
        return text.removeprefix(".")

    def __str__(self) -> str:
        return self.name


class Share(NamedTuple):
    """An open size, by its name, and the number of equal parts it is cut into [-]."""

    name: str
    parts: int


class SymbolicSize:
    """A size that follows from open ones: row `number` of the expressions.

    Sums, products and floored quotients with it are further symbolic sizes.
    """

    __slots__ = ("expressions", "number")
    #: Numbers and arrays of NumPy leave sums and products with a symbolic size to it.
    __array_ufunc__ = None

    def __init__(self, expressions: "Expressions", number: int) -> None:
        self.expressions, self.number = expressions, number

    def __str__(self) -> str:
        return self.expressions.describe(self.number)

    def __repr__(self) -> str:
        return f"SymbolicSize({self})"

    def __mul__(self, other: Any) -> "SymbolicSize":
        if isinstance(other, int) and other == 1:
            return self
        return self.expressions.add(operator.mul, self, other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> "SymbolicSize":
        return self.expressions.add(operator.add, self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "SymbolicSize":
        return self.expressions.add(operator.sub, self, other)

    def __floordiv__(self, other: Any) -> "SymbolicSize":
        return self.expressions.add(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> "SymbolicSize":
        return self.expressions.add(operator.floordiv, other, self)

    def __round__(self) -> "SymbolicSize":
        return self.expressions.add(round_size, self)


class _Expression(NamedTuple):
    """A function, and what it is applied to: numbers, symbolic sizes, or tables that hold these."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]


def _find_operands(expression: _Expression, values: Sequence[Any]) -> list[Any]:
    """The operands of an expression with the values of symbolic sizes, by their numbers, in place of
    these."""
    operands = []
    for operand in expression.operands:
        if isinstance(operand, SymbolicSize):
            operands.append(values[operand.number])
        elif is_dataclass(operand):  # a table, of which some sizes are symbolic
            operands.append(map_sizes(operand, SymbolicSize, lambda size: values[size.number]))
        else:
            operands.append(operand)
    return operands


def _apply(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """The value of a function of numbers; a symbolic size if one of its operands is symbolic."""
    if function in _SYMBOLS or function is round_size:  # symbolic sizes have these themselves
        return function(*operands)
    for operand in operands:
        if isinstance(operand, SymbolicSize):
            return operand.expressions.add(function, *operands)
    return function(*operands)


class Expressions:
    """How all symbolic sizes of a structure follow from its open sizes; equal ones are one.

    Examples
    --------
    >>> expressions = Expressions()
    >>> batch, sequence = (expressions.open(OpenSize((name,))) for name in ("batch", "sequence"))
    >>> tokens = batch // 8 * sequence
    >>> tokens
    SymbolicSize((batch // 8) * sequence)
    >>> float(expressions.evaluate({"batch": 64, "sequence": 512})[tokens.number])
    4096.0
    """

    def __init__(self) -> None:
        self._rows: list[OpenSize | _Expression] = []
        self._known: dict[OpenSize | _Expression, SymbolicSize] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, size: OpenSize) -> SymbolicSize:
        """The symbolic size that is an open size itself."""
        return self._add(size)

    def add(self, function: Callable[..., Any], *operands: Any) -> SymbolicSize:
        """The symbolic size that a function finds from operands: numbers, symbolic sizes, and tables
        that hold such."""
        return self._add(_Expression(function, operands))

    def _add(self, row: OpenSize | _Expression) -> SymbolicSize:
        size = self._known.get(row)
        if size is None:
            size = SymbolicSize(self, len(self._rows))
            self._known[row] = size
            self._rows.append(row)
        return size

    def evaluate(self, sizes: Mapping[str, Any]) -> Array:
        """Find the values of all symbolic sizes.

        Parameters
        ----------
        sizes : mapping of str to int, float or array
            Values of the open sizes by name: numbers, or arrays over configurations [-].

        Returns
        -------
        values : array
            A number for each symbolic size, by its number; or a row over configurations [-].
        """
        values: list[Any] = []
        for row in self._rows:
            if isinstance(row, OpenSize):
                values.append(sizes[row.name])
            else:
                values.append(row.function(*_find_operands(row, values)))
        return np.array(values, dtype=float)

    def replace(self, sizes: Mapping[str, Any]) -> list[Any]:
        """Find what all symbolic sizes become if others take the place of the open ones.

        Parameters
        ----------
        sizes : mapping of str to int, float or SymbolicSize
            What takes the place of each open size, by its name: numbers, and symbolic sizes of
            other expressions [-].

        Returns
        -------
        values : list of int, float or SymbolicSize
            For each symbolic size, by its number [-].

        Examples
        --------
        >>> expressions, others = Expressions(), Expressions()
        >>> batch, pooling = (expressions.open(OpenSize((name,))) for name in ("batch", "pooling"))
        >>> lookups = batch * pooling
        >>> open_batch = others.open(OpenSize(("batch",)))
        >>> expressions.replace({"batch": open_batch, "pooling": 8})[lookups.number]
        SymbolicSize(batch * 8)
        """
        values: list[Any] = []
        for row in self._rows:
            if isinstance(row, OpenSize):
                values.append(sizes[row.name])
            else:
                values.append(_apply(row.function, _find_operands(row, values)))
        return values

    def list_shares(self) -> list[Share]:
        """Open sizes that ranks or micro-batches share evenly.

        Examples
        --------
        >>> expressions = Expressions()
        >>> batch = expressions.open(OpenSize(("batch",)))
        >>> of_a_rank = batch // 2 // 8
        >>> [share.parts for share in expressions.list_shares()]
        [2, 16]
        """
        found = [self._find_share(number) for number in range(len(self._rows))]
        return [share for share in found if share is not None and share.parts > 1]

    def _find_share(self, number: int) -> Share | None:
        """The share of an open size that the symbolic size of this number is: one part is all of
        it, and parts may be shared again; None for another size."""
        row = self._rows[number]
        if isinstance(row, OpenSize):
            return Share(row.name, 1)
        if row.function is not operator.floordiv:
            return None
        size, parts = row.operands
        if not (isinstance(size, SymbolicSize) and isinstance(parts, int)):
            return None
        whole = self._find_share(size.number)
        return None if whole is None else Share(whole.name, whole.parts * parts)

    def describe(self, number: int) -> str:
        """The symbolic size of this number as a formula of open sizes."""
        row = self._rows[number]
        if isinstance(row, OpenSize):
            return row.name
        texts = [self._describe_operand(operand) for operand in row.operands]
        symbol = _SYMBOLS.get(row.function)
        if symbol is None:
            return f"{row.function.__name__}({', '.join(texts)})"
        return f" {symbol} ".join(texts)

    def _describe_operand(self, operand: Any) -> str:
        if not isinstance(operand, SymbolicSize):
            return type(operand).__name__ if is_dataclass(operand) else repr(operand)
        text = self.describe(operand.number)
        row = self._rows[operand.number]
        is_infix = isinstance(row, _Expression) and row.function in _SYMBOLS
        return f"({text})" if is_infix else text
