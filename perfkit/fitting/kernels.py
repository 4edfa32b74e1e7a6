"""Fits of kernels: time as a sum of terms or as a roofline; and the caches that a curve of stream
times shows."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from perfkit.fitting.models import Additive, Roofline
from perfkit.fitting.parameters import SPREAD_SLOPE
from perfkit.fitting.regression import (
    COLUMNS,
    build_fit,
    check_column,
    check_times,
    find_spread,
    fit_terms,
)
from perfkit.ground.forms import refuse_misfits
from perfkit.ground.units import Array, Values, check_type, read_numbers, show
from perfkit.models.caches import miss_share
from perfkit.models.roofline import roofline_time

#: Prior of each parameter of a roofline: value, standard deviation of its logarithm, bounds and
#: unit; docs/formulas.md, table 2.2.
_ROOFLINE = {
    "launch": (4.3e-6, 0.5, 1e-8, 1e-3, "s"),
    "compute_efficiency": (0.78, 0.25, 0.01, 1.0, "-"),
    "memory_efficiency": (0.78, 0.25, 0.01, 1.0, "-"),
    "sharpness": (1.8, 0.5, 1.0, 20.0, "-"),
}
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
        [check_column(f"terms[{show(name)}]", v, len(seconds)) for name, v in terms.items()], axis=1
    )
    known = np.array([(prior or {}).get(name, 0.0) for name in terms])
    # 10 % residuals against 50 % trust
    strength = np.divide(0.2, known, out=np.zeros(len(known)), where=known > 0)
    units, more = dict.fromkeys(terms, "s"), {"ranges": ranges or {}, "source": source}
    return fit_terms(
        Additive, units, columns, seconds, 1.0 / seconds, known, strength, rounds=8, **more
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
        For fewer than four measurements, times that are not above zero, or work of another length.

    Notes
    -----
    Every parameter has a weak prior at its value for GEMMs of A100 and H100, which counts as one
    measurement. A parameter that the measurements do not determine stays at its prior, without a
    standard error and with a note: for example the share of the arithmetic peak, from kernels that
    only move data. So few shapes are enough: with 4 instead of thousands, the mean error of
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
    found, jacobian, predicted = _solve_roofline(work, seconds)
    rows = jacobian[: len(seconds)]
    leverage = np.einsum("ij,jk,ik->i", rows, np.linalg.inv(jacobian.T @ jacobian), rows)
    left_out = np.log(seconds / predicted) / np.maximum(1.0 - leverage, 0.1)
    middle = float(np.exp(np.log(predicted).mean()))
    level = np.expm1(left_out * (predicted / middle) ** SPREAD_SLOPE)
    width, low, high = np.array([row[1:4] for row in _ROOFLINE.values()]).T
    noise = max(find_spread(np.expm1(left_out))[0], 1e-4)  # equal times have none
    error = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows / noise**2 + np.diag(width**-2.0))))
    stopped = np.minimum(found - np.log(low), np.log(high) - found) < 1e-3
    unknown, exact = (error > _KNOWN * width) & ~stopped, len(seconds) == len(_ROOFLINE)
    prior = "is hardly known from these measurements; it stays near {:g}, the value of bf16 GEMMs of A100 and H100"
    pairs = zip(_ROOFLINE.items(), unknown, strict=True)
    hints = [f"{name} {prior.format(row[0])}" for (name, row), missing in pairs if missing]
    if exact:
        hints.append(
            "as many measurements as parameters: the errors of the parameters are not known; measure more"
        )
    # Student's t, because few points say little about the spread
    few = stdtrit(len(seconds) - 1, 0.9) / ndtri(0.9)
    about: dict[str, Any] = {"source": source, "date": date, "notes": (*notes, *hints)}
    # a range only for work that takes a visible part of the time
    rates = {"flops": "peak", "nbytes": "bandwidth"}
    seen = [
        name for name, rate in rates.items() if np.max(work[name] / work[rate] / predicted) > 0.05
    ]
    about["ranges"] = {name: (float(work[name].min()), float(work[name].max())) for name in seen}
    about |= {
        "spread": max(float(few * find_spread(level)[0]), _EXACT * exact),
        "spread_time": middle,
    }
    errors = np.where(stopped | unknown | exact, np.nan, error) * np.exp(found)
    units = {name: unit for name, (*_, unit) in _ROOFLINE.items()}
    fit = build_fit(Roofline, units, np.exp(found), errors, np.expm1(left_out), **about)
    return replace(
        fit, at_bounds=tuple(name for name, at in zip(_ROOFLINE, stopped, strict=True) if at)
    )


def _solve_roofline(work: Mapping[str, Array], seconds: Array) -> tuple[Array, Array, Array]:
    """Logarithms of the parameters, the Jacobian with the rows of the prior last, and the predicted
    times."""
    from scipy.optimize import least_squares
    from statsmodels.robust.scale import mad

    center, width, low, high = np.array([row[:4] for row in _ROOFLINE.values()]).T
    flops, nbytes, peak, bandwidth = (
        work[name] for name in ("flops", "nbytes", "peak", "bandwidth")
    )

    def predict(p: Array) -> Array:
        launch, arithmetic, memory, sharpness = np.exp(p)
        rates = {"peak": arithmetic * peak, "bandwidth": memory * bandwidth}
        return np.asarray(roofline_time(flops, nbytes, **rates, launch=launch, sharpness=sharpness))

    def residuals(p: Array, noise: float) -> Array:
        return np.concatenate([np.log(seconds / predict(p)), noise * (p - np.log(center)) / width])

    found, noise = np.log(center), 0.1
    for _ in range(3):  # the prior weighs as one measurement with the scatter of the others
        how: dict[str, Any] = {
            "bounds": (np.log(low), np.log(high)),
            "loss": "soft_l1",
            "f_scale": 0.1,
        }
        solution = least_squares(residuals, found, args=(noise,), **how)
        found, noise = solution.x, max(float(mad(solution.fun[: len(seconds)], center=0.0)), 1e-4)
    return found, solution.jac, predict(found)


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

    def solve(capacities: tuple[float, ...]) -> tuple[float, tuple[float, ...], Array]:
        far = (miss_share(working_set, capacity=c) * moved / seconds for c in capacities)
        columns = np.stack([1.0 / seconds, moved / seconds, *far], axis=1)
        scale, count = columns.max(axis=0), len(seconds)
        found, error = nnls(columns / scale, np.ones(count))
        score = count * np.log(max(error**2 / count, 1e-8)) + 2 * len(capacities) * np.log(count)
        return float(score), capacities, found / scale

    low, high = np.log2(working_set.min()) + 1.0, np.log2(working_set.max()) - 1.0
    grid = [float(size) for size in 2.0 ** np.arange(low, high + 0.01, 0.5)]
    sets = (c for n in range(_MOST + 1) for c in itertools.combinations(grid, n))
    apart = [c for c in sets if all(far >= 4.0 * near for near, far in itertools.pairwise(c))]
    best = min(map(solve, apart), key=lambda found: found[0])
    for step in np.exp2((0.25, -0.25)):  # between the points of the grid
        for i in range(len(best[1])):
            other = (*best[1][:i], best[1][i] * float(step), *best[1][i + 1 :])
            best = min(best, solve(other), key=lambda found: found[0])
    slopes = np.cumsum(best[2][1:])
    kept = [i for i in range(len(best[1])) if slopes[i + 1] > 1.15 * slopes[i] > 0]
    rates = (1.0 / max(float(slopes[i]), 1e-15) for i in [*kept, len(best[1])])
    return tuple(best[1][i] for i in kept), tuple(rates)
