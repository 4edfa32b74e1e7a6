"""Failures of a long run: how often to write a checkpoint, how long the run takes with what it has to
do again, and how likely it is done by a time; and how long ranks wait for the slowest of them.

A run is cut into equal segments: each is some work and one checkpoint after it. Failures come at
random with a constant rate, also while a checkpoint is written and while the job restarts. A failure
throws away what the segment has done so far.
"""

from typing import Any, NamedTuple

import numpy as np

from perfkit.ground.forms import closed_form
from perfkit.ground.units import Array, Values

#: Standard deviations beside the mean number of failures that `chance_done` adds up [-]: what is beyond
#: has a probability of 1e-15.
_FAR = 8.0
#: Most failures that `chance_done` adds up one by one [-]: beyond them what they add has a gamma
#: distribution, exponential with one segment and as good as normal with many.
_MOST_FAILURES = 1_000.0
#: Standard deviations to each side, and points, over which `wait_for_slowest` integrates [-].
_FARTHEST, _POINTS = 12.0, 2401


class _Moments(NamedTuple):
    """Mean [s] and variance [s2] of a random time."""

    mean: Any
    variance: Any

    @property
    def square(self) -> Any:
        """Mean of the square [s2]."""
        return self.variance + self.mean**2


class _FailedAttempt(NamedTuple):
    """Probability that an attempt fails [-]; the mean of the time until the failure [s] and of its square
    [s2], both times this probability."""

    chance: Any
    until: Any
    until_square: Any

    @classmethod
    def within(cls, length: Any, mtbf: float) -> "_FailedAttempt":
        """An attempt of so much time [s]; incomplete gamma functions lose no digits if failures are rare."""
        from scipy import special

        share = length / mtbf
        return cls(
            chance=-np.expm1(-share),
            until=mtbf * special.gammainc(2.0, share),
            until_square=2.0 * mtbf**2 * special.gammainc(3.0, share),
        )


@closed_form()
def young_interval(checkpoint: Values, *, mtbf: float) -> Values:
    r"""Time of work between two checkpoints that loses least, to first order.

    Parameters
    ----------
    checkpoint : float or array
        Time for which one checkpoint stops the run [s].
    mtbf : float
        Mean time between failures of the whole job [s].

    Returns
    -------
    interval : same kind as `checkpoint`
        Work between two checkpoints [s].

    Notes
    -----
    .. math:: \tau = \sqrt{2 \delta M}

    A checkpoint of 120 s on a cluster that fails each 6 h: 38 minutes.

    References
    ----------
    .. [1] J. W. Young, "A first order approximation to the optimum checkpoint interval",
       Communications of the ACM 17(9), 1974

    Examples
    --------
    >>> round(float(young_interval(120.0, mtbf=6 * 3600.0)) / 60)
    38
    """
    return (2.0 * mtbf * checkpoint) ** 0.5


@closed_form()
def daly_interval(checkpoint: Values, *, mtbf: float) -> Values:
    r"""Time of work between two checkpoints that loses least, to higher order.

    Parameters
    ----------
    checkpoint : float or array
        Time for which one checkpoint stops the run [s].
    mtbf : float
        Mean time between failures of the whole job [s].

    Returns
    -------
    interval : same kind as `checkpoint`
        Work between two checkpoints [s].

    Notes
    -----
    .. math::

        \tau = \sqrt{2 \delta M} \left(1 + \frac{1}{3} \sqrt{\frac{\delta}{2 M}} +
        \frac{1}{9} \frac{\delta}{2 M}\right) - \delta

    for :math:`\delta < 2 M`, else :math:`M`. The time of a restart has no part in it. It stays within 0.6 % of
    the exact optimum for checkpoints below half of `mtbf`.

    References
    ----------
    .. [1] J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
       Future Generation Computer Systems 22(3), 2006, doi:10.1016/j.future.2004.11.016

    Examples
    --------
    The three examples of the paper: a checkpoint of 5 minutes, failures each 24 h, 6 h and 15 minutes.

    >>> [round(float(daly_interval(5.0, mtbf=mtbf)), 1) for mtbf in (1440.0, 360.0, 15.0)]
    [116.7, 56.7, 9.1]
    """
    share = checkpoint / (2.0 * mtbf)
    first_order = young_interval(checkpoint, mtbf=mtbf)
    short = first_order * (1.0 + share**0.5 / 3.0 + share / 9.0) - checkpoint
    is_short = share < 1.0
    return short * is_short + mtbf * (1.0 - is_short)


@closed_form()
def segment_time(length: Values, *, mtbf: float, restart: float = 0.0) -> Values:
    r"""Expected time until a segment of a run is done, with what failures make it do again.

    Parameters
    ----------
    length : float or array
        Work of the segment and the checkpoint after it [s].
    mtbf : float
        Mean time between failures of the whole job [s].
    restart : float, optional
        From a failure until the run goes on: detection, new nodes, reading the checkpoint, first
        iterations [s].

    Returns
    -------
    seconds : same kind as `length`
        Mean of all that can happen [s].

    Notes
    -----
    .. math:: M e^{R / M} \left(e^{L / M} - 1\right)

    Failures may follow each other during a restart, which begins again. Work :math:`\tau` over this time with
    :math:`L = \tau + \delta` is the goodput.

    References
    ----------
    .. [1] J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
       Future Generation Computer Systems 22(3), 2006, doi:10.1016/j.future.2004.11.016

    Examples
    --------
    A cluster of 16,000 GPUs with 6.5 failures in 1,000 days of a node, checkpoints each 5 minutes that
    stop nothing, restarts of 5 minutes: Meta states 0.93.

    >>> mtbf = 24 * 60 / (2000 * 0.0065)
    >>> round(5.0 / float(segment_time(5.0, mtbf=mtbf, restart=5.0)), 2)
    0.93
    """
    return mtbf * np.exp(restart / mtbf) * np.expm1(length / mtbf)


def _find_delay(length: Any, mtbf: float, restart: _Moments) -> _Moments:
    """What failures add to the time of a stretch that has to pass without one, when each costs a restart."""
    attempt = _FailedAttempt.within(length, mtbf)
    passes = np.exp(-length / mtbf)
    mean = (attempt.until + attempt.chance * restart.mean) / passes
    again = restart.square + 2.0 * restart.mean * mean
    square = (
        attempt.until_square + 2.0 * attempt.until * (restart.mean + mean) + attempt.chance * again
    ) / passes
    return _Moments(mean, np.maximum(square - mean**2, 0.0))


def _find_restart(restart: float, mtbf: float) -> _Moments:
    """Time of a restart, which begins again if it fails."""
    delay = _find_delay(restart, mtbf, _Moments(0.0, 0.0))
    return _Moments(restart + delay.mean, delay.variance)


@closed_form()
def segment_variance(length: Values, *, mtbf: float, restart: float = 0.0) -> Values:
    r"""Variance of the time until a segment of a run is done.

    Parameters
    ----------
    length : float or array
        Work of the segment and the checkpoint after it [s].
    mtbf : float
        Mean time between failures of the whole job [s].
    restart : float, optional
        From a failure until the run goes on [s].

    Returns
    -------
    variance : same kind as `length`
        Mean square deviation from `segment_time` [s2].

    Notes
    -----
    An attempt passes, or a failure throws it away and the same begins again after a restart. That gives mean
    and mean square of the delay D = X - L, with F the time until the failure and Y the restart:

    .. math:: E[D^2] = E[(F + Y + D)^2; F < L]

    A restart is such a stretch itself.

    Examples
    --------
    >>> float(segment_variance(100.0, mtbf=1e12)) < 1e-3
    True
    """
    return _find_delay(length, mtbf, _find_restart(restart, mtbf)).variance


def _find_cost(attempt: _FailedAttempt, restart: _Moments) -> _Moments:
    """Time that one failure costs: what the attempt had done until it, and a restart."""
    until = attempt.until / attempt.chance
    variance = attempt.until_square / attempt.chance - until**2 + restart.variance
    return _Moments(until + restart.mean, variance)


def _find_chances_of_counts(counts: Array, segments: float, share: float) -> Array:
    """Probability of each number of failures until all segments are done, each of this share of the mean
    time between failures: a negative binomial distribution [-]."""
    from scipy import special

    # by logarithms, as factorials of many failures are too large for a number
    logarithm = (
        special.gammaln(counts + segments)
        - special.gammaln(segments)
        - special.gammaln(counts + 1.0)
        - segments * share
        + special.xlogy(counts, -np.expm1(-share))
    )
    chances: Array = np.exp(logarithm)
    # differences of large logarithms lose digits
    return chances / chances.sum()


@closed_form()
def chance_done(
    seconds: Values, *, segments: float, length: float, mtbf: float, restart: float = 0.0
) -> Array:
    r"""Probability that a run is done by a time, if failures alone are uncertain.

    Parameters
    ----------
    seconds : float or array
        Time since its start [s].
    segments : int
        Segments of the run [-].
    length : float
        Work of a segment and the checkpoint after it [s].
    mtbf : float
        Mean time between failures of the whole job [s].
    restart : float, optional
        From a failure until the run goes on [s].

    Returns
    -------
    chance : array, shape of `seconds`
        From 0 to 1 [-].

    Notes
    -----
    .. math:: P(T \le t) = \sum_k P(K = k)\, \Phi\left(\frac{t - n L - k c}{s \sqrt{k}}\right)

    K failures of n segments have a negative binomial distribution. Each costs c with a standard deviation s:
    the time until it, below L, and a restart, which failures make longer. The sum of k such costs is taken as
    normal above k R; without a failure the run takes n L. Beyond 1,000 expected failures what they add has a
    gamma distribution of the same mean and variance. A simulation that draws failures one by one differs by at most
    0.03 (tests/test_failures.py).

    Examples
    --------
    A run of one segment that fails before its end with a probability of 1 - 1/e:

    >>> round(float(chance_done(100.0, segments=1, length=100.0, mtbf=100.0)), 3)
    0.368
    """
    from scipy import special

    attempt = _FailedAttempt.within(length, mtbf)
    cost = _find_cost(attempt, _find_restart(restart, mtbf))
    deviation = cost.variance**0.5
    late = np.asarray(seconds, dtype=float) - segments * length
    # failures of all segments
    survives = np.exp(-length / mtbf)
    mean_count = segments * attempt.chance / survives
    count_deviation = (mean_count / survives) ** 0.5
    if mean_count > _MOST_FAILURES:
        mean = mean_count * cost.mean
        variance = mean_count * deviation**2 + (count_deviation * cost.mean) ** 2
        return np.asarray(special.gammainc(mean**2 / variance, late.clip(0.0) * mean / variance))
    least = np.floor(max(mean_count - _FAR * count_deviation, 0.0))
    # the tail in few segments is geometric, and that of few failures is Poisson's, both longer than that
    # of a normal distribution
    few_segments = 2.0 * _FAR / segments**0.5
    few_failures = _FAR**2 / 3.0  # Bernstein's inequality
    most = np.ceil(mean_count + _FAR * count_deviation * (1.0 + few_segments) + few_failures)
    counts = np.arange(least, most + 1.0)
    chances = _find_chances_of_counts(counts, segments, length / mtbf)
    width = deviation * np.maximum(counts, 1.0) ** 0.5
    # a failure costs a restart at least
    never = special.ndtr(counts * (restart - cost.mean) / width)
    below = special.ndtr((late[..., np.newaxis] - counts * cost.mean) / width)
    done = np.maximum(below - never, 0.0) / (1.0 - never)
    # none is before its time, and a run without a failure is done then
    done = np.where(counts == 0, 1.0, done)
    is_over = late[..., np.newaxis] >= -1e-9 * segments * length
    return np.asarray(np.sum(chances * done * is_over, axis=-1).clip(0.0, 1.0))


@closed_form()
def wait_for_slowest(jitter: Values, *, ranks: int) -> Values:
    r"""How much longer an iteration takes because all ranks wait for the slowest one.

    Parameters
    ----------
    jitter : float or array
        Standard deviation of the time that a rank takes for an iteration, over its mean [-].
    ranks : int
        Ranks that wait for each other once in an iteration [-].

    Returns
    -------
    share : same kind as `jitter`
        What is added, over the time of the mean rank [-].

    Notes
    -----
    .. math:: \sigma \int_{-\infty}^{\infty} x\, p\, \varphi(x)\, \Phi(x)^{p - 1} dx

    The expected largest of p normal numbers [1]_: 0.564 of two, 1.539 of ten, 2.508 of a hundred, 3.241 of a
    thousand. It is the same whether ranks are slow for ever or in turns. Where ranks wait s times in an
    iteration and are slow in turns, it is up to the root of s times as much.

    References
    ----------
    .. [1] H. L. Harter, "Expected values of normal order statistics", Biometrika 48, 1961

    Examples
    --------
    >>> [round(float(wait_for_slowest(1.0, ranks=ranks)), 3) for ranks in (1, 2, 10, 100)]
    [0.0, 0.564, 1.539, 2.508]
    """
    from scipy import special

    x = np.linspace(-_FARTHEST, _FARTHEST, _POINTS)
    # the largest is above x with 1 - below^ranks; the integral of it over x, from the left end on
    exceeds = -np.expm1(ranks * special.log_ndtr(x))
    largest = float(np.trapezoid(exceeds, x)) - _FARTHEST
    return jitter * max(largest, 0.0)
