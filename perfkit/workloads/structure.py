"""The structure of an iteration: recorded once, and filled with the sizes of each configuration.

A batch of 8 and one of 9 run the same operations, of which only some sizes differ. What is recorded
is therefore a `Structure`:

- its *open sizes* are fields of the workload that may vary, such as ``batch`` and ``sequence``;
- its *expressions* say how other sizes follow from them, such as ``(batch // 8) * sequence``;
- its *graphs* are those of the ranks. In place of each size they hold the row of a table of sizes,
  and such a row is a fixed number or one of the expressions.

`Structure.fill` takes numbers for the open sizes and returns graphs with numbers: so does `predict`.
A sweep fills the tables of sizes for all its configurations at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np

from perfkit.ground.units import Array, check_positive, check_type, show
from perfkit.workloads.columns import Accesses, Features
from perfkit.workloads.graph import Graph
from perfkit.workloads.sizes import alter, count_configurations, list_fields, map_sizes
from perfkit.workloads.symbolic_sizes import Expressions, OpenSize, SymbolicSize
from perfkit.workloads.tables import EmbeddingTable

#: Properties of a graph that do not depend on its sizes, and which all graphs of a structure share.
_SHARED = ("classes", "collectives", "transfers", "collective_waits", "segments")


class SizeTable:
    """The different sizes of a graph, in rows: fixed numbers, arrays over configurations, and
    symbolic sizes. The first row is zero.

    Examples
    --------
    >>> table = SizeTable()
    >>> [table.add(size) for size in (0, 1024, 2, 1024.0)]
    [0, 1, 2, 1]
    >>> table.fill().tolist()
    [0.0, 1024.0, 2.0]
    """

    def __init__(self) -> None:
        self._sizes: list[Any] = [0.0]
        self._rows: dict[Any, int] = {0.0: 0}
        self._rows_of_arrays: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, row: int) -> Any:
        return self._sizes[row]

    def add(self, size: Any) -> int:
        """The row of a size; a new one if the table does not hold it yet."""
        if isinstance(size, np.ndarray):
            row = self._rows_of_arrays.setdefault(id(size), len(self._sizes))
        else:
            row = self._rows.setdefault(size, len(self._sizes))
        if row == len(self._sizes):
            self._sizes.append(size)
        return row

    def add_all(self, sizes: Iterable[Any]) -> list[int]:
        """The row of each size."""
        rows = []
        for size in sizes:
            try:
                row = self._rows.get(size)  # most sizes of an operation are zero or known
            except TypeError:  # arrays are no keys
                row = None
            rows.append(self.add(size) if row is None else row)
        return rows

    def replace(self, values: Sequence[Any]) -> "SizeTable":
        """A table with as many rows, in which each symbolic size is replaced by the value of its
        number."""
        table = SizeTable()
        table._sizes = [
            values[size.number] if isinstance(size, SymbolicSize) else size for size in self._sizes
        ]
        for row, size in enumerate(table._sizes):
            table._rows.setdefault(size, row)
        return table

    @cached_property
    def is_symbolic(self) -> np.ndarray:
        """Whether each row is a symbolic size; to be asked for when all rows are there."""
        return np.array([isinstance(size, SymbolicSize) for size in self._sizes])

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Number of each symbolic size among the expressions."""
        sizes = [size.number for size in self._sizes if isinstance(size, SymbolicSize)]
        return np.array(sizes, dtype=np.intp)

    @cached_property
    def _fixed(self) -> Array:
        """The fixed number of each row; arrays have another axis, and symbolic sizes are 0."""
        known = [0.0 if isinstance(size, SymbolicSize) else size for size in self._sizes]
        shape = np.broadcast_shapes(*(size.shape for size in known if isinstance(size, np.ndarray)))
        fixed = np.empty((len(known), *shape))
        for row, size in enumerate(known):
            fixed[row] = size
        return fixed

    def fill(self, values: Array | None = None) -> Array:
        """The number of each row.

        Parameters
        ----------
        values : array, optional
            Values of all symbolic sizes, see
            `perfkit.workloads.symbolic_sizes.Expressions.evaluate`; needed if the table has such.

        Returns
        -------
        sizes : array
            A number for each row, or a row over configurations [-].
        """
        if values is None:
            return self._fixed
        configurations = np.ones(values.shape[1:])
        sizes = np.multiply.outer(self._fixed, configurations)
        sizes[self.is_symbolic] = values[self._numbers]
        return np.asarray(sizes)


@dataclass(frozen=True, eq=False)
class OpenGraph:
    """The operations of a rank without their sizes, which a table holds.

    Parameters
    ----------
    frame : Graph
        The graph but for its features and the bytes of its accesses.
    sizes : SizeTable
        The different sizes.
    features : Features
        For each feature and operation, a row of the table in place of the number.
    accesses : Accesses
        Which operation reads or writes which tensor; in place of the bytes, a row of the table.
    """

    frame: Graph
    sizes: SizeTable
    features: Features
    accesses: Accesses

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]:
        """Embedding tables of the rank; their sizes may be symbolic."""
        return self.frame.tables

    def replace_sizes(
        self, values: Sequence[Any], tables: tuple[EmbeddingTable, ...]
    ) -> "OpenGraph":
        """The same operations with other sizes.

        Parameters
        ----------
        values : sequence
            What takes the place of each symbolic size, by its number, see
            `perfkit.workloads.symbolic_sizes.Expressions.replace`.
        tables : tuple of EmbeddingTable
            Embedding tables of the rank.

        Returns
        -------
        graph : OpenGraph
            It shares all that does not depend on sizes.
        """
        parameters: Any = self.frame.parameters
        if isinstance(parameters, SymbolicSize):
            parameters = values[parameters.number]
        frame = replace(self.frame, tables=tables, parameters=parameters)
        self._share(frame)
        graph = replace(self, frame=frame, sizes=self.sizes.replace(values))
        vars(graph)["_feature_rows"] = self._feature_rows
        return graph

    def _share(self, graph: Graph) -> None:
        """Let a graph of the same operations have what does not depend on sizes."""
        for name in _SHARED:
            vars(graph)[name] = getattr(self.frame, name)

    def fill(self, values: Array | None = None) -> Graph:
        """The graph with numbers.

        Parameters
        ----------
        values : array, optional
            A number for each symbolic size, see
            `perfkit.workloads.symbolic_sizes.Expressions.evaluate`.

        Returns
        -------
        graph : Graph
            Features and bytes are numbers, or arrays if the table of sizes holds arrays.
        """
        sizes = self.sizes.fill(values)
        accesses = Accesses(
            operation=self.accesses.operation,
            buffer=self.accesses.buffer,
            nbytes=sizes[self.accesses.nbytes],
            is_write=self.accesses.is_write,
        )
        tables = self.frame.tables
        if self._has_symbolic_tables:
            tables = self.fill_tables(values)
        graph = replace(
            self.frame,
            features=Features(*sizes[self._feature_rows]),
            accesses=accesses,
            tables=tables,
        )
        self._share(graph)
        return graph

    @cached_property
    def _feature_rows(self) -> np.ndarray:
        """The rows of all features in one array, which has a row for each feature."""
        return np.array([*vars(self.features).values()])

    def fill_tables(self, values: Array | None) -> tuple[EmbeddingTable, ...]:
        """The embedding tables with numbers, or arrays over configurations, in place of symbolic
        sizes."""
        if not self._has_symbolic_tables:
            return self.tables
        filled = map_sizes(self.tables, SymbolicSize, lambda size: values[size.number])  # type: ignore[index]
        return tuple(filled)

    @cached_property
    def _has_symbolic_tables(self) -> bool:
        sizes = [size for table in self.tables for size in list_fields(table).values()]
        return any(isinstance(size, SymbolicSize) for size in sizes)

    def describe(self, operation: int) -> dict[str, str]:
        """The sizes of an operation that are not zero: numbers, and formulas of open sizes.

        Parameters
        ----------
        operation : int
            Its position [-].

        Returns
        -------
        sizes : dict of str to str
            By the names of `perfkit.workloads.columns.FEATURES`.
        """
        texts = {}
        for name, rows in vars(self.features).items():
            size = self.sizes[rows[operation]]
            if isinstance(size, SymbolicSize):
                texts[name] = str(size)
            elif size != 0:
                texts[name] = f"{float(size):.15g}"
        return texts


@dataclass(frozen=True, eq=False)
class Structure:
    """What all configurations of a workload have in common that differ in nothing but open sizes.

    Parameters
    ----------
    open_sizes : tuple of OpenSize
        What varies.
    expressions : Expressions
        How other sizes follow from these.
    graphs : tuple of OpenGraph
        What each rank executes; ranks that do the same share one.

    Examples
    --------
    >>> from perfkit.workloads.transformer import Transformer
    >>> structure = Transformer.bert(batch=64, sequence=512).structure(8)
    >>> [str(size) for size in structure.open_sizes]
    ['batch', 'sequence']
    >>> operations = structure.graphs[0].frame.labels
    >>> product = next(n for n, label in enumerate(operations) if label.kind == "gemm")
    >>> sizes = structure.graphs[0].describe(product)
    >>> sizes["m"], sizes["n"], sizes["k"]
    ('(batch // 8) * sequence', '768', '768')
    >>> graphs = structure.fill({"batch": 128, "sequence": 256})
    >>> int(graphs[0].features.m[product])
    4096
    """

    open_sizes: tuple[OpenSize, ...]
    expressions: Expressions
    graphs: tuple[OpenGraph, ...]

    def fill(self, sizes: Mapping[str, float]) -> tuple[Graph, ...]:
        """The graphs of one configuration.

        Parameters
        ----------
        sizes : mapping of str to int or float
            A number for each open size, by its name [-].

        Returns
        -------
        graphs : tuple of Graph
            One per rank; ranks that do the same share one.

        Raises
        ------
        ValueError
            For a size that is missing, not open or not above zero, and for one that ranks cannot
            share evenly. Other limits are those of the workload, such as its number of positions:
            only its method `graphs` checks them.
        """
        self._check(sizes)
        return self.fill_checked(sizes)

    def fill_checked(self, sizes: Mapping[str, float]) -> tuple[Graph, ...]:
        """The graphs of one configuration whose sizes are right, such as those of a workload, which
        has checked them."""
        values = self.expressions.evaluate(sizes)
        filled = {graph: graph.fill(values) for graph in dict.fromkeys(self.graphs)}
        return tuple(filled[graph] for graph in self.graphs)

    def _check(self, sizes: Mapping[str, float]) -> None:
        """Refuse sizes of which a graph would be wrong."""
        check_type("sizes", sizes, Mapping)
        names = [size.name for size in self.open_sizes]
        if {*sizes} != {*names}:
            raise ValueError(
                f"sizes are given for {', '.join(map(show, sizes)) or 'nothing'}; open are "
                f"{', '.join(names)}; give a number for each of these"
            )
        for name, size in sizes.items():
            check_positive(f"size {name}", size)
        for share in self.expressions.list_shares():
            size = sizes[share.name]
            if size % share.parts != 0:
                raise ValueError(
                    f"size {share.name} is {show(size)}; it is shared in {share.parts} parts; give a "
                    f"multiple of {share.parts}"
                )

    def read_sizes(self, workload: Any) -> dict[str, Any]:
        """The open sizes of a workload of this structure, by name: numbers, or arrays over
        configurations [-]."""
        sizes = {}
        for size in self.open_sizes:
            value = workload
            for key in size.path:
                value = value[key] if isinstance(key, int) else getattr(value, key)
            sizes[size.name] = value
        return sizes


#: Records the graphs of a workload, some of whose sizes may be symbolic, on each rank.
Record: TypeAlias = Callable[..., Iterable[OpenGraph]]


def record_structure(
    record: Record, workload: Any, fields: tuple[str, ...], *options: Any
) -> Structure:
    """Find the structure of a workload, which is recorded at the first time.

    Parameters
    ----------
    record : callable
        Takes a workload and the options, and returns a graph for each rank.
    workload : Transformer or DLRM
        The workload. All its sizes that are arrays are open.
    fields : tuple of str
        Fields that are open in any case.
    *options : int, bool or Plan
        What else the operations depend on, such as the number of ranks [-].

    Returns
    -------
    structure : Structure
        Workloads that differ in nothing but open sizes have the same one.
    """
    opened = alter(workload, {name: OpenSize((name,)) for name in fields})
    if count_configurations(opened):
        opened = _open_arrays(opened, (), {})
    return _record(record, opened, *options)


def _open_arrays(value: Any, path: tuple[str | int, ...], known: dict[int, OpenSize]) -> Any:
    """The value of a field in which open sizes stand in place of arrays; the same one for the same
    array."""
    if isinstance(value, np.ndarray):
        return known.setdefault(id(value), OpenSize(path))
    if isinstance(value, OpenSize):
        return value
    if isinstance(value, tuple):
        return tuple(_open_arrays(part, (*path, index), known) for index, part in enumerate(value))
    if is_dataclass(value):
        opened = {
            name: _open_arrays(part, (*path, name), known)
            for name, part in list_fields(value).items()
        }
        return alter(value, opened)
    return value


@lru_cache(maxsize=128)
def _record(record: Record, opened: Any, *options: Any) -> Structure:
    """Record the structure of a workload in which open sizes stand in place of numbers."""
    expressions = Expressions()
    open_sizes: dict[OpenSize, SymbolicSize] = {}

    def open_size(size: OpenSize) -> SymbolicSize:
        open_sizes[size] = expressions.open(size)
        return open_sizes[size]

    symbolic = map_sizes(opened, OpenSize, open_size)
    graphs = tuple(record(symbolic, *options))
    return Structure(tuple(open_sizes), expressions, graphs)


def record_graphs(
    record: Record, workload: Any, fields: tuple[str, ...], *options: Any
) -> tuple[Graph, ...]:
    """The graphs of a workload whose sizes are numbers; see `record_structure`.

    Raises
    ------
    ValueError
        If sizes are arrays.
    """
    if count_configurations(workload):
        raise ValueError("sizes are arrays; find their times with perfkit.sweep")
    return _fill(record, workload, fields, *options)


@lru_cache(maxsize=64)
def _fill(
    record: Record, workload: Any, fields: tuple[str, ...], *options: Any
) -> tuple[Graph, ...]:
    """The graphs of a workload without arrays; those of the last ones are kept."""
    opened = alter(workload, {name: OpenSize((name,)) for name in fields})
    structure = _record(record, opened, *options)
    return structure.fill_checked(structure.read_sizes(workload))
