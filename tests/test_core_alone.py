"""The core predicts without the rooms around it: capture, calibration, strategies, reports and the
rest may be absent."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import perfkit as pk
from perfkit.platform.estimates import keep_quiet

pytestmark = pytest.mark.repository
ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "calibration",
    "commands",
    "exploration",
    "measure",
    "plots",
    "readers",
    "recording",
    "reports",
    "sharding",
)
#: What strategies, configurations and comparisons add to predictions.
AROUND = (
    "configurations",
    "contrast",
    "kept",
    "micro_batches",
    "replicas",
    "stage_replicas",
    "stages",
    "strategies",
    "strategy_case",
    "strategy_hosts",
    "strategy_memory",
    "strategy_passes",
    "strategy_pipelines",
    "strategy_records",
    "strategy_replicas",
    "strategy_runs",
)
PROGRAM = """
import sys
import perfkit as pk
bert = pk.predict(pk.Transformer.bert("bert-large", batch=64, dtype="bf16"), "h100-sxm-8", ranks=8)
dlrm = pk.predict(pk.DLRM("dlrm-mlperf", batch=8192), "h100-sxm-8", ranks=8)
bert.explain(), bert.table(), bert.timeline(), bert.memory(), bert.sensitivity(), dlrm.explain()
print(repr(bert.time), repr(dlrm.time), sys.modules["perfkit"].__file__)
"""


def test_the_core_predicts_without_the_rooms_around_it(tmp_path: Path) -> None:
    copy = tmp_path / "perfkit"
    shutil.copytree(ROOT / "perfkit", copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "reference_data", tmp_path / "reference_data")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for room in ROOMS:
        shutil.rmtree(copy / room)
    for name in AROUND:
        (copy / "prediction" / f"{name}.py").unlink()
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    bert_time, dlrm_time, place = run.stdout.split()
    assert Path(place).is_relative_to(tmp_path)
    bert = pk.Transformer.bert("bert-large", batch=64, dtype="bf16")
    dlrm = pk.DLRM("dlrm-mlperf", batch=8192)
    with keep_quiet():
        assert pk.predict(bert, "h100-sxm-8", ranks=8).time == float(bert_time)
        assert pk.predict(dlrm, "h100-sxm-8", ranks=8).time == float(dlrm_time)
