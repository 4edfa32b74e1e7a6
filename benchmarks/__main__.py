"""All benchmarks, one after the other; calibrates this machine first unless a platform file is given.

python -m benchmarks [--platform P.toml] [--quick]
python -m benchmarks --docs    # only writes docs/accuracy.md again, from committed runs; measures nothing
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import AbsentError, command, find_shared_data
from benchmarks.docs import write_page
from benchmarks.gpu_bars import POOLED
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


def _list_parts(platform: Path, *, quick: bool) -> Iterator[tuple[str, list[str]]]:
    """Every benchmark and its arguments: those that measure, then what others or earlier runs have measured."""

    def keep(name: str) -> list[str]:
        return ["--json", str(_FOLDER / f"{name}.json")]

    def shorten(*words: str) -> list[str]:
        return [*words] if quick else []

    raw, here = platform.with_suffix(".measurements.json"), ["--platform", str(platform)]
    yield "accuracy", [*here, *keep("accuracy"), *shorten("--quick")]
    if raw.exists():
        checks = map(str, sorted(_FOLDER.glob("accuracy.check-*.json")))
        yield "learning", [str(raw), "--check", *checks, *keep("learning"), *shorten("--draws", "1")]
    if count_cores() > 1:
        yield "imbalance", [*here, *keep("imbalance"), *shorten("--models", "1", "--seconds", "0.5")]
    yield "speed", [*here, *keep("speed"), *shorten("--rounds", "5")]
    yield "peers", keep("peers")
    yield "placement", [*keep("placement"), *shorten("--quick")]
    yield "captures", keep("captures")
    if find_spec("transformers"):
        yield "gpu_vision", keep("gpu_vision")
    try:
        find_shared_data()
        yield "gpu_forms", [*keep("gpu_forms"), *shorten("--systems", POOLED.replace("+", ","))]
        yield "gpu_networks", keep("gpu_networks")
    except AbsentError as error:
        print(f"gpu_forms and gpu_networks are left out: {error}")
    yield from ((name, keep(name)) for name in ("gpu_iterations", "mlperf_dlrm"))
    measured = find_reference("measured")
    for study in sorted(measured.glob("*.sharding-*.json")):
        yield "sharding_study", ["--saved", str(study), "--platform", study.name.split(".")[0]]
    yield "left_out", [*keep("left_out"), *shorten("--draws", "1", "--folds", "2")]
    if not quick:  # fits a platform dozens of times
        checks = map(str, sorted(measured.glob("zen3-2.check-*.json")))
        raw = measured / "zen3-2.measurements.json"
        yield "learning", [str(raw), "--families", "--check", *checks, *keep("families")]


@command({
    "--platform": {"type": Path, "metavar": "P.toml", "help": "calibration of this machine; default: make one"},
    "--quick": {"action": "store_true", "help": "small everywhere, to see that everything works"},
    "--docs": {"action": "store_true", "help": "write docs/accuracy.md again, from committed runs"},
})  # fmt: skip
def main(given: Any) -> int:
    """All tables of accuracy, learning, speed and more."""
    if given.docs:
        write_page()
        return 0
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for name, own in _list_parts(given.platform or _calibration(quick=given.quick), quick=given.quick):
        print(f"\n{name}\n")
        if code := import_module(f"benchmarks.{name}").main(own):
            return int(code)
    return 0
