"""Muon and Adafactor: operations in their order, memory and states beside programs in PyTorch, the
arithmetic of Muon beside what was published, and what is refused."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from perfkit.models.optimizers import OPTIMIZERS, find_optimizer
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.graph import Graph
from perfkit.workloads.transformer import Transformer

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from tests import test_twins as twins  # noqa: E402
from tests.test_optimizer_in_backward import measure  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("few_calls"),
    pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning"),
]
BY_SHAPE = [name for name, optimizer in OPTIMIZERS.items() if optimizer.by_shape]

#: What the twin with AdamW holds on two tokens, `measure(twins.capture(twins.build_llama,
#: device="cuda"))`: some seconds [B].
CAPTURED_WITH_ADAMW = 1_008_292.0


class _Both:
    """Muon for the matrices of layers, and AdamW for all else, one after the other, as the page of
    `torch.optim.Muon` has it."""

    def __init__(self, module: Any, *, fused: bool) -> None:
        hidden = [weight for layer in module[1:-2] for weight in layer.parameters()]
        matrices = [weight for weight in hidden if weight.ndim == 2]
        chosen = {id(weight) for weight in matrices}
        others = [weight for weight in module.parameters() if id(weight) not in chosen]
        self.optimizers = [
            torch.optim.Muon(matrices),
            torch.optim.AdamW(others, fused=True if fused else None),
        ]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def build_updated_llama(model: Transformer) -> Any:
    """The step of a small Llama of `tests.test_twins` with an optimizer whose updates depend on the
    shape of a weight."""

    def make() -> Any:
        module = twins.build_llama_module()
        optimizer: Any = torch.optim.Adafactor(module.parameters())
        if model.optimizer == "muon":
            optimizer = _Both(module, fused=model.fused)
        return twins.make_llama_step(module, optimizer)

    return make


@pytest.mark.parametrize(("optimizer", "apart"), [("muon", 0.0), ("adafactor", 2.0)])
def test_an_update_by_shape_is_captured_as_it_is_built(
    optimizer: str, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations in their order, the bytes of the update, and memory to the byte: with two tokens the
    update is the fullest moment.

    A twin holds somewhat more than what is built: statistics are fp32, and a copy of the logits lives
    longer. With these optimizers it is as much more as with AdamW. What is built keeps the number that
    lists of counters are raised by, 4 B. The host reads norms of Adafactor; a capture holds one of
    them, of 2 B, for longer.
    """
    monkeypatch.setattr(twins, "LLAMA", replace(twins.LLAMA, batch=1, sequence=2))
    model = replace(twins.LLAMA, optimizer=optimizer)
    [built] = model.graphs(accelerator=True)
    captured = twins.capture(build_updated_llama(model), device="cuda")
    assert captured.parameters == built.parameters
    ours, theirs = twins.list_operations(captured), twins.list_operations(built)
    assert ours[0] == theirs[0]
    update = sum(label.phase == "update" for label in built.labels)
    assert ours[1][-update:] == theirs[1][-update:]
    more = CAPTURED_WITH_ADAMW - (measure(twins.LLAMA.graphs(accelerator=True)[0]) - 4.0)
    number = 4.0 if optimizer == "muon" else 0.0
    assert measure(captured) - (measure(built) - number) == more + apart


def test_states_are_those_that_pytorch_keeps() -> None:
    """In fp32: numbers of momentum, of rows and columns, and of both moments, beside counters."""
    module = twins.build_llama_module().float()
    for optimizer, name in (
        (_Both(module, fused=False), "muon"),
        (torch.optim.Adafactor(module.parameters()), "adafactor"),
    ):
        for weight in module.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        numbers = 0
        for part in getattr(optimizer, "optimizers", [optimizer]):
            for kept in part.state.values():
                numbers += sum(t.numel() for key, t in kept.items() if key != "step")
        known = find_optimizer(name)
        hidden = {id(weight) for layer in module[1:-2] for weight in layer.parameters()}
        expected = sum(
            known.count_states(weight.shape, is_hidden=id(weight) in hidden)
            for weight in module.parameters()
        )
        assert numbers == expected
        parts = pk.predict(replace(twins.LLAMA, optimizer=name), "h100-sxm-8").memory().parts
        assert 0 <= parts["states"] - 2.0 * expected <= 4.0 * len([*module.parameters()])


def add_up_update(graph: Graph) -> float:
    """Arithmetic of the products of an update [FLOP]."""
    update = np.array([label.phase == "update" for label in graph.labels])
    return float(graph.column("flops")[update].sum())


#: Width and tokens of a batch, and what the page of Muon says that its products add at most to the
#: arithmetic of a step: https://kellerjordan.github.io/posts/muon/, section on its runtime.
PUBLISHED = {
    "gpt2": (768, 524_288, 0.007),
    "llama-3.1-405b": (16_384, 16_000_000, 0.005),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_arithmetic_of_muon_is_what_its_authors_say(preset: str) -> None:
    """At most T m / B: 0.7 % of GPT-2's in the NanoGPT speedrun and 0.5 % of Llama 405B's. That bound is
    of square matrices; others need as little as two thirds of it."""
    width, tokens, published = PUBLISHED[preset]
    model = Transformer.preset(preset, batch=1, sequence=64, optimizer="muon", joined="none")
    bound = 5 * model.hidden / tokens
    assert model.hidden == width
    assert bound == pytest.approx(published, rel=0.06)
    [graph] = replace(model, layers=2).graphs(accelerator=True)
    matrices = Transformer.preset(preset, batch=1, sequence=64, layers=2, bias=False)
    keys = (matrices.kv_heads or matrices.heads) * matrices.width_of_head
    products = 3 if matrices.gated else 2
    hidden = matrices.hidden
    numbers = 2 * (2 * hidden**2 + 2 * hidden * keys + products * hidden * matrices.width_of_mlp)
    share = add_up_update(graph) / (6.0 * numbers * tokens)
    assert 0.66 * bound < share <= bound


def test_muon_adds_little_time_to_steps_of_many_tokens() -> None:
    """Moonlight's report says 1 to 3 % of forward and backward passes, with work that ranks share
    (arXiv:2502.16982, section 2.3); of a rank that updates a whole model of 1.3 billion numbers by
    itself in steps of half a million tokens it is as much."""
    sizes: dict[str, Any] = {"batch": 256, "sequence": 2048, "dtype": "bf16", "attention": "flash3"}
    times = {}
    for optimizer in ("muon", "sgd"):
        model = Transformer.preset("llama-3.2-1b", optimizer=optimizer, **sizes)
        strategy = pk.Strategy(micro_batch=8, checkpoint="full")
        table = pk.explore(model, "h100-sxm-8", ranks=1, strategies=[strategy], memory=1e15)
        times[optimizer] = float(table.table()["time_s"][0])
    assert 0.005 < times["muon"] / times["sgd"] - 1 < 0.03


@pytest.mark.parametrize("name", BY_SHAPE)
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_explore_and_predict_agree_with_updates_by_shape(name: str, checkpoint: str) -> None:
    """The host of Adafactor waits for norms, twice a weight; closed forms take the slower of host and
    device between two of them."""
    model = Transformer.preset(
        "llama-2-7b", batch=16, sequence=1024, layers=8, dtype="bf16", attention="flash2"
    )
    model = replace(model, optimizer=name)
    strategy = pk.Strategy(dp=8, micro_batch=2, checkpoint=checkpoint)
    one = pk.predict(model, "h100-sxm-8", strategy=strategy)
    found = pk.explore(model, "h100-sxm-8", ranks=8, strategies=[strategy], memory=1e15).table()
    assert found["time_s"][0] == pytest.approx(one.time, rel=0.04 if name == "adafactor" else 0.003)
    assert found["needs_bytes"][0] == pytest.approx(one.memory().total, rel=0.003)


def test_closed_forms_know_hosts_that_wait_for_small_weights() -> None:
    """Nearly all of such a step are calls of the update: 133 ms, and 22 with SGD."""
    model = Transformer.gpt2(batch=8, dtype="bf16", optimizer="adafactor")
    one = pk.predict(model, "h100-sxm-8", ranks=8)
    found = pk.explore(model, "h100-sxm-8", ranks=8, strategies=[pk.Strategy(dp=8)]).table()
    assert found["time_s"][0] == pytest.approx(one.time, rel=0.05)
    assert one.time > 4.0 * pk.predict(replace(model, optimizer="sgd"), "h100-sxm-8", ranks=8).time


def test_stages_run_the_updates_of_each_layer() -> None:
    """Without overlap the event loop makes a stage, which updates layer by layer."""
    model = Transformer.preset(
        "llama-2-7b", batch=16, sequence=1024, layers=8, dtype="bf16", attention="flash2"
    )
    strategy = pk.Strategy(dp=8, micro_batch=2, overlap=False)
    times = []
    for name in ("muon", "sgd"):
        of_model = replace(model, optimizer=name)
        one = pk.predict(of_model, "h100-sxm-8", strategy=strategy)
        found = pk.explore(of_model, "h100-sxm-8", ranks=8, strategies=[strategy], memory=1e15)
        assert found.table()["time_s"][0] == pytest.approx(one.time, rel=0.01)
        times.append(one.time)
    products = 8 * 5 * (4 * 6 * 4096**3 + 3 * (4 * 11008 * 4096**2 + 2 * 4096**3))
    least = products / 0.989e15  # at the peak of the datasheet
    assert least < times[0] - times[1] < 2 * least


def test_products_of_an_update_are_bf16_where_weights_are_fp32() -> None:
    """Fp32 ones would take 15 times as long on an H100."""
    model = Transformer.gpt2(batch=8, sequence=128, optimizer="muon", layers=2)
    [graph] = model.graphs(accelerator=True)
    for label, dtype in zip(graph.labels, graph.dtypes, strict=True):
        is_bf16 = label.phase == "update" and label.kind == "gemm"
        assert dtype == ("bf16" if is_bf16 else "fp32")
    assert not replace(model, dtype="bf16").graphs(accelerator=True)[0].dtypes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer_in_backward": True}, "and optimizer_in_backward is True; its updates are"),
        ({"experts": 4}, "and experts is 4; its updates are modelled with experts 0 alone"),
        ({"lora_rank": 8}, "and lora_rank is 8; its updates are modelled with lora_rank 0 alone"),
        ({"vocabulary": np.array([100, 200])}, "vocabulary is an array; with updates by shape"),
    ],
)
@pytest.mark.parametrize("name", BY_SHAPE)
def test_what_was_never_checked_with_updates_by_shape_is_refused(
    name: str, changes: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Transformer.gpt2(layers=2, batch=8, sequence=64, optimizer=name, **changes)


def test_half_precision_and_fused_kernels_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="optimizer is 'muon' and dtype is 'fp16' for weights, too"
    ):
        Transformer.gpt2(batch=8, dtype="fp16", optimizer="muon")
    Transformer.gpt2(batch=8, dtype="fp16", mixed=True, optimizer="muon")
    with pytest.raises(ValueError, match="fused is True with optimizer 'adafactor', which has no"):
        Transformer.gpt2(batch=8, optimizer="adafactor", fused=True)


@pytest.mark.parametrize("name", BY_SHAPE)
def test_ranks_that_share_weights_or_states_are_refused(name: str) -> None:
    model = Transformer.gpt2(layers=2, batch=8, sequence=64, dtype="bf16", optimizer=name)
    for shared in ({"tp": 2, "dp": 4}, {"pp": 2, "dp": 4}, {"dp": 8, "zero": 1}):
        with pytest.raises(
            ValueError, match=r"not go with optimizer .*, as \w+ is \d.* replicas of the whole"
        ):
            pk.predict(model, "h100-sxm-8", strategy=pk.Strategy(**shared))
        both = pk.Strategy.stack([pk.Strategy(dp=8), pk.Strategy(**shared)])
        with pytest.raises(ValueError, match=r"not go with optimizer .*, as \w+ is \d"):
            price_strategies(model, pk.load_platform("h100-sxm-8"), both)
    with pytest.raises(ValueError, match=r"parallel 'zero1', whose ranks hold parts of matrices"):
        pk.predict(replace(model, parallel="zero1"), "h100-sxm-8", ranks=8)
    with pytest.raises(ValueError, match=r"such as 'ddp'"):
        pk.predict(model, "h100-sxm-8", ranks=8, stack="megatron")
    found = pk.explore(model, "h100-sxm-8", ranks=8)
    assert set(found.table()["zero"]) == set(found.table()["tp"] - 1) == {0}
    for take in (
        lambda: pk.DLRM(optimizer=name, embedding="exact"),
        lambda: find_optimizer(name).update_bytes(10),
        lambda: find_optimizer(name).kept_bytes(4.0),
        lambda: find_optimizer(name).row_state_bytes(64.0, 32.0),
    ):
        with pytest.raises(ValueError, match=f"{name!r}"):
            take()
    with pytest.raises(ValueError, match=r"operations of the optimizer .* depend on the shape"):
        find_optimizer(name).operations("for_each")


def test_hosts_that_read_norms_refuse_cuda_graphs_and_stages() -> None:
    model = Transformer.gpt2(layers=2, batch=8, sequence=64, dtype="bf16", optimizer="adafactor")
    for predict in (
        lambda: pk.predict(model, "h100-sxm-8", execution="graphs"),
        lambda: pk.explore(model, "h100-sxm-8", ranks=1, execution="graphs"),
    ):
        with pytest.raises(ValueError, match="reads numbers back to the host"):
            predict()
    with pytest.raises(ValueError, match="with 'adafactor' overlap and no selective checkpoints"):
        pk.predict(model, "h100-sxm-8", strategy=pk.Strategy(dp=8, overlap=False))
    with pytest.raises(ValueError, match="beside which 'adamw' updates embeddings, head, norms"):
        pk.capture(torch.nn.Linear(4, 4), torch.ones(2, 4), optimizer="muon")
    pk.capture(torch.nn.Linear(4, 4), torch.ones(2, 4), optimizer="adafactor")


def test_a_search_under_a_budget_takes_checkpoints_that_go_with_waits_of_the_host() -> None:
    """Selective ones would be refused, and the search with them."""
    model = pk.Transformer.gpt2(batch=8, optimizer="adafactor", attention="eager")
    found = pk.explore(model, "h100-sxm-8", ranks=1, memory=3.5e9)
    assert "selective" not in set(found.table()["checkpoint"])
    assert found.best.checkpoint != "none"
    refusal = "does not go with optimizer of the model, adafactor, as checkpoint is 'selective'"
    with pytest.raises(ValueError, match=refusal):
        pk.predict(model, "h100-sxm-8", strategy=pk.Strategy(checkpoint="selective"))
