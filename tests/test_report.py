"""The report is one file that opens without a network, says what the numbers say, and treats every name as text."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from perfkit.calibration.checks import Comparison
from perfkit.calibration.pages import write_report
from perfkit.platform.platform import Platform
from perfkit.prediction.result import predict
from perfkit.workloads.dlrm import DLRM

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"quoted\" 'too' & url(#clip0)"
MODEL = DLRM(rows=[1000] * 4, dim=16, pooling=2, batch=64, bottom=[16], top=[16])
Row = dict[str, Any]


def some_comparison(**changes: Any) -> Comparison:
    runs, errors = [], (("DLRM", 0.04), ("DLRM", -0.11), ("BERT", 0.07), ("GPT-2", 0.3), ("DLRM", -0.02))
    for i, (family, error) in enumerate(errors):
        time, measured = 0.004 * (i + 1) * (1 + error), 0.004 * (i + 1)
        run: Row = {"family": family, "name": f"{family.lower()} {i}", "config": {"batch": 64, "dim": 16}, "ranks": 1}
        run |= {"predicted_s": time, "low_s": time * 0.87, "high_s": time * 1.15, "measured_s": measured}
        run |= {"measured_q1_s": measured * 0.98, "measured_q3_s": measured * 1.03, "flagged": i == 2}
        runs.append(run | {"bottleneck": "GEMM", "noise": 0.034})
    runs[0] |= changes
    return Comparison(tuple(runs), "synthetic", {"processor": "x"}, {"perfkit": "0.1.0"})


@pytest.fixture
def write(toy: Platform, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Write a report of everything there is, some of it changed."""

    def run(**changes: Any) -> str:
        given: Row = {"platform": toy, "comparison": some_comparison()}
        given["predictions"] = {"dlrm": predict(MODEL, toy, ranks=2)}
        return write_report(tmp_path / "report.html", **(given | changes)).read_text(encoding="utf-8")

    return run


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, Row]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


pytestmark = pytest.mark.filterwarnings("ignore:.*never calibrated")


def test_report_is_self_contained(write: Any, tmp_path: Path) -> None:
    page = write()
    for tag, attributes in Tags(page).found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert tag != "script" or attributes["type"] == "application/json"
        references = [value for name, value in attributes.items() if name in ("src", "href", "xlink:href", "action")]
        assert all(value.startswith("#") for value in references)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    assert page.count("<svg") == 3 and [path.name for path in tmp_path.iterdir()] == ["report.html"]
    ids = [attributes["id"] for _, attributes in Tags(page).found if "id" in attributes]
    assert len(ids) == len(set(ids)) and set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_report_says_what_the_numbers_say(write: Any) -> None:
    page = write()
    figures = ("7.1%", "10.8%", "30.0%", "3.4%", "80.0%", "+5.6%")  # geomean, mean, largest, floor, inside, bias
    for text in (*figures, "+30.0% ✗", "+4.0% ✓", "12 ms †", "1 rank · batch 64, dim 16<"):
        assert text in page, text
    data = re.search(r'<script type="application/json" id="perfkit-comparison">(.*?)</script>', page)
    assert data is not None and json.loads(data.group(1)) == some_comparison().to_dict()
    assert write(predictions={}).count("<svg") == 1, "charts need data"
    one = some_comparison(predicted_s=1.099503 * 0.004)  # 9.9503 %, which tables and charts round alike
    page = write(comparison=replace(one, runs=one.runs[:1]), predictions={})
    assert page.count("10.0%") >= 6 and not re.search(r"\b9\.9\d*%", page)


def test_every_name_is_text(write: Any, toy: Platform) -> None:
    named = replace(toy, name=HOSTILE, collectives={})
    comparison = some_comparison(name=HOSTILE, family=HOSTILE, bottleneck=HOSTILE, config={HOSTILE: HOSTILE})
    comparison = replace(comparison, machine={HOSTILE: HOSTILE})
    page = write(platform=named, comparison=comparison, predictions={HOSTILE: predict(MODEL, named)})
    tags = Tags(page).found
    scripts = [attributes for tag, attributes in tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "perfkit-comparison"}]
    names = [name for tag, attributes in tags for name in (tag, *attributes)]
    assert "img" not in names and not [name for name in names if name.startswith("on")]
    data = re.search(r'id="perfkit-comparison">(.*?)</script>', page)
    assert data is not None and json.loads(data.group(1))["runs"][0]["name"] == HOSTILE


def test_an_unwritable_report_leaves_the_old_one(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("the report before", encoding="utf-8")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write()
    assert target.read_bytes() == b"the report before" and len(list(tmp_path.iterdir())) == 1


def test_disturbed_measurements_are_named_and_drift_is_shown(write: Any) -> None:
    saved = some_comparison()
    runs = tuple({**run, "relative_s": 0.5 * run["measured_s"], "relative_noise": 0.0321} for run in saved.runs)
    disturbed = {"processor": "x", "disturbances": "9% of the timings of iterations got less than 97 % of a core"}
    page = write(comparison=replace(saved, runs=runs, machine=disturbed))
    assert "Disturbed measurements.</b> check: 9% of the timings" in page
    assert "At the usual pace" in page and "3.2%" in page
    assert "Disturbed" not in write()
