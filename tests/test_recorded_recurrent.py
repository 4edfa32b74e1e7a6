"""Recurrent layers that are captured for a GPU: one call of cuDNN for all layers and steps."""

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence  # noqa: E402

from perfkit.recording.steps import capture  # noqa: E402
from perfkit.workloads.graph import Graph  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

SAMPLES, STEPS, INPUTS, HIDDEN = 4, 6, 16, 32
#: Steps of each sample where they are packed.
LENGTHS = [6, 4, 2, 1]
#: Gates of a step.
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


def record(
    kind: Callable[..., nn.Module], *, packed: bool = False, amp: Any = None, **settings: Any
) -> Graph:
    """The graph of a step of two layers, and that nothing is said of it."""

    def make_step() -> Any:
        net = kind(INPUTS, HIDDEN, 2, **settings).to("cuda")
        x = torch.randn(STEPS, SAMPLES, INPUTS, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", amp or torch.bfloat16, enabled=amp is not None):
                given = pack_padded_sequence(x, LENGTHS) if packed else x
                out = net(given)[0]
                out = out.data if packed else out
            out.float().sum().backward()

        return step

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return capture(make_step, device="cuda")


def count_flops(kind: Any, *, tokens: int, directions: int = 1, outputs: int = HIDDEN) -> float:
    """FLOP of both passes of two layers by hand: three times those of the forward pass."""
    numbers = GATES[kind] * HIDDEN
    first = numbers * (INPUTS + outputs)
    second = numbers * (directions * outputs + outputs)
    projections = 0 if outputs == HIDDEN else 2 * HIDDEN * outputs
    return 3 * 2.0 * tokens * directions * (first + second + projections)


@pytest.mark.parametrize("kind", GATES)
def test_layers_are_one_call(kind: Any) -> None:
    graph = record(kind)
    names = Counter(label.name for label in graph.labels)
    assert (names["_cudnn_rnn"], names["_cudnn_rnn_backward"]) == (1, 1)
    assert not names["mm"] + names["addmm"] + names["mkldnn_rnn_layer"]
    assert graph.column("flops").sum() == count_flops(kind, tokens=STEPS * SAMPLES)
    assert [label.phase for label in graph.labels if label.kind == "recurrent"] == [
        "forward",
        "backward",
    ]


def test_directions_projections_and_dropout() -> None:
    both = record(nn.GRU, bidirectional=True, dropout=0.3)
    assert both.column("flops").sum() == count_flops(nn.GRU, tokens=24, directions=2)
    projected = record(nn.LSTM, proj_size=8)
    assert projected.column("flops").sum() == count_flops(nn.LSTM, tokens=24, outputs=8)
    assert {label.variant for label in projected.labels if label.kind == "recurrent"} == {
        "forward.standard",
        "backward.standard",
    }


def test_packed_samples() -> None:
    """13 tokens in all; PyTorch takes cuDNN's standard kernel for them."""
    graph = record(nn.LSTM, packed=True)
    of_layers = [
        (label.variant, flops)
        for label, flops in zip(graph.labels, graph.column("flops"), strict=True)
        if label.kind == "recurrent"
    ]
    assert [variant for variant, _ in of_layers] == ["forward.standard", "backward.standard"]
    assert sum(flops for _, flops in of_layers) == count_flops(nn.LSTM, tokens=13)


@pytest.mark.parametrize(("amp", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_autocast(amp: Any, name: str) -> None:
    """Inputs, two states and eight weights are converted; gradients are converted back."""
    graph = record(nn.LSTM, amp=amp)
    formats = {label.kind: dtype for label, dtype in zip(graph.labels, graph.dtypes, strict=True)}
    assert formats["recurrent"] == name
    casts = Counter(label.phase for label in graph.labels if label.name == "_to_copy")
    assert casts["forward"] == 1 + 2 + 8 + 1
    assert casts["backward"] >= 8


def test_switched_off_library() -> None:
    """Without cuDNN, PyTorch runs a kernel for each step."""

    def make_step() -> Any:
        net = nn.GRU(4, 4).to("cuda")
        x = torch.randn(3, 2, 4, device="cuda")

        def step() -> None:
            with torch.backends.cudnn.flags(enabled=False):
                net(x)[0].sum().backward()

        return step

    with pytest.warns(UserWarning, match="a kernel for each time step"):
        graph = capture(make_step, device="cuda")
    assert "_cudnn_rnn" not in {label.name for label in graph.labels}


def test_on_a_cpu_nothing_changes() -> None:
    def make_step() -> Any:
        net = nn.LSTM(4, 4)
        x = torch.randn(3, 2, 4)
        return lambda: net(x)[0].sum().backward()

    names = {label.name for label in capture(make_step).labels}
    assert "mkldnn_rnn_layer" in names
    assert "_cudnn_rnn" not in names
