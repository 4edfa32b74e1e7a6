"""Memory of a prediction: which bytes are alive when, what they are, and whether the device has as
much."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.ground.units import format_bytes
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.memory import Memory, measure_memory
from perfkit.sharding.planner import price_plan
from perfkit.workloads.columns import Accesses, Features
from perfkit.workloads.graph import Graph, Label

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.golden.steps import ADAMW, SGD, twin  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("few_calls"),
    pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning"),
]

BERT, GPT2 = pk.Transformer.bert, pk.Transformer.gpt2
CPU, GPU = "zen3-2", "h100-sxm-8"
LARGE_TABLES = pk.DLRM(rows=[10**10 for _ in range(8)], dim=128, batch=2048)
SMALL = GPT2("gpt2", layers=4, hidden=64, heads=4, vocabulary=500, batch=4, sequence=64)


def memory(work: Any, platform: str = CPU, **settings: Any) -> Memory:
    """Memory of what is predicted, warnings aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pk.predict(work, platform, **settings).memory()


def graph(*operations: tuple[str, str, str]) -> Graph:
    """Operations by phase, buffers read and buffers written; buffer `a` has 1 byte, `b` 2, `c` 4
    ..."""
    rows = []
    for index, (_, read, written) in enumerate(operations):
        for letters, is_write in ((read, False), (written, True)):
            for letter in letters:
                buffer = ord(letter) - ord("a")
                rows.append((index, buffer, 2.0**buffer, is_write))
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
        (LARGE_TABLES, GPU, 1),
        (GPT2("gpt2-xl", layers=96, hidden=12288, heads=96, batch=8), GPU, 8),
        (BERT("bert-large", batch=100_000, sequence=512), "v100-sxm-8", 1),
    ],
)
def test_what_does_not_fit_is_said(workload: Any, platform: str, ranks: int) -> None:
    with pytest.warns(UserWarning, match="does not fit"):
        prediction = pk.predict(workload, platform, ranks=ranks)
    assert prediction.fits is False
    for text in (repr(prediction), prediction.explain(), " ".join(prediction.warnings)):
        assert ": does not fit" in text


def test_what_fits_is_said() -> None:
    prediction = pk.predict(SMALL, GPU)
    assert prediction.fits
    assert "does not fit" not in prediction.explain()
    assert "of 80 GB" in prediction.explain()


def test_whether_it_fits_is_unknown_without_the_capacity_of_the_device() -> None:
    platform = pk.load_platform(GPU)
    *near, main = platform.device.memory
    device = replace(platform.device, memory=(*near, replace(main, capacity=None)))
    prediction = pk.predict(SMALL, replace(platform, device=device))
    assert prediction.fits is None
    assert "needs" in prediction.explain()


def net(width: int = 64, *, change: str = "", pieces: int = 1, optimizer: Any = ADAMW) -> Any:
    """A step over 6 layers and 512 samples; gradients may be dropped late, layers run again, or
    weights be sharded."""

    def make_layer() -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def make() -> Callable[[], None]:
        layers = nn.ModuleList(make_layer() for _ in range(3))
        if change == "sharded":
            for layer in layers:
                fully_shard(layer)
        updates = optimizer(layers.parameters(), lr=0.1)

        def run(layer: nn.Module, x: Any) -> Any:
            if change == "again":
                return checkpoint(layer, x, use_reentrant=False)
            return layer(x)

        def step() -> None:
            if change != "late":
                updates.zero_grad()
            for _ in range(pieces):
                x = torch.randn(512 // pieces, width)
                for layer in layers:
                    x = run(layer, x)
                if change == "late":
                    updates.zero_grad()
                x.square().mean().backward()
            updates.step()

        return step

    return make


WEIGHTS = 6 * (64 * 64 + 64) * 4


def test_capture_agrees_with_the_profiler() -> None:
    from benchmarks.memory import measure_peak

    for make in (twin(SMALL), net(change="again"), net(512, change="late")):
        assert memory(pk.capture(make)).total == pytest.approx(measure_peak(make), rel=0.03)


@pytest.fixture(scope="module")
def usual() -> Memory:
    """Memory of the step of `net` as it is."""
    return memory(pk.capture(net()))


def test_a_captured_step_holds_its_weights_and_the_states_of_its_optimizer(usual: Memory) -> None:
    assert usual.parts["parameters"] == WEIGHTS
    assert 2 * WEIGHTS <= usual.parts["states"] <= 2.01 * WEIGHTS
    plain = memory(pk.capture(net(optimizer=SGD)))
    assert plain.parts["states"] == 0
    assert plain.parts["parameters"] == WEIGHTS


def test_a_captured_step_that_drops_its_gradients_late_holds_the_old_ones() -> None:
    wide = memory(pk.capture(net(512)))
    late = memory(pk.capture(net(512, change="late")))
    assert late.total - wide.total > 0.25 * wide.parts["parameters"]


@pytest.mark.parametrize("less", [{"change": "again"}, {"pieces": 4}], ids=["again", "pieces"])
def test_a_captured_step_that_recomputes_or_divides_holds_less(
    less: dict[str, Any], usual: Memory
) -> None:
    held = memory(pk.capture(net(**less)))
    assert held.parts["activations"] < 0.75 * usual.parts["activations"]
    assert held.total < usual.total


@pytest.mark.parametrize(
    "workload", [SMALL, replace(SMALL, attention="eager"), pk.DLRM("dlrm-ddp", batch=512)]
)
def test_built_and_captured_steps_agree(workload: Any) -> None:
    captured = memory(pk.capture(twin(workload)))
    assert memory(workload).total == pytest.approx(captured.total, rel=0.1)


def test_shards_divide_what_is_kept() -> None:
    def capture(ranks: int) -> Mapping[str, float]:
        step = pk.capture(net(256, change="sharded"), ranks=ranks, device="cuda")
        return memory(step, GPU).parts

    two = capture(2)
    eight = capture(8)
    weights = 6 * (256 * 256 + 256)
    assert two["parameters"] == pytest.approx(weights * 4 / 2, rel=0.01)
    for part in ("parameters", "states"):
        assert two[part] == pytest.approx(4 * eight[part], rel=0.01)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("embedding", ["separate", "exact"])
def test_tables_are_counted_as_for_a_placement(embedding: str) -> None:
    model = pk.DLRM("dlrm-dcnv2", batch=1024, embedding=embedding, sparse=embedding != "separate")
    plan = pk.Plan.round_robin(len(model.tables), ranks=8)
    held = memory(model, GPU, ranks=8, plan=plan)
    price = price_plan(model, GPU, plan)
    fullest = price.table().row(int(np.argmax(price.memory)), named=True)
    assert held.parts["tables"] == fullest["weights_bytes"]
    of_layers = held.parts["states"] - fullest["state_bytes"]
    assert 0 <= of_layers <= 1.01 * held.parts["parameters"]
    assert held.total - held.parts["workspace"] <= price.memory.max() + price.reserved


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

    def find(**change: Any) -> Memory:
        return memory(replace(whole, **change), GPU, ranks=8)

    usual = find()
    again = find(checkpoint=True)
    divided = find(accumulate=4)
    sharded = find(parallel="fsdp")
    for less in (again, divided, sharded):
        assert less.total < usual.total
    assert again.parts["activations"] < usual.parts["activations"]
    assert divided.parts["activations"] < usual.parts["activations"]
    for part in ("parameters", "states"):
        assert sharded.parts[part] == pytest.approx(usual.parts[part] / 8, rel=0.03)


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [(pk.Strategy(dp=8), 1), (pk.Strategy(tp=2, dp=4, zero=1), 2), (pk.Strategy(tp=2, pp=4), 2)],
)
def test_the_reserve_is_context_communicators_and_fragments(
    strategy: pk.Strategy, groups: int
) -> None:
    """Half a GiB, 0.65 GiB for each group of ranks, and 4 % of what is allocated."""
    model = replace(SMALL, layers=8, batch=16)
    held = memory(model, GPU, strategy=strategy)
    assert held.reserve == pytest.approx((0.5 + 0.65 * groups) * 2**30 + 0.04 * held.total)
    assert held.reserved == held.total + held.reserve


def test_a_reserve_beyond_the_gib_of_a_device_is_said() -> None:
    """80 GB are 85.9e9 B: 81e9 B with the reserve fit, 87e9 do not, and 80.1e9 need no reserve."""
    assert Memory({"all": 75e9}, 80e9, 6e9).fits
    assert not Memory({"all": 79e9}, 80e9, 8e9).fits
    assert not Memory({"all": 80.1e9}, 80e9, 0.0).fits
    assert Memory({"all": 1.0}, None, 8e9).fits is None
    shown = "needs 79 GB of 80 GB, and 87 GB with its reserve: does not fit"
    assert repr(Memory({"all": 79e9}, 80e9, 8e9)) == shown
    model = pk.Transformer.gpt2(batch=8, dtype="bf16")
    gpu = pk.load_platform("a100-sxm-8")
    with keep_quiet():
        plain = pk.predict(model, gpu)
    held = plain.memory()

    def predict_with(capacity: float) -> tuple[str, ...]:
        """What is said of a device that has so much memory [B]."""
        *caches, main = gpu.device.memory
        assert main.capacity is not None
        small = replace(main, capacity=replace(main.capacity, value=capacity))
        device = replace(gpu.device, memory=(*caches, small))
        with keep_quiet():
            found = pk.predict(model, replace(gpu, device=device))
        return tuple(text for text in found.warnings if text.startswith("a rank"))

    assert predict_with(held.reserved) == ()
    [note] = predict_with(0.5 * (held.total + held.reserved / 1.073741824))
    assert "with what its process takes beside it" in note
    assert "may not fit; with strategy=Strategy(tp=1, pp=1, dp=1, micro_batch=8) take" in note
    [note] = predict_with(0.9 * held.total)
    assert "does not fit" in note


def test_one_rank_has_no_communicator_and_a_cpu_no_reserve() -> None:
    alone = memory(SMALL, GPU)
    assert alone.reserve == pytest.approx(0.5 * 2**30 + 0.04 * alone.total)
    assert memory(SMALL, CPU).reserve == 0
    rows = dict(dict(pk.predict(SMALL, GPU).sections())["Time and memory"])
    most = 1.13 * alone.total + 0.5 * 2**30
    assert alone.reserved_range[1] == pytest.approx(most)
    assert rows["with its reserve"].startswith(f"{format_bytes(alone.reserved)} (")
    assert rows["with its reserve"].endswith(f" to {format_bytes(most)} in half of public logs)")
    on_cpu = dict(dict(pk.predict(SMALL, CPU).sections())["Time and memory"])
    assert "with its reserve" not in on_cpu
