"""Distributions of embedding lookups over the rows of tables, and the number of distinct rows."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from perfkit.ground.forms import closed_form
from perfkit.ground.records import set_fields
from perfkit.ground.units import (
    Array,
    Values,
    check_positive,
    check_type,
    read_number,
    read_numbers,
    show,
)

Index: TypeAlias = npt.NDArray[np.int64]
ALMOST_ONE = 1 - 2.0**-53  # keeps log(1 - p) finite for a table of one row
_MANY = 1000  # tables from which on their joined buckets are not kept
_EXACT_RANKS = 48  # first ranks that get a bucket of their own
_GROUPS = 128  # buckets of a law
_FINE = 4096  # buckets of a law whose rows are counted


class RowGroups(NamedTuple):
    """Rows of a table in groups of like probability.

    Parameters
    ----------
    mass, rows : array
        Weight of all rows of a group, on any scale, and its rows [-].
    """

    mass: Array
    rows: Array


class RowsByFrequency(NamedTuple):
    """A table in two parts: the rows that are looked up most often, and the others.

    Parameters
    ----------
    share : float
        Share of the lookups that goes to the frequent rows [-].
    frequent, others : Distribution, optional
        Distribution of the lookups of each part; None for a part without rows.
    """

    share: float
    frequent: "Distribution | None"
    others: "Distribution | None"


class Distribution:
    """Which rows of a table are looked up: `Uniform`, `Zipf`, `ReuseHistogram` or a `Part` of one
    of them."""

    rows: int

    def __post_init__(self) -> None:
        set_fields(self, rows=check_positive("rows", self.rows, integer=True))

    def _group_rows(self, n: int) -> RowGroups:
        """Rows in about `n` groups; by default one group of equal rows."""
        return RowGroups(np.ones(1), np.array([float(self.rows)]))

    def buckets(self, n: int = _GROUPS) -> tuple[Array, Array]:
        """Group rows of equal or nearly equal probability.

        Parameters
        ----------
        n : int, optional
            Groups aimed at, for a Zipf law besides its heavy hitters; others have as many as they
            need [-].

        Returns
        -------
        probabilities, multiplicities : arrays
            Mean probability of one row of the bucket, and rows in the bucket; their products add up
            to 1 [-].
        """
        return self._keep_buckets(check_positive("n", n, integer=True, maximum=10**7))

    @lru_cache(maxsize=4096)  # noqa: B019
    def _keep_buckets(self, n: int) -> tuple[Array, Array]:
        """What `buckets` returns, computed once."""
        mass, rows = self._group_rows(n)
        probabilities = mass / mass.sum() / rows
        for array in (probabilities, rows):
            array.setflags(write=False)
        return probabilities, rows

    def resize(self, rows: int) -> "Distribution":
        """The distribution over a random part of the rows.

        Parameters
        ----------
        rows : int
            Rows of the part, at most all [-].
        """
        return self if rows == self.rows else Part(self, rows)

    def split(self, frequent: int) -> RowsByFrequency:
        """Split the rows by how often they are looked up.

        Parameters
        ----------
        frequent : int
            Rows of the first part, the most popular ones; at most all [-].

        Returns
        -------
        parts : RowsByFrequency
            Both parts, and the share of the lookups that goes to the first.

        Raises
        ------
        ValueError
            For more frequent rows than there are.

        Examples
        --------
        >>> round(Zipf(1000, 1.0).split(10).share, 3)
        0.391
        """
        check_positive("frequent", frequent, integer=True, zero=True, maximum=self.rows)
        if frequent == 0:
            return RowsByFrequency(0.0, None, self)
        if frequent == self.rows:
            return RowsByFrequency(1.0, self, None)
        return self._split(int(frequent))

    def _split(self, frequent: int) -> RowsByFrequency:
        """What `split` returns for some rows but not all; by default these are all alike."""
        share = frequent / self.rows
        return RowsByFrequency(share, Uniform(frequent), Uniform(self.rows - frequent))


@dataclass(frozen=True)
class Uniform(Distribution):
    """Every row is looked up equally often.

    Parameters
    ----------
    rows : int
        Rows of the table [-].

    Examples
    --------
    >>> float(unique_rows(Uniform(1000), 1000)) / 1000
    0.632
    """

    rows: int

    def resize(self, rows: int) -> "Uniform":
        """A part of the rows is also uniform."""
        return Uniform(rows)


@dataclass(frozen=True)
class Zipf(Distribution):
    r"""The row of rank r is looked up with probability proportional to ``(r + shift) **
    -exponent``.

    Parameters
    ----------
    rows : int
        Rows of the table [-].
    exponent : float
        How uneven the lookups are: 0 uniform, about 1 typical for click logs [-].
    shift : float, optional
        Flattens the head, or below 0 sharpens it (Zipf-Mandelbrot); above -1 [-].
    heavy_hitters : tuple of float, optional
        Probabilities of the first rows, outside the power law; the other rows share the rest [-].

    Examples
    --------
    >>> round(float(unique_rows(Zipf(1_000_000, 1.05), 65536)))
    21610
    >>> round(float(unique_rows(Zipf(1_000_000, 1.05, heavy_hitters=(0.5, 0.25)), 65536)))
    7761
    """

    rows: int
    exponent: float
    shift: float = 0.0
    heavy_hitters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("exponent", self.exponent, zero=True, maximum=100)
        set_fields(self, exponent=read_number(self.exponent))
        shift = read_number(self.shift)
        if shift is None or not -1 < shift < 2.0**63:
            raise ValueError(f"shift is {show(self.shift)}; it must be a number above -1")
        set_fields(self, shift=shift)
        check_type("heavy_hitters", self.heavy_hitters, Sequence)
        if len(self.heavy_hitters) >= self.rows:
            raise ValueError(
                f"heavy_hitters has {len(self.heavy_hitters)} entries; it must have fewer than the {self.rows} rows"
            )
        numbers = read_numbers(self.heavy_hitters)
        if numbers is None or not np.all((numbers >= 0) & (numbers <= 1)):
            for h in self.heavy_hitters:
                check_positive("heavy_hitters", h, zero=True, maximum=1)
        shares = tuple(map(float, self.heavy_hitters))
        total = sum(shares)
        if total > 1 + 1e-6:  # what single precision leaves of a sum of 1
            raise ValueError(
                f"heavy_hitters add up to {total:g}; they are probabilities of rows: at most 1 in all"
            )
        set_fields(self, heavy_hitters=tuple(h / max(total, 1.0) for h in shares))

    def _group_rows(self, n: int) -> RowGroups:
        hitters = np.asarray(self.heavy_hitters, dtype=float)
        table = np.array([[self.rows]], dtype=float)
        groups = _group_ranks(table, self.exponent, self.shift, len(hitters), n)
        mass, rows = groups.mass[0], groups.rows[0]
        mass *= max(1 - hitters.sum(), 0.0) / mass.sum()
        is_filled = rows > 0
        return RowGroups(
            np.concatenate([hitters, mass[is_filled]]),
            np.concatenate([np.ones(len(hitters)), rows[is_filled]]),
        )

    def _split(self, frequent: int) -> RowsByFrequency:
        """Both parts are Zipf laws: the first ranks, and the others with a shift of that many."""
        hitters = self.heavy_hitters
        share_of_law = max(1 - sum(hitters), 0.0)
        others = self.rows - frequent
        if frequent < len(hitters):
            share = sum(hitters[:frequent])
            rest = max(1 - share, 1e-300)
            kept = tuple(min(hitter / rest, 1.0) for hitter in hitters[frequent:])
            law_of_others = Zipf(others, self.exponent, self.shift + frequent, kept)
        else:
            ranks = np.array([[frequent], [self.rows]], dtype=float)
            groups = _group_ranks(ranks, self.exponent, self.shift, len(hitters), _GROUPS)
            of_frequent, of_all = groups.mass.sum(axis=1)
            share = sum(hitters) + share_of_law * float(of_frequent / of_all)
            law_of_others = Zipf(others, self.exponent, self.shift + frequent)
        first = tuple(min(hitter / share, 1.0) for hitter in hitters[:frequent]) if share else ()
        # the last of them has what the others leave
        law = Zipf(frequent, self.exponent, self.shift, first[: frequent - 1])
        return RowsByFrequency(min(share, 1.0), law, law_of_others)


def _group_ranks(rows: Array, exponent: Values, shift: Values, skipped: int, n: int) -> RowGroups:
    """Groups of the ranks of power laws behind some that are skipped, one law after the other; some
    groups are empty.

    Parameters
    ----------
    rows, exponent, shift : array, shape (laws, 1)
        Rows of each table, exponent and shift of its law [-].
    skipped : int
        First ranks that are left out [-].
    n : int
        Groups of each law: the first ranks alone, then groups that grow by the same factor [-].
    """
    most = min(_EXACT_RANKS, max(1, n // 2))
    steps = max(1, n - most)
    exact = np.minimum(skipped + most, rows)
    growth = np.round(exact * (rows / exact) ** (np.arange(1.0, steps + 1) / steps))
    # group i holds the ranks edges[i]+1 ... edges[i+1]
    edges = np.concatenate([np.minimum(skipped + np.arange(most + 1.0), exact), growth], axis=1)
    ranks = np.diff(edges)
    first_rank, last_rank = edges[:, :-1] + 1 + shift, edges[:, 1:] + shift
    # Euler-Maclaurin, relative to the first rank of all so that no power overflows; a group of one
    # rank is exact.
    of_all = first_rank[:, :1]
    log_first, log_last = np.log(first_rank / of_all), np.log(last_rank / of_all)
    first, last = np.exp(-exponent * log_first), np.exp(-exponent * log_last)
    integral = first * first_rank * _integrate_power(log_last - log_first, 1 - exponent)
    slopes = first / first_rank - last / last_rank
    several = integral + (first + last) / 2 + exponent / 12 * slopes
    return RowGroups(np.where(ranks > 1, several, first * ranks), ranks)


def _integrate_power(span: Array, power: Values) -> Array:
    """(e^(power span) - 1) / power, and its limit `span` where the power is 0."""
    return np.divide(np.expm1(power * span), power, out=span.copy(), where=np.not_equal(power, 0))


@dataclass(frozen=True)
class ReuseHistogram(Distribution):
    """Distinct rows of a recorded batch, counted by how often the batch looked them up.

    Parameters
    ----------
    counts : tuple of 17 floats
        Distinct rows looked up once, twice, 3-4 times, 5-8, ..., 2**14+1 to 2**15, and more often
        [-].
    lookups : float
        Lookups of the recorded batch [-].
    rows : int
        Rows of the table or tables: the largest possible number of distinct rows [-].

    Notes
    -----
    Inside the recorded batch the histogram needs no assumption about the distribution. Beyond about
    twice the batch it does not show how many rows are still unseen, and `unique_rows` warns. As
    buckets, rows seen once represent all rows that could have been seen instead, so they are spread
    over the unseen ones.
    """

    counts: tuple[float, ...]
    lookups: float
    rows: int

    def __post_init__(self) -> None:
        check_type("counts", self.counts, Sequence)
        if len(self.counts) != 17:
            raise ValueError(
                f"counts has {len(self.counts)} bins; it must have 17: once, twice, 3-4, ... over 2**15"
            )
        counts = tuple(check_positive("counts", count, zero=True) for count in self.counts)
        set_fields(self, counts=counts)
        set_fields(self, lookups=check_positive("lookups", self.lookups))
        super().__post_init__()
        most = min(self.rows, self.lookups)
        if not 0 < sum(self.counts) <= most * (1 + 1e-9):
            reach = f"{self.lookups:g} lookups into {self.rows} rows reach more than 0 and at most {most:g}"
            raise ValueError(f"counts add up to {sum(self.counts):g} distinct rows; {reach}")

    def _group_rows(self, n: int) -> RowGroups:
        seen = np.asarray(self.counts)
        mass = seen * self.accesses()
        rows = seen.copy()
        rows[0] += self.rows - seen.sum()
        is_filled = rows > 0
        return RowGroups(mass[is_filled], rows[is_filled])

    def _split(self, frequent: int) -> RowsByFrequency:
        """The bins of the most accesses first; a bin at the border is divided. Rows that were seen
        once, or never, are alike."""
        counts, accesses = np.asarray(self.counts), self.accesses()
        rows = counts.copy()
        rows[0] += self.rows - counts.sum()
        above = np.cumsum(rows[::-1])[::-1] - rows  # rows of more accesses than those of each bin
        taken = np.clip(frequent - above, 0.0, rows)
        part = np.divide(taken, rows, out=np.zeros_like(rows), where=rows > 0)
        mass = counts * accesses
        share = float((mass * part).sum() / mass.sum())
        return RowsByFrequency(
            share,
            self._select(counts * part, share, frequent),
            self._select(counts * (1 - part), 1 - share, self.rows - frequent),
        )

    def _select(self, counts: Array, share: float, rows: int) -> Distribution:
        """The histogram of some of the rows, which have a share of the lookups."""
        if not counts.sum() > 0 or not share > 0:
            return Uniform(rows)
        lookups = max(self.lookups * share, float(counts.sum()))
        return ReuseHistogram(tuple(counts.tolist()), lookups, rows)

    def resize(self, rows: int) -> "ReuseHistogram":
        """A part of the rows has the same part of every bin and of the lookups."""
        return self if rows == self.rows else self._take(rows)

    @lru_cache(maxsize=4096)  # noqa: B019
    def _take(self, rows: int) -> "ReuseHistogram":
        """What `resize` returns for a part, made once."""
        part = rows / self.rows
        return ReuseHistogram(tuple(c * part for c in self.counts), self.lookups * part, rows)

    def accesses(self) -> Array:
        """Accesses of a row of each bin, scaled so that all rows together make the recorded
        lookups.

        Returns
        -------
        accesses : array, shape (17,)
            Mean accesses of one row [-].
        """
        return self._means

    @cached_property
    def _means(self) -> Array:
        """What `accesses` returns, computed once."""
        upper = 2.0 ** np.arange(17)
        # between the fewest and the most accesses of the bin
        means = np.sqrt(upper * (np.floor(upper / 2) + 1))
        rows = np.asarray(self.counts)
        if rows[16] > 0:
            means[16] = max(2.0**15, (self.lookups - means[:16] @ rows[:16]) / rows[16])
        fixed, free = means[:2] @ rows[:2], means[2:] @ rows[2:]
        if free > 0:
            means[2:] *= min(2.0, max(0.5, (self.lookups - fixed) / free))
        means.setflags(write=False)
        return means


@dataclass(frozen=True)
class Part(Distribution):
    """A random part of the rows of a table, such as a shard of a split by rows.

    Each row of the table is a fraction of a row of the part. This is the mean over all parts, with
    and without popular rows, so that all parts together find as many distinct rows as the table.

    Parameters
    ----------
    law : Uniform, Zipf or ReuseHistogram
        Of the whole table.
    rows : int
        Rows of the part [-].

    Examples
    --------
    >>> law = Zipf(1_000_000, 1.05)
    >>> round(8 * float(unique_rows(Part(law, 125_000), 65536 / 8)) / float(unique_rows(law, 65536)), 2)
    1.00
    """

    law: Distribution
    rows: int

    def __post_init__(self) -> None:
        check_type("law", self.law, Distribution)
        rows = check_positive("rows", self.rows, integer=True, maximum=self.law.rows)
        set_fields(self, rows=rows)

    def _group_rows(self, n: int) -> RowGroups:
        probabilities, rows = self.law.buckets(n)
        return RowGroups(probabilities * rows, rows * (self.rows / self.law.rows))

    def resize(self, rows: int) -> Distribution:
        """A part of a part is a part of the table."""
        return self.law.resize(rows)

    def _split(self, frequent: int) -> RowsByFrequency:
        """The table is split at the same share of its rows."""
        of_table = round(frequent * (self.law.rows / self.rows))
        of_table = min(max(of_table, frequent), self.law.rows - (self.rows - frequent))
        parts = self.law.split(of_table)
        popular, others = parts.frequent, parts.others
        return RowsByFrequency(
            parts.share,
            None if popular is None else popular.resize(frequent),
            None if others is None else others.resize(self.rows - frequent),
        )


@closed_form()
def unique_rows(distribution: Distribution, lookups: float | npt.ArrayLike) -> Array:
    r"""Distinct rows among a number of independent lookups.

    Parameters
    ----------
    distribution : Uniform, Zipf or ReuseHistogram
        Which rows are looked up.
    lookups : float or array
        Lookups N, fractions allowed [-].

    Returns
    -------
    rows : array, shape of `lookups`
        Expected distinct rows U [-].

    Warns
    -----
    UserWarning
        For a reuse histogram and more than twice its own lookups.

    Notes
    -----
    .. math:: U = \sum_r 1 - (1 - p_r)^N

    and for a reuse histogram that counts n_c rows with c accesses in its own batch, thinned to the
    fraction b of it,

    .. math:: U = \sum_c n_c \left(1 - (1 - b)^c\right)

    Beyond its own batch the histogram is continued with the rate at which it was still finding rows
    that had been seen once, and saturates at all rows. The bucketed Zipf sum is within 0.1 % of the
    exact one.

    References
    ----------
    .. [1] I. J. Good, G. H. Toulmin, "The number of new species, and the increase in population
       coverage, when a sample is increased", Biometrika 43, 1956. doi:10.1093/biomet/43.1-2.45
       (thinning and extrapolation)

    Examples
    --------
    >>> float(unique_rows(Uniform(100), 1)), round(float(unique_rows(Uniform(100), 1e6)))
    (1.0, 100)
    """
    check_type("distribution", distribution, Distribution)
    return distinct_rows([distribution], np.asarray(lookups, dtype=float)[..., None])[..., 0]


@closed_form()
def count_frequent_rows(distribution: Distribution, lookups: float, threshold: float) -> int:
    """Rows that a batch looks up at least so often in the mean.

    Parameters
    ----------
    distribution : Uniform, Zipf or ReuseHistogram
        Which rows are looked up.
    lookups : float
        Lookups of the batch [-].
    threshold : float
        Fewest lookups of a frequent row [-].

    Returns
    -------
    rows : int
        Rows with a probability of at least threshold / lookups. Of a Zipf law within 0.5 %, as
        neighbouring ranks are counted in groups [-].

    Raises
    ------
    ValueError
        For lookups or a threshold that are negative, infinite or no number.

    Examples
    --------
    >>> count_frequent_rows(Zipf(1000, 1.0), 1000, 13)
    10
    """
    check_type("distribution", distribution, Distribution)
    check_positive("lookups", lookups, zero=True)
    check_positive("threshold", threshold, zero=True)
    probabilities, rows = distribution.buckets(_FINE)
    is_frequent = probabilities * lookups >= threshold
    return round(float(rows[is_frequent].sum()))


@closed_form()
def distinct_rows(
    distributions: "Sequence[Distribution] | Buckets", lookups: npt.ArrayLike
) -> Array:
    """Distinct rows of several tables at once, see `unique_rows`.

    Parameters
    ----------
    distributions : sequence of Uniform, Zipf, ReuseHistogram or Part, length n
        Which rows of each table are looked up.
    lookups : array, shape (..., n)
        Lookups into each table [-].

    Returns
    -------
    rows : array, shape of `lookups`
        Expected distinct rows [-].
    """
    lookups, buckets = np.asarray(lookups, dtype=float), join_buckets(distributions)
    gone = np.expm1(-np.repeat(lookups, buckets.sizes, axis=-1) * buckets.rates)
    found = np.minimum(buckets.add_up(-gone * buckets.rows), lookups)
    for i, law in enumerate(() if distributions is buckets else distributions):
        if not isinstance(law, ReuseHistogram):
            continue
        part = lookups[..., i] / law.lookups
        _warn_of_more(law, part)
        if part.ndim:
            found[..., i] = _unique_of_histogram(law, part)
        else:
            found[i] = _keep_unique(law, float(part))
    return np.asarray(found)


class Buckets(NamedTuple):
    """Rows of several tables, end to end in groups of like probability; ``rates`` are -log(1 -
    probability)."""

    rates: Array
    rows: Array
    shares: Array
    sizes: Index
    starts: Index

    def add_up(self, values: Array) -> Array:
        """Sum values of buckets by table; where each has one bucket there is nothing to sum."""
        return (
            values
            if len(self.starts) == len(self.rows)
            else np.add.reduceat(values, self.starts, axis=-1)
        )


def join_buckets(distributions: "Sequence[Distribution] | Buckets") -> Buckets:
    """Join the buckets of several tables.

    Parameters
    ----------
    distributions : sequence of Uniform, Zipf, ReuseHistogram or Part, or Buckets
        Which rows of each table are looked up; what is joined already stays.

    Returns
    -------
    buckets : Buckets
        Decay rate, rows and share of the table's lookups by bucket [-]; buckets and first bucket by
        table [-].
    """
    if isinstance(distributions, Buckets):
        return distributions
    check_type("distributions", distributions, Sequence[Distribution])
    if not len(distributions):
        raise ValueError("distributions is empty; it must hold at least one distribution")
    laws = tuple(distributions)
    if len(laws) < _MANY:
        return _join(laws)
    return _join.__wrapped__(laws)  # which keeps nothing


@closed_form()
def spread_rows(rows: Array, exponents: Array, shifts: Array) -> Buckets:
    """Buckets of many tables at once: as of `Zipf`, or of `Uniform` if all exponents are 0.

    Parameters
    ----------
    rows, exponents, shifts : array
        Rows of each table, exponent and shift of its law [-].

    Returns
    -------
    buckets : Buckets
        In the order of the tables.
    """
    tables = rows[:, None]
    groups = RowGroups(tables, tables)
    if exponents.any():
        groups = _group_ranks(tables, exponents[:, None], shifts[:, None], 0, _GROUPS)
    shares = groups.mass / groups.mass.sum(axis=1, keepdims=True)
    is_filled = groups.rows > 0
    sizes = np.count_nonzero(is_filled, axis=1)
    return _bundle(shares[is_filled], groups.rows[is_filled], sizes)


@lru_cache(maxsize=512)
def _join(distributions: tuple[Distribution, ...]) -> Buckets:
    """The buckets of several tables, kept for tuples that were joined before."""
    laws = [law for law in distributions if isinstance(law, Zipf) and not law.heavy_hitters]
    if len(laws) == len(distributions):
        numbers = [(law.rows, law.exponent, law.shift) for law in laws]
        rows, exponents, shifts = np.array(numbers, dtype=float).T
        return spread_rows(rows, exponents, shifts)
    found = [law.buckets() for law in distributions]
    probabilities = np.concatenate([of_table for of_table, _ in found])
    rows = np.concatenate([of_table for _, of_table in found])
    sizes = np.array([len(of_table) for _, of_table in found])
    return _bundle(probabilities * rows, rows, sizes)


def _bundle(shares: Array, rows: Array, sizes: Index) -> Buckets:
    """Buckets from the share of the lookups and the rows of each, and how many each table has."""
    rates = -np.log1p(-np.minimum(shares / rows, ALMOST_ONE))
    return Buckets(rates, rows, shares, sizes, np.cumsum(sizes) - sizes)


def _warn_of_more(histogram: ReuseHistogram, part: Array) -> None:
    """Warn of more than twice the lookups of a histogram."""
    if np.any(part > 2):
        text = f"{np.max(part) * histogram.lookups:.3g} lookups are more than twice the {histogram.lookups:.3g} of the"
        warnings.warn(
            f"{text} reuse histogram; distinct rows beyond its batch are not identified",
            stacklevel=4,
        )


@lru_cache(maxsize=8192)
def _keep_unique(histogram: ReuseHistogram, part: float) -> float:
    """What `_unique_of_histogram` returns for a number, computed once: splits of a table by columns
    have the lookups of the whole table."""
    return float(_unique_of_histogram(histogram, np.asarray(part)))


def _unique_of_histogram(histogram: ReuseHistogram, part: Array) -> Array:
    """Distinct rows among a part of the lookups of a histogram, which may be more than all."""
    rows, seen = np.asarray(histogram.counts), sum(histogram.counts)
    inside = (1 - (1 - np.minimum(part, 1.0))[..., None] ** histogram.accesses()) @ rows
    unseen = max(histogram.rows - seen, 1e-300)
    beyond = -unseen * np.expm1(-rows[0] / unseen * np.maximum(part - 1, 0.0))
    return np.asarray(np.minimum(inside + beyond, part * histogram.lookups))
