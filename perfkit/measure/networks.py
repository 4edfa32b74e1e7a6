"""Isolated kernels of convolutional and other nets: which sizes to time, and how to call them."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["Networks", "draw_networks"]

_Draw = tuple[str, str, dict[str, float]]

#: Arguments of elementwise functions: ``x`` a tensor that is read, numbers as they are. A name that ends with an
#: underscore works in place on the first.
_FUNCTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "relu_": ("relu_.default", ("x",)),
    "tanh": ("tanh.default", ("x",)),
    "tanh_backward": ("tanh_backward.default", ("x", "x")),
    "sigmoid_backward": ("sigmoid_backward.default", ("x", "x")),
    "silu": ("silu.default", ("x",)),
    "silu_backward": ("silu_backward.default", ("x", "x")),
    "hardswish": ("hardswish.default", ("x",)),
    "hardswish_backward": ("hardswish_backward.default", ("x", "x")),
    "hardtanh": ("hardtanh.default", ("x", 0.0, 0.9)),
    "hardtanh_": ("hardtanh_.default", ("x", 0.0, 0.9)),
    "hardtanh_backward": ("hardtanh_backward.default", ("x", "x", 0.0, 0.9)),
    "leaky_relu": ("leaky_relu.default", ("x", 0.01)),
    "exp": ("exp.default", ("x",)),
    "log": ("log.default", ("x",)),
    "erf": ("erf.default", ("x",)),
    "pow_scalar": ("pow.Tensor_Scalar", ("x", 3.0)),
    "rsqrt": ("rsqrt.default", ("x",)),
    "neg": ("neg.default", ("x",)),
    "div": ("div.Tensor", ("x", "x")),
    "add_scalar": ("add.Tensor", ("x", 0.5)),
    "bernoulli_": ("bernoulli_.float", ("x", 0.9)),
    "native_dropout": ("native_dropout.default", ("x", 0.1, True)),
    "native_dropout_backward": ("native_dropout_backward.default", ("x", "mask", 1.1)),
    "masked_fill": ("masked_fill.Scalar", ("x", "mask", -1e9)),
    "where": ("where.self", ("mask", "x", "x")),
}
_ROWWISE = (
    "native_batch_norm", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
    "mean", "amax", "argmax", "cumsum",
)  # fmt: skip
_POOLING = (
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
)  # fmt: skip
_COPY = (
    "copy_", "slice_backward", "gather", "scatter_add", "upsample_nearest2d", "upsample_nearest2d_backward",
    "upsample_bilinear2d",
)  # fmt: skip
#: Windows with their strides, as often as nets use them, and groups of channels (0: each channel is one).
_WINDOWS = (
    (3, 3, 1, 1), (3, 3, 1, 1), (3, 3, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (3, 3, 2, 1), (1, 1, 2, 1),
    (5, 5, 1, 1), (1, 7, 1, 1), (3, 3, 1, 8), (3, 3, 1, 32), (3, 3, 1, 0), (3, 3, 2, 0), (5, 5, 1, 0), (7, 7, 1, 0),
)  # fmt: skip
#: Most arithmetic of one forward convolution, and of one in groups, whose gradients take long [FLOP]; most numbers of
#: its input or output.
_WORK, _GROUPED_WORK, _NUMBERS = 4e8, 6e7, 6e6


def _spread(rng: np.random.Generator, low: float, high: float, n: int) -> np.ndarray:
    positions = (np.arange(n) + rng.random(n)) / n
    rng.shuffle(positions)
    return np.asarray(low * (high / low) ** positions)


def _convolutions(rng: np.random.Generator, n: int) -> Iterator[_Draw]:
    ranges = ((1, 32), (4, 64), (8, 512), (8, 512))
    shapes = zip(*(_spread(rng, low, high, n * len(_WINDOWS)) for low, high in ranges), strict=True)
    for number, (batch, image, into, out) in enumerate(shapes):
        height, width, stride, groups = _WINDOWS[number % len(_WINDOWS)]
        image, into, out = max(round(image), height, width), 8 * round(into / 8), 8 * round(out / 8)
        if groups == 0:
            groups = out = into
        elif groups > 1:  # as many channels leave a group as enter it, mostly a multiple of four
            out = into = groups * 4 * max(into // groups // 4, 1)
        elif number % 13 == 0:  # pictures enter the first layer
            into, image, out = 3, image * 2, min(out, 64)
        limit = _WORK if groups == 1 else _GROUPED_WORK
        while (work := 2.0 * (image // stride) ** 2 * out * into // groups * height * width) > limit:
            image //= 2
        most = min(limit / max(work, 1.0), _NUMBERS / (max(into, out) * image**2))
        batch, side = max(1, min(round(batch), int(most))), -(-image // stride)
        sizes = {"batch": groups, "m": batch * side**2, "n": out // groups, "k": into // groups * height * width}
        sizes |= {"elements": batch * side**2 * out, "rows": batch, "flops": 2.0 * sizes["m"] * out * sizes["k"]}
        sizes |= {"image": image, "height": height, "width": width, "stride": stride}
        suffix = "" if groups == 1 else "_depthwise" if groups == into else "_grouped"
        suffix = "_pointwise" if (height * width, stride, groups) == (1, 1, 1) else suffix
        yield "convolution", "forward" + suffix, sizes
        yield "convolution", "backward" + suffix, sizes | {"flops": 2 * sizes["flops"]}


def _planes(rng: np.random.Generator, n: int, top: float = 6e6) -> Iterator[dict[str, float]]:
    """Pictures of the sizes that nets have inside: numbers in all, pictures in the batch, channels, side."""
    for size, side, channels in zip(
        _spread(rng, 2e3, top, n), _spread(rng, 4, 64, n), _spread(rng, 8, 512, n), strict=True
    ):
        side, channels = round(side / 2) * 2, round(channels / 8) * 8
        batch = max(2, round(size / channels / side**2))
        yield {"elements": batch * channels * side**2, "rows": batch * channels, "n": side**2, "image": side,
               "channels": channels}  # fmt: skip


def _others(rng: np.random.Generator, n: int) -> Iterator[_Draw]:
    for variant in _FUNCTIONS:
        top = 1e7 if variant in ("relu_", "hardtanh", "hardtanh_backward", "silu", "bernoulli_") else 1e6
        for size in _spread(rng, 64, top, max(4, n - 2)):
            yield "elementwise", variant, {"elements": round(size)}
    for variant in _ROWWISE:
        for sizes in _planes(rng, n):
            if variant.startswith("native_batch"):
                sizes |= {"rows": sizes["channels"], "n": sizes["elements"] // sizes["channels"]}
            yield "rowwise", variant, sizes
    for variant in _POOLING:
        for number, sizes in enumerate(_planes(rng, n)):
            window, stride = ((3, 2), (2, 2), (3, 1))[number % 3]
            out = sizes["rows"] * -((-sizes["image"] // (2 if "adaptive" in variant else stride)) ** 2)
            sizes |= {"window": window, "stride": stride, "m": out}
            yield "pooling", variant, sizes | {"k": sizes["elements"] / out if "adaptive" in variant else window**2}
    for variant in _COPY:
        for sizes in _planes(rng, n, 2e6):
            yield "copy", variant, sizes


def draw_networks(rng: np.random.Generator, density: float) -> list[_Draw]:
    """Draw kernels that convolutional nets and the less common functions of others run.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of randomness [-].
    density : float
        Share of the full number of sizes [-].

    Returns
    -------
    draws : list of (str, str, dict)
        Kind, variant and sizes of each; convolutions also have ``image``, ``height``, ``width`` and ``stride`` [-].
    """
    draws = [*_convolutions(rng, max(2, round(8 * density))), *_others(rng, max(5, round(9 * density)))]
    return [draws[i] for i in rng.permutation(len(draws))]


class Networks:
    """Operands and calls of these kernels; adds up the bytes that one call touches.

    Parameters
    ----------
    device : str
        Torch device.
    dtype : torch.dtype
        Data type of weights and activations.
    rng : numpy.random.Generator
        Source of randomness.
    """

    def __init__(self, device: str, dtype: "torch.dtype", rng: np.random.Generator) -> None:
        import torch

        self.torch, self.aten, self.device, self.dtype, self.rng = torch, torch.ops.aten, device, dtype, rng
        self.held: dict[int, float] = {}

    def _rand(self, *shape: int) -> "torch.Tensor":
        tensor = self.torch.rand(*shape, device=self.device).add_(0.1).to(self.dtype)
        self.held[id(tensor)] = tensor.numel() * tensor.element_size()
        return tensor

    def _touch(self, elements: float, itemsize: int = 0) -> None:
        self.held[-len(self.held) - 1] = elements * (itemsize or self.torch.empty(0, dtype=self.dtype).element_size())

    def _mask(self, elements: int) -> "torch.Tensor":
        """Triangles, as masks of attention have them: where random, a mask costs a CPU its branch prediction."""
        self._touch(elements, 1)
        position = self.torch.arange(elements, device=self.device)
        return position % 64 > position // 64 % 64

    def _find(self, overload: str) -> Callable[..., Any]:
        name, _, end = overload.partition(".")
        return getattr(getattr(self.aten, name), end or "default")

    def function(self, variant: str, elements: int) -> list[Callable[[], Any]]:
        """Calls of one of the elementwise functions that are described by their arguments."""
        name, pattern = _FUNCTIONS[variant]
        make: dict[str, Callable[[int], Any]] = {"x": self._rand, "mask": self._mask}
        call, values = self._find(name), [make[p](elements) if isinstance(p, str) else p for p in pattern]
        if not variant.endswith("_"):
            self._touch(elements)
        if variant == "native_dropout":
            self._touch(elements, 1)
        return [lambda: call(*values)]

    def convolution(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        """Calls of a convolution or of its gradients."""
        groups, window, stride = s["batch"], (s["height"], s["width"]), [s["stride"]] * 2
        into, out, side = s["k"] // (window[0] * window[1]) * groups, s["n"] * groups, -(-s["image"] // s["stride"])
        x, w = self._rand(s["rows"], into, s["image"], s["image"]), self._rand(out, into // groups, *window)
        place = (stride, [(window[0] - 1) // 2, (window[1] - 1) // 2], [1, 1], False, [0, 0], groups)
        if variant.startswith("forward"):
            self._touch(s["elements"])
            return [lambda: self.aten.convolution.default(x, w, None, *place)]
        g = self._rand(s["rows"], out, side, side)
        self._touch(x.numel() + w.numel())
        backward = self.aten.convolution_backward.default
        return [lambda: backward(g, x, w, None, *place, [True, True, False])]

    def pooling(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        """Calls of a pooling or of its gradient."""
        side, name = s["image"], variant.removesuffix("_backward")
        x = self._rand(s["rows"] // s["channels"], s["channels"], side, side)
        window, stride, half = s["window"], s["stride"], -(-side // 2)
        place: tuple[Any, ...] = ([window] * 2, [stride] * 2, [window // 3] * 2)
        if name.startswith("_adaptive"):
            place = ([half, half],)
        forward, indexed = self._find(name), name.startswith("max")
        found = forward(x, *place)
        out = found[0] if indexed else found
        if indexed:
            self._touch(out.numel(), 8)
        if name == variant:
            self._touch(out.numel())
            return [lambda: forward(x, *place)]
        g, backward = self._rand(*out.shape), self._find(variant)
        if name.startswith("_adaptive"):
            return [lambda: backward(g, x)]
        more = ([1, 1], False, found[1]) if indexed else (False, True, None)
        return [lambda: backward(g, x, *place, *more)]

    def normalize(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        """Calls of a normalization over channels or groups of them, or of a reduction of pictures."""
        aten, side, channels, n = self.aten, s["image"], s["channels"], s["n"]
        x = self._rand(s["elements"] // channels // side**2, channels, side, side)
        batch, weight, bias = x.shape[0], self._rand(channels), self._rand(channels)
        if not variant.startswith("native"):
            flat, call = x.view(-1, n), self._find(variant + (".dim" if variant == "mean" else ""))
            if variant == "cumsum":
                self._touch(x.numel())
            dim = [1] if variant in ("mean", "amax") else 1
            return [lambda: call(flat, dim)]
        self._touch(x.numel())
        if "group" in variant:
            place = (batch, channels, side**2, 8)
            if variant == "native_group_norm":
                return [lambda: aten.native_group_norm.default(x, weight, bias, *place, 1e-5)]
            _, mean, inverse = aten.native_group_norm.default(x, weight, bias, *place, 1e-5)
            g, back = self._rand(*x.shape), aten.native_group_norm_backward.default
            return [lambda: back(g, x, mean, inverse, weight, *place, [True, True, True])]
        average, variance = self._rand(channels), self._rand(channels)
        forward = aten.native_batch_norm.default
        if variant == "native_batch_norm":
            return [lambda: forward(x, weight, bias, average, variance, True, 0.1, 1e-5)]
        _, mean, inverse = forward(x, weight, bias, average, variance, True, 0.1, 1e-5)
        g, backward = self._rand(*x.shape), aten.native_batch_norm_backward.default
        return [lambda: backward(g, x, weight, average, variance, mean, inverse, True, 1e-5, [True] * 3)]

    def rearrange(self, variant: str, s: dict[str, Any]) -> list[Callable[[], Any]]:
        """Calls that pick numbers by index or enlarge pictures."""
        aten, side, rows = self.aten, s["image"], s["rows"]
        if variant in ("copy_", "slice_backward"):
            x, n = self._rand(rows, s["n"]), s["n"]
            if variant == "slice_backward":  # the gradient of all columns but one
                self._touch(rows * (n + 1))
                return [lambda: aten.slice_backward.default(x, [rows, n + 1], 1, 1, n + 1, 1)]
            y = self._rand(rows, n)
            return [lambda: aten.copy_.default(y, x)]
        if "2d" not in variant:
            x, n = self._rand(rows, s["n"]), s["n"]
            index = self.torch.randint(0, n, (rows, n), device=self.device)
            self._touch(rows * n, 8)
            self._touch(rows * n)
            if variant == "gather":
                return [lambda: aten.gather.default(x, 1, index)]
            out = self._rand(rows, n)
            return [lambda: aten.scatter_add.default(out, 1, index, x)]
        half, shape = side // 2, (rows // s["channels"], s["channels"])
        if variant.endswith("_backward"):
            g, backward = self._rand(*shape, side, side), self._find(variant)
            self._touch(s["elements"] // 4)
            return [lambda: backward(g, [side, side], [*shape, half, half], 2.0, 2.0)]
        x, corners = self._rand(*shape, half, half), (False,) if "bilinear" in variant else ()
        forward = self._find(variant)
        self._touch(s["elements"])
        return [lambda: forward(x, [side, side], *corners, 2.0, 2.0)]
