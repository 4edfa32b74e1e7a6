"""Training steps on one NVIDIA GPU: predicted, then timed; models of transformers and the DLRM.

python -m benchmarks.gpu_steps --platform h100-sxm-8 --predictions FILE      (anywhere; needs no GPU)
python -m benchmarks.gpu_steps --predictions FILE --measure FOLDER           (on the GPU)
python -m benchmarks.gpu_steps --predictions FILE --measured FILE [--json OUT]
python -m benchmarks.gpu_steps --saved FILE
"""

import gc
import json
from datetime import date
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import perfkit as pk
from benchmarks import OUT, SAVED, command
from benchmarks.captures import make_step
from benchmarks.saved import join_passes
from perfkit.calibration.checks import Comparison, state_prediction
from perfkit.ground.files import write_text
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.timing import clock, summarize_samples
from perfkit.platform.estimates import keep_quiet

#: Sizes by model, as `benchmarks.captures.build` names them; published ones where nothing is said.
_LARGE = {"layers": 24, "hidden": 1024, "heads": 16}


class Step(NamedTuple):
    """A model with sizes that differ from the published ones, the format of autocast, and how it runs."""

    model: str
    sizes: dict[str, int]
    amp: str = ""
    execution: str = "eager"

    @property
    def name(self) -> str:
        """Short and unique."""
        sizes = "-".join(f"{key[0]}{size}" for key, size in self.sizes.items())
        return "-".join(filter(None, (self.model, sizes, self.amp or "fp32", self.execution)))


def list_more() -> list[Step]:
    """Steps of other sizes, predicted and measured after the first ones had been seen."""
    bert, table = {**_LARGE, "batch": 16, "sequence": 256}, {"layers": 16, "hidden": 128, "sequence": 10}
    steps = [Step("bert", {"batch": 64, "sequence": 128}, "bf16"), *(Step("bert", bert, amp) for amp in ("", "bf16"))]
    steps += [Step("gpt2", {"batch": 4}, "bf16"), Step("gpt2", {**_LARGE, "batch": 4, "sequence": 512})]
    steps += [Step("llama", {"layers": 8, "hidden": 2048, "heads": 16, "batch": 4, "sequence": 1024}, "bf16")]
    steps += [Step("vit", {**_LARGE, "batch": 32}, "bf16"), Step("vit", {"batch": 32})]
    steps += [Step("resnet", {"batch": 64}, amp) for amp in ("", "bf16")]
    steps += [Step("dlrm", {**table, "batch": 8192}), Step("dlrm", {"layers": 26, "sequence": 2, "batch": 32768})]
    steps += [Step("t5", {"batch": 16, "sequence": 256}, "bf16"), Step("vit", {"batch": 32}, "bf16", "graphs")]
    compiled = (("bert", {"batch": 64, "sequence": 128}), ("gpt2", {"batch": 4}), ("resnet", {"batch": 64}))
    return steps + [Step(model, size, "bf16", "compiled") for model, size in compiled]


def list_steps() -> list[Step]:
    """The first steps, those that compile last."""
    bert, gpt = {**_LARGE, "batch": 32, "sequence": 128}, {"batch": 8}
    steps = [Step("bert", size, amp) for size in ({"batch": 16, "sequence": 128}, bert) for amp in ("", "bf16")]
    steps += [Step("bert", {**_LARGE, "batch": 8, "sequence": 512}, "bf16")]
    steps += [Step("gpt2", gpt, amp) for amp in ("", "bf16")]
    steps += [Step("gpt2", {"batch": 2, "sequence": 256}, "bf16"), Step("gpt2", {**_LARGE, "batch": 8}, "bf16")]
    steps += [Step("llama", {"layers": 16, "hidden": 2048, "heads": 16, "batch": 2}, "bf16")]
    steps += [Step("vit", {"batch": 64}, amp) for amp in ("", "bf16")]
    steps += [Step("resnet", {"batch": batch}, amp) for batch in (32, 128) for amp in ("", "bf16")]
    wide = {"layers": 26, "hidden": 128, "sequence": 1, "batch": 8192}
    tables: tuple[dict[str, int], ...] = ({}, {"batch": 16384}, wide)
    steps += [Step("dlrm", size) for size in tables]
    few = {"layers": 26, "hidden": 32, "sequence": 20, "batch": 512, "vocabulary": 100_000}
    steps += [Step("dlrm", few), Step("t5", {"batch": 8}, "bf16"), Step("whisper", {"batch": 16}, "bf16")]
    small = (("vit", {"batch": 16}), ("gpt2", {"batch": 2, "sequence": 256}))
    steps += [Step("vit", {"batch": 16}, "bf16"), *(Step(model, size, "bf16", "graphs") for model, size in small)]
    compiled = (("bert", bert), ("gpt2", gpt), ("vit", {"batch": 64}), ("resnet", {"batch": 128}))
    return steps + [Step(model, size, "bf16", "compiled") for model, size in compiled]


def predict_steps(platform: pk.Platform, more: bool = False) -> list[dict[str, Any]]:
    """Price one set of steps on a platform: times [s], with their interval, and memory [B]."""
    rows = []
    for step in list_more() if more else list_steps():
        with keep_quiet():
            make = partial(make_step, step.model, step.sizes, device="cuda", amp=step.amp, execution=step.execution)
            family = {"dlrm": "dlrm", "resnet": "convolution"}.get(step.model, "transformer")
            graph = pk.capture(make, device="cuda", name=step.name, family=family)
            found = pk.predict(graph, platform, execution="graphs" if step.execution == "graphs" else None)
        rows.append({
            "family": step.model, "name": step.name, "config": step._asdict(), "ranks": 1, **state_prediction(found),
            "device_s": found.device_time, "execution": found.execution, "operations": len(graph),
            "predicted_peak": found.memory().total,
        })  # fmt: skip
        print(f"{step.name:<60} {1e3 * found.time:8.2f} ms  {found.bottleneck}", flush=True)
    return rows


def time_step(step: Step, folder: Path | None) -> dict[str, Any]:
    """Time a step in a row and one by one [s], with its memory [B]; a trace of four is kept in a folder."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, numbers, aside = torch.cuda.memory_allocated(), count(), torch.cuda.Stream()
    train: Any = make_step(step.model, step.sizes, device="cuda", amp=step.amp, execution=step.execution)
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
    timing = {"in_a_row": summarize_samples(blocks), "one_by_one": summarize_samples(spaced)}
    result = {"name": step.name, **timing, "peak": peak, "reserved": reserved}
    if folder is None:
        return result

    def mark() -> None:
        with record_function(f"ProfilerStep#{next(numbers)}"):
            train()

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as found:
        profiled = clock([mark] * 4, "cuda") / 4
    folder.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(folder / f"{step.name}.json.gz"))
    return {**result, "profiled": profiled}


def measure_steps(out: Path, names: list[str], passes: int = 2) -> None:
    """Time the steps of these names; each is written when it is finished, with the reason where it failed."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    device, rows = torch.cuda.get_device_properties(0), list[dict[str, Any]]()
    facts = {"device": device.name, "memory": device.total_memory, "cache": device.L2_cache_size}
    facts |= {"machine": describe_machine(), "versions": {**list_versions(), "cuda": torch.version.cuda}}
    for number in range(passes):
        for step in (step for step in [*list_steps(), *list_more()] if step.name in names):
            if number and step.execution == "compiled":
                continue
            try:
                rows.append({"pass": number, **time_step(step, None if number or passes == 1 else out / "traces")})
                print(f"{step.name:<60} {1e3 * rows[-1]['in_a_row']['median']:8.2f} ms", flush=True)
            except (RuntimeError, ValueError, AttributeError, TypeError) as error:
                rows.append({"pass": number, "name": step.name, "failed": f"{type(error).__name__} {error}"[:300]})
                print(step.name, rows[-1]["failed"], flush=True)
            write_text(out / "steps.json", json.dumps({**facts, "rows": rows}, indent=1))


def join_runs(predicted: dict[str, Any], measured: dict[str, Any]) -> Comparison:
    """Predictions and measurements: iterations in a row, the mean of both passes."""
    runs = []
    for row in predicted["rows"]:
        timed = [one for one in measured["rows"] if one["name"] == row["name"] and "failed" not in one]
        if timed:
            apart = float(np.mean([one["one_by_one"]["median"] for one in timed]))
            sizes = {key: timed[0][key] for key in ("peak", "reserved")}
            runs.append({**row, **join_passes([one["in_a_row"] for one in timed]), "one_by_one_s": apart, **sizes})
    machine = {**measured["machine"], "device": measured["device"], "predicted": predicted["date"]}
    return Comparison(tuple(runs), predicted["platform"], machine, measured["versions"])


@command({
    "--platform": {"metavar": "P.toml", "help": "platform to predict on"},
    "--more": {"action": "store_true", "help": "the second set of steps"},
    "--predictions": {"type": Path, "metavar": "FILE", "help": "what was predicted"},
    "--measure": {"type": Path, "metavar": "FOLDER", "help": "time the steps here, into steps.json and traces"},
    "--measured": {"type": Path, "metavar": "FILE", "help": "steps.json of the GPU"}, **SAVED, **OUT,
})  # fmt: skip
def main(given: Any) -> None:
    """Training steps on one GPU, predicted beforehand."""
    if given.saved:
        found = Comparison.load(*given.saved)
        print(found.summary_as_text())
        peaks = np.array([run["predicted_peak"] / run["peak"] - 1 for run in found.runs])
        near, mean = int(np.sum(np.abs(peaks) <= 0.1)), 100 * np.mean(np.abs(peaks))
        print(f"peak of allocated memory: {near} of {len(peaks)} within 10 %, mean error {mean:.1f} %")
        return
    if not given.predictions:
        raise ValueError("predictions is missing; name its file, or give --saved")
    if given.platform:
        where = pk.load_platform(given.platform)
        about = {"platform": where.name, "date": date.today().isoformat(), "rows": predict_steps(where, given.more)}
        write_text(given.predictions, json.dumps(about, indent=1) + "\n")
        return
    predicted = json.loads(given.predictions.read_text())
    if given.measure:
        return measure_steps(given.measure, [row["name"] for row in predicted["rows"]], 1 if given.more else 2)
    comparison = join_runs(predicted, json.loads(given.measured.read_text()))
    print(comparison.as_text())
    if given.json:
        comparison.save(given.json)
