"""Shapes in the times of a run over its sizes: kinks, a constant that is added, a late switch.

They are pure functions of sizes and times. What they mean is said by the signatures of causes.
"""

import math
from dataclasses import dataclass

import numpy as np

from perfkit.diagnosis.candidates import BYTES
from perfkit.diagnosis.expectations import INTERVAL
from perfkit.ground.units import Array

#: Bandwidth that falls by more than this from a size to the next is a kink [-]: in 26 curves of 13 logs
#: of healthy runs the deepest fall is 1.11 (docs/formulas.md, table 14.1).
KINK = 1.25
#: Where more bytes take less time than this, a slower protocol was kept for too long [-]: the same curves
#: have 0.97 at least.
_LATE = 0.85
#: Largest size whose time is start-up alone [B]: at 1 GB/s, 64 KiB take 66 µs, and no more on any link
#: that is worth a diagnosis.
SMALL = 65_536


@dataclass(frozen=True)
class Kink:
    """A size from which on the bandwidth is worse.

    Parameters
    ----------
    before, after : int
        The sizes on both sides [B].
    growth : float
        How much longer the larger one takes [-].
    rate_before, rate_after : float
        Their bandwidths, in units of those that were given [B/s].
    best_after : float
        Best bandwidth of any larger size [B/s].
    sizes : int
        How many sizes are slower than the one before [-].
    """

    before: int
    after: int
    growth: float
    rate_before: float
    rate_after: float
    best_after: float
    sizes: int

    @property
    def is_single(self) -> bool:
        """Whether one size alone stands out, and larger ones are as fast as before."""
        return self.sizes == 1 and self.best_after >= self.rate_before

    @property
    def recovers(self) -> bool:
        """Whether larger sizes are as fast as before."""
        return self.best_after >= self.rate_before


def find_kink(nbytes: Array, rates: Array) -> Kink | None:
    """Find the size at which the bandwidth falls most.

    A link gives more bandwidth to larger messages, or as much: time is at most proportional to bytes.
    Where it grows faster, something else than the link has changed.

    Parameters
    ----------
    nbytes : array, shape (sizes,)
        Sizes, ascending [B].
    rates : array, shape (sizes,)
        Bandwidth of each [B/s].

    Returns
    -------
    kink : Kink or None
        The deepest fall; None where no step falls by a fifth or more.

    Examples
    --------
    Twice the bytes take 3.2 times as long, and no larger message is as fast as before:

    >>> kink = find_kink(np.array([32.0, 64, 128, 256]), np.array([160.0, 187, 117, 130]))
    >>> kink.before, kink.after, round(kink.growth, 1), kink.recovers
    (64, 128, 3.2, False)
    """
    if len(nbytes) < 2:
        return None
    falls = rates[:-1] / rates[1:]
    worst = int(falls.argmax())
    if falls[worst] < KINK:
        return None
    before = float(rates[worst])
    slower = rates[worst + 1 :] < 0.95 * before
    recovered = np.flatnonzero(~slower)
    sizes = int(recovered[0]) if len(recovered) else len(slower)
    bytes_growth = float(nbytes[worst + 1] / nbytes[worst])
    return Kink(
        before=int(nbytes[worst]),
        after=int(nbytes[worst + 1]),
        growth=bytes_growth * float(falls[worst]),
        rate_before=before,
        rate_after=float(rates[worst + 1]),
        best_after=float(rates[worst + 1 :].max()),
        sizes=sizes,
    )


def count_turns(rates: Array) -> int:
    """Count how often a bandwidth falls to half or less and doubles again.

    Parameters
    ----------
    rates : array, shape (sizes,)
        Bandwidth by size, ascending [B/s].

    Returns
    -------
    turns : int
        Falls and rises by a factor of two, each from the last turn on; the first rise is none [-].

    Examples
    --------
    It falls, rises and falls again:

    >>> count_turns(np.array([10.0, 20, 9, 4, 18, 6])), count_turns(np.array([5.0, 10, 20, 40]))
    (3, 0)
    """
    turns = 0
    best = worst = rates[0] if len(rates) else 0.0
    falls = False
    for rate in rates:
        best = max(best, rate)
        worst = min(worst, rate)
        if not falls and rate <= best / 2:
            turns += 1
            falls, worst = True, rate
        elif falls and rate >= 2 * worst:
            turns += 1
            falls, best = False, rate
    return turns


@dataclass(frozen=True)
class LateSwitch:
    """A size that takes less time than a smaller one.

    Parameters
    ----------
    before, after : int
        The sizes on both sides [B].
    time_before, time_after : float
        Their times [s].
    """

    before: int
    after: int
    time_before: float
    time_after: float


def find_late_switch(nbytes: Array, seconds: Array) -> LateSwitch | None:
    """Find a size from which on messages are faster, in time, than smaller ones.

    The smaller ones use a protocol or an algorithm that is kept for too large messages. Sizes of
    start-up alone are left out, where times differ by noise.

    Parameters
    ----------
    nbytes : array, shape (sizes,)
        Sizes, ascending [B].
    seconds : array, shape (sizes,)
        Time of each [s].

    Returns
    -------
    switch : LateSwitch or None
        The largest gain; None where no step gains 15 %.

    Examples
    --------
    >>> find_late_switch(np.array([2.0**20, 2**21, 2**22]), np.array([181e-6, 389e-6, 143e-6]))
    LateSwitch(before=2097152, after=4194304, time_before=0.000389, time_after=0.000143)
    """
    large = nbytes > SMALL
    sizes = nbytes[large]
    times = seconds[large]
    if len(sizes) < 2:
        return None
    gains = times[1:] / times[:-1]
    best = int(gains.argmin())
    if gains[best] > _LATE:
        return None
    return LateSwitch(
        int(sizes[best]), int(sizes[best + 1]), float(times[best]), float(times[best + 1])
    )


#: Share of an expected time below which an addition cannot be told from an error of the bandwidth: half
#: of its 80 % interval [-].
_SEEN = math.exp(INTERVAL * BYTES) - 1


@dataclass(frozen=True)
class Addition:
    """Time that small messages take more than expected.

    Parameters
    ----------
    measured, expected : float
        Median of small messages, and what is expected of them [s].
    extra : float
        What is added [s].
    largest_constant : int
        The largest size up to which all have this constant added to them, as far as it can be seen: of
        larger ones it is a smaller share than the bandwidth is known to [B].
    """

    measured: float
    expected: float
    extra: float
    largest_constant: int


def find_addition(nbytes: Array, seconds: Array, expected: Array) -> Addition | None:
    """Find what is added to the time of small messages, and up to which size it is the same.

    Parameters
    ----------
    nbytes, seconds, expected : array, shape (sizes,)
        Sizes, ascending [B], measured and expected times [s].

    Returns
    -------
    addition : Addition or None
        What is added; None without small messages, or where nothing is.

    Examples
    --------
    The same 240 µs are added to 8 B, 1 MiB and 16 MiB:

    >>> sizes = np.array([8.0, 2**20, 2**24])
    >>> add = find_addition(sizes, np.array([260e-6, 285e-6, 450e-6]), np.array([20e-6, 45e-6, 210e-6]))
    >>> round(1e6 * add.extra), add.largest_constant
    (240, 16777216)
    """
    small = (nbytes <= SMALL) & np.isfinite(expected)
    if not small.any():
        return None
    measured = float(np.median(seconds[small]))
    usual = float(np.median(expected[small]))
    extra = measured - usual
    if extra <= 0:
        return None
    added = seconds - expected
    # within a factor of 1.5, as the expected time of middle sizes is known to about a third
    is_constant = (added > extra / 1.5) & (added < 1.5 * extra) & (extra > _SEEN * expected)
    last = int(np.flatnonzero(small)[-1])
    while last + 1 < len(nbytes) and is_constant[last + 1]:
        last += 1
    largest = nbytes[last]
    return Addition(measured, usual, extra, int(largest))
