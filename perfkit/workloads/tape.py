"""A symbolic eager framework: records the operations PyTorch would dispatch, both ways, without computing."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from perfkit.ground.units import check_positive, check_type
from perfkit.workloads.graph import Label
from perfkit.workloads.operations import RULES, Line, Rule, Tensor
from perfkit.workloads.tables import EmbeddingTable

#: Bytes of one number by data type [B].
ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
#: Name of what a gradient adds to a reduction of several.
PIECE = "piece of a bucket"


def check_switches(dtype: str, *, mixed: bool, **others: bool) -> None:
    """Refuse settings of a workload that make no sense, and name one that has moved.

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
    if mixed and ITEMSIZE.get(dtype, 2) != 2:
        fault = f"mixed is True with dtype {dtype!r}; weights are fp32 already"
        raise ValueError(f"{fault}; take bf16 or fp16, or leave it")
    if others.get("compiled"):
        text = "compiled=True is an old name; predict(..., execution='compiled') takes its place"
        warnings.warn(text, FutureWarning, stacklevel=4)


def check_ranks(batch: Any, ranks: Any, plan: Any = None, micro: int = 1) -> int:
    """Let a whole number of ranks through that divides the batch, of a workload without tables to place.

    Parameters
    ----------
    batch : int or array
        Samples of one iteration over all ranks [-].
    ranks : int
        Ranks [-].
    plan : None
        There is none.
    micro : int
        Micro-batches of a rank [-].

    Raises
    ------
    ValueError
        If the batch does not divide by the ranks or a plan is given.
    """
    ranks = int(check_positive("ranks", ranks, integer=True))
    if plan is not None:
        raise ValueError("plan is given; this workload has no tables to place; leave it out")
    if np.any(batch % (whole := ranks * micro)):
        what = f"{ranks} ranks" + f" with {micro} micro-batches each" * (micro > 1)
        raise ValueError(f"batch is {batch}; it must divide by the {what}; take a multiple of {whole}")
    return ranks


_Part = tuple[dict[str, Any], dict[str, Any]]  # tensors and sizes of a layer by name


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
    overlap : bool
        Whether collectives go on until `wait` is called; else each is waited for at once.
    """

    def __init__(self, itemsize: int = 4, *, mixed: bool = False, overlap: bool = False) -> None:
        self.itemsize, self.wide = itemsize, 4 if mixed else itemsize
        self.overlap = overlap
        self.index = 8  # bytes of an index
        self.phase, self.module, self.layer = "forward", "", -1
        self.trained: list[Tensor] = []
        self.modules: dict[Tensor, str] = {}  # of weights
        self.drawn = 0  # weights met since the first layer; those that are known are met again
        self.shards: dict[Tensor, Tensor] = {}  # what this rank keeps of a weight
        self.local: set[Tensor] = set()  # weights whose gradients are not averaged
        self.sparse: dict[Tensor, dict[str, Any]] = {}  # sizes of updates by row
        self.updated: set[Tensor] = set()  # by the backward pass already
        self.buckets: dict[Tensor, int] = {}  # which module's buckets a gradient is reduced in
        self.tables: dict[Tensor, EmbeddingTable] = {}  # by their weights
        self.labels: list[Label] = []
        self.sizes: list[dict[str, Any]] = []
        self.layers: list[int] = []  # of every operation
        self.touched: list[tuple[int, int, int, int]] = []  # operation, storage, 1 for a write, layer
        self.nbytes: list[Any] = []  # of what is touched
        self.homes: list[int] = []  # layer of every storage
        self.middle, self.repeats = 0, 1  # layer that stands for several, and for how many
        self.pieces: list[tuple[int, Tensor, Tensor, int]] = []  # of buckets: their module, gradient and layer
        self.waits: list[tuple[int, int]] = []
        self.gradients: dict[Tensor, Tensor] = {}
        self.kept: dict[Tensor, Tensor] = {}  # gradients of the micro-batches before
        self.last = True  # whether this is the last micro-batch
        self.narrowed: dict[Tensor, Tensor] = {}
        self.strided: set[int] = set()  # storages of gradients that are permuted
        self.bare, self.opened = 0, 0
        self.nodes: list[tuple[str, int, Callable[[], Any]]] = []
        self._parts: list[_Part] = []
        self._arrived: list[Tensor] = []
        self.due: dict[Tensor, int] = {}  # gradients of a weight that are still to arrive

    def tensor(self, *shape: Any, itemsize: int = 0, grad: bool = False) -> Tensor:
        """A tensor with a storage of its own."""
        self.homes.append(self.layer)
        return Tensor(len(self.homes) - 1, shape, itemsize or self.itemsize, grad, self.layer)

    def parameter(self, *shape: Any, itemsize: int = 0) -> Tensor:
        """A trained tensor: the next of those that are known, where layers are recorded again."""
        self.drawn += 1
        if self.drawn <= len(self.trained):
            return self.trained[self.drawn - 1]
        weight = self.tensor(*shape, itemsize=itemsize or self.wide, grad=True)
        self.trained.append(weight)
        self.modules[weight] = self.module
        self.due[weight] = 0
        return weight

    def record(
        self, name: str, *operands: Tensor | list[Tensor], out: Tensor | tuple[Any, ...] = (), joined: bool = False,
        **sizes: Any,
    ) -> Tensor:  # fmt: skip
        """Run a layer of `RULES` forward and remember it for the way back; `joined` to the call of the layer before.

        The result `y` is as `out` says, or else like the first operand; `sizes` are what shapes do not tell.
        """
        flat = [t for o in operands for t in (o if isinstance(o, list) else (o,))]
        rule, trained = RULES[name], [tensor for tensor in flat if tensor.grad]
        tensors: dict[str, Any] = dict(zip(rule.operands, operands, strict=True))
        if isinstance(out, Tensor):
            tensors["y"] = out
        else:
            itemsize = max(tensor.itemsize for tensor in trained or flat)
            tensors["y"] = self.tensor(*(out or flat[0].shape), itemsize=itemsize, grad=bool(trained))
        for weight in trained:
            if weight in self.due:
                self.due[weight] += 1
        for line in rule.forward:
            self._run(line, tensors, sizes)
        if joined:
            self._parts.append((tensors, sizes))
        elif trained:
            self._parts = [(tensors, sizes)]
            self.node(partial(self._answer, rule, self._parts))
        y: Tensor = tensors["y"]
        return y

    def node(self, backward: Callable[[], Any]) -> None:
        """Append one backward step, which runs before all that were appended earlier."""
        self.nodes.append((self.module, self.layer, backward))

    def emit(
        self, name: str, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor], variant: str = "", **sizes: Any
    ) -> int:
        """Append one operation with the tensors it reads and writes and its sizes; returns its position.

        Inside one backward node all operations belong to one call of the framework.
        """
        index, layer = len(self.labels), self.layer
        self.labels.append((name, kind, variant or name, self.phase, self.module))
        self.layers.append(layer)
        self.sizes.append({"launches": 1, "calls": self.opened != 1, "bare": self.bare, **sizes})
        self.bare, self.opened = 0, self.opened and 1
        for write, tensors in enumerate((reads, writes)):
            self.touched += [(index, t.storage, write, t.layer if layer < 0 else layer) for t in tensors]
            self.nbytes += [t.nbytes for t in tensors]
        return index

    def _run(self, line: Line, tensors: dict[str, Any], sizes: dict[str, Any]) -> None:
        """Run one line of a rule; gradients that nobody wants are not computed."""
        wanted = [tensors[name[1:]] for name in line.writes if name[0] == "d"]
        if wanted and not any(tensor.grad for tensor in wanted):
            return
        reads: list[Tensor] = []
        for name in line.reads:
            found = _find(self, name, tensors)
            reads += found if isinstance(found, list) else (found,)
        for name in line.writes:
            if name not in tensors:
                like = tensors[name[1:] if name[0] == "d" else "x"]
                tensors[name] = self.tensor(*like.shape, itemsize=like.itemsize)
        writes = [tensors[name] for name in line.writes]
        name, kind, variant = line.label
        self.emit(name, kind, reads, writes, variant, **line.size(line.label, reads, writes, sizes))

    def _answer(self, rule: Rule, parts: Sequence[_Part]) -> None:
        """Run layers of one call on the way back and pass the gradients on."""
        self.bare += rule.bare
        for tensors, sizes in parts:
            for line in rule.backward:
                self._run(line, tensors, sizes)
        for tensors, _ in parts:
            for given, name in rule.gives:
                passed, target = tensors["y"].itemsize if given == "dy" else 0, tensors[name]
                for tensor in target if isinstance(target, list) else (target,):
                    if tensor.grad:
                        gradient = _find(self, given, tensors)
                        part = gradient.view(*tensor.shape) if target is not tensor else gradient
                        self.arrive(tensor, part, passed=passed)

    def gradient(self, tensor: Tensor) -> Tensor:
        """The gradient that has arrived at a tensor, in the shape the tensor is seen in."""
        return self.gradients[tensor.root].view(*tensor.shape)

    def arrive(self, tensor: Tensor, gradient: Tensor, *, passed: int = 0) -> None:
        """A gradient reaches a tensor; one `passed` on from a result of that itemsize is made to fit."""
        if passed and len(gradient.shape) > len(tensor.shape):
            rows, n = gradient.numel // tensor.numel, tensor.numel
            wide, gradient = gradient.view(rows, n), self.tensor(*tensor.shape, itemsize=gradient.itemsize)
            self.emit("sum", "rowwise", [wide], [gradient], elements=wide.numel, rows=rows, n=n)
        if passed and passed != tensor.itemsize:
            wide, gradient = gradient, self.tensor(*gradient.shape, itemsize=tensor.itemsize)
            self.emit("_to_copy", "elementwise", [wide], [gradient], elements=wide.numel)
        root = tensor.root
        first = self.gradients.get(root)
        if first is not None:
            total = self.tensor(*first.shape, itemsize=first.itemsize)
            self.emit("add", "elementwise", [first, gradient], [total], elements=total.numel)
            gradient = total
        self.gradients[root] = gradient
        if root in self.due:
            self.due[root] -= 1
            if self.due[root] <= 0:
                self._arrived.append(root)

    def backward(self) -> None:
        """Run the backward steps, each one call, and after each the calls that keep gradients of weights.

        Gradients that are reduced in buckets are copied there, each followed by a piece of a reduction: which of them
        make one is settled when all are known.
        """
        self.phase = "backward"
        while self.nodes:
            self.module, self.layer, run = self.nodes.pop()
            self.opened = 2  # the next operation opens a call, and further ones belong to it
            run()
            self.bare += self.opened == 2
            self.opened = 0
            for weight in self._arrived:
                self.keep(weight)
            self._arrived.clear()
        self.module = ""  # what keeps gradients in buckets is in no module
        for _, gradient, part, self.layer in sorted(self.pieces, key=itemgetter(0)):  # noqa: B020
            sizes = {"elements": part.numel, "rows": part.numel // part.shape[-1], "calls": 0}
            self.emit("copy_", "copy", [part], [gradient], **sizes)
        self.phase, self.layer = "update", -1

    def keep(self, weight: Tensor) -> None:
        """The gradient of a weight is complete."""
        self.bare += 1
        accumulate(self, weight)
        if weight not in self.buckets:
            return
        gradient, part = self.gradients[weight], self.tensor(*weight.shape, itemsize=weight.itemsize)
        self.emit("mul", "elementwise", [gradient], [part], "mul_scalar", elements=part.numel, calls=0)
        self.emit(PIECE, "collective", [part], [part], table=self.buckets[weight], nbytes=part.nbytes)
        self.pieces.append((self.buckets[weight], gradient, part, weight.layer))


def _find(tape: Tape, name: str, tensors: dict[str, Any]) -> Any:
    """A tensor of a rule, or the gradient that has arrived at one, with its elements in order."""
    if name not in tensors:
        target = tensors[name[1:]]
        if isinstance(target, list):
            return [tape.gradient(tensor) for tensor in target]
        gradient = tape.gradient(target)
        tensors[name] = copy(tape, gradient) if gradient.storage in tape.strided else gradient
    return tensors[name]


def accumulate(tape: Tape, weight: Tensor) -> None:
    """Add the gradient of a weight to that of the micro-batches before."""
    if weight in tape.kept:
        total, gradient = tape.kept[weight], tape.gradients[weight]
        tape.emit("add_", "elementwise", [total, gradient], [total], elements=total.numel)
        tape.gradients[weight] = total


def copy(tape: Tape, x: Tensor, run: Any = None) -> Tensor:
    """A copy of a permuted view with its elements in order, `run` at a time; a gradient passes through."""
    out = tape.tensor(*x.shape, itemsize=x.itemsize, grad=True)
    out.root = x.root
    tape.emit("clone", "copy", [x], [out], elements=x.numel, rows=x.numel // (x.shape[-1] if run is None else run))
    return out
