"""Pictures of docs/: a report of each kind, as a headless browser draws it.

python -m benchmarks.pictures [--out docs] [--browser chromium-headless-shell]
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import command
from perfkit.calibration.checks import Comparison
from perfkit.calibration.traces import read_trace
from perfkit.exploration.sweeps import sweep
from perfkit.ground.files import find_reference
from perfkit.platform.gallery import load_platform
from perfkit.prediction.contrast import compare
from perfkit.prediction.result import predict
from perfkit.reports.page import report
from perfkit.sharding.planner import shard
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.transformer import Transformer

_OPTIONS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=20000".split()
_OPTIONS += ["--window-size=1000,1300", "--force-device-scale-factor=0.77"]  # 770 by 1001 pixels


def list_results() -> Iterator[tuple[str, Any]]:
    """A result of each kind, by its name."""
    bert, measured = Transformer.bert("bert-large", batch=64, sequence=512, dtype="bf16"), find_reference("measured")
    yield "prediction", predict(bert, "h100-sxm-8", ranks=8)
    yield "comparison", compare(predict(bert, "a100-sxm-8", ranks=8), predict(bert, "h100-sxm-8", ranks=8))
    yield "sharding", shard(DLRM("dlrm-dcnv2", batch=65_536), "h100-sxm-8", ranks=8, steps=2000)
    grid = {"batch": [8, 16, 32, 64, 128], "sequence": [128, 512], "dtype": ["bf16"]}
    yield "sweep", sweep(lambda **sizes: Transformer.bert("bert-large", **sizes), grid, "h100-sxm-8", progress=False)
    yield "check", Comparison.load(*sorted(measured.glob("zen3-2.check-*.json")))
    yield "trace", read_trace(measured / "xeon-2.step.json.gz")
    yield "calibration", load_platform("zen5-2")


@command({
    "--out": {"type": Path, "default": Path("docs").resolve(), "help": "folder of the pictures"},
    "--browser": {"default": "chromium-headless-shell", "help": "Chromium or one that takes its options"},
})  # fmt: skip
def main(given: Any) -> None:
    """Pictures of reports for docs/."""
    with TemporaryDirectory() as folder:
        for name, result in list_results():
            page = report(result, path=Path(folder, f"{name}.html"))
            picture = f"--screenshot={given.out / f'report_{name}.png'}"
            subprocess.run([given.browser, *_OPTIONS, picture, str(page)], check=True)
