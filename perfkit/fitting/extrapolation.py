"""Outside the sizes of a fit of a collective: how much less sure it is, and which one sample would help most."""

from collections.abc import Mapping

import numpy as np

from perfkit.fitting.parameters import Fit
from perfkit.ground.units import Array, Values
from perfkit.models import collectives as forms

#: Spread [-] where all of a start-up turns into transfer, or the reverse, beyond the fitted sizes; docs/formulas.md,
#: table 1.3.
CHANGE = 0.6
_STEP = 1e-4


def evaluate_collective(fit: Fit, nbytes: Values, operation: str, ranks: int, **changed: float) -> Array:
    """Evaluate the form of a fit of a collective.

    Parameters
    ----------
    fit : Fit
        Parameters of a form of `perfkit.models.collectives`.
    nbytes : float or array
        Message sizes in the nccl-tests convention [B].
    operation : str
        Operation, which a law over rank counts needs.
    ranks : int
        Ranks, which a law over rank counts needs [-].
    **changed : float
        Parameters to take instead of those of the fit, in their units [-].

    Returns
    -------
    time : array
        One time per size [s].

    Examples
    --------
    >>> fit = Fit("alpha_beta", {"alpha": 1e-5, "beta": 1e-11})
    >>> round(float(evaluate_collective(fit, 1e6, "all_reduce", 8)) * 1e6)
    20
    """
    values: Mapping[str, float] = {**fit, **changed}
    if fit.form == "over_ranks":
        return np.asarray(forms.over_ranks(nbytes, ranks, operation, **values))
    return np.asarray(getattr(forms, fit.form)(nbytes, **values))


def _slopes(fit: Fit, nbytes: Array, operation: str, ranks: int) -> tuple[Array, Array]:
    """Changes of the logarithm of time: by one standard error of each parameter, and per logarithm of the size."""
    base, errors = np.log(evaluate_collective(fit, nbytes, operation, ranks)), []
    for name, error in fit.stderr.items():
        if (value := fit[name]) > 0:
            moved = np.log(evaluate_collective(fit, nbytes, operation, ranks, **{name: value * (1 + _STEP)}))
            errors.append((moved - base) * (error / (_STEP * value)))
    elastic = (np.log(evaluate_collective(fit, nbytes * (1 + _STEP), operation, ranks)) - base) / _STEP
    return np.stack(errors) if errors else np.zeros((1, *nbytes.shape)), elastic


def spread_beyond(fit: Fit, nbytes: Values, operation: str, ranks: int) -> Array:
    r"""Spread of measurements around a fit of a collective, inside and outside the sizes it was made on.

    Parameters
    ----------
    fit : Fit
        Parameters of a form of `perfkit.models.collectives`.
    nbytes : float or array
        Message sizes in the nccl-tests convention [B].
    operation : str
        Operation, which a law over rank counts needs.
    ranks : int
        Ranks, which a law over rank counts needs [-].

    Returns
    -------
    spread : array
        Standard deviation of log(measured / predicted), one per size [-].

    Notes
    -----
    Beyond the fitted sizes, with e the share of the transfer in the time (its slope in logarithms),

    .. math:: s^2 = s_{fit}^2 + \sum_i \left(\frac{\partial \ln t}{\partial \theta_i} \sigma_i\right)^2 + (0.6\,
       \Delta e)^2

    where the change of e from the last fitted size says how much of the form was never seen.

    Examples
    --------
    >>> fit = Fit("pipelined", {"alpha": 2e-5, "beta": 5e-12}, {"alpha": 2e-7, "beta": 1e-12}, spread=0.05,
    ...           ranges={"nbytes": (512.0, 2.0**22)})
    >>> spread_beyond(fit, [2.0**20, 2.0**30], "all_reduce", 8).round(2)
    array([0.05, 0.34])
    """
    sizes = np.asarray(nbytes, dtype=float)
    spread = fit.spread_at(evaluate_collective(fit, sizes, operation, ranks))
    low, high = fit.ranges.get("nbytes", (0.0, np.inf))
    if sizes.size == 0 or (sizes.min() >= low and sizes.max() <= high):
        return spread
    errors, elastic = _slopes(fit, sizes, operation, ranks)
    change = elastic - _slopes(fit, np.clip(sizes, low, high), operation, ranks)[1]
    beyond = np.sqrt(spread**2 + np.sum(errors**2, axis=0) + (CHANGE * change) ** 2)
    return np.where((sizes < low) | (sizes > high), beyond, spread)


def choose_sample(fit: Fit, nbytes: float, operation: str, ranks: int) -> float:
    """Choose the message whose measurement would make an estimate outside the fitted sizes surer.

    Parameters
    ----------
    fit : Fit
        Parameters of a form of `perfkit.models.collectives`.
    nbytes : float
        The message to be estimated [B].
    operation : str
        Operation, which a law over rank counts needs.
    ranks : int
        Ranks, which a law over rank counts needs [-].

    Returns
    -------
    nbytes : float
        Above the fitted sizes the smallest power of two that takes away 95 % of the variance that measuring the message
        itself would take away; below them that message, which is the cheapest [B].

    Notes
    -----
    Standard errors are taken as independent, one sample as noisy as the fit; see `spread_beyond` for the variance. A100
    and H100 curves known up to 256 KiB, 1, 4 and 16 MiB predict 512 MiB with 80, 38, 22 and 12 % mean error; with the
    one sample chosen here, of 16 to 256 MiB, with 6, 5, 7 and 7 %.

    Examples
    --------
    >>> fit = Fit("pipelined", {"alpha": 2e-5, "beta": 5e-12}, {"alpha": 2e-7, "beta": 1e-12}, spread=0.05,
    ...           ranges={"nbytes": (512.0, 2.0**22)})
    >>> round(choose_sample(fit, 2.0**30, "all_reduce", 8) / 2**20)
    128
    """
    edge = fit.ranges.get("nbytes", (0.0, nbytes))[1]
    if nbytes <= edge:
        return nbytes
    powers = 2.0 ** np.arange(np.floor(np.log2(max(edge, 1.0))) + 1, np.ceil(np.log2(nbytes)))
    sizes = np.concatenate([[edge], powers, [nbytes]])
    errors, elastic = _slopes(fit, sizes, operation, ranks)
    noise = max(fit.spread, 0.01) ** 2
    learnt = np.sum(errors * errors[:, -1:], axis=0) ** 2 / (np.sum(errors**2, axis=0) + noise)
    learnt[0] = 0.0  # the last fitted size is no new sample
    gain = learnt - (CHANGE * (elastic[-1] - elastic)) ** 2
    return float(sizes[1:][np.argmax(gain[1:] - gain[0] >= 0.95 * (gain[-1] - gain[0]))])
