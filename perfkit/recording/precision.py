"""The precision and the kernels of a GPU in a capture without a GPU.

Tensors of a capture are stored on the CPU, where autocast has other lists of operations and
attention has one kernel. So `pretend_gpu` redirects all calls that CUDA autocast may change.

References
----------
.. [1] PyTorch 2.13, "Automatic Mixed Precision package", Autocast Op Reference, CUDA Op-Specific
   Behavior.
.. [2] PyTorch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp.
.. [3] PyTorch 2.13, aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable.
.. [4] PyTorch 2.13, aten/src/ATen/native/layer_norm.cpp, rms_norm_symint.
.. [5] PyTorch 2.13, aten/src/ATen/native/RNN.cpp and aten/src/ATen/cudnn/AutocastRNN.cpp.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.amp.autocast_mode import autocast
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils.weak import WeakIdKeyDictionary

from perfkit.recording import gpu_answers, recurrent
from perfkit.recording.patches import Patch, apply_patches
from perfkit.recording.places import Places
from perfkit.workloads.vocabulary import pick_attention, walk_tensors

#: Dispatch key of autocast on a device for which PyTorch has no kernels of its own.
_KEY = "AutocastPrivateUse1"
#: Operations that CUDA autocast runs in lower precision, and in the widest type of their arguments;
#: all others in fp32.
_LOWER = frozenset(
    [
        "_convolution",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "prelu",
        "addmm",
        "addmv",
        "addr",
        "matmul",
        "einsum",
        "mm",
        "mv",
        "linalg_vecdot",
        "linear",
        "addbmm",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "linalg_multi_dot",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "_scaled_dot_product_flash_attention",
        "scaled_dot_product_attention",
    ]
)
_WIDEST = [
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
    "vdot",
]
#: The innermost region of autocast, and weights converted to its data type, kept until the
#: outermost region ends.
_region: dict[str, Any] = {"enabled": False, "dtype": torch.float16}
_weights: Any = WeakIdKeyDictionary()


# -- autocast
# ----------------------------------------------------------------------------------------------------------


def _is_eligible(tensor: Any) -> bool:
    """Whether autocast converts such a tensor."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and tensor.dtype is not torch.float64
    )


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Arguments converted to a data type; weights are converted only once."""
    if isinstance(tree, list | tuple):
        return type(tree)(_cast(each, dtype) for each in tree)
    if not _is_eligible(tree) or tree.dtype is dtype:
        return tree
    trained = (
        tree.dtype is torch.float32 and tree.requires_grad and tree.is_leaf and not tree._is_view()
    )
    if not (trained and torch.is_autocast_cache_enabled()):
        return tree.to(dtype)
    if tree not in _weights:
        _weights[tree] = tree.to(dtype)
    return _weights[tree]


def cast_to_autocast(tree: Any) -> Any:
    """Arguments in the data type of the innermost region of autocast, if there is one."""
    return _cast(tree, _region["dtype"]) if _region["enabled"] else tree


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation as on a GPU, in the precision of the region."""
    names, name = [a.name for a in op._schema.arguments], op._schema.name.removeprefix("aten::")
    given, full = dict(zip(names, args, strict=False)) | kwargs, torch.float32
    with torch._C._DisableAutocast():
        if _region["enabled"]:
            types = {t.dtype for t in walk_tensors(given)}
            lower = name in _LOWER or (name in _WIDEST and full not in types)
            if lower or "dtype" not in names:
                dtype = _region["dtype"] if lower else full
                given = {key: _cast(value, dtype) for key, value in given.items()}
            elif given.get("dtype") is None and _is_eligible(args[0]):
                given["dtype"] = full
        if name in ("scaled_dot_product_attention", "rms_norm"):
            complete = (given.get(a.name, a.default_value) for a in op._schema.arguments)
            return _normalize(*complete) if name == "rms_norm" else _attend(*complete)
        if (
            name in ("softmax", "log_softmax")
            and given.get("dtype") is full
            and args[0].dtype is torch.float16
        ):
            # one kernel reads fp16 and writes fp32
            return getattr(torch, f"_{name}")(*args[:2], True)
        return op(**given)


def _drop(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout as one kernel, as on a GPU; a CPU has three [3]_."""
    with torch._C._DisableAutocast():
        return (
            torch.native_dropout(x, p, True)[0]
            if train and 0 < p < 1 and x.numel()
            else torch.dropout(x, p, train)
        )


def _convert(tensor: Tensor) -> Tensor:
    """A tensor in the data type of the region; nothing is kept for the next call."""
    if not _region["enabled"] or not _is_eligible(tensor):
        return tensor
    return tensor.to(_region["dtype"])


def _recur(name: str, layers: Callable[..., Any], *args: Any) -> Any:
    """Recurrent layers as one call of cuDNN, if the step has not switched it off [5]_."""
    with torch._C._DisableAutocast():
        if torch.backends.cudnn.enabled:
            return layers(*args)
        packet, _, overload = name.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload)(*args)


def _normalize(x: Tensor, shape: Sequence[int], weight: Any, eps: Any) -> Tensor:
    """RMS norm as one kernel, as on a GPU, except for tensors that this kernel does not take
    [4]_."""
    mixed = weight is not None and weight.dtype is not x.dtype
    if mixed or x.is_complex() or suggest_memory_format(x) is not torch.contiguous_format:
        return torch.rms_norm(x, shape, weight, eps)
    own: Any = torch._C  # the CPU has no such kernel: PyTorch would split the call before autograd
    keys = own.DispatchKeySet(own.DispatchKey.AutogradPrivateUse1) | own.DispatchKeySet(
        own.DispatchKey.Python
    )
    return torch.ops.aten._fused_rms_norm.default.redispatch(keys, x, shape, weight, eps)[0]


def _patch_autocast(note: Callable[[str], Any]) -> list[Patch]:
    """Autocast, whose region is kept here for all devices."""
    build, enter = autocast.__init__, autocast.__enter__

    def build_here(region: Any, *args: Any, **kwargs: Any) -> None:
        build(region, *args, **kwargs)
        region.built_here = True

    def enter_here(region: Any) -> Any:
        if region.device == "cuda" and not (region._enabled or hasattr(region, "built_here")):
            note(
                "a region of torch.autocast('cuda') is off, as it was made before the capture; make it in make_step"
            )
        return enter(region)

    def is_enabled(device_type: Any = None) -> bool:
        enabled: bool = _region["enabled"]
        return enabled

    def set_enabled(*args: Any, **named: Any) -> None:
        _region["enabled"] = named["enabled"] if "enabled" in named else args[-1]

    def get_dtype(device_type: Any = None) -> Any:
        return _region["dtype"]

    def set_dtype(*args: Any, **named: Any) -> None:
        _region["dtype"] = named["dtype"] if "dtype" in named else args[-1]

    made_before = "a region that was made before the capture is off without a word"
    of_cpu = "autocast for a GPU does nothing, as it looks for one that is not there"
    return [
        Patch(autocast, "__init__", build_here, made_before),
        Patch(autocast, "__enter__", enter_here, made_before),
        Patch(torch, "is_autocast_enabled", is_enabled, of_cpu),
        Patch(torch, "set_autocast_enabled", set_enabled, of_cpu),
        Patch(torch, "get_autocast_dtype", get_dtype, of_cpu),
        Patch(torch, "set_autocast_dtype", set_dtype, of_cpu),
        Patch(
            torch,
            "clear_autocast_cache",
            _weights.clear,
            reason="weights that were converted to lower precision are kept after their region",
        ),
    ]


def list_patches(note: Callable[[str], Any], places: Places) -> list[Patch]:
    """All patches of `pretend_gpu`, whose arguments these are."""

    def is_supported(*_: Any, **__: Any) -> bool:
        return True

    def is_not_available() -> bool:
        return False

    return [
        *_patch_autocast(note),
        Patch(
            torch.cuda,
            "is_bf16_supported",
            is_supported,
            reason="autocast in bf16 and scripts that ask find no GPU",
        ),
        Patch(
            torch.cuda.amp.common,
            "amp_definitely_not_available",
            is_not_available,
            reason="gradient scalers are switched off",
        ),
        Patch(
            torch.cuda.nvtx,
            "_nvtx",
            Mock(),
            reason="steps that name ranges for a profiler look for a GPU that is not there",
        ),
        *gpu_answers.list_patches(places),
    ]


@contextmanager
def pretend_gpu(note: Callable[[str], Any], places: Places) -> Iterator[None]:
    """Let calls act as on a GPU: autocast for every device that a region names, gradient scalers,
    fused kernels.

    Parameters
    ----------
    note : callable
        Receives notes for the user.
    places : Places
        Knows which GPU the step has chosen.
    """
    own: Any = torch._C
    with ExitStack() as stack:
        others = stack.enter_context(torch.library._scoped_library("_", "IMPL"))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        others.fallback(torch.library.fallthrough_kernel, _KEY)
        for name in own._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
            if not name.startswith("aten::"):  # an operation of another package, or of the user
                continue
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(op, partial(_run, op), _KEY)
        library.impl("dropout", _drop, _KEY)
        for name, layers in recurrent.list_layers(_convert).items():
            library.impl(name, partial(_recur, name, layers), _KEY)
        # see `_normalize`
        library.impl("_fused_rms_norm", torch.ops.aten._fused_rms_norm, "PrivateUse1")
        key = own._dispatch_key_parse(_KEY)
        stack.enter_context(own._IncludeDispatchKeyGuard(key))
        stack.enter_context(own._SetExcludeDispatchKeyGuard(key, False))  # outside of regions too
        stack.enter_context(
            patch.dict(_region, enabled=False, dtype=torch.get_autocast_dtype("cuda"))
        )
        stack.enter_context(apply_patches(list_patches(note, places), note))
        stack.callback(_weights.clear)
        yield


# -- attention
# ---------------------------------------------------------------------------------------------------------


def _attend(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: Any, gqa: bool
) -> Any:
    """Attention by the kernel that PyTorch takes on a GPU such as A100, with the copies before it
    [2]_."""
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
            missing = (0, -width % 8)
            query, key, value = F.pad(query, missing), F.pad(key, missing), F.pad(value, missing)
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, scale=scale
        )[0]
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
    """The first kernel, in the order that the step sets, that takes such tensors [2]_."""
    dtype, fit = inputs[0].dtype, {SDPBackend.MATH: True}
    if all(
        t.dim() == 4 and t.numel() and t.stride(-1) == 1 and t.shape[0] == len(inputs[0])
        for t in inputs
    ):
        (_, heads, rows, width), (_, kept, columns, wide), (_, valued, _, deep) = (
            t.shape for t in inputs
        )
        half, same = dtype in (torch.float16, torch.bfloat16), heads == kept == valued
        shared = half and (same or (gqa and heads % kept == heads % valued == 0))
        taken = pick_attention(width, deep, half=half, capability=9.0) if width == wide else []
        flash = "flash2" in taken and shared and kept == valued and mask is None
        fit[SDPBackend.FLASH_ATTENTION] = flash and (rows == columns or not causal)
        fit[SDPBackend.EFFICIENT_ATTENTION] = (
            (half or dtype is torch.float32) and same and "efficient" in taken
        )
        fit[SDPBackend.CUDNN_ATTENTION] = (
            "flash3" in taken and shared and columns > 1 and not (dropout * 16) % 1
        )
    found = [
        backend for backend in _cur_sdpa_kernel_backends(with_priority=True) if fit.get(backend)
    ]
    if not found:
        raise ValueError(
            f"sdpa_kernel allows no kernel for attention in {dtype}; allow SDPBackend.MATH"
        )
    return found[0]
