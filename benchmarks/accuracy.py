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


def _list_jobs(
    platform: Platform, seeds: Sequence[int], kernel_seed: int, quick: bool
) -> dict[str, Callable[[], Any]]:
    """What to measure, by the name of its file."""
    ranks, seconds = platform.network.ranks, 0.01 if quick else 0.25
    size = {"density": 0.05, "seconds": 0.005} if quick else {"density": 1.0, "seconds": 0.035}
    counts: dict[str, Any] = (
        {"dlrm": 1, "transformer": 1} if quick else {"dlrm": 14, "transformer": 10}
    )
    counts["hybrid"] = 6 if ranks > 1 and not quick else 0

    def sweep() -> Any:
        return write_result(measure_collectives(Campaign(None), ranks=ranks, seconds=seconds))

    def compare(seed: int) -> dict[str, object]:
        return check(
            platform, samples=draw_check(seed, **counts), seconds=0.05 if quick else 0.8
        ).to_dict()

    jobs: dict[str, Callable[[], Any]] = {
        f"kernels-{kernel_seed}": lambda: {
            "kernels": write_result(measure_kernels(Campaign(None), seed=kernel_seed, **size))
        }
    }
    if ranks > 1:
        jobs["collectives"] = lambda: {"collectives": [sweep(), sweep()], "ranks": ranks}
    return jobs | {f"check-{seed}": partial(compare, seed) for seed in seeds}


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


def judge_kernels(platform: Platform, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Relative errors of isolated kernels that were not fitted, by class [-].

    Products and convolutions under 2 MFLOP, and classes without a fit, are left out.
    """
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["kind"] not in ("gemm", "convolution") or row["sizes"]["flops"] >= 2e6:
            groups[f"{row['kind']}.{row['variant']}"].append(row)
    errors = {}
    for key in (key for key in groups if key in platform.kernels):
        kernels = [read_record(SizedKernel, row, key) for row in groups[key]]
        sizes = size_cases(kernels, platform.cache_capacities, platform.page_entries)
        predicted = additive(sizes, **platform.kernels[key])
        errors[key] = predicted / np.array([row["median"] for row in groups[key]]) - 1
    return errors


def judge_part(part: Mapping[str, Any], platform: Platform) -> Errors:
    """Error and noise of each kernel or collective of one file."""
    found: Errors = defaultdict(list)
    for key, errors in judge_kernels(platform, part.get("kernels", ())).items():
        # The noise of a kernel is between the halves of its samples, that of a collective between
        # two sweeps.
        rows = [row for row in part["kernels"] if key == f"{row['kind']}.{row['variant']}"]
        noise = float(np.mean([max(row["halves"]) / min(row["halves"]) - 1 for row in rows]))
        found[key] = [(float(error), noise) for error in errors]
    for row, again in zip(*part.get("collectives", ((), ())), strict=True):
        for one, other in ((row, again), (again, row)):
            time = float(
                platform.collective_time(one["operation"], one["nbytes"], ranks=part["ranks"])
            )
            pair = (time / one["q1"] - 1, abs(float(np.log(one["q1"] / other["q1"]))))
            found[f"collective.{one['operation']}"].append(pair)
    return found


def evaluate(files: Sequence[Path], platform: Platform | None = None) -> list[dict[str, Any]]:
    """Rows of the table from saved parts [%]; `platform` predicts parts without predictions."""
    found: Errors = defaultdict(list)
    checks: list[dict[str, Any]] = []
    for file in files:
        part = json.loads(file.read_text(encoding="utf-8"))
        if not {"kernels", "collectives", "runs"} & {*part}:
            raise ValueError(
                f"{str(file)!r} has no kernels, collectives or runs; name files that accuracy has written"
            )
        if "runs" in part:
            saved = Comparison.load(file)
            checks += (predict_again(saved, platform) if platform else saved).runs
        elif platform is None:
            raise ValueError(
                f"{str(file)!r} has times without predictions; give the platform with --platform"
            )
        else:
            for key, pairs in judge_part(part, platform).items():
                found[key] += pairs
    if not checks:
        return tabulate(found)
    whole = Comparison(tuple(checks), "", {}, {})
    for run, error in zip(checks, whole.errors, strict=True):
        found[f"iteration.{run['family']}"].append((error, whole.figures[run["family"]]["floor"]))
    inside, (low, high) = 100 * whole.coverage(), COVERAGE
    about = {
        "n": len(checks),
        "mean": inside,
        "bar": f"{low:g} to {high:g}",
        "met": low <= inside <= high,
    }
    return [*tabulate(found), {"quantity": "inside the 80 % interval", **about}]


def tabulate(found: Errors, bars: Sequence[Bar] = BARS) -> list[dict[str, Any]]:
    """Rows of the table from pairs of error and noise by class [%]."""
    rows = []
    for name, classes, limits in bars:
        keys = [key for key in found if any(fnmatch(key, pattern) for pattern in classes.split())]
        if pairs := [pair for key in keys for pair in found[key]]:
            errors, noise = zip(*pairs, strict=True)
            figures = summarize_errors(errors) | {"floor": round(100 * float(np.mean(noise)), 2)}
            bar = " / ".join(f"{name} {limit:g}" for name, limit in limits.items())
            met = all(figures[name] <= limit for name, limit in limits.items()) if limits else None
            rows.append({"quantity": name, **figures, "bar": bar, "met": met})
    return rows


_COLUMNS = {
    "quantity": "{quantity}",
    "n": "{n:.0f}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
}
_COLUMNS |= {"p95": "{p95:.1f}", "max": "{max:.1f}", "bias": "{bias:+.1f}", "floor": "{floor:.1f}"}


def format_accuracy(rows: Sequence[Row]) -> str:
    """The table as text."""
    return lay_out(rows, _COLUMNS | {"bar [%]": "{bar}", "met": "{met}"}, numbers=True)


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
    platform, files = load_platform(given.platform) if given.platform else None, given.files
    if not files:
        if platform is None:
            raise ValueError(
                "platform is missing; name what calibrate has written, or saved parts with --from"
            )
        kept = given.json or Path(".perfkit/accuracy.json")
        kept.parent.mkdir(parents=True, exist_ok=True)
        seeds = [
            int(check_positive("seeds", int(seed), integer=True, zero=True))
            for seed in given.seeds.split(",")
        ]
        files = measure(
            platform, kept, seeds=seeds, kernel_seed=given.kernel_seed, quick=given.quick
        )
    rows = evaluate(files, platform)
    print(format_accuracy(rows))
    save_rows(given.json, rows, files=[file.name for file in files])
