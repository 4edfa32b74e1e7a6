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


@command({})
def main(given: Any) -> None:
    """Largest rates of matrix products on GPUs, predicted and published."""
    rows = read_published("products.csv")
    with keep_quiet():
        for row in rows:
            platform = pk.load_platform(row["platform"])
            found = [platform.gemm(side, side, side, dtype=row["dtype"]) for side in _SIDES]
            rates = [2 * side**3 / one.time for side, one in zip(_SIDES, found, strict=True)]
            best = max(range(len(rates)), key=rates.__getitem__)
            row |= widen(
                found[best].time, found[best].spread, 2 * _SIDES[best] ** 3 / row["tflops"] / 1e12
            )
            row["rate"] = rates[best] / 1e12
    print(lay_out(rows, _COLUMNS), end="\n\n")
    print(
        lay_out(
            [{"n": len(rows), **judge(rows)}],
            {
                "n": "{n:.0f}",
                "geomean": "{geomean:.1f}",
                "mean": "{mean:.1f}",
                "p95": "{p95:.1f}",
                "bias": "{bias:+.1f}",
                "inside 80 %": "{inside:.0f}",
            },
        )
    )
