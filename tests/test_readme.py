"""The README shows what works: its Python runs as pasted, its commands exist, its figures are committed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import PAGE, fill_page, run_benchmark
from benchmarks.helpers.saved_runs import pool_checks
from perfkit.calibration.checks import Comparison
from perfkit.commands.group import COMMANDS
from perfkit.ground.files import find_reference

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
ACCURACY = PAGE.read_text(encoding="utf-8")


def test_it_is_short():
    assert TEXT.count("\n") <= 120


def test_python_works_as_pasted_and_prints_what_is_shown():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    words = [sys.executable, "-W", "ignore", "-X", "utf8", "-c", block]
    run = subprocess.run(words, capture_output=True, encoding="utf-8", cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout == shown


@pytest.mark.repository
def test_targets_and_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make (\w+)", TEXT + ACCURACY):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    (commands,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for command in re.findall(r"perfkit (\w+)", commands):
        assert command in COMMANDS, command


def test_linked_files_and_notebooks_exist():
    for link in re.findall(r"\]\((?!http)([^)]+)\)", TEXT):
        assert (ROOT / link).exists(), link
    notebooks = re.findall(r"`(\d\d_\w+)`", TEXT)
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(notebooks)


def test_errors_that_lessons_print_are_those_of_the_lessons():
    """`5.4 % off in mean (lesson 14)` is what an output of lesson 14 says."""
    said = re.findall(r"(\d+\.\d) %[^.|]*?\(lesson (\d+)", TEXT)
    assert [lesson for _, lesson in said] == ["14", "16"]
    for error, lesson in said:
        (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
        assert f"mean error {error} %" in path.read_text(encoding="utf-8"), (lesson, error)


def rows(text: str) -> list[list[str]]:
    """Cells of the accuracy table."""
    lines = text.split("| what, on which machine, when |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_table_and_the_picture_are_those_of_the_committed_runs():
    shown, zen3, xeon = rows(TEXT), pool_checks("zen3-2"), pool_checks("xeon-2").at_usual_pace()
    assert len(shown) <= 8
    expected = {row["family"]: row for row in zen3.summary().to_dicts()}
    foreign = Comparison.load(find_reference("measured", "xeon-3.foreign-0.json")).at_usual_pace()
    found = [expected[name] for name in ("dlrm", "transformer", "hybrid")]
    found += [comparison.summary().to_dicts()[-1] for comparison in (xeon, foreign)]
    for (name, n, *figures), row in zip(shown[:5], found, strict=True):
        assert int(n) == row["n"]
        values = [float(text.replace("−", "-")) for text in figures]
        assert values[:4] == pytest.approx(
            [row[k] for k in ("geomean", "mean", "bias", "floor")], abs=0.06
        ), name
        assert values[4] == pytest.approx(row["inside"], abs=0.6), name
    quantities = (
        r"a100_sxm\+h100_sxm +collective, two parameters",
        r"a100_sxm\+h100_sxm +GEMM +random fifth",
    )
    quantities += (r"mpt a100 +one size left out",)
    for (_, *figures), quantity in zip(shown[5:], quantities, strict=True):
        line = re.search(rf"^{quantity}.*$", ACCURACY, re.MULTILINE)
        assert line and {text.replace("−", "-") for text in figures if text} <= set(
            line[0].split()
        ), figures
    picture = (ROOT / "docs" / "predicted_vs_measured.svg").read_text(encoding="utf-8")
    row = expected["all"]
    assert (
        f"{row['n']} runs: error {row['geomean']:.1f}% geometric mean, {row['mean']:.1f}% mean"
        in picture
    )


def test_the_page_of_accuracy_is_what_the_benchmarks_print():
    """Without those that need more than a few seconds, PyTorch or data that are not committed."""
    slow = ("left_out", "gpu_networks", "gpu_forms", "gpu_context", "gpu_vision")
    assert (
        fill_page(
            ACCURACY, lambda words: None if words.split()[0] in slow else run_benchmark(words)
        )
        == ACCURACY
    )
