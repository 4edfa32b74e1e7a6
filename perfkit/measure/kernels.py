"""Isolated kernels: which operations to time, and with which sizes."""

from ast import literal_eval
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfkit.workloads.vocabulary import size_product

#: Batches of indices that the calls of an embedding kernel rotate through; see `perfkit.models.caches.rotating_misses`.
INDEX_BATCHES = 8

#: Largest working set of one case [B], where the last cache is not known to be larger than most.
_LARGEST = 160e6


def _read_functions(text: str) -> dict[str, tuple[str, list[Any], dict[str, Any]]]:
    """Overload, arguments and named arguments by variant, which stands before a colon where it is not the name."""
    found = {}
    for entry in text.split(";"):
        variant, _, call = entry.rpartition(":")
        overload, *words = call.split()
        parts = [word.rpartition("=") for word in words]
        given = [(name, value if value in _TENSORS else literal_eval(value)) for name, _, value in parts]
        named = {name: value for name, value in given if name}
        found[variant.strip() or overload.split(".")[0]] = overload, [v for name, v in given if not name], named
    return found


#: Operands of a function that are tensors: numbers that are read, and truth values.
_TENSORS = ("x", "y", "z", "mask")
#: Elementwise functions. A name that ends with an underscore works in place on the first operand.
_BASIC = _read_functions("""
    relu x; threshold_backward x y 0; add.Tensor x y; sub.Tensor x y; mul.Tensor x y; mul_scalar: mul.Tensor x 0.999;
    div_scalar: div.Tensor x 0.999; sqrt x; gelu x; gelu_backward x y; gelu_tanh: gelu x approximate='tanh';
    gelu_backward_tanh: gelu_backward x y approximate='tanh'; sigmoid x; binary_cross_entropy_with_logits x y;
    add_.Tensor x y alpha=-1e-9; mul_.Tensor x 1.0; lerp_.Scalar x y 0.1; addcmul_ x y y value=1e-9;
    addcdiv_ x y z value=1e-9; add_scalar_: add_.Tensor x 1e-9; div_.Scalar x 1.0
""")
_MORE = _read_functions("""
    relu_ x; tanh x; tanh_backward x y; sigmoid_backward x y; silu x; silu_backward x y; hardswish x;
    hardswish_backward x y; hardtanh x 0.0 0.9; hardtanh_ x 0.0 0.9; hardtanh_backward x y 0.0 0.9; leaky_relu x 0.01;
    exp x; log x; erf x; pow_scalar: pow.Tensor_Scalar x 3.0; rsqrt x; neg x; div.Tensor x y;
    add_scalar: add.Tensor x 0.5; bernoulli_.float x 0.9; native_dropout x 0.1 True;
    native_dropout_backward x mask 1.1; masked_fill.Scalar x mask -1e9; where.self mask x y
""")
FUNCTIONS = _BASIC | _MORE
_ROWWISE = (
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "sum", "nll_loss_forward", "nll_loss_backward", "embedding",
)  # fmt: skip
#: Operations on the pictures that nets have inside.
_PICTURES = {
    "rowwise": ("native_batch_norm", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
                "mean", "amax", "argmax", "cumsum"),
    "pooling": ("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
                "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"),
    "copy": ("copy_", "slice_backward", "gather", "scatter_add", "upsample_nearest2d", "upsample_nearest2d_backward",
             "upsample_bilinear2d"),
}  # fmt: skip
#: Windows with their strides, as often as nets use them, and groups of channels (0: each channel is one).
_WINDOWS = (
    (3, 3, 1, 1), (3, 3, 1, 1), (3, 3, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (3, 3, 2, 1), (1, 1, 2, 1),
    (5, 5, 1, 1), (1, 7, 1, 1), (3, 3, 1, 8), (3, 3, 1, 32), (3, 3, 1, 0), (3, 3, 2, 0), (5, 5, 1, 0), (7, 7, 1, 0),
)  # fmt: skip
#: Largest work of one forward convolution, and of a grouped one, whose gradients are slow [FLOP]; largest input or
#: output [-].
_WORK, _GROUPED_WORK, _NUMBERS = 4e8, 6e7, 6e6


@dataclass(frozen=True)
class Case:
    """One kernel with its sizes.

    Operation class of `perfkit.workloads.graph.KINDS`; layout, function or gradient form; features of
    `perfkit.workloads.graph.FEATURES` plus, for embeddings, ``exponent``, ``table_rows`` and ``index_batches``, for
    pictures ``image``, ``channels`` and windows [-].
    """

    kind: str
    variant: str
    sizes: dict[str, float]


def _spread(rng: np.random.Generator, n: int, *ranges: tuple[float, float]) -> Iterator[Any]:
    """Stratified draws of each range, side by side: one in each of n equal parts of its logarithm, shuffled."""
    columns = []
    for low, high in ranges:
        positions = (np.arange(n) + rng.random(n)) / n
        rng.shuffle(positions)
        columns.append(low * (high / low) ** positions)
    return zip(*columns, strict=True)


def _product(kind: str, variant: str, batch: int, m: int, n: int, k: int, passes: float = 1.0) -> Case:
    return Case(kind, variant, size_product(m, n, k, batch=batch, passes=passes))


def _gemms(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for layout in ("nt", "nn", "tn"):
        heights = [*_spread(rng, n, (16, 2048), (16, 2048))]
        wide = np.where(rng.random(n) < 0.15, 7.0, 1.0)  # a vocabulary is wider than any hidden layer
        for (m, k), factor, (width,) in zip(heights, wide, _spread(rng, n, (16, 2048)), strict=True):
            rows, columns, inner = round(m), round(width * factor), round(k)
            if layout == "tn" and rng.random() < 0.3:
                rows, inner = inner, rows
            yield _product("gemm", layout, 1, rows, columns, inner)


def _bmms(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for layout in ("nn", "nt", "tn"):
        # interaction of embedding vectors: many tiny products
        for batch, features, dim in _spread(rng, n // 2, (64, 2048), (4, 28), (16, 128)):
            b, f, d = int(batch), round(features), round(dim)
            m, width, k = {"nt": (f, f, d), "nn": (f, d, f), "tn": (d, f, f)}[layout]
            yield _product("bmm", layout, b, m, width, k)
        # attention heads: fewer, larger ones
        for batch, sequence, dim in _spread(rng, n - n // 2, (2, 128), (24, 300), (16, 128)):
            b, s, d = int(batch), round(sequence), round(dim)
            m, width, k = {"nn": (s, s, d), "nt": (s, s, d), "tn": (s, d, s)}[layout]
            if layout == "nn" and rng.random() < 0.5:
                width, k = k, width
            yield _product("bmm", layout, b, m, width, k)


def _attentions(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for causal, share in (("", 2.0), ("_causal", 1.0)):
        for heads, sequence, dim in _spread(rng, n, (2, 160), (24, 512), (16, 128)):
            h, s, d = round(heads), round(sequence), round(dim / 8) * 8
            yield _product("attention", "forward" + causal, h, s, s, d, share)
            yield _product("attention", "backward" + causal, h, s, s, d, 2.5 * share)


def _elementwise(rng: np.random.Generator, n: int, largest: float) -> Iterator[Case]:
    for variant, (_, arguments, _) in _BASIC.items():
        tensors = len({*_TENSORS} & {*arguments})
        top = 2e5 if variant in ("binary_cross_entropy_with_logits", "sub", "mul") else _LARGEST / 4 / (tensors + 1)
        sizes = [*_spread(rng, n, (64, top))]
        if top > 2e5:  # two more from main memory: what a byte from there costs is needed everywhere
            sizes += _spread(rng, 2, (0.4 * top * largest / _LARGEST, top * largest / _LARGEST))
        for (size,) in sizes:
            yield Case("elementwise", variant, {"elements": round(size)})


def _rowwise(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in _ROWWISE:
        for size, width in _spread(rng, n, (300, 6e6), (16, 14000)):
            if "softmax" not in variant and "nll" not in variant:
                width = 16 * (width / 16) ** 0.75
            width = min(round(width), round(size))
            rows = max(1, round(size / width))
            if variant == "nll_loss_forward":
                rows, width = min(rows, 8192), 1
            yield Case("rowwise", variant, {"elements": rows * width, "rows": rows, "n": width})


def _copies(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in ("clone", "cat", "index", "index_put", "new_zeros"):
        for size, columns, number in _spread(rng, n, (1e3, 8e6), (16, 128), (2, 27)):
            width, parts = round(columns), round(number)
            if variant in ("index", "index_put"):
                batch = max(16, min(2048, round(size / parts**2)))
                sizes = {"elements": batch * parts * (parts - 1) // 2, "rows": batch, "n": parts}
            elif variant == "cat":
                batch = max(16, min(4096, round(size / parts / width)))
                sizes = {"elements": batch * parts * width, "rows": batch * parts, "n": parts}
            else:
                rows = max(4, round(size / width))
                sizes = {"elements": rows * width, "rows": rows}
            yield Case("copy", variant, sizes)


def _far_copies(rng: np.random.Generator, largest: float) -> Iterator[Case]:
    """Copies and gradients to fill with zeros that are larger than the last cache: those of large tables."""
    for variant, tensors in (("new_zeros", 1), ("clone", 2)):
        for (size,) in _spread(rng, 4, (0.2 * largest, largest)):
            rows = round(size / 4 / tensors / 64)
            yield Case("copy", variant, {"elements": rows * 64, "rows": rows})


def _embeddings(rng: np.random.Generator, n: int, largest: float) -> Iterator[Case]:
    draws = [*_spread(rng, n, (1e3, 1e6), (16, 128), (64, 2048), (1, 32))]
    # and many lookups into large tables, where pages and rows are far: rare in independent draws, decisive in a DLRM
    draws += _spread(rng, n // 2, (6e4, 1e6), (16, 128), (256, 2048), (4, 32))
    for rows, width, batch, pooling in draws:
        exponent, dim, lookups = rng.uniform(0, 1.2), round(width), round(batch) * round(pooling)
        sizes = {"lookups": lookups, "bags": round(batch), "dim": dim, "exponent": exponent, "table_rows": round(rows),
                 "index_batches": INDEX_BATCHES, "elements": lookups * dim}  # fmt: skip
        yield Case("embedding_forward", "_embedding_bag", sizes)
        for kind in ("embedding_backward", "embedding_update"):
            yield Case(kind, "sparse", sizes | {"rows": lookups})
        small = round(min(rows, largest / 4 / width))
        yield Case("embedding_backward", "dense", sizes | {"table_rows": small, "elements": small * dim, "rows": small})
        if lookups <= 8192:
            words = round(min(rows, 14000))
            own = {"bags": lookups, "dim": dim * 4, "table_rows": words, "exponent": 0.0, "rows": words}
            yield Case("embedding_backward", "dense_rows", sizes | own | {"elements": words * dim * 4})


def _convolutions(rng: np.random.Generator, n: int) -> Iterator[Case]:
    shapes = _spread(rng, n * len(_WINDOWS), (1, 32), (4, 64), (8, 512), (8, 512))
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
        yield Case("convolution", "forward" + suffix, sizes)
        yield Case("convolution", "backward" + suffix, sizes | {"flops": 2 * sizes["flops"]})


def _on_pictures(rng: np.random.Generator, n: int, kind: str) -> Iterator[Case]:
    """Operations on pictures of the sizes that nets have inside: numbers in all, side, channels."""
    for variant in _PICTURES[kind]:
        draws = _spread(rng, n, (2e3, 2e6 if kind == "copy" else 6e6), (4, 64), (8, 512))
        for number, (size, length, width) in enumerate(draws):
            side, channels = round(length / 2) * 2, round(width / 8) * 8
            batch = max(2, round(size / channels / side**2))
            sizes: dict[str, float] = {"elements": batch * channels * side**2, "rows": batch * channels, "n": side**2,
                                       "image": side, "channels": channels}  # fmt: skip
            if variant.startswith("native_batch"):
                sizes |= {"rows": channels, "n": batch * side**2}
            if kind == "pooling":
                (window, stride), adaptive = ((3, 2), (2, 2), (3, 1))[number % 3], "adaptive" in variant
                out = sizes["rows"] * (-side // (2 if adaptive else stride)) ** 2
                sizes |= {"window": window, "stride": stride, "m": out}
                sizes["k"] = sizes["elements"] / out if adaptive else window**2
            yield Case(kind, variant, sizes)


def draw_net_cases(rng: np.random.Generator, density: float) -> list[Case]:
    """Draw a share of the kernels that nets and the less common functions of others run, in random order."""
    n, cases = max(5, round(9 * density)), [*_convolutions(rng, max(2, round(8 * density)))]
    for variant in _MORE:
        top = 1e7 if variant in ("relu_", "hardtanh", "hardtanh_backward", "silu", "bernoulli_") else 1e6
        draws = _spread(rng, max(4, n - 2), (64, top))
        cases += [Case("elementwise", variant, {"elements": round(size)}) for (size,) in draws]
    for kind in _PICTURES:
        cases += _on_pictures(rng, n, kind)
    return [cases[i] for i in rng.permutation(len(cases))]


def draw_cases(seed: int = 0, *, density: float = 1.0, cache: float = 0.0) -> list[Case]:
    """Sizes to time, spread evenly over the logarithm of what small training steps use.

    Parameters
    ----------
    seed : int
        Seed of the draw: other seeds give held-out sizes [-].
    density : float
        Share of the full number of sizes [-].
    cache : float
        What the last cache holds, so that some sizes are four times as large; 1 GB is the most [B].

    Returns
    -------
    cases : list of Case
        In random order, so that drift of the machine spreads over all classes.
    """
    rng, largest = np.random.default_rng(seed), float(np.clip(4.0 * cache, _LARGEST, 1e9))

    products, batched, attentions, few, some, many = (max(4, round(n * density)) for n in (36, 28, 12, 9, 14, 30))
    cases = [*_gemms(rng, products), *_bmms(rng, batched), *_attentions(rng, attentions)]
    cases += [*_elementwise(rng, few, largest), *_rowwise(rng, some), *_copies(rng, some)]
    cases += _embeddings(rng, many, largest)
    cases = [cases[i] for i in rng.permutation(len(cases))]
    other = np.random.default_rng([seed, 1])  # a draw of its own: the sizes above stay as they were
    far = _far_copies(np.random.default_rng([seed, 2]), largest) if cache else ()
    for number, case in enumerate([*draw_net_cases(other, density), *far]):
        cases.insert(int(other.integers(number, len(cases) + 1)), case)
    return cases
