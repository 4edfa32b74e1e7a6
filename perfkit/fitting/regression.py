"""Least squares for times: relative errors, outliers, no negative parameters, errors of left-out points.

With it, fits of what real iterations add to isolated kernels.
"""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from perfkit.fitting.parameters import Fit
from perfkit.ground.units import Array

#: Prior of each term: value, standard deviation and unit; docs/formulas.md, table 4.2.
_CONTEXT = {
    "scale": (1.0, 1.0, "-"), "cold_scale": (1.0, 1.0, "-"),
    "launch": (1e-6, 5e-6, "s"), "page_walks": (0.0, 5e-8, "s"),
}  # fmt: skip


def solve_terms(
    columns: Array, target: Array, weights: Array, prior: Array, strength: Array, *, rounds: int = 1
) -> Array:
    """Solve a non-negative weighted least-squares problem with a pull towards a prior.

    Parameters
    ----------
    columns : array, shape (n, k)
        How often each of n measurements pays each of k terms [-].
    target : array, shape (n,)
        Measured times [s].
    weights : array, shape (n,)
        Weight of an error of one second [-].
    prior, strength : array, shape (k,)
        Coefficients without data [s] and the strength of that prior [-].
    rounds : int, optional
        Repetitions in which outliers, by the one before, count less [-].

    Returns
    -------
    found : array, shape (k,)
        Coefficients, 0 where they are no part of any time [s].
    """
    from scipy.optimize import nnls

    size, found = _find_sizes(columns), np.zeros(columns.shape[1])
    scaled, aim, ones = columns / size, np.concatenate([target, strength * prior]), np.ones(len(size))
    rows = np.vstack([scaled, np.diag(strength / size)])
    for number in range(rounds):
        w = np.append(weights * (_find_trust(target, scaled @ found) if number else 1.0), ones)
        found, _ = nnls(rows * w[:, None], aim * w)
    found[(scaled * found / target[:, None]).max(axis=0) < 1e-6] = 0.0  # rounding
    return np.asarray(found / size)


def fit_terms(
    form: str, units: Mapping[str, str], columns: Array, target: Array, *problem: Array, rounds: int = 1, **more: Any
) -> Fit:
    """Fit non-negative coefficients of terms, with standard errors and the spread of points left out one at a time.

    Parameters
    ----------
    form : str
        Name of the model.
    units : mapping of str to str
        Unit of each coefficient, in the order of the columns.
    columns, target, *problem : array
        As `solve_terms` takes them [-].
    rounds : int, optional
        As `solve_terms` takes it [-].
    **more : object
        Other fields of `Fit`, such as ``ranges``, ``source`` and ``date``.

    Returns
    -------
    fit : Fit
        Coefficients; terms that stopped at zero are named in `at_bounds`.
    """
    weights, _, strength = problem
    found, size = solve_terms(columns, target, *problem, rounds=rounds), _find_sizes(columns)
    predicted, active = columns @ found, np.flatnonzero(found > 0)
    w = weights * _find_trust(target, predicted)
    rows = np.vstack([columns * w[:, None], np.diag(strength)])[:, active] / size[active]
    inverse = np.linalg.pinv(rows.T @ rows)
    noise = np.sqrt(np.sum(((target - predicted) * w) ** 2) / max(len(target) - len(active), 1))
    errors = np.full(len(size), np.nan)
    errors[active] = noise * np.sqrt(np.maximum(np.diag(inverse), 0.0)) / size[active]
    leverage = np.einsum("ij,jk,ik->i", rows, inverse, rows)[: len(target)]
    left_out = (target - predicted) / np.maximum(1.0 - leverage, 0.3)
    return build_fit(form, units, found, errors, left_out / np.maximum(target - left_out, 0.05 * target), **more)


def _find_sizes(columns: Array) -> Array:
    """Scale of each term; a term that no measurement pays stays at its prior."""
    size = np.abs(columns).max(axis=0)
    return np.where(size == 0, 1.0, size)


def _find_trust(target: Array, predicted: Array) -> Array:
    """How much points count: half and double alike, as in a squared logarithm, outliers less by Huber's norm."""
    predicted = np.maximum(predicted, 1e-3 * target)
    logs = np.log(target / predicted)
    level = np.minimum(np.maximum(logs / (1.0 - predicted / target + 1e-12 * (logs == 0)), 0.1), 10.0)
    spread = max(median(np.abs(logs).tolist()) / 0.6744897501960817, 0.15)  # as of a normal distribution
    return np.sqrt(level * (2.5 / np.maximum(np.abs(logs / spread), 2.5)))


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
    middle = median(logs.tolist())
    inner = np.clip(logs, middle - 0.7, middle + 0.7)
    return float(inner.std()) if len(inner) > 1 else 0.3, float(inner.mean())


def build_fit(form: str, units: Mapping[str, str], found: Array, errors: Array, relative: Array, **more: Any) -> Fit:
    """Build a `Fit` from the numbers of a least-squares solution; terms that stopped at zero are named as such.

    Parameters
    ----------
    form : str
        Name of the model [-].
    units : mapping of str to str
        Unit by parameter, in the order of `found` [-].
    found, errors : array
        Values and standard errors, by the unit of each parameter [-].
    relative : array
        Relative residuals of points left out [-].
    **more : object
        Other fields of `Fit`, such as ``ranges``, ``source`` and ``date``.

    Returns
    -------
    fit : Fit
        The fit.
    """
    spread, bias = find_spread(relative)
    rows = zip(units, found.tolist(), errors.tolist(), strict=True)
    kept = {name: (value, error) for name, value, error in rows if value > 0 or name in ("scale", "cold_scale")}
    stopped, more = tuple(name for name in units if name not in kept), {"spread": spread, "bias": bias, **more}
    about: dict[str, Any] = {"units": {name: units[name] for name in kept}, "at_bounds": stopped, "n": len(relative)}
    stderr = {name: error for name, (_, error) in kept.items() if np.isfinite(error)}
    return Fit(form, {name: value for name, (value, _) in kept.items()}, stderr, **{**about, **more})


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
        held = f"seconds holds {values.size} values from {values.min() if values.size else 'nothing'}"
        wanted = f"at least {least} finite times above 0; measure more points or drop the broken ones"
        raise ValueError(f"{held}; it must hold {wanted}")
    return values


# -- what real iterations add ------------------------------------------------------------------------------------------


def fit_context(
    hot: Array, cold: Array, page_walks: Array, measured: Array, *, pull: float = 10.0, source: str = ""
) -> Fit:
    """Fit what real iterations add to the isolated time of one operation class, shrunk towards nothing.

    Parameters
    ----------
    hot, cold : array
        Isolated time of each operation with near operands, and what distance adds [s].
    page_walks : array
        Lookups whose page address has to be found by a walk [-].
    measured : array
        Times inside real iterations [s].
    pull : float, optional
        Number of average points that the prior counts for [-]; docs/formulas.md, table 4.2.
    source : str, optional
        Data id.

    Returns
    -------
    fit : Fit
        Parameters of `perfkit.models.kernels.in_context`.

    Notes
    -----
    A point weighs with the root of its time, between relative and absolute error, so that long operations decide. All
    operations of an iteration have a common error. A few iterations therefore hold less information than their many
    operations suggest, so the prior counts for several points.
    """
    units = {name: unit for name, (*_, unit) in _CONTEXT.items()}
    return fit_terms("in_context", units, *_weigh_context(hot, cold, page_walks, measured, pull), source=source)


def find_context(
    hot: Array, cold: Array, page_walks: Array, measured: Array, *, pull: float = 10.0
) -> dict[str, float]:
    """Find the parameters of `fit_context` without errors, much faster: for fits that leave one iteration out.

    Parameters
    ----------
    hot, cold, page_walks, measured : array
        As for `fit_context` [s], page walks [-].
    pull : float, optional
        As for `fit_context` [-].

    Returns
    -------
    parameters : dict of str to float
        Those of `fit_context`, to the last digits.
    """
    found = solve_terms(*_weigh_context(hot, cold, page_walks, measured, pull))
    values = dict(zip(_CONTEXT, found.tolist(), strict=True))
    return {name: value for name, value in values.items() if value or name in ("scale", "cold_scale")}


def _weigh_context(hot: Array, cold: Array, page_walks: Array, measured: Array, pull: float) -> tuple[Array, ...]:
    """Terms, time and weight of each operation; prior and strength of each parameter."""
    measured = check_times(measured, 1)
    columns = np.stack([hot, cold, np.ones_like(measured), page_walks], axis=1)
    prior, sizes = np.array([values[:2] for values in _CONTEXT.values()]).T
    return columns, measured, 1.0 / np.sqrt(measured * measured.mean()), prior, math.sqrt(pull) / sizes


def fit_iteration(
    priced: Array, counts: Array, measured: Array, *, each: str = "per_operation",
    prior: tuple[float, float] = (1.0, 2e-6), trust: tuple[float, float] = (0.05, 5e-6), weights: Array | float = 1.0,
    source: str = "",
) -> Fit:  # fmt: skip
    """Fit whole iterations: a scale on the priced time, and a time for each operation or collective.

    Parameters
    ----------
    priced : array
        Time of each iteration from its operations [s].
    counts : array
        Operations, or collectives, of each iteration [-].
    measured : array
        Measured iteration times [s].
    each : str, optional
        Name of the second parameter.
    prior : (float, float), optional
        Scale [-] and time [s] without data.
    trust : (float, float), optional
        Standard deviations of the prior, if iterations have errors of 5 % [-] and [s].
    weights : array or float, optional
        How much the relative errors count [-].
    source : str, optional
        Data id.

    Returns
    -------
    fit : Fit
        ``scale`` [-] and ``per_operation``, or as named [s].
    """
    measured = check_times(measured, 1)
    terms = np.stack([priced, counts], axis=1), measured, weights / measured
    pull = np.array(prior), 0.05 / np.array(trust)
    return fit_terms("iteration", {"scale": "-", each: "s"}, *terms, *pull, source=source)
