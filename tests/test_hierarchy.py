"""Collectives over nodes: what goes where, and that no composition beats the links."""

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import hierarchy as h
from perfkit.models.algorithms import OPERATIONS, bus_factor, ring_steps

beta, time = st.floats(1e-13, 1e-9), st.floats(0, 1e2)
counts = {"ranks_per_node": st.integers(2, 16), "nodes": st.integers(2, 512)}
links = st.fixed_dictionaries({**counts, "alpha_hop": st.floats(1e-7, 1e-3), "beta_intra": beta, "beta_rail": beta})
AROUND = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


@given(st.floats(0, 1e12), links, st.sampled_from(AROUND))
def test_rings_over_nodes_grow_and_never_beat_their_links(n: float, of: dict[str, float], operation: str) -> None:
    g, ranks = of["ranks_per_node"], int(of["ranks_per_node"] * of["nodes"])
    t = h.ring_across_nodes(n, operation=operation, **of)
    ends = sorted(
        bus_factor(operation, ranks) * n * beta for beta in ((g - 1) / g * of["beta_intra"], of["beta_rail"] / g)
    )
    least = ring_steps(operation, ranks) * of["alpha_hop"] + ends[1]
    assert least * (1 - 1e-12) <= t <= least + ends[0] + 1e-9 * t
    assert h.ring_across_nodes(n * 1.1 + 1, operation=operation, **of) >= t
    assert h.ring_across_nodes(n, operation=operation, **{**of, "nodes": of["nodes"] + 1}) >= t * (1 - 1e-12)


@given(time, time, st.floats(1, 50), st.integers(1, 16), st.integers(2, 512))
def test_levels_take_between_the_longer_one_and_the_sum(a: float, b: float, q: float, g: int, nodes: int) -> None:
    t = h.overlap_levels(a, b, sharpness=q)
    assert max(a, b) * (1 - 1e-9) <= t <= (a + b) * (1 + 1e-9)
    assert h.overlap_levels(a, b) <= h.overlap_levels(a, b, sharpness=1.0) * (1 + 1e-12)
    assert h.overlap_levels(a, b, sharpness=math.inf) == max(a, b)
    assert h.flat_all_to_all(a, b, ranks_per_node=g, nodes=nodes) >= max(a, b)
    assert h.flat_all_to_all(a, b, ranks_per_node=1, nodes=nodes) == max(a, b)
    for nbytes, copies in ((0.0, 0.0), (1e9, 2e-3)):
        assert h.two_level_all_to_all(nbytes, a, b, memory_bandwidth=2e12) == pytest.approx(a + b + copies)


@pytest.mark.parametrize("operation", h.LEVELS)
def test_what_leaves_a_node_is_split_over_its_rails(operation: str) -> None:
    inside, share = h.split_levels(operation, 8e9, ranks_per_node=8)
    assert all(size == 8e9 for _, size in inside) and share == (8e9 if operation == "all_to_all" else 1e9)
    assert sum(bus_factor(name, 8) for name, _ in inside) == bus_factor(operation, 8)


LINKS = {"ranks_per_node": 8, "nodes": 4, "alpha_hop": 8e-6, "beta_intra": 3e-12, "beta_rail": 2e-11}
FORMS = {
    "ring": lambda n: h.ring_across_nodes(n, operation="all_gather", **LINKS),
    "overlap": lambda n: h.overlap_levels(3e-12 * n, 1e-12 * n + 1e-5),
    "flat": lambda n: h.flat_all_to_all(3e-12 * n, 1e-12 * n + 1e-5, ranks_per_node=8, nodes=4),
    "two levels": lambda n: h.two_level_all_to_all(n, 3e-12 * n, 1e-12 * n, memory_bandwidth=2e12),
    "share": lambda n: h.split_levels("all_reduce", n, ranks_per_node=8)[1],
}


@pytest.mark.parametrize("name", FORMS)
def test_arrays_series_and_expressions_agree(name: str) -> None:
    frame, form = pl.DataFrame({"n": [0.0, 512.0, 1e6, 1e10]}), FORMS[name]
    scalars = [float(form(n)) for n in frame["n"]]
    assert np.asarray(form(frame["n"].to_numpy())) == pytest.approx(scalars)
    assert form(frame["n"]).to_list() == pytest.approx(scalars)
    assert frame.select(form(pl.col("n")).alias("t"))["t"].to_list() == pytest.approx(scalars)


def test_operations_that_do_not_split_are_named() -> None:
    with pytest.raises(ValueError, match="operation is 'send_recv'; known are all_reduce, all_gather"):
        h.split_levels("send_recv", 1e6, ranks_per_node=8)
    with pytest.raises(ValueError, match=f"known are {', '.join(OPERATIONS)}"):
        h.ring_across_nodes(1e6, operation="alltoall", **LINKS)
