"""Models of families without calibration: captured, predicted and measured on this machine, six
sizes of each.

python -m benchmarks.foreign --platform P.toml [--seed 0] [--json OUT]
python -m benchmarks.foreign --saved FILE

Each configuration is timed in two processes, the second time after all others. Needs transformers.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

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


class Ranges(NamedTuple):
    """Smallest and largest layers (tables of a DLRM), heads of 64 (its width over 16), tokens, pixels
    or lookups, batch, and words [-]."""

    layers: tuple[float, float]
    heads: tuple[float, float]
    length: tuple[float, float]
    batch: tuple[float, float]
    words: tuple[float, float] = (1e3, 1.4e4)


_LIGHT = Ranges((2, 6), (2, 8), (32, 256), (2, 12))
_HEAVY = Ranges((2, 4), (2, 7), (32, 160), (2, 8))
_RANGES = {
    "gpt2": _LIGHT,
    "bert": _LIGHT,
    "llama": _LIGHT,
    "t5": _HEAVY,
    "xlnet": _HEAVY,
    "vit": Ranges((2, 6), (2, 8), (64, 160), (2, 12), (10, 1e3)),
    "dlrm": Ranges((4, 16), (1, 8), (1, 32), (64, 1024), (1e3, 3e5)),
}


def _round_sizes(name: str, drawn: Sequence[float]) -> dict[str, int]:
    """Sizes of `benchmarks.captures.build` from drawn numbers."""
    layers, heads, length, batch, words = drawn
    width, sequence = 64, max(16, int(length) // 16 * 16)
    if name == "dlrm":
        width, sequence = 16, int(length)
    return {
        "layers": round(layers),
        "hidden": width * round(heads),
        "heads": round(heads),
        "sequence": sequence,
        "batch": int(batch),
        "vocabulary": int(words),
    }


def draw_sizes(seed: int, count: int = 6) -> list[tuple[str, dict[str, int]]]:
    """Models and sizes, which fill each range evenly on a logarithmic scale."""
    rng = np.random.default_rng([7, seed])
    drawn = list[tuple[str, dict[str, int]]]()
    for name, ranges in _RANGES.items():
        columns = []
        for low, high in ranges:
            positions = (rng.permutation(count) + rng.random(count)) / count
            columns.append(low * (high / low) ** positions)
        for row in np.array(columns).T.tolist():
            drawn.append((name, _round_sizes(name, row)))
    return drawn


def time_model(*, name: str, sizes: dict[str, int], seconds: float) -> dict[str, Any]:
    """Task of a measuring process: time the step."""
    from perfkit.measure.iterations import time_step

    return write_record(time_step(make_step(name, sizes), seconds=seconds))


def _compare(
    name: str, sizes: dict[str, int], results: Sequence[Any], platform: pk.Platform
) -> dict[str, Any]:
    """Predict a model, and set its measured passes beside [s]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = pk.capture(partial(make_step, name, sizes), name=name)
        prediction = pk.predict(graph, platform)
    usual = []
    for result in results:
        run = relate_run(read_measured_ranks(result, name), name, platform.context.paces)
        usual.append(run.ranks[0].median)
    return {
        "family": name,
        "name": name + "-" + "-".join(str(size) for size in sizes.values()),
        "config": sizes,
        "ranks": 1,
        **state_prediction(prediction),
        **join_passes([result[0] for result in results]),
        "relative_s": float(np.mean(usual)),
        "relative_noise": max(usual) / min(usual) - 1,
    }


def judge_models(platform: Any, seed: int, seconds: float = 0.8) -> Comparison:
    """Predict and measure all configurations."""
    here = pk.load_platform(platform)
    drawn = draw_sizes(seed)
    task = {"task": "benchmarks.foreign:time_model", "seconds": seconds}

    def measure() -> list[Any]:
        """One pass over all models, each in a process of its own."""
        return [run_processes({**task, "name": name, "sizes": sizes}) for name, sizes in drawn]

    first = measure()
    second = measure()
    rows = []
    for (name, sizes), *results in zip(drawn, first, second, strict=True):
        rows.append(_compare(name, sizes, results, here))
    return Comparison(tuple(rows), here.name, describe_machine(), list_versions())


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
