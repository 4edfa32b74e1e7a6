"""Isolated kernels: which operations to time, and with which sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perfkit.models.roofline import ATTENTION_BACKWARD, attention_flops, gemm_flops
from perfkit.workloads.measured_functions import BASIC, COPIES, MORE, PICTURES, ROWWISE

#: Batches of indices among which the calls of an embedding kernel rotate; see
#: `perfkit.models.caches.rotating_misses`.
INDEX_BATCHES = 8

#: Largest working set of one case, unless the last cache is known to be large [B].
_LARGEST = 160e6


class _Window(NamedTuple):
    """A window of convolutions: height, width, stride and groups of channels (0: one group per
    channel)."""

    height: int
    width: int
    stride: int
    groups: int


#: Windows, as often as nets use them.
_WINDOWS = (
    _Window(3, 3, 1, 1),
    _Window(3, 3, 1, 1),
    _Window(3, 3, 1, 1),
    _Window(1, 1, 1, 1),
    _Window(1, 1, 1, 1),
    _Window(1, 1, 1, 1),
    _Window(3, 3, 2, 1),
    _Window(1, 1, 2, 1),
    _Window(5, 5, 1, 1),
    _Window(1, 7, 1, 1),
    _Window(3, 3, 1, 8),
    _Window(3, 3, 1, 32),
    _Window(3, 3, 1, 0),
    _Window(3, 3, 2, 0),
    _Window(5, 5, 1, 0),
    _Window(7, 7, 1, 0),
)
#: Window and stride of poolings.
_POOLING_WINDOWS = ((3, 2), (2, 2), (3, 1))
#: Most work of a forward convolution, and of a grouped one, whose gradients are slow [FLOP].
_WORK = 4e8
_GROUPED_WORK = 6e7
#: Most numbers of an input or output of a convolution [-].
_NUMBERS = 6e6


@dataclass(frozen=True)
class Case:
    """One kernel with its sizes.

    The kind is the operation class, see `perfkit.workloads.graph.Operation`. The variant is a
    layout, a function or a form of gradients. Sizes are those of
    `perfkit.workloads.columns.FEATURES`; embeddings also have ``exponent``, ``table_rows`` and
    ``index_batches``; pictures have ``image``, ``channels`` and windows [-].
    """

    kind: str
    variant: str
    sizes: dict[str, float]


def size_product(m: float, n: float, k: float, *, batch: float = 1) -> dict[str, float]:
    """Sizes of a product of matrices, as a case of a measurement states them.

    Parameters
    ----------
    m, n, k, batch : float
        Rows, columns, inner dimension and number of products [-].

    Returns
    -------
    sizes : dict
        ``flops`` [FLOP] and the dimensions [-].
    """
    flops = float(gemm_flops(m, n, k, batch=batch))
    return {"flops": flops, "batch": batch, "m": m, "n": n, "k": k}


def spread_sizes(rng: np.random.Generator, n: int, *ranges: tuple[float, float]) -> np.ndarray:
    """Draw n sizes from each range: one from each of n equal parts of its logarithm, in random
    order."""
    columns = []
    for low, high in ranges:
        positions = (np.arange(n) + rng.random(n)) / n
        rng.shuffle(positions)
        columns.append(low * (high / low) ** positions)
    return np.stack(columns, axis=1)


def _gemms(rng: np.random.Generator, n: int, larger: float) -> Iterator[Case]:
    side = (16, 2048 * larger)
    for layout in ("nt", "nn", "tn"):
        rows_and_inner = spread_sizes(rng, n, side, side)
        # some products are as wide as a vocabulary
        factors = np.where(rng.random(n) < 0.15, 7.0 / larger, 1.0)
        widths = spread_sizes(rng, n, side)[:, 0] * factors
        for i in range(n):
            rows, inner = round(rows_and_inner[i, 0]), round(rows_and_inner[i, 1])
            if layout == "tn" and rng.random() < 0.3:
                rows, inner = inner, rows
            yield Case("gemm", layout, size_product(rows, round(widths[i]), inner))


def _bmms(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for layout in ("nn", "nt", "tn"):
        # interaction of embedding vectors: many small products
        for batch, features, dim in spread_sizes(rng, n // 2, (64, 2048), (4, 28), (16, 128)):
            f, d = round(features), round(dim)
            sides = {"nt": (f, f, d), "nn": (f, d, f), "tn": (d, f, f)}[layout]
            yield Case("bmm", layout, size_product(*sides, batch=int(batch)))
        # attention heads: fewer, larger ones
        for batch, sequence, dim in spread_sizes(rng, n - n // 2, (2, 128), (24, 300), (16, 128)):
            s, d = round(sequence), round(dim)
            # scores times values, and gradients of scores, sum over the sequence
            sums_over_sequence = layout == "tn" or (layout == "nn" and rng.random() < 0.5)
            sides = (s, d, s) if sums_over_sequence else (s, s, d)
            yield Case("bmm", layout, size_product(*sides, batch=int(batch)))


def _attentions(rng: np.random.Generator, n: int, larger: float) -> Iterator[Case]:
    for causal in (False, True):
        suffix = "_causal" if causal else ""
        for heads, sequence, dim in spread_sizes(rng, n, (2, 160), (24, 512 * larger), (16, 128)):
            batch, s, d = round(heads), round(sequence), round(dim / 8) * 8
            flops = attention_flops(batch, 1, s, d, causal=causal)
            sides = {"batch": batch, "m": s, "n": s, "k": d}
            yield Case("attention", f"forward{suffix}", {"flops": flops, **sides})
            backward_flops = ATTENTION_BACKWARD * flops
            yield Case("attention", f"backward{suffix}", {"flops": backward_flops, **sides})


#: Functions of losses and of updates of weights, which nets apply to few numbers.
_OF_FEW_NUMBERS = ("binary_cross_entropy_with_logits", "sub", "mul")


def _elementwise(rng: np.random.Generator, n: int, largest: float) -> Iterator[Case]:
    for variant, (_, *operands) in BASIC.items():
        tensors = {operand for operand in operands if isinstance(operand, str)}
        if variant in _OF_FEW_NUMBERS:
            sizes = spread_sizes(rng, n, (64, 2e5))[:, 0].tolist()
        else:
            most = _LARGEST / 4 / (len(tensors) + 1)
            sizes = spread_sizes(rng, n, (64, most))[:, 0].tolist()
            # two larger than the caches: every fit needs the cost of a byte from main memory
            beyond = most * largest / _LARGEST
            sizes += spread_sizes(rng, 2, (0.4 * beyond, beyond))[:, 0].tolist()
        for size in sizes:
            yield Case("elementwise", variant, {"elements": round(size)})


def _rowwise(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in ROWWISE:
        for size, width in spread_sizes(rng, n, (300, 6e6), (16, 14000)):
            if "softmax" not in variant and "nll" not in variant:
                width = 16 * (width / 16) ** 0.75
            width = min(round(width), round(size))
            rows = max(1, round(size / width))
            if variant == "nll_loss_forward":
                rows, width = min(rows, 8192), 1
            yield Case("rowwise", variant, {"elements": rows * width, "rows": rows, "n": width})


def _copies(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in COPIES:
        for size, columns, number in spread_sizes(rng, n, (1e3, 8e6), (16, 128), (2, 27)):
            width, parts = round(columns), round(number)
            if variant in ("index", "index_put"):
                batch = max(16, min(2048, round(size / parts**2)))
                sizes = {"elements": batch * parts * (parts - 1) // 2, "rows": batch, "n": parts}
            elif variant == "cat":
                rows = parts * max(16, min(4096, round(size / parts / width)))
                sizes = {"elements": rows * width, "rows": rows, "n": parts}
            else:
                rows = max(4, round(size / width))
                sizes = {"elements": rows * width, "rows": rows}
            yield Case("copy", variant, sizes)


def _far_copies(rng: np.random.Generator, largest: float) -> Iterator[Case]:
    """Copies, and new gradients of zeros, that are larger than the last cache, as large tables need
    them."""
    for variant, tensors in (("new_zeros", 1), ("clone", 2)):
        for (size,) in spread_sizes(rng, 4, (0.2 * largest, largest)):
            rows = round(size / 4 / tensors / 64)
            yield Case("copy", variant, {"elements": rows * 64, "rows": rows})


def _embeddings(rng: np.random.Generator, n: int, largest: float) -> Iterator[Case]:
    draws = [*spread_sizes(rng, n, (1e3, 1e6), (16, 128), (64, 2048), (1, 32))]
    # Many lookups into large tables, beyond all caches, decide the time of a DLRM, and are rare
    # among the draws above.
    draws += [*spread_sizes(rng, n // 2, (6e4, 1e6), (16, 128), (256, 2048), (4, 32))]
    for rows, width, batch, pooling in draws:
        exponent = rng.uniform(0, 1.2)
        dim = round(width)
        lookups = round(batch) * round(pooling)
        sizes = {
            "lookups": lookups,
            "bags": round(batch),
            "dim": dim,
            "exponent": exponent,
            "table_rows": round(rows),
            "index_batches": INDEX_BATCHES,
            "elements": lookups * dim,
        }
        yield Case("embedding_forward", "_embedding_bag", sizes)
        for kind in ("embedding_backward", "embedding_update"):
            yield Case(kind, "sparse", sizes | {"rows": lookups})
        small = round(min(rows, largest / 4 / width))
        dense = {"table_rows": small, "elements": small * dim, "rows": small}
        yield Case("embedding_backward", "dense", sizes | dense)
        if lookups <= 8192:
            words = round(min(rows, 14000))
            of_words = {
                "bags": lookups,
                "dim": dim * 4,
                "table_rows": words,
                "exponent": 0.0,
                "rows": words,
                "elements": words * dim * 4,
            }
            yield Case("embedding_backward", "dense_rows", sizes | of_words)


def _convolutions(rng: np.random.Generator, n: int, larger: float) -> Iterator[Case]:
    shapes = spread_sizes(rng, n * len(_WINDOWS), (1, 32), (4, 64), (8, 512), (8, 512))
    for number, (batch, edge, read, written) in enumerate(shapes):
        window = _WINDOWS[number % len(_WINDOWS)]
        height, width, stride = window.height, window.width, window.stride
        image = max(round(edge), height, width)
        channels_in, channels_out = 8 * round(read / 8), 8 * round(written / 8)
        groups = window.groups
        if groups == 0:
            groups = channels_in
            channels_out = channels_in
        elif groups > 1:
            # each group has equally many channels in and out, mostly a multiple of four
            channels_in = groups * 4 * max(channels_in // groups // 4, 1)
            channels_out = channels_in
        elif number % 13 == 0:
            # a first layer reads pictures of three colours
            channels_in = 3
            channels_out = min(channels_out, 64)
            image *= 2
        products_of_pixel = channels_out * channels_in // groups * height * width
        most_work = larger * (_WORK if groups == 1 else _GROUPED_WORK)
        while 2.0 * (image // stride) ** 2 * products_of_pixel > most_work:
            image //= 2
        work = 2.0 * (image // stride) ** 2 * products_of_pixel
        numbers_of_image = max(channels_in, channels_out) * image**2
        most_images = min(most_work / max(work, 1.0), larger * _NUMBERS / numbers_of_image)
        images = max(1, min(round(batch), int(most_images)))
        # pixels of the result along an edge, rounded up
        side = (image + stride - 1) // stride
        sizes = size_product(
            images * side**2,
            channels_out // groups,
            channels_in // groups * height * width,
            batch=groups,
        )
        sizes |= {"elements": images * side**2 * channels_out, "rows": images}
        sizes |= {"image": image, "height": height, "width": width, "stride": stride}
        suffix = _name_convolution(window, groups, channels_in)
        yield Case("convolution", f"forward{suffix}", sizes)
        yield Case("convolution", f"backward{suffix}", sizes | {"flops": 2 * sizes["flops"]})


def _name_convolution(window: _Window, groups: int, channels: int) -> str:
    """End of the variant of a convolution."""
    if groups == channels and groups > 1:
        return "_depthwise"
    if groups > 1:
        return "_grouped"
    if window.height * window.width == 1 and window.stride == 1:
        return "_pointwise"
    return ""


def _on_pictures(rng: np.random.Generator, n: int, kind: str) -> Iterator[Case]:
    """Operations on pictures of the sizes inside of nets."""
    largest = 2e6 if kind == "copy" else 6e6
    for variant in PICTURES[kind]:
        draws = spread_sizes(rng, n, (2e3, largest), (4, 64), (8, 512))
        for number, (size, edge, read) in enumerate(draws):
            image, channels = round(edge / 2) * 2, round(read / 8) * 8
            rows = channels * max(2, round(size / channels / image**2))
            elements = rows * image**2
            sizes: dict[str, float] = {
                "elements": elements,
                "rows": rows,
                "n": image**2,
                "image": image,
                "channels": channels,
            }
            if variant.startswith("native_batch"):
                sizes |= {"rows": channels, "n": rows // channels * image**2}
            if kind == "pooling":
                window, stride = _POOLING_WINDOWS[number % len(_POOLING_WINDOWS)]
                sizes |= {"window": window, "stride": stride}
                if "adaptive" in variant:
                    results = rows * (image // 2) ** 2
                    numbers_of_result = elements / results
                else:
                    # pixels of the result along an edge, rounded up
                    results = rows * ((image + stride - 1) // stride) ** 2
                    numbers_of_result = window**2
                sizes |= {"m": results, "k": numbers_of_result}
            yield Case(kind, variant, sizes)


#: Functions that nets apply to the numbers of whole pictures.
_OF_MANY_NUMBERS = ("relu_", "hardtanh", "hardtanh_backward", "silu", "bernoulli_")


def draw_net_cases(rng: np.random.Generator, density: float, larger: float = 1.0) -> list[Case]:
    """Draw kernels of nets and less common functions, a share of the full number, in random
    order."""
    cases = list(_convolutions(rng, max(2, round(8 * density)), larger**2))
    n = max(5, round(9 * density))
    for variant in MORE:
        largest = 1e7 if variant in _OF_MANY_NUMBERS else 1e6
        for (size,) in spread_sizes(rng, max(4, n - 2), (64, largest)):
            cases.append(Case("elementwise", variant, {"elements": round(size)}))
    for kind in PICTURES:
        cases += _on_pictures(rng, n, kind)
    return [cases[i] for i in rng.permutation(len(cases))]


def draw_cases(
    seed: int = 0, *, density: float = 1.0, cache: float = 0.0, larger: float = 1.0
) -> list[Case]:
    """Draw the kernels to time, with sizes spread evenly over the logarithm of what small training
    steps use.

    Parameters
    ----------
    seed : int
        Seed; other seeds give held-out sizes [-].
    density : float
        Share of the full number of sizes [-].
    cache : float
        Size of the last cache: some cases are four times as large, up to 1 GB [B].
    larger : float
        Factor on the sides of products and sequences, which are sized for one core of a CPU; its
        square is the factor on the work of convolutions [-].

    Returns
    -------
    cases : list of Case
        In random order, so that drift of the machine affects all classes alike.
    """
    rng = np.random.default_rng(seed)
    largest = float(np.clip(4.0 * cache, _LARGEST, 1e9))

    def scale(full_number: int) -> int:
        """The number of sizes of a class at this density."""
        return max(4, round(full_number * density))

    cases = [
        *_gemms(rng, scale(36), larger),
        *_bmms(rng, scale(28)),
        *_attentions(rng, scale(12), larger),
        *_elementwise(rng, scale(9), largest),
        *_rowwise(rng, scale(14)),
        *_copies(rng, scale(14)),
        *_embeddings(rng, scale(30), largest),
    ]
    cases = [cases[i] for i in rng.permutation(len(cases))]
    # random numbers of their own, so that the sizes above stay the same
    other_rng = np.random.default_rng([seed, 1])
    others = draw_net_cases(other_rng, density, larger)
    if cache:
        others += _far_copies(np.random.default_rng([seed, 2]), largest)
    for number, case in enumerate(others):
        cases.insert(int(other_rng.integers(number, len(cases) + 1)), case)
    return cases
