"""Collectives over nodes: what goes where, and that no composition beats the links."""

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import hierarchy as h
from perfkit.models.algorithms import OPERATIONS, bus_factor, ring_steps

nbytes = st.floats(0, 1e12)
alpha = st.floats(1e-7, 1e-3)
beta = st.floats(1e-13, 1e-9)
time = st.floats(0, 1e2)
AROUND = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


@given(nbytes, st.integers(2, 16), st.integers(2, 512), alpha, beta, beta, st.sampled_from(AROUND))
def test_rings_over_nodes_grow_and_never_beat_their_links(
    n: float, g: int, nodes: int, a: float, inside: float, rail: float, operation: str
) -> None:
    links = {"ranks_per_node": g, "nodes": nodes, "alpha_hop": a, "beta_intra": inside, "beta_rail": rail}
    t = h.ring_across_nodes(n, operation=operation, **links)
    traffic = bus_factor(operation, g * nodes) * n
    least = ring_steps(operation, g * nodes) * a + traffic * max((g - 1) / g * inside, rail / g)
    assert least * (1 - 1e-12) <= t <= least + traffic * min((g - 1) / g * inside, rail / g) + 1e-9 * t
    assert h.ring_across_nodes(n * 1.1 + 1, operation=operation, **links) >= t
    assert h.ring_across_nodes(n, operation=operation, **{**links, "nodes": nodes + 1}) >= t * (1 - 1e-12)


@given(time, time, st.floats(1, 50))
def test_levels_overlap_between_the_longer_one_and_the_sum(inside: float, between: float, q: float) -> None:
    t = h.overlap_levels(inside, between, sharpness=q)
    assert max(inside, between) * (1 - 1e-9) <= t <= (inside + between) * (1 + 1e-9)
    assert h.overlap_levels(inside, between) <= h.overlap_levels(inside, between, sharpness=1.0) * (1 + 1e-12)
    assert h.overlap_levels(inside, between, sharpness=math.inf) == max(inside, between)


@given(time, time, st.integers(1, 16), st.integers(2, 512))
def test_all_to_all_waits_for_the_slower_links(inside: float, between: float, g: int, nodes: int) -> None:
    flat = h.flat_all_to_all(inside, between, ranks_per_node=g, nodes=nodes)
    assert flat >= max(inside, between)
    assert h.flat_all_to_all(inside, between, ranks_per_node=1, nodes=nodes) == max(inside, between)
    assert h.two_level_all_to_all(0.0, inside, between, memory_bandwidth=1e12) == pytest.approx(inside + between)
    assert h.two_level_all_to_all(1e9, inside, between, memory_bandwidth=2e12) == pytest.approx(inside + between + 2e-3)


@pytest.mark.parametrize("operation", h.LEVELS)
def test_what_leaves_a_node_is_split_over_its_rails(operation: str) -> None:
    inside, share = h.split_levels(operation, 8e9, ranks_per_node=8)
    assert all(size == 8e9 for _, size in inside) and share == (8e9 if operation == "all_to_all" else 1e9)
    traffic = sum(bus_factor(name, 8) for name, _ in inside)
    assert traffic == bus_factor(operation, 8)


def test_operations_that_do_not_split_are_named() -> None:
    with pytest.raises(ValueError, match="operation is 'send_recv'; known are all_reduce, all_gather"):
        h.split_levels("send_recv", 1e6, ranks_per_node=8)
    with pytest.raises(ValueError, match=f"known are {', '.join(OPERATIONS)}"):
        links = {"alpha_hop": 1e-6, "beta_intra": 1e-12, "beta_rail": 1e-11}
        h.ring_across_nodes(1e6, operation="alltoall", ranks_per_node=8, nodes=2, **links)


def test_arrays_series_and_expressions_agree() -> None:
    frame = pl.DataFrame({"n": [0.0, 512.0, 1e6, 1e10]})
    links = {"alpha_hop": 8e-6, "beta_intra": 3e-12, "beta_rail": 2e-11}
    forms = {
        "ring": lambda n: h.ring_across_nodes(n, operation="all_gather", ranks_per_node=8, nodes=4, **links),
        "overlap": lambda n: h.overlap_levels(3e-12 * n, 1e-12 * n + 1e-5),
        "flat": lambda n: h.flat_all_to_all(3e-12 * n, 1e-12 * n + 1e-5, ranks_per_node=8, nodes=4),
        "two levels": lambda n: h.two_level_all_to_all(n, 3e-12 * n, 1e-12 * n, memory_bandwidth=2e12),
        "share": lambda n: h.split_levels("all_reduce", n, ranks_per_node=8)[1],
    }
    for name, form in forms.items():
        scalars = [float(form(n)) for n in frame["n"]]
        assert np.asarray(form(frame["n"].to_numpy())) == pytest.approx(scalars), name
        assert form(frame["n"]).to_list() == pytest.approx(scalars), name
        assert frame.select(form(pl.col("n")).alias("t"))["t"].to_list() == pytest.approx(scalars), name
