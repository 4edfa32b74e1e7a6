"""Fits of what real iterations add to isolated kernels."""

import math

import numpy as np

from perfkit.fitting.parameters import Fit
from perfkit.fitting.regression import build_fit, check_times, solve_nonnegative
from perfkit.units import Array

__all__ = ["fit_context", "fit_iteration"]


#: How far the context terms may reasonably lie from their prior: a factor of about two on times already modelled, some
#: microseconds of cold code per call, a memory latency per page walk.
_CONTEXT = {
    "scale": (1.0, 1.0, "-"),
    "cold_scale": (1.0, 1.0, "-"),
    "launch": (1e-6, 5e-6, "s"),
    "page_walks": (0.0, 5e-8, "s"),
}


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
        Average points that the prior counts for; 10 was chosen on the 90 runs of the platform zen5-2 [-].
    source : str, optional
        Data id.

    Returns
    -------
    fit : Fit
        Parameters of `perfkit.models.kernels.in_context`.

    Notes
    -----
    Points weigh between relative and absolute error (with the root of the time), so that the operations that make up an
    iteration decide. The operations of an iteration err alike: a few iterations know less than their many operations
    make believe, hence a prior that counts for several.
    """
    measured = check_times(measured, 1)
    columns = np.stack([hot, cold, np.ones_like(measured), page_walks], axis=1)
    prior, sizes = (np.array([values[i] for values in _CONTEXT.values()], dtype=float) for i in (0, 1))
    weights = 1.0 / np.sqrt(measured * measured.mean())
    strength = math.sqrt(pull) / sizes
    found, errors, relative = solve_nonnegative(
        columns, measured, weights, prior=prior, strength=strength, robust=False
    )
    return build_fit(
        "in_context", list(_CONTEXT), found, errors, relative, {n: v[2] for n, v in _CONTEXT.items()}, source=source
    )


def fit_iteration(
    priced: Array,
    counts: Array,
    measured: Array,
    *,
    each: str = "per_operation",
    prior: tuple[float, float] = (1.0, 2e-6),
    trust: tuple[float, float] = (0.05, 5e-6),
    source: str = "",
) -> Fit:
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
        Where scale [-] and time [s] lie without data.
    trust : (float, float), optional
        How far they may lie from there, one standard deviation, where an iteration errs by 5 % [-] and [s].
    source : str, optional
        Data id.

    Returns
    -------
    fit : Fit
        ``scale`` [-] and ``per_operation``, or as named [s].
    """
    measured = check_times(measured, 1)
    columns = np.stack([priced, counts], axis=1)
    strength = 0.05 / np.array(trust)
    found, errors, relative = solve_nonnegative(
        columns, measured, 1.0 / measured, prior=np.array(prior), strength=strength, robust=False
    )
    units = {"scale": "-", each: "s"}
    return build_fit("iteration", list(units), found, errors, relative, units, source=source)
