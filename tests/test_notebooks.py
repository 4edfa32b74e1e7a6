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
from typing import Any, NamedTuple

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh", FOLDER / "refresh.py")
    assert spec is not None
    assert spec.loader is not None
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
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", output


def test_tidy_removes_what_one_session_leaves(refresh: ModuleType) -> None:
    timing = {"execution": {"iopub.execute_input": "2026-01-01"}, "tags": ["nbval-skip"]}
    cells = []
    for metadata in (timing, {}, {"tags": ["answer"]}):
        cell = {"cell_type": "code", "source": "1 + 1", "execution_count": 1, "id": "x"}
        cells.append({**cell, "outputs": [], "metadata": metadata})
    cells[1]["outputs"] = [{"metadata": {"isolated": True}}]
    metadata = {
        "widgets": {},
        "kernelspec": {"name": "mine"},
        "language_info": {"name": "python", "version": "3.11.7"},
    }
    tidy = refresh.tidy({"cells": cells, "metadata": metadata})
    assert tidy["metadata"]["kernelspec"]["name"] == "python3"
    assert "widgets" not in tidy["metadata"]
    assert tidy["metadata"]["language_info"] == {"name": "python"}
    hidden = {"source_hidden": True, "outputs_hidden": True}
    assert [cell["metadata"] for cell in tidy["cells"]] == [
        {"tags": ["nbval-skip"]},
        {},
        {"tags": ["answer"], "jupyter": hidden},
    ]
    assert len({cell["id"] for cell in tidy["cells"]}) == 3
    assert refresh.tidy(json.loads(json.dumps(tidy))) == tidy, "tidy stays tidy"


#: Notebooks that capture or measure need torch.
TORCH = {"16_any_module", "17_read_a_trace", "18_calibrate_this_machine"}
UNITS = r"(%|times|x|[munµ]?s|[kMGT]i?B(?:/s)?|[kMGT]FLOP(?:/s)?)"
NUMBER = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)(?: ?{UNITS}(?![\w/]))?")


class Cell(NamedTuple):
    """A cell of a notebook."""

    kind: str  # "markdown" or "code"
    source: str
    outputs: str  # what it printed or returned, as text
    tags: list[str]


class Lesson(NamedTuple):
    """A notebook and its cells."""

    path: Path
    cells: list[Cell]

    def join_sources(self, kind: str) -> str:
        """Text of all cells of a kind."""
        return "\n".join(cell.source for cell in self.cells if cell.kind == kind)


def read_lesson(path: Path) -> Lesson:
    cells = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        outputs = [read_output(output) for output in cell.get("outputs", [])]
        tags = cell["metadata"].get("tags", [])
        cells.append(Cell(cell["cell_type"], "".join(cell["source"]), "\n".join(outputs), tags))
    return Lesson(path, cells)


def read_output(output: dict[str, Any]) -> str:
    """What was printed or returned, as text."""
    if "text" in output:
        return "".join(output["text"])
    return "".join(output.get("data", {}).get("text/plain", ""))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def lesson(request: pytest.FixtureRequest) -> Lesson:
    return read_lesson(request.param)


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
    for sentence in sentences:
        if re.search("https?://|arXiv|doi", sentence):
            continue
        for written, value, unit in find_numbers(sentence):
            digits = len(written.partition(".")[2])
            rounding = 0.5 * 10.0**-digits * (1 + 1e-9)
            values = [other for _, other, of in known if of in ("", unit)]
            if unit == "%":
                values += [100 * other for _, other, of in known if of == ""]
            is_proved = any(abs(other - value) <= rounding for other in values)
            if unit and not is_proved:
                unproved.append(f"{written} {unit}")
    return unproved


def test_numbers_in_prose_are_looked_for_in_outputs() -> None:
    outputs = "a 39.9 ms, 1.486 x\nb 0.204 │ 8.19 kB"
    proved = "It takes 40 ms, 1.49 times as long, 20 % of it; `3 ms`, $4 s$, 5 rows; 8.2 kB."
    assert find_unproved(proved, outputs) == []
    partly = "It takes 39.8 ms. 1.5 ms, see https://x.org. Then 8.2 MB, 21 %."
    assert find_unproved(partly, outputs) == ["39.8 ms", "8.2 MB", "21 %"]


def test_the_prose_of_a_lesson_says_what_its_outputs_show(lesson: Lesson) -> None:
    outputs = "\n".join(cell.outputs for cell in lesson.cells)
    assert find_unproved(lesson.join_sources("markdown"), outputs) == []
    assert " at 0x" not in outputs, "nobody reads the address of an object"


def is_exercises(cell: Cell) -> bool:
    return cell.source.startswith("## Exercises")


def count_before_exercises(lesson: Lesson) -> int:
    return len(list(takewhile(lambda cell: not is_exercises(cell), lesson.cells)))


def test_a_lesson_begins_with_its_goal_and_a_short_setup(lesson: Lesson) -> None:
    title, setup = lesson.cells[:2]
    assert title.source.startswith(f"# {int(lesson.path.name[:2])}. ")
    for word in ("Goal", "Before this", "Minutes"):
        assert f"**{word}" in title.source
    assert setup.kind == "code"
    assert len(ast.parse(setup.source).body) <= 6
    sources = "\n".join(cell.source for cell in lesson.cells)
    before_questions = sources.split("**Question")[0]
    assert len(before_questions.split()) <= 300, "what comes before the first question is short"


def test_a_lesson_is_short_and_has_a_takeaway_for_each_question(lesson: Lesson) -> None:
    assert count_before_exercises(lesson) <= 15
    prose = lesson.join_sources("markdown")
    questions = prose.count("**Question")
    assert questions >= 2
    assert prose.count("**Takeaway") == questions


def test_a_lesson_has_three_exercises_with_executed_answers(lesson: Lesson) -> None:
    answers = [place for place, cell in enumerate(lesson.cells) if "answer" in cell.tags]
    assert len(answers) == 3
    start = count_before_exercises(lesson)
    code = [place for place, cell in enumerate(lesson.cells) if cell.kind == "code"]
    assert answers == [place for place in code if place > start]
    for place in answers:
        assert lesson.cells[place - 1].kind == "markdown", "the exercise"
        assert lesson.cells[place].outputs


def test_links_of_a_lesson_lead_somewhere_and_its_last_cell_back_and_on(lesson: Lesson) -> None:
    assert re.search(r"\]\(.*\.ipynb\)", lesson.cells[-1].source)
    for link in re.findall(r"\]\((?!http)([^)#]+)", lesson.join_sources("markdown")):
        assert (FOLDER / link).exists(), link


def test_a_lesson_uses_perfkit_as_pk_and_torch_only_where_it_must(lesson: Lesson) -> None:
    imported = set()
    for node in ast.walk(ast.parse(lesson.join_sources("code"))):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            assert not home.startswith(("perfkit", "benchmarks")), "lessons use perfkit as pk"
            imported |= {home, *(name.name for name in node.names)}
    for name in imported:
        assert name == "perfkit" or not name.startswith("perfkit")
    if lesson.path.stem not in TORCH:
        assert "torch" not in imported


def test_lessons_start_without_torch() -> None:
    lines = []
    for path in NOTEBOOKS:
        if path.stem not in TORCH:
            code = [cell.source for cell in read_lesson(path).cells if cell.kind == "code"]
            lines += code[:2]
    script = "\n".join([*lines, "import sys", "assert 'torch' not in sys.modules"])
    run = subprocess.run([sys.executable, "-c", script], cwd=FOLDER, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
