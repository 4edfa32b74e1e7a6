"""Models of the package transformers and the DLRM program, captured for training: CPU time, memory,
unknown operations.

python -m benchmarks.captures

Each has its published size, has no weights in memory, and is captured in its own process.
"""

import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.helpers.command import command
from benchmarks.helpers.tables import lay_out
from perfkit.ground.units import check_choice
from perfkit.prediction.predictor import predict

#: Names of layers, width, heads and feed-forward width in the configuration of most models.
_USUAL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
#: Models of images.
_IMAGES = ("vit", "resnet")


class Sizes(NamedTuple):
    """Sizes of `build`: layers (tables of a DLRM), width, heads, tokens of a sequence (pixels of an
    edge of an image, lookups in a table), sequences (images, samples), and words (classes, rows of
    a table) [-]."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    vocabulary: int


@dataclass(frozen=True)
class Model:
    """A model of the package transformers, or the DLRM program, with its published size.

    Parameters
    ----------
    kind : str
        Class in transformers; empty for the DLRM.
    sizes : Sizes
        As published.
    names : tuple of str
        Names of layers, width, heads and feed-forward width in its configuration.
    inner : float, optional
        Feed-forward width over the width [-].
    settings : mapping, optional
        Other settings of its configuration.
    """

    kind: str
    sizes: Sizes
    names: tuple[str, ...] = _USUAL
    inner: float = 4
    settings: Mapping[str, Any] = field(default_factory=dict)


_MODELS = {
    "bert": Model("BertForMaskedLM", Sizes(12, 768, 12, 512, 8, 30522)),
    "gpt2": Model(
        "GPT2LMHeadModel",
        Sizes(12, 768, 12, 1024, 8, 50257),
        names=("n_layer", "n_embd", "n_head", "n_inner"),
    ),
    "t5": Model(
        "T5ForConditionalGeneration",
        Sizes(12, 768, 12, 512, 8, 32128),
        names=("num_layers", "d_model", "num_heads", "d_ff"),
        settings={"decoder_start_token_id": 0},
    ),
    "llama": Model("LlamaForCausalLM", Sizes(32, 4096, 32, 2048, 1, 32000), inner=2.6875),
    "xlnet": Model(
        "XLNetLMHeadModel",
        Sizes(12, 768, 12, 512, 8, 32000),
        names=("n_layer", "d_model", "n_head", "d_inner"),
    ),
    "qwen2": Model(
        "Qwen2ForCausalLM",
        Sizes(28, 3584, 28, 2048, 1, 152064),
        inner=37 / 7,
        settings={"num_key_value_heads": 4},
    ),
    "mixtral": Model("MixtralForCausalLM", Sizes(32, 4096, 32, 2048, 1, 32000), inner=3.5),
    # of 61 layers
    "deepseek": Model(
        "DeepseekV3ForCausalLM",
        Sizes(4, 7168, 128, 2048, 1, 129280),
        inner=18 / 7,
        settings={"num_key_value_heads": None},
    ),
    "mamba": Model("MambaForCausalLM", Sizes(24, 768, 1, 64, 8, 50280), inner=2),
    "vit": Model("ViTForImageClassification", Sizes(12, 768, 12, 224, 32, 1000)),
    "whisper": Model(
        "WhisperForConditionalGeneration",
        Sizes(6, 512, 8, 448, 8, 51865),
        names=(
            "encoder_layers",
            "d_model",
            "encoder_attention_heads",
            "encoder_ffn_dim",
        ),
    ),
    # of 50 layers
    "resnet": Model("ResNetForImageClassification", Sizes(16, 2048, 1, 224, 32, 1000), inner=1),
    "dlrm": Model("", Sizes(8, 64, 1, 100, 2048, 1_000_000), names=()),
}


def _make_inputs(name: str, s: Sizes) -> dict[str, Any]:
    """Inputs of a model of transformers."""
    import torch

    tokens = torch.randint(s.vocabulary, (s.batch, s.sequence))
    if name in _IMAGES:
        images = torch.randn(s.batch, 3, s.sequence, s.sequence)
        return {"pixel_values": images, "labels": tokens[:, 0]}
    if name == "whisper":
        return {"input_features": torch.randn(s.batch, 80, 3000), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def _make_dlrm_inputs(s: Sizes) -> dict[str, Any]:
    """Dense features, offsets and indices of each table, and labels."""
    import torch

    lookups = s.batch * s.sequence
    indices = [torch.randint(s.vocabulary, (lookups,)) for _ in range(s.layers)]
    offsets = torch.arange(0, lookups, s.sequence)
    labels = torch.randint(2, (s.batch, 1)).float()
    return {
        "dense": torch.rand(s.batch, 512),
        "offsets": [offsets for _ in range(s.layers)],
        "indices": indices,
        "labels": labels,
    }


def _configure(name: str, model: Model, s: Sizes) -> dict[str, Any]:
    """Settings of the configuration of a model in transformers."""
    values = (s.layers, s.hidden, s.heads, round(model.inner * s.hidden))
    settings: dict[str, Any] = dict(zip(model.names, values, strict=True))
    settings |= model.settings
    if name in _IMAGES:
        settings["num_labels"] = s.vocabulary
    else:
        settings["vocab_size"] = s.vocabulary
    # the decoder is as large as the encoder
    for key in list(settings):
        settings[key.replace("encoder", "decoder")] = settings[key]
    if name in _IMAGES:
        settings["image_size"] = s.sequence
    return settings


def build(name: str, **sizes: int) -> tuple[Callable[[], Any], Mapping[str, Any]]:
    """A function that makes a model which returns a loss, and its inputs; sizes by `Sizes`, by
    default as published."""
    model = _MODELS[check_choice("name", name, _MODELS)]
    s = model.sizes._replace(**sizes)
    if name == "dlrm":
        inputs = _make_dlrm_inputs(s)
        return partial(_make_dlrm, s), inputs
    inputs = _make_inputs(name, s)
    return partial(_make_model, model.kind, _configure(name, model, s)), inputs


def _make_model(kind: str, settings: Mapping[str, Any]) -> Any:
    """A model of transformers with random weights."""
    import transformers

    model = getattr(transformers, kind)
    return model(model.config_class(**settings))


def _make_dlrm(s: Sizes) -> Any:
    """The model of dlrm_s_pytorch.py with the layers of its benchmark: Naumov 2019,
    arXiv:1906.00091."""
    import torch
    from torch import nn

    def stack(*widths: int) -> list[nn.Module]:
        layers = list[nn.Module]()
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return layers

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vectors = s.layers + 1
            self.tables = nn.ModuleList(
                nn.EmbeddingBag(s.vocabulary, s.hidden, mode="sum", sparse=True)
                for _ in range(s.layers)
            )
            self.bottom = nn.Sequential(*stack(512, 512, s.hidden))
            width = s.hidden + vectors * s.layers // 2
            self.top = nn.Sequential(*stack(width, 1024, 1024, 1024, 1)[:-1], nn.Sigmoid())

        def forward(self, dense: Any, offsets: Any, indices: Any, labels: Any) -> Any:
            x = self.bottom(dense)
            rows = [table(i, o) for table, i, o in zip(self.tables, indices, offsets, strict=True)]
            vectors = torch.cat([x, *rows], dim=1).view(len(x), -1, x.shape[1])
            first, second = list[int](), list[int]()
            for vector in range(vectors.shape[1]):
                for earlier in range(vector):
                    first.append(vector)
                    second.append(earlier)
            at_first = torch.tensor(first, device=x.device)
            at_second = torch.tensor(second, device=x.device)
            products = torch.bmm(vectors, vectors.transpose(1, 2))[:, at_first, at_second]
            scores = self.top(torch.cat([x, products], dim=1))
            return SimpleNamespace(loss=nn.functional.binary_cross_entropy(scores, labels))

    return Net()


def _move(inputs: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Inputs on a device."""
    moved = dict[str, Any]()
    for name, value in inputs.items():
        if isinstance(value, list):
            moved[name] = [tensor.to(device) for tensor in value]
        else:
            moved[name] = value.to(device)
    return moved


def make_step(
    name: str,
    sizes: Mapping[str, int],
    *,
    device: str = "cpu",
    amp: str = "",
    execution: str = "eager",
) -> Callable[[], None]:
    """A training step with AdamW, or SGD for the sparse gradients of the DLRM; any `amp` is
    autocast to bf16."""
    import torch

    make, inputs = build(name, **sizes)
    torch.manual_seed(0)
    moved = _move(inputs, device)
    is_real = torch.cuda.is_available()
    with torch.device(device) if is_real else nullcontext():  # weights are made on the device
        model = make().to(device).train()
    is_replayed = is_real and execution == "graphs"  # only a real step
    settings: dict[str, Any] = {"lr": 1e-4}
    if is_replayed:
        settings["capturable"] = True
    kind: Any = torch.optim.SGD if name == "dlrm" else torch.optim.AdamW
    optimizer = kind(model.parameters(), **settings)
    run = torch.compile(model) if execution == "compiled" else model
    region: Any = nullcontext()
    if amp:
        region = torch.autocast(device, torch.bfloat16, cache_enabled=not is_replayed)

    def step() -> None:
        optimizer.zero_grad()
        with region:
            loss = run(**moved).loss
        loss.backward()
        optimizer.step()

    return step


#: Models that are captured under autocast to bf16 as well.
_AUTOCAST = ("bert", "gpt2", "llama", "vit")


def _find_memory() -> int:
    """Most memory that this process has had [kB]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(name: str, device: str) -> dict[str, Any]:
    """Capture one model in this process, and price it."""
    from perfkit.recording.steps import capture

    make, inputs = build(name)
    settings: dict[str, Any] = {
        "optimizer": "sgd" if name == "dlrm" else "adamw",
        "name": name,
        "device": device,
    }
    memory = _find_memory()
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(make, inputs, **settings)
        seconds = time.process_time() - start
        memory = _find_memory() - memory
        prediction = predict(graph, "a100-sxm-8")
        row = {
            "model": name,
            "device": device,
            "seconds": seconds,
            "memory": memory / 1024,
            "operations": len(graph),
            "unmodelled": sum(prediction.unmodelled.values()) / prediction.time,
            "time": prediction.time,
        }
        if device == "cuda" and name in _AUTOCAST:
            narrow = capture(make, inputs, **settings, amp="bf16")
            row["ratio"] = predict(narrow, "a100-sxm-8").time / prediction.time
    return row


_COLUMNS = {
    "model": "{model}",
    "device": "{device}",
    "CPU time [s]": "{seconds:.1f}",
    "memory [MB]": "{memory:.0f}",
    "operations": "{operations}",
    "unmodelled": "{unmodelled:.2%}",
    "a100-sxm-8": "{time:.1fms} ms",
    "bf16 / fp32": "{ratio:.2f}",
}


@command({})
def main(given: Any) -> None:
    """Captures of models of the package transformers."""
    names = list(_MODELS)
    if not find_spec("transformers"):
        names = ["dlrm"]
        print("models of transformers are left out; install it: pip install 'perfkit[models]'")
    cases = list(product(names, ("cuda", "cpu")))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.starmap(measure, cases, chunksize=1)
    print(lay_out(rows, _COLUMNS, numbers=True))
