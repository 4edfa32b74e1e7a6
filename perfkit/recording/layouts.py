"""How results of operations lie in memory, where PyTorch's rule for fake tensors differs from its
kernels. Another layout means another operation later: a copy that makes a gradient contiguous."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format

#: Operations whose (first) result is contiguous, however their arguments lie: kernels allocate it so
#: (aten/src/ATen/native/layer_norm.cpp, SoftMax.cpp and Loss.cpp of PyTorch).
_CONTIGUOUS = frozenset(
    [
        "native_layer_norm_backward",
        "_log_softmax_backward_data",
        "mse_loss_backward",
        "smooth_l1_loss_backward",
        "huber_loss_backward",
    ]
)
#: Operations whose first result is contiguous in the memory format of an argument, and the place of
#: that argument (Normalization.cpp).
_IN_FORMAT = {"native_batch_norm": 0, "native_batch_norm_backward": 1}
#: Operations on pairs of elements, and the places of their operands, in the order in which the kernel
#: looks at them: its result lies as that of their sum (`TensorIterator` of Activation.cpp; PyTorch's
#: rules take other operands first).
_PAIRS = {
    "elu_backward": (0, 5),
    "hardtanh_backward": (0, 1),
    "hardswish_backward": (0, 1),
    "hardsigmoid_backward": (0, 1),
    "softplus_backward": (0, 1),
    "leaky_relu_backward": (1, 0),
}
#: All of these; the gradient of group norm is contiguous where its input is (group_norm.cpp).
RULES = frozenset([*_CONTIGUOUS, *_IN_FORMAT, *_PAIRS, "native_group_norm_backward"])


def find_strides(name: str, args: Sequence[Any], result: Tensor) -> tuple[int, ...]:
    """Strides of the (first) result of an operation.

    Parameters
    ----------
    name : str
        Name of an operation of `RULES`.
    args : sequence
        All of its arguments.
    result : torch.Tensor
        What PyTorch's rule gives.

    Returns
    -------
    strides : tuple of int
        Elements from one to the next of each dimension [-].
    """
    strides = tuple(result.stride())
    if name in _CONTIGUOUS:
        return tuple(make_contiguous_strides_for(result.shape))
    if name == "native_group_norm_backward":
        return tuple(args[1].stride()) if args[1].is_contiguous() else strides
    if name in _IN_FORMAT:
        memory_format = suggest_memory_format(args[_IN_FORMAT[name]])
        with torch._C._DisableTorchDispatch():
            like = torch.empty(result.shape, device="meta", memory_format=memory_format)
        return tuple(like.stride())
    first, second = (args[place] for place in _PAIRS[name])
    if first.stride() == second.stride() == strides:
        return strides
    with torch._C._DisableTorchDispatch():
        operands = [
            torch.empty_strided(each.shape, each.stride(), device="meta")
            for each in (first, second)
        ]
        return tuple(torch.add(*operands).stride())
