"""The documentation site: what its pages link to and name exists. `make docs` checks the rest while
it builds."""

import pkgutil
import re
from pathlib import Path

import pytest
import vl_convert

from perfkit import plots

pytestmark = pytest.mark.repository
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Names of its headings, as GitHub and MyST write them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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
    trees = re.findall(r"```\{toctree\}\n(?::[^\n]*\n)*\n(.*?)```", INDEX, re.DOTALL)
    entries = {entry for tree in trees for entry in tree.split()}
    assert {page.stem for page in PAGES} - entries == {"index"}
    teaching = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
    notebooks = (ROOT / "notebooks").glob("*.ipynb")
    lessons = {
        path.stem for path in notebooks if "## Exercises" in path.read_text(encoding="utf-8")
    }
    assert lessons and not {name for name in lessons if f"`{name}`" not in teaching}


def test_minutes_of_the_instructors_page_are_those_of_the_lessons() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \|",
        (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    lessons = {
        name: (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8") for name, _ in rows
    }
    said = {
        name: re.findall(r"\*\*Minutes\.\*\* About (\d+)", text) for name, text in lessons.items()
    }
    assert len(rows) == 17 and said == {name: [minutes] for name, minutes in rows}


def test_charts_of_the_site_are_shown_on_its_page() -> None:
    made = set(
        re.findall(r'"(\w+)": plots\.ask_', (ROOT / "docs" / "conf.py").read_text(encoding="utf-8"))
    )
    shown = re.findall(
        r'src="charts/(\w+)\.html"', (ROOT / "docs" / "charts.md").read_text(encoding="utf-8")
    )
    assert made == set(shown) and len(shown) == 3


def test_pictures_of_charts_with_sliders_are_those_that_are_drawn() -> None:
    source = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    for name, call in re.findall(r'"(\w+)": plots\.(ask_.+\)),\n', source):
        maker, given = call.split("(", 1)
        chart = getattr(plots, maker)(**eval(f"dict({given}"))
        stored = (ROOT / "docs" / f"chart_{name}.svg").read_text(encoding="utf-8")
        pictures = vl_convert.vegalite_to_svg(chart.to_json()), stored
        drawn, kept = (re.findall(r"<text[^>]*>([^<]*)</text>", svg) for svg in pictures)
        assert drawn == kept and len(kept) > 10, name
