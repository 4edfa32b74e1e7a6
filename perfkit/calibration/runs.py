"""Calibrate with one's own runs: how much faster or slower each resource is than the platform says.

Scales of resources are fitted in logarithms. The platform is the prior: five runs change only the
scales that they tell something about.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from perfkit.calibration.cpu_context import expect_spread
from perfkit.fitting import Fit, Iteration
from perfkit.ground.forks import check_threads
from perfkit.ground.hardware import LINKS
from perfkit.ground.results import Picture, Table, Tabular, read_records
from perfkit.ground.units import Array, check_choice, check_positive, check_type, show
from perfkit.platform.collective_costs import SIGMA_START_UP, SIGMA_TRANSFER
from perfkit.platform.estimates import find_interval, warn_once
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.whatif import list_resources
from perfkit.prediction.strategies import price_strategies
from perfkit.prediction.uncertainty import find_host_error
from perfkit.readers.training_logs import list_rows
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: Fewest runs [-]; docs/formulas.md, table 4.4.
_FEWEST = 5
#: Deviation of a resource between programs [-]; docs/formulas.md, table 4.4.
_OTHERS = 0.1
#: Usual spread of runs around a fit [-]; docs/formulas.md, table 4.4.
_USUAL = 0.08
#: A time whose error is larger than so many usual spreads counts less; docs/formulas.md, tables 4.3
#: and 4.4.
_FAR = 2.5
#: Change of the logarithm of a scale that slopes are computed with [-].
_STEP = 0.01
_FIELDS = {own.name: own.default for own in fields(Strategy)}
_SIZES = {own.name for own in fields(Transformer)} - {"family", *_FIELDS}
#: Columns of a table of runs that perfkit has written, which is read as runs again; `predicted` is
#: the former name of `predicted_s`.
_WRITTEN = ("predicted_s", "untuned_s", "left_out", "predicted")


class _Group(NamedTuple):
    """Runs that are priced together: their model with all batches, their execution and software,
    all their strategies, and their positions among all runs."""

    model: Transformer
    execution: str | None
    stack: str | None
    strategies: Strategy
    positions: Array


class LogFit(NamedTuple):
    """Parameters of a model in logarithms.

    Parameters
    ----------
    parameters : array
        Fitted parameters [-].
    covariance : array
        Their covariance [-].
    slopes : array
        Changes of the logarithms of times with each parameter, before the last step [-].
    errors : array
        Logarithms of modelled over measured times, before the last step [-].
    weights : array
        Weights of the times, before the last step [-].
    """

    parameters: Array
    covariance: Array
    slopes: Array
    errors: Array
    weights: Array


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
) -> LogFit:
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
    fit : LogFit
        Parameters with their covariance.
    """
    # By hand: scipy.optimize.least_squares knows no prior and would need it as rows of the
    # residuals, whose robust loss would then weigh it, too. Each evaluation prices whole programs,
    # and eight steps are enough here.
    parameters = mean.astype(float)
    prior_information = np.diag(1 / np.square(width))
    for _ in range(most):
        here = evaluate(parameters)
        errors = here - logs
        slopes = find_slopes(evaluate, parameters, here, step)
        # Huber's weights: errors far beyond the usual ones count less
        share = np.minimum(1.0, _FAR * usual / np.maximum(np.abs(errors), 1e-9))
        weights = trust * share / np.square(usual)
        information = slopes.T @ (slopes * weights[:, None]) + prior_information
        covariance = np.linalg.inv(information)
        gradient = slopes.T @ (errors * weights) + prior_information @ (parameters - mean)
        change = np.clip(-covariance @ gradient, -0.3, 0.3)
        parameters = parameters + change
        if np.abs(change).max() < within:
            break
    return LogFit(parameters, covariance, slopes, errors, weights)


def find_slopes(
    evaluate: Callable[[Array], Array], values: Array, here: Array, step: float
) -> Array:
    """Change of each result with each parameter, from one step of the parameter beyond the values
    whose results are `here`."""
    slopes = []
    for change in step * np.eye(len(values)):
        slopes.append((evaluate(values + change) - here) / step)
    return np.stack(slopes, axis=1)


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

    report_title = "A platform with resources fitted to runs"

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
            Columns as given; predicted_s [s]; untuned_s, what the platform predicted before the fit
            [s]; left_out, the relative error of a fit without this run [-].
        """
        return self.frame

    def chart(self) -> Picture:
        """Chart of predicted against measured times: before the fit, and by a fit to the other runs."""
        from perfkit import plots

        rows = []
        for number, run in enumerate(self.frame.to_dicts()):
            shared = {"name": f"run {number}", "measured_s": run["seconds"]}
            rows.append({**shared, "family": "before", "predicted_s": run["untuned_s"]})
            tuned_time = run["seconds"] * (1 + run["left_out"])
            low, high = find_interval(tuned_time, self.spread, 0.8)
            tuned = {"predicted_s": tuned_time, "low_s": float(low), "high_s": float(high)}
            rows.append({**shared, "family": "fit to the others", **tuned})
        return plots.predicted_vs_measured(
            rows, title="Runs before the fit, and by a fit to the others"
        )

    @property
    def error(self) -> float:
        """Mean error of runs left out [-]."""
        return float(np.mean(np.abs(self.frame["left_out"].to_numpy())))

    def price(self, runs: Any) -> Table:
        """Predict runs, and name settings that no fitted run has.

        Parameters
        ----------
        runs : DataFrame or sequence of dict or TrainingLog
            Columns as of `tune`, without seconds.

        Returns
        -------
        frame : polars.DataFrame
            Columns as given; predicted_s, with low_s and high_s, the ends of its 80 % interval [s];
            ``beyond``, settings outside of the fitted runs; ``gain``: if this run is measured too, the share by
            which the variance of all these predictions falls, as far as it comes from the scales
            [-].
        """
        rows, known = _read(runs, self.model), _read(self.frame, self.model)
        groups = list(_group(self.model, rows))
        evaluate = partial(_evaluate, groups, self.platform, self.scales["resource"].to_list())
        unchanged = np.zeros(len(self.scales))
        here = evaluate(unchanged)
        times = np.exp(here)
        slopes = find_slopes(evaluate, unchanged, here, _STEP)
        covariances = slopes @ self.covariance @ slopes.T
        variances = np.diag(covariances)
        # what a measurement of one run says about all others
        falls = np.square(covariances).sum(axis=0) / (self.spread**2 + variances)
        gain = falls / max(variances.sum(), 1e-12)
        low, high = find_interval(times, np.hypot(self.spread, np.sqrt(variances)), 0.8)
        beyond = [", ".join(_list_strange(row, known, self.model)) for row in rows]
        texts = dict.fromkeys(text for text in beyond if text)
        warn_once(tuple(f"no run that was fitted has {text}; measure one" for text in texts), 3)
        columns = {
            "predicted_s": times,
            "low_s": low,
            "high_s": high,
            "beyond": beyond,
            "gain": gain,
        }
        return _frame(rows, columns)

    def headline(self) -> str:
        """The result in one line, see `perfkit.ground.results.Reported.headline`."""
        scales = ", ".join(f"{name} x {scale:.2f}" for name, scale, *_ in self.scales.rows())
        return f"{len(self.frame)} runs, {self.error:.1%} off when left out: {scales}"

    def __repr__(self) -> str:
        return self.headline()


def tune(model: Transformer, platform: Named, runs: Any) -> Tuning:
    """Fit the speed of each resource of a platform to runs that were measured on it.

    Parameters
    ----------
    model : Transformer
        Model of all runs.
    platform : Platform, str or Path
        Platform of the runs.
    runs : DataFrame or sequence of dict or TrainingLog
        A row for each of at least 5 runs: ``seconds`` of an iteration; the fields of
        `perfkit.workloads.strategy.Strategy` and of the model that differ between runs;
        ``execution``; ``stack``, the software. Logs of training that `perfkit.read_training_log`
        read are such rows, too.

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
    where, rows = load_platform(platform), _read(runs, model)
    if len(rows) < _FEWEST:
        raise ValueError(
            f"runs are {len(rows)}; fit at least {_FEWEST}, of which some differ in strategy; a single one corrects a "
            "platform by predict(...).against(seconds).correct()"
        )
    logs = np.log([check_positive("seconds", row.get("seconds")) for row in rows])
    widths = _find_widths(where, model.dtype)
    names = list(widths)
    width = np.array(list(widths.values()))
    evaluate = partial(_evaluate, list(_group(model, rows)), where, names)
    fit = fit_logs(
        evaluate, logs, np.zeros(len(names)), width, usual=_USUAL, step=_STEP, within=3e-3, most=8
    )
    variances = np.einsum("ij,jk,ik->i", fit.slopes, fit.covariance, fit.slopes)
    leverage = np.minimum(fit.weights * variances, 0.99)
    untuned = evaluate(np.zeros(len(names)))
    times = evaluate(fit.parameters)
    left_out = (times - logs) / (1 - leverage)
    spread = expect_spread(left_out.tolist(), model.family)
    scaled = _scale(where, names, fit.parameters)
    context = replace(
        scaled.context,
        iterations=_replace_spread(scaled.context.iterations, model.family, spread),
        parallel=_replace_spread(scaled.context.parallel, model.family, spread),
    )
    scales = {
        "resource": names,
        "scale": np.exp(-fit.parameters),
        "spread": np.sqrt(np.diag(fit.covariance)),
        "before": width,
    }
    columns = {
        "predicted_s": np.exp(times),
        "untuned_s": np.exp(untuned),
        "left_out": np.exp(left_out) - 1,
    }
    frame = _frame(rows, columns)
    tuned = replace(scaled, context=context)
    return Tuning(tuned, frame, pl.DataFrame(scales), spread, model, fit.covariance)


def _replace_spread(
    fits: Mapping[str, Iteration], family: str, spread: float
) -> dict[str, Iteration]:
    """The fits of all families, where that of one family has this spread."""
    replaced = dict(fits)
    if family in replaced:
        replaced[family] = replace(replaced[family], spread=spread)
    return replaced


def _frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> Table:
    """Rows as they were given, and more columns; whole and other numbers of a column become
    numbers."""
    given = {}
    for name in _list_names(rows):
        given[name] = [row.get(name) for row in rows]
    return pl.DataFrame({**given, **columns}, strict=False)


def _list_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of all columns, each once, in the order in which rows have them."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return list(names)


def _read(runs: Any, model: Transformer) -> list[dict[str, Any]]:
    """Rows of any frame, dicts or training logs, without empty cells."""
    rows = read_records("runs", list_rows(runs, model))
    known = [*_FIELDS, *_SIZES, "execution", "stack", "seconds"]
    for name in _list_names(rows):
        check_choice("column of runs", name, [*known, *_WRITTEN])
    settings = []
    for row in rows:
        stated = {name: row[name] for name in row if row[name] is not None and name in known}
        settings.append(stated)
    return settings


def _group(model: Transformer, rows: Sequence[Mapping[str, Any]]) -> Iterator[_Group]:
    """Runs of models that differ only in their batch."""
    positions_by_kind: dict[Any, list[int]] = {}
    for position, row in enumerate(rows):
        sizes = {name: row[name] for name in row if name in _SIZES and name != "batch"}
        kind = (replace(model, **sizes), row.get("execution"), row.get("stack"))
        positions_by_kind.setdefault(kind, []).append(position)
    for (same_model, execution, stack), positions in positions_by_kind.items():
        strategies = [_read_strategy(rows[position]) for position in positions]
        batches = np.array([rows[position].get("batch", model.batch) for position in positions])
        yield _Group(
            replace(same_model, batch=batches),
            execution,
            stack,
            Strategy.stack(strategies),
            np.array(positions),
        )


def _read_strategy(row: Mapping[str, Any]) -> Strategy:
    """The strategy of a run."""
    return Strategy(**{name: row.get(name, default) for name, default in _FIELDS.items()})


def _scale(platform: Platform, names: Sequence[str], slowness: Array) -> Platform:
    """The platform with resources that are slower by these logarithms."""
    return platform.with_scale(**dict(zip(names, np.exp(-slowness).tolist(), strict=True)))


def _evaluate(
    groups: Sequence[_Group], platform: Platform, names: Sequence[str], slowness: Array
) -> Array:
    """Logarithms of the times of runs, on a platform with slower resources."""
    where = _scale(platform, names, slowness)
    times = np.zeros(sum(len(group.positions) for group in groups))
    for group in groups:
        priced = price_strategies(
            group.model,
            where,
            group.strategies,
            group.execution,
            near=np.inf,
            stack=group.stack,
        )
        times[group.positions] = priced["time"]
    return np.asarray(np.log(times))


def _find_widths(platform: Platform, dtype: str) -> dict[str, float]:
    """Standard deviation of the logarithm of each resource before the runs [-], from the fits of
    its kernels."""
    known = dict.fromkeys(LINKS, SIGMA_TRANSFER)
    known["latency"] = SIGMA_START_UP
    known["host"] = math.log(find_host_error(platform))
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
    for name in dict.fromkeys((*_FIELDS, *_list_names([*known, row]))):
        if name == "seconds":
            continue
        usual = _FIELDS.get(name, getattr(model, name, None))
        value = row.get(name, usual)
        others = [other.get(name, usual) for other in known]
        if all(isinstance(number, int | float) for number in (value, *others)):
            is_known = min(others) <= value <= max(others)
        else:
            is_known = value in others
        if not is_known:
            yield f"{name} {show(value)}"
