"""Published training steps of image models, captured from transformers and predicted; no kernel was
fitted to them.

python -m benchmarks.gpu_vision

- 39 steps of 20 models on an RTX 3090, known by its datasheet and its large products (timm's
  benchmark: autocast to fp16, SGD with momentum). How much longer convolutions take in NCHW
  (`LAYOUT_CONVERSION_TIME`, docs/formulas.md, table 2.4) was chosen with the first ten models, NVIDIA's pairs and SSD
  in view.
- 12 steps of ResNet-50 on V100 and A100 (NVIDIA's examples). The share of the peak that
  convolutions reach on tensor cores was fitted to six of those in channels_last.
- 2 steps of SSD300 on one A100, in NCHW and in channels_last (a change of NVIDIA's examples): the
  only pair of layouts on one A100.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.errors import judge, state
from benchmarks.helpers.files import read_published
from benchmarks.helpers.tables import Row, lay_out
from perfkit.platform.estimates import keep_quiet

#: The one model that transformers does not have.
SSD = "ssd300"
_VIT = {
    "attn_implementation": "eager",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def _vit(hidden: int, patch: int, layers: int = 12) -> tuple[str, dict[str, Any]]:
    """A vision transformer with heads of 64 columns."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": hidden // 64,
    }
    return "ViT", {**_VIT, **sizes, "num_hidden_layers": layers, "patch_size": patch}


def _convnext(width: int, deep: int) -> tuple[str, dict[str, Any]]:
    return "ConvNext", {"depths": [3, 3, deep, 3], "hidden_sizes": [width * 2**n for n in range(4)]}


def _resnet(*depths: int, basic: bool = False) -> tuple[str, dict[str, Any]]:
    small = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]} if basic else {}
    return "ResNet", {"depths": [*depths], **small}


#: Name of the model in transformers, and the settings that differ from its configuration's.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet18": _resnet(2, 2, 2, 2, basic=True),
    "resnet34": _resnet(3, 4, 6, 3, basic=True),
    "resnet50": _resnet(3, 4, 6, 3),
    "resnet101": _resnet(3, 4, 23, 3),
    "resnet152": _resnet(3, 8, 36, 3),
    "vit_tiny_p16": _vit(192, 16),
    "vit_small_p16": _vit(384, 16),
    "vit_base_p16": _vit(768, 16),
    "vit_base_p32": _vit(768, 32),
    "vit_large_p16": _vit(1024, 16, 24),
    "beit_base": (
        "Beit",
        {"use_relative_position_bias": True, "drop_path_rate": 0.0, "attn_implementation": "eager"},
    ),
    "convnext_tiny": _convnext(96, 9),
    "convnext_small": _convnext(96, 27),
    "convnext_base": _convnext(128, 27),
    "swin_tiny": ("Swin", {"drop_path_rate": 0.0}),
    "swin_small": ("Swin", {"drop_path_rate": 0.0, "depths": [2, 2, 18, 2]}),
    "swin_base": (
        "Swin",
        {
            "drop_path_rate": 0.0,
            "depths": [2, 2, 18, 2],
            "embed_dim": 128,
            "num_heads": [4, 8, 16, 32],
        },
    ),
    "mobilenetv2": ("MobileNetV2", {"tf_padding": False}),
    "mobilenetv2_140": ("MobileNetV2", {"tf_padding": False, "depth_multiplier": 1.4}),
    "poolformer_s12": ("PoolFormer", {"drop_path_rate": 0.0}),
}


def _allow_tf32(allowed: bool) -> None:
    """Whether products and convolutions in fp32 may run in TF32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def _build(model: str, formats: dict[str, Any]) -> Any:
    """A model of transformers, or SSD300, on the device in a memory format."""
    import transformers

    if model == SSD:
        from benchmarks.helpers.ssd import SSD300

        return SSD300().to("cuda", **formats)
    kind, settings = _MODELS[model]
    make = getattr(transformers, f"{kind}ForImageClassification")
    config = make.config_class(num_labels=1000, **settings)
    return make(config).to("cuda", **formats)


def _find_loss(model: str, module: Any, images: Any, labels: Any) -> Any:
    """Loss of a model of transformers, or of SSD300."""
    import torch

    if model == SSD:
        from benchmarks.helpers.ssd import find_loss

        return find_loss(*module(images))
    return torch.nn.functional.cross_entropy(module(pixel_values=images).logits, labels)


def capture_step(model: str, batch: int, precision: str, layout: str, ranks: int = 1) -> pk.Graph:
    """A training step on images of 224 × 224 pixels in 1,000 classes, for SSD300 of 300 × 300 pixels; `batch` is that
    of a rank."""

    def make_step() -> Callable[[], None]:
        import torch

        formats = {"memory_format": torch.channels_last} if layout == "channels_last" else {}
        module = _build(model, formats)
        edge = 300 if model == SSD else 224
        images = torch.randn(batch, 3, edge, edge, device="cuda").contiguous(**formats)
        labels = torch.randint(1000, (batch,), device="cuda")
        if ranks > 1:
            module = torch.nn.parallel.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
        _allow_tf32(precision != "fp32")

        def region() -> Any:
            return torch.autocast("cuda", torch.float16) if precision == "fp16" else nullcontext()

        def step() -> None:
            optimizer.zero_grad()
            with region():
                loss = _find_loss(model, module, images, labels)
            loss.backward()
            optimizer.step()

        return step

    is_convolutional = model.startswith(("resnet", "mobilenet", SSD))
    family = "convolution" if is_convolutional else "transformer"
    with warnings.catch_warnings(action="ignore"):
        return pk.capture(make_step, name=model, ranks=ranks, device="cuda", family=family)


def predict_rows() -> list[dict[str, Any]]:
    """The published steps with what is predicted of them."""
    rows = []
    for row in read_published("vision_steps.csv"):
        ranks = int(row["ranks"])
        batch = int(row["batch"])
        with keep_quiet():
            graph = capture_step(row["model"], batch, row["precision"], row["layout"], ranks)
            prediction = pk.predict(graph, row["device"], ranks=ranks)
        rows.append({**row, "batch": batch, **state(prediction, row["seconds"])})
    return rows


_ROWS = {
    "set": "{set}",
    "device": "{device}",
    "ranks": "{ranks:.0f}",
    "model": "{model}",
    "batch": "{batch}",
    "format": "{precision}",
    "layout": "{layout}",
    "predicted (80 %)": "{predicted:.0fms} ms ({low:.0fms} to {high:.0fms})",
    "measured": "{measured:.0fms} ms",
    "error": "{error:+.0%}",
}
_FIGURES = {
    "set": "{set}",
    "n": "{n:.0f}",
    "geomean": "{geomean:.1f}",
    "mean": "{mean:.1f}",
    "p95": "{p95:.1f}",
    "bias": "{bias:+.1f}",
    "inside 80 %": "{inside:.0f}",
}


def format_rows(rows: Sequence[Row]) -> str:
    """Every row, and the errors of each set."""
    figures = []
    for name in dict.fromkeys(row["set"] for row in rows):
        part = [row for row in rows if row["set"] == name]
        figures.append({"set": name, **judge(part)})
    return f"{lay_out(rows, _ROWS)}\n\nerrors [%]\n{lay_out(figures, _FIGURES)}"


@command({})
def main(given: Any) -> None:
    """Published steps of image models on GPUs that perfkit knows by a datasheet or by kernels of
    others."""
    print(format_rows(predict_rows()))
