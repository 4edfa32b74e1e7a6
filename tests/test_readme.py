"""The README shows what works: its Python runs as pasted, its commands exist, its picture is there."""

import re
import subprocess
import sys
from pathlib import Path

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
