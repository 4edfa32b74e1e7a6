"""Closed forms of collectives: published figures, limits, monotony, and the same on scalars, arrays
and frames."""

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import collectives as c
from perfkit.models import hierarchy as h

nbytes, alpha, beta, ranks = (
    st.floats(0, 1e12),
    st.floats(1e-7, 1e-2),
    st.floats(1e-13, 1e-8),
    st.integers(2, 4096),
)

# microsoft/superbenchmark@700d6501f110, tests/data/nccl_*.log, 8 x A100-SXM4-40GB: size, time and
# busbw as printed
SUPERBENCH = [
    ("all_reduce", 67108864, 584.5e-6, 200.91),
    ("all_reduce", 8589934592, 63896e-6, 235.26),
    ("all_to_all", 134217728, 633.6e-6, 185.35),
    ("all_gather", 134217728, 698.6e-6, 168.12),
    ("reduce_scatter", 8589934592, 32464e-6, 231.52),
    ("broadcast", 8589934592, 36896e-6, 232.81),
]


def test_bandwidths_are_those_that_nccl_tests_prints() -> None:
    """And bus factors those of its page doc/PERFORMANCE.md."""
    for operation, size, time, busbw in SUPERBENCH:
        assert c.bus_bandwidth(size, time, ranks=8, operation=operation) / 1e9 == pytest.approx(
            busbw, rel=2e-4
        )
    assert [c.bus_factor(op, 4) for op in ("all_reduce", "all_gather", "broadcast")] == [
        1.5,
        0.75,
        1.0,
    ]
    assert [c.bus_factor(op, 1) for op in c.OPERATIONS] == [0] * 6 + [1] * 3
    assert c.ring_steps("send_recv", 9) == 1


def test_two_published_points_give_the_sizes_between() -> None:
    """From the empty message (35.2 µs) and 8 GiB of the all_reduce log above to four sizes of the
    same log."""
    sizes = np.array([2.0**20, 2.0**24, 2.0**26, 2.0**30])
    measured = np.array([74.78e-6, 226.0e-6, 584.5e-6, 8159.5e-6])
    ends = {"alpha": 35.2e-6, "beta": 63896e-6 / 8589934592}
    pipelined, classic = (
        np.abs(form(sizes, **ends) / measured - 1).mean() for form in (c.pipelined, c.alpha_beta)
    )
    assert pipelined < 0.12 < 0.18 < classic


@given(nbytes, alpha, beta, st.floats(0.3, 50))
def test_pipelined_is_bounded_and_monotone_and_holds_the_special_cases(
    n: float, a: float, b: float, q: float
) -> None:
    time = c.pipelined(n, alpha=a, beta=b, sharpness=q)
    assert time >= max(a, b * n) * (1 - 1e-12)
    for more in ((n * 1.1 + 1, a, b), (n, a * 1.1, b), (n, a, b * 1.1)):
        assert c.pipelined(more[0], alpha=more[1], beta=more[2], sharpness=q) >= time * (1 - 1e-12)
    assert c.pipelined(n, alpha=a, beta=b, sharpness=1) == pytest.approx(
        c.alpha_beta(n, alpha=a, beta=b)
    )
    chunked = a + b * n + 2 * math.sqrt(a * b * n)
    assert c.pipelined(n, alpha=a, beta=b, sharpness=0.5) == pytest.approx(chunked)
    assert c.pipelined(0.0, alpha=a, beta=b) == pytest.approx(a)
    assert c.pipelined(1e30, alpha=a, beta=b) == pytest.approx(b * 1e30, rel=1e-4)


@given(nbytes, alpha, beta, st.floats(1, 100), st.floats(1, 100), st.floats(0.3, 5))
def test_two_protocols_are_the_better_of_both(
    n: float, a: float, b: float, up: float, down: float, q: float
) -> None:
    pair = {"alpha1": a, "beta1": down * b, "alpha2": up * a, "beta2": b}
    both = [(pair["alpha1"], pair["beta1"]), (pair["alpha2"], pair["beta2"])]
    least = min(c.pipelined(n, alpha=one, beta=each, sharpness=q) for one, each in both)
    assert c.two_branch(n, **pair, sharpness=q) == least
    sums = [c.alpha_beta(n, alpha=one, beta=each) for one, each in both]
    assert c.two_branch(n, **pair, sharpness=1.0) == pytest.approx(min(sums), rel=1e-12)
    sizes = np.geomspace(1, 1e13, 1001)
    # without a jump where they meet
    steps = np.diff(np.log(c.two_branch(sizes, **pair, sharpness=q)))
    assert np.all(steps >= -1e-12) and np.all(steps <= np.diff(np.log(sizes)) * (1 + 1e-9))


laws = st.fixed_dictionaries({"alpha0": alpha, "alpha1": alpha, "beta0": beta, "beta1": beta})


@given(nbytes, ranks, laws, st.sampled_from(c.OPERATIONS))
def test_the_law_over_ranks_is_pipelined_at_every_count(
    n: float, p: int, law: dict[str, float], name: str
) -> None:
    start, move = (
        law["alpha0"] + law["alpha1"] * c.ring_steps(name, p),
        law["beta0"] + law["beta1"] * (p - 1) / p,
    )
    time, more = c.over_ranks(n, np.array([p, p + 1]), name, **law)
    assert time == pytest.approx(c.pipelined(n, alpha=start, beta=move, sharpness=0.6))
    assert more >= time * (1 - 1e-12)


@given(nbytes, ranks, alpha, beta)
def test_textbook_forms(n: float, p: int, a: float, b: float) -> None:
    """No algorithm beats the link; in the limit a switch that reduces halves the traffic of a
    ring."""
    link = {"ranks": p, "alpha_hop": a, "beta_link": b}

    def ring(size: float, operation: str = "all_reduce", **changes: float) -> float:
        return float(c.ring_collective(size, operation=operation, **link | changes))

    reduce = ring(n)
    assert reduce == pytest.approx(ring(n, "all_gather") + ring(n, "reduce_scatter"))
    assert reduce == pytest.approx(2 * (p - 1) * (a + b * n / p)) and ring(n, ranks=p + 1) > reduce
    for form in (ring, lambda size, **changes: h.in_network_all_reduce(size, **link | changes)):
        assert form(n, ranks=1) == 0 and form(n) >= c.bus_factor("all_reduce", p) / 2 * n * b * (
            1 - 1e-12
        )
    gain = ring(1e30) / h.in_network_all_reduce(1e30, **link)
    assert gain == pytest.approx(2 * (p - 1) / (p + 1)) and gain < 2
    empty, whole, huge = (
        h.tree_collective(x, operation="all_reduce", **link) for x in (0.0, n, 1e30)
    )
    assert whole == pytest.approx(2 * math.log2(p) * a + 2 * b * n)
    assert empty <= ring(0) * (1 + 1e-12) and huge >= ring(1e30)
    assert (
        h.tree_collective(n, operation="reduce", nodes=p, alpha_rail=a, **link | {"alpha_hop": 0.0})
        == whole / 2
    )


# Over nodes.
time = st.floats(0, 1e2)
links = st.fixed_dictionaries(
    {
        "ranks_per_node": st.integers(2, 16),
        "nodes": st.integers(2, 512),
        "alpha_hop": st.floats(1e-7, 1e-3),
        "beta_intra": st.floats(1e-13, 1e-9),
        "beta_rail": st.floats(1e-13, 1e-9),
    }
)
AROUND = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


@given(nbytes, links, st.sampled_from(AROUND))
def test_rings_over_nodes_grow_and_never_beat_their_links(
    n: float, of: dict[str, float], operation: str
) -> None:
    g, count = of["ranks_per_node"], int(of["ranks_per_node"] * of["nodes"])
    t, more = (
        h.ring_across_nodes(n, operation=operation, **{**of, "nodes": of["nodes"] + k})
        for k in (0, 1)
    )
    shares = ((g - 1) / g * of["beta_intra"], of["beta_rail"] / g)
    ends = sorted(c.bus_factor(operation, count) * n * own for own in shares)
    least = c.ring_steps(operation, count) * of["alpha_hop"] + ends[1]
    assert least * (1 - 1e-12) <= t <= least + ends[0] + 1e-9 * t and more >= t * (1 - 1e-12)


@given(time, time, st.floats(1, 50), st.integers(1, 16), st.integers(2, 512))
def test_levels_take_between_the_longer_one_and_the_sum(
    a: float, b: float, q: float, g: int, nodes: int
) -> None:
    t = h.overlap_levels(a, b, sharpness=q)
    assert max(a, b) * (1 - 1e-9) <= t <= (a + b) * (1 + 1e-9)
    assert h.overlap_levels(a, b, sharpness=math.inf) == max(a, b)
    assert h.flat_all_to_all(a, b, ranks_per_node=g, nodes=nodes) >= max(a, b)
    assert h.flat_all_to_all(a, b, ranks_per_node=1, nodes=nodes) == max(a, b)
    assert h.two_level_all_to_all(1e9, a, b, memory_bandwidth=2e12) == pytest.approx(a + b + 2e-3)


@pytest.mark.parametrize("operation", h.LEVELS)
def test_what_leaves_a_node_is_split_over_its_rails(operation: str) -> None:
    inside, share = h.split_levels(operation, 8e9, ranks_per_node=8)
    assert all(size == 8e9 for _, size in inside) and share == (
        8e9 if operation == "all_to_all" else 1e9
    )
    assert sum(c.bus_factor(name, 8) for name, _ in inside) == c.bus_factor(operation, 8)


LINK = {"ranks": 8, "alpha_hop": 1e-6, "beta_link": 1e-11}
LINKS = {
    "ranks_per_node": 8,
    "nodes": 4,
    "alpha_hop": 8e-6,
    "beta_intra": 3e-12,
    "beta_rail": 2e-11,
}
PAIR = {"alpha1": 1e-5, "beta1": 1e-10, "alpha2": 3e-5, "beta2": 1e-11}
FORMS = {
    "alpha_beta": lambda n: c.alpha_beta(n, alpha=1e-5, beta=1e-11),
    "pipelined": lambda n: c.pipelined(n, alpha=1e-5, beta=1e-11),
    "two_branch": lambda n: c.two_branch(n, **PAIR),
    "over_ranks": lambda n: c.over_ranks(
        n, 8, "all_reduce", alpha0=1e-5, alpha1=1e-6, beta0=1e-12, beta1=3e-12
    ),
    "ring": lambda n: c.ring_collective(n, operation="all_reduce", **LINK),
    "tree": lambda n: h.tree_collective(n, operation="all_reduce", **LINK),
    "in_network": lambda n: h.in_network_all_reduce(n, **LINK),
    "ring over nodes": lambda n: h.ring_across_nodes(n, operation="all_gather", **LINKS),
    "overlap": lambda n: h.overlap_levels(3e-12 * n, 1e-12 * n + 1e-5),
    "flat": lambda n: h.flat_all_to_all(3e-12 * n, 1e-12 * n + 1e-5, ranks_per_node=8, nodes=4),
    "two levels": lambda n: h.two_level_all_to_all(n, 3e-12 * n, 1e-12 * n, memory_bandwidth=2e12),
    "share": lambda n: h.split_levels("all_reduce", n, ranks_per_node=8)[1],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arrays_series_and_expressions_agree(form) -> None:
    frame = pl.DataFrame({"n": [0.0, 512.0, 1e6, 1e10]})
    scalars = pytest.approx([float(form(n)) for n in frame["n"]])
    assert (
        np.asarray(form(frame["n"].to_numpy())) == scalars and form(frame["n"]).to_list() == scalars
    )
    assert frame.select(form(pl.col("n")).alias("t"))["t"].to_list() == scalars


def test_operations_that_are_not_known_are_named() -> None:
    for call, message in (
        (
            lambda: c.bus_factor("allreduce", 4),
            r"operation is 'allreduce'; .*did you mean 'all_reduce'",
        ),
        (
            lambda: c.ring_steps("allreduce", 4),
            r"operation is 'allreduce'; .*did you mean 'all_reduce'",
        ),
        (
            lambda: h.split_levels("send_recv", 1e6, ranks_per_node=8),
            "'send_recv'; known are all_reduce, all_gather",
        ),
        (
            lambda: h.ring_across_nodes(1e6, operation="alltoall", **LINKS),
            f"known are {', '.join(c.OPERATIONS)}",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
