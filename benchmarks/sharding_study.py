"""The measured study: do placements that are predicted to be fast turn out to be, and which rule of thumb is as good?

    python -m benchmarks.sharding_study [--platform P.toml] [--seed S] [--quick] [--json OUT]
    python -m benchmarks.sharding_study --saved reference_data/measured/zen5-2.sharding-0.json [--platform P.toml]

The first measures 12 drawn models under 8 placements each, with two ranks on this machine, in about ten minutes; after
an interruption the same command goes on. The second prints what was measured before, with today's predictions.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfkit.__main__ import run_command
from perfkit.calibration.study import Trials, measure_trials
from perfkit.ground.results import check_target
from perfkit.ground.units import format_table
from perfkit.platform.gallery import load_platform

#: Mean regret of what is predicted to be best: what it must not exceed, and what is aimed at.
_BAR, _STRETCH = 0.05, 0.025
_MODELS = 10


def format_bars(totals: Mapping[str, Any]) -> str:
    """The bars of the study as text."""
    best, floor, excess, count = (totals[name] for name in ("best_baseline", "floor", "excess", "models"))
    found, other = totals["regret"]["predicted"], totals["regret"][best]
    return format_table([
        ("quantity", "found", "bar", "stretch", "met"),
        ("mean regret", f"{found:.1%}", f"{_BAR:.1%}", f"{_STRETCH:.1%}", "yes" if found <= _BAR else "NO"),
        (f"beyond {best}, at {other:.1%}", f"{excess:+.1%}", f"{floor:.1%}, the floor", "",
         "yes" if excess <= floor else "NO"),
        ("models", f"{count}", f"{_MODELS}", "", "yes" if count >= _MODELS else "NO"),
    ])  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Measure or read the study and print its tables; returns 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.sharding_study", description="Placements predicted and measured.")
    parser.add_argument("--platform", default="zen5-2", metavar="P.toml", help="calibration of this machine")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of models and random placements")
    parser.add_argument("--quick", action="store_true", help="two models and a third of the time")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="what was measured before")
    parser.add_argument("--json", type=Path, metavar="OUT", help="where to write what was measured")
    arguments = parser.parse_args(words)

    def run() -> int:
        if arguments.json is not None:
            check_target("json", arguments.json)
        if arguments.saved is not None:
            trials = Trials.load(arguments.saved).predict_again(load_platform(arguments.platform))
        else:
            trials = measure_trials(arguments.platform, seed=arguments.seed, quick=arguments.quick)
        if arguments.json is not None:
            trials.save(arguments.json)
        print(f"{trials.as_text()}\n\n{format_bars(trials.totals())}")
        return 0

    return run_command(run, name="benchmarks.sharding_study")


if __name__ == "__main__":
    sys.exit(main())
