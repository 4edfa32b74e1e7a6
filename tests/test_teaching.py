"""The page for instructors: its table of lessons, its classes, and its solutions."""

import re
from types import ModuleType

import pytest

from tests.lessons import FOLDER, NOTEBOOKS, read_lesson
from tests.test_notebooks import TORCH, answers

PAGE = FOLDER.parent / "docs" / "teaching.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\d\d_\w+)` \| (\d+) \| (.*?) \| .+ \|$", re.MULTILINE)

__all__ = ["answers"]  # a fixture


def test_its_table_has_all_lessons_with_their_minutes_and_needs() -> None:
    rows = {name: (minutes, needs) for name, minutes, needs in ROW.findall(TEXT)}
    assert [*rows] == [path.stem for path in NOTEBOOKS]
    for path in NOTEBOOKS:
        title = read_lesson(path).cells[0].source
        minutes, needs = rows[path.stem]
        (said,) = re.findall(r"\*\*Minutes\.\*\* About (\d+)", title)
        (before,) = re.findall(r"\*\*Before this\.\*\* (.*)", title)
        assert minutes == said
        assert re.findall(r"`(\d\d)`", needs) == sorted({*re.findall(r"\((\d\d)_", before)})
        assert ("PyTorch" in needs) == (path.stem in TORCH)


def test_its_classes_name_lessons_that_exist() -> None:
    numbers = {path.stem[:2] for path in NOTEBOOKS}
    for number in re.findall(r"`(\d\d)`", TEXT):
        assert number in numbers


@pytest.mark.filterwarnings("ignore")
def test_its_solutions_print_what_it_says(answers: ModuleType) -> None:
    assert TEXT.count("<details>") == TEXT.count("```python") == 2
    assert answers.fill_page(TEXT) == TEXT, "run `python notebooks/answers.py docs/teaching.md`"
