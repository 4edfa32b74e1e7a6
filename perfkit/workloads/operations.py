"""The operations that PyTorch's eager mode dispatches for the layers of workloads: a table, forward
and backward.

A line such as ``"mm gemm.nt: x w -> y"`` describes an operation: its name; its kind, if it is not
element-wise; after a dot its variant, if that differs from the name; the tensors that it reads and
those that it writes. `y` is the result of the layer, `dx` the gradient of `x`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from perfkit.models.roofline import gemm_flops

#: Kernels that a GPU starts to sort by key [-].
SORT = 10


@dataclass(slots=True, eq=False)
class Tensor:
    """A shape with a storage; views share both storage and gradient.

    Parameters
    ----------
    storage : int
        Number of the storage [-].
    shape : tuple of int or array
        Sizes: numbers, or arrays over configurations [-].
    itemsize : int
        Bytes of one element [B].
    grad : bool
        Whether it has a gradient.
    layer : int
        Number of its layer, -1 for none [-].
    root : Tensor, optional
        The tensor of which it is a view.
    """

    storage: int
    shape: tuple[Any, ...]
    itemsize: int
    grad: bool = False
    layer: int = -1
    root: Any = None
    numel: Any = field(init=False)
    nbytes: Any = field(init=False)

    def __post_init__(self) -> None:
        self.root, self.numel = self.root or self, prod(self.shape)
        self.nbytes = self.numel * self.itemsize

    def view(self, *shape: Any) -> "Tensor":
        """A view with another shape, or of a part."""
        return Tensor(self.storage, shape, self.itemsize, self.grad, self.layer, self.root)


class Line(NamedTuple):
    """One operation: its name, kind and variant, and the names of the tensors it reads and
    writes."""

    name: str
    kind: str
    variant: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def size(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], stated: dict[str, Any]
    ) -> dict[str, Any]:
        """Features of the operation, from its tensors and from the sizes that its layer states."""
        if self.kind in ("gemm", "bmm"):
            left, right = (tensor.shape for tensor in reads[-2:])
            batch, m, k = (1, prod(left[:-1]), left[-1]) if self.kind == "gemm" else left
            m, k = (k, m) if self.variant[0] == "t" else (m, k)
            return size_product(
                m, right[-2] if self.variant[1] == "t" else right[-1], k, batch=batch
            )
        if self.kind == "attention":
            return (
                {**stated, "flops": 2.5 * stated["flops"]}
                if self.variant.startswith("backward")
                else stated
            )
        if self.name == "embedding_dense_backward":
            return {**stated, "elements": writes[0].numel, "rows": writes[0].shape[0]}
        if self.name == "nll_loss_forward":
            return {"elements": reads[0].numel, "rows": reads[0].numel}
        if self.kind == "rowwise":
            *leading, n = writes[0].shape
            return {"elements": writes[0].numel, "rows": prod(leading), "n": n}
        if self.name == "index_put":
            return {"elements": reads[-1].numel, **stated, "launches": SORT}
        if self.name == "new_zeros":
            return {"elements": writes[0].numel}
        return {"elements": (writes if self.kind == "copy" else reads)[0].numel, **stated}


class Rule(NamedTuple):
    """A layer: its operands, its operations forward and backward, and which gradient arrives at
    which operand.

    `bare` is how many calls without a kernel the backward pass makes first [-].
    """

    operands: tuple[str, ...]
    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    gives: tuple[tuple[str, str], ...]
    bare: int = 0


def size_product(
    m: float, n: float, k: float, *, batch: float = 1, passes: float = 1.0
) -> dict[str, float]:
    """Features of a product of matrices.

    Parameters
    ----------
    m, n, k, batch : float
        Rows, columns, inner dimension and number of products [-].
    passes : float, optional
        How often the arithmetic of one product is done [-].

    Returns
    -------
    sizes : dict
        ``flops`` [FLOP] and the dimensions [-].
    """
    return {
        "flops": passes * gemm_flops(m, n, k, batch=batch),
        "batch": batch,
        "m": m,
        "n": n,
        "k": k,
    }


@lru_cache
def parse_lines(text: str) -> tuple[Line, ...]:
    """Operations of a text such as ``"mul: dy b -> dx; mul: dy x -> db"``, in its order."""
    lines = []
    for line in filter(None, text.split("; ")):
        head, _, tensors = line.partition(":")
        name, _, kind = head.partition(" ")
        kind, _, variant = kind.partition(".")
        reads, writes = (tuple(part.split()) for part in tensors.split("->"))
        lines.append(Line(name, kind or "elementwise", variant or name, reads, writes))
    return tuple(lines)


def _rule(
    operands: str, forward: str, backward: str = "", *, gives: str = "", bare: int = 0
) -> Rule:
    """A rule; without `gives`, gradients arrive at the operands whose gradients the backward pass
    writes."""
    names, back = tuple(operands.split()), parse_lines(backward)
    written = [name for name in names if any(f"d{name}" in line.writes for line in back)]
    pairs = [pair.partition(">")[::2] for pair in gives.split()] or [
        (f"d{name}", name) for name in written
    ]
    return Rule(names, parse_lines(forward), back, tuple(pairs), bare)


#: Names of fused kernels of attention: FlashAttention-3 (also cuDNN's), FlashAttention-2,
#: FlashAttention in Triton, and memory-efficient attention.
ATTENTION = ("flash3", "flash2", "triton", "efficient")
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"

#: Layers by name. A gradient `dy` is cast where it arrives at a narrower operand, and summed up at
#: a smaller one.
RULES: Mapping[str, Rule] = {
    # the gradient of the loss, which is one
    "seed": _rule("x", "", "ones_like copy.new_zeros: x -> y"),
    "cast": _rule("x", "_to_copy: x -> y", gives="dy>x"),
    "relu": _rule("x", "relu: x -> y", "threshold_backward: dy y -> dx"),
    "gelu": _rule("x", "gelu: x -> y", "gelu_backward: dy x -> dx"),
    "gelu_tanh": _rule(
        "x", "gelu .gelu_tanh: x -> y", "gelu_backward .gelu_backward_tanh: dy x -> dx"
    ),
    "silu": _rule("x", "silu: x -> y", "silu_backward: dy x -> dx"),
    "dropout": _rule("x m", "native_dropout: x -> y m", "native_dropout_backward: dy m -> dx"),
    "rotate": _rule("x angles", "mul: x angles -> y", "mul: dy angles -> dx"),
    "repeat": _rule("x", "clone copy: x -> y", "sum rowwise: dy -> dx"),
    "fold": _rule("x", "sum rowwise: x -> y", "clone copy: dy -> dx"),
    "scale": _rule("x", "mul .mul_scalar: x -> y", "mul .mul_scalar: dy -> dx"),
    "add": _rule("x b", "add: x b -> y", gives="dy>x dy>b"),
    "multiply": _rule("x b", "mul: x b -> y", "mul: dy b -> dx; mul: dy x -> db"),
    "softmax": _rule("x", "_softmax rowwise: x -> y", "_softmax_backward_data rowwise: dy y -> dx"),
    "log_softmax": _rule(
        "x", "_log_softmax rowwise: x -> y", "_log_softmax_backward_data rowwise: dy y -> dx"
    ),
    "layer_norm": _rule(
        "x w b mean inverse",
        "native_layer_norm rowwise: x w b -> y mean inverse",
        "native_layer_norm_backward rowwise: dy x mean inverse w b -> dx dw db",
    ),
    "rms_norm": _rule(
        "x w inverse",
        "_fused_rms_norm rowwise.native_layer_norm: x w -> y inverse",
        "_fused_rms_norm_backward rowwise.native_layer_norm_backward: dy x inverse w -> dx dw",
    ),
    "split": _rule("x parts", "", "cat copy: dparts -> dx"),
    "cat": _rule("parts", "cat copy: parts -> y", gives="dy>parts"),
    "triangle": _rule(
        "x i j",
        "index copy: x i j -> y",
        "new_zeros copy: -> zeros; index_put copy: zeros i j dy -> dx",
    ),
    "linear": _rule(
        "x w b",
        "addmm gemm.nt: b x w -> y",
        "mm gemm.nn: dy w -> dx; mm gemm.tn: dy x -> dw",
        gives="dy>b dx>x dw>w",
        bare=1,
    ),
    "project": _rule(
        "x w",
        "mm gemm.nt: x w -> y",
        "mm gemm.tn: dy x -> dw; mm gemm.nn: dy w -> dx",
        bare=1,
    ),
    **{
        f"{name}_fp8": _rule(  # as in Transformer Engine: operands are cast with known scales
            f"x w {bias}u v g",
            f"_to_copy: x -> u; _to_copy: w -> v; _scaled_mm gemm.nt: {bias}u v -> y",
            "_to_copy: dy -> g; _scaled_mm gemm.nn: g v -> dx; _scaled_mm gemm.tn: g u -> dw",
            gives="dy>b dx>x dw>w" if bias else "",
            bare=1,
        )
        for name, bias in (("project", ""), ("linear", "b "))
    },
    "bmm": _rule(
        "a b",
        "bmm bmm.nn: a b -> y",
        "bmm bmm.tn: a dy -> db; bmm bmm.nt: dy b -> da",
        gives="db>b da>a",
    ),
    "bmm_nt": _rule(
        "a b",
        "bmm bmm.nt: a b -> y",
        "bmm bmm.tn: a dy -> db; bmm bmm.nn: dy b -> da",
        gives="db>b da>a",
    ),
    **{
        f"attention{name}": _rule(
            "q k v statistics",
            f"{_FLASH} attention.forward{name}: q k v -> y statistics",
            f"{_FLASH}_backward attention.backward{name}: dy q k v y statistics -> dq dk dv",
        )
        for causal in ("", "_causal")
        for name in (causal, *(f"{causal}.{kernel}" for kernel in ATTENTION))
    },
    "embedding": _rule(
        "w index",
        "embedding rowwise: index -> y",
        "embedding_dense_backward embedding_backward.dense_rows: dy index -> dw",
    ),
    "binary_cross_entropy": _rule(
        "x labels loss one",
        "binary_cross_entropy_with_logits: x labels -> loss",
        "sigmoid: x -> p; sub: p labels -> g; mul: g one -> dx; div_: dx -> dx",
    ),
    "nll_loss": _rule(
        "x labels loss total one",
        "nll_loss_forward rowwise: labels -> loss total",
        "nll_loss_backward rowwise: one labels total -> dx",
    ),
}
