"""What a capture says of what it does not count, and that it says nothing where all is counted."""

import json
import math
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

from torch import nn  # noqa: E402
from torch._dynamo.eval_frame import TorchPatcher  # noqa: E402
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks  # noqa: E402

from perfkit.platform.estimates import keep_quiet  # noqa: E402
from perfkit.prediction.predictor import predict  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402


class Twins(NamedTuple):
    """A step that needs a note, a word of it or "" for none, and a healthy step that needs none."""

    ill: Callable[[], Any]
    word: str
    healthy: Callable[[], Any]
    device: str = "cuda"


def run(function: Callable[[Any], Any], shape: tuple[int, ...] = (8, 8)) -> Callable[[], Any]:
    """A function that makes the step: a function of a trained matrix, and its backward pass."""

    def make_step() -> Callable[[], None]:
        weight = nn.Parameter(torch.randn(shape, device="cuda"))
        return lambda: function(weight).abs().sum().backward()

    return make_step


def call(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[], Any]:
    """A function that makes the step of a module, whose results may be in a tuple."""

    def make_step() -> Callable[[], None]:
        module, x = make().to("cuda"), torch.randn(shape, device="cuda")

        def step() -> None:
            out = module(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()

        return step

    return make_step


def count_calls(every: int) -> Callable[[], Any]:
    """An optimizer that updates in every n-th call."""

    def make_step() -> Callable[[], None]:
        net, count = nn.Linear(4, 4), [0]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step() -> None:
            count[0] += 1
            net(torch.randn(3, 4)).sum().backward()
            if count[0] % every == 0:
                optimizer.step()
                optimizer.zero_grad()

        return step

    return make_step


def grow(rows: int) -> Callable[[], Any]:
    """A batch that grows by some rows with each call."""

    def make_step() -> Callable[[], None]:
        net, count = nn.Linear(4, 4), [0]

        def step() -> None:
            count[0] += 1
            net(torch.randn(4 + rows * count[0], 4)).sum().backward()

        return step

    return make_step


def grow_at_times(every: int) -> Callable[[], Any]:
    """A batch that grows with every n-th call."""

    def make_step() -> Callable[[], None]:
        net, count = nn.Linear(4, 4), [0]

        def step() -> None:
            count[0] += 1
            net(torch.randn(4 + count[0] // every, 4)).sum().backward()

        return step

    return make_step


def fill_a_cache() -> Callable[[], None]:
    """The first call makes a table that later calls use; momentum is made in it too."""
    net, cache = nn.Linear(4, 4), list[Any]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        if not cache:
            cache.append(torch.arange(4).sin())
        optimizer.zero_grad()
        net(torch.randn(3, 4) * cache[0]).sum().backward()
        optimizer.step()

    return step


def drop_layers(draw: Callable[[], float], share: float) -> Callable[[], Any]:
    """Layers that run or not, as drawn, behind one that always runs: without any, nothing would
    have a gradient."""

    def make_step() -> Callable[[], None]:
        first = nn.Linear(4, 4)
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def step() -> None:
            x = first(torch.randn(3, 4))
            for layer in layers:
                if draw() >= share:
                    x = layer(x)
            x.sum().backward()

        return step

    return make_step


def compiled(**options: Any) -> Callable[[], Any]:
    """A compiled module."""
    return call(lambda: torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), **options), (4, 8))


def save(hooks: Callable[[], Any]) -> Callable[[], Any]:
    """A step whose saved tensors pass hooks."""

    def make_step() -> Callable[[], None]:
        net, x = nn.Linear(8, 8).to("cuda"), torch.randn(4, 8, device="cuda")

        def step() -> None:
            with hooks():
                loss = net(x).square().sum()
            loss.backward()

        return step

    return make_step


def move(inside: bool, **options: Any) -> Callable[[], Any]:
    """A batch of the host that is moved to the GPU; work on it comes before or after."""
    outside = torch.randn(64, 8)

    def make_step() -> Callable[[], None]:
        net = nn.Linear(8, 8).to("cuda")
        data = torch.randn(64, 8)

        def step() -> None:
            if inside:
                x = data[torch.randperm(64)[:4]].mul_(2).to("cuda", **options)
            else:
                x = outside.to("cuda", **options)[:4].mul(2)
            net(x).sum().backward()

        return step

    return make_step


def freeze(*frozen: int) -> Callable[[], Any]:
    """Two layers, some of them frozen."""

    def make_step() -> Callable[[], None]:
        net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
        for place in frozen:
            net[place].requires_grad_(False)
        x.requires_grad_(True)
        return lambda: net(x).sum().backward()

    return make_step


def autocast(module: Callable[[], nn.Module], enabled: bool) -> Callable[[], Any]:
    """A recurrent module under autocast."""

    def make_step() -> Callable[[], None]:
        net, x = module().to("cuda"), torch.randn(5, 2, 8, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                out = net(x)[0].float()
            out.sum().backward()

        return step

    return make_step


def transform(name: str) -> Callable[[], Any]:
    """A function of `torch.linalg` of a square matrix."""
    return run(lambda w: getattr(torch.linalg, name)(w @ w.T + torch.eye(8)))


def place(first: Any, second: Any) -> Callable[[], Any]:
    """Two layers, each on a device of its own, and their updates."""

    def make_step() -> Callable[[], None]:
        nets = [nn.Linear(4, 4).to(device) for device in (first, second)]
        inputs = [torch.randn(3, 4, device=device) for device in (first, second)]
        weights = [weight for net in nets for weight in net.parameters()]
        optimizer = torch.optim.AdamW(weights)

        def step() -> None:
            for net, x in zip(nets, inputs, strict=True):
                net(x).sum().backward()
            optimizer.step()

        return step

    return make_step


def share(use: Callable[[Any], Any]) -> Callable[[], Any]:
    """An array and a tensor that share memory; each call uses the array."""

    def make_step() -> Callable[[], None]:
        net, numbers = nn.Linear(4, 4), np.arange(4.0)
        kept = torch.from_numpy(numbers)

        def step() -> None:
            use(numbers)
            net(torch.randn(3, 4) * kept.float()).sum().backward()

        return step

    return make_step


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """A step that does something else too."""

    def make_step() -> Callable[[], None]:
        net = nn.Linear(4, 4)

        def step() -> None:
            work()
            net(torch.randn(3, 4)).sum().backward()

        return step

    return make_step


def work_in_a_thread(work: Callable[[], Any]) -> None:
    """Do some work in a thread of a pool."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


NO_MODEL = "no model of the work of"
FUSED = "fused kernels"
PRODUCT = run(lambda w: w @ w.T)
PLAIN = call(lambda: nn.Linear(8, 8), (4, 8))
LSTM = call(lambda: nn.LSTM(8, 8), (5, 2, 8))
GRU = call(lambda: nn.GRU(8, 8), (5, 2, 8))
CASES: dict[str, Twins] = {
    "eigvalsh": Twins(transform("eigvalsh"), NO_MODEL, PRODUCT, "cpu"),
    "svdvals": Twins(transform("svdvals"), NO_MODEL, PRODUCT, "cpu"),
    "inv": Twins(transform("inv"), NO_MODEL, PRODUCT, "cpu"),
    "cholesky": Twins(transform("cholesky"), NO_MODEL, PRODUCT, "cpu"),
    "eigvalsh on a GPU": Twins(transform("eigvalsh"), "", PRODUCT),
    "det": Twins(transform("det"), NO_MODEL, PRODUCT, "cpu"),
    "pinv": Twins(transform("pinv"), NO_MODEL, PRODUCT),
    "eigh": Twins(run(lambda w: torch.linalg.eigh(w @ w.T)[1]), "_linalg_eigh", PRODUCT, "cpu"),
    "qr": Twins(run(lambda w: torch.linalg.qr(w)[0]), "linalg_qr", PRODUCT, "cpu"),
    "lu": Twins(run(lambda w: torch.linalg.lu_factor(w)[0]), "linalg_lu", PRODUCT, "cpu"),
    "solve": Twins(run(lambda w: torch.linalg.solve(w, w)), "_linalg_solve", PRODUCT, "cpu"),
    "cdist": Twins(run(lambda w: torch.cdist(w, w + 1)), "_cdist_forward", PRODUCT),
    "fft": Twins(run(torch.fft.fft), "_fft_r2c", run(torch.linalg.vector_norm), "cpu"),
    "bilinear": Twins(call(lambda: nn.Sequential(Pairs()), (4, 8)), "_trilinear", PLAIN),
    "GRU": Twins(GRU, "", LSTM),
    "RNN": Twins(call(lambda: nn.RNN(8, 8), (5, 2, 8)), "", LSTM),
    "LSTMCell": Twins(call(lambda: nn.LSTMCell(8, 8), (2, 8)), FUSED, LSTM),
    "GRUCell": Twins(call(lambda: nn.GRUCell(8, 8), (2, 8)), FUSED, LSTM),
    "projected": Twins(call(lambda: nn.LSTM(8, 8, proj_size=4), (5, 2, 8)), "", LSTM),
    "GRU on a CPU": Twins(GRU, "", GRU, "cpu"),
    "LSTM in bf16": Twins(
        autocast(lambda: nn.LSTM(8, 8), True),
        "",
        autocast(lambda: nn.LSTM(8, 8), False),
    ),
    "graphs of the compiler": Twins(
        compiled(mode="reduce-overhead"), "triton.cudagraphs", compiled()
    ),
    "autotuned": Twins(
        compiled(mode="max-autotune-no-cudagraphs"), "max_autotune", compiled(mode="default")
    ),
    "every second call": Twins(count_calls(2), "calls of the step differ", count_calls(1), "cpu"),
    "every fourth call": Twins(count_calls(4), "SGD does not update", count_calls(1), "cpu"),
    "growing": Twins(grow(1), "other sizes", grow(0), "cpu"),
    "growing every fifth call": Twins(
        grow_at_times(5), "a later call has other sizes", grow_at_times(99), "cpu"
    ),
    "shared by an array": Twins(
        share(lambda array: np.add(array, 1, out=array)),
        "share memory",
        share(lambda array: array + 1),
        "cpu",
    ),
    "threads": Twins(
        beside(lambda: work_in_a_thread(lambda: torch.ones(3) + 1)),
        "PyTorch in other threads",
        beside(lambda: work_in_a_thread(lambda: sum(range(3)))),
        "cpu",
    ),
    "another program": Twins(
        beside(lambda: subprocess.run([sys.executable, "-c", ""], check=True)),
        "runs another program",
        beside(lambda: None),
        "cpu",
    ),
    "cache": Twins(grow(2), "calls of the step differ", fill_a_cache, "cpu"),
    "layer drop": Twins(
        drop_layers(lambda: torch.rand([]), 0.5),
        "one draw",
        drop_layers(lambda: torch.rand([]), 0.0),
        "cpu",
    ),
    "layer drop of Python": Twins(
        drop_layers(random.random, 0.5), "one draw", drop_layers(random.random, 0.0), "cpu"
    ),
    "layer drop of NumPy": Twins(
        drop_layers(np.random.rand, 0.5), "one draw", drop_layers(np.random.rand, 0.0), "cpu"
    ),
    "saved on the host": Twins(save(save_on_cpu), "", PLAIN),
    "saved in pinned memory": Twins(
        save(lambda: save_on_cpu(pin_memory=True)), "the host goes on", save(save_on_cpu)
    ),
    "saved by hooks": Twins(
        save(lambda: saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to("cuda"))),
        "",
        save(lambda: saved_tensors_hooks(lambda t: t.half(), lambda t: t.float())),
    ),
    "work of the host": Twins(move(True), "works on tensors of the host", move(False)),
    "not blocking": Twins(move(False, non_blocking=True), "non_blocking", move(False)),
    "several GPUs": Twins(call(lambda: nn.DataParallel(nn.Linear(8, 8)), (4, 8)), "one GPU", PLAIN),
    "two GPUs": Twins(place("cuda:0", "cuda:1"), "cuda:0, cuda:1", place("cuda:0", "cuda")),
    "weights on the host": Twins(place("cpu", "cuda"), "leaves on the host", place("cuda", 0)),
    "frozen": Twins(freeze(0, 1), "no weight is trained: the 30 numbers", freeze(0), "cpu"),
    "nothing": Twins(lambda: lambda: None, "no operation", PLAIN, "cpu"),
}


class Pairs(nn.Module):
    """A bilinear layer of two views of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x, x)


def list_notes(make_step: Callable[[], Any], device: str) -> list[str]:
    """Notes of a capture, which are its warnings too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = capture(make_step, device=device)
    said = [str(each.message) for each in caught]
    assert said == list(graph.notes)
    return [note for note in said if "compiled as a whole" not in note]


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_counted_is_said_once_and_only_where_it_is_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three calls tell of all cases but one."""
    if name != "growing every fifth call":
        monkeypatch.setattr("perfkit.recording.comparisons.USUAL_OPERATIONS", 0)
    case = CASES[name]
    notes = list_notes(case.ill, case.device)
    if case.word:
        [note] = notes
        assert case.word in note
    else:
        assert not notes
    assert not list_notes(case.healthy, case.device)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_graphs_of_the_compiler_are_launched_at_once() -> None:
    """Inductor's merge kernels before; the backend of this name merges none."""
    plain = capture(compiled(), device="cuda")
    reduced = capture(compiled(mode="reduce-overhead"), device="cuda")
    tuned = capture(compiled(mode="max-autotune"), device="cuda")
    graphed = capture(compiled(backend="cudagraphs"), device="cuda")
    not_merged = capture(compiled(backend="aot_eager"), device="cuda")
    graphs = [plain, reduced, tuned, graphed, not_merged]
    executions = [graph.execution for graph in graphs]
    assert executions == ["compiled", "graphs", "graphs", "graphs", "eager"]
    assert reduced.labels == plain.labels
    assert graphed.labels == not_merged.labels


def test_a_backend_that_merges_nothing_leaves_the_operations_as_they_are() -> None:
    graph = capture(compiled(backend="aot_eager"), device="cuda")
    assert graph.execution == "eager"
    assert not graph.notes


@pytest.mark.parametrize("optimizer", ["SparseAdam", "Adam", "RAdam", "SGD"])
def test_an_optimizer_is_not_compiled_because_something_else_was(optimizer: str) -> None:
    """The first use of the compiler changes PyTorch's optimizers for the rest of the process."""

    def make_step() -> Callable[[], None]:
        table = nn.EmbeddingBag(1000, 16, mode="sum", sparse=optimizer == "SparseAdam")
        rule = getattr(torch.optim, optimizer)(table.parameters(), lr=0.1)
        rows = torch.arange(320).reshape(32, 10)

        def step() -> None:
            rule.zero_grad()
            table(rows).square().mean().backward()
            rule.step()

        return step

    TorchPatcher.patch()
    with warnings.catch_warnings(action="ignore"):
        names = [label.name for label in capture(make_step).labels]
    assert names
    assert not [name for name in names if name.startswith("fused_")]


@pytest.mark.parametrize(("disabled", "merged"), [(False, True), (True, False)])
def test_an_optimizer_is_compiled_with_the_step_that_calls_it(disabled: bool, merged: bool) -> None:
    def make_step() -> Callable[[], None]:
        net = nn.Linear(64, 64)
        rule = torch.optim.Adam(net.parameters(), foreach=False)
        update = torch.compiler.disable(rule.step) if disabled else rule.step
        x = torch.randn(8, 64)

        @torch.compile
        def step() -> None:
            net(x).square().mean().backward()
            update()

        return step

    with pytest.warns(UserWarning, match="compiled as a whole"):
        frame = capture(make_step).table()
    names = frame.filter(frame["phase"] == "update")["name"].to_list()
    assert any(name.startswith("fused_") for name in names) == merged


def test_a_script_of_several_ranks_is_captured_as_it_is_written() -> None:
    """Devices by their number, a process group of its own, events that time the step."""

    def make_step() -> Callable[[], None]:
        torch.distributed.init_process_group("nccl", rank=0, world_size=2)
        rank = torch.distributed.get_rank()
        net = nn.Linear(8, 8).to(rank)
        net = nn.parallel.DistributedDataParallel(net, device_ids=[rank], output_device=rank)
        x, log = torch.randn(4, 8, device=rank), list[float]()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)

        def step() -> None:
            torch.cuda.nvtx.range_push("step")
            start.record()
            net(x).sum().backward()
            end.record()
            torch.cuda.nvtx.range_pop()
            log.append(start.elapsed_time(end))

        return step

    graph = capture(make_step, ranks=2, device="cuda")
    assert len(graph.collectives) == 1
    assert not graph.notes
    with pytest.raises(ValueError, match="process group of 2 ranks, and ranks is 4"):
        capture(make_step, ranks=4, device="cuda")


def test_sequences_of_known_lengths_are_captured() -> None:
    def make_step() -> Callable[[], None]:
        layer, x = nn.LSTM(8, 16), torch.randn(5, 3, 8)

        def step() -> None:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]))
            layer(packed)[0].data.sum().backward()

        return step

    products = [label for label in capture(make_step).labels if label.kind == "gemm"]
    assert len(products) > 5


def test_gradients_of_the_biases_of_an_lstm_are_not_copied() -> None:
    def make_step() -> Callable[[], None]:
        layer, x = nn.LSTM(8, 6), torch.randn(5, 4, 8)
        return lambda: layer(x)[0].sum().backward()

    names = [label.name for label in capture(make_step).labels]
    assert "mkldnn_rnn_layer_backward" in names and "copy_" not in names


def test_gradients_of_each_sample_are_captured() -> None:
    def make_step() -> Callable[[], Any]:
        net, x = nn.Linear(8, 4), torch.randn(6, 8)
        weights = {name: p.detach() for name, p in net.named_parameters()}

        def loss(given: Any, one: Any) -> Any:
            return torch.func.functional_call(net, given, (one[None],)).sum()

        return lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)

    assert not capture(make_step).notes


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_product_with_a_sparse_matrix_is_refused_with_its_line(layout: Any) -> None:
    def make_step() -> Callable[[], None]:
        weight = nn.Parameter(torch.randn(8, 4))
        dense = torch.eye(8)
        sparse = dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr()
        return lambda: (sparse @ weight).sum().backward()

    with pytest.raises(
        ValueError, match=r"no rule for fake tensors.*test_recorded|test_recorded.*"
    ):
        capture(make_step)


def test_a_sparse_tensor_of_computed_numbers_is_refused_with_the_reason() -> None:
    def make_step() -> Callable[[], None]:
        net = nn.Linear(8, 8)
        return lambda: net(torch.randn(4, 8)).relu().to_sparse().to_dense().sum().backward()

    with pytest.raises(
        ValueError, match="how many numbers of a sparse tensor are not zero"
    ) as said:
        capture(make_step)
    assert "test_recorded_notes.py" in str(said.value) and "dense tensor" in str(said.value)


def test_copies_into_given_memory_cross_between_host_and_gpu() -> None:
    def make_step() -> Callable[[], None]:
        net = nn.Linear(8, 8).cuda()
        batch, kept = torch.empty(4, 8, device="cuda"), torch.empty(4, 8)
        source = torch.randn(4, 8)

        def step() -> None:
            batch.copy_(source)
            out = net(batch)
            out.sum().backward()
            kept.copy_(out.detach())

        return step

    graph = capture(make_step, device="cuda")
    assert [graph.labels[i].variant for i in graph.transfers] == ["to_device", "to_host"]


def test_a_failed_capture_leaves_no_switch_and_no_process_group() -> None:
    def make_step() -> Callable[[], None]:
        torch.backends.cudnn.benchmark = not before[0]
        torch.autograd.set_detect_anomaly(True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.enable_flash_sdp(False)
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        raise OSError

    def read() -> list[bool]:
        return [
            torch.backends.cudnn.benchmark,
            torch.is_anomaly_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.distributed.is_initialized(),
        ]

    before = read()
    with pytest.raises(OSError):
        capture(make_step)
    assert read() == before


# -- numbers that the step reads


def read(use: Callable[[float], Any]) -> Callable[[], Any]:
    """A step that reads its loss as a number, and runs a layer once more if `use` of it says so."""

    def make_step() -> Callable[[], None]:
        net, log = nn.Linear(4, 4), list[Any]()

        def step() -> None:
            x = net(torch.randn(3, 4))
            loss = x.square().mean()
            log.append(loss.item())
            found = use(loss.item())
            if found is True:
                loss = net(x).sum()
            loss.backward()

        return step

    return make_step


def is_below(loss: float) -> bool:
    return float(loss) < 0.5


def is_above(loss: float) -> bool:
    return float(loss) > 10_000


def is_negative(loss: float) -> bool:
    return float(loss) < 0


def has_large_root(loss: float) -> bool:
    return math.sqrt(abs(loss)) > 2


def has_low_perplexity(loss: float) -> bool:
    return math.exp(min(float(loss), 20.0)) < 20


def has_large_mean(loss: float) -> bool:
    return bool(np.mean([loss, 2.0]) > 1.7)


def is_small_as_text(loss: float) -> bool:
    return float(f"{loss:.3f}") < 2


def is_in_a_band(loss: float) -> bool:
    return 0.5 < loss < 0.9


DECISIONS: list[Callable[[float], bool]] = [
    is_below,
    is_above,
    is_negative,
    has_large_root,
    has_low_perplexity,
    has_large_mean,
    is_small_as_text,
    is_in_a_band,
    bool,
]


@pytest.mark.parametrize("use", DECISIONS)
def test_a_branch_by_a_computed_number_is_refused(use: Any) -> None:
    with pytest.raises(ValueError, match=r"decides by one that it reads in .*loss\.item\(\)"):
        capture(read(use))


def average(loss: float) -> Any:
    return np.mean([loss])


def write_as_text(loss: float) -> str:
    return f"{loss:.3f}"


def double(loss: float) -> float:
    return loss * 2


def round_to_digits(loss: float) -> float:
    return round(loss, 4)


def keep_the_best(loss: float) -> float:
    return min(loss, 3.0)


def stop_if_it_diverged(loss: float) -> None:
    if loss > 1e9:
        raise OSError


LOGS: list[Callable[[float], Any]] = [
    float,
    math.exp,
    average,
    write_as_text,
    double,
    round_to_digits,
    keep_the_best,
    stop_if_it_diverged,
]


@pytest.mark.parametrize("use", LOGS)
def test_a_computed_number_may_be_logged(use: Any) -> None:
    assert not list_notes(read(use), "cpu")


def read_tensor(use: Callable[[Any], Any]) -> Callable[[], Any]:
    """A step that uses its scores, a tensor; it runs a layer once more if `use` says so."""

    def make_step() -> Callable[[], None]:
        net, log = nn.Linear(4, 4), list[Any]()

        def step() -> None:
            scores = net(torch.randn(3, 4))
            log.append(use(scores))
            if log[-1] is True:
                scores = net(scores)
            scores.sum().backward()

        return step

    return make_step


def count_ones(scores: Any) -> Any:
    """How many rows have their largest score in the second column: a tensor of one number."""
    return (scores.argmax(1) == 1).sum()


def log_sum(scores: Any) -> float:
    return float(scores.detach().sum())


def log_sum_as_text(scores: Any) -> str:
    return f"{scores.sum():.3f}"


def log_count(scores: Any) -> int:
    return int(count_ones(scores))


def log_whole_numbers(scores: Any) -> str:
    return f"{int(scores.sum().item())} {round(scores.sum().item())}"


def divide_by_count(scores: Any) -> Any:
    return scores.sum() / int(count_ones(scores))


def log_count_as_text(scores: Any) -> str:
    return f"{count_ones(scores).item():d}"


def log_accuracy(scores: Any) -> float:
    return 100 * count_ones(scores).item() / 3


def log_entropy(scores: Any) -> Any:
    return torch.distributions.Categorical(logits=scores).entropy()


TENSOR_LOGS: list[Callable[[Any], Any]] = [
    log_sum,
    log_sum_as_text,
    log_count,
    log_whole_numbers,
    divide_by_count,
    log_count_as_text,
    log_accuracy,
    log_entropy,
]


@pytest.mark.parametrize("use", TENSOR_LOGS)
def test_a_computed_tensor_may_be_logged(use: Any) -> None:
    assert not list_notes(read_tensor(use), "cpu")


def has_small_sum(scores: Any) -> bool:
    return float(scores.detach().sum()) < 3


def has_largest_row_at_the_end(scores: Any) -> bool:
    return bool(np.argmax([row.item() for row in scores.sum(1)]) == 2)


def has_smallest_row_at_the_end(scores: Any) -> bool:
    return min(range(3), key=lambda row: scores[row, 0].item()) == 2


def has_large_count(scores: Any) -> bool:
    return count_ones(scores).item() > 2


def draw_as_many_rows(scores: Any) -> Any:
    return torch.randn(count_ones(scores).item(), 3)


def has_large_whole_number(scores: Any) -> bool:
    return int(count_ones(scores)) > 2


def draw_a_whole_number_of_rows(scores: Any) -> Any:
    return torch.randn(int(count_ones(scores)), 3)


def loop_as_often(scores: Any) -> list[Any]:
    return [torch.ones(2) + 1 for _ in range(int((scores > 1).sum()))]


def take_from_a_list(scores: Any) -> int:
    return [1, 2, 3][int(count_ones(scores))]


def count_up(scores: Any) -> list[int]:
    return list(range(count_ones(scores).item()))


TENSOR_DECISIONS: list[Callable[[Any], Any]] = [
    has_small_sum,
    has_largest_row_at_the_end,
    has_smallest_row_at_the_end,
    has_large_count,
    draw_as_many_rows,
    has_large_whole_number,
    draw_a_whole_number_of_rows,
    loop_as_often,
    take_from_a_list,
    count_up,
]


@pytest.mark.parametrize("use", TENSOR_DECISIONS)
def test_a_branch_by_a_computed_tensor_is_refused(use: Any) -> None:
    with pytest.raises(ValueError, match=r"capture computes no values, and the step .*scores"):
        capture(read_tensor(use))


def test_a_refusal_in_a_notebook_names_its_cell_and_not_a_file_of_jupyter() -> None:
    lines = [
        "def step(net, x):",
        "    loss = net(x).sum()",
        "    return float(loss) > 3 and loss.backward()",
    ]
    names: dict[str, Any] = {}
    exec(compile("\n".join(lines), "ipykernel_4711/123456.py", "exec"), names)
    net = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"in a cell of this notebook, line 3") as refused:
        capture(lambda: lambda: names["step"](net, torch.randn(3, 4)))
    assert "ipykernel" not in str(refused.value)


def test_a_step_that_ends_its_data_is_captured() -> None:
    def make_step() -> Callable[[], None]:
        net, batches = nn.Linear(4, 4), iter([torch.randn(3, 4) for _ in range(2)])
        return lambda: net(next(batches)).sum().backward()

    assert len(capture(make_step))


# -- products


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_product_has_the_work_of_four(dtype: Any) -> None:
    def make_step() -> Callable[[], None]:
        weight = nn.Parameter(torch.randn(16, 16, dtype=dtype))
        x = torch.randn(16, 16, dtype=dtype)
        return lambda: (x @ weight).abs().sum().backward()

    graph = capture(make_step)
    operations = [graph[place] for place in range(len(graph))]
    products = [operation for operation in operations if operation.kind == "gemm"]
    assert products
    for product in products:
        assert product.features["flops"] == 8 * 16**3


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.complex32, "fp16"), (torch.complex64, "fp32"), (torch.complex128, "fp64")],
)
def test_conjugates_are_views_and_complex_numbers_have_a_format(dtype: Any, name: str) -> None:
    """PyTorch marks a tensor as conjugate or negative, and runs no kernel for it."""

    def make_step() -> Callable[[], None]:
        weight = nn.Parameter(torch.zeros(16, 16, dtype=dtype))
        return lambda: (weight * weight.conj()).imag.sum().backward()

    graph = capture(make_step)
    assert graph.dtype == name
    assert not {"_conj", "_neg_view"} & {label.name for label in graph.labels}


@pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
def test_a_scaled_product_is_a_product_in_fp8() -> None:
    def make_step() -> Callable[[], Any]:
        a = torch.randn(256, 512, device="cuda").to(torch.float8_e4m3fn)
        b = torch.randn(256, 512, device="cuda").to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        return lambda: torch._scaled_mm(a, b.t(), **options)

    graph = capture(make_step, device="cuda")
    assert graph[0].kind == "gemm"
    assert graph[0].features["flops"] == 2 * 256 * 256 * 512
    assert (graph.dtypes or [graph.dtype])[0] == "fp8"
    assert not predict(graph, "h100-sxm-8").unmodelled


# -- weights and memory


@pytest.mark.filterwarnings("ignore::perfkit.platform.estimates.ExtrapolationWarning")
def test_frozen_weights_are_parameters_of_the_memory() -> None:
    def make_step() -> Callable[[], None]:
        big, small = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 8, bias=False)
        big.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(small.parameters())

        def step() -> None:
            optimizer.zero_grad()
            small(big(torch.randn(16, 1024))).sum().backward()
            optimizer.step()

        return step

    graph = capture(make_step)
    parts = predict(graph, "zen5-2").memory().parts
    assert parts["parameters"] == 4 * (1024 * 1024 + 8 * 1024)
    assert graph.parameters == 8 * 1024


@pytest.mark.parametrize(
    ("rows", "ranks", "words"),
    [
        (2_000_000, 1, ["dense gradients and an update of every row by adamw"]),
        (2_000_000, 8, ["dense gradients", "copies embedding tables of 16 M weights"]),
        (50_000, 8, []),
    ],
)
def test_large_tables_are_named(rows: int, ranks: int, words: list[str]) -> None:
    model = nn.Sequential(nn.Embedding(rows, 8), nn.Linear(8, 1))
    with pytest.warns(UserWarning) if words else warnings.catch_warnings():
        graph = capture(model, torch.zeros(4, dtype=torch.long), ranks=ranks)
    for word, note in zip(words, graph.notes, strict=True):
        assert word in note


@pytest.mark.parametrize(("rows", "sparse"), [(600_000, False), (600_000, True), (1_000, False)])
def test_large_tables_of_a_step_that_was_written_by_hand_are_named(rows: int, sparse: bool) -> None:
    def make_step() -> Callable[[], None]:
        tables = [nn.EmbeddingBag(rows, 8, mode="sum", sparse=sparse) for _ in range(2)]
        weights = [table.weight for table in tables]
        optimizer = torch.optim.SGD(weights) if sparse else torch.optim.AdamW(weights)

        def step() -> None:
            optimizer.zero_grad()
            bags = [table(torch.zeros(4, 2, dtype=torch.long)).sum() for table in tables]
            (bags[0] + bags[1]).backward()
            optimizer.step()

        return step

    is_named = rows > 1_000 and not sparse
    with pytest.warns(UserWarning) if is_named else warnings.catch_warnings():
        graph = capture(make_step)
    assert graph.updated_by == ("sgd" if sparse else "adamw")
    if not is_named:
        assert graph.notes == ()
        return
    [note] = graph.notes
    assert "tables of 10 M weights get dense gradients and an update of every row by adamw" in note
    assert "pk.DLRM(embedding='exact') or pk.shard" in note
    with keep_quiet():
        assert predict(graph, "h100-sxm-8").headline().endswith(", adamw, eager")


def test_an_empty_graph_is_not_predicted() -> None:
    with pytest.warns(UserWarning, match="no operation"):
        graph = capture(lambda: lambda: None)
    with pytest.raises(ValueError, match="no operations"):
        predict(graph, "h100-sxm-8")


def test_work_of_other_processes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"starts another process in .*spawn"):
        capture(lambda: lambda: torch.multiprocessing.spawn(print, nprocs=1))


def test_work_on_tensors_of_the_capture_in_a_thread_is_refused(capsys: Any) -> None:
    def make_step() -> Callable[[], None]:
        net, other = nn.Linear(4, 4), nn.Linear(4, 4)

        def step() -> None:
            helper = threading.Thread(target=lambda: other(torch.randn(3, 4)).sum().backward())
            helper.start()
            net(torch.randn(3, 4)).sum().backward()
            helper.join()

        return step

    with pytest.raises(ValueError, match=r"in another thread, started in .*helper\.start\(\)"):
        capture(make_step)
    assert not capsys.readouterr().err


def divide_by_types() -> Callable[[], None]:
    """Weights that FSDP divides; the names of its first version and of its second are alike."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(nn.Linear(4, 4).cuda())


def make_by_old_types() -> Any:
    """A tensor by the name of its type on a GPU."""
    return torch.cuda.FloatTensor(4)


def delay_a_stream() -> Any:
    """A kernel that waits, as tests of overlap use it."""
    return torch.cuda._sleep(1000)


@pytest.mark.parametrize(
    ("make_step", "advice"),
    [
        (divide_by_types, "use torch.distributed.fsdp.fully_shard"),
        (make_by_old_types, "name the device instead"),
        (delay_a_stream, "leave this call out"),
    ],
)
def test_what_needs_a_gpu_is_refused_in_a_line(make_step: Any, advice: str) -> None:
    with pytest.raises(ValueError, match=advice) as caught:
        capture(make_step, device="cuda", ranks=2)
    assert "\n" not in str(caught.value)
    assert "test_recorded_notes.py, line" in str(caught.value)


# -- what other packages say and leave behind


def test_a_default_device_is_put_back_also_after_an_error() -> None:
    def make_step() -> Callable[[], None]:
        torch.set_default_device("cuda")
        net = nn.Linear(4, 4)
        return lambda: net(torch.randn(3, 4)).sum().backward()

    def fail() -> None:
        torch.set_default_device("cuda")
        raise KeyError("own")

    assert len(capture(make_step, device="cuda")) == 8
    with pytest.raises(KeyError, match="own"):
        capture(fail, device="cuda")
    assert torch.utils._device.CURRENT_DEVICE is None


@pytest.fixture
def own_operation() -> Iterator[Any]:
    with torch.library._scoped_library("perfkit_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        library.impl("twice", lambda x: x * 2, "AutocastCUDA")
        yield torch.ops.perfkit_test.twice


def test_an_operation_of_the_user_with_a_rule_of_autocast(own_operation: Any) -> None:
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.warns(UserWarning, match="work of twice"):
        graph = capture(lambda: lambda: own_operation(net(x)), device="cuda")
    assert [label.name for label in graph.labels][-1] == "twice"
    assert not capture(lambda: lambda: net(x).sum().backward(), device="cuda").notes


def test_a_script_that_asks_for_a_gpu_gets_one() -> None:
    found = []

    def make_step() -> Callable[[], None]:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        net, x = nn.Linear(4, 4).to(device), torch.randn(3, 4)
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
        found.append((device, torch.cuda.device_count(), torch.ones(2, device=device).is_cuda))

        def step() -> None:
            net(x.to(device)).sum().backward()

        return step

    graph = capture(make_step, device="cuda")
    assert found == [("cuda", 1, True)]
    assert [graph.labels[place].variant for place in graph.transfers] == ["to_device"]
    capture(lambda: lambda: found.append(torch.cuda.is_available()) or torch.ones(2))
    assert found[-1] is torch.cuda.is_available()


def write_configuration(folder: Path, **fields: Any) -> Path:
    """A file of a configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


TOKENS = {"input_ids": torch.ones(1, 8, dtype=torch.long)}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize("by_folder", [True, False])
def test_a_configuration_that_needs_its_own_code_is_refused(
    tmp_path: Path, by_folder: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    pytest.importorskip("transformers", reason="configurations need transformers")
    ran = tmp_path / "ran"
    own = f"open({str(ran)!r}, 'w')\nclass OwnConfig: pass"
    (tmp_path / "configuration_own.py").write_text(own)
    path = write_configuration(
        tmp_path,
        architectures=["OwnForCausalLM"],
        model_type="own_type",
        auto_map={"AutoConfig": "configuration_own.OwnConfig"},
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="code of its own") as refused:
        capture(tmp_path if by_folder else path, TOKENS)
    assert "\n" not in str(refused.value)
    assert not ran.exists()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "no_such_type"},
        {"hello": 1},
        {**LLAMA, "num_attention_heads": "two"},
        {**LLAMA, "architectures": ["pipeline"], "model_type": "none"},
    ],
)
def test_errors_of_transformers_are_one_line(tmp_path: Path, fields: dict[str, Any]) -> None:
    pytest.importorskip("transformers", reason="configurations need transformers")
    with pytest.raises(ValueError, match=r"^(make_step is|transformers cannot)") as refused:
        capture(write_configuration(tmp_path, **fields), TOKENS)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_fields_that_are_not_used_are_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="configurations need transformers")
    ill = write_configuration(tmp_path, **LLAMA, quantization_config={"load_in_8bit": True})
    with pytest.warns(UserWarning, match="quantization_config is not used"):
        capture(ill, TOKENS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(write_configuration(tmp_path, **LLAMA), TOKENS)


def test_pytorch_does_not_speak_of_the_capture(caplog: Any, capsys: Any) -> None:
    def make_step() -> Callable[[], Any]:
        net = nn.LSTM(4, 4, proj_size=2)
        return lambda: net(torch.randn(3, 2, 4))[0].detach().numpy()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = capture(make_step)
    assert [str(each.message) for each in caught] == list(graph.notes)
    assert not caplog.records
    assert capsys.readouterr() == ("", "")
