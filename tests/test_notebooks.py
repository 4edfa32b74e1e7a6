"""Notebooks are committed as `make refresh` leaves them: executed from top to bottom, small, free
of machine traces."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh", FOLDER / "refresh.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_fresh(path: Path, refresh: ModuleType) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    counts = [
        cell["execution_count"]
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and cell["source"]
    ]
    advice = f"run `python notebooks/refresh.py {path.name}`"
    assert counts == list(range(1, len(counts) + 1)), advice
    assert refresh.tidy(json.loads(text)) == notebook, advice
    assert len(text) < 300_000, "show fewer points or aggregate before charting"
    errors = [
        o
        for cell in notebook["cells"]
        for o in cell.get("outputs", [])
        if o["output_type"] == "error"
    ]
    assert not errors


def test_tidy_removes_what_one_session_leaves(refresh: ModuleType) -> None:
    cell = {"cell_type": "code", "source": "1 + 1", "outputs": [], "execution_count": 1, "id": "x"}
    timing = {"execution": {"iopub.execute_input": "2026-01-01"}, "tags": ["nbval-skip"]}
    kept = (
        {"tags": ["nbval-skip"]},
        {},
        {"tags": ["answer"], "jupyter": dict.fromkeys(("source_hidden", "outputs_hidden"), True)},
    )
    cells = [{**cell, "metadata": metadata} for metadata in (timing, {}, {"tags": ["answer"]})]
    cells[1]["outputs"] = [{"metadata": {"isolated": True}}]
    about = {
        "kernelspec": {"name": "mine"},
        "language_info": {"name": "python", "version": "3.11.7"},
    }
    once = refresh.tidy({"cells": cells, "metadata": {"widgets": {}, **about}})
    assert once["metadata"]["kernelspec"]["name"] == "python3" and "widgets" not in once["metadata"]
    assert once["metadata"]["language_info"] == {"name": "python"}
    assert tuple(cell["metadata"] for cell in once["cells"]) == kept
    assert len({cell["id"] for cell in once["cells"]}) == 3
    assert refresh.tidy(json.loads(json.dumps(once))) == once


#: Notebooks that capture or measure need torch.
TORCH = {"07_any_module", "10_read_a_trace", "11_calibrate_this_machine"}
UNITS = r"(%|times|x|[munµ]?s|[kMGT]i?B(?:/s)?|[kMGT]FLOP(?:/s)?)"
NUMBER = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?{UNITS}(?![\w/]))?")


def read_cells(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Kind, source and whole of every cell."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"]), cell) for cell in cells]


def read_outputs(cell: dict[str, Any]) -> str:
    """What a cell printed or returned, as text."""
    outputs = cell.get("outputs", [])
    return "\n".join(
        "".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in outputs
    )


def find_numbers(text: str) -> Iterator[tuple[str, float, str]]:
    """Numbers as written, their values, and their units."""
    for written, unit in NUMBER.findall(text):
        yield written, float(written.replace(",", "")), {"x": "times", "us": "µs"}.get(unit, unit)


def find_unproved(prose: str, outputs: str) -> list[str]:
    """Numbers with a unit in prose that no output has, to the digits of the prose; cited sentences
    are excepted.

    A number without a unit in an output (a column of a frame) fits every unit, and as a share also
    ``%``.
    """
    known = list(find_numbers(outputs))
    prose = re.sub(r"\$\$.*?\$\$|\$[^$]*\$|`[^`]*`", "", prose, flags=re.DOTALL)
    sentences = re.split(r"(?<=[.?!:]) |\n", prose)
    unproved = []
    for sentence in (part for part in sentences if not re.search("https?://|arXiv|doi", part)):
        for written, value, unit in find_numbers(sentence):
            half = 0.5 * 10.0 ** -len(written.partition(".")[2]) * (1 + 1e-9)
            shares = [100 * other for _, other, of in known if unit == "%" and not of]
            values = [other for _, other, of in known if of in ("", unit)] + shares
            if unit and not any(abs(other - value) <= half for other in values):
                unproved.append(f"{written} {unit}")
    return unproved


def test_numbers_in_prose_are_looked_for_in_outputs():
    outputs = "a 39.9 ms, 1.486 x\nb 0.204 │ 8.19 kB"
    proved = "It takes 40 ms, 1.49 times as long, 20 % of it; `3 ms`, $4 s$, 5 rows; 8.2 kB."
    assert find_unproved(proved, outputs) == []
    assert find_unproved(
        "It takes 39.8 ms. 1.5 ms, see https://x.org. Then 8.2 MB, 21 %.", outputs
    ) == [
        "39.8 ms",
        "8.2 MB",
        "21 %",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lesson_has_the_shape_of_lessons_and_its_prose_says_what_outputs_show(path: Path) -> None:
    cells = read_cells(path)
    before = list(takewhile(lambda cell: not cell[1].startswith("## Exercises"), cells))
    prose = "\n".join(source for kind, source, _ in cells if kind == "markdown")
    outputs = "\n".join(read_outputs(cell) for _, _, cell in cells)
    assert find_unproved(prose, outputs) == []
    assert " at 0x" not in outputs, "nobody reads the address of an object"
    assert len(before) <= 15
    assert cells[0][1].startswith(f"# {int(path.name[:2])}. ")
    assert all(f"**{word}" in cells[0][1] for word in ("Goal", "Before this", "Minutes"))
    assert cells[1][0] == "code" and len(ast.parse(cells[1][1]).body) <= 6
    setup = "\n".join(source for _, source, _ in cells).split("**Question")[0]
    assert len(setup.split()) <= 300, "what comes before the first question is short"
    assert 2 <= prose.count("**Question") == prose.count("**Takeaway"), (
        "one takeaway for each question"
    )
    answers = [
        i for i, (_, _, cell) in enumerate(cells) if "answer" in cell["metadata"].get("tags", [])
    ]
    assert answers == [
        i for i, (kind, _, _) in enumerate(cells) if kind == "code" and i > len(before)
    ]
    assert len(answers) == 3 and all(
        cells[i - 1][0] == "markdown" and read_outputs(cells[i][2]) for i in answers
    )
    assert re.search(r"\]\(.*\.ipynb\)", cells[-1][1]), "the last cell leads back and on"
    assert all((FOLDER / link).exists() for link in re.findall(r"\]\((?!http)([^)#]+)", prose))
    for node in ast.walk(
        ast.parse("\n".join(source for kind, source, _ in cells if kind == "code"))
    ):
        names = (
            {name.name for name in node.names}
            if isinstance(node, ast.Import | ast.ImportFrom)
            else set()
        )
        home = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        assert not home.startswith(("perfkit", "benchmarks")), "lessons use perfkit as pk"
        assert all(name == "perfkit" or not name.startswith("perfkit") for name in names)
        assert path.stem in TORCH or "torch" not in {home, *names}


def test_lessons_start_without_torch() -> None:
    starts = []
    for path in (path for path in NOTEBOOKS if path.stem not in TORCH):
        starts += [source for kind, source, _ in read_cells(path) if kind == "code"][:2]
    script = "\n".join([*starts, "import sys", "assert 'torch' not in sys.modules"])
    run = subprocess.run([sys.executable, "-c", script], cwd=FOLDER, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
