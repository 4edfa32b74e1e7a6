"""The page that follows one prediction prints what it says."""

import doctest
import warnings
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how_it_works.md"
pytestmark = pytest.mark.repository


def test_the_page_that_follows_one_prediction_prints_what_it_says() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert result.attempted > 30 and not result.failed
