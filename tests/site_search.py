"""Searches of the documentation site that must lead to their page.

python -m tests.site_search site  reads the index that `make docs` has built, and ranks pages as the
script of the site does: titles, entries of the index, names of the interface, words.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What people have searched for, and the pages of which one must be among the first results.
SEARCHES: Mapping[str, Sequence[str]] = {
    "FSDP": ["docs/glossary", "docs/recipes"],
    "HSDP": ["docs/glossary"],
    "MFU": ["docs/glossary"],
    "tokens per second": ["docs/glossary"],
    "TorchRec": ["docs/recipes"],
    "ShardingPlan": ["docs/glossary"],
    "does it fit": ["docs/glossary", "docs/recipes"],
    "checkpoint": ["docs/glossary", "docs/recipes"],
    "cost": ["docs/recipes", "notebooks/09_what_if_and_cost"],
    "NVLink bandwidth": ["docs/glossary", "docs/recipes", "docs/api_platforms"],
    "nccl-tests": ["docs/glossary", "docs/recipes"],
    "fp8": ["docs/glossary"],
    "straggler": ["docs/glossary", "notebooks/07_overlap_and_stragglers"],
    "report": ["docs/recipes", "docs/api_predictions"],
    "with_nodes": ["docs/api_platforms"],
    "Hugging Face": ["docs/recipes"],
    "offload": ["docs/glossary", "docs/recipes"],
    "Slurm": ["docs/glossary", "docs/recipes"],
    "upgrade": ["docs/upgrading"],
    "Pareto": ["docs/glossary"],
    "confidence interval": ["docs/glossary"],
    "ZeRO": ["docs/glossary"],
    "GQA": ["docs/glossary"],
    "latency": ["docs/glossary"],
    "dtype": ["docs/glossary"],
    "MLP": ["docs/glossary"],
    "bubble": ["docs/glossary"],
    "record a trace": ["docs/glossary", "docs/recipes"],
    "changelog": ["CHANGELOG"],
}
#: Among so many results a page must be [-].
FIRST = 5
#: Scores of the script of Sphinx (searchtools.js).
_TITLE, _PART_OF_TITLE, _WORD, _PART_OF_WORD = 15, 7, 5, 2
_NAME, _PART_OF_NAME = 11, 6
_PRIORITIES = {0: 15, 1: 5, 2: -5}
_INDEX = 100


@dataclass(frozen=True)
class Result:
    """A page that a search finds."""

    page: str
    score: float


def read_index(site: Path) -> dict[str, Any]:
    """The index of a site.

    Raises
    ------
    ValueError
        If the site has none.
    """
    path = site / "searchindex.js"
    if not path.exists():
        raise ValueError(f"{path} is not there; run make docs first")
    text = path.read_text(encoding="utf-8")
    index: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return index


def list_files(entry: Any) -> list[int]:
    """Pages of a word: one number or several."""
    return entry if isinstance(entry, list) else [entry]


def search_titles(index: dict[str, Any], query: str) -> Iterator[Result]:
    """Headings of which the query is at least half."""
    for title, places in index["alltitles"].items():
        if query in title.lower() and len(query) >= len(title) / 2:
            for file, _ in places:
                bonus = index["titles"][file] == title
                yield Result(
                    index["docnames"][file], round(_TITLE * len(query) / len(title)) + bonus
                )


def search_entries(index: dict[str, Any], query: str) -> Iterator[Result]:
    """Entries of the index, such as terms of the glossary, of which the query is at least half."""
    for entry, places in index["indexentries"].items():
        if query in entry and len(query) >= len(entry) / 2:
            for place in places:
                yield Result(index["docnames"][place[0]], round(_INDEX * len(query) / len(entry)))


def search_names(index: dict[str, Any], query: str) -> Iterator[Result]:
    """Names of the interface."""
    for prefix, members in index["objects"].items():
        for file, _, priority, _, name in members:
            whole = f"{prefix}.{name}".lower()
            if query not in whole:
                continue
            is_last = query in (whole, whole.split(".")[-1])
            score = (_NAME if is_last else _PART_OF_NAME) + _PRIORITIES.get(priority, 0)
            yield Result(index["docnames"][file], score)


def score_word(index: dict[str, Any], word: str) -> dict[int, float]:
    """Pages with a word, and how much it counts there."""
    scores: dict[int, float] = {}
    for table, whole, part in (
        ("terms", _WORD, _PART_OF_WORD),
        ("titleterms", _TITLE, _PART_OF_TITLE),
    ):
        words = {word: whole}
        if word not in index[table] and len(word) > 2:
            words = {term: part for term in index[table] if word in term}
        for term, score in words.items():
            for file in list_files(index[table].get(term, [])):
                scores[file] = max(scores.get(file, 0), score)
    return scores


def search_words(index: dict[str, Any], query: str) -> Iterator[Result]:
    """Pages that have all words of the query, which are compared by their stems."""
    from sphinx.search.en import SearchEnglish

    language = SearchEnglish({})
    words = [word for word in re.findall(r"\w+", query) if word not in language.stopwords]
    found = [score_word(index, language.stem(word)) for word in words]
    for file in set.intersection(*(set(scores) for scores in found)) if found else ():
        yield Result(index["docnames"][file], max(scores[file] for scores in found))


def search(index: dict[str, Any], query: str) -> list[Result]:
    """Pages in the order in which the site lists them."""
    query = query.lower()
    best: dict[str, float] = {}
    for function in (search_titles, search_entries, search_names, search_words):
        for result in function(index, query):
            best[result.page] = max(best.get(result.page, result.score), result.score)
    results = [Result(page, score) for page, score in best.items()]
    titles = dict(zip(index["docnames"], index["titles"], strict=True))
    return sorted(results, key=lambda result: (-result.score, titles[result.page].lower()))


def main(site: Path) -> int:
    """Try all searches; 1 if one of them misses its page."""
    index = read_index(site)
    missed = 0
    for query, pages in SEARCHES.items():
        first = [result.page for result in search(index, query)][:FIRST]
        if not set(pages) & set(first):
            missed += 1
            print(f"search for {query!r} finds {first}, none of {list(pages)}")
    print(f"{len(SEARCHES) - missed} of {len(SEARCHES)} searches find their page")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
