"""The precision a capture records: autocast by CUDA's lists, scaled gradients, TF32, attention;
random steps."""

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs torch: pip install 'perfkit[measure]'")

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from perfkit.platform.gallery import load_platform  # noqa: E402
from perfkit.prediction.classes import classify  # noqa: E402
from perfkit.prediction.predictor import predict  # noqa: E402
from perfkit.recording.places import Places  # noqa: E402
from perfkit.recording.precision import pretend_gpu  # noqa: E402
from perfkit.recording.steps import capture  # noqa: E402
from perfkit.recording.values import Values  # noqa: E402
from perfkit.workloads.graph import Graph  # noqa: E402
from perfkit.workloads.vocabulary import VIEWS, walk_tensors  # noqa: E402
from tests.golden.steps import ADAMW, SGD, Make, mlp, train  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRODUCTS = ("gemm", "bmm", "convolution", "attention")


def list_formats(graph: Graph, *kinds: str, phase: str = "") -> list[str]:
    """Number formats of the operations of some classes, in order."""
    each = zip(graph.labels, graph.dtypes or [graph.dtype] * len(graph), strict=True)
    return [
        dtype
        for label, dtype in each
        if label.kind in (kinds or PRODUCTS) and label.phase in (phase or label.phase)
    ]


# -- autocast
# ----------------------------------------------------------------------------------------------------------


def place(tree: Any, device: str, low: Any) -> Any:
    """Tensors without values on a device, those in fp16 in another half precision."""
    if isinstance(tree, tuple | list):
        return type(tree)(place(each, device, low) for each in tree)
    if not isinstance(tree, torch.Tensor):
        return tree
    return torch.empty(tree.shape, dtype=low if tree.dtype is FP16 else tree.dtype, device=device)


def list_types(items: list[tuple[str, str, Any]], device: str, low: Any) -> list[Any]:
    """Data types of what PyTorch's operations return; each has a key, a name and arguments."""
    found, places = [], (torch, F, torch._C._nn, torch._C._linalg)
    for key, op, given in items:
        given = [place(each, device, low) for each in given]
        owner: Any = (
            given.pop(0) if "method" in key else next(each for each in places if hasattr(each, op))
        )
        found.append((op, [t.dtype for t in walk_tensors([getattr(owner, op)(*given)])]))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("low", [BF16, FP16])
def test_autocast_takes_the_data_types_of_cuda(low: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's own kernels do on tensors that say they are on a GPU, for the operations of its
    own test."""
    # which needs a package that is not here
    common = SimpleNamespace(TEST_WITH_ROCM=False, TestCase=object)
    monkeypatch.setitem(sys.modules, "torch.testing._internal.common_utils", common)
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    left_out = (
        "equal",
        "einsum",
        "grid_sampler",
        "gru_cell",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
    )
    lists = {key: items for key, items in vars(AutocastTestLists("cpu")).items() if key != "banned"}
    items = [
        (key, item[0], item[1]) for key in lists for item in lists[key] if item[0] not in left_out
    ]
    half, places = torch.ones(8, 8, dtype=FP16), Places(Values(), accelerator=True)
    items += [("", "rms_norm", (half, (8,))), ("", "einsum", ("ij,jk", half, half.float()))]
    with FakeTensorMode(), pretend_gpu(print, places), torch.autocast("cuda", low):
        ours = list_types(items, "cpu", low)
    with FakeTensorMode():
        torch.set_autocast_dtype("cuda", low)
        torch.set_autocast_enabled("cuda", True)
        try:
            theirs = list_types(items, "cuda", low)
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", FP16)
    assert ours == theirs
    assert len(ours) > 100
    assert not torch._C._dispatch_get_registrations_for_dispatch_key("AutocastPrivateUse1"), (
        "all kernels are gone"
    )


class Mixed(nn.Module):
    """Regions inside of regions, one of them computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: Any) -> Any:
        with torch.autocast("cuda", BF16):
            x = self.layers[0](x) + self.layers[0](x)  # the weight is converted once
            with torch.amp.autocast(x.device.type, enabled=False):  # as rotary embeddings are
                x = self.layers[1](x.float())
            x = checkpoint(nn.Sequential(self.layers[2], nn.GELU()), x, use_reentrant=False)
        x = torch.autocast("cuda", FP16)(self.layers[3])(x)
        return self.layers[4](x.float())


def test_regions_of_autocast_are_those_of_the_step() -> None:
    graph = capture(Mixed(), torch.randn(4, 16), device="cuda")
    assert list_formats(graph, "gemm", phase="forward") == [
        "bf16",
        "bf16",
        "fp32",
        "bf16",
        "fp16",
        "fp32",
    ]
    backward = ["fp32"] * 2 + ["fp16"] * 2 + ["bf16"] * 3 + ["fp32"] * 2 + ["bf16"] * 2
    assert list_formats(graph, "gemm", phase="backward") == backward
    casts = [(label.phase, label.module) for label in graph.labels if label.name == "_to_copy"]
    assert casts.count(("forward", "layers.0")) == 4, (
        "the weight and the bias once, the input twice"
    )


class Wrapped(nn.Module):
    """Products in a region, and what comes out of it in fp32."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.region, self.linear = region, nn.Linear(16, 16)
        self.convolution = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        with self.region:
            y = self.convolution(self.linear(x).to(memory_format=torch.channels_last))
        return y.float()


IMAGES = (2, 4, 16, 16)
UNCACHED = partial(torch.autocast, "cuda", cache_enabled=False)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "region", [torch.cuda.amp.autocast, partial(torch.autocast, "cpu"), UNCACHED]
)
def test_every_way_to_write_a_region_counts(region: Callable[..., Any]) -> None:
    graph = capture(
        train(lambda: Wrapped(region(dtype=BF16)), IMAGES, ADAMW, fused=True), device="cuda"
    )
    assert set(list_formats(graph)) == {"bf16"}
    assert [label.name for label in graph.labels if label.phase == "update"] == [
        "_foreach_add_",
        "_fused_adamw_",
    ]
    assert set(list_formats(capture(train(lambda: Wrapped(nullcontext()), IMAGES, SGD)))) == {
        "fp32"
    }


def test_a_region_that_pytorch_switched_off_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("no region is switched off")
    with pytest.warns(UserWarning, match="Disabling autocast"):
        region = torch.autocast("cuda", BF16)
    with pytest.warns(UserWarning, match="as it was made before the capture; make it in make_step"):
        graph = capture(train(lambda: Wrapped(region), IMAGES, SGD), device="cuda")
    assert set(list_formats(graph)) == {"fp32", "tf32"}


@pytest.mark.parametrize(("fused", "reads"), [(False, 1), (True, 0)])
def test_gradients_are_scaled_as_on_a_gpu(fused: bool, reads: int) -> None:
    """The host reads once whether something overflowed; a fused optimizer finds out by itself."""

    def make() -> Callable[[], Any]:
        net, x = mlp().to("cuda"), torch.randn(16, 256, device="cuda")
        scaler = torch.amp.GradScaler("cuda")
        chosen = ADAMW(net.parameters(), fused=fused or None)

        def step() -> None:
            chosen.zero_grad()
            with torch.autocast("cuda"):
                loss = net(x).sum()
            scaler.scale(loss).backward()
            scaler.step(chosen)
            scaler.update()

        return step

    graph = capture(make, device="cuda")
    names = [label.name for label in graph.labels]
    assert set(list_formats(graph)) == {"fp16"}
    assert [label.variant for label in graph.labels if label.kind == "transfer"] == [
        "to_host"
    ] * reads
    assert "_amp_foreach_non_finite_check_and_unscale_" in names
    assert names[-1] == "_amp_update_scale_"
    assert ("_fused_adamw_" if fused else "_foreach_lerp_") in names


def test_the_short_form_takes_a_precision() -> None:
    x = torch.randn(16, 256)
    for device in ("cpu", "cuda"):
        assert set(list_formats(capture(mlp, x, device=device))) == {"fp32"}
        assert set(list_formats(capture(mlp, x, device=device, amp="bf16"))) == {"bf16"}
        half = capture(mlp(), x, device=device, amp="fp16")
        assert set(list_formats(half)) == {"fp16"}
        assert "_amp_update_scale_" in [label.name for label in half.labels]
    with pytest.raises(ValueError, match="amp is 'fp32'; known are bf16, fp16"):
        capture(mlp, x, amp="fp32")
    with pytest.raises(
        ValueError, match=r"amp is 'bf16', and inputs are not given; write torch.autocast\('cpu'\)"
    ):
        capture(train(mlp, (4, 256), SGD), amp="bf16")


# -- TF32
# --------------------------------------------------------------------------------------------------------------

BACKENDS = torch.backends
TF32: dict[str, tuple[Callable[[], Any], str, str]] = {
    "as PyTorch starts": (lambda: None, "fp32", "tf32"),
    "old, products": (lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True), "tf32", "tf32"),
    "old, convolutions": (lambda: setattr(BACKENDS.cudnn, "allow_tf32", False), "fp32", "fp32"),
    "high": (lambda: torch.set_float32_matmul_precision("high"), "tf32", "tf32"),
    "new, products": (
        lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
        "tf32",
        "tf32",
    ),
    "new, convolutions": (
        lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
        "fp32",
        "fp32",
    ),
    "new, all": (lambda: setattr(BACKENDS, "fp32_precision", "tf32"), "tf32", "tf32"),
}


def look() -> list[Any]:
    old = [
        BACKENDS.cuda.matmul.allow_tf32,
        BACKENDS.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    ]
    return old + [
        torch._C._get_fp32_precision_getter("cuda", op) for op in ("all", "matmul", "conv", "rnn")
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", TF32)
def test_products_of_fp32_are_in_tf32_where_the_step_allows_it(name: str) -> None:
    switch, products, convolutions = TF32[name]

    def make_step() -> Callable[[], Any]:
        switch()
        return train(lambda: Wrapped(nullcontext()), IMAGES, SGD)()

    before = look()
    graph = capture(make_step, device="cuda")
    assert set(list_formats(graph, "gemm")) == {products}
    assert set(list_formats(graph, "convolution")) == {convolutions}
    assert set(list_formats(graph, "elementwise", "rowwise", "copy")) == {"fp32"}
    assert set(list_formats(capture(make_step))) == {"fp32"}, "a CPU has no TF32"
    assert look() == before
    assert predict(graph, "v100-sxm-8").time > 0, "in fp32 where there is no TF32"


# -- attention
# ---------------------------------------------------------------------------------------------------------

FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)
#: Data type, shape of the queries, what is passed, kernels that are allowed, and the one that
#: PyTorch's rules give.
ATTENTION: list[tuple[Any, tuple[int, ...], dict[str, Any], Any, str]] = [
    (BF16, (2, 4, 32, 64), {}, None, "flash"),
    (FP16, (2, 4, 32, 64), {"is_causal": True, "dropout_p": 0.1}, None, "flash"),
    (BF16, (2, 4, 32, 20), {}, None, "flash"),  # padded to 24
    (BF16, (2, 4, 32, 64), {"mask": True}, None, "efficient"),
    # the mask is padded
    (BF16, (2, 4, 33, 64), {"mask": True, "dropout_p": 0.1}, None, "efficient"),
    (BF16, (2, 4, 32, 288), {}, None, "efficient"),
    (FP32, (2, 4, 32, 64), {"is_causal": True, "dropout_p": 0.1}, None, "efficient"),
    (BF16, (2, 4, 32, 64), {"is_causal": True, "rows": 16}, None, "efficient"),
    (BF16, (2, 4, 32, 64), {"enable_gqa": True}, None, "flash"),
    (BF16, (2, 4, 32, 64), {"enable_gqa": True, "mask": True}, None, ""),
    (FP32, (2, 4, 32, 62), {}, None, ""),
    (torch.float64, (2, 4, 32, 64), {}, None, ""),
    (BF16, (4, 32, 64), {}, None, ""),
    (BF16, (2, 4, 32, 64), {}, MATH, ""),
    (BF16, (2, 4, 32, 64), {}, [EFFICIENT, MATH], "efficient"),
    (BF16, (2, 4, 32, 64), {"is_causal": True}, [CUDNN, FLASH], "flash"),
    (BF16, (2, 4, 32, 64), {"is_causal": True, "mask": False}, CUDNN, "cudnn"),
]


def attend(dtype: Any, shape: Any, given: Any, allowed: Any) -> Make:
    """A step of attention alone."""
    given, heads = dict(given), 2 if given.get("enable_gqa") else shape[-3]
    masked, rows = given.pop("mask", False), given.pop("rows", shape[-2])

    def make_step() -> Callable[[], Any]:
        query = torch.randn(*shape[:-2], rows, shape[-1], dtype=dtype, requires_grad=True)
        key, value = (
            torch.randn(*shape[:-3], heads, *shape[-2:], dtype=dtype, requires_grad=True)
            for _ in range(2)
        )
        mask = torch.ones(rows, shape[-2]).tril().bool() if masked else None

        def step() -> None:
            with sdpa_kernel(allowed) if allowed else nullcontext():
                F.scaled_dot_product_attention(query, key, value, mask, **given).sum().backward()

        return step

    return make_step


@pytest.mark.parametrize("last", [False, True])
def test_convolutions_say_how_their_channels_are_stored(last: bool) -> None:
    def make_step() -> Callable[[], None]:
        layout: Any = {"memory_format": torch.channels_last} if last else {}
        net: Any = nn.Sequential(
            nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)
        ).to(**layout)
        images = torch.randn(2, 4, 8, 8).contiguous(**layout)
        return lambda: net(images).sum().backward()

    variants = [
        label.variant
        for label in capture(make_step, device="cuda").labels
        if label.kind == "convolution"
    ]
    names = ("forward", "forward_pointwise", "backward_pointwise", "backward")
    assert variants == [name.replace("ward", "ward_last") if last else name for name in names]


@pytest.mark.parametrize(("dtype", "shape", "given", "allowed", "kernel"), ATTENTION)
def test_attention_runs_in_the_kernel_that_pytorch_takes(dtype, shape, given, allowed, kernel):
    graph = capture(attend(dtype, shape, given, allowed), device="cuda")
    causal = "_causal" * given.get("is_causal", False)
    labels = [label for label in graph.labels if label.kind in ("attention", "bmm")]
    if not kernel:
        assert [label.kind for label in labels] == ["bmm"] * 6
        return
    name = f"_scaled_dot_product_{kernel}_attention"
    open_or_named = {"efficient": ".efficient", "cudnn": ".flash3"}.get(kernel, "")
    forward = (name, "attention", f"forward{causal}{open_or_named}")
    backward = (f"{name}_backward", "attention", f"backward{causal}{open_or_named}")
    assert [(label.name, *label.kernel) for label in labels] == [forward, backward]
    (done,) = graph.column("flops")[[label.name == name for label in graph.labels]]
    width = -(-shape[-1] // 8) * 8 if kernel == "flash" else shape[-1]
    rows = given.get("rows", shape[2])
    assert done == 4 * shape[0] * shape[1] * rows * shape[2] * width * (0.5 if causal else 1.0)
    assert graph.column("flops").sum() == 3.5 * done


def test_attention_without_a_kernel_that_is_allowed_is_explained() -> None:
    with pytest.raises(
        ValueError, match=r"no kernel for attention in torch.float64; allow SDPBackend.MATH"
    ):
        capture(attend(torch.float64, (2, 4, 32, 64), {}, FLASH), device="cuda")


def test_attention_inside_of_pytorchs_own_layers_is_one_kernel() -> None:
    layer = partial(nn.TransformerEncoderLayer, 128, 4, 256, batch_first=True, dropout=0.1)
    for settings, dtype, name in (({"amp": "bf16"}, "bf16", "flash"), ({}, "fp32", "efficient")):
        graph = capture(layer, torch.randn(8, 64, 128), device="cuda", **settings)
        assert list_formats(graph, "attention") == [dtype] * 2
        assert f"_scaled_dot_product_{name}_attention" in [label.name for label in graph.labels]
        assert set(list_formats(graph)) == {dtype}


# -- norms
# -------------------------------------------------------------------------------------------------------------

LAST = torch.channels_last
#: Data types of what is normalized and of the weight, shape, dimensions of a row, and order in
#: memory.
NORMS: list[tuple[Any, Any, tuple[int, ...], int, Any]] = [
    (BF16, BF16, (4, 8, 16), 1, None),
    (FP32, FP32, (4, 16), 1, None),
    (torch.float64, None, (4, 16), 1, None),
    (FP16, None, (4, 16), 1, None),
    (BF16, FP32, (4, 16), 1, None),
    (FP32, BF16, (4, 16), 1, None),
    (FP32, FP32, (2, 4, 8, 8), 2, None),
    (FP32, FP32, (2, 4, 8, 8), 1, LAST),
    (FP32, FP32, (0, 8), 1, None),
    (FP32, FP32, (2, 4, 8, 8, 8), 1, torch.channels_last_3d),
    (torch.complex64, None, (4, 16), 1, None),
]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("dtype", "kept", "shape", "deep", "order"), NORMS)
def test_norms_are_one_kernel_where_pytorch_has_one(dtype, kept, shape, deep, order):
    """As its own rule says of tensors on a GPU whose kernel exists."""

    def normalize(device: str, train: bool) -> Any:
        x = torch.empty(shape, dtype=dtype, device=device)
        x = (x if order is None else x.to(memory_format=order)).requires_grad_(train)
        weight = (
            torch.empty(shape[-deep:], dtype=kept, device=device, requires_grad=train)
            if kept
            else None
        )
        return F.rms_norm(x, shape[-deep:], weight)

    graph = capture(lambda: lambda: normalize("cpu", True).real.sum().backward(), device="cuda")
    ours = [label.name for label in graph.labels if "rms_norm" in label.name]
    with (
        FakeTensorMode(),
        torch.library._scoped_library("aten", "IMPL") as library,
        Calls() as calls,
    ):
        library.impl("_fused_rms_norm", lambda x, *_: (torch.empty_like(x), x.mean(-1)), "CUDA")
        normalize("cuda", False)
    fused = "_fused_rms_norm" in [name for name, _ in calls.found]
    assert ours == ["_fused_rms_norm", "_fused_rms_norm_backward"] * fused


# -- random steps
# ------------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Names and data types of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (name := func._schema.name.split("::")[-1]) not in VIEWS:
            self.found.append(
                (name, [t.dtype for t in walk_tensors([out, args]) if t.is_floating_point()][:1])
            )
        return out


def run(make_step: Make) -> list[tuple[str, Any]]:
    """What the second call of a real step runs."""
    step = make_step()
    step()
    with Calls() as calls:
        step()
    return calls.found


class Do(nn.Module):
    """A function of rows of 16 numbers as a module, maybe with a weight."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape) / 8)] if shape else [])

    def forward(self, x: Any) -> Any:
        return self.function(x, *self.weights)


LINEAR = partial(nn.Linear, 16, 16)
#: Modules from (6, 8, 16) to the same shape.
BLOCKS: tuple[Callable[[], nn.Module], ...] = (
    LINEAR,
    partial(LINEAR, bias=False),
    lambda: nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16)),
    partial(nn.Conv1d, 8, 8, 3, padding=1),
    partial(nn.Conv1d, 8, 8, 3, padding=1, groups=8),
    partial(nn.LayerNorm, 16),
    partial(nn.RMSNorm, 16),
    partial(nn.GroupNorm, 2, 8),
    partial(nn.BatchNorm1d, 8),
    partial(nn.Softmax, -1),
    partial(nn.LogSoftmax, -1),
    partial(nn.GELU, "tanh"),
    nn.SiLU,
    nn.ReLU,
    nn.Dropout,
    partial(nn.TransformerEncoderLayer, 16, 2, 32, batch_first=True, dropout=0.0),
    lambda: Do(lambda x, w: x @ w, 16, 16),
    lambda: Do(lambda x, w: torch.einsum("bij,jk->bik", x, w), 16, 16),
    lambda: Do(lambda x, w: torch.bmm(x, w.to(x.dtype)), 6, 16, 16),
    lambda: Do(lambda x, w: x * w.sigmoid(), 16),
    lambda: Do(lambda x, w: torch.baddbmm(x, x, w.to(x.dtype)), 6, 16, 16),
    lambda: Do(lambda x: x @ x.mT @ x),
    lambda: Do(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)),
    lambda: Do(lambda x: x - x.mean(1, keepdim=True)),
    lambda: Do(lambda x: x.float().pow(2).add(1).rsqrt().to(x.dtype)),
    lambda: Do(lambda x: F.normalize(x, dim=-1)),
    lambda: Do(lambda x: torch.where(x > 0, x, x.exp())),
)
LOSSES: tuple[Callable[[Any], Any], ...] = (
    lambda y: y.float().square().mean(),
    lambda y: F.cross_entropy(y.flatten(0, 1), torch.arange(48) % 16),
    lambda y: F.mse_loss(y, torch.zeros_like(y)),
    lambda y: F.binary_cross_entropy_with_logits(y, torch.ones_like(y)),
    lambda y: F.smooth_l1_loss(y.sum(-1), torch.zeros(6, 8)),
)


def make_random(seed: int) -> tuple[str, Make]:
    """A step of some of these modules, in fp32 or under autocast, plain, computed again or in two
    micro-batches."""
    draw = random.Random(seed)
    blocks, loss = draw.choices(BLOCKS, k=draw.randint(2, 6)), draw.choice(LOSSES)
    low, form = draw.random() < 0.5, draw.choice(["plain", "checkpoint", "accumulate"])
    optimizer = draw.choice([SGD, ADAMW])
    again, reentrant = [draw.random() < 0.5 for _ in blocks], draw.random() < 0.3

    def make_step() -> Callable[[], Any]:
        net = nn.ModuleList([nn.Linear(16, 16), *(make() for make in blocks)])
        chosen, x = optimizer(net.parameters(), lr=0.01), torch.randn(6, 8, 16)

        def step() -> None:
            chosen.zero_grad()
            for _ in range(2 if form == "accumulate" else 1):
                with torch.autocast("cpu", BF16, enabled=low):
                    y = net[0](x)
                    for block, twice in zip(net[1:], again, strict=True):
                        twice = twice and form == "checkpoint"
                        y = checkpoint(block, y, use_reentrant=reentrant) if twice else block(y)
                    found = loss(y)
                found.backward()
            chosen.step()

        return step

    return f"{seed}: {form}{' in bf16' * low}", make_step


@pytest.mark.parametrize("foreach", [True, False])
def test_counts_of_steps_may_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch, foreach: bool
) -> None:
    """`capturable=True`, which PyTorch refuses on a CPU: what it runs where it is allowed."""
    make_step = train(mlp, (16, 256), ADAMW, capturable=True, foreach=foreach)
    graph = capture(make_step, device="cuda")
    for name in ("adam", "optimizer"):
        place = sys.modules[f"torch.optim.{name}"]
        monkeypatch.setattr(place, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    ran = [name for name, _ in run(make_step)]
    updates = [label.name for label in graph.labels if label.phase == "update"]
    assert len(updates) > 8 and updates == ran[-len(updates) :]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_random_steps_are_captured_as_they_run(first: int) -> None:
    for seed in range(first, first + 10):
        name, make_step = make_random(seed)
        graph, ran = capture(make_step), run(make_step)
        assert [label.name for label in graph.labels] == [each for each, _ in ran], name
        names = {FP32: "fp32", BF16: "bf16"}
        each = zip(graph.dtypes or [graph.dtype] * len(graph), ran, strict=True)
        assert not [(ours, real) for ours, real in each if real[1] and names[real[1][0]] != ours], (
            name
        )


def test_attention_over_heads_of_each_width_runs_its_own_kernel() -> None:
    """PyTorch chooses by the width of heads; the first attention of a graph decides for no other."""

    class TwoWidths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, narrow: Tensor, wide: Tensor) -> Tensor:
            first = F.scaled_dot_product_attention(narrow, narrow, narrow)
            second = F.scaled_dot_product_attention(wide, wide, wide)
            return self.scale * (first.float().sum() + second.float().sum())

    inputs = [
        torch.zeros(2, 4, 128, width, dtype=torch.bfloat16, requires_grad=True)
        for width in (64, 512)
    ]
    graph = capture(TwoWidths(), tuple(inputs), device="cuda")
    unnamed = []
    for label in graph.labels:
        if label.kind == "attention":
            label = label._replace(variant=label.variant.partition(".")[0])
        unnamed.append(label)
    operations = classify([replace(graph, labels=unnamed)], load_platform("h100-sxm-8"), "bf16")
    variants = [operations.models[number].variant for number in operations.of_operation]
    forward = [variant for variant in variants if variant.startswith("forward.")]
    assert len(set(forward)) == 2
