"""Every entry of the fuzzers takes or refuses what it gets; `make fuzz` draws fifty times as many inputs."""

import pytest

from tests.fuzz.harness import deal, gather, run

ENTRIES = gather()
COUNTS = deal(ENTRIES, 2000)


@pytest.mark.parametrize("name", ENTRIES)
def test_hostile_inputs_are_taken_or_refused(name: str) -> None:
    outcome = run(name, ENTRIES[name], COUNTS[name], seed=2026)
    assert outcome.inputs == outcome.taken + outcome.refused, "\n".join(map(str, outcome.failures))
