"""All benchmarks, one after the other; calibrates this machine first unless a platform file is
given.

    python -m benchmarks [--platform P.toml] [--quick]
    python -m benchmarks --docs

With --docs nothing is measured: the tables of docs/accuracy.md are printed again. A table below a
marked command is what this command prints.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.gpu_forms import PAIR
from benchmarks.helpers.command import command
from benchmarks.helpers.files import AbsentError, find_shared_data
from benchmarks.helpers.saved_runs import pool_checks
from perfkit.calibration.campaign import calibrate
from perfkit.ground.files import find_reference
from perfkit.measure.machine import count_cores
from perfkit.plots import use_svg

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
_BLOCK = re.compile(
    r"(?P<head><!-- python -m benchmarks\.(?P<command>.+?) -->\n\n```text\n)(?P<printed>.*?)(?=```\n)",
    re.DOTALL,
)
_FOLDER = Path(".perfkit/bench")


def run_benchmark(command: str) -> str | None:
    """What a benchmark prints; None if its data are not here. A missed bar is no failure."""
    name, *words = command.split()
    printed = StringIO()
    with redirect_stdout(printed):
        code = import_module(f"benchmarks.{name}").main(words)
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    return "\n".join(lines) + "\n" if any(lines) and code in (0, 1) else None


def fill_page(text: str, run: Callable[[str], str | None] = run_benchmark) -> str:
    """The page with every block printed again; a block stays if its data are not here."""
    return _BLOCK.sub(
        lambda block: block["head"] + (run(block["command"]) or block["printed"]), text
    )


def write_page() -> None:
    """Fill docs/accuracy.md, and draw the picture of the README."""
    use_svg()  # with the colours and fonts of the notebooks
    pool_checks("zen3-2").chart().save(PAGE.with_name("predicted_vs_measured.svg"))
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def _list_parts(platform: Path, *, quick: bool) -> Iterator[tuple[str, list[str]]]:
    """Every benchmark and its arguments: first those that measure, then those of earlier or
    published measurements."""

    def shorten(*words: str) -> list[str]:
        return [*words] if quick else []

    raw, here = platform.with_suffix(".measurements.json"), ["--platform", str(platform)]
    yield "accuracy", [*here, "--json", str(_FOLDER / "accuracy.json"), *shorten("--quick")]
    if raw.exists():
        checks = map(str, sorted(_FOLDER.glob("accuracy.check-*.json")))
        yield "learning", [str(raw), "--check", *checks, *shorten("--draws", "1")]
    if count_cores() > 1:
        yield "imbalance", [*here, *shorten("--models", "1", "--seconds", "0.5")]
    yield "speed", [*here, *shorten("--rounds", "5")]
    yield "peers", []
    yield "placement", shorten("--quick")
    yield "captures", []
    if find_spec("transformers"):
        yield "gpu_vision", []
    try:
        find_shared_data()
        yield "gpu_forms", shorten("--systems", ",".join(PAIR))
        yield "gpu_networks", []
        yield "traced", []
    except AbsentError as error:
        print(f"gpu_forms, gpu_networks and traced are left out: {error}")
    yield from ((name, []) for name in ("gpu_products", "gpu_iterations", "mlperf_dlrm"))
    measured = find_reference("measured")
    for study in sorted(measured.glob("*.sharding-*.json")):
        yield "sharding_study", ["--saved", str(study), "--platform", study.name.split(".")[0]]
    yield "left_out", shorten("--draws", "1", "--folds", "2")
    if not quick:  # fits a platform dozens of times
        checks = map(str, sorted(measured.glob("zen3-2.check-*.json")))
        yield (
            "learning",
            [str(measured / "zen3-2.measurements.json"), "--families", "--check", *checks],
        )


@command(
    {
        "--platform": {
            "type": Path,
            "metavar": "P.toml",
            "help": "calibration of this machine; default: make one",
        },
        "--quick": {
            "action": "store_true",
            "help": "small everywhere, to see that everything works",
        },
        "--docs": {
            "action": "store_true",
            "help": "only print the tables of docs/accuracy.md again",
        },
    }
)
def main(given: Any) -> int:
    """All tables of accuracy, learning, speed and more."""
    if given.docs:
        write_page()
        return 0
    _FOLDER.mkdir(parents=True, exist_ok=True)
    platform = given.platform or _FOLDER / "platform.toml"
    if not given.platform and platform.exists():
        print(f"takes the calibration in {platform}; remove it to calibrate again")
    elif not given.platform:
        calibrate(out=platform, quick=given.quick)
    for name, own in _list_parts(platform, quick=given.quick):
        print(f"\n{name}\n")
        if code := import_module(f"benchmarks.{name}").main(own):
            return int(code)
    return 0
