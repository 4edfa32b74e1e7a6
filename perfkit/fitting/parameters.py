"""Fits: parameters of a model with standard errors, range and origin; and what a fit of a
collective predicts."""

import html
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from perfkit.ground.units import Array, Typed, Values, format_table, format_time, significant
from perfkit.models import collectives as forms
from perfkit.models.collectives import OPERATIONS

#: Exponent with which the spread of kernels falls with their time [-]; docs/formulas.md, table 9.1.
SPREAD_SLOPE = 0.2
#: Spread [-] where all of a start-up turns into transfer, or the reverse, beyond the fitted sizes;
#: docs/formulas.md, table 1.3.
CHANGE = 0.6
_STEP = 1e-4  # relative step of numerical slopes
#: Algorithms of collectives; ``rail`` is one rank of each node, over the network between nodes.
ALGORITHMS = ("ring", "tree", "in_network", "two_level", "rail")
_COLLECTIVE = re.compile(rf"(?:([2-9]|[1-9][0-9]+)|any)(?:\.({'|'.join(ALGORITHMS)}))?", re.ASCII)


class Key(NamedTuple):
    """Name of a fit in a platform: ``<operation>.<ranks or any>[.<algorithm>]`` or
    ``<kind>[.<variant>]``.

    Examples
    --------
    >>> Key.parse("all_gather.any.rail").algorithm, Key.parse("gemm.fp8").variant, str(Key("all_reduce", 8))
    ('rail', 'fp8', 'all_reduce.8')
    """

    operation: str  # a collective, or a class of kernels
    ranks: int | None = None  # None for a law over all counts, and for kernels
    algorithm: str = ""  # one of `ALGORITHMS`; empty where the library chooses
    variant: str = ""  # finer class of kernels, or number format

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str, *, collective: bool = False) -> "Key":
        """Read a name such as ``all_reduce.8`` or ``gemm.nt``; a ValueError says how a collective
        is named."""
        operation, _, rest = text.partition(".")
        if operation not in OPERATIONS and not collective:
            return cls(operation, variant=rest)
        match = _COLLECTIVE.fullmatch(rest)
        if match is None or operation not in OPERATIONS:
            rule = f"<operation>.<ranks or any>[.<algorithm>], such as all_reduce.8; known are {', '.join(OPERATIONS)}"
            raise ValueError(
                f"collective {text!r} must be {rule} and the algorithms {', '.join(ALGORITHMS)}"
            )
        return cls(operation, int(match[1]) if match[1] else None, match[2] or "")

    def __str__(self) -> str:
        collective = self.operation in OPERATIONS
        return ".".join(
            filter(None, (self.operation, str(self.ranks or "any") * collective, *self[2:]))
        )


@dataclass(frozen=True)
class Fit(Typed, Mapping[str, float]):
    """Parameters of one model form: a mapping, so that ``model(x, **fit)`` closes the loop.

    Parameters
    ----------
    form : str
        Name of the model the parameters belong to, for example ``pipelined`` [-].
    parameters : mapping of str to float
        Keyword arguments of the model, each in the unit given in `units`.
    stderr : mapping of str to float, optional
        Standard errors; a parameter without one was kept fixed or stopped at a bound.
    spread : float, optional
        Standard deviation of the log residuals, on held-out points where there are any [-].
    bias : float, optional
        Mean of the log residuals, measured over predicted [-].
    ranges : mapping of str to (low, high), optional
        Measured range of each swept variable, in base units.
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
        Parameters that stopped at a bound of the fit; terms that stopped at zero are not among the
        parameters.
    spread_time : float, optional
        Predicted time at which `spread` holds, see `spread_at`; None where it holds at all times
        [s].
    dtypes : tuple of str, optional
        Number formats that were measured; empty where unknown [-].
    stands_for : str, optional
        Class of kernels that was not measured and takes this fit instead [-].
    transferred : tuple of str, optional
        Machines or formats that the fit was carried over from, and what changed, the latest first
        [-].
    quality : str, optional
        ``poor`` where measurements scatter widely around the form, else empty [-].
    sources : tuple of str, optional
        Files that were read [-].

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
    spread_time: float | None = None
    dtypes: tuple[str, ...] = ()
    stands_for: str = ""
    transferred: tuple[str, ...] = ()
    quality: str = ""
    sources: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __repr__(self) -> str:
        values = (
            f"{name}={value:.4g} {self.units.get(name, '')}".rstrip(" -")
            for name, value in self.items()
        )
        return f"Fit({self.form}: {', '.join(values)}; spread {self.spread:.0%}, n={self.n}, {self.kind})"

    def spread_at(self, seconds: Values) -> Array:
        r"""Spread of measurements around the prediction, for predicted times.

        Parameters
        ----------
        seconds : float or array
            Predicted times [s].

        Returns
        -------
        spread : array
            Standard deviation of log(measured / predicted) [-]. With a `spread_time` it is larger
            for shorter times and smaller for longer ones, from half to three times `spread`.

        Notes
        -----
        .. math:: s(t) = s \, (t / t_s)^{-0.2}

        Launches, tiles and waves that do not fill the device make short kernels less predictable.
        Long kernels share one error, the power cap, so their spread stops at a half. Evidence:
        docs/formulas.md, table 9.1.

        Examples
        --------
        >>> fit = Fit("roofline", {"launch": 4e-6}, spread=0.1, spread_time=1e-4)
        >>> fit.spread_at([4e-6, 1e-4, 1.0]).round(3)
        array([0.19, 0.1 , 0.05])
        """
        times = np.asarray(seconds, dtype=float)
        if self.spread_time is None:
            return np.full(times.shape, self.spread)
        share = np.maximum(times, 1e-12) / self.spread_time
        return np.asarray(self.spread * np.clip(share**-SPREAD_SLOPE, 0.5, 3.0))

    def report(self) -> str:
        """Describe the fit in a few lines: values ± standard errors, range, residuals, origin,
        warnings."""
        rows = []
        for name, value in self.items():
            error, unit = (
                self.stderr.get(name, math.nan),
                self.units.get(name, "-").removeprefix("-"),
            )
            known = math.isfinite(error)
            share = f" ({abs(error / value):.1%})" if value else ""
            shown = significant(value, error) if known else f"{value:.4g}"
            rows.append(
                (
                    name,
                    f"{shown} {unit}",
                    f"± {error:.2g}{share}" if known else "(no standard error)",
                )
            )
        where = "" if self.spread_time is None else f" at {format_time(self.spread_time)}"
        facts = [
            f"residual spread {self.spread:.1%}{where}, bias {self.bias:+.1%}, {self.n} points, {self.kind}"
        ]
        facts += [
            f"valid for {name} from {low:.4g} to {high:.4g}"
            for name, (low, high) in self.ranges.items()
        ]
        facts += (
            [f"source: {' '.join((self.source, self.date)).strip()}"]
            if self.source or self.date
            else []
        )
        facts += [f"warning: {name} is at a bound of the fit" for name in self.at_bounds]
        facts += [f"note: transferred from {text}" for text in self.transferred]
        facts += [f"note: {text}" for text in self.notes]
        return "\n  ".join(
            [f"[{self.form}]", *(format_table(rows).split("\n") if rows else ()), *facts]
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.report())}</pre>"


def evaluate_collective(
    fit: Fit, nbytes: Values, operation: str, ranks: int, **changed: float
) -> Array:
    """Times [s] of a fitted collective for message sizes [B]; `changed` replaces parameters of the
    fit.

    Only a law over rank counts needs the operation and the ranks.

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


def _find_slopes(fit: Fit, nbytes: Array, operation: str, ranks: int) -> tuple[Array, Array]:
    """Changes of the logarithm of time: by one standard error of each parameter, and per logarithm
    of the size."""
    base, errors = np.log(evaluate_collective(fit, nbytes, operation, ranks)), []
    for name, error in fit.stderr.items():
        if (value := fit[name]) > 0:
            moved = np.log(
                evaluate_collective(fit, nbytes, operation, ranks, **{name: value * (1 + _STEP)})
            )
            errors.append((moved - base) * (error / (_STEP * value)))
    elastic = (
        np.log(evaluate_collective(fit, nbytes * (1 + _STEP), operation, ranks)) - base
    ) / _STEP
    return np.stack(errors) if errors else np.zeros((1, *nbytes.shape)), elastic


def spread_beyond(fit: Fit, nbytes: Values, operation: str, ranks: int) -> Array:
    r"""Spread of measurements around a fitted collective, inside and outside its measured sizes.

    It takes what `evaluate_collective` takes, and returns the standard deviation of log(measured /
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
    errors, elastic = _find_slopes(fit, sizes, operation, ranks)
    change = elastic - _find_slopes(fit, np.clip(sizes, low, high), operation, ranks)[1]
    beyond = np.sqrt(spread**2 + np.sum(errors**2, axis=0) + (CHANGE * change) ** 2)
    return np.where((sizes < low) | (sizes > high), beyond, spread)


def choose_sample(fit: Fit, nbytes: float, operation: str, ranks: int) -> float:
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
    errors, elastic = _find_slopes(fit, sizes, operation, ranks)
    noise = max(fit.spread, 0.01) ** 2
    learnt = np.sum(errors * errors[:, -1:], axis=0) ** 2 / (np.sum(errors**2, axis=0) + noise)
    learnt[0] = 0.0  # the last fitted size is no new sample
    gain = learnt - (CHANGE * (elastic[-1] - elastic)) ** 2
    return float(sizes[1:][np.argmax(gain[1:] - gain[0] >= 0.95 * (gain[-1] - gain[0]))])
