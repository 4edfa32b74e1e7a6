"""Closed forms of collectives: published figures, limits, monotony, and the same on scalars, arrays
and frames."""

import math
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import collectives as c
from perfkit.models import hierarchy as h
from perfkit.platform.collective_fits import find_fitted_cost
from perfkit.platform.gallery import load_platform
from tests.refusals import Refusal

nbytes = st.floats(0, 1e12)
alpha = st.floats(1e-7, 1e-2)
beta = st.floats(1e-13, 1e-8)
ranks = st.integers(2, 4096)
#: Rounding of sums that are compared by their order.
DOWN, UP = 1 - 1e-12, 1 + 1e-12

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
        bandwidth = c.bus_bandwidth(size, time, ranks=8, operation=operation)
        assert bandwidth / 1e9 == pytest.approx(busbw, rel=2e-4)
    assert c.bus_factor("all_reduce", 4) == 1.5
    assert c.bus_factor("all_gather", 4) == 0.75
    assert c.bus_factor("broadcast", 4) == 1.0
    assert c.ring_steps("send_recv", 9) == 1


def test_one_rank_sends_nothing_to_others() -> None:
    """But what has a root, or goes to one other rank, counts its message."""
    factors = [c.bus_factor(operation, 1) for operation in c.OPERATIONS]
    assert factors == [0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_two_published_points_give_the_sizes_between() -> None:
    """From the empty message (35.2 µs) and 8 GiB of the all_reduce log above to four sizes of the
    same log."""
    sizes = np.array([2.0**20, 2.0**24, 2.0**26, 2.0**30])
    measured = np.array([74.78e-6, 226.0e-6, 584.5e-6, 8159.5e-6])
    ends = {"alpha": 35.2e-6, "beta": 63896e-6 / 8589934592}
    pipelined = np.abs(c.pipelined(sizes, **ends) / measured - 1).mean()
    classic = np.abs(c.alpha_beta(sizes, **ends) / measured - 1).mean()
    assert pipelined < 0.12
    assert classic > 0.18


@given(nbytes, alpha, beta, st.floats(0.3, 50))
def test_pipelined_is_bounded_and_monotone_and_holds_the_special_cases(
    n: float, a: float, b: float, q: float
) -> None:
    time = c.pipelined(n, alpha=a, beta=b, sharpness=q)
    assert time >= max(a, b * n) * DOWN
    assert c.pipelined(n * 1.1 + 1, alpha=a, beta=b, sharpness=q) >= time * DOWN
    assert c.pipelined(n, alpha=a * 1.1, beta=b, sharpness=q) >= time * DOWN
    assert c.pipelined(n, alpha=a, beta=b * 1.1, sharpness=q) >= time * DOWN
    total = c.alpha_beta(n, alpha=a, beta=b)
    assert c.pipelined(n, alpha=a, beta=b, sharpness=1) == pytest.approx(total)
    chunked = a + b * n + 2 * math.sqrt(a * b * n)
    assert c.pipelined(n, alpha=a, beta=b, sharpness=0.5) == pytest.approx(chunked)
    assert c.pipelined(0.0, alpha=a, beta=b) == pytest.approx(a)
    assert c.pipelined(1e30, alpha=a, beta=b) == pytest.approx(b * 1e30, rel=1e-4)


@given(nbytes, alpha, beta, st.floats(1, 100), st.floats(1, 100), st.floats(0.3, 5))
def test_two_protocols_are_the_better_of_both(
    n: float, a: float, b: float, up: float, down: float, q: float
) -> None:
    quick_start = {"alpha": a, "beta": down * b}
    high_rate = {"alpha": up * a, "beta": b}
    pair = {"alpha1": a, "beta1": down * b, "alpha2": up * a, "beta2": b}
    better = min(
        c.pipelined(n, **quick_start, sharpness=q), c.pipelined(n, **high_rate, sharpness=q)
    )
    assert c.two_branch(n, **pair, sharpness=q) == better
    better_sum = min(c.alpha_beta(n, **quick_start), c.alpha_beta(n, **high_rate))
    assert c.two_branch(n, **pair, sharpness=1.0) == pytest.approx(better_sum, rel=1e-12)
    sizes = np.geomspace(1, 1e13, 1001)
    # without a jump where they meet
    steps = np.diff(np.log(c.two_branch(sizes, **pair, sharpness=q)))
    assert np.all(steps >= -1e-12)
    assert np.all(steps <= np.diff(np.log(sizes)) * (1 + 1e-9))


laws = st.fixed_dictionaries({"alpha0": alpha, "alpha1": alpha, "beta0": beta, "beta1": beta})


@given(nbytes, ranks, laws, st.sampled_from(c.OPERATIONS))
def test_the_law_over_ranks_is_pipelined_at_every_count(
    n: float, p: int, law: dict[str, float], name: str
) -> None:
    start = law["alpha0"] + law["alpha1"] * c.ring_steps(name, p)
    seconds_per_byte = law["beta0"] + law["beta1"] * (p - 1) / p
    time, time_of_more_ranks = c.over_ranks(n, np.array([p, p + 1]), name, **law)
    pipelined = c.pipelined(n, alpha=start, beta=seconds_per_byte, sharpness=0.6)
    assert time == pytest.approx(pipelined)
    assert time_of_more_ranks >= time * DOWN


def ring(size: float, operation: str = "all_reduce", **link: float) -> float:
    return float(c.ring_collective(size, operation=operation, **link))


@given(nbytes, ranks, alpha, beta)
def test_a_ring_reduces_and_gathers_in_steps_of_one_part(
    n: float, p: int, a: float, b: float
) -> None:
    link = {"ranks": p, "alpha_hop": a, "beta_link": b}
    reduced = ring(n, **link)
    gathered = ring(n, "all_gather", **link)
    scattered = ring(n, "reduce_scatter", **link)
    assert reduced == pytest.approx(gathered + scattered)
    assert reduced == pytest.approx(2 * (p - 1) * (a + b * n / p))
    assert ring(n, ranks=p + 1, alpha_hop=a, beta_link=b) > reduced


@pytest.mark.parametrize("form", [ring, h.in_network_all_reduce])
@given(n=nbytes, p=ranks, a=alpha, b=beta)
def test_no_reduction_beats_the_link_and_one_rank_needs_none(
    form: Any, n: float, p: int, a: float, b: float
) -> None:
    assert form(n, ranks=1, alpha_hop=a, beta_link=b) == 0
    least = c.bus_factor("all_reduce", p) / 2 * n * b
    assert form(n, ranks=p, alpha_hop=a, beta_link=b) >= least * DOWN


@given(ranks, alpha, beta)
def test_a_switch_that_reduces_halves_the_traffic_of_a_ring(p: int, a: float, b: float) -> None:
    link = {"ranks": p, "alpha_hop": a, "beta_link": b}
    gain = ring(1e30, **link) / h.in_network_all_reduce(1e30, **link)
    assert gain == pytest.approx(2 * (p - 1) / (p + 1))
    assert gain < 2


@given(nbytes, ranks, alpha, beta)
def test_a_tree_is_quick_to_start_and_slow_to_move(n: float, p: int, a: float, b: float) -> None:
    link = {"ranks": p, "alpha_hop": a, "beta_link": b}

    def tree(size: float) -> float:
        return float(h.tree_collective(size, operation="all_reduce", **link))

    assert tree(n) == pytest.approx(2 * math.log2(p) * a + 2 * b * n)
    assert tree(0.0) <= ring(0.0, **link) * UP
    assert tree(1e30) >= ring(1e30, **link)
    over_nodes = h.tree_collective(
        n, operation="reduce", nodes=p, ranks=p, alpha_hop=0.0, alpha_rail=a, beta_link=b
    )
    assert over_nodes == tree(n) / 2


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
    ranks_per_node = of["ranks_per_node"]
    count = int(ranks_per_node * of["nodes"])
    more_nodes = of | {"nodes": of["nodes"] + 1}
    time = h.ring_across_nodes(n, operation=operation, **of)
    assert h.ring_across_nodes(n, operation=operation, **more_nodes) >= time * DOWN

    traffic = c.bus_factor(operation, count) * n
    inside = traffic * (ranks_per_node - 1) / ranks_per_node * of["beta_intra"]
    between = traffic * of["beta_rail"] / ranks_per_node
    start = c.ring_steps(operation, count) * of["alpha_hop"]
    assert time >= (start + max(inside, between)) * DOWN
    assert time <= start + inside + between + 1e-9 * time


@given(time, time, st.floats(1, 50), st.integers(1, 16), st.integers(2, 512))
def test_levels_take_between_the_longer_one_and_the_sum(
    a: float, b: float, q: float, g: int, nodes: int
) -> None:
    t = h.overlap_levels(a, b, sharpness=q)
    assert max(a, b) * (1 - 1e-9) <= t <= (a + b) * (1 + 1e-9)
    assert h.overlap_levels(a, b, sharpness=math.inf) == max(a, b)
    messages = h.start_messages(1e6, ranks_per_node=g, nodes=nodes)
    assert h.flat_all_to_all(a, b, messages) >= max(a, b)
    alone = h.start_messages(1e6, ranks_per_node=1, nodes=nodes)
    assert h.flat_all_to_all(a, b, alone) == max(a, b)
    assert h.two_level_all_to_all(1e9, a, b, memory_bandwidth=2e12) == pytest.approx(a + b + 2e-3)


def test_short_messages_to_a_node_are_sent_together() -> None:
    """64 ranks of 8 nodes: 49 messages besides the 7 of one rank a node, 3 µs each where they fill
    chunks of 128 KiB, which 8 MiB in all do; half as long ones take half of that. Without a link
    inside nodes each is sent by itself."""
    start = partial(h.start_messages, ranks_per_node=8, nodes=8)
    assert start(2**23) == start(2**30) == pytest.approx(147e-6)
    assert start(2**22) == pytest.approx(147e-6 / 2)
    assert start(0.0) == 0.0
    assert start(1024.0, chunk=0.0) == pytest.approx(147e-6)


def test_a_tree_of_flags_by_hand() -> None:
    """Two nodes of two ranks: 1 MB leaves each rank once inside its node and once on half of a rail.
    1e-11 and 2e-11 s/B: 10 and 10 µs, 20 µs if they add up; 4 times with flags: 80 beside 80 µs."""
    links = {"ranks_per_node": 2, "nodes": 2, "beta_intra": 1e-11, "beta_rail": 2e-11}
    both = 1e-5 * 2 ** (1 / h.OVERLAP)
    time = h.pipelined_tree(1e6, start_up=4 * both, expansion=4.0, **links)
    assert time == pytest.approx(4 * both * 2 ** (1 / 0.6))
    assert h.pipelined_tree(0.0, start_up=8e-5, **links) == pytest.approx(8e-5)


@pytest.mark.parametrize("operation", h.LEVELS)
def test_what_leaves_a_node_is_split_over_its_rails(operation: str) -> None:
    inside, share = h.split_levels(operation, 8e9, ranks_per_node=8)
    if operation == "all_to_all":
        assert share == 8e9
    else:
        assert share == 1e9
    assert {size for _, size in inside} <= {8e9}
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
LAW = {"alpha0": 1e-5, "alpha1": 1e-6, "beta0": 1e-12, "beta1": 3e-12}


def inside(n: Any) -> Any:
    return 3e-12 * n


def between(n: Any) -> Any:
    return 1e-12 * n + 1e-5


def overlapping_levels(n: Any) -> Any:
    return h.overlap_levels(inside(n), between(n))


def flat_all_to_all(n: Any) -> Any:
    return h.flat_all_to_all(inside(n), between(n), h.start_messages(n, ranks_per_node=8, nodes=4))


def flagged_tree(n: Any) -> Any:
    links = {name: size for name, size in LINKS.items() if name != "alpha_hop"}
    return h.pipelined_tree(n, start_up=8e-5, expansion=4.0, **links)


def two_level_all_to_all(n: Any) -> Any:
    return h.two_level_all_to_all(n, inside(n), 1e-12 * n, memory_bandwidth=2e12)


def share_of_a_rail(n: Any) -> Any:
    return h.split_levels("all_reduce", n, ranks_per_node=8)[1]


#: Closed forms of the size of a message.
FORMS = {
    "alpha_beta": partial(c.alpha_beta, alpha=1e-5, beta=1e-11),
    "pipelined": partial(c.pipelined, alpha=1e-5, beta=1e-11),
    "two_branch": partial(c.two_branch, **PAIR),
    "over_ranks": partial(c.over_ranks, ranks=8, operation="all_reduce", **LAW),
    "ring": partial(c.ring_collective, operation="all_reduce", **LINK),
    "tree": partial(h.tree_collective, operation="all_reduce", **LINK),
    "in_network": partial(h.in_network_all_reduce, **LINK),
    "ring over nodes": partial(h.ring_across_nodes, operation="all_gather", **LINKS),
    "overlap": overlapping_levels,
    "flat": flat_all_to_all,
    "tree with flags": flagged_tree,
    "two levels": two_level_all_to_all,
    "share": share_of_a_rail,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arrays_series_and_expressions_agree(form: Any) -> None:
    frame = pl.DataFrame({"n": [0.0, 512.0, 1e6, 1e10]})
    scalars = pytest.approx([float(form(n)) for n in frame["n"]])
    assert np.asarray(form(frame["n"].to_numpy())) == scalars
    assert form(frame["n"]).to_list() == scalars
    assert frame.select(form(pl.col("n")).alias("t"))["t"].to_list() == scalars


ALL_OPERATIONS = ", ".join(c.OPERATIONS)
UNKNOWN_OPERATIONS = [
    Refusal(
        c.bus_factor,
        {"operation": "allreduce", "ranks": 4},
        r"operation is 'allreduce'; .*did you mean 'all_reduce'",
    ),
    Refusal(
        c.ring_steps,
        {"operation": "allreduce", "ranks": 4},
        r"operation is 'allreduce'; .*did you mean 'all_reduce'",
    ),
    Refusal(
        h.split_levels,
        {"operation": "send_recv", "nbytes": 1e6, "ranks_per_node": 8},
        "'send_recv'; known are all_reduce, all_gather",
    ),
    Refusal(
        h.ring_across_nodes,
        {"nbytes": 1e6, "operation": "alltoall", **LINKS},
        f"known are {ALL_OPERATIONS}",
    ),
]


@pytest.mark.parametrize("case", UNKNOWN_OPERATIONS, ids=lambda case: case.function.__name__)
def test_operations_that_are_not_known_are_named(case: Refusal) -> None:
    with pytest.raises(ValueError, match=case.message):
        case.call()


@pytest.mark.parametrize(
    ("fact", "names"),
    [
        ("reduces", {"all_reduce", "reduce_scatter", "reduce"}),
        ("has_root", {"gather", "scatter", "broadcast", "reduce"}),
        ("in_pairs", {"all_to_all", "gather", "scatter", "send_recv"}),
        (
            "in_workloads",
            {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"},
        ),
    ],
)
def test_a_fact_holds_of_these_operations_alone(fact: str, names: set[str]) -> None:
    having = {name for name, collective in c.COLLECTIVES.items() if getattr(collective, fact)}
    assert having == names


def test_a_node_whose_collectives_are_far_below_its_link_says_so() -> None:
    """Eight L40S were measured at 0.04 of PCIe, two at 0.64; an H100 reaches 0.7 and more."""
    for name, ranks, doubted in (
        ("l40s-8", 8, True),
        ("l40s-8", 2, False),
        ("h100-sxm-8", 8, False),
    ):
        cost = find_fitted_cost(load_platform(name), "all_gather", ranks)
        assert cost is not None
        notes = cost.price(np.array([1e8])).notes
        assert any("of the link of NVIDIA L40S" in note for note in notes) is doubted
