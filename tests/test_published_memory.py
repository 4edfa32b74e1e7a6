"""The benchmark of published memory: what it says by set, and how near it is."""

from typing import Any

import pytest

from benchmarks import published_memory
from benchmarks.published_memory import MemoryRow, judge_set

pytestmark = pytest.mark.filterwarnings("ignore")

#: Largest mean error of a set, as allocated [%].
BARS = {
    "simumax_b200": 3.0,
    "zero_bubble_a100": 11.0,
    "bloom_topologies_a100": 20.0,
    "torchao_h100": 6.0,
    "torchtune_a100": 13.0,
    "torchtitan": 6.0,
}


def test_each_set_is_as_near_as_it_was(shared_data: Any) -> None:
    rows = published_memory.list_rows()
    assert {row.set for row in rows} == set(BARS)
    for name, bar in BARS.items():
        allocated, reserved = judge_set(name, [row for row in rows if row.set == name])
        assert allocated["mean"] <= bar, name
        assert allocated["misfits"] <= 2, "these steps have run"
        assert reserved["bias"] > allocated["bias"]


def test_errors_are_those_of_what_is_allocated_and_of_what_is_reserved() -> None:
    rows = [
        MemoryRow("torchtitan", "a", measured=10.0, allocated=11.0, reserved=12.0, fits=True),
        MemoryRow("torchtitan", "b", measured=10.0, allocated=9.0, reserved=10.0, fits=False),
    ]
    allocated, reserved = judge_set("torchtitan", rows)
    assert (allocated["mean"], allocated["bias"]) == (10.0, 0.0)
    assert (reserved["mean"], reserved["bias"]) == (10.0, 10.0)
    assert allocated["misfits"] == reserved["misfits"] == 1
