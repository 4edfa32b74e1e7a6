"""The recorder of a training step: what PyTorch dispatches, as columns of a graph."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from perfkit.models.distributions import Uniform, Zipf, unique_rows
from perfkit.models.roots import find_root
from perfkit.recording.exchanges import Exchanges
from perfkit.workloads.graph import FEATURES, Graph
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.vocabulary import VIEWS, count_bytes, find_entry, walk_tensors

_COLUMN = {name: index for index, name in enumerate(FEATURES)}
_DTYPES: dict[Any, str] = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip
#: The node of autograd that keeps the gradient of a weight, and where reducers of gradients start from.
_KEEP = "torch::autograd::AccumulateGrad"
#: Largest real tensor of whole numbers that is worked on for real [-].
_WHOLE = 1 << 24
#: Operations with one result whose shape PyTorch works out by itself, without looking at values.
_LIGHT = frozenset(
    "view t detach transpose expand _unsafe_view slice unsqueeze as_strided alias select squeeze permute "
    "_reshape_alias mm addmm bmm".split()
)
_LIFT, _DEVICE, _HOME = torch.ops.aten.lift_fresh.default, torch.ops.prim.device.default, torch.device("cpu")


class _Schema:
    """Facts about an operation for the recorder, looked up once."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.split("::")[-1]
        self.defaults = [(a.name, a.default_value) for a in schema.arguments]
        changed = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        self.written = tuple(i for i, is_written in enumerate(changed) if is_written)
        self.pointwise = pointwise = torch.Tag.pointwise in func.tags
        self.view = self.name in VIEWS or func.namespace in ("prim", "profiler") or self.name == "wait_tensor"
        #: Written arguments that are not read: places for results.
        self.lent = self.written if self.name[-1] != "_" else ()
        self.exchange = func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
        self.light = not self.written and (self.name in _LIGHT or pointwise) and len(schema.returns) == 1
        #: Changes its first argument alone, so the shape of its result is known.
        self.foreach = self.name.startswith("_foreach_")
        self.in_place = self.written == (0,) and self.name[-1] == "_" and (pointwise or self.foreach)

    def complete(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Arguments in the order of the schema, defaults included."""
        return [*args, *(kwargs.get(name, default) for name, default in self.defaults[len(args) :])]


class Recorder(TorchDispatchMode):
    """Appends dispatched operations to columns; keeps storages, never tensors, which would change autograd.

    Parameters
    ----------
    fake : FakeTensorMode
        The mode that tensors without values belong to.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake, self.on, self.agreeing = fake, False, False
        self.exchanges = Exchanges(lambda: len(self.labels))
        self.phase, self.leading = "forward", False
        self.modules: list[str] = []
        self.labels: list[tuple[str, str, str, str, str]] = []
        self.viewed = self.bare = 0
        self._features: list[list[float]] = []
        self._accesses: list[tuple[int, int, float, int]] = []
        self._dtypes: list[str] = []
        self._tables: list[EmbeddingTable] = []
        self._trained: dict[int, int] = {}
        self._schemas: dict[Any, _Schema] = {}
        self._storages: dict[int, tuple[int, Any]] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        self._starts: list[int] = []
        self._paths: list[str] = []
        self._node: tuple[int, str] | None = None
        self._opened = True

    def mark(self) -> None:
        """Assign later nodes of autograd to the innermost running module."""
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(self.modules[-1] if self.modules else "")

    def _locate(self, tensors: Sequence[Tensor]) -> str:
        """Path of the module; also updates the phase and counts calls of autograd."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            if self._node is not None:
                self._node, self._opened = None, True
            if self.phase == "backward" and torch._C._current_graph_task_id() == -1 and not self.leading:
                self.phase = "update"
                self.exchanges.end_backward()
            if self.phase == "update" and (
                self.modules or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
            ):
                self.phase = "forward"
            return self.modules[-1] if self.modules else ""
        number, name = node._sequence_nr(), node.name()
        if self._node != (number, name) or name == _KEEP:
            self.bare += not self._opened
            self._node, self._opened = (number, name), False
            if name == _KEEP:
                self._trained[self._key(node.variable)] = node.variable.numel()
        self.phase, self.leading = "backward", False
        if self.modules:  # computed again for the backward pass
            return self.modules[-1]
        place = bisect_right(self._starts, number) - 1
        return self._paths[place] if place >= 0 and number < 1 << 62 else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = _Schema(func)
        kwargs = kwargs or {}
        given = [t for t in walk_tensors([args, kwargs]) if isinstance(t, Tensor)]
        work = None
        if func.namespace == "c10d":
            out, work = self.exchanges.answer(func, args)
        elif self.agreeing and _is_agreed(schema, given, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        elif schema.name == "clone" and given[0].layout is torch.sparse_coo:
            return args[0].detach()  # fake copies lose their rows
        else:
            out = self._work_out(func, schema, args, kwargs, given)
        if self.on and not self.agreeing:
            module, complete = self._locate(given), schema.complete(args, kwargs)
            if schema.name == "wait_tensor":
                self.exchanges.touch([self._key(t) for t in given])
            elif schema.exchange:
                self._exchange(func, schema, complete, out, module, work)
            elif schema.view:
                self.viewed += 1
            else:
                self._append(schema, complete, given, out, module)
        return out

    def _work_out(self, func: Any, schema: _Schema, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """The result, with values where they are real whole numbers, such as indices: they decide sizes."""
        plain = all(_is_plain(t, self.fake) for t in given)
        if given and not schema.written and all(_is_whole(t, schema) for t in given):
            if func is _LIFT:
                return args[0]
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
            return self.fake.from_tensor(out) if isinstance(out, Tensor) and out.is_floating_point() else out
        if schema.in_place and plain and given[0].numel() > 1:
            return None if schema.foreach else args[0]
        if schema.in_place and not schema.foreach and _is_plain(args[0], self.fake) and any(map(_is_sparse, given)):
            return args[0]  # a fake table would be made real to add sparse rows to it
        if schema.light and plain and given:
            with in_kernel_invocation_manager(self.fake):
                out = func(*args, **kwargs)
            return FakeTensor(self.fake, out, _HOME)
        if schema.name == "_embedding_bag_backward" and schema.complete(args, kwargs)[9]:
            return _sparse_rows(args[0], args[1].numel(), (args[6], args[0].shape[1]))
        if schema.name == "_coalesce":  # each row once: as many as are expected to differ
            rows = args[0].shape[0]
            law = next((table.distribution for table in self._tables if table.rows == rows), Uniform(rows))
            count = round(float(unique_rows(law, args[0]._nnz())))
            return _sparse_rows(args[0]._values(), count, args[0].shape)._coalesced_(True)
        if schema.name == "sparse_mask":
            return _sparse_rows(args[0], args[1]._nnz(), args[1].shape)._coalesced_(True)
        if func is _LIFT or all(isinstance(t, FakeTensor) for t in given):
            return func(*args, **kwargs)
        if schema.name.startswith("index") and len(args) > 1 and isinstance(args[1], list):
            args = (args[0], _find_places(args[1]), *args[2:])
        return func(*_pretend(args, self.fake), **{key: _pretend(value, self.fake) for key, value in kwargs.items()})

    def _key(self, tensor: Tensor) -> int:
        """Number of a tensor's storage."""
        tensor = _pretend(tensor, self.fake)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        storage = tensor.untyped_storage()
        return self._storages.setdefault(storage._cdata, (len(self._storages), storage))[0]

    def _exchange(self, func: Any, schema: _Schema, args: list[Any], out: Any, module: str, work: Any) -> None:
        """Append a collective."""
        if name := self.exchanges.find(func):
            reads, writes, nbytes, group = self.exchanges.describe(name, func, args, out)
            self._emit((name, "collective", name), module, {"nbytes": nbytes, "group": group}, reads, writes)
            blocking = any(key == "async_op" and not args[i] for i, (key, _) in enumerate(schema.defaults))
            self.exchanges.launch([self._key(t) for t in writes], work, blocking=blocking)

    def _append(self, schema: _Schema, args: list[Any], given: Sequence[Tensor], out: Any, module: str) -> None:
        """Append an operation with the sizes of the vocabulary."""
        sparse = schema.name == "add_" and args[1].__class__ is not int and _is_sparse(args[1])
        entry = find_entry(schema.name, pointwise=schema.pointwise, sparse=sparse)
        variant = entry.variant(schema.name, args) if callable(entry.variant) else entry.variant
        sizes = entry.sizes(args, out) | {"launches": entry.launches}
        if entry.kind.startswith("embedding") and variant != "dense_rows":
            sizes |= self._table(schema.name, args, sizes)
        read = [a for i, a in enumerate(args) if i not in entry.unread and i not in schema.lent]
        reads, writes = list(walk_tensors(read)), list(walk_tensors([args[i] for i in schema.written]))
        if sparse:
            reads, writes = [args[1]], []
        elif not writes:
            writes = list(walk_tensors(out))[: 1 if schema.name == "_embedding_bag" else None]
        finishing = not self._node and torch._C._current_graph_task_id() != -1
        if finishing:
            self.exchanges.touch([self._key(t) for t in reads])
        if finishing or (self._node and self._node[1] == _KEEP and schema.name == "mul"):  # a reducer's copies
            sizes |= {"calls": 0}
        dtype = next((_DTYPES[t.dtype] for t in (*walk_tensors(out), *given) if t.dtype in _DTYPES), "")
        self._emit((schema.name, entry.kind, variant or schema.name), module, sizes, reads, writes, dtype)

    def _emit(
        self, label: tuple[str, str, str], module: str, sizes: Any, reads: Any, writes: Any, dtype: str = ""
    ) -> None:
        """Append one operation to the columns."""
        index, row = len(self.labels), [0.0] * len(FEATURES)
        calls = not (self._node and self._opened and not self.modules)
        for key, value in {"launches": 1, "calls": calls, **sizes, "bare": self.bare}.items():
            row[_COLUMN[key]] = value
        self.bare, self._opened = 0, True
        self.labels.append((*label, self.phase, module))
        self._features.append(row)
        self._dtypes.append(dtype)
        for flag, tensors in enumerate((reads, writes)):
            for tensor in {id(t): t for t in tensors}.values():
                if nbytes := count_bytes(tensor):
                    self._accesses.append((index, self._key(tensor), nbytes, flag))

    def transfer(self, direction: str, tensor: Tensor) -> None:
        """Append a copy between host and device that the host waits for."""
        module, dtype = self.modules[-1] if self.modules else "", _DTYPES.get(tensor.dtype, "")
        self._emit(("to", "transfer", direction), module, {"elements": tensor.numel()}, [], [tensor], dtype)

    def _table(self, name: str, args: list[Any], sizes: dict[str, float]) -> dict[str, float]:
        """Number of the table that rows are looked up in, which is noted when it is first seen."""
        if name == "_embedding_bag_backward":
            return {"table": self._known[self._key(args[1]), args[6]]}
        weight = self._key(args[0])
        if name != "_embedding_bag":
            known = self._known.get((weight, "bags"), sizes["lookups"])
            return {"table": self._known.get((weight,), 0), "bags": known}
        rows, dim = args[0].shape
        number = self._known.setdefault((weight,), len(self._tables))
        self._known[self._key(args[1]), rows], self._known[weight, "bags"] = number, int(sizes["bags"])
        if number == len(self._tables):
            pooling, exponent = sizes["lookups"] / max(sizes["bags"], 1.0), _fit_exponent(args[1], rows)
            table = EmbeddingTable(rows, dim, pooling or 1.0, exponent, args[0].element_size(), f"table {number}")
            self._tables.append(table)
        return {"table": number}

    def graph(self, name: str, family: str, ranks: int) -> Graph:
        """Everything recorded as columns."""
        features = np.array(self._features, dtype=float).reshape(-1, len(FEATURES))
        accesses = np.array(self._accesses, dtype=float).reshape(-1, 4)
        work = Counter[str]()
        for dtype, flops in zip(self._dtypes, features[:, _COLUMN["flops"]] + 1.0, strict=True):
            work[dtype] += flops
        del work[""]
        main = max(work, key=lambda d: work[d]) if work else "fp32"
        dtypes = tuple(dtype or main for dtype in self._dtypes)
        return Graph(
            tuple(self.labels), features, accesses, tuple(self._tables), sum(self._trained.values()), name or "step",
            family, main, dtypes if set(dtypes) - {main} else (), ranks,
            self.exchanges.list_groups(ranks), self.exchanges.list_waits(self.labels),
        )  # fmt: skip


def _pretend(tree: Any, fake: FakeTensorMode) -> Any:
    """Arguments with a fake tensor for each real one, which would be worked on for real."""
    if isinstance(tree, Tensor):
        return tree if isinstance(tree, FakeTensor) else fake.from_tensor(tree)
    return type(tree)(_pretend(item, fake) for item in tree) if isinstance(tree, list | tuple) else tree


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _is_whole(tensor: Tensor, schema: _Schema) -> bool:
    """Whether it is a real tensor of whole numbers, small enough to work on, or a real number that is read."""
    whole = not (tensor.is_floating_point() or tensor.is_complex()) or schema.name == "_local_scalar_dense"
    return not isinstance(tensor, FakeTensor) and whole and tensor.numel() <= _WHOLE


def _is_agreed(schema: _Schema, given: Sequence[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether it works on the whole numbers that a module over ranks sends and reads."""
    return all(_is_whole(t, schema) for t in given) if given else kwargs.get("dtype") is torch.int32


def _is_plain(tensor: Tensor, fake: FakeTensorMode) -> bool:
    """Whether it is a fake tensor like most; copies of modules bring a mode of their own."""
    mine = isinstance(tensor, FakeTensor) and tensor.fake_mode is fake
    return mine and tensor.constant is None and tensor.layout is torch.strided  # type: ignore[attr-defined]


def _find_places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Real masks among indices as the places where they are true, which is how many there are."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or isinstance(index, FakeTensor) or index.dtype is not torch.bool:
            places.append(index)
        else:
            with unset_fake_temporarily():
                places += index.nonzero().unbind(1)
    return places


def _sparse_rows(like: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """A sparse gradient with a given number of rows, which fake tensors do not know."""
    where = torch.empty((1, count), dtype=torch.long)
    return torch.sparse_coo_tensor(where, like.new_empty((count, *shape[1:])), shape, check_invariants=False)


def _fit_exponent(indices: Tensor, rows: int) -> float:
    """Zipf exponent that gives the number of distinct indices; 0 for fake indices."""
    if isinstance(indices, FakeTensor) or not indices.numel():
        return 0.0
    with unset_fake_temporarily():
        unique, lookups = int(torch.unique(indices).numel()), indices.numel()
    if unique > 0.98 * float(unique_rows(Zipf(rows, 1e-6), lookups)):
        return 0.0
    root = find_root(lambda s: unique - float(unique_rows(Zipf(rows, s), lookups)), 0.0, 4.0, precision=1e-6)
    return round(root, 3)
