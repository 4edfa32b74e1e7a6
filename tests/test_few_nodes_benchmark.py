"""Many nodes predicted from one or two: the growth of intervals is found again, and systems are judged with
that of the others."""

import math

import numpy as np
import polars as pl
import pytest

import perfkit as pk
from benchmarks import few_nodes
from benchmarks.few_nodes import System, fit_growth, list_published
from perfkit.platform.collective_costs import SIGMA_OF_NODES

NODE = pk.load_platform("h100-sxm-8").with_nodes(2)


def invent(name: str, miss: float) -> System:
    """A system on 32 nodes that takes exp(2 miss) times as long as predicted: four doublings."""
    seconds = NODE.with_nodes(32).collective_time("all_reduce", np.array([8e9]), ranks=256)
    frame = pl.DataFrame(
        {
            "operation": "all_reduce",
            "ranks": 256,
            "nodes": 32,
            "nbytes": 8e9,
            "seconds": seconds * math.exp(2 * miss),
        }
    )
    return System(name, "one node", NODE, frame, spread=0.01)


def test_the_growth_of_invented_systems_is_found() -> None:
    systems = [invent("slow", 0.3), invent("fast", -0.3)]
    assert fit_growth(systems) == pytest.approx(0.3, abs=0.006)
    assert fit_growth([invent("as predicted", 0.0)]) == 0


def test_the_shipped_growth_is_that_of_published_systems() -> None:
    systems = list(list_published())
    assert fit_growth(systems) == pytest.approx(SIGMA_OF_NODES, abs=0.01)
    assert len({system.name for system in systems if system.spread is not None}) == 8


def test_a_link_is_slowed_until_two_nodes_take_what_was_measured() -> None:
    slow = NODE.with_link("inter", bandwidth=20e9)
    sizes = np.array([1e9])
    two = pl.DataFrame(
        {"nbytes": sizes, "seconds": slow.collective_time("all_reduce", sizes, ranks=16)}
    )
    matched = few_nodes._match_link(NODE, two)
    assert matched is not None
    assert matched.network.links["inter"].bandwidth.value == pytest.approx(20e9, rel=1e-3)
    assert few_nodes._match_link(NODE, two.with_columns(seconds=pl.lit(1e-6))) is None
