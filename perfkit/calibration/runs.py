"""Calibrate with runs of one's own: how much faster or slower each resource is than the platform says.

Scales of resources are fitted in logarithms, with what the platform knows as a prior, so that five runs move what they
tell of and leave the rest where it was.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from perfkit.calibration.context import expect_spread
from perfkit.ground.results import Table, Tabular, read_records
from perfkit.ground.units import Array, check_choice, check_positive, check_type, show
from perfkit.platform.collectives import MOVE, START
from perfkit.platform.estimates import find_interval, warn_once
from perfkit.platform.gallery import Named, load_platform
from perfkit.platform.platform import Platform
from perfkit.platform.resources import list_resources
from perfkit.prediction.strategies import price_strategies
from perfkit.prediction.uncertainty import find_host_error
from perfkit.workloads.strategy import Strategy
from perfkit.workloads.transformer import Transformer

#: Fewest runs, deviation of a resource in other programs than those that the platform was calibrated with [-], the
#: spread of runs beside a fit, and beyond how many of these a run counts less; docs/formulas.md, table 4.4.
_FEWEST, _OTHERS, _USUAL, _FAR = 5, 0.1, 0.08, 2.5
_FIELDS = {own.name: own.default for own in fields(Strategy)}
_SIZES = {own.name for own in fields(Transformer)} - {"family", *_FIELDS}
_Group = tuple[Transformer, str | None, Strategy, Array]


@dataclass(frozen=True)
class Tuning(Tabular):
    """A platform whose resources were fitted to runs.

    Parameters
    ----------
    platform : Platform
        With the scales, and the spread of runs left out.
    frame : polars.DataFrame
        See `table`.
    scales : polars.DataFrame
        By resource how many times as fast it is, standard deviation of the logarithm, and before the runs [-].
    spread : float
        Standard deviation of the logarithm of a run that was left out [-].
    model : Transformer
        What runs have in common.
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
            Columns as given; predicted [s]; left_out, its relative error by the fit to all other runs [-].
        """
        return self.frame

    @property
    def error(self) -> float:
        """Mean error of runs left out [-]."""
        return float(np.mean(np.abs(self.frame["left_out"].to_numpy())))

    def price(self, runs: Any) -> Table:
        """Predict runs, and say which were never tried before.

        Parameters
        ----------
        runs : DataFrame or sequence of dict
            Columns as of `tune`, without seconds.

        Returns
        -------
        frame : polars.DataFrame
            Columns as given; predicted with low and high end of its 80 % interval [s]; ``beyond``, what is outside of
            the runs that were fitted; ``gain``, by how much measuring this one would lower the variance that fitted
            scales leave in all of these [-].
        """
        rows, known = _read(runs), _read(self.frame)
        groups, names = list(_group(self.model, rows)), self.scales["resource"].to_list()
        times, slopes = _evaluate(groups, self.platform), _find_slopes(groups, self.platform, names)
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
    """Fit how fast the resources of a platform are to runs that were measured on it.

    Parameters
    ----------
    model : Transformer
        What all runs have in common.
    platform : Platform, str or Path
        Where they ran.
    runs : DataFrame or sequence of dict
        A row for each of at least 5 runs: ``seconds`` of an iteration; fields of `perfkit.workloads.strategy.Strategy`
        and of the model that are not always the same; ``execution``.

    Returns
    -------
    tuning : Tuning
        The platform as the runs have it, which `perfkit.exploration.strategies.explore` takes too.

    Raises
    ------
    ValueError
        For fewer runs, unknown columns, and times that are not above 0.

    Notes
    -----
    Minimises squared logarithms of predicted over measured times, in units of the usual spread, and of scales over
    their priors: what the platform's fits leave open, and 10 % between programs. Runs that are far off count less.
    Errors of runs left out follow from their leverage.

    Examples
    --------
    >>> import perfkit as pk
    >>> gpt = pk.Transformer.preset("gpt3-1.3b", batch=64, sequence=1024, dtype="bf16", fused=True)
    >>> runs = [{"tp": tp, "dp": 8 // tp, "micro_batch": n, "seconds": 3 / n} for tp in (1, 2, 4) for n in (1, 2)]
    >>> len(pk.tune(gpt, "a100-sxm-8", runs).table())
    6
    """
    check_type("model", model, Transformer)
    where, rows = load_platform(platform), _read(runs)
    if len(rows) < _FEWEST:
        raise ValueError(f"runs are {len(rows)}; fit at least {_FEWEST}, of which some differ in strategy")
    logs = np.log([check_positive("seconds", row.get("seconds")) for row in rows])
    groups, widths = list(_group(model, rows)), _find_widths(where, model.dtype)
    names, found, trust, now = list(widths), np.zeros(len(widths)), np.ones(len(rows)), where
    before = np.diag(1 / np.square([*widths.values()]))
    for _ in range(8):
        slopes, errors = _find_slopes(groups, now, names), np.log(_evaluate(groups, now)) - logs
        trust = np.minimum(1.0, _FAR * _USUAL / np.maximum(np.abs(errors), 1e-9)) / _USUAL**2
        inverse = np.linalg.inv(slopes.T @ (slopes * trust[:, None]) + before)
        change = np.clip(-inverse @ (slopes.T @ (errors * trust) + before @ found), -0.3, 0.3)
        found += change
        now = where.with_scale(**dict(zip(names, np.exp(-found).tolist(), strict=True)))
        if np.abs(change).max() < 3e-3:
            break
    times = _evaluate(groups, now)
    leverage = np.minimum(trust * np.einsum("ij,jk,ik->i", slopes, inverse, slopes), 0.99)
    left_out = (np.log(times) - logs) / (1 - leverage)
    spread = expect_spread(left_out.tolist(), model.family)
    whole = {"iterations": now.context.iterations, "parallel": now.context.parallel}
    wide: Any = {name: {key: replace(fit, spread=spread) if key == model.family else fit for key, fit in own.items()}
                 for name, own in whole.items()}  # fmt: skip
    scales = {"resource": names, "scale": np.exp(-found), "spread": np.sqrt(np.diag(inverse)),
              "before": [*widths.values()]}  # fmt: skip
    frame = _frame(rows, {"predicted": times, "left_out": np.exp(left_out) - 1})
    now = replace(now, context=replace(now.context, **wide))
    return Tuning(now, frame, _frame([{}] * len(names), scales), spread, model, inverse)


def _frame(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> Table:
    import polars

    given = {name: [row.get(name) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)}
    return polars.DataFrame({**given, **columns}, strict=False)  # some rows may have whole numbers


def _read(runs: Any) -> list[dict[str, Any]]:
    """Rows of a frame of any kind, or dicts, without what is empty."""
    rows, known = read_records("runs", runs), [*_FIELDS, *_SIZES, "execution", "seconds"]
    for name in dict.fromkeys(key for row in rows for key in row):
        check_choice("column of runs", name, [*known, "predicted", "left_out"])
    return [{name: value for name, value in row.items() if value is not None and name in known} for row in rows]


def _group(model: Transformer, rows: Sequence[Mapping[str, Any]]) -> Iterator[_Group]:
    """Runs of models that differ in their batch alone, with their places."""
    kinds: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        own = {name: value for name, value in row.items() if name in _SIZES and name != "batch"}
        kinds.setdefault((replace(model, **own), row.get("execution")), []).append(place)
    for (kind, execution), places in kinds.items():
        strategies = [Strategy(**{key: rows[n].get(key, value) for key, value in _FIELDS.items()}) for n in places]
        batch = np.array([rows[n].get("batch", model.batch) for n in places])
        yield replace(kind, batch=batch), execution, Strategy.stack(strategies), np.array(places)


def _evaluate(groups: Sequence[_Group], platform: Platform) -> Array:
    times = np.zeros(sum(len(places) for *_, places in groups))
    for model, execution, strategies, places in groups:
        times[places] = price_strategies(model, platform, strategies, execution)["time"]
    return times


def _find_slopes(groups: Sequence[_Group], platform: Platform, names: Sequence[str]) -> Array:
    """By how much the logarithm of each time grows with that of each resource's slowness [-]."""
    here, step = np.log(_evaluate(groups, platform)), 0.01
    each = (np.log(_evaluate(groups, platform.with_scale(**{name: math.exp(-step)}))) for name in names)
    return np.stack([(own - here) / step for own in each], axis=1)


def _find_widths(platform: Platform, dtype: str) -> dict[str, float]:
    """Deviation of the logarithm of each resource before runs are seen [-]: what fits of its kernels leave open."""
    known = {"intra": MOVE, "inter": MOVE, "latency": START, "host": math.log(find_host_error(platform))}
    for name, kind in (("peak", "gemm"), ("memory", "elementwise")):
        fit = platform.context.find(kind, "")
        if fit is None or (fit.dtypes and dtype not in fit.dtypes):  # whole steps say nothing of this format
            fit = platform.kernels.get(f"{kind}.{dtype}") or platform.kernels.get(kind)
        known[name] = fit.spread if fit else MOVE
    return {name: math.hypot(known[name], _OTHERS) for name in list_resources(platform) if name in known}


def _list_strange(row: Mapping[str, Any], known: Sequence[Mapping[str, Any]], model: Transformer) -> Iterator[str]:
    """What a run has that is outside of all known ones."""
    for name in dict.fromkeys((*_FIELDS, *(key for own in (*known, row) for key in own))):
        if name != "seconds":
            usual = _FIELDS.get(name, getattr(model, name, None))
            value, others = row.get(name, usual), [own.get(name, usual) for own in known]
            sizes = all(isinstance(own, int | float) for own in (value, *others))
            if not (min(others) <= value <= max(others) if sizes else value in others):
                yield f"{name} {show(value)}"
