"""Tables of drawn models and of versions of PyTorch: shares and differences by hand."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from benchmarks import drawn_models, versions
from benchmarks.drawn_models import Judged, compare
from benchmarks.helpers import drawn_builders
from benchmarks.helpers.version_parts import PARTS

ROWS = [
    Judged("timm", "a", "", operations=10, flops=1.0, memory=1.0, seconds=2.0),
    Judged("timm", "b", "", operations=10, difference="operation 3 of 10: mm in place of add"),
    Judged("timm", "c", "", captured="ValueError: it decides by a number"),
    Judged("timm", "d", "", real="ValueError: it takes no such images"),
]


def test_shares_are_of_the_steps_that_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    rows = [vars(row) for row in ROWS]
    file.write_text(json.dumps({"seed": 5, "rows": rows}))
    assert drawn_models.main(["--saved", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "captured 67% (bar 90%): NOT met" in lines
    assert "equal in order 33% (bar 85%): NOT met" in lines
    assert [line.split() for line in lines if line.startswith("all")] == [
        ["all", "4", "3", "2", "1"]
    ]
    assert "c: ValueError: it decides by a number" in lines


@pytest.mark.parametrize(
    ("captured", "said"),
    [
        (["mm", "add", "relu"], ""),
        (
            ["mm", "relu", "add"],
            "operation 1 of 3: relu in place of add",
        ),
        (["mm", "add"], "operation 2 of 3: the end in place of relu; lacks 1 relu"),
        (
            ["mm", "add", "relu", "view_copy"],
            "operation 3 of 3: view_copy in place of the end; adds 1 view_copy",
        ),
    ],
)
def test_the_first_difference_is_named(captured: list[str], said: str) -> None:
    assert compare(captured, ["mm", "add", "relu"]) == said


def test_a_seed_draws_the_same_models_without_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"net{number}" for number in range(20)]
    monkeypatch.setitem(drawn_builders._LISTS, "timm", lambda: names)

    def draw(seed: int) -> Iterator[str]:
        return (drawn.name for drawn in drawn_builders.draw(seed, "timm"))

    assert list(islice(draw(1), 6)) == list(islice(draw(1), 6))
    assert list(islice(draw(1), 6)) != list(islice(draw(2), 6))
    assert sorted(draw(1)) == sorted(names)


def test_parts_that_fail_are_told_below_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second, *_ = PARTS
    tried = [{"torch": "2.9.1", first: "", second: "KeyError: 'x'"}, {"torch": "2.13.0", first: ""}]
    file = tmp_path / "versions.json"
    file.write_text(json.dumps({"date": "2026-11-28", "versions": tried}))
    assert versions.main(["--saved", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [first, "works", "works"]
    assert lines[2].split() == [second, "fails", "(1)", "not", "tried"]
    assert lines[-2:] == ["(1) KeyError: 'x'", "seen on 2026-11-28"]
