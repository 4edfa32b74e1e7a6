"""Kernels of one NVIDIA GPU that no public table has: time them, and compare perfkit with them.

    python -m benchmarks.gpu_survey --measure FILE.jsonl       (on the GPU; needs torch and NumPy)
    python -m benchmarks.gpu_survey --convert FILE.jsonl ... --json reference_data/measured/NAME.survey.json
    python -m benchmarks.gpu_survey --saved reference_data/measured/NAME.survey.json

Sections:

accumulation   the gradient of a weight, added to a buffer inside of the product or afterwards
fp8            products with one scale a matrix, a row, or a block; and the casts that they need
attention      scaled_dot_product_attention by backend, length, width of a head, forward and backward
grouped        products of experts with 1 to 512 rows each, in one kernel or one by one
rowwise        softmax, layer norm and RMS norm by width, forward and backward
batched        batched products as attention without a fused kernel has them
adagrad        updates of single rows: row-wise Adagrad in PyTorch's operations and in one kernel

`benchmarks.helpers.gpu_survey_points` has the kernels, `benchmarks.helpers.gpu_survey_tables` what is made of their
times.
"""

from pathlib import Path
from typing import Any

from benchmarks.helpers.command import OUT, SAVED, command

SECTIONS = ("accumulation", "fp8", "attention", "grouped", "rowwise", "batched", "adagrad")


@command(
    {
        "--measure": {"type": Path, "metavar": "FILE.jsonl", "help": "time kernels into this file"},
        "--sections": {
            "nargs": "+",
            "default": [f"{name}=60" for name in SECTIONS],
            "metavar": "NAME=SECONDS",
            "help": "what to time, and how long at most",
        },
        "--convert": {
            "type": Path,
            "nargs": "+",
            "metavar": "FILE.jsonl",
            "help": "passes of one machine to join, each of its own process",
        },
        **OUT,
        **SAVED,
    }
)
def main(given: Any) -> None:
    """Kernels of one GPU that no public table has."""
    if given.measure:
        from benchmarks.helpers.gpu_survey_points import measure  # it needs torch

        pairs = (word.partition("=") for word in given.sections)
        return measure(given.measure, {name: float(seconds) for name, _, seconds in pairs})
    from benchmarks.helpers import (
        gpu_survey_tables as tables,  # it needs what a GPU machine may lack
    )

    if given.convert:
        if not given.json:
            raise ValueError("json is missing; name the file for the joined passes in --json")
        tables.write_survey(tables.join_survey(given.convert), given.json)
    elif given.saved:
        tables.print_tables(tables.read_survey(given.saved[0]))
    else:
        raise ValueError("nothing is asked for; give --measure, --convert or --saved")
