"""The operations that PyTorch's eager mode dispatches for the layers of workloads: a table with both directions.

A line such as ``"threshold_backward: dy y -> dx"`` names an operation; its kind, unless it is element-wise, and after
a dot its variant where that is another word; then the tensors it reads and writes. `y` is the result, `dx` the gradient
of `x`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

from perfkit.models.roofline import gemm_flops

#: Kernels of a sort by key with what prepares it.
_SORT = 10

_Own: TypeAlias = dict[str, Any]
_Label: TypeAlias = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class Tensor:
    """A shape with a storage; views share storage and gradient. A size is a number, or an array over configurations.

    Parameters
    ----------
    storage : int
        Number of the storage [-].
    shape : tuple of int or array
        Sizes [-].
    itemsize : int
        Bytes of one element [B].
    grad : bool
        Whether a gradient flows into it.
    layer : int
        Layer it belongs to, -1 for none [-].
    root : Tensor, optional
        What it is a view of.
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
        """The same storage and gradient under another shape, or a part of it."""
        return Tensor(self.storage, shape, self.itemsize, self.grad, self.layer, self.root)


class Line(NamedTuple):
    """One operation: its name, kind and variant, the names of the tensors it reads and writes, and its sizes."""

    label: _Label
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    size: Callable[[_Label, Sequence[Tensor], Sequence[Tensor], _Own], _Own]


class Rule(NamedTuple):
    """What a layer runs: its operands, operations both ways, and which gradient arrives at which operand."""

    operands: tuple[str, ...]
    forward: tuple[Line, ...]
    backward: tuple[Line, ...]
    gives: tuple[tuple[str, str], ...]
    bare: int = 0


def size_product(m: float, n: float, k: float, *, batch: float = 1, passes: float = 1.0) -> dict[str, float]:
    """Features of a product of matrices.

    Parameters
    ----------
    m, n, k, batch : float
        Rows, columns, inner dimension and number of products [-].
    passes : float, optional
        How many times the arithmetic of one product is done [-].

    Returns
    -------
    sizes : dict
        ``flops`` and the dimensions [-].
    """
    return {"flops": passes * gemm_flops(m, n, k, batch=batch), "batch": batch, "m": m, "n": n, "k": k}


def _size_product(label: _Label, reads: Sequence[Tensor], writes: Sequence[Tensor], own: _Own) -> _Own:
    """Batch, rows, columns and depth of a product; its variant tells which operand is transposed."""
    (left, right), (_, kind, layout) = (t.shape for t in reads[-2:]), label
    batch, m, k = (1, prod(left[:-1]), left[-1]) if kind == "gemm" else left
    m, k = (k, m) if layout[0] == "t" else (m, k)
    n = right[-2] if layout[1] == "t" else right[-1]
    return size_product(m, n, k, batch=batch)


def _size_rows(label: _Label, reads: Sequence[Tensor], writes: Sequence[Tensor], own: _Own) -> _Own:
    return {"elements": writes[0].numel, "rows": prod(writes[0].shape[:-1]), "n": writes[0].shape[-1]}


#: Sizes of an operation from the tensors it reads and writes and what its layer states: by name, variant or kind.
SIZES: Mapping[str, Callable[[_Label, Sequence[Tensor], Sequence[Tensor], _Own], _Own]] = {
    "elementwise": lambda label, reads, writes, own: {"elements": reads[0].numel},
    "rowwise": _size_rows,
    "nll_loss_forward": lambda label, reads, writes, own: {"elements": reads[0].numel, "rows": reads[0].numel},
    "copy": lambda label, reads, writes, own: {"elements": writes[0].numel, **own},
    "new_zeros": lambda label, reads, writes, own: {"elements": writes[0].numel},
    "index_put": lambda label, reads, writes, own: {"elements": reads[-1].numel, **own, "launches": _SORT},
    **dict.fromkeys(("gemm", "bmm"), _size_product),
    **dict.fromkeys(("attention", "embedding_forward", "embedding_backward"), lambda label, reads, writes, own: own),
    **dict.fromkeys(
        ("backward", "backward_causal"), lambda label, reads, writes, own: {**own, "flops": 2.5 * own["flops"]}
    ),
    "exact": lambda label, reads, writes, own: {"launches": _SORT, **own, "lookups": 0},
    **dict.fromkeys(
        ("embedding_dense_backward", "_embedding_bag_backward"),
        lambda label, reads, writes, own: {**own, "elements": writes[0].numel, "rows": writes[0].shape[0]},
    ),
}


@lru_cache
def parse_lines(text: str) -> tuple[Line, ...]:
    """Operations of a text, one after the other."""
    lines = []
    for line in filter(None, text.split("; ")):
        head, _, tensors = line.partition(":")
        name, _, kind = head.partition(" ")
        kind, _, variant = kind.partition(".")
        kind = kind or "elementwise"
        reads, writes = (tuple(part.split()) for part in tensors.split("->"))
        size = SIZES.get(name) or SIZES.get(variant.partition(".")[0]) or SIZES[kind]
        lines.append(Line((name, kind, variant or name), reads, writes, size))
    return tuple(lines)


def _rule(operands: str, forward: str, backward: str = "", *, gives: str = "", bare: int = 0) -> Rule:
    """Gradients arrive where `gives` says, or else at the operands whose gradients are written."""
    names, back = tuple(operands.split()), parse_lines(backward)
    written = [name for name in names if any(f"d{name}" in line.writes for line in back)]
    pairs = [pair.partition(">")[::2] for pair in gives.split()] or [(f"d{name}", name) for name in written]
    return Rule(names, parse_lines(forward), back, tuple(pairs), bare)


#: Fused kernels of attention that may be named: FlashAttention-3 (also cuDNN's), FlashAttention-2, that in Triton, and
#: memory-efficient attention.
ATTENTION = ("flash3", "flash2", "triton", "efficient")
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"

#: Layers by name. A gradient `dy` that arrives at a narrower operand is cast, at a smaller one summed up.
RULES: Mapping[str, Rule] = {
    **{f"{count} views": _rule("x", "", bare=count - 1) for count in (2, 6)},  # a node without a kernel counts as one
    "seed": _rule("x", "", "ones_like copy.new_zeros: x -> y"),  # the gradient of a loss itself
    "cast": _rule("x", "_to_copy: x -> y", gives="dy>x"),
    "relu": _rule("x", "relu: x -> y", "threshold_backward: dy y -> dx"),
    "gelu": _rule("x", "gelu: x -> y", "gelu_backward: dy x -> dx"),
    "gelu_tanh": _rule("x", "gelu .gelu_tanh: x -> y", "gelu_backward .gelu_backward_tanh: dy x -> dx"),
    "silu": _rule("x", "silu: x -> y", "silu_backward: dy x -> dx"),
    "dropout": _rule("x m", "native_dropout: x -> y m", "native_dropout_backward: dy m -> dx"),
    "rotate": _rule("x angles", "mul: x angles -> y", "mul: dy angles -> dx"),
    "repeat": _rule("x", "clone copy: x -> y", "sum rowwise: dy -> dx"),
    "fold": _rule("x", "sum rowwise: x -> y", "clone copy: dy -> dx"),
    "scale": _rule("x", "mul .mul_scalar: x -> y", "mul .mul_scalar: dy -> dx"),
    "add": _rule("x b", "add: x b -> y", gives="dy>x dy>b"),
    "multiply": _rule("x b", "mul: x b -> y", "mul: dy b -> dx; mul: dy x -> db"),
    "softmax": _rule("x", "_softmax rowwise: x -> y", "_softmax_backward_data rowwise: dy y -> dx"),
    "log_softmax": _rule("x", "_log_softmax rowwise: x -> y", "_log_softmax_backward_data rowwise: dy y -> dx"),
    "layer_norm": _rule(
        "x w b mean inverse", "native_layer_norm rowwise: x w b -> y mean inverse",
        "native_layer_norm_backward rowwise: dy x mean inverse w b -> dx dw db",
    ),
    "rms_norm": _rule(
        "x w inverse", "_fused_rms_norm rowwise.native_layer_norm: x w -> y inverse",
        "_fused_rms_norm_backward rowwise.native_layer_norm_backward: dy x inverse w -> dx dw",
    ),
    "split": _rule("x parts", "", "cat copy: dparts -> dx"),
    "cat": _rule("parts", "cat copy: parts -> y", gives="dy>parts"),
    "triangle": _rule(
        "x i j", "index copy: x i j -> y", "new_zeros copy: -> zeros; index_put copy: zeros i j dy -> dx"
    ),
    "linear": _rule(
        "x w b", "addmm gemm.nt: b x w -> y", "mm gemm.nn: dy w -> dx; mm gemm.tn: dy x -> dw",
        gives="dy>b dx>x dw>w", bare=1,
    ),
    "project": _rule(
        "x w", "mm gemm.nt: x w -> y", "mm gemm.tn: dy x -> dw; mm gemm.nn: dy w -> dx", bare=1,
    ),
    **{
        f"{name}_fp8": _rule(  # as Transformer Engine does it: numbers are cast with scales that are known
            f"x w {bias}u v g",
            f"_to_copy: x -> u; _to_copy: w -> v; _scaled_mm gemm.nt: {bias}u v -> y",
            "_to_copy: dy -> g; _scaled_mm gemm.nn: g v -> dx; _scaled_mm gemm.tn: g u -> dw",
            gives="dy>b dx>x dw>w" if bias else "", bare=1,
        )
        for name, bias in (("project", ""), ("linear", "b "))
    },
    "bmm": _rule("a b", "bmm bmm.nn: a b -> y", "bmm bmm.tn: a dy -> db; bmm bmm.nt: dy b -> da", gives="db>b da>a"),
    "bmm_nt": _rule("a b", "bmm bmm.nt: a b -> y", "bmm bmm.tn: a dy -> db; bmm bmm.nn: dy b -> da", gives="db>b da>a"),
    **{
        f"attention{name}": _rule(
            "q k v statistics", f"{_FLASH} attention.forward{name}: q k v -> y statistics",
            f"{_FLASH}_backward attention.backward{name}: dy q k v y statistics -> dq dk dv",
        )
        for causal in ("", "_causal") for name in (causal, *(f"{causal}.{kernel}" for kernel in ATTENTION))
    },
    "embedding": _rule(
        "w index", "embedding rowwise: index -> y",
        "embedding_dense_backward embedding_backward.dense_rows: dy index -> dw",
    ),
    **{
        kind: _rule(
            "w index offsets dw", "_embedding_bag embedding_forward: index offsets -> y",
            f"_embedding_bag_backward embedding_backward.{kind}: dy index offsets -> dw",
        )
        for kind in ("sparse", "dense")
    },
    "fused": _rule(
        "w index offsets", "fused_embeddings embedding_forward.fused: index offsets -> y",
        "fused_embeddings_backward embedding_backward.fused: dy index offsets ->",
    ),
    "fused_dense": _rule(
        "w index offsets", "fused_embeddings embedding_forward.fused: index offsets -> y",
        "fused_embeddings_backward embedding_backward.dense: dy index offsets -> dw",
    ),
    "exact": _rule(
        "w index offsets sorted", "fused_embeddings embedding_forward.fused: index offsets -> y",
        "fused_embeddings_backward embedding_backward.exact: dy index offsets sorted ->",
    ),
    "binary_cross_entropy": _rule(
        "x labels loss one", "binary_cross_entropy_with_logits: x labels -> loss",
        "sigmoid: x -> p; sub: p labels -> g; mul: g one -> dx; div_: dx -> dx",
    ),
    "nll_loss": _rule(
        "x labels loss total one", "nll_loss_forward rowwise: labels -> loss total",
        "nll_loss_backward rowwise: one labels total -> dx",
    ),
}  # fmt: skip
