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
#: Spread [-] before any size is left out, and how many points it counts for; docs/formulas.md,
#: table 1.3.
PRIOR, TRUST = 0.1, 4
#: Smallest share of the start-up at the smallest size, and of the transfer at the largest, for a
#: form with more than two parameters [-]; docs/formulas.md, table 1.3.
SEEN = 0.85
#: Most sizes that a curve is fitted to [-]: more take minutes, and say no more.
MOST_SIZES = 400
#: Half width of an 80 % interval, in standard deviations of the logarithm [-].
INTERVAL = 1.2816
#: Factor by which a curve may miss its largest size, and any size, without a note [-]; docs/formulas.md,
#: table 1.3.
MISSED_LARGEST, MISSED = 1.35, 1.5


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
        parameters."""
        if self.model is not TwoBranch:
            return self._join(p)
        (small, slopes1), (large, slopes2) = (self._join(half) for half in np.split(p, 2, axis=1))
        first = (small <= large)[..., None]
        return np.minimum(small, large), np.concatenate(
            [slopes1 * first, slopes2 * ~first], axis=-1
        )

    def _join(self, p: Array) -> tuple[Array, Array]:
        """Smooth maximum of start-up and transfer; its slopes are the shares of both."""
        count = len(self.columns)
        q = np.exp(p[:, count:]) if self.sharpness is None else np.full((1, 1), self.sharpness)
        parts = np.exp(p[:, :count, None]) * self.columns
        sums = np.stack([part.sum(axis=1) for part in np.split(parts, 2, axis=1)], axis=1)
        alpha, beta = np.log(sums[:, 0]), np.log(sums[:, 1]) + self.sizes
        distance = q * (beta - alpha)
        with np.errstate(over="ignore"):
            value, share = alpha + np.logaddexp(0.0, distance) / q, 1.0 / (1.0 + np.exp(distance))
        slopes = parts * np.repeat(
            np.stack([share, 1.0 - share], axis=1) / sums, count // 2, axis=1
        )
        if self.sharpness is None:
            slopes = np.concatenate(
                [slopes, (share * alpha + (1.0 - share) * beta - value)[:, None]], axis=1
            )
        return value, np.swapaxes(slopes, 1, 2)

    def solve(self, weights: Array, starts: Array | None = None) -> Array:
        """Logarithms of the best parameters for each row of weights of the points, by damped
        Gauss-Newton steps."""
        starts = self.starts if starts is None else starts
        w, p = (
            np.repeat(weights, len(starts), axis=0),
            np.clip(np.tile(starts, (len(weights), 1)), self.low, self.high),
        )
        value, slopes = self.evaluate(p)
        cost, damping, identity = (
            _cost(self.times - value, w),
            np.full(len(p), 1e-3),
            np.eye(len(self.names)),
        )
        for _ in range(60):
            weighed = slopes * (w / np.sqrt(1.0 + ((self.times - value) / SCALE) ** 2))[..., None]
            normal = np.swapaxes(weighed, 1, 2) @ slopes + 1e-9 * identity
            scale = np.maximum(np.einsum("bii->bi", normal), 1e-6) * damping[:, None]
            pull = np.einsum("bni,bn->bi", weighed, self.times - value)
            step = np.linalg.solve(normal + scale[:, None] * identity, pull[..., None])[..., 0]
            trial = np.clip(p + np.clip(step, -2.0, 2.0), self.low, self.high)
            trial_value, trial_slopes = self.evaluate(trial)
            trial_cost = _cost(self.times - trial_value, w)
            better, gain = trial_cost < cost, np.maximum(cost - trial_cost, 0.0)
            p[better], value[better], slopes[better] = (
                trial[better],
                trial_value[better],
                trial_slopes[better],
            )
            cost = np.minimum(cost, trial_cost)
            damping = np.clip(np.where(better, damping / 5.0, damping * 5.0), 1e-9, 1e9)
            if better.any() and gain.max() < 1e-9 * max(float(cost.max()), 1e-6):
                break
        best = cost.reshape(len(weights), -1).argmin(axis=1)
        return np.asarray(
            p.reshape(len(weights), -1, len(self.names))[np.arange(len(weights)), best]
        )

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
        value, slopes = (part[0] for part in self.evaluate(logs[None]))
        trust = 1.0 / np.sqrt(1.0 + ((self.times - value) / SCALE) ** 2)
        degrees = max(len(self.times) - len(self.names), 0)
        noise = (TRUST * PRIOR**2 + float(np.sum(trust * (self.times - value) ** 2))) / (
            TRUST + degrees
        )
        information = slopes.T @ (slopes * trust[:, None])
        variances = noise * np.diag(np.linalg.pinv(information, rcond=1e-12, hermitian=True))
        low, high = (np.abs(logs - bound) < 1e-6 for bound in (self.low, self.high))
        known = ~(low | high) & (np.diag(information) >= 1e-9)
        # A part of a law that runs to its lower bound is nowhere seen in the times.
        values = np.where(low & (self.model is OverRanks), 0.0, np.exp(logs))
        errors = values * np.sqrt(np.maximum(variances, 0.0))
        parameters = dict(zip(self.names, values.tolist(), strict=True))
        if self.sharpness is not None:
            parameters["sharpness"] = self.sharpness
        spread = find_spread(left_out)
        left_out, n = np.clip(left_out, -0.7, 0.7), len(left_out)
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
            stderr={
                name: float(error)
                for name, error, ok in zip(self.names, errors, known, strict=True)
                if ok
            },
            spread=spread,
            bias=float(left_out.mean()) if n else 0.0,
            ranges={name: (float(v.min()), float(v.max())) for name, v in ranges.items()},
            at_bounds=tuple(name for name, at in zip(self.names, low | high, strict=True) if at),
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
    nbytes, measured, curve = (float(np.exp(x[worst])) for x in (sizes, times, fitted))
    return Miss(nbytes, measured, curve)


def _cost(residuals: Array, weights: Array) -> Array:
    """Pseudo-Huber loss: squares below `SCALE`, then straight."""
    return np.asarray(np.sum(weights * (np.sqrt(1.0 + (residuals / SCALE) ** 2) - 1.0), axis=-1))


def pipelined_curve(sizes: Array, times: Array, *, sharpness: float | None) -> Curve:
    """Curve of the form ``pipelined``; its sharpness is fixed, or fitted between 0.3 and 50 where
    it is None."""
    # the fastest call and the best time per byte
    first = np.array([times.min(), (times - sizes).min()])
    names, low, high, starts = ["alpha", "beta"], first - 6.0, first + 4.0, first[None]
    if sharpness is None:
        names, starts = (
            [*names, "sharpness"],
            np.array([np.append(first, np.log(q)) for q in (0.6, 2.0)]),
        )
        low, high = np.append(low, np.log(0.3)), np.append(high, np.log(50.0))
    return Curve(
        Pipelined,
        tuple(names),
        sizes,
        times,
        np.ones((2, len(sizes))),
        sharpness,
        starts,
        low,
        high,
    )


def two_branch_curve(sizes: Array, times: Array) -> Curve:
    """Curve of the form ``two_branch``; it starts from up to ten ways to split the sorted points in
    two."""
    branch, n = pipelined_curve(sizes, times, sharpness=0.8), len(sizes)
    cuts = np.unique(np.linspace(2, n - 2, min(n - 3, 10)).round())
    left = (np.arange(n) < cuts[:, None]).astype(float)
    sides = branch.solve(np.concatenate([left, 1.0 - left]))
    low, high, starts = (
        np.tile(branch.low, 2),
        np.tile(branch.high, 2),
        np.concatenate(np.split(sides, 2), axis=1),
    )
    names = ("alpha1", "beta1", "alpha2", "beta2")
    return replace(branch, model=TwoBranch, names=names, starts=starts, low=low, high=high)


def ranks_curve(sizes: Array, times: Array, steps: Array, share: Array) -> Curve:
    """Curve of the form ``over_ranks``, from the ring steps and the share (p - 1) / p of each
    point."""
    plain, one = pipelined_curve(sizes, times, sharpness=0.6), np.ones_like(steps)
    halves = np.log([[f, (1.0 - f) / 3.0, g, 1.0 - g] for f in (0.2, 0.8) for g in (0.2, 0.8)])
    low, high, starts = (
        np.repeat(plain.low, 2),
        np.repeat(plain.high, 2),
        np.repeat(plain.starts[0], 2) + halves,
    )
    columns, names = np.stack([one, steps, one, share]), ("alpha0", "alpha1", "beta0", "beta1")
    return replace(
        plain, model=OverRanks, names=names, columns=columns, starts=starts, low=low, high=high
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
    if (count := len(np.unique(keys[-1]))) < 2:
        advice = "a curve needs at least 2, better 16 KiB and 128 MiB; measure another size"
        raise ValueError(f"nbytes holds {count} size(s) above 0; {advice}")
    return (*keys, np.log(medians))


def _thin_out(nbytes: Array, times: Array) -> tuple[Array, Array]:
    """Join neighbours among very many sizes to `MOST_SIZES` points of their medians; the smallest
    and the largest stay."""
    if len(nbytes) <= MOST_SIZES:
        return nbytes, times
    inner = slice(1, -1)
    groups = [np.array_split(values[inner], MOST_SIZES - 2) for values in (np.log(nbytes), times)]
    sizes, joined = (np.array([np.median(group) for group in each]) for each in groups)
    thin = np.concatenate([nbytes[:1], np.exp(sizes), nbytes[-1:]])
    return thin, np.concatenate([times[:1], joined, times[-1:]])


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
    sizes, n, note = np.log(nbytes), len(times), ""
    curve = pipelined_curve(sizes, times, sharpness=0.6)
    logs, left_out = curve.leave_out()
    transfer = curve.evaluate(logs[None])[1][0, :, 1]
    richer = []
    if min(1.0 - transfer[0], transfer[-1]) >= SEEN:
        richer += [pipelined_curve(sizes, times, sharpness=None)] if n >= 6 else []
        richer += [two_branch_curve(sizes, times)] if n >= 8 else []
    for other in richer:
        other_logs, other_left_out = other.leave_out()
        old, new = np.abs(left_out), np.abs(other_left_out)
        if (old - new).mean() > (old - new).std(ddof=1) / math.sqrt(n):
            curve, logs, left_out = other, other_logs, other_left_out
            note = f"sizes left out err {new.mean():.1%}, with fewer parameters {old.mean():.1%}"
    return curve.build(logs, left_out, {"nbytes": nbytes}, source, date, note, judged)


@refuse_misfits(COLUMNS)
def fit_over_ranks(
    operation: str, ranks: Values, nbytes: Values, seconds: Values, *, source: str = ""
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
    return curve.build(*found, {"nbytes": nbytes, "ranks": counts}, source)
