"""Spread of collectives outside the sizes that were fitted, and the measurement that would help
most."""

from typing import NamedTuple

import numpy as np

from perfkit.fitting.models import CollectiveModel
from perfkit.ground.units import Array, Values

#: Spread [-] where all of a start-up turns into transfer, or the reverse, beyond the fitted sizes;
#: docs/formulas.md, table 1.3.
CHANGE = 0.6
_STEP = 1e-4  # relative step of numerical slopes


class _Slopes(NamedTuple):
    """How the logarithm of a time changes: by one standard error of each parameter (a row each),
    and with the logarithm of the size, which is the share of the transfer [-]."""

    by_error: Array
    by_size: Array


def _find_slopes(fit: CollectiveModel, nbytes: Array, operation: str, ranks: int) -> _Slopes:
    """Slopes of a fit at some sizes [B], numerically."""
    values = dict(fit)
    log_time = np.log(fit.evaluate(nbytes, operation, ranks, **values))
    by_error = []
    for name, error in fit.stderr.items():
        value = values[name]
        if value <= 0:
            continue
        moved = {**values, name: value * (1 + _STEP)}
        log_moved = np.log(fit.evaluate(nbytes, operation, ranks, **moved))
        by_error.append((log_moved - log_time) * (error / (_STEP * value)))
    if not by_error:
        by_error.append(np.zeros(nbytes.shape))
    log_larger = np.log(fit.evaluate(nbytes * (1 + _STEP), operation, ranks, **values))
    return _Slopes(np.stack(by_error), by_size=(log_larger - log_time) / _STEP)


def spread_beyond(fit: CollectiveModel, nbytes: Values, operation: str, ranks: int) -> Array:
    r"""Spread of measurements around a fitted collective, inside and outside its measured sizes.

    It takes what `CollectiveModel.time` takes, and returns the standard deviation of log(measured /
    predicted) [-].

    Notes
    -----
    With e the share of the transfer in the time, which is the slope of log time over log size,
    beyond the fitted sizes

    .. math:: s^2 = s_{fit}^2 + \sum_i \left(\frac{\partial \ln t}{\partial \theta_i}
    \sigma_i\right)^2 + (0.6\,
       \Delta e)^2

    where the change of e since the last fitted size says how much of the form was never measured.

    Examples
    --------
    >>> from perfkit.fitting import Pipelined
    >>> known = {"alpha": 2e-5, "beta": 5e-12}
    >>> fit = Pipelined.build(known, stderr={"alpha": 2e-7, "beta": 1e-12}, spread=0.05,
    ...                       ranges={"nbytes": (512.0, 2.0**22)})
    >>> spread_beyond(fit, [2.0**20, 2.0**30], "all_reduce", 8).round(2)
    array([0.05, 0.34])
    """
    sizes = np.asarray(nbytes, dtype=float)
    spread = fit.spread_at(fit.time(sizes, operation, ranks))
    low, high = fit.ranges.get("nbytes", (0.0, np.inf))
    outside = (sizes < low) | (sizes > high)
    if not np.any(outside):
        return spread
    far = sizes[outside]
    slopes = _find_slopes(fit, far, operation, ranks)
    slopes_at_edge = _find_slopes(fit, np.clip(far, low, high), operation, ranks)
    from_parameters = np.sum(slopes.by_error**2, axis=0)
    from_form = (CHANGE * (slopes.by_size - slopes_at_edge.by_size)) ** 2
    widened = np.array(spread)
    widened[outside] = np.sqrt(spread[outside] ** 2 + from_parameters + from_form)
    return widened


def choose_sample(fit: CollectiveModel, nbytes: float, operation: str, ranks: int) -> float:
    """Choose the message [B] to measure for a better estimate of a message outside the fitted
    sizes.

    Above the fitted sizes it is the smallest power of two that removes 95 % of the variance that a
    measurement of the message itself would remove. Below them it is the message itself, which is
    the cheapest.

    Notes
    -----
    Standard errors are taken as independent, and the sample as noisy as the fit; `spread_beyond`
    gives the variance. A100 and H100 curves known up to 256 KiB, 1, 4 and 16 MiB predict 512 MiB
    with 80, 38, 22 and 12 % mean error. With the one sample chosen here, of 16 to 256 MiB, the
    errors are 6, 5, 7 and 7 %.

    Examples
    --------
    >>> from perfkit.fitting import Pipelined
    >>> known = {"alpha": 2e-5, "beta": 5e-12}
    >>> fit = Pipelined.build(known, stderr={"alpha": 2e-7, "beta": 1e-12}, spread=0.05,
    ...                       ranges={"nbytes": (512.0, 2.0**22)})
    >>> round(choose_sample(fit, 2.0**30, "all_reduce", 8) / 2**20)
    128
    """
    edge = fit.ranges.get("nbytes", (0.0, nbytes))[1]
    if nbytes <= edge:
        return nbytes
    powers = 2.0 ** np.arange(np.floor(np.log2(max(edge, 1.0))) + 1, np.ceil(np.log2(nbytes)))
    sizes = np.concatenate([[edge], powers, [nbytes]])
    slopes = _find_slopes(fit, sizes, operation, ranks)
    errors, elastic = slopes.by_error, slopes.by_size
    noise = max(fit.spread, 0.01) ** 2
    learnt = np.sum(errors * errors[:, -1:], axis=0) ** 2 / (np.sum(errors**2, axis=0) + noise)
    learnt[0] = 0.0  # the last fitted size is no new sample
    gain = learnt - (CHANGE * (elastic[-1] - elastic)) ** 2
    return float(sizes[1:][np.argmax(gain[1:] - gain[0] >= 0.95 * (gain[-1] - gain[0]))])
