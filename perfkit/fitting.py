"""Fitted parameters with standard errors, validity and provenance, in a form that unpacks into their model."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import numpy as np

from perfkit.units import Array

__all__ = ["Fit", "fit_additive", "fit_context", "fit_iteration", "fit_pipelined"]


@dataclass(frozen=True)
class Fit(Mapping[str, float]):
    """Parameters of one model form: a mapping, so that ``model(x, **fit)`` closes the loop.

    Parameters
    ----------
    form : str
        Name of the model the parameters belong to, for example ``pipelined`` [-].
    parameters : mapping of str to float
        Keyword arguments of the model, each in the unit given in `units`.
    stderr : mapping of str to float, optional
        Standard errors; a parameter that is missing here was held fixed or stopped at a bound.
    spread : float, optional
        Standard deviation of the log residuals, on held-out points where there are any [-].
    bias : float, optional
        Mean of the log residuals, measured over predicted [-].
    ranges : mapping of str to (low, high), optional
        Where the fit was made, by swept variable, in base units.
    n : int, optional
        Points fitted [-].
    kind : str, optional
        ``fitted``, ``assumed``, ``datasheet`` or ``measured``.
    source : str, optional
        Data id or citation.
    date : str, optional
        Day of the fit, ISO 8601.
    notes : tuple of str, optional
        What a reader should know.
    units : mapping of str to str, optional
        Unit by parameter; ``-`` for pure numbers.
    at_bounds : tuple of str, optional
        Parameters that stopped at a bound of the fit; terms that stopped at zero are not among the parameters.

    Examples
    --------
    >>> fit = Fit("pipelined", {"alpha": 2e-5, "beta": 5e-12}, units={"alpha": "s", "beta": "s/B"})
    >>> dict(**fit)
    {'alpha': 2e-05, 'beta': 5e-12}
    >>> fit
    Fit(pipelined: alpha=2e-05 s, beta=5e-12 s/B; spread 0%, n=0, fitted)
    """

    form: str
    parameters: Mapping[str, float]
    stderr: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    bias: float = 0.0
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    n: int = 0
    kind: str = "fitted"
    source: str = ""
    date: str = ""
    notes: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    at_bounds: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __repr__(self) -> str:
        values = ", ".join(
            f"{name}={value:.4g} {self.units.get(name, '')}".rstrip(" -") for name, value in self.items()
        )
        return f"Fit({self.form}: {values}; spread {self.spread:.0%}, n={self.n}, {self.kind})"

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return (name, value with unit, standard error in words) for every parameter."""
        from perfkit.units import significant

        rows = []
        for name, value in self.items():
            error, unit = self.stderr.get(name), self.units.get(name, "-").removeprefix("-")
            if error is None or not math.isfinite(error):
                rows.append((name, f"{value:.4g} {unit}".rstrip(), "(no standard error)"))
            else:
                share = f" ({abs(error / value):.1%})" if value else ""
                rows.append((name, f"{significant(value, error)} {unit}".rstrip(), f"± {error:.2g}{share}"))
        return rows

    def _facts(self) -> list[str]:
        """Return the lines under the parameters: residuals, validity, origin, warnings, notes."""
        facts = [f"residual spread {self.spread:.1%}, bias {self.bias:+.1%}, {self.n} points, {self.kind}"]
        facts += [f"valid for {name} from {low:.4g} to {high:.4g}" for name, (low, high) in self.ranges.items()]
        facts += [f"source: {' '.join((self.source, self.date)).strip()}"] if self.source or self.date else []
        facts += [f"warning: {name} is at a bound of the fit" for name in self.at_bounds]
        return facts + [f"note: {note}" for note in self.notes]

    def report(self) -> str:
        """Describe the fit for a person: value ± standard error, validity, residuals, origin, warnings."""
        rows = self._rows()
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {error}" for name, value, error in rows]
        return "\n".join([f"[{self.form}]", *lines, *(f"  {fact}" for fact in self._facts())])

    def _repr_html_(self) -> str:
        cells = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows()
        )
        facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in self._facts())
        return (
            f"<table><caption>{html.escape(self.form)}</caption><tr><th>parameter</th><th>value</th><th>standard error"
            f"</th></tr>{cells}</table><ul>{facts}</ul>"
        )


def _least_squares(
    columns: Array,
    target: Array,
    weights: Array,
    *,
    prior: Array | None = None,
    strength: Array | None = None,
    robust: bool = True,
) -> tuple[Array, Array, Array]:
    """Non-negative, robust, weighted least squares with an optional pull towards a prior.

    Returns the coefficients, their standard errors (nan where a coefficient stopped at zero) and the relative residuals
    that each point would have, had it been left out.
    """
    from scipy.optimize import nnls
    from statsmodels.robust.norms import HuberT
    from statsmodels.robust.scale import mad

    size = np.abs(columns).max(axis=0)
    size[size == 0] = 1.0  # a term that no measurement pays stays at its prior
    scaled = columns / size
    pull = np.zeros((0, len(size))) if strength is None else np.diag(strength * 1.0)
    aim = np.zeros(0) if prior is None or strength is None else strength * prior
    pull = pull / size if len(pull) else pull
    trust = np.ones(len(target))
    for _ in range(8 if robust else 1):
        w = weights * trust
        found, _ = nnls(np.vstack([scaled * w[:, None], pull]), np.concatenate([target * w, aim]))
        predicted = np.maximum(scaled @ found, 1e-3 * target)
        logs = np.log(target / predicted)
        # The slope of a squared logarithm, so that half and double weigh alike; Huber's norm for what no term explains,
        # where less than 15 % of spread is not taken as known.
        level = np.clip(logs / (1.0 - predicted / target + 1e-12 * (logs == 0)), 0.1, 10.0)
        trust = np.sqrt(level * HuberT(2.5).weights(logs / max(mad(logs, center=0.0), 0.15)))
    found[(scaled * found / target[:, None]).max(axis=0) < 1e-6] = 0.0  # nowhere a part of the time: rounding
    active = np.flatnonzero(found > 0)
    w = weights * trust
    rows = np.vstack([scaled[:, active] * w[:, None], pull[:, active]])
    inverse = np.linalg.pinv(rows.T @ rows)
    predicted = scaled @ found
    noise = np.sqrt(np.sum(((target - predicted) * w) ** 2) / max(len(target) - len(active), 1))
    errors = np.full(len(size), np.nan)
    errors[active] = noise * np.sqrt(np.maximum(np.diag(inverse), 0.0)) / size[active]
    leverage = np.einsum("ij,jk,ik->i", rows, inverse, rows)[: len(target)]
    left_out = (target - predicted) / np.maximum(1.0 - leverage, 0.3)
    return found / size, errors, left_out / np.maximum(target - left_out, 0.05 * target)


def _spread_of(relative: Array) -> tuple[float, float]:
    """Standard deviation and mean of log(measured / predicted), from relative residuals, outliers tamed."""
    logs = np.log1p(np.clip(relative, -0.8, 4.0))
    middle = float(np.median(logs))
    inner = np.clip(logs, middle - 0.7, middle + 0.7)
    return float(inner.std()) if len(inner) > 1 else 0.3, float(inner.mean())


def _result(
    form: str, names: Sequence[str], found: Array, errors: Array, relative: Array, units: Mapping[str, str], **more: Any
) -> Fit:
    """A `Fit` from the numbers of a least-squares solution; terms that stopped at zero are named as such."""
    kept = [i for i, value in enumerate(found) if value > 0 or names[i] == "scale"]
    spread, bias = _spread_of(relative)
    return Fit(
        form,
        {names[i]: float(found[i]) for i in kept},
        stderr={names[i]: float(errors[i]) for i in kept if np.isfinite(errors[i])},
        spread=spread,
        bias=bias,
        n=len(relative),
        date=date.today().isoformat(),
        at_bounds=tuple(name for i, name in enumerate(names) if i not in kept),
        units={names[i]: units[names[i]] for i in kept},
        **more,
    )


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
    seconds = _check_times(seconds, 2)
    columns = np.stack([np.broadcast_to(np.asarray(v, dtype=float), seconds.shape) for v in terms.values()], axis=1)
    known = np.array([(prior or {}).get(name, 0.0) for name in terms])
    strength = np.divide(0.2, known, out=np.zeros(len(known)), where=known > 0)  # 10 % residuals against 50 % trust
    found, errors, relative = _least_squares(columns, seconds, 1.0 / seconds, prior=known, strength=strength)
    units = {name: "s" for name in terms}
    return _result("additive", list(terms), found, errors, relative, units, ranges=ranges or {}, source=source)


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

    seconds, nbytes = _check_times(seconds, 2), np.asarray(nbytes, dtype=float)
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
    fit = _result(
        "pipelined", names, found, errors, np.expm1(left_out), {"alpha": "s", "beta": "s/B", "sharpness": "-"},
        ranges={"nbytes": (float(nbytes.min()), float(nbytes.max()))}, source=source,
    )  # fmt: skip
    if sharpness is None:
        return fit
    return replace(fit, parameters={**fit.parameters, "sharpness": sharpness}, units={**fit.units, "sharpness": "-"})


#: How far the context terms may reasonably lie from their prior: a factor of about two on times already modelled, some
#: microseconds of cold code per call, a memory latency per page walk.
_CONTEXT = {
    "scale": (1.0, 1.0, "-"),
    "cold_scale": (1.0, 1.0, "-"),
    "launch": (1e-6, 5e-6, "s"),
    "page_walks": (0.0, 5e-8, "s"),
}


def fit_context(hot: Array, cold: Array, page_walks: Array, measured: Array, *, source: str = "") -> Fit:
    """Fit what real iterations add to the isolated time of one operation class, shrunk towards nothing.

    Parameters
    ----------
    hot, cold : array
        Isolated time of each operation with near operands, and what distance adds [s].
    page_walks : array
        Lookups whose page address has to be found by a walk [-].
    measured : array
        Times inside real iterations [s].
    source : str, optional
        Data id.

    Returns
    -------
    fit : Fit
        Parameters of `perfkit.models.kernels.in_context`.

    Notes
    -----
    Points weigh between relative and absolute error (with the root of the time), so that the operations that make up an
    iteration decide; the pull towards the prior is that of one tenth of an average point.
    """
    measured = _check_times(measured, 1)
    columns = np.stack([hot, cold, np.ones_like(measured), page_walks], axis=1)
    prior, sizes = (np.array([values[i] for values in _CONTEXT.values()], dtype=float) for i in (0, 1))
    weights = 1.0 / np.sqrt(measured * measured.mean())
    strength = math.sqrt(0.1) / sizes
    found, errors, relative = _least_squares(columns, measured, weights, prior=prior, strength=strength, robust=False)
    return _result(
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
    measured = _check_times(measured, 1)
    columns = np.stack([priced, counts], axis=1)
    strength = 0.05 / np.array(trust)
    found, errors, relative = _least_squares(
        columns, measured, 1.0 / measured, prior=np.array(prior), strength=strength, robust=False
    )
    units = {"scale": "-", each: "s"}
    return _result("iteration", list(units), found, errors, relative, units, source=source)


def _check_times(seconds: Any, least: int) -> Array:
    values = np.asarray(seconds, dtype=float)
    if values.ndim != 1 or len(values) < least or not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise ValueError(
            f"seconds holds {values.size} values from {values.min() if values.size else 'nothing'}; it must hold at "
            f"least {least} finite times above 0; measure more points or drop the broken ones"
        )
    return values
