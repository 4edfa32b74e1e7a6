"""Models of families without calibration: captured, predicted and measured on this machine, six
sizes of each.

python -m benchmarks.foreign --platform P.toml [--seed 0] [--json OUT]
python -m benchmarks.foreign --saved FILE

Each configuration is timed in two processes, the second time after all others. Needs transformers.
"""

import warnings
from functools import partial
from typing import Any

import numpy as np

import perfkit as pk
from benchmarks.captures import make_step
from benchmarks.helpers.command import OUT, PLATFORM, SAVED, command
from benchmarks.helpers.errors import join_passes
from perfkit.calibration.checks import Comparison, state_prediction
from perfkit.calibration.pace import relate_run
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.processes import run_processes
from perfkit.measure.records import read_measured_ranks, write_record

_WORDS = (1e3, 1.4e4)
#: Ranges of layers (tables of a DLRM), heads of 64 (its width over 16), tokens, pixels or lookups,
#: batch, and words.
_RANGES = {
    **dict.fromkeys(("gpt2", "bert", "llama"), ((2, 6), (2, 8), (32, 256), (2, 12), _WORDS)),
    **dict.fromkeys(("t5", "xlnet"), ((2, 4), (2, 7), (32, 160), (2, 8), _WORDS)),
    "vit": ((2, 6), (2, 8), (64, 160), (2, 12), (10, 1e3)),
    "dlrm": ((4, 16), (1, 8), (1, 32), (64, 1024), (1e3, 3e5)),
}


def draw_sizes(seed: int, count: int = 6) -> list[tuple[str, dict[str, int]]]:
    """Models and sizes, which fill each range evenly on a logarithmic scale."""
    rng, drawn = np.random.default_rng([7, seed]), []
    for name, ranges in _RANGES.items():
        spread = [
            low * (high / low) ** ((rng.permutation(count) + rng.random(count)) / count)
            for low, high in ranges
        ]
        for layers, heads, length, batch, words in np.array(spread).T.tolist():
            width, sequence = (
                (16, int(length)) if name == "dlrm" else (64, max(16, int(length) // 16 * 16))
            )
            sizes = {"layers": round(layers), "hidden": width * round(heads), "heads": round(heads)}
            drawn.append(
                (
                    name,
                    sizes | {"sequence": sequence, "batch": int(batch), "vocabulary": int(words)},
                )
            )
    return drawn


def time_model(*, name: str, sizes: dict[str, int], seconds: float) -> dict[str, Any]:
    """Task of a measuring process: time the step."""
    from perfkit.measure.iterations import time_step

    return write_record(time_step(make_step(name, sizes), seconds=seconds))


def judge_models(platform: Any, seed: int, seconds: float = 0.8) -> Comparison:
    """Predict and measure all configurations."""
    where, drawn, rows = pk.load_platform(platform), draw_sizes(seed), []
    task = {"task": "benchmarks.foreign:time_model", "seconds": seconds}
    passes = [
        [run_processes({**task, "name": name, "sizes": sizes}) for name, sizes in drawn]
        for _ in range(2)
    ]
    for (name, sizes), *results in zip(drawn, *passes, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = pk.predict(pk.capture(partial(make_step, name, sizes), name=name), where)
        related = [
            relate_run(read_measured_ranks(result, name), name, where.context.paces)
            for result in results
        ]
        usual = [run.ranks[0].median for run in related]
        rows.append(
            {
                "family": name,
                "name": name + "-" + "-".join(map(str, sizes.values())),
                "config": sizes,
                "ranks": 1,
                **state_prediction(found),
                **join_passes([result[0] for result in results]),
                "relative_s": float(np.mean(usual)),
                "relative_noise": max(usual) / min(usual) - 1,
            }
        )
    return Comparison(tuple(rows), where.name, describe_machine(), list_versions())


@command(
    {
        **PLATFORM,
        **OUT,
        **SAVED,
        "--seed": {"type": int, "default": 0, "help": "seed of the sizes"},
    }
)
def main(given: Any) -> None:
    """Accuracy on models that calibration does not know."""
    if given.saved:
        saved = Comparison.load(*given.saved)
        print(saved.summary_as_text(), "at the usual pace of the machine", sep="\n")
        print(saved.at_usual_pace().summary_as_text())
        return
    comparison = judge_models(given.platform, given.seed)
    print(comparison.as_text())
    if given.json:
        comparison.save(given.json)
