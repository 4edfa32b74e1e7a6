"""Traffic, time and memory of embedding tables, by the way each framework implements lookup, gradient and update."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from perfkit.models.roofline import optimizer_bytes, round_up, smooth_maximum
from perfkit.units import Values, check_choice

__all__ = [
    "STATE",
    "dense_backward_bytes",
    "dense_update_bytes",
    "exact_backward_bytes",
    "forward_bytes",
    "fused_backward_bytes",
    "lookup_time",
    "row_traffic",
    "sparse_backward_bytes",
    "sparse_update_bytes",
    "table_memory",
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

    At the measured bandwidth of a V100 (fp32, 8 tables of 1M rows, L = 100, D = 64) 2.5 % above the kernel's time. 26
    small tables at L = 1 come out 41 to 56 % too long unless `misses` says what the L2 cache serves.

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


def sparse_backward_bytes(bags: Values, lookups: Values, dim: Values, *, itemsize: float = 4) -> Values:
    r"""Traffic of a backward pass that returns a sparse gradient (``torch.nn.EmbeddingBag(sparse=True)``).

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

    Returns
    -------
    nbytes : same kind as the sizes
        Gradient of the output, one row of values and one index for every lookup [B].

    Notes
    -----
    .. math:: B e D + B L\, e D + 8 B L

    Nothing is merged: a row looked up twice has two entries.

    Examples
    --------
    >>> sparse_backward_bytes(2048, 2048 * 8, 64)
    4849664.0
    """
    return 1.0 * itemsize * dim * (bags + 1.0 * lookups) + _INDEX * lookups


def dense_backward_bytes(
    rows: Values,
    unique: Values,
    bags: Values,
    lookups: Values,
    dim: Values,
    *,
    itemsize: float = 4,
    granularity: float = 64,
) -> Values:
    r"""Traffic of a backward pass that returns a dense gradient (``torch.nn.EmbeddingBag``, the default).

    Parameters
    ----------
    rows : int, array or expression
        Rows of the table, E [-].
    unique : float, array or expression
        Distinct rows U; the lookups themselves where rows are not merged first [-].
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

    Returns
    -------
    nbytes : same kind as the sizes
        Zeroed gradient, rows added to it, gradient of the output, indices written and read as they are sorted [B].

    Notes
    -----
    .. math:: E e D + 2 U R(eD) + B e D + 16 B L

    Torch on a CPU sorts the indices, then adds the gradients of one row after another, so that a row stays in cache.
    The sort itself takes time that no traffic explains.

    Examples
    --------
    >>> dense_backward_bytes(1_000_000, 16384, 2048, 16384, 64)
    265175040.0
    """
    zeroed = 1.0 * itemsize * rows * dim
    added = 2.0 * unique * row_traffic(dim, itemsize, granularity)
    return zeroed + added + 1.0 * itemsize * bags * dim + 2 * _INDEX * lookups


def sparse_update_bytes(
    lookups: Values,
    unique: Values,
    dim: Values,
    *,
    optimizer: str = "sgd",
    itemsize: float = 4,
    granularity: float = 64,
) -> Values:
    r"""Traffic of an optimizer step on a sparse gradient, as torch does it.

    Parameters
    ----------
    lookups : float, array or expression
        Entries of the gradient, B L [-].
    unique : float, array or expression
        Distinct rows U [-].
    dim : int, array or expression
        Columns D [-].
    optimizer : str, optional
        ``sgd``, ``adagrad`` or ``sparse_adam`` [-].
    itemsize : float, optional
        Bytes of one number, e [B].
    granularity : float, optional
        Smallest access [B].

    Returns
    -------
    nbytes : same kind as the sizes
        Gradient, indices, and weights (and states) read and written [B].

    Raises
    ------
    ValueError
        For an optimizer that has no sparse step.

    Notes
    -----
    Plain SGD adds the entries one by one:

    .. math:: B L \left(e D + 8 + 2 R(eD)\right)

    Adagrad and SparseAdam first merge entries of the same row (coalesce), then update weights and S states:

    .. math:: B L (eD + 16) + U e D + 2 (1 + S) U R(eD)

    On a CPU the loop of plain SGD takes about 21 ns a lookup whatever D is: add that per lookup, see `lookup_time`.

    Examples
    --------
    >>> sparse_update_bytes(16384, 12000, 64), sparse_update_bytes(16384, 12000, 64, optimizer="adagrad")
    (12713984.0, 19816448.0)
    """
    check_choice("optimizer", optimizer, ("sgd", "adagrad", "sparse_adam"))
    values, row = 1.0 * itemsize * dim, row_traffic(dim, itemsize, granularity)
    if optimizer == "sgd":
        return lookups * (values + _INDEX + 2.0 * row)
    merged = lookups * (values + 2 * _INDEX) + unique * values
    return merged + 2.0 * (1.0 + STATE[optimizer]) * unique * row


def dense_update_bytes(rows: Values, dim: Values, *, optimizer: str = "sgd", itemsize: float = 4) -> Values:
    """Traffic of an optimizer step on a dense gradient: every row, looked up or not.

    Parameters
    ----------
    rows : int, array or expression
        Rows of the table, E [-].
    dim : int, array or expression
        Columns D [-].
    optimizer : str, optional
        A key of `perfkit.models.roofline.OPTIMIZER_TRAFFIC` [-].
    itemsize : float, optional
        Bytes of one number, e [B].

    Returns
    -------
    nbytes : same kind as the sizes
        Weights, gradients and states read and written [B].

    Examples
    --------
    >>> dense_update_bytes(1_000_000, 64)
    768000000.0
    """
    return optimizer_bytes(optimizer, 1.0 * rows * dim, itemsize=itemsize)


def lookup_time(
    level_bytes: Sequence[Values],
    bandwidths: Sequence[float],
    *,
    launch: float = 0.0,
    tables: Values = 1.0,
    per_table: float = 0.0,
    lookups: Values = 0.0,
    per_lookup: float = 0.0,
    sharpness: float = 2.0,
) -> Values:
    r"""Time of a lookup, gradient or update kernel from the bytes each level of the memory serves.

    Parameters
    ----------
    level_bytes : sequence of floats, arrays or expressions
        Bytes served by each level [B].
    bandwidths : sequence of float
        Bandwidth of each level [B/s].
    launch : float, optional
        Time of an empty kernel [s].
    tables : float, array or expression, optional
        Tables of the kernel [-].
    per_table : float, optional
        Time of one more table [s].
    lookups : float, array or expression, optional
        Lookups of the kernel [-].
    per_lookup : float, optional
        Time of one more lookup, whatever its bytes [s].
    sharpness : float, optional
        How completely the levels overlap: 1 adds their times, infinity takes the longest [-].

    Returns
    -------
    time : same kind as the sizes
        Time of the kernel [s].

    Notes
    -----
    .. math:: t = t_0 + T t_T + B L\, t_L + \left(\sum_l (n_l / W_l)^q\right)^{1/q}

    Examples
    --------
    54.6 MB of a V100 at the measured 817 GB/s; the kernel took 521.8 µs for eight such tables:

    >>> round(8 * float(lookup_time([forward_bytes(2048, 204800, 64, granularity=32)], [817e9])) * 1e6)
    535
    """
    times = [nbytes / bandwidth for nbytes, bandwidth in zip(level_bytes, bandwidths, strict=True)]
    return launch + per_table * tables + per_lookup * lookups + smooth_maximum(*times, sharpness=sharpness)


def table_memory(rows: Values, dim: Values, itemsize: float = 4, optimizer: str = "sgd") -> Values:
    """Memory of a table and its optimizer state.

    Parameters
    ----------
    rows : int, array or expression
        Rows of the table, E [-].
    dim : int, array or expression
        Columns D [-].
    itemsize : float, optional
        Bytes of one number, the same for weight and state [B].
    optimizer : str, optional
        A key of `STATE` [-].

    Returns
    -------
    nbytes : same kind as the sizes
        Weights and state; gradients and buffers come on top [B].

    Raises
    ------
    ValueError
        For an unknown optimizer; the message lists the known ones.

    Examples
    --------
    >>> table_memory(1_000_000, 64), table_memory(1_000_000, 64, optimizer="rowwise_adagrad")
    (256000000.0, 260000000.0)
    """
    per_row = 1.0 if check_choice("optimizer", optimizer, STATE) == "rowwise_adagrad" else 0.0
    return 1.0 * itemsize * rows * ((1.0 + STATE[optimizer]) * dim + per_row)
