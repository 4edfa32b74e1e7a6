"""Strategies on arrays: beside the event loop, beside published steps, and each alone."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_context, scale
from perfkit.platform.gallery import load_platform
from perfkit.prediction.result import predict
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

PARTS = ("work", "tensor", "context", "host", "stages", "bubble", "replicas", "update")
GPT = Transformer.preset("gpt3-1.3b", batch=64, sequence=1024, dtype="bf16", fused=True)
MANY = [
    Strategy(), Strategy(dp=8), Strategy(tp=2, dp=4, checkpoint="selective"),
    Strategy(tp=4, dp=2, micro_batch=2, sequence_parallel=True, zero=1),
    Strategy(tp=4, pp=2, micro_batch=4, tiled=True), Strategy(tp=8, pp=2, dp=4, cp=2, sequence_parallel=True),
    Strategy(pp=4, dp=2, micro_batch=2, schedule="interleaved", chunks=3), Strategy(pp=4, dp=2, schedule="gpipe"),
    Strategy(pp=2, dp=4, schedule="zero_bubble"), Strategy(pp=2, dp=4, schedule="breadth_first", chunks=2, zero=3),
    Strategy(cp=4, dp=2, checkpoint="full", overlap=False), Strategy(tp=2, pp=2, dp=2, zero=2, checkpoint="full"),
]  # fmt: skip
#: What replicas share, and how the model differs.
WAYS: list[tuple[int, dict[str, Any]]] = [
    (0, {}), (1, {"mixed": True}), (2, {"mixed": True}), (3, {"mixed": True}), (0, {"accumulate": 4}),
    (3, {"accumulate": 4}), (3, {"checkpoint": True}),
]  # fmt: skip


def price(
    model: Transformer, strategy: Strategy, where: Any = "a100-sxm-8", execution: str = "eager"
) -> dict[str, float]:
    found = price_strategies(model, load_platform(where), Strategy.stack([strategy]), execution)
    return {name: float(own[0]) for name, own in found.items()}


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_many_are_priced_as_each_alone(execution: str) -> None:
    found = price_strategies(GPT, load_platform("a100-sxm-8x16"), Strategy.stack(MANY), execution)
    for place, each in enumerate(MANY):
        alone = price(GPT, each, "a100-sxm-8x16", execution)
        assert {name: own[place] for name, own in found.items()} == pytest.approx(alone, rel=1e-9), each
        assert sum(alone[name] for name in PARTS) == pytest.approx(alone["time"])
        assert 0 < alone["spread"] < 0.5 and alone["needs"] > 5e8


@pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
def test_replicas_take_what_the_event_loop_takes() -> None:
    ratios = []
    for execution in ("eager", "compiled"):
        for zero, changes in WAYS:
            parallel = ("ddp", "zero1", "zero2", "fsdp")[zero]
            model = replace(GPT, batch=16 * int(changes.get("accumulate", 1)), parallel=parallel, **changes)
            strategy = Strategy(dp=8, micro_batch=2, zero=zero, checkpoint="full" if model.checkpoint else "none")
            wanted = predict(model, "a100-sxm-8", ranks=8, execution=execution)
            found = price(model, strategy, execution=execution)
            ratios.append(found["time"] / wanted.time)
            # streams of their own reserve gradients that are shared, and what is gathered of embeddings
            own = (4 if model.mixed else 2) * 1.32e9 / 8 + 2 * (50257 + 1024) * 2048
            assert found["needs"] == pytest.approx(wanted.memory().total + (zero > 0) * own, rel=0.3)
    assert np.abs(np.log(ratios)).max() < 0.07 and np.abs(np.log(ratios)).mean() < 0.035, ratios


@pytest.mark.parametrize(("source", "bar", "least"), [("recomputed", 0.08, 9), ("torchtitan", 0.15, 11)])
def test_published_steps_that_no_scale_was_fitted_to(shared_data: Any, source: str, bar: float, least: int) -> None:
    rows = list(getattr(scale, f"list_{source}")())
    errors = []
    for row in rows:
        name, *facts = row.device.split()
        platform = gpu_context.find_platform(name, row.strategy.ranks, *(facts or ("", "")))
        with_context = replace(platform, context=load_platform(gpu_context.NODES[name.partition("-")[0]]).context)
        errors.append(price(row.model, row.strategy, with_context, row.execution)["time"] / row.seconds - 1)
    assert len(rows) == least and np.abs(errors).mean() <= bar, errors


def test_published_memory_is_what_streams_and_the_loss_hold(shared_data: Any) -> None:
    errors = []
    for row in scale.list_torchtitan(alone=True):
        where = gpu_context.find_platform("h100-sxm", row.strategy.ranks, *row.device.split()[1:])
        errors.append((price(row.model, row.strategy, where)["needs"] + scale.count_kept(row)) / row.reserved - 1)
    assert len(errors) == 18 and np.abs(errors).max() <= 0.15 and np.median(np.abs(errors)) <= 0.08, errors


def test_shared_layers_hold_and_move_less() -> None:
    few, more = (price(GPT, Strategy(tp=n, dp=8 // n, sequence_parallel=True)) for n in (2, 8))
    assert more["needs"] < few["needs"] and more["tensor"] > few["tensor"] > 0
    one, shared, tiled = (
        price(GPT, Strategy(tp=n, dp=8 // n, micro_batch=8, tiled=own))
        for n, own in ((1, False), (8, False), (8, True))
    )
    assert one["tensor"] == 0 and 0 < tiled["tensor"] < shared["tensor"]


def test_schedules_differ_in_bubble_and_memory() -> None:
    def run(schedule: str, chunks: int = 1) -> dict[str, float]:
        return price(GPT, Strategy(pp=4, dp=2, micro_batch=2, schedule=schedule, chunks=chunks))

    gpipe, plain, chunked = run("gpipe"), run("1f1b"), run("interleaved", 3)
    assert gpipe["time"] == plain["time"] and gpipe["needs"] > plain["needs"]
    assert chunked["bubble"] < plain["bubble"] and chunked["needs"] > plain["needs"]
    assert run("zero_bubble")["bubble"] < plain["bubble"] and run("breadth_first", 3)["needs"] > chunked["needs"]
    share = plain["bubble"] / (plain["work"] + plain["stages"])  # at most (p - 1) / m, as the last stage is the slowest
    assert 3 / 32 < share <= 3 / 16


@pytest.mark.parametrize(
    ("given", "message"),
    [({"tp": 0}, "tp is 0"), ({"micro_batch": 1.5}, "micro_batch is 1.5"), ({"schedule": "x"}, "schedule is 'x'"),
     ({"zero": 4}, "zero is 4"), ({"chunks": 2}, "chunks is 2 with schedule '1f1b'; only interleaved"),
     ({"checkpoint": "half"}, "checkpoint is 'half'"), ({"overlap": 1}, "overlap is 1")],
)  # fmt: skip
def test_what_no_strategy_can_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Strategy(**given)


def test_a_strategy_is_stacked_field_by_field() -> None:
    many = Strategy.stack(MANY)
    assert many.ranks.tolist() == [each.ranks for each in MANY]
    assert all(len(getattr(many, own.name)) == len(MANY) for own in fields(Strategy))
