"""Published throughput of encoders beside predictions: a ViT that is built, and layers of T5 that are
captured from transformers.

python -m benchmarks.encoders

- ViT-g/14 in bf16 on 1 to 8 nodes of 8 A100 and of 8 H100 (NeMo, `reference_data/published/vit_steps.csv`):
  4,096 images of 224 pixels a step, 64 in a micro-batch, replicas. NeMo fills up the class to 8 tokens,
  264 for 257 here, and reads its images.
- The two layers of T5 large in fp16 on one A100 and one V100 (mli/transformers-benchmarks,
  `reference_data/published/t5_layers.csv`): forward and backward of 64 texts of 512 tokens. Its container
  has apex, whose norm transformers takes there; here a norm is PyTorch's operations.

Nothing was fitted to these.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import perfkit as pk
from benchmarks.helpers.command import command
from benchmarks.helpers.errors import judge, state
from benchmarks.helpers.files import read_published
from benchmarks.helpers.tables import Row, lay_out
from perfkit.platform.estimates import keep_quiet

#: Images of a step, and of a micro-batch of a rank.
IMAGES, MICRO_BATCH = 4096, 64
#: Width of T5 large, and of its MLPs.
WIDTH, INNER = 1024, 4096


def predict_vit(device: str, ranks: int) -> pk.Prediction:
    """A step of ViT-g/14 on so many ranks."""
    vit = pk.Transformer.vit(
        "vit-h14",
        batch=IMAGES,
        hidden=1408,
        heads=16,
        inner=6144,
        layers=40,
        dropout=0.1,
        joined="attention",
        attention="flash2",
        dtype="bf16",
        mixed=True,
    )
    strategy = pk.Strategy(dp=ranks, micro_batch=MICRO_BATCH)
    return pk.predict(vit, device, ranks=ranks, strategy=strategy, stack="megatron")


def count_layer_flops(layer: str, sequences: int, tokens: int) -> float:
    """FLOP of forward and backward passes of a layer, as the source counts them."""
    mlp = 16 * sequences * tokens * WIDTH**2
    attention = 4 * sequences * WIDTH * tokens**2 + 8 * sequences * tokens * WIDTH**2
    attentions = 2 if layer == "decoder" else 1  # one of them over the encoder
    return 3.0 * (mlp + attentions * attention)


def capture_layer(layer: str, sequences: int, tokens: int) -> pk.Graph:
    """The forward and the backward pass of a layer of T5 large, whose gradients add up."""

    def make_step() -> Callable[[], None]:
        import torch
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5Block

        config = T5Config(d_model=WIDTH, d_ff=INNER, num_heads=16, use_cache=False)
        config.is_decoder, config.is_encoder_decoder = layer == "decoder", False
        block = T5Block(config, layer_idx=0).half().to("cuda")
        inputs = torch.zeros(sequences, tokens, WIDTH, device="cuda", dtype=torch.float16)
        arguments = {"cache_position": torch.arange(tokens, device="cuda")}
        if layer == "decoder":
            arguments["encoder_hidden_states"] = inputs

        def step() -> None:
            block(inputs, **arguments)[0].sum().backward()

        return step

    with warnings.catch_warnings(action="ignore"):
        return pk.capture(make_step, name=f"T5 {layer}", device="cuda")


def predict_rows() -> list[dict[str, Any]]:
    """All published figures with what is predicted of them."""
    rows = []
    for row in read_published("vit_steps.csv"):
        ranks = int(row["ranks"])
        with keep_quiet():
            prediction = predict_vit(row["device"], ranks)
        what = {"family": "ViT", "model": "ViT-g/14", "device": row["device"], "ranks": ranks}
        rows.append({**what, **state(prediction, IMAGES / row["images_per_s"])})
    for row in read_published("t5_layers.csv"):
        sequences, tokens = int(row["sequences"]), int(row["tokens"])
        with keep_quiet():
            prediction = pk.predict(capture_layer(row["layer"], sequences, tokens), row["device"])
        measured = count_layer_flops(row["layer"], sequences, tokens) / row["flop_per_s"]
        model = f"T5 large, {row['layer']} layer"
        what = {"family": "T5", "model": model, "device": row["device"], "ranks": 1}
        rows.append({**what, **state(prediction, measured)})
    return rows


_ROWS = {
    "model": "{model}",
    "device": "{device}",
    "ranks": "{ranks}",
    "predicted (80 %)": "{predicted:.0fms} ms ({low:.0fms} to {high:.0fms})",
    "measured": "{measured:.0fms} ms",
    "error": "{error:+.0%}",
}
_FIGURES = {
    "model": "{model}",
    "n": "{n:.0f}",
    "mean": "{mean:.1f}",
    "bias": "{bias:+.1f}",
    "inside 80 %": "{inside:.0f}",
}


def format_rows(rows: Sequence[Row]) -> str:
    """Every row, and the errors of each model."""
    figures = []
    for family in ("ViT", "T5"):
        part = [row for row in rows if row["family"] == family]
        figures.append({"model": family, **judge(part)})
    return f"{lay_out(rows, _ROWS)}\n\nerrors [%]\n{lay_out(figures, _FIGURES)}"


@command({})
def main(given: Any) -> None:
    """Published throughput of a ViT and of layers of T5."""
    print(format_rows(predict_rows()))
