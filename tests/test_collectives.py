"""Closed forms of collectives: published figures, limits, monotony, and the same on scalars, arrays and frames."""

import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import collectives as c

nbytes, alpha, beta, ranks = st.floats(0, 1e12), st.floats(1e-7, 1e-2), st.floats(1e-13, 1e-8), st.integers(2, 4096)

# microsoft/superbenchmark@700d6501f110, tests/data/nccl_*.log, 8 x A100-SXM4-40GB: size, time, algbw, busbw as printed
SUPERBENCH = [
    ("all_reduce", 67108864, 584.5e-6, 114.81, 200.91),
    ("all_reduce", 8589934592, 63896e-6, 134.44, 235.26),
    ("all_to_all", 134217728, 633.6e-6, 211.83, 185.35),
    ("all_gather", 134217728, 698.6e-6, 192.13, 168.12),
    ("reduce_scatter", 8589934592, 32464e-6, 264.60, 231.52),
    ("broadcast", 8589934592, 36896e-6, 232.81, 232.81),
]


@pytest.mark.parametrize(("operation", "size", "time", "algbw", "busbw"), SUPERBENCH)
def test_bandwidths_as_nccl_tests_prints_them(operation, size, time, algbw, busbw):
    assert size / time / 1e9 == pytest.approx(algbw, rel=2e-4)
    assert c.bus_bandwidth(size, time, ranks=8, operation=operation) / 1e9 == pytest.approx(busbw, rel=2e-4)


def test_two_published_points_give_the_sizes_between() -> None:
    """From the empty message (35.2 µs) and 8 GiB of the all_reduce log above to four sizes of the same log."""
    sizes = np.array([2.0**20, 2.0**24, 2.0**26, 2.0**30])
    measured = np.array([74.78e-6, 226.0e-6, 584.5e-6, 8159.5e-6])
    ends = {"alpha": 35.2e-6, "beta": 63896e-6 / 8589934592}
    pipelined, classic = (np.abs(form(sizes, **ends) / measured - 1).mean() for form in (c.pipelined, c.alpha_beta))
    assert pipelined < 0.12 < 0.18 < classic


@given(nbytes, alpha, beta, st.floats(0.3, 50))
def test_pipelined_is_bounded_and_monotone_and_holds_the_special_cases(n: float, a: float, b: float, q: float) -> None:
    time = c.pipelined(n, alpha=a, beta=b, sharpness=q)
    assert time >= max(a, b * n) * (1 - 1e-12)
    for more in ((n * 1.1 + 1, a, b), (n, a * 1.1, b), (n, a, b * 1.1)):
        assert c.pipelined(more[0], alpha=more[1], beta=more[2], sharpness=q) >= time * (1 - 1e-12)
    assert c.pipelined(n * (1 + 1e-9), alpha=a, beta=b, sharpness=q) == pytest.approx(time, rel=1e-8)
    assert c.pipelined(n, alpha=a, beta=b, sharpness=1) == pytest.approx(c.alpha_beta(n, alpha=a, beta=b))
    chunked = a + b * n + 2 * math.sqrt(a * b * n)
    assert c.pipelined(n, alpha=a, beta=b, sharpness=0.5) == pytest.approx(chunked)


@given(alpha, beta)
def test_limits_of_small_and_large_messages(a: float, b: float) -> None:
    for form in (c.alpha_beta, c.pipelined):
        assert form(0.0, alpha=a, beta=b) == pytest.approx(a)
        assert form(1e30, alpha=a, beta=b) == pytest.approx(b * 1e30, rel=1e-4)
    both, switch = {"alpha1": a, "beta1": 10 * b, "alpha2": 3 * a, "beta2": b}, 2 * a / (9 * b)
    empty, low, high, huge = c.two_regime(np.array([0.0, switch * (1 - 1e-9), switch * (1 + 1e-9), 1e30]), **both)
    assert (empty, huge) == (pytest.approx(a), pytest.approx(b * 1e30)) and low == pytest.approx(high) and low <= high


branches = st.tuples(alpha, beta, st.floats(1, 100), st.floats(1, 100), st.floats(0.3, 5)).map(
    lambda x: {"alpha1": x[0], "beta1": x[3] * x[1], "alpha2": x[2] * x[0], "beta2": x[1], "sharpness": x[4]}
)


@given(nbytes, branches)
def test_two_branches_are_the_better_of_two_pipelines(n: float, p: dict[str, float]) -> None:
    time, q = c.two_branch(n, **p), p["sharpness"]
    pair = [c.pipelined(n, alpha=p[f"alpha{i}"], beta=p[f"beta{i}"], sharpness=q) for i in (1, 2)]
    assert time == min(pair) and c.two_branch(0.0, **p) == pytest.approx(p["alpha1"])
    sizes = np.geomspace(1, 1e13, 1001)
    steps = np.diff(np.log(c.two_branch(sizes, **p)))  # without a jump where they meet
    assert np.all(steps >= -1e-12) and np.all(steps <= np.diff(np.log(sizes)) * (1 + 1e-9))


laws = st.fixed_dictionaries({"alpha0": alpha, "alpha1": alpha, "beta0": beta, "beta1": beta})


@given(nbytes, ranks, laws, st.sampled_from(c.OPERATIONS))
def test_the_law_over_ranks_is_pipelined_at_every_count(n: float, p: int, law: dict[str, float], name: str) -> None:
    start, move = law["alpha0"] + law["alpha1"] * c.ring_steps(name, p), law["beta0"] + law["beta1"] * (p - 1) / p
    time, more = c.over_ranks(n, np.array([p, p + 1]), name, **law)
    assert time == pytest.approx(c.pipelined(n, alpha=start, beta=move, sharpness=0.6))
    assert more >= time * (1 - 1e-12) and c.over_ranks(n * 1.1 + 1, p, name, **law) >= time * (1 - 1e-12)


@given(nbytes, ranks, alpha, beta)
def test_textbook_forms(n: float, p: int, a: float, b: float) -> None:
    """No algorithm beats the link; in the limit a switch that reduces halves the traffic of a ring."""
    link = {"ranks": p, "alpha_hop": a, "beta_link": b}
    gather, scatter, reduce = (
        c.ring_collective(n, operation=name, **link) for name in ("all_gather", "reduce_scatter", "all_reduce")
    )
    assert reduce == pytest.approx(gather + scatter) and reduce == c.ring_all_reduce(n, **link)
    assert reduce == pytest.approx(2 * (p - 1) * (a + b * n / p))
    assert c.ring_all_reduce(n, **{**link, "ranks": p + 1}) > reduce
    for form in (c.ring_all_reduce, c.in_network_all_reduce):
        assert form(n, **{**link, "ranks": 1}) == 0
        assert form(n, **link) >= c.bus_factor("all_reduce", p) / 2 * n * b * (1 - 1e-12)
    gain = c.ring_all_reduce(1e30, **link) / c.in_network_all_reduce(1e30, **link)
    assert gain == pytest.approx(2 * (p - 1) / (p + 1)) and gain < 2
    empty, whole, huge = (c.tree_collective(x, operation="all_reduce", **link) for x in (0.0, n, 1e30))
    assert whole == pytest.approx(2 * math.log2(p) * a + 2 * b * n)
    assert whole == pytest.approx(2 * c.tree_collective(n, operation="broadcast", **link))
    assert empty <= c.ring_all_reduce(0, **link) * (1 + 1e-12) and huge >= c.ring_all_reduce(1e30, **link)
    assert c.tree_collective(n, operation="reduce", nodes=p, alpha_rail=a, **{**link, "alpha_hop": 0.0}) == whole / 2


def test_bus_factors_of_the_nccl_tests_page() -> None:
    """NVIDIA nccl-tests, doc/PERFORMANCE.md."""
    assert [c.bus_factor(op, 4) for op in ("all_reduce", "all_gather", "broadcast")] == [1.5, 0.75, 1.0]
    assert [c.bus_factor(op, 1) for op in c.OPERATIONS] == [0] * 6 + [1] * 3
    assert c.ring_steps("send_recv", 9) == 1
    for function in (c.bus_factor, c.ring_steps):
        with pytest.raises(ValueError, match=r"operation is 'allreduce'; .*did you mean 'all_reduce'"):
            function("allreduce", 4)


LINK = {"ranks": 8, "alpha_hop": 1e-6, "beta_link": 1e-11}
PAIR = {"alpha1": 1e-5, "beta1": 1e-10, "alpha2": 3e-5, "beta2": 1e-11}


FORMS = {
    "alpha_beta": lambda n: c.alpha_beta(n, alpha=1e-5, beta=1e-11),
    "pipelined": lambda n: c.pipelined(n, alpha=1e-5, beta=1e-11),
    "two_regime": lambda n: c.two_regime(n, **PAIR),
    "two_branch": lambda n: c.two_branch(n, **PAIR),
    "over_ranks": lambda n: c.over_ranks(n, 8, "all_reduce", alpha0=1e-5, alpha1=1e-6, beta0=1e-12, beta1=3e-12),
    "in_network": lambda n: c.in_network_all_reduce(n, **LINK),
    "ring": lambda n: c.ring_all_reduce(n, **LINK),
    "tree": lambda n: c.tree_collective(n, operation="all_reduce", **LINK),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_arrays_series_and_expressions_agree(form) -> None:
    frame = pl.DataFrame({"n": [0.0, 512.0, 1e6, 1e10]})
    scalars = pytest.approx([float(form(n)) for n in frame["n"]])
    assert form(frame["n"].to_numpy()) == scalars and form(frame["n"]).to_list() == scalars
    assert frame.select(form(pl.col("n")).alias("t"))["t"].to_list() == scalars
