"""Isolated kernels: which operations to time, and with which sizes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from perfkit.models.roofline import ATTENTION_BACKWARD, attention_flops, gemm_flops
from perfkit.workloads.measured_functions import BASIC, COPIES, MORE, PICTURES, ROWWISE

#: Batches of indices among which the calls of an embedding kernel rotate; see
#: `perfkit.models.caches.rotating_misses`.
INDEX_BATCHES = 8

#: Largest working set of one case, unless the last cache is known to be large [B].
_LARGEST = 160e6

#: Height, width, stride and groups of channels of windows, as often as nets use them (0: one group
#: per channel).
_WINDOWS = (
    (3, 3, 1, 1),
    (3, 3, 1, 1),
    (3, 3, 1, 1),
    (1, 1, 1, 1),
    (1, 1, 1, 1),
    (1, 1, 1, 1),
    (3, 3, 2, 1),
    (1, 1, 2, 1),
    (5, 5, 1, 1),
    (1, 7, 1, 1),
    (3, 3, 1, 8),
    (3, 3, 1, 32),
    (3, 3, 1, 0),
    (3, 3, 2, 0),
    (5, 5, 1, 0),
    (7, 7, 1, 0),
)
#: Most work of a forward convolution, and of a grouped one, whose gradients are slow [FLOP]; most
#: numbers of an input or output [-].
_WORK, _GROUPED_WORK, _NUMBERS = 4e8, 6e7, 6e6


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
        heights = spread_sizes(rng, n, side, side)
        wide = np.where(rng.random(n) < 0.15, 7.0 / larger, 1.0)  # the width of a vocabulary
        for (m, k), factor, (width,) in zip(heights, wide, spread_sizes(rng, n, side), strict=True):
            rows, inner = round(m), round(k)
            if layout == "tn" and rng.random() < 0.3:
                rows, inner = inner, rows
            yield Case("gemm", layout, size_product(rows, round(width * factor), inner))


def _bmms(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for layout in ("nn", "nt", "tn"):
        # interaction of embedding vectors: many small products
        for batch, features, dim in spread_sizes(rng, n // 2, (64, 2048), (4, 28), (16, 128)):
            f, d = round(features), round(dim)
            sizes = {"nt": (f, f, d), "nn": (f, d, f), "tn": (d, f, f)}[layout]
            yield Case("bmm", layout, size_product(*sizes, batch=int(batch)))
        # attention heads: fewer, larger ones
        for batch, sequence, dim in spread_sizes(rng, n - n // 2, (2, 128), (24, 300), (16, 128)):
            s, d = round(sequence), round(dim)
            turned = layout == "tn" or (layout == "nn" and rng.random() < 0.5)
            yield Case(
                "bmm", layout, size_product(s, *((d, s) if turned else (s, d)), batch=int(batch))
            )


def _attentions(rng: np.random.Generator, n: int, larger: float) -> Iterator[Case]:
    for causal in ("", "_causal"):
        for heads, sequence, dim in spread_sizes(rng, n, (2, 160), (24, 512 * larger), (16, 128)):
            s, d = round(sequence), round(dim / 8) * 8
            flops = attention_flops(round(heads), 1, s, d, causal=bool(causal))
            sizes = {"batch": round(heads), "m": s, "n": s, "k": d}
            yield Case("attention", f"forward{causal}", {"flops": flops, **sizes})
            yield Case(
                "attention", f"backward{causal}", {"flops": ATTENTION_BACKWARD * flops, **sizes}
            )


def _elementwise(rng: np.random.Generator, n: int, largest: float) -> Iterator[Case]:
    for variant, (_, *given) in BASIC.items():
        tensors = len({one for one in given if isinstance(one, str)})
        top = (
            2e5
            if variant in ("binary_cross_entropy_with_logits", "sub", "mul")
            else _LARGEST / 4 / (tensors + 1)
        )
        sizes = [*spread_sizes(rng, n, (64, top))]
        # two larger than the caches: every fit needs the cost of a byte from main memory
        if top > 2e5:
            sizes += [
                *spread_sizes(rng, 2, (0.4 * top * largest / _LARGEST, top * largest / _LARGEST))
            ]
        yield from (Case("elementwise", variant, {"elements": round(size)}) for (size,) in sizes)


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
        exponent, dim, lookups = rng.uniform(0, 1.2), round(width), round(batch) * round(pooling)
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
        yield Case(
            "embedding_backward",
            "dense",
            sizes | {"table_rows": small, "elements": small * dim, "rows": small},
        )
        if lookups <= 8192:
            words = round(min(rows, 14000))
            own = {
                "bags": lookups,
                "dim": dim * 4,
                "table_rows": words,
                "exponent": 0.0,
                "rows": words,
            }
            yield Case(
                "embedding_backward", "dense_rows", sizes | own | {"elements": words * dim * 4}
            )


def _convolutions(rng: np.random.Generator, n: int, larger: float) -> Iterator[Case]:
    shapes = spread_sizes(rng, n * len(_WINDOWS), (1, 32), (4, 64), (8, 512), (8, 512))
    for number, (batch, edge, read, written) in enumerate(shapes):
        height, width, stride, groups = _WINDOWS[number % len(_WINDOWS)]
        image, into, out = (
            max(round(edge), height, width),
            8 * round(read / 8),
            8 * round(written / 8),
        )
        if groups == 0:
            groups = out = into
        elif groups > 1:
            # each group has equally many channels in and out, mostly a multiple of four
            out = into = groups * 4 * max(into // groups // 4, 1)
        elif number % 13 == 0:  # a first layer reads pictures of three colours
            into, image, out = 3, image * 2, min(out, 64)
        limit = larger * (_WORK if groups == 1 else _GROUPED_WORK)
        while (
            work := 2.0 * (image // stride) ** 2 * out * into // groups * height * width
        ) > limit:
            image //= 2
        most = min(limit / max(work, 1.0), larger * _NUMBERS / (max(into, out) * image**2))
        images, side = max(1, min(round(batch), int(most))), -(-image // stride)
        sizes = size_product(
            images * side**2, out // groups, into // groups * height * width, batch=groups
        )
        sizes |= {"elements": images * side**2 * out, "rows": images}
        sizes |= {"image": image, "height": height, "width": width, "stride": stride}
        suffix = "" if groups == 1 else "_depthwise" if groups == into else "_grouped"
        suffix = "_pointwise" if (height * width, stride, groups) == (1, 1, 1) else suffix
        yield Case("convolution", "forward" + suffix, sizes)
        yield Case("convolution", "backward" + suffix, sizes | {"flops": 2 * sizes["flops"]})


def _on_pictures(rng: np.random.Generator, n: int, kind: str) -> Iterator[Case]:
    """Operations on pictures of the sizes inside of nets."""
    for variant in PICTURES[kind]:
        draws = spread_sizes(rng, n, (2e3, 2e6 if kind == "copy" else 6e6), (4, 64), (8, 512))
        for number, (size, length, width) in enumerate(draws):
            side, channels = round(length / 2) * 2, round(width / 8) * 8
            rows = channels * max(2, round(size / channels / side**2))
            sizes: dict[str, float] = {
                "elements": rows * side**2,
                "rows": rows,
                "n": side**2,
                "image": side,
            }
            sizes["channels"] = channels
            if variant.startswith("native_batch"):
                sizes |= {"rows": channels, "n": rows // channels * side**2}
            if kind == "pooling":
                (window, stride), adaptive = (
                    ((3, 2), (2, 2), (3, 1))[number % 3],
                    "adaptive" in variant,
                )
                out = rows * (-side // (2 if adaptive else stride)) ** 2
                sizes |= {"window": window, "stride": stride, "m": out}
                sizes["k"] = sizes["elements"] / out if adaptive else window**2
            yield Case(kind, variant, sizes)


def draw_net_cases(rng: np.random.Generator, density: float, larger: float = 1.0) -> list[Case]:
    """Draw kernels of nets and less common functions, a share of the full number, in random
    order."""
    n, cases = (
        max(5, round(9 * density)),
        [*_convolutions(rng, max(2, round(8 * density)), larger**2)],
    )
    for variant in MORE:
        top = (
            1e7
            if variant in ("relu_", "hardtanh", "hardtanh_backward", "silu", "bernoulli_")
            else 1e6
        )
        draws = spread_sizes(rng, max(4, n - 2), (64, top))
        cases += [Case("elementwise", variant, {"elements": round(size)}) for (size,) in draws]
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
    rng, largest = np.random.default_rng(seed), float(np.clip(4.0 * cache, _LARGEST, 1e9))
    products, batched, attentions, few, some, many = (
        max(4, round(n * density)) for n in (36, 28, 12, 9, 14, 30)
    )
    cases = [
        *_gemms(rng, products, larger),
        *_bmms(rng, batched),
        *_attentions(rng, attentions, larger),
    ]
    cases += [*_elementwise(rng, few, largest), *_rowwise(rng, some), *_copies(rng, some)]
    cases += _embeddings(rng, many, largest)
    cases = [cases[i] for i in rng.permutation(len(cases))]
    # own random numbers, so that the sizes above stay the same
    other = np.random.default_rng([seed, 1])
    far = _far_copies(np.random.default_rng([seed, 2]), largest) if cache else ()
    for number, case in enumerate([*draw_net_cases(other, density, larger), *far]):
        cases.insert(int(other.integers(number, len(cases) + 1)), case)
    return cases
