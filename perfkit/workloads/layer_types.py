"""Layers of neural networks, and the operations that PyTorch's eager mode dispatches for each of
them, forward and backward.

A layer is a small class with `forward` and `backward`; see `perfkit.workloads.tape.Layer`. In
`backward`, `dy` is the gradient of the result, and `dx` that of the operand `x`.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from perfkit.models.roofline import attended_keys, attention_flops
from perfkit.workloads.columns import OperationSizes
from perfkit.workloads.frozen_formats import FrozenFormat
from perfkit.workloads.operations import NN, NT, SORT, TN, Layout, Tensor, Weight
from perfkit.workloads.symbolic_sizes import SymbolicSize
from perfkit.workloads.tables import SAMPLE_WEIGHT_BYTES
from perfkit.workloads.tape import Layer, Tape


def _widest(*tensors: Tensor) -> int:
    """Bytes of a number in a result of several tensors, which has the wider data type [B]."""
    return max(tensor.itemsize for tensor in tensors)


# -- products of matrices ------------------------------------------------------------------------------------


class Linear(Layer):
    """Product with a weight (outputs × inputs), plus a bias: `addmm`.

    Backward: a `mm` each for the gradients of the operand and of the weight. That of the bias is the
    sum of the rows of `dy`.
    """

    backward_views = 1  # the weight, transposed

    def forward(self, tape: Tape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Append `addmm`."""
        self.x, self.weight, self.bias = x, weight, bias
        y = tape.tensor(*x.shape[:-1], weight.shape[0], itemsize=x.itemsize)
        tape.product("addmm", NT, x, weight, y, bias=bias)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the products of the gradients."""
        total = tape.find_sum(self.weight)
        dx = tape.like(self.x)
        dw = tape.like(self.weight) if total is None else total
        if self.x.needs_gradient:
            tape.product("mm", NN, dy, self.weight, dx)
        if tape.delays_weights:
            tape.pass_on(self.x, dx)
            tape.delay(partial(self._compute_weights, tape, dy, dw, adds=total is not None))
            return
        if self.weight.needs_gradient:
            tape.product("mm", TN, dy, self.x, dw, adds=total is not None)
        tape.pass_through(self.bias, dy)
        tape.pass_on(self.x, dx)
        tape.pass_on(self.weight, dw)

    def _compute_weights(self, tape: Tape, dy: Tensor, dw: Tensor, *, adds: bool) -> None:
        """Append the gradients of weight and bias."""
        tape.product("mm", TN, dy, self.x, dw, adds=adds)
        tape.pass_through(self.bias, dy)
        tape.pass_on(self.weight, dw)


class LinearWithEpilogues(Layer):
    """Layer of an MLP whose products compute bias, rectifier and their gradients, too: `addmm`.

    Backward: a `mm` each for the gradients of the operand and of the weight. That of the operand
    also computes what follows from it in the layer below, by the epilogue ``DRELU_BGRAD`` of
    cuBLASLt: the gradient of its rectifier, and the sums that are the gradient of its bias. The last
    layer of an MLP has no product above it: `threshold_backward` and `sum` are kernels of their own.
    The mask of a rectifier, a bit a number, is not counted.

    Parameters
    ----------
    below : LinearWithEpilogues, optional
        The layer whose result is the operand; None for the first layer of an MLP.
    has_relu : bool
        Whether a rectifier follows the product.
    is_last : bool
        Whether it is the last layer of its MLP.
    """

    backward_views = 1  # the weight, transposed

    def __init__(
        self, below: "LinearWithEpilogues | None", *, has_relu: bool, is_last: bool
    ) -> None:
        self.below, self.has_relu, self.is_last = below, has_relu, is_last

    def forward(self, tape: Tape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Append `addmm`."""
        self.x, self.weight, self.bias = x, weight, bias
        self.y = tape.tensor(*x.shape[:-1], weight.shape[0], itemsize=x.itemsize)
        tape.product("addmm", NT, x, weight, self.y, bias=bias)
        return self.y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the products of the gradients, behind the kernels of the last layer."""
        if self.is_last:
            dy = self._leave_last_layer(tape, dy)
        dw = tape.like(self.weight)
        self._return_operand(tape, dy)
        if tape.delays_weights:
            tape.delay(partial(self._compute_weight, tape, dy, dw))
            return
        self._compute_weight(tape, dy, dw)

    def _leave_last_layer(self, tape: Tape, dy: Tensor) -> Tensor:
        """Append the kernels for the gradients of rectifier and bias; returns that of the
        product."""
        if self.has_relu:
            behind, dy = dy, tape.like(self.y)
            tape.elementwise("threshold_backward", [behind, self.y], [dy])
        tape.pass_through(self.bias, dy)
        return dy

    def _return_operand(self, tape: Tape, dy: Tensor) -> None:
        """Append the gradient of the operand, and with it that of the bias of the layer below."""
        if not self.x.needs_gradient:
            return
        dx = tape.like(self.x)
        if self.below is None:
            tape.product("mm", NN, dy, self.weight, dx)
        else:
            bias = self.below.bias
            db = tape.like(bias)
            tape.product("mm", NN, dy, self.weight, dx, column_sums=db)
            tape.pass_on(bias, db)
        tape.pass_on(self.x, dx)

    def _compute_weight(self, tape: Tape, dy: Tensor, dw: Tensor) -> None:
        """Append the gradient of the weight."""
        tape.product("mm", TN, dy, self.x, dw)
        tape.pass_on(self.weight, dw)


class LinearWithoutBias(Layer):
    """Product with a weight (outputs × inputs): `mm`.

    Backward: a `mm` each for the gradients of the weight and of the operand.
    """

    backward_views = 1  # the weight, transposed

    def forward(self, tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
        """Append `mm`."""
        self.x, self.weight = x, weight
        y = tape.tensor(*x.shape[:-1], weight.shape[0], itemsize=x.itemsize)
        tape.product("mm", NT, x, weight, y)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the products of the gradients."""
        total = tape.find_sum(self.weight)
        dx = tape.like(self.x)
        dw = tape.like(self.weight) if total is None else total
        adds = total is not None
        if tape.delays_weights:
            tape.product("mm", NN, dy, self.weight, dx)
            tape.pass_on(self.x, dx)
            tape.delay(partial(self._compute_weight, tape, dy, dw, adds=adds))
            return
        if self.weight.needs_gradient:
            tape.product("mm", TN, dy, self.x, dw, adds=adds)
        if self.x.needs_gradient:
            tape.product("mm", NN, dy, self.weight, dx)
        tape.pass_on(self.x, dx)
        tape.pass_on(self.weight, dw)

    def _compute_weight(self, tape: Tape, dy: Tensor, dw: Tensor, *, adds: bool) -> None:
        """Append the gradient of the weight."""
        tape.product("mm", TN, dy, self.x, dw, adds=adds)
        tape.pass_on(self.weight, dw)


class LinearFp8(Layer):
    """Product in fp8 with a weight (outputs × inputs), with or without a bias: `_scaled_mm`.

    As in Transformer Engine, operands are cast: operand and weight forward, `dy` backward, with known
    scales (`_to_copy`) or as the recipe of the tape says (`cast_scaled`), which may cast all three
    once more in the backward pass. That has a `_scaled_mm` for each gradient. A weight that ranks
    gather in fp8 is not cast.
    """

    backward_views = 1  # the weight, transposed

    def forward(self, tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Append two casts and a `_scaled_mm`."""
        self.x, self.weight, self.bias = x, weight, bias
        y = tape.tensor(*x.shape[:-1], weight.shape[0], itemsize=x.itemsize)
        self.x_fp8 = tape.cast_to_fp8(x)
        if tape.gathers_fp8 and isinstance(weight, Weight):
            weight.in_fp8 = True
            weight_along = tape.view_in_fp8(weight)
        else:
            self.weight_fp8 = tape.cast_to_fp8(weight)
            weight_along = self.weight_fp8.along
        tape.product("_scaled_mm", NT, self.x_fp8.along, weight_along, y, bias=bias)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append a cast, and the products of the gradients."""
        total = tape.find_sum(self.weight)
        dx = tape.like(self.x)
        dw = tape.like(self.weight) if total is None else total
        dy_fp8 = tape.cast_to_fp8(dy)
        if self.x.needs_gradient:
            if tape.gathers_fp8 and isinstance(self.weight, Weight):
                weight_across = tape.view_in_fp8(self.weight)  # it may be gathered again
            else:
                weight_across = tape.cast_across(self.weight_fp8)
            tape.product("_scaled_mm", NN, dy_fp8.along, weight_across, dx)
        if self.weight.needs_gradient:
            dy_across = tape.cast_across(dy_fp8)
            x_across = tape.cast_across(self.x_fp8)
            tape.product("_scaled_mm", TN, dy_across, x_across, dw, adds=total is not None)
        if self.bias is not None:
            tape.pass_through(self.bias, dy)
        tape.pass_on(self.x, dx)
        tape.pass_on(self.weight, dw)


class LinearFrozen(Layer):
    """Product with a frozen weight (outputs × inputs) that is stored in fewer bits, with or without a
    bias (`mm`, `addmm`): the weight is expanded first (`dequantize_4bit`), and not kept.

    If its scales have 8 bits, these are expanded before (`dequantize_blockwise`, `add_offset_`). Backward:
    the weight is expanded again for the gradient of the operand, as in bitsandbytes' `MatMul4Bit`.

    Parameters
    ----------
    stored_as : FrozenFormat
        How the weight is stored.
    """

    backward_views = 1  # the weight, transposed

    def __init__(self, stored_as: FrozenFormat) -> None:
        self.stored_as = stored_as

    def forward(self, tape: Tape, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Append the expansion and `mm` or `addmm`."""
        self.x, self.weight, self.bias = x, weight, bias
        y = tape.tensor(*x.shape[:-1], weight.shape[0], itemsize=x.itemsize)
        wide = self._expand(tape)
        tape.product("mm" if bias is None else "addmm", NT, x, wide, y, bias=bias)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the expansion and the product of the gradient of the operand."""
        if self.bias is not None:
            tape.pass_through(self.bias, dy)
        if not self.x.needs_gradient:
            return
        dx = tape.like(self.x)
        wide = self._expand(tape)
        tape.product("mm", NN, dy, wide, dx)
        tape.pass_on(self.x, dx)

    def _expand(self, tape: Tape) -> Tensor:
        """The weight in the format of the product."""
        weight, reads = self.weight, [self.weight]
        if self.stored_as.scale_block:
            count = self.stored_as.count_scales(weight.numel)
            narrow = Tensor(weight.storage, (count,), 1, layer=weight.layer)
            scales = tape.tensor(count, itemsize=4)
            tape.elementwise("dequantize_blockwise", [narrow], [scales])
            tape.elementwise("add_offset_", [scales], [scales], "add_scalar_")
            reads.append(scales)
        wide = tape.tensor(*weight.shape, itemsize=self.x.itemsize)
        sizes = OperationSizes(elements=weight.numel)
        tape.emit("dequantize_4bit", "elementwise", reads, [wide], sizes)
        return wide


class BatchedProduct(Layer):
    """Products of many matrices in one kernel: `bmm` of (batch, m, k) with (batch, k, n), or, if the
    right ones are transposed views (`NT`), with (batch, n, k).

    Backward: a `bmm` for each operand.

    Parameters
    ----------
    layout : Layout, optional
        `NN` or `NT`.
    """

    def __init__(self, layout: Layout = NN) -> None:
        self.layout = layout

    def forward(self, tape: Tape, a: Tensor, b: Tensor) -> Tensor:
        """Append `bmm`."""
        self.a, self.b = a, b
        batch, rows, _ = a.shape
        columns = b.shape[1] if self.layout.right_is_transposed else b.shape[2]
        y = tape.tensor(batch, rows, columns, itemsize=_widest(a, b))
        tape.batched_product("bmm", self.layout, a, b, y)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the products of the gradients."""
        total = tape.find_sum(self.b)
        da = tape.like(self.a)
        db = tape.like(self.b) if total is None else total
        if self.b.needs_gradient:
            tape.batched_product("bmm", TN, self.a, dy, db, adds=total is not None)
        if self.a.needs_gradient:
            layout = NN if self.layout.right_is_transposed else NT
            tape.batched_product("bmm", layout, dy, self.b, da)
        tape.pass_on(self.b, db)
        tape.pass_on(self.a, da)


class GroupedProduct(Layer):
    """Products of experts in one kernel: `_grouped_mm` of rows (experts, rows, k) with weights
    (experts, k, n), where experts may have unlike many rows.

    Backward: a `_grouped_mm` for each operand. With `fp8` these are `_scaled_grouped_mm`, whose
    operands are cast (`_to_copy`, `cast_scaled`) as those of `LinearFp8`.

    Parameters
    ----------
    fp8 : bool, optional
        Whether products run in fp8.
    """

    def __init__(self, *, fp8: bool = False) -> None:
        self.fp8 = fp8
        self.name = "_scaled_grouped_mm" if fp8 else "_grouped_mm"

    def forward(self, tape: Tape, x: Tensor, weights: Tensor) -> Tensor:
        """Append the product, with casts of its operands."""
        self.x, self.weights = x, weights
        experts, rows, _ = x.shape
        y = tape.tensor(experts, rows, weights.shape[2], itemsize=_widest(x, weights))
        x_used, weights_used = x, weights
        if self.fp8:
            self.x_fp8, self.weights_fp8 = tape.cast_to_fp8(x), tape.cast_to_fp8(weights)
            x_used, weights_used = self.x_fp8.along, self.weights_fp8.along
        self._multiply(tape, NN, x_used, weights_used, y)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the products of the gradients, with a cast of `dy`."""
        total = tape.find_sum(self.weights)
        dx = tape.like(self.x)
        dw = tape.like(self.weights) if total is None else total
        dy_used, dy_across = dy, dy
        if self.fp8:
            dy_fp8 = tape.cast_to_fp8(dy)
            dy_used = dy_fp8.along
        if self.weights.needs_gradient:
            x_across = self.x
            if self.fp8:
                x_across, dy_across = tape.cast_across(self.x_fp8), tape.cast_across(dy_fp8)
            self._multiply(tape, TN, x_across, dy_across, dw, adds=total is not None)
        if self.x.needs_gradient:
            weights_across = self.weights
            if self.fp8:
                weights_across = tape.cast_across(self.weights_fp8)
            self._multiply(tape, NT, dy_used, weights_across, dx)
        tape.pass_on(self.weights, dw)
        tape.pass_on(self.x, dx)

    def _multiply(
        self,
        tape: Tape,
        layout: Layout,
        left: Tensor,
        right: Tensor,
        result: Tensor,
        *,
        adds: bool = False,
    ) -> None:
        """Append a product of all experts."""
        tape.batched_product(self.name, layout, left, right, result, adds=adds, is_grouped=True)


class Attention(Layer):
    """Scaled dot-product attention in one kernel, which stores a number for each row of scores:
    `_scaled_dot_product_flash_attention_for_cpu`, on every device.

    The backward pass is one kernel too, which computes the scores again:
    `_scaled_dot_product_flash_attention_for_cpu_backward`.

    Parameters
    ----------
    heads : int or array
        Heads of the queries [-].
    causal : bool
        Whether tiles above the diagonal of the scores are skipped.
    kernel : str
        One of `perfkit.workloads.operations.ATTENTION`; empty for any kernel.
    context : int or array
        Ranks that share a sequence; each has its part of the queries, and the keys and values of
        all [-].
    value_width : int, optional
        Width of a head of values, if it is not that of queries and keys [-].
    window : int, optional
        Keys that a query attends to at most, itself and those before it; tiles beyond are skipped [-].
    """

    def __init__(
        self,
        heads: Any,
        *,
        causal: bool,
        kernel: str = "",
        context: Any = 1,
        value_width: Any = None,
        window: int | None = None,
    ) -> None:
        self.heads, self.causal, self.context = heads, causal, context
        self.value_width = value_width
        self.window = window
        self.function = "_causal" if causal else ""
        if kernel:
            self.function += f".{kernel}"

    def forward(
        self, tape: Tape, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Append the kernel. It may read `sinks`, a number of each head that its softmax adds up with
        the scores of each row."""
        self.q, self.k, self.v, self.sinks = q, k, v, sinks
        batch, sequence, hidden = q.shape
        keys, head_dim = sequence * self.context, hidden // self.heads
        sizes = OperationSizes(batch=batch * self.heads, m=sequence, n=keys, k=head_dim)
        count_flops = partial(
            attention_flops,
            batch,
            self.heads,
            sequence,
            head_dim,
            causal=self.causal,
            keys=keys if self.window is None else _double_attended(keys, self.window),
            value_dim=self.value_width,
        )
        self.sizes = sizes._replace(flops=count_flops())
        self.sizes_backward = sizes._replace(flops=count_flops(backward=True))
        self.statistics = tape.tensor(batch, self.heads, sequence)
        width = hidden if self.value_width is None else self.heads * self.value_width
        self.y = tape.tensor(batch, sequence, width, itemsize=_widest(q, k, v))
        tape.emit(
            "_scaled_dot_product_flash_attention_for_cpu",
            "attention",
            [q, k, v] if sinks is None else [q, k, v, sinks],
            [self.y, self.statistics],
            self.sizes,
            variant=f"forward{self.function}",
        )
        return self.y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the kernel of the backward pass."""
        dq, dk, dv = tape.like(self.q), tape.like(self.k), tape.like(self.v)
        reads = [dy, self.q, self.k, self.v, self.y, self.statistics]
        writes = [dq, dk, dv]
        if self.sinks is not None:
            reads.append(self.sinks)
            writes.append(tape.like(self.sinks))
            tape.pass_on(self.sinks, writes[-1])
        tape.emit(
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "attention",
            reads,
            writes,
            self.sizes_backward,
            variant=f"backward{self.function}",
        )
        tape.pass_on(self.q, dq)
        tape.pass_on(self.k, dk)
        tape.pass_on(self.v, dv)


def _double_attended(keys: Any, window: int) -> Any:
    """Twice the keys that a query in a window attends to: as many as a causal mask would halve [-]."""
    if isinstance(keys, SymbolicSize):
        return 2.0 * keys.expressions.add(attended_keys, keys, window)
    return 2.0 * attended_keys(keys, window)


# -- element-wise functions ----------------------------------------------------------------------------------


class Cast(Layer):
    """The same numbers in another data type: `_to_copy`. Backward: their gradient, cast back.

    Parameters
    ----------
    itemsize : int
        Bytes of a number of the result [B].
    """

    def __init__(self, itemsize: int) -> None:
        self.itemsize = itemsize

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `_to_copy`."""
        self.x = x
        y = tape.tensor(*x.shape, itemsize=self.itemsize)
        tape.elementwise("_to_copy", [x], [y])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Hand the gradient on, which is cast."""
        tape.pass_through(self.x, dy)


class Relu(Layer):
    """Rectifier: `relu`. Backward: `threshold_backward`, which reads the result."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `relu`."""
        self.x, self.y = x, tape.like(x)
        tape.elementwise("relu", [x], [self.y])
        return self.y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `threshold_backward`."""
        dx = tape.like(self.x)
        tape.elementwise("threshold_backward", [dy, self.y], [dx])
        tape.pass_on(self.x, dx)


class Gelu(Layer):
    """Gaussian error linear unit: `gelu`. Backward: `gelu_backward`, which reads the operand.

    Parameters
    ----------
    tanh : bool, optional
        Whether it is found by a hyperbolic tangent, as in GPT-2: another function for a kernel.
    """

    def __init__(self, *, tanh: bool = False) -> None:
        self.suffix = "_tanh" if tanh else ""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `gelu`."""
        self.x = x
        y = tape.like(x)
        tape.elementwise("gelu", [x], [y], f"gelu{self.suffix}")
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `gelu_backward`."""
        dx = tape.like(self.x)
        tape.elementwise("gelu_backward", [dy, self.x], [dx], f"gelu_backward{self.suffix}")
        tape.pass_on(self.x, dx)


class Silu(Layer):
    """Sigmoid linear unit: `silu`. Backward: `silu_backward`, which reads the operand."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `silu`."""
        self.x = x
        y = tape.like(x)
        tape.elementwise("silu", [x], [y])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `silu_backward`."""
        dx = tape.like(self.x)
        tape.elementwise("silu_backward", [dy, self.x], [dx])
        tape.pass_on(self.x, dx)


class Sigmoid(Layer):
    """Sigmoid: `sigmoid`. Backward: `sigmoid_backward`, which reads the result."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `sigmoid`."""
        self.x, self.y = x, tape.like(x)
        tape.elementwise("sigmoid", [x], [self.y])
        return self.y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `sigmoid_backward`."""
        dx = tape.like(self.x)
        tape.elementwise("sigmoid_backward", [dy, self.y], [dx])
        tape.pass_on(self.x, dx)


class Tanh(Layer):
    """Hyperbolic tangent: `tanh`. Backward: `tanh_backward`, which reads the result."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `tanh`."""
        self.x, self.y = x, tape.like(x)
        tape.elementwise("tanh", [x], [self.y])
        return self.y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `tanh_backward`."""
        dx = tape.like(self.x)
        tape.elementwise("tanh_backward", [dy, self.y], [dx])
        tape.pass_on(self.x, dx)


class Divide(Layer):
    """Quotient with one number: `div`. Backward: `div`."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `div`."""
        self.x = x
        y = tape.like(x)
        tape.elementwise("div", [x], [y], "div_scalar")
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `div`."""
        dx = tape.like(self.x)
        tape.elementwise("div", [dy], [dx], "div_scalar")
        tape.pass_on(self.x, dx)


class Dropout(Layer):
    """Set a random share of the numbers to zero; a mask says which: `native_dropout`. Backward:
    `native_dropout_backward`, which reads the mask."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `native_dropout`."""
        self.x = x
        self.mask = tape.tensor(*x.shape, itemsize=1)
        y = tape.like(x)
        tape.elementwise("native_dropout", [x], [y, self.mask])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `native_dropout_backward`."""
        dx = tape.like(self.x)
        tape.elementwise("native_dropout_backward", [dy, self.mask], [dx])
        tape.pass_on(self.x, dx)


class Rotate(Layer):
    """Pairs of numbers as complex numbers, times the angle of their position: `mul`. Backward:
    `mul`."""

    def forward(self, tape: Tape, x: Tensor, angles: Tensor) -> Tensor:
        """Append `mul`."""
        self.x, self.angles = x, angles
        y = tape.like(x)
        tape.elementwise("mul", [x, angles], [y])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `mul`."""
        dx = tape.like(self.x)
        tape.elementwise("mul", [dy, self.angles], [dx])
        tape.pass_on(self.x, dx)


class Scale(Layer):
    """Product with one number: `mul`. Backward: `mul`."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `mul`."""
        self.x = x
        y = tape.like(x)
        tape.elementwise("mul", [x], [y], "mul_scalar")
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `mul`."""
        dx = tape.like(self.x)
        tape.elementwise("mul", [dy], [dx], "mul_scalar")
        tape.pass_on(self.x, dx)


class Add(Layer):
    """Sum of two tensors, of which the second may be smaller: `add`. Backward: both take the
    gradient as it is, the smaller one its sum over rows."""

    def forward(self, tape: Tape, x: Tensor, b: Tensor) -> Tensor:
        """Append `add`."""
        self.x, self.b = x, b
        y = tape.tensor(*x.shape, itemsize=_widest(x, b))
        tape.elementwise("add", [x, b], [y])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Hand the gradient on to both."""
        tape.pass_through(self.x, dy)
        tape.pass_through(self.b, dy)


class Multiply(Layer):
    """Product of two tensors, number by number: `mul`. Backward: a `mul` for each operand."""

    def forward(self, tape: Tape, x: Tensor, b: Tensor) -> Tensor:
        """Append `mul`."""
        self.x, self.b = x, b
        y = tape.tensor(*x.shape, itemsize=_widest(x, b))
        tape.elementwise("mul", [x, b], [y])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append a `mul` for each gradient."""
        dx, db = tape.like(self.x), tape.like(self.b)
        if self.x.needs_gradient:
            tape.elementwise("mul", [dy, self.b], [dx])
        if self.b.needs_gradient:
            tape.elementwise("mul", [dy, self.x], [db])
        tape.pass_on(self.x, dx)
        tape.pass_on(self.b, db)


class MultiplyRows(Layer):
    """Product of each row with a number of its own: `mul`. Backward: a `mul` for each operand, and for
    the numbers the `sum` of each row."""

    def forward(self, tape: Tape, x: Tensor, numbers: Tensor) -> Tensor:
        """Append `mul`."""
        self.x, self.numbers = x, numbers
        y = tape.tensor(*x.shape, itemsize=_widest(x, numbers))
        tape.elementwise("mul", [x, numbers], [y])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append both `mul`, and the `sum`."""
        dx, products, total = tape.like(self.x), tape.like(dy), tape.like(self.numbers)
        tape.elementwise("mul", [dy, self.x], [products])
        tape.elementwise("mul", [dy, self.numbers], [dx])
        sizes = OperationSizes(elements=dy.numel, rows=total.numel, n=dy.numel // total.numel)
        tape.emit("sum", "rowwise", [products], [total], sizes)
        tape.pass_on(self.numbers, total)
        tape.pass_on(self.x, dx)


# -- rows ----------------------------------------------------------------------------------------------------


class Softmax(Layer):
    """Softmax of each row, or its logarithm: `_softmax` or `_log_softmax`. Backward:
    `_softmax_backward_data` or `_log_softmax_backward_data`, which reads the result.

    Parameters
    ----------
    logarithm : bool, optional
        Whether the logarithm is found.
    """

    def __init__(self, *, logarithm: bool = False) -> None:
        self.name = "_log_softmax" if logarithm else "_softmax"

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append the function."""
        self.x, self.y = x, tape.like(x)
        tape.rowwise(self.name, [x], [self.y])
        return self.y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append its derivative."""
        dx = tape.like(self.x)
        tape.rowwise(f"{self.name}_backward_data", [dy, self.y], [dx])
        tape.pass_on(self.x, dx)


class LayerNorm(Layer):
    """Norm of each row by its mean and deviation, with trained weight and bias, a weight alone or
    neither: `native_layer_norm`, which stores both. Backward: `native_layer_norm_backward`."""

    def forward(self, tape: Tape, x: Tensor, *trained: Tensor) -> Tensor:
        """Append `native_layer_norm`."""
        self.x, self.trained = x, trained
        rows = x.numel // x.shape[-1]
        self.mean, self.inverse = (tape.tensor(rows, itemsize=tape.wide) for _ in range(2))
        y = tape.tensor(*x.shape, itemsize=_widest(x, *trained))
        tape.rowwise("native_layer_norm", [x, *trained], [y, self.mean, self.inverse])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `native_layer_norm_backward`."""
        dx = tape.like(self.x)
        gradients = [tape.like(weight) for weight in self.trained]
        reads = [dy, self.x, self.mean, self.inverse, *self.trained]
        writes = [dx]
        if any(weight.needs_gradient for weight in self.trained):
            writes += gradients
        tape.rowwise("native_layer_norm_backward", reads, writes)
        tape.pass_on(self.x, dx)
        for weight, gradient in zip(self.trained, gradients, strict=True):
            tape.pass_on(weight, gradient)


#: What norms by the root mean square compute: a finer class of layer norms.
RMS_NORM, RMS_NORM_BACKWARD = "native_layer_norm.rms", "native_layer_norm_backward.rms"


class RmsNorm(Layer):
    """Norm of each row by its root mean square, with a trained weight: `_fused_rms_norm`. Backward:
    `_fused_rms_norm_backward`. Both are timed as the kernels of `LayerNorm` where they were not
    measured."""

    def forward(self, tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
        """Append `_fused_rms_norm`."""
        self.x, self.weight = x, weight
        self.inverse = tape.tensor(x.numel // x.shape[-1], itemsize=tape.wide)
        y = tape.tensor(*x.shape, itemsize=_widest(x, weight))
        tape.rowwise("_fused_rms_norm", [x, weight], [y, self.inverse], RMS_NORM)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `_fused_rms_norm_backward`."""
        dx, dw = tape.like(self.x), tape.like(self.weight)
        reads = [dy, self.x, self.inverse, self.weight]
        writes = [dx, dw] if self.weight.needs_gradient else [dx]
        tape.rowwise("_fused_rms_norm_backward", reads, writes, RMS_NORM_BACKWARD)
        tape.pass_on(self.x, dx)
        tape.pass_on(self.weight, dw)


def _copy_to(tape: Tape, x: Tensor, shape: Sequence[Any]) -> Tensor:
    """Copies of a tensor that fill a larger shape."""
    y = tape.tensor(*shape, itemsize=x.itemsize)
    tape.copy("clone", [x], [y])
    return y


def _add_up_to(tape: Tape, x: Tensor, shape: Sequence[Any]) -> Tensor:
    """The sum of the parts of a tensor that have a smaller shape."""
    y = tape.tensor(*shape, itemsize=x.itemsize)
    tape.rowwise("sum", [x], [y])
    return y


class Repeat(Layer):
    """Copy a tensor several times: `clone`. Backward: the sum over all copies, `sum`.

    Parameters
    ----------
    *shape : int or array
        Shape of the result [-].
    """

    def __init__(self, *shape: Any) -> None:
        self.shape = shape

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Copy the operand."""
        self.x = x
        return _copy_to(tape, x, self.shape)

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Add up the gradients of the copies."""
        tape.pass_on(self.x, _add_up_to(tape, dy, self.x.shape))


# -- copies --------------------------------------------------------------------------------------------------


class Permute(Layer):
    """Copies of the rows of tokens for each of their experts, in the order of experts: `moe_permute`.
    Backward: the sum over the copies of a row, `moe_unpermute`. No compiler merges these kernels with
    others.

    Parameters
    ----------
    *shape : int or array
        Shape of the result [-].
    """

    def __init__(self, *shape: Any) -> None:
        self.shape = shape

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `moe_permute`."""
        self.x = x
        y = tape.tensor(*self.shape, itemsize=x.itemsize)
        _permute(tape, x, y)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `moe_unpermute`."""
        dx = tape.like(self.x)
        tape.rowwise("moe_unpermute", [dy], [dx], "sum")
        tape.pass_on(self.x, dx)


class Unpermute(Layer):
    """The reverse of `Permute`, the sum over the copies of a row, `moe_unpermute`, which may weight
    them. Backward: the gradient for each copy, `moe_permute`; with weights their gradients too, in
    one kernel that reads the copies again, `moe_unpermute`.

    Parameters
    ----------
    *shape : int or array
        Shape of the result [-].
    """

    def __init__(self, *shape: Any) -> None:
        self.shape = shape

    def forward(self, tape: Tape, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Append `moe_unpermute`."""
        self.x, self.weights = x, weights
        y = tape.tensor(*self.shape, itemsize=x.itemsize)
        tape.rowwise("moe_unpermute", [x] if weights is None else [x, weights], [y], "sum")
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the kernel of the gradients."""
        dx = tape.like(self.x)
        if self.weights is None:
            _permute(tape, dy, dx)
        else:
            dw = tape.like(self.weights)
            tape.rowwise("moe_unpermute", [dy, self.x, self.weights], [dx, dw], "sum")
            tape.pass_on(self.weights, dw)
        tape.pass_on(self.x, dx)


class Reorder(Layer):
    """Rows of tokens in another order: `moe_permute`. Backward: their gradients in the order in which
    the rows were."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append `moe_permute`."""
        self.x = x
        y = tape.like(x)
        _permute(tape, x, y)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `moe_permute`."""
        dx = tape.like(self.x)
        _permute(tape, dy, dx)
        tape.pass_on(self.x, dx)


def _permute(tape: Tape, x: Tensor, y: Tensor) -> None:
    """Append a copy of rows in the order of experts."""
    tape.copy("moe_permute", [x], [y], "index", rows=y.numel // y.shape[-1])


class Concatenate(Layer):
    """Matrices as one, along their columns: `cat`. Backward: each gets its part of the gradient, as
    a view."""

    def forward(self, tape: Tape, *parts: Tensor) -> Tensor:
        """Append `cat`."""
        self.parts = parts
        rows, columns = parts[0].shape[0], sum(part.shape[1] for part in parts)
        y = tape.tensor(rows, columns, itemsize=_widest(*parts))
        tape.copy("cat", parts, [y], rows=rows * len(parts))
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Hand a part of the gradient on to each."""
        for part in self.parts:
            tape.pass_through(part, dy.view(*part.shape))


class TakePairs(Layer):
    """Numbers of each matrix of a batch by row and column, such as those below its diagonal:
    `index`.

    Backward: they are added to zeros by `new_zeros` and `index_put`, which sorts the indices on a
    GPU to add without conflicts.
    """

    def forward(self, tape: Tape, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Append `index`."""
        self.x, self.rows, self.columns = x, rows, columns
        self.batch = x.shape[0]
        y = tape.tensor(self.batch, rows.shape[0], itemsize=x.itemsize)
        tape.copy("index", [x, rows, columns], [y], rows=self.batch)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `new_zeros` and `index_put`."""
        zeros, dx = tape.like(self.x), tape.like(self.x)
        tape.copy("new_zeros", [], [zeros])
        reads = [zeros, self.rows, self.columns, dy]
        sizes = OperationSizes(elements=dy.numel, rows=self.batch)
        tape.emit("index_put", "copy", reads, [dx], sizes, launches=SORT)
        tape.pass_on(self.x, dx)


class ConcatenateHeads(Layer):
    """Two parts of each head as one: `cat`. Backward: each gets its part of the gradient, as a view; a
    second part that all heads share gets the `sum` of theirs."""

    def forward(self, tape: Tape, first: Tensor, second: Tensor) -> Tensor:
        """Append `cat`."""
        self.first, self.second = first, second
        *leading, self.heads, width = first.shape
        self.width = second.shape[-1]
        shape = (*leading, self.heads, width + self.width)
        y = tape.tensor(*shape, itemsize=_widest(first, second))
        tape.copy("cat", [first, second], [y], rows=2 * y.numel // shape[-1])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Hand a part of the gradient on to each; append the `sum`."""
        part = dy.view(*dy.shape[:-1], self.width)
        if np.any(self.second.numel != part.numel):
            total = tape.tensor(*self.second.shape, itemsize=dy.itemsize)
            sizes = OperationSizes(elements=part.numel, rows=total.numel, n=self.heads)
            tape.emit("sum", "rowwise", [part], [total], sizes)
            part = total
        tape.pass_on(self.second, part)
        tape.pass_on(self.first, dy.view(*self.first.shape))


def split(tape: Tape, x: Tensor, widths: Sequence[Any]) -> list[Tensor]:
    """Parts of the last dimension, as views. Backward: their gradients become one, `cat`.

    Parameters
    ----------
    tape : Tape
        The tape.
    x : Tensor
        What is split.
    widths : sequence of int or array
        Width of each part; they sum to that of `x` [-].

    Returns
    -------
    views : list of Tensor
        The parts.
    """
    *leading, width = x.shape
    views = [
        Tensor(x.storage, (*leading, part), x.itemsize, x.needs_gradient, x.layer)
        for part in widths
    ]

    def backward() -> None:
        dx = tape.like(x)
        gradients = [tape.gradient(view) for view in views]
        tape.copy("cat", gradients, [dx], rows=len(widths) * x.numel // width)
        tape.pass_on(x, dx)

    if x.needs_gradient:
        tape.node(backward)
    return views


# -- images --------------------------------------------------------------------------------------------------


class PatchEmbedding(Layer):
    """Vectors of the patches of images: `convolution` of windows side by side, and its bias, `add_`,
    which cuDNN adds by a kernel of its own.

    Backward: `convolution_backward` for the weight, as images need no gradient, and the `sum` of `dy`
    for the bias. A convolution is the product of all patches with (channels × side²) rows of the
    weight, and timed as any convolution.

    Parameters
    ----------
    places : int or array
        Patches of an image [-].
    """

    def __init__(self, places: Any) -> None:
        self.places = places

    def forward(self, tape: Tape, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Append `convolution` and `add_`."""
        self.images, self.weight, self.bias = images, weight, bias
        batch = images.shape[0]
        hidden, inputs = weight.shape
        y = tape.tensor(batch, self.places, hidden, itemsize=_widest(images, weight))
        sizes = OperationSizes.of_product(batch * self.places, hidden, inputs)
        self.sizes = sizes._replace(elements=y.numel, rows=batch)
        reads = [images, weight]
        tape.emit("convolution", "convolution", reads, [y], self.sizes, variant="forward")
        of_bias = OperationSizes(elements=y.numel)
        tape.emit("add_", "elementwise", [y, bias], [y], of_bias, is_call=False)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `convolution_backward` and the `sum`."""
        dw = tape.like(self.weight)
        reads = [dy, self.images, self.weight]
        name = "convolution_backward"
        tape.emit(name, "convolution", reads, [dw], self.sizes, variant="backward")
        tape.pass_through(self.bias, dy)
        tape.pass_on(self.weight, dw)


class PrependToken(Layer):
    """A trained vector ahead of the vectors of each image: `cat`. Backward: the others get their part of
    the gradient, as a view, which is cast if they are narrower; and the `sum` over images."""

    def forward(self, tape: Tape, token: Tensor, x: Tensor) -> Tensor:
        """Append `cat`."""
        self.token, self.x = token, x
        batch, places, hidden = x.shape
        y = tape.tensor(batch, places + 1, hidden, itemsize=_widest(token, x))
        tape.copy("cat", [token, x], [y], rows=2 * batch)
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Hand a part of the gradient on; append the `sum` of the other."""
        batch, _, hidden = dy.shape
        tape.pass_through(self.x, dy.view(*self.x.shape))
        total = tape.like(self.token)
        first = dy.view(batch, hidden)
        sizes = OperationSizes(elements=first.numel, rows=batch, n=hidden)
        tape.emit("sum", "rowwise", [first], [total], sizes)
        tape.pass_on(self.token, total)


class TakeFirst(Layer):
    """The first vector of each image, as a view. Backward: zeros with its gradient in them,
    `select_backward`, timed as `slice_backward`, which does the same and is measured."""

    backward_views = 2

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Return the view."""
        self.x = x
        batch, _, hidden = x.shape
        tape.bare += 1
        return Tensor(x.storage, (batch, hidden), x.itemsize, x.needs_gradient, x.layer)

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `select_backward`."""
        dx = tape.like(self.x)
        rows = self.x.numel // self.x.shape[-1]
        tape.copy("select_backward", [dy], [dx], "slice_backward", rows=rows)
        tape.pass_on(self.x, dx)


# -- embeddings ----------------------------------------------------------------------------------------------


class Embedding(Layer):
    """Lookup of rows of a table: `embedding`. Backward: `embedding_dense_backward`, whose result is
    as large as the table.

    Parameters
    ----------
    *leading : int or array
        Shape of the result without its last dimension [-].
    """

    def __init__(self, *leading: Any) -> None:
        self.leading = leading

    def forward(self, tape: Tape, weight: Tensor, index: Tensor) -> Tensor:
        """Append `embedding`."""
        self.weight, self.index = weight, index
        y = tape.tensor(*self.leading, weight.shape[1], itemsize=weight.itemsize)
        tape.rowwise("embedding", [index], [y])
        return y

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `embedding_dense_backward`."""
        rows, width = self.weight.shape
        lookups = self.index.numel
        dw = tape.like(self.weight)
        sizes = OperationSizes(
            lookups=lookups, bags=lookups, dim=width, rows=rows, elements=dw.numel
        )
        tape.emit(
            "embedding_dense_backward",
            "embedding_backward",
            [dy, self.index],
            [dw],
            sizes,
            variant="dense_rows",
        )
        tape.pass_on(self.weight, dw)


class TableLookup:
    """Sum-pooled lookup of rows of one table: which rows, and where the sums begin.

    Parameters
    ----------
    tape : Tape
        The tape.
    weight : Weight
        The table.
    number : int
        Number of the table [-].
    lookups, bags : int or array
        Rows that are looked up, and their sums [-].
    offsets : int or array, optional
        Offsets that are read, where rows are not added up; by default one for each sum [-].
    weighted : bool or array of bool, optional
        Whether each row is multiplied by a weight of its lookup; an array says it of several tables
        that are recorded as one.
    number_format : str, optional
        Format of the numbers of the table, see `perfkit.workloads.tables.EmbeddingTable`.

    Attributes
    ----------
    launches : int
        Kernels that its lookup starts: 0 if the kernel of another table looks it up too [-].
    inputs : list of Tensor
        What says which rows: indices, offsets, and the weights of lookups that have some.
    weights : Tensor, optional
        These weights; None if no lookup has one.
    """

    def __init__(
        self,
        tape: Tape,
        weight: Weight,
        number: int,
        lookups: Any,
        bags: Any,
        *,
        offsets: Any = None,
        weighted: Any = False,
        number_format: str = "",
    ) -> None:
        self.weight = weight
        self.number_format = number_format
        self.rows, self.dim = weight.shape
        self.lookups, self.bags = lookups, bags
        self.launches = 1
        indices = tape.tensor(lookups, itemsize=tape.index)
        begins = tape.tensor(bags if offsets is None else offsets, itemsize=tape.index)
        self.inputs = [indices, begins]
        self.weights: Tensor | None = None
        if np.any(weighted):
            count = lookups if weighted is True else lookups * weighted
            self.weights = tape.tensor(count, itemsize=SAMPLE_WEIGHT_BYTES)
            self.inputs.append(self.weights)
        self.sizes = OperationSizes(
            lookups=lookups, bags=bags, dim=self.dim, table=number, elements=lookups * self.dim
        )


class EmbeddingBag(Layer):
    """Sum-pooled lookup of a table in a kernel of its own: `_embedding_bag`. Backward:
    `_embedding_bag_backward`, whose result is as large as the table, or has one row for each lookup
    if it is sparse. Weights of lookups multiply these rows in another kernel of the same call,
    `mul_` [1]_.

    Parameters
    ----------
    lookup : TableLookup
        What is looked up.
    sparse : bool
        Whether the gradient is sparse, and updates single rows.

    References
    ----------
    .. [1] pytorch/pytorch, aten/src/ATen/native/EmbeddingBag.cpp,
       ``_embedding_bag_sparse_backward_symint``
    """

    def __init__(self, lookup: TableLookup, *, sparse: bool) -> None:
        self.lookup, self.sparse = lookup, sparse

    def forward(self, tape: Tape, weight: Weight) -> Tensor:
        """Append `_embedding_bag`."""
        self.weight = weight
        lookup = self.lookup
        if self.sparse:
            weight.row_update = lookup.sizes._replace(rows=lookup.lookups)
        pooled = tape.tensor(lookup.bags, lookup.dim, itemsize=tape.wide)
        tape.emit("_embedding_bag", "embedding_forward", lookup.inputs, [pooled], lookup.sizes)
        return pooled

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `_embedding_bag_backward`."""
        lookup = self.lookup
        rows = lookup.lookups if self.sparse else lookup.rows
        dw = tape.tensor(rows, lookup.dim, itemsize=tape.wide)
        reads = [dy, *lookup.inputs]
        variant = "sparse" if self.sparse else "dense"
        sizes = lookup.sizes._replace(elements=dw.numel, rows=rows)
        name = "_embedding_bag_backward"
        tape.emit(name, "embedding_backward", reads, [dw], sizes, variant=variant)
        if self.sparse and lookup.weights is not None:
            elements = lookup.weights.numel * lookup.dim
            weighted_rows = Tensor(dw.storage, (elements,), dw.itemsize, False, dw.layer)
            operands = [weighted_rows, lookup.weights]
            product = OperationSizes(elements=elements)
            tape.emit("mul_", "elementwise", operands, [weighted_rows], product, is_call=False)
        tape.pass_on(self.weight, dw)


class FusedEmbeddings:
    """Sum-pooled lookups of several tables in one kernel, as in FBGEMM: `fused_embeddings`.
    Backward: one kernel, `fused_embeddings_backward`, which computes gradients as large as the
    tables. Both are recorded as one operation for each table, of which the first starts the kernel.
    Tables whose numbers have another format have a kernel of their own.

    Where lookups have weights, another kernel of the backward pass, `fused_embeddings_weights`,
    reads their rows once more and computes the gradients of these weights: FBGEMM does so whether
    they are wanted or not, and TorchRec does not tell it that they are data [1]_.

    Parameters
    ----------
    lookups : sequence of TableLookup
        What is looked up, at least one.

    References
    ----------
    .. [1] https://github.com/meta-pytorch/torchrec/issues/4712, where it takes 18 of 344 ms
    """

    #: Variant of the kernel that looks rows up.
    variant = "fused"

    def __init__(self, lookups: Sequence[TableLookup]) -> None:
        self.lookups = lookups
        started = set[str]()
        for lookup in lookups:
            if lookup.number_format in started:  # the kernel of a table before does it, too
                lookup.launches = 0
            started.add(lookup.number_format)

    def apply(self, tape: Tape) -> list[Tensor]:
        """Append the forward pass, and note the backward pass.

        Parameters
        ----------
        tape : Tape
            The tape.

        Returns
        -------
        pooled : list of Tensor
            Sums of rows of each table.
        """
        self.pooled = []
        for lookup in self.lookups:
            pooled = tape.tensor(lookup.bags, lookup.dim, itemsize=tape.wide, needs_gradient=True)
            tape.emit(
                "fused_embeddings",
                "embedding_forward",
                lookup.inputs,
                [pooled],
                lookup.sizes,
                variant=self.variant,
                launches=lookup.launches,
                is_call=lookup.launches > 0,
            )
            self.pooled.append(pooled)
        tape.node(partial(self.backward, tape))
        return self.pooled

    def backward(self, tape: Tape) -> None:
        """Append the backward pass.

        Parameters
        ----------
        tape : Tape
            The tape.
        """
        self._return_weights(tape)
        for lookup, pooled in zip(self.lookups, self.pooled, strict=True):
            self._return_bags(tape, lookup, tape.gradient(pooled))

    def _return_weights(self, tape: Tape) -> None:
        """Compute the gradients of the weights of lookups that have some, in one kernel."""
        started = set[str]()
        for lookup, pooled in zip(self.lookups, self.pooled, strict=True):
            if lookup.weights is None:
                continue
            launches = 0 if lookup.number_format in started else 1
            started.add(lookup.number_format)
            tape.emit(
                "fused_embeddings_weights",
                "embedding_forward",
                [tape.gradient(pooled), *lookup.inputs[:2]],
                [tape.like(lookup.weights)],
                lookup.sizes,
                variant="fused",
                launches=launches,
                is_call=launches > 0,
            )

    def _return_bags(self, tape: Tape, lookup: TableLookup, dy: Tensor) -> None:
        """Compute the gradient of one table."""
        dw = tape.like(lookup.weight)
        reads = [dy, *lookup.inputs]
        self._emit_backward(tape, lookup, reads, [dw], lookup.sizes, variant="dense")
        tape.pass_on(lookup.weight, dw)

    def _emit_backward(
        self,
        tape: Tape,
        lookup: TableLookup,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        sizes: OperationSizes,
        *,
        variant: str,
        launches: int = 1,
    ) -> None:
        """Append the part of the backward kernel that is of one table."""
        tape.emit(
            "fused_embeddings_backward",
            "embedding_backward",
            reads,
            writes,
            sizes,
            variant=variant,
            launches=launches * lookup.launches,
            is_call=lookup.launches > 0,
        )


class FusedEmbeddingUpdates(FusedEmbeddings):
    """As `FusedEmbeddings`, but the backward pass computes no gradients of tables: it updates a row
    for each lookup."""

    def _return_bags(self, tape: Tape, lookup: TableLookup, dy: Tensor) -> None:
        """Update rows of one table."""
        reads = [dy, *lookup.inputs]
        self._emit_backward(tape, lookup, reads, [], lookup.sizes, variant="fused")


class ExactEmbeddingUpdates(FusedEmbeddings):
    """As `FusedEmbeddings`, but the backward pass computes no gradients of tables: it sorts the
    lookups, adds up the gradients of the same row, and updates each distinct row once.

    Parameters
    ----------
    lookups : sequence of TableLookup
        What is looked up, at least one.
    row_bytes : sequence of float or array
        Bytes of each table that the sort and the updates move [B].
    """

    #: Variant of the kernel that updates rows.
    update = "exact"
    #: Kernels that it starts.
    launches_of_update = SORT

    @staticmethod
    def count_sorted(lookup: TableLookup) -> Any:
        """Sorted lookups whose number adds to the time beside their bytes [-]."""
        return 0

    def __init__(self, lookups: Sequence[TableLookup], row_bytes: Sequence[Any]) -> None:
        super().__init__(lookups)
        self.row_bytes = dict(zip(lookups, row_bytes, strict=True))

    def _return_bags(self, tape: Tape, lookup: TableLookup, dy: Tensor) -> None:
        """Update distinct rows of one table, which are part of the traffic instead of lookups."""
        rows = tape.tensor(self.row_bytes[lookup], itemsize=1)
        reads = [dy, *lookup.inputs, rows]
        sizes = lookup.sizes._replace(lookups=0, rows=self.count_sorted(lookup))
        starts = self.launches_of_update
        self._emit_backward(tape, lookup, reads, [], sizes, variant=self.update, launches=starts)


class HashEmbeddingUpdates(ExactEmbeddingUpdates):
    """As `ExactEmbeddingUpdates`, of hash tables: each row is searched first. What starts their many
    kernels is part of the time of the kernel that they are recorded as."""

    variant = "hash"
    update = "hash"
    launches_of_update = 1

    @staticmethod
    def count_sorted(lookup: TableLookup) -> Any:
        """All of them: each was searched [-]."""
        return lookup.lookups


# -- losses --------------------------------------------------------------------------------------------------


class BinaryCrossEntropy(Layer):
    """Mean binary cross entropy of logits: `binary_cross_entropy_with_logits`. Backward: `sigmoid`,
    `sub`, `mul` and `div_`."""

    def forward(self, tape: Tape, x: Tensor, labels: Tensor) -> Tensor:
        """Append the loss."""
        self.x, self.labels = x, labels
        loss = tape.tensor(1, itemsize=x.itemsize)
        tape.elementwise("binary_cross_entropy_with_logits", [x, labels], [loss])
        return loss

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append the probability less the label, times the gradient of the loss, over the number of
        samples."""
        probability, difference, dx = (tape.like(self.x) for _ in range(3))
        tape.elementwise("sigmoid", [self.x], [probability])
        tape.elementwise("sub", [probability, self.labels], [difference])
        tape.elementwise("mul", [difference, dy], [dx])
        tape.elementwise("div_", [dx], [dx])
        tape.pass_on(self.x, dx)


class NegativeLogLikelihood(Layer):
    """Mean of the logarithms of probabilities at the labels: `nll_loss_forward`, which stores the
    weight of all labels. Backward: `nll_loss_backward`."""

    def forward(self, tape: Tape, x: Tensor, labels: Tensor) -> Tensor:
        """Append `nll_loss_forward`."""
        self.x, self.labels = x, labels
        loss, self.total = (tape.tensor(1, itemsize=x.itemsize) for _ in range(2))
        sizes = OperationSizes(elements=labels.numel, rows=labels.numel)
        tape.emit("nll_loss_forward", "rowwise", [labels], [loss, self.total], sizes)
        return loss

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Append `nll_loss_backward`."""
        dx = tape.like(self.x)
        tape.rowwise("nll_loss_backward", [dy, self.labels, self.total], [dx])
        tape.pass_on(self.x, dx)


class ChunkedCrossEntropy(Layer):
    """Mean cross entropy of a head in pieces of tokens, one after another, so that the logits of one
    piece live at a time, as the fused linear cross entropy of Liger [1]_.

    For each piece the forward pass also computes the gradients: `mm` to logits, `_to_copy` to fp32
    where the loss is, `_log_softmax`, `nll_loss_forward` and `nll_loss_backward`,
    `_log_softmax_backward_data`, `_to_copy` back, and `mm` for each gradient; that of the weight
    adds to those of earlier pieces. The backward pass hands them on.

    Parameters
    ----------
    chunks : int
        Pieces [-].
    itemsize : int
        Bytes of a number of the loss [B].
    ranks : int or array
        Ranks that share the words [-].

    References
    ----------
    .. [1] linkedin/Liger-Kernel, src/liger_kernel/ops/fused_linear_cross_entropy.py; Liger makes one
       kernel of the functions of logits, PyTorch's are taken here
    """

    def __init__(self, chunks: int, *, itemsize: int, ranks: Any) -> None:
        self.chunks, self.itemsize, self.ranks = chunks, itemsize, ranks

    def forward(self, tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
        """Append the pieces."""
        self.x, self.weight = x, weight
        *leading, width = x.shape
        tokens = prod(leading)
        rows = (tokens + (self.chunks - 1)) // self.chunks  # the last piece may have fewer
        self.dx, self.dw = tape.like(x), tape.like(weight)
        loss = tape.tensor(1, itemsize=self.itemsize)
        for piece in range(self.chunks):
            logits = tape.tensor(rows, weight.shape[0], itemsize=x.itemsize)
            tape.product("mm", NT, x.view(rows, width), weight, logits)
            loss, dlogits = self._differentiate(tape, logits, rows)
            tape.product("mm", NN, dlogits, weight, self.dx.view(rows, width))
            if weight.needs_gradient:
                tape.product("mm", TN, dlogits, x.view(rows, width), self.dw, adds=piece > 0)
        return loss

    def _differentiate(self, tape: Tape, logits: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
        """Append the loss of a piece, and the gradient of its logits."""
        if np.any(np.asarray(self.ranks) > 1):
            # largest logit, sum of exponentials, and logit of the label
            for _ in range(3):
                tape.collective("all_reduce", [], [], nbytes=4 * rows)
        wide = self._cast(tape, logits, self.itemsize)
        logarithms = tape.like(wide)
        tape.rowwise("_log_softmax", [wide], [logarithms])
        labels = tape.tensor(rows, itemsize=8)
        loss, total = (tape.tensor(1, itemsize=self.itemsize) for _ in range(2))
        sizes = OperationSizes(elements=rows, rows=rows)
        tape.emit("nll_loss_forward", "rowwise", [labels], [loss, total], sizes)
        dlogarithms, dwide = tape.like(wide), tape.like(wide)
        tape.rowwise("nll_loss_backward", [loss, labels, total], [dlogarithms])
        tape.rowwise("_log_softmax_backward_data", [dlogarithms, logarithms], [dwide])
        return loss, self._cast(tape, dwide, logits.itemsize)

    def _cast(self, tape: Tape, tensor: Tensor, itemsize: int) -> Tensor:
        """The same numbers in another format, if they have another one."""
        if tensor.itemsize == itemsize:
            return tensor
        cast = tape.tensor(*tensor.shape, itemsize=itemsize)
        tape.elementwise("_to_copy", [tensor], [cast])
        return cast

    def backward(self, tape: Tape, dy: Tensor) -> None:
        """Hand the gradients on; that of the loss is one."""
        tape.pass_on(self.x, self.dx)
        tape.pass_on(self.weight, self.dw)


def start_backward(tape: Tape, loss: Tensor) -> None:
    """Let the backward pass start with the gradient of the loss, which is one: `ones_like`.

    Parameters
    ----------
    tape : Tape
        The tape.
    loss : Tensor
        The loss.
    """

    def backward() -> None:
        one = tape.like(loss)
        tape.copy("ones_like", [loss], [one], "new_zeros")
        tape.pass_on(loss, one)

    tape.node(backward)
