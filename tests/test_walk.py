"""A prediction takes the same road whatever was asked before."""

import pytest

from benchmarks.walk import CASES, walk

pytestmark = pytest.mark.repository


@pytest.mark.parametrize("name", CASES)
def test_other_batches_run_the_same_functions(name: str) -> None:
    _, second, *later = walk(name, 6)
    for functions in later:
        assert functions == second
