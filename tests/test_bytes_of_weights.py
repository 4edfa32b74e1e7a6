"""Bytes of a weight with its gradient and the states of Adam in each precision, beside what is
published."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

import perfkit as pk

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
MODEL = pk.Transformer.preset(
    "llama-2-7b", batch=8, sequence=16, layers=4, dtype="bf16", mixed=True, fused=True
)
NUMBERS = MODEL.graphs()[0].parameters
#: Placeholders of gradients, which products that add to buffers leave, are another row of table 9.3.
MEGATRON = replace(pk.find_stack("megatron"), fused_accumulation=False)
IN_BF16 = {"mixed": False}
IN_FP32 = {"mixed": False, "dtype": "fp32"}


class Bytes(NamedTuple):
    """Bytes of a number."""

    parameters: float
    gradients: float
    states: float


def measure(strategy: pk.Strategy | None, stack: Any, **changes: Any) -> Bytes:
    """Bytes of parameters, gradients and states of a number."""
    model = replace(MODEL, **changes)
    ranks = None if strategy is not None else 1
    memory = pk.predict(model, "h100-sxm-8", ranks=ranks, strategy=strategy, stack=stack).memory()
    return Bytes(*(memory.parts[part] / NUMBERS for part in Bytes._fields))


def test_pure_bf16_takes_eight_bytes_and_fp32_and_autocast_sixteen() -> None:
    """torchtune's ``dtype: bf16`` and torchtitan's ``dtype = "bfloat16"``: weights, gradients and both
    states in bf16. Autocast keeps all in fp32 (PyTorch, torch.amp)."""
    assert measure(None, None, **IN_BF16) == pytest.approx((2.0, 2.0, 4.0), rel=1e-3)
    assert measure(None, None, **IN_FP32) == pytest.approx((4.0, 4.0, 8.0), rel=1e-3)
    assert measure(None, None) == pytest.approx((4.0, 4.0, 8.0), rel=1e-3)


#: What the manual says of all bytes, and of them those of states, which ranks share.
PUBLISHED: tuple[tuple[dict[str, Any], float, float], ...] = (
    ({}, 18.0, 12.0),
    (IN_FP32, 16.0, 8.0),
    ({"reduce_dtype": "bf16"}, 16.0, 12.0),
)


@pytest.mark.parametrize(("changes", "whole", "shared"), PUBLISHED)
def test_megatron_takes_as_much_as_its_manual_says(
    changes: dict[str, Any], whole: float, shared: float
) -> None:
    """Megatron Core user guide, distributed optimizer (docs.nvidia.com/megatron-core, dist_optimizer):
    bf16 weights with gradients and masters in fp32 18, or 6 + 12 / d with states that d ranks share;
    fp32 16, or 8 + 8 / d. With gradients in 16 bits 2 + 2 + 12, as the ZeRO paper says
    (arXiv:1910.02054, section 3.1).

    New gradients of a unit, a quarter of all numbers here, are beside the buffers for a while.
    """
    for zero, ranks in ((0, 1), (1, 8)):
        held = measure(pk.Strategy(dp=8, zero=zero), MEGATRON, **changes)
        assert held.states == pytest.approx(shared / ranks, rel=1e-3)
        most = 4.0 if changes == IN_FP32 else 2.0
        new_gradients = sum(held) - (whole - shared + shared / ranks)
        assert 0.0 <= new_gradients < 0.25 * most


def test_shards_of_fsdp_are_fp32_with_mixed_precision_and_as_narrow_as_weights_without() -> None:
    """16 or 8 B over the ranks; what is gathered counts as communication."""
    strategy = pk.Strategy(dp=8, zero=3)
    assert sum(measure(strategy, "fsdp")) == pytest.approx(16.0 / 8, rel=0.01)
    assert sum(measure(strategy, "fsdp", **IN_BF16)) == pytest.approx(8.0 / 8, rel=0.01)
