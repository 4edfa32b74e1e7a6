"""One price of weights in shards: both roads to a prediction run the same operations, and what a strategy
adds makes no step faster."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.models.offload import FROM_HOST, TO_HOST
from perfkit.platform.gallery import load_platform
from perfkit.prediction import stages
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.graph import Graph
from perfkit.workloads.stack import apply_stack

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")

PLATFORM = "h100-sxm-8"


def make_model(**settings: Any) -> pk.Transformer:
    """A Llama of three layers, whose ranks divide all weights."""
    chosen = {
        "layers": 3,
        "hidden": 512,
        "heads": 8,
        "inner": 1024,
        "vocabulary": 8192,
        "batch": 16,
        "sequence": 2048,
        "dtype": "bf16",
        "mixed": True,
        **settings,
    }
    return replace(pk.Transformer.preset("llama-3-8b"), kv_heads=4, **chosen)


def make_graph(model: pk.Transformer, strategy: pk.Strategy, execution: str | None = None) -> Graph:
    """What the first rank executes."""
    work = apply_stack(model, strategy, execution, None)
    return stages.make_stages(
        work.workload, load_platform(PLATFORM), work.strategy, work.execution
    )[0]


def take_the_road_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no strategy be a setting of the model."""
    monkeypatch.setattr(stages, "state_replicas", lambda model, s: None)


def list_operations(graph: Graph) -> list[tuple[str, str, str, int]]:
    """Phase, name and variant of each operation, and its bytes; those of a message in their own
    convention. The counter of steps of an optimizer is the first of its operations."""
    traffic = graph.traffic.reshape(len(graph), -1)[:, -1]
    messages = graph.column("nbytes").reshape(len(graph), -1)[:, -1]
    nbytes = np.where(messages > 0, messages, traffic)
    first = [label.phase for label in graph.labels].index("update")
    operations = []
    for place, label in enumerate(graph.labels):
        size = 0 if place == first else round(float(nbytes[place]))
        operations.append((label.phase, label.name, label.variant, size))
    return operations


def sort_sums(operations: list[tuple[str, str, str, int]]) -> list[tuple[str, str, str, int]]:
    """The same, with sums of gradients that follow one another in the order of their sizes."""
    ordered: list[tuple[str, str, str, int]] = []
    sums: list[tuple[str, str, str, int]] = []
    for operation in operations:
        if operation[1] in ("add_", "_to_copy"):
            sums.append(operation)
            continue
        ordered += sorted(sums)
        sums = []
        ordered.append(operation)
    return ordered + sorted(sums)


def find_ends(graph: Graph) -> dict[int, int]:
    """For each collective, the operation that waits for it first."""
    ends: dict[int, int] = {}
    for wait in graph.collective_waits:
        ends[wait.collective] = min(ends.get(wait.collective, len(graph)), wait.operation)
    return ends


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("settings", "checkpoint", "micro_batch"),
    [
        ({}, "none", 1),
        ({"reduce_dtype": "bf16"}, "full", 2),
        ({"dtype": "fp32", "mixed": False}, "none", 1),
        ({"experts": 8, "top_k": 2}, "none", 1),
        ({"lora_rank": 8, "mixed": False}, "none", 1),
    ],
)
def test_both_roads_run_the_same_operations(
    monkeypatch: pytest.MonkeyPatch,
    zero: int,
    settings: dict[str, Any],
    checkpoint: str,
    micro_batch: int,
) -> None:
    """Names, bytes and order of all operations, and what waits for which message."""
    model = make_model(**settings)
    strategy = pk.Strategy(dp=8, zero=zero, checkpoint=checkpoint, micro_batch=micro_batch)
    of_model = make_graph(model, strategy)
    take_the_road_of_stages(monkeypatch)
    of_stage = make_graph(model, strategy)
    assert sort_sums(list_operations(of_stage)) == sort_sums(list_operations(of_model))
    assert find_ends(of_stage) == find_ends(of_model)


def test_experts_that_ranks_do_not_divide_take_as_long_on_both_roads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their weights are copied once more around each message; gradients that were added up before are
    twice as wide."""
    model = make_model(experts=4, top_k=2, inner=4096)
    for zero in (1, 3):
        strategy = pk.Strategy(dp=8, zero=zero)
        with monkeypatch.context() as patch:
            of_model = pk.predict(model, PLATFORM, strategy=strategy).time
            take_the_road_of_stages(patch)
            of_stage = pk.predict(model, PLATFORM, strategy=strategy).time
        assert of_stage == pytest.approx(of_model, rel=3e-3)


def make_large_model() -> pk.Transformer:
    """Six layers whose kernels take longer than their host."""
    return make_model(layers=6, hidden=2048, inner=4096)


def predict_time(strategy: pk.Strategy) -> float:
    """Time of an iteration [s]."""
    return pk.predict(make_large_model(), PLATFORM, strategy=strategy).time


def price_time(strategy: pk.Strategy) -> float:
    """Its closed form [s]."""
    model = make_large_model()
    priced = price_strategies(model, load_platform(PLATFORM), pk.Strategy.stack([strategy]))
    return float(priced["time"][0])


@pytest.mark.parametrize("time", [predict_time, price_time], ids=["event loop", "closed form"])
def test_each_layer_that_is_computed_again_takes_longer(time: Any) -> None:
    """From none to all, on both sides of the number of passes that are recorded one by one."""
    sharded = pk.Strategy(dp=8, zero=3)
    full = replace(sharded, checkpoint="full")
    times = [time(replace(full, checkpoint_layers=layers)) for layers in range(7)]
    assert times[0] == time(sharded)
    assert times[6] == time(full)
    steps = np.diff(times)
    assert (steps > 0).all()
    assert steps == pytest.approx(np.full(6, steps.mean()), rel=0.02)


def test_layers_take_as_long_if_too_many_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = pk.Strategy(dp=8, zero=3, checkpoint="full", checkpoint_layers=2)
    recorded = predict_time(partial)
    monkeypatch.setattr(stages, "MOST_RECORDED", 1)
    assert predict_time(partial) == pytest.approx(recorded, rel=1e-6)


@pytest.mark.parametrize("time", [predict_time, price_time], ids=["event loop", "closed form"])
def test_hybrid_shards_over_all_ranks_are_those_of_all_ranks(time: Any) -> None:
    assert time(pk.Strategy.hsdp(8, shards=8)) == time(pk.Strategy(dp=8, zero=3))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_of_shards_add_one_sum_for_each_unit(zero: int) -> None:
    """All other operations are the same, on shards that are twice as large."""
    model = make_model()
    of_all = make_graph(model, pk.Strategy(dp=8, zero=zero))
    of_half = make_graph(model, pk.Strategy(dp=8, zero=zero, shards=4))
    names = sorted(label.name for label in of_half.labels if label.name != "all_reduce")
    assert names == sorted(label.name for label in of_all.labels)
    rounds = 1 if zero == 1 else 2
    assert len(of_half) - len(of_all) == rounds * (model.layers + 1)


@pytest.mark.parametrize("time", [predict_time, price_time], ids=["event loop", "closed form"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_step_without_overlap_is_never_faster(time: Any, zero: int) -> None:
    sharded = pk.Strategy(dp=8, zero=zero)
    assert time(replace(sharded, overlap=False)) > time(sharded)
    groups = replace(sharded, shards=4)
    assert time(replace(groups, overlap=False)) > time(groups)


@pytest.mark.parametrize("time", [predict_time, price_time], ids=["event loop", "closed form"])
@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        (2, "optimizer"),
        (3, "optimizer"),
        (3, "parameters"),
        (1, "activations"),
        (2, "activations"),
        (3, "activations"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_a_step_with_offload_is_never_faster(
    time: Any, zero: int, offload: str, checkpoint: str
) -> None:
    sharded = pk.Strategy(dp=8, zero=zero, checkpoint=checkpoint)
    plain = time(sharded)
    assert time(replace(sharded, offload=offload)) >= plain * (1 - 1e-9)


def test_offloaded_shards_run_the_operations_of_those_that_are_not() -> None:
    """Copies are added, and the host updates."""
    model = make_model()
    plain = make_graph(model, pk.Strategy(dp=8, zero=3))
    moved = make_graph(model, pk.Strategy(dp=8, zero=3, offload="parameters"))

    def list_passes(graph: Graph) -> list[tuple[str, str]]:
        passes = [(label.phase, label.name) for label in graph.labels]
        return [one for one in passes if one[0] != "update" and one[1] not in (FROM_HOST, TO_HOST)]

    assert list_passes(moved) == list_passes(plain)


def test_groups_that_share_nothing_are_refused() -> None:
    """Shards of zero 0 split a sum of gradients in two, which nobody asked for."""
    model = make_model()
    platform = load_platform(PLATFORM)
    idle = pk.Strategy(dp=8, shards=4)
    with pytest.raises(ValueError, match=r"shards is 4 and zero is 0"):
        pk.predict(model, platform, strategy=idle)
    with pytest.raises(ValueError, match=r"shards is 4 and zero is 0"):
        price_strategies(model, platform, pk.Strategy.stack([idle, pk.Strategy(dp=8)]))
    # software that shares weights by itself makes a group of them
    of_stack = pk.predict(model, platform, strategy=idle, stack="fsdp")
    stated = pk.predict(model, platform, strategy=pk.Strategy.hsdp(8, shards=4), stack="fsdp")
    assert of_stack.time == stated.time


def measure_both(model: pk.Transformer, strategy: pk.Strategy) -> tuple[float, float]:
    """Memory of a rank, by `predict` and by the closed forms of `explore` [B]."""
    platform = load_platform(PLATFORM)
    predicted = pk.predict(model, platform, strategy=strategy).memory().total
    priced = price_strategies(model, platform, pk.Strategy.stack([strategy]))
    return predicted, float(priced["needs"][0])


def test_both_roads_need_the_same_memory() -> None:
    """To the byte, but for the steps of the optimizer, of which it keeps 4 B for each weight."""
    rng = np.random.default_rng(7)
    for _ in range(12):
        settings = [
            {"mixed": True},
            {"mixed": False},
            {"dtype": "fp32", "mixed": False},
        ][rng.integers(3)]
        micro_batch = int(rng.choice([1, 2]))
        model = make_model(
            layers=int(rng.integers(2, 6)),
            batch=8 * micro_batch * int(rng.choice([1, 2, 3])),
            tie=bool(rng.integers(2)),
            **settings,
        )
        checkpoint = str(rng.choice(["none", "full", "mlp", "norms+activation", "per_op"]))
        counted: dict[str, Any] = {}
        if checkpoint != "none" and rng.integers(2):
            counted["checkpoint_layers"] = 1
        strategy = pk.Strategy(
            dp=8,
            zero=int(rng.integers(1, 4)),
            micro_batch=micro_batch,
            checkpoint=checkpoint,
            **counted,
        )
        predicted, closed = measure_both(model, strategy)
        weights = 12 * model.layers + 3
        assert closed == pytest.approx(predicted, abs=4 * weights), (strategy, model)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_offloaded_activations_free_what_is_moved(zero: int) -> None:
    """The inputs of all layers but the last go to the host; those of one more stay beside it."""
    model = make_model(layers=6)
    strategy = pk.Strategy(dp=8, zero=zero, checkpoint="full")
    kept = pk.predict(model, PLATFORM, strategy=strategy).memory()
    moved = pk.predict(model, PLATFORM, strategy=replace(strategy, offload="activations")).memory()
    of_layer = 2 * 2048 * 512
    assert moved.on_host == 5 * of_layer
    assert kept.total - moved.total == pytest.approx(4 * of_layer, abs=4 * 60)
