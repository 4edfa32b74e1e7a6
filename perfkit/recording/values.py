"""Results of operations that are not computed, and the values that are known nevertheless.

Small tensors that are filled, counted or drawn keep their values unless they are trained, and so do
results that depend only on them: masks, indices, lengths, random numbers that decide whether a
layer runs. So a step that asks for such a value gets an answer.
"""

import weakref
import zlib
from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import _disable_current_modes

from perfkit.models.distributions import Uniform, unique_rows
from perfkit.recording.alike import exchange
from perfkit.recording.choices import Choices, balance
from perfkit.recording.fakes import Fakes, HandOver, make_keyless
from perfkit.recording.layouts import RULES, find_strides
from perfkit.recording.recurrent import make_gradients, make_results
from perfkit.recording.refusals import FORWARD_MODE, find_caller, refuse
from perfkit.workloads.vocabulary import walk_tensors

#: Largest tensors whose values are known, of whole numbers and of others [-]. Sizes and branches
#: hardly depend on large tensors of others, such as masks that are added to scores.
MOST_KNOWN = 1 << 24
MOST_DRAWN = 1 << 20
#: Data types of masks; the number of entries that a mask picks is not known.
_MASKS = (torch.bool, torch.uint8)
#: Assumption for a step that asks whether numbers are finite.
FINITE = "the step asks whether computed numbers are finite; they count as finite"
#: Assumption for a step that asks how many rows belong to an alternative.
BALANCED = "computed scores choose rows, such as those of experts; each alternative counts as chosen equally often"


#: Operations that allocate memory and write nothing to it.
_ALLOCATING = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
    ]
)
#: Operations that overwrite their first argument and do not read it: filled, copied and drawn.
_OVERWRITING = frozenset(
    [
        "fill_",
        "zero_",
        "copy_",
        "uniform_",
        "normal_",
        "random_",
        "bernoulli_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "cauchy_",
    ]
)
#: Operations that overwrite some elements of their first argument, and what writes a mark to the
#: same elements, from the arguments behind the first one.
_SCATTERING: dict[str, Callable[[Tensor, Sequence[Any]], Any]] = {
    "scatter_": lambda marks, places: marks.scatter_(places[0], places[1], True),
    "index_fill_": lambda marks, places: marks.index_fill_(places[0], places[1], True),
    "index_copy_": lambda marks, places: marks.index_fill_(places[0], places[1], True),
}
#: Operations that say which of two numbers is larger.
_ORDERING = ("lt", "le", "gt", "ge")
#: Operations with a rule of their own in `Values`, which computes no values.
_SIZES_ONLY = frozenset(
    ["_embedding_bag_backward", "_coalesce", "sparse_mask", "_ctc_loss", "_ctc_loss_backward"]
)


#: The device that stores all fake tensors.
_STORING = torch.device("cpu")
#: Largest memory that is compared with what it held before [B].
MOST_SHARED = 1 << 16


def compute(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function on real tensors, and record nothing; a data set may hold fake ones."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), HandOver():
        return func(*args, **kwargs)


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor is dense, and small enough to know its values."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.numel() <= MOST_DRAWN
    return tensor.numel() <= MOST_KNOWN


class FreshMemory:
    """Memory that was allocated without values: it is unknown until the step has filled it.

    Parameters
    ----------
    dtype : torch.dtype
        Data type of its elements.
    count : int
        Number of its elements [-].
    """

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.dtype, self.count = dtype, count
        self.values: Tensor | None = None  # all elements; allocated at the first fill
        self._written: Tensor | None = None  # which of them the step has written

    def view(self, like: Tensor) -> Tensor:
        """The real elements that a fake tensor shows."""
        if self.values is None:
            self.values = compute(torch.empty, self.count, dtype=self.dtype)
            self._written = compute(torch.zeros, self.count, dtype=torch.bool)
        place = like.shape, like.stride(), like.storage_offset()
        return compute(torch.as_strided, self.values, *place)

    def mark(self, like: Tensor) -> None:
        """Take the elements that a fake tensor shows as written."""
        place, written = (like.shape, like.stride(), like.storage_offset()), self._written
        if written is not None:
            compute(lambda: torch.as_strided(written, *place).fill_(True))

    def mark_places(self, like: Tensor, name: str, places: Sequence[Any]) -> None:
        """Take those elements as written that an operation of `_SCATTERING` writes."""
        place, written = (like.shape, like.stride(), like.storage_offset()), self._written
        if written is not None:
            compute(lambda: _SCATTERING[name](torch.as_strided(written, *place), places))

    def is_written(self, like: Tensor) -> bool:
        """Whether all elements that a fake tensor shows are written."""
        place, written = (like.shape, like.stride(), like.storage_offset()), self._written
        if written is None or like.dtype is not self.dtype:
            return False
        return bool(compute(lambda: torch.as_strided(written, *place).all().item()))


class Storages:
    """Numbers of storages, and the order in which they are allocated, resized and released."""

    def __init__(self) -> None:
        self.allocations: list[tuple[int, float]] = []  # number and bytes, negative for a release
        #: Memory that was allocated without values, by number.
        self.fresh: dict[int, FreshMemory] = {}
        self._held: list[float] = []  # bytes by number
        self._known: dict[int, tuple[int, Any]] = {}  # number and reference, by address

    def begin(self) -> None:
        """Begin the list of allocations with what is in memory now."""
        self.allocations = [(number, nbytes) for number, nbytes in enumerate(self._held) if nbytes]

    def number(self, storage: Any, outside: bool) -> int:
        """Number of a storage; storages from outside the step are kept alive, others not."""
        key = storage._cdata
        if key not in self._known:
            own = weakref.proxy(self)  # a later storage may have the same address
            kept = storage if outside else weakref.ref(storage, lambda _: own._release(key))
            self._known[key] = len(self._held), kept
            self._held.append(0.0)
            self._change(self._known[key][0], storage.nbytes())
        return self._known[key][0]

    def count(self) -> int:
        """Storages that were numbered so far [-]."""
        return len(self._held)

    def resize(self, storage: Any, nbytes: float) -> None:
        """Record a new size of a storage [B]."""
        if storage._cdata in self._known:
            self._change(self._known[storage._cdata][0], nbytes)

    def _release(self, key: int) -> None:
        """Record that the storage at this address is gone."""
        number, _ = self._known.pop(key)
        self.fresh.pop(number, None)
        self._change(number, 0)

    def _change(self, number: int, nbytes: float) -> None:
        self.allocations.append((number, nbytes - self._held[number]))
        self._held[number] = nbytes


class Values:
    """Finds the results of the operations of a step."""

    def __init__(self) -> None:
        # tensors without values
        self.fake = Fakes()
        self.laws: dict[int, Any] = {}  # distribution of lookups, by the rows of the table
        self.notes: dict[str, None] = {}  # assumptions, in the order they were made
        self.storages = Storages()
        # real storages and their copies, which operations may change
        self._copies: dict[int, tuple[Any, Any]] = {}
        # sums of the bytes of real storages when they were copied
        self._contents: dict[int, int] = {}
        # such storages, and the tensors that were made of them
        self._shared: list[tuple[int, Any]] = []
        # number of memory that was allocated without values, by the storage of its values
        self._filled: dict[int, int] = {}
        self._generators: dict[int, tuple[Any, Any]] = {}  # random generators and their copies
        self._sizes: dict[Any, tuple[Any, Any, Any]] = {}  # shape, strides and data type of results
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of fake tensors
        #: Storages that say whether a number is better than one of an earlier call.
        self.of_better: set[int] = set()
        # tensors of the meta device, which are kept alive, and what stands for them, by identity
        self._of_meta: dict[int, tuple[Tensor, Tensor]] = {}
        self.choices = Choices(self.number)

    def number(self, tensor: Tensor) -> int:
        """Number of a tensor's storage."""
        outside, tensor = not isinstance(tensor, FakeTensor), self.pretend(tensor)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        return self.storages.number(tensor.untyped_storage(), outside)

    def pretend(self, tree: Any) -> Any:
        """Replace real tensors in a tree of arguments by fake ones, so that nothing is computed on
        them.

        Known values stay known: the fake tensor keeps a copy of them.
        """
        if isinstance(tree, FakeTensor):
            return tree
        if not isinstance(tree, Tensor):
            return type(tree)(map(self.pretend, tree)) if isinstance(tree, list | tuple) else tree
        if tree.is_meta:
            return self._pretend_meta(tree)
        if not _is_known(tree):
            return self.fake.from_tensor(tree)
        storage = tree.untyped_storage()
        # an operation may change the copy, but not the original
        if storage._cdata not in self._copies:
            self._copies[storage._cdata] = storage, compute(storage.clone)
            self._contents[storage._cdata] = _sum_bytes(storage)
        elif _sum_bytes(storage) != self._contents[storage._cdata]:  # written by NumPy
            self._contents[storage._cdata] = _sum_bytes(storage)
            compute(self._copies[storage._cdata][1].copy_, storage)
        place = self._copies[storage._cdata][1], tree.storage_offset(), tree.shape, tree.stride()
        return _keep(self.fake, compute(lambda: torch.empty(0, dtype=tree.dtype).set_(*place)))

    def _pretend_meta(self, tensor: Tensor) -> Tensor:
        """A fake tensor for one of the meta device, which is stored as all others are."""
        if id(tensor) not in self._of_meta:
            made = self._make(tensor.shape, tensor.stride(), tensor.dtype, _STORING)
            self._of_meta[id(tensor)] = tensor, made
        return self._of_meta[id(tensor)][1]

    # -- memory that tensors share with arrays of NumPy

    def _note_shared(self, real: Any, made: Any) -> None:
        """Note a tensor that was made of a real one, which may share memory with an array."""
        if isinstance(real, FakeTensor) or not isinstance(made, FakeTensor):
            return
        key = real.untyped_storage()._cdata
        if self._contents.get(key):
            self._shared.append((key, weakref.ref(made)))

    def is_shared_memory_changed(self) -> bool:
        """Whether an array was changed after a tensor was made of it that is still there."""
        self._shared = [(key, made) for key, made in self._shared if made() is not None]
        return any(
            _sum_bytes(self._copies[key][0]) != self._contents[key] for key, _ in self._shared
        )

    def work_out(
        self, func: Any, schema: Any, args: Any, kwargs: Any, given: Sequence[Tensor]
    ) -> Any:
        """The result of an operation, and what is known of its values.

        A result is known if it was computed from known tensors alone. Memory that nobody wrote is
        not, and neither is what PyTorch's rules for fake tensors make of known tensors on the way
        to an unknown result.
        """
        if self.storages.fresh:
            for tensor in given:
                self._recall(tensor)
        if schema.name in _OVERWRITING and self._overwrite(func, args, kwargs):
            return args[0]
        if schema.name in _SCATTERING and self._scatter(func, schema.name, args, kwargs):
            return args[0]
        known = all(map(_is_known, given))
        written: list[Tensor] = []
        if schema.written and self.storages.fresh:
            complete = schema.complete(args, kwargs)
            written = list(walk_tensors([complete[i] for i in schema.written]))
        before = [getattr(tensor, "constant", None) for tensor in written]
        out = self._find_result(func, schema, args, kwargs, given, known)
        if schema.name == "lift_fresh":
            self._note_shared(args[0], out)
        allocated = schema.name in _ALLOCATING
        if allocated or schema.name in _SIZES_ONLY:
            self._strip(out, given)
        if allocated and isinstance(out, FakeTensor) and is_small(out):
            self._note_fresh(out)
        for tensor, constant in zip(written, before, strict=True):
            if getattr(tensor, "constant", None) is None:  # written, and not known any more
                self._forget_memory(tensor, constant)
        return out

    def _find_result(
        self,
        func: Any,
        schema: Any,
        args: Any,
        kwargs: Any,
        given: Sequence[Tensor],
        known: bool,
    ) -> Any:
        """The result of an operation: by PyTorch's rule for fake tensors, except where that rule
        does not suffice."""
        name = schema.name
        if not known:
            written = [schema.complete(args, kwargs)[i] for i in schema.written]
            self._forget([*walk_tensors(written), *(t for t in given if t.requires_grad)])
        if schema.fused_update:  # for some of these PyTorch has no rule
            self._forget(given)
            return None
        if name in ("add", "add_", "sub", "sub_") and are_sparse(args[:2]):
            return _add_rows(args[0], args[1], in_place=name.endswith("_"))
        if schema.in_place and not known:
            return args[0] if isinstance(args[0], Tensor) else None
        if name == "_embedding_bag_backward" and schema.complete(args, kwargs)[9]:
            return _make_rows(args[0], args[1].numel(), (args[6], args[0].shape[1]))
        if name == "_coalesce":  # each row once: as many as the expected number of distinct rows
            rows = args[0].shape[0]
            count = round(float(unique_rows(self.laws.get(rows, Uniform(rows)), args[0]._nnz())))
            return _make_rows(args[0]._values(), count, args[0].shape)._coalesced_(True)
        if name in ("bincount", "_unique2") and not known:
            counted = self._count_choices(name, schema.complete(args, kwargs), None)
            if counted is not None:
                return counted
        if name == "bincount" and not known and args[0].dim() == 1:
            count = schema.complete(args, kwargs)[2]
            if count > 0:  # such as the number of classes
                dtype = torch.long if len(given) == 1 else given[1].dtype
                return torch.empty(count, dtype=dtype)
        if name == "sparse_mask":
            return _make_rows(args[0], args[1]._nnz(), args[1].shape)._coalesced_(True)
        if name == "nonzero" and self.choices.find_share(given[0]) is not None:
            return self._choose(given[0])
        if name == "_grouped_mm" and isinstance(args[2], Tensor) and not _is_known(args[2]):
            self.notes[BALANCED] = None
        if name == "_pack_padded_sequence":
            packed = self._pack(*args)
            if packed is not None:
                return packed
        if name == "masked_select" and not known:
            selected = self._select(args[0], args[1])
            if selected is not None:
                return selected
        lengths = self.pretend(args[3]).constant if name == "_ctc_loss" else None
        if lengths is not None:
            states = compute(lambda: 2 * int(lengths.max()) + 1)
            return args[0].new_empty(args[0].shape[1]), args[0].new_empty(
                (args[0].shape[1], args[0].shape[0], states)
            )
        if name == "_ctc_loss_backward":
            return torch.empty_like(args[1])
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], list):
            args = (
                args[0],
                [place for index in args[1] for place in self._split(index)],
                *args[2:],
            )
        if name == "_cudnn_rnn":
            return make_results(schema.complete(args, kwargs))
        if name == "_cudnn_rnn_backward":
            return make_gradients(schema.complete(args, kwargs))
        if name == "_efficientzerotensor":
            refuse(FORWARD_MODE)
        kwargs = self._copy_generator(kwargs)
        out = self._look_up(func, schema, args, kwargs, given)
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if given and (not known or drawn):
            self._strip(out, given)
        is_new = isinstance(out, FakeTensor) and not schema.written
        if given and known and drawn and is_new and is_small(out):
            return _keep(self.fake, compute(func, *self._list_known(args), **kwargs))
        if name in RULES:
            out = self._lay_out(name, schema.complete(args, kwargs), out)
        # PyTorch's rule returns fp32
        if name == "native_group_norm_backward" and out[0] is not None:
            out = (out[0].to(args[1].dtype), *out[1:])
        # PyTorch's rule returns one gradient for both biases, where the kernel makes two
        if name == "mkldnn_rnn_layer_backward":
            out = (*out[:4], torch.empty_like(out[3]), *out[5:])
        # as `isfinite` asks
        asks_for_nan = name == "eq" and args[1] is args[0]
        asks_for_inf = name == "ne" and isinstance(args[1], float) and args[1] == inf
        finite = asks_for_nan or asks_for_inf
        if not known and (finite or name in ("isinf", "isnan", "isposinf", "isneginf")):
            # a distribution checks its parameters, which is no decision of the step
            if not find_caller("distributions/distribution.py"):
                self.notes[FINITE] = None
            self._answer_finite(out, finite)
        infinity = None if known or name not in _ORDERING else _find_infinity(args[1])
        if infinity is not None:
            self._answer_finite(out, (infinity > 0) == name.startswith("l"))
        if not known:
            complete = schema.complete(args, kwargs)
            if name in ("sum", "histc"):
                counted = self._count_choices(name, complete, out)
                if counted is not None:
                    return counted
            self.choices.follow(name, complete, given, out)
        if (
            given
            or name.startswith("empty")
            or not isinstance(out, FakeTensor)
            or out.numel() > MOST_DRAWN
        ):
            return out
        real = compute(func, *args, **kwargs)
        return _keep(self.fake, real) if real.device.type == "cpu" else out

    def _look_up(
        self, func: Any, schema: Any, args: Any, kwargs: Any, given: Sequence[Tensor]
    ) -> Any:
        """Result by PyTorch's rule; views, and sizes that were met before, take a fast path."""
        plain = given and all(
            type(t) is FakeTensor and t.constant is None and t.layout is torch.strided
            for t in given
        )
        key, device = None, getattr(given[0], "fake_device", None) if plain else None
        if plain and schema.aliasing:
            with in_kernel_invocation_manager(self.fake):
                out = func(*args, **kwargs)
            views = [self._wrap(view, device) for view in walk_tensors(out)]
            return views[0] if isinstance(out, Tensor) else views
        if (
            plain
            and schema.sized
            and not (schema.name == "index" and any(t.dtype in _MASKS for t in given[1:]))
        ):
            key = func, torch.get_default_dtype(), _describe(args), _describe(tuple(kwargs.items()))
            if key in self._sizes:
                shape, strides, dtype = self._sizes[key]
                return self._make(shape, strides, dtype, device)
        out = func(
            *self.pretend(args), **{name: self.pretend(value) for name, value in kwargs.items()}
        )
        storages = [t.untyped_storage()._cdata for t in given] if plain else []
        if key and out.layout is torch.strided and out.untyped_storage()._cdata not in storages:
            self._sizes[key] = out.shape, out.stride(), out.dtype
        return out

    def _lay_out(self, name: str, args: Any, out: Any) -> Any:
        """Results of an operation, the first of which lies in memory as its kernel puts it."""
        first = out if isinstance(out, Tensor) else out[0]
        # a gradient that is not wanted, or that is written to a tensor that was given
        if type(first) is not FakeTensor or first.constant is not None:
            return out
        strides = find_strides(name, args, first)
        if strides == first.stride():
            return out
        placed = self._make(first.shape, strides, first.dtype, first.fake_device)
        return placed if isinstance(out, Tensor) else (placed, *out[1:])

    def _make(
        self, shape: Sequence[int], strides: Sequence[int], dtype: Any, device: Any
    ) -> Tensor:
        """A fake tensor with a storage of its own."""
        with torch._C._DisableTorchDispatch():
            return self._wrap(
                torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device
            )

    def _wrap(self, bare: Tensor, device: Any) -> Tensor:
        """A fake tensor, made without its slow constructor: all tensors of a device have the same
        attributes."""
        if device not in self._attributes:
            self._attributes[device] = vars(FakeTensor(self.fake, bare, device))
        keys: Any = {"dispatch_device": True, "device_for_backend_keys": device}
        made = make_keyless(Tensor._make_subclass, bare, bare.requires_grad, **keys)
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes[device])
        return made

    def _copy_generator(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments with a copy of the generator of the user, which is not changed."""
        own = kwargs.get("generator")
        if own is None:
            return kwargs
        if id(own) not in self._generators:
            self._generators[id(own)] = own, own.clone_state()
        return {**kwargs, "generator": self._generators[id(own)][1]}

    def list_copies(self) -> list[Any]:
        """Copies of the generators of the user, from which the step draws."""
        return [copy for _, copy in self._generators.values()]

    # -- what is known of the values of tensors

    def _answer_finite(self, out: FakeTensor, answer: bool) -> None:
        """Give the same known answer for all elements, as of numbers that are finite."""
        # a large one is one number that is repeated
        size = out.shape if out.numel() <= MOST_KNOWN else ()
        self._attach(out, compute(lambda: torch.full(size, answer).expand(out.shape)))

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Forget known values of tensors that are trained, or overwritten with unknown values."""
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                continue
            constant = tensor.constant
            if constant is not None:
                self.fake.fake_tensor_converter.invalidate_constant_aliases(constant)
            self._forget_memory(tensor, constant)

    def _forget_memory(self, tensor: Tensor, constant: Tensor | None) -> None:
        """Forget what is known of memory that was allocated without values; `constant` are the
        values of the tensor, whose storage tells views of filled memory."""
        memory = self._find_fresh(tensor, remove=True)
        if memory is None and constant is not None:
            number = self._filled.pop(constant.untyped_storage()._cdata, -1)
            memory = self.storages.fresh.pop(number, None)
        if memory is not None and memory.values is not None:
            self.fake.fake_tensor_converter.invalidate_constant_aliases(memory.values)

    def _find_fresh(self, tensor: Tensor, *, remove: bool = False) -> FreshMemory | None:
        """Memory of a tensor that was allocated without values; None for other memory."""
        fresh = self.storages.fresh
        if not fresh or not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return None
        number = self.number(tensor)
        return fresh.pop(number, None) if remove else fresh.get(number)

    def _note_fresh(self, tensor: FakeTensor) -> None:
        """Note that nobody has written the memory of a new tensor."""
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.storages.fresh[self.number(tensor)] = FreshMemory(tensor.dtype, count)

    def _recall(self, tensor: Tensor) -> None:
        """Attach the values of memory that was allocated without values and is filled by now."""
        if not isinstance(tensor, FakeTensor) or tensor.requires_grad:
            return
        if tensor.constant is None and is_small(tensor):
            memory = self._find_fresh(tensor)
            if memory is not None and memory.is_written(tensor):
                values = memory.view(tensor)
                self._filled[values.untyped_storage()._cdata] = self.number(tensor)
                self._attach(tensor, values)

    def _attach(self, tensor: FakeTensor, values: Tensor) -> None:
        """Take the values of a fake tensor as known, until one of its aliases is overwritten."""
        tensor.constant = values
        self.fake.fake_tensor_converter.add_constant_storage_mapping(tensor)

    def copy_deeply(self, tensor: Tensor, memo: dict[int, Any]) -> Any:
        """A deep copy of a tensor: a real one becomes a fake one, and known values stay known.
        PyTorch would give the values of a fake tensor to a fake copy of them."""
        if id(tensor) in memo:
            return memo[id(tensor)]
        pretended: Any = self.pretend(tensor)
        constant: Any = pretended.constant
        pretended.constant = None
        try:
            made: Any = Tensor.__deepcopy__(pretended, memo)
        finally:
            pretended.constant = constant
        memo.pop(id(pretended), None)  # of a real tensor it is gone, and another may get its place
        memo[id(tensor)] = made
        if constant is not None and made.constant is None:
            self._attach(made, compute(constant.clone))
        return made

    def _overwrite(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Fill a tensor with known or drawn values; False where the values are not known."""
        target = args[0]
        sources = [*walk_tensors(args[1:]), *walk_tensors(kwargs)]
        if not isinstance(target, FakeTensor) or target.requires_grad or not is_small(target):
            return False
        if not all(map(_is_known, sources)):
            return False
        memory = None
        values = target.constant
        if values is None:
            memory = self._find_fresh(target)
            if memory is None or memory.dtype is not target.dtype:
                return False
            values = memory.view(target)
        sources = self._list_known(args[1:])
        compute(func, values, *sources, **self._copy_generator(kwargs))
        if memory is not None:
            memory.mark(target)
            self._recall(target)
        return True

    def _list_known(self, args: Sequence[Any]) -> list[Any]:
        """Arguments with real tensors in place of known ones."""
        return [
            getattr(self.pretend(each), "constant", None) if isinstance(each, Tensor) else each
            for each in args
        ]

    def _scatter(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        """Write known values to some elements of memory that was allocated without values; False
        where they are not known, and for other memory."""
        target, sources = args[0], [*walk_tensors(args[1:]), *walk_tensors(kwargs)]
        if target.requires_grad or not is_small(target) or not all(map(_is_known, sources)):
            return False
        memory = self._find_fresh(target)
        if target.constant is not None or memory is None or memory.dtype is not target.dtype:
            return False
        values = memory.view(target)
        places = self._list_known(args[1:])
        compute(func, values, *places, **kwargs)
        memory.mark_places(target, name, places)
        self._recall(target)
        return True

    def _strip(self, out: Any, given: Sequence[Tensor]) -> None:
        """Take the values of results as unknown, except for arguments that are handed back."""
        for tensor in walk_tensors(out):
            handed_back = any(tensor is argument for argument in given)
            if isinstance(tensor, FakeTensor) and tensor.constant is not None and not handed_back:
                tensor.constant = None

    def replace(self, tensor: Any, source: Any) -> None:
        """What is known after ``tensor.data = source``: the values of the source."""
        if isinstance(tensor, FakeTensor):
            tensor.constant = None
            known = self.pretend(source).constant if isinstance(source, Tensor) else None
            if known is not None:
                self._attach(tensor, known)

    def exchange(
        self,
        collective: str,
        given: Sequence[Tensor],
        results: Sequence[Tensor],
        ranks: int,
        reduction: str | None,
    ) -> None:
        """Note what a collective makes of known numbers, see `alike.exchange`; results are not known
        otherwise."""
        known = [self.pretend(tensor).constant for tensor in given if _is_known(tensor)]
        numbers = None
        if given and len(known) == len(given) and all(map(is_small, results)):
            counts = [tensor.numel() for tensor in results]
            numbers = compute(exchange, collective, known, counts, ranks, reduction)
        self._forget(results)
        for place, tensor in enumerate(results):
            if numbers is not None and isinstance(tensor, FakeTensor) and not tensor.requires_grad:
                real = compute(lambda n, t: n.to(t.dtype).view(t.shape), numbers[place], tensor)
                self._attach(tensor, real)

    # -- choices that depend on computed values: every alternative counts as chosen equally often
    # ---------------------

    def _count_choices(self, name: str, args: Sequence[Any], out: Any) -> Any:
        """How often each alternative is chosen; None where an operation does not ask so."""
        counted = compute(self.choices.count, name, args, out)
        if counted is None:
            return None
        self.notes[BALANCED] = None
        made = _keep(self.fake, counted)
        if name != "_unique2":
            return made
        # besides: the place of each among the distinct ones, and how often these are there
        places = self._make(args[0].shape, args[0].stride(), torch.long, args[0].device)
        often = compute(torch.tensor, balance(args[0].numel(), counted.numel()))
        return made, places, _keep(self.fake, often)

    def _choose(self, mask: Tensor) -> Tensor:
        """Places where a mask is true: of a share below 1 only their number is known, a share of 1
        means all places."""
        share = self.choices.find_share(mask) or 0.0
        self.notes[BALANCED] = None
        if share < 1:
            return self._make(
                (round(share * mask.numel()), mask.dim()), (mask.dim(), 1), torch.long, mask.device
            )
        return _keep(self.fake, compute(lambda: torch.ones(mask.shape).nonzero()))

    def _select(self, tensor: Tensor, mask: Tensor) -> Tensor | None:
        """The elements of a tensor where a mask is true; None if their number is not known."""
        shape = compute(torch.broadcast_shapes, tensor.shape, mask.shape)
        total = prod(shape)
        known = self.pretend(mask).constant
        if known is not None:
            count = compute(lambda: int(known.sum())) * (total // max(known.numel(), 1))
        else:
            share = self.choices.find_share(mask)
            if share is None:
                return None
            self.notes[BALANCED] = None
            count = round(share * total)
        return self._make((count,), (1,), tensor.dtype, self.pretend(tensor).device)

    def _pack(self, rows: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        """Elements of sequences of known lengths by time step, and how many sequences reach each time
        step, as a real tensor: PyTorch reads it in the backward pass, past its dispatch. None if the
        lengths are not known."""
        known = self.pretend(lengths).constant
        if known is None:
            return None
        # one number for each element
        elements = compute(torch.empty, rows.shape[:2])
        packed, batches = compute(torch._pack_padded_sequence, elements, known, batch_first)
        shape = (len(packed), *rows.shape[2:])
        strides = compute(lambda: torch.empty(shape, device="meta").stride())
        data = self._make(shape, strides, rows.dtype, self.pretend(rows).device)
        return data, batches

    def _split(self, index: Any) -> Sequence[Any]:
        """Indices of the places where a mask is true; other indices as they are."""
        chosen = (
            isinstance(index, Tensor)
            and index.dtype is torch.bool
            and self.choices.find_share(index) is not None
        )
        return self._choose(index).unbind(1) if chosen else [index]


def _sum_bytes(storage: Any) -> int:
    """A sum of the bytes of a real storage; 0 for a large one, which is taken not to change."""
    if not 0 < storage.nbytes() <= MOST_SHARED:
        return 0
    return compute(
        lambda: zlib.crc32(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes())
    )


def _find_infinity(bound: Any) -> float | None:
    """An infinite number that something is, also as a known tensor; None for anything else."""
    known = getattr(bound, "constant", None) if isinstance(bound, FakeTensor) else bound
    if isinstance(known, Tensor) and not known.dim() and known.is_floating_point():
        known = compute(known.item)
    return known if isinstance(known, float) and abs(known) == inf else None


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is real and holds whole numbers, such as indices, on which sizes depend."""
    return not (isinstance(tensor, FakeTensor) or tensor.is_floating_point() or tensor.is_complex())


def _keep(fake: FakeTensorMode, known: Tensor) -> Tensor:
    """A fake tensor that keeps the values of a real one."""
    with torch._C.DisableTorchFunction():  # PyTorch 2.14 reads single numbers here
        return fake.fake_tensor_converter.from_real_tensor(fake, known, make_constant=True)


def _describe(tree: Any) -> Any:
    """A key for the sizes of a result: sizes and types of tensors, and all other arguments."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.stride(), tree.dtype
    return tuple(map(_describe, tree)) if isinstance(tree, list | tuple) else (type(tree), tree)


def _is_known(tensor: Tensor) -> bool:
    """Whether the values of a tensor are known. Those of weights are not: they change with every
    iteration."""
    if tensor.requires_grad:
        return False
    if isinstance(tensor, FakeTensor):
        return tensor.constant is not None
    # all of its storage is copied, so it must not be a piece of a large one
    return (
        is_small(tensor)
        and not tensor.is_meta
        and not isinstance(tensor, nn.Parameter)
        and tensor.untyped_storage().nbytes() <= 1 << 27
    )


def are_sparse(tensors: Sequence[Any]) -> bool:
    """Whether all of these are sparse tensors, such as gradients of rows."""
    return all(getattr(each, "layout", None) is torch.sparse_coo for each in tensors)


def _add_rows(left: Tensor, right: Tensor, *, in_place: bool) -> Tensor:
    """The sum of two sparse gradients, which holds the rows of both, as PyTorch keeps them."""
    count = left._nnz() + right._nnz()
    added = _make_rows(left._values(), count, left.shape)
    if in_place:
        return torch.ops.aten.copy_sparse_to_sparse_.default(left, added)
    return added


def _make_rows(like: Tensor, count: int, shape: tuple[int, ...]) -> Tensor:
    """A sparse gradient with `count` rows; PyTorch's rule for fake tensors does not know how many
    there are."""
    where = torch.empty((1, count), dtype=torch.long)
    return torch.sparse_coo_tensor(
        where, like.new_empty((count, *shape[1:])), shape, check_invariants=False
    )
