"""Benchmarks that measure nothing: they judge what `calibrate` and `check` have written."""

import argparse
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import save_rows
from perfkit.__main__ import run_command
from perfkit.calibration.checks import Comparison
from perfkit.ground.units import check_positive

_Rows = Sequence[Mapping[str, Any]]


def judge_saved(
    name: str,
    description: str,
    judge: Callable[..., Sequence[Mapping[str, Any]]],
    show: Callable[[_Rows], str],
    *,
    draws: int,
    words: Sequence[str] | None,
) -> int:
    """Run the command line of `judge(measurements, comparison, draws=)`, whose rows `show` tells; the exit code."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("measurements", type=Path, help="raw measurements that calibrate has written")
    parser.add_argument("--check", type=Path, nargs="+", required=True, metavar="FILE", help="saved runs of check")
    parser.add_argument("--draws", type=int, default=draws, help="random subsets of each size")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for the rows")
    arguments = parser.parse_args(words)

    def run() -> int:
        measurements = json.loads(arguments.measurements.read_text(encoding="utf-8"))
        if not isinstance(measurements, dict) or not measurements.get("iterations"):
            raise ValueError(
                f"{str(arguments.measurements)!r} holds no calibration iterations; name what calibrate has written"
            )
        count = int(check_positive("draws", arguments.draws, integer=True))
        comparison = Comparison.pool([Comparison.load(file) for file in arguments.check])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # fits to two iterations leave standard errors open
            rows = judge(measurements, comparison, draws=count)
        print(show(rows))
        save_rows(arguments.json, rows, measurements=measurements["id"], runs=len(comparison.runs))
        return 0

    return run_command(run, name=name)
