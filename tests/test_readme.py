"""The README shows what works: its Python runs as pasted, its commands exist, its picture is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfkit.prediction.comparison import Comparison
from perfkit.resources import find_reference

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_works_as_pasted():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 11
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", block], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "bert-large, batch 8, sequence 512 on 1 of 8 ranks of h100-sxm-8" in run.stdout


def test_targets_and_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make (\w+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for command in re.findall(r"-m perfkit (\w+)", TEXT):
        assert f'add("{command}"' in (ROOT / "perfkit" / "__main__.py").read_text(encoding="utf-8"), command


def test_linked_files_exist():
    for link in re.findall(r"\]\((?!http)([^)]+)\)", TEXT):
        assert (ROOT / link).exists(), link


def test_the_table_and_the_picture_are_those_of_the_committed_runs():
    files = sorted(find_reference("measured").glob("zen3-2.check-*.json"))
    rows = {row["family"]: row for row in Comparison.pool([Comparison.load(f) for f in files]).summary().to_dicts()}
    table = TEXT[TEXT.index("**Iterations of any model.**") :].split("| family |")[1].split("\n\n")[0]
    names = ["dlrm", "transformer", "convolution", "xlnet", "hybrid", "ddp", "all"]
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    for name, (_, n, geomean, mean, largest, bias, floor, inside, bar) in zip(names, shown, strict=True):
        row = rows[name]
        figures = [float(text.replace("−", "-")) for text in (geomean, mean, bias, floor, largest, inside)]
        expected = [row[key] for key in ("geomean", "mean", "bias", "floor", "max", "inside")]
        assert int(n) == row["n"] and bar.endswith("met")
        assert figures[:4] == pytest.approx(expected[:4], abs=0.06), name
        assert figures[4:] == pytest.approx(expected[4:], abs=0.6), name
    picture = (ROOT / "docs" / "predicted_vs_measured.svg").read_text(encoding="utf-8")
    row = rows["all"]
    assert f"{row['n']} runs: error {row['geomean']:.1f}% geometric mean, {row['mean']:.1f}% mean" in picture
