"""A symbolic eager framework: records the operations PyTorch would dispatch, both ways, without computing."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from perfkit.workloads.graph import FEATURES, Graph
from perfkit.workloads.tables import EmbeddingTable

__all__ = ["ITEMSIZE", "Tape", "Tensor"]

#: Bytes of one number by data type [B].
ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}

_COLUMN = {name: index for index, name in enumerate(FEATURES)}


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
    second is added to the first. Views cost nothing and are not recorded.

    Parameters
    ----------
    itemsize : int
        Bytes of one activation, weight or gradient element [B].
    """

    def __init__(self, itemsize: int = 4) -> None:
        self.itemsize = itemsize
        self.phase, self.module = "forward", ""
        self.trained: list[Tensor] = []
        self.tables: list[EmbeddingTable] = []
        self._labels: list[tuple[str, str, str, str, str]] = []
        self._features: list[list[float]] = []
        self._accesses: list[tuple[int, int, int, int]] = []
        self._storages = 0
        self._nodes: list[tuple[str, Callable[[], None]]] = []
        self._gradients: dict[Tensor, Tensor] = {}
        self._sparse: dict[Tensor, dict[str, float]] = {}
        self._strided: set[int] = set()
        self.local: set[Tensor] = set()

    def tensor(self, *shape: int, itemsize: int = 0, grad: bool = False) -> Tensor:
        """A tensor with a storage of its own."""
        self._storages += 1
        return Tensor(self._storages - 1, shape, itemsize or self.itemsize, grad)

    def parameter(self, *shape: int) -> Tensor:
        """A trained tensor."""
        weight = self.tensor(*shape, grad=True)
        self.trained.append(weight)
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
        """Append one operation with the tensors it reads and writes and its sizes."""
        index = len(self._labels)
        self._labels.append((name, kind, variant or name, self.phase, self.module))
        row = [0.0] * len(FEATURES)
        for key, value in features.items():
            row[_COLUMN[key]] = value
        self._features.append(row)
        self._accesses += [(index, t.storage, t.nbytes, 0) for t in reads]
        self._accesses += [(index, t.storage, t.nbytes, 1) for t in writes]

    def node(self, backward: Callable[[], None]) -> None:
        """Append one backward step, which runs before all that were appended earlier."""
        self._nodes.append((self.module, backward))

    def gradient(self, tensor: Tensor) -> Tensor:
        """The gradient that has arrived at a tensor, in the shape the tensor is seen in."""
        return self._gradients[tensor.root].view(*tensor.shape)

    def arrive(self, tensor: Tensor, gradient: Tensor) -> None:
        """A gradient reaches a tensor."""
        first = self._gradients.get(tensor.root)
        if first is not None:
            total = self.tensor(*first.shape)
            self.emit("add", "elementwise", [first, gradient], [total], elements=total.numel)
            gradient = total
        self._gradients[tensor.root] = gradient

    def backward(self) -> None:
        """Run the backward steps."""
        self.phase = "backward"
        for module, run in reversed(self._nodes):
            self.module = module
            run()
        self._nodes.clear()
        self.phase, self.module = "update", ""

    def graph(self) -> Graph:
        """Everything recorded so far as columns."""
        features = np.array(self._features, dtype=float).reshape(-1, len(FEATURES))
        accesses = np.array(self._accesses, dtype=float).reshape(-1, 4)
        return Graph(tuple(self._labels), features, accesses, tuple(self.tables), sum(t.numel for t in self.trained))
