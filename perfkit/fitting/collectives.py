"""Fits of collectives: one curve of time over size, and a law over rank counts, both in log
space."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from perfkit.fitting.models import CollectiveModel, OverRanks, Pipelined, TwoBranch
from perfkit.fitting.regression import COLUMNS, check_column, check_times
from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import Array, Values, format_bytes, format_time
from perfkit.models.collectives import ring_steps

#: Residual of the logarithm above which a point counts less [-]; docs/formulas.md, table 1.3.
SCALE = 0.1
#: Spread before any size is left out [-]; docs/formulas.md, table 1.3.
PRIOR = 0.1
#: How many points that spread counts for [-]; docs/formulas.md, table 1.3.
TRUST = 4
#: Smallest share of the start-up at the smallest size, and of the transfer at the largest, for a
#: form with more than two parameters [-]; docs/formulas.md, table 1.3.
SEEN = 0.85
#: Most sizes that a curve is fitted to [-]: more take minutes, and say no more.
MOST_SIZES = 400
#: Half width of an 80 % interval, in standard deviations of the logarithm [-].
INTERVAL = 1.2816
#: Factor by which a curve may miss its largest size without a note [-]; docs/formulas.md, table 1.3.
MISSED_LARGEST = 1.35
#: Factor by which it may miss any size without a note [-]; docs/formulas.md, table 1.3.
MISSED = 1.5


@dataclass(frozen=True)
class Curve:
    """A form of `perfkit.models.collectives` at measured points, ready to be fitted."""

    model: type[CollectiveModel]
    names: tuple[str, ...]  # fitted parameters: start-ups, times per byte, sometimes the sharpness
    sizes: Array  # logarithms of message sizes, shape (points,)
    times: Array  # logarithms of measured times, shape (points,)
    columns: Array  # factors of each start-up, then of each time per byte, shape (parts, points)
    sharpness: float | None  # exponent of the smooth maximum; None where it is fitted
    starts: Array  # logarithms of parameters to start from, shape (starts, parameters)
    low: Array  # bounds of the logarithms, shape (parameters,)
    high: Array

    def evaluate(self, p: Array) -> tuple[Array, Array]:
        """Logarithms of time, shape (problems, points), and their slopes over the logarithms of the
        parameters, shape (problems, parameters, points)."""
        if self.model is not TwoBranch:
            return self._join(p)
        # the branches of all problems as problems of their own
        values, slopes = self._join(p.reshape(-1, 2))
        small, large = values[::2], values[1::2]
        is_small = small <= large
        slopes = slopes.reshape(len(p), 2, 2, -1)
        slopes[:, 0] *= is_small[:, None]
        slopes[:, 1] *= ~is_small[:, None]
        return np.minimum(small, large), slopes.reshape(len(p), 4, -1)

    def _join(self, p: Array) -> tuple[Array, Array]:
        """Smooth maximum of start-up and transfer; its slopes are the shares of both."""
        count = len(self.columns)
        if self.sharpness is None:
            sharpness = np.exp(p[:, count:])
        else:
            sharpness = np.full((1, 1), self.sharpness)
        if count == 2:  # one start-up, and one time per byte
            start_up, transfer = p[:, :1], p[:, 1:2] + self.sizes
        else:
            parts = np.exp(p[:, :count, None]) * self.columns
            sums = parts.reshape(len(p), 2, count // 2, -1).sum(axis=2)
            start_up, transfer = np.log(sums[:, 0]), np.log(sums[:, 1]) + self.sizes
        distance = sharpness * (transfer - start_up)
        # log(1 + exp(distance)) and 1 / (1 + exp(distance)) without an overflow
        small = np.exp(-np.abs(distance))
        value = start_up + (np.maximum(distance, 0.0) + np.log1p(small)) / sharpness
        share = np.where(distance > 0.0, small, 1.0) / (1.0 + small)
        slopes = np.empty((len(p), p.shape[1], len(self.sizes)))
        half = count // 2
        slopes[:, :half] = share[:, None]
        slopes[:, half:count] = 1.0 - share[:, None]
        if count > 2:
            slopes[:, :count] *= parts / np.repeat(sums, half, axis=1)
        if self.sharpness is None:
            slopes[:, count] = share * start_up + (1.0 - share) * transfer - value
        return value, slopes

    def solve(self, weights: Array, starts: Array | None = None) -> Array:
        """Logarithms of the best parameters for each row of weights of the points, by damped
        Gauss-Newton steps (Levenberg and Marquardt) from each start."""
        # By hand: each point is left out once, from several starts, and all these problems are
        # solved together as arrays. A loop over scipy.optimize.least_squares finds the same
        # parameters and takes 30 times as long for 17 sizes (tests/test_fitting_collectives.py).
        starts = self.starts if starts is None else starts
        w = np.repeat(weights, len(starts), axis=0)
        p = np.clip(np.tile(starts, (len(weights), 1)), self.low, self.high)
        value, slopes = self.evaluate(p)
        residuals = self.times - value
        roots = _find_roots(residuals)
        cost = _cost(roots, w)
        damping = np.full(len(p), 1e-3)
        identity = np.eye(len(self.names))
        for _ in range(60):
            weighed = slopes * (w / roots)[:, None]
            normal = weighed @ np.swapaxes(slopes, 1, 2) + 1e-9 * identity
            scale = np.maximum(np.einsum("bii->bi", normal), 1e-6) * damping[:, None]
            pull = weighed @ residuals[..., None]
            step = np.linalg.solve(normal + scale[:, None] * identity, pull)[..., 0]
            trial = np.clip(p + np.clip(step, -2.0, 2.0), self.low, self.high)
            trial_value, trial_slopes = self.evaluate(trial)
            trial_residuals = self.times - trial_value
            trial_roots = _find_roots(trial_residuals)
            trial_cost = _cost(trial_roots, w)
            better = trial_cost < cost
            gain = np.maximum(cost - trial_cost, 0.0)
            p[better] = trial[better]
            residuals[better] = trial_residuals[better]
            roots[better] = trial_roots[better]
            slopes[better] = trial_slopes[better]
            cost = np.minimum(cost, trial_cost)
            damping = np.clip(np.where(better, damping / 5.0, damping * 5.0), 1e-9, 1e9)
            if better.any() and gain.max() < 1e-9 * max(float(cost.max()), 1e-6):
                break
        # of all starts of a problem the best
        best = cost.reshape(len(weights), -1).argmin(axis=1)
        by_problem = p.reshape(len(weights), -1, len(self.names))
        return np.asarray(by_problem[np.arange(len(weights)), best])

    def leave_out(self, groups: Array | None = None) -> tuple[Array, Array]:
        """Fit all points, and again without each group; return the parameters and the residuals of
        left-out points.

        Without `groups` each point is a group, or every 24th of many points.
        """
        n = len(self.times)
        numbers = np.arange(n) % min(n, 24) if groups is None else groups
        folds = (numbers == np.unique(numbers)[:, None]).astype(float)
        logs, left_out = self.solve(np.ones((1, n))), np.zeros(0)
        if (1.0 - folds).sum(axis=1).min() >= len(self.names):
            again = self.solve(1.0 - folds, np.concatenate([logs, self.starts]))
            left_out = np.sum((self.times - self.evaluate(again)[0]) * folds, axis=0)
        # the branch of small messages first
        if self.model is TwoBranch and logs[0, 0] > logs[0, 2]:
            logs = np.roll(logs, 2, axis=1)
        return logs[0], left_out

    def build(
        self,
        logs: Array,
        left_out: Array,
        ranges: Mapping[str, Array],
        source: str,
        date: str = "",
        note: str = "",
        judged: bool = True,
    ) -> CollectiveModel:
        """Turn logarithms into parameters with standard errors, and residuals of left-out points
        into the spread; it is widened for a size that the curve misses, if times are `judged`."""
        values_of_one, slopes_of_one = self.evaluate(logs[None])
        value, slopes = values_of_one[0], slopes_of_one[0]
        residuals = self.times - value
        trust = 1.0 / _find_roots(residuals)
        degrees = max(len(self.times) - len(self.names), 0)
        squares = TRUST * PRIOR**2 + float(np.sum(trust * residuals**2))
        noise = squares / (TRUST + degrees)
        # standard errors of a robust regression, with the noise pulled towards its prior
        information = (slopes * trust) @ slopes.T
        variances = noise * np.diag(np.linalg.pinv(information, rcond=1e-12, hermitian=True))
        at_low = np.abs(logs - self.low) < 1e-6
        at_high = np.abs(logs - self.high) < 1e-6
        is_known = ~(at_low | at_high) & (np.diag(information) >= 1e-9)
        values = np.exp(logs)
        if self.model is OverRanks:
            # a part of a law that runs to its lower bound is nowhere seen in the times
            values = np.where(at_low, 0.0, values)
        errors = values * np.sqrt(np.maximum(variances, 0.0))
        parameters = dict(zip(self.names, values.tolist(), strict=True))
        if self.sharpness is not None:
            parameters["sharpness"] = self.sharpness
        stderr = {}
        at_bounds = []
        for i, name in enumerate(self.names):
            if is_known[i]:
                stderr[name] = float(errors[i])
            if at_low[i] or at_high[i]:
                at_bounds.append(name)
        spread = find_spread(left_out)
        bias = float(np.clip(left_out, -0.7, 0.7).mean()) if len(left_out) else 0.0
        miss = find_miss(self.sizes, self.times, value, spread) if judged else None
        notes = [note] if note else []
        if miss is not None:
            notes.append(str(miss))
            spread = miss.spread
        return self.model.build(
            parameters,
            n=len(self.times),
            source=source,
            date=date,
            notes=tuple(notes),
            quality="poor" if miss is not None else "",
            stderr=stderr,
            spread=spread,
            bias=bias,
            ranges={name: (float(v.min()), float(v.max())) for name, v in ranges.items()},
            at_bounds=tuple(at_bounds),
        )


def find_spread(left_out: Array) -> float:
    """Spread [-] of a curve from the residuals of left-out points, pulled towards `PRIOR`."""
    count = len(left_out)
    variance = 0.0
    if count:
        variance = math.pi / 2 * float(np.abs(np.clip(left_out, -0.7, 0.7)).mean()) ** 2
    return math.sqrt((TRUST * PRIOR**2 + count * variance) / (TRUST + count))


@dataclass(frozen=True)
class Miss:
    """The measured size that a fitted curve misses most, outside its 80 % interval."""

    nbytes: float  # size of the message [B]
    measured: float  # [s]
    fitted: float  # [s]

    @property
    def factor(self) -> float:
        """By what the curve is too high or too low, above 1 [-]."""
        ratio = self.fitted / self.measured
        return max(ratio, 1.0 / ratio)

    @property
    def spread(self) -> float:
        """Spread whose 80 % interval holds the measured time [-]."""
        return math.log(self.factor) / INTERVAL

    def __str__(self) -> str:
        times = f"{format_time(self.fitted)} for a measured {format_time(self.measured)}"
        size = format_bytes(self.nbytes)
        return f"{MISSES} {size} by a factor of {self.factor:.2g}: {times}; its spread is widened"


#: How the note of a miss begins.
MISSES = "the curve misses"


def find_miss(sizes: Array, times: Array, fitted: Array, spread: float) -> Miss | None:
    """Find the size that a curve misses most, if a reader must know.

    Parameters
    ----------
    sizes : array
        Logarithms of message sizes [-].
    times : array
        Logarithms of measured times [-].
    fitted : array
        Logarithms of times by the curve [-].
    spread : float
        Spread of the fit [-].

    Returns
    -------
    miss : Miss or None
        The size with the largest ratio of both times, among the largest size if that ratio is above
        `MISSED_LARGEST`, and all sizes if it is above `MISSED`; each only outside the 80 %
        interval. None if there is no such size.
    """
    ratio = np.abs(times - fitted)
    allowed = np.where(sizes >= sizes.max() - 1e-6, math.log(MISSED_LARGEST), math.log(MISSED))
    missed = ratio > np.maximum(allowed, INTERVAL * spread)
    if not missed.any():
        return None
    worst = int(np.argmax(np.where(missed, ratio, 0.0)))
    return Miss(
        nbytes=float(np.exp(sizes[worst])),
        measured=float(np.exp(times[worst])),
        fitted=float(np.exp(fitted[worst])),
    )


def _find_roots(residuals: Array) -> Array:
    """Root of the pseudo-Huber loss: near 1 below `SCALE`, then it grows with the residual."""
    return np.asarray(np.sqrt(1.0 + (residuals / SCALE) ** 2))


def _cost(roots: Array, weights: Array) -> Array:
    """Pseudo-Huber loss: squares below `SCALE`, then straight."""
    return np.asarray(np.sum(weights * (roots - 1.0), axis=-1))


def pipelined_curve(sizes: Array, times: Array, *, sharpness: float | None) -> Curve:
    """Curve of the form ``pipelined``; its sharpness is fixed, or fitted between 0.3 and 50 where
    it is None."""
    # the fastest call and the best time per byte
    first = np.array([times.min(), (times - sizes).min()])
    fixed = Curve(
        model=Pipelined,
        names=("alpha", "beta"),
        sizes=sizes,
        times=times,
        columns=np.ones((2, len(sizes))),
        sharpness=sharpness,
        starts=first[None],
        low=first - 6.0,
        high=first + 4.0,
    )
    if sharpness is not None:
        return fixed
    return replace(
        fixed,
        names=("alpha", "beta", "sharpness"),
        starts=np.array([np.append(first, np.log(q)) for q in (0.6, 2.0)]),
        low=np.append(fixed.low, np.log(0.3)),
        high=np.append(fixed.high, np.log(50.0)),
    )


def two_branch_curve(sizes: Array, times: Array) -> Curve:
    """Curve of the form ``two_branch``; it starts from up to ten ways to split the sorted points in
    two."""
    branch = pipelined_curve(sizes, times, sharpness=0.8)
    n = len(sizes)
    cuts = np.unique(np.linspace(2, n - 2, min(n - 3, 10)).round())
    left = (np.arange(n) < cuts[:, None]).astype(float)
    sides = branch.solve(np.concatenate([left, 1.0 - left]))
    of_left, of_right = np.split(sides, 2)
    return replace(
        branch,
        model=TwoBranch,
        names=("alpha1", "beta1", "alpha2", "beta2"),
        starts=np.concatenate([of_left, of_right], axis=1),
        low=np.tile(branch.low, 2),
        high=np.tile(branch.high, 2),
    )


def ranks_curve(sizes: Array, times: Array, steps: Array, share: Array) -> Curve:
    """Curve of the form ``over_ranks``, from the ring steps and the share (p - 1) / p of each
    point."""
    plain = pipelined_curve(sizes, times, sharpness=0.6)
    ones = np.ones_like(steps)
    # shares of the fixed part of start-up and transfer to start from
    shares = []
    for fixed_start_up in (0.2, 0.8):
        for fixed_transfer in (0.2, 0.8):
            of_steps = (1.0 - fixed_start_up) / 3.0
            shares.append([fixed_start_up, of_steps, fixed_transfer, 1.0 - fixed_transfer])
    return replace(
        plain,
        model=OverRanks,
        names=("alpha0", "alpha1", "beta0", "beta1"),
        columns=np.stack([ones, steps, ones, share]),
        starts=np.repeat(plain.starts[0], 2) + np.log(shares),
        low=np.repeat(plain.low, 2),
        high=np.repeat(plain.high, 2),
    )


def _prepare(nbytes: Values, seconds: Values, *others: Values) -> tuple[Array, ...]:
    """Sort by size and what else is given, drop messages of 0 B, and take the median logarithm of
    repeated times."""
    times = check_times(seconds, 2)
    counts = [check_column("ranks", counts, len(times)) for counts in others]
    columns = np.stack([*counts, check_column("nbytes", nbytes, len(times))])
    if np.any(columns < 0):
        raise ValueError(
            f"nbytes holds {columns[-1].min()}; sizes must be finite and not below 0; drop broken rows"
        )
    keep = columns[-1] > 0
    keys, place = np.unique(columns[:, keep], axis=1, return_inverse=True)
    order = np.argsort(place.reshape(-1), kind="stable")
    groups = np.split(times[keep][order], np.cumsum(np.bincount(place.reshape(-1)))[:-1])
    medians = np.array([np.median(group) for group in groups])
    count = len(np.unique(keys[-1]))
    if count < 2:
        advice = "a curve needs at least 2, better 16 KiB and 128 MiB; measure another size"
        raise ValueError(f"nbytes holds {count} size(s) above 0; {advice}")
    return (*keys, np.log(medians))


def _thin_out(nbytes: Array, times: Array) -> tuple[Array, Array]:
    """Join neighbours among very many sizes to `MOST_SIZES` points of their medians; the smallest
    and the largest stay."""
    if len(nbytes) <= MOST_SIZES:
        return nbytes, times
    inner_sizes = np.exp(_join_neighbours(np.log(nbytes[1:-1])))
    inner_times = _join_neighbours(times[1:-1])
    return (
        np.concatenate([nbytes[:1], inner_sizes, nbytes[-1:]]),
        np.concatenate([times[:1], inner_times, times[-1:]]),
    )


def _join_neighbours(values: Array) -> Array:
    """Medians of neighbours, as many as fit between the smallest and the largest size."""
    groups = np.array_split(values, MOST_SIZES - 2)
    return np.array([np.median(group) for group in groups])


@refuse_misfits(COLUMNS)
def fit_pipelined(
    nbytes: Values, seconds: Values, *, sharpness: float | None = 0.6, source: str = ""
) -> CollectiveModel:
    """Fit start-up time and time per byte of a collective, by the logarithm of the measured times.

    Parameters
    ----------
    nbytes : array
        Message sizes in the nccl-tests convention; rows of 0 B are left out, because libraries skip
        them [B].
    seconds : array
        Measured times; the median of repeats counts [s].
    sharpness : float or None, optional
        Exponent of the form, kept fixed; None fits it too, between 0.3 and 50 [-].
    source : str, optional
        Data id.

    Returns
    -------
    fit : CollectiveModel
        Parameters of `perfkit.models.collectives.pipelined`. The spread comes from sizes left out
        one at a time; with few sizes it is close to 10 %.

    Raises
    ------
    ValueError
        For fewer than two sizes, or times that are not above zero.

    Examples
    --------
    >>> from perfkit.models.collectives import pipelined
    >>> n = 2.0 ** np.arange(10, 28, 3)
    >>> fit = fit_pipelined(n, pipelined(n, alpha=2e-5, beta=1e-11, sharpness=0.6))
    >>> round(fit["alpha"] * 1e6, 3), round(fit["beta"] * 1e12, 3)
    (20.0, 10.0)
    """
    nbytes, times = _prepare(nbytes, seconds)
    curve = pipelined_curve(np.log(nbytes), times, sharpness=sharpness)
    return curve.build(*curve.leave_out(), {"nbytes": nbytes}, source)


@refuse_misfits(COLUMNS)
def fit_sharpness(nbytes: Values, seconds: Values) -> CollectiveModel:
    """Fit the pipelined form with its usual sharpness, or with a third parameter in its place if
    this predicts left-out sizes better.

    Parameters
    ----------
    nbytes : array
        Message sizes [B].
    seconds : array
        Measured times [s].

    Returns
    -------
    fit : CollectiveModel
        The better of both, see `fit_pipelined`.

    Raises
    ------
    ValueError
        As `fit_pipelined` does.

    Examples
    --------
    >>> from perfkit.models.collectives import pipelined
    >>> n = 2.0 ** np.arange(10, 28, 3)
    >>> round(fit_sharpness(n, pipelined(n, alpha=2e-5, beta=1e-11, sharpness=1.5))["sharpness"], 2)
    1.5
    """
    nbytes, times = _prepare(nbytes, seconds)
    usual = pipelined_curve(np.log(nbytes), times, sharpness=0.6)
    free = pipelined_curve(np.log(nbytes), times, sharpness=None)
    logs, left_out = usual.leave_out()
    free_logs, free_left_out = free.leave_out()
    # before a spread is widened for a size that the curve misses
    if find_spread(free_left_out) < find_spread(left_out):
        return free.build(free_logs, free_left_out, {"nbytes": nbytes}, "")
    return usual.build(logs, left_out, {"nbytes": nbytes}, "")


@refuse_misfits(COLUMNS)
def fit_collective(
    nbytes: Values, seconds: Values, *, source: str = "", date: str = "", judged: bool = True
) -> CollectiveModel:
    """Fit a collective with the form that predicts left-out sizes best.

    Parameters
    ----------
    nbytes : array
        Message sizes in the nccl-tests convention; rows of 0 B are left out, because libraries skip
        them [B].
    seconds : array
        Measured times; the median of repeats counts [s].
    source : str, optional
        Data id.
    date : str, optional
        Day of the measurements, ISO 8601.
    judged : bool, optional
        Whether a size that the curve misses widens the spread and is noted; False for times that
        are no measurements but differences of some.

    Returns
    -------
    fit : CollectiveModel
        Parameters of ``pipelined`` with q = 0.6 (two fitted), of ``pipelined`` with its own q
        (three, from 6 sizes on) or of ``two_branch`` with q = 0.8 (four, from 8 sizes on), all in
        `perfkit.models.collectives`. A note gives the left-out errors that decided for more than
        two parameters.

    Raises
    ------
    ValueError
        For fewer than two sizes, or times that are not above zero.

    Notes
    -----
    A form with more parameters must meet two conditions. The sizes reach from start-up to transfer,
    85 % of either. And its left-out errors are smaller than those of the simpler form by more than
    one standard error of the difference (the one-standard-error rule [1]_). Over 66 A100 and H100
    curves, every other size held out, the errors are 3.4 / 6.0 / 17 % (geometric mean / mean / 95th
    percentile).

    References
    ----------
    .. [1] L. Breiman et al., "Classification and regression trees", 1984, section 3.4.3

    Examples
    --------
    >>> from perfkit.models.collectives import two_branch
    >>> n = 2.0 ** np.arange(9, 30)
    >>> fit = fit_collective(n, two_branch(n, alpha1=1e-5, beta1=2e-11, alpha2=4e-5, beta2=4e-12))
    >>> fit.form, round(fit["alpha2"] * 1e6, 3), fit_collective([2**14, 2**27], [1e-5, 6e-4]).form
    ('two_branch', 40.0, 'pipelined')
    """
    nbytes, times = _thin_out(*_prepare(nbytes, seconds))
    sizes, n = np.log(nbytes), len(times)
    curve = pipelined_curve(sizes, times, sharpness=0.6)
    logs, left_out = curve.leave_out()
    note = ""
    _, slopes = curve.evaluate(logs[None])
    share_of_transfer = slopes[0, 1]
    richer = []
    if min(1.0 - share_of_transfer[0], share_of_transfer[-1]) >= SEEN:
        if n >= 6:
            richer.append(pipelined_curve(sizes, times, sharpness=None))
        if n >= 8:
            richer.append(two_branch_curve(sizes, times))
    for other in richer:
        other_logs, other_left_out = other.leave_out()
        old, new = np.abs(left_out), np.abs(other_left_out)
        standard_error = (old - new).std(ddof=1) / math.sqrt(n)
        if (old - new).mean() > standard_error:
            curve = other
            logs, left_out = other_logs, other_left_out
            note = f"sizes left out err {new.mean():.1%}, with fewer parameters {old.mean():.1%}"
    return curve.build(logs, left_out, {"nbytes": nbytes}, source, date, note, judged)


@refuse_misfits(COLUMNS)
def fit_over_ranks(
    operation: str,
    ranks: Values,
    nbytes: Values,
    seconds: Values,
    *,
    source: str = "",
    judged: bool = True,
) -> CollectiveModel:
    """Fit the law of a collective over rank counts.

    Parameters
    ----------
    operation : str
        One of `perfkit.models.collectives.OPERATIONS`, for its ring steps.
    ranks : array
        Ranks of each measurement, at least two counts [-].
    nbytes : array
        Message sizes in the nccl-tests convention; rows of 0 B are left out, because libraries skip
        them [B].
    seconds : array
        Measured times; the median of repeats counts [s].
    source : str, optional
        Data id.
    judged : bool, optional
        Whether a size that the law misses widens the spread and is noted, see `fit_collective`.

    Returns
    -------
    fit : CollectiveModel
        Parameters of `perfkit.models.collectives.over_ranks` with q = 0.6; a part that no time
        shows is 0. The spread comes from rank counts left out one at a time, or from sizes where
        there are only two counts.

    Raises
    ------
    ValueError
        For an unknown operation, fewer than two rank counts or sizes, or times that are not above
        zero.

    Examples
    --------
    >>> from perfkit.models.collectives import over_ranks
    >>> p, n = np.repeat([2, 4], 7), np.tile(2.0 ** np.arange(10, 30, 3), 2)
    >>> law = dict(alpha0=7e-6, alpha1=1e-6, beta0=1.5e-12, beta1=6e-12)
    >>> fit = fit_over_ranks("all_reduce", p, n, over_ranks(n, p, "all_reduce", **law))
    >>> round(fit["alpha1"] * 1e6, 3), round(fit["beta1"] * 1e12, 3)
    (1.0, 6.0)
    """
    counts, nbytes, times = _prepare(nbytes, seconds, ranks)
    each = np.unique(counts)
    if len(each) < 2 or each[0] < 2 or np.any(each % 1):
        advice = "a law needs at least two whole counts of 2 or more; measure another, or fit one with fit_collective"
        raise ValueError(f"ranks holds {', '.join(f'{count:g}' for count in each)}; {advice}")
    steps = np.asarray(ring_steps(operation, counts), dtype=float)
    curve = ranks_curve(np.log(nbytes), times, steps, (counts - 1) / counts)
    found = curve.leave_out(counts if len(each) > 2 else None)
    return curve.build(*found, {"nbytes": nbytes, "ranks": counts}, source, judged=judged)
