"""Fits of what real iterations add to isolated kernels."""

import math

import numpy as np

from perfkit.fitting.parameters import Fit
from perfkit.fitting.regression import check_times, fit_terms, solve_terms
from perfkit.ground.units import Array

#: Prior of each term: value, standard deviation and unit; docs/formulas.md, table 4.2.
_CONTEXT = {
    "scale": (1.0, 1.0, "-"), "cold_scale": (1.0, 1.0, "-"),
    "launch": (1e-6, 5e-6, "s"), "page_walks": (0.0, 5e-8, "s"),
}  # fmt: skip


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
