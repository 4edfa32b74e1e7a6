import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from perfkit.models import collectives as c

nbytes = st.floats(0, 1e12)
alpha = st.floats(1e-7, 1e-2)
beta = st.floats(1e-13, 1e-8)


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
def test_bandwidths_as_nccl_tests_prints_them(
    operation: str, size: int, time: float, algbw: float, busbw: float
) -> None:
    assert c.algorithm_bandwidth(size, time) / 1e9 == pytest.approx(algbw, rel=2e-4)
    assert c.bus_bandwidth(size, time, ranks=8, operation=operation) / 1e9 == pytest.approx(busbw, rel=2e-4)


def test_two_published_points_give_the_sizes_between() -> None:
    """From the empty message (35.2 µs) and 8 GiB of the all_reduce log above to four sizes of the same log."""
    sizes = np.array([2.0**20, 2.0**24, 2.0**26, 2.0**30])
    measured = np.array([74.78e-6, 226.0e-6, 584.5e-6, 8159.5e-6])
    ends = {"alpha": 35.2e-6, "beta": 63896e-6 / 8589934592}
    pipelined, classic = (np.abs(form(sizes, **ends) / measured - 1).mean() for form in (c.pipelined, c.alpha_beta))
    assert pipelined < 0.12 < 0.18 < classic


@given(nbytes, alpha, beta, st.floats(0.3, 50))
def test_pipelined_is_bounded_and_monotone(n: float, a: float, b: float, q: float) -> None:
    time = c.pipelined(n, alpha=a, beta=b, sharpness=q)
    assert time >= max(a, b * n) * (1 - 1e-12)
    assert c.pipelined(n * 1.1 + 1, alpha=a, beta=b, sharpness=q) >= time * (1 - 1e-12)
    assert c.pipelined(n, alpha=a * 1.1, beta=b, sharpness=q) >= time * (1 - 1e-12)
    assert c.pipelined(n, alpha=a, beta=b * 1.1, sharpness=q) >= time * (1 - 1e-12)
    assert c.pipelined(n * (1 + 1e-9), alpha=a, beta=b, sharpness=q) == pytest.approx(time, rel=1e-8)


@given(nbytes, alpha, beta)
def test_pipelined_holds_the_special_cases(n: float, a: float, b: float) -> None:
    assert c.pipelined(n, alpha=a, beta=b, sharpness=1) == pytest.approx(c.alpha_beta(n, alpha=a, beta=b))
    chunked = a + b * n + 2 * math.sqrt(a * b * n)
    assert c.pipelined(n, alpha=a, beta=b, sharpness=0.5) == pytest.approx(chunked)


@given(alpha, beta)
def test_limits_of_small_and_large_messages(a: float, b: float) -> None:
    for form in (c.alpha_beta, c.pipelined):
        assert form(0.0, alpha=a, beta=b) == pytest.approx(a)
        assert form(1e30, alpha=a, beta=b) == pytest.approx(b * 1e30, rel=1e-4)
    both = {"alpha1": a, "beta1": 10 * b, "alpha2": 3 * a, "beta2": b}
    assert c.two_regime(0.0, **both) == pytest.approx(a)
    assert c.two_regime(1e30, **both) == pytest.approx(b * 1e30)
    switch = 2 * a / (9 * b)
    low, high = c.two_regime(np.array([switch * (1 - 1e-9), switch * (1 + 1e-9)]), **both)
    assert low == pytest.approx(high) and low <= high


@given(nbytes, st.integers(1, 4096), alpha, beta)
def test_textbook_forms(n: float, p: int, a: float, b: float) -> None:
    link = {"ranks": p, "alpha_hop": a, "beta_link": b}
    gather, scatter, reduce = (
        c.ring_all_gather(n, **link),
        c.ring_reduce_scatter(n, **link),
        c.ring_all_reduce(n, **link),
    )
    assert reduce == pytest.approx(gather + scatter)
    assert reduce == pytest.approx(c.ring_steps("all_reduce", p) * a + c.bus_factor("all_reduce", p) * b * n)
    assert gather == pytest.approx(c.ring_steps("all_gather", p) * a + c.bus_factor("all_gather", p) * b * n)
    tree = c.tree_all_reduce(n, **link)
    if p == 1:
        assert gather == reduce == tree == 0
    else:
        assert c.ring_all_reduce(0, **link) == pytest.approx(2 * (p - 1) * a)
        assert tree == pytest.approx(2 * math.log2(p) * a + 2 * b * n)
        assert c.tree_all_reduce(0, **link) <= c.ring_all_reduce(0, **link) * (1 + 1e-12)
        assert c.ring_all_reduce(1e30, **link) <= c.tree_all_reduce(1e30, **link)
    assert c.ring_all_reduce(n, ranks=p + 1, alpha_hop=a, beta_link=b) > reduce


def test_bus_factors_of_the_nccl_tests_page() -> None:
    """NVIDIA nccl-tests, doc/PERFORMANCE.md."""
    assert [c.bus_factor(op, 4) for op in ("all_reduce", "all_gather", "broadcast")] == [1.5, 0.75, 1.0]
    assert [c.bus_factor(op, 1) for op in c.OPERATIONS] == [0] * 6 + [1] * 3
    assert c.ring_steps("send_recv", 9) == 1
    assert c.bus_factor("all_reduce", np.array([2, 4, 8])).tolist() == [1.0, 1.5, 1.75]
    for function in (c.bus_factor, c.ring_steps):
        with pytest.raises(ValueError, match=r"operation is 'allreduce'; .*did you mean 'all_reduce'"):
            function("allreduce", 4)


split = st.integers(2, 6).flatmap(lambda p: arrays(float, (p, p), elements=st.floats(0, 1e9)))


@given(split, st.floats(1, 10))
def test_equivalent_bytes_follow_the_busiest_port(s: np.ndarray, factor: float) -> None:
    p = len(s)
    n = float(c.equivalent_bytes(s))
    out = [sum(s[i, j] for j in range(p) if j != i) for i in range(p)]
    into = [sum(s[j, i] for j in range(p) if j != i) for i in range(p)]
    assert n == pytest.approx(p / (p - 1) * max(*out, *into))
    assert n == c.equivalent_bytes(s.T)
    assert c.equivalent_bytes(s + np.diag(np.full(p, 1e9))) == n
    assert c.equivalent_bytes(factor * s) == pytest.approx(factor * n)
    assert c.equivalent_bytes(np.stack([s, 2 * s])) == pytest.approx([n, 2 * n])


def test_equivalent_bytes_of_balanced_and_table_wise_splits() -> None:
    assert c.equivalent_bytes(np.full((4, 4), 25.0)) == pytest.approx(100)
    assert c.equivalent_bytes(np.repeat([[1.0], [5.0], [2.0]], 3, axis=1)) == pytest.approx(3 * 5)
    assert c.equivalent_bytes([[7.0]]) == 0


@pytest.mark.parametrize(
    "bad", [[1.0, 2.0], [[1.0, 2.0]], np.zeros((0, 0)), [[0, -1], [1, 0]], [[0, math.nan], [1, 0]]]
)
def test_splits_that_are_none(bad: object) -> None:
    with pytest.raises(ValueError, match=r"^split (has shape|holds)"):
        c.equivalent_bytes(bad)


def test_arrays_series_and_expressions_agree() -> None:
    frame = pl.DataFrame({"n": [0.0, 512.0, 1e6, 1e10]})
    link = {"ranks": 8, "alpha_hop": 1e-6, "beta_link": 1e-11}
    forms = {
        "alpha_beta": lambda n: c.alpha_beta(n, alpha=1e-5, beta=1e-11),
        "pipelined": lambda n: c.pipelined(n, alpha=1e-5, beta=1e-11),
        "two_regime": lambda n: c.two_regime(n, alpha1=1e-5, beta1=1e-10, alpha2=3e-5, beta2=1e-11),
        "ring": lambda n: c.ring_all_reduce(n, **link),
        "tree": lambda n: c.tree_all_reduce(n, **link),
    }
    for name, form in forms.items():
        scalars = [float(form(n)) for n in frame["n"]]
        assert form(frame["n"].to_numpy()) == pytest.approx(scalars), name
        assert form(frame["n"]).to_list() == pytest.approx(scalars), name
        assert frame.select(form(pl.col("n")).alias("t"))["t"].to_list() == pytest.approx(scalars), name
