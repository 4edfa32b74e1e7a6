"""Does a capture record the operations of the real step, in its order, where views are changed in
place and where gradients lie in memory in unusual ways?"""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import perfkit as pk  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402
from perfkit.workloads.vocabulary import VIEWS  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

#: Operations of autograd itself, which a graph does not have.
NO_WORK = ("_record_function_enter_new", "_record_function_exit", "is_same_size")


class Names(TorchDispatchMode):
    """Names of the operations that run, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name not in VIEWS and name not in NO_WORK:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def compare(make_step: Callable[[], Callable[[], None]]) -> list[str]:
    """Names of a captured step, which are those of the real one."""
    step = make_step()
    step()
    with Names() as real:
        step()
    captured = [label.name for label in capture(make_step).labels]
    assert captured == real.names
    return captured


# -- views that are changed in place

CHANGES: dict[str, Callable[[Any], Any]] = {
    "slice": lambda y: y[:, 1:].mul_(2.0),
    "select": lambda y: y[0].relu_(),
    "view": lambda y: F.relu(y.view(-1), inplace=True),
    "view of a view": lambda y: y.view(2, 2, 8)[0].t().add_(1.0),
    "unsqueeze": lambda y: y.unsqueeze(0).mul_(3.0),
    "transpose": lambda y: y.t().sigmoid_(),
    "diagonal": lambda y: y.diagonal().mul_(2.0),
    "twice": lambda y: y[1:].mul_(2.0)[:, 1:].add_(1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_of_a_view_that_was_changed_in_place_go_back_as_those_of_the_real_step(
    change: str,
) -> None:
    def make_step() -> Callable[[], None]:
        layer = nn.Linear(8, 8)

        def step() -> None:
            y = layer(torch.randn(4, 8)).sin()
            view = CHANGES[change](y)
            (view.cos().sum() + y.sum()).backward()

        return step

    # the view's gradient is put into memory as large as its base
    assert "new_zeros" in compare(make_step)


def test_another_view_of_a_base_that_was_changed_goes_back_as_in_the_real_step() -> None:
    def make_step() -> Callable[[], None]:
        layer = nn.Linear(8, 8)

        def step() -> None:
            y = layer(torch.randn(4, 8)).sin()
            other = y.view(2, 16)
            y[0].mul_(2.0)
            other.cos().sum().backward()

        return step

    assert "new_zeros" in compare(make_step)


def test_a_view_that_is_not_changed_keeps_its_own_gradient() -> None:
    def make_step() -> Callable[[], None]:
        layer = nn.Linear(8, 8)

        def step() -> None:
            layer(torch.randn(4, 8)).sin()[:, 1:].cos().sum().backward()

        return step

    assert "slice_backward" in compare(make_step)


# -- tensors without contents that are used past the capture's modes


def test_a_loss_that_a_step_leaves_behind_can_be_used_and_has_no_value() -> None:
    losses = []

    def make_step() -> Callable[[], None]:
        layer = nn.Linear(8, 8)

        def step() -> None:
            loss = layer(torch.randn(4, 8)).sum()
            loss.backward()
            losses.extend([loss.detach(), layer.weight])

        return step

    capture(make_step)
    loss, weight = losses[-2:]
    assert (torch.ones(4, 8) @ weight).shape == (4, 8)
    assert (loss * 2).shape == ()
    assert weight.grad.add(1).shape == (8, 8)
    with pytest.raises(Exception, match="_local_scalar_dense"):
        float(loss + 1)


class _Pictures(torch.utils.data.Dataset[torch.Tensor]):
    """Pictures that a program reads from a file, and turns to arrays one by one."""

    def __init__(self) -> None:
        self.pictures = torch.frombuffer(bytearray(1 << 21), dtype=torch.uint8).view(-1, 16)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.pictures[index].numpy() / 255).float()


def test_pictures_that_a_data_set_turns_to_arrays_are_real() -> None:
    with (
        pytest.warns(UserWarning, match="batches of a data loader"),
        pk.record(device="cpu") as recording,
    ):
        net = nn.Linear(16, 2)
        optimizer = torch.optim.SGD(net.parameters())
        for batch in DataLoader(_Pictures(), batch_size=4):
            optimizer.zero_grad()
            net(batch).sum().backward()
            optimizer.step()
    assert [label.name for label in recording.graph.labels].count("addmm") == 1


def test_batches_of_computed_rows_are_put_together() -> None:
    def make_step() -> Callable[[], None]:
        layer = nn.Linear(8, 8)
        rows = torch.randn(6, 8) @ torch.randn(8, 8)

        def step() -> None:
            for (batch,) in DataLoader(TensorDataset(rows), batch_size=3):
                layer(batch).sum().backward()

        return step

    with pytest.warns(UserWarning, match="batches of a data loader count as ready"):
        graph = capture(make_step)
    assert [label.name for label in graph.labels].count("addmm") == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_tensor_that_an_earlier_capture_left_serves_a_later_one(dtype: torch.dtype) -> None:
    """As angles of positions do that a program makes once and keeps."""
    kept: list[Any] = []

    def make_step() -> Callable[[], None]:
        layer = nn.Linear(8, 8)

        def step() -> None:
            if not kept:
                kept.append(torch.ones(2, 4, dtype=dtype).unsqueeze(1))
            y = layer(torch.randn(2, 6, 8)).view(2, 6, 4, 2)
            turned = torch.view_as_complex(y) if dtype.is_complex else y[..., 0]
            product = turned * kept[0]
            (torch.view_as_real(product) if dtype.is_complex else product).sum().backward()

        return step

    first, second = capture(make_step), capture(make_step)
    names = [[label.name for label in graph.labels] for graph in (first, second)]
    kept.clear()
    assert names[1] == compare(make_step)
    assert len(names[0]) >= len(names[1]), "the first one makes what is kept"


# -- gradients that lie in memory in unusual ways

LAYERS: dict[str, Callable[[Any], Any]] = {
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "log softmax": lambda x: F.log_softmax(x, -1),
    "squared error": lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="none"),
    "smooth error": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"),
    "Huber's error": lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "group norm": lambda x: F.group_norm(x, 2),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "elu": F.elu,
    "relu6": F.relu6,
    "hard swish": F.hardswish,
    "hard sigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "leaky relu": F.leaky_relu,
    "gelu": F.gelu,
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("turned", ["gradient", "input", "both", "expanded gradient"])
def test_results_lie_in_memory_as_those_of_the_real_step(layer: str, turned: str) -> None:
    """Of a turned result `contiguous` makes a copy, of others none."""

    def make_step() -> Callable[[], None]:
        first, last = nn.Linear(8, 8), nn.Linear(6, 6)

        def step() -> None:
            x = first(torch.randn(2, 6, 8))
            if turned in ("input", "both"):
                x = x.view(2, 8, 6).transpose(1, 2)
            y = LAYERS[layer](x)
            if turned in ("gradient", "both"):
                y = last(y.transpose(1, 2))
            y.sum().backward()

        return step

    compare(make_step)
