import json

import numpy as np
import pytest

from benchmarks import left_out
from perfkit.ground.files import find_reference


@pytest.fixture(scope="module")
def measurements() -> dict:
    """The committed measurements, thinned out."""
    whole = json.loads(find_reference("measured", "zen5-2.measurements.json").read_text(encoding="utf-8"))
    kept = [row for row in whole["kernels"] if row["kind"].startswith("embedding") or row["variant"] in ("add", "nt")]
    tabled = [row for row in whole["iterations"] if len(row["runs"]) == 1 and row["workload"].get("tables")]
    return whole | {"kernels": kept, "iterations": tabled[2:5], "collectives": []}


def test_kernels_are_judged_by_fits_that_never_saw_them(measurements: dict) -> None:
    found = left_out.judge_kernel_folds(measurements, folds=2, draws=1)
    assert sum(len(pairs) for key, pairs in found.items() if key.startswith("embedding")) == 215
    forward = np.array([error for error, _ in found["embedding_forward._embedding_bag"]])
    update = np.array([error for error, _ in found["embedding_update.sparse"]])
    assert np.abs(forward).mean() < 0.15 and np.abs(update).mean() < 0.28  # 0.39 while draws were taken for fresh ones


def test_embeddings_inside_iterations(measurements: dict) -> None:
    found = left_out.judge_embeddings(measurements)
    assert {name: len(pairs) for name, pairs in found.items()} == {"time": 3, "share": 3}
    assert all(abs(error) < 0.8 and noise >= 0 for pairs in found.values() for error, noise in pairs)
