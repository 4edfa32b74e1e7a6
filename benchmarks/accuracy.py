"""Accuracy on what calibration never saw, beside the noise of measuring and the bars that perfkit has set itself.

    python -m benchmarks.accuracy --platform P.toml --json accuracy.json
    python -m benchmarks.accuracy --from accuracy.*.json [--platform P.toml]

Every part is kept as JSON next to the output, so that a rerun continues. Saved parts are judged again without
measuring: with a platform it is that one which predicts, else the predictions in the files count.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import OUT, PLATFORM, command, save_rows
from benchmarks.bars import evaluate, format_accuracy
from perfkit.calibration.campaign import check, measure_collectives, measure_kernels
from perfkit.ground.files import write_text
from perfkit.ground.units import check_positive
from perfkit.measure.folders import Campaign
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.samples import Sample, draw_check
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform


def _jobs(
    platform: Platform, seeds: Sequence[int], kernel_seed: int, *, quick: bool
) -> dict[str, Callable[[], dict[str, object]]]:
    """What to measure, by the name of its file."""
    ranks = platform.network.ranks
    size = {"density": 0.05, "seconds": 0.005} if quick else {"density": 1.0, "seconds": 0.035}
    counts: dict[str, Any] = {"dlrm": 1, "transformer": 1} if quick else {"dlrm": 14, "transformer": 10}
    counts["hybrid"] = 6 if ranks > 1 and not quick else 0

    def kernels() -> dict[str, object]:
        return {"kernels": measure_kernels(Campaign(None), seed=kernel_seed, **size)}

    def collectives() -> dict[str, object]:
        seconds = 0.01 if quick else 0.25
        sweeps = [measure_collectives(Campaign(None), ranks=ranks, seconds=seconds) for _ in range(2)]
        return {"collectives": sweeps, "ranks": ranks}

    def compare(samples: list[Sample]) -> dict[str, object]:
        return check(platform, samples=samples, seconds=0.05 if quick else 0.8).to_dict()

    jobs: dict[str, Callable[[], dict[str, object]]] = {f"kernels-{kernel_seed}": kernels}
    jobs |= {"collectives": collectives} if ranks > 1 else {}
    return jobs | {f"check-{seed}": partial(compare, draw_check(seed, **counts)) for seed in seeds}


def measure(
    platform: Platform, out: Path, *, seeds: Sequence[int], kernel_seed: int, quick: bool = False
) -> list[Path]:
    """Measure every part that is not yet kept next to `out`; returns their files."""
    here, versions = describe_machine(), list_versions()
    known = platform.provenance.get("processor", "no machine")
    if known != here["processor"]:
        fault = f"platform {platform.name!r} was calibrated on {known}; this is {here['processor']}"
        raise ValueError(f"{fault}; calibrate it")
    if kernel_seed == 0:
        raise ValueError("kernel-seed is 0, the sizes that calibration has fitted; take another one")
    files = []
    for name, job in _jobs(platform, seeds, kernel_seed, quick=quick).items():
        file = out.with_suffix(f".{name}.json")
        if not file.exists():
            facts = {"format": 1, "machine": here, "versions": versions}
            write_text(file, json.dumps(facts | job(), indent=1) + "\n")
        kept = json.loads(file.read_text(encoding="utf-8"))
        if (kept["machine"], kept["versions"]) != (here, versions):
            raise ValueError(f"{str(file)!r} was measured on another machine or with other versions; move it away")
        files.append(file)
    return files


def _seeds(text: str) -> list[int]:
    return [int(check_positive("seeds", float(word), integer=True, zero=True)) for word in text.split(",")]


@command({
    **PLATFORM, **OUT,
    "--seeds": {"default": "1,2,3", "help": "seeds of check, comma-separated"},
    "--kernel-seed": {"type": int, "default": 1, "help": "seed of the kernel sizes, not that of calibration"},
    "--from": {"dest": "files", "type": Path, "nargs": "+", "metavar": "FILE", "help": "judge saved parts"},
    "--quick": {"action": "store_true", "help": "a few sizes and runs, to see that everything works"},
})  # fmt: skip
def main(given: Any) -> None:
    """Errors on held-out kernels, collectives and runs."""
    platform, files = load_platform(given.platform) if given.platform else None, given.files
    if not files:
        if platform is None:
            raise ValueError("platform is missing; name what calibrate has written, or saved parts with --from")
        kept = given.json or Path(".perfkit/accuracy.json")
        kept.parent.mkdir(parents=True, exist_ok=True)
        files = measure(platform, kept, seeds=_seeds(given.seeds), kernel_seed=given.kernel_seed, quick=given.quick)
    rows = evaluate(files, platform)
    print(format_accuracy(rows))
    save_rows(given.json, rows, files=[file.name for file in files])
