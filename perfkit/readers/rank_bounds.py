"""Ranks that explain printed bandwidths: the ratio of bus to algorithm bandwidth is the bus factor of
one number of ranks (NVIDIA, nccl-tests, doc/PERFORMANCE.md)."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from perfkit.models.collectives import OPERATIONS, bus_factor

#: A rate of fewer halves of its last printed digit is too coarse to be read [-]. Choice: it may be 5 %
#: off, and the ratio of two such rates 10 %, where the bus factors of an all_reduce of 4 and of 5 ranks
#: are 7 % apart.
LEAST_HALVES = 20
_COUNTS = np.arange(1, 2**17)  # numbers of ranks that are tried [-]


class RankRange(NamedTuple):
    """Fewest and most ranks that explain every row; the most are 0 where none do, and infinite
    where they are not bounded."""

    fewest: int
    most: float


class FactorBounds(NamedTuple):
    """Bounds of the bus factor of each row, by its printed digits."""

    low: np.ndarray  # 0 for rows that say too little
    high: np.ndarray  # and infinite


def bound_factors(
    algbw: np.ndarray, algbw_half: np.ndarray, busbw: np.ndarray, busbw_half: np.ndarray
) -> FactorBounds:
    """Bound the bus factor, busbw / algbw, by the printed digits of both.

    Parameters
    ----------
    algbw, algbw_half : numpy.ndarray
        Algorithm bandwidth of each row, and half of its last printed digit [-].
    busbw, busbw_half : numpy.ndarray
        Bus bandwidth of each row in the same unit, and half of its last printed digit [-].

    Returns
    -------
    bounds : FactorBounds
        Bounds of each row [-].

    Examples
    --------
    >>> low, high = bound_factors(*np.array([[100.0], [0.5], [175.0], [0.5]]))
    >>> low.round(3), high.round(3)
    (array([1.736]), array([1.764]))
    """
    telling = algbw > LEAST_HALVES * algbw_half
    low = np.where(telling, (busbw - busbw_half) / (algbw + algbw_half), 0.0)
    most_busbw = np.where(telling, busbw + busbw_half, np.inf)
    least_algbw = np.where(telling, algbw - algbw_half, 1.0)
    return FactorBounds(low, most_busbw / least_algbw)


def bound_ranks(low: float, high: float, operation: str) -> RankRange:
    """Find the ranks whose bus factor lies between two bounds.

    Parameters
    ----------
    low, high : float
        Bounds of busbw / algbw that every row allows [-].
    operation : str
        Operation; nothing is known of a name that `perfkit.models.collectives` lacks.

    Returns
    -------
    ranks : RankRange
        Fewest and most of them; 1 and 0 where none fit.

    Examples
    --------
    >>> bound_ranks(1.74, 1.76, "all_reduce")
    RankRange(fewest=8, most=8)
    >>> bound_ranks(0.99, 1.01, "all_gather").most
    inf
    """
    if operation not in OPERATIONS:
        return RankRange(1, math.inf)
    factors = _list_factors(operation)
    fitting = _COUNTS[(factors >= low) & (factors <= high)]
    if not len(fitting):
        return RankRange(1, 0)
    fewest = int(fitting[0])
    most = int(fitting[-1])
    is_open = most == _COUNTS[-1]
    return RankRange(fewest, math.inf if is_open else most)


@cache
def _list_factors(operation: str) -> np.ndarray:
    """Bus factors of all numbers of ranks that are tried."""
    return np.asarray(bus_factor(operation, _COUNTS) * np.ones(len(_COUNTS)))
