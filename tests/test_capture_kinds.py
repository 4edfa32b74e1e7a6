"""Drawn programs of each kind of step that once failed: captures have the operations of real runs,
whatever way a device is named, and an error at any point leaves the process as it was."""

import copy
import math
import random
import statistics
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from perfkit.recording.steps import capture  # noqa: E402
from tests.test_recorded_programs import (  # noqa: E402
    UNLIKE,
    list_captured_operations,
    list_real_operations,
)
from tests.test_recording import is_as_before, list_replaced  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_calls")
Step = Callable[[], Any]
#: Rows and columns of what pieces of a program take and give.
ROWS, WIDTH = 6, 8


# -- pieces of programs, each from the kind that it stands for


def use_copies(draw: random.Random) -> Callable[[Any], Any]:
    """A deep copy of layers with whole numbers and others in their buffers."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    net = copy.deepcopy(layers)
    if draw.random() < 0.5:
        net[1].load_state_dict(copy.deepcopy(layers[1].state_dict()))
    return net


def use_distributions(draw: random.Random) -> Callable[[Any], Any]:
    """Samples and likelihoods of distributions of computed numbers."""
    kinds: list[Callable[[Any], Any]] = [
        lambda x: torch.distributions.Normal(x, F.softplus(x) + 0.1),
        lambda x: torch.distributions.Laplace(x, x.exp()),
        lambda x: torch.distributions.Bernoulli(logits=x),
        lambda x: torch.distributions.Independent(torch.distributions.Normal(x, 1.0), 1),
        lambda x: torch.distributions.Categorical(logits=x),
    ]
    make = draw.choice(kinds)

    def run(x: Any) -> Any:
        found = make(x)
        likelihood = found.log_prob(found.sample())
        return x * (likelihood if likelihood.dim() == 2 else likelihood[:, None])

    return run


def use_lengths(draw: random.Random) -> Callable[[Any], Any]:
    """Packed sequences of drawn lengths."""
    lengths = sorted((draw.randint(1, 4) for _ in range(ROWS)), reverse=True)
    layer = draw.choice([nn.LSTM, nn.GRU])(WIDTH, WIDTH, batch_first=True)
    known = torch.tensor(lengths)

    def run(x: Any) -> Any:
        rows = x[:, None].expand(ROWS, 4, WIDTH)
        out, _ = layer(pack_padded_sequence(rows, known, batch_first=True))
        return x + pad_packed_sequence(out, batch_first=True)[0].sum(1)

    return run


def use_known_numbers(draw: random.Random) -> Callable[[Any], Any]:
    """Sizes that follow from known whole numbers, in many ways."""
    numbers = torch.tensor([draw.randint(0, 2) for _ in range(ROWS)])
    ways: list[Callable[[Any], Any]] = [
        lambda x: torch.cat([part * 2 for part in x.split(torch.bincount(numbers).tolist())]),
        lambda x: x + x[numbers > 0].sum(0),
        lambda x: x + x[: int(numbers.max()) + 1].sum(0),
        lambda x: x * numbers.unique().numel(),
        lambda x: x + x[numbers.nonzero().squeeze(1)].sum(0),
        lambda x: x.masked_select((numbers >= 0)[:, None]).view(ROWS, WIDTH),
        lambda x: x + F.one_hot(numbers, WIDTH),
        lambda x: x + x.repeat_interleave(numbers, 0).sum(0),
    ]
    return draw.choice(ways)


def use_functions(draw: random.Random) -> Callable[[Any], Any]:
    """Transforms of functions."""
    weight = nn.Parameter(torch.randn(WIDTH))
    ways: list[Callable[[Any], Any]] = [
        lambda x: torch.vmap(lambda row: row * weight)(x),
        lambda x: torch.func.vjp(lambda y: y * weight, x)[1](x)[0],
        lambda x: torch.vmap(torch.func.grad(lambda row: (row * weight).square().sum()))(x),
    ]
    return draw.choice(ways)


def use_logs(draw: random.Random) -> Callable[[Any], Any]:
    """Numbers that are only logged."""
    ways: list[Callable[[Any], Any]] = [
        lambda x: float(x.mean()),
        lambda x: f"{x.mean():.3f} {x.sum().item():,.1f}",
        lambda x: int((x.argmax(1) == 2).sum()),
        lambda x: statistics.mean([x.mean().item(), 2.0]),
        lambda x: math.exp(min(x.mean().item(), 20.0)),
        lambda x: max(x.sum().item(), x.mean().item()),
        lambda x: x.norm().item() / 3 + round(x.mean().item(), 2),
    ]
    way = draw.choice(ways)
    log: list[Any] = []

    def run(x: Any) -> Any:
        log.append(way(x.detach()))
        return x

    return run


def use_checks(draw: random.Random) -> Callable[[Any], Any]:
    """Checks that only raise."""
    wrong: list[Callable[[Any], Any]] = [
        lambda x: x.isnan().any(),
        lambda x: not torch.isfinite(x).all(),
        lambda x: (x.abs() > 1e30).any().item(),
        lambda x: x.abs().max().item() > 1e30,
    ]
    is_wrong = draw.choice(wrong)

    def run(x: Any) -> Any:
        if is_wrong(x.detach()):
            raise ValueError(x)
        return x

    return run


class Clipped(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() < 1)


def use_autograd(draw: random.Random) -> Callable[[Any], Any]:
    """Own gradients, recomputation, hooks, frozen parts."""
    layer = nn.Linear(WIDTH, WIDTH)
    seen: list[Any] = []

    def watch(x: Any) -> Any:
        y = layer(x)
        y.register_hook(lambda gradient: seen.append(gradient.norm()))
        return y

    def freeze(x: Any) -> Any:
        with torch.no_grad():
            scale = layer(x).std()
        return x * scale

    ways = [
        Clipped.apply,
        lambda x: checkpoint(layer, x, use_reentrant=False),
        watch,
        freeze,
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    ]
    return draw.choice(ways)


PIECES = [
    use_copies,
    use_distributions,
    use_lengths,
    use_known_numbers,
    use_functions,
    use_logs,
    use_checks,
    use_autograd,
]


def draw_program(seed: int) -> Callable[[], Step]:
    """A step of drawn pieces, with a drawn optimizer and what people do around it."""

    def make_step() -> Step:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        pieces = [piece(draw) for piece in draw.sample(PIECES, 4)]
        net = nn.Linear(WIDTH, WIDTH)
        kind = draw.choice([torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
        optimizer = kind(net.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        average = torch.optim.swa_utils.AveragedModel(net) if draw.random() < 0.5 else None
        clips = draw.random() < 0.5

        def step() -> None:
            optimizer.zero_grad()
            x = net(torch.randn(ROWS, WIDTH))
            for piece in pieces:
                x = piece(x)
            x.square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if average is not None:
                average.update_parameters(net)

        return step

    return make_step


@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_program_has_the_operations_of_its_real_run(seed: int) -> None:
    captured = list_captured_operations(draw_program(seed))
    real = list_real_operations(draw_program(seed))
    assert [n for n in captured if n not in UNLIKE] == [n for n in real if n not in UNLIKE]


# -- ways to name a GPU


def draw_device(draw: random.Random) -> Any:
    """The first GPU, as people name it."""
    return draw.choice(["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0])


def place_module(draw: random.Random, net: Any) -> Any:
    """A module on the GPU, moved in a drawn way."""
    device = draw_device(draw)
    ways: list[Callable[[], Any]] = [
        lambda: net.to(device),
        lambda: net.to(device=device, dtype=torch.float32),
        lambda: net.cuda(),
        lambda: net.cuda(0),
        lambda: net.to(torch.cuda.current_device()),
        lambda: net.to("cuda" if torch.cuda.is_available() else "cpu"),
    ]
    return draw.choice(ways)()


def place_batch(draw: random.Random, x: Any, net: Any) -> Any:
    """A batch on the GPU, moved in a drawn way."""
    device = draw_device(draw)
    ways: list[Callable[[], Any]] = [
        lambda: x.to(device),
        lambda: x.cuda(),
        lambda: x.to(device, torch.float32),
        lambda: x.to(next(net.parameters()).device),
        lambda: x.to(next(net.parameters())),
        lambda: x.to(device=net.weight.device, non_blocking=False),
    ]
    return draw.choice(ways)()


def make_zeros(draw: random.Random, x: Any) -> Any:
    """Zeros on the GPU, made in a drawn way."""
    device = draw_device(draw)
    ways: list[Callable[[], Any]] = [
        lambda: torch.full(x.shape, 0.0, device=x.device),
        lambda: torch.full((*x.shape,), 0.0, device=f"cuda:{x.get_device()}"),
        lambda: torch.zeros_like(x, device=device),
        lambda: torch.full_like(x, 0.0, device=device),
        lambda: x.new_zeros(x.shape),
        lambda: torch.full(x.shape, 0.0, device=device),
    ]
    return draw.choice(ways)()


@pytest.mark.parametrize("seed", range(8))
def test_the_way_in_which_a_gpu_is_named_changes_nothing(seed: int) -> None:
    data = torch.randn(ROWS, WIDTH)

    def make_step(draws: bool) -> Step:
        net = nn.Linear(WIDTH, WIDTH)
        if draws:
            draw = random.Random(seed)
            torch.cuda.set_device(draw_device(draw))
            net = place_module(draw, net)
        else:
            net = net.to("cuda")

        def step() -> None:
            if draws:
                draw = random.Random(seed)
                x = place_batch(draw, data, net)
                rest = make_zeros(draw, x)
            else:
                x = data.to("cuda")
                rest = torch.full(x.shape, 0.0, device="cuda")
            assert x.is_cuda
            assert rest.device == x.device == torch.device("cuda", 0)
            (net(x) + rest).sum().backward()

        return step

    device = draw_device(random.Random(seed))
    plain, drawn = (capture(lambda d=draws: make_step(d), device=device) for draws in (False, True))
    kinds = [[(label.kind, label.variant) for label in graph.labels] for graph in (plain, drawn)]
    assert kinds[0] == kinds[1]
    assert len(drawn.transfers) == 1


@pytest.mark.parametrize("by", ["default", "context"])
def test_a_default_device_places_what_names_none(by: str) -> None:
    def make_step() -> Step:
        if by == "default":
            torch.set_default_device("cuda:0")
        with torch.device("cuda") if by == "context" else nullcontext():
            net, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
        assert x.is_cuda
        return lambda: net(x).sum().backward()

    assert not len(capture(make_step, device="cuda").transfers)
    assert torch.get_default_device() == torch.device("cpu")


# -- errors at any point


class Stop(BaseException):
    """What nobody catches, such as the wish of a user to stop."""


ERRORS: list[type[BaseException]] = [ValueError, RuntimeError, TypeError, KeyboardInterrupt, Stop]


class Failing(torch.autograd.Function):
    """A function whose gradient fails."""

    @staticmethod
    def forward(ctx: Any, x: Any, error: Any) -> Any:
        ctx.error = error
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ctx.error


def list_contexts(draw: random.Random) -> list[Any]:
    """Contexts of PyTorch that an error leaves, some of them entered and never left."""
    kinds: list[Callable[[], Any]] = [
        lambda: torch.autocast("cuda", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.no_grad(),
        lambda: torch.inference_mode(),
        lambda: torch.enable_grad(),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: torch.device("cuda"),
        lambda: torch.random.fork_rng(devices=[]),
        lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True),
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        lambda: torch.nn.utils.parametrize.cached(),
        lambda: torch.cuda.stream(torch.cuda.Stream()),
        lambda: warnings.catch_warnings(),
    ]
    return [kind() for kind in draw.sample(kinds, 3)]


def change_settings(draw: random.Random) -> None:
    """Change settings of the process, which nobody sets back."""
    ways: list[Callable[[], Any]] = [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_device("cuda"),
        lambda: torch.set_grad_enabled(False),
        lambda: torch.manual_seed(3),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.distributions.Distribution.set_default_validate_args(False),
        lambda: random.seed(3),
    ]
    for way in draw.sample(ways, 3):
        way()


def fail(draw: random.Random) -> Callable[[], Step]:
    """A step, or its making, that ends with an error at a drawn point: inside of drawn contexts, in
    the forward or the backward pass, a hook, an optimizer, a transform, a module or its making."""
    error = draw.choice(ERRORS)
    point = draw.choice(
        ["making", "forward", "gradient", "hook", "update", "function", "module", "late", "value"]
    )

    def make_step() -> Step:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to("cuda")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        calls = [0]

        def stop(*_: Any) -> None:
            raise error

        if point == "module":
            net[1].register_forward_hook(stop)
        if point == "update":
            optimizer.register_step_pre_hook(stop)

        def step() -> None:
            calls[0] += 1
            change_settings(draw)
            torch.set_grad_enabled(True)
            x = net(torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.float32))
            with ExitStack() as stack:
                for context in list_contexts(draw):
                    stack.enter_context(context)
                if point == "forward" or (point == "late" and calls[0] == 2):
                    raise error
                if point == "function":
                    torch.vmap(lambda row: stop() or row)(x)
                if point == "value" and x.sum() > 0:
                    x = x[x > 0]
            x = Failing.apply(x, error) if point == "gradient" else x
            if point == "hook":
                x.register_hook(stop)
            x.sum().backward()
            optimizer.step()

        if point == "making":
            change_settings(draw)
            for context in list_contexts(draw):
                context.__enter__()
            raise error
        return step

    return make_step


def train_plainly() -> list[float]:
    """What PyTorch computes without a capture."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(net.parameters())
    losses = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.randn(ROWS, WIDTH)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = torch.vmap(torch.func.grad(lambda row: row.square().sum()))(torch.ones(2, 3))
    return [*losses, *found.flatten().tolist(), random.random()]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_an_error_at_any_point_leaves_the_process_as_it_was(seed: int, ranks: int) -> None:
    def work() -> tuple[Any, ...]:
        random.seed(0)
        plain = train_plainly()
        return plain, capture(draw_program(0)).labels, list_replaced()

    draw = random.Random(100 * seed + ranks)
    before = work()
    with pytest.raises((*ERRORS,)):
        capture(fail(draw), device=draw.choice(["cpu", "cuda"]), ranks=ranks)
    after = work()
    assert after[:2] == before[:2]
    assert is_as_before(before[2], after[2])
