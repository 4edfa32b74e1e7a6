"""Traffic of embedding lookups and of their fused backward passes, and the state that optimizers
keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Array, Values
from perfkit.models.caches import (
    PAGE,
    cover_pages,
    lru_misses,
    miss_share,
    page_walks,
    rotating_misses,
)
from perfkit.models.distributions import (
    Buckets,
    Distribution,
    ReuseHistogram,
    distinct_rows,
    join_buckets,
)
from perfkit.models.optimizers import find_optimizer
from perfkit.models.roofline import round_up, smooth_maximum

_INDEX = 8.0  # torch's int64 indices and offsets
#: Threads of a warp, each of which has one number of a row [-].
WARP = 32
_WEIGHT = 4.0  # FBGEMM's fp32 weights of lookups


@closed_form()
def state_bytes(
    rows: Values, dim: Values, itemsize: Values = 4, *, optimizer: str = "sgd"
) -> Values:
    """Bytes that an optimizer keeps for the rows of a table.

    Parameters
    ----------
    rows : int, array or expression
        Rows E [-].
    dim : int, array or expression
        Columns D [-].
    itemsize : float, array or expression, optional
        Bytes of one number, e [B].
    optimizer : str, optional
        A key of `perfkit.models.optimizers.OPTIMIZERS` [-].

    Returns
    -------
    nbytes : same kind as `rows`
        As many numbers as weights for each state, or one for each row [B].

    Raises
    ------
    ValueError
        For an unknown optimizer; the message lists the known ones.

    Examples
    --------
    >>> state_bytes(1000, 16, optimizer="adagrad"), state_bytes(1000, 16, optimizer="rowwise_adagrad")
    (64000.0, 4000.0)
    """
    return find_optimizer(optimizer, by_shape=False).state_bytes(rows, dim, itemsize)


@closed_form()
def frequent_lookups(
    nodes: Values, *, all_to_all: Values, all_reduce: Values, efficiency: Values = 1.0
) -> Values:
    r"""Lookups of a row in a batch from which on HugeCTR's hybrid embedding copies it to all ranks.

    Parameters
    ----------
    nodes : int, array or expression
        Nodes N, at least two [-].
    all_to_all, all_reduce : float, array or expression
        Bandwidths of the exchange of rows and of the reduction of gradients, which the user of
        HugeCTR states [B/s].
    efficiency : float, array or expression, optional
        Its ``efficiency_bandwidth_ratio``, e [-].

    Returns
    -------
    lookups : same kind as `nodes`
        Fewest lookups of a frequent row, over all ranks [-].

    Raises
    ------
    ValueError
        For one node, between whose ranks HugeCTR reduces nothing.

    Notes
    -----
    .. math:: c = e \, N \, \frac{N}{N - 1} \, \frac{b_\mathrm{exchange}}{b_\mathrm{reduce}}

    where the row costs as much as a gradient that is reduced as by its lookups that are exchanged,
    if bandwidths limit both [1]_.

    References
    ----------
    .. [1] NVIDIA-Merlin/HugeCTR, src/embeddings/hybrid_embedding/calibration_data.cu,
       ``calculate_threshold`` for ``IB_NVLink`` and ``IB_NVLink_Hier``

    Examples
    --------
    >>> round(frequent_lookups(8, all_to_all=190e9, all_reduce=130e9), 2)
    13.36
    """
    return efficiency * nodes * (nodes / (nodes - 1)) * (all_to_all / all_reduce)


@closed_form()
def row_traffic(dim: Values, itemsize: float = 4, granularity: float = 64) -> Values:
    """Bytes that move when one row is touched.

    Parameters
    ----------
    dim : int, array or expression
        Columns D [-].
    itemsize : float, optional
        Bytes of one number, e [B].
    granularity : float, optional
        Smallest access: 64 for the cache lines of a CPU, 32 for the sectors of a GPU [B].

    Returns
    -------
    nbytes : same kind as `dim`
        R(e D): the row, rounded up to whole accesses [B].

    Examples
    --------
    >>> row_traffic(10, 4, 64), row_traffic(10, 4, 32)
    (64.0, 64.0)
    """
    return round_up(1.0 * itemsize * dim, granularity)


@closed_form()
def forward_bytes(
    bags: Values,
    lookups: Values,
    dim: Values,
    *,
    itemsize: float = 4,
    granularity: float = 64,
    misses: Values = 1.0,
) -> Values:
    r"""Traffic of an embedding-bag forward pass that sums the rows of each bag.

    Parameters
    ----------
    bags : int, array or expression
        Bags B, one for each sample and table [-].
    lookups : float, array or expression
        Lookups of all bags together, B L [-].
    dim : int, array or expression
        Columns D [-].
    itemsize : float, optional
        Bytes of one number, e [B].
    granularity : float, optional
        Smallest access [B].
    misses : float, array or expression, optional
        Share of the rows that comes from this memory level, see `perfkit.models.caches.lru_misses`
        [-].

    Returns
    -------
    nbytes : same kind as the sizes
        Indices, offsets, rows and output [B].

    Notes
    -----
    .. math:: 8 B L + 8 B + m B L\, R(eD) + B e D

    At the measured bandwidth of a V100 this is 2.5 % above the kernel's time; see docs/formulas.md,
    table 3.2. Small tables need `misses`: the L2 cache serves many of their rows.

    Examples
    --------
    >>> forward_bytes(2048, 2048 * 100, 64, granularity=32)
    54607872.0
    """
    rows = misses * lookups * row_traffic(dim, itemsize, granularity)
    return _INDEX * lookups + _INDEX * bags + rows + 1.0 * itemsize * bags * dim


@closed_form()
def fused_backward_bytes(
    bags: Values,
    lookups: Values,
    dim: Values,
    *,
    itemsize: float = 4,
    granularity: float = 32,
    misses: Values = 1.0,
) -> Values:
    r"""Traffic of a backward pass fused with SGD that reads and writes a row for every lookup.

    Older table-batched GPU kernels work like this.

    Parameters
    ----------
    bags : int, array or expression
        Bags B [-].
    lookups : float, array or expression
        Lookups of all bags together, B L [-].
    dim : int, array or expression
        Columns D [-].
    itemsize : float, optional
        Bytes of one number, e [B].
    granularity : float, optional
        Smallest access [B].
    misses : float, array or expression, optional
        Share of the rows that comes from this memory level [-].

    Returns
    -------
    nbytes : same kind as the sizes
        Rows, read and written, and the gradient of the output [B].

    Notes
    -----
    .. math:: 2 m B L\, R(eD) + B e D

    The DRAM counters of a V100 show 1.04 times this (docs/formulas.md, table 3.2); indices are less
    than 1 % of it.

    Examples
    --------
    >>> fused_backward_bytes(4096 * 32, 4096 * 32 * 16, 128)
    2214592512.0
    """
    return (
        2.0 * misses * lookups * row_traffic(dim, itemsize, granularity)
        + 1.0 * itemsize * bags * dim
    )


@closed_form()
def exact_backward_bytes(
    unique: Values,
    bags: Values,
    lookups: Values,
    dim: Values,
    *,
    itemsize: float = 4,
    granularity: float = 32,
    gradient_misses: Values = 0.0,
    sort_passes: float = 4,
    weighted: Values = 0.0,
) -> Values:
    r"""Traffic of a backward pass fused with the optimizer that sorts the indices and updates each
    distinct row once.

    FBGEMM's "exact" optimizers, which TorchRec uses, work like this.

    Parameters
    ----------
    unique : float, array or expression
        Distinct rows U, see `perfkit.models.distributions.unique_rows` [-].
    bags : int, array or expression
        Bags B [-].
    lookups : float, array or expression
        Lookups of all bags together, B L [-].
    dim : int, array or expression
        Columns D [-].
    itemsize : float, optional
        Bytes of one number, e [B].
    granularity : float, optional
        Smallest access [B].
    gradient_misses : float, array or expression, optional
        Share of the repeated reads of the output's gradient that no cache serves [-].
    sort_passes : float, optional
        Passes of the radix sort, each reading and writing 16 B a lookup: 8 bits a pass of a 32-bit
        key [-].
    weighted : float, array or expression, optional
        1 if each lookup has a weight of 4 B, w: the keys are sorted once more, with these [1]_ [-].

    Returns
    -------
    nbytes : same kind as the sizes
        Sort, rows read and written once, gradient of the output [B].

    Notes
    -----
    .. math:: 32 p B L + 2 U R(eD) + B e D + m_g \max(B L\, R(eD) - B e D, 0)

    and :math:`24 w p B L` more: a pass of the second sort reads and writes 12 B a lookup.

    References
    ----------
    .. [1] pytorch/FBGEMM, fbgemm_gpu/codegen/training/backward/embedding_backward_split_template.cu,
       ``indice_weights_sorted``

    Examples
    --------
    >>> exact_backward_bytes(1000, 2048, 2048, 128, sort_passes=0) == 2 * 1000 * 512 + 2048 * 512
    True
    """
    row, compulsory = row_traffic(dim, itemsize, granularity), 1.0 * itemsize * bags * dim
    repeated = gradient_misses * (lookups * row - compulsory)
    return (
        (4 * _INDEX + 2 * (_INDEX + _WEIGHT) * weighted) * sort_passes * lookups
        + 2.0 * unique * row
        + compulsory
        + (repeated + abs(repeated)) / 2
    )


@closed_form()
def lookup_time(
    lookups: Values,
    dim: Values,
    nbytes: Values,
    *,
    bandwidth: Values,
    launch: float = 0.0,
    per_lookup: float = 0.0,
    per_number: float = 0.0,
    hits: Values = 0.0,
    hit: float = 1.0,
    sharpness: float = 1.0,
) -> Values:
    r"""Time of a kernel that waits for each row: torch's bag, or a search in a hash table.

    Parameters
    ----------
    lookups : float, array or expression
        Rows that are looked up, N [-].
    dim : float, array or expression
        Numbers of a row, D [-].
    nbytes : float, array or expression
        Bytes moved [B].
    bandwidth : float, array or expression
        Bandwidth reached, the efficiency included [B/s].
    launch : float, optional
        Time of a kernel without lookups [s].
    per_lookup : float, optional
        What a lookup takes whatever its width, over all that run at once [s].
    per_number : float, optional
        What a number of a row takes, over all that run at once; rows take whole warps [s].
    hits : float, array or expression, optional
        Share of the rows that the last cache has, h [-].
    hit : float, optional
        Time of such a row over that of one from memory, c [-].
    sharpness : float, optional
        Exponent q: 1 where rows are moved after they were found, large where both overlap [-].

    Returns
    -------
    time : same kind as `lookups`
        Time of the kernel [s].

    Notes
    -----
    .. math:: t = t_0 + \left((N (t_l + 32 \lceil D / 32 \rceil t_n) (1 - (1 - c) h))^q
              + (n / W)^q\right)^{1/q}

    A thread has a number of a row and waits for it before it reads the next row, so what is in
    flight on a multiprocessor, not the bandwidth, is the limit (docs/formulas.md, table 3.5).

    Examples
    --------
    >>> whole = lookup_time(1e6, 128, 5e8, bandwidth=3e12, per_number=2.5e-12, sharpness=1e3)
    >>> round(whole * 1e6)
    320
    """
    waiting = lookups * (per_lookup + round_up(1.0 * dim, WARP) * per_number)
    waiting = waiting * (1.0 - (1.0 - hit) * hits)
    return launch + smooth_maximum(waiting, nbytes / bandwidth, sharpness=sharpness)


@dataclass(frozen=True)
class LookupSizes:
    """What lookups into n tables, and a later update of the same rows, touch and miss.

    Parameters
    ----------
    unique : array, shape (n,)
        Distinct rows of each table [-].
    row_bytes : array, shape (n,)
        Traffic of all lookups, each row rounded up to whole accesses [B].
    unique_bytes : array, shape (n,)
        Traffic of the distinct rows [B].
    misses : array, shape (levels, n)
        Share of `row_bytes` that comes from beyond each cache [-].
    walks : array, shape (n,)
        Page walks of all lookups [-].
    update_misses : array, shape (levels, n)
        Share of `unique_bytes` that comes from beyond each cache when the rows are updated [-].
    update_walks : array, shape (n,)
        Page walks of the update [-].
    """

    unique: Array
    row_bytes: Array
    unique_bytes: Array
    misses: Array
    walks: Array
    update_misses: Array
    update_walks: Array


@closed_form(other=("groups",))
def size_lookup(
    distributions: Sequence[Distribution] | Buckets,
    lookups: npt.ArrayLike,
    dim: npt.ArrayLike,
    *,
    capacities: Sequence[float],
    entries: float,
    itemsize: npt.ArrayLike = 4.0,
    granularity: float = 64.0,
    dense_bytes: npt.ArrayLike = 0.0,
    groups: npt.ArrayLike | None = None,
    cold: bool = False,
    in_turn: bool = False,
    batches: Sequence[float] | None = None,
) -> LookupSizes:
    r"""Size the lookups of one iteration into tables, or into shares of their rows or columns.

    Parameters
    ----------
    distributions : sequence of Uniform, Zipf, ReuseHistogram or Part, length n, or Buckets
        Which rows of each table are looked up; `resize` gives that of a share of the rows.
    lookups : array, shape (n,)
        Lookups of one iteration into each table [-].
    dim : array, shape (n,)
        Columns [-].
    capacities : sequence of float
        Bytes that each cache level effectively holds [B].
    entries : float
        Pages that the translation buffer effectively holds [-].
    itemsize : float or array, shape (n,), optional
        Bytes of one number [B].
    granularity : float, optional
        Smallest access: 64 for the cache lines of a CPU, 32 for the sectors of a GPU [B].
    dense_bytes : float or array, shape (groups,), optional
        Distinct other bytes that one iteration touches [B].
    groups : array of int, shape (n,), optional
        Which tables share caches, in ascending order; all by default, ``range(n)`` sizes each alone
        [-].
    cold : bool, optional
        Whether the lookups of each table find empty caches, as in a kernel that goes from table to
        table.
    in_turn : bool, optional
        Whether the lookups of one table come after those of another, as kernels of GPUs do them, not
        all together: they miss no more than from empty caches.
    batches : sequence of float, length n, optional
        Batches of indices that rotate; by default every iteration draws fresh ones [-].

    Returns
    -------
    sizes : LookupSizes
        Distinct rows, traffic, misses and page walks.

    Notes
    -----
    The forms are `unique_rows`, `lru_misses` (`cold_misses` where `cold`), `page_walks`,
    `rotating_misses` and, for the update, `miss_share` of all distinct rows of the group and its
    dense bytes, all in `perfkit.models.caches`. Groups are solved together: thousands of shares
    take some 10 ms.

    Examples
    --------
    >>> from perfkit.models.distributions import Uniform
    >>> sizes = size_lookup([Uniform(1000)] * 2, [500, 500], [16, 16], capacities=[64000], entries=1e6)
    >>> sizes.unique.round(1).tolist(), sizes.misses.round(3).tolist()
    ([393.6, 393.6], [[0.5, 0.5]])
    """
    tables = len(distributions.sizes if isinstance(distributions, Buckets) else distributions)
    members = np.zeros(tables, dtype=int) if groups is None else np.asarray(groups)
    asked = _Asked(
        lookups=np.broadcast_to(lookups, tables),
        width=np.broadcast_to(np.multiply(dim, itemsize), tables),
        members=members,
        dense=np.broadcast_to(dense_bytes, int(members[-1]) + 1),
        batches=None if batches is None else np.broadcast_to(batches, tables),
        capacities=tuple(capacities),
        entries=entries,
        granularity=granularity,
        cold=cold,
        in_turn=in_turn,
    )
    if isinstance(distributions, Buckets):  # too many to be compared with others
        return _size(distributions, asked)
    return _keep_sizes(tuple(distributions), asked.as_key())


class _Asked(NamedTuple):
    """Lookups that are to be sized, see `size_lookup`.

    Parameters
    ----------
    lookups, width, members : array, shape (n,)
        Lookups into each table [-], bytes of a row [B], and the group of the table [-].
    dense : array, shape (groups,)
        Other bytes of each group [B].
    batches : array, shape (n,), optional
        Batches of indices that rotate; None for fresh ones [-].
    capacities : tuple of float
        Bytes that each cache level holds [B].
    entries : float
        Pages that the translation buffer holds [-].
    granularity : float
        Smallest access [B].
    cold : bool
        Whether the lookups of each table find empty caches.
    in_turn : bool
        Whether the lookups of one table come after those of another.
    """

    lookups: Any
    width: Any
    members: Any
    dense: Any
    batches: Any
    capacities: tuple[float, ...]
    entries: float
    granularity: float
    cold: bool
    in_turn: bool

    def as_key(self) -> "_Asked":
        """The same, with tuples in place of arrays, which can be compared."""
        return self._replace(
            lookups=tuple(self.lookups.tolist()),
            width=tuple(self.width.tolist()),
            members=tuple(self.members.tolist()),
            dense=tuple(self.dense.tolist()),
            batches=None if self.batches is None else tuple(self.batches.tolist()),
        )


@lru_cache(maxsize=64)
def _keep_sizes(laws: tuple[Distribution, ...], asked: _Asked) -> LookupSizes:
    """What `_size` returns, computed once for the same arguments."""
    return _size(laws, asked)


def _size(laws: tuple[Distribution, ...] | Buckets, asked: _Asked) -> LookupSizes:
    """Do what `size_lookup` says."""
    # joined once: the laws of thousands of tables take most of the time
    buckets = join_buckets(laws)
    if not isinstance(laws, Buckets) and not any(isinstance(law, ReuseHistogram) for law in laws):
        laws = buckets
    lookups, width = np.array(asked.lookups), np.array(asked.width)
    tables = _Tables(
        laws=laws,
        lookups=lookups,
        width=width,
        row=row_traffic(width, 1.0, asked.granularity),
        rows=buckets.add_up(buckets.rows),
        members=np.array(asked.members),
        dense=np.array(asked.dense),
    )
    unique = distinct_rows(laws, lookups)
    of_lookups = _miss_lookups(tables, asked)
    if asked.batches is not None:
        of_lookups = _rotate_batches(tables, asked, of_lookups)
    of_update = _miss_update(tables, asked, unique)
    found = LookupSizes(
        unique=unique,
        row_bytes=lookups * tables.row,
        unique_bytes=unique * tables.row,
        misses=of_lookups.misses,
        walks=lookups * of_lookups.walks,
        update_misses=of_update.misses,
        update_walks=unique * of_update.walks,
    )
    for values in vars(found).values():
        values.setflags(write=False)
    return found


class _Tables(NamedTuple):
    """Tables whose lookups are sized.

    Parameters
    ----------
    laws : sequence of Distribution, or Buckets
        Which rows of each are looked up.
    lookups, width, row, rows, members : array, shape (n,)
        Lookups into each [-], bytes of a row and of the accesses that touch it [B], rows, and group
        [-].
    dense : array, shape (groups,)
        Other bytes of each group [B].
    """

    laws: tuple[Distribution, ...] | Buckets
    lookups: Array
    width: Array
    row: Array
    rows: Array
    members: Array
    dense: Array


class _Missed(NamedTuple):
    """Share of the rows that miss each cache, and of those whose page misses the translation buffer
    [-]."""

    misses: Array
    walks: Array


def _miss_lookups(tables: _Tables, asked: _Asked) -> _Missed:
    """What lookups of fresh indices miss."""
    sizes = list(dict.fromkeys(asked.capacities))  # a single cache counts for several levels
    if asked.cold:
        of_sizes = _miss_from_empty_caches(tables, sizes)
    else:
        of_sizes = lru_misses(
            tables.laws,
            tables.lookups,
            tables.row,
            capacity=sizes,
            dense_bytes=tables.dense,
            groups=tables.members,
        )
        if asked.in_turn:
            of_sizes = np.minimum(of_sizes, _miss_from_empty_caches(tables, sizes))
    walks = page_walks(
        tables.laws,
        tables.lookups,
        tables.row,
        entries=asked.entries,
        dense_bytes=tables.dense,
        groups=tables.members,
    )
    return _Missed(of_sizes[[sizes.index(capacity) for capacity in asked.capacities]], walks)


def _miss_from_empty_caches(tables: _Tables, sizes: Sequence[float]) -> Array:
    """What the lookups of each table miss that has caches of these sizes to itself, empty at first."""
    each_alone = np.arange(len(tables.rows))
    return lru_misses(
        tables.laws,
        tables.lookups,
        tables.row,
        capacity=sizes,
        dense_bytes=np.zeros(1),
        groups=each_alone,
        cold=True,
    )


def _rotate_batches(tables: _Tables, asked: _Asked, fresh: _Missed) -> _Missed:
    """What lookups of batches that rotate miss: they find again what an earlier round has left."""
    lookups, dense = tables.lookups, tables.dense[tables.members]
    batches = np.array(asked.batches)
    before, touched = distinct_rows(tables.laws, lookups * np.stack([batches - 1.0, batches]))
    new_rows, distance = (touched - before) / lookups, touched * tables.row + dense
    misses = [
        rotating_misses(of_cache, new_rows, distance, capacity=capacity)
        for of_cache, capacity in zip(fresh.misses, asked.capacities, strict=True)
    ]
    nbytes = tables.rows * tables.row
    pages_before, pages = cover_pages(before, nbytes), cover_pages(touched, nbytes)
    new_pages, distance = (pages - pages_before) / lookups, pages + dense / PAGE
    walks = rotating_misses(fresh.walks, new_pages, distance, capacity=asked.entries)
    return _Missed(np.stack(misses), walks)


def _miss_update(tables: _Tables, asked: _Asked, unique: Array) -> _Missed:
    """What a later update of the distinct rows of all tables of a group misses."""
    members, dense = tables.members, tables.dense
    distance = (np.bincount(members, unique * tables.row) + dense)[members]
    misses = [miss_share(distance, capacity=capacity) for capacity in asked.capacities]
    pages = cover_pages(unique, tables.rows * tables.width)
    page_distance = (np.bincount(members, pages) + dense / PAGE)[members]
    return _Missed(np.stack(misses), miss_share(page_distance, capacity=asked.entries))
