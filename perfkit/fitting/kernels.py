"""Fits of kernels: their time as a sum of terms."""

from collections.abc import Mapping

import numpy as np

from perfkit.fitting.parameters import Fit
from perfkit.fitting.regression import build_fit, check_times, solve_nonnegative
from perfkit.units import Array

__all__ = ["fit_additive"]


def fit_additive(
    terms: Mapping[str, Array],
    seconds: Array,
    *,
    prior: Mapping[str, float] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    source: str = "",
) -> Fit:
    """Fit the time of kernels as a sum of terms, relative errors counting alike at all sizes.

    Parameters
    ----------
    terms : mapping of str to array
        How often each term is paid, one number per measurement, by names of `perfkit.models.kernels.TERMS`.
    seconds : array
        Measured times [s].
    prior : mapping of str to float, optional
        Terms known from elsewhere, such as the time of a byte of a memory level: each counts as one measurement that
        trusts it within a half [s].
    ranges : mapping of str to (low, high), optional
        Sizes the measurements span.
    source : str, optional
        Data id.

    Returns
    -------
    fit : Fit
        Parameters of `perfkit.models.kernels.additive`; the spread is that of points left out one at a time.

    Raises
    ------
    ValueError
        For fewer than two measurements or times that are not above zero.

    Examples
    --------
    >>> n = np.array([1e3, 1e4, 1e5, 1e6])
    >>> fit = fit_additive({"launch": np.ones(4), "nbytes": n}, 2e-6 + 1e-11 * n)
    >>> round(fit["launch"] * 1e6, 6), round(fit["nbytes"] * 1e11, 6)
    (2.0, 1.0)
    """
    seconds = check_times(seconds, 2)
    columns = np.stack([np.broadcast_to(np.asarray(v, dtype=float), seconds.shape) for v in terms.values()], axis=1)
    known = np.array([(prior or {}).get(name, 0.0) for name in terms])
    strength = np.divide(0.2, known, out=np.zeros(len(known)), where=known > 0)  # 10 % residuals against 50 % trust
    found, errors, relative = solve_nonnegative(columns, seconds, 1.0 / seconds, prior=known, strength=strength)
    units = {name: "s" for name in terms}
    return build_fit("additive", list(terms), found, errors, relative, units, ranges=ranges or {}, source=source)
