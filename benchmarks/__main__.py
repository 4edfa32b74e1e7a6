"""All benchmarks, one after the other; calibrates this machine first unless a platform file is
given.

    python -m benchmarks --list
    python -m benchmarks [--platform P.toml] [--quick]
    python -m benchmarks --docs

With --list nothing runs: every benchmark is listed with its question. With --docs nothing is
measured: the tables of docs/accuracy.md and benchmarks/README.md are written again. A table below a
marked command is what this command prints.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import perfkit as pk
from benchmarks.accuracy import SEEDS
from benchmarks.gpu_forms import PAIR
from benchmarks.helpers.catalogue import (
    NEEDS,
    README,
    Benchmark,
    Need,
    fill_readme,
    find_benchmark,
    format_benchmarks,
    format_duration,
)
from benchmarks.helpers.command import command
from benchmarks.helpers.files import AbsentError, find_shared_data
from benchmarks.helpers.saved_runs import pool_checks
from perfkit.calibration.campaign import calibrate
from perfkit.ground.files import find_reference
from perfkit.ground.results import Picture
from perfkit.measure.machine import count_cores
from perfkit.platform.estimates import keep_quiet
from perfkit.plots import use_svg

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
_BLOCK = re.compile(
    r"(?P<head><!-- python -m benchmarks\.(?P<command>.+?) -->\n\n```text\n)(?P<printed>.*?)(?=```\n)",
    re.DOTALL,
)
_FOLDER = Path(".perfkit/bench")
#: How long `perfkit calibrate` takes on two cores, in full and with --quick [s].
_CALIBRATION, _QUICK_CALIBRATION = 300.0, 150.0


# The page of accuracy.


def run_benchmark(command: str) -> str | None:
    """What a benchmark prints; None if its data are not here. A missed bar is no failure."""
    name, *words = command.split()
    printed = StringIO()
    with redirect_stdout(printed):
        code = import_module(f"benchmarks.{name}").main(words)
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    if not any(lines) or code not in (0, 1):
        return None
    return "\n".join(lines) + "\n"


def fill_page(text: str, run: Callable[[str], str | None] = run_benchmark) -> str:
    """The page with every block printed again; a block stays if its data are not here."""

    def print_again(block: re.Match[str]) -> str:
        printed = run(block["command"])
        return block["head"] + (printed or block["printed"])

    return _BLOCK.sub(print_again, text)


def draw_top() -> Picture:
    """Where the time of the first prediction of the README goes."""
    llama = pk.Transformer.preset(
        "llama-3-8b",
        batch=64,
        sequence=8192,
        dtype="bf16",
        mixed=True,
        parallel="fsdp",
        checkpoint=True,
    )
    with keep_quiet():  # the README prints what it warns of
        return pk.predict(llama, "a100-sxm-8x8", ranks=64).chart()


def write_page() -> None:
    """Fill docs/accuracy.md and benchmarks/README.md, and draw the pictures of README and page."""
    use_svg()  # with the colours and fonts of the notebooks
    draw_top().save(PAGE.with_name("prediction.svg"))
    pool_checks("zen3-2").chart().save(PAGE.with_name("predicted_vs_measured.svg"))
    PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    README.write_text(fill_readme(README.read_text(encoding="utf-8")), encoding="utf-8")


# All benchmarks.


@dataclass(frozen=True)
class Part:
    """A benchmark that is to run, with its arguments, and about how long it takes [s]."""

    name: str
    arguments: Sequence[str]
    seconds: float


def find_fault(need: Need) -> str | None:
    """Why this machine lacks what a benchmark needs; None if it has it."""
    if need is Need.SHARED:
        try:
            find_shared_data()
        except AbsentError as error:
            return str(error)
    elif (need is Need.CORES and count_cores() < 2) or (
        need in (Need.TORCH, Need.TRANSFORMERS) and not find_spec(need.value)
    ):
        return f"it needs {NEEDS[need]}"
    return None


def _list_arguments(
    platform: Path, *, quick: bool, is_raw_here: bool
) -> Iterator[tuple[str, list[str]]]:
    """Benchmarks and their arguments: first those that measure, then those of earlier or published
    measurements."""
    measured = find_reference("measured")
    raw = platform.with_suffix(".measurements.json")
    here = ["--platform", str(platform)]
    checks = [str(_FOLDER / f"accuracy.check-{seed}.json") for seed in SEEDS]

    def shorten(*words: str) -> list[str]:
        return list(words) if quick else []

    yield "accuracy", [*here, "--json", str(_FOLDER / "accuracy.json"), *shorten("--quick")]
    if is_raw_here:
        yield "learning", [str(raw), "--check", *checks, *shorten("--draws", "1")]
    yield "imbalance", [*here, *shorten("--models", "1", "--seconds", "0.5")]
    if not quick:
        yield "sharded", here
        yield "memory", []
        yield "foreign", here
        yield "cpu_truth", [*here, "--seed", "1"]
    yield "speed", [*here, *shorten("--rounds", "5")]
    yield "peers", []
    yield "placement", shorten("--quick")
    yield "plan_limits", shorten("--quick")
    yield "captures", []
    yield "capture_cases", []
    yield "scripts", []
    yield "drawn_models", ["--saved", str(measured / "drawn-models.json")]
    yield "versions", ["--saved", str(measured / "torch-versions.json")]
    yield "gpu_vision", []
    yield "encoders", []
    yield "walk", []
    yield "checks", ["zen3-2"]
    yield "gpu_steps", ["--saved", str(measured / "h100-1.check-1.json")]
    yield "gpu_survey", ["--saved", str(measured / "h200-2.survey.json")]
    yield "gpu_forms", shorten("--systems", ",".join(PAIR))
    yield "few_nodes", []
    yield "gpu_networks", []
    yield "gpu_unet", []
    yield "traced", []
    yield "v100_embeddings", []
    yield "lookups", []
    yield "host_tables", []
    yield "updates", []
    yield "published_memory", []
    yield "fixes", shorten("--count", "4")
    for name in (
        "gpu_products",
        "gpu_attention",
        "gpu_iterations",
        "mlperf_dlrm",
        "regions",
        "offload",
        "context_parallel",
        "lora",
        "deepseek",
        "dlrm_strategies",
    ):
        yield name, []
    for study in sorted(measured.glob("*.sharding-*.json")):
        machine = study.name.split(".")[0]
        yield "sharding_study", ["--saved", str(study), "--platform", machine]
    yield "left_out", ["--draws", "1", "--folds", "2"]  # as docs/accuracy.md shows it
    if not quick:
        yield "strategies_beside", []
        yield "few_sizes", []
        yield "gpu_context", []
        yield "scale", []
        yield "stacks", []
        # fits a platform dozens of times
        saved = [str(file) for file in sorted(measured.glob("zen3-2.check-*.json"))]
        raw = measured / "zen3-2.measurements.json"
        yield "learning", [str(raw), "--families", "--check", *saved]


def _find_first_fault(benchmark: Benchmark) -> str | None:
    """The first thing that a benchmark needs and this machine lacks; None if it has everything."""
    for need in benchmark.needs:
        fault = find_fault(need)
        if fault is not None:
            return fault
    return None


def list_parts(platform: Path, *, quick: bool, is_raw_here: bool) -> list[Part]:
    """What will run here; what is left out is printed with the reason."""
    parts = []
    for name, arguments in _list_arguments(platform, quick=quick, is_raw_here=is_raw_here):
        benchmark = find_benchmark(name)
        fault = _find_first_fault(benchmark)
        if fault is not None:
            print(f"{name} is left out: {fault}")
            continue
        seconds = benchmark.seconds
        if quick and benchmark.quick_seconds is not None:
            seconds = benchmark.quick_seconds
        parts.append(Part(name, arguments, seconds))
    return parts


def run_all(platform: Path | None, *, quick: bool) -> int:
    """Run every benchmark that can run here, and say before each how long it takes."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    file = platform or _FOLDER / "platform.toml"
    calibrates = platform is None and not file.exists()
    is_raw_here = calibrates or file.with_suffix(".measurements.json").exists()
    parts = list_parts(file, quick=quick, is_raw_here=is_raw_here)
    total = sum(part.seconds for part in parts)
    if calibrates:
        calibration = _QUICK_CALIBRATION if quick else _CALIBRATION
        total += calibration
    print(f"{len(parts)} benchmarks, about {format_duration(total)} in total on two cores")
    if calibrates:
        print(f"calibrates this machine first, about {format_duration(calibration)}")
        calibrate(out=file, quick=quick)
    elif platform is None:
        print(f"takes the calibration in {file}; remove it to calibrate again")
    for part in parts:
        duration = format_duration(part.seconds)
        print(
            f"\n{part.name}, about {duration}: {find_benchmark(part.name).question}\n", flush=True
        )
        code = import_module(f"benchmarks.{part.name}").main(part.arguments)
        if code:
            return int(code)
    return 0


@command(
    {
        "--list": {
            "action": "store_true",
            "help": "list the benchmarks: question, needs, time, and what rests on each",
        },
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
            "help": "only write the tables of docs/accuracy.md and benchmarks/README.md again",
        },
    }
)
def main(given: Any) -> int:
    """All tables of accuracy, learning, speed and more."""
    if given.list:
        print(format_benchmarks())
        return 0
    if given.docs:
        write_page()
        return 0
    return run_all(given.platform, quick=given.quick)
