"""The report is one file that opens without a network, says what the results say, and treats every
name as text."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest

import perfkit as pk
from perfkit.__main__ import main
from perfkit.calibration.checks import Comparison
from perfkit.ground.results import Reported, Sections, write_cells

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"quoted\" 'too' & url(#clip0)"
)
MODEL = pk.DLRM(rows=[1000] * 4, dim=16, pooling=2, batch=64, bottom=[16], top=[16])
Row = dict[str, Any]


def some_run(number: int, family: str, error: float) -> Row:
    """A run of a comparison, as `perfkit check` writes it."""
    measured = 0.004 * (number + 1)
    predicted = measured * (1 + error)
    return {
        "family": family,
        "name": f"{family.lower()} {number}",
        "config": {"batch": 64, "dim": 16},
        "ranks": 1,
        "predicted_s": predicted,
        "low_s": predicted * 0.87,
        "high_s": predicted * 1.15,
        "measured_s": measured,
        "measured_q1_s": measured * 0.98,
        "measured_q3_s": measured * 1.03,
        "flagged": number == 2,
        # at the usual pace of the machine
        "relative_s": 0.5 * measured,
        "relative_noise": 0.0321,
        "bottleneck": "GEMM",
        "noise": 0.034,
    }


def some_comparison(**changes: Any) -> Comparison:
    """Five runs; the first one has these changes."""
    runs = [
        some_run(0, "DLRM", 0.04) | changes,
        some_run(1, "DLRM", -0.11),
        some_run(2, "BERT", 0.07),
        some_run(3, "GPT-2", 0.3),
        some_run(4, "DLRM", -0.02),
    ]
    return Comparison(tuple(runs), "synthetic", {"processor": "x"}, {"perfkit": "0.1.0"})


@dataclass(frozen=True)
class Kind:
    """A kind of result: how to make one on a platform, and what its report says."""

    make: Callable[[pk.Platform], Any]
    texts: tuple[str, ...]


def predict(toy: pk.Platform) -> pk.Prediction:
    return pk.predict(MODEL, toy, ranks=2)


def compare(toy: pk.Platform) -> Any:
    return pk.compare(toy, "a100-sxm-8", MODEL, ranks=1)


def shard(toy: pk.Platform) -> pk.ShardingResult:
    return pk.shard(MODEL, toy, ranks=2, steps=50)


def sweep(toy: pk.Platform) -> pk.Sweep:
    return pk.sweep(pk.DLRM, {"batch": [64, 128]}, toy)


def check(toy: pk.Platform) -> Comparison:
    return some_comparison()


def calibrate(toy: pk.Platform) -> pk.Platform:
    return toy


KINDS = {
    "prediction": Kind(predict, ("80% interval", "embedding_forward", "Assumptions")),
    "comparison": Kind(compare, ("fp32 peak", "19.5 TFLOP/s")),
    "sharding": Kind(shard, ("unique-rows", "memory share", "table_wise")),
    "sweep": Kind(sweep, ("samples a second", "2 configurations of dlrm on toy")),
    "check": Kind(
        check,
        (
            "7.13 %</td>",
            "+30.0%",
            "12 ms (11.8 ms to 12.4 ms)",
            "processor",
            "at the usual pace",
            "3.21 %</td>",
        ),
    ),
    "calibration": Kind(
        calibrate, ("invented for tests", "all_reduce.2 alpha", "collective models")
    ),
}


def make_all(toy: pk.Platform) -> list[Any]:
    """A result of each kind."""
    return [kind.make(toy) for kind in KINDS.values()]


class Day(date):
    """The day of all reports."""

    @classmethod
    def today(cls) -> "Day":
        return cls(2031, 2, 3)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a report on a fixed day, and read it."""
    monkeypatch.setattr("perfkit.reports.page.date", Day)

    def write_and_read(*results: Any, **texts: str) -> str:
        page = pk.report(*results, path=tmp_path / "report.html", **texts)
        return page.read_text(encoding="utf-8")

    return write_and_read


class Tag(NamedTuple):
    """An element of a page."""

    name: str
    attributes: Row


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[Tag] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(Tag(tag, dict(attrs)))


@lru_cache(maxsize=4)
def list_tags(page: str) -> tuple[Tag, ...]:
    """All elements of a page, in their order; those of the last pages are kept."""
    reader = _Reader()
    reader.feed(page)
    return tuple(reader.tags)


TAGS_OF_PAGES = {"html", "head", "meta", "title", "style", "body", "script"}
TAGS_OF_TEXT = {"h1", "h2", "p", "b", "details", "summary", "pre", "figure", "div"}
TAGS_OF_TABLES = {"table", "tr", "th", "td"}
TAGS_OF_PICTURES = {"svg", "g", "path", "text", "tspan", "rect", "line", "defs", "clippath"}


def check_page(page: str) -> None:
    """Nothing is fetched, one known script may run, pictures have texts and ids of their own."""
    names = {tag.name for tag in list_tags(page)}
    assert names <= TAGS_OF_PAGES | TAGS_OF_TEXT | TAGS_OF_TABLES | TAGS_OF_PICTURES
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    check_policy(page, script)
    without_script = page.replace(script, "")
    check_attributes(without_script)
    check_pictures(without_script)


def check_policy(page: str, script: str) -> None:
    """The one script that may run is the one that stands there."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rows = [tag.attributes for tag in list_tags(page)]
    (policy,) = [row["content"] for row in rows if "http-equiv" in row]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def check_attributes(page: str) -> None:
    """No attribute runs code, and none leads out of the page."""
    for tag in list_tags(page):
        for name, value in tag.attributes.items():
            assert not name.startswith("on")
            assert name not in ("src", "href", "xlink:href") or value.startswith("#")
    assert "@import" not in page
    assert not re.search(r"=\"url\((?!#)|e\+308", page)
    ids = [tag.attributes["id"] for tag in list_tags(page) if "id" in tag.attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'="url\(#([^)]+)\)"', page)) <= set(ids)


def check_pictures(page: str) -> None:
    """Each chart is there as a picture with an alternative text, and for the script."""
    tags = list_tags(page)
    texts = [tag.attributes["aria-label"] for tag in tags if tag.name == "div"]
    pictures = [tag for tag in tags if tag.name == "svg"]
    assert len(texts) == len(pictures) == page.count('type="application/json"') > 0
    assert all(len(text) > 20 for text in texts)


pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")


def test_every_kind_of_result_makes_a_page_that_needs_no_network(
    toy: pk.Platform, write: Any
) -> None:
    texts = {"title": "A title", "author": "An Author", "notes": "First.\n\nSecond."}
    results = make_all(toy)
    page = write(*results, **texts)
    check_page(page)
    shown = unescape(re.sub(r"<script.*?</script>|<svg.*?</svg>", "", page, flags=re.S))
    for text in ("A title", "An Author · 2031-02-03 · perfkit", "First.\n\nSecond."):
        assert text in shown, text
    for kind in KINDS.values():
        for text in kind.texts:
            assert text in shown, text
    for result in results:
        assert result.headline() in shown
        for warning in getattr(result, "warnings", ()):
            assert warning in shown, warning
    headline = shown.index(results[0].headline())
    assert headline < shown.index("2031-02-03") < shown.index("<table>")
    assert shown.count(f"<h2>{pk.Platform.report_title}</h2>") == 2, "each platform once"
    assert page == write(*make_all(toy), **texts), "equal bytes"


def test_every_name_is_text(toy: pk.Platform, write: Any) -> None:
    named = replace(toy, name=HOSTILE, provenance={HOSTILE: HOSTILE})
    comparison = some_comparison(name=HOSTILE, family=HOSTILE, bottleneck=HOSTILE)
    comparison = replace(comparison, machine={HOSTILE: HOSTILE, "disturbances": HOSTILE})
    page = write(pk.predict(MODEL, named), comparison, title=HOSTILE, author=HOSTILE, notes=HOSTILE)
    check_page(page)
    families = []
    for text in re.findall(r'<script type="application/json">(.*?)</script>', page):
        for rows in json.loads(text)["datasets"].values():
            families += [row.get("family") for row in rows]
    assert HOSTILE in families
    assert f"{HOSTILE} (disturbed measurements)" in unescape(page)


@pytest.mark.parametrize(
    ("results", "more", "said"),
    [
        ((), {}, r"results\[0\] is None; pass what predict"),
        ((3,), {}, r"results\[0\] is 3; pass what predict"),
        ((pk.Platform,), {}, r"results\[0\] is "),
        ((some_comparison(),), {"path": "no/such/report.html"}, "path is .*folder does not exist"),
    ],
)
def test_what_is_no_result_is_refused(results: Any, more: Row, said: str, tmp_path: Path) -> None:
    options = {"path": tmp_path / "report.html"} | more
    with pytest.raises(ValueError, match=said):
        pk.report(*results, **options)
    assert list(tmp_path.iterdir()) == []


def test_commands_write_reports(
    toy: pk.Platform, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    platform, page = toy.save(tmp_path / "toy.toml"), tmp_path / "page.html"
    line = f"predict --model bert-base --batch 2 --sequence 32 --platform {platform} --report {page} --json -"
    assert main(line.split()) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["workload"] in page.read_text("utf-8")
    assert main(f"shard --measure --platform {platform} --report {page}".split()) == 2
    assert "report is given; it is for a search" in capsys.readouterr().err


def find_browser() -> str:
    """A browser of this machine; the test is skipped where there is none."""
    names = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip(f"no browser is installed: none of {', '.join(names)}")


def test_a_browser_draws_every_chart_without_a_complaint(
    toy: pk.Platform, write: Any, tmp_path: Path
) -> None:
    browser = find_browser()
    figures = write(*make_all(toy)).count("<figure>")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        f"{tmp_path}/report.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert done.stdout.count('<div class="vega-embed') == figures > 8


def test_words_without_end_do_not_widen_the_page(tmp_path: Path) -> None:
    """A browser breaks them where the page ends; tables keep whole words."""
    tables = pk.TableSet((pk.EmbeddingTable(1000, 16),))
    page = pk.report(tables, path=tmp_path / "a.html", notes="n" * 1000)
    style = page.read_text(encoding="utf-8").split("</style>")[0]
    assert re.search(r"body \{[^}]*overflow-wrap: break-word", style)


def test_a_narrow_screen_shows_whole_charts_and_paper_shows_no_folded_table(write: Any) -> None:
    """Charts of 600 pixels were cut on a phone; the numbers of a platform printed forty pages."""
    page = write(some_comparison())
    style = page.split("</style>")[0]
    assert re.search(r"figure svg \{[^}]*max-width: 100%; height: auto", style)
    printed = style.split("@media print")[1]
    unfolded = re.findall(r"([^\s;{}]*)::details-content", printed)
    assert unfolded == ["details.warnings"]
    assert page.count('<details class="warnings">') == page.count("what makes this less certain")


class OneSection(Reported):
    """A result with one section."""

    report_title = "One section"

    def __init__(self, part: Any) -> None:
        self.part = part

    def headline(self) -> str:
        return "result(1) of (2)"

    def sections(self) -> Sections:
        yield "Findings", self.part


def test_the_headline_of_a_result_is_shown_whole(write: Any) -> None:
    """It was cut where it looked like a call of Python."""
    page = write(OneSection([("quantity", "value"), ("a", "1")]))
    assert '<p class="answer">result(1) of (2)</p>' in page
    model = replace(pk.Transformer.bert(layers=2, batch=8), name="bert(small)")
    exploration = pk.explore(model, "h100-sxm-8", ranks=2)
    page = unescape(write(exploration))
    assert f'<p class="answer">{exploration.headline()}</p>' in page
    assert "bert(small), batch 8" in exploration.headline()


def test_the_heading_of_a_result_is_not_cut_in_the_middle(write: Any) -> None:
    page = write(pk.TableSet((pk.EmbeddingTable(1000, 16),)))
    assert "<h1>Embedding tables that every sample of a batch looks up</h1>" in page


@pytest.mark.parametrize("part", [{"a": 1}, object(), 3.0, [("quantity", "value"), ("a", 1.5)]])
def test_a_section_that_is_no_table_and_no_chart_is_refused(part: Any, tmp_path: Path) -> None:
    """The page would show the beginning of its repr."""
    takes = "a report takes a frame, rows of text with their heads first, a chart, or another"
    with pytest.raises(ValueError, match=rf"^section 'Findings' of OneSection is .*; {takes}"):
        pk.report(OneSection(part), path=tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def list_results() -> list[type[Reported]]:
    """Every kind of result that has a name in `perfkit`; `capture` and `record` are none, and need
    torch."""
    results = []
    for name in pk.__all__:
        kind = None if name in ("capture", "record") else getattr(pk, name)
        if isinstance(kind, type) and issubclass(kind, Reported):
            results.append(kind)
    return results


RESULTS = list_results()


@pytest.mark.parametrize("kind", RESULTS)
def test_every_kind_of_result_says_what_it_is_and_what_it_found(kind: type[Reported]) -> None:
    assert len(RESULTS) >= 8
    assert "\n" not in kind.report_title and not kind.report_title.endswith(".")
    assert kind.headline is not Reported.headline


@pytest.mark.parametrize(
    ("column", "name", "cell"),
    [
        ("peak_flop_per_s", "peak", "989 TFLOP/s"),
        ("memory_bytes_per_s", "memory", "3.35 TB/s"),
        ("ridge_flop_per_byte", "ridge", "295 FLOP/B"),
    ],
)
def test_rates_of_different_units_stand_in_one_table(column: str, name: str, cell: str) -> None:
    values = {"peak": 989e12, "memory": 3.35e12, "ridge": 295.0}
    frame = pl.DataFrame({column: [values[name]]})
    assert write_cells(frame) == [[name], [cell]]
