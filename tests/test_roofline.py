import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.models import roofline as r

size = st.integers(1, 2**20)
positive = st.floats(1e-12, 1e12)


def test_roofline_of_williams_2009() -> None:
    """Williams, Waterman, Patterson 2009, figure 1a: Opteron X2 with 17.6 GFLOP/s and 15 GB/s."""
    opteron = {"peak": 17.6e9, "bandwidth": 15e9, "sharpness": math.inf}
    for intensity, attainable in [(0.25, 3.75e9), (1.0, 15e9), (16.0, 17.6e9)]:
        assert intensity * 1e9 / r.roofline_time(intensity * 1e9, 1e9, **opteron) == pytest.approx(
            attainable
        )


def test_transformer_layer_flops_of_narayanan_2021() -> None:
    """Narayanan et al. 2021, arXiv:2104.04473, appendix: 24 B s h^2 + 4 B s^2 h for the forward
    pass of one layer."""
    batch = 4
    sequence = 512
    heads = 16
    head_width = 64
    tokens = batch * sequence
    hidden = heads * head_width
    projections = r.gemm_flops(tokens, 3 * hidden, hidden) + r.gemm_flops(tokens, hidden, hidden)
    mlp = 2 * r.gemm_flops(tokens, 4 * hidden, hidden)
    attention = r.attention_flops(batch, heads, sequence, head_width)
    published = 24 * tokens * hidden**2 + 4 * batch * sequence**2 * hidden
    assert projections + mlp + attention == published


def test_attention_counts() -> None:
    """Dao 2023, arXiv:2307.08691, section 4.1: 4 s^2 d heads, half if causal; as many as its two
    batched products."""
    forward = r.attention_flops(8, 16, 2048, 128)
    assert forward == 4 * 2048**2 * 128 * 16 * 8 == 2 * r.gemm_flops(2048, 2048, 128, batch=8 * 16)
    assert r.attention_flops(8, 16, 2048, 128, causal=np.array([True, False])).tolist() == [
        forward / 2,
        forward,
    ]
    assert r.attention_bytes(2, 8, 512, 64, kv_heads=2, itemsize=2) == 2 * 2 * 512 * 64 * (
        8 + 8 + 2 + 2
    )


def test_traffic_of_the_formulary() -> None:
    assert [
        r.optimizer_bytes(o, 10) for o in ("sgd", "sgd_momentum", "adagrad", "adamw_fused", "adamw")
    ] == [
        120,
        320,
        520,
        280,
        800,
    ]
    with pytest.raises(ValueError, match=r"optimizer is 'lamb'"):
        r.optimizer_bytes("lamb", 1)


@given(
    st.lists(st.just(0.0) | st.floats(1e-290, 1e290), min_size=1, max_size=4), st.floats(0.3, 50)
)
def test_smooth_maximum_lies_between_maximum_and_power_sum(terms: list[float], q: float) -> None:
    """And neither under- nor overflows."""
    value, x = r.smooth_maximum(*terms, sharpness=q), min(terms[0], 1e280)
    assert max(terms) * (1 - 1e-12) <= value <= max(terms) * len(terms) ** (1 / q) * (1 + 1e-12)
    assert r.smooth_maximum(*terms, sharpness=math.inf) == max(terms)
    assert r.smooth_maximum(x, x, sharpness=q) == pytest.approx(x * 2 ** (1 / q))


@given(positive, positive, st.floats(1, 2), st.floats(0.5, 20))
def test_roofline_grows_with_work_and_never_beats_its_bounds(flops, nbytes, more, q):
    hardware = {"peak": 1e13, "bandwidth": 1e12, "launch": 5e-6, "sharpness": q}
    time = r.roofline_time(flops, nbytes, **hardware)
    assert time >= 5e-6 + max(flops / 1e13, nbytes / 1e12) * (1 - 1e-12)
    assert r.roofline_time(more * flops, nbytes, **hardware) >= time * (1 - 1e-12)
    assert r.roofline_time(flops, more * nbytes, **hardware) >= time * (1 - 1e-12)
    assert r.roofline_time(flops * (1 + 1e-9), nbytes, **hardware) == pytest.approx(time, rel=1e-8)
    assert r.roofline_time(0, 0, **hardware) == 5e-6


@given(size, size, size, st.integers(1, 64), st.sampled_from([1, 2, 4, 8]))
def test_gemm_counts_are_exact_and_symmetric(
    m: int, n: int, k: int, batch: int, itemsize: int
) -> None:
    assert r.gemm_flops(m, n, k, batch=batch) == pytest.approx(2 * batch * m * n * k, rel=1e-15)
    nbytes = itemsize * batch * (m * k + k * n + m * n)
    assert r.gemm_bytes(m, n, k, batch=batch, itemsize=itemsize) == pytest.approx(nbytes, rel=1e-15)
    assert r.gemm_flops(m, k, n, batch=batch) == r.gemm_flops(k, n, m, batch=batch)


def test_integer_arrays_do_not_overflow() -> None:
    huge = np.array([2**22])
    assert r.gemm_flops(huge, huge, huge)[0] == 2.0**67
    assert r.gemm_bytes(huge, huge, huge, batch=huge)[0] == 12 * 2.0**66
    assert r.attention_bytes(huge, huge, huge, huge, kv_heads=huge)[0] == 4 * 4 * 2.0**88


@given(st.integers(0, 2**40), st.sampled_from([1, 8, 32, 64]))
def test_round_up(x: int, multiple: int) -> None:
    rounded = r.round_up(x, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - x < multiple


def test_arrays_series_and_expressions_agree() -> None:
    frame = pl.DataFrame({"flops": [0.0, 1e9, 1e12], "nbytes": [1e6, 1e9, 0.0]})
    hardware = {"peak": 1e13, "bandwidth": 1e12, "launch": 5e-6}
    scalars = [float(r.roofline_time(f, n, **hardware)) for f, n in frame.iter_rows()]
    assert r.roofline_time(
        frame["flops"].to_numpy(), frame["nbytes"].to_numpy(), **hardware
    ) == pytest.approx(scalars)
    assert r.roofline_time(frame["flops"], frame["nbytes"], **hardware).to_list() == pytest.approx(
        scalars
    )
    expression = r.roofline_time(pl.col("flops"), pl.col("nbytes"), **hardware)
    assert frame.select(expression.alias("t"))["t"].to_list() == pytest.approx(scalars)
