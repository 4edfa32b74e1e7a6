"""Cache misses of embedding lookups and page walks, and of an operand by the bytes since its last
use."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Array, Values, check_positive
from perfkit.models.distributions import (
    Buckets,
    Distribution,
    distinct_rows,
    join_buckets,
)
from perfkit.models.distributions import Uniform as Uniform

#: Bytes of a page of memory [B].
PAGE = 4096.0


class _Covered(NamedTuple):
    """What touched rows take in a cache.

    Parameters
    ----------
    amount, growth : array
        Bytes or pages, and their growth per iteration.
    """

    amount: Array
    growth: Array


#: Takes the touched rows of each table and their growth; returns what they take in a cache.
_Cover = Callable[[Array, Array], _Covered]


class _Gap(NamedTuple):
    """Logarithm of a ratio, and its slope over the logarithm of time [-]."""

    value: Array
    slope: Array


def _find_root(find_gap: Callable[[Array], _Gap], start: Array, low: Array, high: Array) -> Array:
    """Where a gap that grows is zero between two bounds: Newton's method, and bisection where it
    leaves the bracket."""
    found = start
    for _ in range(100):
        gap = find_gap(found)
        low = np.where(gap.value < 0, found, low)
        high = np.where(gap.value > 0, found, high)
        new = found - gap.value / gap.slope
        new = np.where((new >= low) & (new <= high), new, (low + high) / 2)
        new = np.where(gap.value == 0, found, new)  # also where the gap does not grow any more
        step = new - found
        found = new
        if not np.any(abs(step) >= 1e-9):
            break
    return found


class _Tables:
    """Lookups into several tables that may share caches: how many rows are touched over time."""

    def __init__(
        self,
        distributions: Sequence[Distribution] | Buckets,
        lookups: npt.ArrayLike,
        groups: npt.ArrayLike | None = None,
    ) -> None:
        buckets = join_buckets(distributions)
        self.buckets = buckets
        rates = buckets.rates * np.repeat(np.asarray(lookups, dtype=float), buckets.sizes)
        # a table without lookups takes no room
        self.rows = np.where(rates > 1e-280, buckets.rows, 0.0)
        self.rates = np.maximum(rates, 1e-280)
        numbers = np.zeros(len(buckets.sizes), dtype=int) if groups is None else np.asarray(groups)
        # first table of each group
        self.first = np.searchsorted(numbers, np.arange(numbers[-1] + 1))
        self.cuts = buckets.starts[self.first]  # and its first bucket

    def decay(self, times: Array) -> Array:
        """Logarithm of the share of each bucket's rows that are not touched during the time of its
        group."""
        if len(self.cuts) > 1:
            times = np.repeat(times, np.diff(self.cuts, append=len(self.rates)), axis=-1)
        return -self.rates * times

    def touch(self, times: Array) -> tuple[Array, Array]:
        """Distinct rows of each table that are touched during the time of its group, and their
        growth per time."""
        found = -self.rows * np.expm1(self.decay(times))
        return self.buckets.add_up(found), self.buckets.add_up(self.rates * (self.rows - found))

    def missed(self, times: Array) -> Array:
        """Share of each table's lookups whose row was not touched during the time of its group."""
        return self.buckets.add_up(self.buckets.shares * np.exp(self.decay(times)))

    def fill(self, cover: _Cover, capacities: npt.ArrayLike, dense: npt.ArrayLike) -> Array:
        """Time until the rows of each group and its dense data fill a cache; infinite if everything
        fits [iterations].

        Parameters
        ----------
        cover : callable
            What touched rows take in the cache.
        capacities : array, shape (...)
            Sizes of caches [B], or pages of one.
        dense : array, shape (groups,)
            What other data takes of them, the same in every iteration: it grows during the first
            alone.
        """
        capacities = np.asarray(capacities, dtype=float)[..., None]
        dense = np.asarray(dense, dtype=float)
        rows = self.buckets.add_up(self.rows)
        rates = self.buckets.add_up(self.rows * self.rates)
        most = self._add_groups(cover, rows, rates).amount
        fastest = self._add_groups(cover, 0.0 * rows, rates).growth
        fits = capacities >= (most + dense) * (1 - 1e-13)
        is_empty = capacities <= 0
        if np.all(fits):
            return np.full(fits.shape, np.inf)
        in_one = self._add_groups(cover, *self.touch(np.ones(fits.shape))).amount
        # where nothing is to be solved, the goal is reached after one iteration
        goal = np.where(fits | is_empty, in_one + dense, capacities)
        is_early = in_one + dense >= goal
        once, each_time = np.where(is_early, 0.0, dense), np.where(is_early, dense, 0.0)
        latest = 40.0 / np.minimum.reduceat(np.minimum(self.rates, 1.0), self.cuts)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            soonest = np.log(goal / (fastest + dense)) - 1e-6  # it never fills faster than at first
            low = np.where(is_early, soonest, 0.0)
            high = np.where(is_early, 0.0, np.log(latest))
            # as if all rows were alike
            guess = np.log(-np.log1p((once - goal) / most) * most / (fastest + each_time))
            is_inside = (guess > low) & (guess < high) & (goal == capacities)
            logs = np.where(is_inside, guess, 0.0)

            def find_gap(logs: Array) -> _Gap:
                """How far the cache is from the goal after some time."""
                times = np.exp(logs)
                amount, growth = self._add_groups(cover, *self.touch(times))
                total = amount + once + each_time * times
                relative_growth = (growth + each_time) * times / total
                return _Gap(np.log(total / goal), relative_growth)

            logs = _find_root(find_gap, logs, low, high)
        filled = np.where(is_empty, 0.0, np.exp(logs))
        return np.where(fits, np.inf, filled)

    def _add_groups(self, cover: _Cover, rows: Array, growth: Array) -> _Covered:
        """What the touched rows of each group take in the cache."""
        covered = cover(rows, growth)
        return _Covered(
            np.add.reduceat(covered.amount, self.first, axis=-1),
            np.add.reduceat(covered.growth, self.first, axis=-1),
        )


@closed_form(other=("groups",))
def lru_misses(
    distributions: Sequence[Distribution] | Buckets,
    lookups: npt.ArrayLike,
    row_bytes: npt.ArrayLike,
    *,
    capacity: npt.ArrayLike,
    dense_bytes: npt.ArrayLike = 0.0,
    groups: npt.ArrayLike | None = None,
    cold: bool = False,
) -> Array:
    r"""Share of the lookups that miss, in steady state, when tables share one LRU cache with the
    rest of the iteration.

    Parameters
    ----------
    distributions : sequence of Uniform, Zipf or ReuseHistogram, length n
        Which rows of each table are looked up.
    lookups : array, shape (n,)
        Lookups of one iteration into each table [-].
    row_bytes : array, shape (n,)
        Bytes a row of each table takes in the cache [B].
    capacity : float or array, shape (...)
        Size of the cache, or of several [B].
    dense_bytes : float or array, shape (groups,), optional
        Distinct other bytes one iteration touches: activations, weights, gradients [B].
    groups : array of int, shape (n,), optional
        Which tables share a cache, in ascending order; by default all share one [-].
    cold : bool, optional
        Whether the cache is empty at the start of each iteration, see `cold_misses`.

    Returns
    -------
    misses : array, shape (..., n)
        Share of each table's lookups that come from beyond the cache, 0 where everything fits [-].

    Notes
    -----
    The characteristic time T, in iterations, after which an untouched row has been pushed out
    (Che's approximation):

    .. math:: \sum_i b_i \sum_r \left(1 - (1-p_{ir})^{N_i T}\right) + \min(T, 1)\, D = C, \qquad
              m_i = \sum_r p_{ir} (1-p_{ir})^{N_i T}

    Dense data is the same in every iteration, so it stops growing after one. Lookups of all tables
    count as interleaved. If they come table after table and the cache holds less than one
    iteration's data, reuse inside a table makes the true misses fewer. Within 0.01 of the misses of
    a simulated LRU. A smaller cache never misses less.

    References
    ----------
    .. [1] H. Che, Y. Tung, Z. Wang, "Hierarchical web caching systems: modeling, design and
       experimental results", IEEE JSAC 20(7), 2002. doi:10.1109/JSAC.2002.801752

    Examples
    --------
    >>> lru_misses([Uniform(1000)], [500], [64], capacity=32000).tolist()
    [0.5]
    """
    tables = _Tables(distributions, lookups, groups)
    nbytes = np.asarray(row_bytes, dtype=float)

    def cover(rows: Array, growth: Array) -> _Covered:
        """Bytes of touched rows."""
        return _Covered(rows * nbytes, growth * nbytes)

    times = tables.fill(cover, capacity, dense_bytes)
    if not cold:
        return tables.missed(times)
    lookups = np.asarray(lookups, dtype=float)
    members = np.diff(tables.first, append=len(tables.buckets.sizes))
    while_filling = np.repeat(np.minimum(times, 1.0), members, axis=-1)
    first_misses = distinct_rows(distributions, lookups * while_filling) / lookups
    return first_misses + (1 - while_filling) * tables.missed(times)


@closed_form(other=("groups",))
def page_walks(
    distributions: Sequence[Distribution] | Buckets,
    lookups: npt.ArrayLike,
    row_bytes: npt.ArrayLike,
    *,
    entries: float,
    dense_bytes: npt.ArrayLike = 0.0,
    groups: npt.ArrayLike | None = None,
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
    dense_bytes : float or array, shape (groups,), optional
        Distinct other bytes one iteration touches [B].
    groups : array of int, shape (n,), optional
        Which tables share the buffer, in ascending order; by default all share one [-].

    Returns
    -------
    walks : array, shape (n,)
        Share of each table's lookups that need a page walk [-].

    Notes
    -----
    Popular rows are scattered over the table, so U distinct rows touch :math:`P(1-e^{-U/P})` of its
    P pages. As in `lru_misses`, T iterations fill the buffer. A lookup walks if neither its row nor
    another row of its page was touched in that time. On a virtual machine with nested page tables a
    walk costs 100-200 ns, more than the row itself.

    Examples
    --------
    >>> page_walks([Uniform(1000)], [500], [64], entries=2000).tolist()
    [0.0]
    """
    if entries == math.inf:
        return np.zeros(np.shape(lookups))
    tables = _Tables(distributions, lookups, groups)
    nbytes = tables.buckets.add_up(tables.buckets.rows) * np.asarray(row_bytes, dtype=float)
    pages = np.maximum(nbytes / PAGE, 1.0)

    def cover(rows: Array, growth: Array) -> _Covered:
        """Pages of touched rows."""
        return _Covered(cover_pages(rows, nbytes), growth * np.exp(-rows / pages))

    times = tables.fill(cover, entries, np.asarray(dense_bytes) / PAGE)
    return tables.missed(times) * np.exp(-tables.touch(times)[0] / pages)


@closed_form()
def cover_pages(rows: Values, nbytes: Values) -> Array:
    r"""Pages of a table that some of its rows touch, if these rows are scattered over it.

    Parameters
    ----------
    rows : float or array
        Distinct rows U [-].
    nbytes : float or array
        Size of the table, of P pages or at least one [B].

    Returns
    -------
    pages : array
        :math:`P(1-e^{-U/P})` [-].

    Examples
    --------
    >>> round(float(cover_pages(10, 100 * PAGE)), 2)
    9.52
    """
    pages = np.maximum(nbytes / PAGE, 1.0)
    return np.asarray(-pages * np.expm1(-rows / pages))


@closed_form()
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
    rows_cached = check_positive("rows_cached", rows_cached, zero=True, maximum=math.inf)
    return 1.0 - float(lru_misses([distribution], [1.0], [1.0], capacity=rows_cached)[0])


@closed_form()
def cold_misses(
    distribution: Distribution, lookups: float | npt.ArrayLike, rows_cached: float
) -> Array:
    """Misses of a number of lookups that start with an empty LRU cache.

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
        Expected misses: every distinct row until the cache is full after T lookups, then the steady
        rate [-].

    Notes
    -----
    U(N) while N <= T, then C + (N - T) (1 - hit). Adding U on top would count the filling twice.
    Within 1 % of a simulated LRU.

    Examples
    --------
    >>> cold_misses(Uniform(1000), [1, 1e5], 500).round().tolist()
    [1.0, 50154.0]
    """
    counts = np.asarray(lookups, dtype=float)
    some = counts[counts > 0]
    each_alone = np.arange(len(some))
    shares = lru_misses(
        [distribution] * len(some),
        some,
        np.ones(len(some)),
        capacity=rows_cached,
        groups=each_alone,
        cold=True,
    )
    misses = np.zeros(counts.shape)
    misses[counts > 0] = some * shares
    return misses


@closed_form()
def miss_share(distance: Values, *, capacity: float, sharpness: float = 4.0) -> Values:
    r"""Share of an operand that comes from beyond a cache, by the bytes touched since its last use.

    Parameters
    ----------
    distance : float, array or expression
        Distinct bytes touched since the last use, the operand included; see
        `kernels.reuse_distances` [B].
    capacity : float
        Size of the cache, infinite where nothing is ever evicted [B].
    sharpness : float, optional
        How sudden the transition is; it is no step, as real caches are shared and not fully
        associative [-].

    Returns
    -------
    share : same kind as `distance`
        0 for an operand just used, one half where the distance is the capacity, 1 far beyond [-].

    Notes
    -----
    .. math:: m(d) = \frac{1}{1 + (C/d)^q}

    Examples
    --------
    >>> [round(float(miss_share(d * 1e6, capacity=1e6)), 3) for d in (0, 0.5, 1, 2, 1000)]
    [0.0, 0.059, 0.5, 0.941, 1.0]
    """
    if capacity == math.inf:
        return 0.0 * distance
    most = np.maximum(distance, capacity)
    far, near = ((size / most * (size / most)) ** (sharpness / 2) for size in (distance, capacity))
    return far / (far + near)


@closed_form()
def rotating_misses(
    fresh: Values, oldest: Values, distance: Values, *, capacity: float, sharpness: float = 4.0
) -> Values:
    r"""Share of the lookups that miss when a few batches of indices rotate instead of fresh draws.

    Parameters
    ----------
    fresh : float or array
        Share that misses with fresh draws, see `lru_misses` and `page_walks` [-].
    oldest : float or array
        Share of the lookups whose row or page no other batch of the round touches [-].
    distance : float or array
        Bytes or pages that a whole round touches, in the unit of `capacity` [-].
    capacity : float
        Bytes or pages that are held [-].
    sharpness : float, optional
        How sudden the transition is, see `miss_share` [-].

    Returns
    -------
    misses : same kind as the shares
        Never more than `fresh` where the round fits [-].

    Notes
    -----
    .. math:: m = \max(m_f - s, 0) + s \, m(d), \qquad s = \frac{U(k n) - U((k - 1) n)}{n}

    with :math:`m(d)` of `miss_share`, and U(n) distinct rows (or pages) of the n lookups of each of
    k batches. Rows that several batches touch hit or miss as with fresh draws. The others hit one
    round later, if the cache holds the whole round. Within 0.02 of the misses of a simulated LRU.

    Examples
    --------
    >>> [round(float(rotating_misses(0.9, 0.8, size, capacity=1e6)), 3) for size in (1e4, 1e6, 1e8)]
    [0.1, 0.5, 0.9]
    """
    above = fresh - oldest
    return (above + abs(above)) / 2 + oldest * miss_share(
        distance, capacity=capacity, sharpness=sharpness
    )
