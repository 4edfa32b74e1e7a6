"""Accuracy on parts of a calibration's own measurements that are left out of the fit; nothing is
measured.

    python -m benchmarks.left_out [P.measurements.json] [--folds 5] [--draws 2]

The kernels of each class are split at random, and each part is predicted from the others. Embedding
operations in real iterations of one process are predicted from the other iterations: their time,
and its share in all operations.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import Bar, Errors, format_accuracy, judge_part, tabulate
from benchmarks.helpers.command import command
from perfkit.calibration.cpu_context import add_context
from perfkit.calibration.fit import fit_platform
from perfkit.ground.files import find_reference
from perfkit.ground.units import check_positive
from perfkit.measure.records import (
    MachineMeasurements,
    MeasuredKernel,
    read_measurements,
    write_result,
)
from perfkit.measure.samples import load
from perfkit.measure.timing import find_disagreement
from perfkit.prediction.cost import price

#: Only the share has a bar.
_PARTS = (
    Bar("embedding time in iterations", "time"),
    Bar("embedding share of iterations", "share", {"mean": 15}),
)


def _draw_folds(kernels: Sequence[MeasuredKernel], folds: int, draw: int) -> np.ndarray:
    """The part that each kernel is in; every class is split evenly."""
    classes = np.unique([kernel.name for kernel in kernels], return_inverse=True)[1]
    rng = np.random.default_rng([4, draw])
    parts = np.zeros(len(kernels), dtype=int)
    for number in range(classes.max() + 1):
        members = np.flatnonzero(classes == number)
        parts[members] = rng.permutation(len(members)) % folds
    return parts


def judge_kernel_folds(
    measurements: MachineMeasurements, *, folds: int = 5, draws: int = 2
) -> Errors:
    """Error and noise of kernels by class, each predicted from the other folds, for several random
    splits."""
    kernels = measurements.kernels
    errors: Errors = defaultdict(list)
    for draw in range(draws):
        parts = _draw_folds(kernels, folds, draw)
        for part in range(folds):
            fitted = list(compress(kernels, parts != part))
            judged = list(compress(kernels, parts == part))
            known = replace(measurements, kernels=fitted, iterations=[], collectives=[])
            platform = fit_platform(known)
            for name, pairs in judge_part({"kernels": write_result(judged)}, platform).items():
                errors[name] += pairs
    return errors


def judge_embeddings(measurements: MachineMeasurements) -> Errors:
    """Errors of the time of embedding operations, and of their share, in iterations left out one at
    a time."""
    single = [row for row in measurements.iterations if len(row.runs) == 1]
    isolated = fit_platform(replace(measurements, iterations=[]))
    errors: Errors = {"time": [], "share": []}
    for row in single:
        if not row.workload.get("tables"):
            continue
        others = [other for other in single if other is not row]
        platform = add_context(isolated, replace(measurements, iterations=others))
        workload = load(dict(row.workload))
        rank = row.runs[0]
        graph = workload.graphs()[0]
        is_embedding = np.array([label.kind.startswith("embedding") for label in graph.labels])
        predicted = price([graph], platform, dtype=workload.dtype)[0].seconds
        measured = np.array(rank.operation_seconds)
        time = predicted[is_embedding].sum() / measured[is_embedding].sum()
        total = predicted.sum() / measured.sum()
        noise = find_disagreement(rank)
        errors["time"].append((float(time - 1), noise))
        errors["share"].append((float(time / total - 1), noise))
    return errors


def _check_count(name: str, value: int) -> int:
    """A whole number above 0."""
    return int(check_positive(name, value, integer=True))


@command(
    {
        "file": {
            "type": Path,
            "nargs": "?",
            "default": find_reference("measured", "zen5-2.measurements.json"),
            "help": "measurements that calibrate has written",
        },
        "--folds": {"type": int, "default": 5, "help": "parts that kernels are split into"},
        "--draws": {"type": int, "default": 2, "help": "random splits"},
    }
)
def main(given: Any) -> None:
    """Errors on what is left out of a calibration."""
    folds = _check_count("folds", given.folds)
    draws = _check_count("draws", given.draws)
    if folds < 2:
        raise ValueError(f"folds is {folds}; at least 2 are needed to fit one and judge the other")
    measurements = read_measurements(json.loads(given.file.read_text(encoding="utf-8")))
    rows = tabulate(judge_kernel_folds(measurements, folds=folds, draws=draws))
    rows += tabulate(judge_embeddings(measurements), _PARTS)
    print(format_accuracy(rows))
