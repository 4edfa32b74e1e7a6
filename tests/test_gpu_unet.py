"""The U-Net whose published steps are predicted, and the net of the only pair of layouts on one A100."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capturing modules needs torch")

from benchmarks import gpu_unet  # noqa: E402
from benchmarks.helpers.ssd import ALL_BOXES, CLASSES, EDGE, SSD300  # noqa: E402


def test_the_net_has_the_weights_of_the_published_one() -> None:
    """865.9 million weights (model card of stabilityai/stable-diffusion-2-base, as diffusers counts
    them), and a result of the size of a latent image."""
    with torch.device("meta"):
        net = gpu_unet.UNet()
        weights = sum(parameter.numel() for parameter in net.parameters())
        latents = torch.empty(2, 4, 64, 64)
        time_step = torch.zeros(2, dtype=torch.long)
        text = torch.empty(2, 77, 1024)
        with torch.autocast("cuda", torch.bfloat16, enabled=False):
            for module in net.modules():  # norms without autocast
                if isinstance(module, gpu_unet.GroupNorm):
                    module.__class__ = torch.nn.GroupNorm
                elif isinstance(module, gpu_unet.LayerNorm):
                    module.__class__ = torch.nn.LayerNorm
            result = net(latents, time_step, text)
    assert weights == 865_910_724
    assert result.shape == latents.shape


def test_further_micro_batches_take_as_long_as_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5 s with one micro-batch and 0.9 s with two: 0.9 + 14 · 0.4 s with sixteen."""
    asked = []

    def predict(platform: str, ranks: int, micro_batches: int) -> Any:
        asked.append(micro_batches)
        return SimpleNamespace(time={1: 0.5, 2: 0.9}[micro_batches], spread=0.1)

    monkeypatch.setattr(gpu_unet, "_predict", predict)
    assert gpu_unet.predict_step("a100-sxm-8", 8, 16) == (pytest.approx(6.5), 0.1)
    assert gpu_unet.predict_step("a100-sxm-8x8", 64, 2) == (0.9, 0.1)
    assert gpu_unet.predict_step("a100-sxm-8x16", 128, 1) == (0.5, 0.1)
    assert asked == [2, 1, 2, 1]


def test_ssd_finds_as_many_boxes_as_its_publication() -> None:
    """8732 boxes an image (arXiv:1512.02325)."""
    with torch.device("meta"):
        boxes, classes = SSD300()(torch.empty(2, 3, EDGE, EDGE))
    assert boxes.shape == (2, 4, ALL_BOXES)
    assert classes.shape == (2, CLASSES, ALL_BOXES)
