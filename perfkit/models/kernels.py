"""Kernel time as a sum of named terms, inside iterations with distant operands, and at the usual
pace of a machine.

On a CPU core the terms add up. For resources that overlap, as on a GPU, see
`perfkit.models.roofline`.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Array, Values, check_choice
from perfkit.models.roofline import round_up

_Sizes = Mapping[str, Array]
#: Sizes that are terms without a change.
_PLAIN = (
    "flops",
    "nbytes",
    "beyond_l2",
    "beyond_l3",
    "elements",
    "rows",
    "bags",
    "lookups",
    "row_bytes",
    "page_walks",
    "unique_bytes",
)

#: Reference work that is timed between other measurements: a matrix product, a pass through memory,
#: a gather of rows.
REFERENCES = ("product", "stream", "gather")


def _count_calls(sizes: _Sizes) -> Values:
    return 1.0


def _count_flops_in_blocks(sizes: _Sizes) -> Values:
    """Grouped convolutions compute 16 channels at once, of inputs and of outputs."""
    return sizes["flops"] * (round_up(sizes["n"], 16) / np.maximum(sizes["n"], 1.0)) ** 2


def _count_flops_of_wide_windows(sizes: _Sizes) -> Values:
    """Windows of more than 3 by 3 have no code of their own."""
    return sizes["flops"] * (sizes["k"] > 9)


def _count_flops_in_tiles(sizes: _Sizes) -> Values:
    """Products compute tiles of 8 rows and 32 columns."""
    return 2 * sizes["batch"] * round_up(sizes["m"], 8) * round_up(sizes["n"], 32) * sizes["k"]


def _count_products(sizes: _Sizes) -> Values:
    return sizes["batch"]


def _count_rows_of_products(sizes: _Sizes) -> Values:
    return sizes["batch"] * sizes["m"]


def _count_results(sizes: _Sizes) -> Values:
    return sizes["batch"] * sizes["m"] * sizes["n"]


def _count_numbers_in_windows(sizes: _Sizes) -> Values:
    return sizes["m"] * sizes["k"]


def _count_numbers_on_the_left(sizes: _Sizes) -> Values:
    return sizes["batch"] * sizes["m"] * sizes["k"]


def _count_numbers_on_the_right(sizes: _Sizes) -> Values:
    return sizes["batch"] * sizes["k"] * sizes["n"]


def _count_columns(sizes: _Sizes) -> Values:
    return sizes["n"]


def _count_steps_of_a_sort(sizes: _Sizes) -> Values:
    return sizes["lookups"] * np.log2(np.maximum(sizes["lookups"], 2.0))


def _count_steps_of_a_sort_of_rows(sizes: _Sizes) -> Values:
    return sizes["rows"] * np.log2(np.maximum(sizes["rows"], 2.0))


def _count_planes(sizes: _Sizes) -> Values:
    """Images of single channels."""
    return sizes["batch"] * sizes["rows"]


def _count_numbers_of_bags(sizes: _Sizes) -> Values:
    return sizes["bags"] * sizes["dim"]


def _count_maxima(sizes: _Sizes) -> Values:
    """How often a number of a bag is larger than all before it. Of n random numbers the i-th is so with
    probability 1/i; their sum without the first is close to the logarithm of n."""
    rows_of_bag = np.maximum(sizes["lookups"] / np.maximum(sizes["bags"], 1.0), 1.0)
    return sizes["bags"] * sizes["dim"] * np.log(rows_of_bag)


@closed_form()
def capped_clock(power: Values, *, idle_share: float = 0.2) -> Values:
    r"""Clock of a device whose power is capped, over that at its full power.

    Parameters
    ----------
    power : float, array or expression
        Cap over the full power, from 0.7 to 1 [-].
    idle_share : float, optional
        Share of the full power that does not depend on the clock: leakage, memory, links [-].

    Returns
    -------
    clock : same kind as `power`
        Clock, and so the rate of arithmetic, of work that draws the full power; 0 where the cap
        leaves nothing for the clock [-].

    Notes
    -----
    .. math:: P = P_0 \left(s + (1 - s) x^3\right)

    Dynamic power is C f V², and near the highest clocks the voltage rises with the clock. The share was
    read off a power sweep of an RTX 3090 (prompts of 198,000 tokens, which are bound by products: 0.943
    and 0.853 of the rate at 300 and 250 of 350 W; llmgarage.ai/power-limit-tokens-per-second-benchmark).
    Below 0.7 the voltage has reached its least, and the law fails: 0.60 at 200 W, where it says 0.77.
    Judged on the largest products of A100 at 300 W (PCIe) beside 400 W (SXM): 0.93 measured, 0.88 by
    this law (stas00/ml-engineering, compute/accelerator).

    Examples
    --------
    >>> round(float(capped_clock(500 / 700)), 3)
    0.863
    """
    power_of_clock = np.maximum(power - idle_share, 0.0)
    return (power_of_clock / (1.0 - idle_share)) ** (1.0 / 3.0)


#: Terms by name: how many units of each an operation has, from its sizes; the fitted parameter is
#: the time of a unit. Tiles, blocks and wide windows: docs/formulas.md, table 2.2.
TERMS: dict[str, Callable[[_Sizes], Values]] = {
    **{name: itemgetter(name) for name in _PLAIN},
    "launch": _count_calls,
    "blocked_flops": _count_flops_in_blocks,
    "wide_flops": _count_flops_of_wide_windows,
    "tiled_flops": _count_flops_in_tiles,
    "products": _count_products,
    "product_rows": _count_rows_of_products,
    "outputs": _count_results,
    "windows": _count_numbers_in_windows,
    "left": _count_numbers_on_the_left,
    "right": _count_numbers_on_the_right,
    "columns": _count_columns,
    "sorted_lookups": _count_steps_of_a_sort,
    "sorted_rows": _count_steps_of_a_sort_of_rows,
    "planes": _count_planes,
    "bag_numbers": _count_numbers_of_bags,
    "bag_maxima": _count_maxima,
}

_MEMORY = ("beyond_l2", "beyond_l3")
_DEPTHWISE = ("launch", "flops", "wide_flops", "planes", "nbytes", *_MEMORY)
#: Complex products: tiles of real numbers do not fit.
_COMPLEX = ("launch", "products", "flops", "outputs", "left", "right", "elements", *_MEMORY)

#: Which terms each operation class has, by kind or by kind and variant.
KERNEL_TERMS: dict[str, tuple[str, ...]] = {
    "gemm": ("launch", "tiled_flops", "flops", "outputs", "left", "right", *_MEMORY),
    "bmm": (
        "launch",
        "products",
        "product_rows",
        "tiled_flops",
        "flops",
        "outputs",
        "left",
        "right",
        "elements",
        *_MEMORY,
    ),
    "convolution": ("launch", "flops", "outputs", "left", "right", "nbytes", *_MEMORY),
    "convolution.forward_grouped": (
        "launch",
        "flops",
        "blocked_flops",
        "outputs",
        "left",
        "nbytes",
        *_MEMORY,
    ),
    "convolution.backward_grouped": (
        "launch",
        "flops",
        "blocked_flops",
        "outputs",
        "left",
        "nbytes",
        *_MEMORY,
    ),
    "convolution.forward_depthwise": _DEPTHWISE,
    "convolution.backward_depthwise": _DEPTHWISE,
    "convolution.forward_last_depthwise": _DEPTHWISE,
    "convolution.backward_last_depthwise": _DEPTHWISE,
    "gemm.complex": _COMPLEX,
    "bmm.complex": _COMPLEX,
    "gemm.recurrent.nt": ("launch", "rows", "flops", "outputs", "right", *_MEMORY),
    "gemm.recurrent_backward.nt": ("launch", "rows", "flops", "outputs", "right", *_MEMORY),
    "pooling": ("launch", "rows", "elements", "windows", "nbytes", *_MEMORY),
    "fourier": ("launch", "flops", *_MEMORY),
    # numbers of a row, of a matrix, and what the third power of the side takes
    "factorization": ("launch", "outputs", "right", "flops", *_MEMORY),
    "attention": ("launch", "products", "product_rows", "flops", "left", *_MEMORY),
    "elementwise": ("launch", "nbytes", *_MEMORY),
    # these have rows where a tensor is broadcast
    "elementwise.add": ("launch", "rows", "nbytes", *_MEMORY),
    "elementwise.div": ("launch", "rows", "nbytes", *_MEMORY),
    "elementwise.mul": ("launch", "rows", "nbytes", *_MEMORY),
    "elementwise.sub": ("launch", "rows", "nbytes", *_MEMORY),
    "rowwise": ("launch", "rows", "columns", "nbytes", *_MEMORY),
    "copy": ("launch", "rows", "elements", "nbytes", *_MEMORY),
    "copy.scatter_add.coalesce": ("launch", "rows", "sorted_rows", "elements", *_MEMORY),
    "embedding_forward": ("launch", "bags", "lookups", "row_bytes", "page_walks", *_MEMORY),
    "embedding_forward._embedding_bag.mean": ("launch", "bags", "lookups", "row_bytes", *_MEMORY),
    "embedding_forward._embedding_bag.weighted": (
        "launch",
        "bags",
        "lookups",
        "row_bytes",
        *_MEMORY,
    ),
    "embedding_forward._embedding_bag.max": (
        "launch",
        "lookups",
        "row_bytes",
        "bag_numbers",
        "bag_maxima",
        *_MEMORY,
    ),
    "embedding_backward.dense.mean": (
        "launch",
        "lookups",
        "sorted_lookups",
        "row_bytes",
        "nbytes",
        *_MEMORY,
    ),
    "embedding_backward.dense.weighted": (
        "launch",
        "lookups",
        "sorted_lookups",
        "row_bytes",
        "nbytes",
        *_MEMORY,
    ),
    "embedding_backward.dense.max": ("launch", "bag_numbers", "nbytes", *_MEMORY),
    "embedding_update": ("launch", "lookups", "row_bytes", "page_walks", *_MEMORY),
    "embedding_backward.sparse": ("launch", "bags", "lookups", "nbytes", *_MEMORY),
    "embedding_backward.dense": (
        "launch",
        "lookups",
        "sorted_lookups",
        "rows",
        "row_bytes",
        "unique_bytes",
        "page_walks",
        "nbytes",
        *_MEMORY,
    ),
    "embedding_backward.dense_rows": (
        "launch",
        "lookups",
        "row_bytes",
        "page_walks",
        "nbytes",
        *_MEMORY,
    ),
    "transfer": ("launch", "nbytes"),
}


def term_names(kind: str, variant: str) -> tuple[str, ...]:
    """Names of the terms of an operation class.

    Parameters
    ----------
    kind : str
        Operation class.
    variant : str
        Finer class.

    Returns
    -------
    names : tuple of str
        Keys of `TERMS`.
    """
    stem = variant.partition(".")[0]
    for name in (f"{kind}.{variant}", f"{kind}.{stem}"):
        if name in KERNEL_TERMS:
            return KERNEL_TERMS[name]
    return KERNEL_TERMS[kind]


@lru_cache
def list_terms(kind: str) -> list[str]:
    """Names of the terms of all variants of an operation class; none for an unknown class.

    Parameters
    ----------
    kind : str
        Operation class.

    Returns
    -------
    names : list of str
        Keys of `TERMS`.
    """
    found = dict[str, None]()
    for key, names in KERNEL_TERMS.items():
        if key.split(".")[0] == kind:
            found |= dict.fromkeys(names)
    return [*found]


@closed_form()
def additive(sizes: _Sizes, **parameters: float) -> Array:
    r"""Time of kernels whose costs add up.

    Parameters
    ----------
    sizes : mapping of str to array
        Sizes of the operations by name; which ones are needed depends on the terms.
    **parameters : float
        Time of one unit of each term, by names of `TERMS` [s].

    Returns
    -------
    time : array
        Time of each operation [s].

    Notes
    -----
    .. math:: t = \sum_i c_i \, x_i

    with all :math:`c_i \ge 0`, so that more work never takes less time. Accuracy: docs/formulas.md,
    table 2.2.

    Examples
    --------
    >>> float(additive({"nbytes": 8e6}, launch=2e-6, nbytes=1e-11))
    8.2e-05
    """
    total: Array = np.asarray(0.0)
    for name in parameters:
        check_choice("a term", name, TERMS)
    for name, cost in parameters.items():
        try:
            units = TERMS[name](sizes)
        except KeyError as error:
            raise ValueError(f"sizes has no {error}; the term {name} needs it") from error
        total = total + cost * np.asarray(units, dtype=float)
    return total


@closed_form()
def in_context(
    sizes: _Sizes,
    *,
    scale: float = 1.0,
    cold_scale: float = 1.0,
    launch: float = 0.0,
    page_walks: float = 0.0,
) -> Array:
    r"""Time of kernels inside a training iteration.

    Parameters
    ----------
    sizes : mapping of str to array
        ``hot`` and ``cold``: time of the kernel with operands in cache, and the time that distant
        operands add [s]; ``page_walks``: lookups that need a page walk [-].
    scale, cold_scale : float
        Factors on the two [-].
    launch : float
        Extra time of a call, compared with a loop over the same call [s].
    page_walks : float
        Time of one page walk [s].

    Returns
    -------
    time : array
        Time of each operation [s].

    Notes
    -----
    .. math:: t = s \, t_\text{hot} + c \, t_\text{cold} + t_0 + d \, w

    A loop over one call keeps its code, branch history and page table entries in caches; an
    iteration does not.

    Examples
    --------
    >>> float(in_context({"hot": 1e-3, "cold": 2e-4, "page_walks": 0.0}, scale=1.1, launch=1e-6))
    0.001301
    """
    for name in ("hot", "cold", "page_walks"):
        if name not in sizes:
            raise ValueError(f"sizes has no {name!r}; it must have hot, cold and page_walks")
    rows: Array = np.asarray(sizes["page_walks"], dtype=float)
    return np.asarray(
        scale * sizes["hot"] + cold_scale * sizes["cold"] + launch + page_walks * rows
    )


@closed_form()
def at_usual_pace(
    seconds: Values,
    references: Values,
    *,
    product: float,
    stream: float,
    gather: float,
    product_weight: float,
    stream_weight: float,
    gather_weight: float,
) -> Array:
    r"""Convert measured times to the usual pace of the machine.

    Parameters
    ----------
    seconds : float or array, shape (n,)
        Measured times [s].
    references : array, shape (3,) or (n, 3)
        Times of the three references beside each of them [s].
    product, stream, gather : float
        Usual times of the references [s].
    product_weight, stream_weight, gather_weight : float
        Growth of a time, in per cent, when a reference takes one per cent longer [-].

    Returns
    -------
    seconds : array, shape (n,)
        Times at the usual pace [s].

    Notes
    -----
    .. math:: t' = t \prod_i (r_i / \bar r_i)^{-w_i}

    On a quiet cloud machine of two cores, medians of 2-s windows of one product, stream or gather
    vary by 10 to 19 %, and their logarithms correlate at 0.77 to 0.92: most of the drift is common
    to all work.

    Examples
    --------
    >>> usual = {"product": 1e-3, "stream": 1e-3, "gather": 1e-3}
    >>> weights = {"product_weight": 0.5, "stream_weight": 0.5, "gather_weight": 0.0}
    >>> round(float(at_usual_pace(2.2, [1.1e-3, 1.1e-3, 2e-3], **usual, **weights)), 6)
    2.0
    """
    weights = np.array([product_weight, stream_weight, gather_weight])
    slower = np.log(np.asarray(references, dtype=float)) - np.log([product, stream, gather])
    return np.asarray(np.asarray(seconds, dtype=float) * np.exp(-slower @ weights))


@closed_form(other=("tensors",))
def reuse_distances(tensors: npt.ArrayLike, nbytes: npt.ArrayLike) -> Array:
    """Distinct bytes touched since each tensor was last touched, in an endlessly repeated sequence.

    Parameters
    ----------
    tensors : array of int, shape (n,)
        Which tensor each access touches, in program order [-].
    nbytes : array, shape (n,)
        Bytes of each access; a tensor counts with its largest [B].

    Returns
    -------
    distances : array, shape (n,)
        LRU stack distance of each access: the bytes of every tensor touched since, the tensor
        itself included [B].

    Notes
    -----
    The sequence repeats, so every access has a predecessor. Exact while the bytes of two rounds
    stay below 2**53. A running sum adds the accesses since the last use. Those whose own last use
    lies inside the window are subtracted again: a dominance sum, computed bit by bit in O(n log n)
    array steps.

    References
    ----------
    .. [1] R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage
       hierarchies", IBM Systems Journal 9(2), 1970. doi:10.1147/sj.92.0078

    Examples
    --------
    >>> reuse_distances([0, 1, 0, 2], [10, 5, 10, 1]).tolist()
    [11.0, 16.0, 15.0, 16.0]
    """
    tensor, last, turns = _find_uses(np.asarray(tensors, dtype=np.int64).tobytes())
    sizes, n = np.zeros(int(tensor.max(initial=-1)) + 1), len(tensor) // 2
    np.maximum.at(sizes, tensor[:n], np.asarray(nbytes, dtype=float))
    weight = sizes[tensor]
    touched, twice = np.cumsum(weight), np.zeros(2 * n)
    for order, high, low, start in turns:
        summed = np.concatenate([[0.0], np.cumsum(weight[order] * high)])
        twice[order[low]] += summed[low] - summed[start]
    return np.asarray((touched - touched[last] - twice)[n:])


@lru_cache(maxsize=4)
def _find_uses(accesses: bytes) -> tuple[Any, Any, list[tuple[Any, ...]]]:
    """Tensors of two rounds by number and where each was last used; and what adds up the weights of
    earlier uses whose own last use is later: by the highest bit in which two ranks differ, in which
    the lower one has a 0.

    For each bit elements in order, which of them have a 1, places of the others, and where the
    group of each begins.
    """
    tensor = np.tile(np.unique(np.frombuffer(accesses, dtype=np.int64), return_inverse=True)[1], 2)
    n, order = len(tensor), np.argsort(tensor, kind="stable")
    last = np.full(n, -1)
    again = tensor[order[1:]] == tensor[order[:-1]]
    last[order[1:][again]] = order[:-1][again]
    rank, turns = np.empty(n, dtype=np.int64), []
    rank[np.argsort(last, kind="stable")] = np.arange(n)  # ties in order
    # short ones sort by radix
    group, order = np.zeros(n, dtype=np.int16 if n < 2**15 else np.int64), np.arange(n)
    for bit in range(int(n - 1).bit_length() - 1, -1, -1):
        high = ((rank[order] >> bit) & 1).astype(group.dtype)
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        low = np.flatnonzero(high == 0)
        turns.append((order, high, low, np.repeat(starts, np.diff(starts, append=n))[low]))
        group = group * 2 + high
        shuffle = np.argsort(group, kind="stable")
        order, group = order[shuffle], group[shuffle]
    return tensor, last, turns
