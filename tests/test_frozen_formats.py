"""Frozen weights in 4 bits (QLoRA): operations and memory beside a program in PyTorch, bytes, memory and
time beside what was published, and what is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest

import perfkit as pk
from perfkit.ground.files import group_rows
from perfkit.prediction.memory import measure_memory
from perfkit.workloads.frozen_formats import FROZEN_FORMATS
from perfkit.workloads.graph import Graph
from perfkit.workloads.transformer import Transformer
from tests import test_adapters as adapters
from tests import test_twins as twins

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

pytestmark = [
    pytest.mark.usefixtures("few_calls"),
    pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning"),
]


class _MultiplyExpanded(torch.autograd.Function):
    """A product with a weight that is expanded ahead of it, forward and backward, and not kept, as
    bitsandbytes' `MatMul4Bit`. What stands for the expansion is one copy that writes all numbers."""

    @staticmethod
    def forward(ctx: Any, x: Any, packed: Any, rows: int) -> Any:
        ctx.packed, ctx.rows = packed, rows
        return torch.nn.functional.linear(x, _expand(packed, rows, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        [packed] = [ctx.packed]
        columns = 2 * packed.numel_of_codes // ctx.rows
        return dy @ _expand(packed, ctx.rows, columns), None, None


def _expand(packed: Any, rows: int, columns: int) -> Any:
    """All numbers of a weight, in bf16."""
    wide = torch.empty(rows, columns, dtype=torch.bfloat16)
    codes = packed[: packed.numel_of_codes]
    wide.view(2, packed.numel_of_codes).copy_(codes)
    return wide


class _FrozenLinear(torch.nn.Module):
    """A linear layer whose weight lies in one buffer: codes of 4 bits, and scales behind them."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        numbers = linear.weight.numel()
        stored = FROZEN_FORMATS["nf4"].count_bytes(numbers)
        self.register_buffer("packed", torch.zeros(stored, dtype=torch.uint8))
        self.numel_of_codes = numbers // 2

    def forward(self, x: Any) -> Any:
        packed = self.packed
        packed.numel_of_codes = self.numel_of_codes
        return _MultiplyExpanded.apply(x, packed, self.out_features)


def build_frozen_llama(model: Transformer) -> Any:
    """The step of a small Llama with adapters whose other products are frozen in 4 bits."""

    def make() -> Any:
        module = twins.build_llama_module()
        module.requires_grad_(False)
        for part in [*module.modules()]:
            for name, attribute in adapters.ATTRIBUTES.items():
                if not hasattr(part, attribute):
                    continue
                linear = getattr(part, attribute)
                frozen: Any = _FrozenLinear(linear)
                if name in model.adapted:
                    frozen = adapters._Adapted(frozen)
                setattr(part, attribute, frozen)
        for weight in module.parameters():
            weight.data = weight.data.to(torch.bfloat16)
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        return twins.make_llama_step(module, adapters.make_optimizer(model.optimizer, trained))

    return make


def name_operations(graph: Graph) -> list[tuple[Any, ...]]:
    """Name and sizes of products of each operation; an expansion by one name."""
    operations = []
    for name, _, variant, phase, *sizes in twins.list_operations(graph)[0]:
        if name in ("dequantize_4bit", "copy_"):
            operations.append(("expansion", phase))
        else:
            operations.append((name, variant, phase, *sizes))
    return operations


def measure(graph: Graph) -> float:
    """Bytes at the fullest moment of an iteration on a GPU."""
    return measure_memory([graph], pk.load_platform("h100-sxm-8")).total


#: What the twin of `tests.test_adapters` holds whose base is in bf16: some seconds to capture [B].
CAPTURED_IN_BF16 = 68_370_980.0


def test_a_frozen_llama_is_captured_as_it_is_built() -> None:
    """Operations in their order, and memory to the byte: the twin holds as much more than what is built
    as that with a base in bf16, whose statistics are fp32, and of which a copy of the logits lives
    longer."""
    model = replace(twins.LLAMA, lora_rank=adapters.RANK, frozen_format="nf4")
    [built] = model.graphs(accelerator=True)
    captured = twins.capture(build_frozen_llama(model), device="cuda")
    assert captured.parameters == built.parameters
    assert name_operations(captured) == name_operations(built)
    [in_bf16] = replace(model, frozen_format="").graphs(accelerator=True)
    assert measure(captured) - measure(built) == CAPTURED_IN_BF16 - measure(in_bf16)


def test_double_quantization_expands_its_scales_first() -> None:
    """And saves 0.373 of 4.5 bits (QLoRA, arXiv:2305.14314, section 3)."""
    model = Transformer.preset(
        "llama-2-7b", batch=1, sequence=64, layers=2, dtype="bf16", lora_rank=8
    )
    totals = {}
    for name in ("", "nf4", "nf4-dq"):
        of_format = replace(model, frozen_format=name)
        totals[name] = pk.predict(of_format, "a100-sxm-8", ranks=1).memory().parts["parameters"]
    numbers = 2 * (4 * 4096**2 + 3 * 4096 * 11008)
    bits = {name: 16 - 8 * (totals[""] - totals[name]) / numbers for name in ("nf4", "nf4-dq")}
    assert bits == pytest.approx({"nf4": 4.5, "nf4-dq": 4.127}, abs=5e-4)
    [graph] = replace(model, frozen_format="nf4-dq").graphs(accelerator=True)
    names = [label.name for label in graph.labels]
    # no gradient passes the first queries, keys and values
    assert names.count("dequantize_4bit") == 2 * 7 + 2 * 7 - 3
    assert names.count("dequantize_blockwise") == names.count("dequantize_4bit")
    assert names[names.index("dequantize_blockwise") + 1 :][:2] == [
        "add_offset_",
        "dequantize_4bit",
    ]


PUBLISHED = {
    (row["model"], row["frozen_format"]): row
    for rows in group_rows("model", "published", "frozen_formats.csv").values()
    for row in rows
}


def build_published(name: str, frozen_format: str) -> Transformer:
    """A Llama with a frozen base as LitGPT ran it."""
    return Transformer.preset(
        name,
        batch=1,
        sequence=1304,
        dtype="bf16",
        attention="flash2",
        lora_rank=8,
        lora_modules=("q_proj", "v_proj"),
        frozen_format=frozen_format,
    )


def count_expanded(model: Transformer) -> float:
    """Numbers of the products of layers and of the head, which LitGPT freezes in 4 bits, too."""
    hidden, inner = model.hidden, model.width_of_mlp
    return model.layers * (4 * hidden**2 + 3 * hidden * inner) + hidden * model.vocabulary


def test_memory_of_frozen_formats_beside_what_was_published() -> None:
    """What double quantization saves is as published, in training and inference: 0.30 and 0.31 GB of 7
    billion numbers, 0.59 and 0.60 of 13 billion. All that a step holds is a third less than LitGPT's
    program takes, which beside 10 % that a base in bf16 lacks holds 2 and 4 GB that no tensor explains
    (its own inference saves 9.0 GB by 4 bits, and its training 7.2)."""
    for name in ("llama-2-7b", "llama-2-13b"):
        needs = {}
        for frozen_format in ("", "nf4", "nf4-dq"):
            row = PUBLISHED[name, frozen_format]
            model = build_published(name, frozen_format)
            assert model.graphs()[0].parameters == int(row["trained"])
            needs[frozen_format] = pk.predict(model, "a100-sxm-8", ranks=1).memory().total / 1e9
            ratio = needs[frozen_format] / float(row["memory_gb"])
            assert (0.67 if frozen_format else 0.89) < ratio < 0.91
        numbers = count_expanded(build_published(name, "nf4"))
        formats = [FROZEN_FORMATS[key].count_bytes(numbers) / 1e9 for key in ("nf4", "nf4-dq")]
        saved = formats[0] - formats[1]
        for column in ("memory_gb", "inference_gb"):
            plain, double = (float(PUBLISHED[name, key][column]) for key in ("nf4", "nf4-dq"))
            assert plain - double == pytest.approx(saved, abs=0.016)
        assert needs["nf4"] - needs["nf4-dq"] == pytest.approx(saved, rel=0.025)


def test_llama_65b_fits_into_48_gb() -> None:
    """QLoRA's claim, arXiv:2305.14314: less than 48 GB of a 48 GB GPU; with checkpoints, adapters of rank
    64 on all products."""
    model = Transformer.preset(
        "llama-65b", batch=1, sequence=512, dtype="bf16", lora_rank=64, checkpoint=True
    )
    needs = {}
    for name in ("nf4", "nf4-dq"):
        of_format = replace(model, frozen_format=name)
        needs[name] = pk.predict(of_format, "a100-sxm-8", ranks=1).memory().total / 1e9
    assert needs["nf4-dq"] < 48.0
    # "approximately 3 GB for a 65B model"
    assert needs["nf4"] - needs["nf4-dq"] == pytest.approx(3.0, rel=0.05)


def test_time_of_expansions_beside_what_was_published() -> None:
    """The rate was fitted to Llama 2 7B with nf4; 13B, which was not, takes 27 % more than is said here,
    and the expansion of scales 0.98 of it and 1.15."""
    added = {}
    for name in ("llama-2-7b", "llama-2-13b"):
        times, published = {}, {}
        for frozen_format in ("", "nf4", "nf4-dq"):
            model = build_published(name, frozen_format)
            times[frozen_format] = pk.predict(model, "a100-sxm-8", ranks=1).time
            minutes = float(PUBLISHED[name, frozen_format]["minutes_of_1000_iterations"])
            published[frozen_format] = 60.0 * minutes / 1000.0
        for above, below in (("nf4", ""), ("nf4-dq", "nf4")):
            ours = times[above] - times[below]
            added[name, above] = ours / (published[above] - published[below])
    assert added["llama-2-7b", "nf4"] == pytest.approx(0.88, abs=0.05)
    assert added["llama-2-13b", "nf4"] == pytest.approx(0.73, abs=0.05)
    assert 0.8 < added["llama-2-7b", "nf4-dq"] < 1.2
    assert 0.7 < added["llama-2-13b", "nf4-dq"] < 1.2


def test_explore_and_predict_agree_with_frozen_formats() -> None:
    model = Transformer.preset(
        "llama-2-7b", batch=8, sequence=512, dtype="bf16", attention="flash2", lora_rank=16
    )
    model = replace(model, frozen_format="nf4-dq")
    for checkpoint in ("none", "full"):
        strategy = pk.Strategy(dp=8, micro_batch=1, checkpoint=checkpoint)
        one = pk.predict(model, "a100-sxm-8", strategy=strategy)
        found = pk.explore(model, "a100-sxm-8", ranks=8, strategies=[strategy]).table()
        assert found["time_s"][0] == pytest.approx(one.time, rel=0.003)
        assert found["needs_bytes"][0] == pytest.approx(one.memory().total, rel=0.005)
    found = pk.explore(replace(model, layers=2), "a100-sxm-8", ranks=8)
    assert set(found.table()["zero"]) == {0}


def test_all_checkpoints_of_a_search_may_fit() -> None:
    """None is left for which groups of layers would be tried."""
    model = Transformer.gpt2(
        batch=32, sequence=1024, dtype="bf16", lora_rank=16, frozen_format="nf4"
    )
    found = pk.explore(model, "h100-sxm-8", ranks=1, memory=20e9)
    assert found.best.checkpoint != "none"
    assert found.table()["needs_bytes"][0] < 20e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora_rank": 0, "frozen_format": "nf4"},
            "frozen_format is 'nf4' and lora_rank 0, so that there are no adapters; give lora_rank",
        ),
        (
            {"lora_rank": 0, "lora_modules": "mlp"},
            "lora_modules is 'mlp' and lora_rank 0, so that there are no adapters; give lora_rank",
        ),
        (
            {"lora_rank": 5000},
            "lora_rank is 5000 and the weight of q_proj has 4096 rows or columns; a wider adapter says no "
            "more than the weight; take at most 4096",
        ),
        ({"frozen_format": "fp4"}, "frozen_format is 'fp4'; known are"),
    ],
)
def test_settings_without_effect_are_errors(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Transformer.preset("llama-2-7b", batch=1, dtype="bf16", **{"lora_rank": 8, **changes})


def test_ranks_that_share_weights_refuse_frozen_formats() -> None:
    model = Transformer.preset(
        "llama-2-7b", batch=8, sequence=64, layers=2, dtype="bf16", lora_rank=8
    )
    model = replace(model, frozen_format="nf4")
    with pytest.raises(
        ValueError, match=r"not go with frozen_format of the model, nf4, as zero is 3; frozen"
    ):
        pk.predict(model, "a100-sxm-8", strategy=pk.Strategy(dp=8, zero=3))
    with pytest.raises(ValueError, match="parallel 'fsdp', whose ranks hold parts of weights"):
        pk.predict(replace(model, parallel="fsdp"), "a100-sxm-8", ranks=8)
