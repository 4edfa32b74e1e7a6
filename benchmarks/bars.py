"""The bars that perfkit has set itself, and the table that holds saved measurements against them."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks import Row, is_met, lay_out
from benchmarks.saved import predict_again
from perfkit.calibration.checks import Comparison, summarize_errors
from perfkit.calibration.fit import judge_kernels
from perfkit.platform.platform import Platform

#: Pairs of error and noise by class [-].
Errors: TypeAlias = dict[str, list[tuple[float, float]]]


class Bar(NamedTuple):
    """A quantity, patterns of the classes that are pooled in it, and the errors it may have [%]."""

    name: str
    classes: str
    limits: Mapping[str, float] = {}


#: DESIGN.md, "What it must reach"; quantities without figures are shown for orientation.
BARS = (
    Bar("GEMM, 2 MFLOP and more", "gemm.*", {"geomean": 6, "mean": 10}),
    Bar("elementwise and row-wise", "elementwise.* rowwise.*", {"geomean": 5, "mean": 10}),
    Bar("small batched GEMM", "bmm.*", {"geomean": 15, "mean": 25}),
    Bar("attention", "attention.*"),
    Bar("copies", "copy.*"),
    Bar("convolutions, 2 MFLOP and more", "convolution.*"),
    Bar("pooling", "pooling.*"),
    Bar("embedding forward, sparse backward", "embedding_forward.* embedding_backward.sparse",
        {"geomean": 8, "mean": 12}),
    Bar("embedding updates, dense backward", "embedding_update.* embedding_backward.dense*",
        {"geomean": 10, "mean": 18}),
    Bar("collectives, lower quartile", "collective.*", {"mean": 25}),
    Bar("iterations, DLRM", "iteration.dlrm"),
    Bar("iterations, BERT and GPT-2", "iteration.transformer"),
    Bar("iterations, one process", "iteration.dlrm iteration.transformer", {"geomean": 10, "mean": 12, "p95": 30}),
    Bar("iterations, two ranks", "iteration.hybrid", {"geomean": 12, "mean": 15}),
)  # fmt: skip
COVERAGE = (70.0, 90.0)


def _read(file: Path) -> dict[str, Any]:
    try:
        part = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON: {error}; name files that accuracy or check has written") from None
    if not isinstance(part, dict) or part.get("format") != 1 or not {"kernels", "collectives", "runs"} & set(part):
        raise ValueError(f"{str(file)!r} holds no kernels, collectives or runs; name files that accuracy has written")
    return part


def judge_part(part: Mapping[str, Any], platform: Platform) -> Errors:
    """Error and noise of each kernel or collective of one file."""
    found: Errors = defaultdict(list)
    for key, errors in judge_kernels(platform, part.get("kernels", ())).items():
        # halves of interleaved samples are the noise of a kernel, another sweep that of a collective
        rows = [row for row in part["kernels"] if key == f"{row['kind']}.{row['variant']}"]
        noise = float(np.mean([max(row["halves"]) / min(row["halves"]) - 1 for row in rows]))
        found[key] = [(float(error), noise) for error in errors]
    for row, again in zip(*part.get("collectives", ((), ())), strict=True):
        for one, other in ((row, again), (again, row)):
            time = float(platform.collective_time(one["operation"], one["nbytes"], ranks=part["ranks"]))
            pair = (time / one["q1"] - 1, abs(float(np.log(one["q1"] / other["q1"]))))
            found[f"collective.{one['operation']}"].append(pair)
    return found


def evaluate(files: Sequence[Path], platform: Platform | None = None) -> list[dict[str, Any]]:
    """Rows of the accuracy table, in percent, from saved parts; `platform` predicts what holds no predictions."""
    found: Errors = defaultdict(list)
    checks: list[dict[str, Any]] = []
    for file in files:
        if "runs" in (part := _read(file)):
            saved = Comparison.load(file)
            checks += (predict_again(saved, platform) if platform else saved).runs
        elif platform is None:
            raise ValueError(f"{str(file)!r} holds times without predictions; say with --platform what predicts")
        else:
            for key, pairs in judge_part(part, platform).items():
                found[key] += pairs
    if not checks:
        return tabulate(found)
    figures = (whole := Comparison(tuple(checks), "", {}, {})).figures
    for run, error in zip(checks, whole.errors, strict=True):
        found[f"iteration.{run['family']}"].append((error, figures[run["family"]]["floor"]))
    inside, (low, high) = 100 * whole.coverage(), COVERAGE
    about = {"n": len(checks), "mean": inside, "bar": f"{low:g} to {high:g}", "met": low <= inside <= high}
    return [*tabulate(found), {"quantity": "inside the 80 % interval", **about}]


def tabulate(found: Errors, bars: Sequence[Bar] = BARS) -> list[dict[str, Any]]:
    """Rows of the table, in percent, from pairs of error and noise by class."""
    rows = []
    for name, classes, limits in bars:
        keys = [key for key in found if any(fnmatch(key, pattern) for pattern in classes.split())]
        if pairs := [pair for key in keys for pair in found[key]]:
            errors, noise = zip(*pairs, strict=True)
            figures = summarize_errors(errors) | {"floor": round(100 * float(np.mean(noise)), 2)}
            bar = " / ".join(f"{name} {limit:g}" for name, limit in limits.items())
            rows.append({"quantity": name, **figures, "bar": bar, "met": is_met(figures, limits)})
    return rows


_COLUMNS = {"quantity": "{quantity}", "n": "{n:.0f}", "geomean": "{geomean:.1f}", "mean": "{mean:.1f}"}
_COLUMNS |= {"p95": "{p95:.1f}", "max": "{max:.1f}", "bias": "{bias:+.1f}", "floor": "{floor:.1f}"}


def format_accuracy(rows: Sequence[Row]) -> str:
    """The table as text."""
    return lay_out(rows, _COLUMNS | {"bar [%]": "{bar}", "met": "{met}"}, numbers=True)
