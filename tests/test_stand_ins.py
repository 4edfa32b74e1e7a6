"""What prices operations that were not measured, in the number format each has; and what
calibrations measure."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from perfkit.calibration.fit_kernels import count_traffic, size_cases
from perfkit.fitting import KernelModel
from perfkit.ground.files import find_reference
from perfkit.measure.kernels import draw_cases, draw_net_cases
from perfkit.measure.records import SizedKernel
from perfkit.models.kernels import TERMS, term_names
from perfkit.platform.gallery import load_platform
from perfkit.platform.kernel_times import UNALIGNED
from perfkit.platform.kernels import (
    LAYOUT_CONVERSION_TIME,
    LEAST_LAYOUT_PASSES,
    MOST_LAYOUT_PASSES,
    find_kernel,
    find_stand_in,
)
from perfkit.platform.machine import Context
from perfkit.platform.platform import Platform
from perfkit.prediction.cost import Costs, price
from perfkit.prediction.predictor import predict
from perfkit.prediction.uncertainty import UNSEEN_FAMILY, find_unmeasured, list_notes
from perfkit.workloads.columns import Accesses, Features, OperationSizes
from perfkit.workloads.graph import Graph, Label
from perfkit.workloads.measured_functions import MEASURED_FUNCTIONS

pytestmark = pytest.mark.usefixtures("few_calls")

CPU = load_platform("zen5-2")
GPU = load_platform("h100-sxm-8")


def make_graph(
    *operations: tuple[str, str, str], dtypes: tuple[str, ...] = (), **sizes: float
) -> Graph:
    """Operations (name, kind, variant) of the same sizes, each of 12 MB of its own."""
    labels = []
    rows = []
    accesses = []
    for place, (name, kind, variant) in enumerate(operations):
        labels.append(Label(name, kind, variant, "forward", ""))
        rows.append(OperationSizes(**sizes))
        accesses.append((place, 2 * place, 6e6, False))
        accesses.append((place, 2 * place + 1, 6e6, True))
    return Graph(
        tuple(labels), Features.from_rows(rows), Accesses.from_rows(accesses), dtypes=dtypes
    )


def seconds(graph: Graph, platform: object, dtype: str = "fp32") -> np.ndarray:
    return np.asarray(price([graph], platform, dtype=dtype)[0].seconds)  # type: ignore[arg-type]


PRODUCT = {
    "flops": 2.0 * 4096 * 256 * 1152,
    "batch": 1,
    "m": 4096,
    "n": 256,
    "k": 1152,
    "elements": 2**20,
    "rows": 16,
}


@pytest.mark.parametrize(("platform", "share"), [(CPU, 0.8), (GPU, 1.0)])
def test_a_product_stands_in_for_a_convolution(platform: object, share: float) -> None:
    fits = platform.kernels  # type: ignore[attr-defined]
    bare = {key: fit for key, fit in fits.items() if not key.startswith("convolution")}
    old = replace(platform, kernels=bare, context=Context())  # type: ignore[type-var]
    one = make_graph(("convolution", "convolution", "forward"), ("mm", "gemm", "nn"), **PRODUCT)
    convolution, product = price([one], old)[0].hot
    assert convolution == pytest.approx(product / share, rel=1e-6)
    twice = PRODUCT | {"flops": 2 * PRODUCT["flops"]}
    both = make_graph(("convolution_backward", "convolution", "backward"), **twice)
    assert price([both], old)[0].hot[0] == pytest.approx(2 * convolution, rel=0.15)
    assert price([one], old)[0].assumed[0]
    alone = find_stand_in(bare, "convolution", variant="forward")
    grouped = find_stand_in(bare, "convolution", variant="forward_depthwise")
    assert alone is not None
    assert grouped is not None
    assert 0.4 < alone.spread < grouped.spread
    assert "no convolution was measured" in alone.notes[0]


@pytest.mark.parametrize(
    ("dtype", "share"), [("fp32", 1.0), ("tf32", 0.7), ("bf16", 0.7), ("fp16", 0.7)]
)
def test_convolutions_on_tensor_cores_reach_less_than_products(dtype: str, share: float) -> None:
    kernels = load_platform("b200-sxm-8").kernels  # where no convolution was measured
    convolution = find_stand_in(kernels, "convolution", variant="nn", dtype=dtype)
    product = find_stand_in(kernels, "gemm", variant="nn", dtype=dtype)
    assert convolution is not None
    assert product is not None
    reached = convolution["compute_efficiency"]
    assert reached == pytest.approx(share * product["compute_efficiency"])


@pytest.mark.parametrize(
    ("variant", "moved", "operands"),
    [("native_group_norm", 3, 2), ("native_group_norm_backward", 5, 3)],
)
def test_a_group_norm_reads_its_operands_twice(variant: str, moved: int, operands: int) -> None:
    """Moments first, then results: x, x, y; dy, x, dy, x, dx (PyTorch, group_norm_kernel.cu)."""
    a100 = replace(load_platform("a100-sxm-8"), context=Context())
    launch = a100.kernels["rowwise"]["launch"]
    plain = seconds(make_graph(("norm", "rowwise", "native_layer_norm")), a100)[0]
    twice = seconds(make_graph(("norm", "rowwise", variant)), a100)[0]
    assert (twice - launch) / (plain - launch) == pytest.approx(moved / operands)


def time_layout(platform: str, dtype: str, variant: str, in_channels_last: str) -> float:
    """How much longer a convolution of 12 MB takes that is not in channels_last [s]."""
    gpu = load_platform(platform)
    plain = make_graph(("conv", "convolution", variant), **PRODUCT, dtypes=(dtype,))
    last = make_graph(("conv", "convolution", in_channels_last), **PRODUCT, dtypes=(dtype,))
    assert seconds(plain, CPU) == seconds(last, CPU)
    return float(seconds(plain, gpu)[0] - seconds(last, gpu)[0])


@pytest.mark.parametrize(
    ("dtype", "variant", "in_channels_last", "turns"),
    [
        ("tf32", "forward", "forward_last", True),
        ("tf32", "backward_pointwise", "backward_last_pointwise", True),
        ("tf32", "forward_depthwise", "forward_last_depthwise", False),
        ("fp32", "forward", "forward_last", False),
    ],
)
def test_tensor_cores_turn_operands_that_are_not_in_channels_last(
    dtype: str, variant: str, in_channels_last: str, turns: bool
) -> None:
    """Each of 3 million numbers of 4 B takes 5.5 ps."""
    longer = time_layout("a100-sxm-8", dtype, variant, in_channels_last)
    expected = 3e6 * LAYOUT_CONVERSION_TIME if turns else 0.0
    assert longer == pytest.approx(expected)


def test_operands_are_turned_by_the_number_between_two_and_five_passes() -> None:
    """12 MB have 6 million numbers of 2 B: 33 µs on a V100. An A100 has 5 passes at most, a T4 is as
    fast as its memory."""
    v100 = time_layout("v100-sxm-8", "fp16", "forward", "forward_last")
    assert v100 == pytest.approx(6e6 * LAYOUT_CONVERSION_TIME)
    a100 = time_layout("a100-sxm-8", "fp16", "forward", "forward_last")
    assert a100 == pytest.approx(MOST_LAYOUT_PASSES * 12e6 / 2.039e12)
    t4 = time_layout("t4-1", "fp16", "forward", "forward_last")
    assert t4 == pytest.approx(LEAST_LAYOUT_PASSES * 12e6 / 320e9, rel=0.01)


def find_product(platform: Platform, dtype: str) -> KernelModel:
    """The fit that times products in a format."""
    found = find_kernel(platform.kernels, "gemm", dtype=dtype)
    assert found is not None
    return found[1]


def test_tf32_reaches_less_of_its_peak_than_half_precision() -> None:
    tf32 = find_product(GPU, "tf32")
    half = find_product(GPU, "fp16")
    fp32 = find_product(GPU, "fp32")
    assert tf32["compute_efficiency"] == pytest.approx(half["compute_efficiency"] / 1.2)
    assert fp32["compute_efficiency"] == half["compute_efficiency"]
    assert tf32.spread == fp32.spread > half.spread


def test_products_without_tensor_cores_come_nearer_to_their_peak() -> None:
    """Power limits tensor cores."""
    a100 = load_platform("a100-sxm-8")
    fp32 = find_product(a100, "fp32")
    bf16 = find_product(a100, "bf16")
    assert fp32.kind == "fitted"
    assert fp32["compute_efficiency"] > bf16["compute_efficiency"]


def price_with_notes(graph: Graph, platform: Platform, dtype: str) -> tuple[Costs, list[str]]:
    """Costs of a graph, and what is said of products that were not measured."""
    costs = price([graph], platform, dtype=dtype)[0]
    return costs, list(find_unmeasured(graph, costs, platform).stand_ins)


@pytest.mark.parametrize(
    ("platform", "dtype", "uses_tensor_cores"),
    [(GPU, "bf16", True), (GPU, "tf32", True), (GPU, "fp32", False), (CPU, "fp32", False)],
)
def test_products_with_odd_rows_on_tensor_cores_take_longer_and_say_why(
    platform: Platform, dtype: str, uses_tensor_cores: bool
) -> None:
    odd_sizes = {**PRODUCT, "n": 257, "flops": 2.0 * 4096 * 257 * 1152}
    even, notes_of_even = price_with_notes(
        make_graph(("mm", "gemm", "nt"), **PRODUCT), platform, dtype
    )
    odd, notes_of_odd = price_with_notes(
        make_graph(("mm", "gemm", "nt"), **odd_sizes), platform, dtype
    )
    assert not notes_of_even
    assert (odd.seconds[0] > 1.3 * even.seconds[0]) == uses_tensor_cores
    assert (odd.spread[0] > even.spread[0] + 0.05) == uses_tensor_cores
    assert any("pad" in note for note in notes_of_odd) == uses_tensor_cores


def test_rows_of_a_gradient_are_those_of_its_first_factor() -> None:
    """It is transposed, and its rows do not have the inner size."""
    odd_rows = make_graph(("mm", "gemm", "tn"), **{**PRODUCT, "m": 4097})
    assert price_with_notes(odd_rows, GPU, "bf16")[1]
    odd_inner_size = make_graph(("mm", "gemm", "tn"), **{**PRODUCT, "k": 1153})
    assert not price_with_notes(odd_inner_size, GPU, "bf16")[1]


def test_products_with_odd_rows_on_a_gpu_of_unknown_kind_are_unsure() -> None:
    unknown = replace(GPU, device=replace(GPU.device, capability=None))
    with pytest.warns(UserWarning, match="may take twice as long: none was measured"):
        assert unknown.gemm(4096, 50257, 1024, dtype="bf16").spread > 0.7


def test_the_factors_of_unaligned_products_are_the_measured_ones() -> None:
    rows = pl.read_csv(find_reference("measured", "h100-1.unaligned.csv"))
    rows = rows.filter(pl.col("dtype") != "fp32")
    has_long_rows = ~((pl.col("layout") == "tn") & (pl.col("side") == "k"))
    itemsize = pl.when(pl.col("dtype") == "tf32").then(4).otherwise(2)
    nbytes = itemsize * pl.col("longer_by")
    odd = rows.filter(has_long_rows, nbytes % 4 != 0)["times"]
    even = rows.filter(has_long_rows, nbytes % 4 == 0, nbytes % 16 != 0)["times"]
    of_h100 = UNALIGNED[9]
    assert len(odd) == 48
    assert np.exp(odd.log().mean()) == pytest.approx(of_h100.of_4_bytes, rel=0.06)
    assert len(even) == 168
    assert np.exp(even.log().mean()) == pytest.approx(of_h100.of_16_bytes, rel=0.06)
    others = rows.filter(~has_long_rows)["times"]
    assert others.log().mean() == pytest.approx(0, abs=0.04)


@pytest.mark.filterwarnings("ignore:products in")
@pytest.mark.parametrize(
    ("words", "least", "most"), [(50256, 1, 1), (50257, 3.4, 9.0), (50258, 2.3, 4.0)]
)
def test_unaligned_products_of_an_h100_take_as_many_times_as_measured(
    words: int, least: float, most: float
) -> None:
    """Ranges over 48 and 96 products in half precision with odd and with even rows: formulas, table
    2.4."""
    h100 = load_platform("h100-sxm-8")
    aligned = h100.gemm(8192, 50256, 768, dtype="bf16")
    ratio = h100.gemm(8192, words, 768, dtype="bf16").time / aligned.time
    assert least <= ratio <= most


def test_functions_that_were_not_measured_take_the_middle_of_their_class() -> None:
    graph = make_graph(
        ("tangle", "elementwise", "tangle"), ("add", "elementwise", "add"), elements=1e6
    )
    bare = {key: fit for key, fit in CPU.kernels.items() if key.startswith("elementwise")}
    costs = price([graph], replace(CPU, kernels=bare, context=Context()))[0]
    assert costs.seconds[0] == pytest.approx(costs.seconds[1], rel=1.0)
    assert not find_unmeasured(graph, costs, GPU)[0]
    assert costs.spread[0] > 0.5 > costs.spread[1]
    assert find_stand_in(bare, "pooling", variant="max_pool2d_with_indices") is not None
    assert find_stand_in(bare, "embedding_forward", variant="fused") is None


def test_a_function_that_no_platform_knows_is_named_however_short_it_is() -> None:
    """Mistyped, it would take a median without a word."""
    known = (("mm", "gemm", "nn"), ("silu_backward", "elementwise", "silu_backward"))
    mistyped = ("silu_backward", "elementwise", "silu_bakward")
    # a captured program has functions of all kinds, and names those that take long
    for unknown, device, count in ((mistyped, "", 1), (known[1], "", 0), (mistyped, "cpu", 0)):
        graph = replace(make_graph(*known, unknown, **PRODUCT), device=device)
        costs = price([graph], CPU)[0]
        assert costs.seconds[2] < 0.05 * costs.seconds.sum()
        notes, _ = list_notes(graph, costs, CPU, "transformer", 1)
        assert sum("elementwise.silu_bakward was not measured" in note for note in notes) == count
    # casts are the one function of built models that calibrations leave out
    graph = make_graph(known[0], ("_to_copy", "elementwise", "_to_copy"), **PRODUCT)
    notes, _ = list_notes(graph, price([graph], CPU)[0], CPU, "transformer", 1)
    assert not any("_to_copy" in note for note in notes)


def test_the_functions_that_calibrations_time_are_listed() -> None:
    for kind, functions in MEASURED_FUNCTIONS.items():
        drawn = [*draw_cases(), *draw_net_cases(np.random.default_rng(0), 0.1)]
        assert functions == {case.variant for case in drawn if case.kind == kind}


def test_other_operations_are_traffic_and_are_named() -> None:
    graph = make_graph(
        ("fft", "other", "fft"), ("fft", "other", "fft_r2c"), ("sort", "other", "sort")
    )
    costs = price([graph], GPU)[0]
    assert find_unmeasured(graph, costs, GPU)[0] == pytest.approx(
        {"fft": costs.seconds[:2].sum(), "sort": costs.seconds[2]}
    )
    assert costs.seconds == pytest.approx(12e6 / float(GPU.device.bandwidth(1e12)))


def test_every_operation_has_its_own_format() -> None:
    two = (("mm", "gemm", "nn"), ("mm", "gemm", "nn"))
    narrow, wide = seconds(make_graph(*two, dtypes=("bf16", "fp64"), **PRODUCT), GPU, "bf16")
    assert narrow == pytest.approx(seconds(make_graph(*two, **PRODUCT), GPU, "bf16")[0])
    assert wide > 4 * narrow
    odd = seconds(make_graph(*two, dtypes=("bf16", "int7"), **PRODUCT), GPU, "bf16")
    assert odd[1] == odd[0], "a format without a peak counts as that of the graph"


def test_batch_norm_reads_its_input_twice_on_a_gpu() -> None:
    batch_norm = make_graph(("native_batch_norm", "rowwise", "native_batch_norm"))
    maximum = make_graph(("amax", "rowwise", "amax"))
    a100 = load_platform("a100-sxm-8")  # whose norms nobody measured
    assert 1.3 < seconds(batch_norm, a100)[0] / seconds(maximum, a100)[0] <= 1.5


def test_old_sizes_are_drawn_as_before() -> None:
    """Nets came later: what was measured until then is drawn again from the same seed."""
    with open(find_reference("measured", "zen5-2.measurements.json"), encoding="utf-8") as file:
        rows = json.load(file)["kernels"]
    new = draw_net_cases(np.random.default_rng([0, 1]), 1.0)
    old = [case for case in draw_cases(0) if case not in new]
    assert len(old) == len(rows)
    for case, row in zip(old, rows, strict=True):
        assert (case.kind, case.variant) == (row["kind"], row["variant"])
        assert {key: case.sizes[key] for key in row["sizes"]} == pytest.approx(row["sizes"])


def test_every_case_of_a_net_has_the_sizes_its_form_asks_for() -> None:
    for case in draw_net_cases(np.random.default_rng(5), 0.3):
        sizes = {name: np.asarray(float(value)) for name, value in case.sizes.items()}
        for name in ("nbytes", "beyond_l2", "beyond_l3"):
            sizes[name] = np.asarray(1.0)
        if case.kind == "elementwise":
            sizes["rows"] = np.asarray(0.0)  # no operand is broadcast
        for name in term_names(case.kind, case.variant):
            assert 0 <= TERMS[name](sizes) < np.inf
        if case.kind == "convolution":
            products = 2.0 if case.variant.startswith("backward") else 1.0
            flops = 2 * sizes["batch"] * sizes["m"] * sizes["n"] * sizes["k"]
            assert sizes["flops"] == products * flops
            assert sizes["flops"] <= 2e9


def test_sizes_that_old_files_hold_are_mended() -> None:
    """Places that come out of a pooling were written as numbers below zero; operands in place count
    once in a file."""
    old = {"elements": 640, "rows": 10, "n": 64, "m": -160, "k": 4}
    sizes = size_cases(
        [SizedKernel("pooling", "avg_pool2d", old, nbytes=3200)],
        (1e6, 1e7),
        1e3,
    )
    assert TERMS["windows"](sizes) == [640]
    for variant, nbytes, moved in (
        ("add_", 8000, 12000),
        ("relu_", 4000, 8000),
        ("add", 12000, 12000),
    ):
        kernel = SizedKernel("elementwise", variant, {"elements": 1000}, nbytes=nbytes)
        sizes = size_cases([kernel], (1.0, 1e7), 1e3)
        assert sizes["nbytes"] == [moved]
        assert sizes["beyond_l2"] == pytest.approx([nbytes])


def test_what_is_measured_is_what_a_capture_counts() -> None:
    """Every case runs, and has the class and the bytes of the operation that is captured when it
    does."""
    pytest.importorskip("torch", reason="measuring needs torch")
    from perfkit.measure.operations import prepare
    from perfkit.recording.steps import capture

    cases = {
        (case.kind, case.variant): case
        for case in draw_cases(1, density=0.1)
        if case.kind != "convolution"
    }
    # these need a forward lookup, or the rows of a gradient
    alone = ("embedding_update", "embedding_backward")
    for kind in dict.fromkeys(kind for kind, _ in cases):
        rows, firsts = [], []
        for case in (case for case in cases.values() if case.kind == kind):
            calls, nbytes = prepare(case)
            calls[-1]()
            firsts.append(calls[0])
            rows.append(SizedKernel(kind, case.variant, case.sizes, nbytes=nbytes))
        if kind not in alone:
            graph = capture(lambda firsts=firsts: lambda: [call() for call in firsts])
            assert [label.kernel for label in graph.labels] == [(kind, row.variant) for row in rows]
            assert graph.traffic == pytest.approx([count_traffic(row) for row in rows])
    assert len(cases) > 90


@pytest.mark.filterwarnings("ignore:a100-sxm-8 was never calibrated")
def test_a_family_without_fits_is_no_surer_than_families_that_were_left_out() -> None:
    """A product is known to 7 %, and steps of Transformers are fitted."""
    product = make_graph(
        ("mm", "gemm", "nn"), m=8192, n=8192, k=8192, batch=1, flops=2 * 8192**3, dtypes=("bf16",)
    )
    gpu = load_platform("a100-sxm-8")
    known = predict(replace(product, family="transformer"), gpu).spread
    assert known < UNSEEN_FAMILY
    assert predict(replace(product, family="diffusion"), gpu).spread == UNSEEN_FAMILY
    bare = replace(gpu, context=Context())
    assert predict(replace(product, family="diffusion"), bare).spread != UNSEEN_FAMILY
