"""Weights that hooks of the backward pass update: operations, their order, and memory, beside a program
in PyTorch."""

from dataclasses import replace
from typing import Any

import pytest

import perfkit as pk
from perfkit.prediction.memory import WORKSPACE, measure_memory
from perfkit.workloads.graph import Graph
from perfkit.workloads.transformer import Transformer
from tests import test_twins as twins

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from perfkit.models.optimizers import find_optimizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")


def build_hooked_llama(model: Transformer) -> Any:
    """The step of a small Llama of `tests.test_twins` whose weights have an optimizer each, as
    torchtune's `OptimizerInBackwardWrapper` and PyTorch's tutorial on optimizers in the backward pass
    make them."""

    def make() -> Any:
        module = twins.build_llama_module()
        known = find_optimizer(model.optimizer)
        settings = {"fused": True} if model.fused else {}
        own = {}
        for weight in module.parameters():
            make_optimizer = getattr(torch.optim, known.torch_class)
            own[weight] = make_optimizer([weight], lr=1e-4, **known.torch_arguments, **settings)

        def update(weight: Any) -> None:
            own[weight].step()
            own[weight].zero_grad()

        for weight in module.parameters():
            weight.register_post_accumulate_grad_hook(update)
        return twins.make_llama_step(module, None)

    return make


@pytest.mark.parametrize(
    ("optimizer", "fused"), [("adamw", False), ("adamw", True), ("sgd", False)]
)
def test_a_hooked_llama_is_captured_as_it_is_built(optimizer: str, fused: bool) -> None:
    model = replace(twins.LLAMA, optimizer=optimizer, fused=fused, optimizer_in_backward=True)
    [built] = model.graphs(accelerator=True)
    captured = twins.capture(build_hooked_llama(model), device="cuda")
    assert captured.parameters == built.parameters
    ours, theirs = twins.list_operations(captured), twins.list_operations(built)
    # a capture counts what hooks do to the backward pass
    assert _drop_phases(ours[0]) == _drop_phases(theirs[0])
    # statistics of rows are fp32
    assert ours[1] == pytest.approx(theirs[1], rel=0.03)


def _drop_phases(operations: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Name, class and sizes of operations."""
    return [(*operation[:3], *operation[4:]) for operation in operations]


def measure(graph: Graph) -> float:
    """Bytes at the fullest moment of an iteration on a GPU, without the workspace of libraries."""
    return measure_memory([graph], pk.load_platform("h100-sxm-8")).total - WORKSPACE


@pytest.mark.parametrize("fused", [False, True])
def test_memory_of_hooks_is_that_of_the_program_to_the_byte(fused: bool) -> None:
    """The twin without hooks holds somewhat more than is built: statistics are fp32, and a copy of the
    logits lives longer. That with hooks holds as much more. What is built keeps the number that lists
    of step counters are raised by, 4 B for each list: of all weights, or of each weight."""
    whole = measure(twins.capture(twins.build_llama, device="cuda"))
    more = whole - (measure(twins.LLAMA.graphs(accelerator=True)[0]) - 4.0)
    model = replace(twins.LLAMA, fused=fused, optimizer_in_backward=True)
    [built] = model.graphs(accelerator=True)
    weights = 2 * 9 + 3
    numbers = 0.0 if fused else 4.0 * weights
    hooked = measure(twins.capture(build_hooked_llama(model), device="cuda"))
    assert hooked - (measure(built) - numbers) == more


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_do_not_live_together(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two tokens weights, gradients and states are nearly all of the memory."""
    model = replace(twins.LLAMA, batch=1, sequence=2, fused=fused)
    monkeypatch.setattr(twins, "LLAMA", model)
    hooked = replace(model, optimizer_in_backward=True)
    captured = measure(twins.capture(build_hooked_llama(hooked), device="cuda"))
    [built] = hooked.graphs(accelerator=True)
    assert measure(built) == pytest.approx(captured, rel=0.013)
    [usual] = model.graphs(accelerator=True)
    weights = 2.0 * model.graphs()[0].parameters
    assert measure(usual) - measure(built) > 0.7 * weights


SETTINGS: tuple[dict[str, Any], ...] = (
    {"fused": True},
    {"optimizer": "adamw"},
    {"optimizer": "sgd"},
    {"optimizer": "adamw", "lora_rank": 8},
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS)
def test_explore_and_predict_agree_with_hooks(settings: dict[str, Any]) -> None:
    """And gradients do not live together: most of them are never there at once."""
    plain = pk.Transformer.preset(
        "llama-2-7b", batch=2, sequence=1024, layers=8, dtype="bf16", attention="flash2", **settings
    )
    model = replace(plain, optimizer_in_backward=True)
    for checkpoint in ("none", "full"):
        strategy = pk.Strategy(micro_batch=2, checkpoint=checkpoint)
        one = pk.predict(model, "h100-sxm-8", strategy=strategy)
        [row] = (
            pk.explore(model, "h100-sxm-8", ranks=1, strategies=[strategy])
            .table()
            .iter_rows(named=True)
        )
        assert row["time_s"] == pytest.approx(one.time, rel=0.01)
        assert row["needs_bytes"] == pytest.approx(one.memory().total, rel=0.01)
        assert one.memory().parts["gradients"] < 0.1 * one.memory().parts["parameters"]
        usual = pk.predict(plain, "h100-sxm-8", strategy=strategy)
        assert one.memory().total <= usual.memory().total * (1.0 + 1e-6)
        # more calls of the host, and the same work
        assert usual.time < one.time < 3.0 * usual.time


def test_gradients_of_a_llama_save_what_they_would_take() -> None:
    """With one long layer after another and checkpoints, all gradients, less those of the largest
    weight, are saved; Adam's states stay."""
    plain = pk.Transformer.preset(
        "llama-2-7b", batch=1, sequence=128, dtype="bf16", attention="flash2", fused=True
    )
    hooked = replace(plain, optimizer_in_backward=True)
    parts = [pk.predict(model, "h100-sxm-8", ranks=1).memory().parts for model in (plain, hooked)]
    weights = 2 * plain.graphs()[0].parameters
    assert parts[0]["gradients"] == weights
    assert parts[1]["gradients"] <= 2 * 2 * 32000 * 4096
    assert parts[0]["states"] == parts[1]["states"]


def test_what_hooks_are_not_modelled_with_is_refused() -> None:
    small: dict[str, Any] = {"layers": 2, "batch": 8, "sequence": 64}
    model = pk.Transformer.gpt2(**small, optimizer_in_backward=True)
    with pytest.raises(ValueError, match="optimizer_in_backward is True and accumulate is 2"):
        replace(model, accumulate=2)
    with pytest.raises(ValueError, match="optimizer_in_backward is True with 8 ranks"):
        pk.predict(model, "h100-sxm-8", ranks=8)
    with pytest.raises(
        ValueError, match="does not go with optimizer_in_backward of the model, True, as dp is 8"
    ):
        pk.predict(model, "h100-sxm-8", strategy=pk.Strategy(dp=8))
    with pytest.raises(ValueError, match="execution is 'compiled' with weights that are updated"):
        pk.predict(model, "h100-sxm-8", ranks=1, execution="compiled")
    with pytest.raises(ValueError, match="execution is 'compiled' with weights that are updated"):
        pk.explore(
            model,
            "h100-sxm-8",
            ranks=1,
            strategies=[pk.Strategy(micro_batch=8)],
            execution="compiled",
        )
    with pytest.raises(ValueError, match="optimizer_in_backward"):
        pk.Transformer.gpt2(**small, optimizer_in_backward="yes")


def test_a_search_under_a_budget_takes_checkpoints_that_go_with_hooks() -> None:
    """Other checkpoints than those of whole layers would be refused, and the search with them."""
    model = pk.Transformer.gpt2(batch=32, dtype="bf16", optimizer_in_backward=True)
    found = pk.explore(model, "h100-sxm-8", ranks=1, memory=20e9)
    assert set(found.table()["checkpoint"]) == {"full"}
    assert found.table()["needs_bytes"][0] < 20e9


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"micro_batch": 4, "zero": 3}, "as micro_batch is 4;"),
        ({"micro_batch": 8, "zero": 3, "checkpoint": "mlp"}, "as checkpoint is 'mlp';"),
    ],
)
def test_errors_name_what_does_not_go_with_hooks(changes: dict[str, Any], fault: str) -> None:
    """And not ``zero``, which one rank may state."""
    model = pk.Transformer.gpt2(batch=8, optimizer_in_backward=True)
    with pytest.raises(ValueError, match=fault):
        pk.predict(model, "h100-sxm-8", strategy=pk.Strategy(**changes))
