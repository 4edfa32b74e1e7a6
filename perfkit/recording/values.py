"""Results of operations that are not computed, and what is known of them all the same.

Small tensors that are filled, counted or drawn and not trained keep their values, and so does what is made of nothing
but these: masks, indices, lengths, random numbers that decide whether a layer runs. So a step gets an answer where it
asks for one.

In a capture for a GPU, calls that CUDA autocast may change pass through `pretend_gpu`: tensors are stored on the CPU,
whose autocast has other lists and whose attention has one kernel.

References
----------
.. [1] PyTorch 2.13, "Automatic Mixed Precision package", Autocast Op Reference, CUDA Op-Specific Behavior.
.. [2] PyTorch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.amp.autocast_mode import autocast
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from perfkit.models.distributions import Uniform, unique_rows
from perfkit.recording.sandbox import MOST_KNOWN
from perfkit.workloads.vocabulary import walk_tensors

#: Largest tensor that is filled, counted or drawn for real [-].
_MOST_DRAWN = 1 << 20
#: Operations that keep which entries follow from a choice among several, such as that of experts.
_FOLLOWING = frozenset("eq gt ge scatter scatter_ index select clone _to_copy sum any amax".split())
#: What is assumed where a step asks how many rows a choice gives.
BALANCED = "rows that are chosen by computed scores, such as those of experts, are taken to be equally many for each"
#: Dispatch key of autocast on a device that no build of PyTorch has kernels for.
_KEY = "AutocastPrivateUse1"
#: What CUDA autocast runs in the lower precision, and what in the widest of its arguments; all else it has, in fp32.
_LOWER = frozenset(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu "
    "addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention".split()
)
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add vdot".split()
#: The innermost region of autocast, and weights in its data type until the outermost one ends.
_region: dict[str, Any] = {"enabled": False, "dtype": torch.float16}
_weights: Any = WeakIdKeyDictionary()


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
        self._storages: dict[int, tuple[int, Any]] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}  # real storages, and what is worked on in place of them
        self._generators: dict[int, tuple[Any, Any]] = {}
        self._sizes: dict[Any, tuple[Any, Any, Any]] = {}  # of results: shape, strides and data type
        self._shares: dict[int, float] = {}  # of entries that are true or of one value, by storage

    def number(self, tensor: Tensor) -> int:
        """Number of a tensor's storage."""
        tensor = self.pretend(tensor)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        storage = tensor.untyped_storage()
        return self._storages.setdefault(storage._cdata, (len(self._storages), storage))[0]

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
        return self._keep(known)

    def _keep(self, known: Tensor) -> Tensor:
        """A fake tensor that keeps the values of a real one."""
        return self.fake.fake_tensor_converter.from_real_tensor(self.fake, known, make_constant=True)

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
        return self._keep(real) if real.device.type == "cpu" else out

    def _look_up(self, func: Any, schema: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> Any:
        """Result of an operation, soon where it is a view or where tensors of these sizes have met it before."""
        plain = given and all(type(t) is FakeTensor and t.constant is None and t.layout is torch.strided for t in given)
        first: Any = given[0] if given else None
        key, device = None, first.fake_device if plain else None
        if plain and schema.aliasing:
            with in_kernel_invocation_manager(self.fake):
                out = func(*args, **kwargs)
            views = [FakeTensor(self.fake, view, device) for view in walk_tensors(out)]
            return views[0] if isinstance(out, Tensor) else views
        if plain and schema.sized:
            key = func, torch.get_default_dtype(), _describe(args), _describe(tuple(kwargs.items()))
            if key in self._sizes:
                shape, strides, dtype = self._sizes[key]
                with in_kernel_invocation_manager(self.fake):
                    made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                return FakeTensor(self.fake, made, device)
        out = func(*self.pretend(args), **{name: self.pretend(value) for name, value in kwargs.items()})
        storages = [t.untyped_storage()._cdata for t in given] if plain else []
        if key and out.layout is torch.strided and out.untyped_storage()._cdata not in storages:
            self._sizes[key] = out.shape, out.stride(), out.dtype
        return out

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
            return mask.new_empty((round(share * mask.numel()), mask.dim()), dtype=torch.long)
        with _disable_current_modes():
            real = torch.ones(mask.shape).nonzero()
        return self._keep(real)

    def _split(self, index: Any) -> Sequence[Any]:
        """An index, or for a mask those of the places where it should be true."""
        chosen = isinstance(index, Tensor) and index.dtype is torch.bool and self._find_shares([index])
        return self._choose(index).unbind(1) if chosen else [index]


def is_whole(tensor: Tensor) -> bool:
    """Whether it is a real tensor of whole numbers, such as indices: they decide sizes."""
    return not (isinstance(tensor, FakeTensor) or tensor.is_floating_point() or tensor.is_complex())


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


# -- autocast ----------------------------------------------------------------------------------------------------------


def _is_eligible(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype is not torch.float64


def _convert(tree: Any, dtype: torch.dtype) -> Any:
    """Arguments in a data type; weights are converted once."""
    if isinstance(tree, list | tuple):
        return type(tree)(_convert(each, dtype) for each in tree)
    if not _is_eligible(tree) or tree.dtype is dtype:
        return tree
    trained = tree.dtype is torch.float32 and tree.requires_grad and tree.is_leaf and not tree._is_view()
    if not (trained and torch.is_autocast_cache_enabled()):
        return tree.to(dtype)
    if tree not in _weights:
        _weights[tree] = tree.to(dtype)
    return _weights[tree]


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation as it runs on a GPU, in the precision of the region."""
    names, name = [a.name for a in op._schema.arguments], op._schema.name.removeprefix("aten::")
    given, full = dict(zip(names, args, strict=False)) | kwargs, torch.float32
    with torch._C._DisableAutocast():
        if _region["enabled"]:
            types = {t.dtype for t in walk_tensors(given)}
            lower = name in _LOWER or (name in _WIDEST and full not in types)
            if lower or "dtype" not in names:
                dtype = _region["dtype"] if lower else full
                given = {key: _convert(value, dtype) for key, value in given.items()}
            elif given.get("dtype") is None and _is_eligible(args[0]):
                given["dtype"] = full
        if name == "scaled_dot_product_attention":
            return _attend(*(given.get(a.name, a.default_value) for a in op._schema.arguments))
        if name in ("softmax", "log_softmax") and given.get("dtype") is full and args[0].dtype is torch.float16:
            return getattr(torch, f"_{name}")(*args[:2], True)  # one kernel reads fp16 and writes fp32
        return op(**given)


@contextmanager
def pretend_gpu(note: Callable[[str], Any]) -> Iterator[None]:
    """Let calls act as on a GPU, which has autocast for whatever device a region names, and scalers of gradients.

    Parameters
    ----------
    note : callable
        Receives what the user has to be told.
    """
    own: Any = torch._C
    build, enter = autocast.__init__, autocast.__enter__

    def build_here(region: Any, *args: Any, **kwargs: Any) -> None:
        build(region, *args, **kwargs)
        region.built_here = True

    def enter_here(region: Any) -> Any:
        if region.device == "cuda" and not (region._enabled or hasattr(region, "built_here")):
            note("a region of torch.autocast('cuda') is off, as it was made before the capture; make it in make_step")
        return enter(region)

    patches: list[tuple[Any, dict[str, Any]]] = [
        (autocast, {"__init__": build_here, "__enter__": enter_here}),
        (torch, {"is_autocast_enabled": lambda *_: _region["enabled"], "clear_autocast_cache": _weights.clear}),
        (torch, {"set_autocast_enabled": lambda *args: _region.update(enabled=args[-1])}),
        (torch, {"get_autocast_dtype": lambda *_: _region["dtype"]}),
        (torch, {"set_autocast_dtype": lambda *args: _region.update(dtype=args[-1])}),
        (torch.cuda, {"is_bf16_supported": lambda *_, **__: True}),
        (torch.cuda.amp.common, {"amp_definitely_not_available": lambda: False}),
    ]
    with ExitStack() as stack:
        others, library = (stack.enter_context(torch.library._scoped_library(name, "IMPL")) for name in ("_", "aten"))
        others.fallback(torch.library.fallthrough_kernel, _KEY)
        for name in own._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(op, partial(_run, op), _KEY)
        key = own._dispatch_key_parse(_KEY)
        stack.enter_context(own._IncludeDispatchKeyGuard(key))
        stack.enter_context(own._SetExcludeDispatchKeyGuard(key, False))  # where regions are off, as by default
        stack.enter_context(patch.dict(_region, enabled=False, dtype=torch.get_autocast_dtype("cuda")))
        for owner, values in patches:
            stack.enter_context(patch.multiple(owner, **values))
        stack.callback(_weights.clear)
        yield


# -- attention ---------------------------------------------------------------------------------------------------------


def _attend(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: Any, gqa: bool) -> Any:
    """Attention by the kernel that PyTorch takes on a GPU such as A100, and what comes before it [2]_."""
    aten, width = torch.ops.aten, query.shape[-1]
    backend = _choose([query, key, value], mask, dropout, causal, gqa)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype))
    if backend is SDPBackend.MATH:
        run = aten._scaled_dot_product_attention_math.default
        return run(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa)[0]
    if backend is SDPBackend.FLASH_ATTENTION:
        scale = width**-0.5 if scale is None else scale
        if width % 8:
            query, key, value = (F.pad(t, (0, -width % 8)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    run = aten._scaled_dot_product_cudnn_attention.default
    if backend is SDPBackend.EFFICIENT_ATTENTION:
        run = aten._scaled_dot_product_efficient_attention.default
        if mask is not None and any(stride % 8 for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask if mask is None else mask.expand(*query.shape[:3], key.shape[2])
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return run(query, key, value, mask, trains, dropout, causal, scale=scale)[0]


def _choose(inputs: Sequence[Tensor], mask: Any, dropout: float, causal: bool, gqa: bool) -> Any:
    """The first kernel in the order of the step that takes such tensors [2]_."""
    dtype, fit = inputs[0].dtype, {SDPBackend.MATH: True}
    if all(t.dim() == 4 and t.numel() and t.stride(-1) == 1 and t.shape[0] == len(inputs[0]) for t in inputs):
        (_, heads, rows, width), (_, kept, columns, wide), (_, valued, _, deep) = (t.shape for t in inputs)
        half, same = dtype in (torch.float16, torch.bfloat16), heads == kept == valued
        shared = half and (same or (gqa and heads % kept == heads % valued == 0))
        apart = width == wide and not any(each % (8 if half else 4) for each in (width, deep))
        flash = shared and kept == valued and mask is None and width == wide == deep <= 256
        fit[SDPBackend.FLASH_ATTENTION] = flash and (rows == columns or not causal)
        fit[SDPBackend.EFFICIENT_ATTENTION] = (half or dtype is torch.float32) and same and apart
        cudnn = shared and apart and max(width, deep) <= 128 and columns > 1
        fit[SDPBackend.CUDNN_ATTENTION] = cudnn and not (dropout * 16) % 1
    found = [backend for backend in _cur_sdpa_kernel_backends(with_priority=True) if fit.get(backend)]
    if not found:
        raise ValueError(f"sdpa_kernel allows no kernel for attention in {dtype}; allow SDPBackend.MATH")
    return found[0]
