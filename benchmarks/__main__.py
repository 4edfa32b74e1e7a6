"""All benchmarks, one after the other; calibrates this machine first unless a platform file is given.

python -m benchmarks [--platform P.toml] [--quick]
python -m benchmarks --docs    # only writes docs/accuracy.md again, from committed runs; measures nothing
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from benchmarks import (
    accuracy,
    captures,
    families,
    gpu_forms,
    gpu_iterations,
    gpu_networks,
    imbalance,
    learning,
    left_out,
    mlperf_dlrm,
    placement,
    sharding_study,
    speed,
)
from benchmarks.docs import write_page
from benchmarks.gpu_bars import POOLED, find_shared_data
from perfkit.__main__ import run_command
from perfkit.calibration.campaign import calibrate
from perfkit.ground.files import find_reference
from perfkit.measure.machine import count_cores

_FOLDER = Path(".perfkit/bench")


def _calibration(*, quick: bool) -> Path:
    """This machine's platform file, kept from an interrupted round of benchmarks or made now."""
    file = _FOLDER / "platform.toml"
    if file.exists():
        print(f"takes the calibration in {file}; remove it to calibrate again")
    else:
        calibrate(out=file, quick=quick)
    return file


def _list_parts(platform: Path, *, quick: bool) -> Iterator[tuple[ModuleType, list[str]]]:
    """Every benchmark and its arguments: those that measure, then what others or earlier runs have measured."""

    def keep(name: str) -> list[str]:
        return ["--json", str(_FOLDER / f"{name}.json")]

    def shorten(*words: str) -> list[str]:
        return [*words] if quick else []

    raw, here = platform.with_suffix(".measurements.json"), ["--platform", str(platform)]
    yield accuracy, [*here, *keep("accuracy"), *shorten("--quick")]
    if raw.exists():
        checks = map(str, sorted(_FOLDER.glob("accuracy.check-*.json")))
        yield learning, [str(raw), "--check", *checks, *keep("learning"), *shorten("--draws", "1")]
    if count_cores() > 1:
        yield imbalance, [*here, *keep("imbalance"), *shorten("--models", "1", "--seconds", "0.5")]
    yield speed, [*here, *keep("speed"), *shorten("--rounds", "5")]
    yield placement, [*keep("placement"), *shorten("--quick")]
    yield captures, keep("captures")
    try:
        find_shared_data()
        yield gpu_forms, [*keep("gpu_forms"), *shorten("--systems", POOLED.replace("+", ","))]
    except ValueError as error:
        print(f"gpu_forms is left out: {error}")
    for module in (gpu_iterations, gpu_networks, mlperf_dlrm):
        yield module, keep(module.__name__.rpartition(".")[2])
    measured = find_reference("measured")
    for study in sorted(measured.glob("*.sharding-*.json")):
        yield sharding_study, ["--saved", str(study), "--platform", study.name.split(".")[0]]
    yield left_out, [*keep("left_out"), *shorten("--draws", "1", "--folds", "2")]
    if not quick:  # fits a platform dozens of times
        checks = map(str, sorted(measured.glob("zen3-2.check-*.json")))
        yield families, [str(measured / "zen3-2.measurements.json"), "--check", *checks, *keep("families")]


def main(words: Sequence[str] | None = None) -> int:
    """Run everything; returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="All tables of accuracy, learning, speed and more.")
    parser.add_argument(
        "--platform", type=Path, metavar="P.toml", help="calibration of this machine; default: make one"
    )
    parser.add_argument("--quick", action="store_true", help="small everywhere, to see that everything works")
    parser.add_argument("--docs", action="store_true", help="write docs/accuracy.md again, from committed runs")
    arguments = parser.parse_args(words)

    def run() -> int:
        if arguments.docs:
            write_page()
            return 0
        _FOLDER.mkdir(parents=True, exist_ok=True)
        platform = arguments.platform or _calibration(quick=arguments.quick)
        for module, own in _list_parts(platform, quick=arguments.quick):
            print(f"\n{module.__name__.rpartition('.')[2]}\n")
            if code := module.main(own):
                return int(code)
        return 0

    return run_command(run, name="benchmarks")


if __name__ == "__main__":
    sys.exit(main())
