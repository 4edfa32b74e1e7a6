"""Find the caches of a machine, and their effective capacities.

`find_caches` reads the levels off the times of growing working sets. `choose_caches` then tries
capacities around them, and takes those with which the kernels of `perfkit.calibration.fit_kernels`
are fitted best.
"""

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np

from perfkit.calibration.fit_kernels import (
    average_spread,
    count_traffic,
    fit_each_class,
    list_streams,
)
from perfkit.fitting import Caches, find_levels
from perfkit.measure.records import LadderStep, MeasuredKernel

#: Numbers of pages in a translation buffer to try [-].
_ENTRIES = (1024.0, 1536.0, 2048.0, 3072.0, 4096.0, 6144.0, 8192.0)

#: Effective cache capacities to try, as shares of stated ones and of measured ones [-].
_SHARES = ((0.5, 0.7, 0.9), (0.4, 0.5, 0.6, 0.75, 0.9))
_AROUND = (0.6, 0.8, 1.0, 1.25)


def find_caches(
    ladder: Sequence[LadderStep], kernels: Sequence[MeasuredKernel] = ()
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Find the caches in a ladder of working sets, or else in the streams among the kernels.

    Parameters
    ----------
    ladder : sequence of LadderStep
        From `perfkit.measure.timing.time_ladder`; empty if not measured.
    kernels : sequence of MeasuredKernel, optional
        Measured kernels.

    Returns
    -------
    capacities, bandwidths : tuple of float
        See `perfkit.fitting.find_levels`; empty if too few sizes were timed [B] and [B/s].
    largest : float
        Largest working set that was timed [B].
    """
    # size of the working set, bytes that a pass reads and writes, time of a pass
    if ladder:
        passes = [
            (float(step.nbytes), 2.0 * step.nbytes, float(np.percentile(step.stream, 25)))
            for step in ladder
        ]
    else:
        streams = [kernel for kernel in list_streams(kernels) if kernel.nbytes > 3e4]
        passes = [(kernel.nbytes, count_traffic(kernel), kernel.q1) for kernel in streams]
    points = np.array(passes, dtype=float)
    largest = float(points[:, 0].max()) if len(points) else 0.0
    if len(points) < 8 or largest < 16.0 * points[:, 0].min():
        return (), (), largest
    return *find_levels(*points.T), largest


def choose_caches(
    kernels: Sequence[MeasuredKernel],
    stated: Sequence[float],
    levels: Sequence[float],
    largest: float,
) -> Caches:
    """Choose the effective capacities of the caches, and then the pages of the translation buffer,
    by the smallest residuals of kernels.

    Parameters
    ----------
    kernels : sequence of MeasuredKernel
        Isolated kernels.
    stated : sequence of float
        Sizes that the operating system states, of the last two caches; empty where the levels are
        measured [B].
    levels : sequence of float
        Measured capacities, see `find_caches` [B].
    largest : float
        Largest working set that was timed [B].

    Returns
    -------
    caches : Caches
        ``l2``, ``l3`` [B], and ``pages`` [-] where lookups were timed.
    """
    flat = [kernel for kernel in kernels if kernel.kind in ("elementwise", "rowwise")]
    tables = [kernel for kernel in kernels if kernel.kind.startswith("embedding")]
    pairs = _pair_caches(stated, levels, largest)
    capacities = _choose(flat, ({"l2": near, "l3": far} for near, far in pairs))
    if tables:
        capacities = _choose(tables, (capacities | {"pages": entries} for entries in _ENTRIES))
    return Caches.build(
        capacities,
        n=len(kernels),
        ranges={"nbytes": (0.0, largest)},
        notes=("effective capacities, chosen from a coarse grid",),
    )


def _choose(
    kernels: Sequence[MeasuredKernel], tried: Iterable[dict[str, float]]
) -> dict[str, float]:
    """The capacities with which kernels are fitted best."""

    # A grid of a few dozen: an optimizer of scipy would fit all classes again for each of its steps,
    # and the capacities need no more than a digit.
    def find_residuals(capacities: dict[str, float]) -> float:
        return average_spread(fit_each_class(kernels, capacities))

    return min(tried, key=find_residuals)


def _pair_caches(
    stated: Sequence[float], levels: Sequence[float], largest: float
) -> list[tuple[float, float]]:
    """Capacities of the last two caches to try: shares of plausible stated ones, or around measured
    ones [B]."""
    near, far = stated[-2:] or (0.0, 0.0)
    if 0 < near < far < largest / 2:
        return [(one * near, other * far) for one, other in product(*_SHARES)]
    if len(levels) > 1:
        return [(one * levels[-2], other * levels[-1]) for one, other in product(_AROUND, _AROUND)]
    if not levels:  # a flat curve: all timed sizes fit into a cache
        beyond_all = 4.0 * max(largest, 1e6)
        return [(beyond_all, beyond_all)]
    # gathers may need a cache that streams do not show
    sizes = 2.0 ** np.arange(17.0, np.log2(levels[-1] / 3.0))
    return [
        (float(size), share * levels[-1]) for size, share in product((*sizes, levels[-1]), _AROUND)
    ]
