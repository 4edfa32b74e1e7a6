"""Arguments of `capture` as people have them: devices, number formats, optimizers, micro-batches."""

from collections import Counter
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from perfkit.prediction.recordings import record  # noqa: E402
from perfkit.recording.arguments import read_device  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402


def train(**arguments: Any) -> Any:
    """Capture a layer with its inputs."""
    net = arguments.pop("net", None) or nn.Linear(8, 4)
    return capture(net, torch.randn(2, 8), **arguments)


def list_names(graph: Any, phase: str) -> list[str]:
    return [label.name for label in graph.labels if label.phase == phase]


@pytest.mark.parametrize("device", ["cuda:3", torch.device("cuda", 1), 0])
def test_devices_are_named_as_in_pytorch(device: Any) -> None:
    assert train(device=device).labels == train(device="cuda").labels
    with record(device=device) as recording:
        net = nn.Linear(4, 4).to("cuda")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            net(torch.randn(2, 4, device="cuda")).sum().backward()
            optimizer.step()
    assert recording.graph.device == "cuda"


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", -1, 1.5, True, None])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match=r"device is .*; known are cpu, cuda"):
        read_device(device)


@pytest.mark.parametrize(("given", "name"), [(torch.bfloat16, "bf16"), ("float16", "fp16")])
def test_formats_of_autocast_are_named_as_in_pytorch(given: Any, name: str) -> None:
    assert train(amp=given, device="cuda").labels == train(amp=name, device="cuda").labels
    with pytest.raises(ValueError, match=r"amp is torch.float64; known are bf16, fp16"):
        train(amp=torch.float64)


def test_an_optimizer_is_a_name_a_class_what_builds_one_or_the_optimizer_itself() -> None:
    by_name = train(optimizer="adam").labels
    assert train(optimizer=torch.optim.Adam).labels == by_name
    assert train(optimizer=partial(torch.optim.Adam, lr=0.1)).labels == by_name
    net = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(net.parameters())
    assert train(net=net, optimizer=optimizer).labels == by_name
    assert not optimizer.state
    assert net.weight.grad is None
    assert train(optimizer=torch.optim.Rprop).updated_by == "rprop"


def test_an_optimizer_that_does_not_fit_is_refused() -> None:
    other = torch.optim.Adam(nn.Linear(8, 4).parameters())
    with pytest.raises(
        ValueError, match=r"weights that the model does not have; .*torch.optim.Adam"
    ):
        train(optimizer=other)
    with pytest.raises(
        ValueError, match=r"cannot be built .*'lr'.*functools.partial\(Own, lr=0.1\)"
    ):
        train(optimizer=Own)
    with pytest.raises(ValueError, match=r"made a list; it must make a torch.optim.Optimizer"):
        train(optimizer=list)
    with pytest.raises(ValueError, match=r"optimizer is 'adan'; known are .*did you mean 'adam'"):
        train(optimizer="adan")
    with pytest.raises(ValueError, match=r"optimizer is LBFGS, whose step needs a closure"):
        train(optimizer=torch.optim.LBFGS)


def test_what_is_no_model_and_what_is_no_loss_are_refused() -> None:
    with pytest.raises(ValueError, match=r"make_step returned None, .*it must return the model"):
        capture(lambda: None, torch.randn(2, 8))
    with pytest.raises(ValueError, match=r"loss returned None; it must return the loss"):
        train(loss=lambda out: None)


class Own(torch.optim.SGD):
    """An optimizer that needs its learning rate."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, lr=lr)


@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batches_have_one_update_and_one_exchange(ranks: int) -> None:
    one, four = (train(accumulate=n, ranks=ranks, optimizer="sgd") for n in (1, 4))
    assert list_names(four, "update") == list_names(one, "update")
    assert len(four.collectives) == len(one.collectives) == ranks - 1
    backward = [Counter(list_names(graph, "backward")) for graph in (one, four)]
    assert backward[1]["mm"] == 4 * backward[0]["mm"] > 0
    forward = [Counter(list_names(graph, "forward")) for graph in (one, four)]
    assert forward[1]["addmm"] == 4


@pytest.mark.parametrize(
    "argument", [{"accumulate": 2}, {"loss": torch.sum}, {"optimizer": torch.optim.Adam}]
)
def test_arguments_of_a_model_need_its_inputs(argument: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(argument))} is .*, and inputs are not given"):
        capture(lambda: lambda: None, **argument)


def test_micro_batches_need_a_number() -> None:
    with pytest.raises(ValueError, match="accumulate is 0"):
        train(accumulate=0)
