"""Calibrate with one's own runs: how much faster or slower each resource is than the platform says.

Scales of resources are fitted in logarithms. The platform is the prior: five runs change only the
scales that they tell something about.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from perfkit.calibration.cpu_context import expect_spread
from perfkit.fitting import Fit
from perfkit.ground.forks import check_threads
from perfkit.ground.hardware import LINKS
from perfkit.ground.results import Table, Tabular, read_records
from perfkit.ground.units import Array, check_choice, check_positive, check_type, show
from perfkit.platform.collective_costs import SIGMA_START_UP, SIGMA_TRANSFER
from perfkit.platform.estimates import find_interval, warn_once
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.whatif import list_resources
from perfkit.prediction.strategies import price_strategies
from perfkit.prediction.uncertainty import find_host_error
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: Fewest runs; deviation of a resource between programs [-]; usual spread of runs around a fit [-];
#: docs/formulas.md, table 4.4.
_FEWEST, _OTHERS, _USUAL = 5, 0.1, 0.08
#: A time whose error is larger than so many usual spreads counts less; docs/formulas.md, tables 4.3
#: and 4.4.
_FAR = 2.5
#: Change of the logarithm of a scale that slopes are computed with [-].
_STEP = 0.01
_FIELDS = {own.name: own.default for own in fields(Strategy)}
_SIZES = {own.name for own in fields(Transformer)} - {"family", *_FIELDS}
_Group = tuple[Transformer, str | None, Strategy, Array]


def fit_logs(
    evaluate: Callable[[Array], Array],
    logs: Array,
    mean: Array,
    width: Array,
    *,
    usual: Any,
    trust: Any = 1.0,
    step: float = 1e-5,
    within: float = 1e-5,
    most: int = 30,
) -> tuple[Array, ...]:
    """Fit parameters of a model to measured times by least squares in logarithms, with a prior of
    each parameter.

    Parameters
    ----------
    evaluate : callable
        From parameters to logarithms of times [-].
    logs : array
        Logarithms of the measured times [-].
    mean, width : array
        Prior of each parameter: its mean and standard deviation [-].
    usual : float or array
        Usual deviation of a time; times that are much farther off count less [-].
    trust : float or array, optional
        Weight of each time [-].
    step : float, optional
        Change of a parameter that slopes are computed with [-].
    within : float, optional
        Change of all parameters at which the fit ends [-].
    most : int, optional
        Largest number of changes [-].

    Returns
    -------
    found, covariance, slopes, errors, weights : array
        Parameters and their covariance; and before their last change slopes of the times by
        parameter, errors and weights of the times [-].
    """
    found, before = mean.astype(float), np.diag(1 / np.square(width))
    for _ in range(most):
        errors, slopes = evaluate(found) - logs, find_slopes(evaluate, found, step)
        weights = (
            trust
            * np.minimum(1.0, _FAR * usual / np.maximum(np.abs(errors), 1e-9))
            / np.square(usual)
        )
        covariance = np.linalg.inv(slopes.T @ (slopes * weights[:, None]) + before)
        change = np.clip(
            -covariance @ (slopes.T @ (errors * weights) + before @ (found - mean)), -0.3, 0.3
        )
        found = found + change
        if np.abs(change).max() < within:
            break
    return found, covariance, slopes, errors, weights


def find_slopes(evaluate: Callable[[Array], Array], values: Array, step: float) -> Array:
    """Change of each result with each parameter, from one step of the parameter."""
    here = evaluate(values)
    return np.stack(
        [(evaluate(values + change) - here) / step for change in step * np.eye(len(values))], axis=1
    )


@dataclass(frozen=True)
class Tuning(Tabular):
    """A platform with resources fitted to runs.

    Parameters
    ----------
    platform : Platform
        With the fitted scales, and the spread of runs that were left out.
    frame : polars.DataFrame
        See `table`.
    scales : polars.DataFrame
        By resource: how many times as fast it is, the standard deviation of the logarithm, and that
        before the runs [-].
    spread : float
        Standard deviation of the logarithm of the time of a run that was left out [-].
    model : Transformer
        Model of all runs.
    covariance : array
        Of the logarithms of scales [-].
    """

    platform: Platform
    frame: Table
    scales: Table
    spread: float
    model: Transformer
    covariance: Array

    def table(self) -> Table:
        """The runs.

        Returns
        -------
        frame : polars.DataFrame
            Columns as given; predicted [s]; left_out, the relative error of a fit without this run
            [-].
        """
        return self.frame

    @property
    def error(self) -> float:
        """Mean error of runs left out [-]."""
        return float(np.mean(np.abs(self.frame["left_out"].to_numpy())))

    def price(self, runs: Any) -> Table:
        """Predict runs, and name settings that no fitted run has.

        Parameters
        ----------
        runs : DataFrame or sequence of dict
            Columns as of `tune`, without seconds.

        Returns
        -------
        frame : polars.DataFrame
            Columns as given; predicted, with low and high end of its 80 % interval [s]; ``beyond``,
            settings outside of the fitted runs; ``gain``: if this run is measured too, the share by
            which the variance of all these predictions falls, as far as it comes from the scales
            [-].
        """
        rows, known = _read(runs), _read(self.frame)
        evaluate = partial(
            _evaluate,
            list(_group(self.model, rows)),
            self.platform,
            self.scales["resource"].to_list(),
        )
        none = np.zeros(len(self.scales))
        times, slopes = np.exp(evaluate(none)), find_slopes(evaluate, none, _STEP)
        shared = slopes @ self.covariance @ slopes.T
        own = np.diag(shared)
        gain = np.square(shared).sum(axis=0) / (self.spread**2 + own) / max(own.sum(), 1e-12)
        low, high = find_interval(times, np.hypot(self.spread, np.sqrt(own)), 0.8)
        beyond = [", ".join(_list_strange(row, known, self.model)) for row in rows]
        texts = dict.fromkeys(filter(None, beyond))
        warn_once(tuple(f"no run that was fitted has {text}; measure one" for text in texts), 2)
        columns = {"predicted": times, "low": low, "high": high, "beyond": beyond, "gain": gain}
        return _frame(rows, columns)

    def __repr__(self) -> str:
        scales = ", ".join(f"{name} x {scale:.2f}" for name, scale, *_ in self.scales.rows())
        return f"{len(self.frame)} runs, {self.error:.1%} off when left out: {scales}"


def tune(model: Transformer, platform: Named, runs: Any) -> Tuning:
    """Fit the speed of each resource of a platform to runs that were measured on it.

    Parameters
    ----------
    model : Transformer
        Model of all runs.
    platform : Platform, str or Path
        Platform of the runs.
    runs : DataFrame or sequence of dict
        A row for each of at least 5 runs: ``seconds`` of an iteration; the fields of
        `perfkit.workloads.strategy.Strategy` and of the model that differ between runs;
        ``execution``.

    Returns
    -------
    tuning : Tuning
        The fitted platform, which `perfkit.exploration.strategies.explore` takes too.

    Raises
    ------
    ValueError
        For fewer runs, for unknown columns, and for times that are not above 0.

    Notes
    -----
    Minimises squared logarithms of predicted over measured times, in units of the usual spread, and
    of scales over their priors. A prior has the uncertainty of the platform's fits, and 10 %
    between programs. Runs that are far off count less. Errors of runs left out follow from the
    leverage of each run.

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.preset("gpt3-1.3b", batch=64, sequence=1024, dtype="bf16", fused=True)
    >>> runs = [{"tp": tp, "dp": 8 // tp, "micro_batch": n, "seconds": 3 / n} for tp in (1, 2, 4) for n in (1, 2)]
    >>> len(pk.tune(gpt, "a100-sxm-8", runs).table())
    6
    """
    check_threads()
    check_type("model", model, Transformer)
    where, rows = load_platform(platform), _read(runs)
    if len(rows) < _FEWEST:
        raise ValueError(
            f"runs are {len(rows)}; fit at least {_FEWEST}, of which some differ in strategy"
        )
    logs = np.log([check_positive("seconds", row.get("seconds")) for row in rows])
    widths = _find_widths(where, model.dtype)
    names, width = list(widths), np.array([*widths.values()])
    evaluate = partial(_evaluate, list(_group(model, rows)), where, names)
    found, covariance, slopes, _, weights = fit_logs(
        evaluate, logs, np.zeros(len(names)), width, usual=_USUAL, step=_STEP, within=3e-3, most=8
    )
    leverage = np.minimum(weights * np.einsum("ij,jk,ik->i", slopes, covariance, slopes), 0.99)
    times = evaluate(found)
    left_out = (times - logs) / (1 - leverage)
    spread = expect_spread(left_out.tolist(), model.family)
    now = _scale(where, names, found)
    whole = {"iterations": now.context.iterations, "parallel": now.context.parallel}
    wide: Any = {
        name: {
            key: replace(fit, spread=spread) if key == model.family else fit
            for key, fit in own.items()
        }
        for name, own in whole.items()
    }
    now = replace(now, context=replace(now.context, **wide))
    scales = {
        "resource": names,
        "scale": np.exp(-found),
        "spread": np.sqrt(np.diag(covariance)),
        "before": width,
    }
    frame = _frame(rows, {"predicted": np.exp(times), "left_out": np.exp(left_out) - 1})
    return Tuning(now, frame, pl.DataFrame(scales), spread, model, covariance)


def _frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> Table:
    """Rows as they were given, and more columns; whole and other numbers of a column become
    numbers."""
    given = {
        name: [row.get(name) for row in rows]
        for name in dict.fromkeys(key for row in rows for key in row)
    }
    return pl.DataFrame({**given, **columns}, strict=False)


def _read(runs: Any) -> list[dict[str, Any]]:
    """Rows of any frame, or dicts, without empty cells."""
    rows, known = read_records("runs", runs), [*_FIELDS, *_SIZES, "execution", "seconds"]
    for name in dict.fromkeys(key for row in rows for key in row):
        check_choice("column of runs", name, [*known, "predicted", "left_out"])
    return [
        {name: value for name, value in row.items() if value is not None and name in known}
        for row in rows
    ]


def _group(model: Transformer, rows: Sequence[Mapping[str, Any]]) -> Iterator[_Group]:
    """Runs of models that differ only in their batch, with their places."""
    kinds: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        own = {name: value for name, value in row.items() if name in _SIZES and name != "batch"}
        kinds.setdefault((replace(model, **own), row.get("execution")), []).append(place)
    for (kind, execution), places in kinds.items():
        strategies = [
            Strategy(**{key: rows[n].get(key, value) for key, value in _FIELDS.items()})
            for n in places
        ]
        batch = np.array([rows[n].get("batch", model.batch) for n in places])
        yield replace(kind, batch=batch), execution, Strategy.stack(strategies), np.array(places)


def _scale(platform: Platform, names: Sequence[str], slowness: Array) -> Platform:
    """The platform with resources that are slower by these logarithms."""
    return platform.with_scale(**dict(zip(names, np.exp(-slowness).tolist(), strict=True)))


def _evaluate(
    groups: Sequence[_Group], platform: Platform, names: Sequence[str], slowness: Array
) -> Array:
    """Logarithms of the times of runs, on a platform with slower resources."""
    where, times = (
        _scale(platform, names, slowness),
        np.zeros(sum(len(places) for *_, places in groups)),
    )
    for model, execution, strategies, places in groups:
        times[places] = price_strategies(model, where, strategies, execution, near=np.inf)["time"]
    return np.asarray(np.log(times))


def _find_widths(platform: Platform, dtype: str) -> dict[str, float]:
    """Standard deviation of the logarithm of each resource before the runs [-], from the fits of
    its kernels."""
    known = {
        "latency": SIGMA_START_UP,
        "host": math.log(find_host_error(platform)),
    } | dict.fromkeys(LINKS, SIGMA_TRANSFER)
    for name, kind in (("peak", "gemm"), ("memory", "elementwise")):
        fit: Fit | None = platform.context.find(kind, "")
        # no step was fitted in this number format
        if fit is None or (fit.dtypes and dtype not in fit.dtypes):
            fit = platform.kernels.get(f"{kind}.{dtype}") or platform.kernels.get(kind)
        known[name] = fit.spread if fit else SIGMA_TRANSFER
    return {
        name: math.hypot(known[name], _OTHERS) for name in list_resources(platform) if name in known
    }


def _list_strange(
    row: Mapping[str, Any], known: Sequence[Mapping[str, Any]], model: Transformer
) -> Iterator[str]:
    """Settings of a run that lie outside of all known runs."""
    for name in dict.fromkeys((*_FIELDS, *(key for own in (*known, row) for key in own))):
        if name != "seconds":
            usual = _FIELDS.get(name, getattr(model, name, None))
            value, others = row.get(name, usual), [own.get(name, usual) for own in known]
            sizes = all(isinstance(own, int | float) for own in (value, *others))
            if not (min(others) <= value <= max(others) if sizes else value in others):
                yield f"{name} {show(value)}"
