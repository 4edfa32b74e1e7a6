"""The bars that perfkit has set itself, and the table that holds saved measurements against them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import MET
from benchmarks.saved import predict_again
from perfkit.calibration.checks import Comparison, summarize_errors
from perfkit.calibration.fit import judge_kernels
from perfkit.ground.units import format_table
from perfkit.platform.platform import Platform


@dataclass(frozen=True)
class Bar:
    """A quantity, the classes that are pooled in it, and the errors it may have [%]; nan where none is set."""

    name: str
    classes: tuple[str, ...]
    geomean: float = np.nan
    mean: float = np.nan
    p95: float = np.nan


#: DESIGN.md, "What it must reach"; quantities without figures are shown for orientation.
BARS = (
    Bar("GEMM, 2 MFLOP and more", ("gemm.*",), 6, 10),
    Bar("elementwise and row-wise", ("elementwise.*", "rowwise.*"), 5, 10),
    Bar("small batched GEMM", ("bmm.*",), 15, 25),
    Bar("attention", ("attention.*",)),
    Bar("copies", ("copy.*",)),
    Bar("convolutions, 2 MFLOP and more", ("convolution.*",)),
    Bar("pooling", ("pooling.*",)),
    Bar("embedding forward, sparse backward", ("embedding_forward.*", "embedding_backward.sparse"), 8, 12),
    Bar("embedding updates, dense backward", ("embedding_update.*", "embedding_backward.dense*"), 10, 18),
    Bar("collectives, lower quartile", ("collective.*",), mean=25),
    Bar("iterations, DLRM", ("iteration.dlrm",)),
    Bar("iterations, BERT and GPT-2", ("iteration.transformer",)),
    Bar("iterations, one process", ("iteration.dlrm", "iteration.transformer"), 10, 12, 30),
    Bar("iterations, two ranks", ("iteration.hybrid",), 12, 15),
)
COVERAGE = (70.0, 90.0)

_Errors = dict[str, list[tuple[float, float]]]


def _read(file: Path) -> dict[str, Any]:
    try:
        part = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON: {error}; name files that accuracy or check has written") from None
    if not isinstance(part, dict) or part.get("format") != 1 or not {"kernels", "collectives", "runs"} & set(part):
        raise ValueError(f"{str(file)!r} holds no kernels, collectives or runs; name files that accuracy has written")
    return part


def judge_part(part: Mapping[str, Any], platform: Platform) -> _Errors:
    """Error and noise of each kernel or collective of one file."""
    found: _Errors = {}
    for key, errors in judge_kernels(platform, part.get("kernels", ())).items():
        # halves of interleaved samples are the noise of a kernel, another sweep that of a collective
        rows = [row for row in part["kernels"] if key == f"{row['kind']}.{row['variant']}"]
        noise = float(np.mean([max(row["halves"]) / min(row["halves"]) - 1 for row in rows]))
        found[key] = [(float(error), noise) for error in errors]
    for row, again in zip(*part.get("collectives", ((), ())), strict=True):
        for one, other in ((row, again), (again, row)):
            time = float(platform.collective_time(one["operation"], one["nbytes"], ranks=part["ranks"]))
            pair = (time / one["q1"] - 1, abs(float(np.log(one["q1"] / other["q1"]))))
            found.setdefault(f"collective.{one['operation']}", []).append(pair)
    return found


def evaluate(files: Sequence[Path], platform: Platform | None = None) -> list[dict[str, Any]]:
    """Rows of the accuracy table, in percent, from saved parts; `platform` predicts what holds no predictions."""
    found: _Errors = {}
    checks: list[dict[str, Any]] = []
    for file in files:
        if "runs" in (part := _read(file)):
            saved = Comparison.load(file)
            checks += (predict_again(saved, platform) if platform else saved).runs
        elif platform is None:
            raise ValueError(f"{str(file)!r} holds times without predictions; say with --platform what predicts")
        else:
            for key, pairs in judge_part(part, platform).items():
                found.setdefault(key, []).extend(pairs)
    whole = Comparison(tuple(checks), "", {}, {})
    figures = whole.figures if checks else {}
    for run in checks:
        pair = run["predicted_s"] / run["measured_s"] - 1, figures[run["family"]]["floor"]
        found.setdefault(f"iteration.{run['family']}", []).append(pair)
    rows = tabulate(found)
    if checks:
        inside = 100 * whole.coverage()
        met = COVERAGE[0] <= inside <= COVERAGE[1]
        rows.append({"quantity": "inside the 80 % interval", "n": len(checks), "inside": inside, "met": met})
    return rows


def tabulate(found: _Errors, bars: Sequence[Bar] = BARS) -> list[dict[str, Any]]:
    """Rows of the table, in percent, from pairs of error and noise by class."""
    return [_row(bar, pairs) for bar in bars if (pairs := _matching(found, bar))]


def _matching(found: _Errors, bar: Bar) -> list[tuple[float, float]]:
    keys = [key for key in found if any(fnmatch(key, pattern) for pattern in bar.classes)]
    return [pair for key in keys for pair in found[key]]


def _row(bar: Bar, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    errors, noise = zip(*pairs, strict=True)
    figures = summarize_errors(errors)
    limits = {name: getattr(bar, name) for name in ("geomean", "mean", "p95") if getattr(bar, name) > 0}
    met = all(figures[name] <= limit for name, limit in limits.items()) if limits else None
    return {"quantity": bar.name, **figures, "floor": round(100 * float(np.mean(noise)), 2), "bar": limits, "met": met}


def format_accuracy(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table as text."""
    columns = ("geomean", "mean", "p95", "max", "bias", "floor")
    cells = [("quantity", "n", *columns, "bar [%]", "met")]
    for row in rows:
        bar = " / ".join(f"{name} {limit:g}" for name, limit in row.get("bar", {}).items())
        figures = [f"{row[name]:{'+' if name == 'bias' else ''}.1f}" if name in row else "" for name in columns]
        if "inside" in row:
            figures[1], bar = f"{row['inside']:.0f}", f"{COVERAGE[0]:g} to {COVERAGE[1]:g}"
        cells.append((row["quantity"], f"{row['n']:.0f}", *figures, bar, MET[row["met"]]))
    return format_table(cells, numbers=True)
