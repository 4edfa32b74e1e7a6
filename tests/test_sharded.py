"""Transformers against their twins: shared weights, accumulated gradients, layers computed again,
other architectures.

Parameters of presets are those that their authors, or the model cards on Hugging Face, state.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

from perfkit.prediction.predictor import predict
from perfkit.workloads.graph import Graph
from perfkit.workloads.transformer import Transformer

torch = pytest.importorskip("torch", reason="the twins need torch: pip install 'perfkit[measure]'")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from perfkit.recording.modules import build_step  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

SIZES = {"hidden": 64, "heads": 4, "vocabulary": 300, "positions": 48, "sequence": 16, "batch": 48}
WAYS = ("ddp", "zero1", "zero2", "fsdp")
TINY = {"hidden": 64, "vocabulary": 304, "positions": 48, "sequence": 16}
MORE: dict[str, dict[str, int]] = {"gpt2": {}, "llama-3-8b": {"kv_heads": 2, "inner": 176}}
NARROW = {"dtype": "bf16", "mixed": True}
ALL = {"accumulate": 3, "checkpoint": True}
#: Names by which a device or the way to update a list tells its kernels apart.
SAME = {"efficient_attention": "flash_attention", "attention_for_cpu": "attention", "div_": "div"}


class Block(nn.Sequential):
    """A layer, computed again in the backward pass if asked to."""

    def forward(self, x: Any) -> Any:
        if self.again:
            return checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)


def shard(net: Any, model: Transformer, ranks: int, device: str) -> None:
    policy = MixedPrecisionPolicy()
    if model.mixed:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    settings: dict[str, Any] = {"mesh": init_device_mesh(device, (ranks,)), "mp_policy": policy}
    for part in net:
        if isinstance(part, Block):
            fully_shard(part, reshard_after_forward=model.parallel == "fsdp", **settings)
    fully_shard(net, **settings)


def make_net(model: Transformer) -> nn.Sequential:
    """The layers of a Transformer in blocks."""
    plain = Transformer(
        **{
            **vars(model),
            "mixed": False,
            "dtype": "fp32",
            "parallel": "ddp",
            "accumulate": 1,
            "checkpoint": False,
        }
    )
    parts = list(build_step(plain)[1])
    first, layers = (1, 2) if model.causal else (2, 4)
    end = first + layers * model.layers
    blocks = []
    for start in range(first, end, layers):
        block = Block(*parts[start : start + layers])
        block.again = model.checkpoint
        blocks.append(block)
    return nn.Sequential(*parts[:first], *blocks, *parts[end:])


def make_twin(model: Transformer, ranks: int, device: str) -> Callable[[], Any]:
    """The step of a Transformer, layer by layer in blocks."""
    net: Any = make_net(model).to(device)
    is_sharded = model.parallel != "ddp"
    if is_sharded:
        shard(net, model, ranks, device)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=device == "cuda")
    batch = model.batch // ranks // model.accumulate
    tokens = torch.randint(0, 300, (batch, model.sequence)).to(device)
    types = torch.zeros_like(tokens)

    def region() -> Any:
        if model.mixed and not is_sharded:
            return torch.autocast(device, torch.bfloat16)
        return nullcontext()

    def step() -> None:
        optimizer.zero_grad()
        for number in range(model.accumulate):
            if model.parallel == "zero1":
                is_last = number + 1 == model.accumulate
                net.set_requires_gradient_sync(is_last)
                net.set_reshard_after_backward(is_last)
            with region():
                scores = net((tokens, types)).view(-1, 300)
                if model.mixed and is_sharded:
                    scores = scores.float()
                loss = nn.functional.cross_entropy(scores, tokens.view(-1))
            loss.backward()
        optimizer.step()

    return step


def name_all(graph: Graph) -> list[str]:
    names = [label.name.removeprefix("_scaled_dot_product_") for label in graph.labels]
    for theirs, ours in SAME.items():
        names = [name.replace(theirs, ours) for name in names]
    return names


class Spread(NamedTuple):
    """A step that is spread over ranks: layers, ranks, device, and how it differs from one rank."""

    layers: int
    ranks: int
    device: str
    changes: dict[str, Any]


BOTH = {**ALL, **NARROW}
STEPS = [
    Spread(2, 1, "cpu", {"checkpoint": True, "causal": True}),
    Spread(2, 1, "cpu", {"checkpoint": True, "causal": False}),
    Spread(2, 1, "cpu", {**ALL, "causal": True}),
    Spread(2, 1, "cpu", {**ALL, "causal": False}),
    Spread(4, 1, "cuda", ALL),
    Spread(1, 8, "cuda", {"parallel": "fsdp"}),
    Spread(3, 8, "cuda", {"parallel": "fsdp"}),
    Spread(7, 8, "cuda", {"parallel": "fsdp"}),
    Spread(4, 8, "cuda", {"parallel": "fsdp", **BOTH}),
    Spread(4, 8, "cuda", {"parallel": "fsdp", **ALL}),
    Spread(4, 8, "cuda", {"parallel": "zero2", **BOTH}),
    Spread(4, 8, "cuda", {"parallel": "zero2", **ALL}),
    Spread(3, 8, "cuda", {"parallel": "zero1", **ALL}),
    Spread(3, 8, "cuda", {"parallel": "zero1", **NARROW}),
    Spread(3, 8, "cuda", {"parallel": "zero1", **BOTH}),
    Spread(3, 8, "cuda", {"parallel": "fsdp", "causal": False}),
    Spread(3, 8, "cpu", {"parallel": "fsdp"}),
]


def list_collectives(graph: Graph) -> list[tuple[str, float]]:
    """Names and bytes of collectives, in their order."""
    nbytes = graph.column("nbytes")
    return [(graph.labels[place].name, nbytes[place]) for place in graph.collectives]


def sort_waits(graph: Graph) -> list[Any] | None:
    """What waits for what, if anything does."""
    return None if graph.waits is None else sorted(graph.waits)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_spread_step_is_recorded_as_it_runs(step: Spread) -> None:
    """The same operations and collectives with the same bytes, in the same order, waited for at the
    same places."""
    fields = {"name": "t", "causal": True, "layers": step.layers, **SIZES, **step.changes}
    model = Transformer(**fields)
    ours = model.graphs(step.ranks, accelerator=step.device == "cuda")[0]
    theirs = capture(
        lambda: make_twin(model, step.ranks, step.device), ranks=step.ranks, device=step.device
    )
    sums_gradients = model.parallel == "zero1" and model.mixed and model.accumulate > 1
    is_exact = step.device == "cuda" and model.causal and not sums_gradients
    assert sorted(name_all(ours)) == sorted(name_all(theirs))
    if is_exact:
        assert name_all(ours) == name_all(theirs)
        assert sort_waits(ours) == sort_waits(theirs)
    assert ours.traffic.sum() == pytest.approx(theirs.traffic.sum(), rel=2e-3)
    assert ours.column("flops").sum() == theirs.column("flops").sum()
    assert ours.parameters == theirs.parameters
    assert list_collectives(ours) == list_collectives(theirs)
    calls = theirs.column("calls").sum()
    near = 0.1 if is_exact else 0.3
    assert ours.column("calls").sum() == pytest.approx(calls, rel=near)


@pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
def test_gathering_is_hidden_behind_work_but_for_the_first() -> None:
    sizes = {"batch": 128, "sequence": 1024, "layers": 12, "dtype": "bf16"}
    found = {
        way: predict(Transformer.preset("mpt-1b", parallel=way, **sizes), "h100-sxm-8", ranks=8)
        for way in WAYS
    }
    for way, r in found.items():
        idle, spent = r.idle()["communication_s"][0], r.communication().row(0, named=True)
        assert (idle > 0) == (way != "ddp") and idle < 0.2 * spent["total_s"], (
            "collectives take from kernels beside"
        )
        assert spent["total_s"] == pytest.approx(spent["exposed_s"] + spent["overlapped_s"])
    sent = {way: len(r.timeline().filter(kind="collective")) for way, r in found.items()}
    assert sent["fsdp"] == 13 + 12 + 13 and sent["zero1"] == sent["zero2"] == 13 + 13
    updates = {
        way: r.breakdown().filter(phase="update")["time_s"].sum() for way, r in found.items()
    }
    assert updates["ddp"] > 6 * updates["zero1"] and updates["zero1"] == pytest.approx(
        updates["fsdp"]
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("mpt-125m", 125_311_488),
        ("mpt-760m", 760_470_528),
        ("mpt-1b", 1_315_950_592),
        ("mpt-3b", 2_651_837_440),
        ("mpt-7b", 6_658_859_008),
        ("mpt-13b", 12_853_954_560),
        ("mpt-30b", 29_975_214_080),
        ("mpt-70b", 64_862_437_376),
        ("mpt-350m", 355_985_408),
        ("bert-base", 109_514_298),
        ("bert-large", 335_174_458),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_parameters(name: str, parameters: int) -> None:
    assert Transformer.preset(name, sequence=16).graphs()[0].parameters == parameters


def list_products(graph: Graph) -> list[tuple[Any, ...]]:
    """Name, sizes and bytes of products, gradients of lookups, SiLU and the loss: in any order,
    transposed or not."""
    kept = (
        "mm",
        "addmm",
        "silu",
        "silu_backward",
        "embedding_dense_backward",
        "_log_softmax",
        "nll_loss_backward",
    )
    found = zip(
        graph.labels,
        *(graph.column(size).tolist() for size in "mnk"),
        graph.traffic.tolist(),
        strict=True,
    )
    return sorted(
        (label.name, min(m, n), max(m, n), k, sent)
        for label, m, n, k, sent in found
        if label.name in kept
    )


@pytest.mark.parametrize(
    ("name", "head"), [("llama-3-8b", 0), ("llama-3-8b", 24), ("qwen3", 24), ("gpt2", 0)]
)
def test_products_are_those_of_transformers(name: str, head: int) -> None:
    """Norms, positions and activations differ: there they are many small operations, here the
    kernels of GPUs."""
    theirs = pytest.importorskip(
        "transformers", reason="needs transformers: pip install 'perfkit[models]'"
    )
    about = {
        "layers": 2,
        "heads": 4,
        "batch": 4,
        "dropout": 0.1 * (name == "gpt2"),
        "head_width": head,
    }
    base = name.replace("qwen3", "llama-3-8b")
    model = Transformer.preset(base, qk_norm=name == "qwen3", **about, **(TINY | MORE[base]))
    if name == "gpt2":
        config = theirs.GPT2Config(304, 48, 64, 2, 4, use_cache=False)
        kind = theirs.GPT2LMHeadModel
    else:
        more = {
            "num_key_value_heads": 2,
            "max_position_embeddings": 48,
            "use_cache": False,
            "head_dim": head or 16,
        }
        config, kind = theirs.LlamaConfig(304, 64, 176, 2, 4, **more), theirs.LlamaForCausalLM
        if name == "qwen3":  # with norms of queries and keys
            config, kind = theirs.Qwen3Config(304, 64, 176, 2, 4, **more), theirs.Qwen3ForCausalLM

    def make_step() -> Callable[[], Any]:
        net = kind(config).to("cuda")
        optimizer, tokens = (
            torch.optim.AdamW(net.parameters(), foreach=True),
            torch.randint(0, 304, (4, 16)).to("cuda"),
        )

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                net(tokens).logits.view(-1, 304), tokens.view(-1)
            ).backward()
            optimizer.step()

        return step

    ours, captured = model.graphs(1, accelerator=True)[0], capture(make_step, device="cuda")
    assert list_products(ours) == list_products(captured) and ours.parameters == captured.parameters
    assert [label.name for label in ours.labels].count("native_dropout") == (
        5 if name == "gpt2" else 0
    )
