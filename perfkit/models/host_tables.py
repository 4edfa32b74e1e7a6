"""Embedding tables whose rows lie in host memory: what kernels of a GPU read and write over the link
to the host, with and without a cache in device memory.

The constants are of FBGEMM on an H100 of 80 GB, from 24 published times of a table of 8,388,608 rows
of 128 fp32 numbers; `python -m benchmarks.host_tables` fits them again and judges them on a table of
67,108,864 rows. docs/formulas.md, table 3.3.
"""

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Values

#: Time that a read over the link is on its way [s]. Lookups of a row that is on its way share one
#: read; nothing else keeps rows of the host near the GPU.
FLIGHT = 0.94e-6
#: Time of a row that is read and written back over the time of one that is only read [-]; 2 if no
#: write ran beside a read, 1 if all did.
BOTH_WAYS = 1.26
#: What a lookup costs a cache: sorting, finding and marking its row [s].
CACHE_LOOKUP = 2.1e-9
#: What starts, and on the device follows, each kernel of a rank: keeping a cache, and updates of
#: tables with a cache and without one [s].
CACHE_START, CACHE_UPDATE_START, UVM_UPDATE_START = 1.34e-4, 1.9e-4, 1.25e-4


@closed_form()
def read_from_host(
    lookups: Values, row_bytes: Values, *, bandwidth: Values, misses: Values = 1.0
) -> Values:
    r"""Time of lookups that read rows of host memory over the link.

    Parameters
    ----------
    lookups : float, array or expression
        Lookups N [-].
    row_bytes : float, array or expression
        Bytes of a row R [B].
    bandwidth : float, array or expression
        Of the link, one way, B [B/s].
    misses : float, array or expression, optional
        Share of the lookups whose row is not on its way already, m: `perfkit.models.caches.lru_misses`
        of a cache of B times `FLIGHT` bytes [-].

    Returns
    -------
    seconds : same kind as `lookups`
        Time [s].

    Notes
    -----
    .. math:: m N R / B

    Repeated rows are read again and again: an H100 with 50 MB of L2 reads 71 GB/s of looked-up bytes
    over a link of 55 GB/s from a table of which one batch touches 14 MB, and just as much where it
    touches 170 MB.

    Examples
    --------
    >>> read_from_host(1_000_000, 512, bandwidth=51.2e9, misses=0.8)
    0.008
    """
    return misses * lookups * row_bytes / bandwidth


@closed_form()
def update_on_host(
    rows: Values, row_bytes: Values, *, bandwidth: Values, states: Values = 0.0
) -> Values:
    r"""Time of updates that read rows and states of host memory and write them back.

    Parameters
    ----------
    rows : float, array or expression
        Rows that are updated U: the distinct ones of a batch where the kernel sorts lookups [-].
    row_bytes : float, array or expression
        Bytes of a row R [B].
    bandwidth : float, array or expression
        Of the link, one way, B [B/s].
    states : float, array or expression, optional
        Numbers s that the optimizer keeps in host memory for each weight [-].

    Returns
    -------
    seconds : same kind as `rows`
        Time [s].

    Notes
    -----
    .. math:: 1.26 (1 + s) U R / B

    Examples
    --------
    >>> round(update_on_host(100_000, 512, bandwidth=51.2e9, states=2), 9)
    0.00378
    """
    return BOTH_WAYS * (1.0 + states) * rows * row_bytes / bandwidth


@closed_form()
def keep_cache(lookups: Values, missed: Values, row_bytes: Values, *, bandwidth: Values) -> Values:
    r"""Time that a cache of rows in device memory takes before its table is looked up.

    Parameters
    ----------
    lookups : float, array or expression
        Lookups N [-].
    missed : float, array or expression
        Rows M that come from the host, each in place of one that goes back [-].
    row_bytes : float, array or expression
        Bytes of a row R [B].
    bandwidth : float, array or expression
        Of the link, one way, B [B/s].

    Returns
    -------
    seconds : same kind as `lookups`
        Time, without `CACHE_START` [s].

    Notes
    -----
    .. math:: t_c N + 1.26 M R / B

    Examples
    --------
    >>> round(keep_cache(1_000_000, 100_000, 512, bandwidth=51.2e9) - 1e6 * CACHE_LOOKUP, 9)
    0.00126
    """
    return CACHE_LOOKUP * lookups + BOTH_WAYS * missed * row_bytes / bandwidth
