"""Isolated kernels of operations that graphs, tables of several kinds, recurrent layers, spectra and optimizers of
matrices have, and Transformers and DLRMs do not: which to time, and with which sizes."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from perfkit.measure.kernels import INDEX_BATCHES, Case, size_product, spread_sizes
from perfkit.workloads.columns import OperationSizes
from perfkit.workloads.linear_algebra import FACTORIZATIONS

#: Operations on whole rows that an index chooses, as variants of copies.
ROWS = (
    "index.rows",
    "index_put.rows",
    "gather.rows",
    "scatter_add.rows",
    "scatter_add.coalesce",
    "scatter_add.sparse_mask",
)
#: Functions of a tensor and a column of numbers, one for each row.
IN_RUNS = ("mul", "add", "sub", "div")
#: How bags are joined beside a sum.
BAGS = (".mean", ".max", ".weighted")
#: Fourier transforms by how often a GPU would pass over the numbers, which is how captures name them: of real
#: numbers along the last dimension, of complex ones along two, and back to real ones along two.
TRANSFORMS = ("1_passes", "3_passes", "5_passes")
#: Work on matrices, with its name in PyTorch.
ON_MATRICES = {
    "cholesky": "linalg_cholesky_ex",
    "lu": "linalg_lu_factor_ex",
    "inverse": "linalg_inv_ex",
    "qr": "linalg_qr",
    "eigh": "_linalg_eigh",
    "svd": "_linalg_svd",
    "solve": "_linalg_solve_ex",
    "triangular": "linalg_solve_triangular",
}

#: Sides of pairs of dimensions that are transformed [-]; transforms are written for products of small primes.
_SIDES = (8, 12, 16, 24, 32, 48, 64, 96)


class _Shape(NamedTuple):
    """A convolution: its side and stride, whether each channel has its own group, and whether the channels of a
    place are neighbours in memory."""

    side: int
    stride: int
    is_depthwise: bool
    has_channels_last: bool


#: Depthwise convolutions of many channels on small images, and convolutions on images whose channels are
#: neighbours, which Transformers of images have.
_SHAPES = (
    _Shape(3, 1, True, False),
    _Shape(5, 1, True, False),
    _Shape(3, 2, True, False),
    _Shape(5, 2, True, False),
    _Shape(3, 1, True, True),
    _Shape(7, 1, True, True),
    _Shape(3, 2, False, True),
    _Shape(2, 2, False, True),
    _Shape(1, 1, False, True),
)
#: Most numbers of a table whose rows are indexed [-].
_TABLE = 1.6e7
#: Most work of a convolution [FLOP].
_WORK = 3e7


def _state(sizes: OperationSizes) -> dict[str, float]:
    """Sizes that are not zero, as a case states them."""
    return {name: float(value) for name, value in sizes._asdict().items() if value}


def _rows(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in ROWS:
        # numbers that are moved, numbers of a row, and rows that are indexed over rows of the table
        for size, width, reuse in spread_sizes(rng, n, (1e3, 2e6), (2, 256), (0.02, 8)):
            columns = round(width)
            rows = max(16, round(size / columns))
            table_rows = max(16, min(round(rows / reuse), round(_TABLE / columns)))
            sizes = {
                "elements": rows * columns,
                "rows": rows,
                "dim": columns,
                "table_rows": table_rows,
            }
            yield Case("copy", variant, sizes)


def _functions_in_runs(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in IN_RUNS:
        for size, width in spread_sizes(rng, n, (1e3, 3e6), (3, 300)):
            columns = round(width)
            rows = max(2, round(size / columns))
            yield Case("elementwise", variant, {"elements": rows * columns, "rows": rows})


def _bags(rng: np.random.Generator, n: int) -> Iterator[Case]:
    kinds = [("embedding_forward", "_embedding_bag"), ("embedding_backward", "dense")]
    variants = [(kind, f"{stem}{mode}") for kind, stem in kinds for mode in BAGS]
    for kind, variant in [*variants, ("embedding_backward", "sparse.mean")]:
        ranges = ((1e3, 1e5), (16, 128), (64, 1024), (1, 32))
        for rows, width, batch, pooling in spread_sizes(rng, n, *ranges):
            dim, bags = round(width), round(batch)
            lookups = bags * round(pooling)
            sizes: dict[str, float] = {
                "lookups": lookups,
                "bags": bags,
                "dim": dim,
                "exponent": rng.uniform(0, 1.2),
                "table_rows": round(rows),
                "index_batches": INDEX_BATCHES,
                "elements": lookups * dim,
            }
            if variant.startswith("sparse"):
                sizes["rows"] = lookups
            elif kind == "embedding_backward":
                sizes |= {"rows": round(rows), "elements": round(rows) * dim}
            yield Case(kind, variant, sizes)


def _recurrent_layers(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in ("recurrent.nt", "recurrent_backward.nt"):
        passes = 2.0 if variant.startswith("recurrent_backward") else 1.0
        ranges = ((4, 64), (1, 32), (16, 320), (16, 320))
        for steps, samples, read, hidden in spread_sizes(rng, n, *ranges):
            states = round(hidden / 8) * 8
            inputs = round(read / 8) * 8
            product = OperationSizes.of_product(
                round(steps) * round(samples), 4 * states, inputs + states, passes=passes
            )
            sizes = _state(product._replace(rows=round(steps)))
            yield Case("gemm", variant, sizes | {"dim": states})


def _complex_products(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for layout in ("nn", "nt", "tn"):
        for batch, *sides in spread_sizes(rng, n, (8, 256), (4, 64), (4, 64), (4, 64)):
            m, width, k = (round(side) for side in sides)
            sizes = size_product(m, width, k, batch=round(batch))
            yield Case("bmm", f"complex.{layout}", sizes | {"flops": 4 * sizes["flops"]})
        for sides in spread_sizes(rng, n, (16, 256), (16, 256), (16, 256)):
            m, width, k = (round(side) for side in sides)
            sizes = size_product(m, width, k)
            yield Case("gemm", f"complex.{layout}", sizes | {"flops": 4 * sizes["flops"]})


def _scattered_products(rng: np.random.Generator, n: int) -> Iterator[Case]:
    """Batched products of factors whose batches are their innermost dimension, as sums over indices have them."""
    for variant in ("nn", "complex.nn"):
        for batch, *sides in spread_sizes(rng, n, (16, 256), (3, 32), (8, 64), (8, 64)):
            m, width, k = (round(side) for side in sides)
            sizes = size_product(m, width, k, batch=round(batch))
            if variant == "complex.nn":
                sizes["flops"] *= 4
            sizes["elements"] = round(batch) * (m * k + k * width)
            yield Case("bmm", variant, sizes)


def _transforms(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant in TRANSFORMS:
        for (size,) in spread_sizes(rng, n, (1e3, 4e5)):
            height, width = rng.choice(_SIDES, 2).tolist()
            if variant == "1_passes":
                # one dimension, as long as both
                height, width = 1, height * width
            transforms = max(1, round(size / (height * width)))
            numbers = transforms * height * width
            flops = (5.0 if variant == "3_passes" else 2.5) * numbers
            flops *= float(np.log2(height * width))
            sizes = {"flops": flops, "elements": numbers, "n": height * width, "rows": transforms}
            yield Case("fourier", variant, sizes | {"height": height, "width": width})


def _convolutions(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for shape in _SHAPES:
        for batch, edge, drawn in spread_sizes(rng, n, (1, 8), (4, 56), (24, 1200)):
            image = max(round(edge), shape.side)
            channels = 8 * round(drawn / 8)
            groups = channels if shape.is_depthwise else 1
            if not shape.is_depthwise:
                channels = max(8, 8 * round(drawn / 32))
            output = (image + shape.stride - 1) // shape.stride
            if shape.side % 2 == 0:
                output = (image - shape.side) // shape.stride + 1
            window = shape.side**2
            work = 2.0 * output**2 * channels * channels / groups * window
            images = max(1, min(round(batch), int(_WORK / work)))
            sizes = size_product(
                images * output**2, channels // groups, channels // groups * window, batch=groups
            )
            sizes |= {"elements": images * output**2 * channels, "rows": images, "image": image}
            sizes |= {"height": shape.side, "width": shape.side, "stride": shape.stride}
            suffix = "_last" if shape.has_channels_last else ""
            if shape.is_depthwise:
                suffix += "_depthwise"
            elif window == 1:
                suffix += "_pointwise"
            yield Case("convolution", f"forward{suffix}", sizes)
            backward = sizes | {"flops": 2 * sizes["flops"]}
            yield Case("convolution", f"backward{suffix}", backward)


def _factorizations(rng: np.random.Generator, n: int) -> Iterator[Case]:
    for variant, name in ON_MATRICES.items():
        # decompositions by vectors take longer
        longest = 200 if variant in ("svd", "eigh") else 320
        for (size,) in spread_sizes(rng, n, (6, longest)):
            side = round(size)
            cubes = FACTORIZATIONS[name].cubes
            if variant == "solve":
                cubes += 2.0  # as many right-hand sides as rows
            sizes = {"batch": 1, "m": 64, "n": side, "k": side, "elements": side**2}
            yield Case("factorization", variant, {"flops": cubes * side**3, **sizes})


#: All kinds, with their full number of sizes for each class [-].
_DRAWN: Sequence[tuple[Callable[[np.random.Generator, int], Iterator[Case]], int]] = (
    (_rows, 8),
    (_functions_in_runs, 5),
    (_bags, 8),
    (_recurrent_layers, 12),
    (_convolutions, 6),
    (_complex_products, 8),
    (_scattered_products, 8),
    (_transforms, 8),
    (_factorizations, 5),
)


def draw_rare_cases(seed: int = 0, *, density: float = 1.0) -> list[Case]:
    """Draw rare kernels to time, with sizes spread evenly over the logarithm of what small training steps use.

    Parameters
    ----------
    seed : int
        Seed; other seeds give held-out sizes [-].
    density : float
        Share of the full number of sizes, of which at least four are drawn, or three below 0.4 [-].

    Returns
    -------
    cases : list of Case
        In random order, so that drift of the machine affects all classes alike.
    """
    rng = np.random.default_rng([seed, 3])
    fewest = 4 if density >= 0.4 else 3
    cases: list[Case] = []
    for draw, full_number in _DRAWN:
        cases += draw(rng, max(fewest, round(full_number * density)))
    return [cases[number] for number in rng.permutation(len(cases))]
