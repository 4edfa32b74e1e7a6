"""All benchmarks, one after the other; calibrates this machine first unless a platform file is given.

python -m benchmarks [--platform P.toml] [--quick]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import accuracy, gpu_forms, learning, placement, speed
from benchmarks.gpu_bars import POOLED, find_shared_data
from perfkit.__main__ import run_command
from perfkit.campaign import calibrate

__all__ = ["main"]

_FOLDER = Path(".perfkit/bench")


def _calibration(*, quick: bool) -> Path:
    """This machine's platform file, kept from an interrupted round of benchmarks or made now."""
    file = _FOLDER / "platform.toml"
    if file.exists():
        print(f"takes the calibration in {file}; remove it to calibrate again")
    else:
        calibrate(out=file, quick=quick)
    return file


def _judge_gpus(*, quick: bool) -> int:
    """Forms of GPUs on other people's measurements, where these are at hand."""
    try:
        find_shared_data()
    except ValueError as error:
        print(f"gpu_forms is left out: {error}")
        return 0
    systems = ["--systems", POOLED.replace("+", ",")] if quick else []
    return gpu_forms.main([*systems, "--json", str(_FOLDER / "gpu_forms.json")])


def main(words: Sequence[str] | None = None) -> int:
    """Run everything; returns the first exit code that is not 0."""
    parser = argparse.ArgumentParser(
        prog="benchmarks", description="The accuracy, learning, speed and placement tables."
    )
    parser.add_argument(
        "--platform", type=Path, metavar="P.toml", help="calibration of this machine; default: make one"
    )
    parser.add_argument("--quick", action="store_true", help="small everywhere, to see that everything works")
    arguments = parser.parse_args(words)
    more = ["--quick"] if arguments.quick else []

    def run() -> int:
        _FOLDER.mkdir(parents=True, exist_ok=True)
        platform = arguments.platform or _calibration(quick=arguments.quick)
        raw, table = platform.with_suffix(".measurements.json"), _FOLDER / "accuracy.json"
        code = accuracy.main(["--platform", str(platform), "--json", str(table), *more])
        checks = [str(file) for file in sorted(_FOLDER.glob("accuracy.check-*.json"))]
        if not code and raw.exists():
            draws = ["--draws", "1"] if arguments.quick else []
            code = learning.main([str(raw), "--check", *checks, "--json", str(_FOLDER / "learning.json"), *draws])
        repeats = ["--rounds", "5"] if arguments.quick else []
        code = code or speed.main(["--platform", str(platform), "--json", str(_FOLDER / "speed.json"), *repeats])
        code = code or placement.main(["--json", str(_FOLDER / "placement.json"), *more])
        return code or _judge_gpus(quick=arguments.quick)

    return run_command(run, name="benchmarks")


if __name__ == "__main__":
    sys.exit(main())
