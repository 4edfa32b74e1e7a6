"""Searches of the site rank pages as the site does; `make docs` tries them on the index that it has
built."""

import json
from pathlib import Path

import pytest

from tests import site_search
from tests.site_search import SEARCHES, main, read_index, search

pytest.importorskip("sphinx", reason="pip install 'perfkit[docs]' brings it")

#: Two pages: a glossary with one entry of the index, and a recipe.
INDEX = {
    "docnames": ["docs/glossary", "docs/recipes"],
    "titles": ["Glossary", "Recipes"],
    "alltitles": {"Glossary": [[0, None]], "Recipes": [[1, None]], "Which GPU?": [[1, "which"]]},
    "indexentries": {"pareto front": [[0, "term-pareto-front", True]]},
    "objects": {"perfkit": [[1, 0, 1, "#perfkit.shard", "shard"]]},
    "terms": {"front": [0, 1], "schedul": 1},
    "titleterms": {"recip": 1, "gpu": 1},
}


def write_site(folder: Path) -> Path:
    text = f"Search.setIndex({json.dumps(INDEX)})"
    (folder / "searchindex.js").write_text(text, encoding="utf-8")
    return folder


def test_pages_are_ranked_as_by_the_site(tmp_path: Path) -> None:
    index = read_index(write_site(tmp_path))

    def found(query: str) -> list[tuple[str, float]]:
        return [(result.page, result.score) for result in search(index, query)]

    assert found("Pareto") == [("docs/glossary", 50)]  # half of an entry of the index
    assert found("front") == [("docs/glossary", 5), ("docs/recipes", 5)]  # less than half: words
    assert found("scheduling") == [("docs/recipes", 5)]  # by its stem
    assert found("shard") == [("docs/recipes", 11 + 5)]  # the last part of a name
    assert found("which gpu?") == [("docs/recipes", 15)]
    assert found("front gpu") == [("docs/recipes", 15)]  # both words are on one page alone
    assert found("nothing") == []


def test_a_search_that_misses_its_page_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"Pareto": ["docs/glossary"], "Slurm": ["docs/recipes"]}
    monkeypatch.setattr(site_search, "SEARCHES", wanted)
    assert main(write_site(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "search for 'Slurm' finds [], none of ['docs/recipes']" in printed
    assert "1 of 2 searches find their page" in printed


def test_a_site_that_was_not_built_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run make docs first"):
        read_index(tmp_path)


@pytest.mark.repository
def test_each_search_names_pages_that_there_are() -> None:
    root = Path(__file__).resolve().parent.parent
    for query, pages in SEARCHES.items():
        for page in pages:
            assert (root / f"{page}.md").exists() or (root / f"{page}.ipynb").exists(), query
    assert len(SEARCHES) >= 20


def test_terms_of_the_field_are_in_the_glossary() -> None:
    root = Path(__file__).resolve().parent.parent
    text = (root / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = {
        word
        for line in text.splitlines()
        if line[:2] == "| "
        for word in line.split(" | ")[0][2:].split(", ")
    }
    field = [
        "HSDP",
        "ZeRO",
        "Pareto front",
        "MFU",
        "bubble",
        "GQA",
        "EP",
        "latency",
        "dtype",
        "MLP",
    ]
    assert {*field, "confidence interval", "Slurm", "exposed communication", "FSDP"} <= terms
