"""Layers that are computed again in groups: against PyTorch, in both roads, and in searches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.models.checkpoints import EVERY_LAYER
from perfkit.prediction.memory import measure_memory
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.graph import Graph

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from perfkit.recording.modules import make_optimizer  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402
from tests import test_twins as twins  # noqa: E402
from tests.test_checkpoints import GPU, LLAMA, Block, check_roads  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

THREE = replace(twins.LLAMA, layers=3)


def build_groups(group: int) -> Callable[[], None]:
    """A step of three layers, of which so many are computed again at once."""
    blocks = [Block("none") for _ in range(THREE.layers)]
    words = torch.nn.Embedding(THREE.vocabulary, THREE.hidden)
    norm = torch.nn.RMSNorm(THREE.hidden)
    head = twins._make_linear(THREE.hidden, THREE.vocabulary)
    module = torch.nn.ModuleList([words, *blocks, norm, head]).to(torch.bfloat16)
    optimizer = make_optimizer(THREE.optimizer, module.parameters())
    tokens = torch.zeros(THREE.batch, THREE.sequence, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        x = words(tokens)
        for first in range(0, THREE.layers, group):
            together = torch.nn.Sequential(*blocks[first : first + group])
            x = checkpoint(together, x, use_reentrant=False)
        logits = head(norm(x)).view(-1, THREE.vocabulary)
        torch.nn.functional.cross_entropy(logits, tokens.view(-1)).backward()
        optimizer.step()

    return step


def capture_groups(group: int) -> Graph:
    return capture(lambda: build_groups(group), device="cuda")


def build(group: int) -> Graph:
    [graph] = replace(THREE, checkpoint=True, checkpoint_group=group).graphs(accelerator=True)
    return graph


def test_pytorch_runs_the_same_operations_and_holds_the_same_to_the_byte() -> None:
    """Only the last layer of a group leaves its last product out. For each layer of a group PyTorch
    holds statistics of two norms in fp32, angles of positions, and seed and offset of attention more."""
    captured = {group: capture_groups(group) for group in (2, 3)}
    for group, graph in captured.items():
        ours = twins.list_operations(build(group))
        theirs = twins.list_operations(graph)
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], rel=0.03)

    def hold(graph: Graph) -> float:
        return measure_memory([graph], GPU).parts["activations"]

    statistics = 2 * (4 - 2) * THREE.batch * THREE.sequence
    angles = THREE.sequence * THREE.hidden // THREE.heads * 2
    seeds = 8 + 16
    theirs = hold(captured[3]) - hold(captured[2])
    assert theirs - (hold(build(3)) - hold(build(2))) == statistics + angles + seeds


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "strategy",
    [
        pk.Strategy(dp=8, micro_batch=4),
        pk.Strategy(tp=4, dp=2, micro_batch=2),
        pk.Strategy(tp=2, pp=2, dp=2, zero=1, sequence_parallel=True),
        pk.Strategy(tp=2, pp=2, dp=2, schedule="interleaved", chunks=2, sequence_parallel=True),
    ],
)
@pytest.mark.parametrize("group", [2, 3])
def test_both_roads_agree(strategy: pk.Strategy, group: int) -> None:
    model = replace(LLAMA, attention="flash2")
    check_roads(model, replace(strategy, checkpoint="full", checkpoint_group=group))


def test_groups_keep_an_input_each_and_hold_all_of_one_group() -> None:
    """The fullest moment is the begin of the backward pass of the last group, which has one layer more
    for each layer of a group; and each takes longer."""
    model = replace(LLAMA, attention="flash2", vocabulary=256, layers=24, tie=False)
    groups = (1, 2, 3, 4, 6)
    ways = [pk.Strategy(dp=8, micro_batch=4, checkpoint="full", checkpoint_group=n) for n in groups]
    held = price_strategies(model, GPU, pk.Strategy.stack(ways), near=0.0)
    assert (np.diff(held["time"]) > 0).all()
    x = 2.0 * 4 * model.sequence * model.hidden
    layer = (held["activations"][4] - held["activations"][3]) / 2
    assert (held["activations"][3] - held["activations"][2]) == pytest.approx(layer, rel=1e-6)
    assert layer > 8 * x


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "checkpoint_group is 2 and not all of all layers is computed again"),
        ({"checkpoint": "mlp"}, "take checkpoint='full' without checkpoint_layers"),
        ({"checkpoint": "full", "checkpoint_layers": 2}, "without checkpoint_layers"),
        (
            {"checkpoint": "full", "zero": 3},
            "zero is above 1, which gathers weights layer by layer",
        ),
        (
            {"checkpoint": "full", "offload": "activations"},
            "with an offload of activations or a schedule",
        ),
    ],
)
def test_what_goes_with_no_groups_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.Strategy(dp=2, checkpoint_group=2, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": False}, "not all of all layers is computed again"),
        ({"checkpoint_layers": 2}, "take checkpoint=True without checkpoint_layers"),
        ({"checkpoint_group": 9}, "checkpoint_group is 9 and layers 3; take at most these"),
        ({"parallel": "fsdp"}, "take parallel='ddp', or a Strategy of zero=1"),
        ({"optimizer_in_backward": True}, "with mtp_layers or optimizer_in_backward"),
        ({"accumulate": 2000, "batch": 2000}, "are recorded at most; take a Strategy"),
    ],
)
def test_what_a_model_does_not_record_in_groups_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(THREE, **{"checkpoint": True, "checkpoint_group": 2, **changes})


@pytest.mark.filterwarnings("ignore")
def test_a_search_takes_groups_where_an_input_of_each_layer_is_too_much() -> None:
    """Ninety-six inputs of 32,768 tokens take more than two layers."""
    deep = pk.Transformer.preset(
        "llama-3.1-8b",
        batch=1,
        sequence=32768,
        layers=96,
        hidden=1024,
        heads=16,
        kv_heads=4,
        inner=2816,
        vocabulary=8192,
        dtype="bf16",
        mixed=True,
        fused=True,
    )
    found = pk.explore(deep, "h100-sxm-8", 1, memory=27e9)
    assert (found.best.checkpoint, found.best.checkpoint_group) == ("full", 2)
    assert found.best.checkpoint_layers == EVERY_LAYER
    row = found.table().row(0, named=True)
    whole = price_strategies(
        deep, GPU, pk.Strategy.stack([replace(found.best, checkpoint_group=1)]), near=0.0
    )
    assert row["needs_bytes"] + row["reserve_bytes"] <= 27e9 < whole["needs"][0]
    assert row["time_s"] > whole["time"][0]
