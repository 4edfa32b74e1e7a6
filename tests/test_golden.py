"""Answers are those that were kept; `python -m tests.golden --check --all` compares all of them."""

import pytest

from tests.golden.answers import answer
from tests.golden.compare import differences, read, report


@pytest.mark.parametrize(("part", "stride"), [("predictions", 3), ("plans", 3)])
def test_answers_are_those_that_were_kept(part: str, stride: int) -> None:
    new = answer(part, stride)
    found = list(
        differences({name: value for name, value in read(part).items() if name in new}, new)
    )
    assert not found, report(part, found)
