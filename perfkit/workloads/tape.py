"""A symbolic eager framework: records the operations PyTorch would dispatch, both ways, without computing."""

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from perfkit.units import check_type
from perfkit.workloads.graph import FEATURES, Graph
from perfkit.workloads.tables import EmbeddingTable

__all__ = ["ITEMSIZE", "Tape", "Tensor", "check_switches"]

#: Bytes of one number by data type [B].
ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}

_COLUMN = {name: index for index, name in enumerate(FEATURES)}


def check_switches(dtype: str, *, mixed: bool, **others: bool) -> None:
    """Refuse settings of a workload that make no sense.

    Parameters
    ----------
    dtype : str
        Data type of products.
    mixed : bool
        Whether weights stay fp32.
    **others : bool
        Further settings that are on or off.

    Raises
    ------
    ValueError
        For anything but True and False, and for mixed precision without a narrower data type.
    """
    for name, value in {**others, "mixed": mixed}.items():
        check_type(name, value, bool)
    if mixed and ITEMSIZE[dtype] != 2:
        raise ValueError(
            f"mixed is True with dtype {dtype!r}; weights are fp32 already; take bf16 or fp16, or leave it"
        )


class Tensor:
    """A shape with a storage; views share storage and gradient.

    Parameters
    ----------
    storage : int
        Number of the storage [-].
    shape : tuple of int
        Sizes [-].
    itemsize : int
        Bytes of one element [B].
    grad : bool
        Whether a gradient flows into it.
    """

    __slots__ = ("grad", "itemsize", "nbytes", "numel", "root", "shape", "storage")

    def __init__(self, storage: int, shape: tuple[int, ...], itemsize: int, grad: bool = False) -> None:
        self.storage, self.shape, self.itemsize, self.grad = storage, shape, itemsize, grad
        self.numel = prod(shape)
        self.nbytes = self.numel * itemsize
        self.root: Tensor = self

    def view(self, *shape: int) -> "Tensor":
        """The same storage and gradient under another shape, or a part of it.

        Parameters
        ----------
        *shape : int
            Sizes [-].

        Returns
        -------
        tensor : Tensor
            The view.
        """
        other = Tensor(self.storage, shape, self.itemsize, self.grad)
        other.root = self.root
        return other


class Tape:
    """Records operations in the order PyTorch's eager mode and its autograd engine dispatch them.

    Backward nodes run in reverse order of creation, as the engine's sequence numbers have it; a gradient that arrives
    second is added to the first. Views cost no kernel: they are counted among the calls without one.

    Parameters
    ----------
    itemsize : int
        Bytes of one element that products work on [B].
    mixed : bool
        Whether weights, and what is not a product, stay fp32 (autocast).
    reference : bool
        Whether to run as PyTorch did until 1.12: gradients are zeroed and then added to, and biases copied to where a
        product is added to them.
    overlap : bool
        Whether collectives go on until `wait` is called; else each is waited for at once.
    compiled : bool
        Whether what lies between products happens inside them, or in one kernel, as compilers and HugeCTR have it.
    """

    def __init__(
        self,
        itemsize: int = 4,
        *,
        mixed: bool = False,
        reference: bool = False,
        overlap: bool = False,
        compiled: bool = False,
    ) -> None:
        self.itemsize, self.wide, self.reference = itemsize, 4 if mixed else itemsize, reference
        self.overlap, self.compiled = overlap, compiled
        self.phase, self.module = "forward", ""
        self.trained: list[Tensor] = []
        self._weights: set[Tensor] = set()
        self.tables: list[EmbeddingTable] = []
        self._labels: list[tuple[str, str, str, str, str]] = []
        self._features: list[list[float]] = []
        self._accesses: list[tuple[int, int, int, int]] = []
        self._storages = 0
        self._nodes: list[tuple[str, Callable[[], None]]] = []
        self._gradients: dict[Tensor, Tensor] = {}
        self._sparse: dict[Tensor, dict[str, float]] = {}
        self._updated: set[Tensor] = set()
        self._strided: set[int] = set()
        self.local: set[Tensor] = set()
        self._bare, self._grouped, self._opened = 0, False, False
        self._arrived: list[Tensor] = []
        self._due: Counter[Tensor] = Counter()
        self._waits: list[tuple[int, int]] = []
        self._reducers: dict[Tensor, Any] = {}
        self._kept: dict[Tensor, Tensor] = {}
        self._narrowed: dict[Tensor, Tensor] = {}

    def tensor(self, *shape: int, itemsize: int = 0, grad: bool = False) -> Tensor:
        """A tensor with a storage of its own."""
        self._storages += 1
        return Tensor(self._storages - 1, shape, itemsize or self.itemsize, grad)

    def parameter(self, *shape: int, itemsize: int = 0) -> Tensor:
        """A trained tensor."""
        weight = self.tensor(*shape, itemsize=itemsize or self.wide, grad=True)
        self.trained.append(weight)
        self._weights.add(weight)
        return weight

    def emit(
        self,
        name: str,
        kind: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        variant: str = "",
        **features: float,
    ) -> None:
        """Append one operation with the tensors it reads and writes and its sizes.

        Inside one backward node all operations belong to one call of the framework.
        """
        index = len(self._labels)
        self._labels.append((name, kind, variant or name, self.phase, self.module))
        row = [0.0] * len(FEATURES)
        row[_COLUMN["launches"]], row[_COLUMN["calls"]] = 1.0, 0.0 if self._grouped and self._opened else 1.0
        row[_COLUMN["bare"]], self._bare, self._opened = self._bare, 0, True
        for key, value in features.items():
            row[_COLUMN[key]] = value
        self._features.append(row)
        self._accesses += [(index, t.storage, t.nbytes, 0) for t in reads]
        self._accesses += [(index, t.storage, t.nbytes, 1) for t in writes]

    def transfer(self, direction: str, tensor: Tensor) -> None:
        """A copy ``to_device`` or ``to_host`` through pageable memory, for which the host waits."""
        self.emit("to", "transfer", [], [tensor], direction, elements=tensor.numel)

    def wait(self, collective: int) -> None:
        """Let the next operation start no sooner than a collective has ended; they are counted from 0."""
        self._waits.append((len(self._labels), collective))

    def use(self, weight: Tensor) -> None:
        """Expect one more gradient for a weight, which is complete when all have arrived."""
        self._due[weight] += 1

    def views(self, count: int) -> None:
        """Count views: calls without a kernel here, and as many again on the way back."""
        self._bare += count

        def backward() -> None:
            self._bare += count - 1  # a node without a kernel counts as one itself

        self.node(backward)

    def node(self, backward: Callable[[], None]) -> None:
        """Append one backward step, which runs before all that were appended earlier."""
        self._nodes.append((self.module, backward))

    def gradient(self, tensor: Tensor) -> Tensor:
        """The gradient that has arrived at a tensor, in the shape the tensor is seen in."""
        return self._gradients[tensor.root].view(*tensor.shape)

    def arrive(self, tensor: Tensor, gradient: Tensor) -> None:
        """A gradient reaches a tensor."""
        first = self._gradients.get(tensor.root)
        if first is not None and not self.compiled:  # else the product that makes it adds it
            total = self.tensor(*first.shape, itemsize=first.itemsize)
            self.emit("add", "elementwise", [first, gradient], [total], elements=total.numel)
            gradient = total
        self._gradients[tensor.root] = gradient
        if tensor.root in self._weights:
            self._due[tensor.root] -= 1
            if self._due[tensor.root] <= 0:
                self._arrived.append(tensor.root)

    def backward(self) -> None:
        """Run the backward steps, each one call, and after each the calls that keep gradients of weights."""
        self.phase = "backward"
        for module, run in reversed(self._nodes):
            self.module, self._grouped, self._opened = module, True, False
            run()
            self._bare += not self._opened
            self._grouped = False
            for weight in self._arrived:
                self._keep(weight)
            self._arrived.clear()
        self._nodes.clear()
        self._finish()
        self.phase, self.module = "update", ""

    def _keep(self, weight: Tensor) -> None:
        """The gradient of a weight is complete."""
        if weight in self._kept:
            gradient, kept = self._gradients[weight], self._kept[weight]
            self.emit("accumulate", "elementwise", [kept, gradient], [kept], elements=kept.numel)
            self._gradients[weight] = kept
        else:
            self._bare += 1

    def _finish(self) -> None:
        """The backward pass is over."""

    def graph(self, **about: Any) -> Graph:
        """Everything recorded so far as columns; `about` are further fields of the graph, such as its name."""
        features = np.array(self._features, dtype=float).reshape(-1, len(FEATURES))
        accesses = np.array(self._accesses, dtype=float).reshape(-1, 4)
        waits = np.array(self._waits, dtype=np.intp).reshape(-1, 2) if self.overlap else None
        weights = sum(t.numel for t in self.trained)
        return Graph(tuple(self._labels), features, accesses, tuple(self.tables), weights, waits=waits, **about)
