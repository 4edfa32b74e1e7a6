"""Fits of collectives: one curve, the form that left-out sizes call for, the law over rank counts, and what they say of
sizes outside: how much less sure they are, and which one sample would help most.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perfkit.fitting.curves import SCALE, Curve, pipelined_curve, ranks_curve, solve_curves, two_branch_curve
from perfkit.fitting.parameters import Fit
from perfkit.fitting.regression import check_times
from perfkit.ground.units import Array, Values
from perfkit.models import collectives as forms

#: Spread [-] before any size is left out, and how many points it counts for; docs/formulas.md, table 1.3.
PRIOR, TRUST = 0.1, 4
UNITS = {"alpha": "s", "beta": "s/B"}
#: Least share of the start-up at the smallest size, and of the transfer at the largest, for a form with more than two
#: parameters [-]; docs/formulas.md, table 1.3.
SEEN = 0.85
#: Spread [-] where all of a start-up turns into transfer, or the reverse, beyond the fitted sizes; docs/formulas.md,
#: table 1.3.
CHANGE = 0.6
_STEP = 1e-4


@dataclass(frozen=True)
class _Solution:
    """A curve through all points, and how far each is from a curve that has not seen it."""

    curve: Curve
    times: Array
    logs: Array
    left_out: Array

    def build(self, ranges: Mapping[str, Values], source: str, date: str = "", notes: tuple[str, ...] = ()) -> Fit:
        """Turn logarithms into parameters with standard errors, left-out points into the spread."""
        curve, names, fixed = self.curve, self.curve.names, self.curve.sharpness
        value, slopes = (part[0] for part in curve.evaluate(self.logs[None]))
        trust = 1.0 / np.sqrt(1.0 + ((self.times - value) / SCALE) ** 2)
        degrees = max(len(self.times) - len(names), 0)
        noise = (TRUST * PRIOR**2 + float(np.sum(trust * (self.times - value) ** 2))) / (TRUST + degrees)
        information = slopes.T @ (slopes * trust[:, None])
        variances = noise * np.diag(np.linalg.pinv(information, rcond=1e-12, hermitian=True))
        low, high = (np.abs(self.logs - bound) < 1e-6 for bound in (curve.low, curve.high))
        known = ~(low | high) & (np.diag(information) >= 1e-9)
        # A part of a law that runs to its lower bound is nowhere seen in the times.
        values = np.where(low & (curve.form == "over_ranks"), 0.0, np.exp(self.logs))
        errors = values * np.sqrt(np.maximum(variances, 0.0))
        parameters = dict(zip(names, values.tolist(), strict=True)) | ({} if fixed is None else {"sharpness": fixed})
        left_out, n = np.clip(self.left_out, -0.7, 0.7), len(self.left_out)
        variance = math.pi / 2 * float(np.abs(left_out).mean()) ** 2 if n else 0.0
        return Fit(
            curve.form, parameters, n=len(self.times), source=source, date=date, notes=notes,
            stderr={name: float(error) for name, error, ok in zip(names, errors, known, strict=True) if ok},
            spread=math.sqrt((TRUST * PRIOR**2 + n * variance) / (TRUST + n)),
            bias=float(left_out.mean()) if n else 0.0,
            ranges={name: (float(np.min(v)), float(np.max(v))) for name, v in ranges.items()},
            units={name: UNITS.get(name.rstrip("012"), "-") for name in parameters},
            at_bounds=tuple(name for name, at in zip(names, low | high, strict=True) if at),
        )  # fmt: skip


def _solve(curve: Curve, times: Array, groups: Array | None = None) -> _Solution:
    """Fit all points, then all but each group, each point or every 24th of many, started from what fits all of them."""
    n = len(times)
    numbers = np.arange(n) % min(n, 24) if groups is None else groups
    folds = (numbers == np.unique(numbers)[:, None]).astype(float)
    logs, left_out = solve_curves(curve, times, np.ones((1, n))), np.zeros(0)
    if (1.0 - folds).sum(axis=1).min() >= len(curve.names):
        again = solve_curves(curve, times, 1.0 - folds, np.concatenate([logs, curve.starts]))
        left_out = np.sum((times - curve.evaluate(again)[0]) * folds, axis=0)
    if curve.form == "two_branch" and logs[0, 0] > logs[0, 2]:  # the branch of small messages first
        logs = np.roll(logs, 2, axis=1)
    return _Solution(curve, times, logs[0], left_out)


def _prepare(nbytes: Values, seconds: Values, *others: Values) -> tuple[Array, ...]:
    """Medians over repeats, by size and what else is given, as columns in ascending order; messages of 0 B go."""
    times = check_times(seconds, 2)
    columns = np.stack([np.broadcast_to(np.asarray(v, dtype=float), times.shape) for v in (*others, nbytes)])
    if not np.all(np.isfinite(columns)) or np.any(columns < 0):
        raise ValueError(f"nbytes holds {columns[-1].min()}; sizes must be finite and not below 0; drop broken rows")
    keep = columns[-1] > 0
    keys, place = np.unique(columns[:, keep], axis=1, return_inverse=True)
    medians = np.array([np.median(times[keep][place.reshape(-1) == i]) for i in range(keys.shape[1])])
    if (count := len(np.unique(keys[-1]))) < 2:
        advice = "a curve needs at least 2, better 16 KiB and 128 MiB; measure another size"
        raise ValueError(f"nbytes holds {count} size(s) above 0; {advice}")
    return (*keys, np.log(medians))


def fit_pipelined(nbytes: Values, seconds: Values, *, sharpness: float | None = 0.6, source: str = "") -> Fit:
    """Fit start-up time and inverse bandwidth of a collective to the logarithm of measured times.

    Parameters
    ----------
    nbytes : array
        Message sizes in the nccl-tests convention; rows of 0 B are left out, libraries skip them [B].
    seconds : array
        Measured times; of repeats the median counts [s].
    sharpness : float or None, optional
        Exponent of the form, kept fixed; None fits it too, between 0.3 and 50 [-].
    source : str, optional
        Data id.

    Returns
    -------
    fit : Fit
        Parameters of `perfkit.models.collectives.pipelined`; the spread is that of sizes left out one at a time,
        pulled towards 10 % where sizes are few.

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
    found = _solve(pipelined_curve(np.log(nbytes), times, sharpness=sharpness), times)
    return found.build({"nbytes": nbytes}, source)


def fit_collective(nbytes: Values, seconds: Values, *, source: str = "", date: str = "") -> Fit:
    """Fit a collective with the form that sizes left out one at a time call for.

    Parameters
    ----------
    nbytes : array
        Message sizes in the nccl-tests convention; rows of 0 B are left out, libraries skip them [B].
    seconds : array
        Measured times; of repeats the median counts [s].
    source : str, optional
        Data id.
    date : str, optional
        Day of the measurements, ISO 8601.

    Returns
    -------
    fit : Fit
        Parameters of ``pipelined`` with q = 0.6 (two fitted), of ``pipelined`` with its own q (three, from 6 sizes on)
        or of ``two_branch`` with q = 0.8 (four, from 8 sizes on), all in `perfkit.models.collectives`; a note says
        what the choice of more than two rests on.

    Raises
    ------
    ValueError
        For fewer than two sizes, or times that are not above zero.

    Notes
    -----
    A form with more parameters is taken only where the sizes reach from start-up to transfer, 85 % of either, and where
    its left-out errors are smaller than those of the simpler one by more than one standard error of that difference
    (the one-standard-error rule [1]_). Over 66 A100 and H100 curves,
    every other size held out, that leaves 3.4 / 6.0 / 17 % (geometric mean / mean / 95th percentile).

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
    nbytes, times = _prepare(nbytes, seconds)
    sizes, note = np.log(nbytes), ""
    best = _solve(pipelined_curve(sizes, times, sharpness=0.6), times)
    transfer = best.curve.evaluate(best.logs[None])[1][0, :, 1]
    known = len(times) if min(1.0 - transfer[0], transfer[-1]) >= SEEN else 0
    for least, make, sharpness in ((6, pipelined_curve, None), (8, two_branch_curve, 0.8)):
        if known < least:
            continue
        other = _solve(make(sizes, times, sharpness=sharpness), times)
        old, new = np.abs(best.left_out), np.abs(other.left_out)
        if (old - new).mean() > (old - new).std(ddof=1) / math.sqrt(known):
            best, note = other, f"sizes left out err {new.mean():.1%}, with fewer parameters {old.mean():.1%}"
    return best.build({"nbytes": nbytes}, source, date, (note,) if note else ())


def fit_over_ranks(operation: str, ranks: Values, nbytes: Values, seconds: Values, *, source: str = "") -> Fit:
    """Fit the law of a collective over rank counts.

    Parameters
    ----------
    operation : str
        One of `perfkit.models.collectives.OPERATIONS`, for its ring steps.
    ranks : array
        Ranks of each measurement, at least two counts [-].
    nbytes : array
        Message sizes in the nccl-tests convention; rows of 0 B are left out, libraries skip them [B].
    seconds : array
        Measured times; of repeats the median counts [s].
    source : str, optional
        Data id.

    Returns
    -------
    fit : Fit
        Parameters of `perfkit.models.collectives.over_ranks` with q = 0.6, 0 where a part is nowhere seen; the spread
        is that of rank counts left out one at a time, of sizes where there are only two counts.

    Raises
    ------
    ValueError
        For an unknown operation, fewer than two rank counts or sizes, or times that are not above zero.

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
    steps = np.asarray(forms.ring_steps(operation, counts), dtype=float)
    curve = ranks_curve(np.log(nbytes), times, steps, (counts - 1) / counts, sharpness=0.6)
    found = _solve(curve, times, counts if len(each) > 2 else None)
    return found.build({"nbytes": nbytes, "ranks": counts}, source)


def evaluate_collective(fit: Fit, nbytes: Values, operation: str, ranks: int, **changed: float) -> Array:
    """Evaluate the form of a fit of a collective.

    Parameters
    ----------
    fit : Fit
        Parameters of a form of `perfkit.models.collectives`.
    nbytes : float or array
        Message sizes in the nccl-tests convention [B].
    operation : str
        Operation, which a law over rank counts needs.
    ranks : int
        Ranks, which a law over rank counts needs [-].
    **changed : float
        Parameters to take instead of those of the fit, in their units [-].

    Returns
    -------
    time : array
        One time per size [s].

    Examples
    --------
    >>> fit = Fit("alpha_beta", {"alpha": 1e-5, "beta": 1e-11})
    >>> round(float(evaluate_collective(fit, 1e6, "all_reduce", 8)) * 1e6)
    20
    """
    values: Mapping[str, float] = {**fit, **changed}
    if fit.form == "over_ranks":
        return np.asarray(forms.over_ranks(nbytes, ranks, operation, **values))
    return np.asarray(getattr(forms, fit.form)(nbytes, **values))


def _slopes(fit: Fit, nbytes: Array, operation: str, ranks: int) -> tuple[Array, Array]:
    """Changes of the logarithm of time: by one standard error of each parameter, and per logarithm of the size."""
    base, errors = np.log(evaluate_collective(fit, nbytes, operation, ranks)), []
    for name, error in fit.stderr.items():
        if (value := fit[name]) > 0:
            moved = np.log(evaluate_collective(fit, nbytes, operation, ranks, **{name: value * (1 + _STEP)}))
            errors.append((moved - base) * (error / (_STEP * value)))
    elastic = (np.log(evaluate_collective(fit, nbytes * (1 + _STEP), operation, ranks)) - base) / _STEP
    return np.stack(errors) if errors else np.zeros((1, *nbytes.shape)), elastic


def spread_beyond(fit: Fit, nbytes: Values, operation: str, ranks: int) -> Array:
    r"""Spread of measurements around a fit of a collective, inside and outside the sizes it was made on.

    It takes what `evaluate_collective` takes.

    Returns
    -------
    spread : array
        Standard deviation of log(measured / predicted), one per size [-].

    Notes
    -----
    Beyond the fitted sizes, with e the share of the transfer in the time (its slope in logarithms),

    .. math:: s^2 = s_{fit}^2 + \sum_i \left(\frac{\partial \ln t}{\partial \theta_i} \sigma_i\right)^2 + (0.6\,
       \Delta e)^2

    where the change of e from the last fitted size says how much of the form was never seen.

    Examples
    --------
    >>> fit = Fit("pipelined", {"alpha": 2e-5, "beta": 5e-12}, {"alpha": 2e-7, "beta": 1e-12}, spread=0.05,
    ...           ranges={"nbytes": (512.0, 2.0**22)})
    >>> spread_beyond(fit, [2.0**20, 2.0**30], "all_reduce", 8).round(2)
    array([0.05, 0.34])
    """
    sizes = np.asarray(nbytes, dtype=float)
    spread = fit.spread_at(evaluate_collective(fit, sizes, operation, ranks))
    low, high = fit.ranges.get("nbytes", (0.0, np.inf))
    if sizes.size == 0 or (sizes.min() >= low and sizes.max() <= high):
        return spread
    errors, elastic = _slopes(fit, sizes, operation, ranks)
    change = elastic - _slopes(fit, np.clip(sizes, low, high), operation, ranks)[1]
    beyond = np.sqrt(spread**2 + np.sum(errors**2, axis=0) + (CHANGE * change) ** 2)
    return np.where((sizes < low) | (sizes > high), beyond, spread)


def choose_sample(fit: Fit, nbytes: float, operation: str, ranks: int) -> float:
    """Choose the message whose measurement would make an estimate outside the fitted sizes surer.

    Parameters
    ----------
    fit : Fit
        Parameters of a form of `perfkit.models.collectives`.
    nbytes : float
        The message to be estimated [B].
    operation : str
        Operation, which a law over rank counts needs.
    ranks : int
        Ranks, which a law over rank counts needs [-].

    Returns
    -------
    nbytes : float
        Above the fitted sizes the smallest power of two that takes away 95 % of the variance that measuring the message
        itself would take away; below them that message, which is the cheapest [B].

    Notes
    -----
    Standard errors are taken as independent, one sample as noisy as the fit; see `spread_beyond` for the variance. A100
    and H100 curves known up to 256 KiB, 1, 4 and 16 MiB predict 512 MiB with 80, 38, 22 and 12 % mean error; with the
    one sample chosen here, of 16 to 256 MiB, with 6, 5, 7 and 7 %.

    Examples
    --------
    >>> fit = Fit("pipelined", {"alpha": 2e-5, "beta": 5e-12}, {"alpha": 2e-7, "beta": 1e-12}, spread=0.05,
    ...           ranges={"nbytes": (512.0, 2.0**22)})
    >>> round(choose_sample(fit, 2.0**30, "all_reduce", 8) / 2**20)
    128
    """
    edge = fit.ranges.get("nbytes", (0.0, nbytes))[1]
    if nbytes <= edge:
        return nbytes
    powers = 2.0 ** np.arange(np.floor(np.log2(max(edge, 1.0))) + 1, np.ceil(np.log2(nbytes)))
    sizes = np.concatenate([[edge], powers, [nbytes]])
    errors, elastic = _slopes(fit, sizes, operation, ranks)
    noise = max(fit.spread, 0.01) ** 2
    learnt = np.sum(errors * errors[:, -1:], axis=0) ** 2 / (np.sum(errors**2, axis=0) + noise)
    learnt[0] = 0.0  # the last fitted size is no new sample
    gain = learnt - (CHANGE * (elastic[-1] - elastic)) ** 2
    return float(sizes[1:][np.argmax(gain[1:] - gain[0] >= 0.95 * (gain[-1] - gain[0]))])
