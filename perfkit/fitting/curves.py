"""Curves of collectives in log space: their slopes, and a solver for many small robust problems at once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perfkit.ground.units import Array

#: Logarithms, shape (problems, points), and their slopes over the logarithms of the parameters.
Evaluate = Callable[[Array], tuple[Array, Array]]
#: Residual of the logarithm above which a point counts less [-]; docs/formulas.md, table 1.3.
SCALE = 0.1


@dataclass(frozen=True)
class Curve:
    """A form on its points, ready to be solved.

    Parameters
    ----------
    names : tuple of str
        Parameters of the form that are fitted.
    evaluate : callable
        Takes logarithms of the parameters, shape (problems, parameters); gives logarithms of time and their slopes.
    starts : array, shape (starts, parameters)
        Logarithms of the parameters to start from [-].
    low, high : array, shape (parameters,)
        Bounds of the logarithms [-].
    """

    names: tuple[str, ...]
    evaluate: Evaluate
    starts: Array
    low: Array
    high: Array


def _join(alpha: Array, beta: Array, sharpness: Array) -> tuple[Array, Array]:
    """Logarithm of the q-norm of two logarithms, and the share of the first, its slope."""
    distance = sharpness * (beta - alpha)
    with np.errstate(over="ignore"):
        return alpha + np.logaddexp(0.0, distance) / sharpness, 1.0 / (1.0 + np.exp(distance))


def _limits(sizes: Array, times: Array) -> tuple[Array, Array, Array]:
    """Logarithms of the fastest call and the best time per byte, and how far a fit may go from there."""
    first = np.array([times.min(), (times - sizes).min()])
    return first, first - 6.0, first + 4.0


def pipelined_curve(sizes: Array, times: Array, *, sharpness: float | None) -> Curve:
    """Prepare the form ``pipelined``.

    Parameters
    ----------
    sizes, times : array
        Logarithms of messages and times [-].
    sharpness : float or None
        Exponent kept fixed, or None to fit it between 0.3 and 50 [-].

    Returns
    -------
    curve : Curve
        Parameters alpha, beta and, where it is fitted, sharpness.
    """
    start, low, high = _limits(sizes, times)

    def evaluate(p: Array) -> tuple[Array, Array]:
        alpha, beta = p[:, :1], p[:, 1:2] + sizes
        q = np.exp(p[:, 2:3]) if sharpness is None else np.full((1, 1), sharpness)
        value, share = _join(alpha, beta, q)
        slopes = [share, 1.0 - share]
        slopes += [share * alpha + (1.0 - share) * beta - value] if sharpness is None else []
        return value, np.stack(slopes, axis=-1)

    if sharpness is not None:
        return Curve(("alpha", "beta"), evaluate, start[None], low, high)
    starts = np.array([np.append(start, np.log(q)) for q in (0.6, 2.0)])
    low, high = np.append(low, np.log(0.3)), np.append(high, np.log(50.0))
    return Curve(("alpha", "beta", "sharpness"), evaluate, starts, low, high)


def two_branch_curve(sizes: Array, times: Array, *, sharpness: float) -> Curve:
    """Prepare the form ``two_branch``, to be started from every way to cut the points in two.

    Parameters
    ----------
    sizes, times : array
        Logarithms of messages, ascending, and times [-].
    sharpness : float
        Exponent of both branches [-].

    Returns
    -------
    curve : Curve
        Parameters alpha1, beta1, alpha2 and beta2.
    """
    branch = pipelined_curve(sizes, times, sharpness=sharpness)
    n = len(sizes)
    cuts = np.unique(np.linspace(2, n - 2, min(n - 3, 10)).round())
    left = (np.arange(n) < cuts[:, None]).astype(float)
    sides = solve_curves(branch, times, np.concatenate([left, 1.0 - left]))[0]
    starts = np.concatenate(np.split(sides, 2), axis=1)

    def evaluate(p: Array) -> tuple[Array, Array]:
        (small, slopes1), (large, slopes2) = branch.evaluate(p[:, :2]), branch.evaluate(p[:, 2:])
        first = (small <= large)[..., None]
        return np.minimum(small, large), np.concatenate([slopes1 * first, slopes2 * ~first], axis=-1)

    names = ("alpha1", "beta1", "alpha2", "beta2")
    return Curve(names, evaluate, starts, np.tile(branch.low, 2), np.tile(branch.high, 2))


def ranks_curve(sizes: Array, times: Array, steps: Array, share: Array, *, sharpness: float) -> Curve:
    """Prepare the form ``over_ranks``.

    Parameters
    ----------
    sizes, times : array
        Logarithms of messages and times [-].
    steps, share : array
        Ring steps and (p - 1) / p of each point [-].
    sharpness : float
        Exponent kept fixed [-].

    Returns
    -------
    curve : Curve
        Parameters alpha0, alpha1, beta0 and beta1.
    """
    first, low, high = _limits(sizes, times)
    halves = np.log([[f, (1.0 - f) / 3.0, g, 1.0 - g] for f in (0.2, 0.8) for g in (0.2, 0.8)])

    def evaluate(p: Array) -> tuple[Array, Array]:
        parts = np.exp(p)[:, :, None] * np.stack([np.ones_like(steps), steps, np.ones_like(share), share])
        alpha, beta = parts[:, :2].sum(axis=1), parts[:, 2:].sum(axis=1)
        value, weight = _join(np.log(alpha), np.log(beta) + sizes, np.full((1, 1), sharpness))
        slopes = [*(weight * parts[:, i] / alpha for i in (0, 1)), *((1 - weight) * parts[:, i] / beta for i in (2, 3))]
        return value, np.stack(slopes, axis=-1)

    each = np.repeat(first, 2)
    return Curve(("alpha0", "alpha1", "beta0", "beta1"), evaluate, each + halves, np.repeat(low, 2), np.repeat(high, 2))


def _cost(residuals: Array, weights: Array) -> Array:
    """Pseudo-Huber loss: squares below `SCALE`, then straight."""
    return np.asarray(np.sum(weights * (np.sqrt(1.0 + (residuals / SCALE) ** 2) - 1.0), axis=-1))


def solve_curves(curve: Curve, times: Array, weights: Array, starts: Array | None = None) -> tuple[Array, Array]:
    """Fit one form to several selections of the same points, robustly, by damped Gauss-Newton steps.

    Parameters
    ----------
    curve : Curve
        The form on its points.
    times : array, shape (points,)
        Logarithms of the measured times [-].
    weights : array, shape (problems, points)
        What each point counts in each problem [-].
    starts : array, shape (starts, parameters), optional
        Where to start instead of the starts of the curve [-].

    Returns
    -------
    parameters : array, shape (problems, parameters)
        Logarithms of the best parameters of each problem [-].
    cost : array, shape (problems,)
        Their loss [-].
    """
    starts = curve.starts if starts is None else starts
    problems, each, k = len(weights), len(starts), len(curve.names)
    w, p = np.repeat(weights, each, axis=0), np.clip(np.tile(starts, (problems, 1)), curve.low, curve.high)
    value, slopes = curve.evaluate(p)
    cost, damping = _cost(times - value, w), np.full(len(p), 1e-3)
    for _ in range(60):
        trust = w / np.sqrt(1.0 + ((times - value) / SCALE) ** 2)
        weighed = slopes * trust[..., None]
        normal = np.swapaxes(weighed, 1, 2) @ slopes + 1e-9 * np.eye(k)
        scale = np.maximum(np.einsum("bii->bi", normal), 1e-6) * damping[:, None]
        pull = np.einsum("bni,bn->bi", weighed, times - value)
        step = np.linalg.solve(normal + scale[:, None] * np.eye(k), pull[..., None])[..., 0]
        trial = np.clip(p + np.clip(step, -2.0, 2.0), curve.low, curve.high)
        trial_value, trial_slopes = curve.evaluate(trial)
        trial_cost = _cost(times - trial_value, w)
        better, gain = trial_cost < cost, np.maximum(cost - trial_cost, 0.0)
        p, value = np.where(better[:, None], trial, p), np.where(better[:, None], trial_value, value)
        slopes, cost = np.where(better[:, None, None], trial_slopes, slopes), np.where(better, trial_cost, cost)
        damping = np.clip(np.where(better, damping / 5.0, damping * 5.0), 1e-9, 1e9)
        if better.any() and gain.max() < 1e-9 * max(float(cost.max()), 1e-6):
            break
    best = cost.reshape(problems, each).argmin(axis=1)
    chosen = np.arange(problems) * each + best
    return p[chosen], cost[chosen]


def invert_information(slopes: Array, weights: Array) -> Array:
    """Variances of the logarithms of parameters, for noise of one; nan where no point depends on a parameter.

    Parameters
    ----------
    slopes : array, shape (points, parameters)
        Slopes of the logarithm of time [-].
    weights : array, shape (points,)
        What each point counts [-].

    Returns
    -------
    variances : array, shape (parameters,)
        Diagonal of the covariance [-].
    """
    information = slopes.T @ (slopes * weights[:, None])
    variances = np.diag(np.linalg.pinv(information, rcond=1e-12, hermitian=True)).copy()
    variances[np.diag(information) < 1e-9] = np.nan
    return variances
