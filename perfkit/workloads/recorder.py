"""The recorder behind `perfkit.workloads.recording`: what PyTorch dispatches, as columns of a graph."""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

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
from perfkit.workloads.exchanges import Exchanges
from perfkit.workloads.graph import FEATURES, Graph
from perfkit.workloads.sandbox import replace
from perfkit.workloads.tables import EmbeddingTable
from perfkit.workloads.vocabulary import VIEWS, count_bytes, find_entry, walk_tensors

__all__ = ["Recorder", "find_caller"]

_COLUMN = {name: index for index, name in enumerate(FEATURES)}
_DTYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip
#: The node of autograd that keeps the gradient of a weight, and where reducers of gradients start from.
_KEEP = "torch::autograd::AccumulateGrad"
#: Largest real tensor of whole numbers that is worked on for real [-].
_WHOLE = 1 << 24


class _Schema:
    """What the recorder needs to know of an operation, looked up once."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.split("::")[-1]
        self.defaults = [(a.name, a.default_value) for a in schema.arguments]
        self.names = {a.name: i for i, a in enumerate(schema.arguments)}
        self.written = tuple(
            i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        )
        self.pointwise = torch.Tag.pointwise in func.tags
        self.view = self.name in VIEWS or func.namespace in ("prim", "profiler") or self.name == "wait_tensor"
        #: Written arguments are read too, unless they are only where results go.
        self.lent = self.written if self.name[-1] != "_" else ()
        self.exchange = func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
        #: One result whose shape PyTorch works out by itself, without looking at values.
        self.light = not self.written and (self.name in _LIGHT or self.pointwise) and len(schema.returns) == 1
        #: Changes its first argument and nothing else, so that nothing has to be worked out.
        self.foreach = self.name.startswith("_foreach_")
        self.in_place = self.written == (0,) and self.name[-1] == "_" and (self.pointwise or self.foreach)

    def complete(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Arguments in the order of the schema, defaults included."""
        rest = self.defaults[len(args) :]
        return [*args, *(kwargs.get(name, default) for name, default in rest)]


class Recorder(TorchDispatchMode):
    """Appends what is dispatched to columns; keeps storages, never tensors, which would change what autograd does.

    Parameters
    ----------
    fake : FakeTensorMode
        The mode that tensors without values belong to.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake, self.on, self.whole = fake, False, False
        self.exchanges = Exchanges(lambda: len(self.labels))
        self.viewed = 0
        self.phase, self.leading, self.modules = "forward", False, cast(list[str], [])
        self.labels: list[tuple[str, str, str, str, str]] = []
        self.features: list[list[float]] = []
        self.accesses: list[tuple[int, int, float, int]] = []
        self.dtypes: list[str] = []
        self.tables: list[EmbeddingTable] = []
        self.trained: dict[int, int] = {}
        self._schemas: dict[Any, _Schema] = {}
        self._storages: dict[int, tuple[int, Any]] = {}
        self._known: dict[tuple[Any, ...], int] = {}
        self._starts: list[int] = []
        self._paths: list[str] = []
        self._node: tuple[int, str] | None = None
        self._opened, self.bare = True, 0

    # -- where an operation belongs ----------------------------------------------------------------------------------

    def mark(self) -> None:
        """Note that nodes of autograd made from here on belong to the innermost module that runs."""
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._paths.append(self.modules[-1] if self.modules else "")

    def _locate(self, tensors: Sequence[Tensor]) -> str:
        """Path of the module; turns the phase and counts calls of autograd on the way."""
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
                weight = node.variable
                self.trained[self._key(weight)] = weight.numel()
        self.phase, self.leading = "backward", False
        if self.modules:  # computed again for the backward pass
            return self.modules[-1]
        place = bisect_right(self._starts, number) - 1
        return self._paths[place] if place >= 0 and number < 1 << 62 else ""

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = _Schema(func)
        kwargs = kwargs or {}
        given = [t for t in walk_tensors([args, kwargs]) if isinstance(t, Tensor)]
        work = None
        if schema.exchange and func.namespace == "c10d":
            out, work = self.exchanges.stand_in(func, args)
        elif self.whole and (all(_is_whole(t, schema) for t in given) if given else kwargs.get("dtype") is torch.int32):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        elif given and not schema.written and all(_is_whole(t, schema) for t in given):
            out = self._compute(func, args, kwargs)
        elif schema.in_place and given[0].numel() > 1 and all(_is_plain(t, self.fake) for t in given):
            out = None if schema.foreach else args[0]
        elif schema.in_place and not schema.foreach and _is_plain(args[0], self.fake) and any(map(_is_sparse, given)):
            out = args[0]  # a fake table would be made real to add sparse rows to it
        elif schema.light and given and all(_is_plain(t, self.fake) for t in given):
            with in_kernel_invocation_manager(self.fake):
                out = func(*args, **kwargs)
            out = FakeTensor(self.fake, out, _HOME)
        elif schema.name == "_embedding_bag_backward" and schema.complete(args, kwargs)[9]:
            out = _sparse_rows(args[0], args[1].numel(), (args[6], args[0].shape[1]))
        elif schema.name == "_coalesce":
            out = self._merge(args[0])
        elif schema.name == "sparse_mask":
            out = _sparse_rows(args[0], args[1]._nnz(), args[1].shape)._coalesced_(True)
        elif schema.name == "clone" and given[0].layout is torch.sparse_coo:
            return args[0].detach()  # fake copies lose their rows
        elif func is _LIFT or all(isinstance(t, FakeTensor) for t in given):
            out = func(*args, **kwargs)
        else:  # what is real would be worked on for real
            if schema.name.startswith("index") and len(args) > 1 and isinstance(args[1], list):
                args = (args[0], _find_places(args[1]), *args[2:])
            out = func(*self._fake(args), **{key: self._fake(value) for key, value in kwargs.items()})
        if self.on and not self.whole:
            module = self._locate(given)
            if schema.name == "wait_tensor":
                self.exchanges.touch([self._key(t) for t in given])
            elif schema.exchange:
                self._exchange(func, schema, schema.complete(args, kwargs), out, module, work)
            elif schema.view:
                self.viewed += 1
            else:
                self._append(schema, schema.complete(args, kwargs), given, out, module)
        return out

    def _exchange(self, func: Any, schema: _Schema, args: list[Any], out: Any, module: str, work: Any) -> None:
        """Append a collective."""
        name = self.exchanges.find(func)
        if not name:
            return
        reads, writes, nbytes, group = self.exchanges.describe(name, func, args, out)
        self._emit((name, "collective", name, self.phase, module), {"nbytes": nbytes, "group": group}, reads, writes)
        blocking = "async_op" in schema.names and not args[schema.names["async_op"]]
        keys = [self._key(t) for t in writes]
        self.exchanges.launch(keys, work, blocking=blocking, called=bool(find_caller("distributed_c10d.py")))

    def _merge(self, gradient: Tensor) -> Tensor:
        """A sparse gradient with each row once: as many as are expected to differ."""
        rows = gradient.shape[0]
        law = next((table.distribution for table in self.tables if table.rows == rows), Uniform(rows))
        count = round(float(unique_rows(law, gradient._nnz())))
        return _sparse_rows(gradient._values(), count, gradient.shape)._coalesced_(True)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Work on real whole numbers, such as indices, for real: they decide sizes."""
        if func is _LIFT:
            return args[0]
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_floating_point():
            return self.fake.from_tensor(out)
        return out

    def _fake(self, tree: Any) -> Any:
        """Arguments with a fake tensor for each real one."""
        if isinstance(tree, Tensor):
            return tree if isinstance(tree, FakeTensor) else self.fake.from_tensor(tree)
        return type(tree)(map(self._fake, tree)) if isinstance(tree, list | tuple) else tree

    def _key(self, tensor: Tensor) -> int:
        """Number of a tensor's storage."""
        if not isinstance(tensor, FakeTensor):
            tensor = self.fake.from_tensor(tensor)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        storage = tensor.untyped_storage()
        return self._storages.setdefault(storage._cdata, (len(self._storages), storage))[0]

    def _append(self, schema: _Schema, args: list[Any], given: Sequence[Tensor], out: Any, module: str) -> None:
        sparse = schema.name == "add_" and args[1].__class__ is not int and _is_sparse(args[1])
        entry = find_entry(schema.name, pointwise=schema.pointwise, sparse=sparse)
        kind, variant = entry.kind, entry.variant
        if callable(variant):
            variant = variant(schema.name, args)
        sizes = entry.sizes(args, out) | {"launches": entry.launches}
        if kind.startswith("embedding") and variant != "dense_rows":
            sizes |= self._table(schema.name, args, sizes)
        reads = [
            t for i, a in enumerate(args) if i not in entry.unread and i not in schema.lent for t in walk_tensors(a)
        ]
        writes = [t for i in schema.written for t in walk_tensors(args[i])]
        if sparse:
            reads, writes = [args[1]], []
        elif not writes:
            writes = list(walk_tensors(out))[: 1 if schema.name == "_embedding_bag" else None]
        finishing = not self._node and torch._C._current_graph_task_id() != -1
        if finishing:
            self.exchanges.touch([self._key(t) for t in reads])
        if finishing or (self._node and self._node[1] == _KEEP and schema.name == "mul"):  # a reducer's copies
            sizes |= {"calls": 0}
        floats = (t.dtype for t in (*walk_tensors(out), *given) if t.dtype in _DTYPES)
        dtype = _DTYPES.get(next(floats, None), "")  # type: ignore[arg-type]
        self._emit((schema.name, kind, variant or schema.name, self.phase, module), sizes, reads, writes, dtype)

    def _emit(
        self,
        label: tuple[str, str, str, str, str],
        sizes: dict[str, float],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        dtype: str = "",
    ) -> None:
        """Append one operation to the columns."""
        index, row = len(self.labels), [0.0] * len(FEATURES)
        sizes = {"launches": 1, "calls": not (self._node and self._opened and not self.modules), **sizes}
        for key, value in sizes.items():
            row[_COLUMN[key]] = value
        row[_COLUMN["bare"]], self.bare, self._opened = self.bare, 0, True
        self.labels.append(label)
        self.features.append(row)
        self.dtypes.append(dtype)
        for flag, tensors in enumerate((reads, writes)):
            for tensor in {id(t): t for t in tensors}.values():
                if nbytes := count_bytes(tensor):
                    self.accesses.append((index, self._key(tensor), nbytes, flag))

    @contextmanager
    def rebuild(self) -> Iterator[None]:
        """See waits, and let a module over ranks agree on its buckets: it reads the whole numbers it sends."""
        reducer: Any = torch._C._distributed_c10d.Reducer
        agree = reducer._rebuild_buckets

        def agreed(own: Any) -> Any:
            self.whole = True
            try:
                return agree(own)
            finally:
                self.whole = False

        with replace(reducer, _rebuild_buckets=agreed), self.exchanges.watch():
            yield

    def transfer(self, direction: str, tensor: Tensor) -> None:
        """Append a copy between host and device that the host waits for."""
        label = ("to", "transfer", direction, self.phase, self.modules[-1] if self.modules else "")
        self._emit(label, {"elements": tensor.numel()}, [], [tensor], _DTYPES.get(tensor.dtype, ""))

    def _table(self, name: str, args: list[Any], sizes: dict[str, float]) -> dict[str, float]:
        """Number of the table that rows are looked up in, which is noted when it is first seen."""
        if name == "_embedding_bag_backward":
            return {"table": self._known[self._key(args[1]), args[6]]}
        weight = self._key(args[0])
        if name != "_embedding_bag":
            known = self._known.get((weight, "bags"), sizes["lookups"])
            return {"table": self._known.get((weight,), 0), "bags": known}
        rows, dim = args[0].shape
        number = self._known.setdefault((weight,), len(self.tables))
        self._known[self._key(args[1]), rows], self._known[weight, "bags"] = number, int(sizes["bags"])
        if number == len(self.tables):
            pooling = sizes["lookups"] / max(sizes["bags"], 1.0)
            exponent = _fit_exponent(args[1], rows)
            table = EmbeddingTable(rows, dim, pooling or 1.0, exponent, args[0].element_size(), f"table {number}")
            self.tables.append(table)
        return {"table": number}

    def graph(self, name: str, family: str, ranks: int) -> Graph:
        """Everything recorded as columns."""
        features = np.array(self.features, dtype=float).reshape(-1, len(FEATURES))
        accesses = np.array(self.accesses, dtype=float).reshape(-1, 4)
        work = Counter[str]()
        for dtype, flops in zip(self.dtypes, features[:, _COLUMN["flops"]] + 1.0, strict=True):
            work[dtype] += flops
        del work[""]
        main = max(work, key=lambda d: work[d]) if work else "fp32"
        dtypes = tuple(dtype or main for dtype in self.dtypes)
        return Graph(
            tuple(self.labels), features, accesses, tuple(self.tables), sum(self.trained.values()), name or "step",
            family, main, dtypes if set(dtypes) - {main} else (), ranks,
            self.exchanges.communicators(ranks), self.exchanges.rows(self.labels),
        )  # fmt: skip


def find_caller(name: str) -> Any:
    """Find the nearest frame of a file that calls, autograd's engine not passed.

    Parameters
    ----------
    name : str
        How the file's path ends.

    Returns
    -------
    frame : frame or None
        None where no such file calls.
    """
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.endswith("autograd/graph.py"):
        if frame.f_code.co_filename.endswith(name):
            return frame
        frame = frame.f_back
    return None


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _is_whole(tensor: Tensor, schema: _Schema) -> bool:
    """Whether it is a real tensor of whole numbers, small enough to work on, or a real number that is read."""
    whole = not (tensor.is_floating_point() or tensor.is_complex()) or schema.name == "_local_scalar_dense"
    return not isinstance(tensor, FakeTensor) and whole and tensor.numel() <= _WHOLE


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
    """A sparse gradient of a table with as many rows as are known to be there, which fake tensors do not know."""
    where = torch.empty((1, count), dtype=torch.long)
    return torch.sparse_coo_tensor(where, like.new_empty((count, *shape[1:])), shape, check_invariants=False)


def _fit_exponent(indices: Tensor, rows: int) -> float:
    """Zipf exponent at which as many rows would differ as do; 0 for fake indices."""
    if isinstance(indices, FakeTensor) or not indices.numel():
        return 0.0
    with unset_fake_temporarily():
        unique, lookups = int(torch.unique(indices).numel()), indices.numel()
    if unique > 0.98 * float(unique_rows(Zipf(rows, 1e-6), lookups)):
        return 0.0
    root = find_root(lambda s: unique - float(unique_rows(Zipf(rows, s), lookups)), 0.0, 4.0, precision=1e-6)
    return round(root, 3)


def _is_plain(tensor: Tensor, fake: FakeTensorMode) -> bool:
    """Whether it is a fake tensor like most; copies of modules bring a mode of their own."""
    mine = isinstance(tensor, FakeTensor) and tensor.fake_mode is fake
    return mine and tensor.constant is None and tensor.layout is torch.strided  # type: ignore[attr-defined]


_HOME = torch.device("cpu")
_LIGHT = frozenset(
    "view t detach transpose expand _unsafe_view slice unsqueeze as_strided alias select squeeze permute "
    "_reshape_alias mm addmm bmm".split()
)
_LIFT = torch.ops.aten.lift_fresh.default
_DEVICE = torch.ops.prim.device.default
