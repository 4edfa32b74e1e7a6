"""Activations and joined products of a Transformer layer: the program in PyTorch has the same operations,
and they keep the same memory."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from perfkit.platform.gallery import load_platform
from perfkit.prediction.memory import measure_memory
from perfkit.workloads.graph import Graph
from perfkit.workloads.transformer import Transformer

torch = pytest.importorskip("torch", reason="the programs are captured")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from perfkit.recording.modules import make_optimizer  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

SIZES: dict[str, Any] = {
    "batch": 2,
    "sequence": 8,
    "layers": 1,
    "hidden": 64,
    "heads": 4,
    "vocabulary": 96,
    "positions": 8,
    "attention": "flash2",
    "dtype": "bf16",
}


class Block(nn.Module):
    """The layer of a model as its fields say it: norms before attention and MLP."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.width = model.hidden // model.heads
        self.inner = model.inner or 4 * model.hidden
        keys = self.width * (model.kv_heads or model.heads)
        self.widths = [model.hidden, keys, keys]
        self.before_attention = self.make_norm()
        self.inputs = self.make_products(self.widths, joined=model.joined in ("attention", "all"))
        self.output = nn.Linear(model.hidden, model.hidden, bias=model.bias)
        self.before_mlp = self.make_norm()
        wide = [self.inner, self.inner] if model.gated else [self.inner]
        self.mlp = self.make_products(wide, joined=model.joined == "all")
        self.down = nn.Linear(self.inner, model.hidden, bias=model.bias)

    def make_norm(self) -> nn.Module:
        if self.model.norm == "rms":
            return nn.RMSNorm(self.model.hidden)
        if self.model.norm == "layer_plain":
            return nn.LayerNorm(self.model.hidden, elementwise_affine=False)
        return nn.LayerNorm(self.model.hidden, bias=self.model.norm == "layer")

    def make_products(self, widths: list[int], *, joined: bool) -> nn.ModuleList:
        if joined:
            widths = [sum(widths)]
        products = []
        for width in widths:
            products.append(nn.Linear(self.model.hidden, width, bias=self.model.bias))
        return nn.ModuleList(products)

    def activate(self, x: Any) -> Any:
        if self.model.activation == "relu":
            return F.relu(x)
        if self.model.activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self.model.activation == "gelu_tanh" else "none")

    def attend(self, x: Any) -> Any:
        batch, sequence, hidden = x.shape
        if len(self.inputs) == 1:
            q, k, v = self.inputs[0](x).split(self.widths, dim=-1)
        else:
            q, k, v = (product(x) for product in self.inputs)
        q, k, v = (part.view(batch, sequence, -1, self.width).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, hidden))

    def feed(self, x: Any) -> Any:
        if not self.model.gated:
            return self.down(self.activate(self.mlp[0](x)))
        if len(self.mlp) == 1:
            gate, up = self.mlp[0](x).split([self.inner, self.inner], dim=-1)
            return self.down(self.activate(gate) * up)
        return self.down(self.activate(self.mlp[0](x)) * self.mlp[1](x))

    def forward(self, x: Any) -> Any:
        scale = 0.22 if self.model.scaled_branches else None
        x = x + multiply(self.attend(self.before_attention(x)), scale)
        return x + multiply(self.feed(self.before_mlp(x)), scale)


def multiply(x: Any, number: float | None) -> Any:
    """A tensor times a number, or as it is."""
    return x if number is None else x * number


class Words(nn.Module):
    """Embeddings of words and positions, a layer, and a head with weights of its own."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.words = nn.Embedding(model.vocabulary, model.hidden)
        self.positions = nn.Embedding(model.positions, model.hidden)
        self.block = Block(model)
        self.norm = self.block.make_norm()
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=model.head_bias)
        self.scale_of_words = 8.0 if model.scaled_embeddings else None
        self.scale_of_logits = 0.06 if model.scaled_logits else None

    def forward(self, tokens: Any) -> Any:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        words = multiply(self.words(tokens), self.scale_of_words)
        logits = self.head(self.norm(self.block(words + self.positions(places))))
        return multiply(logits, self.scale_of_logits)


def build(model: Transformer) -> Any:
    """A training step of the model."""
    module = Words(model).to(torch.bfloat16)
    optimizer = make_optimizer(model.optimizer, module.parameters())
    tokens = torch.zeros(model.batch, model.sequence, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(module(tokens).view(-1, model.vocabulary), tokens.view(-1)).backward()
        optimizer.step()

    return step


def list_operations(graph: Graph) -> list[tuple[Any, ...]]:
    """Name, class, pass, sizes of products and bytes of each operation; attention has a name for each
    device, and positions are counted by a kernel that has no bytes to speak of."""
    product = ("flops", "batch", "m", "n", "k")
    sizes = np.stack([graph.column(name) for name in product], axis=1).tolist()
    operations: list[tuple[Any, ...]] = []
    for place, label in enumerate(graph.labels):
        name = label.name.replace("_for_cpu", "")
        if name == "arange":
            continue
        nbytes = pytest.approx(float(graph.traffic[place]), rel=0.03)  # statistics of rows are fp32
        variant = label.variant.removesuffix(".flash2")
        operations.append((name, label.kind, variant, label.phase, *sizes[place], nbytes))
    return operations


#: Changes of a small GPT-2, whose activation is given, as the twin asks for it.
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu_tanh", "joined": "attention"},
    "apart": {"activation": "gelu_tanh", "joined": "none"},
    "relu": {"activation": "relu", "joined": "none"},
    "gelu": {"activation": "gelu", "joined": "attention"},
    "grouped and joined": {"activation": "gelu", "joined": "attention", "kv_heads": 2},
    "geglu": {"activation": "gelu_tanh", "gated": True, "joined": "none", "inner": 96},
    "phi-3": {"activation": "silu", "gated": True, "joined": "all", "inner": 96, "bias": False},
    "gemma": {
        **{"activation": "gelu_tanh", "gated": True, "joined": "none", "inner": 96, "bias": False},
        **{"norm": "rms", "scaled_embeddings": True},
    },
    "granite": {
        **{"activation": "silu", "gated": True, "joined": "none", "inner": 96, "bias": False},
        **{
            "norm": "rms",
            "scaled_embeddings": True,
            "scaled_branches": True,
            "scaled_logits": True,
        },
    },
    "a bias of the head": {"activation": "relu", "joined": "none", "head_bias": True},
    "norms with a weight": {"activation": "gelu", "joined": "attention", "norm": "layer_weight"},
    "norms without weights": {"activation": "gelu", "joined": "attention", "norm": "layer_plain"},
    "one head of keys": {"activation": "relu", "joined": "all", "kv_heads": 1, "norm": "rms"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_captured_as_it_is_built(name: str) -> None:
    model = Transformer.gpt2("gpt2", **SIZES, tie=False, **VARIANTS[name])
    [built] = model.graphs(accelerator=True)
    captured = capture(partial(build, model), device="cuda")
    assert captured.parameters == built.parameters
    assert list_operations(captured) == list_operations(built)
    h100 = load_platform("h100-sxm-8")
    measured = measure_memory([captured], h100).total
    assert measured == pytest.approx(measure_memory([built], h100).total, rel=0.01)


def test_what_is_not_given_is_what_the_family_has() -> None:
    """GPT-2 joins queries, keys and values, and has GELU by a hyperbolic tangent; a Llama joins
    nothing, and gates by SiLU."""
    gpt2 = Transformer.gpt2("gpt2", **SIZES)
    told = Transformer.gpt2("gpt2", **SIZES, activation="gelu_tanh", joined="attention")
    assert list_operations(gpt2.graphs()[0]) == list_operations(told.graphs()[0])
    llama = Transformer.preset("llama-2-7b", **{**SIZES, "kv_heads": 4, "inner": 96})
    changes = {**SIZES, "kv_heads": 4, "inner": 96, "activation": "silu", "joined": "none"}
    told = Transformer.preset("llama-2-7b", **changes)
    assert list_operations(llama.graphs()[0]) == list_operations(told.graphs()[0])


def test_joined_products_change_no_number_of_parameters_and_no_flop() -> None:
    sizes = {**SIZES, "kv_heads": 2, "inner": 96, "experts": 4, "top_k": 2}
    apart = Transformer.preset("llama-3-8b", **sizes).graphs()[0]
    joined = Transformer.preset("llama-3-8b", **sizes, joined="all").graphs()[0]
    assert joined.parameters == apart.parameters
    assert joined.column("flops").sum() == apart.column("flops").sum()
    assert len(joined.labels) < len(apart.labels)


def test_roberta_has_one_type_of_tokens() -> None:
    """Its embedding of types has a row less than BERT's."""
    bert = Transformer.bert(**{**SIZES, "heads": 2}).graphs()[0]
    roberta = Transformer.bert(**{**SIZES, "heads": 2}, token_types=1).graphs()[0]
    assert bert.parameters - roberta.parameters == SIZES["hidden"]
    assert [label.name for label in bert.labels] == [label.name for label in roberta.labels]
