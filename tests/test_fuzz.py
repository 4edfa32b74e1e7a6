"""Every entry of the fuzzers takes or refuses what it gets; `make fuzz` draws fifty times as many
inputs."""

import pytest

from tests.fuzz.harness import deal, run

COUNTS = deal(2000)


@pytest.mark.parametrize("name", COUNTS)
def test_hostile_inputs_are_taken_or_refused(name: str) -> None:
    rows = run(name, COUNTS[name], seed=2026)
    assert len(rows) == COUNTS[name]
    assert not (failures := [row["reason"] for row in rows if row["verdict"] == "failure"]), (
        "\n".join(failures)
    )
