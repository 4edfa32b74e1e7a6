"""Accuracy on what calibration never saw, beside the noise of the measurements and the bars of
DESIGN.md.

    python -m benchmarks.accuracy --platform P.toml --json accuracy.json
    python -m benchmarks.accuracy --from accuracy.*.json [--platform P.toml]

Every part is saved as JSON next to the output, so that a second run continues after an
interruption. With --from saved parts are judged without a measurement: by the predictions of a
platform, else by those in the files.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks.helpers.command import OUT, PLATFORM, command
from benchmarks.helpers.files import save_rows
from benchmarks.helpers.saved_runs import predict_again
from benchmarks.helpers.tables import Row, lay_out
from perfkit.calibration.campaign import check
from perfkit.calibration.checks import Comparison, summarize_errors
from perfkit.calibration.cpu_measure import measure_collectives, measure_kernels
from perfkit.calibration.fit_kernels import size_cases
from perfkit.ground.targets import write_text
from perfkit.ground.units import check_positive
from perfkit.measure.folders import Campaign
from perfkit.measure.machine import describe_machine, list_versions
from perfkit.measure.records import SizedKernel, read_record, write_result
from perfkit.measure.samples import draw_check
from perfkit.models.kernels import additive
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform

#: Pairs of error and noise by class [-].
Errors: TypeAlias = dict[str, list[tuple[float, float]]]


class Bar(NamedTuple):
    """A quantity, patterns of the classes that belong to it, and its largest errors [%]."""

    name: str
    classes: str
    limits: Mapping[str, float] = {}

    def holds(self, name: str) -> bool:
        """Whether a class belongs to the quantity."""
        return any(fnmatch(name, pattern) for pattern in self.classes.split())


#: Seeds of check.
SEEDS = (1, 2, 3)
#: DESIGN.md, "What it must reach"; quantities without limits have no bar.
BARS = (
    Bar("GEMM, 2 MFLOP and more", "gemm.*", {"geomean": 6, "mean": 10}),
    Bar("elementwise and row-wise", "elementwise.* rowwise.*", {"geomean": 5, "mean": 10}),
    Bar("small batched GEMM", "bmm.*", {"geomean": 15, "mean": 25}),
    Bar("attention", "attention.*"),
    Bar("copies", "copy.*"),
    Bar("convolutions, 2 MFLOP and more", "convolution.*"),
    Bar("pooling", "pooling.*"),
    Bar(
        "embedding forward, sparse backward",
        "embedding_forward.* embedding_backward.sparse",
        {"geomean": 8, "mean": 12},
    ),
    Bar(
        "embedding updates, dense backward",
        "embedding_update.* embedding_backward.dense*",
        {"geomean": 10, "mean": 18},
    ),
    Bar("collectives, lower quartile", "collective.*", {"mean": 25}),
    Bar("iterations, DLRM", "iteration.dlrm"),
    Bar("iterations, BERT and GPT-2", "iteration.transformer"),
    Bar(
        "iterations, one process",
        "iteration.dlrm iteration.transformer",
        {"geomean": 10, "mean": 12, "p95": 30},
    ),
    Bar("iterations, two ranks", "iteration.hybrid", {"geomean": 12, "mean": 15}),
)
#: Share of the runs that must be inside the 80 % interval [%].
COVERAGE = (70.0, 90.0)


@dataclass(frozen=True)
class _Effort:
    """How much is measured: kernel sizes (a share of all) and seconds of each, seconds of a
    collective, and samples and seconds of a check."""

    density: float
    kernel_seconds: float
    collective_seconds: float
    samples: Mapping[str, int]
    check_seconds: float


_FULL = _Effort(1.0, 0.035, 0.25, {"dlrm": 14, "transformer": 10, "hybrid": 6}, 0.8)
_QUICK = _Effort(0.05, 0.005, 0.01, {"dlrm": 1, "transformer": 1, "hybrid": 0}, 0.05)


def _measure_kernels(seed: int, effort: _Effort) -> dict[str, Any]:
    """Times of kernels."""
    kernels = measure_kernels(
        Campaign(None), seed=seed, density=effort.density, seconds=effort.kernel_seconds
    )
    return {"kernels": write_result(kernels)}


def _measure_collectives(ranks: int, effort: _Effort) -> dict[str, Any]:
    """Two sweeps of collectives, which differ by the noise."""
    sweeps = []
    for _ in range(2):
        sweep = measure_collectives(Campaign(None), ranks=ranks, seconds=effort.collective_seconds)
        sweeps.append(write_result(sweep))
    return {"collectives": sweeps, "ranks": ranks}


def _measure_check(platform: Platform, seed: int, effort: _Effort) -> dict[str, object]:
    """Predicted and measured iterations."""
    samples: dict[str, Any] = dict(effort.samples)
    if platform.network.ranks == 1:
        samples["hybrid"] = 0
    drawn = draw_check(seed, **samples)
    return check(platform, samples=drawn, seconds=effort.check_seconds).to_dict()


def _list_jobs(
    platform: Platform, seeds: Sequence[int], kernel_seed: int, quick: bool
) -> dict[str, Callable[[], Any]]:
    """What to measure, by the name of its file."""
    ranks = platform.network.ranks
    effort = _QUICK if quick else _FULL
    jobs: dict[str, Callable[[], Any]] = {}
    jobs[f"kernels-{kernel_seed}"] = partial(_measure_kernels, kernel_seed, effort)
    if ranks > 1:
        jobs["collectives"] = partial(_measure_collectives, ranks, effort)
    for seed in seeds:
        jobs[f"check-{seed}"] = partial(_measure_check, platform, seed, effort)
    return jobs


def measure(
    platform: Platform, out: Path, *, seeds: Sequence[int], kernel_seed: int, quick: bool = False
) -> list[Path]:
    """Measure every part that is not yet saved next to `out`; returns their files."""
    here, versions = describe_machine(), list_versions()
    known = platform.provenance.get("processor", "no machine")
    if known != here["processor"]:
        fault = f"platform {platform.name!r} was calibrated on {known}; this is {here['processor']}"
        raise ValueError(f"{fault}; calibrate it")
    if kernel_seed == 0:
        raise ValueError(
            "kernel-seed is 0, the sizes that calibration has fitted; take another one"
        )
    files = []
    for name, job in _list_jobs(platform, seeds, kernel_seed, quick).items():
        file = out.with_suffix(f".{name}.json")
        if not file.exists():
            facts = {"format": 1, "machine": here, "versions": versions}
            write_text(file, json.dumps(facts | job(), indent=1) + "\n")
        kept = json.loads(file.read_text(encoding="utf-8"))
        if (kept["machine"], kept["versions"]) != (here, versions):
            raise ValueError(
                f"{str(file)!r} was measured on another machine or with other versions; move it away"
            )
        files.append(file)
    return files


def _is_judged(row: Mapping[str, Any]) -> bool:
    """Whether a kernel counts: products and convolutions under 2 MFLOP do not."""
    return row["kind"] not in ("gemm", "convolution") or row["sizes"]["flops"] >= 2e6


def judge_kernels(platform: Platform, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Relative errors of isolated kernels that were not fitted, by class [-].

    Products and convolutions under 2 MFLOP, and classes without a fit, are left out.
    """
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if _is_judged(row):
            groups[f"{row['kind']}.{row['variant']}"].append(row)
    errors = {}
    for name, group in groups.items():
        if name not in platform.kernels:
            continue
        kernels = [read_record(SizedKernel, row, name) for row in group]
        sizes = size_cases(kernels, platform.cache_capacities, platform.page_entries)
        predicted = additive(sizes, **platform.kernels[name])
        measured = np.array([row["median"] for row in group])
        errors[name] = predicted / measured - 1
    return errors


def _find_noise(part: Mapping[str, Any], name: str) -> float:
    """Mean difference between the halves of the samples of a class of kernels [-]."""
    noise = []
    for row in part["kernels"]:
        if f"{row['kind']}.{row['variant']}" == name:
            noise.append(max(row["halves"]) / min(row["halves"]) - 1)
    return float(np.mean(noise))


def _judge_sweep(
    sweep: Sequence[Mapping[str, Any]],
    repeat: Sequence[Mapping[str, Any]],
    ranks: int,
    platform: Platform,
) -> Errors:
    """Error of each collective of a sweep; its noise is the difference to a repeat."""
    pairs: Errors = defaultdict(list)
    for row, again in zip(sweep, repeat, strict=True):
        time = float(platform.collective_time(row["operation"], row["nbytes"], ranks=ranks))
        noise = abs(float(np.log(row["q1"] / again["q1"])))
        pairs[f"collective.{row['operation']}"].append((time / row["q1"] - 1, noise))
    return pairs


def judge_part(part: Mapping[str, Any], platform: Platform) -> Errors:
    """Error and noise of each kernel or collective of one file."""
    pairs: Errors = defaultdict(list)
    for name, errors in judge_kernels(platform, part.get("kernels", ())).items():
        noise = _find_noise(part, name)
        pairs[name] = [(float(error), noise) for error in errors]
    if "collectives" in part:
        first, second = part["collectives"]
        _add(pairs, _judge_sweep(first, second, part["ranks"], platform))
        _add(pairs, _judge_sweep(second, first, part["ranks"], platform))
    return pairs


def _add(pairs: Errors, more: Errors) -> None:
    """Append errors and noise by class."""
    for name, values in more.items():
        pairs[name] = pairs.get(name, []) + values


def _judge_runs(runs: Sequence[dict[str, Any]], pairs: Errors) -> dict[str, Any]:
    """Add the errors of iterations by family; the row for the share inside their intervals [%]."""
    whole = Comparison(tuple(runs), "", {}, {})
    for run, error in zip(runs, whole.errors, strict=True):
        noise = whole.figures[run["family"]]["floor"]
        pairs[f"iteration.{run['family']}"].append((error, noise))
    inside = 100 * whole.coverage()
    low, high = COVERAGE
    return {
        "quantity": "inside the 80 % interval",
        "n": len(runs),
        "mean": inside,
        "bar": f"{low:g} to {high:g}",
        "met": low <= inside <= high,
    }


def evaluate(files: Sequence[Path], platform: Platform | None = None) -> list[dict[str, Any]]:
    """Rows of the table from saved parts [%]; `platform` predicts parts without predictions."""
    pairs: Errors = defaultdict(list)
    runs: list[dict[str, Any]] = []
    for file in files:
        part = json.loads(file.read_text(encoding="utf-8"))
        if not {"kernels", "collectives", "runs"} & {*part}:
            raise ValueError(
                f"{str(file)!r} has no kernels, collectives or runs; name files that accuracy has written"
            )
        if "runs" in part:
            saved = Comparison.load(file)
            runs += (predict_again(saved, platform) if platform else saved).runs
        elif platform is None:
            raise ValueError(
                f"{str(file)!r} has times without predictions; give the platform with --platform"
            )
        else:
            _add(pairs, judge_part(part, platform))
    if not runs:
        return tabulate(pairs)
    inside = _judge_runs(runs, pairs)
    return [*tabulate(pairs), inside]


def _judge_bar(bar: Bar, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The row of a quantity: figures of its errors, and whether its bar is met [%]."""
    figures = summarize_errors([error for error, _ in pairs])
    noise = float(np.mean([noise for _, noise in pairs]))
    figures["floor"] = round(100 * noise, 2)
    met = None
    if bar.limits:
        met = all(figures[name] <= limit for name, limit in bar.limits.items())
    limits = " / ".join(f"{name} {limit:g}" for name, limit in bar.limits.items())
    return {"quantity": bar.name, **figures, "bar": limits, "met": met}


def tabulate(errors: Errors, bars: Sequence[Bar] = BARS) -> list[dict[str, Any]]:
    """Rows of the table from pairs of error and noise by class [%]."""
    rows = []
    for bar in bars:
        pairs = list[tuple[float, float]]()
        for name, values in errors.items():
            if bar.holds(name):
                pairs += values
        if pairs:
            rows.append(_judge_bar(bar, pairs))
    return rows


_COLUMNS = {
    "quantity": "{quantity}",
    "n": "{n:.0f}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "max": "{max:.1f}",
    "bias": "{bias:+.1f}",
    "floor": "{floor:.1f}",
    "bar [%]": "{bar}",
    "met": "{met}",
}


def format_accuracy(rows: Sequence[Row]) -> str:
    """The table as text."""
    return lay_out(rows, _COLUMNS, numbers=True)


def _measure_here(given: Any, platform: Platform | None) -> list[Path]:
    """Measure what was asked for; files of the parts."""
    if platform is None:
        raise ValueError(
            "platform is missing; name what calibrate has written, or saved parts with --from"
        )
    out = given.json or Path(".perfkit/accuracy.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    seeds = []
    for word in given.seeds.split(","):
        seed = check_positive("seeds", int(word), integer=True, zero=True)
        seeds.append(int(seed))
    return measure(platform, out, seeds=seeds, kernel_seed=given.kernel_seed, quick=given.quick)


@command(
    {
        **PLATFORM,
        **OUT,
        "--seeds": {
            "default": ",".join(map(str, SEEDS)),
            "help": "seeds of check, comma-separated",
        },
        "--kernel-seed": {
            "type": int,
            "default": 1,
            "help": "seed of the kernel sizes, not that of calibration",
        },
        "--from": {
            "dest": "files",
            "type": Path,
            "nargs": "+",
            "metavar": "FILE",
            "help": "judge saved parts",
        },
        "--quick": {
            "action": "store_true",
            "help": "a few sizes and runs, to see that everything works",
        },
    }
)
def main(given: Any) -> None:
    """Errors on held-out kernels, collectives and runs."""
    platform = load_platform(given.platform) if given.platform else None
    files = given.files or _measure_here(given, platform)
    rows = evaluate(files, platform)
    print(format_accuracy(rows))
    save_rows(given.json, rows, files=[file.name for file in files])
