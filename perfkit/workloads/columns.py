"""Columns of a graph: sizes of its operations, which tensors they read and write, which of these
are weights, which modules own them, when memory is allocated, and which operations wait for collectives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.roofline import gemm_flops
from perfkit.workloads.symbolic_sizes import SymbolicSize

#: A size of an operation: a number, an array over configurations, or one that is not known yet.
Size: TypeAlias = float | np.ndarray | SymbolicSize


class OperationSizes(NamedTuple):
    """How much one operation computes, copies or sends: the sizes that apply to it; all others are
    zero.

    Parameters
    ----------
    flops, batch, m, n, k, elements, rows, lookups, bags, dim, table, nbytes, group, part : Size
        See `Features`.

    Examples
    --------
    >>> OperationSizes(elements=1024, rows=32).elements
    1024
    """

    flops: Size = 0
    batch: Size = 0
    m: Size = 0
    n: Size = 0
    k: Size = 0
    elements: Size = 0
    rows: Size = 0
    lookups: Size = 0
    bags: Size = 0
    dim: Size = 0
    table: Size = 0
    nbytes: Size = 0
    group: Size = 0
    part: Size = 0

    @classmethod
    def of_product(
        cls, m: Any, n: Any, k: Any, *, batch: Any = 1, passes: float = 1.0
    ) -> "OperationSizes":
        """Sizes of a product of matrices.

        Parameters
        ----------
        m, n, k, batch : Size
            Rows, columns, inner dimension and number of products [-].
        passes : float, optional
            How often the arithmetic of one product is done [-].

        Returns
        -------
        sizes : OperationSizes
            The dimensions [-], and the arithmetic [FLOP].
        """
        return cls(flops=passes * gemm_flops(m, n, k, batch=batch), batch=batch, m=m, n=n, k=k)


#: Sizes by which an operation is shown, in this order.
_SHOWN = ("batch", "m", "n", "k", "elements", "rows", "lookups", "bags", "dim", "flops", "nbytes")


def list_sizes(sizes: Mapping[str, float]) -> dict[str, float]:
    """List the sizes of an operation that apply to it, as accounts and traces show them.

    Parameters
    ----------
    sizes : mapping of str to float
        All its sizes, see `Features`; others are left out.

    Returns
    -------
    shown : dict of str to float
        Those that are not zero, the dimensions first, then the arithmetic [FLOP] and the bytes [B].

    Examples
    --------
    >>> list_sizes({**OperationSizes.of_product(2, 3, 4)._asdict(), "traffic": 52})
    {'batch': 1, 'm': 2, 'n': 3, 'k': 4, 'flops': 48.0}
    """
    return {name: sizes[name] for name in _SHOWN if sizes[name]}


class HostCalls(NamedTuple):
    """What the host does for one operation.

    Parameters
    ----------
    launches, calls, bare : float
        See `Features`.
    """

    launches: float = 0
    calls: float = 0
    bare: float = 0


#: What the host does for an operation that is one call and one kernel.
ONE_CALL = HostCalls(launches=1, calls=1)


@dataclass(frozen=True, eq=False)
class Features:
    """Sizes that the closed forms need: one array for each size, one element for each operation;
    zero where a size does not apply.

    With arrays of sizes, each array has a row for each operation. In a
    `perfkit.workloads.structure.OpenGraph` each number is that of a row in its table of sizes.

    Parameters
    ----------
    flops : array
        Floating-point operations [FLOP].
    batch, m, n, k : array
        Count, rows, columns and inner size of matrix products [-].
    elements : array
        Numbers that an element-wise function makes, or that are copied [-].
    rows : array
        Rows of a row-wise function, or of an embedding table [-].
    lookups, bags, dim : array
        Looked-up rows, sums of rows, and numbers in a row of an embedding table [-].
    table : array
        Number of the embedding table [-].
    nbytes : array
        Message of a collective, in the convention of nccl-tests, or bytes of a transfer [B].
    launches : array
        Kernels that the host launches; 0 for a part of the last kernel [-].
    calls : array
        Calls of the framework; 0 for a further kernel of the last call [-].
    bare : array
        Calls without a kernel before this operation [-].
    group : array
        Number of the communicator of a collective [-].
    part : array
        Share of a message, and of its time, that a collective sends; 0 for all of it [-].
    """

    flops: Array
    batch: Array
    m: Array
    n: Array
    k: Array
    elements: Array
    rows: Array
    lookups: Array
    bags: Array
    dim: Array
    table: Array
    nbytes: Array
    launches: Array
    calls: Array
    bare: Array
    group: Array
    part: Array

    def __len__(self) -> int:
        return len(self.flops)

    @classmethod
    def zeros(cls, operations: int) -> "Features":
        """Make sizes that are all zero.

        Parameters
        ----------
        operations : int
            Number of operations [-].

        Returns
        -------
        features : Features
            One zero per operation and size.
        """
        return cls(**{name: np.zeros(operations) for name in FEATURES})

    @classmethod
    def from_rows(
        cls, sizes: Sequence[OperationSizes], host_calls: Sequence[HostCalls] | None = None
    ) -> "Features":
        """Turn the sizes of each operation into columns.

        Parameters
        ----------
        sizes : sequence of OperationSizes
            How much each operation computes, copies or sends: numbers.
        host_calls : sequence of HostCalls, optional
            What the host does for each; by default each is one call that starts one kernel.

        Returns
        -------
        features : Features
            The same sizes.
        """
        if host_calls is None:
            host_calls = [ONE_CALL] * len(sizes)
        columns: dict[str, Array] = {}
        for names, rows in (
            (OperationSizes._fields, sizes),
            (HostCalls._fields, host_calls),
        ):
            table = np.array(rows, dtype=float).reshape(len(rows), len(names))
            for name, column in zip(names, table.T, strict=True):
                columns[name] = column.copy()
        return cls(**columns)

    def change(self, function: Callable[[Array], Array]) -> "Features":
        """Apply a function to each array.

        Parameters
        ----------
        function : callable
            Takes the values of one size and returns new ones.

        Returns
        -------
        features : Features
            What the function has returned.
        """
        return Features(**{name: function(values) for name, values in vars(self).items()})

    def select(self, operations: Any) -> "Features":
        """Take the sizes of some operations.

        Parameters
        ----------
        operations : array or slice
            Their positions in the order wanted, or whether to take each one.

        Returns
        -------
        features : Features
            The sizes of those operations.
        """
        return self.change(lambda values: values[operations])

    def row(self, operation: int) -> dict[str, float]:
        """Sizes of one operation by name."""
        return {name: float(values[operation]) for name, values in vars(self).items()}


#: Names of the sizes.
FEATURES = tuple(field.name for field in fields(Features))


class Access(NamedTuple):
    """One operation reads or writes one tensor.

    Parameters
    ----------
    operation, buffer, nbytes, is_write : int, int, float, bool
        See `Accesses`.
    """

    operation: int
    buffer: int
    nbytes: float
    is_write: bool


@dataclass(frozen=True, eq=False)
class Accesses:
    """The tensors that operations read and write: one element of each array per access.

    Parameters
    ----------
    operation : array of int
        Position of the operation [-].
    buffer : array of int
        Number of the buffer that holds the tensor [-].
    nbytes : array
        Bytes that are read or written [B]; with arrays of sizes, a row for each access. In a
        `perfkit.workloads.structure.OpenGraph` each is the number of a row in its table of sizes.
    is_write : array of bool
        Whether the tensor is written; else it is read [-].
    """

    operation: np.ndarray
    buffer: np.ndarray
    nbytes: Array
    is_write: np.ndarray

    def __len__(self) -> int:
        return len(self.operation)

    def __iter__(self) -> Iterator[Access]:
        columns = (self.operation, self.buffer, self.nbytes, self.is_write)
        return map(Access, *(column.tolist() for column in columns))

    @classmethod
    def from_rows(
        cls, rows: Sequence[tuple[int, int, Any, Any]] = (), dtype: Any = float
    ) -> "Accesses":
        """Turn rows into columns.

        Parameters
        ----------
        rows : sequence of (int, int, float, bool)
            Operation, buffer, bytes and whether it is a write, of each access.
        dtype : type, optional
            Type of the bytes, or of what stands in place of them.

        Returns
        -------
        accesses : Accesses
            The same accesses.
        """
        return cls(
            operation=np.array([operation for operation, _, _, _ in rows], dtype=np.intp),
            buffer=np.array([buffer for _, buffer, _, _ in rows], dtype=np.intp),
            nbytes=np.array([nbytes for _, _, nbytes, _ in rows], dtype=dtype),
            is_write=np.array([is_write for _, _, _, is_write in rows], dtype=bool),
        )

    def select(self, rows: np.ndarray) -> "Accesses":
        """Take some accesses.

        Parameters
        ----------
        rows : array
            Their positions in the order wanted, or whether to take each one.

        Returns
        -------
        accesses : Accesses
            Those accesses.
        """
        return Accesses(
            self.operation[rows], self.buffer[rows], self.nbytes[rows], self.is_write[rows]
        )

    def find_of(self, operations: Any) -> np.ndarray:
        """Find the accesses of some operations.

        Parameters
        ----------
        operations : array of int
            Positions of operations [-].

        Returns
        -------
        chosen : array of bool
            Whether each access is by one of them.
        """
        return np.isin(self.operation, operations)

    def sort(self) -> "Accesses":
        """Sort the accesses by operation; those of one operation stay in their order."""
        return self.select(np.argsort(self.operation, kind="stable"))


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights outside of repeated layers, and frozen ones inside: one element of each array per
    tensor. Those that an update touches are known from it.

    Parameters
    ----------
    buffer : array of int
        Number of its buffer [-].
    is_table : array of bool
        Whether it is an embedding table [-].
    """

    buffer: np.ndarray
    is_table: np.ndarray

    def __len__(self) -> int:
        return len(self.buffer)

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, bool]] = ()) -> "Weights":
        """Turn rows of buffer numbers, and of whether each is a table, into columns."""
        buffers, tables = zip(*rows, strict=True) if rows else ((), ())
        return cls(np.array(buffers, dtype=np.intp), np.array(tables, dtype=bool))

    @property
    def table_buffers(self) -> np.ndarray:
        """Numbers of the buffers of embedding tables [-]."""
        return self.buffer[self.is_table]


@dataclass(frozen=True, eq=False)
class Owners:
    """Modules of the tensors that an optimizer updates in lists: weights, and states that belong to
    them. One element of each column per tensor.

    Parameters
    ----------
    buffer : array of int
        Number of its buffer [-].
    module : tuple of str
        Path of the module of the weight.
    """

    buffer: np.ndarray
    module: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.buffer)

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, str]] = ()) -> "Owners":
        """Turn rows of buffer numbers and modules into columns."""
        buffers, modules = zip(*rows, strict=True) if rows else ((), ())
        return cls(np.array(buffers, dtype=np.intp), tuple(modules))


@dataclass(frozen=True, eq=False)
class Allocations:
    """Allocations and releases of memory in their order: one element of each array per change.

    Parameters
    ----------
    buffer : array of int
        Number of the buffer [-].
    nbytes : array
        Bytes that are allocated, negative for a release [B].
    """

    buffer: np.ndarray
    nbytes: Array

    def __len__(self) -> int:
        return len(self.buffer)

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, float]] = ()) -> "Allocations":
        """Turn rows of buffer numbers and bytes into columns."""
        buffers, nbytes = zip(*rows, strict=True) if rows else ((), ())
        return cls(np.array(buffers, dtype=np.intp), np.array(nbytes, dtype=float))


#: Classes of operations, see `perfkit.workloads.graph.Operation`; kernels of one class have one form.
Kind: TypeAlias = Literal[
    "gemm",
    "bmm",
    "attention",
    "convolution",
    "embedding_forward",
    "embedding_backward",
    "embedding_update",
    "elementwise",
    "rowwise",
    "pooling",
    "recurrent",
    "factorization",
    "fourier",
    "copy",
    "transfer",
    "collective",
    "other",
]


class HeldMemory(NamedTuple):
    """Memory of the fullest rank of a strategy by use, without the workspaces of libraries.

    Parameters
    ----------
    parameters, gradients, states, activations : float or array
        Weights, sums and new gradients of them, states of the optimizer, and activations [B].
    communication : float or array
        What collectives and messages hold [B].
    workspace : float or array
        What kernels of the update write beside their results [B].
    """

    parameters: Any
    gradients: Any
    states: Any
    activations: Any
    communication: Any
    workspace: Any

    @property
    def total(self) -> Any:
        """All of it [B]."""
        return sum(self)


class Wait(NamedTuple):
    """One operation waits for one collective.

    Parameters
    ----------
    operation, collective, of_previous_iteration : int, int, bool
        See `Waits`.
    """

    operation: int
    collective: int
    of_previous_iteration: bool = False


@dataclass(frozen=True, eq=False)
class Waits:
    """Which operation waits for which collective: one element of each array per wait.

    Parameters
    ----------
    operation : array of int
        Position of the operation that starts only when the collective has ended [-].
    collective : array of int
        Number of the collective in program order [-].
    of_previous_iteration : array of bool
        Whether it is the collective that the iteration before has launched [-].
    """

    operation: np.ndarray
    collective: np.ndarray
    of_previous_iteration: np.ndarray

    def __len__(self) -> int:
        return len(self.operation)

    def __iter__(self) -> Iterator[Wait]:
        columns = (self.operation, self.collective, self.of_previous_iteration)
        return map(Wait, *(column.tolist() for column in columns))

    def sort(self) -> "Waits":
        """The same waits by operation, those for the iteration before first."""
        keys = (self.collective, ~self.of_previous_iteration, self.operation)
        in_order = np.lexsort(keys)
        return Waits(
            self.operation[in_order],
            self.collective[in_order],
            self.of_previous_iteration[in_order],
        )

    @classmethod
    def from_rows(cls, rows: Sequence[Wait] = ()) -> "Waits":
        """Turn rows into columns.

        Parameters
        ----------
        rows : sequence of Wait
            One row per wait.

        Returns
        -------
        waits : Waits
            The same waits.
        """
        operations, collectives, previous = zip(*rows, strict=True) if rows else ((),) * 3
        return cls(
            np.array(operations, dtype=np.intp),
            np.array(collectives, dtype=np.intp),
            np.array(previous, dtype=bool),
        )
