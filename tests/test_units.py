import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfkit.ground.hardware import Quantity
from perfkit.ground.units import (
    check_choice,
    check_positive,
    format_bytes,
    format_rate,
    format_time,
    significant,
)
from perfkit.platform.gallery import load_platform
from perfkit.prediction.predictor import predict
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.placement import Plan
from perfkit.workloads.tables import EmbeddingTable, draw_tables

TIMES = {
    0: "0 s",
    3e-9: "3 ns",
    4e-12: "0.004 ns",
    0.99951e-6: "1 µs",
    0.0412: "41.2 ms",
    -0.003: "-3 ms",
    119.9: "120 s",
    120: "2 min",
    86400: "24 h",
    math.inf: "inf s",
    math.nan: "nan s",
}
RATES = {
    0: "0 B/s",
    999.6: "1 kB/s",
    1.5e9: "1.5 GB/s",
    2e21: "2000 EB/s",
    math.inf: "inf B/s",
    -5e6: "-5 MB/s",
}
DIGITS = {
    (0.671234, 0.0123): "0.671",
    (5.0, 12.0): "5",
    (1234.0, 200.0): "1230",
    (-0.0123, 1e-4): "-0.01230",
    (1e9, 3e7): "1.000e+09",
    (99.99, 9.6): "100.0",
    (123456.0, math.nan): "123500",
    (math.inf, 1.0): "inf",
}


def test_numbers_read_like_a_person_writes_them() -> None:
    assert [format_time(seconds) for seconds in TIMES] == [*TIMES.values()]
    assert [format_rate(value, "B/s") for value in RATES] == [*RATES.values()]
    assert [significant(*pair) for pair in DIGITS] == [*DIGITS.values()]


@given(st.floats(1e-8, 1e20))
def test_a_formatted_size_reads_back_within_its_digits(nbytes: float) -> None:
    number, unit = format_bytes(nbytes).split()
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15, "EB": 1e18}[unit]
    assert float(number) * factor == pytest.approx(nbytes, rel=0.0051)


BAD = [
    True,
    np.True_,
    "32",
    None,
    [1],
    1j,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    np.float32(-2),
    10**400,
    2**63 + 1,
]


@pytest.mark.parametrize("integer", [True, False])
def test_bad_sizes_are_turned_away_in_one_line(integer: bool) -> None:
    for value in BAD:
        with pytest.raises(
            ValueError, match=r"^batch is .*; it must be a (whole )?number above 0"
        ) as error:
            check_positive("batch", value, integer=integer)
        assert len(str(error.value)) < 200 and "\n" not in str(error.value)


def test_good_sizes_become_python_numbers() -> None:
    assert check_positive("rows", np.int32(7), integer=True) == 7
    assert type(check_positive("rows", 1e6, integer=True)) is int
    assert type(check_positive("time", np.float32(0.5))) is float
    assert (
        check_positive("skip", 0, zero=True) == 0
        and check_positive("exponent", 10, maximum=10) == 10
    )
    for value, message in ((2.5, "a whole number above 0, at most 10$"), (11, "at most 10$")):
        with pytest.raises(ValueError, match=message):
            check_positive("rows", value, integer=True, maximum=10)


def test_a_misspelt_name_gets_its_neighbour_suggested() -> None:
    with pytest.raises(
        ValueError, match=r"is 'allreduce'; known are all_reduce, .*did you mean 'all_reduce'\?"
    ):
        check_choice("operation", "allreduce", ["all_reduce", "broadcast"])
    for value in (None, 3, ["fp32"], "", "x" * 10_000, "<script>\n"):
        with pytest.raises(ValueError, match=r"^dtype is .*; known are bf16, fp32$") as error:
            check_choice("dtype", value, ["bf16", "fp32"])
        assert len(str(error.value)) < 200


H100 = load_platform("h100-sxm-8")
GEMM = H100.kernels["gemm"]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    PREDICTED = predict(DLRM(), H100)
CALLS: tuple[Callable[[], object], ...] = (
    lambda: DLRM(cross=5),
    lambda: EmbeddingTable(10, 4, name=[]),
    lambda: draw_tables(3, correlation="x"),
    lambda: Plan(2, 5),
    lambda: Plan(2, (0,), names=5),
    lambda: H100.with_datasheet(5),
    lambda: H100.kernel_time("gemm", 5),
    lambda: H100.kernel_time("gemm", {"flops": 1e9}, dtype="bf16"),
    lambda: H100.lookup([5], batch=8),
    lambda: H100.kernel_time([], {}),
    lambda: H100.collective([], 1e6, ranks=2),
    lambda: predict(DLRM(), "h100-sxm-8", slowdown=5),
    lambda: PREDICTED.timeline("module", depth="x"),
    lambda: PREDICTED.modules(rank=[]),
    lambda: Quantity("fast", "B/s", "assumed", "x"),
    lambda: replace(H100.device, peaks=5),
    lambda: replace(H100.network, nodes=2.5),
    lambda: replace(H100, kernels={"gemm": None}),
    lambda: GEMM.with_values({"launch": "1"}),
    lambda: replace(GEMM, notes="one"),
)


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_arguments_of_other_types_are_refused_by_their_names(call: Callable[[], object]) -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match=r"^[\w. ]+ (is|has|names) .*; ") as caught,
    ):
        warnings.simplefilter("ignore")
        call()
    assert "\n" not in str(caught.value)
