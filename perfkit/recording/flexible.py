"""Attention by `flex_attention` on a GPU, where a compiler makes one fused kernel of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.nn.attention import flex_attention as flexible

from perfkit.recording.patches import Patch
from perfkit.recording.precision import cast_to_autocast
from perfkit.recording.values import Values, compute

#: Assumption for flexible attention.
FUSED = (
    "flex_attention counts as flash attention on the blocks that its block mask leaves; what its functions of scores and "
    "masks compute takes no time, and tensors that they read, such as a learned bias, get no gradient and no update"
)
#: What is said where the blocks of a mask are not known.
WHOLE = "how many blocks a block mask leaves is not known; flex_attention counts as if it left all of them"
#: Places in a block mask: the numbers of blocks that are masked in part and not at all, and the sizes
#: of a block.
_PARTIAL, _FULL, _ROWS, _COLUMNS = 2, 4, -3, -2


class _First(torch.autograd.Function):
    """The first rows of keys or values, which no kernel copies."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, count: int) -> Tensor:
        ctx.shape = tensor.shape
        return tensor.narrow(2, 0, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].new_empty(ctx.shape), None


def is_flexible(func: Any) -> bool:
    """Whether a function of PyTorch is flexible attention."""
    return isinstance(func, HigherOrderOperator) and func.name() == "flex_attention"


def attend(values: Values, args: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Flexible attention as a GPU runs it: flash attention on a share of the keys.

    Parameters
    ----------
    values : Values
        Knows the blocks of the mask, and receives notes.
    args : sequence
        Queries, keys and values, shapes (B, H, N, E), (B, G, M, E) and (B, G, M, V), a function of
        scores, a block mask as a tuple, and the scale.

    Returns
    -------
    out, logarithms, largest : Tensor
        Results, shape (B, H, N, V), and for each row the logarithm of the sum and the largest score,
        shape (B, H, N).
    """
    query, key, value = cast_to_autocast(args[:3])
    values.notes[FUSED] = None
    rows, columns, width = query.shape[2], key.shape[2], query.shape[3]
    share = _find_share(values, args[4], rows, columns)
    blocks = -(-rows // max(int(args[4][_ROWS]), 1))
    is_causal = rows == columns and blocks > 1 and abs(share - (blocks + 1) / (2 * blocks)) < 1e-6
    if not is_causal and share < 1:
        count = max(1, round(share * columns))
        key, value = _First.apply(key, count), _First.apply(value, count)
    run = torch.ops.aten._scaled_dot_product_flash_attention
    out, logarithms = run(query, key, value, 0.0, is_causal, scale=args[5])[:2]
    deep = value.shape[3]
    if deep != width:
        out = out[..., :deep] if deep < width else _widen(out, deep)
    return out, logarithms, torch.empty_like(logarithms)


def _widen(out: Tensor, deep: int) -> Tensor:
    """A result with heads of this size; it is allocated, and nothing is copied."""
    return _Wide.apply(out, deep)


class _Wide(torch.autograd.Function):
    """Results with wider heads, which no kernel copies."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, deep: int) -> Tensor:
        ctx.shape = tensor.shape
        return tensor.new_empty((*tensor.shape[:-1], deep))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].new_empty(ctx.shape), None


def _find_share(values: Values, mask: Sequence[Any], rows: int, columns: int) -> float:
    """Share of the scores that lie in blocks which a mask leaves."""
    counts = []
    for place in (_PARTIAL, _FULL):
        if mask[place] is None:
            continue
        known = getattr(values.pretend(mask[place]), "constant", None)
        if known is None:
            values.notes[WHOLE] = None
            return 1.0
        counts.append(known)
    of_block = float(mask[_ROWS]) * float(mask[_COLUMNS])
    left = sum(float(compute(lambda each: each.sum().item(), each)) for each in counts)
    masks = counts[0].numel() / counts[0].shape[-1]  # one for each of these samples and heads
    return min(left * of_block / (masks * rows * columns), 1.0)


def patch_flexible_attention() -> Patch:
    """Patch of flexible attention in a capture for a GPU."""

    def validate(query: Any, key: Any, value: Any) -> None:
        """It runs on the GPU."""

    return Patch(
        flexible,
        "_validate_device",
        validate,
        reason="flex_attention refuses gradients, as tensors are stored on the CPU",
    )
