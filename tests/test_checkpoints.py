"""What the backward pass computes again: against PyTorch, in both roads, and for some layers alone."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import pytest

import perfkit as pk
from benchmarks.strategies_beside import compare, draw
from perfkit.exploration.recomputation import list_cheapest_checkpoints
from perfkit.models.checkpoints import CHECKPOINTS, EVERY_LAYER, find_checkpoint, recomputes
from perfkit.models.partitions import activation_bytes
from perfkit.prediction.memory import Room, measure_memory
from perfkit.prediction.stages import make_stages
from perfkit.prediction.strategies import price_strategies
from perfkit.workloads.graph import Graph
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer, can_compute_again

GPU = pk.load_platform("h100-sxm-8")
LLAMA = Transformer.preset(
    "llama-3-8b",
    batch=32,
    sequence=2048,
    layers=8,
    dtype="bf16",
    mixed=True,
    fused=True,
    attention="math",
)
MOE = replace(LLAMA, experts=8, top_k=2, inner=4096, attention="flash2")


# -- names


def test_a_name_says_which_parts_run_again() -> None:
    assert find_checkpoint("mlp+norms").parts == ("norms", "mlp")
    assert find_checkpoint("attention") is CHECKPOINTS["selective"]
    assert Strategy(checkpoint="mlp+norms").checkpoint == "norms+mlp"
    stacked = Strategy.stack([Strategy(), Strategy(checkpoint="activation+norms")])
    assert stacked.checkpoint.tolist() == ["none", "norms+activation"]
    assert recomputes(stacked.checkpoint, "norms").tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half", "checkpoint is 'half'; known are none, selective, full"),
        ("norms+half", "'half' is no part of a layer; join some of attention, norms"),
        ("norms+norms", "name each part once"),
        ("full+norms", "'full' is no part of a layer"),
        (3, "checkpoint is 3; known are none"),
        (np.array([1, 2]), r"checkpoint is array\(\[1, 2\]\); known are none"),
    ],
)
def test_unknown_names_are_refused(name: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        Strategy(checkpoint=name)


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (MOE, "mlp", "the model has experts in place of an MLP; take 'experts'"),
        (LLAMA, "experts", "the model has no experts; take 'mlp'"),
        (MOE, "per_op", "the model has experts, whose products"),
        (Transformer.gpt2(), "per_op", "the model has biases, whose products"),
        (Transformer.bert(), "norms", "the model norms what layers hand on"),
    ],
)
def test_what_a_model_lacks_is_not_computed_again(
    model: Transformer, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(model, checkpoint=name)
    with pytest.raises(ValueError, match=message):
        pk.predict(model, GPU, strategy=Strategy(dp=8, checkpoint=name))


def test_checkpoints_per_operation_are_not_those_of_megatron() -> None:
    with pytest.raises(ValueError, match="holds memory as Megatron-LM"):
        pk.predict(LLAMA, GPU, strategy=Strategy(tp=2, dp=4, checkpoint="per_op"))
    with pytest.raises(ValueError, match="overlap_experts is True and checkpoint 'experts'"):
        Strategy(dp=8, ep=8, overlap_experts=True, checkpoint="experts")


# -- against PyTorch

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from perfkit.recording.modules import make_optimizer  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402
from tests import test_twins as twins  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

_ATEN = torch.ops.aten
_PRODUCT = _ATEN.mm.default
#: Operations that PyTorch runs again for parts of a layer.
_AGAIN = {
    "norms": ("rms_norm",),
    "activation": ("silu", "mul"),
    "norms+activation": ("rms_norm", "silu", "mul"),
    "selective": ("scaled_dot_product",),
}


def make_policy(name: str) -> Callable[..., CheckpointPolicy]:
    """The policy of a block, which counts its products as torchtitan does; for parts, all else is
    saved."""
    products = {True: 0, False: 0}

    def choose(context: Any, function: Any, *operands: Any, **_kwargs: Any) -> CheckpointPolicy:
        if name == "per_op":
            if function == _PRODUCT:
                products[context.is_recompute] += 1
                is_saved = products[context.is_recompute] % 2 == 1
            else:
                is_saved = "scaled_dot_product" in str(function)
        else:
            is_saved = not any(word in str(function) for word in _AGAIN[name])
            # positions are products of numbers, too
            is_rotation = "mul" in str(function) and operands[0].shape[-1] != twins.LLAMA.inner
            is_saved = is_saved or is_rotation
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


class Block(torch.nn.Module):
    """A layer of the Llama of `tests.test_twins` that computes something again."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.attention_norm = torch.nn.RMSNorm(twins.LLAMA.hidden)
        self.attention = twins._GroupedAttention()
        self.norm = torch.nn.RMSNorm(twins.LLAMA.hidden)
        self.mlp = twins._GatedMLP()

    def run(self, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x))
        normed = self.norm(x)
        if self.name == "mlp":
            return x + checkpoint(self.mlp, normed, use_reentrant=False)
        return x + self.mlp(normed)

    def forward(self, x: Any) -> Any:
        if self.name in ("none", "mlp"):
            return self.run(x)
        if self.name == "full":
            return checkpoint(self.run, x, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, make_policy(self.name))
        return checkpoint(self.run, x, use_reentrant=False, context_fn=contexts)


def build_llama(name: str, layers_again: int, dtype: Any) -> Any:
    """A step whose first layers compute something again."""
    llama = twins.LLAMA
    layers: list[Any] = [torch.nn.Embedding(llama.vocabulary, llama.hidden)]
    for layer in range(llama.layers):
        layers.append(Block(name if layer < layers_again else "none"))
    layers += [torch.nn.RMSNorm(llama.hidden), twins._make_linear(llama.hidden, llama.vocabulary)]
    module = torch.nn.Sequential(*layers).to(dtype)
    optimizer = make_optimizer(llama.optimizer, module.parameters())
    tokens = torch.zeros(llama.batch, llama.sequence, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        logits = module(tokens).view(-1, llama.vocabulary)
        torch.nn.functional.cross_entropy(logits, tokens.view(-1)).backward()
        optimizer.step()

    return step


def capture_llama(name: str, layers_again: int = 2, dtype: Any = torch.bfloat16) -> Graph:
    return capture(lambda: build_llama(name, layers_again, dtype), device="cuda")


@pytest.mark.parametrize(
    ("name", "layers_again"),
    [("full", 1), ("per_op", 1), ("per_op", 2), ("mlp", 2), *((name, 2) for name in _AGAIN)],
)
def test_pytorch_runs_the_same_operations_again(name: str, layers_again: int) -> None:
    model = replace(twins.LLAMA, checkpoint=name, checkpoint_layers=layers_again)
    [built] = model.graphs(accelerator=True)
    ours = twins.list_operations(built)
    theirs = twins.list_operations(capture_llama(name, layers_again))
    assert [row[0] for row in ours[0]] == [row[0] for row in theirs[0]]
    assert ours[0] == theirs[0]
    assert ours[1] == pytest.approx(theirs[1], rel=0.03)


@pytest.mark.parametrize(("name", "layers_again"), [("per_op", 1), ("per_op", 2), ("mlp", 2)])
def test_pytorch_holds_as_much_less_to_the_byte(name: str, layers_again: int) -> None:
    """But for statistics of norms, which are fp32 and which the builder holds in the format of what
    is normed."""
    llama = twins.LLAMA
    statistics = 2 * (4 - 2) * llama.batch * llama.sequence
    missing = {"mlp": 0, "per_op": statistics}

    def hold(graph: Graph) -> float:
        return measure_memory([graph], GPU).parts["activations"]

    [plain] = llama.graphs(accelerator=True)
    changed = replace(llama, checkpoint=name, checkpoint_layers=layers_again)
    [built] = changed.graphs(accelerator=True)
    less = hold(capture_llama("none")) - hold(capture_llama(name, layers_again))
    assert hold(plain) - hold(built) == less - layers_again * missing[name] > 0


def test_a_checkpoint_around_flash_attention_frees_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The product behind it keeps the result: in PyTorch 4 B a head and token are left to free, and
    seeds; strategies leave them out."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def attend_again(*heads: Any, **settings: Any) -> Any:
        return checkpoint(partial(attend, **settings), *heads, use_reentrant=False)

    plain = measure_memory([capture_llama("none")], GPU).total
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_again)
    less = plain - measure_memory([capture_llama("none")], GPU).total
    llama = twins.LLAMA
    assert 0 <= less - 4 * llama.layers * llama.heads * llama.batch * llama.sequence < 64
    needs = []
    for name in ("none", "selective"):
        strategy = Strategy(dp=4, zero=3, micro_batch=1, checkpoint=name)
        needs.append(pk.predict(llama, GPU, strategy=strategy).memory().parts["activations"])
    assert needs[1] == needs[0]


# -- both roads

_SHARED = {"micro_batch": 2, "sequence_parallel": True}
#: Ways to share the dense model, and the one with experts.
_WAYS = {
    "fsdp": Strategy(dp=8, zero=3, micro_batch=2),
    "ddp": Strategy(dp=8, micro_batch=2),
    "tensor": Strategy(tp=4, dp=2, **_SHARED),
    "stages": Strategy(tp=2, pp=2, dp=2, zero=1, **_SHARED),
    "chunks": Strategy(tp=2, pp=2, dp=2, schedule="interleaved", chunks=2, **_SHARED),
    "uneven": Strategy(tp=2, pp=4, dp=1, micro_batch=2, first_layers=1, last_layers=1),
    "context": Strategy(cp=2, dp=4, micro_batch=2, zero=1),
}
_EXPERT_WAYS = {
    "replicas": Strategy(dp=8, ep=8, zero=1, micro_batch=2),
    "stages": Strategy(tp=2, pp=2, dp=2, ep=2, zero=1, **_SHARED),
    "spread": Strategy(tp=4, dp=2, ep=8, **_SHARED),
}


def price(model: Transformer, strategy: Strategy) -> dict[str, float]:
    columns = price_strategies(model, GPU, Strategy.stack([strategy]), near=0.0)
    return {name: float(column[0]) for name, column in columns.items()}


def check_roads(model: Transformer, strategy: Strategy) -> None:
    """Time within 3 %, memory within 1 %."""
    prediction = pk.predict(model, GPU, strategy=strategy)
    closed = price(model, strategy)
    assert closed["time"] == pytest.approx(prediction.time, rel=0.03), strategy
    assert closed["needs"] == pytest.approx(prediction.memory().total, rel=0.01), strategy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("norms+activation", way) for way in _WAYS),
        *(("full", way) for way in ("fsdp", "chunks", "uneven")),
        *(("mlp", way) for way in ("tensor", "stages")),
        *(("attention+norms", way) for way in ("ddp", "context")),
        *(("per_op", way) for way in ("fsdp", "ddp")),
    ],
)
def test_both_roads_agree(name: str, way: str) -> None:
    strategy = replace(_WAYS[way], checkpoint=name)
    check_roads(LLAMA, strategy)
    check_roads(LLAMA, replace(strategy, checkpoint_layers=1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["none", "full", "norms+activation"])
def test_a_mask_of_scores_is_held_once(name: str) -> None:
    """Not once a layer, micro-batch and time that it is computed again."""
    strategy = replace(_WAYS["fsdp"], checkpoint=name)
    held = pk.predict(LLAMA, GPU, strategy=strategy).memory().total
    # counters of steps of the optimizer are not in the closed form
    assert price(LLAMA, strategy)["needs"] == pytest.approx(held, abs=1e4)
    mask = 2 * LLAMA.sequence**2
    [graph] = replace(LLAMA, batch=2, checkpoint=name).graphs(accelerator=True)
    adds = [place for place, label in enumerate(graph.labels) if label.name == "add"]
    reads = graph.accesses.select(graph.accesses.find_of(np.array(adds)))
    masks = reads.buffer[(reads.nbytes == mask) & ~reads.is_write]
    again = LLAMA.layers if name == "full" else 0
    assert len(masks) == LLAMA.layers + again
    assert len(np.unique(masks)) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", _EXPERT_WAYS)
@pytest.mark.parametrize("name", ["experts", "norms+activation"])
def test_both_roads_agree_with_experts(way: str, name: str) -> None:
    strategy = replace(_EXPERT_WAYS[way], checkpoint=name)
    check_roads(MOE, strategy)
    check_roads(MOE, replace(strategy, checkpoint_layers=3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["fsdp", "stages", "chunks", "uneven"])
@pytest.mark.parametrize("name", ["full", "selective"])
def test_all_layers_are_the_whole_and_none_nothing(way: str, name: str) -> None:
    plain = _WAYS[way]
    whole = replace(plain, checkpoint=name)
    for layers, same in ((0, plain), (8, whole)):
        strategy = replace(whole, checkpoint_layers=layers)
        ours, theirs = (pk.predict(LLAMA, GPU, strategy=one) for one in (strategy, same))
        assert ours.time == theirs.time
        assert ours.memory().parts == theirs.memory().parts
        assert price(LLAMA, strategy) == price(LLAMA, same)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["fsdp", "stages", "chunks"])
def test_each_layer_more_takes_longer_and_holds_less(way: str) -> None:
    layers = LLAMA.layers // int(_WAYS[way].pp * _WAYS[way].chunks)
    rows = []
    for count in range(layers + 1):
        strategy = replace(_WAYS[way], checkpoint="full", checkpoint_layers=count)
        prediction = pk.predict(LLAMA, GPU, strategy=strategy)
        rows.append((prediction.time, prediction.memory().total))
    times, needs = np.array(rows).T
    assert np.all(np.diff(times) > 0)
    assert np.all(np.diff(needs) < 0)
    # each as much as the others, but for the layer that runs
    steps = np.diff(times)
    assert steps == pytest.approx(np.full(layers, steps.mean()), rel=0.05)


@pytest.mark.filterwarnings("ignore")
def test_forms_keep_drawn_strategies_as_near_as_they_are() -> None:
    """Both roads differ by at most 2 % more with a checkpoint of some layers than without."""
    rng = np.random.default_rng(7)
    compared = 0
    for drawn in draw(20, seed=7):
        form = str(rng.choice(["full", "norms", "norms+activation", "mlp", "experts"]))
        layers = int(rng.choice([EVERY_LAYER, 1, 2]))
        sends_again = recomputes(form, "experts") and drawn.strategy.overlap_experts
        if not can_compute_again(drawn.model, form) or sends_again:
            continue
        errors = []
        for name, count in (("none", EVERY_LAYER), (form, layers)):
            strategy = replace(drawn.strategy, checkpoint=name, checkpoint_layers=count)
            agreement = compare(drawn._replace(strategy=strategy))
            errors.append(abs(agreement.error))
        assert errors[1] <= errors[0] + 0.02, (form, layers, drawn)
        compared += 1
    assert compared >= 10


# -- what fits


@pytest.mark.filterwarnings("ignore")
def test_a_search_under_a_budget_computes_again_as_little_as_fits() -> None:
    model = replace(LLAMA, layers=16, attention="flash2")
    budget = 21e9  # with the reserve of the process
    found = pk.explore(model, GPU, 8, memory=budget, stack="fsdp")
    forms = found.table().filter(pl.col("checkpoint_layers") < EVERY_LAYER)
    assert len(forms) > 0
    for row in forms[:5].to_dicts():
        strategy = Strategy(**{field.name: row[field.name] for field in fields(Strategy)})
        fewer = replace(strategy, checkpoint_layers=strategy.checkpoint_layers - 1)
        priced = price_strategies(model, GPU, Strategy.stack([strategy, fewer]), stack="fsdp")
        least, too_few = priced["needs"] + priced["reserve"]
        assert priced["needs"][0] == row["needs_bytes"]
        assert least <= budget < too_few
    usual = found.table().filter(
        pl.col("checkpoint").is_in(["none", "full"]) & (pl.col("checkpoint_layers") == EVERY_LAYER)
    )
    assert found.table()["time_s"][0] < usual["time_s"][0]


@pytest.mark.filterwarnings("ignore")
def test_a_search_counts_layers_of_further_tokens() -> None:
    """A stage of 8 layers and one that predicts a further token needs 8 of them, and not all 9."""
    model = replace(LLAMA, mtp_layers=1, attention="flash2")
    plain = Strategy.stack([Strategy(dp=8, zero=3)])
    of_eight = replace(plain, checkpoint="full", checkpoint_layers=8)
    priced = price_strategies(model, GPU, of_eight)
    budget = Room.stated(float(priced["needs"][0] + priced["reserve"][0]))
    none_fits = np.zeros(1, dtype=bool)
    further = list_cheapest_checkpoints(
        model, GPU, plain, np.ones(1), none_fits, budget, None, None
    )
    assert further is not None
    counts = dict(zip(further.checkpoint.tolist(), further.checkpoint_layers.tolist(), strict=True))
    assert counts["full"] == 8


def test_without_a_budget_a_search_tries_what_it_did() -> None:
    found = pk.explore(replace(LLAMA, attention="flash2"), GPU, 8)
    assert {*found.table()["checkpoint"]} <= {"none", "full"}


# -- by hand


def test_published_activations_of_parts() -> None:
    """Of 34 s b h without scores: the norms hand on 4 s b h, the activation 8, the MLP 16."""
    sizes = {"heads": 16, "fused": True}
    tokens = 2.0 * 128 * 1024

    def count(recompute: str) -> float:
        return activation_bytes(2, 128, 1024, recompute=recompute, **sizes) / tokens

    assert count("none") == 34
    assert count("norms") == 34 - 4
    assert count("activation") == 34 - 8
    assert count("mlp") == 34 - 16
    assert count("norms+activation") == 34 - 12
    assert count("norms+mlp") == 34 - 20
    assert count("full") == 2
    with pytest.raises(ValueError, match="recompute is 'per_op', which this form does not know"):
        count("per_op")


def test_what_runs_again_is_what_the_part_has() -> None:
    """Of an MLP that two ranks share: both products ahead of the activation, its two functions, the
    last product, and the message behind it, which Megatron sends again."""
    names = []
    for name in ("none", "mlp"):
        strategy = Strategy(tp=2, dp=4, checkpoint=name)
        [graph, *_] = make_stages(LLAMA, GPU, strategy)
        names.append([label.name for label in graph.labels])
    plain, again = (Counter(listed) for listed in names)
    of_layers = LLAMA.batch // 4 * LLAMA.layers
    added = {"mm": 3, "silu": 1, "mul": 1, "all_reduce": 1}
    assert again - plain == Counter({key: of_layers * count for key, count in added.items()})
    assert not plain - again


def test_layers_of_a_kind_compute_again_what_they_have() -> None:
    """Dense layers the norms alone, where experts are computed again, too."""
    model = replace(MOE, dense_layers=2, layers=4, batch=8)
    [plain], [again] = (
        replace(model, checkpoint=name).graphs() for name in ("none", "norms+experts")
    )
    names = [Counter(label.name for label in graph.labels) for graph in (plain, again)]
    added = names[1] - names[0]
    norm = "_fused_rms_norm" if "_fused_rms_norm" in names[0] else "rms_norm"
    assert added[norm] == 4 * 2
    assert added["_grouped_mm"] == 2 * 3
    assert "_scaled_dot_product_flash_attention_for_cpu" not in added
    with pytest.raises(ValueError, match="layers of the model are of several kinds"):
        pk.predict(model, GPU, strategy=Strategy(dp=8, checkpoint="full", checkpoint_layers=1))
