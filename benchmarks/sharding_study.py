"""A measured study: are placements that are predicted to be fast really fast, and is a rule of
thumb as good?

    python -m benchmarks.sharding_study [--platform P.toml] [--seed S] [--quick] [--json OUT] python
    -m benchmarks.sharding_study --saved reference_data/measured/zen5-2.sharding-0.json [--platform
    P.toml]

The first command measures 12 random models under 8 placements each, on two ranks of this machine,
in about ten minutes; after an interruption the same command continues. The second shows saved
measurements with today's predictions.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.helpers.command import OUT, SAVED, command
from benchmarks.helpers.saved_runs import predict_again
from benchmarks.helpers.tables import MET
from perfkit.calibration.study import Trials, measure_trials
from perfkit.ground.targets import check_target
from perfkit.ground.units import format_table
from perfkit.platform.gallery import load_platform

#: Mean regret of the placement that is predicted to be best: the bar and the aim [-].
_BAR, _STRETCH = 0.05, 0.025
_MODELS = 10


def format_bars(totals: Mapping[str, Any]) -> str:
    """The bars of the study as text."""
    regrets = totals["regret"]
    rule = totals["best_baseline"]
    regret = regrets["predicted"]
    excess = totals["excess"]
    floor = totals["floor"]
    count = totals["models"]
    meets_regret = MET[regret <= _BAR]
    meets_excess = MET[excess <= floor]
    return format_table(
        [
            ("quantity", "found", "bar", "stretch", "met"),
            ("mean regret", f"{regret:.1%}", f"{_BAR:.1%}", f"{_STRETCH:.1%}", meets_regret),
            (
                f"beyond {rule}, at {regrets[rule]:.1%}",
                f"{excess:+.1%}",
                f"{floor:.1%}, the floor",
                "",
                meets_excess,
            ),
            ("models", f"{count}", f"{_MODELS}", "", MET[count >= _MODELS]),
        ]
    )


@command(
    {
        "--platform": {
            "default": "zen5-2",
            "metavar": "P.toml",
            "help": "calibration of this machine",
        },
        "--seed": {
            "type": int,
            "default": 0,
            "metavar": "S",
            "help": "seed of models and random placements",
        },
        "--quick": {"action": "store_true", "help": "two models and a third of the time"},
        **SAVED,
        **OUT,
    }
)
def main(given: Any) -> None:
    """Placements predicted and measured."""
    if given.json is not None:
        check_target("json", given.json)
    if given.saved is not None:
        trials = predict_again(Trials.load(*given.saved), load_platform(given.platform))
    else:
        trials = measure_trials(given.platform, seed=given.seed, quick=given.quick)
    if given.json is not None:
        trials.save(given.json)
    print(f"{trials.as_text()}\n\n{format_bars(trials.totals())}")
