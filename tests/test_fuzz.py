"""Every entry of the fuzzers takes or refuses what it gets; `make fuzz` draws a hundred times as
many inputs."""

from pathlib import Path

import pytest

from tests.fuzz.harness import deal, gather, run

pytest.importorskip("torch", reason="fuzzers of captures and traces need torch")

COUNTS = deal(1000)
#: Of more inputs than these some have to be taken.
ENOUGH = 10


@pytest.mark.parametrize("name", COUNTS)
def test_hostile_inputs_are_taken_or_refused(name: str) -> None:
    rows = run(name, COUNTS[name], seed=2026)
    assert len(rows) == COUNTS[name]
    failures = [row["reason"] for row in rows if row["verdict"] == "failure"]
    assert not failures, "\n".join(failures)
    if COUNTS[name] > ENOUGH and name != "long-words":  # which are too long for anything
        taken = [row for row in rows if row["verdict"] == "taken"]
        assert taken, "all are refused, so that nothing is computed"


def test_every_file_of_entries_is_found() -> None:
    folder = Path(__file__).parent / "fuzz"
    paths = list(folder.glob("entries_*.py"))
    assert len(paths) >= 3
    written = "".join(path.read_text("utf-8") for path in paths)
    for name in gather():
        assert f'"{name}"' in written
