"""Training steps on one NVIDIA GPU, first predicted, then measured: models of transformers and the
DLRM.

    python -m benchmarks.gpu_steps --platform h100-sxm-8 --set third --predictions FILE   (anywhere)
    python -m benchmarks.gpu_steps --predictions FILE --measure FOLDER                   (on the GPU)
    python -m benchmarks.gpu_steps --predictions FILE --measured FILE ... [--json OUT]
    python -m benchmarks.gpu_steps --saved FILE

Predictions need no GPU. To measure takes torch, transformers and NumPy; the packages that predictions
load (polars, msgspec, altair) may be missing there. Steps of one's own come from a file instead of a
set: --steps FILE.json, a list such as

    [{"model": "bert", "sizes": {"batch": 8, "sequence": 128}, "amp": "bf16", "execution": "graphs"}]
"""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from benchmarks.captures import make_step
from benchmarks.helpers.command import OUT, SAVED, command
from benchmarks.helpers.errors import join_passes
from perfkit.calibration.checks import Comparison, state_prediction
from perfkit.ground.files import find_reference
from perfkit.ground.targets import write_text
from perfkit.ground.units import check_choice
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.records import write_record
from perfkit.measure.timing import clock, summarize_samples
from perfkit.platform.estimates import keep_quiet

#: How a step may run.
EXECUTIONS = ("eager", "compiled", "graphs")


class Step(NamedTuple):
    """A model of `benchmarks.captures`, its changed sizes, the format of autocast, and the
    execution."""

    model: str
    sizes: dict[str, int]
    amp: str = ""
    execution: str = "eager"

    @property
    def name(self) -> str:
        """Short and unique."""
        sizes = "-".join(f"{key[0]}{size}" for key, size in self.sizes.items())
        return "-".join(filter(None, (self.model, sizes, self.amp or "fp32", self.execution)))


#: Sets of steps by name: the committed run that has them. The second set was predicted and measured
#: after the first one had been seen, the third after both.
SETS = {
    "first": "h100-1.check-1.json",
    "second": "h100-1.check-2.json",
    "third": "h200-2.check-1.json",
}


def list_steps(name: str = "first") -> list[Step]:
    """The steps of a committed set, see `SETS`."""
    file = SETS[check_choice("set", name, SETS)]
    runs = Comparison.load(find_reference("measured", file)).runs
    return [Step(**run["config"]) for run in runs]


def read_steps(path: Path) -> list[Step]:
    """Steps of a JSON file: a list of objects with the fields of `Step`."""
    try:
        return [Step(**fields) for fields in json.loads(path.read_text())]
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"steps is {str(path)!r}, which is no list of steps: {error}; each needs model and sizes, and may "
            "have amp and execution"
        ) from None


#: Families of models that are no Transformers.
_FAMILIES = {"dlrm": "dlrm", "resnet": "convolution"}


def _capture(step: Step) -> "pk.Graph":
    """The graph of a step."""
    make = partial(
        make_step,
        step.model,
        step.sizes,
        device="cuda",
        amp=step.amp,
        execution=step.execution,
    )
    family = _FAMILIES.get(step.model, "transformer")
    return pk.capture(make, device="cuda", name=step.name, family=family)


def predict_steps(platform: "pk.Platform", steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Predict steps on a platform: times with their interval [s], and memory [B]."""
    rows = []
    for step in steps:
        execution = "graphs" if step.execution == "graphs" else None
        with keep_quiet():
            graph = _capture(step)
            prediction = pk.predict(graph, platform, execution=execution)
        rows.append(
            {
                "family": step.model,
                "name": step.name,
                "config": step._asdict(),
                "ranks": 1,
                **state_prediction(prediction),
                "device_s": prediction.device_time,
                "execution": prediction.execution,
                "operations": len(graph),
                "predicted_peak": prediction.memory().total,
            }
        )
        milliseconds = 1e3 * prediction.time
        print(f"{step.name:<60} {milliseconds:8.2f} ms  {prediction.bottleneck}", flush=True)
    return rows


def time_step(step: Step, folder: Path | None) -> dict[str, Any]:
    """Time a step in a row and one by one [s], with its memory [B]; a trace of four steps goes into
    a folder."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, numbers, aside = torch.cuda.memory_allocated(), count(), torch.cuda.Stream()
    train: Any = make_step(
        step.model, step.sizes, device="cuda", amp=step.amp, execution=step.execution
    )
    with torch.cuda.stream(aside):
        for _ in range(4):
            train()
    torch.cuda.synchronize()
    if step.execution == "graphs":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=aside):
            train()
        train = graph.replay
    once = min(clock([train], "cuda") for _ in range(2))
    peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_reserved()
    each = int(np.clip(0.2 / once, 4, 40))
    blocks = [clock([train] * each, "cuda") / each for _ in range(8)]
    spaced = [clock([train], "cuda") for _ in range(2 * each)]
    result = {
        "name": step.name,
        "in_a_row": write_record(summarize_samples(blocks)),
        "one_by_one": write_record(summarize_samples(spaced)),
        "peak": peak,
        "reserved": reserved,
    }
    if folder is None:
        return result

    def mark() -> None:
        with record_function(f"ProfilerStep#{next(numbers)}"):
            train()

    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True
    ) as found:
        profiled = clock([mark] * 4, "cuda") / 4
    folder.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(folder / f"{step.name}.json.gz"))
    return {**result, "profiled": profiled}


def measure_steps(
    out: Path, steps: Sequence[Step], *, passes: int = 2, traced: Sequence[str] = EXECUTIONS
) -> None:
    """Time these steps; each is written when it is finished, or with the reason if it failed.

    Parameters
    ----------
    out : Path
        Folder for ``steps.json`` and traces.
    steps : sequence of Step
        What to time.
    passes : int, optional
        How often all steps are timed, one after another; compiled ones only once [-].
    traced : sequence of str
        Executions whose steps are traced, in the first pass.
    """
    import torch

    out.mkdir(parents=True, exist_ok=True)
    device, rows = torch.cuda.get_device_properties(0), list[dict[str, Any]]()
    facts = {"device": device.name, "memory": device.total_memory, "cache": device.L2_cache_size}
    facts |= {
        "machine": describe_machine(),
        "versions": {**list_versions(), "cuda": torch.version.cuda},
    }
    for number in range(passes):
        for step in steps:
            if number and step.execution == "compiled":
                continue
            is_traced = number == 0 and step.execution in traced
            folder = out / "traces" if is_traced else None
            try:
                rows.append({"pass": number, **time_step(step, folder)})
                print(f"{step.name:<60} {1e3 * rows[-1]['in_a_row']['median']:8.2f} ms", flush=True)
            except (RuntimeError, ValueError, AttributeError, TypeError) as error:
                rows.append(
                    {
                        "pass": number,
                        "name": step.name,
                        "failed": f"{type(error).__name__} {error}"[:300],
                    }
                )
                print(step.name, rows[-1]["failed"], flush=True)
            write_text(out / "steps.json", json.dumps({**facts, "rows": rows}, indent=1))


def _list_timed(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Steps of all files that did not fail."""
    rows = list[dict[str, Any]]()
    for file in measured:
        rows += [row for row in file["rows"] if "failed" not in row]
    return rows


def join_runs(predicted: dict[str, Any], *measured: dict[str, Any]) -> Comparison:
    """Join predictions and measurements of iterations in a row, the mean of all passes.

    Measurements of several processes on one machine are passes, too.
    """
    rows = _list_timed(measured)
    runs = []
    for row in predicted["rows"]:
        timed = [other for other in rows if other["name"] == row["name"]]
        if not timed:
            continue
        apart = [other["one_by_one"]["median"] for other in timed]
        runs.append(
            {
                **row,
                **join_passes([other["in_a_row"] for other in timed]),
                "one_by_one_s": float(np.mean(apart)),
                "peak": timed[0]["peak"],
                "reserved": timed[0]["reserved"],
            }
        )
    first = measured[0]
    machine = {**first["machine"], "device": first["device"], "predicted": predicted["date"]}
    return Comparison(tuple(runs), predicted["platform"], machine, first["versions"])


def format_executions(comparison: Comparison) -> str:
    """Errors by execution [%]."""
    lines = []
    for execution in EXECUTIONS:
        runs = [run for run in comparison.runs if run["config"]["execution"] == execution]
        if not runs:
            continue
        part = replace(comparison, runs=tuple(runs))
        mean = 100 * np.mean(np.abs(part.errors))
        bias = 100 * np.mean(part.errors)
        inside = 100 * part.coverage()
        lines.append(
            f"{execution}: {len(runs)} runs, mean {mean:.1f} %, bias {bias:+.1f} %, {inside:.0f} % inside"
        )
    return "\n".join(lines)


def _print_saved(comparison: Comparison) -> None:
    """Errors of saved steps: times by family and execution, and peaks of memory."""
    print(comparison.summary_as_text())
    print(format_executions(comparison))
    peaks = [run["predicted_peak"] / run["peak"] - 1 for run in comparison.runs]
    sizes = np.abs(peaks)
    near = int(np.sum(sizes <= 0.1))
    mean = 100 * np.mean(sizes)
    print(f"peak of allocated memory: {near} of {len(peaks)} within 10 %, mean error {mean:.1f} %")


def _save_predictions(given: Any) -> None:
    """Predict the steps that are asked for, and write what was predicted."""
    platform = pk.load_platform(given.platform)
    steps = read_steps(given.steps) if given.steps else list_steps(given.set)
    predicted = {
        "platform": platform.name,
        "date": date.today().isoformat(),
        "rows": predict_steps(platform, steps),
    }
    write_text(given.predictions, json.dumps(predicted, indent=1) + "\n")


@command(
    {
        "--platform": {"metavar": "P.toml", "help": "platform to predict on"},
        "--set": {"choices": [*SETS], "default": "first", "help": "which steps to predict"},
        "--steps": {"type": Path, "metavar": "FILE.json", "help": "other steps, instead of a set"},
        "--predictions": {"type": Path, "metavar": "FILE", "help": "what was predicted"},
        "--measure": {
            "type": Path,
            "metavar": "FOLDER",
            "help": "time the steps here, into steps.json and traces",
        },
        "--passes": {
            "type": int,
            "default": 2,
            "metavar": "N",
            "help": "how often to time all steps",
        },
        "--traced": {
            "nargs": "*",
            "choices": EXECUTIONS,
            "default": EXECUTIONS,
            "help": "executions whose steps are traced; default: all",
        },
        "--measured": {
            "type": Path,
            "nargs": "+",
            "metavar": "FILE",
            "help": "steps.json of the GPU, one of each process",
        },
        **SAVED,
        **OUT,
    }
)
def main(given: Any) -> None:
    """Training steps on one GPU, predicted beforehand."""
    if given.saved:
        _print_saved(Comparison.load(*given.saved))
        return
    if not given.predictions:
        raise ValueError("predictions is missing; name its file, or give --saved")
    if given.platform:
        _save_predictions(given)
        return
    predicted = json.loads(given.predictions.read_text())
    if given.measure:
        steps = [Step(**row["config"]) for row in predicted["rows"]]
        measure_steps(given.measure, steps, passes=given.passes, traced=given.traced)
        return
    measured = [json.loads(path.read_text()) for path in given.measured]
    comparison = join_runs(predicted, *measured)
    print(comparison.as_text())
    if given.json:
        comparison.save(given.json)
