"""Memory of strategies: what Megatron-LM holds, by hand and beside published peaks, and what PyTorch's
own software holds."""

import csv
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.models.partitions import SCHEDULES, activation_bytes, held_batches, list_steps
from perfkit.platform.gallery import load_platform
from perfkit.prediction.memory import WORKSPACE
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

pytestmark = pytest.mark.filterwarnings("ignore")

LLAMA: dict[str, Any] = {"norm": "rms", "gated": True, "rotary": True, "tie": False, "bias": False}
MODEL = Transformer(
    "llama",
    True,
    64,
    2048,
    layers=8,
    hidden=2048,
    heads=16,
    kv_heads=4,
    inner=8192,
    vocabulary=32000,
    positions=2048,
    attention="flash2",
    dtype="bf16",
    mixed=True,
    fused=True,
    **LLAMA,
)
#: Numbers of a layer: queries and outputs, keys and values, three products, two norms; and of the
#: embedding and the head with the last norm.
LAYER = 2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
ENDS = 2 * 32000 * 2048 + 2048


def price(strategy: Strategy, model: Transformer = MODEL, stack: Any = None) -> dict[str, float]:
    """Memory of a strategy by use, and all of it, on A100."""
    columns = price_strategies(
        model, load_platform("a100-sxm-8x8"), Strategy.stack([strategy]), "eager", stack=stack
    )
    return {name: float(values[0]) for name, values in columns.items()}


def test_megatron_shares_states_and_keeps_weights_and_sums_of_gradients_whole() -> None:
    """2 B of weights and 4 B of gradients a number, and 12 B of states over four replicas."""
    held = price(Strategy(tp=2, dp=4, zero=1, sequence_parallel=True), stack="megatron")
    numbers = (8 * LAYER + ENDS) / 2
    assert held["parameters"] == pytest.approx(2 * numbers, rel=1e-3)
    assert held["states"] == pytest.approx(12 * numbers / 4, rel=1e-3)
    # with placeholders of the gradients of a layer in bf16
    assert held["gradients"] == pytest.approx(4 * numbers + 2 * LAYER / 2, rel=1e-3)
    assert held["communication"] == 0


def test_fsdp_shares_weights_too_and_gathers_them() -> None:
    strategy = Strategy(tp=2, dp=4, zero=1, sequence_parallel=True)
    held = price(strategy, stack="torchtitan")
    numbers = (8 * LAYER + ENDS) / 2
    assert held["parameters"] == pytest.approx(4 * numbers / 4, rel=1e-3)
    assert held["communication"] > 2 * numbers


def test_layers_of_megatron_keep_what_is_published() -> None:
    """Of 16 layers more, each keeps the inputs of its products: 12.5 B of each number of a token,
    as keys are a quarter of queries, and 6 B of each inner number."""
    strategy = Strategy(tp=2, dp=4, zero=1, sequence_parallel=True, micro_batch=2)
    few = price(strategy)["activations"]
    many = price(strategy, replace(MODEL, layers=24))["activations"]
    tokens = 2 * 2048
    of_layer = tokens * (13 * 2048 + 6 * 8192) / 2
    assert many - few == pytest.approx(16 * of_layer, rel=1e-3)
    published = activation_bytes(
        2, 2048, 2048, heads=16, kv_share=0.25, inner=8192, gated=True, fused=True, dropout=False
    )
    assert published / 2 == of_layer


def test_a_loss_of_megatron_overwrites_its_logits() -> None:
    """bf16 logits and one fp32 copy, of a vocabulary that is much larger than all layers."""
    large = replace(MODEL, layers=1, vocabulary=512000)
    strategy = Strategy(tp=4, zero=0, micro_batch=8)
    held = price(strategy, large)["activations"]
    logits = 8 * 2048 * 512000 / 4
    assert held == pytest.approx(6 * logits, rel=0.1)
    of_torch = price(strategy, large, stack=replace(pk.find_stack("torchtitan"), zero=0))
    assert of_torch["activations"] > 11 * logits


def test_messages_of_megatron_do_not_grow_with_the_micro_batches() -> None:
    def find(batch: int, stack: Any = None) -> float:
        strategy = Strategy(pp=4, dp=2, zero=1)
        return price(strategy, replace(MODEL, batch=batch), stack)["communication"]

    inputs = 2 * 2048 * 2048
    assert find(64) == find(128) == 2 * inputs
    # an input and a gradient of each
    added = find(128, "torchtitan") - find(64, "torchtitan")
    assert added == pytest.approx(32 * inputs)


def test_the_second_stage_may_be_the_fullest() -> None:
    """Eight stages of 1, 3, 3 ... layers: the second one holds seven micro-batches of three layers,
    the first one eight of one layer."""
    model = replace(MODEL, layers=20, vocabulary=1000)
    strategy = Strategy(pp=8, dp=1, micro_batch=2, first_layers=1, last_layers=1)
    held = price(strategy, model)
    of_layer = 2 * 2048 * (13 * 2048 + 6 * 8192)
    assert held["activations"] == pytest.approx(21 * of_layer, rel=0.03)
    assert held["parameters"] == pytest.approx(2 * 3 * LAYER, rel=1e-3)


def test_a_head_that_is_tied_has_a_copy_of_the_embedding_on_its_stage() -> None:
    """With many words and few micro-batches the last stage, which computes the loss, is the
    fullest."""
    tied = replace(MODEL, layers=2, vocabulary=256000, batch=2, tie=True)
    held = price(Strategy(pp=2, dp=1, micro_batch=1), tied)
    assert held["parameters"] == pytest.approx(2 * (LAYER + 256000 * 2048), rel=1e-3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "breadth_first"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_each_stage_keeps_as_many_micro_batches_as_its_order_of_passes_says(
    schedule: str, stage: int
) -> None:
    chunks = 2 if SCHEDULES[schedule].has_chunks else 1
    steps = list_steps(schedule, stage, stages=4, micro_batches=8, chunks=chunks)
    kept = np.cumsum([1 if step.phase == "forward" else -1 for step in steps]).max()
    said = held_batches(8, stages=4, schedule=schedule, chunks=chunks, stage=stage)
    assert kept == said * chunks


def test_weight_gradients_that_are_put_off_keep_the_inputs_of_products() -> None:
    """The second stage of H1 keeps one micro-batch more than that of 1F1B, without the scores of
    attention."""
    model = replace(MODEL, layers=20, attention="eager", vocabulary=1000)

    def find(schedule: str, attention: str) -> float:
        strategy = Strategy(pp=8, dp=1, first_layers=1, last_layers=1, schedule=schedule)
        return price(strategy, replace(model, attention=attention))["activations"]

    without_scores = 2048 * (13 * 2048 + 6 * 8192)
    for attention in ("eager", "flash2"):
        added = find("zero_bubble", attention) - find("1f1b", attention)
        assert added == pytest.approx(3 * without_scores, rel=1e-3)


@pytest.mark.parametrize("stack", ["megatron", "deepspeed"])
@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(dp=4),
        Strategy(dp=4, zero=1),
        Strategy(tp=2, dp=2, zero=1),
        Strategy(pp=2, dp=2),
        Strategy(cp=2, dp=2),
        Strategy(tp=2, pp=2, dp=2, zero=1),
    ],
)
def test_both_roads_hold_the_same_by_the_rules_of_a_stack(strategy: Strategy, stack: str) -> None:
    model = replace(MODEL, layers=4, batch=16)
    events = pk.predict(model, "a100-sxm-8", strategy=strategy, stack=stack).memory()
    closed = price(strategy, model, stack)
    assert events.total == pytest.approx(closed["needs"], rel=0.005)
    assert events.reserve == pytest.approx(closed["reserve"], rel=0.005)
    parts = sum(closed[name] for name in ("parameters", "gradients", "states", "activations"))
    needs = parts + closed["communication"] + closed["workspace"] + WORKSPACE
    assert needs == pytest.approx(closed["needs"])


def test_published_peaks_of_megatron_are_met(shared_data: Any) -> None:
    """Llama 3 70B with 12 layers on 8 B200; nothing was fitted to these rows."""
    errors = []
    with open(shared_data / "steps" / "simumax_b200.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            model = replace(
                MODEL,
                layers=12,
                hidden=8192,
                heads=64,
                kv_heads=8,
                inner=28672,
                vocabulary=128256,
                attention="flash3",
                batch=int(row["batch"]),
                sequence=int(row["seq"]),
                positions=int(row["seq"]),
            )
            strategy = Strategy(
                tp=int(row["tp"]),
                pp=int(row["pp"]),
                dp=int(row["dp"]),
                cp=int(row["cp"]),
                zero=int(row["zero"]),
                sequence_parallel=row["sp"] == "1",
                cp_kind="ulysses" if row["ulysses"] == "1" else "ring",
            )
            needs = price(strategy, model, "megatron-te")["needs"]
            errors.append(needs / (float(row["mem_gib"]) * 2**30) - 1)
    assert len(errors) == 12
    assert np.abs(errors).max() < 0.05, errors


#: Layers, width, heads, ranks of a product, stages, sequences of a micro-batch, and chunks of the
#: models of arXiv:2205.05198, table 3.
PUBLISHED = {
    "22B": (48, 6144, 64, 8, 1, 4, 1),
    "175B": (96, 12288, 96, 8, 8, 1, 3),
    "530B": (105, 20480, 128, 8, 35, 1, 3),
    "1T": (128, 25600, 160, 8, 64, 1, 1),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("variant", ["none", "selective+SP"])
def test_strategies_hold_what_the_published_form_says(
    name: str, variant: str, shared_data: Any
) -> None:
    """Activations of the first stage, which the paper computed: beside those of layers there are
    those of the embedding, and of the layer at work."""
    layers, hidden, heads, tp, pp, micro_batch, chunks = PUBLISHED[name]
    model = Transformer(
        name,
        True,
        4 * pp * micro_batch,
        2048,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=51200,
        positions=2048,
        attention="eager",
        dtype="fp16",
        mixed=True,
        fused=True,
        dropout=0.1,
    )
    is_selective = variant == "selective+SP"
    strategy = Strategy(
        tp=tp,
        pp=pp,
        micro_batch=micro_batch,
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        checkpoint="selective" if is_selective else "none",
        sequence_parallel=is_selective,
    )
    where = load_platform("a100-sxm-8").with_link("inter", bandwidth=2.5e10, latency=5e-6)
    columns = price_strategies(
        model, where.with_nodes(pp), Strategy.stack([strategy]), "eager", stack="megatron"
    )
    path = shared_data / "end_to_end" / "seqsel_memory.csv"
    with open(path, newline="", encoding="utf-8") as file:
        [said] = [
            float(row["activations_GiB_per_gpu"]) * 2**30
            for row in csv.DictReader(file)
            if row["activations_GiB_per_gpu"] and (row["model"], row["variant"]) == (name, variant)
        ]
    assert 0.98 * said < columns["activations"][0] < 1.05 * said


#: Bytes of one number for each of 2048 tokens and two experts, and of a norm on one of two ranks.
ROUTED, SHARE = 2 * 2 * 2048, 2 * 2048 * 2048 / 2


@pytest.mark.parametrize(
    ("strategy", "less"),
    [
        # two ranks split the width of experts, and gather the inputs behind both norms
        (Strategy(tp=2, dp=4, sequence_parallel=True), ROUTED * 8192 / 2 - 2 * SHARE),
        (Strategy(tp=2, dp=4, ep=4, sequence_parallel=True), ROUTED * 8192 / 2 - 2 * SHARE),
        # each rank sends half of the tokens to whole experts, straight from the second norm
        (Strategy(tp=2, dp=4, ep=8, sequence_parallel=True), ROUTED / 2 * 8192 - SHARE),
        # two ranks gather the tokens of both, and split the width
        (Strategy(tp=2, dp=4, ep=4, etp=2, sequence_parallel=True), ROUTED / 2 * 8192 - SHARE),
        # no tokens are shared
        (Strategy(dp=8, ep=8), ROUTED * 8192),
    ],
    ids=str,
)
def test_experts_of_megatron_keep_no_activation_ahead_of_a_gate(
    strategy: Strategy, less: float
) -> None:
    """Two copies of each token go to experts: 2 B less of each inner number. The shares of norms whose
    gathered copies were recorded come on top."""
    model = replace(MODEL, experts=8, top_k=2)
    of_torch = replace(pk.find_stack("torchtitan"), zero=0)

    def keep_in_layer(stack: Any) -> float:
        many, few = (
            price(strategy, replace(model, layers=layers), stack)["activations"]
            for layers in (16, 8)
        )
        return (many - few) / 8

    assert keep_in_layer(of_torch) - keep_in_layer("megatron") == pytest.approx(less, rel=1e-3)
