"""Programs that people write: a capture has the operations of a real run, or refuses them truly."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from torch import nn  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402
from torch.nn.utils.rnn import (  # noqa: E402
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from perfkit.recording.steps import capture  # noqa: E402
from perfkit.workloads.vocabulary import VIEWS  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")
Step = Callable[[], Any]


class Names(TorchDispatchMode):
    """Collects the names of the operations that PyTorch runs, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if not func.is_view and name not in VIEWS and func.namespace == "aten":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def list_real_operations(make_step: Callable[[], Step]) -> list[str]:
    """Names of the operations of the second call of a step that really computes."""
    step = make_step()
    step()
    with Names() as seen:
        step()
    return seen.names


def list_captured_operations(make_step: Callable[[], Step]) -> list[str]:
    """Names of the captured operations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [label.name for label in capture(make_step).labels]


# -- programs that are captured as they run


def pack(sort: bool, batch_first: bool) -> Callable[[], Step]:
    """A recurrent layer over sequences of known lengths, packed and padded again."""

    def make_step() -> Step:
        layer = nn.GRU(4, 4, batch_first=batch_first)
        lengths = torch.tensor([3, 2, 1, 1] if sort else [2, 3, 1, 1])
        x = torch.randn((4, 3, 4) if batch_first else (3, 4, 4))

        def step() -> None:
            packed = pack_padded_sequence(x, lengths, batch_first, sort)
            out, _ = layer(packed)
            padded, ends = pad_packed_sequence(out, batch_first, total_length=7)
            assert ends.tolist() == lengths.tolist()
            padded[ends[0] :].sum().backward()

        return step

    return make_step


def unpack() -> Step:
    """Sequences that are packed as a list, and taken apart again."""
    layer, sequences = nn.GRU(4, 4), [torch.randn(3, 4), torch.randn(2, 4)]

    def step() -> None:
        out, _ = layer(pack_sequence(sequences))
        unpack_sequence(out)[1].sum().backward()

    return step


def build_on_meta(name: str) -> Callable[[], Step]:
    """A network that is made without memory, and then given memory on a device."""

    def make_step() -> Step:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, device="meta"))
        net = net.to_empty(device=name)
        for layer in net:
            layer.reset_parameters()
        optimizer = torch.optim.SGD(net.parameters())

        def step() -> None:
            net(torch.randn(3, 4)).sum().backward()
            optimizer.step()

        return step

    return make_step


def train_outside_model(model: nn.Module) -> Callable[[], Step]:
    """A model that was made outside on the meta device, with memory for each capture."""

    def make_step() -> Step:
        net = copy.deepcopy(model).to_empty(device="cpu")
        return lambda: net(torch.randn(3, 4)).sum().backward()

    return make_step


def copy_model_in_step() -> Step:
    """A model with buffers of whole numbers, made outside, that each step copies."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    counts = []

    def step() -> None:
        copied = copy.deepcopy(net)
        copied(torch.ones(3, 4)).sum().backward()
        counts.append(int(copied[1].num_batches_tracked))
        assert counts[-1] == 1

    return step


def average_by_hand() -> Step:
    """An average of weights and of buffers, whose model is a deep copy."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    average = copy.deepcopy(net).requires_grad_(False)

    def step() -> None:
        net(torch.randn(3, 4)).sum().backward()
        with torch.no_grad():
            for kept, new in zip(
                average.state_dict().values(), net.state_dict().values(), strict=True
            ):
                if kept.is_floating_point():
                    kept.lerp_(new, 0.1)
                else:
                    kept.copy_(new)

    return step


def compare_tensors() -> Step:
    """Masks of two tensors that differ."""
    net = nn.Linear(4, 4)

    def step() -> None:
        classes = torch.tensor([1, 1, 2])
        mask = classes != torch.roll(classes, 1)
        (net(torch.ones(3, 4)).sum(1) * mask).sum().backward()
        assert int(mask.sum()) == 2

    return step


def attend_lower_right() -> Step:
    """Attention with a causal bias of as many queries as keys."""
    query, bias = nn.Parameter(torch.randn(1, 2, 8, 16)), causal_lower_right(8, 8)

    def step() -> None:
        out = nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=bias)
        out.sum().backward()

    return step


def make_of_tensors() -> Step:
    """A tensor of a list of known tensors, whose numbers say how many rows there are."""
    net = nn.Linear(4, 4)

    def step() -> None:
        sizes = torch.tensor([torch.tensor(1), torch.tensor(4)])
        rows = int(torch.as_tensor([sizes[0], sizes[1]]).sum())
        net(torch.ones(rows, 4)).sum().backward()
        assert rows == 5
        assert torch.tensor([torch.tensor(1), torch.tensor(0.5)]).dtype is torch.float32

    return step


CAPTURED: dict[str, Callable[[], Step]] = {
    "packed, sorted": pack(True, True),
    "packed, not sorted": pack(False, False),
    "packed as a list": unpack,
    "built on meta": build_on_meta("cpu"),
    "built on meta outside": train_outside_model(nn.BatchNorm1d(4, device="meta")),
    "copies its model": copy_model_in_step,
    "averages its weights": average_by_hand,
    "compares tensors": compare_tensors,
    "causal bias": attend_lower_right,
    "tensor of tensors": make_of_tensors,
}
#: What a capture does differently from a real run, in both lists: PyTorch copies buffers by their
#: memory, and packs sequences in one operation whose parts fake tensors show.
UNLIKE = ("clone", "_pack_padded_sequence", "copy_", "_local_scalar_dense", "lift_fresh")


@pytest.mark.parametrize("name", CAPTURED)
def test_operations_are_those_of_a_real_run(name: str) -> None:
    torch.manual_seed(0)
    captured = list_captured_operations(CAPTURED[name])
    real = list_real_operations(CAPTURED[name])
    assert [n for n in captured if n not in UNLIKE] == [n for n in real if n not in UNLIKE]


# -- what a compiler and divided weights ask for


def compile_whole() -> Step:
    """A function that must be compiled as a whole, and a module that is."""
    net = nn.Linear(4, 4)
    net.compile(fullgraph=True)

    @torch.compile(fullgraph=True)
    def sum_up(x: Any) -> Any:
        return net(x).relu().sum()

    return lambda: sum_up(torch.ones(3, 4)).backward()


def test_what_must_be_compiled_as_a_whole_is_captured_as_compiled() -> None:
    with pytest.warns(UserWarning, match="compiled as a whole"):
        graph = capture(compile_whole)
    assert [label.name for label in graph.labels if label.kind == "gemm"] == ["addmm", "mm"]


def test_weights_that_are_divided_while_on_the_meta_device_are_gathered() -> None:
    from torch.distributed.fsdp import fully_shard

    def make_step() -> Step:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        net.to_empty(device="cuda")
        for layer in net:
            layer.reset_parameters()
        optimizer = torch.optim.AdamW(net.parameters())

        def step() -> None:
            net(torch.randn(3, 8, device="cuda")).sum().backward()
            optimizer.step()

        return step

    names = [label.name for label in capture(make_step, device="cuda", ranks=2).labels]
    assert names.count("all_gather") >= 3
    assert names.count("reduce_scatter") == 2


# -- programs that are refused with their line, the reason and a way out


def make_nested(layout: Any) -> Callable[[], Step]:
    def make_step() -> Step:
        rows = [torch.randn(3, 4), torch.randn(2, 4)]
        return lambda: torch.nested.nested_tensor(rows, layout=layout)

    return make_step


def use_nested(nested: Any) -> Callable[[], Step]:
    net = nn.Linear(4, 4)
    return lambda: lambda: net(nested).values().sum().backward()


def differentiate_forward() -> Step:
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    return lambda: torch.func.jvp(net, (x,), (x,))[1].sum().backward()


def take_a_batch() -> Any:
    def train(batch: Any, rate: float = 0.1, *more: Any) -> None:
        batch.sum()

    return train


def make_of_text() -> Any:
    names = {"torch": torch, "net": nn.Linear(4, 4)}
    exec("def step():\n    rows = net(torch.ones(3, 4)) > 0\n    torch.ones(3, 4)[rows]\n", names)
    return names["step"]


def own_operation_without_rule() -> Step:
    if not hasattr(torch.ops.perfkit_programs, "thrice"):

        @torch.library.custom_op("perfkit_programs::thrice", mutates_args=())
        def thrice(x: torch.Tensor) -> torch.Tensor:
            return x * 3

    weight = nn.Parameter(torch.ones(4))
    return lambda: torch.ops.perfkit_programs.thrice(weight)


NESTED = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "jagged": (make_nested(torch.jagged), r"nested tensors.*nested_tensor\(rows.*pad them"),
    "nested": (make_nested(torch.strided), r"nested tensors.*nested_tensor\(rows.*pad them"),
    "jagged, made outside": (use_nested(NESTED), r"nested tensors.*net\(nested\).*pad them"),
    "forward mode": (differentiate_forward, r"forward mode.*torch.func.jvp\(net.*use reverse"),
    "arguments": (
        take_a_batch,
        r"train takes the arguments batch, .*return lambda: train\(batch\)",
    ),
    "no step": (lambda: (nn.Linear(4, 4),), r"make_step returned \(Linear.*must return the step"),
    "text": (make_of_text, r"step in <string>, line 3"),
    "no rule": (own_operation_without_rule, r"perfkit_programs::thrice in .*register_fake"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why_and_what_to_do(name: str) -> None:
    make_step, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        capture(make_step)
    assert "\n" not in str(caught.value)
