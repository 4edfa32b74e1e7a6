"""Fits of collectives: start-up time and inverse bandwidth."""

import math
from dataclasses import replace

import numpy as np

from perfkit.fitting.parameters import Fit
from perfkit.fitting.regression import build_fit, check_times
from perfkit.units import Array

__all__ = ["fit_pipelined"]


def fit_pipelined(nbytes: Array, seconds: Array, *, sharpness: float | None = 0.6, source: str = "") -> Fit:
    """Fit start-up time and inverse bandwidth of a collective to the logarithm of measured times.

    Parameters
    ----------
    nbytes : array
        Message sizes in the nccl-tests convention [B].
    seconds : array
        Measured times [s].
    sharpness : float or None, optional
        Exponent of the form, kept fixed; None fits it too, between 0.3 and 50 [-].
    source : str, optional
        Data id.

    Returns
    -------
    fit : Fit
        Parameters of `perfkit.models.collectives.pipelined`; the spread is that of sizes left out one at a time.

    Raises
    ------
    ValueError
        For fewer than two measurements or times that are not above zero.

    Examples
    --------
    >>> from perfkit.models.collectives import pipelined
    >>> n = 2.0 ** np.arange(10, 28, 3)
    >>> fit = fit_pipelined(n, pipelined(n, alpha=2e-5, beta=1e-11, sharpness=0.6))
    >>> round(fit["alpha"] * 1e6, 3), round(fit["beta"] * 1e12, 3)
    (20.0, 10.0)
    """
    from scipy.optimize import least_squares

    from perfkit.models.collectives import pipelined

    seconds, nbytes = check_times(seconds, 2), np.asarray(nbytes, dtype=float)
    names = ["alpha", "beta"] if sharpness is not None else ["alpha", "beta", "sharpness"]

    def residuals(p: Array) -> Array:
        values = {"sharpness": sharpness, **dict(zip(names, np.exp(p), strict=True))}
        return np.asarray(np.log(seconds / pipelined(nbytes, **values)))

    start = np.log([seconds.min(), (seconds / nbytes).min(), 1.0][: len(names)])
    low, high = start - 5.0, start + 5.0
    low[2:], high[2:] = math.log(0.3), math.log(50.0)
    solution = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    inverse = np.linalg.pinv(solution.jac.T @ solution.jac)
    leverage = np.einsum("ij,jk,ik->i", solution.jac, inverse, solution.jac)
    left_out = residuals(solution.x) / np.maximum(1 - leverage, 0.3)
    noise = float(np.sqrt(np.sum(residuals(solution.x) ** 2) / max(len(seconds) - len(names), 1)))
    found = np.exp(solution.x)
    errors = found * noise * np.sqrt(np.diag(inverse))
    fit = build_fit(
        "pipelined", names, found, errors, np.expm1(left_out), {"alpha": "s", "beta": "s/B", "sharpness": "-"},
        ranges={"nbytes": (float(nbytes.min()), float(nbytes.max()))}, source=source,
    )  # fmt: skip
    if sharpness is None:
        return fit
    return replace(fit, parameters={**fit.parameters, "sharpness": sharpness}, units={**fit.units, "sharpness": "-"})
