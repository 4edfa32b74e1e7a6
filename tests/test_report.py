"""The report is one file that opens without a network, says what the results say, and treats every
name as text."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk
from perfkit.__main__ import main
from perfkit.calibration.checks import Comparison
from perfkit.ground.results import Reported, Sections

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"quoted\" 'too' & url(#clip0)"
)
MODEL = pk.DLRM(rows=[1000] * 4, dim=16, pooling=2, batch=64, bottom=[16], top=[16])
Row = dict[str, Any]
Make = Callable[[pk.Platform], Any]


def some_comparison(**changes: Any) -> Comparison:
    runs, errors = (
        [],
        (("DLRM", 0.04), ("DLRM", -0.11), ("BERT", 0.07), ("GPT-2", 0.3), ("DLRM", -0.02)),
    )
    for i, (family, error) in enumerate(errors):
        time, measured = 0.004 * (i + 1) * (1 + error), 0.004 * (i + 1)
        run: Row = {
            "family": family,
            "name": f"{family.lower()} {i}",
            "config": {"batch": 64, "dim": 16},
            "ranks": 1,
        }
        run |= {
            "predicted_s": time,
            "low_s": time * 0.87,
            "high_s": time * 1.15,
            "measured_s": measured,
        }
        run |= {
            "measured_q1_s": measured * 0.98,
            "measured_q3_s": measured * 1.03,
            "flagged": i == 2,
        }
        # at the usual pace of the machine
        run |= {"relative_s": 0.5 * measured, "relative_noise": 0.0321}
        runs.append(run | {"bottleneck": "GEMM", "noise": 0.034})
    runs[0] |= changes
    return Comparison(tuple(runs), "synthetic", {"processor": "x"}, {"perfkit": "0.1.0"})


#: A result of each kind and what its report says.
KINDS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "prediction": (
        lambda toy: pk.predict(MODEL, toy, ranks=2),
        ("80% interval", "embedding_forward", "Assumptions"),
    ),
    "comparison": (
        lambda toy: pk.compare(toy, "a100-sxm-8", MODEL, ranks=1),
        ("fp32 peak", "19.5 TFLOP/s"),
    ),
    "sharding": (
        lambda toy: pk.shard(MODEL, toy, ranks=2, steps=50),
        ("unique-rows", "memory share", "table_wise"),
    ),
    "sweep": (
        lambda toy: pk.sweep(pk.DLRM, {"batch": [64, 128]}, toy),
        ("samples a second", "2 configurations of dlrm on toy"),
    ),
    "check": (
        lambda toy: some_comparison(),
        (
            "7.13</td>",
            "+30.0%",
            "12 ms (11.8 ms to 12.4 ms)",
            "processor",
            "at the usual pace",
            "3.21</td>",
        ),
    ),
    "calibration": (
        lambda toy: toy,
        ("invented for tests", "all_reduce.2 alpha", "collective models"),
    ),
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a report on a fixed day, and read it."""

    class Day(date):
        today = classmethod(lambda cls: cls(2031, 2, 3))  # type: ignore[assignment]

    monkeypatch.setattr("perfkit.reports.page.date", Day)
    return lambda *results, **more: pk.report(
        *results, path=tmp_path / "report.html", **more
    ).read_text("utf-8")


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, Row]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def check_page(page: str) -> None:
    """Nothing is fetched, one known script may run, pictures have texts and ids of their own."""
    tags, (script,) = Tags(page).found, re.findall(r"<script>(.*?)</script>", page, re.S)
    text = "html head meta title style body script h1 h2 p b details summary table tr th td pre figure div "
    assert {tag for tag, _ in tags} <= {
        *(text + "svg g path text tspan rect line defs clippath").split()
    }
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [row["content"] for tag, row in tags if "http-equiv" in row]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    drawn = page.replace(script, "")
    for name, value in [pair for _, row in Tags(drawn).found for pair in row.items()]:
        assert not name.startswith("on") and (
            name not in ("src", "href", "xlink:href") or value.startswith("#")
        )
    assert "@import" not in drawn and not re.search(r"=\"url\((?!#)|e\+308", drawn)
    ids = [row["id"] for tag, row in Tags(drawn).found if "id" in row]
    assert len(ids) == len(set(ids)) and set(re.findall(r'="url\(#([^)]+)\)"', drawn)) <= set(ids)
    pictures, drawn_twice = (
        [row for tag, row in tags if tag == "div"],
        [tag for tag, _ in tags if tag == "svg"],
    )
    assert len(pictures) == len(drawn_twice) == drawn.count('type="application/json"') > 0
    assert all(len(row["aria-label"]) > 20 for row in pictures), "alternative texts"


pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")


def test_every_kind_of_result_makes_a_page_that_needs_no_network(
    toy: pk.Platform, write: Any
) -> None:
    about: Row = {"title": "A title", "author": "An Author", "notes": "First.\n\nSecond."}
    results = [make(toy) for make, _ in KINDS.values()]
    page = write(*results, **about)
    check_page(page)
    shown = unescape(re.sub(r"<script.*?</script>|<svg.*?</svg>", "", page, flags=re.S))
    said = [text for _, texts in KINDS.values() for text in texts]
    said += [
        text for result in results for text in (repr(result), *getattr(result, "warnings", ()))
    ]
    for text in ("A title", "An Author · 2031-02-03 · perfkit", "First.\n\nSecond.", *said):
        assert text in shown, text
    assert shown.index(repr(results[0])) < shown.index("2031-02-03") < shown.index("<table>")
    assert shown.count(f"<h2>{(pk.Platform.__doc__ or '').partition('.')[0]}</h2>") == 2, (
        "each platform once"
    )
    assert page == write(*[make(toy) for make, _ in KINDS.values()], **about), "equal bytes"


def test_every_name_is_text(toy: pk.Platform, write: Any) -> None:
    named = replace(toy, name=HOSTILE, provenance={HOSTILE: HOSTILE})
    comparison = some_comparison(name=HOSTILE, family=HOSTILE, bottleneck=HOSTILE)
    comparison = replace(comparison, machine={HOSTILE: HOSTILE, "disturbances": HOSTILE})
    page = write(pk.predict(MODEL, named), comparison, title=HOSTILE, author=HOSTILE, notes=HOSTILE)
    check_page(page)
    specs = [
        json.loads(text)
        for text in re.findall(r'<script type="application/json">(.*?)</script>', page)
    ]
    assert any(
        row.get("family") == HOSTILE
        for spec in specs
        for rows in spec["datasets"].values()
        for row in rows
    )
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
    with pytest.raises(ValueError, match=said):
        pk.report(*results, **({"path": tmp_path / "report.html"} | more))
    assert not [*tmp_path.iterdir()]


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


def test_a_browser_draws_every_chart_without_a_complaint(
    toy: pk.Platform, write: Any, tmp_path: Path
) -> None:
    names = ("chromium", "chromium-headless-shell", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"no browser is installed: none of {', '.join(names)}")
    figures = write(*(make(toy) for make, _ in KINDS.values())).count("<figure>")
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
    )
    command = [
        browser,
        *options,
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
    assert "<p><b>result(1) of (2)</b></p>" in page
    model = replace(pk.Transformer.bert(layers=2, batch=8), name="bert(small)")
    exploration = pk.explore(model, "h100-sxm-8", ranks=2)
    page = unescape(write(exploration))
    assert f"<p><b>{exploration.headline()}</b></p>" in page
    assert exploration.headline().startswith("bert(small), batch 8")


def test_the_heading_of_a_result_is_not_cut_in_the_middle(write: Any) -> None:
    page = write(pk.TableSet((pk.EmbeddingTable(1000, 16),)))
    assert "<h2>Embedding tables that every sample of a batch looks up</h2>" in page


@pytest.mark.parametrize("part", [{"a": 1}, object(), 3.0, [("quantity", "value"), ("a", 1.5)]])
def test_a_section_that_is_no_table_and_no_chart_is_refused(part: Any, tmp_path: Path) -> None:
    """The page would show the beginning of its repr."""
    takes = "a report takes a frame, rows of text with their heads first, a chart, or another"
    with pytest.raises(ValueError, match=rf"^section 'Findings' of OneSection is .*; {takes}"):
        pk.report(OneSection(part), path=tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


#: Every kind of result that has a name in `perfkit`.
RESULTS = [
    kind
    for kind in (getattr(pk, name) for name in pk.__all__)
    if isinstance(kind, type) and issubclass(kind, Reported)
]


@pytest.mark.parametrize("kind", RESULTS)
def test_every_kind_of_result_says_what_it_is_and_what_it_found(kind: type[Reported]) -> None:
    assert len(RESULTS) >= 8
    assert "\n" not in kind.report_title and not kind.report_title.endswith(".")
    assert kind.headline is not Reported.headline
