import math
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models.roots import find_root


@given(st.floats(-50, 50), st.floats(1e-6, 1e6), st.sampled_from([1, 3, 9]))
def test_the_root_is_found_in_few_steps(root: float, scale: float, power: int) -> None:
    """Also of functions that are flat, steep or even jump at the root."""
    for rising in (
        lambda x: scale * (x - root) ** power,
        lambda x: math.tanh(scale * (x - root)),
        lambda x: math.copysign(scale, x - root),
        lambda x: math.expm1(x - root),
    ):
        counted = Mock(side_effect=rising)
        found = find_root(counted, -60.0, 70.0)
        assert found == pytest.approx(root, abs=2e-12, rel=2e-12) or rising(found) == 0
        assert counted.call_count < 100


@pytest.mark.parametrize("root", [1e-9, 123456.7, 1e15])
def test_roots_of_any_size_are_found(root: float) -> None:
    assert find_root(lambda x: math.atan(x - root), -1.0, 1e16) == pytest.approx(root, rel=2e-12, abs=2e-12)


def test_without_a_crossing_it_is_the_nearer_end() -> None:
    assert [find_root(lambda x: x, low, low + 2) for low in (-3.0, 1.0, -2.0, 0.0)] == [-1, 1, 0, 0]
