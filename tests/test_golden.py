"""Numbers are those that were kept; `python -m tests.golden --check --words` also shows texts."""

import pytest

from tests.golden.answers import TESTED
from tests.golden.compare import Difference, differences
from tests.kept_answers import check_part

#: Parts that are compared here; the fits are where the platforms of the same measurements are.
HERE = tuple(part for part in TESTED if part != "fits")


# later calls of a captured step add words alone, which are not compared
@pytest.mark.usefixtures("few_calls")
@pytest.mark.parametrize("part", HERE)
def test_numbers_are_those_that_were_kept(part: str) -> None:
    check_part(part)


def test_words_are_texts_and_lists_of_texts_and_nothing_else() -> None:
    old = {"time": 1.0, "bound": "host", "warnings": ["a"], "fits": True, "gone": 1}
    new = {"time": 1.1, "bound": "GEMM", "warnings": ["a", "b"], "fits": False, "added": "text"}
    found = {each.path: each.is_of_words for each in differences(old, new)}
    assert found == {
        "time": False,
        "bound": True,
        "warnings": True,
        "fits": False,
        "gone": False,
        "added": False,
    }


def test_a_number_within_its_tolerance_is_equal() -> None:
    assert not [*differences({"a": [1.0, float("nan")]}, {"a": [1.0 + 1e-10, float("nan")]})]
    assert [*differences(1.0, 1.0 + 1e-8)] == [
        Difference("", 1.0, 1.0 + 1e-8, pytest.approx(1e-8, rel=1e-3))
    ]
