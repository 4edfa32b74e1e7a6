"""What share of the looked-up rows, pages and tensors a cache still holds."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from perfkit.models.distributions import (
    ALMOST_ONE,
    Distribution,
    Index,
    ReuseHistogram,
    Uniform,
    Zipf,
    unique_rows,
)
from perfkit.models.roofline import smooth_maximum
from perfkit.models.roots import find_root
from perfkit.units import Array, Values

__all__ = [
    "Distribution",
    "ReuseHistogram",
    "Uniform",
    "Zipf",
    "cold_misses",
    "lru_hit_rate",
    "lru_misses",
    "miss_share",
    "page_walks",
    "reuse_distances",
    "rotating_misses",
    "unique_rows",
]


@lru_cache(maxsize=512)
def _shared(distributions: tuple[Distribution, ...]) -> tuple[Array, Array, Array, Index, Index]:
    """Buckets of all tables end to end: decay rate, rows, share of lookups, table of each, start of each table."""
    pairs = [distribution.buckets() for distribution in distributions]
    sizes = np.array([len(rows) for _, rows in pairs])
    probabilities, rows = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    rates = -np.log1p(-np.minimum(probabilities, ALMOST_ONE))
    return rates, rows, probabilities * rows, np.repeat(np.arange(len(pairs)), sizes), np.cumsum(sizes) - sizes


def _find_time(touched: Callable[[float], float], rates: Array, capacity: float) -> float:
    """Time after which as much was touched as fits, infinite where everything fits; found in its logarithm."""
    soon = 1e-15 / max(float(rates.max()), 1.0)
    late = max(1.0, 40.0 / float(rates.min(initial=1.0, where=rates > 1e-280)))  # next to nothing is left
    if capacity >= touched(late) * (1 - 1e-13):
        return math.inf
    if capacity <= 0:
        return 0.0
    low = math.log(capacity * (soon / touched(soon)))  # it never fills faster than at the start
    return math.exp(find_root(lambda log: math.log(touched(math.exp(log)) / capacity), low, math.log(late)))


def _characteristic_time(rates: Array, nbytes: Array, dense: float, capacity: float) -> float:
    """Time T after which a row leaves the cache: sum of nbytes (1 - exp(-rates T)) + min(T, 1) dense = capacity."""
    return _find_time(lambda time: dense * min(time, 1.0) - float(nbytes @ np.expm1(-time * rates)), rates, capacity)


def lru_misses(
    distributions: Sequence[Distribution],
    lookups: npt.ArrayLike,
    row_bytes: npt.ArrayLike,
    *,
    capacity: float,
    dense_bytes: float = 0.0,
) -> Array:
    r"""Share of the lookups that miss, in steady state, when tables share one LRU cache with the rest of the iteration.

    Parameters
    ----------
    distributions : sequence of Uniform, Zipf or ReuseHistogram, length n
        Which rows of each table are looked up.
    lookups : array, shape (n,)
        Lookups of one iteration into each table [-].
    row_bytes : array, shape (n,)
        Bytes a row of each table takes in the cache [B].
    capacity : float
        Size of the cache [B].
    dense_bytes : float, optional
        Distinct other bytes one iteration touches: activations, weights, gradients [B].

    Returns
    -------
    misses : array, shape (n,)
        Share of each table's lookups that come from beyond the cache, 0 where everything fits [-].

    Notes
    -----
    The characteristic time T, in iterations, after which an untouched row has been pushed out (Che's approximation):

    .. math:: \sum_i b_i \sum_r \left(1 - (1-p_{ir})^{N_i T}\right) + \min(T, 1)\, D = C, \qquad
              m_i = \sum_r p_{ir} (1-p_{ir})^{N_i T}

    Dense data is the same in every iteration, so it stops growing after one. Lookups of all tables are taken as
    interleaved; where they come table after table and the cache holds less than one iteration's data, short-lived
    reuse inside one table makes the true misses of that table fewer. Within 0.01 of the misses of a simulated LRU. A
    smaller cache never misses less.

    References
    ----------
    .. [1] H. Che, Y. Tung, Z. Wang, "Hierarchical web caching systems: modeling, design and experimental results",
       IEEE JSAC 20(7), 2002. doi:10.1109/JSAC.2002.801752

    Examples
    --------
    >>> lru_misses([Uniform(1000)], [500], [64], capacity=32000).tolist()
    [0.5]
    """
    rates, rows, shares, table, starts = _shared(tuple(distributions))
    lookups, row_bytes = np.asarray(lookups, dtype=float), np.asarray(row_bytes, dtype=float)
    rates = rates * lookups[table]
    time = _characteristic_time(rates, rows * row_bytes[table], float(dense_bytes), float(capacity))
    if time == math.inf:
        return np.zeros(len(starts))
    return np.asarray(np.add.reduceat(shares * np.exp(-time * rates), starts))


def page_walks(
    distributions: Sequence[Distribution],
    lookups: npt.ArrayLike,
    row_bytes: npt.ArrayLike,
    *,
    entries: float,
    dense_bytes: float = 0.0,
    page: float = 4096.0,
) -> Array:
    r"""Share of the lookups whose page address is not in the translation buffer, in steady state.

    Parameters
    ----------
    distributions : sequence of Uniform, Zipf or ReuseHistogram, length n
        Which rows of each table are looked up.
    lookups : array, shape (n,)
        Lookups of one iteration into each table [-].
    row_bytes : array, shape (n,)
        Bytes of a row of each table [B].
    entries : float
        Pages that the translation buffer effectively holds [-].
    dense_bytes : float, optional
        Distinct other bytes one iteration touches [B].
    page : float, optional
        Bytes of a page [B].

    Returns
    -------
    walks : array, shape (n,)
        Share of each table's lookups that need a page walk [-].

    Notes
    -----
    Popular rows lie scattered over the table, so U distinct rows touch :math:`P(1-e^{-U/P})` of its P pages. As in
    `lru_misses`, T iterations fill the buffer; a lookup walks if its row was not touched for so long and its page by no
    other row either. On a virtual machine with nested page tables a walk costs 100-200 ns, more than the row itself.

    Examples
    --------
    >>> page_walks([Uniform(1000)], [500], [64], entries=2000).tolist()
    [0.0]
    """
    rates, rows, shares, table, starts = _shared(tuple(distributions))
    lookups, row_bytes = np.asarray(lookups, dtype=float), np.asarray(row_bytes, dtype=float)
    rates = rates * lookups[table]
    pages = np.maximum(np.add.reduceat(rows, starts) * row_bytes / page, 1.0)
    dense = dense_bytes / page

    def cover(time: float) -> Array:
        """Share of each table's pages that were touched."""
        return np.asarray(-np.expm1(np.add.reduceat(rows * np.expm1(-time * rates), starts) / pages))

    time = _find_time(lambda time: float(pages @ cover(time)) + min(time, 1.0) * dense, rates, entries)
    if time == math.inf:
        return np.zeros(len(starts))
    return np.asarray(np.add.reduceat(shares * np.exp(-time * rates), starts) * (1 - cover(time)))


def lru_hit_rate(distribution: Distribution, rows_cached: float) -> float:
    """Share of lookups that an LRU cache of some rows serves in steady state.

    Parameters
    ----------
    distribution : Uniform, Zipf or ReuseHistogram
        Which rows are looked up.
    rows_cached : float
        Rows that fit into the cache [-].

    Returns
    -------
    hits : float
        Hit rate [-].

    Notes
    -----
    Che's approximation, see `lru_misses`.

    Examples
    --------
    >>> round(lru_hit_rate(Uniform(1000), 250), 3)
    0.25
    """
    return 1.0 - float(lru_misses([distribution], [1.0], [1.0], capacity=rows_cached)[0])


def cold_misses(distribution: Distribution, lookups: float | npt.ArrayLike, rows_cached: float) -> Array:
    """Misses of a number of lookups that find the LRU cache empty.

    Parameters
    ----------
    distribution : Uniform, Zipf or ReuseHistogram
        Which rows are looked up.
    lookups : float or array
        Lookups N [-].
    rows_cached : float
        Rows C that fit into the cache [-].

    Returns
    -------
    misses : array, shape of `lookups`
        Expected misses: every distinct row until the cache is full after T lookups, then the steady rate [-].

    Notes
    -----
    U(N) while N <= T, then C + (N - T) (1 - hit). Adding U on top would count the filling twice. Within 1 % of a
    simulated LRU.

    Examples
    --------
    >>> cold_misses(Uniform(1000), [1, 1e5], 500).round().tolist()
    [1.0, 50154.0]
    """
    lookups = np.asarray(lookups, dtype=float)
    rates, rows, shares, _, _ = _shared((distribution,))
    time = _characteristic_time(rates, rows, 0.0, float(rows_cached))
    if time == math.inf:
        return unique_rows(distribution, lookups)
    filling = unique_rows(distribution, np.minimum(lookups, time))
    return filling + np.maximum(lookups - time, 0.0) * float(shares @ np.exp(-time * rates))


def miss_share(distance: Values, *, capacity: float, sharpness: float = 4.0) -> Values:
    r"""Share of an operand that has to come from beyond a cache, by the bytes touched since its last use.

    Parameters
    ----------
    distance : float, array or expression
        Distinct bytes touched since the last use, the operand included; see `reuse_distances` [B].
    capacity : float
        Size of the cache, infinite where nothing is ever evicted [B].
    sharpness : float, optional
        How sudden the transition is; real caches are shared and not fully associative, so it is not a step [-].

    Returns
    -------
    share : same kind as `distance`
        0 for an operand just used, one half where the distance is the capacity, 1 far beyond [-].

    Notes
    -----
    .. math:: m(d) = \frac{1}{1 + (C/d)^q}

    Evaluated relative to the larger of both, so that no power overflows.

    Examples
    --------
    >>> [round(float(miss_share(d * 1e6, capacity=1e6)), 3) for d in (0, 0.5, 1, 2, 1000)]
    [0.0, 0.059, 0.5, 0.941, 1.0]
    """
    if capacity == math.inf:
        return 0.0 * distance
    return (distance / smooth_maximum(distance, capacity, sharpness=sharpness)) ** sharpness


def rotating_misses(
    fresh: Values, oldest: Values, distance: Values, *, capacity: float, sharpness: float = 4.0
) -> Values:
    r"""Share of the lookups that miss when a few batches of indices take turns, instead of fresh ones being drawn.

    Parameters
    ----------
    fresh : float or array
        Share that misses with fresh draws, see `lru_misses` and `page_walks` [-].
    oldest : float or array
        Share of the lookups whose row or page no other batch of the round touches [-].
    distance : float or array
        What a whole round touches, in the unit of `capacity`: bytes, or pages [-].
    capacity : float
        Bytes or pages that are held [-].
    sharpness : float, optional
        How sudden the cache is full, see `miss_share` [-].

    Returns
    -------
    misses : same kind as the shares
        Never more than `fresh` where the round fits [-].

    Notes
    -----
    .. math:: m = \max(m_f - s, 0) + s \, m(d), \qquad s = \frac{U(k n) - U((k - 1) n)}{n}

    with :math:`m(d)` of `miss_share`, and U(n) distinct rows (or pages) of the n lookups of each of k batches. What is
    touched again within the round is found, or not, as among fresh draws; what is not is found a round later, if the
    cache holds all that the round touches. Within 0.02 of the misses of a simulated LRU.

    Examples
    --------
    >>> [round(float(rotating_misses(0.9, 0.8, size, capacity=1e6)), 3) for size in (1e4, 1e6, 1e8)]
    [0.1, 0.5, 0.9]
    """
    above = fresh - oldest
    return (above + abs(above)) / 2 + oldest * miss_share(distance, capacity=capacity, sharpness=sharpness)


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
        LRU stack distance of each access: the bytes of every tensor touched since, the tensor itself included [B].

    Notes
    -----
    The sequence is taken as a circle, so that every access has a predecessor. Exact while the bytes of two rounds
    stay below 2**53. Accesses since the last use are counted by a running sum, and those whose own last use also lies
    inside the window are taken off again: a dominance sum, found bit by bit in O(n log n) array steps.

    References
    ----------
    .. [1] R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage hierarchies", IBM
       Systems Journal 9(2), 1970. doi:10.1147/sj.92.0078

    Examples
    --------
    >>> reuse_distances([0, 1, 0, 2], [10, 5, 10, 1]).tolist()
    [11.0, 16.0, 15.0, 16.0]
    """
    names, tensor = np.unique(np.asarray(tensors), return_inverse=True)
    sizes = np.zeros(len(names))
    np.maximum.at(sizes, tensor, np.asarray(nbytes, dtype=float))
    n = len(tensor)
    tensor = np.concatenate([tensor, tensor])
    weight = sizes[tensor]
    order = np.argsort(tensor, kind="stable")
    last = np.full(2 * n, -1)
    again = tensor[order[1:]] == tensor[order[:-1]]
    last[order[1:][again]] = order[:-1][again]
    touched = np.cumsum(weight)
    # Rank of the last use, ties in order, so that "last use is later" becomes "rank is higher".
    rank = np.empty(2 * n, dtype=np.int64)
    rank[np.argsort(last, kind="stable")] = np.arange(2 * n)
    twice = _heavier_before(rank, weight)
    here = np.arange(n, 2 * n)
    return np.asarray(touched[here] - touched[last[here]] - twice[here])


def _heavier_before(rank: Index, weight: Array) -> Array:
    """Sum the weights of earlier elements of higher rank: the highest bit in which such a pair differs is 0 here."""
    result = np.zeros(len(rank))
    group = np.zeros(len(rank), dtype=np.int16 if len(rank) < 2**15 else np.int64)  # short integers sort by radix
    order = np.arange(len(rank))  # elements by the bits seen so far, then by position
    for bit in range(int(len(rank) - 1).bit_length() - 1, -1, -1):
        high = ((rank[order] >> bit) & 1).astype(group.dtype)
        summed = np.cumsum(weight[order] * high)
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        before = np.repeat(np.concatenate([[0.0], summed])[starts], np.diff(starts, append=len(rank)))
        result[order] += np.where(high == 0, summed - before, 0.0)
        group = group * 2 + high
        shuffle = np.argsort(group, kind="stable")
        order, group = order[shuffle], group[shuffle]
    return result
