"""Results of operations that are not computed, and what is known of them all the same.

Small tensors that are filled, counted or drawn and not trained keep their values, and so does what is made of nothing
but these: masks, indices, lengths, random numbers that decide whether a layer runs. So a step gets an answer where it
asks for one.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import _disable_current_modes

from perfkit.models.distributions import Uniform, unique_rows
from perfkit.recording.sandbox import MOST_KNOWN
from perfkit.workloads.vocabulary import walk_tensors

#: Largest tensor that is filled, counted or drawn for real [-].
_MOST_DRAWN = 1 << 20
#: Operations that keep which entries follow from a choice among several, such as that of experts.
_FOLLOWING = frozenset("eq gt ge scatter scatter_ index select clone _to_copy sum any amax".split())
#: Data types of indices that are masks: how many numbers they pick is not known.
_MASKS = (torch.bool, torch.uint8)
#: What is assumed where a step asks how many rows a choice gives.
BALANCED = "rows that are chosen by computed scores, such as those of experts, are taken to be equally many for each"


class Storages:
    """Numbers of storages, and how many bytes each takes until when."""

    def __init__(self) -> None:
        self.allocations: list[tuple[int, float]] = []  # number and bytes, less than zero where they are released
        self._held: list[float] = []  # bytes by number
        self._known: dict[int, tuple[int, Any]] = {}  # number and reference, by address

    def begin(self) -> None:
        """What is in memory now was there before."""
        self.allocations = [(number, nbytes) for number, nbytes in enumerate(self._held) if nbytes]

    def number(self, storage: Any, outside: bool) -> int:
        """Number of a storage; one from outside the step stays, others are not kept alive."""
        if (key := storage._cdata) not in self._known:
            own = weakref.proxy(self)  # the next storage may have its address
            kept = storage if outside else weakref.ref(storage, lambda _: own._change(own._known.pop(key)[0], 0))
            self._known[key] = len(self._held), kept
            self._held.append(0.0)
            self._change(self._known[key][0], storage.nbytes())
        return self._known[key][0]

    def resize(self, storage: Any, nbytes: float) -> None:
        """Note how many bytes a storage takes from now on [B]."""
        if storage._cdata in self._known:
            self._change(self._known[storage._cdata][0], nbytes)

    def _change(self, number: int, nbytes: float) -> None:
        self.allocations.append((number, nbytes - self._held[number]))
        self._held[number] = nbytes


class Values:
    """Works out operations of a step.

    Parameters
    ----------
    fake : FakeTensorMode
        The mode that tensors without values belong to.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        self.laws: dict[int, Any] = {}  # how rows of tables are looked up, by their number
        self.notes: dict[str, None] = {}
        self.storages = Storages()
        self._copies: dict[int, tuple[Any, Any]] = {}  # real storages, and what is worked on in place of them
        self._generators: dict[int, tuple[Any, Any]] = {}
        self._sizes: dict[Any, tuple[Any, Any, Any]] = {}  # of results: shape, strides and data type
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of fake tensors
        self._shares: dict[int, float] = {}  # of entries that are true or of one value, by storage

    def number(self, tensor: Tensor) -> int:
        """Number of a tensor's storage."""
        outside, tensor = not isinstance(tensor, FakeTensor), self.pretend(tensor)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        return self.storages.number(tensor.untyped_storage(), outside)

    def pretend(self, tree: Any) -> Any:
        """Fake tensors for real ones, which would be worked on for real; whole numbers stay known."""
        if isinstance(tree, FakeTensor):
            return tree
        if not isinstance(tree, Tensor):
            return type(tree)(map(self.pretend, tree)) if isinstance(tree, list | tuple) else tree
        if not _is_known(tree):
            return self.fake.from_tensor(tree)
        storage = tree.untyped_storage()
        with _disable_current_modes():
            if storage._cdata not in self._copies:  # which may be changed, the real ones may not
                self._copies[storage._cdata] = storage, storage.clone()
            known = torch.empty(0, dtype=tree.dtype)
            known.set_(self._copies[storage._cdata][1], tree.storage_offset(), tree.shape, tree.stride())
        return _keep(self.fake, known)

    def work_out(self, func: Any, schema: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """The result of an operation; fake tensors do not know how many rows sparse ones have."""
        name, known = schema.name, all(map(_is_known, given))
        if name == "lift_fresh":  # made by torch.tensor
            return args[0] if is_whole(args[0]) else func(*args)
        if not known:
            written = [schema.complete(args, kwargs)[i] for i in schema.written]
            self._forget([*walk_tensors(written), *(t for t in given if t.requires_grad)])
        if schema.in_place and not known:
            return args[0] if isinstance(args[0], Tensor) else None
        if name == "_embedding_bag_backward" and schema.complete(args, kwargs)[9]:
            return _make_rows(args[0], args[1].numel(), (args[6], args[0].shape[1]))
        if name == "_coalesce":  # each row once: as many as are expected to differ
            rows = args[0].shape[0]
            count = round(float(unique_rows(self.laws.get(rows, Uniform(rows)), args[0]._nnz())))
            return _make_rows(args[0]._values(), count, args[0].shape)._coalesced_(True)
        if name == "sparse_mask":
            return _make_rows(args[0], args[1]._nnz(), args[1].shape)._coalesced_(True)
        if name == "nonzero" and self._find_shares(given):
            return self._choose(given[0])
        if name == "_grouped_mm" and isinstance(args[2], Tensor) and not _is_known(args[2]):
            self.notes[BALANCED] = None
        if name == "_ctc_loss" and (lengths := self.pretend(args[3]).constant) is not None:
            with _disable_current_modes():
                states = 2 * int(lengths.max()) + 1
            return args[0].new_empty(args[0].shape[1]), args[0].new_empty((args[0].shape[1], args[0].shape[0], states))
        if name == "_ctc_loss_backward":
            return torch.empty_like(args[1])
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], list):
            args = (args[0], [place for index in args[1] for place in self._split(index)], *args[2:])
        if (own := kwargs.get("generator")) is not None:  # which stays as it is
            kwargs = {**kwargs, "generator": self._generators.setdefault(id(own), (own, own.clone_state()))[1]}
        out = self._look_up(func, schema, args, kwargs, given)
        if name == "native_group_norm_backward" and out[0] is not None:  # PyTorch's rule for fake tensors widens it
            out = (out[0].to(args[1].dtype), *out[1:])
        if name in ("topk", "argmax") or (name in _FOLLOWING and not known):
            self._follow(name, schema.complete(args, kwargs), given, out)
        if given or name.startswith("empty") or not isinstance(out, FakeTensor) or out.numel() > _MOST_DRAWN:
            return out
        with _disable_current_modes():
            real = func(*args, **kwargs)
        return _keep(self.fake, real) if real.device.type == "cpu" else out

    def _look_up(self, func: Any, schema: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """Result of an operation, soon where it is a view or where tensors of these sizes have met it before."""
        plain = given and all(type(t) is FakeTensor and t.constant is None and t.layout is torch.strided for t in given)
        key, device = None, getattr(given[0], "fake_device", None) if plain else None
        if plain and schema.aliasing:
            with in_kernel_invocation_manager(self.fake):
                out = func(*args, **kwargs)
            views = [self._wrap(view, device) for view in walk_tensors(out)]
            return views[0] if isinstance(out, Tensor) else views
        if plain and schema.sized and not (schema.name == "index" and any(t.dtype in _MASKS for t in given[1:])):
            key = func, torch.get_default_dtype(), _describe(args), _describe(tuple(kwargs.items()))
            if key in self._sizes:
                shape, strides, dtype = self._sizes[key]
                return self._make(shape, strides, dtype, device)
        out = func(*self.pretend(args), **{name: self.pretend(value) for name, value in kwargs.items()})
        storages = [t.untyped_storage()._cdata for t in given] if plain else []
        if key and out.layout is torch.strided and out.untyped_storage()._cdata not in storages:
            self._sizes[key] = out.shape, out.stride(), out.dtype
        return out

    def _make(self, shape: Sequence[int], strides: Sequence[int], dtype: Any, device: Any) -> Tensor:
        """A fake tensor with a storage of its own."""
        with torch._C._DisableTorchDispatch():
            return self._wrap(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)

    def _wrap(self, bare: Tensor, device: Any) -> Tensor:
        """A fake tensor with the attributes that its constructor gives to all of a device, one by one."""
        if device not in self._attributes:
            self._attributes[device] = vars(FakeTensor(self.fake, bare, device))
        keys: Any = {"dispatch_device": True, "device_for_backend_keys": device}
        made: Any = Tensor._make_subclass(FakeTensor, bare, bare.requires_grad, **keys)
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes[device])
        return made

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Values that are trained, or overwritten by what is not known."""
        for tensor in tensors:
            if isinstance(tensor, FakeTensor) and tensor.constant is not None:
                self.fake.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)

    # -- choices that depend on what is not computed: every alternative is taken to be chosen equally often -----------

    def _find_shares(self, tensors: Sequence[Tensor]) -> list[float]:
        numbers = [self.number(t) for t in tensors] if self._shares else []
        return [self._shares[number] for number in numbers if number in self._shares]

    def _follow(self, name: str, args: Sequence[Any], given: Sequence[Tensor], out: Any) -> None:
        """Note which share of the entries is of one value, or true."""
        shares = self._find_shares(given)
        if name in ("topk", "argmax"):
            dim = args[2] if name == "topk" else args[1]
            shares = [1 / max(args[0].shape[dim], 1)] if dim is not None else []
        elif name in ("sum", "any", "amax"):  # every alternative is chosen by something
            shares = [1.0] * len(shares)
        if shares:
            self._shares[self.number([*walk_tensors(out)][-1])] = min(shares)

    def _choose(self, mask: Tensor) -> Tensor:
        """Places where a mask is true: all of them, or as many as there should be."""
        (share,) = self._find_shares([mask])
        self.notes[BALANCED] = None
        if share < 1:
            return self._make((round(share * mask.numel()), mask.dim()), (mask.dim(), 1), torch.long, mask.device)
        with _disable_current_modes():
            real = torch.ones(mask.shape).nonzero()
        return _keep(self.fake, real)

    def _split(self, index: Any) -> Sequence[Any]:
        """An index, or for a mask those of the places where it should be true."""
        chosen = isinstance(index, Tensor) and index.dtype is torch.bool and self._find_shares([index])
        return self._choose(index).unbind(1) if chosen else [index]


def is_whole(tensor: Tensor) -> bool:
    """Whether it is a real tensor of whole numbers, such as indices: they decide sizes."""
    return not (isinstance(tensor, FakeTensor) or tensor.is_floating_point() or tensor.is_complex())


def _keep(fake: FakeTensorMode, known: Tensor) -> Tensor:
    """A fake tensor that keeps the values of a real one."""
    return fake.fake_tensor_converter.from_real_tensor(fake, known, make_constant=True)


def _describe(tree: Any) -> Any:
    """What the sizes of a result depend on: those of tensors, and other arguments as they are."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    return tuple(map(_describe, tree)) if isinstance(tree, list | tuple) else (type(tree), tree)


def _is_known(tensor: Tensor) -> bool:
    """Trained numbers are not: they would decide otherwise after some iterations."""
    if tensor.requires_grad:
        return False
    if isinstance(tensor, FakeTensor):
        return tensor.constant is not None
    return (is_whole(tensor) or tensor.numel() == 1) and tensor.numel() <= MOST_KNOWN


def _make_rows(like: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """A sparse gradient with a given number of rows, which fake tensors do not know."""
    where = torch.empty((1, count), dtype=torch.long)
    return torch.sparse_coo_tensor(where, like.new_empty((count, *shape[1:])), shape, check_invariants=False)
