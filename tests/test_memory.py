"""Memory of a prediction: which bytes are alive when, what they are, and whether the device has as
much."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.prediction.memory import Memory, measure_memory
from perfkit.sharding.planner import price_plan
from perfkit.workloads.columns import Accesses, Features
from perfkit.workloads.graph import Graph, Label

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.golden.steps import ADAMW, SGD, twin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")

BERT, GPT2 = pk.Transformer.bert, pk.Transformer.gpt2
CPU, GPU = "zen3-2", "h100-sxm-8"
SMALL = GPT2("gpt2", layers=4, hidden=64, heads=4, vocabulary=500, batch=4, sequence=64)


def memory(work: Any, platform: str = CPU, **settings: Any) -> Memory:
    """Memory of what is predicted, warnings aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pk.predict(work, platform, **settings).memory()


def graph(*operations: tuple[str, str, str]) -> Graph:
    """Operations by phase, buffers read and buffers written; buffer `a` has 1 byte, `b` 2, `c` 4
    ..."""
    rows = [
        (index, ord(letter) - 97, 2.0 ** (ord(letter) - 97), write)
        for index, (_, *touched) in enumerate(operations)
        for write, letters in enumerate(touched)
        for letter in letters
    ]
    labels = tuple(Label("add", "elementwise", "add", phase, "") for phase, *_ in operations)
    return Graph(labels, Features.zeros(len(labels)), Accesses.from_rows(rows))


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        (
            [("forward", "a", "b"), ("forward", "b", "c"), ("forward", "c", "d")],
            {"activations": 1 + 4 + 8},
        ),
        (
            [("forward", "a", "b"), ("backward", "b", "c"), ("backward", "c", "d")],
            {"activations": 1 + 4 + 8},
        ),
        # lives anew
        (
            [("forward", "a", "d"), ("forward", "d", "b"), ("forward", "", "d")],
            {"activations": 1 + 8 + 2},
        ),
        (
            [
                ("forward", "a", "c"),
                ("backward", "ac", "b"),
                ("update", "abd", "ad"),
                ("update", "d", "e"),
            ],
            {"parameters": 1, "gradients": 2, "states": 8, "workspace": 16},
        ),
        (
            [
                ("forward", "a", "e"),
                ("backward", "a", "b"),
                ("update", "ab", "a"),
                ("forward", "a", "f"),
            ],
            {"parameters": 1, "gradients": 2, "activations": 32},
        ),  # gradients are kept to the end
    ],
)
def test_bytes_live_from_the_first_write_to_the_last_use(
    operations: Any, expected: dict[str, int]
) -> None:
    found = measure_memory([graph(*operations)], pk.load_platform(CPU))
    assert {name: size for name, size in found.parts.items() if size} == expected
    assert found.total == sum(expected.values())


@pytest.mark.parametrize(
    ("workload", "platform", "ranks"),
    [
        (pk.DLRM(rows=[10**10] * 8, dim=128, batch=2048), GPU, 1),
        (GPT2("gpt2-xl", layers=96, hidden=12288, heads=96, batch=8), GPU, 8),
        (BERT("bert-large", batch=100_000, sequence=512), "v100-sxm-8", 1),
    ],
)
def test_what_does_not_fit_is_said(workload: Any, platform: str, ranks: int) -> None:
    with pytest.warns(UserWarning, match="does not fit"):
        found = pk.predict(workload, platform, ranks=ranks)
    assert found.fits is False
    assert all(
        ": does not fit" in text
        for text in (repr(found), found.explain(), " ".join(found.warnings))
    )


def test_what_fits_and_what_is_not_known_is_said_too() -> None:
    found, device = pk.predict(SMALL, GPU), pk.load_platform(GPU).device
    assert found.fits and "does not fit" not in found.explain() and "of 80 GB" in found.explain()
    unknown = replace(
        device, memory=(*device.memory[:-1], replace(device.memory[-1], capacity=None))
    )
    found = pk.predict(SMALL, replace(pk.load_platform(GPU), device=unknown))
    assert found.fits is None and "needs" in found.explain()


def net(width: int = 64, *, change: str = "", pieces: int = 1, optimizer: Any = ADAMW) -> Any:
    """A step over 6 layers and 512 samples; gradients may be dropped late, layers run again, or
    weights be sharded."""

    def make() -> Callable[[], None]:
        parts = [
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(3)
        ]
        layers = nn.ModuleList(parts)
        for layer in layers if change == "sharded" else ():
            fully_shard(layer)
        updates = optimizer(layers.parameters(), lr=0.1)

        def step() -> None:
            updates.zero_grad() if change != "late" else None
            for _ in range(pieces):
                x = torch.randn(512 // pieces, width)
                for layer in layers:
                    x = checkpoint(layer, x, use_reentrant=False) if change == "again" else layer(x)
                updates.zero_grad() if change == "late" else None
                x.square().mean().backward()
            updates.step()

        return step

    return make


WEIGHTS = 6 * (64 * 64 + 64) * 4


def test_capture_follows_what_a_step_holds() -> None:
    steps = {
        "usual": net(),
        "wide": net(512),
        "late": net(512, change="late"),
        "again": net(change="again"),
    }
    steps |= {"pieces": net(pieces=4), "sgd": net(optimizer=SGD)}
    plain = {name: memory(pk.capture(make)) for name, make in steps.items()}
    usual = plain["usual"]
    assert (
        usual.parts["parameters"] == WEIGHTS
        and 2 * WEIGHTS <= usual.parts["states"] <= 2.01 * WEIGHTS
    )
    assert plain["sgd"].parts["states"] == 0 and plain["sgd"].parts["parameters"] == WEIGHTS
    # old gradients
    assert plain["late"].total - plain["wide"].total > 0.25 * plain["wide"].parts["parameters"]
    for less in ("again", "pieces"):
        assert (
            plain[less].parts["activations"] < 0.75 * usual.parts["activations"]
            and plain[less].total < usual.total
        )


def test_capture_agrees_with_the_profiler() -> None:
    from benchmarks.memory import measure_peak

    for make in (twin(SMALL), net(change="again"), net(512, change="late")):
        assert memory(pk.capture(make)).total == pytest.approx(measure_peak(make), rel=0.03)


@pytest.mark.parametrize(
    "workload", [SMALL, replace(SMALL, attention="eager"), pk.DLRM("dlrm-ddp", batch=512)]
)
def test_built_and_captured_steps_agree(workload: Any) -> None:
    assert memory(workload).total == pytest.approx(
        memory(pk.capture(twin(workload))).total, rel=0.1
    )


def test_shards_divide_what_is_kept() -> None:
    two, eight = (
        memory(pk.capture(net(256, change="sharded"), ranks=n, device="cuda"), GPU).parts
        for n in (2, 8)
    )
    assert two["parameters"] == pytest.approx(6 * (256 * 256 + 256) * 4 / 2, rel=0.01)
    for part in ("parameters", "states"):
        assert two[part] == pytest.approx(4 * eight[part], rel=0.01)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("embedding", ["separate", "exact"])
def test_tables_are_counted_as_for_a_placement(embedding: str) -> None:
    model = pk.DLRM("dlrm-dcnv2", batch=1024, embedding=embedding, sparse=embedding != "separate")
    plan = pk.Plan.round_robin(len(model.tables), ranks=8)
    found, price = memory(model, GPU, ranks=8, plan=plan), price_plan(model, GPU, plan)
    fullest = price.table().row(int(np.argmax(price.memory)), named=True)
    assert found.parts["tables"] == fullest["weights_bytes"]
    rest = found.parts["states"] - fullest["state_bytes"]  # of the layers
    assert 0 <= rest <= 1.01 * found.parts["parameters"]
    assert found.total - found.parts["workspace"] <= price.memory.max() + price.reserved


@pytest.mark.parametrize("shape", [(4, 64, 8, 32), (6, 128, 16, 128)])
def test_built_steps_that_are_sharded_divided_or_computed_again_need_less(
    shape: tuple[int, ...],
) -> None:
    layers, hidden, batch, sequence = shape
    whole = GPT2(
        "gpt2",
        layers=layers,
        hidden=hidden,
        heads=4,
        vocabulary=500,
        batch=8 * batch,
        sequence=sequence,
    )
    usual, *less = (
        memory(replace(whole, **change), GPU, ranks=8)
        for change in ({}, {"checkpoint": True}, {"accumulate": 4}, {"parallel": "fsdp"})
    )
    assert all(found.total < usual.total for found in less)
    assert less[0].parts["activations"] < usual.parts["activations"] > less[1].parts["activations"]
    for part in ("parameters", "states"):
        assert less[2].parts[part] == pytest.approx(usual.parts[part] / 8, rel=0.03)
