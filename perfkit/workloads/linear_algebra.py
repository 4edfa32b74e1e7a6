"""Sizes of linear algebra and of Fourier transforms as PyTorch calls them."""

from collections.abc import Sequence
from itertools import pairwise
from math import log2, prod
from typing import Any, NamedTuple

from perfkit.models.roofline import ATTENTION_BACKWARD
from perfkit.workloads.columns import OperationSizes

#: A size at which tiles of `perfkit.models.roofline.sequential_time` are full [-].
_FULL_TILE = 64
#: Largest matrices of which cuSOLVER factors a whole batch at once by Jacobi's method:
#: aten/src/ATen/native/cuda/linalg/BatchLinearAlgebraLib.cpp, linalg_eigh_cusolver and svd_cusolver.
LARGEST_AT_ONCE = 32
#: Factors of lengths that cuFFT has kernels for, and how often it passes over the numbers of others;
#: docs/formulas.md, table 2.7.
_FACTORS = (2, 3, 5, 7)
_PASSES_OF_OTHERS = 5
#: Longest transform of one pass; docs/formulas.md, table 2.7.
_LONGEST_OF_ONE_PASS = 4096


class Factorization(NamedTuple):
    """A factorization of matrices.

    Parameters
    ----------
    variant : str
        Finer class of ``factorization``.
    cubes : float
        Arithmetic over n³ of a square matrix [-].
    in_turn : bool
        Whether the library takes one matrix of a batch after the other, if they are large.
    """

    variant: str
    cubes: float
    in_turn: bool


#: By PyTorch's name. Arithmetic: LAPACK Working Note 41 (Blackford, Dongarra 1999), appendix C; of
#: eigenvectors 9 n³ and of singular vectors 21 n³: Golub, Van Loan, Matrix Computations (2013), tables
#: 8.3.1 and 8.6.1.
FACTORIZATIONS = {
    "linalg_cholesky_ex": Factorization("cholesky", 1 / 3, in_turn=False),
    "cholesky": Factorization("cholesky", 1 / 3, in_turn=False),
    "linalg_lu_factor_ex": Factorization("lu", 2 / 3, in_turn=False),
    "linalg_lu_factor": Factorization("lu", 2 / 3, in_turn=False),
    "linalg_lu": Factorization("lu", 2 / 3, in_turn=False),
    "_linalg_det": Factorization("lu", 2 / 3, in_turn=False),
    "_linalg_slogdet": Factorization("lu", 2 / 3, in_turn=False),
    "_linalg_solve_ex": Factorization("solve", 2 / 3, in_turn=False),
    "linalg_inv_ex": Factorization("inverse", 2.0, in_turn=False),
    "linalg_qr": Factorization("qr", 8 / 3, in_turn=True),
    "geqrf": Factorization("qr", 4 / 3, in_turn=True),
    "linalg_householder_product": Factorization("qr", 4 / 3, in_turn=True),
    "_linalg_svd": Factorization("svd", 21.0, in_turn=True),
    "_linalg_eigh": Factorization("eigh", 9.0, in_turn=True),
    "linalg_solve_triangular": Factorization("triangular", 1.0, in_turn=False),
    "triangular_solve": Factorization("triangular", 1.0, in_turn=False),
    "linalg_lu_solve": Factorization("triangular", 2.0, in_turn=False),
    "cholesky_solve": Factorization("triangular", 2.0, in_turn=False),
    "_cholesky_solve_helper": Factorization("triangular", 2.0, in_turn=False),
    "cholesky_inverse": Factorization("triangular", 2.0, in_turn=False),
}
#: Arithmetic of the right-hand sides of a linear system over n² of each [-].
_OF_RIGHT_SIDES = {"_linalg_solve_ex": 2.0}
#: Operations whose first argument is the right-hand side, and not the matrix.
_MATRIX_SECOND = ("triangular_solve", "cholesky_solve", "_cholesky_solve_helper")


def name_factorization(name: str, args: Sequence[Any]) -> str:
    """Finer class of a factorization.

    Parameters
    ----------
    name : str
        A key of `FACTORIZATIONS`.
    args : sequence
        Its arguments.

    Returns
    -------
    variant : str
        One of `perfkit.platform.sequential_kernels.FACTORIZATIONS`.
    """
    return FACTORIZATIONS[name].variant


def size_factorization(name: str, args: Sequence[Any], out: Any) -> OperationSizes:
    """Sizes of a factorization.

    Parameters
    ----------
    name : str
        A key of `FACTORIZATIONS`.
    args : sequence
        Its arguments.
    out : Tensor or sequence of Tensor
        Its results.

    Returns
    -------
    sizes : OperationSizes
        The arithmetic [FLOP], four times that of real numbers for complex ones; ``batch`` matrices, of
        which ``rows`` are factored one after the other, with ``n`` and ``k`` columns.
    """
    kind = FACTORIZATIONS[name]
    matrix = args[0]
    other: Any = args[1] if len(args) > 1 else None
    if name in _MATRIX_SECOND:
        matrix, other = args[1], args[0]
    rows, columns = matrix.shape[-2:]
    batch = prod(matrix.shape[:-2])
    side = min(rows, columns)
    cubes = kind.cubes
    if name == "linalg_qr" and args[1] == "r":
        cubes = FACTORIZATIONS["geqrf"].cubes  # the orthogonal matrix is not made
    flops = cubes * batch * side * side * max(rows, columns)
    right_sides = side
    if hasattr(other, "shape") and other.dim() >= 1:
        is_vector = other.dim() == matrix.dim() - 1
        right_sides = 1 if is_vector else other.shape[-1]
    if kind.variant == "triangular":
        flops = kind.cubes * batch * side * side * right_sides
    flops += _OF_RIGHT_SIDES.get(name, 0.0) * batch * side * side * right_sides
    in_turn = batch if kind.in_turn and side > LARGEST_AT_ONCE else min(batch, 1)
    return OperationSizes(
        flops=_count_real(matrix) * flops,
        batch=batch,
        m=_FULL_TILE,
        n=side,
        k=side,
        elements=matrix.numel(),
        rows=in_turn,
    )


def _count_real(tensor: Any) -> float:
    """Products of real numbers in one of two numbers of this tensor [-]."""
    return 4.0 if tensor.is_complex() else 1.0


def _list_lengths(args: Sequence[Any]) -> list[int]:
    """Lengths of a transform along its dimensions, those of real numbers where they are known."""
    x, dims = args[:2]
    return [x.shape[dimension] for dimension in dims]


def _is_smooth(length: int) -> bool:
    """Whether a length has no other factors than those that cuFFT has kernels for."""
    for factor in _FACTORS:
        while length > 1 and length % factor == 0:
            length //= factor
    return length == 1


def name_fourier(name: str, args: Sequence[Any]) -> str:
    """How often a Fourier transform passes over its numbers.

    Parameters
    ----------
    name : str
        ``_fft_r2c``, ``_fft_c2r`` or ``_fft_c2c``.
    args : sequence
        Numbers, and dimensions.

    Returns
    -------
    variant : str
        Such as ``3_passes``: one for each dimension, one to move dimensions that are not last, and two
        for the copy of complex numbers that become real ones.
    """
    x, dims = args[:2]
    lengths = _list_lengths(args)
    if name == "_fft_c2r":
        lengths[-1] = int(args[3])
    passes = 0
    for length in lengths:
        is_one_pass = _is_smooth(length) and length <= _LONGEST_OF_ONE_PASS
        passes += 1 if is_one_pass else _PASSES_OF_OTHERS
    is_last_alone = [dimension % x.dim() for dimension in dims] == [x.dim() - 1]
    passes += 0 if is_last_alone else 1
    passes += 2 if name == "_fft_c2r" else 0
    return f"{passes}_passes"


def size_fourier(name: str, args: Sequence[Any], out: Any) -> OperationSizes:
    """Sizes of a Fourier transform.

    Parameters
    ----------
    name : str
        ``_fft_r2c``, ``_fft_c2r`` or ``_fft_c2c``.
    args : sequence
        Numbers, and dimensions.
    out : Tensor
        The result.

    Returns
    -------
    sizes : OperationSizes
        5 N log₂ n FLOP for N complex numbers in transforms of n, half of it for real ones (the
        convention of FFTW's benchmark, fftw.org/speed/method.html).
    """
    x = args[0]
    points = out.numel() if name == "_fft_c2r" else x.numel()
    lengths = _list_lengths(args)
    if name == "_fft_c2r":
        lengths[-1] = int(args[3])
    flops = 5.0 * points * log2(max(prod(lengths), 1))
    if name != "_fft_c2c":
        flops /= 2.0
    return OperationSizes(flops=flops, elements=out.numel(), n=prod(lengths))


def size_distances(args: Sequence[Any], out: Any) -> OperationSizes:
    """Sizes of Euclidean distances of all pairs: one product, whose inner side has two columns for the
    squares (aten/src/ATen/native/Distance.cpp, _euclidean_dist)."""
    left, right = args[:2]
    return OperationSizes.of_product(
        left.shape[-2], right.shape[-2], left.shape[-1] + 2, batch=prod(left.shape[:-2])
    )


def size_unknown(args: Sequence[Any], out: Any) -> OperationSizes:
    """Sizes of an operation whose work is not known: all numbers, and the narrower side of its largest
    matrix."""
    tensors = [value for value in args if hasattr(value, "shape")]
    if not tensors:
        return OperationSizes()
    largest = max(tensors, key=lambda tensor: tensor.numel())
    side = min(largest.shape[-2:]) if largest.dim() > 1 else 1
    return OperationSizes(elements=largest.numel(), n=side)


class VariedAttention(NamedTuple):
    """Where an operation of attention over samples of unlike lengths has its arguments.

    Parameters
    ----------
    query, starts : int
        Positions of the queries, and of where samples of queries begin; keys, values, and where samples
        of keys begin, follow them [-].
    causal : int
        Position of the flag that says that later keys are masked [-].
    window : int or None
        Position of a window, of which (-1, 0) means the same; None where there is none [-].
    backward : bool
        Whether it is a backward pass.
    """

    query: int
    starts: int
    causal: int
    window: int | None
    backward: bool


#: By PyTorch's name: torch/nn/attention/varlen.py and native_functions.yaml.
VARIED_ATTENTION = {
    "_varlen_attn": VariedAttention(0, 3, 7, 9, backward=False),
    "_varlen_attn_backward": VariedAttention(1, 6, 10, 13, backward=True),
    "_flash_attention_forward": VariedAttention(0, 3, 8, None, backward=False),
    "_flash_attention_backward": VariedAttention(1, 6, 11, None, backward=True),
}


def name_varied_attention(name: str, args: Sequence[Any]) -> str:
    """Pass and causality of attention over samples of unlike lengths.

    Parameters
    ----------
    name : str
        A key of `VARIED_ATTENTION`.
    args : sequence
        Its arguments.

    Returns
    -------
    variant : str
        Such as ``forward_causal``; the version of the kernel depends on the device.
    """
    places = VARIED_ATTENTION[name]
    phase = "backward" if places.backward else "forward"
    return f"{phase}_causal" if _masks_later_keys(places, args) else phase


def _masks_later_keys(places: VariedAttention, args: Sequence[Any]) -> bool:
    """Whether attention is causal."""
    window = None if places.window is None else args[places.window]
    is_causal_window = window is not None and [*window] == [-1, 0]
    return bool(args[places.causal]) or is_causal_window


def size_varied_attention(name: str, args: Sequence[Any], out: Any) -> OperationSizes:
    """Sizes of attention over samples that lie one after the other, or side by side.

    Parameters
    ----------
    name : str
        A key of `VARIED_ATTENTION`.
    args : sequence
        Its arguments; lists of numbers in place of tensors that say where samples begin, if these are
        known.
    out : sequence of Tensor
        Its results.

    Returns
    -------
    sizes : OperationSizes
        The arithmetic of the pairs of each sample, half of it where later keys are masked; of equal
        samples where their lengths are not known, which is the least that they can be [FLOP]. ``m`` and
        ``n`` are mean lengths.
    """
    places = VARIED_ATTENTION[name]
    q, k, v = args[places.query : places.query + 3]
    heads, width, deep = q.shape[-2], q.shape[-1], v.shape[-1]
    starts = args[places.starts]
    if starts is None:  # samples lie side by side
        samples, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        pairs = float(samples * queries * keys)
    else:
        samples = max(len(starts) - 1, 1)
        queries, keys = q.shape[0] / samples, k.shape[0] / samples
        pairs = _count_pairs(starts, args[places.starts + 1], samples * queries * keys)
    if _masks_later_keys(places, args):
        pairs /= 2.0
    passes = ATTENTION_BACKWARD if places.backward else 1.0
    flops = passes * 2.0 * pairs * heads * (width + deep)
    return OperationSizes(flops=flops, batch=samples * heads, m=queries, n=keys, k=width)


def _count_pairs(starts: Any, starts_of_keys: Any, of_equal: float) -> float:
    """Pairs of a query and a key of all samples; those of equal samples if their lengths are not known
    [-]."""
    if starts_of_keys is None:
        starts_of_keys = starts
    if not isinstance(starts, list) or not isinstance(starts_of_keys, list):
        return of_equal
    queries, keys = _find_lengths(starts), _find_lengths(starts_of_keys)
    return float(sum(query * key for query, key in zip(queries, keys, strict=True)))


def _find_lengths(starts: list[int]) -> list[int]:
    """Lengths of samples that begin, and end, at these places [-]."""
    return [end - begin for begin, end in pairwise(starts)]
