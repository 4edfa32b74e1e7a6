"""Memory levels from a curve: the caches that times of growing working sets show."""

import itertools

import numpy as np

from perfkit.ground.units import Array
from perfkit.models.caches import miss_share

_MOST = 3  # levels that are looked for


def find_levels(working_set: Array, moved: Array, seconds: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Find the caches that a curve of stream times shows.

    Parameters
    ----------
    working_set : array
        Bytes touched repeatedly, at least four different sizes [B].
    moved : array
        Bytes moved in each time [B].
    seconds : array
        Time of each pass over the working set [s].

    Returns
    -------
    capacities : tuple of float
        Effective size of each cache, from near to far; none where the curve is flat [B].
    bandwidths : tuple of float
        Of each cache and, last, of main memory [B/s].

    Notes
    -----
    A pass takes a fixed time, a time for each byte, and a further time for each byte that comes from beyond a cache
    (`perfkit.models.caches.miss_share`). Capacities are tried on a grid; coefficients are not negative. A further level
    must pay for its two parameters (BIC: Schwarz 1978, doi:10.1214/aos/1176344136) and be slower by 15 %.
    """
    from scipy.optimize import nnls

    def solve(capacities: tuple[float, ...]) -> tuple[float, tuple[float, ...], Array]:
        base = [1.0 / seconds, moved / seconds]
        columns = np.stack(
            [*base, *(miss_share(working_set, capacity=c) * moved / seconds for c in capacities)], axis=1
        )
        scale, count = columns.max(axis=0), len(seconds)
        found, error = nnls(columns / scale, np.ones(count))
        score = count * np.log(max(error**2 / count, 1e-8)) + 2 * len(capacities) * np.log(count)
        return float(score), capacities, found / scale

    low, high = np.log2(working_set.min()) + 1.0, np.log2(working_set.max()) - 1.0
    grid = [float(size) for size in 2.0 ** np.arange(low, high + 0.01, 0.5)]
    apart = [c for n in range(_MOST + 1) for c in itertools.combinations(grid, n) if all(map(_apart, c, c[1:]))]
    best = min(map(solve, apart), key=lambda found: found[0])
    for step in np.exp2((0.25, -0.25)):  # between the points of the grid
        for i in range(len(best[1])):
            best = min(
                best, solve((*best[1][:i], best[1][i] * float(step), *best[1][i + 1 :])), key=lambda found: found[0]
            )
    slopes = np.cumsum(best[2][1:])
    kept = [i for i in range(len(best[1])) if slopes[i + 1] > 1.15 * slopes[i] > 0]
    rates = (1.0 / max(float(slopes[i]), 1e-15) for i in [*kept, len(best[1])])
    return tuple(best[1][i] for i in kept), tuple(rates)


def _apart(near: float, far: float) -> bool:
    return far >= 4.0 * near
