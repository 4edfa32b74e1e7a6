"""Fused attention alone on an H100, as its authors timed it; nothing of it was fitted.

    python -m benchmarks.gpu_attention

arXiv:2407.08608 (FlashAttention-3), figures 5 and 6: rates of 16,384 tokens in sequences of 512 to
16,384, heads of 64, 128 and 256 numbers in fp16, forward with and without a causal mask, and
backward. perfkit's fits of these kernels are from an H200 (`benchmarks.gpu_survey`), with a newer
cuDNN; FlashAttention-3 is priced as cuDNN's kernel.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.errors import judge, widen
from benchmarks.helpers.files import read_published
from benchmarks.helpers.tables import Row, lay_out
from perfkit.models.roofline import ATTENTION_BACKWARD, attention_bytes, attention_flops
from perfkit.platform.estimates import keep_quiet

_KERNELS = {"FlashAttention-2": "flash2", "cuDNN": "flash3", "FlashAttention-3": "flash3"}
_COLUMNS = {
    "kernel": "{kernel}",
    "pass": "{phase}",
    "n": "{n:.0f}",
    "measured TFLOP/s, 512 to 16,384 tokens, heads of 128": "{measured}",
    "predicted": "{predicted}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "bias": "{bias:+.1f}",
    "inside 80 %": "{inside:.0f}",
}


def predict_row(row: Row) -> dict[str, Any]:
    """The time of a row beside its published rate [FLOP/s]."""
    platform = pk.load_platform(row["platform"])
    batch, heads, tokens, width = (int(row[name]) for name in ("batch", "heads", "tokens", "width"))
    is_causal = row["causal"] == "yes"
    is_backward = row["phase"] == "backward"
    flops = attention_flops(batch, heads, tokens, width, causal=is_causal)
    nbytes = attention_bytes(batch, heads, tokens, width, kv_heads=heads, itemsize=2)
    if is_backward:
        flops *= ATTENTION_BACKWARD
        nbytes *= 2.0
    features = {
        "flops": float(flops),
        "nbytes": float(nbytes),
        "batch": float(batch * heads),
        "m": float(tokens),
        "n": float(tokens),
        "k": float(width),
    }
    mask = "_causal" if is_causal else ""
    key = f"attention.{row['phase']}{mask}.{_KERNELS[row['kernel']]}"
    with keep_quiet():
        time = float(platform.kernel_time(key, features, dtype="fp16"))
    spread = platform.kernels[key].spread
    rate = float(row["tflops"]) * 1e12
    return {**widen(time, spread, float(flops) / rate), "rate": float(flops) / time / 1e12}


def _list_rates(rows: Sequence[Row], name: str) -> str:
    """Smallest and largest rate with heads of 128 and without a mask [TFLOP/s]."""
    rates = [float(row[name]) for row in rows if int(row["width"]) == 128 and row["causal"] == "no"]
    return f"{np.min(rates):.0f} to {np.max(rates):.0f}"


def judge_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors by kernel and pass."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["kernel"], row["phase"]].append({**row, **predict_row(row)})
    figures = []
    for (kernel, phase), group in sorted(groups.items()):
        figures.append(
            {
                "kernel": kernel,
                "phase": phase,
                "n": len(group),
                "measured": _list_rates(group, "tflops"),
                "predicted": _list_rates(group, "rate"),
                **judge(group),
            }
        )
    return figures


@command({})
def main(given: Any) -> None:
    """Fused attention on an H100, predicted and published."""
    print(lay_out(judge_rows(read_published("attention_rates.csv")), _COLUMNS))
