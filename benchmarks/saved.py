"""Benchmarks that measure nothing: they judge what `calibrate` and `check` have written."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import OUT, make_command, save_rows
from perfkit.calibration.checks import Comparison
from perfkit.ground.units import check_positive

_Rows = Sequence[Mapping[str, Any]]


def judge_saved(
    name: str, text: str, judge: Callable[..., _Rows], show: Callable[[_Rows], str], *, draws: int
) -> Callable[..., int]:
    """Make the command line of `judge(measurements, comparison, draws=)`, whose rows `show` tells."""

    def run(given: Any) -> None:
        measurements = json.loads(given.measurements.read_text(encoding="utf-8"))
        if not isinstance(measurements, dict) or not measurements.get("iterations"):
            raise ValueError(f"{str(given.measurements)!r} holds no iterations; name what calibrate has written")
        count = int(check_positive("draws", given.draws, integer=True))
        comparison = Comparison.pool([Comparison.load(file) for file in given.check])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # fits to two iterations leave standard errors open
            rows = judge(measurements, comparison, draws=count)
        print(show(rows))
        save_rows(given.json, rows, measurements=measurements["id"], runs=len(comparison.runs))

    return make_command(name, text, run, {
        "measurements": {"type": Path, "help": "raw measurements that calibrate has written"},
        "--check": {"type": Path, "nargs": "+", "required": True, "metavar": "FILE", "help": "saved runs of check"},
        "--draws": {"type": int, "default": draws, "help": "random subsets of each size"}, **OUT,
    })  # fmt: skip
