"""Forms of attention and of row-wise kernels with widths: by hand, beside what was measured, and
beside published rates."""

import numpy as np
import pytest

import perfkit as pk
from perfkit.fitting import AttentionRoofline, RowwiseRoofline
from perfkit.models.kernels import capped_clock
from perfkit.models.roofline import attention_flops, attention_work, rowwise_time
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.kernel_times import (
    BATCHED_UNALIGNED,
    HEAD_COPIES,
    UNALIGNED,
    list_unaligned,
)
from perfkit.platform.kernels import find_softmax_width
from perfkit.platform.platform import Platform
from perfkit.prediction.classes import list_attention

H100 = pk.load_platform("h100-sxm-8")


@pytest.mark.parametrize(
    ("width", "multiple", "padded"),
    [(64, 32, 64), (80, 32, 96), (108, 32, 128), (150, 32, 192), (80, 64, 128), (129, 32, 192)],
)
def test_heads_are_padded_to_whole_tiles(width: int, multiple: int, padded: int) -> None:
    """FlashAttention-2 has kernels for heads of 32, 64, 96, 128, 192 and 256, cuDNN's of 64, 128, 192
    and 256."""
    work = attention_work(1.0, width, 1e9, head_multiple=multiple)
    assert work == pytest.approx(padded / width)


def test_softmax_and_the_diagonal_add_to_the_products() -> None:
    """(128 + 32) / 128, and one more tile of 128 keys where 1024 are masked in part."""
    work = attention_work(100.0, 128, 1024, softmax_width=32, diagonal=128)
    assert work == pytest.approx(100.0 * 1.25 * 1.125)


def test_a_row_costs_as_its_form_says() -> None:
    fit = RowwiseRoofline.build(
        {"launch": 2e-6, "memory_efficiency": 0.5, "per_row": 1e-9, "per_column": 2e-9}
    )
    sizes = {
        "rows": np.array([1000.0]),
        "n": np.array([500.0]),
        "nbytes": np.array([4e6]),
        "bandwidth": np.array([2e12]),
    }
    assert fit.time(sizes)[0] == pytest.approx(2e-6 + 1e-6 + 1e-6 + 4e-6)
    assert sum(float(np.sum(part)) for part in fit.split(sizes).values()) == pytest.approx(8e-6)
    assert rowwise_time(0, 0, 0, bandwidth=1.0) == 0.0


def time_attention(platform: Platform, kernel: str, width: int, tokens: int = 4096) -> float:
    """Time of a forward pass over 16 heads [s]."""
    heads = 16
    flops = attention_flops(1, heads, tokens, width)
    features = {
        "flops": float(flops),
        "nbytes": 8.0 * heads * tokens * width,
        "batch": float(heads),
        "m": float(tokens),
        "n": float(tokens),
        "k": float(width),
    }
    found = platform.kernel_time(f"attention.forward.{kernel}", features, dtype="bf16")
    return float(found)


def test_heads_that_are_not_aligned_are_copied() -> None:
    """Heads of 108 numbers are 216 B: three tensors are filled and copied, beside the time of heads of
    112 numbers, which are padded to 128 likewise."""
    heads, tokens = 16, 4096
    copied = 3 * heads * tokens * (216 + 2 * 224) / (HEAD_COPIES * H100.device.main_bandwidth)
    longer = time_attention(H100, "flash2", 108) - time_attention(H100, "flash2", 112)
    assert longer == pytest.approx(copied, rel=0.05)
    assert time_attention(H100, "flash2", 104) < time_attention(H100, "flash2", 108) - 0.9 * copied


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma-7b"])
def test_a_named_kernel_runs_heads_for_which_pytorch_does_not_choose_it(name: str) -> None:
    """Heads of 192 and 256 numbers: arXiv:2407.08608, figure 5, has FlashAttention-3 and cuDNN at 256,
    about twice as fast as FlashAttention-2, which is what PyTorch takes."""

    def list_kernels(attention: str) -> list[str]:
        model = pk.Transformer.preset(
            name,
            layers=1,
            dense_layers=0,
            batch=1,
            sequence=4096,
            dtype="bf16",
            attention=attention,
        )
        [graph] = model.graphs(accelerator=True)
        return list_attention(graph, H100)

    assert list_kernels("flash3") == ["flash3"]
    assert list_kernels("fused") == list_kernels("flash2") == ["flash2"]


def test_attention_of_no_given_width_takes_the_usual_one() -> None:
    features = {"flops": 1e12, "nbytes": 1e8}
    given = {**features, "batch": 1.0, "m": 4096.0, "n": 4096.0, "k": 128.0}
    found = [
        float(H100.kernel_time("attention.forward.flash3", sizes, dtype="bf16"))
        for sizes in (features, given)
    ]
    assert found[0] == pytest.approx(found[1])


def test_batched_products_with_odd_rows_take_longer() -> None:
    """197 tokens in bf16: 394 B are no multiple of 4; the part beyond the launch grows."""
    sizes = {
        "flops": 2.0 * 64 * 197 * 197 * 64,
        "nbytes": 2.0 * 64 * (2 * 197 * 64 + 197 * 197),
        "batch": 64.0,
        "m": 197.0,
        "n": 197.0,
        "k": 64.0,
    }
    launch = H100.kernels["bmm"]["launch"]
    odd = float(H100.kernel_time("bmm", sizes, dtype="bf16")) - launch
    even = float(H100.kernel_time("bmm", {**sizes, "n": 200.0}, dtype="bf16")) - launch
    assert odd / even == pytest.approx(BATCHED_UNALIGNED[9].of_4_bytes)
    assert BATCHED_UNALIGNED[9].of_4_bytes == 3.6
    assert UNALIGNED[9].of_4_bytes == 5.7  # single ones lose more


def test_batched_products_of_an_a100_with_heads_of_150_take_as_long_as_without_tensor_cores() -> (
    None
):
    """300 B are no multiple of 16: 9.6 times beyond the launch, which is the rate of fp32 within a
    fifth; docs/formulas.md, table 2.4."""
    a100 = pk.load_platform("a100-sxm-8")

    def time_beyond_launch(width: float, dtype: str, itemsize: float) -> float:
        sizes = {
            "flops": 2.0 * 48 * 2048 * 2048 * width,
            "nbytes": itemsize * 48 * (2 * 2048 * width + 2048 * 2048),
            "batch": 48.0,
            "m": 2048.0,
            "n": 2048.0,
            "k": width,
        }
        launch = a100.kernels["bmm"]["launch"]
        return float(a100.kernel_time("bmm", sizes, dtype=dtype)) - launch

    narrow = time_beyond_launch(144.0, "fp16", 2.0)
    wide = time_beyond_launch(152.0, "fp16", 2.0)
    odd = time_beyond_launch(150.0, "fp16", 2.0)
    # as many times as long as products of 150 between those of 144 and 152
    assert odd / (0.25 * narrow + 0.75 * wide) == pytest.approx(9.6, rel=0.01)
    assert odd / time_beyond_launch(150.0, "fp32", 4.0) == pytest.approx(1.0, abs=0.2)
    with pytest.warns(
        UserWarning, match=r"batched products in fp16 .* take 9\.6 times as long; pad"
    ):
        found = a100.gemm(2048, 2048, 150, dtype="fp16", batch=48)
    assert found.spread > BATCHED_UNALIGNED[8].spread > 0.5


@pytest.mark.parametrize(
    ("device", "of_4_bytes", "of_16_bytes"),
    [
        ("v100-sxm-8", 1.0, 1.0),
        ("a100-sxm-8", 9.6, 9.6),
        ("rtx-3090-1", 1.83, 1.07),
        ("l40s-8", 1.83, 1.07),
        ("h100-sxm-8", 3.6, 1.83),
        ("b200-sxm-8", 3.6, 1.83),
    ],
)
def test_each_capability_has_the_slowdown_of_the_last_one_that_is_known(
    device: str, of_4_bytes: float, of_16_bytes: float
) -> None:
    slowdown = list_unaligned(pk.load_platform(device), "bmm")
    assert (slowdown.of_4_bytes, slowdown.of_16_bytes) == (of_4_bytes, of_16_bytes)


def test_softmax_weighs_more_where_products_are_faster() -> None:
    """Exponentials per cycle are the same on H100 and B200, and twice as many on B300."""
    widths = {
        name: find_softmax_width(pk.load_platform(name).device)
        for name in ("a100-sxm-8", "h100-sxm-8", "b200-sxm-8", "b300-sxm-8")
    }
    assert widths["b200-sxm-8"] == 2 * widths["h100-sxm-8"] == 2 * widths["b300-sxm-8"]
    assert widths["a100-sxm-8"] == 0.0
    assert find_softmax_width(Platform.from_datasheet("mi300x").device) == widths["h100-sxm-8"]


def test_a_power_cap_slows_arithmetic_by_its_law() -> None:
    """500 of 700 W: ((5/7 - 0.2) / 0.8)^(1/3) = 0.863; memory and links stay."""
    capped = H100.with_power(500)
    clock = ((500 / 700 - 0.2) / 0.8) ** (1 / 3)
    assert clock == pytest.approx(capped_clock(500 / 700)) == pytest.approx(0.8631, abs=1e-4)
    for dtype, peak in H100.device.peaks.items():
        assert capped.device.peaks[dtype].value == pytest.approx(clock * peak.value)
    assert capped.device.main_bandwidth == H100.device.main_bandwidth
    assert capped.network.links == H100.network.links
    assert capped.kernels["gemm"].spread > H100.kernels["gemm"].spread
    assert "power cap of 500 W" in capped.name
    assert H100.with_power(700).device.peaks["bf16"].value == pytest.approx(989.4e12, rel=1e-3)


@pytest.mark.parametrize(
    ("platform", "watts", "message"),
    [
        ("h100-sxm-8", 300, "watts is 300; it must be from 490 to 700"),
        ("h100-sxm-8", 900, "watts is 900; it must be from 490 to 700"),
        ("h100-sxm-8", 0, "^watts is 0"),
        ("zen5-2", 100, "no datasheet states the power"),
    ],
)
def test_caps_that_no_law_covers_are_refused(platform: str, watts: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.load_platform(platform).with_power(watts)


def test_a_second_cap_is_refused() -> None:
    """500 W of 500 W would be 0.863 of 0.863."""
    capped = H100.with_power(500)
    for slower in (capped, H100.with_scale(peak=0.9)):
        with pytest.raises(ValueError, match="its clock is lower already; cap the platform"):
            slower.with_power(500)


def test_a_cap_that_leaves_nothing_for_the_clock_stops_it() -> None:
    """A fifth of the power does not depend on the clock."""
    assert capped_clock(0.1) == 0.0
    assert capped_clock(np.array([0.1, 1.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("system", "share"), [("mi300x", 0.511), ("mi355x", 0.622), ("tpu-v5e", 0.9), ("l40s", None)]
)
def test_products_of_other_makers_reach_shares_of_their_own(
    system: str, share: float | None
) -> None:
    found = Platform.from_datasheet(system).kernels["gemm"]["compute_efficiency"]
    typical = Platform.from_datasheet("b200-sxm").kernels["gemm"]["compute_efficiency"]
    assert found == pytest.approx(typical if share is None else share, abs=0.002)


def test_forms_belong_to_their_classes() -> None:
    attention = H100.kernels["attention.forward.flash3"]
    assert isinstance(attention, AttentionRoofline)
    for key, fit, message in (
        ("gemm", attention, "only attention has heads"),
        ("gemm", H100.kernels["rowwise._softmax"], "only row-wise kernels have rows"),
    ):
        with pytest.raises(ValueError, match=message):
            Platform("odd", H100.device, H100.network, {key: fit}, {})


@pytest.mark.parametrize(
    ("platform", "dtype", "least", "most"),
    [("h100-sxm-8", "fp8", 0.66, 0.78), ("b200-sxm-8", "fp8", 0.62, 0.78)],
)
def test_products_in_fp8_reach_what_is_published(
    platform: str, dtype: str, least: float, most: float
) -> None:
    """stas00/ml-engineering, largest of many shapes: 70.9 % of the peak on H100, 76.3 % on B200;
    NVIDIA's Transformer Engine 60 to 75 %."""
    node = pk.load_platform(platform)
    with keep_quiet():
        time = node.gemm(8192, 8192, 8192, dtype=dtype).time
    assert least < 2 * 8192**3 / time / node.device.peaks[dtype].value < most
