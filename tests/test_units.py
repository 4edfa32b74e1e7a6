"""How sizes are checked and written, and what is said of arguments that are none."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfkit as pk
from perfkit.ground.hardware import Quantity
from perfkit.ground.units import (
    check_choice,
    check_positive,
    format_bytes,
    format_interval,
    format_rate,
    format_time,
    significant,
)

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
#: A value and its error.
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
    for seconds, text in TIMES.items():
        assert format_time(seconds) == text
    for rate, text in RATES.items():
        assert format_rate(rate, "B/s") == text
    for (value, error), text in DIGITS.items():
        assert significant(value, error) == text


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
        assert len(str(error.value)) < 200
        assert "\n" not in str(error.value)


def test_good_sizes_become_python_numbers() -> None:
    assert check_positive("rows", np.int32(7), integer=True) == 7
    assert type(check_positive("rows", 1e6, integer=True)) is int
    assert type(check_positive("time", np.float32(0.5))) is float
    assert check_positive("skip", 0, zero=True) == 0
    assert check_positive("exponent", 10, maximum=10) == 10


def test_a_size_above_its_maximum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a whole number above 0, at most 10$"):
        check_positive("rows", 2.5, integer=True, maximum=10)
    with pytest.raises(ValueError, match=r"at most 10$"):
        check_positive("rows", 11, integer=True, maximum=10)


def test_a_misspelt_name_gets_its_neighbour_suggested() -> None:
    with pytest.raises(
        ValueError, match=r"is 'allreduce'; known are all_reduce, .*did you mean 'all_reduce'\?"
    ):
        check_choice("operation", "allreduce", ["all_reduce", "broadcast"])
    # another width is another format, and no slip of the pen
    for wrong, near in (("fp4", "fp64"), ("nvfp4", "fp64")):
        with pytest.raises(ValueError, match=f"dtype is '{wrong}'; known are {near}, bf16$"):
            check_choice("dtype", wrong, [near, "bf16"])
    for value in (None, 3, ["fp32"], "", "x" * 10_000, "<script>\n"):
        with pytest.raises(ValueError, match=r"^dtype is .*; known are bf16, fp32$") as error:
            check_choice("dtype", value, ["bf16", "fp32"])
        assert len(str(error.value)) < 200


H100 = pk.load_platform("h100-sxm-8")


@contextmanager
def refused(argument: str) -> Iterator[None]:
    """An argument is refused in one line: its name, what is wrong, and what is allowed."""
    with pytest.raises(ValueError, match=rf"^{re.escape(argument)} (is|has) .*; ") as caught:
        yield
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value", "meant"),
    [
        ("frozen_format", "nf4_dq", "nf4-dq"),
    ],
)
def test_names_of_other_programs_are_understood(argument: str, value: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        pk.Transformer.bert("bert-base", batch=8, **{argument: value})
    with pytest.raises(ValueError, match=r"known are fp64$"):
        check_choice("dtype", "bfloat16", ["fp64"])


@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16", "BF16"])
def test_number_formats_have_their_names_of_pytorch(value: str) -> None:
    assert pk.Transformer.bert("bert-base", batch=8, dtype=value).dtype == "bf16"
    assert pk.DLRM(dtype=value).dtype == "bf16"
    assert pk.EmbeddingTable(10, 4, dtype=value).dtype == "bf16"


def test_number_formats_are_dtypes_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    assert pk.DLRM(dtype=torch.bfloat16).dtype == "bf16"
    with pytest.raises(ValueError, match=r"dtype is torch.complex64; known are "):
        pk.DLRM(dtype=torch.complex64)


def test_intervals_are_written_in_the_unit_of_their_time() -> None:
    assert format_interval(45.1e-3, 32.8e-3, 62.1e-3) == "45.1 ms (32.8 to 62.1)"
    assert format_interval(999.7e-6, 0.8e-3, 1.2e-3) == "1 ms (0.8 to 1.2)"
    assert format_interval(1.2, 0.9, 30 * 3600) == "1.2 s (900 ms to 30 h)"
    assert format_interval(7200, 3600, 14400) == "2 h (1 to 4)"


def test_workloads_refuse_arguments_of_other_types_by_their_names() -> None:
    with refused("cross"):
        pk.DLRM(cross=5)
    with refused("name"):
        pk.EmbeddingTable(10, 4, name=[])
    with refused("correlation"):
        pk.draw_tables(3, correlation="x")
    with refused("owners"):
        pk.Plan(2, 5)
    with refused("names"):
        pk.Plan(2, (0,), names=5)


def test_questions_to_a_platform_refuse_arguments_of_other_types_by_their_names() -> None:
    with refused("other"):
        H100.with_datasheet(5)
    with refused("features"):
        H100.kernel_time("gemm", 5)
    with refused("features"):
        H100.kernel_time("gemm", {"flops": 1e9}, dtype="bf16")
    with refused("tables"):
        H100.lookup([5], batch=8)
    with refused("kind"):
        H100.kernel_time([], {})
    with refused("operation"):
        H100.collective([], 1e6, ranks=2)


@pytest.mark.filterwarnings("ignore")
def test_predictions_refuse_arguments_of_other_types_by_their_names() -> None:
    with refused("slowdown"):
        pk.predict(pk.DLRM(), "h100-sxm-8", slowdown=5)
    prediction = pk.predict(pk.DLRM(), H100)
    with refused("depth"):
        prediction.timeline("module", depth="x")
    with refused("rank"):
        prediction.modules(rank=[])


def test_parts_of_a_platform_refuse_values_of_other_types_by_their_names() -> None:
    with refused("Quantity.value"):
        Quantity("fast", "B/s", "assumed", "x")
    with refused("Device.peaks"):
        replace(H100.device, peaks=5)
    with refused("Network.nodes"):
        replace(H100.network, nodes=2.5)
    with refused("Platform.kernels.gemm"):
        replace(H100, kernels={"gemm": None})
    with refused("launch"):
        H100.kernels["gemm"].with_values({"launch": "1"})
    with refused("Roofline.notes"):
        replace(H100.kernels["gemm"], notes="one")
