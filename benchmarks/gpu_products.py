"""Large matrix products on GPUs of the gallery, timed by others; nothing of them was fitted.

    python -m benchmarks.gpu_products

zzc0721/torch-performance-test-data: the highest rate of five squares of 1024 to 10240 a side, 30
products of random numbers in a row. The best of five is a little faster than the usual product,
which a model of the usual cannot be.
"""

from typing import Any

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.errors import judge, widen
from benchmarks.helpers.files import read_published
from benchmarks.helpers.tables import lay_out
from perfkit.platform.estimates import keep_quiet

_SIDES = (1024, 2048, 4096, 8192, 10240)
_COLUMNS = {
    "platform": "{platform}",
    "format": "{dtype}",
    "measured TFLOP/s": "{tflops:.0f}",
    "predicted": "{rate:.0f}",
    "error of the time": "{error:+.0%}",
}


def predict_best(platform: pk.Platform, dtype: str, rate: float) -> dict[str, float]:
    """The fastest of the squares beside the published rate [FLOP/s]."""
    best_rate = 0.0
    for side in _SIDES:
        product = platform.gemm(side, side, side, dtype=dtype)
        flops = 2 * side**3
        if flops / product.time > best_rate:
            best_rate = flops / product.time
            stated = widen(product.time, product.spread, flops / rate)
    return {**stated, "rate": best_rate / 1e12}


_FIGURES = {
    "n": "{n:.0f}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "bias": "{bias:+.1f}",
    "inside 80 %": "{inside:.0f}",
}


@command({})
def main(given: Any) -> None:
    """Largest rates of matrix products on GPUs, predicted and published."""
    rows = read_published("products.csv")
    with keep_quiet():
        for row in rows:
            platform = pk.load_platform(row["platform"])
            row |= predict_best(platform, row["dtype"], row["tflops"] * 1e12)
    print(lay_out(rows, _COLUMNS), end="\n\n")
    print(lay_out([{"n": len(rows), **judge(rows)}], _FIGURES))
