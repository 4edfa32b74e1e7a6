"""Kernels whose steps wait for one another, linear algebra and Fourier transforms: sizes by hand, times
beside published ones, and what is said of work that nobody knows."""

import csv
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfkit.fitting import SequentialRoofline
from perfkit.ground.files import find_reference
from perfkit.ground.hardware import DTYPES
from perfkit.models.roofline import sequential_time
from perfkit.platform.gallery import load_platform
from perfkit.platform.kernels import find_stand_in
from perfkit.platform.sequential_kernels import FACTORIZATIONS as TIMES
from perfkit.platform.sequential_kernels import RECURRENT, make_sequential
from perfkit.prediction.cost import price
from perfkit.prediction.uncertainty import bound_unmodelled, list_notes, spread_unmodelled
from perfkit.workloads.linear_algebra import (
    FACTORIZATIONS,
    name_fourier,
    name_varied_attention,
    size_factorization,
    size_fourier,
    size_varied_attention,
)
from perfkit.workloads.recurrent_layers import RecurrentShape, read_recurrent, size_recurrent
from perfkit.workloads.vocabulary import find_entry, is_unpriced

GPU = load_platform("h100-sxm-8")


class Sized(SimpleNamespace):
    """What the vocabulary reads of a tensor."""

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_complex(self) -> bool:
        return bool(getattr(self, "complex", False))

    def __len__(self) -> int:
        return int(self.shape[0])


def tensor(*shape: int, **facts: Any) -> Sized:
    return Sized(shape=shape, **facts)


def read_rows(name: str) -> list[dict[str, str]]:
    path = Path(find_reference("published", name))
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def time_kernel(platform: str, kind: str, variant: str, dtype: str, **sizes: float) -> float:
    """Time of a kernel that was not measured on this platform [s]."""
    machine = load_platform(platform)
    fit = find_stand_in(machine.kernels, kind, variant=variant, dtype=dtype)
    assert fit is not None
    given = {name: np.array([float(value)]) for name, value in sizes.items()}
    given["peak"] = np.array([machine.device.peaks[dtype].value])
    given["bandwidth"] = np.array([machine.device.main_bandwidth])
    return float(fit.time(given)[0])


# -- the form ------------------------------------------------------------------------------------


def test_steps_add_up() -> None:
    """3 steps of 2 by 4 by 5: 3 (10 + 5 × 7 × 2/64 + 20 × 0.1 + 40 × 0.01)."""
    time = sequential_time(3, 2, 4, 5, per_step=10, per_depth=7, per_weight=0.1, per_product=0.01)
    assert time == pytest.approx(3 * (10 + 35 / 32 + 2 + 0.4))


def test_parts_of_a_time_sum_to_it() -> None:
    fit = find_stand_in(GPU.kernels, "recurrent", variant="forward.standard", dtype="fp32")
    assert isinstance(fit, SequentialRoofline)
    sizes = {
        name: np.array([value])
        for name, value in {
            "flops": 1e9,
            "nbytes": 1e6,
            "m": 32.0,
            "n": 2048.0,
            "k": 512.0,
            "rows": 100.0,
            "peak": 60e12,
            "bandwidth": 3e12,
        }.items()
    }
    assert sum(fit.split(sizes).values()) == pytest.approx(fit.time(sizes))


def test_only_known_kernels_have_steps() -> None:
    products = find_stand_in(GPU.kernels, "bmm", variant="nn", dtype="fp32")
    with pytest.raises(ValueError, match=r"known are forward\.standard"):
        make_sequential(products, "recurrent", "sideways", "fp32")
    kinds = {entry.variant for entry in FACTORIZATIONS.values()}
    assert kinds == {*TIMES}


# -- recurrent layers ----------------------------------------------------------------------------

#: An LSTM of two layers and directions, 3 inputs, 8 numbers of a state that are projected to 5.
SHAPE = RecurrentShape("lstm", 7, 14, 3, 8, 5, 2, 2, False)


def test_arithmetic_of_recurrent_layers() -> None:
    """2 × 14 tokens × 2 directions × (32 (3 + 5) + 40 + 32 (10 + 5) + 40)."""
    assert SHAPE.count_flops() == 2 * 14 * 2 * (32 * 8 + 40 + 32 * 15 + 40)


def test_what_a_backward_pass_keeps() -> None:
    """14 tokens × 2 directions × (5 × 8 × 2 layers + 5 between them)."""
    assert SHAPE.count_kept() == 14 * 2 * (80 + 5)


@pytest.mark.parametrize(
    ("changes", "phase", "kernel"),
    [
        ({}, "forward", "standard"),  # projected
        ({"outputs": 8}, "forward", "narrow_gated"),
        ({"outputs": 8, "is_packed": True}, "forward", "standard"),
        ({"hidden": 192, "outputs": 192}, "forward", "spilled_gated"),
        ({"hidden": 192, "outputs": 192}, "backward", "standard"),
        ({"hidden": 193, "outputs": 193}, "forward", "standard"),
        ({"mode": "rnn_tanh", "hidden": 256, "outputs": 256}, "backward", "narrow_plain"),
        ({"mode": "rnn_relu", "hidden": 384, "outputs": 384}, "forward", "spilled_plain"),
        ({"mode": "gru", "hidden": 128, "outputs": 128}, "backward", "narrow_gated"),
    ],
)
def test_kernel_of_recurrent_layers(changes: dict[str, Any], phase: str, kernel: str) -> None:
    variant = SHAPE._replace(**changes).name_algorithm(phase)
    assert variant == f"{phase}.{kernel}"
    assert variant in RECURRENT


def call(*, batch_first: bool, samples: list[int], backward: bool) -> list[Any]:
    """Arguments of a call of cuDNN for a GRU of one layer, 4 inputs and 6 numbers of a state."""
    data = tensor(sum(samples), 4) if samples else tensor(5, 2, 4)
    settings = [3, 6, 0, 1, batch_first, 0.0, True, False, samples, None]
    return [data, *[None] * (9 if backward else 5), *settings]


def test_sizes_of_calls() -> None:
    """10 tokens: 2 × 10 × 18 × 10 FLOP, forward; packed ones have 9, and 3 samples at most."""
    padded = call(batch_first=False, samples=[], backward=False)
    assert read_recurrent(padded, backward=False).steps == 5
    sizes = size_recurrent(padded, backward=False)
    assert (sizes.flops, sizes.m, sizes.n, sizes.k, sizes.rows) == (3600, 2, 18, 6, 5)
    first = size_recurrent(call(batch_first=True, samples=[], backward=True), backward=True)
    assert (first.flops, first.rows, first.m) == (7200, 2, 5)
    packed = size_recurrent(
        call(batch_first=False, samples=[3, 3, 2, 1], backward=False), backward=False
    )
    assert (packed.flops, packed.rows, packed.m) == (9 * 360, 4, 9 / 4)


def test_recurrent_layers_beside_published_times() -> None:
    """Fitted to the rows in fp32 as those of an A100; those in fp16 are judged."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in read_rows("recurrent_steps.csv"):
        if row["dtype"] != "fp16":
            continue
        steps, batch, inputs, hidden, layers = (
            int(row[name]) for name in ("steps", "batch", "inputs", "hidden", "layers")
        )
        shape = RecurrentShape(
            row["mode"], steps, steps * batch, inputs, hidden, hidden, layers, 1, False
        )
        for phase in ("forward", "backward"):
            for kernel in ("standard", "narrow"):
                is_packed = kernel == "standard"  # which takes the standard kernel
                variant = shape._replace(is_packed=is_packed).name_algorithm(phase)
                if kernel == "narrow" and variant.endswith("standard"):
                    continue
                predicted = time_kernel(
                    "a100-sxm-8",
                    "recurrent",
                    variant,
                    "fp16",
                    flops=(2 if phase == "backward" else 1) * shape.count_flops(),
                    nbytes=DTYPES["fp16"] * steps * batch * (inputs + 2 * hidden * layers),
                    m=batch,
                    n=shape.gates * hidden,
                    k=hidden,
                    rows=steps * layers,
                )
                measured = float(row[f"{phase}_{kernel}_ms"]) / 1e3
                errors[variant].append(abs(predicted / measured - 1))
    assert {*errors} == {*RECURRENT}
    for variant, errors_of_kernel in errors.items():
        limit = 0.16 if variant.endswith("standard") else 0.30
        assert np.mean(errors_of_kernel) < limit, variant


def test_wide_recurrent_layers_beside_published_times() -> None:
    """DeepBench, in which inputs are not multiplied: forward and both passes, errors in percent."""
    errors = []
    for row in read_rows("recurrent_layers.csv"):
        steps, batch, hidden = (int(row[name]) for name in ("steps", "batch", "hidden"))
        shape = RecurrentShape(
            row["mode"], steps, steps * batch, 0, hidden, hidden, 1, 1, is_packed=False
        )
        times = {}
        for phase, passes in (("forward", 1), ("backward", 2)):
            times[phase] = time_kernel(
                "titan-xp-1",
                "recurrent",
                shape.name_algorithm(phase),
                "fp32",
                flops=passes * shape.count_flops(),
                nbytes=DTYPES["fp32"] * steps * batch * 2 * hidden,
                m=batch,
                n=shape.gates * hidden,
                k=hidden,
                rows=steps,
            )
        measured = shape.count_flops() / (float(row["forward_tflops"]) * 1e12)
        errors.append(times["forward"] / measured - 1)
        errors.append(sum(times.values()) / (float(row["time_ms"]) / 1e3) - 1)
    assert [round(100 * error) for error in errors] == [-36, -24, -43, -32, -21, 15, -13, -34]


# -- linear algebra ------------------------------------------------------------------------------


def test_arithmetic_of_factorizations() -> None:
    x = tensor(3, 6, 6)
    assert size_factorization("linalg_cholesky_ex", [x], x).flops == pytest.approx(3 * 216 / 3)
    eigenvectors = size_factorization("_linalg_eigh", [tensor(4, 64, 64), "L", True], None)
    assert (eigenvectors.flops, eigenvectors.rows) == (9 * 4 * 64**3, 4)
    assert size_factorization("_linalg_eigh", [tensor(4, 32, 32)], None).rows == 1
    complex_ones = size_factorization("_linalg_svd", [tensor(8, 4, complex=True)], None)
    assert complex_ones.flops == 4 * 21 * 4 * 4 * 8
    # 2/3 n³ + 2 n² of two right-hand sides
    solved = size_factorization("_linalg_solve_ex", [tensor(6, 6), tensor(6, 2)], None)
    assert solved.flops == pytest.approx(2 / 3 * 216 + 2 * 36 * 2)
    upper = size_factorization("linalg_qr", [tensor(10, 6), "r"], None)
    assert upper.flops == pytest.approx(4 / 3 * 6 * 6 * 10)
    right = size_factorization("cholesky_solve", [tensor(6, 2), tensor(6, 6)], None)
    assert right.flops == 2 * 36 * 2


#: Largest error of published rows that no constant was fitted to, by routine.
JUDGED = {("svd", "v100-sxm-8"): 0.25, ("cholesky", "a100-sxm-8"): 0.3, ("qr", ""): 0.5}


@pytest.mark.parametrize(("routine", "platform"), JUDGED)
def test_factorizations_beside_published_times(routine: str, platform: str) -> None:
    judged = 0
    for row in read_rows("factorizations.csv"):
        if (row["routine"], row["platform"]) != (routine, platform):
            continue
        n, batch = int(row["n"]), int(row["batch"])
        name = {"svd": "_linalg_svd", "cholesky": "cholesky", "qr": "geqrf"}[routine]
        sizes = size_factorization(name, [tensor(batch, n, n)], None)
        given = {key: getattr(sizes, key) for key in ("flops", "m", "n", "k", "rows")}
        predicted = time_kernel(
            platform or "a100-sxm-8",
            "factorization",
            routine,
            "fp32",
            nbytes=8 * batch * n * n,
            **given,
        )
        measured = float(row["time_us"]) / 1e6
        assert predicted == pytest.approx(measured, rel=JUDGED[routine, platform]), n
        judged += 1
    assert judged >= 5


# -- Fourier transforms --------------------------------------------------------------------------


def test_arithmetic_of_fourier_transforms() -> None:
    """5 N log₂ n; half of it for real numbers."""
    args = [tensor(3, 16), [1], 0, True]
    assert size_fourier("_fft_c2c", args, tensor(3, 16)).flops == 5 * 48 * 4
    assert size_fourier("_fft_r2c", args, tensor(3, 9)).flops == 5 * 48 * 4 / 2
    back = [tensor(3, 9), [1], 0, 16]
    assert size_fourier("_fft_c2r", back, tensor(3, 16)).flops == 5 * 48 * 4 / 2


@pytest.mark.parametrize(
    ("name", "shape", "dims", "passes"),
    [
        ("_fft_c2c", (4, 56), [1], 1),
        ("_fft_c2c", (4, 56), [0], 2),
        ("_fft_r2c", (56, 56), [0, 1], 3),
        ("_fft_r2c", (4, 215), [-1], 5),  # 43 is no factor that cuFFT has a kernel for
        ("_fft_c2c", (10_000_000,), [0], 5),
        ("_fft_c2r", (4, 29), [1], 3),
    ],
)
def test_passes_of_fourier_transforms(
    name: str, shape: tuple[int, ...], dims: list[int], passes: int
) -> None:
    assert name_fourier(name, [tensor(*shape), dims, 0, 56]) == f"{passes}_passes"


@pytest.mark.parametrize(
    ("platform", "column", "limit"),
    [
        ("a100-sxm-8", "time_us", 0.2),
        ("v100-sxm-8", "time_us", 0.25),
        ("a100-sxm-8", "time_after_us", 0.2),
        ("v100-sxm-8", "time_after_us", 0.25),
    ],
)
def test_fourier_transforms_beside_published_times(
    platform: str, column: str, limit: float
) -> None:
    """The share of the bandwidth is that of an A100 before PyTorch transformed last dimensions at once;
    the others are judged."""
    errors = []
    for row in read_rows("fourier.csv"):
        if row["platform"] != platform:
            continue
        shape = tuple(map(int, row["shape"].split("x")))
        dims = [int(dimension) for dimension in row["dims"].split()]
        x = tensor(*shape)
        half = [*shape]
        half[dims[-1]] = half[dims[-1]] // 2 + 1
        args = [x, dims, 0, True]
        variant = name_fourier("_fft_r2c", args)
        passes = float(variant.removesuffix("_passes"))
        predicted = time_kernel(
            platform,
            "fourier",
            variant,
            row["dtype"],
            flops=size_fourier("_fft_r2c", args, x).flops,
            nbytes=passes * (4 * x.numel() + 8 * math.prod(half)),
            rows=0,
        )
        errors.append(abs(predicted / float(row[column]) * 1e6 - 1))
    assert np.mean(errors) < limit


# -- attention over samples of unlike lengths ----------------------------------------------------


def attend(starts: Any, *, causal: bool) -> list[Any]:
    """Arguments of attention of 2 heads of 4 numbers over 9 tokens."""
    q = tensor(9, 2, 4)
    return [q, q, q, starts, starts, 5, 5, causal, None, [-1, -1], False]


def test_arithmetic_of_samples_of_unlike_lengths() -> None:
    """Two products of 2 × 2 heads × 4 numbers over 25 + 9 + 1 pairs; equal samples have 27."""
    sizes = size_varied_attention("_varlen_attn", attend([0, 5, 8, 9], causal=False), None)
    assert sizes.flops == 2 * 2 * 2 * 4 * 35
    masked = attend([0, 5, 8, 9], causal=True)
    assert size_varied_attention("_varlen_attn", masked, None).flops == 2 * 2 * 4 * 35
    assert name_varied_attention("_varlen_attn", masked) == "forward_causal"
    unknown = size_varied_attention("_varlen_attn", attend(tensor(4), causal=False), None)
    assert unknown.flops == 2 * 2 * 2 * 4 * 27


# -- work that nobody knows ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "unpriced"),
    [
        ("linalg_eig", True),
        ("_cdist_forward", True),
        ("_cdist_backward", True),
        ("_linalg_eigh", False),
        ("_fft_c2c", False),
        ("_cudnn_rnn", False),
        ("linalg_vector_norm", False),
        ("relu", False),
    ],
)
def test_operations_of_unknown_work(name: str, unpriced: bool) -> None:
    assert is_unpriced(name) is unpriced


def test_unknown_work_is_bounded_and_widens_the_interval() -> None:
    """25 × 1024² × 1024 FLOP at a twentieth of the peak; the end of the interval is one bound later."""
    torch = pytest.importorskip("torch")
    import perfkit as pk

    def make_step() -> Any:
        x = torch.randn(1024, 1024, device="cuda")
        return lambda: torch.linalg.eig(x)

    with pytest.warns(UserWarning, match="no model of the work of linalg_eig"):
        graph = pk.capture(make_step, device="cuda")
    costs = price([graph], GPU)[0]
    bound = 25 * 1024**3 / (0.05 * GPU.device.peaks["fp32"].value)
    assert bound_unmodelled(graph, 0, 1e-6, GPU) == pytest.approx(bound)
    by_bytes = float(costs.hot[0])
    spread = spread_unmodelled(graph, costs, GPU, time=bound)
    assert math.exp(1.2816 * spread) == pytest.approx(2.0 - by_bytes / bound, rel=1e-3)
    notes, unmodelled = list_notes(graph, costs, GPU, "", 1)
    assert unmodelled["linalg_eig"] == pytest.approx(bound)
    assert any("linalg_eig may take up to" in note for note in notes)


def test_every_factorization_has_a_line() -> None:
    for name in FACTORIZATIONS:
        assert find_entry(name).kind == "factorization"
