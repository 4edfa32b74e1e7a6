"""What a captured step is told of the device of its tensors, and which copies it makes by that."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from torch import nn  # noqa: E402

from perfkit.platform.estimates import keep_quiet  # noqa: E402
from perfkit.platform.gallery import load_platform  # noqa: E402
from perfkit.prediction.predictor import predict  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402
from perfkit.workloads.graph import Graph  # noqa: E402

HOST = torch.device("cpu")
GPU = torch.device("cuda", 0)
BATCH = torch.randn(64, 8)


def list_transfers(graph: Graph) -> list[str]:
    """Directions of the copies between host and GPU."""
    return [graph.labels[place].variant for place in graph.transfers]


def describe(tensor: Any) -> dict[str, Any]:
    """All that a script can ask of the place of a tensor."""
    return {
        "device": tensor.device,
        "device as text": str(tensor.device),
        "type": tensor.device.type,
        "number": tensor.get_device(),
        "number by a function": torch.get_device(tensor),
        "is_cuda": tensor.is_cuda,
        "is_cpu": tensor.is_cpu,
        "is the first GPU": tensor.device == torch.device("cuda:0"),
        "device of new zeros": tensor.new_zeros(3).device,
        "device of zeros beside it": torch.zeros(3, device=tensor.device).device,
    }


ON_GPU = {
    "device": GPU,
    "device as text": "cuda:0",
    "type": "cuda",
    "number": 0,
    "number by a function": 0,
    "is_cuda": True,
    "is_cpu": False,
    "is the first GPU": True,
    "device of new zeros": GPU,
    "device of zeros beside it": GPU,
}
ON_HOST = {
    "device": HOST,
    "device as text": "cpu",
    "type": "cpu",
    "number": -1,
    "number by a function": -1,
    "is_cuda": False,
    "is_cpu": True,
    "is the first GPU": False,
    "device of new zeros": HOST,
    "device of zeros beside it": HOST,
}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_step_is_told_where_its_tensors_are(device: str) -> None:
    """A script that moves model and batch to a device, and asks where its tensors are."""
    moved: dict[str, Any] = {}
    left: dict[str, Any] = {}

    def make_step() -> Callable[[], None]:
        net = nn.Linear(8, 8).to(device)
        data = torch.randn(64, 8)

        def step() -> None:
            x = data.to(device)
            batch = BATCH.to(device)
            out = net(x + batch)
            moved["input"] = describe(x)
            moved["batch"] = describe(batch)
            moved["output"] = describe(out)
            moved["weight"] = describe(net.weight)
            moved["first parameter"] = describe(next(net.parameters()))
            left["data"] = describe(data)
            left["global"] = describe(BATCH)
            left["computed"] = describe(BATCH * 2)
            left["slice"] = describe(data[:3])
            left["zeros"] = describe(torch.zeros(3))
            out.sum().backward()

        return step

    graph = capture(make_step, device=device)
    for name, answers in moved.items():
        assert answers == (ON_GPU if device == "cuda" else ON_HOST), name
    for name, answers in left.items():
        assert answers == ON_HOST, name
    assert list_transfers(graph) == (["to_device", "to_device"] if device == "cuda" else [])
    assert BATCH.device == HOST


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_step_that_names_no_device_is_on_that_of_the_capture(device: str) -> None:
    """To pass on the device of a tensor names no GPU."""
    answers = list[Any]()

    def make_step() -> Callable[[], None]:
        net = nn.Linear(8, 8)

        def step() -> None:
            x = torch.randn(64, 8, device=net.weight.device)
            same = BATCH.to(x.device) + x.to(torch.device(x.device))
            out = nn.Linear(8, 8).to(x.device)(net(same))
            answers[:] = [out.device.type, BATCH.device.type, torch.zeros(3).device.type]
            out.sum().backward()

        return step

    graph = capture(make_step, device=device)
    assert answers == [device, device, device]
    assert not list_transfers(graph)
    assert not graph.notes


@pytest.mark.parametrize(("device", "format"), [("cuda", "bf16"), ("cpu", "fp32")])
def test_a_branch_by_the_device_of_a_tensor_is_that_of_the_device(device: str, format: str) -> None:
    """As in training scripts: mixed precision on a GPU alone."""

    def make_step() -> Callable[[], None]:
        net, x = nn.Linear(8, 8).to(device), torch.randn(64, 8).to(device)

        def step() -> None:
            low = x.device.type == "cuda"
            with torch.autocast(x.device.type, torch.bfloat16, enabled=low):
                loss = net(x).sum()
            loss.backward()

        return step

    graph = capture(make_step, device=device)
    assert graph.dtype == format


class Doubled(torch.autograd.Function):
    """A function of the user that makes tensors in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * torch.full((1,), 2.0, device=x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        assert gradient.is_cuda
        factor = torch.full((1,), 2.0, device=gradient.device)
        return gradient * factor.to("cuda") * torch.ones(1, device="cuda")


def test_code_of_the_user_in_the_backward_pass_is_on_the_gpu() -> None:
    seen = list[Any]()

    def make_step() -> Callable[[], None]:
        net, x = nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda")
        net.weight.register_hook(
            lambda g: seen.append(g.device) or torch.zeros_like(g, device="cuda")
        )
        return lambda: Doubled.apply(net(x)).sum().backward()

    graph = capture(make_step, device="cuda")
    assert set(seen) == {GPU}
    assert not graph.notes
    names = [label.name for label in graph.labels if label.phase == "backward"]
    assert names.count("mul") == 2


@pytest.mark.filterwarnings("ignore::perfkit.ExtrapolationWarning")
def test_a_copy_on_the_host_is_a_tensor_of_its_own() -> None:
    """What is changed in a copy is not changed in the original, and it takes no memory of the
    GPU."""
    sizes = list[int]()

    def make_step(kept: bool) -> Callable[[], None]:
        net, x = nn.Linear(512, 512).cuda(), torch.randn(64, 512, device="cuda")
        lengths = torch.arange(1, 5, device="cuda")

        def step() -> None:
            copied = lengths.cpu()
            copied += 10
            sizes.append(int(lengths.max()))
            out = net(x)
            if kept:
                outs.append(out.detach().to("cpu"))
            out.sum().backward()

        outs = list[Any]()
        return step

    plain = capture(lambda: make_step(False), device="cuda")
    graph = capture(lambda: make_step(True), device="cuda")
    assert set(sizes) == {4}
    assert list_transfers(plain) == ["to_host"]
    assert list_transfers(graph) == ["to_host", "to_host"]
    total = predict(graph, "h100-sxm-8").memory().total
    assert total == predict(plain, "h100-sxm-8").memory().total


def copy_and_read(loss: Any) -> float:
    return float(loss.cpu())


@pytest.mark.parametrize("read", [copy_and_read, float])
def test_a_number_on_the_host_is_read_without_another_copy(read: Callable[[Any], float]) -> None:
    def make_step() -> Callable[[], None]:
        net, x = nn.Linear(8, 8).cuda(), torch.randn(64, 8, device="cuda")

        def step() -> None:
            loss = net(x).sum()
            loss.backward()
            read(loss)

        return step

    assert list_transfers(capture(make_step, device="cuda")) == ["to_host"]


def test_random_states_and_the_choice_of_a_gpu_are_answered() -> None:
    """What scripts set before they train; the state of the user's random numbers is left as it
    was."""
    found = list[Any]()

    def make_step() -> Callable[[], None]:
        torch.cuda.set_device(1)
        generator = torch.Generator(device="cuda").manual_seed(3)
        net = nn.Linear(8, 8).cuda()

        def step() -> None:
            state = torch.cuda.get_rng_state()
            first = torch.rand(2, device="cuda")
            torch.cuda.set_rng_state(state)
            same = torch.equal(first, torch.rand(2, device="cuda"))
            with torch.cuda.device(0), torch.random.fork_rng(devices=[0]):
                inner = torch.cuda.current_device()
            found[:] = [same, inner, torch.cuda.current_device(), generator.device.type]
            net(torch.randn(4, 8, device="cuda", generator=generator)).sum().backward()

        return step

    before = torch.get_rng_state()
    assert not capture(make_step, device="cuda").notes
    assert found == [True, 0, 1, "cuda"]
    assert torch.equal(before, torch.get_rng_state())
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator is torch._C.Generator


def test_an_optimizer_whose_state_is_divided_among_ranks_updates_its_part() -> None:
    """Its module is compiled to TorchScript where it is imported first, here within a capture."""

    def make_step() -> Callable[[], None]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
        net = nn.parallel.DistributedDataParallel(layers, device_ids=[0])
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            net(torch.randn(4, 64, device="cuda")).sum().backward()
            optimizer.step()

        return step

    graph = capture(make_step, device="cuda", ranks=2)
    operations = [graph[place] for place in range(len(graph))]
    updates = [operation for operation in operations if operation.phase == "update"]
    names = [operation.name for operation in updates]
    assert names == ["_foreach_add_", "broadcast", "broadcast", "broadcast", "broadcast"]
    assert updates[0].features["elements"] == 64 * 65


def test_batches_of_a_loader_are_moved_from_the_host() -> None:
    def make_step() -> Callable[[], None]:
        data = torch.utils.data.TensorDataset(torch.randn(8, 8))
        loader, net = torch.utils.data.DataLoader(data, 4), nn.Linear(8, 8).cuda()

        def step() -> None:
            for (batch,) in loader:
                net(batch.to("cuda")).sum().backward()

        return step

    with pytest.warns(UserWarning, match="data loader"):
        graph = capture(make_step, device="cuda")
    assert list_transfers(graph) == ["to_device", "to_device"]


def test_what_numpy_writes_to_a_real_tensor_is_known() -> None:
    lengths, found = torch.zeros(4, dtype=torch.long), list[int]()
    array = lengths.numpy()

    def make_step() -> Callable[[], None]:
        net = nn.Linear(4, 4)

        def step() -> None:
            array[:] += 1
            found.append(int(lengths.max()))
            net(torch.randn(3, 4)).sum().backward()

        return step

    assert not capture(make_step).notes
    assert found == list(range(1, len(found) + 1))


def test_counts_of_classes_have_a_known_size() -> None:
    def make_step() -> Callable[[], None]:
        net, counts = nn.Linear(4, 4), torch.zeros(4, dtype=torch.long)

        def step() -> None:
            out = net(torch.randn(3, 4))
            counts.add_(torch.bincount(out.argmax(1), minlength=4))
            out.sum().backward()

        return step

    with pytest.warns(UserWarning, match="chosen equally often"):
        graph = capture(make_step)
    assert "bincount" in [label.name for label in graph.labels]


def test_a_compiled_step_leaves_the_checks_of_distributions_as_they_were() -> None:
    """PyTorch's compiler switches them off for the rest of the process."""
    net = nn.Linear(4, 4)
    before = torch.distributions.Distribution._validate_args
    with pytest.warns(UserWarning, match="compiled as a whole"):
        capture(lambda: partial(torch.compile(net), torch.randn(3, 4)))
    assert torch.distributions.Distribution._validate_args is before


def test_a_deep_copy_keeps_numbers_that_are_known() -> None:
    """Averaged weights of a network with batch norm, whose counter of batches is a whole number."""

    def make_step() -> Callable[[], None]:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        average = torch.optim.swa_utils.AveragedModel(net)
        counter = average.module[1].num_batches_tracked

        def step() -> None:
            net(torch.randn(3, 4)).sum().backward()
            found.append(int(counter))
            average.update_parameters(net)

        return step

    found = list[int]()
    names = [label.name for label in capture(make_step).labels]
    assert found[:2] == [0, 1]
    assert names.count("native_batch_norm") == 1
    assert any(name.startswith(("lerp", "_foreach_lerp", "copy_", "_foreach")) for name in names)


@pytest.mark.filterwarnings("ignore:the time that the host takes to pin")
@pytest.mark.parametrize("ranks", [1, 8])
def test_a_copy_of_pinned_memory_takes_its_rate_and_the_host_goes_on(ranks: int) -> None:
    def make_step(waits: bool) -> Callable[[], None]:
        model = nn.Linear(1024, 4).cuda()
        rows = torch.empty(12288, 1024).pin_memory()

        def step() -> None:
            model(rows.cuda(non_blocking=not waits)).sum().backward()

        return step

    graph = capture(partial(make_step, waits=False), device="cuda", ranks=ranks)
    assert not list_transfers(graph)
    with keep_quiet():
        parts = predict(graph, "h100-sxm-8").breakdown().to_dicts()
    (copy,) = (part for part in parts if part["kind"] == "inputs")
    assert copy["time_s"] == pytest.approx(12288 * 1024 * 4 / 5.536e10)  # what nvbandwidth reaches
    blocking = capture(partial(make_step, waits=True), device="cuda", ranks=ranks)
    assert list_transfers(blocking) == ["to_device"]


def test_a_rehearsed_platform_says_so_and_unknown_hosts_are_priced_as_pageable() -> None:
    def make_step() -> Callable[[], None]:
        model, rows = nn.Linear(64, 4).cuda(), torch.empty(8, 64).pin_memory()
        return lambda: model(rows.cuda(non_blocking=True)).sum().backward()

    with pytest.warns(UserWarning, match="pin memory"):
        graph = capture(make_step, device="cuda")
    known = load_platform("h100-sxm-8")
    with keep_quiet():
        assert not any("rehearsal" in text for text in predict(graph, known).warnings)
    origin = {"id": "rehearsal, as h100-sxm-8 predicts", "base": "h100-sxm-8"}
    device = replace(known.device, name="unknown")
    other = replace(known, provenance=origin, device=device, host_memory=None)
    with keep_quiet():
        warnings = predict(graph, other).warnings
    assert any("nothing was timed, and its numbers are those of h100" in text for text in warnings)
    assert any("priced like those of other memory, at 8.1 GB/s" in text for text in warnings)


def find_peak(graph: Graph) -> float:
    """Most memory of the GPU that is allocated at a time [B]."""
    return float(np.cumsum(graph.allocations.nbytes).max())


@pytest.mark.parametrize("pinned", [False, True])
def test_saved_tensors_move_to_the_host_and_back(pinned: bool) -> None:
    """Sines save their inputs, 12 of 8 kB: on the GPU a few are alive at a time, without hooks all."""

    def make(saves: bool) -> Any:
        def make_step() -> Any:
            weight = nn.Parameter(torch.randn(2048, device="cuda"))

            def step() -> None:
                hooks = nullcontext()
                if saves:
                    hooks = torch.autograd.graph.save_on_cpu(pin_memory=pinned)
                with hooks:
                    loss = weight
                    for _ in range(12):
                        loss = loss.sin()
                loss.sum().backward()

            return step

        return make_step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(make(saves=True), device="cuda")
        plain = capture(make(saves=False), device="cuda")
    transfers = [
        (label.variant, elements)
        for label, elements in zip(graph.labels, graph.column("elements"), strict=True)
        if label.kind == "transfer" and elements
    ]
    moved = [("to_host", 2048.0)] * 12
    if not pinned:  # copies of pinned memory run beside the host, as kernels do
        moved += [("to_device", 2048.0)] * 12
    assert transfers == moved
    assert not list_transfers(plain)
    assert find_peak(plain) - find_peak(graph) >= 8 * 8192
