"""The page for instructors: its table of lessons, its classes, and its solutions."""

import re
from types import ModuleType

import pytest

from tests.lessons import FOLDER, NOTEBOOKS, read_lesson
from tests.test_notebooks import TORCH, answers

PAGE = FOLDER.parent / "docs" / "teaching.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\d\d_\w+)` \| (\d+) \| (.*?) \| .+ \|$", re.MULTILINE)
CLASS = re.compile(r"^\| ([a-z][\w ,]+) \| (\d+) \| (`\d\d`.*) \|$", re.MULTILINE)

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


def list_lessons(words: str) -> list[str]:
    """Numbers of the lessons that a class names; ``00` to `03`` are four."""
    numbers: list[str] = []
    for first, last in re.findall(r"`(\d\d)`(?: to `(\d\d)`)?", words):
        numbers += [f"{number:02d}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def test_a_class_has_all_that_its_lessons_need_in_order_and_says_how_long_it_takes() -> None:
    minutes = {name[:2]: int(minutes) for name, minutes, _ in ROW.findall(TEXT)}
    needs = {name[:2]: re.findall(r"`(\d\d)`", needed) for name, _, needed in ROW.findall(TEXT)}
    classes = CLASS.findall(TEXT)
    assert len(classes) == 5
    for name, said, words in classes:
        lessons = list_lessons(words.partition(";")[0])
        for place, lesson in enumerate(lessons):
            missing = set(needs[lesson]) - set(lessons[:place])
            assert not missing, f"{name}: {lesson} needs {missing}"
        assert int(said) == sum(minutes[lesson] for lesson in lessons), name


def test_it_names_the_folders_that_lessons_read() -> None:
    for path in NOTEBOOKS:
        for folder in re.findall(r"\.\./(?:tests/)?[a-z_]+", read_lesson(path).join_code()):
            assert f"`{folder}`" in TEXT, f"{path.stem} reads {folder}"


@pytest.mark.filterwarnings("ignore")
def test_its_solutions_print_what_it_says(answers: ModuleType) -> None:
    assert TEXT.count("<details>") == TEXT.count("```python") == 2
    assert answers.fill_page(TEXT) == TEXT, "run `python notebooks/answers.py docs/teaching.md`"
