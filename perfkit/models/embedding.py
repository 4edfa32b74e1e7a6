"""Traffic of embedding lookups and of their fused backward passes, and what optimizers keep for each weight."""

from collections.abc import Mapping
from types import MappingProxyType

from perfkit.models.roofline import round_up
from perfkit.units import Values

__all__ = [
    "STATE",
    "exact_backward_bytes",
    "forward_bytes",
    "fused_backward_bytes",
    "row_traffic",
]

_INDEX = 8.0  # torch's int64 indices and offsets

#: Numbers an optimizer keeps for each weight; row-wise Adagrad keeps one for each row.
STATE: Mapping[str, float] = MappingProxyType(
    {
        **dict.fromkeys(("sgd", "rowwise_adagrad"), 0.0),
        **dict.fromkeys(("sgd_momentum", "adagrad"), 1.0),
        **dict.fromkeys(("adam", "adamw", "adam_fused", "adamw_fused", "sparse_adam"), 2.0),
    }
)


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


def forward_bytes(
    bags: Values, lookups: Values, dim: Values, *, itemsize: float = 4, granularity: float = 64, misses: Values = 1.0
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
        Share of the rows that comes from the level in question, see `perfkit.models.caches.lru_misses` [-].

    Returns
    -------
    nbytes : same kind as the sizes
        Indices, offsets, rows and output [B].

    Notes
    -----
    .. math:: 8 B L + 8 B + m B L\, R(eD) + B e D

    At the measured bandwidth of a V100 (fp32, 8 tables of 1M rows, L = 100, D = 64) 2.5 % above the kernel's time. The
    26 tables of DLRM-MLPerf at L = 1 come out 32 % too long unless `misses` says what the L2 cache serves.

    Examples
    --------
    >>> forward_bytes(2048, 2048 * 100, 64, granularity=32)
    54607872.0
    """
    rows = misses * lookups * row_traffic(dim, itemsize, granularity)
    return _INDEX * lookups + _INDEX * bags + rows + 1.0 * itemsize * bags * dim


def fused_backward_bytes(
    bags: Values, lookups: Values, dim: Values, *, itemsize: float = 4, granularity: float = 32, misses: Values = 1.0
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
        Share of the rows that comes from the level in question [-].

    Returns
    -------
    nbytes : same kind as the sizes
        Rows, read and written, and the gradient of the output [B].

    Notes
    -----
    .. math:: 2 m B L\, R(eD) + B e D

    The DRAM counters of a V100 show 1.04 times this (32 tables of 500,000 rows, B = 4096, L = 16 to 128, D = 128);
    indices are less than 1 % of it.

    Examples
    --------
    >>> fused_backward_bytes(4096 * 32, 4096 * 32 * 16, 128)
    2214592512.0
    """
    return 2.0 * misses * lookups * row_traffic(dim, itemsize, granularity) + 1.0 * itemsize * bags * dim


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
) -> Values:
    r"""Traffic of a backward pass fused with the optimizer that sorts the indices and updates each distinct row once.

    FBGEMM's "exact" optimizers, which TorchRec uses, work like this.

    Parameters
    ----------
    unique : float, array or expression
        Distinct rows U, see `perfkit.models.caches.unique_rows` [-].
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
        Passes of the radix sort, each reading and writing 16 B a lookup: 8 bits a pass of a 32-bit key [-].

    Returns
    -------
    nbytes : same kind as the sizes
        Sort, rows read and written once, gradient of the output [B].

    Notes
    -----
    .. math:: 32 p B L + 2 U R(eD) + B e D + m_g \max(B L\, R(eD) - B e D, 0)

    Examples
    --------
    >>> exact_backward_bytes(1000, 2048, 2048, 128, sort_passes=0) == 2 * 1000 * 512 + 2048 * 512
    True
    """
    row, compulsory = row_traffic(dim, itemsize, granularity), 1.0 * itemsize * bags * dim
    repeated = gradient_misses * (lookups * row - compulsory)
    return 4 * _INDEX * sort_passes * lookups + 2.0 * unique * row + compulsory + (repeated + abs(repeated)) / 2
