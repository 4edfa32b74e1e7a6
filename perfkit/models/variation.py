"""How the times of ranks vary: what is random from step to step, what one rank does in every step, and
what all ranks do in one step; and how the slowest of several ranks varies."""

from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Array

#: Standard deviations to each side, and points, over which `deviation_of_slowest` integrates [-].
_FARTHEST, _POINTS = 12.0, 4801


class Variation(NamedTuple):
    """Standard deviations of times of ranks and steps.

    Parameters
    ----------
    mean : float
        Of all times [s].
    random : float
        Of one time, without the differences below [s].
    persistent : float or None
        Between ranks, in every step; None where one step or one rank does not tell [s].
    common : float or None
        Between steps, of all ranks together; None where it is not told [s].
    freedom : int
        Degrees of freedom of the random part [-].
    """

    mean: float
    random: float
    persistent: float | None
    common: float | None
    freedom: int


def split_variation(times: Array) -> Variation:
    r"""Split the variation of times of ranks and steps into three parts.

    Parameters
    ----------
    times : array, (ranks, steps)
        Time of each rank in each step [s].

    Returns
    -------
    variation : Variation
        Its parts. With one rank or one step all of it counts as random.

    Raises
    ------
    ValueError
        For one time alone, and for times that are no numbers above 0.

    Notes
    -----
    .. math::

        t_{rs} = \mu + a_r + b_s + e_{rs}, \quad
        \hat\sigma_e^2 = \frac{\sum (t_{rs} - \bar t_r - \bar t_s + \bar t)^2}{(R - 1)(S - 1)}, \quad
        \hat\sigma_a^2 = \frac{\sum (\bar t_r - \bar t)^2}{R - 1} - \frac{\hat\sigma_e^2}{S}

    and so with steps for ranks: an analysis of variance of two ways without repetition [1]_. A part below 0 is 0.

    References
    ----------
    .. [1] H. Scheffe, "The Analysis of Variance", Wiley, 1959, chapter 7

    Examples
    --------
    Two ranks, of which the second is slower by 2 s in both steps, and steps that differ by 4 s:

    >>> split_variation([[10.0, 14.0], [12.0, 16.0]])
    Variation(mean=13.0, random=0.0, persistent=1.4142135623730951, common=2.8284271247461903, freedom=1)
    """
    table = np.asarray(times, dtype=float)
    if table.ndim != 2 or table.size < 2:
        raise ValueError(
            f"times has the shape {table.shape}; it must be (ranks, steps) with two times or more: one time "
            "of one rank does not tell how it varies"
        )
    if not (np.isfinite(table).all() and (table > 0).all()):
        raise ValueError(
            "times has an entry that is not above 0; give seconds of each rank and step"
        )
    ranks, steps = table.shape
    mean = table.mean()
    if ranks == 1 or steps == 1:
        deviation = float(table.std(ddof=1))
        return Variation(float(mean), deviation, None, None, table.size - 1)
    of_rank = table.mean(axis=1) - mean
    of_step = table.mean(axis=0) - mean
    rest = table - mean - of_rank[:, np.newaxis] - of_step
    freedom = (ranks - 1) * (steps - 1)
    random = (rest**2).sum() / freedom
    persistent = (of_rank**2).sum() / (ranks - 1) - random / steps
    common = (of_step**2).sum() / (steps - 1) - random / ranks
    return Variation(
        mean=float(mean),
        random=float(random**0.5),
        persistent=float(max(persistent, 0.0) ** 0.5),
        common=float(max(common, 0.0) ** 0.5),
        freedom=freedom,
    )


@closed_form()
def deviation_of_slowest(*, ranks: int) -> Any:
    r"""Standard deviation of the time of the slowest rank, over that of one rank.

    Parameters
    ----------
    ranks : int
        Ranks whose times vary independently, each with the same normal distribution [-].

    Returns
    -------
    share : float
        1 of one rank, and less of more [-].

    Notes
    -----
    .. math:: \sqrt{\mathrm{Var} \max(z_1, \ldots, z_p)}

    of p standard normal numbers [1]_: 0.826 of two, 0.587 of ten, 0.429 of a hundred.

    References
    ----------
    .. [1] D. Teichroew, "Tables of expected values of order statistics and products of order statistics for
       samples of size twenty and less from the normal distribution", Annals of Mathematical Statistics 27, 1956

    Examples
    --------
    >>> [round(float(deviation_of_slowest(ranks=ranks)), 4) for ranks in (1, 2, 10)]
    [1.0, 0.8256, 0.5868]
    """
    from scipy import special

    x = np.linspace(-_FARTHEST, _FARTHEST, _POINTS)
    # density of the largest, by logarithms, as powers of many ranks are too small for a number
    log_density = np.log(ranks) - x**2 / 2.0 + (ranks - 1.0) * special.log_ndtr(x)
    weights = np.exp(log_density - log_density.max())
    weights /= weights.sum()
    mean = weights @ x
    return float(weights @ (x - mean) ** 2) ** 0.5
