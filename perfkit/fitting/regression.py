"""Least squares for measured times, and fits of what real iterations add to the times of isolated
kernels.

Errors are relative, outliers count less, parameters are not negative, and the spread comes from
left-out points.
"""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np

from perfkit.fitting.models import InContext, Iteration
from perfkit.fitting.parameters import Fit
from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import Array, check_positive, read_numbers, show

F = TypeVar("F", bound=Fit)
#: What fits ask for where they cannot take what they are given.
COLUMNS = "give arrays with one number for each measurement"


class _Prior(NamedTuple):
    """What is known of a term before it is measured: its value, the standard deviation of that, and
    their unit."""

    value: float
    deviation: float
    unit: str


#: Prior of each term; docs/formulas.md, table 4.2.
_CONTEXT = {
    "scale": _Prior(1.0, 1.0, "-"),
    "cold_scale": _Prior(1.0, 1.0, "-"),
    "launch": _Prior(1e-6, 5e-6, "s"),
    "page_walks": _Prior(0.0, 5e-8, "s"),
}


def solve_terms(
    columns: Array, target: Array, weights: Array, prior: Array, strength: Array, *, rounds: int = 1
) -> Array:
    """Solve a non-negative weighted least-squares problem that is pulled towards a prior.

    Parameters
    ----------
    columns : array, shape (n, k)
        How often each of n measurements pays each of k terms [-].
    target : array, shape (n,)
        Measured times [s].
    weights : array, shape (n,)
        Weight of an error of one second [-].
    prior, strength : array, shape (k,)
        Coefficients that hold without data [s], and the weight of that prior [-].
    rounds : int, optional
        Number of solutions; each gives outliers of the one before less weight [-].

    Returns
    -------
    found : array, shape (k,)
        Coefficients, 0 where a term is no part of any time [s].
    """
    from scipy.optimize import nnls

    # scipy's non-negative least squares; statsmodels.RLM and WLS know no bounds, and neither knows
    # a prior, which is one more row for each term here
    size = _find_sizes(columns)
    scaled = columns / size
    rows = np.vstack([scaled, np.diag(strength / size)])
    aim = np.concatenate([target, strength * prior])
    weights_of_prior = np.ones(len(size))
    found = np.zeros(columns.shape[1])
    for number in range(rounds):
        trust = _find_trust(target, scaled @ found) if number else 1.0
        w = np.append(weights * trust, weights_of_prior)
        found, _ = nnls(rows * w[:, None], aim * w)
    largest_shares = (scaled * found / target[:, None]).max(axis=0)
    found[largest_shares < 1e-6] = 0.0  # rounding
    return np.asarray(found / size)


def fit_terms(
    model: type[F],
    units: Mapping[str, str],
    columns: Array,
    target: Array,
    weights: Array,
    prior: Array,
    strength: Array,
    *,
    rounds: int = 1,
    **more: Any,
) -> F:
    """Solve as `solve_terms` does, and add standard errors and the spread of points left out one at
    a time.

    `units` has the unit of each coefficient, in the order of the columns; `more` are other fields
    of `Fit`.
    """
    found = solve_terms(columns, target, weights, prior, strength, rounds=rounds)
    size = _find_sizes(columns)
    predicted = columns @ found
    # scipy.optimize.nnls gives no standard errors: those of weighted least squares on the terms
    # above zero, with the prior as rows. Points left out follow from their leverage.
    active = np.flatnonzero(found > 0)
    w = weights * _find_trust(target, predicted)
    rows = np.vstack([columns * w[:, None], np.diag(strength)])[:, active] / size[active]
    inverse = np.linalg.pinv(rows.T @ rows)
    degrees = max(len(target) - len(active), 1)
    noise = np.sqrt(np.sum(((target - predicted) * w) ** 2) / degrees)
    errors = np.full(len(size), np.nan)
    errors[active] = noise * np.sqrt(np.maximum(np.diag(inverse), 0.0)) / size[active]
    leverage = np.einsum("ij,jk,ik->i", rows, inverse, rows)[: len(target)]
    left_out = (target - predicted) / np.maximum(1.0 - leverage, 0.3)
    relative = left_out / np.maximum(target - left_out, 0.05 * target)
    return build_fit(model, units, found, errors, relative, **more)


def _find_sizes(columns: Array) -> Array:
    """Largest value of each term, for scaling; 1 for a term that no measurement pays, which stays
    at its prior."""
    size = np.abs(columns).max(axis=0)
    return np.where(size == 0, 1.0, size)


def _find_trust(target: Array, predicted: Array) -> Array:
    """Weights that make half and double count alike, as in a squared logarithm, and outliers less
    (Huber's norm)."""
    predicted = np.maximum(predicted, 1e-3 * target)
    logs = np.log(target / predicted)
    differences = 1.0 - predicted / target
    # the ratio of both is 1 where they vanish
    differences = np.where(logs == 0, differences + 1e-12, differences)
    level = np.minimum(np.maximum(logs / differences, 0.1), 10.0)
    # the standard deviation of a normal distribution with this median, as
    # statsmodels.robust.scale.mad, which takes 20 times as long for 20 numbers
    spread = max(median(np.abs(logs).tolist()) / 0.6744897501960817, 0.15)
    huber = 2.5 / np.maximum(np.abs(logs / spread), 2.5)
    return np.sqrt(level * huber)


def find_spread(relative: Array) -> tuple[float, float]:
    """Standard deviation and mean of log(measured / predicted) [-], outliers clipped, from relative
    residuals [-]."""
    logs = np.log1p(np.clip(relative, -0.8, 4.0))
    middle = median(logs.tolist())
    inner = np.clip(logs, middle - 0.7, middle + 0.7)
    return float(inner.std()) if len(inner) > 1 else 0.3, float(inner.mean())


def build_fit(
    model: type[F],
    units: Mapping[str, str],
    found: Array,
    errors: Array,
    relative: Array,
    **more: Any,
) -> F:
    """Build a fitted model from a least-squares solution; terms that stopped at zero are listed in
    `at_bounds`.

    `found` and `errors` are values and standard errors in the order of `units`, `relative` are the
    relative residuals of left-out points [-], and `more` are other fields of `Fit`.
    """
    spread, bias = find_spread(relative)
    values: dict[str, float] = {}
    stderr: dict[str, float] = {}
    at_bounds = []
    for name, value, error in zip(units, found.tolist(), errors.tolist(), strict=True):
        if _is_at_bound(name, value):
            at_bounds.append(name)
            continue
        values[name] = value
        if np.isfinite(error):
            stderr[name] = error
    about: dict[str, Any] = {
        "stderr": stderr,
        "units": {name: units[name] for name in values},
        "n": len(relative),
        "spread": spread,
        "bias": bias,
        "at_bounds": tuple(at_bounds),
    }
    return model.build(values, **{**about, **more})


def _is_at_bound(name: str, value: float) -> bool:
    """Whether a term stopped at zero, and is left out; a scale of zero is one."""
    return value <= 0 and name not in ("scale", "cold_scale")


def check_times(seconds: Any, least: int) -> Array:
    """Measured times as an array of floats [s]; a ValueError for too few, and for other than finite
    times above 0."""
    numbers = read_numbers(seconds)
    if numbers is None:
        raise ValueError(f"seconds is {show(seconds)}; it must be an array of times above 0")
    is_long_enough = numbers.ndim == 1 and len(numbers) >= least
    if not is_long_enough or not np.all(np.isfinite(numbers)) or np.any(numbers <= 0):
        smallest = numbers.min() if numbers.size else "nothing"
        raise ValueError(
            f"seconds holds {numbers.size} values from {smallest}; it must hold at least {least} "
            "finite times above 0; measure more points or drop the broken ones"
        )
    return numbers


def check_column(name: str, values: Any, count: int) -> Array:
    """Sizes or numbers of an array with one for each of `count` measurements, or one for all; a
    ValueError for other lengths, and for other than finite numbers."""
    column = read_numbers(values)
    if column is None:
        raise ValueError(f"{name} is {show(values)}; it must be an array of numbers")
    broken = column[~np.isfinite(column)]
    if broken.size:
        raise ValueError(
            f"{name} holds {broken.flat[0]}; sizes must be finite and not below 0; drop broken rows"
        )
    if column.shape not in ((), (count,)):
        raise ValueError(
            f"{name} has the shape {column.shape}, seconds has {count} times; give one for each"
        )
    return np.broadcast_to(column, (count,))


# -- what real iterations add
# ------------------------------------------------------------------------------------------


@refuse_misfits(COLUMNS)
def fit_context(
    hot: Array,
    cold: Array,
    page_walks: Array,
    measured: Array,
    *,
    pull: float = 10.0,
    source: str = "",
) -> InContext:
    """Fit what real iterations add to the isolated time of one operation class.

    Parameters
    ----------
    hot, cold : array
        Isolated time of each operation with operands in the caches, and what operands in memory add
        [s].
    page_walks : array
        Lookups that need a walk of the page table [-].
    measured : array
        Times inside real iterations [s].
    pull : float, optional
        Number of average points that the prior counts as [-]; docs/formulas.md, table 4.2.
    source : str, optional
        Data id.

    Returns
    -------
    fit : InContext
        Parameters of `perfkit.models.kernels.in_context`.

    Notes
    -----
    The weight of a point grows with the square root of its time, so that long operations decide.
    The operations of one iteration share an error: a few iterations hold less information than
    their many operations suggest. Therefore the prior, no change of the isolated time, counts as
    several points.
    """
    measured = check_times(measured, 1)
    pull = check_positive("pull", pull, zero=True)
    given = {"hot": hot, "cold": cold, "page_walks": page_walks}
    sizes = {name: check_column(name, values, len(measured)) for name, values in given.items()}
    problem = _pose_context(sizes["hot"], sizes["cold"], sizes["page_walks"], measured, pull)
    units = {name: known.unit for name, known in _CONTEXT.items()}
    return fit_terms(InContext, units, *problem, source=source)


class _ContextProblem(NamedTuple):
    """What `solve_terms` solves for a class of operations in iterations."""

    columns: Array
    target: Array
    weights: Array
    prior: Array
    strength: Array


def _pose_context(
    hot: Array, cold: Array, page_walks: Array, measured: Array, pull: float
) -> _ContextProblem:
    """Pose the problem of `fit_context`."""
    columns = np.stack([hot, cold, np.ones_like(measured), page_walks], axis=1)
    prior = np.array([known.value for known in _CONTEXT.values()])
    widths = np.array([known.deviation for known in _CONTEXT.values()])
    weights = 1.0 / np.sqrt(measured * measured.mean())
    return _ContextProblem(columns, measured, weights, prior, math.sqrt(pull) / widths)


def solve_context(
    hot: Array, cold: Array, page_walks: Array, measured: Array, *, pull: float
) -> dict[str, float]:
    """Find the parameters of `fit_context` alone, without their errors and spread: many are found to
    judge iterations that are left out.

    Parameters
    ----------
    hot, cold, page_walks, measured : array
        As `fit_context` takes them [s or -].
    pull : float
        Number of average points that the prior counts as [-].

    Returns
    -------
    values : dict of str to float
        Parameters of `perfkit.models.kernels.in_context` [s or -].
    """
    found = solve_terms(*_pose_context(hot, cold, page_walks, measured, pull)).tolist()
    values = dict(zip(_CONTEXT, found, strict=True))
    return {name: value for name, value in values.items() if not _is_at_bound(name, value)}


@refuse_misfits(COLUMNS)
def fit_iteration(
    priced: Array,
    counts: Array,
    measured: Array,
    *,
    each: str = "per_operation",
    prior: tuple[float, float] = (1.0, 2e-6),
    trust: tuple[float, float] = (0.05, 5e-6),
    weights: Array | float = 1.0,
    source: str = "",
) -> Iteration:
    """Fit whole iterations: a scale on the predicted time, and a time for each operation or
    collective.

    Parameters
    ----------
    priced : array
        Predicted time of the operations of each iteration [s].
    counts : array
        Number of operations, or collectives, of each iteration [-].
    measured : array
        Measured iteration times [s].
    each : str, optional
        Name of the second parameter.
    prior : (float, float), optional
        Scale [-] and time [s] that hold without data.
    trust : (float, float), optional
        Standard deviations of the prior where iterations have errors of 5 % [-] and [s].
    weights : array or float, optional
        Weights of the relative errors [-].
    source : str, optional
        Data id.

    Returns
    -------
    fit : Iteration
        ``scale`` [-] and ``per_operation``, or as named [s].
    """
    measured = check_times(measured, 1)
    priced = check_column("priced", priced, len(measured))
    counts = check_column("counts", counts, len(measured))
    weights = check_column("weights", weights, len(measured))
    return fit_terms(
        Iteration,
        {"scale": "-", each: "s"},
        np.stack([priced, counts], axis=1),
        measured,
        weights / measured,
        np.array(prior),
        0.05 / np.array(trust),
        source=source,
    )
