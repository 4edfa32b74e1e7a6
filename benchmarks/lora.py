"""Low-rank adapters: published times of iterations beside predictions.

    python -m benchmarks.lora

Iterations of Qwen on an A100, with adapters and with all weights trained, and of NVIDIA's NeMo
AutoModel on an H100 (reference_data/published/lora_steps.csv, each with its source). Nothing was
fitted to them. Where an iteration is predicted to wait for its host, it is judged apart: how fast
the hosts were is not stated. Rows of the same sources whose ranks share products, or whose products
run in fp8, are left out, as adapters beside these are refused.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.helpers.command import command
from benchmarks.helpers.errors import lay_out_errors, state
from benchmarks.helpers.files import read_csv
from benchmarks.helpers.tables import lay_out
from perfkit.ground.files import find_reference
from perfkit.platform.estimates import keep_quiet
from perfkit.platform.gallery import load_platform
from perfkit.prediction.predictor import predict
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer


class Size(NamedTuple):
    """Sizes of a first Qwen: Llama's layers with biases of queries, keys and values.

    Parameters
    ----------
    layers, hidden, heads, inner, vocabulary : int
        As in `Transformer` [-].
    """

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int


#: config.json of Qwen/Qwen-1_8B, Qwen/Qwen-7B and Qwen/Qwen-14B on the Hugging Face Hub, whose
#: `intermediate_size` counts gate and value.
_QWEN = {
    "qwen-1.8b": Size(24, 2048, 16, 5504, 151936),
    "qwen-7b": Size(32, 4096, 32, 11008, 151936),
    "qwen-14b": Size(40, 5120, 40, 13696, 152064),
}
#: Ranks of the adapters, which all products of a layer have, by source [-].
_RANKS = {"qwen": 64, "automodel": 16}


def make_model(row: Mapping[str, str]) -> Transformer:
    """The model of a row."""
    sizes: dict[str, Any] = {"batch": int(row["batch"]), "sequence": int(row["tokens"])}
    trained: dict[str, Any] = {"mixed": True}
    if row["trained"] == "lora":
        trained = {"lora_rank": _RANKS[row["source"]], "lora_modules": "all-linear"}
    if row["source"] == "automodel":
        return Transformer.preset(row["model"], dtype="bf16", **sizes, **trained)
    return Transformer.preset(
        "llama-2-7b",
        **_QWEN[row["model"]]._asdict(),
        kv_heads=0,
        positions=8192,
        qkv_bias=True,
        joined="attention",
        dtype="bf16",
        attention="flash2",
        **sizes,
        **trained,
    )


def compare_row(row: Mapping[str, str]) -> dict[str, Any]:
    """A row beside its prediction."""
    strategy = Strategy(micro_batch=int(row["micro_batch"]), checkpoint=row["checkpoint"])
    stack = "fsdp"
    if row["source"] == "qwen":
        stack = "ddp"
        if row["trained"] == "full":
            stack = "deepspeed"
    with keep_quiet():
        prediction = predict(
            make_model(row), load_platform(row["device"]), strategy=strategy, stack=stack
        )
    waits = prediction.bottleneck == "host-bound"
    return {
        "row": row["row"],
        "trained": row["trained"],
        "waits": "host" if waits else "",
        "group": _name_group(row, waits=waits),
        **state(prediction, float(row["seconds"])),
    }


def _name_group(row: Mapping[str, str], *, waits: bool) -> str:
    """What a row is judged with."""
    if row["trained"] == "full":
        return "all weights (qwen)"
    if waits:
        return "adapters that wait for hosts"
    return f"adapters ({row['source']})"


def compare_rows() -> list[dict[str, Any]]:
    """All rows beside predictions."""
    return [compare_row(row) for row in read_csv(find_reference("published/lora_steps.csv"))]


_ROWS = {
    "row": "{row}",
    "waits for": "{waits}",
    "published [s]": "{measured:.3g}",
    "predicted [s]": "{predicted:.3g}",
    "error": "{error:+.0%}",
}


@command({})
def main(given: Any) -> None:
    """Adapters, published and predicted."""
    rows = compare_rows()
    print(lay_out(rows, _ROWS))
    groups = {}
    for group in sorted({row["group"] for row in rows}):
        groups[group] = [row for row in rows if row["group"] == group]
    groups["all with adapters"] = [row for row in rows if row["trained"] == "lora"]
    print(f"\n{lay_out_errors(groups)}")
