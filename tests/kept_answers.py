"""Answers of today beside those that were kept."""

from tests.golden.answers import answer, has_all_sources
from tests.golden.compare import compare, report

ADVICE = """
Show all that differs:  python -m tests.golden --check --words {part}
If all of it is meant:  python -m tests.golden --make {part}"""


def check_part(part: str) -> None:
    """Ask that the numbers of a part are those that were kept."""
    found = compare(part, answer(part), complete=has_all_sources())
    moved = [each for each in found if not each.is_of_words]
    assert not moved, report(part, moved) + ADVICE.format(part=part)
