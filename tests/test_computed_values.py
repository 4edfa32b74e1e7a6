"""Workloads compute some values once, such as the law of a table: no prediction depends on which of
them were asked for before."""

from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.workloads.sizes import alter, list_fields, map_sizes, select_sizes

pytestmark = pytest.mark.filterwarnings("ignore")
PLATFORM = "h100-sxm-8"
RANKS = 8


def make_dlrm() -> pk.DLRM:
    """Tables of which one is looked up most of all."""
    return pk.DLRM("dlrm-dcnv2", batch=65536)


def place_in_turn() -> pk.Plan:
    return pk.Plan.round_robin(26, ranks=RANKS)


def find_computed(value: Any) -> list[str]:
    """Names of what an object computes once."""
    members = [item for kind in type(value).__mro__ for item in vars(kind).items()]
    return [name for name, member in members if isinstance(member, cached_property)]


def compute_all(value: Any) -> int:
    """Ask a workload and its parts for all that they compute once; how much that is."""
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else ()
    count = 0
    if hasattr(value, "__dataclass_fields__"):
        parts = tuple(getattr(value, field.name) for field in fields(value))
        for name in find_computed(value):
            getattr(value, name)
            count += 1
    return count + sum(compute_all(part) for part in parts)


def test_a_plan_is_predicted_alike_before_and_after_a_search() -> None:
    """A table that knew its law gave it to all others, which are recorded as one."""
    fresh = pk.predict(make_dlrm(), PLATFORM, ranks=RANKS, plan=place_in_turn()).time
    workload = make_dlrm()
    pk.shard(workload, PLATFORM, ranks=RANKS, steps=1, progress=False)
    asked = pk.predict(workload, PLATFORM, ranks=RANKS, plan=place_in_turn()).time
    assert asked == fresh
    assert pk.price_plan(workload, PLATFORM, place_in_turn(), ranks=RANKS).time == pytest.approx(
        fresh, rel=0.02
    )


WORKLOADS = {
    "dlrm": make_dlrm,
    "mlperf": lambda: pk.DLRM("dlrm-mlperf", batch=2048),
    "bert": lambda: pk.Transformer.bert("bert-base", batch=8, sequence=128),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_prediction_depends_on_what_was_asked_before(name: str) -> None:
    fresh, asked = WORKLOADS[name](), WORKLOADS[name]()
    computed = compute_all(asked)
    assert computed > 20 or name == "bert"
    for ranks in (1, RANKS):
        times = [pk.predict(workload, PLATFORM, ranks=ranks).time for workload in (asked, fresh)]
        assert times[0] == times[1]
    assert asked == fresh


def test_a_changed_copy_computes_anew() -> None:
    table = pk.EmbeddingTable(1000, 16, pooling=2.0)
    assert table.distribution.rows == 1000
    assert alter(table, {"rows": 10}).distribution.rows == 10
    many = alter(table, {"rows": np.array([10, 20])})
    assert select_sizes(many, 1).distribution.rows == 20
    doubled = map_sizes(table, int, lambda size: 2 * size)
    assert (doubled.rows, doubled.distribution.rows) == (2000, 2000)
    assert "distribution" not in list_fields(table)
    assert {"rows", "dim", "pooling"} < {*list_fields(table)}
