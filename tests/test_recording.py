"""Capture against real runs; what it explains, what it leaves alone, how far it reaches."""

import copy
import random
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from perfkit import recording
from perfkit.measure.processes import run_processes
from perfkit.platform.estimates import keep_quiet
from perfkit.prediction.predictor import predict
from perfkit.recording.nets import Net
from perfkit.workloads.dlrm import DLRM
from perfkit.workloads.graph import Graph

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo import eval_frame  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.distributed import _functional_collectives as functional  # noqa: E402
from torch.nn.parallel import DistributedDataParallel, distributed  # noqa: E402
from torch.nn.parameter import UninitializedTensorMixin  # noqa: E402
from torch.optim import optimizer as optimizers  # noqa: E402
from torch.utils import _foreach_utils  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from perfkit.measure.iterations import OperationTimer  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402
from tests.golden.steps import ADAMW, SGD, Bags, Make, mlp, train, twin  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")

SPARSE = (SGD, torch.optim.Adagrad, torch.optim.SparseAdam)

# -- the same operations as in a real run
# ------------------------------------------------------------------------------


def _convolutions() -> nn.Module:
    first = [
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ]
    by_groups = [nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2)]
    transposed = [nn.ConvTranspose2d(8, 16, 2, 2), nn.LayerNorm([16, 6, 6]), nn.ReLU6()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)]
    return nn.Sequential(*first, *by_groups, *transposed, *head)


def _activations() -> nn.Module:
    return nn.Sequential(
        nn.GLU(),
        nn.Hardswish(),
        nn.PReLU(),
        nn.Mish(),
        nn.ELU(),
        nn.SELU(),
        nn.CELU(),
        nn.Softplus(),
        nn.LogSigmoid(),
        nn.Hardtanh(),
        nn.Hardsigmoid(),
        nn.Softshrink(),
        nn.Hardshrink(),
        nn.Tanhshrink(),
        nn.Softsign(),
        nn.LeakyReLU(),
        nn.Threshold(0.1, 0.2),
    )


def narrow() -> Callable[[], Any]:
    """Mixed precision with scaled, clipped and accumulated gradients."""
    net = mlp()
    x = torch.randn(16, 256)
    y = torch.randint(0, 8, (16,))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


class _Recomputed(nn.ModuleList):
    def forward(self, x: Any) -> Any:
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _recomputed() -> nn.Module:
    return _Recomputed(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))


class Biased(nn.Module):
    """Causal attention whose scores get a bias by bucketed distance, after a norm, as in T5
    (arXiv:1910.10683)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.bias = nn.Embedding(32, 4)
        self.q = nn.Linear(64, 64, bias=False)
        self.k = nn.Linear(64, 64, bias=False)
        self.v = nn.Linear(64, 64, bias=False)
        self.o = nn.Linear(64, 64, bias=False)

    def split_heads(self, x: Any) -> Any:
        batch, rows, _ = x.shape
        return x.view(batch, rows, 4, -1).transpose(1, 2)

    def forward(self, x: Any) -> Any:
        b, n, h = x.shape
        places = torch.arange(n)
        normed = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        q = self.split_heads(self.q(normed))
        k = self.split_heads(self.k(normed))
        v = self.split_heads(self.v(normed))
        distance = (places[None] - places[:, None]).abs().clamp(max=31)
        scores = q @ k.transpose(-1, -2) + self.bias(distance).permute(2, 0, 1)[None]
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        mixed = F.dropout(torch.softmax(scores.float(), -1), 0.1) @ v
        return x + self.o(mixed.transpose(1, 2).reshape(b, n, h))


class Experts(nn.Module):
    """Mixture of experts with two per token and a fixed capacity: Lepikhin 2020,
    arXiv:2006.16668."""

    def __init__(self, hidden: int = 64, experts: int = 8, capacity: int = 48) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, hidden))

    def forward(self, x: Any) -> Any:
        share = torch.softmax(self.router(x), -1)
        weight, chosen = torch.topk(share, 2)
        own = F.one_hot(chosen, share.shape[-1])
        place = torch.cumsum(own.flatten(0, 1), 0).view_as(own) * own - 1
        kept = (place >= 0) & (place < self.capacity)
        slot = (chosen * self.capacity + place.amax(-1).clamp(0, self.capacity - 1)).flatten()
        room = x.new_zeros(own.shape[-1] * self.capacity, x.shape[-1])
        room = room.index_add(0, slot, x.repeat_interleave(2, 0))
        worked = F.gelu(room.view(own.shape[-1], self.capacity, -1) @ self.up) @ self.down
        scale = (weight / weight.sum(-1, keepdim=True) * kept.any(-1)).flatten()
        return (worked.flatten(0, 1)[slot] * scale[:, None]).view(len(x), 2, -1).sum(1)


STEPS = {
    "momentum": train(mlp, (16, 256), SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "lists": train(mlp, (16, 256), ADAMW, foreach=True),
    "fused": train(mlp, (16, 256), ADAMW, fused=True),
    "adagrad": train(mlp, (16, 256), torch.optim.Adagrad),
    "convolutions": train(_convolutions, (4, 3, 16, 16), SGD, lr=0.1),
    "activations": train(_activations, (4, 64), SGD, lr=0.1),
    "narrow": narrow,
    "recompute": train(_recomputed, (4, 5, 32), SGD, lr=0.1),
    "biased attention": train(Biased, (2, 16, 64), ADAMW),
    **{f"sparse {o.__name__}": train(Bags, (1,), o, lr=0.1) for o in SPARSE},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", STEPS)
def test_the_captured_operations_are_those_of_a_real_run(name: str) -> None:
    graph = capture(STEPS[name])
    step = STEPS[name]()
    step()
    with OperationTimer() as timer:
        step()
    assert [label.name for label in graph.labels] == timer.names
    assert not [label for label in graph.labels if label.kind == "other"]
    assert {label.phase for label in graph.labels} == {"forward", "backward", "update"}


def test_data_types_phases_and_modules_of_operations() -> None:
    graph = capture(narrow)
    products = graph.kernels[("gemm", "nt")]
    assert graph.dtype == "bf16"
    assert {graph.dtypes[i] for i in products} == {"bf16"}
    assert "bf16" not in {
        d for d, label in zip(graph.dtypes, graph.labels, strict=True) if label.phase == "update"
    }
    assert [graph.labels[i].module for i in products] == ["0", "3", "0", "3"]
    computed = [label for label in capture(STEPS["recompute"]).labels if label.name == "addmm"]
    assert [label.phase for label in computed].count("backward") == len(computed) / 2, (
        "the forward runs twice"
    )
    assert {label.module.split(".")[0] for label in computed if label.phase == "backward"} == {
        "0",
        "1",
    }


def test_convolutions_are_counted_as_products() -> None:
    graph = capture(STEPS["convolutions"])
    first = graph[int(graph.kernels[("convolution", "forward")][0])].features
    assert [first[k] for k in ("batch", "m", "n", "k", "elements", "rows")] == [
        1,
        1024,
        8,
        27,
        8192,
        4,
    ]
    assert first["flops"] == 2 * first["m"] * first["n"] * first["k"]
    assert ("convolution", "forward_depthwise") in graph.kernels
    backward = graph[int(graph.kernels[("convolution", "backward")][-1])].features
    assert backward["flops"] == first["flops"], "nobody asks for the gradient of the images"


def train_biased_convolution(device: str) -> Callable[[], Callable[[], Any]]:
    """A convolution of 4 images of 16 × 16 pixels from 3 to 8 channels, with a bias."""

    def make_step() -> Callable[[], Any]:
        net = nn.Conv2d(3, 8, 3, padding=1).to(device)
        images = torch.randn(4, 3, 16, 16, device=device)
        return lambda: net(images).sum().backward()

    return make_step


def test_a_gpu_adds_the_bias_of_a_convolution_in_a_kernel_of_its_own() -> None:
    """It reads and writes the 8192 results, and its gradient reads their gradients: PyTorch's
    Convolution.cpp. A CPU does so in the convolution."""
    gpu = capture(train_biased_convolution("cuda"), device="cuda")
    names = [label.name for label in gpu.labels]
    first = names.index("convolution")
    last = names.index("convolution_backward")
    assert names[first + 1] == "add_" and names[last + 1] == "sum"
    added, summed = gpu[first + 1].features, gpu[last + 1].features
    assert added["elements"] == 8192
    assert gpu.traffic[first + 1] == (2 * 8192 + 8) * 4
    assert (summed["elements"], gpu.labels[last + 1].kind) == (8192, "rowwise")
    assert gpu.traffic[last + 1] >= 8 * 4  # the gradient of a sum is one number
    calls = gpu.column("calls")
    for call in (first, last):
        assert calls[call] == 1 and calls[call + 1] == 0, "the framework is called once"
    cpu = capture(train_biased_convolution("cpu"))
    assert "add_" not in [label.name for label in cpu.labels if label.phase == "forward"]
    assert cpu.column("flops").sum() == gpu.column("flops").sum()


def test_optimizers_on_a_gpu_work_on_lists_and_reading_a_loss_is_a_transfer() -> None:
    def read_loss() -> Callable[[], Any]:
        net, x = nn.Linear(8, 8).to("cuda"), torch.randn(4, 8, device="cuda")
        return lambda: net(x).sum().item()

    graph = capture(read_loss, device="cuda")
    assert [graph.labels[i].variant for i in graph.transfers] == ["to_host"]
    assert "_foreach_add_" in [
        label.name for label in capture(STEPS["momentum"], device="cuda").labels
    ]


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_a_captured_update_in_lists_is_shared_among_modules(kind: str) -> None:
    """States that are updated without their weights belong to the module of the weights."""

    def make() -> Any:
        model = nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 1024))
        optimizer = torch.optim.Adam(model.parameters(), **{kind: True})
        x = torch.randn(256, 4096)

        def step() -> None:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        return step

    with keep_quiet():
        prediction = predict(capture(make, device="cuda"), "h100-sxm-8")
    rows = prediction.modules().rows(named=True)
    update = {row["module"]: row["update_s"] for row in rows}
    assert update["0"] / (update["0"] + update["2"]) == pytest.approx(4096 / (4096 + 1024), 0.01)
    assert update.get("", 0.0) < 0.05 * sum(update.values())


def test_groups_and_waits_of_collectives(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mine = dist.group.WORLD
    try:

        def make_step() -> Callable[[], Any]:
            net, half = DistributedDataParallel(nn.Linear(100, 100)), dist.new_group([0, 1])

            def step() -> None:
                net(torch.randn(4, 100)).sum().backward()
                x = torch.ones(10)
                dist.all_reduce(x, group=half)
                handle = dist.all_reduce(torch.ones(5), async_op=True)
                x = x * 2
                handle.wait()
                gathered = functional.all_reduce(x, "sum", dist.group.WORLD)
                x = x * 3
                gathered + 1

            return step

        graph = capture(make_step, ranks=8, rank=1)
        assert dist.group.WORLD is mine
        assert dist.get_world_size() == 1
        dist.all_reduce(torch.ones(2))
    finally:
        dist.destroy_process_group()
    assert graph.groups == (tuple(range(8)), (0, 1))
    found = [graph[int(i)] for i in graph.collectives]
    assert {op.name for op in found} == {"all_reduce"}
    assert [op.features["nbytes"] for op in found] == [4 * 10100, 40, 20, 40]
    assert [op.features["group"] for op in found] == [0, 1, 0, 0]
    assert graph.waits is not None
    waited = [
        graph.labels[wait.operation].name if wait.operation < len(graph) else ""
        for wait in graph.waits
    ]
    assert waited == ["copy_", "ones", "all_reduce", "mul"], (
        "buckets, at once, by handle, when the result is used"
    )


# -- what is left behind, and what cannot be followed
# ------------------------------------------------------------------


class _Counting(nn.Sequential):
    """Keeps something of its last input, and counts."""

    last: Any = None

    def forward(self, x: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        self.last = super().forward(x)
        return self.last


@pytest.mark.parametrize("trained", [False, True])
def test_the_users_module_is_left_as_it_was(trained: bool) -> None:
    net = _Counting(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randn(4, 8)
    y = torch.tensor([0, 1, 1, 0])

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    def look() -> list[Any]:
        states = []
        for state in optimizer.state.values():
            states += [value.tolist() for value in state.values()]
        drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
        weights, gradients = (
            [v.tolist() for v in net.state_dict().values()],
            [id(p.grad) for p in net.parameters()],
        )
        return [
            states,
            drawn,
            weights,
            gradients,
            vars(net).get("count"),
            net.last,
            torch.get_default_dtype(),
        ]

    def make_step() -> Callable[[], Any]:
        torch.manual_seed(5)
        np.random.seed(5)
        torch.set_default_dtype(torch.float64)
        return step

    if trained:
        step()
    before = look()
    assert capture(make_step).parameters == sum(p.numel() for p in net.parameters())
    assert all(now is then or now == then for now, then in zip(look(), before, strict=True))
    step()


class _Masked(nn.Module):
    """Asks what BERT, ViT and Whisper ask: of its mask, its lengths, its initial weights and a
    random number."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 3000)
        self.linear = nn.Linear(3000, 3000)
        self.drop = drop
        nn.init.trunc_normal_(self.linear.weight, std=0.02)

    def forward(self, tokens: Any, mask: Any = None) -> Any:
        mask = torch.ones(tokens.shape) if mask is None else mask
        x = self.words(tokens)[:, : int(mask.sum(1).max())]
        if not torch.all(mask == 1):
            x = x * mask[:, : x.shape[1], None]
        return x if torch.rand([]) < self.drop else self.linear(x)


class _Routed(nn.Module):
    """Two of eight experts for each token; how many tokens an expert gets is asked in three
    ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.gate = way, nn.Linear(16, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: Any) -> Any:
        weight, chosen = torch.topk(F.softmax(self.gate(x), 1), 2, -1)
        out, mask = torch.zeros_like(x), F.one_hot(chosen, 8).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero() if self.way == "hit" else range(8)
        for expert in hit:
            if self.way == "masked":
                rows = chosen[:, 0] == expert
                out[rows] += self.experts[expert](x[rows]) * weight[rows][:, :1]
                continue
            own = expert == chosen.T if self.way == "equal" else mask[expert].squeeze(0)
            place, token = torch.where(own)
            out.index_add_(0, token, self.experts[expert](x[token]) * weight[token, place, None])
        return out


def test_what_follows_from_small_known_numbers_is_known() -> None:
    tokens = torch.randint(100, (4, 16))
    whole = capture(_Masked(), tokens, optimizer="sgd")
    short = capture(
        _Masked,
        {"tokens": tokens, "mask": (torch.arange(16) < 5).expand(4, 16).long()},
        optimizer="sgd",
    )
    assert [g[int(g.kernels["gemm", "nt"][0])].features["m"] for g in (whole, short)] == [64, 20]
    assert (whole.name, len(short) - len(whole)) == ("_Masked", 2), (
        "a mask that is not 1 is multiplied"
    )
    assert ("gemm", "nt") not in capture(_Masked(2.0), tokens).kernels, "the layer is left out"
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    with pytest.warns(UserWarning, match="numbers that the step draws decide"):
        drawn = capture(
            lambda: lambda: torch.randn(int(torch.randint(1, 9, (), generator=generator)), 5).sum()
        )
    assert len(drawn) == 3
    assert torch.equal(generator.get_state(), state)
    shared = capture(
        _Masked(), [tokens], loss=lambda out: out.square().sum(), ranks=2, device="cuda"
    )
    assert shared.column("nbytes").sum() == 4 * shared.parameters
    with pytest.raises(ValueError, match=r"make_step is a _Masked; .* capture\(model, inputs\)"):
        capture(_Masked())
    with pytest.raises(ValueError, match=r"make_step is a _Masked; .* capture\(model, inputs\)"):
        capture(_Masked)


@pytest.mark.parametrize(("way", "rows"), [("hit", 400), ("equal", 400), ("masked", 200)])
def test_experts_get_equally_many_tokens_and_a_warning_says_so(way: str, rows: int) -> None:
    with pytest.warns(
        UserWarning,
        match="such as those of experts; each alternative counts as chosen equally often",
    ):
        graph = capture(_Routed(way), torch.randn(1600, 16))
        assert graph.notes
        assert graph.notes[0] in predict(graph, "h100-sxm-8").warnings
    products = [graph[int(i)].features["m"] for i in graph.kernels["gemm", "nt"]]
    of_experts = [rows for _ in range(8)]
    assert products == [1600, *of_experts]
    assert not [label for label in graph.labels if label.kind == "other"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_for_groups_of_rows_counts_as_one_product_for_each_group(dtype: Any) -> None:
    weight = nn.Parameter(torch.randn(4, 32, 48, dtype=dtype))

    def step() -> None:
        x = torch.randn(64, 32, dtype=dtype, requires_grad=True)
        chosen = (x.float() @ torch.randn(32, 4)).argmax(1)
        ends = torch.histc(chosen.float(), 4, 0, 3).cumsum(0).int()
        F.grouped_mm(x[chosen.argsort()], weight, offs=ends).square().sum().backward()

    with pytest.warns(UserWarning, match="such as those of experts"):
        graph = capture(lambda: step, device="cuda")
    products = []
    for place, label in enumerate(graph.labels):
        if label.kind == "bmm":
            sizes = graph[place].features
            products.append((sizes["batch"], sizes["m"], sizes["n"], sizes["k"]))
    assert sorted(products) == [(4, 16, 32, 48), (4, 16, 48, 32), (4, 32, 48, 16)]


def _is_finite(weight: Any) -> Any:
    y = weight * 2
    bad = torch.isnan(y)
    bad |= torch.isinf(y)
    return y.sum() if torch.isfinite(y).all() and not bad.any() else y.sum() * 3


def _match(weight: Any) -> Any:
    rows, columns = linear_sum_assignment(weight.detach().cpu())
    return weight[torch.as_tensor(rows), torch.as_tensor(columns)].sum()


def _fill(weight: Any) -> Any:
    chosen = F.one_hot(weight.argmax(-1), 8)
    return (weight.masked_fill(torch.ones(4, 8).triu().bool(), 0.0) * chosen).sum()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("follow", "note", "kernels"),
    [
        (
            _is_finite,
            "they count as finite",
            ["mul", "isnan", "isinf", "bitwise_or_", "abs", "ne", "eq", "mul", "all"],
        ),
        (_match, "such as costs to match by, count as zeros", ["to", "index"]),
        (
            _fill,
            "",
            ["argmax", "scatter_", "ones", "triu", "_to_copy", "clone", "masked_fill_", "mul"],
        ),
    ],
)
def test_what_the_host_asks_of_computed_numbers_is_assumed(
    follow: Any, note: str, kernels: list[str]
) -> None:
    """DETR asks whether activations are finite, and lets SciPy match boxes by their costs; on a GPU
    filling copies."""
    weight = torch.randn(4, 8, requires_grad=True)
    step = lambda: follow(weight).backward()  # noqa: E731
    graph = capture(lambda: step, device="cuda")
    assert [label.name for label in graph.labels][: len(kernels)] == kernels
    assert len(graph.notes) == bool(note)
    assert all(note in each for each in graph.notes)
    step()
    with OperationTimer() as timer:
        step()
    names = [label.name for label in capture(lambda: step).labels]
    assert names == [name for name in timer.names if name != "lift_fresh"], "on a CPU as it runs"


def test_small_numbers_that_are_passed_decide_sizes() -> None:
    images = torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]])
    net = nn.Linear(2, 2)

    def step() -> None:
        # pictures that are only padding are left out
        net(images[(images != 0).any(1)]).sum().backward()

    assert capture(lambda: step)[1 + 2].features["m"] == 2


def _decide(weight: Any) -> Any:
    return weight.sum() if weight.sum() > 3 else weight.sum() * 2  # a branch


def _select(weight: Any) -> Any:
    return weight[weight > 0].sum()  # a mask


def _compare(weight: Any) -> Any:
    return weight.sum() if weight.detach().numpy().mean() > 3 else weight.sum() * 2  # an array


def _report(weight: Any) -> Any:
    loss = weight.sum()
    if 1 + loss.item() > 3:  # a number read
        loss = loss * 2
    return loss


@pytest.mark.parametrize(
    ("follow", "code"), [(_decide, "a branch"), (_select, "a mask"), (_report, "a number read")]
)
def test_what_depends_on_values_is_explained(follow: Callable[[Any], Any], code: str) -> None:
    weight = torch.randn(4, requires_grad=True)
    with pytest.raises(
        ValueError, match=f"(?s)computes no values.*test_recording.py, line .*{code}.*torch.where"
    ):
        capture(lambda: lambda: follow(weight).backward())


def test_known_lengths_decide_the_sizes_of_a_ctc_loss() -> None:
    lengths, targets = torch.tensor([3, 5]), torch.ones(8, dtype=torch.long)
    scores = torch.randn(7, 2, 4, requires_grad=True)

    def step():
        return F.ctc_loss(scores.log_softmax(-1), targets, torch.tensor([7, 7]), lengths).backward()

    graph = capture(lambda: step)
    assert [label.name for label in graph.labels].count("_ctc_loss_backward") == 1


def test_real_whole_numbers_decide_sizes() -> None:
    found, weight = [], torch.randn(4, 3, requires_grad=True)
    index, mask = torch.tensor([0, 2, 2, 1]), torch.tensor([True, False, True, True])

    def step() -> None:
        kept = weight[mask][: int(index.max())]
        found.append(
            (tuple(kept.shape), len(torch.unique(index)), (index + 1).tolist(), index.numpy().sum())
        )
        f"{weight[index].sum().item():.3f}"  # reading a number for a log decides nothing
        kept.sum().backward()

    capture(lambda: step)
    assert len(found) >= 2
    assert all(each == ((2, 3), 3, [1, 3, 3, 2], 5) for each in found)


@pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
def test_a_step_that_was_captured_for_another_device_says_so() -> None:
    for device, same, other in (("cpu", "zen5-2", "h100-sxm-8"), ("cuda", "h100-sxm-8", "zen5-2")):
        graph = capture(nn.Linear(64, 64), torch.ones(32, 64), device=device)
        text = f"captured with device={device!r}"
        assert not any(text in warning for warning in predict(graph, same).warnings)
        assert any(text in warning for warning in predict(graph, other).warnings)


def test_a_lazy_module_is_captured() -> None:
    """Whether it is built in the sandbox or before, and whether the optimizer is made before it
    knows its sizes."""
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyBatchNorm1d(), nn.Linear(8, 1))
    sized = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1))
    x, before = torch.randn(4, 16), list(map(type, model))
    same = capture(sized, x)
    for _ in range(2):
        found = capture(model, x)
        assert found.parameters == same.parameters
        assert found.table().equals(same.table())
        assert list(map(type, model)) == before
        assert nn.parameter.is_lazy(model[0].weight)
    model(x)
    assert [*map(type, model)] == [*map(type, sized)]
    assert model[0].weight.shape == (8, 16)
    half = capture(
        lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten()).half(),
        torch.randn(2, 3, 8, 8).half(),
    )
    assert half.dtype == "fp16"


def test_batches_of_a_data_loader_are_made_for_real() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.arange(40))

    def make_step() -> Callable[[], Any]:
        weight = torch.randn(3, 5, requires_grad=True)
        batches = iter(
            torch.utils.data.DataLoader(data, 8, shuffle=True, num_workers=1, pin_memory=True)
        )

        def step() -> None:
            x, labels = next(batches)
            found.append(labels.tolist())
            (x @ weight)[: int(labels.max())].sum().backward()

        return step

    found: list[list[int]] = []
    with pytest.warns(UserWarning, match="data loader"):
        graph = capture(make_step)
    assert [label.name for label in graph.labels].count("mm") == 2
    assert len(set(found[0] + found[1])) == 16


def test_the_next_step_may_wait_for_what_this_one_sends() -> None:
    def make_step() -> Callable[[], Any]:
        net, sent = nn.Linear(64, 64), list[Any]()

        def step() -> None:
            x = torch.randn(8, 64)
            if sent:
                sent.pop().wait()
            net(x).sum().backward()
            sent.append(dist.all_reduce(net.weight.grad, async_op=True))

        return step

    graph = capture(make_step, ranks=2)
    assert graph.waits is not None
    assert list(graph.waits) == [(1, 0, True)]
    assert graph.labels[1].name == "addmm"


def test_what_is_no_step_and_ranks_that_share_nothing_are_told() -> None:
    with pytest.raises(ValueError, match="make_step returned 3; it must return the step"):
        capture(lambda: 3)  # type: ignore[arg-type, return-value]
    with (
        pytest.warns(UserWarning, match="the step ran no operation"),
        pytest.warns(
            UserWarning, match="has no collective between its 4 ranks; .*DistributedDataParallel"
        ),
    ):
        capture(lambda: nn.Linear(4, 4).zero_grad, ranks=4)


def list_replaced() -> list[Any]:
    """Everything of the process that a capture replaces; lists and mappings with what they hold."""
    of_modules = [
        nn.Module._apply,
        nn.UninitializedParameter.__new__,
        nn.UninitializedBuffer.__new__,
        UninitializedTensorMixin.materialize,
        nn.modules.module._has_any_global_hook,
        dict(nn.modules.module._global_forward_pre_hooks),
        dict(nn.modules.module._global_forward_hooks),
    ]
    of_optimizers = [
        _foreach_utils._get_foreach_kernels_supported_devices,
        optimizers._get_foreach_kernels_supported_devices,
        list(_foreach_utils._foreach_supported_types),
        list(optimizers._foreach_supported_types),
        sys.modules["torch.optim.adam"]._get_capturable_supported_devices,
        dict(optimizers._global_optimizer_pre_hooks),
    ]
    of_ranks = [
        dist.distributed_c10d._world,
        dist.is_initialized(),
        torch._C._distributed_c10d.Reducer._rebuild_buckets,
        torch._C._distributed_c10d.Work.wait,
        distributed._sync_module_states,
    ]
    of_tensors = [
        vars(FakeTensor).get("data_ptr"),
        torch._subclasses.FakeTensorMode.may_turn_const,
        _get_current_dispatch_mode(),
        eval_frame._callback_from_stance,
        torch.get_default_dtype(),
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
    ]
    of_process = [
        torch.utils.data.DataLoader.__iter__,
        sys.excepthook,
        warnings.filters,
        list(warnings.filters),
    ]
    return [*of_modules, *of_optimizers, *of_ranks, *of_tensors, *of_process]


def is_as_before(before: list[Any], after: list[Any]) -> bool:
    return all(a is b or a == b for a, b in zip(after, before, strict=True))


def test_captures_in_threads_take_turns_and_leave_nothing_replaced() -> None:
    """16 captures of three kinds in 8 threads: the graphs of one thread alone, and the process as
    it was."""
    sizes: dict[str, Any] = {
        "rows": [300, 70],
        "dim": 8,
        "pooling": 2,
        "bottom": [8],
        "top": [8],
        "features": 4,
    }

    def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Make:
        net = partial(nn.Sequential, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        return train(lambda: wrap(net()), (4, 8), SGD, lr=0.1)

    kinds = [(twin(DLRM(batch=16, sparse=True, **sizes)), 1), (wrapped(copy.deepcopy), 1)]
    kinds += [(wrapped(DistributedDataParallel), 2)]

    def run(number: int) -> Graph:
        make, ranks = kinds[number % 3]
        return capture(make, ranks=ranks)

    alone, before = [run(number) for number in range(3)], list_replaced()
    with ThreadPoolExecutor(8) as pool:
        graphs = list(pool.map(run, range(16)))
    assert is_as_before(before, list_replaced())
    for number, graph in enumerate(graphs):
        own = alone[number % 3]
        assert (graph.labels, graph.tables, graph.waits is None) == (
            own.labels,
            own.tables,
            own.waits is None,
        )
        assert graph.table().equals(own.table())
        assert list(graph.accesses) == list(own.accesses)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
@pytest.mark.parametrize("late", [False, True])
def test_a_capture_that_fails_leaves_nothing_replaced(
    late: bool, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    before = list_replaced()
    with pytest.raises(error):
        capture(lambda: fail if late else fail(), ranks=2, device="cuda")  # type: ignore[func-returns-value]
    assert is_as_before(before, list_replaced())
    with ThreadPoolExecutor(1) as pool:  # and nobody waits for it
        assert len(pool.submit(capture, lambda: lambda: torch.randn(3).sum()).result(30))


# -- how far it reaches
# ------------------------------------------------------------------------------------------------


def test_a_model_of_a_trillion_numbers_is_captured_and_predicted() -> None:
    layers = lambda: (nn.Linear(100_000, 100_000, bias=False) for _ in range(100))  # noqa: E731
    make_step = train(lambda: nn.Sequential(*layers()).bfloat16(), (8, 100_000), SGD, lr=0.1)
    graph = capture(make_step, device="cuda")
    assert graph.parameters == 10**12
    with pytest.warns(match="a rank needs 4 TB of 80 GB: does not fit"):
        assert predict(graph, "h100-sxm-8").time > 100 * 2e10 / 3.35e12, "every weight is read"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("optimizer", SPARSE)
def test_no_table_is_made_real_to_be_updated(optimizer: Any) -> None:
    """Fifteen terabytes: an operation that fell back on real tensors would not end."""
    graph = capture(train(partial(Bags, 10**10, 128), (1,), optimizer, lr=0.1))
    assert graph.parameters == 3 * 128 * 10**10
    assert "embedding_update" in {label.kind for label in graph.labels}


MODELLED: dict[str, Make] = {
    "dlrm-cross": twin(DLRM("dlrm-default", batch=2048, interaction="cross")),
    "xlnet": twin(Net("xlnet", batch=4, size=128, width=768, depth=2, classes=32000)),
    "inception": twin(Net("inception", batch=8, size=299, width=32, depth=3)),
    "experts": train(Experts, (128, 64), ADAMW),
    **{name: STEPS[name] for name in ("recompute", "convolutions", "biased attention")},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELLED)
def test_real_models_are_hardly_unmodelled(name: str) -> None:
    graph = capture(MODELLED[name], name=name)
    for platform in ("h100-sxm-8", "zen5-2"):
        prediction = predict(graph, platform)
        assert sum(prediction.unmodelled.values()) < 0.02 * prediction.time, prediction.unmodelled


def test_an_old_torch_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "version", lambda _: "2.6.0+cu124")
    for call in (recording.check_torch, partial(run_processes, {"task": "ladder"})):
        with pytest.raises(
            ImportError, match=r"torch is 2\.6\.0\+cu124; measuring and capture need 2\.9 or newer"
        ):
            call()
