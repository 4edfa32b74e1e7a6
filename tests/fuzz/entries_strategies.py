"""Fuzzers of strategies: drawn models and ways to share them, held against laws."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import perfkit as pk
from perfkit.models.checkpoints import EVERY_LAYER
from perfkit.prediction.strategies import PARTS, price_strategies
from perfkit.workloads.transformer import name_checkpoint
from tests.fuzz.damage import Rng, choose
from tests.fuzz.harness import Entry, Nonsense

SHARDINGS = ("ddp", "zero1", "zero2", "fsdp")


def draw_model(rng: Rng, batch: int, **changes: Any) -> pk.Transformer:
    """A small GPT-2 of random shape, whose kernels take longer than their launches."""
    mixed = bool(rng.integers(2))
    return pk.Transformer.gpt2(
        batch=batch,
        sequence=1024,
        layers=int(rng.integers(2, 9)),
        vocabulary=int(choose(rng, (32000, 50304))),
        dtype="bf16",
        mixed=mixed,
        fused=bool(rng.integers(2)),
        tie=bool(rng.integers(2)),
        **changes,
    )


def price(model: pk.Transformer, strategy: pk.Strategy, platform: str) -> dict[str, float]:
    """Columns of one strategy in closed form [s, B]."""
    found = price_strategies(model, pk.load_platform(platform), pk.Strategy.stack([strategy]))
    row = {name: float(values[0]) for name, values in found.items()}
    if not np.isclose(sum(row[name] for name in PARTS), row["time"]):
        raise Nonsense(f"parts of {strategy} do not sum to its time")
    if min(row.values()) < 0:
        raise Nonsense(f"{strategy} has a negative part")
    return row


def compare_shardings(rng: Rng, folder: Path) -> Any:
    """A sharding of the builder is the same strategy, on the event loop and in closed form."""
    accumulate = int(choose(rng, (1, 3)))
    sharding = str(choose(rng, SHARDINGS))
    checkpoint = choose(rng, (False, True, "norms", "activation", "attention+norms"))
    checkpoint_layers = int(choose(rng, (EVERY_LAYER, EVERY_LAYER, 1, 2)))
    if not checkpoint:
        checkpoint_layers = EVERY_LAYER
    model = draw_model(
        rng,
        64 * accumulate,
        accumulate=accumulate,
        checkpoint=checkpoint,
        checkpoint_layers=checkpoint_layers,
        experts=int(choose(rng, (0, 0, 4, 8))),
    )
    strategy = pk.Strategy(
        dp=8,
        zero=SHARDINGS.index(sharding),
        micro_batch=8,
        checkpoint=name_checkpoint(model.checkpoint),
        checkpoint_layers=model.checkpoint_layers,
    )
    built = pk.predict(replace(model, parallel=sharding), "h100-sxm-8", ranks=8)
    events = pk.predict(model, "h100-sxm-8", strategy=strategy)
    row = price(model, strategy, "h100-sxm-8")
    for time in (events.time, row["time"]):
        if abs(time / built.time - 1) > 0.05:
            raise Nonsense(f"{model} with {sharding}: {built.time} s, {strategy}: {time} s")
    if abs(row["needs"] / built.memory().total - 1) > 0.05:
        raise Nonsense(f"{model} with {sharding} needs {built.memory().total}, {row['needs']} B")
    return built


def add_experts(rng: Rng, folder: Path) -> Any:
    """Weights of experts are stored once, whole or in shards, and more of them need more memory."""
    few = int(rng.integers(2, 9))
    model = draw_model(rng, 64, top_k=int(rng.integers(1, 3)), experts=few)
    more = replace(model, experts=few + int(rng.integers(1, 9)))
    sharding = str(choose(rng, ("ddp", "fsdp")))
    needs = []
    for each in (model, more):
        memory = pk.predict(replace(each, parallel=sharding), "h100-sxm-8", ranks=8).memory()
        needs.append(memory.total)
        wanted = (4 if each.mixed else 2) * each.graphs()[0].parameters
        if sharding == "fsdp":
            wanted /= 8
        if abs(memory.parts["parameters"] / wanted - 1) > 0.05:
            held = memory.parts["parameters"]
            raise Nonsense(f"weights of {each.experts} experts take {held} B of {wanted} B")
    strategy = pk.Strategy(dp=8, zero=SHARDINGS.index(sharding), micro_batch=8)
    rows = [price(each, strategy, "h100-sxm-8")["needs"] for each in (model, more)]
    if not needs[0] < needs[1] or not rows[0] < rows[1]:
        raise Nonsense(f"{few} and {more.experts} experts need {needs} and {rows} B")
    return needs


def slow_an_end(rng: Rng, folder: Path) -> Any:
    """Closed forms agree with the event loop where stages are uneven, and with 1F1B they are
    continuous in the vocabulary."""
    pp = int(choose(rng, (2, 4, 6, 8)))
    layers = int(rng.integers(2 * pp, 5 * pp))
    average = layers // pp
    ends = {"first_layers": 0, "last_layers": 0}
    for name in ends:
        if rng.random() < 0.5:
            ends[name] = max(1, average + int(rng.integers(-1, 2)))
    if pp == 2 and all(ends.values()):
        ends["last_layers"] = 0
    model = pk.Transformer.preset(
        "gpt3-2.7b",
        layers=layers,
        batch=2 * pp * int(rng.integers(2, 5)),
        sequence=1024,
        vocabulary=int(choose(rng, (1024, 32000, 50304))),
        dtype="bf16",
        fused=True,
    )
    strategy = pk.Strategy(tp=2, pp=pp, dp=2, **ends)
    row = price(model, strategy, "h100-sxm-8x4")
    events = pk.predict(model, "h100-sxm-8x4", strategy=strategy).time
    if abs(row["time"] / events - 1) > 0.05:
        raise Nonsense(f"{model} with {strategy}: {row['time']} s in closed form, {events} s")
    wider = replace(model, vocabulary=model.vocabulary + 64)
    step = price(wider, strategy, "h100-sxm-8x4")["time"] / row["time"] - 1
    if not -1e-3 < step < 0.02:
        raise Nonsense(f"64 words more change the time of {strategy} by {step:.1%}")
    return [row["time"], events]


ENTRIES = {
    "same-sharding": Entry(compare_shardings, 0.1, new=True),
    "more-experts": Entry(add_experts, 0.1, new=True),
    "uneven-stages": Entry(slow_an_end, 0.1, new=True),
}
