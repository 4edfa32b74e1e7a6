"""Functions that calibrations time, by the class of operations that they belong to."""

from typing import Any

#: Elementwise functions: the operation in PyTorch, and its operands. Letters are tensors of
#: numbers, ``mask`` is a tensor of truth values. A function whose name ends with an underscore
#: changes its first operand in place.
BASIC: dict[str, tuple[Any, ...]] = {
    "relu": ("relu", "x"),
    "threshold_backward": ("threshold_backward", "x", "y", 0),
    "add": ("add.Tensor", "x", "y"),
    "sub": ("sub.Tensor", "x", "y"),
    "mul": ("mul.Tensor", "x", "y"),
    "mul_scalar": ("mul.Tensor", "x", 0.999),
    "div_scalar": ("div.Tensor", "x", 0.999),
    "sqrt": ("sqrt", "x"),
    "gelu": ("gelu", "x"),
    "gelu_backward": ("gelu_backward", "x", "y"),
    "gelu_tanh": ("gelu", "x", {"approximate": "tanh"}),
    "gelu_backward_tanh": ("gelu_backward", "x", "y", {"approximate": "tanh"}),
    "sigmoid": ("sigmoid", "x"),
    "binary_cross_entropy_with_logits": ("binary_cross_entropy_with_logits", "x", "y"),
    "add_": ("add_.Tensor", "x", "y", {"alpha": -1e-9}),
    "mul_": ("mul_.Tensor", "x", 1.0),
    "lerp_": ("lerp_.Scalar", "x", "y", 0.1),
    "addcmul_": ("addcmul_", "x", "y", "y", {"value": 1e-9}),
    "addcdiv_": ("addcdiv_", "x", "y", "z", {"value": 1e-9}),
    "add_scalar_": ("add_.Tensor", "x", 1e-9),
    "div_": ("div_.Scalar", "x", 1.0),
}
MORE: dict[str, tuple[Any, ...]] = {
    "relu_": ("relu_", "x"),
    "tanh": ("tanh", "x"),
    "tanh_backward": ("tanh_backward", "x", "y"),
    "sigmoid_backward": ("sigmoid_backward", "x", "y"),
    "silu": ("silu", "x"),
    "silu_backward": ("silu_backward", "x", "y"),
    "hardswish": ("hardswish", "x"),
    "hardswish_backward": ("hardswish_backward", "x", "y"),
    "hardtanh": ("hardtanh", "x", 0.0, 0.9),
    "hardtanh_": ("hardtanh_", "x", 0.0, 0.9),
    "hardtanh_backward": ("hardtanh_backward", "x", "y", 0.0, 0.9),
    "leaky_relu": ("leaky_relu", "x", 0.01),
    "exp": ("exp", "x"),
    "log": ("log", "x"),
    "erf": ("erf", "x"),
    "pow_scalar": ("pow.Tensor_Scalar", "x", 3.0),
    "rsqrt": ("rsqrt", "x"),
    "neg": ("neg", "x"),
    "div": ("div.Tensor", "x", "y"),
    "add_scalar": ("add.Tensor", "x", 0.5),
    "bernoulli_": ("bernoulli_.float", "x", 0.9),
    "native_dropout": ("native_dropout", "x", 0.1, True),
    "native_dropout_backward": ("native_dropout_backward", "x", "mask", 1.1),
    "masked_fill": ("masked_fill.Scalar", "x", "mask", -1e9),
    "where": ("where.self", "mask", "x", "y"),
}
FUNCTIONS = BASIC | MORE
ROWWISE = (
    "_softmax",
    "_softmax_backward_data",
    "_log_softmax",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "sum",
    "nll_loss_forward",
    "nll_loss_backward",
    "embedding",
)
COPIES = ("clone", "cat", "index", "index_put", "new_zeros")
#: Operations on the pictures inside of nets.
PICTURES = {
    "rowwise": (
        "native_batch_norm",
        "native_batch_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "mean",
        "amax",
        "argmax",
        "cumsum",
    ),
    "pooling": (
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
        "avg_pool2d",
        "avg_pool2d_backward",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool2d_backward",
    ),
    "copy": (
        "copy_",
        "slice_backward",
        "gather",
        "scatter_add",
        "upsample_nearest2d",
        "upsample_nearest2d_backward",
        "upsample_bilinear2d",
    ),
}
#: Functions that calibrations time, by their operation class.
MEASURED_FUNCTIONS: dict[str, frozenset[str]] = {
    "elementwise": frozenset(FUNCTIONS),
    "rowwise": frozenset((*ROWWISE, *PICTURES["rowwise"])),
    "pooling": frozenset(PICTURES["pooling"]),
    "copy": frozenset((*COPIES, *PICTURES["copy"])),
}
