"""The report is one file that opens without a network, says what the numbers say, and treats every name as text."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from perfkit.hardware import Device, Link, MemoryLevel, Network, Quantity
from perfkit.platform import Platform
from perfkit.prediction.comparison import Comparison
from perfkit.report import write_report

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"quoted\" 'too' & url(#clip0)"
Row = dict[str, Any]


def quantity(value: float, unit: str) -> Quantity:
    return Quantity(value, unit, "measured", "this test", "2026-01-01")


def some_platform(name: str = "synthetic") -> Platform:
    memory = (
        MemoryLevel("L2", quantity(2e6, "B"), quantity(9e10, "B/s")),
        MemoryLevel("DRAM", quantity(2.4e10, "B"), quantity(1.2e10, "B/s")),
    )
    links = {"intra": Link(quantity(2e9, "B/s"), quantity(4e-5, "s"))}
    return Platform(name, Device("CPU", "cpu", {"fp32": quantity(1e11, "FLOP/s")}, memory), Network(2, links=links))


def some_comparison(**changes: Any) -> Comparison:
    runs = []
    for i, (family, error) in enumerate(
        (("DLRM", 0.04), ("DLRM", -0.11), ("BERT", 0.07), ("GPT-2", 0.3), ("DLRM", -0.02))
    ):
        time, measured = 0.004 * (i + 1) * (1 + error), 0.004 * (i + 1)
        run: Row = {"family": family, "name": f"{family.lower()} {i}", "config": {"batch": 64, "dim": 16}, "ranks": 1}
        run |= {"predicted_s": time, "low_s": time * 0.87, "high_s": time * 1.15, "measured_s": measured}
        run |= {
            "measured_q1_s": measured * 0.98,
            "measured_q3_s": measured * 1.03,
            "flagged": i == 2,
            "bottleneck": "GEMM",
        }
        runs.append(run)
    runs[0] |= changes
    floor = {"DLRM": 0.031, "BERT": 0.02, "GPT-2": 0.02, "all": 0.034}
    return Comparison(tuple(runs), "synthetic", {"processor": "x"}, {"perfkit": "0.1.0"}, floor)


def write(path: Path, name: str = "synthetic", **changes: Any) -> str:
    phases = ("forward", "backward", "optimizer")
    breakdown = [{"phase": phase, "kind": kind, "time_s": 2e-3} for phase in phases for kind in ("GEMM", "embedding")]
    timeline = [
        {"rank": rank, "stream": "compute", "phase": phase, "start_s": i * 4e-3, "end_s": (i + 0.9) * 4e-3}
        for rank in (0, 1)
        for i, phase in enumerate(phases)
    ]
    sweep = [
        {"operation": operation, "ranks": 2, "nbytes": 2.0**power, "time_s": 1e-4 + 2.0**power / 1e9}
        for operation in ("all_reduce", "all_to_all")
        for power in range(10, 26)
    ]
    arguments: Row = {
        "platform": some_platform(name),
        "comparison": some_comparison().to_dict(),
        "predictions": [{"title": "dlrm-default, batch 2,048", "breakdown": breakdown, "timeline": timeline}],
        "kernels": [{"kind": "GEMM", "flops": 1e8, "nbytes": 1e7, "time_s": 2e-3}],
        "collectives": (sweep, sweep),
        "environment": {"processor": "2 cores", "perfkit": "0.1.0"},
    }
    return write_report(path, **(arguments | changes)).read_text(encoding="utf-8")


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[Row] = []
        self.found: list[tuple[str, Row]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_report_is_self_contained(tmp_path: Path) -> None:
    page = write(tmp_path / "report.html")
    for tag, attributes in Tags(page).found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert tag != "script" or attributes["type"] == "application/json"
        references = [value for name, value in attributes.items() if name in ("src", "href", "xlink:href", "action")]
        assert all(value.startswith("#") for value in references)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    assert page.count("<svg") == 5
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_ids_are_unique_and_references_resolve(tmp_path: Path) -> None:
    page = write(tmp_path / "report.html")
    ids = [attributes["id"] for _, attributes in Tags(page).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_report_says_what_the_numbers_say(tmp_path: Path) -> None:
    page = write(tmp_path / "report.html")
    figures = ("7.1%", "10.8%", "30.0%", "3.4%", "80.0%", "+5.6%")  # geomean, mean, largest, floor, inside, bias
    for text in (*figures, "+30.0% ✗", "+4.0% ✓", "12 ms †"):
        assert text in page
    data = re.search(r'<script type="application/json" id="perfkit-comparison">(.*?)</script>', page)
    assert data is not None and json.loads(data.group(1)) == some_comparison().to_dict()


def test_configurations_fit_on_a_line(tmp_path: Path) -> None:
    tables = [{"rows": rows, "dim": 16, "name": f"table {rows}"} for rows in (1000, 250_000, 3)]
    config = {"name": "dlrm", "batch": 64, "tables": tables, "top": [64, 1], "sparse": False, "owners": [0, 1] * 13}
    page = write(tmp_path / "report.html", comparison=some_comparison(config=config).to_dict())
    assert "1 rank · batch 64, 3 tables (rows 3–250,000, dim 16), top 64-1, not sparse, 26 owners<" in page


def test_every_name_is_text(tmp_path: Path) -> None:
    comparison = some_comparison(name=HOSTILE, family=HOSTILE, bottleneck=HOSTILE, config={HOSTILE: HOSTILE})
    breakdown = [{"phase": HOSTILE, "kind": HOSTILE, "time_s": 1e-3}]
    timeline = [{"rank": 0, "stream": HOSTILE, "phase": HOSTILE, "start_s": 0.0, "end_s": 1e-3}]
    page = write(
        tmp_path / "report.html",
        name=HOSTILE,
        comparison=comparison.to_dict(),
        predictions=[{"title": HOSTILE, "breakdown": breakdown, "timeline": timeline}],
        environment={HOSTILE: HOSTILE},
        kernels=[{"kind": HOSTILE, "flops": 1e8, "nbytes": 1e7, "time_s": 2e-3}],
    )
    tags = Tags(page).found
    assert [attributes for tag, attributes in tags if tag == "script"] == [
        {"type": "application/json", "id": "perfkit-comparison"}
    ]
    assert not [
        name for tag, attributes in tags for name in (tag, *attributes) if tag == "img" or name.startswith("on")
    ]
    data = re.search(r'id="perfkit-comparison">(.*?)</script>', page)
    assert data is not None and json.loads(data.group(1))["runs"][0]["name"] == HOSTILE


def test_report_without_anything_measured(tmp_path: Path) -> None:
    empty: Row = {"kernels": None, "collectives": None, "environment": None}
    comparison = Comparison((), "synthetic", {}, {}, {})
    page = write(tmp_path / "report.html", comparison=comparison.to_dict(), predictions=(), **empty)
    assert "Nothing was measured" in page and "<svg" not in page


def test_an_unwritable_report_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("the report before", encoding="utf-8")

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write(target)
    assert target.read_bytes() == b"the report before" and len(list(tmp_path.iterdir())) == 1


def test_disturbed_measurements_are_named_and_drift_is_told_apart(tmp_path: Path) -> None:
    saved = some_comparison()
    runs = tuple({**run, "relative_s": 0.5 * run["measured_s"]} for run in saved.runs)
    disturbed = {"processor": "x", "disturbances": "9% of the timings of iterations got less than 97 % of a core"}
    related = replace(saved, runs=runs, machine=disturbed, relative_floor={"dlrm": 0.0321, "all": 0.0321})
    page = write(tmp_path / "report.html", comparison=related.to_dict())
    assert "Disturbed measurements.</b> check: 9% of the timings" in page
    assert "At the usual pace" in page and "3.2%" in page
    assert "Disturbed" not in write(tmp_path / "calm.html")
