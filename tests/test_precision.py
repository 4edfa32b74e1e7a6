"""The precision a capture records: autocast by CUDA's lists, scaled gradients, TF32, attention;
random steps."""

import math
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
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

pytestmark = pytest.mark.usefixtures("few_calls")

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
PRODUCTS = ("gemm", "bmm", "convolution", "attention")


def list_formats(graph: Graph, *kinds: str, phase: str = "") -> list[str]:
    """Number formats of the operations of some classes, without any those of products, in order."""
    formats = []
    for label, dtype in zip(graph.labels, list_all_formats(graph), strict=True):
        of_kind = label.kind in (kinds or PRODUCTS)
        of_phase = phase in ("", label.phase)
        if of_kind and of_phase:
            formats.append(dtype)
    return formats


def list_all_formats(graph: Graph) -> list[str]:
    """The number format of each operation; a graph with one format says it once."""
    if graph.dtypes:
        return list(graph.dtypes)
    return [graph.dtype for _ in range(len(graph))]


def list_names(graph: Graph) -> list[str]:
    return [label.name for label in graph.labels]


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
    types = []
    for key, name, given in items:
        arguments = [place(each, device, low) for each in given]
        is_method = "method" in key
        operation = getattr(arguments.pop(0), name) if is_method else find_function(name)
        results = walk_tensors([operation(*arguments)])
        types.append((name, [tensor.dtype for tensor in results]))
    return types


def find_function(name: str) -> Callable[..., Any]:
    """A function of PyTorch, from the first module that has it."""
    for module in (torch, F, torch._C._nn, torch._C._linalg):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(name)


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
    items = []
    for key, operations in vars(AutocastTestLists("cpu")).items():
        for name, arguments, *_ in operations:
            if key != "banned" and name not in left_out:
                items.append((key, name, arguments))
    half = torch.ones(8, 8, dtype=FP16)
    items.append(("", "rms_norm", (half, (8,))))
    items.append(("", "einsum", ("ij,jk", half, half.float())))
    gpu = pretend_gpu(print, Places(Values(), accelerator=True))
    with FakeTensorMode(), gpu, torch.autocast("cuda", low):
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
    backward = list_formats(graph, "gemm", phase="backward")
    runs = [(dtype, len(list(equal))) for dtype, equal in groupby(backward)]
    assert runs == [("fp32", 2), ("fp16", 2), ("bf16", 3), ("fp32", 2), ("bf16", 2)]
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
    make_step = train(lambda: Wrapped(region(dtype=BF16)), IMAGES, ADAMW, fused=True)
    graph = capture(make_step, device="cuda")
    assert set(list_formats(graph)) == {"bf16"}
    updates = [label.name for label in graph.labels if label.phase == "update"]
    assert updates == ["_foreach_add_", "_fused_adamw_"]
    without_region = capture(train(lambda: Wrapped(nullcontext()), IMAGES, SGD))
    assert set(list_formats(without_region)) == {"fp32"}


def test_a_region_that_pytorch_switched_off_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("no region is switched off")
    with pytest.warns(UserWarning, match="Disabling autocast"):
        region = torch.autocast("cuda", BF16)
    with pytest.warns(UserWarning, match="as it was made before the capture; make it in make_step"):
        graph = capture(train(lambda: Wrapped(region), IMAGES, SGD), device="cuda")
    assert set(list_formats(graph)) == {"fp32", "tf32"}


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_scaled_as_on_a_gpu(fused: bool) -> None:
    """The host reads once whether something overflowed; a fused optimizer finds out by itself."""

    def make() -> Callable[[], Any]:
        net = mlp().to("cuda")
        x = torch.randn(16, 256, device="cuda")
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
    names = list_names(graph)
    transfers = [label.variant for label in graph.labels if label.kind == "transfer"]
    assert set(list_formats(graph)) == {"fp16"}
    assert "_amp_foreach_non_finite_check_and_unscale_" in names
    assert names[-1] == "_amp_update_scale_"
    if fused:
        assert transfers == []
        assert "_fused_adamw_" in names
    else:
        assert transfers == ["to_host"]
        assert "_foreach_lerp_" in names


def test_the_short_form_takes_a_precision() -> None:
    x = torch.randn(16, 256)
    for device in ("cpu", "cuda"):
        plain = capture(mlp, x, device=device)
        assert set(list_formats(plain)) == {"fp32"}
        bf16 = capture(mlp, x, device=device, amp="bf16")
        assert set(list_formats(bf16)) == {"bf16"}
        fp16 = capture(mlp(), x, device=device, amp="fp16")
        assert set(list_formats(fp16)) == {"fp16"}
        assert "_amp_update_scale_" in list_names(fp16)
    with pytest.raises(ValueError, match="amp is 'fp32'; known are bf16, fp16"):
        capture(mlp, x, amp="fp32")
    with pytest.raises(
        ValueError, match=r"amp is 'bf16', and inputs are not given; write torch.autocast\('cpu'\)"
    ):
        capture(train(mlp, (4, 256), SGD), amp="bf16")


# -- TF32
# --------------------------------------------------------------------------------------------------------------

BACKENDS = torch.backends


def leave_as_pytorch_starts() -> None:
    pass


def allow_tf32_in_products() -> None:
    BACKENDS.cuda.matmul.allow_tf32 = True


def forbid_tf32_in_convolutions() -> None:
    BACKENDS.cudnn.allow_tf32 = False


def ask_for_high_precision() -> None:
    torch.set_float32_matmul_precision("high")


def name_tf32_for_products() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"


def name_ieee_for_convolutions() -> None:
    BACKENDS.cudnn.conv.fp32_precision = "ieee"


def name_tf32_for_all() -> None:
    BACKENDS.fp32_precision = "tf32"


class Switch(NamedTuple):
    """What a step says of TF32, in the old or the new way, and the formats that follow on a GPU."""

    turn: Callable[[], None]
    products: str
    convolutions: str


SWITCHES = [
    Switch(leave_as_pytorch_starts, products="fp32", convolutions="tf32"),
    Switch(allow_tf32_in_products, products="tf32", convolutions="tf32"),
    Switch(forbid_tf32_in_convolutions, products="fp32", convolutions="fp32"),
    Switch(ask_for_high_precision, products="tf32", convolutions="tf32"),
    Switch(name_tf32_for_products, products="tf32", convolutions="tf32"),
    Switch(name_ieee_for_convolutions, products="fp32", convolutions="fp32"),
    Switch(name_tf32_for_all, products="tf32", convolutions="tf32"),
]


def read_switches() -> list[Any]:
    """All that PyTorch says of TF32, in the old way and in the new one."""
    return [
        BACKENDS.cuda.matmul.allow_tf32,
        BACKENDS.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
        torch._C._get_fp32_precision_getter("cuda", "all"),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        torch._C._get_fp32_precision_getter("cuda", "rnn"),
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.turn.__name__)
def test_products_of_fp32_are_in_tf32_where_the_step_allows_it(switch: Switch) -> None:
    def make_step() -> Callable[[], Any]:
        switch.turn()
        return train(lambda: Wrapped(nullcontext()), IMAGES, SGD)()

    # what a process has said of products before is stronger than a switch for all of them
    torch._C._set_fp32_precision_setter("cuda", "matmul", "none")
    before = read_switches()
    graph = capture(make_step, device="cuda")
    assert set(list_formats(graph, "gemm")) == {switch.products}
    assert set(list_formats(graph, "convolution")) == {switch.convolutions}
    assert set(list_formats(graph, "elementwise", "rowwise", "copy")) == {"fp32"}
    assert set(list_formats(capture(make_step))) == {"fp32"}, "a CPU has no TF32"
    assert read_switches() == before
    assert predict(graph, "v100-sxm-8").time > 0, "in fp32 where there is no TF32"


# -- attention
# ---------------------------------------------------------------------------------------------------------

FLASH = SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
CUDNN = SDPBackend.CUDNN_ATTENTION
MATH = SDPBackend.MATH


@dataclass
class Attention:
    """A call of attention, and the kernel that PyTorch's rules give it on a GPU."""

    dtype: Any
    kernel: str | None  # None: products of matrices instead
    shape: tuple[int, ...] = (2, 4, 32, 64)  # of keys: batch, heads, rows, width
    query_rows: int = 0  # 0: as many as of keys
    masked: bool = False
    is_causal: bool = False
    dropout_p: float = 0.0
    enable_gqa: bool = False  # with two heads of keys
    allowed: Any = None  # kernels, None: all

    @property
    def query_shape(self) -> tuple[int, ...]:
        rows, width = self.shape[-2:]
        return (*self.shape[:-2], self.query_rows or rows, width)

    @property
    def key_shape(self) -> tuple[int, ...]:
        heads, rows, width = self.shape[-3:]
        return (*self.shape[:-3], 2 if self.enable_gqa else heads, rows, width)

    def make_step(self) -> Callable[[], Any]:
        query = torch.randn(self.query_shape, dtype=self.dtype, requires_grad=True)
        key = torch.randn(self.key_shape, dtype=self.dtype, requires_grad=True)
        value = torch.randn(self.key_shape, dtype=self.dtype, requires_grad=True)
        mask = None
        if self.masked:
            mask = torch.ones(query.shape[-2], key.shape[-2]).tril().bool()

        def step() -> None:
            with sdpa_kernel(self.allowed) if self.allowed else nullcontext():
                attended = F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    mask,
                    is_causal=self.is_causal,
                    dropout_p=self.dropout_p,
                    enable_gqa=self.enable_gqa,
                )
                attended.sum().backward()

        return step


ATTENTION = [
    Attention(BF16, "flash"),
    Attention(FP16, "flash", is_causal=True, dropout_p=0.1),
    Attention(BF16, "flash", shape=(2, 4, 32, 20)),  # padded to 24
    Attention(BF16, "efficient", masked=True),
    # the mask is padded
    Attention(BF16, "efficient", shape=(2, 4, 33, 64), masked=True, dropout_p=0.1),
    Attention(BF16, "efficient", shape=(2, 4, 32, 288)),
    Attention(FP32, "efficient", is_causal=True, dropout_p=0.1),
    Attention(BF16, "efficient", is_causal=True, query_rows=16),
    Attention(BF16, "flash", enable_gqa=True),
    Attention(BF16, None, enable_gqa=True, masked=True),
    Attention(FP32, None, shape=(2, 4, 32, 62)),
    Attention(torch.float64, None),
    Attention(BF16, None, shape=(4, 32, 64)),
    Attention(BF16, None, allowed=MATH),
    Attention(BF16, "efficient", allowed=[EFFICIENT, MATH]),
    Attention(BF16, "flash", is_causal=True, allowed=[CUDNN, FLASH]),
    Attention(BF16, "cudnn", is_causal=True, allowed=CUDNN),
]


@pytest.mark.parametrize("last", [False, True])
def test_convolutions_say_how_their_channels_are_stored(last: bool) -> None:
    order = torch.channels_last if last else torch.contiguous_format

    def make_step() -> Callable[[], None]:
        net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        net = net.to(memory_format=order)
        images = torch.randn(2, 4, 8, 8).contiguous(memory_format=order)
        return lambda: net(images).sum().backward()

    graph = capture(make_step, device="cuda")
    variants = [label.variant for label in graph.labels if label.kind == "convolution"]
    if last:
        assert variants == [
            "forward_last",
            "forward_last_pointwise",
            "backward_last_pointwise",
            "backward_last",
        ]
    else:
        assert variants == ["forward", "forward_pointwise", "backward_pointwise", "backward"]


@pytest.mark.parametrize("attention", ATTENTION, ids=str)
def test_attention_runs_in_the_kernel_that_pytorch_takes(attention: Attention) -> None:
    graph = capture(attention.make_step, device="cuda")
    labels = [label for label in graph.labels if label.kind in ("attention", "bmm")]
    if attention.kernel is None:
        assert [label.kind for label in labels] == ["bmm" for _ in range(6)]
        return
    name = f"_scaled_dot_product_{attention.kernel}_attention"
    variant_of_kernel = {"flash": "", "efficient": ".efficient", "cudnn": ".flash3"}
    variant = variant_of_kernel[attention.kernel]
    if attention.is_causal:
        variant = f"_causal{variant}"
    assert [(label.name, *label.kernel) for label in labels] == [
        (name, "attention", f"forward{variant}"),
        (f"{name}_backward", "attention", f"backward{variant}"),
    ]
    batch, heads, rows, width = attention.query_shape
    if attention.kernel == "flash":
        width = round_up(width, 8)
    flops = 4 * batch * heads * rows * attention.shape[2] * width
    if attention.is_causal:
        flops /= 2
    forward, _ = graph.column("flops")[np.isin(list_names(graph), [name, f"{name}_backward"])]
    assert forward == flops
    assert graph.column("flops").sum() == 3.5 * flops


def round_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def test_attention_without_a_kernel_that_is_allowed_is_explained() -> None:
    attention = Attention(torch.float64, None, allowed=FLASH)
    with pytest.raises(
        ValueError, match=r"no kernel for attention in torch.float64; allow SDPBackend.MATH"
    ):
        capture(attention.make_step, device="cuda")


def test_attention_inside_of_pytorchs_own_layers_is_one_kernel() -> None:
    layer = partial(nn.TransformerEncoderLayer, 128, 4, 256, batch_first=True, dropout=0.1)
    for settings, dtype, name in (({"amp": "bf16"}, "bf16", "flash"), ({}, "fp32", "efficient")):
        graph = capture(layer, torch.randn(8, 64, 128), device="cuda", **settings)
        assert list_formats(graph, "attention") == [dtype, dtype]
        assert f"_scaled_dot_product_{name}_attention" in list_names(graph)
        assert set(list_formats(graph)) == {dtype}


# -- norms
# -------------------------------------------------------------------------------------------------------------

LAST = torch.channels_last


class Norm(NamedTuple):
    """What is normalized, and by which weight."""

    dtype: Any
    weight_dtype: Any  # None: there is no weight
    shape: tuple[int, ...] = (4, 16)
    row_dimensions: int = 1
    order: Any = torch.contiguous_format


NORMS = [
    Norm(BF16, BF16, shape=(4, 8, 16)),
    Norm(FP32, FP32),
    Norm(torch.float64, None),
    Norm(FP16, None),
    Norm(BF16, FP32),
    Norm(FP32, BF16),
    Norm(FP32, FP32, shape=(2, 4, 8, 8), row_dimensions=2),
    Norm(FP32, FP32, shape=(2, 4, 8, 8), order=LAST),
    Norm(FP32, FP32, shape=(0, 8)),
    Norm(FP32, FP32, shape=(2, 4, 8, 8, 8), order=torch.channels_last_3d),
    Norm(torch.complex64, None),
]


def normalize(norm: Norm, device: str, train: bool) -> Any:
    """The root mean square norm of an empty tensor."""
    x = torch.empty(norm.shape, dtype=norm.dtype, device=device)
    x = x.to(memory_format=norm.order).requires_grad_(train)
    row = norm.shape[-norm.row_dimensions :]
    weight = None
    if norm.weight_dtype is not None:
        weight = torch.empty(row, dtype=norm.weight_dtype, device=device, requires_grad=train)
    return F.rms_norm(x, row, weight)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_norms_are_one_kernel_where_pytorch_has_one(norm: Norm) -> None:
    """As its own rule says of tensors on a GPU whose kernel exists."""

    def make_step() -> Callable[[], None]:
        return lambda: normalize(norm, "cpu", True).real.sum().backward()

    graph = capture(make_step, device="cuda")
    norms = [name for name in list_names(graph) if "rms_norm" in name]
    if has_fused_kernel(norm):
        assert norms == ["_fused_rms_norm", "_fused_rms_norm_backward"]
    else:
        assert norms == []


def has_fused_kernel(norm: Norm) -> bool:
    """Whether PyTorch calls its fused kernel, which this build of it may lack."""

    def fused(x: Any, *_: Any) -> Any:
        return torch.empty_like(x), x.mean(-1)

    with (
        FakeTensorMode(),
        torch.library._scoped_library("aten", "IMPL") as library,
        Calls() as calls,
    ):
        library.impl("_fused_rms_norm", fused, "CUDA")
        normalize(norm, "cuda", False)
    return "_fused_rms_norm" in [name for name, _ in calls.found]


# -- random steps
# ------------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Names of the operations that run, and data types of their floating-point numbers or None."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        if name not in VIEWS:
            tensors = walk_tensors([out, args])
            types = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
            self.found.append((name, types[0] if types else None))
        return out


def run(make_step: Make) -> list[tuple[str, Any]]:
    """What the second call of a real step runs."""
    step = make_step()
    step()
    with Calls() as calls:
        step()
    return calls.found


class Do(nn.Module):
    """A function of rows of 16 numbers as a module."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class DoWithWeight(nn.Module):
    """A function of rows of 16 numbers and of a weight as a module."""

    def __init__(self, function: Callable[[Any, Any], Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape) / 8)

    def forward(self, x: Any) -> Any:
        return self.function(x, self.weight)


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16))


def multiply(x: Any, weight: Any) -> Any:
    return x @ weight


def multiply_by_einsum(x: Any, weight: Any) -> Any:
    return torch.einsum("bij,jk->bik", x, weight)


def multiply_batches(x: Any, weight: Any) -> Any:
    return torch.bmm(x, weight.to(x.dtype))


def gate(x: Any, weight: Any) -> Any:
    return x * weight.sigmoid()


def add_product(x: Any, weight: Any) -> Any:
    return torch.baddbmm(x, x, weight.to(x.dtype))


def correlate(x: Any) -> Any:
    return x @ x.mT @ x


def swap_halves(x: Any) -> Any:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def center(x: Any) -> Any:
    return x - x.mean(1, keepdim=True)


def scale_in_fp32(x: Any) -> Any:
    return x.float().pow(2).add(1).rsqrt().to(x.dtype)


def normalize_rows(x: Any) -> Any:
    return F.normalize(x, dim=-1)


def choose(x: Any) -> Any:
    return torch.where(x > 0, x, x.exp())


LINEAR = partial(nn.Linear, 16, 16)
#: Modules from (6, 8, 16) to the same shape.
BLOCKS: tuple[Callable[[], nn.Module], ...] = (
    LINEAR,
    partial(LINEAR, bias=False),
    make_mlp,
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
    partial(DoWithWeight, multiply, 16, 16),
    partial(DoWithWeight, multiply_by_einsum, 16, 16),
    partial(DoWithWeight, multiply_batches, 6, 16, 16),
    partial(DoWithWeight, gate, 16),
    partial(DoWithWeight, add_product, 6, 16, 16),
    partial(Do, correlate),
    partial(Do, swap_halves),
    partial(Do, center),
    partial(Do, scale_in_fp32),
    partial(Do, normalize_rows),
    partial(Do, choose),
)


def mean_square(y: Any) -> Any:
    return y.float().square().mean()


def cross_entropy(y: Any) -> Any:
    return F.cross_entropy(y.flatten(0, 1), torch.arange(48) % 16)


def mean_square_error(y: Any) -> Any:
    return F.mse_loss(y, torch.zeros_like(y))


def binary_cross_entropy(y: Any) -> Any:
    return F.binary_cross_entropy_with_logits(y, torch.ones_like(y))


def smooth_l1(y: Any) -> Any:
    return F.smooth_l1_loss(y.sum(-1), torch.zeros(6, 8))


LOSSES: tuple[Callable[[Any], Any], ...] = (
    mean_square,
    cross_entropy,
    mean_square_error,
    binary_cross_entropy,
    smooth_l1,
)


def make_random(seed: int) -> tuple[str, Make]:
    """A step of some of these modules, in fp32 or under autocast, plain, computed again or in two
    micro-batches."""
    draw = random.Random(seed)
    blocks = draw.choices(BLOCKS, k=draw.randint(2, 6))
    compute_loss = draw.choice(LOSSES)
    low = draw.random() < 0.5
    form = draw.choice(["plain", "checkpoint", "accumulate"])
    optimizer = draw.choice([SGD, ADAMW])
    computed_again = [draw.random() < 0.5 and form == "checkpoint" for _ in blocks]
    reentrant = draw.random() < 0.3
    micro_batches = 2 if form == "accumulate" else 1

    def make_step() -> Callable[[], Any]:
        net = nn.ModuleList([nn.Linear(16, 16), *(make() for make in blocks)])
        chosen = optimizer(net.parameters(), lr=0.01)
        x = torch.randn(6, 8, 16)

        def step() -> None:
            chosen.zero_grad()
            for _ in range(micro_batches):
                with torch.autocast("cpu", BF16, enabled=low):
                    y = net[0](x)
                    for block, again in zip(net[1:], computed_again, strict=True):
                        y = checkpoint(block, y, use_reentrant=reentrant) if again else block(y)
                    loss = compute_loss(y)
                loss.backward()
            chosen.step()

        return step

    return f"{seed}: {form} in {'bf16' if low else 'fp32'}", make_step


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
    assert len(updates) > 8
    assert updates == ran[-len(updates) :]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_random_steps_are_captured_as_they_run(first: int) -> None:
    for seed in range(first, first + 10):
        name, make_step = make_random(seed)
        graph = capture(make_step)
        ran = run(make_step)
        assert list_names(graph) == [operation for operation, _ in ran], name
        for captured, (operation, dtype) in zip(list_all_formats(graph), ran, strict=True):
            if dtype is not None:
                assert captured == {FP32: "fp32", BF16: "bf16"}[dtype], (name, operation)


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

    narrow = torch.zeros(2, 4, 128, 64, dtype=BF16, requires_grad=True)
    wide = torch.zeros(2, 4, 128, 512, dtype=BF16, requires_grad=True)
    graph = capture(TwoWidths(), (narrow, wide), device="cuda")
    unnamed = []
    for label in graph.labels:
        if label.kind == "attention":
            label = label._replace(variant=label.variant.partition(".")[0])
        unnamed.append(label)
    operations = classify([replace(graph, labels=unnamed)], load_platform("h100-sxm-8"), "bf16")
    variants = [operations.models[number].variant for number in operations.of_operation]
    forward = [variant for variant in variants if variant.startswith("forward.")]
    assert len(set(forward)) == 2
