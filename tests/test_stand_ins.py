"""What prices operations that were not measured, in the number format each has; and what
calibrations measure."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from perfkit.calibration.fit_kernels import count_traffic, size_cases
from perfkit.ground.files import find_reference
from perfkit.measure.kernels import draw_cases, draw_net_cases
from perfkit.measure.records import SizedKernel
from perfkit.models.kernels import TERMS, term_names
from perfkit.platform.gallery import load_platform
from perfkit.platform.kernel_times import UNALIGNED
from perfkit.platform.kernels import (
    LAYOUT_CONVERSION_TRAFFIC,
    find_kernel,
    find_stand_in,
)
from perfkit.platform.machine import Context
from perfkit.prediction.cost import price
from perfkit.prediction.uncertainty import find_unmeasured, list_notes
from perfkit.workloads.columns import Accesses, Features, OperationSizes
from perfkit.workloads.graph import Graph, Label
from perfkit.workloads.measured_functions import MEASURED_FUNCTIONS

CPU, GPU = load_platform("zen5-2"), load_platform("h100-sxm-8")


def make_graph(
    *operations: tuple[str, str, str], dtypes: tuple[str, ...] = (), **sizes: float
) -> Graph:
    """Operations (name, kind, variant) of the same sizes, each of 12 MB of its own."""
    features = Features.from_rows([OperationSizes(**sizes)] * len(operations))
    accesses = Accesses.from_rows(
        [(i, 2 * i + j, 6e6, j) for i in range(len(operations)) for j in (0, 1)]
    )
    labels = tuple(Label(name, kind, variant, "forward", "") for name, kind, variant in operations)
    return Graph(labels, features, accesses, dtypes=dtypes)


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
    alone, grouped = (
        find_stand_in(bare, "convolution", variant=f"forward{end}") for end in ("", "_depthwise")
    )
    assert alone is not None and grouped is not None
    assert 0.4 < alone.spread < grouped.spread
    assert "no convolution was measured" in alone.notes[0]


@pytest.mark.parametrize(
    ("dtype", "share"), [("fp32", 1.0), ("tf32", 0.7), ("bf16", 0.7), ("fp16", 0.7)]
)
def test_convolutions_on_tensor_cores_reach_less_than_products(dtype: str, share: float) -> None:
    kernels = load_platform("b200-sxm-8").kernels  # where no convolution was measured
    fits = [
        find_stand_in(kernels, kind, variant="nn", dtype=dtype) for kind in ("convolution", "gemm")
    ]
    reached, product = (fit["compute_efficiency"] for fit in fits if fit)
    assert reached == pytest.approx(share * product)


@pytest.mark.parametrize(
    ("dtype", "variant", "turns"),
    [
        ("fp16", "forward", LAYOUT_CONVERSION_TRAFFIC),
        ("tf32", "backward_pointwise", LAYOUT_CONVERSION_TRAFFIC),
        ("fp16", "forward_depthwise", 0.0),
        ("fp32", "forward", 0.0),
    ],
)
def test_tensor_cores_turn_operands_that_are_not_in_channels_last(
    dtype: str, variant: str, turns: float
) -> None:
    phase, _, rest = variant.partition("_")
    names = variant, "_".join(filter(None, (phase, "last", rest)))
    graphs = [
        make_graph(("conv", "convolution", name), **PRODUCT, dtypes=(dtype,)) for name in names
    ]
    gpu = load_platform("a100-sxm-8")
    (one,), (last,) = (seconds(graph, gpu) for graph in graphs)
    assert one - last == pytest.approx(turns * 12e6 / gpu.device.main_bandwidth)
    assert seconds(graphs[0], CPU) == seconds(graphs[1], CPU)


def test_tf32_reaches_less_of_its_peak_than_half_precision() -> None:
    tf32, half, fp32 = (
        find_kernel(GPU.kernels, "gemm", dtype=name)[1] for name in ("tf32", "fp16", "fp32")
    )  # type: ignore[index]
    assert tf32["compute_efficiency"] == pytest.approx(half["compute_efficiency"] / 1.2)
    assert (
        fp32["compute_efficiency"] == half["compute_efficiency"]
        and tf32.spread == fp32.spread > half.spread
    )
    own, a100 = (
        find_kernel(load_platform("a100-sxm-8").kernels, "gemm", dtype=name)[1]
        for name in ("fp32", "bf16")
    )  # type: ignore[index]
    # power limits tensor cores
    assert own.kind == "fitted" and own["compute_efficiency"] > a100["compute_efficiency"]


def test_products_with_odd_rows_on_tensor_cores_take_longer_and_say_why() -> None:
    even, odd = PRODUCT, PRODUCT | {"n": 257, "flops": 2.0 * 4096 * 257 * 1152}
    for platform, dtype in ((GPU, "bf16"), (GPU, "tf32"), (GPU, "fp32"), (CPU, "fp32")):
        graphs = [make_graph(("mm", "gemm", "nt"), **sizes) for sizes in (even, odd)]
        two = [price([graph], platform, dtype=dtype)[0] for graph in graphs]
        notes = [
            find_unmeasured(graph, costs, platform)[1]
            for graph, costs in zip(graphs, two, strict=True)
        ]
        longer, unsure = (
            two[1].seconds[0] > 1.3 * two[0].seconds[0],
            two[1].spread[0] > two[0].spread[0] + 0.05,
        )
        assert longer == unsure == (dtype != "fp32") == any("pad" in note for note in notes[1])
        assert not notes[0]
    # of a gradient the first factor is turned
    rows = make_graph(("mm", "gemm", "tn"), **(PRODUCT | {"m": 4097}))
    # and rows do not have the inner size
    inner = make_graph(("mm", "gemm", "tn"), **(PRODUCT | {"k": 1153}))
    odd, even = (
        find_unmeasured(graph, price([graph], GPU, dtype="bf16")[0], GPU)[1]
        for graph in (rows, inner)
    )
    assert odd and not even
    unknown = replace(GPU, device=replace(GPU.device, capability=None))
    with pytest.warns(UserWarning, match="may take twice as long: none was measured"):
        assert unknown.gemm(4096, 50257, 1024, dtype="bf16").spread > 0.7


def test_the_factors_of_unaligned_products_are_the_measured_ones() -> None:
    rows = pl.read_csv(find_reference("measured", "h100-1.unaligned.csv")).filter(
        pl.col("dtype") != "fp32"
    )
    lead = ~((pl.col("layout") == "tn") & (pl.col("side") == "k"))
    size = pl.when(pl.col("dtype") == "tf32").then(4).otherwise(2) * pl.col("longer_by")
    odd, even = (
        rows.filter(lead, own)["times"]
        for own in (size % 4 != 0, (size % 4 == 0) & (size % 16 != 0))
    )
    for factor, times, count in zip(UNALIGNED[9][:2], (odd, even), (48, 168), strict=True):
        assert len(times) == count and np.exp(times.log().mean()) == pytest.approx(factor, rel=0.06)
    assert rows.filter(~lead)["times"].log().mean() == pytest.approx(0, abs=0.04)


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
    ratio = (
        h100.gemm(8192, words, 768, dtype="bf16").time
        / h100.gemm(8192, 50256, 768, dtype="bf16").time
    )
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
    norm, other = (
        make_graph((name, "rowwise", name)) for name in ("native_batch_norm", "native_layer_norm")
    )
    assert 1.3 < seconds(norm, GPU)[0] / seconds(other, GPU)[0] <= 1.5


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
        kind, variant, sizes = case.kind, case.variant, case.sizes
        given = {name: np.asarray(float(value)) for name, value in sizes.items()}
        given |= {name: np.asarray(1.0) for name in ("nbytes", "beyond_l2", "beyond_l3")}
        assert all(0 <= TERMS[name](given) < np.inf for name in term_names(kind, variant))
        if kind == "convolution":
            wanted = 2.0 if variant.startswith("backward") else 1.0
            assert (
                sizes["flops"]
                == wanted * 2 * sizes["batch"] * sizes["m"] * sizes["n"] * sizes["k"]
                <= 2e9
            )


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
        assert (sizes["nbytes"], sizes["beyond_l2"]) == ([moved], pytest.approx([nbytes]))


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
