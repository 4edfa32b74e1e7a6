"""The documentation site: what its pages link to and name exists. `make docs` checks the rest while
it builds."""

import pkgutil
import re
from pathlib import Path

import pytest
import vl_convert

import perfkit
from perfkit import plots

pytestmark = pytest.mark.repository
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
TEACHING = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
CONFIGURATION = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Names of its headings, as GitHub and MyST write them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def list_lessons() -> list[str]:
    """Names of notebooks with exercises."""
    notebooks = (ROOT / "notebooks").glob("*.ipynb")
    return [path.stem for path in notebooks if "## Exercises" in path.read_text(encoding="utf-8")]


def test_each_public_name_is_on_one_page_of_the_interface() -> None:
    modules = {"fitting", "models", "plots", "units", "workloads"}
    described: list[str] = []
    for page in (ROOT / "docs").glob("api_*.md"):
        text = page.read_text(encoding="utf-8")
        described += re.findall(r"\.\. auto(?:function|class|exception):: perfkit\.(\w+)", text)
    assert sorted(described) == sorted(set(perfkit.__all__) - modules)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_links_to_and_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text):
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}#{anchor}"
    for name in re.findall(r"`pk\.([\w.]+)(?:\([^`]*\))?`", text):
        pkgutil.resolve_name(f"perfkit.{name}")  # raises where there is none


def test_the_index_leads_to_every_page_and_every_lesson() -> None:
    entries: set[str] = set()
    for tree in re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", INDEX, re.DOTALL):
        entries.update(tree.split())
    assert {page.stem for page in PAGES} - entries == {"index"}
    lessons = list_lessons()
    assert lessons
    for lesson in lessons:
        assert f"`{lesson}`" in TEACHING


def test_minutes_of_the_instructors_page_are_those_of_the_lessons() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", TEACHING, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(list_lessons())
    for name, minutes in rows:
        lesson = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
        assert re.findall(r"\*\*Minutes\.\*\* About (\d+)", lesson) == [minutes], name


def test_charts_of_the_site_are_shown_on_its_page() -> None:
    page = (ROOT / "docs" / "charts.md").read_text(encoding="utf-8")
    made = re.findall(r'"(\w+)": plots\.ask_', CONFIGURATION)
    shown = re.findall(r'src="charts/(\w+)\.html"', page)
    assert set(made) == set(shown)
    assert len(shown) == 3


def list_texts(picture: str) -> list[str]:
    """All words of a picture, in their order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture)


def test_pictures_of_charts_with_sliders_are_those_that_are_drawn() -> None:
    calls = re.findall(r'"(\w+)": plots\.(ask_.+\)),\n', CONFIGURATION)
    assert len(calls) == 3
    for name, call in calls:
        function, arguments = call.split("(", 1)
        chart = getattr(plots, function)(**eval(f"dict({arguments}"))
        drawn = list_texts(vl_convert.vegalite_to_svg(chart.to_json()))
        stored = list_texts((ROOT / "docs" / f"chart_{name}.svg").read_text(encoding="utf-8"))
        assert drawn == stored, name
        assert len(stored) > 10, name
