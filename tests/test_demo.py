"""`make run`: the answer first, the machine before it is measured, and commands worth typing last."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfkit as pk
from perfkit.__main__ import main
from perfkit.calibration import doctor
from perfkit.calibration.checks import Comparison
from perfkit.calibration.doctor import Finding
from perfkit.commands import demo
from perfkit.measure import machine
from perfkit.measure.samples import draw_check
from tests.test_report import some_comparison

STEADY = Finding("steadiness", True, "within 10 s: 1%; expect mean errors of about 8%")
BUSY = Finding("load", False, "others use 1.30 cores now", "stop other programs")


pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, toy: pk.Platform, tmp_path: Path) -> dict[str, Any]:
    """What the demo asks for; the machine answers at once, and was disturbed meanwhile."""
    asked: dict[str, Any] = {"findings": [STEADY]}

    def diagnose(*names: str) -> list[Finding]:
        asked["checks"] = names
        print("the doctor looks")
        return list(asked["findings"])

    def calibrate(**settings: Any) -> pk.Platform:
        asked["calibrate"] = settings
        warnings.warn("slow; close other programs and calibrate again", stacklevel=1)
        warnings.warn("nothing can be kept", stacklevel=1)
        platform = pk.load_platform("zen5-2")
        return replace(platform, provenance={**platform.provenance, "disturbances": "slow"})

    def check(platform: pk.Platform, **settings: Any) -> Comparison:
        asked["samples"] = settings["samples"]
        return some_comparison()

    def report(*results: Any, **settings: Any) -> None:
        asked["report"] = (results, settings)

    monkeypatch.setattr(pk, "report", report)
    monkeypatch.setattr(doctor, "diagnose", diagnose)
    monkeypatch.setattr(pk, "calibrate", calibrate)
    monkeypatch.setattr(pk, "check", check)
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_demo_predicts_first_then_looks_at_the_machine_then_measures(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    order = (
        "  45.1 ms",
        "the doctor looks",
        "within 10 s",
        "Now measure it",
        "noise floor",
        "disturbed meanwhile: slow",
        "Report:    perfkit-report.html",
        "Worth typing next:",
    )
    places = [out.index(words) for words in order]
    assert places == sorted(places)
    assert "note: nothing can be kept" in err and "close other programs" not in err + out
    assert "vocabulary_multiple" not in err, "the answer stands alone; the report has its notes"
    assert len(out[out.index("Worth typing next:") :].splitlines()) == 4
    settings = dict(asked["calibrate"])
    assert [part.name for part in settings.pop("progress").parts] == ["check"]
    assert settings == {"out": "perfkit-platform.toml", "quick": False, "stop_early": True}
    (comparison, on_gpu, *_, platform), said = asked["report"]
    assert isinstance(comparison, Comparison) and platform.name == "zen5-2"
    assert on_gpu.platform.name == "h100-sxm-8" and "Worth typing next:" in said["notes"]
    assert len(asked["samples"]) == 13 and {*asked["checks"]} >= {"load", "steadiness"}


def test_a_quick_demo_checks_a_third_and_a_busy_machine_is_said_at_the_start(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked["findings"] = [BUSY, STEADY]
    assert main(["demo", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.index("others use 1.30 cores") < out.index("-> stop other programs")
    assert out.index("-> stop other programs") < out.index("Now measure it")
    assert "disturbed meanwhile" not in out, "said once"
    assert asked["calibrate"]["quick"] and len(asked["samples"]) == 4
    assert {sample.ranks for sample in asked["samples"]} == {1, 2}
    monkeypatch.setattr(machine, "count_cores", lambda: 1)
    assert main(["demo", "--quick"]) == 0
    assert {sample.ranks for sample in asked["samples"]} == {1}


def test_figures_of_a_demo_are_printed_instead_of_the_text(
    asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["runs"]
    assert "the doctor looks" in err and "Worth typing next:" in err


def test_commands_worth_typing_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = demo.list_next_steps("zen5-2")
    for line in (first, second):
        words = re.sub(r"^ *\S*perfkit ", "", line.split(" # ")[0]).split()
        assert main(words) == 0
    assert "gpt2" in capsys.readouterr().out and third.lstrip().startswith("make lab")
    assert " --platform 'my machine.toml' " in demo.list_next_steps("my machine.toml")[0]


def test_runs_have_names_in_words() -> None:
    words = [sample.description for sample in draw_check(7, dlrm=1, transformer=1, hybrid=1)]
    assert words[0].startswith("dlrm, batch ") and "tables ×" in words[0]
    assert re.fullmatch(r"(bert|gpt2), batch \d+, sequence \d+, \d layers × \d+", words[1])
    assert words[2].endswith(", on 2 ranks")


def test_errors_are_explained_and_the_usual_pace_is_shown_where_it_moved() -> None:
    runs = tuple(run | {"relative_s": 1.02 * run["measured_s"]} for run in some_comparison().runs)
    steady = Comparison(runs, "x", {}, {}).as_text()
    assert "errors |predicted / measured − 1|" in steady and "usual pace" not in steady
    runs = tuple(run | {"relative_s": 1.2 * run["measured_s"]} for run in some_comparison().runs)
    moved = Comparison(runs, "x", {}, {})
    assert moved.pace_moved() == pytest.approx(0.182, abs=0.001)
    assert "converted to its usual pace" in moved.as_text()
    named = Comparison((runs[0] | {"description": "dlrm, 8 tables"}, *runs[1:]), "x", {}, {})
    assert "dlrm, 8 tables" in named.as_text()
