"""Stand-ins for sizes: operations that differ in nothing but sizes are recorded once."""

from collections.abc import Sequence
from typing import Any

from perfkit.workloads.sizes import alter, map_sizes
from perfkit.workloads.symbolic_sizes import Expressions, OpenSize, SymbolicSize
from perfkit.workloads.tables import EmbeddingTable

#: Fields of a table that no operation but its own depends on.
_OF_TABLE = ("rows", "pooling", "exponent", "law")


class StandIns:
    """Symbolic sizes that stand in place of others while operations are recorded.

    Examples
    --------
    >>> stand_ins = StandIns()
    >>> small, large = EmbeddingTable(1000, 16, pooling=2), EmbeddingTable(9000, 16, pooling=4)
    >>> table = stand_ins.open_table(small)
    >>> weights = table.rows * table.dim
    >>> [stand_ins.find_values([table], [of_rank])[weights.number] for of_rank in (small, large)]
    [16000, 144000]
    """

    def __init__(self) -> None:
        self._expressions = Expressions()
        self._replaced: dict[str, SymbolicSize] = {}  # sizes that are symbolic themselves, by name
        self._known: dict[SymbolicSize, SymbolicSize] = {}

    def open_symbolic(self, value: Any) -> Any:
        """A workload or a table with stand-ins in place of its symbolic sizes."""
        return map_sizes(value, SymbolicSize, self._open_symbolic)

    def _open_symbolic(self, size: SymbolicSize) -> SymbolicSize:
        """The stand-in of a symbolic size."""
        if size not in self._known:
            opened = OpenSize(("symbolic", size.number))
            self._replaced[opened.name] = size
            self._known[size] = self._expressions.open(opened)
        return self._known[size]

    def open_table(self, table: EmbeddingTable) -> EmbeddingTable:
        """A table with stand-ins in place of its rows, lookups and law, which differ from those of
        every other table, and of its columns if these are symbolic."""
        number = len(self._expressions)
        opened: dict[str, Any] = {
            name: self._expressions.open(OpenSize(("tables", number, name))) for name in _OF_TABLE
        }
        opened["dim"] = self.open_symbolic(table.dim)
        return alter(table, opened)

    def find_values(
        self, opened: Sequence[EmbeddingTable], tables: Sequence[EmbeddingTable]
    ) -> list[Any]:
        """Find what stands in place of all stand-ins and what was computed from them.

        Parameters
        ----------
        opened : sequence of EmbeddingTable
            What `open_table` returned.
        tables : sequence of EmbeddingTable
            The tables to take in their places.

        Returns
        -------
        values : list
            By the number of a symbolic size: a number, a law, or a symbolic size.
        """
        values: dict[str, Any] = dict(self._replaced)
        for stand_in, table in zip(opened, tables, strict=True):
            for name in _OF_TABLE:
                size = vars(stand_in)[name]
                values[self._expressions.describe(size.number)] = vars(table)[name]
        return self._expressions.replace(values)
