"""Captured programs of many kinds, predicted and measured on one core of this machine, relative to a reference.

python -m benchmarks.cpu_truth --platform P.toml [--seed 1] [--models NAME,NAME] [--json OUT]
python -m benchmarks.cpu_truth --saved FILE

34 models, rebuilt from their names (`benchmarks/helpers/cpu_models.py`, with their sizes), and ten that a seed
draws from kinds of transformers. Each runs in a process of its own, pinned to a core, with one thread; its turns
alternate with those of a small BERT and a small GPT-2, which calibrations know. Times are CPU times. A model's
error is that of its time over that of the references, so a machine that became slower since its calibration makes
none. Nothing was fitted to these models. Those whose package is absent are named and left out.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

import perfkit as pk
from benchmarks.helpers.command import OUT, PLATFORM, SAVED, command
from benchmarks.helpers.cpu_models import NAMED, TruthModel, draw_models
from perfkit.calibration.checks import Comparison, state_prediction
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.processes import run_processes

#: Turns of each step.
_ROUNDS = 8
#: Iterations of a turn last at least this long [s].
_TURN = 0.06


def _list_references() -> list[pk.Transformer]:
    """The steps beside which all others are measured."""
    return [
        pk.Transformer.bert(batch=4, sequence=64, layers=2, hidden=256, heads=4, vocabulary=2000),
        pk.Transformer.gpt2(batch=4, sequence=96, layers=2, hidden=192, heads=3, vocabulary=2000),
    ]


def _list_models(seed: int | None) -> list[TruthModel]:
    """The named models, and with a seed those that it draws."""
    return [*NAMED, *([] if seed is None else draw_models(seed))]


def _find_model(name: str, seed: int | None) -> TruthModel:
    """The model of a name."""
    for model in _list_models(seed):
        if model.name == name:
            return model
    raise ValueError(f"model is {name!r}; it must be one that cpu_truth lists")


def _clock_turn(step: Callable[[], Any], iterations: int) -> float:
    """CPU time of one iteration, after one that fills the caches [s]."""
    step()
    begin = time.process_time()
    for _ in range(iterations):
        step()
    return (time.process_time() - begin) / iterations


def time_model(*, name: str, seed: int | None) -> dict[str, Any]:
    """Task of a measuring process: time the step of a model in turns with the references.

    Parameters
    ----------
    name : str
        The model.
    seed : int or None
        Seed of the drawn ones.

    Returns
    -------
    times : dict
        ``model``: CPU time of an iteration in each turn, ``references``: those of each reference [s].
    """
    import torch

    from perfkit.recording.modules import build_step

    torch.manual_seed(0)
    step = _find_model(name, seed).make_step()
    steps = [step, *(build_step(reference, seed=0)[0] for reference in _list_references())]
    iterations = []
    for one in steps:
        one()
        iterations.append(max(1, round(_TURN / max(_clock_turn(one, 1), 1e-4))))
    turns: list[list[float]] = [[] for _ in steps]
    for _ in range(_ROUNDS):
        for number, one in enumerate(steps):
            turns[number].append(_clock_turn(one, iterations[number]))
    return {"model": turns[0], "references": turns[1:]}


def _predict_references(platform: pk.Platform) -> list[float]:
    return [pk.predict(reference, platform).time for reference in _list_references()]


def _relate(
    times: dict[str, Any], of_references: Sequence[float], expected: Sequence[float]
) -> float:
    """Time of a model at the pace at which the references take what is expected of them [s]."""
    slower = np.log(of_references) - np.log(expected)
    return float(np.median(times["model"]) / np.exp(slower.mean()))


def _compare(
    model: TruthModel, passes: Sequence[dict[str, Any]], platform: pk.Platform
) -> dict[str, Any]:
    """Predict a model, and set its measured passes beside [s]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = pk.capture(model.make_step, name=model.name)
        prediction = pk.predict(graph, platform)
        expected = _predict_references(platform)
    raw, related = [], []
    for times in passes:
        raw.append(float(np.median(times["model"])))
        of_references = [float(np.median(one)) for one in times["references"]]
        related.append(_relate(times, of_references, expected))
    everything = [time for times in passes for time in times["model"]]
    q1, q3 = np.percentile(everything, [25, 75]).tolist()
    return {
        "family": model.family,
        "name": model.name,
        "config": {},
        "ranks": 1,
        **state_prediction(prediction),
        "measured_s": float(np.mean(raw)),
        "measured_q1_s": q1,
        "measured_q3_s": q3,
        "flagged": False,
        "passes_s": raw,
        "noise": max(raw) / min(raw) - 1,
        "relative_s": float(np.mean(related)),
        "relative_noise": max(related) / min(related) - 1,
    }


def measure_models(models: Sequence[TruthModel], seed: int | None) -> dict[str, list[Any]]:
    """Time all models in two passes, each model in a process of its own; by name."""
    job = {"task": "benchmarks.cpu_truth:time_model", "seed": seed}
    passes: dict[str, list[Any]] = {model.name: [] for model in models}
    for _ in range(2):
        for model in models:
            [times] = run_processes({**job, "name": model.name})
            passes[model.name].append(times)
    return passes


def judge_models(
    models: Sequence[TruthModel], passes: dict[str, list[Any]], platform: Any
) -> Comparison:
    """Predict all models, beside what was measured of them."""
    here = pk.load_platform(platform)
    rows = [_compare(model, passes[model.name], here) for model in models]
    return Comparison(tuple(rows), here.name, describe_machine(), list_versions())


def _print(comparison: Comparison) -> None:
    """Print each model, and the errors of each family, relative to the references."""
    print("Relative to the references:")
    print(comparison.at_usual_pace().as_text())
    print("As measured:")
    print(comparison.summary_as_text())


@command(
    {
        **PLATFORM,
        **OUT,
        **SAVED,
        "--seed": {"type": int, "help": "seed of ten drawn models; none are drawn without it"},
        "--models": {"help": "only these models, names with commas between"},
    }
)
def main(given: Any) -> None:
    """Accuracy on captured programs of many kinds, relative to a BERT and a GPT-2."""
    if given.saved:
        _print(Comparison.load(*given.saved))
        return
    models = []
    wanted = None if given.models is None else given.models.split(",")
    for model in _list_models(given.seed):
        if wanted is not None and model.name not in wanted:
            continue
        if model.needs and find_spec(model.needs) is None:
            print(f"{model.name} is left out: it needs the package {model.needs}")
            continue
        models.append(model)
    comparison = judge_models(models, measure_models(models, given.seed), given.platform)
    _print(comparison)
    if given.json:
        comparison.save(given.json)
