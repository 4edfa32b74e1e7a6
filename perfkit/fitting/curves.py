"""Curves of collectives in log space: start-up and transfer as sums of parts, many problems solved at once."""

from dataclasses import dataclass, replace

import numpy as np

from perfkit.ground.units import Array

#: Residual of the logarithm above which a point counts less [-]; docs/formulas.md, table 1.3.
SCALE = 0.1


@dataclass(frozen=True)
class Curve:
    """A form of `perfkit.models.collectives` on its points, ready to be solved.

    Parameters
    ----------
    form : str
        Name of the form.
    names : tuple of str
        Parameters that are fitted, their logarithms in this order: start-ups, times per byte, perhaps the sharpness.
    sizes : array, shape (points,)
        Logarithms of messages [-].
    columns : array, shape (parts, points)
        What multiplies each start-up and, in the second half, each time per byte [-].
    sharpness : float or None
        Exponent of the smooth maximum of start-up and transfer; None where it is fitted [-].
    starts : array, shape (starts, parameters)
        Logarithms of the parameters to start from [-].
    low, high : array, shape (parameters,)
        Bounds of the logarithms [-].
    """

    form: str
    names: tuple[str, ...]
    sizes: Array
    columns: Array
    sharpness: float | None
    starts: Array
    low: Array
    high: Array

    def evaluate(self, p: Array) -> tuple[Array, Array]:
        """Logarithms of time, shape (problems, points), and their slopes over the logarithms of the parameters."""
        if self.form != "two_branch":
            return self._join(p)
        (small, slopes1), (large, slopes2) = (self._join(half) for half in np.split(p, 2, axis=1))
        first = (small <= large)[..., None]
        return np.minimum(small, large), np.concatenate([slopes1 * first, slopes2 * ~first], axis=-1)

    def _join(self, p: Array) -> tuple[Array, Array]:
        """The smooth maximum of start-up and transfer; its slopes are their shares in it."""
        count = len(self.columns)
        q = np.exp(p[:, count:]) if self.sharpness is None else np.full((1, 1), self.sharpness)
        parts = np.exp(p[:, :count, None]) * self.columns
        sums = np.stack([part.sum(axis=1) for part in np.split(parts, 2, axis=1)], axis=1)
        alpha, beta = np.log(sums[:, 0]), np.log(sums[:, 1]) + self.sizes
        distance = q * (beta - alpha)
        with np.errstate(over="ignore"):
            value, share = alpha + np.logaddexp(0.0, distance) / q, 1.0 / (1.0 + np.exp(distance))
        slopes = parts * np.repeat(np.stack([share, 1.0 - share], axis=1) / sums, count // 2, axis=1)
        if self.sharpness is None:
            slopes = np.concatenate([slopes, (share * alpha + (1.0 - share) * beta - value)[:, None]], axis=1)
        return value, np.swapaxes(slopes, 1, 2)


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
    first = np.array([times.min(), (times - sizes).min()])  # the fastest call and the best time per byte
    names, low, high, starts = ["alpha", "beta"], first - 6.0, first + 4.0, first[None]
    if sharpness is None:
        names, starts = [*names, "sharpness"], np.array([np.append(first, np.log(q)) for q in (0.6, 2.0)])
        low, high = np.append(low, np.log(0.3)), np.append(high, np.log(50.0))
    return Curve("pipelined", tuple(names), sizes, np.ones((2, len(sizes))), sharpness, starts, low, high)


def two_branch_curve(sizes: Array, times: Array, *, sharpness: float | None) -> Curve:
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
    branch, n = pipelined_curve(sizes, times, sharpness=sharpness), len(sizes)
    cuts = np.unique(np.linspace(2, n - 2, min(n - 3, 10)).round())
    left = (np.arange(n) < cuts[:, None]).astype(float)
    sides = solve_curves(branch, times, np.concatenate([left, 1.0 - left]))
    low, high, starts = np.tile(branch.low, 2), np.tile(branch.high, 2), np.concatenate(np.split(sides, 2), axis=1)
    names = ("alpha1", "beta1", "alpha2", "beta2")
    return replace(branch, form="two_branch", names=names, starts=starts, low=low, high=high)


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
    plain, one = pipelined_curve(sizes, times, sharpness=sharpness), np.ones_like(steps)
    halves = np.log([[f, (1.0 - f) / 3.0, g, 1.0 - g] for f in (0.2, 0.8) for g in (0.2, 0.8)])
    low, high, starts = np.repeat(plain.low, 2), np.repeat(plain.high, 2), np.repeat(plain.starts[0], 2) + halves
    columns, names = np.stack([one, steps, one, share]), ("alpha0", "alpha1", "beta0", "beta1")
    return replace(plain, form="over_ranks", names=names, columns=columns, starts=starts, low=low, high=high)


def _cost(residuals: Array, weights: Array) -> Array:
    """Pseudo-Huber loss: squares below `SCALE`, then straight."""
    return np.asarray(np.sum(weights * (np.sqrt(1.0 + (residuals / SCALE) ** 2) - 1.0), axis=-1))


def solve_curves(curve: Curve, times: Array, weights: Array, starts: Array | None = None) -> Array:
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
    """
    starts = curve.starts if starts is None else starts
    w, p = np.repeat(weights, len(starts), axis=0), np.clip(np.tile(starts, (len(weights), 1)), curve.low, curve.high)
    value, slopes = curve.evaluate(p)
    cost, damping, identity = _cost(times - value, w), np.full(len(p), 1e-3), np.eye(len(curve.names))
    for _ in range(60):
        weighed = slopes * (w / np.sqrt(1.0 + ((times - value) / SCALE) ** 2))[..., None]
        normal = np.swapaxes(weighed, 1, 2) @ slopes + 1e-9 * identity
        scale = np.maximum(np.einsum("bii->bi", normal), 1e-6) * damping[:, None]
        pull = np.einsum("bni,bn->bi", weighed, times - value)
        step = np.linalg.solve(normal + scale[:, None] * identity, pull[..., None])[..., 0]
        trial = np.clip(p + np.clip(step, -2.0, 2.0), curve.low, curve.high)
        trial_value, trial_slopes = curve.evaluate(trial)
        trial_cost = _cost(times - trial_value, w)
        better, gain = trial_cost < cost, np.maximum(cost - trial_cost, 0.0)
        p[better], value[better], slopes[better] = trial[better], trial_value[better], trial_slopes[better]
        cost = np.minimum(cost, trial_cost)
        damping = np.clip(np.where(better, damping / 5.0, damping * 5.0), 1e-9, 1e9)
        if better.any() and gain.max() < 1e-9 * max(float(cost.max()), 1e-6):
            break
    best = cost.reshape(len(weights), -1).argmin(axis=1)
    return np.asarray(p.reshape(len(weights), -1, len(curve.names))[np.arange(len(weights)), best])
