"""Raw measurements of different machines are fitted, saved, loaded, predicted and reported."""

import json
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfkit.calibration.fit import fit_platform
from perfkit.calibration.pace import relate_run
from perfkit.ground.files import find_reference
from perfkit.measure.records import read_measured_ranks
from perfkit.measure.samples import load
from perfkit.platform.gallery import load_platform
from perfkit.platform.platform import Platform
from perfkit.prediction.predictor import predict
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from tests.machines import MACHINES, thin


def judge(platform: Platform, rows: list[Mapping[str, Any]]) -> dict[str, float]:
    """Logarithmic error of each measured iteration, at the usual pace."""
    errors = {}
    for row in rows:
        ranks = len(row["runs"])
        plan = Plan.from_owners(row["owners"], ranks=ranks) if row["owners"] else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = predict(load(row["workload"]), platform, ranks=ranks, plan=plan)
        seen = read_measured_ranks(row["runs"], row["name"])
        paced = relate_run(seen, row["family"], platform.context.paces)
        measured = max(rank.median for rank in paced.ranks)
        low, high = found.interval(0.8)
        assert 0 < low < found.time < high
        errors[row["name"]] = float(abs(np.log(found.time / measured)))
    return errors


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """Measurements of a real machine, without the kernels of nets, since it timed no iterations of
    nets."""
    raw: dict[str, Any] = json.loads(
        find_reference("measured", "xeon-2.measurements.json").read_text()
    )
    known = load_platform("zen5-2").kernels
    return thin(
        {
            **raw,
            "kernels": [
                row for row in raw["kernels"] if f"{row['kind']}.{row['variant']}" in known
            ],
        },
        6,
    )


@pytest.fixture(scope="module")
def fitted(real: dict[str, Any]) -> Callable[[str], Platform]:
    """The platform of a machine, fitted once."""
    return cache(lambda name: fit_platform(MACHINES[name][0](real), name="replayed"))


@pytest.fixture(scope="module")
def own_error(real: dict[str, Any]) -> dict[str, float]:
    return judge(fit_platform(real), real["iterations"])


@pytest.mark.parametrize("name", MACHINES)
def test_unlike_machines(name, real, fitted, own_error, tmp_path):
    make, noise = MACHINES[name]
    raw = make(real)
    platform = load_platform(fitted(name).save(tmp_path / "replayed.toml"))
    main_memory = platform.device.memory[-1]
    assert main_memory.bandwidth is not None
    assert main_memory.bandwidth.value > 1e9
    for level in platform.device.memory:
        for quantity in (level.capacity, level.bandwidth):
            assert quantity is None or quantity.kind != "datasheet"
    # are predicted as well as those of the real machine
    errors = judge(platform, raw["iterations"])
    assert np.mean([*errors.values()]) < 1.2 * np.mean([own_error[row] for row in errors]) + noise
    assert len(dict(platform.sections())["Numbers"]) == len(platform.numbers()) > 100, (
        "what a report shows"
    )


def test_a_machine_that_wanders_says_so(fitted: Callable[[str], Platform]) -> None:
    assert "the speed of the machine varied by" in fitted("drift").provenance["disturbances"]


@pytest.mark.parametrize("name", ["measurements", "measurements-2"])
def test_a_machine_whose_cache_is_larger_than_anything_timed(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    raw = json.loads((shared_data / "machines" / f"xeon-480mib.{name}.json").read_text())
    platform = load_platform(
        fit_platform(thin(raw), name="replayed").save(tmp_path / "replayed.toml")
    )
    assert platform.device.never_left_cache
    assert platform.largest_timed == pytest.approx(1.4e8, rel=0.2)
    assert platform.device.memory[-1].name == "DRAM"
    assert len(platform.device.memory) > 1
    sizes = {"dim": 64, "pooling": 2, "batch": 64, "sparse": True}
    large = DLRM(rows=[10**6 for _ in range(8)], **sizes)
    small = DLRM(rows=[10**4 for _ in range(8)], **sizes)
    with pytest.warns(
        UserWarning, match=r"a rank works on 2\.0\d GB; the largest working set timed on replayed"
    ):
        predict(large, platform)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not predict(small, platform).warnings
