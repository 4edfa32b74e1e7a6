"""Low-rank adapters (LoRA): what they record beside a program in PyTorch, what they hold, and what is
refused."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perfkit as pk
from benchmarks.helpers.files import read_csv
from benchmarks.lora import compare_row
from perfkit.ground.files import find_reference, group_rows
from perfkit.prediction.memory import measure_memory
from perfkit.workloads.graph import Graph
from perfkit.workloads.transformer import Transformer
from tests import test_twins as twins

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from perfkit.recording.modules import make_optimizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

RANK = 8
#: Attributes of the modules of `tests.test_twins` by the names of products.
ATTRIBUTES = {
    "q_proj": "queries",
    "k_proj": "keys",
    "v_proj": "values",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


class _Adapted(torch.nn.Module):
    """A linear layer with an adapter, as PEFT's `lora.Linear` and torchtune's `LoRALinear`
    (arXiv:2106.09685, section 4.1)."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, RANK, bias=False)
        self.up = torch.nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x)) * 2.0


def build_adapted_llama(model: Transformer) -> Any:
    """The step of a small Llama of `tests.test_twins` with adapters, the base frozen."""

    def make() -> Any:
        module = twins.build_llama_module()
        module.requires_grad_(False)
        for part in [*module.modules()]:
            for name, attribute in ATTRIBUTES.items():
                if hasattr(part, attribute) and name in model.adapted:
                    setattr(part, attribute, _Adapted(getattr(part, attribute)))
        module.to(torch.bfloat16)
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        return twins.make_llama_step(module, make_optimizer(model.optimizer, trained))

    return make


SMALL: dict[str, Any] = {"layers": 2, "batch": 8, "sequence": 64}
MODULES = ("all-linear", ("q_proj", "v_proj"), "mlp", "attention", ("down_proj",))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("modules", MODULES)
def test_an_adapted_llama_is_captured_as_it_is_built(modules: Any, optimizer: str) -> None:
    model = replace(twins.LLAMA, lora_rank=RANK, lora_modules=modules, optimizer=optimizer)
    [built] = model.graphs(accelerator=True)
    captured = twins.capture(build_adapted_llama(model), device="cuda")
    assert captured.parameters == built.parameters
    ours, theirs = twins.list_operations(captured), twins.list_operations(built)
    assert ours[0] == theirs[0]
    # statistics of rows are fp32
    assert ours[1] == pytest.approx(theirs[1], rel=0.03)


def measure(graph: Graph) -> float:
    """Bytes at the fullest moment of an iteration on a GPU."""
    return measure_memory([graph], pk.load_platform("h100-sxm-8")).total


@pytest.mark.parametrize("modules", ["all-linear", ("q_proj", "v_proj")])
def test_memory_of_adapters_is_that_of_the_program_to_the_byte(modules: Any) -> None:
    """The twin of the whole Llama holds somewhat more than is built: statistics are fp32, and a copy
    of the logits lives longer. That of adapters holds as much more, but for the statistics of the
    first norm, which no gradient passes: four sequences of 40 rows, 2 B more each."""
    model = replace(twins.LLAMA, lora_rank=RANK, lora_modules=modules)
    whole = measure(twins.capture(twins.build_llama, device="cuda"))
    more = whole - measure(twins.LLAMA.graphs(accelerator=True)[0])
    adapted = measure(twins.capture(build_adapted_llama(model), device="cuda"))
    of_first_norm = 2 * model.batch * model.sequence
    assert adapted - measure(model.graphs(accelerator=True)[0]) == more - of_first_norm
    assert adapted < whole


def test_a_checkpoint_ends_ahead_of_the_last_product_of_an_adapter() -> None:
    """PyTorch's checkpoints stop once all that the backward pass reads is there
    (`torch.utils.checkpoint`, early stop): the products behind that of the last adapter's first
    matrix, its scale and both sums are not computed again."""
    for modules, again in (("all-linear", 4), ("attention", 2)):
        model = replace(twins.LLAMA, lora_rank=RANK, lora_modules=modules)
        [plain] = model.graphs(accelerator=True)
        [checkpoint] = replace(model, checkpoint=True).graphs(accelerator=True)
        in_layer = [label for label in plain.labels if label.module.startswith("layers.1.")]
        forward = sum(label.phase == "forward" for label in in_layer)
        added = len(checkpoint) - len(plain)
        assert added == model.layers * (forward - again), modules


PUBLISHED = [
    row for rows in group_rows("model", "published", "adapters.csv").values() for row in rows
]


def build_published(row: Any) -> Transformer:
    """A Llama with adapters as it was run."""
    return pk.Transformer.preset(
        row["model"],
        batch=int(row["batch"]),
        sequence=int(row["tokens"]),
        dtype="bf16",
        attention="flash2",
        lora_rank=int(row["rank"]),
        lora_modules=row["modules"].split(),
    )


def test_adapters_have_as_many_numbers_as_published() -> None:
    for row in PUBLISHED:
        assert build_published(row).graphs()[0].parameters == int(row["trained"])
    # LoRA paper (arXiv:2106.09685, table 2): RoBERTa large, rank 8 on queries and values, 0.8 M
    large = pk.Transformer.bert("bert-large", lora_rank=8, lora_modules=("q_proj", "v_proj"))
    assert large.graphs()[0].parameters == 786432


def test_memory_of_adapters_is_near_what_was_published() -> None:
    """LitGPT's program has norms and rotations of several kernels, which keep fp32 copies, so that a
    sequence holds 7.8 GB and not 5.4. What does not grow with the batch is as published."""
    needs = []
    for row in PUBLISHED:
        total = pk.predict(build_published(row), "a100-sxm-8", ranks=1).memory().total / 1e9
        needs.append(total)
        assert 0.83 < total / float(row["memory_gb"]) < 1.0
    one, two = (float(row["memory_gb"]) for row in PUBLISHED[:2])
    assert 2 * needs[0] - needs[1] == pytest.approx(2 * one - two, rel=0.01)


def test_frozen_weights_have_no_gradients_states_or_messages() -> None:
    model = pk.Transformer.preset(
        "llama-2-7b", batch=16, sequence=512, dtype="bf16", lora_rank=16, fused=True
    )
    trained = model.graphs()[0].parameters
    whole = replace(model, lora_rank=0).graphs()[0].parameters
    assert trained == 16 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    parts = pk.predict(model, "h100-sxm-8", ranks=8).memory().parts
    assert parts["parameters"] == 2 * (whole + trained)
    assert parts["states"] == 2 * 2 * trained + 4 * 2 * 7 * 32  # and step counters
    [graph, *_] = replace(model, parallel="fsdp").graphs(8, accelerator=True)
    sent = {"all_gather": 0.0, "reduce_scatter": 0.0}
    for place in graph.collectives:
        sent[graph.labels[place].name] += graph.column("nbytes")[place]
    assert sent["reduce_scatter"] == 2 * trained
    of_layers = whole - 2 * 32000 * 4096 - 4096 + trained
    assert sent["all_gather"] == 2 * (whole + trained + of_layers)
    update = [label.phase == "update" for label in graph.labels]
    assert graph.column("elements")[update].max() == trained / 8


STRATEGIES = [
    pk.Strategy(dp=8, zero=zero, micro_batch=micro, checkpoint=checkpoint)
    for zero in (0, 1, 2, 3)
    for micro in (2, 8)
    for checkpoint in ("none", "full")
]


@pytest.mark.filterwarnings("ignore")
def test_explore_and_predict_agree_with_adapters() -> None:
    """Memory as without adapters."""
    model = pk.Transformer.preset(
        "llama-2-7b", batch=64, sequence=1024, dtype="bf16", lora_rank=8, attention="flash2"
    )
    found = pk.explore(model, "a100-sxm-8", ranks=8, strategies=STRATEGIES, memory=1e15).table()
    rows = {
        (row["zero"], row["micro_batch"], row["checkpoint"]): row
        for row in found.iter_rows(named=True)
    }
    for strategy in STRATEGIES:
        row = rows[strategy.zero, strategy.micro_batch, strategy.checkpoint]
        one = pk.predict(model, "a100-sxm-8", strategy=strategy)
        assert row["time_s"] == pytest.approx(one.time, rel=0.002)
        assert row["needs_bytes"] == pytest.approx(one.memory().total, rel=0.035)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("modules", ["all-linear", ("down_proj",)])
def test_closed_forms_know_that_gradients_end_in_the_first_layer(zero: int, modules: Any) -> None:
    """Of two layers, one has hardly a backward pass with adapters on its last product alone."""
    model = pk.Transformer.preset(
        "llama-2-7b",
        batch=32,
        sequence=1024,
        layers=2,
        dtype="bf16",
        attention="flash2",
        lora_rank=8,
        lora_modules=modules,
    )
    strategy = pk.Strategy(dp=8, zero=zero, micro_batch=4)
    one = pk.predict(model, "a100-sxm-8", strategy=strategy)
    found = pk.explore(model, "a100-sxm-8", ranks=8, strategies=[strategy], memory=1e15)
    assert found.table()["time_s"][0] == pytest.approx(one.time, rel=0.003)


def test_a_single_layer_may_have_attention_without_gradients() -> None:
    model = pk.Transformer.bert(**{**SMALL, "layers": 1}, lora_rank=8, lora_modules=["o_proj"])
    table = pk.explore(model, "a100-sxm-8", ranks=8, strategies=[pk.Strategy(dp=8)]).table()
    assert table["time_s"][0] > 0.0


@pytest.mark.filterwarnings("ignore")
def test_the_event_loop_agrees_with_adapters() -> None:
    """Groups of shards are not settings of a model, so that stages are made. Both differ by 2.7 % at
    most without adapters, too."""
    model = pk.Transformer.preset(
        "llama-2-7b", batch=16, sequence=1024, dtype="bf16", lora_rank=8, attention="flash2"
    )
    for strategy in (
        pk.Strategy(dp=8, zero=3, shards=4, micro_batch=2),
        pk.Strategy(dp=8, zero=1, micro_batch=1, overlap=False),
        pk.Strategy(dp=8, zero=2, micro_batch=1, checkpoint="selective"),
    ):
        one = pk.predict(model, "a100-sxm-8", strategy=strategy)
        [row] = (
            pk.explore(model, "a100-sxm-8", ranks=8, strategies=[strategy], memory=1e15)
            .table()
            .iter_rows(named=True)
        )
        assert row["time_s"] == pytest.approx(one.time, rel=0.027)
        assert row["needs_bytes"] == pytest.approx(one.memory().total, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora_modules": "query"},
            "lora_modules is 'query'; known are attention, mlp, all-linear",
        ),
        (
            {"lora_modules": "q_proj, v_proj"},
            "'q_proj, v_proj', one text; give a list, ['q_proj', 'v_proj']",
        ),
        ({"lora_modules": ()}, "lora_modules is empty; name products"),
        ({"lora_modules": ["up_proj", "up_proj"]}, "name each product once"),
        ({"lora_modules": ["gate_proj"]}, "'gate_proj' and gated is False; leave it out"),
        ({"lora_modules": ["q_proj"]}, "queries, keys and values of this model are one product"),
        ({"dtype": "fp8"}, "lora_rank is 8 and dtype is 'fp8'; adapters are not modelled"),
        ({"experts": 4}, "lora_rank is 8 and experts is 4; adapters are modelled with experts 0"),
        (
            {"dtype": "bf16", "mixed": True},
            "lora_rank is 8 and mixed is True; adapters are modelled",
        ),
        ({"vocabulary": np.array([100, 200])}, "vocabulary is an array; with adapters only batch"),
    ],
)
def test_what_was_never_checked_with_adapters_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pk.Transformer.gpt2(**{**SMALL, "lora_rank": 8, **changes})


def test_ranks_that_share_layers_refuse_adapters() -> None:
    model = pk.Transformer.gpt2(**SMALL, dtype="bf16", lora_rank=8)
    with pytest.raises(
        ValueError, match=r"not go with lora_rank .* 8, as tp is 2; adapters are modelled on"
    ):
        pk.predict(model, "h100-sxm-8", strategy=pk.Strategy(tp=2, dp=4))
    for predict in (pk.predict, pk.explore):
        with pytest.raises(ValueError, match=r"stack is 'megatron' .* 'ddp' or 'fsdp'"):
            predict(model, "h100-sxm-8", ranks=8, stack="megatron")
    given = [pk.Strategy(tp=2, dp=4), pk.Strategy(dp=8)]
    found = pk.explore(model, "h100-sxm-8", ranks=8, strategies=given)
    assert "does not go with lora_rank of the model, 8, as tp is 2; " in str(found)
    found = pk.explore(model, "h100-sxm-8", ranks=8)
    assert set(found.table()["tp"]) == set(found.table()["pp"]) == {1}


def test_published_iterations_with_adapters_are_predicted() -> None:
    """reference_data/published/lora_steps.csv: kernels set the pace of Qwen 7B on an A100."""
    rows = {row["row"]: row for row in read_csv(find_reference("published/lora_steps.csv"))}
    for tokens in (2048, 4096):
        compared = compare_row(rows[f"qwen-7b-lora-{tokens}"])
        assert abs(compared["error"]) < 0.07
        assert compared["low"] < compared["measured"] < compared["high"]
