"""Least squares for times: relative errors, outliers, no negative parameters, errors of left-out points."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perfkit.fitting.parameters import Fit
from perfkit.ground.units import Array


def solve_nonnegative(
    columns: Array,
    target: Array,
    weights: Array,
    *,
    prior: Array | None = None,
    strength: Array | None = None,
    robust: bool = True,
) -> tuple[Array, Array, Array]:
    """Solve a non-negative, robust, weighted least-squares problem with an optional pull towards a prior.

    Parameters
    ----------
    columns : array, shape (n, k)
        How often each of n measurements pays each of k terms [-].
    target : array, shape (n,)
        Measured times [s].
    weights : array, shape (n,)
        Weight of an error of one second [-].
    prior, strength : array, shape (k,), optional
        Coefficients without data [s] and the strength of that prior [-].
    robust : bool, optional
        Whether outliers count less.

    Returns
    -------
    found, errors : array, shape (k,)
        Coefficients and standard errors, nan where a coefficient stopped at zero [s].
    relative : array, shape (n,)
        Relative residual of each point from a fit without it [-].
    """
    from scipy.optimize import nnls
    from statsmodels.robust.norms import HuberT
    from statsmodels.robust.scale import mad

    size = np.abs(columns).max(axis=0)
    size[size == 0] = 1.0  # a term that no measurement pays stays at its prior
    scaled = columns / size
    pull = np.zeros((0, len(size))) if strength is None else np.diag(strength * 1.0)
    aim = np.zeros(0) if prior is None or strength is None else strength * prior
    pull = pull / size if len(pull) else pull
    trust = np.ones(len(target))
    for _ in range(8 if robust else 1):
        w = weights * trust
        found, _ = nnls(np.vstack([scaled * w[:, None], pull]), np.concatenate([target * w, aim]))
        predicted = np.maximum(scaled @ found, 1e-3 * target)
        logs = np.log(target / predicted)
        # The slope of a squared logarithm, so that half and double weigh alike. Huber's norm for outliers; a spread
        # below 15 % counts as 15 %.
        level = np.clip(logs / (1.0 - predicted / target + 1e-12 * (logs == 0)), 0.1, 10.0)
        trust = np.sqrt(level * HuberT(2.5).weights(logs / max(mad(logs, center=0.0), 0.15)))
    found[(scaled * found / target[:, None]).max(axis=0) < 1e-6] = 0.0  # rounding: no part of any time
    active = np.flatnonzero(found > 0)
    w = weights * trust
    rows = np.vstack([scaled[:, active] * w[:, None], pull[:, active]])
    inverse = np.linalg.pinv(rows.T @ rows)
    predicted = scaled @ found
    noise = np.sqrt(np.sum(((target - predicted) * w) ** 2) / max(len(target) - len(active), 1))
    errors = np.full(len(size), np.nan)
    errors[active] = noise * np.sqrt(np.maximum(np.diag(inverse), 0.0)) / size[active]
    leverage = np.einsum("ij,jk,ik->i", rows, inverse, rows)[: len(target)]
    left_out = (target - predicted) / np.maximum(1.0 - leverage, 0.3)
    return found / size, errors, left_out / np.maximum(target - left_out, 0.05 * target)


def find_spread(relative: Array) -> tuple[float, float]:
    """Find standard deviation and mean of log(measured / predicted), outliers clipped.

    Parameters
    ----------
    relative : array
        Measured over predicted, less one [-].

    Returns
    -------
    spread, bias : float
        Both of the logarithm [-].
    """
    logs = np.log1p(np.clip(relative, -0.8, 4.0))
    middle = float(np.median(logs))
    inner = np.clip(logs, middle - 0.7, middle + 0.7)
    return float(inner.std()) if len(inner) > 1 else 0.3, float(inner.mean())


def build_fit(
    form: str, names: Sequence[str], found: Array, errors: Array, relative: Array, units: Mapping[str, str], **more: Any
) -> Fit:
    """Build a `Fit` from the numbers of a least-squares solution; terms that stopped at zero are named as such.

    Parameters
    ----------
    form : str
        Name of the model [-].
    names : sequence of str
        Parameters in the order of `found` [-].
    found, errors : array
        Values and standard errors, by the unit of each parameter [-].
    relative : array
        Relative residuals of points left out [-].
    units : mapping of str to str
        Unit by parameter [-].
    **more : object
        Other fields of `Fit`, such as ``ranges``, ``source`` and ``date``.

    Returns
    -------
    fit : Fit
        The fit.
    """
    kept = [i for i, value in enumerate(found) if value > 0 or names[i] in ("scale", "cold_scale")]
    spread, bias = find_spread(relative)
    return Fit(
        form,
        {names[i]: float(found[i]) for i in kept},
        stderr={names[i]: float(errors[i]) for i in kept if np.isfinite(errors[i])},
        spread=spread,
        bias=bias,
        n=len(relative),
        at_bounds=tuple(name for i, name in enumerate(names) if i not in kept),
        units={names[i]: units[names[i]] for i in kept},
        **more,
    )


def check_times(seconds: Any, least: int) -> Array:
    """Check measured times before they are fitted.

    Parameters
    ----------
    seconds : array
        Measured times [s].
    least : int
        Least number of them [-].

    Returns
    -------
    seconds : array
        The same, as floats [s].

    Raises
    ------
    ValueError
        For fewer times, or times that are not finite and above zero.
    """
    values = np.asarray(seconds, dtype=float)
    if values.ndim != 1 or len(values) < least or not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise ValueError(
            f"seconds holds {values.size} values from {values.min() if values.size else 'nothing'}; it must hold at "
            f"least {least} finite times above 0; measure more points or drop the broken ones"
        )
    return values
