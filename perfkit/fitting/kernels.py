"""Fits of kernels: time as a sum of terms or as a roofline; and the caches that a curve of stream
times shows."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from perfkit.fitting.models import Additive, Roofline
from perfkit.fitting.parameters import SPREAD_SLOPE, Fit
from perfkit.fitting.regression import (
    COLUMNS,
    build_fit,
    check_column,
    check_times,
    find_spread,
    fit_terms,
)
from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import (
    Array,
    Values,
    check_choice,
    check_positive,
    check_type,
    read_numbers,
    show,
)
from perfkit.models.caches import miss_share
from perfkit.models.roofline import roofline_time


class _Prior(NamedTuple):
    """What is known of a parameter before it is measured: its value, the standard deviation of the
    logarithm of that [-], its bounds, and their unit."""

    value: float
    width: float
    low: float
    high: float
    unit: str


#: Prior of each parameter of a roofline; docs/formulas.md, table 2.2.
_ROOFLINE = {
    "launch": _Prior(4.3e-6, width=0.5, low=1e-8, high=1e-3, unit="s"),
    "compute_efficiency": _Prior(0.78, width=0.25, low=0.01, high=1.0, unit="-"),
    "memory_efficiency": _Prior(0.78, width=0.25, low=0.01, high=1.0, unit="-"),
    "sharpness": _Prior(1.8, width=0.5, low=1.0, high=20.0, unit="-"),
}
#: Where these values come from, as notes say it.
_ORIGIN = "bf16 GEMMs of A100 and H100"
#: Widths and bounds as arrays, in the order of the parameters; bounds are logarithms.
_WIDTH = np.array([prior.width for prior in _ROOFLINE.values()])
_LOW = np.log([prior.low for prior in _ROOFLINE.values()])
_HIGH = np.log([prior.high for prior in _ROOFLINE.values()])
#: Fewest kernels, or sizes of a collective, that calibrations of GPUs fit [-]; docs/formulas.md,
#: table 6.2.
FEWEST_SIZES = 4
#: Caches that `find_levels` looks for [-].
_MOST = 3
#: The data do not determine a parameter whose standard error is above this share of the prior's
#: width [-].
_KNOWN = 0.7
#: Smallest spread of a fit with as many measurements as parameters, whose residuals say nothing
#: [-]; docs/formulas.md, table 2.2: a mean error of 8.7 % on other shapes.
_EXACT = 0.11
#: Least spread of a sum of terms from as many measurements as terms, one more, and two more, whose
#: residuals say little [-]; docs/formulas.md, table 2.2: sizes left out on zen3-2.
_FEW = (0.92, 0.56, 0.47)


@refuse_misfits(COLUMNS)
def fit_additive(
    terms: Mapping[str, Array],
    seconds: Array,
    *,
    prior: Mapping[str, float] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    source: str = "",
) -> Additive:
    """Fit the time of kernels as a sum of terms; relative errors count alike at all sizes.

    Parameters
    ----------
    terms : mapping of str to array
        How often each measurement pays a term, by names of `perfkit.models.kernels.TERMS`.
    seconds : array
        Measured times [s].
    prior : mapping of str to float, optional
        Terms known from elsewhere, such as the time per byte of a memory level; each counts as one
        measurement with an uncertainty of 50 % [s].
    ranges : mapping of str to (low, high), optional
        Measured range of each size.
    source : str, optional
        Data id.

    Returns
    -------
    fit : Additive
        Parameters of `perfkit.models.kernels.additive`; the spread comes from points left out one
        at a time.

    Raises
    ------
    ValueError
        For fewer than two measurements or times that are not above zero.

    Notes
    -----
    Where hardly more sizes were measured than terms are found, the sum passes through all of them,
    and what it misses elsewhere does not show. The spread is then at least that of sizes left out on
    another machine (docs/formulas.md, table 2.2), and with no measurement to spare the terms have no
    standard errors.

    Examples
    --------
    >>> n = np.array([1e3, 1e4, 1e5, 1e6])
    >>> fit = fit_additive({"launch": np.ones(4), "nbytes": n}, 2e-6 + 1e-11 * n)
    >>> round(fit["launch"] * 1e6, 6), round(fit["nbytes"] * 1e11, 6)
    (2.0, 1.0)
    """
    return widen_few(fit_residuals(terms, seconds, prior=prior, ranges=ranges, source=source))


@refuse_misfits(COLUMNS)
def fit_residuals(
    terms: Mapping[str, Array],
    seconds: Array,
    *,
    prior: Mapping[str, float] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
    source: str = "",
) -> Additive:
    """Fit as `fit_additive` does, but leave the spread that of the residuals, also of few
    measurements: it compares fits to the same sizes, and is no error of other sizes."""
    seconds = check_times(seconds, 2)
    check_type("terms", terms, Mapping)
    if not terms:
        raise ValueError("terms is empty; it must have at least one term, such as launch")
    columns = np.stack(
        [
            check_column(f"terms[{show(name)}]", counts, len(seconds))
            for name, counts in terms.items()
        ],
        axis=1,
    )
    known = np.array([(prior or {}).get(name, 0.0) for name in terms])
    # 10 % residuals against 50 % trust
    strength = np.divide(0.2, known, out=np.zeros(len(known)), where=known > 0)
    return fit_terms(
        Additive,
        dict.fromkeys(terms, "s"),
        columns,
        seconds,
        1.0 / seconds,
        known,
        strength,
        rounds=8,
        ranges=ranges or {},
        source=source,
    )


def widen_few(fit: Additive) -> Additive:
    """Give a sum of terms from few measurements the spread that it has elsewhere.

    Parameters
    ----------
    fit : Additive
        From `fit_residuals`; its spread says how well it fits what was measured.

    Returns
    -------
    fit : Additive
        With at least the spread of sizes left out on another machine; with no measurement to spare
        also without standard errors, and with a note.
    """
    to_spare = fit.n - len(fit)
    if to_spare >= len(_FEW):
        return fit
    fit = replace(fit, spread=max(fit.spread, _FEW[max(to_spare, 0)]))
    if to_spare > 0:
        return fit
    note = "no more measurements than terms: what it misses elsewhere is not known; measure more"
    return fit.with_values({}, stderr={}, notes=(*fit.notes, note))


@refuse_misfits(COLUMNS)
def fit_roofline(
    flops: Values,
    nbytes: Values,
    seconds: Array,
    *,
    peak: Values,
    bandwidth: Values,
    prior: Mapping[str, float] | None = None,
    source: str = "",
    date: str = "",
    notes: Sequence[str] = (),
) -> Roofline:
    """Fit kernels that compute while they move data, by the logarithm of the measured times.

    Parameters
    ----------
    flops : float or array
        Floating-point operations, one number per measurement; 0 for kernels that only move data
        [FLOP].
    nbytes : float or array
        Bytes moved, likewise [B].
    seconds : array
        Measured times, at least four [s].
    peak : float or array
        Arithmetic rate of the datasheet, one for all or one per measurement [FLOP/s].
    bandwidth : float or array
        Memory bandwidth of the datasheet, likewise [B/s].
    prior : mapping of str to float, optional
        Values of parameters that are known before, such as a fit of another device; those that it
        lacks, and all by default, are those of GEMMs of A100 and H100 [unit of each parameter].
    source : str, optional
        Data id.
    date : str, optional
        Day of the measurements, ISO 8601.
    notes : sequence of str, optional
        Remarks on the measurements.

    Returns
    -------
    fit : Roofline
        ``launch`` [s], ``compute_efficiency``, ``memory_efficiency`` and ``sharpness`` of the form
        ``roofline``; the spread comes from points left out one at a time, see `Fit.spread_at`.

    Raises
    ------
    ValueError
        For fewer than four measurements, times that are not above zero, work of another length, or
        a prior that has another parameter or a value that no roofline has.

    Notes
    -----
    Every parameter has a weak prior, which counts as one measurement. A parameter that the
    measurements hardly determine has no standard error, and a note with its value and that of the
    prior: for example the share of the arithmetic peak, from kernels that only move data. Where they
    say nothing of it, both are the same. So few shapes are enough: with 4 instead of thousands, the mean error of
    held-out bf16 GEMMs rises from 7.2 to 8.7 % (docs/formulas.md, table 2.2). Four measurements
    cannot show their own errors: the fit then has no standard errors, and at least the spread of
    those GEMMs.

    Examples
    --------
    >>> from perfkit.models.roofline import gemm_bytes, gemm_flops, roofline_time
    >>> m = np.array([16, 64, 256, 1024, 4096, 16384])
    >>> work = {"flops": gemm_flops(m, 4096, 4096), "nbytes": gemm_bytes(m, 4096, 4096, itemsize=2)}
    >>> times = roofline_time(**work, peak=700e12, bandwidth=2.6e12, launch=3e-6)
    >>> fit = fit_roofline(**work, seconds=times, peak=990e12, bandwidth=3.35e12)
    >>> round(fit["compute_efficiency"], 2), round(fit["memory_efficiency"], 2)
    (0.71, 0.78)
    """
    from scipy.special import ndtri, stdtrit

    seconds = check_times(seconds, len(_ROOFLINE))
    given = {"flops": flops, "nbytes": nbytes, "peak": peak, "bandwidth": bandwidth}
    work = {name: _check_work(name, values, len(seconds)) for name, values in given.items()}
    if not np.any(work["flops"] + work["nbytes"]):
        raise ValueError(
            "flops and nbytes are 0 throughout: pass the FLOP and bytes of the kernels"
        )
    center = _find_center(prior)
    solution = _solve_roofline(work, seconds, center)
    predicted = solution.predicted
    # scipy gives the Jacobian. Standard errors follow from it with the noise of points left out,
    # which scipy.optimize.curve_fit does not know: its noise is that of the residuals.
    rows = solution.jacobian[: len(seconds)]
    information_with_prior = solution.jacobian.T @ solution.jacobian
    leverage = np.einsum("ij,jk,ik->i", rows, np.linalg.inv(information_with_prior), rows)
    left_out = np.log(seconds / predicted) / np.maximum(1.0 - leverage, 0.1)
    noise = max(find_spread(np.expm1(left_out))[0], 1e-4)  # equal times have none
    information = rows.T @ rows / noise**2 + np.diag(_WIDTH**-2.0)
    error = np.sqrt(np.diag(np.linalg.inv(information)))
    distance_to_bounds = np.minimum(solution.logs - _LOW, _HIGH - solution.logs)
    is_stopped = distance_to_bounds < 1e-3
    is_unknown = (error > _KNOWN * _WIDTH) & ~is_stopped
    is_exact = len(seconds) == len(_ROOFLINE)
    values = np.exp(solution.logs)
    hints = []
    for i, name in enumerate(_ROOFLINE):
        if is_unknown[i]:
            unit = f" {_ROOFLINE[name].unit}".removesuffix(" -")
            hints.append(
                f"{name} is hardly known from these measurements: it is {values[i]:.3g}{unit}, and was "
                f"{math.exp(center[i]):.3g}{unit} before them ({_name_origin(prior, name)})"
            )
    if is_exact:
        hints.append(
            "as many measurements as parameters: the errors of the parameters are not known; "
            "measure more"
        )
    middle = float(np.exp(np.log(predicted).mean()))
    at_middle = np.expm1(left_out * (predicted / middle) ** SPREAD_SLOPE)
    # Student's t, because few points say little about the spread
    few = stdtrit(len(seconds) - 1, 0.9) / ndtri(0.9)
    spread = float(few * find_spread(at_middle)[0])
    has_error = ~(is_stopped | is_unknown | is_exact)
    fit = build_fit(
        Roofline,
        {name: parameter.unit for name, parameter in _ROOFLINE.items()},
        values,
        np.where(has_error, error, np.nan) * values,
        np.expm1(left_out),
        source=source,
        date=date,
        notes=(*notes, *hints),
        ranges=_find_ranges(work, predicted),
        spread=max(spread, _EXACT) if is_exact else spread,
        spread_time=middle,
    )
    stopped = [name for name, stops in zip(_ROOFLINE, is_stopped, strict=True) if stops]
    return replace(fit, at_bounds=tuple(stopped))


def _find_center(prior: Mapping[str, float] | None) -> Array:
    """Logarithms of what is known of each parameter of a roofline before it is measured."""
    values = {name: parameter.value for name, parameter in _ROOFLINE.items()}
    check_type("prior", prior, Mapping | None)
    for name, value in (prior or {}).items():
        check_choice("parameter of prior", name, _ROOFLINE)
        known = _ROOFLINE[name]
        number = check_positive(f"prior[{show(name)}]", value)
        if not known.low <= number <= known.high:
            raise ValueError(
                f"prior[{show(name)}] is {show(value)}; it must be from {known.low:g} to "
                f"{known.high:g} {known.unit}".removesuffix(" -")
            )
        values[name] = number
    return np.log(list(values.values()))


def _name_origin(prior: Mapping[str, float] | None, name: str) -> str:
    """Where the value of a parameter before it was measured comes from."""
    if prior is None or name not in prior:
        return _ORIGIN
    if isinstance(prior, Fit) and prior.source:
        return prior.source
    return "the prior of the call"


def _find_ranges(work: Mapping[str, Array], predicted: Array) -> dict[str, tuple[float, float]]:
    """Measured ranges of the work that takes a visible part of the time."""
    ranges = {}
    for name, rate in (("flops", "peak"), ("nbytes", "bandwidth")):
        if np.max(work[name] / work[rate] / predicted) > 0.05:
            ranges[name] = (float(work[name].min()), float(work[name].max()))
    return ranges


class _Solution(NamedTuple):
    """Logarithms of the parameters of a roofline, the Jacobian with the rows of the prior last, and
    the predicted times [s]."""

    logs: Array
    jacobian: Array
    predicted: Array


def _solve_roofline(work: Mapping[str, Array], seconds: Array, center: Array) -> _Solution:
    """Fit the logarithms of the parameters to those of the times; those of the prior are the
    center."""
    from scipy.optimize import least_squares
    from statsmodels.robust.scale import mad

    def predict(p: Array) -> Array:
        launch, compute_efficiency, memory_efficiency, sharpness = np.exp(p)
        return np.asarray(
            roofline_time(
                work["flops"],
                work["nbytes"],
                peak=compute_efficiency * work["peak"],
                bandwidth=memory_efficiency * work["bandwidth"],
                launch=launch,
                sharpness=sharpness,
            )
        )

    def residuals(p: Array, noise: float) -> Array:
        of_prior = noise * (p - center) / _WIDTH
        return np.concatenate([np.log(seconds / predict(p)), of_prior])

    logs = center
    noise = 0.1
    for _ in range(3):  # the prior weighs as one measurement with the scatter of the others
        solution = least_squares(
            residuals, logs, args=(noise,), bounds=(_LOW, _HIGH), loss="soft_l1", f_scale=0.1
        )
        logs = solution.x
        noise = max(float(mad(solution.fun[: len(seconds)], center=0.0)), 1e-4)
    return _Solution(logs, solution.jac, predict(logs))


def _check_work(name: str, values: Values, n: int) -> Array:
    """Array with one number per measurement, from one number for all or one for each."""
    numbers = read_numbers(values)
    if numbers is None:
        raise ValueError(f"{name} is {show(values)}; it must be a number, or an array of numbers")
    found = numbers
    least = 0.0 if name in ("flops", "nbytes") else np.finfo(float).tiny
    if found.shape not in ((), (n,)) or not np.all(np.isfinite(found)) or np.any(found < least):
        held = f"{name} has the shape {found.shape} and values from {found.min() if found.size else 'nothing'}"
        wanted = f"one finite number, or {n} as seconds does, {'at least' if least == 0.0 else 'above'} 0"
        raise ValueError(f"{held}; it must hold {wanted}")
    return np.broadcast_to(found, (n,))


@refuse_misfits(COLUMNS)
def find_levels(
    working_set: Array, moved: Array, seconds: Array
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Find the caches that a curve of stream times shows.

    Parameters
    ----------
    working_set : array
        Bytes that a pass reads again and again, at least four different sizes [B].
    moved : array
        Bytes that each pass moves [B].
    seconds : array
        Time of each pass over the working set [s].

    Returns
    -------
    capacities : tuple of float
        Effective size of each cache, from near to far; none where the curve is flat [B].
    bandwidths : tuple of float
        Of each cache and, last, of main memory [B/s].

    Notes
    -----
    A pass takes a fixed time, a time per byte, and an extra time per byte that a cache does not
    hold (`perfkit.models.caches.miss_share`). Capacities are tried on a grid; coefficients are not
    negative. A further level must be worth its two parameters (BIC: Schwarz 1978,
    doi:10.1214/aos/1176344136) and be slower by 15 %.
    """
    from scipy.optimize import nnls

    seconds = check_times(seconds, 4)
    working_set = check_column("working_set", working_set, len(seconds))
    moved = check_column("moved", moved, len(seconds))
    if np.any(working_set <= 0) or np.any(moved <= 0):
        raise ValueError("working_set and moved must be sizes above 0")

    # Capacities by a grid: each level is a minimum of the error, and scipy.optimize.least_squares
    # finds the one that is nearest to its start (on the ladder of xeon-2 the wrong one from two of
    # four starts). The times per byte are scipy's non-negative least squares.
    def solve(capacities: tuple[float, ...]) -> _Levels:
        columns = [1.0 / seconds, moved / seconds]
        for capacity in capacities:
            columns.append(miss_share(working_set, capacity=capacity) * moved / seconds)
        matrix = np.stack(columns, axis=1)
        scale, count = matrix.max(axis=0), len(seconds)
        found, error = nnls(matrix / scale, np.ones(count))
        score = count * np.log(max(error**2 / count, 1e-8)) + 2 * len(capacities) * np.log(count)
        return _Levels(float(score), capacities, found / scale)

    low, high = np.log2(working_set.min()) + 1.0, np.log2(working_set.max()) - 1.0
    grid = [float(size) for size in 2.0 ** np.arange(low, high + 0.01, 0.5)]
    best = min((solve(capacities) for capacities in _combine(grid)), key=_get_score)
    for step in (2.0**0.25, 2.0**-0.25):  # between the points of the grid
        for i in range(len(best.capacities)):
            moved_capacities = list(best.capacities)
            moved_capacities[i] *= step
            best = min(best, solve(tuple(moved_capacities)), key=_get_score)
    slopes = np.cumsum(best.times[1:])
    count = len(best.capacities)
    kept = [i for i in range(count) if slopes[i + 1] > 1.15 * slopes[i] > 0]
    bandwidths = [1.0 / max(float(slopes[i]), 1e-15) for i in (*kept, count)]
    return tuple(best.capacities[i] for i in kept), tuple(bandwidths)


class _Levels(NamedTuple):
    """Caches that were tried: their score (BIC), their capacities [B], and times: that of a pass
    [s], then the extra time per byte of each level [s/B]."""

    score: float
    capacities: tuple[float, ...]
    times: Array


def _get_score(levels: _Levels) -> float:
    """Score by which caches are compared."""
    return levels.score


def _combine(sizes: Sequence[float]) -> Iterator[tuple[float, ...]]:
    """All capacities of up to three caches, each at least four times as large as the one before."""
    for count in range(_MOST + 1):
        for capacities in itertools.combinations(sizes, count):
            pairs = itertools.pairwise(capacities)
            if all(far >= 4.0 * near for near, far in pairs):
                yield capacities
