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
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from benchmarks.helpers.command import command
from benchmarks.helpers.tables import lay_out
from perfkit.ground.units import check_choice
from perfkit.prediction.predictor import predict

#: Sizes of `build`: layers (tables of a DLRM), width, heads, tokens of a sequence (pixels of an
#: edge of an image, lookups in a table), sequences (images, samples), and words (classes, rows of a
#: table).
SIZES = ("layers", "hidden", "heads", "sequence", "batch", "vocabulary")
_USUAL = "num_hidden_layers hidden_size num_attention_heads intermediate_size"
#: By name: class in transformers; published sizes by `SIZES`; names of layers, width, heads and
#: feed-forward width in its configuration; the feed-forward width over the width; other settings.
_MODELS: dict[str, tuple[str, tuple[int, ...], str, float, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", (12, 768, 12, 512, 8, 30522), _USUAL, 4, {}),
    "gpt2": (
        "GPT2LMHeadModel",
        (12, 768, 12, 1024, 8, 50257),
        "n_layer n_embd n_head n_inner",
        4,
        {},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        (12, 768, 12, 512, 8, 32128),
        "num_layers d_model num_heads d_ff",
        4,
        {"decoder_start_token_id": 0},
    ),
    "llama": ("LlamaForCausalLM", (32, 4096, 32, 2048, 1, 32000), _USUAL, 2.6875, {}),
    "xlnet": (
        "XLNetLMHeadModel",
        (12, 768, 12, 512, 8, 32000),
        "n_layer d_model n_head d_inner",
        4,
        {},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        (28, 3584, 28, 2048, 1, 152064),
        _USUAL,
        37 / 7,
        {"num_key_value_heads": 4},
    ),
    "mixtral": ("MixtralForCausalLM", (32, 4096, 32, 2048, 1, 32000), _USUAL, 3.5, {}),
    # of 61 layers
    "deepseek": (
        "DeepseekV3ForCausalLM",
        (4, 7168, 128, 2048, 1, 129280),
        _USUAL,
        18 / 7,
        {"num_key_value_heads": None},
    ),
    "mamba": ("MambaForCausalLM", (24, 768, 1, 64, 8, 50280), _USUAL, 2, {}),
    "vit": ("ViTForImageClassification", (12, 768, 12, 224, 32, 1000), _USUAL, 4, {}),
    "whisper": (
        "WhisperForConditionalGeneration",
        (6, 512, 8, 448, 8, 51865),
        "encoder_layers d_model encoder_attention_heads encoder_ffn_dim",
        4,
        {},
    ),
    # of 50 layers
    "resnet": ("ResNetForImageClassification", (16, 2048, 1, 224, 32, 1000), _USUAL, 1, {}),
    "dlrm": ("", (8, 64, 1, 100, 2048, 1_000_000), "", 1, {}),
}


def build(name: str, **sizes: int) -> tuple[Callable[[], Any], Mapping[str, Any]]:
    """A function that makes a model which returns a loss, and its inputs; sizes by `SIZES`, by
    default as published."""
    import torch

    kind, published, names, inner, more = _MODELS[check_choice("name", name, _MODELS)]
    s = SimpleNamespace(**{**dict(zip(SIZES, published, strict=True)), **sizes})
    tokens = torch.randint(s.vocabulary, (s.batch, s.sequence))
    if name == "dlrm":
        indices = [torch.randint(s.vocabulary, (s.batch * s.sequence,)) for _ in range(s.layers)]
        offsets, labels = (
            torch.arange(0, s.batch * s.sequence, s.sequence),
            torch.randint(2, (s.batch, 1)).float(),
        )
        given = {
            "dense": torch.rand(s.batch, 512),
            "offsets": [offsets] * s.layers,
            "indices": indices,
        }
        return (lambda: _make_dlrm(s)), given | {"labels": labels}
    import transformers

    images, make = name in ("vit", "resnet"), getattr(transformers, kind)
    values = (s.layers, s.hidden, s.heads, round(inner * s.hidden))
    own = {**dict(zip(names.split(), values, strict=True)), **more}
    own["num_labels" if images else "vocab_size"] = s.vocabulary
    own |= {key.replace("encoder", "decoder"): value for key, value in own.items()}
    inputs = {"input_ids": tokens, "labels": tokens}
    if images:
        own["image_size"] = s.sequence
        inputs = {
            "pixel_values": torch.randn(s.batch, 3, s.sequence, s.sequence),
            "labels": tokens[:, 0],
        }
    elif name == "whisper":
        inputs = {"input_features": torch.randn(s.batch, 80, 3000), "labels": tokens}
    return (lambda: make(make.config_class(**own))), inputs


def _make_dlrm(s: Any) -> Any:
    """The model of dlrm_s_pytorch.py with the layers of its benchmark: Naumov 2019,
    arXiv:1906.00091."""
    import torch
    from torch import nn

    def stack(*widths: int) -> list[nn.Module]:
        return [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            bags = [
                nn.EmbeddingBag(s.vocabulary, s.hidden, mode="sum", sparse=True)
                for _ in range(s.layers)
            ]
            width = s.hidden + (s.layers + 1) * s.layers // 2
            self.tables, self.bottom = (
                nn.ModuleList(bags),
                nn.Sequential(*stack(512, 512, s.hidden)),
            )
            self.top = nn.Sequential(*stack(width, 1024, 1024, 1024, 1)[:-1], nn.Sigmoid())

        def forward(self, dense: Any, offsets: Any, indices: Any, labels: Any) -> Any:
            x = self.bottom(dense)
            rows = [table(i, o) for table, i, o in zip(self.tables, indices, offsets, strict=True)]
            vectors = torch.cat([x, *rows], dim=1).view(len(x), -1, x.shape[1])
            pairs = [(i, j) for i in range(vectors.shape[1]) for j in range(i)]
            first, second = (
                torch.tensor(part, device=x.device) for part in zip(*pairs, strict=True)
            )
            products = torch.bmm(vectors, vectors.transpose(1, 2))[:, first, second]
            scores = self.top(torch.cat([x, products], dim=1))
            return SimpleNamespace(loss=nn.functional.binary_cross_entropy(scores, labels))

    return Net()


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
    given = {
        key: [t.to(device) for t in one] if isinstance(one, list) else one.to(device)
        for key, one in inputs.items()
    }
    real = torch.cuda.is_available()
    with torch.device(device) if real else nullcontext():  # weights are made on the device
        model = make().to(device).train()
    replayed = real and execution == "graphs"  # only a real step
    kind: Any = torch.optim.SGD if name == "dlrm" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-4, **({"capturable": True} if replayed else {}))
    run = torch.compile(model) if execution == "compiled" else model
    region: Any = (
        torch.autocast(device, torch.bfloat16, cache_enabled=not replayed) if amp else nullcontext()
    )

    def step() -> None:
        optimizer.zero_grad()
        with region:
            loss = run(**given).loss
        loss.backward()
        optimizer.step()

    return step


#: Models that are captured under autocast to bf16 as well.
_AUTOCAST = ("bert", "gpt2", "llama", "vit")


def measure(name: str, device: str) -> dict[str, Any]:
    """Capture one model in this process, and price it."""
    from perfkit.recording.steps import capture

    (make, inputs), optimizer = build(name), "sgd" if name == "dlrm" else "adamw"
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(make, inputs, optimizer=optimizer, name=name, device=device)
        seconds, after = (
            time.process_time() - start,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
        found = predict(graph, "a100-sxm-8")
        about: dict[str, Any] = {"model": name, "device": device}
        about |= {"seconds": seconds, "memory": (after - before) / 1024, "operations": len(graph)}
        if device == "cuda" and name in _AUTOCAST:
            narrow = capture(
                make, inputs, optimizer=optimizer, name=name, device=device, amp="bf16"
            )
            about["ratio"] = predict(narrow, "a100-sxm-8").time / found.time
    return about | {"unmodelled": sum(found.unmodelled.values()) / found.time, "time": found.time}


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
    names = list(_MODELS) if find_spec("transformers") else ["dlrm"]
    if len(names) == 1:
        print("models of transformers are left out; install it: pip install 'perfkit[models]'")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = pool.starmap(
            measure, [(name, device) for name in names for device in ("cuda", "cpu")], chunksize=1
        )
    print(lay_out(rows, _COLUMNS, numbers=True))
