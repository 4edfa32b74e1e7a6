"""Pictures of docs/: a report of each kind, drawn by a headless browser.

python -m benchmarks.makers.pictures [--out docs] [--browser chromium-headless-shell]
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import perfkit as pk
from benchmarks.helpers.command import command
from perfkit.ground.files import find_reference

_OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
]
_OPTIONS += ["--window-size=1000,1300", "--force-device-scale-factor=0.77"]  # 770 by 1001 pixels


def list_results() -> Iterator[tuple[str, Any]]:
    """A result of each kind, by its name."""
    bert, measured = (
        pk.Transformer.bert("bert-large", batch=64, sequence=512, dtype="bf16"),
        find_reference("measured"),
    )
    yield "prediction", pk.predict(bert, "h100-sxm-8", ranks=8)
    yield (
        "comparison",
        pk.compare(
            pk.predict(bert, "a100-sxm-8", ranks=8), pk.predict(bert, "h100-sxm-8", ranks=8)
        ),
    )
    yield (
        "sharding",
        pk.shard(pk.DLRM("dlrm-dcnv2", batch=65_536), "h100-sxm-8", ranks=8, steps=2000),
    )
    grid = {"batch": [8, 16, 32, 64, 128], "sequence": [128, 512], "dtype": ["bf16"]}
    yield (
        "sweep",
        pk.sweep(
            lambda **sizes: pk.Transformer.bert("bert-large", **sizes),
            grid,
            "h100-sxm-8",
            progress=False,
        ),
    )
    yield "check", pk.Comparison.load(*sorted(measured.glob("zen3-2.check-*.json")))
    yield "trace", pk.read_trace(measured / "xeon-2.step.json.gz")
    yield "calibration", pk.load_platform("zen5-2")


@command(
    {
        "--out": {
            "type": Path,
            "default": Path("docs").resolve(),
            "help": "folder of the pictures",
        },
        "--browser": {
            "default": "chromium-headless-shell",
            "help": "Chromium or one that takes its options",
        },
    }
)
def main(given: Any) -> None:
    """Pictures of reports for docs/."""
    with TemporaryDirectory() as folder:
        for name, result in list_results():
            page = pk.report(result, path=Path(folder, f"{name}.html"))
            picture = f"--screenshot={given.out / f'report_{name}.png'}"
            subprocess.run([given.browser, *_OPTIONS, picture, str(page)], check=True)
